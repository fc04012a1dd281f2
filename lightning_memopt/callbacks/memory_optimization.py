"""
Memory Optimization
^^^^^^^^^^^^^^^^^^^

Trains the same model, to the same weights, in less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from rich import get_console
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import UninitializedParameter
from typing_extensions import override

from lightning_memopt.callbacks.search_progress import SearchProgress
from lightning_memopt.callbacks.training_probe import (
    SizedExamples,
    TrainingExample,
    batch_size_restored_on_failure,
    leaving_no_trace,
    optimizers_of,
    set_batch_size,
    training_example,
)
from lightning_memopt.planning import Plan, applied_plan, optimize_memory
from lightning_memopt.planning.agree import Ranks
from lightning_memopt.planning.batch_size import LARGEST, START, treat_for_largest_batch
from lightning_memopt.planning.memory_budget import budget_bytes
from lightning_memopt.planning.request import Request

Level = Literal[0, 1, 2, 3, 4]
CheckpointBudget = Literal["speed", "balanced", "memory"]

PLAN_FILE = "memory_plan.json"
PICTURE_FILE = "memory_plan.png"


class MemoryOptimization(Callback):
    r"""Lowers the memory that activations take in training, without changing what is trained.

    When ``fit`` begins, and after all layers exist, the callback observes one training step (the module's own
    ``training_step`` on a real batch), decides which regions of the model to recompute in backward, with their binary
    inputs stored as bits where they are spikes, and treats the model in place, before the strategy wraps it. Names,
    parameters and the ``state_dict`` stay as they are: checkpoints can be exchanged with runs without the callback.

    It ends with a table of what it did, saved as ``memory_plan.json`` in the log directory. The plan is also at hand as
    :attr:`plan`.

    Args:
        targets: The module classes to consider. ``None``: the repeated blocks of the model, found automatically.
        example_forward: Runs the model as a training step would and returns what is to be differentiated. It is called
            with the LightningModule. ``None``: ``training_step`` on a batch of the training data; if there is no batch
            to spare, the module's ``example_input_array``.
        level: How far to go. 0: change nothing. 1: recompute targets, those with the largest inputs first. 2: also try
            the smaller regions of ``split_fn``. 3: also try time chunks. 4: also give back regions that are expensive
            and do not lower the peak. Levels 2 to 4 run training steps to measure; each includes those below.
        checkpoint_budget: How many of the targets to recompute at level 1: ``"speed"`` half of them, ``"balanced"``
            three quarters, ``"memory"`` all.
        compress: Store binary inputs of recomputed regions as bits.
        split_fn: For a target, at least two of its submodules to be treated in its place, or an empty tuple. Level 2.
        can_chunk: Whether a module may process its sequence in pieces. Level 3.
        process_group: The ranks that decide together. ``None``: all of them.
        plan: A saved ``memory_plan.json`` to apply as it is. Nothing is observed, so the model may be sharded, on the
            meta device, or optimized manually.
        memory_budget: Bytes that a training step may take: an int, ``"12GiB"``, or ``"80%"`` of the device. The fastest
            plan within it is found and made sure of by at most three measured steps, in place of ``level``,
            ``checkpoint_budget`` and ``split_fn``. The state of the optimizers, which appears at the first step, and
            the gradient buckets of DDP count. Of a device leave some for what no allocator sees: the context, the
            libraries, fragments.
        find_batch_size: Train with the largest batch that fits into ``memory_budget`` with the best plan for it.
            ``batch_size`` is set where it is an attribute or hyperparameter of the LightningModule or the datamodule,
            and the training data loader must be made with it. Nothing larger than the data set, or than 8192, is
            taken. What was found is :attr:`batch_size`.
        picture: Also save a picture of the plan, ``memory_plan.png``: bytes alive over the step, and what else they
            could have been traded for. Needs ``memory_budget`` or ``plan``, and the extra ``plots``.
        verbose: Print the table of the plan, what was observed for it, and where it was saved.

    Raises:
        MemoryBudgetError:
            If no plan keeps a step within ``memory_budget``; it says the smallest peak there is, and what holds it.
        MisconfigurationException:
            If an argument is not of the kind described; if the strategy is one for which a model cannot be observed
            or treated; if the module uses manual optimization or has parameters without data and neither
            ``example_forward`` nor ``plan`` makes up for it; if the Trainer has two callbacks of
            this kind (the Trainer itself refuses two of the same class).

    Example::

        from lightning.pytorch import Trainer
        from lightning_memopt import MemoryOptimization

        trainer = Trainer(callbacks=[MemoryOptimization()])
        trainer.fit(model, datamodule)

    """

    def __init__(
        self,
        targets: type[nn.Module] | list[type[nn.Module]] | None = None,
        example_forward: Callable[[nn.Module], Any] | None = None,
        *,
        level: Level = 1,
        checkpoint_budget: CheckpointBudget = "memory",
        compress: bool = True,
        split_fn: Callable[[nn.Module], Any] | None = None,
        can_chunk: Callable[[nn.Module], bool] | None = None,
        process_group: ProcessGroup | None = None,
        plan: str | Path | None = None,
        memory_budget: int | str | None = None,
        find_batch_size: bool = False,
        picture: bool = False,
        verbose: bool = True,
    ) -> None:
        _check_arguments(targets, level, checkpoint_budget)
        _check_memory_budget(memory_budget, level, checkpoint_budget, split_fn, plan)
        _check_find_batch_size(find_batch_size, memory_budget, example_forward)
        if picture:
            _check_picture(memory_budget, plan)
        for name, function in (("example_forward", example_forward), ("split_fn", split_fn), ("can_chunk", can_chunk)):
            if function is not None and not callable(function):
                raise MisconfigurationException(
                    f"MemoryOptimization expects `{name}` to be callable with a module, got {function!r}."
                )
            if function is not None and plan is not None:
                raise MisconfigurationException(
                    f"MemoryOptimization(plan=...) applies a saved plan as it is and has no use for `{name}`. "
                    "Leave one of the two out."
                )
        if targets is not None and plan is not None:
            raise MisconfigurationException(
                "MemoryOptimization(plan=...) applies a saved plan as it is and has no use for `targets`. "
                "Leave one of the two out."
            )
        self.targets = targets
        self.example_forward = example_forward
        self.level = level
        self.checkpoint_budget = checkpoint_budget
        self.compress = compress
        self.split_fn = split_fn
        self.can_chunk = can_chunk
        self.process_group = process_group
        self.memory_budget = memory_budget
        self.find_batch_size = find_batch_size
        self.picture = picture
        self.plan_path = None if plan is None else Path(plan)
        self.verbose = verbose

        self.plan: Plan | None = None
        """What was applied to the model of the last ``fit``; None before it."""
        self.batch_size: int | None = None
        """The batch size that ``find_batch_size`` found; None before it."""
        self._plan_of_checkpoint: Plan | None = None
        self._fitting = False
        self._postponed: tuple[Strategy, Callable[[Trainer], None] | None] | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._fitting = stage == "fit"
        if not self._fitting or trainer.limit_train_batches == 0 or self._changes_nothing():
            return
        self._plan_of_checkpoint = None
        _refuse_trainer(trainer, self)
        _refuse_strategy(trainer.strategy, has_plan=self.plan_path is not None)
        self._refuse_manual_optimization(pl_module)
        finder = any(isinstance(other, BatchSizeFinder) for other in _callbacks(trainer))
        if finder and self.find_batch_size:
            raise MisconfigurationException(
                "MemoryOptimization(find_batch_size=True) and BatchSizeFinder would both set the batch size. Leave one "
                "of the two out."
            )
        if self.plan_path is None and finder:
            rank_zero_warn(
                "BatchSizeFinder changes the batch size after MemoryOptimization has planned for the current one. The "
                "training stays correct, but the plan may not be the best for the batch size that is found. Find the "
                "batch size first (its search profits from the plan), then train with it in a new run."
            )
        self._postpone_until_strategy_setup(trainer, pl_module)

    def _changes_nothing(self) -> bool:
        return self.level == 0 and self.plan_path is None and self.memory_budget is None

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._fitting = False
        self._restore_strategy()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._fitting = False
        self._restore_strategy()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.plan is None else {"plan": self.plan.to_json()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._fitting:
            return
        try:
            self._plan_of_checkpoint = Plan.from_json(state_dict["plan"])
        except (KeyError, TypeError, ValueError) as error:
            rank_zero_warn(
                f"The memory plan in the checkpoint cannot be read ({error}), so it is not compared with the plan of "
                "this run. Weights and optimizer states are not affected."
            )
        # Strategies that shard restore the checkpoint after the plan was applied, the others before.
        if self.plan is not None and self._postponed is None:
            self._compare_with_checkpoint()

    # -----------------------------------------------------------------------------------------------------------------
    # Between the last layer and the first wrapper

    def _postpone_until_strategy_setup(self, trainer: Trainer, module: LightningModule) -> None:
        """Act when all layers exist and none is wrapped.

        Layers may be made as late as ``LightningModule.configure_model``, and no hook of a callback lies between it
        and ``Strategy.setup``, which converts, moves and wraps the model. So ``setup`` of this one strategy object acts
        first, once, and is itself again before it is called.
        """
        strategy = trainer.strategy
        self._restore_strategy()
        self._postponed = (strategy, vars(strategy).get("setup"))

        def setup(trainer: Trainer) -> None:
            self._restore_strategy()
            self._optimize(trainer, module)
            strategy.setup(trainer)

        vars(strategy)["setup"] = setup

    def _restore_strategy(self) -> None:
        if self._postponed is None:
            return
        strategy, replaced = self._postponed
        self._postponed = None
        if replaced is None:
            vars(strategy).pop("setup", None)
        else:
            vars(strategy)["setup"] = replaced

    def _optimize(self, trainer: Trainer, module: LightningModule) -> None:
        plan = applied_plan(module)
        if plan is not None and plan is self.plan:
            return
        # Layers may have come, and the kind of optimization been set, as late as in configure_model.
        self._refuse_manual_optimization(module)
        _warn_of_other_checkpointing(module)
        if self.find_batch_size:
            self._search_batch_size(trainer, module)
        elif self.plan_path is None:
            self._search(trainer, module)
        else:
            optimize_memory(module, plan=self.plan_path, process_group=self.process_group)
        self.plan = applied_plan(module)
        if self.plan is not None:
            self._report(trainer, self.plan)
            self._compare_with_checkpoint()

    def _search(self, trainer: Trainer, module: LightningModule) -> None:
        example: TrainingExample | None = None

        def prepare() -> None:
            nonlocal example
            _convert_and_move(trainer, module)
            example = training_example(trainer, module, self.example_forward)

        ranks = Ranks(self.process_group, trainer.strategy.root_device)
        with leaving_no_trace(trainer, module), SearchProgress(trainer) as progress:
            ranks.together("preparing a training step to observe", prepare)
            assert example is not None
            if self.verbose:
                rank_zero_info(f"MemoryOptimization observes {example.source}.")
            within_budget = {}
            if self.memory_budget is not None:
                within_budget = ranks.attempt("making the optimizers", lambda: self._within_budget(trainer, module))
            optimize_memory(
                module,
                self.targets,
                example.forward,
                level=self.level,
                checkpoint_budget=self.checkpoint_budget,
                compress=self.compress,
                split_fn=self.split_fn,
                can_chunk=self.can_chunk,
                process_group=self.process_group,
                progress=progress,
                gradients_in_forward=_clears_late(trainer),
                **within_budget,
            )

    def _search_batch_size(self, trainer: Trainer, module: LightningModule) -> None:
        examples: SizedExamples | None = None
        samples: int | None = None

        def prepare() -> None:
            nonlocal examples, samples
            _convert_and_move(trainer, module)
            examples = SizedExamples(trainer, module)
            samples = examples.samples()

        ranks = Ranks(self.process_group, trainer.strategy.root_device)
        with (
            leaving_no_trace(trainer, module),
            SearchProgress(trainer) as progress,
            batch_size_restored_on_failure(module),
        ):
            ranks.together("preparing training steps to observe", prepare)
            assert examples is not None
            request = Request(
                targets=self.targets,
                compress=self.compress,
                can_chunk=self.can_chunk,
                progress=progress,
                gradients_in_forward=_clears_late(trainer),
                **ranks.attempt("making the optimizers", lambda: self._within_budget(trainer, module)),
            )
            largest = LARGEST if samples is None else max(1, min(LARGEST, samples))
            size = treat_for_largest_batch(module, request, examples, self.process_group, start=START, largest=largest)
        set_batch_size(module, size)
        self.batch_size = size
        if self.verbose:
            limit = " (all the data there is)" if size == samples else " (no larger one is tried)" * (size == LARGEST)
            rank_zero_info(f"MemoryOptimization set batch_size to {size}{limit}; it was {examples.present}.")

    def _within_budget(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        """What counts against the budget beside the step of the model itself."""
        gradients = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        strategy = trainer.strategy
        # Buckets stay from step to step, also those that gradients are views of.
        buckets = gradients if isinstance(strategy, DDPStrategy) else 0
        # From the second of the accumulated batches on, gradients are alive from the forward to the backward pass.
        accumulated = gradients if trainer.accumulate_grad_batches > 1 else 0
        return {
            "memory_budget": self.memory_budget,
            "optimizer": optimizers_of(module),
            "reserved_bytes": buckets + accumulated,
        }

    def _report(self, trainer: Trainer, plan: Plan) -> None:
        directory = trainer.log_dir  # asks all ranks
        if not trainer.is_global_zero:
            return
        if self.verbose:
            get_console().print(plan.table())
        if directory is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if not trainer.loggers and Path(directory).resolve() == Path.cwd():
            # Nobody chose this place, and a plan may lie there that someone means to keep.
            return
        path = Path(directory) / PLAN_FILE
        try:
            plan.save(path)
            if self.verbose:
                rank_zero_info(f"MemoryOptimization saved its plan to {path}")
        except OSError as error:
            # Not worth a training run; and the other ranks are already on their way.
            rank_zero_warn(f"MemoryOptimization could not save its plan to {path}: {error}")
        if self.picture:
            self._draw(plan, Path(directory) / PICTURE_FILE)

    def _draw(self, plan: Plan, path: Path) -> None:
        from lightning_memopt.accounting import plot_plan

        try:
            plot_plan(plan, path)
        except (OSError, ValueError) as error:  # a plan from a file may hold nothing to draw
            rank_zero_warn(f"MemoryOptimization could not draw its plan to {path}: {error}")

    def _compare_with_checkpoint(self) -> None:
        if self._plan_of_checkpoint is None or self.plan is None:
            return
        differences = list(_differences(self._plan_of_checkpoint, self.plan))
        if differences:
            rank_zero_warn(
                "This run treats the model's memory differently from the run that wrote the checkpoint: "
                f"{'; '.join(differences)}. Results do not depend on it, memory and speed do."
            )

    def _refuse_manual_optimization(self, module: LightningModule) -> None:
        if module.automatic_optimization or self.example_forward is not None or self.plan_path is not None:
            return
        raise MisconfigurationException(
            "MemoryOptimization observes `training_step` before there are optimizers, and with manual optimization "
            f"(`{type(module).__name__}.automatic_optimization = False`) that step cannot run without them. Give the "
            "callback `example_forward`, a function of the LightningModule that computes and returns the loss; or "
            "`plan`, a saved memory_plan.json."
        )


# ---------------------------------------------------------------------------------------------------------------------
# What is refused, and what is worth a warning


def _check_arguments(targets: object, level: object, checkpoint_budget: object) -> None:
    if isinstance(level, bool) or level not in get_args(Level):
        raise MisconfigurationException(f"MemoryOptimization expects `level` to be 0, 1, 2, 3 or 4, got {level!r}.")
    if checkpoint_budget not in get_args(CheckpointBudget):
        raise MisconfigurationException(
            f"MemoryOptimization expects `checkpoint_budget` to be one of {list(get_args(CheckpointBudget))}, got "
            f"{checkpoint_budget!r}."
        )
    classes = targets if isinstance(targets, (list, tuple)) else [] if targets is None else [targets]
    wrong = [cls for cls in classes if not (isinstance(cls, type) and issubclass(cls, nn.Module))]
    if wrong or (targets is not None and not classes):
        raise MisconfigurationException(
            f"MemoryOptimization expects `targets` to be a class of modules, a list of such classes, or None to find "
            f"the model's blocks by itself; got {targets!r}."
        )


def _check_memory_budget(
    memory_budget: Any, level: object, checkpoint_budget: object, split_fn: object, plan: object
) -> None:
    if memory_budget is None:
        return
    try:
        budget_bytes(memory_budget, device_bytes=1 << 60)  # which device it will be is not known yet
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(f"MemoryOptimization: {error}") from error
    settings = {"level": level != 1, "checkpoint_budget": checkpoint_budget != "memory"}
    settings |= {"split_fn": split_fn is not None, "plan": plan is not None}
    for name, given in settings.items():
        if given:
            raise MisconfigurationException(
                f"MemoryOptimization(memory_budget=...) finds the plan by itself and has no use for `{name}`. Leave "
                "one of the two out."
            )


def _check_find_batch_size(find_batch_size: object, memory_budget: object, example_forward: object) -> None:
    if not isinstance(find_batch_size, bool):
        raise MisconfigurationException(
            f"MemoryOptimization expects `find_batch_size` to be True or False, got {find_batch_size!r}."
        )
    if find_batch_size and memory_budget is None:
        raise MisconfigurationException(
            "MemoryOptimization(find_batch_size=True) finds the largest batch within `memory_budget`, which was not "
            "given. Give it, such as memory_budget='12GiB' or '80%' of the device."
        )
    if find_batch_size and example_forward is not None:
        raise MisconfigurationException(
            "MemoryOptimization(find_batch_size=True) runs training_step on batches of the training data and has no "
            "use for `example_forward`, whose batch size it cannot change. Leave it out, or find the batch size first: "
            "lightning_memopt.find_batch_size takes a function of the model and a batch size."
        )


def _check_picture(memory_budget: object, plan: object) -> None:
    if memory_budget is None and plan is None:
        raise MisconfigurationException(
            "MemoryOptimization(picture=True) draws the plan for a `memory_budget`, which was not given. Give it, or "
            "leave `picture` out."
        )
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "MemoryOptimization(picture=True) draws with matplotlib, which is not installed: "
            "pip install 'lightning-memopt[plots]'"
        )


def _convert_and_move(trainer: Trainer, module: LightningModule) -> None:
    _refuse_parameters_without_data(module, on_meta=False)
    # Strategy.setup does the same next, so these are not undone.
    trainer.precision_plugin.convert_module(module)
    try:
        module.to(trainer.strategy.root_device)
    except NotImplementedError:
        _refuse_parameters_without_data(module, on_meta=True)
        raise


def _callbacks(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined,no-any-return]


def _refuse_trainer(trainer: Trainer, callback: MemoryOptimization) -> None:
    if not isinstance(trainer, Trainer):
        raise MisconfigurationException(
            f"MemoryOptimization works with `lightning.pytorch`, but this Trainer comes from "
            f"`{type(trainer).__module__}`. Import Trainer and LightningModule from `lightning.pytorch`."
        )
    if sum(isinstance(other, MemoryOptimization) for other in _callbacks(trainer)) > 1:
        raise MisconfigurationException(
            "A model has one memory plan, but the Trainer has more than one MemoryOptimization callback. Keep one; it "
            "takes several classes as `targets`."
        )
    if callback.plan_path is not None and not callback.plan_path.is_file():
        raise MisconfigurationException(
            f"MemoryOptimization(plan={str(callback.plan_path)!r}): there is no such file. A plan is saved as "
            f"{PLAN_FILE} in the log directory of a run without `plan`."
        )


def _refuse_strategy(strategy: Strategy, *, has_plan: bool) -> None:
    name = type(strategy).__name__
    if isinstance(strategy, DeepSpeedStrategy):
        raise MisconfigurationException(
            "MemoryOptimization does not work with DeepSpeed, which runs backward through an engine of its own and has "
            "its own activation checkpointing (`deepspeed.checkpointing`). Use that, or another strategy."
        )
    if strategy.root_device.type == "xla":
        raise MisconfigurationException(
            f"MemoryOptimization does not work with {name}: the XLA compiler merges a recomputation with the original "
            "and saves nothing. Use `torch_xla.utils.checkpoint`."
        )
    if isinstance(strategy, FSDPStrategy) and strategy._activation_checkpointing_kwargs:
        raise MisconfigurationException(
            "MemoryOptimization and `FSDPStrategy(activation_checkpointing_policy=...)` would both recompute the same "
            "layers. Leave one of the two out."
        )
    if has_plan:
        return
    if isinstance(strategy, (FSDPStrategy, ModelParallelStrategy)):
        raise MisconfigurationException(
            f"MemoryOptimization cannot observe a training step of a model that {name} shards: the step would have to "
            "run before the model is sharded, when it need not fit on a device. Make the plan where it does (one "
            "device or `strategy='ddp'`, on a smaller batch if need be) and pass its file here: "
            f"MemoryOptimization(plan='.../{PLAN_FILE}')."
        )
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise MisconfigurationException(
            f"MemoryOptimization can observe a training step on a single device and under DDP, but not under {name}. "
            f"Make the plan there and pass its file here: MemoryOptimization(plan='.../{PLAN_FILE}')."
        )


def _refuse_parameters_without_data(module: LightningModule, *, on_meta: bool) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter) or (on_meta and parameter.is_meta):
            kind = "on the meta device" if parameter.is_meta else "not initialized yet"
            raise MisconfigurationException(
                f"MemoryOptimization observes a training step, but the parameter {name} is {kind}. Initialize the "
                "parameters in `configure_model` at the latest, or pass a plan saved from a run in which they are: "
                f"MemoryOptimization(plan='.../{PLAN_FILE}')."
            )


def _warn_of_other_checkpointing(module: LightningModule) -> None:
    names = list(_other_checkpointing(module))
    if names:
        rank_zero_warn(
            f"The model already recomputes activations by itself ({', '.join(names[:5])}{', ...' * (len(names) > 5)}). "
            "A region around or inside these is computed once more than needed. Switch one of the two off."
        )


def _other_checkpointing(module: LightningModule) -> Iterator[str]:
    """Modules that torch's wrapper, Transformers or timm have set to recompute their activations."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    switches = ("gradient_checkpointing", "grad_checkpointing")
    for name, submodule in module.named_modules():
        if isinstance(submodule, CheckpointWrapper):
            yield name or type(submodule).__name__
        for switch in switches:
            if getattr(submodule, switch, False) is True:
                yield f"{name}.{switch}" if name else switch


def _clears_late(trainer: Trainer) -> bool:
    """Whether ``zero_grad`` comes after the forward pass: Lightning's order, but for accumulated gradients."""
    return trainer.accumulate_grad_batches == 1


def _differences(then: Plan, now: Plan) -> Iterator[str]:
    """In words, how ``now`` treats a model differently from ``then``."""
    if then.digest() == now.digest():
        return
    for option in ("level", "checkpoint_budget", "compress"):
        if getattr(then, option) != getattr(now, option):
            yield f"{option} was {getattr(then, option)!r}, is {getattr(now, option)!r}"
    earlier, later = ({region.path: region for region in plan.regions} for plan in (then, now))
    for path in [*earlier, *(path for path in later if path not in earlier)]:
        was, is_ = (regions[path].treatment if path in regions else "not treated" for regions in (earlier, later))
        if was != is_:
            yield f"{path} was {was}, is {is_}"
            continue
        new = later[path].changes()
        for detail, old in earlier[path].changes().items():
            if old != new[detail]:
                yield f"{path} had {detail}={old!r}, has {new[detail]!r}"
