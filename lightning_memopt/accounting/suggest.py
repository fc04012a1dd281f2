"""
What would save memory, and what it costs
=========================================

:func:`suggest` estimates a training again with one setting changed at a time. What changes nothing but the order of
rounding comes first, then what costs time, then what changes the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from rich.table import Table
from rich.text import Text
from torch import nn

from lightning_memopt.accounting.estimate import FUSED, Training, estimate_memory, estimate_transformer
from lightning_memopt.accounting.optimizers import optimizer_row, optimizer_state_bytes
from lightning_memopt.accounting.transformer import Transformer, precision_of
from lightning_memopt.checkpointing import checkpoint_module
from lightning_memopt.checkpointing.region import Treatment
from lightning_memopt.measuring.amounts import format_bytes
from lightning_memopt.measuring.consumers import MemoryEstimate
from lightning_memopt.observing.regions import find_targets

__all__ = ["Price", "Suggestion", "checkpoint_blocks", "suggest", "suggestion_table"]

Price = Literal["nothing", "time", "accuracy"]
_Change = tuple[str, Price, Callable[[], int], str]
"""Its words, its price, what gives the peak with it, and its caveat."""
_MIXED = "products in 16 bits, weights stay in 32; faster"
_TRUE = "weights and states in 16 bits: updates below 1/256 of a weight are lost; faster"
_SMALLER_STATES = ("bitsandbytes.AdamW8bit", "torchao.AdamW8bit", "Lion", "torchao.AdamW4bit", "Adafactor")
_GIB = 2**30


@dataclass(frozen=True)
class Suggestion:
    """One change of a training and the bytes that it saves at the peak."""

    change: str
    """What to set, in words."""
    price: Price
    """What is at risk: ``nothing`` beyond rounding, ``time``, or ``accuracy`` (the training is another one)."""
    saves_bytes: int
    """Of the peak, on each device."""
    peak_bytes: int
    """The peak with this change alone."""
    caveat: str
    """What to know before."""

    def __str__(self) -> str:
        return f"{self.change}: saves {format_bytes(self.saves_bytes)}, costs {self.price} ({self.caveat})"

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, with GiB beside the bytes."""
        return {**asdict(self), "saves_gib": round(self.saves_bytes / _GIB, 3)}


def suggest(model: Any, example: Any = None, **settings: Any) -> tuple[Suggestion, ...]:
    """Return what would lower the peak of a training, the cheapest first.

    Args:
        model: a transformer and its batch, in numbers; or any module or ``LightningModule``.
        example: with a module: one batch.
        settings: how it is trained now, as :func:`estimate_memory` takes it.

    Returns:
        One suggestion per change that saves anything, each estimated alone: first those that cost nothing, then those
        that cost time, then those that change the training; of the same price, the one that saves most first. Of a
        module: recomputation of its blocks, precision, and optimizers with less state, which come from the table of
        optimizers and not from a step of theirs.

    Raises:
        TypeError: ``model`` is something else, or a setting is unknown.
        ValueError: a value is unknown (the message lists what is accepted), or a module without an example.

    Example:
        >>> from lightning_memopt.accounting.transformer import TRANSFORMERS
        >>> found = suggest(TRANSFORMERS["llama-2-7b"], precision="bf16-mixed")
        >>> [(each.change, each.price, round(each.saves_bytes / 2**30)) for each in found][:2]
        [("checkpointing='recompute'", 'time', 16), ("checkpointing='recompute_cheap'", 'time', 7)]
        >>> layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4), num_layers=6)
        >>> found = suggest(layers, torch.empty(128, 32, 64), optimizer=torch.optim.AdamW, device="cpu")
        >>> found[0].change, found[0].price
        ('MemoryOptimization()', 'time')
    """
    now = estimate_memory(model, example, **settings)
    if isinstance(model, Transformer):
        changes = _changes_of_description(model, Training(**settings))
    else:
        changes = _changes_of_module(model, example, settings, now)
    found = []
    for change, price, peak_with_it, caveat in changes:
        try:
            peak = peak_with_it()
        except ValueError:  # these sizes cannot be had that way
            continue
        if peak < now.peak_bytes:
            found.append(Suggestion(change, price, now.peak_bytes - peak, peak, caveat))
    order: dict[Price, int] = {"nothing": 0, "time": 1, "accuracy": 2}
    return tuple(sorted(found, key=lambda suggestion: (order[suggestion.price], -suggestion.saves_bytes)))


def checkpoint_blocks(model: nn.Module, treatment: Treatment = "recompute") -> None:
    """Checkpoint the repeated blocks of ``model``, in place.

    Raises:
        ValueError: it has none.
    """
    for region in find_targets(model).regions:
        checkpoint_module(region.module, treatment=treatment)


def suggestion_table(suggestions: Sequence[Suggestion]) -> Table:
    """The suggestions as a table, each with its caveat on the lines below it; it fits into 80 columns."""
    table = Table(title="Each alone, the cheapest first", title_justify="left", show_lines=True)
    # What is to be set is never broken nor cut; the caveat takes as many lines as it needs.
    table.add_column("change", overflow="fold", min_width=max((len(each.change) for each in suggestions), default=0))
    table.add_column("saves\n[GiB]", justify="right", no_wrap=True)
    table.add_column("peak\n[GiB]", justify="right", no_wrap=True)
    table.add_column("costs", no_wrap=True)
    for each in suggestions:
        saves, peak = (f"{size / _GIB:.2f}" for size in (each.saves_bytes, each.peak_bytes))
        change = Text.assemble(each.change, "\n", (each.caveat, "dim"))
        table.add_row(change, saves, peak, each.price)
    return table


