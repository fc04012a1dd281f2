"""Callbacks of the Lightning Trainer. The only package here that imports Lightning."""

from __future__ import annotations

from lightning_memopt.callbacks.measured_step import MeasuredStep
from lightning_memopt.callbacks.memory_monitor import MemoryMonitor
from lightning_memopt.callbacks.memory_optimization import MemoryOptimization

__all__ = ["MeasuredStep", "MemoryMonitor", "MemoryOptimization"]
