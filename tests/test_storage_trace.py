"""Steps on fake tensors take, by measurement, what real ones do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lightning_memopt.measuring import StepMemory, mark_memory, measure_memory
from tests.process_memory import alive_bytes

Make = Callable[[], tuple[nn.Module, Tensor]]


def transformer() -> tuple[nn.Module, Tensor]:
    layers = (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3))
    return nn.Sequential(*layers), torch.randn(4, 16, 32)


def convolutions() -> tuple[nn.Module, Tensor]:
    def block(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))

    return nn.Sequential(block(3), block(8), nn.Flatten(), nn.Linear(288, 10)), torch.randn(4, 3, 32, 32)


def step_of(make: Make, *, fake: bool) -> StepMemory:
    with FakeTensorMode() if fake else nullcontext():
        model, data = make()
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            loss = model(data).square().mean()
            mark_memory("forward")
            loss.backward()
            mark_memory("backward")
            del loss
            optimizer.step()

        step()
        optimizer.zero_grad()
        return measure_memory(step, device="cpu")


@pytest.mark.parametrize("make", [transformer, convolutions])
def test_fake_tensors_take_the_bytes_of_real_ones(make: Make) -> None:
    others = alive_bytes()  # what other tests left alive
    real, fake = (step_of(make, fake=is_fake) for is_fake in (False, True))
    # Scalars that torch makes of Python numbers while it runs an operation are no operation of their own.
    assert fake.peak_bytes == pytest.approx(real.peak_bytes - others, abs=64)
    assert (fake.start_bytes, fake.end_bytes) == (real.start_bytes - others, real.end_bytes - others)
    for seen, expected in zip(fake.marks, real.marks, strict=True):
        assert (seen.name, seen.bytes) == (expected.name, expected.bytes - others)
        # A convolution takes a workspace of its own while it runs.
        assert 0.98 * expected.peak_bytes <= seen.peak_bytes + others <= expected.peak_bytes


def test_nothing_has_to_fit_into_memory_to_be_measured() -> None:
    with FakeTensorMode():
        layer = nn.Linear(1 << 20, 1 << 20, bias=False)  # 4 TiB
        data = torch.empty(1, 1 << 20)
        report = measure_memory(lambda: layer(data).sum().backward(), device="cpu")
    assert report.end_bytes - report.start_bytes == 4 << 40


class Nested(torch.autograd.Function):
    """A backward pass within a backward pass, and so on, and then ``step``."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, depth: int, step: Callable[[], object]) -> Tensor:
        ctx.depth, ctx.step = depth, step
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            if ctx.depth:
                Nested.apply(torch.ones((), requires_grad=True), ctx.depth - 1, ctx.step).backward()
            else:
                ctx.step()
        return gradient, None, None


def test_gradients_that_meet_are_added_in_place_in_threads_of_the_engine_too() -> None:
    with FakeTensorMode():
        for depth in range(57, 64):  # from about 60 on torch takes another thread, as it does for every CUDA device
            doubled = 2 * torch.ones(1000, requires_grad=True)
            loss = (doubled * 1.5 + doubled * 2.5 + doubled * 3.5).sum()
            outer = Nested.apply(torch.ones((), requires_grad=True), depth, loss.backward)
            report = measure_memory(outer.backward, device="cpu")
            assert report.peak_bytes - report.start_bytes < 3 * 4000, depth


def test_a_device_that_is_not_there_hands_out_its_blocks() -> None:
    with FakeTensorMode():
        kept = []
        report = measure_memory(lambda: kept.append(torch.empty(1000, device="cuda")), device="cuda")
    assert report.end_bytes - report.start_bytes == 4096


def test_other_devices_and_real_tensors_do_not_count() -> None:
    real = torch.zeros(1000)
    with FakeTensorMode():
        kept = [torch.empty(1000, device="cuda")]
        report = measure_memory(lambda: kept.append(torch.empty(1000, device="cuda")), device="cpu")
    assert report.peak_bytes == report.start_bytes == 0
    assert real.numel() == 1000


def test_views_take_nothing_and_resized_storages_what_they_grow_by() -> None:
    with FakeTensorMode():
        kept = [torch.empty(1000, dtype=torch.uint8)]

        def step() -> None:
            kept.append(kept[0][10:20])
            mark_memory("view")
            kept[0].resize_(3000)
            mark_memory("resized")
            kept.clear()

        report = measure_memory(step, device="cpu")
    assert [mark.bytes - report.start_bytes for mark in report.marks] == [0, 2000]
    assert report.end_bytes == report.start_bytes - 1000
