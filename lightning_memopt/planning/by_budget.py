"""
Plans by budget
===============

Observe, solve, and measure what was solved, until the fastest plan within the budget is found.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lightning_memopt.checkpointing import learn_parameters
from lightning_memopt.measuring import OptimizerBytes, measuring_repeatedly, optimizer_bytes
from lightning_memopt.measuring.storage_trace import fake_mode
from lightning_memopt.observing.costs import Choice, RegionCosts
from lightning_memopt.observing.model_state import ModelState, unchanged
from lightning_memopt.observing.observe import tensors_in
from lightning_memopt.observing.region_costs import CHOICES, ObservedStep, observe_step
from lightning_memopt.observing.regions import FoundRegions, find_targets, is_multistep_neuron, with_surroundings
from lightning_memopt.observing.trial import Profile, is_out_of_memory, largest_peak
from lightning_memopt.planning.agree import Ranks
from lightning_memopt.planning.common_costs import step_of_all
from lightning_memopt.planning.explain import config_of_choice, explained, planned_regions
from lightning_memopt.planning.plan import Plan, versions
from lightning_memopt.planning.request import ExampleForward, Request, budget_of, device_of, may_chunk
from lightning_memopt.planning.try_layout import try_layout
from lightning_memopt.planning.within_budget import MOST_STEPS, MeasuredPlan, plan_within

_Report = tuple[int, OptimizerBytes, ObservedStep]
"""What one rank saw: its budget, what its optimizers will hold, its step."""


@dataclass(frozen=True)
class Seen:
    """One observed step and what it may take, the same on all ranks."""

    step: ObservedStep
    budget_bytes: int
    """The smallest budget of all ranks."""
    reserved_bytes: int
    """What of it is not for the step: the state that optimizers will hold, and the like."""

    @property
    def allowed_bytes(self) -> int:
        """What the step itself may take."""
        return self.budget_bytes - self.reserved_bytes


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
    example_forward = request.example_forward
    assert example_forward is not None
    with measuring_repeatedly(device_of(model)), unchanged(model) as state:
        steps = ModelSteps(model, request, state, ranks)
        seen = steps.observe(example_forward)
        profiles: list[list[Profile]] = []

        def measure(chosen: Mapping[str, Choice]) -> int | None:
            profiles.append(steps.measure(example_forward, seen.step, chosen))
            return largest_peak(profiles[-1])

        within = plan_within(seen.step.costs, seen.budget_bytes, measure, reserved_bytes=seen.reserved_bytes)
        return steps.plan(seen, within.best, profiles[within.steps.index(within.best)], started)


class ModelSteps:
    """Steps of one model on all ranks, observed and measured.

    Args:
        model: plain.
        request: checked, with a budget of bytes.
        state: of ``model``.
        ranks: those that build this plan.
    """

    def __init__(self, model: nn.Module, request: Request, state: ModelState, ranks: Ranks) -> None:
        self._model = model
        self._request = request
        self._state = state
        self._ranks = ranks
        self._device = device_of(model)
        self._observed = 0
        self._measured = 0
        self._found: FoundRegions = ranks.attempt("finding the regions", lambda: _regions(model, request))
        ranks.same("finding the regions", [region.path for region in self._found.regions])

    def observe(self, example_forward: ExampleForward) -> Seen:
        """What a step costs under every plan."""
        reports = self._ranks.together("observing the model", lambda: self._observe_here(example_forward))
        return self._of_all(reports)

    def observe_if_possible(self, example_forward: ExampleForward) -> Seen | None:
        """The same; None if memory ran out on one of the ranks."""

        def observe() -> _Report | None:
            try:
                return self._observe_here(example_forward)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                error.__traceback__ = None  # it holds the tensors that filled the memory
            self._state.rewind()
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            return None

        reports = self._ranks.together("observing the model", observe)
        seen = [report for report in reports if report is not None]
        return self._of_all(seen) if len(seen) == len(reports) else None

    def _of_all(self, reports: list[_Report]) -> Seen:
        request, ranks = self._request, self._ranks
        step = step_of_all([step for _, _, step in reports])
        self._observed += step.passes
        # What the optimizers hold is there in every step but the first.
        held = max(optimizers.state for _, optimizers, _ in reports)
        already = sum(tensor.nbytes for optimizer in request.optimizers for tensor in tensors_in(dict(optimizer.state)))
        reserved = ranks.together("counting what is reserved", lambda: max(0, held - already) + request.reserved_bytes)
        return Seen(step, min(budget for budget, _, _ in reports), max(reserved))

    def _observe_here(self, example_forward: ExampleForward) -> _Report:
        model, request, state = self._model, self._request, self._state
        request.report("observing", 0, 1)
        held = [optimizer_bytes(optimizer) for optimizer in request.optimizers]
        optimizers = OptimizerBytes(sum(x.state for x in held), max((x.step for x in held), default=0))
        step = observe_step(
            model,
            self._found.regions,
            example_forward,
            state,
            choices=_choices(compress=request.compress),
            device=self._device,
            optimizer_peak_bytes=optimizers.step,
            may_chunk=self._may_chunk(),
            gradients_in_forward=request.gradients_in_forward,
        )
        learn_parameters(model, state.written)
        state.rewind()
        request.report("observing", 1, 1)
        return budget_of(model, request), optimizers, step

    def _may_chunk(self) -> Callable[[str, nn.Module], bool] | None:
        """What may be cut along time: what the user says; else what is proved by running it, where that can be done."""
        can_chunk = self._request.can_chunk
        if can_chunk is not None:
            return lambda path, module: may_chunk(can_chunk, path, module)
        return None if fake_mode() is None else lambda _, module: is_multistep_neuron(module)

    def measure(
        self, example_forward: ExampleForward, step: ObservedStep, chosen: Mapping[str, Choice]
    ) -> list[Profile]:
        """Run one real step with regions treated as given; what it showed on each rank."""
        layout = {path: config_of_choice(path, choice, step) for path, choice in chosen.items()}
        modules = dict(self._model.named_modules(remove_duplicate=False))
        watched = {path: modules[path] for path in _watched(step.costs.regions, chosen) if path in modules}
        profiles = try_layout(
            self._model,
            layout,
            watched,
            example_forward,
            self._request,
            self._state,
            self._ranks,
            what="measuring a plan",
            done=self._measured,
            most=MOST_STEPS,
        )
        self._measured += 1
        return profiles

    def plan(
        self,
        seen: Seen,
        best: MeasuredPlan,
        profiles: list[Profile],
        started: float,
        *,
        batch_size: int | None = None,
    ) -> Plan:
        """The plan that was measured, with all that was seen to find it."""
        request = self._request
        return Plan(
            regions=planned_regions(self._model, self._found, seen.step, best.solution, profiles),
            level=request.level,
            checkpoint_budget=request.checkpoint_budget,
            compress=request.compress,
            target_reason=self._found.reason,
            device=self._device.type,
            memory_budget=seen.budget_bytes,
            reserved_bytes=seen.reserved_bytes,
            peak_bytes_after=best.peak_bytes,
            search_passes=self._measured,
            probe_passes=self._observed,
            search_seconds=time.perf_counter() - started,
            world_size=self._ranks.size,
            batch_size=batch_size,
            versions=versions(),
            **explained(seen.step, best.solution, profiles),
        )


def _regions(model: nn.Module, request: Request) -> FoundRegions:
    """What was named, or all of the model: its repeated blocks, and what lies beside them."""
    found = find_targets(model, request.targets)
    return found if request.targets is not None else with_surroundings(model, found)


def _choices(*, compress: bool) -> tuple[Choice, ...]:
    return tuple(choice for choice in CHOICES if compress or (choice.treatment != "pack" and choice.compressor is None))


def _watched(regions: tuple[RegionCosts, ...], chosen: Mapping[str, Choice]) -> Iterator[str]:
    """The regions whose peaks a measured step notes: those inside another only if one of them is treated."""
    for region in regions:
        if region.series:
            yield from region.series if not region.children else _watched(region.children, chosen)
        elif region.path not in chosen and any(other.startswith(f"{region.path}.") for other in chosen):
            yield from _watched(region.children, chosen)
        else:
            yield region.path
