"""
Plans by budget
===============

Observe, solve, and measure what was solved, until the fastest plan within the budget is found.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import nn

from lightning_memopt.checkpointing import RegionConfig, learn_parameters
from lightning_memopt.measuring import OptimizerBytes, measuring_repeatedly, optimizer_bytes
from lightning_memopt.planning.agree import Ranks
from lightning_memopt.planning.apply import (
    entries_of,
    treated_as,
)
from lightning_memopt.planning.common_costs import step_of_all, without_chunks
from lightning_memopt.planning.costs import Choice
from lightning_memopt.planning.model_state import ModelState, unchanged
from lightning_memopt.planning.observe import tensors_in
from lightning_memopt.planning.plan import Plan, RegionPlan, versions
from lightning_memopt.planning.region_costs import CHOICES, ObservedStep, observe_step, treatment_arguments
from lightning_memopt.planning.regions import (
    FoundRegions,
    find_targets,
)
from lightning_memopt.planning.request import CanChunk, Request, budget_of, device_of, may_chunk
from lightning_memopt.planning.simulate import visits
from lightning_memopt.planning.solve import why
from lightning_memopt.planning.trial import run_step
from lightning_memopt.planning.within_budget import MOST_STEPS, WithinBudget, plan_within


def plan_by_budget(model: nn.Module, request: Request, ranks: Ranks, started: float) -> Plan:
    """The fastest plan within the budget that was asked for.

    Args:
        model: plain; it is as before when this returns.
        request: checked, with a budget of bytes.
        ranks: those that build this plan.
        started: when, in seconds of ``time.perf_counter``.

    Raises:
        MemoryBudgetError: no plan is within the budget.
    """
    with measuring_repeatedly(device_of(model)), unchanged(model) as state:
        return _plan(model, request, state, ranks, started)


def _plan(model: nn.Module, request: Request, state: ModelState, ranks: Ranks, started: float) -> Plan:
    device = device_of(model)
    example_forward = request.example_forward
    assert example_forward is not None
    found = ranks.attempt("finding the regions", lambda: find_targets(model, request.targets))
    ranks.same("finding the regions", [region.path for region in found.regions])
    choices = tuple(
        choice for choice in CHOICES if request.compress or (choice.treatment != "pack" and choice.compressor is None)
    )

    def observe_here() -> tuple[int, OptimizerBytes, ObservedStep]:
        request.report("observing", 0, 1)
        held = [optimizer_bytes(optimizer) for optimizer in request.optimizers]
        optimizers = OptimizerBytes(sum(x.state for x in held), max((x.step for x in held), default=0))
        seen = observe_step(
            model,
            found.regions,
            example_forward,
            state,
            choices=choices,
            device=device,
            optimizer_peak_bytes=optimizers.step,
        )
        if request.can_chunk is not None:
            seen = without_chunks(seen, _not_chunkable(model, seen, request.can_chunk))
        learn_parameters(model, state.written)
        state.rewind()
        request.report("observing", 1, 1)
        return budget_of(model, request), optimizers, seen

    reports = ranks.together("observing the model", observe_here)
    step = step_of_all([seen for _, _, seen in reports])
    # What the optimizers hold is there in every step but the first.
    held = max(optimizers.state for _, optimizers, _ in reports)
    already = sum(tensor.nbytes for optimizer in request.optimizers for tensor in tensors_in(dict(optimizer.state)))
    reserved = ranks.together("counting what is reserved", lambda: max(0, held - already) + request.reserved_bytes)
    budget, reserved_bytes = min(budget for budget, _, _ in reports), max(reserved)
    passes = 0

    def measure(chosen: Mapping[str, Choice]) -> int | None:
        nonlocal passes
        passes += 1
        request.report("measuring", passes - 1, MOST_STEPS)
        layout = {path: _config(path, choice, step) for path, choice in chosen.items()}
        with treated_as(model, layout):
            profiles = ranks.together("measuring a plan", lambda: run_step(model, {}, example_forward, state, device))
        request.report("measuring", passes, MOST_STEPS)
        peaks = [profile.peak_bytes for profile in profiles if profile.peak_bytes is not None]
        return max(peaks) if len(peaks) == len(profiles) else None

    within = plan_within(step.costs, budget, measure, reserved_bytes=reserved_bytes)
    return Plan(
        regions=_regions_within(model, found, step, within),
        level=request.level,
        checkpoint_budget=request.checkpoint_budget,
        compress=request.compress,
        target_reason=found.reason,
        device=device.type,
        forward_flops=step.flops,
        memory_budget=budget,
        reserved_bytes=reserved_bytes,
        predicted_peak_bytes=within.best.predicted_bytes,
        peak_bytes_after=within.best.peak_bytes,
        extra_flops=within.best.solution.simulated.extra_flops,
        search_passes=len(within.steps),
        probe_passes=step.passes,
        search_seconds=time.perf_counter() - started,
        world_size=ranks.size,
        versions=versions(),
    )


def _config(path: str, choice: Choice, step: ObservedStep) -> RegionConfig:
    return RegionConfig(**treatment_arguments(path, choice, step.observations[path]))


def _not_chunkable(model: nn.Module, step: ObservedStep, can_chunk: CanChunk) -> frozenset[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    return frozenset(path for path in step.observations if not may_chunk(can_chunk, path, modules[path]))


def _regions_within(
    model: nn.Module, found: FoundRegions, step: ObservedStep, within: WithinBudget
) -> tuple[RegionPlan, ...]:
    """The regions of the plan in model order, each with why it does not get the next faster treatment."""
    solution = within.best.solution
    modules = dict(model.named_modules(remove_duplicate=False))
    aliases = {region.path: region.aliases for region in found.regions}
    plans: dict[str, RegionPlan] = {}
    for visit, reason in zip(visits(step.costs, solution.assignment), why(step.costs, solution), strict=True):
        path, cost = visit.region.path, visit.choice
        if path not in modules or path not in step.observations or path in plans:
            continue
        seen = step.observations[path]
        config = None if cost.choice.treatment == "keep" else _config(path, cost.choice, step)
        plans[path] = RegionPlan(
            path=path,
            class_name=type(modules[path]).__qualname__,
            reason=reason.text,
            **entries_of(config),
            aliases=aliases.get(path, ()),
            calls=seen.calls,
            input_bytes=seen.input_bytes,
            stored_bytes=sum(cost.holds.values()),
            saved_bytes=sum(visit.region.choices[0].holds.values()),
            forward_flops=seen.flops,
            forward_bytes=seen.moved_bytes,
        )
    return tuple(plans.values())
