"""
The consumers of memory, at each moment of a step
=================================================

Parameters, gradients and optimizer state are there from step to step; activations grow in the forward pass and go in
the backward pass; autocast's copies of weights, communication buffers and temporaries come on top.
:class:`MemoryBreakdown` is one moment, :class:`MemoryEstimate` a step. An estimate and a measurement fill the same two.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lightning_memopt.measuring.amounts import in_mib

__all__ = ["CONSUMERS", "MemoryBreakdown", "MemoryEstimate", "MemoryPhase"]

FORMAT = 1
"""Version of the JSON layout."""


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes alive at one moment of a step, each counted for one consumer.

    Example:
        >>> moment = MemoryBreakdown(parameters=4000, activations=500, activations_by_module={"blocks.0": 500})
        >>> moment.total_bytes
        4500
        >>> MemoryBreakdown.from_json(moment.to_json()) == moment
        True
    """

    parameters: int = 0
    gradients: int = 0
    """Of parameters; those of activations, which live for one operation, are temporaries."""
    optimizer_state: int = 0
    activations: int = 0
    """Stored by autograd for the backward pass, logits and the loss's share of them included."""
    autocast_copies: int = 0
    """Weights that autocast has cast to 16 bits, held until the backward pass has used them."""
    buffers: int = 0
    inputs: int = 0
    """The batch."""
    communication: int = 0
    """Buckets of DDP, weights that FSDP has gathered, gradients on their way to other devices."""
    temporaries: int = 0
    """Alive for one or a few operations: results, gradients of activations, the optimizer's intermediate values."""
    other: int = 0
    """What was measured and belongs to none of these."""
    activations_by_module: Mapping[str, int] = field(default_factory=dict)
    """Path of a module to the bytes that it made autograd store; adds up to ``activations`` where it is given."""

    def __post_init__(self) -> None:
        negative = [name for name in CONSUMERS if getattr(self, name) < 0]
        if negative:
            raise ValueError(f"bytes of {', '.join(negative)} are negative; a breakdown takes numbers from 0 on")
        parts = sum(self.activations_by_module.values())
        if self.activations_by_module and parts != self.activations:
            raise ValueError(
                f"activations_by_module adds up to {parts} bytes and activations are {self.activations}; they must be "
                "the same bytes"
            )

    @property
    def total_bytes(self) -> int:
        """Sum over all consumers."""
        return sum(getattr(self, name) for name in CONSUMERS)

    def __str__(self) -> str:
        sizes = sorted(self.consumers().items(), key=lambda item: -item[1])
        parts = [f"{name.replace('_', ' ')} {in_mib(size)}" for name, size in sizes if size]
        return f"{in_mib(self.total_bytes)} MiB" + (f": {', '.join(parts)}" if parts else "")

    def consumers(self) -> dict[str, int]:
        """Bytes by consumer, in the order of the table."""
        return {name: getattr(self, name) for name in CONSUMERS}

    def table(self, title: str | None = None) -> Table:
        """The consumers as a table of MiB and shares, the largest first."""
        table = _table(title, "MiB", "share")
        total = self.total_bytes
        for name, size in sorted(self.consumers().items(), key=lambda item: -item[1]):
            if size:
                table.add_row(name.replace("_", " "), in_mib(size), f"{100 * size / total:.1f} %")
        table.add_section()
        table.add_row("total", in_mib(total), "")
        return table

    def to_json(self) -> str:
        """The breakdown as JSON text, with its total."""
        return json.dumps(_content(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> MemoryBreakdown:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: not JSON, unknown entries, or bytes that do not add up.
        """
        return _read_breakdown(_loaded(text, "a memory breakdown"))


CONSUMERS: tuple[str, ...] = tuple(
    entry.name for entry in fields(MemoryBreakdown) if entry.name != "activations_by_module"
)
"""Names of the consumers, as :class:`MemoryBreakdown` has them."""


@dataclass(frozen=True)
class MemoryPhase:
    """A named moment of the step."""

    name: str
    breakdown: MemoryBreakdown


@dataclass(frozen=True)
class MemoryEstimate:
    """One step: what is alive at its moments, and at its peak.

    Example:
        >>> before, after = MemoryBreakdown(parameters=8, activations=9), MemoryBreakdown(parameters=8, gradients=8)
        >>> phases = (MemoryPhase("forward end", before), MemoryPhase("backward end", after))
        >>> step = MemoryEstimate(phases, before, "forward")
        >>> step.peak_bytes, step.at("backward end").gradients
        (17, 8)
        >>> MemoryEstimate.from_json(step.to_json()) == step
        True
    """

    MOMENTS: ClassVar[tuple[str, ...]] = ("forward end", "backward end", "optimizer step")

    phases: tuple[MemoryPhase, ...]
    """Moments in order: ``forward end``, when the loss is known; ``backward end``, when all gradients are there;
    ``optimizer step``, at its most."""
    peak: MemoryBreakdown
    """The moment with most bytes alive."""
    peak_phase: str
    """Where it is: ``forward``, ``backward`` or ``optimizer step``."""
    subject: str = ""
    """What this is of, in words."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return self.peak.total_bytes

    def __str__(self) -> str:
        of = f"{self.subject}: " if self.subject else ""
        moments = "".join(f"\n  {phase.name}: {phase.breakdown}" for phase in self.phases)
        return f"{of}peak in {self.peak_phase}, {self.peak}{moments}"

    def at(self, name: str) -> MemoryBreakdown:
        """The breakdown at a moment of :attr:`phases`, or at the ``peak``.

        Raises:
            KeyError: there is no such moment.
        """
        moments = {phase.name: phase.breakdown for phase in self.phases} | {"peak": self.peak}
        if name not in moments:
            raise KeyError(f"there is no moment {name!r}; there are {', '.join(map(repr, moments))}")
        return moments[name]

    def table(self) -> Table:
        """Consumers by moments, in MiB."""
        moments = [(phase.name, phase.breakdown) for phase in self.phases]
        moments.append((f"peak ({self.peak_phase})", self.peak))
        table = _table(self.subject or None, *(name for name, _ in moments), unit=" [MiB]")
        for name in CONSUMERS:
            sizes = [getattr(breakdown, name) for _, breakdown in moments]
            if any(sizes):
                table.add_row(name.replace("_", " "), *map(in_mib, sizes))
        table.add_section()
        table.add_row("total", *(in_mib(breakdown.total_bytes) for _, breakdown in moments))
        return table

    def to_json(self) -> str:
        """The estimate as JSON text, with all totals."""
        content = {
            "format": FORMAT,
            "subject": self.subject,
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            "peak": _content(self.peak),
            "phases": {phase.name: _content(phase.breakdown) for phase in self.phases},
        }
        return json.dumps(content, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> MemoryEstimate:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: not JSON, another layout, or bytes that do not add up.
        """
        content = _loaded(text, "a memory estimate")
        if content.get("format") != FORMAT:
            raise ValueError(
                f"The estimate has format {content.get('format')!r} and this version of lightning_memopt reads format "
                f"{FORMAT}. Make it again with the installed version."
            )
        missing = {"peak", "phases", "peak_phase"} - content.keys()
        if missing:
            raise ValueError(f"This is not a memory estimate: it has no {', '.join(sorted(missing))}.")
        return cls(
            tuple(MemoryPhase(name, _read_breakdown(entry)) for name, entry in content["phases"].items()),
            _read_breakdown(content["peak"]),
            content["peak_phase"],
            content.get("subject", ""),
        )


def highest(moments: Iterable[tuple[str, MemoryBreakdown]]) -> tuple[str, MemoryBreakdown]:
    """The moment with most bytes, the first of equals."""
    return max(moments, key=lambda moment: moment[1].total_bytes)


def added(breakdown: MemoryBreakdown, **bytes_by_consumer: int) -> MemoryBreakdown:
    """A breakdown with more bytes of some consumers."""
    return replace(breakdown, **{name: getattr(breakdown, name) + more for name, more in bytes_by_consumer.items()})


def _table(title: str | None, *columns: str, unit: str = "") -> Table:
    table = Table(title=None if title is None else Text(title), title_justify="left")  # no markup
    table.add_column("consumer")
    for column in columns:
        table.add_column(escape(column + unit), justify="right")
    return table


def _content(breakdown: MemoryBreakdown) -> dict[str, Any]:
    content = asdict(breakdown)
    content["activations_by_module"] = dict(breakdown.activations_by_module)
    return {"total_bytes": breakdown.total_bytes, **content}


def _loaded(text: str, what: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"This is not {what}: it is no valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"This is not {what}: that is a JSON object, this is {type(content).__name__}.")
    return content


def _read_breakdown(content: Any) -> MemoryBreakdown:
    content = dict(content)
    total = content.pop("total_bytes", None)
    known = {entry.name for entry in fields(MemoryBreakdown)}
    if unknown := content.keys() - known:
        raise ValueError(f"A memory breakdown has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}.")
    breakdown = MemoryBreakdown(**content)
    if total is not None and total != breakdown.total_bytes:
        raise ValueError(f"The breakdown says {total} bytes and its parts add up to {breakdown.total_bytes}.")
    return breakdown
