"""
Integrate-and-fire neurons over all time steps
==============================================

``torch.ops.lightning_memopt.neuron_forward`` runs IF and LIF neurons through ``T`` steps and gives spikes, their bits
or both; ``neuron_backward`` and ``neuron_backward_`` (in place of the spikes' gradient) differentiate them. Only ``x``
and the first potential are needed for that: the potentials are computed again.

``x`` is ``[T, ...]``. Where time is its slowest dimension in memory and the others are dense, in whatever order, it is
read as it lies there, and what belongs to it is laid out like it; any other ``x`` is copied first.

Membrane potentials are float32 whatever the dtype of ``x``. The order of operations is that of the eager loop, so
float32 results equal it bit for bit on the same device; torch divides by ``tau`` on the CPU and multiplies with its
reciprocal on CUDA, and so do we. The kernels flush subnormal numbers to zero.

The references work through the positions in blocks, so their temporaries are bounded whatever the size of ``x``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy
import torch
from torch import Tensor

from lightning_memopt.ops.autocast import without_autocast
from lightning_memopt.ops.bit_pack import gather_bits
from lightning_memopt.ops.launch import Kernel, backend_for, launch
from lightning_memopt.ops.registration import register
from lightning_memopt.surrogate import BUILT_IN, check_derivative

# How a neuron charges, as in cuda/neuron.cu.
IF, LIF_DECAYED_INPUT, LIF = range(3)

NEURON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_THREADS = 256
# Steps that the backward kernel recomputes at a time.
_PIECE = 8
# Potentials that a reference holds at a time.
_BLOCK = 1 << 18
# Elements of a product that exist in another dtype than they are wanted in.
_PRODUCT = 1 << 23
_LARGEST = torch.finfo(torch.float32).max
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

LIBRARY = torch.library.Library("lightning_memopt", "FRAGMENT")
# A compiler may not give these operations another layout than the one that it was told they return.
_TAGS = (torch.Tag.needs_fixed_stride_order,)
LIBRARY.define(
    "neuron_forward(Tensor x, Tensor? v, int charge, float tau, float v_threshold, float? v_reset, bool spikes, "
    "SymInt row) -> (Tensor spikes, Tensor bits, Tensor v_final)",
    tags=_TAGS,
)
LIBRARY.define(
    "neuron_backward(Tensor x, Tensor? v, Tensor? grad_spike, Tensor? grad_v_final, int charge, float tau, "
    "float v_threshold, float? v_reset, bool detach_reset, int surrogate, float alpha, bool grad_v) "
    "-> (Tensor grad_x, Tensor grad_v)",
    tags=_TAGS,
)
LIBRARY.define(
    "neuron_backward_(Tensor x, Tensor? v, Tensor(a!) grad_spike, Tensor? grad_v_final, int charge, float tau, "
    "float v_threshold, float? v_reset, bool detach_reset, int surrogate, float alpha, bool grad_v) -> Tensor grad_v",
    tags=_TAGS,
)
LIBRARY.define("spike_gradient(Tensor grad, Tensor weight_t, ScalarType dtype) -> Tensor")


@dataclass(frozen=True)
class Neuron:
    """The equation of a neuron.

    Attributes:
        charge: ``IF``, ``LIF_DECAYED_INPUT`` or ``LIF``.
        tau: time constant in steps, above 1; unused by ``IF``.
        v_threshold: potential at which it spikes.
        v_reset: potential after a spike; None subtracts the threshold instead.
    """

    charge: int = IF
    tau: float = 2.0
    v_threshold: float = 1.0
    v_reset: float | None = 0.0

    def __post_init__(self) -> None:
        """Check that the numbers make a neuron."""
        if self.charge not in (IF, LIF_DECAYED_INPUT, LIF):
            raise ValueError(f"charge must be one of {(IF, LIF_DECAYED_INPUT, LIF)}, got {self.charge}.")
        # Comparisons, not math.isfinite: torch.compile may trace these numbers as symbols.
        if self.charge != IF and not 1 < self.tau <= _LARGEST:
            raise ValueError(f"tau must be finite and above 1 (in time steps), in float32, got {self.tau}.")
        if not -_LARGEST <= self.v_threshold <= _LARGEST:
            raise ValueError(f"v_threshold must be finite in float32, got {self.v_threshold}.")
        if self.v_reset is not None and not -_LARGEST <= self.v_reset <= _LARGEST:
            raise ValueError(f"v_reset must be finite in float32, or None for a soft reset, got {self.v_reset}.")

    @property
    def start(self) -> float:
        """The potential before the first step where none is given."""
        return 0.0 if self.v_reset is None else self.v_reset


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def _check_inputs(x: Tensor, v: Tensor | None) -> None:
    if x.dtype not in NEURON_DTYPES:
        raise TypeError(f"neurons take x of float32, float16 or bfloat16, got {x.dtype}.")
    if x.dim() < 1:
        raise ValueError("neurons take x of shape [T, ...], got a tensor without dimensions.")
    if v is not None:
        _check_like("v", v, x.shape[1:], torch.float32, x)


def _check_like(name: str, tensor: Tensor, shape: Any, dtype: torch.dtype, x: Tensor) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype} for x of {x.dtype}, got {tensor.dtype}.")
    if tensor.shape != shape:
        raise ValueError(
            f"{name} must have shape {tuple(shape)} for x of shape {tuple(x.shape)}, got {tuple(tensor.shape)}."
        )
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on {x.device} as x is, got {tensor.device}.")


def _check_forward(x: Tensor, v: Tensor | None, row: int) -> None:
    _check_inputs(x, v)
    n = math.prod(x.shape[1:])
    if row < 0 or (row > 0 and n % row != 0):
        raise ValueError(f"row must be 0 or divide the {n} elements of a step of x {tuple(x.shape)}, got {row}.")


def _check_backward(
    x: Tensor, v: Tensor | None, grad_spike: Tensor | None, grad_v_final: Tensor | None, surrogate: int
) -> None:
    _check_inputs(x, v)
    if grad_spike is not None:
        _check_like("grad_spike", grad_spike, x.shape, x.dtype, x)
    if grad_v_final is not None:
        _check_like("grad_v_final", grad_v_final, x.shape[1:], torch.float32, x)
    if not 0 <= surrogate < len(BUILT_IN):
        raise ValueError(f"surrogate must be the index of one of {[s.__name__ for s in BUILT_IN]}, got {surrogate}.")


# ---------------------------------------------------------------------------------------------------------------------
# Layout


def _memory_order(x: Tensor) -> list[int]:
    """The dimensions after time, slowest first; an insertion sort, since torch.compile cannot sort symbolic strides."""
    order: list[int] = []
    for dim in range(1, x.dim()):
        place = 0
        while place < len(order) and x.stride(order[place]) >= x.stride(dim):
            place += 1
        order.insert(place, dim)
    return order


def _dense(x: Tensor) -> Tensor:
    """``x``, or a contiguous copy where time is not its slowest dimension or elements overlap or leave gaps."""
    if x.shape[0] == 0 and not _is_dense_step(x):
        # To torch a tensor without elements is contiguous whatever its strides, but a potential is laid out by them.
        return x.new_empty(x.shape)
    return x if x.permute(0, *_memory_order(x)).is_contiguous() else x.contiguous()


def _is_dense_step(x: Tensor) -> bool:
    """Whether one step in the strides of ``x`` leaves no gaps and no overlaps, even where ``x`` has no step."""
    below = 1
    for dim in reversed(_memory_order(x)):
        if x.shape[dim] != 1 and x.stride(dim) != below:
            return False
        below *= x.shape[dim]
    return True


def _empty_step(x: Tensor) -> Tensor:
    """Uninitialized float32 of the shape and layout of one step of ``x``."""
    return torch.empty_strided(x.shape[1:], x.stride()[1:], dtype=torch.float32, device=x.device)


def _step_like(x: Tensor, v: Tensor | None) -> Tensor | None:
    """``v`` in the layout of one step of ``x``."""
    if v is None or v.permute([dim - 1 for dim in _memory_order(x)]).is_contiguous():
        return v
    return _empty_step(x).copy_(v)


def _steps_like(x: Tensor, grads: Tensor | None) -> Tensor | None:
    """``grads`` in the layout of ``x``."""
    if grads is None or grads.permute(0, *_memory_order(x)).is_contiguous():
        return grads
    return torch.empty_strided(x.shape, x.stride(), dtype=grads.dtype, device=grads.device).copy_(grads)


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of ``[T, ...]``, dense with time slowest, as a flat tensor in the order in which they lie there."""
    return tensor.permute(0, *_memory_order(tensor)).reshape(-1)


