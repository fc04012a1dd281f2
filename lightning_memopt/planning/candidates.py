"""
Which regions can be checkpointed, and which are chosen first
=============================================================

Level 1 needs no measurement: every region that can be recomputed from its inputs is a candidate, the largest inputs
come first, and the budget says how many of them are taken. Whatever cannot be a candidate stays as it is, and the plan
says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from lightning_memopt.checkpointing import BitSpikeCompressor, RegionConfig, is_checkpointed
from lightning_memopt.planning.observe import ArgName, RegionObservation, SeenInput
from lightning_memopt.planning.plan import Budget
from lightning_memopt.planning.regions import Region

BUDGET_SHARES: Mapping[Budget, float] = {"speed": 0.5, "balanced": 0.75, "memory": 1.0}
"""Share of the candidates that level 1 checkpoints."""


@dataclass(frozen=True)
class Candidate:
    """A region with what was seen of it; without ``config`` it cannot be checkpointed, and ``reason`` says why."""

    region: Region
    seen: RegionObservation
    config: RegionConfig | None
    reason: str

    @property
    def chunked_arg(self) -> SeenInput | None:
        """The first argument that has more than one step in its first dimension: the one that may be cut along time."""
        return next((seen for seen in self.seen.inputs if seen.steps > 1), None)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the inputs as they are stored when the region is checkpointed."""
        packed = () if self.config is None or self.config.compressor is None else self.config.compressed_args or ()
        return sum(
            seen.packed_bytes if seen.name in packed else seen.input_bytes
            for seen in self.seen.inputs
            if not seen.standing
        )


def find_candidates(
    model: nn.Module, regions: Sequence[Region], seen: Sequence[RegionObservation], *, compress: bool
) -> dict[str, Candidate]:
    """Decide for each region whether and how it can be checkpointed. In model order, by path."""
    treated = treated_before(model)
    return {
        region.path: _candidate(region, observation, treated, compress=compress)
        for region, observation in zip(regions, seen, strict=True)
    }


def choose_largest_inputs(candidates: Sequence[Candidate], budget: Budget) -> tuple[Candidate, ...]:
    """The candidates with the largest inputs, as many as ``budget`` allows (rounded up); ties in model order."""
    possible = [candidate for candidate in candidates if candidate.config is not None]
    ordered = sorted(possible, key=lambda candidate: -candidate.seen.input_bytes)
    return tuple(ordered[: math.ceil(BUDGET_SHARES[budget] * len(ordered))])


def combine(reports: Sequence[Sequence[RegionObservation]]) -> tuple[RegionObservation, ...]:
    """What all ranks saw together: sizes by MAX, binary by AND, troubles by OR."""
    return tuple(_combine_region(views) for views in zip(*reports, strict=True))


def _combine_region(views: Sequence[RegionObservation]) -> RegionObservation:
    names: dict[ArgName, list[SeenInput]] = {}
    for view in views:
        for seen in view.inputs:
            names.setdefault(seen.name, []).append(seen)
    return RegionObservation(
        path=views[0].path,
        calls=max(view.calls for view in views),
        inputs=tuple(_combine_input(inputs) for inputs in names.values()),
        flops=max(view.flops for view in views),
        moved_bytes=max(view.moved_bytes for view in views),
        returns_tensor=all(view.returns_tensor for view in views),
        writes_input=any(view.writes_input for view in views),
        input_overwritten=any(view.input_overwritten for view in views),
    )


def _combine_input(inputs: Sequence[SeenInput]) -> SeenInput:
    return replace(
        inputs[0],
        input_bytes=max(seen.input_bytes for seen in inputs),
        packed_bytes=max(seen.packed_bytes for seen in inputs),
        binary=all(seen.binary for seen in inputs),
        # One rank that saw a spike proves it for all, as long as no rank saw anything else.
        any_one=any(seen.any_one for seen in inputs),
        packable=all(seen.packable for seen in inputs),
        steps=min(seen.steps for seen in inputs),
        standing=all(seen.standing for seen in inputs),
    )


