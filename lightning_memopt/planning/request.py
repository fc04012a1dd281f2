"""
What was asked
==============

The arguments of :func:`lightning_memopt.optimize_memory`, checked before anything changes.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memopt.observing.regions import (
    TargetClasses,
    target_classes,
)
from lightning_memopt.planning.apply import (
    applied_request,
    as_plan,
)
from lightning_memopt.planning.candidates import (
    BUDGET_SHARES,
)
from lightning_memopt.planning.memory_budget import budget_bytes
from lightning_memopt.planning.plan import Budget, Plan

Progress = Callable[[str, int, int], None]
ExampleForward = Callable[[nn.Module], object]
# It returns a sequence of modules. The type says Any: parsers of command lines read a callable that returns modules as
# a factory, and would offer every module class there is.
SplitFn = Callable[[nn.Module], Any]
CanChunk = Callable[[nn.Module], bool]


@dataclass(frozen=True)
class Request:
    """The arguments of one call of :func:`lightning_memopt.optimize_memory`; see there."""

    targets: TargetClasses | None = None
    example_forward: ExampleForward | None = None
    level: int = 1
    checkpoint_budget: Budget = "memory"
    compress: bool = True
    split_fn: SplitFn | None = None
    can_chunk: CanChunk | None = None
    plan: Plan | str | os.PathLike[str] | None = None
    progress: Progress | None = None
    memory_budget: int | str | None = None
    optimizer: Optimizer | Sequence[Optimizer] | None = None
    reserved_bytes: int = 0
    gradients_in_forward: bool = False

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
            budget = self.memory_budget, optimizers, self.reserved_bytes, self.gradients_in_forward
            return ("budget", targets, budget, self.compress, self.can_chunk)
        search = self.level, self.checkpoint_budget, self.compress, self.split_fn, self.can_chunk
        return ("search", targets, *search, self.gradients_in_forward)

    def described(self) -> tuple[Any, ...]:
        """What must be the same on all ranks, as plain data."""
        if self.plan is not None:
            return self.key()
        if self.memory_budget is None and self.level == 0:
            return ("level 0",)
        targets = None if self.targets is None else [cls.__qualname__ for cls in target_classes(self.targets)]
        given = [name for name in ("split_fn", "can_chunk") if getattr(self, name) is not None]
        if self.memory_budget is not None:
            return ("budget", targets, self.memory_budget, self.compress, given, self.gradients_in_forward)
        search = self.level, self.checkpoint_budget, self.compress, given, self.gradients_in_forward
        return ("search", targets, *search)

    def report(self, phase: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(phase, done, total)


def check(model: nn.Module, request: Request) -> bool:
    """Refuse what cannot work, before anything changes; says whether the request is already fulfilled."""
    if changes_nothing(request.level, request.plan, request.memory_budget):
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


def changes_nothing(level: object, plan: object, memory_budget: object) -> bool:
    """Whether nothing is asked for but level 0."""
    return plan is None and memory_budget is None and type(level) is int and level == 0


def without_effect(request: Request) -> list[str]:
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


def _check_search(model: nn.Module, request: Request) -> None:
    if type(request.level) is not int or request.level not in range(5):
        raise ValueError(f"level must be 0, 1, 2, 3 or 4, found {request.level!r}.")
    if not isinstance(request.checkpoint_budget, str) or request.checkpoint_budget not in BUDGET_SHARES:
        options = ", ".join(map(repr, BUDGET_SHARES))
        raise ValueError(f"checkpoint_budget must be one of {options}, found {request.checkpoint_budget!r}.")
    _check_budget(model, request)
    for name in ("compress", "gradients_in_forward"):
        if not isinstance(getattr(request, name), bool):
            raise TypeError(f"{name} must be True or False, found {getattr(request, name)!r}.")
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


def _check_budget(model: nn.Module, request: Request) -> None:
    listed = request.optimizer is None or isinstance(request.optimizer, (Optimizer, list, tuple))
    among = request.optimizers if listed else (request.optimizer,)
    wrong = [other for other in among if not isinstance(other, Optimizer)]
    if wrong:
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list of them, found {wrong[0]!r}.")
    own = set(map(id, model.parameters()))
    for optimizer in request.optimizers:
        steps = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if own.isdisjoint(map(id, steps)):
            raise ValueError(
                f"optimizer holds {len(steps)} parameters in {type(optimizer).__name__}, none of them of the model. "
                "Give the optimizers that step this model: their state counts against memory_budget."
            )
    if isinstance(request.reserved_bytes, bool) or not isinstance(request.reserved_bytes, int):
        raise TypeError(f"reserved_bytes must be an int, a number of bytes; found {request.reserved_bytes!r}.")
    if request.reserved_bytes < 0:
        raise ValueError(f"reserved_bytes must be 0 or more bytes, found {request.reserved_bytes}.")
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
    budget_of(model, request)


def budget_of(model: nn.Module, request: Request) -> int:
    """What the budget allows on the device of this rank."""
    assert request.memory_budget is not None
    device = device_of(model)
    here = device.type == "cuda" and torch.cuda.is_available()  # fake tensors may be on a device that is not
    memory = torch.cuda.get_device_properties(device).total_memory if here else None
    return budget_bytes(request.memory_budget, memory)


def _wrapper_of(model: nn.Module) -> str:
    """Name of the parallel wrapper around ``model``, empty if there is none. Imports no wrapper to find out."""
    names = {cls.__name__ for cls in type(model).__mro__ if cls.__module__.startswith("torch.")}
    known = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")
    return next((name for name in known if name in names), "")


def device_of(model: object) -> torch.device:
    """Where the first parameter or buffer lies; the CPU if there is none."""
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            return tensor.device
    return torch.device("cpu")


def may_chunk(can_chunk: CanChunk, path: str, module: nn.Module) -> bool:
    """What ``can_chunk`` says of the module at ``path``, checked."""
    answer = can_chunk(module)
    if not isinstance(answer, bool):
        raise TypeError(f"can_chunk must return True or False, it returned {answer!r} for {path}.")
    return answer
