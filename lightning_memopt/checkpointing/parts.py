"""
Cheap parts: what the treatment ``recompute_cheap`` computes again
==================================================================

The outputs of products (linear layers, convolutions, attention, recurrent layers) are dear; norms, activations,
dropout, pooling and spiking neurons are not. A *part* is a largest module inside a region that performs no product. It
runs as a small region of its own: what autograd would save inside it is not stored, its arguments are. And a tensor
saved later that is the output of a part is stored as a recipe, a reference to the part's call. In the backward pass the
call runs once more; the result serves the products that saved its output and the part's own gradients.

Recipes chain: the stored argument of a neuron is the output of a norm, thus a recipe again, and the norm's argument is
the kept output of a convolution.

Which modules are parts
-----------------------
torch's own layers are known by class. Any other module is watched in its first call, for operations that the FLOP
counter of torch counts and for those of :data:`_PRODUCTS` that it does not count.

A part whose argument would have to be stored for it alone, because plain autograd does not save that argument, runs
plainly if it saves less: dropout after a projection saves a mask, which is smaller than its input. What a part saves is
learned in its first call. That call must not cost more memory afterwards than later ones, so its saved tensors are held
until it ends, and then stored or dropped; those of library modules are dropped as soon as they outweigh the argument.

All these decisions are taken within the first call of a region, and do not change. A region that is itself recomputed
by another one therefore saves alike both times.

A state that a part leaves behind (a neuron's potential) has a graph that knows the part's call as long as nobody resets
it. So what the call stored goes with the backward pass that ran through it, as plain autograd's saved tensors do, and
the call does not keep its module alive (see ``runs.py``).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.flop_counter import flop_registry

from lightning_memopt.checkpointing.arguments import as_result
from lightning_memopt.checkpointing.runs import Run, RunLink, Runs, after_backward, is_compiled
from lightning_memopt.checkpointing.saved_tensors import (
    Form,
    Recipe,
    SavedTensors,
    Site,
    know_output,
    leaves_of,
    saved_in_call,
    stored_bytes,
)
from lightning_memopt.checkpointing.state import is_of_torch, is_stock
from lightning_memopt.checkpointing.stores import REGION_ATTRIBUTE
from lightning_memopt.ops.value_bounds import is_fake

_PRODUCT_LAYERS = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)
# Words of operation names. torch's FLOP counter does not count these, or not on every device.
_PRODUCTS = frozenset(
    (
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr", "gemm", "linear", "matmul"),
        *("einsum", "trilinear", "cdist", "fft", "convolution", "conv", "conv1d", "conv2d", "conv3d"),
        *("attention", "flash", "efficient", "rnn", "lstm", "gru"),
    )
)
_NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_SAVES_NOTHING = (nn.Identity, nn.Flatten, nn.Unflatten)
_RANDOM_LAYERS = (_DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


@dataclass
class PartFacts:
    """What a part learned about itself in its first call."""

    cheap: bool | None = None
    """Whether it performs no product; None before that is known."""
    pays: dict[int, bool] = field(default_factory=dict)
    """For tensors among its arguments: whether autograd saves it for the part's own gradients, or more than it."""
    writes: bool = False
    """Whether it changes its argument in place."""


@dataclass
class Part:
    """A module without products inside a region."""

    module: nn.Module
    facts: PartFacts
    stock: bool
    """Whether it consists of library layers alone."""
    may_draw: bool
    """Whether it may draw random numbers."""
    inner: list[nn.Module]
    """Its modules, itself included."""


@dataclass
class RegionParts:
    """The parts of one region."""

    modules: list[nn.Module]
    parts: list[Part]

    def holds(self, modules: list[nn.Module]) -> bool:
        """Whether the region still consists of the same modules."""
        return len(modules) == len(self.modules) and all(a is b for a, b in zip(modules, self.modules, strict=True))


