"""State and calls at the edges of what a region meets: each trains as the plain module does, or is refused in words."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import random
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.checkpointing import (
    BitSpikeCompressor,
    checkpoint,
    checkpoint_module,
    is_checkpointed,
    learn_parameters,
    restore_snapshot,
    take_snapshot,
)
from tests.equality import assert_optimized_equals_plain, assert_same_tree, call, state_of
from tests.zoo import C, N, Net, T


class Block(nn.Module):
    """Two layers; `between` sits between them and may remember whatever it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(C, C)
        self.second = nn.Linear(C, C)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x).tanh()))


class BornInTheCall(Block):
    def between(self, h: Tensor) -> Tensor:
        if not hasattr(self, "v"):
            self.v = torch.zeros(C)
        self.v = self.v * 0.5 + h.detach().mean(0)
        return h * (1 + self.v)


class ClassDefault(nn.Module):
    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return (x * self.steps).tanh()


class BufferBornInTheCall(Block):
    def between(self, h: Tensor) -> Tensor:
        if not self._buffers:
            self.register_buffer("mean", torch.zeros(C))
        self.mean = self.mean * 0.9 + h.detach().mean(0)
        return h * (1 + self.mean)


class NormUnfrozenLate(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(C)
        self.calls = 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        self.norm.train(self.calls >= 3)
        return self.norm(h)


class LateWriteThroughData(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(C))
        self.calls = 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        if self.calls >= 3:
            self.mean.data.mul_(0.9).add_(h.detach().mean(0))
        return h * (1 + self.mean)


class CodebookAsParameter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.zeros(C), requires_grad=False)

    def between(self, h: Tensor) -> Tensor:
        self.code = nn.Parameter(self.code * 0.9 + h.detach().mean(0), requires_grad=False)
        return h * (1 + self.code)


class CodebookInPlace(CodebookAsParameter):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.code.mul_(0.9).add_(h.mean(0))
        return h * (1 + self.code.clone())


class CodebookThroughData(CodebookAsParameter):
    def between(self, h: Tensor) -> Tensor:
        self.code.data.mul_(0.9).add_(h.detach().mean(0))
        return h * (1 + self.code.clone())


class CodebookDataReplaced(CodebookAsParameter):
    def between(self, h: Tensor) -> Tensor:
        self.code.data = self.code.data * 0.9 + h.detach().mean(0)
        return h * (1 + self.code)


class WeightThroughData(Block):
    def between(self, h: Tensor) -> Tensor:
        self.second.weight.data.mul_(0.9)
        return h


class SharedBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("clock", torch.zeros(()))
        self.second.register_buffer("clock", self.clock)

    def between(self, h: Tensor) -> Tensor:
        self.clock.add_(1.0)
        return h * self.second.clock.clone()


class OwnNumpyGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.old = np.random.RandomState(0)
        self.dice = random.Random(0)

    def between(self, h: Tensor) -> Tensor:
        return h * float(self.rng.random() + self.old.rand() + self.dice.random())


class CountsInACounter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.counter: collections.Counter[str] = collections.Counter()
        self.recent = collections.OrderedDict(a=1.0, b=2.0, c=3.0)

    def between(self, h: Tensor) -> Tensor:
        self.counter.update("a")
        self.recent.move_to_end(next(iter(self.recent)))
        return h * self.counter["a"] * next(iter(self.recent.values()))


class Namespace(Block):
    def __init__(self) -> None:
        super().__init__()
        self.ns = types.SimpleNamespace(value=0.0)
        self.log = collections.UserList()

    def between(self, h: Tensor) -> Tensor:
        self.ns.value += 1.0
        self.log.append(1)
        return h * self.ns.value * len(self.log)


