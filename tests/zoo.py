"""Small models of every kind that a region can be, each with a batch and a way to step it.

A case is data: how to build the model, which paths in it are regions, one batch, one step. `test_equality_zoo.py`
treats the regions and asks whether training is unchanged. Most models are a `Net`: a linear stem whose spikes enter
the region, so that the input of the region is binary, is not a leaf and needs a gradient.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.equality import backward_of_outputs, call, loss_of, run_model

T, N, C = 4, 3, 8
"""Time steps, samples and channels of all models that do not need others."""


class Spike(torch.autograd.Function):
    """Heaviside step forward, triangle backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.abs()).clamp(min=0)


def spike(x: Tensor) -> Tensor:
    """Binary spikes with a surrogate gradient."""
    return Spike.apply(x)


class Net(nn.Module):
    """A stem, spikes, and the block under test; `run` decides how the block is called."""

    def __init__(self, block: nn.Module, stem: nn.Module | None = None, encode: Callable[[Tensor], Tensor] = spike):
        super().__init__()
        self.stem = nn.Linear(C, C) if stem is None else stem
        self.block = block
        self.encode = encode
        self.run: Callable[..., Any] = lambda block, *args, **kwargs: block(*args, **kwargs)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.block, self.encode(self.stem(x)), *args, **kwargs)


@dataclass(frozen=True)
class Case:
    """One kind of module and how it is trained."""

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Any] = lambda: call(torch.randn(T * N, C, requires_grad=True))
    regions: tuple[str, ...] = ("block",)
    step: Callable[[Any, Any], Any] = run_model
    backward: Callable[[Any], object] | None = backward_of_outputs
    between: Callable[[Any], object] | None = None
    steps: int = 3
    recomputes: bool = True
    treatments: tuple[str, ...] = ("recompute", "bit", "nested", "function")


CASES: dict[str, Case] = {}
SPIKING = ("recompute", "bit", "boolean", "uint8", "sparse", "nested", "function")


def add(name: str, make_model: Callable[[], nn.Module], **options: Any) -> None:
    """Put a case on the list."""
    assert name not in CASES, name
    CASES[name] = Case(name, make_model, **options)


def case(name: str, **options: Any) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Put the decorated factory on the list."""

    def decorate(make_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        add(name, make_model, **options)
        return make_model

    return decorate


def images() -> Any:
    return call(torch.randn(N, 2, 6, 6, requires_grad=True))


def sequence() -> Any:
    return call(torch.randn(T, N, C, requires_grad=True))


def conv_stem() -> nn.Module:
    return nn.Conv2d(2, 4, 3, padding=1)


# Normalization -------------------------------------------------------------------------------------------------------


@case("batch_norm_1d", treatments=SPIKING)
def _() -> nn.Module:
    return Net(nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.ReLU()))


@case("batch_norm_2d", make_batch=images, treatments=SPIKING)
def _() -> nn.Module:
    return Net(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()), conv_stem())


@case("batch_norm_cumulative_average")
def _() -> nn.Module:
    return Net(nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C, momentum=None)))


@case("batch_norm_without_running_statistics")
def _() -> nn.Module:
    return Net(nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C, track_running_stats=False)))


@case("batch_norm_without_affine_and_alone")
def _() -> nn.Module:
    return Net(nn.BatchNorm1d(C, affine=False), encode=torch.tanh)


@case("batch_norm_in_eval_inside_a_training_model")
def _() -> nn.Module:
    net = Net(nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.Dropout()))
    net.block[1].eval()
    return net


@case("instance_norm_with_running_statistics", make_batch=images)
def _() -> nn.Module:
    return Net(nn.Sequential(nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4, track_running_stats=True)), conv_stem())


@case("group_norm", make_batch=images)
def _() -> nn.Module:
    return Net(nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.SiLU()), conv_stem())


@case("layer_norm")
def _() -> nn.Module:
    return Net(nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C), nn.GELU()))


@case("batch_norm_channels_last", make_batch=images, treatments=SPIKING)
def _() -> nn.Module:
    net = Net(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)), conv_stem())
    return net.to(memory_format=torch.channels_last)


# Random numbers ------------------------------------------------------------------------------------------------------


@case("dropout")
def _() -> nn.Module:
    return Net(nn.Sequential(nn.Linear(C, C), nn.Dropout(0.3), nn.Linear(C, C), nn.Dropout(0.5)))


@case("alpha_dropout")
def _() -> nn.Module:
    return Net(nn.Sequential(nn.Linear(C, C), nn.SELU(), nn.AlphaDropout(0.3), nn.Linear(C, C)))


# torch's own checkpoint is wrong for a region that ends in RReLU: its noise is drawn after it was saved.
@case("randomized_relu", treatments=("recompute", "bit", "function"))
def _() -> nn.Module:
    return Net(nn.Sequential(nn.Linear(C, C), nn.RReLU(), nn.Linear(C, C)))


class StochasticDepth(nn.Module):
    """Skips and scales its branch by numbers from Python and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        scale = random.random() + float(np.random.rand())
        return x + self.branch(x).tanh() * scale * torch.rand(())


add("random_numbers_from_python_and_numpy", lambda: Net(StochasticDepth()))


class OwnGenerator(nn.Module):
    """Noise from a generator that the module owns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * torch.rand(x.shape, generator=self.generator)


add("random_numbers_from_a_generator_of_the_module", lambda: Net(OwnGenerator()))


# Recurrence ----------------------------------------------------------------------------------------------------------

add("rnn", lambda: Net(nn.RNN(C, 5, num_layers=2)), make_batch=sequence)
add("lstm", lambda: Net(nn.LSTM(C, 5)), make_batch=sequence, treatments=SPIKING)
add("gru", lambda: Net(nn.GRU(C, 5, bidirectional=True)), make_batch=sequence)
add("lstm_with_dropout_and_projection", lambda: Net(nn.LSTM(C, 5, 2, dropout=0.3, proj_size=3)), make_batch=sequence)


class CellLoop(nn.Module):
    """A cell called once per time step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(C, 5)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        outputs = []
        for x_t in x:
            state = self.cell(x_t, state)
            outputs.append(state[0])
        return torch.stack(outputs)


