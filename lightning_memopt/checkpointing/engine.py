"""
The checkpoint engine
=====================

A region is a function whose intermediate tensors are not stored: its inputs are, and the function runs again in the
backward pass. The recomputation itself is torch's (``torch.utils.checkpoint``, non-reentrant). What this module adds:

* **Inputs are packed.** Tensor arguments that prove binary are stored as bits (or as whatever the compressor makes of
  them), each storage once, even if three regions share it. The forward always runs on the original tensors.
* **Memory is respected.** Neuron states, statistics, counters and lists of the modules involved are noted before the
  forward, given back to the recomputation and never committed twice (see ``state.py``).
* **Hooks that only look fire once** (see ``hooks.py``), and Python's and NumPy's random numbers are replayed along with
  torch's.
* **Nothing stays behind.** A neuron's state that is not reset keeps the graph that leads to it, which no gradient ran
  through. torch keeps what was recomputed for that graph as long as it lives; here it goes with the region's backward,
  and such a graph does not keep the modules alive (see ``runs.py``).

Everything stored goes through ``save_for_backward``, so ``saved_tensors_hooks`` around the model (CPU offload, say) see
it, and autograd notices an input that was changed in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from lightning_memopt.checkpointing.arguments import StoredArguments
from lightning_memopt.checkpointing.closures import modules_of
from lightning_memopt.checkpointing.compiled import compiled_region
from lightning_memopt.checkpointing.compressors import SpikeCompressor
from lightning_memopt.checkpointing.region import Region, RegionFacts
from lightning_memopt.checkpointing.runs import Run, RunLink, Runs, after_backward
from lightning_memopt.checkpointing.saved_tensors import top_hooks
from lightning_memopt.checkpointing.state import is_stock
from lightning_memopt.ops.arguments import transforms_are_active


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    compressor: SpikeCompressor | None = None,
    **kwargs: Any,
) -> Any:
    """Run ``function(*args, **kwargs)`` without storing its intermediate tensors; they are recomputed in backward.

    Modules that the function calls or closes over keep their state straight: neuron states and statistics step once.

    Args:
        function: any callable, for example a module, a method or a lambda over modules.
        *args: its arguments: tensors of any shape and dtype, containers of tensors, anything else.
        compressor: how to store tensor arguments that it can hold exactly; the others are stored as they are.
        **kwargs: its keyword arguments.

    Returns:
        What ``function`` returns, unchanged. Without gradients enabled this is a plain call.

    Raises:
        TypeError: if ``function`` is not callable or ``compressor`` is not a :class:`SpikeCompressor`.
        RuntimeError: if the region changes an input in place that is stored as it is.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> x = torch.ones(2, 4, requires_grad=True)
        >>> checkpoint(lambda t: layer(t).relu(), x).sum().backward()
        >>> x.grad.shape
        torch.Size([2, 4])
    """
    if not callable(function):
        raise TypeError(f"checkpoint expects a callable, got {type(function).__name__}.")
    check_compressor(compressor)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        return compiled_region(function, args, kwargs, compressor, None, lambda: modules_of(function, args, kwargs))
    label = getattr(function, "__qualname__", None) or type(function).__qualname__
    modules = modules_of(function, args, kwargs)
    region = Region(_function_facts(function, modules), compressor, label=label)
    return run_region(function, args, kwargs, region, modules)


def check_compressor(compressor: object) -> None:
    """Raise TypeError unless ``compressor`` is None or a :class:`SpikeCompressor` object."""
    if compressor is None or isinstance(compressor, SpikeCompressor):
        return
    hint = " Pass an object, not the class." if isinstance(compressor, type) else ""
    raise TypeError(f"compressor must be a SpikeCompressor or None, got {compressor!r}.{hint}")


def in_transform() -> bool:
    """Whether vmap, jvp or the like is active: it takes gradients with its own idea of what to keep."""
    return transforms_are_active() or forward_ad._current_level >= 0


def run_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    region: Region,
    modules: list[nn.Module],
) -> Any:
    """Run one region eagerly: note, forward, keep. ``modules`` are those whose state it may touch."""
    if in_transform():
        return function(*args, **kwargs)
    call = _Call(function, args, kwargs, region, modules)
    # RReLU saves its noise before it draws it: a recomputation that stops at the last saved tensor would miss the draw.
    whole = any(isinstance(module, nn.RReLU) for module in modules)
    with set_checkpoint_early_stop(False) if whole else nullcontext():
        result = torch_checkpoint(call, *call.anchors, use_reentrant=False)
    call.keep(result, region.runs)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# One call of a region


class _Keep(torch.autograd.Function):
    """A node that holds tensors through ``save_for_backward``; it is never run."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("The node that keeps a region's inputs takes no part in the gradients.")


