"""Train in less GPU memory with one callback, with the same gradients, and see where the bytes go.

Add ``MemoryOptimization()`` and ``MemoryMonitor()`` to the callbacks of a Lightning ``Trainer``; nothing else changes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_memopt.version import __version__ as __version__

# Where each public name lives; it is imported when it is first used.
_HOME = {
    "MemoryOptimization": "callbacks",
    "MemoryMonitor": "callbacks",
    "optimize_memory": "planning",
    "find_batch_size": "planning",
    "Plan": "planning",
    "MemoryBudgetError": "planning",
    "apply_plan": "planning",
    "applied_plan": "planning",
    "remove_plan": "planning",
    "checkpoint": "checkpointing",
    "checkpoint_module": "checkpointing",
    "unwrap_module": "checkpointing",
    "SpikeCompressor": "checkpointing",
    "BitSpikeCompressor": "checkpointing",
    "BooleanSpikeCompressor": "checkpointing",
    "Uint8SpikeCompressor": "checkpointing",
    "SparseSpikeCompressor": "checkpointing",
    "IntegerSpikeCompressor": "checkpointing",
    "NonBinarySpikeError": "checkpointing",
    "measure_memory": "measuring",
    "estimate_memory": "accounting",
    "IFLinear": "layers",
    "LIFLinear": "layers",
    "fuse_neurons": "fused_neurons",
    "unfuse_neurons": "fused_neurons",
}
_MODULES = ("functional", "surrogate")

if TYPE_CHECKING:
    from lightning_memopt import functional as functional
    from lightning_memopt import surrogate as surrogate
    from lightning_memopt.accounting import estimate_memory
    from lightning_memopt.callbacks import MemoryMonitor, MemoryOptimization
    from lightning_memopt.checkpointing import (
        BitSpikeCompressor,
        BooleanSpikeCompressor,
        IntegerSpikeCompressor,
        NonBinarySpikeError,
        SparseSpikeCompressor,
        SpikeCompressor,
        Uint8SpikeCompressor,
        checkpoint,
        checkpoint_module,
        unwrap_module,
    )
    from lightning_memopt.fused_neurons import fuse_neurons, unfuse_neurons
    from lightning_memopt.layers import IFLinear, LIFLinear
    from lightning_memopt.measuring import measure_memory
    from lightning_memopt.planning import (
        MemoryBudgetError,
        Plan,
        applied_plan,
        apply_plan,
        find_batch_size,
        optimize_memory,
        remove_plan,
    )

__all__ = [
    "BitSpikeCompressor",
    "BooleanSpikeCompressor",
    "IFLinear",
    "IntegerSpikeCompressor",
    "LIFLinear",
    "MemoryBudgetError",
    "MemoryMonitor",
    "MemoryOptimization",
    "NonBinarySpikeError",
    "Plan",
    "SparseSpikeCompressor",
    "SpikeCompressor",
    "Uint8SpikeCompressor",
    "applied_plan",
    "apply_plan",
    "checkpoint",
    "checkpoint_module",
    "estimate_memory",
    "find_batch_size",
    "functional",
    "fuse_neurons",
    "measure_memory",
    "optimize_memory",
    "remove_plan",
    "surrogate",
    "unfuse_neurons",
    "unwrap_module",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
