"""Whatever goes wrong in optimize_memory, the model is as it was before the call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.checkpointing import is_checkpointed
from lightning_memopt.planning import (
    MemoryBudgetError,
    Plan,
    RegionPlan,
    applied_plan,
    apply_plan,
    least_peak,
    optimize_memory,
    remove_plan,
)
from tests.equality import assert_same_tree, frozen
from tests.planning_models import (
    CHANNELS,
    DeepSpikingBlock,
    NoisyBlock,
    NoisyNetwork,
    SpikingBlock,
    Unchanged,
    loss_from_rest,
    noisy_parts,
    spikes,
    split_deep_block,
    used_noisy_network,
)


class FailingStep:
    """Runs the model and raises in the given call, after the model has changed all that it changes."""

    def __init__(self, call: int, error: BaseException, *, in_backward: bool = False) -> None:
        self.calls = 0
        self._call = call
        self._error = error
        self._in_backward = in_backward
        self._batch = spikes()

    def __call__(self, model: nn.Module) -> Tensor:
        self.calls += 1
        loss: Tensor = model(self._batch).sum()
        if self.calls == self._call:
            if not self._in_backward:
                raise self._error
            loss.register_hook(self._raise)
        return loss

    def _raise(self, gradient: Tensor) -> None:
        raise self._error


class Broken(Exception):
    """An error that nothing else raises."""


# The calls of a level-4 search of the noisy network: 1 observes, 2 is the plain model, 3 the first plan, 4 another.
@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("error", [Broken("no"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_an_error_in_any_phase_of_the_search_leaves_no_trace(call: int, error: BaseException) -> None:
    model, step = used_noisy_network(), FailingStep(call, error)
    unchanged = Unchanged(model)
    with pytest.raises(type(error)):
        optimize_memory(model, NoisyBlock, step, level=4, split_fn=noisy_parts)
    assert step.calls == call
    unchanged.check()
    assert applied_plan(model) is None


@pytest.mark.parametrize("error", [Broken("no"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_an_error_in_the_backward_of_a_trial_leaves_no_trace(error: BaseException) -> None:
    model, step = used_noisy_network(), FailingStep(3, error, in_backward=True)
    unchanged = Unchanged(model)
    with pytest.raises(type(error)):
        optimize_memory(model, NoisyBlock, step, level=2, split_fn=noisy_parts)
    unchanged.check()


def test_an_error_deep_inside_a_region_leaves_no_trace_and_no_hooks() -> None:
    model, batch = used_noisy_network(), spikes()
    handle = model.blocks[1].linear.register_forward_hook(_fail)
    unchanged = Unchanged(model)
    with pytest.raises(Broken):
        optimize_memory(model, NoisyBlock, lambda m: m(batch), level=1)
    unchanged.check()
    handle.remove()


def _fail(*_: object) -> None:
    raise Broken


def _run_out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _fail_after(step: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    def failing(model: nn.Module) -> None:
        step(model)
        raise Broken

    return failing


@pytest.mark.parametrize("phase", ["observing", "measuring"])
def test_an_error_in_the_progress_callback_leaves_no_trace(phase: str) -> None:
    model, batch = used_noisy_network(), spikes()
    unchanged = Unchanged(model)

    def progress(now: str, done: int, total: int) -> None:
        if now == phase:
            raise Broken

    with pytest.raises(Broken):
        optimize_memory(model, NoisyBlock, lambda m: m(batch), level=4, split_fn=noisy_parts, progress=progress)
    unchanged.check()


@pytest.mark.parametrize("failing_call", [1, 2, 3])
def test_an_error_while_the_plan_is_applied_leaves_no_trace(monkeypatch: Any, failing_call: int) -> None:
    from lightning_memopt.checkpointing import module as room

    model, batch = used_noisy_network(), spikes()
    unchanged = Unchanged(model)
    calls = 0
    checkpoint_module = room.checkpoint_module

    def failing(module: nn.Module, **options: Any) -> nn.Module:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise Broken
        return checkpoint_module(module, **options)

    monkeypatch.setattr(room, "checkpoint_module", failing)
    with pytest.raises(Broken):
        optimize_memory(model, NoisyBlock, lambda m: m(batch), level=1)
    unchanged.check()
    assert applied_plan(model) is None


def test_a_plan_that_is_not_in_force_after_all_is_taken_back(monkeypatch: Any) -> None:
    from lightning_memopt.planning import optimize as room

    model, batch = used_noisy_network(), spikes()
    unchanged = Unchanged(model)
    monkeypatch.setattr(room, "in_force", lambda model, plan: False)
    with pytest.raises(RuntimeError, match="not in force"):
        optimize_memory(model, NoisyBlock, lambda m: m(batch), level=1)
    unchanged.check()


def test_a_failed_second_search_leaves_the_first_plan_in_force() -> None:
    model = nn.Sequential(SpikingBlock(), SpikingBlock())
    optimize_memory(model, None, loss_from_rest(spikes()))
    plan = applied_plan(model)
    unchanged = Unchanged(model)
    with pytest.raises(Broken):
        optimize_memory(model, None, _fail_after(loss_from_rest(torch.zeros(8, 16, 64))), checkpoint_budget="speed")
    unchanged.check()
    assert applied_plan(model) is plan


class CapturingNetwork(nn.Module):
    """Installs hooks in its first forward, as the output capturing of the transformers library does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS))
        self.hidden = [nn.Linear(CHANNELS, CHANNELS)]  # where torch does not see it
        self.captures = False
        self.captured: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.captures:
            self.captures = True
            for layer in (*self.layers, *self.hidden):
                layer.register_forward_hook(lambda module, args, output: self.captured.append(output))
                layer.register_forward_hook(lambda *_, **__: None, with_kwargs=True, always_call=True)
                layer.register_forward_pre_hook(lambda *_, **__: None, with_kwargs=True)
                layer.register_full_backward_hook(lambda *_: None)
        self.captured.clear()
        y = self.hidden[0](self.layers(x))
        return y + len(self.captured) * sum(output.square().mean() for output in self.captured)


