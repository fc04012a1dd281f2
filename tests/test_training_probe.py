"""The step that MemoryOptimization observes is a step of the training, and nobody can tell that it ran."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, WeightedRandomSampler, get_worker_info

from lightning_memopt.callbacks.training_probe import (
    NoTrainingBatch,
    first_training_batch,
    leaving_no_trace,
    training_example,
    training_loss,
)
from tests.digits_training import BATCH, DigitsModule, SpikingConv, digits, make_trainer, training_data
from tests.equality import assert_same_tree, frozen, rng_state, seed_everything


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """On images of 8 x 8 a second thread costs more than it gives."""
    torch.set_num_threads(1)


class AtFitStart(pl.Callback):
    """Calls a function where the callback acts: after the layers exist, before the strategy wraps them."""

    def __init__(self, act: Callable[[pl.Trainer, pl.LightningModule], Any]) -> None:
        self.act = act
        self.result: Any = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.result = self.act(trainer, pl_module)


def batches_of_training(
    tmp_path: Path, make_data: Callable[[], Any], *, probing: bool, **options: Any
) -> tuple[list[Any], Any]:
    """The batches of two epochs, with or without a batch taken before; and that batch."""
    seen: list[Any] = []

    class Collects(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(frozen(batch))

    def take(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
        with leaving_no_trace(trainer, module):
            return first_training_batch(trainer)

    seed_everything(0)
    at_start = AtFitStart(take if probing else lambda trainer, module: None)
    make_trainer(tmp_path, at_start, Collects(), **options).fit(Linear(), make_data())
    return seen, at_start.result


class Linear(DigitsModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        while not isinstance(batch, torch.Tensor):
            batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        return self.layer(batch.flatten(1)).square().mean()


class NoisyDigits(Dataset[Any]):
    """Augments with generators of its own, counts its reads, and opens its file at the first read."""

    def __init__(self) -> None:
        self.data = digits(64)
        self.streams: dict[str, Any] = {
            "numpy": np.random.default_rng(0),
            "legacy": np.random.RandomState(1),
            "python": random.Random(2),
        }
        self.torch_stream = torch.Generator().manual_seed(3)
        self.reads = 0
        self.file: Any = None

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = object()
        self.reads += 1
        image, label = self.data[index]
        noise = self.streams["numpy"].normal() + self.streams["legacy"].normal() + self.streams["python"].random()
        return image + noise + torch.rand(1, generator=self.torch_stream) + self.reads, label


class CountingStream(IterableDataset[Any]):
    """Remembers where it is in an attribute."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(64):
            self.position += 1
            yield torch.full((64,), float(self.position))


class OneShotStream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.stream = iter(torch.arange(64.0).repeat(64, 1))

    def __iter__(self) -> Iterator[Any]:
        return self.stream


class Batches:
    """Not a DataLoader; goes on where it stopped."""

    def __init__(self) -> None:
        self.start = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(5):
            self.start += 1
            yield torch.full((4, 64), float(self.start))


def augmented() -> DataLoader[Any]:
    data = NoisyDigits()
    return DataLoader(data, batch_size=BATCH, shuffle=True)


def seeded() -> DataLoader[Any]:
    return training_data(generator=torch.Generator().manual_seed(5))


def weighted() -> DataLoader[Any]:
    sampler = WeightedRandomSampler(torch.rand(96).tolist(), 64, generator=torch.Generator().manual_seed(1))
    return training_data(shuffle=False, sampler=Counting(sampler))


class Counting:
    """A sampler that differs from epoch to epoch by a counter."""

    def __init__(self, sampler: WeightedRandomSampler) -> None:
        self.sampler = sampler
        self.epochs = 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        yield from (index % (10 * self.epochs) for index in self.sampler)


