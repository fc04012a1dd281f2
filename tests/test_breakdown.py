"""Every byte of a step has a consumer, and activations the module that saved them."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lightning_memopt import checkpoint_module, measure_memory
from lightning_memopt.measuring import StepMemory
from lightning_memopt.measuring.attribution import StepAttribution
from lightning_memopt.measuring.consumers import MemoryEstimate
from tests.process_memory import alive_bytes
from tests.ranks import run_ranks

CPU = torch.device("cpu")
N, C = 64, 32
ACTIVATION = N * C * 4


class Block(nn.Module):
    """A residual block whose addition belongs to no child."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)
        self.linear = nn.Linear(C, C, bias=False)
        self.gelu = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gelu(self.linear(self.norm(x))) * 2.0


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = nn.Linear(C, 8, bias=False)
        self.register_buffer("scale", torch.ones(C))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x) * self.scale)


def training(
    model: nn.Module,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    autocast: bool = False,
    size: int = N,
) -> Callable[[], None]:
    """A step of the training of ``model``, one of which has been taken."""
    data, target = torch.rand(size, C), torch.randint(8, (size,))
    steps = optimizer(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(data).float(), target)
        loss.backward()
        del loss
        steps.step()
        steps.zero_grad()

    step()
    return step


def broken_down(step: Callable[[], None], model: nn.Module) -> MemoryEstimate:
    report = measure_memory(step, device=CPU, model=model)
    assert report.breakdown is not None
    return report.breakdown


@pytest.fixture
def strangers() -> int:
    """Bytes that other tests left alive."""
    return alive_bytes()


def bytes_of(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def treated(how: str) -> Net:
    model = Net()
    for block in model.blocks if how != "plain" else ():
        checkpoint_module(block, treatment=how)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("how", ["plain", "recompute", "recompute_cheap", "pack"])
def test_the_consumers_add_up_to_the_peak_that_is_measured_without_them(
    how: str, autocast: bool, strangers: int
) -> None:
    model = treated(how)
    step = training(model, autocast=autocast)
    gc.collect()
    alone = measure_memory(step, device=CPU)
    report = measure_memory(step, device=CPU, model=model)
    assert report.peak_bytes == alone.peak_bytes
    assert report.start_bytes == alone.start_bytes
    assert report.breakdown is not None
    assert report.breakdown.peak.total_bytes == report.peak_bytes
    for index, point in enumerate(report.timeline):
        assert sum(sizes[index] for sizes in report.by_consumer.values()) == point.bytes
    assert report.breakdown.peak.other == strangers


class SharedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.layer(x).tanh()
        return x


class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, C)
        self.head = nn.Linear(C, 512, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


class Twice(torch.autograd.Function):
    """Its gradient is a tensor of its own, a view of one, or one that it keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.how = how
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.how(gradient * 2), None


class Gradients(nn.Module):
    """A parameter with four readers, all of whose gradients are made by ``how``."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.rand(N, C))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([Twice.apply(self.weight, self.how).sin().sum() * x.mean() for _ in range(4)])


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (SharedLayer, (N, C)),
        (lambda: nn.RNN(C, 2 * C, 2, batch_first=True), (4, 8, C)),
        (lambda: nn.GRU(C, 2 * C, batch_first=True), (4, 8, C)),
        (TiedEmbedding, (2, 4)),
        (lambda: Gradients(lambda gradient: gradient), (2,)),
        (lambda: Gradients(lambda gradient: gradient.view(N, C)), (2,)),
        (lambda: Gradients(lambda gradient: gradient.detach()), (2,)),
        (lambda: Gradients(lambda gradient: gradient[:1].expand(N, C)), (2,)),
    ],
)
def test_gradients_of_a_weight_that_is_used_several_times_take_what_they_take_unwatched(
    make: Callable[[], nn.Module], shape: tuple[int, ...], fake: bool
) -> None:
    def peak(alone: bool) -> int:
        model = make()
        data = torch.randint(512, shape) if isinstance(model, TiedEmbedding) else torch.rand(shape)

        def step() -> None:
            output = model(data)
            (output[0] if isinstance(output, tuple) else output).sum().backward()
            del output
            model.zero_grad()

        if not fake:
            step()
        report = measure_memory(step, device=CPU, model=None if alone else model)
        return report.peak_bytes - report.start_bytes

    unwatched = peak(alone=True)
    if fake:
        with FakeTensorMode():
            assert peak(alone=True) == peak(alone=False) == unwatched
    else:
        assert peak(alone=False) == unwatched