def find_parts(root: nn.Module, modules: list[nn.Module]) -> RegionParts:
    """The largest modules of ``root`` that perform no product, as far as their classes tell."""
    found: dict[int, nn.Module] = {}
    _find(root, found, is_root=True)
    parts = []
    for module in found.values():
        inner = list(module.modules())
        known = all(is_of_torch(m) for m in inner)
        in_place = any(getattr(m, "inplace", False) is True for m in inner)
        facts = PartFacts(cheap=True if known else None, writes=in_place)
        draws = not known or any(isinstance(m, _RANDOM_LAYERS) for m in inner)
        parts.append(Part(module, facts, is_stock(module, inner), draws, inner))
    return RegionParts(modules, parts)


def _find(module: nn.Module, found: dict[int, nn.Module], *, is_root: bool = False) -> None:
    if not is_root and REGION_ATTRIBUTE in module.__dict__:
        return  # has a treatment of its own
    if isinstance(module, (*_PRODUCT_LAYERS, torch.jit.ScriptModule)) or is_compiled(module):
        return
    inner = list(module.modules())
    mixed = isinstance(module, _NOT_CALLED) or any(
        isinstance(m, (*_PRODUCT_LAYERS, torch.jit.ScriptModule))
        or is_compiled(m)
        or (m is not module and REGION_ATTRIBUTE in m.__dict__)
        for m in inner
    )
    if mixed:
        for child in module.children():
            _find(child, found)
    elif not isinstance(module, _SAVES_NOTHING) and (is_root or "forward" not in module.__dict__):
        found[id(module)] = module


