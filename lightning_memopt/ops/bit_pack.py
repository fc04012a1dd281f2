"""
Spikes, and sums of spikes, in bits
===================================

``torch.ops.lightning_memopt.bit_pack`` and ``bit_unpack`` hold small integers in 1, 2, 4 or 8 bits each as one
little-endian stream: with one bit, bit ``i`` of byte ``b`` is element ``8 b + i`` (least significant bit first). The
unused bits of the last byte are 0. ``bit_pack_rows`` and ``bit_unpack_rows`` start every row of a matrix of spikes at a
byte; products read them so.

Packing also answers whether the bits hold the tensor exactly: every value must be an integer from 0 to the maximum
(-0.0 counts as 0; NaN does not fit). The answer, with a value that does not fit, stays on the device, so that asking
costs no synchronization.

On CUDA the kernels of ``cuda/bit_pack.cu`` and ``cuda/count_pack.cu`` read each value once and allocate nothing beyond
the result. The reference works through the tensor in slices, so its temporaries are bounded whatever the size of the
tensor. Eight boolean bytes viewed as one 64-bit word are gathered into one byte by a multiplication whose partial
products never overlap, and spread again by a multiplication and a mask.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_memopt.ops.exactness import Claim, require_exact
from lightning_memopt.ops.launch import Backend, Kernel, backend_for, launch
from lightning_memopt.ops.registration import register

# Each temporary of a slice takes at most this many bytes (a multiple of 8 elements).
_SLICE = 1 << 20
_GATHER = 0x0102040810204080
_SPREAD = 0x0101010101010101
_ONE_BIT_PER_BYTE = 0x8040201008040201 - (1 << 64)

PACKABLE_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)
BIT_WIDTHS = (1, 2, 4, 8)

# The largest value of each dtype of integers that do not reach what 8 bits hold.
_SHORT_RANGES = {torch.int8: 127}

# The dtypes that kernels exist for, by the name that their entries carry; the others run the reference.
_ENTRY_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.bool: "uint8",
    torch.uint8: "uint8",
}
_THREADS = 256

_LIBRARY = torch.library.Library("lightning_memopt", "DEF")
_LIBRARY.define("bit_pack(Tensor spikes, int bits=1, int? maximum=None) -> (Tensor packed, Tensor fits, Tensor odd)")
_LIBRARY.define("bit_unpack(Tensor packed, SymInt numel, ScalarType dtype, int bits=1) -> Tensor")
_LIBRARY.define("bit_pack_rows(Tensor spikes) -> (Tensor packed, Tensor fits, Tensor odd)")
# Each call reports to the host whether the values fitted, which replaying a CUDA graph would leave out.
_REPORTS = tuple(tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None)
_LIBRARY.define("pack_binary(Tensor spikes, bool by_row, str where) -> Tensor", tags=_REPORTS)
_LIBRARY.define("bit_unpack_rows(Tensor packed, SymInt columns, ScalarType dtype) -> Tensor")


# ---------------------------------------------------------------------------------------------------------------------
# One stream


def _check_bits(name: str, bits: int, maximum: int | None = None) -> int:
    if bits not in BIT_WIDTHS:
        raise ValueError(f"{name} packs 1, 2, 4 or 8 bits per element, got bits={bits}.")
    largest = (1 << bits) - 1
    if maximum is None:
        return largest
    if not 0 < maximum <= largest:
        raise ValueError(f"{name} with bits={bits} holds 0 to {largest}, got maximum={maximum}.")
    return maximum


def _check_pack(spikes: Tensor, bits: int, maximum: int | None) -> int:
    if spikes.dim() != 1 or not spikes.is_contiguous() or spikes.dtype not in PACKABLE_DTYPES:
        raise ValueError(
            "bit_pack expects a contiguous one-dimensional tensor of a real dtype, got shape "
            f"{tuple(spikes.shape)}, strides {spikes.stride()}, dtype {spikes.dtype}. Flatten it first."
        )
    return _check_bits("bit_pack", bits, maximum)


def _check_unpack(packed: Tensor, numel: int, dtype: torch.dtype, bits: int) -> None:
    _check_bits("bit_unpack", bits)
    if packed.dim() != 1 or packed.dtype != torch.uint8 or packed.numel() != (numel * bits + 7) // 8:
        raise ValueError(
            f"bit_unpack expects ceil({numel} * {bits} / 8) bytes as a one-dimensional uint8 tensor, got shape "
            f"{tuple(packed.shape)}, dtype {packed.dtype}."
        )
    if dtype not in PACKABLE_DTYPES:
        raise ValueError(f"bit_unpack cannot make {dtype}; it makes one of {PACKABLE_DTYPES}.")


def _bit_pack(spikes: Tensor, bits: int = 1, maximum: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    largest = _check_pack(spikes, bits, maximum)
    numel = spikes.numel()
    packed = torch.empty((numel * bits + 7) // 8, dtype=torch.uint8, device=spikes.device)
    fits = torch.ones((), dtype=torch.bool, device=spikes.device)
    backend = backend_for(spikes.device)
    name = _ENTRY_NAMES.get(spikes.dtype)
    if backend is None or name is None:
        return packed, *_pack_reference(spikes, packed, fits, bits, largest)
    odd = torch.empty((), dtype=spikes.dtype, device=spikes.device)  # written where a value does not fit
    tiles, grid = _tiles(spikes, packed, bits, backend)
    arguments = spikes, packed, fits, odd, np.int64(numel), np.int64(tiles), np.int32(largest)
    launch(_kernel("bit_pack", name, bits), grid, *arguments, device=spikes.device)
    return packed, fits, odd


def _bit_unpack(packed: Tensor, numel: int, dtype: torch.dtype, bits: int = 1) -> Tensor:
    _check_unpack(packed, numel, dtype, bits)
    packed = packed.contiguous()
    spikes = torch.empty(numel, dtype=dtype, device=packed.device)
    backend = backend_for(packed.device)
    name = _ENTRY_NAMES.get(dtype)
    if backend is None or name is None:
        _unpack_reference(packed, spikes, bits)
        return spikes
    tiles, grid = _tiles(spikes, packed, bits, backend)
    arguments = packed, spikes, np.int64(numel), np.int64(tiles)
    launch(_kernel("bit_unpack", name, bits), grid, *arguments, device=packed.device)
    return spikes


def _kernel(operation: str, name: str, bits: int) -> Kernel:
    return Kernel("bit_pack.cu" if bits == 1 else "count_pack.cu", f"{operation}_{name}_{bits}", _THREADS)


def _tiles(spikes: Tensor, packed: Tensor, bits: int, backend: Backend) -> tuple[int, int]:
    """Whole tiles, 0 where 16-byte accesses are not possible, and the blocks that work through tiles and the rest."""
    numel, warps_per_block = spikes.numel(), _THREADS // 32
    per_lane = 16 // spikes.element_size()
    loads = max(4, 32 // (per_lane * bits))  # of 16 bytes, by each lane of a warp; as in cuda/bit_pack.cuh
    elements = loads * 32 * per_lane
    aligned = spikes.data_ptr() % 16 == 0 and packed.data_ptr() % 16 == 0
    tiles = numel // elements if aligned else 0
    rest = (numel - tiles * elements) * bits // 8 + 1
    wanted = max(-(-tiles // warps_per_block), -(-rest // _THREADS)) if numel else 0
    return tiles, min(wanted, 8 * backend.multiprocessors(spikes.device))


def _pack_reference(spikes: Tensor, packed: Tensor, fits: Tensor, bits: int, maximum: int) -> tuple[Tensor, Tensor]:
    """Fill ``packed`` and return ``fits`` and ``odd``."""
    odd = torch.zeros((), dtype=spikes.dtype, device=spikes.device)
    per_byte = 8 // bits
    for start in range(0, spikes.numel(), _SLICE):
        part = spikes[start : start + _SLICE]
        counts, stray = _counts(part, per_byte, maximum)
        # On the CPU looking is free; elsewhere the search for the odd value always runs, so that nobody has to wait.
        if stray is not None:
            first = stray.to(torch.uint8).argmax()
            odd = torch.where(fits.logical_and(stray[first]), part[first], odd)
            fits = fits.logical_and(stray[first].logical_not())
        target = packed[start // per_byte : start // per_byte + counts.numel() // per_byte]
        if bits == 1:
            target.copy_(gather_bits(counts))
        elif bits == 8:
            target.copy_(counts)
        else:
            columns = counts.view(-1, per_byte)
            target.copy_(columns[:, 0])
            for i in range(1, per_byte):
                target.bitwise_or_(columns[:, i] << (bits * i))
    return fits, odd


def gather_bits(ones: Tensor) -> Tensor:
    """Gather every eight bytes of a flat contiguous tensor of 0s and 1s, whose length is a multiple of 8, into one."""
    return ones.view(torch.int64).mul(_GATHER).__rshift__(56)


def _counts(part: Tensor, per_byte: int, maximum: int) -> tuple[Tensor, Tensor | None]:
    """The counts as bytes, zeros up to a whole packed byte, and where ``part`` holds none (None: nowhere)."""
    numel = part.numel()
    if maximum == 1:
        ones = torch.zeros(-(-numel // per_byte) * per_byte, dtype=torch.bool, device=part.device)
        torch.eq(part, 1, out=ones[:numel])
        # Values that are neither 0 nor 1 are nonzero (NaN too) without being one.
        if part.device.type == "cpu" and torch.count_nonzero(part) == torch.count_nonzero(ones):
            return ones.view(torch.uint8), None
        return ones.view(torch.uint8), (part != 0).logical_and_(ones[:numel].logical_not())
    counts = torch.zeros(-(-numel // per_byte) * per_byte, dtype=torch.uint8, device=part.device)
    if part.dtype in _SHORT_RANGES:  # a comparison with a larger number would wrap it
        maximum = min(maximum, _SHORT_RANGES[part.dtype])
    # What a cast to uint8 makes of NaN or of 300 differs from machine to machine, so the range is asked for first.
    inside = (part >= 0).logical_and_(part <= maximum)
    counts[:numel] = torch.where(inside, part, 0)
    stray = counts[:numel].to(part.dtype) != part
    if part.device.type == "cpu" and not stray.any():
        return counts, None
    return counts, stray


def _unpack_reference(packed: Tensor, spikes: Tensor, bits: int) -> None:
    numel, per_byte = spikes.numel(), 8 // bits
    for start in range(0, numel, _SLICE):
        count = min(_SLICE, numel - start)
        part = packed[start // per_byte : -(-(start + count) // per_byte)]
        target = spikes[start : start + count]
        if bits == 1:
            # Not by a cast, which keeps the stride of a single byte: a view of eight bytes needs a stride of 1.
            words = torch.empty(part.numel(), dtype=torch.int64, device=part.device).copy_(part)
            ones = words.mul_(_SPREAD).bitwise_and_(_ONE_BIT_PER_BYTE).view(torch.uint8)
            torch.ne(ones[:count], 0, out=target)
        elif bits == 8:
            target.copy_(part)
        else:
            counts = torch.stack([(part >> (bits * i)).bitwise_and_(2**bits - 1) for i in range(per_byte)], dim=1)
            target.copy_(counts.view(-1)[:count])


def _bit_pack_fake(spikes: Tensor, bits: int = 1, maximum: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    _check_pack(spikes, bits, maximum)
    packed = spikes.new_empty(((spikes.numel() * bits + 7) // 8,), dtype=torch.uint8)
    return packed, spikes.new_empty((), dtype=torch.bool), spikes.new_empty(())


def _bit_unpack_fake(packed: Tensor, numel: int, dtype: torch.dtype, bits: int = 1) -> Tensor:
    _check_unpack(packed, numel, dtype, bits)
    return packed.new_empty((numel,), dtype=dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Row by row


def _check_pack_rows(spikes: Tensor) -> None:
    if spikes.dim() < 1 or spikes.dtype not in PACKABLE_DTYPES:
        raise ValueError(
            f"bit_pack_rows expects [..., K] spikes of a real dtype, got shape {tuple(spikes.shape)}, dtype "
            f"{spikes.dtype}."
        )


def _check_unpack_rows(packed: Tensor, columns: int, dtype: torch.dtype) -> None:
    if packed.dim() < 1 or packed.dtype != torch.uint8 or packed.shape[-1] != (columns + 7) // 8:
        raise ValueError(
            f"bit_unpack_rows expects [..., ceil({columns} / 8)] bytes as uint8, got shape {tuple(packed.shape)}, "
            f"dtype {packed.dtype}."
        )
    if dtype not in PACKABLE_DTYPES:
        raise ValueError(f"bit_unpack_rows cannot make {dtype}; it makes one of {PACKABLE_DTYPES}.")


def _bit_pack_rows(spikes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _check_pack_rows(spikes)
    spikes = spikes.contiguous()
    columns = spikes.shape[-1]
    shape = (*spikes.shape[:-1], (columns + 7) // 8)
    if columns % 8 == 0:  # the rows follow each other in one stream
        packed, fits, odd = _bit_pack(spikes.view(-1))
        return packed.view(shape), fits, odd
    rows = spikes.numel() // columns
    packed = torch.empty(shape, dtype=torch.uint8, device=spikes.device)
    fits = torch.ones((), dtype=torch.bool, device=spikes.device)
    backend = backend_for(spikes.device)
    name = _ENTRY_NAMES.get(spikes.dtype)
    if backend is None or name is None:
        return packed, *_pack_rows_reference(spikes.view(rows, columns), packed.view(rows, shape[-1]), fits)
    odd = torch.empty((), dtype=spikes.dtype, device=spikes.device)
    arguments = spikes, packed, fits, odd, np.int64(rows), np.int64(columns)
    kernel = Kernel("bit_pack.cu", f"bit_pack_rows_{name}", _THREADS)
    launch(kernel, _row_grid(rows, columns, backend, spikes.device), *arguments, device=spikes.device)
    return packed, fits, odd


def _bit_unpack_rows(packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    _check_unpack_rows(packed, columns, dtype)
    packed = packed.contiguous()
    shape = (*packed.shape[:-1], columns)
    if columns % 8 == 0:
        return _bit_unpack(packed.view(-1), packed.numel() * 8, dtype).view(shape)
    rows = packed.numel() // packed.shape[-1]
    spikes = torch.empty(shape, dtype=dtype, device=packed.device)
    backend = backend_for(packed.device)
    name = _ENTRY_NAMES.get(dtype)
    if backend is None or name is None:
        _unpack_rows_reference(packed.view(rows, packed.shape[-1]), spikes.view(rows, columns))
        return spikes
    arguments = packed, spikes, np.int64(rows), np.int64(columns)
    kernel = Kernel("bit_pack.cu", f"bit_unpack_rows_{name}", _THREADS)
    launch(kernel, _row_grid(rows, columns, backend, packed.device), *arguments, device=packed.device)
    return spikes


def _row_grid(rows: int, columns: int, backend: Backend, device: torch.device) -> int:
    warps = rows * -(-columns // 1024)
    return min(-(-warps // (_THREADS // 32)), 8 * backend.multiprocessors(device))


def _pack_rows_reference(spikes: Tensor, packed: Tensor, fits: Tensor) -> tuple[Tensor, Tensor]:
    odd = torch.zeros((), dtype=spikes.dtype, device=spikes.device)
    rows, columns = spikes.shape
    whole = columns // 8 * 8
    # Slices of whole rows, so that each gets its padding.
    height = max(1, _SLICE // columns)
    for start in range(0, rows, height):
        part = spikes[start : start + height]
        padded = part.new_zeros(part.shape[0], whole + 8)
        padded[:, :columns] = part
        words, part_fits, part_odd = _bit_pack(padded.view(-1))
        packed[start : start + height] = words.view(part.shape[0], -1)
        odd = torch.where(fits.logical_and(~part_fits), part_odd, odd)
        fits = fits.logical_and(part_fits)
    return fits, odd


def _unpack_rows_reference(packed: Tensor, spikes: Tensor) -> None:
    rows, columns = spikes.shape
    height = max(1, _SLICE // columns)
    for start in range(0, rows, height):
        part = packed[start : start + height]
        spikes[start : start + height] = _bit_unpack(part.reshape(-1), part.numel() * 8, spikes.dtype).view(
            part.shape[0], -1
        )[:, :columns]


def _bit_pack_rows_fake(spikes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _check_pack_rows(spikes)
    packed = spikes.new_empty((*spikes.shape[:-1], (spikes.shape[-1] + 7) // 8), dtype=torch.uint8)
    return packed, spikes.new_empty((), dtype=torch.bool), spikes.new_empty(())


def _bit_unpack_rows_fake(packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    _check_unpack_rows(packed, columns, dtype)
    return packed.new_empty((*packed.shape[:-1], columns), dtype=dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Packed and checked


def _pack_binary(spikes: Tensor, by_row: bool, where: str) -> Tensor:
    if by_row:
        packed, fits, odd = _bit_pack_rows(spikes)
    else:
        packed, fits, odd = _bit_pack(spikes.reshape(-1).contiguous())
    remedy = "pass zeros and ones only; sums of spikes are stored by IntegerSpikeCompressor"
    require_exact(fits, odd, Claim(where, "bits hold nothing but 0 and 1", remedy, tuple(spikes.shape)))
    return packed


def _pack_binary_fake(spikes: Tensor, by_row: bool, where: str) -> Tensor:
    if by_row:
        return _bit_pack_rows_fake(spikes)[0]
    return spikes.new_empty(((spikes.numel() + 7) // 8,), dtype=torch.uint8)


for _name, _run, _fake in (
    ("bit_pack", _bit_pack, _bit_pack_fake),
    ("bit_unpack", _bit_unpack, _bit_unpack_fake),
    ("bit_pack_rows", _bit_pack_rows, _bit_pack_rows_fake),
    ("bit_unpack_rows", _bit_unpack_rows, _bit_unpack_rows_fake),
    ("pack_binary", _pack_binary, _pack_binary_fake),
):
    register(_LIBRARY, _name, _run, _fake)


# ---------------------------------------------------------------------------------------------------------------------
# The operations


def bit_pack(spikes: Tensor, bits: int = 1, maximum: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Pack a flat tensor of zeros and ones, or of small integers, into bits.

    Args:
        spikes: ``[n]``, contiguous, any real dtype.
        bits: bits per element: 1, 2, 4 or 8.
        maximum: the largest value that fits; ``2**bits - 1`` if None.

    Returns:
        ``packed``: ``[ceil(n * bits / 8)]`` uint8; ``fits``: 0-dim bool on the same device, True if every value is an
        integer from 0 to ``maximum``; ``odd``: 0-dim tensor of the dtype of ``spikes``, a value that is not. Where
        ``fits`` is True, ``odd`` says nothing; where it is False, ``packed`` does not hold the tensor.

    Raises:
        ValueError: if ``spikes`` is not flat and contiguous, or complex; for other ``bits``; for a ``maximum`` beyond
            them.

    Example:
        >>> packed, fits, odd = bit_pack(torch.tensor([1.0, 0.0, 1.0]))
        >>> packed.tolist(), fits.item()
        ([5], True)
        >>> packed, fits, odd = bit_pack(torch.tensor([3.0, 0.0, 4.0]), bits=2)
        >>> fits.item(), odd.item()
        (False, 4.0)
    """
    packed, fits, odd = torch.ops.lightning_memopt.bit_pack(spikes, bits, maximum)
    return packed, fits, odd


