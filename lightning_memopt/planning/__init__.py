"""Decide what each region of a model keeps, apply the decision, take it back."""

from lightning_memopt.observing.model_state import unchanged
from lightning_memopt.observing.regions import (
    FoundRegions,
    Region,
    find_targets,
    is_multistep_neuron,
    is_neuron,
    split_into_children,
)
from lightning_memopt.planning.apply import applied_plan, apply_plan, remove_plan
from lightning_memopt.planning.batch_size import find_batch_size
from lightning_memopt.planning.optimize import optimize_memory
from lightning_memopt.planning.plan import Plan, RegionPlan, Trial
from lightning_memopt.planning.within_budget import MemoryBudgetError

__all__ = [
    "FoundRegions",
    "MemoryBudgetError",
    "Plan",
    "Region",
    "RegionPlan",
    "Trial",
    "applied_plan",
    "apply_plan",
    "find_batch_size",
    "find_targets",
    "is_multistep_neuron",
    "is_neuron",
    "optimize_memory",
    "remove_plan",
    "split_into_children",
    "unchanged",
]