class _WatchProducts(TorchDispatchMode):
    """Notices operations that count FLOPs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or _is_product(func)
        return func(*args, **(kwargs or {}))


def _is_product(operation: Any) -> bool:
    packet = getattr(operation, "_overloadpacket", operation)
    name = str(packet).rpartition(".")[2]
    return packet in flop_registry or not _PRODUCTS.isdisjoint(name.strip("_").split("_"))


# ---------------------------------------------------------------------------------------------------------------------
# One call of a region


@contextmanager
def treated_parts(saved: SavedTensors, parts: list[Part], runs: Runs) -> Iterator[None]:
    """While this context lasts, calls of the ``parts`` run as small regions that store what they must in ``saved``."""
    inside = _Inside(runs)
    patched: list[tuple[dict[str, Any], Any]] = []
    try:
        for part in parts:
            attributes = part.module.__dict__
            if part.facts.cheap is not False and "forward" not in attributes and REGION_ATTRIBUTE not in attributes:
                # On the object: the class, hooks and everything else stay as they are.
                forward: Any = partial(_run_part, saved, part, inside)
                forward.__wrapped__ = part.module.forward  # for those who ask for its signature
                attributes["forward"] = forward
                patched.append((attributes, forward))
        yield
    finally:
        for attributes, forward in patched:
            if attributes.get("forward") is forward:
                del attributes["forward"]


@dataclass
class _Inside:
    """A call of a region: who keeps its runs, and whether a part is running (parts are not nested)."""

    runs: Runs
    running: bool = False


def _run_part(saved: SavedTensors, part: Part, inside: _Inside, *args: Any, **kwargs: Any) -> Any:
    return run_part(saved, part, inside, type(part.module).forward.__get__(part.module), args, kwargs)


def run_part(
    saved: SavedTensors,
    part: Part,
    inside: _Inside,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run ``function``, the forward of ``part``, as a small region where that stores less."""
    facts = part.facts
    if inside.running or facts.cheap is False or not torch.is_grad_enabled() or saved.thread != threading.get_ident():
        return function(*args, **kwargs)
    leaves, spec = _flat(args, kwargs)
    dear = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.is_inference() or (facts.writes and not saved.has_recipe(leaf)):
            return function(*args, **kwargs)
        if not _is_free(saved, leaf):
            if facts.pays.get(index) is False:
                return function(*args, **kwargs)
            dear.append(index)
    call = PartCall(part, leaves, spec, dear)
    inside.running = True
    try:
        return call.forward(saved, part, function, args, kwargs, inside.runs)
    finally:
        inside.running = False
        call.decided()


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec | None]:
    """The leaves of the arguments and how to put them together again; None stands for a single tensor."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return list(args), None
    return tree_flatten((args, kwargs))


def _is_free(saved: SavedTensors, tensor: Tensor) -> bool:
    """Whether storing ``tensor`` costs nothing, since it is stored already, alive anyway, or can be computed again."""
    known = type(tensor) in (Tensor, nn.Parameter) or is_fake(tensor)
    if tensor.layout is not torch.strided or not known:
        return False
    if isinstance(tensor, nn.Parameter) or tensor.numel() <= 1:
        return True
    return saved.is_standing(tensor) or saved.has_recipe(tensor) or saved.holds(tensor)


# ---------------------------------------------------------------------------------------------------------------------
# One call of a part


@dataclass(frozen=True)
class _Argument:
    """Stands for a tensor argument."""

    form: Form
    requires_grad: bool
    changed: bool

    def value(self) -> Tensor:
        tensor = self.form.value()
        if tensor.is_leaf and tensor.requires_grad == self.requires_grad and not self.changed:
            return tensor
        tensor = tensor.detach()
        if self.changed:
            # Another one may need it as it was; and only a result, no leaf, may be changed in place.
            tensor = tensor.clone()
            return as_result(tensor) if self.requires_grad else tensor
        return tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class _SameArgument:
    """Stands for an argument that is the same object as an earlier one."""

    position: int


class _Slot:
    """Stands in the graph for a tensor that a call saved."""

    __slots__ = ("__weakref__", "form", "place")

    def __init__(self, place: int) -> None:
        self.place = place
        self.form: Form | None = None
        """Of a call that runs plainly: what is stored."""


class PartCall:
    """One call of a part: what must be stored to run it again and, in the backward pass, what running it again gave."""

    def __init__(self, part: Part, leaves: list[Any], spec: TreeSpec | None, dear: list[int]) -> None:
        self.facts = part.facts
        self.name = type(part.module).__name__
        self.recipes: list[weakref.ref[Recipe]] = []
        self.around: Any = None
        self._link: RunLink | None = None
        self._leaves = leaves
        self._spec = spec
        self._dear = dear
        self._running = True
        self._shapes: list[torch.Size] = []
        # What the call saves, while it is not known whether it may be dropped.
        undecided = part.facts.cheap is None or any(index not in part.facts.pays for index in dear)
        self._undecided: list[tuple[Tensor, int]] | None = [] if undecided else None
        self._may_drop_early = False
        self._gained: dict[int, int] = {}
        self._slots: list[weakref.ref[_Slot]] = []
        self._one_output = False
        self._is_over = False
        self._state: list[tuple[Form, bool]] = []
        self._lock = threading.RLock()
        # What the last run gave, for the backward pass `_task`.
        self._task = -1
        self._values: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._left: dict[int, int] = {}

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        saved: SavedTensors,
        part: Part,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        runs: Runs,
    ) -> Any:
        """Run ``function``, the forward of ``part``; ``saved`` stores what it must, ``runs`` keeps the run."""
        self.around = saved.around
        tensors = [(i, leaf, leaf._version) for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        recipes: dict[int, Form] = {}
        for index, leaf, _ in tensors if part.facts.writes else ():
            form = saved.keep_before_change(leaf)
            if form is not None:
                recipes[index] = form
        devices = {leaf.device for _, leaf, _ in tensors}
        self._autocast = _autocast_now(devices)
        self._random = _random_now(devices) if part.may_draw else None
        others = [leaf for leaf in self._leaves if not isinstance(leaf, Tensor)]
        # Hooks of the part itself run outside of its forward.
        run = Run(function, part.inner, part.inner[1:], others, stock=part.stock)
        self._link = RunLink(run)
        # Should a library module turn out to perform a product, it is computed again this once.
        self._may_drop_early = part.stock and not saved.nested
        self._gained = {_storage(leaf): 0 for _, leaf, _ in tensors}
        watch = _WatchProducts() if part.facts.cheap is None else None
        with nullcontext() if watch is None else watch, saved_tensors_hooks(self._pack, self._unpack):
            result = run.first(args, kwargs)
        self._running = False
        changed = {i for i, leaf, version in tensors if leaf._version != version}
        self._learn(tensors, changed, watch)
        if self._runs_plainly(changed, recipes):
            self._give_up(saved)
            return result
        self._undecided = None
        if not self._shapes:
            return result  # nothing to compute again for
        self._keep_arguments(saved, tensors, changed, recipes)
        self._state = [(saved.pack(tensor), tensor.requires_grad) for tensor in run.before.settle()]
        run.before.forget_tensors()
        if self._random is not None and _same_random(self._random, _random_now(devices)):
            self._random = None  # no number was drawn
        self._know_outputs(result, tensors, changed)
        self._one_output = sum(isinstance(t, Tensor) and t.requires_grad for t in leaves_of(result)) == 1
        self._link.leave_to(runs)
        after_backward(self, self._slots, PartCall._has_run, PartCall._let_go)
        return result

    def decided(self) -> None:
        """Let go of what was saved and not decided on: those tensors know the nodes that know this call."""
        self._undecided = None

    def _pack(self, tensor: Tensor) -> _Slot:
        if self._undecided is not None:
            self._undecided.append((tensor, tensor._version))
            if self._may_drop_early:
                self._drop_early(tensor)
        slot = _Slot(len(self._shapes))
        self._slots.append(weakref.ref(slot))
        self._shapes.append(tensor.shape)
        return slot

    def _drop_early(self, tensor: Tensor) -> None:
        """Hold nothing that was saved as soon as it is more than the arguments that are stored in its place."""
        self._gained.setdefault(_storage(tensor), stored_bytes(tensor))
        if sum(self._gained.values()) > sum(self._leaves[index].nbytes for index in self._dear):
            self.facts.pays.update((index, True) for index in self._dear if index not in self.facts.pays)
            self._undecided = None

    def _learn(self, tensors: list[tuple[int, Tensor, int]], changed: set[int], watch: _WatchProducts | None) -> None:
        facts = self.facts
        if watch is not None:
            facts.cheap = not watch.found and not changed
        if self._undecided is None:
            return
        arguments = {i: leaf for i, leaf, _ in tensors if i in self._dear and i not in facts.pays}
        own = {_storage(leaf) for _, leaf, _ in tensors}
        inside = {_storage(tensor): stored_bytes(tensor) for tensor, _ in self._undecided}
        saved = {i for i, leaf in arguments.items() if _storage(leaf) in inside}
        cost = sum(leaf.nbytes for i, leaf in arguments.items() if i not in saved)
        gain = sum(size for storage, size in inside.items() if storage not in own)
        facts.pays.update((i, i in saved or cost < gain) for i in arguments)

    def _runs_plainly(self, changed: set[int], recipes: dict[int, Form]) -> bool:
        """Whether what the call saved has to be stored after all."""
        facts = self.facts
        if facts.cheap and all(facts.pays[index] for index in self._dear) and changed <= recipes.keys():
            return False
        if self._undecided is None and not changed:
            return False
        if self._undecided is None:
            raise RuntimeError(
                f"{self.name} changed an argument in place for the first time after calls that "
                "left it alone, so that it cannot be computed again. Run this step again."
            )
        return True

    def _give_up(self, saved: SavedTensors) -> None:
        """Store what the call saved, as plain autograd would."""
        assert self._undecided is not None
        for reference, (tensor, version) in zip(self._slots, self._undecided, strict=True):
            form, slot = saved.keep(tensor, version), reference()
            if slot is not None:
                slot.form = form
        self._leaves, self._link = [], None

    def _has_run(self, task: int) -> bool:
        return self._task != -1 and self._task == task

    def _let_go(self) -> None:
        """Let go of all that is stored and was computed again, as a backward pass has run through the call."""
        with self._lock:
            self._values, self._outputs, self._task = {}, {}, -1
            # Another output may have a backward of its own, and a recipe its user.
            if self._one_output and not self._wanted():
                self._leaves, self._state, self._link, self._is_over = [], [], None, True

    def _keep_arguments(
        self,
        saved: SavedTensors,
        tensors: list[tuple[int, Tensor, int]],
        changed: set[int],
        recipes: dict[int, Form],
    ) -> None:
        first: dict[int, int] = {}
        for index, leaf, version in tensors:
            if first.setdefault(id(leaf), index) != index:
                self._leaves[index] = _SameArgument(first[id(leaf)])
                continue
            form = recipes.get(index) or saved.keep(leaf, version)
            self._leaves[index] = _Argument(form, leaf.requires_grad, index in changed)

    def _know_outputs(self, result: Any, tensors: list[tuple[int, Tensor, int]], changed: set[int]) -> None:
        arguments = {leaf.untyped_storage()._cdata: i for i, leaf, _ in tensors if leaf.layout is torch.strided}
        for index, leaf in enumerate(leaves_of(result)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel() > 1:
                argument = arguments.get(leaf.untyped_storage()._cdata)
                # A view of an argument is stored with the argument.
                if argument is None or argument in changed:
                    know_output(leaf, self, index)

    # -- backward -----------------------------------------------------------------------------------------------------

    def _unpack(self, slot: _Slot) -> Tensor:
        if slot.form is not None:
            return slot.form.value()
        with self._lock:
            if self._prepare(lambda: slot.place in self._values):
                return self._values.pop(slot.place)
            return self._take_and_forget(self._values, slot.place)

    def output(self, index: int) -> Tensor:
        """Output ``index``: computed again, or left from when a gradient of this call or another user asked for it."""
        with self._lock:
            if not self._prepare(lambda: index in self._outputs):
                return self._take_and_forget(self._outputs, index)
            value = self._outputs[index]
            self._left[index] -= 1
            if self._left[index] <= 0:
                del self._outputs[index]
            return value

    def _prepare(self, there: Callable[[], bool]) -> bool:
        """Run again unless this backward pass has what is asked for; False outside of a backward pass."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task != self._task or not there():
            self._values, self._outputs = {}, {}
            self._run_again()
            self._task = task
        return task != -1

    def _take_and_forget(self, results: dict[int, Tensor], key: int) -> Tensor:
        value = results[key]
        self._values, self._outputs = {}, {}
        return value

    def _run_again(self) -> None:
        if self._is_over:
            raise RuntimeError(
                f"Trying to backward through the graph a second time: {self.name} has had its "
                "backward pass, after which nothing is kept for another one. Set retain_graph=True in the first, or "
                "reset or detach the state that leads there."
            )
        assert self._link is not None
        run = self._link.run()
        _check_parameters_are_there(run.modules)
        with torch.enable_grad():
            args, kwargs = self._arguments()
            # A gradient may be taken inside the part, while its forward still runs.
            state = run.before.settle() if self._running else [_with_grad(f.value(), g) for f, g in self._state]
        values: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            values.append(tensor if tensor.is_leaf else tensor.detach())
            return values[-1]

        with ExitStack() as stack:
            if self._random is not None:
                stack.enter_context(_replayed(self._random))
            for autocast in _autocast_again(self._autocast):
                stack.enter_context(autocast)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
            result = run.again(args, kwargs, state)
        if [value.shape for value in values[: len(self._shapes)]] != self._shapes:
            raise RuntimeError(
                f"{self.name} saved tensors of shapes {[tuple(s) for s in self._shapes]} in the "
                f"forward and {[tuple(v.shape) for v in values]} when it was computed again. A module under "
                "recompute_cheap has to do the same both times: leave it out, or use the treatment 'pack'."
            )
        self._values = dict(enumerate(values))
        leaves = leaves_of(result)
        self._left = self._wanted()
        self._outputs = {index: leaves[index].detach() for index in self._left}

    def _wanted(self) -> dict[int, int]:
        """By output, how many recipes there are."""
        return Counter(recipe.index for reference in self.recipes if (recipe := reference()) is not None)

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves: list[Any] = []
        for leaf in self._leaves:
            if isinstance(leaf, _Argument):
                leaves.append(leaf.value())
            else:
                leaves.append(leaves[leaf.position] if isinstance(leaf, _SameArgument) else leaf)
        if self._spec is None:
            return tuple(leaves), {}
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs


