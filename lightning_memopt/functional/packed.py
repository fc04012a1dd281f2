"""
Projections of packed spikes
============================

A linear layer whose input is binary needs one bit of it per element, in the forward and in the backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_memopt.ops.arguments import check_dense, transforms_are_active
from lightning_memopt.ops.autocast import autocast_dtype, multiply
from lightning_memopt.ops.packed_linear import WEIGHT_DTYPES, packed_linear, packed_linear_grad_weight
from lightning_memopt.ops.sparse_linear import sparse_linear


class StandIn(torch.autograd.Function):
    """Stands for spikes in the graph: their shape and dtype and the way to their gradient, in the memory of one.

    Its values mean nothing. A product of bits takes it beside them, so that gradients of any order reach the spikes
    although only their bits are kept.
    """

    @staticmethod
    def forward(ctx: Any, spikes: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return spikes.new_empty_strided(spikes.shape, (0,) * spikes.dim())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        return grads[0]


class PackedLinear(torch.autograd.Function):
    """``packed`` [M, ceil(K / 8)] times ``weight`` [N, K], transposed, plus ``bias`` [N], all cast to ``dtype``.

    ``spikes`` is a :class:`StandIn` of [..., K], or None where they need no gradient. The weight is kept as it came: a
    copy for each call in the dtype of autocast would live until the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        spikes: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        skip_zeros: bool,
    ) -> Tensor:
        product = sparse_linear if skip_zeros else packed_linear
        out = product(packed, weight.to(dtype), None if bias is None else bias.to(dtype))
        _, needs_spikes, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(packed if needs_weight else None, weight if needs_spikes else None)
        # Not saved: hooks of saved tensors might write it out in full. Compiled graphs have no second derivative.
        ctx.spikes = None if torch.compiler.is_compiling() else spikes
        ctx.like = None if spikes is None else (spikes.shape, spikes.dtype)
        ctx.in_features = weight.shape[1]
        # A gradient with its parameter's strides is accumulated without a copy.
        ctx.transposed = weight.t().is_contiguous() and not weight.is_contiguous()
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.skip_zeros = skip_zeros
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        packed, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_spikes = grad_weight = grad_bias = None
        if weight is not None:
            shape, dtype = ctx.like
            grad_spikes = multiply(grad, weight.to(grad.dtype)).to(dtype).view(shape)
        if packed is not None:
            grad_weight = _PackedLinearGradWeight.apply(
                packed, ctx.spikes, grad, ctx.in_features, ctx.transposed, ctx.skip_zeros
            ).to(ctx.weight_dtype)
        if ctx.needs_input_grad[3]:
            grad_bias = grad.sum(0).to(ctx.bias_dtype)
        return None, grad_spikes, grad_weight, grad_bias, None, None


class _PackedLinearGradWeight(torch.autograd.Function):
    """``grad`` [M, N], transposed, times the spikes [M, K]: linear in both, so that derivatives of any order exist."""

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        spikes: Tensor | None,
        grad: Tensor,
        in_features: int,
        transposed: bool,
        skip_zeros: bool,
    ) -> Tensor:
        _, needs_spikes, needs_grad, *_ = ctx.needs_input_grad
        ctx.save_for_backward(packed if needs_grad else None, grad if needs_spikes else None)
        ctx.spikes = None if torch.compiler.is_compiling() else spikes
        ctx.like = None if spikes is None else (spikes.shape, spikes.dtype)
        ctx.skip_zeros = skip_zeros
        return packed_linear_grad_weight(packed, grad, in_features, transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        packed, grad = ctx.saved_tensors
        along = grads[0]
        grad_spikes = grad_grad = None
        if grad is not None:
            shape, dtype = ctx.like
            grad_spikes = multiply(grad, along).to(dtype).view(shape)
        if packed is not None:
            grad_grad = PackedLinear.apply(packed, ctx.spikes, along, None, along.dtype, ctx.skip_zeros)
        return None, grad_spikes, grad_grad, None, None, None


def check_no_transform(function: str, instead: str) -> None:
    """Raise RuntimeError within a transform of ``torch.func``: its tensors are not those that the kernels take.

    Args:
        function: who was called.
        instead: what to call there.
    """
    if transforms_are_active():
        raise RuntimeError(
            f"{function} works with torch.autograd, not within transforms of torch.func (grad, vjp, jvp, vmap, ...). "
            f"Use {instead} there."
        )


def packed_spike_linear(packed: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer to spikes packed row by row: ``F.linear(spikes, weight, bias)`` from their bits.

    With a float32 weight every product is exact and the sums are kept in float32: on a GPU by three exact bfloat16
    parts of the weight on its tensor cores, whatever torch's settings for TF32. The order of the sums differs from
    cuBLAS's. With a float16 or bfloat16 weight the sums are kept in float32 and rounded once. Numbers below 2^-126
    may count as zero; infinite and NaN weights act as in a dense product.

    Under autocast the weight and the bias are cast as ``F.linear`` casts them. Second derivatives exist.

    Args:
        packed: ``[..., ceil(K / 8)]`` uint8 from :func:`~lightning_memopt.functional.bit_pack_spike_dense`: bit ``i``
            of byte ``b`` is spike ``8 b + i`` of the row. Any strides; bits beyond K are ignored. It has no gradient.
        weight: ``[N, K]``, float32, float16 or bfloat16. Any strides: with ``weight_t.t()`` the gradient of
            ``weight_t`` comes without a copy.
        bias: ``[N]``, the dtype of ``weight``.

    Returns:
        ``[..., N]``, the dtype of ``weight`` (under autocast: its dtype).

    Raises:
        TypeError: for what is no dense tensor.
        ValueError: if dtypes, shapes or devices do not fit each other.
        RuntimeError: within a transform of ``torch.func``.

    Example:
        >>> from lightning_memopt.functional import bit_pack_spike_dense
        >>> spikes = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
        >>> weight = torch.tensor([[1.0, 2.0, 4.0]], requires_grad=True)
        >>> packed_spike_linear(bit_pack_spike_dense(spikes), weight)
        tensor([[5.],
                [0.]], grad_fn=<...>)
    """
    check_dense("packed_spike_linear", "packed", packed)
    check_dense("packed_spike_linear", "weight", weight)
    if bias is not None:
        check_dense("packed_spike_linear", "bias", bias)
    check_no_transform("packed_spike_linear", "F.linear with unpacked spikes")
    dtype = autocast_dtype(packed.device)
    if dtype is None or weight.dtype not in WEIGHT_DTYPES or (bias is not None and bias.dtype not in WEIGHT_DTYPES):
        dtype = weight.dtype
        if bias is not None and bias.dtype != dtype:
            raise ValueError(
                f"packed_spike_linear takes a weight of float32, float16 or bfloat16 and a bias of the same dtype, got "
                f"weight {tuple(weight.shape)} {weight.dtype}, bias {tuple(bias.shape)} {bias.dtype}."
            )
    if packed.dim() < 1:
        raise ValueError(f"packed_spike_linear takes packed [..., ceil(K / 8)], got {packed.dtype} without dimensions.")
    lead = packed.shape[:-1]
    rows = packed.reshape(math.prod(lead), packed.shape[-1])
    out: Tensor = PackedLinear.apply(rows, None, weight, bias, dtype, False)
    return out.view(*lead, weight.shape[0])
