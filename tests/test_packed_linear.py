"""Products of packed spikes: every way to compute them, against dense products and float64."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memopt.functional.packed import packed_spike_linear
from lightning_memopt.ops import dispatch
from lightning_memopt.ops import packed_linear as implementation
from lightning_memopt.ops.bit_pack import bit_pack_rows
from lightning_memopt.ops.launch import Backend, Kernel, backend_for, launch, use_backend
from lightning_memopt.ops.packed_linear import packed_linear, packed_linear_grad_weight
from tests.benchmark_scripts import benchmark_scripts
from tests.kernel_backends import Kernels, examples

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FUSED = ["256x128", "256x64", "256x32", "256x16", "64x64"]
PATHS = [*(f"fused {tile}" for tile in FUSED), "wgmma", "unpack", "simt", "reference"]
SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129]

# Truncation of a sum, as tensor cores do it, and rounding of a result.
TRUNCATION = 2.0**-23
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST_NORMAL = {torch.float32: 2.0**-126, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}

sizes = st.sampled_from(SIZES)


@contextlib.contextmanager
def forced(path: str, kernels: Kernels, chunk_rows: int | None = None) -> Iterator[None]:
    """Within the context, products take ``path``, and where it unpacks, ``chunk_rows`` rows at a time."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if path == "reference":
            stack.enter_context(use_backend(kernels.device.type, None))
        name, _, tile = path.partition(" ")
        if name == "wgmma":
            require_wgmma(kernels.device)
            patch.setattr(implementation, "_wgmma_is_right", lambda *_: True)
        patch.setattr(dispatch, "choose_packed_linear", lambda *_: name)
        patch.setattr(dispatch, "choose_packed_tile", lambda *_: tile)
        if chunk_rows is not None:
            patch.setattr(dispatch, "choose_chunk_rows", lambda rows, *_: min(rows, chunk_rows))
            patch.setattr(dispatch, "choose_gradient_chunk_rows", lambda rows, *_: min(rows, chunk_rows))
        kernels.launches.clear()
        yield
        if path != "reference":
            products = [entry for entry in kernels.launches if entry.startswith("packed_linear")]
            expected = {
                "fused": f"_{tile}",
                "wgmma": "packed_linear_wgmma_",
                "simt": "packed_linear_simt_",
                "unpack": "none",
            }[name]
            assert all(expected in entry for entry in products), f"{path} launched {products}"


def require_wgmma(device: torch.device) -> None:
    backend = backend_for(device)
    if backend is None or backend.capability(device)[0] != 9:
        pytest.skip("needs a GPU of the Hopper generation")


def draw_spikes(rows: int, inputs: int, density: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, inputs, generator=generator) < density).float()


def pack(spikes: Tensor, device: torch.device) -> Tensor:
    return bit_pack_rows(spikes.to(device))[0]


def error_bound(spikes: Tensor, weight: Tensor, bias: Tensor | None, exact: Tensor) -> Tensor:
    """How far a product may be from ``exact``, its value in float64.

    One addition per input and plane at most, each off by 2^-23 of the sum of magnitudes, which for the second and third
    plane is at most 2^-7 and 2^-14 of the weight's; the bias; the rounding of the result; what counts as zero.
    """
    magnitude = spikes.double() @ weight.double().abs().t()
    if bias is not None:
        magnitude = magnitude + bias.double().abs()
    additions = spikes.shape[1] * (1 + 2.0**-7 + 2.0**-14) + 3
    tiny = (spikes.shape[1] + 1) * SMALLEST_NORMAL[weight.dtype]
    return additions * TRUNCATION * magnitude + 1.01 * ROUNDING[weight.dtype] * exact.abs() + tiny


def exact_product(spikes: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = spikes.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


# ---------------------------------------------------------------------------------------------------------------------
# The product


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=examples(12))
@given(
    rows=sizes,
    features=sizes,
    inputs=sizes,
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_integer_weights_give_the_exact_product(
    kernels: Kernels,
    path: str,
    rows: int,
    features: int,
    inputs: int,
    dtype: torch.dtype,
    with_bias: bool,
    density: float,
    seed: int,
) -> None:
    spikes = draw_spikes(rows, inputs, density, seed)
    generator = torch.Generator().manual_seed(seed)
    # Sums stay below 2^24, so float32 holds each of them; of 16 bits, so that they need more than one plane.
    largest = 2**16 if dtype == torch.float32 else 2**7
    weight = torch.randint(-largest, largest + 1, (features, inputs), generator=generator).to(dtype)
    bias = torch.randint(-largest, largest + 1, (features,), generator=generator).to(dtype) if with_bias else None
    packed = pack(spikes, kernels.device)
    with forced(path, kernels):
        out = packed_linear(packed, weight.to(kernels.device), None if bias is None else bias.to(kernels.device))
    assert out.dtype == dtype
    assert torch.equal(out.cpu(), exact_product(spikes, weight, bias).to(dtype))


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=examples(8))
@given(
    rows=sizes,
    features=sizes,
    inputs=sizes,
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    exponent=st.sampled_from([-120, -40, 0, 40, 100]),
    seed=st.integers(0, 2**31),
)
def test_random_weights_stay_within_the_bound_of_float32_sums(
    kernels: Kernels,
    path: str,
    rows: int,
    features: int,
    inputs: int,
    dtype: torch.dtype,
    with_bias: bool,
    exponent: int,
    seed: int,
) -> None:
    spikes = draw_spikes(rows, inputs, 0.3, seed)
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 ** (exponent if dtype != torch.float16 else exponent / 20)
    weight = (torch.randn(features, inputs, generator=generator) * scale).to(dtype)
    bias = (torch.randn(features, generator=generator) * scale).to(dtype) if with_bias else None
    packed = pack(spikes, kernels.device)
    with forced(path, kernels, chunk_rows=48):
        out = packed_linear(packed, weight.to(kernels.device), None if bias is None else bias.to(kernels.device))
    exact = exact_product(spikes, weight, bias)
    assert ((out.cpu().double() - exact).abs() <= error_bound(spikes, weight, bias, exact)).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_spike_selects_a_weight_bit_for_bit(kernels: Kernels, path: str, dtype: torch.dtype) -> None:
    inputs = 137
    weight = torch.randn(70, inputs) * torch.logspace(-30, 30, inputs)
    weight = weight.to(dtype) if dtype != torch.float16 else torch.randn(70, inputs).to(dtype)
    largest = torch.finfo(dtype).max
    weight[:2, :3] = torch.tensor([[largest, -largest, torch.finfo(dtype).tiny], [0.0, 1.0, 1 + 2.0**-7]])
    if dtype == torch.float32:
        weight[3, :2] = torch.tensor([1 + 2.0**-23, -(2.0**-100) * (2 - 2.0**-23)])
    packed = pack(torch.eye(inputs), kernels.device)
    with forced(path, kernels):
        out = packed_linear(packed, weight.to(kernels.device))
    assert torch.equal(out.cpu(), weight.t())


