"""Packing of spikes and counts by the CUDA sources: on the CPU through a shim, on a GPU through CuPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_memopt import functional
from lightning_memopt.checkpointing import (
    BitSpikeCompressor,
    BooleanSpikeCompressor,
    IntegerSpikeCompressor,
    NonBinarySpikeError,
    Uint8SpikeCompressor,
    check_pending_fits,
)
from lightning_memopt.ops.bit_pack import (
    bit_pack,
    bit_pack_rows,
    bit_unpack,
    bit_unpack_rows,
    pack_binary,
)
from lightning_memopt.ops.launch import use_backend
from tests.cuda_on_cpu import CpuKernels
from tests.kernel_backends import Kernels, examples

LENGTHS = (0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 4095, 4096, 4097, 9000)
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8)
COUNT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)

lengths = st.one_of(st.sampled_from(LENGTHS), st.integers(0, 20000))
seeds = st.integers(0, 2**31)


def random_counts(
    numel: int, dtype: torch.dtype, device: torch.device, seed: int, largest: int = 1, offset: int = 0
) -> Tensor:
    """Integers from 0 to `largest`, starting `offset` elements into their storage."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, largest + 1, (numel + offset,), generator=generator)
    return counts.to(dtype).to(device)[offset:]


def bits_by_hand(spikes: Tensor, bits: int) -> list[int]:
    """The packed stream, spelled out."""
    stream = 0
    for i, count in enumerate(spikes.long().tolist()):
        stream |= count << (bits * i)
    return list(stream.to_bytes(math.ceil(spikes.numel() * bits / 8), "little"))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@given(numel=lengths, offset=st.integers(0, 7), seed=seeds)
@settings(max_examples=examples(20))
@pytest.mark.sanitize
def test_spikes_become_the_little_endian_stream_and_come_back(
    kernels: Kernels, numel: int, offset: int, dtype: torch.dtype, seed: int
) -> None:
    spikes = random_counts(numel, dtype, kernels.device, seed, offset=offset)
    packed, fits, _ = bit_pack(spikes)
    assert fits.item()
    assert packed.tolist() == bits_by_hand(spikes, 1)
    assert torch.equal(bit_unpack(packed, numel, dtype), spikes)


