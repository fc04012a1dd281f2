"""Spike operations as functions: compression, projections of binary input, and neurons fused with them."""

from lightning_memopt.functional.compression import bit_pack_spike_dense, bit_spike_compress, bit_spike_decompress
from lightning_memopt.functional.neuron import if_linear, if_spike, lif_linear, lif_spike
from lightning_memopt.functional.packed import packed_spike_linear
from lightning_memopt.functional.sparse import sparse_linear

__all__ = [
    "bit_pack_spike_dense",
    "bit_spike_compress",
    "bit_spike_decompress",
    "if_linear",
    "if_spike",
    "lif_linear",
    "lif_spike",
    "packed_spike_linear",
    "sparse_linear",
]
