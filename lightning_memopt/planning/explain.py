"""
What a plan tells of itself
===========================

A plan that was solved for a budget is explained by numbers that are kept in it: bytes alive at every position of the
step, before and after, as predicted and as measured; what else the memory could have been traded for; and for every
region why it does not get the next faster treatment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightning_memopt.checkpointing import RegionConfig
from lightning_memopt.observing.costs import Choice, RegionCosts, StepCosts
from lightning_memopt.observing.region_costs import ObservedStep, treatment_arguments
from lightning_memopt.observing.regions import FoundRegions
from lightning_memopt.observing.trial import Profile
from lightning_memopt.planning.apply import entries_of
from lightning_memopt.planning.plan import BytesAlive, RegionPlan
from lightning_memopt.planning.simulate import Assignment, Correction, added_time, positions, simulate, visits
from lightning_memopt.planning.solve import Solution, frontier, why

# Points of the frontier that a plan keeps.
_POINTS = 48


def explained(step: ObservedStep, solution: Solution, profiles: Sequence[Profile]) -> dict[str, Any]:
    """The entries of a :class:`Plan` that explain a solution.

    Args:
        step: what the solution was found for.
        solution: the plan.
        profiles: what its measured step showed, one of each rank; empty if none was measured.
    """
    costs = step.costs
    timed = [profile.step_ms for profile in profiles if profile.step_ms is not None]
    return {
        "forward_flops": step.flops,
        "extra_flops": solution.simulated.extra_flops,
        "predicted_peak_bytes": solution.simulated.peak_bytes,
        "time_unit": costs.unit,
        "plain_time": costs.plain,
        "added_time": solution.simulated.extra,
        "measured_ms": max(timed, default=None),
        "alive": bytes_alive(costs, solution, profiles),
        "frontier": tradable(costs, solution.correction),
    }


def bytes_alive(costs: StepCosts, solution: Solution, profiles: Sequence[Profile] = ()) -> BytesAlive:
    """Bytes alive over the step, plain and under a solution; measured ones are the most of all ranks."""
    visited = visits(costs, solution.assignment)
    # Region by region as the plan takes them, so that both curves have the same positions.
    plain = simulate(costs, _all_kept(costs.regions, solution.assignment), solution.correction)
    modules = {visit.region.path: visit.region.modules for visit in visited}
    measured = []
    for position in positions(visited):
        peaks = [
            getattr(profile, f"{position.kind}_peaks", {}).get(path, 0)
            for profile in profiles
            for path in modules.get(position.path, (position.path,))
        ]
        measured.append(max(peaks, default=0) or None)
    return BytesAlive(
        paths=tuple(visit.region.path for visit in visited),
        plain_bytes=tuple(alive for _, alive in plain.timeline),
        planned_bytes=tuple(alive for _, alive in solution.simulated.timeline),
        measured_bytes=tuple(measured),
    )


def _kept_bytes(region: RegionCosts, path: str) -> int:
    """What a region keeps if it is plain; if ``path`` names a module of a series, what that one does."""
    if region.series and path:
        return sum(_kept_bytes(child, path) for child in region.children if path in child.modules)
    return sum(region.choices[0].holds.values())


def _all_kept(regions: tuple[RegionCosts, ...], assignment: Assignment) -> Assignment:
    chosen = zip(regions, assignment.regions, strict=True)
    return Assignment(tuple(0 if isinstance(c, int) else _all_kept(region.children, c) for region, c in chosen))


def tradable(costs: StepCosts, correction: Correction) -> tuple[tuple[int, float], ...]:
    """Peak in bytes and added time as a share of a plain step, from the least peak to no added time."""
    plans = frontier(costs, _POINTS, correction)
    return tuple((peak, extra / costs.plain if costs.plain else 0.0) for peak, extra, _ in plans)


def config_of_choice(path: str, choice: Choice, step: ObservedStep) -> RegionConfig:
    """How a region is treated that gets ``choice``."""
    return RegionConfig(**treatment_arguments(path, choice, step.observations[path]))


def planned_regions(
    model: nn.Module, found: FoundRegions, step: ObservedStep, solution: Solution, profiles: Sequence[Profile] = ()
) -> tuple[RegionPlan, ...]:
    """The regions of a solution in model order, each with why it does not get the next faster treatment."""
    modules = dict(model.named_modules(remove_duplicate=False))
    aliases = {region.path: region.aliases for region in found.regions}
    visited = visits(step.costs, solution.assignment)
    added = added_time(visited)
    forward_ms: Mapping[str, float] = profiles[0].forward_ms if profiles else {}
    plans: dict[str, RegionPlan] = {}
    for visit, reason in zip(visited, why(step.costs, solution), strict=True):
        kept = visit.choice.choice.treatment == "keep"
        first = visit.region.modules[0]
        for path in visit.region.modules:
            if path not in modules or path not in step.observations or path in plans:
                continue
            seen = step.observations[path]
            # What modules that are treated together hold and take is told of the first.
            told = kept or path == first
            saved = _kept_bytes(visit.region, path if kept else "")
            plans[path] = RegionPlan(
                path=path,
                class_name=type(modules[path]).__qualname__,
                reason=reason.text if told else f"together with {first}",
                **entries_of(None if kept else config_of_choice(path, visit.choice.choice, step)),
                aliases=aliases.get(path, ()),
                calls=seen.calls,
                input_bytes=seen.input_bytes,
                stored_bytes=saved if kept else sum(visit.choice.holds.values()) if told else 0,
                saved_bytes=saved if told else None,
                forward_ms=forward_ms.get(path),
                forward_flops=seen.flops,
                forward_bytes=seen.moved_bytes,
                added_time=added[visit.region.path] if told else 0.0,
            )
    return tuple(plans.values())
