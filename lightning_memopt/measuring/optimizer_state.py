"""
Bytes that an optimizer will hold
=================================

Adam's moments, and the state of most optimizers, appear at the first step. Planning happens before it, so that step is
rehearsed: the optimizer steps once on parameters of the same shapes, dtypes and groups that hold no memory, or, where
its kernels cannot do that, on one real parameter of each shape at a time. This needs no table of optimizers and is
right for any class, those of users included.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class OptimizerBytes:
    """What an optimizer takes beside parameters and gradients, in bytes."""

    state: int
    """Held from the first step on."""
    step: int
    """Most that a step takes on top, while it runs."""


def optimizer_bytes(optimizer: Optimizer) -> OptimizerBytes:
    """Return the bytes that ``optimizer`` holds after its first step, and those that a step takes on top.

    Neither the optimizer nor its parameters are changed.

    Args:
        optimizer: any optimizer, whether it has stepped or not. State that is there is counted as it is.

    Returns:
        The bytes of state, and the temporaries of one step: one copy of the parameters where the implementation works
        on all of them at once (``foreach``), the largest parameter where it takes one after the other, none if fused.

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
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    known = {id(p) for p in parameters if optimizer.state.get(p)}
    state = _bytes([optimizer.state[p] for p in parameters if id(p) in known])
    missing = {id(p) for p in parameters} - known
    if missing:
        try:
            state += _rehearsed(optimizer, missing)
        except Exception:  # a kernel of its own, or a value that it reads: it cannot run without memory
            state += _one_by_one(optimizer, missing)
    return OptimizerBytes(state, _temporaries(optimizer, parameters))


def _rehearsed(optimizer: Optimizer, parameters: Collection[int]) -> int:
    """Bytes of state after a step on parameters without memory. ``parameters`` are ids, here and below."""

    def empty(p: Tensor) -> Tensor:
        return torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=p.device)

    with FakeTensorMode(allow_non_fake_inputs=True):
        clone = _clone(optimizer, optimizer.param_groups, parameters, empty)
        clone.step()
        return _bytes([*clone.state.values()])


def _one_by_one(optimizer: Optimizer, parameters: Collection[int]) -> int:
    """Bytes of state, from real steps on one parameter of each shape, dtype and device at a time."""
    total = 0
    for group in optimizer.param_groups:
        held: dict[tuple[Any, ...], int] = {}
        for parameter in group["params"]:
            if id(parameter) not in parameters:
                continue
            kind = (parameter.shape, parameter.dtype, parameter.device)
            if kind not in held:
                clone = _clone(optimizer, [group], [id(parameter)], torch.zeros_like)
                clone.step()
                held[kind] = _bytes([*clone.state.values()])
            total += held[kind]
    return total


def _clone(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    parameters: Collection[int],
    make: Callable[[Tensor], Tensor],
) -> Optimizer:
    """An optimizer of the same class and settings on new parameters with gradients, without hooks or state."""
    clone: Optimizer = object.__new__(type(optimizer))
    vars(clone).update(vars(optimizer))
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


def _bytes(state: object) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def _temporaries(optimizer: Optimizer, parameters: list[nn.Parameter]) -> int:
    """The update of all parameters, of the largest one, or none."""
    sizes = [p.nbytes for p in parameters]
    if not sizes or any(group.get("fused") for group in optimizer.param_groups):
        return 0
    foreach = any(group.get("foreach") for group in optimizer.param_groups)
    # Where it is left open, torch takes all parameters at once on CUDA.
    left_open = any("foreach" in group and group["foreach"] is None for group in optimizer.param_groups)
    if foreach or (left_open and parameters[0].device.type == "cuda"):
        return sum(sizes)
    return max(sizes)
