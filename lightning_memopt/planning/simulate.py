"""
The peak of a plan, without running it
======================================

A training step passes these positions, and at each of them the bytes alive are a sum of known parts:

* **forward** of a region: what all before it hold, united with the tensors in flight at its start, and what it needs
  while it runs;
* **end**, between the last forward and the first backward: all that is held, the logits and the loss;
* **backward** of a region, last region first: what all up to and including it hold, the gradients of the parameters
  behind it, what the regions behind it left (states and their graphs), the gradients in flight, and what it needs while
  it runs;
* **optimizer**: all gradients, all that was left, and what the optimizer needs on top.

Everywhere the bytes that live throughout are added. A storage counts once, however many regions hold it. The peak is
the largest of these sums.

A region that is opened is replaced by its children. What it holds outside them (its glue) is taken to be held from its
start, and the gradients of parameters outside its children to be there when its backward starts: both are upper bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_memopt.observing.costs import ChoiceCost, RegionCosts, StepCosts

Kind = Literal["forward", "end", "backward", "optimizer"]

OUTSIDE = "outside the regions"
_END_WORDS = "the end of the forward pass"
_LEFT = "states and outputs that outlive the backward"


@dataclass(frozen=True)
class Assignment:
    """How each region is treated.

    Example:
        >>> Assignment((0, Assignment((2, 0)), 1))  # the second of three regions is opened into its two children
        Assignment(regions=(0, Assignment(regions=(2, 0)), 1))
    """

    regions: tuple[int | Assignment, ...]
    """For each region in order: the position of its choice in ``RegionCosts.choices``, or, if it is opened, the
    assignment of its children."""


@dataclass(frozen=True)
class Visit:
    """A region that an assignment treats as a whole."""

    index: tuple[int, ...]
    """Position among the regions of the step, then among the children of the opened region, and so on."""
    region: RegionCosts
    choice: ChoiceCost
    chosen: int
    """Position of ``choice`` in ``region.choices``."""
    entered: tuple[tuple[str, Mapping[int, int]], ...]
    """By name, storages held from just before it on: those outside the regions, the glue of opened regions."""
    gradients_after: int
    """Bytes of the gradients of parameters that exist when its backward starts."""


@dataclass(frozen=True)
class Position:
    """A moment of the step."""

    kind: Kind
    path: str = ""
    """The region that runs; empty at the end of the forward pass and in the optimizer."""
    index: tuple[int, ...] = ()
    """The index of that region as in :class:`Visit`: a region may be called twice."""

    def __str__(self) -> str:
        if self.kind == "end":
            return _END_WORDS
        return "the optimizer step" if self.kind == "optimizer" else f"the {self.kind} of {self.path}"


@dataclass(frozen=True)
class Holder:
    """Somebody who holds bytes at the peak."""

    name: str
    """Path of a region, or in words what it is."""
    bytes: int


@dataclass(frozen=True)
class Correction:
    """Bytes to add to the simulated ones, by kind of position: what a measured step took more (or less)."""

    forward: int = 0
    end: int = 0
    backward: int = 0
    optimizer: int = 0

    @classmethod
    def everywhere(cls, offset_bytes: int) -> Correction:
        """The same offset at every position."""
        return cls(offset_bytes, offset_bytes, offset_bytes, offset_bytes)

    def at(self, kind: Kind) -> int:
        """Offset at positions of this kind, in bytes."""
        return int(getattr(self, kind))


@dataclass(frozen=True)
class Simulated:
    """One step under one assignment."""

    peak_bytes: int
    peak: Position
    """The position that holds the peak; the first one if there are several."""
    timeline: tuple[tuple[Position, int], ...] = field(repr=False)
    """Bytes alive at each position, in the order of the step."""
    extra: float
    """Time that the assignment adds to a plain step, in the unit of the costs."""
    extra_flops: int
    at_peak: tuple[Holder, ...] = field(repr=False)
    """Who holds the bytes at the peak, largest first; they add up to ``peak_bytes``."""


def simulate(costs: StepCosts, plan: Assignment, correction: Correction | int = 0) -> Simulated:
    """The peak of a training step under ``plan``, and who holds it.

    Args:
        costs: one observed step.
        plan: a choice for every region.
        correction: bytes to add to what is alive: one number, or one for each kind of position.

    Returns:
        Peak and timeline in bytes, the added time in the unit of ``costs``.

    Raises:
        ValueError: the plan does not fit the regions, or takes a choice that is refused.

    Example:
        >>> from lightning_memopt.observing.costs import Choice, ChoiceCost
        >>> keep = ChoiceCost(Choice(), {0: 100}, forward_peak_bytes=100, backward_peak_bytes=50, extra=0.0)
        >>> again = ChoiceCost(Choice("recompute"), {1: 10}, 100, 150, extra=1.0)
        >>> one = RegionCosts("block", (keep, again), {1: 10}, in_flight_gradient_bytes=10, gradient_bytes=5)
        >>> step = StepCosts(1000, (one,), ({}, {}), 20, 0, 10, 9.0, 0, "ms")
        >>> simulate(step, Assignment((0,))).peak_bytes
        1160
        >>> found = simulate(step, Assignment((1,)))
        >>> found.peak_bytes, str(found.peak), found.extra
        (1170, 'the backward of block', 1.0)
    """
    offsets = in_full(correction)
    sizes = storage_bytes(costs)
    visited = visits(costs, plan)
    timeline = tuple(zip(positions(visited), alive_bytes(costs, visited, sizes, offsets), strict=True))
    peak, peak_bytes = max(timeline, key=lambda moment: moment[1])
    extra = 0.0
    for visit in reversed(visited):  # in the order in which the solver adds, so that both get the same number
        extra += visit.choice.extra
    return Simulated(
        peak_bytes=peak_bytes,
        peak=peak,
        timeline=timeline,
        extra=extra,
        extra_flops=sum(visit.choice.extra_flops for visit in visited),
        at_peak=_holders(costs, visited, peak, sizes, offsets),
    )


def storage_bytes(costs: StepCosts) -> dict[int, int]:
    """Bytes of every storage of the step; where the observation names several sizes, the largest."""
    sizes: dict[int, int] = {}
    for named in _mappings(costs):
        for storage, size in named.items():
            if size > sizes.get(storage, -1):
                sizes[storage] = size
    return sizes


def optimizer_bytes(costs: StepCosts) -> int:
    """Bytes alive in the optimizer step, without what the choices of a plan leave behind."""
    gradients = costs.outside_gradient_bytes + sum(region.gradient_bytes for region in costs.regions)
    return costs.base_bytes + gradients + costs.optimizer_peak_bytes


def gradients_of_glue(region: RegionCosts) -> int:
    """Bytes of the gradients of parameters that an opened region has outside its children."""
    return max(0, region.gradient_bytes - sum(child.gradient_bytes for child in region.children))


def correct(correction: Correction, simulated: Simulated, measured_peak_bytes: int) -> Correction:
    """Take what a measured step says about the model of memory into the correction.

    A higher peak than simulated may have been anywhere, so all kinds of positions rise by the difference. A lower one
    says that nothing was above it, so the kinds that were simulated above it fall, to that height. The fall is a guess
    for the other positions of that kind: a plan that relies on it has to be measured again.

    Args:
        correction: what ``simulated`` was computed with.
        simulated: the step as predicted.
        measured_peak_bytes: the peak of the same plan in a real step.

    Example:
        >>> moments = ((Position("forward", "block"), 80), (Position("end"), 100))
        >>> step = Simulated(100, Position("end"), moments, extra=0.0, extra_flops=0, at_peak=())
        >>> correct(Correction(), step, measured_peak_bytes=103)
        Correction(forward=3, end=3, backward=3, optimizer=3)
        >>> correct(Correction(), step, measured_peak_bytes=95)
        Correction(forward=0, end=-5, backward=0, optimizer=0)
    """
    above = measured_peak_bytes - simulated.peak_bytes
    if above >= 0:
        return Correction(
            correction.forward + above,
            correction.end + above,
            correction.backward + above,
            correction.optimizer + above,
        )
    highest: dict[Kind, int] = {}
    for position, alive in simulated.timeline:
        highest[position.kind] = max(alive, highest.get(position.kind, alive))
    for kind, alive in highest.items():
        if alive > measured_peak_bytes:
            correction = replace(correction, **{kind: correction.at(kind) - (alive - measured_peak_bytes)})
    return correction


def in_full(correction: Correction | int) -> Correction:
    """One number of bytes is the same at every position."""
    return correction if isinstance(correction, Correction) else Correction.everywhere(correction)


def with_old_gradients(costs: StepCosts, correction: Correction) -> Correction:
    """What is added by kind of position: the correction, and in the forward pass the gradients of the step before."""
    old = costs.old_gradient_bytes
    return replace(correction, forward=correction.forward + old, end=correction.end + old)


# ---------------------------------------------------------------------------------------------------------------------
# Walking through the regions


def visits(costs: StepCosts, plan: Assignment) -> tuple[Visit, ...]:
    """The regions that ``plan`` treats as a whole, in the order of the forward pass.

    Raises:
        ValueError: the plan does not fit the regions, or takes a choice that is refused.
    """
    check(costs)
    before: list[_Entered] = [((OUTSIDE, named),) for named in costs.outside[:-1]]
    return tuple(_walk(costs.regions, plan, before, costs.outside_gradient_bytes, (), "the step"))


def added_time(visited: Iterable[Visit]) -> dict[str, float]:
    """By path, the time that a region's treatment adds to a step, all calls together."""
    added: dict[str, float] = {}
    for visit in visited:
        added[visit.region.path] = added.get(visit.region.path, 0.0) + visit.choice.extra
    return added


