"""Where the bytes of training go: pictures of measured steps."""

from lightning_memopt.accounting.plots import plot_frontier, plot_timeline

__all__ = ["plot_frontier", "plot_timeline"]
