"""``python -m lightning_memopt`` as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_memopt.cli import main
from lightning_memopt.planning import Plan

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "text_transformer"


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, started where the user's code lies."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "lightning_memopt", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


def test_a_plan_for_a_configuration_is_printed_written_and_applied(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    how = ["--model", "model.ByteGPT", "--data", "data.StandardLibraryText", "--cli", "cli.TextCLI"]
    picture = tmp_path / "plan.png"
    asked = ["--budget", "60MiB", "--output", str(file), "--picture", str(picture)]
    done = run("plan", "--config", "config.yaml", *how, *asked, folder=EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert "of the budget of 60.0 MiB" in done.stdout
    assert "Warning" not in done.stderr
    plan = Plan.load(file)
    assert plan.memory_budget == 60 * 2**20
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"The picture is in {picture}" in done.stderr
    assert plan.treated
    assert plan.peak_bytes_after + plan.reserved_bytes <= plan.memory_budget
    # The optimizer of the configuration counts: two moments of every parameter.
    assert plan.reserved_bytes > 0
    # And the training takes the plan as it is.
    script = (
        "from lightning.pytorch import Trainer; from lightning_memopt import MemoryOptimization;"
        "from model import ByteGPT; from data import StandardLibraryText;"
        f"callback = MemoryOptimization(plan={str(file)!r}, verbose=False);"
        "trainer = Trainer(accelerator='cpu', max_steps=2, logger=False, callbacks=[callback], "
        "enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=0);"
        "trainer.fit(ByteGPT(width=128, heads=4, depth=4, length=128), StandardLibraryText(length=128));"
        "print('digest', callback.plan.digest())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    trained = subprocess.run(
        [sys.executable, "-c", script], cwd=EXAMPLE, env=environment, capture_output=True, text=True, timeout=250
    )
    assert f"digest {plan.digest()}" in trained.stdout, trained.stderr


def test_a_configuration_that_names_its_classes_needs_no_more_and_a_refusal_is_an_exit_status(tmp_path: Path) -> None:
    given = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    # Written for a machine with four GPUs: what of that does not matter to one step is replaced.
    given["trainer"] |= {"accelerator": "gpu", "devices": 4, "strategy": "ddp"}
    given["model"] = {"class_path": "model.ByteGPT", "init_args": given["model"]}
    given["data"] = {"class_path": "data.StandardLibraryText", "init_args": {**given["data"], "length": 128}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(given))
    file = tmp_path / "plan.json"
    done = run("plan", "--config", str(config), "--budget", "1MiB", "--output", str(file), folder=EXAMPLE)
    assert done.returncode == 1, done.stderr
    assert "Allow at least" in done.stderr
    assert "Traceback" not in done.stderr
    assert not file.exists()


def test_a_step_that_reads_a_value_cannot_be_planned_from_shapes_and_the_message_says_so(tmp_path: Path) -> None:
    (tmp_path / "reading.py").write_text("""
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringDataModule

class Reading(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).mean()
        self.loss_before = loss.item()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
""")
    config = {"model": {"class_path": "reading.Reading"}, "data": {"class_path": "reading.BoringDataModule"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    asked = ["plan", "--config", "config.yaml", "--budget", "1GiB"]
    done = run(*asked, "--shapes-only", folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "reads a value" in done.stderr
    assert "without --shapes-only" in done.stderr
    assert not (tmp_path / "memory_plan.json").exists()
    assert run(*asked, folder=tmp_path).returncode == 0


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightning_memopt.cli.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--config", __file__, "--budget", "1GiB", "--picture", "plan.png"])
    assert ended.value.code == 2
    assert "lightning-memopt[plots]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["plan", "--budget", "1GiB"], "--config"),
        (["plan", "--config", "missing.yaml", "--budget", "1GiB"], "there is no such file"),
        (["plan", "--config", __file__, "--budget", "plenty"], "memory_budget is 'plenty'"),
        (["plan", "--config", __file__, "--budget", "80%"], "without memory of its own"),
        (["plan", "--config", __file__, "--budget", "60"], "60 is a number of bytes"),
        (["plan", "--config", __file__, "--budget", "1GiB", "--picture", "plan.xyz"], "suffix '.xyz'"),
        (["plan", "--config", __file__, "--budget", "1GiB", "--picture", "plan"], "no suffix"),
        (["plan", "--config", __file__, "--budget", "1GiB", "--model", "nowhere.Model"], "no class 'nowhere.Model'"),
        (["plan", "--config", __file__, "--budget", "1GiB", "--model", "math.pi"], "is no class"),
    ],
)
def test_wrong_arguments_end_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    # The usage is that of the command that was given.
    assert said.startswith(f"usage: python -m lightning_memopt {' '.join(arguments[:1])}".rstrip())


def test_neither_the_help_nor_an_estimate_by_numbers_waits_for_lightning_or_the_compiler(tmp_path: Path) -> None:
    script = """
import runpy, sys
try:
    runpy.run_module("lightning_memopt", run_name="__main__")
finally:
    print("loaded", sorted({"lightning", "torch._dynamo"} & set(sys.modules)))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for arguments in (["--help"], ["estimate", "llama-2-7b"]):
        command = [sys.executable, "-c", script, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "loaded []"
