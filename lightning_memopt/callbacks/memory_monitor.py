"""
Memory Monitor
^^^^^^^^^^^^^^

Logs peak memory and time of the training steps.
"""

from __future__ import annotations

import contextlib
import math
import reprlib
import statistics
import time
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_memopt.callbacks.leak_watch import LeakWatch, batch_shapes
from lightning_memopt.callbacks.out_of_memory import report_out_of_memory
from lightning_memopt.measuring import CONSUMERS, AllocationRecorder, process_memory
from lightning_memopt.measuring.attribution import StepAttribution, tensors_inside

if TYPE_CHECKING:
    from lightning_memopt.measuring.consumers import MemoryEstimate

_MIB = 2**20
# What may be known of a step's memory, in the order in which the ranks exchange it.
_MEMORY = (
    "peak_allocated_mib",
    "peak_reserved_mib",
    "alloc_retries",
    "rss_mib",
    *(f"peak_{name}_mib" for name in CONSUMERS),
)
_TIMES = ("step_ms_mean", "step_ms_median", "step_ms_max", "sum_ms")
_MISSING = -1.0  # below all that is measured, so that the maximum over the ranks leaves it out


class MemoryMonitor(Callback):
    r"""Logs peak memory, step time and throughput of training, per optimizer step and per epoch.

    A step is everything between ``on_train_batch_start`` and ``on_train_batch_end``: forward, backward, optimizer.
    Waiting for data, moving it to the device and validation are left out. With gradient accumulation the micro-batches
    up to an optimizer step are one step: their times are summed, their peaks enter by maximum.

    **Logged metrics**, all with the prefix ``MemoryMonitor/``; MiB are 2**20 bytes, memory is the MAX over all ranks:

    - every ``Trainer.log_every_n_steps`` optimizer steps:

        - ``peak_allocated_mib``, ``peak_reserved_mib``: peaks of the CUDA allocator within the step
        - ``alloc_retries``: how often the CUDA allocator had to empty its cache since the step before
        - ``rss_mib``: on other devices, resident memory of the process after the step
        - ``peak_allocated_mib``: on the CPU, every ``trace_every_n_steps``-th step
        - ``peak_<consumer>_mib``: every ``breakdown_every_n_steps``-th step, the bytes at its peak of each consumer:
          ``parameters``, ``gradients``, ``optimizer_state``, ``activations``, ``autocast_copies``, ``buffers``,
          ``inputs``, ``communication``, ``temporaries`` and ``other``
        - ``step_ms``: time of the step
        - ``samples_per_s``: samples of all ranks over the time of the step

    - at the end of every epoch: ``epoch_peak_allocated_mib``, ``epoch_peak_reserved_mib``, ``epoch_rss_mib`` (maximum),
      ``epoch_alloc_retries`` (sum), ``epoch_step_ms_mean``, ``epoch_step_ms_median``, ``epoch_step_ms_max`` (of the
      slowest rank) and ``epoch_samples_per_s``

    They go to every logger, together with ``epoch`` as Lightning logs it, and to ``trainer.callback_metrics``; the
    latter after each step in a single process, and after each logged step where several have to agree on the maximum.

    On CUDA, time is taken by pairs of events that are read once the device has passed them, so nothing waits for the
    device within an epoch; a step is then logged a few steps later, under its own step number. On other devices it is
    the time of the host.

    What goes wrong in the monitor itself does not end a training: there is one warning of each kind, and what could not
    be measured is left out. Errors of the model, the loggers and ``batch_size_fn`` go on their way.

    Args:
        batch_size_fn: Number of samples in a batch. ``None``: the size of the first dimension of the first tensor in
            it; give a function where that is the time dimension. If no size is found, ``samples_per_s`` is left out.
        reset_peak: Whether to reset the peak statistics of the CUDA allocator before each batch. If ``False``, peaks
            are those since the last reset by anyone, which for a monitor of the whole run may be what is wanted.
        trace_every_n_steps: On the CPU, record the allocations of every n-th optimizer step to find its peak. A traced
            step is slower (and so has no ``step_ms``). 0 traces none.
        breakdown_every_n_steps: Attribute every byte of every n-th optimizer step to a consumer, on CUDA and on the
            CPU. Such a step is several times slower (and so has no ``step_ms``). The last one is in
            :attr:`breakdown`, with activations by module. 0 makes none.
        watch_leaks: Warn once if the bytes alive after a step grow from step to step while the batches have the same
            shapes, by 64 KiB and more, and name the attribute that holds them. State of optimizers and of metrics may
            grow. On CUDA every step is looked at, on the CPU those that are traced or broken down.
        out_of_memory_report: If a step runs out of memory, in training or in a validation between, write a report
            beside the logs before the error goes on its way: the phase, who holds the bytes, and what would need fewer.

    Raises:
        MisconfigurationException:
            If ``batch_size_fn`` is not callable, ``trace_every_n_steps`` or ``breakdown_every_n_steps`` is not a whole
            number from 0 on, or they ask for traces while the Trainer runs the PyTorch profiler. In training, if
            ``batch_size_fn`` returns something that is no number of samples.

    Example::

        from lightning import Trainer
        from lightning_memopt import MemoryMonitor

        trainer = Trainer(callbacks=[MemoryMonitor()])
        trainer.fit(model)
        trainer.callback_metrics["MemoryMonitor/epoch_step_ms_median"]

    """

    def __init__(
        self,
        *,
        batch_size_fn: Callable[[Any], int] | None = None,
        reset_peak: bool = True,
        trace_every_n_steps: int = 0,
        breakdown_every_n_steps: int = 0,
        watch_leaks: bool = True,
        out_of_memory_report: bool = True,
    ) -> None:
        super().__init__()
        if batch_size_fn is not None and not callable(batch_size_fn):
            raise MisconfigurationException(
                f"`MemoryMonitor(batch_size_fn=...)` takes a function of the batch; got {batch_size_fn!r}."
            )
        for name, steps, without in (
            ("trace", trace_every_n_steps, "traces"),
            ("breakdown", breakdown_every_n_steps, "breakdowns"),
        ):
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
                raise MisconfigurationException(
                    f"`MemoryMonitor({name}_every_n_steps=...)` takes a whole number of optimizer steps, 0 for no"
                    f" {without}; got {steps!r}."
                )
        self.batch_size_fn = batch_size_fn
        self.reset_peak = reset_peak
        self.trace_every_n_steps = trace_every_n_steps
        self.breakdown_every_n_steps = breakdown_every_n_steps
        self.watch_leaks = watch_leaks
        self.out_of_memory_report = out_of_memory_report
        self.breakdown: MemoryEstimate | None = None
        self._attribution: StepAttribution | None = None
        self._leaks = LeakWatch()
        self._batch: Any = None
        self._told: set[tuple[str, type]] = set()
        self._gauge: _Gauge | None = None
        self._window: _Window | None = None
        self._steps_taken = 0
        self._pending: deque[_Step] = deque()
        self._epoch = _EpochMetrics()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        device = trainer.strategy.root_device
        if self.trace_every_n_steps and device.type != "cpu":
            rank_zero_warn(
                f"`MemoryMonitor(trace_every_n_steps={self.trace_every_n_steps})` traces steps on the CPU only; on"
                f" {device} it has no effect."
            )
        for option in ("trace_every_n_steps", "breakdown_every_n_steps"):
            steps = getattr(self, option)
            if steps and device.type == "cpu" and isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined]
                raise MisconfigurationException(
                    f"`MemoryMonitor({option}={steps})` records allocations with a torch profiler, and only one can run"
                    f" at a time. Leave out `Trainer(profiler='pytorch')`, or set `{option}=0`."
                )
        self._gauge = _CudaGauge(device, self.reset_peak) if device.type == "cuda" else _HostGauge()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._window = None
        self._pending.clear()
        self._leaks = LeakWatch()
        self._steps_taken = trainer.fit_loop.epoch_loop._batches_that_stepped

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch = _EpochMetrics()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        gauge = self._require_gauge()
        if self._window is None:
            self._window = _Window(first_global_step=trainer.global_step)
        self._abandon_batch()  # one that was skipped after its start has no end
        self._batch = batch
        with self._sparing_the_training("measure a step"):
            if self._is_due(self.breakdown_every_n_steps):
                device = trainer.strategy.root_device
                allocator = torch.cuda if device.type == "cuda" else None
                attribution = StepAttribution(device, pl_module, trainer.optimizers, batch, allocator=allocator)
                gauge.start(trace=False)
                attribution.start()
                self._attribution = attribution
            else:
                gauge.start(trace=self._is_traced(trainer))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        window = self._window
        self._batch = None
        if window is None:
            return
        reading = _Reading()
        with self._sparing_the_training("measure a step"):
            reading = self._stop(window)
        if reading.interval is None:
            self._abandon_batch()
        window.add(reading, self._batch_size(batch))
        if trainer.global_step == window.first_global_step:
            return  # gradients are still being accumulated
        self._window = None
        if reading.alive_bytes is not None and self.watch_leaks:
            with self._sparing_the_training("look for leaks"):
                self._look_for_leaks(trainer, pl_module, reading.alive_bytes, batch)
        self._pending.append(self._close(trainer, window))
        self._finish_steps(trainer, wait=False)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish_steps(trainer, wait=True)
        metrics = _as_tensors(self._epoch.compute(trainer))
        _show(trainer, metrics)
        # As for Lightning's own epoch metrics: the step of the last optimizer step.
        _log(trainer, metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped - 1)

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._batch = batch

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._batch = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        batch = self._batch
        self._abandon()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.out_of_memory_report and fitting and isinstance(exception, torch.OutOfMemoryError):
            report_out_of_memory(trainer, pl_module, exception, batch, self.batch_size_fn)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._abandon()

    @contextlib.contextmanager
    def _sparing_the_training(self, what: str) -> Iterator[None]:
        """For what the monitor does for itself, and nothing of the user's: where it fails, the training goes on."""
        try:
            yield
        except Exception as error:
            kind = (what, type(error))
            if kind not in self._told:
                self._told.add(kind)
                rank_zero_warn(
                    f"MemoryMonitor could not {what}, and leaves it out: {type(error).__name__}: {error}",
                    category=RuntimeWarning,
                )

    def _require_gauge(self) -> _Gauge:
        if self._gauge is None:
            raise RuntimeError("`MemoryMonitor` saw a training batch before `setup(stage='fit')`")
        return self._gauge

    def _is_due(self, every: int) -> bool:
        return every > 0 and (self._steps_taken + 1) % every == 0

    def _is_traced(self, trainer: Trainer) -> bool:
        on_cpu = trainer.strategy.root_device.type == "cpu"
        return (on_cpu and self._is_due(self.trace_every_n_steps)) or self._is_due(self.breakdown_every_n_steps)

    def _stop(self, window: _Window) -> _Reading:
        """The reading of the batch; one that was broken down gives the peak of its own."""
        gauge, attribution = self._require_gauge(), self._attribution
        if attribution is None:
            return gauge.stop()
        self._attribution = None
        attributed = attribution.stop()
        reading = gauge.stop()
        peak = attributed.breakdown.peak_bytes
        if window.breakdown is None or peak > window.breakdown.peak_bytes:
            window.breakdown = attributed.breakdown
        return _Reading(
            {**reading.memory, "peak_allocated_mib": peak / _MIB}, reading.interval, attributed.points[-1][1]
        )

    def _look_for_leaks(self, trainer: Trainer, pl_module: LightningModule, alive: int, batch: Any) -> None:
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        callbacks = {type(callback).__name__: callback for callback in others}
        owners = {type(pl_module).__name__: pl_module, **callbacks}
        found = self._leaks.see(alive, batch_shapes(batch), owners, trainer.optimizers)
        if found is not None:
            warnings.warn(f"MemoryMonitor: {found}", RuntimeWarning, stacklevel=2)

    def _batch_size(self, batch: Any) -> float:
        if self.batch_size_fn is not None:
            return _checked_size(self.batch_size_fn(batch))
        with self._sparing_the_training("find the size of a batch"):
            for tensor in tensors_inside(batch, attributes=True):
                return float(tensor.shape[0]) if tensor.dim() else 1.0
        return math.nan

    def _close(self, trainer: Trainer, window: _Window) -> _Step:
        """Number the step, and let the ranks agree on its memory and samples if it is to be seen."""
        traced = self._is_traced(trainer)
        self._steps_taken += 1
        # Decided by counting alone, so that all ranks decide alike: they meet in a collective below.
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        logged = traced or (every > 0 and self._steps_taken % every == 0)
        memory, samples = window.memory, window.samples
        if window.breakdown is not None:
            self.breakdown = window.breakdown
            consumers = window.breakdown.peak.consumers()
            memory = {**memory, **{f"peak_{name}_mib": size / _MIB for name, size in consumers.items()}}
        if logged:
            memory = _largest(trainer, memory, _MEMORY)
            (samples,) = _reduce(trainer, [samples], "sum")
        self._epoch.add_memory(window.memory)
        return _Step(
            number=trainer.fit_loop.epoch_loop._batches_that_stepped,
            logged=logged,
            shown=logged or trainer.world_size == 1,
            timed=window.timed and not traced,
            memory=memory,
            samples=samples,
            local_samples=window.samples,
            intervals=tuple(window.intervals),
        )

    def _finish_steps(self, trainer: Trainer, *, wait: bool) -> None:
        """Log the steps that the device has passed, oldest first."""
        while self._pending:
            step = self._pending[0]
            for last in step.intervals[-1:]:
                if wait:
                    last.wait()
                elif not last.passed():
                    return
            self._pending.popleft()
            values = dict(step.memory)
            if step.timed:
                step_ms = sum(interval.ms() for interval in step.intervals)
                self._epoch.add_time(step_ms, step.local_samples)
                values["step_ms"] = step_ms
                if not math.isnan(step.samples) and step_ms > 0:
                    values["samples_per_s"] = 1e3 * step.samples / step_ms
            metrics = _as_tensors(_prefixed(values))
            if step.shown:
                _show(trainer, metrics)
            if step.logged:
                _log(trainer, metrics, step=step.number)

    def _abandon_batch(self) -> None:
        self._batch = None
        attribution, self._attribution = self._attribution, None
        with self._sparing_the_training("end a measurement"):
            if attribution is not None:
                attribution.abandon()
            if self._gauge is not None:
                self._gauge.abandon()

    def _abandon(self) -> None:
        self._abandon_batch()
        self._window = None
        self._pending.clear()


