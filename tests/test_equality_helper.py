"""The helper that all equality tests lean on must be able to fail: one fault of each kind, and it names it."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.equality import assert_optimized_equals_plain, assert_same_tree, call, rng_state, state_of

Pair = namedtuple("Pair", "first second")


@dataclass
class Sums:
    rows: Tensor
    note: str


class Neuron(nn.Module):
    """State in all the places where libraries keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mem", torch.zeros(0), persistent=False)
        self._memories: dict[str, Any] = {"v": 0.0}
        self.trace: Tensor | None = None
        self.calls = 0
        self.history: list[float] = []
        self.noise = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> list[Any]:
        self.calls += 1
        current = self.norm(self.linear(x)) + 0.0 * torch.rand(1, generator=self.noise)
        current = current + 1e-3 * random.random() + 1e-3 * float(np.random.rand()) + 1e-3 * torch.rand(())
        self.mem = current if self.mem.numel() == 0 else self.mem.detach() + current
        v = self._memories["v"]
        self._memories["v"] = 0.5 * (v.detach() if isinstance(v, Tensor) else v) + current
        self.trace = current.detach()
        self.history.append(float(current.detach().mean()))
        pair = Pair(self._memories["v"], self.mem)
        return [pair, {"sums": Sums(current.sum(1), "rows")}, (current.detach(), 3)]


def make_batch() -> Any:
    return call(torch.randn(5, 4, requires_grad=True))


def nothing(model: nn.Module) -> None:
    pass


def check(treatment: Callable[[Any], object], **options: Any) -> None:
    assert_optimized_equals_plain(Neuron, treatment, make_batch, **options)


def after_forward(change: Callable[[Any, Any], Any]) -> Callable[[nn.Module], object]:
    """A treatment whose fault happens after each forward: `change(module, outputs)` returns other outputs or None."""
    return lambda model: model.register_forward_hook(lambda module, args, outputs: change(module, outputs))


def replace(module: Any, name: str, value: Any) -> None:
    setattr(module, name, value)


def one_ulp_up(tensor: Tensor) -> Tensor:
    step = torch.zeros_like(tensor)
    value = tensor.detach().flatten()[0]
    step.view(-1)[0] = torch.nextafter(value, torch.tensor(torch.inf)) - value
    return tensor + step