@pytest.mark.parametrize("path", [path for path in PATHS if path not in ("simt", "reference")])
def test_planes_are_more_accurate_than_a_float32_product(kernels: Kernels, path: str) -> None:
    torch.manual_seed(1)
    spikes = draw_spikes(64, 2048, 0.2, seed=2)
    weight = torch.randn(48, 2048) / 45
    exact = exact_product(spikes, weight, None)
    with forced(path, kernels):
        out = packed_linear(pack(spikes, kernels.device), weight.to(kernels.device)).cpu()
    plain = torch.mm(spikes.to(kernels.device), weight.to(kernels.device).t()).cpu()
    assert (out.double() - exact).norm() <= (plain.double() - exact).norm()
    assert (out.double() - exact).norm() / exact.norm() < 1e-7


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_and_nan_weights_act_as_in_a_dense_product(kernels: Kernels, path: str, dtype: torch.dtype) -> None:
    spikes = draw_spikes(40, 50, 0.9, seed=3)
    spikes[:4] = 1
    weight = torch.randint(-4, 5, (9, 50)).to(dtype)
    weight[1, 3], weight[2, 4], weight[3, 5] = math.inf, -math.inf, math.nan
    weight[4, 6], weight[4, 7] = math.inf, -math.inf
    if dtype == torch.float32:  # a NaN whose upper 16 bits are those of infinity
        weight[5, 8] = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)[0]
    with forced(path, kernels):
        out = packed_linear(pack(spikes, kernels.device), weight.to(kernels.device)).cpu()
    dense = exact_product(spikes, weight, None).to(dtype)
    assert torch.equal(out.isnan(), dense.isnan())
    assert torch.equal(out.nan_to_num(0.5), dense.nan_to_num(0.5))
    assert dense.isinf().any()
    assert dense.isnan().any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_subnormal_weights_count_as_zero_at_most(kernels: Kernels, path: str, dtype: torch.dtype) -> None:
    spikes = draw_spikes(20, 33, 0.5, seed=4)
    weight = (torch.randn(5, 33) * 2.0**-127).to(dtype)
    with forced(path, kernels):
        out = packed_linear(pack(spikes, kernels.device), weight.to(kernels.device)).cpu()
    assert ((out.double() - exact_product(spikes, weight, None)).abs() <= 33 * 2.0**-126).all()


