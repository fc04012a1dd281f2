"""
A real training step before training
====================================

``MemoryOptimization`` needs one step of the training that is about to start: the user's own ``training_step`` on a real
batch, on the real device and in the real precision. The ``Trainer`` offers none at that time, so this module makes one,
and takes care that nobody can tell afterwards that it ran:

* the batch comes from the training data loaders, but not through the fit loop, whose own set-up must stay untouched
  (a data loader that resumes from a checkpoint would be set up too early). Random generators, samplers and datasets
  that remember where they were are put back, worker processes are ended;
* ``self.log`` and the loggers are silent, the global random streams are isolated;
* what the step changes in the model (metrics, neuron states, lists it appends to) is restored by the planning code,
  which runs the step.
"""

from __future__ import annotations

import contextlib
import copy
import random
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.connectors.data_connector import _check_dataloader_iterable, _request_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.parsing import _lightning_get_all_attr_holders, lightning_getattr, lightning_setattr
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_memopt.observing.no_memory import fake_like, mode_of

ExampleForward = Callable[[nn.Module], Any]
"""Runs a model once as training would and returns what is to be differentiated."""

# A dataset may hang on to a whole file of samples: look at its attributes, not into its data.
_LONGEST_CONTAINER_SEARCHED = 32
_MOST_OBJECTS_SEARCHED = 2_000
_WITHOUT_ITERATION_STATE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    torch.Tensor,
    np.ndarray,
    nn.Module,
    Trainer,
)
# Samplers and datasets need not be of torch's classes.
_DATA_ATTRIBUTES = ("dataset", "sampler", "batch_sampler", "data_source")
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

_PROBE_NOTE = (
    "Raised while MemoryOptimization observed one training step, before training. If the step works in training but "
    "not here, because it needs what exists only there, give the callback `example_forward`: a function of the model "
    "that returns the loss."
)


@dataclass(frozen=True)
class TrainingExample:
    """A training step that can be repeated, and where it came from in words."""

    forward: ExampleForward
    source: str


class NoTrainingBatch(Exception):
    """The data loaders cannot give a batch away without the training missing it."""


def training_example(
    trainer: Trainer, module: LightningModule, example_forward: ExampleForward | None = None
) -> TrainingExample:
    """Find a step to observe: the user's, else ``training_step`` on a real batch, else ``example_input_array``.

    The model must already be on the strategy's device, in the precision of the training.

    Raises:
        MisconfigurationException: if there is no batch to be had and the module has no ``example_input_array``.
    """
    if example_forward is not None:
        return TrainingExample(_in_training_precision(trainer, example_forward), "the given example_forward")
    try:
        batch = first_training_batch(trainer)
    except NoTrainingBatch as reason:
        if module.example_input_array is None:
            raise MisconfigurationException(
                f"MemoryOptimization needs one batch to observe a training step, but {reason}. Give it "
                "`example_forward`, a function of the model that runs it on a representative batch and returns the "
                "loss; or set `example_input_array` on the LightningModule."
            ) from None
        return TrainingExample(
            _in_training_precision(trainer, _forward_of_example_input(trainer)),
            f"example_input_array, because {reason}",
        )
    return TrainingExample(
        _in_training_precision(trainer, _step_on(batch, trainer, module)),
        "training_step on a batch of the training data",
    )


def _in_training_precision(trainer: Trainer, forward: ExampleForward) -> ExampleForward:
    """The forward under autocast or the default dtype of the training; the backward, as in training, is left out."""

    def forward_in_precision(model: nn.Module) -> Any:
        try:
            with trainer.precision_plugin.train_step_context():
                return forward(model)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(_PROBE_NOTE)
            raise

    return forward_in_precision


def _step_on(batch: Any, trainer: Trainer, module: LightningModule) -> ExampleForward:
    shapes_only = mode_of(module) is not None
    if shapes_only:
        batch = apply_to_collection(batch, torch.Tensor, torch.Tensor.to, "meta")

    def step(model: nn.Module) -> Any:
        module = cast(LightningModule, model)
        # A step may change its batch (pop the labels, normalise in place): each run gets its own.
        own_batch = apply_to_collection(batch, torch.Tensor, fake_like) if shapes_only else copy.deepcopy(batch)
        if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            # Steps of this kind fetch and move their batches themselves.
            return training_loss(module.training_step(iter([(own_batch, 0, 0)])))
        own_batch = _to_device(own_batch, trainer, module)
        if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
            return training_loss(module.training_step(own_batch, 0))
        return training_loss(module.training_step(own_batch))

    return step


