"""
The fastest plan under a byte budget
====================================

What a region holds is alive at every later position of the forward pass and at every earlier one of the backward pass,
so all positions of the regions from some boundary on, forward and backward, have one unknown in common: the bytes held
before that boundary. Seen from there, the rest of the step is one number, its peak above those bytes. For a region with
a choice that holds ``h`` bytes and takes ``own`` at its own two positions

    peak(region and rest) = max(own, h + peak(rest)),    extra(region and rest) = extra(choice) + extra(rest)

and of all treatments of the rest only those matter to which no other is better in both. So one pass from the last
region to the first gives the whole frontier of peak and time, for all budgets at once, without looking at any budget:
a larger budget picks a later point of the same frontier and cannot get a slower plan.

* **What is left behind** a backward (states, their graphs) is alive in every backward that follows, those of the
  regions before it. Where choices differ in it, the bytes that the rest leaves are a third number in which a treatment
  may be better, and add to the part of ``own`` that belongs to the backward position.
* **Shared storages** count once. The treatments of the rest are kept apart by which of the storages that it may hold
  too are held before the boundary: along a chain that is the boundary tensor.
* **Opened regions** are another path from the boundary before a region to the one after it, through its children.
* **Calls of one module** get one treatment, so a choice is remembered from the first call to the last.
* **Identical regions** give equal sums, and of equal ones one is kept.

Where it is not exact
---------------------
A frontier longer than a fixed number of points is thinned to that number: both ends stay, corners of its convex hull,
and the best points in between. So peaks are never understated, the least peak is the true one, and time is lost only
between neighbouring points. (Where choices leave different bytes, many regions may have more pairs of least peak and
bytes left than can be kept; then the least peak is that of the pairs that are.)
:attr:`Solution.lower_bound` says how much at most: no plan within the budget adds less
time. It comes from prices: let a byte of the peak cost ``p``; as max(a, b) is at least any mean of both, the cheapest
``extra + p * peak`` of a region and the rest is at least

    min over choices of  extra + max over q <= p of  (p - q) * own + q * h + cheapest(rest at price q)

If too many combinations of shared storages (or of modules that are called several times) are alive at one boundary, the
smallest of those storages count as often as they are held, which overstates the peak (and similar modules get the same
choice). :attr:`Solution.simplified` says so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_memopt.measuring.amounts import format_bytes
from lightning_memopt.observing.costs import Choice, ChoiceCost, RegionCosts, StepCosts
from lightning_memopt.planning.plan import describe_treatment
from lightning_memopt.planning.simulate import (
    Assignment,
    Correction,
    Position,
    Simulated,
    Visit,
    alive_bytes,
    check,
    gradients_of_glue,
    in_full,
    optimizer_bytes,
    positions,
    simulate,
    storage_bytes,
    visits,
    with_old_gradients,
)

# Points that are looked at over all frontiers, and the fewest and most kept in one of them. 1,000 regions of 8 choices
# then take 0.8 s of one core, and the plan adds less than 1 % more time than the bound.
_WORK = 5 * 2**20
_FEWEST_POINTS, _MOST_POINTS = 64, 4096
# So many times as many points are kept at so many boundaries from the first on.
_FINER, _FINE_BOUNDARIES = 8, 16
# Frontiers: over all boundaries the combinations of what may be held before each.
_FRONTIERS = 2**13
_FEWEST_COMBINATIONS = 16
# Prices of a byte at which the bound is computed.
_PRICES = 128
# Points of a frontier are told apart more finely where they add little time, down to this fraction of the most.
_SMALL_TIMES = 64
_HULL_ROUNDS = 5
# Points times different numbers of bytes left that are compared exactly in a frontier: at most so many, 64 MiB, and by
# the square of the number of frontiers less, so that it is done in steps of few regions.
_MOST_COMPARED, _LEFT_WORK = 2**23, 2**33

# Sums of times in another order may differ by this fraction.
_ROUNDING = 1e-12

_OPEN = -1
_NO_POSITION = -(2**62)

Bytes = NDArray[np.int64]
Time = NDArray[np.float64]


@dataclass(frozen=True)
class Solution:
    """The fastest plan within a budget, or the one with the least peak if none is."""

    budget_bytes: int
    fits: bool
    """Whether the simulated peak is within the budget. If not, ``assignment`` has the least peak there is."""
    assignment: Assignment = field(repr=False)
    simulated: Simulated
    lower_bound: float
    """No assignment within the budget adds less time than this; equal to the added time where that is the least."""
    simplified: str
    """What was simplified, so that a better plan may exist that ``lower_bound`` does not see; empty: nothing."""
    states: int
    """Points of all frontiers, a measure of the work."""
    largest_frontier: int
    """Points of the longest frontier."""
    correction: Correction
    """What was added to the simulated bytes."""


@dataclass(frozen=True)
class Reason:
    """Why a region does not get the next cheaper choice."""

    index: tuple[int, ...]
    """As in :class:`~lightning_memopt.planning.simulate.Visit`."""
    path: str
    text: str
    cheaper: Choice | None = None
    """The choice that would add less time; None if there is none."""
    position: Position | None = None
    """Where the peak would then be."""
    over_bytes: int = 0
    """By how much it would be above the budget."""


@dataclass(frozen=True)
class TradeOff:
    """The frontier of peak and added time over all plans: none is better in both than a point of it."""

    costs: StepCosts = field(repr=False)
    correction: Correction
    peaks: Bytes
    """Ascending, in bytes."""
    extras: Time
    """Descending: the least time that a plan with this peak adds."""
    simplified: str
    """As in :class:`Solution`."""
    exact: bool
    """Nothing was simplified and no frontier was thinned."""
    states: int
    largest_frontier: int
    _graph: _Graph = field(repr=False)
    _points: NDArray[np.intp] = field(repr=False)
    """Where the points are on the frontier of the first boundary."""
    _prices: Time = field(repr=False)
    _cheapest: Time = field(repr=False)
    """For each price of a byte at least so much is ``extra + price * (peak - base)`` of every plan."""

    def assignment(self, point: int) -> Assignment:
        """The plan at a point of the frontier."""
        return _follow(self._graph, self.costs.regions, int(self._points[point]))

    def least_extra(self, budget_bytes: int) -> float:
        """No plan with a peak of ``budget_bytes`` or less adds less time than this; for a budget that can be met."""
        if self.simplified:
            return _least_of_all(self.costs.regions) * (1 - _ROUNDING)
        found = float(self.extras[max(0, _within(self.peaks, budget_bytes))])
        if self.exact:
            return found
        paid = self._prices * (budget_bytes - self.costs.base_bytes)
        bounds = self._cheapest - paid - _ROUNDING * (np.abs(self._cheapest) + np.abs(paid))
        return min(found, float(np.max(bounds)))


def solve(costs: StepCosts, budget_bytes: int, correction: Correction | int = 0) -> Solution:
    """The assignment that adds the least time among those whose simulated peak is within a budget.

    The same costs give the same assignment on every machine, and a larger budget never a slower one.

    Args:
        costs: one observed step.
        budget_bytes: the peak may reach, but not exceed, so many bytes.
        correction: bytes to add to what is alive: one number, or one for each kind of position.

    Returns:
        That assignment, or if there is none, with ``fits=False`` the one with the least peak, which is then the
        smallest budget that can be met.

    Raises:
        ValueError: a region has no choice that is not refused, a time is not finite, or a gap between two regions is
            missing.

    Example:
        >>> keep = ChoiceCost(Choice(), {0: 100}, forward_peak_bytes=100, backward_peak_bytes=50, extra=0.0)
        >>> again = ChoiceCost(Choice("recompute"), {1: 10}, 110, 150, extra=1.0)
        >>> first = RegionCosts("first", (keep, again), {1: 10}, in_flight_gradient_bytes=10, gradient_bytes=5)
        >>> keep_too = ChoiceCost(Choice(), {2: 100}, 100, 50, 0.0)
        >>> second = RegionCosts("second", (keep_too,), {3: 10}, 10, 5)
        >>> step = StepCosts(1000, (first, second), ({}, {}, {}), 20, 0, 10, 9.0, 0, "ms")
        >>> [solve(step, budget).assignment.regions for budget in (1260, 1259)]
        [(0, 0), (1, 0)]
        >>> refused = solve(step, 1100)
        >>> refused.fits, refused.simulated.peak_bytes, str(refused.simulated.peak)
        (False, 1175, 'the backward of first')
    """
    return pick(trade_off(costs, correction), budget_bytes)


def pick(plans: TradeOff, budget_bytes: int) -> Solution:
    """What :func:`solve` returns, from a frontier that is there already."""
    assignment = plans.assignment(max(0, _within(plans.peaks, budget_bytes)))
    simulated = simulate(plans.costs, assignment, plans.correction)
    return Solution(
        budget_bytes=budget_bytes,
        fits=simulated.peak_bytes <= budget_bytes,
        assignment=assignment,
        simulated=simulated,
        lower_bound=plans.least_extra(max(budget_bytes, simulated.peak_bytes)),
        simplified=plans.simplified,
        states=plans.states,
        largest_frontier=plans.largest_frontier,
        correction=plans.correction,
    )


def frontier(costs: StepCosts, points: int, correction: Correction | int = 0) -> list[tuple[int, float, Assignment]]:
    """Plans from the least peak to the least added time, spread over both.

    Args:
        costs: one observed step.
        points: how many plans at most, two or more.
        correction: bytes to add to what is alive: one number, or one for each kind of position.

    Returns:
        Peak in bytes (ascending), added time in the unit of ``costs`` (descending), assignment.

    Raises:
        ValueError: fewer than two points; a region has no choice that is not refused.
    """
    if points < 2:
        raise ValueError(f"A frontier has two ends; asked for {points} points, give 2 or more.")
    plans = trade_off(costs, correction)
    chosen: NDArray[np.intp] = np.arange(len(plans.peaks))
    if len(chosen) > points:
        along = _along(plans.peaks, plans.extras)
        chosen = np.unique(np.searchsorted(along, np.linspace(0, along[-1], points)))
    return [(int(plans.peaks[at]), float(plans.extras[at]), plans.assignment(int(at))) for at in chosen]


def why(costs: StepCosts, solution: Solution) -> tuple[Reason, ...]:
    """Why each region does not get the next cheaper choice.

    Args:
        costs: what ``solution`` was found for.
        solution: the plan to explain.

    Returns:
        One reason for each region that the plan treats as a whole, in the order of the forward pass.

    Example:
        >>> keep = ChoiceCost(Choice(), {0: 3 * 2**20}, forward_peak_bytes=0, backward_peak_bytes=0, extra=0.0)
        >>> again = ChoiceCost(Choice("recompute"), {1: 2**20}, 0, 0, extra=1.5)
        >>> block = RegionCosts("block", (keep, again), {}, 0, 0)
        >>> step = StepCosts(0, (block,), ({}, {}), 0, 0, 0, 9.0, 0, "ms")
        >>> [reason.text for reason in why(step, solve(step, 2 * 2**20))]
        ['keep would be 1.5 ms faster, but the end of the forward pass would take 1.0 MiB more than the budget']
    """
    visited = visits(costs, solution.assignment)
    sizes = storage_bytes(costs)
    before = _as_planned(costs, visited, sizes, solution.correction)
    calls: dict[str, list[int]] = {}
    for at, visit in enumerate(visited):
        calls.setdefault(visit.region.path, []).append(at)
    moments = positions(visited)
    # A plan that does not fit has the least peak there is, so that is what any other choice would raise.
    limit = solution.budget_bytes if solution.fits else solution.simulated.peak_bytes
    limit_words = "the budget" if solution.fits else "the least peak there is"
    reasons = []
    for at, visit in enumerate(visited):
        cheaper = _next_cheaper(visit)
        if cheaper is None:
            reasons.append(Reason(visit.index, visit.region.path, "the fastest choice"))
            continue
        changed = {call: _with_choice(visited[call], cheaper.choice) for call in calls[visit.region.path]}
        if len(changed) == 1:
            alive = _with_one_change(before, at, visit.choice, cheaper, sizes)
        else:
            every = [changed.get(call, other) for call, other in enumerate(visited)]
            alive = np.array(alive_bytes(costs, every, sizes, solution.correction))
        at_peak = int(np.argmax(alive))
        over = max(0, int(alive[at_peak]) - limit)
        faster = sum(visited[call].choice.extra - now.choice.extra for call, now in changed.items())
        text = f"{describe_treatment(cheaper.choice)} would {_faster_in_words(faster, costs)}, "
        text += (
            f"but {moments[at_peak]} would take {format_bytes(over)} more than {limit_words}"
            if over
            else "and would fit: the plan is not the best there is"
        )
        reasons.append(Reason(visit.index, visit.region.path, text, cheaper.choice, moments[at_peak], over))
    return tuple(reasons)


class _AsPlanned(NamedTuple):
    """Bytes alive under a plan, and when each storage is held and found in flight."""

    alive: Bytes
    """At each position of the step, in order."""
    held: dict[int, list[int]]
    """By storage: ``2 * visit`` for what is held from just before a visit on, one more for what the visit holds."""
    flying: dict[int, list[int]]
    """By storage: the visits that find it in flight."""


def _as_planned(
    costs: StepCosts, visited: tuple[Visit, ...], sizes: Mapping[int, int], offsets: Correction
) -> _AsPlanned:
    held: dict[int, list[int]] = {}
    flying: dict[int, list[int]] = {}
    for at, visit in enumerate(visited):
        for _, entered in visit.entered:
            for storage in entered:
                held.setdefault(storage, []).append(2 * at)
        for storage in visit.choice.holds:
            held.setdefault(storage, []).append(2 * at + 1)
        for storage in visit.region.in_flight:
            flying.setdefault(storage, []).append(at)
    for storage in costs.outside[-1]:
        held.setdefault(storage, []).append(2 * len(visited))
    return _AsPlanned(np.array(alive_bytes(costs, visited, sizes, offsets)), held, flying)


def _with_one_change(before: _AsPlanned, at: int, old: ChoiceCost, new: ChoiceCost, sizes: Mapping[int, int]) -> Bytes:
    """Bytes alive at each position if one visit gets another choice."""
    alive = before.alive.copy()
    count = len(alive) // 2 - 1
    forward, end, backward = alive[:count], alive[count : count + 1], alive[count + 1 : -1][::-1]
    for storages, sign in ((new.holds.keys() - old.holds.keys(), 1), (old.holds.keys() - new.holds.keys(), -1)):
        for storage in storages:
            mine, never = 2 * at + 1, 2 * count + 1
            other = min((moment for moment in before.held.get(storage, ()) if moment != mine), default=never)
            if other < mine:
                continue
            # From this visit on until another one holds it, where it is not counted as in flight.
            until, size = min((other + 1) // 2, count), sign * sizes[storage]
            forward[at + 1 : until] += size
            for visit in before.flying.get(storage, ()):
                if at < visit < until:
                    forward[visit] -= size
            backward[at : min(other // 2, count)] += size
            if other == never:
                end += size
    forward[at] += new.forward_peak_bytes - old.forward_peak_bytes
    backward[at] += new.backward_peak_bytes - old.backward_peak_bytes
    backward[:at] += new.left_bytes - old.left_bytes
    alive[-1] += new.left_bytes - old.left_bytes
    return alive


def _next_cheaper(visit: Visit) -> ChoiceCost | None:
    cheaper = [choice for choice in visit.region.choices if not choice.refused and choice.extra < visit.choice.extra]
    return max(cheaper, key=lambda choice: choice.extra, default=None)


def _with_choice(visit: Visit, choice: Choice) -> Visit:
    """Another call of a module gets the same treatment, if it can."""
    same = [cost for cost in visit.region.choices if cost.choice == choice and not cost.refused]
    return replace(visit, choice=same[0]) if same else visit


def _faster_in_words(extra: float, costs: StepCosts) -> str:
    if costs.unit == "ms":
        return f"be {extra:.3g} ms faster"
    return f"move {format_bytes(int(extra))} less through memory"


def trade_off(costs: StepCosts, correction: Correction | int = 0) -> TradeOff:
    """The frontier of peak and added time, from which every budget picks its plan.

    Args:
        costs: one observed step.
        correction: bytes to add to what is alive: one number, or one for each kind of position.

    Raises:
        ValueError: a region has no choice that is not refused, a time is not finite, or a gap between two regions is
            missing.
    """
    check(costs)
    _check_times(costs.regions)
    offsets = in_full(correction)
    graph = _graph(costs, offsets)
    thinned = _sweep(graph)
    start = graph.frontiers[0][_NOTHING]
    if not len(start.peaks):
        raise ValueError(_dead_end(costs))
    # Of the plans below what the optimizer step needs under each, only the fastest is of interest.
    floor = optimizer_bytes(costs) + graph.least_left + offsets.optimizer
    peaks = np.maximum(start.peaks + costs.base_bytes, floor + start.left)
    points = _undominated(peaks, start.extras)
    peaks, extras = peaks[points], start.extras[points]
    prices = _price_range(peaks, extras)
    sizes = [len(kept.peaks) for boundary in graph.frontiers for kept in boundary.values()]
    return TradeOff(
        costs=costs,
        correction=offsets,
        peaks=peaks,
        extras=extras,
        simplified=graph.simplified,
        exact=not thinned and not graph.simplified,
        states=sum(sizes),
        largest_frontier=max(sizes),
        _graph=graph,
        _points=points,
        _prices=prices,
        _cheapest=_at_prices(graph, prices),
    )


def _check_times(regions: tuple[RegionCosts, ...]) -> None:
    for region in regions:
        for choice in region.choices:
            if not choice.refused and not math.isfinite(choice.extra):
                raise ValueError(
                    f"The choice {describe_treatment(choice.choice)!r} of the region {region.path!r} adds "
                    f"{choice.extra} to the time of a step; give a finite time, or say in 'refused' why it cannot be "
                    "taken."
                )
        _check_times(region.children)


def _within(peaks: Bytes, budget_bytes: int) -> int:
    """The last point whose peak is within the budget; -1 if there is none."""
    return int(np.searchsorted(peaks, budget_bytes, side="right")) - 1


# ---------------------------------------------------------------------------------------------------------------------
# Boundaries between regions, numbered so that a region comes before its children and these before what follows it


class _Way(NamedTuple):
    """One way to get from the boundary before a region to a later one: a choice, or into the opened region."""

    stop: int
    chosen: int
    """Position of the choice; ``_OPEN`` into the opened region."""
    path: str
    treatment: Choice | None
    """None: opened."""
    holds: frozenset[int]
    flying: frozenset[int]
    """Storages alive when its forward starts, whoever holds them."""
    forward: int
    """Bytes on top of these at the forward position."""
    backward: int
    """Bytes on top of what is held at the backward position, and of what the rest of the step leaves."""
    left: int
    """Bytes left behind the backward."""
    extra: float


def _ways(costs: StepCosts, offsets: Correction) -> list[list[_Way]]:
    """The ways from each boundary but the last."""
    ways: list[list[_Way]] = []
    before = [frozenset(named) for named in costs.outside[:-1]]
    _add_ways(ways, costs.regions, before, costs.outside_gradient_bytes, offsets)
    return ways


def _add_ways(
    ways: list[list[_Way]],
    regions: tuple[RegionCosts, ...],
    before: list[frozenset[int]],
    gradients_after: int,
    offsets: Correction,
) -> None:
    gradients_after += sum(region.gradient_bytes for region in regions)
    for region, entered in zip(regions, before, strict=True):
        gradients_after -= region.gradient_bytes
        here: list[_Way] = []
        start = len(ways)
        ways.append(here)
        if region.children:
            inside = [frozenset[int]()] * len(region.children)
            _add_ways(ways, region.children, inside, gradients_after + gradients_of_glue(region), offsets)
        in_flight = entered.union(region.in_flight)
        gradients = gradients_after + region.in_flight_gradient_bytes
        here.extend(
            _Way(
                stop=len(ways),
                chosen=chosen,
                path=region.path,
                treatment=choice.choice,
                holds=entered.union(choice.holds),
                flying=in_flight,
                forward=choice.forward_peak_bytes + offsets.forward,
                backward=gradients + choice.backward_peak_bytes + offsets.backward,
                left=choice.left_bytes,
                extra=choice.extra,
            )
            for chosen, choice in enumerate(region.choices)
            if not choice.refused
        )
        if region.children:
            glue = entered.union(region.glue or ())
            here.append(_Way(start + 1, _OPEN, region.path, None, glue, frozenset(), 0, 0, 0, 0.0))


def _least_left(ways: list[list[_Way]]) -> list[int]:
    """By boundary, the fewest bytes that the rest of the step leaves behind."""
    least = [0] * (len(ways) + 1)
    for boundary in range(len(ways) - 1, -1, -1):
        least[boundary] = min((way.left + least[way.stop] for way in ways[boundary]), default=0)
    return least


# ---------------------------------------------------------------------------------------------------------------------
# What may be held before a boundary, as far as the rest of the step can tell

_Held = tuple[int, tuple[tuple[int, int], ...]]
"""A bit for each shared storage; the treatments of modules that will be called again, by group of modules."""
_NOTHING: _Held = (0, ())


class _Move(NamedTuple):
    """A way, from a boundary where it is known what is held."""

    hold: int
    """Bytes that it adds to those held."""
    own: int
    """Bytes above those held before, at its own two positions, if the rest leaves as little as it can behind;
    ``_NO_POSITION`` if opened."""
    backward: int
    """The same at the backward position alone, to which what the rest leaves more is added."""
    left: int
    """Bytes left by it and the rest, above the fewest that are possible, if the rest leaves as little as it can."""
    extra: float
    chosen: int
    stop: int
    then: _Held
    """What is held at the boundary ``stop``."""


class _Points(NamedTuple):
    """Treatments of the rest of the step to which no other is better in everything."""

    peaks: Bytes
    """Ascending: peak of the rest above what is held before it."""
    extras: Time
    """Descending, where all leave the same behind."""
    left: Bytes
    """Left behind, above the fewest bytes that the rest of the step can leave."""
    moves: NDArray[np.int32]
    """The move from this boundary."""
    follow: NDArray[np.int32]
    """The point of the frontier at the boundary where that move stops."""


@dataclass
class _Graph:
    moves: list[dict[_Held, list[_Move]]]
    """From each boundary, by what is held before it."""
    end: dict[_Held, int]
    """Bytes above those held, at the end of the forward pass."""
    simplified: str
    least_left: int
    """The fewest bytes that any plan leaves behind."""
    frontiers: list[dict[_Held, _Points]]


@dataclass
class _Sharing:
    """Which storages and modules the frontiers are kept apart by."""

    sizes: Mapping[int, int]
    tracked: dict[int, tuple[int, int]]
    """Storages held before a boundary and used after it: the first boundary from which a way holds them, the last from
    which one holds them or finds them in flight. Another way in between need not."""
    groups: dict[str, int]
    """By path of a module that is called several times: the group of modules that get one treatment."""
    calls: dict[int, tuple[int, int]]
    """By group: the first and the last boundary from which one of its modules is called."""
    common: dict[int, frozenset[Choice | None]]
    """By group of several modules: the treatments that all of them can get."""


def _graph(costs: StepCosts, correction: Correction) -> _Graph:
    offsets = with_old_gradients(costs, correction)
    ways = _ways(costs, offsets)
    after = frozenset(costs.outside[-1])
    sharing = _sharing(ways, after, storage_bytes(costs))
    most = max(_FEWEST_COMBINATIONS, _FRONTIERS // (len(ways) + 1))
    overstated: set[int] = set()
    joined: set[str] = set()
    while True:
        moves, crowded = _expand(ways, sharing, most)
        if crowded is None:
            break
        storages, treatments = ({held[part] for held in moves[crowded]} for part in (0, 1))
        alike = _join_groups(ways, sharing, crowded) if len(treatments) > len(storages) else set()
        dropped = set() if alike else _track_less(sharing, crowded)
        joined |= alike
        overstated |= dropped
        if not alike and not dropped:
            most *= 2
    bits = _bits(sharing)
    end = {
        held: sum(sharing.sizes[storage] for storage in after if not bits.get(storage, 0) & held[0])
        + costs.end_peak_bytes
        + offsets.end
        for held in moves.pop()
    }
    words = []
    if overstated:
        size = format_bytes(sum(sharing.sizes[storage] for storage in overstated))
        words.append(f"{len(overstated)} storages ({size}) count as often as they are held")
    if joined:
        words.append(f"{len(joined)} modules that are called several times share their treatment with another")
    return _Graph(moves, end, "; ".join(words), _least_left(ways)[0], [])


def _sharing(ways: list[list[_Way]], after: frozenset[int], sizes: dict[int, int]) -> _Sharing:
    held_from: dict[int, int] = {}
    used_until: dict[int, int] = {}
    called: dict[str, list[int]] = {}
    for boundary, here in enumerate(ways):
        for path in {way.path for way in here}:  # one, or none if all is refused
            called.setdefault(path, []).append(boundary)
        for way in here:
            for storage in way.holds:
                held_from.setdefault(storage, boundary)
                used_until[storage] = boundary
            for storage in way.flying:
                used_until[storage] = boundary
    used_until.update(dict.fromkeys(after, len(ways)))
    # In the order of ``sizes``, that of the observation: names of storages must not decide anything.
    tracked = {
        storage: (held_from[storage], used_until[storage])
        for storage in sizes
        if storage in held_from and held_from[storage] < used_until[storage]
    }
    again = [path for path, boundaries in called.items() if len(boundaries) > 1]
    groups = {path: group for group, path in enumerate(again)}
    calls = {group: (called[path][0], called[path][-1]) for path, group in groups.items()}
    return _Sharing(sizes, tracked, groups, calls, {})


def _bits(sharing: _Sharing) -> dict[int, int]:
    return {storage: 1 << place for place, storage in enumerate(sharing.tracked)}


def _expand(ways: list[list[_Way]], sharing: _Sharing, most: int) -> tuple[list[dict[_Held, list[_Move]]], int | None]:
    """All moves from all that may be held at each boundary, and the first boundary with more than ``most`` of these."""
    bits = _bits(sharing)
    live = _live(sharing, bits, len(ways) + 1)
    least_left = _least_left(ways)
    treatments: dict[Choice | None, int] = {}
    moves: list[dict[_Held, list[_Move]]] = [{} for _ in range(len(ways) + 1)]
    moves[0][_NOTHING] = []
    for boundary, here in enumerate(ways):
        reached = moves[boundary]
        if len(reached) > most:
            return moves, boundary
        for way in here:
            hold, shared_hold = _apart(way.holds, sharing.sizes, bits, live[boundary])
            flying, shared_flying = _apart(way.flying, sharing.sizes, bits, live[boundary])
            kept = live[way.stop]
            left = way.left + least_left[way.stop] - least_left[boundary]
            adds = sum(bits.get(storage, 0) for storage in way.holds) & kept
            treatment = treatments.setdefault(way.treatment, len(treatments))
            group = sharing.groups.get(way.path)
            if group is not None and way.treatment not in sharing.common.get(group, (way.treatment,)):
                continue
            for held, found in reached.items():
                storages, treated_alike = held
                if group is not None and dict(treated_alike).get(group, treatment) != treatment:
                    continue
                held_here = hold + sum(size for bit, size in shared_hold if not storages & bit)
                flying_here = flying + sum(size for bit, size in shared_flying if not storages & bit)
                own = backward = _NO_POSITION
                if way.chosen != _OPEN:
                    backward = held_here + way.backward + least_left[way.stop]
                    own = max(flying_here + way.forward, backward)
                alike = treated_alike
                if group is not None:
                    alike = tuple(sorted({*alike, (group, treatment)}))
                if alike:
                    alike = tuple(pair for pair in alike if sharing.calls[pair[0]][1] >= way.stop)
                then = ((storages & kept) | adds, alike)
                found.append(_Move(held_here, own, backward, left, way.extra, way.chosen, way.stop, then))
                moves[way.stop].setdefault(then, [])
        for held, found in reached.items():
            reached[held] = _useful(found)
    return moves, len(ways) if len(moves[-1]) > most else None


def _useful(moves: list[_Move]) -> list[_Move]:
    """The moves to which no other is as good in everything; of equal ones the first."""
    useful: list[tuple[int, _Move]] = []
    in_turn = sorted(enumerate(moves), key=lambda entry: (entry[1].extra, entry[1][:4], entry[0]))
    for number, move in in_turn:
        if not any(
            other.hold <= move.hold
            and other.own <= move.own
            and other.backward <= move.backward
            and other.left <= move.left
            and other.then == move.then
            and other.stop == move.stop
            for _, other in useful
        ):
            useful.append((number, move))
    return [move for _, move in sorted(useful)]


def _live(sharing: _Sharing, bits: Mapping[int, int], boundaries: int) -> list[int]:
    """By boundary the bits of the storages that may be held before it and used after it."""
    changes = [0] * (boundaries + 1)
    for storage, (first, last) in sharing.tracked.items():
        changes[first + 1] ^= bits[storage]
        changes[last + 1] ^= bits[storage]
    live, bitmap = [], 0
    for change in changes[:boundaries]:
        bitmap ^= change
        live.append(bitmap)
    return live


def _apart(
    storages: frozenset[int], sizes: Mapping[int, int], bits: Mapping[int, int], live: int
) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of those that cannot be held yet; bit and bytes of each that can."""
    apart = [(bits.get(storage, 0) & live, sizes[storage]) for storage in storages]
    return sum(size for bit, size in apart if not bit), [(bit, size) for bit, size in apart if bit]