class InATuple(Block):
    """A list, a dict and a tensor that a tuple holds, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Any = (torch.zeros(C), [0.0, torch.zeros(C)], ({"calls": 0.0},))

    def between(self, h: Tensor) -> Tensor:
        mean, log, (counts,) = self.held
        mean.mul_(0.9).add_(h.detach().mean(0))
        log[0] += 1.0
        log[1] = log[1] + 0.5
        counts["calls"] += 2.0
        return h * (mean.clone() + log[0] + log[1] + counts["calls"])


class TupleReplacedAndChanged(Block):
    """As the hidden state of an LSTM: replaced at each call, and in some changed in place before that."""

    def __init__(self) -> None:
        super().__init__()
        self.state = (torch.zeros(C), torch.ones(C))
        self.calls = 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            self.state[0].add_(1.0)
        v, c = self.state
        self.state = (v * 0.5 + h.detach().mean(0), c)
        return h * (1 + self.state[0]) * c


class SmallStateResetInPlace(Block):
    """Replaced at each call, and in some calls changed in place before that."""

    def __init__(self) -> None:
        super().__init__()
        self.v: Any = torch.zeros(C)
        self.calls = 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            self.v.zero_()
        self.v = self.v * 0.5 + h.detach().mean(0)
        return h * (1 + self.v)


class GradientInside(Block):
    """A force field: the gradient of an inner energy, taken inside forward, with a counter before it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        energy = (h.pow(3) * self.calls).sum()
        return torch.autograd.grad(energy, h, create_graph=True)[0]


class SparseAdjacency(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(C).to_sparse())

    def between(self, h: Tensor) -> Tensor:
        return torch.sparse.mm(self.adjacency, h.T).T


KINDS: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls
    for cls in (
        *(BornInTheCall, ClassDefault, BufferBornInTheCall, NormUnfrozenLate, LateWriteThroughData),
        *(CodebookAsParameter, CodebookInPlace, CodebookThroughData, CodebookDataReplaced, WeightThroughData),
        *(SharedBuffer, OwnNumpyGenerator, CountsInACounter, Namespace),
        *(InATuple, TupleReplacedAndChanged, SmallStateResetInPlace, GradientInside),
    )
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_unchanged(kind: str) -> None:
    assert_optimized_equals_plain(
        lambda: Net(KINDS[kind]()),
        lambda model: checkpoint_module(model.block),
        lambda: call(torch.randn(T * N, C, requires_grad=True)),
        steps=6,
    )


@pytest.mark.parametrize("kind", [CodebookThroughData, CodebookDataReplaced, CodebookInPlace])
def test_a_codebook_is_found_out_after_planning_as_well(kind: Callable[[], nn.Module]) -> None:
    def treat(model: Any) -> None:
        learn_parameters(model, [])
        checkpoint_module(model.block)

    batch = functools.partial(torch.randn, T * N, C, requires_grad=True)
    assert_optimized_equals_plain(lambda: Net(kind()), treat, lambda: call(batch()), steps=3)


def test_a_sparse_buffer_in_a_region_trains_as_without() -> None:
    torch.manual_seed(0)
    plain = SparseAdjacency()
    treated = checkpoint_module(copy.deepcopy(plain), compressor=BitSpikeCompressor())
    x = torch.randn(N, C)
    for model in (plain, treated):
        model(x).sum().backward()
    for a, b in zip(plain.parameters(), treated.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_an_eval_forward_and_a_training_forward_before_one_backward() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.Tanh())
    treated = checkpoint_module(copy.deepcopy(plain))
    x = torch.randn(N, C)
    # Plain, the statistics would be overwritten under the graph of the eval forward: each takes its own backward.
    plain.eval()
    plain(x).sum().backward()
    plain.train()
    plain(x + 1).sum().backward()
    treated.eval()
    clean = treated(x)
    treated.train()
    (treated(x + 1).sum() + clean.sum()).backward()
    assert torch.equal(plain[1].running_mean, treated[1].running_mean)
    for a, b in zip(plain.parameters(), treated.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("treatment", ["recompute", "pack", "recompute_cheap"])
def test_steps_in_eval_mode_between_training_steps_use_the_statistics_of_their_time(treatment: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.Tanh(), nn.Linear(C, C))
    treated = checkpoint_module(copy.deepcopy(plain), treatment=treatment)
    for _ in range(4):
        x, attacked = torch.randn(2, N, C)
        for model in (plain, treated):
            model.zero_grad()
            model.eval()
            model(attacked).square().sum().backward()
            model.train()
            model(x).square().sum().backward()
        assert_same_tree([p.grad for p in plain.parameters()], [p.grad for p in treated.parameters()])


@pytest.mark.parametrize("when", ["between steps", "before the backward"])
def test_a_buffer_that_is_written_through_data_outside_of_the_region_has_its_value_of_the_forward(when: str) -> None:
    torch.manual_seed(0)
    plain = LateWriteThroughData()
    plain.calls = -1000
    treated = checkpoint_module(copy.deepcopy(plain))
    for _ in range(4):
        x = torch.randn(N, C)
        for model in (plain, treated):
            model.zero_grad()
            loss = model(x).square().sum()
            if when == "before the backward" and model is treated:  # plain, the saved buffer would be overwritten
                model.mean.data.add_(0.1)
            loss.backward()
            if when == "between steps" or model is plain:
                model.mean.data.add_(0.1)
        assert_same_tree([p.grad for p in plain.parameters()], [p.grad for p in treated.parameters()])


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(C, C)
        self.critic = nn.Linear(C, C)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x.detach()).tanh(), self.critic(x.detach()).tanh()


