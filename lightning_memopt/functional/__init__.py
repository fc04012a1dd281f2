"""Spike operations as functions: compression, projections of binary input, and neurons fused with them."""

from lightning_memopt.functional.compression import bit_pack_spike_dense, bit_spike_compress, bit_spike_decompress

__all__ = ["bit_pack_spike_dense", "bit_spike_compress", "bit_spike_decompress"]