def add_in_place(tensor: Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.add_(value)


FAULTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "one ulp in one value of a parameter gradient": (
        lambda model: model.linear.weight.register_hook(one_ulp_up),
        r"step 0, gradient\['linear.weight'\]: 1 of 16 values differ",
    ),
    "one ulp in one value of an output": (
        after_forward(lambda module, out: [Pair(one_ulp_up(out[0].first), out[0].second), *out[1:]]),
        r"step 0, output\[0\]\[0\]: 1 of 20 values differ",
    ),
    "a gradient that is zero instead of absent": (
        lambda model: model.register_parameter("spare", nn.Parameter(torch.zeros(1))),
        r"step 0, parameter: keys differ: missing \[\], new \['spare'\]",
    ),
    "one ulp in the gradient of the input": (
        lambda model: model.register_forward_pre_hook(lambda module, args: args[0].register_hook(one_ulp_up) and None),
        r"step 0, input gradient\[0\]: 1 of 20 values differ",
    ),
    "a parameter changed outside the optimizer": (
        after_forward(lambda module, out: add_in_place(module.norm.bias, 1e-7)),
        r"step 0, parameter\['norm.bias'\]",
    ),
    "batch norm counted twice": (
        after_forward(lambda module, out: add_in_place(module.norm.num_batches_tracked, 1)),
        r"buffer\['norm.num_batches_tracked'\].*expected 1, got 2",
    ),
    "running statistics updated twice": (
        after_forward(lambda module, out: _update_norm(module)),
        r"buffer\['norm.running_var'\]",
    ),
    "a reassigned buffer stepped twice": (
        after_forward(lambda module, out: replace(module, "mem", module.mem + module.mem)),
        r"buffer\['mem'\]",
    ),
    "a memory stepped twice": (
        after_forward(lambda module, out: module._memories.update(v=module._memories["v"] * 1.5)),
        r"attribute\['_memories'\]\['v'\]",
    ),
    "a memory cut from its graph": (
        after_forward(lambda module, out: module._memories.update(v=module._memories["v"].detach())),
        r"attribute\['_memories'\]\['v'\]: expected requires_grad True, got False",
    ),
    "a memory lost": (
        after_forward(lambda module, out: module._memories.update(v=0.0)),
        r"attribute\['_memories'\]\['v'\]: expected Tensor, got float",
    ),
    "a plain tensor attribute lost": (
        after_forward(lambda module, out: replace(module, "trace", None)),
        r"attribute\['trace'\]: expected Tensor, got None",
    ),
    "a counter stepped twice": (
        after_forward(lambda module, out: replace(module, "calls", module.calls + 1)),
        r"attribute\['calls'\]: expected 1, got 2",
    ),
    "a list appended to twice": (
        after_forward(lambda module, out: module.history.append(0.0)),
        r"attribute\['history'\]: expected 1 items, got 2",
    ),
    "something hung on the module": (
        lambda model: replace(model, "extra", 1),
        r"attribute: keys differ: missing \[\], new \['extra'\]",
    ),
    "a submodule wrapped": (
        lambda model: replace(model, "norm", nn.Sequential(model.norm)),
        r"state_dict key\[2\]: expected 'norm.weight', got 'norm.0.weight'",
    ),
    "a module switched to eval": (
        after_forward(lambda module, out: module.norm.eval() and None),
        r"training flag\['norm'\]: expected True, got False",
    ),
    "list turned into tuple": (after_forward(lambda module, out: tuple(out)), r"output: expected list, got tuple"),
    "namedtuple turned into tuple": (
        after_forward(lambda module, out: [tuple(out[0]), *out[1:]]),
        r"output\[0\]: expected Pair, got tuple",
    ),
    "dataclass turned into dict": (
        after_forward(lambda module, out: [out[0], {"sums": vars(out[1]["sums"])}, out[2]]),
        r"output\[1\]\['sums'\]: expected Sums, got dict",
    ),
    "a key renamed": (
        after_forward(lambda module, out: [out[0], {"sum": out[1]["sums"]}, out[2]]),
        r"output\[1\]: keys differ: missing \['sums'\], new \['sum'\]",
    ),
    "an int turned into a float": (
        after_forward(lambda module, out: [out[0], out[1], (out[2][0], 3.0)]),
        r"output\[2\]\[1\]: expected int, got float",
    ),
    "another dtype": (
        after_forward(lambda module, out: [*out[:2], (out[2][0].double(), 3)]),
        r"output\[2\]\[0\]: expected dtype torch.float32, got torch.float64",
    ),
    "another memory layout": (
        after_forward(lambda module, out: [*out[:2], (out[2][0].t().contiguous().t(), 3)]),
        r"output\[2\]\[0\]: expected stride \(4, 1\), got \(1, 5\)",
    ),
    "an output that requires a gradient it did not require": (
        after_forward(lambda module, out: [*out[:2], (out[2][0].requires_grad_(), 3)]),
        r"output\[2\]\[0\]: expected requires_grad False, got True",
    ),
    "a Parameter returned as a plain tensor": (
        after_forward(lambda module, out: [*out[:2], (nn.Parameter(out[2][0]), 3)]),
        r"output\[2\]\[0\]: expected Tensor, got Parameter",
    ),
    "one draw too many from torch": (after_forward(lambda module, out: torch.rand(1) and None), "random stream.*torch"),
    "one draw too many from NumPy": (after_forward(lambda m, out: replace(m, "_", np.random.rand())), "stream.*numpy"),
    "one draw too many from Python": (after_forward(lambda m, out: replace(m, "_", random.random())), "stream.*python"),
    "one draw too many from a generator of the module": (
        after_forward(lambda module, out: torch.rand(1, generator=module.noise) and None),
        r"attribute\['noise'\]\['generator'\]",
    ),
    "a treatment that draws random numbers": (lambda model: torch.rand(1), "step 0, random stream.*torch"),
}


