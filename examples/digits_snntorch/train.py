"""
Train an snnTorch network with MemoryOptimization and MemoryMonitor
^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

The neurons keep their membrane potential inside (``init_hidden=True``) and the blocks run once per time step. The state
a block starts a time step with is kept and its recomputation in backward starts from it::

    python examples/digits_snntorch/train.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from data import DigitsData
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from model import DigitsClassifier
from rich.console import Console
from torch import Tensor

from lightning_memopt import MemoryMonitor, MemoryOptimization, remove_plan
from lightning_memopt.measuring import measure_memory

OUTPUTS = Path("outputs/digits_snntorch")
MIB = 2**20


@dataclass(frozen=True)
class MeasuredStep:
    """Peak of one forward and backward pass, and the bytes of all gradients."""

    peak_bytes: int
    gradients: bytes


def measure_step(model: DigitsClassifier, batch: tuple[Tensor, Tensor]) -> MeasuredStep:
    model.train().zero_grad()
    peak_bytes = measure_memory(lambda: model.loss(batch).backward(), device="cpu").peak_bytes
    gradients = b"".join(parameter.grad.numpy().tobytes() for parameter in model.parameters())
    return MeasuredStep(peak_bytes, gradients)


def main(max_epochs: int = 3, channels: int = 32) -> dict[str, float]:
    """Train, then measure one step with and without the plan; returns accuracy and both peaks in bytes."""
    console = Console()
    seed_everything(0, verbose=False)
    model, data = DigitsClassifier(channels), DigitsData()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        callbacks=[MemoryOptimization(), MemoryMonitor()],
        logger=CSVLogger(OUTPUTS.parent, name=OUTPUTS.name),
        log_every_n_steps=1,
    )
    trainer.fit(model, datamodule=data)
    accuracy = trainer.callback_metrics["val_accuracy"].item()

    torch.manual_seed(0)
    batch = next(iter(data.train_dataloader()))
    optimized = measure_step(model, batch)
    plain = measure_step(remove_plan(model), batch)
    if optimized.gradients != plain.gradients:
        raise AssertionError("the gradients of the optimized step are not those of the plain step")

    console.print(f"validation accuracy {accuracy:.2%}")
    console.print(
        f"peak of a step: {plain.peak_bytes / MIB:.1f} MiB plain, {optimized.peak_bytes / MIB:.1f} MiB with the plan "
        f"({optimized.peak_bytes / plain.peak_bytes - 1:+.1%}); the gradients are identical, bit for bit"
    )
    return {"val_accuracy": accuracy, "plain_peak": plain.peak_bytes, "optimized_peak": optimized.peak_bytes}


if __name__ == "__main__":
    main()
