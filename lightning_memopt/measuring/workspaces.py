"""What kernels of the CPU take for themselves while they run, which fake tensors do not show.

oneDNN convolves in a blocked layout: plain operands with at least 16 channels are copied into it, weights too, and such
results are copied back. In ResNets that is 1 to 3 % of a step. Scratch buffers of its products, about a MiB in 16 bits
whatever their size, are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["workspace_bytes"]

_BLOCK = 16  # channels
_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def workspace_bytes(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes that an operation on the CPU holds while it runs, beside its operands and results.

    Example:
        >>> data, weight = torch.empty(2, 16, 8, 8), torch.empty(32, 16, 3, 3)
        >>> arguments = (data, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        >>> workspace_bytes(torch.ops.aten.convolution.default, arguments, torch.empty(2, 32, 8, 8)) - weight.nbytes
        8192
    """
    if func is _FORWARD:
        data, weight, settings, gradient = args[0], args[1], args[2:9], None
    elif func is _BACKWARD:
        gradient, data, weight = args[:3]
        settings = (None, *args[4:10])
    else:
        return 0
    if not _by_onednn(data, weight, settings):
        return 0
    if gradient is not None:
        return _copied(data) + _copied(gradient)
    copied = _copied(data) + (weight.nbytes if min(weight.shape[:2]) >= _BLOCK else 0)
    return copied or _copied(out)


def _by_onednn(data: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> bool:
    if data.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    bias, stride, padding, dilation, transposed, output_padding, groups = settings
    try:
        backend = torch._C._select_conv_backend(
            data, weight, bias, stride, padding, dilation, transposed, output_padding, groups, None
        )
    except (RuntimeError, TypeError):
        return False
    return "Mkldnn" in str(backend)


def _copied(tensor: Tensor) -> int:
    blocked = tensor.dim() > 2 and tensor.shape[1] >= _BLOCK and tensor.is_contiguous()
    return tensor.nbytes if blocked else 0
