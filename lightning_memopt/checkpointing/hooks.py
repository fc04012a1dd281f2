"""
Forward hooks inside a region
=============================

A hook on a module inside a region would fire twice: in the forward and in the recomputation. A hook that only looks
(counts spikes, records activations, adds to a list) must fire once; a hook that takes part in the computation
(``weight_norm``, ``fully_shard``) must fire both times. Which it is shows in the forward: an observer returns None,
changes neither the tensors it was shown nor its module, and is left out of the recomputation.

Whatever a hook saves for backward is kept as it is and never recomputed, so that leaving a hook out cannot disturb the
order of the recomputed tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_Key = tuple[int, str, int]


def _skip(*_: Any, **__: Any) -> None:
    return None


def _hooked(modules: Iterable[nn.Module]) -> list[tuple[int, str, Any]]:
    return [
        (i, name, hooks)
        for i, module in enumerate(modules)
        for name in ("_forward_pre_hooks", "_forward_hooks")
        if (hooks := getattr(module, name))
    ]


def _shown(values: Any) -> list[tuple[int, int]]:
    return [(id(v), v._version) for v in tree_leaves(values) if isinstance(v, Tensor) and not v.is_inference()]


def _own(module: nn.Module) -> list[tuple[str, int]]:
    places = (module.__dict__, module._buffers, module._parameters)
    return [(key, id(value)) for place in places for key, value in place.items()]


@contextlib.contextmanager
def _replaced(modules: list[nn.Module], wrap: Callable[[_Key, Any], Any]) -> Iterator[None]:
    replaced: list[tuple[Any, int, Any, Any]] = []
    try:
        for i, name, hooks in _hooked(modules):
            for hook_id, hook in list(hooks.items()):
                wrapped = wrap((i, name, hook_id), hook)
                hooks[hook_id] = wrapped
                replaced.append((hooks, hook_id, hook, wrapped))
        yield
    finally:
        for hooks, hook_id, hook, wrapped in replaced:
            if hooks.get(hook_id) is wrapped:
                hooks[hook_id] = hook


def _outside_checkpoint() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


def watching_hooks(modules: list[nn.Module], observers: set[_Key]) -> contextlib.AbstractContextManager[None]:
    """Run the forward with hooks watched; ``observers`` receives those that only looked."""

    def wrap(key: _Key, hook: Any) -> Any:
        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            shown, own = _shown((args, kwargs)), _own(module)
            with _outside_checkpoint():
                result = hook(module, *args, **kwargs)
            # A forward hook may leave a note on its module: the note is part of the module's state and kept by that.
            same_module = key[1] == "_forward_hooks" or own == _own(module)
            if result is None and same_module and shown == _shown((args, kwargs)):
                observers.add(key)
            else:
                observers.discard(key)
            return result

        return watched

    return _replaced(modules, wrap)


def replaying_hooks(modules: list[nn.Module], observers: set[_Key]) -> contextlib.AbstractContextManager[None]:
    """Run the recomputation without ``observers``."""

    def wrap(key: _Key, hook: Any) -> Any:
        if key in observers:
            return _skip

        def replayed(*args: Any, **kwargs: Any) -> Any:
            with _outside_checkpoint():
                return hook(*args, **kwargs)

        return replayed

    return _replaced(modules, wrap)


def any_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether any of ``modules`` has a forward hook or forward pre-hook."""
    return any(module._forward_pre_hooks or module._forward_hooks for module in modules)
