from __future__ import annotations

import dataclasses
import gc
import mmap
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_memopt.measuring import (
    AllocationRecorder,
    MemoryPoint,
    StepMemory,
    measure_memory,
    measuring_repeatedly,
    process_memory,
)
from lightning_memopt.measuring.allocation_events import storages_alive

MIB = 2**20
CPU = torch.device("cpu")


def _block_model() -> nn.Sequential:
    from spikingjelly.activation_based import neuron

    def block() -> list[nn.Module]:
        return [nn.Linear(512, 512), neuron.IFNode(step_mode="m"), nn.Linear(512, 512), neuron.IFNode(step_mode="m")]

    return nn.Sequential(*(layer for _ in range(3) for layer in block()))


def _added(step: Callable[[], object]) -> StepMemory:
    """Measure, with all bytes counted from the start of the step."""
    report = measure_memory(step, device=CPU)
    return dataclasses.replace(
        report,
        peak_bytes=report.peak_bytes - report.start_bytes,
        end_bytes=report.end_bytes - report.start_bytes,
        start_bytes=0,
        timeline=tuple(MemoryPoint(p.time_ms, p.bytes - report.start_bytes) for p in report.timeline),
    )


def test_the_reference_block_model_peaks_at_the_published_number_of_bytes() -> None:
    model = _block_model()
    data = (torch.rand(16, 512, 512) < 0.2).float()
    gc.collect()  # what earlier tests left in cycles would go during the step
    others = sum(s.nbytes() for s in storages_alive(CPU)) - _bytes_of(model) - data.nbytes
    report = measure_memory(lambda: model(data).mean().backward(), device="cpu")
    assert 461 * MIB <= report.peak_bytes - others <= 463 * MIB
    assert report.start_bytes - others == _bytes_of(model) + data.nbytes
    # Each of the six potentials stays, with two tensors and a number that its graph saved: no loss reached its end.
    potentials = 6 * (3 * 512 * 512 * 4 + 8)
    assert report.end_bytes - report.start_bytes == _bytes_of(model) + potentials


def test_a_second_measurement_that_frees_gradients_and_states_of_the_first_gives_the_same_peak() -> None:
    from spikingjelly.activation_based import functional

    model = _block_model()
    data = (torch.rand(4, 64, 512) < 0.2).float()

    def step() -> None:
        functional.reset_net(model)
        model.zero_grad()
        model(data).mean().backward()

    first, second, third = (measure_memory(step, device=CPU) for _ in range(3))
    # What the second frees at its beginning is what the first left behind; six 8-byte numbers are held by graph nodes.
    assert second.start_bytes == first.end_bytes - 6 * 8
    assert second.end_bytes == first.end_bytes
    assert second.peak_bytes == first.peak_bytes
    assert [p.bytes for p in third.timeline] == [p.bytes for p in second.timeline]


def test_bytes_of_a_known_sequence_are_exact_at_every_point() -> None:
    def step() -> None:
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(500, dtype=torch.float32)
        del a
        c = torch.empty(64, dtype=torch.float64)
        del b, c

    report = _added(step)
    assert [p.bytes for p in report.timeline] == [0, 1000, 3000, 2000, 2512, 512, 0]
    assert (report.peak_bytes, report.end_bytes) == (3000, 0)
    times = [p.time_ms for p in report.timeline]
    assert times == sorted(times)
    assert times[-1] <= report.step_ms


def test_a_tensor_from_before_that_the_step_frees_leaves_at_the_moment_it_is_freed() -> None:
    held = [torch.empty(4096, dtype=torch.uint8)]

    def step() -> None:
        a = torch.empty(100, dtype=torch.uint8)
        held.clear()
        b = torch.empty(200, dtype=torch.uint8)
        del a, b

    report = _added(step)
    assert [p.bytes for p in report.timeline] == [0, 100, -3996, -3796, -3896, -4096]
    assert report.peak_bytes == 100
    assert report.end_bytes == -4096


def test_a_size_left_over_in_the_allocator_from_an_earlier_profile_is_not_believed() -> None:
    held: list[torch.Tensor] = []
    measure_memory(lambda: held.append(torch.empty(8192, dtype=torch.uint8)), device=CPU)
    report = _added(held.clear)
    assert [p.bytes for p in report.timeline] == [0, -8192]