add("cell_loop", lambda: Net(CellLoop()), make_batch=sequence)
add("cell_loop_with_the_cell_as_region", lambda: Net(CellLoop()), make_batch=sequence, regions=("block.cell",))


# Weights -------------------------------------------------------------------------------------------------------------


class TiedWeights(nn.Module):
    """Two layers that share one weight inside the block; the stem may share it too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(C, C)
        self.second = nn.Linear(C, C)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


@case("tied_weights")
def _() -> nn.Module:
    net = Net(TiedWeights())
    net.stem.weight = net.block.first.weight
    return net


@case("frozen_parameters")
def _() -> nn.Module:
    net = Net(nn.Sequential(nn.Linear(C, C), nn.ReLU(), nn.Linear(C, C)))
    net.block[0].requires_grad_(False)
    return net


@case("all_parameters_frozen")
def _() -> nn.Module:
    net = Net(nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C)))
    net.block.requires_grad_(False)
    return net


add("no_parameters", lambda: Net(nn.Sequential(nn.Sigmoid(), nn.Tanh())))


@case("weight_norm_by_hook")
def _() -> nn.Module:
    return Net(nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(C, C)), nn.Tanh()))


@case("weight_norm_by_parametrization")
def _() -> nn.Module:
    return Net(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(C, C)), nn.Tanh()))


@case("spectral_norm_by_hook")
def _() -> nn.Module:
    return Net(nn.Sequential(nn.utils.spectral_norm(nn.Linear(C, C)), nn.Tanh()))


@case("spectral_norm_by_parametrization")
def _() -> nn.Module:
    return Net(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(C, C)), nn.Tanh()))


class ClampedWeight(nn.Module):
    """Projects its weight into a range in place before each use."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.randn(C))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.decay.clamp_(0.1, 0.9)
        return (x * self.decay).tanh()


add("weight_clamped_in_place", lambda: Net(ClampedWeight()))


class Affine(nn.Module):
    """Parameters of the module itself, in lists and dicts, and of zero dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(C), torch.randn(())])
        self.shifts = nn.ParameterDict({"a": torch.randn(C)})

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scales[0] * self.scales[1] + self.shifts["a"]).sigmoid()


add("parameter_lists", lambda: Net(Affine()))


# Layers --------------------------------------------------------------------------------------------------------------


class Lookup(nn.Module):
    """Integer input: no gradient enters, weights inside need one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, C, max_norm=1.0)
        self.mix = nn.Linear(C, C)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mix(self.table(tokens)).tanh()


@case("embedding_of_integers", make_batch=lambda: call(torch.randint(0, 10, (N, T))), treatments=("recompute", "bit"))
def _() -> nn.Module:
    return nn.Sequential(OrderedDict(block=Lookup()))


@dataclass
class Packed:
    """A user's container for arguments and results."""

    values: Tensor
    mask: Tensor
    scale: float = 2.0


class QueryKeyValue(nn.Module):
    """Attention that gets one input three times."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(C, 2, dropout=0.2)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.attention(query, key, value)


class SharedInput(Net):
    """Hands the same tensor to three arguments of the block."""

    def forward(self, x: Tensor) -> Any:
        h = self.encode(self.stem(x))
        return self.run(self.block, h, h, value=h)


add("attention_of_a_shared_input", lambda: SharedInput(QueryKeyValue()), make_batch=sequence, treatments=SPIKING)


def masked_sequence() -> Any:
    mask = torch.zeros(N, T, dtype=torch.bool)
    mask[0, -1] = True
    return call(torch.randn(T, N, C, requires_grad=True), src_key_padding_mask=mask)


@case("transformer_encoder_layer", make_batch=masked_sequence)
def _() -> nn.Module:
    return Net(nn.TransformerEncoderLayer(C, 2, 12, dropout=0.2), encode=torch.tanh)


class Autocast(Net):
    """Runs under bfloat16 autocast."""

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


add("autocast_bfloat16", lambda: Autocast(nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.Linear(C, C))))


class AutocastInside(nn.Module):
    """Enters autocast inside the region only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(x).tanh().float()


add("autocast_inside_the_region", lambda: Net(AutocastInside()))


@case("double_precision", make_batch=lambda: call(torch.randn(5, C, dtype=torch.float64, requires_grad=True)))
def _() -> nn.Module:
    return Net(nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C))).double()


@case("half_precision_weights", make_batch=lambda: call(torch.randn(5, C, dtype=torch.bfloat16, requires_grad=True)))
def _() -> nn.Module:
    return Net(nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.Linear(C, C))).bfloat16()


class ComplexMix(nn.Module):
    """Goes through the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(C // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.gain, n=C)


add("complex_parameters", lambda: Net(ComplexMix()))


class Squared(torch.autograd.Function):
    """Saves both its input and its output, and marks a second output as not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> tuple[Tensor, Tensor]:
        y = x**power
        ctx.save_for_backward(x, y)
        ctx.power = power
        sign = y > 0
        ctx.mark_non_differentiable(sign)
        return y, sign

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        return gradient * ctx.power * x ** (ctx.power - 1) + 0 * y, None


class CustomFunction(nn.Module):
    """Calls a user's autograd.Function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Any:
        return Squared.apply(self.linear(x), 3)


add("custom_autograd_function", lambda: Net(CustomFunction()))


class InPlaceInside(nn.Module):
    """Activations in place on tensors made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += 1
        y[0] = 0
        return self.relu(y.mul_(2))


add("in_place_activation", lambda: Net(InPlaceInside()), treatments=("recompute", "bit", "function"))


