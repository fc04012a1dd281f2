"""
Surrogate gradients of the spike
================================

A spike is the step function of ``x = h - threshold``: 1 where ``x >= 0``, else 0 (NaN: 0). Its derivative is zero
almost everywhere, so training puts a smooth one in its place. The seven built-in ones run inside the kernels and under
``torch.compile(fullgraph=True)``; any other is a subclass of :class:`Surrogate` with a ``derivative`` of its own, and
runs in plain torch.

The formulas and default widths are those of the SpikingJelly documentation (Fang et al., "SpikingJelly: An open-source
machine learning infrastructure platform for spike-based intelligence", Science Advances 9, 2023).
"""

from __future__ import annotations

import contextlib
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

__all__ = [
    "Surrogate",
    "Sigmoid",
    "ATan",
    "PiecewiseQuadratic",
    "PiecewiseExp",
    "SoftSign",
    "SuperSpike",
    "Erf",
]

# Families of formulas in cuda/neuron.cu.
_RATIONAL, _QUADRATIC, _EXPONENTIAL, _GAUSSIAN, _LOGISTIC = range(5)


class KernelFormula(NamedTuple):
    """A derivative as the kernels compute it: a family of formulas and its constants (see ``cuda/neuron.cu``)."""

    family: int
    scale: float
    shift: float = 0.0
    factor: float = 1.0
    offset: float = 0.0
    outer: float = 1.0


class Surrogate(ABC):
    """A step function in the forward pass with another derivative in the backward pass.

    Subclasses define :meth:`derivative`, element by element; it may be called on any part of a tensor.

    Example:
        >>> class Rectangle(Surrogate):
        ...     def derivative(self, x): return (x.abs() < 0.5).to(x.dtype)
        >>> x = torch.tensor([-1.0, 0.0, 0.25], requires_grad=True)
        >>> spikes = Rectangle()(x)
        >>> spikes.sum().backward()
        >>> spikes.tolist(), x.grad.tolist()
        ([0.0, 1.0, 1.0], [0.0, 1.0, 1.0])
    """

    @abstractmethod
    def derivative(self, x: Tensor) -> Tensor:
        """The derivative that stands for the step's.

        Args:
            x: potential minus threshold, any shape.

        Returns:
            A tensor of the shape and dtype of ``x``.
        """

    def __call__(self, x: Tensor) -> Tensor:
        """Spikes of ``x`` (potential minus threshold), of its shape and dtype."""
        return cast(Tensor, _Step.apply(x, self))


class _Step(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, surrogate: Surrogate) -> Tensor:
        ctx.save_for_backward(x)
        ctx.surrogate = surrogate
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        derivative = ctx.surrogate.derivative(x)
        check_derivative(derivative, x)
        return grad * derivative, None


def check_derivative(derivative: object, x: Tensor) -> None:
    """Raise unless ``derivative``, from a surrogate at ``x``, has one number for each of ``x``."""
    if not isinstance(derivative, Tensor):
        raise TypeError(
            f"The derivative of a surrogate must be a tensor of the shape of its argument, {tuple(x.shape)}, but "
            f"derivative() returned {derivative!r}."
        )
    if derivative.shape != x.shape:
        raise ValueError(
            f"The derivative of a surrogate must have the shape of its argument, {tuple(x.shape)}, but derivative() "
            f"returned {tuple(derivative.shape)}. Compute it element by element."
        )
    if derivative.device != x.device:
        raise ValueError(
            f"The derivative of a surrogate must be on the device of its argument, {x.device}, but derivative() "
            f"returned a tensor on {derivative.device}."
        )


@dataclass(frozen=True)
class BuiltInSurrogate(Surrogate):
    """What the seven built-in surrogates share: a width and a formula that the kernels know."""

    alpha: float
    index: ClassVar[int]

    def __post_init__(self) -> None:
        """Check the width."""
        alpha: object = self.alpha
        if not isinstance(alpha, (int, float)):
            raise TypeError(f"{type(self).__name__}: alpha must be a number, got {alpha!r}.")
        if not 0 < alpha < math.inf:
            raise ValueError(f"{type(self).__name__}: alpha must be finite and above 0, got {alpha}.")
        object.__setattr__(self, "alpha", float(alpha))
        # The kernels take the constants of the formula as float32.
        formula = self.kernel_formula
        largest = max(formula.scale, formula.shift, formula.factor, formula.offset, formula.outer)
        if largest > torch.finfo(torch.float32).max:
            raise ValueError(
                f"{type(self).__name__}: with alpha = {alpha} its derivative has constants beyond the range of float32."
            )

    @property
    @abstractmethod
    def kernel_formula(self) -> KernelFormula:
        """The same derivative as a family and its constants."""


