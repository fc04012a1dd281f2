"""
Where the bytes of a training step will go
==========================================

:func:`estimate_memory` adds what each consumer takes, at the moments of one step of Lightning's automatic optimization:
forward, ``zero_grad``, backward, optimizer. In that order the gradients of the step before are alive in the forward
pass.

What no formula here knows: the CUDA context (some 0.5 GiB beside the allocator), the allocator's rounding to 512 bytes
and its fragmentation, workspaces of cuBLAS.

Sources: optimizer state, gradients and their sharding: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models"; gathering and prefetching: Zhao et al. 2023, "PyTorch FSDP"; activations:
:mod:`~lightning_memopt.accounting.transformer`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, overload

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memopt.accounting.estimate_module import estimate_module
from lightning_memopt.accounting.optimizers import optimizer_row
from lightning_memopt.accounting.tape import Checkpointing, replay
from lightning_memopt.accounting.transformer import (
    Precision,
    Transformer,
    buffer_bytes,
    input_bytes,
    parameter_shapes,
    precision_of,
    training_tape,
)
from lightning_memopt.measuring.consumers import MemoryBreakdown, MemoryEstimate, MemoryPhase, added, highest

__all__ = ["STRATEGIES", "Training", "estimate_memory", "estimate_transformer"]

Strategy = Literal[
    "auto",
    "ddp",
    "ddp_gradient_as_bucket_view",
    "fsdp_full_shard",
    "fsdp_shard_grad_op",
    "fsdp_hybrid_shard",
]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
"""``auto`` is one device, or DDP on several, as in Lightning."""

_ONE = ("auto", "ddp", "ddp_gradient_as_bucket_view")
FUSED = ("Adam", "Adam(amsgrad)", "AdamW", "AdamW(amsgrad)", "Adagrad", "SGD", "SGD(momentum)")


@dataclass(frozen=True)
class Training:
    """How a model is trained, as far as memory depends on it.

    Raises:
        ValueError: a value is unknown, or values do not go together; the message says what is accepted.
    """

    precision: str | int = "32-true"
    """As of Lightning's Trainer."""
    optimizer: str = "AdamW"
    """A name of the optimizer table, :data:`~lightning_memopt.accounting.optimizers.OPTIMIZERS`."""
    strategy: str = "auto"
    """One of :data:`STRATEGIES`."""
    devices: int = 1
    """All of them, on all nodes."""
    devices_per_node: int | None = None
    """For ``fsdp_hybrid_shard``, which shards within a node."""
    tensor_parallel: int = 1
    """Devices that share each matrix."""
    sequence_parallel: bool = False
    """These share the residual stream, too (Korthikanti et al. 2022)."""
    checkpointing: Checkpointing = "keep"
    """Treatment of each block: ``keep``, ``recompute_cheap`` or ``recompute``, as ``checkpoint_module`` takes it."""
    accumulate_grad_batches: int = 1
    fused: bool = False
    """The optimizer's step is one kernel without temporaries."""
    gradients_in_forward: bool = True
    """Gradients of the step before are alive in the forward pass: Lightning's automatic optimization clears them after
    it. ``False`` for loops that clear them first."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What the kernels are those of."""

    def __post_init__(self) -> None:
        precision_of(self.precision)
        row = optimizer_row(self.optimizer)
        for name, accepted in (
            ("strategy", STRATEGIES),
            ("checkpointing", get_args(Checkpointing)),
            ("device", ("cuda", "cpu")),
        ):
            value = getattr(self, name)
            if value not in accepted:
                raise ValueError(f"{name}={value!r} is not accepted; choose one of {', '.join(map(repr, accepted))}")
        for name in ("sequence_parallel", "fused", "gradients_in_forward"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} is not accepted; choose one of True, False")
        for name in ("devices", "devices_per_node", "tensor_parallel", "accumulate_grad_batches"):
            value = getattr(self, name)
            if value is None and name == "devices_per_node":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} is not accepted: it is a whole number from 1 on")
        if self.devices % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel={self.tensor_parallel} does not divide devices={self.devices}: each matrix is shared "
                "by a group of so many devices"
            )
        if self.strategy == "fsdp_hybrid_shard" and (
            self.devices_per_node is None
            or self.devices % self.devices_per_node
            or self.devices_per_node % self.tensor_parallel
        ):
            raise ValueError(
                f"strategy='fsdp_hybrid_shard' shards within a node: devices_per_node={self.devices_per_node} has to "
                f"divide devices={self.devices} and be a multiple of tensor_parallel={self.tensor_parallel}"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "sequence_parallel=True needs tensor_parallel of 2 or more: these devices share the sequence"
            )
        if self.fused and row.name not in FUSED:
            raise ValueError(f"fused=True is not accepted with {row.name}; torch has it for {', '.join(FUSED)}")

    @property
    def shards(self) -> int:
        """Devices that share optimizer state, gradients and parameters."""
        if self.strategy in _ONE:
            return 1
        across = self.devices_per_node if self.strategy == "fsdp_hybrid_shard" else self.devices
        assert across is not None
        return across // self.tensor_parallel

    @property
    def replicas(self) -> int:
        """Groups of devices that hold the same parameters and see different batches."""
        return self.devices // self.tensor_parallel


