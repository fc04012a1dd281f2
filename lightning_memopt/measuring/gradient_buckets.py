"""The buckets of ``DistributedDataParallel``, in which the gradients of all ranks are added up.

They are as large as the gradients and alive from the wrapper's construction on. They are made anew before the second
forward pass, when the order of the gradients is known. Only C++ holds them: neither Python nor its garbage collector
knows of them. But the reducer makes zeros of their shapes for ranks that have run out of batches, and a dispatch mode
sees of what, and may leave it at that.

With ``gradient_as_bucket_view=True`` the gradients lie in the buckets. They are one storage then, and count as
gradients once there are any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["gradient_buckets"]


def gradient_buckets(wrappers: Iterable[DistributedDataParallel]) -> list[Tensor]:
    """The tensors in which ``wrappers`` collect gradients; to be called outside of forward and backward passes.

    Buckets of sparse gradients hold nothing until there are some, and the reducer does not go beyond an empty one: it,
    and buckets behind it, are not seen.
    """
    found: list[Tensor] = []
    for wrapper in wrappers:
        # AttributeError: a wrapper whose construction failed.
        with contextlib.suppress(AttributeError, RuntimeError), _Operands(torch.ops.aten.zeros_like.default, found):
            wrapper.reducer._get_zeros_like_grad_buckets()
    return found


class _Operands(TorchDispatchMode):
    """Collects what an operation is called with, and does not run it."""

    def __init__(self, operation: Any, found: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operation, self._found = operation, found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not self._operation:
            return func(*args, **(kwargs or {}))
        self._found.append(args[0])
        return args[0]
