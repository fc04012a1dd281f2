"""
Tensors that autograd saves, in the fewest bits that hold them
==============================================================

While the forward of a region with the treatment ``pack`` runs, every tensor that autograd saves passes through
:meth:`SavedTensors.pack`. What it makes of a tensor is its *form*: an object that gives the value again.

* A tensor of small integers (masks, spikes, sums of spikes) becomes 1, 2, 4 or 8 bits an element, one of zeros and one
  other value (dropout's noise, spikes after dropout) 1 bit. Each storage is packed once, however many nodes save it or
  views of it.
* The output of a cheap part (``recompute_cheap``, see ``parts.py``) becomes a *recipe*: which call made it.
* Everything else stays as it is.

Hooks switch off autograd's own check for in-place changes, so every form does that check itself.

Who looks at values
-------------------
On the CPU reading is free: every tensor is looked at in every step. A sample of its values rules out almost all analog
tensors; one that passed the sample and then did not fit is tried again ever more rarely. On CUDA reading waits for the
device, so a *site* (the position in the order of saving) is looked at in the first calls only. From then on it is
packed without looking, and the check is read before the next optimizer step (see ``ops/exactness.py``).

A packed tensor that was still alive when the backward pass asked for it (the batch, a buffer) gained nothing by
packing: its site is stored as it is from then on.

Hooks around hooks
------------------
Only the innermost saved-tensor hooks see a tensor, so what a form holds is handed on to the hooks around the region
(CPU offload, say). Inside a region that is itself recomputed, these are torch's: they keep nothing in the forward, so
nothing is packed there; in the recomputation they are given a tensor without memory that stands for the form.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_memopt.checkpointing.arguments import (
    StorageWeakRef,
    share_payload,
    shared_payload,
)
from lightning_memopt.checkpointing.compressors import (
    BitSpikeCompressor,
    Compressed,
    IntegerSpikeCompressor,
    SpikeCompressor,
    SpikePayload,
)
from lightning_memopt.checkpointing.layout import is_dense, overlaps, span
from lightning_memopt.ops.bit_pack import PACKABLE_DTYPES
from lightning_memopt.ops.exactness import Claim, reading_is_free, require_exact
from lightning_memopt.ops.value_bounds import bounds_of, is_fake, is_plain

_COMPRESSORS: dict[int, SpikeCompressor] = {
    1: BitSpikeCompressor(),
    **{bits: IntegerSpikeCompressor(bits) for bits in (2, 4, 8)},
}
_SMALL = frozenset(range(256))
# Values looked at before a whole tensor is.
_SAMPLE = 64
# Where reading waits for the device: calls in which a site is looked at. Zeros alone prove little, so they count less.
_LOOKS, _LOOKS_AT_ZEROS = 2, 8
# Backward passes in a row that must find a packed tensor alive before its site is stored as it is, and calls after
# which it is tried again.
_ALIVE_PASSES, _ALIVE_CALLS = 2, 256
_LONGEST_PAUSE = 1024
# Tensors below this many bytes are not worth the calls.
_SMALLEST_BYTES = 4096


class Form(Protocol):
    """A saved tensor between forward and backward."""

    def value(self) -> Tensor:
        """The tensor: same values, shape and strides."""


@dataclass
class Site:
    """What was learned about one position in the order of saving."""

    bits: int | None = None
    """Bits that held every value so far; None for an analog tensor, and before the first look."""
    scale: float | None = None
    """The value that stands where a bit is set, if that is not 1."""
    looks: int = 0
    settled: bool = False
    """Whether values are no longer looked at (where reading waits for the device)."""
    misfits: int = 0
    pause: int = 0
    """Calls for which the site is stored as it is without trying."""
    alive: int = 0
    """Backward passes in a row that found the packed tensor still alive."""


class _ScaledBits(SpikeCompressor):
    """Zeros and one other value, in 1 bit an element."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def accepts(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and is_dense(tensor)

    def compress(self, tensor: Tensor) -> SpikePayload:
        payload: SpikePayload = self.compress_checked(tensor).payload
        return payload

    def compress_checked(self, tensor: Tensor) -> Compressed:
        # What is not to be set must be 0 (and NaN is not).
        marked = tensor != 0
        odd = tensor.new_zeros(())
        fits = (marked == (tensor == self.scale)).all()
        packed = _COMPRESSORS[1].compress_checked(marked).payload
        return Compressed(packed._replace(dtype=tensor.dtype, stride=tensor.stride()), fits, odd)

    def decompress(self, payload: SpikePayload) -> Tensor:
        return _COMPRESSORS[1].decompress(payload).mul_(self.scale)


