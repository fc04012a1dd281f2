"""MemoryOptimization on two ranks: they decide alike, fail together, and train as without it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from lightning_memopt.callbacks import MemoryOptimization
from lightning_memopt.callbacks.memory_optimization import PLAN_FILE
from lightning_memopt.checkpointing import is_checkpointed
from lightning_memopt.planning import Plan, apply_plan
from tests.digits_training import (
    BATCH,
    BuiltInConfigureModel,
    Recorder,
    SpikingBlock,
    SpikingConv,
    Transformer,
    assert_same_training,
    digits,
    make_trainer,
    training_data,
)
from tests.equality import assert_same_tree, differences, seed_everything
from tests.ranks import run_ranks


class WithUnused(SpikingConv):
    """Holds a layer that no step uses."""

    def build(self) -> None:
        super().build()
        self.unused = nn.Linear(3, 3)


def train(
    rank: int,
    folder: str,
    make_module: Callable[[], pl.LightningModule],
    strategy: Any,
    options: dict[str, Any] | None,
    trainer_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train on this rank, with the callback if `options` are given; returns the record, the plan and its digest."""
    seed_everything(0)
    module, recorder = make_module(), Recorder()
    ours = [] if options is None else [MemoryOptimization(verbose=False, **options)]
    trainer = make_trainer(
        folder, *ours, recorder, devices=2, strategy=strategy, max_epochs=1, **(trainer_options or {})
    )
    seed_everything(1 + rank)
    trainer.fit(module, training_data())
    plan = ours[0].plan if ours else None
    regions = [name for name, part in module.named_modules() if is_checkpointed(part)]
    return {
        "record": recorder.record(),
        "plan": plan and plan.to_json(),
        "digest": plan and plan.digest(),
        "regions": regions,
    }


class BinaryOnRankZero(SpikingConv):
    """What enters the blocks is binary on rank 0 only."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images.round() if torch.distributed.get_rank() == 0 else images
        return super().forward(images)


# name: strategy, module, options of the Trainer
TRAININGS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "plain": ({}, SpikingConv, {}),
    "layers made late, bf16-mixed": ({}, BuiltInConfigureModel, {"precision": "bf16-mixed"}),
    "accumulated gradients": ({}, Transformer, {"accumulate_grad_batches": 2}),
    "static graph": ({"static_graph": True}, SpikingConv, {}),
    "unused parameters": ({"find_unused_parameters": True}, WithUnused, {}),
    "sampler of the user": ({}, SpikingConv, {"use_distributed_sampler": False}),
}


def train_all(rank: int, folder: str) -> dict[str, Any]:
    """Every training without and with the callback, one after the other in one process group."""
    results: dict[str, Any] = {}
    for name, (strategy, make_module, options) in TRAININGS.items():
        results[name] = [
            train(rank, folder, make_module, DDPStrategy(**strategy), ours, options) for ours in (None, {})
        ]
    results["binary on one"] = train(rank, folder, BinaryOnRankZero, "ddp", {})
    return results


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `train_all` gave on each rank."""
    return run_ranks(train_all, 2, str(tmp_path_factory.mktemp("trainings")), timeout=240.0)


@pytest.mark.parametrize("name", TRAININGS)
def test_two_ranks_train_alike_with_and_without(trainings: list[dict[str, Any]], name: str) -> None:
    results = [rank[name] for rank in trainings]
    for plain, optimized in results:
        assert_same_training(plain["record"], optimized["record"])
        assert len(optimized["regions"]) == 3
        assert plain["regions"] == []
    (_, first), (_, second) = results
    assert first["digest"] == second["digest"]
    batches = [[step["batch"] for step in optimized["record"]["steps"]] for _, optimized in results]
    assert list(differences(*batches)), "the ranks trained on the same data"
    # Weights meet after every step, so the ranks must end alike although their data differ.
    assert_same_tree(
        first["record"]["end"]["parameter"], second["record"]["end"]["parameter"], name="parameters of the ranks"
    )


