from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes

from lightning_memopt import measure_memory
from lightning_memopt.accounting import plot_breakdown, plot_timeline
from lightning_memopt.accounting.colors import CONSUMER_COLORS
from lightning_memopt.measuring import StepMemory
from lightning_memopt.measuring.consumers import CONSUMERS, MemoryBreakdown

MIB = 2**20
BEFORE = MemoryBreakdown(parameters=10 * MIB, activations=30 * MIB, temporaries=MIB // 2)
AFTER = MemoryBreakdown(parameters=10 * MIB, activations=5 * MIB, gradients=2 * MIB)


def stack(axes: Axes, bar: int) -> list[tuple[str, float, float]]:
    """Label, lower edge and height of the parts of one bar that are not empty."""
    parts = [(container.get_label(), container.patches[bar]) for container in axes.containers]
    return [(label, part.get_y(), part.get_height()) for label, part in parts if part.get_height()]


def test_the_consumers_of_each_breakdown_are_stacked_in_mib() -> None:
    axes = plot_breakdown({"before": BEFORE, "after": AFTER}).axes[0]
    assert stack(axes, 0) == [("parameters", 0, 10), ("activations", 10, 30), ("temporaries", 40, 0.5)]
    assert stack(axes, 1) == [("parameters", 0, 10), ("gradients", 10, 2), ("activations", 12, 5)]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["before", "after"]
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 40.5


def test_totals_are_written_above_the_bars_and_sizes_into_parts_that_have_room() -> None:
    texts = [text.get_text() for text in plot_breakdown({"before": BEFORE, "after": AFTER}).axes[0].texts]
    assert [text for text in texts if "MiB" in text] == ["40.5 MiB", "17.0 MiB"]
    assert sorted(text for text in texts if text and "MiB" not in text) == ["10.0", "10.0", "2.0", "30.0", "5.0"]


def test_the_legend_names_the_consumers_that_are_there_in_the_order_of_the_stack() -> None:
    axes = plot_breakdown({"before": BEFORE, "after": AFTER}, budget="64 MiB").axes[0]
    legend = axes.get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names[:4] == ["temporaries", "activations", "gradients", "parameters"]
    assert names[4:] == ["budget 64.0 MiB"]
    assert axes.get_ylim()[1] > 64


def test_every_consumer_has_a_color_of_its_own() -> None:
    assert tuple(CONSUMER_COLORS) == CONSUMERS
    assert len(set(CONSUMER_COLORS.values())) == len(CONSUMERS)


def test_no_breakdown_is_refused_and_an_empty_one_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="given no breakdown"):
        plot_breakdown({})
    plot_breakdown({"nothing": MemoryBreakdown()}, tmp_path / "new" / "nothing.png")
    assert (tmp_path / "new" / "nothing.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def measured() -> StepMemory:
    model, batch = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()), torch.rand(512, 64)
    return measure_memory(lambda: model(batch).square().sum().backward(), model=model, device="cpu")


def test_steps_that_say_who_held_the_bytes_are_stacked_side_by_side(measured: StepMemory) -> None:
    figure = plot_timeline({"one": measured, "other": measured}, budget=2 * measured.peak_bytes)
    assert [axes.get_title() for axes in figure.axes] == ["one", "other"]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    for axes in figure.axes:
        held = [name.replace("_", " ") for name in CONSUMERS if any(measured.by_consumer.get(name, ()))]
        assert [str(band.get_label()) for band in axes.collections] == held
        highest = max(band.get_paths()[0].vertices[:, 1].max() for band in axes.collections)
        assert highest * MIB == measured.peak_bytes
    legend = figure.axes[-1].get_legend()
    assert legend is not None
    assert "activations" in [text.get_text() for text in legend.get_texts()]


def test_steps_are_curves_where_one_of_them_does_not_say_who_held_its_bytes(measured: StepMemory) -> None:
    plain = measure_memory(lambda: torch.rand(1000).exp(), device="cpu")
    figure = plot_timeline({"measured": measured, "plain": plain})
    assert len(figure.axes) == 1
    assert not figure.axes[0].collections


@pytest.mark.parametrize(("given", "found"), [(BEFORE, "MemoryBreakdown"), ({"a": 3}, "a mapping to int")])
def test_what_is_no_mapping_of_breakdowns_is_refused(given: Any, found: str) -> None:
    with pytest.raises(TypeError, match=f"label to MemoryBreakdown.*got {found}"):
        plot_breakdown(given)
