"""What kernels of the CPU take for themselves while they run, which fake tensors do not show.

Each operation that is known to take much has a formula of its shapes here, found from the allocations of the kernels
that torch 2.14 runs on a CPU with AVX-512 and without AMX. With other instructions oneDNN picks other kernels. Nothing
of this is used for another device, nor for tensors that stand in for its own (:func:`without_workspaces`).

* Convolutions of oneDNN run on copies of their operands: in blocks of 16 channels, or pixel by pixel (in float16, and
  where the stride spreads what a transposed one writes), weights too; results are copied back, from pixels twice. In
  bfloat16 the gradient of the weights is added up in float32, beside transposed copies of one image. Others unfold the
  whole batch into columns.
* Products in 16 bits copy blocks of their operands, up to 1.7 MiB in each thread.
* Sums and products of two types cast an operand first.
* Attention holds a block of scores in each thread.
* LSTMs of oneDNN save what their backward pass reads in one buffer, which fake tensors give no bytes; they copy their
  weights, and add up the gradients of these in float32.
* Optimizers of bitsandbytes step one parameter after the other in float32.

Of scratch buffers that every thread has, those of convolutions count once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

__all__ = ["recurrent_buffer_bytes", "without_workspaces", "workspace_bytes"]

_CHANNELS = 16  # in a block
_LINE, _PAGE = 64, 4096
_aten = torch.ops.aten
_COUNTED: ContextVar[bool] = ContextVar("_COUNTED", default=True)


@contextlib.contextmanager
def without_workspaces() -> Iterator[None]:
    """Count none here: tensors lie on the CPU that stand for those of another device."""
    before = _COUNTED.set(False)
    try:
        yield
    finally:
        _COUNTED.reset(before)


def workspace_bytes(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes that an operation on the CPU holds while it runs, beside its operands and results.

    Example:
        >>> data, weight = torch.empty(2, 16, 8, 8), torch.empty(32, 16, 3, 3)
        >>> arguments = (data, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        >>> workspace_bytes(torch.ops.aten.convolution.default, arguments, torch.empty(2, 32, 8, 8)) - weight.nbytes
        8192
    """
    formula = _bitsandbytes(func) or _FORMULAS.get(func)
    if formula is None or not _COUNTED.get():
        return 0
    if any(isinstance(each, Tensor) and each.device.type != "cpu" for each in args):
        return 0
    return formula(args, out)


# Convolutions


def _convolution(args: tuple[Any, ...], out: Tensor) -> int:
    data, weight = args[:2]
    settings = args[2:9]
    transposed = settings[4]
    kernel = _kernel_of(data, weight, settings)
    if kernel != "oneDNN":
        return _columns(kernel, data, weight, out, whole_batch=True)
    if _by_channel_last(data, weight):
        return int(weight.nbytes)
    if _by_pixel(data, settings, spreads=transposed):
        return int(max(data.nbytes + weight.nbytes + _image(data), 2 * out.nbytes))
    read = _blocked(data) if transposed or data.shape[1] >= _CHANNELS else 0
    written = _blocked(out)
    running = read + _padded(weight, read) + written + _sums(weight, out)
    return int(max(running, written + out.nbytes) - out.nbytes)