def test_gradients_that_are_sparse_meet_while_they_are_watched() -> None:
    model, tokens = nn.Embedding(128, C, sparse=True), torch.randint(128, (8, 4))
    report = measure_memory(lambda: (model(tokens).sum() + model(tokens.t()).sum()).backward(), device=CPU, model=model)
    assert report.breakdown is not None
    assert model.weight.grad is not None
    assert report.breakdown.at("backward end").gradients >= model.weight.grad._values().nbytes


def test_what_belongs_to_an_object_is_counted_for_it(strangers: int) -> None:
    model = Net()
    step = training(model)
    breakdown = broken_down(step, model)
    parameters = bytes_of(model.parameters())
    for name in ("forward end", "backward end", "optimizer step"):
        moment = breakdown.at(name)
        assert moment.parameters == parameters
        assert moment.optimizer_state == 2 * parameters + 4 * len([*model.parameters()])  # AdamW counts its steps
        assert moment.buffers == C * 4
        assert moment.inputs == N * C * 4 + N * 8
        assert moment.other == strangers
    assert breakdown.at("forward end").gradients == 0
    assert breakdown.at("backward end").gradients == breakdown.at("optimizer step").gradients == parameters
    assert breakdown.at("backward end").activations == 0


def test_activations_are_those_of_the_module_that_saved_them() -> None:
    model = Net(blocks=2)
    at_end = broken_down(training(model), model).at("forward end")
    assert at_end.activations == sum(at_end.activations_by_module.values())
    for index in (0, 1):
        # The linear layer saves what the norm made, GELU what the linear layer made.
        assert at_end.activations_by_module[f"blocks.{index}.linear"] == ACTIVATION
        assert at_end.activations_by_module[f"blocks.{index}.gelu"] == ACTIVATION
        # Mean and reciprocal deviation; and its input, which only the first norm has from the batch.
        assert at_end.activations_by_module[f"blocks.{index}.norm"] == 2 * N * 4 + (ACTIVATION if index else 0)
    # The product with a buffer saves neither; the head saves its result.
    assert at_end.activations_by_module["head"] == ACTIVATION
    # Logarithms of the softmax; the sum of weights, the loss and its gradient.
    assert at_end.activations_by_module[""] == N * 8 * 4 + 3 * 4


def test_copies_of_weights_by_autocast_are_no_activations_and_go_in_the_backward_pass() -> None:
    model = Net()
    breakdown = broken_down(training(model, autocast=True), model)
    products = [block.linear for block in model.blocks] + [model.head]
    assert breakdown.at("forward end").autocast_copies == bytes_of(layer.weight for layer in products) // 2
    assert breakdown.at("backward end").autocast_copies == 0


@pytest.mark.parametrize("how", ["ours", "torch"])
def test_what_a_region_makes_again_are_activations_of_that_region(how: str) -> None:
    model = Net()
    if how == "ours":
        for block in model.blocks:
            checkpoint_module(block)
        breakdown = broken_down(training(model), model)
    else:
        inner = model.blocks.forward

        def forward(x: Tensor) -> Tensor:
            for block in model.blocks:
                x = torch_checkpoint(block, x, use_reentrant=False)
            return x

        model.blocks.forward = forward  # type: ignore[method-assign]
        breakdown = broken_down(training(model), model)
        model.blocks.forward = inner  # type: ignore[method-assign]
    at_end = breakdown.at("forward end").activations_by_module
    assert not any(path.startswith("blocks.") and path.count(".") == 2 for path in at_end)
    assert breakdown.peak_phase == "backward"
    again = {path: size for path, size in breakdown.peak.activations_by_module.items() if path.startswith("blocks.")}
    (region,) = {path.split(".")[1] for path in again if path.count(".") == 2}  # one at a time
    inside = sum(size for path, size in again.items() if path.startswith(f"blocks.{region}."))
    assert inside >= 2 * ACTIVATION