class GrowingNetwork(nn.Module):
    """Makes a layer, a parameter and a buffer in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "made"):
            self.made = nn.Linear(CHANNELS, CHANNELS)
            self.scale = nn.Parameter(torch.rand(CHANNELS))
            self.register_buffer("shift", torch.rand(CHANNELS), persistent=False)
        return self.made(self.linear(x).relu()) * self.scale + self.shift


class ParameterlessGrowingNetwork(nn.Module):
    """Makes its first parameter in its first forward, and replaces a child."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)])

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.rand(CHANNELS))
            self.blocks[1] = nn.Linear(CHANNELS, CHANNELS)
        return self.blocks[1](self.blocks[0](x).relu()) * self.scale


class ReassigningNetwork(nn.Module):
    """Gives a parameter other memory in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(CHANNELS, CHANNELS)
        self.code = nn.Parameter(torch.ones(CHANNELS), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.code.data = self.code.data * 0.5
        return (self.linear(x) * self.code.clone()).tanh()


def registries(model: nn.Module) -> list[Any]:
    """What every module of ``model`` holds by name: hooks, children, parameters and buffers; and where these lie."""
    modules = [*model.modules(), *getattr(model, "hidden", ())]
    held = [vars(module) for module in modules]
    names = [(key, [*value]) for each in held for key, value in each.items() if isinstance(value, (dict, set))]
    return [*map(id, modules), *names, *[(id(p), p.data_ptr()) for p in model.parameters()]]


@pytest.mark.parametrize(
    "options", [{"level": 1}, {"level": 4}, {"memory_budget": "1GiB"}, {"memory_budget": 1}], ids=str
)
@pytest.mark.parametrize("network", [CapturingNetwork, GrowingNetwork, ParameterlessGrowingNetwork, ReassigningNetwork])
def test_what_a_first_forward_installs_is_left_to_the_training(
    network: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    batch = spikes(4, CHANNELS)
    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = network()
        unchanged, before = Unchanged(model), registries(model)
        if planned:
            with contextlib.suppress(MemoryBudgetError):
                optimize_memory(model, nn.Linear, lambda m: m(batch).mean(), **options)
            remove_plan(model)
            unchanged.check()
            assert registries(model) == before
        model(batch).mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        results.append(frozen({"state": model.state_dict(), "gradients": gradients}))
    assert_same_tree(*results, name="the first step")


def test_a_hidden_lazy_layer_keeps_the_shape_that_it_got() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(CHANNELS, CHANNELS)
            self.hidden = [nn.LazyLinear(3)]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.hidden[0](self.linear(x))
            return y

    model, batch = Network(), spikes(4, CHANNELS)
    optimize_memory(model, nn.Linear, lambda m: m(batch), level=1)
    assert type(model.hidden[0]) is nn.Linear
    assert model(batch).shape == (4, 3)


@pytest.mark.parametrize("options", [{"level": 1}, {"level": 4}, {"memory_budget": "1GiB"}], ids=str)
def test_a_region_that_is_a_generator_is_kept(options: dict[str, Any]) -> None:
    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(2))

        def forward(self, x: Tensor) -> Iterator[Tensor]:
            for linear in self.linears:
                yield linear(x).relu().tanh()

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Pieces(), Pieces()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = sum(block(x), torch.zeros(()))
            return x

    model, batch = Sum(), spikes(4, CHANNELS)
    optimize_memory(model, Pieces, lambda m: m(batch).mean(), **options)
    assert not any(isinstance(module, Pieces) and is_checkpointed(module) for module in model.modules())


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("caught by the model")


class Odd(nn.Module):
    """Layers, of which the second is something else for each test."""

    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.first, self.odd, self.last = nn.Linear(64, 64), odd, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(torch.tanh(self.first(x))))

    def inner(self, x: Tensor) -> Tensor:
        return self.odd(x)


class Catching(Odd):
    def inner(self, x: Tensor) -> Tensor:
        with contextlib.suppress(ValueError):
            x = self.odd(x)
        return x


class ChangingAView(Odd):
    """Part of what a layer returned is changed in place before the next one is given all of it."""

    def inner(self, x: Tensor) -> Tensor:
        x = self.odd(x).flatten(1)
        x[:, :5].relu_()
        return x


WAYS = [{"level": 1}, {"level": 2}, {"memory_budget": 2**30}, {"memory_budget": 1}]


@pytest.mark.parametrize("options", WAYS)
def test_an_error_that_the_model_catches_is_none_of_a_plan(options: dict[str, Any]) -> None:
    model, data = Catching(Raising()), torch.randn(8, 64)
    with contextlib.suppress(MemoryBudgetError):
        optimize_memory(model, example_forward=lambda model: model(data).sum(), **options)
    model(data).sum().backward()


@pytest.mark.parametrize("options", WAYS)
def test_buffers_of_torchscript_are_as_before(options: dict[str, Any]) -> None:
    model, data = Odd(torch.jit.script(nn.BatchNorm1d(64))), torch.randn(8, 64)
    with contextlib.suppress(MemoryBudgetError):
        optimize_memory(model, example_forward=lambda model: model(data).sum(), **options)
    assert int(model.odd.num_batches_tracked) == 0
    assert not model.odd.running_mean.any()


@pytest.mark.parametrize("options", WAYS)
def test_a_view_that_is_changed_between_layers_is_planned_for(options: dict[str, Any]) -> None:
    model, data = ChangingAView(nn.BatchNorm1d(64)), torch.randn(8, 64)
    with contextlib.suppress(MemoryBudgetError):
        optimize_memory(model, example_forward=lambda model: model(data).sum(), **options)
    model(data).sum().backward()


class TestOutOfMemory:
    def test_a_model_that_only_fits_when_checkpointed_is_searched_all_the_same(self) -> None:
        model, step = nn.Sequential(DeepSpikingBlock(), DeepSpikingBlock()), loss_from_rest(spikes())

        def tight(model: nn.Module) -> Tensor:
            loss = step(model)
            if not any(map(is_checkpointed, model.modules())):
                loss.register_hook(_run_out_of_memory)
            return loss

        optimize_memory(model, None, tight, level=2, split_fn=split_deep_block)
        plan = applied_plan(model)
        assert plan is not None
        assert plan.peak_bytes_before is None
        assert plan.peak_bytes_after is not None
        assert plan.trials[0].outcome == "measured"
        assert plan.trials[0].reason == "ran out of memory"

    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory."),
            RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
            MemoryError(),
        ],
        ids=["cuda", "cpu", "python"],
    )
    def test_a_trial_that_runs_out_of_memory_is_undone(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(least_peak, "_LEAST_GAIN", 0.0)  # other tests may have left much more than is gained
        model, step = nn.Sequential(DeepSpikingBlock(), DeepSpikingBlock()), loss_from_rest(spikes())

        def tight(model: nn.Module) -> Tensor:
            if is_checkpointed(model[0].linear1) or is_checkpointed(model[1].linear1):  # type: ignore[index]
                raise error
            return step(model)

        optimize_memory(model, None, tight, level=2, split_fn=split_deep_block)
        plan = applied_plan(model)
        assert plan is not None
        assert [name for name, module in model.named_modules() if is_checkpointed(module)] == ["0", "1"]
        assert plan.trials[-1].outcome == "out of memory"
        assert plan.trials[-1].peak_bytes is None

    def test_splits_help_a_first_plan_that_does_not_fit(self) -> None:
        class Tight(DeepSpikingBlock):
            """Too large to be recomputed as a whole."""

            def forward(self, x: Tensor) -> Tensor:
                if torch._C._current_graph_task_id() != -1:  # a backward is running
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return super().forward(x)

        model = nn.Sequential(DeepSpikingBlock(), Tight())
        optimize_memory(model, DeepSpikingBlock, loss_from_rest(spikes()), level=2, split_fn=split_deep_block)
        plan = applied_plan(model)
        assert plan is not None
        assert plan.trials[1].peak_bytes is None
        assert plan.peak_bytes_after is not None
        assert is_checkpointed(model[1].linear1)
        assert not is_checkpointed(model[1])

    def test_where_nothing_fits_the_best_plan_is_applied_with_a_warning(self) -> None:
        model = nn.Sequential(DeepSpikingBlock(), DeepSpikingBlock())

        def never(model: nn.Module) -> Tensor:
            loss: Tensor = model(spikes()).sum()
            loss.register_hook(_run_out_of_memory)
            return loss

        with pytest.warns(UserWarning, match="does not fit into memory"):
            optimize_memory(model, None, never, level=2)
        plan = applied_plan(model)
        assert plan is not None
        assert plan.peak_bytes_after is None
        assert len(plan.recomputed) == 2


class TestArguments:
    @pytest.fixture
    def model(self) -> nn.Module:
        return nn.Sequential(DeepSpikingBlock(), DeepSpikingBlock())

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"level": 5}, ValueError, "level must be 0, 1, 2, 3 or 4, found 5"),
            ({"level": True}, ValueError, "found True"),
            ({"level": "2"}, ValueError, "found '2'"),
            ({"checkpoint_budget": "small"}, ValueError, "'speed', 'balanced', 'memory', found 'small'"),
            ({"compress": 1}, TypeError, "compress must be True or False"),
            ({"split_fn": 3}, TypeError, "split_fn must be a function"),
            ({"can_chunk": "yes"}, TypeError, "can_chunk must be a function"),
            ({"progress": 0}, TypeError, "progress must be a function"),
            ({"checkpoint_budget": ["memory"]}, ValueError, r"found \['memory'\]"),
            (
                {"example_forward": torch.zeros(3)},
                TypeError,
                "example_forward must be a function.*found a Tensor",
            ),
            ({"targets": torch.zeros(3), "example_forward": None}, TypeError, "found an instance of Tensor"),
            ({"example_forward": None}, ValueError, "needs example_forward"),
            ({"targets": "Block"}, TypeError, "targets must be"),
            ({"targets": nn.Conv3d}, ValueError, "no module of class Conv3d"),
            ({"plan": 3}, TypeError, "plan must be a Plan or the path"),
            ({"plan": "/nowhere/plan.json"}, FileNotFoundError, "nowhere"),
            ({"process_group": object()}, ValueError, "not initialised"),
        ],
    )
    def test_bad_arguments_are_refused_in_words(
        self, model: nn.Module, options: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        unchanged = Unchanged(model)
        with pytest.raises(error, match=message):
            optimize_memory(model, **{"example_forward": lambda m: m(spikes()), **options})
        unchanged.check()

    @pytest.mark.parametrize(
        ("split", "error", "message"),
        [
            (lambda block: (block.linear1,), ValueError, "returned one module"),
            (lambda block: (block.linear1, nn.Linear(2, 2)), ValueError, "not a registered module inside"),
            (lambda block: (block.linear1, block), ValueError, "not a registered module inside"),
            (lambda block: (block.linear1, block.linear1), ValueError, "overlap"),
            (lambda block: "linear1", TypeError, "must return a sequence of modules"),
            (lambda block: None, TypeError, "must return a sequence of modules"),
            (lambda block: 1 / 0, ZeroDivisionError, "division"),
        ],
    )
    def test_a_wrong_split_is_refused_before_anything_runs(
        self, model: nn.Module, split: Any, error: type[Exception], message: str
    ) -> None:
        unchanged = Unchanged(model)
        with pytest.raises(error, match=message):
            optimize_memory(
                model,
                DeepSpikingBlock,
                _fail,  # type: ignore[arg-type]
                level=2,
                split_fn=lambda m: split(m) if isinstance(m, DeepSpikingBlock) else (),
            )
        unchanged.check()

    def test_parts_that_lie_inside_each_other_are_refused(self, model: nn.Module) -> None:
        outer = nn.Sequential(model, nn.Linear(2, 2))
        with pytest.raises(ValueError, match="overlap"):
            optimize_memory(nn.Sequential(outer), nn.Sequential, _fail, level=2, split_fn=lambda m: (model, model[0]))  # type: ignore[arg-type,index]

    def test_can_chunk_must_answer_yes_or_no(self, model: nn.Module) -> None:
        with pytest.raises(TypeError, match="can_chunk must return True or False, it returned None for 0"):
            optimize_memory(model, None, _fail, level=3, can_chunk=lambda m: None)  # type: ignore[arg-type,return-value]

    def test_an_output_without_a_gradient_is_refused_where_a_backward_is_needed(self, model: nn.Module) -> None:
        batch = spikes()
        unchanged = Unchanged(model)
        with pytest.raises(ValueError, match=r"must return a tensor that requires a gradient.*dict with 1 tensor"):
            optimize_memory(model, None, lambda m: {"y": m(batch).detach()}, level=2)
        unchanged.check()

    def test_a_model_already_wrapped_is_refused(self, model: nn.Module) -> None:
        with pytest.raises(ValueError, match="already wrapped by DataParallel"):
            optimize_memory(nn.DataParallel(model), None, lambda m: m(spikes()))

    def test_lazy_parameters_are_refused_by_name(self) -> None:
        lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4))
        with pytest.raises(ValueError, match=r"0.weight is lazy.*run one forward"):
            optimize_memory(lazy, nn.LazyLinear, lambda m: m(spikes()))

    def test_a_batch_that_holds_memory_is_refused_where_the_model_holds_none(self) -> None:
        data = spikes()
        with torch.device("meta"):
            late = nn.Sequential(SpikingBlock(), SpikingBlock())
        with pytest.raises(ValueError, match="gave it a tensor that does"):
            optimize_memory(late, None, lambda m: m(data))

    def test_a_plan_is_applied_to_a_model_on_the_meta_device(self) -> None:
        with torch.device("meta"):
            late = nn.Sequential(SpikingBlock(), SpikingBlock())
        optimize_memory(late, plan=Plan(regions=(RegionPlan("1", "SpikingBlock", "recompute", "by hand"),)))
        assert [is_checkpointed(block) for block in late] == [False, True]

    def test_something_that_is_no_module_is_a_type_error(self) -> None:
        with pytest.raises(TypeError, match=r"expects a torch.nn.Module, got function"):
            optimize_memory(lambda x: x, None, lambda m: m(spikes()))  # type: ignore[type-var]


class TestPlansThatDoNotFit:
    def plan(self, *regions: RegionPlan) -> Plan:
        return Plan(regions=regions)

    @pytest.mark.parametrize(
        ("region", "message"),
        [
            (RegionPlan("7", "SpikingBlock", "recompute", ""), "there is no module '7'"),
            (RegionPlan("1", "Linear", "recompute", ""), "'1' is a SpikingBlock, not a Linear"),
            (RegionPlan("", "Sequential", "recompute", ""), "model as a whole"),
            (RegionPlan("0", "SpikingBlock", "recompute", ""), "'0' is named twice"),
        ],
    )
    def test_every_misfit_is_named_and_nothing_is_changed(self, region: RegionPlan, message: str) -> None:
        model = nn.Sequential(SpikingBlock(), SpikingBlock())
        unchanged = Unchanged(model)
        with pytest.raises(ValueError, match=message):
            apply_plan(model, self.plan(RegionPlan("0", "SpikingBlock", "recompute", ""), region))
        unchanged.check()

    def test_a_misfit_leaves_the_plan_in_force(self) -> None:
        model = nn.Sequential(SpikingBlock(), SpikingBlock())
        plan = self.plan(RegionPlan("0", "SpikingBlock", "recompute", ""))
        apply_plan(model, plan)
        with pytest.raises(ValueError, match="no module"):
            apply_plan(model, self.plan(RegionPlan("7", "SpikingBlock", "recompute", "")))
        assert applied_plan(model) == plan
        assert is_checkpointed(model[0])


def test_the_noisy_network_really_writes_to_everything() -> None:
    """Guards the tests above: a model that changes nothing would pass them all."""
    model = used_noisy_network()
    unchanged = Unchanged(model)
    model(spikes()).sum().backward()
    with pytest.raises(AssertionError) as failure:
        unchanged.check()
    said = str(failure.value)
    assert "more" in said
    assert isinstance(model, NoisyNetwork)
    assert model.calls == 2
    assert len(model.history) == 2
