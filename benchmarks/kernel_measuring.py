"""
Time, memory and error of the variants of a case
================================================

A case is one kernel at one shape and dtype; its variants do the same work in different ways. They take turns, call by
call, so that a change of clock or temperature meets all of them alike.

On CUDA a call is timed by events. Before each call a buffer of twice the L2 cache is read, so that no variant finds its
inputs in the cache; it is read as often as it takes the CPU to issue the call, so that the device never waits in the
middle of it. The time is that of the device; what the CPU needs to issue a call is reported beside it.

On the CPU a call is timed by ``perf_counter``, with caches as they are: a check that everything runs, no figures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_memopt.measuring import measure_memory

NOT_INSTALLED = "not installed"
_FEW_CALLS = 3


class NotInstalledError(Exception):
    """The variant needs a library that is not installed or does not load."""


class NotHereError(Exception):
    """The variant cannot run on this device or with this torch."""


class DeviceLostError(Exception):
    """After an error of one of ``variants``, the device answers to nothing in this process."""

    def __init__(self, variants: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.variants = variants
        self.message = message


@dataclass(frozen=True)
class Work:
    """What a case has to do at least, whoever does it.

    Attributes:
        bytes: read and written once.
        flops: of the products, as they are counted for a rate (2 M N K).
        bf16_flops: on tensor cores, where an exact way to do the products with bf16 numbers takes that many; None
            where ``flops`` is the number.
        fp32_adds: additions by which the products can be done instead (sparse input).
    """

    bytes: int
    flops: int = 0
    bf16_flops: int | None = None
    fp32_adds: int | None = None


@dataclass(frozen=True)
class Call:
    """A variant, ready to run.

    Attributes:
        run: what is timed; what it returns is dropped.
        inputs: tensors that exist before the call; they count into its peak.
        error: the largest relative error, against float64, of what ``run`` returned; None where none is defined.
    """

    run: Callable[[], Any]
    inputs: tuple[Tensor, ...]
    error: Callable[[Any], float] | None = None


@dataclass(frozen=True)
class Case:
    """One kernel at one shape and dtype.

    Attributes:
        kernel: its name in the table.
        shape: as the table shows it.
        dtype: short name, such as ``"fp32"``.
        work: what has to be done.
        variants: their names, in the order of the rows.
        build: allocates the inputs on a device and returns, for each variant, what makes it ready. Both may raise:
            that becomes a row.
        other_work: of variants that do another amount of work, such as a copy beside a kernel that packs.
    """

    kernel: str
    shape: str
    dtype: str
    work: Work
    variants: tuple[str, ...]
    build: Callable[[torch.device], Mapping[str, Callable[[], Call]]]
    other_work: Mapping[str, Work] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Kernel, shape and dtype in one word."""
        return f"{self.kernel} {self.shape} {self.dtype}"


@dataclass(frozen=True)
class Effort:
    """How much to measure of a case.

    Attributes:
        seconds: of timed calls of all its variants together.
        fewest: calls of each variant, whatever they take.
        most: calls of each variant.
    """

    seconds: float
    fewest: int
    most: int


@dataclass(frozen=True)
class Measurement:
    """What was found about one variant of a case; numbers are None where ``error`` says why there are none."""

    variant: str
    times_ms: tuple[float, ...] = ()
    host_ms: float | None = None
    peak_bytes: int | None = None
    inputs_bytes: int | None = None
    max_rel_err: float | None = None
    error: str | None = None


@dataclass
class _Turn:
    """A variant while it is measured."""

    call: Call
    host_ms: float
    call_ms: float
    peak_bytes: int
    inputs_bytes: int
    max_rel_err: float | None
    times_ms: list[float] = field(default_factory=list)


def measure_case(
    case: Case,
    device: torch.device,
    effort: Effort,
    *,
    refused: Mapping[str, str] | None = None,
    announce: Callable[[str], None] = lambda variant: None,
) -> list[Measurement]:
    """Measure every variant of a case.

    Args:
        case: what to measure.
        device: where.
        effort: how often.
        refused: variants that must not run, each with the error that its row shows.
        announce: is told the variant that is about to run.

    Returns:
        One measurement for each of ``case.variants``, in their order.

    Raises:
        DeviceLostError: the device cannot be used any more in this process.
    """
    errors = {name: text for name, text in (refused or {}).items() if name in case.variants}
    turns: dict[str, _Turn] = {}
    if len(errors) == len(case.variants):
        return [_measurement(name, None, errors[name]) for name in case.variants]
    try:
        makers = case.build(device)
        clock = CudaClock(device) if device.type == "cuda" else CpuClock()
    except Exception as error:
        # The inputs do not fit, for example: every variant says so.
        errors = {**dict.fromkeys(case.variants, describe_error(error)), **errors}
        _require_device(device, case.variants, error)
    for name in case.variants:
        if name not in errors:
            announce(name)
            with _caught(name, device, errors):
                turns[name] = _first_calls(makers[name](), device)
    if turns:
        _take_turns(turns, clock, device, effort, errors, announce)
    return [_measurement(name, turns.get(name), errors.get(name)) for name in case.variants]


