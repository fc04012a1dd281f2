"""
What a step costs under every plan
==================================

The numbers that the planner works with. They come from one observation and say, for each region and each way of
treating it, which tensors live from its forward to its backward, how much memory it takes on top while it runs, and how
much longer a step takes. From them the peak of any plan follows without running it.

Tensors are named by storage: two regions that keep the same tensor, or two views of it, keep it once. A packed copy is
a storage of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Treatment = Literal["keep", "pack", "recompute_cheap", "recompute"]


@dataclass(frozen=True)
class Choice:
    """A way to treat a region."""

    treatment: Treatment = "keep"
    compressor: str | None = None
    """How the inputs of a recomputed region are packed: ``"bit"``, or None for not at all."""
    chunks: int = 1
    """Pieces along time in which a recomputed region runs."""
    cheap_chunks: int = 0
    """Of so many of the last pieces the products are kept."""


KEEP, CHEAP = Choice(), Choice("recompute_cheap")


@dataclass(frozen=True)
class ChoiceCost:
    """What one way to treat one region costs. Bytes are those of one rank."""

    choice: Choice
    holds: Mapping[int, int]
    """Bytes by storage that live from the forward to the backward of the region."""
    forward_peak_bytes: int
    """Most bytes alive while its forward runs, above those alive at its start."""
    backward_peak_bytes: int
    """Most bytes alive while its backward runs, above those alive at its start."""
    extra: float
    """Time that the choice adds to a step, in the unit of the observation."""
    extra_flops: int = 0
    """Floating point operations that the choice adds to a step."""
    left_bytes: int = 0
    """What the region's backward leaves behind beside gradients: states, what hangs on their graph, the output of the
    forward that the training loop holds."""
    refused: str = ""
    """Why the choice cannot be taken; empty if it can."""


@dataclass(frozen=True)
class RegionCosts:
    """One call of one region; regions appear in the order of the forward pass."""

    path: str
    """Of a module; or, in parentheses, words for what is none: a series, or a stretch of code outside of all regions,
    which can only be kept."""
    choices: tuple[ChoiceCost, ...]
    """The first is always ``keep``."""
    in_flight: Mapping[int, int]
    """Bytes by storage alive when the region starts that nobody may hold: its inputs, skip connections."""
    in_flight_gradient_bytes: int
    """Gradients alive when its backward starts: of its output, of skip connections."""
    gradient_bytes: int
    """Gradients of its parameters."""
    children: tuple[RegionCosts, ...] = ()
    """Smaller regions inside it, in order, of which it may consist; empty if it cannot be opened."""
    glue: Mapping[int, int] | None = None
    """If opened: bytes by storage that it holds outside its children."""
    series: tuple[str, ...] = ()
    """Of modules that run one after another, each on the output of the one before: their paths. A treatment is given to
    each of them."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that a treatment is given to."""
        return self.series or (self.path,)


@dataclass(frozen=True)
class StepCosts:
    """One observed step."""

    base_bytes: int
    """Alive throughout: parameters, buffers, optimizer state, the batch, 16-bit copies of weights under autocast."""
    regions: tuple[RegionCosts, ...]
    outside: tuple[Mapping[int, int], ...]
    """Bytes by storage held outside all regions: before the first one, between each two, after the last one."""
    end_peak_bytes: int
    """Most bytes alive between the last region's forward and its backward, above what is held: logits, loss."""
    outside_gradient_bytes: int
    """Gradients of parameters outside all regions."""
    optimizer_peak_bytes: int
    """Most bytes alive in the optimizer step above ``base_bytes`` and the gradients."""
    plain: float
    """Time of a plain step, in the unit of ``extra``."""
    plain_flops: int
    unit: Literal["ms", "bytes moved"]
    old_gradient_bytes: int = 0
    """Gradients of the step before, alive in the forward pass."""
