"""
An allocator with a limit, on the CPU
^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from lightning_memopt.measuring.storage_trace import StorageTrace


class MemoryLimit(StorageTrace):
    """A dispatch mode that raises torch's ``OutOfMemoryError`` where more than ``limit`` bytes would be alive.

    Attributes:
        limit: bytes; may be changed at any time.
        reached_s: when it was reached last, by ``time.perf_counter``.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(torch.device("cpu"))
        self.limit = limit
        self.reached_s = math.nan

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.end_bytes
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.end_bytes > max(self.limit, before):
            self.reached_s = time.perf_counter()
            raise torch.OutOfMemoryError(f"limit of {self.limit} bytes reached in {func}")
        return out

    def _see(self, tensor: Tensor, operation: Any = None) -> None:
        if not isinstance(tensor, FakeTensor):  # of a report, which may use no memory
            super()._see(tensor, operation)
