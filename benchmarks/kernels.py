"""
Spike kernels beside their rivals
^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

One row per kernel, variant, shape and dtype, all in one run, and then what the kernels are meant to reach::

    python benchmarks/kernels.py --json kernels.json
    python benchmarks/kernels.py --quick --only bit_pack lif_linear

On a CUDA device by default, if there is one. Without one, everything runs at tiny sizes: a check, no figures. The
rivals are a copy, cuBLAS, neurons in plain torch and SpikingJelly; one that is not installed is a row that says so, and
so is an error. On CUDA a process of its own measures: where a kernel breaks it or never ends, another continues behind
that row.

Columns
    kernel, variant, shape, dtype
                         shapes are elements, M x K x N, or T,M,K,N
    ms_median, ms_p20, ms_p80
                         of one call; variants of a case take turns (how: ``kernel_measuring.py``)
    gbps_or_tflops       bytes that have to move, or operations of the dense product, by the median
    floor_ms             the least that the work takes at the rates that copies and square products reached in this run
    ratio_to_floor       ms_median / floor_ms
    peak_bytes           most bytes alive during a call, its inputs and results included
    max_rel_err_vs_fp64  largest difference from float64 over the largest value; of neurons alone, the share of spikes
                         that differ from a neuron in float64
    torch, cupy, gpu     versions and device
    error                why there are no figures

The JSON also has ``rate_unit``, ``host_ms`` (what the CPU needs to issue a call), ``inputs_bytes`` and all times.
"""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import torch
from kernel_cases import COPY, KERNELS, LINEAR, SIZES, make_cases
from kernel_goals import GoalResult, assess_goals
from kernel_measuring import (
    NOT_INSTALLED,
    Case,
    DeviceLostError,
    Effort,
    Measurement,
    Work,
    describe_error,
    measure_case,
)
from reporting import (
    check_device,
    console_of_width,
    environment,
    escaped,
    print_environment,
    version_of,
    write_document,
)
from rich import box
from rich.table import Table

COLUMNS = (
    "kernel",
    "variant",
    "shape",
    "dtype",
    "ms_median",
    "ms_p20",
    "ms_p80",
    "gbps_or_tflops",
    "floor_ms",
    "ratio_to_floor",
    "peak_bytes",
    "max_rel_err_vs_fp64",
    "torch",
    "cupy",
    "gpu",
    "error",
)
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One line of the table; numbers are ``None`` where there are none, and ``error`` says why."""

    kernel: str
    variant: str
    shape: str
    dtype: str
    torch: str
    cupy: str
    gpu: str
    ms_median: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    gbps_or_tflops: float | None = None
    floor_ms: float | None = None
    ratio_to_floor: float | None = None
    peak_bytes: int | None = None
    max_rel_err_vs_fp64: float | None = None
    error: str | None = None
    rate_unit: str | None = None
    host_ms: float | None = None
    inputs_bytes: int | None = None
    ms_all: tuple[float, ...] = ()


@dataclass(frozen=True)
class Budget:
    """Time of a run.

    Attributes:
        effort: of each case.
        seconds: of the whole run; cases that would start later are left out.
        patience_s: how long a variant may take before its process is ended.
    """

    effort: Effort
    seconds: float
    patience_s: float


BUDGETS = {
    "tiny": Budget(Effort(seconds=0.05, fewest=3, most=3), seconds=600, patience_s=120),
    "quick": Budget(Effort(seconds=0.4, fewest=5, most=30), seconds=105, patience_s=45),
    "full": Budget(Effort(seconds=2.0, fewest=10, most=100), seconds=440, patience_s=90),
}


# ---------------------------------------------------------------------------------------------------------------------
# Measuring, in this process or in one that may break


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes:
        size: of the cases, a name in ``SIZES``.
        only: names in ``KERNELS``; none means all.
        device: where to measure.
        effort: of each case.
        until: when to start no further case, as ``time.time()``.
        first: index of the case to begin with.
        refused: variants of that case that must not run, and what their rows say instead.
    """

    size: str
    only: tuple[str, ...]
    device: str
    effort: Effort
    until: float
    first: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)