# Arguments and results -----------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """A named result."""

    spikes: Tensor
    state: Any


class Body(nn.Module):
    """A linear layer and a function that shapes arguments or results around it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(lambda x: self.linear(x).tanh(), *args, **kwargs)


def add_result(name: str, function: Callable[..., Any], **options: Any) -> None:
    """A case about what a region returns."""
    add(name, lambda: Net(Body(function)), **options)


add_result("result_nested_dict_and_list", lambda f, x: {"a": [f(x), {"b": x.sum()}], "c": (f(x) + 1, 3, "text", None)})
add_result("result_namedtuple", lambda f, x: Result(f(x), Result(x * 2, [None, 1.5])))
add_result("result_list_of_one", lambda f, x: [f(x)])
add_result("result_tuple_of_one", lambda f, x: (f(x),))
add_result("result_ordered_dict", lambda f, x: OrderedDict(b=f(x), a=x.exp()))
add_result("result_dataclass", lambda f, x: Packed(f(x), x > 0, 0.5))
add_result("result_without_gradient", lambda f, x: f(x).argmax(-1), recomputes=False)
add_result("result_partly_without_gradient", lambda f, x: (f(x), f(x).detach(), x > 0))
add_result("result_is_the_argument", lambda f, x: (x, f(x)))
add_result("result_same_tensor_twice", lambda f, x: [y := f(x), y])
add_result("result_view_of_the_argument", lambda f, x: (x.t(), x[1:], f(x)))
add_result("result_views", lambda f, x: (f(x).view(2, -1), f(x)[:, ::2], f(x).expand(2, -1, -1), f(x).t()))
add_result("result_split_into_views", lambda f, x: f(x).chunk(2, dim=1))
add_result("result_scalar", lambda f, x: f(x).mean())
add_result("result_empty_tensor", lambda f, x: (f(x), x[:0]))


class KeywordsOnly(Net):
    """Calls the block with keywords alone, spikes last."""

    def forward(self, x: Tensor) -> Any:
        h = self.encode(self.stem(x))
        return self.run(self.block, scale=2.0, bias=torch.full((C,), 0.3), spikes=h)


def scaled(f: Any, *, spikes: Tensor, bias: Tensor, scale: float) -> Tensor:
    return f(spikes) * scale + bias * f(spikes)


add("argument_by_keyword_only", lambda: KeywordsOnly(Body(scaled)), treatments=SPIKING)


class SpikesSecond(Net):
    """Hands the block an analog map first and spikes second."""

    def forward(self, x: Tensor) -> Any:
        h = self.stem(x)
        return self.run(self.block, h.sigmoid(), self.encode(h))


add("argument_spikes_second", lambda: SpikesSecond(Body(lambda f, x, s: f(x) * s + f(s))), treatments=SPIKING)


class MaskFirst(Net):
    """Hands the block a mask, spikes, a float, None and a string."""

    def forward(self, x: Tensor) -> Any:
        h = self.encode(self.stem(x))
        mask = torch.arange(h.numel()).reshape(h.shape) % 3 == 0
        return self.run(self.block, mask, h, 0.5, None, mode="soft")


def masked(f: Any, mask: Tensor, x: Tensor, scale: float, nothing: None, mode: str) -> Tensor:
    assert (nothing, mode, mask.dtype) == (None, "soft", torch.bool)
    return f(x).masked_fill(mask, 0.0) * scale


add("argument_mask_first_and_non_tensors", lambda: MaskFirst(Body(masked)), treatments=SPIKING)


class NestedArguments(Net):
    """Hands the block trees."""

    def forward(self, x: Tensor) -> Any:
        h = self.stem(x)
        s = self.encode(h)
        return self.run(self.block, [s, {"k": (h, 2)}], packed=Packed(s, h > 0, 3.0), result=Result(h, [s]))


def from_trees(f: Any, tree: Any, packed: Packed, result: Result) -> Any:
    assert (type(tree), type(packed), type(result)) == (list, Packed, Result)
    x = f(tree[0]) * tree[1]["k"][1] + tree[1]["k"][0] * packed.scale + f(packed.values) * packed.mask
    return x * result.state[0] + result.spikes


add("argument_trees_namedtuple_and_dataclass", lambda: NestedArguments(Body(from_trees)))


class WritesIntoArgument(Net):
    """The block writes its state into a list it was given, as Norse's SequentialState does."""

    def forward(self, x: Tensor) -> Any:
        h = self.stem(x)
        state = [h, {"calls": 0}]
        y = self.run(self.block, self.encode(h), state)
        return y, state


def write(f: Any, x: Tensor, state: list[Any]) -> Tensor:
    state[0] = f(x) + state[0]
    state[1]["calls"] += 1
    return state[0] * 2 + state[1]["calls"]


add("argument_list_written_into", lambda: WritesIntoArgument(Body(write)))
add(
    "argument_without_gradient",
    lambda: nn.Sequential(OrderedDict(block=nn.Sequential(nn.Linear(C, C), nn.Tanh()))),
    make_batch=lambda: call(torch.randn(N, C)),
    treatments=("recompute", "bit", "nested"),
)
add(
    "argument_is_a_leaf",
    lambda: nn.Sequential(OrderedDict(block=nn.Sequential(nn.Linear(C, C), nn.Tanh()))),
    make_batch=lambda: call((torch.rand(N, C) > 0.5).float().requires_grad_()),
    treatments=("recompute", "bit", "boolean", "uint8", "sparse"),
)
add(
    "argument_boolean",
    lambda: nn.Sequential(OrderedDict(block=Body(lambda f, x: f(x.float())))),
    make_batch=lambda: call(torch.rand(N, C) > 0.5),
    treatments=("recompute", "bit", "boolean", "uint8", "sparse"),
)
add("argument_of_no_samples", lambda: Net(nn.Linear(C, C)), make_batch=lambda: call(torch.randn(0, C)))
add("argument_expanded", lambda: Net(nn.Linear(C, C), encode=lambda x: spike(x[:1]).expand(4, -1)), treatments=SPIKING)
add("argument_transposed", lambda: Net(nn.Linear(12, C), encode=lambda x: spike(x).t()), treatments=SPIKING)
add(
    "argument_small_integers",
    lambda: Net(nn.Linear(C, C), encode=lambda x: spike(x) + spike(x - 1)),
    treatments=SPIKING,
)
add("argument_detached", lambda: Net(nn.Linear(C, C), encode=lambda x: spike(x).detach()), treatments=SPIKING)


