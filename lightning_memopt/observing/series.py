"""
Modules in series
=================

A stem such as ``maxpool(relu(bn(conv(x))))`` exists in a ``forward`` only: no module holds its layers. Each of them
alone has little to recompute, since what it is given is what the one before it returned, and somebody saves that.
Together they need no more than what the first was given: under ``recompute_cheap`` recipes reach from layer to layer.

So where a call is given the output of the call before it and nothing else, both are also looked at as one region, a
*series*, whose only treatment is that each of its modules gets ``recompute_cheap``. It ends with the first call that
performs products, whose output would be stored anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


class Series(nn.Module):
    """Modules of which each is given what the one before it returned; the first takes any arguments."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.series = nn.ModuleList(modules)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the last one returns."""
        first, *others = self.series
        value = first(*args, **kwargs)
        for module in others:
            value = module(value)
        return value
