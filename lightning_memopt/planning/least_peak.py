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

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lightning_memopt.observing.costs import Choice, StepCosts
from lightning_memopt.planning.simulate import Assignment, Correction, Simulated, correct, simulate
from lightning_memopt.planning.solve import pick, trade_off
from lightning_memopt.planning.within_budget import MOST_STEPS, Measure, choices_of

# A treatment costs time in every step of the training: of what is not alive throughout it has to free this share.
_LEAST_GAIN = 0.005
# Peaks are the same up to this share of it: of small tensors the model of memory does not know.
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

    def better_than(self, other: TriedPlan, least_bytes: int | None) -> bool:
        """A clearly lower peak, or the same for less time; where neither fits, the lower prediction.

        Peaks are compared with the least that was measured, or each plan could be a little above the last.
        """
        if self.peak_bytes is None:
            return other.peak_bytes is None and self.simulated.peak_bytes < other.simulated.peak_bytes
        if other.peak_bytes is None or self.peak_bytes < other.clearly_below:
            return True
        assert least_bytes is not None
        same = self.peak_bytes <= max(other.peak_bytes, _hardly_above(least_bytes, self.base_bytes))
        return same and self.simulated.extra < other.simulated.extra


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
        simulated = simulate(costs, assignment, correction)
        return TriedPlan(assignment, simulated, chosen, measure(chosen), costs.base_bytes)

    correction = Correction()
    best = last = attempt(start)
    tried = [best]
    while len(tried) <= MOST_STEPS:
        if last.peak_bytes is not None:
            correction = correct(correction, last.simulated, last.peak_bytes)
        elif len(tried) > 1:
            break  # nobody knows how much was missing
        assignment = _next(costs, best, tried, correction)
        if assignment is None:
            break
        last = attempt(assignment)
        tried.append(last)
        if last.better_than(best, _least(tried)):
            best = last
    return LeastPeak(best, tuple(tried))


def _next(costs: StepCosts, best: TriedPlan, tried: Collection[TriedPlan], correction: Correction) -> Assignment | None:
    """The plan to measure next, None if none should be better."""
    plans, known = trade_off(costs, correction), [plan.chosen for plan in tried]
    lowest = pick(plans, 0)
    if choices_of(costs, lowest.assignment) not in known and (
        best.peak_bytes is None or lowest.simulated.peak_bytes < best.clearly_below
    ):
        return lowest.assignment
    if best.peak_bytes is None:
        return None
    least_bytes = _least(tried)
    assert least_bytes is not None
    cheapest = pick(plans, _hardly_above(least_bytes, costs.base_bytes))
    cheaper = cheapest.fits and cheapest.simulated.extra < best.simulated.extra
    return cheapest.assignment if cheaper and choices_of(costs, cheapest.assignment) not in known else None


def _least(tried: Collection[TriedPlan]) -> int | None:
    """The least peak that was measured; None if memory ran out under every plan."""
    return min((plan.peak_bytes for plan in tried if plan.peak_bytes is not None), default=None)


def _hardly_above(peak_bytes: int, base_bytes: int) -> int:
    """The highest peak that counts as the same."""
    return peak_bytes + int(_SAME * max(0, peak_bytes - base_bytes))
