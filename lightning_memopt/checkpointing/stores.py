"""
The places where a module keeps its memory
==========================================

One rule covers the libraries we know, because all of them keep state in one of three places of an ``nn.Module``:

* its buffers (snnTorch ``mem``/``syn``, sinabs ``v_mem``, normalisation statistics, any ``self.buf = ...``) and the
  objects it holds as parameters;
* its plain attributes (``self.v = ...``, counters, metric states);
* containers, arrays, random generators and a user's own objects among these attributes (SpikingJelly keeps everything
  in a dict ``_memories``).

Norse passes its state in and out, so it needs nothing. Whatever keeps state elsewhere joins through
:class:`StateAdapter`.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

# Attributes every nn.Module has or may have: structure, hooks, flags and code, not memory.
_MODULE_INTERNALS = frozenset(nn.Module().__dict__) | {"_compiled_call_impl", "_forward_hooks_always_called", "forward"}
REGION_ATTRIBUTE = "_memopt_region"
_NOT_MEMORY = _MODULE_INTERNALS | {REGION_ATTRIBUTE}

# Arrays up to this size are copied each time: they have no version to watch.
_ARRAY_LIMIT_BYTES = 1 << 20
# Containers above this many entries (a vocabulary) are noted as a whole, without looking into each entry.
_LARGE_CONTAINER = 256
# How deep attributes of attributes are followed.
_DEPTH = 3

_MUTABLE = (list, dict, set, deque)
_SCALARS = (int, float, str, type(None))
_ATOMS = (bool, int, float, str, tuple, Tensor, torch.dtype, torch.device, nn.Module)
_FRAMEWORKS = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "numpy"})
_OPEN_STANDARD_CLASSES = frozenset({"SimpleNamespace", "UserList", "UserDict"})


@runtime_checkable
class StateAdapter(Protocol):
    """How to read and write state that a module keeps outside its buffers and attributes.

    Register one with :func:`register_state_adapter`. ``read`` returns the current values by reference (no copies);
    ``write`` puts such values back. Values may be tensors of any shape and dtype, or any other object.

    Example:
        >>> from lightning_memopt.checkpointing import register_state_adapter
        >>> class Slotted(torch.nn.Module):
        ...     __slots__ = ("v",)
        >>> class SlottedAdapter:
        ...     def matches(self, module): return isinstance(module, Slotted)
        ...     def read(self, module): return {"v": getattr(module, "v", None)}
        ...     def write(self, module, state): object.__setattr__(module, "v", state["v"])
        >>> remove = register_state_adapter(SlottedAdapter())
        >>> remove()
    """

    def matches(self, module: nn.Module) -> bool: ...

    def read(self, module: nn.Module) -> Mapping[str, Any]: ...

    def write(self, module: nn.Module, state: Mapping[str, Any]) -> None: ...


_ADAPTERS: list[StateAdapter] = []


def register_state_adapter(adapter: StateAdapter) -> Callable[[], None]:
    """Make ``adapter`` known to every region; returns a function that removes it again.

    Raises:
        TypeError: if ``adapter`` lacks ``matches``, ``read`` or ``write``.
    """
    if not isinstance(adapter, StateAdapter):
        raise TypeError(
            f"register_state_adapter expects an object with matches(module), read(module) and write(module, state), "
            f"got {type(adapter).__name__}."
        )
    _ADAPTERS.append(adapter)

    def remove() -> None:
        if adapter in _ADAPTERS:
            _ADAPTERS.remove(adapter)

    return remove


class Store:
    """One mutable place of one owner (a module, mostly), with its contents at the time of noting."""

    __slots__ = ("contents", "name", "owner", "place")

    def __init__(self, owner: Any, name: tuple[str, ...], place: Any) -> None:
        self.owner = owner
        self.name = name
        self.place = place
        self.contents = self.read()

    @property
    def holds_parameters(self) -> bool:
        """Whether these are the parameters of a module, which are kept by reference."""
        return self.name == _PARAMETERS

    def read(self) -> Any:
        """What the place holds now: a new dict or list of the same objects, or a random state, or a copied array."""
        place = self.place
        if isinstance(place, _Attributes):
            return place.read()
        if isinstance(place, dict):
            return dict(place)
        if isinstance(place, _MUTABLE):
            return list(place)
        if _is_array(place):
            return place.copy()
        if _is_random(place):
            return _random_state(place)
        return dict(place.read(self.owner))

    def write(self, contents: Any) -> None:
        """Make the place hold ``contents`` again, in the same order."""
        place = self.place
        if isinstance(place, _Attributes):
            place.write(contents)
        elif isinstance(place, dict):
            _write_dict(place, contents)
        elif isinstance(place, list):
            place[:] = contents
        elif isinstance(place, (set, deque)):
            if list(map(id, place)) == list(map(id, contents)):
                return  # filling a set anew may change its order
            place.clear()
            add: Any = place.update if isinstance(place, set) else place.extend
            add(contents)
        elif _is_array(place):
            place[...] = contents
        elif _is_random(place):
            _set_random_state(place, contents)
        else:
            place.write(self.owner, contents)

    def entries(self) -> Iterable[tuple[Any, Any]]:
        """Keys and values at the time of noting that are looked at one by one."""
        return entries(self.contents)


def entries(contents: Any) -> Iterable[tuple[Any, Any]]:
    """Keys and values of what a place holds that are looked at one by one."""
    if type(contents) is dict:
        # NumPy's generators give their state as a dict, too.
        return () if len(contents) > _LARGE_CONTAINER or "bit_generator" in contents else contents.items()
    return enumerate(contents) if type(contents) is list and len(contents) <= _LARGE_CONTAINER else ()


_PARAMETERS = ("parameters",)


def entry(contents: Any, key: Any) -> Any:
    """What ``contents`` holds under ``key``, None where it holds nothing."""
    if isinstance(contents, dict):
        return contents.get(key)
    return contents[key] if key < len(contents) else None


def parameter_store(module: nn.Module) -> list[Store]:
    """The parameters of ``module`` as objects: ``functional_call`` and moving averages exchange them."""
    if not isinstance(module._parameters, dict) or not module._parameters:  # TorchScript has a wrapper here
        return []
    return [Store(module, _PARAMETERS, module._parameters)]


def stores_of(module: nn.Module) -> list[Store]:
    """Every place where ``module`` itself (not its children) may remember something, empty ones included."""
    attributes = Store(module, (), _Attributes(module))
    stores = [*parameter_store(module), attributes]
    if isinstance(module._buffers, dict):
        stores.append(Store(module, ("buffers",), module._buffers))
    seen = {id(module._buffers), id(module._parameters)}
    for name, value in attributes.entries():
        _nested_stores(module, (name,), value, seen, stores)
    stores.extend(Store(module, (type(a).__name__,), a) for a in _ADAPTERS if a.matches(module))
    return stores


def may_remember(value: Any) -> bool:
    """Whether an argument that pytree does not open may remember something: own objects, generators, arrays, sets."""
    return isinstance(value, _MUTABLE) or _is_array(value) or _is_random(value) or is_foreign(value)


def stores_of_object(value: Any) -> list[Store]:
    """The places of an argument of a region that may remember something."""
    stores: list[Store] = []
    _nested_stores(value, (), value, set(), stores)
    return stores


def with_hidden_modules(root: nn.Module) -> list[nn.Module]:
    """The modules of ``root`` and those it keeps in plain lists, dicts and the like, where torch does not see them."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    pending: list[Any] = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, nn.Module):
            for module in value.modules():
                if id(module) not in found:
                    found[id(module)] = module
                    held = [v for k, v in module.__dict__.items() if k not in _NOT_MEMORY]
                    pending += [v for v in held if isinstance(v, (*_MUTABLE, tuple))]
        elif isinstance(value, (*_MUTABLE, tuple)) and id(value) not in seen:
            seen.add(id(value))
            inner = value.values() if isinstance(value, dict) else value
            pending += [v for v in inner if isinstance(v, (nn.Module, *_MUTABLE, tuple))]
    return list(found.values())