@overload
def estimate_memory(
    model: Transformer,
    *,
    precision: str | int = "32-true",
    optimizer: str = "AdamW",
    strategy: str = "auto",
    devices: int = 1,
    devices_per_node: int | None = None,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    checkpointing: Checkpointing = "keep",
    accumulate_grad_batches: int = 1,
    fused: bool = False,
    gradients_in_forward: bool = True,
    device: Literal["cuda", "cpu"] = "cuda",
) -> MemoryEstimate: ...


@overload
def estimate_memory(
    model: nn.Module | Callable[[], nn.Module],
    example: Any,
    *,
    precision: str | int = "32-true",
    optimizer: Optimizer | Sequence[Optimizer] | Callable[[Any], Optimizer] | None = None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    device: torch.device | str | None = None,
    treat: Callable[[nn.Module], object] | None = None,
    time_limit_s: float | None = None,
) -> MemoryEstimate: ...


def estimate_memory(model: Any, example: Any = None, **settings: Any) -> MemoryEstimate:
    """Return the bytes that one training step takes, by consumer and moment, without running it.

    Args:
        model: a :class:`~lightning_memopt.accounting.transformer.Transformer`, which describes one and its batch in
            numbers; or any module or ``LightningModule``, or a function that makes one, whose step is followed with
            tensors that have no memory.
        example: with a module: one batch, see :func:`~lightning_memopt.accounting.estimate_module.estimate_module`.
        settings: of a description the fields of :class:`Training` (``precision``, ``optimizer`` by name, ``strategy``,
            ``devices``, ``checkpointing``, ...); of a module the arguments of ``estimate_module`` (``precision``,
            ``optimizer``, ``loss``, ``device``, ``treat``, ...).

    Returns:
        Bytes on one device: at the peak and at the ends of forward, backward and optimizer step.

    Raises:
        TypeError: ``model`` is something else, or there is no setting of that name.
        ValueError: an unknown value (the message lists what is accepted), or a module without an example.

    Example:
        >>> from lightning_memopt.accounting.transformer import TRANSFORMERS
        >>> step = estimate_memory(TRANSFORMERS["llama-2-7b"], precision="bf16-mixed")
        >>> step.peak.parameters == 4 * 6738415616, step.peak_phase
        (True, 'forward')
        >>> round((step.peak.parameters + step.peak.gradients + step.peak.optimizer_state) / 6738415616)
        16
        >>> round(step.peak.autocast_copies / 6738415616, 2)  # of all weights but the embedding
        1.96
        >>> layer = torch.nn.Linear(1000, 1000, bias=False)
        >>> step = estimate_memory(layer, torch.empty(8, 1000), optimizer=torch.optim.AdamW)
        >>> step.peak.parameters, step.peak.gradients
        (4000000, 4000000)
    """
    if isinstance(model, Transformer):
        if example is not None:
            raise TypeError("estimate_memory() of a Transformer takes no example: its batch is part of the description")
        _check_settings(settings, [entry.name for entry in fields(Training)])
        return estimate_transformer(model, Training(**settings))
    if not callable(model):  # modules are
        raise TypeError(
            "estimate_memory() takes a lightning_memopt.accounting.Transformer, a module, or a function that makes "
            f"one; got {type(model).__name__}"
        )
    if example is None:
        raise ValueError(
            f"estimate_memory() of a {type(model).__name__} needs an example, one batch as its training_step, its loss "
            "or its forward takes it. Without one, describe a transformer by lightning_memopt.accounting.Transformer"
        )
    _check_settings(settings, [*inspect.signature(estimate_module).parameters][2:])
    return estimate_module(model, example, **settings)


def _check_settings(settings: Mapping[str, object], accepted: Sequence[str]) -> None:
    unknown = [name for name in settings if name not in accepted]
    if unknown:
        raise TypeError(
            f"estimate_memory() has no setting {unknown[0]!r} for this model; it takes {', '.join(accepted)}"
        )


