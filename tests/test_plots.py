from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from lightning_memopt.accounting import plot_frontier, plot_plan, plot_timeline
from lightning_memopt.measuring import MemoryPoint, StepMemory, measure_memory
from lightning_memopt.planning import Plan
from lightning_memopt.planning.plan import BytesAlive

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
    axes = plot_timeline({"after": after}, budget="8MiB").axes[0]
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


def test_a_frontier_is_drawn_in_a_panel_of_a_given_figure_and_no_other() -> None:
    figure = Figure()
    panel, other = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    assert plot_frontier([(MIB, 1.0)], axes=panel) is figure
    assert len(figure.axes) == 2
    assert panel.has_data()
    assert not other.has_data()


@pytest.mark.parametrize(("points", "message"), [([], "no point"), ({}, "no point"), ({"a": []}, "no point for 'a'")])
def test_a_frontier_without_points_is_refused(points: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot_frontier(points)


def _plan(**changes: Any) -> Plan:
    alive = BytesAlive(
        paths=("blocks.0", "blocks.1"),
        plain_bytes=tuple(size * MIB for size in (4, 8, 9, 10, 6, 2)),
        planned_bytes=tuple(size * MIB for size in (3, 4, 4, 7, 5, 2)),
        measured_bytes=(3 * MIB, 4 * MIB, None, 6 * MIB, 5 * MIB, None),
    )
    content: dict[str, Any] = {
        "memory_budget": 8 * MIB,
        "predicted_peak_bytes": 7 * MIB,
        "peak_bytes_after": 6 * MIB,
        "time_unit": "ms",
        "plain_time": 20.0,
        "added_time": 1.0,
        "alive": alive,
        "frontier": ((5 * MIB, 0.5), (9 * MIB, 0.01)),
    }
    return Plan(regions=(), **{**content, **changes})


def test_a_plan_is_drawn_as_bytes_over_the_step_and_as_a_point_of_the_frontier() -> None:
    left, right = plot_plan(_plan()).axes
    curves = {str(line.get_label()): line for line in left.get_lines()}
    # Each position is a step of its own width, the first and the last one too.
    assert list(curves["plain, predicted"].get_ydata()) == [4, 4, 8, 9, 10, 6, 2, 2]
    assert list(curves["planned, predicted"].get_xdata()) == [-0.5, 0, 1, 2, 3, 4, 5, 5.5]
    assert list(curves["planned, measured"].get_xdata()) == [0, 1, 3, 4]
    assert list(curves["planned, measured"].get_ydata()) == [3, 4, 6, 5]
    assert list(curves["budget 8.0 MiB"].get_ydata()) == [8, 8]
    names = [label.get_text() for label in left.get_xticklabels()]
    assert names == ["blocks.0", "blocks.1", "end of forward", "blocks.1", "blocks.0", "optimizer"]
    assert left.get_ylim()[0] == 0.0
    points = {str(line.get_label()): line for line in right.get_lines()}
    # The plan lies on the curve, also where the file keeps other points of it.
    assert list(points["least added time, predicted"].get_xdata()) == [5, 7, 9]
    assert list(points["least added time, predicted"].get_ydata()) == [50, 5, 1]
    assert list(points["chosen 7.0 MiB, +5.0 %"].get_xdata()) == [7]
    assert list(points["plain 10.0 MiB"].get_ydata()) == [0]
    assert right.get_ylabel() == "time added to a step [%]"


def test_the_picture_of_a_plan_says_what_time_is_counted_in_and_what_is_reserved() -> None:
    left, right = plot_plan(_plan(time_unit="bytes moved", reserved_bytes=MIB)).axes
    assert right.get_ylabel() == "bytes moved added to a step [%]"
    labels = [str(line.get_label()) for line in left.get_lines()]
    assert "budget less the optimizer's state 7.0 MiB" in labels


def test_a_budget_far_above_the_step_does_not_press_it_flat() -> None:
    assert plot_plan(_plan(memory_budget=1000 * MIB)).axes[0].get_ylim()[1] < 30


def test_many_regions_keep_their_names_readable() -> None:
    count = 300
    paths = tuple(f"encoder.layers.{at}.attention.projection" for at in range(count))
    sizes = tuple(MIB * (at + 1) for at in range(2 * count + 2))
    plan = _plan(alive=BytesAlive(paths, sizes, sizes, (None,) * len(sizes)))
    labels = [label.get_text() for label in plot_plan(plan).axes[0].get_xticklabels()]
    assert 8 <= len(labels) <= 20
    assert "end of forward" in labels
    assert all(len(label) <= 24 for label in labels)


def test_a_saved_plan_is_drawn_without_a_model(tmp_path: Path) -> None:
    file = _plan().save(tmp_path / "plan.json")
    plot_plan(file, tmp_path / "pictures" / "plan.png")
    assert (tmp_path / "pictures" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_plan_without_a_budget_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match=r"made by level 3.*memory_budget"):
        plot_plan(Plan(regions=(), level=3))


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
