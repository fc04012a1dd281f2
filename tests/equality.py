"""The one question every optimization must answer with yes: is a step of the optimized model the step of the plain one?

`assert_optimized_equals_plain` builds the same model twice from one seed, treats one of them, trains both and compares,
after every step, all that a user can see of it: outputs with their containers, gradients of inputs and parameters,
parameters, buffers, the state that neurons keep outside the state_dict, training flags and the random streams.
Values are compared bit for bit (NaN equals NaN, -0.0 does not equal 0.0).
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Treatment = Callable[[nn.Module], object]
"""Changes a model in place, e.g. `lambda model: checkpoint_module(model.block)`."""

LONGEST_REPORT = 20
"""Differences listed in one failure; a broken state makes every later tensor differ."""

_MODULE_INTERNALS = frozenset(vars(nn.Module())) | {"_is_torch_compile", "_compile_kwargs"}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a model: `model(*args, **kwargs)`."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


def call(*args: Any, **kwargs: Any) -> Call:
    """Write a call down as it would be made."""
    return Call(args, kwargs)


def run_model(model: nn.Module, batch: Call) -> Any:
    """Call the model on the batch: the default step."""
    return model(*batch.args, **batch.kwargs)


def backward_of_outputs(outputs: Any) -> None:
    """Backpropagate a loss in which every differentiable output value has a weight of its own."""
    loss = loss_of(outputs)
    if loss is not None:
        loss.backward()


def loss_of(outputs: Any) -> Tensor | None:
    """Reduce all differentiable tensors of a tree to one scalar; None if there is none.

    A plain sum would give every value the gradient 1, which hides swapped or permuted gradients.
    """
    terms = []
    for leaf in tensors_in(outputs):
        if leaf.requires_grad:
            weights = torch.linspace(-1.0, 2.0, leaf.numel(), dtype=torch.float64).reshape(leaf.shape).to(leaf)
            terms.append((leaf * weights).sum().double())
    return torch.stack(terms).sum() if terms else None


def sgd(model: nn.Module) -> torch.optim.Optimizer | None:
    """Momentum makes a wrong gradient of one step visible in all later ones."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9) if parameters else None


def seed_everything(seed: int) -> None:
    """Seed the Python, NumPy and torch streams."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Where the random streams of this process stand."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that a model holds, by kind and then by name; tensors are the live ones.

    Attributes cover what libraries keep outside the state_dict (SpikingJelly's `_memories`, plain tensors, counters,
    torchmetrics states). Functions, modules and foreign objects among them are left out, and so are our own marks.
    """
    attributes: dict[str, Any] = {}
    flags: dict[str, bool] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        flags[path or "model"] = module.training
        for name, value in vars(module).items():
            if name not in _MODULE_INTERNALS and _is_data(value):
                attributes[f"{path}.{name}" if path else name] = _plain(value)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        "parameter": parameters,
        "gradient": {name: parameter.grad for name, parameter in parameters.items()},
        "buffer": dict(model.named_buffers(remove_duplicate=False)),
        "state_dict key": list(model.state_dict()),
        "attribute": attributes,
        "training flag": flags,
    }