def test_an_input_that_is_binary_on_one_rank_only_is_packed_on_none(trainings: list[dict[str, Any]]) -> None:
    for result in (rank["binary on one"] for rank in trainings):
        packed = {region.path: region.compressor for region in Plan.from_json(result["plan"]).regions}
        # Spikes enter the other blocks on both ranks.
        assert packed == {"blocks.0": None, "blocks.1": "bit", "blocks.2": "bit"}
    assert trainings[0]["binary on one"]["digest"] == trainings[1]["binary on one"]["digest"]


# ---------------------------------------------------------------------------------------------------------------------
# Errors of one rank


class BrokenData(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if torch.distributed.get_rank() == 1:
            raise OSError("disk of rank 1 is gone")
        return digits(64)[index]


class BreaksInStep(SpikingConv):
    """Fails on rank 1 at the n-th step that is observed."""

    fail_at = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).calls = getattr(type(self), "calls", 0) + 1
        if torch.distributed.get_rank() == 1 and self.calls >= self.fail_at:
            raise ZeroDivisionError("rank 1 cannot step")
        return super().training_step(batch, batch_idx)


class BreaksLater(BreaksInStep):
    fail_at = 3


def fail(rank: int, folder: str, where: str) -> dict[str, Any]:
    """Run into an error that only rank 1 has; returns what this rank raised and when."""
    seed_everything(0)
    module: pl.LightningModule = {"data": SpikingConv, "step": BreaksInStep, "later": BreaksLater}.get(
        where, SpikingConv
    )()
    data = DataLoader(BrokenData(), batch_size=BATCH) if where == "data" else training_data()
    options: dict[str, Any] = {"level": 2, "split_fn": halves, "targets": SpikingBlock} if where == "later" else {}
    if where == "plan":
        path = Path(folder, f"plan{rank}.json")
        path.write_text(Path(folder, PLAN_FILE).read_text() if rank == 0 else "no plan")
        options = {"plan": path}
    callback = MemoryOptimization(verbose=False, **options)
    trainer = make_trainer(folder, callback, devices=2, strategy="ddp", max_epochs=1)
    message = "nothing was raised"
    try:
        trainer.fit(module, data)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    return {
        "message": message,
        "regions": [name for name, part in module.named_modules() if is_checkpointed(part)],
        "patched": "setup" in vars(trainer.strategy),
        "plan": callback.plan,
    }


def halves(module: nn.Module) -> Any:
    return (module.conv, module.lif) if isinstance(module, SpikingBlock) else ()


OWN_ERRORS = {
    "data": "OSError: disk of rank 1 is gone",
    "step": "ZeroDivisionError: rank 1 cannot step",
    "later": "ZeroDivisionError: rank 1 cannot step",
    "plan": "no valid JSON",
}


def fail_everywhere(rank: int, folder: str) -> dict[str, Any]:
    """All failures in one process group: it must be usable after each."""
    return {where: fail(rank, folder, where) for where in OWN_ERRORS}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("failures")
    save_plan(folder, SpikingConv())
    # A rank that waited for the other would wait for half an hour, and is ended by this time instead.
    return run_ranks(fail_everywhere, 2, str(folder), timeout=120.0)


@pytest.mark.parametrize("where", OWN_ERRORS)
def test_an_error_on_rank_1_is_raised_on_both_and_changes_nothing(failures: list[dict[str, Any]], where: str) -> None:
    healthy, broken = (rank[where] for rank in failures)
    assert OWN_ERRORS[where] in broken["message"]
    assert "Rank 1" in healthy["message"]
    assert OWN_ERRORS[where] in healthy["message"]
    for result in (healthy, broken):
        assert result["regions"] == []
        assert not result["patched"]
        assert result["plan"] is None


def save_plan(folder: Path, module: pl.LightningModule) -> None:
    callback = MemoryOptimization(verbose=False)
    make_trainer(folder, callback, max_epochs=0).fit(module, training_data())
    assert (folder / PLAN_FILE).exists()


