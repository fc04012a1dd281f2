"""
Compressors: how a tensor is stored between forward and backward
================================================================

A compressor turns a tensor into a smaller payload and back. It is asked two things: the payload, and whether the
payload holds the tensor exactly. Nobody has to promise that a tensor is binary: a tensor that does not fit is stored as
it is where the answer can be read at no cost (on the CPU); on CUDA the answer stays on the device, and before the next
optimizer step it is read and raises :class:`~lightning_memopt.NonBinarySpikeError`, so that no weight is ever changed
by a wrong value.

Payloads are tuples of tensors and constants. They carry shape, dtype, strides and device, so one compressor object may
serve any number of regions and threads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memopt.checkpointing.layout import memory_order, overlaps, span
from lightning_memopt.ops.arguments import check_number
from lightning_memopt.ops.bit_pack import PACKABLE_DTYPES, bit_pack, bit_unpack
from lightning_memopt.ops.exactness import Claim, reading_is_free, require_exact
from lightning_memopt.ops.sparse import bit_count, bit_positions, scatter_positions, sparse_pack
from lightning_memopt.ops.value_bounds import is_fake

_SLICE = 1 << 20


class Compressed(NamedTuple):
    """A payload, whether it holds the tensor exactly (0-dim bool), and a value that it does not hold (0-dim)."""

    payload: Any
    fits: Tensor
    odd: Tensor


class SpikePayload(NamedTuple):
    """What the built-in compressors store: compact data and how to rebuild the tensor from it."""

    data: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class SpikeCompressor(ABC):
    """Base class of compressors. Subclasses define :meth:`compress` and :meth:`decompress`.

    ``compress`` receives a detached tensor of any shape, dtype and memory format and returns a payload (a tensor, or
    tuples, lists and dicts of tensors and constants) from which ``decompress`` makes an equal tensor. Keep everything
    that belongs to one call in the payload, nothing on the compressor. Whether the payload is exact is found by
    decompressing it again; a subclass that knows a cheaper test overrides :meth:`compress_checked`.

    Example:
        >>> class Int16SpikeCompressor(SpikeCompressor):
        ...     def compress(self, tensor): return tensor.short(), tensor.dtype
        ...     def decompress(self, payload): return payload[0].to(payload[1])
        >>> Int16SpikeCompressor().compress_checked(torch.tensor([300.0, -2.0])).fits.item()
        True
        >>> Int16SpikeCompressor().compress_checked(torch.tensor([0.5])).fits.item()
        False
    """

    @abstractmethod
    def compress(self, tensor: Tensor) -> Any:
        """Return a payload that holds ``tensor``."""

    @abstractmethod
    def decompress(self, payload: Any) -> Tensor:
        """Return the tensor that ``payload`` holds, with its shape, dtype, device and strides."""

    def accepts(self, tensor: Tensor) -> bool:
        """Whether a tensor of this dtype and layout may be tried at all; values are not looked at."""
        return True

    def compress_checked(self, tensor: Tensor) -> Compressed:
        """Compress and tell, without reading from the device, whether the payload is exact."""
        payload = self.compress(tensor)
        restored = self.decompress(payload)
        if restored.shape != tensor.shape or restored.dtype != tensor.dtype:
            return Compressed(payload, _constant(False, tensor), tensor.new_zeros(()))
        return Compressed(payload, *_first_difference(tensor.reshape(-1), restored.reshape(-1)))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _ElementwiseCompressor(SpikeCompressor):
    """Compressors that store the elements of a tensor in the order in which they lie in memory."""

    _what = "values other than 0 and 1"
    _remedy = "use Uint8SpikeCompressor for sums of spikes, or no compressor"

    def accepts(self, tensor: Tensor) -> bool:
        if tensor.dtype not in PACKABLE_DTYPES or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        return not overlaps(tensor)

    def compress(self, tensor: Tensor) -> SpikePayload:
        """Compress ``tensor``.

        Raises:
            TypeError: for a dtype or layout that cannot be stored.
            NonBinarySpikeError: at once on the CPU, before the next optimizer step on CUDA, if a value does not fit.
        """
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{type(self).__name__} stores tensors, got {type(tensor).__name__}.")
        if not self.accepts(tensor):
            dense = tensor.layout is torch.strided and not tensor.is_nested
            strides = f"strides {tensor.stride()}" if dense else "not dense"
            raise TypeError(
                f"{type(self).__name__} stores dense tensors of a real dtype, got dtype {tensor.dtype}, layout "
                f"{tensor.layout}, {strides}."
            )
        compressed = self.compress_checked(tensor)
        require_fit(compressed, self, f"a tensor of shape {tuple(tensor.shape)}")
        payload: SpikePayload = compressed.payload
        return payload

    def compress_checked(self, tensor: Tensor) -> Compressed:
        flat = _in_memory_order(tensor.detach())
        data, fits, odd = self._store(flat)
        payload = SpikePayload(data, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        return Compressed(payload, fits, odd)

    def decompress(self, payload: SpikePayload) -> Tensor:
        numel = math.prod(payload.shape) // _repeats(payload.shape, payload.stride)
        return _from_memory_order(self._load(payload.data, numel, payload.dtype), payload)

    @abstractmethod
    def _store(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

    @abstractmethod
    def _load(self, data: Tensor, numel: int, dtype: torch.dtype) -> Tensor: ...


class _PackingCompressor(_ElementwiseCompressor):
    """Compressors whose payload is a stream of small integers."""

    bits = 1
    _maximum: int | None = None

    def _store(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return bit_pack(flat, self.bits, self._maximum)

    def _load(self, data: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return bit_unpack(data, numel, dtype, self.bits)


class BitSpikeCompressor(_PackingCompressor):
    """Eight binary spikes in a byte: 1/32 of fp32, 1/16 of fp16 and bf16, 1/8 of bool.

    Example:
        >>> compressor = BitSpikeCompressor()
        >>> payload = compressor.compress(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> payload.data.nbytes, torch.equal(compressor.decompress(payload), torch.eye(2))
        (1, True)
    """


class IntegerSpikeCompressor(_PackingCompressor):
    """Spike counts in 2, 4 or 8 bits each, for integer sums of spikes (the ADD residual of SEW-ResNet).

    Args:
        bits: bits per element; counts from 0 to ``2**bits - 1`` fit.

    Raises:
        TypeError: for ``bits`` that are no integer.
        ValueError: for other ``bits``.

    Example:
        >>> IntegerSpikeCompressor(bits=2).compress(torch.tensor([0.0, 3.0, 1.0, 2.0])).data.nbytes
        1
    """

    _remedy = "use more bits, or no compressor"

    def __init__(self, bits: int = 4) -> None:
        check_number("IntegerSpikeCompressor", "bits", bits, whole=True)
        bits = int(bits)
        if bits not in (2, 4, 8):
            raise ValueError(
                f"IntegerSpikeCompressor takes bits=2, 4 or 8, got {bits!r}. For one bit use BitSpikeCompressor."
            )
        self.bits = bits
        self._what = f"values other than the integers 0 to {2**bits - 1}"

    def __repr__(self) -> str:
        return f"IntegerSpikeCompressor(bits={self.bits})"


class BooleanSpikeCompressor(_PackingCompressor):
    """A binary spike in a byte, as ``bool``.

    Example:
        >>> BooleanSpikeCompressor().compress(torch.tensor([1.0, 0.0])).data
        tensor([ True, False])
    """

    bits = 8
    _maximum = 1

    def _store(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        data, fits, odd = super()._store(flat)
        return data.view(torch.bool), fits, odd

    def _load(self, data: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return super()._load(data.view(torch.uint8), numel, dtype)


class Uint8SpikeCompressor(_PackingCompressor):
    """A spike count of 0 to 255 in a byte, for integer sums of spikes (the ADD residual of SEW-ResNet).

    Example:
        >>> Uint8SpikeCompressor().compress(torch.tensor([0.0, 3.0])).data
        tensor([0, 3], dtype=torch.uint8)
    """

    _what = "values other than the integers 0 to 255"
    _remedy = "use no compressor"
    bits = 8


class SparseSpikeCompressor(_ElementwiseCompressor):
    """The positions of the ones, 4 bytes each (8 from 2**31 elements on), for binary spikes with very few ones.

    They take fewer bytes than bits below 3.1 % of ones (1.6 % from 2**31 elements on).

    Args:
        max_density: the largest share of ones that fits, above 0 up to 1. The payload has room for that many, so its
            size does not depend on the values, and nobody waits for the device; what has more ones does not fit, like a
            value that is no spike. None: a payload of as many positions as there are ones, whose number is read from
            the device: on CUDA this waits for it, once per tensor.

    Raises:
        TypeError: for a ``max_density`` that is no number.
        ValueError: for another ``max_density``.

    Example:
        >>> SparseSpikeCompressor().compress(torch.tensor([0.0, 0.0, 1.0])).data
        tensor([2], dtype=torch.int32)
        >>> SparseSpikeCompressor(max_density=0.5).compress(torch.tensor([0.0, 0.0, 1.0])).data
        tensor([2, 3], dtype=torch.int32)
    """

    def __init__(self, max_density: float | None = None) -> None:
        self.max_density = max_density
        if max_density is None:
            return
        check_number("SparseSpikeCompressor", "max_density", max_density)
        if not 0 < max_density <= 1:
            raise ValueError(f"SparseSpikeCompressor takes a max_density above 0 up to 1, got {max_density!r}.")
        self._what = f"values other than 0 and 1, or ones in more than max_density={max_density} of the elements"
        self._remedy = (
            "raise max_density or use BitSpikeCompressor for more ones, Uint8SpikeCompressor for sums of spikes, or no "
            "compressor"
        )

    def __repr__(self) -> str:
        return f"SparseSpikeCompressor({'' if self.max_density is None else f'max_density={self.max_density}'})"

    def _store(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.max_density is not None:
            positions, _, fits, odd = sparse_pack(flat, math.ceil(self.max_density * flat.numel()))
            return positions, fits, odd
        packed, fits, odd = bit_pack(flat)
        count = int(bit_count(packed, flat.numel()))
        positions, _ = bit_positions(packed, flat.numel(), count)
        return positions, fits, odd

    def _load(self, data: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return scatter_positions(data, numel, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Layout: elements are stored in the order in which they lie in memory, so channels_last costs no copy


def _repeats(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many times expanding repeats each stored element."""
    repeats = 1
    for size, step in zip(shape, stride, strict=True):
        if step == 0 and size > 1:
            repeats *= size
    return repeats


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The distinct elements of ``tensor`` as a flat tensor; a view where it is dense."""
    if tensor.numel() == 0:
        return tensor.reshape(-1)
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.permute(memory_order(tensor.stride())).reshape(-1).contiguous()


def _from_memory_order(flat: Tensor, payload: SpikePayload) -> Tensor:
    """Undo :func:`_in_memory_order`: same shape, same strides."""
    shape, stride = payload.shape, payload.stride
    if math.prod(shape) == 0:
        return torch.empty_strided(shape, stride, dtype=payload.dtype, device=payload.device)
    stored = tuple(1 if s == 0 else n for n, s in zip(shape, stride, strict=True))
    length = span(stored, stride)
    if length == flat.numel():
        return _reshaped(flat, shape, stride)
    # A slice with gaps: the gaps must exist, their content is nobody's.
    order = memory_order(stride)
    rebuilt = torch.empty(length, dtype=flat.dtype, device=flat.device)
    rebuilt.as_strided(stored, stride).permute(order).copy_(flat.view([stored[d] for d in order]))
    return _reshaped(rebuilt, shape, stride)


def _reshaped(flat: Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """The memory of ``flat`` as a tensor of its own: no view, so that it may be changed in place under autograd."""
    if is_fake(flat):  # it would be kept for ever
        return flat.as_strided(shape, stride)
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(
        flat.untyped_storage(), flat.storage_offset(), shape, stride
    )


# ---------------------------------------------------------------------------------------------------------------------
# Whether values fit


def _constant(value: bool, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.bool, device=like.device)


def _first_difference(flat: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Whether ``stored`` equals ``flat`` and a value of ``flat`` where it does not, slice by slice."""
    fits = _constant(True, flat)
    odd = flat.new_zeros(())
    for start in range(0, flat.numel(), _SLICE):
        part = flat[start : start + _SLICE]
        differs = stored[start : start + _SLICE].to(flat.dtype) != part
        if reading_is_free(flat) and not differs.any():
            continue
        first = differs.to(torch.uint8).argmax()
        odd = torch.where(fits.logical_and(differs[first]), part[first], odd)
        fits = fits.logical_and(differs[first].logical_not())
    return fits, odd


def describe_misfit(compressor: SpikeCompressor, where: str, value: object) -> str:
    """The sentence that names the place, the value and the remedy."""
    return _claim(compressor, where).describe(value)


def require_fit(compressed: Compressed, compressor: SpikeCompressor, where: str) -> None:
    """Raise if the payload is not exact: now on the CPU, elsewhere before the next optimizer step.

    Raises:
        NonBinarySpikeError: on the CPU, if a value does not fit.
    """
    require_exact(compressed.fits, compressed.odd, _claim(compressor, where))


def _claim(compressor: SpikeCompressor, where: str) -> Claim:
    what = getattr(compressor, "_what", "a value that does not survive the round trip")
    remedy = getattr(compressor, "_remedy", "use no compressor")
    return Claim(where, f"{type(compressor).__name__} cannot store {what}", remedy)
