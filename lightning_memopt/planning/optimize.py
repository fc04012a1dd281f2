"""
One call
========

:func:`optimize_memory` is the whole way of a plan in five steps: observe the model, find the candidates, plan, apply
the plan, verify it. For a budget of bytes the candidates are the treatments that each region was tried under. Each step
is a function of the room that owns it.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_memopt.checkpointing.runs import is_compiled
from lightning_memopt.measuring.amounts import format_bytes
from lightning_memopt.observing.no_memory import computing_nothing
from lightning_memopt.observing.regions import TargetClasses
from lightning_memopt.planning.agree import Ranks
from lightning_memopt.planning.apply import (
    all_or_nothing,
    apply_checked,
    as_plan,
    in_force,
    remove_plan,
)
from lightning_memopt.planning.by_budget import plan_by_budget
from lightning_memopt.planning.by_level import plan_by_level
from lightning_memopt.planning.plan import Budget, Plan, left_to_check
from lightning_memopt.planning.request import (
    CanChunk,
    ExampleForward,
    Progress,
    Request,
    SplitFn,
    changes_nothing,
    check,
    device_of,
    without_effect,
)

M = TypeVar("M", bound=nn.Module)
Level = Literal[0, 1, 2, 3, 4]


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
    gradients_in_forward: bool = False,
) -> M:
    """Treat the regions of ``model`` that hold the most memory, in place, and return the same object.

    Call it before the model is wrapped by DDP or FSDP. What was decided and why is in :func:`applied_plan`. Whatever
    goes wrong on the way, Ctrl-C included, leaves the model as it was; and also on success nothing but the treatment
    of the regions is changed: no buffer, neuron state, gradient, metric, flag or random number generator. A second
    call with the same arguments does nothing; with others it starts anew.

    Args:
        model: the model to train. If its parameters are on the meta device, or fake tensors, nothing is computed or
            allocated, and the plan follows from shapes; make the batch in ``example_forward`` then.
        targets: class or classes of the modules to be regions, the outermost of them. None: the model's repeated
            blocks, see :func:`find_targets`.
        example_forward: runs one training forward of the model that it is given, on data like the real ones in shape,
            dtype and device, and returns a loss or an output. Needed from level 1 on, unless ``plan`` is given.
        level: how far to search. 0: change nothing. 1: checkpoint the regions with the largest inputs; one forward
            without a graph. 2: also split the region that holds the peak. 3: also cut it along time. 4: also remove
            checkpoints that the peak does not need. Levels 2 to 4 observe one forward and measure five steps at most.
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
        gradients_in_forward: whether the gradients of the step before are still there in the forward pass, as in a
            loop that clears them between forward and backward (Lightning's automatic optimization is one). Then they
            count there.

    Warns:
        UserWarning: ``split_fn`` or ``can_chunk`` has no effect at this level, or a level lacks it; no region can be
            checkpointed; the model does not fit into memory with the plan either.

    Raises:
        FileNotFoundError: there is no plan file of that name.
        TypeError: an argument has the wrong type.
        MemoryBudgetError: no plan is within ``memory_budget``; says the smallest peak there is, and what holds it.
        ValueError: an argument has a wrong value, the model holds no such modules, is already wrapped by DDP or FSDP,
            has lazy parameters, or ``example_forward`` returned nothing with a gradient; or the model holds no memory
            and its forward needs some.
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
    nothing = changes_nothing(level, plan, memory_budget)
    if nothing and process_group is None and not _are_ranks():
        return model
    request = Request(
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
        gradients_in_forward,
    )
    ranks = Ranks(process_group, device_of(model))
    done = ranks.together("checking the arguments", lambda: check(model, request))
    ranks.same("comparing the arguments", request.described())
    if all(done) or nothing:
        return model
    started = time.perf_counter()
    with all_or_nothing(model), ranks.telling():
        for setting in without_effect(request):
            warnings.warn(setting, stacklevel=2)
        remove_plan(model)
        if request.plan is not None:
            plan = ranks.attempt("reading the plan", lambda: as_plan(request.plan))
        else:
            make = plan_by_level if memory_budget is None else plan_by_budget
            with computing_nothing(model):
                plan = left_to_check(make(model, request, ranks, started))
        apply_on_all(model, plan, request, ranks)
    return model


def _are_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def apply_on_all(model: nn.Module, plan: Plan, request: Request, ranks: Ranks) -> None:
    """Apply the plan, and check that it is in force here and that every rank has the same one."""
    ranks.attempt("applying the plan", lambda: apply_checked(model, plan, request.key()))
    if not in_force(model, plan):
        raise RuntimeError("The plan was applied but is not in force: a module lost its treatment. This is a bug.")
    if plan.memory_budget is not None and _is_compiled(model):
        warnings.warn(
            f"The plan keeps its budget of {format_bytes(plan.memory_budget)} where the model runs without "
            "torch.compile, as it was observed: compiled code decides by itself what to store, and neither packs nor "
            "recomputes cheap operations for a plan, so that its peak may be higher. MemoryMonitor tells. Leave "
            "torch.compile out, or use level=1, which compiled code follows.",
            stacklevel=3,
        )
    ranks.same("comparing the plans that were applied", plan.digest())


def _is_compiled(model: nn.Module) -> bool:
    """Whether a part of it, or as a LightningModule its steps, run as compiled code."""
    return getattr(model, "_compiler_ctx", None) is not None or any(map(is_compiled, model.modules()))