@pytest.mark.parametrize("compressor", [None, BitSpikeCompressor()])
def test_two_outputs_may_have_a_backward_each(compressor: BitSpikeCompressor | None) -> None:
    torch.manual_seed(0)
    plain = Heads()
    treated = checkpoint_module(copy.deepcopy(plain), compressor=compressor)
    x = torch.randint(0, 2, (N, C)).float()
    for model in (plain, treated):
        first, second = model(x)
        first.sum().backward()
        second.sum().backward()
    assert torch.equal(plain.actor.weight.grad, treated.actor.weight.grad)
    assert torch.equal(plain.critic.weight.grad, treated.critic.weight.grad)


def test_a_function_that_reads_the_statistics_of_a_library_norm_trains_as_without() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C))
    treated = copy.deepcopy(plain)

    def scaled(model: nn.Sequential, x: Tensor) -> Tensor:
        return (model(x) * model[1].running_var.clone()).tanh()

    for _ in range(3):
        x = torch.randn(N, C)
        plain.zero_grad()
        treated.zero_grad()
        scaled(plain, x).sum().backward()
        checkpoint(lambda t: scaled(treated, t), x).sum().backward()
        assert_same_tree(state_of(plain), state_of(treated), name="state")


def test_functional_call_gives_the_gradients_of_the_parameters_it_was_given() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(C, C), nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.Linear(C, C)))
    treated = copy.deepcopy(plain)
    checkpoint_module(treated[1])
    x = torch.randn(N, C)
    gradients = []
    for model in (plain, treated):
        given = {k: (v.detach() * 1.5).requires_grad_() for k, v in model.named_parameters()}
        loss = torch.func.functional_call(model, given, (x,)).sum()
        gradients.append(torch.autograd.grad(loss, list(given.values())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_transforms_of_torch_func_run_through_a_region() -> None:
    torch.manual_seed(0)
    layer = checkpoint_module(nn.Linear(C, C))
    x = torch.randn(N, C)
    per_sample = torch.func.vmap(torch.func.grad(lambda sample: layer(sample).tanh().sum()))(x)
    x_leaf = x.clone().requires_grad_()
    layer(x_leaf).tanh().sum().backward()
    torch.testing.assert_close(per_sample, x_leaf.grad)


def test_weights_changed_between_forward_and_backward_are_an_error() -> None:
    block = checkpoint_module(nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.Linear(C, C)))
    loss = block(torch.randn(N, C)).sum()
    with torch.no_grad():
        block[2].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place after a checkpointed region"):
        loss.backward()


class TakesContext(Block):
    def forward(self, x: Tensor, context: Any) -> Tensor:  # type: ignore[override]
        context.calls += 1
        context.v = context.v * 0.5 + x.detach().mean(0)
        return self.second((self.first(x) * context.v * context.calls).tanh())


class Context:
    def __init__(self) -> None:
        self.calls = 0
        self.v = torch.ones(C)


def test_an_object_passed_as_an_argument_steps_once() -> None:
    torch.manual_seed(0)
    plain = TakesContext()
    treated = checkpoint_module(copy.deepcopy(plain))
    contexts = [Context(), Context()]
    for _ in range(3):
        x = torch.randn(N, C)
        for model, context in zip((plain, treated), contexts, strict=True):
            model.zero_grad()
            model(x, context).sum().backward()
        assert torch.equal(plain.first.weight.grad, treated.first.weight.grad)
    assert contexts[0].calls == contexts[1].calls == 3
    assert torch.equal(contexts[0].v, contexts[1].v)


class Memory(dict[str, float]):
    """Entries and attributes of the same names."""

    def __init__(self) -> None:
        super().__init__(calls=0.0)
        self.calls = 0.0


def draw(generator: torch.Generator, h: Tensor) -> Tensor:
    return torch.rand(h.shape, generator=generator)


def count_in_an_array(array: np.ndarray[Any, Any], h: Tensor) -> Tensor:
    array += 1
    return h * float(array[0])


def count_in_a_set(seen: set[int], h: Tensor) -> Tensor:
    seen.add(len(seen))
    return h * len(seen)


def count_in_a_counter(counter: collections.Counter[str], h: Tensor) -> Tensor:
    counter.update("a")
    return h * counter["a"]


def count_in_a_memory(memory: Memory, h: Tensor) -> Tensor:
    memory["calls"] += 1.0
    memory.calls += 2.0
    return h * (memory["calls"] + memory.calls)


class Takes(Block):
    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor, given: Any) -> Tensor:  # type: ignore[override]
        h = self.first(x)
        return self.second((h * self.use(given, h)).tanh())


