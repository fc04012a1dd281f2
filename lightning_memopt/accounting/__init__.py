"""Where the bytes of training go: what an optimizer will hold, and pictures of measured steps."""

from lightning_memopt.accounting.optimizer_state import OptimizerBytes, optimizer_bytes
from lightning_memopt.accounting.plots import plot_timeline

__all__ = ["OptimizerBytes", "optimizer_bytes", "plot_timeline"]
