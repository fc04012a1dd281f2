"""Recomputation happens, costs what it must, and stores what it promises: counted in FLOPs and bytes."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_memopt.checkpointing import (
    BitSpikeCompressor,
    BooleanSpikeCompressor,
    SpikeCompressor,
    Uint8SpikeCompressor,
    checkpoint,
    checkpoint_module,
    unwrap_module,
)
from lightning_memopt.measuring import measure_memory
from tests.equality import backward_of_outputs

SAMPLES, FEATURES = 64, 256
LAYER_FLOPS = 2 * SAMPLES * FEATURES * FEATURES


def flops(step: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    total: int = counter.get_total_flops()
    return total


def mlp(layers: int = 3) -> nn.Sequential:
    """Products with a nonlinearity after each, so that every product's output is needed for backward."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(FEATURES, FEATURES), nn.Tanh()]
    return nn.Sequential(*parts)


def spikes(density: float = 0.5) -> Tensor:
    return (torch.rand(SAMPLES, FEATURES) < density).float().requires_grad_()


def saved_storages(forward: Callable[[], Any], *not_counted: nn.Module) -> tuple[Any, dict[int, int]]:
    """What a forward returns, and the bytes of each distinct storage that autograd keeps for it beside parameters."""
    skip = {p.untyped_storage().data_ptr() for module in not_counted for p in module.parameters()}
    seen: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, seen


def saved_bytes(forward: Callable[[], Any], *not_counted: nn.Module) -> int:
    return sum(saved_storages(forward, *not_counted)[1].values())


# FLOPs ----------------------------------------------------------------------------------------------------------------


def test_a_plain_backward_costs_two_products_per_layer() -> None:
    model, x = mlp(), spikes()
    y = model(x)
    assert flops(lambda: backward_of_outputs(y)) == 6 * LAYER_FLOPS


@pytest.mark.parametrize("compressor", [None, BitSpikeCompressor()])
def test_backward_of_a_region_costs_its_forward_exactly_once_more(compressor: Any) -> None:
    model, x = checkpoint_module(mlp(), compressor=compressor), spikes()
    forward = flops(lambda: model(x))
    y = model(x)
    backward = flops(lambda: backward_of_outputs(y))
    assert forward == 3 * LAYER_FLOPS
    assert backward == (6 + 3) * LAYER_FLOPS


def test_checkpoint_of_a_function_recomputes_it_once() -> None:
    model, x = mlp(), spikes()
    y = checkpoint(model, x)
    assert flops(lambda: backward_of_outputs(y)) == (6 + 3) * LAYER_FLOPS


def test_only_the_treated_layers_are_recomputed() -> None:
    model, x = mlp(), spikes()
    middle = nn.Sequential(model[0], model[1], checkpoint_module(nn.Sequential(model[2], model[3])), model[4], model[5])
    y = middle(x)
    assert flops(lambda: backward_of_outputs(y)) == (6 + 1) * LAYER_FLOPS


def test_a_product_alone_is_not_recomputed_because_its_gradients_need_its_input_only() -> None:
    model, x = mlp(), spikes()
    checkpoint_module(model[2])
    y = model(x)
    assert flops(lambda: backward_of_outputs(y)) == 6 * LAYER_FLOPS


def test_regions_inside_a_region_are_recomputed_once_more_each() -> None:
    model, x = mlp(), spikes()
    inner = [checkpoint_module(nn.Sequential(model[i], model[i + 1])) for i in (0, 2, 4)]
    outer = checkpoint_module(nn.Sequential(*inner))
    y = outer(x)
    backward = flops(lambda: backward_of_outputs(y))
    assert backward == (6 + 3 + 3) * LAYER_FLOPS


def test_time_chunks_cost_the_flops_of_the_whole() -> None:
    model: Any = checkpoint_module(mlp(), chunks=4)
    x = spikes()
    model(x)  # the proof that chunks are safe is part of the first call only
    y = None

    def forward() -> None:
        nonlocal y
        y = model(x)

    assert flops(forward) == 3 * LAYER_FLOPS
    assert flops(lambda: backward_of_outputs(y)) == (6 + 3) * LAYER_FLOPS


