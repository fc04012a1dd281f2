"""The search on a CUDA device: measured by the allocator, timed by events."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from spikingjelly.activation_based import functional
from torch import Tensor, nn

from lightning_memopt.measuring import measure_memory
from lightning_memopt.observing.costs import Choice
from lightning_memopt.observing.model_state import unchanged
from lightning_memopt.observing.region_costs import observe_step
from lightning_memopt.planning import applied_plan, find_targets, optimize_memory
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


def test_the_first_plan_of_a_process_knows_of_the_workspaces_that_products_keep() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3)))
    model.to(DEVICE)
    data = torch.randn(1024, 256, device=DEVICE)
    torch._C._cuda_clearCublasWorkspaces()
    optimize_memory(model, example_forward=lambda m: m(data).square().mean(), memory_budget="80%")
    plan = applied_plan(model)
    assert plan is not None
    assert plan.memory_budget == torch.cuda.get_device_properties(DEVICE).total_memory * 80 // 100
    assert plan.peak_bytes_after is not None
    assert plan.predicted_peak_bytes == pytest.approx(plan.peak_bytes_after, rel=0.02)


class Draws(nn.Module):
    """Takes random numbers of the device, in pieces more than as a whole, and makes nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x).exp()) + 0.0 * torch.rand_like(x)


def test_a_treatment_after_which_the_device_draws_other_random_numbers_is_refused() -> None:
    model = nn.Sequential(Draws(), Draws()).to(DEVICE)
    data = torch.randn(4, 8, 64, device=DEVICE)
    choices = Choice("recompute"), Choice("recompute", None, 2)
    with unchanged(model) as state:
        regions = find_targets(model, Draws).regions
        seen = observe_step(
            model, regions, lambda m: m(data).square().mean(), state, choices=choices, device=torch.device("cuda")
        )
    (region,) = (region for region in seen.costs.regions if region.path == "0")
    refused = {cost.choice: cost.refused for cost in region.choices}
    assert not refused[choices[0]]
    assert "random numbers" in refused[choices[1]]


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
