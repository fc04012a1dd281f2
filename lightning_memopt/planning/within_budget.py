"""
The plan for a budget, made sure of
===================================

The simulated peak of a plan is close to the real one, not equal to it. So the plan that the solver finds is measured in
a real step before anybody trains with it. What the step took more or less than predicted is added to the model of
memory, and the solver is asked again: a plan above the budget is replaced by one that should be below, and a plan well
below it by a faster one. Three measured steps at most; where the first two were above the budget, the third is aimed
well below it, and is the plan with the least peak where that is near. The fastest plan that was measured within the
budget is taken, and where there is none the budget is refused with the smallest peak that was measured and what holds
it: a budget of so many bytes can be kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lightning_memopt.measuring.amounts import format_bytes
from lightning_memopt.observing.costs import Choice, StepCosts
from lightning_memopt.planning.simulate import Assignment, Correction, Simulated, correct, simulate, visits
from lightning_memopt.planning.solve import Solution, solve

# Steps that may be measured for one budget.
MOST_STEPS = 3
# A plan this close below the budget is not improved upon.
_CLOSE = 0.02
# A plan predicted so little above the budget may well be within: it is the first to be measured.
_UNSURE = 1e-4
# Where memory ran out, nobody knows how much was missing: so much more than the budget is assumed.
_OUT_OF_MEMORY = 1.1
# The last plan that is measured has to fit: it is aimed below the budget by so many times what the others were above
# it, and by this share of the budget at least.
_EXCESSES, _LEAST_MARGIN = 4, 0.05
# A tenth of a MiB: sizes in messages have one decimal.
_TENTH = 2**20 / 10
# Holders that a refusal names.
_NAMED = 4

Measure = Callable[[Mapping[str, Choice]], int | None]
"""Runs one real step with regions treated as given, by path, on all ranks. Returns the largest peak of all ranks in
bytes, None if one of them ran out of memory."""


class MemoryBudgetError(ValueError):
    """No plan keeps a training step within the memory budget.

    Attributes:
        least_bytes: the smallest budget that a plan can keep, as measured; predicted where every measured step ran out
            of memory, or none was run.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan that was measured in a real step."""

    solution: Solution
    peak_bytes: int | None
    """Largest peak of all ranks; None if memory ran out."""

    @property
    def predicted_bytes(self) -> int:
        """The peak that was predicted before the step."""
        return self.solution.simulated.peak_bytes

    def within(self, budget_bytes: int) -> bool:
        """Whether the measured peak is within the budget."""
        return self.peak_bytes is not None and self.peak_bytes <= budget_bytes

    def correction(self, budget_bytes: int) -> Correction:
        """What the model of memory has to be corrected by, after what the step showed."""
        peak = self.peak_bytes
        if peak is None:
            peak = max(int(_OUT_OF_MEMORY * budget_bytes), self.predicted_bytes)
        return correct(self.solution.correction, self.solution.simulated, peak)


@dataclass(frozen=True)
class WithinBudget:
    """The plan that was found, and the steps that were measured on the way."""

    best: MeasuredPlan
    steps: tuple[MeasuredPlan, ...] = field(repr=False)


def plan_within(costs: StepCosts, budget_bytes: int, measure: Measure, *, reserved_bytes: int = 0) -> WithinBudget:
    """The fastest plan whose measured peak is within ``budget_bytes``.

    Args:
        costs: one observed step.
        budget_bytes: what is alive during a step may reach, but not exceed, so many bytes.
        reserved_bytes: what of them is not for the step: the state that optimizers will hold, and the like.
        measure: measures a plan in a real step.

    Raises:
        MemoryBudgetError: no plan is within the budget; names the smallest peak and what holds it.
    """
    allowed = budget_bytes - reserved_bytes
    correction = Correction()
    steps: list[MeasuredPlan] = []
    best: MeasuredPlan | None = None
    for number in range(MOST_STEPS):
        unsure = 0 if steps else int(_UNSURE * allowed)
        if best is None and number == MOST_STEPS - 1:  # the last one has to fit
            unsure = -_margin(steps, allowed)
        solution = solve(costs, allowed + unsure, correction)
        if any(solution.assignment == step.solution.assignment for step in steps):
            break
        if best is not None and not (solution.fits and solution.simulated.extra < best.solution.simulated.extra):
            break
        step = MeasuredPlan(solution, measure(choices_of(costs, solution.assignment)))
        steps.append(step)
        if step.within(allowed):
            best = step
            if step.peak_bytes is not None and step.peak_bytes >= (1 - _CLOSE) * allowed:
                break
        correction = step.correction(allowed)
    if best is None:
        raise refusal(costs, budget_bytes, reserved_bytes, steps, correction)
    return WithinBudget(best, tuple(steps))


def _margin(steps: list[MeasuredPlan], allowed: int) -> int:
    """How far below the budget the last plan is aimed, after steps that were above it."""
    peaks = [step.peak_bytes for step in steps]
    if None in peaks:
        return allowed
    largest = max(peak for peak in peaks if peak is not None)
    return max(_EXCESSES * (largest - allowed), int(_LEAST_MARGIN * allowed))


def choices_of(costs: StepCosts, assignment: Assignment) -> dict[str, Choice]:
    """The treatment of every module that is not kept, by path."""
    return {
        path: visit.choice.choice
        for visit in visits(costs, assignment)
        for path in visit.region.modules
        if visit.choice.choice.treatment != "keep"
    }


def refusal(
    costs: StepCosts,
    budget_bytes: int,
    reserved_bytes: int,
    steps: list[MeasuredPlan],
    correction: Correction,
    *,
    smallest_batch: bool = False,
) -> MemoryBudgetError:
    """Says that no plan is within a budget, the smallest peak there is, and what holds it.

    Args:
        costs: one observed step.
        budget_bytes: what was asked for.
        reserved_bytes: what of it is not for the step.
        steps: those that were measured.
        correction: of the model of memory, after these.
        smallest_batch: the batch has one sample, and none that is smaller can be advised.
    """
    measured = [(step.peak_bytes, step.solution.assignment) for step in steps if step.peak_bytes is not None]
    lowest = solve(costs, 0, correction)
    least, least_bytes = lowest.simulated, max(lowest.simulated.peak_bytes, budget_bytes - reserved_bytes + 1)
    found, of_which = "No plan keeps", "any plan of the observed regions has"
    if measured:
        least_bytes, assignment = min(measured, key=lambda plan: plan[0])
        least = simulate(costs, assignment, correction)
        if all(tried != lowest.assignment for _, tried in measured):  # the last one was to fit, and took more
            found, of_which = "No plan was found that keeps", f"one of {len(measured)} measured plans has"
    least_bytes += reserved_bytes
    how = "measured" if measured else "predicted"
    reserved = f"reserved for optimizer states and the like: {format_bytes(reserved_bytes)}; " if reserved_bytes else ""
    at_least = f"{math.ceil(least_bytes / _TENTH) / 10:.1f} MiB"
    no_smaller = smallest_batch or least.peak.kind == "optimizer"
    of_one = " of a batch of one sample" if smallest_batch else ""
    return MemoryBudgetError(
        f"{found} a training step{of_one} within {format_bytes(budget_bytes)}. The smallest peak that {of_which} is "
        f"{format_bytes(least_bytes)} ({least_bytes} bytes, {how}), in {least.peak}, where these are alive: {reserved}"
        f"{_said(least)}. Allow at least {at_least}{'' if no_smaller else ', or use a smaller batch'}.",
        least_bytes,
    )


def _said(simulated: Simulated) -> str:
    named = simulated.at_peak[:_NAMED]
    words = [f"{holder.name}: {format_bytes(holder.bytes)}" for holder in named]
    rest = sum(holder.bytes for holder in simulated.at_peak[_NAMED:])
    return "; ".join([*words, f"all else: {format_bytes(rest)}"] if rest > 0 else words)
