"""
Forward hooks inside a region
=============================

A hook on a module inside a region would fire twice: in the forward and in the recomputation. A hook that only looks
(counts spikes, records activations, adds to a list) must fire once; a hook that takes part in the computation
(``weight_norm``, ``fully_shard``, one that keeps a feature for a later layer) must fire both times. Which it is shows
in the forward: an observer returns None, changes neither the tensors it was shown nor anything that the region's
modules remember, and records nothing for autograd. It is left out of the recomputation; if it drew random numbers,
those are skipped over there.

The recomputation has the hooks of the forward, whatever was added or removed since.

Whatever a hook saves for backward is kept as it is and never recomputed, so that leaving a hook out cannot disturb the
order of the recomputed tensors.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memopt.checkpointing.random_state import set_torch_random, torch_random

_Key = tuple[int, str, int]
# For each hook that only looks, call by call: the random states it left behind, None where it drew nothing.
Observers = dict[_Key, list["list[Any] | None"]]
# Where a module keeps its forward hooks and, by the same keys, what it knows of them.
_REGISTRIES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    *("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)
# The contents of the registries, by the place of the module that has any.
Hooks = dict[int, list[dict[int, Any]]]


def hooks_of(modules: Iterable[nn.Module]) -> Hooks:
    """The forward hooks and forward pre-hooks that ``modules`` have now."""
    return {
        place: [{key: _original(hook) for key, hook in getattr(module, name).items()} for name in _REGISTRIES]
        for place, module in enumerate(modules)
        if module._forward_pre_hooks or module._forward_hooks
    }


def watching_hooks(
    modules: list[nn.Module], memory: Callable[[], list[Any]], observers: Observers
) -> contextlib.AbstractContextManager[None]:
    """Run the forward with hooks watched; ``observers`` receives those that only looked.

    ``memory`` returns what the region's modules hold now, as dicts and lists of objects.
    """
    taking_part: set[_Key] = set()

    def wrap(key: _Key, hook: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            before = (_versions((args, kwargs)), _random_states(), memory())
            saved: list[None] = []
            with _outside_checkpoint(saved):
                result = hook(*args, **kwargs)
            looked = result is None and not saved and before[0] == _versions((args, kwargs))
            if looked and _same(before[2], memory()) and key not in taking_part:
                drawn = _random_states()
                observers.setdefault(key, []).append(None if drawn == before[1] else drawn)
            else:
                taking_part.add(key)
                observers.pop(key, None)
            return result

        return watched

    return _replaced(modules, wrap)


@contextlib.contextmanager
def replaying_hooks(modules: list[nn.Module], then: Hooks, observers: Observers) -> Iterator[None]:
    """Run the recomputation with the hooks of ``then``, without ``observers``."""

    def wrap(key: _Key, hook: Any) -> Any:
        if key in observers:
            return _skipping(observers[key])

        def replayed(*args: Any, **kwargs: Any) -> Any:
            with _outside_checkpoint([]):
                return hook(*args, **kwargs)

        return replayed

    now = hooks_of(modules)
    try:
        _write(modules, then, now)
        with _replaced(modules, wrap):
            yield
    finally:
        _write(modules, now, then)


def _write(modules: list[nn.Module], hooks: Hooks, instead_of: Hooks) -> None:
    for place in hooks.keys() | instead_of.keys() if hooks != instead_of else ():
        for index, name in enumerate(_REGISTRIES):
            registry = getattr(modules[place], name)
            registry.clear()
            registry.update(hooks[place][index] if place in hooks else {})


class _Wrapped:
    """Stands for a hook while a region runs, in the thread where it runs. Another one may run the same modules."""

    def __init__(self, hook: Any, instead: Callable[..., Any]) -> None:
        self.hook = hook
        self.instead = instead
        self.thread = threading.get_ident()
        self.is_over = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        here = not self.is_over and self.thread == threading.get_ident()
        return (self.instead if here else self.hook)(*args, **kwargs)


def _original(hook: Any) -> Any:
    while isinstance(hook, _Wrapped):
        hook = hook.hook
    return hook


@contextlib.contextmanager
def _replaced(modules: list[nn.Module], wrap: Callable[[_Key, Any], Any]) -> Iterator[None]:
    replaced: list[tuple[Any, int, _Wrapped]] = []
    try:
        for i, module in enumerate(modules):
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = getattr(module, name)
                for hook_id, hook in list(hooks.items()):
                    hooks[hook_id] = wrapped = _Wrapped(hook, wrap((i, name, hook_id), hook))
                    replaced.append((hooks, hook_id, wrapped))
        yield
    finally:
        for hooks, hook_id, wrapped in replaced:
            wrapped.is_over = True
            hook = hooks.get(hook_id)
            while isinstance(hook, _Wrapped) and hook.is_over:
                hooks[hook_id] = hook = hook.hook


def _skipping(calls: list[list[Any] | None]) -> Callable[..., None]:
    """Stands for an observer: does nothing, but leaves the random states behind that the observer left."""
    left_behind = iter(calls)

    def skip(*_: Any, **__: Any) -> None:
        states = next(left_behind, None)
        if states is not None:
            _set_random_states(states)

    return skip


def _outside_checkpoint(saved: list[None]) -> Any:
    """Tensors saved for backward are kept as they are; ``saved`` grows with each."""

    def pack(tensor: Tensor) -> Tensor:
        saved.append(None)
        return tensor.detach()

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _versions(values: Any) -> list[int]:
    return [v._version for v in tree_leaves(values) if isinstance(v, Tensor) and not v.is_inference()]


def _random_states() -> list[Any]:
    return [random.getstate(), *torch_random()]


def _set_random_states(states: list[Any]) -> None:
    random.setstate(states[0])
    set_torch_random(states[1:])


def _same(then: list[Any], now: list[Any]) -> bool:
    """Whether the places hold the same objects. By reference: a new tensor may lie at the address of an old one."""
    return all(_same_place(a, b) for a, b in zip(then, now, strict=True))


def _same_place(then: Any, now: Any) -> bool:
    if isinstance(then, dict):
        return then.keys() == now.keys() and all(now[key] is value for key, value in then.items())
    if isinstance(then, list):
        return len(then) == len(now) and all(a is b for a, b in zip(then, now, strict=True))
    return True
