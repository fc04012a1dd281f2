"""The examples run as their READMEs say, learn their data, and keep what they promise about memory and equality."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
BLOCKS = {"digits_spikingjelly": 6, "digits_snntorch": 6, "text_transformer": 4}


def run(command: list[str], directory: Path) -> str:
    """Run Python in ``directory``, where the example writes its outputs, and return what it printed."""
    process = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        # One thread: steps this small lose more than they gain by a second one on a busy machine.
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, f"{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
    return process.stdout


def run_main(name: str, directory: Path, options: str) -> dict[str, Any]:
    """Call ``main`` of an example's ``train.py`` with less to do, and return what it returns."""
    program = (
        "import sys, json, dataclasses\n"
        f"sys.path.insert(0, {str(EXAMPLES / name)!r})\n"
        "import train\n"
        f"result = train.main({options})\n"
        "json.dump(result, open('result.json', 'w'))\n"
    )
    run(["-c", program], directory)
    return json.loads((directory / "result.json").read_text())


@pytest.fixture(scope="module")
def spikingjelly_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The whole of the first example with a quarter of its channels, and then runs that differ in one bit."""
    directory = tmp_path_factory.mktemp("digits_spikingjelly")
    program = (
        "import dataclasses, sys\n"
        f"sys.path.insert(0, {str(EXAMPLES / 'digits_spikingjelly')!r})\n"
        "import train\n"
        "run, _ = train.main(channels=8)\n"
        "last, accuracy = run.losses[-1], run.val_accuracy\n"
        "table = train.Console(width=160)\n"
        "times = train.StepTimes((100.0, 101.0, 900.0), (150.0, 151.5, 10.0))\n"
        "for change in (\n"
        "    dict(losses=(*run.losses[:-1], last * (1 + 2**-52))),\n"
        "    dict(weights=run.weights[::-1]),\n"
        "    dict(val_accuracy=accuracy * (1 - 2**-52)),\n"
        "):\n"
        "    other = dataclasses.replace(run, **change)\n"
        "    try:\n"
        "        train.check_equal(run, other)\n"
        "    except AssertionError as error:\n"
        "        print('noticed:', error)\n"
        "    table.print(train.side_by_side(run, other, times))\n"
    )
    return run(["-c", program], directory), directory


def test_the_spikingjelly_example_trains_identically_in_less_memory(spikingjelly_run: tuple[str, Path]) -> None:
    output, directory = spikingjelly_run
    losses = re.search(
        r"All (\d+) losses, all trained weights and the validation accuracy are identical, bit for bit", output
    )
    assert losses is not None
    assert int(losses[1]) >= 40
    plain_peak, optimized_peak = map(float, re.findall(r"([\d.]+) MiB", line_with("peak of a step", output)))
    assert optimized_peak < 0.5 * plain_peak
    accuracies = [float(found) for found in re.findall(r"([\d.]+)%", line_with("validation accuracy", output))]
    assert len(accuracies) == 2
    assert min(accuracies) > 90  # with a quarter of the channels; the full network passes 95
    picture = directory / "outputs" / "digits_spikingjelly" / "bytes_alive.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert picture.stat().st_size > 10_000


def test_the_spikingjelly_example_would_notice_a_loss_weight_or_accuracy_that_differs(
    spikingjelly_run: tuple[str, Path],
) -> None:
    output, *altered = re.split("^noticed:", spikingjelly_run[0], flags=re.MULTILINE)
    assert len(altered) == 3
    labels = ["first loss", "last loss", "trained weights", "validation accuracy"]

    def verdicts(text: str) -> list[str]:
        table = text[text.index("peak of a step") :]
        return [line_with(label, table).split()[-2] for label in labels]  # the last is the table's border

    assert verdicts(output) == ["identical"] * 4
    assert [verdicts(text) for text in altered] == [
        ["identical", "different", "identical", "identical"],
        ["identical", "identical", "different", "identical"],
        ["identical", "identical", "identical", "different"],
    ]


def test_the_spikingjelly_example_gives_the_step_time_as_a_ratio_of_medians(spikingjelly_run: tuple[str, Path]) -> None:
    output, altered, *_ = re.split("^noticed:", spikingjelly_run[0], flags=re.MULTILINE)
    plain, optimized, ratio = re.findall(
        r"([\d.]+) ms.*?([\d.]+) ms.*?x ([\d.]+)", line_with("time of a step", altered)
    )[0]
    assert (plain, optimized, ratio) == ("101", "150", "1.49")
    printed = re.search(r"takes ([\d.]+) times as long", output)
    assert printed is not None
    assert f"x {printed[1]}" in line_with("time of a step", output)
    rounds = re.search(r"Medians of (\d+)\s+steps each, in\s+turns", output)
    assert rounds is not None
    assert int(rounds[1]) >= 5


def line_with(label: str, output: str) -> str:
    return next(line for line in output.splitlines() if label in line)


def test_the_snntorch_example_learns_in_less_memory(tmp_path: Path) -> None:
    result = run_main("digits_snntorch", tmp_path, "max_epochs=2, channels=16")
    assert result["val_accuracy"] > 0.85
    # The membrane potential at every time step has to be stored: there is less to save than where T is inside a block.
    assert result["optimized_peak"] < 0.85 * result["plain_peak"]


def test_the_text_example_learns_in_less_memory(tmp_path: Path) -> None:
    result = run_main("text_transformer", tmp_path, "max_steps=40")
    # Bytes of a uniform source have perplexity 256, the untrained model starts there.
    assert result["val_perplexity"] < 40
    assert result["optimized_peak"] < 0.5 * result["plain_peak"]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_command_line_trains_with_both_callbacks_from_yaml(tmp_path: Path, name: str) -> None:
    example = EXAMPLES / name
    short = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=3", "--trainer.limit_val_batches=1"]
    run([str(example / "cli.py"), "fit", "--config", str(example / "config.yaml"), *short], tmp_path)
    (directory,) = (tmp_path / "outputs" / name).iterdir()
    plan = json.loads((directory / "memory_plan.json").read_text())
    recomputed = [region["path"] for region in plan["regions"] if region["treatment"] == "recompute"]
    assert len(recomputed) == BLOCKS[name]  # found without being named
    with open(directory / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(bool(row["train_loss"]) for row in rows) == 3
    monitored = [column for column in rows[0] if column.startswith("MemoryMonitor")]
    assert monitored
    assert any(float(row[column] or 0) > 0 for row in rows for column in monitored)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_model_of_an_example_knows_nothing_of_this_package(name: str) -> None:
    for file in ("model.py", "data.py"):
        assert "lightning_memopt" not in (EXAMPLES / name / file).read_text()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_readme_installs_from_a_clone_and_names_files_that_exist(name: str) -> None:
    text = (EXAMPLES / name / "README.md").read_text()
    assert re.findall(r"^pip install .*$", text, flags=re.MULTILINE) == ["pip install '.[examples]'"]
    assert "From a clone of the repository" in text
    files = set(re.findall(r"examples/\S+\.(?:py|yaml)", text))
    assert len(files) == 3
    assert all((ROOT / file).is_file() for file in files)


def test_the_memory_report_example_shows_both_networks_before_and_after(tmp_path: Path) -> None:
    small = "{'width': 64, 'heads': 2, 'depth': 3, 'length': 64, 'batch_size': 4}, {'channels': 8, 'batch_size': 16}"
    program = (
        "import sys, json\n"
        f"sys.path.insert(0, {str(EXAMPLES / 'memory_report')!r})\n"
        "import report\n"
        f"json.dump(report.main({small}), open('result.json', 'w'))\n"
    )
    output = run(["-c", program], tmp_path)
    peaks = json.loads((tmp_path / "result.json").read_text())
    assert list(peaks) == ["gpt", "spiking"]
    for name, peak in peaks.items():
        assert peak["after"] < 0.8 * peak["before"]
        folder = tmp_path / "outputs" / "memory_report" / name
        assert {path.name for path in folder.iterdir()} == {"report.html", "over_the_step.png", "at_the_peak.png"}
        page = (folder / "report.html").read_text(encoding="utf-8")
        for size in peak.values():
            assert f"{size / 2**20:.1f} MiB" in page
            assert f"takes {size / 2**20:.1f} MiB" in output
        assert {"gpt": "blocks.*.mlp", "spiking": "features.*.neuron"}[name] in page


@pytest.mark.parametrize(
    ("name", "small"),
    [("gpt", {"width": 64, "heads": 2, "depth": 3}), ("spiking", {"channels": 8})],
)
def test_the_memory_report_example_runs_from_yaml(tmp_path: Path, name: str, small: dict[str, int]) -> None:
    smaller = tmp_path / "smaller.yaml"
    smaller.write_text(json.dumps({"model": {"init_args": small}, "data": {"init_args": {"batch_size": 4}}}))
    config = ["--config", str(EXAMPLES / "memory_report" / f"{name}.yaml"), "--config", str(smaller)]
    content = json.loads(run(["-m", "lightning_memopt", "report", *config, "--json"], tmp_path))
    assert content["after"]["peak_bytes"] < 0.9 * content["before"]["peak_bytes"]
    assert {region["treatment"] for region in content["plan"]["regions"]} == {"recompute"}
    assert (tmp_path / "memory_report.html").is_file()


def test_the_readme_of_the_memory_report_names_files_that_exist() -> None:
    text = (EXAMPLES / "memory_report" / "README.md").read_text()
    assert re.findall(r"^pip install .*$", text, flags=re.MULTILINE) == ["pip install '.[examples]'"]
    files = set(re.findall(r"examples/\S+\.(?:py|yaml)", text))
    assert len(files) == 3
    assert all((ROOT / file).is_file() for file in files)
    (picture,) = re.findall(r"!\[.*\]\((\S+)\)", text)
    assert (EXAMPLES / "memory_report" / picture).is_file()
