"""The surrogates as objects: spikes forward, their derivative backward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_memopt import surrogate
from lightning_memopt.surrogate import BUILT_IN, BuiltInSurrogate, KernelFormula, as_surrogate

# The functions whose derivatives the surrogates are, up to a constant.
PRIMITIVES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "Sigmoid": lambda x, alpha: torch.sigmoid(alpha * x),
    "ATan": lambda x, alpha: torch.atan(math.pi / 2 * alpha * x) / math.pi,
    "PiecewiseQuadratic": lambda x, alpha: torch.where(
        x.abs() < 1 / alpha, alpha * x - alpha**2 * x * x.abs() / 2, torch.zeros_like(x)
    ),
    "PiecewiseExp": lambda x, alpha: torch.sign(x) * (1 - torch.exp(-alpha * x.abs())) / 2,
    "SoftSign": lambda x, alpha: alpha * x / (1 + (alpha * x).abs()) / 2,
    "SuperSpike": lambda x, alpha: alpha * x / (1 + x.abs()),
    "Erf": lambda x, alpha: -torch.erfc(alpha * x) / 2,
}
DEFAULTS = {
    "Sigmoid": 4.0,
    "ATan": 2.0,
    "PiecewiseQuadratic": 1.0,
    "PiecewiseExp": 1.0,
    "SoftSign": 2.0,
    "SuperSpike": 1.0,
    "Erf": 2.0,
}

each = pytest.mark.parametrize("kind", BUILT_IN, ids=lambda kind: kind.__name__)
alphas = st.floats(0.1, 8.0)


def points() -> Tensor:
    return torch.linspace(-3, 3, 1001, dtype=torch.float64) + 1e-4  # not on a kink


@each
@given(alpha=alphas)
def test_derivative_is_that_of_the_primitive(kind: type[BuiltInSurrogate], alpha: float) -> None:
    x = points().requires_grad_()
    (expected,) = torch.autograd.grad(PRIMITIVES[kind.__name__](x, alpha).sum(), x)
    torch.testing.assert_close(kind(alpha).derivative(x.detach()), expected, rtol=1e-9, atol=1e-12)


def by_formula(x: Tensor, formula: KernelFormula) -> Tensor:
    """The families of cuda/neuron.cu, as its comments state them."""
    family, scale, shift, factor, offset, outer = formula
    if family == 0:
        z = scale * x.abs() + shift
        return outer / (factor * z * z + offset)
    if family == 1:
        return (outer - scale * x.abs()).clamp_min(0)
    if family == 2:
        return outer * torch.exp(-scale * x.abs())
    if family == 3:
        return outer * torch.exp(-((scale * x) ** 2))
    s = torch.sigmoid(scale * x)
    return outer * (1 - s) * s


@each
@given(alpha=alphas)
def test_the_kernels_constants_give_the_same_derivative(kind: type[BuiltInSurrogate], alpha: float) -> None:
    surrogate = kind(alpha)
    torch.testing.assert_close(
        by_formula(points(), surrogate.kernel_formula), surrogate.derivative(points()), rtol=1e-9, atol=1e-12
    )


@each
def test_defaults_are_those_of_the_literature(kind: type[BuiltInSurrogate]) -> None:
    assert kind() == kind(DEFAULTS[kind.__name__])  # type: ignore[call-arg]
    assert BUILT_IN[kind.index] is kind


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_spike_is_one_from_zero_on(kind: type[BuiltInSurrogate], dtype: torch.dtype) -> None:
    x = torch.tensor([-math.inf, -1.0, -1e-7, -0.0, 0.0, 1e-7, 1.0, math.inf, math.nan], dtype=dtype)
    spikes = kind(1.0)(x)
    assert spikes.dtype == dtype
    assert spikes[[0, 1, 3, 4, 6, 7, 8]].tolist() == [0, 0, 1, 1, 1, 1, 0]


@each
def test_backward_multiplies_with_the_derivative_and_can_be_taken_twice(kind: type[BuiltInSurrogate]) -> None:
    x = points().requires_grad_()
    weights = torch.linspace(-1, 2, x.numel(), dtype=x.dtype)
    (grad,) = torch.autograd.grad((kind(1.5)(x) * weights).sum(), x, create_graph=True)
    torch.testing.assert_close(grad, weights * kind(1.5).derivative(x))
    (twice,) = torch.autograd.grad(grad.sum(), x)
    (expected,) = torch.autograd.grad((weights * kind(1.5).derivative(x)).sum(), x)
    torch.testing.assert_close(twice, expected)


@each
def test_it_compiles_as_one_graph(kind: type[BuiltInSurrogate]) -> None:
    torch._dynamo.reset()
    spike = kind(1.5)
    compiled = torch.compile(lambda x: spike(x) * 2, fullgraph=True, backend="aot_eager")
    x = points().requires_grad_()
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * spike.derivative(x.detach()))


@each
@pytest.mark.parametrize("alpha", [0.0, -1.0, math.inf, math.nan])
def test_a_width_must_be_finite_and_positive(kind: type[BuiltInSurrogate], alpha: float) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}: alpha must be finite and above 0, got {alpha}"):
        kind(alpha)


def test_a_width_that_leaves_float32_is_refused() -> None:
    for make in (
        lambda: surrogate.Sigmoid(1e39),
        lambda: surrogate.PiecewiseQuadratic(1e20),  # its square
        lambda: surrogate.SoftSign(1e-40),  # its reciprocal
    ):
        with pytest.raises(ValueError, match="constants beyond the range of float32"):
            make()


def test_a_width_must_be_a_number() -> None:
    with pytest.raises(TypeError, match=r"Sigmoid: alpha must be a number, got tensor\(1.\)"):
        surrogate.Sigmoid(torch.tensor(1.0))  # type: ignore[arg-type]


def test_surrogates_are_values() -> None:
    assert surrogate.ATan(3) == surrogate.ATan(3.0) != surrogate.Erf(3.0)
    assert len({surrogate.ATan(), surrogate.ATan(2.0), surrogate.Sigmoid(2.0)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        surrogate.ATan().alpha = 1.0  # type: ignore[misc]


class Rectangle(surrogate.Surrogate):
    def derivative(self, x: Tensor) -> Tensor:
        return (x.abs() < 0.5).to(x.dtype)


def test_a_surrogate_of_ones_own_defines_its_derivative() -> None:
    x = torch.tensor([-0.7, -0.2, 0.0, 0.4, 3.0], requires_grad=True)
    spikes = as_surrogate(Rectangle())(x)
    assert spikes.tolist() == [0, 0, 1, 1, 1]
    spikes.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 1, 1, 0]


class Triangle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (1 - x.abs()).clamp_min(0)


def test_any_differentiable_step_function_is_a_surrogate() -> None:
    triangle = as_surrogate(Triangle.apply)
    x = torch.tensor([-0.5, 0.25, 2.0])
    torch.testing.assert_close(triangle.derivative(x), torch.tensor([0.5, 0.75, 0.0]))
    with torch.no_grad():  # a backward pass runs without a graph
        torch.testing.assert_close(triangle.derivative(x), torch.tensor([0.5, 0.75, 0.0]))
    assert triangle(x).tolist() == [0, 1, 1]


class Smooth:
    spiking = False

    def __call__(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (torch.sigmoid, ValueError, "must be a step function, 1 from 0 on"),
        (lambda x: (x > 0).to(x), ValueError, r"maps -1, 0, 1 to tensor\(\[0., 0., 1.\]\)"),
        (Smooth(), ValueError, "Set spiking=True"),
        (lambda x: (x >= 0).to(x), ValueError, "must have a gradient with respect to its argument"),
        (lambda x: (x.detach() >= 0) * torch.ones((), requires_grad=True), ValueError, "autograd finds none"),
        (surrogate.ATan, TypeError, r"a surrogate object such as surrogate.ATan\(\)"),
        ("sigmoid", TypeError, "got 'sigmoid'"),
    ],
    ids=["smooth", "strict", "primitive", "no gradient", "gradient of another", "class", "name"],
)
def test_what_is_no_step_function_is_refused(function: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_surrogate(function)


def test_nothing_stands_for_a_sigmoid() -> None:
    assert as_surrogate(None) == surrogate.Sigmoid(4.0)


@dataclasses.dataclass
class Unhashable:
    alpha: float = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return surrogate.ATan(self.alpha)(x)


def test_a_surrogate_needs_no_hash() -> None:
    x = torch.tensor([-0.5, 0.25, 2.0])
    torch.testing.assert_close(as_surrogate(Unhashable()).derivative(x), surrogate.ATan().derivative(x))


class Scaled(torch.nn.Module):
    """A step whose width is a parameter, on a device of its own."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), device=device))

    def forward(self, x: Tensor) -> Tensor:
        return surrogate.ATan()(x * self.scale)


def test_a_surrogate_is_tried_where_it_lives_not_on_the_default_device() -> None:
    elsewhere = Scaled("meta")
    with torch.device("meta"), torch.inference_mode():
        for function in (lambda x: surrogate.ATan()(x), Scaled("cpu"), elsewhere, lambda x: elsewhere(x)):
            assert isinstance(as_surrogate(function), surrogate.Surrogate)
        with pytest.raises(ValueError, match="must be a step function"):
            as_surrogate(lambda x: (x > 0) + 0 * x)


@pytest.mark.parametrize("result", [lambda x: x[:1], lambda x: None], ids=["shape", "none"])
def test_a_derivative_has_the_shape_of_its_argument(result: Callable[[Tensor], object]) -> None:
    class Misshapen(surrogate.Surrogate):
        def derivative(self, x: Tensor) -> Tensor:
            return result(x)  # type: ignore[return-value]

    spikes = Misshapen()(torch.rand(3, 4, requires_grad=True))
    with pytest.raises((TypeError, ValueError), match=r"shape of its argument, \(3, 4\)"):
        spikes.sum().backward()
