"""Which modules a function may touch: those it is, is bound to, closes over, refers to or is given."""

from __future__ import annotations

import types
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn


def modules_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
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
