"""
Memory report: one HTML file
============================

Who holds the bytes of a training step, before and after a change, on a page that needs nothing but itself: no network,
no script, no library. Pictures are inline SVG; every number in them is in a table as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lightning_memopt.accounting.colors import CONSUMER_COLORS
from lightning_memopt.accounting.treemap import OTHER_COLOR, PALETTE, bytes_by_kind, kind_of, treemap_svg
from lightning_memopt.measuring import StepMemory
from lightning_memopt.measuring.amounts import format_bytes, in_mib
from lightning_memopt.measuring.consumers import CONSUMERS, MemoryBreakdown, MemoryEstimate
from lightning_memopt.planning.plan import Plan, versions

__all__ = ["comparison_table", "report_json", "report_summary", "write_report"]

FORMAT = 1
"""Version of the JSON layout of a report."""

_WIDTH = 1000
_LEFT, _RIGHT = 64, 12
_COLUMNS = 240
"""Moments of a step that the picture of it shows."""
_KINDS_SHOWN = 24


def write_report(
    path: str | os.PathLike[str],
    before: StepMemory | MemoryEstimate,
    after: StepMemory | MemoryEstimate | None = None,
    *,
    title: str = "Memory of a training step",
    plan: Plan | None = None,
) -> Path:
    """Write one HTML page that shows who holds the bytes of a step, or of a step before and after a change.

    Args:
        path: Where to write it. Missing folders are made.
        before: A measured step (``measure_memory(step, model=...)``; it is drawn over time) or an estimate.
        after: The same step after the change. ``None`` shows one step.
        title: Heading of the page.
        plan: The plan that made the difference, shown as a table.

    Returns:
        The path.

    Raises:
        TypeError: If an argument is of another type; the message says what is accepted.
        ValueError: If a measured step does not say who held its bytes.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from lightning_memopt import measure_memory
        >>> model, batch = torch.nn.Linear(64, 64), torch.zeros(32, 64)
        >>> step = measure_memory(lambda: model(batch).sum().backward(), model=model, device="cpu")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = write_report(f"{folder}/report.html", step, title="A linear layer").read_text("utf-8")
        >>> page.startswith("<!DOCTYPE html>"), "<h1>A linear layer</h1>" in page
        (True, True)
    """
    sides = _sides(before, after)
    if not isinstance(title, str):
        raise TypeError(f"the title of a report is text; got {title!r}")
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(
            f"the plan of a report is a Plan, as applied_plan(model) returns it; got {type(plan).__name__}. Read a "
            "file by Plan.load(path)."
        )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_page(sides, title, plan), encoding="utf-8")
    return path


def report_json(
    before: StepMemory | MemoryEstimate, after: StepMemory | MemoryEstimate | None = None, *, plan: Plan | None = None
) -> str:
    """The numbers of the report as JSON text: breakdowns before and after, and the plan.

    Raises:
        ValueError: If a measured step does not say who held its bytes.

    Example:
        >>> moment = MemoryBreakdown(parameters=8)
        >>> json.loads(report_json(MemoryEstimate((), moment, "forward")))["before"]["peak_bytes"]
        8
    """
    content: dict[str, Any] = {"format": FORMAT}
    for side in _sides(before, after):
        content[side.label] = json.loads(side.estimate.to_json())
        if side.step is not None:
            measured = {name: getattr(side.step, name) for name in ("device", "start_bytes", "end_bytes", "step_ms")}
            content[side.label]["measured"] = measured
    if plan is not None:
        content["plan"] = json.loads(plan.to_json())
    content["versions"] = versions()
    return json.dumps(content, indent=2) + "\n"


def report_summary(
    before: StepMemory | MemoryEstimate, after: StepMemory | MemoryEstimate | None = None
) -> tuple[str, ...]:
    """What the report says, in sentences.

    Raises:
        ValueError: If a measured step does not say who held its bytes.

    Example:
        >>> plain = MemoryEstimate((), MemoryBreakdown(parameters=2**20, activations=3 * 2**20), "backward")
        >>> for sentence in report_summary(plain):
        ...     print(sentence)
        The step takes 4.0 MiB at its peak, in the backward pass.
        Activations are 75% of it: 3.0 MiB.
    """
    return tuple(_summary(_sides(before, after)))


def comparison_table(
    before: StepMemory | MemoryEstimate, after: StepMemory | MemoryEstimate | None = None, *, title: str | None = None
) -> Table:
    """The consumers at the peak, before and after, as a rich table.

    Raises:
        ValueError: If a measured step does not say who held its bytes.

    Example:
        >>> plain = MemoryEstimate((), MemoryBreakdown(parameters=2**20, activations=3 * 2**20), "backward")
        >>> [str(column.header) for column in comparison_table(plain, plain).columns]
        ['at the peak', 'before [MiB]', 'after [MiB]', 'change']
    """
    return _comparison(_sides(before, after), title)


@dataclass(frozen=True)
class _Side:
    """What there is to show of one step."""

    label: str
    estimate: MemoryEstimate
    step: StepMemory | None = None

    @property
    def activations(self) -> tuple[str, MemoryBreakdown]:
        """The moment whose activations are drawn, by name: the peak, unless it lies where most of them are gone."""
        moments = [("at the peak", self.estimate.peak)]
        moments += [(f"at the {phase.name}", phase.breakdown) for phase in self.estimate.phases]
        most = max(moments, key=lambda moment: sum(moment[1].activations_by_module.values()))
        at_peak, elsewhere = (sum(moment.activations_by_module.values()) for _, moment in (moments[0], most))
        return moments[0] if 2 * at_peak >= elsewhere else most


def _sides(before: StepMemory | MemoryEstimate, after: StepMemory | MemoryEstimate | None) -> list[_Side]:
    given = {"before": before} if after is None else {"before": before, "after": after}
    sides = []
    for label, measured in given.items():
        if not isinstance(measured, (StepMemory, MemoryEstimate)):
            raise TypeError(
                f"the step {label!r} is a StepMemory, as measure_memory(step, model=model) returns it, or a "
                f"MemoryEstimate, as estimate_memory() does; got {type(measured).__name__}"
            )
        if isinstance(measured, MemoryEstimate):
            sides.append(_Side(label, measured))
            continue
        if measured.breakdown is None:
            raise ValueError(
                f"the step {label!r}, measured on {measured.device}, does not say who held its bytes: measure it with "
                "its model, measure_memory(step, model=model, optimizer=optimizer)"
            )
        sides.append(_Side(label, measured.breakdown, measured))
    return sides


# ---------------------------------------------------------------------------------------------------------------------
# Words and tables, for the page and for the terminal


def _summary(sides: Sequence[_Side]) -> Iterator[str]:
    first, last = sides[0].estimate, sides[-1].estimate
    yield f"The step takes {format_bytes(first.peak_bytes)} at its peak, in the {_phase(first)}."
    largest, size = max(first.peak.consumers().items(), key=lambda consumer: consumer[1])
    if size:
        be = "are" if largest.endswith("s") else "is"
        name = _named(largest).capitalize()
        yield f"{name} {be} {size / first.peak_bytes:.0%} of it: {format_bytes(size)}."
    kinds = bytes_by_kind(first.peak.activations_by_module)
    if largest == "activations" and kinds:
        size = next(iter(kinds.values()))
        yield f"Of the activations, {_with_most(kinds)} most: {format_bytes(size)}."
    if len(sides) > 1 and first.peak_bytes:
        saved = 1 - last.peak_bytes / first.peak_bytes
        less = f"{abs(saved):.0%} {'less' if saved > 0 else 'more'}" if saved else "as much as before"
        yield f"Afterwards it takes {format_bytes(last.peak_bytes)}, {less}, in the {_phase(last)}."
        changes = {name: getattr(last.peak, name) - getattr(first.peak, name) for name in CONSUMERS}
        name, most = min(changes.items(), key=lambda change: change[1])
        if most < 0:
            now = getattr(last.peak, name)
            yield f"What shrinks most: {_named(name)}, from {format_bytes(now - most)} to {format_bytes(now)}."
    if last.peak.activations < 0.01 * last.peak_bytes:
        yield (
            "At this peak hardly any activations are left: recomputing or packing more of them does not lower it; "
            "another optimizer, precision or sharding does."
        )


def _phase(estimate: MemoryEstimate) -> str:
    passes = estimate.peak_phase in ("forward", "backward")
    return f"{estimate.peak_phase} pass" if passes else estimate.peak_phase


def _with_most(kinds: Mapping[str, int]) -> str:
    """``blocks.*.mlp has``, ``the layers named *.1 have``; and what is not counted, where it holds other modules."""
    kind, *others = kinds
    one = not kind.startswith("*")
    name, itself, has = (kind, "itself", "has") if one else (f"the layers named {kind}", "themselves", "have")
    if any(kind == "(model)" or other.startswith(f"{kind}.") for other in others):
        name += f" {itself}, without the modules inside,"
    return f"{name} {has}"


def _named(consumer: str) -> str:
    return consumer.replace("_", " ")


def _change(before: int, after: int) -> str:
    """``-46.1%``, ``same``, ``new``."""
    if before == after:
        return "same"
    return f"{after / before - 1:+.1%}" if before else "new"


def _comparison(sides: Sequence[_Side], title: str | None = None) -> Table:
    table = Table(title=None if title is None else Text(title), title_justify="left")  # no markup
    table.add_column("at the peak")
    for side in sides:
        table.add_column(f"{side.label} [MiB]" if len(sides) > 1 else "MiB", justify="right")
    table.add_column("change" if len(sides) > 1 else "share", justify="right")

    def row(name: str, sizes: list[int]) -> None:
        last = _change(*sizes) if len(sizes) > 1 else f"{sizes[0] / (sides[0].estimate.peak_bytes or 1):.1%}"
        table.add_row(name, *map(in_mib, sizes), last)

    for name in CONSUMERS:
        sizes = [getattr(side.estimate.peak, name) for side in sides]
        if any(sizes):
            row(_named(name), sizes)
    table.add_section()
    row("total", [side.estimate.peak_bytes for side in sides])
    return table


def _kinds(sides: Sequence[_Side]) -> Table:
    """Activations by kind of module."""
    by_side = [bytes_by_kind(side.activations[1].activations_by_module) for side in sides]
    table = Table()
    table.add_column("kind of module")
    table.add_column("modules", justify="right")
    for side in sides:
        table.add_column(f"{side.label} [MiB]" if len(sides) > 1 else "MiB", justify="right")
    if len(sides) > 1:
        table.add_column("change", justify="right")
    paths = {path for side in sides for path in side.activations[1].activations_by_module}
    kinds = list(dict.fromkeys(kind for sizes in by_side for kind in sizes))
    for kind in kinds[:_KINDS_SHOWN]:
        sizes = [by_kind.get(kind, 0) for by_kind in by_side]
        count = sum(kind_of(path) == kind for path in paths)
        table.add_row(Text(kind), str(count), *map(in_mib, sizes), *([_change(*sizes)] if len(sizes) > 1 else []))
    if rest := kinds[_KINDS_SHOWN:]:
        sizes = [sum(by_kind.get(kind, 0) for kind in rest) for by_kind in by_side]
        count = sum(kind_of(path) in set(rest) for path in paths)
        change = [_change(*sizes)] if len(sizes) > 1 else []
        table.add_row(f"{len(rest)} further kinds", str(count), *map(in_mib, sizes), *change)
    return table


# ---------------------------------------------------------------------------------------------------------------------
# The page

# Both color schemes by the reader's setting; fonts that every system has.
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #59636e; --line: #d5dae0; --paper: #fff; --panel: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --soft: #9aa5b1; --line: #3a424b; --paper: #14181c; --panel: #1e242a; }
}
body { margin: 0 auto; max-width: 1040px; padding: 24px 20px 48px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .6em; } h2 { font-size: 1.15rem; margin: 2em 0 .4em; }
h3 { font-size: 1rem; margin: 1.2em 0 .3em; font-weight: 600; }
.note { color: var(--soft); font-size: .88rem; margin: .3em 0; }
.summary { font-size: 1.08rem; margin: 0; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .6em 0; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); font-size: .88rem; padding-bottom: .3em; }
th, td { padding: .28em .9em; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th:first-child, td:first-child { padding-left: .2em; } .right { text-align: right; white-space: nowrap; }
thead th { color: var(--soft); font-weight: 600; } tbody tr.last, tfoot td { font-weight: 600; }
svg { display: block; width: 100%; height: auto; font: 11px system-ui, sans-serif; }
svg text { fill: var(--ink); } .axis { stroke: var(--line); } .budget { stroke: var(--ink); }
.soft, svg text.soft { fill: var(--soft); } .dot { fill: var(--ink); }
.moment { fill: transparent; } .moment:hover { fill: var(--ink); fill-opacity: .18; }
.on text, .b text { fill: #15181b; } .b text.n { fill: #3c4248; }
.b rect { stroke: #15181b; stroke-opacity: .28; stroke-width: .6; }
.b:hover rect { stroke-opacity: 1; stroke-width: 1.4; }
.f rect { fill: var(--panel); stroke: var(--line); stroke-width: .8; } .f:hover rect { stroke: var(--ink); }
.legend { display: flex; flex-wrap: wrap; gap: .2em 1.2em; list-style: none; margin: .5em 0; padding: 0;
  font-size: .88rem; }
.legend svg { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
details { margin: .6em 0; } summary { cursor: pointer; color: var(--soft); }
footer { margin-top: 3em; border-top: 1px solid var(--line); padding-top: .6em; }
"""