def _update_norm(module: Any) -> None:
    module.norm.running_var = 0.9 * module.norm.running_var + 0.1


@pytest.mark.parametrize("fault", FAULTS)
def test_the_helper_catches(fault: str) -> None:
    treatment, message = FAULTS[fault]
    with pytest.raises(AssertionError, match=message):
        check(treatment)


def test_the_helper_passes_a_model_that_is_the_same() -> None:
    check(nothing)
    assert_optimized_equals_plain(Neuron(), nothing, make_batch)


def test_a_fault_in_the_third_step_only_is_found_there() -> None:
    fault = after_forward(lambda module, out: tuple(out) if module.calls == 3 else None)
    with pytest.raises(AssertionError, match="step 2, output: expected list, got tuple"):
        check(fault)


def test_a_fault_that_one_optimizer_step_causes_is_found_after_it() -> None:
    def slower(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05 if type(model) is Neuron else 0.05 * (1 + 1e-6))

    class Treated(Neuron):
        pass

    with pytest.raises(AssertionError, match=r"step 0, parameter after the step\['linear.weight'\]"):
        check(lambda model: replace(model, "__class__", Treated), make_optimizer=slower)


def test_a_missing_gradient_is_not_a_zero_gradient() -> None:
    with pytest.raises(AssertionError, match="expected None, got Tensor"):
        assert_same_tree([None], [torch.zeros(1)])


def test_nan_equals_nan_and_nothing_else() -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert_same_tree(nan, nan.clone())
    with pytest.raises(AssertionError, match="1 of 2 values differ"):
        assert_same_tree(nan, torch.tensor([0.0, 1.0]))
    with pytest.raises(AssertionError, match="1 of 2 values differ"):
        assert_same_tree(torch.tensor([0.0, 1.0]), nan)


def test_minus_zero_is_not_zero() -> None:
    with pytest.raises(AssertionError, match=r"expected 0.0, got -0.0"):
        assert_same_tree(torch.zeros(3), -torch.zeros(3))


def test_empty_and_scalar_tensors_are_compared_by_shape() -> None:
    assert_same_tree(torch.zeros(0, 3), torch.zeros(0, 3))
    with pytest.raises(AssertionError, match="expected shape"):
        assert_same_tree(torch.zeros(0, 3), torch.zeros(3, 0))
    with pytest.raises(AssertionError, match="expected shape"):
        assert_same_tree(torch.zeros(()), torch.zeros(1))


def test_a_tolerance_is_relative_to_the_largest_value_and_for_floats_only() -> None:
    one = torch.tensor([100.0, 1e-3])
    assert_same_tree(one, one + torch.tensor([0.0, 5e-5]), rtol=1e-6)
    with pytest.raises(AssertionError, match=r"relative to the largest value 0\.01"):
        assert_same_tree(one, one + torch.tensor([1.0, 0.0]), rtol=1e-6)
    with pytest.raises(AssertionError, match="expected 7, got 8"):
        assert_same_tree({"step": 7}, {"step": 8}, rtol=1.0)


def test_a_report_is_cut_when_everything_differs() -> None:
    with pytest.raises(AssertionError, match=r"\.\.\. and 80 more"):
        assert_same_tree(list(range(100)), list(range(1, 101)))


def test_the_state_of_a_model_has_every_kind_of_state() -> None:
    model = Neuron()
    model(torch.randn(5, 4))
    state = state_of(model)
    assert {"mem", "norm.running_mean", "norm.num_batches_tracked"} <= set(state["buffer"])
    assert {"_memories", "trace", "calls", "history", "noise"} <= set(state["attribute"])
    assert state["attribute"]["_memories"]["v"] is model._memories["v"]
    assert state["gradient"] == dict.fromkeys(["linear.weight", "linear.bias", "norm.weight", "norm.bias"])


def test_the_random_state_moves_with_each_stream() -> None:
    start = rng_state()
    assert_same_tree(start, rng_state())
    for draw in (random.random, np.random.rand, lambda: torch.rand(1)):
        before = rng_state()
        draw()
        with pytest.raises(AssertionError):
            assert_same_tree(before, rng_state())
