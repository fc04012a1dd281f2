"""
One measured step
=================

A trial runs one forward and backward pass of the model as it is treated at the moment. Hooks name the moments when a
region's forward begins and ends, when the gradient of its output arrives (its recomputation is about to start) and when
the gradients of its inputs are complete. Between two such moments the memory has a peak of its own, which belongs to
the region that runs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memopt.measuring import StepMemory, mark_memory, measure_memory
from lightning_memopt.measuring.storage_trace import allocated_bytes, is_timed
from lightning_memopt.observing.gradient_flow import leaves_of
from lightning_memopt.observing.model_state import ModelState
from lightning_memopt.observing.observe import uncompiled

# Names of marks are a kind and the index of the region.
_ENTER, _LEAVE, _BACKWARD, _DONE, _END = "enter", "leave", "backward", "done", "end"


@dataclass(frozen=True)
class Profile:
    """What one step showed. Plain data, so that ranks can exchange it."""

    peak_bytes: int | None
    """Most bytes alive during the step; None if it ran out of memory."""
    forward_peaks: Mapping[str, int] = field(default_factory=dict)
    """By region: peak during its forward alone."""
    backward_peaks: Mapping[str, int] = field(default_factory=dict)
    """By region: peak during its backward alone."""
    forward_ms: Mapping[str, float] = field(default_factory=dict)
    """By region: forward time in ms (CUDA only)."""
    step_ms: float | None = None
    """Time of the step in ms (CUDA only: on the CPU the recording of allocations takes much of it)."""
    seconds: float = 0.0


class NoGradientError(ValueError):
    """``example_forward`` returned nothing to run backward from."""


def run_step(
    model: nn.Module,
    regions: Mapping[str, nn.Module],
    example_forward: Callable[[nn.Module], object],
    state: ModelState,
    device: torch.device,
    *,
    gradients_in_forward: bool = False,
) -> Profile:
    """Run one step and profile ``regions``; running out of memory is an answer, every other error is raised.

    With ``gradients_in_forward``, as much as all gradients take is held until the loss is known.

    ``state`` is rewound before and after the step.
    """
    state.rewind()
    started = time.perf_counter()
    markers = _Markers(list(regions), device)
    report: StepMemory | None = None

    def step() -> None:
        old = [torch.empty_like(p) for p in model.parameters() if p.requires_grad] if gradients_in_forward else []
        _forward_backward(model, example_forward, state, old)

    try:
        with uncompiled(), ExitStack() as stack:
            for index, module in enumerate(regions.values()):
                markers.attach(index, module, stack)
            report = measure_memory(step, device=device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The traceback holds the tensors that filled the memory.
        error.__traceback__ = None
    finally:
        state.rewind()
    seconds = time.perf_counter() - started
    if report is None:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return Profile(None, seconds=seconds)
    return markers.profile(report, state.set_aside_bytes(device), seconds)


def largest_peak(profiles: Sequence[Profile]) -> int | None:
    """The largest peak of all ranks; None if memory ran out on one."""
    peaks = [profile.peak_bytes for profile in profiles if profile.peak_bytes is not None]
    return max(peaks) if len(peaks) == len(profiles) else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and (
        "out of memory" in str(error) or "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def old_gradient_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes on ``device`` of the gradients that a step leaves behind."""
    gradients = [p for p in model.parameters() if p.requires_grad and p.device.type == device.type]
    return sum(allocated_bytes(p.nbytes, device) for p in gradients)


def _forward_backward(
    model: nn.Module, example_forward: Callable[[nn.Module], object], state: ModelState, old_gradients: list[Tensor]
) -> None:
    with torch.enable_grad():
        output = example_forward(model)
        loss = loss_of(output)
    old_gradients.clear()
    state.set_aside(leaves_of(loss))
    loss.backward()
    del output
    mark_memory(_END)


def loss_of(output: object) -> Tensor:
    """What to run backward from: a ``loss`` entry if there is one, else the sum of the means of what has a gradient.

    Raises:
        NoGradientError: there is no such tensor.
    """
    losses = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if not losses:
        raise NoGradientError(
            "example_forward must return a tensor that requires a gradient (a loss, an output, or a list, tuple or "
            f"dict that holds one); it returned {_describe(output)}. Levels 2 to 4 and memory_budget run real backward "
            "passes from it."
        )
    reals = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in losses]
    total, *others = (tensor.mean() if tensor.dim() else tensor for tensor in reals)
    for part in others:
        total = total + part.to(total)
    return total


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
        return
    if isinstance(output, Mapping):
        if isinstance(output.get("loss"), Tensor) and output["loss"].requires_grad:
            yield output["loss"]
            return
        items: Sequence[object] = list(output.values())
    elif isinstance(output, (list, tuple)):
        items = output
    elif is_dataclass(output) and not isinstance(output, type):
        items = [getattr(output, entry.name) for entry in fields(output)]
    else:
        leaves = tree_leaves(output)
        items = [] if leaves == [output] else leaves
    for item in items:
        yield from _tensors(item)


