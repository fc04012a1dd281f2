"""A convolutional spiking network for handwritten digits, built from snnTorch's neurons with hidden state."""

from __future__ import annotations

import snntorch as snn
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from snntorch import surrogate
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy


class LeakyConvBlock(nn.Module):
    """Convolution, batch norm and leaky neuron for one time step ``[N, C, H, W]``.

    ``init_hidden=True`` keeps the membrane potential inside the neuron: the block is called once per time step and
    carries its state from call to call.
    """

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)
        self.neuron = snn.Leaky(beta=0.5, spike_grad=surrogate.atan(), init_hidden=True)

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
            LeakyConvBlock(1, channels),
            *(LeakyConvBlock(channels, channels) for _ in range(depth - 1)),
            nn.MaxPool2d(2),
            LeakyConvBlock(channels, wide),
            *(LeakyConvBlock(wide, wide) for _ in range(depth - 1)),
        )
        self.head = nn.Linear(wide * 4 * 4, 10)
        self.val_accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        for module in self.modules():
            if isinstance(module, snn.Leaky):
                module.reset_mem()
        outputs = [self.head(self.features(images).flatten(1)) for _ in range(self.steps)]
        return torch.stack(outputs).mean(0)

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
