"""Pictures of the bytes alive over one step, and of the time that fewer of them cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_memopt.measuring import StepMemory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_frontier", "plot_timeline"]

_MIB = 2**20


def plot_timeline(
    reports: Mapping[str, StepMemory], path: str | Path | None = None, *, budget: int | None = None
) -> Figure:
    """Draw the bytes alive over one step, one labelled curve per report, and mark the peak of each.

    The horizontal axis is the fraction of the step from 0 to 1, so that steps of different length lie over each
    other; the vertical axis is in MiB (2**20 bytes) and starts at zero.

    Args:
        reports: Label (for example ``"before"``, ``"after"``) to measured step. Each needs a timeline, which
            :func:`~lightning_memopt.measuring.measure_memory` records on the CPU.
        path: Where to save the picture; the suffix chooses the format. ``None`` saves nothing. Missing folders are
            made.
        budget: Bytes that the step may take, drawn as a line across. ``None`` draws none.

    Returns:
        The ``matplotlib.figure.Figure``. It belongs to no window and needs no display.

    Raises:
        ValueError: If there are no reports, or one has no timeline.
        ModuleNotFoundError: If matplotlib is not installed.

    Example:
        >>> import torch
        >>> from lightning_memopt.measuring import measure_memory
        >>> report = measure_memory(lambda: torch.zeros(1000).exp(), device="cpu")
        >>> figure = plot_timeline({"exp": report})
        >>> figure.axes[0].get_ylabel()
        'bytes alive [MiB]'
    """
    if not reports:
        raise ValueError("plot_timeline() was given no report; pass {'label': measure_memory(step)}")
    for label, report in reports.items():
        if not report.timeline:
            raise ValueError(
                f"the report {label!r}, measured on {report.device}, has no timeline to draw: only the CPU records one."
                " Measure the same step with device='cpu'"
            )
    figure, axes = _figure("plot_timeline()")
    for label, report in reports.items():
        fractions, alive = _curve(report)
        (line,) = axes.step(fractions, alive, where="post", linewidth=1.2, label=label)
        peak = max(range(len(alive)), key=alive.__getitem__)
        axes.plot(fractions[peak], alive[peak], marker="o", color=line.get_color())
        axes.annotate(
            f"{alive[peak]:.1f} MiB",
            (fractions[peak], alive[peak]),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            color=line.get_color(),
        )
    if budget is not None:
        axes.axhline(budget / _MIB, linestyle="--", color="black", linewidth=1.0, label=_budget_label(budget))
    axes.set_xlim(0.0, 1.0)
    highest = max(budget or 0, *(report.peak_bytes for report in reports.values()))
    axes.set_ylim(0.0, 1.12 * highest / _MIB or None)
    axes.set_xlabel("fraction of the step")
    axes.set_ylabel("bytes alive [MiB]")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    _save(figure, path)
    return figure


def plot_frontier(
    points: Mapping[str, Sequence[tuple[float, float]]] | Sequence[tuple[float, float]],
    path: str | Path | None = None,
    *,
    chosen: tuple[float, float] | None = None,
    budget: int | None = None,
    time_label: str = "step time [ms]",
) -> Figure:
    """Draw what a step takes in memory and in time, one labelled curve per series of points.

    The horizontal axis is the peak in MiB (2**20 bytes), the vertical one the time: a point is better than all those
    above it and to its right. A curve passes through its points from the smallest peak to the largest.

    Args:
        points: ``(peak in bytes, time)`` of each plan; or label (for example of a library) to such a series.
        path: Where to save the picture; the suffix chooses the format. ``None`` saves nothing. Missing folders are
            made.
        chosen: The point to mark as the one that was taken.
        budget: Bytes that a step may take, drawn as a line. ``None`` draws none.
        time_label: What the time is, and its unit.

    Returns:
        The ``matplotlib.figure.Figure``. It belongs to no window and needs no display.

    Raises:
        ValueError: If there is no point, or a series without one.
        ModuleNotFoundError: If matplotlib is not installed.

    Example:
        >>> plans = [(300 * 2**20, 10.0), (200 * 2**20, 11.5), (150 * 2**20, 14.0)]
        >>> figure = plot_frontier(plans, chosen=plans[1], budget=220 * 2**20)
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['plans', 'budget 220.0 MiB', 'chosen: 200.0 MiB']
    """
    series = dict(points) if isinstance(points, Mapping) else {"plans": points}
    if not series or not all(series.values()):
        empty = ", ".join(repr(label) for label, those in series.items() if not those)
        raise ValueError(
            f"plot_frontier() was given no point{f' for {empty}' if empty else ''}; pass (peak in bytes, time) of at "
            "least one plan for each label"
        )
    figure, axes = _figure("plot_frontier()")
    for label, plans in series.items():
        peaks, times = zip(*sorted(plans), strict=True)
        axes.plot([peak / _MIB for peak in peaks], times, marker=".", linewidth=1.2, label=label)
    if budget is not None:
        axes.axvline(budget / _MIB, linestyle="--", color="black", linewidth=1.0, label=_budget_label(budget))
    if chosen is not None:
        peak, taken = chosen
        label = f"chosen: {peak / _MIB:.1f} MiB"
        axes.plot(peak / _MIB, taken, "o", markersize=11, markerfacecolor="none", color="black", label=label)
    axes.set_xlabel("peak [MiB]")
    axes.set_ylabel(time_label)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    _save(figure, path)
    return figure


def _figure(function: str) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{function} draws with matplotlib, which is not installed: pip install 'lightning-memopt[plots]'"
        ) from error

    # Not pyplot: it would keep the figure alive and may look for a display.
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    return figure, figure.add_subplot()


def _budget_label(budget: int) -> str:
    return f"budget {budget / _MIB:.1f} MiB"


def _save(figure: Figure, path: str | Path | None) -> None:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def _curve(report: StepMemory) -> tuple[list[float], list[float]]:
    """Fractions of the step and MiB alive, prolonged to the end of the step."""
    times = [point.time_ms for point in report.timeline]
    alive = [point.bytes / _MIB for point in report.timeline]
    end = times[-1] or 1.0  # a step without allocations is one point at time zero
    return [time / end for time in times] + [1.0], [*alive, alive[-1]]
