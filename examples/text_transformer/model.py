"""A small GPT over bytes in plain PyTorch: LayerNorm, GELU, dropout and scaled dot-product attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.text import Perplexity


class TransformerBlock(nn.Module):
    """Pre-norm block on ``[N, length, width]``: causal attention, then a four times wider MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return F.dropout(mixed, self.dropout, self.training)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ByteGPT(LightningModule):
    """Predicts the next byte of a text.

    Args:
        width: features per byte.
        heads: attention heads per block.
        depth: number of blocks.
        length: longest context in bytes.
        dropout: probability in the residual branches.
        learning_rate: of AdamW.
    """

    def __init__(
        self,
        width: int = 128,
        heads: int = 4,
        depth: int = 4,
        length: int = 128,
        dropout: float = 0.1,
        learning_rate: float = 2e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.length = length
        self.learning_rate = learning_rate
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)
        self.val_perplexity = Perplexity()
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.positions[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        text, targets = batch
        return F.cross_entropy(self(text).flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        text, targets = batch
        logits = self(text)
        self.val_perplexity(logits, targets)
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        self.log("val_perplexity", self.val_perplexity, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