# Structure -----------------------------------------------------------------------------------------------------------


class Alias(Net):
    """One block under two names, called under both."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.again = block

    def forward(self, x: Tensor) -> Any:
        h = self.encode(self.stem(x))
        return self.run(self.again, spike(self.run(self.block, h)))


add("aliased_block", lambda: Alias(nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C))))


class Loop(Net):
    """Calls the block several times on its own output."""

    def forward(self, x: Tensor) -> Any:
        h = self.encode(self.stem(x))
        for _ in range(3):
            h = h + self.run(self.block, spike(h))
        return h


add("block_called_three_times", lambda: Loop(nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.Dropout(0.2))))


class Stack(nn.Module):
    """Several regions in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = spike(block(x)) + x
        return x


add(
    "stack_of_regions",
    Stack,
    regions=("blocks.0", "blocks.1", "blocks.2"),
    treatments=("recompute", "bit", "uint8", "nested"),
)
add("region_inside_a_region", Stack, regions=("blocks.0", "blocks.0.0", ""), treatments=("recompute", "bit"))


# State of the user's own modules -------------------------------------------------------------------------------------


class MutatedBuffers(nn.Module):
    """Buffers written in place, reassigned, resized, filled for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.register_buffer("mean", torch.zeros(C))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("history", torch.zeros(0, C), persistent=False)
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        value = y.detach().mean(0)
        self.mean.mul_(0.9).add_(value, alpha=0.1)
        self.scale = 0.9 * self.scale + value.abs().mean()
        self.history = torch.cat([self.history, value[None]])
        self.late = value if self.late is None else self.late + value
        return ((y - self.mean.clone()) / self.scale + self.history.sum(0) * self.late).tanh()


add("buffers_mutated_reassigned_resized", lambda: Net(MutatedBuffers()))


class PythonState(nn.Module):
    """Counters, lists, dicts and tensors as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.calls = 0
        self.rates: list[float] = []
        self.by_name: dict[str, Tensor] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x) * self.calls
        self.rates.append(float(x.detach().mean()))
        previous = self.by_name.get("mean", torch.zeros(C))
        self.by_name["mean"] = previous * 0.5 + y.detach().mean(0)
        y = y + self.by_name["mean"] if self.last is None else y - self.last
        self.last = y.detach()
        self.first_seen = getattr(self, "first_seen", self.calls)
        return y.tanh() + sum(self.rates)


add("python_counters_lists_and_attributes", lambda: Net(PythonState()))


class UserNeuron(nn.Module):
    """A neuron as many people write it: the potential is an attribute, differentiable in time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.v: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.v = 0.5 * self.v + self.linear(x)
        s = spike(self.v - 0.3)
        self.v = self.v * (1 - s)
        return s

    def reset(self) -> None:
        self.v = 0.0


def over_time(model: Any, batch: Any) -> Any:
    """Call the model once per time step, state carried, and return all outputs."""
    return [model(x_t, *batch.args[1:], **batch.kwargs) for x_t in batch.args[0]]


def reset_attributes(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset"):
            module.reset()


add(
    "user_neuron_single_step",
    lambda: Net(UserNeuron()),
    make_batch=sequence,
    step=over_time,
    between=reset_attributes,
    treatments=SPIKING,
)


def cut_attributes(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, UserNeuron) and isinstance(module.v, Tensor):
            module.v = module.v.detach()


add("user_neuron_carried_over_steps", lambda: Net(UserNeuron()), between=cut_attributes, treatments=SPIKING)


class Regularized(nn.Module):
    """Leaves a differentiable rate behind that the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        s = spike(self.linear(x))
        self.rate = s.mean()
        return s


def with_rate(model: Any, batch: Any) -> Any:
    return run_model(model, batch), (model.block.rate - 0.1) ** 2


add("loss_on_an_attribute_of_the_region", lambda: Net(Regularized()), step=with_rate)


class Codebook(nn.Module):
    """Vector quantization with an exponentially moving codebook and a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.register_buffer("codes", torch.randn(4, C))
        self.register_buffer("counts", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        nearest = torch.cdist(y.detach(), self.codes).argmin(1)
        quantized = self.codes[nearest]
        self.counts.index_add_(0, nearest, torch.ones_like(nearest))
        with torch.no_grad():
            self.codes[nearest] = 0.9 * self.codes[nearest] + 0.1 * y.detach()
        return (y + (quantized - y).detach()).tanh(), nearest


add("codebook_moved_in_forward", lambda: Net(Codebook()))


class Measured(nn.Module):
    """Holds torchmetrics that it updates in forward."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import MeanMetric, MetricCollection, SumMetric

        self.linear = nn.Linear(C, C)
        self.rate = MeanMetric()
        self.sums = MetricCollection({"sum": SumMetric()})

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        self.rate(y.detach().mean())
        self.sums.update(y.detach().sum())
        return y


add("torchmetrics_inside", lambda: Net(Measured()))


class WrittenThroughData(nn.Module):
    """Writes a buffer through `.data`, which does not move its version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.register_buffer("mean", torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean.data.mul_(0.5).add_(y.detach().mean(0))
        return (y - self.mean.clone()).tanh()


add("buffer_written_through_data", lambda: Net(WrittenThroughData()))


class RunningMean:
    """A user's own object that is no module."""

    def __init__(self) -> None:
        self.value: Tensor | float = 0.0
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.value = self.value * 0.5 + x.detach().mean(0)
        return self.value