def _page(sides: Sequence[_Side], title: str, plan: Plan | None) -> str:
    # The policy makes sure that nothing, not even a name in the model, can load or run anything.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>",
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="summary">{escape(sentence)}</p>' for sentence in _summary(sides)),
        "<h2>Who holds the bytes</h2>",
        _html_table(_comparison(sides), last_is_total=True),
        _legend({_named(name): CONSUMER_COLORS[name] for name in _consumers_shown(sides)}),
        _bars(sides),
        "<details><summary>All moments of the step, in MiB</summary>",
        *(f"{_heading(side, sides)}{_html_table(_moments(side), last_is_total=True)}" for side in sides),
        "</details>",
        *_timelines(sides),
        *_treemaps(sides),
        *([] if plan is None else ["<h2>The plan</h2>", _html_table(plan.table())]),
        "</main>",
        f'<footer class="note">{escape(_about(sides))}</footer>',
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _heading(side: _Side, sides: Sequence[_Side]) -> str:
    return f"<h3>{side.label.capitalize()}</h3>" if len(sides) > 1 else ""


def _moments(side: _Side) -> Table:
    table = side.estimate.table()
    table.title = None
    return table


def _about(sides: Sequence[_Side]) -> str:
    made = ", ".join(f"{name} {version}" for name, version in versions().items())
    measured = [side.step for side in sides if side.step is not None]
    how = f"Measured on {measured[0].device}" if measured else f"Estimate of {sides[0].estimate.subject or 'a step'}"
    return f"{how}. 1 MiB is 2^20 bytes. {made}."


