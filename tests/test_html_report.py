from __future__ import annotations

import builtins
import io
import itertools
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from lightning_memopt import applied_plan, measure_memory, optimize_memory
from lightning_memopt.accounting import comparison_table, report_json, report_summary, write_report
from lightning_memopt.accounting.html_report import fullest_moments
from lightning_memopt.accounting.treemap import Rectangle, bytes_by_kind, module_tree, squarified, treemap_svg
from lightning_memopt.measuring import StepMemory
from lightning_memopt.measuring.consumers import CONSUMERS, MemoryBreakdown, MemoryEstimate, MemoryPhase
from lightning_memopt.planning import Plan

MIB = 2**20
# HTML's elements without an end; SVG's are closed where they stand.
VOID = {"meta", "br"}


class Page(HTMLParser):
    """The elements of a page, all of which must be closed in the order in which they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.text.append((self.open[-1], data))

    def texts(self, tag: str) -> list[str]:
        return [text for where, text in self.text if where == tag]


def estimate(**consumers: Any) -> MemoryEstimate:
    peak = MemoryBreakdown(**consumers)
    return MemoryEstimate((MemoryPhase("forward end", peak),), peak, "backward", "a model")


def written(path: Path, *steps: Any, **options: Any) -> Page:
    return Page(write_report(path / "report.html", *steps, **options).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def transformer() -> tuple[StepMemory, StepMemory, Plan]:
    """A step of a transformer of 100 layers, plain and with every layer recomputed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(100)))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.rand(8, 32, 16)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    step()
    before = measure_memory(step, model=model, optimizer=optimizer, batch=batch, device="cpu")
    optimize_memory(model, example_forward=lambda model: model(batch).square().mean(), level=1)
    after = measure_memory(step, model=model, optimizer=optimizer, batch=batch, device="cpu")
    plan = applied_plan(model)
    assert plan is not None
    return before, after, plan


def test_a_report_of_a_hundred_layers_is_one_valid_file_below_a_megabyte(
    transformer: tuple[StepMemory, StepMemory, Plan], tmp_path: Path
) -> None:
    before, after, plan = transformer
    page = written(tmp_path / "new" / "folder", before, after, title="A hundred layers", plan=plan)
    file = tmp_path / "new" / "folder" / "report.html"
    assert file.stat().st_size < 1_000_000
    assert list((tmp_path / "new" / "folder").iterdir()) == [file]
    assert page.texts("h1") == page.texts("title")[:1] == ["A hundred layers"]
    assert page.texts("h2") == ["Who holds the bytes", "Over the step", "Activations by module", "The plan"]
    assert [attributes["class"] for tag, attributes in page.elements if tag == "svg" and "class" in attributes] == [
        "treemap",
        "treemap",
    ]


