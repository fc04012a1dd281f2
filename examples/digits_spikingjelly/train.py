"""
Train the same network twice, plain and with MemoryOptimization, and compare
^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

Both runs start from the same seed. The script checks that every loss and every trained weight is the same bit for bit,
prints the two runs side by side and draws the bytes alive over one training step of each::

    python examples/digits_spikingjelly/train.py
"""

from __future__ import annotations

import gc
import hashlib
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

from lightning_memopt import MemoryMonitor, MemoryOptimization
from lightning_memopt.accounting.plots import plot_timeline
from lightning_memopt.measuring import StepMemory, measure_memory

OUTPUTS = Path("outputs/digits_spikingjelly")
MIB = 2**20


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
    step_ms: float
    """Median over the last epoch."""
    val_accuracy: float
    weights: str
    """SHA-256 of all trained weights and batch norm statistics."""
    memory: StepMemory
    """Of one forward and backward pass with the trained weights."""


def train(callbacks: Sequence[Callback] = (), *, max_epochs: int, channels: int, seed: int = 0) -> Run:
    """Train from ``seed`` and measure one more step.

    On the CPU, where arithmetic is reproducible to the last bit and every single allocation can be followed.
    """
    seed_everything(seed, verbose=False)
    model, data, recorder = DigitsClassifier(channels), DigitsData(), LossRecorder()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        callbacks=[recorder, MemoryMonitor(), *callbacks],
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
    return Run(
        losses=tuple(recorder.losses),
        step_ms=trainer.callback_metrics["MemoryMonitor/epoch_step_ms_median"].item(),
        val_accuracy=trainer.callback_metrics["val_accuracy"].item(),
        weights=digest(model),
        memory=memory,
    )


def digest(model: LightningModule) -> str:
    state = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        state.update(name.encode())
        state.update(tensor.detach().numpy().tobytes())
    return state.hexdigest()


def check_equal(plain: Run, optimized: Run) -> None:
    """Compare two runs bit for bit.

    Raises:
        AssertionError: a loss or a weight differs.
    """
    for step, (expected, found) in enumerate(zip(plain.losses, optimized.losses, strict=True)):
        if expected != found:
            raise AssertionError(f"step {step}: the plain loss is {expected!r}, the optimized one {found!r}")
    if plain.weights != optimized.weights:
        raise AssertionError("all losses are equal, but the trained weights are not")


def side_by_side(plain: Run, optimized: Run) -> Table:
    table = Table("", "plain", "MemoryOptimization()", "", title="SpikingJelly network on handwritten digits")
    for column in table.columns[1:]:
        column.justify = "right"
    peaks = plain.memory.peak_bytes, optimized.memory.peak_bytes
    table.add_row("peak of a step", *(f"{peak / MIB:.1f} MiB" for peak in peaks), f"{peaks[1] / peaks[0] - 1:+.1%}")
    times = plain.step_ms, optimized.step_ms
    table.add_row("time of a step", *(f"{ms:.0f} ms" for ms in times), f"{times[1] / times[0] - 1:+.1%}")
    table.add_row("first loss", f"{plain.losses[0]:.9f}", f"{optimized.losses[0]:.9f}", "identical")
    table.add_row("last loss", f"{plain.losses[-1]:.9f}", f"{optimized.losses[-1]:.9f}", "identical")
    table.add_row("trained weights", plain.weights[:12], optimized.weights[:12], "identical")
    table.add_row("validation accuracy", f"{plain.val_accuracy:.2%}", f"{optimized.val_accuracy:.2%}", "identical")
    return table


def main(max_epochs: int = 7, channels: int = 32) -> tuple[Run, Run]:
    console = Console()
    console.rule("plain")
    plain = train(max_epochs=max_epochs, channels=channels)
    console.rule("with MemoryOptimization()")
    optimized = train([MemoryOptimization()], max_epochs=max_epochs, channels=channels)
    check_equal(plain, optimized)

    console.print(side_by_side(plain, optimized))
    console.print(f"All {len(plain.losses)} losses and all trained weights are identical, bit for bit.")
    picture = OUTPUTS / "bytes_alive.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    plot_timeline({"plain": plain.memory, "MemoryOptimization()": optimized.memory}, picture)
    console.print(f"The bytes alive over one step, before and after: {picture}")
    return plain, optimized


if __name__ == "__main__":
    main()
