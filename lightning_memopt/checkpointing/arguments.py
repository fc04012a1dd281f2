"""
The arguments of a region between forward and backward
======================================================

Each tensor argument is stored once: as a payload where the region's compressor holds it exactly, else as it is. Regions
that are given the same tensor share its payload. Arguments that are no tensors are kept by reference.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_memopt.checkpointing.compressors import SpikeCompressor, describe_misfit, require_fit
from lightning_memopt.checkpointing.region import Region
from lightning_memopt.ops.exactness import reading_is_free
from lightning_memopt.ops.value_bounds import bounds_of, is_fake, is_plain

# Untyped in torch.
StorageWeakRef: Any = reductions.StorageWeakRef

# Tensors below this many bytes are not worth a compressor's calls.
_SMALLEST_PACKED_BYTES = 64


class StoredArguments:
    """The arguments of one call, in the form in which they wait for the backward pass.

    ``tensors`` are those that autograd has to keep; :meth:`rebuild` takes them in the same order.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> None:
        leaves, self._spec = tree_flatten((args, kwargs))
        self.tensors: list[Tensor] = []
        self.devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
        # What is no tensor is kept by reference.
        self.others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self._label = region.label
        self._versions: list[tuple[Tensor, int]] = []
        self._leaves: list[Any] = []
        allowed = _allowed_leaves(region, args, kwargs) if region.compressor is not None else None
        seen: dict[int, int] = {}
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                self._leaves.append(leaf)
            elif (first := seen.setdefault(id(leaf), index)) != index:
                self._leaves.append(_Same(first))
            else:
                may_pack = region.compressor is not None and (allowed is None or index in allowed)
                self._leaves.append(self._store(index, leaf, region, may_pack))

    def _store(self, index: int, tensor: Tensor, region: Region, may_pack: bool) -> _Raw | _Packed:
        if may_pack and region.compressor is not None:
            packed = _pack(index, tensor, region.compressor, region, self.tensors)
            if packed is not None:
                return packed
        self.tensors.append(tensor)
        if not tensor.is_inference():
            self._versions.append((tensor, tensor._version))
        return _Raw(len(self.tensors) - 1)

    def settle(self) -> list[Tensor]:
        """After the forward: check that no argument changed, and hand over the tensors to be kept.

        Raises:
            RuntimeError: if an argument that is stored as it is was changed in place.
        """
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"{self._label} changes an input of shape {tuple(tensor.shape)} in place, so that it cannot be "
                    "recomputed from it. Make the first operation out-of-place (for example ReLU(inplace=False)) or "
                    "leave this region unchanged."
                )
        tensors = self.tensors
        self.tensors, self._versions = [], []
        return tensors

    def rebuild(self, kept: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments again: same values, shapes, strides, and the same object wherever it was the same."""
        leaves: list[Any] = []
        for leaf in self._leaves:
            if isinstance(leaf, _Raw):
                leaves.append(kept[leaf.index])
            elif isinstance(leaf, _Packed):
                leaves.append(leaf.unpack(kept))
            else:
                leaves.append(leaves[leaf.position] if isinstance(leaf, _Same) else leaf)
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs


@dataclass(frozen=True)
class _Raw:
    """Stands for an argument that is kept as it is."""

    index: int


@dataclass(frozen=True)
class _Same:
    """Stands for an argument that is the same object as an earlier one, and must be again (attention looks at this)."""

    position: int


@dataclass(frozen=True)
class _Packed:
    """Stands for an argument that is kept as a payload."""

    compressor: SpikeCompressor
    leaves: tuple[Any, ...]
    spec: TreeSpec
    requires_grad: bool

    def unpack(self, kept: Sequence[Tensor]) -> Tensor:
        payload = tree_unflatten(
            [kept[leaf.index] if isinstance(leaf, _Raw) else leaf for leaf in self.leaves], self.spec
        )
        if not self.requires_grad:
            return self.compressor.decompress(payload)
        with torch.no_grad():
            tensor = self.compressor.decompress(payload)
        return as_result(tensor)


class _Result(torch.autograd.Function):
    """Makes a tensor the result of an operation."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: list[Tensor]) -> Tensor:
        return box[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


def as_result(tensor: Tensor) -> Tensor:
    """The memory of ``tensor`` as a result, not a leaf: a region may change it in place as in the forward."""
    result: Tensor = _Result.apply(torch.empty(0, requires_grad=True), [tensor.detach()])
    return result


def _allowed_leaves(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int] | None:
    """The leaves that belong to ``compressed_args``; None where every argument may be packed."""
    if region.compressed_args is None:
        return None
    allowed: set[int] = set()
    start = 0
    for name, value in [*enumerate(args), *kwargs.items()]:
        count = 1 if isinstance(value, Tensor) else len(tree_flatten(value)[0])
        if name in region.compressed_args:
            allowed.update(range(start, start + count))
        start += count
    return allowed


def _pack(
    index: int, tensor: Tensor, compressor: SpikeCompressor, region: Region, tensors: list[Tensor]
) -> _Packed | None:
    """A payload for ``tensor``, its parts added to ``tensors``; or None where it is to be kept as it is."""
    facts, label = region.facts, region.label
    binary = facts.packable.get(index)
    if binary is None and region.compressed_args is not None:
        binary = True
    if (
        binary is False
        or not is_plain(tensor)
        or (is_fake(tensor) and not _known_to_fit(tensor, compressor))
        or tensor.layout is not torch.strided
        or tensor.nbytes < _SMALLEST_PACKED_BYTES
        or tensor.device.type == "meta"
        or not compressor.accepts(tensor)
    ):
        return None
    shared = shared_payload(tensor, compressor)
    if shared is None:
        with torch.no_grad():
            compressed = compressor.compress_checked(tensor.detach())
        if is_fake(tensor):
            pass
        elif binary is None or reading_is_free(tensor):
            # Until a region's inputs are known, and wherever reading costs nothing, the answer is read at once.
            if not compressed.fits:
                facts.packable[index] = False
                if binary:
                    where = f"Input {index} of {label}"
                    warnings.warn(
                        describe_misfit(compressor, where, compressed.odd.item())
                        + " It is stored as it is from now on.",
                        stacklevel=2,
                    )
                return None
            # Zeros alone prove nothing: ask again at the next call.
            if binary is None and tensor.detach().any():
                facts.packable[index] = True
        else:
            require_fit(compressed, compressor, f"input {index} of {label}")
        shared = tree_flatten(compressed.payload)
        if _payload_bytes(shared[0]) >= min(tensor.nbytes, tensor.untyped_storage().nbytes()):
            facts.packable[index] = False
            return None
        share_payload(tensor, compressor, shared)
    leaves = []
    for leaf in shared[0]:
        if isinstance(leaf, Tensor):
            leaves.append(_Raw(len(tensors)))
            tensors.append(leaf)
        else:
            leaves.append(leaf)
    return _Packed(compressor, tuple(leaves), shared[1], tensor.requires_grad)


def _known_to_fit(tensor: Tensor, compressor: SpikeCompressor) -> bool:
    """Whether a tensor without values is known to fit from the operations that made it."""
    bounds = bounds_of(tensor)
    return bounds is not None and not bounds.scaled and bounds.bits <= getattr(compressor, "bits", 0)


def _payload_bytes(leaves: list[Any]) -> int:
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


# Payloads in use, found by the storage they were made from. Both sides are weak: a payload lives as long as autograd
# or the tensor that it was offered for keeps it, and a reused address cannot be mistaken for it, because the storage's
# own record is held.
_PAYLOADS: dict[tuple[Any, ...], tuple[StorageWeakRef, list[Any], TreeSpec]] = {}
_PAYLOADS_SWEEP_AT = [64]


def _payload_key(tensor: Tensor, storage: StorageWeakRef, compressor: SpikeCompressor) -> tuple[Any, ...]:
    geometry = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return (storage.cdata, *geometry, tensor._version, type(compressor), compressor)


def shared_payload(tensor: Tensor, compressor: SpikeCompressor) -> tuple[list[Any], TreeSpec] | None:
    """The flattened payload that ``compressor`` made of this very tensor, if it is still in use."""
    if not _PAYLOADS or tensor.is_inference():
        return None
    entry = _PAYLOADS.get(_payload_key(tensor, StorageWeakRef(tensor.untyped_storage()), compressor))
    if entry is None or entry[0].expired():
        return None
    leaves = [leaf() if isinstance(leaf, weakref.ref) else leaf for leaf in entry[1]]
    alive = all(now is not None or then is None for now, then in zip(leaves, entry[1], strict=True))
    return (leaves, entry[2]) if alive else None


def offer_payload(tensor: Tensor, compressor: SpikeCompressor, payload: Any) -> None:
    """Let a region that is given ``tensor`` itself store a payload that is there already, in place of its own.

    Args:
        tensor: what will be stored. It holds the payload as long as it lives; a change of it in place ends the offer,
            if autograd can see it (not one through ``tensor.data`` or another library's view of the memory).
        compressor: the payload is one of this compressor, and exact.
        payload: what ``compressor.compress(tensor)`` would return.
    """
    leaves, spec = tree_flatten(payload)
    tensor._offered_payload = leaves  # type: ignore[attr-defined]
    share_payload(tensor, compressor, (leaves, spec))


def share_payload(tensor: Tensor, compressor: SpikeCompressor, payload: tuple[list[Any], TreeSpec]) -> None:
    """Let others that store ``tensor`` find its flattened payload, as long as that is in use."""
    if tensor.is_inference():
        return
    storage = StorageWeakRef(tensor.untyped_storage())
    weak = [weakref.ref(leaf) if isinstance(leaf, Tensor) else leaf for leaf in payload[0]]
    _PAYLOADS[_payload_key(tensor, storage, compressor)] = (storage, weak, payload[1])
    if len(_PAYLOADS) > _PAYLOADS_SWEEP_AT[0]:
        for key, (source, leaves, _) in list(_PAYLOADS.items()):
            if source.expired() or any(isinstance(leaf, weakref.ref) and leaf() is None for leaf in leaves):
                del _PAYLOADS[key]
        _PAYLOADS_SWEEP_AT[0] = 2 * len(_PAYLOADS) + 64
