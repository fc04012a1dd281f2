"""
One step for all ranks
======================

Ranks may see different batches and hold different devices. They decide from the same numbers, those of the rank whose
step is the largest, and take no choice that one of them refused. The measured step then shows on every rank whether the
plan fits there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lightning_memopt.observing.costs import Choice, RegionCosts
from lightning_memopt.observing.region_costs import ObservedStep
from lightning_memopt.planning.candidates import combine

Refusals = dict[tuple[str, Choice], str]
"""Why a region cannot take a choice."""


def step_of_all(steps: Sequence[ObservedStep]) -> ObservedStep:
    """The largest of the steps that the ranks observed, without the choices that any of them refused.

    Raises:
        ValueError: the ranks ran different regions, or in another order.
    """
    paths = [[region.path for region in _without_series(step.costs.regions)] for step in steps]
    for rank, others in enumerate(paths):
        if others != paths[0]:
            raise ValueError(
                f"The ranks ran different regions: rank 0 {paths[0]}, rank {rank} {others}. A budget needs one plan "
                "for all; give example_forward a forward that takes the same way on every rank."
            )
    largest = max(steps, key=_size)
    refused: Refusals = {}
    for step in steps:
        tried: dict[str, set[Choice]] = {}
        for region in _all(step.costs.regions):
            tried.setdefault(region.path, set()).update(cost.choice for cost in region.choices)
            for cost in region.choices:
                if cost.refused:
                    refused.setdefault((region.path, cost.choice), cost.refused)
        for region in _all(largest.costs.regions):
            for cost in region.choices:
                untried = () if region.series else (cost.choice,)
                if cost.choice not in tried.get(region.path, untried):
                    refused.setdefault((region.path, cost.choice), "was not tried on every rank")
    # Which parts of a region are worth a look depends on the batch: those that every rank looked at count.
    common = [path for path in largest.observations if all(path in step.observations for step in steps)]
    observations = combine([[step.observations[path] for path in common] for step in steps])
    costs = replace(largest.costs, regions=tuple(_refusing(region, refused) for region in largest.costs.regions))
    return replace(
        largest,
        costs=costs,
        observations={seen.path: seen for seen in observations},
        flops=max(step.flops for step in steps),
        passes=max(step.passes for step in steps),
    )


def _size(step: ObservedStep) -> int:
    """Bytes of a plain step, by and large: what is held where nothing is treated."""
    kept: dict[int, int] = {}
    for region in step.costs.regions:
        kept.update(region.choices[0].holds)
    return step.costs.base_bytes + sum(kept.values())


def _all(regions: Sequence[RegionCosts]) -> Iterator[RegionCosts]:
    for region in regions:
        yield region
        yield from _all(region.children)


def _without_series(regions: Sequence[RegionCosts]) -> Iterator[RegionCosts]:
    """Regions as they run: which series among them are worth a look depends on the batch."""
    for region in regions:
        if region.series and region.children:
            yield from _without_series(region.children)
        else:
            yield region


def _refusing(region: RegionCosts, refused: Mapping[tuple[str, Choice], str]) -> RegionCosts:
    choices = tuple(
        replace(cost, refused=cost.refused or refused.get((region.path, cost.choice), "")) for cost in region.choices
    )
    children = tuple(_refusing(child, refused) for child in region.children)
    return replace(region, choices=choices, children=children)
