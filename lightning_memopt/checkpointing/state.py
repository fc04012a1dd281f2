"""
What a region remembers between calls
=====================================

A checkpointed region runs twice: once in the forward pass and once more in the backward pass. Everything it remembers
between calls (membrane potentials, running statistics, counters, lists it appends to) must start from the same value
both times and must be written only once. This module finds that memory, takes note of it before the forward, puts it
back for the recomputation and afterwards restores what was there.

Where memory lives
------------------
One rule covers the libraries we know, because all of them keep state in one of three places of an ``nn.Module``:

* its buffers (snnTorch ``mem``/``syn``, sinabs ``v_mem``, normalisation statistics, any ``self.buf = ...``),
* its plain attributes (``self.v = ...``, counters, metric states),
* lists, dicts, sets and deques among these attributes (SpikingJelly keeps everything in a dict ``_memories``).

Norse passes its state in and out, so it needs nothing. Whatever keeps state elsewhere joins through
:class:`StateAdapter`.

What it costs
-------------
Reassigned state (almost every neuron) is noted by reference: no copy. State changed in place must be copied before it
changes, and we learn which that is: the first training call copies every tensor, later calls copy only those that did
change in place. The statistics of torch's own batch and instance norms are never copied: in training they are written
but not read, so the recomputation is given scratch buffers to write to.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

# Attributes every nn.Module has: structure, hooks and flags, not memory.
_MODULE_INTERNALS = frozenset(nn.Module().__dict__) | {"_compiled_call_impl", "_forward_hooks_always_called"}
REGION_ATTRIBUTE = "_memopt_region"
_NOT_MEMORY = _MODULE_INTERNALS | {REGION_ATTRIBUTE}

# A buffer that never changed is watched by its version counter. Up to this size we also keep one copy of it, so that a
# first change after many calls (a quantization observer that is switched on late) is still recomputed correctly.
_SHADOW_LIMIT_BYTES = 1 << 20


@runtime_checkable
class StateAdapter(Protocol):
    """How to read and write state that a module keeps outside its buffers and attributes.

    Register one with :func:`register_state_adapter`. ``read`` returns the current values by reference (no copies);
    ``write`` puts such values back. Values may be tensors of any shape and dtype, or any other object.

    Example:
        >>> from lightning_memopt.checkpointing import register_state_adapter
        >>> class Slotted(torch.nn.Module):
        ...     __slots__ = ("v",)
        >>> class SlottedAdapter:
        ...     def matches(self, module): return isinstance(module, Slotted)
        ...     def read(self, module): return {"v": getattr(module, "v", None)}
        ...     def write(self, module, state): object.__setattr__(module, "v", state["v"])
        >>> remove = register_state_adapter(SlottedAdapter())
        >>> remove()
    """

    def matches(self, module: nn.Module) -> bool: ...

    def read(self, module: nn.Module) -> Mapping[str, Any]: ...

    def write(self, module: nn.Module, state: Mapping[str, Any]) -> None: ...


_ADAPTERS: list[StateAdapter] = []


def register_state_adapter(adapter: StateAdapter) -> Any:
    """Make ``adapter`` known to every region; returns a function that removes it again.

    Raises:
        TypeError: if ``adapter`` lacks ``matches``, ``read`` or ``write``.
    """
    if not isinstance(adapter, StateAdapter):
        raise TypeError(
            f"register_state_adapter expects an object with matches(module), read(module) and write(module, state), "
            f"got {type(adapter).__name__}."
        )
    _ADAPTERS.append(adapter)

    def remove() -> None:
        if adapter in _ADAPTERS:
            _ADAPTERS.remove(adapter)

    return remove


# ---------------------------------------------------------------------------------------------------------------------
# Stores: the places of one module that hold memory


class _Store:
    """One mutable place (buffers, attributes, a list, ...) of one module, with its contents at the time of noting."""

    __slots__ = ("contents", "module", "name", "place")

    def __init__(self, module: nn.Module, name: tuple[str, ...], place: Any) -> None:
        self.module = module
        self.name = name
        self.place = place
        self.contents = self.read()

    def read(self) -> Any:
        place = self.place
        if isinstance(place, _Attributes):
            return place.read()
        if isinstance(place, dict):
            return dict(place)
        if isinstance(place, _MUTABLE):
            return list(place)
        if isinstance(place, torch.Generator):
            return place.get_state()
        return dict(place.read(self.module))

    def write(self, contents: Any) -> None:
        place = self.place
        if isinstance(place, _Attributes):
            place.write(contents)
        elif isinstance(place, dict):
            if place.keys() != contents.keys():
                place.clear()
            place.update(contents)
        elif isinstance(place, list):
            place[:] = contents
        elif isinstance(place, (set, deque)):
            place.clear()
            add: Any = place.update if isinstance(place, set) else place.extend
            add(contents)
        elif isinstance(place, torch.Generator):
            place.set_state(contents)
        else:
            place.write(self.module, contents)

    def entries(self) -> Iterable[tuple[Any, Any]]:
        contents = self.contents
        if isinstance(contents, dict):
            return contents.items()
        return () if isinstance(contents, Tensor) else enumerate(contents)


def _get(contents: Any, key: Any) -> Any:
    if isinstance(contents, dict):
        return contents.get(key)
    return contents[key] if key < len(contents) else None


class _Attributes:
    """A module's ``__dict__`` without what belongs to ``nn.Module`` itself."""

    __slots__ = ("owner",)

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def read(self) -> dict[str, Any]:
        return {k: v for k, v in self.owner.__dict__.items() if k not in _NOT_MEMORY}

    def write(self, contents: Mapping[str, Any]) -> None:
        attributes = self.owner.__dict__
        for key in [k for k in attributes if k not in _NOT_MEMORY and k not in contents]:
            del attributes[key]
        attributes.update(contents)