# ---------------------------------------------------------------------------------------------------------------------
# Sharded models: with a plan from elsewhere


class Sharded(Transformer):
    """Shards its layers itself, as ModelParallelStrategy asks."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.head, mesh=mesh)
        fully_shard(self.embedding, mesh=mesh)


class TreatsItself(Sharded):
    """Applies a plan before it shards, without the callback."""

    plan_file: Path

    def configure_model(self) -> None:
        apply_plan(self, self.plan_file)
        super().configure_model()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(float(outputs["loss"]))


class FSDPOnCPU(FSDPStrategy):
    """Lightning gives FSDP the index of a CUDA device."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def train_sharded(rank: int, folder: str, kind: str, plan: Path | None) -> Any:
    seed_everything(0)
    module: pl.LightningModule
    strategy: Any
    if kind == "fsdp":
        module = Transformer()
        strategy = FSDPOnCPU(auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}))
    else:
        module = TreatsItself() if kind == "by hand" else Sharded()
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    losses = Losses()
    ours = [] if plan is None else [MemoryOptimization(plan=plan, verbose=False)]
    trainer = make_trainer(folder, *ours, losses, devices=2, strategy=strategy, max_epochs=1)
    seed_everything(1)
    trainer.fit(module, training_data(shuffle=False))
    weights = {name: whole(parameter) for name, parameter in module.named_parameters()}
    regions = [name for name, part in module.named_modules() if is_checkpointed(part)]
    return losses.values, weights, regions


def refuse_sharded(folder: str) -> str:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = make_trainer(folder, MemoryOptimization(), devices=2, strategy=strategy, max_epochs=1)
    try:
        trainer.fit(Sharded(), training_data())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def train_all_sharded(rank: int, folder: str) -> dict[str, Any]:
    plan = Path(folder, PLAN_FILE)
    results: dict[str, Any] = {"refused": refuse_sharded(folder)}
    for kind in ("model parallel", "fsdp"):
        # Not into the folder of the plan: each run saves its own.
        results[kind] = [train_sharded(rank, f"{folder}/runs", kind, ours) for ours in (None, plan)]
    TreatsItself.plan_file = plan
    results["by hand"] = [results["model parallel"][0], train_sharded(rank, f"{folder}/runs", "by hand", None)]
    return results


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    save_plan(folder, Transformer())
    return run_ranks(train_all_sharded, 2, str(folder), timeout=240.0)


@pytest.mark.parametrize("kind", ["model parallel", "fsdp", "by hand"])
def test_a_sharded_model_trains_alike_with_a_plan_made_on_one_device(sharded: list[dict[str, Any]], kind: str) -> None:
    for rank in sharded:
        (losses, weights, plain_regions), (losses_too, weights_too, regions) = rank[kind]
        assert losses == losses_too
        assert_same_tree(weights, weights_too, name="weights")
        assert plain_regions == []
        assert len(regions) == 3


def test_a_sharded_model_without_a_plan_is_refused_in_words(sharded: list[dict[str, Any]]) -> None:
    for rank in sharded:
        assert rank["refused"].startswith("MisconfigurationException")
        assert "ModelParallelStrategy shards" in rank["refused"]
        assert PLAN_FILE in rank["refused"]


class EndsItsGroup(DDPStrategy):
    """Lightning leaves the process group to the exit of the process, where gloo's threads abort one run in 25."""

    def teardown(self) -> None:
        super().teardown()
        torch.distributed.destroy_process_group()


def test_ranks_started_by_the_trainer_train_with_the_callback(tmp_path: Path) -> None:
    # A started process gets trainer, callback and model by pickle.
    with mock.patch.dict(os.environ):
        trainer = make_trainer(
            tmp_path,
            MemoryOptimization(verbose=False),
            devices=2,
            strategy=EndsItsGroup(start_method="spawn"),
            max_epochs=1,
        )
        trainer.fit(SpikingConv(), training_data())
    assert len(Plan.load(tmp_path / PLAN_FILE).recomputed) == 3
    assert trainer.callback_metrics["loss"] > 0
