"""
Who holds the bytes of a step
=============================

Every storage alive during a step gets one consumer, and an activation the module whose forward made autograd save it.

* Parameters, buffers, optimizer state and gradients are looked up in the objects that own them, before the step, at
  each phase's end and around each optimizer step. So are the buckets of DDP, which are communication.
* An activation is what autograd saves (``saved_tensors_hooks``), and whatever else was made in the forward pass and is
  still alive when the backward pass begins: packed copies, logits, the loss. The same holds for what a checkpointed
  region makes again within the backward pass: what outlives the recomputation is an activation of that region.
* A copy that autocast makes is a cast whose operand is a parameter. A batch is what was there before the step, belongs
  to nobody and is read in the forward pass. What remains was alive for a few operations: a temporary.

On the CPU the blocks of the allocation events are matched with the storages by address, so that the sum is the measured
peak to the byte; a block that no storage owns is the workspace of a running kernel, a temporary. On CUDA the allocator
is asked after each operation: what it holds beyond the storages is "other", what it held meanwhile a temporary.

Of two gradients that meet, autograd adds the second into the first if nobody else holds that, but not while a dispatch
mode watches. So a sum that takes the place of its first addend is counted as if it had been that one.

torch's ``MemTracker`` does not serve here: it sees no workspaces, so its sums are below the measured peak, and it gives
an activation to the module that made it, not to the one that saved it, and no autocast copies.
"""

from __future__ import annotations

import functools
import gc
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from lightning_memopt.measuring.allocation_events import (
    AllocationRecorder,
    AllocationRecording,
    own_storages,
    wrappers_alive,
)
from lightning_memopt.measuring.consumers import MemoryBreakdown, MemoryEstimate, MemoryPhase
from lightning_memopt.measuring.gradient_buckets import gradient_buckets
from lightning_memopt.measuring.marks import Marks, MemoryMark
from lightning_memopt.measuring.storage_trace import StorageTrace, fake_mode, sums_in_place

__all__ = ["Attribution", "StepAttribution", "held_tensors", "tensors_inside"]

# A storage that plays two parts is counted for the first of them.
_CONSUMERS = (
    "parameters",
    "buffers",
    "optimizer_state",
    "gradients",
    "communication",
    "inputs",
    "autocast_copies",
    "activations",
    "temporaries",
    "other",
)
_STRENGTH = {consumer: strength for strength, consumer in enumerate(_CONSUMERS)}
_FORWARD, _BACKWARD, _OPTIMIZER = "forward", "backward", "optimizer step"
_PHASE_NOTE, _STORAGE_NOTE, _SUM_NOTE = "phase", "storage", "sum"
_CASTS = (torch.ops.aten._to_copy.default,)


@dataclass(eq=False)
class _Holder:
    """A storage, from its birth to its end."""

    module: str = ""
    """Path of the module that runs where it was made, or that it belongs to."""
    consumer: str = ""
    before: bool = False
    """It was there when the step began."""

    def take(self, consumer: str, module: str | None = None) -> None:
        """Count it for ``consumer``, unless it is something stronger already."""
        if not self.consumer or _STRENGTH[consumer] < _STRENGTH[self.consumer]:
            self.consumer = consumer
            if module is not None:
                self.module = module

    @property
    def resolved(self) -> str:
        return self.consumer or ("other" if self.before else "temporaries")


@dataclass(eq=False)
class _Block:
    """Memory that an allocator handed out, and whose it turned out to be: nobody's is a kernel's workspace."""

    holder: _Holder | None = None


_Change = tuple[_Block, int]


@dataclass(frozen=True)
class Attribution:
    """One step with every byte attributed.

    Attributes:
        breakdown: The peak, and the ends of the phases.
        points: ``(ms since the start, bytes alive from then on)``.
        by_consumer: Bytes of each consumer at each of these points.
        marks: The moments that :func:`~lightning_memopt.measuring.mark_memory` named.
    """

    breakdown: MemoryEstimate
    points: tuple[tuple[float, int], ...] = field(repr=False)
    by_consumer: Mapping[str, tuple[int, ...]] = field(repr=False)
    marks: tuple[MemoryMark, ...] = field(repr=False)