def test_a_report_loads_and_runs_nothing(transformer: tuple[StepMemory, StepMemory, Plan], tmp_path: Path) -> None:
    page = written(tmp_path, *transformer[:2], plan=transformer[2])
    assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "image", "iframe", "object", "use"}
    names = {name for _, attributes in page.elements for name in attributes}
    assert not [name for name in names if name in ("src", "href", "xlink:href") or name.startswith("on")]
    (style,) = page.texts("style")
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_the_page_needs_no_matplotlib(
    transformer: tuple[StepMemory, StepMemory, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_import = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return plain_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    write_report(tmp_path / "report.html", transformer[0])


def test_names_are_text_whatever_is_in_them(tmp_path: Path) -> None:
    name = '<script>alert("&amp;")</script>'
    step = estimate(activations=3 * MIB, activations_by_module={f"blocks.0.{name}": 2 * MIB, "head": MIB})
    page = written(tmp_path, step, title=name)
    assert page.texts("h1") == [name]
    assert "script" not in {tag for tag, _ in page.elements}
    assert f"blocks.*.{name}" in page.texts("td")
    assert f"blocks.0.{name}: 2.0 MiB" in page.texts("title")


@pytest.mark.parametrize("name", ["[/INST]", "[bold]", "[red]x", "a[/]"])
def test_names_and_titles_in_brackets_are_no_markup(name: str, tmp_path: Path) -> None:
    moment = MemoryBreakdown(activations=8, activations_by_module={f"{name}.0": 8})
    estimate = MemoryEstimate((MemoryPhase(name, moment),), moment, "forward", subject=name)
    page = write_report(tmp_path / "report.html", estimate, title=name).read_text("utf-8")
    assert f"<h1>{name}</h1>" in page
    assert f"<td>{name}.*</td>" in page
    assert page.count(name) >= 5  # the column of the moment and its bar as well
    console = Console(width=200, record=True, file=io.StringIO())
    for table in (comparison_table(estimate, title=name), estimate.table(), moment.table(name)):
        console.print(table)
        assert name in console.export_text()


def test_modules_too_deep_for_boxes_are_one_with_the_box_around_them(tmp_path: Path) -> None:
    sizes = {".".join(["m"] * depth): 100 for depth in range(1, 600)}
    tree = module_tree(sizes)
    assert tree.total_bytes == 100 * 599
    moment = MemoryBreakdown(activations=100 * 599, activations_by_module=sizes)
    assert Page(write_report(tmp_path / "report.html", MemoryEstimate((), moment, "forward")).read_text("utf-8"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"before": 5}, "'before' is a StepMemory.*got int"),
        ({"before": None}, "'before' is a StepMemory.*got NoneType"),
        ({"after": MemoryBreakdown()}, "'after' is a StepMemory.*got MemoryBreakdown"),
        ({"title": 3}, "title of a report is text; got 3"),
        ({"plan": "plan.json"}, r"is a Plan.*got str.*Plan\.load"),
    ],
)
def test_arguments_of_another_type_are_answered_with_what_is_accepted(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = {"before": MemoryEstimate((), MemoryBreakdown(parameters=1), "forward"), **arguments}
    with pytest.raises(TypeError, match=message):
        write_report(tmp_path / "report.html", **given)
    assert not [*tmp_path.iterdir()]


def test_the_table_of_the_page_is_the_table_of_the_terminal_and_has_the_measured_bytes(tmp_path: Path) -> None:
    before = estimate(parameters=10 * MIB, activations=30 * MIB)
    after = estimate(parameters=10 * MIB, activations=6 * MIB, temporaries=2 * MIB)
    cells = ["parameters", "10.0", "10.0", "same", "activations", "30.0", "6.0", "-80.0%"]
    cells += ["temporaries", "0.0", "2.0", "new", "total", "40.0", "18.0", "-55.0%"]
    assert written(tmp_path, before, after).texts("td")[: len(cells)] == cells
    console = Console(width=100)
    with console.capture() as printed:
        console.print(comparison_table(before, after, title="A step"))
    words = re.findall(r"[\w.%+-]+", printed.get())
    assert words[:2] == ["A", "step"]
    assert [word for word in words if word in cells] == cells
    alone = written(tmp_path, before).texts("td")
    assert alone[:9] == ["parameters", "10.0", "25.0%", "activations", "30.0", "75.0%", "total", "40.0", "100.0%"]


def test_the_summary_says_what_changed_most_and_when_activations_are_no_longer_the_matter() -> None:
    before = estimate(
        parameters=MIB, activations=3 * MIB, activations_by_module={"blocks.0.mlp": MIB, "blocks.1.mlp": 2 * MIB}
    )
    after = MemoryEstimate((), MemoryBreakdown(parameters=MIB, optimizer_state=MIB), "optimizer step")
    said = report_summary(before, after)
    assert said[:5] == (
        "The step takes 4.0 MiB at its peak, in the backward pass.",
        "Activations are 75% of it: 3.0 MiB.",
        "Of the activations, blocks.*.mlp has most: 3.0 MiB.",
        "Afterwards it takes 2.0 MiB, 50% less, in the optimizer step.",
        "What shrinks most: activations, from 3.0 MiB to 0.0 MiB.",
    )
    assert "hardly any activations are left" in said[5]
    assert report_summary(after, before)[2] == "Afterwards it takes 4.0 MiB, 100% more, in the backward pass."
    assert "as much as before" in report_summary(before, before)[3]
    for by_module, expected in (
        ({"blocks.0": 3 * MIB, "blocks.0.mlp": MIB}, "blocks.* itself, without the modules inside, has most"),
        ({"0.1": 2 * MIB, "1.1": 2 * MIB}, "the layers named *.1 have most"),
        ({"": 3 * MIB, "head": MIB}, "(model) itself, without the modules inside, has most"),
    ):
        step = estimate(activations=4 * MIB, activations_by_module=by_module)
        assert report_summary(step)[2].startswith(f"Of the activations, {expected}: ")
    assert len(report_summary(before)) == 3


def test_the_json_holds_the_breakdowns_the_plan_and_how_it_was_measured(
    transformer: tuple[StepMemory, StepMemory, Plan],
) -> None:
    before, after, plan = transformer
    content = json.loads(report_json(before, after, plan=plan))
    for side, step in (("before", before), ("after", after)):
        assert content[side]["peak_bytes"] == step.peak_bytes
        assert content[side]["measured"]["device"] == "cpu"
        assert MemoryEstimate.from_json(json.dumps(content[side])) == step.breakdown
    assert Plan.from_json(json.dumps(content["plan"])) == plan
    alone = json.loads(report_json(estimate(parameters=8)))
    assert "after" not in alone
    assert "measured" not in alone["before"]


@pytest.mark.parametrize("function", [report_json, report_summary, comparison_table])
def test_a_step_that_does_not_say_who_held_its_bytes_is_refused(function: Callable[..., Any], tmp_path: Path) -> None:
    plain = measure_memory(lambda: torch.rand(10), device="cpu")
    with pytest.raises(ValueError, match=r"'after', measured on cpu.*measure_memory\(step, model=model"):
        function(estimate(parameters=1), plain)
    with pytest.raises(ValueError, match="'before'"):
        write_report(tmp_path / "report.html", plain)
    assert not list(tmp_path.iterdir())


def test_what_is_not_known_or_zero_is_left_out(tmp_path: Path) -> None:
    assert written(tmp_path, estimate()).texts("h2") == ["Who holds the bytes"]
    unknown = estimate(activations=MIB)
    assert written(tmp_path, unknown, unknown).texts("h2") == ["Who holds the bytes"]
    known = estimate(activations=MIB, activations_by_module={"a": MIB, "b": 0})
    nothing = estimate(activations=0, activations_by_module={"a": 0})
    page = written(tmp_path, known, nothing)
    assert page.texts("h2") == ["Who holds the bytes", "Activations by module"]
    assert sum(attributes.get("class") == "treemap" for _, attributes in page.elements) == 1


# The step over time


def test_the_columns_of_the_picture_keep_the_peak_and_what_is_alive_between_two_events(
    transformer: tuple[StepMemory, StepMemory, Plan],
) -> None:
    for step in transformer[:2]:
        columns = fullest_moments(step, 240)
        totals = [sum(moment.values()) for moment in columns]
        assert len(totals) == 240
        assert max(totals) == step.peak_bytes
        times = [point.time_ms for point in step.timeline]
        # At every moment the column shows at least what is alive.
        for time_ms, point in zip(times, step.timeline, strict=True):
            assert totals[min(int(time_ms / times[-1] * 240), 239)] >= point.bytes


def test_the_bands_of_the_picture_reach_from_zero_to_the_peak(
    transformer: tuple[StepMemory, StepMemory, Plan], tmp_path: Path
) -> None:
    page = written(tmp_path, transformer[0])
    bands = [attributes["d"] for tag, attributes in page.elements if tag == "path"]
    held = [name for name in CONSUMERS if any(transformer[0].by_consumer.get(name, ()))]
    assert len(bands) == len(held)
    heights = [[float(y) for y in re.findall(r"V([\d.]+)", band or "")] for band in bands]
    # The lower edge of each is the upper edge of the one before.
    for below, above in itertools.pairwise(heights):
        assert above[240:] == below[:240][::-1]
    assert max(heights[0]) == 226.0  # the axis
    assert min(heights[-1]) == 16.0


# The treemap


def areas(svg: str) -> dict[str, float]:
    """Title of each box without boxes in it, and its area."""
    boxes = re.findall(r'<g class="b"><title>([^<]+)</title><rect x="\S+" y="\S+" width="(\S+)" height="(\S+)"', svg)
    return {title: float(width) * float(height) for title, width, height in boxes}


def test_boxes_have_areas_in_proportion_to_bytes() -> None:
    sizes = {"a": 8 * MIB, "b": 4 * MIB, "c": 2 * MIB, "d": MIB, "e": MIB}
    found = areas(treemap_svg(sizes, {}, width=1000, height=500, label="a treemap"))
    unit = found["e: 1.0 MiB"]
    for name, size in sizes.items():
        assert found[f"{name}: {size / MIB:.1f} MiB"] / unit == pytest.approx(size / MIB, rel=0.01)
    assert sum(found.values()) == pytest.approx(1000 * 500, rel=0.05)  # less the header and the edges


def test_before_and_after_are_drawn_under_one_scale(tmp_path: Path) -> None:
    before = estimate(activations=16 * MIB, activations_by_module={"a": 12 * MIB, "b": 4 * MIB})
    after = estimate(activations=4 * MIB, activations_by_module={"a": 3 * MIB, "b": MIB})
    page = written(tmp_path, before, after)
    maps = [attributes for tag, attributes in page.elements if attributes.get("class") == "treemap"]
    assert [attributes["viewbox"] for attributes in maps] == ["0 0 1000 520", "0 0 500 260"]
    widths = [attributes["style"] for tag, attributes in page.elements if tag == "div" and "style" in attributes]
    assert widths == ["width: 100.0%", "width: 50.0%"]


def test_the_moment_with_most_activations_is_drawn_where_the_peak_has_hardly_any(tmp_path: Path) -> None:
    forward = MemoryBreakdown(activations=MIB, activations_by_module={"a": MIB})
    peak = MemoryBreakdown(gradients=2 * MIB, activations=4, activations_by_module={"": 4})
    step = MemoryEstimate((MemoryPhase("forward end", forward),), peak, "optimizer step")
    assert "At the forward end: 1.0 MiB" in written(tmp_path, step).texts("h3")


def test_modules_lie_in_the_modules_that_hold_them() -> None:
    tree = module_tree({"": 1, "blocks.0": 2, "blocks.0.mlp.1": 4, "blocks.1.mlp.1": 8, "stem.only.conv": 16})
    assert (tree.total_bytes, tree.own_bytes) == (31, 1)
    blocks, stem = tree.modules
    # What holds nothing but one other is one with it.
    assert (stem.name, stem.path, stem.modules) == ("stem.only.conv", "stem.only.conv", ())
    assert [(block.name, block.own_bytes, block.total_bytes) for block in blocks.modules] == [
        ("0", 2, 6),
        ("1.mlp.1", 8, 8),
    ]
    assert [(inner.name, inner.path) for inner in blocks.modules[0].modules] == [("mlp.1", "blocks.0.mlp.1")]


def test_layers_of_one_kind_are_added_up() -> None:
    sizes = {"blocks.0.mlp.0": 1, "blocks.1.mlp.0": 2, "blocks.1.mlp.1": 9, "head": 3, "": 1}
    assert bytes_by_kind(sizes) == {"blocks.*.mlp.1": 9, "blocks.*.mlp.0": 3, "head": 3, "(model)": 1}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 10_000), min_size=1, max_size=40),
    st.floats(1, 2000),
    st.floats(1, 2000),
)
def test_a_squarified_layout_fills_the_place_without_overlap(sizes: list[int], width: float, height: float) -> None:
    sizes.sort(reverse=True)
    rectangles = squarified(sizes, Rectangle(3.0, 5.0, width, height))
    slack = 1e-6 * (width + height)
    for size, rectangle in zip(sizes, rectangles, strict=True):
        assert rectangle.width * rectangle.height == pytest.approx(size / sum(sizes) * width * height, rel=1e-6)
        assert rectangle.x >= 3.0 - slack
        assert rectangle.y >= 5.0 - slack
        assert rectangle.x + rectangle.width <= 3.0 + width + slack
        assert rectangle.y + rectangle.height <= 5.0 + height + slack
    for index, one in enumerate(rectangles):
        for other in rectangles[:index]:
            apart_x = max(one.x, other.x) - min(one.x + one.width, other.x + other.width)
            apart_y = max(one.y, other.y) - min(one.y + one.height, other.y + other.height)
            assert max(apart_x, apart_y) >= -slack


def test_equal_modules_become_squares_not_stripes() -> None:
    for rectangle in squarified([1.0] * 16, Rectangle(0, 0, 400, 400)):
        assert max(rectangle.width / rectangle.height, rectangle.height / rectangle.width) < 1.7
