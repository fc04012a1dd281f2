"""
Memory and time of a step: who reaches what
^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

One model, one batch, and a point of peak memory and step time for everything that trains it in less memory::

    python benchmarks/frontier.py --quick --json frontier.json --picture frontier.png    # three minutes on one GPU
    python benchmarks/frontier.py --model vgg --device cuda --compile --json vgg.json --picture vgg.png
    python benchmarks/frontier.py --draw vgg.json gpt.json --picture both.png    # measures nothing

Implementations
    plain                     the model as it is
    lightning_memopt          ``optimize_memory(..., memory_budget=...)``, budgets in equal steps from the least peak
                              that a plan has to the plain one
    spikingjelly memopt       its ``optimize_memory``, levels 1 to 4
    checkpoint every block    ``torch.utils.checkpoint`` around each block; spiking neurons in it start from rest
    torch.compile             with ``--compile``: ``activation_memory_budget`` from 1, which is compilation alone, down
    lightning_memopt, compiled  with ``--compile``: ``optimize_memory(level=1)``, then ``torch.compile``

Whatever an implementation cannot do on the device is a row with its error.

Columns
    setting              the budget in MiB, the level, or the share that ``activation_memory_budget`` is
    peak_bytes           most bytes alive during one forward and backward pass, weights and batch included
    step_ms              median time of one forward and backward pass. Implementations take turns, step by step;
                         compiled models are measured one after another, for they share one cache of compiled code
    setup_s              wall time of planning, searching, or of the first step, which compiles
    max_rel_grad_diff    largest ``max|g - g_plain| / max|g_plain|`` over the parameters; 0 means equal bit for bit
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from budgets import Bench, budgets_between, least_budget
from levels import OURS, PEER, PassCounter, import_peer, optimize
from models import MODELS, Benchmark, MissingLibraryError, Precision, build
from reporting import check_device, console_of_width, environment, escaped, print_environment, write_document
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_steps import (
    MIB,
    finish_step,
    interleaved_times,
    storage_bytes,
    synchronize,
    tensors_of,
    timed_step,
)

from lightning_memopt.accounting import plot_frontier
from lightning_memopt.planning import Plan, apply_plan, find_targets

PLAIN = "plain"
BUDGETS = "lightning_memopt"
MEMOPT = "spikingjelly memopt"
EVERY_BLOCK = "checkpoint every block"
COMPILED = "torch.compile"
BOTH = "lightning_memopt, compiled"
IMPLEMENTATIONS = (PLAIN, BUDGETS, MEMOPT, EVERY_BLOCK, COMPILED, BOTH)
COLUMNS = ("implementation", "setting", "peak_bytes", "step_ms", "setup_s", "max_rel_grad_diff", "error")
SHARES = (1.0, 0.7, 0.5, 0.3, 0.1)
QUICK_SHARES = (1.0, 0.5)

Prepare = Callable[[nn.Module], nn.Module]
"""Optimizes a copy of the model and returns what to train."""


@dataclass(frozen=True)
class Row:
    """One point; numbers are ``None`` where ``error`` says why there are none."""

    implementation: str
    setting: str = ""
    peak_bytes: int | None = None
    step_ms: float | None = None
    setup_s: float | None = None
    max_rel_grad_diff: float | None = None
    error: str | None = None
    step_ms_all: tuple[float, ...] = ()


def measure_frontier(
    bench: Bench,
    *,
    points: int,
    levels: Sequence[int],
    shares: Sequence[float],
    steps: int,
    warmup_steps: int,
    report: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row for each setting of each implementation, every one in its own deep copy of the model."""
    ways: list[tuple[Row, Prepare]] = [(Row(PLAIN, setup_s=0.0), lambda model: model)]
    ways += _planned(bench, points, report)
    ways += [(Row(MEMOPT, f"level {level}"), partial(_by_level, PEER, bench=bench, level=level)) for level in levels]
    ways.append((Row(EVERY_BLOCK), partial(checkpoint_every_block, benchmark=bench.benchmark)))

    rows: list[Row] = []
    models: list[nn.Module | None] = []
    for row, prepare in ways:
        if row.error is not None:
            model = None
        else:
            report(f"{row.implementation} {row.setting}")
            row, model = _measured(bench, row, prepare, [bench.model, *models])
        rows.append(row)
        models.append(model)
    report(f"timing: {warmup_steps} warm-up and {steps} measured rounds")
    times = interleaved_times(models, bench.benchmark, bench.step, bench.device, steps=steps, warmup_steps=warmup_steps)
    rows = [_with_times(row, taken) for row, taken in zip(rows, times, strict=True)]
    models.clear()
    del model
    gc.collect()  # their forwards are parts of cycles, and they are not the memory of what is measured next
    compiled = [(Row(COMPILED, str(share)), share, lambda model: model) for share in shares]
    if compiled:
        compiled.append((Row(BOTH, "level 1"), 1.0, partial(_by_level, OURS, bench=bench, level=1)))
    for row, share, prepare in compiled:
        report(f"{row.implementation} {row.setting}")
        rows.append(_compiled(bench, row, prepare, share, steps, warmup_steps))
    return rows