def test_a_resized_storage_from_before_counts_with_its_new_size_only() -> None:
    held = torch.empty(1000, dtype=torch.uint8)
    report = _added(lambda: held.untyped_storage().resize_(5000))
    assert report.end_bytes == 4000


def test_a_tensor_freed_in_a_thread_the_profiler_does_not_follow_is_gone_at_the_end() -> None:
    held = [torch.empty(1000, dtype=torch.uint8)]

    def step() -> None:
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()

    assert _added(step).end_bytes == -1000


def test_backward_with_reentrant_engines_and_hooks_is_followed() -> None:
    weight = torch.zeros(1024, requires_grad=True)
    inner_bytes = 50_000

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                leaf = torch.zeros(1, requires_grad=True)
                (leaf * torch.empty(inner_bytes, dtype=torch.uint8).sum()).backward()
            return grad

    report = _added(lambda: Inner.apply(weight).sum().backward())
    assert report.peak_bytes >= inner_bytes
    assert report.end_bytes == weight.nbytes


def test_views_aliases_and_shared_storages_count_once() -> None:
    before = sum(s.nbytes() for s in storages_alive(CPU))
    base = torch.zeros(1000, dtype=torch.uint8)
    others = [base[10:], base.view(10, 100), nn.Parameter(base, requires_grad=False), base.detach()]
    assert sum(s.nbytes() for s in storages_alive(CPU)) - before == 1000
    del base, others
    assert sum(s.nbytes() for s in storages_alive(CPU)) == before


def test_gradients_that_no_python_code_has_touched_count_at_the_start() -> None:
    layer = nn.Linear(100, 100, bias=False)
    layer(torch.ones(1, 100)).sum().backward()
    gc.collect()
    addresses = {s.data_ptr() for s in storages_alive(CPU)}
    assert layer.weight.grad is not None
    assert layer.weight.grad.data_ptr() in addresses


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_count_with_their_indices_and_values(layout: torch.layout) -> None:
    before = sum(s.nbytes() for s in storages_alive(CPU))
    outer = torch.arange(64) if layout is torch.sparse_coo else torch.arange(65)
    inner, values = torch.arange(64), torch.ones(64)
    if layout is torch.sparse_coo:
        tensor = torch.sparse_coo_tensor(torch.stack([outer, inner]), values, (64, 64))
    else:
        tensor = torch.sparse_compressed_tensor(outer, inner, values, (64, 64), layout=layout)
    expected = outer.nbytes + inner.nbytes + values.nbytes
    del outer, inner, values
    assert sum(s.nbytes() for s in storages_alive(CPU)) - before == expected
    del tensor


def test_instances_of_subclasses_are_found_and_impostors_are_never_asked() -> None:
    asked = []

    class Impostor:
        """A lazy proxy: looking at its class builds what it stands for."""

        @property
        def __class__(self) -> type:
            asked.append(self)
            return torch.Tensor

    class EqualTypes(type(torch.Tensor)):  # type: ignore[misc]
        """Without a hash: its classes can be in no set."""

        def __eq__(cls, other: object) -> bool:
            raise AssertionError("types are told apart by identity")

    class Odd(torch.Tensor, metaclass=EqualTypes):
        pass

    class Odder(Odd):
        pass

    before = sum(s.nbytes() for s in storages_alive(CPU))
    held = [Impostor(), torch.zeros(1000).as_subclass(Odder), nn.Parameter(torch.zeros(10)), nn.Buffer(torch.zeros(1))]
    assert sum(s.nbytes() for s in storages_alive(CPU)) - before == 4044
    assert not asked
    del held


def _in_a_cycle(tensor: torch.Tensor) -> None:
    cycle: list[object] = [tensor]
    cycle.append(cycle)


def test_repeated_measurements_show_the_same_bytes_at_every_point() -> None:
    data = torch.rand(64, 32)
    shared: dict[str, list[torch.Tensor]] = {}

    def reports() -> list[StepMemory]:
        layer = nn.Linear(32, 32)
        shared["held"] = [torch.empty(4096, dtype=torch.uint8)]

        def step() -> None:
            shared["held"].clear()  # a tensor from before, in the first step
            layer.zero_grad()  # gradients of the step before, in the others
            layer(data).sum().backward()
            _in_a_cycle(torch.empty(512, dtype=torch.uint8))

        return [_added(step) for _ in range(3)]

    gc.disable()  # so that no collection of Python's own hits one of the steps only
    try:
        alone = reports()
        with measuring_repeatedly(CPU):
            new = reports()  # objects made inside
        shared.clear()
        assert [[p.bytes for p in r.timeline] for r in new] == [[p.bytes for p in r.timeline] for r in alone]
    finally:
        gc.enable()
    assert alone[0].end_bytes == -4096 + (32 * 32 + 32) * 4 + 512
    assert alone[1].end_bytes == 512  # the cycle of the step before was collected before this one began


