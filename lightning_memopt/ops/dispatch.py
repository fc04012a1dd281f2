"""
Which implementation serves which shape
=======================================

One table of thresholds and the pure functions that read it. A choice depends on shapes, dtypes and the device's
capability, never on values: reading them would make the host wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Thresholds:
    """Where one implementation takes over from another.

    The figures in the comments are for an H200: 790 TFLOP/s in cuBLAS bfloat16 products, 4.1 TB/s from memory. The
    kernels of ``packed_linear.cuh`` use ``mma.sync``, which reaches about 62 % of the tensor cores' peak there; they
    are counted with 450 TFLOP/s. Those of ``packed_linear_wgmma.cuh`` are counted with 650. Neither has been measured
    yet: thresholds are worked out from these figures.

    Attributes:
        tensor_core_capability: the first compute capability that runs the tensor core kernels.
        fused_features: output features up to which a product reads the bits itself.
        fused_products_float32: multiplications (M N K) up to which a float32 product reads the bits itself.
        fused_products_16bit: the same for float16 and bfloat16 weights.
        wgmma_capability: the major compute capability, the only one, that runs the kernels of warpgroups.
        wgmma_features: output features above which their tile, 128 wide, is better than a narrower one.
        wgmma_outputs: number of outputs from which their tiles, 256 x 128, fill the device.
        wgmma_most_features: output features up to which they are faster than cuBLAS after an unpack ...
        wgmma_products: ... and multiplications (M N K) up to which they are with more features, too.
        slim_outputs: number of outputs below which one block after another cannot fill the device ...
        slim_inputs: ... unless the number of inputs is at most this.
        chunk_bytes: unpacked spikes of one chunk, where the chunk's product is large enough.
        largest_chunk_bytes: unpacked spikes of one chunk at most.
        chunk_outputs: outputs that a chunk should have.
        gradient_bytes: workspace of a weight gradient: unpacked spikes and one plane of the output's gradient.
        sparse_density_float32: share of ones up to which skipping zeros is faster than a packed float32 product.
        sparse_density_16bit: the same for float16 and bfloat16 weights.
        packing_products: multiplications (M N K) from which a product is worth packing its input first.
    """

    # m16n8k16 with bfloat16 and cp.async exist from 8.0 on.
    tensor_core_capability: tuple[int, int] = (8, 0)
    # At N = 128 a dense bfloat16 product has 128 operations for each byte of spikes that it reads: they take about as
    # long from memory (0.13 ms at M 65536, K 4096) as the operations by mma.sync (0.15 ms). The smaller N, the more the
    # 16 times smaller bits win.
    fused_features: int = 128
    # cuBLAS comes after an unpack and writes the output twice, which pays where its faster instructions save more: in
    # plain torch 8192 x 1024 x 1024 took 0.155 ms; 3 * 2^33 multiplications at 450 TFLOP/s take 0.115 ms.
    fused_products_float32: int = 1 << 33
    # One product, one unpack (about 5 us + M K 2 bytes through L2): 2^32 multiplications take 19 us at 450 TFLOP/s,
    # 12 us at 700.
    fused_products_16bit: int = 1 << 32
    # wgmma is part of 9.0 and of nothing else.
    wgmma_capability: int = 9
    wgmma_features: int = 64
    # 96 tiles: three quarters of 132 multiprocessors.
    wgmma_outputs: int = 96 * 256 * 128
    # Unpacking writes 2 M K bytes at about 3.3 TB/s; 2 M N K operations take longer at 650 than at 790 TFLOP/s by as
    # much where N is 1100. Its launches cost 5 us beside, so that with more features the two are even near 2^34.
    wgmma_most_features: int = 1024
    wgmma_products: int = 1 << 34
    # A block of 64 x 64 outputs takes about 0.4 us for 128 inputs. Few blocks with a long way to go are slower than
    # cuBLAS, which divides the inputs among blocks.
    slim_outputs: int = 1 << 17
    slim_inputs: int = 4096
    # 16 MiB stay in the L2 cache (40 MiB on an A100, 50 MiB on an H200) beside the weight's tiles. More is worth it for
    # full rounds of tiles: the spikes of 4096 inputs, twice for float32, then go through memory once, 0.06 ms of 2.2.
    chunk_bytes: int = 16 << 20
    largest_chunk_bytes: int = 64 << 20
    # In tiles of 128 x 256, 2^24 outputs are 512 tiles: 3.9 rounds on 132 multiprocessors, 97 % full.
    chunk_outputs: int = 1 << 24
    # Each chunk reads and writes the sum [N, K] three times, so few large chunks.
    gradient_bytes: int = 64 << 20
    # By design, at 16384 x 4096 x 4096: skipping zeros takes about 0.3 ms and 0.4 ms for each percent of ones, a packed
    # product 2.5 ms in float32 and 0.85 ms in bfloat16. From 5 % on rows have more ones than their lists hold.
    sparse_density_float32: float = 0.04
    sparse_density_16bit: float = 0.012
    # Packing costs two launches more; 2^27 multiplications are 5 us of a float32 product by cuBLAS.
    packing_products: int = 1 << 27


THRESHOLDS = Thresholds()


def choose_packed_linear(
    rows: int,
    features: int,
    inputs: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    mixed_products: bool,
    wgmma: bool = True,
    thresholds: Thresholds = THRESHOLDS,
) -> str:
    """Choose how to multiply packed spikes ``[M, K]`` with a weight ``[N, K]``.

    Args:
        rows: M.
        features: N.
        inputs: K.
        dtype: of the weight.
        capability: compute capability of the device.
        mixed_products: whether torch multiplies bfloat16 matrices into a float32 one.
        wgmma: whether the kernels of warpgroups may be chosen, where the device has them.
        thresholds: the table.

    Returns:
        ``"fused"`` (tensor cores, bits read by the product), ``"wgmma"`` (the same by Hopper's own instructions),
        ``"unpack"`` (chunks of spikes unpacked for cuBLAS) or ``"simt"`` (CUDA cores).

    Example:
        >>> choose_packed_linear(65536, 128, 4096, torch.bfloat16, (9, 0), True)
        'wgmma'
        >>> choose_packed_linear(65536, 128, 4096, torch.bfloat16, (8, 0), True)
        'fused'
        >>> choose_packed_linear(16384, 4096, 4096, torch.float32, (9, 0), True)
        'unpack'
    """
    if capability < thresholds.tensor_core_capability:
        return "unpack" if dtype == torch.float16 else "simt"  # cuBLAS has float16 tensor core products from 7.0 on
    products = rows * features * inputs
    without_cublas = dtype == torch.float32 and not mixed_products
    if wgmma and capability[0] == thresholds.wgmma_capability:
        fills = features > thresholds.wgmma_features and rows * features >= thresholds.wgmma_outputs
        few = features <= thresholds.wgmma_most_features or products <= thresholds.wgmma_products
        if fills and (few or without_cublas):
            return "wgmma"
    if without_cublas:
        return "fused"
    if rows * features < thresholds.slim_outputs and inputs > thresholds.slim_inputs:
        return "unpack"
    limit = thresholds.fused_products_float32 if dtype == torch.float32 else thresholds.fused_products_16bit
    few = features <= thresholds.fused_features or products <= limit
    return "fused" if few else "unpack"


def choose_sparse_linear(
    rows: int,
    features: int,
    inputs: int,
    dtype: torch.dtype,
    density: float | None,
    capability: tuple[int, int] | None,
    thresholds: Thresholds = THRESHOLDS,
) -> str:
    """Choose how to multiply unpacked spikes ``[M, K]`` with a weight ``[N, K]``.

    Args:
        rows: M.
        features: N.
        inputs: K.
        dtype: of the weight.
        density: share of ones that the caller expects; None if unknown.
        capability: compute capability of the device; None where no kernel runs.
        thresholds: the table.

    Returns:
        ``"sparse"`` (skip zeros), ``"packed"`` (a dense product of packed spikes) or ``"torch"``. With 16 bits and many
        features the packed product is no faster than torch's.

    Example:
        >>> choose_sparse_linear(16384, 4096, 4096, torch.float32, 0.02, (9, 0))
        'sparse'
        >>> choose_sparse_linear(16384, 4096, 4096, torch.float32, None, (9, 0))
        'packed'
        >>> choose_sparse_linear(16384, 4096, 4096, torch.bfloat16, None, (9, 0))
        'torch'
    """
    if capability is None or capability < thresholds.tensor_core_capability:
        return "torch"
    if rows * features * inputs < thresholds.packing_products:
        return "torch"
    limit = thresholds.sparse_density_float32 if dtype == torch.float32 else thresholds.sparse_density_16bit
    if density is not None and density <= limit:
        return "sparse"
    return "packed" if dtype == torch.float32 or features <= thresholds.fused_features else "torch"


def choose_packed_tile(rows: int, features: int, multiprocessors: int) -> str:
    """Choose the tile ``"rows x columns"`` of outputs that a block of the fused product computes.

    Args:
        rows: M.
        features: N.
        multiprocessors: of the device.

    Returns:
        The tile's name in ``packed_linear.cuh``: as wide as the output up to 128 columns, since each column of blocks
        expands the bits again, and 256 rows, since each row of blocks reads the weight again; 64 x 64 where larger
        tiles would leave a quarter of the multiprocessors idle.

    Example:
        >>> choose_packed_tile(65536, 100, 132), choose_packed_tile(512, 512, 132)
        ('256x128', '64x64')
    """
    width = next((width for width in (16, 32, 64) if features <= width), 128)
    tiles = -(-rows // 256) * -(-features // width)
    return f"256x{width}" if 4 * tiles >= 3 * multiprocessors else "64x64"


def choose_chunk_rows(
    rows: int, features: int, inputs: int, element_size: int = 2, thresholds: Thresholds = THRESHOLDS
) -> int:
    """Choose how many rows of spikes are unpacked at a time for a product ``[M, K] x [N, K]``.

    Args:
        rows: M.
        features: N.
        inputs: K.
        element_size: bytes of an unpacked spike.
        thresholds: the table.

    Returns:
        Rows of a chunk, a multiple of 128 unless one chunk holds them all; all chunks but the last are equally large.

    Example:
        >>> choose_chunk_rows(16384, 4096, 4096)
        4096
    """
    row_bytes = max(1, element_size * inputs)
    wanted = max(thresholds.chunk_bytes // row_bytes, thresholds.chunk_outputs // max(1, features))
    return _even_chunks(rows, min(wanted, thresholds.largest_chunk_bytes // row_bytes))


def choose_gradient_chunk_rows(
    rows: int, features: int, inputs: int, element_size: int = 2, thresholds: Thresholds = THRESHOLDS
) -> int:
    """Choose how many rows of spikes and gradients a weight gradient ``[N, K]`` takes at a time.

    Args:
        rows: M.
        features: N.
        inputs: K.
        element_size: bytes of an unpacked spike, and of an element of the gradient's plane.
        thresholds: the table.

    Returns:
        Rows of a chunk, as :func:`choose_chunk_rows` gives them.

    Example:
        >>> choose_gradient_chunk_rows(32768, 4096, 1024)
        5504
    """
    return _even_chunks(rows, thresholds.gradient_bytes // max(1, element_size * (features + inputs)))


def _even_chunks(rows: int, most: int) -> int:
    if rows <= most:
        return max(1, rows)
    most = max(128, most // 128 * 128)
    chunks = -(-rows // most)
    return -(-rows // (128 * chunks)) * 128