def _check_parameters_are_there(modules: list[nn.Module]) -> None:
    for module in modules:
        for name, parameter in module._parameters.items():
            if type(parameter) is nn.Parameter and parameter.numel() and not parameter.untyped_storage().nbytes():
                raise RuntimeError(
                    f"{name} of {type(module).__name__} has no memory now (a sharded parameter, it seems), but the "
                    "module has to be computed again for a layer outside of its shard. Shard larger units, or use "
                    "the treatment 'pack' or 'recompute'."
                )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


def _with_grad(tensor: Tensor, requires_grad: bool) -> Tensor:
    return as_result(tensor) if requires_grad else tensor.detach()


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers and autocast


_Random = list[tuple["torch.device", Tensor]]


def _random_now(devices: Iterable[torch.device]) -> _Random:
    others = sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)
    states = [(device, torch.get_device_module(device).get_rng_state(device)) for device in others]
    return [(torch.device("cpu"), torch.get_rng_state()), *states]


def _set_random(states: _Random) -> None:
    with no_dispatch():  # torch 2.6 makes a copy of them
        for device, state in states:
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(device).set_rng_state(state, device)


def _same_random(one: _Random, other: _Random) -> bool:
    with no_dispatch():  # under fake tensors these are still real
        return all(torch.equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True))


