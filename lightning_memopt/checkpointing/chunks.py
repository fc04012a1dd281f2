"""
Time chunks
===========

A module that treats its sequence step by step may be given the sequence in pieces, one after the other, its state
carried from piece to piece: then only one piece's intermediate tensors exist at a time. This is right for neurons and
for layers that act on each time step alone; it is wrong for batch norm in training, attention over time, and whatever
reduces over time. So it is proved, not assumed: at the first call with each input shape the pieces are run beside the
whole, without gradients, and outputs, states and random numbers must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_memopt.checkpointing.random_state import HostRandom
from lightning_memopt.checkpointing.region import RegionConfig
from lightning_memopt.checkpointing.state import restore_snapshot, take_snapshot

_PLAIN = (bool, int, float, str, type(None))
Piece = tuple[tuple[Any, ...], dict[str, Any], int]

# A product over fewer rows may be summed in another order.
_RELATIVE_TOLERANCE = 1e-5


def split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], config: RegionConfig, label: str) -> list[Piece]:
    """The arguments of each piece, and how many time steps it has.

    Raises:
        ValueError: if an argument to be split is missing, is no tensor, or has another or too short a time dimension.
    """
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs)
    lengths: dict[int | str, int] = {}
    for name in config.chunked_args:
        value = given.get(name)
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{label}: chunked_args names argument {name!r}, which must be a tensor with time in dimension "
                f"{config.time_dim}; the call has {sorted(map(str, given))} and it is {type(value).__name__}."
            )
        if not -value.dim() <= config.time_dim < value.dim():
            raise ValueError(
                f"{label}: time_dim is {config.time_dim}, but argument {name!r} has shape {tuple(value.shape)}."
            )
        lengths[name] = value.shape[config.time_dim]
    if len(set(lengths.values())) != 1:
        raise ValueError(f"{label}: the arguments in chunked_args must share one time length, got {lengths}.")
    length = next(iter(lengths.values()))
    if length < config.chunks:
        raise ValueError(f"{label}: cannot split {length} time steps into {config.chunks} chunks.")
    parts = {name: given[name].tensor_split(config.chunks, dim=config.time_dim) for name in config.chunked_args}
    return [
        (
            tuple(parts[i][k] if i in parts else value for i, value in enumerate(args)),
            {key: parts[key][k] if key in parts else value for key, value in kwargs.items()},
            parts[config.chunked_args[0]][k].shape[config.time_dim],
        )
        for k in range(config.chunks)
    ]


def merge_chunks(outputs: Sequence[Any], pieces: Sequence[Piece], config: RegionConfig, label: str) -> Any:
    """Concatenate the tensors of the outputs along time; everything else must be the same in every piece.

    Raises:
        ValueError: if outputs differ in structure, or an output tensor has no time dimension of the piece's length.
    """
    flat, specs = zip(*(tree_flatten(output) for output in outputs), strict=True)
    if any(spec != specs[0] for spec in specs[1:]):
        raise ValueError(f"{label}: time chunks returned outputs of different structure.")
    merged = []
    for leaves in zip(*flat, strict=True):
        if not isinstance(leaves[0], Tensor):
            if any(not _equal(leaf, leaves[0]) for leaf in leaves[1:]):
                raise ValueError(f"{label}: an output that is no tensor differs between time chunks: {leaves}.")
            merged.append(leaves[0])
            continue
        for leaf, (_, _, length) in zip(leaves, pieces, strict=True):
            if leaf.dim() <= config.time_dim or leaf.dim() == 0 or leaf.shape[config.time_dim] != length:
                raise ValueError(
                    f"{label}: an output of shape {tuple(leaf.shape)} has no time dimension {config.time_dim} of "
                    f"length {length}, so its time chunks cannot be joined. Outputs that are reduced over time need "
                    "the whole sequence: use chunks=1."
                )
        merged.append(torch.cat(leaves, dim=config.time_dim))
    return tree_unflatten(merged, specs[0])


def _equal(a: Any, b: Any) -> bool:
    """Whether two values that are no tensors are the same: arrays by their elements, NaN equal to NaN."""
    if a is b:
        return True
    try:
        return bool(a == b) or (a != a and b != b)
    except ValueError:  # arrays
        return type(a) is type(b) and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def refuse_norms(module: nn.Module, label: str) -> None:
    """Under the compiler pieces cannot be compared with the whole; what is known to be wrong is refused.

    Raises:
        ValueError: if the module holds a norm that takes statistics over the sequence.
    """
    for submodule in module.modules():
        if isinstance(submodule, _NormBase) and (submodule.training or not submodule.track_running_stats):
            raise ValueError(
                f"{label} holds a {type(submodule).__name__} in training, whose statistics need the whole sequence: "
                "use chunks=1, or leave the norm out."
            )


def check_chunks_are_safe(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    pieces: Sequence[Piece],
    config: RegionConfig,
    label: str,
) -> None:
    """Prove on this call's inputs that pieces give what the whole gives; leaves no trace.

    Raises:
        ValueError: naming what differs: an output's shape, values, a state, or the random numbers drawn.
    """
    snapshot = take_snapshot(module)
    host_random = HostRandom.now()
    devices = [] if not torch.cuda.is_initialized() else list(range(torch.cuda.device_count()))
    runs: list[tuple[list[Any], list[Any], Tensor, HostRandom]] = []
    for run_pieces in (False, True):
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            try:
                if run_pieces:
                    result = merge_chunks([forward(*a, **k) for a, k, _ in pieces], pieces, config, label)
                else:
                    result = forward(*args, **kwargs)
                state = [
                    leaf
                    for store in take_snapshot(module, copy=False)._stores
                    for _, value in store.entries()
                    for leaf in tree_flatten(value)[0]
                ]
                state = [s.clone() if isinstance(s, Tensor) else s for s in state]
                runs.append((tree_flatten(result)[0], state, torch.get_rng_state(), HostRandom.now()))
            finally:
                restore_snapshot(snapshot)
                host_random.set()
    (whole, whole_state, whole_random, whole_host), (joined, joined_state, joined_random, joined_host) = runs
    advice = (
        f"{label} must see the whole sequence: use chunks=1, or leave out batch norm in training, attention over time "
        "and other statistics over the sequence."
    )
    _require_same(f"{label}: an output of the time chunks", whole, joined, advice)
    _require_same(f"{label}: the state after the time chunks", whole_state, joined_state, advice)
    if not torch.equal(whole_random, joined_random) or whole_host != joined_host:
        raise ValueError(f"{label}: time chunks draw other random numbers than the whole sequence. {advice}")


def _require_same(what: str, whole: list[Any], joined: list[Any], advice: str) -> None:
    if len(whole) != len(joined):
        raise ValueError(f"{what} has another structure than without chunks. {advice}")
    for a, b in zip(whole, joined, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if isinstance(a, _PLAIN) and isinstance(b, _PLAIN) and not _equal(a, b):
                raise ValueError(f"{what} has {b!r} where there is {a!r} without chunks. {advice}")
            continue
        if a.shape != b.shape:
            raise ValueError(f"{what} has shape {tuple(b.shape)}, without chunks {tuple(a.shape)}. {advice}")
        if torch.equal(a, b):
            continue
        scale = a.abs().max().item() if a.is_floating_point() else 0.0
        worst = (a.double() - b.double()).abs().max().item()
        if not worst <= _RELATIVE_TOLERANCE * scale:
            raise ValueError(f"{what} differs by up to {worst:.3g} (largest value {scale:.3g}). {advice}")
