"""
Tensors of one forward pass, by name
====================================

Every storage that the pass creates gets a number that is never used again, and is followed until it dies. So it is
known what is alive at any moment, and which tensors two regions share. What was alive before the pass (parameters,
buffers, the batch) has no number: it is there anyway.

Copies of weights that autocast makes live until the end of the forward, in its cache, and as long as somebody saved
them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_memopt.measuring.storage_trace import allocated_bytes
from lightning_memopt.observing.observe import storage_address
from lightning_memopt.ops.value_bounds import bounds_of, is_fake

# Values looked at before the whole tensor is.
_SAMPLE = 256


class Storages:
    """The storages that a pass creates on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Storages by number, and numbers by address.
        self._numbers: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._bits: dict[int, int] = {}
        self._elements: dict[int, int] = {}
        self._ends: dict[tuple[int, int], weakref.ref[Any]] = {}
        self._casts: dict[tuple[int, torch.dtype], int] = {}
        self.next = 0
        """The number of the next one."""
        self.alive: dict[int, int] = {}
        """Bytes of those alive."""
        self.alive_bytes = 0

    def rounded(self, size: int) -> int:
        """Bytes that the allocator hands out for a tensor of so many bytes."""
        return allocated_bytes(size, self._device)

    def new_number(self, size: int) -> int:
        """A number for something of ``size`` bytes that is no storage of the pass."""
        number, self.next = self.next, self.next + 1
        self._sizes[number] = size
        return number

    def of(self, tensor: Tensor) -> int | None:
        """The number of a storage that the pass created."""
        return self._numbers.get(storage_address(tensor))

    def size(self, storage: int) -> int:
        """Its bytes."""
        return self._sizes[storage]

    def bytes(self, storages: Iterable[int]) -> int:
        """Bytes of several."""
        return sum(map(self._sizes.__getitem__, storages))

    def look_at(self, storage: int, tensor: Tensor) -> int:
        """Find out the fewest bits that hold each element of a tensor that is saved."""
        if storage not in self._bits:
            self._bits[storage] = fewest_bits(tensor.detach())
            self._elements[storage] = tensor.numel()
        return self._bits[storage]

    def bits(self, storage: int) -> int:
        """The fewest bits that hold each of its elements, 0 if more than 8 or if nobody saved it."""
        return self._bits.get(storage, 0)

    def packed_size(self, storage: int) -> int:
        """Bytes of a packed copy of it."""
        return self.rounded(-(-self._elements[storage] * self._bits[storage] // 8))

    def standing(self) -> set[int]:
        """The storages that are alive now, without copies of weights."""
        return self.alive.keys() - set(self._casts.values())

    def knows(self, address: int) -> bool:
        """Whether there is one at this address."""
        return address in self._numbers

    def add(self, tensor: Tensor, weight: Tensor | None) -> None:
        """Follow a new storage; ``weight`` is what autocast made it of."""
        address = storage_address(tensor)
        key = None if weight is None else (id(weight), tensor.dtype)
        number = None if key is None else self._casts.get(key)
        if number is None:
            storage = tensor.untyped_storage()
            number = self.new_number(self.rounded(storage.nbytes()))
            if key is not None:
                self._casts[key] = number
            self.alive[number] = self._sizes[number]
            self.alive_bytes += self._sizes[number]
        self._numbers[address] = number

        def end(_: object) -> None:
            # The address may be given to another storage from now on.
            if self._numbers.get(address) == number:
                del self._numbers[address]
            # Autocast's cache keeps a copy of a weight until the forward ends; here it may have been cleared before.
            if key is None and number in self.alive:
                self.alive_bytes -= self.alive.pop(number)

        self._ends[number, address] = weakref.ref(tensor.untyped_storage(), end)

    def close(self) -> None:
        """Follow them no more."""
        self._ends.clear()


def cast_weight(func: Any, args: tuple[Any, ...], copy: Tensor) -> Tensor | None:
    """The weight of which autocast made ``copy`` and keeps it in its cache."""
    if func is not torch.ops.aten._to_copy.default or not torch.is_autocast_cache_enabled():
        return None
    weight: Tensor = args[0]
    if not (weight.is_leaf and weight.requires_grad and torch.is_autocast_enabled(weight.device.type)):
        return None
    return weight if copy.dtype == torch.get_autocast_dtype(weight.device.type) else None


def fewest_bits(tensor: Tensor) -> int:
    """The fewest bits of 1, 2, 4 and 8 that hold each element; 0 if no such number does.

    Elements are integers from 0 on, or zeros and one other value, which take 1 bit.

    Example:
        >>> [fewest_bits(torch.tensor(values)) for values in ([0.0, 3.0, 2.0], [0.0, 1.25], [0.5, 1.25])]
        [2, 1, 0]
    """
    if is_fake(tensor):
        known = bounds_of(tensor)
        return 0 if known is None else known.bits
    if tensor.dtype == torch.bool:
        return 1
    if tensor.is_complex() or tensor.numel() == 0 or tensor.is_meta or tensor.element_size() > 4:
        return 0
    pieces = tensor.flatten()[:_SAMPLE], tensor
    for piece in pieces:
        largest = float(piece.max())
        integers = bool((piece >= 0).all()) and (not piece.is_floating_point() or bool((piece == piece.floor()).all()))
        if not (integers and largest < 256):
            two_valued = largest > 0 and bool(((piece == 0) | (piece == largest)).all())
            if not two_valued:
                return 0
            if piece is tensor:
                return 1
    return next(bits for bits in (1, 2, 4, 8) if largest < 2**bits)
