from __future__ import annotations

import copy
import csv
import gc
import pickle
import re
import time
import warnings
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric

from lightning_memopt import MemoryOptimization, checkpoint_module
from lightning_memopt.callbacks import memory_monitor, out_of_memory
from lightning_memopt.callbacks.leak_watch import LeakWatch
from lightning_memopt.callbacks.memory_monitor import MemoryMonitor
from lightning_memopt.measuring import attribution, measure_memory
from lightning_memopt.measuring.allocation_events import storages_alive
from lightning_memopt.measuring.consumers import CONSUMERS
from tests.benchmark_scripts import benchmark_scripts
from tests.ranks import run_ranks

MIB = 2**20
BATCH = 4


class Net(LightningModule):
    """A linear layer; hidden activations of ``hidden`` columns set the peak of a step."""

    def __init__(self, batches: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.batches = batches

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layers(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.rand(BATCH * self.batches, 8)), batch_size=BATCH)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.rand(BATCH, 8)), batch_size=BATCH)


class Clock:
    """Stands for the monitor's clock: advances only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(memory_monitor, "time", clock)
    return clock


class SlowNet(Net):
    """Batch number i takes i + 1 seconds; validation takes 1000."""

    def __init__(self, clock: Clock, batches: int = 6) -> None:
        super().__init__(batches)
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.clock.now += batch_idx + 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 1000


class StepMetrics(Callback):
    """What callback_metrics held after each batch. Listed after the monitor."""

    def __init__(self) -> None:
        self.after_batch: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        self.after_batch.append(_monitored(trainer))


def _monitored(trainer: Trainer) -> dict[str, float]:
    prefix = "MemoryMonitor/"
    return {k.removeprefix(prefix): float(v) for k, v in trainer.callback_metrics.items() if k.startswith(prefix)}


def _trainer(folder: Path | str, *callbacks: Callback, logger: Any = False, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {"devices": 1, "max_epochs": 1, "num_sanity_val_steps": 1, "log_every_n_steps": 1}
    return Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=logger,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **arguments},
    )


def _rows(logger: CSVLogger) -> list[dict[str, str]]:
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        return [
            {k.removeprefix("MemoryMonitor/"): v for k, v in row.items() if v}
            for row in csv.DictReader(file)
            if any(k.startswith("MemoryMonitor/") and v for k, v in row.items())
        ]


def test_each_step_is_logged_under_its_own_number_and_the_epoch_under_its_last(tmp_path: Path, clock: Clock) -> None:
    logger = CSVLogger(tmp_path)
    trainer = _trainer(tmp_path, MemoryMonitor(), logger=logger)
    trainer.fit(SlowNet(clock))
    *steps, epoch = _rows(logger)
    assert [int(row["step"]) for row in steps] == [0, 1, 2, 3, 4, 5]
    assert [float(row["step_ms"]) for row in steps] == [1000.0, 2000.0, 3000.0, 4000.0, 5000.0, 6000.0]
    assert [float(row["samples_per_s"]) for row in steps] == pytest.approx([BATCH / (i + 1) for i in range(6)])
    assert all(float(row["rss_mib"]) > 50 for row in steps)
    assert int(epoch["step"]) == 5
    assert float(epoch["epoch_step_ms_mean"]) == 3500.0
    assert float(epoch["epoch_step_ms_median"]) == 3500.0
    assert float(epoch["epoch_step_ms_max"]) == 6000.0
    assert float(epoch["epoch_samples_per_s"]) == pytest.approx(6 * BATCH / 21)
    assert float(epoch["epoch_rss_mib"]) == pytest.approx(max(float(row["rss_mib"]) for row in steps))


def test_micro_batches_are_summed_to_optimizer_steps_and_validation_between_them_is_left_out(
    tmp_path: Path, clock: Clock
) -> None:
    logger = CSVLogger(tmp_path)
    trainer = _trainer(
        tmp_path,
        MemoryMonitor(),
        logger=logger,
        accumulate_grad_batches=3,
        val_check_interval=1,  # after every batch, so also within an accumulation
    )
    trainer.fit(SlowNet(clock, batches=7))
    *steps, epoch = _rows(logger)
    # Batches 1+2+3 and 4+5+6 s; Lightning steps on the last batch of the epoch, too.
    assert [float(row["step_ms"]) for row in steps] == [6000.0, 15000.0, 7000.0]
    assert [int(row["step"]) for row in steps] == [0, 1, 2]
    assert [float(row["samples_per_s"]) for row in steps] == pytest.approx([12 / 6, 12 / 15, 4 / 7])
    assert float(epoch["epoch_step_ms_max"]) == 15000.0
    assert float(epoch["epoch_step_ms_median"]) == 7000.0


def test_manual_optimization_counts_its_own_optimizer_steps(tmp_path: Path, clock: Clock) -> None:
    class Manual(SlowNet):
        def __init__(self, clock: Clock) -> None:
            super().__init__(clock)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            if batch_idx % 2 == 1:
                self.optimizers().step()
            return loss

    logger = CSVLogger(tmp_path)
    _trainer(tmp_path, MemoryMonitor(), logger=logger).fit(Manual(clock))
    assert [float(row["step_ms"]) for row in _rows(logger)[:-1]] == [3000.0, 7000.0, 11000.0]


def test_without_a_logger_the_metrics_of_every_step_and_epoch_are_in_callback_metrics(
    tmp_path: Path, clock: Clock
) -> None:
    after = StepMetrics()
    trainer = _trainer(tmp_path, MemoryMonitor(), after, logger=False, log_every_n_steps=50)
    trainer.fit(SlowNet(clock, batches=3))
    assert [metrics["step_ms"] for metrics in after.after_batch] == [1000.0, 2000.0, 3000.0]
    assert _monitored(trainer)["epoch_step_ms_mean"] == 2000.0


def test_steps_are_logged_as_often_as_the_trainer_logs(tmp_path: Path, clock: Clock) -> None:
    logger = CSVLogger(tmp_path)
    _trainer(tmp_path, MemoryMonitor(), logger=logger, log_every_n_steps=4, max_epochs=2).fit(SlowNet(clock, batches=5))
    rows = _rows(logger)
    assert [int(row["step"]) for row in rows if "step_ms" in row] == [3, 7]
    assert [float(row["epoch_step_ms_mean"]) for row in rows if "step_ms" not in row] == [3000.0, 3000.0]


def test_every_row_names_its_epoch_so_that_rows_can_be_grouped_by_it(tmp_path: Path, clock: Clock) -> None:
    logger = CSVLogger(tmp_path)
    trainer = _trainer(tmp_path, MemoryMonitor(), logger=logger, max_epochs=3)
    trainer.fit(SlowNet(clock, batches=2))
    rows = _rows(logger)
    assert [int(row["epoch"]) for row in rows if "step_ms" in row] == [0, 0, 1, 1, 2, 2]
    assert [int(row["epoch"]) for row in rows if "epoch_step_ms_mean" in row] == [0, 1, 2]
    assert len(rows) == 9
    # A key for the loggers, as Lightning's own, and no metric.
    assert "epoch" not in trainer.logged_metrics
    assert "epoch" not in trainer.callback_metrics
    assert float(trainer.logged_metrics["MemoryMonitor/epoch_step_ms_mean"]) == 1500.0


def test_the_epochs_are_those_that_lightning_gives_to_what_the_model_logs(tmp_path: Path) -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    logger = CSVLogger(tmp_path)
    _trainer(tmp_path, MemoryMonitor(), logger=logger, max_epochs=2).fit(Logging(batches=3))
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = list(csv.DictReader(file))

    def epochs_by_step(column: str) -> dict[str, str]:
        return {row["step"]: row["epoch"] for row in rows if row[column]}

    assert len(epochs_by_step("loss_step")) == 6
    assert epochs_by_step("MemoryMonitor/step_ms") == epochs_by_step("loss_step")
    assert epochs_by_step("MemoryMonitor/epoch_step_ms_mean") == epochs_by_step("loss_epoch")


def test_every_logger_gets_the_metrics(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name="one"), CSVLogger(tmp_path, name="two")]
    _trainer(tmp_path, MemoryMonitor(), logger=loggers).fit(Net(batches=2))
    assert _rows(loggers[0]) == _rows(loggers[1])
    assert len(_rows(loggers[0])) == 3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_on_the_cpu_every_nth_step_is_traced_to_the_peak_that_measuring_the_step_alone_gives(
    tmp_path: Path, accumulate: int
) -> None:
    hidden = 4096
    after = StepMetrics()
    trainer = _trainer(
        tmp_path,
        MemoryMonitor(trace_every_n_steps=2),
        after,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    model = Net(batches=4 * accumulate, hidden=hidden)
    trainer.fit(model)
    per_step = after.after_batch[accumulate - 1 :: accumulate]
    assert ["peak_allocated_mib" in metrics for metrics in per_step] == [False, True, True, True]

    data = torch.rand(BATCH, 8)
    model.zero_grad()
    alone = measure_memory(lambda: model.training_step([data], 0).backward(), device="cpu")
    activations = alone.peak_bytes - alone.start_bytes
    assert activations > BATCH * hidden * 4
    traced = _monitored(trainer)["epoch_peak_allocated_mib"] * MIB
    # The run also holds its data set, and gradients from the step before.
    assert activations + _bytes_of(model) <= traced <= alone.peak_bytes + _bytes_of(model) + MIB / 4


def test_a_traced_step_has_no_time_and_does_not_enter_that_of_the_epoch(tmp_path: Path, clock: Clock) -> None:
    logger = CSVLogger(tmp_path)
    trainer = _trainer(tmp_path, MemoryMonitor(trace_every_n_steps=3), logger=logger, log_every_n_steps=50)
    trainer.fit(SlowNet(clock))
    traced = [row for row in _rows(logger) if "peak_allocated_mib" in row]
    assert [int(row["step"]) for row in traced] == [2, 5]  # logged although the trainer logs every 50 steps
    assert not any("step_ms" in row for row in traced)
    assert _monitored(trainer)["epoch_step_ms_mean"] == (1 + 2 + 4 + 5) * 1000 / 4
    assert _monitored(trainer)["epoch_samples_per_s"] == pytest.approx(4 * BATCH / 12)


def test_training_is_the_same_with_and_without_the_monitor(tmp_path: Path) -> None:
    def weights(*callbacks: Callback) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = Net()
        _trainer(tmp_path, *callbacks, max_epochs=2).fit(model)
        return [parameter.detach().clone() for parameter in model.parameters()]

    for plain, monitored in zip(weights(), weights(MemoryMonitor(trace_every_n_steps=2)), strict=True):
        assert torch.equal(plain, monitored)


def test_an_error_in_a_traced_step_leaves_no_profiler_and_the_next_fit_starts_afresh(tmp_path: Path) -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 1:
                raise ValueError("the second batch is bad")
            return super().training_step(batch, batch_idx)

    monitor = MemoryMonitor(trace_every_n_steps=1)
    with pytest.raises(ValueError, match="the second batch is bad"):
        _trainer(tmp_path, monitor).fit(Failing())
    assert not torch.autograd._profiler_enabled()
    trainer = _trainer(tmp_path, monitor)
    trainer.fit(Net())
    assert _monitored(trainer)["peak_allocated_mib"] > 0


def test_a_batch_skipped_after_its_start_does_not_stay_open(tmp_path: Path) -> None:
    class Skipping(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and batch_idx == 1 else None  # ends the epoch

    trainer = _trainer(tmp_path, MemoryMonitor(trace_every_n_steps=1), max_epochs=2)
    trainer.fit(Skipping(batches=3))
    assert not torch.autograd._profiler_enabled()
    assert trainer.global_step == 4


def test_a_second_fit_and_a_resumed_one_number_their_steps_as_the_trainer_does(tmp_path: Path) -> None:
    first = Trainer(accelerator="cpu", max_epochs=1, logger=False, default_root_dir=tmp_path, enable_progress_bar=False)
    first.fit(Net())
    checkpoint = tmp_path / "last.ckpt"
    first.save_checkpoint(checkpoint)
    logger = CSVLogger(tmp_path)
    trainer = _trainer(tmp_path, MemoryMonitor(), logger=logger, max_epochs=2, log_every_n_steps=4)
    trainer.fit(Net(), ckpt_path=checkpoint)
    assert [int(row["step"]) for row in _rows(logger) if "step_ms" in row] == [7, 11]


def test_validation_and_test_runs_are_not_monitored(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, MemoryMonitor())
    trainer.validate(Net(), verbose=False)
    assert _monitored(trainer) == {}


def test_the_number_of_samples_comes_from_the_given_function(tmp_path: Path, clock: Clock) -> None:
    trainer = _trainer(tmp_path, MemoryMonitor(batch_size_fn=lambda batch: batch[0].shape[1]))
    trainer.fit(SlowNet(clock, batches=1))
    assert _monitored(trainer)["samples_per_s"] == 8.0


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ("many", "'many' of type str"),
        ("12", "'12' of type str"),
        (None, "None of type NoneType"),
        (float("nan"), "nan of type float"),
        (-1, "-1 of type int"),
        (torch.ones(2), "of type Tensor"),
    ],
)
def test_a_size_that_is_no_number_of_samples_is_named_with_the_option(
    tmp_path: Path, returned: object, shown: str
) -> None:
    trainer = _trainer(tmp_path, MemoryMonitor(batch_size_fn=lambda batch: returned))
    with pytest.raises(MisconfigurationException) as caught:
        trainer.fit(Net())
    assert "`MemoryMonitor(batch_size_fn=...)`" in str(caught.value)
    assert shown in str(caught.value)


@pytest.mark.parametrize("size", [torch.tensor(7), 7.0])
def test_a_size_may_be_anything_that_is_a_number(tmp_path: Path, clock: Clock, size: Any) -> None:
    trainer = _trainer(tmp_path, MemoryMonitor(batch_size_fn=lambda batch: size))
    trainer.fit(SlowNet(clock, batches=1))
    assert _monitored(trainer)["samples_per_s"] == 7.0


def test_a_batch_without_a_size_gives_no_samples_but_all_else(tmp_path: Path) -> None:
    class NoBatch(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step([torch.rand(BATCH, 8)], batch_idx)

        def train_dataloader(self) -> Any:
            return DataLoader([0, 1, 2], batch_size=None, collate_fn=lambda item: {"index": item, "name": None})

    trainer = _trainer(tmp_path, MemoryMonitor())
    trainer.fit(NoBatch())
    names = set(_monitored(trainer))
    assert {"step_ms", "rss_mib", "epoch_step_ms_mean"} <= names
    assert not {"samples_per_s", "epoch_samples_per_s"} & names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trace_every_n_steps": -1}, "whole number of optimizer steps.*got -1"),
        ({"trace_every_n_steps": 1.5}, "got 1.5"),
        ({"trace_every_n_steps": True}, "got True"),
        ({"breakdown_every_n_steps": -1}, "breakdown_every_n_steps.*whole number of optimizer steps.*got -1"),
        ({"batch_size_fn": 3}, "takes a function of the batch; got 3"),
    ],
)
def test_wrong_arguments_are_refused_when_the_callback_is_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        MemoryMonitor(**arguments)


@pytest.mark.parametrize("option", ["trace_every_n_steps", "breakdown_every_n_steps"])
def test_traces_beside_the_pytorch_profiler_are_refused_before_training(tmp_path: Path, option: str) -> None:
    trainer = _trainer(tmp_path, MemoryMonitor(**{option: 5}), profiler="pytorch")
    with pytest.raises(MisconfigurationException, match="only one can run at a time"):
        trainer.fit(Net())


def test_the_callback_can_be_copied_and_pickled(tmp_path: Path) -> None:
    monitor = MemoryMonitor(trace_every_n_steps=3, reset_peak=False)
    _trainer(tmp_path, monitor).fit(Net())
    for twin in (copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))):
        assert (twin.trace_every_n_steps, twin.reset_peak) == (3, False)


# Who holds the bytes.


class AdamNet(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_every_nth_step_is_broken_down_and_the_parts_add_up_to_its_peak(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), MemoryMonitor(breakdown_every_n_steps=3)
    model = AdamNet(hidden=512)
    trainer = _trainer(tmp_path, monitor, logger=logger)
    trainer.fit(model)
    *steps, _ = _rows(logger)
    assert ["peak_parameters_mib" in row for row in steps] == [False, False, True] * 2
    assert ["step_ms" in row for row in steps] == [True, True, False] * 2
    for row in (steps[2], steps[5]):
        parts = [float(row[f"peak_{name}_mib"]) for name in CONSUMERS]
        assert sum(parts) == pytest.approx(float(row["peak_allocated_mib"]), rel=1e-5)
        assert float(row["peak_parameters_mib"]) == pytest.approx(_bytes_of(model) / MIB, rel=1e-5)
    assert monitor.breakdown is not None
    at_end = monitor.breakdown.at("forward end")
    # Tanh saves its result, which the layer behind it saves as well; the loss is outside of all modules.
    assert at_end.activations_by_module["layers.1"] == BATCH * 512 * 4
    assert at_end.optimizer_state >= 2 * _bytes_of(model)
    assert at_end.inputs == BATCH * 8 * 4


def test_a_training_with_function_transforms_is_broken_down(tmp_path: Path) -> None:
    class Meta(AdamNet):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            def inner(x: torch.Tensor) -> torch.Tensor:
                return self.layers(x).square().mean()

            return inner(batch[0] - torch.func.grad(inner)(batch[0]))

    monitor = MemoryMonitor(breakdown_every_n_steps=2)
    _trainer(tmp_path, monitor).fit(Meta())
    assert monitor.breakdown is not None
    assert monitor.breakdown.at("forward end").activations > 0


def test_of_micro_batches_the_one_with_the_highest_peak_is_shown(tmp_path: Path) -> None:
    monitor = MemoryMonitor(breakdown_every_n_steps=1)
    trainer = _trainer(tmp_path, monitor, accumulate_grad_batches=3)
    trainer.fit(AdamNet(batches=3))
    assert monitor.breakdown is not None
    metrics = _monitored(trainer)
    assert metrics["peak_allocated_mib"] == pytest.approx(monitor.breakdown.peak_bytes / MIB, rel=1e-5)


def test_breakdowns_change_no_gradient_and_leave_no_hook(tmp_path: Path) -> None:
    def weights(*callbacks: Callback) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = AdamNet()
        _trainer(tmp_path, *callbacks, max_epochs=2).fit(model)
        return [parameter.detach().clone() for parameter in model.parameters()]

    for plain, seen in zip(weights(), weights(MemoryMonitor(breakdown_every_n_steps=2)), strict=True):
        assert torch.equal(plain, seen)
    assert not nn.modules.module._global_forward_hooks
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_step_that_is_not_broken_down_keeps_nothing_and_calls_nothing_of_the_attribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the step is not one to be broken down")

    for name in ("StepAttribution", "batch_shapes", "report_out_of_memory"):
        monkeypatch.setattr(memory_monitor, name, never)
    monitor = MemoryMonitor()
    kept: list[int] = []

    class CountTensors(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            gc.collect()
            kept.append(sum(storage.nbytes() for storage in storages_alive(torch.device("cpu"))))

    _trainer(tmp_path, monitor, CountTensors(), log_every_n_steps=1000).fit(AdamNet())
    # The monitor's own tensors are scalars of the metrics; the first steps make optimizer state.
    assert max(kept[2:]) - min(kept[2:]) < 256
    assert monitor._batch is None


# What goes wrong in the monitor itself.


def _warned(tmp_path: Path, model: LightningModule, monitor: MemoryMonitor, **options: Any) -> list[str]:
    """The warnings of a training, which ends as it would without a monitor."""
    plain, twin = copy.deepcopy(model), model
    torch.manual_seed(1)  # of the data
    _trainer(tmp_path, **options).fit(plain)
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = _trainer(tmp_path, monitor, **options)
        trainer.fit(twin)
    assert trainer.global_step == 6
    for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.autograd._profiler_enabled()
    assert torch._C._len_torch_dispatch_stack() == 0
    return [str(warning.message) for warning in caught if "MemoryMonitor could not" in str(warning.message)]


class Angry(dict[str, Any]):
    """An attribute that raises when it is looked into."""

    def values(self) -> Any:
        raise ArithmeticError("leave me alone")


def test_a_model_that_cannot_be_looked_into_trains_without_breakdown_and_is_told_once(tmp_path: Path) -> None:
    model = AdamNet()
    model.mood = Angry(a=1)
    monitor = MemoryMonitor(breakdown_every_n_steps=2)
    (told,) = _warned(tmp_path, model, monitor)
    assert told.startswith("MemoryMonitor could not measure a step, and leaves it out: ArithmeticError: leave me alone")
    assert monitor.breakdown is None


@pytest.mark.parametrize("method", ["_see_results", "_boundary", "_note_state"])
def test_an_error_while_a_step_is_watched_is_none_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    plain = getattr(attribution._AttributingTrace, method)

    def failing(trace: Any, *arguments: Any) -> Any:
        if trace._following:
            raise ArithmeticError("lost count")
        return plain(trace, *arguments)

    monkeypatch.setattr(attribution._AttributingTrace, method, failing)
    (told,) = _warned(tmp_path, AdamNet(), MemoryMonitor(breakdown_every_n_steps=2))
    assert told.startswith("MemoryMonitor could not measure a step, and leaves it out: ")
    assert "ArithmeticError: lost count" in told


@pytest.mark.parametrize(
    ("place", "name", "what"),
    [
        (memory_monitor, "process_memory", "measure a step"),
        (memory_monitor, "tensors_inside", "find the size of a batch"),
        (LeakWatch, "see", "look for leaks"),
        (attribution, "_attributed", "measure a step"),
    ],
)
def test_what_fails_in_the_monitor_is_left_out_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, what: str
) -> None:
    plain, calls = getattr(place, name), []

    def failing(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        if len(calls) > 1:
            raise OSError("gone")
        return plain(*arguments, **keywords)

    monkeypatch.setattr(place, name, failing)
    (told,) = _warned(tmp_path, AdamNet(), MemoryMonitor(breakdown_every_n_steps=2))
    assert told == f"MemoryMonitor could not {what}, and leaves it out: OSError: gone"
    assert len(calls) > 2


def test_where_there_is_no_resident_memory_to_read_all_else_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> int:
        raise NotImplementedError

    monkeypatch.setattr(memory_monitor, "process_memory", absent)
    trainer = _trainer(tmp_path, MemoryMonitor())
    trainer.fit(Net())
    names = set(_monitored(trainer))
    assert {"step_ms", "samples_per_s", "epoch_step_ms_mean"} <= names
    assert not {"rss_mib", "epoch_rss_mib"} & names


def test_a_profiler_of_the_user_is_left_to_run_and_the_breakdown_left_out(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, MemoryMonitor(breakdown_every_n_steps=2))
    with torch.profiler.profile() as profiler, pytest.warns(RuntimeWarning, match="a torch profiler already runs"):
        trainer.fit(Net())
    assert trainer.global_step == 6
    assert profiler.events()


def test_errors_of_the_user_end_the_training_as_they_are(tmp_path: Path) -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                raise ArithmeticError("the model's")
            return super().training_step(batch, batch_idx)

    class FullDisk(CSVLogger):
        def log_metrics(self, *_: Any, **__: Any) -> None:
            raise OSError("the logger's")

    def size(batch: Any) -> int:
        raise LookupError("the function's")

    model = Failing()
    model.mood = Angry()
    with pytest.raises(ArithmeticError, match="the model's"):
        _trainer(tmp_path, MemoryMonitor(breakdown_every_n_steps=2)).fit(model)
    with pytest.raises(OSError, match="the logger's"):
        _trainer(tmp_path, MemoryMonitor(), logger=FullDisk(tmp_path)).fit(Net())
    with pytest.raises(LookupError, match="the function's"):
        _trainer(tmp_path, MemoryMonitor(batch_size_fn=size)).fit(Net())


def test_what_the_model_logs_is_not_read_off_the_device_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Showing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, prog_bar=True)
            return loss

    reads = 0
    plain = _ResultCollection.metrics

    def counted(self: Any, on_step: bool) -> Any:
        nonlocal reads
        reads += 1
        return plain(self, on_step)

    monkeypatch.setattr(_ResultCollection, "metrics", counted)
    numbers = []
    for callbacks in ((), (MemoryMonitor(),)):
        reads = 0
        _trainer(tmp_path, *callbacks).fit(Showing())
        numbers.append(reads)
    assert numbers[0] == numbers[1] > 0


# Leaks.


class Logging(Net):
    """Keeps the hidden activations of each step with their graph."""

    def __init__(self, detach: bool = False) -> None:
        super().__init__(batches=8, hidden=2**13)
        self.seen: list[Any] = []
        self.detach = detach

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.layers[:2](batch[0])
        self.seen.append(hidden.mean().item() if self.detach else hidden)
        return self.layers[2](hidden).square().mean()


class Spiking(Net):
    """A neuron that is never reset, or each step."""

    def __init__(self, reset: bool) -> None:
        super().__init__(batches=8)
        self.neuron = Integrator()
        self.reset = reset

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.reset:
            self.neuron.v = torch.zeros(())
        return super().training_step([self.neuron(batch[0])], batch_idx)


class Integrator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.v = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The loss does not see it, so no backward pass meets the graphs of earlier steps, or frees them.
        self.v = self.v * torch.sigmoid(x.repeat(1, 1024) * self.scale)
        return x


def _leaks(tmp_path: Path, model: LightningModule, **arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _trainer(tmp_path, MemoryMonitor(trace_every_n_steps=1, **arguments), limit_val_batches=0).fit(model)
    return [str(warning.message) for warning in caught if "Memory grew" in str(warning.message)]


def test_a_list_that_keeps_activations_with_their_graphs_is_named_once(tmp_path: Path) -> None:
    (told,) = _leaks(tmp_path, Logging())
    assert "the list `Logging.seen`" in told
    assert "with the graphs of their steps" in told
    assert "`tensor.detach()`" in told


def test_a_neuron_that_is_never_reset_is_named_once(tmp_path: Path) -> None:
    (told,) = _leaks(tmp_path, Spiking(reset=False))
    assert "the state `Spiking.neuron.v`" in told
    assert "Reset or detach" in told


class Collecting(Net):
    """A metric keeps all predictions until the epoch ends."""

    def __init__(self) -> None:
        super().__init__(batches=8)
        self.predictions = CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.predictions.update(torch.rand(2**15))
        return super().training_step(batch, batch_idx)


class LbfgsNet(Net):
    """The optimizer collects a history of many steps."""

    def __init__(self) -> None:
        super().__init__(batches=12, hidden=2**11)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


@dataclass
class Sequences:
    """A batch of a class of its own."""

    x: torch.Tensor


class GrowingSequences(Net):
    """The first epoch of a curriculum; each batch and what is stored of it are longer than the ones before."""

    def __init__(self, kind: Callable[[Any], Any]) -> None:
        super().__init__()
        self.kind, self.hidden = kind, torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch.x if isinstance(batch, Sequences) else batch["x"]
        self.hidden = torch.zeros(len(x), 256)
        return self.layers(x).square().mean()

    def train_dataloader(self) -> DataLoader[Any]:
        lengths: Any = [100 * length for length in range(1, 10)]
        return DataLoader(lengths, batch_size=None, collate_fn=lambda length: self.kind(torch.rand(length, 8)))


@pytest.mark.parametrize(
    "model",
    [
        lambda: Logging(detach=True),
        lambda: Spiking(reset=True),
        AdamNet,
        lambda: Net(batches=12),
        Collecting,
        LbfgsNet,
        lambda: GrowingSequences(Sequences),
        lambda: GrowingSequences(lambda x: UserDict(x=x)),
    ],
)
def test_steady_training_is_no_leak(tmp_path: Path, model: Callable[[], LightningModule]) -> None:
    assert _leaks(tmp_path, model()) == []


def test_leaks_are_not_looked_for_if_nobody_wants_to_know(tmp_path: Path) -> None:
    assert _leaks(tmp_path, Logging(), watch_leaks=False) == []


def test_growth_with_the_shapes_is_no_leak_and_growth_that_nobody_explains_is_said() -> None:
    watch = LeakWatch()
    assert [watch.see(MIB * i, ((i, 8),), {}) for i in range(20)] == [None] * 20
    assert [watch.see(MIB * (i % 3), ((4, 8),), {}) for i in range(20)] == [None] * 20
    assert [watch.see(MIB + 1000 * i, ((4, 8),), {}) for i in range(20)] == [None] * 20
    assert watch.see(1000 * MIB, ((5, 8),), {}) is None
    assert [watch.see(1000 * MIB + MIB // 8 * i, ((4, 8),), {}) for i in range(7)] == [None] * 7
    found = [watch.see(MIB * i, ((4, 8),), {"net": nn.Linear(2, 2)}) for i in range(20)]
    assert sum(sentence is not None for sentence in found) == 1
    assert "no attribute of the module or the callbacks grew" in next(filter(None, found))


# Running out of memory, on the CPU: a dispatch mode that refuses at a number of bytes.

with benchmark_scripts("memory_limit") as (memory_limit,):
    MemoryLimit = memory_limit.MemoryLimit


class Deep(Net):
    """Blocks of equal size, in which the activations are large."""

    def __init__(self) -> None:
        super().__init__(batches=4)
        blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()) for _ in range(6))
        self.blocks = nn.Sequential(*blocks)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("kept", 1.0)
        return self.blocks(batch[0]).square().mean()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.rand(4096, 64)), batch_size=1024)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates may take as long as a busy machine needs."""
    monkeypatch.setattr(out_of_memory, "_TIME_LIMIT_S", 120.0)