# ---------------------------------------------------------------------------------------------------------------------


class _Attributes:
    """A module's ``__dict__`` without what belongs to ``nn.Module`` itself."""

    __slots__ = ("owner",)

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def read(self) -> dict[str, Any]:
        return {k: v for k, v in self.owner.__dict__.items() if k not in _NOT_MEMORY}

    def write(self, contents: Mapping[str, Any]) -> None:
        attributes = self.owner.__dict__
        for key in [k for k in attributes if k not in _NOT_MEMORY and k not in contents]:
            del attributes[key]
        attributes.update(contents)


def _write_dict(place: dict[Any, Any], contents: dict[Any, Any]) -> None:
    if list(place) != list(contents):
        place.clear()
    if isinstance(place, OrderedDict):
        OrderedDict.update(place, contents)
    else:
        dict.update(place, contents)  # not the method of a subclass: that of Counter adds


def _nested_stores(owner: Any, name: tuple[str, ...], value: Any, seen: set[int], stores: list[Store]) -> None:
    if value is None or isinstance(value, _ATOMS):
        if isinstance(value, tuple) and len(value) <= _LARGE_CONTAINER and not holds_scalars(value):
            for index, inner in enumerate(value):
                _nested_stores(owner, (*name, str(index)), inner, seen, stores)
        return
    if _is_array(value) or _is_random(value):
        stores.append(Store(owner, name, value))
        return
    places: list[tuple[tuple[str, ...], Any]] = [(name, value)] if isinstance(value, _MUTABLE) else []
    if len(name) <= _DEPTH and is_foreign(value):
        # A subclass of dict has both entries and attributes, which may have the same names.
        places.append(((*name, "__dict__") if places else name, value.__dict__))
    for path, place in places:
        if id(place) in seen:
            continue
        seen.add(id(place))
        store = Store(owner, path, place)
        stores.append(store)
        for key, inner in store.entries():
            _nested_stores(owner, (*path, str(key)), inner, seen, stores)


