"""
Memory and time of every optimization level
^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

One row per implementation and level, all in one run, on the same weights, batch and random numbers::

    python benchmarks/levels.py --model block --peer
    python benchmarks/levels.py --model vgg --device cuda --peer --json vgg.json

``--peer`` adds SpikingJelly's ``memopt``. Whatever an implementation cannot do on the device is a row with its error.

Columns
    peak_bytes           most bytes alive during one forward and backward pass, weights and batch included
    step_ms              median time of one forward and backward pass; the implementations take turns, step by step
    search_s             wall time of ``optimize_memory``
    search_passes        forward passes plus backward passes of the whole model during that search
    max_rel_grad_diff    largest ``max|g - g_plain| / max|g_plain|`` over the parameters; 0 means equal bit for bit
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from models import MODELS, Benchmark, MissingLibraryError, Precision, build
from reporting import check_device, console_of_width, environment, escaped, print_environment, write_document
from rich import box
from rich.table import Table
from torch import Tensor, nn
from training_steps import (
    MIB,
    finish_step,
    gradients_of,
    interleaved_times,
    max_relative_difference,
    seeded_step,
    storage_bytes,
    synchronize,
    tensors_of,
)

from lightning_memopt.measuring import measure_memory

OURS = "lightning_memopt"
PEER = "spikingjelly"
COLUMNS = (
    "implementation",
    "level",
    "peak_bytes",
    "step_ms",
    "search_s",
    "search_passes",
    "max_rel_grad_diff",
    "error",
)


@dataclass(frozen=True)
class Row:
    """One line of the table; numbers are ``None`` where ``error`` says why there are none."""

    implementation: str
    level: int
    peak_bytes: int | None = None
    step_ms: float | None = None
    search_s: float | None = None
    search_passes: int | None = None
    max_rel_grad_diff: float | None = None
    error: str | None = None
    search_forward_passes: int | None = None
    search_backward_passes: int | None = None
    step_ms_all: tuple[float, ...] = ()


class PassCounter:
    """Counts the forward and backward passes of a whole model that go through :meth:`example_forward`.

    Backward passes are seen by a gradient hook on the loss, so both implementations are counted by the same rule.
    """

    def __init__(self, step: Callable[[nn.Module], Tensor]) -> None:
        self._step = step
        self.forward = 0
        self.backward = 0

    def example_forward(self, model: nn.Module) -> Tensor:
        self.forward += 1
        loss = self._step(model)
        if loss.requires_grad:
            loss.register_hook(self._count_backward)
        return loss

    def _count_backward(self, gradient: Tensor) -> None:
        self.backward += 1


def optimize(
    implementation: str, model: nn.Module, benchmark: Benchmark, level: int, counter: PassCounter
) -> nn.Module:
    """Hand the model, blocks and step to one implementation's ``optimize_memory``: same arguments for both."""
    if implementation == PEER:
        from spikingjelly.activation_based.memopt import optimize_memory
    else:
        from lightning_memopt import optimize_memory
    return optimize_memory(
        model,
        benchmark.targets,
        counter.example_forward,
        level=level,
        split_fn=benchmark.split_fn,
        can_chunk=benchmark.can_chunk,
    )