def _forward_of_example_input(trainer: Trainer) -> ExampleForward:
    def forward(model: nn.Module) -> Any:
        module = cast(LightningModule, model)
        example = _to_device(copy.deepcopy(module.example_input_array), trainer, module)
        if isinstance(example, Mapping):
            return module(**example)
        return module(*example) if isinstance(example, tuple) else module(example)

    return forward


def _to_device(batch: Any, trainer: Trainer, module: LightningModule) -> Any:
    """Convert and move a batch with the hooks the fit loop would call."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def training_loss(output: Any) -> torch.Tensor:
    """The loss among what ``training_step`` may return: a tensor, or a mapping with the key ``loss``.

    Raises:
        MisconfigurationException: if there is none.

    Example:
        >>> training_loss({"loss": torch.tensor(1.0), "logits": torch.zeros(3)})
        tensor(1.)
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, torch.Tensor):
        return loss
    found = f"a {type(output).__name__}" if output is not None else "None, which skips the step"
    if isinstance(output, Mapping):
        found = f"a {type(output).__name__} with the keys {sorted(map(str, output))}"
    raise MisconfigurationException(
        f"MemoryOptimization ran training_step on the first batch and expected the loss, as a tensor or under the key "
        f"'loss'. It returned {found}. Give the callback `example_forward`, a function of the model that returns the "
        "loss of a step that is not skipped."
    )


# ---------------------------------------------------------------------------------------------------------------------
# One batch, and the data loaders none the wiser


def first_training_batch(trainer: Trainer) -> Any:
    """One batch of the training data, on the host, as the data loaders give it; each rank gets its own share.

    The loaders are asked for through the same source as training asks, with one worker at most, and left as they were.

    Raises:
        NoTrainingBatch: if a loader is an iterator, from which nothing can be taken back, or gives no batch.
    """
    source = trainer.fit_loop._data_source
    if not source.is_defined():
        raise NoTrainingBatch("there is no train_dataloader")
    combined = _training_loaders(trainer)
    with contextlib.ExitStack() as untouched:
        combined.flattened = [untouched.enter_context(_for_one_batch(loader, trainer)) for loader in combined.flattened]
        iterator = iter(combined)
        try:
            batch, _, _ = next(iterator)
        except StopIteration:
            raise NoTrainingBatch("the training data loader gave no batch") from None
        finally:
            # Ends the worker processes.
            combined.reset()
    return batch


def _training_loaders(trainer: Trainer) -> CombinedLoader:
    loaders = _request_dataloader(trainer.fit_loop._data_source)
    if isinstance(loaders, CombinedLoader):
        return CombinedLoader(loaders.iterables, loaders._mode)
    return CombinedLoader(loaders, "max_size_cycle")


@contextlib.contextmanager
def _for_one_batch(loader: Any, trainer: Trainer) -> Iterator[Any]:
    """A stand-in for ``loader``; what iterating it changes in samplers, datasets and generators is put back."""
    _check_dataloader_iterable(loader, trainer.fit_loop._data_source, TrainerFn.FITTING)
    with _unchanged(loader):
        if isinstance(loader, DataLoader):
            yield trainer._data_connector._prepare_dataloader(
                _stand_in(loader), shuffle=True, mode=RunningStage.TRAINING
            )
        elif iter(loader) is loader:
            raise NoTrainingBatch(
                f"the training data is an iterator ({type(loader).__name__}), and a batch taken from it would be "
                "missing in training"
            )
        else:
            yield loader


