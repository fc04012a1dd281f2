"""MemoryOptimization in real trainings on one device: the same training, in less memory."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder, RichProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.model_summary import ModelSummary
from rich.console import Console
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_memopt.callbacks import MemoryOptimization, memory_optimization, search_progress
from lightning_memopt.callbacks.memory_optimization import PLAN_FILE, _refuse_strategy
from lightning_memopt.checkpointing import is_checkpointed
from lightning_memopt.measuring import measure_memory
from lightning_memopt.planning import Plan, applied_plan
from tests.digits_training import (
    BuiltInConfigureModel,
    BuiltInSetup,
    SnnTorchNet,
    SpikingBlock,
    SpikingConv,
    Transformer,
    assert_same_training,
    digits,
    loaders,
    make_trainer,
    record_training,
    training_data,
    validation_data,
)
from tests.equality import assert_same_tree, frozen, seed_everything, state_of

Modules = Callable[[], pl.LightningModule]
SHUFFLED = loaders()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """On images of 8 x 8 a second thread costs more than it gives."""
    torch.set_num_threads(1)


class CountsRegions(pl.Callback):
    """Which modules are checkpointed while training runs."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def on_train_batch_start(self, trainer: Any, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.paths = [path for path, module in pl_module.named_modules() if is_checkpointed(module)]


def assert_trains_alike(
    tmp_path: Path,
    make_module: Modules,
    make_data: Callable[[], Any] = SHUFFLED,
    *,
    callback: MemoryOptimization | None = None,
    **options: Any,
) -> MemoryOptimization:
    """Train with and without the callback, compare bit for bit, and make sure that there was something to compare."""
    callback = callback or MemoryOptimization(verbose=False)
    plain = record_training(make_module, make_data, tmp_path, **options)
    regions = CountsRegions()
    optimized = record_training(make_module, make_data, tmp_path, callback, regions, **options)
    assert_same_training(plain, optimized)
    assert callback.plan is not None
    assert regions.paths
    assert sorted(regions.paths) == sorted(region.path for region in callback.plan.recomputed)
    return callback


@pytest.mark.parametrize("make_module", [SpikingConv, BuiltInSetup, BuiltInConfigureModel, SnnTorchNet, Transformer])
def test_a_training_is_the_same_with_the_callback(tmp_path: Path, make_module: Modules) -> None:
    callback = assert_trains_alike(tmp_path, make_module)
    assert len(callback.plan.recomputed) == 3


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("make_module", [SpikingConv, Transformer])
def test_a_training_is_the_same_in_other_precisions(tmp_path: Path, make_module: Modules, precision: str) -> None:
    assert_trains_alike(tmp_path, make_module, precision=precision)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.1},
        {"overfit_batches": 2},
        {"num_sanity_val_steps": 0, "check_val_every_n_epoch": 2},
        {"val_check_interval": 2},
    ],
)
def test_a_training_is_the_same_under_options_of_the_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    assert_trains_alike(tmp_path, SpikingConv, **options)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_training_is_the_same_with_workers(tmp_path: Path, persistent: bool) -> None:
    assert_trains_alike(tmp_path, SpikingConv, loaders(num_workers=2, persistent_workers=persistent))


class DigitsData(pl.LightningDataModule):
    """Draws its subset in `setup` and its order in `train_dataloader`."""

    def setup(self, stage: str) -> None:
        self.data = torch.utils.data.Subset(digits(96), torch.randperm(96)[:64].tolist())

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.data, batch_size=16, sampler=torch.randperm(64).tolist())

    def val_dataloader(self) -> Any:
        return validation_data()


class HasData(SpikingConv):
    def train_dataloader(self) -> Any:
        return training_data()


def test_a_training_is_the_same_with_a_datamodule_and_with_loaders_of_the_module(tmp_path: Path) -> None:
    assert_trains_alike(tmp_path, SpikingConv, lambda: {"datamodule": DigitsData()})
    assert_trains_alike(tmp_path, HasData, lambda: {"val_dataloaders": validation_data()})


def split_block(module: nn.Module) -> Sequence[nn.Module]:
    """Convolution and norm in one region would be cut here: two regions out of one block."""
    return (module.conv, module.lif) if isinstance(module, SpikingBlock) else ()


def is_neuron(module: nn.Module) -> bool:
    return hasattr(module, "v_threshold")


