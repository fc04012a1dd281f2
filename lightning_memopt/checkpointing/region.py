"""What is said of a region, and what it learned about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_memopt.checkpointing.compressors import SpikeCompressor
from lightning_memopt.checkpointing.runs import Runs

Treatment = Literal["recompute", "pack", "recompute_cheap"]
TREATMENTS: tuple[Treatment, ...] = ("recompute", "pack", "recompute_cheap")


@dataclass(frozen=True)
class RegionConfig:
    """How one module is checkpointed. See :func:`checkpoint_module` for the fields."""

    treatment: Treatment = "recompute"

    compressor: SpikeCompressor | None = None
    chunks: int = 1
    cheap_chunks: int = 0
    chunked_args: tuple[int | str, ...] = (0,)
    time_dim: int = 0
    compressed_args: tuple[int | str, ...] | None = None
    check_chunks: bool = True
    name: str | None = None


@dataclass
class RegionFacts:
    """What a region learned about itself."""

    packable: dict[int, bool] = field(default_factory=dict)
    """Which inputs are binary."""
    states_stand_apart: bool | None = None
    """Whether no operation leads both to its output and to a state that it leaves behind; None while unknown."""


@dataclass(frozen=True)
class Region:
    """How one region is to be treated."""

    facts: RegionFacts
    compressor: SpikeCompressor | None = None
    compressed_args: tuple[int | str, ...] | None = None
    label: str = "a checkpointed function"
    runs: Runs | None = None
    """Those of the treated module; None where no module keeps them, and the graphs have to."""
