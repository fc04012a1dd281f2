"""
What a region remembers between calls
=====================================

A checkpointed region runs twice: once in the forward pass and once more in the backward pass. Everything it remembers
between calls (membrane potentials, running statistics, counters, lists it appends to) must start from the same value
both times and must be written only once. This module takes note of that memory (``stores.py`` says where it lies)
before the forward, puts it back for the recomputation and afterwards restores what was there.

What it costs
-------------
Reassigned state (almost every neuron) is noted by reference: no copy. State changed in place must be copied before it
changes, and we learn which that is: the first training call copies every tensor, later calls copy only those that did
change in place, for example the statistics of batch norms, all of a region in one call. Other buffers are never copied
again. In a region of library layers alone not even statistics are copied: there they are written in training but read
by nobody, so the recomputation is given scratch buffers to write to.

Parameters are kept by reference and copied only where the forward itself writes to them (weights clamped to a norm),
which the first call finds out. A weight that changes between forward and backward is an error, as it is in autograd.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from lightning_memopt.checkpointing.stores import (
    Store,
    entries,
    entry,
    holds_scalars,
    may_remember,
    parameter_store,
    stores_of,
    stores_of_object,
    tuple_leaves,
    with_hidden_modules,
)
from lightning_memopt.ops.exactness import reading_is_free
from lightning_memopt.ops.value_bounds import is_fake

# A buffer that never changed is watched by its version counter. Up to this size we also keep one copy of it, so that a
# first change after many calls (a quantization observer that is switched on late) is still recomputed correctly.
_SHADOW_LIMIT_BYTES = 1 << 20
# State that is replaced at each call is noted by reference, but copied up to this size: it might change in place too.
_SMALL_BYTES = 1 << 16


class _ShadowCopy(NamedTuple):
    """A copy of a small tensor that did not change: of which tensor, and of which version of it."""

    source: weakref.ref[Tensor]
    version: int
    copy: Tensor

    def holds(self, tensor: Tensor) -> bool:
        if self.source() is not tensor or self.version != _version(tensor):
            return False
        # A write through `.data` counts no version.
        return not reading_is_free(tensor) or is_fake(tensor) or torch.equal(tensor.detach(), self.copy)


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


def _learned(owner: Any) -> _Learned:
    key = id(owner)
    if key not in _LEARNED:
        try:
            weakref.finalize(owner, _LEARNED.pop, key, None)
        except TypeError:  # an object that cannot be watched: everything it holds is new each time
            return _Learned()
        _LEARNED[key] = _Learned()
    return _LEARNED[key]


def learn_parameters(model: nn.Module, written: Iterable[Tensor]) -> None:
    """Tell what the first calls of regions would find out by copying: which parameters of ``model`` a forward writes.

    Args:
        model: any module.
        written: the parameters that one observed forward changed in place; all others are taken to be left alone.
    """
    changed = {id(parameter) for parameter in written}
    for module in model.modules():
        for store in parameter_store(module):
            learned = _learned(module)
            for key, parameter in store.contents.items():
                if parameter is None:
                    continue
                if id(parameter) in changed:
                    learned.mutated.add((*store.name, key))
                elif not parameter.requires_grad and parameter.nbytes <= _SHADOW_LIMIT_BYTES:
                    continue  # a codebook, perhaps: it may be written through `.data`, which only a copy tells
                learned.known.add((*store.name, key))


def forget_constants(model: nn.Module) -> None:
    """Let go of the copies of small tensors that never changed; the next call of a region makes them again."""
    for module in with_hidden_modules(model):
        learned = _LEARNED.get(id(module))
        if learned is not None:
            learned.shadows.clear()


def is_of_torch(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's own layers."""
    return type(module).__module__.startswith("torch.nn.modules.")


def _holds_no_memory(module: nn.Module) -> bool:
    """Layers of torch itself keep nothing between calls but running statistics, unless a hook writes to them."""
    if not is_of_torch(module) or isinstance(module, _DropoutNd):  # whose rate may follow a schedule
        return False
    if isinstance(module, _NormBase) and module._buffers:
        return False
    return not module._forward_pre_hooks and not module._forward_hooks


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _may_be_shadowed(tensor: Tensor) -> bool:
    return not tensor.requires_grad and tensor.nbytes <= _SHADOW_LIMIT_BYTES