class ChunksBlocks:
    """A rule with a setting, as a YAML file gives it by class_path and init_args."""

    def __init__(self, allowed: bool = True) -> None:
        self.allowed = allowed

    def __call__(self, module: nn.Module) -> bool:
        return self.allowed and is_neuron(module)


def logits_of_digits(model: nn.Module) -> Any:
    return model(digits(16)[:][0]).square().mean()


@pytest.mark.parametrize("level", [2, 4])
def test_a_search_that_measures_leaves_no_trace_in_the_training(tmp_path: Path, level: int) -> None:
    callback = MemoryOptimization(SpikingBlock, level=level, split_fn=split_block, can_chunk=is_neuron, verbose=False)
    plain = record_training(SpikingConv, loaders(), tmp_path, max_epochs=1)
    optimized = record_training(SpikingConv, loaders(), tmp_path, callback, max_epochs=1)
    assert_same_training(plain, optimized)
    assert callback.plan.search_passes > 0
    assert callback.plan.peak_bytes_after <= callback.plan.peak_bytes_before


def test_a_training_step_takes_fewer_bytes(tmp_path: Path) -> None:
    def peak(*callbacks: pl.Callback) -> int:
        module = SpikingConv(channels=32)
        make_trainer(tmp_path, *callbacks, max_epochs=0).fit(module, training_data(batch_size=64))
        images, labels = digits(64)[:]

        def step() -> None:
            nn.functional.cross_entropy(module(images), labels).backward()

        report = measure_memory(step)
        return report.peak_bytes - report.start_bytes  # without what other tests left behind

    assert peak(MemoryOptimization(verbose=False)) < 0.6 * peak()


@pytest.mark.gpu
def test_on_cuda_a_training_is_the_same_and_its_peak_lower(tmp_path: Path) -> None:
    def big() -> pl.LightningModule:
        return SpikingConv(channels=128)

    def peak_of(*callbacks: pl.Callback) -> tuple[dict[str, Any], int]:
        torch.cuda.reset_peak_memory_stats()
        record = record_training(
            big, loaders(batch_size=96), tmp_path, ResetsPeak(), *callbacks, accelerator="gpu", devices=1
        )
        return record, torch.cuda.max_memory_allocated()

    class ResetsPeak(pl.Callback):
        # The peak of the search is not that of the training.
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            torch.cuda.reset_peak_memory_stats()

    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        plain, _ = peak_of()
        held = torch.cuda.memory_allocated()  # by the record, and by cuBLAS, which keeps a workspace for each thread
        _, before = peak_of()
        optimized, after = peak_of(MemoryOptimization(verbose=False))
    assert_same_training(plain, optimized)
    assert after - held < 0.75 * (before - held)


def test_the_users_forward_is_taken_instead_of_the_step(tmp_path: Path) -> None:
    class StepOnlyInTraining(SpikingConv):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.trainer.optimizers[0].param_groups[0]["lr"] == 5e-3, "this is no training"
            return super().training_step(batch, batch_idx)

    assert_trains_alike(
        tmp_path, StepOnlyInTraining, callback=MemoryOptimization(example_forward=logits_of_digits, verbose=False)
    )


def test_manual_optimization_works_with_a_forward_and_is_refused_without(tmp_path: Path) -> None:
    class Manual(SpikingConv):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()
            return {"loss": loss.detach()}

    class TurnsManual(Manual):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = True

        def configure_model(self) -> None:
            self.automatic_optimization = False

    assert_trains_alike(tmp_path, Manual, callback=MemoryOptimization(example_forward=logits_of_digits, verbose=False))
    for make_module in (Manual, TurnsManual):
        trainer = make_trainer(tmp_path, MemoryOptimization())
        with pytest.raises(MisconfigurationException, match=r"manual optimization .*example_forward"):
            trainer.fit(make_module(), training_data())
        assert "setup" not in vars(trainer.strategy)


def test_level_0_changes_nothing_and_asks_for_nothing(tmp_path: Path) -> None:
    callback, regions = MemoryOptimization(level=0, verbose=False), CountsRegions()
    plain = record_training(SpikingConv, loaders(), tmp_path)
    optimized = record_training(SpikingConv, loaders(), tmp_path, callback, regions)
    assert_same_training(plain, optimized)
    assert regions.paths == []


# ---------------------------------------------------------------------------------------------------------------------
# Once, and only for fit


