"""
Neurons, alone and fused with a linear layer
============================================

:func:`if_spike` and :func:`lif_spike` run a layer of neurons through all time steps; :func:`if_linear` and
:func:`lif_linear` multiply the spikes with a weight at once, so that the spikes never exist as floating-point numbers:
the neurons write bits, the product reads bits, and backward computes the potentials again from ``x``.

With ``r = v_reset``, or 0 for a soft reset, a neuron charges, spikes and resets at each step:

* IF: ``h = v + x``
* LIF: ``h = v + (x - (v - r)) / tau`` if the input decays, else ``h = v - (v - r) / tau + x``
* ``s = 1`` where ``h >= v_threshold``, else 0 (a NaN potential does not spike)
* hard reset: ``v = s v_reset + (1 - s) h``; soft reset (``v_reset=None``): ``v = h - s v_threshold``

These are the equations and the order of operations of SpikingJelly's neurons (Fang et al., Science Advances 9, 2023);
spikes and potentials in float32 equal those of the loop in plain torch on the same device bit for bit. Potentials are
float32 even where ``x`` is float16 or bfloat16.

Gradients can be taken once, by torch's autograd: ``torch.func`` and ``vmap`` are refused. Built-in surrogates compile
with ``fullgraph=True``; others run in plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_memopt.ops.arguments import check_dense, transforms_are_active
from lightning_memopt.ops.autocast import autocast_dtype
from lightning_memopt.ops.bit_pack import bit_pack
from lightning_memopt.ops.neuron import (
    IF,
    LIF,
    LIF_DECAYED_INPUT,
    NEURON_DTYPES,
    Neuron,
    backward_by_torch,
    in_memory_order,
)
from lightning_memopt.ops.packed_linear import packed_linear, packed_linear_grad_weight
from lightning_memopt.surrogate import BuiltInSurrogate, Sigmoid, Surrogate, as_surrogate

__all__ = ["if_linear", "if_spike", "lif_linear", "lif_spike"]

_SIGMOID = Sigmoid()
_LARGEST = torch.finfo(torch.float32).max


# A neuron and its surrogate as constants that torch.compile can trace: charge, tau, v_threshold, v_reset, detach_reset,
# index and alpha of a built-in surrogate, and None; or -1, 0 and another surrogate.
_Equation = tuple[int, float, float, float | None, bool, int, float, Surrogate | None]
_CONSTANTS = 8


def _equation(
    charge: int, tau: float, v_threshold: float, v_reset: float | None, detach_reset: bool, surrogate_function: object
) -> _Equation:
    for name, value in (("tau", tau), ("v_threshold", v_threshold), ("v_reset", v_reset)):
        if not (isinstance(value, (int, float)) or (value is None and name == "v_reset")):
            raise TypeError(f"{name} must be a number, got {value!r}.")
    neuron = Neuron(charge, _number(tau), _number(v_threshold), None if v_reset is None else _number(v_reset))
    constants = neuron.charge, neuron.tau, neuron.v_threshold, neuron.v_reset, bool(detach_reset)
    surrogate = as_surrogate(surrogate_function)
    if isinstance(surrogate, BuiltInSurrogate):
        return *constants, surrogate.index, surrogate.alpha, None
    return *constants, -1, 0.0, surrogate


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of float: no neuron has it
        return math.inf if value > 0 else -math.inf


def check_neuron(
    charge: int, tau: float, v_threshold: float, v_reset: float | None, surrogate_function: object = None
) -> None:
    """Raise TypeError or ValueError unless these constants and this surrogate make a neuron."""
    _equation(charge, tau, v_threshold, v_reset, False, surrogate_function)


def _refuse_transforms() -> None:
    if transforms_are_active():
        raise RuntimeError(
            "Neurons were called within a torch.func transform (grad, vjp, jvp, jacrev, vmap, ...), which their "
            "gradients do not support. Use eager autograd: backward() or torch.autograd.grad, and a batch dimension in "
            "place of vmap."
        )


def _forward(
    x: Tensor, v: Tensor | None, equation: tuple[Any, ...], spikes: bool, row: int
) -> tuple[Tensor, Tensor, Tensor]:
    results: tuple[Tensor, Tensor, Tensor] = torch.ops.lightning_memopt.neuron_forward(x, v, *equation[:4], spikes, row)
    return results


def _backward(
    x: Tensor,
    v: Tensor | None,
    grad_spike: Tensor | None,
    grad_v_final: Tensor | None,
    equation: _Equation,
    wants_grad_v: bool,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``x`` and ``v``; in place, the first is ``grad_spike`` overwritten."""
    custom = equation[7]
    if custom is not None:
        neuron, detach_reset = Neuron(*equation[:4]), equation[4]
        return backward_by_torch(
            *(x, v, grad_spike, grad_v_final, neuron, detach_reset, custom.derivative, wants_grad_v), in_place=in_place
        )
    ops = torch.ops.lightning_memopt
    if in_place and grad_spike is not None:
        grad_v = ops.neuron_backward_(x, v, grad_spike, grad_v_final, *equation[:7], wants_grad_v)
        grad_x = grad_spike
    else:
        grad_x, grad_v = ops.neuron_backward(x, v, grad_spike, grad_v_final, *equation[:7], wants_grad_v)
    return grad_x, grad_v if wants_grad_v else None