@pytest.mark.parametrize("dtype", COUNT_DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
@given(numel=lengths, offset=st.integers(0, 7), seed=seeds)
@settings(max_examples=examples(12))
@pytest.mark.sanitize
def test_counts_become_the_little_endian_stream_and_come_back(
    kernels: Kernels, numel: int, offset: int, dtype: torch.dtype, bits: int, seed: int
) -> None:
    counts = random_counts(numel, dtype, kernels.device, seed, largest=2**bits - 1, offset=offset)
    packed, fits, _ = bit_pack(counts, bits)
    assert fits.item()
    assert packed.tolist() == bits_by_hand(counts, bits)
    assert torch.equal(bit_unpack(packed, numel, dtype, bits), counts)


@given(numel=lengths, dtype=st.sampled_from(KERNEL_DTYPES), seed=seeds, offset=st.integers(0, 15))
@settings(max_examples=20)
def test_packed_bytes_may_lie_anywhere(
    kernels: Kernels, numel: int, dtype: torch.dtype, seed: int, offset: int
) -> None:
    spikes = random_counts(numel, dtype, kernels.device, seed)
    packed = bit_pack(spikes)[0]
    elsewhere = packed.new_empty(packed.numel() + offset)[offset:].copy_(packed)
    assert torch.equal(bit_unpack(elsewhere, numel, dtype), spikes)


def ulp(value: float, dtype: torch.dtype, direction: float) -> float:
    return torch.nextafter(torch.tensor(value, dtype=dtype), torch.tensor(direction, dtype=dtype)).item()


MISFITS = ("nan", "inf", "-1", "0.5", "2", "1 + ulp", "1 - ulp", "smallest subnormal", "-smallest subnormal")


def misfit(which: str, dtype: torch.dtype) -> float:
    if which == "1 + ulp":
        return ulp(1.0, dtype, 2.0)
    if which == "1 - ulp":
        return ulp(1.0, dtype, 0.0)
    if which.endswith("smallest subnormal"):
        return ulp(0.0, dtype, -1.0 if which.startswith("-") else 1.0)
    return float(which)


@pytest.mark.parametrize("which", MISFITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@given(numel=st.sampled_from([n for n in LENGTHS if n]), where=st.floats(0, 0.999), bits=st.sampled_from((1, 2, 4, 8)))
@settings(max_examples=8)
def test_a_value_that_is_no_spike_is_flagged_wherever_it_stands(
    kernels: Kernels, which: str, dtype: torch.dtype, numel: int, where: float, bits: int
) -> None:
    value = misfit(which, dtype)
    spikes = random_counts(numel, dtype, kernels.device, 0)
    spikes[int(where * numel)] = value
    expected = bits == 1 or which != "2"
    for packed, fits, odd in [bit_pack(spikes, bits)] + ([bit_pack_rows(spikes.view(1, -1))] if bits == 1 else []):
        assert fits.item() is not expected
        if expected:
            assert odd.dtype == dtype
            assert odd.item() == value or (math.isnan(value) and math.isnan(odd.item()))
        else:
            assert torch.equal(bit_unpack(packed, numel, dtype, bits), spikes)


@pytest.mark.parametrize(("bits", "maximum", "value", "expected"), [
    (2, None, 3, True), (2, None, 4, False), (4, None, 15, True), (4, None, 16, False), (8, None, 255, True),
    (8, None, 256, False), (8, 1, 1, True), (8, 1, 2, False), (4, 9, 9, True), (4, 9, 10, False),
])  # fmt: skip
def test_counts_up_to_the_maximum_fit(
    kernels: Kernels, bits: int, maximum: int | None, value: int, expected: bool
) -> None:
    for dtype in COUNT_DTYPES:
        if value > 255 and dtype is torch.uint8:
            continue
        counts = torch.zeros(5000, dtype=dtype, device=kernels.device)
        counts[4321] = value
        packed, fits, odd = bit_pack(counts, bits, maximum)
        assert fits.item() is expected, dtype
        if expected:
            assert torch.equal(bit_unpack(packed, 5000, dtype, bits), counts)
        else:
            assert odd.item() == value


def test_negative_zero_counts_as_zero(kernels: Kernels) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for bits in (1, 2, 8):
            packed, fits, _ = bit_pack(torch.full((3000,), -0.0, dtype=dtype, device=kernels.device), bits)
            assert fits.item()
            assert not packed.any()


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@given(
    rows=st.integers(0, 5),
    columns=st.sampled_from((0, 1, 7, 8, 9, 31, 33, 64, 100, 1023, 1024, 1025, 2050)),
    seed=seeds,
)
@example(rows=2, columns=9, seed=0)
@settings(max_examples=examples(12))
@pytest.mark.sanitize
def test_every_row_starts_at_a_byte_and_ends_in_zeros(
    kernels: Kernels, rows: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    spikes = random_counts(rows * columns, dtype, kernels.device, seed).view(rows, columns)
    packed, fits, _ = bit_pack_rows(spikes)
    assert fits.item()
    assert packed.shape == (rows, math.ceil(columns / 8))
    assert packed.tolist() == [bits_by_hand(row, 1) for row in spikes]
    assert torch.equal(bit_unpack_rows(packed, columns, dtype), spikes)


def layouts(device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    base = random_counts(2 * 6 * 5 * 7, dtype, device, 3).view(2, 6, 5, 7)
    return {
        "contiguous": base,
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "transposed": base.transpose(0, 3),
        "expanded": base[:, :1].expand(2, 6, 5, 7),
        "sliced": base[:, 1:5, ::2],
        "0-dim": base[0, 0, 0, 0],
        "empty": base[:, :0],
        "offset": base.view(-1)[3:],
    }


@pytest.mark.parametrize(
    "compressor",
    [BitSpikeCompressor(), BooleanSpikeCompressor(), Uint8SpikeCompressor(), IntegerSpikeCompressor(bits=2)],
    ids=repr,
)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_compressors_give_back_values_strides_and_dtype(kernels: Kernels, compressor: Any, dtype: torch.dtype) -> None:
    for name, tensor in layouts(kernels.device, dtype).items():
        compressed = compressor.compress_checked(tensor)
        assert compressed.fits.item(), name
        restored = compressor.decompress(compressed.payload)
        assert torch.equal(restored, tensor), name
        assert (restored.stride(), restored.dtype, restored.device) == (tensor.stride(), tensor.dtype, tensor.device)


def test_kernels_and_references_give_the_same_bytes(kernels: Kernels) -> None:
    for dtype in KERNEL_DTYPES:
        for bits in (1, 2, 4, 8):
            spikes = random_counts(5003, dtype, kernels.device, bits, largest=1 if dtype is torch.bool else 2**bits - 1)
            by_kernel = bit_pack(spikes, bits)[0]
            with use_backend(kernels.device.type, None):
                assert torch.equal(bit_pack(spikes, bits)[0], by_kernel)


def test_each_operation_is_one_launch_and_allocates_its_result_alone(kernels: Kernels) -> None:
    spikes = random_counts(100_000, torch.float32, kernels.device, 0)
    kernels.launches.clear()
    packed = bit_pack(spikes)[0]
    bit_unpack(packed, spikes.numel(), torch.float32)
    bit_unpack(bit_pack(spikes, 4)[0], spikes.numel(), torch.bfloat16, 4)
    assert kernels.launches == [
        "bit_pack_float32_1",
        "bit_unpack_float32_1",
        "bit_pack_float32_4",
        "bit_unpack_bfloat16_4",
    ]


def test_other_dtypes_are_packed_by_the_reference(kernels: Kernels) -> None:
    for dtype in (torch.float64, torch.int8, torch.int16, torch.int32, torch.int64):
        spikes = random_counts(1000, dtype, kernels.device, 1)
        packed, fits, _ = bit_pack(spikes)
        assert fits.item()
        assert torch.equal(bit_unpack(packed, 1000, dtype), spikes)
        assert kernels.launches == []


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("step", [2, 3])
def test_a_single_byte_may_have_any_stride(kernels: Kernels, bits: int, step: int) -> None:
    stream = torch.tensor([5, 9, 7, 6], dtype=torch.uint8, device=kernels.device)
    byte = stream[::step][:1]
    assert byte.stride() == (step,)
    for dtype in (torch.float32, torch.float64):  # by the kernel, by the reference
        assert torch.equal(bit_unpack(byte, 8 // bits, dtype, bits), bit_unpack(stream[:1], 8 // bits, dtype, bits))
    one = torch.ones(step, device=kernels.device)[::step]
    assert bit_pack(one, bits)[0].tolist() == [1]
    assert bit_pack_rows(one.view(1, 1).t())[0].tolist() == [[1]]
    column = stream.view(1, 4).t()[:1]
    assert bit_unpack_rows(column, 5, torch.float64).tolist() == [[1.0, 0.0, 1.0, 0.0, 0.0]]
    assert functional.bit_spike_decompress(byte, (2, 4)).tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_largest_count_is_compared_in_every_dtype_of_integers(
    kernels: Kernels, dtype: torch.dtype, bits: int
) -> None:
    largest = 1 if dtype is torch.bool else min(2**bits - 1, torch.iinfo(dtype).max)
    counts = torch.tensor([0, 1, largest, 0, largest], device=kernels.device).to(dtype)
    packed, fits, _ = bit_pack(counts, bits)
    assert fits.item()
    assert torch.equal(bit_unpack(packed, 5, dtype, bits), counts)
    if dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        _, fits, odd = bit_pack(torch.where(counts == 1, -1, counts), bits)
        assert not fits.item()
        assert odd.item() == -1


def test_memory_around_the_results_is_left_alone(kernels: Kernels) -> None:
    # The operations allocate their results, so the launch itself is looked at: outputs inside a larger tensor.
    import numpy as np

    from lightning_memopt.ops.launch import Kernel, launch

    for numel in (1, 9, 1025, 4097, 8192):
        spikes = random_counts(numel, torch.float32, kernels.device, 5)
        packed = torch.full((16 + numel // 8 + 17,), 0xA5, dtype=torch.uint8, device=kernels.device)
        fits = torch.ones((), dtype=torch.bool, device=kernels.device)
        odd = torch.zeros((), device=kernels.device)
        tiles = numel // 1024
        target = packed[16:]
        launch(
            Kernel("bit_pack.cu", "bit_pack_float32_1", 256), 3, spikes, target, fits, odd,
            np.int64(numel), np.int64(tiles), np.int32(1), device=kernels.device,
        )  # fmt: skip
        length = math.ceil(numel / 8)
        assert target[:length].tolist() == bits_by_hand(spikes, 1)
        assert (packed[:16] == 0xA5).all()
        assert (target[length:] == 0xA5).all()


BEYOND_31_BITS = [(torch.uint8, 1), (torch.bool, 1), (torch.uint8, 2), (torch.float16, 1), (torch.float32, 4)]


def some_blocks(first: int, last: int | None) -> CpuKernels:
    """A GPU with a block for every tile, of which only some run: memory that nobody touches is not there."""
    return CpuKernels(multiprocessors=2**20, blocks=slice(first, last))


@pytest.mark.parametrize(("dtype", "bits"), BEYOND_31_BITS)
def test_tiles_beyond_31_bits_do_not_wrap(dtype: torch.dtype, bits: int) -> None:
    end = 8 * 512  # no more than the eight warps of the last block take
    spikes = torch.empty(2**31 + 8 * 2048, dtype=dtype)
    spikes[-end:] = random_counts(end, dtype, torch.device("cpu"), 0, largest=2**bits - 1)
    with use_backend("cpu", some_blocks(-1, None)):
        packed = bit_pack(spikes, bits)[0]
        unpacked = bit_unpack(packed, spikes.numel(), dtype, bits)
    assert torch.equal(packed[-end * bits // 8 :], bit_pack(spikes[-end:].clone(), bits)[0])
    assert torch.equal(unpacked[-end:], spikes[-end:])


@pytest.mark.parametrize(("dtype", "bits"), BEYOND_31_BITS)
def test_the_rest_beyond_31_bits_does_not_wrap(dtype: torch.dtype, bits: int) -> None:
    spikes = torch.empty(2**31 + 8 * 2048 + 5, dtype=dtype)
    spikes[-5:] = random_counts(5, dtype, torch.device("cpu"), 0, largest=2**bits - 1)
    # Byte by byte, from the first block on.
    with use_backend("cpu", some_blocks(0, 1)):
        packed = bit_pack(spikes, bits)[0]
        unpacked = bit_unpack(packed, spikes.numel(), dtype, bits)
    expected = bit_pack(spikes[-5:].clone(), bits)[0]
    assert torch.equal(packed[-expected.numel() :], expected)
    assert torch.equal(unpacked[-5:], spikes[-5:])


# ---------------------------------------------------------------------------------------------------------------------
# The operations as torch sees them


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_operations_pass_opcheck(kernels: Kernels, dtype: torch.dtype) -> None:
    ops = torch.ops.lightning_memopt
    spikes = random_counts(99, dtype, kernels.device, 0)
    torch.library.opcheck(ops.bit_unpack, (bit_pack(spikes)[0], 99, dtype))
    torch.library.opcheck(ops.bit_unpack_rows, (bit_pack_rows(spikes.view(9, 11))[0], 11, dtype))
    torch.library.opcheck(ops.pack_binary, (spikes.view(9, 11), True, "spikes"))
    torch.library.opcheck(ops.pack_binary, (spikes.view(9, 11), False, "spikes"))
    # `odd` is written for a misfit only, so a tensor with one makes every output comparable.
    if dtype.is_floating_point:
        spikes[0] = 2
        torch.library.opcheck(ops.bit_pack, (spikes,))
        torch.library.opcheck(ops.bit_pack, (spikes, 4, 1))
        torch.library.opcheck(ops.bit_pack_rows, (spikes.view(9, 11),))


def test_public_functions_compile_into_one_graph(kernels: Kernels) -> None:
    def round_trip(spikes: Tensor) -> tuple[Tensor, Tensor]:
        packed = functional.bit_spike_compress(spikes)
        return functional.bit_spike_decompress(packed, spikes.shape, spikes.dtype), functional.bit_pack_spike_dense(
            spikes
        )

    spikes = random_counts(90, torch.float32, kernels.device, 2).view(9, 10)
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(compiled(spikes), round_trip(spikes), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("marked", [True, False])
def test_one_graph_serves_batches_of_any_size(kernels: Kernels, marked: bool) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")

    def round_trip(spikes: Tensor) -> tuple[Tensor, Tensor]:
        packed = functional.bit_spike_compress(spikes)
        rows = functional.bit_pack_spike_dense(spikes)
        back = bit_unpack_rows(rows, spikes.shape[1], spikes.dtype)
        return functional.bit_spike_decompress(packed, spikes.shape, spikes.dtype), back

    compiled = torch.compile(round_trip, fullgraph=True, backend=graphs, dynamic=None if marked else True)
    for size in range(3, 16):
        spikes = random_counts(size * (size + 7), torch.float32, kernels.device, size).view(size, size + 7)
        if marked:
            torch._dynamo.mark_dynamic(spikes, (0, 1))
        for back in compiled(spikes):
            assert torch.equal(back, spikes)
    assert graphs.frame_count == 1


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch has no such tag")
def test_compiled_cuda_graphs_leave_out_what_reports_to_the_host() -> None:
    assert torch.Tag.cudagraph_unsafe in torch.ops.lightning_memopt.pack_binary.default.tags


@given(shape=st.lists(st.integers(0, 5), max_size=4), seed=seeds)
@settings(max_examples=20)
def test_any_shape_survives_compression(kernels: Kernels, shape: list[int], seed: int) -> None:
    spikes = random_counts(math.prod(shape), torch.float16, kernels.device, seed).view(shape)
    packed = functional.bit_spike_compress(spikes)
    assert packed.shape == (math.ceil(spikes.numel() / 8),)
    assert torch.equal(functional.bit_spike_decompress(packed, spikes.shape, spikes.dtype), spikes)


def test_what_is_not_binary_is_refused_with_its_value(kernels: Kernels) -> None:
    shape = r" \(2, 3\)" if kernels.device.type == "cpu" else ""  # a GPU combines the answers of several tensors
    for pack in (functional.bit_spike_compress, functional.bit_pack_spike_dense):
        with pytest.raises(NonBinarySpikeError, match=rf"spikes{shape} held 0.5.*Remedy"):
            pack_and_check(pack, torch.full((2, 3), 0.5, device=kernels.device))


def pack_and_check(pack: Callable[[Tensor], Tensor], spikes: Tensor) -> None:
    pack(spikes)
    check_pending_fits()  # on the CPU the call itself has raised


WRONG: dict[str, Any] = {
    "two dimensions": (lambda d: bit_pack(torch.ones(2, 2, device=d)), r"\(2, 2\)"),
    "strides": (lambda d: bit_pack(torch.ones(4, device=d)[::2]), r"strides \(2,\)"),
    "complex": (lambda d: bit_pack(torch.ones(4, device=d, dtype=torch.complex64)), "complex64"),
    "bits": (lambda d: bit_pack(torch.ones(4, device=d), 3), "bits=3"),
    "maximum": (lambda d: bit_pack(torch.ones(4, device=d), 2, 4), "maximum=4"),
    "bytes": (lambda d: bit_unpack(torch.ones(4, device=d, dtype=torch.uint8), 8, torch.float32), r"ceil\(8"),
    "dtype of bytes": (lambda d: bit_unpack(torch.ones(1, device=d), 8, torch.float32), "float32"),
    "dtype of spikes": (lambda d: bit_unpack(torch.ones(1, device=d, dtype=torch.uint8), 8, torch.cfloat), "complex"),
    "scalar row": (lambda d: bit_pack_rows(torch.tensor(1.0, device=d)), r"shape \(\)"),
    "row bytes": (lambda d: bit_unpack_rows(torch.ones(2, 2, device=d, dtype=torch.uint8), 8, torch.float32), "8 / 8"),
    "shape": (lambda d: functional.bit_spike_decompress(torch.ones(1, device=d, dtype=torch.uint8), (-1,)), "-1"),
    "complex rows": (lambda d: pack_binary(torch.ones(4, device=d, dtype=torch.cfloat), "x", by_row=True), "complex"),
}


WRONG_TYPES: dict[str, Any] = {
    "a list": (lambda d: functional.bit_spike_compress([1.0]), "spikes as a tensor, got list"),
    "rows in a list": (lambda d: functional.bit_pack_spike_dense([1.0]), "spikes as a tensor, got list"),
    "sparse": (
        lambda d: functional.bit_spike_compress(torch.eye(8, device=d).to_sparse()),
        r"sparse_coo.*to_dense\(\)",
    ),
    "sparse rows": (lambda d: functional.bit_pack_spike_dense(torch.eye(8, device=d).to_sparse_csr()), "sparse_csr"),
    "quantized": (
        lambda d: functional.bit_spike_compress(
            torch.quantize_per_tensor(torch.eye(8, device=d), 1.0, 0, torch.quint8)
        ),
        r"quantized torch.quint8.*dequantize\(\)",
    ),
    "nested": (lambda d: functional.bit_spike_compress(torch.nested.nested_tensor([torch.eye(8, device=d)])), "nested"),
    "bytes in a list": (lambda d: functional.bit_spike_decompress([1], (8,)), "packed as a tensor, got list"),
    "a number as shape": (lambda d: functional.bit_spike_decompress(byte(d), 3), "shape.*got 3"),
    "a fraction in a shape": (lambda d: functional.bit_spike_decompress(byte(d), (2.0, 4)), r"shape.*\(2.0, 4\)"),
    "a word as dtype": (lambda d: functional.bit_spike_decompress(byte(d), (8,), "float"), "dtype, got 'float'"),
}


def byte(device: torch.device) -> Tensor:
    return torch.ones(1, dtype=torch.uint8, device=device)


@pytest.mark.filterwarnings("ignore")  # torch says that nested, sparse CSR and quantized tensors may change
@pytest.mark.parametrize("which", WRONG_TYPES)
def test_other_types_are_refused_by_name(kernels: Kernels, which: str) -> None:
    call, message = WRONG_TYPES[which]
    with pytest.raises(TypeError, match=message):
        call(kernels.device)
    assert kernels.launches == []


@pytest.mark.parametrize("which", WRONG)
def test_wrong_input_is_refused_before_any_launch(kernels: Kernels, which: str) -> None:
    call, message = WRONG[which]
    with pytest.raises(ValueError, match=message):
        call(kernels.device)
    assert kernels.launches == []
