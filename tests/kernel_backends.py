"""The fixture that runs a test with the CUDA kernels: on the CPU by ``tests/cuda_on_cpu``, and on a GPU by CuPy."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lightning_memopt.ops.launch import Backend, Kernel, use_backend
from tests.cuda_on_cpu import CpuKernels, sanitizing


def examples(count: int) -> int:
    """How many examples Hypothesis is to draw: ``count``, or a few in a run with sanitizers, which is slow."""
    return min(count, 5) if sanitizing() else count


@dataclass(frozen=True)
class Kernels:
    """Where the kernels run.

    Attributes:
        device: put the test's tensors here.
        launches: entries launched so far in this test; empty it at will.
    """

    device: torch.device
    launches: list[str]


@dataclass(frozen=True)
class _Recording:
    """A backend that notes the entries it launches."""

    backend: Backend
    launches: list[str] = field(default_factory=list)

    def launch(
        self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Any], device: torch.device
    ) -> None:
        self.launches.append(kernel.entry)
        self.backend.launch(kernel, grid, arguments, device)

    def multiprocessors(self, device: torch.device) -> int:
        return self.backend.multiprocessors(device)

    def capability(self, device: torch.device) -> tuple[int, int]:
        return self.backend.capability(device)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Within the test, operations on ``kernels.device`` run by the CUDA kernels."""
    backend = _Recording(CpuKernels() if request.param == "cpu" else _cupy_backend())
    # With an index, as the device of a tensor has one: without it the two differ.
    device = torch.device("cpu") if request.param == "cpu" else torch.device("cuda", torch.cuda.current_device())
    with use_backend(request.param, backend):
        yield Kernels(device, backend.launches)


@functools.cache  # it keeps what it has compiled
def _cupy_backend() -> Backend:
    pytest.importorskip("cupy", reason="CuPy is missing: the CUDA kernels cannot be compiled", exc_type=ImportError)
    from lightning_memopt.ops.launch import CupyBackend

    return CupyBackend()
