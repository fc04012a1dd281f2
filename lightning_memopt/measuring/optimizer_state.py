"""
Bytes that an optimizer will hold
=================================

Adam's moments, and the state of most optimizers, appear at the first step. Planning happens before it, so that step is
rehearsed: the optimizer steps twice on parameters of the same shapes, dtypes and groups that hold no memory, or, where
its kernels cannot do that, on one real parameter of each shape at a time. This needs no table of optimizers and is
right for any class, those of users included. The exception is LBFGS, which decides by values how far it goes and whose
state grows for many steps: it is given all that it will hold.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_memopt.measuring.allocation_events import bytes_of, own_storages
from lightning_memopt.measuring.storage_trace import StorageTrace
from lightning_memopt.ops.value_bounds import is_fake

# Vectors of all parameters that LBFGS takes while it steps, by its line search: the gradient, the direction in the
# making and two temporaries; with a search also the start, and the gradients at both ends of the interval and within.
_LBFGS_TEMPORARIES = {None: 5, "strong_wolfe": 9}


@dataclass(frozen=True)
class OptimizerBytes:
    """What an optimizer takes beside parameters and gradients, in bytes."""

    state: int
    """Held from the first step on (LBFGS: from when its history is full)."""
    step: int
    """Most that a step takes on top, while it runs."""


def optimizer_bytes(optimizer: Optimizer) -> OptimizerBytes:
    """Return the bytes that ``optimizer`` holds after its first step, and those that a step takes on top.

    Neither the optimizer nor its parameters are changed.

    Args:
        optimizer: any optimizer, whether it has stepped or not. State that is there is counted as it is, but that of
            LBFGS, which grows until its history is full, as it will be.

    Returns:
        The bytes of state, and the temporaries of one step: of Adam one copy of all parameters where the implementation
        works on all of them at once (``foreach``), two of the largest parameter where it takes one after the other,
        none if fused.

    Raises:
        TypeError: for something else than an optimizer.

    Example:
        >>> layer = torch.nn.Linear(1000, 1000, bias=False)
        >>> optimizer_bytes(torch.optim.Adam(layer.parameters())).state  # two moments in float32, and the step's number
        8000004
        >>> optimizer_bytes(torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)).state
        4000000
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer_bytes expects a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    grows = isinstance(optimizer, torch.optim.LBFGS)  # and has one vector for all parameters, frozen or not
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad or grows]
    stateful = [p for p in parameters if optimizer.state.get(p) and not grows]
    known = {id(p) for p in stateful}
    state = bytes_of(_tensors([optimizer.state[p] for p in stateful]))
    if not parameters:
        return OptimizerBytes(0, 0)
    try:
        missing, step = _rehearsed(optimizer, parameters, known)
    except Exception:  # a kernel of its own, or a value that it reads: it cannot run without memory
        missing, step = _one_by_one(optimizer, parameters, known)
    return OptimizerBytes(state + missing, step)


def _rehearsed(optimizer: Optimizer, parameters: list[nn.Parameter], known: Collection[int]) -> tuple[int, int]:
    """Bytes of state of parameters not ``known``, and temporaries, from two steps on parameters without memory.

    ``known`` are ids. The second step finds its state and takes the temporaries alone.
    """

    def empty(p: Tensor) -> Tensor:
        return torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=p.device)

    with FakeTensorMode(allow_non_fake_inputs=True):
        clone = clone_of(optimizer, optimizer.param_groups, {id(p) for p in parameters}, empty)
        # Parameters without memory are planned for a device that is not here.
        on_cuda = parameters[0].device.type in ("cuda", "meta") or is_fake(parameters[0])
        if on_cuda and not isinstance(clone, torch.optim.Adafactor):
            take_all_at_once(clone)
        rehearse_step(clone)
        twins = [twin for group in clone.param_groups for twin in group["params"]]
        new = [clone.state[twin] for twin, p in zip(twins, parameters, strict=True) if id(p) not in known]
        return bytes_of(_tensors(new)), _temporaries(clone, parameters[0].device)


