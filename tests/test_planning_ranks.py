"""Ranks that plan together: same decisions from different data, and no rank is left waiting."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_memopt.checkpointing import is_checkpointed
from lightning_memopt.planning import applied_plan, optimize_memory
from lightning_memopt.planning.agree import Ranks
from tests.planning_models import (
    DeepSpikingBlock,
    SpikingBlock,
    Unchanged,
    is_if_neuron,
    loss_from_rest,
    spikes,
    split_deep_block,
)
from tests.ranks import run_ranks


def blocks(kind: type[nn.Module] = SpikingBlock, count: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(count)))


def outcome_of(work: Callable[[], Any]) -> tuple[str, str, float]:
    """What a call raised, in words, and how long it took."""
    started = time.perf_counter()
    try:
        work()
    except BaseException as error:
        return type(error).__name__, str(error), time.perf_counter() - started
    return "", "", time.perf_counter() - started


def observe_different_data(rank: int) -> dict[str, Any]:
    """Rank 1 sees analog values where rank 0 sees spikes, and a larger batch in another region."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.middle, self.right = SpikingBlock(), SpikingBlock(), SpikingBlock()

    torch.manual_seed(0)
    model = Branches()

    def step(model: nn.Module) -> Tensor:
        analog = torch.rand(4, 8, 64)
        left = model.left(spikes(4, 8, 64) if rank == 0 else analog)
        middle = model.middle(spikes(4, 8, 64) if rank == 0 else torch.zeros(4, 8, 64))
        right = model.right(spikes(4, 8 if rank == 0 else 32, 64))
        return left.sum() + middle.sum() + right.sum()

    optimize_memory(model, SpikingBlock, step, checkpoint_budget="speed")
    plan = applied_plan(model)
    assert plan is not None
    return {
        "digest": plan.digest(),
        "regions": [(r.path, r.treatment, r.compressor, r.input_bytes) for r in plan.regions],
        "world_size": plan.world_size,
        "checkpointed": [name for name, module in model.named_modules() if is_checkpointed(module)],
    }


def search_with_different_peaks(rank: int) -> dict[str, Any]:
    model = blocks(DeepSpikingBlock)
    batch = spikes(8, 16 * (1 + rank), 64)
    options: Any = {"level": 4, "split_fn": split_deep_block, "can_chunk": is_if_neuron}
    optimize_memory(model, None, loss_from_rest(batch), **options)
    plan = applied_plan(model)
    assert plan is not None
    return {"digest": plan.digest(), "trials": [(t.action, t.outcome, t.peak_bytes) for t in plan.trials]}


def search_with_memory_for_one_rank(rank: int) -> list[Any]:
    model, step = blocks(DeepSpikingBlock), loss_from_rest(spikes())

    def tight(model: nn.Module) -> Tensor:
        if rank == 1 and any(is_checkpointed(block.linear1) for block in model):  # type: ignore[union-attr]
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(model)

    optimize_memory(model, None, tight, level=2, split_fn=split_deep_block)
    plan = applied_plan(model)
    assert plan is not None
    return [plan.digest(), [trial.outcome for trial in plan.trials]]


def fail_on_rank_one(rank: int, call: int, error: str) -> list[Any]:
    model, step = blocks(), loss_from_rest(spikes())
    unchanged = Unchanged(model)
    calls = 0

    def failing(model: nn.Module) -> Tensor:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == call:
            raise KeyboardInterrupt if error == "ctrl-c" else ZeroDivisionError("made up")
        return step(model)

    outcome = outcome_of(lambda: optimize_memory(model, None, failing, level=2))
    unchanged.check()
    return [*outcome, applied_plan(model) is None]


def fail_between_exchanges(rank: int) -> list[Any]:
    """The progress callback of one rank raises while no exchange is under way."""
    model, step = blocks(), loss_from_rest(spikes())
    unchanged = Unchanged(model)

    def progress(phase: str, done: int, total: int) -> None:
        if rank == 0 and phase == "measuring" and done == 1:
            raise ZeroDivisionError("in the progress callback")

    outcome = outcome_of(lambda: optimize_memory(model, None, step, level=2, progress=progress))
    unchanged.check()
    return list(outcome)