def count_searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    searches: list[Any] = []
    search = memory_optimization.optimize_memory

    def counted(*args: Any, **kwargs: Any) -> Any:
        if "plan" not in kwargs:
            searches.append(kwargs)
        return search(*args, **kwargs)

    monkeypatch.setattr(memory_optimization, "optimize_memory", counted)
    return searches


def test_a_second_fit_keeps_the_plan_and_trains_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train_twice(*callbacks: pl.Callback) -> dict[str, Any]:
        seed_everything(0)
        module = SpikingConv()
        trainer = make_trainer(tmp_path, *callbacks, max_epochs=1)
        trainer.fit(module, training_data())
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, training_data())
        return frozen(dict(module.state_dict()))

    searches = count_searches(monkeypatch)
    callback = MemoryOptimization(verbose=False)
    assert_same_tree(train_twice(), train_twice(callback), name="weights")
    assert len(searches) == 1


def test_another_callback_plans_again_and_another_model_gets_its_own_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = count_searches(monkeypatch)
    module = SpikingConv()
    first = MemoryOptimization(verbose=False)
    make_trainer(tmp_path, first, max_epochs=1).fit(module, training_data())
    assert len(first.plan.recomputed) == 3
    half = MemoryOptimization(checkpoint_budget="speed", verbose=False)
    make_trainer(tmp_path, half, max_epochs=1).fit(module, training_data())
    assert len(half.plan.recomputed) == 2
    assert applied_plan(module) is half.plan
    assert len([m for m in module.modules() if is_checkpointed(m)]) == 2
    other = SpikingConv(blocks=4)
    make_trainer(tmp_path, half, max_epochs=1).fit(other, training_data())
    assert len(searches) == 3
    assert applied_plan(other) is half.plan


def test_validate_test_and_predict_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Evaluates(SpikingConv):
        test_step = SpikingConv.validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0])

    searches = count_searches(monkeypatch)
    module, callback = Evaluates(), MemoryOptimization()
    trainer = make_trainer(tmp_path, callback)
    trainer.validate(module, validation_data(), verbose=False)
    trainer.test(module, validation_data(), verbose=False)
    trainer.predict(module, validation_data())
    assert searches == []
    assert callback.plan is None
    assert callback.state_dict() == {}
    assert not any(is_checkpointed(m) for m in module.modules())


def test_a_fit_without_batches_makes_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searches = count_searches(monkeypatch)
    make_trainer(tmp_path, MemoryOptimization(), limit_train_batches=0).fit(SpikingConv(), training_data())
    assert searches == []


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints and names


