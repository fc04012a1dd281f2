"""
One call
========

:func:`optimize_memory` is the whole way of a plan in five steps: observe the model, find the candidates, plan, apply
the plan, verify it. For a budget of bytes the candidates are the treatments that each region was tried under. Each step
is a function of the room that owns it.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_memopt import __version__
from lightning_memopt.checkpointing import RegionConfig, learn_parameters
from lightning_memopt.measuring import OptimizerBytes, measuring_repeatedly, optimizer_bytes
from lightning_memopt.planning.agree import Ranks
from lightning_memopt.planning.apply import (
    all_or_nothing,
    applied_request,
    apply_checked,
    as_plan,
    entries_of,
    in_force,
    remove_plan,
    treated_as,
)
from lightning_memopt.planning.candidates import (
    BUDGET_SHARES,
    Candidate,
    choose_largest_inputs,
    combine,
    find_candidates,
)
from lightning_memopt.planning.common_costs import step_of_all, without_chunks
from lightning_memopt.planning.costs import Choice
from lightning_memopt.planning.memory_budget import budget_bytes
from lightning_memopt.planning.model_state import ModelState, unchanged
from lightning_memopt.planning.observe import Observed, RegionObservation, observe, tensors_in
from lightning_memopt.planning.plan import Budget, Plan, RegionPlan
from lightning_memopt.planning.region_costs import CHOICES, ObservedStep, observe_step, treatment_arguments
from lightning_memopt.planning.regions import (
    FoundRegions,
    Region,
    TargetClasses,
    as_region,
    find_targets,
    names_of_modules,
    target_classes,
)
from lightning_memopt.planning.search import Found, Progress, Search
from lightning_memopt.planning.simulate import visits
from lightning_memopt.planning.solve import why
from lightning_memopt.planning.trial import run_step
from lightning_memopt.planning.within_budget import MOST_STEPS, WithinBudget, plan_within

M = TypeVar("M", bound=nn.Module)
Level = Literal[0, 1, 2, 3, 4]
ExampleForward = Callable[[nn.Module], object]
# It returns a sequence of modules. The type says Any: parsers of command lines read a callable that returns modules as
# a factory, and would offer every module class there is.
SplitFn = Callable[[nn.Module], Any]
CanChunk = Callable[[nn.Module], bool]


def optimize_memory(
    model: M,
    targets: TargetClasses | None = None,
    example_forward: ExampleForward | None = None,
    *,
    level: Level = 1,
    checkpoint_budget: Budget = "memory",
    compress: bool = True,
    split_fn: SplitFn | None = None,
    can_chunk: CanChunk | None = None,
    process_group: Any = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    memory_budget: int | str | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    reserved_bytes: int = 0,
) -> M:
    """Treat the regions of ``model`` that hold the most memory, in place, and return the same object.

    Call it before the model is wrapped by DDP or FSDP. What was decided and why is in :func:`applied_plan`. Whatever
    goes wrong on the way, Ctrl-C included, leaves the model as it was; and also on success nothing but the treatment
    of the regions is changed: no buffer, neuron state, gradient, metric, flag or random number generator. A second
    call with the same arguments does nothing; with others it starts anew.

    Args:
        model: the model to train.
        targets: class or classes of the modules to be regions, the outermost of them. None: the model's repeated
            blocks, see :func:`find_targets`.
        example_forward: runs one training forward of the model that it is given, on data like the real ones in shape,
            dtype and device, and returns a loss or an output. Needed from level 1 on, unless ``plan`` is given.
        level: how far to search. 0: change nothing. 1: checkpoint the regions with the largest inputs; one forward
            without a graph. 2: also split the region that holds the peak. 3: also cut it along time. 4: also remove
            checkpoints that the peak does not need, most expensive first. Levels 2 to 4 measure real steps.
        checkpoint_budget: share of the candidates that level 1 takes: ``speed`` 50 %, ``balanced`` 75 %, ``memory``
            100 %.
        compress: store inputs that were seen to be binary as 1 bit a value.
        split_fn: returns at least two parts of a region, non-overlapping modules inside it, or an empty tuple. Levels 2
            and up; without it nothing is split.
        can_chunk: whether a region may be run piece by piece along its first dimension. Levels 3 and up; without it
            nothing is cut.
        process_group: ranks that must build the same plan, all of which call this function. None: all ranks where
            ``torch.distributed`` is initialised. At level 0 they only compare their arguments.
        plan: a plan, or the path of a plan file, to apply as it is. Nothing is run, all other arguments but ``model``
            and ``process_group`` are ignored, and parameters may be on the meta device.
        progress: called as ``progress(phase, done, total)``.
        memory_budget: bytes that a training step may take: an int, ``"12GiB"``, or ``"80%"`` of the device's memory.
            The fastest plan within it is found from one observed forward and made sure of by at most three measured
            steps; ``level``, ``checkpoint_budget`` and ``split_fn`` have no part in it, and ``can_chunk`` can only
            exclude regions: which may be cut along time is proved by running them.
        optimizer: the optimizers of the training, before or after their first step. Their state counts against
            ``memory_budget``, and so does what their step takes.
        reserved_bytes: bytes of ``memory_budget`` to leave free for what a step of the model does not show, such as
            the buckets of DDP.

    Warns:
        UserWarning: ``split_fn`` or ``can_chunk`` has no effect at this level, or a level lacks it; no region can be
            checkpointed; the model does not fit into memory with the plan either.

    Raises:
        FileNotFoundError: there is no plan file of that name.
        TypeError: an argument has the wrong type.
        MemoryBudgetError: no plan is within ``memory_budget``; says the smallest peak there is, and what holds it.
        ValueError: an argument has a wrong value, the model holds no such modules, is already wrapped by DDP or FSDP,
            has parameters that are lazy or on the meta device, or ``example_forward`` returned nothing with a gradient.
        RuntimeError: another rank failed or holds other arguments.

    Example:
        >>> import torch
        >>> from lightning_memopt.planning import applied_plan
        >>> model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4)))
        >>> data = torch.rand(5, 3, 8)
        >>> model = optimize_memory(model, example_forward=lambda model: model(data), checkpoint_budget="speed")
        >>> [(region.path, region.treatment) for region in applied_plan(model).regions]
        [('0', 'recompute'), ('1', 'recompute'), ('2', 'keep'), ('3', 'keep')]
        >>> model = optimize_memory(model, example_forward=lambda model: model(data), memory_budget="8 GiB")
        >>> applied_plan(model).peak_bytes_after <= 8 * 2**30
        True
    """
    nothing = _changes_nothing(level, plan, memory_budget)
    if nothing and process_group is None and not _are_ranks():
        return model
    request = _Request(
        targets,
        example_forward,
        level,
        checkpoint_budget,
        compress,
        split_fn,
        can_chunk,
        plan,
        progress,
        memory_budget,
        optimizer,
        reserved_bytes,
    )
    ranks = Ranks(process_group, _device_of(model))
    done = ranks.together("checking the arguments", lambda: _check(model, request))
    ranks.same("comparing the arguments", request.described())
    if all(done) or nothing:
        return model
    for setting in _without_effect(request):
        warnings.warn(setting, stacklevel=2)
    started = time.perf_counter()
    with all_or_nothing(model), ranks.telling():
        remove_plan(model)
        if request.plan is not None:
            plan = ranks.attempt("reading the plan", lambda: as_plan(request.plan))
        elif memory_budget is not None:
            with measuring_repeatedly(_device_of(model)), unchanged(model) as state:
                plan = _plan_bytes(model, request, state, ranks, started)
        else:
            measuring = measuring_repeatedly(_device_of(model)) if level >= 2 else nullcontext()
            with measuring, unchanged(model) as state:
                seen = _observe(model, request, state, ranks)
                candidates = find_candidates(model, seen.regions, seen.observations, compress=compress)
                plan = _plan(model, request, seen, candidates, state, ranks, started)
        ranks.attempt("applying the plan", lambda: apply_checked(model, plan, request.key()))
        _verify(model, plan, ranks)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


@dataclass(frozen=True)
class _Request:
    targets: TargetClasses | None
    example_forward: ExampleForward | None
    level: int
    checkpoint_budget: Budget
    compress: bool
    split_fn: SplitFn | None
    can_chunk: CanChunk | None
    plan: Plan | str | os.PathLike[str] | None
    progress: Progress | None
    memory_budget: int | str | None
    optimizer: Optimizer | Sequence[Optimizer] | None
    reserved_bytes: int

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        if self.optimizer is None:
            return ()
        return (self.optimizer,) if isinstance(self.optimizer, Optimizer) else tuple(self.optimizer)

    def key(self) -> tuple[Any, ...]:
        """What decides the outcome: a second call with an equal key has nothing to do."""
        if self.plan is not None:
            return ("plan", as_plan(self.plan).digest())
        targets = None if self.targets is None else target_classes(self.targets)
        if self.memory_budget is not None:
            optimizers = tuple(map(weakref.ref, self.optimizers))  # an id may become that of another one
            budget = self.memory_budget, optimizers, self.reserved_bytes
            return ("budget", targets, budget, self.compress, self.can_chunk)
        return ("search", targets, self.level, self.checkpoint_budget, self.compress, self.split_fn, self.can_chunk)

    def described(self) -> tuple[Any, ...]:
        """What must be the same on all ranks, as plain data."""
        if self.plan is not None:
            return self.key()
        if self.memory_budget is None and self.level == 0:
            return ("level 0",)
        targets = None if self.targets is None else [cls.__qualname__ for cls in target_classes(self.targets)]
        given = [name for name in ("split_fn", "can_chunk") if getattr(self, name) is not None]
        if self.memory_budget is not None:
            return ("budget", targets, self.memory_budget, self.compress, given)
        return ("search", targets, self.level, self.checkpoint_budget, self.compress, given)

    def report(self, phase: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(phase, done, total)


def _check(model: nn.Module, request: _Request) -> bool:
    """Refuse what cannot work, before anything changes; says whether the request is already fulfilled."""
    if _changes_nothing(request.level, request.plan, request.memory_budget):
        return False
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize_memory expects a torch.nn.Module, got {type(model).__name__}.")
    wrapper = _wrapper_of(model)
    if wrapper:
        raise ValueError(
            f"The model is already wrapped by {wrapper}; call optimize_memory on the model inside, before."
        )
    if request.plan is None:
        _check_search(model, request)
    return applied_request(model) == request.key()


def _changes_nothing(level: object, plan: object, memory_budget: object) -> bool:
    return plan is None and memory_budget is None and type(level) is int and level == 0


def _are_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _without_effect(request: _Request) -> list[str]:
    """In words, what was passed and does nothing, and what a level does nothing without."""
    if request.plan is not None or request.memory_budget is not None:
        return []
    level = request.level
    told = []
    if request.split_fn is not None and level < 2:
        told.append(f"split_fn has no effect at level {level}: regions are split from level 2 on.")
    if request.split_fn is None and level >= 2:
        told.append(
            f"level {level} splits no region without split_fn. Pass one, such as "
            "lightning_memopt.planning.split_into_children."
        )
    if request.can_chunk is not None and level < 3:
        told.append(f"can_chunk has no effect at level {level}: regions are cut along time from level 3 on.")
    if request.can_chunk is None and level >= 3:
        told.append(
            f"level {level} cuts no region along time without can_chunk. Pass one, such as "
            "lightning_memopt.planning.is_multistep_neuron."
        )
    return told


def _check_search(model: nn.Module, request: _Request) -> None:
    if type(request.level) is not int or request.level not in range(5):
        raise ValueError(f"level must be 0, 1, 2, 3 or 4, found {request.level!r}.")
    if not isinstance(request.checkpoint_budget, str) or request.checkpoint_budget not in BUDGET_SHARES:
        options = ", ".join(map(repr, BUDGET_SHARES))
        raise ValueError(f"checkpoint_budget must be one of {options}, found {request.checkpoint_budget!r}.")
    _check_budget(model, request)
    if not isinstance(request.compress, bool):
        raise TypeError(f"compress must be True or False, found {request.compress!r}.")
    if request.targets is not None:
        target_classes(request.targets)
    for name in ("example_forward", "split_fn", "can_chunk", "progress"):
        value = getattr(request, name)
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be a function or None, found a {type(value).__name__}.")
    if request.example_forward is None:
        asked = f"level {request.level}" if request.memory_budget is None else "memory_budget"
        nothing = ", or level=0 to change nothing" if request.memory_budget is None else ""
        raise ValueError(
            f"{asked} observes one forward pass and needs example_forward, a function of the model such as "
            f"lambda model: model(batch). Without one, pass a saved plan{nothing}."
        )
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"Parameter {name} is lazy (not initialized yet); run one forward pass of the model first."
            )
        if parameter.is_meta:
            raise ValueError(
                f"Parameter {name} is on the meta device, where no forward can be observed; pass plan=..., a plan that "
                "was made for this model on a real device."
            )


def _check_budget(model: nn.Module, request: _Request) -> None:
    wrong = [other for other in request.optimizers if not isinstance(other, Optimizer)]
    if wrong:
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list of them, found {wrong[0]!r}.")
    if isinstance(request.reserved_bytes, bool) or not isinstance(request.reserved_bytes, int):
        raise TypeError(f"reserved_bytes must be an int, found {request.reserved_bytes!r}.")
    if request.reserved_bytes < 0:
        raise ValueError(f"reserved_bytes must be 0 or more, found {request.reserved_bytes}.")
    if request.memory_budget is None:
        for name in ("optimizer", "reserved_bytes"):
            if getattr(request, name):
                raise ValueError(
                    f"{name} counts against memory_budget, which was not given. Give it, or leave {name} out."
                )
        return
    settings = {"level": request.level != 1, "checkpoint_budget": request.checkpoint_budget != "memory"}
    settings |= {"split_fn": request.split_fn is not None}
    for name, given in settings.items():
        if given:
            raise ValueError(
                f"memory_budget finds the plan by itself and has no use for {name}. Leave one of the two out."
            )
    _budget_bytes(model, request)


def _budget_bytes(model: nn.Module, request: _Request) -> int:
    """What the budget allows on the device of this rank."""
    assert request.memory_budget is not None
    device = _device_of(model)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return budget_bytes(request.memory_budget, memory)


def _wrapper_of(model: nn.Module) -> str:
    """Name of the parallel wrapper around ``model``, empty if there is none. Imports no wrapper to find out."""
    names = {cls.__name__ for cls in type(model).__mro__ if cls.__module__.startswith("torch.")}
    known = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")
    return next((name for name in known if name in names), "")


def _device_of(model: object) -> torch.device:
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            return tensor.device
    return torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------------------
# The steps


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


def _observe(model: nn.Module, request: _Request, state: ModelState, ranks: Ranks) -> _Seen:
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


def _find(model: nn.Module, request: _Request) -> _Seen:
    found = find_targets(model, request.targets)
    regions, parts = _with_parts(model, found.regions, request)
    return _Seen(found, regions, parts, _chunkable(regions, request))


def _with_parts(
    model: nn.Module, targets: Sequence[Region], request: _Request
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


def _chunkable(regions: Sequence[Region], request: _Request) -> frozenset[str]:
    if request.can_chunk is None or request.level < 3:
        return frozenset()
    can_chunk = request.can_chunk
    return frozenset(region.path for region in regions if _asked(can_chunk, region.path, region.module))


def _asked(can_chunk: CanChunk, path: str, module: nn.Module) -> bool:
    answer = can_chunk(module)
    if not isinstance(answer, bool):
        raise TypeError(f"can_chunk must return True or False, it returned {answer!r} for {path}.")
    return answer


def _plan(
    model: nn.Module,
    request: _Request,
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
        warnings.warn(_nothing_to_checkpoint(targets), stacklevel=3)
    device = _device_of(model)
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
            warnings.warn(_does_not_fit(request.level), stacklevel=3)
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
        versions=_versions(),
    )


def _region_plans(
    candidates: dict[str, Candidate],
    first: Sequence[Candidate],
    found: Found | None,
    seen: _Seen,
    request: _Request,
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


def _plan_bytes(model: nn.Module, request: _Request, state: ModelState, ranks: Ranks, started: float) -> Plan:
    """Observe, solve, and measure what was solved, until the fastest plan within the budget is found."""
    device = _device_of(model)
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
        return _budget_bytes(model, request), optimizers, seen

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
        versions=_versions(),
    )


def _config(path: str, choice: Choice, step: ObservedStep) -> RegionConfig:
    return RegionConfig(**treatment_arguments(path, choice, step.observations[path]))


def _not_chunkable(model: nn.Module, step: ObservedStep, can_chunk: CanChunk) -> frozenset[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    return frozenset(path for path in step.observations if not _asked(can_chunk, path, modules[path]))


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


def _possible_parts(parts: dict[str, tuple[str, ...]], candidates: dict[str, Candidate]) -> dict[str, tuple[str, ...]]:
    """Parts that can be checkpointed; a region with none of them cannot be split."""
    possible = {path: tuple(p for p in inner if candidates[p].config is not None) for path, inner in parts.items()}
    return {path: inner for path, inner in possible.items() if inner}


def _verify(model: nn.Module, plan: Plan, ranks: Ranks) -> None:
    """Check that the plan is in force here and that every rank has the same one."""
    if not in_force(model, plan):
        raise RuntimeError("The plan was applied but is not in force: a module lost its treatment. This is a bug.")
    ranks.same("comparing the plans that were applied", plan.digest())


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


def _versions() -> dict[str, str]:
    return {
        "lightning_memopt": __version__,
        "torch": str(torch.__version__),
        "python": ".".join(map(str, sys.version_info[:3])),
    }
