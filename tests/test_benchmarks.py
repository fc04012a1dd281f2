"""The benchmark measures both implementations on the same model and reports what it cannot measure."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.benchmark_scripts import benchmark_scripts

ROOT = Path(__file__).parents[1]
MIB = 2**20


@pytest.fixture(scope="module")
def levels() -> Iterator[ModuleType]:
    """``benchmarks/levels.py``."""
    with benchmark_scripts("levels") as [script]:
        yield script


def run_in_process(levels: ModuleType, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "rows.json"
    assert levels.main([*arguments, "--json", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def block_at_reference_size(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The command a reader would run, in a process of its own."""
    file = tmp_path_factory.mktemp("benchmarks") / "block.json"
    arguments = [
        "--model",
        "block",
        "--levels",
        "0",
        "1",
        "--peer",
        "--steps",
        "1",
        "--warmup",
        "0",
        "--json",
        str(file),
    ]
    process = subprocess.run(
        [sys.executable, "benchmarks/levels.py", *arguments],
        cwd=ROOT,
        # One thread: on a busy machine, a second one mostly waits for the first.
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    document = json.loads(file.read_text())
    document["stdout"] = process.stdout
    return document


def rows_by_key(document: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["implementation"], row["level"]): row for row in document["rows"]}


def test_the_plain_block_model_peaks_where_the_published_figure_says(block_at_reference_size: dict[str, Any]) -> None:
    rows = rows_by_key(block_at_reference_size)
    assert 461 <= rows["lightning_memopt", 0]["peak_bytes"] / MIB <= 463
    # Level 0 changes nothing in either, so the copies waiting for their turn must not show in the figures.
    assert rows["spikingjelly", 0]["peak_bytes"] == rows["lightning_memopt", 0]["peak_bytes"]


def test_level_1_of_the_block_model_needs_no_more_memory_than_the_peer(block_at_reference_size: dict[str, Any]) -> None:
    rows = rows_by_key(block_at_reference_size)
    assert rows["lightning_memopt", 1]["peak_bytes"] <= rows["spikingjelly", 1]["peak_bytes"]
    assert rows["lightning_memopt", 1]["peak_bytes"] <= 215 * MIB


def test_gradients_of_the_block_model_equal_the_plain_ones_bit_for_bit(block_at_reference_size: dict[str, Any]) -> None:
    rows = rows_by_key(block_at_reference_size)
    assert all(rows["lightning_memopt", level]["max_rel_grad_diff"] == 0 for level in (0, 1))


def test_search_passes_are_counted_and_level_0_needs_none(block_at_reference_size: dict[str, Any]) -> None:
    rows = rows_by_key(block_at_reference_size)
    assert rows["lightning_memopt", 0]["search_passes"] == rows["spikingjelly", 0]["search_passes"] == 0
    assert rows["spikingjelly", 1]["search_passes"] == 1
    assert rows["lightning_memopt", 1]["search_passes"] == 1