@dataclass(frozen=True)
class Sigmoid(BuiltInSurrogate):
    """Derivative ``alpha s (1 - s)`` with ``s = sigmoid(alpha x)``.

    Args:
        alpha: steepness, above 0.

    Example:
        >>> Sigmoid().derivative(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 0.0707])
    """

    alpha: float = 4.0
    index: ClassVar[int] = 0

    def derivative(self, x: Tensor) -> Tensor:
        s = torch.sigmoid(x * self.alpha)
        return (1 - s) * s * self.alpha

    @property
    def kernel_formula(self) -> KernelFormula:
        return KernelFormula(_LOGISTIC, self.alpha, outer=self.alpha)


@dataclass(frozen=True)
class ATan(BuiltInSurrogate):
    """Derivative ``(alpha / 2) / (1 + (pi / 2 alpha x)^2)``.

    Args:
        alpha: steepness, above 0.

    Example:
        >>> ATan().derivative(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 0.0920])
    """

    alpha: float = 2.0
    index: ClassVar[int] = 1

    def derivative(self, x: Tensor) -> Tensor:
        z = x * (math.pi / 2 * self.alpha)
        return (self.alpha / 2) / (1 + z * z)

    @property
    def kernel_formula(self) -> KernelFormula:
        return KernelFormula(_RATIONAL, math.pi / 2 * self.alpha, offset=1.0, outer=self.alpha / 2)


@dataclass(frozen=True)
class PiecewiseQuadratic(BuiltInSurrogate):
    """Derivative ``max(0, alpha - alpha^2 |x|)``.

    Args:
        alpha: height at 0, above 0; the derivative is 0 from ``1 / alpha`` on.

    Example:
        >>> PiecewiseQuadratic().derivative(torch.tensor([0.0, 0.5, 2.0]))
        tensor([1.0000, 0.5000, 0.0000])
    """

    alpha: float = 1.0
    index: ClassVar[int] = 2

    def derivative(self, x: Tensor) -> Tensor:
        return (self.alpha - x.abs() * (self.alpha * self.alpha)).clamp_min(0)

    @property
    def kernel_formula(self) -> KernelFormula:
        return KernelFormula(_QUADRATIC, self.alpha * self.alpha, outer=self.alpha)


@dataclass(frozen=True)
class PiecewiseExp(BuiltInSurrogate):
    """Derivative ``(alpha / 2) e^(-alpha |x|)``.

    Args:
        alpha: steepness, above 0.

    Example:
        >>> PiecewiseExp().derivative(torch.tensor([0.0, 1.0]))
        tensor([0.5000, 0.1839])
    """

    alpha: float = 1.0
    index: ClassVar[int] = 3

    def derivative(self, x: Tensor) -> Tensor:
        return torch.exp(x.abs() * -self.alpha) * (self.alpha / 2)

    @property
    def kernel_formula(self) -> KernelFormula:
        return KernelFormula(_EXPONENTIAL, self.alpha, outer=self.alpha / 2)


@dataclass(frozen=True)
class SoftSign(BuiltInSurrogate):
    """Derivative ``1 / (2 alpha (1 / alpha + |x|)^2)``.

    Args:
        alpha: steepness, above 0.

    Example:
        >>> SoftSign().derivative(torch.tensor([0.0, 0.5]))
        tensor([1.0000, 0.2500])
    """

    alpha: float = 2.0
    index: ClassVar[int] = 4

    def derivative(self, x: Tensor) -> Tensor:
        z = x.abs() + 1 / self.alpha
        return 1 / (z * (2 * self.alpha) * z)

    @property
    def kernel_formula(self) -> KernelFormula:
        return KernelFormula(_RATIONAL, 1.0, shift=1 / self.alpha, factor=2 * self.alpha)


@dataclass(frozen=True)
class SuperSpike(BuiltInSurrogate):
    """Derivative ``alpha / (1 + |x|)^2``.

    Args:
        alpha: height at 0, above 0.

    Example:
        >>> SuperSpike().derivative(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 0.2500])
    """

    alpha: float = 1.0
    index: ClassVar[int] = 5

    def derivative(self, x: Tensor) -> Tensor:
        z = x.abs() + 1
        return self.alpha / (z * z)

    @property
    def kernel_formula(self) -> KernelFormula:
        return KernelFormula(_RATIONAL, 1.0, shift=1.0, outer=self.alpha)


@dataclass(frozen=True)
class Erf(BuiltInSurrogate):
    """Derivative ``(alpha / sqrt(pi)) e^(-(alpha x)^2)``.

    Args:
        alpha: steepness, above 0.

    Example:
        >>> Erf().derivative(torch.tensor([0.0, 0.5]))
        tensor([1.1284, 0.4151])
    """

    alpha: float = 2.0
    index: ClassVar[int] = 6

    def derivative(self, x: Tensor) -> Tensor:
        z = x * self.alpha
        return torch.exp(-z * z) * (self.alpha / math.sqrt(math.pi))

    @property
    def kernel_formula(self) -> KernelFormula:
        return KernelFormula(_GAUSSIAN, self.alpha, outer=self.alpha / math.sqrt(math.pi))


