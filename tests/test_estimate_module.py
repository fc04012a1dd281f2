"""What a step of a module takes, estimated without memory, is what it takes."""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_memopt import checkpoint_module, measure_memory
from lightning_memopt.accounting.estimate_module import estimate_module
from lightning_memopt.measuring.consumers import MemoryBreakdown
from tests.test_workspaces import CPU_OF_THE_FORMULAS

CPU = torch.device("cpu")
Optimizers = Callable[[Any], torch.optim.Optimizer]


class Transformer(nn.Module):
    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, width)
        layers = (nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True) for _ in range(depth))
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(width, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(tokens)))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(self._block(3), self._block(32), self._block(32))
        self.head = nn.Linear(32 * 16, 128)

    @staticmethod
    def _block(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(images).flatten(1))


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    return Transformer(), torch.randint(128, (32, 64)), torch.randint(128, (32, 64))


def convolutions() -> tuple[nn.Module, Tensor, Tensor]:
    return Convolutions(), torch.rand(32, 3, 32, 32), torch.randint(128, (32,))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    scores = model(batch[0])
    return nn.functional.cross_entropy(scores.flatten(0, -2).float(), batch[1].flatten())


def measured(
    model: nn.Module, batch: Any, make: Optimizers, precision: str, loss: Callable[..., Tensor] = loss
) -> MemoryBreakdown:
    if dtype := {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision):
        model = copy.deepcopy(model).to(dtype)
        batch = tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in batch)
    optimizer = make(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        del value
        optimizer.step()

    step()
    report = measure_memory(step, device=CPU, model=model, batch=batch)
    assert report.breakdown is not None
    return report.breakdown.peak


@pytest.mark.gpu
@pytest.mark.parametrize("make", [torch.optim.AdamW, sgd])
def test_an_estimate_for_cuda_needs_no_cuda(make: Optimizers, monkeypatch: pytest.MonkeyPatch) -> None:
    model, *batch = convolutions()
    here = estimate_module(model, batch, optimizer=make, loss=loss, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elsewhere = estimate_module(model, batch, optimizer=make, loss=loss, device="cuda")
    for moment in (*elsewhere.MOMENTS, "peak"):  # the device hands out blocks of 512 bytes
        assert here.at(moment).total_bytes == pytest.approx(elsewhere.at(moment).total_bytes, rel=0.02), moment


@pytest.mark.parametrize("make", [torch.optim.AdamW, sgd, torch.optim.Adafactor])
@pytest.mark.parametrize("family", [transformer, convolutions])
def test_the_estimate_is_what_the_step_takes(family: Any, make: Optimizers) -> None:
    model, *batch = family()
    estimate = estimate_module(model, batch, optimizer=make, loss=loss, device="cpu").peak
    real = measured(model, batch, make, "32-true")
    own = real.total_bytes - real.other
    assert estimate.total_bytes == pytest.approx(own, rel=0.01)
    assert (estimate.parameters, estimate.buffers) == (real.parameters, real.buffers)
    assert (estimate.optimizer_state, estimate.inputs) == (real.optimizer_state, real.inputs)


@pytest.mark.parametrize("treatment", ["recompute", "recompute_cheap"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_so_it_is_in_other_precisions_and_with_checkpointing(precision: str, treatment: Any) -> None:
    model, *batch = transformer()
    for block in model.blocks:  # type: ignore[union-attr]
        checkpoint_module(block, treatment=treatment)
    estimate = estimate_module(
        model, batch, precision=precision, optimizer=torch.optim.AdamW, loss=loss, device="cpu"
    ).peak
    real = measured(model, batch, torch.optim.AdamW, precision)
    # Other CPUs multiply in 16 bits with other scratch buffers, which a model of this size shows.
    scratch = 0 if precision == "32-true" or CPU_OF_THE_FORMULAS else 1.5 * 2**20
    assert estimate.total_bytes == pytest.approx(real.total_bytes - real.other, rel=0.01, abs=scratch)


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        value = loss(self.model, batch)
        self.log("loss", value)
        return {"loss": value}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def test_a_lightning_module_brings_its_step_and_its_optimizers_and_is_left_as_it_was() -> None:
    module = Lit()
    _, *batch = transformer()
    before = copy.deepcopy(module.state_dict())
    attributes = set(vars(module))
    estimate = estimate_module(module, tuple(batch), device="cpu")
    plain = estimate_module(module.model, batch, optimizer=torch.optim.AdamW, loss=loss, device="cpu")
    assert estimate.peak.optimizer_state == plain.peak.optimizer_state > 0
    assert estimate.peak_bytes == pytest.approx(plain.peak_bytes, rel=1e-3)
    assert "model.blocks.0.norm1" in estimate.at("forward end").activations_by_module
    assert set(vars(module)) == attributes
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in module.parameters())


def test_nothing_is_allocated_and_a_model_that_fits_nowhere_is_estimated() -> None:
    with torch.device("meta"):
        model = Transformer(width=1 << 14, depth=4)  # 24 GiB of weights
        tokens = torch.zeros(2, 64, dtype=torch.long)
    found: list[Any] = []
    report = measure_memory(
        lambda: found.append(
            estimate_module(model, (tokens, tokens), optimizer=torch.optim.AdamW, loss=loss, device="cpu")
        ),
        device=CPU,
    )
    assert report.peak_bytes - report.start_bytes < 1 << 20
    assert found[0].peak.parameters == sum(p.nbytes for p in model.parameters()) > 24 << 30
    assert found[0].peak.optimizer_state >= 2 * found[0].peak.parameters


def test_a_function_that_makes_the_module_runs_without_memory_as_well() -> None:
    _, *batch = transformer()
    made = estimate_module(Transformer, batch, loss=loss, device="cpu")
    given = estimate_module(Transformer(), batch, loss=loss, device="cpu")
    assert made.peak_bytes == given.peak_bytes


def test_an_optimizer_of_the_module_counts_with_its_settings_and_is_not_stepped() -> None:
    model, *batch = transformer()
    optimizer = torch.optim.Adam([{"params": [*model.parameters()][:3]}], amsgrad=True)
    estimate = estimate_module(model, batch, optimizer=optimizer, loss=loss, device="cpu")
    held = sum(parameter.nbytes for parameter in optimizer.param_groups[0]["params"])
    assert estimate.peak.optimizer_state == 3 * held + 3 * 4  # amsgrad keeps a third moment; each counts its steps
    assert not optimizer.state


def test_gradients_of_the_step_before_are_alive_in_the_forward_pass_as_in_lightning() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    step = estimate_module(model, torch.rand(64, 64), optimizer=torch.optim.AdamW, device="cpu")
    assert step.peak_phase == "forward"
    assert step.peak.gradients == step.peak.parameters


def test_on_cuda_that_is_not_there_dropout_keeps_a_mask_of_bytes() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device, whose own kernels are asked")
    model, data = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)), torch.rand(256, 64)
    masks = {
        device: estimate_module(model, data, device=device).at("forward end").activations_by_module.get("1")
        for device in ("cpu", "cuda")
    }
    assert masks == {"cpu": 256 * 64 * 4, "cuda": 256 * 64}


def test_the_copy_may_be_treated_before_it_is_estimated() -> None:
    model, *batch = transformer()

    def treat(copied: Any) -> None:
        for block in copied.blocks:
            checkpoint_module(block)

    plain = estimate_module(model, batch, loss=loss, device="cpu")
    treated = estimate_module(model, batch, loss=loss, device="cpu", treat=treat)
    assert treated.peak.activations < plain.peak.activations / 2
    assert "recompute" not in repr(type(model.blocks[0]).__mro__)  # type: ignore[index]


def test_it_gives_up_when_its_time_is_over() -> None:
    model, *batch = transformer()
    with pytest.raises(TimeoutError, match=r"not done after 0\.0 s"):
        estimate_module(model, batch, loss=loss, device="cpu", time_limit_s=0.001)
    assert torch._C._len_torch_dispatch_stack() == 0


class Manual(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "example", "arguments", "error", "message"),
    [
        (nn.Linear(2, 2), None, {}, ValueError, "needs an example: one batch of tensors"),
        (nn.Linear(2, 2), torch.zeros(1, 2), {"precision": "8-bit"}, ValueError, "accepted are '64-true', '32-true'"),
        (nn.Linear(2, 2), torch.zeros(1, 2), {"optimizer": 3}, TypeError, "a list of them, or a function"),
        (nn.Linear(2, 2), torch.zeros(1, 2), {"optimizer": sgd([nn.Parameter(torch.zeros(3))])}, ValueError, r"\(3,\)"),
        (nn.Identity(), torch.zeros(1, 2), {}, ValueError, "where a loss to differentiate was expected"),
        (nn.LazyLinear(2), torch.zeros(1, 2), {}, ValueError, "lazy parameters"),
        ("gpt", torch.zeros(1, 2), {}, TypeError, "takes a torch.nn.Module or a function that makes one; got 'gpt'"),
        (lambda: 3, torch.zeros(1, 2), {}, TypeError, "returned 3"),
        (nn.Linear(2, 2), torch.zeros(1, 2), {"device": "mps"}, ValueError, "accepted are 'cuda', 'cpu'"),
        (nn.Linear(2, 2), torch.zeros(1, 2), {"device": "gpu"}, ValueError, "accepted are 'cuda', 'cpu'"),
        (Manual(), (torch.zeros(1, 2),), {}, ValueError, "optimizes manually"),
    ],
)
def test_bad_input_is_answered_with_what_is_accepted(
    module: Any, example: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        estimate_module(module, example, **{"device": "cpu", **arguments})


def test_the_documented_estimate_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[1] / "docs" / "memory_monitor.md"
    section = page.read_text().split("## A step that is too large to run")[1].split("\n## ")[0]
    (snippet,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    exec(compile(snippet, str(page), "exec"), {"torch": torch})
    # Two bytes of parameters, of gradients, and twice of moments.
    assert 8 * 68.7e9 <= int(capsys.readouterr().out.split()[0]) * 2**30 < 9 * 68.7e9


READERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * x.sum().item(),
    lambda x: x[x > 0],
    lambda x: x * float(x.detach().numpy().sum()),
    lambda x: x * torch.bincount(x.detach().long()).max(),
    lambda x: x * x.detach().unique().numel(),
]


@pytest.mark.parametrize("reads", READERS)
def test_a_step_that_reads_values_is_refused_with_what_to_do(
    reads: Callable[[Tensor], Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return reads(x)

    with pytest.raises(ValueError, match=r"reads a value of a tensor .* measure_memory"):
        estimate_module(Reading(), torch.zeros(3, requires_grad=True), device="cpu")
    assert "Traceback" not in capfd.readouterr().err


class Indexed(Lit):
    """Its step takes the index of the batch under another name."""

    seen: Any = None

    def training_step(self, batch: Any, idx: int) -> Tensor:  # type: ignore[override]
        type(self).seen = idx
        return super().training_step(batch, idx)  # type: ignore[return-value]


class Variadic(Lit):
    seen: Any = None

    def training_step(self, *arguments: Any) -> Tensor:  # type: ignore[override]
        type(self).seen = arguments[1]
        return super().training_step(*arguments)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [Indexed, Variadic])
def test_the_index_of_the_batch_is_passed_by_position(kind: type[Any]) -> None:
    _, *batch = transformer()
    plain = estimate_module(Lit(), tuple(batch), device="cpu")
    assert estimate_module(kind(), tuple(batch), device="cpu").peak == plain.peak
    assert kind.seen == 0


@dataclass(frozen=True)
class Sample:
    tensors: tuple[Tensor, Tensor]
    name: str = "a"


def test_a_batch_may_be_a_dataclass() -> None:
    def of_sample(model: nn.Module, sample: Any) -> Tensor:
        return loss(model, (sample[0] if isinstance(sample, list) else sample).tensors)

    model, *batch = transformer()
    plain = estimate_module(model, tuple(batch), loss=loss, device="cpu")
    for sample in (Sample(tuple(batch)), [Sample(tuple(batch))]):  # type: ignore[arg-type]
        assert estimate_module(model, sample, loss=of_sample, device="cpu").peak == plain.peak
    assert plain.peak.inputs == 2 * 8 * 32 * 64


def test_layers_that_come_with_configure_model_are_counted() -> None:
    class Late(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: nn.Module | None = None

        def configure_model(self) -> None:
            if self.net is None:
                self.net = nn.Linear(64, 8)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert self.net is not None
            return self.net(batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    module = Late()
    step = estimate_module(module, torch.zeros(4, 64), precision="bf16-true", device="cpu")
    assert step.peak.parameters == 2 * (64 * 8 + 8)
    assert module.net is None


class Helper:
    def __init__(self) -> None:
        self.tables = {"a": {"b": {"c": {"d": torch.rand(8)}}}}
        self.weight = nn.Parameter(torch.rand(8))
        self.generator = torch.Generator().manual_seed(7)


def test_what_plain_objects_hold_is_copied() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.helper = nn.Linear(64, 8), Helper()

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(8, generator=self.helper.generator)
            return self.linear(x) * self.helper.tables["a"]["b"]["c"]["d"] * self.helper.weight + noise

    module = Holding()
    state = module.helper.generator.get_state()
    step = estimate_module(module, torch.zeros(4, 64), device="cpu")
    assert step.peak.parameters == 4 * (64 * 8 + 8 + 8)
    assert torch.equal(module.helper.generator.get_state(), state)
    assert module.helper.weight.grad is None


def test_what_cannot_be_copied_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="the attribute 'lock' of the module '0' cannot be copied"):
        estimate_module(model, torch.zeros(1, 2), device="cpu")


def test_a_recurrent_layer_on_cuda_is_said_to_be_estimated_too_low() -> None:
    model = nn.ModuleDict({"encoder": nn.LSTM(4, 8)})

    def value(model: nn.Module, batch: Tensor) -> Tensor:
        return model["encoder"](batch)[0].sum()  # type: ignore[index]

    with pytest.warns(UserWarning, match="cuDNN keeps for the backward pass of encoder"):
        estimate_module(model, torch.zeros(3, 2, 4), loss=value, device="cuda")


class Decoder(nn.Module):
    """Makes images of numbers, as the generator of a DCGAN does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.ConvTranspose2d(64, 64, 4), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.ConvTranspose2d(32, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
            nn.ConvTranspose2d(32, 3, 4, 2, 1),
        )

    def forward(self, numbers: Tensor) -> Tensor:
        return self.net(numbers)


class Segmentation(nn.Module):
    """A small U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 64, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(64, 32, 2, 2), nn.Conv2d(48, 2, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        wide = self.first(images).relu()
        deep = self.second(nn.functional.max_pool2d(wide, 2)).relu()
        return self.last(torch.cat((self.up(deep), wide), 1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, **settings: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, 64)
        self.layers = kind(64, 80, num_layers=2, batch_first=True, **settings)
        self.head = nn.Linear(80 * (2 if settings.get("bidirectional") else 1), 128)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(tokens))[0])


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(3000, 64, sparse=True), nn.Linear(64, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.tokens(tokens))


TOKENS = torch.arange(16 * 24).remainder(128).view(16, 24)
OTHERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "transposed convolutions": (Decoder, torch.rand(32, 64, 1, 1)),
    "convolutions of both kinds": (Segmentation, torch.rand(8, 3, 48, 48)),
    "LSTM": (Recurrent, TOKENS),
    "LSTM in two directions": (lambda: Recurrent(bidirectional=True), TOKENS),
    "GRU": (lambda: Recurrent(nn.GRU), TOKENS),
}


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).float().square().mean()


@pytest.mark.skipif(not CPU_OF_THE_FORMULAS, reason="oneDNN runs other kernels on this CPU")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", OTHERS)
def test_kernels_of_the_cpu_that_take_memory_themselves_are_counted(name: str, precision: str) -> None:
    make, data = OTHERS[name]
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said to be too low
        estimate = estimate_module(
            model, (data,), precision=precision, optimizer=torch.optim.AdamW, loss=mean_square, device="cpu"
        ).peak
    real = measured(model, (data,), torch.optim.AdamW, precision, mean_square)
    assert estimate.total_bytes == pytest.approx(real.total_bytes - real.other, rel=0.015)


@pytest.mark.skipif(not CPU_OF_THE_FORMULAS, reason="oneDNN runs other kernels on this CPU")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true"])
def test_so_are_the_scratch_buffers_of_products_and_attention_in_16_bits(precision: str) -> None:
    model, *batch = transformer()
    estimate = estimate_module(model, batch, precision=precision, optimizer=sgd, loss=loss, device="cpu").peak
    real = measured(model, batch, sgd, precision)
    assert estimate.total_bytes == pytest.approx(real.total_bytes - real.other, rel=0.01)


def test_none_of_it_is_counted_for_cuda_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device, whose own kernels are asked")
    model, data = nn.Conv2d(32, 64, 3, bias=False), torch.rand(8, 32, 16, 16)
    on_cuda = estimate_module(model, (data,), device="cuda").peak
    on_cpu = estimate_module(model, (data,), device="cpu").peak
    result = 4 * 8 * 64 * 14 * 14
    # Backward: the gradient of the result and that of the weights.
    assert on_cuda.temporaries + on_cuda.gradients <= result + model.weight.nbytes + 16
    assert on_cpu.total_bytes > on_cuda.total_bytes + result / 2


def test_indices_and_values_of_sparse_gradients_are_alive_until_they_are_cleared() -> None:
    model, batch = Lookup(), (torch.arange(16 * 24).view(16, 24),)

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    estimate = estimate_module(model, batch, optimizer=plain, loss=mean_square, device="cpu").peak
    real = measured(model, batch, plain, "32-true", mean_square)
    tables = sum(parameter.nbytes for parameter in model.parameters())
    assert estimate.total_bytes == pytest.approx(tables + 3 * 16 * 24 * 64 * 4, rel=0.15)  # not a table of gradients
    assert estimate.total_bytes == pytest.approx(real.total_bytes - real.other, rel=0.001)


class Tabulated(torch.optim.SGD):
    """Computes a table of its own when it is made, as optimizers in 8 bits do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.table = torch.linspace(0, 1, 8).tolist()


def test_an_optimizer_may_compute_when_it_is_made() -> None:
    model, *batch = transformer()
    step = estimate_module(model, batch, optimizer=Tabulated, loss=loss, device="cpu")
    assert step.peak == estimate_module(model, batch, optimizer=sgd, loss=loss, device="cpu").peak