def _html_table(table: Table, *, last_is_total: bool = False) -> str:
    """A table of the terminal as one of the page."""

    def cell(tag: str, content: object, index: int) -> str:
        plain = content.plain if isinstance(content, Text) else Text.from_markup(str(content)).plain
        right = ' class="right"' if table.columns[index].justify == "right" else ""
        return f"<{tag}{right}>{'<br>'.join(map(escape, plain.splitlines()))}</{tag}>"

    head = "".join(cell("th", column.header, index) for index, column in enumerate(table.columns))
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    total = ' class="last"'
    body = "".join(
        f"<tr{total if last_is_total and number == len(rows) else ''}>"
        f"{''.join(cell('td', content, index) for index, content in enumerate(row))}</tr>\n"
        for number, row in enumerate(rows, 1)
    )
    foot = ""
    if table.show_footer:
        cells = "".join(cell("td", column.footer, index) for index, column in enumerate(table.columns))
        foot = f"<tfoot><tr>{cells}</tr></tfoot>"
    said = ". ".join(str(text) for text in (table.title, table.caption) if text)
    caption = f"<caption>{escape(said)}</caption>" if said else ""
    whole = f"{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>{foot}"
    return f'<div class="scroll"><table>{whole}</table></div>'


def _legend(colors: Mapping[str, str]) -> str:
    entries = "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect width="10" height="10" rx="2" fill="{color}"/></svg>'
        f"{escape(name)}</li>"
        for name, color in colors.items()
    )
    return f'<ul class="legend">{entries}</ul>'


