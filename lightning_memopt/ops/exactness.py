"""
Whether bits held their tensor exactly
======================================

Packing answers on the device whether every value fitted. Reading the answer there would wait for the device, so it is
kept, all answers of one place combined, and read once before the next optimizer step: no weight is ever changed by a
gradient that a value which did not fit made wrong. On the CPU reading is free and the error comes at once.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


class NonBinarySpikeError(ValueError):
    """A tensor that was to be packed held a value that the bits cannot hold."""


class Claim(NamedTuple):
    """That a tensor can be packed: where it was said, what it excludes, and what to do where it is wrong."""

    where: str
    excludes: str
    remedy: str
    shape: tuple[int, ...] | None = None
    """Of the tensor, where it is told when the answer is known: answers of one place are combined on a device."""

    def describe(self, value: object) -> str:
        """The sentence that names the place, the value and the remedy."""
        shape = "" if self.shape is None else f" {self.shape}"
        return f"{self.where}{shape} held {value}, but {self.excludes}. Remedy: {self.remedy}."


class _Pending(NamedTuple):
    """An answer that is still on a device: whether all fitted so far, one value that did not, and when it is known."""

    claim: Claim
    fits: Tensor
    odd: Tensor
    known: Any


_PENDING: dict[tuple[torch.device, str], _Pending] = {}
_PENDING_LOCK = threading.Lock()
_OPTIMIZER_HOOK: Any = None


def reading_is_free(tensor: Tensor) -> bool:
    """Whether a value of ``tensor`` can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def require_exact(fits: Tensor, odd: Tensor, claim: Claim) -> None:
    """Raise if a tensor did not fit: now on the CPU, elsewhere before the next optimizer step.

    Args:
        fits: 0-dim bool, whether it did.
        odd: 0-dim, a value that did not.
        claim: what was said of the tensor.

    Raises:
        NonBinarySpikeError: on the CPU, if a value did not fit.
        RuntimeError: while a CUDA graph is captured: its replays could not be checked.
    """
    if reading_is_free(fits):
        if not fits:
            raise NonBinarySpikeError(claim.describe(odd.item()))
        return
    if fits.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{claim.where} is packed into bits while a CUDA graph is captured. Whether every value fits is asked "
            "after the forward pass, which a replay of the graph does not do. Leave the compressor out of what is "
            "captured."
        )
    _watch_optimizers()
    device, where = fits.device, claim.where
    if claim.shape is not None:
        claim = claim._replace(shape=None)
    with _PENDING_LOCK:
        earlier = _PENDING.get((device, where))
        if earlier is not None:
            if earlier.known is not None:  # it may have been made on another stream
                stream = torch.cuda.current_stream(device)
                stream.wait_event(earlier.known)
                for answer in (earlier.fits, earlier.odd):  # not to be freed before that stream has read it
                    answer.record_stream(stream)
            fits, odd = earlier.fits & fits, torch.where(earlier.fits, odd.to(earlier.odd.dtype), earlier.odd)
        known = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        _PENDING[device, where] = _Pending(claim, fits, odd, known)


def check_pending_fits() -> None:
    """Read the answers that are still on a device, once for all of them.

    Called before every optimizer step; call it yourself where gradients are used without an optimizer. It waits for the
    forward pass only, on a stream of its own: work queued since then goes on.

    Raises:
        NonBinarySpikeError: if a packed tensor held a value that its bits cannot hold.
    """
    with _PENDING_LOCK:
        pending = dict(_PENDING)
        _PENDING.clear()
    misfits = []
    for device in {device for device, _ in pending}:
        answers = [answer for (on, _), answer in pending.items() if on == device]
        for answer, fits in zip(answers, _read_flags(device, answers), strict=True):
            if not fits:
                misfits.append(answer.claim.describe(answer.odd.item()))
    if misfits:
        raise NonBinarySpikeError("Gradients of this step are wrong and were not applied: " + " ".join(sorted(misfits)))


def _read_flags(device: torch.device, answers: list[_Pending]) -> list[bool]:
    flags = [answer.fits for answer in answers]
    if device.type != "cuda":
        return [bool(flag) for flag in flags]
    stream = torch.cuda.Stream(device)
    for answer in answers:
        stream.wait_event(answer.known)
    with torch.cuda.stream(stream):
        read: list[bool] = torch.stack(flags).tolist()
    return read


def _watch_optimizers() -> None:
    global _OPTIMIZER_HOOK
    if _OPTIMIZER_HOOK is None:
        _OPTIMIZER_HOOK = register_optimizer_step_pre_hook(lambda *_: check_pending_fits())
