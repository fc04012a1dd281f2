"""
Spikes as the positions of the ones
===================================

``torch.ops.lightning_memopt.bit_positions`` lists the positions of the ones in a stream of bits, ascending, in a tensor
whose length the caller chooses; ``bit_count`` counts them; ``scatter_positions`` makes the spikes again. None of them
waits for the device: how many ones there were stays there, and places that no one fills hold ``numel``, which lies
outside the tensor and which ``scatter_positions`` leaves out.

Positions are int32 in tensors of fewer than 2**31 elements and int64 in larger ones, so they never wrap. They take
fewer bytes than bits below a density of 1 / 32 (3.1 %), or 1 / 64 (1.6 %) in int64.

On CUDA the kernels of ``cuda/sparse.cu`` read the bits twice, to count and to list, and write each position once;
beside the result they take 12 bytes for every 32768 elements. The references work in slices of bounded size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_memopt.ops.bit_pack import PACKABLE_DTYPES, bit_pack, bit_unpack
from lightning_memopt.ops.exactness import reading_is_free
from lightning_memopt.ops.launch import Kernel, backend_for, launch
from lightning_memopt.ops.registration import register

_THREADS = 256
_BLOCK_BITS = 128 * _THREADS
# Elements of a slice of a reference, a multiple of 8.
_SLICE = 1 << 18

_LIBRARY = torch.library.Library("lightning_memopt", "FRAGMENT")
_LIBRARY.define("bit_count(Tensor packed, SymInt numel) -> Tensor")
_LIBRARY.define("bit_positions(Tensor packed, SymInt numel, SymInt capacity) -> (Tensor positions, Tensor count)")
_LIBRARY.define("scatter_positions(Tensor positions, SymInt numel, ScalarType dtype) -> Tensor")


def position_dtype(numel: int) -> torch.dtype:
    """The dtype of positions in a tensor of ``numel`` elements, and of ``numel`` itself: one that never wraps.

    Example:
        >>> position_dtype(2**31 - 1), position_dtype(2**31)
        (torch.int32, torch.int64)
    """
    return torch.int32 if numel < 2**31 else torch.int64


# ---------------------------------------------------------------------------------------------------------------------
# From bits to positions


def _check_bits(name: str, packed: Tensor, numel: int, capacity: int = 0) -> None:
    if packed.dim() != 1 or packed.dtype != torch.uint8 or numel < 0 or packed.numel() != (numel + 7) // 8:
        raise ValueError(
            f"{name} expects the bits of {numel} elements, ceil({numel} / 8) bytes as a one-dimensional uint8 tensor, "
            f"got shape {tuple(packed.shape)}, dtype {packed.dtype}. Make them with bit_pack."
        )
    if capacity < 0:
        raise ValueError(f"{name} lists a number of positions of 0 or more, got capacity={capacity}.")


def _block_counts(packed: Tensor, numel: int) -> Tensor:
    counts = torch.empty(-(-numel // _BLOCK_BITS), dtype=torch.int32, device=packed.device)
    kernel = Kernel("sparse.cu", "count_ones", _THREADS)
    launch(kernel, counts.numel(), packed, counts, np.int64(numel), device=packed.device)
    return counts


def _bit_count(packed: Tensor, numel: int) -> Tensor:
    _check_bits("bit_count", packed, numel)
    packed = packed.contiguous()
    if backend_for(packed.device) is not None:
        return _block_counts(packed, numel).sum(dtype=torch.int64)
    count = torch.zeros((), dtype=torch.int64, device=packed.device)
    for start in range(0, numel, _SLICE):
        count += _slice_of_ones(packed, start, numel).count_nonzero()
    return count


def _bit_count_fake(packed: Tensor, numel: int) -> Tensor:
    _check_bits("bit_count", packed, numel)
    return packed.new_empty((), dtype=torch.int64)


def _bit_positions(packed: Tensor, numel: int, capacity: int) -> tuple[Tensor, Tensor]:
    _check_bits("bit_positions", packed, numel, capacity)
    packed = packed.contiguous()
    dtype = position_dtype(numel)
    if backend_for(packed.device) is None or numel == 0:
        list_ones = _list_by_reading if reading_is_free(packed) else _list_without_reading
        return list_ones(packed, numel, capacity, dtype)
    through = _block_counts(packed, numel).cumsum(0, dtype=torch.int64)
    positions = torch.empty(capacity, dtype=dtype, device=packed.device)
    count = torch.empty((), dtype=torch.int64, device=packed.device)
    name = "int32" if dtype == torch.int32 else "int64"
    arguments = packed, through, positions, count, np.int64(numel), np.int64(capacity)
    kernel = Kernel("sparse.cu", f"list_positions_{name}", _THREADS)
    launch(kernel, through.numel(), *arguments, device=packed.device)
    return positions, count


def _bit_positions_fake(packed: Tensor, numel: int, capacity: int) -> tuple[Tensor, Tensor]:
    _check_bits("bit_positions", packed, numel, capacity)
    return packed.new_empty((capacity,), dtype=position_dtype(numel)), packed.new_empty((), dtype=torch.int64)


def _slice_of_ones(packed: Tensor, start: int, numel: int) -> Tensor:
    end = min(start + _SLICE, numel)
    return bit_unpack(packed[start // 8 : (end + 7) // 8], end - start, torch.bool)


def _list_by_reading(packed: Tensor, numel: int, capacity: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    positions = torch.full((capacity,), numel, dtype=dtype, device=packed.device)
    count = 0
    for start in range(0, numel, _SLICE):
        found = _slice_of_ones(packed, start, numel).nonzero().squeeze(1).add_(start)
        kept = found[: max(0, capacity - count)]
        positions[count : count + kept.numel()] = kept
        count += found.numel()
    return positions, torch.tensor(count, device=packed.device)


def _list_without_reading(packed: Tensor, numel: int, capacity: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # The place behind the last takes what has none.
    positions = torch.full((capacity + 1,), numel, dtype=dtype, device=packed.device)
    count = torch.zeros((), dtype=torch.int64, device=packed.device)
    for start in range(0, numel, _SLICE):
        ones = _slice_of_ones(packed, start, numel)
        place = ones.cumsum(0).add_(count - 1)
        place.masked_fill_(ones.logical_not().logical_or_(place >= capacity), capacity)
        positions.scatter_(0, place, torch.arange(start, start + ones.numel(), dtype=dtype, device=packed.device))
        count += ones.count_nonzero()
    return positions[:capacity], count


# ---------------------------------------------------------------------------------------------------------------------
# From positions to spikes


def _check_scatter(positions: Tensor, numel: int, dtype: torch.dtype) -> None:
    if positions.dim() != 1 or positions.dtype not in (torch.int32, torch.int64) or numel < 0:
        raise ValueError(
            "scatter_positions expects one-dimensional positions of int32 or int64 in a tensor of 0 or more elements, "
            f"got shape {tuple(positions.shape)}, dtype {positions.dtype}, numel={numel}."
        )
    if dtype not in PACKABLE_DTYPES:
        raise ValueError(f"scatter_positions cannot make {dtype}; it makes one of {PACKABLE_DTYPES}.")


def _scatter_positions(positions: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    _check_scatter(positions, numel, dtype)
    backend = backend_for(positions.device)
    if backend is None:
        return _scatter_reference(positions, numel, dtype)
    flat = torch.zeros(numel, dtype=dtype, device=positions.device)
    positions = positions.contiguous()
    bits = 8 * dtype.itemsize
    one = torch.ones(1, dtype=dtype).view(getattr(torch, f"int{bits}")).item()
    name = "int32" if positions.dtype == torch.int32 else "int64"
    grid = min(-(-positions.numel() // _THREADS), 8 * backend.multiprocessors(positions.device))
    arguments = positions, flat, np.int64(positions.numel()), np.int64(numel), np.int64(one)
    launch(Kernel("sparse.cu", f"scatter_ones_{name}_{bits}", _THREADS), grid, *arguments, device=positions.device)
    return flat


def _scatter_reference(positions: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    # The element behind the last takes the ones of positions outside.
    flat = torch.zeros(numel + 1, dtype=dtype, device=positions.device)
    for part in positions.split(_SLICE):
        part = part.long()
        flat.index_fill_(0, part.masked_fill((part < 0).logical_or_(part >= numel), numel), 1)
    return flat[:numel]


def _scatter_positions_fake(positions: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    _check_scatter(positions, numel, dtype)
    return positions.new_empty((numel,), dtype=dtype)


for _name, _run, _fake in (
    ("bit_count", _bit_count, _bit_count_fake),
    ("bit_positions", _bit_positions, _bit_positions_fake),
    ("scatter_positions", _scatter_positions, _scatter_positions_fake),
):
    register(_LIBRARY, _name, _run, _fake)


# ---------------------------------------------------------------------------------------------------------------------
# The operations


def bit_count(packed: Tensor, numel: int) -> Tensor:
    """Count the ones in a stream of bits.

    Args:
        packed: ``[ceil(numel / 8)]`` uint8, from ``bit_pack``.
        numel: number of bits; what the last byte holds beyond is not counted.

    Returns:
        0-dim int64 on the device of ``packed``.

    Raises:
        ValueError: if ``packed`` has another length or dtype.

    Example:
        >>> bit_count(torch.tensor([0b10110], dtype=torch.uint8), 5)
        tensor(3)
    """
    count: Tensor = torch.ops.lightning_memopt.bit_count(packed, numel)
    return count


def bit_positions(packed: Tensor, numel: int, capacity: int) -> tuple[Tensor, Tensor]:
    """List where the ones in a stream of bits are.

    Args:
        packed: ``[ceil(numel / 8)]`` uint8, from ``bit_pack``.
        numel: number of bits; what the last byte holds beyond is no one.
        capacity: number of positions to return.

    Returns:
        ``positions``: ``[capacity]`` int32 (int64 from 2**31 elements on), the positions of the first ``capacity``
        ones, ascending, and ``numel`` in the places that are left; ``count``: 0-dim int64, how many ones there are:
        more than ``capacity`` if some were left out.

    Raises:
        ValueError: if ``packed`` has another length or dtype, or ``capacity`` is negative.

    Example:
        >>> bit_positions(torch.tensor([0b10110], dtype=torch.uint8), 5, capacity=4)
        (tensor([1, 2, 4, 5], dtype=torch.int32), tensor(3))
    """
    positions, count = torch.ops.lightning_memopt.bit_positions(packed, numel, capacity)
    return positions, count


def scatter_positions(positions: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Make spikes from the positions of their ones: undo :func:`bit_positions`.

    Args:
        positions: ``[n]`` int32 or int64, in any order; those outside 0 to ``numel - 1`` are left out.
        numel: number of elements to make.
        dtype: dtype of the result.

    Returns:
        ``[numel]`` zeros, and ones at ``positions``.

    Raises:
        ValueError: if ``positions`` has another shape or dtype, or for a complex ``dtype``.

    Example:
        >>> scatter_positions(torch.tensor([1, 2, 4, 5], dtype=torch.int32), 5, torch.float32)
        tensor([0., 1., 1., 0., 1.])
    """
    flat: Tensor = torch.ops.lightning_memopt.scatter_positions(positions, numel, dtype)
    return flat


def sparse_pack(spikes: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """List where the ones of a flat tensor of spikes are, without waiting for the device.

    Bits are made on the way, 1/8 byte an element.

    Args:
        spikes: ``[n]``, contiguous, any real dtype.
        capacity: number of positions to return.

    Returns:
        ``positions`` and ``count`` as of :func:`bit_positions`; ``fits``: 0-dim bool, True if every value is 0 or 1 and
        all positions found a place; ``odd``: 0-dim tensor of the dtype of ``spikes``, a value that is neither, or 1 if
        there are too many ones.

    Raises:
        ValueError: if ``spikes`` is not flat and contiguous, or complex, or ``capacity`` is negative.

    Example:
        >>> positions, count, fits, odd = sparse_pack(torch.tensor([0.0, 1.0, 1.0]), capacity=2)
        >>> positions.tolist(), fits.item()
        ([1, 2], True)
        >>> sparse_pack(torch.tensor([0.0, 1.0, 1.0]), capacity=1)[2].item()
        False
    """
    packed, binary, odd = bit_pack(spikes)
    positions, count = bit_positions(packed, spikes.numel(), capacity)
    return positions, count, binary.logical_and(count <= capacity), torch.where(binary, torch.ones_like(odd), odd)