def _consumers_shown(sides: Sequence[_Side]) -> list[str]:
    shown = [
        breakdown
        for side in sides
        for breakdown in (side.estimate.peak, *(phase.breakdown for phase in side.estimate.phases))
    ]
    return [
        name
        for name in CONSUMERS
        if any(getattr(breakdown, name) for breakdown in shown)
        or any(side.step is not None and any(side.step.by_consumer.get(name, ())) for side in sides)
    ]


def _bars(sides: Sequence[_Side]) -> str:
    """The moments of the step as stacked bars, those before and those after under one scale."""
    rows: list[tuple[str, MemoryBreakdown]] = []
    for side in sides:
        prefix = f"{side.label}: " if len(sides) > 1 else ""
        rows += [(f"{prefix}{phase.name}", phase.breakdown) for phase in side.estimate.phases]
        rows.append((f"{prefix}peak", side.estimate.peak))
    left, room, step = 150, 90, 26
    longest = max(breakdown.total_bytes for _, breakdown in rows) or 1
    scale = (_WIDTH - left - room) / longest
    parts = []
    for index, (name, breakdown) in enumerate(rows):
        y, x = index * step + 4, float(left)
        parts.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        for consumer, size in breakdown.consumers().items():
            if not size:
                continue
            width = size * scale
            number = in_mib(size)
            inside = f'<text x="{x + width / 2:.1f}" y="{y + 13}" text-anchor="middle">{escape(number)}</text>'
            parts.append(
                f'<g class="on"><title>{escape(f"{name}: {_named(consumer)} {format_bytes(size)}")}</title>'
                f'<rect x="{x:.1f}" y="{y}" width="{width:.2f}" height="18" fill="{CONSUMER_COLORS[consumer]}"/>'
                f"{inside if width > 7 * len(number) else ''}</g>"
            )
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{escape(format_bytes(breakdown.total_bytes))}</text>')
    return _svg("Consumers of memory at the moments of the step", len(rows) * step + 8, parts)


