"""Positions of ones, and products that skip zeros, by the CUDA sources: on the CPU through a shim, on a GPU by CuPy."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memopt.checkpointing import NonBinarySpikeError, SparseSpikeCompressor, check_pending_fits
from lightning_memopt.functional.sparse import sparse_linear
from lightning_memopt.ops import sparse as positions_module
from lightning_memopt.ops import sparse_linear as product_module
from lightning_memopt.ops.bit_pack import PACKABLE_DTYPES, bit_pack, bit_pack_rows
from lightning_memopt.ops.dispatch import choose_sparse_linear
from lightning_memopt.ops.launch import Kernel, launch, use_backend
from lightning_memopt.ops.packed_linear import packed_linear
from lightning_memopt.ops.sparse import bit_count, bit_positions, position_dtype, scatter_positions, sparse_pack
from lightning_memopt.ops.sparse_linear import sparse_linear as sparse_product
from tests.cuda_on_cpu import CpuKernels
from tests.kernel_backends import Kernels, examples

LENGTHS = (0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 4095, 4096, 4097)
DENSITIES = (0.0, 0.02, 0.5, 1.0)
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

lengths = st.one_of(st.sampled_from(LENGTHS), st.integers(0, 70_000))
densities = st.sampled_from(DENSITIES)
seeds = st.integers(0, 2**31)


def random_spikes(
    shape: tuple[int, ...], density: float, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) < density).to(dtype).to(device)


def and_read_answers(function: Any, *arguments: Any) -> None:
    """Call the function, and ask the device at once whether everything fitted."""
    function(*arguments)
    check_pending_fits()


# ---------------------------------------------------------------------------------------------------------------------
# Positions


@given(
    numel=lengths,
    density=densities,
    seed=seeds,
    room=st.sampled_from((0.0, 0.5, 0.99, 1.0, 1.5)),
    extra=st.integers(0, 9),
)
@settings(max_examples=examples(60))
@pytest.mark.sanitize
def test_the_positions_are_those_of_the_ones_in_ascending_order(
    kernels: Kernels, numel: int, density: float, seed: int, room: float, extra: int
) -> None:
    spikes = random_spikes((numel,), density, kernels.device, seed)
    expected = spikes.nonzero().squeeze(1)
    capacity = int(room * expected.numel()) + extra
    positions, count = bit_positions(bit_pack(spikes)[0], numel, capacity)
    assert (count.dim(), count.dtype, count.item()) == (0, torch.int64, expected.numel())
    assert (positions.shape, positions.dtype) == ((capacity,), torch.int32)
    kept = expected[:capacity]
    assert torch.equal(positions[: kept.numel()].long(), kept)
    assert (positions[kept.numel() :] == numel).all()
    assert bit_count(bit_pack(spikes)[0], numel).item() == expected.numel()
    if capacity >= expected.numel():
        assert torch.equal(scatter_positions(positions, numel, torch.float32), spikes)


@given(numel=lengths, density=densities, seed=seeds, offset=st.integers(0, 15))
@settings(max_examples=examples(20))
def test_bits_may_lie_anywhere_and_what_lies_behind_them_does_not_count(
    kernels: Kernels, numel: int, density: float, seed: int, offset: int
) -> None:
    spikes = random_spikes((numel,), density, kernels.device, seed)
    packed = bit_pack(spikes)[0]
    elsewhere = packed.new_full((packed.numel() + offset + 40,), 0xFF)[offset : offset + packed.numel()].copy_(packed)
    if numel % 8:
        elsewhere[-1] |= 0xFF << (numel % 8) & 0xFF
    positions, count = bit_positions(elsewhere, numel, numel)
    assert count.item() == bit_count(elsewhere, numel).item() == spikes.count_nonzero().item()
    assert torch.equal(positions[: count.item()].long(), spikes.nonzero().squeeze(1))


@given(numel=st.integers(0, 5000), density=densities, seed=seeds, capacity=st.integers(0, 5000))
@settings(max_examples=examples(20))
def test_kernels_and_both_references_list_the_same(
    kernels: Kernels, numel: int, density: float, seed: int, capacity: int
) -> None:
    packed = bit_pack(random_spikes((numel,), density, kernels.device, seed))[0]
    expected = bit_positions(packed, numel, capacity)
    before, positions_module._SLICE = positions_module._SLICE, 1024
    try:
        with use_backend(kernels.device.type, None):
            assert bit_count(packed, numel) == expected[1]
            for reference in (positions_module._list_by_reading, positions_module._list_without_reading):
                positions, count = reference(packed, numel, capacity, torch.int32)
                assert torch.equal(positions, expected[0])
                assert count == expected[1]
            spikes = scatter_positions(expected[0], numel, torch.uint8)
    finally:
        positions_module._SLICE = before
    assert torch.equal(spikes, scatter_positions(expected[0], numel, torch.uint8))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", PACKABLE_DTYPES, ids=str)
def test_spikes_are_made_in_their_dtype_from_positions_in_any_order(kernels: Kernels, dtype: torch.dtype) -> None:
    for index in (torch.int32, torch.int64):
        positions = torch.tensor([7, -1, 3, 3, 9, 0, 10, 2**31 - 1, -(2**31)], dtype=index, device=kernels.device)
        kernels.launches.clear()
        spikes = scatter_positions(positions, 10, dtype)
        assert (spikes.shape, spikes.dtype) == ((10,), dtype)
        assert spikes.tolist() == [1, 0, 0, 1, 0, 0, 0, 1, 0, 1]
        assert len(kernels.launches) == 1
        with use_backend(kernels.device.type, None):
            assert torch.equal(scatter_positions(positions, 10, dtype), spikes)


def test_positions_of_a_long_strided_view_are_read_right(kernels: Kernels) -> None:
    positions = torch.arange(20_000, dtype=torch.int32, device=kernels.device)[::2]
    spikes = scatter_positions(positions, 20_000, torch.float16)
    assert torch.equal(spikes.nonzero().squeeze(1), positions.long())


def test_positions_are_int64_where_int32_would_wrap() -> None:
    assert position_dtype(2**31 - 1) == torch.int32
    assert position_dtype(2**31) == torch.int64
    with FakeTensorMode():
        for numel, dtype in ((2**31 - 8, torch.int32), (2**31, torch.int64), (2**33, torch.int64)):
            positions, count = bit_positions(torch.empty(numel // 8, dtype=torch.uint8), numel, 100)
            assert (positions.dtype, positions.shape, count.dtype) == (dtype, (100,), torch.int64)
        compressor = SparseSpikeCompressor(max_density=0.01)
        payload = compressor.compress_checked(torch.empty(2**16, 2**16, dtype=torch.uint8)).payload
        assert (payload.data.dtype, payload.data.numel()) == (torch.int64, math.ceil(0.01 * 2**32))
        assert compressor.decompress(payload).shape == (2**16, 2**16)


@pytest.mark.sanitize
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_the_kernels_of_both_widths_list_the_same(kernels: Kernels, index: torch.dtype) -> None:
    # Only a tensor of 2**31 elements would choose the wide one.
    numel = 70_000
    spikes = random_spikes((numel,), 0.1, kernels.device)
    expected = spikes.nonzero().squeeze(1)
    packed = bit_pack(spikes)[0]
    through = positions_module._block_counts(packed, numel).cumsum(0)
    positions = torch.empty(numel, dtype=index, device=kernels.device)
    total = torch.empty((), dtype=torch.int64, device=kernels.device)
    kernel = Kernel("sparse.cu", f"list_positions_{str(index)[6:]}", 256)
    arguments = packed, through, positions, total, np.int64(numel), np.int64(numel)
    launch(kernel, through.numel(), *arguments, device=kernels.device)
    assert total.item() == expected.numel()
    assert torch.equal(positions[: expected.numel()].long(), expected)
    assert (positions[expected.numel() :] == numel).all()


def test_ones_beyond_two_to_the_31_are_set(kernels: Kernels) -> None:
    numel = 2**31 + 4096
    if kernels.device.type == "cpu":  # pages that nobody touches cost nothing
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.13 on
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        flat = torch.frombuffer(mmap.mmap(-1, numel, flags=flags), dtype=torch.uint8)
    else:
        flat = torch.zeros(numel, dtype=torch.uint8, device=kernels.device)
    places = [0, 2**31 - 1, 2**31, numel - 1, numel, -1]
    positions = torch.tensor(places, device=kernels.device)
    arguments = positions, flat, np.int64(len(places)), np.int64(numel), np.int64(1)
    launch(Kernel("sparse.cu", "scatter_ones_int64_8", 256), 1, *arguments, device=kernels.device)
    assert [flat[place].item() for place in places[:4]] == [1, 1, 1, 1]
    assert flat[2**31 + 1 : numel - 1].count_nonzero() == 0


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.5, 2.0])
def test_sparse_packing_flags_what_is_no_spike_and_names_it(kernels: Kernels, dtype: torch.dtype, value: float) -> None:
    for place in (0, 77, 4999):
        spikes = random_spikes((5000,), 0.02, kernels.device, dtype=dtype)
        spikes[place] = value
        *_, fits, odd = sparse_pack(spikes, 5000)
        assert not fits.item()
        assert odd.dtype == dtype
        assert odd.item() == value or (math.isnan(value) and math.isnan(odd.item()))


def test_sparse_packing_has_exactly_the_room_it_was_given(kernels: Kernels) -> None:
    for dtype in (torch.float32, torch.bool, torch.int64):
        spikes = random_spikes((5000,), 0.02, kernels.device, dtype=dtype)
        ones = int(spikes.count_nonzero())
        for capacity, expected in ((ones - 1, False), (ones, True), (ones + 1, True)):
            positions, count, fits, odd = sparse_pack(spikes, capacity)
            assert (fits.item(), count.item(), positions.numel()) == (expected, ones, capacity)
            assert odd.dtype == dtype
            if not expected:
                assert odd.item() == 1


# ---------------------------------------------------------------------------------------------------------------------
# The compressor


def layouts(device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    base = random_spikes((2, 6, 5, 7), 0.2, device, dtype=dtype)
    return {
        "contiguous": base,
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "transposed": base.transpose(0, 3),
        "expanded": base[:, :1].expand(2, 6, 5, 7),
        "sliced": base[:, 1:5, ::2],
        "0-dim": torch.ones((), dtype=dtype, device=device),
        "empty": base[:, :0],
        "offset": base.view(-1)[3:],
    }


@pytest.mark.parametrize("max_density", [None, 0.9, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.float64], ids=str)
def test_the_compressor_gives_back_values_strides_and_dtype(
    kernels: Kernels, max_density: float | None, dtype: torch.dtype
) -> None:
    compressor = SparseSpikeCompressor(max_density)
    for name, tensor in layouts(kernels.device, dtype).items():
        compressed = compressor.compress_checked(tensor)
        assert compressed.fits.item(), name
        restored = compressor.decompress(compressed.payload)
        assert torch.equal(restored, tensor), name
        assert (restored.stride(), restored.dtype, restored.device) == (tensor.stride(), tensor.dtype, tensor.device)


def test_a_largest_density_fixes_the_payload_and_reads_no_count(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = random_spikes((100, 100), 0.02, kernels.device)
    compressor = SparseSpikeCompressor(max_density=0.031)
    monkeypatch.setattr("lightning_memopt.checkpointing.compressors.bit_count", None)
    sizes = {compressor.compress_checked(x).payload.data.nbytes for x in (tensor, torch.zeros_like(tensor))}
    assert sizes == {4 * 310}
    kernels.launches.clear()
    compressor.compress_checked(tensor)
    assert kernels.launches == ["bit_pack_float32_1", "count_ones", "list_positions_int32"]


def test_without_a_largest_density_the_payload_has_the_size_of_its_ones(kernels: Kernels) -> None:
    tensor = random_spikes((100, 100), 0.02, kernels.device)
    payload = SparseSpikeCompressor().compress(tensor)
    assert payload.data.tolist() == tensor.view(-1).nonzero().squeeze(1).tolist()


def test_more_ones_than_the_largest_density_do_not_fit_and_the_error_names_it(kernels: Kernels) -> None:
    compressor = SparseSpikeCompressor(max_density=0.1)
    full = torch.zeros(50, device=kernels.device)
    full[:5] = 1
    assert compressor.compress_checked(full).fits.item()
    full[5] = 1
    assert not compressor.compress_checked(full).fits.item()
    with pytest.raises(NonBinarySpikeError, match=r"held 1\.0.*max_density=0\.1.*raise max_density"):
        and_read_answers(compressor.compress, full)


def test_compressors_are_equal_where_their_density_is() -> None:
    assert SparseSpikeCompressor(0.02) == SparseSpikeCompressor(max_density=0.02)
    assert SparseSpikeCompressor(0.02) != SparseSpikeCompressor(0.03)
    assert SparseSpikeCompressor() == SparseSpikeCompressor(None) != SparseSpikeCompressor(1.0)
    assert len({SparseSpikeCompressor(0.02), SparseSpikeCompressor(0.02), SparseSpikeCompressor()}) == 2
    assert [repr(SparseSpikeCompressor(x)) for x in (None, 0.5)] == [
        "SparseSpikeCompressor()",
        "SparseSpikeCompressor(max_density=0.5)",
    ]
    for wrong in (0, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="max_density above 0"):
            SparseSpikeCompressor(wrong)


# ---------------------------------------------------------------------------------------------------------------------
# The product

# More than one strip of rows; a width below, at and beyond the 64 outputs of a block; several slabs of inputs.
ROWS = (1, 7, 8, 9, 63, 64, 65, 130, 700)
FEATURES = (1, 3, 4, 63, 64, 65, 130)
INPUTS = (1, 7, 8, 9, 31, 33, 64, 65, 127, 129, 416, 417, 900)
SLABS = (8, 40, 144, 288, 416)


def integer_weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype).to(device)


@given(
    rows=st.sampled_from(ROWS),
    features=st.sampled_from(FEATURES),
    inputs=st.sampled_from(INPUTS),
    slab=st.sampled_from(SLABS),
    density=densities,
    dtype=st.sampled_from(FLOAT_DTYPES),
    transposed=st.booleans(),
    biased=st.booleans(),
    seed=seeds,
)
@settings(max_examples=examples(80))
@pytest.mark.sanitize
def test_sparse_packed_and_dense_products_of_integers_are_equal(
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    features: int,
    inputs: int,
    slab: int,
    density: float,
    dtype: torch.dtype,
    transposed: bool,
    biased: bool,
    seed: int,
) -> None:
    assume(rows * features * inputs < 10_000_000 and inputs <= 12 * slab)
    monkeypatch.setattr(product_module, "_largest_slab", lambda _: slab)
    spikes = random_spikes((rows, inputs), density, kernels.device, seed, dtype)
    weight = integer_weight((features, inputs), dtype, kernels.device, seed)
    if transposed:
        weight = weight.t().contiguous().t()
    bias = integer_weight((features,), dtype, kernels.device, seed + 7) if biased else None
    packed = bit_pack_rows(spikes)[0]
    dense = F.linear(spikes.double(), weight.double(), None if bias is None else bias.double()).to(dtype)
    out = sparse_product(packed, weight, bias)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((rows, features), dtype, True)
    assert torch.equal(out, dense)
    assert torch.equal(packed_linear(packed, weight, bias), dense)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)], ids=str)
def test_slabs_fit_into_the_shared_memory_of_every_gpu(capability: tuple[int, int]) -> None:
    # The shim refuses a launch with more. The widest slabs, and more than one of them.
    inputs = 2 * product_module._largest_slab(capability)
    spikes = random_spikes((70, inputs), 0.03, torch.device("cpu"))
    weight = integer_weight((65, inputs), torch.float32, spikes.device, 0)
    with use_backend("cpu", CpuKernels(capability=capability)):
        assert torch.equal(sparse_product(bit_pack_rows(spikes)[0], weight), F.linear(spikes, weight))


def test_the_workspace_is_a_quarter_byte_for_each_spike_where_it_matters() -> None:
    rows, features, inputs = 16384, 4096, 4096
    layout = product_module._layout(rows, features, inputs, (9, 0), 132)
    list_bytes = product_module._list_bytes(layout.slab)
    lists = layout.slabs * rows * list_bytes + layout.slabs * layout.strips
    assert rows * inputs // 8 + lists <= rows * inputs // 4
    # A list holds more than twice the ones of 2 %.
    assert list_bytes // 2 - 1 > 2 * 0.02 * layout.slab


@pytest.mark.parametrize("inputs", [1, 7, 9, 41, 100])
@pytest.mark.parametrize("density", [0.05, 1.0])
def test_what_the_last_byte_of_a_row_holds_beyond_its_spikes_does_not_count(
    kernels: Kernels, inputs: int, density: float
) -> None:
    spikes = random_spikes((20, inputs), density, kernels.device)
    weight = integer_weight((5, inputs), torch.float32, kernels.device, 0)
    packed = bit_pack_rows(spikes)[0]
    packed[:, -1] |= 0xFF << ((inputs - 1) % 8 + 1) & 0xFF
    assert torch.equal(sparse_product(packed, weight), F.linear(spikes, weight))


def test_weights_are_added_in_ascending_order_and_the_bias_last(kernels: Kernels) -> None:
    torch.manual_seed(0)
    spikes = random_spikes((70, 900), 0.1, kernels.device)
    weight = torch.randn(65, 900).to(kernels.device)
    bias = torch.randn(65).to(kernels.device)
    expected = torch.zeros(70, 65, device=kernels.device)
    for k in range(900):
        expected += spikes[:, k : k + 1] * weight[:, k]
    assert torch.equal(sparse_product(bit_pack_rows(spikes)[0], weight, bias), expected + bias)
    for dtype in (torch.float16, torch.bfloat16):
        short, short_bias = weight.to(dtype), bias.to(dtype)
        expected = torch.zeros(70, 65, device=kernels.device)
        for k in range(900):
            expected += spikes[:, k : k + 1] * short[:, k].float()
        out = sparse_product(bit_pack_rows(spikes)[0], short, short_bias)
        assert torch.equal(out, (expected + short_bias.float()).to(dtype))


@given(seed=seeds, density=st.sampled_from((0.02, 0.5)))
@settings(max_examples=examples(6))
def test_sums_are_as_accurate_as_float32_allows(kernels: Kernels, seed: int, density: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    spikes = random_spikes((33, 900), density, kernels.device, seed)
    weight = torch.randn(70, 900, generator=generator).to(kernels.device)
    exact = spikes.double() @ weight.double().t()
    terms = spikes.double() @ weight.double().abs().t()
    error = (sparse_product(bit_pack_rows(spikes)[0], weight) - exact).abs()
    count = spikes.sum(1, keepdim=True)
    assert (error <= count * torch.finfo(torch.float32).eps / 2 * terms).all()


def test_the_result_is_the_same_whatever_the_order_of_threads_and_blocks() -> None:
    torch.manual_seed(0)
    spikes, weight = random_spikes((200, 900), 0.05, torch.device("cpu")), torch.randn(130, 900)
    results = []
    for seed in (0, 1, 2, 3):
        for multiprocessors in (1, 3, 64):
            with use_backend("cpu", CpuKernels(seed=seed, multiprocessors=multiprocessors)):
                results.append(sparse_product(bit_pack_rows(spikes)[0], weight))
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_strip_without_ones_in_a_slab_skips_it(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_module, "_largest_slab", lambda _: 64)
    spikes = random_spikes((1100, 512), 0.1, kernels.device)
    spikes[:, 64:256] = 0
    spikes[:512, :64] = 0
    spikes[1000:] = 0
    weight = integer_weight((70, 512), torch.float32, kernels.device, 0)
    bias = integer_weight((70,), torch.float32, kernels.device, 1)
    expected = F.linear(spikes, weight, bias)
    for nothing in (math.nan, math.inf):
        weight[:, 64:256] = nothing  # counts where there is a one only
        assert torch.equal(sparse_product(bit_pack_rows(spikes)[0], weight, bias), expected)
    zeros = torch.zeros_like(spikes)
    assert torch.equal(sparse_product(bit_pack_rows(zeros)[0], weight, bias), bias.expand(1100, 70))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_weights_and_bits_of_any_strides_give_the_right_product(kernels: Kernels, dtype: torch.dtype) -> None:
    spikes = random_spikes((70, 100), 0.1, kernels.device, dtype=dtype)
    packed = bit_pack_rows(spikes)[0]
    storage = integer_weight((150 * 240,), dtype, kernels.device, 0)
    weights = {
        "contiguous": storage[:7000].view(70, 100),
        "offset by one": storage[1:7001].view(70, 100),
        "longer rows": storage[: 70 * 120].view(70, 120)[:, :100],
        "odd longer rows": storage[: 70 * 121].view(70, 121)[:, 20:120],
        "transposed": storage[:7000].view(100, 70).t(),
        "every other": storage[: 140 * 200].view(140, 200)[::2, ::2],
        "expanded over N": storage[:100].expand(70, 100),
        "expanded over K": storage[:70].view(70, 1).expand(70, 100),
    }
    for name, weight in weights.items():
        expected = F.linear(spikes.double(), weight.double()).to(dtype)
        assert torch.equal(sparse_product(packed, weight), expected), name
    apart = torch.full((140, 2 * packed.shape[1]), 0xFF, dtype=torch.uint8, device=kernels.device)[::2, ::2]
    apart.copy_(packed)
    weight = weights["contiguous"]
    bias = storage[: 2 * 70][::2]
    expected = F.linear(spikes.double(), weight.double(), bias.double()).to(dtype)
    assert torch.equal(sparse_product(apart, weight, bias), expected)


@pytest.mark.parametrize(("rows", "features", "inputs"), [(0, 3, 9), (5, 0, 9), (5, 3, 0), (0, 0, 0)])
@pytest.mark.parametrize("strategy", ["auto", "torch", "sparse"])
def test_empty_products_have_their_shape_and_gradients(
    kernels: Kernels, rows: int, features: int, inputs: int, strategy: str
) -> None:
    tensors = torch.zeros(rows, inputs), torch.ones(features, inputs), torch.ones(features)
    tensors = tuple(tensor.to(kernels.device).requires_grad_() for tensor in tensors)
    out = sparse_linear(*tensors, strategy=strategy)
    expected = F.linear(*tensors)
    assert torch.equal(out, expected)
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(expected.sum(), tensors), strict=True
    ):
        assert torch.equal(ours, theirs)


# ---------------------------------------------------------------------------------------------------------------------
# sparse_linear


def inputs_of(lead: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    spikes = random_spikes((*lead, 33), 0.2, device, dtype=dtype)
    weight = integer_weight((7, 33), dtype, device, 0) / 8
    bias = integer_weight((7,), dtype, device, 1) / 8
    return tuple(tensor.requires_grad_() for tensor in (spikes, weight, bias))


def with_gradients(function: Any, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out = function(*tensors)
    generator = torch.Generator().manual_seed(3)
    grad = torch.randint(-4, 5, out.shape, generator=generator).to(out)
    wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    return (out, *torch.autograd.grad(out, wanted, grad))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(), (5,), (4, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize(
    ("strategy", "path"), [("torch", None), ("sparse", None), ("auto", "packed"), ("auto", "sparse")]
)
def test_outputs_and_gradients_are_those_of_a_linear_layer(
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    strategy: str,
    path: str | None,
) -> None:
    if path is not None:
        monkeypatch.setattr("lightning_memopt.functional.sparse.choose_sparse_linear", lambda *_: path)
    tensors = inputs_of(lead, kernels.device, dtype)

    def ours(spikes: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return sparse_linear(spikes, weight, bias, strategy=strategy)

    for got, expected in zip(with_gradients(ours, tensors), with_gradients(F.linear, tensors), strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(got, expected)
    skips = "sparse" in (strategy, path)
    assert skips == any(name.startswith("sparse_linear") for name in kernels.launches)


@pytest.mark.parametrize(
    "needed", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3], ids=str
)
def test_only_needed_gradients_are_computed_and_only_bits_kept(kernels: Kernels, needed: tuple[bool, ...]) -> None:
    spikes, weight, bias = (tensor.detach() for tensor in inputs_of((64,), kernels.device))
    tensors = tuple(tensor.requires_grad_(need) for tensor, need in zip((spikes, weight, bias), needed, strict=True))
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = sparse_linear(*tensors, strategy="sparse")
    assert out.requires_grad == any(needed)
    assert {(tensor.dtype, tensor.numel()) for tensor in kept if tensor.data_ptr() != weight.data_ptr()} == (
        {(torch.uint8, 64 * 5)} if needed[1] else set()
    )
    assert any(tensor.data_ptr() == weight.data_ptr() for tensor in kept) == needed[0]
    if any(needed):
        out.sum().backward()
        expected = torch.autograd.grad(F.linear(*tensors).sum(), [t for t in tensors if t.requires_grad])
        assert torch.equal(next(t.grad for t in tensors if t.requires_grad), expected[0])
        assert sum(t.grad is not None for t in tensors) == 1


def test_a_transposed_weight_gets_a_gradient_of_its_strides(kernels: Kernels) -> None:
    spikes, weight, bias = (tensor.detach() for tensor in inputs_of((64,), kernels.device))
    weight_t = weight.t().contiguous().requires_grad_()
    sparse_linear(spikes, weight_t.t(), bias, strategy="sparse").sum().backward()
    expected = torch.autograd.grad(F.linear(spikes, weight_t.t()).sum(), weight_t)[0]
    assert weight_t.grad is not None
    assert weight_t.grad.stride() == weight_t.stride()
    assert torch.equal(weight_t.grad, expected)


def test_strided_spikes_are_taken_as_they_read(kernels: Kernels) -> None:
    _, weight, bias = inputs_of((), kernels.device)
    base = random_spikes((33, 6, 10), 0.2, kernels.device)
    for spikes in (base.permute(2, 1, 0), base.permute(2, 1, 0)[::2], base[:, 0, 0].expand(4, 33)):
        assert torch.equal(sparse_linear(spikes, weight, bias, strategy="sparse"), F.linear(spikes, weight, bias))


def derivatives(function: Any, tensors: tuple[Tensor, ...], orders: int) -> list[Tensor]:
    """Gradients of each order of a number that depends on all gradients of the order below."""
    number = function(*tensors).pow(3).sum() / 64
    found: list[Tensor] = []
    for order in range(orders):
        grads = torch.autograd.grad(number, tensors, create_graph=order < orders - 1)
        found += grads
        number = sum(grad.pow(2).sum() for grad in grads) / 64
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", ["packed", "sparse"])
def test_derivatives_of_three_orders_are_those_of_a_linear_layer(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, path: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("lightning_memopt.functional.sparse.choose_sparse_linear", lambda *_: path)
    tensors = inputs_of((2, 5), kernels.device, dtype)
    got, expected = derivatives(sparse_linear, tensors, 3), derivatives(F.linear, tensors, 3)
    assert all(grad.abs().max() > 0 for grad in expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        scale = float(theirs.detach().abs().max())
        torch.testing.assert_close(mine, theirs, rtol=0, atol=(1e-5 if dtype is torch.float32 else 0.05) * scale)


@pytest.mark.parametrize("of", ["spikes", "weight"])
def test_a_gradient_penalty_reaches_the_layers_before(kernels: Kernels, of: str) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(33, 6, generator=generator).to(kernels.device).requires_grad_()
    x = torch.randn(9, 6, generator=generator).to(kernels.device)
    _, weight, bias = inputs_of((), kernels.device)

    def penalized(layer: Any) -> tuple[Tensor, ...]:
        potential = x @ hidden.t()
        spikes = (potential > 0).to(x) + potential.sigmoid() - potential.sigmoid().detach()
        spikes = spikes.detach().round() + spikes - spikes.detach()  # zeros and ones, with a gradient
        out = layer(spikes, weight, bias)
        (grad,) = torch.autograd.grad(out.square().sum(), spikes if of == "spikes" else weight, create_graph=True)
        return torch.autograd.grad(out.mean() + (grad.norm(dim=1) - 1).square().mean(), (hidden, weight, bias))

    got = penalized(lambda *t: sparse_linear(*t, strategy="sparse"))
    for mine, theirs in zip(got, penalized(F.linear), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.5, 2.0])
@pytest.mark.parametrize("path", ["packed", "sparse"])
def test_what_is_no_spike_is_refused_with_its_value(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, path: str, value: float
) -> None:
    monkeypatch.setattr("lightning_memopt.functional.sparse.choose_sparse_linear", lambda *_: path)
    spikes, weight, bias = (tensor.detach() for tensor in inputs_of((5,), kernels.device))
    spikes[3, 32] = value
    shape = r" \(5, 33\)" if kernels.device.type == "cpu" else ""  # a GPU combines the answers of several tensors
    with pytest.raises(NonBinarySpikeError, match=rf"sparse_linear: spikes{shape} held {value}"):
        and_read_answers(sparse_linear, spikes, weight, bias)


def test_under_autocast_the_product_has_the_autocast_dtype(kernels: Kernels) -> None:
    tensors = inputs_of((5,), kernels.device)
    for strategy in ("torch", "sparse"):

        def ours(spikes: Tensor, weight: Tensor, bias: Tensor, strategy: str = strategy) -> Tensor:
            return sparse_linear(spikes, weight, bias, strategy=strategy)

        with torch.autocast(kernels.device.type, torch.bfloat16):
            got, expected = with_gradients(ours, tensors), with_gradients(F.linear, tensors)
        assert got[0].dtype == torch.bfloat16
        for mine, theirs in zip(got, expected, strict=True):
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs)


def test_under_autocast_no_copies_of_the_weight_are_kept(kernels: Kernels) -> None:
    spikes, weight, bias = inputs_of((4, 5), kernels.device)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast(kernels.device.type, torch.bfloat16),
    ):
        outputs = [sparse_linear(step, weight, bias, strategy="sparse") for step in spikes]
    weights = [tensor for tensor in kept if tensor.numel() == weight.numel()]
    assert len(weights) == 4
    assert all(tensor.data_ptr() == weight.data_ptr() for tensor in weights)
    assert all(output.dtype == torch.bfloat16 for output in outputs)


def test_a_backward_pass_within_autocast_keeps_the_dtypes_of_the_forward(kernels: Kernels) -> None:
    tensors = inputs_of((5,), kernels.device)
    out = sparse_linear(*tensors, strategy="sparse")
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(out.shape, generator=generator).to(out)
    expected = torch.autograd.grad(out, tensors, grad, retain_graph=True)
    with torch.autocast(kernels.device.type, torch.bfloat16):
        got = torch.autograd.grad(out, tensors, grad)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("strategy", ["auto", "torch", "sparse"])
def test_shapes_are_known_without_data(strategy: str) -> None:
    spikes, weight = torch.empty(4, 8, 16, device="meta"), torch.empty(5, 16, device="meta", requires_grad=True)
    out = sparse_linear(spikes, weight, strategy=strategy)
    assert (out.shape, out.device.type) == ((4, 8, 5), "meta")
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == (5, 16)


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("strategy", ["auto", "torch", "sparse"])
def test_one_graph_serves_batches_of_any_size(kernels: Kernels, strategy: str, marked: bool) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")

    def layer(spikes: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return sparse_linear(spikes, weight, bias, strategy=strategy)

    compiled = torch.compile(layer, fullgraph=True, backend=graphs, dynamic=None if marked else True)
    for size in range(3, 16):
        tensors = inputs_of((size,), kernels.device)
        if marked:
            torch._dynamo.mark_dynamic(tensors[0], 0)
        for got, expected in zip(with_gradients(compiled, tensors), with_gradients(layer, tensors), strict=True):
            torch.testing.assert_close(got, expected)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("strategy", ["auto", "torch", "sparse"])
def test_forward_and_backward_compile_into_one_graph(kernels: Kernels, strategy: str) -> None:
    torch._dynamo.reset()
    tensors = inputs_of((2, 5), kernels.device)

    def layer(spikes: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return sparse_linear(spikes, weight, bias, strategy=strategy, density=0.02)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for got, expected in zip(with_gradients(compiled, tensors), with_gradients(layer, tensors), strict=True):
        torch.testing.assert_close(got, expected)
    if strategy == "sparse":
        assert "sparse_linear_float32" in kernels.launches


def test_operations_pass_opcheck(kernels: Kernels) -> None:
    ops = torch.ops.lightning_memopt
    spikes = random_spikes((9, 11), 0.3, kernels.device)
    packed = bit_pack(spikes.view(-1))[0]
    torch.library.opcheck(ops.bit_count, (packed, 99))
    torch.library.opcheck(ops.bit_positions, (packed, 99, 50))
    torch.library.opcheck(ops.bit_positions, (packed, 99, 5))
    torch.library.opcheck(ops.scatter_positions, (bit_positions(packed, 99, 50)[0], 99, torch.bfloat16))
    weight, bias = (integer_weight(shape, torch.float32, kernels.device, 0) for shape in ((5, 11), (5,)))
    torch.library.opcheck(ops.sparse_linear, (bit_pack_rows(spikes)[0], weight, bias))
    torch.library.opcheck(ops.sparse_linear, (bit_pack_rows(spikes)[0], weight))


CHOICES: list[tuple[tuple[int, int, int], torch.dtype, float | None, tuple[int, int] | None, str]] = [
    ((16384, 4096, 4096), torch.float32, 0.02, (9, 0), "sparse"),
    ((16384, 4096, 4096), torch.float32, 0.2, (9, 0), "packed"),
    ((16384, 4096, 4096), torch.float32, None, (9, 0), "packed"),
    ((16384, 4096, 4096), torch.bfloat16, 0.02, (9, 0), "torch"),
    ((16384, 4096, 4096), torch.bfloat16, 0.005, (9, 0), "sparse"),
    ((65536, 128, 4096), torch.bfloat16, None, (9, 0), "packed"),
    ((16384, 4096, 4096), torch.float32, 0.02, (7, 5), "torch"),
    ((16384, 4096, 4096), torch.float32, 0.02, None, "torch"),
    ((8, 128, 128), torch.float32, 0.02, (9, 0), "torch"),
    ((0, 128, 128), torch.float32, 0.02, (9, 0), "torch"),
]


@pytest.mark.parametrize(("shape", "dtype", "density", "capability", "expected"), CHOICES)
def test_the_path_follows_from_shape_dtype_density_and_device(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    density: float | None,
    capability: tuple[int, int] | None,
    expected: str,
) -> None:
    assert choose_sparse_linear(*shape, dtype, density, capability) == expected


def test_a_device_without_these_kernels_still_multiplies() -> None:
    tensors = inputs_of((5,), torch.device("cpu"))
    expected = with_gradients(F.linear, tensors)
    for strategy in ("auto", "torch", "sparse"):
        got = with_gradients(lambda *t, s=strategy: sparse_linear(*t, strategy=s), tensors)
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def bits(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def fp(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


WRONG: dict[str, Any] = {
    "bits of another length": (lambda d: bit_positions(bits((3,), d), 8, 1), r"ceil\(8 / 8\).*\(3,\)"),
    "bits in two dimensions": (lambda d: bit_count(bits((1, 1), d), 8), r"\(1, 1\)"),
    "bits of another dtype": (lambda d: bit_positions(fp((1,), d), 8, 1), "float32"),
    "a negative length": (lambda d: bit_count(bits((0,), d), -1), "-1"),
    "a negative capacity": (lambda d: bit_positions(bits((1,), d), 8, -1), "capacity=-1"),
    "positions of another dtype": (lambda d: scatter_positions(fp((1,), d), 8, torch.uint8), "float32"),
    "positions in two dimensions": (lambda d: scatter_positions(bits((1, 1), d).int(), 8, torch.uint8), r"\(1, 1\)"),
    "complex spikes": (lambda d: scatter_positions(bits((1,), d).int(), 8, torch.complex64), "complex64"),
    "a negative size": (lambda d: scatter_positions(bits((1,), d).int(), -8, torch.uint8), "numel=-8"),
    "a product of other lengths": (lambda d: sparse_product(bits((4, 2), d), fp((3, 8), d)), r"\(4, 2\).*\(3, 8\)"),
    "a product of floats": (lambda d: sparse_product(fp((4, 1), d), fp((3, 8), d)), "packed.*float32"),
    "a double weight": (lambda d: sparse_product(bits((4, 1), d), fp((3, 8), d).double()), "float64"),
    "a bias of another dtype": (
        lambda d: sparse_product(bits((4, 1), d), fp((3, 8), d), fp((3,), d).half()),
        "bias.*float16",
    ),
    "a bias of another length": (lambda d: sparse_product(bits((4, 1), d), fp((3, 8), d), fp((4,), d)), r"bias \(4,\)"),
    "a weight elsewhere": (lambda d: sparse_product(bits((4, 1), d), fp((3, 8), torch.device("meta"))), "one device"),
    "a strategy": (lambda d: sparse_linear(fp((4, 8), d), fp((3, 8), d), strategy="fast"), "'fast'"),
    "a density": (lambda d: sparse_linear(fp((4, 8), d), fp((3, 8), d), density=2.0), r"2\.0"),
    "spikes of another length": (lambda d: sparse_linear(fp((4, 9), d), fp((3, 8), d)), r"\(4, 9\).*\(3, 8\)"),
    "spikes without dimensions": (lambda d: sparse_linear(fp((), d), fp((3, 8), d)), r"spikes \(\)"),
    "spikes of another dtype": (lambda d: sparse_linear(fp((4, 8), d).half(), fp((3, 8), d)), "float16.*float32"),
    "integer spikes": (lambda d: sparse_linear(bits((4, 8), d), fp((3, 8), d)), "uint8"),
    "a weight vector": (lambda d: sparse_linear(fp((4, 8), d), fp((8,), d)), r"weight \(8,\)"),
    "a bias matrix": (lambda d: sparse_linear(fp((4, 8), d), fp((3, 8), d), fp((3, 1), d)), r"bias \(3, 1\)"),
    "tensors on two devices": (lambda d: sparse_linear(fp((4, 8), d), fp((3, 8), torch.device("meta"))), "one device"),
}


def test_positions_of_any_number_come_from_one_graph(kernels: Kernels) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")

    def round_trip(spikes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        numel = spikes.shape[0]
        positions, count, fits, _ = sparse_pack(spikes, capacity=numel // 2)
        return scatter_positions(positions, numel, spikes.dtype), count, fits

    compiled = torch.compile(round_trip, fullgraph=True, backend=graphs)
    for size in range(40, 53):
        spikes = random_spikes((size,), 0.2, kernels.device, size)
        torch._dynamo.mark_dynamic(spikes, 0)
        for got, expected in zip(compiled(spikes), round_trip(spikes), strict=True):
            assert torch.equal(got, expected)
    assert graphs.frame_count == 1


def test_transforms_of_functions_are_refused_in_words(kernels: Kernels) -> None:
    spikes, weight, _ = (tensor.detach() for tensor in inputs_of((5,), kernels.device))
    with pytest.raises(RuntimeError, match=r'torch\.func.*strategy="torch"'):
        torch.func.grad(lambda w: sparse_linear(spikes, w, strategy="sparse").sum())(weight)
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.vmap(lambda s: sparse_linear(s, weight, strategy="sparse"))(spikes.unsqueeze(1))
    expected = spikes.sum(0).expand(7, 33)
    assert torch.equal(torch.func.grad(lambda w: sparse_linear(spikes, w, strategy="torch").sum())(weight), expected)


WRONG_TYPES: dict[str, Any] = {
    "a list of spikes": (lambda s, w: sparse_linear([1.0], w), "spikes as a tensor, got list"),
    "no weight": (lambda s, w: sparse_linear(s, None), "weight as a tensor, got NoneType"),
    "a number as bias": (lambda s, w: sparse_linear(s, w, 1.0), "bias as a tensor, got float"),
    "sparse spikes": (lambda s, w: sparse_linear(s.to_sparse(), w), r"dense spikes.*sparse_coo.*to_dense\(\)"),
    "a nested weight": (lambda s, w: sparse_linear(s, torch.nested.nested_tensor([w])), "dense weight.*nested"),
    "a word as density": (lambda s, w: sparse_linear(s, w, density="few"), "density as a number, got 'few'"),
}


@pytest.mark.filterwarnings("ignore")  # torch says that nested tensors may change
@pytest.mark.parametrize("which", WRONG_TYPES)
def test_other_types_are_refused_by_name(kernels: Kernels, which: str) -> None:
    call, message = WRONG_TYPES[which]
    with pytest.raises(TypeError, match=message):
        call(fp((4, 8), kernels.device), fp((3, 8), kernels.device))
    assert kernels.launches == []


@pytest.mark.parametrize("which", WRONG)
def test_wrong_input_is_refused_before_any_launch(kernels: Kernels, which: str) -> None:
    call, message = WRONG[which]
    with pytest.raises(ValueError, match=message):
        call(kernels.device)
    assert kernels.launches == []