def disagree(rank: int, how: str) -> list[Any]:
    model, step = blocks(), loss_from_rest(spikes())
    unchanged = Unchanged(model)
    options: dict[str, Any] = {
        "arguments": {"level": 1, "checkpoint_budget": "speed" if rank == 0 else "memory"},
        "bad argument": {"level": 1 if rank == 0 else 9},
        "level 0": {"level": 0 if rank == 0 else 2},
        "model": {"level": 1},
    }[how]
    if how == "model" and rank == 1:
        model.append(SpikingBlock())
        unchanged = Unchanged(model)
    outcome = outcome_of(lambda: optimize_memory(model, None, step, **options))
    unchanged.check()
    return list(outcome)


def level_zero(rank: int) -> list[Any]:
    """Ranks that change nothing need agree on nothing else."""
    model = blocks(count=2 + rank)
    unchanged = Unchanged(model)
    result = optimize_memory(model, SpikingBlock if rank else DeepSpikingBlock, level=0)
    unchanged.check()
    return [result is model, applied_plan(model) is None]


def plan_in_a_subgroup(rank: int) -> list[Any]:
    """Two pipeline stages of one rank each: each plans alone, with a model of its own."""
    groups = [dist.new_group([member]) for member in range(2)]
    model = blocks(count=2 + rank)
    optimize_memory(model, None, loss_from_rest(spikes()), process_group=groups[rank])
    plan = applied_plan(model)
    assert plan is not None
    other = outcome_of(lambda: optimize_memory(model, None, loss_from_rest(spikes()), process_group=groups[1 - rank]))
    return [len(plan.recomputed), plan.world_size, *other]


def apply_different_plans(rank: int, folder: str) -> list[Any]:
    model = blocks()
    optimize_memory(model, None, loss_from_rest(spikes()))
    plan = applied_plan(model)
    assert plan is not None
    path = Path(folder, f"plan{rank}.json")
    plan.save(path)
    fresh = blocks()
    optimize_memory(fresh, plan=path)
    applied = applied_plan(fresh)
    assert applied is not None
    same = applied.digest() == plan.digest()
    other = blocks()
    unchanged = Unchanged(other)
    missing = path if rank == 0 else Path(folder, "missing.json")
    outcome = outcome_of(lambda: optimize_memory(other, plan=missing))
    unchanged.check()
    return [same, *outcome]


JOBS: dict[str, Callable[[int], Any]] = {
    "data": observe_different_data,
    "peaks": search_with_different_peaks,
    "memory": search_with_memory_for_one_rank,
    "probe": functools.partial(fail_on_rank_one, call=1, error="error"),
    "plain step": functools.partial(fail_on_rank_one, call=2, error="error"),
    "trial": functools.partial(fail_on_rank_one, call=3, error="error"),
    "ctrl-c": functools.partial(fail_on_rank_one, call=3, error="ctrl-c"),
    "progress": fail_between_exchanges,
    "arguments": functools.partial(disagree, how="arguments"),
    "bad argument": functools.partial(disagree, how="bad argument"),
    "level 0": functools.partial(disagree, how="level 0"),
    "level 0 on all": level_zero,
    "model": functools.partial(disagree, how="model"),
    "subgroup": plan_in_a_subgroup,
}