def test_packed_copies_are_activations_although_no_hook_of_ours_sees_them_saved() -> None:
    model = nn.Sequential(nn.Linear(C, C), nn.Dropout(), nn.Linear(C, 8))
    for treatment in ("keep", "pack"):
        if treatment == "pack":
            checkpoint_module(model[1], treatment="pack")
        at_end = broken_down(training(model), model).at("forward end")
        assert at_end.total_bytes == sum(at_end.consumers().values())
        mask = at_end.activations_by_module.get("1", 0)
        assert mask <= ACTIVATION // 16 if treatment == "pack" else mask == ACTIVATION
        assert at_end.temporaries <= 8


def test_micro_batches_keep_their_gradients_and_new_ones_are_temporary_until_they_are_added() -> None:
    model = Net()
    data = torch.rand(N, C)

    def step() -> None:
        for _ in range(2):
            model(data).sum().backward()

    breakdown = broken_down(step, model)
    parameters = bytes_of(model.parameters())
    assert breakdown.at("forward end").gradients == parameters  # the highest of both
    assert breakdown.at("backward end").gradients == parameters
    assert [phase.name for phase in breakdown.phases] == ["forward end", "backward end"]


def test_an_optimizer_that_runs_the_closure_does_not_own_what_the_closure_makes() -> None:
    model = Net()
    data = torch.rand(N, C)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        loss = model(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        return loss

    closure()
    by_closure = broken_down(lambda: optimizer.step(closure), model)

    def in_turn() -> None:
        loss = closure()  # noqa: F841
        optimizer.step()

    apart = broken_down(in_turn, model)
    assert [phase.name for phase in by_closure.phases] == ["forward end", "backward end", "optimizer step"]
    assert by_closure.at("forward end").activations_by_module == apart.at("forward end").activations_by_module
    assert by_closure.peak.consumers() == apart.peak.consumers()


def test_a_state_that_a_module_keeps_is_a_buffer_before_the_step_and_after_it() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(C, C)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.last = y.detach().clone()
            return y

    model, data = Remembering(), torch.rand(N, C)

    def step() -> None:
        model(data).sum().backward()

    step()
    breakdown = broken_down(step, model)
    assert breakdown.at("backward end").buffers == ACTIVATION
    assert breakdown.at("backward end").activations == 0


def test_tensors_of_others_are_other_and_a_batch_that_nobody_reads_is_an_input(strangers: int) -> None:
    model, held, unread = Net(), torch.zeros(1000), torch.zeros(500)
    step = training(model)
    report = measure_memory(step, device=CPU, model=model, batch={"x": [unread]})
    assert report.breakdown is not None
    assert report.breakdown.peak.other == strangers + held.nbytes
    assert report.breakdown.peak.inputs == N * C * 4 + N * 8 + unread.nbytes


def test_state_of_an_optimizer_that_does_not_step_counts_if_it_is_given() -> None:
    model, data = Net(), torch.rand(N, C)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(data).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    report = measure_memory(lambda: model(data).sum().backward(), device=CPU, model=model, optimizer=optimizer)
    assert report.breakdown is not None
    assert report.breakdown.peak.optimizer_state == bytes_of(model.parameters())


def test_the_step_computes_what_it_computes_without_being_watched() -> None:
    def gradients(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, data = treated("recompute_cheap"), torch.rand(N, C)

        def step() -> None:
            model(data).square().sum().backward()

        if watched:
            measure_memory(step, device=CPU, model=model)
        else:
            step()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for plain, seen in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, seen)


@pytest.mark.parametrize("autocast", [False, True])
def test_fake_tensors_have_the_consumers_of_real_ones(autocast: bool) -> None:
    def report(fake: bool) -> MemoryEstimate:
        model = Net()
        return broken_down(training(model, autocast=autocast, size=4 * N), model)

    real = report(False)
    with FakeTensorMode():
        seen = report(True)
    for name in ("forward end", "backward end"):
        expected = real.at(name)
        assert seen.at(name).activations_by_module == expected.activations_by_module
        for consumer, size in expected.consumers().items():
            if consumer not in ("temporaries", "other"):
                assert seen.at(name).consumers()[consumer] == size, consumer


def test_nothing_of_a_model_stays_behind_although_its_neurons_keep_the_graph() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(C, C)
            self.v: Tensor | float = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.v = self.linear(x) * torch.sigmoid(x + self.v)
            return self.v

    def measured() -> weakref.ref[nn.Module]:
        model, data = Leaky(), torch.rand(N, C)
        measure_memory(lambda: model(data).sum().backward(), device=CPU, model=model)
        return weakref.ref(model)

    gone = measured()
    gc.collect()
    assert gone() is None


def test_an_error_in_the_step_arrives_and_leaves_no_hook_behind() -> None:
    model, data = Net(), torch.rand(N, C)

    def broken(module: nn.Module, args: Any, output: Any) -> None:
        raise ValueError("no")

    handle = model.head.register_forward_hook(broken)
    before = (
        len(nn.modules.module._global_forward_hooks),
        len(nn.modules.module._global_forward_pre_hooks),
        len(_global_optimizer_pre_hooks),
    )
    with pytest.raises(ValueError, match="no"):
        measure_memory(lambda: model(data).sum().backward(), device=CPU, model=model)
    handle.remove()
    after = (
        len(nn.modules.module._global_forward_hooks),
        len(nn.modules.module._global_forward_pre_hooks),
        len(_global_optimizer_pre_hooks),
    )
    assert before == after
    assert not torch.autograd._profiler_enabled()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert broken_down(lambda: model(data).sum().backward(), model).peak.total_bytes > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "gpt"}, "takes the torch.nn.Module that the step trains; got 'gpt'"),
        (
            {"model": nn.Linear(1, 1), "optimizer": "adam"},
            "takes a torch.optim.Optimizer or a list of them; got 'adam'",
        ),
        ({"model": nn.Linear(1, 1), "optimizer": 3}, "got 3"),
    ],
)
def test_what_is_no_model_and_no_optimizer_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        measure_memory(lambda: None, device=CPU, **arguments)