def estimate_transformer(model: Transformer, training: Training) -> MemoryEstimate:
    """What :func:`estimate_memory` does for a description.

    Raises:
        ValueError: the sizes cannot be shared by so many devices, or torch has no such kernel.
    """
    _check_division(model, training)
    if training.device == "cpu" and model.attention == "sdpa" and model.dropout:
        raise ValueError(
            "attention='sdpa' with dropout has no fused kernel on the CPU, where torch multiplies it out: ask for "
            "attention='eager', dropout=0 or device='cuda'"
        )
    precision = precision_of(training.precision)
    sharded = training.strategy not in _ONE
    shapes = parameter_shapes(model, training.tensor_parallel)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    count = sum(sizes.values())
    gradients = _share(count * precision.parameter, training.shards)
    tape = training_tape(
        model,
        precision,
        device=training.device,
        tensor_parallel=training.tensor_parallel,
        sequence_parallel=training.sequence_parallel,
        cast_by_autocast=not sharded,
    )
    accumulates = training.accumulate_grad_batches > 1
    step = replay(
        tape,
        training.checkpointing,
        gradients_before=gradients if accumulates or training.gradients_in_forward else 0,
        accumulates=accumulates,
        gradient_shards=training.shards,
    )
    row = optimizer_row(training.optimizer)
    # FSDP shards each parameter by rows, so that every device holds a part of each.
    state = (
        _share(sum(row.state(shape, precision.parameter) for shape in shapes.values()), training.shards)
        + row.shared_bytes
    )
    always = {
        "parameters": _share(count * precision.parameter, training.shards),
        "optimizer_state": state,
        "buffers": buffer_bytes(model, precision),
        "inputs": input_bytes(model),
    }
    forward_extra, backward_extra = _communication(training, precision, sizes, gradients)
    temporaries = 0 if training.fused else _step_temporaries(training, precision, sizes)
    optimizer_step = MemoryBreakdown(
        gradients=gradients,
        temporaries=temporaries,
        communication=backward_extra if training.strategy in _ONE else 0,
    )
    forward_end, forward, backward, backward_end = (
        added(moment, communication=extra, **always)
        for moment, extra in (
            (step.forward_end, forward_extra),
            (step.forward_peak, forward_extra),
            (step.backward_peak, backward_extra),
            (step.backward_end, optimizer_step.communication),
        )
    )
    optimizer_step = added(optimizer_step, **always)
    moments = {
        "forward": forward,
        "backward": backward,
        "optimizer step": optimizer_step,
        "forward end": forward_end,
        "backward end": backward_end,
    }
    if training.strategy == "ddp_gradient_as_bucket_view":
        # Gradients are views of the buckets, which are never freed.
        moments = {name: replace(moment, gradients=gradients) for name, moment in moments.items()}
    phases = tuple(MemoryPhase(name, moments[name]) for name in MemoryEstimate.MOMENTS)
    phase, peak = highest((name, moments[name]) for name in ("forward", "backward", "optimizer step"))
    return MemoryEstimate(phases, peak, phase, _subject(model, training, precision, row.name))


def _check_division(model: Transformer, training: Training) -> None:
    split = training.tensor_parallel
    shared = {
        "heads": model.heads,
        "kv_heads": model.key_heads,
        "feed_forward": model.inner_width,
        "vocabulary": model.vocabulary,
    }
    if training.sequence_parallel:
        shared["sequence_length"] = model.sequence_length
    odd = [f"{name}={size}" for name, size in shared.items() if size % split]
    if odd:
        most = math.gcd(*shared.values())
        accepted = [n for n in range(1, most + 1) if most % n == 0]
        raise ValueError(
            f"tensor_parallel={split} does not divide {', '.join(odd)}; accepted for these sizes are "
            f"{', '.join(map(str, accepted))}"
        )


def _communication(training: Training, precision: Precision, sizes: dict[str, int], gradients: int) -> tuple[int, int]:
    """Bytes in the forward pass, and in the backward pass."""
    if training.strategy in _ONE:
        # DDP's buckets are as large as the gradients and there from its construction on.
        copies = training.replicas > 1 and training.strategy != "ddp_gradient_as_bucket_view"
        return (gradients, gradients) if copies else (0, 0)
    everything = sum(sizes.values()) * precision.compute
    block = sum(size for name, size in sizes.items() if name.startswith("blocks.0.")) * precision.compute
    blocks = sum(size for name, size in sizes.items() if name.startswith("blocks.")) * precision.compute
    # The root's weights stay from forward to backward; of the blocks, one is used and the next one fetched.
    gathered = everything - blocks + min(blocks, 2 * block)
    if training.strategy == "fsdp_shard_grad_op":
        gathered = everything
    return gathered, gathered + block


def _step_temporaries(training: Training, precision: Precision, sizes: dict[str, int]) -> int:
    row = optimizer_row(training.optimizer)
    if training.device == "cuda" and row.takes_all_at_once:
        everything = sum(sizes.values()) * precision.parameter
        return int(row.step_copies * _share(everything, training.shards))
    return int(row.step_tensors * _share(max(sizes.values()) * precision.parameter, training.shards))


def _share(size: int, shards: int) -> int:
    return -(-size // shards)


def _subject(model: Transformer, training: Training, precision: Precision, optimizer: str) -> str:
    count = sum(map(math.prod, parameter_shapes(model).values()))
    on = f"{training.devices} device{'s' if training.devices > 1 else ''}, {training.strategy}"
    return (
        f"transformer of {count:,} parameters, {model.batch_size} x {model.sequence_length} tokens, {precision.name}, "
        f"{optimizer}, {training.checkpointing}, {on}; bytes on each device"
    )
