"""
What a memory budget is meant to keep
=====================================

Each gate is computed from the rows of one run of ``budgets.py``, all models together unless it names one.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

BLOCK_BUDGET = "105MiB"
"""Budget for the block model, whose plain step takes 461 MiB; the published best is 248.8 MiB."""
NO_PRODUCTS = "no extra products"
"""The plan with the least peak among those that repeat no matrix product and no convolution."""

_MOST_GAP = 0.05
_MOST_PREDICTION_ERROR = 0.02
_MOST_STEPS = 3
# A product that is cut along time sums in another order.
_MOST_GRADIENT_DIFFERENCE = 1e-6
_MOST_BLOCK_FLOPS = 0.34
_LEAST_SHARE_GONE = 0.35
_MOST_SOLVER_SECONDS = 1.0
# Counts of operations that differ by less than this are the same: a plan may differ in a product of a few numbers.
_SAME_FLOPS = 1e-9


class MeasuredRow(Protocol):
    """What gates read of a row."""

    model: str
    asked: str
    budget_bytes: int | None
    predicted_peak: int | None
    measured_peak: int | None
    utilisation: float | None
    added_time: float | None
    extra_flops_ratio: float | None
    steps_measured: int | None
    max_rel_grad_diff: float | None
    held_bytes: int | None
    plain_held_bytes: int | None
    cuts_time: bool | None
    error: str | None


@dataclass(frozen=True)
class Gate:
    """A promise and what a run says about it."""

    gate: str
    target: str
    measured: str
    kept: bool | None
    """None: this run says nothing about it."""
    misses: tuple[str, ...] = ()
    """The rows that break it."""


def assess_gates(rows: Sequence[MeasuredRow], *, solver_seconds: float | None, exact: bool) -> list[Gate]:
    """Compare the rows of a run with what is promised.

    Args:
        rows: all rows of the run.
        solver_seconds: time to solve a step of 1,000 regions.
        exact: whether the plain step itself gives the same gradients every time, bit for bit (fp32 on a CPU).
    """
    spread = [row for row in rows if _is_point(row)]
    planned = [row for row in rows if row.error is None and row.budget_bytes is not None]
    gates = [
        _all(
            "a plan for every budget from the least peak on",
            [(row.error is None, f"{_name(row)}: {row.error}") for row in spread],
        ),
        _all(
            "measured peak <= budget",
            [(row.measured_peak <= row.budget_bytes, f"{_name(row)}: {_over(row)}") for row in planned],
        ),
        _median(
            "(budget - measured) / budget",
            _MOST_GAP,
            [(row, 1 - row.utilisation) for row in spread if row.utilisation is not None],
        ),
        _median(
            "|predicted / measured - 1| of the peak",
            _MOST_PREDICTION_ERROR,
            [(row, abs(row.predicted_peak / row.measured_peak - 1)) for row in planned],
        ),
        _never_rises("extra FLOPs", [row for row in planned if _is_point(row)], "extra_flops_ratio"),
        _never_rises("predicted time", [row for row in planned if _is_point(row)], "added_time"),
        _all(
            f"at most {_MOST_STEPS} measured steps",
            [(row.steps_measured <= _MOST_STEPS, f"{_name(row)}: {row.steps_measured}") for row in planned],
        ),
    ]
    if exact:
        gates.append(_gradients([row for row in rows if row.error is None]))
    return [
        *gates,
        _block(rows),
        *(_share_gone(model, rows) for model in ("gpt", "vgg")),
        _solver(solver_seconds),
    ]


def _is_point(row: MeasuredRow) -> bool:
    """Whether the row is one of the budgets between the least and the plain peak."""
    return row.asked not in (BLOCK_BUDGET, NO_PRODUCTS)


def _name(row: MeasuredRow) -> str:
    return f"{row.model} {row.asked}"


def _over(row: MeasuredRow) -> str:
    return f"{row.measured_peak - row.budget_bytes:+,} bytes"


def _all(gate: str, checked: Sequence[tuple[bool, str]]) -> Gate:
    misses = tuple(words for kept, words in checked if not kept)
    measured = f"{len(checked) - len(misses)} of {len(checked)} rows"
    return Gate(gate, "all rows", measured, not misses if checked else None, misses)


def _median(gate: str, most: float, values: Sequence[tuple[MeasuredRow, float]]) -> Gate:
    """The median over all rows, and beside it that of each model."""
    if not values:
        return Gate(f"median {gate}", f"<= {most:.0%}", "no rows", None)
    median = statistics.median(value for _, value in values)
    by_model: dict[str, list[float]] = {}
    for row, value in values:
        by_model.setdefault(row.model, []).append(value)
    words = ", ".join(f"{model} {statistics.median(of_model):.2%}" for model, of_model in by_model.items())
    above = tuple(f"{_name(row)}: {value:.2%}" for row, value in values if value > most)
    return Gate(f"median {gate}", f"<= {most:.0%}", f"{median:.2%} ({words})", median <= most, above)


def _never_rises(what: str, rows: Sequence[MeasuredRow], column: str) -> Gate:
    """Of two budgets of one model, the larger one must not cost more."""
    checked = []
    for _, group in itertools.groupby(sorted(rows, key=lambda row: row.model), key=lambda row: row.model):
        ordered = sorted(group, key=lambda row: row.budget_bytes or 0)
        for tighter, wider in itertools.pairwise(ordered):
            before, after = getattr(tighter, column), getattr(wider, column)
            words = f"{_name(wider)}: {before:.4%} -> {after:.4%} of a plain step"
            checked.append((after <= before + _SAME_FLOPS, words))
    gate = _all(f"{what} never rise with the budget", checked)
    return Gate(gate.gate, "no rise", gate.measured.replace("rows", "pairs"), gate.kept, gate.misses)


def _gradients(rows: Sequence[MeasuredRow]) -> Gate:
    checked = []
    for row in rows:
        difference = row.max_rel_grad_diff
        most = _MOST_GRADIENT_DIFFERENCE if row.cuts_time else 0.0
        checked.append(
            (difference <= most, f"{_name(row)}: {difference:.1e}{', cut along time' * bool(row.cuts_time)}")
        )
    gate = _all("gradients equal bit for bit, within 1e-6 where time is cut", checked)
    worst = max((row.max_rel_grad_diff for row in rows), default=0.0)
    return Gate(gate.gate, gate.target, f"{gate.measured}, worst {worst:.1e}", gate.kept, gate.misses)


def _block(rows: Sequence[MeasuredRow]) -> Gate:
    gate, target = f"block model within {BLOCK_BUDGET}", f"met, extra FLOPs <= {_MOST_BLOCK_FLOPS:.0%}"
    row = next((row for row in rows if (row.model, row.asked) == ("block", BLOCK_BUDGET)), None)
    if row is None:
        return Gate(gate, target, "not measured", None)
    if row.error is not None:
        return Gate(gate, target, row.error, kept=False)
    kept = row.measured_peak <= row.budget_bytes and row.extra_flops_ratio <= _MOST_BLOCK_FLOPS
    measured = f"{row.measured_peak / 2**20:.1f} MiB, extra FLOPs {row.extra_flops_ratio:.1%}"
    return Gate(gate, target, measured, kept)


def _share_gone(model: str, rows: Sequence[MeasuredRow]) -> Gate:
    """Whether so much can be freed without a product; and what the plan for a budget pays that frees it.

    A budget asks for the least time, and repeating a small product may take less than moving many bytes. So the plan
    without products is asked for by itself.
    """
    gate = f"{model}: activation bytes gone without an extra product or convolution"
    target = f">= {_LEAST_SHARE_GONE:.0%}"
    without = [
        row
        for row in rows
        if row.model == model and row.error is None and abs(row.extra_flops_ratio or 0.0) <= _SAME_FLOPS
    ]
    if not any(row.asked == NO_PRODUCTS for row in rows if row.model == model):
        return Gate(gate, target, "not measured", None)
    shares = [(1 - row.held_bytes / row.plain_held_bytes, row) for row in without]
    if not shares:
        return Gate(gate, target, "every plan has extra products", kept=False)
    share, best = max(shares, key=lambda pair: pair[0])
    kept = share >= _LEAST_SHARE_GONE
    words = f"{share:.1%} ({best.asked}, peak {best.measured_peak / 2**20:.1f} MiB)"
    of_budgets = [row for row in rows if row.model == model and row.error is None and _is_point(row)]
    enough = [row for row in of_budgets if 1 - row.held_bytes / row.plain_held_bytes >= _LEAST_SHARE_GONE]
    if enough:
        chosen = min(enough, key=lambda row: row.extra_flops_ratio)
        gone = 1 - chosen.held_bytes / chosen.plain_held_bytes
        words += f"; as a budget chooses {gone:.1%} with {chosen.extra_flops_ratio:.2%} more FLOPs ({chosen.asked})"
    return Gate(gate, target, words, kept)


def _solver(seconds: float | None) -> Gate:
    gate, target = "1,000 regions of 8 choices solved", f"< {_MOST_SOLVER_SECONDS:.0f} s"
    if seconds is None:
        return Gate(gate, target, "not measured", None)
    return Gate(gate, target, f"{seconds:.2f} s", seconds < _MOST_SOLVER_SECONDS)
