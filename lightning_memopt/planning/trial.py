"""
One measured step
=================

A trial runs one forward and backward pass of the model as it is treated at the moment, and learns more from it than the
peak. Hooks name the moments when a region's forward begins and ends, when the gradient of its output arrives (its
recomputation is about to start) and when the gradients of its inputs are complete. Between two such moments the memory
has a peak of its own, so one pass tells

* which region the peak of the step lies in: the only one worth making smaller;
* how much each region keeps from forward to backward;
* how high memory stands between a region's forward and its backward: whether there is room for it to keep more.
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
from lightning_memopt.planning.gradient_flow import leaves_of
from lightning_memopt.planning.model_state import ModelState
from lightning_memopt.planning.observe import storage_address, uncompiled

# Names of marks are a kind and the index of the region.
_ENTER, _LEAVE, _BACKWARD, _DONE, _END = "enter", "leave", "backward", "done", "end"


@dataclass(frozen=True)
class Profile:
    """What one step showed. Plain data, so that ranks can exchange it."""

    peak_bytes: int | None
    """Most bytes alive during the step; None if it ran out of memory."""
    critical: tuple[str, ...]
    """Regions that the peak lies in, more than one only if they are equal; empty if it lies elsewhere."""
    in_forward: bool = False
    """Whether the peak lies in their forward, not in their backward."""
    progress: int = 0
    """Moments reached before the end, or before memory ran out."""
    kept: Mapping[str, int] = field(default_factory=dict)
    """By region: bytes that its forward left alive."""
    returned: Mapping[str, int] = field(default_factory=dict)
    """By region: bytes of what its forward returned, a part of ``kept``."""
    standing: Mapping[str, int] = field(default_factory=dict)
    """By region: most bytes alive between the end of its forward and the start of its backward."""
    before_backward: Mapping[str, int] = field(default_factory=dict)
    """By region: most bytes alive at the moment when its backward began."""
    peaks: Mapping[str, int] = field(default_factory=dict)
    """By region: peak during its forward and its backward."""
    forward_ms: Mapping[str, float] = field(default_factory=dict)
    """By region: forward time in ms (CUDA only)."""
    seconds: float = 0.0
    refused: str = ""
    """Why the step could not run as it was treated (time chunks that are not safe)."""


class NoGradientError(ValueError):
    """``example_forward`` returned nothing to run backward from."""


def run_step(
    model: nn.Module,
    regions: Mapping[str, nn.Module],
    example_forward: Callable[[nn.Module], object],
    state: ModelState,
    device: torch.device,
) -> Profile:
    """Run one step and profile ``regions``; running out of memory is an answer, every other error is raised.

    ``state`` is rewound before and after the step.
    """
    state.rewind()
    started = time.perf_counter()
    markers = _Markers(list(regions), device)
    report: StepMemory | None = None
    try:
        with uncompiled(), ExitStack() as stack:
            for index, module in enumerate(regions.values()):
                markers.attach(index, module, stack)
            report = measure_memory(lambda: _forward_backward(model, example_forward, state), device=device)
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
        return Profile(None, *markers.last_running(), progress=markers.count, seconds=seconds)
    return markers.profile(report, state.set_aside_bytes(device), seconds)


def run_forward(model: nn.Module, example_forward: Callable[[nn.Module], object], state: ModelState) -> None:
    """Run one forward with a graph that is dropped. ``state`` is rewound before and after."""
    state.rewind()
    try:
        with uncompiled(), torch.enable_grad():
            example_forward(model)
    finally:
        state.rewind()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and (
        "out of memory" in str(error) or "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def _forward_backward(model: nn.Module, example_forward: Callable[[nn.Module], object], state: ModelState) -> None:
    with torch.enable_grad():
        output = example_forward(model)
        loss = loss_of(output)
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
        self._returned = dict.fromkeys(paths, 0)
        self.count = 0

    def attach(self, index: int, module: nn.Module, stack: ExitStack) -> None:
        """Put hooks on ``module``, to be removed with ``stack``."""
        entered: list[Any] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._mark(_ENTER, index)
            inputs = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            waiting = [tensor for tensor in inputs.values() if tensor.requires_grad and torch.is_grad_enabled()]
            left = len(waiting)

            def gradient_done(_: Tensor) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    self._mark(_DONE, index)

            for tensor in waiting:
                stack.callback(tensor.register_hook(gradient_done).remove)
            if self._device.type == "cuda":
                entered.append(torch.cuda.Event(enable_timing=True))
                entered[-1].record()

        def after(_: nn.Module, args: tuple[Any, ...], output: object) -> None:
            if entered:
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                self._timers.append((index, entered.pop(), end))
            given = {storage_address(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
            outputs = {id(leaf): leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}
            for leaf in outputs.values():
                if storage_address(leaf) not in given:
                    self._returned[self._paths[index]] += leaf.nbytes
                if leaf.requires_grad and torch.is_grad_enabled():
                    handle = leaf.register_hook(lambda _: self._mark(_BACKWARD, index))
                    stack.callback(handle.remove)
            self._mark(_LEAVE, index)

        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(after).remove)

    def _mark(self, kind: str, index: int) -> None:
        self.count += 1
        self._follow(kind, index)
        mark_memory(f"{kind}:{index}")

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

    def last_running(self) -> tuple[tuple[str, ...], bool]:
        """The region that ran last, and whether it was its forward."""
        index, in_forward = self._running()
        return () if index is None else (self._paths[index],), in_forward

    def profile(self, report: StepMemory, set_aside: int, seconds: float) -> Profile:
        """What the marks of a finished step say."""
        peak = -1
        critical: list[tuple[int | None, bool]] = []
        kept, standing, before_backward, peaks = (dict.fromkeys(self._paths, 0) for _ in range(4))
        entered: dict[int, list[int]] = {}
        left: set[int] = set()  # regions after their last forward, before their first backward
        self._forward, self._backward = [], []
        for mark in report.marks:
            # The peak before a mark belongs to whatever ran until then.
            running = self._running()
            if mark.peak_bytes > peak:
                peak, critical = mark.peak_bytes, [running]
            elif mark.peak_bytes == peak and running not in critical:
                critical.append(running)
            if running[0] is not None:
                path = self._paths[running[0]]
                peaks[path] = max(peaks[path], mark.peak_bytes - set_aside)
            for index in left:
                path = self._paths[index]
                standing[path] = max(standing[path], mark.peak_bytes - set_aside)
            if mark.name == _END:
                break
            kind, number = mark.name.split(":")
            index = int(number)
            path = self._paths[index]
            if kind == _ENTER:
                entered.setdefault(index, []).append(mark.bytes)
            elif kind == _LEAVE:
                kept[path] += mark.bytes - entered[index].pop()
                standing[path] = mark.bytes - set_aside
                left.add(index)
            elif kind == _BACKWARD:
                left.discard(index)
                before_backward[path] = max(before_backward[path], mark.bytes - set_aside)
            self._follow(kind, index)
        alike = None not in {index for index, _ in critical} and len({forward for _, forward in critical}) == 1
        return Profile(
            peak_bytes=peak - set_aside,
            critical=tuple(self._paths[index] for index, _ in critical if index is not None) if alike else (),
            in_forward=alike and critical[0][1],
            progress=self.count,
            kept=kept,
            returned=dict(self._returned),
            standing=standing,
            before_backward=before_backward,
            peaks=peaks,
            forward_ms=self._forward_ms(),
            seconds=seconds,
        )

    def _forward_ms(self) -> dict[str, float]:
        times: dict[str, float] = {}
        for index, begin, end in self._timers:
            path = self._paths[index]
            times[path] = times.get(path, 0.0) + float(begin.elapsed_time(end))
        return times