def do_all_jobs(rank: int, folder: str) -> dict[str, Any]:
    results = {name: job(rank) for name, job in JOBS.items()}
    results["plans"] = apply_different_plans(rank, folder)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks reports of all jobs; one pair of processes does them all."""
    return run_ranks(do_all_jobs, 2, str(tmp_path_factory.mktemp("plans")), timeout=240.0)


def test_ranks_with_different_data_build_the_same_plan(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks[0]["data"], ranks[1]["data"]
    assert first == second
    assert first["world_size"] == 2
    size = 4 * 8 * 64 * 4
    assert first["regions"] == [
        # Binary on one rank only: not packed.
        ("left", "recompute", None, size),
        # Zeros on one rank and spikes on the other prove binary; beyond the budget, though.
        ("middle", "keep", None, size),
        # The larger batch of rank 1 counts.
        ("right", "recompute", "bit", 4 * size),
    ]
    assert first["checkpointed"] == ["left", "right"]


def test_a_search_follows_the_largest_peak_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks[0]["peaks"], ranks[1]["peaks"]
    assert first == second
    assert len(first["trials"]) > 2


def test_a_trial_that_is_too_large_for_one_rank_is_undone_on_all(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["memory"] == ranks[1]["memory"]
    assert ranks[0]["memory"][1][-1] == "out of memory"


@pytest.mark.parametrize(
    ("phase", "what"),
    [
        ("probe", "observing the model"),
        ("plain step", "measuring the plain model"),
        ("trial", "measuring the first plan"),
    ],
)
def test_an_error_on_one_rank_raises_on_all_within_seconds(ranks: list[dict[str, Any]], phase: str, what: str) -> None:
    kind, message, seconds, plain = ranks[0][phase]
    assert kind == "RuntimeError"
    assert message == f"Rank 1 failed while {what}: ZeroDivisionError: made up. Nothing was changed on any rank."
    assert plain
    assert ranks[1][phase][:2] == ["ZeroDivisionError", "made up"]
    assert max(seconds, ranks[1][phase][2]) < 60


def test_ctrl_c_on_one_rank_reaches_the_others(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["ctrl-c"][0] == "RuntimeError"
    assert "Rank 1 failed" in ranks[0]["ctrl-c"][1]
    assert ranks[1]["ctrl-c"][0] == "KeyboardInterrupt"


def test_an_error_between_two_exchanges_reaches_the_others(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["progress"][0] == "ZeroDivisionError"
    kind, message, _ = ranks[1]["progress"]
    assert kind == "RuntimeError"
    assert "Rank 0 failed" in message
    assert "in the progress callback" in message


def test_different_arguments_are_an_error_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["arguments"][0] == "RuntimeError"
        assert "The ranks disagree while comparing the arguments" in result["arguments"][1]


def test_level_zero_on_one_rank_alone_is_an_error_on_all(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["level 0"][0] == "RuntimeError"
        assert "The ranks disagree while comparing the arguments: rank 0 has ('level 0',)" in result["level 0"][1]
        assert result["level 0 on all"] == [True, True]


def test_a_bad_argument_on_one_rank_is_an_error_on_all(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["bad argument"][0] == "ValueError"
    assert ranks[0]["bad argument"][0] == "RuntimeError"
    assert "Rank 1 failed while checking the arguments: ValueError: level must be" in ranks[0]["bad argument"][1]


def test_different_models_are_an_error_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["model"][0] == "RuntimeError"
        assert "The ranks disagree while finding the regions" in result["model"][1]


def test_each_pipeline_stage_plans_with_its_own_group(ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(ranks):
        count, world_size, kind, message, _ = result["subgroup"]
        assert (count, world_size) == (2 + rank, 1)
        assert kind == "ValueError"
        assert "not a member of process_group" in message


def test_a_plan_file_is_applied_on_all_ranks_or_on_none(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["plans"][0]
    assert ranks[1]["plans"][0]
    assert ranks[1]["plans"][1] == "FileNotFoundError"
    assert ranks[0]["plans"][1] == "RuntimeError"
    assert "Rank 1 failed" in ranks[0]["plans"][2]


def test_a_single_process_is_a_group_of_one() -> None:
    ranks = Ranks()
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.together("work", lambda: 3) == [3]
    assert ranks.attempt("work", lambda: ranks) is ranks
    assert ranks.same("work", "x") == "x"
    with pytest.raises(ZeroDivisionError), ranks.telling():
        ranks.together("work", lambda: 1 / 0)