def _with_times(row: Row, taken: Sequence[float]) -> Row:
    return replace(row, step_ms=statistics.median(taken), step_ms_all=tuple(taken)) if taken else row


def _measured(
    bench: Bench, row: Row, prepare: Prepare, others: Sequence[nn.Module | None]
) -> tuple[Row, nn.Module | None]:
    """Setup time, gradients and peak of one way to train the model."""
    copied = copy.deepcopy(bench.model)
    # By name before anything is wrapped: an implementation may rename parameters as long as it keeps them.
    parameters = dict(copied.named_parameters())
    try:
        synchronize(bench.device)
        started = time.perf_counter()
        model = prepare(copied)
        synchronize(bench.device)
        setup_s = time.perf_counter() - started
        figures = bench.measure(model, parameters)
    except Exception as error:
        # Whatever an implementation cannot do here is a finding: the row reports it and the run goes on.
        return replace(row, error=f"{type(error).__name__}: {error}"), None
    # The other copies of the model wait on the same device for their turn: they are not this step's memory.
    peak_bytes = figures.peak_bytes - storage_bytes(tensors_of(others), bench.device)
    setup_s = setup_s if row.setup_s is None else row.setup_s
    return replace(row, peak_bytes=peak_bytes, setup_s=setup_s, max_rel_grad_diff=bench.difference(figures)), model


def _planned(bench: Bench, points: int, report: Callable[[str], None]) -> list[tuple[Row, Prepare]]:
    """Plans for budgets, made while no other copy of the model is alive: all that is alive counts."""
    report(f"{BUDGETS}: the least budget")
    least = least_budget(bench)
    ways: list[tuple[Row, Prepare]] = []
    for budget in budgets_between(least, bench.plain.peak_bytes, points):
        report(f"{BUDGETS}: planning for {budget / MIB:.1f} MiB")
        row = Row(BUDGETS, f"{budget / MIB:.4g} MiB")
        with bench.cleared():
            started = time.perf_counter()
            try:
                plan = bench.optimize(budget)
            except Exception as error:
                ways.append((replace(row, error=f"{type(error).__name__}: {error}"), lambda model: model))
                continue
            seconds = time.perf_counter() - started
        ways.append((replace(row, setup_s=seconds), partial(_apply, plan=plan)))
    return ways


def _apply(model: nn.Module, plan: Plan) -> nn.Module:
    return apply_plan(model, plan)


def _by_level(implementation: str, model: nn.Module, bench: Bench, level: int) -> nn.Module:
    if implementation == PEER:
        import_peer()
    return optimize(implementation, model, bench.benchmark, level, PassCounter(bench.step))


def checkpoint_every_block(model: nn.Module, benchmark: Benchmark) -> nn.Module:
    """Put ``torch.utils.checkpoint`` around each block of ``model``, in place."""
    for region in find_targets(model, benchmark.targets).regions:
        block = region.module

        def run(*args: Any, block: nn.Module = block, forward: Any = block.forward, **kwargs: Any) -> Any:
            # Its neurons have gone on since; what is run again must start where the forward did.
            benchmark.reset(block)
            return forward(*args, **kwargs)

        block.forward = partial(checkpoint, run, use_reentrant=False)
    return model


def _compiled(bench: Bench, row: Row, prepare: Prepare, share: float, steps: int, warmup_steps: int) -> Row:
    """Prepare and compile a copy so that it keeps ``share`` of what it would keep, and measure it alone."""
    # Else the code compiled for another share would be used again.
    torch._dynamo.reset()

    def compile_and_run(model: nn.Module) -> nn.Module:
        compiled: nn.Module = torch.compile(prepare(model))
        loss: Tensor = bench.step(compiled)
        loss.backward()
        del loss
        finish_step(compiled, bench.benchmark)
        return compiled

    with functorch_config.patch(activation_memory_budget=share):
        row, model = _measured(bench, row, compile_and_run, [bench.model])
        if model is not None:
            rounds = range(warmup_steps + steps)
            taken = [timed_step(model, bench.benchmark, bench.step, bench.device) for _ in rounds]
            row = _with_times(row, taken[warmup_steps:])
    del model
    gc.collect()
    return row


def table(rows: Sequence[Row], title: str) -> Table:
    """The rows as a rich table: peak and time also against the plain step."""
    view = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("implementation", "setting"):
        view.add_column(heading, no_wrap=True)
    for heading in ("peak MiB", "vs plain", "step ms", "vs plain", "setup s", "grad diff"):
        view.add_column(heading, justify="right", no_wrap=True)
    plain = next(row for row in rows if row.implementation == PLAIN)
    for row in rows:
        if row.peak_bytes is None or row.step_ms is None:
            view.add_row(row.implementation, row.setting, "[red]error[/red]")
            continue
        assert plain.peak_bytes is not None
        assert plain.step_ms is not None
        view.add_row(
            row.implementation,
            row.setting,
            f"{row.peak_bytes / MIB:.1f}",
            f"{row.peak_bytes / plain.peak_bytes - 1:+.1%}",
            f"{row.step_ms:.1f}",
            f"{row.step_ms / plain.step_ms - 1:+.1%}",
            f"{row.setup_s:.2f}",
            "0" if row.max_rel_grad_diff == 0 else f"{row.max_rel_grad_diff:.1e}",
        )
    return view