_COPIED_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    }
)


def _can_be_copied(tensor: Tensor) -> bool:
    """Whether a tensor can be copied and compared: not sparse, quantized, nested, on meta or of an exotic dtype."""
    return (
        tensor.layout is torch.strided
        and tensor.dtype in _COPIED_DTYPES
        and tensor.device.type != "meta"
        and not tensor.is_nested
    )


@dataclass
class _Slot:
    """One tensor of a store at the time of noting."""

    store: Store
    key: Any
    tensor: Tensor
    version: int
    holder: tuple[Any, ...] | None = None
    """Where the store holds a tuple that holds the tensor."""
    place: int = 0
    """Of the tensor among the leaves of the tuple."""
    copy: Tensor | None = None
    requires_grad: bool = False
    """Of a parameter."""
    wants_copy: bool = False
    always_changes: bool = False

    @property
    def name(self) -> tuple[Any, ...]:
        return (*self.store.name, self.key) if self.holder is None else (*self.store.name, self.key, self.place)

    def was_changed(self, known: bool) -> bool:
        """Whether the tensor changed in place. Not every write counts a version, so values are looked at if cheap."""
        if self.always_changes or _version(self.tensor) != self.version:
            return True
        look = self.copy is not None and not is_fake(self.tensor) and (not known or reading_is_free(self.tensor))
        return look and not torch.equal(self.tensor.detach(), self.copy.detach())  # type: ignore[union-attr]

    def parameter_was_changed(self) -> bool:
        """Whether the parameter changed, through ``.data`` perhaps, which counts no version: its first copy tells."""
        if _version(self.tensor) != self.version:
            return True
        tensor, copy = self.tensor, self.copy
        # Sharded training gives a parameter other memory, of another shape or dtype, or none, to hold the same weights.
        if copy is None or type(tensor) not in (Tensor, nn.Parameter) or is_fake(tensor):
            return False
        if (tensor.shape, tensor.dtype, tensor.device) != (copy.shape, copy.dtype, copy.device):
            return False
        if tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0:
            return False
        return not torch.equal(tensor.detach(), copy.detach())


def _tensor_slots(store: Store) -> Iterator[_Slot]:
    """The tensors that ``store`` holds, itself or in tuples."""
    for key, value in store.entries():
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                yield _Slot(store, key, value, _version(value))
        elif isinstance(value, tuple) and not holds_scalars(value):
            for place, leaf in enumerate(tuple_leaves(value)[0]):
                if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                    yield _Slot(store, key, leaf, _version(leaf), holder=value, place=place)


def _copy(slots: list[_Slot]) -> None:
    """Copy the tensors of ``slots``, each once: those without gradients in one call for each device and dtype."""
    copies: dict[int, Tensor] = {}
    groups: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for slot in slots:
        tensor = slot.tensor
        if id(tensor) in copies or not _can_be_copied(tensor):
            continue
        if tensor.requires_grad or type(tensor) is not Tensor or tensor.is_complex() or tensor.dtype == torch.bool:
            copies[id(tensor)] = tensor.clone()
        else:
            groups.setdefault((tensor.device, tensor.dtype), {})[id(tensor)] = tensor
    for group in groups.values():
        # Times one is an exact copy, signed zeros included, and takes one kernel for the whole group.
        copies.update(zip(group, torch._foreach_mul(list(group.values()), 1), strict=True))
    for slot in slots:
        slot.copy = copies.get(id(slot.tensor))


