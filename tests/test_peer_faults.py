"""Ways in which checkpointing of spiking networks goes wrong elsewhere, each written as what must hold here."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pickle
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memopt.checkpointing import (
    BitSpikeCompressor,
    BooleanSpikeCompressor,
    NonBinarySpikeError,
    SparseSpikeCompressor,
    SpikeCompressor,
    Uint8SpikeCompressor,
    checkpoint,
    checkpoint_module,
    unwrap_module,
)
from lightning_memopt.measuring import measure_memory
from tests.equality import (
    assert_optimized_equals_plain,
    assert_same_tree,
    backward_of_outputs,
    call,
    frozen,
    run_model,
    seed_everything,
    state_of,
    tensors_in,
)
from tests.zoo import C, N, Net, SewAdd, T, over_time, sj_reset, snn_reset, spike

BINARY = [BitSpikeCompressor, BooleanSpikeCompressor, SparseSpikeCompressor]
COMPRESSORS = [*BINARY, Uint8SpikeCompressor]


def wrap(model: Any, name: str = "block", **options: Any) -> None:
    """Treat one submodule, whether the function works in place or returns something new."""
    setattr(model, name, checkpoint_module(getattr(model, name), **options))


def with_bits(model: Any) -> None:
    wrap(model, compressor=BitSpikeCompressor())


def batches(*inputs: Tensor) -> Callable[[], Any]:
    """A batch maker that hands out the given inputs in turn."""
    turn = iter(inputs)
    return lambda: call(next(turn).clone().requires_grad_())


def raw_net(block: nn.Module) -> Net:
    """A net whose input reaches the block as it is."""
    return Net(block, stem=nn.Identity(), encode=lambda x: x)


class Counting(SpikeCompressor):
    """Bit compression that counts its calls, in a class attribute so that copies count too."""

    calls = 0

    def compress(self, tensor: Tensor) -> Any:
        type(self).calls += 1
        return BitSpikeCompressor().compress(tensor)

    def decompress(self, payload: Any) -> Tensor:
        return BitSpikeCompressor().decompress(payload)


@pytest.fixture
def counting() -> type[Counting]:
    Counting.calls = 0
    return Counting


def bytes_saved(model: nn.Module, *args: Any, ignore: tuple[Tensor, ...] = (), **kwargs: Any) -> int:
    """Bytes of the distinct storages that autograd keeps after a forward, without parameters and `ignore`."""
    skip = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *ignore]}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(*args, **kwargs)
    total = sum(size for size, _ in kept.values())
    del outputs
    return total


# 1. The values of a later batch are not those of the first -----------------------------------------------------------


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_analog_values_after_a_silent_first_batch_train_exactly(compressor: type[SpikeCompressor]) -> None:
    silent, counts = torch.zeros(T, N, C), torch.poisson(torch.full((T, N, C), 2.0))
    analog = torch.randn(T, N, C)
    assert_optimized_equals_plain(
        lambda: raw_net(nn.Sequential(nn.Linear(C, C), nn.Tanh())),
        lambda model: wrap(model, compressor=compressor()),
        batches(silent, counts, analog, silent, analog),
        steps=5,
    )


def test_dropout_scaled_spikes_after_an_eval_call_train_exactly() -> None:
    class Dropped(Net):
        def forward(self, x: Tensor) -> Any:
            return self.block(F.dropout(self.encode(self.stem(x)), 0.3, self.training))

    def look_in_eval_first(model: Any) -> None:
        with_bits(model)
        state = torch.get_rng_state()
        model.eval()
        model(torch.randn(N, C))
        model.train()
        torch.set_rng_state(state)

    assert_optimized_equals_plain(
        lambda: Dropped(nn.Linear(C, C)), look_in_eval_first, lambda: call(torch.randn(N, C, requires_grad=True))
    )


def test_a_block_that_was_silent_and_later_carries_twos_trains_exactly() -> None:
    def make_model() -> nn.Module:
        model = nn.Sequential(SewAdd(), SewAdd(), SewAdd())
        for block in model:
            nn.init.constant_(block.linear.weight, 0.5)
            nn.init.zeros_(block.linear.bias)
        return model

    def treat(model: Any) -> None:
        for name in "012":
            wrap(model, name, compressor=BitSpikeCompressor())

    silent = torch.zeros(T, N, C)
    spikes = (torch.rand(T, N, C) > 0.3).float()
    plain, _ = assert_optimized_equals_plain(
        make_model, treat, batches(silent, spikes, spikes), between=sj_reset, steps=3
    )
    assert set(plain(spikes).unique().tolist()) >= {2.0}, "the model must produce sums of spikes for this test to bite"


VALUES = [torch.nan, 0.5, 256.0, 257.0, -1.0, torch.inf, 1.0 + 2**-10, 2.0, 1e-40, 255.0, 300.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_a_single_value_that_does_not_fit_reaches_the_gradient_exactly(
    compressor: type[SpikeCompressor], value: float, dtype: torch.dtype
) -> None:
    x = (torch.rand(5, 13) > 0.5).to(dtype)
    x[3, 7] = value

    class Copysign(nn.Module):
        """Its gradient shows the sign of zero as well as the value."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, 13, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x + self.weight * torch.copysign(torch.ones_like(x), x)

    assert_optimized_equals_plain(
        lambda: raw_net(Copysign()), lambda model: wrap(model, compressor=compressor()), batches(x), steps=1
    )


