"""The simulated peak of a plan, and the fastest plan under a budget against all plans there are."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_memopt.observing.costs import Choice, ChoiceCost, RegionCosts, StepCosts
from lightning_memopt.planning import solve as solving
from lightning_memopt.planning.simulate import (
    Assignment,
    Correction,
    Holder,
    Position,
    correct,
    simulate,
    visits,
)
from lightning_memopt.planning.solve import frontier, pick, solve, trade_off, why

KEEP = Choice()
TREATMENTS = (KEEP, Choice("pack"), Choice("recompute_cheap"), Choice("recompute"), Choice("recompute", "bit"))
TREATMENTS += tuple(Choice("recompute", "bit", chunks) for chunks in (2, 4, 8))


def cost(holds: Mapping[int, int], forward: int, backward: int, extra: float, choice: Choice = KEEP) -> ChoiceCost:
    return ChoiceCost(choice, holds, forward, backward, extra, extra_flops=int(10 * extra))


def region(path: str, *choices: ChoiceCost, in_flight: Mapping[int, int] | None = None) -> RegionCosts:
    return RegionCosts(path, choices, in_flight or {}, in_flight_gradient_bytes=7, gradient_bytes=3)


def step(*regions: RegionCosts, **changes: object) -> StepCosts:
    plain = StepCosts(1000, regions, tuple({} for _ in range(len(regions) + 1)), 20, 2, 11, 100.0, 1000, "ms")
    return replace(plain, **changes)  # type: ignore[arg-type]


def all_assignments(regions: tuple[RegionCosts, ...]) -> Iterator[Assignment]:
    ways: list[list[int | Assignment]] = []
    for one in regions:
        here: list[int | Assignment] = [at for at, choice in enumerate(one.choices) if not choice.refused]
        ways.append(here + (list(all_assignments(one.children)) if one.children else []))
    return (Assignment(chosen) for chosen in itertools.product(*ways))


def count_assignments(regions: tuple[RegionCosts, ...]) -> int:
    return math.prod(
        sum(not choice.refused for choice in one.choices) + (count_assignments(one.children) if one.children else 0)
        for one in regions
    )


def treats_calls_alike(costs: StepCosts, plan: Assignment) -> bool:
    """Each module gets one treatment, however often it is called."""
    treatments: dict[str, object] = {}

    def walk(regions: tuple[RegionCosts, ...], assignment: Assignment) -> bool:
        for one, chosen in zip(regions, assignment.regions, strict=True):
            treatment = None if isinstance(chosen, Assignment) else one.choices[chosen].choice
            if treatments.setdefault(one.path, treatment) != treatment:
                return False
            if isinstance(chosen, Assignment) and not walk(one.children, chosen):
                return False
        return True

    return walk(costs.regions, plan)


# ---------------------------------------------------------------------------------------------------------------------
# Random steps


MOST_ASSIGNMENTS = 1200


@st.composite
def steps(draw: st.DrawFn, *, regions: int = 6, calls: bool = False, leaving: bool = True) -> StepCosts:
    """A step whose regions share storages with neighbours and far away, with everything that costs can say."""
    # Few small numbers give many ties; large odd ones give none.
    size = draw(st.sampled_from([st.integers(0, 4), st.integers(0, 40), st.integers(0, 10**9)]))
    extra = draw(
        st.sampled_from([st.integers(0, 3).map(float), st.integers(0, 10**5).map(lambda number: number / 1000)])
    )
    # Often all leave the same behind.
    left = draw(st.sampled_from([st.just(0), st.integers(0, 3), size])) if leaving else st.just(0)
    count = draw(st.integers(1, regions))
    ids = st.integers(0, 2 * count)
    sizes = draw(st.lists(size, min_size=2 * count + 1, max_size=2 * count + 1))
    own = itertools.count(1000)

    def shared() -> dict[int, int]:
        return {storage: sizes[storage] for storage in draw(st.lists(ids, max_size=2))}

    def drawn_region(path: str, choices: int, children: int) -> RegionCosts:
        made = []
        for at in range(choices):
            holds = {**shared(), next(own): draw(size)}
            made.append(
                replace(cost(holds, draw(size), draw(size), draw(extra), TREATMENTS[at]), left_bytes=draw(left))
            )
        if choices > 1 and draw(st.booleans()):
            made[draw(st.integers(0, choices - 1))] = replace(made[0], refused="not possible")
        inside = tuple(drawn_region(f"{path}.{at}", draw(st.integers(1, 2)), 0) for at in range(children))
        glue = {**shared(), next(own): draw(size)} if children and draw(st.booleans()) else None
        return RegionCosts(path, tuple(made), shared(), draw(size), draw(size), inside, glue)

    names = [f"r{draw(st.integers(0, count - 1))}" if calls else f"r{at}" for at in range(count)]
    made: list[RegionCosts] = []
    for name in names:
        one = drawn_region(name, draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 0, 1, 2])))
        if count_assignments((*made, one)) > MOST_ASSIGNMENTS:
            break
        made.append(one)
    outside = tuple(shared() if draw(st.booleans()) else {} for _ in range(len(made) + 1))
    return StepCosts(draw(size), tuple(made), outside, draw(size), draw(size), draw(size), 100.0, 0, "ms", draw(size))


Points = list[tuple[int, float]]


def all_points(costs: StepCosts, correction: Correction | int = 0, *, calls: bool = False) -> Points:
    """Peak and added time of every assignment."""
    found = []
    for plan in all_assignments(costs.regions):
        if not calls or treats_calls_alike(costs, plan):
            simulated = simulate(costs, plan, correction)
            found.append((simulated.peak_bytes, simulated.extra))
    return found


def best(points: Points, budget: int) -> float:
    return min(extra for peak, extra in points if peak <= budget)


def budgets_of(points: Points) -> list[int]:
    """Budgets at which the answer may change, and those just below."""
    peaks = sorted({peak for peak, _ in points})
    peaks = peaks[:: max(1, len(peaks) // 12)] + peaks[-1:]
    return sorted({budget for peak in peaks for budget in (peak - 1, peak)})


def renamed(costs: StepCosts, names: Callable[[int], int]) -> StepCosts:
    """The same step with other names of storages, named in another order."""

    def mapping(named: Mapping[int, int]) -> dict[int, int]:
        return {names(storage): named[storage] for storage in reversed(list(named))}

    def region(one: RegionCosts) -> RegionCosts:
        return replace(
            one,
            choices=tuple(replace(choice, holds=mapping(choice.holds)) for choice in one.choices),
            in_flight=mapping(one.in_flight),
            children=tuple(map(region, one.children)),
            glue=None if one.glue is None else mapping(one.glue),
        )

    return replace(costs, regions=tuple(map(region, costs.regions)), outside=tuple(map(mapping, costs.outside)))


# ---------------------------------------------------------------------------------------------------------------------
# Simulation


class TestSimulate:
    def test_every_position_is_the_sum_that_the_step_has_there(self) -> None:
        first = region("first", cost({1: 100, 2: 50}, 30, 40, 0.0), in_flight={1: 100, 3: 8})
        second = region("second", cost({2: 50, 4: 60}, 5, 6, 0.0), in_flight={2: 50, 5: 9})
        costs = step(first, second, outside=({3: 8}, {6: 16}, {4: 60, 7: 1}))
        found = simulate(costs, Assignment((0, 0)))
        assert [(str(position), alive) for position, alive in found.timeline] == [
            ("the forward of first", 1000 + (8 + 100) + 30),
            ("the forward of second", 1000 + (8 + 100 + 50 + 16) + 9 + 5),
            ("the end of the forward pass", 1000 + (8 + 100 + 50 + 16 + 60 + 1) + 20),
            ("the backward of second", 1000 + (8 + 100 + 50 + 16 + 60) + 2 + 7 + 6),
            ("the backward of first", 1000 + (8 + 100 + 50) + (2 + 3) + 7 + 40),
            ("the optimizer step", 1000 + (2 + 3 + 3) + 11),
        ]
        assert (found.peak_bytes, str(found.peak)) == (1255, "the end of the forward pass")

    def test_what_a_region_leaves_is_alive_in_every_backward_after_its_own_and_in_the_optimizer_step(self) -> None:
        first = region("first", replace(cost({1: 100}, 30, 40, 0.0), left_bytes=4000))
        inner = region("second.inner", replace(cost({2: 50}, 5, 6, 0.0), left_bytes=500))
        second = RegionCosts("second", (cost({}, 0, 0, 0.0),), {}, 7, 3, (inner,), {})
        third = region("third", replace(cost({}, 0, 0, 0.0), left_bytes=20))
        plan = Assignment((0, Assignment((0,)), 0))
        costs = step(first, second, third)
        without = step(
            *(
                replace(one, choices=(replace(one.choices[0], left_bytes=0),))
                for one in (first, replace(second, children=(region("second.inner", cost({2: 50}, 5, 6, 0.0)),)), third)
            )
        )
        found, before = (simulate(of, plan) for of in (costs, without))
        left = {
            str(position): alive - plain
            for (position, alive), (_, plain) in zip(found.timeline, before.timeline, strict=True)
        }
        assert {name: size for name, size in left.items() if size} == {
            "the backward of second.inner": 20,
            "the backward of first": 520,
            "the optimizer step": 4520,
        }

    def test_an_opened_region_holds_its_glue_around_its_children(self) -> None:
        inner = (region("block.a", cost({1: 10}, 1, 2, 0.0)), region("block.b", cost({2: 20}, 3, 4, 1.5)))
        block = RegionCosts("block", (cost({3: 90}, 5, 6, 0.0),), {}, 7, 10, inner, glue={4: 40, 1: 10})
        costs = step(block, region("next", cost({}, 0, 0, 0.25)))
        found = simulate(costs, Assignment((Assignment((0, 0)), 0)))
        later = 2 + 3  # gradients outside, of the next region
        glue_gradients = 10 - 3 - 3
        assert [(position.path, position.index, alive) for position, alive in found.timeline if position.path] == [
            ("block.a", (0, 0), 1000 + 50 + 1),
            ("block.b", (0, 1), 1000 + 50 + 3),
            ("next", (1,), 1000 + 70),
            ("next", (1,), 1000 + 70 + 2 + 7),
            ("block.b", (0, 1), 1000 + 70 + later + glue_gradients + 7 + 4),
            ("block.a", (0, 0), 1000 + 50 + later + glue_gradients + 3 + 7 + 2),
        ]
        assert (found.extra, found.extra_flops) == (1.75, 17)

    @settings(max_examples=60, deadline=None)
    @given(steps(), st.integers(0, 10**6))
    def test_those_who_hold_the_peak_add_up_to_it(self, costs: StepCosts, seed: int) -> None:
        plan = random.Random(seed).choice(list(all_assignments(costs.regions)))
        found = simulate(costs, plan, Correction(1, 2, 3, 4))
        assert sum(holder.bytes for holder in found.at_peak) == found.peak_bytes
        assert [holder.bytes for holder in found.at_peak] == sorted((h.bytes for h in found.at_peak), reverse=True)
        assert found.peak_bytes == max(alive for _, alive in found.timeline)

    def test_the_holders_are_named(self) -> None:
        costs = step(region("big", cost({1: 500}, 0, 100, 0.0)), region("small", cost({1: 500, 2: 50}, 0, 0, 0.0)))
        found = simulate(costs, Assignment((0, 0)))
        assert found.peak == Position("backward", "big", (0,))
        assert found.at_peak[:3] == (
            Holder("what is alive throughout (weights, batch, all else that the process holds)", 1000),
            Holder("big", 500),
            Holder("big while its backward runs", 100),
        )
        assert {holder.name for holder in found.at_peak[3:]} == {"gradients in flight", "gradients of parameters"}

    def test_a_correction_is_added_where_it_belongs(self) -> None:
        costs = step(region("one", cost({1: 10}, 1, 1, 0.0)))
        plain, offset = (simulate(costs, Assignment((0,)), given) for given in (0, Correction(1, 20, 300, 4000)))
        added = [after - before for (_, before), (_, after) in zip(plain.timeline, offset.timeline, strict=True)]
        assert added == [1, 20, 300, 4000]
        assert simulate(costs, Assignment((0,)), 5).peak_bytes == plain.peak_bytes + 5

    @settings(max_examples=40, deadline=None)
    @given(steps(regions=3), st.integers(-50, 50))
    def test_a_corrected_simulation_explains_the_measured_peak(self, costs: StepCosts, error: int) -> None:
        plan = next(all_assignments(costs.regions))
        before = simulate(costs, plan)
        corrected = correct(Correction(), before, before.peak_bytes + error)
        assert simulate(costs, plan, corrected).peak_bytes == before.peak_bytes + error

    @pytest.mark.parametrize(
        ("plan", "words"),
        [
            (Assignment((0,)), r"1 entries for the step, which consists of 2 regions"),
            (Assignment((2, 0)), r"choice 2 for 'a' \(region \(0,\)\), which has choices 0 to 1"),
            (Assignment((1, 0)), r"choice 1 \(recompute\) for 'a' .* refused: it is stateful"),
            (Assignment((Assignment(()), 0)), r"opens 'a' \(region \(0,\)\), which has no children"),
        ],
    )
    def test_an_assignment_that_does_not_fit_is_refused(self, plan: Assignment, words: str) -> None:
        refused = replace(cost({}, 0, 0, 1.0, Choice("recompute")), refused="it is stateful")
        costs = step(region("a", cost({}, 0, 0, 0.0), refused), region("b", cost({}, 0, 0, 0.0)))
        with pytest.raises(ValueError, match=words):
            simulate(costs, plan)

    def test_a_gap_that_nothing_is_said_about_is_refused(self) -> None:
        costs = step(region("a", cost({}, 0, 0, 0.0)), outside=({},))
        for ask in (lambda: simulate(costs, Assignment((0,))), lambda: solve(costs, 10**6)):
            with pytest.raises(ValueError, match=r"1 gaps, but 1 regions have 2"):
                ask()


# ---------------------------------------------------------------------------------------------------------------------
# The solver against all plans


class TestAgainstAllPlans:
    @settings(max_examples=150, deadline=None)
    @given(steps(), st.sampled_from([0, 5, Correction(3, 0, 7, 1), Correction(-2, -1, -3, 0)]))
    def test_the_plan_is_the_fastest_one_within_every_budget(
        self, costs: StepCosts, correction: Correction | int
    ) -> None:
        points = all_points(costs, correction)
        least = min(peak for peak, _ in points)
        plans = trade_off(costs, correction)
        assert solve(costs, least, correction) == pick(plans, least)
        for budget in budgets_of(points):
            found = pick(plans, budget)
            assert found.simulated == simulate(costs, found.assignment, correction)
            assert not found.simplified
            if budget < least:
                assert not found.fits
                assert found.simulated.peak_bytes == least
            else:
                assert found.fits
                assert found.simulated.peak_bytes <= budget
                # The same numbers in the same order: not even rounding differs.
                assert found.simulated.extra == found.lower_bound
                assert found.simulated.extra == best(points, budget)

    @settings(max_examples=80, deadline=None)
    @given(steps(calls=True))
    def test_calls_of_one_module_are_treated_alike_at_the_least_time(self, costs: StepCosts) -> None:
        points = all_points(costs, calls=True)
        if not points:
            with pytest.raises(ValueError, match=r"no treatment in common|cannot be treated|refused"):
                solve(costs, 10**12)
            return
        plans = trade_off(costs)
        for budget in budgets_of(points)[1:]:
            found = pick(plans, budget)
            assert treats_calls_alike(costs, found.assignment)
            assert found.simulated.peak_bytes <= budget
            assert found.simulated.extra == best(points, budget)

    @settings(max_examples=80, deadline=None)
    @given(steps(calls=True), st.lists(st.integers(0, 10**10), min_size=2, max_size=6), st.booleans())
    def test_a_larger_budget_never_gets_a_slower_plan(
        self, costs: StepCosts, budgets: list[int], simplified: bool
    ) -> None:
        assume(all_points(costs, calls=True))
        with pytest.MonkeyPatch.context() as patch:
            if simplified:
                patch.setattr(solving, "_FRONTIERS", 1)
                patch.setattr(solving, "_FEWEST_COMBINATIONS", 1)
            found = [solve(costs, budget) for budget in sorted(budgets)]
        for smaller, larger in itertools.pairwise(found):
            assert larger.fits or not smaller.fits
            if smaller.fits:
                assert larger.simulated.extra <= smaller.simulated.extra

    @settings(max_examples=60, deadline=None)
    @given(steps(), st.integers(0, 10**6))
    def test_names_of_storages_decide_nothing(self, costs: StepCosts, seed: int) -> None:
        names = list(range(3000))
        random.Random(seed).shuffle(names)
        plans, twins = trade_off(costs), trade_off(renamed(costs, names.__getitem__))
        assert [plans.assignment(at) for at in range(len(plans.peaks))] == [
            twins.assignment(at) for at in range(len(twins.peaks))
        ]

    @settings(max_examples=80, deadline=None)
    @given(steps(leaving=False))
    def test_a_thinned_frontier_stays_within_the_budget_monotone_and_honest(self, costs: StepCosts) -> None:
        points = all_points(costs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(solving, "_WORK", 1)
            patch.setattr(solving, "_FEWEST_POINTS", 8)
            plans = trade_off(costs)
            last = math.inf
            for budget in budgets_of(points)[1:]:
                found = pick(plans, budget)
                assert found.fits
                assert found.simulated.peak_bytes <= budget
                assert found.simulated.extra <= last
                assert found.lower_bound <= best(points, budget) <= found.simulated.extra
                last = found.simulated.extra
            least, most = min(points), min(points, key=lambda point: (point[1], point[0]))
            assert plans.peaks[0] == least[0]
            assert plans.extras[-1] == most[1]

    @settings(max_examples=80, deadline=None)
    @given(steps(), st.booleans())
    def test_a_frontier_that_tells_few_bytes_left_apart_is_honest(self, costs: StepCosts, short: bool) -> None:
        points = all_points(costs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(solving, "_LEFT_WORK", 0)
            if short:
                patch.setattr(solving, "_WORK", 1)
                patch.setattr(solving, "_FEWEST_POINTS", 8)
            plans = trade_off(costs)
            for at in range(len(plans.peaks)):
                simulated = simulate(costs, plans.assignment(at))
                assert (simulated.peak_bytes, simulated.extra) == (plans.peaks[at], plans.extras[at])
            last = math.inf
            for budget in budgets_of(points):
                found = pick(plans, budget)
                if found.fits:
                    assert found.simulated.peak_bytes <= budget
                    assert found.lower_bound <= best(points, budget) <= found.simulated.extra <= last
                    last = found.simulated.extra
                else:
                    assert last == math.inf
            assert plans.extras[-1] == min(extra for _, extra in points)

    @settings(max_examples=80, deadline=None)
    @given(st.booleans().flatmap(lambda calls: st.tuples(steps(calls=calls), st.just(calls))))
    def test_crowded_boundaries_overstate_the_peak_and_say_so(self, drawn: tuple[StepCosts, bool]) -> None:
        costs, calls = drawn
        points = all_points(costs, calls=calls)
        assume(points)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(solving, "_FRONTIERS", 1)
            patch.setattr(solving, "_FEWEST_COMBINATIONS", 1)
            plans = trade_off(costs)
            last = math.inf
            for budget in budgets_of(points):
                found = pick(plans, budget)
                if found.fits:
                    assert treats_calls_alike(costs, found.assignment)
                    assert found.simulated.peak_bytes <= budget
                    assert found.lower_bound <= best(points, budget) <= found.simulated.extra <= last
                    last = found.simulated.extra
                else:
                    assert last == math.inf
                    assert found.simplified or budget < min(points)[0]
            for at in range(len(plans.peaks)):
                assert simulate(costs, plans.assignment(at)).peak_bytes <= plans.peaks[at]

    @settings(max_examples=40, deadline=None)
    @given(steps(), st.integers(2, 6))
    def test_the_frontier_runs_from_the_least_peak_to_the_least_time(self, costs: StepCosts, count: int) -> None:
        points = all_points(costs)
        found = frontier(costs, count)
        assert len(found) <= count
        assert found[0][0] == min(points)[0]
        assert found[-1][1] == min(extra for _, extra in points)
        for (low, slow, _), (high, fast, _) in itertools.pairwise(found):
            assert low < high
            assert slow > fast
        for peak, extra, plan in found:
            simulated = simulate(costs, plan)
            assert (simulated.peak_bytes, simulated.extra) == (peak, extra)
            assert extra == best(points, peak)

    @settings(max_examples=40, deadline=None)
    @given(steps())
    def test_each_reason_is_what_the_cheaper_choice_would_do(self, costs: StepCosts) -> None:
        points = all_points(costs)
        budget = sorted(points)[len(points) // 2][0]
        found = solve(costs, budget)
        reasons = why(costs, found)
        assert [reason.index for reason in reasons] == [visit.index for visit in visits(costs, found.assignment)]
        for reason, visit in zip(reasons, visits(costs, found.assignment), strict=True):
            cheaper = [c for c in visit.region.choices if not c.refused and c.extra < visit.choice.extra]
            if not cheaper:
                assert reason.cheaper is None
                continue
            at = [choice.choice for choice in visit.region.choices].index(reason.cheaper)
            simulated = simulate(costs, exchanged(found.assignment, visit.index, at))
            # The plan is the best there is, so nothing faster fits.
            assert reason.over_bytes == simulated.peak_bytes - budget > 0
            assert reason.position == simulated.peak
            assert str(simulated.peak) in reason.text


def exchanged(plan: Assignment, index: tuple[int, ...], chosen: int) -> Assignment:
    inner = plan.regions[index[0]]
    new = exchanged(inner, index[1:], chosen) if isinstance(inner, Assignment) else chosen
    return Assignment((*plan.regions[: index[0]], new, *plan.regions[index[0] + 1 :]))


# ---------------------------------------------------------------------------------------------------------------------
# What the issue of size and of shape does


def chain(
    regions: int, choices: int = 8, *, seed: int = 0, identical: bool = False, falling: bool = False
) -> StepCosts:
    """A chain in which a kept region holds its input and its output, which the next one may hold too."""
    rng = random.Random(seed)
    sizes = [rng.randrange(2**20, 30 * 2**20) for _ in range(regions + 1)]
    if falling:
        sizes.sort(reverse=True)
    made = []
    for at in range(regions):
        if identical:
            rng, sizes = random.Random(seed), [sizes[0]] * len(sizes)
        size = sizes[at]
        ways = [cost({at: size, at + 1: sizes[at + 1], 10**6 + 8 * at: 6 * size}, 3 * size, 4 * size, 0.0)]
        for chosen in range(1, choices):
            holds = {10**6 + 8 * at + chosen: int(8 * size * (1 - chosen / choices) * rng.uniform(0.6, 1))}
            if rng.random() < 0.5:
                holds[at] = size
            extra = size / 2**20 * chosen * rng.uniform(0.3, 3)
            peaks = (int(size * rng.uniform(2, 10)), int(size * rng.uniform(2, 10)))
            ways.append(cost(holds, *peaks, extra, TREATMENTS[chosen]))
        made.append(RegionCosts(f"block.{at}", tuple(ways), {at: size}, size, rng.randrange(2**20)))
    return step(*made, base_bytes=2**28, end_peak_bytes=2**26)


def leaving_chain(regions: int) -> StepCosts:
    """A chain in which what is large runs first, and leaves more behind where little is recomputed."""
    costs = chain(regions, falling=True)

    def leaves(one: RegionCosts) -> RegionCosts:
        size = one.in_flight_gradient_bytes // 4
        choices = [
            replace(
                choice, left_bytes=size * (1 + (at < 4)), backward_peak_bytes=choice.backward_peak_bytes * regions // 4
            )
            for at, choice in enumerate(one.choices)
        ]
        return replace(one, choices=tuple(choices))

    return replace(costs, regions=tuple(map(leaves, costs.regions)))


def budgets_between(costs: StepCosts, count: int) -> list[int]:
    peaks = trade_off(costs).peaks
    return [int(peaks[0] + (peaks[-1] - peaks[0]) * at / count) for at in range(count + 1)]


class TestSize:
    def test_twelve_regions_of_eight_choices_are_solved_exactly(self) -> None:
        for seed in range(3):
            plans = trade_off(chain(12, seed=seed))
            assert plans.exact
            assert plans.largest_frontier <= solving._MOST_POINTS

    @pytest.mark.parametrize("kind", ["", "identical", "leaving"])
    def test_a_thousand_regions_of_eight_choices(self, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
        costs = leaving_chain(1000) if kind == "leaving" else chain(1000, identical=kind == "identical")
        start = time.perf_counter()
        plans = trade_off(costs)
        seconds = time.perf_counter() - start
        assert not plans.simplified
        # Two frontiers at each boundary: its tensor may be held or not. Of what is looked at, a part is kept.
        assert plans.states <= solving._WORK // 4
        lost = []
        for share in range(1, 10):
            budget = int(plans.peaks[0] + (plans.peaks[-1] - plans.peaks[0]) * share / 10)
            found = pick(plans, budget)
            assert found.fits
            assert found.simulated.peak_bytes <= budget
            lost.append(found.simulated.extra / found.lower_bound - 1)
        assert max(lost) < (0.2 if kind == "leaving" else 0.02)
        with capsys.disabled():
            print(
                f"\n1,000 {kind} regions, 8 choices: {seconds:.2f} s, {plans.states} points, "
                f"at most {max(lost):.2%} above the bound"
            )

    def test_what_regions_leave_behind_is_told_apart_in_short_steps_and_costs_little_in_long_ones(self) -> None:
        costs = leaving_chain(10)
        exact = trade_off(costs)
        assert exact.exact
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(solving, "_LEFT_WORK", 0)
            near = trade_off(costs)
        assert not near.exact
        assert near.peaks[0] == exact.peaks[0]
        lost = [
            pick(near, peak).simulated.extra / max(1.0, pick(exact, peak).simulated.extra) - 1
            for peak in map(int, exact.peaks[:: len(exact.peaks) // 40])
        ]
        assert statistics.median(lost) < 0.02

    def test_identical_regions_of_two_choices_need_no_thinning(self) -> None:
        plans = trade_off(chain(1000, choices=2, identical=True))
        assert plans.exact
        assert len(plans.peaks) <= 1001

    def test_what_thinning_loses_is_bounded(self) -> None:
        costs = chain(12)
        exact = trade_off(costs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(solving, "_WORK", 1)
            patch.setattr(solving, "_FEWEST_POINTS", 16)
            patch.setattr(solving, "_FINER", 1)
            thinned, long = trade_off(costs), trade_off(chain(100))
        assert long.peaks[0] == trade_off(chain(100)).peaks[0]
        assert long.extras[-1] == 0
        assert not thinned.exact
        assert thinned.peaks[0] == exact.peaks[0]
        assert thinned.extras[-1] == exact.extras[-1] == 0
        lost = 0
        for budget in map(int, exact.peaks):
            least, found = pick(exact, budget).simulated.extra, pick(thinned, budget)
            assert found.lower_bound <= least <= found.simulated.extra
            lost += found.simulated.extra > least
        assert lost > 10

    def test_a_larger_budget_is_never_slower_in_a_long_chain(self) -> None:
        plans = trade_off(chain(300))
        assert not plans.exact
        extras = [pick(plans, budget).simulated.extra for budget in budgets_between(plans.costs, 60)]
        assert extras == sorted(extras, reverse=True)
        assert len(set(extras)) > 40

    def test_as_in_a_dense_network_regions_that_may_keep_all_outputs_before_them_are_solved_exactly(self) -> None:
        made = []
        for at in range(60):
            all_before = {before: 1000 + before for before in range(at + 1)}
            ways = (cost(all_before, 10, 10, 0.0), cost({10**4 + at: 50 + at}, 20, 30, 1.0 + at, TREATMENTS[3]))
            made.append(region(f"layer.{at}", *ways, in_flight={at: 1000 + at}))
        assert trade_off(step(*made)).exact

    def test_more_combinations_of_shared_storages_than_can_be_told_apart_do_not_explode(self) -> None:
        # The last region may keep the outputs of all before it, of which each may be held already or not.
        made = [
            region(f"layer.{at}", cost({at: 1000 + at}, 10, 10, 0.0), cost({}, 20, 30, 1.0 + at, TREATMENTS[3]))
            for at in range(60)
        ]
        everything = {at: 1000 + at for at in range(60)}
        made.append(region("last", cost(everything, 5, 5, 0.0), cost({}, 5, 9, 40.0, TREATMENTS[3])))
        costs = step(*made)
        plans = trade_off(costs)
        assert "count as often as they are held" in plans.simplified
        assert plans.states <= solving._WORK
        for budget in budgets_between(costs, 5):
            found = pick(plans, budget)
            assert found.fits
            assert found.simulated.peak_bytes <= budget

    def test_many_modules_called_in_a_loop_are_grouped(self) -> None:
        made = []
        for call, at in itertools.product(range(4), range(12)):
            ways = [
                cost(
                    {1000 * call + 10 * at + chosen: 900 // (chosen + 1)}, 10, 10 * chosen, float(chosen * (at + 1)), t
                )
                for chosen, t in enumerate(TREATMENTS)
            ]
            made.append(region(f"layer.{at}", *ways))
        costs = step(*made)
        plans = trade_off(costs)
        assert "share their treatment" in plans.simplified
        for budget in budgets_between(costs, 5):
            found = pick(plans, budget)
            assert found.fits
            assert found.simulated.peak_bytes <= budget
            assert treats_calls_alike(costs, found.assignment)


class TestAnswers:
    def test_a_refusal_names_the_least_peak_and_what_holds_it(self) -> None:
        ways = (cost({1: 900}, 0, 0, 0.0), cost({2: 100}, 0, 300, 2.0, TREATMENTS[3]))
        found = solve(step(region("block", *ways)), 1100)
        assert not found.fits
        assert found.simulated.peak_bytes == 1000 + 100 + 2 + 7 + 300
        assert str(found.simulated.peak) == "the backward of block"
        assert found.simulated.at_peak[1] == Holder("block while its backward runs", 300)
        assert [reason.text for reason in why(step(region("block", *ways)), found)] == [
            "keep would be 2 ms faster, but the end of the forward pass would take <0.001 MiB more than the least peak "
            "there is"
        ]

    def test_a_reason_speaks_of_all_calls_of_a_module(self) -> None:
        made = [
            region("twice", cost({at: 300}, 0, 0, 0.0), cost({10 + at: 100}, 0, 0, 2.0, TREATMENTS[3])) for at in (0, 1)
        ]
        costs = step(*made)
        found = solve(costs, 1000 + 200 + 300 + 20)
        assert found.assignment == Assignment((1, 1))
        for reason in why(costs, found):
            assert reason.text.startswith("keep would be 4 ms faster, but the end of the forward pass would take")
            assert reason.over_bytes == 100

    def test_of_the_plans_below_the_optimizer_step_the_fastest_is_taken(self) -> None:
        ways = (cost({1: 900}, 0, 0, 0.0), cost({2: 100}, 0, 0, 2.0, TREATMENTS[3]))
        costs = step(region("block", *ways), optimizer_peak_bytes=5000)
        found = solve(costs, 6005)
        assert (found.fits, found.simulated.extra) == (True, 0.0)
        assert str(found.simulated.peak) == "the optimizer step"
        assert not solve(costs, 6004).fits
        assert frontier(costs, 5) == [(6005, 0.0, Assignment((0,)))]

    def test_of_equal_choices_the_first_is_taken(self) -> None:
        twins = [cost({10 + at: 50}, 5, 5, 1.0, choice) for at, choice in enumerate(TREATMENTS[1:4])]
        costs = step(*(region(f"r{at}", cost({at: 500}, 5, 5, 0.0), *twins) for at in range(5)))
        assert set(solve(costs, 1300).assignment.regions) == {1}

    def test_a_region_that_cannot_be_treated_is_named(self) -> None:
        costs = step(region("stateful", replace(cost({}, 0, 0, 0.0), refused="it keeps state")))
        with pytest.raises(ValueError, match=r"'stateful' cannot be treated in any way: keep: it keeps state"):
            solve(costs, 10**6)

    @pytest.mark.parametrize("extra", [math.nan, math.inf])
    def test_a_time_that_is_no_number_is_refused(self, extra: float) -> None:
        timeless = replace(cost({}, 0, 0, 0.0, TREATMENTS[3]), extra=extra)
        costs = step(region("r", cost({}, 0, 0, 0.0), timeless))
        with pytest.raises(ValueError, match=r"'recompute' of the region 'r' adds (nan|inf)"):
            solve(costs, 10**6)

    def test_a_frontier_has_two_ends(self) -> None:
        with pytest.raises(ValueError, match="give 2 or more"):
            frontier(step(), 1)

    def test_a_step_without_regions_has_one_plan(self) -> None:
        found = solve(step(), 2000)
        assert found.assignment == Assignment(())
        assert found.simulated.peak_bytes == 1020
        assert dataclasses.is_dataclass(found)
