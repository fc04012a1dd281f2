"""
Gradients alive during a backward pass
======================================

A backward pass visits the nodes of the autograd graph from the last one created to the first. What gradients are alive
when it comes to a node follows from the graph alone: the gradient that a node is given lives from its first
contribution until the node has run. Nothing has to run for this, so it is known even where the tensors that the
backward needs were not kept.

Three things are taken from how autograd works. Additions, views and concatenations hand on the memory of the gradient
they were given, so the two sides of a skip connection share one. A second contribution is added into the first where
nobody else holds that, else a third tensor takes the sum. A parameter's gradient takes over the memory that arrives, if
nobody else holds it, and stays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

# Backward nodes that return the gradient they were given, or a view of it; a result of another size is a new tensor.
_HAND_ON = frozenset(
    {
        *("AddBackward0", "SubBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"),
        *("TransposeBackward0", "TBackward0", "PermuteBackward0", "MovedimBackward0", "AliasBackward0"),
        *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "UnsqueezeBackward0", "CloneBackward0"),
        *("ExpandBackward0", "ToCopyBackward0"),
    }
)
# Those that return a view whatever its size: slices of the gradient, or one value seen many times.
_RETURN_VIEWS = frozenset({"CatBackward0", "StackBackward0", "SumBackward0", "SumBackward1"})


def sequence_number() -> int:
    """The number that autograd gives to the next node of this thread."""
    return int(torch._C._autograd._get_sequence_nr())


@dataclass(eq=False)
class _Gradient:
    """Memory of a gradient in flight."""

    bytes: int
    waits_for: list[int] = field(default_factory=list)
    """Sequence numbers of the nodes that will be given it."""


@dataclass(frozen=True)
class _Moment:
    """The backward pass at one node."""

    sequence: int
    in_flight: int
    """Gradient bytes alive when the node starts, without those of parameters."""
    parameters: int
    """Bytes of the parameters' gradients at that time."""
    peak: int
    """Most gradient bytes alive while it runs, parameters included."""
    shared: tuple[tuple[int, int, int], ...]
    """Gradients that several nodes wait for: the first and the last of these nodes, and bytes."""