@dataclass
class Trace:
    """A user's own mutable state."""

    value: Tensor | float = 0.0
    calls: int = 0


class PlainPotential(nn.Module):
    """A potential and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.v: Tensor | float = 0.0
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.v = 0.5 * self.v + x.detach()
        return self.v + self.calls


def state_in(kind: str) -> Callable[[], nn.Module]:
    """A block with one of the foreign states alone."""

    def forward(f: Any, x: Tensor) -> Tensor:
        y = f(x)
        if kind == "object":
            return y * state(y)
        if kind == "dataclass":
            state.calls += 1
            state.value = state.value * 0.5 + y.detach().mean() * state.calls
            return y * state.value
        if kind == "array":
            np.add(state, y.detach().mean(0).numpy(), out=state)
            return y * torch.from_numpy(state.copy())
        return y * state[0](y)

    state: Any

    def make_model() -> nn.Module:
        nonlocal state
        body = Body(forward)
        state = {"object": RunningMean, "dataclass": Trace, "array": lambda: np.zeros(C, dtype=np.float32)}.get(
            kind, lambda: [PlainPotential()]
        )()
        body.foreign = state
        return Net(body)

    return make_model


for _kind in ("object", "dataclass", "array", "list of unregistered modules"):
    add(f"state_in_a_foreign_{_kind.replace(' ', '_')}", state_in(_kind))


class Clocked(nn.Module):
    """Reads attributes and buffers that its owner sets before each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.t = 0
        self.register_buffer("gate", torch.ones(C))
        self.register_buffer("offset", torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.gate + self.offset + self.t).tanh()


def set_anew(model: Any, batch: Any) -> Any:
    outputs = []
    for t, x_t in enumerate(batch.args[0]):
        model.block.t = 0.1 * t
        model.block.gate = torch.full((C,), 1.0 + t)
        outputs.append(model(x_t))
    return outputs


def set_in_place(model: Any, batch: Any) -> Any:
    outputs = []
    for t, x_t in enumerate(batch.args[0]):
        model.block.offset.fill_(0.1 * t)
        outputs.append(model(x_t))
    model.block.offset.zero_()
    return outputs


add("state_set_anew_from_outside_between_calls", lambda: Net(Clocked()), make_batch=sequence, step=set_anew)
add("state_set_in_place_from_outside_between_calls", lambda: Net(Clocked()), make_batch=sequence, step=set_in_place)


class OwnNorm(nn.BatchNorm1d):
    """A user's batch norm that reads its running statistics in training."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * self.running_var.sqrt() + self.running_mean + self.num_batches_tracked


add("batch_norm_subclass_that_reads_its_statistics", lambda: Net(nn.Sequential(nn.Linear(C, C), OwnNorm(C), nn.Tanh())))


class ReadsStatistics(nn.Module):
    """Batch renormalization in short: the running statistics of a stock batch norm are used in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.norm = nn.BatchNorm1d(C)

    def forward(self, x: Tensor) -> Tensor:
        before = self.norm.running_var.clone() * self.norm.num_batches_tracked
        y = self.norm(self.linear(x))
        return (y * self.norm.running_var.sqrt() + before).tanh()


add("running_statistics_read_around_a_stock_batch_norm", lambda: Net(ReadsStatistics()))


class Switching(nn.Module):
    """Turns its batch norm to eval after some calls, inside forward, and counts by a hook inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.norm = nn.BatchNorm1d(C)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.norm.eval()
        return self.norm(self.linear(x)).tanh()


add("training_flag_switched_inside", lambda: Net(Switching()))


class LateLargeBuffer(nn.Module):
    """A buffer of a megabyte that only the second call writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.calls = 0
        self.register_buffer("table", torch.ones(2**18))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.table.mul_(1.5)
        return (self.linear(x) * self.table[:C].clone()).tanh()


add("large_buffer_written_late", lambda: Net(LateLargeBuffer()))


class CachedBias(nn.Module):
    """Builds a tensor at its first call and keeps it, as rotary embeddings and causal masks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.arange(C, dtype=x.dtype) * torch.rand(())
        return (self.linear(x) + self.cache).tanh() * torch.rand(())


add("tensor_cached_at_the_first_call", lambda: Net(CachedBias()))


@case("lazy_layers_made_inside", make_batch=lambda: call(torch.randn(T * N, C)))
def _() -> nn.Module:
    net = Net(nn.Sequential(nn.LazyLinear(C), nn.LazyBatchNorm1d(), nn.Dropout(0.3), nn.Tanh()))
    state = torch.get_rng_state()
    net(torch.randn(2, C))
    torch.set_rng_state(state)
    return net


def observed_block() -> nn.Module:
    """Hooks inside that count calls, and one that changes the output."""
    net = Net(nn.Sequential(nn.Linear(C, C), nn.Tanh()))
    net.block[0].calls = 0

    def count(module: Any, args: Any, output: Any) -> None:
        module.calls += 1

    net.block[0].register_forward_hook(count)
    net.block[1].register_forward_hook(lambda module, args, output: output * 2)
    net.block[1].register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
    net.block.register_forward_hook(lambda module, args, output: output + 1)
    net.block.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    net.block[0].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 2,))
    net.block.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
    return net


add("hooks_that_count_and_change", observed_block)


class FeatureByHook(nn.Module):
    """A hook on an inner layer keeps its output, and forward uses it afterwards, as feature extractors do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(C, C)
        self.second = nn.Linear(C, C)
        self.features: dict[str, Tensor] = {}
        features = self.features

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            features["first"] = output.tanh()

        self.first.register_forward_hook(keep)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.second(self.first(x).sigmoid())
        return y * self.features["first"], self.features["first"]


add("hook_that_feeds_a_later_layer", lambda: Net(FeatureByHook()))


