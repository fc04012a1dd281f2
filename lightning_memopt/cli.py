"""
Command line
============

``python -m lightning_memopt plan --config config.yaml --budget 24GiB`` makes a plan for a training that LightningCLI
describes, without training, on any machine that can run one of its steps: the CPU will do for the budget of a GPU. The
plan is written as a file that ``MemoryOptimization(plan=...)`` applies.

``python -m lightning_memopt report --config config.yaml`` measures one step of it and writes who holds the bytes as a
page: before and after the ``MemoryOptimization`` of the configuration, or one with ``--budget``.

``python -m lightning_memopt estimate llama-2-7b`` and ``suggest`` run nothing: they know a transformer by its numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from lightning_memopt.accounting.command_line import add_commands
from lightning_memopt.planning.memory_budget import budget_bytes
from lightning_memopt.planning.plan import Plan
from lightning_memopt.planning.within_budget import MemoryBudgetError

if TYPE_CHECKING:
    from lightning_memopt.measuring import StepMemory


_FILE_WIDTH = 120


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with status 2 for wrong arguments, 1 for a budget that cannot be kept."""
    parser = _parser()
    given = parser.parse_args(arguments)
    given.run(given, given.parser)


def _plan(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from lightning_memopt.observing.no_memory import NoMemoryError
    from lightning_memopt.training_config import UnreadableConfigError

    training = _training(given, parser)
    _check_output("--output", given.output, parser)
    if given.picture is not None:
        _check_picture(given.picture, parser)
        _check_output("--picture", given.picture, parser)
    try:
        with _only_json(given):
            plan = plan_of_config(budget=given.budget, shapes_only=given.shapes_only, **training)
    except (UnreadableConfigError, NoMemoryError) as error:
        parser.error(str(error))
    except MemoryBudgetError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    if given.json:
        print(plan.to_json(), end="")
    else:
        _console().print(plan.table())
    plan.save(given.output)
    print(f"The plan is in {given.output}: MemoryOptimization(plan={str(given.output)!r})", file=sys.stderr)
    if given.picture is not None:
        from lightning_memopt.accounting import plot_plan

        plot_plan(plan, given.picture)
        print(f"The picture is in {given.picture}", file=sys.stderr)


def _report(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from lightning_memopt.accounting import comparison_table, report_json, report_summary, write_report
    from lightning_memopt.training_config import UnreadableConfigError

    training = _training(given, parser)
    _check_output("--output", given.output, parser)
    try:
        with _only_json(given):
            before, after, plan = steps_of_config(budget=given.budget, **training)
    except UnreadableConfigError as error:
        parser.error(str(error))
    except (MemoryBudgetError, NoStepError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    title = given.title or f"Memory of a training step of {given.config[0].name}"
    page = write_report(given.output, before, after, title=title, plan=plan)
    if given.json:
        print(report_json(before, after, plan=plan), end="")
    else:
        console = _console()
        console.print(comparison_table(before, after, title=title))
        for sentence in report_summary(before, after):
            console.print(sentence, markup=False)
    print(f"The report is in {page}", file=sys.stderr)


def _console() -> Console:
    """The terminal; where the output goes into a file or a pipe, lines that are wider than rich's 80 columns."""
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=_FILE_WIDTH)


def _only_json(given: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """Where JSON is asked for, what the model and the data print meanwhile goes beside it."""
    return contextlib.redirect_stdout(sys.stderr) if given.json else contextlib.nullcontext()


def _check_output(option: str, path: Path, parser: argparse.ArgumentParser) -> None:
    """Refuse, before anything runs, a file that could not be written at the end."""
    if path.is_dir():
        parser.error(f"{option} {path} is a folder; give it the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():
            with path.open("ab"):
                pass
    except OSError as error:
        parser.error(f"{option} {path} cannot be written: {error}")


def _check_picture(picture: Path, parser: argparse.ArgumentParser) -> None:
    """Refuse, before anything runs, a picture that could not be drawn at the end."""
    if find_spec("matplotlib") is None:
        parser.error("--picture draws with matplotlib, which is not installed: pip install 'lightning-memopt[plots]'")
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if picture.suffix.lower().removeprefix(".") not in known:
        said = f"the suffix {picture.suffix!r}" if picture.suffix else "no suffix"
        parser.error(f"--picture {picture} has {said}, which names no format; there are {', '.join(sorted(known))}")


def _training(given: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The training that the arguments name."""
    from lightning_memopt.training_config import class_at

    if given.budget is not None:
        given.budget = int(given.budget) if given.budget.isdecimal() else given.budget
        if isinstance(given.budget, int) and given.budget < 2**20:
            parser.error(
                f"--budget: {given.budget} is a number of bytes, less than any training step takes. Give a unit with "
                f"it: {given.budget}MiB or {given.budget}GiB."
            )
        try:
            budget_bytes(given.budget, device_bytes=None if given.accelerator == "cpu" else 1 << 60)
        except ValueError as error:
            parser.error(f"--budget: {error}")
    for path in given.config:
        if not path.is_file():
            parser.error(f"--config {path}: there is no such file")
    named = {"model": given.model, "data": given.data, "cli": given.cli}
    try:
        classes = {name: None if path is None else class_at(path) for name, path in named.items()}
    except ImportError as error:
        parser.error(str(error))
    return {"config": given.config, "accelerator": given.accelerator, **classes}


def plan_of_config(
    config: Sequence[Path],
    budget: int | str,
    *,
    model: type | None = None,
    data: type | None = None,
    cli: Any = None,
    accelerator: str = "cpu",
    shapes_only: bool = False,
) -> Plan:
    """The plan for a training that LightningCLI describes, within a budget.

    Args:
        config: configuration files as ``fit --config`` takes them: ``model``, ``data``, ``trainer``, ``optimizer``.
        budget: as ``memory_budget`` of :func:`optimize_memory`.
        model: class of the LightningModule, where the configuration does not name it by ``class_path``.
        data: class of the LightningDataModule, likewise.
        cli: subclass of LightningCLI to read the configuration with, where arguments of its own are linked or added.
        accelerator: where the step is observed and measured. The trainer's own accelerator, devices, strategy,
            callbacks and loggers are not used; its precision and gradient settings are.
        shapes_only: whether to make a model that holds no memory, and to compute nothing.

    Raises:
        MemoryBudgetError: no plan is within the budget.
        NoMemoryError: a step of a model that holds no memory (``shapes_only``) cannot run, since it reads a value.
        UnreadableConfigError: LightningCLI does not accept the configuration, or the extra ``cli`` is not installed.
    """
    from lightning_memopt.callbacks import MemoryOptimization
    from lightning_memopt.training_config import fit_quietly, read_training

    callback = MemoryOptimization(memory_budget=budget, verbose=False)
    trainer, module, datamodule = read_training(
        config, model=model, data=data, cli=cli, accelerator=accelerator, shapes_only=shapes_only
    )
    trainer.callbacks.append(callback)
    fit_quietly(trainer, module, datamodule)
    assert callback.plan is not None
    return callback.plan


class NoStepError(RuntimeError):
    """A training made no step that could be measured."""


def steps_of_config(
    config: Sequence[Path],
    budget: int | str | None = None,
    *,
    model: type | None = None,
    data: type | None = None,
    cli: Any = None,
    accelerator: str = "cpu",
) -> tuple[StepMemory, StepMemory | None, Plan | None]:
    """One measured step of a training that LightningCLI describes, plain and with its plan.

    Args:
        config: configuration files as ``fit --config`` takes them: ``model``, ``data``, ``trainer``, ``optimizer``.
        budget: as ``memory_budget`` of :func:`optimize_memory`. ``None``: the ``MemoryOptimization`` of the
            configuration, where it names one.
        model: class of the LightningModule, where the configuration does not name it by ``class_path``.
        data: class of the LightningDataModule, likewise.
        cli: subclass of LightningCLI to read the configuration with, where arguments of its own are linked or added.
        accelerator: where the steps run. The trainer's own accelerator, devices, strategy, other callbacks and loggers
            are not used; its precision and gradient settings are.

    Returns:
        The plain step, and, if there is a plan to apply, the step with it and the plan. Where the plain step does not
        fit into memory, the step with the plan is the first and the second is ``None``.

    Raises:
        MemoryBudgetError: no plan is within the budget.
        NoStepError: the training made no step.
        UnreadableConfigError: LightningCLI does not accept the configuration, or the extra ``cli`` is not installed.
    """
    from lightning_memopt.callbacks import MeasuredStep, MemoryOptimization
    from lightning_memopt.training_config import fit_quietly, read_training

    def measured(*, planned: bool) -> tuple[StepMemory, Plan | None] | None:
        kept = MemoryOptimization if planned and budget is None else None
        trainer, module, datamodule = read_training(
            config, model=model, data=data, cli=cli, accelerator=accelerator, max_epochs=-1, kept_callback=kept
        )
        if planned and budget is not None:
            trainer.callbacks.append(MemoryOptimization(memory_budget=budget))
        step = MeasuredStep()
        trainer.callbacks.append(step)
        optimizations = [callback for callback in trainer.callbacks if isinstance(callback, MemoryOptimization)]
        if planned and not optimizations:
            return None
        for callback in optimizations:
            callback.verbose = False  # the report shows the plan
        fit_quietly(trainer, module, datamodule)
        if step.memory is None:
            raise NoStepError("No step could be measured: the data has no batch, or the training ended in its first.")
        return step.memory, optimizations[0].plan if optimizations else None

    # The plain step first: a treated model whose neurons were not reset after their last step leaves something behind.
    plain, too_large = None, None
    try:
        plain = measured(planned=False)
    except torch.OutOfMemoryError as error:
        too_large = error.with_traceback(None)  # it would hold the tensors that filled the memory
    gc.collect()  # what the first training left in reference cycles is not the second one's memory
    treated = measured(planned=True)
    if treated is None:
        if plain is None:
            assert too_large is not None
            raise too_large
        return plain[0], None, None
    return (treated[0], None, treated[1]) if plain is None else (plain[0], *treated)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_memopt", description="Plan the memory of a training, and see where it goes."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        help="find the fastest plan within a budget and write it to a file",
        description=(
            "Observe one training step of a LightningCLI configuration, find the fastest plan within a budget of "
            "bytes, print it and write it to a file that MemoryOptimization(plan=...) applies."
        ),
    )
    plan.set_defaults(run=_plan, parser=plan)
    _add_training(plan)
    plan.add_argument(
        "--budget", required=True, help="bytes that a step may take: 24GiB, 800MiB, or 80%% of the device"
    )
    plan.add_argument("--output", type=Path, default=Path("memory_plan.json"), help="file for the plan (%(default)s)")
    plan.add_argument(
        "--shapes-only",
        action="store_true",
        help="for models that do not fit here: make them without memory, follow shapes and compute nothing",
    )
    plan.add_argument("--picture", metavar="FILE", type=Path, help="draw the plan, as .png, .svg or .pdf")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON instead of a table")
    report = commands.add_parser(
        "report",
        help="measure a training step and write who holds its bytes as a page",
        description=(
            "Run two training steps of a LightningCLI configuration, measure the second with every byte attributed, "
            "print who holds the bytes at the peak and write a page (HTML, without network) with the step over time "
            "and the activations of each module. If the configuration has MemoryOptimization among its callbacks, or "
            "a budget is given, it does so before and after."
        ),
    )
    report.set_defaults(run=_report, parser=report)
    _add_training(report)
    report.add_argument("--budget", help="bytes that a step may take; shows the step with the plan for it")
    report.add_argument(
        "--output", type=Path, default=Path("memory_report.html"), help="file for the page (%(default)s)"
    )
    report.add_argument("--title", help="heading of the page")
    report.add_argument("--json", action="store_true", help="print the numbers as JSON instead of a table")
    add_commands(commands)
    return parser


def _add_training(command: argparse.ArgumentParser) -> None:
    """The arguments that name a training."""
    command.add_argument(
        "--config", required=True, action="append", type=Path, help="configuration of LightningCLI; may be repeated"
    )
    command.add_argument(
        "--model", metavar="CLASS", help="import path of the LightningModule, if not in the configuration"
    )
    command.add_argument("--data", metavar="CLASS", help="import path of the datamodule, if not in the configuration")
    command.add_argument("--cli", metavar="CLASS", help="import path of a subclass of LightningCLI to read it with")
    command.add_argument("--accelerator", default="cpu", help="where to run the step: cpu (default), gpu, ...")