def assert_optimized_equals_plain(
    make_model: Callable[[], nn.Module] | nn.Module,
    treatment: Treatment,
    make_batch: Callable[[], Any],
    *,
    step: Callable[[Any, Any], Any] = run_model,
    backward: Callable[[Any], object] | None = backward_of_outputs,
    between: Callable[[Any], object] | None = None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer | None] = sgd,
    steps: int = 3,
    rtol: float | None = None,
    seed: int = 0,
) -> tuple[nn.Module, nn.Module]:
    """Train a plain and a treated model for some steps and compare all that can be seen after each.

    Args:
        make_model: Builds the model (called twice, from the same seed), or a model to copy.
        treatment: Changes the second model in place before the first step.
        make_batch: Builds one batch; its leaf tensors that require a gradient have it compared.
        step: `step(model, batch)` returns the outputs to compare.
        backward: `backward(outputs)`; None when the step does it itself.
        between: Called with the model after each optimizer step, e.g. to reset neurons. Without it, state is carried.
        make_optimizer: Called with each model; may return None.
        steps: Number of consecutive steps.
        rtol: Tolerance relative to the largest value of a tensor. Only for time chunks of a product.
        seed: Start of all random streams.

    Returns:
        The plain and the optimized model after the last step.

    Raises:
        AssertionError: Names the step, what differs and by how much.
    """
    seed_everything(seed)
    batches = [make_batch() for _ in range(steps)]

    def build() -> nn.Module:
        seed_everything(seed + 1)
        return copy.deepcopy(make_model) if isinstance(make_model, nn.Module) else make_model()

    def train(model: nn.Module) -> list[dict[str, Any]]:
        optimizer = make_optimizer(model)
        records = []
        for number, original in enumerate(batches):
            batch = copy.deepcopy(original)
            if optimizer is not None:
                optimizer.zero_grad()
            outputs = step(model, batch)
            seen = frozen(outputs)
            if backward is not None:
                backward(outputs)
            gradients = [leaf.grad for leaf in tensors_in(batch) if leaf.requires_grad and leaf.is_leaf]
            record = {"output": seen, "input gradient": gradients, **state_of(model)}
            records.append(frozen(record))
            if optimizer is not None:
                optimizer.step()
            if between is not None:
                between(model)
            after = {"random stream": rng_state(), **state_of(model)}
            records[number].update({f"{kind} after the step": frozen(value) for kind, value in after.items()})
        return records

    plain = build()
    expected = train(plain)
    optimized = build()
    treatment(optimized)
    actual = train(optimized)

    problems = []
    for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
        for kind in one:
            exact = kind.startswith(("random stream", "training flag", "state_dict key"))
            found = differences(one[kind], other[kind], rtol=None if exact else rtol)
            problems += [f"step {number}, {kind}{problem}" for problem in found]
    _fail_on(problems, "the optimized model does not equal the plain one")
    return plain, optimized


def assert_same_tree(expected: Any, actual: Any, *, rtol: float | None = None, name: str = "value") -> None:
    """Assert that two trees have the same containers, types, dtypes, shapes, strides and values.

    Raises:
        AssertionError: Names the places that differ and by how much.
    """
    _fail_on([name + problem for problem in differences(expected, actual, rtol=rtol)], f"{name} differs")