def test_the_products_of_cheap_pieces_do_not_run_again() -> None:
    block, x = mlp(2), torch.randn(SAMPLES, 4, FEATURES, requires_grad=True)
    plain = flops(lambda: block(x).sum().backward())
    checkpoint_module(block, chunks=4, check_chunks=False)
    again = flops(lambda: block(x).sum().backward()) - plain
    for cheap in (1, 3):
        checkpoint_module(block, chunks=4, cheap_chunks=cheap, check_chunks=False)
        assert flops(lambda: block(x).sum().backward()) - plain == again * (4 - cheap) // 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chunks": 4, "cheap_chunks": 4}, ValueError, "below chunks, which is 4; got 4"),
        ({"cheap_chunks": 1}, ValueError, "below chunks, which is 1; got 1"),
        ({"chunks": 4, "cheap_chunks": True}, TypeError, "must be an int, got True"),
        ({"chunks": 4, "cheap_chunks": 1, "treatment": "pack"}, ValueError, "chunks, cheap_chunks: only for"),
    ],
)
def test_cheap_pieces_that_cannot_be_are_refused_in_words(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        checkpoint_module(mlp(), **options)


def test_a_second_backward_on_a_retained_graph_recomputes_at_most_once_more() -> None:
    model, x = checkpoint_module(mlp()), spikes()
    loss = model(x).sum()
    first = flops(lambda: loss.backward(retain_graph=True))
    second = flops(lambda: loss.backward())
    assert first == 9 * LAYER_FLOPS
    assert second in (6 * LAYER_FLOPS, 9 * LAYER_FLOPS)


def test_nothing_is_recomputed_without_gradients_or_after_unwrapping() -> None:
    model, x = checkpoint_module(mlp()), spikes()
    with torch.no_grad():
        assert flops(lambda: model(x)) == 3 * LAYER_FLOPS
    y = unwrap_module(model)(x)
    assert flops(lambda: backward_of_outputs(y)) == 6 * LAYER_FLOPS


def test_a_forward_that_is_not_backpropagated_recomputes_nothing() -> None:
    model, x = checkpoint_module(mlp()), spikes()

    def drop() -> None:
        y = model(x)
        del y
        gc.collect()

    assert flops(drop) == 3 * LAYER_FLOPS


def test_a_region_whose_inputs_and_weights_need_no_gradient_is_not_recomputed() -> None:
    model = checkpoint_module(mlp()).requires_grad_(False)
    head = nn.Linear(FEATURES, FEATURES)
    y = head(model(spikes().detach()))
    assert flops(lambda: backward_of_outputs(y)) == LAYER_FLOPS


# Bytes ----------------------------------------------------------------------------------------------------------------

FACTORS: list[tuple[Any, torch.dtype, int]] = [
    (BitSpikeCompressor, torch.float32, 32),
    (BitSpikeCompressor, torch.float64, 64),
    (BitSpikeCompressor, torch.bfloat16, 16),
    (BitSpikeCompressor, torch.float16, 16),
    (BooleanSpikeCompressor, torch.float32, 4),
    (Uint8SpikeCompressor, torch.float32, 4),
    (Uint8SpikeCompressor, torch.bfloat16, 2),
]


@pytest.mark.parametrize(("compressor", "dtype", "factor"), FACTORS)
def test_a_region_stores_its_packed_input_and_nothing_else(
    compressor: type[SpikeCompressor], dtype: torch.dtype, factor: int
) -> None:
    model = checkpoint_module(mlp().to(dtype), compressor=compressor())
    x = spikes().detach().to(dtype).requires_grad_()
    assert saved_bytes(lambda: model(x), model) == x.nbytes // factor


def test_without_a_compressor_a_region_stores_its_input_and_nothing_else() -> None:
    model, x = checkpoint_module(mlp()), spikes()
    assert saved_bytes(lambda: model(x), model) == x.nbytes


def test_a_plain_model_stores_every_activation() -> None:
    model, x = mlp(), spikes()
    assert saved_bytes(lambda: model(x), model) == 4 * x.nbytes


def test_analog_inputs_are_stored_as_they_are() -> None:
    model = checkpoint_module(mlp(), compressor=BitSpikeCompressor())
    x = torch.randn(SAMPLES, FEATURES, requires_grad=True)
    assert saved_bytes(lambda: model(x), model) == x.nbytes


def test_checkpoint_of_a_function_packs_its_inputs() -> None:
    model, x = mlp(), spikes()
    assert saved_bytes(lambda: checkpoint(model, x, compressor=BitSpikeCompressor()), model) == x.nbytes // 32


@pytest.mark.parametrize("steps", [1, 3])
def test_packing_stays_the_same_over_steps(steps: int) -> None:
    model, x = checkpoint_module(mlp(), compressor=BitSpikeCompressor()), spikes()
    for _ in range(steps):
        y, saved = saved_storages(lambda: model(x), model)
        backward_of_outputs(y)
    assert sum(saved.values()) == x.nbytes // 32


def test_a_spiking_block_stores_packed_spikes_and_the_state_before_it() -> None:
    from spikingjelly.activation_based import neuron

    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), neuron.LIFNode(step_mode="m"))
    checkpoint_module(model, compressor=BitSpikeCompressor())
    x = (torch.rand(8, SAMPLES, FEATURES) > 0.5).float().requires_grad_()
    assert saved_bytes(lambda: model(x), model) == x.nbytes // 32
    # From the second call on, the carried potential [N, C] is an input of the region as well.
    model[1].detach()
    assert saved_bytes(lambda: model(x), model) <= x.nbytes // 32 + x[0].nbytes


