"""
Runs of modules, and how long they are kept
===========================================

A *run* is one call of a function of some modules that may be made again in the backward pass. A recomputed region has
one, and so has each part of a region that is partly recomputed.

Who keeps a run
---------------
The graph that a run left behind asks for it. But a neuron's state that nobody resets keeps the graph that leads to it,
and if the graph kept the run, and with it the neuron, they would keep each other for ever: Python's garbage collector
does not see into graphs. So the treated module keeps its runs (:class:`Runs`) and a graph only knows where its run is
(:class:`RunLink`). When nobody holds the module any more, its states let go of their graphs; the graphs that are left,
since a loss holds them, take over their runs, and so every gradient can be taken that the plain model would give.

What a backward pass leaves behind
----------------------------------
No gradient runs through a graph that leads to nothing but a state. What was stored or computed again for it would stay
until the state is reset. :func:`after_backward` tells when it can go.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_memopt.checkpointing.hooks import Observers, hooks_of, replaying_hooks, watching_hooks
from lightning_memopt.checkpointing.random_state import HostRandom
from lightning_memopt.checkpointing.state import StateBefore, cut_graphs, noting_called_modules

Owner = TypeVar("Owner")


class Run:
    """One call of ``function``, a function of ``modules``.

    Args:
        function: what is called.
        modules: those whose memory it may touch.
        hooked: those whose hooks run inside of it.
        others: its arguments that are no tensors.
        stock: whether it consists of library layers alone.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: list[nn.Module],
        hooked: list[nn.Module],
        others: Iterable[Any],
        *,
        stock: bool,
    ) -> None:
        self.function = function
        self.modules = modules
        self.before = StateBefore(reads_statistics=not stock)
        self.before.note(modules)
        self.before.note_objects(others)
        self._hooked, self._hooks = hooked, hooks_of(hooked)
        self._observers: Observers = {}
        # Library layers call no others and draw torch's random numbers alone.
        self._is_closed = stock and not self._hooks
        self._host_random: HostRandom | None = None

    def first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward."""
        host_random = None if self._is_closed else HostRandom.now()
        with ExitStack() as stack:
            if not self._is_closed and not any(is_compiled(module) for module in self.modules):
                stack.enter_context(noting_called_modules(self.before))
            if self._hooks:
                stack.enter_context(watching_hooks(self._hooked, self.before.read, self._observers))
            result = self.function(*args, **kwargs)
        if host_random is not None and host_random != HostRandom.now():
            self._host_random = host_random
        return result

    def again(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: Sequence[Tensor]) -> Any:
        """The same once more, on the memory of then, which ``self.before`` makes of ``state``."""
        with ExitStack() as stack:
            if self._host_random is not None:
                stack.enter_context(self._host_random.replayed())
            stack.enter_context(self.before.recomputing(state))
            stack.enter_context(replaying_hooks(self._hooked, self._hooks, self._observers))
            return self.function(*args, **kwargs)


def is_compiled(module: nn.Module) -> bool:
    """A part compiled by itself: the compiler would take our hook into its graph, and the recomputation has none."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


# ---------------------------------------------------------------------------------------------------------------------
# Who keeps a run


class RunLink:
    """How a graph knows its run. Lives as long as the graph."""

    __slots__ = ("__weakref__", "_held", "_known", "_runs", "number")

    def __init__(self, run: Run) -> None:
        self.number = next(_NUMBERS)
        self._held: Run | None = run
        self._known = weakref.ref(run)
        self._runs: weakref.ref[Runs] | None = None
        _LINKS[self.number] = self

    def run(self) -> Run:
        """The run, which the graph or its module keeps."""
        run = self._known() if self._held is None else self._held
        assert run is not None
        return run

    def leave_to(self, runs: Runs) -> None:
        """Let the module keep the run."""
        runs.kept[self.number] = self.run()
        self._runs = weakref.ref(runs)
        self._held = None

    def take(self, run: Run) -> None:
        """Keep the run."""
        self._held = run

    def __del__(self) -> None:
        runs = None if self._runs is None else self._runs()
        if runs is not None:
            runs.kept.pop(self.number, None)


# Not beside the runs: weak references in what is garbage are dead before that is told so.
_LINKS: weakref.WeakValueDictionary[int, RunLink] = weakref.WeakValueDictionary()
_NUMBERS = count()


class Runs:
    """The runs of one module that a graph may still ask for. Belongs to the module; not copied, not pickled."""

    def __init__(self) -> None:
        self.kept: dict[int, Run] = {}
        """By the number of the link."""

    def hand_over(self) -> None:
        """Let the graphs keep their runs."""
        for number, run in list(self.kept.items()):
            link = _LINKS.get(number)
            if link is not None:
                link.take(run)
        self.kept.clear()

    def __del__(self) -> None:
        if not self.kept or sys.is_finalizing():
            return
        try:
            cut_graphs(
                {id(module): module for run in list(self.kept.values()) for module in run.before.modules}.values()
            )
        finally:
            self.hand_over()

    def __reduce__(self) -> Any:
        return (Runs, ())


# ---------------------------------------------------------------------------------------------------------------------
# What a backward pass leaves behind


def after_backward(
    owner: Owner,
    saved: Sequence[weakref.ref[Any]],
    has_run: Callable[[Owner, int], bool],
    done: Callable[[Owner], None],
    start: int = 0,
) -> None:
    """Call ``done(owner)`` as soon as a backward pass has run through a run.

    It visits nodes from the last one to the first. So when the node that saved the first tensor lets go of it, all
    others have been visited that will be: what is left leads to a state and nothing else.

    Args:
        owner: of what was saved. It is not kept alive.
        saved: what stands in the graph for the saved tensors, in their order.
        has_run: whether ``owner`` was computed again for a backward pass, given by its number.
        done: what to do then.
        start: the place in ``saved`` to begin at.
    """
    first = next((place for place in range(start, len(saved)) if saved[place]() is not None), None)
    if first is None:
        return
    known = weakref.ref(owner)

    def gone(_: object) -> None:
        owner = known()
        if owner is None:
            return
        if has_run(owner, torch._C._current_graph_task_id()):
            done(owner)
        else:  # the node went with a tensor that nobody used, and no backward pass has been there
            after_backward(owner, saved, has_run, done, first + 1)

    owner._memopt_first_saved = weakref.ref(saved[first](), gone)  # type: ignore[attr-defined]
