"""
Steps that leave no trace
=========================

A search runs real steps on the user's model before training has begun. Afterwards the model must be as if nothing had
happened: buffers, neuron states, metrics, gradients, flags and all random number generators. :func:`unchanged` gives
that guarantee on every way out, also on exceptions and Ctrl-C, and lets the search return to the start between steps.

Gradients are set aside, not copied: the search works with empty ``.grad``, and the tensors that were there come back as
the same objects. Weights are not copied either, since a forward has no business writing to them; the few that one does
write to (a moving average kept as a parameter) are noted before the first write, see :meth:`ModelState.protect`. One
that is given other memory (``weight.data = ...``) gets its own back.

What a first forward installs (hooks behind a flag, a layer made when its size is known) is taken away again, so that
the first forward of the training installs it, once and from the same random numbers.
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from lightning_memopt.checkpointing import restore_snapshot, take_snapshot
from lightning_memopt.checkpointing.stores import with_hidden_modules
from lightning_memopt.measuring.storage_trace import fake_mode
from lightning_memopt.ops.value_bounds import is_fake

# Where a module keeps its hooks, and the names of its parameters, buffers and children.
_REGISTRIES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))


class ModelState:
    """All that a step may change in ``model`` and around it, noted when this object is made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._snapshot = take_snapshot(model, copy=True)
        modules = with_hidden_modules(model)
        self._registries = [noted for module in modules for noted in _registries_of(module)]
        # Subclasses of parameters keep more beside their memory, which is their own business.
        plain = {id(p): p for module in modules for p in module._parameters.values() if type(p) is nn.Parameter}
        real = [p for p in plain.values() if not is_fake(p) and p.layout is torch.strided and fake_mode() is None]
        self._memory: list[tuple[Tensor, Tensor]] = [(parameter, parameter.data) for parameter in real]
        self._modes = [(module, module.training) for module in model.modules()]
        tensors = [*model.parameters(), *model.buffers()]
        self._leaves = [tensor for tensor in tensors if tensor.is_leaf]
        self._requires_grad = [(tensor, tensor.requires_grad) for tensor in self._leaves]
        self._gradients = [(tensor, tensor.grad) for tensor in self._leaves]
        # Leaves outside of the model, inputs that require a gradient: weakly, for a step may make one and drop it.
        self._outside: dict[int, tuple[weakref.ref[Tensor], Tensor | None]] = {}
        hooks = [parameter._post_accumulate_grad_hooks for parameter in model.parameters()]
        self._hooks = [(place, dict(place)) for place in hooks if place]
        self._protected: dict[int, tuple[Tensor, Tensor]] = {}
        self._random = [*random_states(tensor.device for tensor in tensors)]

    def begin(self) -> None:
        """Get ready for the first step: gradients set aside, training mode.

        Hooks that act on finished gradients (an optimizer step inside the backward) are set aside as well.
        """
        for leaf in self._leaves:
            leaf.grad = None
        for place, _ in self._hooks:
            place.clear()  # in place: autograd holds on to the dict that it was given
        self._train()

    def set_aside(self, leaves: Iterable[Tensor]) -> None:
        """Set the gradients of further leaves aside, inputs that require gradients for example."""
        known = {id(leaf) for leaf in self._leaves}
        for leaf in leaves:
            noted = self._outside.get(id(leaf))
            if id(leaf) not in known and (noted is None or noted[0]() is not leaf):
                self._outside[id(leaf)] = (weakref.ref(leaf), leaf.grad)
                leaf.grad = None

    def set_aside_bytes(self, device: torch.device) -> int:
        """Bytes on ``device`` that are alive for the search alone: gradients that were set aside, values noted."""
        gradients = [gradient for _, gradient in (*self._gradients, *self._outside.values()) if gradient is not None]
        copies = [copy for _, _, copy in self._snapshot._copies]
        held = [*gradients, *copies, *(value for _, value in self._protected.values()), torch.get_rng_state()]
        fake = fake_mode() is not None
        return sum(tensor.nbytes for tensor in held if tensor.device == device and is_fake(tensor) is fake)

    def protect(self, parameter: Tensor) -> None:
        """Note the value of a parameter that the forward is about to write to."""
        if id(parameter) not in self._protected:
            self._protected[id(parameter)] = (parameter, parameter.detach().clone())

    @property
    def written(self) -> list[Tensor]:
        """The parameters that a forward wrote to."""
        return [parameter for parameter, _ in self._protected.values()]

    def rewind(self) -> None:
        """Return to the start of the next step: state and random numbers as noted, gradients still set aside."""
        self._put_back()
        self._train()

    def restore(self) -> None:
        """Put everything back as it was noted, gradients and hooks included."""
        try:
            for place, hooks in self._hooks:
                place.update(hooks)
            self._put_back()
        finally:
            for leaf, gradient in self._gradients:
                leaf.grad = gradient
            for reference, gradient in self._outside.values():
                outside = reference()
                if outside is not None:
                    outside.grad = gradient

    def _put_back(self) -> None:
        for leaf in (*self._leaves, *self._outside_leaves()):
            leaf.grad = None
        for _, write in self._random:
            write()
        for module, mode in self._modes:
            module.training = mode
        for tensor, flag in self._requires_grad:
            if tensor.requires_grad != flag:
                tensor.requires_grad_(flag)
        for place, contents in self._registries:
            if not _holds_the_same(place, contents):
                place.clear()
                place.update(contents)
        for parameter, memory in self._memory:
            if not _is_same_memory(parameter, memory):
                parameter.data = memory
        with torch.no_grad():
            for parameter, value in self._protected.values():
                parameter.detach().copy_(value)
        restore_snapshot(self._snapshot)

    def _train(self) -> None:
        # Only where the model as a whole is not training: layers that are frozen one by one stay so.
        if not self._model.training:
            self._model.train()

    def _outside_leaves(self) -> Iterator[Tensor]:
        for reference, _ in self._outside.values():
            leaf = reference()
            if leaf is not None:
                yield leaf


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[ModelState]:
    """Whatever the enclosed code runs, ``model`` and all random number generators are as before afterwards.

    Covers buffers, neuron states, plain attributes and metrics of every submodule, its hooks, parameters and children,
    gradients (the same tensor objects), training flags, ``requires_grad``, and the generators of Python, NumPy (if
    loaded) and torch on the CPU and on the model's devices. The treatment of regions is not covered: that is the
    search's own business.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout())
        >>> before = torch.get_rng_state()
        >>> with unchanged(model):
        ...     _ = model(torch.rand(4, 2))
        >>> bool((model[0].running_mean == 0).all()), torch.equal(before, torch.get_rng_state())
        (True, True)
    """
    state = ModelState(model)
    try:
        state.begin()
        yield state
    finally:
        state.restore()


