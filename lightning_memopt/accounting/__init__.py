"""Where the bytes of training go: estimates, suggestions, pictures of steps and plans."""

from lightning_memopt.accounting.estimate import STRATEGIES, estimate_memory
from lightning_memopt.accounting.html_report import comparison_table, report_json, report_summary, write_report
from lightning_memopt.accounting.optimizers import OPTIMIZERS, OptimizerRow, optimizer_row, optimizer_state_bytes
from lightning_memopt.accounting.plot_breakdown import plot_breakdown
from lightning_memopt.accounting.plots import plot_frontier, plot_plan, plot_timeline
from lightning_memopt.accounting.suggest import Suggestion, suggest, suggestion_table
from lightning_memopt.accounting.transformer import TRANSFORMERS, Transformer, parameter_count, parameter_shapes
from lightning_memopt.measuring.consumers import CONSUMERS, MemoryBreakdown, MemoryEstimate, MemoryPhase

__all__ = [
    "CONSUMERS",
    "MemoryBreakdown",
    "MemoryEstimate",
    "MemoryPhase",
    "OPTIMIZERS",
    "OptimizerRow",
    "STRATEGIES",
    "Suggestion",
    "TRANSFORMERS",
    "Transformer",
    "comparison_table",
    "estimate_memory",
    "optimizer_row",
    "optimizer_state_bytes",
    "parameter_count",
    "parameter_shapes",
    "plot_breakdown",
    "plot_frontier",
    "plot_plan",
    "plot_timeline",
    "report_json",
    "report_summary",
    "suggest",
    "suggestion_table",
    "write_report",
]