def bit_unpack(packed: Tensor, numel: int, dtype: torch.dtype, bits: int = 1) -> Tensor:
    """Undo :func:`bit_pack`.

    Args:
        packed: ``[ceil(numel * bits / 8)]`` uint8.
        numel: number of elements of the original tensor.
        dtype: dtype of the result.
        bits: bits per element: 1, 2, 4 or 8.

    Returns:
        ``[numel]`` tensor of the integers that were packed.

    Raises:
        ValueError: if ``packed`` has another length or dtype; for other ``bits``.

    Example:
        >>> bit_unpack(torch.tensor([5], dtype=torch.uint8), 3, torch.float32)
        tensor([1., 0., 1.])
    """
    spikes: Tensor = torch.ops.lightning_memopt.bit_unpack(packed, numel, dtype, bits)
    return spikes


def bit_pack_rows(spikes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pack spikes into bits, every row from a byte of its own.

    Args:
        spikes: ``[..., K]``, any real dtype and strides.

    Returns:
        ``packed``: ``[..., ceil(K / 8)]`` uint8, the last bits of a row 0; ``fits`` and ``odd`` as of :func:`bit_pack`.

    Raises:
        ValueError: for a 0-dim or complex tensor.

    Example:
        >>> packed, fits, odd = bit_pack_rows(torch.ones(2, 9))
        >>> packed.tolist()
        [[255, 1], [255, 1]]
    """
    packed, fits, odd = torch.ops.lightning_memopt.bit_pack_rows(spikes)
    return packed, fits, odd


def bit_unpack_rows(packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Undo :func:`bit_pack_rows`.

    Args:
        packed: ``[..., ceil(columns / 8)]`` uint8.
        columns: length of a row of spikes.
        dtype: dtype of the result.

    Returns:
        ``[..., columns]`` zeros and ones.

    Raises:
        ValueError: if rows of ``packed`` have another length, or its dtype is not uint8.

    Example:
        >>> bit_unpack_rows(torch.tensor([[3, 1]], dtype=torch.uint8), 9, torch.uint8)
        tensor([[1, 1, 0, 0, 0, 0, 0, 0, 1]], dtype=torch.uint8)
    """
    spikes: Tensor = torch.ops.lightning_memopt.bit_unpack_rows(packed, columns, dtype)
    return spikes


def pack_binary(spikes: Tensor, where: str, *, by_row: bool = False) -> Tensor:
    """Pack spikes into bits and make sure that nothing else was packed; also inside a compiled graph.

    Args:
        spikes: zeros and ones of any shape, strides and real dtype; ``[..., K]`` if ``by_row``.
        where: what to call them in the error.
        by_row: start every row at a byte, as :func:`bit_pack_rows`.

    Returns:
        ``[ceil(numel / 8)]`` uint8, or ``[..., ceil(K / 8)]`` if ``by_row``.

    Raises:
        NonBinarySpikeError: for another value than 0 and 1: at once on the CPU, before the next optimizer step on CUDA.
        ValueError: for a complex tensor; for a 0-dim one if ``by_row``.

    Example:
        >>> pack_binary(torch.eye(2), "spikes")
        tensor([9], dtype=torch.uint8)
    """
    packed: Tensor = torch.ops.lightning_memopt.pack_binary(spikes, by_row, where)
    return packed
