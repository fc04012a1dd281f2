"""Named moments of a measured step: what was alive then, and the peak since the moment before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.profiler import record_function

__all__ = ["MARK_RANGE", "MarkCollector", "MemoryMark", "collecting_marks", "mark_memory"]

MARK_RANGE = "lightning_memopt::mark::"


@dataclass(frozen=True)
class MemoryMark:
    """A moment that :func:`mark_memory` named.

    Attributes:
        name: The name given.
        bytes: Bytes alive at that moment.
        peak_bytes: Most bytes alive between the mark before (or the start of the step) and this one.
    """

    name: str
    bytes: int
    peak_bytes: int


class MarkCollector:
    """Collects marks from an allocator that keeps its own peak statistics."""

    def __init__(self, allocator: Any, index: int) -> None:
        self._allocator = allocator
        self._index = index
        self.marks: list[MemoryMark] = []

    def mark(self, name: str) -> None:
        alive = self._allocator.memory_allocated(self._index)
        self.marks.append(MemoryMark(name, alive, self._allocator.max_memory_allocated(self._index)))
        self._allocator.reset_peak_memory_stats(self._index)

    @property
    def peak_bytes(self) -> int:
        """Peak since the collector was made, over all the resets that marks caused."""
        since = self._allocator.max_memory_allocated(self._index)
        return int(max([since, *(mark.peak_bytes for mark in self.marks)]))


class Marks(Protocol):
    """Takes note of moments."""

    def mark(self, name: str) -> None: ...


# Not thread-local: the backward pass of CUDA tensors runs in autograd's own thread.
_COLLECTOR: Marks | None = None


@contextlib.contextmanager
def collecting_marks(collector: Marks) -> Iterator[None]:
    """Give the marks of the enclosed code to ``collector``."""
    global _COLLECTOR
    before, _COLLECTOR = _COLLECTOR, collector
    try:
        yield
    finally:
        _COLLECTOR = before


def mark_memory(name: str) -> None:
    """Name this moment of the step that :func:`measure_memory` is measuring; does nothing where none is measured.

    Costs no synchronization. The marks are in ``StepMemory.marks``, in order.

    Example:
        >>> import torch
        >>> from lightning_memopt.measuring import measure_memory
        >>> def step():
        ...     temporary = torch.empty(1000, dtype=torch.uint8)
        ...     del temporary
        ...     mark_memory("first")
        ...     kept = torch.empty(10, dtype=torch.uint8)
        ...     mark_memory("second")
        >>> report = measure_memory(step, device="cpu")
        >>> [(m.name, m.bytes - report.start_bytes, m.peak_bytes - report.start_bytes) for m in report.marks]
        [('first', 0, 1000), ('second', 10, 10)]
    """
    if _COLLECTOR is not None:
        _COLLECTOR.mark(name)
    elif torch._C._autograd._profiler_enabled():
        with record_function(MARK_RANGE + name):
            pass