def _registries_of(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """The registries of ``module``, each with a copy of what it holds."""
    # A lazy module takes its own hooks away when its parameters get their shapes. TorchScript has wrappers here.
    if not isinstance(module, nn.modules.lazy.LazyModuleMixin):
        for name in _REGISTRIES:
            place = module.__dict__.get(name)
            if isinstance(place, (dict, set)):
                yield place, place.copy()


def _holds_the_same(place: Any, contents: Any) -> bool:
    """Whether a registry holds the same objects in the same order; they may have an idea of their own of equality."""
    if isinstance(place, dict) and [*map(id, place.values())] != [*map(id, contents.values())]:
        return False
    return [*place] == [*contents]


def _is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    same = tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
    layouts = [(each.storage_offset(), each.shape, each.stride(), each.dtype) for each in (tensor, other)]
    return same and layouts[0] == layouts[1]


def random_states(devices: Iterable[torch.device]) -> Iterator[tuple[str, Callable[[], None]]]:
    """The generators by name, each with a function that returns it to where it is now."""
    python = random.getstate()
    yield "python", lambda: random.setstate(python)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        legacy = numpy.random.get_state()
        yield "numpy", lambda: numpy.random.set_state(legacy)
    cpu = torch.get_rng_state()
    yield "cpu", lambda: torch.set_rng_state(cpu)
    used = set(devices)
    if torch.cuda.is_initialized():
        used |= {torch.device("cuda", index) for index in range(torch.cuda.device_count())}
    for device in sorted(used, key=str):
        module: Any = None if device.type in ("cpu", "meta") else getattr(torch, device.type, None)
        if module is None or not hasattr(module, "get_rng_state"):
            continue
        # MPS has one device, whose functions take no index.
        arguments = () if device.type == "mps" else (device,)
        state = module.get_rng_state(*arguments)
        yield str(device), _setter(module.set_rng_state, state, arguments)


def _setter(set_state: Callable[..., None], state: Tensor, arguments: tuple[Any, ...]) -> Callable[[], None]:
    def write() -> None:
        with no_dispatch():  # under fake tensors these are still real, and torch 2.6 makes a copy of them
            set_state(state, *arguments)

    return write
