from __future__ import annotations

import time

import pytest
import torch
import torch.distributed

from tests.ranks import RankError, run_ranks


def _sum_over_ranks(rank: int, factor: float) -> torch.Tensor:
    value = torch.tensor([rank + 1.0]) * factor
    torch.distributed.all_reduce(value)
    return value


def _second_rank_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("the second rank refuses")
    torch.distributed.barrier()


def _first_rank_hangs(rank: int) -> None:
    if rank == 0:
        time.sleep(60)


def test_each_rank_returns_its_result_from_one_process_group() -> None:
    assert run_ranks(_sum_over_ranks, 2, 10.0) == [torch.tensor([30.0]), torch.tensor([30.0])]


def test_the_traceback_of_the_rank_that_raised_reaches_the_caller() -> None:
    with pytest.raises(RankError, match=r"rank 1 raised(.|\n)*_second_rank_raises(.|\n)*the second rank refuses"):
        run_ranks(_second_rank_raises, 2)


def test_a_rank_that_hangs_is_ended_and_named_with_its_place_in_the_code() -> None:
    with pytest.raises(RankError, match=r"rank 0 stood here(.|\n)*_first_rank_hangs"):
        run_ranks(_first_rank_hangs, 2, timeout=15.0)