def _convolution_backward(args: tuple[Any, ...], out: Any) -> int:
    gradient, data, weight = args[:3]
    settings = (None, *args[4:10])
    transposed = settings[4]
    of_data, of_weight = args[10][:2]
    kernel = _kernel_of(data, weight, settings)
    if kernel != "oneDNN":
        return _columns(kernel, data, weight, gradient, whole_batch="Transpose" not in kernel)
    if _by_channel_last(data, weight):
        if not of_weight:
            return int(weight.nbytes)
        reduced = max(2 * weight.nbytes, _reduction(data, gradient, weight, settings))
        return int(max(reduced, _groups_in_blocks(weight, settings[6])))
    # Without a layout of its own a plain operand of few channels is read as it is, but only on one side.
    plain_gradient = transposed and gradient.shape[1] < _CHANNELS
    plain_data = not transposed and data.shape[1] < _CHANNELS
    result = peak = 0
    if of_data:
        result = data.nbytes
        if _by_pixel(data, settings, spreads=not transposed):
            peak = max(gradient.nbytes + weight.nbytes + result + _image(gradient), 3 * result)
        else:
            read = 0 if plain_gradient else _blocked(gradient)
            written = _blocked(data)
            peak = max(read + _padded(weight, read) + written + _sums(weight, data), written + result)
    if of_weight:
        copies = weight.nbytes
        if data.dtype is not torch.float16:
            copies += 0 if plain_gradient else _blocked(gradient)
            copies += 0 if plain_data else _blocked(data)
            copies += _reduction(data, gradient, weight, settings)
        peak = max(peak, result + max(copies, 2 * weight.nbytes))
        result += weight.nbytes
    return int(max(0, peak - result))