_MUTABLE = (list, dict, set, deque)
_SCALARS = (int, float, str, type(None))
_NESTED = (*_MUTABLE, torch.Generator)


def _is_stock_norm(module: nn.Module) -> bool:
    """Norms whose training forward writes running statistics but does not read them."""
    if not isinstance(module, _NormBase):
        return False
    origin = type(module).__module__
    return origin.startswith(("torch.nn.modules.", "spikingjelly."))


def _holds_no_memory(module: nn.Module) -> bool:
    """Layers of torch itself keep nothing between calls, unless a hook writes to them."""
    if not type(module).__module__.startswith("torch.nn.modules."):
        return False
    return not module._forward_pre_hooks and not module._forward_hooks


def _stores(module: nn.Module) -> list[_Store]:
    stores = []
    if module._buffers:
        stores.append(_Store(module, ("buffers",), module._buffers))
    attributes = _Store(module, (), _Attributes(module))
    if attributes.contents:
        stores.append(attributes)
        seen = {id(module._buffers)}
        for name, value in attributes.contents.items():
            if isinstance(value, _NESTED):
                _nested_stores(module, (name,), value, seen, stores)
    stores.extend(_Store(module, (type(a).__name__,), a) for a in _ADAPTERS if a.matches(module))
    return stores


def _nested_stores(module: nn.Module, name: tuple[str, ...], value: Any, seen: set[int], stores: list[_Store]) -> None:
    if isinstance(value, torch.Generator):
        stores.append(_Store(module, name, value))
    elif isinstance(value, _MUTABLE) and id(value) not in seen:
        seen.add(id(value))
        store = _Store(module, name, value)
        stores.append(store)
        for key, inner in store.entries():
            if isinstance(inner, _NESTED):
                _nested_stores(module, (*name, str(key)), inner, seen, stores)


# ---------------------------------------------------------------------------------------------------------------------
# What was learned about each tensor slot


@dataclass
class _Learned:
    """Slots of one module: which change in place, which are replaced, and copies of small ones that never changed."""

    mutated: set[tuple[Any, ...]] = field(default_factory=set)
    reassigned: set[tuple[Any, ...]] = field(default_factory=set)
    known: set[tuple[Any, ...]] = field(default_factory=set)
    shadows: dict[tuple[Any, ...], tuple[int, Tensor]] = field(default_factory=dict)


# Keyed by id, not by the module: the hash of a torchmetrics.Metric changes with its state.
_LEARNED: dict[int, _Learned] = {}


def _learned(module: nn.Module) -> _Learned:
    key = id(module)
    if key not in _LEARNED:
        _LEARNED[key] = _Learned()
        weakref.finalize(module, _LEARNED.pop, key, None)
    return _LEARNED[key]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _may_be_shadowed(tensor: Tensor) -> bool:
    return not tensor.requires_grad and tensor.nbytes <= _SHADOW_LIMIT_BYTES