def _one_by_one(optimizer: Optimizer, parameters: list[nn.Parameter], known: Collection[int]) -> tuple[int, int]:
    """The same from real steps, on one parameter of each shape, dtype and device at a time."""
    total = step = 0
    trained = {id(p) for p in parameters}
    shared: dict[int, int] = {}  # held by the optimizer for all parameters, as tables of codes are
    for group in optimizer.param_groups:
        held: dict[tuple[Any, ...], int] = {}
        for parameter in group["params"]:
            if id(parameter) not in trained:
                continue
            kind = (parameter.shape, parameter.dtype, parameter.device)
            if kind not in held:
                clone = clone_of(optimizer, [group], [id(parameter)], torch.zeros_like)
                rehearse_step(clone)
                step = max(step, _temporaries(clone, parameter.device))
                storages = [each for tensor in _tensors([*clone.state.values()]) for each in own_storages(tensor)]
                sizes = {each._cdata: (weakref.ref(each), each.nbytes()) for each in storages}
                del storages
                del clone
                outlived = {key: size for key, (each, size) in sizes.items() if each() is not None}
                shared |= outlived
                held[kind] = sum(size for key, (_, size) in sizes.items() if key not in outlived)
            total += 0 if id(parameter) in known else held[kind]
    return total + (sum(shared.values()) if len(known) < len(trained) else 0), step


def clone_of(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    parameters: Collection[int],
    make: Callable[[Tensor], Tensor],
) -> Optimizer:
    """An optimizer of the same class and settings on new parameters with gradients, without hooks or state."""
    clone: Optimizer = object.__new__(type(optimizer))
    vars(clone).update(vars(optimizer))
    vars(clone).pop("step", None)  # schedulers put one there that steps the original
    clone.state = defaultdict(dict)
    clone.param_groups = []
    for group in groups:
        made = []
        for parameter in group["params"]:
            if id(parameter) in parameters:
                new = nn.Parameter(make(parameter.detach()))
                new.grad = make(parameter.detach())
                made.append(new)
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        clone.param_groups.append({**settings, "params": made})
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(clone, name, OrderedDict())
    return clone


def rehearse_step(optimizer: Optimizer) -> None:
    """Take a step from the gradients that are there, with a closure that computes nothing where it needs one.

    LBFGS takes no step: it gets the state that a full history has, and the temporaries are made and dropped.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        _rehearse_lbfgs(optimizer)
        return
    step: Callable[..., Any] = optimizer.step
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        step(closure=lambda: torch.zeros(()))
    else:
        step()


def _rehearse_lbfgs(optimizer: Optimizer) -> None:
    group = optimizer.param_groups[0]  # it takes no more than one
    detached = [parameter.detach() for parameter in group["params"]]
    flat = torch.cat([(torch.view_as_real(p) if p.is_complex() else p).reshape(-1) for p in detached])
    state, pairs = optimizer.state[group["params"][0]], group["history_size"]

    def vectors(count: int) -> list[Tensor]:
        return [torch.empty_like(flat) for _ in range(count)]

    def numbers(count: int) -> list[Tensor]:
        return [flat.new_empty(()) for _ in range(count)]

    if not state:
        state["d"], state["prev_flat_grad"] = vectors(2)
        state["old_dirs"], state["old_stps"] = vectors(pairs), vectors(pairs)
        state["ro"], state["al"], (state["H_diag"],) = numbers(pairs), numbers(pairs), numbers(1)
    vectors(_LBFGS_TEMPORARIES[group["line_search_fn"]] - 1)


def take_all_at_once(optimizer: Optimizer) -> None:
    """Where it is left open, take all parameters at once, as torch does on CUDA, but not for fakes."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def _tensors(state: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


def _temporaries(clone: Optimizer, device: torch.device) -> int:
    """Most bytes that one more step of a clone takes for a while."""
    parameters: list[nn.Parameter] = [p for group in clone.param_groups for p in group["params"]]
    try:
        with StorageTrace(device, known=[*parameters, *_tensors([*clone.state.values()])]) as trace:
            rehearse_step(clone)
    except RuntimeError:  # torch.compile, which torchao steps with, refuses to be watched: it makes one kernel of most
        return max(p.nbytes for p in parameters)
    return int(trace.peak_bytes - trace.start_bytes)
