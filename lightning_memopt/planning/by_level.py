"""
Plans by level
==============

Which regions are checkpointed follows from their inputs and a share of them. Levels above the first ask what the parts
of these regions, time chunks, and fewer checkpoints would do to the peak. All of that follows from one observed step;
what it says is measured.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_memopt.checkpointing import RegionConfig, learn_parameters
from lightning_memopt.measuring import measuring_repeatedly
from lightning_memopt.observing.costs import KEEP, Choice, ChoiceCost, RegionCosts, StepCosts
from lightning_memopt.observing.model_state import ModelState, unchanged
from lightning_memopt.observing.observe import Observed, RegionObservation, observe
from lightning_memopt.observing.region_costs import ObservedStep, observe_step
from lightning_memopt.observing.regions import (
    FoundRegions,
    Region,
    as_region,
    find_targets,
    names_of_modules,
)
from lightning_memopt.observing.trial import Profile, largest_peak
from lightning_memopt.planning.agree import Ranks
from lightning_memopt.planning.apply import entries_of
from lightning_memopt.planning.candidates import (
    Candidate,
    choose_largest_inputs,
    combine,
    find_candidates,
)
from lightning_memopt.planning.common_costs import step_of_all
from lightning_memopt.planning.explain import config_of_choice
from lightning_memopt.planning.least_peak import TriedPlan, least_peak
from lightning_memopt.planning.plan import Outcome, Plan, RegionPlan, Trial, versions
from lightning_memopt.planning.request import Request, SplitFn, device_of, may_chunk
from lightning_memopt.planning.simulate import Assignment, added_time, simulate, visits
from lightning_memopt.planning.try_layout import try_layout
from lightning_memopt.planning.within_budget import MOST_STEPS, choices_of

# Pieces along time that are tried: more would lower the peak by less than the recomputed region's 64th.
_CHUNKS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class _Seen:
    """The regions, their parts, and what all ranks together saw of both."""

    found: FoundRegions
    regions: tuple[Region, ...]
    """Regions and parts, in model order."""
    parts: dict[str, tuple[str, ...]]
    """What each region that splits is split into, by path."""
    chunkable: frozenset[str]
    observations: tuple[RegionObservation, ...] = ()
    flops: int = 0
    passes: int = 0
    step: ObservedStep | None = None
    """What every treatment costs; None at level 1."""

    def inside(self, path: str) -> frozenset[str]:
        """The parts of a region, their parts, and so on."""
        parts = self.parts.get(path, ())
        return frozenset(parts).union(*map(self.inside, parts))


@dataclass(frozen=True)
class _Searched:
    """What the levels above the first found."""

    layout: Mapping[str, RegionConfig]
    """The checkpointed regions, by path."""
    step: ObservedStep
    best: TriedPlan
    plain: Sequence[Profile]
    """Of the plain step, one of each rank."""
    trials: tuple[Trial, ...]

    def entries(self) -> dict[str, Any]:
        """What a :class:`Plan` says of it."""
        costs = self.step.costs
        simulated = simulate(costs, self.best.assignment)
        return {
            "peak_bytes_before": largest_peak(self.plain),
            "peak_bytes_after": self.best.peak_bytes,
            "extra_flops": simulated.extra_flops,
            "time_unit": costs.unit,
            "plain_time": costs.plain,
            "added_time": simulated.extra,
            "trials": self.trials,
            "search_passes": len(self.trials),
        }


def plan_by_level(model: nn.Module, request: Request, ranks: Ranks, started: float) -> Plan:
    """The plan that the request's level and share ask for.

    Args:
        model: plain; it is as before when this returns.
        request: checked, without a budget of bytes and without a plan.
        ranks: those that build this plan.
        started: when, in seconds of ``time.perf_counter``.
    """
    measuring = measuring_repeatedly(device_of(model)) if request.level >= 2 else nullcontext()
    with measuring, unchanged(model) as state:
        seen = _observe(model, request, state, ranks)
        candidates = find_candidates(model, seen.regions, seen.observations, compress=request.compress)
        return _plan(model, request, seen, candidates, state, ranks, started)


def _plan(
    model: nn.Module,
    request: Request,
    seen: _Seen,
    candidates: dict[str, Candidate],
    state: ModelState,
    ranks: Ranks,
    started: float,
) -> Plan:
    """Choose by input size, then search as far as the level says."""
    targets = [candidates[region.path] for region in seen.found.regions]
    first = choose_largest_inputs(targets, request.checkpoint_budget)
    if not first and ranks.rank == 0:
        warnings.warn(_nothing_to_checkpoint(targets), stacklevel=4)
    searched = None if seen.step is None else _search(model, request, seen, seen.step, candidates, first, state, ranks)
    if searched is not None and searched.best.peak_bytes is None and ranks.rank == 0:
        warnings.warn(_does_not_fit(request.level), stacklevel=4)
    return Plan(
        regions=_region_plans(candidates, first, searched, seen, request),
        level=request.level,
        checkpoint_budget=request.checkpoint_budget,
        compress=request.compress,
        target_reason=seen.found.reason,
        device=device_of(model).type,
        forward_flops=seen.flops,
        probe_passes=seen.passes,
        search_seconds=time.perf_counter() - started,
        world_size=ranks.size,
        versions=versions(),
        **({} if searched is None else searched.entries()),
    )


def _observe(model: nn.Module, request: Request, state: ModelState, ranks: Ranks) -> _Seen:
    """Find the regions and run one forward pass to see what they are given, and above level 1 what they cost."""
    example_forward = request.example_forward
    assert example_forward is not None
    seen = ranks.attempt("finding the regions", lambda: _find(model, request))
    ranks.same("finding the regions", [region.path for region in seen.regions])

    def inputs() -> Observed:
        return observe(model, seen.regions, example_forward, state)

    def costs() -> ObservedStep:
        outermost = {region.path for region in seen.found.regions}
        return observe_step(
            model,
            seen.found.regions,
            example_forward,
            state,
            choices=_choices(request),
            device=device_of(model),
            parts=[region for region in seen.regions if region.path not in outermost],
            may_chunk=lambda path, _: path in seen.chunkable,
            gradients_in_forward=request.gradients_in_forward,
        )

    def work() -> Observed | ObservedStep:
        request.report("observing", 0, 1)
        result = inputs() if request.level == 1 else costs()
        # Else the first step of a region would copy its parameters to find this out, and be measured with them.
        learn_parameters(model, state.written)
        state.rewind()
        request.report("observing", 1, 1)
        return result

    reports = ranks.together("observing the model", work)
    steps = [report for report in reports if isinstance(report, ObservedStep)]
    step = step_of_all(steps) if steps else None
    observations = (
        combine([report.regions for report in reports if isinstance(report, Observed)])
        if step is None
        else tuple(step.observations[region.path] for region in seen.regions)
    )
    return replace(
        seen,
        observations=observations,
        flops=max(report.flops for report in reports),
        passes=max(report.passes for report in reports),
        step=step,
    )


def _choices(request: Request) -> tuple[Choice, ...]:
    compressors = (None, "bit") if request.compress else (None,)
    pieces = (1, *(_CHUNKS if request.level >= 3 else ()))
    return tuple(Choice("recompute", compressor, chunks) for chunks in pieces for compressor in compressors)


def _find(model: nn.Module, request: Request) -> _Seen:
    found = find_targets(model, request.targets)
    regions, parts = _with_parts(model, found.regions, request)
    return _Seen(found, regions, parts, _chunkable(regions, request))


def _with_parts(
    model: nn.Module, targets: Sequence[Region], request: Request
) -> tuple[tuple[Region, ...], dict[str, tuple[str, ...]]]:
    """Targets and, from level 2 on, all that ``split_fn`` makes of them, in model order; and the parts by path."""
    names = names_of_modules(model)
    regions = {region.path: region for region in targets}
    parts: dict[str, tuple[str, ...]] = {}
    pending = list(targets) if request.split_fn is not None and request.level >= 2 else []
    while pending:
        region = pending.pop(0)
        inner = _split(region, request.split_fn)
        if not inner:
            continue
        made = [as_region(module, names) for module in inner]
        parts[region.path] = tuple(part.path for part in made)
        for part in made:
            if part.path not in regions:
                regions[part.path] = part
                pending.append(part)
    order = {path: position for position, (path, *_) in enumerate(names.values())}
    return tuple(sorted(regions.values(), key=lambda region: order[region.path])), parts


def _split(region: Region, split_fn: SplitFn | None) -> tuple[nn.Module, ...]:
    assert split_fn is not None
    parts = split_fn(region.module)
    what = f"split_fn({region.path}: {type(region.module).__name__})"
    if not isinstance(parts, (tuple, list)) or not all(isinstance(part, nn.Module) for part in parts):
        raise TypeError(f"{what} must return a sequence of modules inside the region, found {parts!r}.")
    if not parts:
        return ()
    if len(parts) < 2:
        raise ValueError(f"{what} returned one module; return at least two, or an empty tuple if it does not split.")
    inside = {id(module) for module in region.module.modules()} - {id(region.module)}
    for index, part in enumerate(parts):
        if id(part) not in inside:
            raise ValueError(
                f"{what} returned a {type(part).__name__} that is not a registered module inside the region."
            )
        # Parts may share a child (neurons of one kind share one surrogate), but none may hold another.
        own = {id(module) for module in part.modules()}
        if any(id(other) in own for position, other in enumerate(parts) if position != index):
            raise ValueError(f"{what} returned modules that overlap, among them a {type(part).__name__}.")
    return tuple(parts)


def _chunkable(regions: Sequence[Region], request: Request) -> frozenset[str]:
    if request.can_chunk is None or request.level < 3:
        return frozenset()
    can_chunk = request.can_chunk
    return frozenset(region.path for region in regions if may_chunk(can_chunk, region.path, region.module))


def _region_plans(
    candidates: dict[str, Candidate],
    first: Sequence[Candidate],
    searched: _Searched | None,
    seen: _Seen,
    request: Request,
) -> tuple[RegionPlan, ...]:
    """The targets, and the parts of those that were split."""
    chosen = {candidate.region.path for candidate in first}
    layout = _layout_of(first) if searched is None else searched.layout
    split = _split_regions(layout, seen)
    parts = {part for path in split for part in seen.parts[path]}
    listed = {region.path for region in seen.found.regions} | parts
    forward_ms: Mapping[str, float] = {} if searched is None else searched.plain[0].forward_ms
    saved = {} if searched is None else _saved_bytes(searched.step.costs.regions)
    added = {} if searched is None else added_time(visits(searched.step.costs, searched.best.assignment))
    uncut = {} if searched is None else _not_cut(searched.step.costs.regions, seen.chunkable)
    plans = []
    for path, candidate in candidates.items():
        if path not in listed:
            continue
        config = layout.get(path)
        if config is not None or candidate.config is None:
            reason = candidate.reason + (uncut.get(path, "") if config is not None else "")
        elif path in split:
            reason = f"split into {len(seen.parts[path])} parts"
        elif path in chosen or path in parts:
            reason = "removed: the peak does not need it"
        else:
            reason = f"beyond the budget {request.checkpoint_budget!r}"
        plans.append(
            RegionPlan(
                path=path,
                class_name=type(candidate.region.module).__qualname__,
                reason=reason,
                **entries_of(config),
                aliases=candidate.region.aliases,
                calls=candidate.seen.calls,
                input_bytes=candidate.seen.input_bytes,
                stored_bytes=candidate.stored_bytes,
                saved_bytes=saved.get(path),
                forward_ms=forward_ms.get(path),
                forward_flops=candidate.seen.flops,
                forward_bytes=candidate.seen.moved_bytes,
                added_time=added.get(path),
            )
        )
    return tuple(plans)


def _layout_of(chosen: Iterable[Candidate]) -> dict[str, RegionConfig]:
    return {candidate.region.path: candidate.config for candidate in chosen if candidate.config is not None}


def _split_regions(layout: Mapping[str, RegionConfig], seen: _Seen) -> list[str]:
    """The regions of which parts are checkpointed in their place."""
    return [path for path in seen.parts if path not in layout and not seen.inside(path).isdisjoint(layout)]


def _saved_bytes(regions: Sequence[RegionCosts]) -> dict[str, int]:
    """By path, what a region holds for its backward if it is not treated, all calls together."""
    saved: dict[str, int] = {}
    for region in regions:
        saved[region.path] = saved.get(region.path, 0) + sum(region.choices[0].holds.values())
        for path, size in _saved_bytes(region.children).items():
            saved[path] = saved.get(path, 0) + size
    return saved


def _not_cut(regions: Sequence[RegionCosts], chunkable: Collection[str]) -> dict[str, str]:
    """By path, why a region that might be cut along time is not."""
    reasons: dict[str, str] = {}
    for region in regions:
        reasons |= _not_cut(region.children, chunkable)
        pieces = [cost for cost in region.choices if cost.choice.chunks > 1]
        if region.path in chunkable and pieces and all(cost.refused for cost in pieces):
            reasons[region.path] = f"; not cut along time: {pieces[0].refused}"
    return reasons


# ---------------------------------------------------------------------------------------------------------------------
# Levels above the first


def _search(
    model: nn.Module,
    request: Request,
    seen: _Seen,
    step: ObservedStep,
    candidates: Mapping[str, Candidate],
    first: Sequence[Candidate],
    state: ModelState,
    ranks: Ranks,
) -> _Searched:
    """Measure the plain model and the first plan, and look for the least peak from there."""
    example_forward = request.example_forward
    assert example_forward is not None
    before = _layout_of(first)
    costs = _allowed(step.costs, before, candidates, request.level)
    start = _start(costs.regions, before)
    untried = [path for path in before if path not in choices_of(costs, start)]
    measured: list[list[Profile]] = []
    most = 2 + MOST_STEPS

    def layout_of(chosen: Mapping[str, Choice]) -> dict[str, RegionConfig]:
        layout = {path: config_of_choice(path, choice, step) for path, choice in chosen.items()}
        # What could not be run alone stays as it is, unless it is split.
        stays = {path: before[path] for path in untried if seen.inside(path).isdisjoint(chosen)}
        return {**layout, **stays}

    def run(what: str, layout: Mapping[str, RegionConfig], watched: Mapping[str, nn.Module]) -> int | None:
        done = len(measured)
        profiles = try_layout(
            model, layout, watched, example_forward, request, state, ranks, what=what, done=done, most=most
        )
        measured.append(profiles)
        return largest_peak(profiles)

    def measure(chosen: Mapping[str, Choice]) -> int | None:
        what = "measuring the first plan" if len(measured) == 1 else "measuring a plan"
        return run(what, layout_of(chosen), {})

    run("measuring the plain model", {}, {region.path: region.module for region in seen.regions})
    found = least_peak(costs, start, measure)
    request.report("measuring", most, most)
    layouts = [{}, *(layout_of(plan.chosen) for plan in found.tried)]
    best = found.tried.index(found.best)
    trials = [
        _trial(number, layout, profiles, before, seen, request.level, kept=number == best + 1)
        for number, (layout, profiles) in enumerate(zip(layouts, measured, strict=True))
    ]
    return _Searched(layouts[best + 1], step, found.best, measured[0], tuple(trials))


def _nothing_to_checkpoint(targets: Sequence[Candidate]) -> str:
    reasons = "; ".join(f"{candidate.region.path} {candidate.reason}" for candidate in targets[:4])
    if len(targets) > 4:
        reasons += f"; and {len(targets) - 4} more"
    return f"None of the {len(targets)} regions can be checkpointed, the model stays as it is: {reasons}."


def _does_not_fit(level: int) -> str:
    more = "" if level >= 3 else f", or search further than level {level} with split_fn and can_chunk"
    return (
        "One training step does not fit into memory, with the plan that was found either. The plan is applied as the "
        f"best one; use a smaller batch{more}."
    )


def _first_choice(config: RegionConfig) -> Choice:
    return Choice("recompute", None if config.compressor is None else "bit")


def _allowed(
    costs: StepCosts, before: Mapping[str, RegionConfig], candidates: Mapping[str, Candidate], level: int
) -> StepCosts:
    """The costs with the choices that a level may take.

    Only regions of the first plan are changed. Below level 4 they and their parts stay checkpointed, and a change costs
    something in place of time, so that none is made which does not lower the peak.
    """
    possible = _possible(costs.regions)

    def allowed(region: RegionCosts, outermost: bool) -> RegionCosts:
        config = before.get(region.path)
        if not outermost and region.path in candidates:
            config = candidates[region.path].config
        if outermost and config is None:
            kept = replace(region.choices[0], extra=0.0)
            return replace(region, choices=(kept,), children=(), glue=None)
        children = tuple(allowed(child, False) for child in region.children)
        if not any(child.children or len(child.choices) > 1 for child in children):
            children = ()
        choices = tuple(_at_level(cost, config, possible[region.path], level, outermost) for cost in region.choices)
        return replace(region, choices=choices, children=children, glue=region.glue if children else None)

    return replace(costs, regions=tuple(allowed(region, True) for region in costs.regions))


def _at_level(
    cost: ChoiceCost, config: RegionConfig | None, possible: frozenset[Choice], level: int, outermost: bool
) -> ChoiceCost:
    choice, refused = cost.choice, cost.refused
    if choice not in possible:
        refused = refused or "not possible in every call"
    if level == 4:
        return replace(cost, refused=refused)
    first = KEEP if config is None else _first_choice(config)
    if first in possible and (choice.treatment, choice.compressor) != (first.treatment, first.compressor):
        refused = refused or "the first plan is changed in this from level 4 on"
    changes = math.log2(choice.chunks) + (choice != KEEP and not outermost)
    return replace(cost, refused=refused, extra=float(changes))


def _possible(regions: Sequence[RegionCosts]) -> dict[str, frozenset[Choice]]:
    """By path, the choices that every call of a region has: they get the same one."""
    possible: dict[str, frozenset[Choice]] = {}
    for region in regions:
        here = frozenset(cost.choice for cost in region.choices if not cost.refused)
        for path, choices in [(region.path, here), *_possible(region.children).items()]:
            possible[path] = possible.get(path, choices) & choices
    return possible


def _start(regions: Sequence[RegionCosts], before: Mapping[str, RegionConfig]) -> Assignment:
    """The first plan; regions that could not be run alone are taken for kept."""

    def chosen(region: RegionCosts) -> int:
        config = before.get(region.path)
        choices = [cost.choice for cost in region.choices if not cost.refused]
        wanted = KEEP if config is None else _first_choice(config)
        choice = wanted if wanted in choices else choices[0]
        return next(number for number, cost in enumerate(region.choices) if cost.choice == choice)

    return Assignment(tuple(map(chosen, regions)))


def _trial(
    number: int,
    layout: Mapping[str, RegionConfig],
    profiles: Sequence[Profile],
    before: Mapping[str, RegionConfig],
    seen: _Seen,
    level: int,
    *,
    kept: bool,
) -> Trial:
    peak = largest_peak(profiles)
    action, paths = ("plain model", ()) if number == 0 else (f"checkpoint {len(before)} regions", tuple(before))
    outcome: Outcome = "measured"
    if number > 1:
        action, paths = _changes(layout, before, seen)
        outcome = "kept" if kept else "out of memory" if peak is None else "undone"
    return Trial(
        level=number if number < 2 else level,
        action=action,
        paths=paths,
        outcome=outcome,
        peak_bytes=peak,
        seconds=max(profile.seconds for profile in profiles),
        reason="ran out of memory" if peak is None else "",
    )


def _changes(
    layout: Mapping[str, RegionConfig], before: Mapping[str, RegionConfig], seen: _Seen
) -> tuple[str, tuple[str, ...]]:
    """What makes a plan of the first one, in words, and the regions that are changed."""
    split = _split_regions(layout, seen)
    cut = [path for path, config in layout.items() if config.chunks > 1]
    removed = [path for path in before if path not in layout and path not in split]
    chunks = " and ".join(map(str, sorted({layout[path].chunks for path in cut})))
    words = [f"split {_listed(split)}"] if split else []
    words += [f"run {_listed(cut)} in {chunks} time chunks"] if cut else []
    words += [f"remove the checkpoint{'s' * (len(removed) > 1)} of {_listed(removed)}"] if removed else []
    return ", ".join(words), tuple(dict.fromkeys([*split, *cut, *removed]))


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths) if len(paths) <= 3 else f"{', '.join(paths[:3])} and {len(paths) - 3} more"