ARGUMENTS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor], Callable[[Any], Any]]] = {
    "generator": (lambda: torch.Generator().manual_seed(3), draw, lambda generator: generator.get_state().tolist()),
    "array": (lambda: np.zeros(2), count_in_an_array, lambda array: array.tolist()),
    "set": (lambda: {7, 8}, count_in_a_set, lambda seen: seen),
    "counter": (lambda: collections.Counter("ab"), count_in_a_counter, dict),
    "subclass of dict": (Memory, count_in_a_memory, lambda memory: (dict(memory), memory.calls)),
}


@pytest.mark.parametrize("treatment", ["recompute", "pack", "recompute_cheap"])
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_an_argument_that_remembers_steps_once(kind: str, treatment: Any) -> None:
    make, use, read = ARGUMENTS[kind]
    torch.manual_seed(0)
    plain = Takes(use)
    treated = checkpoint_module(copy.deepcopy(plain), treatment=treatment)
    given = [make(), make()]
    for _ in range(3):
        x = torch.randn(N, C)
        for model, argument in zip((plain, treated), given, strict=True):
            model.zero_grad()
            model(x, argument).sum().backward()
        assert_same_tree([p.grad for p in plain.parameters()], [p.grad for p in treated.parameters()])
    assert read(given[0]) == read(given[1]) != read(make())


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_a_snapshot_takes_arguments_that_remember_back(kind: str) -> None:
    make, use, read = ARGUMENTS[kind]
    argument = make()
    snapshot = take_snapshot(nn.Identity(), objects=[argument])
    use(argument, torch.ones(2))
    assert read(argument) != read(make())
    restore_snapshot(snapshot)
    assert read(argument) == read(make())


def test_a_snapshot_takes_back_what_a_tuple_holds() -> None:
    block = InATuple()
    before = copy.deepcopy(block.held)
    snapshot = take_snapshot(block)
    block(torch.randn(N, C))
    assert block.held[1][0] == 1.0
    restore_snapshot(snapshot)
    assert_same_tree(block.held, before)


def test_an_array_that_nobody_can_write_may_be_an_argument() -> None:
    array = np.ones(2)
    array.flags.writeable = False
    model = checkpoint_module(Takes(lambda given, h: h * float(given[0])))
    model(torch.randn(N, C), array).sum().backward()


