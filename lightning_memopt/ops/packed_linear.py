"""
Products of packed spikes
=========================

``torch.ops.lightning_memopt.packed_linear`` multiplies spikes held as bits ``[M, ceil(K / 8)]`` (bit ``i`` of byte
``b`` of a row is its spike ``8 b + i``; what the last byte holds beyond K is ignored) with a weight ``[N, K]``, and
``packed_linear_grad_weight`` gives the weight's gradient. The spikes never exist as a matrix of numbers of full size.

A float32 weight is the exact sum of three bfloat16 matrices ("planes"), and a spike is exact in bfloat16, so products
of planes on the tensor cores are exact but for the float32 additions. The planes are added the smallest first: numbers
of one plane are 8 bits long and of similar size, so that most additions within it are exact, and the rounding of a
small plane's sum is small. The other order would round the large sum again at every addition of a small number: tensor
cores truncate, and the error would be a hundred times larger. Four ways lead to the same sums, in different orders:

* ``fused``: one kernel reads the bits and expands them in registers;
* ``wgmma``: another does so by Hopper's own tensor core instructions. It was built without such a GPU at hand and has
  to prove itself on each (see ``_wgmma_is_right``), or else the choice is made among the others;
* ``unpack``: chunks of rows are unpacked into a workspace of bounded size and multiplied by cuBLAS;
* ``simt``: float32 arithmetic on the CUDA cores, for GPUs without these tensor core instructions.

:mod:`lightning_memopt.ops.dispatch` chooses. Where no kernel can run, the reference unpacks chunks of rows and
multiplies them in torch.

Kernels take numbers below 2^-126 as zero (also where they are parts of a larger weight), and give zero for sums
below it. Infinite and NaN weights act as in a dense product: 0 times either is NaN.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from lightning_memopt.ops import dispatch
from lightning_memopt.ops.autocast import without_autocast
from lightning_memopt.ops.bit_pack import bit_unpack
from lightning_memopt.ops.launch import Backend, Kernel, backend_for, launch
from lightning_memopt.ops.registration import register

WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_TENSOR_CORES = dispatch.THRESHOLDS.tensor_core_capability
_PARTS = 3  # bfloat16 numbers that make up a float32 number
_STEP_BYTES = 256, 16  # of a weight row and of a packed row, in one step of the fused product

# Products of bfloat16 matrices added to a float32 one: torch 2.8 has the operation, 2.10 lets it add to float32.
_MIXED_ADD = "dtype_out" in torch.ops.aten.addmm.overloads() and TorchVersion(torch.__version__) >= "2.10"

_LIBRARY = torch.library.Library("lightning_memopt", "FRAGMENT")
_LIBRARY.define("packed_linear(Tensor packed, Tensor weight, Tensor? bias=None) -> Tensor")
_LIBRARY.define(
    "packed_linear_grad_weight(Tensor packed, Tensor grad, SymInt in_features, bool transposed=False) -> Tensor"
)


@dataclass(frozen=True)
class _Tile:
    """A block of the fused product, as its source declares it.

    Attributes:
        rows, columns: of outputs.
        threads: of the block.
        stages: buffers in the ring, each of one step.
        spare_bytes: of shared memory, to begin the ring at the alignment it needs.
    """

    rows: int
    columns: int
    threads: int
    stages: int
    spare_bytes: int = 0

    @property
    def shared_bytes(self) -> int:
        weight_bytes, packed_bytes = _STEP_BYTES
        return self.stages * (self.columns * weight_bytes + self.rows * packed_bytes) + self.spare_bytes


_TILES = {
    "256x128": _Tile(256, 128, 256, 2),
    "256x64": _Tile(256, 64, 128, 2),
    "256x32": _Tile(256, 32, 256, 3),
    "256x16": _Tile(256, 16, 256, 3),
    "64x64": _Tile(64, 64, 128, 2),
}
_WGMMA_TILE = _Tile(256, 128, 256, 4, spare_bytes=1024 - 16)
_WGMMA_ARCHITECTURE = "sm_90a"

# Whether the kernels of warpgroups gave the right products on a device, for weights of a dtype.
_WGMMA_RIGHT: dict[tuple[torch.device, torch.dtype], bool] = {}


# ---------------------------------------------------------------------------------------------------------------------
# The product


def check_packed_linear(packed: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless the arguments of a packed product fit each other."""

    def given() -> str:
        return describe_product(packed, weight, bias)

    if weight.dtype not in WEIGHT_DTYPES or (bias is not None and bias.dtype != weight.dtype):
        raise ValueError(
            f"packed_linear takes a weight of float32, float16 or bfloat16 and a bias of the same dtype, got {given()}."
        )
    if packed.dtype != torch.uint8:
        raise ValueError(
            f"packed_linear takes spikes packed by bit_pack_spike_dense, which are uint8, got {given()}. Gradients "
            "exist for the weight and the bias only."
        )
    if packed.dim() != 2 or weight.dim() != 2 or packed.shape[1] != (weight.shape[1] + 7) // 8:
        raise ValueError(
            f"packed_linear takes packed [M, ceil(K / 8)] and weight [N, K], got {given()}. Pack every row by itself, "
            "with bit_pack_spike_dense."
        )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(f"packed_linear takes a bias [N] for a weight [N, K], got {given()}.")
    if weight.device != packed.device or (bias is not None and bias.device != packed.device):
        raise ValueError(f"packed_linear takes tensors on one device, got {given()}.")


