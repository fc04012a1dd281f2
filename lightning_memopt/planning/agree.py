"""
All ranks decide alike
======================

Ranks that train together must build the same plan from what each of them saw, and none may wait in a collective for a
rank that has failed. So every piece of work whose result matters is followed by one exchange that carries both the
result and the news of a failure: whoever fails still takes part in it, and all ranks leave it together, with the same
results or with an exception each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class _Report(Generic[T]):
    """What one rank tells the others: a result or a failure."""

    result: T | None
    failure: str | None


class Ranks:
    """The ranks that share a plan; a single process is a group of one.

    Args:
        process_group: the ranks; None means all of them where ``torch.distributed`` is initialised, else this process.
        device: device of the model: NCCL exchanges through it.

    Raises:
        ValueError: this process is not in ``process_group``, or ``torch.distributed`` is not initialised.
    """

    def __init__(self, process_group: Any = None, device: torch.device | None = None) -> None:
        initialised = dist.is_available() and dist.is_initialized()
        if process_group is not None and not initialised:
            raise ValueError(
                "process_group was given but torch.distributed is not initialised; "
                "call torch.distributed.init_process_group first, or leave process_group out."
            )
        self._group = process_group
        self._failure_is_known = False
        self._device = device
        self.rank = 0
        self.size = 1
        if initialised:
            self.rank = dist.get_rank(process_group)
            self.size = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("This process is not a member of process_group; pass the group that this rank belongs to.")

    def together(self, what: str, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank and return the results of all ranks, in rank order.

        Args:
            what: names the work in the error of the other ranks, as in ``observing the model``.
            work: returns plain data that can be pickled.

        Raises:
            RuntimeError: on the ranks where ``work`` succeeded, if it failed on another one; says which and why.
            BaseException: on the ranks where ``work`` failed: its own error.
        """
        if self.size == 1:
            return [work()]
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as caught:  # also Ctrl-C: the others must not wait for this rank
            error = caught
        reports = self._gather(_Report(result, _said(error)))
        if error is not None:
            self._failure_is_known = True
            raise error
        failed = [(rank, report.failure) for rank, report in enumerate(reports) if report.failure is not None]
        if failed:
            rank, message = failed[0]
            self._failure_is_known = True
            others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            raise RuntimeError(f"Rank {rank}{others} failed while {what}: {message}. Nothing was changed on any rank.")
        return [report.result for report in reports]  # type: ignore[misc]

    def attempt(self, what: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank and return this rank's result, of any type; fails as :meth:`together` does."""
        results: list[T] = []
        self.together(what, lambda: results.append(work()))
        return results[0]

    def same(self, what: str, value: T) -> T:
        """Check that every rank holds the same ``value`` and return it.

        Raises:
            RuntimeError: on all ranks, naming two that differ.
        """
        values = self.together(what, lambda: value)
        for rank, other in enumerate(values):
            if other != values[0]:
                self._failure_is_known = True
                raise RuntimeError(
                    f"The ranks disagree while {what}: rank 0 has {values[0]!r}, rank {rank} has {other!r}. Call the "
                    "function with the same model and the same arguments on all ranks, in the same order."
                )
        return value

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others of an exception that is raised between two exchanges: they wait in the next one.

        The enclosed code must end with an exchange.
        """
        self._failure_is_known = False
        try:
            yield
        except BaseException as error:
            if self.size > 1 and not self._failure_is_known:
                self._gather(_Report(None, _said(error)))
            raise

    def _gather(self, report: _Report[T]) -> list[_Report[T]]:
        reports: list[Any] = [None] * self.size
        # Object collectives over NCCL travel through the current device, which need not be the model's.
        current: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._device is not None and self._device.type == "cuda":
            current = torch.cuda.device(self._device)
        try:
            with current:
                dist.all_gather_object(reports, report, group=self._group)
        except BaseException:
            # Nobody can be told anything any more: the exchange itself was interrupted, or a rank is gone.
            self._failure_is_known = True
            raise
        return reports


def _said(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
