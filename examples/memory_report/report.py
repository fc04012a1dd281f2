"""
Where the bytes of a step go, before and after MemoryOptimization
^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

Measures one training step of two networks, a GPT on source text and a spiking network on handwritten digits, plain and
with the callback. For each it writes a page, ``report.html``, and two pictures::

    python examples/memory_report/report.py
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from rich.console import Console

from lightning_memopt import MemoryOptimization
from lightning_memopt.accounting import comparison_table, plot_breakdown, plot_timeline, report_summary, write_report
from lightning_memopt.callbacks import MeasuredStep
from lightning_memopt.measuring import StepMemory

sys.path.insert(0, str(Path(__file__).parents[2]))  # the networks are those of the examples beside this one

from examples.digits_spikingjelly.data import DigitsData
from examples.digits_spikingjelly.model import DigitsClassifier
from examples.text_transformer.data import StandardLibraryText
from examples.text_transformer.model import ByteGPT

OUTPUTS = Path("outputs/memory_report")


def measured_step(model: LightningModule, data: LightningDataModule, *callbacks: Callback) -> StepMemory:
    """The second step of a training, when the optimizer has its state; on the CPU, where every byte can be followed."""
    gc.collect()  # what the training before left in reference cycles is not this one's memory
    measured = MeasuredStep()
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[*callbacks, measured],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(model, datamodule=data)
    return measured.memory


def gpt(length: int = 256, batch_size: int = 8, **sizes: int) -> tuple[LightningModule, LightningDataModule]:
    seed_everything(0, verbose=False)
    model = ByteGPT(length=length, **{"width": 192, "heads": 6, "depth": 6, **sizes})
    return model, StandardLibraryText(batch_size, length)


def spiking(batch_size: int = 64, **sizes: int) -> tuple[LightningModule, LightningDataModule]:
    seed_everything(0, verbose=False)
    return DigitsClassifier(**sizes), DigitsData(batch_size)


def report(name: str, title: str, network: Any, sizes: dict[str, int]) -> dict[str, int]:
    """Write the report of one network; returns its peaks in bytes."""
    console, folder = Console(), OUTPUTS / name
    before = measured_step(*network(**sizes))
    callback = MemoryOptimization(verbose=False)
    after = measured_step(*network(**sizes), callback)

    page = write_report(folder / "report.html", before, after, title=title, plan=callback.plan)
    plot_timeline({"before": before, "after": after}, folder / "over_the_step.png")
    plot_breakdown({"before": before.breakdown.peak, "after": after.breakdown.peak}, folder / "at_the_peak.png")
    console.print(comparison_table(before, after, title=title))
    for sentence in report_summary(before, after):
        console.print(sentence)
    console.print(f"The page: {page}\n")
    return {"before": before.peak_bytes, "after": after.peak_bytes}


def main(
    gpt_sizes: dict[str, int] | None = None, spiking_sizes: dict[str, int] | None = None
) -> dict[str, dict[str, int]]:
    return {
        "gpt": report("gpt", "A GPT on source text", gpt, gpt_sizes or {}),
        "spiking": report("spiking", "A spiking network on handwritten digits", spiking, spiking_sizes or {}),
    }


if __name__ == "__main__":
    main()
