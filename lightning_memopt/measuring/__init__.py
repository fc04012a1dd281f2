"""Peak memory and time of one step, on any device, and what an optimizer will hold."""

from lightning_memopt.measuring.allocation_events import AllocationRecorder, measuring_repeatedly
from lightning_memopt.measuring.consumers import CONSUMERS, MemoryBreakdown, MemoryEstimate, MemoryPhase
from lightning_memopt.measuring.marks import MemoryMark, mark_memory
from lightning_memopt.measuring.optimizer_state import OptimizerBytes, optimizer_bytes
from lightning_memopt.measuring.process import process_memory
from lightning_memopt.measuring.step_memory import AttributedStep, MemoryPoint, StepMemory, measure_memory

__all__ = [
    "CONSUMERS",
    "MemoryBreakdown",
    "MemoryEstimate",
    "MemoryPhase",
    "AllocationRecorder",
    "AttributedStep",
    "MemoryMark",
    "MemoryPoint",
    "OptimizerBytes",
    "StepMemory",
    "mark_memory",
    "measure_memory",
    "measuring_repeatedly",
    "optimizer_bytes",
    "process_memory",
]
