"""Autocast: which dtype it wants, and operations that keep theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast casts the factors of a product now; None where it is off or does not exist.

    Args:
        device: where the product is made; ``meta`` knows no autocast.

    Returns:
        The dtype, or None.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     autocast_dtype(torch.device("cpu")), autocast_dtype(torch.device("meta"))
        (torch.bfloat16, None)
    """
    kind = device.type
    # The compiler of torch 2.6 cannot ask what is available; the devices that it compiles for have autocast.
    exists = kind != "meta" and (torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind))
    if not exists or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """``torch.mm`` in the dtype of its factors, also where a backward pass runs within autocast.

    Args:
        a: ``[M, K]``.
        b: ``[K, N]``, the dtype of ``a``.

    Returns:
        ``[M, N]``, the dtype of ``a``.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     multiply(torch.eye(2), torch.eye(2)).dtype
        torch.float32
    """
    if autocast_dtype(a.device) is None:
        return torch.mm(a, b)
    with torch.autocast(a.device.type, enabled=False):
        return torch.mm(a, b)


def without_autocast(run: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make an operation's implementation keep the dtypes that it declares: autocast is off while it runs.

    Args:
        run: an implementation whose first argument is a tensor.

    Returns:
        The implementation, for tensors on any device.

    Example:
        >>> square = without_autocast(lambda a: torch.mm(a, a))
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     square(torch.eye(2)).dtype
        torch.float32
    """

    @functools.wraps(run)
    def run_without(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        tensor = arguments[0]
        if not isinstance(tensor, Tensor) or autocast_dtype(tensor.device) is None:
            return run(*arguments, **named)
        with torch.autocast(tensor.device.type, enabled=False):
            return run(*arguments, **named)

    return run_without