# ---------------------------------------------------------------------------------------------------------------------


def _candidate(region: Region, seen: RegionObservation, treated: Mapping[int, str], *, compress: bool) -> Candidate:
    trouble = trouble_with(region, seen, treated)
    if trouble:
        return Candidate(region, seen, None, trouble)
    packed = worth_packing(seen) if compress else ()
    config = RegionConfig(
        compressor=BitSpikeCompressor() if packed else None,
        compressed_args=packed or None,
        name=region.path,
    )
    return Candidate(region, seen, config, _about_inputs(seen, compress=compress))


def worth_packing(seen: RegionObservation) -> tuple[ArgName, ...]:
    """Names of the inputs that a compressor may pack: those that were binary and are not alive anyway."""
    return tuple(item.name for item in seen.inputs if item.binary and item.any_one and not item.standing)


def trouble_with(region: Region, seen: RegionObservation, treated: Mapping[int, str]) -> str:
    """Why the region cannot be checkpointed, empty if it can."""
    module = region.module
    if id(module) in treated:
        return treated[id(module)]
    if isinstance(module, torch.jit.ScriptModule):
        return "compiled TorchScript, its class cannot be changed"
    if any(cls.__name__ == "OptimizedModule" for cls in type(module).__mro__):
        return "compiled as a whole; checkpoint it before torch.compile"
    if "forward" in module.__dict__:
        return "its forward was replaced on the object itself"
    if not seen.calls:
        return "did not run in the observed forward (or not by calling the module)"
    if not seen.inputs:
        return "is given no tensor to recompute from"
    if not seen.returns_tensor:
        return "returns no tensor"
    if seen.writes_input:
        return "changes its input in place, so that it cannot run again"
    if seen.input_overwritten:
        return "its input is changed in place after it ran"
    return ""


def _about_inputs(seen: RegionObservation, *, compress: bool) -> str:
    parts = [f"{seen.calls} calls"] if seen.calls > 1 else []
    if compress:
        for item in seen.inputs:
            name = "input" if len(seen.inputs) == 1 else _called(item.name)
            if item.standing:
                parts.append(f"{name} is held by the caller anyway")
            elif item.binary and item.any_one:
                parts.append(f"{name} is binary")
            elif item.binary:
                parts.append(f"{name} was all zeros, which proves nothing")
            elif not item.packable:
                parts.append(f"{name} is no spike tensor")
            else:
                parts.append(f"{name} is not binary")
    return ", ".join(parts) or "can be recomputed from its inputs"


def _called(name: ArgName) -> str:
    return f"argument {name!r}" if isinstance(name, str) else f"argument {name}"


def treated_before(model: nn.Module) -> dict[int, str]:
    """Modules that are checkpointed already, lie inside one that is, or hold one; each with the reason in words."""
    treated: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        how = _checkpointed_by(module)
        if not how:
            continue
        treated[id(module)] = f"{how} already, left as it is"
        for inner_path, inner in module.named_modules():
            if inner_path:
                treated.setdefault(id(inner), f"lies inside {path or 'the model'}, which is {how} already")
        parts = path.split(".")
        for end in range(1, len(parts)):
            outer = model.get_submodule(".".join(parts[:end]))
            treated.setdefault(id(outer), f"holds {path}, which is {how} already")
    return treated


def _checkpointed_by(module: nn.Module) -> str:
    if is_checkpointed(module):
        return "checkpointed by hand"
    # torch's wrapper and those derived from it, without importing the distributed package they live in.
    if any(cls.__name__ == "ActivationWrapper" for cls in type(module).__mro__):
        return f"checkpointed by {type(module).__name__}"
    if getattr(module, "gradient_checkpointing", False) is True:
        return "checkpointed by its own option gradient_checkpointing"
    return ""