def draw(documents: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel for each document: step time, the plain one's being 1, over peak, one curve per implementation."""
    from matplotlib.figure import Figure

    columns = min(len(documents), 2)
    lines = -(-len(documents) // columns)
    figure = Figure(figsize=(7.0 * columns, 4.2 * lines), layout="constrained")
    drawn: dict[str, Any] = {}
    for place, document in enumerate(documents):
        measured = [Row(**row) for row in document["rows"] if row["step_ms"] is not None]
        plain_ms = next(row.step_ms for row in measured if row.implementation == PLAIN)
        points: dict[str, list[tuple[int, float]]] = {}
        for row in measured:
            points.setdefault(row.implementation, []).append((row.peak_bytes, row.step_ms / plain_ms))
        axes = figure.add_subplot(lines, columns, place + 1)
        plot_frontier(points, time_label="step time, plain = 1", axes=axes)
        axes.set_title(_title(document), fontsize="medium")
        axes.get_legend().remove()
        for line in axes.lines:
            line.set_color(f"C{IMPLEMENTATIONS.index(line.get_label())}")
            drawn[line.get_label()] = line
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _title(document: Mapping[str, Any]) -> str:
    precision = "bf16 autocast" if document["precision"] == "bf16" else "fp32"
    return f"{document['description']}, {precision}, {document['device']}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="vgg")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--size", choices=("tiny", "small", "full"), help="default: small on cpu, full on cuda")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile as well; minutes per share")
    parser.add_argument("--points", type=int, help="budgets (default: 8)")
    parser.add_argument("--steps", type=int, help="measured steps per row (default: 10)")
    parser.add_argument("--warmup", type=int, help="steps per row before those (default: 3)")
    parser.add_argument(
        "--precision",
        choices=("32", "bf16"),
        help="bf16 is autocast; default: 32 on cpu, the precision of the published figures at full size on cuda",
    )
    parser.add_argument(
        "--quick", action="store_true", help="three minutes: 4 budgets, 3 steps, a size smaller unless --size is given"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and environment to FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the points to FILE (needs matplotlib)")
    parser.add_argument(
        "--draw", type=Path, nargs="+", metavar="JSON", help="draw what earlier runs wrote to --picture; nothing runs"
    )
    options = parser.parse_args(arguments)
    if options.draw is not None:
        if options.picture is None:
            parser.error("--draw needs --picture FILE, the picture to write")
        options.draw = [_read(path, parser) for path in options.draw]
    check_device(parser, options.device)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = ("tiny", "small") if options.quick else ("small", "full")
    options.size = options.size or sizes[options.device == "cuda"]
    for name, quick, full in (("points", 4, 8), ("steps", 3, 10), ("warmup", 1, 3)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    if options.points < 1 or options.steps < 1 or options.warmup < 0:
        given = f"{options.points}, {options.steps} and {options.warmup}"
        parser.error(f"--points and --steps must be at least 1 and --warmup 0, got {given}")
    return options


def _read(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    try:
        document: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--draw {path} cannot be read: {error}")
    if not isinstance(document, dict) or document.get("columns") != [*COLUMNS]:
        parser.error(f"--draw {path} was not written by this script with --json")
    return document


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = console_of_width(110)
    device = torch.device(options.device)
    try:
        if options.picture is not None:
            _import_matplotlib()
        if options.draw is not None:
            draw(options.draw, options.picture)
            console.print(f"wrote {options.picture}")
            return 0
        benchmark = build(options.model, size=options.size)
    except MissingLibraryError as error:
        console.print(f"[red]{escaped(str(error))}[/red]")
        return 2
    precision: Precision = options.precision or (benchmark.full_precision if options.device == "cuda" else "32")
    document: dict[str, Any] = {
        "model": benchmark.name,
        "description": benchmark.description,
        "size": options.size,
        "precision": precision,
        **environment(device),
        "columns": COLUMNS,
    }
    title = _title(document)
    with console.status(title) as status:
        rows = measure_frontier(
            Bench(benchmark, device, precision, steps=1),
            points=options.points,
            levels=(1, 2, 3, 4),
            shares=() if not options.compile else QUICK_SHARES if options.quick else SHARES,
            steps=options.steps,
            warmup_steps=options.warmup,
            report=lambda line: status.update(f"{title}: {line}"),
        )
    console.print(table(rows, title))
    for row in rows:
        if row.error is not None:
            console.print(f"{row.implementation} {row.setting}: [red]{escaped(row.error)}[/red]")
    print_environment(console, document)
    document["rows"] = [asdict(row) for row in rows]
    if options.json is not None:
        write_document(document, options.json)
        console.print(f"wrote {options.json}")
    if options.picture is not None:
        draw([document], options.picture)
        console.print(f"wrote {options.picture}")
    return 0


def _import_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingLibraryError(
            f"--picture draws with matplotlib, which could not be imported ({error}); install it with: "
            "pip install 'lightning-memopt[plots]'"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