class _Interval(Protocol):
    """Time between two moments, known once the device has passed the second."""

    def passed(self) -> bool: ...

    def wait(self) -> None: ...

    def ms(self) -> float: ...


class _Gauge(Protocol):
    """Takes memory and time of one batch on a kind of device."""

    def start(self, *, trace: bool) -> None: ...

    def stop(self) -> _Reading: ...

    def abandon(self) -> None: ...


@dataclass(frozen=True)
class _Reading:
    """One batch: memory by metric name, its time, and the bytes alive at its end where they are known for nothing."""

    memory: Mapping[str, float] = field(default_factory=dict)
    interval: _Interval | None = None
    alive_bytes: int | None = None


@dataclass
class _Window:
    """The batches up to an optimizer step."""

    first_global_step: int
    memory: dict[str, float] = field(default_factory=dict)
    samples: float = 0.0
    intervals: list[_Interval] = field(default_factory=list)
    timed: bool = True
    """The time of each batch is known."""
    breakdown: MemoryEstimate | None = None
    """Of the batch with the highest peak."""

    def add(self, reading: _Reading, samples: float) -> None:
        _add_memory(self.memory, reading.memory)
        self.samples += samples
        if reading.interval is None:
            self.timed = False
        else:
            self.intervals.append(reading.interval)


