"""
Benchmark models
^^^^^^^^^^^^^^^^

Each builder returns a :class:`Benchmark`: a model, one batch of synthetic data, the loss of one training step, and what
a memory search needs to know about the model (which blocks are regions, how one splits, what may be cut along time).

``size="full"`` is the size published figures use and wants a GPU; ``size="small"`` keeps every kind of layer, at a size
that two CPU cores train in one or two seconds a step; ``size="tiny"`` is for smoke tests. The block model is small
enough to be the same at every size but ``"tiny"``: T=16, N=512, C=512.

Neurons run in SpikingJelly's multi-step mode on its plain PyTorch path. Layers come from SpikingJelly where it ships
the model; the others follow their papers. ``resnet`` is torchvision's, for a network without neurons that has batch
norms; ``gpt`` needs torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Size = Literal["full", "small", "tiny"]
Precision = Literal["32", "bf16"]

MODELS = ("block", "vgg", "sew_resnet34", "spikformer", "gpt", "resnet")


class MissingLibraryError(ImportError):
    """A benchmark model needs an optional library that is not installed."""


@dataclass(frozen=True)
class Benchmark:
    """A model with everything one training step and one memory search need."""

    name: str
    description: str
    model: nn.Module
    batch: tuple[Tensor, ...]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    targets: tuple[type[nn.Module], ...]
    split_fn: Callable[[nn.Module], Sequence[nn.Module]]
    can_chunk: Callable[[nn.Module], bool]
    reset: Callable[[nn.Module], None]
    """Puts the neurons back to rest, so that every step starts alike and no step holds on to the last one's graph."""
    full_precision: Precision = "32"
    """Precision the published figures of the full size were measured in."""


def build(name: str, *, size: Size = "small", seed: int = 0) -> Benchmark:
    """Build a benchmark model and its batch on the CPU, from ``seed``.

    Raises:
        ValueError: ``name`` or ``size`` is unknown.
        MissingLibraryError: the model needs SpikingJelly or torchvision and it is not installed.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; choose one of {', '.join(MODELS)}")
    if size not in ("full", "small", "tiny"):
        raise ValueError(f"unknown size {size!r}; choose 'full', 'small' or 'tiny'")
    if name in ("gpt", "resnet"):
        builder = _gpt if name == "gpt" else _resnet
    else:
        try:
            import spikingjelly.activation_based  # noqa: F401
        except ImportError as error:
            raise MissingLibraryError(
                f"the {name!r} benchmark is a SpikingJelly network and spikingjelly could not be imported ({error}); "
                "install it with: pip install 'lightning-memopt[examples]' (--model gpt needs torch only)"
            ) from error
        from spiking_models import spiking_builders

        builder = spiking_builders()[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return builder(size)


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
