from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memopt.accounting import plot_frontier, plot_timeline
from lightning_memopt.measuring import MemoryPoint, StepMemory, measure_memory

MIB = 2**20


def _report(*points: tuple[float, int]) -> StepMemory:
    alive = [b for _, b in points]
    return StepMemory(
        max(alive), alive[0], alive[-1], points[-1][0], "cpu", tuple(MemoryPoint(t, b) for t, b in points)
    )


def test_each_report_is_a_labelled_curve_in_mib_over_the_fraction_of_its_step() -> None:
    plain = _report((0.0, 10 * MIB), (5.0, 50 * MIB), (20.0, 12 * MIB))
    optimized = _report((0.0, 10 * MIB), (10.0, 20 * MIB), (40.0, 12 * MIB))
    axes = plot_timeline({"plain": plain, "optimized": optimized}).axes[0]
    curves = {line.get_label(): line for line in axes.get_lines() if not str(line.get_label()).startswith("_")}
    assert list(curves) == ["plain", "optimized"]
    assert list(curves["plain"].get_xdata()) == [0.0, 0.25, 1.0, 1.0]
    assert list(curves["plain"].get_ydata()) == [10.0, 50.0, 12.0, 12.0]
    assert list(curves["optimized"].get_xdata()) == [0.0, 0.25, 1.0, 1.0]
    assert list(curves["optimized"].get_ydata()) == [10.0, 20.0, 12.0, 12.0]
    assert {line.get_drawstyle() for line in curves.values()} == {"steps-post"}
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["plain", "optimized"]


def test_the_peak_of_each_curve_is_marked_and_written_in_mib() -> None:
    axes = plot_timeline(
        {"a": _report((0.0, 0), (1.0, 3 * MIB), (4.0, 0)), "b": _report((0.0, 0), (2.0, MIB // 2), (4.0, 0))}
    ).axes[0]
    marked = [(*line.get_xdata(), *line.get_ydata()) for line in axes.get_lines() if line.get_marker() == "o"]
    assert marked == [(0.25, 3.0), (0.5, 0.5)]
    assert [text.get_text() for text in axes.texts] == ["3.0 MiB", "0.5 MiB"]
    assert axes.get_xlim() == (0.0, 1.0)
    assert axes.get_ylim()[0] == 0.0
    assert axes.get_ylim()[1] > 3.0


def test_a_measured_step_draws_the_bytes_it_reported() -> None:
    report = measure_memory(lambda: torch.zeros(MIB).exp().sum(), device="cpu")
    curve = plot_timeline({"exp": report}).axes[0].get_lines()[0]
    assert max(curve.get_ydata()) * MIB == report.peak_bytes
    assert len(curve.get_ydata()) == len(report.timeline) + 1


def test_a_step_without_allocations_is_a_flat_line() -> None:
    axes = plot_timeline({"idle": _report((0.0, MIB))}).axes[0]
    assert list(axes.get_lines()[0].get_ydata()) == [1.0, 1.0]


def test_the_picture_is_saved_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "step.png"
    plot_timeline({"a": _report((0.0, 0), (1.0, MIB))}, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    plot_timeline({"a": _report((0.0, 0), (1.0, MIB))}, str(tmp_path / "step.svg"))
    assert "<svg" in (tmp_path / "step.svg").read_text()


def test_no_reports_and_reports_without_a_timeline_are_refused() -> None:
    with pytest.raises(ValueError, match="given no report"):
        plot_timeline({})
    with pytest.raises(ValueError, match="'big', measured on cuda:0, has no timeline"):
        plot_timeline({"big": StepMemory(2, 1, 1, 1.0, "cuda:0")})


def test_the_budget_is_a_line_across_the_step_and_always_in_sight() -> None:
    after = _report((0.0, MIB), (1.0, 3 * MIB), (2.0, MIB))
    axes = plot_timeline({"after": after}, budget=8 * MIB).axes[0]
    line = next(line for line in axes.get_lines() if line.get_label() == "budget 8.0 MiB")
    assert list(line.get_ydata()) == [8.0, 8.0]
    assert axes.get_ylim()[1] > 8.0
    assert not any("budget" in str(line.get_label()) for line in plot_timeline({"after": after}).axes[0].get_lines())


def test_a_frontier_goes_from_the_smallest_peak_to_the_largest() -> None:
    ours = [(4 * MIB, 1.0), (MIB, 3.0), (2 * MIB, 2.0)]
    axes = plot_frontier({"ours": ours, "other": [(3 * MIB, 2.5)]}, chosen=(2 * MIB, 2.0), budget=3 * MIB).axes[0]
    curves = {str(line.get_label()): line for line in axes.get_lines()}
    assert list(curves) == ["ours", "other", "budget 3.0 MiB", "chosen: 2.0 MiB"]
    assert list(curves["ours"].get_xdata()) == [1.0, 2.0, 4.0]
    assert list(curves["ours"].get_ydata()) == [3.0, 2.0, 1.0]
    assert list(curves["budget 3.0 MiB"].get_xdata()) == [3.0, 3.0]
    assert (list(curves["chosen: 2.0 MiB"].get_xdata()), list(curves["chosen: 2.0 MiB"].get_ydata())) == ([2.0], [2.0])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("peak [MiB]", "step time [ms]")


def test_a_frontier_is_saved_and_names_its_unit_of_time(tmp_path: Path) -> None:
    figure = plot_frontier([(MIB, 1.0)], tmp_path / "new" / "frontier.png", time_label="bytes moved")
    assert (tmp_path / "new" / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert figure.axes[0].get_ylabel() == "bytes moved"


@pytest.mark.parametrize(("points", "message"), [([], "no point"), ({}, "no point"), ({"a": []}, "no point for 'a'")])
def test_a_frontier_without_points_is_refused(points: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot_frontier(points)


def test_without_matplotlib_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_import = builtins.__import__

    def without_matplotlib(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return plain_import(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-memopt\[plots\]"):
        plot_timeline({"a": _report((0.0, 0), (1.0, MIB))})
    with pytest.raises(ModuleNotFoundError, match=r"plot_frontier.*lightning-memopt\[plots\]"):
        plot_frontier([(MIB, 1.0)])
