"""
Benchmark models without neurons
^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from benchmark_case import Benchmark, MissingLibraryError, Size
from torch import Tensor, nn


def dense_builders() -> dict[str, Callable[[Size], Benchmark]]:
    return {"gpt": _gpt, "resnet": _resnet}


class CausalSelfAttention(nn.Module):
    """Multi-head attention over earlier positions, through ``scaled_dot_product_attention``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))


class GPTBlock(nn.Module):
    """Pre-norm transformer block: attention, then a four times wider MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Decoder-only transformer with learned positions and tied output weights (Radford et al. 2019)."""

    def __init__(self, *, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(GPTBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def next_token_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Cross-entropy of the next token; ``batch`` is ``(tokens [N, L], next tokens [N, L])``."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def split_gpt_block(module: nn.Module) -> tuple[nn.Module, ...]:
    return (module.attention, module.mlp) if isinstance(module, GPTBlock) else ()


def never_chunk(module: nn.Module) -> bool:
    """Attention mixes positions and the rest has no time axis first: nothing may be cut."""
    return False


def keep_state(model: nn.Module) -> None:
    """A network without neurons carries nothing from step to step."""


def _gpt(size: Size) -> Benchmark:
    vocabulary, length, width, heads, depth, batch_size = {
        "full": (50257, 1024, 768, 12, 12, 8),
        "small": (512, 256, 256, 4, 6, 8),
        "tiny": (64, 16, 32, 2, 3, 2),
    }[size]
    tokens = torch.randint(vocabulary, (batch_size, length + 1))
    return Benchmark(
        name="gpt",
        description=f"GPT, {depth} blocks, width {width}, {heads} heads, {batch_size} x {length} tokens",
        model=GPT(vocabulary=vocabulary, length=length, width=width, heads=heads, depth=depth),
        batch=(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        loss=next_token_loss,
        targets=(GPTBlock,),
        split_fn=split_gpt_block,
        can_chunk=never_chunk,
        reset=keep_state,
        full_precision="bf16",
    )


def split_into_layers(module: nn.Module) -> tuple[nn.Module, ...]:
    """The layers of a residual block, each of which runs once."""
    layers = tuple(layer for layer in module.children() if not isinstance(layer, nn.ReLU))
    return layers if len(layers) > 1 and not isinstance(module, nn.Sequential) else ()


def classification_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Cross-entropy of the logits; ``batch`` is ``(images [N, 3, H, W], labels [N])``."""
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels)


def _resnet(size: Size) -> Benchmark:
    try:
        from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet, resnet18, resnet50
    except ImportError as error:
        raise MissingLibraryError(
            f"the 'resnet' benchmark is torchvision's ResNet and torchvision could not be imported ({error}); "
            "install it with: pip install torchvision (--model gpt needs torch only)"
        ) from error
    samples, pixels, classes = {"full": (64, 224, 1000), "small": (32, 96, 100), "tiny": (8, 64, 10)}[size]
    if size == "full":
        network, label = resnet50(num_classes=classes), "ResNet-50"
    elif size == "small":
        network, label = resnet18(num_classes=classes), "ResNet-18"
    else:
        # Two stages: the weights of the others would take more than all activations at this size.
        network, label = ResNet(BasicBlock, [2, 2, 1, 1], num_classes=classes), "ResNet, two stages of two blocks"
        network.layer3 = network.layer4 = nn.Identity()
        network.fc = nn.Linear(128, classes)
    return Benchmark(
        name="resnet",
        description=f"{label} (torchvision), batch {samples}, {pixels}x{pixels}",
        model=network,
        batch=(torch.randn(samples, 3, pixels, pixels), torch.randint(classes, (samples,))),
        loss=classification_loss,
        targets=(BasicBlock, Bottleneck),
        split_fn=split_into_layers,
        can_chunk=never_chunk,
        reset=keep_state,
        full_precision="bf16",
    )
