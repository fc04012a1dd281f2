"""Peak memory and time of one step, and on demand who held the bytes."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memopt.measuring.allocation_events import AllocationRecorder, storages_alive
from lightning_memopt.measuring.attribution import StepAttribution
from lightning_memopt.measuring.consumers import MemoryEstimate
from lightning_memopt.measuring.marks import MarkCollector, MemoryMark, collecting_marks
from lightning_memopt.measuring.storage_trace import StepTrace, fake_mode

__all__ = ["AttributedStep", "MemoryPoint", "StepMemory", "measure_memory"]

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
            devices whose allocator keeps the peak itself, unless a model was given.
        marks: The moments that :func:`mark_memory` named during the step, in order, on every device.
        breakdown: If a model was given: who held the bytes at the peak and at the ends of forward, backward and
            optimizer step.
        by_consumer: If a model was given: the bytes of each consumer at each point of ``timeline``.

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
    breakdown: MemoryEstimate | None = field(default=None, repr=False)
    by_consumer: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return (
            f"peak {self.peak_bytes / _MIB:.1f} MiB ({(self.peak_bytes - self.start_bytes) / _MIB:.1f} MiB above the "
            f"start), end {self.end_bytes / _MIB:.1f} MiB, {self.step_ms:.1f} ms on {self.device}"
        )


def measure_memory(
    step: Callable[[], object],
    *,
    device: torch.device | str | None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    batch: object = (),
) -> StepMemory:
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

    With a ``model``, every byte is attributed to parameters, gradients, optimizer state, activations (and the module
    that saved them), autocast copies, buffers, inputs, temporaries or other. The sums are the measured bytes, on the
    CPU to the byte. The step then runs under a dispatch mode and hooks on saved tensors and is slower, on CUDA too.

    Args:
        step: The step to run, for example one forward, loss and backward.
        device: Where to measure. ``None``: the current CUDA device if this process holds tensors there, else the CPU.
        model: The model that the step trains, for a breakdown.
        optimizer: Optimizers whose state counts although they do not step in ``step``; those that do are found.
        batch: Tensors, in any containers, that are inputs although the forward may not read them; the others are found.

    Raises:
        TypeError: If ``step`` is not callable, ``model`` is no module, or ``optimizer`` is none and no list of them.
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
        >>> layer.zero_grad()
        >>> report = measure_memory(lambda: layer(data).sigmoid().sum().backward(), model=layer)
        >>> peak = report.breakdown.peak
        >>> peak.parameters, peak.inputs, peak.total_bytes == report.peak_bytes
        (262144, 1048576, True)
    """
    if not callable(step):
        raise TypeError(f"measure_memory() runs a callable without arguments; got {type(step).__name__}")
    where = _default_device() if device is None else torch.device(device)
    if model is not None:
        return _measure_with_breakdown(step, where, model, _checked_optimizers(model, optimizer), batch)
    if fake_mode() is not None:
        return _measure_by_operations(step, where)
    if where.type == "cpu":
        return _measure_by_events(step)
    return _measure_by_allocator(step, where)


def _checked_optimizers(model: object, optimizer: object) -> tuple[Optimizer, ...]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"measure_memory(model=...) takes the torch.nn.Module that the step trains; got {model!r}")
    optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else optimizer
    if not isinstance(optimizers, Sequence) or not all(isinstance(each, Optimizer) for each in optimizers):
        raise TypeError(
            f"measure_memory(optimizer=...) takes a torch.optim.Optimizer or a list of them; got {optimizer!r}"
        )
    return tuple(optimizers)


def _default_device() -> torch.device:
    # memory_allocated() answers 0, without starting CUDA, in a process that has not used it. In one that has, cuBLAS
    # keeps its workspaces when all tensors are gone.
    if torch.cuda.memory_allocated() > 0:
        device = torch.device("cuda", torch.cuda.current_device())
        if storages_alive(device):
            return device
    return torch.device("cpu")


def _measure_with_breakdown(
    step: Callable[[], object],
    device: torch.device,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    batch: object,
) -> StepMemory:
    attributed = AttributedStep(device, model, optimizers, batch)
    attributed.start()
    try:
        step()
        return attributed.stop()
    finally:
        attributed.abandon()


class AttributedStep:
    """Like :func:`measure_memory` with a breakdown, for a step that is no function: from :meth:`start` to :meth:`stop`.

    Args:
        device: Where to measure.
        model: The model that the step trains.
        optimizers: Optimizers whose state counts although they do not step meanwhile.
        batch: Tensors, in any containers, that are inputs although the forward may not read them.

    Raises:
        ValueError: If nothing on ``device`` counts memory.

    Example:
        >>> layer, data = nn.Linear(64, 64, bias=False), torch.zeros(256, 64)
        >>> measured = AttributedStep(torch.device("cpu"), layer)
        >>> measured.start()
        >>> layer(data).sum().backward()
        >>> measured.stop().breakdown.peak.parameters
        16384
    """

    def __init__(
        self, device: torch.device, model: nn.Module, optimizers: Sequence[Optimizer] = (), batch: object = ()
    ) -> None:
        self._device = device
        allocator = None if device.type == "cpu" or fake_mode() is not None else _allocator_of(device)
        self._attribution = StepAttribution(device, model, optimizers, batch, allocator=allocator)
        self._marks = contextlib.ExitStack()
        self._begin = 0.0

    def start(self) -> None:
        """Begin; ``RuntimeError`` if a torch profiler runs already (CPU only)."""
        self._attribution.start()
        if self._attribution.marks is not None:
            self._marks.enter_context(collecting_marks(self._attribution.marks))
        self._begin = time.perf_counter()

    def stop(self) -> StepMemory:
        """End, and say what the step took."""
        step_ms = (time.perf_counter() - self._begin) * 1e3
        self._marks.close()
        attributed = self._attribution.stop()
        return StepMemory(
            peak_bytes=max(alive for _, alive in attributed.points),
            start_bytes=attributed.points[0][1],
            end_bytes=attributed.points[-1][1],
            step_ms=step_ms,
            device=str(self._device),
            timeline=tuple(MemoryPoint(time_ms, alive) for time_ms, alive in attributed.points),
            marks=attributed.marks,
            breakdown=attributed.breakdown,
            by_consumer=attributed.by_consumer,
        )

    def abandon(self) -> None:
        """End without a result; does nothing where none runs."""
        self._marks.close()
        self._attribution.abandon()


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
    trace = StepTrace(device)
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
