"""
Projections that skip zeros
===========================

A linear layer of spikes of which few are ones adds a few rows of its weight. The input is packed into bits on the way,
and bits are all that is kept of it for the backward pass.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_memopt.functional.packed import PackedLinear, StandIn, check_no_transform
from lightning_memopt.ops.arguments import check_dense, check_number
from lightning_memopt.ops.autocast import autocast_dtype
from lightning_memopt.ops.bit_pack import pack_binary
from lightning_memopt.ops.dispatch import choose_sparse_linear
from lightning_memopt.ops.launch import backend_for
from lightning_memopt.ops.packed_linear import WEIGHT_DTYPES

STRATEGIES = ("auto", "torch", "sparse")


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
    dtype. Gradients of gradients exist; not in a compiled function, which torch refuses.

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
        TypeError: for what is no dense tensor, or a density that is no number.
        ValueError: if dtypes, shapes or devices do not fit each other, or for another strategy or density.
        RuntimeError: within a transform of ``torch.func``, unless the product is ``F.linear``.
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
    dtype = autocast_dtype(spikes.device) or weight.dtype
    path = strategy
    if strategy == "auto":
        features, inputs = weight.shape
        rows = math.prod(spikes.shape[:-1])
        capability = _kernel_capability(spikes.device)
        path = choose_sparse_linear(rows, features, inputs, dtype, density, capability)
    if path == "torch":
        return F.linear(spikes, weight, bias)
    check_no_transform("sparse_linear", 'strategy="torch"')
    lead = spikes.shape[:-1]
    packed = pack_binary(spikes.detach(), "sparse_linear: spikes", by_row=True)
    packed = packed.view(math.prod(lead), packed.shape[-1])
    needs_spikes = spikes.requires_grad and torch.is_grad_enabled()
    stand_in = StandIn.apply(spikes) if needs_spikes else None
    out: Tensor = PackedLinear.apply(packed, stand_in, weight, bias, dtype, path == "sparse")
    return out.view(*lead, weight.shape[0])


def _kernel_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of the device, None if no kernel runs there."""
    backend = backend_for(device)
    return None if backend is None else backend.capability(device)


# What torch.compiler.assume_constant_result does, which would load the compiler with this module.
_kernel_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check(spikes: Tensor, weight: Tensor, bias: Tensor | None, strategy: str, density: float | None) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f'sparse_linear takes the strategies "auto", "torch" and "sparse", got {strategy!r}.')
    if density is not None:
        check_number("sparse_linear", "density", density)
        if not 0 <= density <= 1:
            raise ValueError(f"sparse_linear takes a density of 0 to 1, the share of ones, got {density!r}.")
    check_dense("sparse_linear", "spikes", spikes)
    check_dense("sparse_linear", "weight", weight)
    if bias is not None:
        check_dense("sparse_linear", "bias", bias)
    problem = _problem(spikes, weight, bias)
    if problem is not None:
        given = f"spikes {_describe(spikes)}, weight {_describe(weight)}"
        if bias is not None:
            given += f", bias {_describe(bias)}"
        raise ValueError(f"sparse_linear takes {problem}, got {given}.")


def _problem(spikes: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """What the tensors had to be and are not."""
    for tensor in (spikes, weight, bias):
        if tensor is None:
            continue
        if tensor.dtype not in WEIGHT_DTYPES:
            return "float32, float16 or bfloat16"
        if tensor.dtype != weight.dtype and autocast_dtype(spikes.device) is None:
            return "tensors of one dtype outside of autocast"
    if spikes.dim() < 1 or weight.dim() != 2 or spikes.shape[-1] != weight.shape[1]:
        return "spikes [..., K] and a weight [N, K]"
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        return "a bias [N] for a weight [N, K]"
    if weight.device != spikes.device or (bias is not None and bias.device != spikes.device):
        return "tensors on one device"
    return None


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
