"""
Regions under ``torch.compile``
===============================

The compiler sees a region as ``torch.utils.checkpoint`` and recomputes it by its own rules; Python-side bookkeeping has
no place there, and none is needed: the compiler turns the state that a region reads and writes into inputs and outputs
of one graph, and leaves writes out of the recomputation. That last point is a setting of torch, which is switched on
while a region of ours is traced and only then.

A packed input is built from two small tensors: the payload, and a token, a tensor of the input's shape that takes no
memory and leads gradients back to the input. Storing it raw instead is not open to a compiled graph, so an input that
does not fit raises :class:`NonBinarySpikeError`. Compressors other than the bit, boolean and uint8 ones have no
compiled form: under the compiler their inputs are stored as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lightning_memopt.checkpointing.compressors import (
    BitSpikeCompressor,
    BooleanSpikeCompressor,
    SpikeCompressor,
    SpikePayload,
    Uint8SpikeCompressor,
    require_fit,
)
from lightning_memopt.checkpointing.layout import span
from lightning_memopt.checkpointing.state import StateBefore

_COMPILED: dict[str, SpikeCompressor] = {
    "bit": BitSpikeCompressor(),
    "boolean": BooleanSpikeCompressor(),
    "uint8": Uint8SpikeCompressor(),
}
_NAMES = {type(compressor): name for name, compressor in _COMPILED.items()}
_STORED_DTYPES = {"bit": torch.uint8, "boolean": torch.bool, "uint8": torch.uint8}

_LIBRARY = torch.library.Library("lightning_memopt", "FRAGMENT")
_LIBRARY.define("region_store(Tensor spikes, str compressor, str label) -> Tensor")
_LIBRARY.define("region_token(Tensor spikes) -> Tensor")
_LIBRARY.define("region_load(Tensor token, Tensor data, str compressor, SymInt[] stride) -> Tensor")


def _store(spikes: Tensor, compressor: str, label: str) -> Tensor:
    packer = _COMPILED[compressor]
    compressed = packer.compress_checked(spikes)
    require_fit(compressed, packer, label)
    data: Tensor = compressed.payload.data
    return data


def _store_fake(spikes: Tensor, compressor: str, label: str) -> Tensor:
    numel = spikes.numel()
    length = (numel + 7) // 8 if compressor == "bit" else numel
    return spikes.new_empty((length,), dtype=_STORED_DTYPES[compressor])


def _token(spikes: Tensor) -> Tensor:
    return spikes.new_zeros(()).expand(spikes.shape)


def _load(token: Tensor, data: Tensor, compressor: str, stride: list[int]) -> Tensor:
    payload = SpikePayload(data, tuple(token.shape), tuple(stride), token.dtype, token.device)
    tensor: Tensor = _COMPILED[compressor].decompress(payload)
    return tensor


def _load_fake(token: Tensor, data: Tensor, compressor: str, stride: list[int]) -> Tensor:
    return torch.empty_strided(token.shape, stride, dtype=token.dtype, device=token.device)


for _backend in ("CPU", "CUDA"):
    for _name, _function in (("region_store", _store), ("region_token", _token), ("region_load", _load)):
        _LIBRARY.impl(_name, _function, _backend)
torch.library.register_fake("lightning_memopt::region_store", _store_fake, lib=_LIBRARY)
torch.library.register_fake("lightning_memopt::region_token", _token, lib=_LIBRARY)
torch.library.register_fake("lightning_memopt::region_load", _load_fake, lib=_LIBRARY)
torch.library.register_autograd("lightning_memopt::region_token", lambda ctx, grad: grad, lib=_LIBRARY)
torch.library.register_autograd(
    "lightning_memopt::region_load", lambda ctx, grad: (grad, None, None, None), lib=_LIBRARY
)


def _allow_state_in_regions(allow: bool) -> bool:
    """Runs while the compiler traces; a torch without this setting rejects stateful regions itself."""
    if hasattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = allow
    return allow


# What torch.compiler.assume_constant_result does, which would load the compiler with this module.
_allow_state_in_regions._dynamo_marked_constant = True  # type: ignore[attr-defined]


def compiled_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    compressor: SpikeCompressor | None,
    compressed_args: tuple[int | str, ...] | None,
    modules: Callable[[], list[nn.Module]],
    label: str = "a checkpointed function",
) -> Any:
    """Trace one region. Without ``compressed_args`` the first tensor argument is the one to be packed.

    ``modules`` returns those whose state the region may touch; it is asked only where the compiler gives up.
    """
    function = _or_eager(function, modules)
    _allow_state_in_regions(True)
    try:
        name = _NAMES.get(type(compressor)) if compressor is not None else None
        if name is None:
            return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
        position = _packed_position(args, compressed_args)
        if position is None:
            return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
        spikes = args[position]
        stride = _dense_stride(spikes)
        stored = spikes.detach() if stride == spikes.stride() else spikes.detach().contiguous()
        data = torch.ops.lightning_memopt.region_store(stored, name, f"input {position} of {label}")
        token = torch.ops.lightning_memopt.region_token(spikes)

        def unpacked(token: Tensor, data: Tensor, *others: Any, **keywords: Any) -> Any:
            rebuilt = torch.ops.lightning_memopt.region_load(token, data, name, stride)
            return function(*others[:position], rebuilt, *others[position:], **keywords)

        others = args[:position] + args[position + 1 :]
        return torch_checkpoint(unpacked, token, data, *others, use_reentrant=False, **kwargs)
    finally:
        _allow_state_in_regions(False)


def _or_eager(function: Callable[..., Any], modules: Callable[[], list[nn.Module]]) -> Callable[..., Any]:
    """``function`` as it is while it is traced; with its state looked after where the compiler breaks the graph.

    The compiler then runs the checkpoint, which it was about to trace, as ordinary Python: forward first, later the
    recomputation.
    """
    memory: list[tuple[StateBefore, list[Tensor]]] = []

    def traced_or_eager(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return _run_eagerly(memory, modules, function, args, kwargs)

    return traced_or_eager


def _run_eagerly(
    memory: list[tuple[StateBefore, list[Tensor]]],
    modules: Callable[[], list[nn.Module]],
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    if memory:
        before, tensors = memory[0]
        with before.recomputing(tensors):
            return function(*args, **kwargs)
    before = StateBefore()
    before.note(modules())
    result = function(*args, **kwargs)
    memory.append((before, before.settle()))
    return result


def _packed_position(args: tuple[Any, ...], compressed_args: tuple[int | str, ...] | None) -> int | None:
    for position, value in enumerate(args):
        if isinstance(value, Tensor) and (compressed_args is None or position in compressed_args):
            return position
    return None


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides where its elements fill their memory, else those of a contiguous tensor."""
    # Not is_dense: the compiler cannot sort symbolic strides.
    if span(tensor.shape, tensor.stride()) == math.prod(tensor.shape) and 0 not in tensor.stride():
        return tensor.stride()
    stride: list[int] = []
    step = 1
    for size in reversed(tensor.shape):
        stride.append(step)
        step *= size
    return tuple(reversed(stride))
