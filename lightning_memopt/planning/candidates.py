"""
Which regions can be checkpointed, and which are chosen first
=============================================================

Level 1 needs no measurement: every region that can be recomputed from its inputs is a candidate, the largest inputs
come first, and the budget says how many of them are taken. Whatever cannot be a candidate stays as it is, and the plan
says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from lightning_memopt.checkpointing import BitSpikeCompressor, RegionConfig
from lightning_memopt.observing.observe import ArgName, RegionObservation, SeenInput
from lightning_memopt.observing.regions import Region, is_neuron
from lightning_memopt.observing.treatable import treated_before, trouble_with, worth_packing
from lightning_memopt.planning.plan import Budget

BUDGET_SHARES: Mapping[Budget, float] = {"speed": 0.5, "balanced": 0.75, "memory": 1.0}
"""Share of the candidates that level 1 checkpoints."""


@dataclass(frozen=True)
class Candidate:
    """A region with what was seen of it; without ``config`` it cannot be checkpointed, and ``reason`` says why."""

    region: Region
    seen: RegionObservation
    config: RegionConfig | None
    reason: str

    @property
    def stored_bytes(self) -> int:
        """Bytes of the inputs as they are stored when the region is checkpointed."""
        packed = () if self.config is None or self.config.compressor is None else self.config.compressed_args or ()
        return sum(
            seen.packed_bytes if seen.name in packed else seen.input_bytes
            for seen in self.seen.inputs
            if not seen.standing
        )


def find_candidates(
    model: nn.Module, regions: Sequence[Region], seen: Sequence[RegionObservation], *, compress: bool
) -> dict[str, Candidate]:
    """Decide for each region whether and how it can be checkpointed. In model order, by path."""
    treated = treated_before(model)
    return {
        region.path: _candidate(region, observation, treated, compress=compress)
        for region, observation in zip(regions, seen, strict=True)
    }


def choose_largest_inputs(candidates: Sequence[Candidate], budget: Budget) -> tuple[Candidate, ...]:
    """The candidates with the largest inputs, as many as ``budget`` allows (rounded up); ties in model order."""
    possible = [candidate for candidate in candidates if candidate.config is not None]
    ordered = sorted(possible, key=lambda candidate: -candidate.seen.input_bytes)
    return tuple(ordered[: math.ceil(BUDGET_SHARES[budget] * len(ordered))])


def combine(reports: Sequence[Sequence[RegionObservation]]) -> tuple[RegionObservation, ...]:
    """What all ranks saw together: sizes by MAX, binary by AND, troubles by OR."""
    return tuple(_combine_region(views) for views in zip(*reports, strict=True))


def _combine_region(views: Sequence[RegionObservation]) -> RegionObservation:
    names: dict[ArgName, list[SeenInput]] = {}
    for view in views:
        for seen in view.inputs:
            names.setdefault(seen.name, []).append(seen)
    return RegionObservation(
        path=views[0].path,
        calls=max(view.calls for view in views),
        inputs=tuple(_combine_input(inputs) for inputs in names.values()),
        flops=max(view.flops for view in views),
        moved_bytes=max(view.moved_bytes for view in views),
        returns_tensor=all(view.returns_tensor for view in views),
        writes_input=any(view.writes_input for view in views),
        input_overwritten=any(view.input_overwritten for view in views),
    )


def _combine_input(inputs: Sequence[SeenInput]) -> SeenInput:
    return replace(
        inputs[0],
        input_bytes=max(seen.input_bytes for seen in inputs),
        packed_bytes=max(seen.packed_bytes for seen in inputs),
        binary=all(seen.binary for seen in inputs),
        # One rank that saw a spike proves it for all, as long as no rank saw anything else.
        any_one=any(seen.any_one for seen in inputs),
        packable=all(seen.packable for seen in inputs),
        steps=min(seen.steps for seen in inputs),
        standing=all(seen.standing for seen in inputs),
    )


# ---------------------------------------------------------------------------------------------------------------------


def _candidate(region: Region, seen: RegionObservation, treated: Mapping[int, str], *, compress: bool) -> Candidate:
    trouble = trouble_with(region, seen, treated)
    if trouble:
        return Candidate(region, seen, None, trouble)
    packed = worth_packing(seen) if compress else ()
    config = RegionConfig(
        compressor=BitSpikeCompressor() if packed else None,
        compressed_args=packed or None,
        name=region.path,
    )
    spiking = any(map(is_neuron, region.module.modules())) or any(item.binary and item.any_one for item in seen.inputs)
    return Candidate(region, seen, config, _about_inputs(seen, spiking=spiking and compress))


def _about_inputs(seen: RegionObservation, *, spiking: bool) -> str:
    parts = [f"{seen.calls} calls"] if seen.calls > 1 else []
    if spiking:
        for item in seen.inputs:
            name = "input" if len(seen.inputs) == 1 else _called(item.name)
            if item.standing:
                parts.append(f"{name} is held by the caller anyway")
            elif item.binary and item.any_one:
                parts.append(f"{name} is binary")
            elif item.binary:
                parts.append(f"{name} was all zeros, which proves nothing")
            elif not item.packable:
                parts.append(f"{name} is no spike tensor")
            else:
                parts.append(f"{name} is not binary")
    return ", ".join(parts) or "can be recomputed from its inputs"


def _called(name: ArgName) -> str:
    return f"argument {name!r}" if isinstance(name, str) else f"argument {name}"
