"""How the elements of a strided tensor lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one in memory."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, each once: then a new tensor may have the same strides.

    A span of as many elements as there are does not tell: expanded dimensions can make up for gaps.
    """
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory in another way than by expanding (as in ``unfold``)."""
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and s > 0)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def memory_order(stride: Sequence[int]) -> list[int]:
    """The dimensions, slowest first."""
    return sorted(range(len(stride)), key=lambda d: (-stride[d], d))