def measure(request: Request, announce: Callable[[int, str], None]) -> Iterator[tuple[int, list[Measurement]]]:
    """Measure one case after the other; yields each case's index with its measurements.

    Raises:
        DeviceLostError: the device cannot be used any more in this process.
    """
    torch.set_float32_matmul_precision("highest")
    device = torch.device(request.device)
    cases = make_cases(request.size, request.only)
    try:
        for index in range(request.first, len(cases)):
            if time.time() >= request.until:
                yield index, left_out(cases[index])
                continue
            # Reference cycles may hold memory that the next case needs. What is left, modules mostly, has none of its
            # tensors: measuring memory on the CPU, which searches all objects for tensors, need not see it.
            gc.collect()
            gc.freeze()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            refused = request.refused if index == request.first else {}
            tell = functools.partial(announce, index)
            yield index, measure_case(cases[index], device, request.effort, refused=refused, announce=tell)
    finally:
        gc.unfreeze()


def left_out(case: Case) -> list[Measurement]:
    """Measurements of a case for which there was no time."""
    return [Measurement(variant, error="left out: the time of this run was over") for variant in case.variants]


@dataclass(frozen=True)
class News:
    """What a measuring process tells.

    Attributes:
        kind: ``"running"`` a variant, ``"found"`` the measurements of a case, ``"lost"`` the device, ``"done"``.
        index: of the case.
        variants: those that run, or that the device was lost by (none: not known).
        measurements: of the case.
        text: why the device was lost.
    """

    kind: str
    index: int
    variants: tuple[str, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    text: str = ""


class ProcessGoneError(Exception):
    """A measuring process ended, or told nothing for too long."""


class MeasuringProcess:
    """A process that measures a request and tells about each step."""

    def __init__(self, request: Request) -> None:
        # A forked process could not use CUDA once this one does.
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=tell_measurements, args=(theirs, request), daemon=True)
        self._process.start()
        theirs.close()

    def next(self, patience_s: float) -> News:
        """Wait for news.

        Raises:
            ProcessGoneError: there will be none, or there were none for ``patience_s`` seconds.
        """
        try:
            if not self._ours.poll(patience_s):
                raise ProcessGoneError(f"no answer for {patience_s:.0f} s")
            news: News = self._ours.recv()
        except (EOFError, OSError):
            self._process.join(timeout=10)
            raise ProcessGoneError(f"the process ended with exit code {self._process.exitcode}") from None
        return news

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self._ours.close()


def tell_measurements(connection: Connection, request: Request) -> None:
    """Measure, in a process of its own, and send news."""
    index = request.first

    def announce(case: int, variant: str) -> None:
        nonlocal index
        index = case
        connection.send(News("running", case, (variant,)))

    try:
        for case, measurements in measure(request, announce):
            connection.send(News("found", case, measurements=tuple(measurements)))
    except DeviceLostError as lost:
        connection.send(News("lost", index, lost.variants, text=lost.message))
    except Exception as error:
        connection.send(News("lost", index, text=describe_error(error)))
    else:
        connection.send(News("done", index))


def supervise(
    start: Callable[[Request], MeasuringProcess],
    request: Request,
    cases: Sequence[Case],
    patience_s: float,
    announce: Callable[[int, str], None],
) -> Iterator[tuple[int, list[Measurement]]]:
    """Like :func:`measure`, by processes: where one breaks or hangs, another continues without the guilty variant.

    Args:
        start: starts a process for a request.
        request: what to measure.
        cases: the cases of the request.
        patience_s: seconds without news after which a process is ended.
        announce: is told the case and the variant that is running.
    """
    first, refused = 0, dict[str, str]()
    while first < len(cases):
        if time.time() >= request.until:
            yield first, left_out(cases[first])
            first, refused = first + 1, {}
            continue
        process = start(replace(request, first=first, refused=refused))
        suspects: tuple[str, ...] = ()
        try:
            while True:
                news = process.next(patience_s)
                if news.kind == "done":
                    return
                if news.index != first:
                    first, refused = news.index, {}
                suspects, text = news.variants, news.text
                if news.kind == "running":
                    announce(first, suspects[0])
                elif news.kind == "found":
                    yield first, list(news.measurements)
                    first, refused = first + 1, {}
                else:
                    break
        except ProcessGoneError as gone:
            text = str(gone)
        finally:
            process.end()
        if first < len(cases):
            variants = cases[first].variants
            # Nobody new to blame: then no variant of this case can be measured.
            guilty = [variant for variant in suspects if variant not in refused] or variants
            refused = {**dict.fromkeys(guilty, text), **refused}
            if all(variant in refused for variant in variants):
                yield first, [Measurement(variant, error=refused[variant]) for variant in variants]
                first, refused = first + 1, {}


