"""
Projections that skip zeros
===========================

A linear layer of spikes of which few are ones adds a few rows of its weight. The input is packed into bits on the way,
and bits are all that is kept of it for the backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_memopt.ops.bit_pack import pack_binary
from lightning_memopt.ops.dispatch import choose_sparse_linear
from lightning_memopt.ops.launch import backend_for
from lightning_memopt.ops.packed_linear import WEIGHT_DTYPES, packed_linear, packed_linear_grad_weight
from lightning_memopt.ops.sparse_linear import sparse_linear as sparse_product

STRATEGIES = ("auto", "torch", "sparse")


class _BinaryLinear(torch.autograd.Function):
    """``spikes`` [..., K] times ``weight`` [N, K], transposed, plus ``bias`` [N], by way of bits."""

    @staticmethod
    def forward(ctx: Any, spikes: Tensor, weight: Tensor, bias: Tensor | None, skip_zeros: bool) -> Tensor:
        lead = spikes.shape[:-1]
        packed = pack_binary(spikes, "sparse_linear: spikes", by_row=True)
        packed = packed.view(math.prod(lead), packed.shape[-1])
        needs_spikes, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(packed if needs_weight else None, weight if needs_spikes else None)
        ctx.spikes_dtype = spikes.dtype
        ctx.in_features = spikes.shape[-1]
        # A gradient with its parameter's strides is accumulated without a copy.
        ctx.transposed = weight.t().is_contiguous() and not weight.is_contiguous()
        product = sparse_product if skip_zeros else packed_linear
        return product(packed, weight, bias).view(*lead, weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed, weight = ctx.saved_tensors
        lead, features = grad.shape[:-1], grad.shape[-1]
        rows = grad.reshape(math.prod(lead), features).contiguous()
        grad_spikes = grad_weight = grad_bias = None
        if weight is not None:
            grad_spikes = torch.mm(rows, weight).to(ctx.spikes_dtype).view(*lead, ctx.in_features)
        if packed is not None:
            grad_weight = packed_linear_grad_weight(packed, rows, ctx.in_features, ctx.transposed)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_spikes, grad_weight, grad_bias, None


def sparse_linear(
    spikes: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    strategy: str = "auto",
    density: float | None = None,
) -> Tensor:
    """Apply a linear layer to spikes: ``F.linear(spikes, weight, bias)``, which may skip zeros.

    Gradients reach all three inputs; where the weight needs one, one bit is kept for each spike unless the strategy is
    ``"torch"``. ``"sparse"`` adds the weights of the ones in float32 in the order of ascending k, then the bias, and
    rounds once: the same result in every run. A weight that is infinite or NaN counts where there is a one only.
    Numbers below 2^-126 may count as zero.

    Under autocast the weight and the bias are cast as ``F.linear`` casts them; the gradient of the spikes has their
    dtype.

    Args:
        spikes: ``[..., K]`` zeros and ones, float32, float16 or bfloat16, any strides.
        weight: ``[N, K]``, the dtype of ``spikes``, any strides.
        bias: ``[N]``, the dtype of ``spikes``.
        strategy: ``"torch"`` for ``F.linear`` itself; ``"sparse"`` to skip zeros; ``"auto"`` for the fastest by shape,
            dtype, device and ``density``, which may be a dense product of the packed spikes.
        density: the share of ones that you expect, 0 to 1, for ``"auto"``: the spikes are not looked at. Without it
            ``"auto"`` skips no zeros.

    Returns:
        ``[..., N]``, the dtype of ``weight`` (under autocast: its dtype), contiguous.

    Raises:
        ValueError: if dtypes, shapes or devices do not fit each other, or for another strategy or density.
        NonBinarySpikeError: for another value than 0 and 1, unless the product is ``F.linear``: at once on the CPU,
            before the next optimizer step on CUDA.

    Example:
        >>> spikes = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
        >>> weight = torch.tensor([[1.0, 2.0, 4.0]], requires_grad=True)
        >>> sparse_linear(spikes, weight, strategy="sparse")
        tensor([[5.],
                [0.]], grad_fn=<...>)
    """
    _check(spikes, weight, bias, strategy, density)
    if torch.is_autocast_enabled(spikes.device.type):
        dtype = torch.get_autocast_dtype(spikes.device.type)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    path = strategy
    if strategy == "auto":
        features, inputs = weight.shape
        rows = math.prod(spikes.shape[:-1])
        capability = _kernel_capability(spikes.device)
        path = choose_sparse_linear(rows, features, inputs, weight.dtype, density, capability)
    if path == "torch":
        return F.linear(spikes, weight, bias)
    out: Tensor = _BinaryLinear.apply(spikes, weight, bias, path == "sparse")
    return out


def _kernel_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of the device, None if no kernel runs there."""
    backend = backend_for(device)
    return None if backend is None else backend.capability(device)


# What torch.compiler.assume_constant_result does, which would load the compiler with this module.
_kernel_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check(spikes: Tensor, weight: Tensor, bias: Tensor | None, strategy: str, density: float | None) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f'sparse_linear takes the strategies "auto", "torch" and "sparse", got {strategy!r}.')
    if density is not None and not 0 <= density <= 1:
        raise ValueError(f"sparse_linear takes a density of 0 to 1, the share of ones, got {density!r}.")
    given = ", ".join(
        f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        for name, tensor in (("spikes", spikes), ("weight", weight), ("bias", bias))
        if tensor is not None
    )
    tensors = [tensor for tensor in (spikes, weight, bias) if tensor is not None]
    if any(tensor.dtype not in WEIGHT_DTYPES for tensor in tensors):
        raise ValueError(f"sparse_linear takes float32, float16 or bfloat16, got {given}.")
    if len({tensor.dtype for tensor in tensors}) > 1 and not torch.is_autocast_enabled(spikes.device.type):
        raise ValueError(f"sparse_linear takes tensors of one dtype outside of autocast, got {given}.")
    if spikes.dim() < 1 or weight.dim() != 2 or spikes.shape[-1] != weight.shape[1]:
        raise ValueError(f"sparse_linear takes spikes [..., K] and a weight [N, K], got {given}.")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(f"sparse_linear takes a bias [N] for a weight [N, K], got {given}.")
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError(f"sparse_linear takes tensors on one device, got {given}.")