def measure_levels(
    benchmark: Benchmark,
    *,
    device: torch.device,
    levels: Sequence[int],
    implementations: Sequence[str],
    precision: Precision,
    steps: int,
    warmup_steps: int,
    report: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Measure every (implementation, level) pair, each in its own deep copy of ``benchmark.model``."""
    benchmark = replace(
        benchmark,
        model=benchmark.model.to(device).train(),
        batch=tuple(tensor.to(device) for tensor in benchmark.batch),
    )
    step = seeded_step(benchmark, device, precision)
    plain = copy.deepcopy(benchmark.model)
    plain_gradients = gradients_of(dict(plain.named_parameters()), lambda: step(plain))
    finish_step(plain, benchmark)

    rows: list[Row] = []
    models: list[nn.Module | None] = []
    for level in levels:
        for implementation in implementations:
            report(f"{implementation} level {level}: search, gradients, peak")
            model = copy.deepcopy(benchmark.model)
            others = [*tensors_of([benchmark.model, plain, *models]), *plain_gradients.values()]
            row, optimized = _search_and_measure(
                implementation, level, model, benchmark, device, step, plain_gradients, others
            )
            rows.append(row)
            models.append(optimized)
    report(f"timing: {warmup_steps} warm-up and {steps} measured rounds")
    times = interleaved_times(models, benchmark, step, device, steps=steps, warmup_steps=warmup_steps)
    return [
        replace(row, step_ms=statistics.median(taken), step_ms_all=tuple(taken)) if taken else row
        for row, taken in zip(rows, times, strict=True)
    ]


def _search_and_measure(
    implementation: str,
    level: int,
    model: nn.Module,
    benchmark: Benchmark,
    device: torch.device,
    step: Callable[[nn.Module], Tensor],
    plain_gradients: dict[str, Tensor],
    others: list[Tensor],
) -> tuple[Row, nn.Module | None]:
    counter = PassCounter(step)
    # By name before anything is wrapped: an implementation may rename parameters as long as it keeps them.
    parameters = dict(model.named_parameters())
    try:
        synchronize(device)
        started = time.perf_counter()
        model = optimize(implementation, model, benchmark, level, counter)
        synchronize(device)
        search_s = time.perf_counter() - started
        difference = max_relative_difference(gradients_of(parameters, lambda: step(model)), plain_gradients)
        finish_step(model, benchmark)
        peak_bytes = measure_memory(lambda: step(model).backward(), device=device).peak_bytes
    except Exception as error:
        # Whatever an implementation cannot do here is a finding: the row reports it and the run goes on.
        return Row(implementation, level, error=f"{type(error).__name__}: {error}"), None
    finally:
        finish_step(model, benchmark)
    row = Row(
        implementation,
        level,
        # The other copies of the model wait on the same device for their turn: they are not this step's memory.
        peak_bytes=peak_bytes - storage_bytes(others, device),
        search_s=search_s,
        search_passes=counter.forward + counter.backward,
        search_forward_passes=counter.forward,
        search_backward_passes=counter.backward,
        max_rel_grad_diff=difference,
    )
    return row, model


def table(rows: Sequence[Row], title: str) -> Table:
    """The rows as a rich table: bytes in MiB and against the plain step, errors shortened to a word."""
    view = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("implementation", "level", "peak MiB", "vs plain", "step ms", "search s", "passes", "grad diff"):
        view.add_column(heading, justify="left" if heading == "implementation" else "right", no_wrap=True)
    plain = next((row.peak_bytes for row in rows if row.level == 0 and row.peak_bytes), None)
    for row in rows:
        if row.peak_bytes is None or row.step_ms is None or row.search_s is None:
            view.add_row(row.implementation, str(row.level), "[red]error[/red]")
            continue
        view.add_row(
            row.implementation,
            str(row.level),
            f"{row.peak_bytes / MIB:.1f}",
            "" if plain is None else f"{row.peak_bytes / plain - 1:+.1%}",
            f"{row.step_ms:.1f}",
            f"{row.search_s:.2f}",
            str(row.search_passes),
            "0" if row.max_rel_grad_diff == 0 else f"{row.max_rel_grad_diff:.1e}",
        )
    return view


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="block")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--levels", type=int, nargs="+", choices=range(5), default=[0, 1, 2, 3, 4])
    parser.add_argument("--peer", action="store_true", help="measure SpikingJelly's memopt beside ours")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and environment to FILE")
    parser.add_argument(
        "--precision",
        choices=("32", "bf16"),
        help="bf16 is autocast; default: 32 on cpu, the precision of the published figures at full size on cuda",
    )
    parser.add_argument("--steps", type=int, default=10, help="measured steps per row (default: 10)")
    parser.add_argument("--warmup", type=int, default=3, help="steps per row before those (default: 3)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", dest="size", action="store_const", const="small", help="the default on cpu")
    size.add_argument("--full", dest="size", action="store_const", const="full", help="the default on cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model and three steps: a smoke test, no figures")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.warmup < 0:
        parser.error(f"--steps must be at least 1 and --warmup 0, got {options.steps} and {options.warmup}")
    check_device(parser, options.device)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = console_of_width(100)
    device = torch.device(options.device)
    size = "tiny" if options.quick else options.size or ("full" if options.device == "cuda" else "small")
    try:
        benchmark = build(options.model, size=size)
        if options.peer:
            import_peer()
    except MissingLibraryError as error:
        console.print(f"[red]{escaped(str(error))}[/red]")
        return 2
    precision: Precision = options.precision or (benchmark.full_precision if options.device == "cuda" else "32")
    title = f"{benchmark.description}, {'bf16 autocast' if precision == 'bf16' else 'fp32'}, {options.device}"
    with console.status(title) as status:
        rows = measure_levels(
            benchmark,
            device=device,
            levels=options.levels,
            implementations=(OURS, PEER) if options.peer else (OURS,),
            precision=precision,
            steps=3 if options.quick else options.steps,
            warmup_steps=1 if options.quick else options.warmup,
            report=lambda line: status.update(f"{title}: {line}"),
        )
    about = environment(device)
    console.print(table(rows, title))
    for row in rows:
        if row.error is not None:
            console.print(f"{row.implementation} level {row.level}: [red]{escaped(row.error)}[/red]")
    print_environment(console, about)
    if options.json is not None:
        document = {
            "model": benchmark.name,
            "description": benchmark.description,
            "size": size,
            "precision": precision,
            **about,
            "columns": COLUMNS,
            "rows": [asdict(row) for row in rows],
        }
        write_document(document, options.json)
        console.print(f"wrote {options.json}")
    return 0


def import_peer() -> None:
    """Check that the peer can be imported.

    Raises:
        MissingLibraryError: SpikingJelly 2.x with ``memopt`` is not installed.
    """
    try:
        from spikingjelly.activation_based import memopt  # noqa: F401
    except ImportError as error:
        raise MissingLibraryError(
            f"--peer compares with SpikingJelly's memopt, which could not be imported ({error}); "
            "install it with: pip install 'lightning-memopt[examples]'"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
