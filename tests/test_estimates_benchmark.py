"""The benchmark of estimates runs, and its recorded figures keep what is promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_scripts import BENCHMARKS, benchmark_scripts

RECORDED = BENCHMARKS / "results" / "estimates_cpu.json"


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(RECORDED.read_text())
    return document


def test_a_family_runs_in_every_precision_and_says_what_the_columns_promise(tmp_path: Path) -> None:
    path = tmp_path / "estimates.json"
    with benchmark_scripts("estimates") as (estimates,):
        assert estimates.main(["--family", "llama", "--quick", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert len(document["rows"]) == 6
    for row in document["rows"]:
        assert set(document["columns"]) <= set(row)
        assert row["error"] is None
        assert row["predicted_bytes"] == sum(row["predicted"].values())
        assert row["measured_bytes"] == sum(size for name, size in row["measured"].items() if name != "other")
        if "32-true" in row["case"]:
            assert abs(row["rel_error"]) < 0.02


def test_the_recorded_cases_cover_families_precisions_optimizers_and_checkpointing(recorded: dict[str, Any]) -> None:
    with benchmark_scripts("estimates") as (estimates,):
        expected = {case.name for case in estimates.all_cases()}
    assert {row["case"] for row in recorded["rows"]} == expected
    done = [row["case"] for row in recorded["rows"] if row["error"] is None]
    assert len(done) >= 24
    for word in ("spiking", "cnn", "gpt", "llama", "AdamW", "SGD", "Lion", "Adafactor", "checkpointed"):
        assert any(word in case for case in done), word


def test_the_recorded_errors_and_shares_are_within_the_goals(recorded: dict[str, Any]) -> None:
    with benchmark_scripts("estimates") as (estimates,):
        found = estimates.summary([estimates.Row(**row) for row in recorded["rows"]])
        assert found["median_error"] <= estimates.MEDIAN_GOAL
        assert found["largest_error"] <= estimates.LARGEST_GOAL
        assert found["least_attributed"] >= estimates.ATTRIBUTED_GOAL
        assert found == recorded["summary"]