def random_observer_block() -> nn.Module:
    """An observer that samples what it looks at, followed by dropout."""
    net = Net(nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.Dropout(0.5), nn.Linear(C, C)))
    net.seen = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        net.seen.append(float(output.detach().flatten()[torch.randint(output.numel(), ())]))

    net.block[0].register_forward_hook(look)
    return net


add("observer_that_draws_random_numbers", random_observer_block)


# Ways to train -------------------------------------------------------------------------------------------------------


def stochastic_block() -> nn.Module:
    """A block with every kind of side effect."""
    return Net(nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.Dropout(0.2), nn.Tanh(), nn.Linear(C, C)))


def smooth_block() -> nn.Module:
    return Net(nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.Dropout(0.2), nn.Linear(C, C)), encode=torch.sigmoid)


def way(name: str, step: Callable[[Any, Any], Any], **options: Any) -> None:
    """A case about how the step is made; the step backpropagates itself."""
    options.setdefault("make_model", stochastic_block)
    add(name, step=step, backward=None, treatments=("recompute", "bit", "nested", "function"), **options)


def accumulate(model: Any, batch: Any) -> Any:
    outputs = [run_model(model, batch) for _ in range(2)]
    for output in outputs:
        backward_of_outputs(output)
    backward_of_outputs(run_model(model, batch))
    return outputs


way("gradient_accumulation_and_late_backward", accumulate)


def retain_graph(model: Any, batch: Any) -> Any:
    output = run_model(model, batch)
    loss = loss_of(output)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss_of(output).backward()
    return output


way("backward_three_times_on_one_graph", retain_graph)


def double_backward(model: Any, batch: Any) -> Any:
    output = run_model(model, batch)
    (gradient,) = torch.autograd.grad(output.tanh().sum(), batch.args[0], create_graph=True)
    (gradient.square().sum() + output.sum()).backward()
    return output, gradient


way("double_backward", double_backward, make_model=smooth_block)


def grad_of_inputs(model: Any, batch: Any) -> Any:
    output = run_model(model, batch)
    return output, torch.autograd.grad(output.sum(), [batch.args[0], model.block[0].weight], allow_unused=True)


way("autograd_grad_of_some_inputs", grad_of_inputs)


def validation_between(model: Any, batch: Any) -> Any:
    output = run_model(model, batch)
    model.eval()
    with torch.no_grad():
        checked = run_model(model, batch)
    model.train()
    backward_of_outputs(output)
    return output, checked


way("validation_between_forward_and_backward", validation_between)


def dropped_forward(model: Any, batch: Any) -> Any:
    run_model(model, batch)
    output = run_model(model, batch)
    backward_of_outputs(output)
    return output


way("a_forward_that_is_never_backpropagated", dropped_forward)


def failing_forward(model: Any, batch: Any) -> Any:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(batch.args[0][:, :3])
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        model.block(torch.randn(1, C))
    output = run_model(model, batch)
    backward_of_outputs(output)
    return output


way("an_error_in_forward_and_then_a_good_step", failing_forward)


def inference_then_train(model: Any, batch: Any) -> Any:
    with torch.inference_mode():
        before = run_model(model, batch).clone()
    output = run_model(model, batch)
    backward_of_outputs(output)
    return before.clone(), output


way("inference_mode_then_training", inference_then_train)


def random_draws_between(model: Any, batch: Any) -> Any:
    output = run_model(model, batch)
    noise = torch.rand(3), random.random(), np.random.rand()
    backward_of_outputs(output)
    return output, noise, torch.rand(3)


way("random_draws_between_forward_and_backward", random_draws_between)


def one_output_only(model: Any, batch: Any) -> Any:
    first, _ = run_model(model, batch)
    first.sum().backward()
    return first


way(
    "backward_through_one_of_two_outputs",
    one_output_only,
    make_model=lambda: Net(Body(lambda f, x: (f(x), f(x * 2).exp()))),
)


def separate_backwards(model: Any, batch: Any) -> Any:
    first, second = run_model(model, batch)
    first.sum().backward(retain_graph=True)
    second.sum().backward()
    return first, second


way(
    "backward_through_two_outputs_one_after_the_other",
    separate_backwards,
    make_model=lambda: Net(Body(lambda f, x: (f(x), f(x * 2).exp()))),
)


# Libraries -----------------------------------------------------------------------------------------------------------


def sj_reset(model: nn.Module) -> None:
    from spikingjelly.activation_based import functional

    functional.reset_net(model)


def sj_detach(model: nn.Module) -> None:
    from spikingjelly.activation_based import functional

    functional.detach_net(model)


def sj_block(make_neuron: Callable[[Any], nn.Module], norm: bool = False) -> Callable[[], nn.Module]:
    """Linear, perhaps batch norm, and a SpikingJelly neuron."""

    def make_model() -> nn.Module:
        from spikingjelly.activation_based import layer, neuron

        norms = [layer.SeqToANNContainer(nn.Linear(C, C), nn.BatchNorm1d(C))] if norm else [nn.Linear(C, C)]
        return Net(nn.Sequential(*norms, make_neuron(neuron)))

    return make_model


def sj(name: str, make_neuron: Callable[[Any], nn.Module], norm: bool = False, **options: Any) -> None:
    options = {"make_batch": sequence, "between": sj_reset, **options}
    add(f"spikingjelly_{name}", sj_block(make_neuron, norm), **options)


