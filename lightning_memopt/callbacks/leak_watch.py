"""
Memory that grows from step to step
===================================

A step of the same shapes ends with as many bytes alive as the one before. Where the bytes grow instead, something keeps
what it should let go: a list of losses with their graphs, a neuron that is never reset and so hangs on to all earlier
steps. Growth is seen from the bytes alone; who holds them is looked for once, when it has gone on for some steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memopt.measuring.allocation_events import own_storages

__all__ = ["LeakWatch", "batch_shapes"]

GROWING_STEPS = 4
"""So many increases in a row, from as many pairs of steps, are a leak."""

_MIB = 2**20
_DEPTH = 3  # of containers within containers that are looked into
_LARGEST_GRAPH = 20_000  # nodes


@dataclass(frozen=True)
class _Held:
    """What one attribute holds."""

    tensors: int
    bytes: int
    nodes: int
    """Of the graphs that its tensors hang on."""

    def grew_since(self, before: _Held) -> bool:
        return self.tensors > before.tensors or self.nodes > before.nodes or self.bytes > before.bytes


class LeakWatch:
    """Says once that memory grows, and who holds it.

    Example:
        >>> import torch
        >>> layer = nn.Linear(8, 8)
        >>> layer.losses = []
        >>> watch = LeakWatch()
        >>> for step in range(8):
        ...     layer.losses.append(layer(torch.zeros(4, 8)).sum())
        ...     found = watch.see(1000 + step * 100, ((4, 8),), {"layer": layer})
        ...     if found:
        ...         print(found.partition(": ")[2].partition(". ")[0])
        the list `layer.losses` (6 tensors with the graphs of their steps)
    """

    def __init__(self) -> None:
        self._shapes: object = None
        self._last: int | None = None
        self._growth = 0
        self._increases = 0
        self._before: dict[str, _Held] | None = None
        self._told = False

    def see(self, alive: int, shapes: object, owners: Mapping[str, Any]) -> str | None:
        """Take note of the bytes alive after a step.

        Args:
            alive: bytes.
            shapes: of the batch, see :func:`batch_shapes`. Steps of other shapes are no growth.
            owners: objects by name whose attributes may hold tensors, modules among them.

        Returns:
            A sentence on the leak, once; None otherwise.
        """
        if self._told:
            return None
        last, self._last = self._last, alive
        if last is None or shapes != self._shapes or alive <= last:
            self._shapes, self._growth, self._increases, self._before = shapes, 0, 0, None
            return None
        self._increases += 1
        self._growth += alive - last
        if self._increases == GROWING_STEPS:
            self._before = _inventory(owners)
        if self._increases <= GROWING_STEPS or self._before is None:
            return None
        self._told = True
        now = _inventory(owners)
        grown = [name for name, held in now.items() if held.grew_since(self._before.get(name, _Held(0, 0, 0)))]
        self._before = None
        return _sentence(self._growth, self._increases, grown, now, owners)


def batch_shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of all tensors in a batch."""
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _sentence(
    growth: int, steps: int, grown: Iterable[str], held: Mapping[str, _Held], owners: Mapping[str, Any]
) -> str:
    # Those that hang on the longest graphs first, then the largest.
    names = sorted(grown, key=lambda name: (held[name].nodes > 0, held[name].bytes), reverse=True)[:3]
    total = f"Memory grew by {growth / _MIB:.3f} MiB over {steps} steps of the same shapes"
    if not names:
        return (
            f"{total}; no attribute of the module or the callbacks grew with it. Look for a list, a cache or a closure "
            "outside of them that keeps tensors of earlier steps, and give it `tensor.detach()` or `tensor.item()`."
        )
    return f"{total}. It is held by: {'; '.join(_described(name, held[name]) for name in names)}."


def _described(name: str, held: _Held) -> str:
    plural = "s" if held.tensors > 1 else ""
    if held.tensors > 1 and held.nodes:
        return (
            f"the list `{name}` ({held.tensors} tensors with the graphs of their steps). Append `tensor.detach()` or "
            "`tensor.item()`"
        )
    if held.nodes:
        return (
            f"the state `{name}` (its graph of {held.nodes} operations reaches back to earlier steps). Reset or detach "
            "it before each step, a neuron with `reset_net` of its library"
        )
    return f"`{name}` ({held.tensors} tensor{plural}, {held.bytes / _MIB:.3f} MiB). Empty it between steps"


def _inventory(owners: Mapping[str, Any]) -> dict[str, _Held]:
    """What each attribute of the owners and of the modules in them holds, parameters aside."""
    found: dict[str, _Held] = {}
    for owner_name, owner in owners.items():
        places = owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)]
        for path, place in places:
            for name, value in _attributes(place):
                tensors = [tensor for tensor in _inside(value, _DEPTH) if not isinstance(tensor, nn.Parameter)]
                if tensors:
                    found[".".join(filter(None, (owner_name, path, name)))] = _held(tensors)
    return found


def _attributes(place: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(place).items() if hasattr(place, "__dict__") else ():
        # The first is where SpikingJelly keeps its states.
        if name in ("_memories", "_buffers") and isinstance(value, dict):
            yield from value.items()
        elif name not in ("_parameters", "_modules"):
            yield name, value


def _inside(value: object, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, set, deque)):
        for part in value:
            yield from _inside(part, depth - 1)
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from _inside(part, depth - 1)


def _held(tensors: list[Tensor]) -> _Held:
    storages = {storage._cdata: storage.nbytes() for tensor in tensors for storage in own_storages(tensor)}
    return _Held(len(tensors), sum(storages.values()), _graph_size(tensors))


def _graph_size(tensors: Iterable[Tensor]) -> int:
    """Operations that the graphs of the tensors reach back to, up to a limit."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting and len(seen) < _LARGEST_GRAPH:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return len(seen)
