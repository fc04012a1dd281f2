"""
What to know when a step ran out of memory
==========================================

The error says how many bytes one operation asked for, not who holds the others. What is still knowable afterwards:

* the phase and the module, from the frames of the traceback;
* parameters, gradients, buffers, optimizer state and the batch, from the objects that own them, to the byte;
* activations, which autograd holds out of Python's sight: the same step runs once more on fake tensors, which need no
  memory, and says how large the whole step would have been and which modules hold most of it, within a time limit;
* from the same estimate, with the repeated blocks checkpointed, and with the activations scaled to smaller batches:
  what would have fitted; in the optimizer's step, where neither is there, what its own bytes depend on. In a validation
  nothing waits for a backward pass, and nothing is estimated.

Nothing in here may hide the error: whatever goes wrong is a line of the report.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_memopt.measuring.allocation_events import own_storages
from lightning_memopt.measuring.attribution import held_tensors, tensors_inside
from lightning_memopt.measuring.consumers import MemoryBreakdown, MemoryEstimate, highest

if TYPE_CHECKING:
    from lightning_memopt.callbacks.memory_optimization import MemoryOptimization

__all__ = ["report_out_of_memory"]

_TIME_LIMIT_S = 1.7  # of the estimates; what they do not finish is left out
_MIB = 2**20
_HOLDERS = 10
_OPTIMIZER, _VALIDATION, _ELSEWHERE = "optimizer step", "validation", "training, outside of a step"
_WORTHWHILE = 0.99  # of the peak; what saves less is no advice
_RECOMPUTE = "`MemoryOptimization(level=1)`"
_VALIDATION_ADVICE = (
    "A smaller batch of the validation data: nothing is stored for a backward pass, so recomputation does not help."
)
_BACKWARD_FILES = ("torch/autograd/__init__.py", "torch/autograd/graph.py")


@dataclass(frozen=True)
class _Place:
    """Where the error came from."""

    phase: str
    module: str

    def __str__(self) -> str:
        return f"in the {self.phase}" + (f", in `{self.module}`" if self.module else "")


def report_out_of_memory(
    trainer: Trainer,
    module: LightningModule,
    error: BaseException,
    batch: Any,
    batch_size_fn: Callable[[Any], int] | None = None,
) -> Path | None:
    """Write what is known of a step that ran out of memory, and warn with the gist of it.

    Args:
        trainer: whose optimizers, precision and loggers count.
        module: that was trained.
        error: as it was caught, with its traceback.
        batch: of the step; None outside of one.
        batch_size_fn: samples of the batch; None: the size of the first dimension of its first tensor.

    Returns:
        The file, None if none could be written.
    """
    deadline = time.perf_counter() + _TIME_LIMIT_S
    try:
        place = _place(trainer, module, error, batch)
        held = _held(module, trainer.optimizers, batch)
        device = trainer.strategy.root_device
        limit = _limit(device)
        lines = [*_facts(error, place, held, device, limit)]
        advice = [_VALIDATION_ADVICE] if place.phase == _VALIDATION else []
        if place.phase not in (_VALIDATION, _ELSEWHERE):
            with _old_objects_set_aside():
                estimate, why_not = _estimated(trainer, module, batch, deadline)
                samples = _samples(batch) if batch_size_fn is None else int(batch_size_fn(batch))
                advice = _advice(trainer, module, batch, samples, estimate, place, limit, deadline)
            lines += _step(estimate, why_not)
        path = _written(trainer, "\n".join([*lines, *_advised(advice)]) + "\n")
        snapshot = _snapshot(device, path)
        gist = f"out of memory {place}."
        if advice:
            gist += f" {advice[0]}"
        told = f" Report: {path}." if path is not None else ""
        told += f" Allocator snapshot: {snapshot}." if snapshot is not None else ""
        _warn(f"MemoryMonitor: {gist}{told}")
        return path
    except Exception:  # the error of the step is the one to be seen
        _warn(f"MemoryMonitor could not report on the memory of the step: {traceback.format_exc(limit=3)}")
        return None


def _warn(text: str) -> None:
    with contextlib.suppress(RuntimeWarning):  # where warnings are errors, the error of the step still goes first
        warnings.warn(text, RuntimeWarning, stacklevel=3)


@contextlib.contextmanager
def _old_objects_set_aside() -> Iterator[None]:
    """An estimate looks for garbage and tensors among its own objects, not among the millions of the training."""
    if gc.get_freeze_count():  # unfreezing would release what somebody else froze
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# ---------------------------------------------------------------------------------------------------------------------
# Facts


def _place(trainer: Trainer, model: nn.Module, error: BaseException, batch: Any) -> _Place:
    """The phase and the innermost module, by the functions that ran."""
    paths = {id(module): path for path, module in model.named_modules()}
    phase, path = "forward", ""
    for frame in _frames(error):
        owner, name = frame.f_locals.get("self"), frame.f_code.co_name
        if isinstance(owner, Optimizer) and name not in ("zero_grad",):
            phase, path = _OPTIMIZER, ""
        elif frame.f_code.co_filename.endswith(_BACKWARD_FILES):
            phase, path = "backward", ""
        elif owner is model and name == "training_step":
            phase, path = "forward", ""
        elif paths.get(id(owner)):
            path = paths[id(owner)]
            phase = "backward (recomputing)" if phase == "backward" else phase
    if trainer.validating or trainer.sanity_checking:
        phase = _VALIDATION
    elif batch is None:
        phase = _ELSEWHERE
    return _Place(phase, path)


def _frames(error: BaseException) -> Iterator[FrameType]:
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame
        step = step.tb_next


def _held(model: nn.Module, optimizers: list[Optimizer], batch: Any) -> dict[str, int]:
    """Bytes of what objects own, each storage once."""
    parameters = [*model.parameters()]
    owned: dict[str, list[Any]] = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters],
        "optimizer_state": [leaf for optimizer in optimizers for leaf in tree_leaves(list(optimizer.state.values()))],
        "buffers": [tensor for _, tensor in held_tensors(model)],
        "inputs": [*tensors_inside(batch, attributes=True)],
    }
    seen: set[int] = set()
    sizes = {}
    for consumer, tensors in owned.items():
        sizes[consumer] = 0
        for storage in (s for tensor in tensors if isinstance(tensor, Tensor) for s in own_storages(tensor)):
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                sizes[consumer] += storage.nbytes()
    return sizes


def _limit(device: torch.device) -> int | None:
    """Bytes that this process may hold on ``device``: what it holds and what is free."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(allowed, free + torch.cuda.memory_reserved(device))