def positions(visited: Sequence[Visit]) -> list[Position]:
    """The positions of the step, in order."""
    forward = [Position("forward", visit.region.path, visit.index) for visit in visited]
    backward = [Position("backward", visit.region.path, visit.index) for visit in reversed(visited)]
    return [*forward, Position("end"), *backward, Position("optimizer")]


def alive_bytes(
    costs: StepCosts, visited: Sequence[Visit], sizes: Mapping[int, int], correction: Correction
) -> list[int]:
    """Bytes alive at each of :func:`positions`; ``sizes`` are those of :func:`storage_bytes`."""
    offsets = with_old_gradients(costs, correction)
    forward, backward = [], []
    held: set[int] = set()
    alive = costs.base_bytes
    left = all_left = sum(visit.choice.left_bytes for visit in visited)
    for visit in visited:
        left -= visit.choice.left_bytes
        for _, entered in visit.entered:
            alive += _add(held, entered, sizes)
        flying = sum(sizes[storage] for storage in visit.region.in_flight if storage not in held)
        forward.append(alive + flying + visit.choice.forward_peak_bytes + offsets.forward)
        alive += _add(held, visit.choice.holds, sizes)
        gradients = visit.gradients_after + visit.region.in_flight_gradient_bytes
        backward.append(alive + gradients + left + visit.choice.backward_peak_bytes + offsets.backward)
    alive += _add(held, costs.outside[-1], sizes)
    end = alive + costs.end_peak_bytes + offsets.end
    return [*forward, end, *reversed(backward), optimizer_bytes(costs) + all_left + offsets.optimizer]


