"""Named moments inside a measured step."""

from __future__ import annotations

import torch

from lightning_memopt.measuring import MemoryMark, mark_memory, measure_memory
from lightning_memopt.measuring.marks import MarkCollector, collecting_marks


class Allocator:
    """An allocator with peak statistics, as `torch.cuda` is one."""

    def __init__(self) -> None:
        self.alive = self.peak = 0

    def change(self, size: int) -> None:
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def memory_allocated(self, index: int) -> int:
        return self.alive

    def max_memory_allocated(self, index: int) -> int:
        return self.peak

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peak = self.alive


def test_marks_in_forward_and_backward_are_in_order_with_the_allocations() -> None:
    x = torch.rand(1000, requires_grad=True)

    def step() -> None:
        y = x.exp()
        y.register_hook(lambda gradient: mark_memory("backward of exp"))
        mark_memory("forward")
        y.sum().backward()
        mark_memory("end")

    report = measure_memory(step, device="cpu")
    assert [mark.name for mark in report.marks] == ["forward", "backward of exp", "end"]
    assert report.marks[0].bytes - report.start_bytes == 4000
    assert report.marks[2].bytes - report.start_bytes == 4000 + 4000  # y is still held, and the gradient stays
    assert max(mark.peak_bytes for mark in report.marks) == report.peak_bytes


def test_a_mark_outside_of_a_measured_step_does_nothing() -> None:
    mark_memory("nowhere")


def test_an_allocator_with_statistics_gives_the_same_marks_and_keeps_its_peak() -> None:
    allocator = Allocator()
    collector = MarkCollector(allocator, 0)
    with collecting_marks(collector):
        allocator.change(100)
        allocator.change(-60)
        mark_memory("first")
        allocator.change(20)
        mark_memory("second")
        allocator.change(15)
        allocator.change(-5)
    assert collector.marks == [MemoryMark("first", 40, 100), MemoryMark("second", 60, 60)]
    assert collector.peak_bytes == 100
    assert allocator.max_memory_allocated(0) == 75  # its own statistic was reset
    mark_memory("after the end")
    assert len(collector.marks) == 2
