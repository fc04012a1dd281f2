"""
Train the same network twice, plain and with MemoryOptimization, and compare
^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

Both runs start from the same seed. The script checks that every loss, every trained weight and the validation accuracy
are the same bit for bit, prints the two runs side by side and draws the bytes alive over one training step of each. The
time of a step is taken in turns, with the plan and without it: whatever else the machine does meets both alike::

    python examples/digits_spikingjelly/train.py
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data import DigitsData
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from model import DigitsClassifier
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_memopt import MemoryOptimization, applied_plan, apply_plan, remove_plan
from lightning_memopt.accounting.plots import plot_timeline
from lightning_memopt.measuring import StepMemory, measure_memory

OUTPUTS = Path("outputs/digits_spikingjelly")
MIB = 2**20
NOISY = 1.25
"""Times of single pairs of steps that differ by more than this factor say little of the cost."""


class LossRecorder(Callback):
    """Keeps the loss of every training step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].item())


@dataclass(frozen=True)
class Run:
    """What is kept of one training run."""

    losses: tuple[float, ...]
    val_accuracy: float
    weights: str
    """SHA-256 of all trained weights and batch norm statistics."""
    memory: StepMemory
    """Of one forward and backward pass with the trained weights."""


@dataclass(frozen=True)
class StepTimes:
    """Times of single forward and backward passes, taken in turns, in ms."""

    plain: tuple[float, ...]
    optimized: tuple[float, ...]

    @property
    def medians(self) -> tuple[float, float]:
        return statistics.median(self.plain), statistics.median(self.optimized)

    @property
    def ratios(self) -> tuple[float, float]:
        """Least and most time with the plan relative to without it, of steps taken one after the other."""
        ratios = [optimized / plain for plain, optimized in zip(self.plain, self.optimized, strict=True)]
        return min(ratios), max(ratios)


def train(
    callbacks: Sequence[Callback] = (), *, max_epochs: int, channels: int, seed: int = 0
) -> tuple[Run, DigitsClassifier, tuple[Tensor, Tensor]]:
    """Train from ``seed`` and measure the memory of one more step; returns the model and the batch of that step, too.

    On the CPU, where arithmetic is reproducible to the last bit and every single allocation can be followed.
    """
    seed_everything(seed, verbose=False)
    model, data, recorder = DigitsClassifier(channels), DigitsData(), LossRecorder()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        callbacks=[recorder, *callbacks],
        default_root_dir=OUTPUTS,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, datamodule=data)

    torch.manual_seed(seed)
    batch = next(iter(data.train_dataloader()))
    model.train()
    model.zero_grad()
    gc.collect()  # what the run before left in reference cycles is not this run's memory
    memory = measure_memory(lambda: model.loss(batch).backward(), device="cpu")
    run = Run(
        losses=tuple(recorder.losses),
        val_accuracy=trainer.callback_metrics["val_accuracy"].item(),
        weights=digest(model),
        memory=memory,
    )
    return run, model, batch


def time_in_turns(optimized: DigitsClassifier, batch: tuple[Tensor, Tensor], rounds: int = 5) -> StepTimes:
    """Time steps of one model without and with its plan, after one step of each to warm up; the plan stays on."""
    plan = applied_plan(optimized)
    if plan is None:
        raise ValueError("time_in_turns() takes a model that MemoryOptimization has treated")
    plain_ms, optimized_ms = [], []
    for _ in range(1 + rounds):
        remove_plan(optimized)
        plain_ms.append(time_step(optimized, batch))
        apply_plan(optimized, plan)
        optimized_ms.append(time_step(optimized, batch))
    return StepTimes(tuple(plain_ms[1:]), tuple(optimized_ms[1:]))


def time_step(model: DigitsClassifier, batch: tuple[Tensor, Tensor]) -> float:
    model.zero_grad()
    begin = time.perf_counter()
    model.loss(batch).backward()
    return (time.perf_counter() - begin) * 1e3


def digest(model: LightningModule) -> str:
    state = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        state.update(name.encode())
        state.update(tensor.detach().numpy().tobytes())
    return state.hexdigest()


def check_equal(plain: Run, optimized: Run) -> None:
    """Compare two runs bit for bit.

    Raises:
        AssertionError: a loss, a weight or the validation accuracy differs.
    """
    for step, (expected, found) in enumerate(zip(plain.losses, optimized.losses, strict=True)):
        if expected != found:
            raise AssertionError(f"step {step}: the plain loss is {expected!r}, the optimized one {found!r}")
    if plain.weights != optimized.weights:
        raise AssertionError("all losses are equal, but the trained weights are not")
    if plain.val_accuracy != optimized.val_accuracy:
        raise AssertionError(
            f"the plain validation accuracy is {plain.val_accuracy!r}, the optimized one {optimized.val_accuracy!r}"
        )


def compared(plain: object, optimized: object) -> str:
    return "identical" if plain == optimized else "different"


def side_by_side(plain: Run, optimized: Run, times: StepTimes) -> Table:
    table = Table("", "plain", "MemoryOptimization()", "", title="SpikingJelly network on handwritten digits")
    for column in table.columns[1:]:
        column.justify = "right"
    peaks = plain.memory.peak_bytes, optimized.memory.peak_bytes
    table.add_row("peak of a step", *(f"{peak / MIB:.1f} MiB" for peak in peaks), f"{peaks[1] / peaks[0] - 1:+.1%}")
    plain_ms, optimized_ms = times.medians
    table.add_row("time of a step", f"{plain_ms:.0f} ms", f"{optimized_ms:.0f} ms", f"x {optimized_ms / plain_ms:.2f}")
    for label, shown, value in (
        ("first loss", "{:.9f}", lambda run: run.losses[0]),
        ("last loss", "{:.9f}", lambda run: run.losses[-1]),
        ("trained weights", "{:.12}", lambda run: run.weights),
        ("validation accuracy", "{:.2%}", lambda run: run.val_accuracy),
    ):
        found = value(plain), value(optimized)
        table.add_row(label, *(shown.format(part) for part in found), compared(*found))
    return table


def main(max_epochs: int = 7, channels: int = 32) -> tuple[Run, Run]:
    console = Console()
    console.rule("plain")
    # The model and the batch are let go: they are no part of the second run's memory.
    plain = train(max_epochs=max_epochs, channels=channels)[0]
    console.rule("with MemoryOptimization()")
    optimized, model, batch = train([MemoryOptimization()], max_epochs=max_epochs, channels=channels)
    check_equal(plain, optimized)
    times = time_in_turns(model, batch)

    console.print(side_by_side(plain, optimized, times))
    console.print(
        f"All {len(plain.losses)} losses, all trained weights and the validation accuracy are identical, bit for bit."
    )
    plain_ms, optimized_ms = times.medians
    least, most = times.ratios
    console.print(
        f"A step (forward and backward) takes {optimized_ms / plain_ms:.2f} times as long: blocks compute their "
        f"forward twice and pack their spikes. Medians of {len(times.plain)} steps each, in turns, on the same weights "
        f"and batch; of single pairs {least:.2f} to {most:.2f} times."
    )
    if most > NOISY * least:
        console.print("These differ much: the machine is busy with something else, so take the time as a rough figure.")
    picture = OUTPUTS / "bytes_alive.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    plot_timeline({"plain": plain.memory, "MemoryOptimization()": optimized.memory}, picture)
    console.print(f"The bytes alive over one step, before and after: {picture}")
    return plain, optimized


if __name__ == "__main__":
    main()
