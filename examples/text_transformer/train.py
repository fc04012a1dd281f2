"""
Train a small GPT with MemoryOptimization and MemoryMonitor
^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

Nothing spikes here: the blocks are recomputed in backward, dropout draws the same masks again::

    python examples/text_transformer/train.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from data import StandardLibraryText
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from model import ByteGPT
from rich.console import Console
from torch import Tensor

from lightning_memopt import MemoryMonitor, MemoryOptimization, remove_plan
from lightning_memopt.measuring import measure_memory

OUTPUTS = Path("outputs/text_transformer")
MIB = 2**20


@dataclass(frozen=True)
class MeasuredStep:
    """Peak of one forward and backward pass, and the bytes of all gradients."""

    peak_bytes: int
    gradients: bytes


def measure_step(model: ByteGPT, batch: tuple[Tensor, Tensor]) -> MeasuredStep:
    model.train().zero_grad()
    torch.manual_seed(0)  # the same dropout masks in every measured step
    peak_bytes = measure_memory(lambda: model.loss(batch).backward(), device="cpu").peak_bytes
    gradients = b"".join(parameter.grad.numpy().tobytes() for parameter in model.parameters())
    return MeasuredStep(peak_bytes, gradients)


def main(max_steps: int = 200) -> dict[str, float]:
    """Train, then measure one step with and without the plan; returns perplexity and both peaks in bytes."""
    console = Console()
    seed_everything(0, verbose=False)
    model, data = ByteGPT(), StandardLibraryText()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=max_steps,
        limit_val_batches=20,
        callbacks=[MemoryOptimization(), MemoryMonitor()],
        logger=CSVLogger(OUTPUTS.parent, name=OUTPUTS.name),
        log_every_n_steps=1,
    )
    trainer.fit(model, datamodule=data)
    perplexity = trainer.callback_metrics["val_perplexity"].item()

    batch = next(iter(data.train_dataloader()))
    optimized = measure_step(model, batch)
    plain = measure_step(remove_plan(model), batch)
    if optimized.gradients != plain.gradients:
        raise AssertionError("the gradients of the optimized step are not those of the plain step")

    console.print(f"validation perplexity {perplexity:.1f} (256 for a uniform guess)")
    console.print(
        f"peak of a step: {plain.peak_bytes / MIB:.1f} MiB plain, {optimized.peak_bytes / MIB:.1f} MiB with the plan "
        f"({optimized.peak_bytes / plain.peak_bytes - 1:+.1%}); the gradients are identical, bit for bit"
    )
    return {"val_perplexity": perplexity, "plain_peak": plain.peak_bytes, "optimized_peak": optimized.peak_bytes}


if __name__ == "__main__":
    main()