_Entered = tuple[tuple[str, Mapping[int, int]], ...]


def _walk(
    regions: tuple[RegionCosts, ...],
    plan: Assignment,
    before: list[_Entered],
    gradients_after: int,
    parent: tuple[int, ...],
    name: str,
) -> Iterator[Visit]:
    if len(plan.regions) != len(regions):
        raise ValueError(
            f"The assignment has {len(plan.regions)} entries for {name}, which consists of {len(regions)} regions; "
            "give one choice, or one assignment of its children, for each region in order."
        )
    gradients_after += sum(region.gradient_bytes for region in regions)
    for number, (region, chosen, entered) in enumerate(zip(regions, plan.regions, before, strict=True)):
        gradients_after -= region.gradient_bytes
        index = (*parent, number)
        if isinstance(chosen, Assignment):
            if not region.children:
                raise ValueError(f"The assignment opens {region.path!r} (region {index}), which has no children.")
            first = (*entered, (region.path, region.glue or {}))
            inside: list[_Entered] = [first, *([()] * (len(region.children) - 1))]
            gradients = gradients_after + gradients_of_glue(region)
            yield from _walk(region.children, chosen, inside, gradients, index, repr(region.path))
        else:
            yield Visit(index, region, _choice(region, chosen, index), chosen, entered, gradients_after)