def _run_out(tmp_path: Path, model: LightningModule, above_start: int, **arguments: Any) -> tuple[Any, str, list[str]]:
    gc.collect()
    limit = MemoryLimit(0)
    limit.limit = limit.start_bytes + above_start
    return _run_into(limit, tmp_path, model, MemoryMonitor(**arguments), limit_val_batches=0)


def _run_into(
    limit: Any, tmp_path: Path, model: LightningModule, *callbacks: Callback, **options: Any
) -> tuple[Any, str, list[str]]:
    """The error, the report and the warnings of a training whose memory ends."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with limit, pytest.raises(torch.OutOfMemoryError) as error:
            _trainer(tmp_path, *callbacks, **options).fit(model)
    reports = [*tmp_path.rglob("out_of_memory*.txt")]
    told = [str(w.message) for w in caught if "MemoryMonitor" in str(w.message)]
    return error.value, reports[0].read_text() if reports else "", told


class Ending(Callback):
    """The memory ends when ``hook`` of this callback is called in the ``step``-th step: the next tensor is refused."""

    def __init__(self, limit: Any, hook: str, step: int) -> None:
        def end(trainer: Trainer, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx == step:
                limit.limit = limit.end_bytes

        setattr(self, hook, end)


@pytest.mark.usefixtures("patient")
def test_a_step_that_runs_out_of_memory_is_reported_and_the_error_goes_on_as_it_is(tmp_path: Path) -> None:
    error, report, told = _run_out(tmp_path, Deep(), 3 * MIB)
    assert str(error).startswith("limit of ")
    assert report.startswith("Out of memory in the forward, in `blocks.")
    assert f"{error}" in report
    assert "optimizer state" in report
    assert "The whole step would take, by estimate" in report
    holders = report.partition("Modules that hold most activations")[2]
    assert "  blocks." in holders
    (message,) = told
    assert "`MemoryOptimization(level=1)` would lower the peak from" in message
    assert "accumulate_grad_batches=2" in report


def test_the_phase_is_the_one_that_was_running(tmp_path: Path) -> None:
    class Greedy(Deep):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            optimizer.register_step_post_hook(lambda *_: setattr(self, "extra", torch.zeros(64 * MIB)))
            return optimizer

    _, report, _ = _run_out(tmp_path, Greedy(), 32 * MIB)
    assert report.startswith("Out of memory in the optimizer step")

    class Checkpointed(Deep):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                checkpoint_module(block)
            self.blocks[2].register_forward_hook(self.greedy)

        def greedy(self, *_: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                self.extra = torch.zeros(64 * MIB)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            y = self.blocks(batch[0]).square().mean()
            y.register_hook(lambda grad: grad + torch.zeros(64 * MIB).sum())
            return y

    folder = tmp_path / "second"
    folder.mkdir()
    _, report, _ = _run_out(folder, Checkpointed(), 32 * MIB)
    assert report.startswith("Out of memory in the backward")


@pytest.mark.usefixtures("patient")
def test_of_an_optimizer_step_that_ran_out_of_memory_nothing_of_the_batch_is_advised(tmp_path: Path) -> None:
    class Wide(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(64, 8192), nn.Linear(8192, 64))

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(TensorDataset(torch.rand(16, 64)), batch_size=4)

    _, report, (message,) = _run_out(tmp_path, Wide(), 10 * MIB)  # gradients of 4 MiB, then moments of 8
    assert report.startswith("Out of memory in the optimizer step")
    assert "`fused=True` of the optimizer takes its step without temporaries: from " in message
    advised = report.partition("What would need less")[2]
    assert "AdamW8bit" in advised
    assert "Nothing of the batch is alive" in advised
    assert "accumulate_grad_batches" not in report
    assert "MemoryOptimization" not in report


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("hook", "step", "phase"),
    [
        ("on_train_batch_start", 1, "forward"),
        ("on_before_backward", 1, "backward"),
        ("on_before_optimizer_step", 3, "optimizer step"),
    ],
)
def test_between_micro_batches_the_gradients_stay_and_the_batch_is_divided_once_more(
    tmp_path: Path, hook: str, step: int, phase: str
) -> None:
    limit = MemoryLimit(2**60)
    model = Deep()
    model.layers = nn.Identity()  # has no gradients
    callbacks = Ending(limit, hook, step), MemoryMonitor()
    options = {"accumulate_grad_batches": 2, "limit_val_batches": 0}
    error, report, (message,) = _run_into(limit, tmp_path, model, *callbacks, **options)
    assert report.startswith(f"Out of memory in the {phase}\n  {error}")
    gradients = f"  gradients            {_bytes_of(model) / MIB:>12.3f}"
    assert report.count(gradients) == 2  # those of the batch before are alive, and in the estimated peak
    if phase == "optimizer step":
        assert "`fused=True` of the optimizer" in message
    else:
        assert "`MemoryOptimization(level=1)` would lower the peak from" in message
        assert "A batch of 512 instead of 1024 samples" in report
        assert "`accumulate_grad_batches=4` keeps the effective batch" in report


@pytest.mark.usefixtures("patient")
def test_a_training_within_a_budget_is_advised_a_smaller_one(tmp_path: Path) -> None:
    limit = MemoryLimit(2**60)
    optimization = MemoryOptimization(memory_budget="1GiB", verbose=False)
    callbacks = optimization, Ending(limit, "on_before_backward", 1), MemoryMonitor()
    _, report, (message,) = _run_into(limit, tmp_path, Deep(), *callbacks)
    assert report.startswith("Out of memory in the backward")
    assert "A `memory_budget` below '1GiB' would lower the peak from" in message
    assert "level=1" not in report


@pytest.mark.usefixtures("patient")
def test_a_training_whose_blocks_are_all_recomputed_is_not_advised_to_recompute_them(tmp_path: Path) -> None:
    limit = MemoryLimit(2**60)
    callbacks = MemoryOptimization(verbose=False), Ending(limit, "on_before_backward", 1), MemoryMonitor()
    _, report, (message,) = _run_into(limit, tmp_path, Deep(), *callbacks)
    assert report.startswith("Out of memory in the backward")
    assert "A batch of 512 instead of 1024 samples would take about" in message
    assert "MemoryOptimization" not in report


@pytest.mark.usefixtures("patient")
def test_where_the_limit_is_known_the_report_says_what_fits_and_which_budget_to_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out_of_memory, "_limit", lambda device: 5 * MIB)
    _, report, _ = _run_out(tmp_path, Deep(), 3 * MIB)
    recomputed, budget, smaller = report.partition("the cheapest first\n")[2].splitlines()
    before, after = map(float, re.findall(r"from ([\d.]+) to ([\d.]+) MiB by estimate, which fits", recomputed)[0])
    assert after < 5 < before
    assert '`MemoryOptimization(memory_budget="4 MiB")` finds the fastest way to fit.' in budget
    assert float(re.findall(r"about ([\d.]+) MiB, which fits", smaller)[0]) < 5


def test_the_samples_of_the_advice_are_those_of_the_given_function(tmp_path: Path) -> None:
    _, report, _ = _run_out(tmp_path, Deep(), 3 * MIB, batch_size_fn=lambda batch: batch[0].shape[1])
    assert "A batch of 32 instead of 64 samples" in report


def test_a_validation_that_runs_out_of_memory_is_reported_as_one(tmp_path: Path) -> None:
    limit = MemoryLimit(2**60)
    callbacks = Ending(limit, "on_validation_batch_start", 3), MemoryMonitor()
    error, report, (message,) = _run_into(limit, tmp_path, Deep(), *callbacks)
    assert report.startswith(f"Out of memory in the validation, in `layers.0`\n  {error}")
    assert "  optimizer state" in report
    assert "by estimate" not in report
    assert "A smaller batch of the validation data" in message


def test_memory_that_ends_outside_of_a_step_is_reported_with_who_holds_it(tmp_path: Path) -> None:
    class Saving(Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            raise torch.OutOfMemoryError("no memory for a checkpoint")

    model = Deep()
    error, report, (message,) = _run_into(MemoryLimit(2**60), tmp_path, model, Saving(), MemoryMonitor())
    assert report.startswith(f"Out of memory in the training, outside of a step\n  {error}")
    assert f"  parameters           {_bytes_of(model) / MIB:>12.3f}" in report
    assert "What would need less" not in report
    assert "Report: " in message


@pytest.mark.filterwarnings("error:MemoryMonitor:RuntimeWarning")
def test_where_warnings_are_errors_the_error_of_the_step_still_arrives_and_the_report_is_written(
    tmp_path: Path,
) -> None:
    limit = MemoryLimit(2**60)
    trainer = _trainer(tmp_path, Ending(limit, "on_before_backward", 1), MemoryMonitor(), limit_val_batches=0)
    with limit, pytest.raises(torch.OutOfMemoryError):
        trainer.fit(Deep())
    assert len([*tmp_path.rglob("out_of_memory*.txt")]) == 1


def test_an_estimate_that_takes_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "_TIME_LIMIT_S", 0.001)
    _, report, _ = _run_out(tmp_path, Deep(), 3 * MIB)
    assert "could not be estimated on fake tensors: TimeoutError" in report
    assert "parameters" in report
    assert "`MemoryOptimization(level=1)` recomputes the repeated blocks" in report
    assert "A batch of 512 instead of 1024 samples stores half as much" in report


@pytest.mark.usefixtures("patient")
def test_a_step_that_cannot_be_estimated_is_reported_with_what_is_known(tmp_path: Path) -> None:
    class Reading(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            scale = batch[0].mean().item()
            return self.blocks(batch[0]).square().mean() * scale

    _, report, told = _run_out(tmp_path, Reading(), 3 * MIB)
    assert "could not be estimated on fake tensors" in report
    assert "parameters" in report
    assert len(told) == 1


def test_no_report_is_written_if_none_is_wanted_or_the_error_is_another(tmp_path: Path) -> None:
    _, report, told = _run_out(tmp_path, Deep(), 3 * MIB, out_of_memory_report=False)
    assert (report, told) == ("", [])

    class Failing(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        _trainer(tmp_path, MemoryMonitor()).fit(Failing())
    assert [*tmp_path.rglob("out_of_memory*")] == []


def test_a_failure_of_the_report_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no report")

    monkeypatch.setattr(out_of_memory, "_held", broken)
    error, report, told = _run_out(tmp_path, Deep(), 3 * MIB)
    assert isinstance(error, torch.OutOfMemoryError)
    assert report == ""
    assert "could not report" in told[0]
    assert "no report" in told[0]


def samples_in(batch: Any) -> int:
    return 2 * len(batch[0])


def test_it_is_configured_from_a_yaml_file_with_functions_by_import_path(tmp_path: Path) -> None:
    from lightning.pytorch.cli import LightningCLI

    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
        trainer:
          accelerator: cpu
          max_epochs: 1
          logger: false
          enable_checkpointing: false
          enable_progress_bar: false
          default_root_dir: {tmp_path}
          callbacks:
            - class_path: lightning_memopt.callbacks.memory_monitor.MemoryMonitor
              init_args:
                batch_size_fn: tests.test_memory_monitor.samples_in
                trace_every_n_steps: 2
        """
    )
    cli = LightningCLI(Net, args=["fit", "--config", str(config)], save_config_callback=None)
    monitor = next(callback for callback in cli.trainer.callbacks if isinstance(callback, MemoryMonitor))
    assert monitor.batch_size_fn is samples_in
    assert monitor.trace_every_n_steps == 2
    metrics = _monitored(cli.trainer)
    assert metrics["epoch_peak_allocated_mib"] > 0
    assert metrics["epoch_samples_per_s"] > 0


