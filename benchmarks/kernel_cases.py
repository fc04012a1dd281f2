"""
Kernels and their rivals
========================

:data:`KERNELS` names every kernel of the benchmark and makes its cases at a size. A case describes the least work that
the result takes, allocates its inputs when it is measured, and lists variants: ours first, then whatever else computes
the same. Errors are relative: the largest difference from float64 over the largest value of the float64 result.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from kernel_measuring import Call, Case, NotHereError, NotInstalledError, Work
from torch import Tensor

from lightning_memopt import functional, surrogate
from lightning_memopt.ops import dispatch
from lightning_memopt.ops.bit_pack import bit_pack, bit_pack_rows, bit_unpack
from lightning_memopt.ops.launch import backend_for
from lightning_memopt.ops.sparse import bit_positions, scatter_positions, sparse_pack

OURS = "lightning_memopt"
OURS_AUTO = "lightning_memopt auto"
OURS_FROM_BITS = "lightning_memopt from bits"
OURS_WGMMA = "lightning_memopt by wgmma"
OURS_WITHOUT_WGMMA = "lightning_memopt without wgmma"
COPY = "device copy"
NONZERO = "torch.nonzero"
LINEAR = "F.linear"
LINEAR_TF32 = "F.linear TF32"
PLANES = "F.linear, three bf16 planes"
PEER = "spikingjelly"
PEER_COMPRESSOR = "spikingjelly compressor"
PEER_FUNCTION = "spikingjelly function"
UNFUSED = "lightning_memopt neuron, F.linear"
PEER_UNFUSED = "spikingjelly neuron, F.linear"

TWO_PASSES = "lightning_memopt neuron, then pack"
LOOP = "torch loop, then pack"
PEER_TWO_PASSES = "spikingjelly neuron, then compressor"

Makers = Mapping[str, Callable[[], Call]]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SEED = 20
TAU = 2.0
ALPHA = 4.0

# Where results are compared: slices of a long tensor, rows of a matrix.
_SLICES, _SLICE = 16, 2**18
_ROWS, _COLUMNS = 256, 32


@dataclass(frozen=True)
class Sizes:
    """Shapes of the cases.

    Attributes:
        elements: of a packed tensor.
        rows: ``(M, K)`` of a matrix packed row by row, K no multiple of 8.
        linear: ``(M, K, N)`` of the products.
        narrow: ``(M, K, N)`` of products with few outputs, bf16 only.
        largest: index in ``linear`` of the shape at which every variation is measured.
        fused: ``(T, M, K, N)`` of a neuron and a linear layer.
        neurons: ``(T, n)`` of a neuron alone.
        calibration: M = K = N of the products that tell how fast the device multiplies.
    """

    elements: int
    rows: tuple[int, int]
    linear: tuple[tuple[int, int, int], ...]
    narrow: tuple[tuple[int, int, int], ...]
    fused: tuple[tuple[int, int, int, int], ...]
    neurons: tuple[int, int]
    calibration: int
    all_dtypes: bool = True

    @property
    def largest(self) -> tuple[int, int, int]:
        return self.linear[-1]


_LINEAR = ((8192, 512, 512), (8192, 1024, 1024), (16384, 4096, 4096))
_NARROW = ((65536, 1024, 128), (65536, 4096, 128), (131072, 2048, 64))
_FUSED = ((16, 512, 512, 512), (4, 4096, 512, 512), (4, 8192, 1024, 4096))
SIZES = {
    "tiny": Sizes(
        elements=2**12,
        rows=(33, 41),
        linear=((40, 40, 24),),
        narrow=((64, 24, 8),),
        fused=((3, 16, 24, 16),),
        neurons=(3, 2**8),
        calibration=64,
    ),
    "quick": Sizes(
        elements=2**26,
        rows=(2**14, 4095),
        linear=_LINEAR,
        narrow=_NARROW,
        fused=_FUSED,
        neurons=(4, 2**23),
        calibration=8192,
        all_dtypes=False,
    ),
    "full": Sizes(
        elements=2**28,
        rows=(2**16, 4095),
        linear=_LINEAR,
        narrow=_NARROW,
        fused=_FUSED,
        neurons=(4, 2**25),
        calibration=8192,
    ),
}


# ---------------------------------------------------------------------------------------------------------------------
# Inputs


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(SEED)


def random_spikes(shape: tuple[int, ...], density: float, dtype: str, device: torch.device) -> Tensor:
    """Zeros and ones, ``density`` of them ones."""
    return torch.empty(shape, dtype=DTYPES[dtype], device=device).bernoulli_(density, generator=_generator(device))


def random_counts(numel: int, bits: int, dtype: str, device: torch.device) -> Tensor:
    """Spikes for one bit, else integers that need so many bits."""
    if bits == 1:
        return random_spikes((numel,), 0.2, dtype, device)
    return torch.empty(numel, dtype=DTYPES[dtype], device=device).random_(0, 2**bits, generator=_generator(device))


def random_normal(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    """Numbers of a standard normal distribution."""
    return torch.empty(shape, dtype=DTYPES[dtype], device=device).normal_(generator=_generator(device))


def random_currents(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    """Inputs that make a neuron spike in some 20 to 40 % of its steps."""
    return random_normal(shape, dtype, device).mul_(1.5).add_(0.5)


def _peer() -> Any:
    try:
        from spikingjelly.activation_based import functional as peer
    except ImportError as error:
        raise NotInstalledError(f"SpikingJelly ({error})") from error
    return peer


def need_kernels(device: torch.device) -> None:
    """On CUDA our rows show the kernels; what runs without CuPy is plain torch and no kernel."""
    if device.type == "cuda" and backend_for(device) is None:
        raise NotInstalledError("CuPy, which compiles the kernels")


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def _samples(count: int, most: int, device: torch.device) -> Tensor:
    """Up to ``most`` indices below ``count``, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64, device=device).round().long()


