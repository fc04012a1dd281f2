"""The search on a CUDA device: measured by the allocator, timed by events."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from spikingjelly.activation_based import functional
from torch import nn

from lightning_memopt.measuring import measure_memory
from lightning_memopt.planning import applied_plan, optimize_memory
from tests.planning_models import (
    DeepSpikingBlock,
    NoisyBlock,
    Unchanged,
    is_if_neuron,
    loss_from_rest,
    noisy_parts,
    spikes,
    split_deep_block,
    used_noisy_network,
)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def test_every_level_lowers_the_peak_further_and_keeps_what_it_promised() -> None:
    original = nn.Sequential(*(DeepSpikingBlock(256) for _ in range(3))).to(DEVICE)
    step = loss_from_rest(spikes(16, 256, 256).to(DEVICE))
    peaks = []
    for level in (2, 4):
        model = copy.deepcopy(original)
        options: Any = {"level": level, "split_fn": split_deep_block, "can_chunk": is_if_neuron}
        optimize_memory(model, None, step, **options)
        plan = applied_plan(model)
        assert plan is not None
        assert plan.device == "cuda"
        assert plan.peak_bytes_before is not None
        assert plan.peak_bytes_after is not None
        assert plan.peak_bytes_after < plan.peak_bytes_before
        assert all(region.forward_ms is not None for region in plan.recomputed)
        peaks.append(plan.peak_bytes_after)
        report = measure_memory(lambda model=model: step(model).backward(), device=DEVICE)
        assert abs(report.peak_bytes - plan.peak_bytes_after) <= 0.02 * plan.peak_bytes_after
        functional.reset_net(model)
    assert peaks[1] <= peaks[0]


def test_nothing_else_changes_on_the_device_not_even_its_random_numbers() -> None:
    model = used_noisy_network().to(DEVICE)
    functional.reset_net(model)
    batch = spikes().to(DEVICE)
    unchanged = Unchanged(model)
    optimize_memory(model, NoisyBlock, lambda m: m(batch), level=4, split_fn=noisy_parts)
    unchanged.check(treatments=False)


def test_a_real_lack_of_memory_in_the_plain_step_is_survived() -> None:
    _, total = torch.cuda.mem_get_info(DEVICE)
    model = nn.Sequential(*(DeepSpikingBlock(256) for _ in range(8))).to(DEVICE)
    step = loss_from_rest(spikes(16, 1024, 256).to(DEVICE))
    plain = measure_memory(lambda: step(model).backward(), device=DEVICE).peak_bytes
    model.zero_grad(set_to_none=True)
    functional.reset_net(model)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.6 * plain / total, DEVICE)
    try:
        optimize_memory(model, None, step, level=2)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    plan = applied_plan(model)
    assert plan is not None
    assert plan.peak_bytes_before is None
    assert plan.peak_bytes_after is not None
