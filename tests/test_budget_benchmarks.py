"""The benchmarks of memory budgets measure what they say, and their gates notice what is not kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_memopt.planning import applied_plan
from lightning_memopt.planning.solve import solve
from tests.benchmark_scripts import benchmark_scripts

MIB = 2**20


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The two benchmarks, and the gates of the first."""
    with benchmark_scripts("budgets", "budget_gates", "frontier") as [budgets, gates, frontier]:
        yield {"budgets": budgets, "gates": gates, "frontier": frontier}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, a second one mostly waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def budgets(scripts: dict[str, ModuleType]) -> ModuleType:
    return scripts["budgets"]


@pytest.fixture(scope="module")
def gates(scripts: dict[str, ModuleType]) -> ModuleType:
    return scripts["gates"]


@pytest.fixture(scope="module")
def frontier(scripts: dict[str, ModuleType]) -> ModuleType:
    return scripts["frontier"]


@pytest.fixture(scope="module")
def file(budgets: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one run wrote: two models whose steps are large beside what a process holds anyway."""
    file = tmp_path_factory.mktemp("budgets") / "new" / "budgets.json"
    arguments = ["--size", "tiny", "--model", "resnet", "gpt", "--budgets", "3", "--steps", "1"]
    assert budgets.main([*arguments, "--json", str(file)]) == 0
    return file


@pytest.fixture(scope="module")
def document(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def gate_named(document: dict[str, Any], words: str) -> dict[str, Any]:
    return next(gate for gate in document["gates"] if words in gate["gate"])


# ---------------------------------------------------------------------------------------------------------------------
# A run


def test_every_model_has_a_row_for_every_budget(document: dict[str, Any]) -> None:
    asked = [(row["model"], row["asked"]) for row in document["rows"]]
    assert asked == [
        *(("resnet", f"{number}/3") for number in (1, 2, 3)),
        *(("gpt", f"{number}/3") for number in (1, 2, 3)),
        ("gpt", "no extra products"),
    ]
    assert all(set(document["columns"]) == set(row) for row in document["rows"])
    promised = {"model", "budget_bytes", "predicted_peak", "measured_peak", "predicted_ms", "step_ms", "plain_ms"}
    promised |= {"extra_flops_ratio", "steps_measured", "max_rel_grad_diff"}
    assert promised <= set(document["columns"])


def test_budgets_go_from_the_least_peak_to_the_plain_one(document: dict[str, Any]) -> None:
    for model in document["models"]:
        rows = [row for row in document["rows"] if row["model"] == model["model"] and row["budget_bytes"]]
        asked = [row["budget_bytes"] for row in rows]
        assert (asked[0], asked[-1]) == (model["least_peak"], model["plain_peak"])
        assert asked[0] < asked[1] < asked[2]
        assert asked[2] - asked[1] == pytest.approx(asked[1] - asked[0], abs=1)


def test_every_budget_is_kept(document: dict[str, Any]) -> None:
    for row in document["rows"]:
        assert row["error"] is None
        if row["budget_bytes"] is not None:
            assert 0 < row["measured_peak"] <= row["budget_bytes"]
            assert row["utilisation"] == row["measured_peak"] / row["budget_bytes"]
            assert 1 <= row["steps_measured"] <= 3
    for words in ("a plan for every budget", "measured peak <= budget", "at most 3 measured steps"):
        assert gate_named(document, words)["kept"] is True


def test_a_budget_is_used_and_its_peak_is_predicted(document: dict[str, Any]) -> None:
    assert gate_named(document, "(budget - measured) / budget")["kept"] is True
    assert gate_named(document, "|predicted / measured - 1|")["kept"] is True


def test_a_tighter_budget_takes_more_work(document: dict[str, Any]) -> None:
    assert gate_named(document, "extra FLOPs never rise")["kept"] is True
    assert gate_named(document, "predicted time never rise")["kept"] is True
    for model, least_extra in (("resnet", 0.0), ("gpt", 0.01)):
        rows = [row for row in document["rows"] if row["model"] == model and row["budget_bytes"]]
        assert rows[0]["extra_flops_ratio"] >= least_extra
        assert rows[0]["added_time"] > 0.01
        assert rows[0]["held_bytes"] < 0.95 * rows[0]["plain_held_bytes"]
        assert rows[-1]["extra_flops_ratio"] == 0


def test_gradients_are_those_of_the_plain_model(document: dict[str, Any]) -> None:
    assert gate_named(document, "gradients equal")["kept"] is True
    assert all(row["max_rel_grad_diff"] == 0 for row in document["rows"] if not row["cuts_time"])


def test_without_extra_products_no_product_is_repeated_and_memory_is_gained(document: dict[str, Any]) -> None:
    row = next(row for row in document["rows"] if row["asked"] == "no extra products")
    assert row["extra_flops_ratio"] == 0
    assert row["added_time"] > 0
    assert row["held_bytes"] < row["plain_held_bytes"]
    assert gate_named(document, "gpt: activation bytes gone")["kept"] is not None


def test_times_are_predicted_from_the_plain_step(document: dict[str, Any]) -> None:
    for row in document["rows"]:
        assert row["step_ms"] > 0
        # On the CPU the planner counts bytes moved: as many more of them as milliseconds.
        assert row["predicted_ms"] == pytest.approx(row["plain_ms"] * (1 + row["added_time"]))


def test_the_json_says_how_to_repeat_the_run(document: dict[str, Any]) -> None:
    assert document["setting"] == {"size": "tiny", "device": "cpu", "precision": None}
    assert document["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert document["solver_seconds_for_1000_regions"] > 0
    assert gate_named(document, "1,000 regions")["kept"] is not None


def test_a_run_that_was_stopped_is_resumed(
    budgets: ModuleType, document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_gpt = [row for row in document["rows"] if row["model"] == "gpt" and row["asked"] != "2/3"]
    of_gpt[0] = {**of_gpt[0], "error": "MemoryBudgetError: not this time"}
    refused = {**document["rows"][0], "error": "MemoryBudgetError: of a model that is not measured again"}
    stopped = {**document, "rows": [refused, *of_gpt]}
    file = tmp_path / "budgets.json"
    file.write_text(json.dumps(stopped))
    measured = []
    row_of = budgets._row
    monkeypatch.setattr(
        budgets, "_row", lambda bench, known, asked, *rest: measured.append(asked) or row_of(bench, known, asked, *rest)
    )
    monkeypatch.setattr(budgets, "least_budget", None)  # the file knows it
    monkeypatch.setattr(budgets, "solver_seconds", lambda: 0.5)
    arguments = ["--size", "tiny", "--model", "gpt", "--steps", "1"]
    assert budgets.main([*arguments, "--json", str(file), "--resume"]) == 0
    assert measured == ["1/3", "2/3"]
    resumed = json.loads(file.read_text())
    assert resumed["rows"][0] == refused
    again = {row["asked"]: row["error"] for row in resumed["rows"][1:]}
    assert again == dict.fromkeys(["3/3", "no extra products", "1/3", "2/3"])
    assert gate_named(resumed, "a plan for every budget")["kept"] is False


def test_a_file_of_another_size_is_not_gone_on_with(
    budgets: ModuleType, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "solver_seconds", None)  # it is refused before anything is measured
    before = file.read_text()
    assert budgets.main(["--size", "small", "--model", "gpt", "--json", str(file), "--resume"]) == 2
    assert "use another file" in capsys.readouterr().out.replace("\n", " ")
    assert file.read_text() == before


def test_without_torchvision_the_message_names_it(
    budgets: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setattr(budgets, "solver_seconds", lambda: 0.5)
    assert budgets.main(["--size", "tiny", "--model", "resnet"]) == 2
    assert "pip install torchvision" in capsys.readouterr().out.replace("\n", " ")


# ---------------------------------------------------------------------------------------------------------------------
# What gates notice


def kept_row(budgets: ModuleType, model: str = "resnet", asked: str = "1/2", **changes: Any) -> Any:
    row = budgets.Row(
        model=model,
        asked=asked,
        budget_bytes=1000,
        predicted_peak=990,
        measured_peak=990,
        utilisation=0.99,
        added_time=0.1,
        extra_flops_ratio=0.05,
        steps_measured=2,
        max_rel_grad_diff=0.0,
        held_bytes=600,
        plain_held_bytes=1000,
        cuts_time=False,
    )
    return replace(row, **changes)


def verdict(gates: ModuleType, rows: list[Any], words: str, seconds: float = 0.5, *, exact: bool = True) -> Any:
    assessed = gates.assess_gates(rows, solver_seconds=seconds, exact=exact)
    return next(gate for gate in assessed if words in gate.gate)


def test_a_run_that_keeps_everything_passes_every_gate(budgets: ModuleType, gates: ModuleType) -> None:
    rows = [
        kept_row(budgets),
        kept_row(budgets, asked="2/2", budget_bytes=1100, measured_peak=1090, predicted_peak=1080),
    ]
    rows += [kept_row(budgets, "block", gates.BLOCK_BUDGET, budget_bytes=105 * MIB, measured_peak=104 * MIB)]
    rows[-1] = replace(rows[-1], predicted_peak=104 * MIB)
    for model in ("gpt", "vgg"):
        rows.append(kept_row(budgets, model, gates.NO_PRODUCTS, budget_bytes=None, extra_flops_ratio=0.0))
    assert all(gate.kept for gate in gates.assess_gates(rows, solver_seconds=0.5, exact=True))


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("a plan for every budget", {"error": "MemoryBudgetError: no"}),
        ("measured peak <= budget", {"measured_peak": 1001}),
        ("(budget - measured)", {"utilisation": 0.94}),
        ("|predicted / measured", {"predicted_peak": 960}),
        ("measured steps", {"steps_measured": 4}),
        ("gradients", {"max_rel_grad_diff": 1e-7}),
        ("gradients", {"max_rel_grad_diff": 1e-5, "cuts_time": True}),
    ],
)
def test_a_row_that_breaks_a_promise_fails_its_gate(
    budgets: ModuleType, gates: ModuleType, words: str, changes: dict[str, Any]
) -> None:
    assert verdict(gates, [kept_row(budgets)], words).kept is True
    broken = verdict(gates, [kept_row(budgets, **changes)], words)
    assert broken.kept is False
    assert broken.misses[0].startswith("resnet 1/2")


@pytest.mark.parametrize(("words", "column"), [("extra FLOPs", "extra_flops_ratio"), ("predicted time", "added_time")])
def test_a_larger_budget_that_costs_more_fails(budgets: ModuleType, gates: ModuleType, words: str, column: str) -> None:
    tighter = kept_row(budgets, asked="1/2", budget_bytes=1000, **{column: 0.1})
    for wider, kept in ((0.1, True), (0.05, True), (0.11, False)):
        rows = [kept_row(budgets, asked="2/2", budget_bytes=2000, **{column: wider}), tighter]
        # Another model in between says nothing about this one.
        rows.insert(1, kept_row(budgets, "gpt", budget_bytes=1500, **{column: 0.0}))
        assert verdict(gates, rows, f"{words} never rise").kept is kept


def test_time_that_is_cut_may_change_the_last_bits_of_gradients(budgets: ModuleType, gates: ModuleType) -> None:
    cut = kept_row(budgets, max_rel_grad_diff=5e-7, cuts_time=True)
    assert verdict(gates, [cut], "gradients").kept is True
    # Where the plain step itself is not the same twice, there is nothing to compare.
    assert not [gate for gate in gates.assess_gates([cut], solver_seconds=None, exact=False) if "grad" in gate.gate]


def test_the_block_model_needs_both_bytes_and_operations(budgets: ModuleType, gates: ModuleType) -> None:
    row = kept_row(budgets, "block", gates.BLOCK_BUDGET, budget_bytes=105 * MIB, measured_peak=105 * MIB)
    for changes, kept in (
        ({}, True),
        ({"measured_peak": 105 * MIB + 1}, False),
        ({"extra_flops_ratio": 0.35}, False),
        ({"error": "MemoryBudgetError: no"}, False),
    ):
        assert verdict(gates, [replace(row, **changes)], "block model").kept is kept
    assert verdict(gates, [kept_row(budgets, "block")], "block model").kept is None


def test_activation_bytes_count_only_where_no_product_is_repeated(budgets: ModuleType, gates: ModuleType) -> None:
    without = kept_row(budgets, "gpt", gates.NO_PRODUCTS, budget_bytes=None, extra_flops_ratio=0.0, held_bytes=700)
    repeating = kept_row(budgets, "gpt", "1/2", held_bytes=100)
    assert verdict(gates, [without, repeating], "gpt: activation").kept is False
    free = kept_row(budgets, "gpt", "2/2", held_bytes=650, extra_flops_ratio=0.0)
    assert verdict(gates, [without, repeating, free], "gpt: activation").kept is True


def test_the_gate_of_activation_bytes_says_what_a_budget_pays_for_them(budgets: ModuleType, gates: ModuleType) -> None:
    without = kept_row(budgets, "vgg", gates.NO_PRODUCTS, budget_bytes=None, extra_flops_ratio=0.0, held_bytes=500)
    tight = kept_row(budgets, "vgg", "1/3", held_bytes=100, extra_flops_ratio=0.2)
    wide = kept_row(budgets, "vgg", "2/3", held_bytes=600, extra_flops_ratio=0.0026)
    small = kept_row(budgets, "vgg", "3/3", held_bytes=900, extra_flops_ratio=0.0)
    found = verdict(gates, [without, tight, wide, small], "vgg: activation")
    assert found.kept is True
    assert found.measured.startswith("50.0% (no extra products")
    assert found.measured.endswith("as a budget chooses 40.0% with 0.26% more FLOPs (2/3)")


# ---------------------------------------------------------------------------------------------------------------------
# Costs


def test_synthetic_regions_are_a_planning_problem(budgets: ModuleType) -> None:
    costs = budgets.synthetic_step(40)
    assert len(costs.regions) == 40
    assert all(len(region.choices) == 8 for region in costs.regions)
    least, most = solve(costs, 0).simulated, solve(costs, 2**62).simulated
    middle = solve(costs, (least.peak_bytes + most.peak_bytes) // 2)
    assert middle.fits
    assert most.extra == 0 < middle.simulated.extra < least.extra
    assert budgets.solver_seconds(regions=40, repeats=1) > 0


def test_predicted_times_are_those_of_the_plans(document: dict[str, Any]) -> None:
    for row in document["rows"]:
        assert row["predicted_ms"] == pytest.approx(row["plain_ms"] * (1 + row["added_time"]))
        assert (row["added_time"] > 0) == (row["treatments"] != "all kept")


# ---------------------------------------------------------------------------------------------------------------------
# The frontier


@pytest.fixture(scope="module")
def points(frontier: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("frontier")
    arguments = ["--model", "block", "--quick", "--device", "cpu", "--points", "2", "--steps", "1"]
    picture = folder / "new" / "frontier.png"
    assert frontier.main([*arguments, "--json", str(folder / "frontier.json"), "--picture", str(picture)]) == 0
    document = {**json.loads((folder / "frontier.json").read_text()), "picture": picture.read_bytes()}
    return {**document, "file": folder / "frontier.json"}


def test_every_implementation_has_its_points(points: dict[str, Any]) -> None:
    found = [(row["implementation"], row["error"] is None) for row in points["rows"]]
    assert found == [
        ("plain", True),
        ("lightning_memopt", True),
        ("lightning_memopt", True),
        ("spikingjelly memopt", True),
        *[("spikingjelly memopt", False)] * 3,  # they need a GPU
        ("checkpoint every block", True),
    ]
    assert all("CUDA" in row["error"] for row in points["rows"] if row["error"] is not None)
    assert all(column in row for row in points["rows"] for column in points["columns"])
    assert points["picture"].startswith(b"\x89PNG")


def test_points_are_peaks_and_times_with_the_gradients_of_the_plain_model(points: dict[str, Any]) -> None:
    rows = [row for row in points["rows"] if row["error"] is None]
    plain = rows[0]
    for row in rows:
        assert row["step_ms"] > 0
        assert row["max_rel_grad_diff"] <= 1e-6
        assert row["setup_s"] >= 0
        assert row["peak_bytes"] <= plain["peak_bytes"]  # a budget as large as the plain step gets the plain plan
    budget = float(rows[1]["setting"].removesuffix(" MiB"))
    assert rows[1]["peak_bytes"] <= 1.001 * budget * MIB  # the setting is rounded
    assert rows[1]["peak_bytes"] < min(row["peak_bytes"] for row in rows[3:])


def test_what_was_written_is_drawn_without_measuring_a_panel_for_each_file(
    frontier: ModuleType, points: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(frontier, "measure_frontier", None)
    titles, picture = [], tmp_path / "panels.png"
    monkeypatch.setattr("matplotlib.axes.Axes.set_title", lambda axes, title, **how: titles.append(title))
    assert frontier.main(["--draw", *[str(points["file"])] * 3, "--picture", str(picture)]) == 0
    assert titles == [f"{points['description']}, fp32, cpu"] * 3
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draw", "missing.json", "--picture", "panels.png"], "missing.json cannot be read"),
        (["--draw", "other.json", "--picture", "panels.png"], "other.json was not written by this script"),
        (["--draw", "list.json", "--picture", "panels.png"], "list.json was not written by this script"),
        (["--draw", "other.json"], "--draw needs --picture"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    frontier: ModuleType,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text("{}")
    Path("list.json").write_text("[]")
    with pytest.raises(SystemExit):
        frontier.main(arguments)
    assert message in capsys.readouterr().err
    assert not Path("panels.png").exists()


def test_checkpointed_blocks_start_from_rest_when_they_run_again(frontier: ModuleType) -> None:
    benchmark = frontier.build("block", size="tiny")
    bench = frontier.Bench(benchmark, torch.device("cpu"), "32", steps=1)
    calls: list[int] = []
    for block in bench.model:
        block.register_forward_pre_hook(lambda module, inputs: calls.append(id(module)))
    frontier.checkpoint_every_block(bench.model, bench.benchmark)
    figures = bench.measure()
    assert bench.difference(figures) == 0
    assert figures.held_bytes < bench.plain.held_bytes
    assert figures.flops > bench.plain.flops


def test_compiled_code_for_one_share_is_not_used_for_another_and_the_last_is_of_a_treated_model(
    frontier: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = frontier.Bench(frontier.build("gpt", size="tiny"), torch.device("cpu"), "32", steps=1)
    seen: list[tuple[float, bool]] = []
    resets: list[str] = []

    def compile_nothing(model: torch.nn.Module) -> torch.nn.Module:
        seen.append((frontier.functorch_config.activation_memory_budget, applied_plan(model) is not None))
        return model

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append("reset"))
    monkeypatch.setattr(frontier, "_planned", lambda *_: [])
    rows = frontier.measure_frontier(bench, points=1, levels=(), shares=(0.7, 0.3), steps=2, warmup_steps=1)
    assert seen == [(0.7, False), (0.3, False), (1.0, True)]
    assert len(resets) == 3
    assert frontier.functorch_config.activation_memory_budget == 1.0
    plain, *_, first, second, treated = rows
    assert [(row.setting, len(row.step_ms_all), row.max_rel_grad_diff) for row in (first, second, treated)] == [
        ("0.7", 2, 0),
        ("0.3", 2, 0),
        ("level 1", 2, 0),
    ]
    assert treated.peak_bytes < first.peak_bytes == second.peak_bytes == plain.peak_bytes


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(
    frontier: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(frontier, "measure_frontier", None)
    assert frontier.main(["--quick", "--device", "cpu", "--picture", str(tmp_path / "frontier.png")]) == 2
    assert "lightning-memopt[plots]" in capsys.readouterr().out.replace("\n", "")


def test_cuda_asked_for_where_there_is_none_is_refused(
    budgets: ModuleType, frontier: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for script in (budgets, frontier):
        with pytest.raises(SystemExit, match="2"):
            script.main(["--device", "cuda"])
        assert "--device cpu" in capsys.readouterr().err
