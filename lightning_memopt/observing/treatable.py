"""
Which regions can be treated
============================

What was seen of a region, and what was done to it before, say whether it can run again, and which of its inputs may be
stored as bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lightning_memopt.checkpointing import is_checkpointed
from lightning_memopt.observing.observe import ArgName, RegionObservation
from lightning_memopt.observing.regions import Region


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
