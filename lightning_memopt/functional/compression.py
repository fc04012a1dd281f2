"""Spikes into bits and back, as one stream or row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_memopt.ops.arguments import check_dense
from lightning_memopt.ops.bit_pack import bit_unpack, pack_binary


def bit_spike_compress(spikes: Tensor) -> Tensor:
    """Pack spikes of any shape into one stream of bits, least significant bit first.

    Args:
        spikes: zeros and ones of any shape, strides and real dtype; taken in the order of their indices.

    Returns:
        ``[ceil(numel / 8)]`` uint8 on the same device; the unused bits of the last byte are 0. No gradient.

    Raises:
        NonBinarySpikeError: for a value other than 0 and 1: at once on the CPU, before the next optimizer step on CUDA
            (call :func:`~lightning_memopt.checkpointing.check_pending_fits` to ask earlier).
        TypeError: for what is no dense tensor.
        ValueError: for a complex tensor.

    Example:
        >>> bit_spike_compress(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([13], dtype=torch.uint8)
    """
    check_dense("bit_spike_compress", "spikes", spikes)
    return pack_binary(spikes.detach(), "bit_spike_compress: spikes")


def bit_spike_decompress(packed: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
    """Undo :func:`bit_spike_compress`.

    Args:
        packed: ``[ceil(numel / 8)]`` uint8.
        shape: shape of the spikes.
        dtype: dtype of the result.

    Returns:
        Zeros and ones of ``shape`` and ``dtype``, contiguous, on the device of ``packed``.

    Raises:
        TypeError: for what is no dense tensor, no shape or no dtype.
        ValueError: if ``packed`` does not hold as many elements as ``shape`` has, or is not uint8.

    Example:
        >>> bit_spike_decompress(torch.tensor([13], dtype=torch.uint8), (2, 2))
        tensor([[1, 0],
                [1, 1]], dtype=torch.uint8)
    """
    check_dense("bit_spike_decompress", "packed", packed)
    if not isinstance(shape, Sequence) or not all(isinstance(size, (int, torch.SymInt)) for size in shape):
        raise TypeError(f"bit_spike_decompress takes a shape as a sequence of integers, got {shape!r}.")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"bit_spike_decompress takes a torch.dtype, got {dtype!r}.")
    if any(size < 0 for size in shape):
        raise ValueError(f"bit_spike_decompress expects sizes of 0 or more, got shape {tuple(shape)}.")
    return bit_unpack(packed, math.prod(shape), dtype).view(tuple(shape))


def bit_pack_spike_dense(spikes: Tensor) -> Tensor:
    """Pack the rows of spikes into bits, each row from a byte of its own: what :func:`packed_spike_linear` reads.

    Args:
        spikes: ``[..., K]`` zeros and ones of any strides and real dtype.

    Returns:
        ``[..., ceil(K / 8)]`` uint8 on the same device, least significant bit first, the last bits of a row 0. Where K
        is no multiple of 8 this is another stream than that of :func:`bit_spike_compress`. No gradient.

    Raises:
        NonBinarySpikeError: for a value other than 0 and 1: at once on the CPU, before the next optimizer step on CUDA.
        TypeError: for what is no dense tensor.
        ValueError: for a 0-dim or complex tensor.

    Example:
        >>> bit_pack_spike_dense(torch.ones(2, 9)).tolist()
        [[255, 1], [255, 1]]
    """
    check_dense("bit_pack_spike_dense", "spikes", spikes)
    return pack_binary(spikes.detach(), "bit_pack_spike_dense: spikes", by_row=True)