def test_two_threads_train_two_models_without_disturbing_each_other() -> None:
    found: dict[int, Any] = {}

    def train(model: nn.Module) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(20):
            model(torch.randn(N, C, generator=generator)).pow(2).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return BornInTheCall()

    expected = [train(make(seed)) for seed in (0, 1)]
    models = [checkpoint_module(make(0)), make(1)]
    threads = [
        threading.Thread(target=lambda i=i: found.__setitem__(i, train(models[i])))  # type: ignore[misc]
        for i in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in (0, 1):
        assert i in found, "the thread failed"
        assert all(torch.equal(a, b) for a, b in zip(expected[i], found[i], strict=True))


class RefusesSubclasses(nn.Module):
    def __init_subclass__(cls, *, tag: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)


class Tagged(RefusesSubclasses, tag="x"):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_class_that_allows_no_subclass_is_refused_and_left_alone() -> None:
    module = Tagged()
    for _ in range(2):
        with pytest.raises(TypeError, match="cannot change Tagged: its class allows no subclass"):
            checkpoint_module(module)
        assert not is_checkpointed(module)
        assert type(module) is Tagged


class Strict(nn.Linear):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise AttributeError("no")
        super().__setattr__(name, value)


def test_a_module_with_its_own_setattr_can_be_treated() -> None:
    module = Strict(C, C)
    assert is_checkpointed(checkpoint_module(module))


@pytest.mark.parametrize(
    "spikes",
    [
        torch.ones(64, 8, 2)[..., 0],
        torch.ones(40, 30)[:, ::2],
        torch.ones(200, 3)[:, 1],
        torch.ones(3, 4).T[1:],
    ],
)
def test_strided_inputs_are_packed(spikes: Tensor) -> None:
    compressed = BitSpikeCompressor().compress_checked(spikes)
    assert compressed.fits.item()
    back = BitSpikeCompressor().decompress(compressed.payload)
    assert torch.equal(back, spikes)
    assert back.stride() == spikes.stride()


class Vocabulary(Block):
    def __init__(self) -> None:
        super().__init__()
        self.words = {f"word {i}": i for i in range(50_000)}


def test_a_large_dictionary_is_not_walked_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_memopt.checkpointing import stores

    looked = []
    original = stores._nested_stores
    monkeypatch.setattr(stores, "_nested_stores", lambda *args: looked.append(args[1]) or original(*args))
    checkpoint_module(Vocabulary())(torch.randn(N, C)).sum().backward()
    assert len(looked) < 100


class Broken(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.norm = nn.BatchNorm1d(C)

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        torch._dynamo.graph_break()
        return self.norm(h)


def test_a_graph_break_inside_a_region_does_not_step_its_state_twice() -> None:
    torch.manual_seed(0)
    plain = Broken()
    treated = checkpoint_module(copy.deepcopy(plain))
    compiled = torch.compile(treated, backend="eager")
    for _ in range(3):
        x = torch.randn(N, C)
        for model in (plain, compiled):
            model.zero_grad()
            model(x).pow(2).sum().backward()
        assert torch.equal(plain.first.weight.grad, treated.first.weight.grad)
    assert treated.calls == 3
    assert treated.norm.num_batches_tracked == 3
    assert torch.equal(plain.norm.running_mean, treated.norm.running_mean)


class PartlyCompiled(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = nn.Linear(C, C)
        inner = nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.Linear(C, C))
        if way == "in place":
            inner.compile(fullgraph=True, backend="aot_eager")
        self.inner = inner if way == "in place" else torch.compile(inner, fullgraph=True, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x).tanh()).tanh()


@pytest.mark.parametrize("way", ["in place", "wrapped"])
def test_a_part_that_is_compiled_by_itself_may_lie_inside_a_region(way: str) -> None:
    torch._dynamo.reset()
    plain, treated = PartlyCompiled(way), PartlyCompiled(way)
    treated.load_state_dict(plain.state_dict())
    checkpoint_module(treated)
    for _ in range(3):
        x = torch.randn(N, C)
        for model in (plain, treated):
            model.zero_grad()
            model(x).sum().backward()
        for a, b in zip(plain.parameters(), treated.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


def test_an_expanded_input_with_gaps_is_packed_under_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    # It spans as many elements as it has: 33 with 33 gaps, each 33 times.
    from lightning_memopt.checkpointing import compiled

    stored = []
    monkeypatch.setattr(compiled, "require_fit", lambda compressed, *_: stored.append(compressed.payload.data.numel()))
    x = torch.randint(0, 2, (33, 34)).float()[:, :1].expand(33, 33)
    plain = nn.Sequential(nn.Linear(33, 33), nn.Tanh())
    treated = checkpoint_module(copy.deepcopy(plain), compressor=BitSpikeCompressor(), compressed_args=(0,))
    torch._dynamo.reset()
    y = torch.compile(treated, backend="aot_eager")(x)
    assert torch.equal(y, plain(x))
    # What the compiler was told.
    assert stored == [compiled._store_fake(x, "bit", "").numel()]


class Returns(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def chunked(function: Callable[[Tensor], Any]) -> nn.Module:
    return checkpoint_module(Returns(function), chunks=3, check_chunks=False)


@pytest.mark.parametrize("per_step", [True, False])
def test_time_chunks_have_to_draw_as_many_random_numbers_of_a_device_as_the_whole(
    per_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = [torch.zeros(1, dtype=torch.uint8)]  # stands for the generator of a device

    @contextlib.contextmanager
    def fork_rng(devices: Any) -> Iterator[None]:
        before = drawn[0].clone()
        yield
        drawn[0].copy_(before)

    def draws(x: Tensor) -> Tensor:
        drawn[0] += len(x) if per_step else 1
        return x.sigmoid()

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: drawn)
    treated = checkpoint_module(Returns(draws), chunks=2)
    expected = contextlib.nullcontext() if per_step else pytest.raises(ValueError, match="draw other random numbers")
    with expected:
        treated(torch.randn(T, N, C, requires_grad=True))


def test_time_chunks_may_return_a_parameter_in_some_pieces() -> None:
    x = torch.arange(6.0).view(6, 1)
    block = chunked(lambda piece: nn.Parameter(piece * 1) if piece[0] > 0 else piece * 1)
    assert torch.equal(block(x), x)


def test_time_chunks_may_return_sparse_tensors() -> None:
    x = torch.randn(6, 4)  # torch's cat of sparse tensors has no gradient
    assert torch.equal(chunked(lambda piece: piece.relu().to_sparse())(x).to_dense(), x.relu())


class Labelled(Tensor):
    """A tensor of a class of its own."""


def test_time_chunks_of_a_tensor_subclass_get_its_gradients() -> None:
    x, plain = (torch.arange(24.0).view(6, 4).as_subclass(Labelled).requires_grad_() for _ in range(2))
    y = chunked(lambda piece: piece * piece)(x)
    assert type(y) is Labelled
    y.sum().backward()
    (plain * plain).sum().backward()
    assert type(x.grad) is type(plain.grad)
    assert torch.equal(x.grad.as_subclass(Tensor), plain.grad.as_subclass(Tensor))  # type: ignore[union-attr]


@pytest.mark.parametrize("cheap_chunks", [0, 1])
def test_a_batch_of_gradients_goes_through_time_chunks_at_once(cheap_chunks: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    treated = checkpoint_module(copy.deepcopy(plain), chunks=4, cheap_chunks=cheap_chunks)
    start, directions = torch.rand(8, 2, 4), torch.rand(3, 8, 2, 4)
    found: list[Tensor] = []
    for layer in (plain, treated):
        x = start.clone().requires_grad_()
        found += torch.autograd.grad(layer(x), x, directions, is_grads_batched=True)
    assert found[0].shape == (3, 8, 2, 4)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6 * float(found[0].abs().max()))


def test_a_batch_of_gradients_is_zero_where_no_piece_has_one() -> None:
    x = torch.arange(6.0).view(6, 1).requires_grad_()
    directions = torch.rand(3, 6, 1)
    y = chunked(lambda piece: piece * 2 if piece[0] == 0 else piece.detach() * 2)(x)
    (gradients,) = torch.autograd.grad(y, x, directions, is_grads_batched=True)
    assert torch.equal(gradients, directions * torch.tensor([2.0, 2, 0, 0, 0, 0]).view(6, 1))


class Fails(torch.autograd.Function):
    """Its backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ArithmeticError


def test_gradients_of_time_chunks_hold_nothing_of_a_backward_pass_that_failed() -> None:
    x = torch.arange(6.0).view(6, 1).requires_grad_()
    first, both = chunked(lambda p: (p * 2 if p[0] == 0 else p.detach() * 2, Fails.apply(p) if p[0] == 0 else p * 1))(x)
    with pytest.raises(ArithmeticError):
        both.sum().backward(retain_graph=True)
    first.sum().backward()
    assert torch.equal(x.grad, torch.tensor([2.0, 2, 0, 0, 0, 0]).view(6, 1))  # type: ignore[arg-type]


# Between forward and backward -----------------------------------------------------------------------------------------


def layers() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.GELU(), nn.Linear(C, C), nn.Dropout(0.2), nn.Sigmoid())
    return nn.Sequential(nn.Linear(C, C), inner, nn.Linear(C, C))


def remove_a_hook(model: Any) -> Callable[[], object]:
    return model[1][1].register_forward_hook(lambda module, args, output: output * 2).remove


def remove_a_hook_with_keywords(model: Any) -> Callable[[], object]:
    hook = lambda module, args, kwargs, output: output + len(args)  # noqa: E731
    return model[1][1].register_forward_hook(hook, with_kwargs=True).remove


def remove_a_hook_before(model: Any) -> Callable[[], object]:
    return model[1][2].register_forward_pre_hook(lambda module, args: (args[0] * 2,)).remove


def add_a_hook(model: Any) -> Callable[[], object]:
    return lambda: model[1][1].register_forward_hook(lambda module, args, output: output * 2)


def freeze(model: Any) -> Callable[[], object]:
    return lambda: model[1].requires_grad_(False)


def unfreeze(model: Any) -> Callable[[], object]:
    model[1].requires_grad_(False)
    return lambda: model[1].requires_grad_(True)


def exchange_a_layer(model: Any) -> Callable[[], object]:
    return lambda: setattr(model[1], "2", nn.Sigmoid())


def take_a_layer_out(model: Any) -> Callable[[], object]:
    return lambda: model[1].pop(2)


def schedule_dropout(model: Any) -> Callable[[], object]:
    return lambda: setattr(model[1][4], "p", 0.9)


def switch_the_mode(model: Any) -> Callable[[], object]:
    return model.eval


CHANGES = (
    *(remove_a_hook, remove_a_hook_with_keywords, remove_a_hook_before, add_a_hook),
    *(freeze, unfreeze, exchange_a_layer, take_a_layer_out, schedule_dropout, switch_the_mode),
)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("treatment", ["recompute", "pack", "recompute_cheap"])
def test_what_changes_between_forward_and_backward_does_not_change_the_gradients(treatment: Any, change: Any) -> None:
    torch.manual_seed(0)
    plain = layers()
    treated = copy.deepcopy(plain)
    checkpoint_module(treated[1], treatment=treatment)
    x = torch.randn(N, C)
    after = []
    for model in (plain, treated):
        torch.manual_seed(1)
        then = change(model)
        loss = model(x).square().sum()
        then()
        loss.backward()
        hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
        kinds = [(type(module).__name__, module.training) for module in model.modules()]
        after.append((hooks, kinds, [p.requires_grad for p in model.parameters()]))
    assert after[0] == after[1]
    for one, other in zip(plain.parameters(), treated.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("treatment", ["recompute", "recompute_cheap"])
def test_threads_that_share_a_module_share_its_hooks_and_leave_nothing_on_it(treatment: Any) -> None:
    model = layers().eval()
    calls: list[None] = []
    second_is_inside, first_is_done = threading.Event(), threading.Event()

    def observe(*_: Any) -> None:
        calls.append(None)

    def first_leaves_first(*_: Any) -> None:
        if threading.current_thread().name == "first":
            assert second_is_inside.wait(60)
        elif threading.current_thread().name == "second":
            second_is_inside.set()
            assert first_is_done.wait(60)

    model[1][1].register_forward_hook(observe)
    model[1][3].register_forward_pre_hook(first_leaves_first)
    checkpoint_module(model[1], treatment=treatment)
    x = torch.randn(N, C)
    results: dict[str, Tensor] = {}

    def forward() -> None:
        name = threading.current_thread().name
        if name == "second":
            entered.wait(60)
        results[name] = model(x)
        if name == "first":
            first_is_done.set()

    entered = threading.Event()
    enter = model[1][0].register_forward_pre_hook(lambda *_: entered.set())
    threads = [threading.Thread(target=forward, name=name) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    enter.remove()
    assert torch.equal(results["first"], results["second"])
    assert len(calls) == 2
    assert list(model[1][1]._forward_hooks.values()) == [observe]
    assert list(model[1][3]._forward_pre_hooks.values()) == [first_leaves_first]
    assert not any("forward" in module.__dict__ for module in model.modules())
    sum(results.values()).sum().backward()  # type: ignore[union-attr]
    assert len(calls) == 2
