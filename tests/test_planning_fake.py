"""Plans for models that hold no memory: those of the real models, made without computing anything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.models.resnet import BasicBlock, ResNet

from lightning_memopt import applied_plan, measure_memory, optimize_memory
from lightning_memopt.checkpointing import parts
from lightning_memopt.observing.costs import Choice
from lightning_memopt.observing.model_state import random_states, unchanged
from lightning_memopt.observing.no_memory import computing_nothing
from lightning_memopt.observing.region_costs import observe_step
from lightning_memopt.observing.regions import as_region
from lightning_memopt.ops.value_bounds import Bounds, ValueBounds, bounds_of
from lightning_memopt.planning import MemoryBudgetError, Plan, split_into_children
from lightning_memopt.planning.memory_budget import budget_bytes
from tests.equality import assert_same_tree
from tests.process_memory import alive_bytes

Forward = Callable[[nn.Module], Tensor]
Made = tuple[nn.Module, Forward]


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Heaviside(torch.autograd.Function):
    """A spike, with the derivative of the arc tangent (Fang et al. 2021)."""

    @staticmethod
    def forward(ctx, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v >= 0).to(v.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        return grad / (1 + v.square())


class LIF(nn.Module):
    """Leaky integrate-and-fire on `[T, N, C]`, hard reset, from rest in each call."""

    def forward(self, x: Tensor) -> Tensor:
        v, spikes = torch.zeros_like(x[0]), []
        for step in x.unbind():
            v = v + (step - v) / 2
            spikes.append(Heaviside.apply(v - 0.5))
            v = v * (1 - spikes[-1])
        return torch.stack(spikes)


class SpikingBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear, self.neuron = nn.Linear(channels, channels), LIF()

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(self.linear(x))


def gpt() -> Made:
    model = nn.Sequential(nn.Embedding(256, 64), *(GPTBlock(64) for _ in range(2)), nn.Linear(64, 256))
    tokens = torch.randint(256, (32, 129))
    return model, lambda model: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def resnet() -> Made:
    model = ResNet(BasicBlock, [2, 2, 1, 1], num_classes=10)
    model.layer3 = model.layer4 = nn.Identity()
    model.fc = nn.Linear(128, 10)
    images, labels = torch.randn(16, 3, 96, 96), torch.randint(10, (16,))
    return model, lambda model: F.cross_entropy(model(images), labels)


def spiking() -> Made:
    model = nn.Sequential(*(SpikingBlock(256) for _ in range(3)), nn.Linear(256, 10))
    data = torch.randn(6, 256, 256)
    return model, lambda model: model(data).square().mean()


def cannot_be_cut(module: nn.Module) -> bool:
    return False


def made(make: Callable[[], Made], *, fake: bool = False) -> Made:
    torch.manual_seed(0)
    with FakeTensorMode() if fake else nullcontext():
        return make()


def planned(model: nn.Module, forward: Forward, budget: int | str, **how: object) -> Plan:
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=True)
    optimize_memory(model, example_forward=forward, memory_budget=budget, optimizer=optimizer, **how)
    plan = applied_plan(model)
    assert plan is not None
    return plan


@pytest.mark.parametrize(("make", "budget"), [(gpt, "35 MiB"), (resnet, "60 MiB"), (spiking, "17 MiB")])
def test_the_plan_of_a_fake_model_is_that_of_the_real_one_and_keeps_its_budget(
    make: Callable[[], Made], budget: str, tmp_path: Path
) -> None:
    plan = planned(*made(make, fake=True), budget)
    others = alive_bytes()
    model, forward = made(make)
    expected = planned(model, forward, budget_bytes(budget) + others, can_chunk=cannot_be_cut)
    assert plan.treated
    assert plan.digest() == expected.digest()
    assert plan.predicted_peak_bytes == pytest.approx(expected.predicted_peak_bytes - others, rel=1e-3)
    assert plan.peak_bytes_after == pytest.approx(expected.peak_bytes_after - others, rel=1e-3)
    assert plan.from_shapes
    assert not expected.from_shapes
    assert not any(plan.alive.measured_bytes)
    assert any(expected.alive.measured_bytes)

    # Another real model takes it as it is.
    plain, forward = made(make)
    loss = forward(plain)
    loss.backward()
    treated, forward = made(make)
    optimize_memory(treated, plan=plan.save(tmp_path / "plan.json"))
    report = measure_memory(lambda: forward(treated).backward(), device="cpu")
    assert_same_tree([p.grad for p in plain.parameters()], [p.grad for p in treated.parameters()])
    peak = report.peak_bytes - report.start_bytes + sum(p.nbytes for p in treated.parameters())
    assert peak + plan.reserved_bytes <= plan.memory_budget


def test_a_model_on_the_meta_device_gets_the_same_plan_and_stays_there() -> None:
    def forward(model: nn.Module) -> Tensor:
        tokens = torch.zeros(32, 129, dtype=torch.long)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def forward_here(model: nn.Module) -> Tensor:
        assert model.table.device == model.positions.device == torch.device("cpu")
        return forward(model)

    expected = planned(made(gpt, fake=True)[0], forward, "35 MiB")
    with torch.device("meta"):
        model, _ = gpt()
        model.register_buffer("positions", torch.zeros(64))
        model.table = torch.ones(3)  # what is no buffer lies there, too
    before = {**dict(model.named_parameters()), "positions": model.positions, "table": model.table}
    plan = planned(model, forward_here, "35 MiB")
    assert plan.treated
    assert plan.digest() == expected.digest()
    assert plan.predicted_peak_bytes == pytest.approx(expected.predicted_peak_bytes, rel=1e-3)
    after = {**dict(model.named_parameters()), "positions": model.positions, "table": model.table}
    assert all(after[name] is tensor and tensor.is_meta for name, tensor in before.items())


def test_a_model_that_fits_nowhere_is_planned() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(GPTBlock(1 << 17) for _ in range(4)), nn.Linear(1 << 17, 1))
        optimizer = torch.optim.AdamW(model.parameters())
    weights = sum(p.nbytes for p in model.parameters())
    assert weights > 3 << 40  # bytes

    def forward(model: nn.Module) -> Tensor:
        return model(torch.empty(64, 4096, 1 << 17)).mean()

    optimize_memory(model, example_forward=forward, memory_budget="16 TiB", optimizer=optimizer)
    plan = applied_plan(model)
    assert plan.treated
    # Gradients are as large as the weights; Adam keeps two moments of each, and the number of the step.
    assert plan.reserved_bytes == pytest.approx(2 * weights, rel=1e-6)
    assert 2 * weights < plan.peak_bytes_after <= plan.memory_budget - plan.reserved_bytes


class Carried(nn.Module):
    """A leaky sum over time that carries its state from call to call, and so from piece to piece."""

    def __init__(self, channels: int, *, carries: bool) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.carries, self.v = carries, None

    def forward(self, x: Tensor) -> Tensor:
        steps = self.wide(x)
        v = torch.zeros_like(steps[0]) if self.v is None or not self.carries else self.v
        out = []
        for step in steps.unbind():
            v = 0.5 * v + step
            out.append(v.tanh())
        self.v = v
        return self.narrow(torch.stack(out))


@pytest.mark.parametrize("carries", [True, False])
def test_time_chunks_of_a_fake_model_are_checked_at_their_first_real_use(carries: bool) -> None:
    def make() -> Made:
        model = nn.Sequential(*(Carried(64, carries=carries) for _ in range(2)), nn.Linear(64, 10))
        data = torch.randn(8, 128, 64)

        def forward(model: nn.Module) -> Tensor:
            for block in model[:2]:
                block.v = None
            return model(data).square().mean()

        return model, forward

    if carries:  # nothing says that they may be cut: only the neurons of libraries are known to carry their state
        with pytest.raises(MemoryBudgetError):
            planned(*made(make, fake=True), "4 MiB")
    plan = planned(*made(make, fake=True), "4 MiB", can_chunk=lambda module: isinstance(module, Carried))
    cut = [region for region in plan.regions if region.chunks > 1]
    assert cut
    assert not any(region.chunks_checked for region in cut)
    model, forward = made(make)
    optimize_memory(model, plan=plan)
    if carries:
        forward(model).backward()
        plain, forward = made(make)
        forward(plain).backward()
        for treated, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(treated.grad, expected.grad, rtol=1e-5, atol=1e-7)
    else:
        with pytest.raises(ValueError, match="time chunks differs"):
            forward(model)


def test_pieces_that_do_less_work_than_the_whole_are_refused() -> None:
    """Attention over the first dimension: each piece attends to itself alone."""
    with FakeTensorMode():
        layer = nn.MultiheadAttention(32, 4)
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        data = torch.randn(16, 8, 32)

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.layer, self.after = model[0], layer, model[1]

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            return self.after(self.layer(x, x, x)[0])

    whole = Attending()
    names = {id(module): (path,) for path, module in whole.named_modules()}
    regions = [as_region(module, names) for module in (whole.before, whole.layer)]
    cut = Choice("recompute", chunks=2)
    with computing_nothing(whole), unchanged(whole) as state:
        step = observe_step(
            whole,
            regions,
            lambda model: model(data),
            state,
            choices=(Choice("recompute"), cut),
            device=torch.device("cpu"),
            parts=(),
        )
    costs = {region.path: {cost.choice: cost.refused for cost in region.choices} for region in step.costs.regions}
    assert not costs["layer"][Choice("recompute")]
    assert "less work in pieces than as a whole" in costs["layer"][cut]
    assert "less work" not in costs["before"][cut]


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def small() -> Made:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))
    return model, lambda model: model(torch.randn(32, 64)).mean()


REAL = torch.ones(32, 64)


def reading_a_value(model: nn.Module) -> Tensor:
    loss = model(torch.randn(32, 64)).mean()
    return loss if loss.item() > 0 else -loss


def casting_for_cuda(model: nn.Module) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(torch.randn(32, 64)).mean()


@pytest.mark.parametrize(
    ("forward", "budget", "message"),
    [
        (lambda model: model(REAL).mean(), "1 GiB", "gave it a tensor that does"),
        (reading_a_value, "1 GiB", "reads a value"),
        (small()[1], "80%", "nothing to take a share of"),
        pytest.param(
            casting_for_cuda,
            "1 GiB",
            r'Use torch.autocast\("cpu"',
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA"),
        ),
    ],
)
def test_what_needs_values_or_a_device_is_refused_with_a_way_out(forward: Forward, budget: str, message: str) -> None:
    model, _ = made(small, fake=True)
    with pytest.raises(ValueError, match=message):
        planned(model, forward, budget)
    assert applied_plan(model) is None


def test_a_model_that_holds_memory_in_parts_is_refused() -> None:
    model, forward = made(small, fake=True)
    model[1] = nn.Linear(64, 64)
    with pytest.raises(ValueError, match="4 of 6 parameters and buffers are fake"):
        planned(model, forward, "1 GiB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_fake_model_on_a_cuda_device_that_is_not_here_is_refused() -> None:
    with FakeTensorMode():
        model = nn.Sequential(*(nn.Linear(8, 8, device="cuda") for _ in range(3)))
    with pytest.raises(ValueError, match="neither runs their backward"):
        planned(model, lambda model: model(torch.empty(4, 8, device="cuda")).mean(), "1 GiB")


# ---------------------------------------------------------------------------------------------------------------------
# What follows from operations


def test_bounds_of_values_follow_from_the_operations_that_made_them() -> None:
    with FakeTensorMode(), ValueBounds():
        spikes = (torch.randn(8, 16) > 0).float()
        analog = torch.randn(8, 16)
        buffer = torch.empty(8, 16)
        buffer[:4] = spikes[4:]
        mixed = torch.zeros(8, 16)
        mixed[0] = analog[0]
        known = {
            "spikes": (spikes, Bounds(1)),
            "views and copies": (torch.stack(spikes.t().contiguous().unbind()), Bounds(1)),
            "half": (spikes.half(), Bounds(1)),
            "sum": (spikes + spikes + spikes.flip(0), Bounds(3)),
            "gate": (spikes * (1 - spikes), Bounds(1)),
            "dropout": (F.dropout(torch.ones(8, 16), 0.25), Bounds(1, scaled=True)),
            "dropped spikes": (F.dropout(spikes, 0.25), Bounds(1, scaled=True)),
            "pooled": (F.max_pool2d(spikes[None, None], 2), Bounds(1)),
            "written": (buffer, Bounds(1)),
            "draws": (torch.bernoulli(torch.full((8, 16), 0.2)), Bounds(1)),
            "classes": (torch.randint(200, (8,)), Bounds(199)),
            "comparison": (analog > 0, Bounds(1)),
            "analog": (analog, None),
            "negative": (-spikes, None),
            "difference": (spikes - spikes, None),
            "two values beside 0": (torch.cat([spikes, 0.5 * spikes]), None),
            "overwritten": (mixed, None),
            "product with weights": (spikes @ torch.randn(16, 4), None),
            "too many": (sum([spikes * 15] * 20), None),
        }
        for what, (tensor, expected) in known.items():
            found = bounds_of(tensor)
            assert found == expected, what


# ---------------------------------------------------------------------------------------------------------------------
# Other ways to ask


@pytest.mark.parametrize("level", [1, 4])
def test_levels_plan_a_model_without_memory_too(level: int) -> None:
    with torch.device("meta"):
        model, _ = small()
    optimize_memory(model, example_forward=small()[1], level=level, split_fn=split_into_children if level > 1 else None)
    plan = applied_plan(model)
    assert plan.treated if level == 1 else plan.peak_bytes_after <= plan.peak_bytes_before
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_command_line_plans_from_shapes_alone(tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "text_transformer"
    file = tmp_path / "plan.json"
    named = ["--model", "model.ByteGPT", "--data", "data.StandardLibraryText", "--cli", "cli.TextCLI"]
    # Blocks as wide as those of GPT-3: 29 GB of weights, gradients and moments.
    config = yaml.safe_load((example / "config.yaml").read_text())
    config["model"] |= {"width": 12288, "heads": 96, "depth": 2}
    config["trainer"]["precision"] = "bf16-true"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "lightning_memopt", "plan", "--config", str(tmp_path / "config.yaml"), *named]
    done = subprocess.run(
        [*command, "--budget", "80GiB", "--shapes-only", "--output", str(file)],
        cwd=example,
        env={**os.environ, "PYTHONPATH": str(example.parent.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    plan = Plan.load(file)
    # Two blocks of 12 width^2 weights in bfloat16, their gradients, and two moments of each.
    assert plan.reserved_bytes > 2 * 2 * 12 * 12288**2 * 2
    assert plan.peak_bytes_after + plan.reserved_bytes <= plan.memory_budget


@pytest.mark.filterwarnings("error:Using a target size:UserWarning")
def test_a_warning_that_is_an_error_stays_what_it_is() -> None:
    model, _ = made(small, fake=True)

    def forward(model: nn.Module) -> Tensor:
        return nn.functional.mse_loss(model(torch.randn(32, 64)), torch.zeros(32, 1))

    with pytest.raises(UserWarning, match="target size"):
        planned(model, forward, "1 GiB")
    assert applied_plan(model) is None


def test_under_fake_tensors_the_random_numbers_of_a_device_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    device, state, written = torch.device("cuda", 0), torch.get_rng_state(), []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state)
    # As torch 2.6 does.
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda new, device: written.append(new.clone()))
    with FakeTensorMode():
        for _, write in [*random_states([])]:
            write()
        with parts._replayed(parts._random_now([device])):
            pass
    assert len(written) == 3
    assert all(torch.equal(each, state) for each in written)