def test_batch_norm_inside_a_region_adds_no_copy_of_its_statistics() -> None:
    model = checkpoint_module(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)))
    x = spikes()
    for _ in range(3):
        y, saved = saved_storages(lambda: model(x), model)
        backward_of_outputs(y)
    assert sum(saved.values()) == x.nbytes


# Lifetimes ------------------------------------------------------------------------------------------------------------


class Remembering(BitSpikeCompressor):
    """Keeps weak references to its payloads."""

    payloads: ClassVar[list[weakref.ref[Tensor]]] = []

    def compress_checked(self, tensor: Tensor) -> Any:
        compressed = super().compress_checked(tensor)
        self.payloads.append(weakref.ref(compressed.payload.data))
        return compressed


@pytest.fixture
def payloads() -> list[weakref.ref[Tensor]]:
    Remembering.payloads.clear()
    return Remembering.payloads


def alive(references: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def test_the_payload_is_freed_by_backward(payloads: list[weakref.ref[Tensor]]) -> None:
    model = checkpoint_module(mlp(), compressor=Remembering())
    y = model(spikes())
    assert alive(payloads) == 1
    backward_of_outputs(y)
    assert alive(payloads) == 0


def test_the_payload_is_freed_with_a_graph_that_is_dropped(payloads: list[weakref.ref[Tensor]]) -> None:
    model = checkpoint_module(mlp(), compressor=Remembering())
    y = model(spikes())
    del y
    assert len(payloads) == 1
    assert alive(payloads) == 0


def test_an_error_in_forward_keeps_nothing_alive(payloads: list[weakref.ref[Tensor]]) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError("on purpose")

    model = checkpoint_module(Fails(), compressor=Remembering())
    x = spikes()
    reference = weakref.ref(x)
    with pytest.raises(ArithmeticError, match="on purpose"):
        model(x)
    del x
    assert alive(payloads) == 0
    assert reference() is None


@pytest.mark.parametrize("compressor", [None, BitSpikeCompressor()])
def test_a_region_does_not_keep_the_inner_tensors_or_a_packed_input(compressor: Any) -> None:
    inner: list[weakref.ref[Tensor]] = []

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            inner.append(weakref.ref(h))
            return h.tanh().tanh()

    model = checkpoint_module(Inside(), compressor=compressor)
    x = spikes()
    h = x * 1.0
    reference = weakref.ref(h)
    y = model(h)
    del h
    gc.collect()
    assert inner[0]() is None
    assert (reference() is None) == (compressor is not None)
    backward_of_outputs(y)
    assert x.grad is not None


def test_many_steps_leave_no_tensor_behind() -> None:
    from spikingjelly.activation_based import functional, neuron

    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = nn.Sequential(block, neuron.LIFNode())
    checkpoint_module(model, compressor=BitSpikeCompressor())

    def step() -> None:
        x = (torch.rand(4, 8) > 0.5).float().requires_grad_()
        backward_of_outputs([model(x) for _ in range(3)])
        functional.reset_net(model)

    def count() -> int:
        gc.collect()
        return sum(isinstance(item, Tensor) for item in gc.get_objects())

    for _ in range(3):
        step()
    before = count()
    for _ in range(20):
        step()
    assert count() <= before


# States that are not reset --------------------------------------------------------------------------------------------


class SpikingBlock(nn.Module):
    """Linear-IF-Linear-IF, whose states nobody resets; its first product may go unused."""

    def __init__(self, *, unused: bool = False) -> None:
        from spikingjelly.activation_based import neuron

        super().__init__()
        self.first, self.first_neuron = nn.Linear(FEATURES, FEATURES), neuron.IFNode(step_mode="m")
        self.second, self.second_neuron = nn.Linear(FEATURES, FEATURES), neuron.IFNode(step_mode="m")
        self.unused = unused

    def forward(self, x: Tensor) -> Tensor:
        if self.unused:
            self.second(x).tanh()
        return self.second_neuron(self.second(self.first_neuron(4 * self.first(x))))


TREATMENTS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "in pieces": {"chunks": 4},
    "in pieces, the last one cheap": {"chunks": 4, "cheap_chunks": 1},
    "recompute_cheap": {"treatment": "recompute_cheap"},
}
STATE_BYTES = 2 * SAMPLES * FEATURES * 4