# ---------------------------------------------------------------------------------------------------------------------
# Forms


class _Witness:
    """Notices in-place changes of a tensor without keeping its memory."""

    __slots__ = ("counter", "shape", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.version = tensor._version
        self.shape = tuple(tensor.shape)
        # An alias shares the version counter, and goes on sharing it when its memory is exchanged.
        self.counter = tensor.detach()
        self.counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def check(self) -> None:
        _check_version(self.counter, self.version, self.shape)


def _check_version(tensor: Tensor, version: int, shape: tuple[int, ...]) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {shape} is at version {tensor._version}; expected version {version} instead. It was saved "
            "inside a region whose activations are packed or partly recomputed."
        )


class Raw:
    """A tensor that is kept as it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, version: int) -> None:
        # An output that knows its own node would keep that node alive for ever.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = version

    def value(self) -> Tensor:
        _check_version(self.tensor, self.version, tuple(self.tensor.shape))
        return self.tensor


class Bits:
    """A tensor of small integers, packed."""

    __slots__ = ("__weakref__", "compressor", "data", "offset", "payload", "site", "source", "unpacked", "witness")

    def __init__(self, tensor: Tensor, compressor: SpikeCompressor, payload: SpikePayload, data: Form, site: Site):
        self.compressor = compressor
        self.payload: tuple[Any, ...] = payload[1:]
        self.data = data
        self.offset = int(tensor.storage_offset())
        self.witness = _Witness(tensor)
        # Holds the storage's record, so that its address cannot be mistaken for another's; not its memory.
        self.source = StorageWeakRef(tensor.untyped_storage())
        self.site: Site | None = site
        self.unpacked: weakref.ref[Tensor] | None = None

    def value(self) -> Tensor:
        self.witness.check()
        if self.site is not None:
            self.site.alive = 0 if self.source.expired() else self.site.alive + 1
            self.site = None
        tensor = None if self.unpacked is None else self.unpacked()
        if tensor is None:
            tensor = self.compressor.decompress(SpikePayload(self.data.value(), *self.payload))
            self.unpacked = weakref.ref(tensor)
        return tensor


@dataclass(frozen=True)
class _Held:
    """The data of a payload, where no hooks are around the region."""

    tensor: Tensor

    def value(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True)
class _Cast:
    """A tensor that has a form, in another dtype."""

    form: Form
    dtype: torch.dtype

    def value(self) -> Tensor:
        return self.form.value().to(self.dtype)


@dataclass(frozen=True)
class _View:
    """A view of a tensor that has a form."""

    form: Form
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def value(self) -> Tensor:
        tensor = self.form.value()
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


class _Enclosed:
    """What the hooks around the region made of a tensor, or of the tensor that stands for a form."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.packed = packed
        self.unpack = unpack

    def value(self) -> Tensor:
        tensor = self.unpack(self.packed)
        form: Form | None = getattr(tensor, "_memopt_form", None)
        return tensor if form is None else form.value()


def _standing_for(form: Form, tensor: Tensor) -> Tensor:
    """A tensor without memory that torch takes for ``tensor`` where it compares a recomputation with the forward."""
    token = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    token._memopt_form = form  # type: ignore[attr-defined]
    return token


# ---------------------------------------------------------------------------------------------------------------------
# Outputs that can be computed again


class Maker(Protocol):
    """A call whose outputs can be computed again."""

    recipes: list[weakref.ref[Recipe]]
    """Those that name one of its outputs, in the order in which they were made."""
    around: Any
    """What :attr:`SavedTensors.around` was."""

    def output(self, index: int) -> Tensor:
        """Output ``index``, computed again."""


@dataclass(frozen=True)
class _Known:
    """One output of a call, known while the tensor that owns its memory is alive."""

    owner: weakref.ref[Tensor]
    maker: weakref.ref[Maker]
    """Weak: the call is kept by its own nodes and by recipes. It knows its module, which may remember its outputs."""
    index: int
    version: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    span: int
    dense: bool
    device: torch.device

    def holds(self, tensor: Tensor) -> bool:
        """Whether the values of ``tensor`` are among those of the output."""
        if tensor._version != self.version:
            return False
        if (tensor.storage_offset(), tensor.shape, tensor.stride()) == (self.offset, self.shape, self.stride):
            return True
        start = tensor.storage_offset() - self.offset
        return self.dense and bool(0 <= start <= self.span - span(tensor.shape, tensor.stride()))


