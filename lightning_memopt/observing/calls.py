"""
The calls of one forward pass
=============================

What a forward pass consists of: calls of regions, calls inside these, and stretches of code between them. Of each it is
known which storages it made, which of them autograd saved for it, and what was alive when it began.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_memopt.observing.costs import Choice
from lightning_memopt.observing.experiments import Moment, Result
from lightning_memopt.observing.observe import Work
from lightning_memopt.observing.regions import Region
from lightning_memopt.observing.series import Series


class Saved:
    """Stands in the graph for a tensor that autograd saved."""

    __slots__ = ("__weakref__", "storage", "tensor")

    def __init__(self, storage: int, tensor: Tensor | None) -> None:
        self.storage = storage
        self.tensor = tensor


@dataclass(eq=False)
class Span:
    """Some code of the forward pass, from one moment to another."""

    first_sequence: int
    first_storage: int
    """Numbers of autograd's next node, and of the next storage, when it begins."""
    in_flight: dict[int, int]
    """Bytes by storage alive when it begins."""
    last_sequence: int = 0
    last_storage: int = 0
    saved: list[weakref.ref[Saved]] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    settled: tuple[int, ...] | None = None

    def created(self, storage: int) -> bool:
        """Whether the storage was made in here."""
        return self.first_storage <= storage < self.last_storage

    def still_saved(self) -> tuple[int, ...]:
        """The storages that the graph keeps for the nodes made in here, in order."""
        if self.settled is not None:
            return self.settled
        alive = (reference() for reference in self.saved)
        return tuple(dict.fromkeys(saved.storage for saved in alive if saved is not None))

    def settle(self) -> None:
        """Remember what the graph keeps now."""
        self.settled = self.still_saved()


@dataclass(eq=False)
class Stretch(Span):
    """Code between the calls of regions; what it saves is kept until it ends."""

    start_bytes: int = 0
    peak_bytes: int = 0
    """Bytes alive when it begins, and the most until it ends."""
    kept: list[Saved] = field(default_factory=list)
    backward_peak_bytes: int = 0
    """If its backward was run: the most bytes alive meanwhile, above those before it."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing ran in it, neither what makes tensors nor what changes them."""
        made_nothing = (self.first_sequence, self.first_storage) == (self.last_sequence, self.last_storage)
        return made_nothing and self.work == Work() and not self.saved


@dataclass(eq=False)
class Call(Span):
    """One call of a region."""

    index: int = -1
    region: Region | None = None
    body: list[Span] = field(default_factory=list)
    opens: bool = True
    """Whether it may be treated piece by piece: no module inside was called twice."""
    before: Moment | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    trace: int = 0
    """Hash over its operations."""
    saves: list[tuple[int, int]] = field(default_factory=list)
    """Of every saved tensor the storage, and the fewest bits that hold its elements (0: more than 8)."""
    neighbours: tuple[int, ...] = ()
    """Storages of its inputs, in the order in which the experiments name them."""
    outputs: tuple[int | None, ...] = ()
    """Storages of its outputs in that order; None for those that were there before the pass."""
    results: tuple[Result, ...] = ()
    reasons: dict[Choice, str] = field(default_factory=dict)
    """Why choices were not tried."""
    is_series: bool = False
    """Whether its body is the call, or the series, that it begins with, and the call that was given its output."""
    copies: dict[int, Tensor] | None = None
    """By storage, what stands for its inputs, which may be gone."""
    series: list[Call] = field(default_factory=list)
    """Of calls of its body that follow each other; none of them is part of another."""
    latest: tuple[Call, weakref.ref[Tensor]] | None = None
    """The call or series of its body that the next call may carry on, and what it returned."""
    carries_on: Call | None = None
    """What it was given the output of, nothing else, and right after."""

    def still_saved(self) -> tuple[int, ...]:
        """The storages that the graph keeps for the nodes made in here, in order."""
        if not self.is_series:
            return super().still_saved()
        return tuple(dict.fromkeys(storage for call in self.body for storage in call.still_saved()))

    def let_go(self) -> None:
        """Keep nothing that it would take to run it again."""
        self.before, self.args, self.kwargs, self.copies = None, (), {}, None

    def end_body(self) -> None:
        """No call in it can be carried on any more."""
        if self.latest is not None:
            self.latest[0].let_go()
            self.latest = None

    @property
    def path(self) -> str:
        """The region's; empty for the pass as a whole."""
        return "" if self.region is None else self.region.path

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that were called: of a series all, of any other call one."""
        return tuple(member.region.module for member in self.members if member.region is not None)

    @property
    def members(self) -> tuple[Call, ...]:
        """The calls of a series, in order; of any other call itself alone."""
        if not self.is_series:
            return (self,)
        return tuple(member for call in self.body if isinstance(call, Call) for member in call.members)

    @property
    def parts(self) -> list[Span]:
        """Its body, with series in place of the calls that they join."""
        if self.is_series:
            return self.body
        starts = {series.members[0]: series for series in self.series}
        parts: list[Span] = []
        last: Span | None = None
        for span in self.body:
            series = starts.get(span) if isinstance(span, Call) else None
            if last is None:
                parts.append(span if series is None else series)
                last = None if series is None else series.members[-1]
            elif span is last:
                last = None
        return parts


def all_spans(span: Span) -> Iterator[Span]:
    """A piece of code and all pieces inside it, in order."""
    yield span
    if isinstance(span, Call):
        for inner in span.body:
            yield from all_spans(inner)


def carried_on(around: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """The call that has just ended in ``around``, if a new one is given what it returned and nothing else."""
    if around.latest is None:
        return None
    (call, output), around.latest = around.latest, None
    *_, ended, between = around.body
    right_after = ended is call.members[-1] and isinstance(between, Stretch) and between.is_empty
    if right_after and len(args) == 1 and not kwargs and args[0] is output():
        return call
    call.let_go()
    return None


def joined(first: Call, second: Call) -> Call:
    """Two calls, or a series and a call that carries it on, as one."""
    assert first.before is not None
    assert second.before is not None
    path = f"({first.members[0].path} ... {second.path})"
    return Call(
        first_sequence=first.first_sequence,
        first_storage=first.first_storage,
        in_flight=first.in_flight,
        last_sequence=second.last_sequence,
        last_storage=second.last_storage,
        work=first.work + second.work,
        region=Region(path, Series([*first.modules, *second.modules]), outside=True),
        body=[first, second],
        before=first.before.followed_by(second.before),
        args=first.args,
        kwargs=first.kwargs,
        trace=hash((first.trace, second.trace)),
        saves=first.saves + second.saves,
        outputs=second.outputs,
        is_series=True,
        copies=first.copies,
    )