def test_tensors_from_before_repeated_measurements_are_counted_and_followed() -> None:
    held = [torch.empty(4096, dtype=torch.uint8)]
    layer = nn.Linear(10, 10, bias=False)
    gc.collect()
    before = sum(s.nbytes() for s in storages_alive(CPU))
    with measuring_repeatedly(CPU):
        assert sum(s.nbytes() for s in storages_alive(CPU)) == before
        layer(torch.ones(1, 10)).sum().backward()
        assert sum(s.nbytes() for s in storages_alive(CPU)) == before + 400  # its gradient, found through it
        report = _added(held.clear)
        assert [p.bytes for p in report.timeline] == [0, -4096]
        assert sum(s.nbytes() for s in storages_alive(CPU)) == before + 400 - 4096
        _in_a_cycle(torch.empty(777, dtype=torch.uint8))
        assert measure_memory(lambda: None, device=CPU).start_bytes == before + 400 - 4096
    assert sum(s.nbytes() for s in storages_alive(CPU)) == before + 400 - 4096


def test_repeated_measurements_look_at_new_objects_only_and_leave_the_collector_as_it_was() -> None:
    assert gc.get_freeze_count() == 0
    everything = len(gc.get_objects())

    def interrupted() -> None:
        with measuring_repeatedly(CPU):
            assert len(gc.get_objects()) < everything / 20
            with measuring_repeatedly(CPU):
                pass
            assert len(gc.get_objects()) < everything / 20  # an inner one ends nothing
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gc.get_freeze_count() == 0
    assert len(gc.get_objects()) > everything * 0.9


def test_what_somebody_else_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with measuring_repeatedly(CPU):
            measure_memory(lambda: None, device=CPU)
        assert gc.get_freeze_count() == pytest.approx(frozen, rel=0.01)
    finally:
        gc.unfreeze()


def test_a_report_prints_as_one_short_line_whatever_its_timeline() -> None:
    def step() -> None:
        for _ in range(1000):
            torch.empty(MIB, dtype=torch.uint8)

    report = measure_memory(step, device=CPU)
    assert len(report.timeline) == 2001
    assert len(repr(report)) < 200
    assert f"peak_bytes={report.peak_bytes}" in repr(report)
    assert "(1.0 MiB above the start)" in str(report)
    assert str(report).startswith(f"peak {report.peak_bytes / MIB:.1f} MiB")
    assert "\n" not in str(report)


def test_the_documented_way_to_measure_one_step_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[1] / "docs" / "memory_monitor.md"
    section = page.read_text().split("## Measuring one step")[1].split("\n## ")[0]
    names: dict[str, object] = {}
    for snippet in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL):
        exec(compile(snippet, str(page), "exec"), names)
    described, needed = capsys.readouterr().out.splitlines()
    assert described.startswith("peak ")
    # The input of every GELU and every Linear but the first, and the gradients of four layers.
    assert int(needed) > 7 * 1024 * 256 * 4 + 4 * 256 * 257 * 4
    reports = names["reports"]
    assert isinstance(reports, list)
    assert len({report.peak_bytes for report in reports}) == 1


def test_tensors_of_other_devices_do_not_count() -> None:
    def step() -> torch.Tensor:
        return torch.empty(10**6, device="meta").neg()

    held = torch.empty(10**6, device="meta")
    assert all(s.device == CPU for s in storages_alive(CPU))
    assert _added(step).peak_bytes == 0
    del held


def test_an_empty_step_changes_nothing() -> None:
    report = measure_memory(lambda: None, device=CPU)
    assert report.peak_bytes == report.start_bytes == report.end_bytes
    assert report.timeline == (MemoryPoint(0.0, report.start_bytes),)
    assert report.device == "cpu"


