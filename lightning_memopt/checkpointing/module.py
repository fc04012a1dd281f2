"""
Checkpointed modules
====================

:func:`checkpoint_module` gives a module a new class, made for it: a subclass of its own class whose ``forward`` runs as
a region. The object stays the same, and with it its names, parameters, buffers, hooks, state_dict and aliases;
``isinstance`` still holds, and the new class carries the name of the old one. :func:`unwrap_module` gives the old class
back.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from lightning_memopt.checkpointing.chunks import check_chunks_are_safe, refuse_norms, run_pieces, split_arguments
from lightning_memopt.checkpointing.compiled import compiled_region
from lightning_memopt.checkpointing.compressors import SpikeCompressor
from lightning_memopt.checkpointing.engine import check_compressor, in_transform, run_region
from lightning_memopt.checkpointing.parts import TreatmentFacts, run_treated
from lightning_memopt.checkpointing.region import TREATMENTS, Region, RegionConfig, RegionFacts, Treatment
from lightning_memopt.checkpointing.runs import Runs
from lightning_memopt.checkpointing.stores import REGION_ATTRIBUTE

M = TypeVar("M", bound=nn.Module)


@dataclass
class _ModuleRegion:
    """What a checkpointed module carries: its configuration and what it learned in its first calls."""

    config: RegionConfig
    facts: RegionFacts = field(default_factory=RegionFacts)
    treatment_facts: TreatmentFacts = field(default_factory=TreatmentFacts)
    safe_chunks: set[Any] = field(default_factory=set)
    runs: Runs = field(default_factory=Runs)


def checkpoint_module(
    module: M,
    *,
    treatment: Treatment = "recompute",
    compressor: SpikeCompressor | None = None,
    chunks: int = 1,
    cheap_chunks: int = 0,
    chunked_args: Sequence[int | str] = (0,),
    time_dim: int = 0,
    compressed_args: Sequence[int | str] | None = None,
    check_chunks: bool = True,
    name: str | None = None,
) -> M:
    """Make ``module`` recompute its intermediate tensors in backward, or some of them, or store them in fewer bits.

    Args:
        module: any module. It is changed in place and stays the same object.
        treatment: ``"recompute"`` stores the inputs alone and runs the module again. ``"pack"`` runs nothing again and
            stores masks, spikes and other small integers in 1 to 8 bits an element. ``"recompute_cheap"`` keeps the
            outputs of products (linear layers, convolutions, attention, recurrent layers), runs everything else
            again, and packs as well. The arguments below except ``name`` belong to ``"recompute"``.
        compressor: how to store tensor inputs that it can hold exactly; the others are stored as they are.
        chunks: process the inputs in this many pieces along time, one after the other, each a region of its own.
        cheap_chunks: treat so many of the last pieces as ``"recompute_cheap"`` does, so that their products do not run
            again. The backward pass comes to them first.
        chunked_args: positions or keyword names of the arguments to split along time.
        time_dim: the dimension that is time, in inputs and outputs.
        compressed_args: positions or keyword names of the arguments that may be packed. By default every tensor
            argument that proved binary in the first calls is.
        check_chunks: prove at the first call with each input shape that pieces give what the whole gives. Costs two
            forward passes without gradients, once.
        name: how errors call this module; by default its class name.

    Returns:
        ``module`` itself. Its parameters, names, state_dict keys, hooks, aliases and class name are unchanged. Applying
        it again with the same arguments changes nothing; with others, the new ones count.

    Raises:
        TypeError: if ``module`` is not a module that can be changed, or an argument has the wrong type.
        ValueError: if ``chunks`` is below 1, ``cheap_chunks`` not below ``chunks``, ``treatment`` is unknown or given
            arguments of another, or the module has uninitialized (lazy) parameters.

    Example:
        >>> block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> checkpoint_module(block) is block
        True
        >>> type(block).__name__, isinstance(block, torch.nn.Sequential)
        ('Sequential', True)
    """
    check_compressor(compressor)
    config = RegionConfig(
        treatment=_checked_treatment(treatment),
        compressor=compressor,
        chunks=_checked_chunks(chunks),
        cheap_chunks=_checked_cheap_chunks(cheap_chunks, chunks),
        chunked_args=_checked_names("chunked_args", chunked_args),
        time_dim=_checked_time_dim(time_dim),
        compressed_args=None if compressed_args is None else _checked_names("compressed_args", compressed_args),
        check_chunks=_checked("check_chunks", check_chunks, bool),
        name=None if name is None else _checked("name", name, str),
    )
    _check_belongs_to_treatment(config)
    _check_module(module)
    current = region_config(module)
    if current == config:
        return module
    if current is None and not _is_checkpointed_class(type(module)):
        _set_class(module, _checkpointed_class(type(module)))
    region: _ModuleRegion | None = module.__dict__.get(REGION_ATTRIBUTE)
    module.__dict__[REGION_ATTRIBUTE] = _ModuleRegion(config, runs=Runs() if region is None else region.runs)
    return module


def unwrap_module(module: M) -> M:
    """Undo :func:`checkpoint_module`; a module that is not checkpointed is returned as it is.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> type(unwrap_module(checkpoint_module(layer))) is torch.nn.Linear
        True
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"unwrap_module expects a torch.nn.Module, got {type(module).__name__}.")
    region: _ModuleRegion | None = module.__dict__.pop(REGION_ATTRIBUTE, None)
    if region is not None:
        region.runs.hand_over()
    # A class put on top since (fully_shard) stays; without its region our class below it runs the plain forward.
    if "_memopt_original_class" in vars(type(module)):
        _set_class(module, vars(type(module))["_memopt_original_class"])
    return module


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    # Past a module's own __setattr__, which may refuse what it does not know.
    object.__setattr__(module, "__class__", cls)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether :func:`checkpoint_module` was applied to ``module`` itself (not to a part of it)."""
    return REGION_ATTRIBUTE in module.__dict__


def region_config(module: nn.Module) -> RegionConfig | None:
    """How ``module`` is checkpointed, None if it is not."""
    region: _ModuleRegion | None = module.__dict__.get(REGION_ATTRIBUTE)
    return None if region is None else region.config


def _checked(what: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{what} must be a {kind.__name__}, got {value!r}.")
    return value


def _checked_treatment(treatment: object) -> Treatment:
    for known in TREATMENTS:
        if treatment == known:
            return known
    raise ValueError(f"treatment must be one of {', '.join(map(repr, TREATMENTS))}, got {treatment!r}.")


def _check_belongs_to_treatment(config: RegionConfig) -> None:
    if config.treatment == "recompute":
        return
    default = RegionConfig()
    given = [
        option
        for option in (
            *("compressor", "compressed_args"),
            *("chunks", "cheap_chunks", "chunked_args", "time_dim", "check_chunks"),
        )
        if getattr(config, option) != getattr(default, option)
    ]
    if given:
        raise ValueError(
            f"{', '.join(given)}: only for treatment='recompute', got treatment={config.treatment!r}. Leave them out: "
            "this treatment finds by itself what can be packed, and takes no time chunks."
        )


def _checked_chunks(chunks: object) -> int:
    if isinstance(chunks, bool) or not isinstance(chunks, int):
        raise TypeError(f"chunks must be an int, got {chunks!r}.")
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}.")
    return chunks


def _checked_cheap_chunks(cheap: object, chunks: int) -> int:
    if isinstance(cheap, bool) or not isinstance(cheap, int):
        raise TypeError(f"cheap_chunks must be an int, got {cheap!r}.")
    if not 0 <= cheap < chunks:
        raise ValueError(
            f"cheap_chunks must be at least 0 and below chunks, which is {chunks}; got {cheap}. For all of the region "
            "use treatment='recompute_cheap'."
        )
    return cheap


def _checked_time_dim(time_dim: object) -> int:
    if isinstance(time_dim, bool) or not isinstance(time_dim, int):
        raise TypeError(f"time_dim must be an int, got {time_dim!r}.")
    return time_dim


def _checked_names(what: str, names: object) -> tuple[int | str, ...]:
    if isinstance(names, (str, int)) or not isinstance(names, Sequence):
        raise TypeError(f"{what} must be a sequence of positions and keyword names, got {names!r}.")
    for name in names:
        if isinstance(name, bool) or not isinstance(name, (int, str)) or (isinstance(name, int) and name < 0):
            raise TypeError(f"{what} holds positions from 0 on and keyword names, got {name!r}.")
    return tuple(names)


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"checkpoint_module expects a torch.nn.Module, got {type(module).__name__}.")
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"checkpoint_module cannot change {kind}: it is a compiled ScriptModule.")
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and next(part.buffers(), None) is not None:
            raise TypeError(
                f"checkpoint_module cannot change {kind}: {name} inside it is a ScriptModule with buffers, whose state "
                "cannot be kept for the recomputation. Leave it plain, or checkpoint the parts around it."
            )
    if "_orig_mod" in module._modules:
        raise TypeError("checkpoint_module must be applied before torch.compile, got a compiled module.")
    if "forward" in module.__dict__:
        raise TypeError(
            f"checkpoint_module cannot change {kind}: its forward was replaced on the object itself. Remove the "
            "replacement, or apply checkpoint_module to a module around it."
        )
    lazy = [n for n, p in module.named_parameters() if is_lazy(p)]
    if lazy:
        raise ValueError(
            f"checkpoint_module needs initialized parameters, but {lazy[0]} of {kind} is lazy. Run one forward first."
        )


# ---------------------------------------------------------------------------------------------------------------------
# The class


_CLASSES: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def _is_checkpointed_class(cls: type) -> bool:
    return any("_memopt_original_class" in vars(base) for base in cls.__mro__)


def _checkpointed_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``original`` whose forward runs as a region; one for each class."""
    known = _CLASSES.get(original)
    if known is not None:
        return known

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = super(checkpointed, self).forward  # type: ignore[misc]
        region = self.__dict__.get(REGION_ATTRIBUTE)
        if region is None or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return _run(self, plain, args, kwargs, region)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = super(checkpointed, self).__reduce_ex__(protocol)
        make, make_args, *rest = reduced
        plain_args = tuple(original if arg is checkpointed else arg for arg in make_args)
        return (_remake, (make, plain_args), *rest)

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> Any:
        # The class defines how it is copied; its copy gets the treatment of the original.
        region = self.__dict__.pop(REGION_ATTRIBUTE, None)
        self.__class__ = original
        try:
            copy = original.__deepcopy__(self, memo)  # type: ignore[attr-defined]
        finally:
            self.__class__ = checkpointed
            if region is not None:
                self.__dict__[REGION_ATTRIBUTE] = region
        if region is not None and type(copy) is original:
            copy.__dict__[REGION_ATTRIBUTE] = _ModuleRegion(region.config)
            copy.__class__ = checkpointed
        return copy

    namespace: dict[str, Any] = {
        "forward": functools.wraps(original.forward)(forward),
        "__reduce_ex__": reduce_ex,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_memopt_original_class": original,
    }
    if hasattr(original, "__deepcopy__"):
        namespace["__deepcopy__"] = deepcopy
    make_class: Any = type(original)  # the metaclass
    try:
        checkpointed: type[nn.Module] = make_class(original.__name__, (original,), namespace)
    except Exception as error:
        raise TypeError(
            f"checkpoint_module cannot change {original.__name__}: its class allows no subclass ({error}). Apply it "
            "to a module around this one, or use checkpoint(module, x)."
        ) from error
    _CLASSES[original] = checkpointed
    return checkpointed