def strided(weight: Tensor, layout: str) -> Tensor:
    """A tensor equal to ``weight``, laid out in another way."""
    rows, columns = weight.shape
    if layout == "transposed":
        return weight.t().contiguous().t()
    if layout == "every other column":
        wide = weight.new_full((rows, 2 * columns), 99.0)
        wide[:, ::2] = weight
        return wide[:, ::2]
    if layout == "offset by one":
        flat = weight.new_full((1 + weight.numel(),), 99.0)
        flat[1:] = weight.flatten()
        return flat[1:].view(rows, columns)
    wide = weight.new_full((rows, -(-columns // 8) * 8 + 8), 99.0)  # "wide rows"
    wide[:, :columns] = weight
    return wide[:, :columns]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["transposed", "every other column", "offset by one", "wide rows"])
@pytest.mark.parametrize("inputs", [136, 75])
def test_weights_of_any_strides(kernels: Kernels, path: str, dtype: torch.dtype, layout: str, inputs: int) -> None:
    spikes = draw_spikes(21, inputs, 0.4, seed=5)
    weight = torch.randint(-99, 100, (37, inputs)).to(dtype)
    with forced(path, kernels, chunk_rows=16):
        out = packed_linear(pack(spikes, kernels.device), strided(weight.to(kernels.device), layout))
    assert torch.equal(out.cpu(), exact_product(spikes, weight, None).to(dtype))


@pytest.mark.sanitize
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("inputs", [256, 224, 100, 7])  # rows aligned to 16 bytes, to 4, to 1
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_packed_rows_at_any_address(kernels: Kernels, path: str, inputs: int, offset: int) -> None:
    spikes = draw_spikes(70, inputs, 0.4, seed=6)
    weight = torch.randint(-99, 100, (5, inputs)).float()
    packed = pack(spikes, kernels.device)
    # An allocation of its own size, so that a read behind the end is one outside of it.
    elsewhere = torch.empty(offset + packed.numel(), dtype=torch.uint8, device=kernels.device)[offset:].view_as(packed)
    elsewhere.copy_(packed)
    with forced(path, kernels, chunk_rows=33):
        out = packed_linear(elsewhere, weight.to(kernels.device))
    assert torch.equal(out.cpu(), exact_product(spikes, weight, None).float())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_of_any_strides_and_bits_beyond_the_inputs(kernels: Kernels, path: str, dtype: torch.dtype) -> None:
    spikes = draw_spikes(21, 83, 0.4, seed=7)
    weight = torch.randint(-99, 100, (6, 83)).to(dtype)
    weight[0, 82] = math.inf
    packed = pack(spikes, kernels.device)
    packed[:, -1] |= 0b11111000
    packed = packed.t().contiguous().t()
    with forced(path, kernels):
        out = packed_linear(packed, weight.to(kernels.device)).cpu()
    dense = exact_product(spikes, weight, None).to(dtype)
    assert torch.equal(out.nan_to_num(0.5), dense.nan_to_num(0.5))


@pytest.mark.sanitize
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(70, 65), (257, 129), (5, 16)])
def test_nothing_is_written_beside_the_output(
    kernels: Kernels, path: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    (rows, features), inputs, guard = shape, 40, 64
    spikes = draw_spikes(rows, inputs, 0.4, seed=8)
    weight = torch.randint(-9, 10, (features, inputs)).to(dtype)
    memory = torch.full((guard + rows * features + guard,), 77.0, dtype=dtype, device=kernels.device)
    out = memory[guard:-guard].view(rows, features)
    backend = backend_for(kernels.device)
    assert backend is not None
    arguments = pack(spikes, kernels.device), weight.to(kernels.device), None, out
    with forced(path, kernels, chunk_rows=128):
        if path == "unpack":
            implementation._unpack(*arguments, backend)
        elif path.startswith("fused"):
            implementation._fused(*arguments, backend)
        elif path == "wgmma":
            implementation._wgmma(*arguments, backend)
        else:
            {"simt": implementation._simt, "reference": implementation._reference}[path](*arguments)
    assert torch.equal(out.cpu(), exact_product(spikes, weight, None).to(dtype))
    assert (memory[:guard] == 77).all()
    assert (memory[-guard:] == 77).all()


@pytest.mark.sanitize
@pytest.mark.parametrize("columns_first", [False, True])
@settings(max_examples=examples(15))
@given(rows=sizes.filter(bool), columns=sizes.filter(bool), extra=st.integers(0, 3), seed=st.integers(0, 2**31))
def test_a_float32_matrix_is_the_exact_sum_of_its_planes(
    kernels: Kernels, columns_first: bool, rows: int, columns: int, extra: int, seed: int
) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    base = torch.empty(columns, rows + extra) if columns_first else torch.empty(rows, columns + extra)
    view = (base.t() if columns_first else base)[:rows, :columns].to(kernels.device)
    view.copy_(matrix)
    backend = backend_for(kernels.device)
    assert backend is not None
    planes = implementation._planes(view, backend).cpu()
    assert planes.shape == (rows, 3, (columns + 7) // 8 * 8)
    assert not planes[:, :, columns:].any()
    parts = planes[:, :, :columns].double()
    assert torch.equal(parts.sum(1), matrix.double())
    assert (parts[:, 0].abs() <= 2.0**-14 * matrix.abs()).all()
    assert (parts[:, 1].abs() <= 2.0**-7 * matrix.abs()).all()
    assert (parts[:, 2].abs() <= matrix.abs()).all()


def test_weight_offsets_beyond_32_bits(kernels: Kernels) -> None:
    stride = 2**31 + 8
    try:
        memory = torch.empty(stride + 64, dtype=torch.bfloat16, device=kernels.device)
    except RuntimeError:
        pytest.skip("needs 4 GiB of address space")
    weight = memory.as_strided((2, 64), (stride, 1))
    weight.copy_(torch.arange(128.0).view(2, 64))
    spikes = draw_spikes(3, 64, 0.5, seed=9)
    for path in ("fused 256x16", "fused 64x64", "wgmma", "simt"):
        with forced(path, kernels):
            out = packed_linear(pack(spikes, kernels.device), weight)
        assert torch.equal(out.cpu(), exact_product(spikes, torch.arange(128.0).view(2, 64), None).bfloat16())


def test_packed_offsets_beyond_32_bits(kernels: Kernels) -> None:
    row_bytes = 2**31 + 16
    try:
        memory = torch.empty(row_bytes + 16, dtype=torch.uint8, device=kernels.device)
    except RuntimeError:
        pytest.skip("needs 2 GiB of address space")
    spikes = draw_spikes(2, 128, 0.5, seed=10)
    packed = memory.as_strided((2, 16), (row_bytes, 1))
    packed.copy_(pack(spikes, kernels.device))
    weight = torch.randint(-9, 10, (3, 128)).bfloat16()
    for name, step in (("256x16", 0), ("64x64", 0), ("64x64", 4), ("64x64", 1), ("wgmma", 0), ("wgmma", 1)):
        if name == "wgmma":
            require_wgmma(kernels.device)
            kernel = implementation._wgmma_kernel(torch.bfloat16)
        else:
            kernel = implementation._fused_kernel(torch.bfloat16, name)
        out = torch.empty(2, 3, dtype=torch.bfloat16, device=kernels.device)
        sizes = (numpy.int64(size) for size in (2, 3, 128 - 8 * step, row_bytes - step, 128, 0))
        # Rows `step` bytes closer together, so that the second starts at an address that is not aligned to 16 bytes.
        launch(
            kernel,
            1,
            memory[step:],
            weight.to(kernels.device),
            None,
            out,
            *sizes,
            numpy.int32(1),
            device=kernels.device,
        )
        shifted = torch.stack([spikes[0].roll(-8 * step), spikes[1]])[:, : 128 - 8 * step]
        assert torch.equal(out.cpu(), exact_product(shifted, weight[:, : 128 - 8 * step], None).bfloat16())


def test_unpacked_chunks_are_bounded(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[int] = []

    def record(packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        unpacked.append(numel * dtype.itemsize)
        return original(packed, numel, dtype)

    original = implementation.bit_unpack
    small = dispatch.Thresholds(chunk_bytes=2**15, largest_chunk_bytes=2**16, chunk_outputs=2**12, gradient_bytes=2**17)
    choose_rows, choose_gradient_rows = dispatch.choose_chunk_rows, dispatch.choose_gradient_chunk_rows
    spikes = draw_spikes(1000, 64, 0.3, seed=11)
    packed = pack(spikes, kernels.device)
    weight = torch.randint(-9, 10, (16, 64)).float()
    grad = torch.randint(-9, 10, (1000, 16)).float()
    for path in ("unpack", "reference"):
        with forced(path, kernels):
            monkeypatch.setattr(implementation, "bit_unpack", record)
            monkeypatch.setattr(dispatch, "choose_chunk_rows", lambda *a: choose_rows(*a, thresholds=small))
            monkeypatch.setattr(
                dispatch, "choose_gradient_chunk_rows", lambda *a: choose_gradient_rows(*a, thresholds=small)
            )
            unpacked.clear()
            out = packed_linear(packed, weight.to(kernels.device))
            assert len(unpacked) > 3
            assert max(unpacked) <= 2**16
            unpacked.clear()
            grad_weight = packed_linear_grad_weight(packed, grad.to(kernels.device), 64)
            assert len(unpacked) > 1
            assert max(unpacked) <= 2**17
            monkeypatch.undo()
        assert torch.equal(out.cpu(), spikes @ weight.t())
        assert torch.equal(grad_weight.cpu(), grad.t() @ spikes)


# ---------------------------------------------------------------------------------------------------------------------
# The weight's gradient


@pytest.mark.parametrize("path", ["kernels", "reference"])
@settings(max_examples=examples(25))
@given(
    rows=sizes,
    features=sizes,
    inputs=sizes,
    dtype=st.sampled_from(DTYPES),
    transposed=st.booleans(),
    chunk_rows=st.sampled_from([16, 48, 1000]),
    seed=st.integers(0, 2**31),
)
def test_the_weight_gradient_of_integers_is_rounded_once(
    kernels: Kernels,
    path: str,
    rows: int,
    features: int,
    inputs: int,
    dtype: torch.dtype,
    transposed: bool,
    chunk_rows: int,
    seed: int,
) -> None:
    spikes = draw_spikes(rows, inputs, 0.5, seed)
    largest = 2**16 if dtype == torch.float32 else 2**7
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randint(-largest, largest + 1, (rows, features), generator=generator).to(dtype)
    with forced(path, kernels, chunk_rows) if path == "reference" else forced("unpack", kernels, chunk_rows):
        result = packed_linear_grad_weight(
            pack(spikes, kernels.device), grad.to(kernels.device), inputs, transposed=transposed
        )
    exact = grad.double().t() @ spikes.double()
    assert result.shape == (features, inputs)
    assert (result.t() if transposed else result).is_contiguous()
    assert torch.equal(result.cpu(), exact.to(dtype))


@settings(max_examples=examples(15))
@given(rows=sizes, features=sizes, inputs=sizes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31))
def test_the_weight_gradient_stays_within_the_bound_of_float32_sums(
    kernels: Kernels, rows: int, features: int, inputs: int, dtype: torch.dtype, seed: int
) -> None:
    spikes = draw_spikes(rows, inputs, 0.3, seed)
    grad = torch.randn(rows, features, generator=torch.Generator().manual_seed(seed)).to(dtype)
    with forced("unpack", kernels, chunk_rows=48):
        result = packed_linear_grad_weight(pack(spikes, kernels.device), grad.to(kernels.device), inputs)
    exact = grad.double().t() @ spikes.double()
    bound = error_bound(spikes.t(), grad.t(), None, exact.t()).t()
    assert ((result.cpu().double() - exact).abs() <= bound).all()


def test_a_single_spike_selects_a_gradient_bit_for_bit(kernels: Kernels) -> None:
    grad = torch.randn(90, 11) * torch.logspace(-30, 30, 90)[:, None]
    result = packed_linear_grad_weight(pack(torch.eye(90), kernels.device), grad.to(kernels.device), 90)
    assert torch.equal(result.cpu(), grad.t())


def test_gradient_planes_are_more_accurate_than_a_float32_product(kernels: Kernels) -> None:
    torch.manual_seed(12)
    spikes, grad = draw_spikes(4096, 40, 0.2, seed=13), torch.randn(4096, 24)
    exact = grad.double().t() @ spikes.double()
    result = packed_linear_grad_weight(pack(spikes, kernels.device), grad.to(kernels.device), 40).cpu()
    assert "split_float32" in kernels.launches
    plain = (grad.to(kernels.device).t() @ spikes.to(kernels.device)).cpu()
    assert (result.double() - exact).norm() <= (plain.double() - exact).norm()


def test_without_float32_sums_of_16_bit_products_nothing_is_rounded_twice(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation, "_mixed_add", lambda device: False)
    spikes = draw_spikes(200, 30, 0.5, seed=14)
    packed = pack(spikes, kernels.device)
    for dtype in DTYPES:
        grad = torch.randint(-99, 100, (200, 9)).to(dtype)
        weight = torch.randint(-99, 100, (9, 30)).to(dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "choose_gradient_chunk_rows", lambda rows, *_: 64)
            result = packed_linear_grad_weight(packed, grad.to(kernels.device), 30)
        assert torch.equal(result.cpu(), (grad.double().t() @ spikes.double()).to(dtype))
        out = packed_linear(packed, weight.to(kernels.device))
        assert torch.equal(out.cpu(), exact_product(spikes, weight, None).to(dtype))


# ---------------------------------------------------------------------------------------------------------------------
# The function with gradients


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 4 * ROUNDING[dtype], "atol": 1e-5 if dtype == torch.float32 else 16 * ROUNDING[dtype]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (6,), (3, 5), (2, 0, 4)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_output_and_gradients_are_those_of_a_linear_layer(
    kernels: Kernels, dtype: torch.dtype, lead: tuple[int, ...], with_bias: bool
) -> None:
    spikes = (torch.rand(*lead, 20) < 0.4).to(kernels.device)
    packed = bit_pack_rows(spikes)[0]
    weight = torch.randn(7, 20, dtype=dtype, device=kernels.device, requires_grad=True)
    bias = torch.randn(7, dtype=dtype, device=kernels.device, requires_grad=True) if with_bias else None
    inputs = [weight] if bias is None else [weight, bias]
    out, dense = packed_spike_linear(packed, weight, bias), F.linear(spikes.to(dtype), weight, bias)
    assert out.shape == dense.shape
    torch.testing.assert_close(out, dense, **tolerance(dtype))
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, grad)
    expected = torch.autograd.grad(dense, inputs, grad)
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g, e, **tolerance(dtype))


def test_only_what_needs_a_gradient_costs_one(kernels: Kernels) -> None:
    packed = pack(draw_spikes(9, 20, 0.5, seed=15), kernels.device)
    weight = torch.randn(4, 20, device=kernels.device)
    bias = torch.zeros(4, device=kernels.device, requires_grad=True)
    out = packed_spike_linear(packed, weight, bias)
    kernels.launches.clear()
    out.sum().backward()
    assert kernels.launches == []
    assert torch.equal(bias.grad.cpu(), torch.full((4,), 9.0))  # type: ignore[union-attr]
    assert not packed_spike_linear(packed, weight).requires_grad


def test_the_gradient_of_a_transposed_weight_has_its_strides(kernels: Kernels) -> None:
    spikes = draw_spikes(9, 20, 0.5, seed=16)
    weight_t = torch.randn(20, 4, device=kernels.device, requires_grad=True)
    packed_spike_linear(pack(spikes, kernels.device), weight_t.t()).backward(torch.ones(9, 4, device=kernels.device))
    grad = weight_t.grad
    assert grad is not None
    assert grad.is_contiguous()
    assert torch.equal(grad.cpu(), spikes.sum(0)[:, None].expand(20, 4))


def test_second_derivatives(kernels: Kernels) -> None:
    spikes = draw_spikes(9, 20, 0.5, seed=17).to(kernels.device)
    weight = torch.randn(4, 20, device=kernels.device, requires_grad=True)
    bias = torch.randn(4, device=kernels.device, requires_grad=True)

    def second(product: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(product().pow(3).sum(), (weight, bias), create_graph=True)
        return torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (weight, bias))

    packed = bit_pack_rows(spikes)[0]
    got = second(lambda: packed_spike_linear(packed, weight, bias))
    expected = second(lambda: F.linear(spikes, weight, bias))
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4 * float(e.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_acts_as_on_a_linear_layer(kernels: Kernels, dtype: torch.dtype) -> None:
    spikes = draw_spikes(9, 20, 0.5, seed=18).to(kernels.device)
    weight = torch.randn(4, 20, device=kernels.device, requires_grad=True)
    bias = torch.randn(4, device=kernels.device, requires_grad=True)
    packed = bit_pack_rows(spikes)[0]
    with torch.autocast(kernels.device.type, dtype):
        out, dense = packed_spike_linear(packed, weight, bias), F.linear(spikes, weight, bias)
    assert out.dtype == dense.dtype == dtype
    torch.testing.assert_close(out, dense, **tolerance(dtype))
    grad = torch.randn_like(out)
    for g, e in zip(
        torch.autograd.grad(out, (weight, bias), grad), torch.autograd.grad(dense, (weight, bias), grad), strict=True
    ):
        assert g.dtype == e.dtype == torch.float32
        torch.testing.assert_close(g, e, **tolerance(dtype))


@pytest.mark.parametrize("path", ["fused 64x64", "unpack", "simt", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bare_operation_is_the_same_under_autocast_and_grad_mode(
    kernels: Kernels, path: str, dtype: torch.dtype
) -> None:
    spikes = draw_spikes(9, 20, 0.5, seed=21)
    packed = pack(spikes, kernels.device)
    weight = torch.randint(-999, 999, (4, 20)).to(kernels.device, dtype).requires_grad_()
    bias = torch.randint(-999, 999, (4,)).to(kernels.device, dtype).requires_grad_()
    grad = torch.randint(-999, 999, (9, 4)).to(kernels.device, dtype)
    with torch.autocast(kernels.device.type, torch.bfloat16), forced(path, kernels):
        out, grad_weight = packed_linear(packed, weight, bias), packed_linear_grad_weight(packed, grad, 20)
    assert torch.equal(out.detach().cpu(), exact_product(spikes, weight.cpu(), bias.cpu()).to(dtype))
    assert torch.equal(grad_weight.cpu(), (grad.cpu().double().t() @ spikes.double()).to(dtype))


def test_no_product_of_an_operation_is_made_in_the_dtype_of_autocast(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled: list[bool] = []
    unpack = implementation.bit_unpack

    def record(*arguments: Any) -> Tensor:
        enabled.append(torch.is_autocast_enabled(kernels.device.type))
        return unpack(*arguments)

    monkeypatch.setattr(implementation, "bit_unpack", record)
    packed = pack(draw_spikes(9, 20, 0.5, seed=22), kernels.device)
    weight = torch.randn(4, 20, device=kernels.device)
    with torch.autocast(kernels.device.type, torch.bfloat16), forced("unpack", kernels):
        packed_linear(packed, weight)
        packed_linear_grad_weight(packed, torch.randn(9, 4, device=kernels.device), 20)
        assert torch.is_autocast_enabled(kernels.device.type)
    assert enabled == [False, False]


def test_under_autocast_bits_are_all_that_is_kept(kernels: Kernels) -> None:
    packed = pack(draw_spikes(9, 20, 0.5, seed=23), kernels.device)
    weight = torch.randn(4, 20, device=kernels.device, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast(kernels.device.type, torch.bfloat16),
    ):
        packed_spike_linear(packed, weight)
    assert [tensor.data_ptr() for tensor in kept] == [packed.data_ptr()]


@pytest.mark.parametrize("path", ["fused 64x64", "unpack", "simt", "reference"])
def test_a_single_packed_byte_may_have_any_strides(kernels: Kernels, path: str) -> None:
    storage = torch.tensor([[5, 9, 7]], dtype=torch.uint8, device=kernels.device)
    weight = torch.ones(2, 8, device=kernels.device, requires_grad=True)
    with forced(path, kernels):
        for packed in (storage.t()[:1, :1].as_strided((1, 1), (1, 3)), storage[:, ::2][:, :1], storage.t()[:1]):
            out = packed_spike_linear(packed, weight)
            assert out.tolist() == [[2.0, 2.0]]
            (grad,) = torch.autograd.grad(out.sum(), weight)
            assert grad.tolist() == [[1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]] * 2


def test_shapes_are_known_without_data() -> None:
    packed, weight = torch.empty(4, 2, dtype=torch.uint8, device="meta"), torch.empty(5, 16, device="meta")
    out = packed_spike_linear(packed, weight.requires_grad_())
    assert (out.shape, out.device.type) == ((4, 5), "meta")
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == (5, 16)


def test_transforms_of_functions_are_refused_in_words(kernels: Kernels) -> None:
    packed = pack(draw_spikes(9, 20, 0.5, seed=24), kernels.device)
    with pytest.raises(RuntimeError, match=r"torch\.func.*Use F\.linear"):
        torch.func.grad(lambda weight: packed_spike_linear(packed, weight).sum())(
            torch.randn(4, 20, device=kernels.device)
        )


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile and the registration


@pytest.mark.parametrize("marked", [True, False])
def test_one_graph_serves_batches_of_any_size(kernels: Kernels, marked: bool) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(packed_spike_linear, fullgraph=True, backend=graphs, dynamic=None if marked else True)
    for size in range(7, 20):  # unlike the other sizes: torch takes sizes that are equal at first for one
        packed = pack(draw_spikes(size, 20, 0.5, seed=size), kernels.device)
        if marked:
            torch._dynamo.mark_dynamic(packed, 0)
        weight = torch.randn(5, 20, device=kernels.device, requires_grad=True)
        out, plain = compiled(packed, weight), packed_spike_linear(packed, weight)
        torch.testing.assert_close(out, plain)
        got, expected = (torch.autograd.grad(product.square().sum(), weight) for product in (out, plain))
        torch.testing.assert_close(got, expected)
    assert graphs.frame_count == 1


def test_one_graph_serves_weights_of_any_size(kernels: Kernels) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(packed_linear_grad_weight, fullgraph=True, backend=graphs, dynamic=True)
    for inputs in range(17, 40):
        spikes = draw_spikes(6, inputs, 0.5, seed=inputs)
        grad = torch.ones(6, 5, device=kernels.device)
        out = compiled(pack(spikes, kernels.device), grad, inputs)
        assert torch.equal(out.cpu(), spikes.sum(0).expand(5, inputs))
    assert graphs.frame_count == 1


@pytest.mark.parametrize("path", ["fused 64x64", "unpack", "simt", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_registration_is_sound(kernels: Kernels, path: str, dtype: torch.dtype) -> None:
    packed = pack(draw_spikes(9, 20, 0.5, seed=19), kernels.device)
    weight = torch.randn(5, 20, dtype=dtype, device=kernels.device)
    bias = torch.randn(5, dtype=dtype, device=kernels.device)
    grad = torch.randn(9, 5, dtype=dtype, device=kernels.device)
    ops = torch.ops.lightning_memopt
    with forced(path, kernels):
        torch.library.opcheck(ops.packed_linear.default, (packed, weight, bias))
        torch.library.opcheck(ops.packed_linear.default, (packed, strided(weight, "transposed"), None))
        torch.library.opcheck(ops.packed_linear_grad_weight.default, (packed, grad, 20))
        torch.library.opcheck(ops.packed_linear_grad_weight.default, (packed, grad, 20, True))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_forward_and_backward_compile_in_one_graph(kernels: Kernels, backend: str) -> None:
    packed = pack(draw_spikes(9, 20, 0.5, seed=20), kernels.device)
    weight = torch.randn(5, 20, device=kernels.device, requires_grad=True)
    weight_t = torch.randn(20, 5, device=kernels.device, requires_grad=True)
    bias = torch.randn(5, device=kernels.device, requires_grad=True)

    def layers(packed: Tensor) -> Tensor:
        return packed_spike_linear(packed, weight, bias).sin() + packed_spike_linear(packed, weight_t.t())

    compiled = torch.compile(layers, fullgraph=True, backend=backend)
    out, plain = compiled(packed), layers(packed)
    torch.testing.assert_close(out, plain)
    grad = torch.randn_like(out)
    inputs = weight, weight_t, bias
    for g, e in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(plain, inputs, grad), strict=True):
        torch.testing.assert_close(g, e)


# ---------------------------------------------------------------------------------------------------------------------
# What does not fit

PACKED = torch.zeros(4, 3, dtype=torch.uint8)
BAD_PRODUCTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "float packed": ((torch.zeros(4, 3), torch.zeros(2, 20)), r"uint8.*packed \(4, 3\) torch.float32"),
    "packed with a gradient": ((torch.zeros(4, 3, requires_grad=True), torch.zeros(2, 20)), "weight and the bias only"),
    "unpacked width": ((torch.zeros(4, 20, dtype=torch.uint8), torch.zeros(2, 20)), r"ceil\(K / 8\).*\(4, 20\)"),
    "weight too wide": ((PACKED, torch.zeros(2, 25)), r"packed \(4, 3\) torch.uint8.*weight \(2, 25\)"),
    "flat weight": ((PACKED, torch.zeros(20)), r"weight \[N, K\], got .*weight \(20,\)"),
    "double weight": ((PACKED, torch.zeros(2, 20).double()), "float32, float16 or bfloat16.*torch.float64"),
    "integer weight": ((PACKED, torch.zeros(2, 20, dtype=torch.int32)), "torch.int32"),
    "long bias": ((PACKED, torch.zeros(2, 20), torch.zeros(3)), r"bias \[N\].*bias \(3,\)"),
    "bias of two dimensions": ((PACKED, torch.zeros(2, 20), torch.zeros(1, 2)), r"bias \(1, 2\)"),
    "bias of another dtype": ((PACKED, torch.zeros(2, 20), torch.zeros(2).half()), "same dtype.*torch.float16"),
    "weight elsewhere": ((PACKED, torch.zeros(2, 20, device="meta")), "one device.*on meta"),
    "bias elsewhere": ((PACKED, torch.zeros(2, 20), torch.zeros(2, device="meta")), "one device.*on meta"),
}


@pytest.mark.parametrize("case", BAD_PRODUCTS)
@pytest.mark.parametrize("function", [packed_spike_linear, packed_linear])
def test_a_product_that_does_not_fit_is_refused_in_words(
    kernels: Kernels, case: str, function: Callable[..., Tensor]
) -> None:
    arguments, message = BAD_PRODUCTS[case]
    placed = [x if x.device.type == "meta" else x.to(kernels.device) for x in arguments]
    if "elsewhere" in case:  # with the meta device among the arguments, torch asks the fake
        message = "one device"
    with pytest.raises(ValueError, match=message):
        function(*placed)
    assert kernels.launches == []
    if "elsewhere" not in case:
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(x) for x in arguments]
        with mode, pytest.raises(ValueError, match=message):
            function(*fakes)


WRONG_TYPES: dict[str, tuple[tuple[Any, ...], str]] = {
    "a list": (([1], torch.zeros(2, 20)), "packed as a tensor, got list"),
    "no weight": ((PACKED, None), "weight as a tensor, got NoneType"),
    "a number as bias": ((PACKED, torch.zeros(2, 20), 1.0), "bias as a tensor, got float"),
    "sparse packed": ((PACKED.to_sparse(), torch.zeros(2, 20)), r"dense packed.*sparse_coo.*to_dense\(\)"),
    "a sparse weight": ((PACKED, torch.zeros(2, 20).to_sparse()), "dense weight.*sparse_coo"),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_other_types_are_refused_by_name(case: str) -> None:
    arguments, message = WRONG_TYPES[case]
    with pytest.raises(TypeError, match=message):
        packed_spike_linear(*arguments)


def test_packed_without_dimensions_is_refused(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="without dimensions"):
        packed_spike_linear(torch.zeros((), dtype=torch.uint8, device=kernels.device), torch.zeros(2, 3))


BAD_GRADIENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "float packed": ((torch.zeros(4, 3), torch.zeros(4, 2), 20), r"uint8.*packed \(4, 3\) torch.float32"),
    "double grad": ((PACKED, torch.zeros(4, 2).double(), 20), "torch.float64"),
    "other rows": ((PACKED, torch.zeros(5, 2), 20), r"packed \(4, 3\).*grad \(5, 2\)"),
    "flat grad": ((PACKED, torch.zeros(4), 20), r"grad \[M, N\], got .*grad \(4,\)"),
    "other inputs": ((PACKED, torch.zeros(4, 2), 25), "in_features 25"),
    "negative inputs": ((PACKED, torch.zeros(4, 2), -1), "in_features -1"),
    "grad elsewhere": ((PACKED, torch.zeros(4, 2, device="meta"), 20), "one device"),
}


@pytest.mark.parametrize("case", BAD_GRADIENTS)
def test_a_gradient_that_does_not_fit_is_refused_in_words(kernels: Kernels, case: str) -> None:
    (packed, grad, inputs), message = BAD_GRADIENTS[case]
    with pytest.raises(ValueError, match=message):
        packed_linear_grad_weight(packed.to(kernels.device), grad if grad.is_meta else grad.to(kernels.device), inputs)
    assert kernels.launches == []
    if not grad.is_meta:
        mode = FakeTensorMode()
        fakes = mode.from_tensor(packed), mode.from_tensor(grad)
        with mode, pytest.raises(ValueError, match=message):
            packed_linear_grad_weight(*fakes, inputs)


# ---------------------------------------------------------------------------------------------------------------------
# The choice of a path


@pytest.mark.parametrize(
    ("shape", "dtype", "capability", "mixed", "path"),
    [
        ((16384, 4096, 4096), torch.float32, (9, 0), True, "unpack"),
        ((16384, 4096, 4096), torch.bfloat16, (9, 0), True, "unpack"),
        ((65536, 128, 4096), torch.bfloat16, (9, 0), True, "wgmma"),
        ((65536, 128, 4096), torch.bfloat16, (8, 0), True, "fused"),
        ((65536, 128, 4096), torch.bfloat16, (10, 0), True, "fused"),
        ((131072, 64, 2048), torch.bfloat16, (9, 0), True, "fused"),
        ((8192, 1024, 1024), torch.bfloat16, (9, 0), True, "wgmma"),
        ((8192, 1024, 1024), torch.bfloat16, (8, 0), True, "unpack"),
        ((2**20, 10, 1024), torch.float16, (12, 0), True, "fused"),
        ((8192, 512, 512), torch.float32, (9, 0), True, "wgmma"),
        ((512, 512, 512), torch.float32, (9, 0), True, "fused"),
        ((16384, 4096, 4096), torch.float32, (9, 0), False, "wgmma"),
        ((16384, 4096, 4096), torch.float32, (8, 0), False, "fused"),
        ((64, 10, 65536), torch.bfloat16, (8, 0), True, "unpack"),
        ((16384, 4096, 4096), torch.float32, (7, 5), True, "simt"),
        ((16384, 4096, 4096), torch.bfloat16, (7, 5), True, "simt"),
        ((16384, 4096, 4096), torch.float16, (7, 5), True, "unpack"),
    ],
)
def test_the_path_follows_from_shape_dtype_and_capability(
    shape: tuple[int, int, int], dtype: torch.dtype, capability: tuple[int, int], mixed: bool, path: str
) -> None:
    assert dispatch.choose_packed_linear(*shape, dtype, capability, mixed) == path


def test_without_the_kernels_of_warpgroups_the_choice_is_that_of_an_older_gpu() -> None:
    for shape in ((65536, 128, 4096), (8192, 1024, 1024), (16384, 4096, 4096), (512, 512, 512)):
        for dtype in DTYPES:
            older = dispatch.choose_packed_linear(*shape, dtype, (8, 0), True)
            assert dispatch.choose_packed_linear(*shape, dtype, (9, 0), True, wgmma=False) == older


# ---------------------------------------------------------------------------------------------------------------------
# The proof that a kernel of warpgroups has to give


@dataclass(frozen=True)
class Spoiled:
    """A backend whose kernels of warpgroups do something else."""

    backend: Backend
    spoil: Callable[[tuple[Any, ...]], None]

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Any, device: torch.device) -> None:
        self.backend.launch(kernel, grid, arguments, device)
        if kernel.entry.startswith("packed_linear_wgmma"):
            self.spoil(arguments)

    def multiprocessors(self, device: torch.device) -> int:
        return self.backend.multiprocessors(device)

    def capability(self, device: torch.device) -> tuple[int, int]:
        return self.backend.capability(device)


def one_wrong_result(arguments: tuple[Any, ...]) -> None:
    arguments[3][-1, -1] += 1024  # the output


def no_result(arguments: tuple[Any, ...]) -> None:
    raise RuntimeError("named symbol not found")


@pytest.fixture
def nothing_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_WGMMA_RIGHT", {})


@pytest.fixture
def wgmma_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products take the kernels of warpgroups whatever their shape, unless these are ruled out."""
    monkeypatch.setattr(dispatch, "choose_packed_linear", lambda *_, wgmma=True: "wgmma" if wgmma else "fused")


@pytest.mark.usefixtures("nothing_proved", "wgmma_first")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_of_warpgroups_proves_itself_before_its_first_product_and_once(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    require_wgmma(kernels.device)
    spikes = draw_spikes(9, 20, 0.5, seed=25)
    weight = torch.randint(-99, 100, (5, 20)).to(kernels.device, dtype)
    packed = pack(spikes, kernels.device)
    state = torch.get_rng_state()
    launches = []
    for _ in range(2):
        kernels.launches.clear()
        out = packed_linear(packed, weight)
        assert torch.equal(out.cpu(), exact_product(spikes, weight.cpu(), None).to(dtype))
        launches.append([entry for entry in kernels.launches if entry.startswith("packed_linear")])
    name = str(dtype).removeprefix("torch.")
    ours = f"packed_linear_wgmma_{name}"
    [other, *rest] = launches[0]
    assert other.startswith(f"packed_linear_{name}_")
    assert rest == [ours, ours]
    assert launches[1] == [ours]
    assert {(packed.device, dtype): True} == implementation._WGMMA_RIGHT
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("nothing_proved", "wgmma_first")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [(one_wrong_result, "1 of 60000 results are wrong"), (no_result, "RuntimeError: named symbol not found")],
)
def test_a_kernel_of_warpgroups_that_fails_is_not_used_and_one_warning_says_so(
    kernels: Kernels, spoil: Callable[[tuple[Any, ...]], None], message: str
) -> None:
    require_wgmma(kernels.device)
    spikes = draw_spikes(9, 20, 0.5, seed=26)
    weight = torch.randint(-99, 100, (5, 20)).to(kernels.device, torch.bfloat16)
    packed = pack(spikes, kernels.device)
    backend = backend_for(kernels.device)
    assert backend is not None
    with use_backend(kernels.device.type, Spoiled(backend, spoil)):
        with pytest.warns(UserWarning, match=f"bfloat16 weights failed its test.*{message}"):
            outs = [packed_linear(packed, weight)]
        kernels.launches.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outs.append(packed_linear(packed, weight))
    for out in outs:
        assert torch.equal(out.cpu(), exact_product(spikes, weight.cpu(), None).bfloat16())
    assert kernels.launches == ["packed_linear_bfloat16_64x64"]


@pytest.mark.usefixtures("nothing_proved")
def test_nothing_is_proved_while_a_graph_is_captured(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_for(kernels.device)
    assert backend is not None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not implementation._wgmma_is_right(torch.device("cuda", 0), torch.bfloat16, backend)
    assert not implementation._WGMMA_RIGHT
    assert kernels.launches == []


@given(
    rows=st.integers(1, 2**24),
    features=st.integers(1, 2**16),
    inputs=st.integers(1, 2**16),
)
def test_chunks_cover_all_rows_within_the_workspace(rows: int, features: int, inputs: int) -> None:
    table = dispatch.THRESHOLDS
    for chunk, row_bytes, most in (
        (dispatch.choose_chunk_rows(rows, features, inputs), 2 * inputs, table.largest_chunk_bytes),
        (dispatch.choose_gradient_chunk_rows(rows, features, inputs), 2 * (inputs + features), table.gradient_bytes),
    ):
        assert chunk == rows or chunk % 128 == 0
        assert 1 <= chunk <= rows + 127
        assert chunk * row_bytes <= most


def test_adding_the_smallest_plane_first_rounds_least_on_tensor_cores() -> None:
    with benchmark_scripts("plane_rounding") as [script]:
        one_sum, largest_first, smallest_first, apart = script.errors(in_features=1024, density=0.5, cases=64).values()
    assert max(smallest_first, apart) < one_sum < largest_first
