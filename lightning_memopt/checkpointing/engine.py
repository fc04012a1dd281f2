"""
The checkpoint engine
=====================

A region is a function whose intermediate tensors are not stored: its inputs are, and the function runs again in the
backward pass. The recomputation itself is torch's (``torch.utils.checkpoint``, non-reentrant). What this module adds:

* **Inputs are packed.** Tensor arguments that prove binary are stored as bits (or as whatever the compressor makes of
  them), each storage once, even if three regions share it. The forward always runs on the original tensors.
* **Memory is respected.** Neuron states, statistics, counters and lists of the modules involved are noted before the
  forward, given back to the recomputation and never committed twice (see ``state.py``).
* **Hooks that only look fire once** (see ``hooks.py``), and Python's and NumPy's random numbers are replayed along with
  torch's.

Everything stored goes through ``save_for_backward``, so ``saved_tensors_hooks`` around the model (CPU offload, say) see
it, and autograd notices an input that was changed in place.
"""

from __future__ import annotations

import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from lightning_memopt.checkpointing.compiled import compiled_region
from lightning_memopt.checkpointing.compressors import SpikeCompressor, describe_misfit, reading_is_free, require_fit
from lightning_memopt.checkpointing.hooks import Observers, any_hooks, replaying_hooks, watching_hooks
from lightning_memopt.checkpointing.state import StateBefore

# Untyped in torch.
StorageWeakRef: Any = reductions.StorageWeakRef

# Tensors below this many bytes are not worth a compressor's calls.
_SMALLEST_PACKED_BYTES = 64


@dataclass
class RegionFacts:
    """What a region learned about itself: which inputs are binary, and whether it calls modules it does not hold."""

    packable: dict[int, bool] = field(default_factory=dict)
    calls_hidden_modules: bool | None = None


@dataclass(frozen=True)
class Region:
    """How one region is to be treated."""

    facts: RegionFacts
    compressor: SpikeCompressor | None = None
    compressed_args: tuple[int | str, ...] | None = None
    label: str = "a checkpointed function"


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    compressor: SpikeCompressor | None = None,
    **kwargs: Any,
) -> Any:
    """Run ``function(*args, **kwargs)`` without storing its intermediate tensors; they are recomputed in backward.

    Modules that the function calls or closes over keep their state straight: neuron states and statistics step once.

    Args:
        function: any callable, for example a module, a method or a lambda over modules.
        *args: its arguments: tensors of any shape and dtype, containers of tensors, anything else.
        compressor: how to store tensor arguments that it can hold exactly; the others are stored as they are.
        **kwargs: its keyword arguments.

    Returns:
        What ``function`` returns, unchanged. Without gradients enabled this is a plain call.

    Raises:
        TypeError: if ``function`` is not callable or ``compressor`` is not a :class:`SpikeCompressor`.
        RuntimeError: if the region changes an input in place that is stored as it is.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> x = torch.ones(2, 4, requires_grad=True)
        >>> checkpoint(lambda t: layer(t).relu(), x).sum().backward()
        >>> x.grad.shape
        torch.Size([2, 4])
    """
    if not callable(function):
        raise TypeError(f"checkpoint expects a callable, got {type(function).__name__}.")
    check_compressor(compressor)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        return compiled_region(function, args, kwargs, compressor, None)
    label = getattr(function, "__qualname__", None) or type(function).__qualname__
    modules = _modules_of(function, args, kwargs)
    region = Region(_function_facts(function, modules), compressor, label=label)
    return run_region(function, args, kwargs, region, modules)


def check_compressor(compressor: object) -> None:
    """Raise TypeError unless ``compressor`` is None or a :class:`SpikeCompressor` object."""
    if compressor is None or isinstance(compressor, SpikeCompressor):
        return
    hint = " Pass an object, not the class." if isinstance(compressor, type) else ""
    raise TypeError(f"compressor must be a SpikeCompressor or None, got {compressor!r}.{hint}")


def run_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    region: Region,
    modules: list[nn.Module],
) -> Any:
    """Run one region eagerly: note, forward, keep. ``modules`` are those whose state it may touch."""
    call = _Call(function, args, kwargs, region, modules)
    # RReLU saves its noise before it draws it: a recomputation that stops at the last saved tensor would miss the draw.
    whole = any(isinstance(module, nn.RReLU) for module in modules)
    with set_checkpoint_early_stop(False) if whole else nullcontext():
        result = torch_checkpoint(call, *call.anchors, use_reentrant=False)
    call.keep()
    return result


# ---------------------------------------------------------------------------------------------------------------------
# One call of a region


@dataclass(frozen=True)
class _Raw:
    """Stands for an argument that is kept as it is."""

    index: int