@dataclass(frozen=True)
class _Step:
    """An optimizer step whose time may not be known yet."""

    number: int
    logged: bool
    shown: bool
    timed: bool
    memory: dict[str, float]
    samples: float
    local_samples: float
    intervals: tuple[_Interval, ...]


class _EpochMetrics:
    """Memory and time of the steps of one epoch, on this rank until :meth:`compute`."""

    def __init__(self) -> None:
        self._memory: dict[str, float] = {}
        self._step_ms = array("d")  # all of them for the median, eight bytes a step
        self._samples = 0.0

    def add_memory(self, memory: Mapping[str, float]) -> None:
        _add_memory(self._memory, memory)

    def add_time(self, step_ms: float, samples: float) -> None:
        self._step_ms.append(step_ms)
        self._samples += samples

    def compute(self, trainer: Trainer) -> dict[str, float]:
        """Metrics over all ranks, by prefixed name."""
        local = dict(self._memory)
        if self._step_ms:
            summed = math.fsum(self._step_ms)
            median, largest = statistics.median(self._step_ms), max(self._step_ms)
            local.update(zip(_TIMES, (summed / len(self._step_ms), median, largest, summed), strict=True))
        metrics = _largest(trainer, local, (*_MEMORY, *_TIMES))
        (samples,) = _reduce(trainer, [self._samples], "sum")
        sum_ms = metrics.pop("sum_ms", 0.0)
        if sum_ms > 0 and not math.isnan(samples):
            metrics["samples_per_s"] = 1e3 * samples / sum_ms
        return _prefixed({f"epoch_{name}": value for name, value in metrics.items()})


