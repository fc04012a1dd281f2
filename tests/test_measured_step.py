from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt.callbacks import MeasuredStep

PARAMETER_BYTES = 4 * (32 * 64 + 64)


class Module(LightningModule):
    def __init__(self, fails_in_step: int | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh())
        self.fails_in_step = fails_in_step
        self.steps = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        if self.steps == self.fails_in_step:
            raise ArithmeticError("nothing works")
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def fit(module: LightningModule, *callbacks: Any, **options: Any) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.rand(48, 32)), batch_size=16))
    return trainer


def test_the_second_step_is_measured_with_every_byte_and_ends_the_training() -> None:
    measured = MeasuredStep()
    module = Module()
    trainer = fit(module, measured)
    assert (trainer.global_step, module.steps) == (2, 2)
    step = measured.memory
    assert step is not None
    assert step.breakdown is not None
    peak = step.breakdown.peak
    assert peak.total_bytes == step.peak_bytes
    assert peak.parameters == PARAMETER_BYTES
    # Two moments a parameter, and the count of steps of each of the two tensors: they are there from the first step.
    assert step.breakdown.at("forward end").optimizer_state == 2 * PARAMETER_BYTES + 2 * 4
    assert step.breakdown.at("backward end").gradients == PARAMETER_BYTES
    assert step.breakdown.at("forward end").activations_by_module["layers.1"] == 16 * 64 * 4
    assert step.breakdown.at("forward end").inputs == 16 * 32 * 4


def test_the_measured_micro_batch_is_the_one_that_completes_an_optimizer_step() -> None:
    measured = MeasuredStep(warmup_steps=0)
    module = Module()
    trainer = fit(module, measured, accumulate_grad_batches=3)
    assert (trainer.global_step, module.steps) == (1, 3)
    assert measured.memory is not None
    assert measured.memory.by_consumer["gradients"][0] == PARAMETER_BYTES  # of the two before it
    assert measured.memory.by_consumer["optimizer_state"][0] == 0
    assert measured.memory.by_consumer["optimizer_state"][-1] == 2 * PARAMETER_BYTES + 2 * 4


def test_a_training_of_one_batch_an_epoch_is_measured_in_its_second_epoch() -> None:
    measured = MeasuredStep()
    trainer = fit(Module(), measured, limit_train_batches=1)
    assert (trainer.current_epoch, trainer.global_step) == (2, 2)  # epochs that are over
    assert measured.memory is not None


def test_after_a_step_that_fails_nothing_is_recorded_any_more() -> None:
    measured = MeasuredStep()
    with pytest.raises(ArithmeticError, match="nothing works"):
        fit(Module(fails_in_step=2), measured)
    assert measured.memory is None
    assert not torch._C._autograd._profiler_enabled()
    again = MeasuredStep()
    fit(Module(), again)
    assert again.memory is not None


def test_a_model_without_an_optimizer_is_measured_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Module, "configure_optimizers", lambda self: None)
    measured = MeasuredStep()
    fit(Module(), measured)
    assert measured.memory is not None
    assert measured.memory.breakdown is not None
    assert measured.memory.breakdown.peak.optimizer_state == 0
