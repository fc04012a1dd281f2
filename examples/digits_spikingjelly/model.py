"""A convolutional spiking network for handwritten digits, built from SpikingJelly's layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy


class SpikingConvBlock(nn.Module):
    """Convolution, batch norm and LIF neuron over a whole sequence ``[T, N, C, H, W]``."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = layer.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False, step_mode="m")
        self.norm = layer.BatchNorm2d(channels_out, step_mode="m")
        self.neuron = neuron.LIFNode(surrogate_function=surrogate.ATan(), detach_reset=True, step_mode="m")

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(self.norm(self.conv(x)))


class DigitsClassifier(LightningModule):
    """Spiking classifier of 8x8 images, shown for ``steps`` time steps; the class with the largest mean output wins.

    Args:
        channels: channels of the blocks in front of the pooling layer; those behind it have twice as many.
        depth: number of blocks in front of the pooling layer, and behind it.
        steps: time steps T.
        learning_rate: of Adam.
    """

    def __init__(self, channels: int = 32, depth: int = 3, steps: int = 8, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.steps = steps
        self.learning_rate = learning_rate
        wide = 2 * channels
        self.features = nn.Sequential(
            SpikingConvBlock(1, channels),
            *(SpikingConvBlock(channels, channels) for _ in range(depth - 1)),
            layer.MaxPool2d(2, step_mode="m"),
            SpikingConvBlock(channels, wide),
            *(SpikingConvBlock(wide, wide) for _ in range(depth - 1)),
        )
        self.head = layer.Linear(wide * 4 * 4, 10, step_mode="m")
        self.val_accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        functional.reset_net(self)
        sequence = images.unsqueeze(0).repeat(self.steps, 1, 1, 1, 1)
        return self.head(self.features(sequence).flatten(2)).mean(0)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