class GradientFlow:
    """The gradients of the backward pass from ``loss``, byte by byte.

    Stretches of the pass are named by sequence numbers: autograd counts nodes in the order of the forward pass.

    Args:
        loss: a tensor with a graph. Tensors saved in the graph are not looked at.
        rounded: bytes that the allocator hands out for a tensor of so many bytes.

    Example:
        >>> x = torch.ones(8, requires_grad=True)
        >>> h = x * 2
        >>> first = sequence_number()
        >>> y = h.exp() + h
        >>> flow = GradientFlow(y.sum())
        >>> flow.in_flight(first), flow.peak(first, sequence_number())
        (32, 64)
    """

    def __init__(self, loss: Tensor, rounded: Callable[[int], int] = lambda size: size) -> None:
        self._rounded = rounded
        self._in_flight = self._in_parameters = 0
        self._shared: dict[int, _Gradient] = {}
        self._leaves: dict[int, Tensor] = {}
        self._new_parameters: list[tuple[int, int]] = []
        self._moments = self._run(loss)
        self._moments.reverse()
        self._sequences = [moment.sequence for moment in self._moments]

    def in_flight(self, sequence: int) -> int:
        """Gradient bytes alive when all nodes from ``sequence`` on have run, without those of parameters."""
        index = bisect_left(self._sequences, sequence)
        return self._moments[index - 1].in_flight if index else 0

    def peak(self, first: int, last: int) -> int:
        """Most gradient bytes alive while the nodes from ``first`` up to ``last`` run, above those alive before."""
        low, high = bisect_left(self._sequences, first), bisect_left(self._sequences, last)
        if low == high:
            return 0
        start = self._moments[high - 1]
        return max(moment.peak for moment in self._moments[low:high]) - start.in_flight - start.parameters

    def parameters(self, first: int, last: int) -> int:
        """Bytes of the parameters' gradients that appear while those nodes run."""
        return sum(size for sequence, size in self._new_parameters if first <= sequence < last)

    def shared(self, first: int, last: int) -> int:
        """Of the gradients that wait for those nodes when the first of them runs, bytes of those that stay after it.

        They stay because nodes from before ``first`` wait for them, too: the other side of a skip connection.
        """
        index = bisect_left(self._sequences, last)
        if not index:
            return 0
        waiting = self._moments[index - 1].shared
        return sum(size for earliest, latest, size in waiting if earliest < first <= latest < last)

    # -----------------------------------------------------------------------------------------------------------------

    def _run(self, loss: Tensor) -> list[_Moment]:
        """Go through the backward pass; the moments come in its order."""
        assert loss.grad_fn is not None
        root = (loss.grad_fn, int(loss.output_nr))
        waiting: dict[tuple[Any, int], _Gradient] = {}
        self._give(waiting, root, self._new(self._bytes(*root)))
        moments: list[_Moment] = []
        for node in sorted(_nodes(loss), key=lambda node: -int(node._sequence_nr())):
            sequence = int(node._sequence_nr())
            before = self._in_flight, self._in_parameters
            shared = tuple((min(g.waits_for), max(g.waits_for), g.bytes) for g in self._shared.values())
            slots = [(node, number) for number in range(len(node._input_metadata))]
            arrived = [slot for slot in slots if slot in waiting]
            given = [waiting.pop(slot) for slot in arrived]
            first = given[0] if given else None
            results: list[tuple[Any, int, _Gradient]] = []
            for position, (following, number) in enumerate(node.next_functions):
                if following is not None and first is not None:
                    size = self._bytes(following, number)
                    # Sizes as autograd sees them: of a sum's gradient the memory may be a single value.
                    hands_on = _hands_on(node, position, same_size=size == self._bytes(*arrived[0]))
                    results.append((following, number, first if hands_on else self._new(size)))
            peak = self._in_flight + self._in_parameters
            for following, number, gradient in results:
                if _leaf(following) is None:
                    peak = max(peak, self._give(waiting, (following, number), gradient))
            for gradient in given:
                gradient.waits_for.remove(sequence)
                self._let_go(gradient)
            for following, _, gradient in results:
                leaf = _leaf(following)
                if leaf is not None:
                    self._accumulate(leaf, gradient, sequence)
                    peak = max(peak, self._in_flight + self._in_parameters)
            moments.append(_Moment(sequence, *before, peak, shared))
        return moments

    def _new(self, size: int) -> _Gradient:
        self._in_flight += size
        return _Gradient(size)

    def _let_go(self, gradient: _Gradient) -> None:
        if len(gradient.waits_for) < 2:
            self._shared.pop(id(gradient), None)
        if not gradient.waits_for:
            self._in_flight -= gradient.bytes
            gradient.bytes = 0

    def _give(self, waiting: dict[tuple[Any, int], _Gradient], slot: tuple[Any, int], gradient: _Gradient) -> int:
        """Add ``gradient`` to what waits in ``slot``; returns the most bytes alive meanwhile."""
        target = int(slot[0]._sequence_nr())
        there = waiting.get(slot)
        if there is None:
            waiting[slot] = gradient
        elif len(there.waits_for) == 1 and there.bytes >= gradient.bytes:  # added in place
            self._let_go(gradient)
            return self._in_flight + self._in_parameters
        else:
            waiting[slot] = self._new(self._bytes(*slot))
            peak = self._in_flight + self._in_parameters
            there.waits_for.remove(target)
            self._let_go(there)
            self._let_go(gradient)
            waiting[slot].waits_for.append(target)
            return peak
        gradient.waits_for.append(target)
        if len(gradient.waits_for) > 1:
            self._shared[id(gradient)] = gradient
        return self._in_flight + self._in_parameters

    def _accumulate(self, leaf: Tensor, gradient: _Gradient, sequence: int) -> None:
        size = gradient.bytes or self._rounded(leaf.nbytes)
        if id(leaf) not in self._leaves:
            self._leaves[id(leaf)] = leaf
            self._new_parameters.append((sequence, size))
            self._in_parameters += size
        self._let_go(gradient)

    def _bytes(self, node: Any, number: int) -> int:
        metadata = node._input_metadata[number]
        return self._rounded(prod(map(int, metadata.shape)) * int(metadata.dtype.itemsize))


def leaves_of(loss: Tensor) -> list[Tensor]:
    """The leaves that the backward of ``loss`` will give a gradient to."""
    leaves = (_leaf(following) for node in _nodes(loss) for following, _ in node.next_functions)
    # By the leaf: a node that nobody holds is a new object each time, and its id means nothing.
    return list({id(leaf): leaf for leaf in leaves if leaf is not None}.values())


def edges_out(loss: Tensor, first: int) -> list[tuple[Any, int]]:
    """Where gradients go that leave the nodes of ``loss`` from the number ``first`` on: node and input number."""
    found = {
        (following, number): None
        for node in _nodes(loss)
        if node._sequence_nr() >= first
        for following, number in node.next_functions
        if following is not None and (_leaf(following) is not None or following._sequence_nr() < first)
    }
    return list(found)


def _nodes(loss: Tensor) -> list[Any]:
    """The nodes of the graph behind ``loss``, without those that only add to a leaf's gradient."""
    pending: list[Any] = [loss.grad_fn]
    seen = set(pending)
    for node in pending:  # grows while it is walked
        for following, _ in node.next_functions:
            if following is not None and following not in seen and _leaf(following) is None:
                seen.add(following)
                pending.append(following)
    return pending


def _leaf(node: Any) -> Tensor | None:
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, Tensor) else None


def _hands_on(node: Any, position: int, *, same_size: bool) -> bool:
    """Whether the result at ``position`` is the gradient that ``node`` was given, or a view of it."""
    name = node.name()
    if name in _RETURN_VIEWS:
        return True
    if name not in _HAND_ON or not same_size:
        return False
    # x + alpha * y and x - y have a gradient of their own for y.
    return position == 0 or (name == "AddBackward0" and node._saved_alpha == 1)