def test_what_the_step_returns_is_not_kept() -> None:
    assert _added(lambda: torch.empty(12345)).end_bytes == 0


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_an_error_in_the_step_arrives_unchanged_and_leaves_no_profiler_running(error: BaseException) -> None:
    def step() -> None:
        torch.empty(10)
        raise error

    with pytest.raises(type(error)) as caught:
        measure_memory(step, device=CPU)
    assert caught.value is error
    assert not torch.autograd._profiler_enabled()
    assert _added(lambda: torch.empty(7, dtype=torch.uint8)).peak_bytes == 7


def test_a_profiler_that_already_runs_is_named_and_goes_on() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as running:
        with pytest.raises(RuntimeError, match="a torch profiler already runs"):
            measure_memory(lambda: None, device=CPU)
        torch.ones(3).add(1)
    assert "aten::add" in {event.key for event in running.key_averages()}


def test_a_device_without_statistics_and_a_step_that_cannot_be_called_are_refused() -> None:
    with pytest.raises(ValueError, match="measured on meta, whose allocator keeps no peak"):
        measure_memory(lambda: None, device="meta")
    with pytest.raises(TypeError, match="callable without arguments; got Tensor"):
        measure_memory(torch.zeros(1), device=CPU)  # type: ignore[arg-type]


def test_a_recorder_says_when_it_is_started_twice_or_stopped_too_early() -> None:
    recorder = AllocationRecorder()
    with pytest.raises(RuntimeError, match="does not run"):
        recorder.stop()
    recorder.start()
    with pytest.raises(RuntimeError, match="already runs"):
        recorder.start()
    recorder.stop()
    assert not recorder.running
    recorder.start()
    recorder.stop()


@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("between", [nn.Tanh, lambda: nn.LayerNorm(128), nn.Dropout])
def test_bytes_equal_those_of_an_independent_tracker(between: Callable[[], nn.Module], momentum: float | None) -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    model = nn.Sequential(nn.Linear(64, 128), between(), nn.Linear(128, 64))
    data, target = torch.rand(256, 64), torch.rand(256, 64)
    optimizer = None if momentum is None else torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    def step() -> None:
        nn.functional.mse_loss(model(data), target).backward()
        if optimizer is not None:
            optimizer.step()

    tracker = MemTracker()
    tracker.track_external(model, data, target, *([optimizer] if optimizer else []))
    with tracker:
        step()
    expected = tracker.get_tracker_snapshot("peak")[CPU]["Total"]

    model.zero_grad()
    if optimizer is not None:
        optimizer.state.clear()
    held = _bytes_of(model) + data.nbytes + target.nbytes
    assert _added(step).peak_bytes + held == expected


def test_the_device_is_the_cpu_where_nothing_lives_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)
    assert measure_memory(lambda: None).device == "cpu"


def test_the_profiler_starts_without_messages_and_leaves_the_environment_alone() -> None:
    program = """
        import os, torch
        from lightning_memopt.measuring import measure_memory
        before = dict(os.environ)
        measure_memory(lambda: torch.ones(1000) @ torch.ones(1000), device="cpu")
        assert dict(os.environ) == before
    """
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=Path(__file__).resolve().parent.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert (run.stdout, run.stderr) == ("", "")


def test_process_memory_grows_by_what_is_written() -> None:
    before = process_memory()
    with mmap.mmap(-1, 64 * MIB) as pages:
        for position in range(0, 64 * MIB, mmap.PAGESIZE):
            pages[position] = 1
        assert process_memory() - before >= 60 * MIB
    assert process_memory() - before <= 4 * MIB


def test_what_cublas_keeps_is_no_reason_to_measure_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 64 * MIB)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert measure_memory(lambda: torch.zeros(10)).device == "cpu"


@pytest.mark.gpu
def test_on_cuda_the_allocator_is_asked() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    held = torch.empty(MIB, dtype=torch.uint8, device=device)

    def step() -> None:
        torch.empty(8 * MIB, dtype=torch.uint8, device=device)

    report = measure_memory(step)
    assert report.device == str(device)
    assert report.start_bytes == report.end_bytes == torch.cuda.memory_allocated(device) >= held.nbytes
    assert report.peak_bytes - report.start_bytes == 8 * MIB


def _bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_fake_tensors_left_by_a_compiler_do_not_count() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = measure_memory(lambda: None, device="cpu").start_bytes
    with FakeTensorMode():
        left = [torch.empty(1 << 20), torch.ones(3).untyped_storage()]
    assert measure_memory(lambda: None, device="cpu").start_bytes == before
    assert len(left) == 2