def _kernel_of(data: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> str:
    bias, stride, padding, dilation, transposed, output_padding, groups = settings
    try:
        backend = torch._C._select_conv_backend(
            data, weight, bias, stride, padding, dilation, transposed, output_padding, groups, None
        )
    except (RuntimeError, TypeError):
        return ""
    # That of transposed ones of oneDNN has no name.
    name = "MkldnnTranspose" if "???" in str(backend) and transposed else str(backend)
    if "Mkldnn" in name and "Empty" not in name:
        return "oneDNN" if torch.backends.mkldnn.is_available() else ""
    return name


def _columns(kernel: str, data: Tensor, weight: Tensor, out: Tensor, *, whole_batch: bool) -> int:
    """Operands unfolded for a product."""
    size = math.prod(weight.shape[2:])
    if "Slow" not in kernel or (size == 1 and "Transpose" not in kernel):
        return 0
    channels, pixels = (weight.shape[1], data) if "Transpose" in kernel else (data.shape[1], out)
    images = data.shape[0] if whole_batch else 1
    return int(images * channels * size * math.prod(pixels.shape[2:]) * data.element_size())


def _by_channel_last(data: Tensor, weight: Tensor) -> bool:
    return any(
        each.dim() in (4, 5)
        and not each.is_contiguous()
        and each.is_contiguous(memory_format=torch.channels_last if each.dim() == 4 else torch.channels_last_3d)
        for each in (data, weight)
    )


def _by_pixel(data: Tensor, settings: tuple[Any, ...], *, spreads: bool) -> bool:
    return data.dtype is torch.float16 or (spreads and max(settings[1]) > 1 and settings[6] == 1)


def _image(read: Tensor) -> int:
    """One image with a rim."""
    return int(read.nbytes // read.shape[0]) + (1 << 15) if len(read) else 0


def _blocked(tensor: Tensor) -> int:
    """Bytes of a copy in blocks of channels."""
    channels = tensor.shape[1]
    return tensor.nbytes // channels * -(-channels // _CHANNELS) * _CHANNELS if channels else 0


def _padded(weight: Tensor, read: int) -> int:
    """Bytes of the weights in blocks, where operands are."""
    if not read or min(weight.shape[:2]) >= _CHANNELS or weight.shape[1] == 1:
        return int(weight.nbytes)
    return int(weight.nbytes * math.prod(max(1, _CHANNELS / size) for size in weight.shape[:2]))


def _groups_in_blocks(weight: Tensor, groups: int) -> int:
    """Bytes of the gradient of grouped weights: every group is padded to blocks, however few channels it has."""
    written, read = weight.shape[0] // groups, weight.shape[1]
    if groups == 1 or (written == read == 1 and max(weight.shape[2:]) <= 3):  # these have a kernel of their own
        return 0
    blocks = -(-written // _CHANNELS) * -(-read // _CHANNELS) * _CHANNELS**2 / (written * read)
    if weight.dtype is torch.bfloat16:
        return int(3 * blocks * weight.nbytes)  # they are added up in float32, beside
    return int((blocks + min(read, 2)) * weight.nbytes)


def _sums(weight: Tensor, out: Tensor) -> int:
    """Results of one image in float32, of products pixel by pixel in bfloat16."""
    if out.dtype is not torch.bfloat16 or math.prod(weight.shape[2:]) > 1:
        return 0
    return 4 * math.prod(out.shape[1:])


def _reduction(data: Tensor, gradient: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> int:
    """The gradient of weights in float32, and one image of both operands transposed, with a rim."""
    if data.dtype is not torch.bfloat16:
        return 0
    summed = 4 * weight.numel()
    if math.prod(weight.shape[2:]) == 1 or settings[6] > 1:
        return summed
    return summed + (data.nbytes // data.shape[0] + gradient.nbytes // gradient.shape[0]) * 13 // 10


# Products and attention


def _product(left: Tensor, right: Tensor) -> int:
    rows, inner = left.shape[-2:]
    columns = right.shape[-1]
    if not _multiplies(left.dtype) or rows * inner * columns <= 16**3:
        return 0
    copied = left.stride(-1) != 1 and rows > 1 and inner > 1
    return torch.get_num_threads() * _blocks(rows, inner, columns, left.dtype, copied=copied)


def _blocks(rows: int, inner: int, columns: int, dtype: torch.dtype, *, copied: bool) -> int:
    """Blocks of both operands, and of the result in float32."""
    if dtype is torch.float16:
        element, copied = 4, True
    else:
        element = 2
    block = rows if rows <= 256 else next((size for size in (256, 192) if rows % size == 0), 256)
    taken, shown = min(inner, 512), min(64, columns)
    size = 1024
    if copied:
        size += block * (taken + (_LINE // element if taken == 512 else 0)) * element + 128
        if inner > taken:  # sums wait for the next block of the inner dimension
            shown = columns // -(-columns // 1024)
    elif inner >= 2048:
        taken = 1024
    return size + taken * 64 * element + block * shown * 4


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies in ``dtype`` on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _attention(args: tuple[Any, ...], out: Any) -> int:
    query, key = args[:2]
    rows, columns = _scores(query, key)
    size = 4 * rows * (columns + 2 + query.shape[-1])
    if query.element_size() == 2:
        size += 2 * rows * columns
    return int(torch.get_num_threads() * size)


def _attention_backward(args: tuple[Any, ...], out: Any) -> int:
    query, key = args[1:3]
    rows, columns = _scores(query, key)
    size = 2 * rows * columns * 4 + 4 * rows
    if query.element_size() == 2:
        size += 2 * rows * columns * 2
        if _multiplies(query.dtype):
            size += _blocks(columns, rows, query.shape[-1], query.dtype, copied=True)
    return int(torch.get_num_threads() * size)


def _scores(query: Tensor, key: Tensor) -> tuple[int, int]:
    length = query.shape[-2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[-2])


def _mixed(args: tuple[Any, ...], out: Any) -> int:
    """Operands of a sum or product that are cast to the type of the others."""
    operands = [each for each in args[:2] if isinstance(each, Tensor) and each.dim()]
    if len(operands) < 2 or operands[0].dtype is operands[1].dtype:
        return 0
    common = torch.promote_types(operands[0].dtype, operands[1].dtype)
    return sum(each.numel() * common.itemsize for each in operands if each.dtype is not common)


# Optimizers


def _bitsandbytes(func: Any) -> Callable[[tuple[Any, ...], Any], int] | None:
    """Its operations on the CPU step in float32, outside of torch's sight."""
    if getattr(func, "namespace", "") != "bitsandbytes" or "optimizer_update" not in func.name():
        return None
    copies = 5 if "8bit" in func.name() else 3
    return lambda args, _: 4 * args[1].numel() * (copies + (args[1].element_size() < 4))


# Recurrent layers and embeddings


def _embedding_backward(args: tuple[Any, ...], out: Any) -> int:
    return 0 if args[0].is_contiguous() else int(args[0].nbytes)


def recurrent_buffer_bytes(steps: int, batch: int, inputs: int, width: int, dtype: torch.dtype) -> int:
    """Bytes that an LSTM layer of oneDNN keeps for its backward pass, in one direction.

    Gates, outputs, states before and after each step, and room for the gradients of these, each on pages of its own.

    Args:
        steps: length of the sequence.
        batch: sequences.
        inputs: features of the input.
        width: features of the state.
        dtype: of the weights, float32 or bfloat16.

    Example:
        >>> recurrent_buffer_bytes(10, 4, 32, 64, torch.float32)
        180224
    """
    element = dtype.itemsize
    tokens, moments = steps * batch, 2 * (steps + 1) * batch
    widest = max(inputs, width)
    gradients = moments * _row(widest, 4)
    sizes = (
        tokens * _row(4 * width, element),
        tokens * _row(width, element),
        moments * _row(widest, element),
        gradients,
        gradients,
        moments * width * element,
        moments * width * 4,
    )
    return sum(map(_pages, sizes))


def _lstm(args: tuple[Any, ...], out: Any) -> int:
    data, *weights = args[:3]
    copies = sum(_by_input(each) if each.dtype is torch.float32 else _in_blocks(each) for each in weights)
    return _bias(weights[0]) + copies + _lstm_scratch(data, weights[0])


def _lstm_backward(args: tuple[Any, ...], out: Any) -> int:
    data, *weights = args[:3]
    output, cell, gradient = args[7], args[9], args[10]
    copied = 0 if gradient is None or gradient.is_contiguous() else gradient.nbytes
    size = copied + 2 * cell.nbytes + _bias(weights[0]) + _lstm_scratch(data, weights[0])
    size += sum(_by_input(each) for each in weights)  # their gradients
    if weights[0].dtype is torch.float32:
        # Rows as they are, unless they have to be padded.
        padded = [len(each) * _row(each.shape[1], 4) for each in weights]
        return int(size + sum(each for each, weight in zip(padded, weights, strict=True) if each != weight.nbytes))
    gradients = 2 * (output.nbytes + 2 * cell.nbytes)  # those that come, in float32
    return int(size + gradients + sum(map(_in_blocks, weights)))


def _by_input(weight: Tensor) -> int:
    """Bytes in float32 with a row for each input."""
    return int(weight.shape[1] * _row(weight.shape[0], 4))


def _in_blocks(weight: Tensor) -> int:
    return int(-(-weight.shape[1] // 32) * 32 * weight.shape[0] * weight.element_size())


def _lstm_scratch(data: Tensor, weight: Tensor) -> int:
    tokens = data.shape[0] * data.shape[1] if weight.dtype is torch.float32 else data.shape[1]
    gates = weight.shape[0]
    return _pages(tokens * _row(gates, 4)) + 2 * _pages(data.shape[1] * _row(gates // 4, 4)) + _pages(4 * gates)


def _bias(weight: Tensor) -> int:
    return weight.shape[0] * weight.element_size()


def _row(elements: int, element: int) -> int:
    """Bytes of a row, on lines of the cache, never a multiple of a power of two that would share them."""
    line = _LINE // element
    rounded = -(-elements // line) * line
    return (rounded + line if rounded % 256 == 0 else rounded) * element


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


_FORMULAS: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.mm.default: lambda args, _: _product(args[0], args[1]),
    _aten.bmm.default: lambda args, _: _product(args[0], args[1]),
    _aten.addmm.default: lambda args, _: _product(args[1], args[2]),
    _aten.baddbmm.default: lambda args, _: _product(args[1], args[2]),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    **{each.Tensor: _mixed for each in (_aten.add, _aten.add_, _aten.sub, _aten.mul, _aten.mul_, _aten.div)},
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.mkldnn_rnn_layer.default: _lstm,
    _aten.mkldnn_rnn_layer_backward.default: _lstm_backward,
}
