"""Neurons fused with a linear layer, as functions and as layers, against the loop followed by ``F.linear``."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_memopt import checkpoint_module
from lightning_memopt.checkpointing import BitSpikeCompressor
from lightning_memopt.functional.neuron import if_linear, if_spike, lif_linear, lif_spike
from lightning_memopt.layers import IFLinear, LIFLinear
from lightning_memopt.measuring import measure_memory
from lightning_memopt.ops.neuron import IF, LIF, LIF_DECAYED_INPUT, Neuron
from lightning_memopt.surrogate import ATan, Erf, SoftSign, Surrogate
from tests.equality import assert_optimized_equals_plain, call
from tests.kernel_backends import Kernels
from tests.test_neuron_kernels import DTYPES, Rectangle, draw, eager_loop, neurons, same, seeds, surrogates

# Relative to the largest value: sums of products are rounded in another order.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}

ops = torch.ops.lightning_memopt


def run(
    x: Tensor,
    v: Any,
    weight_t: Tensor,
    bias: Tensor | None,
    neuron: Neuron,
    surrogate: object = None,
    detach_reset: bool = False,
) -> tuple[Tensor, Tensor]:
    """The public function for `neuron`."""
    equation: dict[str, Any] = {
        "v_threshold": neuron.v_threshold,
        "v_reset": neuron.v_reset,
        "detach_reset": detach_reset,
        "surrogate_function": surrogate,
    }
    if neuron.charge == IF:
        return if_linear(x, v, weight_t, bias, **equation)
    decay_input = neuron.charge == LIF_DECAYED_INPUT
    return lif_linear(x, v, weight_t, bias, tau=neuron.tau, decay_input=decay_input, **equation)


def unfused(
    x: Tensor,
    v: Tensor,
    weight_t: Tensor,
    bias: Tensor | None,
    neuron: Neuron,
    surrogate: Callable[[Tensor], Tensor],
    detach_reset: bool = False,
) -> tuple[Tensor, Tensor]:
    spikes, v_final = eager_loop(x.float(), v, neuron, surrogate, detach_reset)
    # Spikes of the dtype of x, so that their gradient is rounded as the fused one is.
    return F.linear(spikes.to(x.dtype).to(weight_t.dtype), weight_t.t(), bias), v_final


def assert_near(result: Tensor, expected: Tensor, what: str) -> None:
    assert result.dtype == expected.dtype, what
    assert result.shape == expected.shape, what
    largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
    difference = float((result - expected).detach().abs().max()) if expected.numel() else 0.0
    assert difference <= TOLERANCE[expected.dtype] * max(largest, 1e-6), f"{what}: {difference} of {largest}"


# ---------------------------------------------------------------------------------------------------------------------
# Values


@given(
    t=st.sampled_from((0, 1, 2, 5, 8, 17)),
    rows=st.sampled_from((0, 1, 3, 9)),
    inputs=st.sampled_from((1, 7, 8, 16, 33, 72)),
    outputs=st.sampled_from((1, 5, 16)),
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from((None, torch.float32)),
    neuron=neurons,
    surrogate=surrogates,
    detach_reset=st.booleans(),
    has_bias=st.booleans(),
    transposed=st.booleans(),
    arriving=st.sampled_from(((True, True), (True, False), (False, True))),
    seed=seeds,
)
@settings(max_examples=60)
def test_output_and_all_gradients_are_those_of_the_unfused_pair(
    kernels: Kernels,
    t: int,
    rows: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    neuron: Neuron,
    surrogate: Surrogate,
    detach_reset: bool,
    has_bias: bool,
    transposed: bool,
    arriving: tuple[bool, bool],
    seed: int,
) -> None:
    weight_dtype = weight_dtype or dtype
    x = draw(t, rows, inputs, seed=seed, device=kernels.device, dtype=dtype)
    v = draw(rows, inputs, seed=seed + 1, device=kernels.device)
    weight_t = draw(inputs, outputs, seed=seed + 2, device=kernels.device, dtype=weight_dtype)
    if transposed:
        weight_t = weight_t.t().contiguous().t()
    bias = draw(outputs, seed=seed + 3, device=kernels.device, dtype=weight_dtype) if has_bias else None
    y_weights = draw(t, rows, outputs, seed=seed + 4, device=kernels.device, dtype=weight_dtype)
    v_weights = draw(rows, inputs, seed=seed + 5, device=kernels.device)

    def step(function: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        leaves = [None if leaf is None else leaf.detach().requires_grad_() for leaf in (x, v, weight_t, bias)]
        y, v_final = function(*leaves, neuron, surrogate, detach_reset)
        loss = y.new_zeros((), dtype=torch.float32)
        if arriving[0]:
            loss = loss + (y * y_weights).float().sum()
        if arriving[1]:
            loss = loss + (v_final * v_weights).sum()
        wanted = [leaf for leaf in leaves if leaf is not None]
        return [y, v_final, *torch.autograd.grad(loss, wanted, materialize_grads=True)]

    result, expected = step(run), step(unfused)
    assert same(result[1], expected[1])
    for what, one, other in zip(("y", "v_final", "x", "v", "weight_t", "bias"), result, expected, strict=False):
        assert_near(one, other, what)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integer_weights_give_the_exact_sums(kernels: Kernels, dtype: torch.dtype) -> None:
    x = draw(4, 6, 40, seed=0, device=kernels.device, dtype=dtype)
    weight_t = torch.randint(-3, 4, (40, 12)).to(dtype).to(kernels.device)
    y, _ = if_linear(x, None, weight_t)
    spikes = if_spike(x)[0]
    assert torch.equal(y.double(), spikes.double() @ weight_t.double())


def test_one_step_is_a_sequence_of_one(kernels: Kernels) -> None:
    x, v = draw(5, 12, seed=0, device=kernels.device), draw(5, 12, seed=1, device=kernels.device)
    weight_t = draw(12, 3, seed=2, device=kernels.device)
    y, v_final = lif_linear(x, v, weight_t)
    sequence, same_v = lif_linear(x.unsqueeze(0), v, weight_t)
    assert torch.equal(y, sequence.squeeze(0))
    assert torch.equal(v_final, same_v)


def test_all_steps_in_one_go_are_the_steps_in_two(kernels: Kernels) -> None:
    x, weight_t = draw(7, 3, 20, seed=0, device=kernels.device), draw(20, 4, seed=1, device=kernels.device)
    y, v_final = lif_linear(x, None, weight_t, tau=3.3)
    first, v = lif_linear(x[:3], None, weight_t, tau=3.3)
    second, last = lif_linear(x[3:], v, weight_t, tau=3.3)
    assert torch.equal(torch.cat([first, second]), y)
    assert torch.equal(last, v_final)


def test_a_surrogate_of_ones_own_runs_in_plain_torch(kernels: Kernels) -> None:
    x, v = draw(9, 4, 24, seed=0, device=kernels.device), draw(4, 24, seed=1, device=kernels.device)
    weight_t = draw(24, 6, seed=2, device=kernels.device)
    neuron = Neuron(LIF, 3.3, 0.7, None)

    def step(function: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        leaves = [leaf.detach().requires_grad_() for leaf in (x, v, weight_t)]
        y, v_final = function(*leaves, None, neuron, Rectangle())
        return torch.autograd.grad(y.square().sum() + v_final.sum(), leaves)

    for what, one, other in zip(("x", "v", "weight_t"), step(run), step(unfused), strict=True):
        assert_near(one, other, what)


def test_under_autocast_the_product_runs_in_its_dtype(kernels: Kernels) -> None:
    x = draw(4, 3, 16, seed=0, device=kernels.device).requires_grad_()
    layer = nn.Linear(16, 5).to(kernels.device)
    with torch.autocast(kernels.device.type, dtype=torch.bfloat16):
        y, v_final = if_linear(x, None, layer.weight.t(), layer.bias)
        expected = layer(if_spike(x.detach())[0])
    assert y.dtype == expected.dtype == torch.bfloat16
    assert v_final.dtype == torch.float32
    assert_near(y, expected, "y")
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("surrogate", [None, Rectangle()], ids=["built-in", "of one's own"])
def test_backward_within_autocast_is_backward_outside(
    kernels: Kernels, dtype: torch.dtype, surrogate: Surrogate | None
) -> None:
    """The forward pass ran outside, in an island of float32 for example."""
    x = draw(4, 3, 16, seed=0, device=kernels.device, dtype=dtype)
    layer = LIFLinear(16, 5, surrogate_function=surrogate, device=kernels.device)
    grads = []
    for enabled in (False, True):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        with torch.autocast(kernels.device.type, dtype=torch.bfloat16, enabled=enabled):
            grads.append(torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()]))
        layer.reset()
    for one, other in zip(*grads, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_steps_under_autocast_keep_the_weight_and_no_copies_of_it(kernels: Kernels) -> None:
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    layer = LIFLinear(16, 5, step_mode="s", device=kernels.device)
    x = draw(8, 3, 16, seed=0, device=kernels.device).requires_grad_()
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast(kernels.device.type, dtype=torch.bfloat16),
    ):
        outputs = [layer(step) for step in x]
    weights = [tensor for tensor in kept.values() if tensor.numel() == layer.weight.numel()]
    assert [tensor.data_ptr() for tensor in weights] == [layer.weight.data_ptr()]
    torch.stack(outputs).float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("layer_class", [IFLinear, LIFLinear])
def test_shapes_can_be_asked_for_without_memory(layer_class: type[IFLinear | LIFLinear]) -> None:
    layer = layer_class(16, 5, device="meta")
    y = layer(torch.empty(4, 2, 16, device="meta", requires_grad=True))
    assert (y.device.type, y.shape) == ("meta", (4, 2, 5))
    y.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (5, 16)


@pytest.mark.parametrize("inputs", [0, 8])
@pytest.mark.parametrize("outputs", [0, 5])
@pytest.mark.parametrize("step_mode", ["s", "m"])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_may_have_no_inputs_or_outputs(kernels: Kernels, inputs: int, outputs: int, step_mode: Any) -> None:
    layer = LIFLinear(inputs, outputs, step_mode=step_mode, device=kernels.device)
    linear = nn.Linear(inputs, outputs, device=kernels.device)
    linear.load_state_dict(layer.state_dict())
    x = draw(4, 3, inputs, seed=0, device=kernels.device).requires_grad_()
    for _ in range(2):  # the second call carries a potential
        y = layer(x)
        assert y.shape == (4, 3, outputs)
    if inputs == 0:
        assert torch.equal(y, linear(x))
    y.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (outputs, inputs)


@pytest.mark.parametrize("needs", ["x", "v", "weight_t", "bias"])
def test_only_the_gradients_asked_for_are_made(kernels: Kernels, needs: str) -> None:
    leaves = {
        "x": draw(3, 2, 8, seed=0, device=kernels.device),
        "v": draw(2, 8, seed=1, device=kernels.device),
        "weight_t": draw(8, 4, seed=2, device=kernels.device),
        "bias": draw(4, seed=3, device=kernels.device),
    }
    complete = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    lif_linear(**complete)[0].square().sum().backward()
    leaves[needs].requires_grad_()
    kernels.launches.clear()
    lif_linear(**leaves)[0].square().sum().backward()
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name == needs)
    assert torch.equal(leaves[needs].grad, complete[needs].grad)  # type: ignore[arg-type]
    assert any(entry.startswith("neuron_backward") for entry in kernels.launches) == (needs in ("x", "v"))


def test_a_second_derivative_is_refused(kernels: Kernels) -> None:
    x = draw(3, 2, 8, seed=0, device=kernels.device).requires_grad_()
    y, _ = if_linear(x, None, draw(8, 4, seed=1, device=kernels.device))
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="Gradients of neurons can be taken once"):
        grad.sum().backward()


# ---------------------------------------------------------------------------------------------------------------------
# Bytes


def test_what_is_kept_for_backward_holds_no_spikes_as_numbers(kernels: Kernels) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = draw(8, 4, 12, seed=0, device=kernels.device).requires_grad_()
    v = draw(4, 12, seed=1, device=kernels.device)
    weight_t = draw(12, 5, seed=2, device=kernels.device).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        lif_linear(x, v, weight_t)
    inputs = {tensor.data_ptr() for tensor in (x, v, weight_t)}
    made = [tensor for tensor in kept if tensor.data_ptr() not in inputs]
    assert [(tensor.shape, tensor.dtype) for tensor in made] == [((8 * 4, 2), torch.uint8)]


@pytest.mark.parametrize("surrogate", [ATan(), Rectangle()], ids=["built-in", "of one's own"])
def test_a_step_needs_little_beyond_output_its_gradient_and_that_of_the_input(
    kernels: Kernels, surrogate: Surrogate
) -> None:
    t, rows, inputs, outputs = 8, 512, 512, 64
    x = draw(t, rows, inputs, seed=0, device=kernels.device).requires_grad_()
    weight_t = draw(inputs, outputs, seed=1, device=kernels.device).requires_grad_()

    def step() -> None:
        y, _ = lif_linear(x, None, weight_t, surrogate_function=surrogate)
        y.backward(torch.ones_like(y))

    step()  # compiles, and makes the gradients: the second step adds to them
    report = measure_memory(step, device=kernels.device)
    y_bytes, x_bytes, v_bytes = 4 * t * rows * outputs, x.nbytes, 4 * rows * inputs
    bits, workspace = x.numel() // 8, 8 << 20
    assert report.peak_bytes - report.start_bytes <= 2 * y_bytes + x_bytes + v_bytes + bits + workspace
    # The spikes alone, and their gradient apart from that of x, would each take as much again as x.
    assert workspace + v_bytes < 1.2 * x_bytes


# ---------------------------------------------------------------------------------------------------------------------
# As operations of torch


def test_the_gradient_of_spikes_is_registered_correctly(kernels: Kernels) -> None:
    grad, weight_t = draw(6, 4, seed=0, device=kernels.device), draw(9, 4, seed=1, device=kernels.device)
    for dtype in DTYPES:
        torch.library.opcheck(ops.spike_gradient.default, (grad, weight_t, dtype))
        torch.testing.assert_close(ops.spike_gradient(grad, weight_t, dtype), (grad @ weight_t.t()).to(dtype))
    with pytest.raises(ValueError, match=r"grad \[M, N\] and weight_t \[K, N\] of one dtype, got \(6, 4\)"):
        ops.spike_gradient(grad, weight_t.t(), torch.float32)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_it_compiles_as_one_graph_forward_and_backward(kernels: Kernels, backend: str) -> None:
    def step(x: Tensor, v: Tensor, weight_t: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        if backend == "inductor":  # compiles slowly what lies between
            return lif_linear(x, v, weight_t, bias, surrogate_function=SoftSign())
        y, v = if_linear(x * 2, v, weight_t, bias, surrogate_function=SoftSign())
        z, _ = lif_linear(y, None, weight_t.t(), tau=3.3, surrogate_function=Erf())
        return z.square(), v

    def gradients(function: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        shapes = (4, 3, 8), (3, 8), (8, 6), (6,)
        leaves = [draw(*shape, seed=i, device=kernels.device).requires_grad_() for i, shape in enumerate(shapes)]
        z, v = function(*leaves)
        return torch.autograd.grad(z.sum() + v.sum(), leaves)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    torch.testing.assert_close(gradients(compiled), gradients(step))


def wrong_inputs() -> dict[str, tuple[Callable[[Tensor, Tensor], object], type[Exception], str]]:
    return {
        "dims of x": (lambda x, w: if_linear(x[0, 0], None, w), ValueError, r"\[M, K\] or \[T, M, K\], got \(8,\)"),
        "dtype of x": (lambda x, w: if_linear(x.long(), None, w), TypeError, "got torch.int64"),
        "shape of v": (
            lambda x, w: if_linear(x, x, w),
            ValueError,
            r"v must have shape \(2, 8\) .* got \(3, 2, 8\)",
        ),
        "shape of weight": (
            lambda x, w: if_linear(x, None, w.t()),
            ValueError,
            r"weight_t must have shape \[K, N\] with K = 8 for x of shape \(3, 2, 8\), got \(4, 8\)",
        ),
        "dtype of weight": (lambda x, w: if_linear(x, None, w.double()), TypeError, "weight_t must be float32"),
        "device of weight": (lambda x, w: if_linear(x, None, w.to("meta")), ValueError, "weight_t must be on .*meta"),
        "no weight": (
            lambda x, w: if_linear(x, None, None),
            TypeError,
            "if_linear takes weight_t as a tensor, got NoneType",
        ),  # type: ignore[arg-type]
        "shape of bias": (lambda x, w: if_linear(x, None, w, w[:, 0]), ValueError, r"bias must have shape \[4\]"),
        "dtype of bias": (lambda x, w: if_linear(x, None, w, w[0].half()), ValueError, "got .* of torch.float16"),
        "tau": (lambda x, w: lif_linear(x, None, w, tau=0.5), ValueError, "tau must be finite and above 1"),
    }


@pytest.mark.parametrize("name", list(wrong_inputs()))
def test_wrong_input_is_named_and_nothing_is_launched(kernels: Kernels, name: str) -> None:
    function, error, message = wrong_inputs()[name]
    with pytest.raises(error, match=message):
        function(draw(3, 2, 8, seed=0, device=kernels.device), draw(8, 4, seed=1, device=kernels.device))
    assert not kernels.launches


# ---------------------------------------------------------------------------------------------------------------------
# Layers

each_layer = pytest.mark.parametrize("layer_class", [IFLinear, LIFLinear])


@each_layer
def test_a_layer_is_neurons_and_a_linear_layer(kernels: Kernels, layer_class: type[IFLinear | LIFLinear]) -> None:
    layer = layer_class(12, 5, surrogate_function=ATan()).to(kernels.device)
    linear = nn.Linear(12, 5).to(kernels.device)
    linear.load_state_dict(layer.state_dict())
    spike = if_spike if layer_class is IFLinear else lif_spike
    x = draw(4, 2, 3, 12, seed=0, device=kernels.device)
    y = layer(x)
    spikes, v = spike(x)
    torch.testing.assert_close(y, linear(spikes))
    assert torch.equal(layer.v, v)  # type: ignore[arg-type]
    torch.testing.assert_close(layer(x), linear(spike(x, v)[0]))  # the potential is carried
    layer.reset()
    assert torch.equal(layer(x), y)


@each_layer
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_those_of_a_linear_layer(layer_class: type[IFLinear | LIFLinear], bias: bool) -> None:
    torch.manual_seed(3)
    linear = nn.Linear(6, 4, bias)
    torch.manual_seed(3)
    layer = layer_class(6, 4, bias)
    assert layer.state_dict().keys() == linear.state_dict().keys()
    for name, parameter in linear.named_parameters():
        assert torch.equal(layer.get_parameter(name), parameter)
    layer(torch.rand(3, 2, 6))
    assert layer.state_dict().keys() == linear.state_dict().keys()
    assert not list(layer.buffers())


@each_layer
def test_single_steps_are_the_steps_of_a_sequence(layer_class: type[IFLinear | LIFLinear]) -> None:
    whole, single = layer_class(6, 4), layer_class(6, 4, step_mode="s")
    single.load_state_dict(whole.state_dict())
    x = torch.rand(5, 2, 3, 6) * 2
    torch.testing.assert_close(torch.stack([single(step) for step in x]), whole(x))
    assert torch.equal(single.v, whole.v)  # type: ignore[arg-type]


@each_layer
def test_a_layer_can_be_copied_and_pickled_after_a_training_step(layer_class: type[IFLinear | LIFLinear]) -> None:
    layer = layer_class(6, 4)
    x = torch.rand(3, 2, 6)
    layer(x.requires_grad_()).sum().backward()
    assert layer.v is not None
    assert layer.v.requires_grad
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other.v, layer.v)
        assert not other.v.requires_grad
        assert torch.equal(other(x), copy.deepcopy(layer)(x))
        other.reset()
    assert layer.v is not None
    layer.detach()
    assert not layer.v.requires_grad


@each_layer
def test_a_first_layer_learns_over_carried_potentials(layer_class: type[IFLinear | LIFLinear]) -> None:
    """The potential depends on the input only: where that has no graph, the next call's graph ends at the call."""
    layer = layer_class(6, 4)
    for _ in range(3):
        layer(torch.rand(3, 2, 6)).sum().backward()
    assert layer.v is not None
    assert not layer.v.requires_grad