class _Seal(Function):
    """A gradient through which no gradient can be taken."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "Gradients of neurons can be taken once, but a gradient of a gradient was asked for. For double backward, "
            "write the neuron as a loop over time in plain torch."
        )


def _graph_is_wanted() -> bool:
    """Whether backward runs with ``create_graph=True`` (compiled graphs refuse a double backward themselves)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _seal(grads: tuple[Any, ...], *sources: Tensor | None) -> tuple[Any, ...]:
    inputs = [source for source in sources if source is not None and source.requires_grad]
    return tuple(None if grad is None else _Seal.apply(grad, *inputs) for grad in grads)


# ---------------------------------------------------------------------------------------------------------------------
# Neurons alone


class _Spike(Function):
    """Neurons over ``x`` of ``[T, ...]``: spikes, bits of ``row`` neighbours (0: none) and the last potential."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor | None, row: int, *equation: Any) -> tuple[Tensor, Tensor, Tensor]:
        spikes, packed, v_final = _forward(x, v, equation, True, row)
        ctx.equation = equation
        ctx.save_for_backward(x, v)
        ctx.mark_non_differentiable(packed)
        ctx.set_materialize_grads(False)
        return spikes, packed, v_final

    @staticmethod
    def backward(ctx: Any, grad_spike: Tensor | None, _: Any, grad_v_final: Tensor | None) -> tuple[Any, ...]:
        if _graph_is_wanted():
            with torch.no_grad():
                grads = _Spike.gradients(ctx, grad_spike, grad_v_final)
            return _seal(grads, grad_spike, grad_v_final, *ctx.saved_tensors)
        return _Spike.gradients(ctx, grad_spike, grad_v_final)

    @staticmethod
    def gradients(ctx: Any, grad_spike: Tensor | None, grad_v_final: Tensor | None) -> tuple[Any, ...]:
        x, v = ctx.saved_tensors
        grad_x = grad_v = None
        if grad_spike is not None or grad_v_final is not None:
            grad_x, grad_v = _backward(x, v, grad_spike, grad_v_final, ctx.equation, ctx.needs_input_grad[1])
        return grad_x, grad_v, *(None,) * (1 + _CONSTANTS)


def if_spike(
    x: Tensor,
    v: Tensor | float | None = None,
    *,
    v_threshold: float = 1.0,
    v_reset: float | None = 0.0,
    detach_reset: bool = False,
    surrogate_function: object = _SIGMOID,
    return_bits: bool = False,
) -> tuple[Tensor, ...]:
    """Run integrate-and-fire neurons through all time steps of ``x``.

    Args:
        x: input ``[T, ...]``, float32, float16 or bfloat16. Where time is the slowest dimension in memory, the others
            may lie in any dense order (channels last, for example); else ``x`` is copied.
        v: potential before the first step, of the shape of ``x[0]``, or a number; None: ``v_reset`` (0 if that is
            None).
        v_threshold: potential at which a neuron spikes.
        v_reset: potential after a spike; None subtracts the threshold instead.
        detach_reset: let no gradient flow through the reset.
        surrogate_function: a surrogate of ours or of SpikingJelly's, or another step function with a derivative.
        return_bits: also return the spikes as bits, made in the same pass if ``x[0]`` has a multiple of 8 elements.

    Returns:
        Spikes of the shape, dtype and strides of ``x``, and the potential after the last step, float32, of the shape of
        ``x[0]``. With ``return_bits`` also ``[ceil(x.numel() / 8)]`` uint8: the spikes in the order in which they lie
        in memory, the first in the lowest bit, as ``BitSpikeCompressor`` stores them. The bits have no gradient.

    Raises:
        TypeError: for a dtype that neurons do not take.
        ValueError: for shapes or devices that do not match, or constants that make no neuron.
        RuntimeError: within a ``torch.func`` transform or ``vmap``.

    Example:
        >>> spikes, v = if_spike(torch.tensor([[0.6], [0.6], [0.6]]))
        >>> spikes.flatten().tolist(), round(v.item(), 4)
        ([0.0, 1.0, 0.0], 0.6)
    """
    _refuse_transforms()
    return _spike(x, v, _equation(IF, 2.0, v_threshold, v_reset, detach_reset, surrogate_function), return_bits)


def lif_spike(
    x: Tensor,
    v: Tensor | float | None = None,
    *,
    tau: float = 2.0,
    decay_input: bool = True,
    v_threshold: float = 1.0,
    v_reset: float | None = 0.0,
    detach_reset: bool = False,
    surrogate_function: object = _SIGMOID,
    return_bits: bool = False,
) -> tuple[Tensor, ...]:
    """Run leaky integrate-and-fire neurons through all time steps of ``x``.

    Args:
        x: as for :func:`if_spike`.
        v: as for :func:`if_spike`.
        tau: time constant in steps, above 1.
        decay_input: whether the input is divided by ``tau`` as well.
        v_threshold: as for :func:`if_spike`.
        v_reset: as for :func:`if_spike`; the potential decays towards it (towards 0 if None).
        detach_reset: as for :func:`if_spike`.
        surrogate_function: as for :func:`if_spike`.
        return_bits: as for :func:`if_spike`.

    Returns:
        As :func:`if_spike`.

    Raises:
        TypeError: for a dtype that neurons do not take.
        ValueError: for shapes or devices that do not match, or constants that make no neuron.
        RuntimeError: within a ``torch.func`` transform or ``vmap``.

    Example:
        >>> spikes, v = lif_spike(torch.tensor([[1.5], [1.5], [1.5]]))
        >>> spikes.flatten().tolist(), v.item()
        ([0.0, 1.0, 0.0], 0.75)
    """
    _refuse_transforms()
    charge = LIF_DECAYED_INPUT if decay_input else LIF
    return _spike(x, v, _equation(charge, tau, v_threshold, v_reset, detach_reset, surrogate_function), return_bits)


def _spike(x: Tensor, v: Tensor | float | None, equation: _Equation, return_bits: bool) -> tuple[Tensor, ...]:
    _check_x(_name(equation, "spike"), x)
    if x.dim() < 1:
        raise ValueError("neurons take x of shape [T, ...], got a tensor without dimensions.")
    if isinstance(v, Tensor):
        check_dense(_name(equation, "spike"), "v", v)
    v = _potential(v, x, x.shape[1:], equation)
    n = math.prod(x.shape[1:])
    packs = return_bits and n > 0 and n % 8 == 0
    spikes, bits, v_final = _Spike.apply(x, v, n if packs else 0, *equation)
    if not return_bits:
        return spikes, v_final
    if not packs:
        bits = bit_pack(in_memory_order(spikes.detach()))[0]
    return spikes, v_final, bits.view(-1)


def _name(equation: _Equation, what: str) -> str:
    return f"{'if' if equation[0] == IF else 'lif'}_{what}"


def _check_x(function: str, x: Tensor) -> None:
    check_dense(function, "x", x)
    if x.dtype not in NEURON_DTYPES:
        raise TypeError(f"neurons take x of float32, float16 or bfloat16, got {x.dtype} of shape {tuple(x.shape)}.")


def _potential(v: Tensor | float | None, x: Tensor, shape: Sequence[int], equation: _Equation) -> Tensor | None:
    """The first potential as float32 of ``shape``; None where it is what the neuron starts from."""
    if v is None:
        return None
    if isinstance(v, (int, float)):
        if v == Neuron(*equation[:4]).start:
            return None
        if _LARGEST < abs(v) < math.inf:
            raise ValueError(f"v must be within the range of float32, got {v}.")
        return torch.full(tuple(shape), float(v), dtype=torch.float32, device=x.device)
    if not isinstance(v, Tensor):
        raise TypeError(f"v must be a tensor, a number or None, got {type(v).__name__}.")
    if not v.is_floating_point():
        raise TypeError(f"v must be floating point, got {v.dtype}.")
    if v.dim() and v.shape != tuple(shape):
        raise ValueError(
            f"v must have shape {tuple(shape)} for x of shape {tuple(x.shape)}, got {tuple(v.shape)}. A potential left "
            "from another batch must be reset first."
        )
    if v.device != x.device:
        raise ValueError(f"v must be on {x.device} as x is, got {v.device}.")
    if not torch.compiler.is_compiling() and v.is_inference() and not torch.is_inference_mode_enabled():
        v = v.clone()  # left by a call in inference mode, it could not be kept for backward
    return v.float().expand(tuple(shape))


# ---------------------------------------------------------------------------------------------------------------------
# Neurons and a linear layer


class _SpikeLinear(Function):
    """Neurons over ``x`` of ``[T, M, K]``, spikes times ``weight_t`` of ``[K, N]``: ``[T M, N]`` and last potential.

    The product and its gradients run in ``dtype``. Kept is the weight itself, and cast once more in backward: copies of
    it would add up over the calls of a step-by-step loop.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        v: Tensor | None,
        weight_t: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        *equation: Any,
    ) -> tuple[Tensor, Tensor]:
        _, bits, v_final = _forward(x, v, equation, False, x.shape[2])
        bits = bits.view(x.shape[0] * x.shape[1], (x.shape[2] + 7) // 8)
        y = packed_linear(bits, weight_t.to(dtype).t(), None if bias is None else bias.to(dtype))
        neuron_learns = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        if not neuron_learns:
            # The potential does not depend on the weight: carried to the next call, it must not bring this graph along.
            ctx.mark_non_differentiable(v_final)
        ctx.equation = equation
        ctx.in_features = x.shape[2]
        ctx.weight_dtype = weight_t.dtype
        # The gradient lies in memory as the weight does, so that it becomes weight_t.grad without a copy.
        ctx.row_major = weight_t.is_contiguous()
        ctx.save_for_backward(
            x if neuron_learns else None,
            v if neuron_learns else None,
            weight_t if neuron_learns else None,
            bits if ctx.needs_input_grad[2] else None,
        )
        ctx.set_materialize_grads(False)
        return y, v_final

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_v_final: Tensor | None) -> tuple[Any, ...]:
        if _graph_is_wanted():
            with torch.no_grad():
                grads = _SpikeLinear.gradients(ctx, grad_y, grad_v_final)
            return _seal(grads, grad_y, grad_v_final, *ctx.saved_tensors)
        return _SpikeLinear.gradients(ctx, grad_y, grad_v_final)

    @staticmethod
    def gradients(ctx: Any, grad_y: Tensor | None, grad_v_final: Tensor | None) -> tuple[Any, ...]:
        x, v, weight_t, bits = ctx.saved_tensors
        grad_x = grad_v = grad_weight = grad_bias = grad_spike = None
        if grad_y is not None:
            grad_y = grad_y.contiguous()
            if ctx.needs_input_grad[2]:
                grad_weight = packed_linear_grad_weight(bits, grad_y, ctx.in_features, ctx.row_major).t()
                grad_weight = grad_weight.to(ctx.weight_dtype)
            if ctx.needs_input_grad[3]:
                grad_bias = grad_y.sum(0).to(ctx.weight_dtype)
            if x is not None:
                weight_t = weight_t.to(grad_y.dtype)
                grad_spike = torch.ops.lightning_memopt.spike_gradient(grad_y, weight_t, x.dtype).view(x.shape)
        if x is not None and (grad_y is not None or grad_v_final is not None):
            grad_x, grad_v = _backward(
                *(x, v, grad_spike, grad_v_final, ctx.equation, ctx.needs_input_grad[1]), in_place=True
            )
        if not ctx.needs_input_grad[0]:
            grad_x = None
        return grad_x, grad_v, grad_weight, grad_bias, *(None,) * (1 + _CONSTANTS)


