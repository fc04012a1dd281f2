"""The benchmark of the monitor runs, and its recorded figures keep what is promised."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.benchmark_scripts import BENCHMARKS, benchmark_scripts

RECORDED = BENCHMARKS / "results" / "monitor_cpu.json"


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(RECORDED.read_text())
    return document


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("benchmarks") / "monitor.json"
    with benchmark_scripts("monitor") as (monitor,):
        assert monitor.main(["--quick", "--model", "gpt", "--json", str(path)]) == 0
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_a_step_that_is_not_broken_down_calls_little_and_keeps_nothing(tiny: dict[str, Any]) -> None:
    (row,) = tiny["steps"]
    assert row["python_calls"] <= 140
    assert row["tensor_bytes"] <= 16  # rss, time and throughput for `trainer.callback_metrics`, four bytes each
    assert row["tensor_bytes_kept"] == 0
    assert row["objects_kept"] <= 0


def test_errors_are_reported_from_where_they_were_raised(tiny: dict[str, Any]) -> None:
    with benchmark_scripts("monitor") as (monitor,):
        assert [row["raised_in"] for row in tiny["errors"]] == [*monitor.PLACES]
    for row in tiny["errors"]:
        assert row["told"].startswith(row["raised_in"])
        assert row["advice"]


def test_the_recorded_figures_are_within_the_goals(recorded: dict[str, Any]) -> None:
    with benchmark_scripts("monitor") as (monitor,):
        assert {row["model"] for row in recorded["steps"]} == {*monitor.MODELS}
        assert {(row["model"], row["raised_in"]) for row in recorded["errors"]} == {
            (model, place) for model in monitor.MODELS for place in monitor.PLACES
        }
        found = monitor.summary(
            [monitor.StepRow(**row) for row in recorded["steps"]],
            [monitor.ErrorRow(**row) for row in recorded["errors"]],
        )
        assert found == recorded["summary"]
        assert found["largest_share"] <= monitor.SHARE_GOAL
        assert found["longest_report_s"] <= monitor.REPORT_GOAL_S
    assert found["most_tensor_bytes_kept"] == found["most_objects_kept"] == 0