sj("if_multi_step", lambda neuron: neuron.IFNode(step_mode="m"))
sj("lif_multi_step", lambda neuron: neuron.LIFNode(step_mode="m"), treatments=SPIKING)
sj("lif_soft_reset_detached", lambda neuron: neuron.LIFNode(v_reset=None, detach_reset=True, step_mode="m"))
sj("lif_carried_over_steps", lambda neuron: neuron.LIFNode(step_mode="m"), between=sj_detach)
sj("parametric_lif", lambda neuron: neuron.ParametricLIFNode(step_mode="m"))
sj("lif_storing_v_seq", lambda neuron: neuron.LIFNode(step_mode="m", store_v_seq=True))
sj("lif_after_batch_norm", lambda neuron: neuron.LIFNode(step_mode="m"), norm=True)
sj("lif_single_step_loop", lambda neuron: neuron.LIFNode(step_mode="s"), step=over_time, treatments=SPIKING)
sj("qif", lambda neuron: neuron.QIFNode(step_mode="m"))
sj("izhikevich", lambda neuron: neuron.IzhikevichNode(step_mode="m"))
sj("gated_lif", lambda neuron: neuron.GatedLIFNode(T=T, step_mode="m"))
sj("klif", lambda neuron: neuron.KLIFNode(step_mode="m"))
sj("cubalif", lambda neuron: neuron.CUBALIFNode(c_decay=0.5, v_decay=0.75))


def several_calls(model: Any, batch: Any) -> Any:
    """The state and its graph are carried over three calls; one backward goes through all of them."""
    return [run_model(model, batch) for _ in range(3)]


sj("graph_carried_over_calls", lambda neuron: neuron.LIFNode(step_mode="m"), step=several_calls, between=sj_reset)


def reset_before_backward(model: Any, batch: Any) -> Any:
    output = run_model(model, batch)
    sj_reset(model)
    backward_of_outputs(output)
    return output


sj(
    "reset_between_forward_and_backward",
    lambda neuron: neuron.LIFNode(step_mode="m"),
    norm=True,
    step=reset_before_backward,
    backward=None,
)


@case("spikingjelly_dropout_mask", make_batch=sequence, step=over_time, between=sj_reset)
def _() -> nn.Module:
    from spikingjelly.activation_based import layer, neuron

    return Net(nn.Sequential(nn.Linear(C, C), layer.Dropout(0.5), neuron.IFNode()))


def sj_norm(name: str) -> None:
    """Batch norms that are made for time."""

    def make_model() -> nn.Module:
        from spikingjelly.activation_based import layer, neuron

        norm = {
            "threshold_dependent": lambda: layer.ThresholdDependentBatchNorm2d(1.0, 1.0, 4),
            "temporal_effective": lambda: layer.TemporalEffectiveBatchNorm2d(T, 4),
            "through_time": lambda: layer.BatchNormThroughTime2d(T, 4, step_mode="m"),
            "neu_norm": lambda: layer.NeuNorm(4, 6, 6, k=0.5, step_mode="m"),
        }[name]()
        return Net(nn.Sequential(norm, neuron.LIFNode(step_mode="m")), layer.Conv2d(2, 4, 3, padding=1, step_mode="m"))

    add(f"spikingjelly_norm_{name}", make_model, make_batch=image_sequence, between=sj_reset)


def image_sequence() -> Any:
    return call(torch.randn(T, N, 2, 6, 6, requires_grad=True))


for _name in ("threshold_dependent", "temporal_effective", "through_time", "neu_norm"):
    sj_norm(_name)


@case("spikingjelly_recurrent_container", make_batch=sequence, between=sj_reset)
def _() -> nn.Module:
    from spikingjelly.activation_based import layer, neuron

    return Net(layer.LinearRecurrentContainer(neuron.LIFNode(), C, C, step_mode="m"))


@case("spikingjelly_synapse_filter", make_batch=sequence, between=sj_reset)
def _() -> nn.Module:
    from spikingjelly.activation_based import layer

    return Net(nn.Sequential(nn.Linear(C, C), layer.SynapseFilter(tau=2.0, learnable=True, step_mode="m")))


@case("spikingjelly_conv_norm_lif", make_batch=image_sequence, between=sj_reset, treatments=SPIKING)
def _() -> nn.Module:
    from spikingjelly.activation_based import layer, neuron

    block = nn.Sequential(
        layer.Conv2d(4, 4, 3, padding=1, bias=False, step_mode="m"),
        layer.BatchNorm2d(4, step_mode="m"),
        neuron.LIFNode(step_mode="m", detach_reset=True),
        layer.MaxPool2d(2, 2, step_mode="m"),
    )
    return Net(block, layer.Conv2d(2, 4, 3, padding=1, step_mode="m"))


class SewAdd(nn.Module):
    """A residual block whose output holds 0, 1 and 2."""

    def __init__(self) -> None:
        super().__init__()
        from spikingjelly.activation_based import neuron

        self.linear = nn.Linear(C, C)
        self.neuron = neuron.IFNode(step_mode="m")

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(self.linear(x)) + x


@case("spikingjelly_sew_add", make_batch=sequence, between=sj_reset, regions=("0", "1", "2"), treatments=SPIKING[:-1])
def _() -> nn.Module:
    return nn.Sequential(SewAdd(), SewAdd(), SewAdd())


class ClockDriven(nn.Module):
    """State and threshold in a dict, as the old clock_driven neurons keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self._memories = {"v": 0.0, "threshold": 0.4}
        self._memories_rv = {"v": 0.0, "threshold": 0.4}

    def forward(self, x: Tensor) -> Tensor:
        memories = self._memories
        memories["v"] = memories["v"] * 0.5 + self.linear(x)
        s = spike(memories["v"] - memories["threshold"])
        memories["threshold"] = memories["threshold"] + 0.01
        memories["v"] = memories["v"] - s * memories["threshold"]
        return s

    def reset(self) -> None:
        self._memories.update(self._memories_rv)


add(
    "clock_driven_memories",
    lambda: Net(ClockDriven()),
    make_batch=sequence,
    step=over_time,
    between=reset_attributes,
    treatments=SPIKING,
)


def cut_buffers(model: nn.Module) -> None:
    """Keep the value of every state buffer, cut its graph."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.requires_grad:
                setattr(module, name, buffer.detach())


