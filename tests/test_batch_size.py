"""The largest batch within a budget: it fits, a larger one does not, and whatever goes wrong changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder
from spikingjelly.activation_based import functional
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.data import DataLoader, Dataset

from lightning_memopt import MemoryOptimization
from lightning_memopt.checkpointing import is_checkpointed
from lightning_memopt.measuring import measure_memory
from lightning_memopt.observing.costs import Choice, ChoiceCost, RegionCosts, StepCosts
from lightning_memopt.observing.model_state import unchanged
from lightning_memopt.observing.region_costs import ObservedStep, observe_step
from lightning_memopt.observing.trial import Profile
from lightning_memopt.planning import MemoryBudgetError, applied_plan, find_batch_size, find_targets, optimize_memory
from lightning_memopt.planning.agree import Ranks
from lightning_memopt.planning.batch_size import _Search, costs_at
from lightning_memopt.planning.by_budget import Seen
from lightning_memopt.planning.solve import solve
from lightning_memopt.planning.within_budget import MOST_STEPS
from tests.digits_training import DigitsModule, SpikingConv, digits, make_trainer
from tests.equality import seed_everything
from tests.planning_models import SpikingBlock, Unchanged, spikes
from tests.process_memory import alive_bytes
from tests.ranks import run_ranks

WIDTH = 32
MIB = 2**20
# What is alive beside a step differs a little from one time to the next.
_SLACK = 5_000


class Block(nn.Module):
    """A residual block of norm, two products and dropout, on `[N, C]`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


def dense(depth: int = 2) -> nn.Module:
    seed_everything(0)
    return nn.Sequential(*(Block() for _ in range(depth)))


def dense_forward(model: nn.Module, batch_size: int) -> Tensor:
    return model(torch.rand(batch_size, WIDTH)).square().mean()


def spiking() -> nn.Module:
    seed_everything(0)
    return nn.Sequential(*(SpikingBlock(WIDTH) for _ in range(2)))


def spiking_forward(model: nn.Module, batch_size: int) -> Tensor:
    """Time is the first dimension of the batch, samples the second."""
    functional.reset_net(model)
    return model(spikes(4, batch_size, WIDTH)).sum()


def whole(module: nn.Module) -> bool:
    """For `can_chunk`: whether pieces along the batch equal the whole within 1e-6 depends on the batch."""
    return False


def peak_of(model: nn.Module, forward: Callable[[nn.Module, int], Tensor], batch_size: int) -> int:
    peak = measure_memory(lambda: forward(model, batch_size).backward()).peak_bytes
    model.zero_grad()
    return peak


