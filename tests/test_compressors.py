"""Compressors hold every value exactly or say so, whatever the dtype and the layout."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memopt.checkpointing import (
    BitSpikeCompressor,
    BooleanSpikeCompressor,
    IntegerSpikeCompressor,
    NonBinarySpikeError,
    SparseSpikeCompressor,
    SpikeCompressor,
    Uint8SpikeCompressor,
    check_pending_fits,
    checkpoint_module,
    compressors,
)
from lightning_memopt.ops import bit_pack, bit_unpack

BINARY = [BitSpikeCompressor(), BooleanSpikeCompressor(), SparseSpikeCompressor()]
ALL = [*BINARY, Uint8SpikeCompressor()]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.int64]
LENGTHS = [0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 4095, 4096, 4097, (1 << 20) - 1, (1 << 20) + 9]


def spikes(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) < 0.3).to(dtype)


def layouts(dtype: torch.dtype) -> dict[str, Tensor]:
    base = spikes((4, 3, 5, 6), dtype)
    return {
        "contiguous": base,
        "channels_last": base.to(memory_format=torch.channels_last),
        "transposed": base.transpose(1, 3),
        "permuted": base.permute(2, 0, 3, 1),
        "sliced": base[:, 1:, ::2],
        "offset": base.reshape(-1)[3:203].view(10, 20),
        "expanded": base[:, :1].expand(4, 7, 5, 6),
        "expanded twice": base[:1, :, :1].expand(9, 3, 8, 6),
        "scalar": base[0, 0, 0, 0],
        "empty": base[:0],
        "one row": base[:1],
    }


@pytest.mark.parametrize("compressor", ALL, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_layout_comes_back_with_its_values_shape_dtype_and_strides(
    compressor: SpikeCompressor, dtype: torch.dtype
) -> None:
    for name, tensor in layouts(dtype).items():
        compressed = compressor.compress_checked(tensor)
        assert compressed.fits.item(), name
        back = compressor.decompress(compressed.payload)
        assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert torch.equal(back, tensor), name


@pytest.mark.parametrize("length", LENGTHS)
def test_bits_are_least_significant_first_with_a_zero_tail(length: int) -> None:
    flat = spikes((length,), seed=length)
    packed, fits, _ = bit_pack(flat)
    assert fits.item()
    assert packed.numel() == (length + 7) // 8
    padded = torch.cat([flat, flat.new_zeros(-length % 8)]).view(-1, 8).to(torch.int64)
    assert torch.equal(packed.to(torch.int64), (padded << torch.arange(8)).sum(1))
    assert torch.equal(bit_unpack(packed, length, torch.float32), flat)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 300),
    position=st.integers(0, 299),
    value=st.sampled_from(
        [2.0, 0.5, -1.0, float("nan"), float("inf"), -float("inf"), 1 + 2**-23, 1 - 2**-24, 1e-45, 256.0]
    ),
    compressor=st.sampled_from(BINARY),
)
def test_one_odd_value_anywhere_is_found_and_named(
    length: int, position: int, value: float, compressor: SpikeCompressor
) -> None:
    tensor = spikes((length,))
    tensor[position % length] = value
    compressed = compressor.compress_checked(tensor)
    assert not compressed.fits.item()
    torch.testing.assert_close(compressed.odd, torch.tensor(value), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("value", [256.0, -1.0, 0.5, float("nan"), 1e30])
def test_counts_that_a_byte_cannot_hold_are_found(value: float) -> None:
    tensor = torch.arange(300).remainder(256).float()
    assert Uint8SpikeCompressor().compress_checked(tensor).fits.item()
    tensor[17] = value
    compressed = Uint8SpikeCompressor().compress_checked(tensor)
    assert not compressed.fits.item()
    torch.testing.assert_close(compressed.odd, torch.tensor(value), equal_nan=True, rtol=0, atol=0)


def test_negative_zero_counts_as_zero() -> None:
    assert BitSpikeCompressor().compress_checked(torch.tensor([-0.0, 1.0])).fits.item()


@pytest.mark.parametrize(
    ("compressor", "size"),
    [(BitSpikeCompressor(), 1 / 32), (BooleanSpikeCompressor(), 1 / 4), (Uint8SpikeCompressor(), 1 / 4)],
    ids=repr,
)
def test_payloads_take_the_bytes_that_they_promise(compressor: SpikeCompressor, size: float) -> None:
    tensor = spikes((64, 64))
    payload = compressor.compress(tensor)
    assert sum(leaf.nbytes for leaf in tree_leaves(payload) if isinstance(leaf, Tensor)) == tensor.nbytes * size


def test_positions_of_a_large_uint8_tensor_do_not_wrap() -> None:
    tensor = torch.zeros(70_000, dtype=torch.uint8)
    tensor[[0, 255, 256, 40_000, 69_999]] = 1
    payload = SparseSpikeCompressor().compress(tensor)
    assert payload.data.tolist() == [0, 255, 256, 40_000, 69_999]
    assert torch.equal(SparseSpikeCompressor().decompress(payload), tensor)


@pytest.mark.parametrize("compressor", BINARY, ids=repr)
def test_compressing_directly_what_does_not_fit_raises_with_value_and_remedy(compressor: SpikeCompressor) -> None:
    with pytest.raises(NonBinarySpikeError, match=r"held 2\.0.*cannot store.*Remedy: use Uint8SpikeCompressor"):
        compressor.compress(torch.tensor([0.0, 2.0]))


@pytest.mark.parametrize("tensor", [torch.zeros(3, dtype=torch.complex64), torch.eye(3).to_sparse()])
def test_dtypes_and_layouts_that_cannot_be_stored_are_refused_by_name(tensor: Tensor) -> None:
    with pytest.raises(TypeError, match="stores dense tensors of a real dtype"):
        BitSpikeCompressor().compress(tensor)


@pytest.mark.filterwarnings("ignore")  # torch says that nested and sparse CSR tensors may change
def test_what_is_no_dense_tensor_is_refused_by_name() -> None:
    for wrong in (
        torch.eye(3).to_sparse_csr(),
        torch.nested.nested_tensor([torch.eye(3)]),
        torch.nested.nested_tensor([torch.eye(3)], layout=torch.jagged),
        torch.eye(3).to_mkldnn(),
        torch.quantize_per_tensor(torch.eye(3), 1.0, 0, torch.quint8),
    ):
        for compressor in ALL:
            with pytest.raises(TypeError, match="stores dense tensors of a real dtype"):
                compressor.compress(wrong)
    with pytest.raises(TypeError, match="stores tensors, got list"):
        BitSpikeCompressor().compress([1.0])


@pytest.mark.parametrize("compressor", [Uint8SpikeCompressor(), *map(IntegerSpikeCompressor, (2, 4, 8))], ids=repr)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8, torch.int64], ids=str)
def test_counts_of_short_integers_fit(compressor: SpikeCompressor, dtype: torch.dtype) -> None:
    largest = min(127, 2**compressor.bits - 1)
    counts = torch.tensor([0, 1, 2, 3, largest], dtype=dtype)
    assert torch.equal(compressor.decompress(compressor.compress(counts)), counts)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: IntegerSpikeCompressor(bits=2.0), TypeError, r"bits as an integer, got 2\.0"),
        (lambda: IntegerSpikeCompressor(bits="4"), TypeError, "got '4'"),
        (lambda: IntegerSpikeCompressor(bits=True), TypeError, "got True"),
        (lambda: IntegerSpikeCompressor(bits=3), ValueError, "got 3"),
        (lambda: SparseSpikeCompressor(max_density="few"), TypeError, "max_density as a number, got 'few'"),
        (lambda: SparseSpikeCompressor(max_density=True), TypeError, "got True"),
        (lambda: SparseSpikeCompressor(max_density=float("nan")), ValueError, "got nan"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    make: Callable[[], SpikeCompressor], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_overlapping_memory_is_not_accepted() -> None:
    assert not BitSpikeCompressor().accepts(torch.zeros(10).unfold(0, 4, 1))
    assert BitSpikeCompressor().accepts(torch.zeros(1, 4).expand(3, 4))


def test_compressors_compare_by_kind_and_survive_copying() -> None:
    for compressor in ALL:
        assert copy.deepcopy(compressor) == compressor == pickle.loads(pickle.dumps(compressor))
    assert len(set(ALL)) == 4


class HalfCompressor(SpikeCompressor):
    """Keeps 16 of 32 bits: exact for some values only."""

    def compress(self, tensor: Tensor) -> object:
        return {"half": tensor.half(), "dtype": tensor.dtype}

    def decompress(self, payload: dict) -> Tensor:
        return payload["half"].to(payload["dtype"])


def test_a_users_compressor_is_checked_by_its_round_trip() -> None:
    assert HalfCompressor().compress_checked(torch.tensor([0.5, 3.0])).fits.item()
    compressed = HalfCompressor().compress_checked(torch.tensor([0.5, 1e-30, 3.0]))
    assert not compressed.fits.item()
    assert compressed.odd.item() == pytest.approx(1e-30)


# ---------------------------------------------------------------------------------------------------------------------
# Where reading a value would mean waiting for a device


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat CPU tensors like those of a device: answers are read before the optimizer steps, not at once."""
    monkeypatch.setattr("lightning_memopt.ops.exactness.reading_is_free", lambda tensor: False)
    monkeypatch.setattr(compressors, "reading_is_free", lambda tensor: False)
    monkeypatch.setattr("lightning_memopt.checkpointing.arguments.reading_is_free", lambda tensor: False)


