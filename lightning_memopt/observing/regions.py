"""
Which modules are regions
=========================

A region is a module whose activations get one treatment. Users name regions by class; when they name none, the model's
own repetition says where its blocks are:

1. classes of sibling modules that repeat and hold weights, outermost first. ``Sequential``, ``ModuleList`` and the
   like are looked through; a plain ``Sequential`` of layers counts as a block where its sequence of classes repeats.
   Siblings that differ in size and consist almost entirely of smaller repeated blocks, each of several layers, are
   stages, and their blocks are taken;
2. else several modules that each hold a neuron and weights;
3. else, in a flat spiking network, the repeated weight layers and neurons themselves;
4. else the largest children.

Regions never overlap and are never the model itself. Where bytes count, what lies outside of them (a stem, a head) is
looked at as well: :func:`with_surroundings`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

# (top-level package, class name) of the base classes that neurons derive from, so that no library has to be imported.
_NEURON_BASES = frozenset(
    {
        ("spikingjelly", "BaseNode"),
        ("snntorch", "SpikingNeuron"),
        ("snntorch", "LIF"),
        ("norse", "SNN"),
        ("norse", "SNNCell"),
        ("norse", "SNNRecurrent"),
        ("norse", "SNNRecurrentCell"),
        ("sinabs", "StatefulLayer"),
        ("lava", "Neuron"),
    }
)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Modules of torch that have children and yet are one layer.
_LAYERS_WITH_CHILDREN = (nn.MultiheadAttention,)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)

# A stage consists of its blocks: less than this share of the weights in blocks, and it is a block with some inside.
_STAGE_SHARE = 0.75
# Repeated blocks that hold less than this share of the layers are not what the model consists of.
_COVERED_SHARE = 0.5
# A child that holds less than this share of the weights of the largest child is small.
_LARGEST_SHARE = 0.05


@dataclass(frozen=True)
class Region:
    """A module of the model, with its name and the further names it is registered under."""

    path: str
    module: nn.Module
    aliases: tuple[str, ...] = ()
    outside: bool = False
    """Whether it lies outside of what was named or repeats: only looked at if it saves something."""


@dataclass(frozen=True)
class FoundRegions:
    """Regions in model order, and in words how they were found."""

    regions: tuple[Region, ...]
    reason: str


TargetClasses = type[nn.Module] | Sequence[type[nn.Module]]


def target_classes(targets: object) -> tuple[type[nn.Module], ...]:
    """``targets`` as a tuple of module classes.

    Raises:
        TypeError: ``targets`` is neither a module class nor a sequence of them.
        ValueError: an empty sequence.
    """
    classes = tuple(targets) if isinstance(targets, (tuple, list, set, frozenset)) else (targets,)
    for item in classes:
        if not isinstance(item, type) or not issubclass(item, nn.Module):
            # Not the value: of a tensor it fills the screen.
            plain = isinstance(item, (type, str, int, float, type(None)))
            found = repr(item) if plain else f"an instance of {type(item).__name__}"
            raise TypeError(
                f"targets must be a torch.nn.Module class, a sequence of such classes, or None; found {found}."
            )
    if not classes:
        raise ValueError("targets is empty; name at least one module class, or pass None to let the model be searched.")
    return classes


def find_targets(model: nn.Module, targets: TargetClasses | None = None) -> FoundRegions:
    """Find the regions of ``model``: outermost modules of the classes ``targets``, or its repeated blocks for None.

    A module registered under several names is one region.

    Raises:
        TypeError: ``targets`` is neither a module class nor a sequence of them.
        ValueError: there is no such module in the model, or None was given and nothing in the model can be a region.

    Example:
        >>> import torch
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2), num_layers=3)
        >>> found = find_targets(model)
        >>> [region.path for region in found.regions]
        ['layers.0', 'layers.1', 'layers.2']
        >>> found.reason
        'repeated blocks: 3 TransformerEncoderLayer'
    """
    if targets is not None:
        classes = target_classes(targets)
        names = ", ".join(cls.__name__ for cls in classes)
        modules = list(_outermost(model, classes))
        if not modules:
            raise ValueError(_not_found(model, classes, names))
        return FoundRegions(_as_regions(model, modules), f"given classes: {names}")
    for search in (_repeated_blocks, _blocks_with_neurons, _flat_layers, _largest_children):
        chosen, reason = search(model)
        # TorchScript takes no hooks and cannot be treated.
        modules = [module for module in chosen if not isinstance(module, torch.jit.ScriptModule)]
        if modules:
            return FoundRegions(_as_regions(model, modules), reason)
    raise ValueError(
        f"{type(model).__name__} has no child modules with weights, so no region was found. Name the classes of the "
        "modules to be checkpointed in targets."
    )


def with_surroundings(model: nn.Module, found: FoundRegions) -> FoundRegions:
    """Add the largest modules that lie beside the regions: stems and heads, layer by layer or in one.

    Example:
        >>> model = nn.Sequential(
        ...     nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Sequential(*(nn.TransformerEncoderLayer(4, 1) for _ in range(2)))
        ... )
        >>> [region.path for region in with_surroundings(model, find_targets(model)).regions]
        ['0', '1', '2.0', '2.1']
    """
    chosen = {id(region.module) for region in found.regions}
    covered = {id(inner) for region in found.regions for inner in region.module.modules()}
    beside: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if id(child) in covered:
                continue
            if _is_called(child) and not any(id(inner) in covered for inner in child.modules()):
                beside[id(child)] = child
            else:
                visit(child)

    visit(model)
    regions = _as_regions(model, [*beside.values(), *(region.module for region in found.regions)])
    marked = tuple(replace(region, outside=id(region.module) not in chosen) for region in regions)
    return FoundRegions(marked, found.reason)


def _is_called(module: nn.Module) -> bool:
    """Whether ``module`` is one that a forward calls and that may be run again: no container, no metric."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, torch.jit.ScriptModule)):
        return False
    return not any(cls.__module__.partition(".")[0] == "torchmetrics" for cls in type(module).__mro__)