@pytest.mark.parametrize("unused", [False, True], ids=["", "with a product that nobody uses"])
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_backward_leaves_the_states_behind_and_nothing_else(treatment: str, unused: bool) -> None:
    if treatment != "recompute_cheap" and not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        pytest.skip("this version of torch does not show the checkpoint that runs")
    block = checkpoint_module(SpikingBlock(unused=unused), **TREATMENTS[treatment])
    x = (torch.rand(16, SAMPLES, FEATURES) < 0.3).float()
    for _ in range(3):
        block.zero_grad()
        block.first_neuron.reset()
        block.second_neuron.reset()
        report = measure_memory(lambda: block(x).sum().backward())
        gradients = sum(p.grad.nbytes for p in block.parameters() if p.grad is not None)
        # Random states and the like are all the difference there may be.
        assert abs(report.end_bytes - report.start_bytes - gradients - STATE_BYTES) <= 20_000


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_state_that_is_carried_over_has_the_gradients_of_the_plain_model(treatment: str) -> None:
    x = (torch.rand(2, 16, SAMPLES, FEATURES) < 0.3).float()

    def through_time(options: dict[str, Any] | None) -> list[Any]:
        torch.manual_seed(0)
        block = SpikingBlock()
        if options is not None:
            checkpoint_module(block, **options)
        block(x[0]).sum().backward(retain_graph=True)
        (block(x[1]).sum() + block.first_neuron.v.square().mean() + block.second_neuron.v.mean()).backward()
        return [p.grad for p in block.parameters()]

    expected, found = through_time(None), through_time(TREATMENTS[treatment])
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6 * float(one.abs().max()))


@pytest.mark.parametrize("treatment", [None, *TREATMENTS])
def test_a_state_whose_graph_had_its_backward_is_the_error_of_the_plain_model(treatment: str | None) -> None:
    block = SpikingBlock()
    if treatment is not None:
        checkpoint_module(block, **TREATMENTS[treatment])
    x = (torch.rand(16, SAMPLES, FEATURES) < 0.3).float()
    block(x).sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        block(x).sum().backward()


