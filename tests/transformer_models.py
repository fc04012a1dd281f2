"""Transformers in plain torch, written from their descriptions: what the estimates are held against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memopt.accounting.transformer import Transformer


class FloatRMSNorm(nn.Module):
    """RMSNorm as Llama's own code writes it: float32 inside, by single operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype.itemsize < 4 else x
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed.to(x.dtype) * self.weight


def norm(model: Transformer) -> nn.Module:
    if model.norm == "layernorm":
        return nn.LayerNorm(model.width, bias=model.bias)
    return nn.RMSNorm(model.width, eps=1e-6) if model.norm == "rmsnorm" else FloatRMSNorm(model.width)


def activation(model: Transformer) -> nn.Module:
    return {"gelu": nn.GELU, "silu": nn.SiLU, "relu": nn.ReLU}[model.activation]()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        if model.fused_qkv:
            self.qkv = nn.Linear(model.width, model.width + 2 * model.key_width, bias=model.bias)
        else:
            self.query = nn.Linear(model.width, model.width, bias=model.bias)
            self.key = nn.Linear(model.width, model.key_width, bias=model.bias)
            self.value = nn.Linear(model.width, model.key_width, bias=model.bias)
        self.output = nn.Linear(model.width, model.width, bias=model.bias)
        self.weights_dropout = nn.Dropout(model.dropout) if model.dropout else nn.Identity()
        self.dropout = nn.Dropout(model.dropout) if model.dropout else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        model = self.model
        batch, length, width = x.shape
        if model.fused_qkv:
            q, k, v = self.qkv(x).split((model.width, model.key_width, model.key_width), dim=-1)
        else:
            q, k, v = self.query(x), self.key(x), self.value(x)
        q, k, v = (part.view(batch, length, -1, model.head_width).transpose(1, 2) for part in (q, k, v))
        if turns is not None:
            q, k = turned(q, *turns), turned(k, *turns)
        if model.attention == "sdpa":
            rate = model.dropout if self.training else 0.0
            grouped = model.key_heads != model.heads
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True, enable_gqa=grouped)
        else:
            if model.key_heads != model.heads:
                k, v = (part.repeat_interleave(model.heads // model.key_heads, dim=1) for part in (k, v))
            scores = q @ k.transpose(-2, -1)
            scores = scores * model.head_width**-0.5
            scores = scores.masked_fill(mask, float("-inf"))
            y = self.weights_dropout(scores.softmax(dim=-1)) @ v
        return self.dropout(self.output(y.transpose(1, 2).reshape(batch, length, width)))


class MLP(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.gate = nn.Linear(model.width, model.inner_width, bias=model.bias) if model.gated else None
        self.up = nn.Linear(model.width, model.inner_width, bias=model.bias)
        self.down = nn.Linear(model.inner_width, model.width, bias=model.bias)
        self.activation = activation(model)
        self.dropout = nn.Dropout(model.dropout) if model.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x)
        return self.dropout(self.down(y))


class Block(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(model), norm(model)
        self.attention, self.mlp = Attention(model), MLP(model)

    def forward(self, x: Tensor, mask: Tensor | None, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask, turns)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        self.embedding = nn.Embedding(model.vocabulary, model.width)
        if model.positions == "learned":
            self.positions = nn.Parameter(torch.zeros(model.sequence_length, model.width))
        else:
            half = torch.arange(0, model.head_width, 2) / model.head_width
            angles = torch.outer(torch.arange(model.sequence_length), 10000.0**-half).repeat(1, 2)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)
        if model.attention == "eager":
            ones = torch.ones(model.sequence_length, model.sequence_length, dtype=torch.bool)
            self.register_buffer("mask", ones.triu(1), persistent=False)
        self.dropout = nn.Dropout(model.dropout) if model.dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = norm(model)
        self.head = nn.Linear(model.width, model.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if model.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.model.positions == "learned":
            x = x + self.positions[: tokens.shape[1]]
        x = self.dropout(x)
        turns = (self.cos, self.sin) if self.model.positions == "rotary" else None
        mask = self.mask if self.model.attention == "eager" else None
        for block in self.blocks:
            x = block(x, mask, turns)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self(tokens)
        wide = logits.float() if self.model.float32_loss and logits.dtype.itemsize < 4 else logits
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten())
