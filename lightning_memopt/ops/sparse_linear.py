"""
Products that skip zeros
========================

``torch.ops.lightning_memopt.sparse_linear`` multiplies spikes held as bits ``[M, ceil(K / 8)]`` (bit ``i`` of byte
``b`` of a row is its spike ``8 b + i``; what the last byte holds beyond K is ignored) with a weight ``[N, K]`` by
adding the weights of the ones. Its time grows with their number; :mod:`lightning_memopt.ops.dispatch` says from which
density on a dense product is faster.

The weights of an output are added in float32 in the order of ascending k, the bias last; a float16 or bfloat16 result
is rounded once. So the result is the same in every run, and exact where sums of weights are. Infinite and NaN weights
count where there is a one only: where there is none, a dense product multiplies them with 0, which is NaN. Numbers
below 2^-126 are taken as zero.

On CUDA, from compute capability 8.0 on, the kernels of ``cuda/sparse_linear.cu`` run; beside the bits they need about
1/8 byte for each spike. Elsewhere the product of :mod:`lightning_memopt.ops.packed_linear` takes their place; it adds
in an order of its own, and zeros too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_memopt.ops.launch import Backend, Kernel, backend_for, launch
from lightning_memopt.ops.packed_linear import describe_product, packed_linear
from lightning_memopt.ops.registration import register

_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

# As cuda/sparse_linear.cu declares them.
_THREADS = 512
_WARPS = _THREADS // 32
_COLUMNS = 64
_ROW_GROUPS = 8
_WEIGHT_STRIDE = 68

_LIBRARY = torch.library.Library("lightning_memopt", "FRAGMENT")
_LIBRARY.define("sparse_linear(Tensor packed, Tensor weight, Tensor? bias=None) -> Tensor")


@dataclass(frozen=True)
class _Layout:
    """How a product is divided.

    Attributes:
        slab: inputs whose weights are in shared memory at a time.
        slabs: number of slabs.
        row_groups: groups of four rows that a warp has at a time.
        strips: parts of the rows, of 64 * row_groups each.
        tiles: strips times parts of the outputs.
    """

    slab: int
    slabs: int
    row_groups: int
    strips: int
    tiles: int


def _list_bytes(slab: int) -> int:
    """Bytes of the list of one row's ones in a slab."""
    return max(16, (slab + 64) // 128 * 16)


def _shared_bytes(capability: tuple[int, int]) -> int:
    """Shared memory of a block: two slabs, and eight lists for each warp; the most, whatever the layout."""
    slab = _largest_slab(capability)
    return 2 * slab * _WEIGHT_STRIDE * 4 + _WARPS * 8 * _list_bytes(slab)


def _largest_slab(capability: tuple[int, int]) -> int:
    """Inputs of two slabs that fit in shared memory beside the lists: of 227, 163 or 99 KiB."""
    if capability >= (12, 0) or capability in ((8, 6), (8, 9)):
        return 144
    return 416 if capability >= (9, 0) else 288


def _layout(rows: int, features: int, inputs: int, capability: tuple[int, int], multiprocessors: int) -> _Layout:
    slabs = -(-inputs // _largest_slab(capability))
    slab = -(-inputs // (8 * slabs)) * 8
    columns = -(-features // _COLUMNS)

    def rounds(row_groups: int) -> float:
        tiles = -(-rows // (4 * _WARPS * row_groups)) * columns
        # Copying a slab takes about as long as adding the ones of one group of rows at a density of 2 %.
        return -(-tiles // multiprocessors) * (row_groups + 1)

    row_groups = min(range(_ROW_GROUPS, 0, -2), key=rounds)
    strips = -(-rows // (4 * _WARPS * row_groups))
    return _Layout(slab, -(-inputs // slab), row_groups, strips, strips * columns)


def _check(packed: Tensor, weight: Tensor, bias: Tensor | None) -> None:

    def given() -> str:
        return describe_product(packed, weight, bias)

    if weight.dtype not in _NAMES or (bias is not None and bias.dtype != weight.dtype):
        raise ValueError(
            f"sparse_linear takes a weight of float32, float16 or bfloat16 and a bias of the same dtype, got {given()}."
        )
    if packed.dtype != torch.uint8 or packed.dim() != 2 or weight.dim() != 2:
        raise ValueError(f"sparse_linear takes packed [M, ceil(K / 8)] of uint8 and weight [N, K], got {given()}.")
    features, inputs = weight.shape
    if packed.shape[1] != (inputs + 7) // 8 or features >= 2**31 - 1024 or inputs >= 2**31 - 1024:
        raise ValueError(
            f"sparse_linear takes packed [M, ceil(K / 8)] and weight [N, K], N and K below 2**31 - 1024, got "
            f"{given()}. Pack every row by itself, with bit_pack_spike_dense."
        )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(f"sparse_linear takes a bias [N] for a weight [N, K], got {given()}.")
    if weight.device != packed.device or (bias is not None and bias.device != packed.device):
        raise ValueError(f"sparse_linear takes tensors on one device, got {given()}.")


def _sparse_linear(packed: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check(packed, weight, bias)
    backend = backend_for(weight.device)
    if backend is None or 0 in (packed.shape[0], *weight.shape) or backend.capability(weight.device) < (8, 0):
        return packed_linear(packed, weight, bias)
    return _by_kernels(packed.contiguous(), weight, None if bias is None else bias.contiguous(), backend)


def _sparse_linear_fake(packed: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check(packed, weight, bias)
    return weight.new_empty((packed.shape[0], weight.shape[0]))


def _by_kernels(packed: Tensor, weight: Tensor, bias: Tensor | None, backend: Backend) -> Tensor:
    rows, (features, inputs), device = packed.shape[0], weight.shape, weight.device
    multiprocessors = backend.multiprocessors(device)
    capability = backend.capability(device)
    layout = _layout(rows, features, inputs, capability, multiprocessors)
    padded_rows = -(-rows // 8) * 8
    lists = torch.empty(layout.slabs * padded_rows * _list_bytes(layout.slab), dtype=torch.uint8, device=device)
    active = torch.zeros(layout.strips * layout.slabs, dtype=torch.uint8, device=device)
    strip_rows = 4 * _WARPS * layout.row_groups
    launch(
        Kernel("sparse_linear.cu", "list_ones", 256),
        (padded_rows // 8, min(layout.slabs, 65535), 1),
        packed,
        lists,
        active,
        np.int64(rows),
        np.int32(inputs),
        np.int32(layout.slab),
        np.int32(strip_rows),
        device=device,
    )
    out = torch.empty(rows, features, dtype=weight.dtype, device=device)
    stride_n, stride_k = weight.stride()
    launch(
        Kernel("sparse_linear.cu", f"sparse_linear_{_NAMES[weight.dtype]}", _THREADS, _shared_bytes(capability)),
        min(layout.tiles, multiprocessors),
        packed,
        lists,
        active,
        weight,
        np.int64(stride_n),
        np.int64(stride_k),
        bias,
        out,
        np.int64(rows),
        np.int32(features),
        np.int32(inputs),
        np.int32(layout.slab),
        np.int32(layout.row_groups),
        device=device,
    )
    return out


register(_LIBRARY, "sparse_linear", _sparse_linear, _sparse_linear_fake)


def sparse_linear(packed: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply packed spikes with a weight, skipping zeros; without gradient.

    Args:
        packed: ``[M, ceil(K / 8)]`` uint8, from ``bit_pack_rows``.
        weight: ``[N, K]`` float32, float16 or bfloat16, any strides.
        bias: ``[N]``, the dtype of ``weight``.

    Returns:
        ``[M, N]``, the dtype of ``weight``, contiguous.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit each other.

    Example:
        >>> weight = torch.tensor([[1.0, 2.0, 4.0]])
        >>> sparse_linear(torch.tensor([[0b101]], dtype=torch.uint8), weight)
        tensor([[5.]])
    """
    out: Tensor = torch.ops.lightning_memopt.sparse_linear(packed, weight, bias)
    return out
