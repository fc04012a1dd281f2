"""
Models that hold no memory
==========================

A plan needs sizes, not values. A model whose parameters are fake tensors, or on the meta device, is planned like any
other, for a training that would not fit here: every operation says what its result would take, and computes nothing.
What needs values is left open:

* Tensors take few bits where the operations that made them say so (``ops/value_bounds.py``), not where values do.
* That a treatment gives the results of the plain region cannot be proved. Time chunks are refused where they do other
  work than the whole, and compared with it at their first real use.
* An operation's own workspace is not seen, and there is no time: it is counted in bytes moved.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memopt.checkpointing import restore_snapshot, take_snapshot
from lightning_memopt.measuring.storage_trace import fake_mode
from lightning_memopt.ops.value_bounds import ValueBounds, is_fake

# What torch.autocast("cuda") says where there is no CUDA.
_NO_CUDA = re.compile("(?s).*CUDA is not available.*Disabling")
_BUILD = "Build the model inside `with torch.device('meta'):`"


class NoMemoryError(ValueError):
    """A model that holds no memory cannot be planned as it is."""


@contextmanager
def computing_nothing(model: nn.Module) -> Iterator[None]:
    """Within, what runs on ``model`` computes nothing if it holds no memory; any other model is left as it is.

    Parameters and buffers on the meta device are replaced by fake ones on the CPU meanwhile: no step can run on meta
    tensors, whose device is that of none of their inputs.

    Raises:
        NoMemoryError: only some parameters hold memory, or they are on a CUDA device that is not here; the forward
            switches on autocast for such a device, is given tensors that hold memory, or reads a value.
    """
    mode = mode_of(model)
    if mode is None:
        yield
        return
    try:
        with ExitStack() as stack:
            stack.enter_context(mode)
            stack.enter_context(ValueBounds())
            if not torch.cuda.is_available():
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("error", message=_NO_CUDA.pattern, category=UserWarning)
            stack.enter_context(_off_the_meta_device(model))
            yield
    except UserWarning as warning:
        if not _NO_CUDA.match(str(warning)):  # somebody turns warnings into errors
            raise
        raise NoMemoryError(
            f"The forward of a model without memory switches on autocast for CUDA, which is not here ({warning}). "
            'Use torch.autocast("cpu", dtype=...) in example_forward, which casts the same operations as a rule.'
        ) from None
    except AssertionError as error:
        if "convert all Tensors to FakeTensors" not in str(error):
            raise
        raise NoMemoryError(
            "The model holds no memory, but example_forward gave it a tensor that does. Make the batch inside "
            "example_forward (torch.empty of its shape and dtype will do), or in the mode that the model was built in."
        ) from error
    except DataDependentOutputException as error:
        raise NoMemoryError(
            f"The model holds no memory, and its forward reads a value ({error}), as `.item()` or an `if` on a tensor "
            "does. Leave that out of example_forward or training_step, or plan with a model that holds memory, on the "
            "command line without --shapes-only."
        ) from error


@contextmanager
def without_modes() -> Iterator[None]:
    """Within, no mode watches operations; fake tensors stay what they are."""
    mode = fake_mode()
    with _disable_current_modes(), ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            stack.enter_context(ValueBounds())
        yield


def mode_of(model: nn.Module) -> Any:
    """The mode that ``model`` must run in; None if it holds memory.

    Raises:
        NoMemoryError: it cannot run in one.
    """
    tensors = _tensors_of(model)
    without = [tensor for tensor in tensors if _without_memory(tensor)]
    if not without:
        return None
    if len(without) < len(tensors):
        raise NoMemoryError(
            f"{len(without)} of {len(tensors)} parameters and buffers are fake or on the meta device, the others hold "
            f"memory. {_BUILD}, all of them."
        )
    modes = {id(mode): mode for tensor in tensors if (mode := getattr(tensor, "fake_mode", None)) is not None}
    if len(modes) > 1 or (modes and any(tensor.is_meta for tensor in tensors)):
        raise NoMemoryError(
            f"The parameters are fake tensors of more than one kind. {_BUILD}, all of them in the same."
        )
    if any(tensor.device.type == "cuda" for tensor in tensors) and not torch.cuda.is_available():
        raise NoMemoryError(
            "The parameters are fake tensors on a CUDA device, and without CUDA in this process torch neither runs "
            f"their backward nor chooses the attention kernels of such a device. {_BUILD}."
        )
    return next(iter(modes.values())) if modes else (fake_mode() or FakeTensorMode())


def _tensors_of(model: nn.Module) -> list[Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    return [tensor for tensor in tensors if not nn.parameter.is_lazy(tensor)]


def _without_memory(tensor: Tensor) -> bool:
    return tensor.is_meta or is_fake(tensor)


@contextmanager
def _off_the_meta_device(model: nn.Module) -> Iterator[None]:
    """Within, what lies on the meta device is fake: parameters, buffers, and states that modules keep by themselves."""
    made: dict[int, Any] = {}  # a tensor with two names is one tensor
    parameters = [(module._parameters, name, p) for module in model.modules() for name, p in module._parameters.items()]
    snapshot = take_snapshot(model, copy=False)
    try:
        for registered, name, parameter in parameters:
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(fake_like(parameter), parameter.requires_grad)
                registered[name] = made[id(parameter)]
        for store in snapshot._stores:
            found = {key: value for key, value in store.entries() if isinstance(value, Tensor) and value.is_meta}
            if found and not store.holds_parameters:
                contents = store.read()
                for key, value in found.items():
                    contents[key] = made.setdefault(id(value), fake_like(value))
                store.write(contents)
        yield
    finally:
        for registered, name, parameter in parameters:
            registered[name] = parameter
        restore_snapshot(snapshot)


def fake_like(tensor: Tensor) -> Tensor:
    """A fake tensor on the CPU, where a fake mode is active, with the shape of one that is on the meta device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
