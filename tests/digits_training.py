"""Small trainings on scikit-learn's digits, and a record of all that a user could see of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import sklearn.datasets
import snntorch
import torch
from spikingjelly.activation_based import functional, layer, neuron
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from tests.equality import assert_same_tree, frozen, rng_state, seed_everything, state_of

BATCH = 16
TIME_STEPS = 4


def digits(count: int = 96, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """The first images of the digits, `[1, 8, 8]` in 0..1, and their labels."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = torch.tensor(images[:count], dtype=dtype).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(images, torch.tensor(labels[:count]))


def training_data(count: int = 96, **options: Any) -> DataLoader[Any]:
    return DataLoader(digits(count), **{"batch_size": BATCH, "shuffle": True, **options})


def validation_data() -> DataLoader[Any]:
    return DataLoader(digits(32), batch_size=BATCH)


class SpikingBlock(nn.Module):
    """Convolution, batch norm, LIF over `[T, N, C, H, W]`."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv = layer.Conv2d(channels_in, channels, 3, padding=1, bias=False, step_mode="m")
        self.norm = layer.BatchNorm2d(channels, step_mode="m")
        self.lif = neuron.LIFNode(v_threshold=0.5, step_mode="m", detach_reset=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lif(self.norm(self.conv(x)))


class DigitsModule(pl.LightningModule):
    """Training step, metric and optimizer; subclasses build the network."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=10)
        self.steps_seen = 0
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = nn.functional.cross_entropy(logits, labels)
        self.accuracy(logits, labels)
        self.steps_seen += 1
        self.kept.append(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict({"rate": self.optimizers().param_groups[0]["lr"]})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("validation_loss", nn.functional.cross_entropy(self(images), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


class SpikingConv(DigitsModule):
    """A convolutional SpikingJelly network with batch norm, LIF and dropout."""

    def __init__(self, channels: int = 8, blocks: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build()

    def build(self) -> None:
        channels = self.hparams.channels
        self.blocks = nn.Sequential(
            *(SpikingBlock(1 if i == 0 else channels, channels) for i in range(self.hparams.blocks))
        )
        self.dropout = nn.Dropout(self.hparams.dropout)
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        functional.reset_net(self)
        spikes = self.blocks(images.unsqueeze(0).repeat(TIME_STEPS, 1, 1, 1, 1))
        return self.head(self.dropout(spikes.mean(dim=(0, 3, 4))))


class BuiltInSetup(SpikingConv):
    """Makes its layers in `LightningModule.setup`."""

    def build(self) -> None:
        pass

    def setup(self, stage: str) -> None:
        if not hasattr(self, "blocks"):
            super().build()


class BuiltInConfigureModel(SpikingConv):
    """Makes its layers in `LightningModule.configure_model`."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            super().build()


class LeakyBlock(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.leaky = snntorch.Leaky(beta=0.9, init_hidden=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.leaky(self.linear(x))


class SnnTorchNet(DigitsModule):
    """Single-step snnTorch neurons with hidden state, in a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LeakyBlock(64) for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        for block in self.blocks:
            block.leaky.reset_mem()
        total: Tensor | None = None
        for _ in range(TIME_STEPS):
            x = images.flatten(1) * 2
            for block in self.blocks:
                x = block(x)
            total = x if total is None else total + x
        assert total is not None
        return self.head(total)


class Transformer(DigitsModule):
    """Not spiking: encoder layers over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embedding(images.flatten(1, 2))
        for encoder_layer in self.layers:
            x = encoder_layer(x)
        return self.head(x.mean(dim=1))


class Recorder(pl.Callback):
    """Writes down each batch, loss and random stream of a training, and weights, states and metrics at its end."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.epochs: list[dict[str, Any]] = []
        self.end: dict[str, Any] = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps.append(frozen({"batch": batch, "loss": outputs["loss"], "random streams": rng_state()}))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs.append(frozen(dict(trainer.callback_metrics)))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        state = state_of(pl_module)
        state["attribute"] = {name: v for name, v in state["attribute"].items() if not name.startswith(("_", "log"))}
        self.end = frozen(state)

    def record(self) -> dict[str, Any]:
        assert self.steps, "nothing was trained"
        return {"steps": self.steps, "epochs": self.epochs, "end": self.end}


def make_trainer(folder: Path | str, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A quiet trainer on the CPU."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def record_training(
    make_module: Callable[[], pl.LightningModule],
    make_data: Callable[[], Any],
    folder: Path | str,
    *callbacks: pl.Callback,
    **options: Any,
) -> dict[str, Any]:
    """Train from fixed seeds and return what a `Recorder` saw; `make_data` gives the arguments of `fit`."""
    seed_everything(0)
    module, data, recorder = make_module(), make_data(), Recorder()
    trainer = make_trainer(folder, *callbacks, recorder, **options)
    seed_everything(1)
    trainer.fit(module, **data)
    return recorder.record()


def loaders(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"train_dataloaders": training_data(**options), "val_dataloaders": validation_data()}


def assert_same_training(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    """Assert that two records of `record_training` are equal bit for bit."""
    assert_same_tree(expected, actual, name="training")
