"""
A plan is data
==============

:class:`Plan` says, for every region of a model, whether its activations are kept or recomputed and how its inputs are
stored meanwhile; beside that it carries what was tried, measured and decided on the way. It is written as JSON next to
a run's logs, read back on another machine, compared between ranks by its digest, and shown as a table.

Only paths, treatments and compressors change a model, so only these enter :meth:`Plan.digest`: two plans with the same
digest give the same optimized model, whatever was measured on the way to them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from rich.table import Table
from rich.text import Text

from lightning_memopt.measuring.amounts import in_mib
from lightning_memopt.measuring.storage_trace import fake_mode
from lightning_memopt.observing.costs import Choice, Treatment
from lightning_memopt.version import __version__

FORMAT = 1
"""Version of the JSON layout. A reader refuses a layout it does not know."""

CompressorName = Literal["bit"]
Budget = Literal["speed", "balanced", "memory"]
Outcome = Literal["measured", "kept", "undone", "out of memory"]
TimeUnit = Literal["ms", "bytes moved"]


@dataclass(frozen=True)
class RegionPlan:
    """What happens to one region of the model, a module with all that it holds."""

    path: str
    """Name of the module in the model, as ``named_modules`` gives it."""
    class_name: str
    """Class of the module before it was treated."""
    treatment: Treatment
    """``keep``: autograd stores what it needs. ``pack``: so it does, masks, spikes and small integers in 1 to 8 bits.
    ``recompute_cheap``: outputs of products are stored, all else is recomputed. ``recompute``: only the inputs are
    stored."""
    reason: str
    """Why, in words."""
    compressor: CompressorName | None = None
    """How binary inputs are stored: ``bit`` is one bit a value."""
    compressed_args: tuple[int | str, ...] = ()
    """Positions or keyword names of the arguments that the compressor gets."""
    chunks: int = 1
    """Number of pieces along time in which the region is run."""
    cheap_chunks: int = 0
    """Of so many of the last pieces the products are kept, as under ``recompute_cheap``."""
    chunked_args: tuple[int | str, ...] = (0,)
    """Positions or keyword names of the arguments that are cut along time."""
    time_dim: int = 0
    """The dimension of time of these arguments."""
    chunks_checked: bool = False
    """The search has compared the time chunks with the whole sequence; else the first step will."""
    aliases: tuple[str, ...] = ()
    """Further names of the same module."""
    calls: int = 0
    """How often the region ran in one forward pass of the model."""
    input_bytes: int = 0
    """Bytes of the tensors given to the region in one forward pass."""
    stored_bytes: int = 0
    """Bytes that these tensors take from forward to backward under this plan."""
    saved_bytes: int | None = None
    """Bytes that the untreated region keeps alive from forward to backward (measured, level 2 and up)."""
    forward_ms: float | None = None
    """Forward time in ms (CUDA, level 2 and up)."""
    forward_flops: int = 0
    """Floating point operations of one forward pass of the region."""
    forward_bytes: int = 0
    """Bytes read and written by the operations of one forward pass of the region."""
    added_time: float | None = None
    """Time that the treatment adds to a step, as predicted, in the plan's ``time_unit``; None where it was not."""

    def changes(self) -> dict[str, Any]:
        """The part that changes the model."""
        return {
            "path": self.path,
            "treatment": self.treatment,
            "compressor": self.compressor,
            "compressed_args": list(self.compressed_args),
            "chunks": self.chunks,
            **({"cheap_chunks": self.cheap_chunks} if self.cheap_chunks else {}),
            "chunked_args": list(self.chunked_args),
            "time_dim": self.time_dim,
        }


@dataclass(frozen=True)
class Trial:
    """One plan that was measured."""

    level: int
    """0 the plain model, 1 the first plan; other plans have the level that was asked for."""
    action: str
    """What was changed, in words: splits, time chunks, removals."""
    paths: tuple[str, ...]
    """The regions that were changed."""
    outcome: Outcome
    """``measured`` for the two starting points; ``kept`` for the plan that was found, ``undone`` for others."""
    peak_bytes: int | None = None
    """Most bytes alive during the step (MAX over ranks); None when it ran out of memory."""
    seconds: float = 0.0
    """Wall time of the step."""
    reason: str = ""
    """Why there is no peak."""


