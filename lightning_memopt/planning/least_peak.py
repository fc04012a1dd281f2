"""
The plan with the least peak, made sure of
==========================================

Levels above the first have no budget: they start from a plan and look for the one with the least peak, and among those
with the same for the one that adds the least time. As for a budget, the solver names it, a real step measures it, and
what the step took more or less than predicted corrects the model of memory before the solver is asked again. Where no
plan should have a clearly lower peak than the best one that was measured, the cheapest that should have no higher one
is measured. Three measured steps at most; of all that were measured the best is taken, the start included.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_memopt.observing.costs import Choice, ChoiceCost, RegionCosts, StepCosts
from lightning_memopt.planning.simulate import (
    Assignment,
    Correction,
    Simulated,
    Visit,
    alive_bytes,
    correct,
    simulate,
    storage_bytes,
    visits,
)
from lightning_memopt.planning.solve import solve
from lightning_memopt.planning.within_budget import MOST_STEPS, Measure, choices_of

# A treatment costs time in every step of the training: of what is not alive throughout it has to free this share.
_LEAST_GAIN = 0.005
# Peaks are the same up to this share: of small tensors the model of memory does not know.
_SAME = 0.0005


@dataclass(frozen=True)
class TriedPlan:
    """A plan that was measured in a real step."""

    assignment: Assignment
    simulated: Simulated
    chosen: Mapping[str, Choice]
    """The treatment of every region that is not kept, by path."""
    peak_bytes: int | None
    """Largest peak of all ranks; None if memory ran out."""
    base_bytes: int
    """Alive throughout."""

    @property
    def clearly_below(self) -> float:
        """A peak from which on another plan is clearly lower."""
        assert self.peak_bytes is not None
        return self.peak_bytes - _LEAST_GAIN * max(0, self.peak_bytes - self.base_bytes)

    def better_than(self, other: TriedPlan) -> bool:
        """A clearly lower peak, or the same for less time; where neither fits, the lower prediction."""
        if self.peak_bytes is None:
            return other.peak_bytes is None and self.simulated.peak_bytes < other.simulated.peak_bytes
        if other.peak_bytes is None or self.peak_bytes < other.clearly_below:
            return True
        return self.peak_bytes <= (1 + _SAME) * other.peak_bytes and self.simulated.extra < other.simulated.extra


@dataclass(frozen=True)
class LeastPeak:
    """The plan that was found, and all that were measured, the start first."""

    best: TriedPlan
    tried: tuple[TriedPlan, ...]


def least_peak(costs: StepCosts, start: Assignment, measure: Measure) -> LeastPeak:
    """The plan with the least measured peak.

    Args:
        costs: one observed step, with the choices that may be taken.
        start: the plan to begin with. It stays unless another one is better.
        measure: measures a plan in a real step.
    """

    def attempt(assignment: Assignment) -> TriedPlan:
        chosen = choices_of(costs, assignment)
        simulated = _simulated(costs, assignment, correction)
        return TriedPlan(assignment, simulated, chosen, measure(chosen), costs.base_bytes)

    correction = Correction()
    best = last = attempt(start)
    tried = [best]
    while len(tried) <= MOST_STEPS:
        if last.peak_bytes is not None:
            correction = correct(correction, last.simulated, last.peak_bytes)
        elif len(tried) > 1:
            break  # nobody knows how much was missing
        assignment = _next(costs, best, [plan.chosen for plan in tried], correction)
        if assignment is None:
            break
        last = attempt(assignment)
        tried.append(last)
        if last.better_than(best):
            best = last
    return LeastPeak(best, tuple(tried))


def _next(
    costs: StepCosts, best: TriedPlan, tried: Collection[Mapping[str, Choice]], correction: Correction
) -> Assignment | None:
    """The plan to measure next, None if none should be better."""
    lowest, simulated = _solve(costs, 0, correction)
    if choices_of(costs, lowest) not in tried and (
        best.peak_bytes is None or simulated.peak_bytes < best.clearly_below
    ):
        return lowest
    if best.peak_bytes is None:
        return None
    cheapest, simulated = _solve(costs, best.peak_bytes, correction)
    cheaper = simulated.peak_bytes <= best.peak_bytes and simulated.extra < best.simulated.extra
    return cheapest if cheaper and choices_of(costs, cheapest) not in tried else None


def _solve(costs: StepCosts, budget_bytes: int, correction: Correction) -> tuple[Assignment, Simulated]:
    """The cheapest plan within a budget, or the one with the least peak.

    What a choice leaves behind is alive wherever an earlier region runs backward; the solver does not see it. So the
    plan without such choices is looked at, too, and the better one is refined.
    """
    variants = [costs, _leaving_least(costs)]
    found = []
    for variant in variants if variants[1] is not costs else [costs]:
        assignment = solve(variant, budget_bytes, correction).assignment
        found.append((assignment, _simulated(costs, assignment, correction)))
    assignment, simulated = min(found, key=lambda plan: (max(plan[1].peak_bytes, budget_bytes), plan[1].extra))
    if len(found) > 1:
        assignment = _refined(costs, assignment, budget_bytes, correction)
        simulated = _simulated(costs, assignment, correction)
    return assignment, simulated


def _simulated(costs: StepCosts, assignment: Assignment, correction: Correction) -> Simulated:
    """A plan simulated with what its choices leave behind."""
    return simulate(replace(costs, regions=_with_left(costs.regions, assignment)), assignment, correction)


def _with_left(regions: tuple[RegionCosts, ...], assignment: Assignment) -> tuple[RegionCosts, ...]:
    """The regions with what the choices of a plan leave behind counted among their gradients."""
    made = []
    for region, chosen in zip(regions, assignment.regions, strict=True):
        if isinstance(chosen, int):
            left = region.choices[chosen].left_bytes
            made.append(replace(region, gradient_bytes=region.gradient_bytes + left))
        else:
            children = _with_left(region.children, chosen)
            before = sum(child.gradient_bytes for child in region.children)
            left = sum(child.gradient_bytes for child in children) - before
            made.append(replace(region, children=children, gradient_bytes=region.gradient_bytes + left))
    return tuple(made)


def _leaving_least(costs: StepCosts) -> StepCosts:
    """The costs without the choices that leave more behind than others of the same region; unchanged if none does."""
    left: dict[str, dict[Choice, int]] = {}

    def count(regions: tuple[RegionCosts, ...]) -> None:
        for region in regions:
            here = left.setdefault(region.path, {})
            for cost in region.choices:
                if not cost.refused:
                    here[cost.choice] = here.get(cost.choice, 0) + cost.left_bytes
            count(region.children)

    def without(regions: tuple[RegionCosts, ...]) -> tuple[RegionCosts, ...]:
        return tuple(
            replace(
                region,
                choices=tuple(
                    replace(cost, refused="leaves more behind")
                    if left[region.path].get(cost.choice, 0) > min(left[region.path].values(), default=0)
                    else cost
                    for cost in region.choices
                ),
                children=without(region.children),
            )
            for region in regions
        )

    count(costs.regions)
    alike = all(len(set(of_region.values())) <= 1 for of_region in left.values())
    return costs if alike else replace(costs, regions=without(costs.regions))


def _refined(costs: StepCosts, assignment: Assignment, budget_bytes: int, correction: Correction) -> Assignment:
    """The plan with other choices for what leaves much behind, and without the treatments that the peak does not need.

    One region after the other: those that leave most first, then those that cost most.
    """
    sizes = storage_bytes(costs)
    now = list(visits(costs, assignment))
    peak = _peak(costs, now, sizes, correction)
    for path in _paths(now, key=lambda visit: visit.choice.left_bytes):
        for other in _changed(now, path, lambda old, new: new.left_bytes < old.left_bytes):
            lower = _peak(costs, other, sizes, correction)
            if lower < peak and peak > budget_bytes:
                now, peak = other, lower
                break
    for path in _paths(now, key=lambda visit: visit.choice.extra):
        for other in _changed(now, path, lambda old, new: new.choice.treatment == "keep" and new.extra < old.extra):
            if _peak(costs, other, sizes, correction) <= max(peak, budget_bytes):
                now = other
    return _chosen(assignment, {visit.index: visit.chosen for visit in now})


def _paths(visited: Sequence[Visit], key: Callable[[Visit], float]) -> list[str]:
    """The regions for which ``key`` is not 0, the largest first."""
    return list(dict.fromkeys(visit.region.path for visit in sorted(visited, key=key, reverse=True) if key(visit)))


def _changed(
    visited: Sequence[Visit], path: str, wanted: Callable[[ChoiceCost, ChoiceCost], bool]
) -> Iterator[list[Visit]]:
    """All calls of a region with each other choice that is ``wanted`` in place of the present one."""
    calls = [visit for visit in visited if visit.region.path == path]
    for cost in calls[0].region.choices:
        changed = {
            visit.index: replace(visit, choice=new, chosen=number)
            for visit in calls
            for number, new in enumerate(visit.region.choices)
            if new.choice == cost.choice and not new.refused and wanted(visit.choice, new)
        }
        if len(changed) == len(calls):
            yield [changed.get(visit.index, visit) for visit in visited]


def _peak(costs: StepCosts, visited: Sequence[Visit], sizes: Mapping[int, int], correction: Correction) -> int:
    left = 0
    with_left: list[Visit] = []
    for visit in reversed(visited):
        with_left.append(replace(visit, gradients_after=visit.gradients_after + left))
        left += visit.choice.left_bytes
    return max(alive_bytes(costs, with_left[::-1], sizes, correction))


def _chosen(assignment: Assignment, chosen: Mapping[tuple[int, ...], int], index: tuple[int, ...] = ()) -> Assignment:
    return Assignment(
        tuple(
            chosen[(*index, number)] if isinstance(old, int) else _chosen(old, chosen, (*index, number))
            for number, old in enumerate(assignment.regions)
        )
    )
