"""Making an operation known to torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def register(library: torch.library.Library, name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register one implementation for CPU and CUDA tensors, and what the compiler takes in its place.

    Args:
        library: where the operation's schema was defined, in the namespace ``lightning_memopt``.
        name: of the operation.
        run: decides by itself between kernel and reference, by the device of its tensors.
        fake: returns results of the right shapes, dtypes and strides without values, and repeats the checks of ``run``.
    """
    for key in ("CPU", "CUDA"):
        library.impl(name, run, key)
    torch.library.register_fake(f"lightning_memopt::{name}", fake, lib=library)
