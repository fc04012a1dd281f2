"""Pictures of the bytes alive over one step, of the time that fewer of them cost, and of both for a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memopt.accounting.colors import CONSUMER_COLORS
from lightning_memopt.measuring import StepMemory
from lightning_memopt.planning.apply import as_plan
from lightning_memopt.planning.memory_budget import budget_bytes
from lightning_memopt.planning.plan import BytesAlive, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_frontier", "plot_plan", "plot_timeline"]

_MIB = 2**20
# Names that are written along the axis of positions.
_TICKS = 16
_LONGEST_NAME = 24


def plot_timeline(
    reports: Mapping[str, StepMemory], path: str | Path | None = None, *, budget: int | str | None = None
) -> Figure:
    """Draw the bytes alive over one step, one labelled curve per report, and mark the peak of each.

    The horizontal axis is the fraction of the step from 0 to 1, so that steps of different length lie over each
    other; the vertical axis is in MiB (2**20 bytes) and starts at zero. Reports that all say who held the bytes
    (``measure_memory(step, model=...)``) are drawn side by side instead, with the consumers stacked.

    Args:
        reports: Label (for example ``"before"``, ``"after"``) to measured step. Each needs a timeline, which
            :func:`~lightning_memopt.measuring.measure_memory` records on the CPU.
        path: Where to save the picture; the suffix chooses the format. ``None`` saves nothing. Missing folders are
            made.
        budget: Bytes that the step may take, an int or text (``"12GiB"``), drawn as a line across. ``None`` draws none.

    Returns:
        The ``matplotlib.figure.Figure``. It belongs to no window and needs no display.

    Raises:
        ValueError: If there are no reports, one has no timeline, or the budget is no size.
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
    limit = None if budget is None else budget_bytes(budget)
    stacked = all(report.by_consumer for report in reports.values())
    figure, panels = _figure("plot_timeline()", columns=len(reports) if stacked else 1)
    highest = max(limit or 0, *(report.peak_bytes for report in reports.values()))
    for axes in panels:
        axes.set_xlim(0.0, 1.0)
        axes.set_ylim(0.0, 1.12 * highest / _MIB or None)
        axes.set_xlabel("fraction of the step")
        axes.grid(alpha=0.3)
        if limit is not None:
            axes.axhline(limit / _MIB, linestyle="--", color="black", linewidth=1.0, label=_budget_label(limit))
    panels[0].set_ylabel("bytes alive [MiB]")
    if stacked:
        _draw_consumers(panels, reports)
    else:
        for label, report in reports.items():
            _draw_curve(panels[0], label, report)
        panels[0].legend(loc="upper left")
    _save(figure, path)
    return figure


