"""Layers that a ``forward`` calls one after another, treated together."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console
from spikingjelly.activation_based import functional, layer, neuron
from torch import Tensor, nn

from lightning_memopt.checkpointing import checkpoint_module
from lightning_memopt.measuring import measure_memory
from lightning_memopt.observing.costs import Choice, RegionCosts
from lightning_memopt.observing.model_state import unchanged
from lightning_memopt.observing.region_costs import CHOICES, ObservedStep, observe_step
from lightning_memopt.observing.regions import with_surroundings
from lightning_memopt.observing.trial import loss_of
from lightning_memopt.planning import MemoryBudgetError, Plan, applied_plan, find_targets, optimize_memory
from lightning_memopt.planning.common_costs import step_of_all
from lightning_memopt.planning.simulate import Assignment, simulate, visits
from tests.equality import assert_same_tree, rng_state, seed_everything, state_of
from tests.test_planning_costs import Step, everywhere, measured_peak, one_by_one, storages_tell_their_end

CHEAP = Choice("recompute_cheap")


class Block(nn.Module):
    """``relu(norm(conv(x)) + x)``."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)) + x)


class Stemmed(nn.Module):
    """A stem that exists in the forward only, and blocks."""

    def __init__(self, activation: Callable[[], nn.Module] = lambda: nn.ReLU(inplace=True)) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm, self.activation, self.pool = nn.BatchNorm2d(8), activation(), nn.MaxPool2d(2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 10)

    def stem(self, x: Tensor) -> Tensor:
        return self.pool(self.activation(self.norm(self.conv(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class SkipFromStem(Stemmed):
    """The output of the activation is used again at the end."""

    def stem(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm(self.conv(x)))
        return self.pool(y) + torch.nn.functional.avg_pool2d(y.sigmoid(), 2)


class TwiceInStem(Stemmed):
    """The activation runs twice, so it is no part of a series."""

    def stem(self, x: Tensor) -> Tensor:
        return self.pool(self.activation(self.norm(self.activation(self.conv(x)))))


class WorkInStem(Stemmed):
    """Something else runs between two layers, and is part of the output."""

    def stem(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm(self.conv(x)))
        aside = y.abs().mean()
        return self.pool(y) + aside


class ClampedStem(Stemmed):
    """Values are limited between two layers, so that autograd does not see it; in the first step nothing is."""

    limit = 100.0

    def stem(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y.data.clamp_(-self.limit, self.limit)
        return self.pool(self.activation(y))


class PreNorm(nn.Module):
    """``x + down(act(up(norm(x))))``, all of it modules."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.GELU()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class SpikingStem(nn.Module):
    """A stem with an LIF neuron, whose state stays, on `[T, N, C, H, W]`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = layer.Conv2d(3, 8, 3, padding=1, step_mode="m")
        self.norm = layer.BatchNorm2d(8, step_mode="m")
        self.neuron = neuron.LIFNode(step_mode="m")
        self.pool = layer.AvgPool2d(2, step_mode="m")
        self.blocks = nn.ModuleList(layer.Conv2d(8, 8, 3, padding=1, step_mode="m") for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.neuron(self.norm(self.conv(x))))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.mean((0, 3, 4))


def images() -> Tensor:
    return torch.randn(8, 3, 32, 32)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "in place": (Stemmed, images),
    "not in place": (lambda: Stemmed(nn.ReLU), images),
    "gelu": (lambda: Stemmed(nn.GELU), images),
    "dropout": (lambda: Stemmed(lambda: nn.Dropout(0.4)), images),
    "skip connection": (SkipFromStem, images),
    "a layer twice": (lambda: TwiceInStem(nn.ReLU), images),
    "work between": (WorkInStem, images),
    "values between": (lambda: ClampedStem(nn.GELU), images),
    "spiking": (SpikingStem, lambda: torch.randn(4, 8, 3, 16, 16)),
    "inside blocks": (lambda: nn.Sequential(*(PreNorm() for _ in range(3))), lambda: torch.randn(256, 32)),
}
TOGETHER = ["in place", "not in place", "gelu", "dropout", "skip connection", "spiking", "inside blocks"]


def step_of(name: str) -> Step:
    seed_everything(0)
    make, images = MODELS[name]
    model, batch = make(), images()

    def forward(model: nn.Module) -> Tensor:
        functional.reset_net(model)
        return torch.as_tensor(model(batch)).square().mean()

    return Step(model, forward, ())


def observed(step: Step, choices: Sequence[Choice] = CHOICES) -> ObservedStep:
    regions = with_surroundings(step.model, find_targets(step.model)).regions
    with unchanged(step.model) as state:
        return observe_step(step.model, regions, step.forward, state, choices=choices, device=torch.device("cpu"))


def series_in(regions: Sequence[RegionCosts]) -> list[tuple[str, ...]]:
    return [
        found
        for region in regions
        for found in (*([region.series] if region.series else []), *series_in(region.children))
    ]


def together(regions: Sequence[RegionCosts]) -> Assignment:
    """Series that can be treated, the largest of those that contain each other, and nothing else."""

    def one(region: RegionCosts) -> int | Assignment:
        if region.series:
            return next(at for at, cost in enumerate(region.choices) if cost.choice == CHEAP)
        return together(region.children) if series_in(region.children) else 0

    return Assignment(tuple(map(one, regions)))


def trained(step: Step) -> list[Any]:
    """All that two steps leave behind."""
    seed_everything(1)
    losses = []
    for _ in range(2):
        step.model.zero_grad()
        loss = loss_of(step.forward(step.model))
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: parameter.grad for name, parameter in step.model.named_parameters()}
    return [losses, gradients, state_of(step.model), rng_state()]


@pytest.mark.parametrize("name", TOGETHER)
def test_the_peak_of_layers_treated_together_is_that_of_a_real_step(name: str) -> None:
    step = step_of(name)
    seen = observed(step)
    plan = together(seen.costs.regions)
    held = [visit.choice.choice for visit in visits(seen.costs, plan) if visit.region.series]
    assert held
    assert set(held) == {CHEAP}
    peak = measured_peak(step, seen, plan)
    error = (simulate(seen.costs, plan).peak_bytes - seen.costs.base_bytes) / peak - 1
    # Gradients of what others use, too, count twice.
    least, most = (-0.001, 0.06) if storages_tell_their_end() else (-0.2, 0.2)
    assert least <= error <= most, error


@pytest.mark.parametrize("name", TOGETHER)
def test_layers_together_hold_less_than_one_by_one(name: str) -> None:
    costs = observed(step_of(name)).costs
    treated = [visit for visit in visits(costs, together(costs.regions)) if visit.region.series]
    assert treated
    for visit in treated:
        one_after_another = one_by_one([visit.region])
        alone: dict[int, int] = {}
        for region, chosen in zip(one_after_another, everywhere(one_after_another, CHEAP).regions, strict=True):
            assert isinstance(chosen, int)
            alone |= region.choices[chosen].holds
        assert sum(visit.choice.holds.values()) < sum(alone.values())


@pytest.mark.parametrize("name", MODELS)
def test_training_within_a_budget_is_that_of_the_plain_model(name: str) -> None:
    plain = step_of(name)
    expected = trained(plain)
    for more in (0.0, 0.1):
        step = step_of(name)
        least = 0
        try:
            optimize_memory(step.model, example_forward=step.forward, memory_budget=1, can_chunk=lambda module: False)
        except MemoryBudgetError as refusal:
            least = refusal.least_bytes
        budget = int(least + more * (least - observed(step).costs.base_bytes))
        optimize_memory(step.model, example_forward=step.forward, memory_budget=budget, can_chunk=lambda module: False)
        plan = applied_plan(step.model)
        assert plan is not None
        assert plan.treated or more or name not in TOGETHER
        assert_same_tree(trained(step), expected)


def printed(plan: Plan) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(plan.table())
    return " ".join(capture.get().split())


def test_all_layers_of_a_series_are_treated_and_the_plan_tells_why_and_goes_into_a_file() -> None:
    step = step_of("in place")
    plain = measure_memory(lambda: loss_of(step.forward(step.model)).backward())
    step.model.zero_grad()
    optimize_memory(step.model, example_forward=step.forward, memory_budget=plain.peak_bytes - 2**18)
    plan = applied_plan(step.model)
    assert plan is not None
    treated = {region.path: region for region in plan.treated}
    assert {"norm", "activation", "pool"} <= treated.keys()
    assert {treated[path].treatment for path in ("norm", "activation", "pool")} == {"recompute_cheap"}
    assert treated["pool"].reason == "together with norm"
    assert treated["pool"].saved_bytes is None
    assert treated["norm"].saved_bytes > 2 * treated["norm"].stored_bytes > 0
    assert plan.alive is not None
    assert f"that of the plain model {max(plan.alive.plain_bytes) / 2**20:.1f}" in printed(plan)


def test_layers_of_a_series_that_is_kept_have_rows_like_any_other() -> None:
    step = step_of("in place")
    optimize_memory(step.model, example_forward=step.forward, memory_budget="1GiB")
    plan = applied_plan(step.model)
    assert plan is not None
    rows = {region.path: region for region in plan.regions}
    maps = 8 * 8 * 32 * 32 * 4
    assert rows["norm"].saved_bytes >= maps  # what the convolution returned
    assert rows["pool"].saved_bytes >= maps  # what the activation returned
    assert {rows[path].reason for path in ("norm", "pool", "blocks.0")} == {"the fastest choice"}
    assert plan.extra_flops == 0
    other = step_of("in place")
    optimize_memory(other.model, plan=Plan.from_json(plan.to_json()))
    assert applied_plan(other.model).digest() == plan.digest()


@pytest.mark.parametrize("name", ["a layer twice", "work between", "values between"])
def test_layers_with_something_between_them_or_that_run_twice_are_no_series(name: str) -> None:
    found = series_in(observed(step_of(name)).costs.regions)
    assert not any("pool" in series and "norm" in series for series in found)
    assert not any("activation" in series for series in found) or name != "a layer twice"


@pytest.mark.parametrize("choices", [CHOICES, (Choice("recompute"),)], ids=["all", "recompute"])
def test_what_is_kept_to_try_layers_together_is_not_taken_for_memory_of_the_step(choices: Sequence[Choice]) -> None:
    costs = observed(step_of("in place"), choices=choices).costs
    maps = 8 * 8 * 32 * 32 * 4
    (pool,) = [region for region in one_by_one(costs.regions) if region.path == "pool"]
    assert (
        maps <= sum(pool.in_flight.values()) < 1.1 * maps
    )  # what the activation returned, not what the norm was given


def test_nothing_of_the_pass_is_kept_for_a_call_that_might_have_been_carried_on() -> None:
    step = step_of("work between")
    seen = observed(step)
    gc.collect()
    before = measure_memory(lambda: None).start_bytes
    del seen
    gc.collect()
    assert measure_memory(lambda: None).start_bytes == before


def test_ranks_take_a_series_together_where_all_of_them_could() -> None:
    seen = observed(step_of("in place"))
    (largest,) = [region for region in seen.costs.regions if region.series]
    alone = replace(seen, costs=replace(seen.costs, regions=tuple(one_by_one(seen.costs.regions))))

    def cheap(step: ObservedStep) -> list[str]:
        (region,) = [region for region in step.costs.regions if region.path == largest.path]
        return [cost.refused for cost in region.choices if cost.choice == CHEAP]

    assert cheap(step_of_all([seen, seen])) == [""]
    # It was not worth a look on the other rank, which has the smaller step.
    other = replace(alone, costs=replace(alone.costs, base_bytes=0))
    assert cheap(step_of_all([other, seen])) == ["was not tried on every rank"]
    larger = replace(alone, costs=replace(alone.costs, base_bytes=2**30))
    assert not series_in(step_of_all([larger, seen]).costs.regions)


# ---------------------------------------------------------------------------------------------------------------------
# Modules that are treated each on its own, in any order

WIDTH = 16


class Multiplied(nn.Module):
    """Changes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(1.5).add_(0.1)


class Waves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * torch.cos(x)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "elu in place": lambda: nn.ELU(inplace=True),
    "dropout": lambda: nn.Dropout(0.3),
    "dropout in place": lambda: nn.Dropout(0.3, inplace=True),
    "gelu": nn.GELU,
    "softmax": lambda: nn.Softmax(-1),
    "product": lambda: nn.Linear(WIDTH, WIDTH),
    "neuron": neuron.LIFNode,
    "in place": Multiplied,
    "functions": Waves,
    "nothing": nn.Identity,
    "a block": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
}
CODE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "twice": lambda x, first: 2 * x,
    "changed": lambda x, first: x.add_(1.0),
    "skip connection": lambda x, first: x * first,
    "in part": lambda x, first: x + x.detach(),
    "other strides": lambda x, first: x.t().contiguous().t(),
}


class Programmed(nn.Module):
    """Layers and code by name, one after another."""

    def __init__(self, program: Sequence[str]) -> None:
        super().__init__()
        self.program = program
        self.layers = nn.ModuleDict({str(at): LAYERS[name]() for at, name in enumerate(program) if name in LAYERS})

    def forward(self, batch: Tensor) -> Tensor:
        x = first = batch * 1
        for at, name in enumerate(self.program):
            x = self.layers[str(at)](x) if name in LAYERS else CODE[name](x, first)
        return x


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*LAYERS, *CODE]), st.booleans()), min_size=2, max_size=9), st.booleans())
def test_modules_treated_each_on_its_own_train_as_the_plain_ones_in_any_order(
    drawn: list[tuple[str, bool]], twice: bool
) -> None:
    seed_everything(0)
    plain, batch = Programmed([name for name, _ in drawn]), torch.randn(8, WIDTH)
    treated = copy.deepcopy(plain)
    for at, (name, treats) in enumerate(drawn):
        if treats and name in LAYERS:
            checkpoint_module(treated.layers[str(at)], treatment="recompute_cheap")

    def train(model: nn.Module) -> list[Any]:
        seed_everything(1)
        for _ in range(2):
            functional.reset_net(model)
            loss = (model(batch) * torch.linspace(0.5, 1.5, WIDTH)).sum()
            if loss.requires_grad:
                loss.backward(retain_graph=twice)
                if twice:
                    loss.backward()
        return [loss.detach(), [parameter.grad for parameter in model.parameters()], state_of(model), rng_state()]

    try:
        expected = train(plain)
    except RuntimeError as error:  # somebody's saved tensor was changed
        assume("modified by an inplace operation" not in str(error))
        raise
    assert_same_tree(train(treated), expected)