BUILT_IN: tuple[type[BuiltInSurrogate], ...] = (
    Sigmoid,
    ATan,
    PiecewiseQuadratic,
    PiecewiseExp,
    SoftSign,
    SuperSpike,
    Erf,
)
_BY_NAME = {surrogate.__name__: surrogate for surrogate in BUILT_IN}


# ---------------------------------------------------------------------------------------------------------------------
# Surrogates of others


class _ForeignSurrogate(Surrogate):
    """A differentiable function from ``x`` to spikes, taken for its derivative."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def derivative(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            spikes = self.function(leaf)
            (gradient,) = torch.autograd.grad(spikes, leaf, torch.ones_like(spikes))
        return gradient

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)

    def __repr__(self) -> str:
        return repr(self.function)


# Functions seen to be step functions with a gradient.
_STEPS: weakref.WeakSet[Any] = weakref.WeakSet()


def built_in_surrogate(function: object) -> BuiltInSurrogate | None:
    """Ours for ``function`` if it is one of the seven built-in ones, or one of SpikingJelly's that has its equation.

    Raises:
        ValueError: if its width makes no surrogate.
    """
    if isinstance(function, BuiltInSurrogate):
        return function
    kind = type(function)
    if kind.__module__.startswith("spikingjelly.") and kind.__name__ in _BY_NAME:
        alpha = getattr(function, "alpha", None)
        if isinstance(alpha, (int, float)) and getattr(function, "spiking", True):
            return _BY_NAME[kind.__name__](alpha)
    return None


def as_surrogate(function: object) -> Surrogate:
    """Take what users pass as a surrogate function.

    Args:
        function: one of ours, None (``Sigmoid()``), one of SpikingJelly's, or any function from a tensor to its spikes
            that autograd can differentiate.

    Returns:
        A surrogate: for the seven of SpikingJelly that have our equations, ours.

    Raises:
        TypeError: if ``function`` is not callable.
        ValueError: if it is no step function, 1 from 0 on, or has no gradient.

    Example:
        >>> as_surrogate(None), as_surrogate(ATan(3.0))
        (Sigmoid(alpha=4.0), ATan(alpha=3.0))
    """
    if function is None:
        return Sigmoid()
    if isinstance(function, Surrogate):
        return function
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"surrogate_function must be a surrogate object such as surrogate.ATan(), got {function!r}.")
    if not getattr(function, "spiking", True):
        raise ValueError(
            f"{function!r} is set to return its smooth primitive instead of spikes (spiking=False). Set spiking=True."
        )
    built_in = built_in_surrogate(function)
    if built_in is not None:
        return built_in
    _check_step(function)
    return _ForeignSurrogate(function)


def _check_step(function: Callable[[Tensor], Tensor]) -> None:
    with contextlib.suppress(TypeError):  # without a hash, or without weak references: it is checked at each call
        if function in _STEPS:
            return
    # Where its own tensors are; else on the CPU, whatever torch's default device.
    tensors = [*function.parameters(), *function.buffers()] if isinstance(function, torch.nn.Module) else []
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "meta":
        return  # it has no values to look at
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        x = torch.tensor([-1.0, 0.0, 1.0], device=device, requires_grad=True)
        try:
            spikes = function(x)
        except RuntimeError as error:
            if "device" in str(error) or "Inference tensors" in str(error):
                return  # it holds tensors on a device that nobody can know before it is called, or made in inference
            raise
        if isinstance(spikes, Tensor) and spikes.device.type == "meta":
            return
        if not isinstance(spikes, Tensor) or spikes.tolist() != [0.0, 1.0, 1.0]:
            raise ValueError(
                f"surrogate_function must be a step function, 1 from 0 on, but {function!r} maps -1, 0, 1 to "
                f"{spikes.detach() if isinstance(spikes, Tensor) else spikes}. To use its derivative only, define it "
                "as a subclass of lightning_memopt.surrogate.Surrogate."
            )
        gradient = None
        if spikes.requires_grad:
            (gradient,) = torch.autograd.grad(spikes.sum(), x, allow_unused=True)
        if gradient is None:
            raise ValueError(
                f"surrogate_function must have a gradient with respect to its argument, but autograd finds none in "
                f"{function!r}. Give it one, as a torch.autograd.Function or as a subclass of "
                "lightning_memopt.surrogate.Surrogate."
            )
    with contextlib.suppress(TypeError):
        _STEPS.add(function)
