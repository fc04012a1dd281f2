"""
What the kernels are meant to reach
===================================

Each goal is computed from the rows of one run. Goals are set for GPUs; those in milliseconds for an H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kernel_cases import COPY, LINEAR, OURS, OURS_WGMMA, OURS_WITHOUT_WGMMA, PEER, PEER_UNFUSED, UNFUSED

MIB = 2**20
NOT_HERE = "not measured on this device"
# The CUDA allocator hands out multiples of this.
_GRANULE = 512


class MeasuredRow(Protocol):
    """What goals read of a row."""

    kernel: str
    variant: str
    shape: str
    dtype: str
    ms_median: float | None
    gbps_or_tflops: float | None
    peak_bytes: int | None
    inputs_bytes: int | None
    max_rel_err_vs_fp64: float | None
    gpu: str
    error: str | None


@dataclass(frozen=True)
class GoalResult:
    """A goal and what a run says about it; ``status`` is "reached", "short by ..." or why there is no answer."""

    goal: str
    target: str
    measured: str
    status: str


class _MissingError(Exception):
    """A row that a goal needs has no figures."""


class _Rows:
    """Rows by kernel, variant, shape and dtype."""

    def __init__(self, rows: Sequence[MeasuredRow]) -> None:
        self._rows = rows

    def find(self, kernel: str, variant: str, dtype: str, shape: str | None = None) -> list[MeasuredRow]:
        found = [
            row
            for row in self._rows
            if (row.kernel, row.variant, row.dtype) == (kernel, variant, dtype) and shape in (None, row.shape)
        ]
        if not found:
            raise _MissingError(f"not measured: no row for {kernel} {shape or ''} {dtype}".replace("  ", " "))
        return found

    def one(self, kernel: str, variant: str, dtype: str, shape: str | None = None) -> MeasuredRow:
        row = self.find(kernel, variant, dtype, shape)[0]
        if row.error is not None:
            raise _MissingError(f"not measured: {variant}: {row.error}")
        return row


def assess_goals(rows: Sequence[MeasuredRow], *, on_gpu: bool) -> list[GoalResult]:
    """Compare the rows of a run with the goals.

    Args:
        rows: all rows of the run.
        on_gpu: whether they were measured on a CUDA device.

    Returns:
        One result for each goal.
    """
    table = _Rows(rows)
    results = []
    for goal, target, assess in _goals():
        if not on_gpu:
            results.append(GoalResult(goal, target, "", NOT_HERE))
            continue
        try:
            measured, status = assess(table)
        except _MissingError as missing:
            measured, status = "", str(missing)
        results.append(GoalResult(goal, target, measured, status))
    return results


Assess = Callable[[_Rows], tuple[str, str]]


def _goals() -> Iterator[tuple[str, str, Assess]]:
    for dtype, share in (("fp32", 0.88), ("bf16", 0.80)):
        for kernel in ("bit_pack", "bit_unpack"):
            target = f">= {100 * share:.0f} % of the device copy's"
            yield f"{kernel} {dtype}, rate", target, _share_of_copy(kernel, dtype, share)
    for dtype in ("fp32", "bf16"):
        yield f"bit_pack {dtype}, temporaries", "0 bytes beyond the payload", _pack_temporaries(dtype)
    large = "16384x4096x4096"
    yield (
        f"packed_spike_linear fp32 {large}, time",
        "<= 0.22 x cuBLAS fp32",
        _time_ratio("packed_spike_linear", large, "fp32", (LINEAR,), 0.22),
    )
    yield f"packed_spike_linear fp32 {large}, error", "<= cuBLAS fp32's", _error_goal(large)
    yield "packed_spike_linear bf16, N <= 128, M >= 65536", "faster than cuBLAS bf16", _packed_bf16(True, 1.0)
    yield "packed_spike_linear bf16, other shapes", "<= 1.1 x cuBLAS bf16", _packed_bf16(False, 1.1)
    for dtype in ("fp32", "bf16"):
        target = "<= 1.05 x the faster with or without wgmma"
        yield f"packed_spike_linear {dtype}, choice of kernel", target, _right_choice(dtype)
    sparse = f"{large}, 2 %"
    yield f"sparse_linear fp32 {sparse}, time", "<= 0.3 x SpikingJelly's", _sparse_time(sparse)
    yield f"sparse_linear fp32 {sparse}, workspace", "<= M K / 4 bytes", _sparse_workspace(sparse)
    fused = "lif_linear forward+backward"
    yield f"{fused} fp32 4,8192,1024,4096, time", "<= 9.5 ms (H200)", _fused_time(fused, "4,8192,1024,4096", 9.5)
    yield f"{fused} fp32 4,8192,1024,4096, peak", "<= 1200 MiB", _fused_peak(fused, "4,8192,1024,4096", 1200)
    small = "4,4096,512,512"
    yield (
        f"{fused} fp32 {small}, time",
        "faster than unfused",
        _time_ratio(fused, small, "fp32", (UNFUSED, PEER_UNFUSED), 1.0),
    )
    yield f"{fused} fp32 {small}, peak", "<= 110 MiB", _fused_peak(fused, small, 110)


def _at_most(value: float, limit: float, *, strictly: bool = False) -> str:
    if value < limit or (value == limit and not strictly):
        return "reached"
    return f"short by {_percent(value / limit - 1)}" if limit else "short"


def _at_least(value: float, limit: float) -> str:
    return "reached" if value >= limit else f"short by {_percent(1 - value / limit)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if math.isfinite(share) else "no end"


def _ms(row: MeasuredRow) -> float:
    assert row.ms_median is not None
    return row.ms_median


def _dims(shape: str) -> tuple[int, ...]:
    """The numbers of ``"16384x4096x4096, 2 %"`` or ``"4,8192,1024,4096"``."""
    return tuple(int(part) for part in shape.split(", ")[0].replace("x", ",").split(","))


def _extra_bytes(row: MeasuredRow, result_bytes: int) -> int:
    """What a call held at its peak beyond its inputs and its result."""
    assert row.peak_bytes is not None
    assert row.inputs_bytes is not None
    return max(0, row.peak_bytes - row.inputs_bytes - result_bytes)


def _share_of_copy(kernel: str, dtype: str, share: float) -> Assess:
    def assess(rows: _Rows) -> tuple[str, str]:
        ours, copy = rows.one(kernel, OURS, dtype), rows.one(kernel, COPY, dtype)
        assert ours.gbps_or_tflops is not None
        assert copy.gbps_or_tflops is not None
        reached = ours.gbps_or_tflops / copy.gbps_or_tflops
        text = f"{_percent(reached)} of {copy.gbps_or_tflops:.0f} GB/s at {ours.shape} elements"
        return text, _at_least(reached, share)

    return assess


def _pack_temporaries(dtype: str) -> Assess:
    def assess(rows: _Rows) -> tuple[str, str]:
        row = rows.one("bit_pack", OURS, dtype)
        payload = -(-int(row.shape) // 8)
        # The two 0-dim answers (does it fit, and what does not) take a granule of the allocator each.
        extra = _extra_bytes(row, payload)
        beyond = max(0, extra - 2 * _GRANULE)
        text = f"{beyond} bytes" + (f" and {extra - beyond} for two 0-dim answers" if extra > beyond else "")
        return text, "reached" if beyond == 0 else f"short by {beyond} bytes"

    return assess


def _time_ratio(kernel: str, shape: str, dtype: str, rivals: tuple[str, ...], limit: float) -> Assess:
    """Our time over that of the fastest of the rivals that ran."""

    def assess(rows: _Rows) -> tuple[str, str]:
        ours = rows.one(kernel, OURS, dtype, shape)
        ran = [row for rival in rivals for row in rows.find(kernel, rival, dtype, shape) if row.error is None]
        if not ran:
            rows.one(kernel, rivals[0], dtype, shape)
        best = min(ran, key=_ms)
        ratio = _ms(ours) / _ms(best)
        text = f"{ratio:.3f} x ({_ms(ours):.3f} ms, {best.variant} {_ms(best):.3f} ms)"
        return text, _at_most(ratio, limit, strictly=limit == 1.0)

    return assess


def _error_goal(shape: str) -> Assess:
    def assess(rows: _Rows) -> tuple[str, str]:
        ours, cublas = (rows.one("packed_spike_linear", name, "fp32", shape) for name in (OURS, LINEAR))
        assert ours.max_rel_err_vs_fp64 is not None
        assert cublas.max_rel_err_vs_fp64 is not None
        text = f"{ours.max_rel_err_vs_fp64:.2g}, cuBLAS {cublas.max_rel_err_vs_fp64:.2g}"
        return text, _at_most(ours.max_rel_err_vs_fp64, cublas.max_rel_err_vs_fp64)

    return assess


def _packed_bf16(narrow: bool, limit: float) -> Assess:
    """The worst ratio to cuBLAS over the shapes with few outputs and many rows, or over the others."""

    def is_narrow(shape: str) -> bool:
        m, _, n = _dims(shape)
        return n <= 128 and m >= 65536

    def assess(rows: _Rows) -> tuple[str, str]:
        shapes = [row.shape for row in rows.find("packed_spike_linear", OURS, "bf16") if is_narrow(row.shape) == narrow]
        if not shapes:
            raise _MissingError("not measured: no shape of this kind")
        ratios = {}
        for shape in shapes:
            ours, cublas = (rows.one("packed_spike_linear", name, "bf16", shape) for name in (OURS, LINEAR))
            ratios[shape] = _ms(ours) / _ms(cublas)
        worst = max(ratios, key=lambda shape: ratios[shape])
        return f"{ratios[worst]:.3f} x at {worst}", _at_most(ratios[worst], limit, strictly=narrow)

    return assess


def _right_choice(dtype: str) -> Assess:
    """The worst ratio, over all shapes, of the time of the kernel that is chosen to that of the faster one."""

    def assess(rows: _Rows) -> tuple[str, str]:
        ratios = {}
        for row in rows.find("packed_spike_linear", OURS, dtype):
            ours, *both = (
                rows.one("packed_spike_linear", name, dtype, row.shape)
                for name in (OURS, OURS_WGMMA, OURS_WITHOUT_WGMMA)
            )
            ratios[row.shape] = _ms(ours) / min(map(_ms, both))
        worst = max(ratios, key=lambda shape: ratios[shape])
        return f"{ratios[worst]:.3f} x at {worst}", _at_most(ratios[worst], 1.05)

    return assess


# SpikingJelly 2.0.0 with its CUDA extension on an H200, for runs where it is not installed.
_PEER_SPARSE_MS = 4.18


def _sparse_time(shape: str) -> Assess:
    def assess(rows: _Rows) -> tuple[str, str]:
        ours = rows.one("sparse_linear", OURS, "fp32", shape)
        peer = rows.find("sparse_linear", PEER, "fp32", shape)[0]
        if peer.error is None:
            peer_ms, source = _ms(peer), "SpikingJelly"
        elif "H200" in ours.gpu:
            peer_ms, source = _PEER_SPARSE_MS, "SpikingJelly in an earlier run"
        else:
            raise _MissingError(f"not measured: {PEER}: {peer.error}")
        ratio = _ms(ours) / peer_ms
        return f"{ratio:.3f} x ({_ms(ours):.3f} ms, {source} {peer_ms:.3f} ms)", _at_most(ratio, 0.3)

    return assess


def _sparse_workspace(shape: str) -> Assess:
    def assess(rows: _Rows) -> tuple[str, str]:
        row = rows.one("sparse_linear", OURS, "fp32", shape)
        m, k, n = _dims(row.shape)
        extra = _extra_bytes(row, 4 * m * n)
        return f"{extra / MIB:.1f} MiB of {m * k / 4 / MIB:.1f} MiB", _at_most(extra, m * k / 4)

    return assess


def _fused_time(kernel: str, shape: str, limit_ms: float) -> Assess:
    def assess(rows: _Rows) -> tuple[str, str]:
        row = rows.one(kernel, OURS, "fp32", shape)
        text = f"{_ms(row):.3f} ms"
        return text, _at_most(_ms(row), limit_ms) if "H200" in row.gpu else NOT_HERE

    return assess


def _fused_peak(kernel: str, shape: str, limit_mib: float) -> Assess:
    """Peak beyond x, v and the weight: y, its gradient and the gradients of x and the weight are part of the step."""

    def assess(rows: _Rows) -> tuple[str, str]:
        row = rows.one(kernel, OURS, "fp32", shape)
        assert row.peak_bytes is not None
        steps, m, k, n = _dims(row.shape)
        given = 4 * (steps * m * k + m * k + k * n)
        step_mib = (row.peak_bytes - given) / MIB
        text = f"{step_mib:.1f} MiB beyond x, v and the weight ({row.peak_bytes / MIB:.1f} with them)"
        return text, _at_most(step_mib, limit_mib)

    return assess