def _svg(label: str, height: float, parts: Sequence[str]) -> str:
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {_WIDTH} {height:.0f}">{"".join(parts)}</svg>'


# The step over time


def _timelines(sides: Sequence[_Side]) -> Iterator[str]:
    drawn = [side for side in sides if side.step is not None and side.step.by_consumer]
    if not drawn:
        return
    yield "<h2>Over the step</h2>"
    yield (
        f'<p class="note">From the start of the step to its end in {_COLUMNS} columns, each the fullest moment of its '
        "span of time. Point at a column for its bytes.</p>"
    )
    top = max(side.estimate.peak_bytes for side in drawn)
    for side in drawn:
        yield _heading(side, sides)
        assert side.step is not None
        yield _timeline(side.step, top, side.label)


def _timeline(step: StepMemory, top: int, label: str) -> str:
    height, bottom = 250, 24
    room = height - bottom - 16
    columns = fullest_moments(step, _COLUMNS)
    width = (_WIDTH - _LEFT - _RIGHT) / len(columns)
    scale = room / (top or 1)
    floor = height - bottom
    parts = list(_grid(top, scale, floor))
    below = [0] * len(columns)
    for consumer in CONSUMERS:
        above = [base + moment.get(consumer, 0) for base, moment in zip(below, columns, strict=True)]
        if above != below:
            parts.append(
                f'<path fill="{CONSUMER_COLORS[consumer]}" d="{_band(below, above, width, scale, floor)}">'
                f"<title>{_named(consumer)}</title></path>"
            )
        below = above
    for index, moment in enumerate(columns):
        held = ", ".join(f"{_named(name)} {in_mib(moment[name])}" for name in CONSUMERS if moment.get(name))
        words = f"{format_bytes(below[index])}: {held}"
        parts.append(
            f'<rect class="moment" x="{_LEFT + index * width:.1f}" y="16" width="{width:.2f}" height="{room}">'
            f"<title>{escape(words)}</title></rect>"
        )
    peak = max(range(len(columns)), key=below.__getitem__)
    x, y = _LEFT + (peak + 0.5) * width, floor - below[peak] * scale
    anchor = "start" if peak < len(columns) / 2 else "end"
    offset = 6 if anchor == "start" else -6
    parts.append(
        f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
        f'<text x="{x + offset:.1f}" y="{y - 4:.1f}" text-anchor="{anchor}">{escape(format_bytes(below[peak]))}</text>'
    )
    parts.append(
        f'<text class="soft" x="{_LEFT}" y="{height - 8}">start</text>'
        f'<text class="soft" x="{_WIDTH - _RIGHT}" y="{height - 8}" text-anchor="end">end, after '
        f"{step.timeline[-1].time_ms:.1f} ms</text>"
    )
    return _svg(f"Bytes alive over the step, {label}", height, parts)


