"""Pictures of the bytes alive over one step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_memopt.measuring import StepMemory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_timeline"]

_MIB = 2**20


def plot_timeline(reports: Mapping[str, StepMemory], path: str | Path | None = None) -> Figure:
    """Draw the bytes alive over one step, one labelled curve per report, and mark the peak of each.

    The horizontal axis is the fraction of the step from 0 to 1, so that steps of different length lie over each
    other; the vertical axis is in MiB (2**20 bytes) and starts at zero.

    Args:
        reports: Label (for example ``"plain"``, ``"optimized"``) to measured step. Each needs a timeline, which
            :func:`~lightning_memopt.measuring.measure_memory` records on the CPU.
        path: Where to save the picture; the suffix chooses the format. ``None`` saves nothing. Missing folders are
            made.

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
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot_timeline() draws with matplotlib, which is not installed: pip install 'lightning-memopt[plots]'"
        ) from error

    # Not pyplot: it would keep the figure alive and may look for a display.
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
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
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(0.0, 1.12 * max(report.peak_bytes for report in reports.values()) / _MIB or None)
    axes.set_xlabel("fraction of the step")
    axes.set_ylabel("bytes alive [MiB]")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure


def _curve(report: StepMemory) -> tuple[list[float], list[float]]:
    """Fractions of the step and MiB alive, prolonged to the end of the step."""
    times = [point.time_ms for point in report.timeline]
    alive = [point.bytes / _MIB for point in report.timeline]
    end = times[-1] or 1.0  # a step without allocations is one point at time zero
    return [time / end for time in times] + [1.0], [*alive, alive[-1]]
