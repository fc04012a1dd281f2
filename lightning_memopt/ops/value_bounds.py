"""
What is known of values that nobody can read
============================================

Fake tensors have a shape and no values. Whether such a tensor fits into few bits can only follow from the operations
that made it: a comparison gives 0 and 1, a copy or a stack of such tensors too, the sum of three of them at most 3.
:class:`ValueBounds` watches operations and notes what follows; what is not in its table is not known. So it may miss
that a tensor is binary (a neuron written as arithmetic on floats), and never says so of one that is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Bounds(NamedTuple):
    """The values of a tensor: integers from 0 to ``largest``, or 0 and one other value if ``scaled``."""

    largest: int
    scaled: bool = False

    @property
    def bits(self) -> int:
        """The fewest bits of 1, 2, 4 and 8 that hold each value."""
        return next(bits for bits in (1, 2, 4, 8) if self.largest < 2**bits)


_BINARY = Bounds(1)
_LARGEST = 255  # in 8 bits
# By the id of a storage, which is kept until it is gone.
_KNOWN: dict[int, tuple[weakref.ref[torch.UntypedStorage], torch.dtype, Bounds]] = {}


def is_fake(tensor: object) -> bool:
    """Whether ``tensor`` has a shape, a dtype and a device, but no memory: nothing can be read from it."""
    return isinstance(tensor, FakeTensor)


def is_plain(tensor: object) -> bool:
    """Whether ``tensor`` is of no subclass that would have ideas of its own: no parameter, but it may be fake."""
    return type(tensor) is Tensor or (isinstance(tensor, FakeTensor) and not isinstance(tensor, nn.Parameter))


def bounds_of(tensor: Tensor) -> Bounds | None:
    """What is known of the values of a fake tensor; None if nothing."""
    if tensor.dtype == torch.bool:
        return _BINARY
    known = _KNOWN.get(int(tensor.untyped_storage()._cdata)) if tensor.layout is torch.strided else None
    if known is None or known[1] != tensor.dtype or known[0]() is None:
        return None
    return known[2]


class ValueBounds(TorchDispatchMode):
    """Notes what follows for the values of the tensors that operations return or write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        bounds = _follows(func, args, kwargs)
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            for written in _written(func, args, kwargs):
                whole = written.numel() * written.element_size() == written.untyped_storage().nbytes()
                _note(written, bounds if whole else _either([bounds_of(written), bounds]))
        elif bounds is not None:
            first = out[0] if isinstance(out, (tuple, list)) and out else out
            given = {leaf.untyped_storage()._cdata for leaf in _strided(tree_leaves((args, kwargs)))}
            if isinstance(first, Tensor) and first.untyped_storage()._cdata not in given:
                _note(first, bounds)
        return out


def _note(tensor: Tensor, bounds: Bounds | None) -> None:
    storage = tensor.untyped_storage()
    key = int(storage._cdata)
    if bounds is None:
        _KNOWN.pop(key, None)
    else:
        _KNOWN[key] = (weakref.ref(storage, lambda _: _KNOWN.pop(key, None)), tensor.dtype, bounds)


def _strided(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return _strided(
        leaf
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(values.get(argument.name))
    )


# ---------------------------------------------------------------------------------------------------------------------
# What follows from an operation

# Their result holds values of their first argument.
_SELECT = frozenset(
    {
        *("clone", "_to_copy", "flip", "roll", "repeat", "index", "index_select", "gather", "relu", "abs"),
        *("max_pool2d_with_indices", "max_pool3d_with_indices", "upsample_nearest2d", "_reshape_copy"),
    }
)
# Memory that nobody has written to is somebody's mistake to read: it holds what will be written.
_ZEROS = frozenset(
    {
        *("zeros", "zeros_like", "new_zeros", "zero", "empty", "empty_like", "new_empty", "empty_strided"),
        *("new_empty_strided", "empty_permuted"),
    }
)
_ONES = frozenset({"ones", "ones_like", "new_ones", "eye", "bernoulli"})
# The position of the value that they fill a tensor with.
_FILL = {"full": 1, "full_like": 1, "new_full": 2, "fill": 1, "scalar_tensor": 0, "copy": 1}


def _follows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bounds | None:
    """What is known of the first result of an operation before it has run, and of what it writes to."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    if name in _ZEROS:
        return Bounds(0)
    if name in _ONES:
        return _BINARY
    if name in _FILL:
        at = _FILL[name]
        return _bounds(args[at] if len(args) > at else kwargs.get("fill_value"))
    if name in _SELECT:
        return _bounds(args[0])
    if name in ("stack", "cat"):
        return _either(map(_bounds, args[0]))
    if name in ("maximum", "minimum"):
        return _either(map(_bounds, args[:2]))
    if name == "where" and len(args) == 3:
        return _either(map(_bounds, args[1:3]))
    if name == "masked_fill":
        return _either([_bounds(args[0]), _bounds(args[2])])
    if name == "constant_pad_nd":
        return _either([_bounds(args[0]), _bounds(args[2] if len(args) > 2 else 0)])
    if name == "heaviside":
        return _either([_BINARY, _bounds(args[1])])
    if name == "randint":
        return _bounds(args[1] - 1) if func._overloadname.startswith("low") and args[0] >= 0 else _bounds(args[0] - 1)
    if name in ("mul", "div") and len(args) > 1 and "rounding_mode" not in kwargs:
        return _scaled(args[0], args[1]) if name == "div" else _product(args[0], args[1])
    if name == "add" and len(args) == 2 and kwargs.get("alpha", 1) == 1:
        return _sum(_bounds(args[0]), _bounds(args[1]))
    if name == "rsub" and args[1] == 1 and len(args) == 2 and kwargs.get("alpha", 1) == 1:
        known = _bounds(args[0])
        return _BINARY if known is not None and known.largest <= 1 and not known.scaled else None
    return None


def _bounds(value: Any) -> Bounds | None:
    """Of a tensor or a number."""
    if isinstance(value, Tensor):
        return bounds_of(value)
    if isinstance(value, (bool, int, float)) and 0 <= value <= _LARGEST and value == int(value):
        return Bounds(int(value))
    return None


def _either(known: Iterable[Bounds | None]) -> Bounds | None:
    """Of values that come from one of several tensors."""
    largest, scaled = 0, False
    for number, bounds in enumerate(known):
        if bounds is None:
            return None
        if number and (scaled or bounds.scaled) and largest and bounds.largest:
            return None  # zeros and two other values
        largest, scaled = max(largest, bounds.largest), scaled or bounds.scaled
    return Bounds(largest, scaled)


def _sum(a: Bounds | None, b: Bounds | None) -> Bounds | None:
    if a is None or b is None or a.scaled or b.scaled or a.largest + b.largest > _LARGEST:
        return None
    return Bounds(a.largest + b.largest)


def _product(a: Any, b: Any) -> Bounds | None:
    if isinstance(b, (int, float)):
        return _scaled(a, b)
    x, y = _bounds(a), _bounds(b)
    if x is None or y is None or x.largest * y.largest > _LARGEST:
        return None
    if (x.scaled or y.scaled) and max(x.largest, y.largest) > 1:
        return None
    return Bounds(x.largest * y.largest, x.scaled or y.scaled)


def _scaled(tensor: Any, factor: Any) -> Bounds | None:
    """Times or divided by a positive number."""
    bounds = _bounds(tensor)
    if bounds is None or not isinstance(factor, (int, float)) or not 0 < factor < float("inf"):
        return None
    if factor == 1 or bounds.largest == 0:
        return bounds
    return Bounds(1, scaled=True) if bounds.largest == 1 else None