# An allocator that keeps statistics, on fake tensors of a device that need not be there.


class Allocator:
    """Counts what the trace does not see: blocks of others, and a workspace in each operation."""

    def __init__(self, *, hidden: int, workspace: int) -> None:
        self.hidden, self.workspace = hidden, workspace
        self.trace: Any = None
        self.resets = 0

    def memory_allocated(self, index: int) -> int:
        seen = 0 if self.trace is None else sum(size for _, size in self.trace._known.values())
        return seen + self.hidden

    def max_memory_allocated(self, index: int) -> int:
        return self.memory_allocated(index) + (self.workspace if self.trace is not None else 0)

    def reset_peak_memory_stats(self, index: int) -> None:
        self.resets += 1


def test_on_a_device_whose_allocator_counts_the_rest_is_other_and_workspaces_are_temporary() -> None:
    def attribute(allocator: Allocator | None) -> StepMemory | MemoryEstimate:
        model, data = Net(), torch.rand(N, C)
        attribution = StepAttribution(torch.device("cpu", 0) if allocator else CPU, model, allocator=allocator)
        if allocator is not None:
            attribution._device = CPU
        attribution.start()
        if allocator is not None:
            allocator.trace = attribution._trace
        model(data).sum().backward()
        return attribution.stop().breakdown

    with FakeTensorMode():
        bare = attribute(None)
        allocator = Allocator(hidden=5000, workspace=700)
        allocator.current_device = lambda: 0  # type: ignore[attr-defined]
        counted = attribute(allocator)
    assert isinstance(bare, MemoryEstimate)
    assert isinstance(counted, MemoryEstimate)
    assert counted.peak.total_bytes == bare.peak.total_bytes + 5000 + 700
    assert counted.at("forward end").total_bytes == bare.at("forward end").total_bytes + 5000
    assert allocator.resets > 20


