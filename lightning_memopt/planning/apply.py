"""
Apply a plan, and take it back
==============================

A plan changes the class of the modules it names and nothing else. What was applied to which model is remembered outside
of the model, keyed by its id, so that no ``state_dict``, copy, pickle or summary sees it. Either everything is applied
or nothing.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from lightning_memopt.checkpointing import (
    BitSpikeCompressor,
    RegionConfig,
    region_config,
    unwrap_module,
)
from lightning_memopt.checkpointing.module import set_config
from lightning_memopt.planning.plan import Plan, RegionPlan

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Applied:
    """A plan that is in force on a model, and the request it answers."""

    plan: Plan
    request: tuple[Any, ...] | None
    """Arguments of the search that made the plan; None for a plan that was given."""


# Keyed by id, not by the model: the hash of a torchmetrics.Metric changes with its state.
_APPLIED: dict[int, Applied] = {}


def applied_plan(model: nn.Module) -> Plan | None:
    """The plan that is in force on ``model``, None if there is none.

    A deep copy of an optimized model is optimized as well, but has no plan of its own.

    Example:
        >>> import torch
        >>> applied_plan(torch.nn.Linear(2, 2)) is None
        True
    """
    applied = _APPLIED.get(id(model))
    return None if applied is None else applied.plan


def apply_plan(model: M, plan: Plan | str | os.PathLike[str]) -> M:
    """Give ``model`` the treatment that ``plan`` describes, in place, without running it.

    A plan that is already in force changes nothing; another one is taken back first. Works on models whose parameters
    are on the meta device or not yet there.

    Args:
        model: the model the plan was made for, or one with the same module names and classes.
        plan: a plan, or the path of a file that :meth:`Plan.save` wrote.

    Raises:
        FileNotFoundError: there is no such plan file; says how one is made.
        TypeError: ``plan`` is no plan and no path.
        ValueError: the file holds no valid plan, or the model has no such modules. Nothing has been changed then.

    Example:
        >>> import torch
        >>> from lightning_memopt.planning import Plan, RegionPlan
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> plan = Plan(regions=(RegionPlan("0", "Linear", "recompute", "chosen by hand"),))
        >>> applied_plan(apply_plan(model, plan)) == plan
        True
        >>> applied_plan(remove_plan(model)) is None
        True
    """
    apply_checked(model, as_plan(plan), request=None)
    return model


def remove_plan(model: M) -> M:
    """Take back the plan that is in force on ``model``; without one, nothing happens.

    Modules that were checkpointed by hand stay checkpointed.
    """
    plan = applied_plan(model)
    if plan is not None:
        modules = dict(model.named_modules(remove_duplicate=False))
        with all_or_nothing(model):
            for region in plan.treated:
                if region.path in modules:
                    unwrap_module(modules[region.path])
            _remember(model, None)
    return model


def as_plan(plan: object) -> Plan:
    """``plan`` itself, or the plan in the file of that name."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, (str, os.PathLike)):
        return Plan.load(Path(plan))
    raise TypeError(f"plan must be a Plan or the path of a plan file, found {type(plan).__name__}.")


def apply_checked(model: nn.Module, plan: Plan, request: tuple[Any, ...] | None) -> None:
    """Check ``plan`` against ``model``, then put it in force; ``request`` is remembered with it."""
    modules = check_fits(model, plan)
    with all_or_nothing(model):
        if not in_force(model, plan):
            remove_plan(model)
            for region in plan.treated:
                set_config(modules[region.path], config_of(region))
        _remember(model, Applied(plan, request))


def applied_request(model: nn.Module) -> tuple[Any, ...] | None:
    """The arguments of the search whose plan is in force, None where there is none or the plan was given."""
    applied = _APPLIED.get(id(model))
    if applied is None or not in_force(model, applied.plan):
        return None
    return applied.request