def _changes_of_module(
    module: Any, example: Any, settings: Mapping[str, Any], now: MemoryEstimate
) -> Iterator[_Change]:
    def peak(**changed: Any) -> int:
        return estimate_memory(module, example, **{**settings, **changed}).peak_bytes

    if settings.get("treat") is None:
        caveat = "one more forward pass of each repeated block; same gradients"
        yield "MemoryOptimization()", "time", partial(peak, treat=checkpoint_blocks), caveat
        cheap = partial(peak, treat=partial(checkpoint_blocks, treatment="recompute_cheap"))
        caveat = "on each repeated block: no product runs again; same gradients"
        yield "checkpoint_module(block, treatment='recompute_cheap')", "time", cheap, caveat

    precision = precision_of(settings.get("precision", "32-true"))
    if precision.name == "32-true":
        yield "precision='bf16-mixed'", "accuracy", partial(peak, precision="bf16-mixed"), _MIXED
    if precision.parameter == 4:
        yield "precision='bf16-true'", "accuracy", partial(peak, precision="bf16-true"), _TRUE
    state = now.peak.optimizer_state
    if not state or not isinstance(module, nn.Module):
        return
    shapes = [tuple(parameter.shape) for parameter in module.parameters() if parameter.requires_grad]
    dtype = torch.float32 if precision.parameter == 4 else torch.bfloat16
    for name in _SMALLER_STATES:
        less = optimizer_state_bytes(name, shapes, dtype) - state
        yield f"optimizer={name!r}", "accuracy", partial(int, now.peak_bytes + less), optimizer_row(name).caveat


def _changes_of_description(model: Transformer, training: Training) -> Iterator[_Change]:
    def peak(model: Transformer, training: Training) -> int:
        return estimate_transformer(model, training).peak_bytes

    for change, price, other, trained, caveat in _other_trainings(model, training):
        yield change, price, partial(peak, other, trained), caveat


def _other_trainings(model: Transformer, training: Training) -> Iterator[tuple[str, Price, Transformer, Training, str]]:
    """Each change: its words, its price, the model and training it leads to, and its caveat."""
    precision = precision_of(training.precision)
    sharded = training.strategy.startswith("fsdp")

    if model.attention == "eager":
        flash = replace(model, attention="sdpa")
        yield "attention='sdpa'", "nothing", flash, training, "no attention weights to look at; other rounding"
    if not training.fused and optimizer_row(training.optimizer).name in FUSED:
        fused = replace(training, fused=True)
        yield "fused=True", "nothing", model, fused, "other rounding of the last digit; needs floating point parameters"
    if training.strategy in ("auto", "ddp") and training.replicas > 1:
        views = replace(training, strategy="ddp_gradient_as_bucket_view")
        caveat = "gradients are views: do not detach_() them; of Lightning, DDPStrategy(gradient_as_bucket_view=True)"
        yield "strategy='ddp_gradient_as_bucket_view'", "nothing", model, views, caveat

    if training.checkpointing == "keep":
        cheap = replace(training, checkpointing="recompute_cheap")
        caveat = "norms and activations run again in the backward pass, no product; same gradients"
        yield "checkpointing='recompute_cheap'", "time", model, cheap, caveat
    if training.checkpointing != "recompute":
        again = replace(training, checkpointing="recompute")
        caveat = "one more forward pass of each block, about a third of the step's time; same gradients"
        yield "checkpointing='recompute'", "time", model, again, caveat
    if not sharded and training.replicas > 1:
        for strategy, words in (
            ("fsdp_shard_grad_op", "weights are gathered once a step"),
            ("fsdp_full_shard", "weights are gathered in the forward and in the backward pass"),
        ):
            shared = replace(training, strategy=strategy)
            yield f"strategy={strategy!r}", "time", model, shared, f"{words}; checkpoints of the strategy's own kind"
    if training.strategy == "fsdp_shard_grad_op":
        shared = replace(training, strategy="fsdp_full_shard")
        yield "strategy='fsdp_full_shard'", "time", model, shared, "weights are gathered once more, for backward"
    if training.tensor_parallel > 1 and not training.sequence_parallel:
        shared = replace(training, sequence_parallel=True)
        yield "sequence_parallel=True", "time", model, shared, "norms and dropout have to be parallelized by sequence"
    if model.batch_size > 1:
        # The largest equal parts: halves, of an odd batch thirds, ...
        parts = next(n for n in range(2, model.batch_size + 1) if model.batch_size % n == 0)
        part = replace(model, batch_size=model.batch_size // parts)
        more = replace(training, accumulate_grad_batches=parts * training.accumulate_grad_batches)
        caveat = f"{parts} times the passes for a step; the same gradients where the loss is a mean over equal batches"
        change = f"batch_size={part.batch_size}, accumulate_grad_batches={more.accumulate_grad_batches}"
        yield change, "time", part, more, caveat

    if precision.name == "32-true":
        mixed = replace(training, precision="bf16-mixed")
        yield "precision='bf16-mixed'", "accuracy", model, mixed, _MIXED
    if precision.parameter == 4:
        true = replace(training, precision="bf16-true")
        yield "precision='bf16-true'", "accuracy", model, true, _TRUE
    current = optimizer_row(training.optimizer).name
    for name in _SMALLER_STATES:
        row = optimizer_row(name)
        if name == current or (sharded and row.library == "bitsandbytes"):
            continue
        other = replace(training, optimizer=name, fused=False)
        yield f"optimizer={name!r}", "accuracy", model, other, row.caveat
