"""Bytes in words, as tables and messages say them."""

from __future__ import annotations


def format_bytes(size: int) -> str:
    """Bytes in MiB, as in all tables.

    Example:
        >>> format_bytes(12 * 2**30), format_bytes(2048)
        ('12288.0 MiB', '0.002 MiB')
    """
    return f"{in_mib(size)} MiB"


def in_mib(size: int) -> str:
    """Bytes as MiB: one decimal, three where that would read 0.0, and never a zero for what is not."""
    if size == 0 or size >= 0.05 * 2**20:
        return f"{size / 2**20:.1f}"
    return f"{size / 2**20:.3f}" if size >= 0.0005 * 2**20 else "<0.001"