@pytest.mark.parametrize("value", [torch.nan, 0.5, 256.0, 2.0, -1.0])
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_direct_compression_is_exact_or_an_error_that_names_value_and_remedy(
    compressor: type[SpikeCompressor], value: float
) -> None:
    x = torch.zeros(3, 5)
    x[1, 2] = value
    fits = value == 2.0 and compressor is Uint8SpikeCompressor
    if fits:
        assert_same_tree(x, compressor().decompress(compressor().compress(x)))
        return
    with pytest.raises(NonBinarySpikeError, match=f"{value}.*{compressor.__name__}.*Remedy"):
        compressor().compress(x)


@pytest.mark.gpu
def test_a_value_that_does_not_fit_on_cuda_raises_before_the_optimizer_changes_a_weight() -> None:
    model = raw_net(nn.Linear(C, C)).cuda()
    with_bits(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    backward_of_outputs(model((torch.rand(N, C, device="cuda") > 0.5).float()))
    optimizer.step()
    before = frozen(state_of(model)["parameter"])
    backward_of_outputs(model(torch.full((N, C), 0.5, device="cuda")))
    with pytest.raises(NonBinarySpikeError, match=r"0\.5.*Remedy"):
        optimizer.step()
    assert_same_tree(before, state_of(model)["parameter"])


# 2. The forward result ------------------------------------------------------------------------------------------------


class Rounding(SpikeCompressor):
    """Loses digits without noticing."""

    def compress(self, tensor: Tensor) -> Any:
        return tensor.half(), tensor.dtype

    def decompress(self, payload: Any) -> Tensor:
        return payload[0].to(payload[1])


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference"])
@pytest.mark.parametrize("compressor", [*COMPRESSORS, Rounding])
def test_the_forward_result_never_passes_through_a_compressor(compressor: type[SpikeCompressor], mode: str) -> None:
    model = raw_net(nn.Linear(C, C)).train(mode == "train")
    x = torch.rand(N, C) * 3
    expected = model(x)
    wrap(model, compressor=compressor())
    with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode in ("train", "eval")):
        assert_same_tree(expected.detach(), model(x).detach().clone())


def test_nothing_is_compressed_where_no_gradient_is_recorded(counting: type[Counting]) -> None:
    model = raw_net(nn.Linear(C, C))
    wrap(model, compressor=counting())
    spikes = (torch.rand(N, C) > 0.5).float()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(spikes)
            model.eval()(spikes)
            model.train()
    assert counting.calls == 0
    model(spikes)
    assert counting.calls > 0


# 3. The first tensor argument is not always the spikes ----------------------------------------------------------------


class Masked(nn.Module):
    """mask, scale, state and spikes, spikes last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.norm = nn.BatchNorm1d(C)

    def forward(self, mask: Tensor, scale: Tensor, v: Tensor, spikes: Tensor) -> tuple[Tensor, Tensor]:
        v = v * 0.5 + self.norm(self.linear(spikes)).masked_fill(mask.bool(), 0.0) * scale
        return spike(v - 1), v


class GivesMask(Net):
    """Calls `Masked` by position, by name, or by name in another order."""

    style = "position"
    mask_dtype = torch.bool

    def forward(self, x: Tensor) -> Any:
        spikes = self.encode(self.stem(x))
        mask = (torch.arange(C) % 3 == 0).to(self.mask_dtype)
        scale, v = torch.tensor(0.7), torch.full_like(spikes, 0.3) * x
        if self.style == "position":
            return self.block(mask, scale, v, spikes)
        if self.style == "names":
            return self.block(mask=mask, scale=scale, v=v, spikes=spikes)
        return self.block(spikes=spikes, v=v, scale=scale, mask=mask)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.int64])
@pytest.mark.parametrize("style", ["position", "names", "other order"])
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_a_mask_scale_state_or_buffer_in_front_of_the_spikes_is_kept_exactly(
    compressor: type[SpikeCompressor], style: str, mask_dtype: torch.dtype
) -> None:
    def make_model() -> nn.Module:
        model = GivesMask(Masked())
        model.style, model.mask_dtype = style, mask_dtype
        return model

    assert_optimized_equals_plain(
        make_model,
        lambda model: wrap(model, compressor=compressor()),
        lambda: call(torch.randn(N * T, C, requires_grad=True)),
    )


class Wide(nn.Module):
    """A large linear layer and nonlinearity whose spikes can come in any position."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features, bias=False)

    def forward(self, *args: Tensor, spikes: Tensor | None = None) -> Tensor:
        spikes = args[-1] if spikes is None else spikes
        scale = args[0] if len(args) > 1 else 1.0
        return self.linear(spikes).tanh() * scale