def in_force(model: nn.Module, plan: Plan) -> bool:
    """Whether ``plan`` was applied to ``model`` and every module still has the treatment it gave."""
    current = applied_plan(model)
    if current is None or current.digest() != plan.digest():
        return False
    modules = dict(model.named_modules(remove_duplicate=False))
    return all(
        region.path in modules and region_config(modules[region.path]) == config_of(region) for region in plan.treated
    )


def check_fits(model: nn.Module, plan: Plan) -> dict[str, nn.Module]:
    """The modules of ``model`` by name, after checking that it has those that ``plan`` names.

    Raises:
        ValueError: names every module that is missing or of another class.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    wrong = []
    for region in plan.regions:
        module = modules.get(region.path)
        if module is None:
            wrong.append(f"there is no module {region.path!r}")
        elif module is model:
            wrong.append("the model as a whole cannot be a region")
        elif region.treatment != "keep" and region.class_name not in _class_names(module):
            wrong.append(f"{region.path!r} is a {type(module).__qualname__}, not a {region.class_name}")
    paths = [region.path for region in plan.regions]
    wrong += [f"{path!r} is named twice" for path in sorted({path for path in paths if paths.count(path) > 1})]
    if wrong:
        listed = "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        raise ValueError(
            f"The plan does not fit {type(model).__name__}: {listed}. Nothing was changed. Make the plan again for "
            "this model, with the modules at the same place below the object that is passed."
        )
    return modules


def _class_names(module: nn.Module) -> set[str]:
    """The class and its bases: ``fully_shard``, for one, swaps the class for a subclass of another name."""
    return {cls.__qualname__ for cls in type(module).__mro__}


def config_of(region: RegionPlan) -> RegionConfig:
    """The treatment of ``region`` in the terms of :func:`~lightning_memopt.checkpointing.checkpoint_module`."""
    if region.treatment == "keep":
        raise ValueError(f"The region {region.path!r} is kept as it is: it has no treatment.")
    return RegionConfig(
        treatment=region.treatment,
        compressor=BitSpikeCompressor() if region.compressor == "bit" else None,
        chunks=region.chunks,
        cheap_chunks=region.cheap_chunks,
        chunked_args=region.chunked_args,
        time_dim=region.time_dim,
        compressed_args=region.compressed_args if region.compressor is not None else None,
        check_chunks=not region.chunks_checked,
        name=region.path,
    )


def entries_of(config: RegionConfig | None) -> dict[str, Any]:
    """What a :class:`RegionPlan` says of a treatment, None for ``keep``; :func:`config_of` reads it back."""
    if config is None:
        return {"treatment": "keep"}
    return {
        "treatment": config.treatment,
        "compressor": None if config.compressor is None else "bit",
        "compressed_args": config.compressed_args or (),
        "chunks": config.chunks,
        "cheap_chunks": config.cheap_chunks,
        "chunked_args": config.chunked_args,
        "time_dim": config.time_dim,
        "chunks_checked": config.chunks > 1 and not config.check_chunks,
    }


@contextmanager
def treated_as(model: nn.Module, layout: Mapping[str, RegionConfig]) -> Iterator[None]:
    """Within the context the regions at the paths of ``layout`` are treated as it says; plain again afterwards."""
    modules = dict(model.named_modules(remove_duplicate=False))
    try:
        for path, config in layout.items():
            set_config(modules[path], config)
        yield
    finally:
        for path in layout:
            set_config(modules[path], None)


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Return ``model`` to the treatments and the plan it has now, should the enclosed code raise anything."""
    before = [(module, region_config(module)) for module in model.modules()]
    applied = _APPLIED.get(id(model))
    try:
        yield
    except BaseException:
        for module, config in before:
            if region_config(module) != config:
                set_config(module, config)
        _remember(model, applied)
        raise


def _remember(model: nn.Module, applied: Applied | None) -> None:
    if applied is None:
        _APPLIED.pop(id(model), None)
        return
    if id(model) not in _APPLIED:
        weakref.finalize(model, _APPLIED.pop, id(model), None).atexit = False
    _APPLIED[id(model)] = applied