def _stand_in(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy of ``loader`` on the same data, without the workers another fit may keep alive, with one of its own.

    Without workers the loader reads in this process, as it will in training. With workers it must not: a dataset may
    open its files where it is first read.
    """
    copied = copy.copy(loader)
    # Through __dict__, because a DataLoader refuses to have these assigned.
    vars(copied)["_iterator"] = None
    if loader.num_workers > 0:
        vars(copied).update(num_workers=1, persistent_workers=False, prefetch_factor=1)
    elif isinstance(loader.dataset, IterableDataset):
        for name, value in vars(loader.dataset).items():
            if isinstance(value, Iterator):
                raise NoTrainingBatch(
                    f"the dataset {type(loader.dataset).__name__} holds an iterator ({name}), and a sample taken from "
                    "it would be missing in training"
                )
    return copied


@contextlib.contextmanager
def _unchanged(root: Any) -> Iterator[None]:
    """Afterwards the attributes of loaders, samplers and datasets, and every random generator they hold, are as before.

    Attributes are restored by reference: a counter or an opened file is undone, a list that grew in place is not.
    """
    owners, generators = _state_holders(root)
    attributes = [(owner, dict(vars(owner))) for owner in owners]
    states = [(generator, _generator_state(generator)) for generator in generators]
    try:
        yield
    finally:
        for owner, values in attributes:
            vars(owner).clear()
            vars(owner).update(values)
        for generator, state in states:
            _set_generator_state(generator, state)


def _state_holders(root: Any) -> tuple[list[Any], list[Any]]:
    """Objects below ``root`` whose attributes are to be restored, and the random generators among all attributes."""
    owners: list[Any] = []
    generators: list[Any] = []
    seen: set[int] = set()
    waiting = [(root, True)]
    while waiting and len(seen) < _MOST_OBJECTS_SEARCHED:
        thing, is_data = waiting.pop()
        if id(thing) in seen or isinstance(thing, _WITHOUT_ITERATION_STATE):
            continue
        seen.add(id(thing))
        if isinstance(thing, _GENERATORS):
            generators.append(thing)
        elif isinstance(thing, (list, tuple, dict)):
            if len(thing) <= _LONGEST_CONTAINER_SEARCHED:
                waiting.extend((inner, False) for inner in (thing.values() if isinstance(thing, dict) else thing))
        elif isinstance(getattr(thing, "__dict__", None), dict):
            if is_data or isinstance(thing, (DataLoader, Sampler, Dataset)):
                owners.append(thing)
            waiting.extend((inner, name in _DATA_ATTRIBUTES) for name, inner in vars(thing).items())
    return owners, generators


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return copy.deepcopy(generator.bit_generator.state)


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


# ---------------------------------------------------------------------------------------------------------------------
# Batches of other sizes


BATCH_SIZE = "batch_size"
"""The attribute or hyperparameter that training data loaders are made with, as Lightning's BatchSizeFinder takes it."""


@contextlib.contextmanager
def batch_size_restored_on_failure(module: LightningModule) -> Iterator[None]:
    """Put ``batch_size`` back wherever it was, should the enclosed code raise anything."""
    holders = _lightning_get_all_attr_holders(module, BATCH_SIZE)
    before = [(holder, _read_from(holder)) for holder in holders]
    try:
        yield
    except BaseException:
        for holder, value in before:
            if isinstance(holder, dict):
                holder[BATCH_SIZE] = value
            else:
                setattr(holder, BATCH_SIZE, value)
        raise


def _read_from(holder: Any) -> Any:
    return holder[BATCH_SIZE] if isinstance(holder, dict) else getattr(holder, BATCH_SIZE)


class SizedExamples:
    """``training_step`` on a batch of the training data of any size: sets ``batch_size`` and asks for the loaders anew.

    Called with a size it gives the step; it holds the batch of the last size only.

    Raises:
        MisconfigurationException: ``batch_size`` is not there, is no number of samples, or changes no batch; or the
            data loaders cannot give a batch away.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._module = module
        self._size = 0
        self._shapes: dict[int, list[tuple[int, ...]]] = {}
        self._step: ExampleForward | None = None
        if not _lightning_get_all_attr_holders(module, BATCH_SIZE):
            raise MisconfigurationException(
                "MemoryOptimization(find_batch_size=True) sets `batch_size` and asks for the training data loader "
                "anew, but neither the LightningModule, nor its hparams, nor the datamodule has `batch_size`. Keep it "
                "as an attribute or hyperparameter there, and make the loader with it: "
                "DataLoader(..., batch_size=self.batch_size)."
            )
        present = lightning_getattr(module, BATCH_SIZE)
        if isinstance(present, bool) or not isinstance(present, int) or present < 1:
            raise MisconfigurationException(
                f"MemoryOptimization(find_batch_size=True) needs `batch_size` to be a number of samples, 1 or more; "
                f"found {present!r}."
            )
        self.present = present
        """The batch size before anything was tried."""

    def __call__(self, size: int) -> ExampleForward:
        if size != self._size:
            self._step = None  # what it holds counts as memory
            self._size = 0
            set_batch_size(self._module, size)
            try:
                batch = first_training_batch(self._trainer)
            except NoTrainingBatch as reason:
                raise MisconfigurationException(
                    f"MemoryOptimization(find_batch_size=True) needs a batch of {size} samples of the training data, "
                    f"but {reason}. Find the batch size with lightning_memopt.find_batch_size, which takes a "
                    "function of the model and a batch size."
                ) from None
            self._check(size, batch)
            self._step = _in_training_precision(self._trainer, _step_on(batch, self._trainer, self._module))
            self._size = size
        return self._run

    def _run(self, model: nn.Module) -> Any:
        assert self._step is not None
        return self._step(model)

    def _check(self, size: int, batch: Any) -> None:
        self._shapes[size] = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        same = [other for other, shapes in self._shapes.items() if shapes == self._shapes[size] and other != size]
        if same and self._shapes[size]:
            raise MisconfigurationException(
                f"MemoryOptimization(find_batch_size=True) set `batch_size` to {same[0]} and to {size}, and the "
                f"training data loader gave batches of the same shapes: {self._shapes[size]}. Make the loader with "
                "it, in `train_dataloader` of the module or the datamodule: DataLoader(..., "
                "batch_size=self.batch_size). A loader that is passed to fit() cannot be changed."
            )

    def samples(self) -> int | None:
        """Samples of this rank in one epoch, of the smallest data set; None where nobody knows."""
        counts = []
        for loader in _training_loaders(self._trainer).flattened:
            if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
                prepared: Any = self._trainer._data_connector._prepare_dataloader(
                    _stand_in(loader), shuffle=True, mode=RunningStage.TRAINING
                )
                counts.append(len(prepared.sampler))
        return min(counts, default=None)


def set_batch_size(module: LightningModule, size: int) -> None:
    """Set ``batch_size`` of the module, its hparams and the datamodule, wherever it is."""
    lightning_setattr(module, BATCH_SIZE, size)


# ---------------------------------------------------------------------------------------------------------------------
# A step that leaves no trace outside the model


def optimizers_of(module: LightningModule) -> list[Optimizer]:
    """The optimizers that the training will have, made for this question alone.

    Raises:
        Exception: whatever ``configure_optimizers`` raises; the training would meet it next.
    """
    return [leaf for leaf in tree_leaves(module.configure_optimizers()) if isinstance(leaf, Optimizer)]


@contextlib.contextmanager
def leaving_no_trace(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Run steps without logging, without compiling, and without moving the global random streams.

    ``self.log`` raises before the loops run, so it does nothing here; loggers swallow what a step sends them directly.
    """
    with (
        isolate_rng(include_cuda=trainer.strategy.root_device.type == "cuda"),
        torch.compiler.set_stance("force_eager"),
        _replaced_on_instance(module, dict.fromkeys(("log", "log_dict", "print"), _do_nothing)),
        _silent_loggers(trainer),
        _stand_in_optimizer(trainer, module),
    ):
        yield


@contextlib.contextmanager
def _silent_loggers(trainer: Trainer) -> Iterator[None]:
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


@contextlib.contextmanager
def _stand_in_optimizer(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Many steps read a learning rate in order to log it; the real optimizer comes after the model is wrapped."""
    strategy = trainer.strategy
    optimizers, schedulers = strategy.optimizers, strategy.lr_scheduler_configs
    parameters = list(module.parameters())
    if parameters:
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        strategy.optimizers = [optimizer]
        strategy.lr_scheduler_configs = [LRSchedulerConfig(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))]
    try:
        yield
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = optimizers, schedulers


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


@contextlib.contextmanager
def _replaced_on_instance(instance: object, replacements: Mapping[str, Any]) -> Iterator[None]:
    before = {name: vars(instance)[name] for name in replacements if name in vars(instance)}
    vars(instance).update(replacements)
    try:
        yield
    finally:
        for name in replacements:
            vars(instance).pop(name, None)
        vars(instance).update(before)
