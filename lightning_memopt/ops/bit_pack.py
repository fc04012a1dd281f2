"""
Eight spikes in a byte
======================

``torch.ops.lightning_memopt.bit_pack`` and ``bit_unpack``: bit ``i`` of byte ``b`` is element ``8 b + i`` (least
significant bit first); the unused bits of the last byte are 0.

Packing also answers whether the bits hold the tensor exactly: every value must be 0 or 1 (-0.0 counts as 0; NaN does
not fit). The answer, with a value that does not fit, stays on the device, so that asking costs no synchronization.

The reference works through the tensor in slices, so its temporaries are bounded whatever the size of the tensor. Eight
boolean bytes viewed as one 64-bit word are gathered into one byte by a multiplication whose partial products never
overlap, and spread again by a multiplication and a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

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

_LIBRARY = torch.library.Library("lightning_memopt", "DEF")
_LIBRARY.define("bit_pack(Tensor spikes) -> (Tensor packed, Tensor fits, Tensor odd)")
_LIBRARY.define("bit_unpack(Tensor packed, int numel, ScalarType dtype) -> Tensor")


def _check_pack(spikes: Tensor) -> None:
    if spikes.dim() != 1 or not spikes.is_contiguous() or spikes.dtype not in PACKABLE_DTYPES:
        raise ValueError(
            "bit_pack expects a contiguous one-dimensional tensor of a real dtype, got shape "
            f"{tuple(spikes.shape)}, strides {spikes.stride()}, dtype {spikes.dtype}. Flatten it first."
        )


def _check_unpack(packed: Tensor, numel: int, dtype: torch.dtype) -> None:
    if packed.dim() != 1 or packed.dtype != torch.uint8 or packed.numel() != (numel + 7) // 8:
        raise ValueError(
            f"bit_unpack expects ceil({numel} / 8) bytes as a one-dimensional uint8 tensor, got shape "
            f"{tuple(packed.shape)}, dtype {packed.dtype}."
        )
    if dtype not in PACKABLE_DTYPES:
        raise ValueError(f"bit_unpack cannot make {dtype}; it makes one of {PACKABLE_DTYPES}.")


def _bit_pack_reference(spikes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _check_pack(spikes)
    numel = spikes.numel()
    packed = torch.empty((numel + 7) // 8, dtype=torch.uint8, device=spikes.device)
    fits = torch.ones((), dtype=torch.bool, device=spikes.device)
    odd = torch.zeros((), dtype=spikes.dtype, device=spikes.device)
    for start in range(0, numel, _SLICE):
        part = spikes[start : start + _SLICE]
        ones = torch.zeros((part.numel() + 7) // 8 * 8, dtype=torch.bool, device=part.device)
        torch.eq(part, 1, out=ones[: part.numel()])
        # Values that are neither 0 nor 1 are nonzero (NaN too) without being one.
        part_fits = torch.count_nonzero(part) == torch.count_nonzero(ones)
        # On the CPU looking is free; elsewhere the search for the odd value always runs, so that nobody has to wait.
        if part.device.type != "cpu" or not part_fits:
            stray = (part != 0).logical_and_(ones[: part.numel()].logical_not())
            odd = torch.where(fits.logical_and(~part_fits), part[stray.to(torch.uint8).argmax()], odd)
            fits = fits.logical_and(part_fits)
        words = ones.view(torch.int64)
        packed[start // 8 : start // 8 + words.numel()] = (words.mul_(_GATHER).__rshift__(56)).to(torch.uint8)
    return packed, fits, odd


def _bit_unpack_reference(packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    _check_unpack(packed, numel, dtype)
    spikes = torch.empty(numel, dtype=dtype, device=packed.device)
    for start in range(0, numel, _SLICE):
        count = min(_SLICE, numel - start)
        words = packed[start // 8 : (start + count + 7) // 8].to(torch.int64)
        bits = words.mul_(_SPREAD).bitwise_and_(_ONE_BIT_PER_BYTE).view(torch.uint8)
        torch.ne(bits[:count], 0, out=spikes[start : start + count])
    return spikes


def _bit_pack_fake(spikes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _check_pack(spikes)
    packed = spikes.new_empty(((spikes.numel() + 7) // 8,), dtype=torch.uint8)
    return packed, spikes.new_empty((), dtype=torch.bool), spikes.new_empty(())


def _bit_unpack_fake(packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((numel,), dtype=dtype)


for _backend in ("CPU", "CUDA"):
    _LIBRARY.impl("bit_pack", _bit_pack_reference, _backend)
    _LIBRARY.impl("bit_unpack", _bit_unpack_reference, _backend)
torch.library.register_fake("lightning_memopt::bit_pack", _bit_pack_fake, lib=_LIBRARY)
torch.library.register_fake("lightning_memopt::bit_unpack", _bit_unpack_fake, lib=_LIBRARY)


def bit_pack(spikes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pack a flat tensor of zeros and ones into bits.

    Args:
        spikes: ``[n]``, contiguous, any real dtype.

    Returns:
        ``packed``: ``[ceil(n / 8)]`` uint8; ``fits``: 0-dim bool on the same device, True if every value is 0 or 1;
        ``odd``: 0-dim tensor of the dtype of ``spikes``, a value that is neither (0 if there is none). Where ``fits``
        is False, ``packed`` does not hold the tensor.

    Raises:
        ValueError: if ``spikes`` is not flat and contiguous, or complex.

    Example:
        >>> packed, fits, odd = bit_pack(torch.tensor([1.0, 0.0, 1.0]))
        >>> packed.tolist(), fits.item()
        ([5], True)
    """
    packed, fits, odd = torch.ops.lightning_memopt.bit_pack(spikes)
    return packed, fits, odd


def bit_unpack(packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Undo :func:`bit_pack`.

    Args:
        packed: ``[ceil(numel / 8)]`` uint8.
        numel: number of elements of the original tensor.
        dtype: dtype of the result.

    Returns:
        ``[numel]`` tensor of zeros and ones.

    Raises:
        ValueError: if ``packed`` has another length or dtype.

    Example:
        >>> bit_unpack(torch.tensor([5], dtype=torch.uint8), 3, torch.float32)
        tensor([1., 0., 1.])
    """
    spikes: Tensor = torch.ops.lightning_memopt.bit_unpack(packed, numel, dtype)
    return spikes