SOURCES: dict[str, Callable[[], Any]] = {
    "loader": training_data,
    "loader with a generator": seeded,
    "sampler with a generator and a counter": weighted,
    "dataset with generators and a counter": augmented,
    "subset": lambda: DataLoader(Subset(NoisyDigits(), range(32)), batch_size=BATCH, shuffle=True),
    "stream with a position": lambda: DataLoader(CountingStream(), batch_size=BATCH),
    "iterable of batches": lambda: Batches(),
    "dict of loaders": lambda: {"a": training_data(), "b": training_data(48, batch_size=8)},
    "nested loaders": lambda: [training_data(), {"b": training_data(48, batch_size=8)}],
    "combined loader": lambda: CombinedLoader([training_data(), seeded()], "min_size"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_taking_a_batch_changes_no_batch_of_the_training(tmp_path: Path, name: str) -> None:
    expected, _ = batches_of_training(tmp_path, SOURCES[name], probing=False)
    actual, taken = batches_of_training(tmp_path, SOURCES[name], probing=True)
    assert_same_tree(expected, actual, name="batches")
    assert_same_shapes(expected[0], taken)


@pytest.mark.parametrize("persistent", [False, True])
def test_taking_a_batch_changes_no_batch_that_workers_make(tmp_path: Path, persistent: bool) -> None:
    def noisy() -> DataLoader[Any]:
        return DataLoader(NoisyInWorker(), batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=persistent)

    expected, _ = batches_of_training(tmp_path, noisy, probing=False)
    actual, taken = batches_of_training(tmp_path, noisy, probing=True)
    assert_same_tree(expected, actual, name="batches")
    assert_same_shapes(expected[0], taken)


class NoisyInWorker(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        assert worker is not None, "read outside a worker"
        return torch.rand(64) + index


def test_a_dataset_that_opens_its_file_when_first_read_is_closed_in_the_main_process(tmp_path: Path) -> None:
    data = NoisyDigits()
    loader = DataLoader(data, batch_size=BATCH)
    taken_in = AtFitStart(lambda trainer, module: (first_training_batch(trainer), data.file, data.reads))
    make_trainer(tmp_path, taken_in, max_epochs=0).fit(Linear(), loader)
    _, file, reads = taken_in.result
    assert file is None
    assert reads == 0
    assert loader._iterator is None


def assert_same_shapes(expected: Any, actual: Any) -> None:
    def shapes(tree: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda t: (t.shape, t.dtype) if isinstance(t, torch.Tensor) else t, tree)

    assert shapes(expected) == shapes(actual)


def test_a_hook_that_makes_the_loader_is_asked_and_its_random_draws_are_undone(tmp_path: Path) -> None:
    class OwnData(Linear):
        asked = 0

        def train_dataloader(self) -> Any:
            self.asked += 1
            order = torch.randperm(64).tolist()
            return DataLoader(digits(64), batch_size=BATCH, sampler=order)

    def train(probing: bool) -> tuple[list[Any], int]:
        seen: list[Any] = []

        class Collects(pl.Callback):
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                seen.append(frozen(batch))

        def take(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
            if probing:
                with leaving_no_trace(trainer, module):
                    first_training_batch(trainer)

        seed_everything(0)
        module = OwnData()
        make_trainer(tmp_path, AtFitStart(take), Collects()).fit(module)
        return seen, module.asked

    (expected, once), (actual, twice) = train(False), train(True)
    assert_same_tree(expected, actual, name="batches")
    assert (once, twice) == (1, 2)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda: iter([torch.zeros(4, 64)]), "is an iterator"),
        (lambda: DataLoader(OneShotStream(), batch_size=4), "holds an iterator \\(stream\\)"),
        (lambda: DataLoader(digits(3), batch_size=4, drop_last=True), "gave no batch"),
    ],
)
def test_a_batch_that_training_would_miss_is_not_taken(tmp_path: Path, data: Callable[[], Any], reason: str) -> None:
    def take(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
        with pytest.raises(NoTrainingBatch, match=reason):
            first_training_batch(trainer)
        module.example_input_array = torch.zeros(2, 1, 8, 8)
        return training_example(trainer, module)

    asked = AtFitStart(take)
    make_trainer(tmp_path, asked, max_epochs=0).fit(Linear(), data())
    assert asked.result.source.startswith("example_input_array, because")


def test_without_batch_and_example_input_the_error_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"is an iterator .*example_forward.*example_input_array"):
        make_trainer(tmp_path, AtFitStart(lambda trainer, module: training_example(trainer, module))).fit(
            Linear(), iter([torch.zeros(4, 64)])
        )


class TellTale(DigitsModule):
    """Its step logs in every way there is and changes its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        labels = batch.pop("labels")
        images = batch["images"].sub_(0.5)
        self.log("a", 1.0)
        self.log_dict({"b": 2.0})
        self.print("a step")
        self.logger.experiment.add_scalar("c", 3.0)
        self.logger.log_metrics({"d": 4.0})
        self.lr_schedulers()
        rate = self.optimizers().param_groups[0]["lr"]
        loss = nn.functional.cross_entropy(self.layer(images.flatten(1)), labels) + torch.rand(()) + random.random()
        return {"loss": loss, "rate": rate, "mean": images.mean()}


def as_dicts() -> DataLoader[Any]:
    return DataLoader([{"images": image, "labels": label} for image, label in digits(32)], batch_size=BATCH)


def test_a_step_that_logs_and_changes_its_batch_runs_twice_alike_and_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = CountingLogger()

    def run_twice(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
        before = rng_state()
        with leaving_no_trace(trainer, module):
            example = training_example(trainer, module)
            start = rng_state()
            first = example.forward(module)
            torch.set_rng_state(start["torch"])
            random.setstate(start["python"])
            second = example.forward(module)
        assert_same_tree(before, rng_state(), name="random streams")
        assert logger.calls == []
        assert trainer.logger is logger
        assert "log" not in vars(module)
        return first, second

    asked = AtFitStart(run_twice)
    trainer = make_trainer(tmp_path, asked, max_epochs=0, logger=logger)
    trainer.fit(TellTale(), as_dicts())
    first, second = asked.result
    assert first.requires_grad
    assert torch.equal(first, second)
    assert "a step" not in capsys.readouterr().out
    assert trainer.callback_metrics == {}


class CountingLogger(pl.loggers.Logger):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    @property
    def name(self) -> str:
        return "counting"

    @property
    def version(self) -> str:
        return "0"

    @property
    def experiment(self) -> CountingLogger:
        return self

    def add_scalar(self, *args: Any) -> None:
        self.calls.append("add_scalar")

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append("log_metrics")

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_the_step_sees_the_batch_as_training_gives_it(tmp_path: Path) -> None:
    class Hooks(Linear):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] + 1

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch * 2

        def training_step(self, batch: Any) -> Any:
            self.batch = batch
            self.default_dtype = torch.get_default_dtype()
            return super().training_step(batch, 0)

    def observe(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
        training_example(trainer, module).forward(module)
        return frozen(module.batch), module.default_dtype

    asked = AtFitStart(observe)
    module = Hooks()
    make_trainer(tmp_path, asked, max_epochs=1, limit_train_batches=1, precision="bf16-true").fit(
        module, training_data(shuffle=False)
    )
    batch, default_dtype = asked.result
    assert_same_tree(frozen(module.batch), batch, name="batch")
    assert batch.dtype is torch.bfloat16
    assert default_dtype is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32


def test_a_step_that_takes_the_iterator_gets_one(tmp_path: Path) -> None:
    class FetchesItself(Linear):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    asked = AtFitStart(lambda trainer, module: training_example(trainer, module).forward(module))
    make_trainer(tmp_path, asked, max_epochs=0).fit(FetchesItself(), training_data())
    assert asked.result.requires_grad


def test_the_users_forward_comes_first_and_runs_in_the_training_precision(tmp_path: Path) -> None:
    def forward(model: nn.Module) -> Any:
        return model.layer(torch.zeros(2, 64))

    def observe(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
        example = training_example(trainer, module, forward)
        return example.source, example.forward(module).dtype

    asked = AtFitStart(observe)
    make_trainer(tmp_path, asked, max_epochs=0, precision="bf16-mixed").fit(Linear(), iter([]))
    assert asked.result == ("the given example_forward", torch.bfloat16)


def test_a_compiled_step_is_observed_uncompiled(tmp_path: Path) -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def observe(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
        with leaving_no_trace(trainer, module):
            training_example(trainer, module).forward(module)
        return len(compiled)

    asked = AtFitStart(observe)
    make_trainer(tmp_path, asked, max_epochs=1, limit_train_batches=1).fit(
        torch.compile(Linear(), backend=backend), training_data()
    )
    torch.compiler.reset()
    assert asked.result == 0
    assert len(compiled) > 0


@pytest.mark.parametrize(
    ("output", "found"),
    [(None, "None, which skips"), ({"logits": 1, "a": 2}, r"keys \['a', 'logits'\]"), (3.0, "a float")],
)
def test_a_step_without_a_loss_is_refused_with_what_it_returned(output: Any, found: str) -> None:
    with pytest.raises(MisconfigurationException, match=found):
        training_loss(output)


def test_an_error_of_the_step_says_why_it_ran(tmp_path: Path) -> None:
    class NeedsMore(SpikingConv):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("momentum")

    def observe(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
        with pytest.raises(KeyError, match="momentum") as caught:
            training_example(trainer, module).forward(module)
        return "\n".join(getattr(caught.value, "__notes__", ["example_forward"]))

    asked = AtFitStart(observe)
    make_trainer(tmp_path, asked, max_epochs=0).fit(NeedsMore(), training_data())
    assert "example_forward" in asked.result