def _per_sample_loss(model: nn.Module, parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
    return torch.func.functional_call(model, parameters, (sample[None],)).square().sum()


@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "jvp", "hessian"])
def test_a_step_with_function_transforms_is_measured_as_it_runs_unwatched(transform: str) -> None:
    model, data, large = Net(1), torch.rand(4, C), torch.rand(512, C)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    loss = functools.partial(_per_sample_loss, model)
    transforms: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(loss)(parameters, data[0]),
        "vmap of grad": lambda: torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, data),
        "jvp": lambda: torch.func.jvp(model, (data,), (data,)),
        "hessian": lambda: torch.func.hessian(lambda sample: loss(parameters, sample))(data[0]),
    }
    results: list[Tensor] = []

    def step() -> None:
        results[:] = tree_leaves(transforms[transform]())
        model(large).sum().backward()  # is watched again

    step()
    plain = [result.clone() for result in results]
    measured = measure_memory(step, model=model, device="cpu")
    assert measured.breakdown is not None
    assert measured.breakdown.at("forward end").activations_by_module["blocks.0.gelu"] >= len(large) * C * 4
    for ours, theirs in zip(results, plain, strict=True):
        assert torch.equal(ours, theirs)
    step()  # nothing is left behind


def test_hooks_of_others_are_refused_by_function_transforms_as_ever() -> None:
    model, data = Net(1), torch.rand(4, C)

    def step() -> None:
        with torch.autograd.graph.save_on_cpu():
            torch.func.grad(lambda sample: model(sample).sum())(data)

    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        step()
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        measure_memory(step, model=model, device="cpu")
    torch.func.grad(lambda sample: model(sample).sum())(data)


def _steps_on_rank(rank: int, as_views: bool, zeroed: bool) -> dict[str, Any]:
    """Steps of a model that DDP wraps, the second of which makes the buckets anew, each measured with its model."""
    model = Net(6)
    before = alive_bytes()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_views, bucket_cap_mb=0.01)
    buckets = alive_bytes() - before
    data, optimizer = torch.rand(N, C), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        loss = wrapped(data).square().mean()
        optimizer.zero_grad(set_to_none=not zeroed)
        loss.backward()
        del loss
        optimizer.step()

    steps = [measure_memory(step, device=CPU, model=model, optimizer=optimizer, batch=data) for _ in range(3)]
    alone = measure_memory(step, device=CPU)
    return {"size": bytes_of(model.parameters()), "buckets": buckets, "steps": steps, "alone": alone}


@pytest.mark.parametrize(("as_views", "zeroed"), [(False, False), (True, False), (True, True)])
def test_buckets_of_ddp_are_communication_unless_the_gradients_lie_in_them(as_views: bool, zeroed: bool) -> None:
    for rank in run_ranks(_steps_on_rank, 2, as_views, zeroed, timeout=240.0):
        size, steps = rank["size"], rank["steps"]
        assert rank["buckets"] == size
        for report in steps:
            peak = report.breakdown.peak
            assert peak.total_bytes == report.peak_bytes
            for position, point in enumerate(report.timeline):
                assert sum(sizes[position] for sizes in report.by_consumer.values()) == point.bytes
            assert peak.other <= 0.01 * peak.total_bytes
            at_end = report.breakdown.at("backward end")
            assert at_end.gradients == size
            assert at_end.communication == (0 if as_views else size)
        first, second, third = (report.by_consumer for report in steps)
        held = "gradients" if as_views else "communication"
        assert first[held][0] == second[held][0] == third[held][0] == size  # before any gradient, too
        # The gradients keep the old buckets until they are zeroed or replaced.
        assert max(second[held]) == (2 * size if as_views else size)
        assert max(third[held]) == size
        assert rank["alone"].start_bytes == steps[2].start_bytes
        # A number that torch wraps into a tensor for an operation lives a little longer where that is watched.
        assert 0 <= steps[2].peak_bytes - rank["alone"].peak_bytes <= 8