def fit_to(folder: Path, epochs: int, *callbacks: pl.Callback, resume: Path | None = None) -> pl.Trainer:
    seed_everything(0)
    module = SpikingConv(dropout=0.0)
    trainer = make_trainer(folder, *callbacks, max_epochs=epochs)
    trainer.fit(module, training_data(shuffle=False), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("loaded_with", [False, True])
@pytest.mark.parametrize("saved_with", [False, True])
def test_a_checkpoint_saved_with_or_without_resumes_with_or_without(
    tmp_path: Path, saved_with: bool, loaded_with: bool
) -> None:
    def callbacks(wanted: bool) -> list[pl.Callback]:
        return [MemoryOptimization(verbose=False)] if wanted else []

    expected = fit_to(tmp_path, 2)
    path = tmp_path / "half.ckpt"
    fit_to(tmp_path, 1, *callbacks(saved_with)).save_checkpoint(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = fit_to(tmp_path, 2, *callbacks(loaded_with), resume=path)
    assert resumed.global_step == expected.global_step == 12
    assert_same_tree(
        frozen(state_of(expected.lightning_module)["parameter"]),
        frozen(state_of(resumed.lightning_module)["parameter"]),
        name="parameters",
    )
    assert_same_tree(expected.optimizers[0].state_dict(), resumed.optimizers[0].state_dict(), name="optimizer")
    assert not any("memory" in str(warning.message) for warning in caught if saved_with == loaded_with)


def test_resuming_with_another_plan_says_what_differs_and_trains_on(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    fit_to(tmp_path, 1, MemoryOptimization(verbose=False)).save_checkpoint(path)
    with pytest.warns(UserWarning, match=r"checkpoint_budget was 'memory', is 'speed'; .* was recompute, is keep"):
        trainer = fit_to(tmp_path, 2, MemoryOptimization(checkpoint_budget="speed", verbose=False), resume=path)
    assert trainer.global_step == 12
    with pytest.warns(UserWarning, match="had compressor='bit', has None"):
        trainer = fit_to(tmp_path, 2, MemoryOptimization(compress=False, verbose=False), resume=path)
    assert trainer.global_step == 12


def test_a_plan_that_cannot_be_read_does_not_stop_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    fit_to(tmp_path, 1, MemoryOptimization(verbose=False)).save_checkpoint(path)
    content = torch.load(path, weights_only=True)  # holds nothing but tensors and plain data
    content["callbacks"]["MemoryOptimization"] = {"plan": '{"format": 999}'}
    torch.save(content, path)
    with pytest.warns(UserWarning, match="cannot be read .*format 999"):
        trainer = fit_to(tmp_path, 2, MemoryOptimization(verbose=False), resume=path)
    assert trainer.global_step == 12


def test_testing_a_checkpoint_of_another_plan_compares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    fit_to(tmp_path, 1, MemoryOptimization(verbose=False)).save_checkpoint(path)
    callback = MemoryOptimization(checkpoint_budget="speed", verbose=False)
    trainer = fit_to(tmp_path, 1, callback)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.validate(trainer.lightning_module, validation_data(), ckpt_path=path, verbose=False)
    assert not any("memory" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("make_module", [SpikingConv, SnnTorchNet, Transformer])
def test_names_in_summary_and_state_dict_stay(tmp_path: Path, make_module: Modules) -> None:
    plain, optimized = make_module(), make_module()
    before = str(ModelSummary(optimized, max_depth=-1))
    make_trainer(tmp_path, max_epochs=0).fit(plain, training_data())
    make_trainer(tmp_path, MemoryOptimization(verbose=False), max_epochs=0).fit(optimized, training_data())
    assert any(is_checkpointed(m) for m in optimized.modules())
    assert str(ModelSummary(optimized, max_depth=-1)) == before
    assert list(optimized.state_dict()) == list(plain.state_dict())
    assert repr(optimized) == repr(plain)
    assert vars(optimized).keys() == vars(plain).keys()


# ---------------------------------------------------------------------------------------------------------------------
# Plan files and the report


def test_the_plan_is_saved_beside_the_logs_and_can_be_applied_without_observing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = MemoryOptimization(verbose=False)
    trainer = make_trainer(tmp_path, first, logger=CSVLogger(tmp_path))
    trainer.fit(SpikingConv(), training_data())
    path = Path(trainer.log_dir, PLAN_FILE)
    assert Plan.load(path) == first.plan
    searches = count_searches(monkeypatch)
    callback = assert_trains_alike(tmp_path, SpikingConv, callback=MemoryOptimization(plan=path, verbose=False))
    assert callback.plan.digest() == first.plan.digest()
    assert searches == []


def test_a_dry_run_saves_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    callback = MemoryOptimization(verbose=False)
    make_trainer(tmp_path, callback, fast_dev_run=True, logger=True).fit(SpikingConv(), training_data())
    assert callback.plan is not None
    assert list(tmp_path.rglob(PLAN_FILE)) == []


def test_a_plan_in_the_working_directory_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(PLAN_FILE).write_text("kept by hand")
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[MemoryOptimization(verbose=False)],
    )  # fmt: skip
    trainer.fit(SpikingConv(), training_data())
    assert Path(PLAN_FILE).read_text() == "kept by hand"


def test_a_log_directory_that_cannot_be_written_costs_no_training(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    recorded = CountsRegions()
    with pytest.warns(UserWarning, match="could not save its plan"):
        make_trainer(occupied, MemoryOptimization(verbose=False), recorded).fit(SpikingConv(), training_data())
    assert recorded.paths


def test_a_plan_for_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    make_trainer(tmp_path, MemoryOptimization(verbose=False)).fit(SpikingConv(blocks=4), training_data())
    module = SpikingConv(blocks=3)
    with pytest.raises(ValueError, match=r"blocks\.3"):
        make_trainer(tmp_path, MemoryOptimization(plan=tmp_path / PLAN_FILE)).fit(module, training_data())
    assert not any(is_checkpointed(m) for m in module.modules())


def test_the_table_names_every_region_and_can_be_switched_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(tmp_path, MemoryOptimization(), max_epochs=0).fit(SpikingConv(), training_data())
    shown = capsys.readouterr().out
    # The last two are treated alike.
    assert all(name in shown for name in ("blocks.0", "blocks.{1,2}", "2 SpikingBlock", "recompute"))
    make_trainer(tmp_path, MemoryOptimization(verbose=False), max_epochs=0).fit(SpikingConv(), training_data())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar, None])
def test_a_long_search_shows_its_progress_as_the_trainer_shows_it(
    tmp_path: Path,
    bar: type[pl.Callback] | None,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(search_progress, "get_console", lambda: Console(file=screen, force_terminal=True))
    callback = MemoryOptimization(SpikingBlock, level=2, split_fn=split_block, verbose=False)
    bars = [] if bar is None else [bar()]
    make_trainer(tmp_path, callback, *bars, max_epochs=0, enable_progress_bar=bar is not None).fit(
        SpikingConv(), training_data()
    )
    captured = capfd.readouterr()
    assert ("Memory optimization" in screen.getvalue()) is (bar is RichProgressBar)
    assert ("Memory optimization" in captured.out + captured.err) is (bar is TQDMProgressBar)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals and warnings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 5}, "`level` to be 0, 1, 2, 3 or 4, got 5"),
        ({"level": True}, "got True"),
        ({"checkpoint_budget": "much"}, "`checkpoint_budget` to be one of .*'much'"),
        ({"targets": "SpikingBlock"}, "`targets` to be a class of modules"),
        ({"targets": [SpikingBlock, int]}, "`targets`"),
        ({"targets": []}, "`targets`"),
        ({"example_forward": 3}, "`example_forward` to be callable"),
        ({"split_fn": "a.b"}, "`split_fn` to be callable"),
        ({"plan": "p.json", "targets": SpikingBlock}, "no use for `targets`"),
        ({"plan": "p.json", "can_chunk": is_neuron}, "no use for `can_chunk`"),
    ],
)
def test_wrong_arguments_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        MemoryOptimization(**options)