def fullest_moments(step: StepMemory, columns: int) -> list[dict[str, int]]:
    """Bytes by consumer at the fullest moment of each of ``columns`` equal spans of the step's time."""
    end = step.timeline[-1].time_ms or 1.0
    fullest: list[int] = []
    last = 0
    span: list[list[int]] = [[] for _ in range(columns)]
    for index, point in enumerate(step.timeline):
        span[min(int(point.time_ms / end * columns), columns - 1)].append(index)
    for inside in span:
        # What was alive when the span began counts as well.
        fullest.append(max([last, *inside], key=lambda index: step.timeline[index].bytes))
        last = inside[-1] if inside else last
    return [{name: sizes[index] for name, sizes in step.by_consumer.items()} for index in fullest]


def _band(below: Sequence[int], above: Sequence[int], width: float, scale: float, floor: float) -> str:
    """The outline between two staircases: along the upper one to the right, along the lower one back."""
    path = f"M{_LEFT},{floor - above[0] * scale:.1f}"
    for index, size in enumerate(above):
        path += f"V{floor - size * scale:.1f}H{_LEFT + (index + 1) * width:.1f}"
    for index in reversed(range(len(below))):
        path += f"V{floor - below[index] * scale:.1f}H{_LEFT + index * width:.1f}"
    return f"{path}Z"


def _grid(top: int, scale: float, floor: float) -> Iterator[str]:
    """Lines at round numbers of MiB, some four of them."""
    mib = top / 2**20
    step = next(
        (digit * 10.0**power for power in range(-6, 9) for digit in (1, 2, 5) if mib / (digit * 10.0**power) <= 5),
        10.0**9,
    )
    for number in range(int(mib / step) + 1):
        y = floor - number * step * 2**20 * scale
        yield (
            f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="soft" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number * step:g} MiB</text>'
        )


# The activations of the modules


def _treemaps(sides: Sequence[_Side]) -> Iterator[str]:
    moments = [side.activations for side in sides]
    most = max(sum(moment.activations_by_module.values()) for _, moment in moments)
    if not most:
        return
    kinds = dict.fromkeys(kind for _, moment in moments for kind in bytes_by_kind(moment.activations_by_module))
    colors = dict(zip(kinds, PALETTE, strict=False))
    yield "<h2>Activations by module</h2>"
    yield (
        '<p class="note">The area of a box is the bytes that the module made autograd store, under the same scale in '
        "all pictures; its color is its kind. Point at a box for its path and its bytes.</p>"
    )
    legend = dict(colors)
    if len(kinds) > len(colors):
        legend["other kinds"] = OTHER_COLOR
    yield _legend(legend)
    for side, (name, moment) in zip(sides, moments, strict=True):
        where = f"{side.label.capitalize()}, {name}" if len(sides) > 1 else name.capitalize()
        yield f"<h3>{escape(f'{where}: {format_bytes(moment.activations)}')}</h3>"
        if not any(moment.activations_by_module.values()):
            continue
        share = (moment.activations / most) ** 0.5
        drawing = treemap_svg(
            moment.activations_by_module,
            colors,
            width=max(40.0, _WIDTH * share),
            height=max(20.0, 0.52 * _WIDTH * share),
            label=f"Treemap of the activations by module, {side.label}",
        )
        yield f'<div style="width: {max(4.0, 100 * share):.1f}%">{drawing}</div>'
    yield "<details open><summary>The same by kind of module, each without the modules inside it</summary>"
    yield _html_table(_kinds(sides))
    yield "</details>"