def _describe(output: object) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of dtype {output.dtype} without a gradient"
    tensors = sum(isinstance(leaf, Tensor) for leaf in tree_leaves(output))
    return f"{type(output).__name__} with {tensors} tensors, none with a gradient" if tensors else type(output).__name__


# ---------------------------------------------------------------------------------------------------------------------
# Moments of a step


class _Markers:
    """Marks when each region begins and ends its forward and its backward."""

    def __init__(self, paths: Sequence[str], device: torch.device) -> None:
        self._paths = paths
        self._device = device
        self._forward: list[int] = []
        self._backward: list[int] = []
        self._timers: list[tuple[int, Any, Any]] = []

    def attach(self, index: int, module: nn.Module, stack: ExitStack) -> None:
        """Put hooks on ``module``, to be removed with ``stack``."""
        entered: list[Any] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            mark_memory(f"{_ENTER}:{index}")
            inputs = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            waiting = [tensor for tensor in inputs.values() if tensor.requires_grad and torch.is_grad_enabled()]
            left = len(waiting)

            def gradient_done(_: Tensor) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    mark_memory(f"{_DONE}:{index}")

            for tensor in waiting:
                # A view of a tensor that was changed since gets its node now: torch crashes where a hook comes first.
                _node: Any = tensor.grad_fn
                stack.callback(tensor.register_hook(gradient_done).remove)
            if is_timed(self._device):
                entered.append(torch.cuda.Event(enable_timing=True))
                entered[-1].record()

        def after(_: nn.Module, args: tuple[Any, ...], output: object) -> None:
            if entered:
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                self._timers.append((index, entered.pop(), end))
            outputs = {id(leaf): leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}
            for leaf in outputs.values():
                if leaf.requires_grad and torch.is_grad_enabled():
                    handle = leaf.register_hook(lambda _: mark_memory(f"{_BACKWARD}:{index}"))
                    stack.callback(handle.remove)
            mark_memory(f"{_LEAVE}:{index}")

        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(after).remove)

    def _follow(self, kind: str, index: int) -> None:
        """Keep the regions whose forward or backward runs, the latest last."""
        if kind == _ENTER:
            self._forward.append(index)
        elif kind == _LEAVE:
            self._forward.remove(index)
        elif kind == _BACKWARD and index not in self._backward:
            self._backward.append(index)
        elif kind == _DONE and index in self._backward:
            self._backward.remove(index)

    def _running(self) -> tuple[int | None, bool]:
        """The region that runs, the innermost, and whether this is its forward."""
        if self._forward:
            return self._forward[-1], True
        return (self._backward[-1] if self._backward else None), False

    def profile(self, report: StepMemory, set_aside: int, seconds: float) -> Profile:
        """What the marks of a finished step say."""
        peak = -1
        forward_peaks, backward_peaks = (dict.fromkeys(self._paths, 0) for _ in range(2))
        for mark in report.marks:
            # The peak before a mark belongs to whatever ran until then.
            running, in_forward = self._running()
            peak = max(peak, mark.peak_bytes)
            if running is not None:
                path, here = self._paths[running], forward_peaks if in_forward else backward_peaks
                here[path] = max(here[path], mark.peak_bytes - set_aside)
            if mark.name == _END:
                break
            kind, number = mark.name.split(":")
            self._follow(kind, int(number))
        return Profile(
            peak_bytes=peak - set_aside,
            forward_peaks=forward_peaks,
            backward_peaks=backward_peaks,
            forward_ms=self._forward_ms(),
            step_ms=report.step_ms if is_timed(self._device) else None,
            seconds=seconds,
        )

    def _forward_ms(self) -> dict[str, float]:
        times: dict[str, float] = {}
        for index, begin, end in self._timers:
            path = self._paths[index]
            times[path] = times.get(path, 0.0) + float(begin.elapsed_time(end))
        return times