@pytest.mark.parametrize("style", ["only", "second", "keyword", "second and first binary"])
def test_spikes_are_packed_wherever_they_stand(style: str) -> None:
    features = 256
    block: Any = Wide(features)
    spikes = (torch.rand(64, features) > 0.5).float().requires_grad_()
    scale = torch.tensor(0.5)
    args, kwargs = {
        "only": ((spikes,), {}),
        "second": ((scale, spikes), {}),
        "keyword": ((scale,), {"spikes": spikes}),
        "second and first binary": (((torch.rand(64, features) > 0.5).float(), spikes), {}),
    }[style]
    packed = checkpoint_module(block, compressor=BitSpikeCompressor())
    spike_inputs = 2 if style == "second and first binary" else 1
    assert bytes_saved(packed, *args, **kwargs) <= spike_inputs * spikes.nbytes // 32 + 64


def test_only_the_named_arguments_are_packed_when_names_are_given() -> None:
    features = 256
    first, second = ((torch.rand(64, features) > 0.5).float().requires_grad_() for _ in range(2))
    block = checkpoint_module(Wide(features), compressor=BitSpikeCompressor(), compressed_args=("spikes",))
    saved = bytes_saved(block, first, torch.ones(()), spikes=second)
    assert first.nbytes <= saved <= first.nbytes + second.nbytes // 32 + 64


# 4. A function that holds a stateful block ----------------------------------------------------------------------------


def stateful_block() -> nn.Module:
    from spikingjelly.activation_based import layer, neuron

    norm = layer.SeqToANNContainer(nn.Linear(C, C), nn.BatchNorm1d(C))
    return nn.Sequential(norm, neuron.LIFNode(step_mode="m"), nn.Dropout(0.2))


