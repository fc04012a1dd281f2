"""What the process of the tests holds beside the test: it counts where all that is alive counts."""

from __future__ import annotations

import gc

import torch

from lightning_memopt.measuring.allocation_events import storages_alive


def alive_bytes() -> int:
    """Bytes of all tensors on the CPU, garbage collected before."""
    gc.collect()
    return sum(storage.nbytes() for storage in storages_alive(torch.device("cpu")))