class StepAttribution:
    """Attributes the bytes alive on ``device`` between :meth:`start` and :meth:`stop`.

    Args:
        device: the device to follow.
        model: whose parameters, buffers and module paths count.
        optimizers: whose state counts, beside those that step meanwhile.
        batch: tensors, in any containers, that are inputs whether they are read or not.
        allocator: what keeps the statistics of ``device``, for example ``torch.cuda``; None for the CPU, and for fake
            tensors.

    Example:
        >>> layer, data = nn.Linear(64, 64, bias=False), torch.zeros(256, 64)
        >>> attribution = StepAttribution(torch.device("cpu"), layer, batch=data)
        >>> attribution.start()
        >>> layer(data).square().mean().backward()
        >>> step = attribution.stop().breakdown
        >>> step.peak_phase, step.peak.parameters, step.at("backward end").gradients
        ('backward', 16384, 16384)
    """

    def __init__(
        self,
        device: torch.device,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        batch: object = (),
        *,
        allocator: Any = None,
    ) -> None:
        self._device, self._model, self._batch = device, model, batch
        self._optimizers = optimizers
        self._allocator = allocator
        self._recorder: AllocationRecorder | None = None
        self._trace: _AttributingTrace | None = None
        self._stack = ExitStack()

    @property
    def running(self) -> bool:
        """Whether it was started and not yet stopped."""
        return self._trace is not None

    @property
    def marks(self) -> Marks | None:
        """What collects marks; None where the profiler does."""
        return self._trace if self._recorder is None else None

    def start(self) -> None:
        """Begin; ``RuntimeError`` if a torch profiler runs already (CPU only)."""
        if self.running:
            raise RuntimeError("this StepAttribution already runs; stop() it before it is started again")
        if self._allocator is None and fake_mode() is None:
            self._recorder = AllocationRecorder()
            self._recorder.start()  # collects garbage as well
        else:
            gc.collect()
        try:
            self._trace = trace = _AttributingTrace(
                self._device, self._model, self._optimizers, self._batch, self._allocator, self._recorder
            )
            self._stack.enter_context(trace)
            packed, forget = _saving(trace)
            self._stack.callback(forget)
            self._stack.enter_context(saved_tensors_hooks(packed, _as_it_is))
            self._stack.enter_context(_paused_in_transforms((packed, _as_it_is)))
            for handle in (
                register_module_forward_pre_hook(trace.entering),
                register_module_forward_hook(trace.left, always_call=True),
                register_optimizer_step_pre_hook(trace.stepping),
                register_optimizer_step_post_hook(trace.stepped),
            ):
                self._stack.callback(handle.remove)
        except BaseException:
            self.abandon()
            raise

    def stop(self) -> Attribution:
        """End, and say who held what; ``RuntimeError`` if something went wrong while the step was watched."""
        trace, recorder = self._trace, self._recorder
        if trace is None:
            raise RuntimeError("this StepAttribution does not run; start() comes before stop()")
        try:
            trace.finish()
            self._stack.close()
            recording = None if recorder is None else recorder.stop()
        finally:
            self.abandon()
        if trace.error is not None:
            raise RuntimeError(
                "the step was taken as ever, but not watched to its end, because watching it raised "
                f"{type(trace.error).__name__}: {trace.error}"
            ) from trace.error
        if recording is None:
            curve = _Curve(trace.at_start, trace.changes, trace.boundaries, tuple(trace.points), tuple(trace.marks))
        else:
            curve = _curve_of_blocks(recording, trace)
        return _attributed(curve, f"one step on {self._device}")

    def abandon(self) -> None:
        """End without a result; does nothing where it does not run."""
        self._stack.close()
        if self._recorder is not None and self._recorder.running:
            self._recorder.stop()
        self._trace = self._recorder = None


def _saving(trace: _AttributingTrace) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    """What tells ``trace`` that autograd saves a tensor, and what makes it forget the trace.

    Nodes hold on to the first, and a trace knows the model, which may hold the nodes.
    """
    listening = [trace]

    def packed(tensor: Tensor) -> Tensor:
        for listener in listening:
            listener.saved(tensor)
        return tensor.detach()  # an output that held itself would never go

    return packed, listening.clear


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _paused_in_transforms(hooks: tuple[Any, Any]) -> Iterator[None]:
    """Take ``hooks`` away while ``torch.func.grad`` and its like run, which refuse to start where there are any."""
    functions: Any = torch._C._autograd
    disable, enable = functions._saved_tensors_hooks_disable, functions._saved_tensors_hooks_enable
    paused: set[int] = set()  # threads: each has hooks of its own

    def disable_without_hooks(message: str, *rest: Any) -> None:
        try:
            disable(message, *rest)
        except RuntimeError:
            functions._pop_saved_tensors_default_hooks()
            paused.add(get_ident())
            disable(message, *rest)  # refuses again if there are others than ours

    def enable_with_hooks() -> None:
        enable()
        if get_ident() in paused:
            paused.remove(get_ident())
            functions._push_saved_tensors_default_hooks(*hooks)

    functions._saved_tensors_hooks_disable = disable_without_hooks
    functions._saved_tensors_hooks_enable = enable_with_hooks
    try:
        yield
    finally:
        functions._saved_tensors_hooks_disable, functions._saved_tensors_hooks_enable = disable, enable