def describe_product(packed: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """The shapes, dtypes and devices of a product, for an error."""
    text = f"packed {_describe(packed)}, weight {_describe(weight)}"
    return text if bias is None else f"{text}, bias {_describe(bias)}"


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


@torch.no_grad()  # the gradient is the caller's; autograd would refuse the products into slices of the output
def _packed_linear(packed: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    check_packed_linear(packed, weight, bias)
    rows, (features, inputs) = packed.shape[0], weight.shape
    out = torch.empty(rows, features, dtype=weight.dtype, device=weight.device)
    if out.numel() == 0:
        return out
    if inputs == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    packed = packed.contiguous()
    bias = None if bias is None else bias.contiguous()
    backend = backend_for(weight.device)
    if backend is None:
        _reference(packed, weight, bias, out)
        return out
    capability = backend.capability(weight.device)
    shape_and_device = rows, features, inputs, weight.dtype, capability, _mixed_add(weight.device)
    path = dispatch.choose_packed_linear(*shape_and_device)
    if path == "wgmma" and not _wgmma_is_right(weight.device, weight.dtype, backend):
        path = dispatch.choose_packed_linear(*shape_and_device, wgmma=False)
    if path == "wgmma":
        _wgmma(packed, weight, bias, out, backend)
    elif path == "fused":
        _fused(packed, weight, bias, out, backend)
    elif path == "unpack":
        _unpack(packed, weight, bias, out, backend)
    else:
        _simt(packed, weight, bias, out)
    return out


def _packed_linear_fake(packed: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    check_packed_linear(packed, weight, bias)
    return weight.new_empty((packed.shape[0], weight.shape[0]))


def _fused(
    packed: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, backend: Backend, tile_name: str | None = None
) -> None:
    if tile_name is None:
        rows, features = out.shape
        tile_name = dispatch.choose_packed_tile(rows, features, backend.multiprocessors(weight.device))
    _launch_tiles(_fused_kernel(weight.dtype, tile_name), _TILES[tile_name], packed, weight, bias, out, backend)


def _fused_kernel(dtype: torch.dtype, tile_name: str) -> Kernel:
    source, tile = f"packed_linear_{_NAMES[dtype]}", _TILES[tile_name]
    return Kernel(f"{source}.cu", f"{source}_{tile_name}", tile.threads, tile.shared_bytes)


def _wgmma(packed: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, backend: Backend) -> None:
    _launch_tiles(_wgmma_kernel(weight.dtype), _WGMMA_TILE, packed, weight, bias, out, backend)


def _wgmma_kernel(dtype: torch.dtype) -> Kernel:
    source, tile = f"packed_linear_wgmma_{_NAMES[dtype]}", _WGMMA_TILE
    return Kernel(f"{source}.cu", source, tile.threads, tile.shared_bytes, _WGMMA_ARCHITECTURE)


def _launch_tiles(
    kernel: Kernel, tile: _Tile, packed: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, backend: Backend
) -> None:
    rows, (features, inputs) = packed.shape[0], weight.shape
    planes = _planes(weight, backend) if weight.dtype == torch.float32 else _aligned_rows(weight).unsqueeze(1)
    launch(
        kernel,
        -(-rows // tile.rows) * -(-features // tile.columns),
        packed,
        planes,
        bias,
        out,
        np.int64(rows),
        np.int64(features),
        np.int64(inputs),
        np.int64(packed.shape[1]),
        np.int64(planes.stride(0)),
        np.int64(planes.stride(1)),
        np.int32(planes.shape[1]),
        device=weight.device,
    )


def _wgmma_is_right(device: torch.device, dtype: torch.dtype, backend: Backend) -> bool:
    """Whether the kernel of warpgroups gives the products that the other kernel gives, bit for bit.

    The first call for a device and dtype compares them and waits for the device once; a kernel that does not compile,
    load, start or agree is not used, which one warning says. While a CUDA graph is captured nothing can be compared:
    the answer is no, and is not kept.
    """
    known = _WGMMA_RIGHT.get((device, dtype))
    if known is not None:
        return known
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    problem = None
    try:
        # Four tiles, two of them with a rest of rows or columns; eight steps, the last a part; integers whose sums are
        # exact in every order.
        rows, features, inputs = 300, 200, 1000
        generator = torch.Generator().manual_seed(rows)
        largest = 2**13 if dtype == torch.float32 else 2**7
        packed = torch.randint(0, 256, (rows, inputs // 8), generator=generator, dtype=torch.uint8).to(device)
        weight = torch.randint(-largest, largest + 1, (features, inputs), generator=generator).to(device, dtype)
        bias = torch.randint(-largest, largest + 1, (features,), generator=generator).to(device, dtype)
        expected, got = (torch.full((rows, features), torch.nan, dtype=dtype, device=device) for _ in range(2))
        _fused(packed, weight, bias, expected, backend)
        _wgmma(packed, weight, bias, got, backend)
        different = int((expected != got).sum())
        if different:
            problem = f"{different} of {got.numel()} results are wrong"
    except Exception as error:  # whatever the compiler, the driver or the device says
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        warnings.warn(
            f"The Hopper kernel for products of packed spikes with {_NAMES[dtype]} weights failed its test on {device} "
            f"and is not used; other kernels take its place, with the same results. Please report this: {problem}",
            stacklevel=2,
        )
    _WGMMA_RIGHT[device, dtype] = problem is None
    return problem is None


def _unpack(packed: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, backend: Backend) -> None:
    rows, features = out.shape
    padded = 8 * packed.shape[1]
    if weight.dtype == torch.float32:
        # The two smaller planes are one product of twice the inputs: its roundings are small against the third's.
        planes = _planes(weight, backend)
        factors = [planes[:, : _PARTS - 1].reshape(features, -1), planes[:, _PARTS - 1]]
        dtype, copies = torch.bfloat16, _PARTS - 1
    else:
        # A weight with rows of a length that cuBLAS has no fast kernels for is copied, with zeros behind each row.
        straight = weight.stride(0) != 1 and weight.shape[1] != padded
        factors = [_aligned_rows(weight) if straight else weight]
        dtype, copies = weight.dtype, 1
    for chunk in _chunks(rows, dispatch.choose_chunk_rows(rows, features, copies * padded)):
        part = out[chunk]
        spikes = _unpacked(packed[chunk].repeat(1, copies) if copies > 1 else packed[chunk], dtype)
        if bias is not None and len(factors) > 1:
            part.copy_(bias)
        for i, factor in enumerate(factors):
            columns = spikes[:, : factor.shape[1]]
            if bias is not None and len(factors) == 1:
                torch.addmm(bias, columns, factor.t(), out=part)
            else:
                _multiply(columns, factor.t(), part, add=i > 0 or bias is not None)
        del spikes, columns  # before the next chunk is made


def _simt(packed: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    rows, (features, inputs) = packed.shape[0], weight.shape
    launch(
        Kernel("packed_linear_simt.cu", f"packed_linear_simt_{_NAMES[weight.dtype]}", 256),
        -(-rows // 64) * -(-features // 128),
        packed,
        weight,
        bias,
        out,
        np.int64(rows),
        np.int64(features),
        np.int64(inputs),
        np.int64(packed.shape[1]),
        np.int64(weight.stride(0)),
        np.int64(weight.stride(1)),
        device=weight.device,
    )


def _reference(packed: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    rows, features = out.shape
    inputs = weight.shape[1]
    for chunk in _chunks(rows, dispatch.choose_chunk_rows(rows, features, inputs, weight.element_size())):
        spikes = _unpacked(packed[chunk], weight.dtype)[:, :inputs]
        if bias is None:
            torch.mm(spikes, weight.t(), out=out[chunk])
        else:
            torch.addmm(bias, spikes, weight.t(), out=out[chunk])
        del spikes


# ---------------------------------------------------------------------------------------------------------------------
# The weight's gradient


def check_grad_weight(packed: Tensor, grad: Tensor, in_features: int) -> None:
    """Raise ValueError unless the arguments of a weight gradient fit each other."""

    def given() -> str:
        return f"packed {_describe(packed)}, grad {_describe(grad)}, in_features {in_features}"

    if packed.dtype != torch.uint8 or grad.dtype not in WEIGHT_DTYPES:
        raise ValueError(
            f"packed_linear_grad_weight takes packed spikes of uint8 and a grad of float32, float16 or bfloat16, got "
            f"{given()}."
        )
    if packed.dim() != 2 or grad.dim() != 2 or packed.shape[0] != grad.shape[0]:
        raise ValueError(f"packed_linear_grad_weight takes packed [M, ceil(K / 8)] and grad [M, N], got {given()}.")
    if in_features < 0 or packed.shape[1] != (in_features + 7) // 8:
        raise ValueError(f"packed_linear_grad_weight takes ceil(in_features / 8) bytes a row, got {given()}.")
    if grad.device != packed.device:
        raise ValueError(f"packed_linear_grad_weight takes tensors on one device, got {given()}.")


def _grad_weight_empty(grad: Tensor, in_features: int, transposed: bool, dtype: torch.dtype | None = None) -> Tensor:
    features = grad.shape[1]
    strides = (1, max(features, 1)) if transposed else (max(in_features, 1), 1)
    return grad.new_empty_strided((features, in_features), strides, dtype=dtype)


@torch.no_grad()
def _grad_weight(packed: Tensor, grad: Tensor, in_features: int, transposed: bool = False) -> Tensor:
    check_grad_weight(packed, grad, in_features)
    rows, features = grad.shape
    if rows * features * in_features == 0:
        return _grad_weight_empty(grad, in_features, transposed).zero_()
    packed = packed.contiguous()
    backend = backend_for(grad.device)
    mixed = _mixed_add(grad.device)
    if grad.dtype != torch.float32:
        dtype = grad.dtype if mixed else torch.float32
    elif backend is not None and mixed and backend.capability(grad.device) >= _TENSOR_CORES:
        dtype = torch.bfloat16
    else:
        dtype = torch.float32
    most = dispatch.choose_gradient_chunk_rows(rows, features, 8 * packed.shape[1], dtype.itemsize)
    if most == rows and grad.dtype != torch.float32:
        # One product, which rounds once; the sum of several is kept in float32.
        dtype = grad.dtype
        total = _grad_weight_empty(grad, in_features, transposed)
    else:
        total = _grad_weight_empty(grad, in_features, transposed, torch.float32)
    for chunk in _chunks(rows, most):
        spikes = _unpacked(packed[chunk], dtype)[:, :in_features]
        if dtype == torch.bfloat16 and grad.dtype == torch.float32 and backend is not None:
            plane = torch.empty(spikes.shape[0], 1, _padded(features), dtype=dtype, device=grad.device)
            for part in reversed(range(_PARTS)):
                _split(grad[chunk], plane, part, backend)
                add = chunk.start > 0 or part < _PARTS - 1
                _multiply_transposed(plane[:, 0, :features], spikes, total, add)
            del plane
        else:
            _multiply_transposed(grad[chunk].to(dtype), spikes, total, add=chunk.start > 0)
        del spikes
    return total.to(grad.dtype)


def _multiply_transposed(grad: Tensor, spikes: Tensor, total: Tensor, add: bool) -> None:
    """Make ``total`` [N, K], or add to it, the product of ``grad`` [m, N] transposed and ``spikes`` [m, K]."""
    if total.is_contiguous():
        _multiply(grad.t(), spikes, total, add)
    else:
        _multiply(spikes.t(), grad, total.t(), add)


def _grad_weight_fake(packed: Tensor, grad: Tensor, in_features: int, transposed: bool = False) -> Tensor:
    check_grad_weight(packed, grad, in_features)
    return _grad_weight_empty(grad, in_features, transposed)


# ---------------------------------------------------------------------------------------------------------------------
# Parts of both


def _chunks(rows: int, most: int) -> Iterator[slice]:
    for start in range(0, rows, most):
        yield slice(start, min(rows, start + most))


def _padded(columns: int) -> int:
    """Columns of a row that ends on 16 bytes in a 16-bit dtype."""
    return -(-columns // 8) * 8


def _unpacked(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack rows of bytes ``[m, b]`` to ``[m, 8 b]``: without a cut at K, the rows are one stream."""
    return bit_unpack(packed.view(-1), 8 * packed.numel(), dtype).view(packed.shape[0], -1)


def _aligned_rows(weight: Tensor) -> Tensor:
    """Return a 16-bit weight whose rows are contiguous and start at multiples of 16 bytes: itself, or a copy."""
    if weight.stride(1) == 1 and weight.stride(0) % 8 == 0 and weight.data_ptr() % 16 == 0:
        return weight
    features, inputs = weight.shape
    copy = weight.new_zeros(features, _padded(inputs))
    copy[:, :inputs] = weight
    return copy


def _planes(weight: Tensor, backend: Backend) -> Tensor:
    """Split a float32 weight into bfloat16 planes ``[N, 3, K up to a multiple of 8]``, the smallest first."""
    features, inputs = weight.shape
    planes = torch.empty(features, _PARTS, _padded(inputs), dtype=torch.bfloat16, device=weight.device)
    _split(weight, planes, _PARTS - 1, backend)
    return planes


def _split(matrix: Tensor, planes: Tensor, smallest_part: int, backend: Backend) -> None:
    """Fill ``planes`` [rows, n, columns] with parts ``smallest_part``, ``smallest_part - 1``, ... of a float32 matrix.

    Part 0 holds the 8 most significant bits of each number. The columns behind the matrix become 0.
    """
    rows, columns = matrix.shape
    padded = planes.shape[2]
    # 8 warps of a block take 128 columns of a row each, or the block takes 32 rows x 64 columns: 1024 numbers at least.
    blocks = min(-(-rows * padded // 1024), 8 * backend.multiprocessors(matrix.device))
    launch(
        Kernel("split_float32.cu", "split_float32", 256),
        blocks,
        matrix,
        planes,
        np.int64(rows),
        np.int64(columns),
        np.int64(matrix.stride(0)),
        np.int64(matrix.stride(1)),
        np.int64(padded),
        np.int64(planes.stride(0)),
        np.int64(planes.stride(1)),
        np.int32(smallest_part),
        np.int32(planes.shape[1]),
        device=matrix.device,
    )


def _mixed_add(device: torch.device) -> bool:
    """Whether :func:`_multiply` can multiply 16-bit matrices into a float32 one on this device."""
    return _MIXED_ADD or device.type == "cpu"


def _multiply(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """Make ``out`` the product of ``a`` and ``b``, or add it; 16-bit factors may have a float32 product."""
    if out.dtype != a.dtype and out.device.type == "cpu":
        a, b = a.to(out.dtype), b.to(out.dtype)  # not in torch on the CPU; chunks bound the copies
    if out.dtype == a.dtype:
        if add:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif add:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)


register(_LIBRARY, "packed_linear", without_autocast(_packed_linear), _packed_linear_fake)
register(_LIBRARY, "packed_linear_grad_weight", without_autocast(_grad_weight), _grad_weight_fake)


# ---------------------------------------------------------------------------------------------------------------------
# The operations


def packed_linear(packed: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply packed spikes with a weight, without a gradient (``functional.packed_spike_linear`` has one).

    Args:
        packed: ``[M, ceil(K / 8)]`` uint8, from ``bit_pack_rows``.
        weight: ``[N, K]`` float32, float16 or bfloat16, any strides.
        bias: ``[N]``, the dtype of ``weight``.

    Returns:
        ``[M, N]``, the dtype of ``weight``, contiguous.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit each other.

    Example:
        >>> weight = torch.tensor([[1.0, 2.0, 4.0]])
        >>> packed_linear(torch.tensor([[0b101]], dtype=torch.uint8), weight)
        tensor([[5.]])
    """
    out: Tensor = torch.ops.lightning_memopt.packed_linear(packed, weight, bias)
    return out


def packed_linear_grad_weight(packed: Tensor, grad: Tensor, in_features: int, transposed: bool = False) -> Tensor:
    """Multiply a gradient, transposed, with packed spikes: the gradient of the weight of :func:`packed_linear`.

    Sums are kept in float32 and rounded once to the dtype of ``grad``.

    Args:
        packed: ``[M, ceil(K / 8)]`` uint8, from ``bit_pack_rows``.
        grad: ``[M, N]`` float32, float16 or bfloat16.
        in_features: K.
        transposed: lay the result out so that its transpose ``[K, N]`` is contiguous.

    Returns:
        ``[N, K]``, the dtype of ``grad``; contiguous, or transposed contiguous.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit each other.

    Example:
        >>> packed = torch.tensor([[0b101], [0b001]], dtype=torch.uint8)
        >>> packed_linear_grad_weight(packed, torch.tensor([[10.0], [1.0]]), in_features=3)
        tensor([[11.,  0., 10.]])
    """
    out: Tensor = torch.ops.lightning_memopt.packed_linear_grad_weight(packed, grad, in_features, transposed)
    return out
