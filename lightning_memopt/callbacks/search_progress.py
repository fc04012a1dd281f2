"""
Progress of a search, drawn like the Trainer's own
==================================================
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class _Bar(Protocol):
    def update(self, phase: str, done: int, total: int) -> None: ...

    def close(self) -> None: ...


class SearchProgress:
    """Shows how far a search is, in the style of the Trainer's progress bar; nothing where the Trainer shows nothing.

    Call it as ``progress(phase, done, total)``. The bar appears at the first call, on rank zero, and is gone after the
    ``with`` block.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(enable_progress_bar=False, logger=False, accelerator="cpu")
        >>> with SearchProgress(trainer) as progress:
        ...     progress("trying splits", 1, 8)
    """

    def __init__(self, trainer: Trainer) -> None:
        style = trainer.progress_bar_callback
        self._bar_type: type[_RichBar] | type[_TqdmBar] | None = None
        if isinstance(style, (RichProgressBar, TQDMProgressBar)) and style.is_enabled and trainer.is_global_zero:
            self._bar_type = _RichBar if isinstance(style, RichProgressBar) else _TqdmBar
        self._bar: _Bar | None = None

    def __enter__(self) -> SearchProgress:
        return self

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._bar_type is None:
            return
        if self._bar is None:
            self._bar = self._bar_type()
        self._bar.update(phase, done, total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _RichBar:
    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("Memory optimization: {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=get_console(),
            transient=True,
        )
        self._task = self._progress.add_task("")
        self._progress.start()

    def update(self, phase: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=phase, completed=done, total=total)

    def close(self) -> None:
        self._progress.stop()


class _TqdmBar:
    def __init__(self) -> None:
        self._bar: Any = Tqdm(desc="Memory optimization", leave=False, dynamic_ncols=True, file=sys.stdout)

    def update(self, phase: str, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.n = done
        self._bar.set_description(f"Memory optimization: {phase}", refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()
