"""What the levels, budgets and observations of optimize_memory do to a model."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from spikingjelly.activation_based import functional
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.flop_counter import FlopCounterMode

from lightning_memopt.checkpointing import checkpoint_module, is_checkpointed, region_config, unwrap_module
from lightning_memopt.measuring import measure_memory, measuring_repeatedly
from lightning_memopt.planning import (
    Plan,
    RegionPlan,
    applied_plan,
    apply_plan,
    optimize_memory,
    remove_plan,
    split_into_children,
)
from tests.equality import assert_optimized_equals_plain, call
from tests.planning_models import (
    CHANNELS,
    DeepSpikingBlock,
    NoisyBlock,
    SpikingBlock,
    Unchanged,
    is_if_neuron,
    loss_from_rest,
    noisy_parts,
    spikes,
    split_deep_block,
    used_noisy_network,
)


class Counter:
    """Counts the passes of a whole model through `example_forward`."""

    def __init__(self, step: Callable[[nn.Module], Any]) -> None:
        self._step = step
        self.forward = 0
        self.backward = 0

    def __call__(self, model: nn.Module) -> Any:
        self.forward += 1
        loss = self._step(model)
        if loss.requires_grad:
            loss.register_hook(self._count)
        return loss

    def _count(self, gradient: Tensor) -> None:
        self.backward += 1


class Widths(nn.Module):
    """Linear layers of different input sizes; a layer's input is `[8, width]`."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, (*widths[1:], 4), strict=True))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def recomputed(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_checkpointed(module)]


def plan_of(model: nn.Module) -> Plan:
    plan = applied_plan(model)
    assert plan is not None
    return plan


def region(model: nn.Module, path: str) -> RegionPlan:
    return next(region for region in plan_of(model).regions if region.path == path)


def observed(model: nn.Module, targets: Any, step: Callable[[nn.Module], Any], **options: Any) -> nn.Module:
    return optimize_memory(model, targets, step, level=1, **options)


class TestLevelZero:
    def test_nothing_changes_and_no_forward_is_needed(self) -> None:
        model = nn.Sequential(SpikingBlock(), SpikingBlock())
        unchanged = Unchanged(model)
        assert optimize_memory(model, SpikingBlock, level=0) is model
        assert applied_plan(model) is None
        unchanged.check()


class TestSettingsWithoutEffect:
    """One warning each, where a setting does nothing or a level lacks one."""

    def warned(self, **options: Any) -> list[str]:
        model = nn.Sequential(SpikingBlock(), SpikingBlock())
        step = loss_from_rest(spikes())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimize_memory(model, None, step, **options)
            optimize_memory(model, None, step, **options)  # nothing left to do, nothing left to say
        assert all(warning.filename == __file__ for warning in caught)
        return [str(warning.message) for warning in caught]

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"level": 0, "split_fn": noisy_parts}, []),
            ({"level": 1}, []),
            ({"level": 1, "split_fn": split_deep_block}, ["split_fn has no effect at level 1"]),
            ({"level": 1, "can_chunk": is_if_neuron}, ["can_chunk has no effect at level 1"]),
            ({"level": 2}, ["level 2 splits no region without split_fn"]),
            (
                {"level": 2, "split_fn": split_deep_block, "can_chunk": is_if_neuron},
                ["can_chunk has no effect at level 2"],
            ),
            (
                {"level": 3},
                ["level 3 splits no region without split_fn", "level 3 cuts no region along time without can_chunk"],
            ),
            ({"level": 4, "split_fn": split_deep_block, "can_chunk": is_if_neuron}, []),
        ],
    )
    def test_it_is_said_once(self, options: dict[str, Any], expected: list[str]) -> None:
        said = self.warned(**options)
        assert len(said) == len(expected)
        for message, start in zip(said, expected, strict=True):
            assert message.startswith(start)