def if_linear(
    x: Tensor,
    v: Tensor | float | None,
    weight_t: Tensor,
    bias: Tensor | None = None,
    *,
    v_threshold: float = 1.0,
    v_reset: float | None = 0.0,
    detach_reset: bool = False,
    surrogate_function: object = None,
) -> tuple[Tensor, Tensor]:
    """Run integrate-and-fire neurons and multiply their spikes with a weight, without storing the spikes.

    Forward stores one bit for a spike, backward the gradient of ``x`` in place of the spikes' own. Under autocast the
    product runs in the autocast dtype, as a linear layer does; the neurons run in the dtype of ``x``.

    Args:
        x: input ``[M, K]`` (one step) or ``[T, M, K]``, float32, float16 or bfloat16.
        v: potential before the first step, ``[M, K]``, or a number; None: ``v_reset`` (0 if that is None).
        weight_t: transposed weight ``[K, N]``, float32, float16 or bfloat16. The transpose of a ``[N, K]`` weight costs
            no copy.
        bias: ``[N]``, dtype of ``weight_t``.
        v_threshold: potential at which a neuron spikes.
        v_reset: potential after a spike; None subtracts the threshold instead.
        detach_reset: let no gradient flow through the reset.
        surrogate_function: a surrogate of ours or of SpikingJelly's, or another step function with a derivative; None:
            ``Sigmoid()``.

    Returns:
        ``y``: ``[M, N]`` or ``[T, M, N]`` in the dtype of ``weight_t``; ``v_final``: ``[M, K]``, float32.

    Raises:
        TypeError: for a dtype that is not taken.
        ValueError: for shapes or devices that do not match, or constants that make no neuron.
        RuntimeError: within a ``torch.func`` transform or ``vmap``.

    Example:
        >>> x = torch.tensor([[[0.5, 2.0]], [[0.5, 0.5]]], requires_grad=True)
        >>> weight_t = torch.nn.Parameter(torch.tensor([[1.0], [10.0]]))
        >>> y, v_final = if_linear(x, None, weight_t)
        >>> y.flatten().tolist(), v_final.tolist()
        ([10.0, 1.0], [[0.0, 0.5]])
        >>> y.sum().backward()
        >>> weight_t.grad.flatten().tolist(), x.grad.shape
        ([1.0, 1.0], torch.Size([2, 1, 2]))
    """
    _refuse_transforms()
    equation = _equation(IF, 2.0, v_threshold, v_reset, detach_reset, surrogate_function)
    return _spike_linear(x, v, weight_t, bias, equation)