@each_layer
def test_the_potential_moves_with_the_layer_and_stays_float32(layer_class: type[IFLinear | LIFLinear]) -> None:
    layer = layer_class(6, 4)
    x = torch.rand(3, 2, 6)
    layer(x)
    layer.v = torch.tensor([[1e6, 1 / 3] * 3] * 2)  # not numbers of 16 bits
    v = layer.v.clone()
    for convert in (layer.half, layer.float, layer.bfloat16):
        convert()
        assert torch.equal(layer.v, v)
        assert layer.v.dtype == torch.float32
    assert layer.weight.dtype == torch.bfloat16
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert layer.v is not None
    layer.to("meta")
    assert layer.v.device.type == "meta"


@each_layer
@pytest.mark.parametrize("start", ["cpu", "meta"])
def test_memory_without_values_leaves_no_potential(layer_class: type[IFLinear | LIFLinear], start: str) -> None:
    model = nn.Sequential(layer_class(6, 4, device=start))
    model(torch.rand(3, 2, 6, device=start))
    assert model[0].v is not None
    model.to_empty(device="cpu")
    assert model[0].v is None


@each_layer
def test_a_parametrized_layer_can_be_copied_after_a_training_step(layer_class: type[IFLinear | LIFLinear]) -> None:
    layer = nn.utils.parametrizations.weight_norm(layer_class(6, 4))
    layer(torch.rand(3, 2, 6, requires_grad=True)).sum().backward()
    copied = copy.deepcopy(layer)
    assert torch.equal(copied.v, layer.v)
    assert not copied.v.requires_grad
    x = torch.rand(3, 2, 6)
    assert torch.equal(copied(x), layer(x))
    assert copied.parametrizations.weight.original0 is not layer.parametrizations.weight.original0