class ByFunction(Net):
    """Its forward can be told to checkpoint a function instead of a module."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.run = ByFunction.part

    def part(self, x: Tensor) -> Tensor:
        return self.block(x) * 2

    def forward(self, x: Tensor) -> Any:
        return self.run(self, self.encode(self.stem(x)))


def through_lambda(model: Any, x: Tensor) -> Any:
    block = model.block
    return checkpoint(lambda x: block(x) * 2, x)


def through_method(model: Any, x: Tensor) -> Any:
    return checkpoint(model.part, x, compressor=BitSpikeCompressor())


def through_container(model: Any, x: Tensor) -> Any:
    parts = [model.block]
    return checkpoint(lambda x: parts[0](x) * 2, x, compressor=BitSpikeCompressor())


def through_partial(model: Any, x: Tensor) -> Any:
    return checkpoint(functools.partial(ByFunction.part, model), x)


def through_argument(model: Any, x: Tensor) -> Any:
    return checkpoint(lambda block, x: block(x) * 2, model.block, x)


def through_submodules(model: Any, x: Tensor) -> Any:
    norm, neuron, dropout = model.block

    def run(x: Tensor) -> Tensor:
        return dropout(neuron(norm(x))) * 2

    return checkpoint(run, x, compressor=BitSpikeCompressor())


THROUGH = [through_lambda, through_method, through_container, through_partial, through_argument, through_submodules]


@pytest.mark.parametrize("through", THROUGH)
def test_a_function_over_a_stateful_block_steps_its_state_and_statistics_once(through: Any) -> None:
    assert_optimized_equals_plain(
        lambda: ByFunction(stateful_block()),
        lambda model: setattr(model, "run", through),
        lambda: call(torch.randn(T, N, C, requires_grad=True)),
        between=sj_reset,
    )


# 5. State kept outside one library's own classes ----------------------------------------------------------------------


def leaky_net() -> nn.Module:
    import snntorch

    return Net(nn.Sequential(nn.Linear(C, C), snntorch.Leaky(beta=0.8, init_hidden=True)))


def test_the_hidden_state_of_snntorch_steps_once_per_call() -> None:
    assert_optimized_equals_plain(
        leaky_net, with_bits, lambda: call(torch.randn(T, N, C, requires_grad=True)), step=over_time, between=snn_reset
    )


@pytest.mark.parametrize("tau_syn", [None, 3.0])
def test_the_potential_of_sinabs_steps_once_per_call(tau_syn: float | None) -> None:
    import sinabs.layers

    def cut(model: Any) -> None:
        for name, buffer in model.block[1].named_buffers():
            setattr(model.block[1], name, buffer.detach())

    assert_optimized_equals_plain(
        lambda: Net(nn.Sequential(nn.Linear(C, C), sinabs.layers.LIF(tau_mem=5.0, tau_syn=tau_syn))),
        with_bits,
        lambda: call(torch.randn(N, T, C, requires_grad=True)),
        between=cut,
    )


class Reassigns(nn.Module):
    """`self.buf = ...` inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.register_buffer("potential", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.potential = self.potential * 0.5 + self.linear(x)
        return spike(self.potential - 0.2)


def test_a_buffer_reassigned_in_forward_is_carried_with_its_graph() -> None:
    def reset(model: Any) -> None:
        model.block.potential = torch.zeros(())

    assert_optimized_equals_plain(
        lambda: Net(Reassigns()),
        with_bits,
        lambda: call(torch.randn(T, N, C, requires_grad=True)),
        step=over_time,
        between=reset,
    )


class TimeLast(nn.Module):
    """Time in the last dimension, state as an attribute, as in lava-dl."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.voltage: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        current = self.linear(x.transpose(1, 2)).transpose(1, 2)
        spikes = []
        for t in range(x.shape[-1]):
            v = current[..., t] + (0 if self.voltage is None else 0.5 * self.voltage)
            spikes.append(spike(v - 0.2))
            self.voltage = v * (1 - spikes[-1])
        return torch.stack(spikes, dim=-1)


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_neuron_with_time_last_steps_once_per_call(chunks: int) -> None:
    def reset(model: Any) -> None:
        model.block.voltage = None

    assert_optimized_equals_plain(
        lambda: raw_net(TimeLast()),
        lambda model: wrap(model, chunks=chunks, time_dim=-1),
        lambda: call(torch.randn(N, C, 7, requires_grad=True)),
        between=reset,
        rtol=None if chunks == 1 else 1e-6,
    )


# 6. Copies ------------------------------------------------------------------------------------------------------------


def plain_block() -> nn.Module:
    return nn.Sequential(nn.Linear(C, C), nn.Tanh())


def norm_block() -> nn.Module:
    return nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C))


def snntorch_block() -> nn.Module:
    import snntorch

    return nn.Sequential(nn.Linear(C, C), snntorch.Leaky(beta=0.8, init_hidden=True))


def sinabs_block() -> nn.Module:
    import sinabs.layers

    return sinabs.layers.LIF(tau_mem=5.0)


def norse_block() -> nn.Module:
    import norse.torch

    return norse.torch.LIFRecurrent(C, C)


def through_pickle(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


def through_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copied: nn.Module = torch.load(buffer, weights_only=False)
    return copied


BLOCKS = [plain_block, norm_block, stateful_block, snntorch_block, sinabs_block, norse_block]


# Norse's recurrent cells and snnTorch's surrogates hold local functions, which cannot be pickled untreated either.
COPIES = [(make_block, copy.deepcopy) for make_block in BLOCKS] + [
    (make_block, copier)
    for make_block in (plain_block, norm_block, stateful_block, sinabs_block)
    for copier in (through_pickle, through_torch_save)
]


@pytest.mark.parametrize(("make_block", "copier"), COPIES)
def test_a_copy_of_a_treated_block_is_treated_and_trains_alone(make_block: Any, copier: Any) -> None:
    seed_everything(0)
    x = (torch.rand(T, N, C) > 0.5).float()
    x = x.reshape(-1, C) if make_block is norm_block else x
    plain = make_block()
    original = checkpoint_module(copy.deepcopy(plain), compressor=BitSpikeCompressor())
    twin = copier(original)
    seed_everything(1)
    expected = plain(x)
    backward_of_outputs(expected)
    seed_everything(1)
    actual = twin(x)
    backward_of_outputs(actual)
    assert_same_tree(frozen(expected), frozen(actual), name="output")
    assert_same_tree(state_of(plain), state_of(twin), name="state")
    assert all(parameter.grad is None for parameter in original.parameters()), "gradients went to the original"
    assert type(twin) is type(original)
    unwrap_module(twin)
    assert type(twin) is type(plain)


def test_a_saved_model_loads_in_a_process_that_never_treated_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C))
    checkpoint_module(model, compressor=BitSpikeCompressor())
    x = torch.rand(N, C)
    torch.save(model, tmp_path / "model.pt")
    torch.save((x, model(x).detach()), tmp_path / "data.pt")
    script = """
import sys, torch
torch.set_num_threads(int(sys.argv[3]))
model = torch.load(sys.argv[1], weights_only=False)
x, expected = torch.load(sys.argv[2])
from lightning_memopt.checkpointing import is_checkpointed
assert is_checkpointed(model) and isinstance(model, torch.nn.Sequential)
y = model(x)
assert torch.equal(y, expected)
y.sum().backward()
"""
    command = [sys.executable, "-c", script, str(tmp_path / "model.pt"), str(tmp_path / "data.pt")]
    command.append(str(torch.get_num_threads()))  # sums over other numbers of threads differ in the last bit
    finished = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert finished.returncode == 0, finished.stderr


def test_a_state_dict_loads_in_every_direction_between_treated_and_plain() -> None:
    for make_block in BLOCKS:
        plain, treated = make_block(), checkpoint_module(make_block())
        assert list(plain.state_dict()) == list(treated.state_dict())
        plain.load_state_dict(treated.state_dict())
        treated.load_state_dict(plain.state_dict())
        unwrap_module(treated).load_state_dict(plain.state_dict())


# 7. Containers, v_seq and hooks ---------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


class Typed(NamedTuple):
    """A typed result."""

    spikes: Tensor
    rest: Any


@pytest.mark.parametrize(
    "make_result",
    [
        lambda y: Point(y, y + 1),
        lambda y: Typed(y, [y + 1, None]),
        lambda y: [y, y + 1],
        lambda y: [y],
        lambda y: (y,),
        lambda y: (),
        lambda y: {"b": y, "a": [y + 1]},
        lambda y: None,
        lambda y: y.shape,
    ],
)
@pytest.mark.parametrize("compressor", [None, BitSpikeCompressor()])
@pytest.mark.parametrize("make_inner", [nn.Identity, lambda: nn.BatchNorm1d(C)])
def test_a_region_returns_the_container_that_its_module_returned(
    make_result: Any, compressor: Any, make_inner: Any
) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_inner()

        def forward(self, x: Tensor) -> Any:
            return make_result(self.inner(x))

    block = Returns()
    x = (torch.rand(N, C) > 0.5).float().requires_grad_()
    expected = block(x)
    assert_same_tree(frozen(expected), frozen(checkpoint_module(block, compressor=compressor)(x)))


def test_a_state_of_norse_comes_back_as_its_own_type_and_can_be_handed_in_again() -> None:
    import norse.torch

    cell = norse.torch.LIFCell()
    plain_state = cell(torch.rand(N, C))[1]
    block = checkpoint_module(norse.torch.LIFCell())
    _, state = block(torch.rand(N, C, requires_grad=True))
    assert type(state) is type(plain_state)
    _, state = block(torch.rand(N, C, requires_grad=True), state)
    assert type(state) is type(plain_state)
    assert state.v.requires_grad


def test_v_seq_is_kept_and_differentiable() -> None:
    from spikingjelly.activation_based import neuron

    def step(model: Any, batch: Any) -> Any:
        spikes = run_model(model, batch)
        return spikes, model.block.v_seq

    assert_optimized_equals_plain(
        lambda: Net(neuron.LIFNode(step_mode="m", store_v_seq=True)),
        wrap,
        lambda: call(torch.randn(T, N, C, requires_grad=True)),
        step=step,
        between=sj_reset,
    )


@pytest.mark.parametrize("kind", ["plain", "batch norm", "neuron"])
def test_hooks_on_and_inside_a_region_fire_once_per_step(kind: str) -> None:
    block = {"plain": plain_block, "batch norm": norm_block, "neuron": stateful_block}[kind]()
    model = raw_net(block)
    fired: list[str] = []
    for name, module in [("block", block), *block.named_modules()][:3]:
        module.register_forward_pre_hook(lambda module, args, name=name: fired.append(f"{name} before"))
        module.register_forward_hook(lambda module, args, output, name=name: fired.append(f"{name} after"))
        module.register_full_backward_hook(lambda module, g_in, g_out, name=name: fired.append(f"{name} backward"))
    shape = (T, N, C) if kind == "neuron" else (N, C)
    x = (torch.rand(shape) > 0.5).float().requires_grad_()
    backward_of_outputs(model(x))
    expected = sorted(fired)
    fired.clear()
    if kind == "neuron":
        sj_reset(model)
    with_bits(model)
    backward_of_outputs(model(x))
    assert sorted(fired) == expected


def test_an_observer_inside_a_region_sees_the_values_of_the_forward_once() -> None:
    model = raw_net(norm_block())
    seen: list[Tensor] = []
    model.block[0].register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    with_bits(model)
    x = (torch.rand(N, C) > 0.5).float().requires_grad_()
    backward_of_outputs(model(x))
    assert len(seen) == 1
    assert_same_tree(model.block[0](x).detach(), seen[0])


# 8. Time chunks that cannot be right ----------------------------------------------------------------------------------


class ReducedOverTime(nn.Module):
    """Returns a rate: time is gone from the output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mean(0)


class RateBesideSpikes(nn.Module):
    """One output over time and one reduced over time."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), x.sum(0)


class AttentionOverTime(nn.Module):
    """Every time step sees every other."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(C, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


class Reversed(nn.Module):
    """The right shape, the wrong order."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(0)


def sequence_norm() -> nn.Module:
    from spikingjelly.activation_based import layer

    return layer.SeqToANNContainer(nn.Linear(C, C), nn.BatchNorm1d(C))


@pytest.mark.parametrize("make_block", [ReducedOverTime, RateBesideSpikes, AttentionOverTime, Reversed, sequence_norm])
def test_time_chunks_that_change_the_result_are_an_error_and_leave_the_state_alone(make_block: Any) -> None:
    model = raw_net(make_block())
    before = frozen(state_of(model))
    x = torch.randn(T, N, C, requires_grad=True)
    wrap(model, chunks=2)
    with pytest.raises(ValueError, match="chunk"):
        model(x)
    assert_same_tree(before, state_of(model))


def test_batch_norm_in_eval_may_be_chunked() -> None:
    def in_eval(model: Any) -> None:
        model.eval()
        wrap(model, chunks=2)

    assert_optimized_equals_plain(
        lambda: raw_net(sequence_norm()).eval(),
        in_eval,
        lambda: call(torch.randn(T, N, C, requires_grad=True)),
        rtol=1e-6,
    )


# 12. torchmetrics -----------------------------------------------------------------------------------------------------


def test_a_model_that_holds_metrics_is_treated_and_its_metrics_count_once() -> None:
    from tests.zoo import Measured

    def treat(model: Any) -> None:
        wrap(model.block, "linear")
        wrap(model)

    _, optimized = assert_optimized_equals_plain(
        lambda: Net(Measured()), treat, lambda: call(torch.randn(N, C, requires_grad=True))
    )
    assert optimized.block.rate.update_count == 3


def test_a_metric_that_changed_its_hash_between_wrapping_and_backward_is_no_problem() -> None:
    from torchmetrics import MeanMetric

    class WithMetric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(C, C)
            self.rate = MeanMetric()

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.rate.update(y.detach())
            return y.tanh()

    block: Any = checkpoint_module(WithMetric())
    y = block(torch.randn(N, C, requires_grad=True))
    block.rate.update(torch.tensor(100.0))
    expected = block.rate.compute()
    y.sum().backward()
    assert_same_tree(expected, block.rate.compute())
    assert block.rate.update_count == 2


# 14. Cost -------------------------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Records every operation and the shapes it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen += [(func.overloadpacket.__name__, tuple(tensor.shape)) for tensor in tensors_in(result)]
        return result


@pytest.mark.parametrize("kind", ["statistics", "constant"])
def test_buffers_are_not_copied_at_every_forward(kind: str) -> None:
    channels = 4099

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.rand(channels))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).tanh()

    block: Any = nn.Sequential(nn.BatchNorm1d(channels), nn.Tanh()) if kind == "statistics" else Constant()
    block = checkpoint_module(block)
    x = torch.randn(2, channels, requires_grad=True)
    for _ in range(3):
        block(x).sum().backward()
    with Operations() as operations:
        block(x).sum().backward()
    copies = [
        operation for operation in operations.seen if operation in (("clone", (channels,)), ("_to_copy", (channels,)))
    ]
    assert copies == []


def test_an_input_handed_to_three_arguments_is_stored_once() -> None:
    features = 256
    shared = (torch.rand(64, 4, features) > 0.5).float().requires_grad_()

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(features, 2, bias=False)

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.attention(query, key, value, need_weights=False)[0]

    block = checkpoint_module(Attention(), compressor=BitSpikeCompressor())
    assert bytes_saved(block, shared, shared, value=shared) <= shared.nbytes // 32 + 64


def test_an_input_of_three_regions_is_stored_once() -> None:
    features = 256
    shared = (torch.rand(64, features) > 0.5).float().requires_grad_()

    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("query", "key", "value"):
                self.add_module(name, checkpoint_module(Wide(features), compressor=BitSpikeCompressor()))

        def forward(self, x: Tensor) -> Any:
            return [part(x) for part in self.children()]

    assert bytes_saved(Projections(), shared) <= shared.nbytes // 32 + 64


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "channels_last": lambda: torch.rand(2, 3, 5, 7).contiguous(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.rand(2, 3, 5, 7, 2).contiguous(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.rand(16, 9).t(),
    "sliced": lambda: torch.rand(16, 16)[::2, 1::3],
    "expanded": lambda: torch.rand(16, 1).expand(16, 8),
    "scalar": lambda: torch.rand(()),
    "empty": lambda: torch.rand(0, 3),
    "one": lambda: torch.rand(1, 1, 1),
    "odd length": lambda: torch.rand(1021),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_the_recomputation_sees_the_memory_format_of_the_forward(compressor: Any, layout: str) -> None:
    seen: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((tuple(x.shape), x.stride(), x.dtype))
            return x.sin()

    # A view is compared by strides where the layout is dense; gaps and repeats may be closed by the payload.
    x = (LAYOUTS[layout]() > 0.5).float()
    block = checkpoint_module(Looks(), compressor=compressor())
    x.requires_grad_()
    block(x).sum().backward()
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert_same_tree(x.detach(), compressor().decompress(compressor().compress(x.detach())))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_every_real_dtype_comes_back_exactly(compressor: Any, dtype: torch.dtype) -> None:
    x = (torch.rand(7, 13) > 0.5).to(dtype)
    assert_same_tree(x, compressor().decompress(compressor().compress(x)))
    seen: list[Tensor] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.detach().clone())
            return (self.weight * x.float()).sin()

    checkpoint_module(Looks(), compressor=compressor())(x).sum().backward()
    assert_same_tree([x, x], seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int8, torch.bool, torch.int16])
@pytest.mark.parametrize("length", [127, 128, 255, 256, 257, 300, 32768, 65537])
def test_the_positions_of_sparse_spikes_never_wrap(dtype: torch.dtype, length: int) -> None:
    x = torch.zeros(length, dtype=dtype)
    x[[0, length // 2, length - 1]] = 1
    compressor = SparseSpikeCompressor()
    assert_same_tree(x, compressor.decompress(compressor.compress(x)))


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_an_outer_saved_tensors_hook_sees_the_payload_and_may_move_it(compressor: Any) -> None:
    """This is how `save_on_cpu` and other offloading work."""
    shelf: dict[int, Tensor] = {}
    numbers = itertools.count()

    def pack(tensor: Tensor) -> int:
        number = next(numbers)
        shelf[number] = tensor.detach().clone()
        return number

    def unpack(number: int) -> Tensor:
        return shelf.pop(number)

    plain, block = Wide(256), Wide(256)
    block.load_state_dict(plain.state_dict())
    block = checkpoint_module(block, compressor=compressor())
    x = (torch.rand(64, 256) > 0.97).float()
    plain(x).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = block(x)
    offloaded = sum(tensor.nbytes for tensor in shelf.values() if tensor.shape != (256, 256))
    assert 0 < offloaded < x.nbytes // 2
    y.sum().backward()
    assert_same_tree(plain.linear.weight.grad, block.linear.weight.grad)


def test_saving_on_the_cpu_around_a_region_gives_the_plain_gradients() -> None:
    def step(model: Any, batch: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return run_model(model, batch)

    assert_optimized_equals_plain(
        lambda: Net(nn.Sequential(norm_block(), nn.Dropout(0.2), plain_block())),
        with_bits,
        lambda: call(torch.randn(N, C, requires_grad=True)),
        step=step,
    )


PAYLOADS = [(BitSpikeCompressor, 1 / 32), (BooleanSpikeCompressor, 1 / 4), (SparseSpikeCompressor, 0.02)]


@pytest.mark.parametrize(("compressor", "share"), PAYLOADS)
def test_compressing_needs_no_temporary_of_the_size_of_the_input(compressor: Any, share: float) -> None:
    x = (torch.rand(2**23) < 0.02).float()
    made: list[Any] = []
    packing = measure_memory(lambda: made.append(compressor().compress(x)))
    unpacking = measure_memory(lambda: made.append(compressor().decompress(made[0])))
    assert packing.peak_bytes - packing.start_bytes <= (share + 0.2) * x.nbytes
    assert unpacking.peak_bytes - unpacking.start_bytes <= 1.1 * x.nbytes
    assert torch.equal(made[1], x)


# What autograd promises -----------------------------------------------------------------------------------------------


def test_an_input_edited_in_place_before_backward_is_noticed() -> None:
    model = raw_net(plain_block())
    wrap(model)
    x = torch.rand(N, C)
    y = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_packed_input_edited_in_place_before_backward_does_not_matter() -> None:
    plain, treated = (raw_net(plain_block()) for _ in range(2))
    treated.load_state_dict(plain.state_dict())
    with_bits(treated)
    x = (torch.rand(2 * N, C) > 0.5).float()
    plain(x.clone()).sum().backward()
    y = treated(x)
    x.add_(1)
    y.sum().backward()
    assert_same_tree(state_of(plain)["gradient"], state_of(treated)["gradient"])


def test_a_region_that_edits_its_input_in_place_trains_exactly_or_says_so() -> None:
    class InPlaceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.add_(1).tanh())

    model = Net(InPlaceFirst(), encode=lambda x: x * 2)
    wrap(model)
    with pytest.raises(RuntimeError, match="in place"):
        model(torch.randn(N, C)).sum().backward()


# 15. Sharding ---------------------------------------------------------------------------------------------------------


class ShardedNet(nn.Module):
    """Blocks with weights, statistics and dropout-free arithmetic, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(C, C)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = spike(self.stem(x))
        for block in self.blocks:
            x = spike(block(x))
        return x


class Block(nn.Module):
    """The unit of sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.norm = nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).tanh())


def sharded_losses(rank: int, kind: str, treated: str) -> list[Any]:
    """Losses and the gathered weights of three steps, each rank on data of its own."""
    torch.manual_seed(0)
    model: Any = ShardedNet()

    def treat() -> None:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_module(block, compressor=BitSpikeCompressor())

    if treated == "before":
        treat()
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif kind == "ddp static graph":
        wrapped = nn.parallel.DistributedDataParallel(model, static_graph=True)
    elif kind == "ddp unused":
        model.spare = nn.Linear(2, 2)
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    elif kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        wrapped = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
        )
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        if treated == "after":
            treat()
        wrapped = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(100 + rank)
    history: list[Any] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (wrapped(torch.randn(4, C)) * torch.linspace(-1, 2, C)).sum()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(wrapped):
            weights = [parameter.detach().clone() for parameter in wrapped.parameters()]
    else:
        weights = [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in wrapped.parameters()]
    return [history, weights]


CASES_SHARDED = [
    ("ddp", "before"),
    ("ddp static graph", "before"),
    ("ddp unused", "before"),
    ("fsdp1", "before"),
    ("fsdp2", "before"),
    ("fsdp2", "after"),
]


def all_sharded(rank: int) -> dict[str, Any]:
    """Every way of sharding, plain and treated, in one pair of processes."""
    kinds = {kind: sharded_losses(rank, kind, "no") for kind in dict.fromkeys(kind for kind, _ in CASES_SHARDED)}
    results: dict[str, Any] = {f"{kind} plain": result for kind, result in kinds.items()}
    for kind, when in CASES_SHARDED:
        try:
            results[f"{kind} {when}"] = sharded_losses(rank, kind, when)
        except Exception as error:  # noqa: PERF203 - one kind must not hide the others
            results[f"{kind} {when}"] = repr(error)
    return results


@pytest.fixture(scope="module")
def sharded() -> list[dict[str, Any]]:
    from tests.ranks import run_ranks

    results: list[dict[str, Any]] = run_ranks(all_sharded, 2)
    return results


@pytest.mark.parametrize(("kind", "when"), CASES_SHARDED)
def test_sharded_and_replicated_blocks_train_as_without_treatment(
    sharded: list[dict[str, Any]], kind: str, when: str
) -> None:
    for rank, results in enumerate(sharded):
        assert_same_tree(results[f"{kind} plain"], results[f"{kind} {when}"], name=f"rank {rank}")
    assert sharded[0]["ddp plain"][0] != sharded[1]["ddp plain"][0], "the ranks must see different data"


# 16. torch.compile ----------------------------------------------------------------------------------------------------


def linear_lif() -> nn.Module:
    from spikingjelly.activation_based import neuron

    return nn.Sequential(nn.Linear(C, C), neuron.LIFNode(step_mode="m"))


def norm_lif() -> nn.Module:
    from spikingjelly.activation_based import layer, neuron

    return nn.Sequential(layer.BatchNorm2d(4, step_mode="m"), neuron.LIFNode(step_mode="m"))


class AttributeNeuron(nn.Module):
    """A user's block that is a neuron."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.v: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        spikes = []
        v = torch.zeros_like(x[0]) if self.v is None else self.v
        for t in range(x.shape[0]):
            v = v * 0.5 + self.linear(x[t])
            s = spike(v - 0.3)
            v = v * (1 - s)
            spikes.append(s)
        self.v = v.detach()
        return torch.stack(spikes)


COMPILED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear and norm": (lambda: nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.Tanh()), (T, N, C)),
    "linear and LIF": (linear_lif, (T, N, C)),
    "batch norm and LIF": (norm_lif, (T, N, 4, 3, 3)),
    "own block with a neuron": (SewAdd, (T, N, C)),
    "own neuron": (AttributeNeuron, (T, N, C)),
}


@pytest.mark.parametrize("state", ["reset", "carried"])
@pytest.mark.parametrize("compressor", [None, BitSpikeCompressor])
@pytest.mark.parametrize("kind", COMPILED)
def test_a_treated_block_compiles_into_one_graph_and_trains_as_the_eager_plain_one(
    kind: str, compressor: Any, state: str
) -> None:
    make_block, shape = COMPILED[kind]
    treated: list[nn.Module] = []

    def step(model: Any, batch: Any) -> Any:
        if model in treated:
            model = torch.compile(model, backend="aot_eager", fullgraph=True)
        return model(*batch.args)

    def treat(model: Any) -> None:
        wrap(model, compressor=None if compressor is None else compressor())
        treated.append(model)

    def between(model: Any) -> None:
        from spikingjelly.activation_based import functional

        functional.detach_net(model) if state == "carried" else functional.reset_net(model)
        if state == "reset" and kind == "own neuron":
            model.block.v = None

    torch._dynamo.reset()
    try:
        assert_optimized_equals_plain(
            lambda: raw_net(make_block()),
            treat,
            lambda: call((torch.rand(shape) > 0.5).float().requires_grad_()),
            step=step,
            between=between,
            steps=2,
        )
    finally:
        torch._dynamo.reset()