class Recipe:
    """An output that is computed again."""

    __slots__ = ("__weakref__", "index", "maker", "witness")

    def __init__(self, known: _Known, maker: Maker, tensor: Tensor, *, watch: bool) -> None:
        self.maker = maker
        self.index = known.index
        self.witness = _Witness(tensor) if watch else None
        self.maker.recipes.append(weakref.ref(self))

    def value(self) -> Tensor:
        if self.witness is not None:
            self.witness.check()
        return self.maker.output(self.index)


# Under this key the node that made a known output carries what is known of it.
_NODE_KEY = "lightning_memopt output"
# By the id of the tensor that owns the memory. The entry goes with that tensor, so a reused id finds nothing.
_KNOWN: dict[int, list[_Known]] = {}


def _owner(tensor: Tensor) -> Tensor:
    base = tensor._base
    return tensor if base is None else base


def know_output(tensor: Tensor, maker: Maker, index: int) -> None:
    """Remember, while ``tensor`` lives and stays unchanged, that ``maker`` can compute it again."""
    if not is_plain(tensor) or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return
    owner = _owner(tensor)
    key = id(owner)

    def forget(reference: weakref.ref[Tensor]) -> None:
        known = _KNOWN.get(key)
        if known is not None and known[0].owner is reference:
            del _KNOWN[key]

    known = _KNOWN.get(key)
    if known is None or known[0].owner() is not owner:
        known, reference = [], weakref.ref(owner, forget)
    else:
        reference = known[0].owner
        known = [entry for entry in known if entry.version == tensor._version]
    entry = _Known(
        owner=reference,
        maker=weakref.ref(maker),
        index=index,
        version=tensor._version,
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        span=span(tensor.shape, tensor.stride()),
        dense=is_dense(tensor),
        device=tensor.device,
    )
    known.append(entry)
    _KNOWN[key] = known
    node: Any = tensor.grad_fn
    if node is not None:
        node.metadata[_NODE_KEY, tensor.output_nr] = entry


def _known(tensor: Tensor, around: Any) -> tuple[_Known, Maker] | None:
    """What is known of ``tensor``, of calls under the same hooks.

    A region that is recomputed gets its inputs stored, so they are outputs of a known call the first time only.
    """
    owner = _owner(tensor)
    entries = _KNOWN.get(id(owner))
    if entries is None or entries[0].owner() is not owner or tensor.dtype != owner.dtype:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    for entry in entries:
        maker = entry.maker()
        if maker is not None and maker.around is around and entry.holds(tensor):
            return entry, maker
    return None


def _cast_of_known(tensor: Tensor, around: Any) -> Form | None:
    """The form of a copy in another dtype of a known output: autocast makes one for every product."""
    node: Any = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    maker_node, output_nr = node.next_functions[0]
    entry: _Known | None = None if maker_node is None else maker_node.metadata.get((_NODE_KEY, output_nr))
    if entry is None or entry.device != tensor.device:
        return None
    maker, owner = entry.maker(), entry.owner()
    # An output that is gone may have been changed before it was copied.
    if maker is None or maker.around is not around or owner is None or owner._version != entry.version:
        return None
    if not entry.dense or (entry.shape, entry.stride) != (tuple(tensor.shape), tensor.stride()):
        return None
    return _Cast(Recipe(entry, maker, tensor, watch=True), tensor.dtype)


def _recipe(known: _Known, maker: Maker, tensor: Tensor, *, watch: bool) -> Form:
    recipe = Recipe(known, maker, tensor, watch=watch)
    if (tensor.storage_offset(), tensor.shape, tensor.stride()) == (known.offset, known.shape, known.stride):
        return recipe
    return _View(recipe, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()) - known.offset)


# ---------------------------------------------------------------------------------------------------------------------
# One call of a region

# Packed storages in use. A form holds its storage's record, so the key of a living form cannot be reused.
_BITS: weakref.WeakValueDictionary[tuple[Any, ...], Bits] = weakref.WeakValueDictionary()
_WHOLE: weakref.WeakValueDictionary[tuple[Any, ...], Bits] = weakref.WeakValueDictionary()