# ---------------------------------------------------------------------------------------------------------------------
# Rows


@dataclass(frozen=True)
class Ceilings:
    """Rates that the device reached in this run; None where they could not be measured.

    Attributes:
        copy_gbps: of a copy, read and written, in GB/s.
        bf16_tflops: of a square bf16 product.
        fp32_tflops: of a square fp32 product.
    """

    copy_gbps: float | None = None
    bf16_tflops: float | None = None
    fp32_tflops: float | None = None

    def floor_ms(self, work: Work) -> float | None:
        """The least time that ``work`` takes at these rates, in ms."""
        if self.copy_gbps is None:
            return None
        floor = work.bytes / self.copy_gbps / 1e6
        if work.flops == 0:
            return floor
        ways = []
        if self.bf16_tflops is not None:
            ways.append((work.flops if work.bf16_flops is None else work.bf16_flops) / self.bf16_tflops / 1e9)
        if self.fp32_tflops is not None and work.fp32_adds is not None:
            # An addition takes the instruction that could also multiply.
            ways.append(2 * work.fp32_adds / self.fp32_tflops / 1e9)
        return max(floor, min(ways)) if ways else None


def find_ceilings(found: Sequence[tuple[Case, Measurement]]) -> Ceilings:
    """The rates of the copy and of the square products."""

    def rate(kernel: str, variant: str, dtype: str) -> float | None:
        for case, measurement in found:
            if (case.kernel, measurement.variant, case.dtype) == (kernel, variant, dtype) and measurement.times_ms:
                return _rate(case.work, float(numpy.median(measurement.times_ms)))[0]
        return None

    return Ceilings(
        copy_gbps=rate("device_copy", COPY, "fp32"),
        bf16_tflops=rate("matmul", LINEAR, "bf16"),
        fp32_tflops=rate("matmul", LINEAR, "fp32"),
    )


def _rate(work: Work, ms: float) -> tuple[float, str]:
    return (work.flops / ms / 1e9, "TFLOP/s") if work.flops else (work.bytes / ms / 1e6, "GB/s")


def make_row(case: Case, measurement: Measurement, ceilings: Ceilings, about: Mapping[str, Any]) -> Row:
    """The row of one variant of a case."""
    given = {
        "kernel": case.kernel,
        "variant": measurement.variant,
        "shape": case.shape,
        "dtype": case.dtype,
        "torch": about["versions"]["torch"],
        "cupy": about["versions"]["cupy"] or NOT_INSTALLED,
        "gpu": about["device_name"],
    }
    if measurement.error is not None:
        return Row(**given, error=measurement.error)
    p20, median, p80 = (float(value) for value in numpy.percentile(measurement.times_ms, (20, 50, 80)))
    work = case.other_work.get(measurement.variant, case.work)
    rate, unit = _rate(work, median)
    floor_ms = ceilings.floor_ms(work)
    return Row(
        **given,
        ms_median=median,
        ms_p20=p20,
        ms_p80=p80,
        gbps_or_tflops=rate,
        floor_ms=floor_ms,
        ratio_to_floor=None if floor_ms is None else median / floor_ms,
        peak_bytes=measurement.peak_bytes,
        max_rel_err_vs_fp64=measurement.max_rel_err,
        rate_unit=unit,
        host_ms=measurement.host_ms,
        inputs_bytes=measurement.inputs_bytes,
        ms_all=measurement.times_ms,
    )


def about_run(device: torch.device) -> dict[str, Any]:
    """What a reader needs to repeat the run, with the versions that kernels depend on."""
    about = environment(device)
    cupy = next(filter(None, map(version_of, ("cupy-cuda13x", "cupy-cuda12x", "cupy"))), None)
    about["versions"] |= {"torch": torch.__version__, "cupy": cupy}
    return {**about, "cuda": torch.version.cuda}


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """One rich table for each kernel: ours in bold, errors as a word."""
    for kernel in dict.fromkeys(row.kernel for row in rows):
        view = Table(title=kernel, title_justify="left", box=box.SIMPLE_HEAD)
        for heading in ("shape", "dtype", "variant"):
            view.add_column(heading, no_wrap=True)
        for heading in ("ms", "p20", "p80", "rate", "floor ms", "x floor", "peak MiB", "error"):
            view.add_column(heading, justify="right", no_wrap=True)
        before = None
        for row in rows:
            if row.kernel == kernel:
                case = (row.shape, row.dtype)
                view.add_row(*(case if case != before else ("", "")), *_cells(row))
                before = case
        yield view