def test_a_missing_plan_file_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    class Untouched(SpikingConv):
        def setup(self, stage: str) -> None:
            raise AssertionError("too late")

    with pytest.raises(MisconfigurationException, match=r"nowhere\.json.*no such file"):
        make_trainer(tmp_path, MemoryOptimization(plan=tmp_path / "nowhere.json")).fit(Untouched(), training_data())


def test_a_second_callback_is_refused(tmp_path: Path) -> None:
    class Mine(MemoryOptimization):
        pass

    with pytest.raises(RuntimeError, match="more than one stateful callback of type `MemoryOptimization`"):
        make_trainer(tmp_path, MemoryOptimization(), MemoryOptimization(level=2))
    with pytest.raises(MisconfigurationException, match="more than one MemoryOptimization"):
        make_trainer(tmp_path, MemoryOptimization(), Mine()).fit(SpikingConv(), training_data())


def test_parameters_without_data_need_a_plan(tmp_path: Path) -> None:
    class OnMeta(SpikingConv):
        def configure_model(self) -> None:
            self.to("meta")

    class Lazy(SpikingConv):
        def build(self) -> None:
            super().build()
            self.head = nn.LazyLinear(10)

    with pytest.raises(MisconfigurationException, match=r"head\.weight is not initialized yet.*plan="):
        make_trainer(tmp_path, MemoryOptimization()).fit(Lazy(), training_data())
    # Lightning's own teardown then fails on what it cannot move back to the host.
    with pytest.raises(NotImplementedError, match="meta") as caught:
        make_trainer(tmp_path, MemoryOptimization()).fit(OnMeta(), training_data())
    assert isinstance(caught.value.__context__, MisconfigurationException)
    assert re.search("conv.weight is on the meta device.*plan=", str(caught.value.__context__))