def test_the_json_says_how_to_repeat_the_run(block_at_reference_size: dict[str, Any]) -> None:
    document = block_at_reference_size
    for column in (
        "implementation",
        "level",
        "peak_bytes",
        "step_ms",
        "search_s",
        "search_passes",
        "max_rel_grad_diff",
        "error",
    ):
        assert column in document["columns"]
        assert all(column in row for row in document["rows"])
    assert document["command"].startswith("python benchmarks/levels.py --model block --levels 0 1 --peer")
    assert document["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert set(document["versions"]) >= {"torch", "lightning", "spikingjelly"}
    assert document["device"] == "cpu"
    assert document["device_name"]
    assert document["precision"] == "32"


@pytest.mark.parametrize("model", ["block", "vgg", "sew_resnet34", "spikformer", "gpt", "resnet"])
def test_every_model_runs_through_both_implementations(levels: ModuleType, tmp_path: Path, model: str) -> None:
    document = run_in_process(levels, tmp_path, "--model", model, "--quick", "--levels", "0", "1", "--peer")
    rows = rows_by_key(document)
    assert set(rows) == {(name, level) for name in ("lightning_memopt", "spikingjelly") for level in (0, 1)}
    for row in rows.values():
        assert row["error"] is None
        assert row["peak_bytes"] > 0
        assert len(row["step_ms_all"]) == 3
        assert row["step_ms"] == sorted(row["step_ms_all"])[1]
    assert rows["lightning_memopt", 1]["max_rel_grad_diff"] == 0


def test_every_level_of_ours_runs_on_a_cpu(levels: ModuleType, tmp_path: Path) -> None:
    document = run_in_process(levels, tmp_path, "--model", "block", "--quick")
    rows = rows_by_key(document)
    assert set(rows) == {("lightning_memopt", level) for level in range(5)}
    for level in range(5):
        row = rows["lightning_memopt", level]
        assert row["error"] is None
        # A product cut along time may sum in another order.
        assert row["max_rel_grad_diff"] <= (0 if level <= 2 else 1e-6)
        assert row["search_passes"] == row["search_forward_passes"] + row["search_backward_passes"]
        assert (row["search_backward_passes"] > 0) == (level >= 2)


def test_what_the_peer_cannot_do_on_a_cpu_is_a_row_with_its_error(
    levels: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = run_in_process(levels, tmp_path, "--model", "block", "--quick", "--levels", "2", "4", "--peer")
    rows = rows_by_key(document)
    for level in (2, 4):
        row = rows["spikingjelly", level]
        assert "CUDA" in row["error"]
        assert row["peak_bytes"] is None
        assert row["step_ms"] is None
        assert rows["lightning_memopt", level]["error"] is None  # and the run went on
    assert "CUDA" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["block", "vgg", "sew_resnet34", "spikformer", "gpt", "resnet"])
def test_regions_of_every_model_exist_and_split_into_parts_of_their_own(levels: ModuleType, model: str) -> None:
    benchmark = levels.build(model, size="tiny")
    regions = [module for module in benchmark.model.modules() if isinstance(module, benchmark.targets)]
    assert len(regions) > 1
    for region in regions:
        parts = benchmark.split_fn(region)
        assert len(parts) >= 2
        assert all(any(part is inner for inner in region.modules()) for part in parts)


def test_models_are_the_same_for_the_same_seed(levels: ModuleType) -> None:
    first, second, other = (levels.build("vgg", size="tiny", seed=seed) for seed in (0, 0, 1))
    assert all(map(torch.equal, first.batch, second.batch))
    assert not torch.equal(first.batch[0], other.batch[0])
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])


def test_neurons_of_the_reference_block_fire_in_every_block(levels: ModuleType) -> None:
    benchmark = levels.build("block")
    x = benchmark.batch[0]
    assert x.shape == (16, 512, 512)
    with torch.no_grad():
        for block in benchmark.model:
            x = block(x)
            assert 0.01 < x.mean() < 0.9


def test_a_pass_counts_once_forward_and_once_more_if_differentiated(levels: ModuleType) -> None:
    model = nn.Linear(2, 1)
    counter = levels.PassCounter(lambda module: module(torch.ones(1, 2)).sum())
    counter.example_forward(model)
    with torch.no_grad():
        counter.example_forward(model)
    counter.example_forward(model).backward()
    torch.stack([counter.example_forward(model).float().sum()]).sum().backward()
    assert (counter.forward, counter.backward) == (4, 2)


def test_gradients_are_compared_relative_to_the_largest_plain_one(levels: ModuleType) -> None:
    plain = {"a": torch.tensor([4.0, -2.0]), "b": torch.zeros(2)}
    assert levels.max_relative_difference(plain, plain) == 0
    moved = {**plain, "a": torch.tensor([4.0, -1.0])}
    assert levels.max_relative_difference(moved, plain) == 0.25
    for broken in (
        {"a": plain["a"]},
        {**plain, "b": torch.tensor([0.0, 1e-9])},
        {**plain, "a": torch.tensor([math.nan, -2.0])},
    ):
        assert levels.max_relative_difference(broken, plain) == math.inf


def test_implementations_take_turns_and_warm_up_steps_do_not_count(levels: ModuleType) -> None:
    benchmark = levels.build("gpt", size="tiny")
    models = [nn.Linear(1, 1), None, nn.Linear(1, 1)]
    order: list[int] = []

    def step(model: nn.Module) -> torch.Tensor:
        order.append(next(index for index, other in enumerate(models) if other is model))
        return model(torch.ones(1, 1)).sum()

    times = levels.interleaved_times(models, benchmark, step, torch.device("cpu"), steps=3, warmup_steps=1)
    assert order == [0, 2, 2, 0, 0, 2, 2, 0]
    assert [len(taken) for taken in times] == [3, 0, 3]
    assert all(parameter.grad is None for model in models if model is not None for parameter in model.parameters())


@pytest.mark.parametrize("arguments", [["--model", "vgg"], ["--model", "gpt", "--quick", "--peer"]])
def test_without_spikingjelly_the_message_names_the_extra(
    levels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "spikingjelly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "spikingjelly", None)
    assert levels.main(arguments) == 2
    assert "lightning-memopt[examples]" in capsys.readouterr().out.replace("\n", "")


def test_cuda_asked_for_where_there_is_none_is_refused(
    levels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        levels.main(["--device", "cuda"])
    assert "--device cpu" in capsys.readouterr().err