def step(block: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    block(x).pow(2).sum().backward()
    optimizer.step()


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("value", [2.0, float("nan")])
def test_a_value_that_stops_fitting_raises_before_any_weight_changes(value: float) -> None:
    block = checkpoint_module(nn.Linear(16, 4), compressor=BitSpikeCompressor(), name="layer3")
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    step(block, optimizer, spikes((8, 16)))
    before = [p.detach().clone() for p in block.parameters()]
    later = spikes((8, 16))
    later[2, 3] = value
    with pytest.raises(NonBinarySpikeError, match=r"input 0 of layer3 \(Linear\) held (2\.0|nan).*Remedy"):
        step(block, optimizer, later)
    assert all(torch.equal(a, b) for a, b in zip(before, block.parameters(), strict=True))
    # The error was raised once; training may go on with data that fit.
    step(block, optimizer, spikes((8, 16), seed=1))


@pytest.mark.usefixtures("as_on_a_device")
def test_an_input_that_was_never_binary_is_stored_as_it_is_without_an_error() -> None:
    block = checkpoint_module(nn.Linear(16, 4), compressor=BitSpikeCompressor())
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    step(block, optimizer, torch.randn(8, 16))
    step(block, optimizer, torch.randn(8, 16))
    check_pending_fits()


@pytest.mark.usefixtures("as_on_a_device")
def test_zeros_in_the_first_step_prove_nothing() -> None:
    block = checkpoint_module(nn.Linear(16, 4), compressor=BitSpikeCompressor())
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    step(block, optimizer, torch.zeros(8, 16))
    step(block, optimizer, torch.rand(8, 16))  # analog after all: stored as it is, no error
    check_pending_fits()


def test_on_the_cpu_a_value_that_stops_fitting_is_stored_as_it_is_with_one_warning() -> None:
    plain = nn.Linear(16, 4)
    block = checkpoint_module(copy.deepcopy(plain), compressor=BitSpikeCompressor(), name="layer3")
    later = spikes((8, 16))
    later[2, 3] = 0.5
    for x, warns in ((spikes((8, 16)), False), (later, True), (later, False)):
        plain.zero_grad()
        block.zero_grad()
        plain(x).pow(2).sum().backward()
        if warns:
            with pytest.warns(UserWarning, match=r"Input 0 of layer3 \(Linear\) held 0\.5.*stored as it is"):
                block(x).pow(2).sum().backward()
        else:
            block(x).pow(2).sum().backward()
        assert torch.equal(plain.weight.grad, block.weight.grad)


def test_answers_of_one_place_are_kept_once_whatever_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a device: answers are read later. Inference over many lengths must not pile them up.
    monkeypatch.setattr("lightning_memopt.ops.exactness.reading_is_free", lambda tensor: False)
    from lightning_memopt import functional
    from lightning_memopt.ops import exactness

    for length in range(1, 50):
        functional.bit_spike_compress(torch.ones(length))
    assert len(exactness._PENDING) == 1
    functional.bit_spike_compress(torch.full((3,), 0.5, dtype=torch.float16))
    functional.bit_spike_compress(torch.ones(4))
    with pytest.raises(NonBinarySpikeError, match=r"bit_spike_compress: spikes held 0.5"):
        check_pending_fits()
    assert not exactness._PENDING