def _sparing_the_step(note: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the trace that torch calls within the step: its error must not be one of the step.

    It is kept as the trace's ``error``, and from then on the trace takes no notes.
    """

    @functools.wraps(note)
    def spared(trace: _AttributingTrace, *args: Any, **kwargs: Any) -> Any:
        if trace.error is not None:
            return None
        try:
            return note(trace, *args, **kwargs)
        except Exception as error:
            inside = error.__traceback__ and error.__traceback__.tb_next
            traceback.clear_frames(inside)  # frames hold tensors
            trace.error = error.with_traceback(inside)
            return None

    return spared


class _AttributingTrace(StorageTrace):
    """Follows storages, and takes note of what each of them is."""

    supports_higher_order_operators = True
    error: Exception | None = None
    """What went wrong while the step was watched."""

    def __init__(
        self,
        device: torch.device,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        batch: object,
        allocator: Any,
        recorder: AllocationRecorder | None,
    ) -> None:
        self.changes: list[_Change] = []
        self.boundaries: list[tuple[int, str]] = []
        self.numbered: list[_Holder] = []
        self._blocks: dict[int, _Block] = {}  # of the storages alive, by key
        self._following = False
        self._sum: tuple[int, int] | None = None  # of the first addend: its key, and the changes up to the sum
        self._recorder, self._allocator = recorder, allocator
        super().__init__(device)
        self._model, self._optimizers = model, {id(optimizer): optimizer for optimizer in optimizers}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._parameters = {parameter: name.rpartition(".")[0] for name, parameter in model.named_parameters()}
        self._wrappers = wrappers_alive()
        self._running: list[tuple[int, str]] = []  # the modules whose forward runs, the innermost last
        self._phase = _FORWARD
        self._steps_running = 0
        self._recomputing = False
        self._made: dict[int, _Holder] = {}  # alive, made by the forward pass or a recomputation, nobody's yet
        self._unseen, self._unseen_bytes, self._meanwhile = _Block(_Holder(consumer="other")), 0, _Block()
        for block in self._blocks.values():
            assert block.holder is not None
            block.holder.before = True
        self._note_owned(batch)
        if allocator is not None:
            self._index = allocator.current_device() if device.index is None else device.index
            allocator.reset_peak_memory_stats(self._index)
            self._ask_allocator()
        self.holders_at_start = {key: block.holder for key, block in self._blocks.items()}
        self.at_start, self.changes = self.changes, []
        self.start_bytes = self._since_mark = self._alive
        self.points = [(0.0, self._alive)]
        self._following = True

    # What the parts of a step tell

    @_sparing_the_step
    def entering(self, module: nn.Module, _: Any) -> None:
        """The forward of a module begins."""
        self._running.append((id(module), self._paths.get(id(module), self._path())))

    @_sparing_the_step
    def left(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward of a module is over, by an exception too."""
        while self._running and self._running.pop()[0] != id(module):
            pass

    @_sparing_the_step
    def stepping(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An optimizer is about to step."""
        self._follow_phase()
        self._optimizers[id(optimizer)] = optimizer
        self._note_gradients_of(optimizer)
        self._steps_running += 1
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._outside_of_the_step(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):  # the first is the optimizer
            return (args[0], self._outside_of_the_step(args[1]), *args[2:]), kwargs
        return None

    @_sparing_the_step
    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer has stepped."""
        self._follow_phase()
        self._note_gradients_of(optimizer)
        self._note_state(optimizer)
        self._steps_running -= 1
        self._follow_phase()

    @_sparing_the_step
    def saved(self, tensor: Tensor) -> None:
        """Autograd saves a tensor."""
        self._see(tensor)
        for storage in own_storages(tensor):
            block = self._blocks.get(storage._cdata)
            if block is not None and block.holder is not None:
                block.holder.take("activations", self._path())
                self._made.pop(storage._cdata, None)

    @_sparing_the_step
    def finish(self) -> None:
        """The step is over."""
        self._follow_phase()
        if not self.boundaries:
            self._boundary()
        self._note_owned(())

    def _outside_of_the_step(self, closure: Any) -> Any:
        """The closure that an optimizer runs is forward and backward, nothing of the optimizer's own."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._steps_running -= 1
            try:
                return closure(*args, **kwargs)
            finally:
                self._follow_phase()
                self._steps_running += 1

        return run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = self._note_operands(func, args, kwargs)
        out = func(*args, **(kwargs or {}))
        self._note_results(func, args, given, out)
        return out

    @_sparing_the_step
    def _note_operands(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Tensor]:
        """The operands, where they say something of the results."""
        self._follow_phase()
        if self._phase != _FORWARD and not self._recomputing and func not in _CASTS:
            return []
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._phase == _FORWARD:
            self._note_read(given)
        return given

    @_sparing_the_step
    def _note_results(self, func: Any, args: tuple[Any, ...], given: list[Tensor], out: Any) -> None:
        self._see_results(func, args, out)
        if func in _CASTS and given and isinstance(out, Tensor):
            self._note_cast(given[0], out)
        if self._recomputing and not self._running:
            self._note_origin(given, out)
        if self._allocator is None and sums_in_place(func, args):
            self._note_sum(args[0])
        if self._allocator is not None:
            self._ask_allocator()

    # Phases

    @_sparing_the_step
    def _follow_phase(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            self._begin_phase(_BACKWARD)
            # A backward pass records nothing; what does is a forward that runs again.
            recomputing = torch.is_grad_enabled() or bool(self._running)
            if self._recomputing and not recomputing:
                self._keep_what_was_made({})
            self._recomputing = recomputing
        else:
            self._begin_phase(_OPTIMIZER if self._steps_running else _FORWARD)

    def _begin_phase(self, phase: str) -> None:
        if phase == self._phase:
            return
        if self._phase == _FORWARD and phase == _BACKWARD:
            held = held_tensors(self._model)
            self._keep_what_was_made({s._cdata: path for path, tensor in held for s in own_storages(tensor)})
        if self._phase == _BACKWARD:
            self._recomputing = False
            self._note_gradients(self._parameters)
        self._made.clear()
        self._boundary()
        self._phase = phase

    def _boundary(self) -> None:
        self.boundaries.append((len(self.changes), self._phase))
        if self._recorder is not None:
            self._recorder.note(f"{_PHASE_NOTE} {self._phase}")

    def _keep_what_was_made(self, held: Mapping[int, str]) -> None:
        """What is still alive is there for the backward pass, or ``held`` by a module."""
        for key, holder in self._made.items():
            if key in held:
                holder.take("buffers", held[key])
            else:
                holder.take("activations")
        self._made.clear()

    # Storages

    @_sparing_the_step
    def _change(self, key: int, size: int) -> None:
        block = self._blocks.get(key)
        if block is None:
            holder = _Holder(self._path() if self._following else "")
            block = self._blocks[key] = _Block(holder)
            if self._following and (self._phase == _FORWARD or self._recomputing):
                self._made[key] = holder
        replaced = self._sum == (key, len(self.changes))
        self.changes.append((block, size))
        known = self._known.get(key)
        if known is None:
            del self._blocks[key]
            if self._following:
                self._made.pop(key, None)
        elif self._following and self._recorder is not None and (storage := known[0]()) is not None:
            assert block.holder is not None
            self._recorder.note(f"{_STORAGE_NOTE} {len(self.numbered)} {storage.data_ptr()}")
            self.numbered.append(block.holder)
        super()._change(key, size)
        if replaced and known is None:
            _replace_addend(self.changes, self.points)

    def _path(self) -> str:
        return self._running[-1][1] if self._running else ""

    def _holders(self, value: object) -> Iterator[_Holder]:
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                for storage in own_storages(leaf):
                    block = self._blocks.get(storage._cdata)
                    if block is not None and block.holder is not None:
                        yield block.holder

    def _note_sum(self, addend: Tensor) -> None:
        storage = addend.untyped_storage()
        if self._recorder is None:
            self._sum = (storage._cdata, len(self.changes))
        else:
            self._recorder.note(f"{_SUM_NOTE} {storage.data_ptr()}")

    def _note_owned(self, batch: object) -> None:
        """Look up everything that belongs to an object."""
        for parameter, path in self._parameters.items():
            for holder in self._holders(parameter):
                holder.take("parameters", path)
        self._note_gradients(self._parameters)
        for optimizer in self._optimizers.values():
            self._note_gradients_of(optimizer)
            self._note_state(optimizer)
        for holder in self._holders(gradient_buckets(self._wrappers)):
            holder.take("communication")
        for path, tensor in held_tensors(self._model):
            for holder in self._holders(tensor):
                if not holder.consumer:
                    holder.take("buffers", path)
        for holder in self._holders(batch):
            holder.take("inputs")

    def _note_gradients(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                for holder in self._holders(parameter.grad):
                    holder.take("gradients", self._parameters.get(parameter, ""))  # type: ignore[call-overload]

    def _note_gradients_of(self, optimizer: Optimizer) -> None:
        self._note_gradients(parameter for group in optimizer.param_groups for parameter in group["params"])

    def _note_state(self, optimizer: Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            path = self._parameters.get(parameter, "") if isinstance(parameter, nn.Parameter) else ""
            for holder in self._holders(state):
                holder.take("optimizer_state", path)
        for group in optimizer.param_groups:
            for holder in self._holders([value for name, value in group.items() if name != "params"]):
                holder.take("optimizer_state")

    def _note_read(self, given: Iterable[Tensor]) -> None:
        for tensor in given:
            for holder in self._holders(tensor):
                if holder.before:
                    holder.take("parameters" if not holder.consumer and isinstance(tensor, nn.Parameter) else "inputs")

    def _note_cast(self, given: Tensor, out: Tensor) -> None:
        if given.dtype == out.dtype:
            return
        for source in self._holders(given):
            if source.consumer == "parameters":
                for copy in self._holders(out):
                    copy.take("autocast_copies", source.module)

    def _note_origin(self, given: Iterable[Tensor], out: object) -> None:
        """A recomputed operation outside of all submodules belongs to the module that its operands have in common."""
        paths = [holder.module.split(".") for tensor in given for holder in self._holders(tensor) if holder.module]
        common: list[str] = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        for holder in self._holders(out):
            if not holder.consumer and not holder.module:
                holder.module = ".".join(common)

    def _ask_allocator(self) -> None:
        """Count what the allocator holds beyond the storages, and what it held while the operation ran."""
        allocated = self._allocator.memory_allocated(self._index)
        peak = self._allocator.max_memory_allocated(self._index)
        self._allocator.reset_peak_memory_stats(self._index)
        unseen = max(0, allocated - (self._alive - self._unseen_bytes))
        self._surcharge(self._unseen, unseen - self._unseen_bytes)
        self._unseen_bytes = unseen
        workspace = max(0, peak - self._alive)
        self._surcharge(self._meanwhile, workspace)
        self._surcharge(self._meanwhile, -workspace)

    def _surcharge(self, block: _Block, size: int) -> None:
        if size:
            self.changes.append((block, size))
            super()._change(0, size)


def _replace_addend(changes: list[_Change], points: list[tuple[float, int]]) -> None:
    """The last two changes made a sum and freed its first addend, the other way round than without being watched."""
    if changes[-2][1] == -changes[-1][1]:
        changes[-2:] = changes[:-3:-1]
        points[-2] = (points[-2][0], points[-1][1] - changes[-1][1])


def held_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules hold beside their parameters: buffers, states, lists and dicts of them; with module path.

    Example:
        >>> norm = nn.BatchNorm1d(3)
        >>> norm.history = [torch.zeros(2)]
        >>> [tuple(tensor.shape) for _, tensor in held_tensors(norm)]
        [(2,), (3,), (3,), ()]
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from ((path, tensor) for tensor in tensors_inside(value) if not isinstance(tensor, nn.Parameter))
        yield from ((path, tensor) for tensor in module._buffers.values() if tensor is not None)


def tensors_inside(value: object, depth: int = 3, *, attributes: bool = False) -> Iterator[Tensor]:
    """The tensors in containers within containers, ``depth`` of them; on demand in attributes of other objects, too."""
    if isinstance(value, Tensor):
        yield value
        return
    parts: Iterable[Any] = ()
    if isinstance(value, (list, tuple, set, deque)):
        parts = value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif attributes:
        parts = getattr(value, "__dict__", {}).values()
    for part in parts if depth else ():
        yield from tensors_inside(part, depth - 1, attributes=attributes)


# ---------------------------------------------------------------------------------------------------------------------
# After the step


@dataclass(frozen=True)
class _Curve:
    """What was alive, in the order of time. Positions count changes."""

    at_start: list[_Change]
    changes: list[_Change]
    boundaries: list[tuple[int, str]]
    """Position at which a phase ended, and which."""
    points: tuple[tuple[float, int], ...]
    """One more than there are changes: the first is the start."""
    marks: tuple[MemoryMark, ...]


def _curve_of_blocks(recording: AllocationRecording, trace: _AttributingTrace) -> _Curve:
    """The blocks of the allocator with their owners, where the trace said who owns the address."""
    at_start = [(_Block(trace.holders_at_start.get(key)), size) for key, size in recording.at_start]
    by_address: dict[int, _Block] = {}
    changes: list[_Change] = []
    boundaries: list[tuple[int, str]] = []
    points = [recording.points[0]]
    notes = deque(recording.notes)
    addend: tuple[int, int] | None = None

    def read_notes() -> None:
        nonlocal addend
        while notes and notes[0][0] == len(changes):
            kind, _, rest = notes.popleft()[1].partition(" ")
            if kind == _PHASE_NOTE:
                boundaries.append((len(changes), rest))
            elif kind == _SUM_NOTE:
                addend = (int(rest), len(changes))
            else:
                number, _, address = rest.partition(" ")
                if int(address) in by_address:
                    by_address[int(address)].holder = trace.numbered[int(number)]

    read_notes()
    for (address, size), point in zip(recording.changes, recording.points[1:], strict=True):
        replaced = addend == (address, len(changes)) and size < 0
        if address < 0:
            block = at_start[~address][0]
        elif size > 0:
            block = by_address[address] = _Block()
        else:
            block = by_address.pop(address)
        changes.append((block, size))
        points.append(point)
        if replaced:
            _replace_addend(changes, points)
        read_notes()
    return _Curve(at_start, changes, boundaries, tuple(points), recording.marks)


def _attributed(curve: _Curve, subject: str) -> Attribution:
    """Go through the step once more, now that it is known what each block was."""
    alive = [size for _, size in curve.points]
    moments, peak, peak_phase = _moments(curve.boundaries, alive)
    wanted = {peak, *moments.values()}
    count = _Count()
    for change in curve.at_start:
        count.add(*change)
    seen: dict[int, MemoryBreakdown] = {}
    by_consumer: dict[str, list[int]] = {consumer: [] for consumer in _CONSUMERS}
    for position in range(len(alive)):
        if position:
            count.add(*curve.changes[position - 1])
        if position in wanted:
            seen[position] = count.breakdown()
        for consumer, sizes in by_consumer.items():
            sizes.append(count.by_consumer[consumer])
    phases = tuple(MemoryPhase(name, seen[position]) for name, position in moments.items())
    return Attribution(
        MemoryEstimate(phases, seen[peak], peak_phase, subject),
        curve.points,
        {consumer: tuple(sizes) for consumer, sizes in by_consumer.items()},
        curve.marks,
    )


def _moments(boundaries: list[tuple[int, str]], alive: list[int]) -> tuple[dict[str, int], int, str]:
    """Positions of the ends of phases, the highest where a phase comes twice; position of the peak, and its phase."""
    peak = max(range(len(alive)), key=alive.__getitem__)
    found: dict[str, list[int]] = {"forward end": [], "backward end": [], _OPTIMIZER: []}
    begin = 0
    for index, (end, phase) in enumerate(boundaries):
        following = boundaries[index + 1][1] if index + 1 < len(boundaries) else None
        if phase == _BACKWARD:
            found["backward end"].append(end)
        elif phase == _OPTIMIZER:
            found[_OPTIMIZER].append(max(range(begin, end + 1), key=alive.__getitem__))
        elif following == _BACKWARD or len(boundaries) == 1:
            found["forward end"].append(end)
        begin = end
    moments = {name: max(places, key=alive.__getitem__) for name, places in found.items() if places}
    peak_phase = next((phase for end, phase in boundaries if peak <= end), boundaries[-1][1])
    return moments, peak, peak_phase


class _Count:
    """Bytes alive by consumer, and those of activations by module."""

    def __init__(self) -> None:
        self.by_consumer = dict.fromkeys(_CONSUMERS, 0)
        self._by_module: dict[str, int] = {}

    def add(self, block: _Block, size: int) -> None:
        consumer = "temporaries" if block.holder is None else block.holder.resolved
        self.by_consumer[consumer] += size
        if consumer == "activations" and block.holder is not None:
            module = block.holder.module
            self._by_module[module] = self._by_module.get(module, 0) + size

    def breakdown(self) -> MemoryBreakdown:
        by_module = {module: size for module, size in self._by_module.items() if size}
        return MemoryBreakdown(**self.by_consumer, activations_by_module=by_module)