# Two ranks: the second holds 32 MiB more and is slower.


class UnevenNet(Net):
    def on_train_start(self) -> None:
        if self.global_rank == 1:
            self.ballast = torch.ones(32 * MIB, dtype=torch.uint8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def _fit_on_rank(rank: int, folder: str) -> dict[str, Any]:
    local: list[dict[str, float]] = []  # this rank's own numbers, before they are reduced
    plain_close = MemoryMonitor._close

    def close(self: MemoryMonitor, trainer: Trainer, window: Any) -> Any:
        local.append(dict(window.memory))
        return plain_close(self, trainer, window)

    MemoryMonitor._close = close  # type: ignore[method-assign]
    logger = CSVLogger(folder)
    monitor = MemoryMonitor(trace_every_n_steps=2)
    trainer = _trainer(folder, monitor, logger=logger, devices=2, strategy="ddp")
    trainer.fit(UnevenNet(batches=8))
    return {
        "local": local,
        "metrics": _monitored(trainer),
        "rows": _rows(logger) if rank == 0 else [],
    }


def test_memory_is_the_maximum_over_the_ranks_and_samples_are_their_sum(tmp_path: Path) -> None:
    first, second = run_ranks(_fit_on_rank, 2, str(tmp_path), timeout=180.0)
    assert len(first["local"]) == 4  # eight batches over two ranks
    steps = [row for row in first["rows"] if "rss_mib" in row]
    assert [int(row["step"]) for row in steps] == [0, 1, 2, 3]
    for step, mine, other in zip(steps, first["local"], second["local"], strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            assert float(step[name]) == pytest.approx(max(mine[name], other[name]), rel=1e-6)
    for step in (steps[1], steps[3]):
        assert "peak_allocated_mib" in step
    assert second["local"][1]["peak_allocated_mib"] > first["local"][1]["peak_allocated_mib"] + 31
    epoch_names = [name for name in first["metrics"] if name.startswith("epoch_")]
    assert "epoch_step_ms_max" in epoch_names
    for name in epoch_names:  # the same on all ranks, so that any rank may act on them
        assert first["metrics"][name] == second["metrics"][name]
    largest = max(other["peak_allocated_mib"] for other in second["local"] if "peak_allocated_mib" in other)
    assert first["metrics"]["epoch_peak_allocated_mib"] == pytest.approx(largest, rel=1e-6)
    for step in (steps[0], steps[2]):
        assert float(step["samples_per_s"]) * float(step["step_ms"]) / 1e3 == pytest.approx(2 * BATCH, rel=1e-4)


# Two ranks whose steps are broken down; the second fails to do so from its second time on.


def _break_down_on_rank(rank: int, folder: str) -> dict[str, Any]:
    plain, calls = attribution._attributed, []

    def failing(*arguments: Any) -> Any:
        calls.append(rank)
        if rank == 1 and len(calls) > 1:
            raise OSError("gone")
        return plain(*arguments)

    attribution._attributed = failing  # type: ignore[assignment]
    monitor, logger = MemoryMonitor(breakdown_every_n_steps=2), CSVLogger(folder)
    model = AdamNet(batches=8, hidden=4096)
    trainer = _trainer(folder, monitor, logger=logger, devices=2, strategy="ddp", limit_val_batches=0)
    trainer.fit(model)
    return {"breakdown": monitor.breakdown, "rows": _rows(logger) if rank == 0 else [], "bytes": _bytes_of(model)}


def test_over_ranks_the_buckets_are_communication_and_a_rank_that_fails_leaves_the_others_their_figures(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(_break_down_on_rank, 2, str(tmp_path), timeout=180.0)
    for rank in (first, second):
        breakdown, size = rank["breakdown"], rank["bytes"]
        for moment in ("peak", "forward end", "backward end", "optimizer step"):
            assert breakdown.at(moment).communication == size
            assert breakdown.at(moment).other <= 0.01 * breakdown.at(moment).total_bytes
        assert breakdown.at("backward end").gradients == size
    steps = [row for row in first["rows"] if "rss_mib" in row]
    assert ["peak_communication_mib" in row for row in steps] == [False, True, False, True]
    assert float(steps[3]["peak_communication_mib"]) * MIB == pytest.approx(first["bytes"], rel=1e-5)
    assert float(steps[3]["peak_allocated_mib"]) * MIB == pytest.approx(first["breakdown"].peak_bytes, rel=1e-5)


# The CUDA path, on a stand-in for the device whose queue runs behind the host.


class FakeCuda:
    """Events pass when the device gets there: ``lag`` events behind the host."""

    def __init__(self, lag: int) -> None:
        self.recorded: deque[FakeEvent] = deque()
        self.lag = lag
        self.device_ms = 0.0
        self.resets = 0
        self.waits = 0
        self.peaks: Iterator[int] = iter(range(9, 1000))  # the first is read before the training
        self.retries = 4  # of a training before

    def memory_stats(self, device: torch.device) -> dict[str, Any]:
        peak = next(self.peaks)
        self.retries += 2
        return {
            "num_alloc_retries": self.retries,
            "allocated_bytes": {"all": {"peak": peak * MIB, "current": 10 * MIB}},
            "reserved_bytes": {"all": {"peak": 2 * peak * MIB}},
        }


class FakeEvent:
    cuda: FakeCuda

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at: float | None = None

    def record(self, stream: object) -> None:
        self.cuda.recorded.append(self)
        while len(self.cuda.recorded) > self.cuda.lag:
            self.cuda.recorded.popleft().happen()

    def happen(self) -> None:
        self.cuda.device_ms += 5.0
        self.at = self.cuda.device_ms

    def query(self) -> bool:
        return self.at is not None

    def synchronize(self) -> None:
        self.cuda.waits += 1
        while self.at is None:
            self.cuda.recorded.popleft().happen()

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.at is not None, "read before the device passed it"
        assert end.at is not None, "read before the device passed it"
        return end.at - self.at


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], FakeCuda]:
    def no_synchronize(*_: object) -> None:
        raise AssertionError("the monitor waits for the whole device")

    def install(lag: int) -> FakeCuda:
        cuda = FakeCuda(lag)

        def reset(device: torch.device) -> None:
            cuda.resets += 1

        monkeypatch.setattr(FakeEvent, "cuda", cuda, raising=False)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", cuda.memory_stats)
        monkeypatch.setattr(torch.cuda, "synchronize", no_synchronize)
        monkeypatch.setattr(
            memory_monitor, "_HostGauge", lambda: memory_monitor._CudaGauge(torch.device("cuda", 0), True)
        )
        return cuda

    return install


@pytest.mark.parametrize("lag", [0, 1, 5])
def test_cuda_times_are_read_once_the_device_has_passed_them_and_logged_under_their_own_step(
    tmp_path: Path, fake_cuda: Callable[[int], FakeCuda], lag: int
) -> None:
    cuda = fake_cuda(lag)
    waits: list[int] = []

    class CountWaits(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            waits.append(cuda.waits)

    logger = CSVLogger(tmp_path)
    _trainer(tmp_path, MemoryMonitor(), CountWaits(), logger=logger, limit_val_batches=0).fit(Net(batches=6))
    assert waits == [0] * 6  # within the epoch nothing waits
    *steps, epoch = _rows(logger)
    assert [int(row["step"]) for row in steps] == list(range(6))
    assert [float(row["step_ms"]) for row in steps] == [5.0] * 6
    assert [float(row["peak_allocated_mib"]) for row in steps] == [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]
    assert [float(row["peak_reserved_mib"]) for row in steps] == [20.0, 22.0, 24.0, 26.0, 28.0, 30.0]
    assert [float(row["alloc_retries"]) for row in steps] == [2.0] * 6
    assert cuda.resets == 6
    assert float(epoch["epoch_peak_allocated_mib"]) == 15.0
    assert float(epoch["epoch_alloc_retries"]) == 12.0
    assert float(epoch["epoch_step_ms_median"]) == 5.0


def test_peaks_of_micro_batches_enter_a_step_by_maximum_and_retries_by_sum(
    tmp_path: Path, fake_cuda: Callable[[int], FakeCuda]
) -> None:
    fake_cuda(3)
    logger = CSVLogger(tmp_path)
    _trainer(tmp_path, MemoryMonitor(), logger=logger, limit_val_batches=0, accumulate_grad_batches=3).fit(Net())
    *steps, _ = _rows(logger)
    assert [float(row["peak_allocated_mib"]) for row in steps] == [12.0, 15.0]
    assert [float(row["alloc_retries"]) for row in steps] == [6.0, 6.0]
    assert [float(row["step_ms"]) for row in steps] == [15.0, 15.0]


@pytest.mark.gpu
def test_on_cuda_the_peak_is_that_of_the_allocator(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cuda",
        devices=1,
        max_epochs=1,
        logger=False,
        callbacks=[MemoryMonitor()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        limit_val_batches=0,
    )
    trainer.fit(Net(hidden=2**18))
    metrics = _monitored(trainer)
    assert metrics["epoch_peak_allocated_mib"] * MIB >= BATCH * 2**18 * 4
    assert metrics["epoch_peak_reserved_mib"] >= metrics["epoch_peak_allocated_mib"]
    assert metrics["epoch_step_ms_max"] >= metrics["epoch_step_ms_median"] > 0
    assert metrics["epoch_alloc_retries"] == 0


def _bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