def lif_linear(
    x: Tensor,
    v: Tensor | float | None,
    weight_t: Tensor,
    bias: Tensor | None = None,
    *,
    tau: float = 2.0,
    decay_input: bool = True,
    v_threshold: float = 1.0,
    v_reset: float | None = 0.0,
    detach_reset: bool = False,
    surrogate_function: object = None,
) -> tuple[Tensor, Tensor]:
    """Run leaky integrate-and-fire neurons and multiply their spikes with a weight, without storing the spikes.

    Args:
        x: as for :func:`if_linear`.
        v: as for :func:`if_linear`.
        weight_t: as for :func:`if_linear`.
        bias: as for :func:`if_linear`.
        tau: time constant in steps, above 1.
        decay_input: whether the input is divided by ``tau`` as well.
        v_threshold: as for :func:`if_linear`.
        v_reset: as for :func:`if_linear`; the potential decays towards it (towards 0 if None).
        detach_reset: as for :func:`if_linear`.
        surrogate_function: as for :func:`if_linear`.

    Returns:
        As :func:`if_linear`.

    Raises:
        TypeError: for a dtype that is not taken.
        ValueError: for shapes or devices that do not match, or constants that make no neuron.
        RuntimeError: within a ``torch.func`` transform or ``vmap``.

    Example:
        >>> y, v_final = lif_linear(torch.tensor([[3.0, 1.0]]), None, torch.eye(2))
        >>> y.tolist(), v_final.tolist()
        ([[1.0, 0.0]], [[0.0, 0.5]])
    """
    _refuse_transforms()
    charge = LIF_DECAYED_INPUT if decay_input else LIF
    equation = _equation(charge, tau, v_threshold, v_reset, detach_reset, surrogate_function)
    return _spike_linear(x, v, weight_t, bias, equation)


