"""Peak memory and time of one step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_memopt.measuring.allocation_events import AllocationRecorder
from lightning_memopt.measuring.marks import MarkCollector, MemoryMark, collecting_marks
from lightning_memopt.measuring.storage_trace import StorageTrace, fake_mode

__all__ = ["MemoryPoint", "StepMemory", "measure_memory"]

_MIB = 2**20
_ALLOCATOR_STATISTICS = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "synchronize")


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes alive from one moment of a step until the next.

    Attributes:
        time_ms: Time since the first allocation of the step, in ms.
        bytes: Bytes alive on the device.
    """

    time_ms: float
    bytes: int


@dataclass(frozen=True)
class StepMemory:
    """Memory and time of one step on one device.

    Attributes:
        peak_bytes: Most bytes alive at once, weights, inputs and all else from before the step included, as
            ``torch.cuda.max_memory_allocated`` counts.
        start_bytes: Bytes alive when the step began.
        end_bytes: Bytes alive when it was over.
        step_ms: Time of the step in ms. On the CPU the recording of allocations is part of it: compare it with other
            measured steps, not with a bare one.
        device: The device measured, for example ``"cpu"`` or ``"cuda:0"``.
        timeline: Bytes alive over the step, one point per allocation and free, the first at its start. Empty on
            devices whose allocator keeps the peak itself.
        marks: The moments that :func:`mark_memory` named during the step, in order, on every device.

    Example:
        >>> print(StepMemory(peak_bytes=3 * 2**20, start_bytes=2**20, end_bytes=2**21, step_ms=1.25, device="cpu"))
        peak 3.0 MiB (2.0 MiB above the start), end 2.0 MiB, 1.2 ms on cpu
    """

    peak_bytes: int
    start_bytes: int
    end_bytes: int
    step_ms: float
    device: str
    timeline: tuple[MemoryPoint, ...] = field(default=(), repr=False)  # thousands of points
    marks: tuple[MemoryMark, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return (
            f"peak {self.peak_bytes / _MIB:.1f} MiB ({(self.peak_bytes - self.start_bytes) / _MIB:.1f} MiB above the "
            f"start), end {self.end_bytes / _MIB:.1f} MiB, {self.step_ms:.1f} ms on {self.device}"
        )


def measure_memory(step: Callable[[], object], *, device: torch.device | str | None = None) -> StepMemory:
    """Run ``step`` once and return its peak memory in bytes and its time in ms.

    What the step returns is dropped; what it changes (gradients, buffers, optimizer and neuron state) stays changed.
    Everything alive on the device counts, other models of this process too: compare ``peak_bytes - start_bytes``.

    On CUDA, and on other devices whose allocator keeps statistics, the allocator is asked; its peak statistics are
    reset, which other readers of ``max_memory_allocated`` will notice. On the CPU the allocation events of the
    profiler are added up on top of the bytes alive at the start. The two agree within 0.5 % where the same tensors
    are saved for backward. In a ``FakeTensorMode`` the storages that operations make are added up: nothing is computed
    and no memory is needed, on a device that need not be there; what an operation takes for itself while it runs is
    not seen. On the CPU torch may print one warning about a "memory block of unknown size" when the
    step frees a tensor from before it; such tensors are accounted for.

    Args:
        step: The step to run, for example one forward, loss and backward.
        device: Where to measure. ``None``: the current CUDA device if this process holds tensors there, else the CPU.

    Raises:
        TypeError: If ``step`` is not callable.
        ValueError: If nothing on ``device`` counts memory.
        RuntimeError: If a torch profiler already runs (CPU only).
        Exception: Whatever ``step`` raises, after the recording has been stopped.

    Example:
        >>> import torch
        >>> layer, data = torch.nn.Linear(256, 256, bias=False), torch.zeros(1024, 256)
        >>> report = measure_memory(lambda: layer(data).sum().backward())
        >>> (report.end_bytes - report.start_bytes) == 256 * 256 * 4  # the gradient stays
        True
        >>> report.peak_bytes - report.start_bytes >= 1024 * 256 * 4  # the output was alive at some time
        True
    """
    if not callable(step):
        raise TypeError(f"measure_memory() runs a callable without arguments; got {type(step).__name__}")
    where = _default_device() if device is None else torch.device(device)
    if fake_mode() is not None:
        return _measure_by_operations(step, where)
    if where.type == "cpu":
        return _measure_by_events(step)
    return _measure_by_allocator(step, where)


def _default_device() -> torch.device:
    # memory_allocated() answers 0, without starting CUDA, in a process that has not used it.
    if torch.cuda.memory_allocated() > 0:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _measure_by_events(step: Callable[[], object]) -> StepMemory:
    recorder = AllocationRecorder()
    recorder.start()
    try:
        begin = time.perf_counter()
        step()
        step_ms = (time.perf_counter() - begin) * 1e3
    finally:
        recording = recorder.stop()
    return StepMemory(
        peak_bytes=recording.peak_bytes,
        start_bytes=recording.start_bytes,
        end_bytes=recording.end_bytes,
        step_ms=step_ms,
        device="cpu",
        timeline=tuple(MemoryPoint(time_ms, alive) for time_ms, alive in recording.points),
        marks=recording.marks,
    )


def _measure_by_operations(step: Callable[[], object], device: torch.device) -> StepMemory:
    gc.collect()
    trace = StorageTrace(device)
    begin = time.perf_counter()
    with trace, collecting_marks(trace):
        step()
    return StepMemory(
        peak_bytes=trace.peak_bytes,
        start_bytes=trace.start_bytes,
        end_bytes=trace.end_bytes,
        step_ms=(time.perf_counter() - begin) * 1e3,
        device=str(device),
        timeline=tuple(MemoryPoint(time_ms, alive) for time_ms, alive in trace.points),
        marks=tuple(trace.marks),
    )


def _measure_by_allocator(step: Callable[[], object], device: torch.device) -> StepMemory:
    allocator = _allocator_of(device)
    index = allocator.current_device() if device.index is None else device.index
    allocator.synchronize(index)
    allocator.reset_peak_memory_stats(index)
    start_bytes = allocator.memory_allocated(index)
    collector = MarkCollector(allocator, index)
    begin = time.perf_counter()
    with collecting_marks(collector):
        step()
    allocator.synchronize(index)
    step_ms = (time.perf_counter() - begin) * 1e3
    return StepMemory(
        peak_bytes=collector.peak_bytes,
        start_bytes=start_bytes,
        end_bytes=allocator.memory_allocated(index),
        step_ms=step_ms,
        device=f"{device.type}:{index}",
        marks=tuple(collector.marks),
    )


def _allocator_of(device: torch.device) -> Any:
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        module = None
    if module is None or not all(hasattr(module, name) for name in _ALLOCATOR_STATISTICS):
        raise ValueError(
            f"memory was to be measured on {device}, whose allocator keeps no peak. Measure on a CUDA device, or run "
            "the same step on the CPU"
        )
    return module
