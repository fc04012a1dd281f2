"""Picture of who holds the bytes: a stacked bar for each moment, step or model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_memopt.accounting.colors import CONSUMER_COLORS
from lightning_memopt.accounting.plots import _budget_label, _figure, _save
from lightning_memopt.measuring.amounts import in_mib
from lightning_memopt.measuring.consumers import CONSUMERS, MemoryBreakdown
from lightning_memopt.planning.memory_budget import budget_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_breakdown"]

_MIB = 2**20
_LABELLED_SHARE = 0.04
"""Parts of a bar below this share of the tallest one are too thin for a number."""


def plot_breakdown(
    breakdowns: Mapping[str, MemoryBreakdown], path: str | Path | None = None, *, budget: int | str | None = None
) -> Figure:
    """Draw the consumers of memory as stacked bars, one for each labelled breakdown.

    Before and after a change, the moments of one step (``{phase.name: phase.breakdown for phase in estimate.phases}``),
    or one model under several optimizers: whatever is to be compared. The vertical axis is in MiB (2**20 bytes).

    Args:
        breakdowns: Label to breakdown, from left to right.
        path: Where to save the picture; the suffix chooses the format. ``None`` saves nothing. Missing folders are
            made.
        budget: Bytes that there are, an int or text (``"12GiB"``), drawn as a line across. ``None`` draws none.

    Returns:
        The ``matplotlib.figure.Figure``. It belongs to no window and needs no display.

    Raises:
        TypeError: If the breakdowns are something else.
        ValueError: If there are no breakdowns, or the budget is no size.
        ModuleNotFoundError: If matplotlib is not installed.

    Example:
        >>> before = MemoryBreakdown(parameters=10 * 2**20, activations=30 * 2**20)
        >>> after = MemoryBreakdown(parameters=10 * 2**20, activations=5 * 2**20)
        >>> figure = plot_breakdown({"before": before, "after": after})
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['activations', 'parameters']
    """
    if not isinstance(breakdowns, Mapping) or not all(
        isinstance(breakdown, MemoryBreakdown) for breakdown in breakdowns.values()
    ):
        raise TypeError(
            "plot_breakdown() takes a mapping of label to MemoryBreakdown, such as {'peak': estimate.peak}; got "
            f"{_types_of(breakdowns)}"
        )
    if not breakdowns:
        raise ValueError("plot_breakdown() was given no breakdown; pass {'label': MemoryBreakdown(...)}")
    limit = None if budget is None else budget_bytes(budget)
    figure, (axes,) = _figure("plot_breakdown()")
    labels = list(breakdowns)
    tallest = max(breakdown.total_bytes for breakdown in breakdowns.values())
    heights = [0] * len(labels)
    for consumer in CONSUMERS:
        sizes = [getattr(breakdown, consumer) for breakdown in breakdowns.values()]
        if not any(sizes):
            continue
        bars = axes.bar(
            range(len(labels)),
            [size / _MIB for size in sizes],
            bottom=[height / _MIB for height in heights],
            width=0.6,
            color=CONSUMER_COLORS[consumer],
            label=consumer.replace("_", " "),
        )
        numbers = [in_mib(size) if size >= _LABELLED_SHARE * tallest else "" for size in sizes]
        axes.bar_label(bars, numbers, label_type="center", color="black", fontsize="small")
        heights = [height + size for height, size in zip(heights, sizes, strict=True)]
    for position, height in enumerate(heights):
        axes.annotate(
            f"{in_mib(height)} MiB",
            (position, height / _MIB),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontweight="bold",
        )
    if limit is not None:
        axes.axhline(limit / _MIB, linestyle="--", color="black", linewidth=1.0, label=_budget_label(limit))
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_ylim(0.0, 1.1 * max(tallest, limit or 0) / _MIB or None)
    axes.set_ylabel("bytes alive [MiB]")
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    # In the order of the stack, from top to bottom.
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)
    return figure


def _types_of(given: object) -> str:
    if not isinstance(given, Mapping):
        return type(given).__name__
    return f"a mapping to {', '.join(dict.fromkeys(type(value).__name__ for value in given.values()))}"