def _add_memory(found: dict[str, float], more: Mapping[str, float]) -> None:
    """Peaks enter by maximum, events by their sum."""
    for name, value in more.items():
        before = found.get(name, 0.0)
        found[name] = before + value if name == "alloc_retries" else max(before, value)


class _CudaGauge:
    """Peaks from the CUDA allocator, time from CUDA events."""

    def __init__(self, device: torch.device, reset_peak: bool) -> None:
        self._device = device
        self._reset_peak = reset_peak
        self._begin: torch.cuda.Event | None = None
        # The allocator counts since it was first used, maybe by a training before; it answers {} where it was not.
        self._retries = int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))

    def start(self, *, trace: bool) -> None:
        if self._reset_peak:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._begin = self._now()

    def stop(self) -> _Reading:
        if self._begin is None:
            raise RuntimeError("stop() without start()")
        end = self._now()
        # One read of all statistics; max_memory_allocated() and its like would each make one.
        statistics = torch.cuda.memory_stats_as_nested_dict(self._device)
        retries = int(statistics["num_alloc_retries"])
        memory = {
            "peak_allocated_mib": statistics["allocated_bytes"]["all"]["peak"] / _MIB,
            "peak_reserved_mib": statistics["reserved_bytes"]["all"]["peak"] / _MIB,
            "alloc_retries": float(retries - self._retries),
        }
        self._retries = retries
        begin, self._begin = self._begin, None
        return _Reading(memory, _CudaInterval(begin, end), int(statistics["allocated_bytes"]["all"]["current"]))

    def abandon(self) -> None:
        self._begin = None

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class _CudaInterval:
    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._begin = begin
        self._end = end

    def passed(self) -> bool:
        return bool(self._end.query())

    def wait(self) -> None:
        self._end.synchronize()

    def ms(self) -> float:
        return float(self._begin.elapsed_time(self._end))