def _choice(region: RegionCosts, chosen: int, index: tuple[int, ...]) -> ChoiceCost:
    if not 0 <= chosen < len(region.choices):
        raise ValueError(
            f"The assignment takes choice {chosen} for {region.path!r} (region {index}), "
            f"which has choices 0 to {len(region.choices) - 1}."
        )
    choice = region.choices[chosen]
    if choice.refused:
        raise ValueError(
            f"The assignment takes choice {chosen} ({choice.choice.treatment}) for {region.path!r} (region {index}), "
            f"which is refused: {choice.refused}"
        )
    return choice


def check(costs: StepCosts) -> None:
    """Refuse costs that say nothing about some gap between two regions.

    Raises:
        ValueError: ``outside`` does not have one entry more than there are regions.
    """
    if len(costs.outside) != len(costs.regions) + 1:
        raise ValueError(
            f"The costs name storages outside the regions for {len(costs.outside)} gaps, but {len(costs.regions)} "
            f"regions have {len(costs.regions) + 1}: before the first, between each two, after the last."
        )


def _add(held: set[int], storages: Iterable[int], sizes: Mapping[int, int]) -> int:
    """Bytes of the storages that were not held; they are now."""
    new = set(storages) - held
    held |= new
    return sum(sizes[storage] for storage in new)


def _mappings(costs: StepCosts) -> Iterator[Mapping[int, int]]:
    yield from costs.outside
    pending = list(reversed(costs.regions))
    while pending:
        region = pending.pop()
        yield region.in_flight
        for choice in region.choices:
            yield choice.holds
        if region.glue is not None:
            yield region.glue
        pending.extend(reversed(region.children))


def _holders(
    costs: StepCosts, visited: Sequence[Visit], peak: Position, sizes: Mapping[int, int], offsets: Correction
) -> tuple[Holder, ...]:
    """Everything alive at ``peak``; a storage belongs to the first region that holds it."""
    by_name: Counter[str] = Counter()
    by_name["what is alive throughout (weights, batch, all else that the process holds)"] += costs.base_bytes
    by_name["what earlier steps took beyond the prediction"] += offsets.at(peak.kind)
    if peak.kind in ("forward", "end"):
        by_name["gradients of the step before"] += costs.old_gradient_bytes
    left = sum(visit.choice.left_bytes for visit in visited)
    if peak.kind == "optimizer":
        by_name[_LEFT] += left
        by_name["gradients of parameters"] += optimizer_bytes(costs) - costs.base_bytes - costs.optimizer_peak_bytes
        by_name["the optimizer while it runs"] += costs.optimizer_peak_bytes
        return _largest_first(by_name)
    held: set[int] = set()
    for visit in visited:
        left -= visit.choice.left_bytes
        for owner, entered in visit.entered:
            by_name[owner] += _add(held, entered, sizes)
        region, choice = visit.region, visit.choice
        here = visit.index == peak.index
        if here and peak.kind == "forward":
            flying = set(region.in_flight) - held
            by_name["tensors in flight"] += sum(sizes[storage] for storage in flying)
            by_name[f"{region.path} while its forward runs"] += choice.forward_peak_bytes
            return _largest_first(by_name)
        by_name[region.path] += _add(held, choice.holds, sizes)
        if here:
            by_name[_LEFT] += left
            by_name["gradients of parameters"] += visit.gradients_after
            by_name["gradients in flight"] += region.in_flight_gradient_bytes
            by_name[f"{region.path} while its backward runs"] += choice.backward_peak_bytes
            return _largest_first(by_name)
    by_name[OUTSIDE] += _add(held, costs.outside[-1], sizes)
    by_name["logits, loss and first gradients"] += costs.end_peak_bytes
    return _largest_first(by_name)


def _largest_first(by_name: Counter[str]) -> tuple[Holder, ...]:
    return tuple(Holder(name, size) for name, size in by_name.most_common() if size)