def relative_error(result: Tensor, reference: Tensor) -> float:
    """``max|result - reference| / max|reference|``; infinite where the result is not a number or has another shape."""
    if result.shape != reference.shape:
        return math.inf
    if reference.numel() == 0:
        return 0.0
    difference = (result.double() - reference.double()).abs().max().item()
    scale = reference.double().abs().max().item()
    ratio = difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)
    return ratio if math.isfinite(ratio) else math.inf


# ---------------------------------------------------------------------------------------------------------------------
# What the device can do


def device_copy(sizes: Sizes) -> Iterator[Case]:
    """Copies, whose rate is the ceiling of everything that memory bounds."""
    n = sizes.elements
    for dtype in ("fp32", "bf16"):

        def build(device: torch.device, dtype: str = dtype) -> Makers:
            source = torch.zeros(n, dtype=DTYPES[dtype], device=device)
            return {COPY: lambda: _copy(source)}

        yield Case("device_copy", str(n), dtype, _copy_work(n, dtype), (COPY,), build)


def _copy_work(elements: int, dtype: str) -> Work:
    return Work(bytes=2 * elements * DTYPES[dtype].itemsize)


def _copy(source: Tensor) -> Call:
    target = torch.empty_like(source)
    return Call(lambda: target.copy_(source), (source, target))


def matmul(sizes: Sizes) -> Iterator[Case]:
    """Square products, whose rate is the ceiling of everything that arithmetic bounds."""
    for dtype in ("bf16", "fp32"):
        side = sizes.calibration if dtype == "bf16" else sizes.calibration // 2

        def build(device: torch.device, side: int = side, dtype: str = dtype) -> Makers:
            a, b = (random_normal((side, side), dtype, device) for _ in range(2))
            return {LINEAR: lambda: Call(lambda: F.linear(a, b), (a, b))}

        work = Work(bytes=3 * side * side * DTYPES[dtype].itemsize, flops=2 * side**3)
        yield Case("matmul", f"{side}x{side}x{side}", dtype, work, (LINEAR,), build)


# ---------------------------------------------------------------------------------------------------------------------
# Bits


def bit_pack_cases(sizes: Sizes) -> Iterator[Case]:
    for dtype in ("fp32", "bf16"):
        yield _pack_case(sizes.elements, dtype, 1)


def bit_unpack_cases(sizes: Sizes) -> Iterator[Case]:
    for dtype in ("fp32", "bf16"):
        yield _unpack_case(sizes.elements, dtype, 1)


def count_pack_cases(sizes: Sizes) -> Iterator[Case]:
    for dtype in ("fp32", "bf16") if sizes.all_dtypes else ("fp32",):
        for bits in (2, 4, 8):
            yield _pack_case(sizes.elements, dtype, bits)


def count_unpack_cases(sizes: Sizes) -> Iterator[Case]:
    for dtype in ("fp32", "bf16") if sizes.all_dtypes else ("fp32",):
        for bits in (2, 4, 8):
            yield _unpack_case(sizes.elements, dtype, bits)


def _pack_case(n: int, dtype: str, bits: int) -> Case:
    def build(device: torch.device) -> Makers:
        counts = random_counts(n, bits, dtype, device)

        def ours() -> Call:
            need_kernels(device)
            return Call(lambda: bit_pack(counts, bits), (counts,), lambda out: _packed_error(*out, counts, bits))

        def compressor() -> Call:
            compress = _peer_compressor(bits).compress
            width = 1 if bits == 1 else 8
            return Call(lambda: compress(counts), (counts,), lambda payload: _stream_error(payload[0], counts, width))

        def function() -> Call:
            compress = _peer().bit_spike_compress
            return Call(lambda: compress(counts), (counts,), lambda packed: _stream_error(packed, counts, 1))

        return {OURS: ours, COPY: lambda: _copy(counts), PEER_COMPRESSOR: compressor, PEER_FUNCTION: function}

    return _stream_case("pack", n, dtype, bits, build)


