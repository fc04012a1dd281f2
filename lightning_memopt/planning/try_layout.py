"""
A layout, tried
===============

What a plan promises is measured in a real step, with its regions treated as it says, on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_memopt.checkpointing import RegionConfig
from lightning_memopt.observing.model_state import ModelState
from lightning_memopt.observing.trial import Profile, run_step
from lightning_memopt.planning.agree import Ranks
from lightning_memopt.planning.apply import treated_as
from lightning_memopt.planning.request import ExampleForward, Request, device_of


def try_layout(
    model: nn.Module,
    layout: Mapping[str, RegionConfig],
    watched: Mapping[str, nn.Module],
    example_forward: ExampleForward,
    request: Request,
    state: ModelState,
    ranks: Ranks,
    *,
    what: str,
    done: int,
    most: int,
) -> list[Profile]:
    """Run one real step of ``model`` under ``layout``; what it showed on each rank.

    Args:
        model: plain, as it is again when this returns.
        layout: how regions are treated, by path.
        watched: regions whose own peaks are noted, by path.
        example_forward: runs the forward of the step.
        request: says whether old gradients are there, and whom to tell of the progress.
        state: of ``model``.
        ranks: those that build this plan.
        what: what is done here, in words, should a rank fail.
        done: steps that were measured before this one.
        most: steps that may be measured.
    """

    def run() -> Profile:
        old = request.gradients_in_forward
        return run_step(model, watched, example_forward, state, device_of(model), gradients_in_forward=old)

    request.report("measuring", done, most)
    with treated_as(model, layout):
        profiles = ranks.together(what, run)
    request.report("measuring", done + 1, most)
    return profiles