@contextmanager
def _replayed(states: _Random) -> Iterator[None]:
    now = _random_now(device for device, _ in states)
    _set_random(states)
    try:
        yield
    finally:
        _set_random(now)


_Autocast = tuple[tuple[tuple[str, bool, torch.dtype], ...], bool]


def _autocast_now(devices: Iterable[torch.device]) -> _Autocast:
    types = {"cpu", *(device.type for device in devices if device.type != "meta")}
    settings = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in sorted(types)]
    return tuple(settings), torch.is_autocast_cache_enabled()


def _autocast_again(then: _Autocast) -> Iterator[Any]:
    settings, cache = then
    for device, enabled, dtype in settings:
        now = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        if now != (enabled, dtype):
            yield torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)


# ---------------------------------------------------------------------------------------------------------------------
# The two treatments


@dataclass
class TreatmentFacts:
    """What a region that is packed or partly recomputed learned about itself. Not copied, not pickled."""

    sites: dict[tuple[Any, ...], Site] = field(default_factory=dict)
    parts: RegionParts | None = None

    def __reduce__(self) -> Any:
        return (TreatmentFacts, ())


def run_treated(
    module: nn.Module,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    facts: TreatmentFacts,
    runs: Runs,
    label: str,
    *,
    recompute_cheap: bool,
) -> Any:
    """Run ``function``, the forward of ``module``, with what autograd saves packed or recomputed.

    Args:
        module: the region.
        function: its forward.
        args: arguments of the forward.
        kwargs: keyword arguments of the forward.
        facts: what earlier calls learned; it is added to.
        runs: those that ``module`` keeps.
        label: how errors call the region.
        recompute_cheap: also recompute everything but products.
    """
    saved = saved_in_call(facts.sites, label, (*args, *kwargs.values()))
    if not recompute_cheap:
        with saved.hooks():
            return function(*args, **kwargs)
    modules = list(module.modules())
    if facts.parts is None or not facts.parts.holds(modules):
        facts.parts = find_parts(module, modules)
    parts = facts.parts.parts
    with saved.hooks():
        if len(parts) == 1 and parts[0].module is module:
            return run_part(saved, parts[0], _Inside(runs), function, args, kwargs)
        with treated_parts(saved, parts, runs):
            return function(*args, **kwargs)