def holds_scalars(value: tuple[Any, ...]) -> bool:
    """Whether a tuple holds numbers, strings and None alone, as a kernel size does."""
    return all(isinstance(inner, _SCALARS) for inner in value)


def tuple_leaves(value: tuple[Any, ...]) -> tuple[list[Any], TreeSpec]:
    """What a tuple and the tuples in it hold. Lists and dicts stay whole: they are places of their own."""
    return tree_flatten(value, is_leaf=lambda inner: not isinstance(inner, tuple))


def is_foreign(value: Any) -> bool:
    """A user's own object, whose attributes may be state; not one of a framework or the standard library."""
    cls = type(value)
    package = cls.__module__.partition(".")[0]
    if package in _FRAMEWORKS:
        return False
    if package in sys.stdlib_module_names and package != "__main__" and cls.__name__ not in _OPEN_STANDARD_CLASSES:
        return False
    return hasattr(value, "__dict__") and not isinstance(value, type)


def _is_array(value: Any) -> bool:
    cls = type(value)
    if cls.__module__ != "numpy" or cls.__name__ != "ndarray":
        return False
    return bool(value.nbytes <= _ARRAY_LIMIT_BYTES and value.flags.writeable)


def _is_random(value: Any) -> bool:
    """A random generator of torch, Python or NumPy that is an object of its own."""
    cls = type(value)
    if cls is torch.Generator or issubclass(cls, random.Random):
        return True
    return cls.__module__.startswith("numpy.random") and cls.__name__ in ("Generator", "RandomState")


def _random_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator) or type(generator).__name__ == "RandomState":
        return generator.get_state()
    return generator.bit_generator.state


def _set_random_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator) or type(generator).__name__ == "RandomState":
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