@pytest.mark.parametrize(
    ("make", "forward", "options"),
    [(dense, dense_forward, {"can_chunk": whole, "compress": False}), (spiking, spiking_forward, {})],
    ids=["samples first", "time first"],
)
def test_the_found_batch_fits_with_its_plan_and_a_larger_one_with_no_plan(
    make: Callable[[], nn.Module], forward: Callable[[nn.Module, int], Tensor], options: dict[str, Any]
) -> None:
    budget = alive_bytes() + MIB
    model = make()
    batch_size = find_batch_size(model, forward, budget, start=64, **options)
    plan = applied_plan(model)
    assert plan is not None
    assert plan.batch_size == batch_size > 128
    assert f"batch size {batch_size}" in str(plan.table().title)
    assert plan.search_passes <= MOST_STEPS
    assert plan.peak_bytes_after <= budget
    assert peak_of(model, forward, batch_size) <= budget
    # The plain model does not take a batch of this size.
    del model
    assert peak_of(make(), forward, batch_size) > budget + MIB // 5
    # Three measured steps find the size to within 1 %.
    one_more = batch_size + max(1, batch_size // 100)
    other = make()
    budget -= _SLACK
    with pytest.raises(MemoryBudgetError):
        optimize_memory(other, example_forward=lambda model: forward(model, one_more), memory_budget=budget, **options)


def test_costs_at_other_sizes_are_those_that_would_be_observed() -> None:
    model = spiking()
    regions = find_targets(model).regions

    def observed(size: int) -> StepCosts:
        with unchanged(model) as state:
            forward = lambda model: spiking_forward(model, size)  # noqa: E731
            return observe_step(model, regions, forward, state, device=torch.device("cpu")).costs

    small = {size: observed(size) for size in (32, 64)}
    for size in (48, 160):
        costs = observed(size)
        predicted = costs_at(size, small)
        left = [[cost.left_bytes for region in of.regions for cost in region.choices] for of in (costs, predicted)]
        assert left[1] == left[0]
        assert any(left[0])
        for budget in (0, 10**12):  # the least peak, and the plain one
            expected = solve(costs, budget).simulated.peak_bytes
            assert solve(predicted, budget).simulated.peak_bytes == pytest.approx(expected, rel=0.01)


def test_what_only_the_larger_step_has_grows_with_the_batch() -> None:
    large = step_of(8, extra_region=True)
    predicted = costs_at(16, {4: step_of(4), 8: large})
    assert [region.path for region in predicted.regions] == ["block", "head"]
    assert sum(predicted.regions[1].choices[0].holds.values()) == 2 * sum(large.regions[1].choices[0].holds.values())
    alone = costs_at(16, {8: large})
    assert alone.base_bytes == 2 * large.base_bytes


def test_no_batch_fits_and_nothing_is_changed() -> None:
    model = spiking()
    before = Unchanged(model)
    with pytest.raises(MemoryBudgetError, match=r"step of a batch of one sample within.*Allow at least") as refused:
        find_batch_size(model, spiking_forward, "20 KiB")
    assert "smaller batch" not in str(refused.value)
    assert refused.value.least_bytes > 20 * 2**10
    before.check()
    assert applied_plan(model) is None


def test_the_largest_size_asked_for_is_not_exceeded() -> None:
    model = dense(depth=1)
    assert find_batch_size(model, dense_forward, "1GiB", largest=3) == 3
    assert applied_plan(model).treated == ()
    assert find_batch_size(model, dense_forward, "1GiB", largest=1) == 1


def test_sizes_for_which_memory_runs_out_are_too_large() -> None:
    tried: list[int] = []

    def forward(model: nn.Module, batch_size: int) -> Tensor:
        tried.append(batch_size)
        if batch_size > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return dense_forward(model, batch_size)

    assert find_batch_size(dense(), forward, "1GiB", largest=1000) == 5
    assert max(tried) == 8
    with pytest.raises(MemoryBudgetError, match="Memory ran out while a batch of one sample"):
        find_batch_size(dense(), lambda model, _: forward(model, 6), "1GiB")


def test_where_the_device_has_less_than_the_budget_its_largest_batch_is_found_by_bisection() -> None:
    steps = Steps(1.0, budget=10**9)
    observed: list[int] = []

    def observe(size: Any) -> Seen | None:
        observed.append(size)
        return Seen(ObservedStep(step_of(size), {}, 0, 0), steps.budget, 0) if size < 3000 else None

    steps.observe_if_possible = observe  # type: ignore[method-assign, assignment]
    steps.measure = lambda *_: [Profile(1)]  # type: ignore[method-assign]
    size, _ = searched(steps, largest=10**6)
    assert 0.99 * 3000 <= size < 3000
    # Halving the factor of 62,500 until it is 1.01 takes 11 steps; and each measured step asks for one size more.
    assert len(observed) <= 2 + 1 + 11 + 2 * MOST_STEPS
    assert len(set(observed)) == len(observed)


def test_an_error_of_the_forward_is_raised_and_changes_nothing() -> None:
    model = dense()
    before = Unchanged(model)

    def forward(model: nn.Module, batch_size: int) -> Tensor:
        if batch_size > 16:
            raise KeyError("no such batch")
        return dense_forward(model, batch_size)

    with pytest.raises(KeyError, match="no such batch"):
        find_batch_size(model, forward, "1GiB", can_chunk=whole)
    before.check()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"example_forward": None}, TypeError, "a function of the model and a batch size"),
        ({"memory_budget": None}, ValueError, "memory_budget"),
        ({"memory_budget": "plenty"}, ValueError, "no size"),
        ({"largest": 0}, ValueError, "largest must be 1 or more"),
        ({"start": 1.5}, TypeError, "start must be an int"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_in_words(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_batch_size(dense(), **{"example_forward": dense_forward, "memory_budget": "1MiB", **options})


# ---------------------------------------------------------------------------------------------------------------------
# Steps that do not go as predicted


def step_of(size: int, *, extra_region: bool = False) -> StepCosts:
    keep = ChoiceCost(Choice(), {0: 100 * size}, 100 * size, 50 * size, 0.0)
    again = ChoiceCost(Choice("recompute"), {1: 10 * size}, 100 * size, 60 * size, 1.0)
    regions = [RegionCosts("block", (keep, again), {}, 0, 0)]
    if extra_region:
        regions.append(RegionCosts("head", (ChoiceCost(Choice(), {2: 8 * size}, 0, 0, 0.0),), {}, 0, 0))
    return StepCosts(1000, tuple(regions), ({},) * (len(regions) + 1), 0, 0, 0, 9.0, 0, "bytes moved")


class Steps:
    """Stands for the steps of a model: what is measured is a multiple of what is predicted."""

    def __init__(self, factor: float, budget: int) -> None:
        self.factor = factor
        self.budget = budget
        self.measured: list[int] = []

    def observe_if_possible(self, size: Any) -> Seen:
        return Seen(ObservedStep(step_of(size), {}, 0, 0), self.budget, 0)

    def measure(self, size: Any, step: ObservedStep, chosen: Mapping[str, Choice]) -> list[Profile]:
        assert chosen == {"block": Choice("recompute")}
        self.measured.append(size)
        peak = solve(step.costs, 0).simulated.peak_bytes
        return [Profile(int(self.factor * peak))]


def searched(steps: Steps, largest: int = 10_000) -> tuple[int, int]:
    found = _Search(steps, lambda size: size, Ranks(), largest).run(8)  # type: ignore[arg-type, return-value]
    return found.size, found.best.peak_bytes or 0


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.1])
def test_the_size_is_corrected_by_what_was_measured(factor: float) -> None:
    steps = Steps(factor, budget=100_000)
    size, peak = searched(steps)
    assert 1 <= len(steps.measured) <= MOST_STEPS
    assert 0.95 * steps.budget < peak <= steps.budget
    one_more = int(factor * solve(step_of(int(1.05 * size)), 0).simulated.peak_bytes)
    assert one_more > steps.budget