@dataclass(frozen=True)
class BytesAlive:
    """Bytes alive at every position of a step: the forward pass of each region, the end of the forward pass, the
    backward pass of each region, last region first, and the optimizer step.
    """

    paths: tuple[str, ...]
    """What runs, in the order of the forward pass: regions, and in parentheses the code between them."""
    plain_bytes: tuple[int, ...]
    """At each position if nothing were treated, as predicted: ``2 * len(paths) + 2`` numbers."""
    planned_bytes: tuple[int, ...]
    """Under the plan, as predicted."""
    measured_bytes: tuple[int | None, ...]
    """Under the plan, in the measured step: the most of all calls of a region; None where no region runs."""

    def __post_init__(self) -> None:
        positions = 2 * len(self.paths) + 2
        for name in ("plain_bytes", "planned_bytes", "measured_bytes"):
            if len(getattr(self, name)) != positions:
                raise ValueError(
                    f"BytesAlive.{name} has {len(getattr(self, name))} numbers; {len(self.paths)} paths have "
                    f"{positions} positions."
                )


@dataclass(frozen=True)
class Plan:
    """Treatment of every region, with all that was seen, tried and measured to find it.

    Example:
        >>> from lightning_memopt.planning import Plan, RegionPlan
        >>> plan = Plan(regions=(RegionPlan("0", "Linear", "recompute", "largest input", compressor="bit"),), level=1)
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    regions: tuple[RegionPlan, ...]
    level: int = 1
    checkpoint_budget: Budget = "memory"
    compress: bool = True
    target_reason: str = ""
    """How the regions were found, in words."""
    device: str = "cpu"
    """Device that the step was observed on."""
    forward_flops: int = 0
    """Floating point operations of one forward pass of the whole model; 0 where they were not counted."""
    peak_bytes_before: int | None = None
    """Peak of one step of the plain model; None where it was not measured (level 1) or did not fit."""
    peak_bytes_after: int | None = None
    """Peak of one step of the optimized model; None where it was not measured (level 1) or did not fit."""
    memory_budget: int | None = None
    """Bytes that a step may take, as asked for; None where no budget was."""
    reserved_bytes: int = 0
    """Bytes of ``memory_budget`` that are not for the measured step: the state that optimizers will hold."""
    predicted_peak_bytes: int | None = None
    """What the plan's peak was predicted to be; None without a budget."""
    extra_flops: int = 0
    """Floating point operations that the plan adds to a step; 0 where they were not counted."""
    time_unit: TimeUnit | None = None
    """What ``plain_time`` and ``added_time`` count: ms on CUDA, bytes moved (operations included, at the rate at which
    memory is moved) elsewhere; None where no time was predicted."""
    plain_time: float | None = None
    """Time of a step of the plain model, as predicted from its parts."""
    added_time: float | None = None
    """Time that the plan adds to a step, as predicted."""
    measured_ms: float | None = None
    """Time in ms of the one measured step of the plan, the first of its kind (CUDA only; MAX over ranks)."""
    batch_size: int | None = None
    """Batch size that was found to be the largest within the budget; None where none was looked for."""
    alive: BytesAlive | None = None
    """Bytes alive over the step, before and after; None where they were not predicted."""
    frontier: tuple[tuple[int, float], ...] = ()
    """Peak in bytes, and added time as a share of a plain step, of plans to which none is better in both."""
    trials: tuple[Trial, ...] = ()
    """The plans that a level measured, in order."""
    search_passes: int = 0
    """Forward+backward passes that the search ran."""
    probe_passes: int = 0
    """Forward passes alone: the one that observed the regions, and those that proved time chunks."""
    search_seconds: float = 0.0
    from_shapes: bool = False
    """Whether nothing was computed: all that is called measured here was followed by shapes alone."""
    world_size: int = 1
    """Number of ranks that agreed on this plan."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries that made the plan."""

    @property
    def treated(self) -> tuple[RegionPlan, ...]:
        """The regions that the plan changes."""
        return tuple(region for region in self.regions if region.treatment != "keep")

    @property
    def recomputed(self) -> tuple[RegionPlan, ...]:
        """The regions of which only the inputs are stored."""
        return tuple(region for region in self.regions if region.treatment == "recompute")

    @property
    def added_share(self) -> float | None:
        """Time that the plan adds as a share of a plain step, as predicted; None where it was not."""
        if self.plain_time is None or self.added_time is None:
            return None
        return self.added_time / self.plain_time if self.plain_time else 0.0

    @property
    def measured_share(self) -> float | None:
        """The same from the time that was measured; None where no step was timed."""
        if self.measured_ms is None or not self.plain_time or self.time_unit != "ms":
            return None
        return self.measured_ms / self.plain_time - 1

    def digest(self) -> str:
        """SHA-256 (hexadecimal) of what changes the model: paths, treatments, compressors, chunks."""
        changes = sorted((region.changes() for region in self.treated), key=lambda change: str(change["path"]))
        return hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """The plan as JSON text, with its digest."""
        content = asdict(self)
        content["versions"] = dict(self.versions)
        return json.dumps({"format": FORMAT, "digest": self.digest(), **content}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: not JSON, another layout, a missing, unknown or wrong entry, or a digest that does not match.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"This is not a plan: it is no valid JSON ({error}).") from error
        if not isinstance(content, dict) or "format" not in content:
            raise ValueError("This is not a plan: a plan is a JSON object with an entry 'format'.")
        found = content.pop("format")
        if found != FORMAT:
            raise ValueError(
                f"The plan has format {found!r} and this version of lightning_memopt reads format {FORMAT}. "
                "Make the plan again with the installed version."
            )
        expected = content.pop("digest", None)
        content["regions"] = tuple(_read(RegionPlan, entry) for entry in _list(content, "regions"))
        content["trials"] = tuple(_read(Trial, entry) for entry in _list(content, "trials", default=()))
        if isinstance(content.get("alive"), dict):
            content["alive"] = _read(BytesAlive, content["alive"])
        plan = _read(cls, content)
        if expected is not None and expected != plan.digest():
            raise ValueError(
                f"The plan's digest is {expected} but its regions give {plan.digest()}: it was edited or damaged. "
                "Remove the entry 'digest' if you changed it on purpose."
            )
        return plan

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan to ``path`` as JSON; a reader never sees half a file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(self.to_json(), encoding="utf-8")
        unfinished.replace(path)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read the plan in the file ``path``.

        Raises:
            FileNotFoundError: there is no such plan file; says how one is made.
            ValueError: the file holds no valid plan.
        """
        path = Path(path)
        try:
            return cls.from_json(path.read_text(encoding="utf-8-sig"))
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"There is no plan file {str(path)!r}. A plan file is made from an optimized model by "
                "applied_plan(model).save(path)."
            ) from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def __str__(self) -> str:
        if self.memory_budget is not None:
            return f"Plan({self._counts(' regions')}, {self._against_budget()})"
        return f"Plan(level {self.level}, {self._counts(' regions')}, {self._peaks()})"

    def _counts(self, regions: str = "") -> str:
        """``9 of 15 recomputed, 2 partly recomputed, 1 packed``."""
        counts = [f"{len(self.recomputed)} of {len(self.regions)}{regions} recomputed"]
        for treatment, words in (("recompute_cheap", "partly recomputed"), ("pack", "packed")):
            number = sum(region.treatment == treatment for region in self.regions)
            counts += [f"{number} {words}"] if number else []
        return ", ".join(counts)

    def table(self) -> Table:
        """The plan as a rich table: a row for each region, or for equal ones; sums of the treated ones.

        Sizes in MiB, of one region also where a row stands for several. The class is below the region's name, the
        reason below its treatment: so all of it can be read on 80 columns. The caption says what was measured, and what
        is not known because it was not measured.
        """
        measured = any(region.saved_bytes is not None for region in self.regions)
        timed = self.time_unit is not None
        table = Table(
            title=self._title(),
            caption=self._caption(),
            show_footer=bool(self.regions),
            show_edge=False,
            pad_edge=False,
        )
        # Of these two the longer one gives way first, so that neither gets narrow.
        table.add_column("region", footer="treated regions", overflow="fold")
        table.add_column("treatment\nand why", footer=self._counts(), overflow="fold")
        for header, total in self._columns(measured=measured, timed=timed):
            table.add_column(header, justify="right", footer=total, no_wrap=True)
        for name, count, (class_name, treatment, reason, *numbers) in self._rows(measured=measured, timed=timed):
            style = "dim" if treatment == "keep" else None
            region = Text.assemble(name, "\n", (f"{count} {class_name}" if count > 1 else class_name, "dim"))
            why = Text.assemble(treatment, "\n" if reason else "", (reason, "dim"))
            table.add_row(region, why, *map(Text, numbers), style=style)
        return table

    def _columns(self, *, measured: bool, timed: bool) -> Iterator[tuple[str, str]]:
        """Headers of the columns of numbers, and the sums over the treated regions: others may hold some of these."""
        if measured:
            yield "kept if\nplain", in_mib(sum(region.saved_bytes or 0 for region in self.treated))
        else:
            yield "inputs", in_mib(sum(region.input_bytes for region in self.treated))
        yield "stored", in_mib(sum(region.stored_bytes for region in self.treated))
        if timed:
            yield "time", self._in_share(self.added_time)

    def _rows(self, *, measured: bool, timed: bool) -> Iterator[tuple[str, int, list[str]]]:
        """Each row's name, how many regions it holds for, and its other cells.

        Regions that differ in a number of their path alone share a row.
        """
        cells = {region.path: self._cells(region, measured=measured, timed=timed) for region in self.regions}
        alike: dict[tuple[str, ...], list[str]] = {}
        for region in self.regions:
            # A region with further names has a row of its own that shows them.
            alike.setdefault((*cells[region.path], *region.aliases), []).append(region.path)
        merged = {first: name for paths in alike.values() for first, name in _merged(paths).items()}
        for region in self.regions:
            if region.path in merged:
                name, count = merged[region.path]
                yield "\n= ".join((name, *region.aliases)), count, cells[region.path]

    def _cells(self, region: RegionPlan, *, measured: bool, timed: bool) -> list[str]:
        cells = [region.class_name, describe_treatment(region), region.reason]
        if measured:
            cells.append("" if region.saved_bytes is None else in_mib(region.saved_bytes))
        else:
            cells.append(in_mib(region.input_bytes))
        # Modules that are treated together with another one have no figures of their own.
        shown = region.treatment != "keep" and (not measured or region.saved_bytes is not None)
        cells.append(in_mib(region.stored_bytes) if shown else "")
        if timed:
            cells.append(self._in_share(region.added_time) if shown else "")
        return cells

    def _in_share(self, added: float | None) -> str:
        """``+3.1%`` of a plain step."""
        return "" if added is None or not self.plain_time else f"{added / self.plain_time:+.1%}"

    def _title(self) -> str:
        if self.memory_budget is not None:
            batch = "" if self.batch_size is None else f", batch size {self.batch_size}"
            return f"Memory plan{batch}: {self._against_budget()}"
        title = f"Memory plan, level {self.level}"
        return title if self.peak_bytes_after is None else f"{title}: {self._peaks()}"

    def _against_budget(self) -> str:
        """``peak 23.3 MiB and 6.6 MiB reserved for optimizer states and the like, 99.6% of the budget of 30.0 MiB``."""
        assert self.memory_budget is not None
        assert self.peak_bytes_after is not None
        used = (self.peak_bytes_after + self.reserved_bytes) / self.memory_budget
        reserved = (
            f" and {in_mib(self.reserved_bytes)} MiB reserved for optimizer states and the like"
            if self.reserved_bytes
            else ""
        )
        peak = f"peak {in_mib(self.peak_bytes_after)} MiB{reserved}"
        return f"{peak}, {used:.1%} of the budget of {in_mib(self.memory_budget)} MiB"

    def _peaks(self) -> str:
        if self.peak_bytes_after is None:
            return "peak not measured" if not self.search_passes else "does not fit into memory"
        if self.peak_bytes_before is None:
            return f"peak {in_mib(self.peak_bytes_after)} MiB (the plain model does not fit)"
        change = self.peak_bytes_after / self.peak_bytes_before - 1
        return f"peak {in_mib(self.peak_bytes_before)} -> {in_mib(self.peak_bytes_after)} MiB ({change:+.1%})"

    def _caption(self) -> str:
        parts = ["sizes in MiB, of each region"]
        if self.target_reason:
            parts.append(self.target_reason)
        if self.memory_budget is not None:
            return "; ".join([*parts, *self._about_budget()])
        if self.forward_flops:
            again = sum(region.forward_flops for region in self.recomputed)
            parts.append(f"{min(again / self.forward_flops, 1):.0%} of the forward FLOPs are recomputed")
        parts.extend(self._about_time())
        if self.level == 1:
            parts.append("what it saves is not measured at level 1: use level 2, or MemoryMonitor")
        if self.from_shapes:
            parts.append(_FROM_SHAPES)
        elif self.search_passes:
            parts.append(_tried(self.trials))
            parts.append(f"{self.search_passes} forward+backward passes in {self.search_seconds:.1f} s")
        return "; ".join(parts)

    def _about_budget(self) -> Iterator[str]:
        if self.predicted_peak_bytes is not None:
            yield f"predicted peak {in_mib(self.predicted_peak_bytes)}"
        if self.alive is not None:
            yield f"that of the plain model {in_mib(max(self.alive.plain_bytes))}"
        if self.forward_flops:
            # A backward pass takes about twice the operations of the forward.
            yield f"{self.extra_flops / (3 * self.forward_flops):.0%} more FLOPs a step"
        yield from self._about_time()
        if self.from_shapes:
            yield _FROM_SHAPES
        else:
            yield f"{self.search_passes} measured step{'s' * (self.search_passes != 1)}, {self.search_seconds:.1f} s"

    def _about_time(self) -> Iterator[str]:
        """``time of a step +12.5% predicted (counted in bytes moved)``."""
        if self.added_share is None or self.plain_time is None:
            return
        if self.time_unit == "ms":
            milliseconds = f"{self.plain_time:.1f} -> {self.plain_time + (self.added_time or 0.0):.1f} ms"
            yield f"time of a step {self.added_share:+.1%} predicted ({milliseconds})"
        else:
            yield f"time of a step {self.added_share:+.1%} predicted (counted in {self.time_unit})"
        if self.measured_share is not None:
            yield f"{self.measured_share:+.1%} measured ({self.measured_ms:.1f} ms, the first step)"


def _tried(trials: tuple[Trial, ...]) -> str:
    """``measured 2 plans beside the first (1 kept)``."""
    outcomes = [trial.outcome for trial in trials if trial.level >= 2]
    if not outcomes:
        return "no other plan should be better than the first"
    count = f"measured {len(outcomes)} plan{'s' * (len(outcomes) > 1)} beside the first"
    return f"{count} (1 kept)" if "kept" in outcomes else f"{count}: none was better"


_FROM_SHAPES = "predicted from shapes, nothing was computed or measured"


def _merged(paths: Sequence[str]) -> dict[str, tuple[str, int]]:
    """A name for paths that differ in a number alone, and their number, under the first of them.

    ``h.{0..3}.attn`` and 4 for four of them.
    """
    parts: dict[str, list[tuple[str, ...]]] = {path: [(part,) for part in path.split(".")] for path in paths}
    for place in range(max(map(len, parts.values()))):
        firsts: dict[Any, str] = {}
        for path, split in list(parts.items()):
            if place < len(split) and split[place][0].isdecimal():
                first = firsts.setdefault((*split[:place], None, *split[place + 1 :]), path)
                if first != path:
                    parts[first][place] += split[place]
                    del parts[path]
    return {first: (".".join(map(_numbers, split)), math.prod(map(len, split))) for first, split in parts.items()}


def _numbers(part: tuple[str, ...]) -> str:
    """``{0..3,7}`` for five numbers; a word or a single number as it is."""
    if len(part) == 1:
        return part[0]
    numbers = sorted(map(int, part))
    runs = [
        [number for _, number in run]
        for _, run in itertools.groupby(enumerate(numbers), key=lambda entry: entry[1] - entry[0])
    ]
    return "{" + ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs) + "}"


def left_to_check(plan: Plan) -> Plan:
    """The plan that says so if nothing was computed: its time chunks are compared with the whole at their first real
    use, and no bytes count as measured.
    """
    if fake_mode() is None:
        return plan
    alive = plan.alive
    if alive is not None:
        alive = replace(alive, measured_bytes=(None,) * len(alive.measured_bytes))
    regions = tuple(replace(region, chunks_checked=False) for region in plan.regions)
    return replace(plan, regions=regions, alive=alive, from_shapes=True)


def describe_treatment(treated: RegionPlan | Choice) -> str:
    """``recompute, 1-bit inputs, 4 time chunks``."""
    parts: list[str] = [treated.treatment]
    if treated.compressor is not None:
        parts.append("1-bit inputs")
    if treated.chunks > 1:
        parts.append(f"{treated.chunks} time chunks")
    if treated.cheap_chunks:
        last = "one" if treated.cheap_chunks == 1 else str(treated.cheap_chunks)
        parts.append(f"products of the last {last} kept")
    return ", ".join(parts)


# ---------------------------------------------------------------------------------------------------------------------
# Reading: JSON knows lists, strings and numbers; a plan is checked before anybody trusts it


def versions() -> dict[str, str]:
    """What a plan is made with."""
    return {
        "lightning_memopt": __version__,
        "torch": str(torch.__version__),
        "python": ".".join(map(str, sys.version_info[:3])),
    }


T = TypeVar("T", RegionPlan, Trial, BytesAlive, Plan)

_CHOICES: dict[str, tuple[Any, ...]] = {
    "treatment": get_args(Treatment),
    "compressor": (None, "bit"),
    "checkpoint_budget": ("speed", "balanced", "memory"),
    "outcome": get_args(Outcome),
    "level": (0, 1, 2, 3, 4),
    "time_unit": (None, *get_args(TimeUnit)),
}
_TUPLES: dict[str, tuple[type, ...]] = {
    "compressed_args": (int, str),
    "chunked_args": (int, str),
    "aliases": (str,),
    "paths": (str,),
    "plain_bytes": (int,),
    "planned_bytes": (int,),
    "measured_bytes": (int, type(None)),
}


def _list(content: dict[str, Any], name: str, default: Any = None) -> list[dict[str, Any]]:
    value = content.get(name, default)
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError(f"The plan's entry {name!r} must be a list of objects, found {type(value).__name__}.")
    return list(value)


def _read(kind: type[T], content: dict[str, Any]) -> T:
    declared = {entry.name: entry for entry in fields(kind)}
    unknown = sorted(content.keys() - declared.keys())
    if unknown:
        raise ValueError(f"{kind.__name__} has no entry {', '.join(map(repr, unknown))}.")
    values = {name: _value(kind, name, value, str(declared[name].type)) for name, value in content.items()}
    if values.get("treatment") == "keep" and (values.get("chunks", 1), values.get("cheap_chunks", 0)) != (1, 0):
        raise ValueError(
            f"The region {values.get('path')!r} is kept as it is, so it has no chunks and no cheap_chunks."
        )
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{kind.__name__} is incomplete: {error}.") from error


def _value(kind: type[Any], name: str, value: Any, annotation: str) -> Any:
    if name in _TUPLES:
        ok = isinstance(value, list) and all(type(item) in _TUPLES[name] for item in value)
        value = tuple(value) if ok else value
    elif name in _CHOICES:
        ok = any(type(value) is type(choice) and value == choice for choice in _CHOICES[name])
    elif name in ("regions", "trials"):
        ok = True
    elif name == "alive":
        ok = value is None or isinstance(value, BytesAlive)
    elif name == "frontier":
        ok = isinstance(value, list) and all(map(_is_point, value))
        value = tuple((int(peak), float(added)) for peak, added in value) if ok else value
    elif name == "versions":
        ok = isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    else:
        kinds = {
            kind_name: python
            for kind_name, python in (("str", str), ("int", int), ("bool", bool), ("float", (int, float)))
            if kind_name in annotation
        }
        ok = any(isinstance(value, python) and (python is bool or type(value) is not bool) for python in kinds.values())
        ok = ok or (value is None and "None" in annotation)
        if ok and name == "chunks":
            ok = value >= 1
        if ok and name == "cheap_chunks":
            ok = value >= 0
    if not ok:
        raise ValueError(f"{kind.__name__}.{name} cannot be {value!r}.")
    return value


def _is_point(value: object) -> bool:
    """Whether ``value`` is a list of bytes and a share of time."""
    return isinstance(value, list) and len(value) == 2 and type(value[0]) is int and type(value[1]) in (int, float)