def is_neuron(module: nn.Module) -> bool:
    """Whether ``module`` is a spiking neuron of SpikingJelly, snnTorch, Norse, sinabs or lava-dl."""
    if any((cls.__module__.partition(".")[0], cls.__name__) in _NEURON_BASES for cls in type(module).__mro__):
        return True
    # Forks and old versions of SpikingJelly: any module that memorizes a potential and has a threshold.
    memories = module.__dict__.get("_memories")
    return isinstance(memories, dict) and "v" in memories and hasattr(module, "v_threshold")


def is_multistep_neuron(module: nn.Module) -> bool:
    """Whether ``module`` is a SpikingJelly neuron in multi-step mode: safe to cut along time, for ``can_chunk``."""
    return (
        is_neuron(module)
        and isinstance(module.__dict__.get("_memories"), dict)
        and (
            getattr(module, "step_mode", None) == "m"
            or any(c.__name__ == "MultiStepModule" for c in type(module).__mro__)
        )
    )


def split_into_children(module: nn.Module) -> tuple[nn.Module, ...]:
    """The children of ``module``, plain containers looked through, for ``split_fn``; empty if fewer than two."""
    children = tuple(_unwrapped_children(module))
    return children if len(children) > 1 and not is_neuron(module) else ()


def names_of_modules(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Every name of every module, by ``id``, in model order.

    By id and not by the module: the hash of a ``torchmetrics.Metric`` changes with its state.
    """
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return {key: tuple(value) for key, value in names.items()}


def as_region(module: nn.Module, names: dict[int, tuple[str, ...]]) -> Region:
    """The region of ``module``, a module that :func:`names_of_modules` saw."""
    path, *aliases = names[id(module)]
    return Region(path, module, tuple(aliases))


def _as_regions(model: nn.Module, modules: Iterable[nn.Module]) -> tuple[Region, ...]:
    """Regions in model order, each module once, without those that lie inside another (through a second name)."""
    names = names_of_modules(model)
    chosen = {id(module): module for module in modules}
    inside = {id(inner) for module in chosen.values() for inner in module.modules() if inner is not module}
    ordered = [chosen[key] for key in names if key in chosen and key not in inside]
    return tuple(as_region(module, names) for module in ordered)


def _outermost(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    for child in model.children():
        if isinstance(child, classes):
            yield child
        else:
            yield from _outermost(child, classes)


def _not_found(model: nn.Module, classes: tuple[type[nn.Module], ...], names: str) -> str:
    if isinstance(model, classes):
        return (
            f"Only the model itself is a {names}, and the model as a whole cannot be a region: recomputing all of it "
            "would free nothing. Name the classes of the blocks inside it."
        )
    present = Counter(type(module).__name__ for module in model.modules() if module is not model)
    listed = ", ".join(f"{name} ({count})" for name, count in present.most_common(12))
    return f"{type(model).__name__} contains no module of class {names}. It contains: {listed or 'no modules'}."


# ---------------------------------------------------------------------------------------------------------------------
# The search for repeated blocks


def _parameters(module: nn.Module) -> int:
    return sum(0 if nn.parameter.is_lazy(p) else p.numel() for p in module.parameters())


def _is_container(module: nn.Module) -> bool:
    """A plain container, whose forward (if any) only runs its children in order."""
    if not isinstance(module, _CONTAINERS):
        return False
    return type(module) in _CONTAINERS or type(module).forward is nn.Sequential.forward


def _is_layer(module: nn.Module) -> bool:
    """One layer: nothing inside it holds weights on its own."""
    if is_neuron(module) or isinstance(module, _LAYERS_WITH_CHILDREN):
        return True
    return not any(name != "parametrizations" and _parameters(child) for name, child in module.named_children())


def _is_sequence_of_layers(module: nn.Module) -> bool:
    return (
        _is_container(module)
        and isinstance(module, nn.Sequential)
        and len(module) > 1
        and all(_is_layer_or_wrapped_layers(child) for child in module.children())
    )


def _is_layer_or_wrapped_layers(module: nn.Module) -> bool:
    """One layer, or a few in a sequence with a forward of its own, as libraries have to run layers over time."""
    if _is_container(module):
        return False
    return _is_layer(module) or (isinstance(module, nn.Sequential) and all(map(_is_layer, module.children())))


def _kind(module: nn.Module) -> tuple[object, ...]:
    """What makes siblings alike: the class, and for plain sequences of layers the classes of the layers."""
    if _is_sequence_of_layers(module):
        return (type(module), *(type(child) for child in module.children()))
    return (type(module),)


def _unwrapped_children(module: nn.Module) -> Iterator[nn.Module]:
    """The children, with plain containers replaced by what they hold, except plain sequences of layers."""
    for child in module.children():
        if _is_container(child) and not _is_sequence_of_layers(child):
            yield from _unwrapped_children(child)
        else:
            yield child


def _siblings(module: nn.Module) -> list[nn.Module]:
    """Unwrapped children; a sequence of layers that no sibling repeats is looked through as well."""
    children = list({id(child): child for child in _unwrapped_children(module)}.values())
    counts = Counter(map(_kind, children))
    siblings: list[nn.Module] = []
    for child in children:
        if _is_sequence_of_layers(child) and counts[_kind(child)] == 1:
            siblings += child.children()
        else:
            siblings.append(child)
    return siblings


def _find_blocks(module: nn.Module) -> list[nn.Module]:
    siblings = _siblings(module)
    groups: dict[tuple[object, ...], list[nn.Module]] = {}
    for sibling in siblings:
        if not _is_layer(sibling) and _parameters(sibling):
            groups.setdefault(_kind(sibling), []).append(sibling)
    blocks: list[nn.Module] = []
    for group in groups.values():
        if len(group) == 1:
            blocks += _find_blocks(group[0])
        else:
            blocks += _blocks_of_stages(group) or group
    return blocks


def _blocks_of_stages(group: list[nn.Module]) -> list[nn.Module]:
    """The blocks inside siblings that are stages, nothing where the siblings are blocks themselves."""
    shapes = [[tuple(p.shape) for p in module.parameters() if not nn.parameter.is_lazy(p)] for module in group]
    if all(shape == shapes[0] for shape in shapes):
        return []
    blocks = [block for module in group for block in _find_blocks(module) if len(_layers(block)) > 1]
    if sum(map(_parameters, blocks)) < _STAGE_SHARE * sum(map(_parameters, group)):
        return []
    return blocks


def _is_weight_layer(module: nn.Module) -> bool:
    return _is_layer(module) and not isinstance(module, (*_NORMS, *_LOOKUPS)) and _parameters(module) > 0


def _layers(module: nn.Module) -> list[nn.Module]:
    """Weight layers and neurons, outermost, each once."""
    found: dict[int, nn.Module] = {}

    def visit(parent: nn.Module) -> None:
        for child in parent.children():
            if is_neuron(child) or _is_weight_layer(child):
                found[id(child)] = child
            else:
                visit(child)

    visit(module)
    return list(found.values())


def _covers(modules: Sequence[nn.Module], model: nn.Module) -> bool:
    inside = {id(inner) for module in modules for inner in module.modules()}
    layers = _layers(model)
    return sum(id(layer) in inside for layer in layers) >= _COVERED_SHARE * len(layers)


def _counted(modules: Iterable[nn.Module]) -> str:
    counts = Counter(type(module).__name__ for module in modules)
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _repeated_blocks(model: nn.Module) -> tuple[list[nn.Module], str]:
    blocks = _find_blocks(model)
    if not _covers(blocks, model):
        return [], ""
    return blocks, f"repeated blocks: {_counted(blocks)}"


def _blocks_with_neurons(model: nn.Module) -> tuple[list[nn.Module], str]:
    parent = model
    while True:
        blocks = [
            child
            for child in _siblings(parent)
            if not _is_layer(child) and _parameters(child) and any(map(is_neuron, child.modules()))
        ]
        if len(blocks) != 1:
            break
        parent = blocks[0]
    if len(blocks) < 2 or not _covers(blocks, model):
        return [], ""
    return blocks, f"{_without_blocks(model)}; modules that hold neurons and weights: {_counted(blocks)}"


def _flat_layers(model: nn.Module) -> tuple[list[nn.Module], str]:
    layers = _layers(model)
    if not any(map(is_neuron, layers)):
        return [], ""
    counts = Counter(type(layer) for layer in layers)
    repeated = [layer for layer in layers if counts[type(layer)] > 1]
    if len(repeated) < 2:
        return [], ""
    return repeated, f"no blocks, a flat spiking network; its repeated layers: {_counted(repeated)}"


def _without_blocks(model: nn.Module) -> str:
    return "no repeated blocks that hold most layers" if _find_blocks(model) else "no repeated blocks"


def _largest_children(model: nn.Module) -> tuple[list[nn.Module], str]:
    parent = model
    while True:
        children = [child for child in _unwrapped_children(parent) if _parameters(child)]
        blocks = [child for child in children if not _is_layer(child)]
        if len(children) != 1 or not blocks:
            break
        parent = blocks[0]
    candidates = blocks or [child for child in children if not isinstance(child, (*_NORMS, *_LOOKUPS))] or children
    if not candidates:
        return [], ""
    least = _LARGEST_SHARE * max(map(_parameters, candidates))
    largest = [child for child in candidates if _parameters(child) >= least]
    neurons = "" if any(map(is_neuron, model.modules())) else " and no neurons"
    return largest, f"{_without_blocks(model)}{neurons}; the largest children: {_counted(largest)}"