def test_three_steps_that_all_took_too_much_are_a_refusal() -> None:
    steps = Steps(1.0, budget=100_000)
    peaks = iter([130_000, 120_000, 110_000])
    steps.measure = lambda *_: [Profile(next(peaks))]  # type: ignore[method-assign]
    with pytest.raises(MemoryBudgetError, match=r"3 measured steps took more than was predicted") as refused:
        searched(steps)
    assert refused.value.least_bytes == 110_000


class PaddedSteps(Steps):
    """Batches are padded to a multiple: over the batch size, bytes are stairs."""

    def __init__(self, multiple: int, budget: int) -> None:
        super().__init__(1.0, budget)
        self.multiple = multiple
        self.observed: list[int] = []

    def observe_if_possible(self, size: Any) -> Seen:
        self.observed.append(size)
        return super().observe_if_possible(padded(size, self.multiple))

    def measure(self, size: Any, step: ObservedStep, chosen: Mapping[str, Choice]) -> list[Profile]:
        self.measured.append(size)
        return [Profile(solve(step.costs, self.budget).simulated.peak_bytes)]


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@pytest.mark.parametrize("multiple", [2, 4, 8, 64])
@pytest.mark.parametrize("largest", [64, 128, 192, 1024])
@pytest.mark.parametrize("spare", [0.0, 0.5, 0.99])
def test_padding_to_a_multiple_costs_less_than_one_multiple(multiple: int, largest: int, spare: float) -> None:
    peaks = [solve(step_of(size), 0).simulated.peak_bytes for size in (largest, largest + multiple)]
    steps = PaddedSteps(multiple, budget=int(peaks[0] + spare * (peaks[1] - peaks[0])))
    size, peak = searched(steps)
    assert size <= largest
    assert largest - size < max(multiple, largest // 100)
    assert peak <= steps.budget
    assert len(steps.measured) <= MOST_STEPS
    # Where two sizes have the same bytes, nobody asks for a size that is larger by far.
    assert max(steps.observed) <= 4 * largest
    assert len(steps.observed) == len(set(steps.observed)) <= 16


def test_a_model_with_padded_batches_gets_the_size_that_fits() -> None:
    def forward(model: nn.Module, batch_size: int) -> Tensor:
        return dense_forward(model, padded(batch_size, 64))

    options: dict[str, Any] = {"can_chunk": whole, "compress": False}
    model = dense()
    budget = alive_bytes() + MIB
    size = find_batch_size(model, forward, budget, **options)
    assert applied_plan(model).peak_bytes_after <= budget
    budget -= _SLACK
    with pytest.raises(MemoryBudgetError):
        optimize_memory(
            dense(), example_forward=lambda model: forward(model, size + 64), memory_budget=budget, **options
        )


def test_gradients_of_the_step_before_take_their_share_of_the_budget() -> None:
    """With more weights than activations, the forward then holds the peak."""
    options: dict[str, Any] = {"can_chunk": whole, "start": 16}
    budget = alive_bytes() + 3 * MIB // 2
    sizes = [
        find_batch_size(dense(depth=16), dense_forward, budget, gradients_in_forward=old, **options)
        for old in (False, True)
    ]
    assert sizes[1] < sizes[0]
    model = dense(depth=16)
    one_more = sizes[1] + max(1, sizes[1] // 50)
    with pytest.raises(MemoryBudgetError, match="gradients of the step before"):
        optimize_memory(
            model,
            example_forward=lambda model: dense_forward(model, one_more),
            memory_budget=budget,
            gradients_in_forward=True,
            can_chunk=whole,
        )


@pytest.mark.parametrize("no_memory", [lambda: torch.device("meta"), FakeTensorMode], ids=["meta", "fake"])
def test_a_model_without_memory_gets_the_batch_size_that_the_real_one_gets(no_memory: Callable[[], Any]) -> None:
    budget = alive_bytes() + MIB
    real = find_batch_size(dense(), dense_forward, budget, can_chunk=whole, compress=False)
    with no_memory():
        model = dense()
    # Nothing but the step counts.
    size = find_batch_size(model, dense_forward, budget - alive_bytes(), can_chunk=whole, compress=False)
    assert size == pytest.approx(real, rel=0.02)
    plan = applied_plan(model)
    assert plan is not None
    assert plan.from_shapes
    assert plan.batch_size == size
    assert all(parameter.is_meta or isinstance(parameter, FakeTensor) for parameter in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Two ranks


def find_on_rank(rank: int) -> tuple[int, str, int]:
    model = dense()
    # The samples of the second rank are twice as large.
    size = find_batch_size(
        model,
        lambda model, batch_size: dense_forward(model, (rank + 1) * batch_size),
        "1MiB",
        can_chunk=whole,
        compress=False,
        start=100,
        largest=500 + rank,
    )
    plan = applied_plan(model)
    assert plan is not None
    return size, plan.digest(), plan.peak_bytes_after


def test_ranks_with_unequal_samples_agree_on_a_size_that_fits_on_all() -> None:
    first, second = run_ranks(find_on_rank, 2, timeout=240.0)
    assert first == second
    size, _, peak = first
    assert 100 < size < 500
    assert peak <= MIB


# ---------------------------------------------------------------------------------------------------------------------
# Under Lightning


class RepeatedDigits(Dataset[Any]):
    """So many samples, the digits over and over: a large data set that takes little memory."""

    def __init__(self, count: int) -> None:
        self.digits = digits(96)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index >= self.count:
            raise IndexError
        return self.digits[index % 96]


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: Any = 16, count: int = 3000) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.count = count

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(RepeatedDigits(self.count), batch_size=self.batch_size)


class DenseNetwork(DigitsModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(64, WIDTH)
        self.blocks = dense()
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(images.flatten(1))))


class SizedConv(SpikingConv):
    """Makes its own loader with a hyperparameter."""

    def __init__(self, batch_size: int = 16, channels: int = 8, blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__(channels, blocks, dropout)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(RepeatedDigits(3000), batch_size=self.hparams.batch_size)


class Sizes(pl.Callback):
    """Notes the batch sizes of a training."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append(len(batch[0]))


def test_the_trainer_trains_with_the_found_size_of_the_datamodule(tmp_path: Path) -> None:
    seed_everything(0)
    budget = alive_bytes() + 4 * MIB
    callback = MemoryOptimization(memory_budget=budget, find_batch_size=True, can_chunk=whole)
    sizes, data = Sizes(), Data()
    make_trainer(tmp_path, callback, sizes, max_steps=2).fit(DenseNetwork(), datamodule=data)
    assert callback.plan is not None
    assert callback.batch_size == data.batch_size == callback.plan.batch_size
    assert sizes.seen == [callback.batch_size] * 2
    assert 16 < callback.batch_size < 3000
    assert callback.plan.peak_bytes_after + callback.plan.reserved_bytes <= budget
    assert callback.plan.search_passes <= MOST_STEPS


def test_a_hyperparameter_of_the_module_will_do_and_the_data_set_is_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Few(SizedConv):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(RepeatedDigits(50), batch_size=self.hparams.batch_size)

    module, sizes = Few(), Sizes()
    callback = MemoryOptimization(memory_budget="1GiB", find_batch_size=True)
    with caplog.at_level("INFO"):
        make_trainer(tmp_path, callback, sizes, max_steps=1).fit(module)
    assert (callback.batch_size, module.hparams.batch_size, sizes.seen) == (50, 50, [50])
    assert "set batch_size to 50 (all the data there is); it was 16." in caplog.text + capsys.readouterr().err


def fit_on_rank(rank: int, folder: str) -> tuple[int, list[int], str, int]:
    seed_everything(0)
    held = torch.zeros(rank * 2**17)  # the second rank has less left
    callback = MemoryOptimization(memory_budget="4MiB", find_batch_size=True, can_chunk=whole)
    sizes, data = Sizes(), Data(count=6000)
    trainer = make_trainer(Path(folder), callback, sizes, max_steps=2, devices=2, strategy="ddp")
    trainer.fit(DenseNetwork(), datamodule=data)
    assert callback.plan is not None
    assert callback.batch_size == data.batch_size == callback.plan.batch_size
    assert callback.plan.peak_bytes_after + callback.plan.reserved_bytes <= 4 * MIB
    del held
    return callback.batch_size, sizes.seen, callback.plan.digest(), callback.plan.world_size


def test_two_ranks_under_ddp_train_with_one_size(tmp_path: Path) -> None:
    first, second = run_ranks(fit_on_rank, 2, str(tmp_path), timeout=300.0)
    assert first == second
    size, seen, _, world_size = first
    assert seen == [size, size]
    assert 16 < size < 3000  # each rank's own
    assert world_size == 2


def test_a_refusal_changes_neither_model_nor_batch_size(tmp_path: Path) -> None:
    module, data = SizedConv(), Data(batch_size=7)
    with pytest.raises(MemoryBudgetError, match="batch of one sample"):
        make_trainer(tmp_path, MemoryOptimization(memory_budget=1000, find_batch_size=True)).fit(module, data)
    assert (module.hparams.batch_size, data.batch_size) == (16, 7)
    assert not any(is_checkpointed(inner) for inner in module.modules())


def test_what_cannot_work_is_refused_with_what_to_do(tmp_path: Path) -> None:
    def fit(module: pl.LightningModule, *callbacks: pl.Callback, **data: Any) -> None:
        callback = MemoryOptimization(memory_budget="1GiB", find_batch_size=True)
        make_trainer(tmp_path, callback, *callbacks).fit(module, **data)

    with pytest.raises(MisconfigurationException, match=r"nor the datamodule has `batch_size`.*self.batch_size"):
        fit(DenseNetwork(), train_dataloaders=DataLoader(digits(32), batch_size=4))
    with pytest.raises(MisconfigurationException, match=r"to be a number of samples, 1 or more; found None"):
        fit(DenseNetwork(), datamodule=Data(batch_size=None))
    with pytest.raises(MisconfigurationException, match=r"gave batches of the same shapes.*cannot be changed"):
        fit(SizedConv(), train_dataloaders=DataLoader(digits(32), batch_size=4))
    with pytest.raises(MisconfigurationException, match="BatchSizeFinder would both set the batch size"):
        fit(SizedConv(), BatchSizeFinder())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"find_batch_size": True}, "within `memory_budget`, which was not given"),
        ({"find_batch_size": 3, "memory_budget": "1GiB"}, "True or False"),
        ({"find_batch_size": True, "memory_budget": "1GiB", "example_forward": len}, "no use for `example_forward`"),
        ({"picture": True}, "draws the plan for a `memory_budget`"),
    ],
    ids=str,
)
def test_the_callback_refuses_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        MemoryOptimization(**options)


def test_the_picture_lies_beside_the_plan(tmp_path: Path) -> None:
    callback = MemoryOptimization(memory_budget="1GiB", picture=True)
    make_trainer(tmp_path, callback, max_steps=1).fit(DenseNetwork(), datamodule=Data(count=32))
    assert (tmp_path / "memory_plan.json").is_file()
    assert (tmp_path / "memory_plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_plan_without_a_budget_has_no_batch_size() -> None:
    model = dense()
    optimize_memory(model, example_forward=lambda model: dense_forward(model, 8), memory_budget="1GiB")
    plan = applied_plan(model)
    assert plan.batch_size is None
    assert "batch size" not in str(replace(plan).table().title)