class _Call:
    """The callable given to torch: the first call is the forward, every later one a recomputation."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        region: Region,
        modules: list[nn.Module],
    ) -> None:
        self.original: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.keeper: Any = None
        self.frame: weakref.ref[Any] | None = None
        self.ran = False
        self.first_state = 0
        self.one_output = False
        self.facts = region.facts
        self.arguments = StoredArguments(args, kwargs, region)
        run = Run(function, modules, modules, self.arguments.others, stock=is_stock(function, modules))
        self.link: RunLink | None = RunLink(run)
        devices = self.arguments.devices | _parameter_device(modules)
        # Empty tensors tell torch which devices' random states and autocast settings to replay.
        self.anchors = [torch.empty(0, device=d) for d in devices if d.type not in ("cpu", "meta")]

    def __call__(self, *_: Tensor) -> Any:
        if self.ran:
            return self._recompute()
        self.ran = True
        return self._forward()

    def _forward(self) -> Any:
        assert self.original is not None
        frame = _frame_here()
        self.frame = None if frame is None else weakref.ref(frame)
        result = self.run.first(*self.original)
        self.one_output = sum(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(result)) == 1
        return result

    @property
    def run(self) -> Run:
        """What is run again."""
        assert self.link is not None
        return self.link.run()

    def keep(self, result: Any, runs: Runs | None) -> None:
        """After the forward: let go of the arguments, keep what the recomputation needs, and the run in ``runs``."""
        states = self.run.before.graphs() if self.facts.states_stand_apart is None else []
        tensors = self.arguments.settle()
        self.first_state = len(tensors)
        tensors += self.run.before.settle()
        self.run.before.forget_tensors()
        anchor = torch.empty(0, requires_grad=True)
        # The tensor, not its node: in older versions of torch the node alone does not keep what it saved.
        self.keeper = _Keep.apply(anchor, *tensors)
        if states:
            self.facts.states_stand_apart = _stand_apart(result, states, (self.original, tensors))
        self.original = None
        if runs is not None and self.link is not None:
            self.link.leave_to(runs)
        frame = None if self.frame is None else self.frame()
        if frame is not None:
            frame._memopt_call = self
            after_backward(frame, frame.weak_holders, _has_run, _free_recomputed)

    def _recompute(self) -> None:
        if self.keeper is None:
            # A gradient taken inside the region itself, while its forward still runs.
            assert self.original is not None
            self.run.again(*self.original, self.run.before.settle())
            return
        kept: Sequence[Tensor] = self.keeper.grad_fn.saved_tensors
        args, kwargs = self.arguments.rebuild(kept)
        state = kept[self.first_state :]
        del kept
        self.run.again(args, kwargs, state)

    def forget(self, *, partly: bool) -> None:
        """Let go of what is kept, as a backward pass has run through the region, unless another one may come.

        With one output there is no other, unless the graph is kept or only some nodes have run (``partly``). Those left
        may lead to a state, which may be carried for long: a backward pass of it would need nodes that have run. Unless
        it stands apart from the output, as that of a delay line does.
        """
        node: Any = None if self.keeper is None else self.keeper.grad_fn
        if not self.one_output or not hasattr(node, "maybe_clear_saved_tensors"):  # torch 2.6 has no such call
            return
        if not partly or (not self.facts.states_stand_apart and self.run.before.graphs()):
            node.maybe_clear_saved_tensors()
            self.link = None


def _stand_apart(result: Any, states: list[Tensor], given: Any) -> bool:
    """Whether no node between what was ``given`` to a region and its ``result`` leads to one of ``states``, too."""
    outside = {leaf.grad_fn for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}

    def nodes(tensors: list[Any]) -> set[Any]:
        found: set[Any] = set()
        pending = [tensor.grad_fn for tensor in tensors if isinstance(tensor, Tensor)]
        while pending:
            node = pending.pop()
            if node not in found and node not in outside and not hasattr(node, "variable"):
                found.add(node)
                pending += [] if node is None else [after for after, _ in node.next_functions]
        return found - {None}

    return nodes(tree_leaves(result)).isdisjoint(nodes(states))


# ---------------------------------------------------------------------------------------------------------------------
# What a backward pass leaves behind, in the record that torch keeps of a checkpoint


def _frame_here() -> Any:
    """The record of the checkpoint whose forward runs here; None where torch does not show it."""
    pack: Any = (top_hooks(True) or (None,))[0]
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    return pack.__closure__[names.index("frame")].cell_contents if "frame" in names else None


def _has_run(frame: Any, task: int) -> bool:
    return bool(frame.is_recomputed.get(task))


def _free_recomputed(frame: Any) -> None:
    """As if the backward passes so far had not recomputed anything: should one ask again, it is recomputed again."""
    for task in [task for task in frame.recomputed if isinstance(task, int) and frame.is_recomputed.get(task)]:
        for reference in frame.weak_holders:
            holder = reference()
            if holder is not None:
                holder.handles.pop(task, None)
        for by_task in (frame.recomputed, frame.recomp_counter, frame.is_recomputed):
            del by_task[task]
    frame._memopt_call.forget(partly=any(holder() is not None for holder in frame.weak_holders))


def _parameter_device(modules: list[nn.Module]) -> set[torch.device]:
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                return {parameter.device}
    return set()


# ---------------------------------------------------------------------------------------------------------------------
# What functions learned

_FUNCTION_FACTS: dict[tuple[Any, ...], RegionFacts] = {}


def _function_facts(function: Callable[..., Any], modules: list[nn.Module]) -> RegionFacts:
    """Facts of a function are those of its code with the modules it works on: one lambda may serve many blocks."""
    code = getattr(getattr(function, "__func__", function), "__code__", type(function))
    key = (code, *map(id, modules))
    if key not in _FUNCTION_FACTS:
        if len(_FUNCTION_FACTS) >= 4096:
            _FUNCTION_FACTS.clear()
        _FUNCTION_FACTS[key] = RegionFacts()
    return _FUNCTION_FACTS[key]
