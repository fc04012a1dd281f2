"""The benchmark of the kernels runs without a GPU, turns every failure into a row, and judges the goals by the rows."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_memopt.ops.bit_pack import bit_pack
from tests.benchmark_scripts import benchmark_scripts

COLUMNS = (
    *("kernel", "variant", "shape", "dtype", "ms_median", "ms_p20", "ms_p80", "gbps_or_tflops", "floor_ms"),
    *("ratio_to_floor", "peak_bytes", "max_rel_err_vs_fp64", "torch", "cupy", "gpu"),
)
# The rivals of each kernel, by the first word of its rows.
RIVALS = {
    "device_copy": {"device copy"},
    "matmul": {"F.linear"},
    "bit_pack": {"device copy", "spikingjelly compressor", "spikingjelly function"},
    "bit_unpack": {"device copy", "spikingjelly compressor", "spikingjelly function"},
    "count_pack": {"device copy", "spikingjelly compressor"},
    "count_unpack": {"device copy", "spikingjelly compressor"},
    "row_pack": {"device copy", "spikingjelly"},
    "positions": {"device copy", "torch.nonzero", "spikingjelly compressor"},
    "scatter_positions": {"device copy", "spikingjelly compressor"},
    "packed_spike_linear": {
        *("lightning_memopt by wgmma", "lightning_memopt without wgmma"),
        *("F.linear", "F.linear TF32", "F.linear, three bf16 planes", "spikingjelly"),
    },
    "packed_spike_linear_backward": {"F.linear", "F.linear TF32", "spikingjelly"},
    "sparse_linear": {"F.linear", "F.linear TF32", "spikingjelly"},
    "if_linear": {"lightning_memopt neuron, F.linear", "spikingjelly", "spikingjelly neuron, F.linear"},
    "lif_linear": {"lightning_memopt neuron, F.linear", "spikingjelly", "spikingjelly neuron, F.linear"},
    "if_spike": {"lightning_memopt neuron, then pack", "torch loop, then pack"},
    "lif_spike": {"lightning_memopt neuron, then pack", "torch loop, then pack"},
}


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """``benchmarks/kernels.py``."""
    with benchmark_scripts("kernels") as [script]:
        yield script


@pytest.fixture(scope="module")
def cases(kernels: ModuleType) -> ModuleType:
    return sys.modules["kernel_cases"]


@pytest.fixture(scope="module")
def measuring(kernels: ModuleType) -> ModuleType:
    return sys.modules["kernel_measuring"]


@pytest.fixture(scope="module")
def goals(kernels: ModuleType) -> ModuleType:
    return sys.modules["kernel_goals"]


@pytest.fixture(scope="module")
def whole_run(kernels: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(kernels, tmp_path_factory.mktemp("kernels"))


def run(kernels: ModuleType, folder: Path, *arguments: str) -> dict[str, Any]:
    file = folder / "rows.json"
    assert kernels.main(["--device", "cpu", "--json", str(file), *arguments]) == 0
    return json.loads(file.read_text())


def rows_of(document: dict[str, Any], variant: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row["variant"] == variant]


# ---------------------------------------------------------------------------------------------------------------------
# A run on the CPU


def test_every_row_has_every_column(whole_run: dict[str, Any]) -> None:
    assert whole_run["columns"] == [*COLUMNS, "error"]
    for row in whole_run["rows"]:
        assert set(row) >= set(whole_run["columns"])
        assert row["torch"] == torch.__version__
        assert row["cupy"]
        assert row["gpu"]
    assert whole_run["size"] == "tiny"
    assert whole_run["command"].startswith("python ")


def test_every_kernel_has_a_row_of_ours_beside_its_rivals(whole_run: dict[str, Any], cases: ModuleType) -> None:
    assert set(cases.KERNELS) == set(RIVALS)
    for kernel, rivals in RIVALS.items():
        variants = {row["variant"] for row in whole_run["rows"] if row["kernel"].split()[0] == kernel}
        assert variants >= rivals
        if kernel not in cases.CEILINGS:
            assert "lightning_memopt" in variants


def test_ours_runs_everywhere_and_is_right(whole_run: dict[str, Any]) -> None:
    ours = [row for row in whole_run["rows"] if row["variant"].startswith("lightning_memopt")]
    for row in ours:
        assert row["error"] is None, row
        exact = not row["kernel"].partition(" ")[0].endswith(("linear", "linear_backward"))
        assert row["max_rel_err_vs_fp64"] <= (0 if exact else {"fp32": 1e-6, "bf16": 1e-2}[row["dtype"]])


def test_figures_of_a_row_belong_together(whole_run: dict[str, Any]) -> None:
    measured = [row for row in whole_run["rows"] if row["error"] is None]
    assert len(measured) > 100
    for row in measured:
        assert 0 < row["ms_p20"] <= row["ms_median"] <= row["ms_p80"]
        assert min(row["ms_all"]) <= row["ms_p20"]
        assert row["ms_p80"] <= max(row["ms_all"])
        assert row["ratio_to_floor"] == pytest.approx(row["ms_median"] / row["floor_ms"])
        assert row["peak_bytes"] >= row["inputs_bytes"] > 0
        assert row["gbps_or_tflops"] > 0
        product = row["kernel"] == "matmul" or "linear" in row["kernel"]
        assert row["rate_unit"] == ("TFLOP/s" if product else "GB/s")
    copy = next(row for row in measured if row["kernel"] == "device_copy")
    assert copy["gbps_or_tflops"] == pytest.approx(2 * 4 * int(copy["shape"]) / copy["ms_median"] / 1e6)
    assert copy["ratio_to_floor"] == pytest.approx(1)


def test_the_peak_of_a_call_is_its_inputs_and_its_result(whole_run: dict[str, Any]) -> None:
    m, k, n = 40, 40, 24
    for row in rows_of(whole_run, "F.linear"):
        if row["kernel"] == "packed_spike_linear" and row["shape"] == f"{m}x{k}x{n}" and row["dtype"] == "fp32":
            assert row["inputs_bytes"] == 4 * (m * k + n * k)
            assert row["peak_bytes"] == 4 * (m * k + n * k + m * n)
            break
    else:
        pytest.fail("no row of F.linear")


def test_what_needs_a_gpu_is_a_row_that_says_so(whole_run: dict[str, Any]) -> None:
    for row in rows_of(whole_run, "F.linear TF32"):
        assert row["error"].startswith("not here: TF32 needs a CUDA device")
        assert row["ms_median"] is None


def test_no_goal_is_judged_by_a_cpu(whole_run: dict[str, Any]) -> None:
    assert len(whole_run["goals"]) == 18
    assert {goal["status"] for goal in whole_run["goals"]} == {"not measured on this device"}


def test_one_kernel_can_be_measured_alone(kernels: ModuleType, tmp_path: Path) -> None:
    document = run(kernels, tmp_path, "--only", "row_pack", "--quick")
    assert {row["kernel"] for row in document["rows"]} == {"device_copy", "matmul", "row_pack"}


def test_cuda_asked_for_where_there_is_none_is_refused(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        kernels.main(["--device", "cuda"])
    assert "--device cpu" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Failures


def test_without_spikingjelly_its_rows_say_not_installed(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "spikingjelly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "spikingjelly", None)
    document = run(kernels, tmp_path, "--only", "bit_pack", "lif_linear", "lif_spike")
    peers = [row for row in document["rows"] if row["variant"].startswith("spikingjelly")]
    assert len(peers) == 14
    assert {row["error"] for row in peers} == {"not installed"}
    assert all(row["error"] is None for row in document["rows"] if row not in peers)


def test_a_gpu_without_cupy_says_so_in_our_rows(
    cases: ModuleType, measuring: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "backend_for", lambda device: None)
    with pytest.raises(measuring.NotInstalledError, match="CuPy"):
        cases.need_kernels(torch.device("cuda"))
    cases.need_kernels(torch.device("cpu"))  # there, the reference is what there is


def test_a_rival_that_raises_is_a_row_with_its_error(
    kernels: ModuleType,
    cases: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken() -> Any:
        raise RuntimeError("no kernel image is available\nfor execution")

    monkeypatch.setattr(cases, "_peer", broken)
    document = run(kernels, tmp_path, "--only", "bit_unpack")
    assert {row["error"] for row in rows_of(document, "spikingjelly function")} == {
        "RuntimeError: no kernel image is available"
    }
    for row in (*rows_of(document, "lightning_memopt"), *rows_of(document, "device copy")):
        assert row["error"] is None
        assert len(row["ms_all"]) == 3
    assert "no kernel image is available" in capsys.readouterr().out


def make_case(measuring: ModuleType, **variants: Callable[[], Any]) -> Any:
    """A case whose variants run the given functions."""
    inputs = (torch.zeros(4),)
    makers = {name: lambda run=run: measuring.Call(run, inputs) for name, run in variants.items()}
    return measuring.Case("kernel", "4", "fp32", measuring.Work(bytes=32), tuple(variants), lambda device: makers)


def measured(measuring: ModuleType, case: Any, **options: Any) -> dict[str, Any]:
    effort = measuring.Effort(seconds=1.0, fewest=4, most=4)
    gc.freeze()  # what exists already need not be searched for tensors
    try:
        found = measuring.measure_case(case, torch.device("cpu"), effort, **options)
    finally:
        gc.unfreeze()
    assert [measurement.variant for measurement in found] == list(case.variants)
    return {measurement.variant: measurement for measurement in found}


def test_variants_take_turns_and_each_round_turns_around(measuring: ModuleType) -> None:
    order: list[str] = []
    case = make_case(measuring, a=lambda: order.append("a"), b=lambda: order.append("b"))
    found = measured(measuring, case)
    assert "".join(order[-8:]) == "abbaabba"
    assert [len(found[name].times_ms) for name in "ab"] == [4, 4]


def test_an_error_in_a_later_call_ends_the_turns_of_that_variant_only(measuring: ModuleType) -> None:
    calls = iter(range(100))

    def tires() -> None:
        if next(calls) == 6:
            raise RuntimeError("tired")

    found = measured(measuring, make_case(measuring, tires=tires, steady=lambda: None))
    assert found["tires"].error == "RuntimeError: tired"
    assert found["tires"].times_ms == ()
    assert len(found["steady"].times_ms) == 4


def test_inputs_that_do_not_fit_are_the_error_of_every_variant(measuring: ModuleType) -> None:
    def build(device: torch.device) -> Mapping[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    case = measuring.Case("kernel", "4", "fp32", measuring.Work(bytes=32), ("a", "b"), build)
    found = measured(measuring, case)
    assert {found[name].error for name in "ab"} == {"OutOfMemoryError: CUDA out of memory"}


def test_a_refused_variant_does_not_run(measuring: ModuleType) -> None:
    case = make_case(measuring, bad=lambda: pytest.fail("it ran"), good=lambda: None)
    found = measured(measuring, case, refused={"bad": "it broke the device"})
    assert found["bad"].error == "it broke the device"
    assert found["good"].error is None


@dataclasses.dataclass
class ScriptedProcess:
    """Tells the given news, then ends as a process that crashed."""

    news: list[Any]
    gone: type[Exception]
    ended: bool = False

    def next(self, patience_s: float) -> Any:
        if not self.news:
            raise self.gone("the process ended with exit code -11")
        return self.news.pop(0)

    def end(self) -> None:
        self.ended = True


def supervised(
    kernels: ModuleType, cases: list[Any], scripts: list[list[Any]]
) -> tuple[list[Any], list[Any], list[Any]]:
    """What is found, the requests that processes were started with, and the processes."""
    requests: list[Any] = []
    processes = [ScriptedProcess(script, kernels.ProcessGoneError) for script in scripts]

    def start(request: Any) -> ScriptedProcess:
        requests.append(request)
        return processes[len(requests) - 1]

    request = kernels.Request("tiny", (), "cpu", kernels.BUDGETS["tiny"].effort, time.time() + 600)
    found = list(kernels.supervise(start, request, cases, 1.0, lambda index, variant: None))
    return found, requests, processes


def test_after_a_variant_broke_its_process_another_continues_without_it(
    kernels: ModuleType, measuring: ModuleType
) -> None:
    cases = [make_case(measuring, a=lambda: None, b=lambda: None) for _ in range(3)]
    news = kernels.News
    first, third = (measuring.Measurement("of 0"),), (measuring.Measurement("of 2"),)
    found, requests, processes = supervised(
        kernels,
        cases,
        [
            [news("found", 0, measurements=first), news("running", 1, ("a",)), news("running", 1, ("b",))],
            [news("running", 1, ("a",)), news("lost", 1, ("a",), text="illegal address")],
            [news("found", 2, measurements=third), news("done", 2)],
        ],
    )
    assert [(request.first, dict(request.refused)) for request in requests] == [
        (0, {}),
        (1, {"b": "the process ended with exit code -11"}),
        (2, {}),
    ]
    assert [index for index, _ in found] == [0, 1, 2]
    assert [(m.variant, m.error) for m in found[1][1]] == [
        ("a", "illegal address"),
        ("b", "the process ended with exit code -11"),
    ]
    assert all(process.ended for process in processes)
    assert found[2][1] == list(third)


def test_a_process_that_never_says_what_runs_costs_its_case(kernels: ModuleType, measuring: ModuleType) -> None:
    cases = [make_case(measuring, a=lambda: None, b=lambda: None) for _ in range(2)]
    found, requests, _ = supervised(kernels, cases, [[], []])
    assert [request.first for request in requests] == [0, 1]
    assert all("exit code -11" in measurement.error for _, case in found for measurement in case)


def test_cases_that_would_start_too_late_are_left_out(kernels: ModuleType, measuring: ModuleType) -> None:
    request = kernels.Request("tiny", ("bit_pack",), "cpu", kernels.BUDGETS["tiny"].effort, until=0.0)
    by_itself = list(kernels.measure(request, lambda index, variant: None))
    cases = sys.modules["kernel_cases"].make_cases("tiny", ("bit_pack",))
    by_processes = list(kernels.supervise(pytest.fail, request, cases, 1.0, lambda index, variant: None))
    assert len(by_itself) == len(cases) == 6
    assert by_itself == by_processes
    assert all("left out" in measurement.error for _, found in by_itself for measurement in found)


def test_a_process_measures_as_this_one_does(kernels: ModuleType, cases: ModuleType) -> None:
    request = kernels.Request("tiny", ("row_pack",), "cpu", kernels.BUDGETS["tiny"].effort, time.time() + 600)
    running: list[tuple[int, str]] = []
    found = dict(
        kernels.supervise(
            kernels.MeasuringProcess,
            request,
            cases.make_cases("tiny", ("row_pack",)),
            120.0,
            lambda *variant: running.append(variant),
        )
    )
    assert sorted(found) == list(range(6))
    ours = found[4][0]
    assert (ours.variant, ours.error, ours.max_rel_err) == ("lightning_memopt", None, 0.0)
    assert len(ours.times_ms) == 3
    assert (4, "lightning_memopt") in running


# ---------------------------------------------------------------------------------------------------------------------
# Times on a GPU


def test_the_cache_is_emptied_before_a_call_for_as_long_as_the_cpu_needs_to_issue_it(
    measuring: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, log = [0.0], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Any) -> float:
            return end.at - self.at

    def evict(clock: Any) -> None:
        log.append("evict")
        now[0] += 0.25

    def call() -> None:
        log.append("call")
        now[0] += 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=2**25))
    filler = measuring.CudaClock(torch.device("cpu"))
    assert filler._filler.nbytes == 2**26
    filler._evict()
    monkeypatch.setattr(measuring.CudaClock, "_evict", evict)
    clock = measuring.CudaClock(torch.device("cpu"))
    log.clear()
    assert clock.time(call, host_ms=1.0) == 3.0
    assert log == ["evict"] * 6 + ["call"]  # 6 * 0.25 ms hide 1.5 times the 1 ms
    assert clock.overhead_ms(1.0) == 1.5
    assert clock.overhead_ms(0.0) == 0.25


# ---------------------------------------------------------------------------------------------------------------------
# Errors of results


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("numel", [4096, 2**20 + 24])
def test_one_wrong_bit_at_either_end_of_a_packed_tensor_is_an_error(cases: ModuleType, bits: int, numel: int) -> None:
    counts = cases.random_counts(numel, bits, "fp32", torch.device("cpu"))
    packed, fits, odd = bit_pack(counts, bits)
    assert cases._packed_error(packed, fits, odd, counts, bits) == 0
    for place in (0, -1):
        wrong = packed.clone()
        wrong[place] ^= 128
        assert cases._packed_error(wrong, fits, odd, counts, bits) > 0
    assert cases._stream_error(packed[:-1], counts, bits) == float("inf")
    with pytest.raises(AssertionError, match="said not to fit"):
        cases._packed_error(packed, ~fits, odd, counts, bits)


def test_a_wrong_gradient_is_an_error(cases: ModuleType, measuring: ModuleType) -> None:
    case = next(c for c in cases.make_cases("tiny", ("lif_linear",)) if c.kernel == "lif_linear forward+backward")
    call = case.build(torch.device("cpu"))["lightning_memopt"]()
    result = call.run()
    assert call.error(result) < 1e-6
    for index in range(3):
        wrong = [part.detach().clone() for part in result]
        wrong[index] *= 1.01
        assert call.error(wrong) > 1e-3


def test_the_reference_neuron_spikes_in_some_steps_of_some_neurons(cases: ModuleType) -> None:
    x = cases.random_currents((4, 4096), "fp32", torch.device("cpu"))
    for kind in (cases.IF, cases.LIF):
        assert 0.1 < cases.loop_spikes(kind, x, torch.zeros(4096)).mean() < 0.5


# ---------------------------------------------------------------------------------------------------------------------
# Floors and goals


def test_the_floor_is_the_slower_of_memory_and_the_fastest_arithmetic(
    kernels: ModuleType, measuring: ModuleType
) -> None:
    ceilings = kernels.Ceilings(copy_gbps=1000.0, bf16_tflops=100.0, fp32_tflops=10.0)
    assert ceilings.floor_ms(measuring.Work(bytes=10**9)) == pytest.approx(1)
    product = {"bytes": 10**6, "flops": 10**12}
    assert ceilings.floor_ms(measuring.Work(**product)) == pytest.approx(10)
    assert ceilings.floor_ms(measuring.Work(**product, bf16_flops=3 * 10**12)) == pytest.approx(30)
    few_ones = measuring.Work(**product, bf16_flops=3 * 10**12, fp32_adds=10**10)
    assert ceilings.floor_ms(few_ones) == pytest.approx(2)
    assert ceilings.floor_ms(measuring.Work(bytes=10**11, flops=10**12)) == pytest.approx(100)
    assert kernels.Ceilings().floor_ms(few_ones) is None


def ideal_rows(kernels: ModuleType, cases: ModuleType, size: str, gpu: str = "NVIDIA H200") -> list[Any]:
    """A row for every variant at ``size``: all take 1 ms and nothing but their inputs and results, and are right."""
    rows = []
    for case in cases.make_cases(size):
        for variant in case.variants:
            work = case.other_work.get(variant, case.work)
            measurement = sys.modules["kernel_measuring"].Measurement(
                variant, times_ms=(1.0,), host_ms=0.1, peak_bytes=0, inputs_bytes=0, max_rel_err=0.0
            )
            about = {"versions": {"torch": "2", "cupy": "14"}, "device_name": gpu}
            row = kernels.make_row(case, measurement, kernels.Ceilings(), about)
            rate, _ = kernels._rate(work, 1.0)
            assert row.gbps_or_tflops == rate
            rows.append(row)
    return rows


def change(
    rows: list[Any], kernel: str, variant: str, dtype: str = "fp32", shape: str = "", **values: Any
) -> list[Any]:
    """The rows, those that are meant with other values."""
    meant = [
        row
        for row in rows
        if (row.kernel, row.variant, row.dtype) == (kernel, variant, dtype) and shape in ("", row.shape)
    ]
    assert meant
    return [dataclasses.replace(row, **values) if row in meant else row for row in rows]


def judged(goals: ModuleType, rows: list[Any]) -> dict[str, str]:
    return {result.goal: result.status for result in goals.assess_goals(rows, on_gpu=True)}


@pytest.mark.parametrize("size", ["quick", "full"])
def test_every_goal_is_answered_by_the_rows_of_a_run(
    kernels: ModuleType, cases: ModuleType, goals: ModuleType, size: str
) -> None:
    statuses = judged(goals, ideal_rows(kernels, cases, size))
    assert len(statuses) == 18
    assert all(status == "reached" or status.startswith("short by") for status in statuses.values()), statuses


LARGE = "16384x4096x4096"
FUSED = "lif_linear forward+backward"


@pytest.mark.parametrize(
    ("goal", "good", "bad", "short"),
    [
        ("bit_pack fp32, rate", ("bit_pack", {"gbps_or_tflops": 880.0}), {"gbps_or_tflops": 440.0}, "50.0 %"),
        ("bit_unpack bf16, rate", ("bit_unpack", {"gbps_or_tflops": 800.0}), {"gbps_or_tflops": 760.0}, "5.0 %"),
        (
            "bit_pack fp32, temporaries",
            ("bit_pack", {"peak_bytes": 2**25 + 1024}),
            {"peak_bytes": 2**25 + 2048},
            "1024 bytes",
        ),
        (
            f"packed_spike_linear fp32 {LARGE}, time",
            ("packed_spike_linear", {"ms_median": 0.22}),
            {"ms_median": 0.44},
            "100.0 %",
        ),
        (
            f"packed_spike_linear fp32 {LARGE}, error",
            ("packed_spike_linear", {"max_rel_err_vs_fp64": 1e-7}),
            {"max_rel_err_vs_fp64": 4e-7},
            "100.0 %",
        ),
        (
            "packed_spike_linear bf16, N <= 128, M >= 65536",
            ("packed_spike_linear", {"ms_median": 0.99}),
            {"ms_median": 1.0},
            "0.0 %",
        ),
        (
            "packed_spike_linear bf16, other shapes",
            ("packed_spike_linear", {"ms_median": 1.1}),
            {"ms_median": 1.21},
            "10.0 %",
        ),
        (
            "packed_spike_linear fp32, choice of kernel",
            ("packed_spike_linear", {"ms_median": 1.05}),
            {"ms_median": 2.1},
            "100.0 %",
        ),
        (
            f"sparse_linear fp32 {LARGE}, 2 %, time",
            ("sparse_linear", {"ms_median": 0.3}),
            {"ms_median": 0.6},
            "100.0 %",
        ),
        (
            f"sparse_linear fp32 {LARGE}, 2 %, workspace",
            ("sparse_linear", {"peak_bytes": 2**28 + 2**24}),
            {"peak_bytes": 2**28 + 2**25},
            "100.0 %",
        ),
        (f"{FUSED} fp32 4,8192,1024,4096, time", (FUSED, {"ms_median": 9.5}), {"ms_median": 19.0}, "100.0 %"),
        (
            f"{FUSED} fp32 4,8192,1024,4096, peak",
            (FUSED, {"peak_bytes": 2**20 * (1200 + 128 + 32 + 16)}),
            {"peak_bytes": 2**20 * (2400 + 128 + 32 + 16)},
            "100.0 %",
        ),
        (f"{FUSED} fp32 4,4096,512,512, time", (FUSED, {"ms_median": 0.9}), {"ms_median": 1.5}, "50.0 %"),
        (
            f"{FUSED} fp32 4,4096,512,512, peak",
            (FUSED, {"peak_bytes": 2**20 * (110 + 32 + 8 + 1)}),
            {"peak_bytes": 2**20 * (220 + 32 + 8 + 1)},
            "100.0 %",
        ),
    ],
)
def test_a_goal_is_reached_at_its_limit_and_short_beyond_it(
    kernels: ModuleType,
    cases: ModuleType,
    goals: ModuleType,
    goal: str,
    good: tuple[str, dict[str, float]],
    bad: dict[str, float],
    short: str,
) -> None:
    kernel, values = good
    dtype = "bf16" if "bf16" in goal else "fp32"
    rows = ideal_rows(kernels, cases, "full")
    for copied in ("bit_pack", "bit_unpack"):
        rows = change(rows, copied, "device copy", dtype, gbps_or_tflops=1000.0)
    rows = change(rows, "packed_spike_linear", "F.linear", max_rel_err_vs_fp64=2e-7)
    assert judged(goals, change(rows, kernel, "lightning_memopt", dtype, **values))[goal] == "reached"
    assert judged(goals, change(rows, kernel, "lightning_memopt", dtype, **bad))[goal] == f"short by {short}"


def test_the_worst_shape_decides(kernels: ModuleType, cases: ModuleType, goals: ModuleType) -> None:
    rows = ideal_rows(kernels, cases, "full")
    rows = change(rows, "packed_spike_linear", "lightning_memopt", "bf16", "8192x512x512", ms_median=2.2)
    results = {result.goal: result for result in goals.assess_goals(rows, on_gpu=True)}
    result = results["packed_spike_linear bf16, other shapes"]
    assert (result.measured, result.status) == ("2.200 x at 8192x512x512", "short by 100.0 %")


def test_unfused_means_the_fastest_unfused(kernels: ModuleType, cases: ModuleType, goals: ModuleType) -> None:
    goal, small = f"{FUSED} fp32 4,4096,512,512, time", "4,4096,512,512"
    rows = change(ideal_rows(kernels, cases, "full"), FUSED, "lightning_memopt", shape=small, ms_median=0.9)
    assert judged(goals, rows)[goal] == "reached"
    rows = change(rows, FUSED, "lightning_memopt neuron, F.linear", shape=small, ms_median=0.6)
    assert judged(goals, rows)[goal] == "short by 50.0 %"
    peer = "spikingjelly neuron, F.linear"
    without_peer = change(rows, FUSED, peer, shape=small, ms_median=None, error="not installed")
    assert judged(goals, without_peer)[goal] == "short by 50.0 %"


def test_without_the_peer_its_published_time_counts_on_the_same_gpu_only(
    kernels: ModuleType, cases: ModuleType, goals: ModuleType
) -> None:
    goal, shape = f"sparse_linear fp32 {LARGE}, 2 %, time", f"{LARGE}, 2 %"
    for gpu, status in (("NVIDIA H200", "reached"), ("NVIDIA A100", "not measured: spikingjelly: not installed")):
        rows = ideal_rows(kernels, cases, "full", gpu)
        rows = change(rows, "sparse_linear", "spikingjelly", shape=shape, ms_median=None, error="not installed")
        assert judged(goals, rows)[goal] == status
    assert judged(goals, rows)[f"{FUSED} fp32 4,8192,1024,4096, time"] == "not measured on this device"


def test_a_goal_whose_row_failed_says_why(kernels: ModuleType, cases: ModuleType, goals: ModuleType) -> None:
    rows = ideal_rows(kernels, cases, "full")
    rows = change(rows, "bit_pack", "lightning_memopt", ms_median=None, gbps_or_tflops=None, error="no answer for 45 s")
    assert judged(goals, rows)["bit_pack fp32, rate"] == "not measured: lightning_memopt: no answer for 45 s"
    assert judged(goals, [])["bit_pack fp32, rate"] == "not measured: no row for bit_pack fp32"
