"""
Measured Step
^^^^^^^^^^^^^

Measures one step of a training as it really runs, with every byte attributed, and ends the training there.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_memopt.measuring import AttributedStep, StepMemory


class MeasuredStep(Callback):
    """Measures the memory of one training step, then stops the training: for a report, not for a run that goes on.

    The step is everything between ``on_train_batch_start`` and ``on_train_batch_end``: forward, backward, optimizer.
    It comes after ``warmup_steps`` optimizer steps, because an optimizer makes its state in the first. With gradient
    accumulation it is the micro-batch whose gradients complete an optimizer step: the fullest one.

    Give it to the Trainer as the last of the callbacks, so that what the others do in a step belongs to the step.

    Args:
        warmup_steps: Optimizer steps before the measured one.

    Raises:
        RuntimeError: In training, if a torch profiler already runs (CPU only).
        ValueError: In training, if the device counts no memory.

    Example::

        from lightning import Trainer
        from lightning_memopt.accounting import write_report
        from lightning_memopt.callbacks import MeasuredStep

        measured = MeasuredStep()
        Trainer(callbacks=[measured]).fit(model, datamodule=data)
        write_report("report.html", measured.memory)

    """

    def __init__(self, warmup_steps: int = 1) -> None:
        super().__init__()
        self.warmup_steps = warmup_steps
        self.memory: StepMemory | None = None
        """The measured step; None before it."""
        self._running: AttributedStep | None = None
        self._steps_before = 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.memory is not None or trainer.global_step < self.warmup_steps:
            return
        self._steps_before = trainer.global_step
        self._running = AttributedStep(trainer.strategy.root_device, pl_module, trainer.optimizers, batch)
        self._running.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._running is None:
            return
        if trainer.global_step > self._steps_before:
            self.memory = self._running.stop()
            trainer.should_stop = True
        self._end()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        if self._running is not None:
            self._running.abandon()
            self._running = None
