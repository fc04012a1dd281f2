"""
Estimated and measured memory of training steps
^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

One row per case: a model family (spiking, CNN, GPT, Llama-style), precision, optimizer, with or without checkpointing.
The estimate is made from the module before anything is trained, on fake tensors; then the same step runs for real::

    python benchmarks/estimates.py
    python benchmarks/estimates.py --device cuda --json estimates.json

The step is Lightning's: forward, ``zero_grad``, backward, optimizer step, and the second one counts.

Columns
    predicted_bytes      peak by ``lightning_memopt.estimate_memory``
    measured_bytes       peak by ``measure_memory``, without bytes that are no part of the training
    rel_error            ``predicted_bytes / measured_bytes - 1``
    attributed           share of the measured peak that has a consumer other than "other"
    accelerate_bytes     what ``accelerate estimate-memory`` says of training with Adam; it knows no activations
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from dense_models import GPT, GPTBlock, keep_state, never_chunk, next_token_loss, split_gpt_block, split_into_layers
from models import Benchmark, build
from reporting import (
    check_device,
    console_of_width,
    environment,
    escaped,
    print_environment,
    version_of,
    write_document,
)
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memopt import estimate_memory
from lightning_memopt.checkpointing import checkpoint_module
from lightning_memopt.measuring import measure_memory

COLUMNS = ("case", "predicted_bytes", "measured_bytes", "rel_error", "attributed", "accelerate_bytes", "error")
FAMILIES = ("spiking", "cnn", "gpt", "llama")
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
OPTIMIZERS = ("AdamW", "SGD", "Lion", "Adafactor", "AdamW8bit")
MEDIAN_GOAL, LARGEST_GOAL, ATTRIBUTED_GOAL = 0.005, 0.02, 0.99
# Dtypes as accelerate calls them.
_DTYPES = {"32-true": "float32", "bf16-mixed": "bfloat16", "bf16-true": "bfloat16"}


@dataclass(frozen=True)
class Case:
    """One training step."""

    family: str
    precision: str
    optimizer: str = "AdamW"
    checkpointed: bool = False

    @property
    def name(self) -> str:
        treatment = "checkpointed" if self.checkpointed else "plain"
        return f"{self.family}, {self.precision}, {self.optimizer}, {treatment}"


@dataclass(frozen=True)
class Row:
    """One line of the table; numbers are ``None`` where ``error`` says why there are none."""

    case: str
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    rel_error: float | None = None
    attributed: float | None = None
    accelerate_bytes: int | None = None
    error: str | None = None
    predicted: dict[str, int] | None = None
    measured: dict[str, int] | None = None
    estimate_s: float | None = None


def all_cases() -> list[Case]:
    """Every family in every precision with AdamW, plain and checkpointed; the other optimizers on the GPT."""
    cases = [Case(f, p, checkpointed=c) for f in FAMILIES for p in PRECISIONS for c in (False, True)]
    return cases + [Case("gpt", p, o) for o in OPTIMIZERS[1:] for p in ("32-true", "bf16-true")]


class RotaryAttention(nn.Module):
    """Causal attention with rotary positions (Su et al. 2021) and fewer heads of keys and values than of queries."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.size, bias=False)
        self.value = nn.Linear(width, kv_heads * self.size, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, width = x.shape
        query = self.query(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        key = self.key(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        value = self.value(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        query, key = (_turned(part, *turns) for part in (query, key))
        groups = self.heads // self.kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine.to(x.dtype) + torch.cat((-second, first), dim=-1) * sine.to(x.dtype)


class LlamaBlock(nn.Module):
    """Pre-norm block with RMSNorm and SwiGLU (Touvron et al. 2023)."""

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=1e-5)
        self.attention = RotaryAttention(width, heads, kv_heads)
        self.norm2 = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), turns)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Decoder with rotary positions and an output layer of its own."""

    def __init__(self, *, vocabulary: int, length: int, width: int, heads: int, kv_heads: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, width * 8 // 3) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(length).float(), 10000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, (self.cosine, self.sine))
        return self.head(self.norm(x))


def decoder(family: str, size: str, seed: int = 0) -> Benchmark:
    """A GPT or a Llama-style decoder, and a batch of random tokens."""
    vocabulary, length, width, heads, depth, batch_size = {
        "full": (32000, 1024, 1024, 16, 12, 8),
        "small": (2048, 256, 384, 6, 4, 4),
        "tiny": (64, 16, 48, 4, 2, 2),
    }[size]
    torch.manual_seed(seed)
    tokens = torch.randint(vocabulary, (batch_size, length + 1))
    sizes = {"vocabulary": vocabulary, "length": length, "width": width, "heads": heads, "depth": depth}
    is_llama = family == "llama"
    return Benchmark(
        name=family,
        description=f"{family}, {depth} blocks, width {width}, {heads} heads, {batch_size} x {length} tokens",
        model=Llama(**sizes, kv_heads=heads // 2) if is_llama else GPT(**sizes),
        batch=(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        loss=next_token_loss,
        targets=(LlamaBlock if is_llama else GPTBlock,),
        split_fn=split_into_layers if is_llama else split_gpt_block,
        can_chunk=never_chunk,
        reset=keep_state,
        full_precision="bf16",
    )


class Lion(Optimizer):
    """The sign of an interpolated momentum (Chen et al. 2023), where lion-pytorch is not installed."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum, gradient = state["exp_avg"], parameter.grad
                parameter.add_(momentum.lerp(gradient, 1 - first).sign_(), alpha=-group["lr"])
                momentum.lerp_(gradient, 1 - second)


def optimizer_class(name: str) -> Callable[[Any], Optimizer]:
    """What makes the optimizer ``name`` of parameters.

    Raises:
        ImportError: AdamW8bit needs bitsandbytes.
    """
    if name == "SGD":
        return lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    if name == "Lion":
        try:
            from lion_pytorch import Lion as LionOfTheLibrary
        except ImportError:
            return Lion
        return LionOfTheLibrary
    if name == "AdamW8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit
    return getattr(torch.optim, name)


def build_family(family: str, size: str) -> Benchmark:
    """The benchmark model of a family."""
    if family in ("gpt", "llama"):
        return decoder(family, size)
    return build({"spiking": "block", "cnn": "resnet"}[family], size=size)


def run(case: Case, *, device: torch.device, size: str) -> Row:
    """Estimate and measure one case."""
    try:
        make = optimizer_class(case.optimizer)
        benchmark = build_family(case.family, size)
    except ImportError as error:
        return Row(case.name, error=str(error))
    model = benchmark.model
    if case.checkpointed:
        for module in model.modules():
            if isinstance(module, benchmark.targets):
                checkpoint_module(module)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        benchmark.reset(model)
        return benchmark.loss(model, batch)

    model.train()
    begin = time.perf_counter()
    try:
        estimate = estimate_memory(
            model, benchmark.batch, precision=case.precision, optimizer=make, loss=loss, device=device
        )
    except Exception as error:  # a row for each case, whatever a library does with fake tensors
        return Row(case.name, error=f"{type(error).__name__}: {error}")
    estimate_s = time.perf_counter() - begin
    accelerate_bytes = _by_accelerate(model, case)
    measured = _measured(benchmark, case, make, loss, device)
    own = measured.total_bytes - measured.other
    return Row(
        case=case.name,
        predicted_bytes=estimate.peak_bytes,
        measured_bytes=own,
        rel_error=estimate.peak_bytes / own - 1,
        attributed=1 - measured.other / measured.total_bytes,
        accelerate_bytes=accelerate_bytes,
        predicted=estimate.peak.consumers(),
        measured=measured.consumers(),
        estimate_s=estimate_s,
    )


def _measured(
    benchmark: Benchmark, case: Case, make: Callable[[Any], Optimizer], loss: Any, device: torch.device
) -> Any:
    model, batch = benchmark.model.to(device), [tensor.to(device) for tensor in benchmark.batch]
    object.__setattr__(benchmark, "batch", ())  # the original is no part of the step
    default = torch.get_default_dtype()
    if case.precision == "bf16-true":
        model.bfloat16()
        batch = [tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in batch]
        torch.set_default_dtype(torch.bfloat16)
    optimizer = make(model.parameters())

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=case.precision == "bf16-mixed"):
            value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        del value
        optimizer.step()

    try:
        step()
        report = measure_memory(step, device=device, model=model, optimizer=optimizer, batch=batch)
    finally:
        torch.set_default_dtype(default)
    benchmark.reset(model)  # neurons hold the graph of their last step
    assert report.breakdown is not None
    return report.breakdown.peak


