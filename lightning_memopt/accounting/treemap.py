"""
Treemap of the activations of a model, as inline SVG
====================================================

Every module is a box whose area is the bytes that it made autograd store; boxes lie inside the box of the module that
holds them. Boxes of one color are of one kind: modules whose paths differ in nothing but the number of the layer.

Rectangles are cut as square as they can be, with the squarified layout of Bruls, Huizing and van Wijk, "Squarified
Treemaps" (2000): labels fit into squares, not into stripes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from lightning_memopt.measuring.amounts import format_bytes

__all__ = ["Module", "Rectangle", "bytes_by_kind", "kind_of", "module_tree", "squarified", "treemap_svg"]

PALETTE = ("#8dd3c7", "#fdb462", "#bebada", "#b3de69", "#fb9a90", "#80b1d3", "#ffed6f", "#fccde5", "#bc80bd")
"""Colors of the kinds with most bytes, light enough for dark text; ColorBrewer's Set3, all but the palest."""
OTHER_COLOR = "#d2d4d6"

_DEPTH = 100
"""Boxes within boxes; what is deeper is one with the box around it."""
_HEADER = 15.0
_CHARACTER = 6.1
"""Width of a character of 11 px, on average."""


@dataclass(frozen=True)
class Module:
    """A module of the tree, or several in a row that hold nothing but each other."""

    name: str
    """What its path adds to that of the module around it."""
    path: str
    own_bytes: int = 0
    """Stored by its own forward, outside of the modules it holds."""
    modules: tuple[Module, ...] = field(default=(), repr=False)

    @property
    def total_bytes(self) -> int:
        """Stored by it and by all that it holds."""
        return self.own_bytes + sum(module.total_bytes for module in self.modules)


@dataclass(frozen=True)
class Rectangle:
    """A rectangle in pixels, from its upper left corner."""

    x: float
    y: float
    width: float
    height: float


def module_tree(by_module: Mapping[str, int]) -> Module:
    """The modules that hold each other by their paths; what holds nothing but one other is one with it.

    Example:
        >>> tree = module_tree({"": 1, "blocks.0.mlp": 5, "blocks.0.norm": 2})
        >>> tree.total_bytes, [module.name for module in tree.modules]
        (8, ['blocks.0'])
    """
    sizes: dict[str, int] = {"": 0}
    totals: dict[str, int] = defaultdict(int)
    inside: dict[str, list[str]] = defaultdict(list)
    for path, size in by_module.items():
        parts = path.split(".") if path else []
        totals[""] += size
        for depth in range(1, len(parts) + 1):
            around, here = ".".join(parts[: depth - 1]), ".".join(parts[:depth])
            if here not in sizes:
                sizes[here] = 0
                inside[around].append(here)
            totals[here] += size
        sizes[path] += size

    def built(path: str, start: int, depth: int) -> Module:
        # A container without bytes of its own and with one module is no box of its own. The model always is.
        while path and not sizes[path] and len(inside[path]) == 1:
            (path,) = inside[path]
        if depth == _DEPTH:
            return Module(path[start:], path, totals[path])
        modules = tuple(built(below, len(path) + 1 if path else 0, depth + 1) for below in inside[path])
        return Module(path[start:], path, sizes[path], tuple(module for module in modules if module.total_bytes))

    return built("", 0, 0)


def kind_of(path: str) -> str:
    """The path without the number of the layer.

    Example:
        >>> kind_of("blocks.11.mlp.1"), kind_of("head"), kind_of("")
        ('blocks.*.mlp.1', 'head', '(model)')
    """
    parts = path.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    if number is not None:
        parts[number] = "*"
    return ".".join(parts) or "(model)"


def bytes_by_kind(by_module: Mapping[str, int]) -> dict[str, int]:
    """Bytes of all modules of a kind, the largest first."""
    sizes: dict[str, int] = defaultdict(int)
    for path, size in by_module.items():
        sizes[kind_of(path)] += size
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


def squarified(sizes: Sequence[float], place: Rectangle) -> list[Rectangle]:
    """Cut ``place`` into rectangles with areas in proportion to ``sizes``, as square as they can be.

    Args:
        sizes: Positive numbers, the largest first.
        place: The rectangle to fill.

    Returns:
        A rectangle for each of the sizes.

    Example:
        >>> squarified([3, 1], Rectangle(0, 0, 8, 4))
        [Rectangle(x=0, y=0, width=6.0, height=4), Rectangle(x=6.0, y=0, width=2.0, height=4.0)]
    """
    scale = place.width * place.height / (math.fsum(sizes) or 1.0)
    rectangles: list[Rectangle] = []
    rest = [size * scale for size in sizes]
    while rest:
        side = min(place.width, place.height)
        count = 1
        while count < len(rest) and _worst(rest[: count + 1], side) <= _worst(rest[:count], side):
            count += 1
        row, rest = rest[:count], rest[count:]
        rectangles += _laid_out(row, place)
        depth = math.fsum(row) / side if side else 0.0
        if place.width >= place.height:
            place = Rectangle(place.x + depth, place.y, max(0.0, place.width - depth), place.height)
        else:
            place = Rectangle(place.x, place.y + depth, place.width, max(0.0, place.height - depth))
    return rectangles


