"""
Memory budgets, kept
^^^^^^^^^^^^^^^^^^^^

Each model is trained within budgets in equal steps from the least peak that any plan has to the peak of the plain
model, planned by ``optimize_memory(model, example_forward=..., memory_budget=...)`` and nothing else::

    python benchmarks/budgets.py --json budgets.json
    python benchmarks/budgets.py --device cuda --model vgg gpt --json budgets.json
    python benchmarks/budgets.py --model block --json budgets.json --resume     # only what the file lacks

One copy of the model is alive at any time, so a budget is compared with all that the device holds, as in training. At
the end the gates of ``budget_gates.py`` say what was kept and what was not.

Columns
    asked                which budget: 1/12 is the least peak, 12/12 the plain one; ``105MiB`` is asked of the block
                         model. ``no extra products`` is no budget: the least peak without repeating a product
    predicted_peak       what the planner said before it measured the plan that it took
    measured_peak        most bytes alive during one step, measured anew after planning, weights and batch included
    utilisation          measured_peak / budget_bytes
    predicted_ms         plain_ms and the time that the planner says its plan adds. On a GPU it counts in ms; on a CPU
                         in bytes moved, turned into ms at the speed of this model's plain step
    step_ms, plain_ms    median time of a step with the plan, and of plain steps just before
    extra_flops_ratio    operations of a real step (products, convolutions, attention) over those of a plain one, less 1
    added_time           the time that the planner says its plan adds, as a share of a plain step
    steps_measured       real steps that planning took
    max_rel_grad_diff    largest ``max|g - g_plain| / max|g_plain|`` over the parameters; 0 means equal bit for bit
    held_bytes           bytes that the forward pass leaves alive for the backward pass
    planning_s           wall time of ``optimize_memory``
    treatments           how many regions of the plan are treated how
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from budget_gates import BLOCK_BUDGET, NO_PRODUCTS, Gate, assess_gates
from models import MODELS, Benchmark, MissingLibraryError, Precision, build
from reporting import check_device, console_of_width, environment, escaped, print_environment, write_document
from rich import box
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from training_steps import (
    MIB,
    finish_step,
    gradients_of,
    max_relative_difference,
    seeded_step,
    synchronize,
    timed_step,
)

from lightning_memopt import optimize_memory
from lightning_memopt.checkpointing import RegionConfig
from lightning_memopt.measuring import mark_memory, measure_memory
from lightning_memopt.observing.costs import Choice, ChoiceCost, RegionCosts, StepCosts
from lightning_memopt.observing.region_costs import ObservedStep, observe_step, treatment_arguments
from lightning_memopt.observing.regions import with_surroundings
from lightning_memopt.planning import MemoryBudgetError, Plan, applied_plan, find_targets, remove_plan, unchanged
from lightning_memopt.planning.apply import treated_as
from lightning_memopt.planning.solve import pick, solve, trade_off
from lightning_memopt.planning.within_budget import choices_of

COLUMNS = (
    "model",
    "asked",
    "budget_bytes",
    "predicted_peak",
    "measured_peak",
    "utilisation",
    "predicted_ms",
    "step_ms",
    "plain_ms",
    "extra_flops_ratio",
    "added_time",
    "steps_measured",
    "max_rel_grad_diff",
    "held_bytes",
    "plain_held_bytes",
    "planning_s",
    "treatments",
    "cuts_time",
    "error",
)


@dataclass(frozen=True)
class Row:
    """One budget of one model; numbers are ``None`` where ``error`` says why there are none."""

    model: str
    asked: str
    budget_bytes: int | None
    predicted_peak: int | None = None
    measured_peak: int | None = None
    utilisation: float | None = None
    predicted_ms: float | None = None
    step_ms: float | None = None
    plain_ms: float | None = None
    extra_flops_ratio: float | None = None
    added_time: float | None = None
    steps_measured: int | None = None
    max_rel_grad_diff: float | None = None
    held_bytes: int | None = None
    plain_held_bytes: int | None = None
    planning_s: float | None = None
    treatments: str | None = None
    cuts_time: bool | None = None
    error: str | None = None


@dataclass(frozen=True)
class PlainModel:
    """A model before any plan."""

    model: str
    description: str
    plain_peak: int
    """Most bytes alive during a plain step."""
    plain_held_bytes: int
    plain_flops: int
    parameter_bytes: int
    least_peak: int
    """The smallest budget that can be met, as the refusal of a smaller one names it."""
    budgets: Mapping[str, int]
    """Bytes by what was asked."""


@dataclass(frozen=True)
class StepFigures:
    """What two real steps under one treatment show."""

    peak_bytes: int
    held_bytes: int
    flops: int
    gradients: Mapping[str, np.ndarray[Any, Any]]
    """By parameter, on the host."""


class Bench:
    """One model on its device, and what a plain step of it does."""

    def __init__(self, benchmark: Benchmark, device: torch.device, precision: Precision, steps: int) -> None:
        self.benchmark = replace(
            benchmark,
            model=benchmark.model.to(device).train(),
            batch=tuple(tensor.to(device) for tensor in benchmark.batch),
        )
        self.model = self.benchmark.model
        self.device = device
        self._steps = steps
        self.step = seeded_step(self.benchmark, device, precision)
        plain = self.measure()
        self.plain = plain

    def measure(self, model: nn.Module | None = None, parameters: dict[str, nn.Parameter] | None = None) -> StepFigures:
        """Run the model as it is treated now: once for its gradients and operations, once for its bytes.

        Args:
            model: a copy of the model instead, whose operations are not counted: compiled code does not run while they
                are.
            parameters: those of the copy by the names that they have in the model.
        """
        counter = FlopCounterMode(display=False)
        with counter if model is None else nullcontext():
            model = self.model if model is None else model
            parameters = dict(model.named_parameters()) if parameters is None else parameters
            gradients = gradients_of(parameters, lambda: self.step(model))
        finish_step(model, self.benchmark)
        # Arrays on the host do not count as memory of the steps that follow.
        kept = {name: gradient.cpu().numpy().copy() for name, gradient in gradients.items()}
        del gradients

        def step() -> None:
            loss = self.step(model)
            mark_memory("forward done")
            loss.backward()

        report = measure_memory(step, device=self.device)
        finish_step(model, self.benchmark)
        held = next(mark.bytes for mark in report.marks if mark.name == "forward done")
        return StepFigures(report.peak_bytes, held - report.start_bytes, counter.get_total_flops(), kept)

    def difference(self, figures: StepFigures) -> float:
        """How far the gradients are from those of the plain step."""
        found, expected = (
            {name: torch.from_numpy(array) for name, array in each.gradients.items()} for each in (figures, self.plain)
        )
        return max_relative_difference(found, expected)

    def median_ms(self) -> float:
        """Median time of a step of the model as it is treated now."""
        taken = [timed_step(self.model, self.benchmark, self.step, self.device) for _ in range(self._steps)]
        return statistics.median(taken)

    def optimize(self, budget: int | str) -> Plan:
        """Plan for a budget, from nothing but a forward pass."""
        optimize_memory(self.model, example_forward=self.step, memory_budget=budget)
        plan = applied_plan(self.model)
        assert plan is not None
        return plan

    def observe(self) -> ObservedStep:
        """What the planner sees: the same that it sees in every call of :meth:`optimize`."""
        with unchanged(self.model) as state:
            regions = with_surroundings(self.model, find_targets(self.model)).regions
            return observe_step(self.model, regions, self.step, state, device=self.device)

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Plain before and after, with nothing left of a step."""
        try:
            yield
        finally:
            remove_plan(self.model)
            finish_step(self.model, self.benchmark)
            gc.collect()