class TestLevelOne:
    def test_the_same_object_comes_back_with_every_block_recomputed(self) -> None:
        model = nn.Sequential(SpikingBlock(), SpikingBlock())
        assert observed(model, None, loss_from_rest(spikes())) is model
        assert recomputed(model) == ["0", "1"]
        assert plan_of(model).target_reason == "repeated blocks: 2 SpikingBlock"

    def test_one_forward_without_a_graph_is_all_it_takes(self) -> None:
        counter = Counter(loss_from_rest(spikes()))
        plan = plan_of(observed(nn.Sequential(SpikingBlock(), SpikingBlock()), None, counter))
        assert (counter.forward, counter.backward) == (1, 0)
        assert (plan.probe_passes, plan.search_passes, plan.trials) == (1, 0, ())
        assert plan.peak_bytes_before is plan.peak_bytes_after is None

    def test_the_forward_is_observed_without_autograd_and_in_training_mode(self) -> None:
        model = nn.Sequential(SpikingBlock(), SpikingBlock()).eval()
        seen = []

        def step(model: nn.Module) -> Any:
            seen.append((torch.is_grad_enabled(), [module.training for module in model.modules()]))
            return loss_from_rest(spikes())(model)

        observed(model, None, step)
        assert seen == [(False, [True] * len(list(model.modules())))]
        assert not any(module.training for module in model.modules())

    def test_a_layer_frozen_in_eval_mode_stays_so_while_the_model_trains(self) -> None:
        model = nn.Sequential(SpikingBlock(), SpikingBlock())
        model[1].eval()
        modes = []

        def step(model: nn.Module) -> Any:
            modes.append(model[1].training)
            return loss_from_rest(spikes())(model)

        observed(model, None, step)
        assert modes == [False]

    def test_a_forward_that_takes_gradients_itself_is_observed_with_them(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        data = torch.rand(2, 4, requires_grad=True)

        def gradient_penalty(model: nn.Module) -> Tensor:
            (gradient,) = torch.autograd.grad(model(data).sum(), data, create_graph=True)
            return gradient.square().sum()

        observed(model, nn.Linear, gradient_penalty)
        assert recomputed(model) == ["0", "1"]
        assert data.grad is None
        assert plan_of(model).probe_passes == 2

    @pytest.mark.parametrize(
        ("budget", "expected"),
        [
            ("speed", ["layers.1", "layers.2", "layers.4"]),
            ("balanced", ["layers.1", "layers.2", "layers.3", "layers.4"]),
            ("memory", ["layers.0", "layers.1", "layers.2", "layers.3", "layers.4"]),
        ],
    )
    def test_a_budget_takes_its_share_of_the_largest_inputs_rounded_up(self, budget: Any, expected: list[str]) -> None:
        model = Widths(4, 32, 64, 16, 128)
        observed(model, nn.Linear, lambda m: m(torch.rand(8, 4)), checkpoint_budget=budget)
        assert recomputed(model) == expected

    def test_equal_inputs_are_taken_in_model_order(self) -> None:
        model = Widths(16, 16, 16, 16)
        observed(model, nn.Linear, lambda m: m(torch.rand(8, 16)), checkpoint_budget="speed")
        assert recomputed(model) == ["layers.0", "layers.1"]
        assert "beyond the budget" in region(model, "layers.2").reason

    def test_what_cannot_be_checkpointed_does_not_use_up_the_budget(self) -> None:
        model = Widths(16, 16, 16, 16)
        model.layers.append(nn.Linear(16, 16))  # never runs: forward stops before it
        model.forward = None  # type: ignore[assignment]
        del model.__dict__["forward"]

        def step(model: nn.Module) -> Tensor:
            x = torch.rand(8, 16)
            for layer in model.layers[:2]:  # type: ignore[index]
                x = layer(x)
            return x

        observed(model, nn.Linear, step, checkpoint_budget="speed")
        assert recomputed(model) == ["layers.0"]
        assert "did not run" in region(model, "layers.4").reason

    def test_a_shared_module_is_treated_once_under_both_names(self) -> None:
        shared = SpikingBlock()
        model = nn.Sequential(shared, SpikingBlock(), shared)
        observed(model, SpikingBlock, loss_from_rest(spikes()))
        assert is_checkpointed(model[0])
        assert model[0] is model[2]
        assert region(model, "0").aliases == ("2",)
        assert region(model, "0").calls == 2

    def test_inputs_of_all_calls_count(self) -> None:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

        def loop(model: nn.Module) -> Tensor:
            x = torch.rand(8, 16)
            for _ in range(5):
                x = model[0](x)  # type: ignore[index]
            return model[1](x)  # type: ignore[index,no-any-return]

        observed(model, nn.Linear, loop)
        assert region(model, "0").input_bytes == 5 * 8 * 16 * 4
        assert region(model, "0").calls == 5
        assert region(model, "1").input_bytes == 8 * 16 * 4

    def test_recomputation_really_happens(self) -> None:
        model, batch = nn.Sequential(SpikingBlock(), SpikingBlock()), spikes()
        step = loss_from_rest(batch)

        def flops() -> int:
            with FlopCounterMode(display=False) as counter:
                step(model).backward()
            model.zero_grad()
            return counter.get_total_flops()

        plain = flops()
        optimize_memory(model, None, step)
        product = 2 * batch.numel() * CHANNELS
        # The input needs no gradient: plain training takes 2 products forward and 3 backward.
        assert plain == 5 * product
        assert flops() == 7 * product

    def test_a_model_without_possible_regions_stays_and_a_warning_says_why(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with pytest.warns(UserWarning, match=r"None of the 2 regions can be checkpointed.*did not run"):
            observed(model, nn.Linear, lambda m: torch.zeros(()))
        assert recomputed(model) == []


class TestPacking:
    def compressed(self, step: Callable[[nn.Module], Any], model: nn.Module | None = None, **options: Any) -> Any:
        model = observed(model or nn.ModuleList([SpikingBlock()]), SpikingBlock, step, **options)
        planned = region(model, "0")
        return planned.compressor, planned.compressed_args, planned.reason

    def test_binary_inputs_are_packed_and_the_bytes_say_so(self) -> None:
        model = observed(nn.Sequential(SpikingBlock(), SpikingBlock()), None, loss_from_rest(spikes()))
        planned = region(model, "1")
        assert (planned.compressor, planned.compressed_args) == ("bit", (0,))
        assert planned.input_bytes == 32 * planned.stored_bytes
        config = region_config(model[1])
        assert config is not None
        assert config.compressor is not None
        assert config.compressed_args == (0,)

    def test_an_analog_first_block_stays_uncompressed_when_the_sample_is_all_zeros(self) -> None:
        compressor, _, reason = self.compressed(lambda m: m[0](torch.zeros(8, 16, CHANNELS)))
        assert compressor is None
        assert "all zeros, which proves nothing" in reason

    def test_zeros_in_one_call_and_spikes_in_another_prove_binary(self) -> None:
        def step(model: nn.Module) -> Tensor:
            return model[0](torch.zeros(2, 16, CHANNELS)) + model[0](spikes(2, 16, CHANNELS))  # type: ignore[index]

        assert self.compressed(step)[0] == "bit"

    def test_one_call_with_other_values_is_enough_to_leave_it(self) -> None:
        def step(model: nn.Module) -> Tensor:
            return model[0](spikes(2, 16, CHANNELS)) + model[0](torch.rand(2, 16, CHANNELS))  # type: ignore[index]

        assert self.compressed(step)[0] is None

    def test_nothing_is_said_of_spikes_where_there_are_none(self) -> None:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))
        optimize_memory(model, example_forward=lambda m: m(torch.rand(4, 8)), level=1)
        plan = applied_plan(model)
        assert plan is not None
        assert {region.reason for region in plan.regions} == {"can be recomputed from its inputs"}

    @pytest.mark.parametrize("value", [2.0, 0.5, -1.0, float("nan"), 256.0])
    def test_a_single_value_that_is_no_spike_is_seen(self, value: float) -> None:
        batch = spikes()
        batch[-1, -1, -1] = value
        compressor, _, reason = self.compressed(lambda m: m[0](batch.clone()))
        assert compressor is None
        assert "is not binary" in reason

    def test_integers_of_added_residuals_are_not_packed_as_bits(self) -> None:
        class Added(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(SpikingBlock() for _ in range(3))

            def forward(self, x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = block(x) + x
                return x

        model = observed(Added(), SpikingBlock, loss_from_rest(spikes(rate=0.6)))
        assert [r.compressor for r in plan_of(model).regions][1:] == [None, None]

    def test_dropout_before_a_region_is_seen_because_the_model_trains(self) -> None:
        model = nn.Sequential(SpikingBlock(), nn.Dropout(0.5), SpikingBlock()).eval()
        observed(model, SpikingBlock, loss_from_rest(spikes()))
        assert region(model, "2").compressor is None

    def test_compress_false_packs_nothing(self) -> None:
        model = observed(nn.Sequential(SpikingBlock(), SpikingBlock()), None, loss_from_rest(spikes()), compress=False)
        assert all(r.compressor is None for r in plan_of(model).regions)

    def test_a_batch_that_the_caller_holds_is_stored_without_a_copy(self) -> None:
        batch = spikes()
        model = observed(nn.Sequential(SpikingBlock(), SpikingBlock()), None, loss_from_rest(batch))
        assert region(model, "0").compressor is None
        assert region(model, "0").stored_bytes == 0
        assert "held by the caller" in region(model, "0").reason

    def test_spikes_that_nobody_else_holds_are_packed(self) -> None:
        assert self.compressed(lambda m: m[0](spikes()))[0] == "bit"

    def test_spikes_are_found_in_second_place_and_by_keyword(self) -> None:
        class Gated(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(CHANNELS, CHANNELS)

            def forward(self, scale: Tensor, x: Tensor, *, mask: Tensor) -> Tensor:
                return self.linear(x * scale) * mask

        model = nn.ModuleList([Gated()])
        observed(
            model, Gated, lambda m: m[0](torch.rand(16, CHANNELS), spikes(16, CHANNELS), mask=spikes(16, CHANNELS))
        )
        assert region(model, "0").compressed_args == (1, "mask")

    def test_one_tensor_passed_three_times_is_counted_once_and_packed_by_all_names(self) -> None:
        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.q, self.k, self.v = (nn.Linear(CHANNELS, CHANNELS) for _ in range(3))

            def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return self.q(q) * self.k(k) * self.v(v)

        def step(model: nn.Module) -> Tensor:
            x = spikes(16, CHANNELS)
            return model[0](x, x, v=x)  # type: ignore[index,no-any-return]

        model = nn.ModuleList([Attention()])
        observed(model, Attention, step)
        assert region(model, "0").compressed_args == (0, 1, "v")
        assert region(model, "0").input_bytes == 16 * CHANNELS * 4

    def test_weights_buffers_scales_and_indices_are_never_packed(self) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(CHANNELS, CHANNELS)

            def forward(self, x: Tensor, *others: Tensor) -> Tensor:
                return self.linear(x)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.odd = Odd()
                self.weight = nn.Parameter(torch.ones(CHANNELS))
                self.register_buffer("mask", torch.ones(CHANNELS))

            def forward(self, x: Tensor) -> Tensor:
                indices = torch.ones(64, dtype=torch.long)
                return self.odd(x, self.weight, self.mask, torch.ones(()), torch.ones(1), indices)

        model = observed(Model(), Odd, lambda m: m(torch.rand(16, CHANNELS)))
        assert region(model, "odd").compressed_args == ()

    def test_a_boolean_mask_is_packed(self) -> None:
        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(CHANNELS, CHANNELS)

            def forward(self, x: Tensor, mask: Tensor) -> Tensor:
                return self.linear(x).masked_fill(mask, 0.0)

        model = nn.ModuleList([Masked()])
        observed(model, Masked, lambda m: m[0](torch.rand(16, CHANNELS), torch.rand(16, CHANNELS) > 0.5))
        assert region(model, "0").compressed_args == (1,)
        assert region(model, "0").stored_bytes == 16 * CHANNELS * 4 + 16 * CHANNELS // 8


class TestWhatIsLeftAlone:
    def reason(self, block: nn.Module, step: Callable[[nn.Module], Any]) -> str:
        model = nn.Sequential(nn.Linear(8, 8), block)
        observed(model, (nn.Linear, type(block)), step)
        assert recomputed(model) == ["0"]
        return region(model, "1").reason

    def test_a_region_that_changes_its_input_in_place(self) -> None:
        class InPlace(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.mul_(2).relu()

        assert "changes its input in place" in self.reason(InPlace(), lambda m: m(torch.rand(4, 8)))

    def test_a_region_that_changes_a_view_of_its_input_in_place(self) -> None:
        class InPlace(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                x[0].zero_()
                return x.relu()

        assert "changes its input in place" in self.reason(InPlace(), lambda m: m(torch.rand(4, 8)))

    def test_a_region_whose_input_is_changed_afterwards(self) -> None:
        class Plain(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * 2

        def step(model: nn.Module) -> Tensor:
            x = model[0](torch.rand(4, 8))  # type: ignore[index]
            y = model[1](x)  # type: ignore[index]
            x += y
            return x

        assert "changed in place after it ran" in self.reason(Plain(), step)

    def test_a_region_without_tensor_inputs_or_outputs(self) -> None:
        class Constant(nn.Module):
            def forward(self, size: int) -> Tensor:
                return torch.ones(size, size)

        class Recorder(nn.Module):
            def forward(self, x: Tensor) -> None:
                self.last = float(x.sum())

        def constant(model: nn.Module) -> Tensor:
            return model[0](model[1](8))  # type: ignore[index,no-any-return]

        def recorder(model: nn.Module) -> Tensor:
            x = model[0](torch.rand(4, 8))  # type: ignore[index]
            model[1](x)  # type: ignore[index]
            return x  # type: ignore[no-any-return]

        assert "no tensor to recompute from" in self.reason(Constant(), constant)
        assert "returns no tensor" in self.reason(Recorder(), recorder)

    def test_a_module_with_a_replaced_forward(self) -> None:
        class Block(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * 2

        block = Block()
        block.forward = lambda x: x * 3  # type: ignore[method-assign]
        assert "forward was replaced" in self.reason(block, lambda m: m(torch.rand(4, 8)))

    def test_torchscript(self) -> None:
        class Block(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * 2

        assert "TorchScript" in self.reason(torch.jit.trace(Block(), torch.rand(4, 8)), lambda m: m(torch.rand(4, 8)))

    def test_regions_checkpointed_by_hand_and_what_lies_around_and_inside_them(self) -> None:
        model = nn.Sequential(SpikingBlock(), SpikingBlock(), DeepSpikingBlock())
        checkpoint_module(model[0])
        checkpoint_module(model[2].neuron1)
        by_hand = region_config(model[0])
        observed(model, (SpikingBlock, DeepSpikingBlock), loss_from_rest(spikes()))
        assert recomputed(model) == ["0", "1", "2.neuron1"]
        assert region_config(model[0]) == by_hand
        assert region(model, "0").reason == "checkpointed by hand already, left as it is"
        assert region(model, "2").reason == "holds 2.neuron1, which is checkpointed by hand already"
        remove_plan(model)
        assert recomputed(model) == ["0", "2.neuron1"]

    def test_modules_in_a_checkpoint_wrapper_of_torch(self) -> None:
        model = nn.Sequential(SpikingBlock(), checkpoint_wrapper(SpikingBlock()))
        observed(model, SpikingBlock, loss_from_rest(spikes()))
        assert recomputed(model) == ["0"]
        reason = region(model, "1._checkpoint_wrapped_module").reason
        assert reason == "lies inside 1, which is checkpointed by CheckpointWrapper already"


class TestHigherLevels:
    def deep(self, blocks: int = 3) -> nn.Module:
        return nn.Sequential(*(DeepSpikingBlock() for _ in range(blocks)))

    def test_a_split_is_kept_where_the_peak_falls(self) -> None:
        model = self.deep(1)
        model.append(nn.Linear(CHANNELS, CHANNELS))
        optimize_memory(model, DeepSpikingBlock, loss_from_rest(spikes()), level=2, split_fn=split_deep_block)
        plan = plan_of(model)
        assert "0" not in recomputed(model)
        assert "0.neuron2" in recomputed(model)
        assert region(model, "0").reason == "split into 4 parts"
        kept = [trial for trial in plan.trials if trial.outcome == "kept"]
        assert [trial.paths for trial in kept] == [("0",)]
        assert plan.peak_bytes_after == kept[-1].peak_bytes
        assert plan.peak_bytes_after < plan.trials[1].peak_bytes  # type: ignore[operator]

    def test_a_split_is_undone_where_the_peak_does_not_fall(self) -> None:
        class Pair(nn.Module):
            """Both halves keep as much as the whole; splitting only stores one input more."""

            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)

            def forward(self, x: Tensor) -> Tensor:
                return self.second(self.first(x))

        model = nn.Sequential(Pair(), Pair())
        batch = torch.rand(64, CHANNELS)
        optimize_memory(
            model, Pair, lambda m: m(batch), level=2, split_fn=lambda m: list(m.children()) if type(m) is Pair else ()
        )
        assert recomputed(model) == ["0", "1"]
        assert all(trial.outcome != "kept" for trial in plan_of(model).trials)

    @pytest.mark.parametrize("level", [2, 3])
    def test_what_should_not_help_is_not_measured(self, level: Any) -> None:
        class Pair(nn.Sequential):
            """Splitting never helps: the parts keep as much as the whole."""

        model = nn.Sequential(*(Pair(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(4)))
        batch = torch.rand(64, 64)
        options: Any = {"level": level, "split_fn": lambda m: tuple(m.children()), "can_chunk": lambda m: False}
        plan = plan_of(optimize_memory(model, Pair, lambda m: m(batch), **options))
        assert [trial.action for trial in plan.trials] == ["plain model", "checkpoint 4 regions"]
        assert recomputed(model) == ["0", "1", "2", "3"]

    def test_nothing_is_split_without_split_fn_and_nothing_cut_without_can_chunk(self) -> None:
        counter = Counter(loss_from_rest(spikes()))
        model = optimize_memory(self.deep(), None, counter, level=3)
        assert recomputed(model) == ["0", "1", "2"]
        assert counter.forward == 3  # one observed, the plain model, the first plan
        assert plan_of(model).search_passes == 2

    def test_the_same_model_gets_the_same_plan_every_time(self) -> None:
        """States that a run makes are other tensors in the next one, and may lie where those lay."""

        class Twice(DeepSpikingBlock):
            def forward(self, x: Tensor) -> Tensor:
                return self.neuron1(self.linear2(self.neuron1(self.linear1(x))))

        batch, plans = spikes(), set()
        for _ in range(16):
            torch.manual_seed(1)
            model = nn.Sequential(Twice(), nn.Linear(CHANNELS, CHANNELS))
            optimize_memory(model, Twice, loss_from_rest(batch), level=2, split_fn=split_into_children)
            plans.add(tuple(recomputed(model)))
        assert len(plans) == 1

    def test_a_part_that_is_called_twice_gets_one_treatment(self) -> None:
        class Twice(DeepSpikingBlock):
            """One neuron behind both layers."""

            def forward(self, x: Tensor) -> Tensor:
                return self.neuron1(self.linear2(self.neuron1(self.linear1(x))))

        def parts(module: nn.Module) -> tuple[nn.Module, ...]:
            return (module.linear1, module.neuron1, module.linear2) if isinstance(module, Twice) else ()

        batch = spikes()

        def treat(model: nn.Module) -> None:
            optimize_memory(model, Twice, loss_from_rest(batch), level=2, split_fn=parts)
            assert region(model, "0").reason == "split into 3 parts"
            assert region(model, "0.neuron1").calls == 2
            assert "0.neuron1" in recomputed(model)

        assert_optimized_equals_plain(
            lambda: nn.Sequential(Twice(), nn.Linear(CHANNELS, CHANNELS)),
            treat,
            spikes_as_call,
            between=functional.reset_net,
        )

    def test_time_chunks_are_tried_for_what_can_chunk_accepts(self) -> None:
        model = nn.Sequential(SpikingBlock(), SpikingBlock())
        optimize_memory(
            model,
            SpikingBlock,
            loss_from_rest(spikes(16, 16, CHANNELS)),
            level=3,
            can_chunk=lambda m: isinstance(m, SpikingBlock),
        )
        plan = plan_of(model)
        assert max(r.chunks for r in plan.regions) > 1
        assert {r.chunks for r in plan.regions} <= {1, 2, 4, 8, 16}
        for r in plan.regions:
            config = region_config(model.get_submodule(r.path))
            assert config is not None
            assert config.chunks == r.chunks
        assert plan.peak_bytes_after < plan.trials[1].peak_bytes  # type: ignore[operator]

    def test_no_more_chunks_than_time_steps(self) -> None:
        model = nn.Sequential(SpikingBlock(), SpikingBlock())
        optimize_memory(model, SpikingBlock, loss_from_rest(spikes(3, 64, CHANNELS)), level=3, can_chunk=lambda m: True)
        assert max(r.chunks for r in plan_of(model).regions) <= 3

    def test_chunks_that_change_the_result_are_refused_and_the_others_kept(self) -> None:
        class Centered(SpikingBlock):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x - x.mean(dim=0))

        model = nn.Sequential(Centered(), SpikingBlock())
        optimize_memory(model, SpikingBlock, loss_from_rest(spikes()), level=3, can_chunk=lambda m: True)
        assert region(model, "0").chunks == 1
        assert "not cut along time: output: differs from the plain region" in region(model, "0").reason
        assert "not cut" not in region(model, "1").reason

    def test_a_checkpoint_is_removed_where_the_peak_does_not_need_it(self) -> None:
        class Tail(nn.Module):
            """A large constant at the end of the forward hides whatever small regions keep."""

            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), SpikingBlock(512))

            def forward(self, x: Tensor) -> Tensor:
                small, large = self.blocks
                return small(x[..., :8]).sum() + large(x).sum()

        model = Tail()
        model.blocks = nn.ModuleList(model.blocks)  # type: ignore[assignment]
        optimize_memory(model, (nn.Sequential, SpikingBlock), loss_from_rest(spikes(4, 32, 512)), level=4)
        assert recomputed(model) == ["blocks.1"]
        assert "removed: the peak does not need it" in region(model, "blocks.0").reason

    def test_level_four_finds_the_least_peak_and_no_cheaper_plan_has_it(self) -> None:
        """Against all plans there are: of two blocks each is kept, recomputed, or split with any of its parts kept."""

        class Pair(nn.Module):
            def __init__(self, width: int) -> None:
                super().__init__()
                self.wide, self.narrow = nn.Linear(64, width), nn.Linear(width, 64)

            def forward(self, x: Tensor) -> Tensor:
                return self.narrow(self.wide(x).tanh()).tanh()  # type: ignore[no-any-return]

        def parts(module: nn.Module) -> tuple[nn.Module, ...]:
            return (module.wide, module.narrow) if isinstance(module, Pair) else ()

        def step(model: nn.Module) -> Tensor:
            loss: Tensor = model(batch).square().mean()
            return loss

        def measured() -> tuple[int, int]:
            peak = measure_memory(lambda: step(model).backward(), device="cpu").peak_bytes
            model.zero_grad()
            with FlopCounterMode(display=False) as counter:
                step(model).backward()
            model.zero_grad()
            return peak, counter.get_total_flops()

        model, batch = nn.Sequential(Pair(96), Pair(32)), torch.rand(128, 64)
        optimize_memory(model, Pair, step, level=4, split_fn=parts, can_chunk=lambda m: False)
        ways: list[tuple[str, ...]] = [(), ("",), (".wide",), (".narrow",), (".wide", ".narrow")]
        with measuring_repeatedly(torch.device("cpu")):
            peak, flops = measured()
            remove_plan(model)
            others = []
            for chosen in itertools.product(ways, repeat=2):
                paths = [f"{block}{part}" for block, inside in enumerate(chosen) for part in inside]
                for path in paths:
                    checkpoint_module(model.get_submodule(path))
                others.append(measured())
                for path in paths:
                    unwrap_module(model.get_submodule(path))
        assert peak <= 1.005 * min(peak for peak, _ in others)
        assert flops == min(flops for other, flops in others if other <= peak)

    def test_every_level_gives_the_gradients_of_the_plain_model(self) -> None:
        step = loss_from_rest(spikes())
        for level in (1, 2, 4):

            def treat(model: nn.Module, level: Any = level) -> None:
                optimize_memory(model, None, step, level=level, split_fn=split_deep_block, can_chunk=is_if_neuron)

            assert_optimized_equals_plain(
                lambda: self.deep(2), treat, spikes_as_call, between=functional.reset_net, steps=2
            )

    @pytest.mark.parametrize("blocks", [2, 8])
    def test_five_steps_are_measured_at_most_whatever_the_number_of_blocks(self, blocks: int) -> None:
        for level in (2, 4):
            counter = Counter(loss_from_rest(spikes()))
            options: Any = {"level": level, "split_fn": split_deep_block, "can_chunk": is_if_neuron}
            plan = plan_of(optimize_memory(self.deep(blocks), DeepSpikingBlock, counter, **options))
            assert plan.search_passes == len(plan.trials) <= 5
            assert counter.forward == plan.search_passes + plan.probe_passes == plan.search_passes + 1
            # The observation runs the last part of the graph backward, after the last region.
            assert counter.backward == plan.search_passes + 1

    def test_the_search_is_deterministic(self) -> None:
        model = self.deep(2)
        step = loss_from_rest(spikes())
        plans = []
        for _ in range(2):
            twin = copy.deepcopy(model)
            optimize_memory(twin, None, step, level=4, split_fn=split_deep_block, can_chunk=is_if_neuron)
            plans.append(plan_of(twin))
        assert plans[0].digest() == plans[1].digest()
        assert [(t.action, t.peak_bytes) for t in plans[0].trials] == [
            (t.action, t.peak_bytes) for t in plans[1].trials
        ]

    def test_progress_is_reported_by_phase_and_never_beyond_its_total(self) -> None:
        calls: list[tuple[str, int, int]] = []
        optimize_memory(
            self.deep(1).append(nn.Linear(CHANNELS, CHANNELS)),
            DeepSpikingBlock,
            loss_from_rest(spikes()),
            level=4,
            split_fn=split_deep_block,
            can_chunk=is_if_neuron,
            progress=lambda *call: calls.append(call),
        )
        phases = list(dict.fromkeys(phase for phase, _, _ in calls))
        assert phases == ["observing", "measuring"]
        assert all(0 <= done <= total for _, done, total in calls)
        for phase in phases:
            assert [done == total for name, done, total in calls if name == phase][-1]

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda loss: loss,
            lambda loss: {"loss": loss, "log": torch.zeros(3)},
            lambda loss: (torch.zeros(3), [loss, {"x": loss * 2}]),
            lambda loss: loss.expand(3, 4),
        ],
        ids=["scalar", "dict with loss", "nested", "tensor"],
    )
    def test_a_loss_is_found_in_whatever_the_forward_returns(self, wrap: Callable[[Tensor], Any]) -> None:
        step = loss_from_rest(spikes())
        model = optimize_memory(self.deep(), None, lambda m: wrap(step(m)), level=2)
        assert plan_of(model).peak_bytes_after is not None

    def test_the_peak_is_measured_without_the_gradients_that_were_there_before(self) -> None:
        step = loss_from_rest(spikes())
        model = self.deep()
        fresh = plan_of(optimize_memory(copy.deepcopy(model), None, step, level=2))
        step(model).backward()
        functional.reset_net(model)
        used = plan_of(optimize_memory(model, None, step, level=2))
        assert used.peak_bytes_after - fresh.peak_bytes_after == (  # type: ignore[operator]
            used.peak_bytes_before - fresh.peak_bytes_before  # type: ignore[operator]
        )


class TestNothingElseChanges:
    @pytest.mark.parametrize("level", [1, 4])
    def test_states_gradients_metrics_flags_hooks_and_random_numbers(self, level: Any) -> None:
        model = used_noisy_network()
        batch = spikes().requires_grad_()
        batch.grad = torch.ones_like(batch)
        # An optimizer step inside the backward pass, as people do to save memory.
        model.blocks[0].linear.weight.register_post_accumulate_grad_hook(step_and_drop)
        unchanged = Unchanged(model, batch)
        optimize_memory(model, NoisyBlock, lambda m: m(batch), level=level, split_fn=noisy_parts)
        unchanged.check(treatments=False)
        assert recomputed(model) != []

    def test_a_metric_inside_a_region_counts_what_training_shows_it_and_no_more(self) -> None:
        class Measured(SpikingBlock):
            def __init__(self) -> None:
                super().__init__()
                self.rate = torchmetrics.MeanMetric()

            def forward(self, x: Tensor) -> Tensor:
                spikes = super().forward(x)
                self.rate.update(spikes.detach())
                return spikes

        batch = spikes()
        plain = nn.Sequential(Measured(), Measured())
        model = copy.deepcopy(plain)
        optimize_memory(model, Measured, loss_from_rest(batch), level=2)
        assert recomputed(model) == ["0", "1"]
        for each in (plain, model):
            loss_from_rest(batch)(each).backward()
        for one, other in zip(plain, model, strict=True):
            assert one.rate.compute() == other.rate.compute()
            assert one.rate._update_count == other.rate._update_count == 1

    def test_training_goes_on_as_if_nothing_had_happened(self) -> None:
        batch = spikes()

        def treat(model: nn.Module) -> None:
            optimize_memory(model, NoisyBlock, lambda m: m(batch), level=2, split_fn=noisy_parts)

        def detach(model: nn.Module) -> None:
            functional.detach_net(model)

        assert_optimized_equals_plain(used_noisy_network, treat, spikes_as_call, between=detach)

    def test_a_deep_copy_keeps_the_treatment_and_has_no_plan_of_its_own(self) -> None:
        model = observed(nn.Sequential(SpikingBlock(), SpikingBlock()), None, loss_from_rest(spikes()))
        twin = copy.deepcopy(model)
        assert recomputed(twin) == recomputed(model)
        assert applied_plan(twin) is None
        assert all("plan" not in key for module in model.modules() for key in vars(module))

    def test_the_report_dies_with_the_model(self) -> None:
        import gc

        from lightning_memopt.planning import apply as room

        model = observed(nn.Sequential(SpikingBlock(), SpikingBlock()), None, loss_from_rest(spikes()))
        key = id(model)
        assert key in room._APPLIED
        del model
        gc.collect()
        assert key not in room._APPLIED


class TestAgain:
    def test_the_same_request_a_second_time_runs_nothing(self) -> None:
        counter = Counter(loss_from_rest(spikes()))
        model = nn.Sequential(SpikingBlock(), SpikingBlock())
        observed(model, SpikingBlock, counter)
        plan = applied_plan(model)
        observed(model, (SpikingBlock,), counter)
        assert counter.forward == 1
        assert applied_plan(model) is plan

    def test_another_request_starts_from_the_plain_model(self) -> None:
        model = nn.Sequential(SpikingBlock(), SpikingBlock())
        step = loss_from_rest(spikes())
        observed(model, SpikingBlock, step)
        observed(model, SpikingBlock, step, checkpoint_budget="speed", compress=False)
        assert recomputed(model) == ["0"]
        assert all(r.reason != "checkpointed by hand already, left as it is" for r in plan_of(model).regions)

    def test_a_plan_that_lost_a_region_is_made_again(self) -> None:
        from lightning_memopt.checkpointing import unwrap_module

        counter = Counter(loss_from_rest(spikes()))
        model = nn.Sequential(SpikingBlock(), SpikingBlock())
        observed(model, SpikingBlock, counter)
        unwrap_module(model[1])
        observed(model, SpikingBlock, counter)
        assert counter.forward == 2
        assert recomputed(model) == ["0", "1"]

    def test_a_given_plan_is_applied_without_running_anything(self) -> None:
        counter = Counter(loss_from_rest(spikes()))
        model = nn.Sequential(SpikingBlock(), SpikingBlock())
        twin = copy.deepcopy(model)
        observed(model, SpikingBlock, counter)
        optimize_memory(twin, plan=plan_of(model))
        assert counter.forward == 1
        assert recomputed(twin) == ["0", "1"]
        assert applied_plan(twin) == plan_of(model)

    def test_remove_plan_gives_the_plain_model_back(self) -> None:
        model, step = nn.Sequential(SpikingBlock(), SpikingBlock()), loss_from_rest(spikes())
        unchanged = Unchanged(model)
        observed(model, SpikingBlock, step)
        assert remove_plan(model) is model
        assert applied_plan(model) is None
        unchanged.check()
        assert remove_plan(model) is model

    def test_apply_plan_replaces_the_plan_in_force(self) -> None:
        model = nn.Sequential(SpikingBlock(), SpikingBlock())
        observed(model, SpikingBlock, loss_from_rest(spikes()))
        apply_plan(model, Plan(regions=(RegionPlan("1", "SpikingBlock", "recompute", "by hand"),)))
        assert recomputed(model) == ["1"]


def step_and_drop(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.data.add_(parameter.grad, alpha=-1.0)
    parameter.grad = None


def spikes_as_call() -> Any:
    return call(spikes())