@dataclass
class _Slot:
    """One tensor of a store at the time of noting."""

    store: _Store
    key: Any
    tensor: Tensor
    version: int
    copy: Tensor | None


class StateBefore:
    """The memory of some modules as it was before a region ran.

    Use :func:`note_state`, run the region, call :meth:`settle`; then :meth:`recomputing` gives a context in which the
    modules hold that memory again.
    """

    def __init__(self) -> None:
        self._stores: list[_Store] = []
        self._slots: list[_Slot] = []
        self._noted: set[int] = set()
        self._modules: list[nn.Module] = []
        self._training: list[bool] = []
        self._mutated: set[int] = set()
        self._holes: list[list[Any]] = []

    def note(self, modules: Iterable[nn.Module]) -> None:
        """Note the memory of ``modules`` that were not noted before."""
        for module in modules:
            if id(module) in self._noted:
                continue
            self._noted.add(id(module))
            self._modules.append(module)
            self._training.append(module.training)
            if _is_stock_norm(module) or _holds_no_memory(module):
                continue
            for store in _stores(module):
                self._stores.append(store)
                self._note_tensors(store)

    def has(self, module: nn.Module) -> bool:
        """Whether the memory of ``module`` was noted."""
        return id(module) in self._noted

    def _note_tensors(self, store: _Store) -> None:
        learned: _Learned | None = None
        for key, value in store.entries():
            if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
                continue
            learned = learned or _learned(store.module)
            name = (*store.name, key)
            version = _version(value)
            copy: Tensor | None = None
            if name in learned.mutated or name not in learned.known:
                copy = value.clone()
            elif name not in learned.reassigned and _may_be_shadowed(value):
                shadow = learned.shadows.get(name)
                if shadow is None or shadow[0] != version:
                    shadow = learned.shadows[name] = (version, value.clone())
                copy = shadow[1]
            self._slots.append(_Slot(store, key, value, version, copy))

    def settle(self) -> list[Tensor]:
        """Learn from what the region did; returns the tensors that autograd must keep for the recomputation.

        Raises:
            RuntimeError: if a large buffer changed in place for the first time after calls that left it alone.
        """
        now = {id(store): store.read() for store in self._stores}
        for slot in self._slots:
            name = (*slot.store.name, slot.key)
            learned = _learned(slot.store.module)
            if _version(slot.tensor) != slot.version:
                learned.mutated.add(name)
                learned.shadows.pop(name, None)
                if slot.copy is None:
                    raise RuntimeError(
                        f"{type(slot.store.module).__name__}.{'.'.join(map(str, name))} was changed in place inside a "
                        "checkpointed region for the first time, after calls that left it alone, and its earlier value "
                        "is gone. Nothing was learned from this step; run it again: the value is copied from now on."
                    )
                slot.store.contents[slot.key] = slot.copy
                self._mutated.add(id(slot.copy))
            elif _get(now[id(slot.store)], slot.key) is not slot.tensor:
                learned.reassigned.add(name)
                learned.shadows.pop(name, None)
            elif slot.copy is not None and _may_be_shadowed(slot.tensor):
                # A constant: its copy stands for it, whatever happens to it before the backward pass.
                learned.shadows[name] = (slot.version, slot.copy)
                slot.store.contents[slot.key] = _Shadow(slot.copy)
            learned.known.add(name)
        self._slots = []
        return self._detach_tensors()

    def _detach_tensors(self) -> list[Tensor]:
        """Take the tensors out of the noted contents, so that autograd alone keeps them (and may offload them)."""
        tensors: list[Tensor] = []
        for store in self._stores:
            contents, holes = store.contents, []
            for key, value in list(store.entries()):
                if isinstance(value, Tensor):
                    contents[key] = _TensorAt(len(tensors), changes=id(value) in self._mutated)
                    tensors.append(value)
                elif isinstance(value, _Shadow):
                    contents[key] = value.tensor
                    continue
                elif isinstance(value, tuple) and not all(isinstance(x, _SCALARS) for x in value):
                    leaves, spec = tree_flatten(value)
                    inside = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
                    if not inside:
                        continue
                    numbers = iter(range(len(tensors), len(tensors) + len(inside)))
                    marked = [_TensorAt(next(numbers), False) if isinstance(x, Tensor) else x for x in leaves]
                    contents[key] = _TupleAt(marked, spec)
                    tensors += inside
                else:
                    continue
                holes.append(key)
            self._holes.append(holes)
        return tensors

    def _contents(self, index: int, tensors: Sequence[Tensor]) -> Any:
        """The noted contents of one store, with its tensors back in place."""
        contents = self._stores[index].contents
        if not self._holes[index]:
            return contents
        contents = contents.copy()
        for key in self._holes[index]:
            contents[key] = contents[key].take(tensors)
        return contents

    @contextlib.contextmanager
    def recomputing(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Give the modules the noted memory; afterwards, whatever happens, what they hold now."""
        now = [(store, store.read()) for store in self._stores]
        modes = [(m, m.training) for m, mode in zip(self._modules, self._training, strict=True) if m.training != mode]
        norms: list[tuple[nn.Module, dict[str, Any]]] = []
        try:
            for module, mode in modes:
                module.training = not mode
            for i, store in enumerate(self._stores):
                store.write(self._contents(i, tensors))
            for module in self._modules:
                if _is_stock_norm(module) and module.training and module.track_running_stats:
                    norms.append((module, dict(module._buffers)))
                    _give_scratch_statistics(module)
            yield
        finally:
            for norm, buffers in norms:
                norm._buffers.update(buffers)
            for store, contents in now:
                store.write(contents)
            for module, mode in modes:
                module.training = mode


@dataclass(frozen=True)
class _TensorAt:
    """Stands for a tensor that autograd keeps; one that changes in place is copied, so that it can be used again."""

    index: int
    changes: bool

    def take(self, tensors: Sequence[Tensor]) -> Tensor:
        tensor = tensors[self.index]
        return tensor.clone() if self.changes else tensor


@dataclass(frozen=True)
class _TupleAt:
    """Stands for a tuple (an LSTM's hidden state, say) whose tensors autograd keeps."""

    leaves: list[Any]
    spec: TreeSpec

    def take(self, tensors: Sequence[Tensor]) -> Any:
        return tree_unflatten([x.take(tensors) if isinstance(x, _TensorAt) else x for x in self.leaves], self.spec)


@dataclass(frozen=True)
class _Shadow:
    """The copy of a constant tensor, which stands for it."""

    tensor: Tensor


def _give_scratch_statistics(norm: nn.Module) -> None:
    for name in ("running_mean", "running_var"):
        buffer = norm._buffers.get(name)
        if buffer is not None:
            norm._buffers[name] = torch.empty_like(buffer)
    tracked = norm._buffers.get("num_batches_tracked")
    if tracked is not None:
        # SyncBatchNorm insists on a counter; the other norms accept none, which saves a kernel.
        norm._buffers["num_batches_tracked"] = torch.zeros_like(tracked) if isinstance(norm, SyncBatchNorm) else None


def note_state(modules: Iterable[nn.Module]) -> StateBefore:
    """Note what ``modules`` remember, before a region runs."""
    before = StateBefore()
    before.note(modules)
    return before


# ---------------------------------------------------------------------------------------------------------------------
# Full snapshots, for code that runs steps which must leave no trace


@dataclass(frozen=True)
class StateSnapshot:
    """Everything a module and its submodules remember. Made by :func:`take_snapshot`."""

    _stores: tuple[_Store, ...]
    _copies: tuple[tuple[Tensor, int, Tensor], ...]


def take_snapshot(module: nn.Module, *, copy: bool = True) -> StateSnapshot:
    """Note buffers, neuron states, attributes and metric states of ``module`` and its submodules.

    Args:
        module: any module.
        copy: also copy the tensors' values (bytes: those of the state), so that changes in place can be undone.
    """
    stores: list[_Store] = []
    for submodule in module.modules():
        stores.extend(_stores(submodule))
    copies: dict[int, tuple[Tensor, int, Tensor]] = {}
    if copy:
        with torch.no_grad():
            for store in stores:
                for _, value in store.entries():
                    for leaf in tree_flatten(value)[0] if isinstance(value, tuple) else (value,):
                        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and id(leaf) not in copies:
                            copies[id(leaf)] = (leaf, _version(leaf), leaf.detach().clone())
    return StateSnapshot(tuple(stores), tuple(copies.values()))


def restore_snapshot(snapshot: StateSnapshot) -> None:
    """Put back what :func:`take_snapshot` noted: the same objects, holding the values they held."""
    for store in snapshot._stores:
        store.write(store.contents)
    for tensor, version, value in snapshot._copies:
        if _version(tensor) != version:
            tensor.detach().copy_(value)
