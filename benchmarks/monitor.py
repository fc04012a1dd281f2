"""
What MemoryMonitor costs
^^^^^^^^^^^^^^^^^^^^^^^^

A training by a Trainer, of a GPT and of a spiking network, whose steps the monitor sees in turns; then trainings that
run out of memory, on the CPU by a dispatch mode that refuses at a number of bytes::

    python benchmarks/monitor.py
    python benchmarks/monitor.py --device cuda --json monitor.json

Columns of the steps
    plain_ms             median time of a step that the monitor does not see
    monitored_ms         of one that it sees, with nothing traced or broken down
    hooks_us             median time of the monitor's own hooks in such a step
    share                ``hooks_us`` over ``plain_ms``, which says more than the ratio of the medians where steps vary
    python_calls         functions that these hooks call, built-in ones included
    tensor_bytes         bytes of the tensors that they make in a step, on the host
    tensor_bytes_kept    what a step adds to those of the steps before
    objects_kept         what it adds to the objects that Python's garbage collector knows of
    device_allocations   on CUDA, what the hooks take from the allocator; waiting for the device would be an error

Columns of the errors
    raised_in            where the memory ran out
    told                 the place that the report names
    report_s             from the error to its arrival at the caller of ``trainer.fit``, with the report written
    estimated            the whole step was estimated within the time limit
    advice               what the report says would have needed less
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from memory_limit import MemoryLimit
from models import Benchmark, MissingLibraryError, Size, build
from reporting import check_device, console_of_width, environment, escaped, print_environment, write_document
from rich import box
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from training_steps import synchronize

from lightning_memopt import MemoryMonitor
from lightning_memopt.callbacks import out_of_memory
from lightning_memopt.measuring import AllocationRecorder

SHARE_GOAL = 0.01
REPORT_GOAL_S = 2.0
MODELS = ("gpt", "block")
PLACES = ("forward", "backward", "optimizer step", "validation")

_Kind = Literal["warm-up", "plain", "monitored", "calls", "bytes", "objects"]


@dataclass(frozen=True)
class StepRow:
    """What the monitor costs in a step."""

    model: str
    plain_ms: float
    monitored_ms: float
    hooks_us: float
    share: float
    python_calls: int
    tensor_bytes: int
    tensor_bytes_kept: float
    objects_kept: float
    device_allocations: int | None
    plain_ms_all: tuple[float, ...] = field(repr=False)
    monitored_ms_all: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True)
class ErrorRow:
    """A training that ran out of memory."""

    model: str
    raised_in: str
    told: str
    report_s: float
    estimated: bool
    advice: tuple[str, ...]


class Training(LightningModule):
    """A benchmark model as a Trainer trains it."""

    def __init__(self, benchmark: Benchmark) -> None:
        super().__init__()
        self.benchmark = benchmark
        self.model = benchmark.model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.benchmark.reset(self.model)
        return self.benchmark.loss(self.model, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def batches(self, number: int) -> DataLoader[Any]:
        """The same batch, again and again."""
        return DataLoader([self.benchmark.batch] * number, batch_size=None)  # type: ignore[arg-type]


def samples_of(benchmark: Benchmark) -> Callable[[Any], int]:
    """The samples of a batch; spikes come as ``[T, N, C]``."""
    dimension = 1 if benchmark.name == "block" else 0
    return lambda batch: int(batch[0].shape[dimension])


def trainer_of(device: torch.device, folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        accelerator=device.type,
        devices=1,
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=CSVLogger(folder),
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Steps


class TakingTurns(Callback):
    """Lets a monitor see some of the steps, and notes what it costs. The only callback that has to do with it."""

    def __init__(self, monitor: MemoryMonitor, kinds: Sequence[_Kind], device: torch.device) -> None:
        self.kinds, self.device = kinds, device
        self._monitor = monitor
        self._began = self._in_hooks = 0.0
        self.step_ms: dict[_Kind, list[float]] = defaultdict(list)
        self.hooks_us: list[float] = []
        self.calls: list[int] = []
        self.tensor_bytes: list[int] = []
        self.tensor_bytes_kept: list[int] = []
        self.objects_kept: list[int] = []
        self.device_allocations = 0
        self._of_nothing = {"calls": 0, "objects": 0}  # what the counting itself does

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._monitor.setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._monitor.on_train_start(trainer, pl_module)
        for _ in range(2):  # the first time is never the same
            for kind in ("calls", "objects"):
                with self._watched(kind):
                    _do_nothing()
        self._of_nothing = {"calls": self.calls[-1], "objects": self.objects_kept[-1]}
        self.calls.clear()
        self.objects_kept.clear()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._monitor.on_train_epoch_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        synchronize(self.device)
        self._in_hooks = 0.0
        self._began = time.perf_counter()
        self._hook(batch_idx, lambda: self._monitor.on_train_batch_start(trainer, pl_module, batch, batch_idx))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        kind = self.kinds[batch_idx]
        hook = self._monitor.on_train_batch_end
        self._hook(batch_idx, lambda: hook(trainer, pl_module, outputs, batch, batch_idx))
        synchronize(self.device)
        self.step_ms[kind].append((time.perf_counter() - self._began) * 1e3)
        if kind == "monitored":
            self.hooks_us.append(self._in_hooks * 1e6)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._monitor.on_train_epoch_end(trainer, pl_module)

    def _hook(self, batch_idx: int, hook: Callable[[], None]) -> None:
        kind = self.kinds[batch_idx]
        if kind == "plain":
            return
        before = time.perf_counter()
        with self._watched(kind):
            hook()
        self._in_hooks += time.perf_counter() - before

    @contextlib.contextmanager
    def _watched(self, kind: _Kind) -> Iterator[None]:
        if kind == "calls":
            with self._counting_calls():
                yield
        elif kind == "bytes":
            with self._counting_bytes():
                yield
        elif kind == "objects":
            with self._counting_objects():
                yield
        else:
            yield

    @contextlib.contextmanager
    def _counting_calls(self) -> Iterator[None]:
        seen = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)
        self.calls.append(seen - self._of_nothing["calls"])

    @contextlib.contextmanager
    def _counting_bytes(self) -> Iterator[None]:
        recorder = AllocationRecorder()
        recorder.start()
        on_cuda = self.device.type == "cuda"
        device_before = _device_allocations() if on_cuda else 0
        mode = torch.cuda.get_sync_debug_mode() if on_cuda else 0
        if on_cuda:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if on_cuda:
                torch.cuda.set_sync_debug_mode(mode)
                self.device_allocations += _device_allocations() - device_before
            recording = recorder.stop()
        self.tensor_bytes.append(sum(size for _, size in recording.changes if size > 0))
        self.tensor_bytes_kept.append(recording.end_bytes - recording.start_bytes)

    @contextlib.contextmanager
    def _counting_objects(self) -> Iterator[None]:
        gc.disable()
        before = len(gc.get_objects())
        try:
            yield
        finally:
            self.objects_kept.append(len(gc.get_objects()) - before - self._of_nothing["objects"])
            gc.enable()

    @staticmethod
    def per_step(by_hook: Sequence[int]) -> list[int]:
        """The sums of both hooks."""
        return [first + second for first, second in zip(by_hook[::2], by_hook[1::2], strict=True)]


def _do_nothing() -> None:
    pass


def _device_allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def measure_steps(benchmark: Benchmark, *, device: torch.device, pairs: int, counted: int) -> StepRow:
    """Train ``benchmark`` with a monitor that sees every other step."""
    kinds: list[_Kind] = ["warm-up"] * 4
    for index in range(pairs):  # plain first in one pair, second in the next: drift meets both alike
        kinds += ["plain", "monitored"] if index % 2 == 0 else ["monitored", "plain"]
    kinds += ["calls"] * counted + ["bytes"] * counted + ["objects"] * counted
    turns = TakingTurns(MemoryMonitor(), kinds, device)
    training = Training(benchmark)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(device, Path(folder), turns)
        trainer.fit(training, training.batches(len(kinds)))
    plain, monitored = turns.step_ms["plain"], turns.step_ms["monitored"]
    hooks_us = statistics.median(turns.hooks_us)
    return StepRow(
        model=benchmark.name,
        plain_ms=statistics.median(plain),
        monitored_ms=statistics.median(monitored),
        hooks_us=hooks_us,
        share=hooks_us / 1e3 / statistics.median(plain),
        python_calls=int(statistics.median(turns.per_step(turns.calls))),
        tensor_bytes=int(statistics.median(turns.per_step(turns.tensor_bytes))),
        tensor_bytes_kept=statistics.mean(turns.per_step(turns.tensor_bytes_kept)),
        objects_kept=statistics.median(turns.per_step(turns.objects_kept)),
        device_allocations=turns.device_allocations if device.type == "cuda" else None,
        plain_ms_all=tuple(plain),
        monitored_ms_all=tuple(monitored),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Errors


class RunningOut(Callback):
    """Lets the memory end in the second step, or in the validation behind it."""

    def __init__(self, place: str, limit: MemoryLimit, benchmark: Benchmark) -> None:
        self._place, self._limit, self._limited = place, limit, contextlib.ExitStack()
        regions = [module for module in benchmark.model.modules() if isinstance(module, benchmark.targets)]
        self._middle = regions[len(regions) // 2]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._place == "forward" and batch_idx == 1:
            self._middle.register_forward_pre_hook(lambda *_: self._end())

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._place == "backward" and trainer.global_step == 1:
            self._end()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._place == "optimizer step" and trainer.global_step == 1:
            self._end()

    def on_validation_batch_start(self, *_: Any) -> None:
        if self._place == "validation":
            self._end()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._limited.enter_context(self._limit)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._limited.close()  # an allocator takes no time from those who ask it for nothing

    def _end(self) -> None:
        self._limit.limit = self._limit.end_bytes


def measure_error(benchmark: Benchmark, place: str) -> ErrorRow:
    """Train ``benchmark`` on the CPU until its memory runs out, and read the report."""
    limit = MemoryLimit(sys.maxsize)
    training = Training(benchmark)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = RunningOut(place, limit, benchmark), MemoryMonitor(batch_size_fn=samples_of(benchmark))
        trainer = trainer_of(torch.device("cpu"), Path(folder), *callbacks, val_check_interval=2)
        # As if the limit were that of a device, which the report would know.
        known = mock.patch.object(out_of_memory, "_limit", side_effect=lambda _: limit.limit)
        with known:
            try:
                trainer.fit(training, training.batches(2), training.batches(1))
            except torch.OutOfMemoryError:
                report_s = time.perf_counter() - limit.reached_s
            else:
                raise RuntimeError(f"the memory was to run out in the {place} and did not")
        (report,) = Path(folder).rglob("out_of_memory*.txt")
        text = report.read_text()
    advice = text.partition("What would need less, the cheapest first\n")[2]
    return ErrorRow(
        model=benchmark.name,
        raised_in=place,
        told=text.partition("\n")[0].removeprefix("Out of memory in the "),
        report_s=report_s,
        estimated="by estimate, at its peak" in text,
        advice=tuple(line.strip() for line in advice.splitlines()),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def summary(steps: Sequence[StepRow], errors: Sequence[ErrorRow]) -> dict[str, Any]:
    """The figures that have a goal, over all rows."""
    return {
        "largest_share": max(row.share for row in steps),
        "most_python_calls": max(row.python_calls for row in steps),
        "most_tensor_bytes_kept": max(row.tensor_bytes_kept for row in steps),
        "most_objects_kept": max(row.objects_kept for row in steps),
        "longest_report_s": max((row.report_s for row in errors), default=None),
    }


def table_of_steps(rows: Sequence[StepRow], title: str) -> Table:
    view = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    headings = ("plain ms", "monitored ms", "hooks us", "share", "calls", "tensor bytes", "kept", "objects kept")
    for heading in ("model", *headings):
        view.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for row in rows:
        view.add_row(
            row.model,
            f"{row.plain_ms:.2f}",
            f"{row.monitored_ms:.2f}",
            f"{row.hooks_us:.0f}",
            f"{100 * row.share:.3f} %",
            str(row.python_calls),
            str(row.tensor_bytes),
            f"{row.tensor_bytes_kept:.1f}",
            f"{row.objects_kept:.1f}",
        )
    return view


def table_of_errors(rows: Sequence[ErrorRow]) -> Table:
    view = Table(title="out of memory, cpu", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("model", "raised in", "told", "report s", "estimated", "advice"):
        view.add_column(heading, justify="right" if heading == "report s" else "left")
    for row in rows:
        estimated = "yes" if row.estimated else "no"
        view.add_row(row.model, row.raised_in, row.told, f"{row.report_s:.2f}", estimated, escaped(row.advice[0]))
    return view


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the steps; errors: always cpu")
    parser.add_argument("--model", choices=MODELS, nargs="+", default=MODELS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and environment to FILE")
    parser.add_argument("--pairs", type=int, default=20, help="measured pairs of steps per model (default: 20)")
    parser.add_argument("--quick", action="store_true", help="tiny models, few steps: a smoke test, no figures")
    options = parser.parse_args(arguments)
    if options.pairs < 1:
        parser.error(f"--pairs must be at least 1, got {options.pairs}")
    check_device(parser, options.device)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = console_of_width(130)
    device = torch.device(options.device)
    small: Size = "tiny" if options.quick else "small"
    size: Size = "full" if options.device == "cuda" and not options.quick else small
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    steps, errors = [], []
    try:
        for name in options.model:
            console.print(f"{name}: steps with and without the monitor")  # a spinner's thread makes objects of its own
            pairs = 3 if options.quick else options.pairs
            steps.append(measure_steps(build(name, size=size), device=device, pairs=pairs, counted=9))
            for place in PLACES:
                with console.status(f"{name}: out of memory in the {place}"):
                    errors.append(measure_error(build(name, size=small), place))
    except MissingLibraryError as error:
        console.print(f"[red]{escaped(str(error))}[/red]")
        return 2
    console.print(table_of_steps(steps, f"one training step, {options.device}, {size} models"))
    console.print(table_of_errors(errors))
    about = environment(device)
    print_environment(console, about)
    if options.json is not None:
        document = {
            "size": size,
            **about,
            "summary": summary(steps, errors),
            "steps": [asdict(row) for row in steps],
            "errors": [asdict(row) for row in errors],
        }
        write_document(document, options.json)
        console.print(f"wrote {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