def test_strategies_that_cannot_be_observed_are_refused_in_words() -> None:
    def strategy(kind: type[Any], **attributes: Any) -> Any:
        # These ask for accelerators or packages when they are made; the check looks at kind and settings only.
        made = type(kind.__name__, (kind,), {"root_device": torch.device("cpu"), **attributes})
        made.__abstractmethods__ = frozenset()
        return object.__new__(made)

    sharded = {"_activation_checkpointing_kwargs": {}}
    recomputes = {"_activation_checkpointing_kwargs": {"auto_wrap_policy": 1}}
    with pytest.raises(MisconfigurationException, match="DeepSpeed"):
        _refuse_strategy(strategy(DeepSpeedStrategy), has_plan=True)
    with pytest.raises(MisconfigurationException, match="activation_checkpointing_policy"):
        _refuse_strategy(strategy(FSDPStrategy, **recomputes), has_plan=True)
    with pytest.raises(MisconfigurationException, match=r"FSDPStrategy shards.*memory_plan\.json"):
        _refuse_strategy(strategy(FSDPStrategy, **sharded), has_plan=False)
    with pytest.raises(MisconfigurationException, match="ModelParallelStrategy shards"):
        _refuse_strategy(strategy(ModelParallelStrategy), has_plan=False)
    with pytest.raises(MisconfigurationException, match="not under Strategy"):
        _refuse_strategy(strategy(pl.strategies.Strategy), has_plan=False)
    with pytest.raises(MisconfigurationException, match="XLA"):
        _refuse_strategy(strategy(pl.strategies.Strategy, root_device=torch.device("xla", 0)), has_plan=True)
    _refuse_strategy(strategy(FSDPStrategy, **sharded), has_plan=True)
    _refuse_strategy(strategy(ModelParallelStrategy), has_plan=True)


def test_a_batch_size_that_is_found_later_is_warned_of(tmp_path: Path) -> None:
    class Sized(SpikingConv):
        batch_size = 4
        val_dataloader = staticmethod(validation_data)

        def train_dataloader(self) -> Any:
            return training_data(batch_size=self.batch_size)

    finder = BatchSizeFinder(max_trials=2, steps_per_trial=1)
    with pytest.warns(UserWarning, match="BatchSizeFinder changes the batch size after"):
        make_trainer(tmp_path, MemoryOptimization(verbose=False), finder, max_epochs=1).fit(Sized())


@pytest.mark.parametrize("kind", ["torch wrapper", "switch"])
def test_a_model_that_recomputes_by_itself_is_warned_of(tmp_path: Path, kind: str) -> None:
    module = Transformer()
    if kind == "switch":
        module.layers[1].gradient_checkpointing = True
    else:
        module.layers[1] = checkpoint_wrapper(module.layers[1])
    with pytest.warns(UserWarning, match=r"already recomputes activations by itself \(layers\.1"):
        make_trainer(tmp_path, MemoryOptimization(verbose=False), max_epochs=0).fit(module, training_data())


# ---------------------------------------------------------------------------------------------------------------------
# Errors leave everything as it was


@pytest.mark.parametrize("error", [ValueError("bad batch"), KeyboardInterrupt()])
@pytest.mark.parametrize("level", [1, 2])
def test_an_error_in_the_step_leaves_model_and_trainer_as_they_were(
    tmp_path: Path, error: BaseException, level: int
) -> None:
    class Fails(SpikingConv):
        calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            type(self).calls += 1
            loss = super().training_step(batch, batch_idx)
            if self.calls >= level:
                raise error
            return loss

    module = Fails()
    before = frozen(state_of(module))
    trainer = make_trainer(tmp_path, MemoryOptimization(SpikingBlock, level=level, split_fn=split_block, verbose=False))
    with pytest.raises((ValueError, SystemExit)):
        trainer.fit(module, training_data())
    after = frozen(state_of(module))
    for kind in ("parameter", "gradient", "buffer", "state_dict key", "training flag"):
        assert_same_tree(before[kind], after[kind], name=kind)
    assert module.steps_seen == 0
    assert module.kept == []
    assert not any(is_checkpointed(m) for m in module.modules())
    assert "log" not in vars(module)
    assert "setup" not in vars(trainer.strategy)
    assert trainer.strategy.optimizers == []


def test_an_error_before_the_model_is_wrapped_leaves_the_strategy_as_it_was(tmp_path: Path) -> None:
    class Fails(SpikingConv):
        def configure_model(self) -> None:
            raise ValueError("no model")

    trainer = make_trainer(tmp_path, MemoryOptimization())
    with pytest.raises(ValueError, match="no model"):
        trainer.fit(Fails(), training_data())
    assert "setup" not in vars(trainer.strategy)


def test_a_failed_search_leaves_an_earlier_plan_in_place(tmp_path: Path) -> None:
    module = SpikingConv()
    first = MemoryOptimization(verbose=False)
    make_trainer(tmp_path, first, max_epochs=1).fit(module, training_data())

    def fails(model: nn.Module) -> Any:
        raise ValueError("no forward")

    with pytest.raises(ValueError, match="no forward"):
        make_trainer(tmp_path, MemoryOptimization(example_forward=fails, level=2)).fit(module, training_data())
    assert applied_plan(module).digest() == first.plan.digest()
    assert len([m for m in module.modules() if is_checkpointed(m)]) == 3


