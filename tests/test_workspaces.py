"""What kernels of the CPU take for themselves is what their formulas say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memopt.measuring.allocation_events import AllocationRecorder, measuring_repeatedly
from lightning_memopt.measuring.workspaces import recurrent_buffer_bytes, without_workspaces, workspace_bytes

_aten = torch.ops.aten
# The formulas were found on AVX-512 without AMX; with other instructions oneDNN runs other kernels.
CPU_OF_THE_FORMULAS = (
    torch.backends.mkldnn.is_available()
    and torch.cpu._is_avx512_supported()
    and not torch.cpu._is_amx_tile_supported()
    and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
)
formulas = pytest.mark.skipif(not CPU_OF_THE_FORMULAS, reason="oneDNN runs other kernels on this CPU")
few = settings(max_examples=8, deadline=None, derandomize=True, phases=(Phase.generate,))


@pytest.fixture(autouse=True, scope="module")
def one_thread_and_no_search() -> Iterator[None]:
    """Kernels run in one thread, and recordings do not look again for what was there before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with measuring_repeatedly(torch.device("cpu")):
        yield
    torch.set_num_threads(threads)


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def taken(operation: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[int, Any]:
    """Bytes that an operation holds while it runs beside its results, and these."""
    operation(*arguments)
    recorder = AllocationRecorder()
    recorder.start()
    out = operation(*arguments)
    recording = recorder.stop()
    results = [leaf for leaf in (out if isinstance(out, tuple) else (out,)) if isinstance(leaf, Tensor)]
    held = sum(each.untyped_storage().nbytes() for each in results)
    return recording.peak_bytes - recording.start_bytes - held, out


@formulas
@given(
    dtype=DTYPES,
    transposed=st.booleans(),
    channels=st.tuples(*[st.sampled_from([16, 32, 48])] * 2),
    kernel=st.sampled_from([(3, 1), (3, 2), (4, 2), (2, 2), (1, 1)]),
    size=st.sampled_from([8, 13]),
)
@few
def test_convolutions_copy_their_operands(
    dtype: torch.dtype, transposed: bool, channels: tuple[int, int], kernel: tuple[int, int], size: int
) -> None:
    width, stride = kernel
    data = torch.ones(16, channels[0], size, size, dtype=dtype)
    weight = torch.ones(*(channels if transposed else channels[::-1]), width, width, dtype=dtype)
    how = ([stride] * 2, [width // 2] * 2, [1, 1], transposed, [0, 0], 1)
    forward = (data, weight, None, *how)
    bytes_taken, out = taken(_aten.convolution.default, forward)
    operands = data.nbytes + weight.nbytes + out.nbytes
    # oneDNN's scratch beyond the copies does not grow with the batch and is known roughly.
    scratch = (0.1 if dtype is torch.float32 else 0.2) * operands + 2**15
    assert workspace_bytes(_aten.convolution.default, forward, out) == pytest.approx(bytes_taken, abs=scratch)
    backward = (torch.ones_like(out), data, weight, None, *how, [True, True, False])
    bytes_taken, out = taken(_aten.convolution_backward.default, backward)
    expected = workspace_bytes(_aten.convolution_backward.default, backward, out)
    assert expected == pytest.approx(bytes_taken, abs=scratch)


@formulas
@pytest.mark.parametrize("channels_of_a_group", [(1, 1), (1, 2), (2, 2), (4, 4), (16, 16)])
@pytest.mark.parametrize("width", [3, 5, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_grouped_weights_are_padded_to_blocks(
    channels_of_a_group: tuple[int, int], width: int, dtype: torch.dtype
) -> None:
    read, written = channels_of_a_group
    groups = 48 // read
    data = torch.ones(2, 48, 4, 4, dtype=dtype).to(memory_format=torch.channels_last)
    weight = torch.ones(written * groups, read, width, width, dtype=dtype)
    gradient = torch.ones(2, written * groups, 4, 4, dtype=dtype).to(memory_format=torch.channels_last)
    how = ([1, 1], [width // 2] * 2, [1, 1], False, [0, 0], groups)
    backward = (gradient, data, weight, None, *how, [True, True, False])
    bytes_taken, out = taken(_aten.convolution_backward.default, backward)
    expected = workspace_bytes(_aten.convolution_backward.default, backward, out)
    if dtype is torch.float32:
        assert expected == pytest.approx(bytes_taken, rel=0.01)
    else:  # beside some scratch
        assert expected == pytest.approx(bytes_taken, rel=0.1, abs=2**16)


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_without_onednn_unfold_their_operands(transposed: bool) -> None:
    data = torch.ones(4, 8, 10, 10, dtype=torch.float64)
    weight = torch.ones(8, 8, 3, 3, dtype=torch.float64)
    forward = (data, weight, None, [2, 2], [1, 1], [1, 1], transposed, [0, 0], 1)
    bytes_taken, out = taken(_aten.convolution.default, forward)
    assert workspace_bytes(_aten.convolution.default, forward, out) == bytes_taken > 0
    backward = (torch.ones_like(out), data, weight, None, *forward[3:], [True, True, False])
    bytes_taken, out = taken(_aten.convolution_backward.default, backward)
    assert workspace_bytes(_aten.convolution_backward.default, backward, out) == bytes_taken > 0


@formulas
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    sizes=st.tuples(*[st.sampled_from([32, 64, 128, 384, 512, 1024])] * 3),
    copied=st.booleans(),
)
@few
def test_products_in_16_bits_copy_blocks(dtype: torch.dtype, sizes: tuple[int, int, int], copied: bool) -> None:
    rows, inner, columns = sizes
    left = torch.ones(inner, rows, dtype=dtype).t() if copied else torch.ones(rows, inner, dtype=dtype)
    arguments = (left, torch.ones(inner, columns, dtype=dtype))
    bytes_taken, out = taken(_aten.mm.default, arguments)
    assert workspace_bytes(_aten.mm.default, arguments, out) == pytest.approx(bytes_taken, rel=0.05, abs=2**12)


@formulas
@given(dtype=DTYPES, length=st.sampled_from([32, 100, 200, 800]), width=st.sampled_from([32, 64, 80]))
@few
def test_attention_holds_a_block_of_scores_in_each_thread(dtype: torch.dtype, length: int, width: int) -> None:
    operation = _aten._scaled_dot_product_flash_attention_for_cpu.default
    query, key, value = (torch.ones(2, length, 2, width, dtype=dtype).transpose(1, 2) for _ in range(3))
    arguments = (query, key, value, 0.0, True)
    bytes_taken, (result, sums) = taken(operation, arguments)
    assert workspace_bytes(operation, arguments, (result, sums)) == bytes_taken
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    arguments = (torch.ones_like(result), query, key, value, result, sums, 0.0, True)
    bytes_taken, out = taken(backward, arguments)
    assert workspace_bytes(backward, arguments, out) == pytest.approx(bytes_taken, rel=0.25)


@pytest.mark.parametrize("operation", [_aten.add.Tensor, _aten.mul.Tensor, _aten.add_.Tensor, _aten.div.Tensor])
def test_operands_of_two_types_are_cast(operation: Callable[..., Any]) -> None:
    pairs = [(torch.float32, torch.bfloat16), (torch.float32, torch.float32)]
    if operation is not _aten.add_.Tensor:
        pairs.append((torch.bfloat16, torch.float32))
    for kinds in pairs:
        arguments = tuple(torch.ones(100, 100, dtype=kind) for kind in kinds)
        bytes_taken, out = taken(operation, arguments)
        if operation is _aten.add_.Tensor:
            bytes_taken += out.nbytes  # it was there before
        assert workspace_bytes(operation, arguments, out) == bytes_taken == (40000 if len({*kinds}) == 2 else 0)


class _Recurrent(TorchDispatchMode):
    """Compares each recurrent operation with its formula."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, tuple[int, int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mkldnn_rnn" not in str(func):
            return func(*args, **(kwargs or {}))
        bytes_taken, out = taken(func, args)
        saved = out[3].nbytes if func is _aten.mkldnn_rnn_layer.default else 0
        self.seen[func.name()] = (bytes_taken, workspace_bytes(func, args, out), saved)
        return out


@formulas
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    steps=st.integers(1, 30),
    batch=st.integers(1, 20),
    inputs=st.integers(1, 200),
    width=st.one_of(st.integers(1, 200), st.sampled_from([64, 128, 256])),
)
@few
def test_an_lstm_saves_one_buffer_and_copies_its_weights(
    dtype: torch.dtype, steps: int, batch: int, inputs: int, width: int
) -> None:
    layer = nn.LSTM(inputs, width).to(dtype)
    data = torch.ones(steps, batch, inputs, dtype=dtype, requires_grad=True)
    with _Recurrent() as recurrent:
        layer(data)[0].sum().backward()
    forward, backward = (recurrent.seen[f"aten::mkldnn_rnn_layer{name}"] for name in ("", "_backward"))
    assert forward[2] == recurrent_buffer_bytes(steps, batch, inputs, width, dtype)
    tolerance = 0.02 if dtype is torch.float32 else 0.12  # of the small scratch; the buffer itself is exact
    for bytes_taken, expected, _ in (forward, backward):
        assert expected == pytest.approx(bytes_taken, rel=tolerance, abs=2**15)


def test_nothing_is_counted_where_tensors_stand_in_for_those_of_another_device() -> None:
    arguments = (torch.ones(4, 16, 8, 8), torch.ones(16, 16, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = torch.ones(4, 16, 8, 8)
    counted = workspace_bytes(_aten.convolution.default, arguments, out)
    with without_workspaces():
        assert workspace_bytes(_aten.convolution.default, arguments, out) == 0
    assert workspace_bytes(_aten.convolution.default, arguments, out) == counted
    on_meta = tuple(each.to("meta") if isinstance(each, Tensor) else each for each in arguments)
    assert workspace_bytes(_aten.convolution.default, on_meta, out.to("meta")) == 0


def test_optimizers_of_bitsandbytes_step_in_float32() -> None:
    optimizers = pytest.importorskip("bitsandbytes.optim")
    for name, dtype in (("AdamW8bit", torch.float32), ("AdamW8bit", torch.bfloat16), ("Lion8bit", torch.bfloat16)):
        parameter = nn.Parameter(torch.ones(8192, dtype=dtype))
        optimizer = getattr(optimizers, name)([parameter], lr=1e-3)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        seen: list[tuple[int, int]] = []

        class Compared(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if "bitsandbytes" not in str(func):
                    return func(*args, **(kwargs or {}))
                bytes_taken, out = taken(func, args)
                seen.append((bytes_taken, workspace_bytes(func, args, out)))  # noqa: B023
                return out

        with Compared():
            optimizer.step()
        assert seen
        assert seen[0][1] == pytest.approx(seen[0][0], rel=0.01)
