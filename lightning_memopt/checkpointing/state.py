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
change in place, for example the statistics of batch norms, all of a region in one call. Other buffers are never copied
again. In a region of library layers alone not even statistics are copied: there they are written in training but read
by nobody, so the recomputation is given scratch buffers to write to.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

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
        if _is_array(place):
            return place.copy()
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
        elif _is_array(place):
            place[...] = contents
        else:
            place.write(self.module, contents)

    def entries(self) -> Iterable[tuple[Any, Any]]:
        contents = self.contents
        if isinstance(contents, dict):
            return contents.items()
        return enumerate(contents) if isinstance(contents, list) else ()


def _get(contents: Any, key: Any) -> Any:
    if isinstance(contents, dict):
        return contents.get(key)
    return contents[key] if key < len(contents) else None


class _ShadowCopy(NamedTuple):
    """A copy of a small tensor that did not change: of which tensor, and of which version of it."""

    source: weakref.ref[Tensor]
    version: int
    copy: Tensor

    def holds(self, tensor: Tensor) -> bool:
        return self.source() is tensor and self.version == _version(tensor)


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
_ATOMS = (bool, int, float, str, tuple, Tensor, torch.dtype, torch.device, nn.Module)
# How deep attributes of attributes are followed.
_DEPTH = 3
_FRAMEWORKS = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "numpy"})


def _holds_no_memory(module: nn.Module) -> bool:
    """Layers of torch itself keep nothing between calls but running statistics, unless a hook writes to them."""
    if not type(module).__module__.startswith("torch.nn.modules."):
        return False
    if isinstance(module, _NormBase) and module._buffers:
        return False
    return not module._forward_pre_hooks and not module._forward_hooks


def _is_foreign(value: Any) -> bool:
    """A user's own object, whose attributes may be state; not one of a framework or the standard library."""
    package = type(value).__module__.partition(".")[0]
    if package in _FRAMEWORKS or (package in sys.stdlib_module_names and package != "__main__"):
        return False
    return hasattr(value, "__dict__") and not isinstance(value, type)


def _is_array(value: Any) -> bool:
    """A NumPy array small enough to be copied each time: it has no version to watch."""
    cls = type(value)
    return cls.__module__ == "numpy" and cls.__name__ == "ndarray" and value.nbytes <= _SHADOW_LIMIT_BYTES


def _stores(module: nn.Module) -> list[_Store]:
    stores = []
    if module._buffers:
        stores.append(_Store(module, ("buffers",), module._buffers))
    attributes = _Store(module, (), _Attributes(module))
    if attributes.contents:
        stores.append(attributes)
        seen = {id(module._buffers)}
        for name, value in attributes.contents.items():
            _nested_stores(module, (name,), value, seen, stores)
    stores.extend(_Store(module, (type(a).__name__,), a) for a in _ADAPTERS if a.matches(module))
    return stores


def _nested_stores(module: nn.Module, name: tuple[str, ...], value: Any, seen: set[int], stores: list[_Store]) -> None:
    if value is None or isinstance(value, _ATOMS):
        return
    if isinstance(value, torch.Generator) or _is_array(value):
        stores.append(_Store(module, name, value))
        return
    if isinstance(value, _MUTABLE):
        place = value
    elif len(name) <= _DEPTH and _is_foreign(value):
        place = value.__dict__
    else:
        return
    if id(place) not in seen:
        seen.add(id(place))
        store = _Store(module, name, place)
        stores.append(store)
        for key, inner in store.entries():
            _nested_stores(module, (*name, str(key)), inner, seen, stores)


# ---------------------------------------------------------------------------------------------------------------------
# What was learned about each tensor slot


