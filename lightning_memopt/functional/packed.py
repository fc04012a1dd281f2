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

from lightning_memopt.ops.packed_linear import WEIGHT_DTYPES, packed_linear, packed_linear_grad_weight


class _PackedLinear(torch.autograd.Function):
    """``packed`` [M, ceil(K / 8)] times ``weight`` [N, K], transposed, plus ``bias`` [N]."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = packed_linear(packed, weight, bias)
        ctx.save_for_backward(packed)
        ctx.in_features = weight.shape[1]
        # A gradient with its parameter's strides is accumulated without a copy.
        ctx.transposed = weight.t().is_contiguous() and not weight.is_contiguous()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        _, needs_weight, needs_bias = ctx.needs_input_grad
        grad_weight = grad_bias = None
        if needs_weight:
            grad_weight = _PackedLinearGradWeight.apply(packed, grad, ctx.in_features, ctx.transposed)
        if needs_bias:
            grad_bias = grad.sum(0)
        return None, grad_weight, grad_bias


class _PackedLinearGradWeight(torch.autograd.Function):
    """Linear in ``grad`` [M, N]; apart, so that a second derivative exists."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, grad: Tensor, in_features: int, transposed: bool) -> Tensor:
        ctx.save_for_backward(packed)
        return packed_linear_grad_weight(packed, grad, in_features, transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return None, _PackedLinear.apply(packed, grads[0], None), None, None


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
        ValueError: if dtypes, shapes or devices do not fit each other.

    Example:
        >>> from lightning_memopt.functional import bit_pack_spike_dense
        >>> spikes = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
        >>> weight = torch.tensor([[1.0, 2.0, 4.0]], requires_grad=True)
        >>> packed_spike_linear(bit_pack_spike_dense(spikes), weight)
        tensor([[5.],
                [0.]], grad_fn=<...>)
    """
    if torch.is_autocast_enabled(packed.device.type) and weight.dtype in WEIGHT_DTYPES:
        dtype = torch.get_autocast_dtype(packed.device.type)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if packed.dim() < 1:
        raise ValueError(f"packed_spike_linear takes packed [..., ceil(K / 8)], got {packed.dtype} without dimensions.")
    lead = packed.shape[:-1]
    rows = packed.reshape(math.prod(lead), packed.shape[-1])
    out: Tensor = _PackedLinear.apply(rows, weight, bias)
    return out.view(*lead, weight.shape[0])