def _remake(make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    """Called by pickle and deepcopy: an object of the original class, given its checkpointed class."""
    module = make(*args)
    if not _is_checkpointed_class(type(module)):
        module.__class__ = _checkpointed_class(type(module))
    return module


def _run(module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any, region: _ModuleRegion) -> Any:
    config = region.config
    if config.treatment != "recompute":
        return _run_treated(module, plain, args, kwargs, region)
    if config.chunks == 1:
        return _run_once(module, plain, args, kwargs, region)
    label = _label(module, config)
    pieces = split_arguments(args, kwargs, config, label)
    if config.check_chunks and torch.compiler.is_compiling():
        refuse_norms(module, label)
    elif config.check_chunks:
        shapes = (
            *(m.training for m in module.modules()),
            *(tuple(t.shape) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)),
        )
        if shapes not in region.safe_chunks:
            check_chunks_are_safe(module, plain, args, kwargs, pieces, config, label)
            region.safe_chunks.add(shapes)
    recomputed = [_run_once] * (config.chunks - config.cheap_chunks)
    runs = iter([*recomputed, *[_run_treated] * config.cheap_chunks])
    return run_pieces(lambda *a, **k: next(runs)(module, plain, a, k, region), pieces, config, label)


def _run_treated(module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any, region: _ModuleRegion) -> Any:
    # The compiler decides by itself what to recompute, and functorch takes gradients in its own way.
    if torch.compiler.is_compiling() or in_transform():
        return plain(*args, **kwargs)
    label = _label(module, region.config)
    cheap = region.config.treatment != "pack"
    return run_treated(module, plain, args, kwargs, region.treatment_facts, region.runs, label, recompute_cheap=cheap)


def _run_once(module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any, region: _ModuleRegion) -> Any:
    config = region.config
    if torch.compiler.is_compiling():
        label = _label(module, config)
        return compiled_region(
            plain, args, kwargs, config.compressor, config.compressed_args, lambda: list(module.modules()), label
        )
    treated = Region(region.facts, config.compressor, config.compressed_args, _label(module, config), region.runs)
    return run_region(plain, args, kwargs, treated, list(module.modules()))


def _label(module: nn.Module, config: RegionConfig) -> str:
    return f"{config.name} ({type(module).__name__})" if config.name else type(module).__name__


def set_config(module: nn.Module, config: RegionConfig | None) -> None:
    """Checkpoint ``module`` as ``config`` says, or not at all for None."""
    if config is None:
        unwrap_module(module)
        return
    checkpoint_module(module, **{entry.name: getattr(config, entry.name) for entry in fields(config)})