@dataclass
class _Learned:
    """Slots of one module: which change in place, which are replaced, and copies of small ones that never changed."""

    mutated: set[tuple[Any, ...]] = field(default_factory=set)
    reassigned: set[tuple[Any, ...]] = field(default_factory=set)
    known: set[tuple[Any, ...]] = field(default_factory=set)
    shadows: dict[tuple[Any, ...], _ShadowCopy] = field(default_factory=dict)


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
    copy: Tensor | None = None
    wants_copy: bool = False

    def was_changed(self, look: bool) -> bool:
        """Whether the tensor changed in place; ``look`` at its values too, for not every write counts a version."""
        if _version(self.tensor) != self.version:
            return True
        return look and self.copy is not None and not torch.equal(self.tensor.detach(), self.copy.detach())


def _copy(slots: list[_Slot]) -> None:
    """Copy the tensors of ``slots``: those without gradients all in one call for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[_Slot]] = {}
    for slot in slots:
        tensor = slot.tensor
        if tensor.requires_grad or type(tensor) is not Tensor or tensor.is_complex() or tensor.dtype == torch.bool:
            slot.copy = tensor.clone()
        else:
            groups.setdefault((tensor.device, tensor.dtype), []).append(slot)
    for group in groups.values():
        # Times one is an exact copy, signed zeros included, and takes one kernel for the whole group.
        copies = torch._foreach_mul([slot.tensor for slot in group], 1)
        for slot, copy in zip(group, copies, strict=True):
            slot.copy = copy


class StateBefore:
    """The memory of some modules as it was before a region ran.

    :meth:`note` it, run the region, call :meth:`settle`; then :meth:`recomputing` gives a context in which the
    modules hold that memory again.
    """

    def __init__(self, *, reads_statistics: bool = True) -> None:
        self._reads_statistics = reads_statistics
        self._stores: list[_Store] = []
        self._slots: list[_Slot] = []
        self._noted: set[int] = set()
        self._modules: list[nn.Module] = []
        self._training: list[bool] = []
        self._mutated: set[int] = set()
        self._constant: dict[int, _ShadowCopy] = {}
        self._holes: list[list[Any]] = []

    def note(self, modules: Iterable[nn.Module]) -> None:
        """Note the memory of ``modules`` that were not noted before."""
        first = len(self._slots)
        for module in modules:
            if id(module) in self._noted:
                continue
            self._noted.add(id(module))
            self._modules.append(module)
            self._training.append(module.training)
            if _holds_no_memory(module) or self._writes_only(module):
                continue
            for store in _stores(module):
                self._stores.append(store)
                self._note_tensors(store)
        _copy([slot for slot in self._slots[first:] if slot.wants_copy])

    def _writes_only(self, module: nn.Module) -> bool:
        """Whether ``module`` is a norm whose statistics are written and not read."""
        if self._reads_statistics or not isinstance(module, _NormBase):
            return False
        return not module._forward_pre_hooks and not module._forward_hooks

    def has(self, module: nn.Module) -> bool:
        """Whether the memory of ``module`` was noted."""
        return id(module) in self._noted

    def read(self) -> list[Any]:
        """What the noted places hold now."""
        return [store.read() for store in self._stores]

    def _note_tensors(self, store: _Store) -> None:
        learned: _Learned | None = None
        for key, value in store.entries():
            if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
                continue
            learned = learned or _learned(store.module)
            name = (*store.name, key)
            slot = _Slot(store, key, value, _version(value))
            if name in learned.mutated or name not in learned.known:
                slot.wants_copy = True
            elif name not in learned.reassigned and _may_be_shadowed(value):
                shadow = learned.shadows.get(name)
                if shadow is None:
                    slot.wants_copy = True
                elif shadow.holds(value):
                    slot.copy = shadow.copy
                elif shadow.source() is value:
                    slot.wants_copy = True
                else:
                    # Replaced from outside: from now on it is noted by reference.
                    learned.reassigned.add(name)
                    del learned.shadows[name]
            self._slots.append(slot)

    def settle(self) -> list[Tensor]:
        """Learn from what the region did; returns the tensors that autograd must keep for the recomputation.

        Raises:
            RuntimeError: if a large buffer changed in place for the first time after calls that left it alone.
        """
        now = {id(store): store.read() for store in self._stores}
        for slot in self._slots:
            name = (*slot.store.name, slot.key)
            learned = _learned(slot.store.module)
            if name in learned.mutated or slot.was_changed(look=name not in learned.known):
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
                shadow = learned.shadows[name] = _ShadowCopy(weakref.ref(slot.tensor), slot.version, slot.copy)
                slot.store.contents[slot.key] = slot.copy
                self._constant[id(slot.copy)] = shadow
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
                    mark = id(value)
                    contents[key] = _TensorAt(len(tensors), mark in self._mutated, self._constant.get(mark))
                    tensors.append(value)
                elif isinstance(value, tuple) and not all(isinstance(x, _SCALARS) for x in value):
                    leaves, spec = tree_flatten(value)
                    inside = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
                    if not inside:
                        continue
                    numbers = iter(range(len(tensors), len(tensors) + len(inside)))
                    marked = [_TensorAt(next(numbers)) if isinstance(x, Tensor) else x for x in leaves]
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
        norms: list[tuple[nn.Module, dict[str, Any]]] = []
        modes = [(m, m.training) for m, mode in zip(self._modules, self._training, strict=True) if m.training != mode]
        try:
            for module, mode in modes:
                module.training = not mode
            for i, store in enumerate(self._stores):
                store.write(self._contents(i, tensors))
            for module in self._modules:
                if self._writes_only(module) and module.training and module.track_running_stats:
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
    """Stands for a tensor that autograd keeps. One that changes in place is copied, so that it can be used again; of a
    constant the original is taken, unless it changed since.
    """

    index: int
    changes: bool = False
    shadow: _ShadowCopy | None = None

    def take(self, tensors: Sequence[Tensor]) -> Tensor:
        if self.shadow is not None:
            source = self.shadow.source()
            if source is not None and self.shadow.holds(source):
                return source
        tensor = tensors[self.index]
        return tensor.clone() if self.changes else tensor


@dataclass(frozen=True)
class _TupleAt:
    """Stands for a tuple (an LSTM's hidden state, say) whose tensors autograd keeps."""

    leaves: list[Any]
    spec: TreeSpec

    def take(self, tensors: Sequence[Tensor]) -> Any:
        return tree_unflatten([x.take(tensors) if isinstance(x, _TensorAt) else x for x in self.leaves], self.spec)


def _give_scratch_statistics(norm: nn.Module) -> None:
    for name in ("running_mean", "running_var"):
        buffer = norm._buffers.get(name)
        if buffer is not None:
            norm._buffers[name] = torch.empty_like(buffer)
    tracked = norm._buffers.get("num_batches_tracked")
    if tracked is not None:
        # SyncBatchNorm insists on a counter; the other norms accept none, which saves a kernel.
        norm._buffers["num_batches_tracked"] = torch.zeros_like(tracked) if isinstance(norm, SyncBatchNorm) else None


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
    for submodule in _with_hidden_modules(module):
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


def _with_hidden_modules(root: nn.Module) -> list[nn.Module]:
    """The modules of ``root`` and those it keeps in plain lists, dicts and the like, where torch does not see them."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    pending: list[Any] = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, nn.Module):
            for module in value.modules():
                if id(module) not in found:
                    found[id(module)] = module
                    held = [v for k, v in module.__dict__.items() if k not in _NOT_MEMORY]
                    pending += [v for v in held if isinstance(v, (*_MUTABLE, tuple))]
        elif isinstance(value, (*_MUTABLE, tuple)) and id(value) not in seen:
            seen.add(id(value))
            inner = value.values() if isinstance(value, dict) else value
            pending += [v for v in inner if isinstance(v, (nn.Module, *_MUTABLE, tuple))]
    return list(found.values())


def restore_snapshot(snapshot: StateSnapshot) -> None:
    """Put back what :func:`take_snapshot` noted: the same objects, holding the values they held."""
    for store in snapshot._stores:
        store.write(store.contents)
    for tensor, version, value in snapshot._copies:
        # Batch norm writes its running statistics without counting a version.
        if _version(tensor) != version or not torch.equal(tensor.detach(), value):
            tensor.detach().copy_(value)