@each_layer
def test_a_layer_trains_after_a_call_in_inference_mode(layer_class: type[IFLinear | LIFLinear]) -> None:
    layer = layer_class(6, 4)
    with torch.inference_mode():
        layer(torch.rand(3, 2, 6))
    layer(torch.rand(3, 2, 6, requires_grad=True)).sum().backward()
    assert layer.weight.grad is not None


@each_layer
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"v_threshold": math.inf}, ValueError, "v_threshold must be finite in float32, got inf"),
        ({"v_reset": "0"}, TypeError, "v_reset must be a number, got '0'"),
        ({"dtype": torch.float64}, TypeError, "takes a dtype of float32, float16 or bfloat16, got torch.float64"),
        ({"surrogate_function": "sigmoid"}, TypeError, "surrogate_function must be"),
    ],
    ids=["threshold", "reset", "dtype", "surrogate"],
)
def test_what_makes_no_layer_is_refused_at_once(
    layer_class: type[IFLinear | LIFLinear], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        layer_class(6, 4, **options)


def test_a_time_constant_is_checked_at_once() -> None:
    with pytest.raises(ValueError, match=r"tau must be finite and above 1 .* got 0.5"):
        LIFLinear(6, 4, tau=0.5)


@each_layer
def test_what_is_no_tensor_is_named(layer_class: type[IFLinear | LIFLinear]) -> None:
    with pytest.raises(TypeError, match=f"{layer_class.__name__} takes a tensor, got list"):
        layer_class(6, 4)([[[0.0] * 6]])


@each_layer
def test_a_forgotten_reset_is_named(layer_class: type[IFLinear | LIFLinear]) -> None:
    layer = layer_class(6, 4)
    layer(torch.rand(3, 2, 6))
    with pytest.raises(ValueError, match=rf"{layer_class.__name__} holds .*\(2, 6\), but x is \(3, 5, 6\). Call reset"):
        layer(torch.rand(3, 5, 6))


@each_layer
@pytest.mark.parametrize(
    ("step_mode", "shape", "message"),
    [
        ("m", (3, 6), r"takes x of shape \[T, ..., K\] with at least 3 dimensions and K = 6, got \(3, 6\)"),
        ("m", (3, 2, 5), r"K = 6, got \(3, 2, 5\)"),
        ("s", (6,), r"takes x of shape \[..., K\] with at least 2 dimensions"),
    ],
)
def test_an_input_that_does_not_fit_is_named(
    layer_class: type[IFLinear | LIFLinear], step_mode: Any, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        layer_class(6, 4, step_mode=step_mode)(torch.rand(shape))


def test_an_unknown_step_mode_is_refused() -> None:
    with pytest.raises(ValueError, match='step_mode must be "s"'):
        IFLinear(6, 4, step_mode="multi")  # type: ignore[arg-type]


def test_layers_show_what_they_are() -> None:
    assert repr(LIFLinear(6, 4, tau=3.0, surrogate_function=ATan(1.5))) == (
        "LIFLinear(in_features=6, out_features=4, bias=True, v_threshold=1.0, v_reset=0.0, detach_reset=False, "
        "surrogate_function=ATan(alpha=1.5), step_mode='m', tau=3.0, decay_input=True)"
    )


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 12)
        self.block = nn.Sequential(LIFLinear(12, 10, tau=3.3, detach_reset=True), IFLinear(10, 6, v_reset=None))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.encoder(x))


def reset(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (IFLinear, LIFLinear)):
            module.reset()


@pytest.mark.parametrize("between", [reset, lambda model: [m.detach() for m in model.block]], ids=["reset", "carried"])
@pytest.mark.parametrize("what", ["block", "layer"])
def test_a_checkpointed_layer_trains_as_the_plain_one(between: Callable[[Any], object], what: str) -> None:
    def treat(model: nn.Module) -> object:
        block = model.get_submodule("block")
        if what == "block":
            return checkpoint_module(block, compressor=BitSpikeCompressor())
        return [checkpoint_module(layer) for layer in block.children()]

    plain, treated = assert_optimized_equals_plain(
        Network, treat, lambda: call(torch.randn(4, 3, 8) * 2), between=between
    )
    for module in (plain, treated):
        assert all(math.prod(layer.weight.shape) for layer in module.get_submodule("block").children())