def _facts(
    error: BaseException, place: _Place, held: Mapping[str, int], device: torch.device, limit: int | None
) -> Iterator[str]:
    yield f"Out of memory {place}"
    yield f"  {str(error).strip()}"
    yield ""
    yield "Alive when the error was caught [MiB]"
    for consumer, size in sorted(held.items(), key=lambda item: -item[1]):
        yield f"  {consumer.replace('_', ' '):<20} {size / _MIB:>12.3f}"
    if device.type == "cuda":
        rest = torch.cuda.memory_allocated(device) - sum(held.values())
        yield f"  {'activations and rest':<20} {rest / _MIB:>12.3f}"
    if limit is not None:
        yield f"  {'available at most':<20} {limit / _MIB:>12.3f}"
    yield ""


# ---------------------------------------------------------------------------------------------------------------------
# Estimates


def _estimated(
    trainer: Trainer, model: LightningModule, batch: Any, deadline: float
) -> tuple[MemoryEstimate | None, str]:
    """The whole step on fake tensors; or why there is no estimate."""
    try:
        estimate = _estimate(trainer, model, batch, deadline, optimizer=trainer.optimizers)
    except Exception as error:  # the step may need a Trainer, or values
        return None, f"{type(error).__name__}: {error}"
    return _with_gradients_kept(estimate) if trainer.accumulate_grad_batches > 1 else estimate, ""


def _estimate(
    trainer: Trainer, model: LightningModule, batch: Any, deadline: float, **arguments: Any
) -> MemoryEstimate:
    from lightning_memopt.accounting import estimate_memory

    left = deadline - time.perf_counter()
    if left <= 0:
        raise TimeoutError("there was no time left")
    device = trainer.strategy.root_device
    return estimate_memory(model, batch, precision=trainer.precision, device=device, time_limit_s=left, **arguments)