def _flat(tensor: Tensor, *shape: int) -> Tensor:
    """The elements of a dense tensor as they lie in memory."""
    return tensor.as_strided(shape, [math.prod(shape[dim + 1 :]) for dim in range(len(shape))])


# ---------------------------------------------------------------------------------------------------------------------
# References


def _charged(v: Tensor, x: Tensor, neuron: Neuron) -> Tensor:
    if neuron.charge == IF:
        return v + x
    if neuron.charge == LIF_DECAYED_INPUT:
        return v + (x - (v - neuron.start)) / neuron.tau
    return v - (v - neuron.start) / neuron.tau + x


def _after_reset(h: Tensor, spikes: Tensor, neuron: Neuron) -> Tensor:
    if neuron.v_reset is None:
        return h - spikes * neuron.v_threshold
    return spikes * neuron.v_reset + (1.0 - spikes) * h


def _blocks(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Cut rows and columns into blocks; columns at multiples of 8."""
    wide = min(columns, _BLOCK)
    high = max(1, _BLOCK // max(1, wide))
    for row in range(0, rows, high):
        for column in range(0, columns, max(1, wide)):
            yield slice(row, row + high), slice(column, column + wide)


def _pack_rows(fired: Tensor) -> Tensor:
    """The bits of a boolean tensor, each row padded to bytes."""
    rows, columns = fired.shape
    if columns % 8:
        fired = torch.nn.functional.pad(fired, (0, -columns % 8))
    return gather_bits(fired.contiguous().view(-1)).to(torch.uint8).view(rows, (columns + 7) // 8)


def _forward_reference(
    x: Tensor, v: Tensor | None, neuron: Neuron, row: int, spikes: Tensor | None, bits: Tensor | None, v_final: Tensor
) -> None:
    steps, n = x.shape[0], math.prod(x.shape[1:])
    columns = row or n
    rows = n // columns if n else 0
    inputs, potentials = _flat(x, steps, rows, columns), _flat(v_final, rows, columns)
    results = None if spikes is None else _flat(spikes, steps, rows, columns)
    starts = None if v is None else _flat(v, rows, columns)
    for part, column in _blocks(rows, columns):
        potential = potentials[part, column]
        potential.fill_(neuron.start) if starts is None else potential.copy_(starts[part, column])
        bytes_ = slice(column.start // 8, (column.stop + 7) // 8)
        for t in range(steps):
            h = _charged(potential, inputs[t, part, column].float(), neuron)
            fired = h >= neuron.v_threshold
            if results is not None:
                results[t, part, column] = fired
            if bits is not None:
                bits[t, part, bytes_] = _pack_rows(fired)
            potential.copy_(_after_reset(h, fired.float(), neuron))


def backward_by_torch(
    x: Tensor,
    v: Tensor | None,
    grad_spike: Tensor | None,
    grad_v_final: Tensor | None,
    neuron: Neuron,
    detach_reset: bool,
    derivative: Callable[[Tensor], Tensor],
    grad_v: bool,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Differentiate in plain torch, for any surrogate; what the kernels do for the built-in ones.

    Args:
        x: ``[T, ...]``, float32, float16 or bfloat16.
        v: potential before the first step, shape of ``x[0]``, float32; None: ``neuron.start`` everywhere.
        grad_spike: gradient of the spikes, shape and dtype of ``x``; None: zero.
        grad_v_final: gradient of the last potential, as ``v``; None: zero.
        neuron: the equation.
        detach_reset: whether no gradient flows through the reset.
        derivative: of the surrogate, element by element.
        grad_v: whether the gradient of ``v`` is wanted.
        in_place: write the gradient of ``x`` over ``grad_spike`` if it is given.

    Returns:
        Gradients of ``x`` and of ``v`` (None if not wanted).
    """
    _check_backward(x, v, grad_spike, grad_v_final, 0)
    x = _dense(x)
    grads = _steps_like(x, grad_spike)
    in_place = in_place and grads is not None
    grad_x = (
        cast(Tensor, grads) if in_place else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    )
    wanted = _empty_step(x) if grad_v else None
    starts, finals = _step_like(x, v), _step_like(x, grad_v_final)
    _backward_reference(x, starts, grads, finals, neuron, detach_reset, derivative, grad_x, wanted)
    if in_place and grad_spike is not None and grad_x is not grad_spike:
        grad_x = grad_spike.copy_(grad_x)
    return grad_x, wanted


def _backward_reference(
    x: Tensor,
    v: Tensor | None,
    grad_spike: Tensor | None,
    grad_v_final: Tensor | None,
    neuron: Neuron,
    detach_reset: bool,
    derivative: Callable[[Tensor], Tensor],
    grad_x: Tensor,
    grad_v: Tensor | None,
) -> None:
    steps, n = x.shape[0], math.prod(x.shape[1:])
    inputs, results = _flat(x, steps, n), _flat(grad_x, steps, n)
    spike_grads = None if grad_spike is None else _flat(grad_spike, steps, n)
    start, final_grads, start_grads = (None if y is None else _flat(y, n) for y in (v, grad_v_final, grad_v))
    width = max(1024, _BLOCK // max(1, steps))
    for begin in range(0, n, width):
        part = slice(begin, begin + width)
        x_part = inputs[:, part]
        if start is None:
            potential = torch.full(x_part.shape[1:], neuron.start, dtype=torch.float32, device=x.device)
        else:
            potential = start[part]
        charged = []
        for t in range(steps):
            h = _charged(potential, x_part[t].float(), neuron)
            charged.append(h)
            potential = _after_reset(h, (h >= neuron.v_threshold).float(), neuron)
        carry = torch.zeros_like(potential) if final_grads is None else final_grads[part]
        for t in reversed(range(steps)):
            h = charged.pop()
            u = h - neuron.v_threshold
            sg = derivative(u)
            check_derivative(sg, u)
            spike_grad = torch.zeros_like(h) if spike_grads is None else spike_grads[t, part].float()
            if neuron.v_reset is None:
                passed = carry
                if not detach_reset:
                    spike_grad = spike_grad - carry * neuron.v_threshold
            else:
                passed = carry * (1.0 - (h >= neuron.v_threshold).float())
                if not detach_reset:
                    spike_grad = spike_grad - carry * h + carry * neuron.v_reset
            grad_h = spike_grad * sg + passed
            results[t, part] = grad_h / neuron.tau if neuron.charge == LIF_DECAYED_INPUT else grad_h
            carry = grad_h if neuron.charge == IF else grad_h - grad_h / neuron.tau
        if start_grads is not None:
            start_grads[part] = carry


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


def _tau_arguments(neuron: Neuron, device: torch.device) -> tuple[numpy.int32, numpy.float32]:
    """Whether to divide, and the divisor or the factor; by a power of two both are the same."""
    if neuron.charge == IF:
        return numpy.int32(0), numpy.float32(1)
    tau = numpy.float32(neuron.tau)
    if device.type == "cuda" or math.frexp(tau)[0] == 0.5:
        return numpy.int32(0), numpy.float32(1) / tau
    return numpy.int32(1), tau


def _neuron_arguments(neuron: Neuron, device: torch.device) -> tuple[Any, ...]:
    return (
        numpy.int32(neuron.charge),
        *_tau_arguments(neuron, device),
        numpy.float32(neuron.v_threshold),
        numpy.int32(neuron.v_reset is not None),
        numpy.float32(neuron.start),
    )


def _aligned(bytes_: int, *tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.data_ptr() % bytes_ == 0 for tensor in tensors)


def _forward_kernel(
    x: Tensor, v: Tensor | None, neuron: Neuron, row: int, spikes: Tensor | None, bits: Tensor | None, v_final: Tensor
) -> None:
    steps, n = x.shape[0], math.prod(x.shape[1:])
    columns = row or n
    name, start = _NAMES[x.dtype], numpy.float32(neuron.start)
    tail = (numpy.int32(steps), *_neuron_arguments(neuron, x.device))
    if columns % 8 == 0 and _aligned(16, x, v, spikes, v_final):
        kernel = Kernel("neuron.cu", f"neuron_forward_{name}", _THREADS)
        blocks = -(-n // (8 * _THREADS))
        launch(kernel, blocks, x, v, start, spikes, bits, v_final, numpy.int64(n), *tail, device=x.device)
    else:
        rows = n // columns
        kernel = Kernel("neuron.cu", f"neuron_forward_rows_{name}", _THREADS)
        blocks = -(-rows * -(-columns // 32) // (_THREADS // 32))
        shape = (numpy.int64(rows), numpy.int64(columns))
        launch(kernel, blocks, x, v, start, spikes, bits, v_final, *shape, *tail, device=x.device)


def _backward_kernel(
    x: Tensor,
    v: Tensor | None,
    grad_spike: Tensor | None,
    grad_v_final: Tensor | None,
    neuron: Neuron,
    detach_reset: bool,
    surrogate: int,
    alpha: float,
    grad_x: Tensor,
    grad_v: Tensor | None,
) -> None:
    steps, n = x.shape[0], math.prod(x.shape[1:])
    formula = BUILT_IN[surrogate](alpha).kernel_formula
    pieces = -(-steps // _PIECE)
    starts = None
    if pieces > 2:
        starts = torch.empty(pieces - 2, n, dtype=torch.float32, device=x.device)
    paired = n % 2 == 0 and _aligned(8, v, grad_v_final) and _aligned(2 * x.element_size(), x, grad_spike, grad_x)
    launch(
        Kernel("neuron.cu", f"neuron_backward_{_NAMES[x.dtype]}", _THREADS),
        -(-n // (2 * _THREADS)),
        *(x, v, numpy.float32(neuron.start), grad_spike, grad_v_final, grad_x, grad_v, starts),
        *(numpy.int64(n), numpy.int32(steps), numpy.int32(paired)),
        *_neuron_arguments(neuron, x.device),
        *(numpy.int32(detach_reset), numpy.int32(formula.family)),
        *(numpy.float32(constant) for constant in formula[1:]),
        device=x.device,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Operations


def _empty_forward(x: Tensor, spikes: bool, row: int) -> tuple[Tensor, Tensor, Tensor]:
    steps, n = x.shape[0], math.prod(x.shape[1:])
    return (
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if spikes else x.new_empty((0,)),
        x.new_empty((steps, n // row, (row + 7) // 8) if row else (0,), dtype=torch.uint8),
        _empty_step(x),
    )


def _forward(
    x: Tensor,
    v: Tensor | None,
    charge: int,
    tau: float,
    v_threshold: float,
    v_reset: float | None,
    spikes: bool,
    row: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_forward(x, v, row)
    neuron = Neuron(charge, tau, v_threshold, v_reset)
    x = _dense(x)
    results = _empty_forward(x, spikes, row)
    run = _forward_reference if backend_for(x.device) is None else _forward_kernel
    bits = results[1] if row else None
    run(x, _step_like(x, v), neuron, row, results[0] if spikes else None, bits, results[2])
    return results


def _forward_fake(
    x: Tensor,
    v: Tensor | None,
    charge: int,
    tau: float,
    v_threshold: float,
    v_reset: float | None,
    spikes: bool,
    row: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_forward(x, v, row)
    Neuron(charge, tau, v_threshold, v_reset)
    return _empty_forward(_dense(x), spikes, row)


def _differentiate(
    x: Tensor,
    v: Tensor | None,
    grad_spike: Tensor | None,
    grad_v_final: Tensor | None,
    neuron: Neuron,
    detach_reset: bool,
    surrogate: int,
    alpha: float,
    grad_x: Tensor,
    grad_v: Tensor | None,
) -> None:
    v, grad_v_final = _step_like(x, v), _step_like(x, grad_v_final)
    if backend_for(x.device) is not None:
        _backward_kernel(x, v, grad_spike, grad_v_final, neuron, detach_reset, surrogate, alpha, grad_x, grad_v)
    else:
        derivative = BUILT_IN[surrogate](alpha).derivative
        _backward_reference(x, v, grad_spike, grad_v_final, neuron, detach_reset, derivative, grad_x, grad_v)


def _empty_backward(x: Tensor, wants_grad_v: bool) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device),
        _empty_step(x) if wants_grad_v else x.new_empty((0,), dtype=torch.float32),
    )


def _backward(
    x: Tensor,
    v: Tensor | None,
    grad_spike: Tensor | None,
    grad_v_final: Tensor | None,
    charge: int,
    tau: float,
    v_threshold: float,
    v_reset: float | None,
    detach_reset: bool,
    surrogate: int,
    alpha: float,
    grad_v: bool,
) -> tuple[Tensor, Tensor]:
    _check_backward(x, v, grad_spike, grad_v_final, surrogate)
    neuron = Neuron(charge, tau, v_threshold, v_reset)
    x = _dense(x)
    grad_x, grad_start = _empty_backward(x, grad_v)
    _differentiate(
        *(x, v, _steps_like(x, grad_spike), grad_v_final, neuron, detach_reset, surrogate, alpha),
        *(grad_x, grad_start if grad_v else None),
    )
    return grad_x, grad_start


def _backward_fake(
    x: Tensor,
    v: Tensor | None,
    grad_spike: Tensor | None,
    grad_v_final: Tensor | None,
    charge: int,
    tau: float,
    v_threshold: float,
    v_reset: float | None,
    detach_reset: bool,
    surrogate: int,
    alpha: float,
    grad_v: bool,
) -> tuple[Tensor, Tensor]:
    _check_backward(x, v, grad_spike, grad_v_final, surrogate)
    Neuron(charge, tau, v_threshold, v_reset)
    return _empty_backward(_dense(x), grad_v)


def _backward_in_place(
    x: Tensor,
    v: Tensor | None,
    grad_spike: Tensor,
    grad_v_final: Tensor | None,
    charge: int,
    tau: float,
    v_threshold: float,
    v_reset: float | None,
    detach_reset: bool,
    surrogate: int,
    alpha: float,
    grad_v: bool,
) -> Tensor:
    _check_backward(x, v, grad_spike, grad_v_final, surrogate)
    neuron = Neuron(charge, tau, v_threshold, v_reset)
    x = _dense(x)
    grads = cast(Tensor, _steps_like(x, grad_spike))
    grad_start = _empty_step(x) if grad_v else x.new_empty((0,), dtype=torch.float32)
    _differentiate(
        *(x, v, grads, grad_v_final, neuron, detach_reset, surrogate, alpha),
        *(grads, grad_start if grad_v else None),
    )
    if grads is not grad_spike:
        grad_spike.copy_(grads)
    return grad_start


def _backward_in_place_fake(
    x: Tensor,
    v: Tensor | None,
    grad_spike: Tensor,
    grad_v_final: Tensor | None,
    charge: int,
    tau: float,
    v_threshold: float,
    v_reset: float | None,
    detach_reset: bool,
    surrogate: int,
    alpha: float,
    grad_v: bool,
) -> Tensor:
    _check_backward(x, v, grad_spike, grad_v_final, surrogate)
    Neuron(charge, tau, v_threshold, v_reset)
    return _empty_step(_dense(x)) if grad_v else x.new_empty((0,), dtype=torch.float32)


def _check_product(grad: Tensor, weight_t: Tensor, dtype: torch.dtype) -> None:
    if grad.dim() != 2 or weight_t.dim() != 2 or grad.shape[1] != weight_t.shape[1] or grad.dtype != weight_t.dtype:
        raise ValueError(
            f"spike_gradient takes grad [M, N] and weight_t [K, N] of one dtype, got {tuple(grad.shape)} of "
            f"{grad.dtype} and {tuple(weight_t.shape)} of {weight_t.dtype}."
        )


def _spike_gradient(grad: Tensor, weight_t: Tensor, dtype: torch.dtype) -> Tensor:
    """``grad @ weight_t.T`` as ``dtype``; in the dtype of the operands only a few rows of it exist at a time."""
    _check_product(grad, weight_t, dtype)
    weight = weight_t.t()
    if dtype == grad.dtype:
        return torch.mm(grad, weight)
    rows, columns = grad.shape[0], weight_t.shape[0]
    product = grad.new_empty((rows, columns), dtype=dtype)
    high = max(1, _PRODUCT // max(1, columns))
    for row in range(0, rows, high):
        part = slice(row, row + high)
        product[part] = torch.mm(grad[part], weight)
    return product


def _spike_gradient_fake(grad: Tensor, weight_t: Tensor, dtype: torch.dtype) -> Tensor:
    _check_product(grad, weight_t, dtype)
    return grad.new_empty((grad.shape[0], weight_t.shape[0]), dtype=dtype)


register(LIBRARY, "spike_gradient", without_autocast(_spike_gradient), _spike_gradient_fake)
register(LIBRARY, "neuron_forward", without_autocast(_forward), _forward_fake)
register(LIBRARY, "neuron_backward", without_autocast(_backward), _backward_fake)
register(LIBRARY, "neuron_backward_", without_autocast(_backward_in_place), _backward_in_place_fake)
