"""
The training that a LightningCLI configuration describes
========================================================

Read for one step of it: on one device, without its loggers, checkpoints and validation, and of its callbacks only those
that are asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import contextvars
import importlib
import inspect
import logging
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memopt.observing.no_memory import fake_like

__all__ = ["UnreadableConfigError", "class_at", "fit_quietly", "read_training"]


class UnreadableConfigError(ValueError):
    """LightningCLI does not accept a configuration, or is not installed in full."""


def read_training(
    config: Sequence[Path],
    *,
    model: type | None = None,
    data: type | None = None,
    cli: Any = None,
    accelerator: str = "cpu",
    max_epochs: int = 0,
    kept_callback: type[Callback] | None = None,
    shapes_only: bool = False,
) -> tuple[Any, LightningModule, LightningDataModule | None]:
    """Make Trainer, model and data for one step of the training that LightningCLI describes.

    Args:
        config: configuration files as ``fit --config`` takes them: ``model``, ``data``, ``trainer``, ``optimizer``.
        model: class of the LightningModule, where the configuration does not name it by ``class_path``.
        data: class of the LightningDataModule, likewise.
        cli: subclass of LightningCLI to read the configuration with, where arguments of its own are linked or added.
        accelerator: where the step runs. The trainer's own accelerator, devices, strategy and loggers are not used; its
            precision and gradient settings are.
        max_epochs: for the Trainer; 0 sets up a training without a step, -1 goes on until it is stopped.
        kept_callback: callbacks of this class are kept from the configuration, all others are left out.
        shapes_only: make a model that holds no memory: its parameters stay on the meta device.

    Raises:
        UnreadableConfigError: LightningCLI does not accept the configuration, or the extra ``cli`` is not installed.
    """
    try:
        import jsonargparse  # noqa: F401 - LightningCLI says only later that it is missing
        from lightning.pytorch.cli import LightningCLI
    except ImportError as error:
        raise UnreadableConfigError(
            f"Reading a LightningCLI configuration needs jsonargparse ({error}). Install it with: "
            "pip install 'lightning-memopt[cli]'"
        ) from error
    settings: dict[str, Any] = {
        "accelerator": accelerator,
        "devices": 1,
        "strategy": "auto",
        "num_nodes": 1,
        "logger": False,
        "profiler": "null",
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "fast_dev_run": False,
        "min_epochs": "null",
        "min_steps": "null",
        "max_epochs": max_epochs,
        "max_steps": -1,
        "limit_val_batches": 0,
    }
    if kept_callback is None:
        settings["callbacks"] = "null"  # wherever they are written
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # It warns everybody who passes arguments from Python while the process has some of its own, as ours does.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
        read_from = [_one_step_of(path, Path(folder), number, kept_callback) for number, path in enumerate(config)]
        try:
            # In a context of its own: jsonargparse keeps its last parser in it, and that the model.
            read: Any = contextvars.copy_context().run(
                _without_memory(cli or LightningCLI) if shapes_only else cli or LightningCLI,
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
    read.trainer.loggers = [DummyLogger()]  # a model may write to its logger itself
    return read.trainer, read.model, read.datamodule


def _without_memory(cli: Any) -> Any:
    """A LightningCLI that makes models on the meta device, layers that come as late as ``configure_model`` included."""

    class ShapesOnlyCLI(cli):  # type: ignore[misc]
        def instantiate_classes(self) -> None:
            with torch.device("meta"):
                super().instantiate_classes()
            own: Any = vars(self.model)
            for name in ("setup", "configure_model"):
                if is_overridden(name, self.model, LightningModule):
                    own[name] = _on_meta_device(getattr(self.model, name))
            own["_apply"] = partial(_apply_to_shapes, self.model)

        def instantiate_trainer(self, **settings: Any) -> Trainer:
            with torch.device("cpu"):
                return super().instantiate_trainer(**settings)  # type: ignore[no-any-return]

    return ShapesOnlyCLI


def _on_meta_device(method: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.device("meta"):
            return method(*args, **kwargs)

    return run


def _apply_to_shapes(module: nn.Module, function: Any, *args: Any) -> nn.Module:
    """``Module._apply``, which converts and moves a module, for one that stays on the meta device."""
    mode = FakeTensorMode()

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return function(tensor)  # type: ignore[no-any-return]
        with mode:
            new = function(fake_like(tensor))
        return torch.empty_strided(new.shape, new.stride(), dtype=new.dtype, device="meta")

    type(module)._apply(module, apply, *args)
    return module


def fit_quietly(trainer: Trainer, model: LightningModule, data: LightningDataModule | None) -> None:
    """Run the fit; nothing is trained, so what the Trainer says of its training is no news."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        trainer.fit(model, datamodule=data)
    finally:
        logger.setLevel(level)


def class_at(path: str) -> type:
    """The class at an import path such as ``package.module.Class``.

    Raises:
        ImportError: there is none.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(f"there is no class {path!r}: {error}") from error
    if not isinstance(found, type):
        raise ImportError(f"{path!r} is no class, it is {found!r}")
    return found


def _one_step_of(path: Path, folder: Path, number: int, kept_callback: type[Callback] | None) -> Path:
    """Without callbacks, and without what only ``fit`` takes, so that what a run has saved can be read as well."""
    import yaml

    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict):
        raise UnreadableConfigError(f"--config {path}: not a configuration of LightningCLI, which is a YAML mapping.")
    content = content.get("fit", content)
    of_fit = inspect.signature(Trainer.fit).parameters.keys()
    kept = {key: value for key, value in content.items() if key not in of_fit or key == "model"}
    if isinstance(kept.get("trainer"), dict) and "callbacks" in kept["trainer"]:
        callbacks = kept["trainer"]["callbacks"] or []
        callbacks = [callbacks] if isinstance(callbacks, dict) else callbacks
        kept["trainer"]["callbacks"] = [entry for entry in callbacks if _is_of(entry, kept_callback)] or None
    target = folder / f"config{number}.yaml"
    target.write_text(yaml.safe_dump(kept))
    return target


def _is_of(entry: Any, kind: type[Callback] | None) -> bool:
    """Whether a callback of the configuration is of a class; LightningCLI takes names without their module as well."""
    path = entry.get("class_path") if isinstance(entry, dict) else entry
    if kind is None or not isinstance(path, str):
        return False
    if path == kind.__name__:
        return True
    with contextlib.suppress(ImportError):
        return issubclass(class_at(path), kind)
    return False