top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
"""The saved-tensor hooks in force, as a pair; None where there are none, and in torch 2.6."""


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a tree of containers."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is tuple and all(isinstance(item, Tensor) for item in tree):
        return list(tree)
    return tree_leaves(tree)


def stored_bytes(tensor: Tensor) -> int:
    """About how many bytes ``tensor`` takes when it is saved in a region; 0 for a parameter. Reads some values."""
    if tensor.is_leaf and tensor.requires_grad:
        return 0
    if is_plain(tensor) and tensor.layout is torch.strided and tensor.device.type != "meta":
        if tensor.dtype is torch.bool:
            return tensor.numel() // 8
        sample = _sampled(tensor) if tensor.dtype in PACKABLE_DTYPES else None
        if sample is not None:
            return tensor.numel() * _bits_for(sample.largest) // 8
    return tensor.nbytes


class SavedTensors:
    """The tensors that autograd saves in one call of a region.

    Args:
        sites: what earlier calls of the region learned; it is added to.
        label: how errors call the region.
        arguments: those of the region: leaves among them (the batch) are taken to outlive the step.
    """

    def __init__(self, sites: dict[tuple[Any, ...], Site], label: str, arguments: Any) -> None:
        self._sites = sites
        self._label = label
        self._count = 0
        self._kept: dict[int, tuple[Any, int]] = {}
        self._leaves = [t for t in leaves_of(arguments) if isinstance(t, Tensor) and t.is_leaf]
        self.thread = threading.get_ident()
        # Not in torch 2.6: there, hooks around the region do not see what it stores.
        self._around: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = top_hooks(True)
        origin = "" if self._around is None else f"{self._around[0].__module__}.{self._around[0].__qualname__}"
        self._keeps_nothing = origin.startswith("torch.utils.checkpoint._checkpoint_hook.")
        self._recomputing = origin.startswith("torch.utils.checkpoint._recomputation_hook.")

    @property
    def around(self) -> Any:
        """The hooks around the region, None where there are none."""
        return None if self._around is None else self._around[0]

    @property
    def nested(self) -> bool:
        """Whether the region runs inside one that is recomputed: then both runs must save alike."""
        return self._keeps_nothing or self._recomputing

    def hooks(self) -> Any:
        """The context in which the region's forward runs."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, _value)

    def pack(self, tensor: Tensor) -> Form:
        """The form of ``tensor``, as it is now."""
        return self.keep(tensor, tensor._version)

    @torch.no_grad()
    def keep(self, tensor: Tensor, version: int) -> Form:
        """The form of ``tensor``, which was saved at ``version``."""
        self._count += 1
        if tensor.layout is torch.strided and tensor.device.type != "meta" and is_plain(tensor):
            self._kept[tensor.untyped_storage()._cdata] = (StorageWeakRef(tensor.untyped_storage()), version)
        if self._keeps_nothing:
            return self._hand_on(tensor)
        form = self._smaller_form(tensor) if tensor._version == version else None
        if self._recomputing:
            return self._hand_on(tensor if form is None else _standing_for(form, tensor))
        if form is not None:
            return form
        return Raw(tensor, version) if self._around is None else self._hand_on(tensor)

    def has_recipe(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is an output of a cheap part, or a view of one, and unchanged."""
        return _known(tensor, self.around) is not None

    @torch.no_grad()
    def keep_before_change(self, tensor: Tensor) -> Form | None:
        """The form of an output of a cheap part that is about to be changed in place; None where it is none."""
        known = _known(tensor, self.around)
        if known is None:
            return None
        self._count += 1
        if self._keeps_nothing:
            return self._hand_on(tensor)
        recipe = _recipe(*known, tensor, watch=False)
        return self._hand_on(_standing_for(recipe, tensor)) if self._recomputing else recipe

    def holds(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` was saved in this call already."""
        kept = self._kept.get(tensor.untyped_storage()._cdata)
        return kept is not None and not kept[0].expired() and kept[1] == tensor._version

    def is_standing(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is taken to be alive anyway."""
        # In a recomputation other tensors are leaves than in the forward.
        return not self.nested and any(leaf is tensor for leaf in self._leaves)

    def _hand_on(self, tensor: Tensor) -> _Enclosed:
        assert self._around is not None
        pack, unpack = self._around
        return _Enclosed(pack(tensor if tensor.is_leaf else tensor.detach()), unpack)

    def _smaller_form(self, tensor: Tensor) -> Form | None:
        if not is_plain(tensor) or tensor.layout is not torch.strided or tensor.device.type == "meta":
            return None  # parameters among them
        if (tensor.is_leaf and tensor.requires_grad) or isinstance(tensor._base, nn.Parameter):
            return None
        known = _known(tensor, self.around)
        packed = self._bits(tensor, most=8 if known is None else 1)
        if packed is not None:
            return packed
        return _cast_of_known(tensor, self.around) if known is None else _recipe(*known, tensor, watch=True)

    # -- packing ------------------------------------------------------------------------------------------------------

    def _bits(self, tensor: Tensor, most: int) -> Form | None:
        if tensor.dtype not in PACKABLE_DTYPES or tensor.nbytes < _SMALLEST_BYTES:
            return None
        site = self._site(tensor)
        if site.alive >= _ALIVE_PASSES:
            site.alive, site.pause = 0, _ALIVE_CALLS
        if site.pause > 0:
            site.pause -= 1
            return None
        shared = self._packed_before(tensor)
        if shared is not None:
            return shared
        if overlaps(tensor):
            return None
        compressed, compressor = self._compressed(tensor, site, most)
        if compressed is None:
            return None
        payload: SpikePayload = compressed.payload
        if payload.data.nbytes >= min(tensor.nbytes, tensor.untyped_storage().nbytes()):
            return None
        data: Form = _Held(payload.data) if self._around is None else self._held_around(payload.data)
        form = Bits(tensor, compressor, payload, data, site)
        key = self._storage_key(tensor)
        _BITS[(*key, *_geometry(tensor))] = form
        if tensor.nbytes == tensor.untyped_storage().nbytes() and not any(s < 0 for s in tensor.stride()):
            _WHOLE[key] = form
        return form

    def _held_around(self, data: Tensor) -> Form:
        return _Held(data) if self._recomputing else self._hand_on(data)

    def _storage_key(self, tensor: Tensor) -> tuple[Any, ...]:
        around = None if self._around is None or self._recomputing else id(self._around[0])
        return (tensor.untyped_storage()._cdata, tensor._version, tensor.dtype, around)

    def _packed_before(self, tensor: Tensor) -> Form | None:
        if not _BITS:
            return None
        key = self._storage_key(tensor)
        form = _BITS.get((*key, *_geometry(tensor)))
        if form is not None:
            return form
        whole = _WHOLE.get(key)
        if whole is None:
            return None
        return _View(whole, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()) - whole.offset)

    def _site(self, tensor: Tensor) -> Site:
        key = (self._count, tensor.dtype, tensor.dim())
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site()
        return site

    def _compressed(self, tensor: Tensor, site: Site, most: int) -> tuple[Compressed | None, SpikeCompressor]:
        """A payload that holds ``tensor``, or that will have been checked before the next optimizer step."""
        if tensor.dtype is torch.bool:
            return _compress(tensor, _COMPRESSORS[1]), _COMPRESSORS[1]
        if reading_is_free(tensor) or not site.settled:
            return self._look(tensor, site, most)
        if site.bits is None or site.bits > most:
            return None, _COMPRESSORS[1]
        compressor = _COMPRESSORS[site.bits] if site.scale is None else _ScaledBits(site.scale)
        if not compressor.accepts(tensor):
            return None, compressor
        compressed = _compress(tensor, compressor)
        where = f"Saved tensor {self._count} of {self._label} (shape {tuple(tensor.shape)})"
        require_exact(compressed.fits, compressed.odd, _SiteClaim.of(site, where))
        return compressed, compressor

    def _look(self, tensor: Tensor, site: Site, most: int) -> tuple[Compressed | None, SpikeCompressor]:
        """Read values and find the fewest bits that hold them."""
        if is_fake(tensor):
            return self._known_to_fit(tensor, most)
        sample = _sampled(tensor)
        tried = False
        bits = 9 if sample is None or sample.scale is not None else max(site.bits or 1, _bits_for(sample.largest))
        scale = None if sample is None else sample.scale
        while bits <= most and bits < 8 * tensor.element_size():
            tried = True
            compressor = _COMPRESSORS[bits]
            compressed = _compress(tensor, compressor)
            if compressed.fits:
                site.bits, site.scale = bits, None
                self._looked(tensor, site, zeros=bits == 1 and sample is not None and sample.largest == 0)
                return compressed, compressor
            odd = compressed.odd.item()
            if odd not in _SMALL:
                scale = odd if bits == 1 else None
                break
            # A wider one only if that value would fit.
            bits = max(2 * bits, _bits_for(odd))
        if scale is not None and scale > 0 and (scaled := _ScaledBits(scale)).accepts(tensor):
            tried = True
            compressed = _compress(tensor, scaled)
            if compressed.fits:
                site.bits, site.scale = 1, scale
                self._looked(tensor, site, zeros=False)
                return compressed, scaled
        if tried:
            site.misfits += 1
            site.pause = min(2**site.misfits, _LONGEST_PAUSE)
        if not reading_is_free(tensor):
            site.settled, site.bits = True, None
        return None, _COMPRESSORS[1]

    def _known_to_fit(self, tensor: Tensor, most: int) -> tuple[Compressed | None, SpikeCompressor]:
        """For a tensor without values: in the bits that the operations which made it say."""
        bounds = bounds_of(tensor)
        if bounds is None or bounds.bits > most or bounds.bits >= 8 * tensor.element_size():
            return None, _COMPRESSORS[1]
        compressor = _ScaledBits(1.0) if bounds.scaled else _COMPRESSORS[bounds.bits]
        return (_compress(tensor, compressor) if compressor.accepts(tensor) else None), compressor

    def _looked(self, tensor: Tensor, site: Site, zeros: bool) -> None:
        if not reading_is_free(tensor):
            site.looks += _LOOKS_AT_ZEROS // _LOOKS if not zeros or bool(tensor.any()) else 1
            site.settled = site.looks >= _LOOKS_AT_ZEROS


class _SiteClaim(Claim):
    """That a site holds small integers. Where it turns out wrong, the site is stored as it is from then on."""

    site: Site

    @classmethod
    def of(cls, site: Site, where: str) -> _SiteClaim:
        bits = site.bits or 1
        held = f"integers from 0 to {2**bits - 1}" if site.scale is None else f"0 and {site.scale} alone"
        excludes = f"it held {held} until now and was stored in {bits} bits"
        claim = cls(where, excludes, "run this step again, the tensor is stored as it is from now on")
        claim.site = site
        return claim

    def describe(self, value: object) -> str:
        self.site.bits = None
        return super().describe(value)


def saved_in_call(sites: dict[tuple[Any, ...], Site], label: str, arguments: Any) -> SavedTensors:
    """Where a call of a region stores what autograd saves: in one region inside another, that of the outer one."""
    around = top_hooks(True)
    outer = None if around is None else getattr(around[0], "__self__", None)
    if isinstance(outer, SavedTensors) and outer.thread == threading.get_ident():
        return outer
    return SavedTensors(sites, label, arguments)


def _value(form: Form) -> Tensor:
    return form.value()


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _compress(tensor: Tensor, compressor: SpikeCompressor) -> Compressed:
    shared = shared_payload(tensor, compressor)
    if shared is not None:
        fits = torch.ones((), dtype=torch.bool, device=tensor.device)
        return Compressed(tree_unflatten(shared[0], shared[1]), fits, fits)
    compressed = compressor.compress_checked(tensor.detach())
    if is_fake(tensor) or (reading_is_free(tensor) and compressed.fits):
        share_payload(tensor, compressor, tree_flatten(compressed.payload))
    return compressed


def _bits_for(value: float) -> int:
    """The fewest bits of 1, 2, 4 and 8 that hold an integer from 0 to 255."""
    return 1 if value <= 1 else 2 if value <= 3 else 4 if value <= 15 else 8


class _Sample(NamedTuple):
    """What some values of a tensor say about all of them."""

    largest: int
    scale: float | None


def _sampled(tensor: Tensor) -> _Sample | None:
    """Look at some values; None where no number of bits would hold them."""
    if tensor.numel() == 0:
        return None
    if is_fake(tensor):
        bounds = bounds_of(tensor)
        return None if bounds is None else _Sample(bounds.largest, None)
    first = tensor.storage_offset()
    elements = min(
        span(tensor.shape, tensor.stride()), tensor.untyped_storage().nbytes() // tensor.element_size() - first
    )
    count = min(_SAMPLE, elements)
    values = tensor.as_strided((count,), (elements // count,), first).tolist()
    largest, scale = 0, None
    for value in values:
        if value in _SMALL and (scale is None or not value):
            largest = max(largest, int(value))
        elif largest == 0 and (scale is None or value == scale):
            scale = value
        else:
            return None
    return _Sample(largest, scale)