class StateBefore:
    """The memory of some modules as it was before a region ran.

    :meth:`note` it, run the region, call :meth:`settle`; then :meth:`recomputing` gives a context in which the
    modules hold that memory again.
    """

    def __init__(self, *, reads_statistics: bool = True) -> None:
        self._reads_statistics = reads_statistics
        self._stores: list[Store] = []
        self._slots: list[_Slot] = []
        self._parameters: list[tuple[Tensor, int, bool]] = []
        self._noted: set[int] = set()
        self._modules: list[nn.Module] = []
        self._training: list[bool] = []
        self._children: list[tuple[nn.Module, dict[str, Any]]] = []
        self._write_only: list[nn.Module] = []
        self._mutated: set[int] = set()
        self._constant: dict[int, _ShadowCopy] = {}
        self._in_tuples: dict[int, Tensor] = {}
        self._holes: list[list[Any]] = []
        self._kept: list[Tensor] | None = None

    def note(self, modules: Iterable[nn.Module]) -> None:
        """Note the memory of ``modules`` that were not noted before."""
        first = len(self._slots)
        for module in modules:
            if id(module) in self._noted:
                continue
            self._noted.add(id(module))
            self._modules.append(module)
            self._training.append(module.training)
            if module._modules:
                self._children.append((module, module._modules.copy()))
            if _holds_no_memory(module):
                self._add(parameter_store(module))
            elif self._writes_only(module):
                self._write_only.append(module)
                self._add(parameter_store(module))
            else:
                self._add(stores_of(module))
        _copy([slot for slot in self._slots[first:] if slot.wants_copy])

    def note_objects(self, values: Iterable[Any]) -> None:
        """Note the memory of arguments of a region that may remember something."""
        first = len(self._slots)
        for value in values:
            if may_remember(value) and id(value) not in self._noted:
                self._noted.add(id(value))
                self._add(stores_of_object(value))
        _copy([slot for slot in self._slots[first:] if slot.wants_copy])

    def _add(self, stores: list[Store]) -> None:
        for store in stores:
            self._stores.append(store)
            if store.holds_parameters:
                self._note_parameters(store)
            else:
                self._note_tensors(store)

    def _note_parameters(self, store: Store) -> None:
        learned = _learned(store.owner)
        for key, parameter in store.contents.items():
            if parameter is None:
                continue
            name = (*store.name, key)
            slot = _Slot(store, key, parameter, _version(parameter), requires_grad=parameter.requires_grad)
            slot.wants_copy = name in learned.mutated or name not in learned.known
            self._slots.append(slot)

    def _writes_only(self, module: nn.Module) -> bool:
        """Whether ``module`` is a norm whose statistics are written and not read."""
        if self._reads_statistics or not isinstance(module, _NormBase) or not module.training:
            return False
        return module.track_running_stats and not module._forward_pre_hooks and not module._forward_hooks

    @property
    def modules(self) -> list[nn.Module]:
        """Those whose memory was noted."""
        return self._modules

    def has(self, module: nn.Module) -> bool:
        """Whether the memory of ``module`` was noted."""
        return id(module) in self._noted

    def read(self) -> list[Any]:
        """What the noted places hold now."""
        return [store.read() for store in self._stores]

    def graphs(self) -> list[Tensor]:
        """The tensors with a graph that the noted places hold now."""
        held = [store.read() for store in self._stores if not store.holds_parameters]
        leaves = (leaf for contents in held for _, value in entries(contents) for leaf in _leaves(value))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]

    def _note_tensors(self, store: Store) -> None:
        learned: _Learned | None = None
        # Training writes them without counting a version, so that no earlier copy stands for them.
        statistics = isinstance(store.owner, _NormBase) and store.name == ("buffers",)
        written = statistics and bool(store.owner.training)
        for slot in _tensor_slots(store):
            value = slot.tensor
            learned = learned or _learned(store.owner)
            name = slot.name
            slot.always_changes = written
            if not _can_be_copied(value):
                pass
            elif statistics or name in learned.mutated or name not in learned.known:
                slot.wants_copy = True
            elif name in learned.reassigned:
                slot.wants_copy = not value.requires_grad and value.nbytes <= _SMALL_BYTES
            elif _may_be_shadowed(value):
                shadow = learned.shadows.get(name)
                if shadow is not None and shadow.holds(value):
                    slot.copy = shadow.copy
                else:
                    slot.wants_copy = True
                    if shadow is not None and shadow.source() is not value:
                        # Replaced from outside: from now on it is noted by reference.
                        learned.reassigned.add(name)
                        del learned.shadows[name]
            self._slots.append(slot)

    def settle(self) -> list[Tensor]:
        """Learn from what the region did; returns the tensors that autograd must keep for the recomputation.

        Raises:
            RuntimeError: if a parameter or a large buffer changed in place for the first time after calls that left it
                alone.
        """
        if self._kept is not None:
            return self._kept
        now = {id(store): store.read() for store in self._stores}
        for slot in self._slots:
            name = slot.name
            learned = _learned(slot.store.owner)
            if slot.store.holds_parameters and name not in learned.mutated and not slot.parameter_was_changed():
                self._parameters.append((slot.tensor, slot.version, slot.requires_grad))
                learned.known.add(name)
                continue
            changed = name in learned.mutated or slot.store.holds_parameters
            if changed or slot.was_changed(known=name in learned.known):
                learned.mutated.add(name)
                learned.shadows.pop(name, None)
                if slot.copy is None:
                    raise RuntimeError(
                        f"{type(slot.store.owner).__name__}.{'.'.join(map(str, name))} was changed in place inside a "
                        "checkpointed region for the first time, after calls that left it alone, and its earlier value "
                        "is gone. Nothing was learned from this step; run it again: the value is copied from now on."
                    )
                self._put(slot, slot.copy)
                self._mutated.add(id(slot.copy))
            elif entry(now[id(slot.store)], slot.key) is not (slot.tensor if slot.holder is None else slot.holder):
                learned.reassigned.add(name)
                learned.shadows.pop(name, None)
            elif slot.copy is not None and name not in learned.reassigned and _may_be_shadowed(slot.tensor):
                # A constant: its copy stands for it, whatever happens to it before the backward pass.
                self._put(slot, slot.copy)
                if not isinstance(slot.store.owner, _NormBase):
                    shadow = _ShadowCopy(weakref.ref(slot.tensor), slot.version, slot.copy)
                    self._constant[id(slot.copy)] = learned.shadows[name] = shadow
            learned.known.add(name)
        self._slots = []
        self._kept = self._detach_tensors()
        self._in_tuples = {}
        return self._kept

    def _put(self, slot: _Slot, copy: Tensor) -> None:
        """Let ``copy`` stand for the tensor of ``slot``."""
        if slot.holder is None:
            slot.store.contents[slot.key] = copy
        else:
            self._in_tuples[id(slot.tensor)] = copy

    def forget_tensors(self) -> None:
        """Autograd keeps the tensors that :meth:`settle` returned: let go of them."""
        self._kept = []

    def _detach_tensors(self) -> list[Tensor]:
        """Take the tensors out of the noted contents, so that autograd alone keeps them (and may offload them)."""
        tensors: list[Tensor] = []
        places: dict[int, int] = {}

        def keep(tensor: Tensor) -> _TensorAt:
            mark = id(tensor)
            if mark not in places:
                places[mark] = len(tensors)
                tensors.append(tensor)
            return _TensorAt(places[mark], mark in self._mutated, self._constant.get(mark))

        for store in self._stores:
            contents, holes = store.contents, []
            for key, value in list(store.entries()):
                if store.holds_parameters:
                    if id(value) not in self._mutated:
                        continue
                    contents[key] = _ParameterAt(keep(value.detach()).index, value.requires_grad)
                elif isinstance(value, Tensor):
                    contents[key] = keep(value)
                elif isinstance(value, tuple) and not holds_scalars(value):
                    leaves, spec = tuple_leaves(value)
                    if not any(isinstance(leaf, Tensor) for leaf in leaves):
                        continue
                    held = [keep(self._in_tuples.get(id(x), x)) if isinstance(x, Tensor) else x for x in leaves]
                    contents[key] = _TupleAt(held, spec)
                else:
                    continue
                holes.append(key)
            self._holes.append(holes)
        return tensors

    def _contents(self, index: int, tensors: Sequence[Tensor], copies: dict[int, Tensor]) -> Any:
        """The noted contents of one store, with its tensors back in place."""
        contents = self._stores[index].contents
        if not self._holes[index]:
            return contents
        contents = contents.copy()
        for key in self._holes[index]:
            contents[key] = contents[key].take(tensors, copies)
        return contents

    @contextlib.contextmanager
    def recomputing(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Give the modules the noted memory; afterwards, whatever happens, what they hold now.

        Raises:
            RuntimeError: if a parameter was changed in place since the forward.
        """
        self._check_parameters()
        frozen = [(p, requires) for p, _, requires in self._parameters if p.requires_grad != requires and p.is_leaf]
        now = [(store, store.read()) for store in self._stores]
        norms = [(norm, dict(norm._buffers)) for norm in self._write_only]
        modes = [(m, m.training) for m, mode in zip(self._modules, self._training, strict=True) if m.training != mode]
        children = [(m, then, m._modules) for m, then in self._children if m._modules != then]
        copies: dict[int, Tensor] = {}
        try:
            for module, then, _ in children:
                module.__dict__["_modules"] = then
            for module, mode in modes:
                module.training = not mode
            for parameter, requires in frozen:
                parameter.requires_grad_(requires)
            for i, store in enumerate(self._stores):
                store.write(self._contents(i, tensors, copies))
            for norm in self._write_only:
                _give_scratch_statistics(norm)
            yield
        finally:
            for norm, buffers in norms:
                norm._buffers.update(buffers)
            for store, contents in now:
                store.write(contents)
            for parameter, requires in frozen:
                parameter.requires_grad_(not requires)
            for module, mode in modes:
                module.training = mode
            for module, _, place in children:
                module.__dict__["_modules"] = place

    def _check_parameters(self) -> None:
        for parameter, version, _ in self._parameters:
            if _version(parameter) != version:
                raise RuntimeError(
                    f"A parameter of shape {tuple(parameter.shape)} was changed in place after a checkpointed region "
                    "used it and before its backward pass, which would be computed with other weights. Step the "
                    "optimizer after the backward pass of all losses that use the parameter."
                )


@dataclass(frozen=True)
class _TensorAt:
    """Stands for a tensor that autograd keeps.

    One that changes in place is copied, so that it can be used again, once for all places that hold it; of a constant
    the original is taken, unless that has changed since.
    """

    index: int
    changes: bool = False
    shadow: _ShadowCopy | None = None

    def take(self, tensors: Sequence[Tensor], copies: dict[int, Tensor]) -> Tensor:
        if self.shadow is not None:
            source = self.shadow.source()
            if source is not None and self.shadow.holds(source):
                return source
        if not self.changes:
            return tensors[self.index]
        if self.index not in copies:
            copies[self.index] = tensors[self.index].clone()
        return copies[self.index]


@dataclass(frozen=True)
class _ParameterAt:
    """Stands for a parameter that the forward itself changes in place."""

    index: int
    requires_grad: bool

    def take(self, tensors: Sequence[Tensor], copies: dict[int, Tensor]) -> Tensor:
        if self.index not in copies:
            copies[self.index] = nn.Parameter(tensors[self.index].clone(), self.requires_grad)
        return copies[self.index]


@dataclass(frozen=True)
class _TupleAt:
    """Stands for a tuple (an LSTM's hidden state, say) whose tensors autograd keeps."""

    leaves: list[Any]
    spec: TreeSpec

    def take(self, tensors: Sequence[Tensor], copies: dict[int, Tensor]) -> Any:
        return tree_unflatten(
            [x.take(tensors, copies) if isinstance(x, _TensorAt) else x for x in self.leaves], self.spec
        )


def is_stock(function: Any, modules: Iterable[nn.Module]) -> bool:
    """Whether a region consists of library layers alone: then nothing in it reads statistics in training.

    A user's function around library layers may read them itself, so the function has to be a layer or its method.
    """
    if not isinstance(getattr(function, "__self__", function), nn.Module):
        return False
    return all(type(module).__module__.startswith(("torch.nn.modules.", "spikingjelly.")) for module in modules)


@contextlib.contextmanager
def noting_called_modules(before: StateBefore) -> Iterator[None]:
    """Note the state of modules that are called but were not known beforehand, at the moment they are called."""
    thread = threading.get_ident()

    def note(module: nn.Module, _: Any) -> None:
        if not before.has(module) and threading.get_ident() == thread:
            before.note(module.modules())

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


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
# States of modules that nobody uses any more


class _Cut(torch.autograd.Function):
    """The value of a state whose graph was let go."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: list[Tensor]) -> Tensor:
        return box[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "A gradient runs into a state that was made in a treated region which nobody holds any more, only a module "
            "inside of it. Keep the region as long as you use its modules, or reset or detach the state before."
        )


def cut_graphs(modules: Iterable[nn.Module]) -> None:
    """Make what ``modules`` remember let go of the graphs that lead to it. Values stay, in case one is still in use."""
    # The garbage collector may ask for this at any moment: in a transform, under fake tensors, without gradients.
    with (
        temporarily_clear_interpreter_stack(),
        torch._C.DisableTorchFunction(),
        no_dispatch(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        anchor = torch.empty(0, requires_grad=True)

        stores = [store for module in modules for store in stores_of(module) if not store.holds_parameters]
        replace_graphs(stores, lambda state: _Cut.apply(anchor, [state.detach()]))


def replace_graphs(stores: Iterable[Store], instead: Callable[[Tensor], Tensor]) -> None:
    """Let places hold ``instead(tensor)`` in place of each tensor with a graph that they hold, themselves or in tuples.

    Args:
        stores: as they were noted just now.
        instead: what takes the place of a tensor.
    """

    def other(value: Any) -> Any:
        return instead(value) if isinstance(value, Tensor) and value.grad_fn is not None else value

    for store in stores:
        changed: dict[Any, Any] = {}
        for key, value in store.entries():
            leaves, spec = tuple_leaves(value) if isinstance(value, tuple) else ([value], None)
            others = [other(leaf) for leaf in leaves]
            if any(new is not old for new, old in zip(others, leaves, strict=True)):
                changed[key] = others[0] if spec is None else tree_unflatten(others, spec)
        if changed:
            contents = store.read()
            for key, value in changed.items():
                contents[key] = value
            store.write(contents)


# ---------------------------------------------------------------------------------------------------------------------
# Full snapshots, for code that runs steps which must leave no trace


@dataclass(frozen=True)
class StateSnapshot:
    """Everything a module and its submodules remember. Made by :func:`take_snapshot`."""

    _stores: tuple[Store, ...]
    _copies: tuple[tuple[Tensor, int, Tensor], ...]


def take_snapshot(module: nn.Module, *, objects: Iterable[Any] = (), copy: bool = True) -> StateSnapshot:
    """Note buffers, neuron states, attributes and metric states of ``module`` and its submodules.

    Args:
        module: any module.
        objects: what else may remember something: users' own objects, such as a cache of keys and values, random
            generators, sets, small arrays and subclasses of dict are noted, too, anything else is not.
        copy: also copy the tensors' values (bytes: those of the state), so that changes in place can be undone.
    """
    stores: list[Store] = []
    scripted: list[Tensor] = []
    for submodule in with_hidden_modules(module):
        stores.extend(stores_of(submodule))
        if isinstance(submodule, torch.jit.ScriptModule):  # it keeps its buffers where Python does not see them
            scripted.extend(submodule.buffers(recurse=False))
    for value in {id(value): value for value in objects if may_remember(value)}.values():
        stores.extend(stores_of_object(value))
    copies: dict[int, tuple[Tensor, int, Tensor]] = {}
    if copy:
        values = (leaf for store in stores for _, value in store.entries() for leaf in _leaves(value))
        with torch.no_grad():
            for leaf in (*values, *scripted):
                if _is_state(leaf) and id(leaf) not in copies:
                    copies[id(leaf)] = (leaf, _version(leaf), leaf.detach().clone())
    return StateSnapshot(tuple(stores), tuple(copies.values()))


def _leaves(value: Any) -> Iterable[Any]:
    """What an entry of a store holds: itself, or where it is a tuple, the leaves of that."""
    return tree_leaves(value) if isinstance(value, tuple) else (value,)


def _is_state(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and _can_be_copied(value)


def restore_snapshot(snapshot: StateSnapshot) -> None:
    """Put back what :func:`take_snapshot` noted: the same objects, holding the values they held."""
    for store in snapshot._stores:
        store.write(store.contents)
    for tensor, version, value in snapshot._copies:
        # Batch norm writes its running statistics without counting a version.
        if _version(tensor) != version or (not is_fake(tensor) and not torch.equal(tensor.detach(), value)):
            tensor.detach().copy_(value)
