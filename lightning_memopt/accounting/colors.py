"""Colors of the consumers of memory, the same in every picture."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CONSUMER_COLORS"]

# Of middling lightness: visible on white and on black paper, and dark text on them is readable.
CONSUMER_COLORS: Mapping[str, str] = {
    "parameters": "#6f9fd8",
    "gradients": "#e58a3c",
    "optimizer_state": "#a88bd0",
    "activations": "#4fb286",
    "autocast_copies": "#e6c84f",
    "buffers": "#9c8f7a",
    "inputs": "#58c1cf",
    "communication": "#d983b6",
    "temporaries": "#e06c66",
    "other": "#a9adb3",
}
"""Name of a consumer, as in :data:`~lightning_memopt.measuring.consumers.CONSUMERS`, to its color."""
