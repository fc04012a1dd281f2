"""
Time chunks
===========

A module that treats its sequence step by step may be given the sequence in pieces, one after the other, its state
carried from piece to piece: then only one piece's intermediate tensors exist at a time. This is right for neurons and
for layers that act on each time step alone; it is wrong for batch norm in training, attention over time, and whatever
reduces over time. So it is proved, not assumed: at the first call with each input shape the pieces are run beside the
whole, without gradients, and outputs, states and random numbers must agree.

Pieces are written into one tensor as they come, outputs in the forward and gradients of the input in the backward:
joining them in the end would hold the sequence twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import Function
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_memopt.checkpointing.engine import in_transform
from lightning_memopt.checkpointing.layout import is_dense, memory_order
from lightning_memopt.checkpointing.random_state import HostRandom, torch_random
from lightning_memopt.checkpointing.region import RegionConfig
from lightning_memopt.checkpointing.state import restore_snapshot, take_snapshot
from lightning_memopt.ops.value_bounds import is_fake

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
    parts = {name: _split(given[name], config.chunks, config.time_dim) for name in config.chunked_args}
    return [
        (
            tuple(parts[i][k] if i in parts else value for i, value in enumerate(args)),
            {key: parts[key][k] if key in parts else value for key, value in kwargs.items()},
            parts[config.chunked_args[0]][k].shape[config.time_dim],
        )
        for k in range(config.chunks)
    ]


def run_pieces(run: Callable[..., Any], pieces: Sequence[Piece], config: RegionConfig, label: str) -> Any:
    """Run the pieces one after the other and join the tensors they return along time.

    Everything else that they return must be the same in every piece.

    Raises:
        ValueError: if outputs differ in structure, or an output tensor has no time dimension of the piece's length.
    """
    total = sum(length for _, _, length in pieces)
    joined: list[Any] = []
    spec: TreeSpec | None = None
    start = 0
    for args, kwargs, length in pieces:
        leaves, this = tree_flatten(run(*args, **kwargs))
        if spec is None:
            spec = this
            joined = [_Joined(leaf, total, config.time_dim) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        elif this != spec:
            raise ValueError(f"{label}: time chunks returned outputs of different structure.")
        for index, whole in enumerate(joined):
            leaf = leaves[index]
            leaves[index] = None  # a piece is free once it is written
            if isinstance(whole, _Joined):
                _check_piece(leaf, whole, length, config.time_dim, label)
                whole.write(leaf, start)
            elif isinstance(leaf, Tensor) or not _equal(leaf, whole):
                raise ValueError(
                    f"{label}: an output that is no tensor differs between time chunks: {whole!r} and {leaf!r}."
                )
            del leaf
        start += length
    assert spec is not None
    return tree_unflatten([whole.result() if isinstance(whole, _Joined) else whole for whole in joined], spec)


def _check_piece(leaf: Any, whole: _Joined, length: int, time_dim: int, label: str) -> None:
    if not isinstance(leaf, Tensor) or leaf.dtype != whole.dtype or leaf.dim() != whole.dim:
        raise ValueError(f"{label}: time chunks returned outputs of different structure.")
    if leaf.dim() <= time_dim or leaf.dim() == 0 or leaf.shape[time_dim] != length:
        raise ValueError(
            f"{label}: an output of shape {tuple(leaf.shape)} has no time dimension {time_dim} of length {length}, so "
            "its time chunks cannot be joined. Outputs that are reduced over time need the whole sequence: use "
            "chunks=1."
        )


# ---------------------------------------------------------------------------------------------------------------------
# Pieces of one tensor


def _split(tensor: Tensor, chunks: int, dim: int) -> Sequence[Tensor]:
    """Views of ``tensor``, ``chunks`` along ``dim``, whose gradients are written into one tensor."""
    if not (tensor.requires_grad and torch.is_grad_enabled() and _is_plain(tensor)):
        return tensor.tensor_split(chunks, dim=dim)
    pieces = tensor.detach().tensor_split(chunks, dim=dim)
    gradient = _Gradient(tensor, dim, [piece.shape[dim] for piece in pieces])
    source = _Source.apply(tensor, gradient)
    return [_Part.apply(source, piece, gradient, index) for index, piece in enumerate(pieces)]


def _is_plain(tensor: Tensor) -> bool:
    """Whether pieces of ``tensor`` can be written to a place in one tensor."""
    if torch.compiler.is_compiling() or in_transform():
        return False
    known = type(tensor) in (Tensor, nn.Parameter) or is_fake(tensor)
    return known and tensor.layout is torch.strided


class _Gradient:
    """The gradient of a tensor that was split: every piece's part is written when it is known."""

    def __init__(self, tensor: Tensor, dim: int, lengths: list[int]) -> None:
        self.shape, self.dim = tensor.shape, dim
        self.stride = tensor.stride() if is_dense(tensor) else None
        self.bounds = list(pairwise(accumulate(lengths, initial=0)))
        self.task = -1
        self.whole: Tensor | None = None
        self.pieces: dict[int, Tensor | None] = {}

    def write(self, index: int, piece: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self.task:  # a backward pass that failed may have left some of its pieces
            self.task, self.whole, self.pieces = task, None, {}
        # A gradient of this gradient may be asked for: keep the graph of every piece. And a batch of gradients, as
        # `is_grads_batched` computes, has no place in one tensor.
        if torch.is_grad_enabled() or is_legacy_batchedtensor(piece) or is_functorch_wrapped_tensor(piece):
            self.pieces[index] = piece
            return
        if self.whole is None:
            if self.stride is None:
                self.whole = torch.empty(self.shape, dtype=piece.dtype, device=piece.device)
            else:
                self.whole = torch.empty_strided(self.shape, self.stride, dtype=piece.dtype, device=piece.device)
        self._place(self.whole, index).copy_(piece)
        self.pieces[index] = None

    def take(self) -> Tensor:
        """The whole gradient, zero where no piece had one; ready for another backward afterwards."""
        whole, pieces, self.whole, self.pieces = self.whole, self.pieces, None, {}
        missing = [index for index in range(len(self.bounds)) if index not in pieces]
        if whole is not None:
            for index in missing:
                self._place(whole, index).zero_()
            return whole
        known = [piece for piece in pieces.values() if piece is not None]
        for index in missing:
            start, end = self.bounds[index]
            shape = list(self.shape)
            shape[self.dim] = end - start
            pieces[index] = known[0].new_zeros(shape)
        ordered = [piece for _, piece in sorted(pieces.items()) if piece is not None]
        return torch.cat(ordered, dim=self.dim)

    def _place(self, whole: Tensor, index: int) -> Tensor:
        start, end = self.bounds[index]
        return whole.narrow(self.dim, start, end - start)


class _Source(Function):
    """Stands between a tensor and its pieces: its backward runs after that of all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient = gradient
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return ctx.gradient.take(), None


class _Part(Function):
    """One piece: a view of the tensor, whose gradient goes where the others' go."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, piece: Tensor, gradient: _Gradient, index: int) -> Tensor:
        ctx.gradient, ctx.index = gradient, index
        return piece

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.gradient.write(ctx.index, grad)
        return grad.new_empty(0), None, None, None


class _Joined:
    """A tensor that is written piece by piece."""

    def __init__(self, first: Tensor, total: int, time_dim: int) -> None:
        self.dtype, self.dim, self._time_dim = first.dtype, first.dim(), time_dim
        self._total = total
        self._plain = _is_plain(first)
        self._whole: Tensor | None = None
        # What `_Write` returned; where pieces cannot be written, the pieces.
        self._marks: list[Tensor] = []

    def write(self, piece: Tensor, start: int) -> None:
        if not self._plain:
            self._marks.append(piece)
            return
        if self._whole is None:
            shape = list(piece.shape)
            shape[self._time_dim] = self._total
            order = memory_order(piece.stride()) if is_dense(piece) else list(range(piece.dim()))
            self._whole = torch.empty_permuted(shape, order, dtype=piece.dtype, device=piece.device)
        place = self._whole.narrow(self._time_dim, start, piece.shape[self._time_dim])
        if place.shape != piece.shape:
            raise ValueError(
                f"Time chunks returned outputs of shapes {tuple(place.shape)} and {tuple(piece.shape)}, which cannot "
                "be joined: use chunks=1."
            )
        self._marks.append(_Write.apply(piece, place))

    def result(self) -> Tensor:
        if not self._plain:
            return torch.cat(self._marks, dim=self._time_dim)
        assert self._whole is not None
        if not any(mark.requires_grad for mark in self._marks):
            return self._whole
        whole: Tensor = _Join.apply(self._whole, self._time_dim, *self._marks)
        return whole


class _Write(Function):
    """Writes a piece to its place and returns a mark: a tensor of its shape without memory, with its gradient."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, place: Tensor) -> Tensor:
        place.copy_(piece)
        return piece.new_empty(()).expand(piece.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Join(Function):
    """The whole, once every piece is written."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, *marks: Tensor) -> Tensor:
        ctx.dim, ctx.lengths = dim, [mark.shape[dim] for mark in marks]
        ctx.mark_dirty(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *grad.split(ctx.lengths, dim=ctx.dim)


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
    runs: list[tuple[list[Any], list[Any], list[bytes], HostRandom]] = []
    for in_pieces in (False, True):
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            try:
                result = run_pieces(forward, pieces, config, label) if in_pieces else forward(*args, **kwargs)
                state = [
                    leaf
                    for store in take_snapshot(module, copy=False)._stores
                    for _, value in store.entries()
                    for leaf in tree_flatten(value)[0]
                ]
                state = [s.clone() if isinstance(s, Tensor) else s for s in state]
                runs.append((tree_flatten(result)[0], state, torch_random(), HostRandom.now()))
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
    if whole_random != joined_random or whole_host != joined_host:
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
