"""
Training steps that can be compared
===================================

What the benchmarks of whole models share: a step with the same random numbers at every call, its gradients and how far
two of them differ, and times of models that take turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from benchmark_case import Benchmark, Precision
from torch import Tensor, nn

MIB = 2**20
STEP_SEED = 1234


def seeded_step(benchmark: Benchmark, device: torch.device, precision: Precision) -> Callable[[nn.Module], Tensor]:
    """The loss of one training step as a function of the model, with the same random numbers at every call."""

    def step(model: nn.Module) -> Tensor:
        benchmark.reset(model)
        torch.manual_seed(STEP_SEED)
        with _autocast(device, precision):
            return benchmark.loss(model, benchmark.batch)

    return step


def max_relative_difference(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest ``max|g - e| / max|e|`` over the parameters; infinite where a gradient is missing or not a number."""
    if gradients.keys() != expected.keys():
        return math.inf
    worst = 0.0
    for name, reference in expected.items():
        difference = (gradients[name] - reference).abs().max().item()
        if difference == 0.0:
            continue
        scale = reference.abs().max().item()
        ratio = difference / scale if scale > 0.0 else math.inf
        worst = max(worst, ratio if math.isfinite(ratio) else math.inf)
    return worst


def finish_step(model: nn.Module, benchmark: Benchmark) -> None:
    """Leave nothing of a step alive: no gradients, no neuron state and no graph that hangs on it."""
    model.zero_grad(set_to_none=True)
    benchmark.reset(model)


def gradients_of(parameters: dict[str, nn.Parameter], step: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Copies of the gradients after one step, by the names of ``parameters``."""
    for parameter in parameters.values():
        parameter.grad = None
    step().backward()
    return {name: p.grad.detach().clone() for name, p in parameters.items() if p.grad is not None}


def timed_step(
    model: nn.Module, benchmark: Benchmark, step: Callable[[nn.Module], Tensor], device: torch.device
) -> float:
    """Milliseconds of one forward and backward pass."""
    synchronize(device)
    started = time.perf_counter()
    step(model).backward()
    synchronize(device)
    taken = (time.perf_counter() - started) * 1e3
    finish_step(model, benchmark)
    return taken


def interleaved_times(
    models: Sequence[nn.Module | None],
    benchmark: Benchmark,
    step: Callable[[nn.Module], Tensor],
    device: torch.device,
    *,
    steps: int,
    warmup_steps: int,
) -> list[list[float]]:
    """Milliseconds of each step of each model. A round runs every model once, so that drift meets all of them alike."""
    times: list[list[float]] = [[] for _ in models]
    order = [index for index, model in enumerate(models) if model is not None]
    for round_index in range(warmup_steps + steps):
        # Every other round runs backwards: no model always follows the same neighbour.
        for index in order if round_index % 2 == 0 else reversed(order):
            model = models[index]
            assert model is not None
            taken = timed_step(model, benchmark, step, device)
            if round_index >= warmup_steps:
                times[index].append(taken)
    return times


def tensors_of(models: Iterable[nn.Module | None]) -> list[Tensor]:
    """Parameters and buffers: all that a model leaves alive after :func:`finish_step`."""
    return [tensor for model in models if model is not None for tensor in (*model.parameters(), *model.buffers())]


def storage_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the distinct storages behind ``tensors``, as the device's allocator counts them."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type == device.type
    }
    # The CUDA caching allocator hands out multiples of 512 bytes.
    granule = 512 if device.type == "cuda" else 1
    return sum(-(-size // granule) * granule for size in storages.values())


def _autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
