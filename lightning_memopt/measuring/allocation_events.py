"""Bytes alive over time on the CPU, from the allocation events of the profiler.

The CPU allocator keeps no statistics, but with ``profile_memory=True`` it reports every block it hands out and takes
back, with address, size and time, to the running profiler. Added up on top of the bytes alive at the start, they
give the curve that ``torch.cuda.memory_allocated`` would draw, and its highest point is what
``torch.cuda.max_memory_allocated`` would report, up to the 512-byte rounding of the CUDA allocator.

Two things the events do not say, and where they are taken from instead:

* Bytes alive at the start. Every tensor that Python knows of is asked for its storage, each storage counted once, and
  DDP for its buckets. Tensors that only an autograd graph from before the start holds are not seen. Finding them, and
  collecting garbage first, costs CPU time in proportion to all objects of the process; :func:`measuring_repeatedly`
  pays it once.
* Blocks from before the start that are freed during the recording (the gradients that ``zero_grad`` drops, the neuron
  state of the step before). The allocator knows no size for them, or a stale one from an earlier profile, so a weak
  reference on each such storage notes its end, with an empty profiler range that puts it in order with the events.

Blocks handed out or taken back by threads that the profiler does not follow (Python threads started by the user, data
loader threads) are not counted. Autograd runs the backward of CPU tensors in the calling thread, so it is followed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile, record_function
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_memopt.measuring.gradient_buckets import gradient_buckets
from lightning_memopt.measuring.marks import MARK_RANGE, MemoryMark

__all__ = ["AllocationRecorder", "AllocationRecording", "measuring_repeatedly", "storages_alive"]

_FREED_RANGE = "lightning_memopt::storage_freed::"
_NOTE_RANGE = "lightning_memopt::note::"

# What holds tensors from before measuring_repeatedly(), which the garbage collector does not list inside of it.
_SET_ASIDE: list[weakref.ref[Any]] = []


@dataclass(frozen=True)
class AllocationRecording:
    """Bytes alive on the CPU while an :class:`AllocationRecorder` ran.

    Attributes:
        start_bytes: Bytes of all storages alive at the start.
        points: ``(time in ms since the first event, bytes alive from then on)``, in order of time, first the start.
        marks: The moments that :func:`~lightning_memopt.measuring.mark_memory` named, in order.
        changes: ``(address, bytes)`` of the block handed out (positive) or taken back before each point but the first.
            Where it was alive at the start, ``~index`` into ``at_start`` takes the place of the address.
        at_start: ``(what the storage's _cdata was, bytes)`` of each storage alive at the start.
        notes: ``(number of changes before it, text)`` of each :meth:`AllocationRecorder.note`, in order.
    """

    start_bytes: int
    points: tuple[tuple[float, int], ...] = field(repr=False)  # thousands
    marks: tuple[MemoryMark, ...] = field(default=(), repr=False)
    changes: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    at_start: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    notes: tuple[tuple[int, str], ...] = field(default=(), repr=False)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once, those from before the start included."""
        return max(alive for _, alive in self.points)

    @property
    def end_bytes(self) -> int:
        """Bytes alive at the end."""
        return self.points[-1][1]


class AllocationRecorder:
    """Records the bytes alive on the CPU between :meth:`start` and :meth:`stop`.

    For code that cannot be put into one function; :func:`~lightning_memopt.measuring.measure_memory` is the usual way.

    Raises:
        RuntimeError: From :meth:`start` if a profiler already runs in this thread, or if it was started before; from
            :meth:`stop` if it was not.

    Example:
        >>> recorder = AllocationRecorder()
        >>> recorder.start()
        >>> held = torch.empty(1024, dtype=torch.uint8)
        >>> recording = recorder.stop()
        >>> recording.end_bytes - recording.start_bytes
        1024
    """

    def __init__(self) -> None:
        self._profile: Any = None
        # storage -> what it held at the start: index is the position in these lists
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []
        self._sizes: list[int] = []
        self._addresses: list[int] = []
        self._keys: list[int] = []

    @property
    def running(self) -> bool:
        """Whether it was started and not yet stopped."""
        return self._profile is not None

    def start(self) -> None:
        """Count the bytes alive now and begin to record."""
        if self.running:
            raise RuntimeError("this AllocationRecorder already runs; stop() it before it is started again")
        refuse_nested_profiler()
        gc.collect()  # garbage that a collection inside the step would free is no part of the step
        for storage in storages_alive(torch.device("cpu")):
            self._watch(storage)
        self._profile = profile(use_cpu=True, profile_memory=True)
        try:
            with _quiet_kineto():
                self._profile.__enter__()
        except BaseException:
            self._reset()
            raise

    def stop(self) -> AllocationRecording:
        """End the recording and return it."""
        if not self.running:
            raise RuntimeError("this AllocationRecorder does not run; start() comes before stop()")
        try:
            self._profile.__exit__(None, None, None)
            return self._integrate(list(_event_tree(self._profile)))
        finally:
            self._reset()

    @staticmethod
    def note(text: str) -> None:
        """Write ``text`` into the recording, in order with the allocations of this thread."""
        with record_function(_NOTE_RANGE + text):
            pass

    def _watch(self, storage: torch.UntypedStorage) -> None:
        name = f"{_FREED_RANGE}{len(self._watched)}"

        def note_end(_: object) -> None:
            with record_function(name):
                pass

        self._watched.append(weakref.ref(storage, note_end))
        self._sizes.append(storage.nbytes())
        self._addresses.append(storage.data_ptr())
        self._keys.append(storage._cdata)

    def _integrate(self, events: list[Any]) -> AllocationRecording:
        events.sort(key=lambda event: event.start_time_ns)
        start_bytes = alive = sum(self._sizes)
        begin = events[0].start_time_ns if events else 0
        now = 0.0
        points = [(now, alive)]
        marks: list[MemoryMark] = []
        changes: list[tuple[int, int]] = []
        notes: list[tuple[int, str]] = []
        peak = alive  # since the last mark
        blocks: set[int] = set()  # addresses handed out during the recording and not yet taken back
        ended: set[int] = set()  # indices of the watched storages that are gone
        for event in events:
            if event.name.startswith(MARK_RANGE):
                marks.append(MemoryMark(event.name[len(MARK_RANGE) :], alive, peak))
                peak = alive
                continue
            if event.name.startswith(_NOTE_RANGE):
                notes.append((len(changes), event.name[len(_NOTE_RANGE) :]))
                continue
            if event.name.startswith(_FREED_RANGE):
                index = int(event.name[len(_FREED_RANGE) :])
                ended.add(index)
                block, change = ~index, -self._sizes[index]
            elif (fields := _cpu_block(event)) is None:
                continue
            elif fields.alloc_size > 0:
                blocks.add(fields.ptr)
                block, change = fields.ptr, fields.alloc_size
            elif fields.ptr in blocks:
                blocks.remove(fields.ptr)
                block, change = fields.ptr, fields.alloc_size
            else:
                # A block from before the start whose size an earlier profile left behind in the allocator.
                continue
            alive += change
            peak = max(peak, alive)
            now = (event.start_time_ns - begin) / 1e6
            points.append((now, alive))
            changes.append((block, change))

        # Storages that ended in a thread the profiler does not follow, or that got another block by resize_(): when
        # that was is unknown, so they leave at the end and the peak is at most too high by them.
        for index, reference in enumerate(self._watched):
            if index not in ended and _lost_its_block(reference(), self._addresses[index]):
                alive -= self._sizes[index]
                points.append((now, alive))
                changes.append((~index, -self._sizes[index]))
        at_start = tuple(zip(self._keys, self._sizes, strict=True))
        return AllocationRecording(start_bytes, tuple(points), tuple(marks), tuple(changes), at_start, tuple(notes))

    def _reset(self) -> None:
        self._profile = None
        self._watched, self._sizes, self._addresses, self._keys = [], [], [], []


def storages_alive(device: torch.device) -> list[torch.UntypedStorage]:
    """Return the storages on ``device`` of all tensors that Python knows of, each once.

    Tensors held by lists, closures and modules are found through the garbage collector, gradients through their
    parameter. A view and its base share one storage. Sparse tensors and wrapper subclasses (``DTensor``) give the
    storages of their parts.

    Example:
        >>> base = torch.zeros(100)
        >>> view = base[10:20]
        >>> [s.nbytes() for s in storages_alive(torch.device("cpu")) if s.data_ptr() == base.data_ptr()]
        [400]
    """
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors_alive():
        for storage in dense_storages(tensor):
            on_device = storage.device.type == device.type and device.index in (None, storage.device.index)
            if on_device and holds_memory(storage):
                found[storage._cdata] = storage
    return list(found.values())


@contextlib.contextmanager
def measuring_repeatedly(device: torch.device) -> Iterator[None]:
    """Make the start of each measurement inside cost what is new, not what the process holds.

    Before a step is measured on the CPU, garbage is collected and the tensors alive are looked for, which takes some
    0.3 s of CPU time per million objects. In here it is done once: the objects alive at the beginning are set aside by
    ``gc.freeze()``, their tensors remembered, and each measurement collects and searches only objects made since. The
    numbers are the same, except that an object from before that *becomes* garbage inside, in a reference cycle, is
    freed at the end only. Objects that somebody else froze would be released with ours, so then nothing is set aside;
    neither is it inside another ``measuring_repeatedly``, nor on devices whose allocator keeps the peak itself.

    Example:
        >>> from lightning_memopt.measuring import measure_memory
        >>> with measuring_repeatedly(torch.device("cpu")):
        ...     peaks = {measure_memory(lambda: torch.zeros(1000).exp(), device="cpu").peak_bytes for _ in range(3)}
        >>> len(peaks)
        1
    """
    if device.type != "cpu" or gc.get_freeze_count() > 0:
        yield
        return
    gc.collect()
    _SET_ASIDE.extend(weakref.ref(holder) for holder in _alive(Tensor, DistributedDataParallel))
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _SET_ASIDE.clear()


def tensors_alive() -> list[Tensor]:
    """All tensors that Python knows of, except gradients, which their parameter holds, and the buckets of DDP."""
    wrappers: list[DistributedDataParallel] = []
    tensors: list[Tensor] = []
    for holder in _alive(Tensor, DistributedDataParallel):
        (tensors if isinstance(holder, Tensor) else wrappers).append(holder)
    return tensors + gradient_buckets(wrappers)


def wrappers_alive() -> list[DistributedDataParallel]:
    """All models that DDP wraps; without a process group there are none, and nothing is looked for."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    return _alive(DistributedDataParallel)


def _alive(*classes: type) -> list[Any]:
    """All objects of these classes and of those derived from them."""
    kinds = [*classes]
    for kind in kinds:  # grows while it is walked
        kinds.extend(type.__subclasses__(kind))
    # By the identity of type(): there may be millions of objects, and isinstance() is slow, and makes proxies build
    # what they stand for; hash() of a type may be overridden by its metaclass.
    known = {id(kind) for kind in kinds}
    found = [candidate for candidate in gc.get_objects() if id(type(candidate)) in known]
    set_aside = (holder for reference in _SET_ASIDE if (holder := reference()) is not None)
    found.extend(holder for holder in set_aside if id(type(holder)) in known)
    return found


def dense_storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold a tensor's elements and its gradient's, those of a sparse tensor's parts included."""
    yield from own_storages(tensor)
    with contextlib.suppress(RuntimeError, NotImplementedError, ReferenceError, ValueError):
        if tensor.is_leaf and tensor.grad is not None:
            yield from dense_storages(tensor.grad)


def own_storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold a tensor's elements, those of the parts of sparse tensors and wrappers included."""
    with contextlib.suppress(RuntimeError, NotImplementedError, ReferenceError, ValueError):  # the last: lazy ones
        shell: Any = tensor
        if is_traceable_wrapper_subclass(shell):
            for name in shell.__tensor_flatten__()[0]:
                yield from own_storages(getattr(shell, name))
        else:
            for part in _dense_parts(tensor):
                yield part.untyped_storage()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages that hold the elements of ``tensors``, each once."""
    return sum({storage._cdata: storage.nbytes() for tensor in tensors for storage in own_storages(tensor)}.values())


def holds_memory(storage: torch.UntypedStorage) -> bool:
    """Fake tensors, which compilers leave behind, have a device but no memory on it."""
    try:
        storage.data_ptr()
    except RuntimeError:
        return False
    return True


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def refuse_nested_profiler() -> None:
    """Raise ``RuntimeError`` if a profiler runs in this thread: two cannot."""
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError(
            "a torch profiler already runs in this thread, and memory is recorded with a profiler of its own. "
            "Measure outside the `with torch.profiler.profile(...)` block, or without Trainer(profiler='pytorch')"
        )


@contextlib.contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Start the profiler without its chatter on stderr.

    Kineto prints start and stop messages, and an ERROR where a CUDA build of torch finds no driver. It reads its log
    level from the environment once, when the first profiler starts; a level the user set is left alone.
    """
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]


def _event_tree(finished: Any) -> Iterator[Any]:
    """All events of a finished profile.

    The flat public list of events leaves out the addresses, without which a free cannot be told from a stale one.
    """
    pending = list(finished.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        yield event
        pending.extend(event.children)


def _cpu_block(event: Any) -> Any | None:
    if event.tag != torch._C._profiler._EventType.Allocation:
        return None
    block = event.extra_fields
    return block if block.device.type == "cpu" else None


def _lost_its_block(storage: torch.UntypedStorage | None, address: int) -> bool:
    return storage is None or storage.data_ptr() != address