def _by_accelerate(model: nn.Module, case: Case) -> int | None:
    """Peak by accelerate's own rule, where it applies: Adam."""
    if case.optimizer != "AdamW" or version_of("accelerate") is None:
        return None
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    size, _ = calculate_maximum_sizes(model)
    return int(max(estimate_training_usage(size, _DTYPES[case.precision]).values()))


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors and attribution over all rows that have numbers."""
    errors = [abs(row.rel_error) for row in rows if row.rel_error is not None]
    attributed = [row.attributed for row in rows if row.attributed is not None]
    if not errors:
        return {"cases": 0}
    return {
        "cases": len(errors),
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "least_attributed": min(attributed),
    }


def table(rows: Sequence[Row], title: str) -> Table:
    """The rows as rich prints them."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("case", no_wrap=True)
    for column in COLUMNS[1:6]:
        table.add_column(column, justify="right")
    without = "not installed" if version_of("accelerate") is None else "does not apply"
    for row in rows:
        if row.error is not None:
            table.add_row(row.case, "-", "-", "-", "-", "-")
            continue
        table.add_row(
            row.case,
            f"{row.predicted_bytes:,}",
            f"{row.measured_bytes:,}",
            f"{100 * (row.rel_error or 0):+.3f} %",
            f"{100 * (row.attributed or 0):.2f} %",
            without if row.accelerate_bytes is None else f"{row.accelerate_bytes:,}",
        )
    return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Estimated and measured memory of training steps.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=FAMILIES)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--quick", action="store_true", help="tiny models: a smoke test, no figures")
    options = parser.parse_args(arguments)
    check_device(parser, options.device)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = console_of_width(130)
    device = torch.device(options.device)
    size = "tiny" if options.quick else "full" if options.device == "cuda" else "small"
    cases = [case for case in all_cases() if case.family in options.family]
    rows = []
    with console.status("estimates") as status:
        for case in cases:
            status.update(case.name)
            rows.append(run(case, device=device, size=size))
            gc.collect()
    console.print(table(rows, f"one training step, {options.device}, {size} models"))
    for row in rows:
        if row.error is not None:
            console.print(f"{row.case}: {escaped(row.error)}")
    found = summary(rows)
    if found["cases"]:
        console.print(
            f"{found['cases']} cases: |error| median {100 * found['median_error']:.3f} %, largest "
            f"{100 * found['largest_error']:.3f} %; at least {100 * found['least_attributed']:.2f} % attributed"
        )
    about = environment(device)
    print_environment(console, about)
    if options.json is not None:
        write_document(
            {"size": size, **about, "summary": found, "columns": COLUMNS, "rows": [asdict(row) for row in rows]},
            options.json,
        )
        console.print(f"wrote {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