class TwoOutputs(nn.Module):
    """Two outputs that share their input and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.norms = nn.ModuleList(nn.LayerNorm(FEATURES) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norms[0](self.first(x).tanh()), self.norms[1](self.second(x).sigmoid())


@pytest.mark.parametrize("treatment", ["recompute", "pack", "recompute_cheap"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_outputs_may_have_their_backward_passes_one_after_the_other(treatment: Any, order: tuple[int, int]) -> None:
    torch.manual_seed(0)
    plain = TwoOutputs()
    treated = checkpoint_module(copy.deepcopy(plain), treatment=treatment)
    x = torch.randn(SAMPLES, FEATURES)
    for model in (plain, treated):
        outputs = model(x)
        for place in order:
            backward_of_outputs(outputs[place])
    for one, other in zip(plain.parameters(), treated.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


class Branches(nn.Module):
    """Two branches of one output; they share nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).tanh() + self.second(x).tanh()


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_branches_of_one_output_may_have_their_gradients_one_after_the_other(
    treatment: str, order: tuple[str, str]
) -> None:
    torch.manual_seed(0)
    plain = Branches()
    treated = checkpoint_module(copy.deepcopy(plain), **TREATMENTS[treatment])
    x = torch.randn(16, SAMPLES, FEATURES)
    found: list[list[Tensor]] = []
    for model in (plain, treated):
        y = model(x).sum()
        found.append([torch.autograd.grad(y, getattr(model, name).weight)[0] for name in order])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(y, getattr(model, order[0]).weight)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6 * float(one.abs().max()))


class DelayLine(nn.Module):
    """Its output is made from the state of the step before, with which this step's state has no operation in common."""

    def __init__(self, *, store_first: bool) -> None:
        super().__init__()
        self.write, self.read = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.line = torch.zeros(1, FEATURES)
        self.store_first = store_first

    def forward(self, x: Tensor) -> Tensor:
        line = self.line
        if self.store_first:
            self.line = self.write(x).tanh()
        y = self.read(line).tanh()
        if not self.store_first:
            self.line = self.write(x).tanh()
        return y