def _measurement(name: str, turn: _Turn | None, error: str | None) -> Measurement:
    if turn is None or error is not None:
        return Measurement(name, error=error or "not measured")
    return Measurement(
        name,
        times_ms=tuple(turn.times_ms),
        host_ms=turn.host_ms,
        peak_bytes=turn.peak_bytes,
        inputs_bytes=turn.inputs_bytes,
        max_rel_err=turn.max_rel_err,
    )


@contextmanager
def _caught(name: str, device: torch.device, errors: dict[str, str]) -> Iterator[None]:
    """Turn the error of a variant into the text of its row."""
    try:
        yield
    except Exception as error:
        errors[name] = describe_error(error)
        _require_device(device, (name,), error)


def _require_device(device: torch.device, variants: tuple[str, ...], error: Exception) -> None:
    """Raise if the device answers to nothing after ``error``."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except Exception:
        raise DeviceLostError(variants, describe_error(error)) from error


def describe_error(error: Exception) -> str:
    """One line about an error, as a row shows it."""
    if isinstance(error, NotInstalledError):
        return NOT_INSTALLED
    if isinstance(error, NotHereError):
        return f"not here: {error}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


def _first_calls(call: Call, device: torch.device) -> _Turn:
    result = call.run()
    _synchronize(device)
    max_rel_err = None if call.error is None else call.error(result)
    del result
    host_ms = call_ms = math.inf
    for _ in range(_FEW_CALLS):
        _synchronize(device)
        started = time.perf_counter()
        call.run()
        issued = time.perf_counter()
        _synchronize(device)
        host_ms = min(host_ms, (issued - started) * 1e3)
        call_ms = min(call_ms, (time.perf_counter() - started) * 1e3)
    memory = measure_memory(call.run, device=device)
    inputs_bytes = storage_bytes(call.inputs)
    # Inputs of other variants wait on the same device: only what this call allocates and its own inputs count.
    peak_bytes = memory.peak_bytes - memory.start_bytes + inputs_bytes
    return _Turn(call, host_ms, call_ms, peak_bytes, inputs_bytes, max_rel_err)


def _take_turns(
    turns: dict[str, _Turn],
    clock: CpuClock | CudaClock,
    device: torch.device,
    effort: Effort,
    errors: dict[str, str],
    announce: Callable[[str], None],
) -> None:
    expected_s = sum(turn.call_ms + clock.overhead_ms(turn.host_ms) for turn in turns.values()) / 1e3
    rounds = max(effort.fewest, min(effort.most, int(effort.seconds / max(expected_s, 1e-9))))
    for index in range(rounds):
        # Every other round runs backwards: no variant always follows the same neighbour.
        for name in list(turns) if index % 2 == 0 else reversed(list(turns)):
            if name in errors:
                continue
            announce(name)
            with _caught(name, device, errors):
                turn = turns[name]
                turn.times_ms.append(clock.time(turn.call.run, turn.host_ms))


class CpuClock:
    """Times calls on the CPU."""

    def overhead_ms(self, host_ms: float) -> float:
        return 0.0

    def time(self, run: Callable[[], Any], host_ms: float) -> float:
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3


class CudaClock:
    """Times calls on a CUDA device, with an empty L2 cache and without gaps between their kernels."""

    # More passes would hide the CPU's work of a call longer than any of ours takes.
    MOST_PASSES = 200

    def __init__(self, device: torch.device) -> None:
        cache_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 * 2**20
        self._filler = torch.zeros(max(2 * cache_bytes, 64 * 2**20) // 4, device=device)
        self._sum = torch.zeros((), device=device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._pass_ms = min(self._timed(self._evict) for _ in range(5))

    def overhead_ms(self, host_ms: float) -> float:
        return self._passes(host_ms) * self._pass_ms

    def time(self, run: Callable[[], Any], host_ms: float) -> float:
        for _ in range(self._passes(host_ms)):
            self._evict()
        return self._timed(run)

    def _passes(self, host_ms: float) -> int:
        return max(1, min(self.MOST_PASSES, math.ceil(1.5 * host_ms / self._pass_ms)))

    def _evict(self) -> None:
        # Reading leaves nothing in the cache that would have to be written back during the call.
        torch.sum(self._filler, dim=0, out=self._sum)

    def _timed(self, run: Callable[[], Any]) -> float:
        self._start.record()
        run()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end)


def storage_bytes(tensors: tuple[Tensor, ...]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