def measure_model(
    bench: Bench,
    points: int,
    *,
    known: PlainModel | None = None,
    done: Sequence[str] = (),
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[PlainModel | Row]:
    """The plain model, then a row for each budget that is not ``done`` yet."""
    name = bench.benchmark.name
    if known is None:
        report("the least budget")
        known = _plain_model(bench, points)
    yield known
    for asked, budget in known.budgets.items():
        if asked not in done:
            report(f"{asked}: {budget / MIB:.1f} MiB")
            yield _row(bench, known, asked, budget)
    if NO_PRODUCTS not in done and name in ("gpt", "vgg"):
        report(NO_PRODUCTS)
        yield _without_products(bench, known, bench.observe())


def _plain_model(bench: Bench, points: int) -> PlainModel:
    benchmark, plain = bench.benchmark, bench.plain
    least = least_budget(bench)
    between = budgets_between(least, plain.peak_bytes, points)
    budgets = {f"{number}/{points}": budget for number, budget in enumerate(between, start=1)}
    if benchmark.name == "block" and plain.peak_bytes > 200 * MIB:  # not the tiny one
        budgets[BLOCK_BUDGET] = 105 * MIB
    return PlainModel(
        model=benchmark.name,
        description=benchmark.description,
        plain_peak=plain.peak_bytes,
        plain_held_bytes=plain.held_bytes,
        plain_flops=plain.flops,
        parameter_bytes=sum(parameter.nbytes for parameter in bench.model.parameters()),
        least_peak=least,
        budgets=budgets,
    )


def least_budget(bench: Bench) -> int:
    """The smallest budget that can be met, as the refusal of a single byte names it."""
    with bench.cleared():
        try:
            bench.optimize(1)
        except MemoryBudgetError as refusal:
            return refusal.least_bytes
    raise AssertionError(f"A plan for {bench.benchmark.name} claims to keep a step within one byte.")


def budgets_between(least: int, most: int, count: int) -> list[int]:
    """So many budgets in equal steps from ``least`` to ``most``."""
    gap = max(0, most - least)
    return [least + round(number * gap / max(count - 1, 1)) for number in range(count)]


def _row(bench: Bench, known: PlainModel, asked: str, budget: int) -> Row:
    row = Row(known.model, asked, budget, plain_ms=bench.median_ms(), plain_held_bytes=known.plain_held_bytes)
    with bench.cleared():
        try:
            synchronize(bench.device)
            started = time.perf_counter()
            plan = bench.optimize(budget)
            planning_s = time.perf_counter() - started
            assert plan.added_time is not None
            assert plan.plain_time is not None
            added = AddedTime(plan.added_time, plan.plain_time, in_ms=plan.time_unit == "ms")
            row = _with_figures(row, bench, known, choices_in(plan), added)
        except Exception as error:
            # A refusal, or whatever else goes wrong, is a finding: the row reports it and the run goes on.
            return replace(row, error=f"{type(error).__name__}: {error}")
    assert row.measured_peak is not None
    return replace(
        row,
        predicted_peak=plan.predicted_peak_bytes,
        utilisation=row.measured_peak / budget,
        steps_measured=plan.search_passes,
        planning_s=planning_s,
    )


def _without_products(bench: Bench, known: PlainModel, observed: ObservedStep) -> Row:
    """The plan with the least peak of those that repeat no product, in real steps."""
    row = Row(known.model, NO_PRODUCTS, None, plain_ms=bench.median_ms(), plain_held_bytes=known.plain_held_bytes)
    costs = replace(observed.costs, regions=tuple(map(_repeating_no_product, observed.costs.regions)))
    solution = solve(costs, 0)
    choices = choices_of(costs, solution.assignment)
    layout = {
        path: RegionConfig(**treatment_arguments(path, choice, observed.observations[path]))
        for path, choice in choices.items()
    }
    with bench.cleared(), treated_as(bench.model, layout):
        try:
            added = AddedTime(solution.simulated.extra, costs.plain, in_ms=costs.unit == "ms")
            row = _with_figures(row, bench, known, choices, added)
        except Exception as error:
            return replace(row, error=f"{type(error).__name__}: {error}")
    return replace(row, predicted_peak=solution.simulated.peak_bytes)


def _repeating_no_product(region: RegionCosts) -> RegionCosts:
    choices = tuple(
        replace(choice, refused="it repeats a product") if choice.extra_flops else choice for choice in region.choices
    )
    return replace(region, choices=choices, children=tuple(map(_repeating_no_product, region.children)))


@dataclass(frozen=True)
class AddedTime:
    """What a plan is predicted to add to a step, in ms or in bytes moved."""

    added: float
    plain: float
    in_ms: bool


def _with_figures(row: Row, bench: Bench, known: PlainModel, choices: Mapping[str, Choice], time: AddedTime) -> Row:
    """The row with what real steps of the treated model show."""
    figures = bench.measure()
    assert row.plain_ms is not None
    return replace(
        row,
        measured_peak=figures.peak_bytes,
        predicted_ms=row.plain_ms + (time.added if time.in_ms else row.plain_ms * time.added / time.plain),
        step_ms=bench.median_ms(),
        extra_flops_ratio=figures.flops / known.plain_flops - 1,
        added_time=time.added / time.plain,
        max_rel_grad_diff=bench.difference(figures),
        held_bytes=figures.held_bytes,
        treatments=_in_words(choices),
        cuts_time=any(choice.chunks > 1 for choice in choices.values()),
    )


def choices_in(plan: Plan) -> dict[str, Choice]:
    """The treatment of every region that is not kept, by path."""
    return {
        region.path: Choice(region.treatment, region.compressor, region.chunks, region.cheap_chunks)
        for region in plan.treated
    }


def _in_words(choices: Mapping[str, Choice]) -> str:
    """``2 pack, 1 recompute, 1 recompute x4``."""
    words = Counter(
        choice.treatment.replace("_", " ")
        + (f" x{choice.chunks}" if choice.chunks > 1 else "")
        + (f" ({choice.cheap_chunks} cheap)" if choice.cheap_chunks else "")
        for choice in choices.values()
    )
    return ", ".join(f"{count} {word}" for word, count in sorted(words.items())) or "all kept"


def synthetic_step(regions: int, choices: int = 8, *, seed: int = 0) -> StepCosts:
    """A chain of unequal regions with unequal choices. A kept region holds its input, which the one before may hold."""
    rng = random.Random(seed)
    boundary = [rng.randrange(MIB, 30 * MIB) for _ in range(regions + 1)]
    ways = [Choice(), Choice("pack"), Choice("recompute_cheap"), Choice("recompute"), Choice("recompute", "bit")]
    ways += [Choice("recompute", "bit", 2**power) for power in range(1, choices)]
    made = []
    for at in range(regions):
        size, own = boundary[at], regions + 1 + at * choices
        costs = [ChoiceCost(Choice(), {at: size, at + 1: boundary[at + 1], own: 6 * size}, 3 * size, 4 * size, 0.0)]
        for number, choice in enumerate(ways[1:choices], start=1):
            holds = {own + number: int(8 * size * (1 - number / choices) * rng.uniform(0.6, 1.0))}
            holds |= {at: size} if rng.random() < 0.5 else {}
            peaks = int(size * rng.uniform(2, 10)), int(size * rng.uniform(2, 10))
            costs.append(ChoiceCost(choice, holds, *peaks, extra=size / MIB * number * rng.uniform(0.3, 3.0)))
        made.append(RegionCosts(f"block.{at}", tuple(costs), {at: size}, size, rng.randrange(MIB)))
    plain = 30.0 * regions
    return StepCosts(256 * MIB, tuple(made), ({},) * (regions + 1), 64 * MIB, 0, 0, plain, 0, "ms")


def solver_seconds(regions: int = 1000, repeats: int = 2) -> float:
    """CPU seconds to solve so many regions for a budget in the middle of what plans reach: the least of some tries."""
    costs = synthetic_step(regions)
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        plans = trade_off(costs)
        pick(plans, int(plans.peaks[0] + plans.peaks[-1]) // 2)
        taken.append(time.process_time() - started)
    return min(taken)


# ---------------------------------------------------------------------------------------------------------------------
# What a run shows


def table(known: PlainModel, rows: Sequence[Row]) -> Table:
    """The rows of one model as a rich table: bytes in MiB, times and operations against the plain step."""
    title = f"{known.description}: plain peak {known.plain_peak / MIB:.1f} MiB, least {known.least_peak / MIB:.1f} MiB"
    view = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("budget", "MiB", "predicted", "measured", "used", "ms", "predicted", "plain", "FLOPs", "grad diff"):
        view.add_column(heading, justify="left" if heading == "budget" else "right", no_wrap=True)
    view.add_column("steps", justify="right")
    view.add_column("treatments", overflow="fold")
    for row in rows:
        budget = "" if row.budget_bytes is None else f"{row.budget_bytes / MIB:.1f}"
        if row.error is not None or row.measured_peak is None:
            view.add_row(row.asked, budget, "[red]error[/red]")
            continue
        view.add_row(
            row.asked,
            budget,
            f"{(row.predicted_peak or 0) / MIB:.1f}",
            f"{row.measured_peak / MIB:.1f}",
            "" if row.utilisation is None else f"{row.utilisation:.1%}",
            f"{row.step_ms:.1f}",
            f"{row.predicted_ms:.1f}",
            f"{row.plain_ms:.1f}",
            f"{row.extra_flops_ratio:+.1%}",
            "0" if row.max_rel_grad_diff == 0 else f"{row.max_rel_grad_diff:.1e}",
            "" if row.steps_measured is None else str(row.steps_measured),
            row.treatments,
        )
    return view


def gates_table(gates: Sequence[Gate]) -> Table:
    """The gates as a rich table."""
    view = Table(title="Gates", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("gate", "target", "measured"):
        view.add_column(heading, overflow="fold")
    view.add_column("kept", no_wrap=True)
    for gate in gates:
        kept = "-" if gate.kept is None else "[green]yes[/green]" if gate.kept else "[red]no[/red]"
        view.add_row(gate.gate, gate.target, escaped(gate.measured), kept)
    return view


def _read(document: Mapping[str, Any], again: Sequence[str]) -> tuple[dict[str, PlainModel], dict[str, list[Row]]]:
    """Plain models and rows of a file that :func:`main` wrote; without errors of models that are measured again."""
    names = {field.name for field in fields(Row)}
    known = {entry["model"]: PlainModel(**entry) for entry in document.get("models", ())}
    rows: dict[str, list[Row]] = {}
    for entry in document.get("rows", ()):
        if entry["error"] is None or entry["model"] not in again:
            rows.setdefault(entry["model"], []).append(Row(**{key: entry[key] for key in names & entry.keys()}))
    return known, rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS), help="default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=("tiny", "small", "full"), help="default: small on cpu, full on cuda")
    parser.add_argument("--budgets", type=int, default=12, help="budgets per model (default: 12)")
    parser.add_argument("--steps", type=int, help="timed steps per row (default: 2 on cpu, 10 on cuda)")
    parser.add_argument(
        "--precision",
        choices=("32", "bf16"),
        help="bf16 is autocast; default: 32 on cpu, the precision of the published figures at full size on cuda",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows, gates and environment to FILE")
    parser.add_argument(
        "--resume", action="store_true", help="keep what FILE has and measure only the rows that it lacks"
    )
    options = parser.parse_args(arguments)
    if options.budgets < 1 or (options.steps is not None and options.steps < 1):
        parser.error(f"--budgets and --steps must be at least 1, got {options.budgets} and {options.steps}")
    if options.resume and options.json is None:
        parser.error("--resume needs --json FILE, the file to go on with")
    check_device(parser, options.device)
    options.size = options.size or ("full" if options.device == "cuda" else "small")
    options.steps = options.steps or (10 if options.device == "cuda" else 2)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = console_of_width(140)
    device = torch.device(options.device)
    setting = {"size": options.size, "device": options.device, "precision": options.precision}
    document: dict[str, Any] = {}
    if options.resume and options.json.exists():
        document = json.loads(options.json.read_text())
        found = {key: document["setting"][key] for key in setting}
        if found != setting:
            console.print(f"[red]{options.json} has {found}, this run is {setting}: use another file[/red]")
            return 2
    known, rows = _read(document, again=options.model)
    seconds = solver_seconds()
    gates: list[Gate] = []
    for name in options.model:
        try:
            benchmark = build(name, size=options.size)
        except MissingLibraryError as error:
            console.print(f"[red]{escaped(str(error))}[/red]")
            return 2
        with console.status(benchmark.description) as status:
            precision: Precision = options.precision or (benchmark.full_precision if device.type == "cuda" else "32")
            bench = Bench(benchmark, device, precision, options.steps)
            del benchmark
            of_model = rows.setdefault(name, [])
            for found in measure_model(
                bench,
                options.budgets,
                known=known.get(name),
                done=[row.asked for row in of_model],
                report=lambda line, name=name, status=status: status.update(f"{name}: {line}"),
            ):
                if isinstance(found, PlainModel):
                    known[name] = found
                else:
                    of_model.append(found)
                gates = assess_gates(
                    [row for each in rows.values() for row in each],
                    solver_seconds=seconds,
                    exact=device.type == "cpu" and options.precision != "bf16",
                )
                if options.json is not None:
                    _write(options.json, setting, device, known, rows, gates, seconds)
            del bench
        gc.collect()
        console.print(table(known[name], of_model))
        for row in of_model:
            if row.error is not None:
                console.print(f"{row.model} {row.asked}: [red]{escaped(row.error)}[/red]")
    console.print(gates_table(gates))
    for gate in gates:
        if gate.kept is False:
            for miss in gate.misses:
                console.print(f"{gate.gate}: {escaped(miss)}")
    print_environment(console, environment(device))
    if options.json is not None:
        console.print(f"wrote {options.json}")
    return 0


def _write(
    file: Path,
    setting: Mapping[str, Any],
    device: torch.device,
    known: Mapping[str, PlainModel],
    rows: Mapping[str, Sequence[Row]],
    gates: Sequence[Gate],
    seconds: float,
) -> None:
    """After every row: a long run that is stopped can be resumed."""
    document = {
        "setting": setting,
        **environment(device),
        "solver_seconds_for_1000_regions": seconds,
        "columns": COLUMNS,
        "models": [asdict(model) for model in known.values()],
        "rows": [asdict(row) for of_model in rows.values() for row in of_model],
        "gates": [asdict(gate) for gate in gates],
    }
    write_document(document, file)


if __name__ == "__main__":
    sys.exit(main())
