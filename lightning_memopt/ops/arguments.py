"""What functions of spikes are given: dense tensors, numbers; and where they are called."""

from __future__ import annotations

from numbers import Integral, Real

import torch
from torch import Tensor


def check_dense(function: str, name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a dense tensor.

    Args:
        function: who takes it.
        name: the argument's name.
        value: the argument.

    Raises:
        TypeError: for what is no tensor, and for sparse, nested, quantized and MKLDNN tensors.

    Example:
        >>> check_dense("bit_spike_compress", "spikes", torch.eye(2).to_sparse())
        Traceback (most recent call last):
        TypeError: bit_spike_compress takes dense spikes, got torch.sparse_coo. Convert with to_dense() first.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{function} takes {name} as a tensor, got {type(value).__name__}.")
    if value.layout is not torch.strided:
        raise TypeError(f"{function} takes dense {name}, got {value.layout}. Convert with to_dense() first.")
    if value.is_quantized:
        raise TypeError(f"{function} takes dense {name}, got quantized {value.dtype}. Convert with dequantize() first.")
    # The compiler takes no nested tensors of this layout.
    if not torch.compiler.is_compiling() and value.is_nested:
        raise TypeError(f"{function} takes dense {name}, got a nested tensor. Pad it with to_padded_tensor() first.")


def check_number(function: str, name: str, value: object, *, whole: bool = False) -> None:
    """Raise TypeError unless ``value`` is a number.

    Args:
        function: who takes it.
        name: the argument's name.
        value: the argument.
        whole: whether it must be an integer.

    Raises:
        TypeError: for anything else, bool and tensors included.

    Example:
        >>> check_number("IntegerSpikeCompressor", "bits", 2.0, whole=True)
        Traceback (most recent call last):
        TypeError: IntegerSpikeCompressor takes bits as an integer, got 2.0.
    """
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise TypeError(f"{function} takes {name} as {'an integer' if whole else 'a number'}, got {value!r}.")


def transforms_are_active() -> bool:
    """Whether a transform of ``torch.func``, or ``vmap``, runs the code (a compiler traces its transforms itself)."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
