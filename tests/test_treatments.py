"""Packed and partly recomputed regions train as the plain ones do, in fewer bytes, and without one more product."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lightning_memopt.checkpointing import (
    BitSpikeCompressor,
    NonBinarySpikeError,
    check_pending_fits,
    checkpoint_module,
    is_checkpointed,
    region_config,
    saved_tensors,
    unwrap_module,
)
from lightning_memopt.checkpointing.parts import PartCall
from lightning_memopt.measuring import measure_memory
from lightning_memopt.planning import (
    Plan,
    RegionPlan,
    applied_plan,
    apply_plan,
    optimize_memory,
    remove_plan,
)
from tests.equality import assert_optimized_equals_plain, assert_same_tree, backward_of_outputs, call
from tests.test_recompute import flops, saved_bytes, saved_storages
from tests.zoo import CASES, C, Case, N, Net, T, spike

TREATMENTS = ("pack", "recompute_cheap")
SAMPLES, FEATURES = 64, 128

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning"),
]


SMALLEST_BYTES = saved_tensors._SMALLEST_BYTES


@pytest.fixture(autouse=True)
def small_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are tiny; what is too small to be worth the calls is a matter of time, not of being right."""
    monkeypatch.setattr(saved_tensors, "_SMALLEST_BYTES", 64)


@pytest.fixture
def runs_again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the parts that are computed again, in order."""
    classes: list[str] = []
    original = PartCall._run_again

    def counted(self: PartCall) -> None:
        classes.append(self.name)
        original(self)

    monkeypatch.setattr(PartCall, "_run_again", counted)
    return classes


# Equality -------------------------------------------------------------------------------------------------------------


def treat(case: Case, treatment: Any) -> Callable[[Any], None]:
    def apply(model: Any) -> None:
        for path in case.regions:
            checkpoint_module(model.get_submodule(path), treatment=treatment)

    return apply


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("name", CASES)
def test_a_treated_region_equals_the_plain_one(name: str, treatment: str) -> None:
    case = CASES[name]
    assert_optimized_equals_plain(
        case.make_model,
        treat(case, treatment),
        case.make_batch,
        step=case.step,
        backward=case.backward,
        between=case.between,
        steps=case.steps,
    )


NESTED = [
    name
    for name in CASES
    if name.startswith(
        ("batch_norm_", "layer_norm", "dropout", "spikingjelly_lif", "spikingjelly_if", "stack_of_regions")
    )
    or name.endswith("_handed_back")
]


def children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
            yield child


@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("name", NESTED)
def test_recomputed_regions_may_lie_inside_and_around_treated_ones(name: str, treatment: Any, where: str) -> None:
    case = CASES[name]

    def apply(model: Any) -> None:
        for path in case.regions:
            region = model.get_submodule(path)
            options: list[Any] = [{"compressor": BitSpikeCompressor()}, {"treatment": treatment}]
            outer, inner = options if where == "around" else reversed(options)
            for child in children(region):
                checkpoint_module(child, **inner)
            checkpoint_module(region, **outer)

    assert_optimized_equals_plain(
        case.make_model,
        apply,
        case.make_batch,
        step=case.step,
        backward=case.backward,
        between=case.between,
        steps=case.steps,
    )


class Autocast(Net):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def mixed_block() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(C, C), nn.BatchNorm1d(C), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(C, C), nn.LayerNorm(C)
    )


class Distance(nn.Module):
    """Begins with an elementwise operation that autocast runs in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(x, x.detach() * 0.5, reduction="none").add(0.1).log()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "in place": lambda: Net(mixed_block()),
    "autocast": lambda: Autocast(nn.Sequential(*mixed_block(), nn.Linear(C, C), Distance(), nn.Linear(C, C))),
    "three blocks": lambda: nn.Sequential(*(mixed_block() for _ in range(3))),
    "analog output of a region": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C)), nn.Sequential(nn.Linear(C, C), nn.GELU()), nn.Linear(C, C)
    ),
    "the region is one cheap module": lambda: nn.Sequential(nn.Linear(C, C), nn.Sequential(nn.LayerNorm(C), nn.GELU())),
}


@pytest.mark.parametrize("around", ["nothing", "save_on_cpu", "torch checkpoint", "reentrant torch checkpoint"])
@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("model", MODELS)
def test_hooks_and_checkpoints_of_torch_may_lie_around_a_treated_region(
    model: str, treatment: Any, around: str
) -> None:
    def step(model: Any, batch: Any) -> Any:
        if around == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                return model(*batch.args)
        if around == "torch checkpoint":
            return torch_checkpoint(model, *batch.args, use_reentrant=False)
        if around == "reentrant torch checkpoint":
            return torch_checkpoint(model, *batch.args, use_reentrant=True)
        return model(*batch.args)

    def apply(model: Any) -> None:
        for region in [model.block] if isinstance(model, Net) else model:
            checkpoint_module(region, treatment=treatment)

    assert_optimized_equals_plain(
        MODELS[model], apply, lambda: call(torch.randn(T * N, C, requires_grad=True)), step=step
    )