def _worst(row: Sequence[float], side: float) -> float:
    """The longest stretched rectangle of a row along ``side``: its ratio of lengths."""
    total = math.fsum(row)
    if not side or not total or not min(row):
        return math.inf
    return max(side**2 * max(row) / total**2, total**2 / (side**2 * min(row)))


def _laid_out(row: Sequence[float], place: Rectangle) -> Iterator[Rectangle]:
    """A row of areas along the shorter side."""
    upright = place.width >= place.height
    side = place.height if upright else place.width
    depth = math.fsum(row) / side if side else 0.0
    at = place.y if upright else place.x
    for area in row:
        length = area / depth if depth else 0.0
        if len(row) == 1:
            length = side
        yield Rectangle(place.x, at, depth, length) if upright else Rectangle(at, place.y, length, depth)
        at += length


def treemap_svg(
    by_module: Mapping[str, int], colors: Mapping[str, str], *, width: float, height: float, label: str
) -> str:
    """The treemap as an ``<svg>`` element, without a script: names and MiB are its text and its hover titles.

    Args:
        by_module: Path of a module to the bytes of its activations.
        colors: Kind of module to color; others are grey.
        width: Of the drawing, in its own pixels; on the page it is as wide as its container.
        height: Likewise.
        label: What a screen reader says of the picture.
    """
    boxes = "".join(_boxes(module_tree(by_module), Rectangle(0, 0, width, height), colors, "model"))
    return (
        f'<svg class="treemap" role="img" aria-label="{escape(label)}" viewBox="0 0 {width:.0f} {height:.0f}">'
        f"{boxes}</svg>"
    )


def _boxes(module: Module, place: Rectangle, colors: Mapping[str, str], name: str) -> Iterator[str]:
    # Less than a pixel: the box around it says in its title how much it holds, the table has them all.
    if min(place.width, place.height) < 1.0:
        return
    title = f"{module.path or 'model'}: {format_bytes(module.total_bytes)}"
    if not module.modules:
        yield _box(place, title, name, module.total_bytes, colors.get(kind_of(module.path), OTHER_COLOR))
        return
    if module.own_bytes:
        title += f", {format_bytes(module.own_bytes)} of it stored by its own forward"
    both = f"{name}: {format_bytes(module.total_bytes)}"
    label = both if _fitting(both, place.width) == both else _fitting(name, place.width)
    headed = bool(label) and place.height > 3 * _HEADER
    yield f'<g class="f"><title>{escape(title)}</title>{_rect(place)}'
    if headed:
        yield f'<text x="{place.x + 4:.1f}" y="{place.y + 11.5:.1f}">{escape(label)}</text>'
    yield "</g>"
    edge = 2.0 if min(place.width, place.height) > 24 else 0.5
    above = _HEADER if headed else edge
    inner = Rectangle(place.x + edge, place.y + above, place.width - 2 * edge, place.height - above - edge)
    parts = [*module.modules]
    if module.own_bytes:
        parts.append(Module("(itself)", module.path, module.own_bytes))
    parts.sort(key=lambda part: -part.total_bytes)
    for part, where in zip(parts, squarified([part.total_bytes for part in parts], inner), strict=True):
        yield from _boxes(part, where, colors, part.name)


def _box(place: Rectangle, title: str, name: str, size: int, color: str) -> str:
    text = ""
    if (label := _fitting(name, place.width)) and place.height >= 14:
        text = f'<text x="{place.x + 3:.1f}" y="{place.y + 11:.1f}">{escape(label)}</text>'
        number = format_bytes(size)
        if place.height >= 28 and _fitting(number, place.width) == number:
            text += f'<text x="{place.x + 3:.1f}" y="{place.y + 23:.1f}" class="n">{escape(number)}</text>'
    return f'<g class="b"><title>{escape(title)}</title>{_rect(place, color)}{text}</g>'


def _rect(place: Rectangle, color: str = "") -> str:
    fill = f' fill="{color}"' if color else ""
    size = f'width="{place.width:.1f}" height="{place.height:.1f}"'
    return f'<rect x="{place.x:.1f}" y="{place.y:.1f}" {size}{fill}/>'


def _fitting(text: str, width: float) -> str:
    """As much of ``text`` as ``width`` pixels show; nothing where that would not be enough to recognize it."""
    fitting = int((width - 6) / _CHARACTER)
    if len(text) <= fitting:
        return text
    return f"{text[: fitting - 1]}…" if fitting >= 5 else ""
