"""Bytes alive over time, from the storages that operations make: on any device, and with fake tensors.

Tensors of a ``FakeTensorMode`` have shapes, dtypes and a device, but no memory; no allocator can be asked for them. So
every operation is looked at: a storage that it returns and that was not known before is new, and a weak reference tells
when it is gone. What an operation takes for itself while it runs (the workspace of a convolution) cannot be seen this
way; the curve of a real step can be higher by that.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_memopt.measuring.allocation_events import dense_storages, tensors_alive
from lightning_memopt.measuring.marks import MemoryMark

__all__ = ["StorageTrace", "allocated_bytes", "fake_mode"]

_CUDA_BLOCK = 512


def fake_mode() -> Any:
    """The ``FakeTensorMode`` that is active in this thread, None if there is none."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


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
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._on_birth, self._on_death = on_birth, on_death
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._begin = time.perf_counter()
        self._alive = self._since_mark = 0
        self.points: list[tuple[float, int]] = []
        self.marks: list[MemoryMark] = []
        fake = fake_mode() is not None
        for tensor in tensors_alive():
            if _is_fake(tensor) is fake:
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
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf, func)
        return out

    def _see(self, tensor: Tensor, operation: Any = None) -> None:
        if tensor.device.type != self._device.type or self._device.index not in (None, tensor.device.index):
            return
        for storage in dense_storages(tensor):
            key, size = storage._cdata, allocated_bytes(storage.nbytes(), tensor.device)
            known = self._known.get(key)
            if known is not None:
                if known[1] != size:  # resized
                    self._known[key] = (known[0], size)
                    self._change(size - known[1])
                continue
            self._known[key] = (weakref.ref(storage, self._gone(key)), size)
            self._change(size)
            if operation is not None and self._on_birth is not None:
                self._on_birth(storage, operation)

    def _gone(self, key: int) -> Callable[[object], None]:
        def note(_: object) -> None:
            known = self._known.pop(key, None)
            if known is not None:
                self._change(-known[1])
                if self._on_death is not None:
                    self._on_death(key)

        return note

    def _change(self, size: int) -> None:
        self._alive += size
        self._since_mark = max(self._since_mark, self._alive)
        self.points.append(((time.perf_counter() - self._begin) * 1e3, self._alive))


def _is_fake(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
