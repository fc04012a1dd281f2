"""
What a benchmark model comes with
^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

Size = Literal["full", "small", "tiny"]
Precision = Literal["32", "bf16"]


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