def _cells(row: Row) -> tuple[str, ...]:
    variant = f"[bold]{row.variant}[/bold]" if row.variant.startswith("lightning_memopt") else row.variant
    if row.ms_median is None:
        return variant, f"[red]{'error' if row.error != NOT_INSTALLED else row.error}[/red]"
    return (
        variant,
        *(_number(value) for value in (row.ms_median, row.ms_p20, row.ms_p80)),
        f"{row.gbps_or_tflops:.4g} {row.rate_unit}",
        _number(row.floor_ms),
        "-" if row.ratio_to_floor is None else f"{row.ratio_to_floor:.2f}",
        "-" if row.peak_bytes is None else f"{row.peak_bytes / MIB:.1f}",
        "-" if row.max_rel_err_vs_fp64 is None else f"{row.max_rel_err_vs_fp64:.1e}",
    )


def error_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Each error once, with the rows that it explains."""
    by_error: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.error is not None:
            by_error.setdefault((row.variant, row.error), []).append(row)
    for (variant, error), found in by_error.items():
        where = "; ".join(dict.fromkeys(f"{row.kernel} {row.shape} {row.dtype}" for row in found))
        if len(found) > 2:
            where = f"{len(found)} rows of {', '.join(dict.fromkeys(row.kernel for row in found))}"
        yield f"{escaped(variant)}, {escaped(where)}: [red]{escaped(error)}[/red]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 100 else f"{value:.0f}"


def goal_table(goals: Sequence[GoalResult]) -> Table:
    """The goals as a rich table."""
    view = Table(title="goals", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("goal", "target", "measured", "status"):
        view.add_column(heading)
    for goal in goals:
        color = "green" if goal.status == "reached" else "red" if goal.status.startswith("short") else "dim"
        view.add_row(goal.goal, goal.target, goal.measured, f"[{color}]{escaped(goal.status)}[/{color}]")
    return view


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[2].partition("::")[0].strip())
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument(
        "--only", nargs="+", choices=tuple(KERNELS), default=[], metavar="NAME", help=", ".join(KERNELS)
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows, goals and environment to FILE")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer shapes, smaller tensors, within two minutes on a GPU")
    size.add_argument("--size", choices=tuple(SIZES), help="default: full on cuda, tiny on cpu")
    options = parser.parse_args(arguments)
    check_device(parser, options.device)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    started = time.time()
    options = parse(arguments)
    console = console_of_width(160)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    size = options.size or (("quick" if options.quick else "full") if on_gpu else "tiny")
    cases = make_cases(size, options.only)
    budget = BUDGETS[size]
    request = Request(size, tuple(options.only), options.device, budget.effort, started + budget.seconds)

    found: list[tuple[Case, Measurement]] = []
    with console.status("") as status:

        def announce(index: int, variant: str) -> None:
            status.update(f"{index + 1} of {len(cases)}: {cases[index].name}: {variant}")

        if on_gpu:
            results = supervise(MeasuringProcess, request, cases, budget.patience_s, announce)
        else:
            results = measure(request, announce)
        for index, measurements in results:
            found += [(cases[index], measurement) for measurement in measurements]
    about = about_run(device)
    ceilings = find_ceilings(found)
    rows = [make_row(case, measurement, ceilings, about) for case, measurement in found]
    goals = assess_goals(rows, on_gpu=on_gpu)

    for view in tables(rows):
        console.print(view)
    for line in error_lines(rows):
        console.print(line)
    console.print(goal_table(goals))
    print_environment(console, about)
    console.print(f"{time.time() - started:.0f} s")
    if options.json is not None:
        document = {
            "size": size,
            **about,
            "ceilings": asdict(ceilings),
            "columns": COLUMNS,
            "rows": [asdict(row) for row in rows],
            "goals": [asdict(goal) for goal in goals],
        }
        write_document(document, options.json)
        console.print(f"wrote {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
