"""
Command line
============

``python -m lightning_memopt plan --config config.yaml --budget 24GiB`` makes a plan for a training that LightningCLI
describes, without training, on any machine that can run one of its steps: the CPU will do for the budget of a GPU. The
plan is written as a file that ``MemoryOptimization(plan=...)`` applies.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_memopt.planning.memory_budget import budget_bytes
from lightning_memopt.planning.plan import Plan
from lightning_memopt.planning.within_budget import MemoryBudgetError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with status 2 for wrong arguments, 1 for a budget that cannot be kept."""
    parser = _parser()
    given = parser.parse_args(arguments)
    budget = int(given.budget) if given.budget.isdecimal() else given.budget
    try:
        budget_bytes(budget, device_bytes=None if given.accelerator == "cpu" else 1 << 60)
    except ValueError as error:
        parser.error(f"--budget: {error}")
    for path in given.config:
        if not path.is_file():
            parser.error(f"--config {path}: there is no such file")
    try:
        plan = plan_of_config(
            given.config,
            budget,
            model=None if given.model is None else _class_at(given.model),
            data=None if given.data is None else _class_at(given.data),
            cli=None if given.cli is None else _class_at(given.cli),
            accelerator=given.accelerator,
        )
    except (ImportError, UnreadableConfigError) as error:
        parser.error(str(error))
    except MemoryBudgetError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    if given.json:
        print(plan.to_json(), end="")
    else:
        Console().print(plan.table())
    plan.save(given.output)
    print(f"The plan is in {given.output}: MemoryOptimization(plan={str(given.output)!r})", file=sys.stderr)


class UnreadableConfigError(ValueError):
    """LightningCLI does not accept a configuration."""


def plan_of_config(
    config: Sequence[Path],
    budget: int | str,
    *,
    model: type | None = None,
    data: type | None = None,
    cli: Any = None,
    accelerator: str = "cpu",
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

    Raises:
        ImportError: the extra ``cli`` is not installed.
        MemoryBudgetError: no plan is within the budget.
        UnreadableConfigError: LightningCLI does not accept the configuration.
    """
    try:
        import jsonargparse  # noqa: F401 - LightningCLI says only later that it is missing
        from lightning.pytorch.cli import LightningCLI
    except ImportError as error:
        raise ImportError(
            f"Reading a LightningCLI configuration needs jsonargparse ({error}). Install it with: "
            "pip install 'lightning-memopt[cli]'"
        ) from error
    from lightning_memopt.callbacks import MemoryOptimization

    callback = MemoryOptimization(memory_budget=budget, verbose=False)
    settings: dict[str, Any] = {
        "accelerator": accelerator,
        "devices": 1,
        "strategy": "auto",
        "num_nodes": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 0,
        "max_steps": -1,
        "callbacks": "null",
    }
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # It warns everybody who passes arguments from Python while the process has some of its own, as ours does.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
        read_from = [_without_subcommand(path, Path(folder), number) for number, path in enumerate(config)]
        try:
            read: Any = (cli or LightningCLI)(
                model,
                data,
                run=False,
                subclass_mode_model=model is None,
                subclass_mode_data=data is None,
                save_config_callback=None,
                parser_kwargs={"parser_mode": "yaml", "exit_on_error": False},
                args=[
                    *(argument for path in read_from for argument in ("--config", str(path))),
                    *(f"--trainer.{name}={value}" for name, value in settings.items()),
                ],
            )
        except argparse.ArgumentError as error:
            raise UnreadableConfigError(
                f"LightningCLI does not accept the configuration: {error}. If it names no class_path for model and "
                "data, name the classes by --model and --data; if your own LightningCLI reads it, name that by --cli."
            ) from error
    read.trainer.callbacks.append(callback)
    with _quiet():
        read.trainer.fit(read.model, datamodule=read.datamodule)
    assert callback.plan is not None
    return callback.plan


def _without_subcommand(path: Path, folder: Path, number: int) -> Path:
    """The configuration without what only ``fit`` takes, so that one that a run has saved can be read, too."""
    import yaml
    from lightning.pytorch import Trainer

    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict):
        raise UnreadableConfigError(f"--config {path}: not a configuration of LightningCLI, which is a YAML mapping.")
    content = content.get("fit", content)
    of_fit = inspect.signature(Trainer.fit).parameters.keys()
    kept = {key: value for key, value in content.items() if key not in of_fit or key == "model"}
    target = folder / f"config{number}.yaml"
    target.write_text(yaml.safe_dump(kept))
    return target


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is trained, so what the Trainer says of its training is no news."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _class_at(path: str) -> type:
    """The class at an import path such as ``package.module.Class``."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(f"there is no class {path!r}: {error}") from error
    if not isinstance(found, type):
        raise ImportError(f"{path!r} is no class, it is {found!r}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_memopt", description="Plan the memory of a training.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        help="find the fastest plan within a budget and write it to a file",
        description=(
            "Observe one training step of a LightningCLI configuration, find the fastest plan within a budget of "
            "bytes, print it and write it to a file that MemoryOptimization(plan=...) applies."
        ),
    )
    plan.add_argument(
        "--config", required=True, action="append", type=Path, help="configuration of LightningCLI; may be repeated"
    )
    plan.add_argument(
        "--model", metavar="CLASS", help="import path of the LightningModule, if not in the configuration"
    )
    plan.add_argument("--data", metavar="CLASS", help="import path of the datamodule, if not in the configuration")
    plan.add_argument("--cli", metavar="CLASS", help="import path of a subclass of LightningCLI to read it with")
    plan.add_argument(
        "--budget", required=True, help="bytes that a step may take: 24GiB, 800MiB, or 80%% of the device"
    )
    plan.add_argument("--output", type=Path, default=Path("memory_plan.json"), help="file for the plan (%(default)s)")
    plan.add_argument("--accelerator", default="cpu", help="where to run the observed step: cpu (default), gpu, ...")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON instead of a table")
    return parser
