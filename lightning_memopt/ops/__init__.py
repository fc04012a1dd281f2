"""Spike operations registered with torch, each with a reference in plain torch."""

from lightning_memopt.ops.bit_pack import bit_pack, bit_unpack

__all__ = ["bit_pack", "bit_unpack"]