def plot_frontier(
    points: Mapping[str, Sequence[tuple[float, float]]] | Sequence[tuple[float, float]],
    path: str | Path | None = None,
    *,
    chosen: tuple[float, float] | None = None,
    budget: int | str | None = None,
    time_label: str = "step time [ms]",
    axes: Axes | None = None,
) -> Figure:
    """Draw what a step takes in memory and in time, one labelled curve per series of points.

    The horizontal axis is the peak in MiB (2**20 bytes), the vertical one the time: a point is better than all those
    above it and to its right. A curve passes through its points from the smallest peak to the largest.

    Args:
        points: ``(peak in bytes, time)`` of each plan; or label (for example of a library) to such a series.
        path: Where to save the picture; the suffix chooses the format. ``None`` saves nothing. Missing folders are
            made.
        chosen: The point to mark as the one that was taken.
        budget: Bytes that a step may take, an int or text (``"12GiB"``), drawn as a line. ``None`` draws none.
        time_label: What the time is, and its unit.
        axes: Where to draw, as one panel of a figure of yours. ``None``: in a new figure.

    Returns:
        The ``matplotlib.figure.Figure``, that of ``axes``. A new one belongs to no window and needs no display.

    Raises:
        ValueError: If there is no point, or a series without one, or the budget is no size.
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
    limit = None if budget is None else budget_bytes(budget)
    if axes is None:
        _, (axes,) = _figure("plot_frontier()")
    _draw_frontier(axes, series, None if limit is None else (limit, _budget_label(limit)))
    if chosen is not None:
        _mark(axes, chosen, f"chosen: {chosen[0] / _MIB:.1f} MiB")
    axes.set_ylabel(time_label)
    axes.legend(loc="best")
    figure = axes.get_figure(root=True)
    assert figure is not None
    _save(figure, path)
    return figure


def plot_plan(plan: Plan | str | Path, path: str | Path | None = None) -> Figure:
    """Draw what a plan for a byte budget does: bytes alive over the step, and what they were traded for.

    On the left the bytes alive at every position of the step, forward from left to the middle, then backward: of the
    plain model and under the plan as predicted, and under the plan as measured. On the right the least time that plans
    of each peak add to a step, as a share of a plain one, and the plan that was chosen. Both in MiB (2**20 bytes).

    Args:
        plan: A plan that was made for a ``memory_budget``, or the path of its file; no model is needed.
        path: Where to save the picture; the suffix chooses the format. ``None`` saves nothing. Missing folders are
            made.

    Returns:
        The ``matplotlib.figure.Figure``. It belongs to no window and needs no display.

    Raises:
        FileNotFoundError: If there is no plan file of that name.
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If the plan was not made for a budget, so that it holds no bytes to draw.

    Example:
        >>> import torch
        >>> from lightning_memopt.planning import applied_plan, optimize_memory
        >>> model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4)))
        >>> data = torch.rand(5, 3, 8)
        >>> model = optimize_memory(model, example_forward=lambda model: model(data), memory_budget="8 GiB")
        >>> [axes.get_ylabel() for axes in plot_plan(applied_plan(model)).axes]
        ['bytes alive [MiB]', 'bytes moved added to a step [%]']
    """
    plan = as_plan(plan)
    if plan.alive is None or not plan.frontier:
        raise ValueError(
            "plot_plan() draws what a plan for a byte budget keeps of the step, and this plan keeps none: it was made "
            f"by level {plan.level}, or by an older version. Make it with memory_budget=..."
        )
    figure, (left, right) = _figure("plot_plan()", columns=2)
    budget = None
    if plan.memory_budget is not None:
        allowed = plan.memory_budget - plan.reserved_bytes
        less = " less the optimizer's state" if plan.reserved_bytes else ""
        budget = (allowed, f"budget{less} {allowed / _MIB:.1f} MiB")
    _draw_positions(left, plan.alive, budget)
    points = {(peak, 100 * added) for peak, added in plan.frontier}
    chosen = None
    if plan.predicted_peak_bytes is not None and plan.added_share is not None:
        chosen = (plan.predicted_peak_bytes, 100 * plan.added_share)
        points.add(chosen)  # not all points are kept in a plan
    _draw_frontier(right, {"least added time, predicted": sorted(points)}, budget)
    _mark(right, (max(plan.alive.plain_bytes), 0.0), f"plain {max(plan.alive.plain_bytes) / _MIB:.1f} MiB", "s")
    if chosen is not None:
        _mark(right, chosen, f"chosen {chosen[0] / _MIB:.1f} MiB, {chosen[1]:+.1f} %")
    right.set_ylabel("time added to a step [%]")
    if plan.time_unit == "bytes moved":
        right.set_ylabel("bytes moved added to a step [%]")
    right.set_ylim(bottom=min(0.0, -0.03 * right.get_ylim()[1]))
    for axes in (left, right):
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize="small")
    _save(figure, path)
    return figure


def _draw_curve(axes: Axes, label: str, report: StepMemory) -> None:
    fractions, alive = _curve(report)
    (line,) = axes.step(fractions, alive, where="post", linewidth=1.2, label=label)
    _write_peak(axes, fractions, alive, line.get_color())


def _draw_consumers(panels: Sequence[Axes], reports: Mapping[str, StepMemory]) -> None:
    """The bytes of each consumer upon those of the ones before it, a panel for each report."""
    shown = [
        name for name in CONSUMER_COLORS if any(any(report.by_consumer.get(name, ())) for report in reports.values())
    ]
    for axes, (label, report) in zip(panels, reports.items(), strict=True):
        fractions, alive = _curve(report)
        sizes = [report.by_consumer.get(name, (0,) * len(report.timeline)) for name in shown]
        axes.stackplot(
            fractions,
            *([size / _MIB for size in (*each, each[-1])] for each in sizes),
            labels=[name.replace("_", " ") for name in shown],
            colors=[CONSUMER_COLORS[name] for name in shown],
            step="post",
            linewidth=0,
        )
        _write_peak(axes, fractions, alive, "black")
        axes.set_title(label)
    # In the order of the stack, from top to bottom.
    handles, names = panels[-1].get_legend_handles_labels()
    panels[-1].legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))


def _write_peak(axes: Axes, fractions: Sequence[float], alive: Sequence[float], color: Any) -> None:
    peak = max(range(len(alive)), key=alive.__getitem__)
    axes.plot(fractions[peak], alive[peak], marker="o", color=color)
    axes.annotate(
        f"{alive[peak]:.1f} MiB",
        (fractions[peak], alive[peak]),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        color=color,
    )


def _draw_positions(axes: Axes, alive: BytesAlive, budget: tuple[int, str] | None) -> None:
    """Bytes alive at each position of a step: forward, its end, backward, optimizer."""
    count = len(alive.plain_bytes)
    edges = [-0.5, *range(count), count - 0.5]
    for label, color, numbers in (
        ("plain, predicted", "tab:gray", alive.plain_bytes),
        ("planned, predicted", "tab:blue", alive.planned_bytes),
    ):
        mib = [size / _MIB for size in (numbers[0], *numbers, numbers[-1])]
        axes.plot(edges, mib, drawstyle="steps-mid", color=color, linewidth=1.4, label=label)
        axes.fill_between(edges, mib, step="mid", color=color, alpha=0.12, linewidth=0)
    measured = [(at, size / _MIB) for at, size in enumerate(alive.measured_bytes) if size is not None]
    if measured:
        axes.plot(*zip(*measured, strict=True), "o", color="tab:red", markersize=3, label="planned, measured")
    highest = max(*alive.plain_bytes, *alive.planned_bytes, *(size for size in alive.measured_bytes if size))
    if budget is not None:
        axes.axhline(budget[0] / _MIB, linestyle="--", color="black", linewidth=1.0, label=budget[1])
        # A budget far above the step would press it flat: the legend names it all the same.
        highest = max(highest, min(budget[0], 2 * highest))
    axes.set_ylim(0.0, 1.15 * highest / _MIB)
    axes.set_xlim(edges[0], edges[-1])
    end = len(alive.paths)
    axes.axvline(end, color="black", linewidth=0.6, alpha=0.5)
    for word, at, side in (("forward", end - 0.3, "right"), ("backward", end + 0.3, "left")):
        axes.annotate(word, (at, 0.98), xycoords=("data", "axes fraction"), ha=side, va="top", color="dimgray")
    names = [*alive.paths, "end of forward", *reversed(alive.paths), "optimizer"]
    every = -(-len(names) // _TICKS)
    shown = sorted({*range(end, -1, -every), *range(end, len(names), every)})
    axes.set_xticks(shown, [_shortened(names[at]) for at in shown], rotation=40, ha="right", fontsize="x-small")
    axes.set_ylabel("bytes alive [MiB]")
    axes.grid(alpha=0.3)


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"...{name[3 - _LONGEST_NAME :]}"


def _draw_frontier(
    axes: Axes, series: Mapping[str, Sequence[tuple[float, float]]], budget: tuple[int, str] | None
) -> None:
    """Curves of time over peak, and the budget as a line with its label."""
    for label, plans in series.items():
        peaks, times = zip(*sorted(plans), strict=True)
        axes.plot([peak / _MIB for peak in peaks], times, marker=".", linewidth=1.2, label=label)
    if budget is not None:
        axes.axvline(budget[0] / _MIB, linestyle="--", color="black", linewidth=1.0, label=budget[1])
    axes.set_xlabel("peak [MiB]")
    axes.grid(alpha=0.3)


def _mark(axes: Axes, point: tuple[float, float], label: str, marker: str = "o") -> None:
    peak, taken = point
    axes.plot(peak / _MIB, taken, marker, markersize=11, markerfacecolor="none", color="black", label=label)


def _figure(function: str, columns: int = 1) -> tuple[Figure, tuple[Axes, ...]]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{function} draws with matplotlib, which is not installed: pip install 'lightning-memopt[plots]'"
        ) from error

    # Not pyplot: it would keep the figure alive and may look for a display.
    figure = Figure(figsize=(8.0 if columns == 1 else 12.0, 4.5), layout="constrained")
    return figure, tuple(figure.add_subplot(1, columns, column + 1) for column in range(columns))


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