class _HostGauge:
    """Resident memory of the process, the time of the host, and on demand the peak by allocation events."""

    def __init__(self) -> None:
        self._recorder = AllocationRecorder()
        self._begin = 0.0
        self._has_rss = True
        try:
            process_memory()
        except NotImplementedError:
            self._has_rss = False

    def start(self, *, trace: bool) -> None:
        if trace:
            self._recorder.start()
        self._begin = time.perf_counter()

    def stop(self) -> _Reading:
        interval = _HostInterval((time.perf_counter() - self._begin) * 1e3)
        memory = {"rss_mib": process_memory() / _MIB} if self._has_rss else {}
        if not self._recorder.running:
            return _Reading(memory, interval)
        recording = self._recorder.stop()
        memory["peak_allocated_mib"] = recording.peak_bytes / _MIB
        return _Reading(memory, interval, recording.end_bytes)

    def abandon(self) -> None:
        if self._recorder.running:
            self._recorder.stop()


class _HostInterval:
    def __init__(self, ms: float) -> None:
        self._ms = ms

    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def ms(self) -> float:
        return self._ms


def _largest(trainer: Trainer, values: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """The largest of all ranks, of each of ``names`` that a rank has: what one could not measure it leaves out here."""
    reduced = _reduce(trainer, [values.get(name, _MISSING) for name in names], "max")
    return {name: value for name, value in zip(names, reduced, strict=True) if value >= 0}


def _reduce(trainer: Trainer, values: list[float], operation: str) -> list[float]:
    """Combine the values of all ranks; every rank must come with as many."""
    if trainer.world_size == 1:
        return values
    local = torch.tensor(values, dtype=torch.float64, device=trainer.strategy.root_device)
    reduced = torch.as_tensor(trainer.strategy.reduce(local, reduce_op=operation))
    return [float(value) for value in reduced.tolist()]


def _show(trainer: Trainer, metrics: dict[str, torch.Tensor]) -> None:
    """Put the metrics into ``trainer.callback_metrics``.

    Not by that property: it collects what the module has logged, and waits for the device to show it.
    """
    trainer._logger_connector._callback_metrics.update(metrics)


def _log(trainer: Trainer, metrics: dict[str, torch.Tensor], step: int) -> None:
    """Give the metrics to all loggers under ``step``, together with ``epoch`` as Lightning gives it with its own.

    The logger connector leaves ``epoch`` out where the step is given, and would keep it as a metric if it were passed.
    """
    if not trainer.loggers:
        return
    trainer._logger_connector._logged_metrics.update(metrics)
    scalars: dict[str, float] = {name: value.item() for name, value in metrics.items()}
    for logger in trainer.loggers:
        logger.log_metrics({**scalars, "epoch": trainer.current_epoch}, step=step)
        logger.save()


def _checked_size(size: object) -> float:
    number = math.nan
    if not isinstance(size, (str, bytes)):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # the last from tensors of several elements
            number = float(size)  # type: ignore[arg-type]
    if not (math.isfinite(number) and number >= 0):
        raise MisconfigurationException(
            "`MemoryMonitor(batch_size_fn=...)` takes a function that returns the number of samples in a batch; it"
            f" returned {reprlib.repr(size)} of type {type(size).__name__}."
        )
    return number


def _prefixed(metrics: dict[str, float]) -> dict[str, float]:
    return {f"MemoryMonitor/{name}": value for name, value in metrics.items()}


def _as_tensors(metrics: dict[str, float]) -> dict[str, torch.Tensor]:
    values = torch.tensor([*metrics.values()], dtype=torch.float32, device="cpu")  # one allocation
    return dict(zip(metrics, values.unbind(), strict=True))