def _track_less(sharing: _Sharing, crowded: int) -> set[int]:
    """Tell apart only the larger half of the storages live at a boundary, and at no other one more than that."""
    starting: dict[int, list[int]] = {}
    for storage, (first, _) in sharing.tracked.items():
        starting.setdefault(first + 1, []).append(storage)
    most = sum(first < crowded <= last for first, last in sharing.tracked.values()) // 2
    order = {storage: place for place, storage in enumerate(sharing.tracked)}
    live: list[tuple[int, int, int]] = []
    dropped: set[int] = set()
    for boundary in sorted(starting):
        live = [entry for entry in live if sharing.tracked[entry[2]][1] >= boundary]
        live += [(sharing.sizes[storage], order[storage], storage) for storage in starting[boundary]]
        live.sort()
        excess = max(0, len(live) - most)
        dropped.update(storage for _, _, storage in live[:excess])
        live = live[excess:]
    for storage in dropped:
        del sharing.tracked[storage]
    return dropped


def _join_groups(ways: list[list[_Way]], sharing: _Sharing, crowded: int) -> set[str]:
    """Of the modules that are called before and after a boundary, treat each two neighbours alike.

    Returns:
        The paths of the modules that follow another; empty if there are no two with a treatment in common.
    """
    pending = [group for group, (first, last) in sharing.calls.items() if first < crowded <= last]
    offered: dict[int, frozenset[Choice | None]] = {}
    for here in ways:
        for group in {sharing.groups[way.path] for way in here if way.path in sharing.groups}:
            treatments = frozenset(way.treatment for way in here)
            offered[group] = sharing.common.get(group, offered.get(group, treatments)) & treatments
    following: set[str] = set()
    for first, second in zip(pending[::2], pending[1::2], strict=False):
        if offered[first] & offered[second]:
            paths = {path for path, group in sharing.groups.items() if group == second}
            sharing.groups.update(dict.fromkeys(paths, first))
            spans = sharing.calls[first], sharing.calls.pop(second)
            sharing.calls[first] = (min(span[0] for span in spans), max(span[1] for span in spans))
            sharing.common[first] = offered[first] & offered[second]
            sharing.common.pop(second, None)
            following |= paths
    return following


