"""What an optimizer will hold is known before it has stepped."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from lightning_memopt.measuring import OptimizerBytes, measure_memory, optimizer_bytes
from tests.equality import assert_same_tree, frozen


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.Linear(48, 64, dtype=torch.float64))


class Ema(torch.optim.Optimizer):
    """An optimizer that no table knows: a moving average in half precision, of matrices alone."""

    def __init__(self, params: Any, lr: float, unused: str) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or p.dim() < 2:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = [torch.zeros_like(p, dtype=torch.float16)]
                state["average"][0].lerp_(p.grad.half(), 0.1)
                p.sub_(state["average"][0].to(p.dtype), alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{
        name: functools.partial(getattr(torch.optim, name), lr=1e-3)
        for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")
    },
    "Rprop": lambda params: torch.optim.Rprop(params),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam, amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "Adam, fused": lambda params: torch.optim.Adam(params, fused=True),
    "Adam, foreach": lambda params: torch.optim.Adam(params, foreach=True),
    "two groups": lambda params: torch.optim.SGD(
        [{"params": params[:2], "momentum": 0.9}, {"params": params[2:]}], lr=0.1
    ),
    "unknown": lambda params: Ema(params, 0.1, "argument"),
}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_foretold_to_the_byte(name: str) -> None:
    network = model()
    optimizer = OPTIMIZERS[name](list(network.parameters()))
    before = frozen(copy.deepcopy(network.state_dict()))
    held = state_bytes(optimizer)  # Adagrad makes its state at once
    foretold = optimizer_bytes(optimizer).state
    assert state_bytes(optimizer) == held
    assert_same_tree(before, network.state_dict(), name="parameters")
    assert all(p.grad is None for p in network.parameters())
    for p in network.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert foretold == state_bytes(optimizer)
    # And what is there is counted as it is.
    assert optimizer_bytes(optimizer).state == foretold


def test_frozen_parameters_hold_no_state() -> None:
    network = model()
    network[0].requires_grad_(False)
    optimizer = torch.optim.Adam(network.parameters())
    for p in network.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    foretold = optimizer_bytes(optimizer).state
    optimizer.step()
    assert foretold == state_bytes(optimizer)


def test_hooks_of_the_optimizer_are_not_called() -> None:
    called = []
    optimizer = torch.optim.Adam(model().parameters())
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    optimizer_bytes(optimizer)
    assert called == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_temporaries_are_those_that_a_step_takes(name: str) -> None:
    network = nn.Sequential(nn.Linear(256, 128), nn.LayerNorm(128), nn.Linear(128, 256))
    optimizer = OPTIMIZERS[name](list(network.parameters()))
    foretold = optimizer_bytes(optimizer).step
    for p in network.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    report = measure_memory(optimizer.step, device="cpu")
    # What kernels take inside one operation (the norm of Adafactor, a chunk of foreach) is not seen.
    assert foretold == pytest.approx(report.peak_bytes - report.start_bytes, rel=0.02, abs=64)


def test_fused_steps_take_nothing_and_parameters_of_cuda_are_taken_at_once() -> None:
    network = model()
    assert optimizer_bytes(torch.optim.Adam(network.parameters(), fused=True)).step == 0
    with FakeTensorMode():
        there = nn.Linear(512, 512, bias=False, device="cuda")
        assert optimizer_bytes(torch.optim.Adam(there.parameters())) == OptimizerBytes(2 * 2**20 + 4, 2**20)


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, got Linear"):
        optimizer_bytes(nn.Linear(2, 2))  # type: ignore[arg-type]