def _with_gradients_kept(estimate: MemoryEstimate) -> MemoryEstimate:
    """The same step between two others whose gradients it is added to: they are all there, all the time."""
    gradients = max(phase.breakdown.gradients for phase in estimate.phases)
    phases = tuple(replace(p, breakdown=replace(p.breakdown, gradients=gradients)) for p in estimate.phases)
    moments = [(estimate.peak_phase, replace(estimate.peak, gradients=gradients))]
    moments += [(phase.name.removesuffix(" end"), phase.breakdown) for phase in phases]
    peak_phase, peak = highest(moments)
    return replace(estimate, phases=phases, peak=peak, peak_phase=peak_phase)


def _peak_recomputed(
    trainer: Trainer, model: LightningModule, batch: Any, estimate: MemoryEstimate, deadline: float
) -> int | None:
    """The peak with all repeated blocks recomputed; None if there was no time.

    The step of the optimizers is the same as in ``estimate``, so it is not run again.
    """
    from lightning_memopt.accounting.suggest import checkpoint_blocks

    try:
        recomputed = _estimate(trainer, model, batch, deadline, optimizer=[], treat=checkpoint_blocks)
    except Exception:  # of the advice, not of the report
        return None
    if trainer.accumulate_grad_batches > 1:
        recomputed = _with_gradients_kept(recomputed)
    state = max(phase.breakdown.optimizer_state for phase in estimate.phases)
    steps = [phase.breakdown.total_bytes for phase in estimate.phases if phase.name == _OPTIMIZER]
    return max(recomputed.peak_bytes + state, *steps)


def _step(estimate: MemoryEstimate | None, why_not: str) -> Iterator[str]:
    if estimate is None:
        yield f"The whole step could not be estimated on fake tensors: {why_not}"
        yield ""
        return
    yield f"The whole step would take, by estimate, at its peak in the {estimate.peak_phase} [MiB]"
    for consumer, size in sorted(estimate.peak.consumers().items(), key=lambda item: -item[1]):
        if size:
            yield f"  {consumer.replace('_', ' '):<20} {size / _MIB:>12.3f}"
    yield f"  {'total':<20} {estimate.peak_bytes / _MIB:>12.3f}"
    yield ""
    yield "Modules that hold most activations there [MiB]"
    holders = sorted(estimate.peak.activations_by_module.items(), key=lambda item: -item[1])
    for path, size in holders[:_HOLDERS]:
        yield f"  {path or '(outside of modules)':<40} {size / _MIB:>12.3f}"
    yield ""


def _advice(
    trainer: Trainer,
    model: LightningModule,
    batch: Any,
    samples: int,
    estimate: MemoryEstimate | None,
    place: _Place,
    limit: int | None,
    deadline: float,
) -> list[str]:
    """What would need less where it ran out, the cheapest first."""
    if place.phase == _OPTIMIZER or (estimate is not None and estimate.peak_phase == _OPTIMIZER):
        return [*_optimizer_advice(trainer, estimate, limit)]
    accumulated = trainer.accumulate_grad_batches
    optimization = _optimization(trainer)
    unmeasured = f"{_RECOMPUTE} recomputes the repeated blocks, for one more forward of them."
    if estimate is None:
        advice = [unmeasured] if optimization is None else []
        if samples > 1:
            kept = f"`accumulate_grad_batches={accumulated * -(-samples // (samples // 2))}` keeps the effective batch"
            advice.append(f"A batch of {samples // 2} instead of {samples} samples stores half as much; {kept}.")
        return advice
    advice = []
    peak = _peak_recomputed(trainer, model, batch, estimate, deadline)
    if peak is None and optimization is None:
        advice.append(unmeasured)
    elif peak is not None and peak < _WORTHWHILE * estimate.peak_bytes:
        how = _RECOMPUTE
        if optimization is not None:
            planned = optimization.memory_budget
            how = "Recomputing all blocks" if planned is None else f"A `memory_budget` below {planned!r}"
        advice.append(
            f"{how} would lower the peak from {estimate.peak_bytes / _MIB:.1f} to {peak / _MIB:.1f} MiB by estimate"
            f"{_fits(peak, limit)}, for at most one more forward of the blocks."
        )
        if limit is not None and peak < limit < estimate.peak_bytes:
            share = f"{limit * 95 // 100 // _MIB} MiB"
            advice.append(f'`MemoryOptimization(memory_budget="{share}")` finds the fastest way to fit.')
    by_batch = _by_batch(estimate.peak)
    if samples > 1 and by_batch:
        fitting = samples // 2
        if limit is not None:
            fitting = min(fitting, int(samples * max(0, limit - estimate.peak_bytes + by_batch) // by_batch))
        peak = _with_samples(estimate, fitting, samples)
        if fitting >= 1 and peak < _WORTHWHILE * estimate.peak_bytes:
            advice.append(
                f"A batch of {fitting} instead of {samples} samples would take about {peak / _MIB:.1f} MiB"
                f"{_fits(peak, limit)}; `accumulate_grad_batches={accumulated * -(-samples // fitting)}` keeps the "
                "effective batch."
            )
    return advice


def _optimization(trainer: Trainer) -> MemoryOptimization | None:
    """The callback that has already done something, if there is one."""
    from lightning_memopt.callbacks.memory_optimization import MemoryOptimization

    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, MemoryOptimization)), None)