# ---------------------------------------------------------------------------------------------------------------------
# From the last boundary to the first


def _sweep(graph: _Graph) -> bool:
    """Compute the frontiers of all boundaries; whether one was thinned."""
    count = sum(len(moves) for boundary in graph.moves for moves in boundary.values())
    if any(move.left for boundary in graph.moves for moves in boundary.values() for move in moves):
        count *= 4  # each point takes more time
    most = min(_MOST_POINTS, max(_FEWEST_POINTS, _WORK // max(1, count)))
    most_compared = min(_MOST_COMPARED, _LEFT_WORK // max(1, sum(map(len, graph.moves))) ** 2)
    zero, none_left = np.zeros(1, np.int32), np.zeros(1, np.int64)
    last = {held: _Points(np.array([peak]), np.zeros(1), none_left, zero, zero) for held, peak in graph.end.items()}
    graph.frontiers = [{} for _ in graph.moves] + [last]
    thinned = False
    for boundary in range(len(graph.moves) - 1, -1, -1):
        # Budgets pick from the first boundary: it keeps all points, and those just behind it give it many.
        most_here = (most * _FINER if boundary < _FINE_BOUNDARIES else most) if boundary else sys.maxsize
        for held, moves in graph.moves[boundary].items():
            points = _join(moves, graph.frontiers)
            kept, all_of_them = _best(points, most_here, most_compared)
            graph.frontiers[boundary][held] = _only(points, kept)
            thinned |= not all_of_them
    return thinned


def _join(moves: list[_Move], frontiers: list[dict[_Held, _Points]]) -> _Points:
    """What moves from a boundary make of the frontiers where they stop."""
    by_rest: dict[tuple[int, _Held], list[int]] = {}
    for number, move in enumerate(moves):
        by_rest.setdefault((move.stop, move.then), []).append(number)
    peaks, extras, left, taken, follow = [_NO_BYTES], [_NO_TIME], [_NO_BYTES], [_NO_MOVES], [_NO_MOVES]
    for (stop, then), numbers in by_rest.items():
        rest = frontiers[stop][then]
        hold = np.array([moves[number].hold for number in numbers])[:, None]
        own = np.array([moves[number].own for number in numbers])[:, None]
        extra = np.array([moves[number].extra for number in numbers])[:, None]
        leaves = np.array([moves[number].left for number in numbers])[:, None]
        if rest.left.any():
            own = np.maximum(own, np.array([moves[number].backward for number in numbers])[:, None] + rest.left)
        peaks.append(np.maximum(rest.peaks + hold, own).ravel())
        extras.append((rest.extras + extra).ravel())
        left.append((rest.left + leaves).ravel())
        taken.append(np.repeat(np.array(numbers, np.int32), len(rest.peaks)))
        follow.append(np.tile(np.arange(len(rest.peaks), dtype=np.int32), len(numbers)))
    return _Points(
        np.concatenate(peaks),
        np.concatenate(extras),
        np.concatenate(left),
        np.concatenate(taken),
        np.concatenate(follow),
    )


def _only(points: _Points, kept: NDArray[np.intp]) -> _Points:
    return _Points(points.peaks[kept], points.extras[kept], points.left[kept], points.moves[kept], points.follow[kept])


_NO_BYTES = np.zeros(0, np.int64)
_NO_TIME = np.zeros(0)
_NO_MOVES = np.zeros(0, np.int32)


def _best(points: _Points, most: int, most_compared: int) -> tuple[NDArray[np.intp], bool]:
    """The points to which no other is better in everything, at most ``most``, and whether these are all of them.

    If the bytes left are too many different ones, or the points too many, those are kept that have the least peaks for
    their time, those that have the least sums of peak and bytes left (a byte of either raises the peak of the step by a
    byte at most), and those that have the least peaks for what they leave, whatever their time: the least peak of all
    plans is one of them.
    """
    if not points.left.any():
        return _spread(points.peaks, points.extras, most)
    fewest = 2 * len(points.left)
    if fewest <= most_compared and len(points.left) * len(np.unique(points.left)) <= most_compared:
        best = _undominated_apart(points)
        if len(best) <= most:
            return best, True
    peaks, left, share = points.peaks, points.left, most // 3
    fast = _spread(peaks, points.extras, share)[0]
    fast_leaving_little = _spread(peaks + left, points.extras, share)[0]
    least = _spread(peaks, left.astype(np.float64), share)[0]
    return np.unique(np.concatenate([fast, fast_leaving_little, least])), False


def _undominated(peaks: Bytes, extras: Time) -> NDArray[np.intp]:
    """The points to which no other is better in both, by peak; of equal points the first one stays."""
    order = np.argsort(peaks, kind="stable")
    peaks, extras = peaks[order], extras[order]
    faster = np.ones(len(order), bool)
    faster[1:] = extras[1:] < np.minimum.accumulate(extras)[:-1]
    order, peaks = order[faster], peaks[faster]
    lower = np.ones(len(order), bool)
    lower[:-1] = peaks[1:] > peaks[:-1]
    return order[lower]


def _undominated_apart(points: _Points) -> NDArray[np.intp]:
    """The same where the bytes left count, too.

    Of those before it, by peak and then by time, none that leaves as little is as fast.
    """
    order = np.lexsort((points.left, points.extras, points.peaks))
    extras = points.extras[order]
    rows = np.unique(points.left[order], return_inverse=True)[1]
    fastest = np.full((rows.max() + 1, len(order) + 1), np.inf)
    fastest[rows, np.arange(1, len(order) + 1)] = extras
    np.minimum.accumulate(fastest, axis=1, out=fastest)
    np.minimum.accumulate(fastest, axis=0, out=fastest)
    return order[extras < fastest[rows, np.arange(len(order))]]


def _spread(peaks: Bytes, extras: Time, most: int) -> tuple[NDArray[np.intp], bool]:
    """At most ``most`` points of a frontier, and whether these are all of it.

    They are its ends, corners of its convex hull, and the best ones in between. The corners are what a plan at some
    price of a byte consists of, so without them many regions together lose much.
    """
    points = _undominated(peaks, extras)
    if len(points) <= most:
        return points, True
    peaks, extras = peaks[points], extras[points]
    along = _along(peaks, extras)
    corners = _corners(peaks, extras)
    if len(corners) > most * 3 // 4:
        corners = corners[_starts(along[corners], most * 3 // 4)]
    starts = _starts(along, most - len(corners) - 2)
    ends = np.append(starts[1:], len(peaks)) - 1
    sizes = ends - starts + 1
    rate = (extras[starts] - extras[ends]) / np.maximum(peaks[ends] - peaks[starts], 1)
    cost = extras + np.repeat(rate, sizes) * (peaks - np.repeat(peaks[starts], sizes))
    best = np.flatnonzero(cost == np.repeat(np.minimum.reduceat(cost, starts), sizes))
    best = best[np.diff(np.searchsorted(starts, best, side="right"), prepend=0) > 0]
    kept = np.zeros(len(peaks), bool)
    kept[corners] = True
    kept[best] = True
    kept[[0, -1]] = True
    return points[kept], False


def _along(peaks: Bytes, extras: Time) -> Time:
    """Where on the frontier a point is, from 0 to 1: half by its peak, half by its added time, small ones apart."""
    above = (extras - extras[-1]) / (extras[0] - extras[-1])
    by_peak = (peaks - peaks[0]) / (peaks[-1] - peaks[0])
    by_time = 1 - np.log1p(_SMALL_TIMES * above) / np.log1p(_SMALL_TIMES)
    halfway: Time = (by_peak + by_time) / 2
    return halfway


def _starts(along: Time, groups: int) -> NDArray[np.int64]:
    """The first point of each of so many equal parts."""
    part = np.minimum(np.floor(along * groups), groups - 1)
    first = np.ones(len(part), bool)
    np.greater(part[1:], part[:-1], out=first[1:])
    return np.flatnonzero(first)


def _corners(peaks: Bytes, extras: Time) -> NDArray[np.int64]:
    """The corners of the lower convex hull, and few other points."""
    at = np.arange(len(peaks))
    peaks = peaks.astype(np.float64)
    for _ in range(_HULL_ROUNDS):
        # A point above the line between its neighbours is no corner, whatever else is removed in the same round. Points
        # on the line stay: they are what identical regions give.
        rate = (extras[:-1] - extras[1:]) / (peaks[1:] - peaks[:-1])
        corner = np.ones(len(at), bool)
        np.greater(rate[:-1], (1 - 1e-9) * rate[1:], out=corner[1:-1])
        at, peaks, extras = at[corner], peaks[corner], extras[corner]
        if len(at) == len(corner):
            break
    return at


def _follow(graph: _Graph, regions: tuple[RegionCosts, ...], point: int) -> Assignment:
    """The assignment that a point of the first frontier stands for."""
    boundary, held = 0, _NOTHING

    def assign(regions: tuple[RegionCosts, ...]) -> Assignment:
        nonlocal boundary, held, point
        chosen: list[int | Assignment] = []
        for region in regions:
            points = graph.frontiers[boundary][held]
            move = graph.moves[boundary][held][points.moves[point]]
            boundary, held, point = move.stop, move.then, int(points.follow[point])
            chosen.append(assign(region.children) if move.chosen == _OPEN else move.chosen)
        return Assignment(tuple(chosen))

    return assign(regions)


def _dead_end(costs: StepCosts) -> str:
    for region in costs.regions:
        if not region.children and all(choice.refused for choice in region.choices):
            reasons = "; ".join(f"{choice.choice.treatment}: {choice.refused}" for choice in region.choices)
            return f"The region {region.path!r} cannot be treated in any way: {reasons or 'it has no choices'}."
    return (
        "No assignment is possible: each way to treat some region is refused, or the calls of one module have no "
        "treatment in common."
    )


# ---------------------------------------------------------------------------------------------------------------------
# A bound on the added time


def _least_of_all(regions: tuple[RegionCosts, ...]) -> float:
    """The least time that any assignment adds."""
    least = 0.0
    for region in regions:
        ways = [choice.extra for choice in region.choices if not choice.refused]
        ways += [_least_of_all(region.children)] if region.children else []
        least += min(ways, default=math.inf)
    return least


def _price_range(peaks: Bytes, extras: Time) -> Time:
    """Prices of a byte, around those at which one point of the frontier is as cheap as another."""
    corners = _corners(peaks, extras)
    if len(corners) < 2:
        return np.zeros(1)
    rates = np.diff(extras[corners]) / -np.diff(peaks[corners])
    below = np.geomspace(rates.min() / 16, rates.min(), _PRICES // 8, endpoint=False)
    return np.concatenate([np.zeros(1), below, np.quantile(rates, np.linspace(0, 1, _PRICES))])


def _at_prices(graph: _Graph, prices: Time) -> Time:
    """For each price of a byte at least so much is ``extra + price * peak above what lives throughout``."""
    cheapest = [dict[_Held, Time]() for _ in graph.moves] + [{held: prices * peak for held, peak in graph.end.items()}]
    for boundary in range(len(graph.moves) - 1, -1, -1):
        for held, moves in graph.moves[boundary].items():
            offers = [_offer(move, cheapest[move.stop][move.then], prices) for move in moves]
            cheapest[boundary][held] = np.min(offers, axis=0) if offers else np.full_like(prices, np.inf)
    return cheapest[0][_NOTHING]


def _offer(move: _Move, rest: Time, prices: Time) -> Time:
    if move.chosen == _OPEN:
        return move.extra + prices * move.hold + rest
    within: Time = np.maximum.accumulate(prices * (move.hold - move.own) + rest)
    return move.extra + prices * move.own + within
