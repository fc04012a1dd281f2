"""
Memory that grows from step to step
===================================

A step of the same shapes ends with as many bytes alive as the one before. Where the bytes grow instead, something keeps
what it should let go: a list of losses with their graphs, a neuron that is never reset and so hangs on to all earlier
steps. Growth is seen from the bytes alone; who holds them is looked for when it has gone on for some steps.

Not every growth is a leak. A few bytes are not, for some list of numbers grows in every training. What optimizers keep
(L-BFGS collects a history) and what metrics collect until the end of an epoch is meant to grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_memopt.measuring.allocation_events import bytes_of
from lightning_memopt.measuring.attribution import tensors_inside

__all__ = ["LeakWatch", "batch_shapes"]

GROWING_STEPS = 4
"""So many increases in a row, from as many pairs of steps, may be a leak."""

LEAST_BYTES = 2**16
"""What a leak grows by in each step, at least."""

LEAST_SHARE = 1e-3
"""What it has grown by when it is told, at least, of the bytes alive."""

_MIB = 2**20
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
        ...     found = watch.see(step * 2**20, ((4, 8),), {"layer": layer})
        ...     if found:
        ...         print(found.partition(": ")[2].partition(". ")[0])
        the list `layer.losses` (6 tensors with the graphs of their steps)
    """

    def __init__(self) -> None:
        self._shapes: object = None
        self._last: int | None = None
        self._growth = 0
        self._increases = 0
        self._wanted = GROWING_STEPS
        self._before: tuple[dict[str, _Held], int] | None = None
        self._told = False

    def see(
        self, alive: int, shapes: object, owners: Mapping[str, Any], optimizers: Iterable[Optimizer] = ()
    ) -> str | None:
        """Take note of the bytes alive after a step.

        Args:
            alive: bytes.
            shapes: of the batch, see :func:`batch_shapes`. Steps of other shapes are no growth.
            owners: objects by name whose attributes may hold tensors, modules among them.
            optimizers: whose state may grow.

        Returns:
            A sentence on the leak, once; None otherwise.
        """
        if self._told:
            return None
        last, self._last = self._last, alive
        if last is None or shapes != self._shapes or alive - last < LEAST_BYTES:
            self._shapes, self._growth, self._increases, self._before = shapes, 0, 0, None
            return None
        self._increases += 1
        self._growth += alive - last
        if self._increases < self._wanted or self._growth < LEAST_SHARE * alive:
            return None
        before, self._before = self._before, (_inventory(owners), _meant_to_grow(owners, optimizers))
        if before is None:
            return None
        now, meant = self._before
        if alive - last - (meant - before[1]) < LEAST_BYTES:
            self._wanted *= 2  # it will go on, and looking takes time
            self._before = None
            return None
        self._told = True
        self._before = None
        grown = [name for name, held in now.items() if held.grew_since(before[0].get(name, _Held(0, 0, 0)))]
        return _sentence(self._growth, self._increases, grown, now)


def batch_shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of all tensors in a batch, in containers and attributes of any kind.

    Example:
        >>> import torch
        >>> batch_shapes({"x": torch.zeros(2, 3), "more": [torch.zeros(4), "word"]})
        ((2, 3), (4,))
    """
    return tuple(tuple(tensor.shape) for tensor in tensors_inside(batch, attributes=True))


def _sentence(growth: int, steps: int, grown: Iterable[str], held: Mapping[str, _Held]) -> str:
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
    """What each attribute of the owners and of the modules in them holds, parameters and metrics aside."""
    found: dict[str, _Held] = {}
    for path, place in _places(owners):
        for name, value in _attributes(place) if not isinstance(place, Metric) else ():
            tensors = [tensor for tensor in tensors_inside(value) if not isinstance(tensor, nn.Parameter)]
            if tensors:
                found[f"{path}.{name}"] = _held(tensors)
    return found


def _meant_to_grow(owners: Mapping[str, Any], optimizers: Iterable[Optimizer]) -> int:
    """Bytes of what may grow in a training without a leak."""
    held = [optimizer.state for optimizer in optimizers]
    held += [value for _, place in _places(owners) if isinstance(place, Metric) for _, value in _attributes(place)]
    return bytes_of(tensor for value in held for tensor in tensors_inside(value))


def _places(owners: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, owner in owners.items():
        if isinstance(owner, nn.Module):
            yield from ((".".join(filter(None, (name, path))), module) for path, module in owner.named_modules())
        else:
            yield name, owner


def _attributes(place: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(place).items() if hasattr(place, "__dict__") else ():
        # The first is where SpikingJelly keeps its states.
        if name in ("_memories", "_buffers") and isinstance(value, dict):
            yield from value.items()
        elif name not in ("_parameters", "_modules"):
            yield name, value


def _held(tensors: list[Tensor]) -> _Held:
    return _Held(len(tensors), bytes_of(tensors), _graph_size(tensors))


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