# ---------------------------------------------------------------------------------------------------------------------
# Neighbours


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("make_module", [SpikingConv, BuiltInConfigureModel])
def test_averaged_weights_are_the_same(tmp_path: Path, make_module: Modules, ours_first: bool) -> None:
    module = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="came with Lightning 2.6")

    def train(*ours: pl.Callback) -> Any:
        averaging = module.WeightAveraging()
        callbacks = [*ours, averaging] if ours_first else [averaging, *ours]
        record = record_training(make_module, loaders(), tmp_path, *callbacks)
        return record, frozen(dict(averaging._average_model.state_dict()))

    expected = train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = train(MemoryOptimization(verbose=False))
    assert_same_tree(expected, actual, name="averaged training")
    # WeightAveraging warns of modules that have a configure_model of their own, and only of these.
    warned = any("overrides the configure_model" in str(warning.message) for warning in caught)
    assert warned is (make_module is BuiltInConfigureModel)


def test_a_compiled_module_trains_alike(tmp_path: Path) -> None:
    def compiled() -> Any:
        return torch.compile(Transformer(), backend="aot_eager")

    try:
        assert_trains_alike(tmp_path, compiled, max_epochs=1, limit_train_batches=2)
    finally:
        torch.compiler.reset()


# ---------------------------------------------------------------------------------------------------------------------
# Command line

CONFIG = """
seed_everything: false
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning_memopt.MemoryOptimization
      init_args:
        verbose: false
"""


def run_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> LightningCLI:
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load(CONFIG)
    config["trainer"]["callbacks"][0]["init_args"].update(options)
    config["trainer"]["default_root_dir"] = str(tmp_path)
    path = tmp_path / "given.yaml"
    path.write_text(yaml.safe_dump(config))
    return LightningCLI(SpikingConv, DigitsData, args=["fit", "--config", str(path)])


def callback_of(cli: LightningCLI) -> MemoryOptimization:
    (callback,) = [c for c in cli.trainer.callbacks if isinstance(c, MemoryOptimization)]
    return callback


def test_every_option_can_come_from_a_yaml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = "tests.test_memory_optimization"
    options = {
        "targets": ["tests.digits_training.SpikingBlock"],
        "example_forward": f"{here}.logits_of_digits",
        "level": 3,
        "checkpoint_budget": "balanced",
        "compress": False,
        "split_fn": f"{here}.split_block",
        "can_chunk": {"class_path": f"{here}.ChunksBlocks", "init_args": {"allowed": False}},
        "process_group": None,
    }
    cli = run_cli(tmp_path, monkeypatch, options)
    callback = callback_of(cli)
    assert callback.targets == [SpikingBlock]
    assert callback.example_forward is logits_of_digits
    assert (callback.level, callback.checkpoint_budget, callback.compress) == (3, "balanced", False)
    assert callback.split_fn is split_block
    assert type(callback.can_chunk).__name__ == "ChunksBlocks"
    assert callback.can_chunk.allowed is False
    assert len(callback.plan.recomputed) >= 2
    # Lightning saves the configuration of a run; it must describe the same callback.
    again = yaml.safe_load((tmp_path / "config.yaml").read_text())
    saved = again["trainer"]["callbacks"][0]["init_args"]
    assert {name: saved[name] for name in options if name != "can_chunk"} == {
        name: value for name, value in options.items() if name != "can_chunk"
    }


def test_a_class_and_a_plan_file_can_come_from_a_yaml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = run_cli(tmp_path, monkeypatch, {"targets": "tests.digits_training.SpikingBlock"})
    assert callback_of(cli).targets is SpikingBlock
    (tmp_path / "config.yaml").unlink()
    callback_of(cli).plan.save(tmp_path / PLAN_FILE)
    again = run_cli(tmp_path, monkeypatch, {"plan": str(tmp_path / PLAN_FILE)})
    assert callback_of(again).plan.digest() == callback_of(cli).plan.digest()


@pytest.mark.parametrize(
    "wrong", [{"level": 7}, {"checkpoint_budget": "all"}, {"targets": "tests.digits_training.nothing"}]
)
def test_a_wrong_value_in_a_yaml_file_stops_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    with pytest.raises(SystemExit):
        run_cli(tmp_path, monkeypatch, wrong)
