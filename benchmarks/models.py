"""
Benchmark models
^^^^^^^^^^^^^^^^

Each builder returns a :class:`Benchmark`: a model, one batch of synthetic data, the loss of one training step, and what
a memory search needs to know about the model (which blocks are regions, how one splits, what may be cut along time).

``size="full"`` is the size published figures use and wants a GPU; ``size="small"`` keeps every kind of layer, at a size
that two CPU cores train in one or two seconds a step; ``size="tiny"`` is for smoke tests. The block model is small
enough to be the same at every size but ``"tiny"``: T=16, N=512, C=512.

Neurons run in SpikingJelly's multi-step mode on its plain PyTorch path. Layers come from SpikingJelly where it ships
the model; the others follow their papers. ``resnet`` is torchvision's, for a network without neurons that has batch
norms; ``gpt`` needs torch only.
"""

from __future__ import annotations

from typing import get_args

import torch
from benchmark_case import Benchmark, MissingLibraryError, Precision, Size
from dense_models import dense_builders

__all__ = ["MODELS", "Benchmark", "MissingLibraryError", "Precision", "Size", "build"]

MODELS = ("block", "vgg", "sew_resnet34", "spikformer", "gpt", "resnet")


def build(name: str, *, size: Size = "small", seed: int = 0) -> Benchmark:
    """Build a benchmark model and its batch on the CPU, from ``seed``.

    Raises:
        ValueError: ``name`` or ``size`` is unknown.
        MissingLibraryError: the model needs SpikingJelly or torchvision and it is not installed.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; choose one of {', '.join(MODELS)}")
    if size not in get_args(Size):
        raise ValueError(f"unknown size {size!r}; choose 'full', 'small' or 'tiny'")
    if name in ("gpt", "resnet"):
        builder = dense_builders()[name]
    else:
        try:
            import spikingjelly.activation_based  # noqa: F401
        except ImportError as error:
            raise MissingLibraryError(
                f"the {name!r} benchmark is a SpikingJelly network and spikingjelly could not be imported ({error}); "
                "install it with: pip install 'lightning-memopt[examples]' (--model gpt needs torch only)"
            ) from error
        from spiking_models import spiking_builders

        builder = spiking_builders()[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return builder(size)