@pytest.mark.parametrize("store_first", [False, True])
@pytest.mark.parametrize("treatment", ["recompute", "pack", "recompute_cheap"])
def test_every_step_of_a_delay_line_may_have_its_own_backward_pass(treatment: Any, store_first: bool) -> None:
    torch.manual_seed(0)
    plain = DelayLine(store_first=store_first)
    treated = checkpoint_module(copy.deepcopy(plain), treatment=treatment)
    for step in torch.randn(4, 8, FEATURES):
        for model in (plain, treated):
            model(step).square().sum().backward()
    for one, other in zip(plain.parameters(), treated.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


# Models that are dropped ----------------------------------------------------------------------------------------------


DROPPED: dict[str, dict[str, Any]] = {"pack": {"treatment": "pack"}, **TREATMENTS}


def spiking_model(options: dict[str, Any] | None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(SpikingBlock(), SpikingBlock())
    if options is not None:
        list(map(partial(checkpoint_module, **options), model))
    return model


def weak(model: Any) -> list[weakref.ref[Any]]:
    neurons = [neuron for block in model for neuron in (block.first_neuron, block.second_neuron)]
    return [weakref.ref(part) for part in (model, *model, *neurons, *model.parameters())]


def backward_of_all(loss: Tensor, model: Any) -> None:
    loss.backward()


def backward_of_some(loss: Tensor, model: Any) -> None:
    torch.autograd.grad(loss, model[1].second.weight)


def backward_of_a_kept_graph(loss: Tensor, model: Any) -> None:
    loss.backward(retain_graph=True)


@pytest.mark.parametrize("ending", [None, backward_of_all, backward_of_some, backward_of_a_kept_graph])
@pytest.mark.parametrize("treatment", DROPPED)
def test_a_model_that_is_dropped_with_its_states_is_gone(treatment: str, ending: Any) -> None:
    model = spiking_model(DROPPED[treatment])
    x = (torch.rand(4, 8, FEATURES) < 0.3).float()
    loss = model(x).sum() + model(x).sum()
    if ending is not None:
        ending(loss, model)
    references = weak(model)
    del model, loss
    assert alive(references) == 0


LOSSES: dict[str, Callable[[Any, list[Tensor]], Tensor]] = {
    "of the outputs": lambda model, outputs: outputs[0].sum() + outputs[1].sum(),
    "of the last output": lambda model, outputs: outputs[1].sum(),
    "of a state": lambda model, outputs: model[1].second_neuron.v.square().mean(),
    "of both": lambda model, outputs: outputs[0].sum() + model[0].first_neuron.v.square().mean(),
}


@pytest.mark.parametrize("loss_of", LOSSES)
@pytest.mark.parametrize("treatment", DROPPED)
def test_gradients_that_are_asked_for_after_the_model_was_dropped_are_those_of_the_plain_model(
    treatment: str, loss_of: str
) -> None:
    x = (torch.rand(2, 4, 8, FEATURES) < 0.3).float()

    def gradients(options: dict[str, Any] | None) -> list[Any]:
        model = spiking_model(options)
        model[0].itself = [model]  # so that the garbage collector has to find it
        parameters, neurons = list(model.parameters()), weakref.ref(model[0].first_neuron)
        loss = LOSSES[loss_of](model, [model(step) for step in x])
        if options is not None:
            del model
            gc.collect()
        loss.backward(retain_graph=True)
        loss.backward()
        if options is not None:
            del loss
            gc.collect()
            assert neurons() is None
        return [p.grad for p in parameters]

    expected, found = gradients(None), gradients(DROPPED[treatment])
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=0, atol=1e-6 * float(one.abs().max()))


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_neuron_that_outlives_its_region_keeps_its_potential_and_says_what_no_gradient_can_reach(
    treatment: str,
) -> None:
    block: Any = checkpoint_module(SpikingBlock(), **TREATMENTS[treatment])
    x = (torch.rand(4, 8, FEATURES) < 0.3).float()
    block(x)
    reference, neuron = weakref.ref(block), block.first_neuron
    potential = neuron.v.detach().clone()
    del block
    gc.collect()
    assert reference() is None
    assert torch.equal(neuron.v, potential)
    with pytest.raises(RuntimeError, match="which nobody holds any more"):
        neuron(x.requires_grad_()).sum().backward()
    neuron.detach()
    neuron(x).sum().backward()


@pytest.mark.parametrize(
    "moment",
    [
        torch.no_grad,
        torch.inference_mode,
        FakeTensorMode,
        lambda: torch.device("meta"),
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        None,
    ],
    ids=["no_grad", "inference_mode", "fake tensors", "device", "no hooks", "vmap"],
)
@pytest.mark.parametrize("treatment", ["recompute", "recompute_cheap"])
def test_the_garbage_collector_may_find_a_dropped_model_at_any_moment(
    treatment: str, moment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda failure: failed.append(failure.exc_value))
    model = spiking_model(TREATMENTS[treatment])
    x = (torch.rand(4, 8, FEATURES) < 0.3).float()
    loss = model(x).sum()
    weight, neuron = model[0].first.weight, model[0].first_neuron
    potential, reference = neuron.v.detach().clone(), weakref.ref(model[0])
    holders = [model]
    del model

    def drop(value: Tensor) -> Tensor:
        holders.clear()
        gc.collect()
        return value

    if moment is None:
        torch.func.vmap(drop)(torch.zeros(2))
    else:
        with moment():
            drop(x)
    assert torch.equal(neuron.v, potential)
    loss.backward()
    assert weight.grad is not None
    del loss, neuron
    assert alive([reference]) == 0
    assert not failed


@pytest.mark.parametrize("change", [unwrap_module, lambda block: checkpoint_module(block, name="another")])
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_region_may_be_unwrapped_or_changed_before_its_backward(treatment: str, change: Any) -> None:
    x = (torch.rand(2, 4, 8, FEATURES) < 0.3).float()

    def gradients(options: dict[str, Any] | None) -> list[Any]:
        torch.manual_seed(0)
        block = SpikingBlock()
        if options is not None:
            checkpoint_module(block, **options)
        loss = block(x[0]).sum()
        if options is not None:
            change(block)
        gc.collect()
        (loss + block(x[1]).sum()).backward()
        return [p.grad for p in block.parameters()]

    for one, other in zip(gradients(None), gradients(TREATMENTS[treatment]), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6 * float(one.abs().max()))