@dataclass(frozen=True)
class _Same:
    """Stands for an argument that is the same object as an earlier one, and must be again (attention looks at this)."""

    position: int


@dataclass(frozen=True)
class _Packed:
    """Stands for an argument that is kept as a payload."""

    compressor: SpikeCompressor
    leaves: tuple[Any, ...]
    spec: TreeSpec
    requires_grad: bool

    def unpack(self, kept: Sequence[Tensor]) -> Tensor:
        payload = tree_unflatten(
            [kept[leaf.index] if isinstance(leaf, _Raw) else leaf for leaf in self.leaves], self.spec
        )
        if not self.requires_grad:
            return self.compressor.decompress(payload)
        anchor = torch.empty(0, requires_grad=True)
        return _Unpack.apply(anchor, self.compressor, payload)  # type: ignore[no-any-return]


class _Unpack(torch.autograd.Function):
    """Makes the unpacked tensor a result, not a leaf, so that the region may change it in place as in the forward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, compressor: SpikeCompressor, payload: Any) -> Tensor:
        return compressor.decompress(payload)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None


class _Keep(torch.autograd.Function):
    """A node that holds tensors through ``save_for_backward``; it is never run."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("The node that keeps a region's inputs takes no part in the gradients.")


class _Call:
    """The callable given to torch: the first call is the forward, every later one a recomputation."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        region: Region,
        modules: list[nn.Module],
    ) -> None:
        self.function = function
        self.region = region
        self.modules = modules
        self.original: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.keeper: Any = None
        self.ran = False
        self.arg_count = 0
        self.host_random: _HostRandom | None = None
        self.hooked = any_hooks(modules)
        self.observers: Observers = {}
        leaves, self.spec = tree_flatten((args, kwargs))
        self.tensors: list[Tensor] = []
        self.versions: list[tuple[Tensor, int]] = []
        self.leaves = _store_leaves(self, leaves, args, kwargs)
        self.before = StateBefore(reads_statistics=not _is_stock(modules))
        self.before.note(modules)
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)} | _parameter_device(modules)
        # Empty tensors tell torch which devices' random states and autocast settings to replay.
        self.anchors = [torch.empty(0, device=d) for d in devices if d.type not in ("cpu", "meta")]

    def __call__(self, *_: Tensor) -> Any:
        if self.ran:
            return self._recompute()
        self.ran = True
        return self._forward()

    def _forward(self) -> Any:
        assert self.original is not None
        args, kwargs = self.original
        facts = self.region.facts
        host_random = _HostRandom.now()
        with ExitStack() as stack:
            if facts.calls_hidden_modules is not False:
                stack.enter_context(_noting_called_modules(self.before, facts))
            if self.hooked:
                stack.enter_context(watching_hooks(self.modules, self.before.read, self.observers))
            result = self.function(*args, **kwargs)
        if host_random != _HostRandom.now():
            self.host_random = host_random
        return result

    def keep(self) -> None:
        """After the forward: let go of the arguments, keep what the recomputation needs."""
        for tensor, version in self.versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"{self.region.label} changes an input of shape {tuple(tensor.shape)} in place, so that it cannot "
                    "be recomputed from it. Make the first operation out-of-place (for example ReLU(inplace=False)) or "
                    "leave this region unchanged."
                )
        self.arg_count = len(self.tensors)
        self.tensors += self.before.settle()
        anchor = torch.empty(0, requires_grad=True)
        # The tensor, not its node: in older versions of torch the node alone does not keep what it saved.
        self.keeper = _Keep.apply(anchor, *self.tensors)
        self.original = None
        self.tensors, self.versions = [], []

    def _recompute(self) -> None:
        if self.keeper is None:
            # A gradient taken inside the region itself, while its forward still runs.
            assert self.original is not None
            self.function(*self.original[0], **self.original[1])
            return
        node = self.keeper.grad_fn
        kept: Sequence[Tensor] = node.saved_tensors
        leaves: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, _Raw):
                leaves.append(kept[leaf.index])
            elif isinstance(leaf, _Packed):
                leaves.append(leaf.unpack(kept))
            else:
                leaves.append(leaves[leaf.position] if isinstance(leaf, _Same) else leaf)
        args, kwargs = tree_unflatten(leaves, self.spec)
        state = kept[self.arg_count :]
        del kept, leaves
        # Packed inputs were unpacked for good: unless the graph is kept, the payload need not outlive this moment.
        if hasattr(node, "maybe_clear_saved_tensors"):  # not in torch 2.6: there it lives until the region is done
            node.maybe_clear_saved_tensors()
        with ExitStack() as stack:
            if self.host_random is not None:
                stack.enter_context(self.host_random.replayed())
            stack.enter_context(self.before.recomputing(state))
            if self.hooked:
                stack.enter_context(replaying_hooks(self.modules, self.observers))
            self.function(*args, **kwargs)


def _is_stock(modules: list[nn.Module]) -> bool:
    """Whether a region consists of library layers alone: then nothing in it reads statistics in training."""
    return all(type(module).__module__.startswith(("torch.nn.modules.", "spikingjelly.")) for module in modules)


def _parameter_device(modules: list[nn.Module]) -> set[torch.device]:
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                return {parameter.device}
    return set()


@contextmanager
def _noting_called_modules(before: StateBefore, facts: RegionFacts) -> Any:
    """Note the state of modules that are called but were not known beforehand, at the moment they are called."""
    found = False

    def note(module: nn.Module, _: Any) -> None:
        nonlocal found
        if not before.has(module):
            found = True
            before.note(module.modules())

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
    facts.calls_hidden_modules = found


# ---------------------------------------------------------------------------------------------------------------------
# Storing arguments


def _store_leaves(call: _Call, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    region = call.region
    names = _allowed_leaves(region, args, kwargs) if region.compressor is not None else None
    stored: list[Any] = []
    seen: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            stored.append(leaf)
            continue
        first = seen.setdefault(id(leaf), index)
        if first != index:
            stored.append(_Same(first))
            continue
        packed = None
        if region.compressor is not None and (names is None or index in names):
            packed = _pack(call, index, leaf, region.compressor)
        if packed is None:
            stored.append(_Raw(len(call.tensors)))
            call.tensors.append(leaf)
            if not leaf.is_inference():
                call.versions.append((leaf, leaf._version))
        else:
            stored.append(packed)
    return stored


def _allowed_leaves(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int] | None:
    """The leaves that belong to ``compressed_args``; None where every argument may be packed."""
    if region.compressed_args is None:
        return None
    allowed: set[int] = set()
    start = 0
    for name, value in [*enumerate(args), *kwargs.items()]:
        count = 1 if isinstance(value, Tensor) else len(tree_flatten(value)[0])
        if name in region.compressed_args:
            allowed.update(range(start, start + count))
        start += count
    return allowed


def _pack(call: _Call, index: int, tensor: Tensor, compressor: SpikeCompressor) -> _Packed | None:
    """A payload for ``tensor``, or None where it is to be kept as it is."""
    facts, label = call.region.facts, call.region.label
    binary = facts.packable.get(index)
    if binary is None and call.region.compressed_args is not None:
        binary = True
    if (
        binary is False
        or type(tensor) is not Tensor
        or tensor.nbytes < _SMALLEST_PACKED_BYTES
        or tensor.device.type == "meta"
        or not compressor.accepts(tensor)
    ):
        return None
    shared = _shared_payload(tensor, compressor)
    if shared is None:
        with torch.no_grad():
            compressed = compressor.compress_checked(tensor.detach())
        if binary is None or reading_is_free(tensor):
            # Until a region's inputs are known, and wherever reading costs nothing, the answer is read at once.
            if not compressed.fits:
                facts.packable[index] = False
                if binary:
                    where = f"Input {index} of {label}"
                    warnings.warn(
                        describe_misfit(compressor, where, compressed.odd.item())
                        + " It is stored as it is from now on.",
                        stacklevel=2,
                    )
                return None
            # Zeros alone prove nothing: ask again at the next call.
            if binary is None and tensor.detach().any():
                facts.packable[index] = True
        else:
            require_fit(compressed, compressor, f"input {index} of {label}")
        shared = tree_flatten(compressed.payload)
        if _payload_bytes(shared[0]) >= min(tensor.nbytes, tensor.untyped_storage().nbytes()):
            facts.packable[index] = False
            return None
        _share_payload(tensor, compressor, shared)
    leaves = []
    for leaf in shared[0]:
        if isinstance(leaf, Tensor):
            leaves.append(_Raw(len(call.tensors)))
            call.tensors.append(leaf)
        else:
            leaves.append(leaf)
    return _Packed(compressor, tuple(leaves), shared[1], tensor.requires_grad)


def _payload_bytes(leaves: list[Any]) -> int:
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


# Payloads in use, found by the storage they were made from. Both sides are weak: a payload lives as long as autograd
# keeps it, and a reused address cannot be mistaken for it, because the storage's own record is held.
_PAYLOADS: dict[tuple[Any, ...], tuple[StorageWeakRef, list[Any], TreeSpec]] = {}
_PAYLOADS_SWEEP_AT = [64]


def _payload_key(tensor: Tensor, storage: StorageWeakRef, compressor: SpikeCompressor) -> tuple[Any, ...]:
    geometry = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return (storage.cdata, *geometry, tensor._version, type(compressor), compressor)


def _shared_payload(tensor: Tensor, compressor: SpikeCompressor) -> tuple[list[Any], TreeSpec] | None:
    if not _PAYLOADS or tensor.is_inference():
        return None
    entry = _PAYLOADS.get(_payload_key(tensor, StorageWeakRef(tensor.untyped_storage()), compressor))
    if entry is None or entry[0].expired():
        return None
    leaves = [leaf() if isinstance(leaf, weakref.ref) else leaf for leaf in entry[1]]
    alive = all(now is not None or then is None for now, then in zip(leaves, entry[1], strict=True))
    return (leaves, entry[2]) if alive else None


def _share_payload(tensor: Tensor, compressor: SpikeCompressor, payload: tuple[list[Any], TreeSpec]) -> None:
    if tensor.is_inference():
        return
    storage = StorageWeakRef(tensor.untyped_storage())
    weak = [weakref.ref(leaf) if isinstance(leaf, Tensor) else leaf for leaf in payload[0]]
    _PAYLOADS[_payload_key(tensor, storage, compressor)] = (storage, weak, payload[1])
    if len(_PAYLOADS) > _PAYLOADS_SWEEP_AT[0]:
        for key, (source, leaves, _) in list(_PAYLOADS.items()):
            if source.expired() or any(isinstance(leaf, weakref.ref) and leaf() is None for leaf in leaves):
                del _PAYLOADS[key]
        _PAYLOADS_SWEEP_AT[0] = 2 * len(_PAYLOADS) + 64


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers of the host


@dataclass(frozen=True, eq=False)
class _HostRandom:
    """The states of Python's and, where it is loaded, NumPy's global generators. (torch's are replayed by torch.)"""

    python: Any
    numpy: Any

    @staticmethod
    def now() -> _HostRandom:
        numpy = sys.modules.get("numpy")
        return _HostRandom(random.getstate(), None if numpy is None else numpy.random.get_state())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _HostRandom) or self.python != other.python:
            return False
        if self.numpy is None or other.numpy is None:
            return self.numpy is other.numpy
        return bool((self.numpy[1] == other.numpy[1]).all()) and self.numpy[2:] == other.numpy[2:]

    def set(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    @contextmanager
    def replayed(self) -> Any:
        now = _HostRandom.now()
        self.set()
        try:
            yield
        finally:
            now.set()


# ---------------------------------------------------------------------------------------------------------------------
# Which modules a function may touch

_FUNCTION_FACTS: dict[tuple[Any, ...], RegionFacts] = {}


def _function_facts(function: Callable[..., Any], modules: list[nn.Module]) -> RegionFacts:
    """Facts of a function are those of its code with the modules it works on: one lambda may serve many blocks."""
    code = getattr(getattr(function, "__func__", function), "__code__", type(function))
    key = (code, *map(id, modules))
    if key not in _FUNCTION_FACTS:
        if len(_FUNCTION_FACTS) >= 4096:
            _FUNCTION_FACTS.clear()
        _FUNCTION_FACTS[key] = RegionFacts()
    return _FUNCTION_FACTS[key]


def _modules_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
    """Modules that a function is, is bound to, closes over, refers to or is given, with their submodules."""
    roots: dict[int, nn.Module] = {}
    seen: set[int] = set()
    _find_modules(function, roots, seen, depth=0)
    for value in [*args, *kwargs.values()]:
        _find_modules(value, roots, seen, depth=0)
    modules: dict[int, nn.Module] = {}
    for root in roots.values():
        modules.update((id(m), m) for m in root.modules())
    return list(modules.values())


def _find_modules(value: Any, roots: dict[int, nn.Module], seen: set[int], depth: int) -> None:
    if id(value) in seen or depth > 4 or isinstance(value, (Tensor, str, bytes, int, float, type, types.ModuleType)):
        return
    seen.add(id(value))
    inner: Iterable[Any] = ()
    if isinstance(value, nn.Module):
        roots[id(value)] = value
    elif isinstance(value, partial):
        inner = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        inner = (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        named = [value.__globals__[n] for n in value.__code__.co_names if n in value.__globals__]
        inner = (*cells, *named, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif isinstance(value, dict):
        inner = value.values() if len(value) <= 1000 else ()
    elif isinstance(value, (list, tuple, set)):
        inner = value if len(value) <= 1000 else ()
    elif hasattr(value, "__dict__"):
        inner = list(vars(value).values())
    for item in inner:
        _find_modules(item, roots, seen, depth + 1)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises where the cell is empty
    except ValueError:
        return False
    return True
