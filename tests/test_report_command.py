"""``python -m lightning_memopt report`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer

from lightning_memopt.cli import main
from lightning_memopt.measuring.amounts import format_bytes
from lightning_memopt.measuring.consumers import MemoryEstimate
from lightning_memopt.planning import Plan
from tests.process_memory import alive_bytes

ROOT = Path(__file__).parent.parent
MIB = 2**20


def config(folder: Path, **trainer: Any) -> str:
    """The GPT of examples/memory_report, small, for a machine with GPUs and a logger of its own."""
    given = yaml.safe_load((ROOT / "examples" / "memory_report" / "gpt.yaml").read_text())
    given["trainer"] |= {"accelerator": "gpu", "devices": 4, "strategy": "ddp", "fast_dev_run": True, **trainer}
    given["model"]["init_args"] |= {"width": 32, "heads": 2, "depth": 3, "length": 64}
    given["data"]["init_args"] |= {"batch_size": 4, "length": 64}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(given))
    return str(path)


def report(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(["report", "--output", str(folder / "report.html"), "--json", *arguments])
    printed = capsys.readouterr()
    assert f"The report is in {folder / 'report.html'}" in printed.err
    return json.loads(printed.out)


def test_a_configuration_with_the_callback_is_shown_before_and_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = report(tmp_path, capsys, "--config", config(tmp_path), "--title", "A small GPT")
    before, after = (MemoryEstimate.from_json(json.dumps(content[side])) for side in ("before", "after"))
    plan = Plan.from_json(json.dumps(content["plan"]))
    assert [region.path for region in plan.recomputed] == ["blocks.0", "blocks.1", "blocks.2"]
    # Both are the second step of the same training: they differ in activations and temporaries alone.
    assert before.peak.parameters == after.peak.parameters > 0
    assert before.peak.optimizer_state == after.peak.optimizer_state >= 2 * before.peak.parameters
    assert after.at("forward end").activations < 0.25 * before.at("forward end").activations
    assert after.peak_bytes < before.peak_bytes
    # And nothing of one is alive in the other: only the data are.
    assert before.peak.other == after.peak.other
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>A small GPT</h1>" in page
    assert "<h2>The plan</h2>" in page
    # Nothing is left behind where it was started.
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "report.html"}


def test_a_configuration_without_the_callback_is_shown_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"}
    content = report(tmp_path, capsys, "--config", config(tmp_path, callbacks=[other], accumulate_grad_batches=2))
    assert content.keys() == {"format", "before", "versions"}
    # The micro-batch that completes an optimizer step begins with the gradients of the one before.
    assert content["before"]["phases"]["forward end"]["gradients"] > 0


def test_a_budget_takes_the_place_of_the_callback_and_the_table_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = alive_bytes()
    budget = 6 * 2**20 + others
    main(
        ["report", "--config", config(tmp_path), "--budget", f"{budget}", "--output", str(tmp_path / "report.html")],
    )
    printed = capsys.readouterr().out
    assert "of the budget of" not in printed  # the plan is in the page
    assert "before [MiB]" in printed
    assert "Afterwards it takes" in printed
    assert f"of the budget of {format_bytes(budget)}" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("trainer", "arguments", "message"),
    [({}, ["--budget", "10KiB"], "Allow at least"), ({"limit_train_batches": 0}, [], "No step could be measured")],
)
def test_what_cannot_be_shown_ends_with_status_1(
    trainer: dict[str, Any],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "report.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", "--config", config(tmp_path, **trainer), "--output", str(page), *arguments])
    assert ended.value.code == 1
    assert message in capsys.readouterr().err
    assert not page.exists()


def test_what_the_model_prints_does_not_mix_with_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = Trainer.fit

    def talkative(*arguments: Any, **named: Any) -> Any:
        print("downloading")
        return fit(*arguments, **named)

    monkeypatch.setattr(Trainer, "fit", talkative)
    assert "before" in report(tmp_path, capsys, "--config", config(tmp_path))  # reads the JSON
    main(["plan", "--config", config(tmp_path), "--budget", "1GiB", "--json", "--output", str(tmp_path / "plan.json")])
    printed = capsys.readouterr()
    assert Plan.from_json(printed.out).memory_budget == 2**30
    assert "downloading" in printed.err


@pytest.mark.parametrize("command", [["report"], ["plan", "--budget", "1GiB"]])
@pytest.mark.parametrize(("output", "message"), [("/proc/no/file", "cannot be written"), (".", "is a folder")])
def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(
    command: list[str], output: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "fit", None)
    with pytest.raises(SystemExit) as ended:
        main([*command, "--config", __file__, "--output", output])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config"),
        (["--config", "missing.yaml"], "there is no such file"),
        (["--config", __file__, "--budget", "plenty"], "memory_budget is 'plenty'"),
        (["--config", __file__, "--cli", "nowhere.Reader"], "no class 'nowhere.Reader'"),
    ],
)
def test_wrong_arguments_end_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