class ChecksInside(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.GELU(), nn.Dropout(0.3))
        self.head = nn.Linear(C, C)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch_checkpoint(self.block, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_checkpoint_of_torch_may_lie_inside_a_treated_region(treatment: Any, reentrant: bool) -> None:
    assert_optimized_equals_plain(
        lambda: Net(ChecksInside(reentrant)),
        lambda model: checkpoint_module(model.block, treatment=treatment),
        lambda: call(torch.randn(T * N, C, requires_grad=True)),
    )


def gradients_of(model: nn.Module, backward: Callable[[nn.Module], Any]) -> list[Any]:
    torch.manual_seed(1)
    model.zero_grad()
    extra = backward(model)
    return [extra, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def second_order(model: nn.Module) -> Any:
    x = torch.randn(N, C, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()
    return x.grad


def twice(model: nn.Module) -> Any:
    loss = model(torch.randn(N, C)).tanh().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def in_pieces(model: nn.Module) -> Any:
    x = torch.randn(N, C, requires_grad=True)
    loss = model(x).tanh().sum()
    pieces = [torch.autograd.grad(loss, [p], retain_graph=True)[0] for p in model.parameters()]
    return pieces, torch.autograd.grad(loss, [x])[0]


def outside_of_a_backward_pass(model: nn.Module) -> Any:
    y = model(torch.randn(N, C, requires_grad=True))
    return y.grad_fn._saved_result if hasattr(y.grad_fn, "_saved_result") else None


def of_two_losses(model: Any) -> Any:
    x = torch.randn(N, C)
    h = model[:3](x)
    first = model[3:](h).sum()
    torch.autograd.grad(first, list(model[4].parameters()))
    h.pow(2).sum().backward()


@pytest.mark.parametrize("backward", [second_order, twice, in_pieces, outside_of_a_backward_pass, of_two_losses])
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_every_way_to_take_gradients_gives_those_of_the_plain_model(treatment: Any, backward: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        *(nn.Linear(C, C), nn.LayerNorm(C), nn.Tanh()),
        nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.Sigmoid(), nn.Dropout(0.2)),
        nn.Linear(C, C),
        nn.Sigmoid(),
    )
    treated = copy.deepcopy(plain)
    checkpoint_module(treated[3], treatment=treatment)
    whole = checkpoint_module(copy.deepcopy(plain), treatment=treatment)
    for _ in range(2):
        expected = gradients_of(plain, backward)
        assert_same_tree(expected, gradients_of(treated, backward))
        if backward is not of_two_losses:
            assert_same_tree(expected, gradients_of(whole, backward))


def test_a_gradient_taken_inside_a_cheap_module_is_right() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(x.tanh().sum(), x, create_graph=True)
            return x * slope

    assert_optimized_equals_plain(
        lambda: Net(nn.Sequential(nn.Linear(C, C), Inner(), nn.Linear(C, C))),
        lambda model: checkpoint_module(model.block, treatment="recompute_cheap"),
        lambda: call(torch.randn(N, C, requires_grad=True)),
    )


# pack: bytes ----------------------------------------------------------------------------------------------------------


class Saves(nn.Module):
    """A function of one tensor that makes autograd save what it likes."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def packed_bytes(function: Callable[[Tensor], Any], x: Tensor) -> tuple[int, int]:
    """Bytes that autograd keeps for ``function(x)`` in a plain and in a packed region."""
    sizes = []
    for module in (Saves(function), checkpoint_module(Saves(function), treatment="pack")):
        torch.manual_seed(0)
        sizes.append(saved_bytes(lambda m=module: m(x)))  # type: ignore[misc]
    return sizes[0], sizes[1]


WEIGHT = torch.randn(FEATURES, FEATURES)
PACKED: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "spikes": (lambda x: (x > 0).float() * x.sum(), 32),
    "float64 spikes": (lambda x: (x > 0).double() * x.double().sum(), 64),
    "bfloat16 spikes": (lambda x: (x > 0).bfloat16() * x.bfloat16().sum(), 16),
    "counts to 3": (lambda x: x.sign().add(1) * x.sum(), 16),
    "counts to 15": (lambda x: (x.sign().add(1) * 7) * x.sum(), 8),
    "counts to 255": (lambda x: (x.sign().add(1) * 100) * x.sum(), 4),
    "two values": (lambda x: (x > 0).float().mul(1.25) * x.sum(), 32),
    "mask of masked_fill": (lambda x: x.masked_fill(x.detach() > 0, 0.0), 8),
    "mask of where": (lambda x: torch.where(x.detach() > 0, x, 0.0), 8),
    "small indices": (lambda x: F.embedding((x.detach() > 0).long(), x), 64),
}


@pytest.mark.parametrize("name", PACKED)
def test_packing_takes_the_fewest_bits(name: str) -> None:
    function, factor = PACKED[name]
    plain, packed = packed_bytes(function, torch.randn(SAMPLES, FEATURES, requires_grad=True))
    numel = SAMPLES * FEATURES
    rest = plain % numel  # single values beside the tensor
    assert packed - rest == (plain - rest) // factor
    assert plain >= numel


NOT_PACKED: dict[str, Callable[[Tensor], Any]] = {
    "analog": lambda x: x.exp(),
    "a negative value": lambda x: (x > 0).float().index_fill(1, torch.tensor([3]), -1.0) * x.sum(),
    "one analog value": lambda x: (x > 0).float().index_fill(1, torch.tensor([3]), 0.5) * x.sum(),
    "not a number": lambda x: (x > 0).float().index_fill(1, torch.tensor([3]), float("nan")) * x.sum(),
    "two values beside zero": lambda x: x.sign().mul(1.5) * x.sum(),
    "256": lambda x: (x > 0).float().mul(256).index_fill(1, torch.tensor([3]), 1.0) * x.sum(),
    "large indices": lambda x: x.flatten().index_select(0, torch.arange(x.numel())),
}


@pytest.mark.parametrize("name", NOT_PACKED)
def test_what_no_bits_hold_is_stored_as_it_is(name: str) -> None:
    plain, packed = packed_bytes(NOT_PACKED[name], torch.randn(SAMPLES, FEATURES, requires_grad=True))
    assert packed == plain


def test_the_noise_of_dropout_takes_one_bit() -> None:
    plain, packed = packed_bytes(lambda x: F.dropout(x, 0.2), torch.randn(SAMPLES, FEATURES, requires_grad=True))
    numel = SAMPLES * FEATURES
    assert packed == numel // 8
    assert plain in (numel, 4 * numel)  # a mask on CUDA, scaled noise on the CPU


def test_a_storage_is_packed_once_whoever_saves_it_or_views_of_it() -> None:
    def function(x: Tensor) -> Any:
        s = (x > 0).float()
        scale = x.sum()
        return s * scale, s.t() * scale, s[3] * scale, s.view(-1)[5:90] * scale, F.linear(s, scale.expand(1, FEATURES))

    _, packed = packed_bytes(function, torch.randn(SAMPLES, FEATURES, requires_grad=True))
    assert packed <= SAMPLES * FEATURES // 8 + 8


def test_two_regions_share_the_bits_of_one_tensor() -> None:
    layers = [checkpoint_module(nn.Linear(FEATURES, FEATURES), treatment="pack") for _ in range(2)]
    layers += [checkpoint_module(nn.Linear(FEATURES, FEATURES), compressor=BitSpikeCompressor())]
    stem = nn.Linear(FEATURES, FEATURES)
    s = spike(stem(torch.randn(SAMPLES, FEATURES)))
    assert saved_bytes(lambda: [layer(s) for layer in layers], *layers) == s.nbytes // 32


def test_binary_parameters_and_buffers_that_stay_alive_are_not_packed() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, FEATURES)
            self.register_buffer("mask", torch.rand(SAMPLES, FEATURES) > 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).masked_fill(self.mask, 0.0)

    model = checkpoint_module(Masked(), treatment="pack")
    nn.init.ones_(model.linear.weight)
    x = torch.randn(SAMPLES, FEATURES, requires_grad=True)
    for _ in range(3):
        y, saved = saved_storages(lambda: model(x))
        y.sum().backward()
    kept = {x.untyped_storage().data_ptr(), model.linear.weight.untyped_storage().data_ptr()}
    assert saved.keys() == {*kept, model.mask.untyped_storage().data_ptr()}


def test_a_batch_that_outlives_the_backward_is_stored_as_it_is_once_that_is_known() -> None:
    model = checkpoint_module(nn.Linear(FEATURES, FEATURES), treatment="pack")
    x = (torch.rand(SAMPLES, FEATURES) > 0.5).float()
    sizes = []
    for _ in range(4):
        y, saved = saved_storages(lambda: model(x), model)
        sizes.append(sum(saved.values()))
        y.sum().backward()
    assert sizes == [x.nbytes // 32, x.nbytes // 32, x.nbytes, x.nbytes]


def test_silent_spikes_that_become_counts_take_more_bits_from_then_on() -> None:
    class Counts(nn.Module):
        level = 0.0

        def forward(self, x: Tensor) -> Tensor:
            s = (x > 0).float() * self.level
            return s * x.sum()

    model = checkpoint_module(Counts(), treatment="pack")
    x = torch.randn(SAMPLES, FEATURES, requires_grad=True)
    for level, bits in ((0.0, 1), (1.0, 1), (3.0, 2), (9.0, 4), (1.0, 4), (0.7, 1)):
        model.level = level
        y, saved = saved_storages(lambda: model(x))
        assert sum(saved.values()) == x.numel() * bits // 8, level
        x.grad = None
        y.sum().backward()
        expected = torch.full_like(x, ((x > 0).float() * level).sum().item())
        torch.testing.assert_close(x.grad, expected)


def test_an_analog_tensor_is_not_tried_again_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    original = saved_tensors._compress
    monkeypatch.setattr(saved_tensors, "_compress", lambda *a: tries.append(a[0].shape) or original(*a))
    model = checkpoint_module(Saves(torch.exp), treatment="pack")
    for _ in range(100):
        x = torch.randn(SAMPLES, FEATURES)
        x[:, 0] = 0.0  # where the sample is taken
        model(x.requires_grad_()).sum().backward()
    assert 0 < len(tries) <= 14


# pack: lifetimes and errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("what", ["analog", "spikes", "made again"])
def test_a_saved_tensor_that_is_changed_in_place_is_an_error(what: str, treatment: Any) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(C)
            self.first, self.second = nn.Linear(C, C), nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).exp() if what != "made again" else self.norm(self.first(x))
            h = spike(h - 1) if what == "spikes" else h
            y = self.second(h)
            with torch.no_grad():
                h.add_(1)
            return y

    for module in (Changes(), checkpoint_module(Changes(), treatment=treatment)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            module(torch.randn(T * N, C)).sum().backward()


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_weight_that_is_changed_before_the_backward_is_an_error(treatment: Any) -> None:
    model = checkpoint_module(nn.Sequential(nn.Linear(C, C), nn.GELU(), nn.Linear(C, C)), treatment=treatment)
    loss = model(torch.randn(N, C, requires_grad=True)).sum()
    with torch.no_grad():
        model[2].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(item, Tensor) for item in gc.get_objects())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("ending", ["backward", "dropped", "error"])
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_many_steps_leave_no_tensor_behind(treatment: Any, ending: str) -> None:
    class Fails(nn.Module):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            y = x.sigmoid() * x
            if self.fails:
                raise ArithmeticError("on purpose")
            return y

    fails = Fails()
    model = nn.Sequential(nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), fails, nn.Dropout(0.2)), nn.Linear(C, C))
    checkpoint_module(model[0], treatment=treatment)
    fails.fails = ending == "error"

    def step() -> None:
        x = (torch.rand(T * N, C) > 0.5).float().requires_grad_()
        if ending == "error":
            with pytest.raises(ArithmeticError):
                model(x)
            return
        y = model(x)
        if ending == "backward":
            backward_of_outputs(y)

    for _ in range(3):
        step()
    before = live_tensors()
    for _ in range(20):
        step()
    assert live_tensors() <= before
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_what_was_packed_is_freed_by_the_backward_and_with_a_dropped_graph() -> None:
    stem = nn.Linear(FEATURES, FEATURES)
    model = checkpoint_module(nn.Linear(FEATURES, FEATURES), treatment="pack")
    for ending in ("backward", "dropped"):
        s = spike(stem(torch.randn(SAMPLES, FEATURES)))
        y = model(s)
        source = weakref.ref(s)
        del s
        gc.collect()
        assert source() is None, "bits do not hold the tensor"
        assert len(saved_tensors._BITS) == 1
        if ending == "backward":
            y.sum().backward()
        else:
            del y
        gc.collect()
        assert len(saved_tensors._BITS) == 0


# pack: where reading waits for the device -----------------------------------------------------------------------------


class ReadError(AssertionError):
    pass


@pytest.fixture
def reading_waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """The CPU stands for a device whose values are not free to read; the returned context forbids to read any."""
    for module in ("ops.exactness", "checkpointing.saved_tensors", "checkpointing.compressors"):
        monkeypatch.setattr(f"lightning_memopt.{module}.reading_is_free", lambda tensor: False)

    def refusing(read: Any) -> Any:
        def refuse(tensor: Tensor) -> Any:
            # The packing operation itself looks at the device, which is the CPU here.
            if not sys._getframe(1).f_code.co_filename.endswith("bit_pack.py"):
                raise ReadError("a value was read")
            return read(tensor)

        return refuse

    def forbidden() -> Any:
        context = pytest.MonkeyPatch.context()
        patch = context.__enter__()
        for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
            patch.setattr(Tensor, name, refusing(getattr(Tensor, name)))
        return context

    return forbidden


class Scaled(nn.Module):
    """Saves spikes, analog values, a mask and dropout's noise; spikes are scaled by `level`."""

    level = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        s = spike(x.sin()) * self.level
        return F.dropout(self.linear(s), 0.2).masked_fill(x.detach() > 1, 0.0).exp()


def test_nothing_is_read_in_a_step_once_the_sites_are_known(reading_waits: Callable[[], Any]) -> None:
    stem = nn.Linear(FEATURES, FEATURES)
    model = checkpoint_module(Scaled(), treatment="pack")
    x = torch.randn(SAMPLES, FEATURES)
    sizes = []
    for number in range(5):
        context = reading_waits() if number >= 3 else None
        try:
            y, saved = saved_storages(lambda: model(stem(x)), model, stem)
            y.sum().backward()
        finally:
            if context is not None:
                context.__exit__(None, None, None)
        sizes.append(sum(saved.values()))
        check_pending_fits()
    assert len(set(sizes)) == 1
    numel = x.numel()
    # The input of sin and of the surrogate and the result of exp; spikes, noise and mask in a bit each; single values.
    assert sizes[0] < 4 * numel * 4 + 3 * numel // 8 + 64


def test_a_value_that_does_not_fit_raises_before_the_optimizer_steps(reading_waits: Callable[[], Any]) -> None:
    stem = nn.Linear(FEATURES, FEATURES)
    model = checkpoint_module(Scaled(), treatment="pack", name="block 3")
    plain = copy.deepcopy(unwrap_module(copy.deepcopy(model)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = stem(torch.randn(SAMPLES, FEATURES)).detach().requires_grad_()

    def step(module: Any, level: float) -> list[Tensor]:
        module.level = level
        module.zero_grad()
        torch.manual_seed(0)
        module(x * 1).sum().backward()
        return [p.grad.clone() for p in module.parameters()]

    for _ in range(3):
        step(model, 1.0)
        optimizer.step()
    weight = model.linear.weight.detach().clone()
    step(model, 3.0)
    with pytest.raises(NonBinarySpikeError, match=r"of block 3 \(Scaled\).*held 3\.0.*run this step again"):
        optimizer.step()
    assert torch.equal(model.linear.weight, weight)
    # That tensor is stored as it is now, so the step can be done again.
    plain.load_state_dict(model.state_dict())
    assert_same_tree(step(plain, 3.0), step(model, 3.0))
    optimizer.step()


# recompute_cheap ------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.projection(y.transpose(1, 2).reshape(batch, length, width)))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, length, vocabulary = 64, 64, 128
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(TransformerBlock(width, 4, 0.1) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())

    @property
    def regions(self) -> list[nn.Module]:
        return list(self.blocks)

    @staticmethod
    def batch() -> Tensor:
        return torch.randint(0, 128, (4, 64))


class SpikingVGG(nn.Module):
    def __init__(self) -> None:
        from spikingjelly.activation_based import functional, layer, neuron

        super().__init__()

        def block(inputs: int, outputs: int, *pool: nn.Module) -> nn.Sequential:
            conv = layer.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            return nn.Sequential(conv, layer.BatchNorm2d(outputs), neuron.LIFNode(detach_reset=True), *pool)

        self.features = nn.Sequential(
            block(3, 16), block(16, 16, layer.MaxPool2d(2)), block(16, 32), block(32, 32, layer.MaxPool2d(2))
        )
        self.classifier = nn.Sequential(layer.Flatten(), layer.Linear(32 * 4 * 4, 10))
        functional.set_step_mode(self, "m")

    def forward(self, x: Tensor) -> Tensor:
        from spikingjelly.activation_based import functional

        functional.reset_net(self)
        return F.cross_entropy(self.classifier(self.features(x)).mean(0), torch.arange(x.shape[1]))

    @property
    def regions(self) -> list[nn.Module]:
        return list(self.features)

    @staticmethod
    def batch() -> Tensor:
        return torch.rand(4, 4, 3, 16, 16)


def measured(make: Any, treatment: Any) -> dict[str, Any]:
    """Saved bytes, FLOPs, peak above the start and gradients of the third, fourth and fifth step."""
    torch.manual_seed(0)
    model, batch = make(), make.batch()
    for region in model.regions if treatment else ():
        checkpoint_module(region, treatment=treatment)
    result: dict[str, Any] = {}
    for number in range(5):
        model.zero_grad()
        torch.manual_seed(number)
        if number == 2:
            loss, saved = saved_storages(lambda: model(batch), model)
            result["saved"] = sum(saved.values())
            loss.backward()
        elif number == 3:
            result["flops"] = flops(lambda: model(batch).backward())
        elif number == 4:
            # The gradients are there before, as in a step that accumulates.
            model(batch).backward()
            memory = measure_memory(lambda: model(batch).backward())
            result["peak"] = memory.peak_bytes - memory.start_bytes
        else:
            model(batch).backward()
    result["loss"] = loss.detach()
    result["gradients"] = [p.grad.clone() for p in model.parameters()]
    result["state"] = {name: b.clone() for name, b in model.named_buffers()}
    return result


@pytest.mark.parametrize("make", [GPT, SpikingVGG])
def test_cheap_recomputation_saves_a_third_of_the_activations_and_costs_no_product(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_tensors, "_SMALLEST_BYTES", SMALLEST_BYTES)
    plain, packed, cheap = (measured(make, treatment) for treatment in (None, *TREATMENTS))
    for name, found in (("pack", packed), ("recompute_cheap", cheap)):
        print(
            f"{make.__name__}, {name}: saved {plain['saved'] / 2**20:.2f} -> {found['saved'] / 2**20:.2f} MiB "
            f"({found['saved'] / plain['saved'] - 1:+.1%}), peak of the step {plain['peak'] / 2**20:.2f} -> "
            f"{found['peak'] / 2**20:.2f} MiB ({found['peak'] / plain['peak'] - 1:+.1%}), "
            f"FLOPs x {found['flops'] / plain['flops']:.4f}"
        )
        assert found["flops"] == plain["flops"]
        assert_same_tree(
            {key: plain[key] for key in ("loss", "gradients", "state")},
            {key: found[key] for key in ("loss", "gradients", "state")},
        )
        assert found["saved"] < plain["saved"]
    assert cheap["saved"] <= 0.65 * plain["saved"]
    assert cheap["peak"] < plain["peak"]


def test_the_first_step_already_stores_what_later_steps_store() -> None:
    for make in (GPT, SpikingVGG):
        model: Any = make()
        for region in model.regions:
            checkpoint_module(region, treatment="recompute_cheap")
        sizes = []
        for _ in range(2):
            loss, saved = saved_storages(lambda: model(make.batch()), model)  # noqa: B023
            sizes.append(sum(saved.values()))
            loss.backward()
        assert sizes[0] <= sizes[1] * 1.05


def test_the_first_step_holds_no_more_of_a_neuron_than_later_ones() -> None:
    from spikingjelly.activation_based import neuron

    block = nn.Sequential(nn.Linear(FEATURES, FEATURES), neuron.IFNode(step_mode="m"))
    checkpoint_module(block, treatment="recompute_cheap")
    x = (torch.rand(16, SAMPLES, FEATURES) > 0.5).float()
    peaks = []
    for _ in range(2):
        block[1].reset()
        report = measure_memory(lambda: block(x))
        peaks.append(report.peak_bytes - report.start_bytes)
    # A neuron saves three tensors like its input, which would be held until it is known whether to store them.
    assert peaks[0] <= peaks[1] + x.nbytes // 8


class TwoReaders(nn.Module):
    """One norm feeds two products whose gradients are taken one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(C), nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        return self.first(y), self.second(y)


@pytest.mark.parametrize("treatment", [*TREATMENTS, "recompute"])
def test_a_product_may_take_its_gradient_after_the_part_that_feeds_it_had_its_own(treatment: Any) -> None:
    plain = TwoReaders()
    treated = checkpoint_module(copy.deepcopy(plain), treatment=treatment)
    x = torch.randn(N, C)
    found = []
    for model in (plain, treated):
        first, second = model(x)
        first.pow(2).sum().backward()
        found.append(torch.autograd.grad(second.pow(2).sum(), model.second.weight)[0])
    assert torch.equal(*found)
    assert_same_tree([p.grad for p in plain.parameters()], [p.grad for p in treated.parameters()])


class Shared(nn.Module):
    """One norm feeds three products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.q, self.k, self.v = (nn.Linear(FEATURES, FEATURES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.q(h) * self.k(h) + self.v(h.view(8, -1, FEATURES)).view_as(h)


def test_an_output_is_computed_again_once_for_all_who_need_it(runs_again: list[str]) -> None:
    model = checkpoint_module(Shared(), treatment="recompute_cheap")
    x = torch.randn(SAMPLES, FEATURES, requires_grad=True)
    for steps in (1, 2):
        y, saved = saved_storages(lambda: model(x * 1), model)
        y.sum().backward()
        assert runs_again == ["LayerNorm"] * steps
    # The norm's input, and two of the products' outputs for their product.
    assert sum(saved.values()) == 3 * x.nbytes


def test_what_was_computed_again_is_freed_during_the_backward() -> None:
    outputs: list[weakref.ref[Tensor]] = []
    known_before = set(saved_tensors._KNOWN)

    class Norm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            outputs.append(weakref.ref(y))
            return y

    model = nn.Sequential(nn.Linear(C, C), Norm(C), nn.Linear(C, C))
    checkpoint_module(model, treatment="recompute_cheap")
    y = model(torch.randn(N, C, requires_grad=True))
    gc.collect()
    assert [output() for output in outputs] == [None], "the forward's output is not stored"
    y.sum().backward(retain_graph=True)
    gc.collect()
    assert [output() for output in outputs] == [None, None]
    assert saved_tensors._KNOWN.keys() <= known_before


def test_recipes_chain(runs_again: list[str]) -> None:
    parts = [nn.BatchNorm1d(C), nn.Sigmoid(), nn.LayerNorm(C)]
    model = nn.Sequential(nn.Linear(C, C), *parts, nn.Linear(C, C))
    checkpoint_module(model, treatment="recompute_cheap")
    x = torch.randn(T * N, C, requires_grad=True)
    y, saved = saved_storages(lambda: model(x * 1), model)
    assert sum(saved.values()) == 2 * x.nbytes, "the inputs of the first product and of the first norm"
    y.sum().backward()
    assert sorted(runs_again) == sorted(type(part).__name__ for part in parts)
    assert model[1].num_batches_tracked == 1


def test_spikes_are_stored_as_bits_rather_than_computed_again(runs_again: list[str]) -> None:
    from spikingjelly.activation_based import neuron

    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), neuron.IFNode(), nn.Linear(FEATURES, FEATURES))
    checkpoint_module(model, treatment="recompute_cheap")
    x = torch.randn(SAMPLES, FEATURES, requires_grad=True) * 2
    y, saved = saved_storages(lambda: model(x), model)
    # The first product's input and output, and the spikes.
    assert sum(saved.values()) == 2 * x.nbytes + x.nbytes // 32
    torch.autograd.grad(y.sum(), [model[2].weight])
    assert runs_again == [], "the gradient of the second weight needs the spikes alone"


# Traps ----------------------------------------------------------------------------------------------------------------


class ReusesMemory(nn.Module):
    """A norm's output dies, and another tensor takes its place."""

    reused: ClassVar[list[bool]] = []

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        address, scale = h.data_ptr(), h.sum()
        del h
        others = [x + 1]
        while others[-1].data_ptr() != address and len(others) < 3000:
            others.append(x + 1)
        self.reused.append(others[-1].data_ptr() == address)
        return self.linear(others[-1]) * scale


class ChangesOutput(nn.Module):
    """A norm's output is changed in place before it is used."""

    def __init__(self, through: str) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(C), nn.Linear(C, C)
        self.through = through

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.through == "itself":
            h.mul_(2)
        elif self.through == "a view":
            h[0].mul_(2)
        elif self.through == "data":
            h.data.mul_(2)
            h = h * 1
        else:
            with torch.no_grad():
                h.detach().mul_(2)
        return self.linear(h) + self.linear(h.view(-1, C)[:, :].clone())


class Views(nn.Module):
    """The products get views of a norm's output, reordered, partial and repeated ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(C), nn.Linear(C, C)
        self.split = nn.Sequential(nn.LayerNorm(C), nn.Unflatten(1, (2, 4)), nn.Softplus())

    def forward(self, x: Tensor) -> Any:
        h = self.norm(x)
        views = [
            h,
            h.t()[:, :C].t(),
            h[2:],
            h.flip(0),
            h[:1].expand(4, C),
            h.view(2, -1, C),
            h.unfold(0, 2, 1)[:, :, 0],
        ]
        a, b = self.split(h).chunk(2, dim=1)
        return [self.linear(view) for view in views], self.linear(torch.cat([a.flatten(1), b.flatten(1)], 1)), a * b


class Recurrent(nn.Module):
    """Calls one cheap module many times, on its own outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.norm(self.norm(x) + self.linear(x))
        return x


class CheapModuleOfTheUser(nn.Module):
    """Keeps a potential between calls and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.potential: Any = 0.0
        self.calls = 0
        self.register_buffer("rate", torch.zeros(C))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        self.calls += 1
        self.potential = self.potential * 0.5 + x * scale
        s = spike(self.potential - torch.rand_like(x))
        self.potential = self.potential.detach() * (1 - s.detach())
        self.rate.mul_(0.9).add_(s.detach().mean(0))
        return s * self.calls, {"tanh": (self.potential + x).tanh()}


class WithUserModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.cheap, self.second = nn.Linear(C, C), CheapModuleOfTheUser(), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Any:
        spikes, more = self.cheap(self.first(x), scale=1.5)
        return self.second(spikes) + self.second(more["tanh"])


class Gate(nn.Module):
    """A module without parameters that changes its second argument in place, which its class does not tell."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        gate.sigmoid_()
        return x * gate


class WithGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.gate, self.norm = nn.Linear(C, C), nn.Linear(C, C), Gate(), nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.gate(self.norm(x), self.norm(self.first(x))) + self.gate(self.first(x), self.second(x)))


class UnderNoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.norm(x)
        return self.linear(h) + self.linear(self.norm(x))


class Shortcut(nn.Module):
    """A residual block as torchvision builds it: one ReLU in place, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.norm_1, self.norm_2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm_1(self.conv_1(x)))
        out = self.norm_2(self.conv_2(out))
        out += x
        return self.relu(out)


TRAPS: dict[str, Callable[[], nn.Module]] = {
    "output changed": lambda: ChangesOutput("itself"),
    "output changed through a view": lambda: ChangesOutput("a view"),
    "output changed through data": lambda: ChangesOutput("data"),
    "output changed through an alias": lambda: ChangesOutput("an alias"),
    "views": Views,
    "recurrent": Recurrent,
    "user module": WithUserModule,
    "user module that writes": WithGate,
    "no_grad": UnderNoGrad,
}


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("trap", TRAPS)
def test_no_trap_changes_the_gradients(trap: str, treatment: Any, around: bool) -> None:
    def reset(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, CheapModuleOfTheUser):
                module.potential = 0.0

    def apply(model: Any) -> None:
        checkpoint_module(model[1], treatment=treatment)
        if around:
            checkpoint_module(model)

    assert_optimized_equals_plain(
        lambda: nn.Sequential(nn.Linear(C, C), TRAPS[trap]()),
        apply,
        lambda: call(torch.randn(T * N, C, requires_grad=True)),
        between=reset,
    )


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_reused_address_is_not_taken_for_the_tensor_that_was_there(treatment: Any) -> None:
    ReusesMemory.reused.clear()
    assert_optimized_equals_plain(
        ReusesMemory,
        lambda model: checkpoint_module(model, treatment=treatment),
        lambda: call(torch.randn(SAMPLES, FEATURES, requires_grad=True)),
        steps=10,
    )
    assert any(ReusesMemory.reused[10:]), "the trap was not set"


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_residual_block_with_activations_in_place_equals_the_plain_one_and_stores_less(treatment: Any) -> None:
    plain, treated = assert_optimized_equals_plain(
        lambda: nn.Sequential(Shortcut(), Shortcut()),
        lambda model: [checkpoint_module(block, treatment=treatment) for block in model],
        lambda: call(torch.randn(N, 4, 6, 6, requires_grad=True)),
    )
    x = torch.randn(N, 4, 6, 6, requires_grad=True)
    before, after = (saved_bytes(lambda m=m: m(x * 1), m) for m in (plain, treated))  # type: ignore[misc]
    assert after < (0.8 if treatment == "recompute_cheap" else 1.01) * before


def test_a_module_with_a_product_of_its_own_is_kept(runs_again: list[str]) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(FEATURES, FEATURES))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.matrix)

    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]

    plain = nn.Sequential(nn.Linear(FEATURES, FEATURES), Hidden(), Attends(), nn.GELU(), nn.Linear(FEATURES, FEATURES))
    treated = checkpoint_module(copy.deepcopy(plain), treatment="recompute_cheap")
    x = torch.randn(SAMPLES, FEATURES, requires_grad=True)
    counts = [[flops(lambda m=m: m(x).sum().backward()) for _ in range(3)] for m in (plain, treated)]  # type: ignore[misc]
    assert counts[0] == counts[1]
    assert runs_again == ["GELU"] * 3


def test_dropout_after_a_projection_stores_its_noise_not_its_input() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.2))
    checkpoint_module(model, treatment="recompute_cheap")
    x = torch.randn(SAMPLES, FEATURES, requires_grad=True)
    for _ in range(3):
        y, saved = saved_storages(lambda: model(x * 1), model)
        y.sum().backward()
        assert sum(saved.values()) == x.nbytes + x.nbytes // 32


def test_the_signature_of_a_part_can_be_asked_for_during_the_forward() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.linear = Gate(), nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            assert list(inspect.signature(self.gate.forward).parameters) == ["x", "gate"]
            return self.linear(x)

    checkpoint_module(Asks(), treatment="recompute_cheap")(torch.randn(N, C)).sum().backward()


def test_hooks_inside_a_treated_region_fire_once() -> None:
    seen: list[str] = []
    model = nn.Sequential(nn.Linear(C, C), nn.Sequential(nn.LayerNorm(C), nn.GELU()), nn.Linear(C, C))
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
        module.register_full_backward_hook(lambda *_, name=name: seen.append(f"{name} backward"))
    expected = None
    for treatment in (None, *TREATMENTS):
        seen.clear()
        if treatment:
            checkpoint_module(model, treatment=treatment)
        model(torch.randn(N, C, requires_grad=True)).sum().backward()
        expected = expected or list(seen)
        assert seen == expected


def test_a_module_that_remembers_its_output_is_freed_with_its_model() -> None:
    class Remembers(nn.Module):
        last: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x.sigmoid()
            return self.last

    model = nn.Sequential(nn.Linear(C, C), Remembers(), nn.Linear(C, C))
    checkpoint_module(model, treatment="recompute_cheap")
    for _ in range(2):
        model(torch.randn(N, C)).sum().backward()
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


class CastOutput(nn.Module):
    """Under autocast the product gets a copy of the output in another dtype, changed before or after the copy."""

    def __init__(self, changed: str) -> None:
        super().__init__()
        self.first, self.distance, self.second = nn.Linear(C, C), Distance(), nn.Linear(C, C)
        self.changed = changed

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.distance(self.first(x))
            if self.changed == "before":
                with torch.no_grad():
                    h.detach().mul_(2)
            y = self.second(h)
            if self.changed == "after":
                with torch.no_grad():
                    h.detach().mul_(2)
            return y


@pytest.mark.parametrize("changed", ["never", "before", "after"])
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_the_copy_of_an_output_that_autocast_makes_is_made_again(
    changed: str, treatment: Any, runs_again: list[str]
) -> None:
    _, treated = assert_optimized_equals_plain(
        lambda: Net(CastOutput(changed)),
        lambda model: checkpoint_module(model.block, treatment=treatment),
        lambda: call(torch.randn(T * N, C, requires_grad=True)),
    )
    if treatment == "recompute_cheap" and changed == "never":
        x = torch.randn(T * N, C, requires_grad=True)
        y, saved = saved_storages(lambda: treated.block(x * 1), treated)
        # The first product's input and output and two weights as bfloat16; not the input of the second product.
        assert sum(saved.values()) == 2 * (x.nbytes // 2) + 2 * (C * C * 2)
        runs_again.clear()
        torch.autograd.grad(y.sum(), [treated.block.second.weight])
        assert runs_again == ["Distance"]


@pytest.mark.parametrize("outer", TREATMENTS)
@pytest.mark.parametrize("inner", TREATMENTS)
@pytest.mark.parametrize("recomputed", [False, True])
def test_treated_regions_may_lie_inside_each_other(outer: Any, inner: Any, recomputed: bool) -> None:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.Sequential(nn.GELU(), nn.Linear(C, C), nn.Dropout()))

    def apply(model: Any) -> None:
        for part in model:
            checkpoint_module(part[2], treatment=inner)
            checkpoint_module(part, treatment=outer)
        if recomputed:
            checkpoint_module(model)

    plain, treated = assert_optimized_equals_plain(
        lambda: nn.Sequential(block(), block()), apply, lambda: call(torch.randn(T * N, C, requires_grad=True))
    )
    if not recomputed:
        x = torch.randn(T * N, C, requires_grad=True)
        before, after = (saved_bytes(lambda m=m: m(x * 1), m) for m in (plain, treated))  # type: ignore[misc]
        assert after <= before * (0.8 if "recompute_cheap" in (outer, inner) else 1)


def test_a_parameter_without_memory_is_refused_in_words() -> None:
    model = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.Linear(C, C))
    checkpoint_module(model, treatment="recompute_cheap")
    loss = model(torch.randn(N, C)).sum()
    # As a sharded parameter is after the forward of its shard.
    model[1].weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="weight of LayerNorm has no memory now"):
        loss.backward()


# The module itself ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_treated_module_stays_the_module_it_was(treatment: Any) -> None:
    block = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.ReLU(), nn.Linear(C, C))
    keys = list(block.state_dict())
    assert checkpoint_module(block, treatment=treatment) is block
    facts = block.__dict__["_memopt_region"]
    block(torch.randn(N, C)).sum().backward()
    assert checkpoint_module(block, treatment=treatment).__dict__["_memopt_region"] is facts, "applying twice"
    assert (type(block).__name__, isinstance(block, nn.Sequential)) == ("Sequential", True)
    assert list(block.state_dict()) == keys
    assert [type(module) for module in block] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert region_config(other) == region_config(block)
        other(torch.randn(N, C)).sum().backward()
        assert all(a is not b for a in other.modules() for b in block.modules())
    assert checkpoint_module(block).__dict__["_memopt_region"].config.treatment == "recompute"
    assert type(unwrap_module(block)) is nn.Sequential
    assert not is_checkpointed(block)


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_layer_that_is_exchanged_is_noticed(treatment: Any, runs_again: list[str]) -> None:
    def exchange(model: Any) -> None:
        model.block[1] = nn.LayerNorm(C) if isinstance(model.block[1], nn.GELU) else nn.GELU()

    assert_optimized_equals_plain(
        lambda: Net(nn.Sequential(nn.Linear(C, C), nn.GELU(), nn.Linear(C, C))),
        lambda model: checkpoint_module(model.block, treatment=treatment),
        lambda: call(torch.randn(N, C, requires_grad=True)),
        between=exchange,
        make_optimizer=lambda model: None,
    )
    assert treatment == "pack" or runs_again == ["GELU", "LayerNorm", "GELU"]


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_nothing_is_stored_or_run_again_without_gradients(treatment: Any) -> None:
    block = checkpoint_module(nn.Sequential(nn.Linear(C, C), nn.GELU()), treatment=treatment)
    with torch.no_grad():
        saved = saved_bytes(lambda: block(torch.randn(N, C)))
    assert saved == 0


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_treated_region_runs_plainly_under_the_compiler(treatment: Any) -> None:
    torch._dynamo.reset()
    plain = nn.Sequential(nn.Linear(C, C), nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.GELU()))
    treated = copy.deepcopy(plain)
    checkpoint_module(treated[1], treatment=treatment)
    compiled = torch.compile(treated, fullgraph=True, backend="aot_eager")
    x = torch.randn(N, C)
    for _ in range(2):
        for model in (plain, compiled):
            model.zero_grad()
            model(x).sum().backward()
        for a, b in zip(plain.parameters(), treated.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


def test_a_part_that_is_compiled_by_itself_is_left_alone() -> None:
    torch._dynamo.reset()
    part = nn.Sequential(nn.LayerNorm(C), nn.GELU())
    part.compile(fullgraph=True, backend="aot_eager")
    model = checkpoint_module(nn.Sequential(nn.Linear(C, C), part, nn.Linear(C, C)), treatment="recompute_cheap")
    plain = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.GELU(), nn.Linear(C, C))
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        a.data = b.data
    x = torch.randn(N, C)
    for module in (plain, model):
        module(x).sum().backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_transforms_of_torch_func_run_through_a_treated_region() -> None:
    layer = checkpoint_module(nn.Sequential(nn.Linear(C, C), nn.GELU()), treatment="recompute_cheap")
    x = torch.randn(N, C)
    per_sample = torch.func.vmap(torch.func.grad(lambda sample: layer(sample).sum()))(x)
    leaf = x.clone().requires_grad_()
    layer(leaf).sum().backward()
    torch.testing.assert_close(per_sample, leaf.grad)


@pytest.mark.parametrize(
    "options",
    [
        {"compressor": BitSpikeCompressor()},
        {"chunks": 2},
        {"compressed_args": (0,)},
        {"time_dim": 1},
        {"check_chunks": False},
    ],
)
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_options_of_another_treatment_are_refused(treatment: Any, options: dict[str, Any]) -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"{next(iter(options))}: only for treatment='recompute'"):
        checkpoint_module(layer, treatment=treatment, **options)
    assert type(layer) is nn.Linear


def test_an_unknown_treatment_is_refused() -> None:
    with pytest.raises(ValueError, match="treatment must be one of 'recompute', 'pack', 'recompute_cheap', got 'keep'"):
        checkpoint_module(nn.Linear(2, 2), treatment="keep")  # type: ignore[arg-type]


# Plans ----------------------------------------------------------------------------------------------------------------


def plan_of(**treatments: Any) -> Plan:
    regions = [RegionPlan(path[1:], "Sequential", treatment, "by hand") for path, treatment in treatments.items()]
    return Plan(regions=tuple(regions))


def small_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(C, C), nn.GELU()) for _ in range(4)))


def test_a_plan_holds_and_applies_every_treatment() -> None:
    plan = plan_of(_0="pack", _1="recompute_cheap", _2="recompute", _3="keep")
    assert Plan.from_json(plan.to_json()) == plan
    assert len({plan.digest(), plan_of(_0="pack").digest(), plan_of(_0="recompute_cheap").digest()}) == 3
    assert plan_of(_2="recompute", _3="keep").digest() == plan_of(_2="recompute").digest()
    assert "1 of 4 regions recomputed, 1 partly recomputed, 1 packed" in str(plan)
    table = plan.table()
    cells = [str(cell).splitlines()[0] for cell in table.columns[1].cells]
    assert cells == ["pack", "recompute_cheap", "recompute", "keep"]
    model = apply_plan(small_model(), plan)
    found = [config and config.treatment for config in map(region_config, model)]
    assert found == ["pack", "recompute_cheap", "recompute", None]
    assert applied_plan(apply_plan(model, plan)) == plan
    assert not any(map(is_checkpointed, remove_plan(model)))


def test_a_plan_that_gives_a_treatment_what_it_does_not_take_changes_nothing() -> None:
    region = RegionPlan("0", "Sequential", "pack", "by hand", compressor="bit", compressed_args=(0,))
    model = small_model()
    with pytest.raises(ValueError, match="compressor, compressed_args: only for treatment='recompute'"):
        apply_plan(model, Plan(regions=(RegionPlan("1", "Sequential", "recompute", "by hand"), region)))
    assert not any(map(is_checkpointed, model))
    assert applied_plan(model) is None


class ScalesByAColumn(nn.Module):
    """Saves zeros and one other value, expanded from a column: 33 elements with 33 gaps, each 33 times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(33, 33))
        self.noise = torch.randint(0, 2, (33, 34)) * 2.5

    def forward(self, x: Tensor) -> Tensor:
        return x + self.noise[:, :1].expand(33, 33) * self.weight


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_expanded_tensors_with_gaps_may_be_saved(treatment: Any) -> None:
    torch.manual_seed(0)
    plain = ScalesByAColumn()
    treated = checkpoint_module(copy.deepcopy(plain), treatment=treatment)
    for model in (plain, treated):
        model(torch.zeros(33, 33)).sum().backward()
    assert torch.equal(plain.weight.grad, treated.weight.grad)


# A loss on the last step ----------------------------------------------------------------------------------------------


class SteppedBlock(nn.Module):
    """A spiking block that is called once for each time step. What its last step leaves to the state nobody uses."""

    def __init__(self, features: int) -> None:
        from spikingjelly.activation_based import neuron

        super().__init__()
        self.product = nn.Linear(features, features)
        self.norm = nn.Sequential(nn.LayerNorm(features), nn.GELU(), nn.LayerNorm(features), nn.SiLU())
        self.neuron, self.out = neuron.LIFNode(detach_reset=True), nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.neuron(self.norm(self.product(x))))


def loss_of_the_last_step(model: Any) -> Any:
    from spikingjelly.activation_based import functional

    functional.reset_net(model)
    y = None
    for x in torch.randn(4, 1024, model[0].product.in_features):
        y = model(x)
    assert y is not None
    return y.square().mean()


def gradients_of_the_last_step(features: int, treat: Callable[[nn.Module], object]) -> list[Tensor | None]:
    torch.manual_seed(0)
    model = nn.Sequential(*(SteppedBlock(features) for _ in range(3)))
    treat(model)
    for step in range(2):  # regions learn in the first
        torch.manual_seed(step)
        model.zero_grad()
        loss_of_the_last_step(model).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("treatment", [*TREATMENTS, "recompute"])
def test_a_loss_on_the_last_step_of_a_loop_has_the_gradients_of_the_plain_model(treatment: Any) -> None:
    def treat(model: Any) -> None:
        for block in model:
            checkpoint_module(block, treatment=treatment)

    assert_same_tree(gradients_of_the_last_step(64, lambda model: None), gradients_of_the_last_step(64, treat))


def test_so_it_has_within_a_memory_budget() -> None:
    plain = gradients_of_the_last_step(64, lambda model: None)

    def treat(model: nn.Module) -> None:
        torch.manual_seed(0)
        report = measure_memory(lambda: loss_of_the_last_step(model).backward())
        model.zero_grad()
        budget = report.peak_bytes - (report.peak_bytes - report.start_bytes) // 20
        optimize_memory(model, example_forward=loss_of_the_last_step, memory_budget=budget, compress=False)
        plan = applied_plan(model)
        assert plan is not None
        assert plan.treated

    assert_same_tree(plain, gradients_of_the_last_step(64, treat))