def _by_batch(moment: MemoryBreakdown) -> int:
    return moment.activations + moment.inputs


def _with_samples(estimate: MemoryEstimate, fewer: int, samples: int) -> int:
    """The peak with fewer samples: it may then be at a moment that holds little of the batch."""
    moments = [estimate.peak, *(phase.breakdown for phase in estimate.phases)]
    return max(moment.total_bytes - _by_batch(moment) * (samples - fewer) // samples for moment in moments)


def _optimizer_advice(trainer: Trainer, estimate: MemoryEstimate | None, limit: int | None) -> Iterator[str]:
    """In the optimizer's step no activations are alive: what lowers it are its temporaries and its state."""
    from lightning_memopt.accounting.estimate import FUSED

    steps = [] if estimate is None else [phase.breakdown for phase in estimate.phases if phase.name == _OPTIMIZER]
    step = steps[0] if steps else None
    names = {type(optimizer).__name__ for optimizer in trainer.optimizers}
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    if names <= {*FUSED} and not all(group.get("fused") for group in groups) and (step is None or step.temporaries):
        told = ""
        if step is not None:
            peak = step.total_bytes - step.temporaries
            told = f": from {step.total_bytes / _MIB:.1f} to about {peak / _MIB:.1f} MiB{_fits(peak, limit)}"
        yield f"`fused=True` of the optimizer takes its step without temporaries{told}."
    if names & {"Adam", "AdamW"}:
        yield (
            "`bitsandbytes.optim.AdamW8bit` or `torchao.optim.AdamW8bit` keep the state in a quarter of the bytes; "
            "they round it."
        )
    yield (
        "Nothing of the batch is alive in the optimizer's step: a smaller batch or recomputation does not lower it. "
        "Sharding, an optimizer with less state or fewer trained parameters does."
    )


def _advised(advice: list[str]) -> Iterator[str]:
    if advice:
        yield "What would need less, the cheapest first"
        yield from (f"  {line}" for line in advice)


def _fits(peak: int, limit: int | None) -> str:
    if limit is None:
        return ""
    return ", which fits" if peak <= limit else ", which does not fit by itself"


def _samples(batch: Any) -> int:
    sizes = (tensor.shape[0] for tensor in tensors_inside(batch, attributes=True) if tensor.dim())
    return next(sizes, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _written(trainer: Trainer, text: str) -> Path | None:
    path = _folder(trainer) / f"out_of_memory_step{trainer.global_step}_rank{trainer.global_rank}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        _warn(f"MemoryMonitor could not write {path} ({error}):\n{text}")
        return None
    return path


def _folder(trainer: Trainer) -> Path:
    """Beside the logs. Not ``trainer.log_dir``, which waits for the other ranks."""
    for logger in trainer.loggers:
        folder = getattr(logger, "log_dir", None) or logger.save_dir
        if folder:
            return Path(folder)
    return Path(trainer.default_root_dir)


def _snapshot(device: torch.device, report: Path | None) -> Path | None:
    """The allocator's history, where somebody had it recorded."""
    if device.type != "cuda" or report is None or not torch._C._cuda_isHistoryEnabled():
        return None
    path = report.with_suffix(".pickle")
    torch.cuda.memory._dump_snapshot(str(path))
    return path