def _unpack_case(n: int, dtype: str, bits: int) -> Case:
    def build(device: torch.device) -> Makers:
        counts = random_counts(n, bits, dtype, device)

        def error(result: Tensor) -> float:
            return _values_error(result, counts)

        def ours() -> Call:
            need_kernels(device)
            packed = bit_pack(counts, bits)[0]
            return Call(lambda: bit_unpack(packed, n, counts.dtype, bits), (packed,), error)

        def compressor() -> Call:
            rival = _peer_compressor(bits)
            payload = rival.compress(counts)
            return Call(lambda: rival.decompress(payload), (payload[0],), error)

        def function() -> Call:
            peer = _peer()
            packed = peer.bit_spike_compress(counts)
            return Call(lambda: peer.bit_spike_decompress(packed, counts.shape, counts.dtype), (packed,), error)

        return {OURS: ours, COPY: lambda: _copy(counts), PEER_COMPRESSOR: compressor, PEER_FUNCTION: function}

    return _stream_case("unpack", n, dtype, bits, build)


def _stream_case(verb: str, n: int, dtype: str, bits: int, build: Callable[[torch.device], Makers]) -> Case:
    work = Work(bytes=n * DTYPES[dtype].itemsize + n * bits // 8)
    other_work = {COPY: _copy_work(n, dtype)}
    if bits == 1:
        return Case(f"bit_{verb}", str(n), dtype, work, (OURS, COPY, PEER_COMPRESSOR, PEER_FUNCTION), build, other_work)
    # The peer stores counts as bytes, whatever their size.
    other_work[PEER_COMPRESSOR] = Work(bytes=n * DTYPES[dtype].itemsize + n)
    return Case(f"count_{verb}", f"{n}, {bits} bits", dtype, work, (OURS, COPY, PEER_COMPRESSOR), build, other_work)


def _peer_compressor(bits: int) -> Any:
    _peer()
    from spikingjelly.activation_based import memopt

    return memopt.BitSpikeCompressor() if bits == 1 else memopt.Uint8SpikeCompressor()


def row_pack_cases(sizes: Sizes) -> Iterator[Case]:
    rows, columns = sizes.rows
    n = rows * columns
    for dtype in ("fp32", "bf16") if sizes.all_dtypes else ("fp32",):

        def build(device: torch.device, dtype: str = dtype) -> Makers:
            spikes = random_spikes((rows, columns), 0.2, dtype, device)

            def error(packed: Tensor) -> float:
                if packed.shape != (rows, -(-columns // 8)):
                    return math.inf
                at = _samples(rows, _ROWS, device)
                # The padding is compared as well: it must be zero.
                return relative_error(_decoded(packed[at], 1), F.pad(spikes[at], (0, -columns % 8)))

            def ours() -> Call:
                need_kernels(device)
                return Call(lambda: bit_pack_rows(spikes), (spikes,), lambda out: _if_fitting(*out, error))

            def peer() -> Call:
                pack = _peer().bit_pack_spike_dense
                return Call(lambda: pack(spikes), (spikes,), error)

            return {OURS: ours, COPY: lambda: _copy(spikes), PEER: peer}

        work = Work(bytes=n * DTYPES[dtype].itemsize + rows * -(-columns // 8))
        other_work = {COPY: _copy_work(n, dtype)}
        yield Case("row_pack", f"{rows}x{columns}", dtype, work, (OURS, COPY, PEER), build, other_work)


def positions_cases(sizes: Sizes) -> Iterator[Case]:
    for dtype in ("fp32", "bf16") if sizes.all_dtypes else ("fp32",):
        yield _positions_case(sizes.elements, dtype)


def scatter_positions_cases(sizes: Sizes) -> Iterator[Case]:
    for dtype in ("fp32", "bf16") if sizes.all_dtypes else ("fp32",):
        yield _scatter_positions_case(sizes.elements, dtype)


# Of the spikes that are stored as positions.
_SPARSE = 0.01


def _positions_case(n: int, dtype: str) -> Case:
    ones = int(_SPARSE * n)
    # Positions that are listed without waiting need room for more ones than there may be.
    capacity = int(1.2 * ones) + 64

    def build(device: torch.device) -> Makers:
        spikes = random_spikes((n,), _SPARSE, dtype, device)

        @functools.cache
        def expected() -> Tensor:
            return torch.cat([part.nonzero().flatten() + start for start, part in _parts(spikes)])

        def error(positions: Tensor) -> float:
            return relative_error(positions, expected())

        def listed(positions: Tensor, count: Tensor, *checked: Tensor) -> float:
            if checked and not checked[0].item():
                raise AssertionError("wrong answer: the positions are said not to hold the spikes, but they do")
            return error(positions[: count.item()])

        def ours() -> Call:
            need_kernels(device)
            return Call(lambda: sparse_pack(spikes, capacity), (spikes,), lambda out: listed(*out))

        def from_bits() -> Call:
            need_kernels(device)
            packed = bit_pack(spikes)[0]
            return Call(lambda: bit_positions(packed, n, capacity), (packed,), lambda out: listed(*out))

        def compressor() -> Call:
            compress = _peer_sparse_compressor().compress
            return Call(lambda: compress(spikes), (spikes,), lambda payload: error(payload[0]))

        return {
            OURS: ours,
            OURS_FROM_BITS: from_bits,
            COPY: lambda: _copy(spikes),
            NONZERO: lambda: Call(lambda: spikes.nonzero(), (spikes,), lambda found: error(found.flatten())),
            PEER_COMPRESSOR: compressor,
        }

    positions = 4 * ones
    other_work = {OURS_FROM_BITS: Work(bytes=n // 8 + positions), COPY: _copy_work(n, dtype)}
    work = Work(bytes=n * DTYPES[dtype].itemsize + positions)
    variants = (OURS, OURS_FROM_BITS, COPY, NONZERO, PEER_COMPRESSOR)
    return Case("positions", f"{n}, {100 * _SPARSE:.0f} %", dtype, work, variants, build, other_work)


def _scatter_positions_case(n: int, dtype: str) -> Case:
    def build(device: torch.device) -> Makers:
        spikes = random_spikes((n,), _SPARSE, dtype, device)

        def error(result: Tensor) -> float:
            return _values_error(result, spikes)

        def ours() -> Call:
            need_kernels(device)
            positions, count, *_ = sparse_pack(spikes, int(1.2 * _SPARSE * n) + 64)
            positions = positions[: count.item()].clone()
            return Call(lambda: scatter_positions(positions, n, spikes.dtype), (positions,), error)

        def compressor() -> Call:
            rival = _peer_sparse_compressor()
            payload = rival.compress(spikes)
            return Call(lambda: rival.decompress(payload), (payload[0],), error)

        return {OURS: ours, COPY: lambda: _copy(spikes), PEER_COMPRESSOR: compressor}

    work = Work(bytes=n * DTYPES[dtype].itemsize + 4 * int(_SPARSE * n))
    variants, other_work = (OURS, COPY, PEER_COMPRESSOR), {COPY: _copy_work(n, dtype)}
    return Case("scatter_positions", f"{n}, {100 * _SPARSE:.0f} %", dtype, work, variants, build, other_work)


def _peer_sparse_compressor() -> Any:
    _peer()
    from spikingjelly.activation_based import memopt

    return memopt.SparseSpikeCompressor()


def _parts(flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A long tensor in parts, so that what looks for its ones needs little memory."""
    size = 2**24
    for start in range(0, flat.numel(), size):
        yield start, flat[start : start + size]


def _if_fitting(packed: Tensor, fits: Tensor, odd: Tensor, error: Callable[[Tensor], float]) -> float:
    """The error, if the kernel says that the bits hold every value, as they do."""
    if not fits.item():
        raise AssertionError(f"wrong answer: {odd.item()} is said not to fit, but every value does")
    return error(packed)


def _packed_error(packed: Tensor, fits: Tensor, odd: Tensor, counts: Tensor, bits: int) -> float:
    return _if_fitting(packed, fits, odd, lambda packed: _stream_error(packed, counts, bits))


def _decoded(packed: Tensor, bits: int) -> Tensor:
    """The integers of a stream of bits, by plain shifts: another way than those that are measured."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)


def _stream_error(packed: Tensor, counts: Tensor, bits: int) -> float:
    if packed.shape != (-(-counts.numel() * bits // 8),):
        return math.inf
    worst = 0.0
    for start in _slice_starts(counts.numel()):
        expected = counts[start : start + _SLICE]
        part = packed[start * bits // 8 : -(-(start + expected.numel()) * bits // 8)].view(torch.uint8)
        worst = max(worst, relative_error(_decoded(part, bits)[: expected.numel()], expected))
    return worst


def _values_error(result: Tensor, values: Tensor) -> float:
    if result.shape != values.shape or result.dtype != values.dtype:
        return math.inf
    starts = _slice_starts(values.numel())
    return max(relative_error(result[s : s + _SLICE], values[s : s + _SLICE]) for s in starts)


def _slice_starts(numel: int) -> list[int]:
    """Where slices of ``_SLICE`` elements begin: spread over a flat tensor, to its end; multiples of 8."""
    last = max(0, numel - _SLICE + 7) // 8 * 8
    return sorted({last * index // (_SLICES - 1) // 8 * 8 for index in range(_SLICES)})


# ---------------------------------------------------------------------------------------------------------------------
# Products of binary input


def packed_spike_linear_cases(sizes: Sizes) -> Iterator[Case]:
    for shape in sizes.linear:
        for dtype in ("fp32", "bf16"):
            yield _packed_linear_case(shape, dtype)
    for shape in sizes.narrow:
        yield _packed_linear_case(shape, "bf16")


def packed_spike_linear_backward_cases(sizes: Sizes) -> Iterator[Case]:
    shapes = sizes.linear if sizes.all_dtypes else (sizes.largest,)
    for shape in shapes:
        for dtype in ("fp32", "bf16"):
            yield _packed_linear_backward_case(shape, dtype)


def sparse_linear_cases(sizes: Sizes) -> Iterator[Case]:
    for shape in sizes.linear:
        for dtype in ("fp32", "bf16") if sizes.all_dtypes and shape == sizes.largest else ("fp32",):
            for percent in (2, 10, 20):
                yield _sparse_linear_case(shape, dtype, percent)


def _linear_work(
    shape: tuple[int, int, int], dtype: str, input_bytes: int, planes: int, density: float | None = None
) -> Work:
    m, k, n = shape
    flops = 2 * m * k * n
    return Work(
        bytes=input_bytes + (n * k + m * n) * DTYPES[dtype].itemsize,
        flops=flops,
        bf16_flops=planes * flops,
        fp32_adds=None if density is None else int(density * m * k * n),
    )


def _planes(dtype: str) -> int:
    """How many bf16 numbers hold a weight exactly."""
    return 3 if dtype == "fp32" else 1


def _packed_linear_case(shape: tuple[int, int, int], dtype: str) -> Case:
    m, k, n = shape

    def build(device: torch.device) -> Makers:
        spikes, weight = random_spikes((m, k), 0.2, dtype, device), random_normal((n, k), dtype, device)
        error = _product_error(spikes, weight)

        def ours() -> Call:
            need_kernels(device)
            packed = functional.bit_pack_spike_dense(spikes)
            return Call(lambda: functional.packed_spike_linear(packed, weight), (packed, weight), error)

        def chosen(choose: Callable[..., str]) -> Call:
            _need_wgmma(device)
            packed = functional.bit_pack_spike_dense(spikes)

            def run() -> Tensor:
                with mock.patch.object(dispatch, "choose_packed_linear", choose):
                    return functional.packed_spike_linear(packed, weight)

            return Call(run, (packed, weight), error)

        def peer() -> Call:
            rival = _peer()
            packed = rival.bit_pack_spike_dense(spikes)
            return Call(lambda: rival.packed_spike_linear(packed, weight), (packed, weight), error)

        return {
            OURS: ours,
            OURS_WGMMA: lambda: chosen(lambda *_, **__: "wgmma"),
            OURS_WITHOUT_WGMMA: lambda: chosen(functools.partial(dispatch.choose_packed_linear, wgmma=False)),
            PEER: peer,
            **_dense_products(spikes, weight, error),
        }

    work = _linear_work(shape, dtype, m * -(-k // 8), _planes(dtype))
    variants = (OURS, OURS_WGMMA, OURS_WITHOUT_WGMMA, *_dense_names(dtype), PEER)
    return Case("packed_spike_linear", f"{m}x{k}x{n}", dtype, work, variants, build)


def _need_wgmma(device: torch.device) -> None:
    need_kernels(device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        raise NotHereError("wgmma needs a CUDA device of compute capability 9.0")


def _dense_names(dtype: str) -> tuple[str, ...]:
    return (LINEAR, LINEAR_TF32, PLANES) if dtype == "fp32" else (LINEAR,)


def _dense_products(spikes: Tensor, weight: Tensor, error: Callable[[Tensor], float]) -> Makers:
    """Products of unpacked spikes: cuBLAS on CUDA."""

    def tf32_product() -> Tensor:
        with _tf32():
            return F.linear(spikes, weight)

    def tf32() -> Call:
        _need_tf32(spikes.device)
        return Call(tf32_product, (spikes, weight), error)

    def planes() -> Call:
        if spikes.device.type != "cuda":
            raise NotHereError("torch.mm(out_dtype=...) runs on CUDA only")
        ones = spikes.bfloat16()
        return Call(lambda: _product_of_planes(ones, weight), (ones, weight), error)

    return {
        LINEAR: lambda: Call(lambda: F.linear(spikes, weight), (spikes, weight), error),
        LINEAR_TF32: tf32,
        PLANES: planes,
    }


def _need_tf32(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        raise NotHereError("TF32 needs a CUDA device of compute capability 8.0 or later")


def _product_of_planes(ones: Tensor, weight: Tensor) -> Tensor:
    total = None
    for _ in range(3):
        plane = weight.bfloat16()
        weight = weight - plane
        part = torch.mm(ones, plane.t(), out_dtype=torch.float32)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _product_error(spikes: Tensor, weight: Tensor) -> Callable[[Tensor], float]:
    """Compares sampled rows of ``spikes @ weight.T``."""
    at = _samples(spikes.shape[0], _ROWS, spikes.device)

    @functools.cache
    def expected() -> Tensor:
        return spikes[at].double() @ weight.detach().double().t()

    def error(result: Tensor) -> float:
        if result.shape != (spikes.shape[0], weight.shape[0]):
            return math.inf
        return relative_error(result[at], expected())

    return error


def _packed_linear_backward_case(shape: tuple[int, int, int], dtype: str) -> Case:
    m, k, n = shape

    def build(device: torch.device) -> Makers:
        spikes, weight = random_spikes((m, k), 0.2, dtype, device), random_normal((n, k), dtype, device)
        grad = random_normal((m, n), dtype, device)
        at = _samples(n, _COLUMNS, device)

        @functools.cache
        def expected() -> Tensor:
            return grad[:, at].double().t() @ spikes.double()

        def error(result: Tensor) -> float:
            return relative_error(result[at], expected()) if result.shape == weight.shape else math.inf

        def backward_of(product: Callable[[Tensor], Tensor], read: Tensor, tf32: bool = False) -> Call:
            learned = weight.detach().requires_grad_()
            y = product(learned)

            def run() -> Tensor:
                with _tf32() if tf32 else contextlib.nullcontext():
                    return torch.autograd.grad(y, learned, grad, retain_graph=True)[0]

            return Call(run, (read, grad), error)

        def ours() -> Call:
            need_kernels(device)
            packed = functional.bit_pack_spike_dense(spikes)
            return backward_of(lambda w: functional.packed_spike_linear(packed, w), packed)

        def peer() -> Call:
            rival = _peer()
            packed = rival.bit_pack_spike_dense(spikes)
            return backward_of(lambda w: rival.packed_spike_linear(packed, w), packed)

        def tf32() -> Call:
            _need_tf32(device)
            return backward_of(lambda w: F.linear(spikes, w), spikes, tf32=True)

        def dense() -> Call:
            return backward_of(lambda w: F.linear(spikes, w), spikes)

        return {OURS: ours, LINEAR: dense, LINEAR_TF32: tf32, PEER: peer}

    work = _linear_work((n, m, k), dtype, m * -(-k // 8), _planes(dtype))
    variants = (OURS, LINEAR, LINEAR_TF32, PEER) if dtype == "fp32" else (OURS, LINEAR, PEER)
    return Case("packed_spike_linear_backward", f"{m}x{k}x{n}", dtype, work, variants, build)


def _sparse_linear_case(shape: tuple[int, int, int], dtype: str, percent: int) -> Case:
    m, k, n = shape

    def build(device: torch.device) -> Makers:
        spikes, weight = random_spikes((m, k), percent / 100, dtype, device), random_normal((n, k), dtype, device)
        error = _product_error(spikes, weight)

        def ours(strategy: str, density: float | None = None) -> Call:
            need_kernels(device)

            def run() -> Tensor:
                return functional.sparse_linear(spikes, weight, strategy=strategy, density=density)

            return Call(run, (spikes, weight), error)

        def peer() -> Call:
            product = _peer().sparse_linear
            return Call(lambda: product(spikes, weight, strategy="sparse"), (spikes, weight), error)

        return {
            OURS: lambda: ours("sparse"),
            OURS_AUTO: lambda: ours("auto", percent / 100),
            PEER: peer,
            **_dense_products(spikes, weight, error),
        }

    work = _linear_work(shape, dtype, m * k * DTYPES[dtype].itemsize, _planes(dtype), percent / 100)
    variants = (OURS, OURS_AUTO, *_dense_names(dtype), PEER)
    return Case("sparse_linear", f"{m}x{k}x{n}, {percent} %", dtype, work, variants, build)


# ---------------------------------------------------------------------------------------------------------------------
# Neurons, alone and with a linear layer


@dataclass(frozen=True)
class NeuronKind:
    """A neuron of the benchmark: ours, the peer's, and its equation in plain torch.

    Attributes:
        name: ``"if"`` or ``"lif"``.
        options: of our functions and of the peer's.
    """

    name: str
    options: Mapping[str, Any]

    def charged(self, v: Tensor, x: Tensor) -> Tensor:
        return v + x if self.name == "if" else v + (x - v) / TAU


IF = NeuronKind("if", {})
LIF = NeuronKind("lif", {"tau": TAU})


def neuron_steps(kind: NeuronKind, x: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Spikes and charged potential of each step of a neuron with threshold 1 and hard reset to 0."""
    for x_t in x:
        h = kind.charged(v, x_t)
        s = (h >= 1).to(x.dtype)
        v = (1 - s) * h
        yield s, h


def loop_spikes(kind: NeuronKind, x: Tensor, v: Tensor) -> Tensor:
    """Spikes ``[T, ...]`` of all steps."""
    return torch.stack([spikes for spikes, _ in neuron_steps(kind, x, v)])


def _simulate_backward(kind: NeuronKind, spikes: Tensor, potentials: Tensor, grad_spike: Tensor) -> Tensor:
    """Gradient of ``x`` with the surrogate ``Sigmoid(ALPHA)``, reset not detached."""
    grad_x = torch.empty_like(grad_spike)
    carry = torch.zeros_like(grad_spike[0])
    for t in reversed(range(len(spikes))):
        step = torch.sigmoid(ALPHA * (potentials[t] - 1))
        derivative = ALPHA * step * (1 - step)
        grad_h = grad_spike[t] * derivative + carry * (1 - spikes[t] - potentials[t] * derivative)
        grad_x[t] = grad_h if kind.name == "if" else grad_h / TAU
        carry = grad_h if kind.name == "if" else grad_h * (1 - 1 / TAU)
    return grad_x


def _peer_neuron(kind: NeuronKind) -> Callable[[Tensor], Tensor]:
    """The peer's multi-step neuron, reset before every call."""
    peer = _peer()
    from spikingjelly.activation_based import neuron
    from spikingjelly.activation_based import surrogate as peer_surrogate

    make = neuron.IFNode if kind.name == "if" else neuron.LIFNode
    node = make(**kind.options, surrogate_function=peer_surrogate.Sigmoid(alpha=ALPHA), step_mode="m")

    def run(x: Tensor) -> Tensor:
        peer.reset_net(node)
        spikes: Tensor = node(x)
        return spikes

    return run


def neuron_linear_cases(kind: NeuronKind, sizes: Sizes) -> Iterator[Case]:
    for shape in sizes.fused:
        for trains in (False, True):
            yield _neuron_linear_case(kind, shape, "fp32", trains)
    if sizes.all_dtypes:
        for trains in (False, True):
            yield _neuron_linear_case(kind, sizes.fused[-1], "bf16", trains)


def _neuron_linear_case(kind: NeuronKind, shape: tuple[int, int, int, int], dtype: str, trains: bool) -> Case:
    steps, m, k, n = shape
    name = f"{kind.name}_linear"

    def build(device: torch.device) -> Makers:
        x, weight_t = random_currents((steps, m, k), dtype, device), random_normal((k, n), dtype, device)
        x, weight_t = x.requires_grad_(trains), weight_t.requires_grad_(trains)
        v = torch.zeros(m, k, device=device)
        grad = random_normal((steps, m, n), dtype, device) if trains else None
        error = _fused_error(kind, x.detach(), v, weight_t.detach(), grad)
        inputs = (x, v, weight_t) if grad is None else (x, v, weight_t, grad)

        def call(forward: Callable[[], Tensor]) -> Call:
            def run() -> tuple[Tensor, ...]:
                with torch.set_grad_enabled(trains):
                    y = forward()
                return (y,) if grad is None else (y, *torch.autograd.grad(y, (x, weight_t), grad))

            return Call(run, inputs, error)

        def ours() -> Call:
            need_kernels(device)
            fused = getattr(functional, name)
            sigmoid = surrogate.Sigmoid(ALPHA)
            return call(lambda: fused(x, v, weight_t, surrogate_function=sigmoid, **kind.options)[0])

        def unfused() -> Call:
            need_kernels(device)
            neuron = getattr(functional, f"{kind.name}_spike")
            sigmoid = surrogate.Sigmoid(ALPHA)
            return call(lambda: F.linear(neuron(x, v, surrogate_function=sigmoid, **kind.options)[0], weight_t.t()))

        def peer() -> Call:
            fused = getattr(_peer(), name)
            from spikingjelly.activation_based import surrogate as peer_surrogate

            sigmoid = peer_surrogate.Sigmoid(alpha=ALPHA)
            return call(lambda: fused(x, v, weight_t, surrogate_function=sigmoid, **kind.options)[0])

        def peer_unfused() -> Call:
            neuron = _peer_neuron(kind)
            return call(lambda: F.linear(neuron(x), weight_t.t()))

        return {OURS: ours, UNFUSED: unfused, PEER: peer, PEER_UNFUSED: peer_unfused}

    mode = "forward+backward" if trains else "forward"
    work = _fused_work(shape, dtype, trains)
    variants = (OURS, UNFUSED, PEER, PEER_UNFUSED)
    return Case(f"{name} {mode}", ",".join(map(str, shape)), dtype, work, variants, build)


def _fused_work(shape: tuple[int, int, int, int], dtype: str, trains: bool) -> Work:
    steps, m, k, n = shape
    size = DTYPES[dtype].itemsize
    x, y, weight, v, bits = steps * m * k * size, steps * m * n * size, k * n * size, m * k * 4, steps * m * k // 8
    moved = x + 2 * v + 2 * bits + weight + y
    flops = 2 * steps * m * k * n
    if not trains:
        return Work(bytes=moved, flops=flops, bf16_flops=_planes(dtype) * flops)
    # Backward reads y's gradient, the weight and x, and writes the gradients of x and the weight. A product of two
    # float32 matrices takes six products of bf16 ones (the three smallest of nine vanish in rounding).
    products = 2 * _planes(dtype) + (6 if dtype == "fp32" else 1)
    return Work(bytes=moved + y + 2 * x + bits + 2 * weight, flops=3 * flops, bf16_flops=products * flops)


def _fused_error(
    kind: NeuronKind, x: Tensor, v: Tensor, weight_t: Tensor, grad: Tensor | None
) -> Callable[[tuple[Tensor, ...]], float]:
    """Compares sampled rows of y and x's gradient, and columns of the weight's, with products in float64.

    The spikes are those of the float32 loop: in float64 a few potentials fall on the other side of the threshold, which
    says nothing about a product.
    """
    at = _samples(x.shape[1], _ROWS, x.device)
    columns = _samples(weight_t.shape[1], _COLUMNS, x.device)

    @functools.cache
    def expected() -> tuple[Tensor, ...]:
        steps = neuron_steps(kind, x[:, at].float(), v[at])
        spikes, potentials = (torch.stack(parts).double() for parts in zip(*steps, strict=True))
        weight = weight_t.double()
        y = spikes @ weight
        if grad is None:
            return (y,)
        grad_x = _simulate_backward(kind, spikes, potentials, grad[:, at].double() @ weight.t())
        every_spike = loop_spikes(kind, x.float(), v).flatten(0, 1).double()
        return y, grad_x, every_spike.t() @ grad.flatten(0, 1)[:, columns].double()

    def error(result: tuple[Tensor, ...]) -> float:
        sampled = [result[0][:, at]]
        if grad is not None:
            sampled += [result[1][:, at], result[2][:, columns]]
        return max(relative_error(*pair) for pair in zip(sampled, expected(), strict=True))

    return error


def neuron_spike_cases(kind: NeuronKind, sizes: Sizes) -> Iterator[Case]:
    for dtype in ("fp32", "bf16"):
        yield _neuron_spike_case(kind, sizes.neurons, dtype)


def _neuron_spike_case(kind: NeuronKind, shape: tuple[int, int], dtype: str) -> Case:
    steps, n = shape
    name = f"{kind.name}_spike"

    def build(device: torch.device) -> Makers:
        x, v = random_currents((steps, n), dtype, device), torch.zeros(n, device=device)
        at = _samples(n, _SLICE, device)

        @functools.cache
        def expected() -> Tensor:
            return loop_spikes(kind, x[:, at].double(), v[at].double())

        def error(result: tuple[Tensor, Tensor]) -> float:
            spikes, packed = result
            if _stream_error(packed, spikes.reshape(-1), 1) > 0:
                raise AssertionError("wrong answer: the bits are not those of the spikes")
            return (spikes[:, at].double() != expected()).double().mean().item()

        def call(run: Callable[[], tuple[Tensor, Tensor]]) -> Call:
            def without_graph() -> tuple[Tensor, Tensor]:
                with torch.no_grad():
                    return run()

            return Call(without_graph, (x, v), error)

        def packed(spikes: Tensor) -> tuple[Tensor, Tensor]:
            return spikes, bit_pack(spikes.view(-1))[0]

        def ours() -> Call:
            need_kernels(device)
            neuron = getattr(functional, name)
            return call(lambda: neuron(x, v, return_bits=True, **kind.options)[::2])

        def two_passes() -> Call:
            need_kernels(device)
            neuron = getattr(functional, name)
            return call(lambda: packed(neuron(x, v, **kind.options)[0]))

        def loop() -> Call:
            need_kernels(device)
            return call(lambda: packed(loop_spikes(kind, x, v)))

        def peer() -> Call:
            neuron, compressor = _peer_neuron(kind), _peer_compressor(1)

            def run() -> tuple[Tensor, Tensor]:
                spikes = neuron(x)
                return spikes, compressor.compress(spikes)[0]

            return call(run)

        return {OURS: ours, TWO_PASSES: two_passes, LOOP: loop, PEER_TWO_PASSES: peer}

    size = DTYPES[dtype].itemsize
    work = Work(bytes=2 * steps * n * size + steps * n // 8 + 8 * n)
    variants = (OURS, TWO_PASSES, LOOP, PEER_TWO_PASSES)
    return Case(f"{name} with bits", f"{steps}x{n}", dtype, work, variants, build)


# ---------------------------------------------------------------------------------------------------------------------
# All of them

# Those with a goal first: a run that is out of time leaves out the last.
KERNELS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "device_copy": device_copy,
    "matmul": matmul,
    "bit_pack": bit_pack_cases,
    "bit_unpack": bit_unpack_cases,
    "packed_spike_linear": packed_spike_linear_cases,
    "sparse_linear": sparse_linear_cases,
    "lif_linear": functools.partial(neuron_linear_cases, LIF),
    "lif_spike": functools.partial(neuron_spike_cases, LIF),
    "row_pack": row_pack_cases,
    "count_pack": count_pack_cases,
    "count_unpack": count_unpack_cases,
    "positions": positions_cases,
    "scatter_positions": scatter_positions_cases,
    "packed_spike_linear_backward": packed_spike_linear_backward_cases,
    "if_linear": functools.partial(neuron_linear_cases, IF),
    "if_spike": functools.partial(neuron_spike_cases, IF),
}
# Measured in every run: the floors of all other rows come from them.
CEILINGS = ("device_copy", "matmul")


def make_cases(size: str, only: Sequence[str] = ()) -> list[Case]:
    """The cases at a size, the ceilings first.

    Args:
        size: one of :data:`SIZES`.
        only: names in :data:`KERNELS`; none means all.
    """
    names = [name for name in KERNELS if not only or name in only or name in CEILINGS]
    return [case for name in names for case in KERNELS[name](SIZES[size])]