def snn_reset(model: nn.Module) -> None:
    """Zero and cut the hidden states of the model's own neurons (snnTorch's reset touches every neuron ever made)."""
    import snntorch

    for module in model.modules():
        if isinstance(module, snntorch.SpikingNeuron):
            for name, buffer in module.named_buffers(recurse=False):
                if name in ("mem", "syn", "spk", "syn_exc", "syn_inh"):
                    setattr(module, name, torch.zeros_like(buffer))


def snntorch_case(name: str, make_neuron: Callable[[Any], nn.Module], **options: Any) -> None:
    def make_model() -> nn.Module:
        import snntorch

        return Net(nn.Sequential(nn.Linear(C, C), make_neuron(snntorch)))

    options = {"make_batch": sequence, "step": over_time, "between": snn_reset, **options}
    add(f"snntorch_{name}", make_model, **options)


snntorch_case("leaky", lambda snn: snn.Leaky(beta=0.8, init_hidden=True), treatments=SPIKING)
snntorch_case("leaky_with_output", lambda snn: snn.Leaky(beta=0.8, init_hidden=True, output=True))
snntorch_case("leaky_reset_to_zero", lambda snn: snn.Leaky(beta=0.8, init_hidden=True, reset_mechanism="zero"))
snntorch_case("leaky_learned", lambda s: s.Leaky(beta=0.8, init_hidden=True, learn_beta=True, learn_threshold=True))
snntorch_case("synaptic", lambda snn: snn.Synaptic(alpha=0.7, beta=0.8, init_hidden=True))
snntorch_case("lapicque", lambda snn: snn.Lapicque(beta=0.8, init_hidden=True))
snntorch_case("alpha", lambda snn: snn.Alpha(alpha=0.8, beta=0.7, init_hidden=True))
snntorch_case("rleaky", lambda snn: snn.RLeaky(beta=0.8, linear_features=C, init_hidden=True))
snntorch_case("leaky_carried_over_steps", lambda snn: snn.Leaky(beta=0.8, init_hidden=True), between=cut_buffers)


class ExplicitLeaky(Net):
    """Carries snnTorch's membrane potential by hand."""

    def forward(self, x: Tensor) -> Any:
        mem = self.block.neuron.init_leaky()
        spikes = []
        for x_t in x:
            s, mem = self.run(self.block, self.encode(self.stem(x_t)), mem)
            spikes.append(s)
        return torch.stack(spikes), mem


class LeakyStep(nn.Module):
    """One explicit step."""

    def __init__(self) -> None:
        super().__init__()
        import snntorch

        self.linear = nn.Linear(C, C)
        self.neuron = snntorch.Leaky(beta=0.8)

    def forward(self, x: Tensor, mem: Tensor) -> tuple[Tensor, Tensor]:
        return self.neuron(self.linear(x), mem)


add("snntorch_leaky_explicit_state", lambda: ExplicitLeaky(LeakyStep()), make_batch=sequence, between=snn_reset)


def norse_case(name: str, make_block: Callable[[Any], nn.Module], **options: Any) -> None:
    def make_model() -> nn.Module:
        import norse.torch

        return Net(make_block(norse.torch))

    add(f"norse_{name}", make_model, **{"make_batch": sequence, **options})


norse_case("lif", lambda norse: norse.LIF(), treatments=SPIKING)
norse_case("lif_recurrent", lambda norse: norse.LIFRecurrent(C, 5))
norse_case("lsnn_recurrent", lambda norse: norse.LSNNRecurrent(C, 5))
norse_case("leaky_integrator", lambda norse: norse.LI())
norse_case("sequential_state", lambda n: n.SequentialState(nn.Linear(C, C), n.LIF(), nn.Linear(C, C), n.LIF()))


def carry_state(model: Any, batch: Any) -> Any:
    """Hand the returned state back in, over three calls."""
    state = None
    outputs = []
    for _ in range(3):
        output, state = model(batch.args[0], state)
        outputs.append(output)
    return outputs, state


norse_case("lif_state_handed_back", lambda norse: norse.LIF(), step=carry_state, treatments=SPIKING)
norse_case(
    "sequential_state_handed_back", lambda n: n.SequentialState(nn.Linear(C, C), n.LIF(), n.LI()), step=carry_state
)


def time_second() -> Any:
    return call(torch.randn(N, T, C, requires_grad=True))


def sinabs_case(name: str, make_neuron: Callable[[Any], nn.Module], **options: Any) -> None:
    def make_model() -> nn.Module:
        import sinabs.layers

        return Net(nn.Sequential(nn.Linear(C, C), make_neuron(sinabs.layers)))

    options = {"make_batch": time_second, "between": cut_buffers, **options}
    add(f"sinabs_{name}", make_model, **options)


sinabs_case("lif", lambda layers: layers.LIF(tau_mem=5.0), treatments=SPIKING)
sinabs_case("lif_with_synapse", lambda layers: layers.LIF(tau_mem=5.0, tau_syn=3.0, train_alphas=True))
sinabs_case("iaf", lambda layers: layers.IAF())
sinabs_case("alif", lambda layers: layers.ALIF(tau_mem=5.0, tau_adapt=5.0))
sinabs_case("exp_leak", lambda layers: layers.ExpLeak(tau_mem=5.0))


def other_batch_size(model: Any, batch: Any) -> Any:
    """sinabs picks states at random when the batch size changes."""
    first = run_model(model, batch)
    cut_buffers(model)
    return first, model(batch.args[0][:2])


def sinabs_reset_before_backward(model: Any, batch: Any) -> Any:
    output = run_model(model, batch)
    model.block[1].reset_states()
    backward_of_outputs(output)
    return output


sinabs_case(
    "lif_reset_between_forward_and_backward",
    lambda layers: layers.LIF(tau_mem=5.0),
    step=sinabs_reset_before_backward,
    backward=None,
)
sinabs_case("lif_with_another_batch_size", lambda layers: layers.LIF(tau_mem=5.0), step=other_batch_size)