def _spike_linear(
    x: Tensor, v: Tensor | float | None, weight_t: Tensor, bias: Tensor | None, equation: _Equation
) -> tuple[Tensor, Tensor]:
    name = _name(equation, "linear")
    _check_x(name, x)
    if x.dim() not in (2, 3):
        raise ValueError(f"x must have shape [M, K] or [T, M, K], got {tuple(x.shape)}.")
    _check_layer(name, x, weight_t, bias)
    if isinstance(v, Tensor):
        check_dense(name, "v", v)
    v = _potential(v, x, x.shape[-2:], equation)
    dtype = autocast_dtype(x.device) or weight_t.dtype
    steps = (x if x.dim() == 3 else x.unsqueeze(0)).contiguous()
    y, v_final = _SpikeLinear.apply(steps, v, weight_t, bias, dtype, *equation)
    return cast(Tensor, y).view(*x.shape[:-1], weight_t.shape[1]), v_final


def _check_layer(function: str, x: Tensor, weight_t: Tensor, bias: Tensor | None) -> None:
    check_dense(function, "weight_t", weight_t)
    if bias is not None:
        check_dense(function, "bias", bias)
    for name, tensor in (("weight_t", weight_t), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype not in NEURON_DTYPES:
            raise TypeError(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}.")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device} as x is, got {tensor.device}.")
    if weight_t.dim() != 2 or weight_t.shape[0] != x.shape[-1]:
        raise ValueError(
            f"weight_t must have shape [K, N] with K = {x.shape[-1]} for x of shape {tuple(x.shape)}, got "
            f"{tuple(weight_t.shape)}."
        )
    if bias is not None and (bias.shape != weight_t.shape[1:] or bias.dtype != weight_t.dtype):
        raise ValueError(
            f"bias must have shape [{weight_t.shape[1]}] and dtype {weight_t.dtype}, got {tuple(bias.shape)} of "
            f"{bias.dtype}."
        )