def differences(expected: Any, actual: Any, *, rtol: float | None = None, path: str = "") -> Iterator[str]:
    """Yield one sentence per difference between two trees, each starting with the place of the difference."""
    if type(expected) is not type(actual):
        yield f"{path}: expected {_name(expected)}, got {_name(actual)}"
    elif isinstance(expected, Tensor):
        yield from _tensor_differences(expected, actual, rtol, path)
    elif isinstance(expected, np.ndarray):
        if expected.dtype != actual.dtype or not np.array_equal(expected, actual, equal_nan=expected.dtype.kind == "f"):
            yield f"{path}: arrays differ"
    elif isinstance(expected, Mapping):
        if list(expected) != list(actual):
            gone = [key for key in expected if key not in actual]
            new = [key for key in actual if key not in expected]
            yield f"{path}: keys differ: missing {gone}, new {new}" + ("" if gone or new else ", order changed")
        for key in expected:
            if key in actual:
                yield from differences(expected[key], actual[key], rtol=rtol, path=f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(actual):
            yield f"{path}: expected {len(expected)} items, got {len(actual)}"
        for index, (one, other) in enumerate(zip(expected, actual, strict=False)):
            yield from differences(one, other, rtol=rtol, path=f"{path}[{index}]")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            one, other = getattr(expected, field.name), getattr(actual, field.name)
            yield from differences(one, other, rtol=rtol, path=f"{path}.{field.name}")
    elif expected != actual and not (expected != expected and actual != actual):
        yield f"{path}: expected {expected!r}, got {actual!r}"


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree in order, each tensor object once."""
    seen: set[int] = set()

    def walk(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            if id(value) not in seen:
                seen.add(id(value))
                yield value
        elif isinstance(value, Mapping):
            for item in value.values():
                yield from walk(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from walk(item)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield from walk(getattr(value, field.name))

    return walk(tree)


def frozen(tree: Any) -> Any:
    """Copy a tree so that later steps cannot change it; tensors keep dtype, strides and `requires_grad`."""
    if isinstance(tree, Tensor):
        data = tree.detach().clone()
        same = data.as_subclass(type(tree)) if type(tree) not in (Tensor, nn.Parameter) else data
        same = nn.Parameter(data, requires_grad=False) if isinstance(tree, nn.Parameter) else same
        return same.requires_grad_(tree.requires_grad)
    if isinstance(tree, dict):
        items = {key: frozen(value) for key, value in tree.items()}
        if type(tree) is dict:
            return items
        twin = copy.copy(tree)
        twin.update(items)
        return twin
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(frozen(value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(frozen(value) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        twin = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(twin, field.name, frozen(getattr(tree, field.name)))
        return twin
    return copy.copy(tree)


def _plain(value: Any) -> Any:
    """Generators are objects with a hidden position; compare the position."""
    return {"generator": value.get_state()} if isinstance(value, torch.Generator) else value


def _is_data(value: Any) -> bool:
    if type(value).__module__.startswith("lightning_memopt."):
        return False
    if value is None or isinstance(value, (Tensor, bool, int, float, complex, str, np.ndarray, torch.Generator)):
        return True
    if isinstance(value, Mapping):
        return all(_is_data(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_data(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(_is_data(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False


def _tensor_differences(expected: Tensor, actual: Tensor, rtol: float | None, path: str) -> Iterator[str]:
    for property_name in ("dtype", "shape", "device", "requires_grad", "layout"):
        one, other = getattr(expected, property_name), getattr(actual, property_name)
        if one != other:
            yield f"{path}: expected {property_name} {one}, got {other}"
            if property_name != "requires_grad":
                return
    if expected.layout == torch.strided and expected.numel() and expected.stride() != actual.stride():
        yield f"{path}: expected stride {expected.stride()}, got {actual.stride()}"
    one, other = expected.detach(), actual.detach()
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    differs = one != other
    if one.is_floating_point():
        differs = (differs & ~(one.isnan() & other.isnan())) | ((one.signbit() != other.signbit()) & ~one.isnan())
    if not differs.any():
        return
    wide = torch.complex128 if one.is_complex() else torch.float64
    gap = (one.to(wide) - other.to(wide)).abs().nan_to_num(nan=float("inf"))
    scale = one.to(wide).abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
    largest = gap.max().item()
    if rtol is not None and largest <= rtol * scale:
        return
    place = np.unravel_index(int(torch.where(differs, gap, -1.0).argmax()), tuple(one.shape)) if one.dim() else ()
    place = tuple(int(index) for index in place)
    yield (
        f"{path}: {int(differs.sum())} of {one.numel()} values differ, most at {list(place)}: "
        f"expected {one[place].item()!r}, got {other[place].item()!r} "
        f"(absolute {largest:.3g}, relative to the largest value {largest / scale if scale else float('inf'):.3g})"
    )


def _fail_on(problems: list[str], headline: str) -> None:
    if problems:
        listed = problems[:LONGEST_REPORT]
        rest = [] if len(problems) == len(listed) else [f"... and {len(problems) - len(listed)} more"]
        raise AssertionError("\n  ".join([f"{headline}:", *listed, *rest]))


def _name(value: Any) -> str:
    return "None" if value is None else type(value).__qualname__
