"""Bytes alive over time, from the storages that operations make: on any device, and with fake tensors.

Tensors of a ``FakeTensorMode`` have shapes, dtypes and a device, but no memory; no allocator can be asked for them. So
every operation is looked at: a storage that it returns and that was not known before is new, and a weak reference tells
when it is gone. What an operation takes for itself while it runs cannot be seen this way. For fake tensors on the CPU
the largest of these workspaces are added (``workspaces.py``); elsewhere the curve of a real step is higher by them.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_memopt.measuring.allocation_events import dense_storages, holds_memory, tensors_alive
from lightning_memopt.measuring.marks import MemoryMark
from lightning_memopt.measuring.workspaces import workspace_bytes

__all__ = ["StepTrace", "StorageTrace", "allocated_bytes", "fake_mode", "is_timed"]

_CUDA_BLOCK = 512
_WORKSPACE = 0  # a key that no storage has
_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default
# Frames between an operation and the dispatch mode that sees it.
_BETWEEN = (
    "torch/_ops.py",
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
    "measuring/storage_trace.py",
    "measuring/attribution.py",
)


def fake_mode() -> Any:
    """The ``FakeTensorMode`` that is active in this thread, None if there is none."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def is_timed(device: torch.device) -> bool:
    """Whether what runs on ``device`` now takes a time that can be measured: not on the CPU, not of fake tensors."""
    return device.type == "cuda" and fake_mode() is None


def allocated_bytes(size: int, device: torch.device) -> int:
    """Bytes that the allocator of ``device`` hands out for a tensor of ``size`` bytes.

    Example:
        >>> allocated_bytes(513, torch.device("cuda")), allocated_bytes(513, torch.device("cpu"))
        (1024, 513)
    """
    return -(-size // _CUDA_BLOCK) * _CUDA_BLOCK if device.type == "cuda" else size


class StorageTrace(TorchDispatchMode):
    """Follows the storages on ``device`` while it is active.

    Args:
        device: the device to follow.
        on_birth: called as ``on_birth(storage, operation)`` for each storage that an operation made.
        on_death: called as ``on_death(key)`` when it is gone; ``key`` is the ``_cdata`` that it had.
        known: the tensors from before, where the caller knows all that the operations touch; else all alive are looked
            for, which takes some 0.3 s per million objects.

    Attributes:
        start_bytes: alive when it was made.
        points: ``(ms since it was made, bytes alive from then on)``.
        marks: what :func:`~lightning_memopt.measuring.mark_memory` named meanwhile.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        on_birth: Callable[[torch.UntypedStorage, Any], None] | None = None,
        on_death: Callable[[int], None] | None = None,
        known: Iterable[Tensor] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._on_birth, self._on_death = on_birth, on_death
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._begin = time.perf_counter()
        self._alive = self._since_mark = 0
        self.points: list[tuple[float, int]] = []
        self.marks: list[MemoryMark] = []
        mode = fake_mode()
        self._fake = mode is not None
        for tensor in tensors_alive() if known is None else known:
            if _mode_of(tensor) is mode:
                self._see(tensor)
        self.start_bytes = self._since_mark = self._alive
        self.points = [(0.0, self._alive)]

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return max(alive for _, alive in self.points)

    @property
    def end_bytes(self) -> int:
        """Bytes alive now."""
        return self._alive

    def mark(self, name: str) -> None:
        """Name this moment."""
        self.marks.append(MemoryMark(name, self._alive, self._since_mark))
        self._since_mark = self._alive

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see_results(func, args, out)
        return out

    def _see_results(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf, func)
        if self._fake and self._device.type == "cpu" and (size := workspace_bytes(func, args, out)):
            self._change(_WORKSPACE, size)
            self._change(_WORKSPACE, -size)

    def _see(self, tensor: Tensor, operation: Any = None) -> None:
        if tensor.device.type != self._device.type or self._device.index not in (None, tensor.device.index):
            return
        for storage in dense_storages(tensor):
            if not self._fake and not holds_memory(storage):
                continue  # a wrapper of torch.func: the tensor in it is seen on its own
            key, size = storage._cdata, allocated_bytes(storage.nbytes(), tensor.device)
            known = self._known.get(key)
            if known is not None:
                if known[1] != size:  # resized
                    self._known[key] = (known[0], size)
                    self._change(key, size - known[1])
                continue
            self._known[key] = (weakref.ref(storage, self._gone(key)), size)
            self._change(key, size)
            if operation is not None and self._on_birth is not None:
                self._on_birth(storage, operation)

    def _gone(self, key: int) -> Callable[[object], None]:
        def note(_: object) -> None:
            known = self._known.pop(key, None)
            if known is not None:
                self._change(key, -known[1])
                if self._on_death is not None:
                    self._on_death(key)

        return note

    def _change(self, key: int, size: int) -> None:
        """The storage ``key`` is new, grew or shrank, or is gone, in which case it is no longer among the known."""
        self._alive += size
        self._since_mark = max(self._since_mark, self._alive)
        self.points.append(((time.perf_counter() - self._begin) * 1e3, self._alive))


class StepTrace(StorageTrace):
    """Follows a step of fake tensors as if they were real.

    Of two gradients that meet, autograd adds the second into the first where nobody else holds that; but not into a
    tensor of a subclass, such as a fake one. So a sum that takes the place of its first addend is taken for that, see
    :func:`sums_in_place`.
    """

    def __init__(self, device: torch.device) -> None:
        self._sum: tuple[int, int] | None = None  # its first addend, and the bytes before it was made
        super().__init__(device)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self._since_mark
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if sums_in_place(func, args):
            self._sum = (args[0].untyped_storage()._cdata, before)
        return out

    def _change(self, key: int, size: int) -> None:
        made, self._sum = self._sum, None
        if made is not None and made[0] == key and len(self.points) > 1 and self._alive + size == self.points[-2][1]:
            self.points[-1] = (self.points[-1][0], self._alive + size)
            self._since_mark = made[1]
        super()._change(key, size)


def sums_in_place(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether autograd, unwatched, would add the second operand into the first once nobody else holds that.

    To be asked within ``__torch_dispatch__``. A view holds the tensor that it was made of, and so has company as
    long as it lives: the first two gradients of a weight that is used several times are views (of the product's
    result, transposed), and their sum is a new tensor, into which the others are added.
    """
    if func is not torch.ops.aten.add.Tensor or not isinstance(args[0], Tensor) or not _in_engine():
        return False
    first = args[0]
    return first.layout is torch.strided and not first._is_view() and _is_dense(first)


def _in_engine() -> bool:
    """Whether an operation was called by the backward pass itself, not by Python code in it."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_name == "__torch_dispatch__" or frame.f_code.co_filename.endswith(_BETWEEN)
    ):
        frame = frame.f_back
    # In a thread of the engine's own, which every CUDA device has, no Python code is below.
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def _mode_of(tensor: Tensor) -> Any:
    """The mode that a fake tensor belongs to, None for a real one."""
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None
