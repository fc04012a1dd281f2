"""
Plans by level
==============

Which regions are checkpointed follows from their inputs and a share of them; levels above the first search on from
there.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from torch import nn

from lightning_memopt.checkpointing import learn_parameters
from lightning_memopt.measuring import measuring_repeatedly
from lightning_memopt.planning.agree import Ranks
from lightning_memopt.planning.apply import (
    entries_of,
)
from lightning_memopt.planning.candidates import (
    Candidate,
    choose_largest_inputs,
    combine,
    find_candidates,
)
from lightning_memopt.planning.model_state import ModelState, unchanged
from lightning_memopt.planning.observe import Observed, RegionObservation, observe
from lightning_memopt.planning.plan import Plan, RegionPlan, versions
from lightning_memopt.planning.regions import (
    FoundRegions,
    Region,
    as_region,
    find_targets,
    names_of_modules,
)
from lightning_memopt.planning.request import Request, SplitFn, device_of, may_chunk
from lightning_memopt.planning.search import Found, Search


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
    device = device_of(model)
    found: Found | None = None
    if request.level >= 2:
        assert request.example_forward is not None
        search = Search(
            model,
            request.example_forward,
            candidates=candidates,
            parts=_possible_parts(seen.parts, candidates),
            chunkable=seen.chunkable,
            state=state,
            ranks=ranks,
            device=device,
            progress=request.report,
        )
        found = search.run(first, request.level)
        if found.final.peak_bytes is None and ranks.rank == 0:
            warnings.warn(_does_not_fit(request.level), stacklevel=4)
    return Plan(
        regions=_region_plans(candidates, first, found, seen, request),
        level=request.level,
        checkpoint_budget=request.checkpoint_budget,
        compress=request.compress,
        target_reason=seen.found.reason,
        device=device.type,
        forward_flops=seen.flops,
        peak_bytes_before=None if found is None else found.plain.peak_bytes,
        peak_bytes_after=None if found is None else found.final.peak_bytes,
        trials=() if found is None else found.trials,
        search_passes=0 if found is None else found.passes,
        probe_passes=seen.passes + (0 if found is None else found.forwards),
        search_seconds=time.perf_counter() - started,
        world_size=ranks.size,
        versions=versions(),
    )


def _observe(model: nn.Module, request: Request, state: ModelState, ranks: Ranks) -> _Seen:
    """Find the regions and run one forward pass to see what they are given."""
    example_forward = request.example_forward
    assert example_forward is not None
    seen = ranks.attempt("finding the regions", lambda: _find(model, request))
    ranks.same("finding the regions", [region.path for region in seen.regions])

    def work() -> Observed:
        request.report("observing", 0, 1)
        result = observe(model, seen.regions, example_forward, state)
        # Else the first step of a region would copy its parameters to find this out, and be measured with them.
        learn_parameters(model, state.written)
        state.rewind()
        request.report("observing", 1, 1)
        return result

    reports = ranks.together("observing the model", work)
    return replace(
        seen,
        observations=combine([report.regions for report in reports]),
        flops=max(report.flops for report in reports),
        passes=max(report.passes for report in reports),
    )


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
    found: Found | None,
    seen: _Seen,
    request: Request,
) -> tuple[RegionPlan, ...]:
    """The targets, and the parts of those that were split."""
    chosen = {candidate.region.path for candidate in first}
    split: frozenset[str] = frozenset() if found is None else found.split
    parts = {part for path in split for part in seen.parts[path]}
    listed = {region.path for region in seen.found.regions} | parts
    layout = {c.region.path: c.config for c in first if c.config is not None} if found is None else found.layout
    plans = []
    for path, candidate in candidates.items():
        if path not in listed:
            continue
        config = layout.get(path)
        if config is not None or candidate.config is None:
            reason = candidate.reason
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
                saved_bytes=None if found is None else found.plain.worst.kept.get(path),
                forward_ms=None if found is None else found.forward_ms.get(path),
                forward_flops=candidate.seen.flops,
                forward_bytes=candidate.seen.moved_bytes,
            )
        )
    return tuple(plans)


def _possible_parts(parts: dict[str, tuple[str, ...]], candidates: dict[str, Candidate]) -> dict[str, tuple[str, ...]]:
    """Parts that can be checkpointed; a region with none of them cannot be split."""
    possible = {path: tuple(p for p in inner if candidates[p].config is not None) for path, inner in parts.items()}
    return {path: inner for path, inner in possible.items() if inner}


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
