"""
Experiments on one region
=========================

What a treatment does to a region shows when the region alone is run under it: forward, and backward from a made-up
gradient. Its inputs are those of a real call, cut off from the graph before it; its memory, the random numbers and
autocast are as they were when the real call began; and afterwards all is as the real call left it. So an experiment
may be made in the middle of a forward pass, and nothing but the region has to fit into memory.

What is noted
-------------
* Bytes alive at the moments of such a run: its start; the end of the forward; after the output has been dropped, which
  is what the treatment holds; the arrival of the gradient; the time when that has been used up; the end.
* Which tensors from outside the region, and which of its outputs, are held as they are. Neighbouring regions may hold
  them too, so they must be known by name; whatever else is held is the region's own and only counts as bytes.
* Whether outputs, gradients, states and random numbers are those of the plain region. A treatment that changes them is
  refused. This is the proof for time chunks.

The gradient is not one for all elements: batch norm's derivative of a sum is zero, and an error would stay hidden.
"""

from __future__ import annotations

import gc
import statistics
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_memopt.checkpointing import (
    StateSnapshot,
    checkpoint_module,
    learn_parameters,
    region_config,
    restore_snapshot,
    take_snapshot,
)
from lightning_memopt.checkpointing.layout import is_dense
from lightning_memopt.checkpointing.module import set_config
from lightning_memopt.checkpointing.random_state import torch_random
from lightning_memopt.checkpointing.state import forget_constants, replace_graphs
from lightning_memopt.measuring import MemoryMark, mark_memory, measure_memory
from lightning_memopt.measuring.storage_trace import fake_mode, is_timed
from lightning_memopt.observing.costs import Choice
from lightning_memopt.observing.gradient_flow import leaves_of
from lightning_memopt.observing.model_state import random_states
from lightning_memopt.observing.observe import Work, storage_address, tensors_in, work_of
from lightning_memopt.observing.trial import is_out_of_memory
from lightning_memopt.ops.value_bounds import is_fake, is_plain

_START, _FORWARD, _HELD, _ARRIVED, _USED_UP, _END = "start", "forward", "held", "arrived", "used up", "end"
_PLAIN = (bool, int, float, str, bytes, type(None))
# A sum over time that is taken piece by piece is rounded differently: allowed error, relative to the largest value.
_CHUNKS_TOLERANCE = 1e-6
_ROUNDINGS = 4  # ... or so many roundings of a type with fewer digits
# On a device whose sums depend on the order in which threads finish, a treatment may differ from the plain region by
# this many times what the plain region differs from itself.
_NOISE = 10.0
_TIMED_RUNS = 3
# Values are compared in pieces of this many elements, so that it takes little memory.
_PIECE_NUMEL = 1 << 20


@dataclass(frozen=True)
class Moment:
    """What a region and the objects it is given remember, and all random number generators, at one time."""

    snapshots: tuple[StateSnapshot, ...]
    """Of one region; or of several that run one after another, each as its own call began."""
    random: tuple[tuple[str, Callable[[], None]], ...]

    @staticmethod
    def now(module: nn.Module, arguments: Any, device: torch.device) -> Moment:
        """Note everything, values included; objects in ``arguments`` may remember something, too."""
        snapshot = take_snapshot(module, objects=tree_leaves(arguments), copy=True)
        return Moment((snapshot,), tuple(random_states([device])))

    def followed_by(self, other: Moment) -> Moment:
        """This time, for the region that runs next, too."""
        return Moment((*self.snapshots, *other.snapshots), self.random)

    def restore(self) -> None:
        """Return to this time."""
        for snapshot in self.snapshots:
            restore_snapshot(snapshot)
        for _, write in self.random:
            write()


@dataclass(frozen=True)
class RegionCall:
    """One call of a region that has just been made."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    before: Moment
    neighbours: tuple[Tensor, ...]
    """Tensors from outside that it might hold, one for each storage; the plain run saved them, or they are inputs."""
    written: tuple[Tensor, ...]
    """Parameters that it writes to."""
    device: torch.device
    rounded: Callable[[int], int]
    """Bytes that the allocator hands out for a tensor of so many bytes."""
    treated: tuple[nn.Module, ...]
    """The modules that a treatment is given to: ``module``, or those of a series."""
    writes_input: bool = False
    """Whether it changes an input in place. Then the values it was given are lost, and only ``keep`` can be tried."""

    @property
    def given(self) -> list[Any]:
        """Its arguments, without the containers."""
        return tree_leaves((self.args, self.kwargs))


@dataclass(frozen=True)
class Result:
    """A region under one treatment. Bytes are above those alive at the start, unless it says otherwise."""

    choice: Choice
    forward_peak_bytes: int = 0
    held_bytes: int = 0
    """Alive after the forward when its output has been dropped, without the tensors from outside."""
    holds_neighbours: tuple[bool, ...] = ()
    """For each of the call's ``neighbours``, whether it is held as it is."""
    holds_outputs: tuple[bool, ...] = ()
    """The same for the storages of its output, in order; those bytes are part of ``held_bytes``."""
    backward_peak_bytes: int = 0
    """Above those alive when the gradient of its output had arrived."""
    backward_peak_kept_bytes: int = 0
    """The same if somebody else keeps that gradient while it runs."""
    left_bytes: int = 0
    """Alive after the backward, without gradients: states, and what hangs on the graph that leads to them."""
    left_outputs: tuple[bool, ...] = ()
    """For the storages of its output, whether they are among these."""
    work: Work = field(default_factory=Work)
    """Operations of forward and backward."""
    ms: float = 0.0
    """Time of forward and backward; 0 where it is not measured."""
    refused: str = ""


def try_choices(call: RegionCall, choices: Mapping[Choice, Mapping[str, Any]]) -> tuple[Result, ...]:
    """Run a region under each of ``choices``, the first of which must be the plain one.

    Args:
        call: a call that has just been made; the region is left as that call left it.
        choices: for each choice the arguments of :func:`checkpoint_module`; none for the plain region.
    """
    bench = _Bench(call)
    runs: dict[Choice, _Run] = {}

    def session() -> None:
        for choice, arguments in choices.items():
            runs[choice] = bench.attempt(f"{len(runs)}", arguments)

    try:
        bench.warm_up(choices.values())
        report = measure_memory(session, device=call.device)
        marks: dict[tuple[str, str], MemoryMark] = {}
        for mark in report.marks:
            run, _, moment = mark.name.partition(":")
            marks[run, moment] = mark
        results = [_result(choice, run, f"{number}", marks) for number, (choice, run) in enumerate(runs.items())]
        if is_timed(call.device):
            results = [bench.timed(result, choices[result.choice]) for result in results]
        if fake_mode() is not None:
            results = _without_less_work(results)
    finally:
        bench.close()
    return tuple(results)


def _result(choice: Choice, run: _Run, name: str, marks: Mapping[tuple[str, str], MemoryMark]) -> Result:
    if run.refused:
        return Result(choice, refused=run.refused)
    start, forward, held, end = (marks[name, moment] for moment in (_START, _FORWARD, _HELD, _END))
    backward = kept = 0
    if (name, _ARRIVED) in marks:
        arrived = marks[name, _ARRIVED].bytes
        used_up = marks.get((name, _USED_UP))
        # Had somebody kept the gradient, everything after it was let go would be higher by it.
        early, late = (end.peak_bytes, 0) if used_up is None else (used_up.peak_bytes, end.peak_bytes)
        backward = max(early, late) - arrived
        kept = max(early, late + run.gradient_bytes) - arrived
    return Result(
        choice=choice,
        forward_peak_bytes=forward.peak_bytes - start.bytes,
        held_bytes=held.bytes - start.bytes,
        holds_neighbours=run.holds_neighbours,
        holds_outputs=run.holds_outputs,
        backward_peak_bytes=backward,
        backward_peak_kept_bytes=kept,
        left_bytes=max(end.bytes - start.bytes - run.gradients_left_bytes, 0),
        left_outputs=run.left_outputs,
        work=run.work,
    )


def _without_less_work(results: list[Result]) -> list[Result]:
    """Refuse pieces that do less than the whole: what they leave out lies between time steps, attention for one."""
    whole = next(
        (r.work.flops for r in results if r.choice.treatment == "recompute" and r.choice.chunks == 1 and not r.refused),
        0,
    )
    reason = "does less work in pieces than as a whole: its time steps depend on each other"
    # The products of cheap pieces do not run again, so it is the other pieces that tell.
    pieces = [result for result in results if result.choice.chunks > 1 and not result.choice.cheap_chunks]
    if not any(result.work.flops < whole for result in pieces):
        return results
    return [replace(result, refused=reason) if result.choice.chunks > 1 else result for result in results]


def storages_of(values: Any) -> dict[int, Tensor]:
    """The tensors in ``values``, one for each storage, by its address."""
    found: dict[int, Tensor] = {}
    for tensor in tensors_in(values):
        found.setdefault(storage_address(tensor), tensor)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Runs


@dataclass
class _Run:
    """What a run gave beside its marks."""

    refused: str = ""
    holds_neighbours: tuple[bool, ...] = ()
    holds_outputs: tuple[bool, ...] = ()
    gradient_bytes: int = 0
    """Of the largest gradient that was made up."""
    gradients_left_bytes: int = 0
    """Of all gradients, of inputs and parameters, that the backward left."""
    outputs: tuple[StorageWeakRef, ...] = ()
    """The storages of its output."""
    left_outputs: tuple[bool, ...] = ()
    work: Work = field(default_factory=Work)
    ms: float = 0.0
    watched: list[Any] = field(default_factory=list)
    """Weak references that mark the end of what they refer to."""


@dataclass
class _Left:
    """What a run left behind, to be compared."""

    input_gradients: list[Tensor | None] = field(default_factory=list)
    gradients: Any = field(default_factory=WeakTensorKeyDictionary)
    """Of leaves, as long as these live: another run may get another tensor at the same address."""
    state: list[Any] = field(default_factory=list)
    random: list[bytes] = field(default_factory=list)


class _Bench:
    """Runs one region again and again from the same start; :meth:`close` leaves all as the real call left it."""

    def __init__(self, call: RegionCall) -> None:
        self._call = call
        self._after = Moment.now(call.module, call.given, call.device)
        self._written = [(parameter, parameter.detach().clone()) for parameter in call.written]
        self._treated = [(module, region_config(module)) for module in call.treated]
        self._reference: _Left | None = None
        self._noise = 0.0
        # What it returned in the real call; not where the real call began with other values than we have.
        changed = call.writes_input or call.written
        self._output: list[Any] | None = None if changed else tree_leaves(call.output)
        learn_parameters(call.module, call.written)

    def warm_up(self, choices: Iterable[Mapping[str, Any]]) -> None:
        """Let the device choose its kernels, and regions learn which state changes in place."""
        if self._call.device.type != "cpu" and fake_mode() is None:
            first, again = _Left(), _Left()
            with suppress(Exception):
                self._run("", {}, first)
                self._run("", {}, again)
                self._noise = _NOISE * _distance(first, again)
        recomputed = next((arguments for arguments in choices if arguments.get("chunks") == 1), None)
        if recomputed is not None and any(snapshot._copies for snapshot in self._call.before.snapshots):
            with suppress(Exception):
                self._run("", recomputed, _Left())

    def attempt(self, name: str, arguments: Mapping[str, Any]) -> _Run:
        """One run; whatever goes wrong is a reason to refuse the treatment."""
        chunked = arguments.get("chunks", 1) > 1
        left = _Left()
        try:
            # The first run under a treatment: what it takes to find out what later ones know is part of a first step.
            run = self._run(name, arguments, left)
        except Exception as error:
            error.__traceback__ = None  # it holds the tensors of the run
            if not is_out_of_memory(error):
                return _Run(f"{type(error).__name__}: {error}")
            gc.collect()
            if self._call.device.type == "cuda":
                torch.cuda.empty_cache()
            return _Run("runs out of memory")
        if self._reference is None:
            self._reference = left
        run.refused = run.refused or _difference(self._reference, left, self._tolerance(chunked))
        return run

    def timed(self, result: Result, arguments: Mapping[str, Any]) -> Result:
        """``result`` with the median time of some runs."""
        if result.refused:
            return result
        times = [self._run("", arguments, None).ms for _ in range(_TIMED_RUNS)]
        return replace(result, ms=statistics.median(times))

    def close(self) -> None:
        """Return to what the real call left."""
        self._reference = self._output = None
        self._treat({})
        self._put_back_parameters()
        self._after.restore()
        forget_constants(self._call.module)

    def _tolerance(self, chunked: bool) -> Callable[[Tensor], float]:
        def allowed(tensor: Tensor) -> float:
            if not chunked or not tensor.is_floating_point():
                return self._noise
            return max(self._noise, _CHUNKS_TOLERANCE, _ROUNDINGS * torch.finfo(tensor.dtype).eps)

        return allowed

    def _treat(self, arguments: Mapping[str, Any]) -> None:
        for module, config in self._treated:
            if arguments:
                checkpoint_module(module, **arguments)
            else:
                set_config(module, config)

    def _put_back_parameters(self) -> None:
        with torch.no_grad():
            for parameter, value in self._written:
                parameter.detach().copy_(value)

    def _run(self, name: str, arguments: Mapping[str, Any], left: _Left | None) -> _Run:
        """Forward and backward from the start of the call; without ``left`` nothing but time is taken."""
        call, run, clock = self._call, _Run(), _Clock(self._call.device)
        self._put_back_parameters()
        call.before.restore()
        _cut_off_state(call)
        self._treat(arguments)
        torch.clear_autocast_cache()
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            counting = None if left is None else stack.enter_context(_Counting())
            input_gradients: list[Tensor | None] = []
            tolerance = None if left is None else self._tolerance(arguments.get("chunks", 1) > 1)
            root = self._forward(f"{name}:", run, clock, input_gradients, tolerance)
            stack.enter_context(_after_autocast(call.device))
            mark_memory(f"{name}:{_HELD}")
            if left is not None and fake_mode() is None:
                left.random = torch_random()
            with _gradients_aside([] if root is None else leaves_of(root)) as leaves:
                if root is not None:
                    with clock:
                        root.backward()
                mark_memory(f"{name}:{_END}")
                run.left_outputs = tuple(not storage.expired() for storage in run.outputs)
                if left is not None:
                    left.input_gradients = input_gradients
                    for leaf in leaves:
                        left.gradients[leaf] = leaf.grad
                    gradients = storages_of([*input_gradients, *left.gradients.values()]).values()
                    sizes = [tensor.untyped_storage().nbytes() for tensor in gradients]
                    run.gradients_left_bytes = sum(map(call.rounded, sizes))
                    left.state = _state_of(call)
            if counting is not None:
                run.work = counting.work
        run.ms = clock.ms()
        return run

    def _forward(
        self,
        name: str,
        run: _Run,
        clock: _Clock,
        input_gradients: list[Tensor | None],
        tolerance: Callable[[Tensor], float] | None,
    ) -> Tensor | None:
        """Run the forward, drop its output and return what to run backward from."""
        call = self._call
        users = [_users(tensor) for tensor in call.neighbours]
        args, kwargs = _cut_off_arguments(call, input_gradients)
        mark_memory(name + _START)
        with clock:
            output = call.module.forward(*args, **kwargs)
        del args, kwargs
        mark_memory(name + _FORWARD)
        if tolerance is not None:
            if self._output is None:
                self._output = _values_of(output)
            run.refused = _differ("output", self._output, tree_leaves(output), tolerance)
        root = _root(name, run, output)
        run.outputs = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in storages_of(output).values())
        del output
        run.holds_outputs = tuple(not storage.expired() for storage in run.outputs)
        run.holds_neighbours = tuple(
            _users(tensor) > before for tensor, before in zip(call.neighbours, users, strict=True)
        )
        return root


class _Counting(TorchDispatchMode):
    """Adds up the work of all operations, those of the backward pass included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload):
            self.work += work_of(func, args, kwargs or {}, out)
        return out


class _Clock:
    """Adds up the time of what runs inside it; on the CPU, where times tell little, it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._on = is_timed(device)
        self._spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        if self._on:
            self._spans.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._spans[-1][0].record()

    def __exit__(self, *_: object) -> None:
        if self._on:
            self._spans[-1][1].record()

    def ms(self) -> float:
        if not self._spans:
            return 0.0
        self._spans[-1][1].synchronize()
        return sum(float(start.elapsed_time(end)) for start, end in self._spans)


@contextmanager
def _gradients_aside(leaves: list[Tensor]) -> Iterator[list[Tensor]]:
    """``leaves`` have no gradient inside; afterwards they have theirs again."""
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        yield leaves
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


@contextmanager
def _after_autocast(device: torch.device) -> Iterator[None]:
    """As if autocast had been left: the backward pass runs outside of it, and its copies of weights are gone."""
    levels = torch.autocast_increment_nesting() - 1
    for _ in range(levels + 1):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    kinds = {"cpu", device.type}
    enabled = {kind: torch.is_autocast_enabled(kind) for kind in kinds if torch.amp.is_autocast_available(kind)}
    try:
        for kind in enabled:
            torch.set_autocast_enabled(kind, False)
        yield
    finally:
        for kind, flag in enabled.items():
            torch.set_autocast_enabled(kind, flag)
        for _ in range(levels):
            torch.autocast_increment_nesting()


# ---------------------------------------------------------------------------------------------------------------------
# The two ends of a region that runs alone


class _Entrance(torch.autograd.Function):
    """Where the gradients of a region's inputs arrive."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrived: list[Tensor | None], *tensors: Tensor) -> Any:
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)
        return tensors[0].detach() if len(tensors) == 1 else tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.arrived.extend(gradients)
        return (None,) * (2 + len(gradients))


class _Gradients(torch.autograd.Function):
    """Where gradients for a region's outputs are made up."""

    @staticmethod
    def forward(ctx: Any, made: Callable[[list[Tensor]], None], *outputs: Tensor) -> Tensor:
        ctx.made = made
        ctx.layouts = [
            (tensor.shape, tensor.stride() if is_dense(tensor) else None, tensor.dtype, tensor.device)
            for tensor in outputs
        ]
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        gradients = [_made_up(*layout) for layout in ctx.layouts]
        ctx.made(gradients)
        return (None, *gradients)


def _made_up(shape: torch.Size, stride: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values between 0.5 and 1.5, the same for the same shape."""
    if stride is None:
        gradient = torch.empty(shape, dtype=dtype, device=device)
    else:
        gradient = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(0)
    (torch.view_as_real(gradient) if dtype.is_complex else gradient).uniform_(0.5, 1.5, generator=generator)
    return gradient


def _root(name: str, run: _Run, output: Any) -> Tensor | None:
    """What to run backward from; None if no output has a gradient."""
    outputs = [tensor for tensor in tree_leaves(output) if isinstance(tensor, Tensor) and tensor.requires_grad]
    outputs = list({id(tensor): tensor for tensor in outputs}.values())
    if not outputs:
        return None

    def made(gradients: list[Tensor]) -> None:
        largest = max(gradients, key=lambda gradient: gradient.nbytes)
        run.gradient_bytes = largest.nbytes
        mark_memory(name + _ARRIVED)
        run.watched.append(weakref.ref(largest.untyped_storage(), lambda _: mark_memory(name + _USED_UP)))

    root: Tensor = _Gradients.apply(made, *outputs)
    return root


def _cut_off_arguments(
    call: RegionCall, input_gradients: list[Tensor | None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments again, without the graph they come from; their gradients go to ``input_gradients``."""
    leaves, spec = tree_flatten((call.args, call.kwargs))
    new: dict[int, Any] = {}
    entering: list[Tensor] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
            new[id(leaf)] = leaf
        elif is_plain(leaf) and leaf.requires_grad:
            if id(leaf) not in new:
                entering.append(leaf)
            new[id(leaf)] = None
        else:
            new[id(leaf)] = _own(call, leaf).requires_grad_(leaf.requires_grad)
    if entering:
        anchor = torch.empty(0, requires_grad=True)
        entered = _Entrance.apply(anchor, input_gradients, *(_own(call, tensor) for tensor in entering))
        given = (entered,) if isinstance(entered, Tensor) else entered
        new.update({id(leaf): tensor for leaf, tensor in zip(entering, given, strict=True)})
    args, kwargs = tree_unflatten([new[id(leaf)] for leaf in leaves], spec)
    return args, kwargs


def _own(call: RegionCall, tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if call.writes_input else tensor.detach()


def _cut_off_state(call: RegionCall) -> None:
    """State that an earlier call left with a graph gets leaves in its place: that graph is not ours to run."""
    stores = take_snapshot(call.module, objects=call.given, copy=False)._stores
    replace_graphs(stores, lambda state: state.detach().requires_grad_())


def _users(tensor: Tensor) -> int:
    """How many tensors share the memory of ``tensor``."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


def _state_of(call: RegionCall) -> list[Any]:
    leaves = [
        leaf
        for store in take_snapshot(call.module, objects=call.given, copy=False)._stores
        for _, value in store.entries()
        for leaf in tree_leaves(value)
        if isinstance(leaf, (Tensor, *_PLAIN)) and not isinstance(leaf, nn.Parameter)
    ]
    return _values_of(leaves)


def _values_of(values: Any) -> list[Any]:
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(values)]


def _difference(plain: _Left, other: _Left, tolerance: Callable[[Tensor], float]) -> str:
    """In words, what differs from the plain region; empty if nothing does."""
    if plain is other:
        return ""
    known = [leaf for leaf in plain.gradients if leaf in other.gradients]
    return (
        _differ("gradient of an input", plain.input_gradients, other.input_gradients, tolerance)
        or _differ(
            "gradient of a parameter",
            [plain.gradients[leaf] for leaf in known],
            [other.gradients[leaf] for leaf in known],
            tolerance,
        )
        or _differ("state", plain.state, other.state, tolerance)
        or ("" if plain.random == other.random else "draws other random numbers than the plain region")
    )


def _differ(what: str, plain: Sequence[Any], other: Sequence[Any], tolerance: Callable[[Tensor], float]) -> str:
    if len(plain) != len(other):
        return f"{what}: {len(other)} values where the plain region has {len(plain)}"
    for a, b in zip(plain, other, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"{what}: shape {tuple(b.shape)} where the plain region has {tuple(a.shape)}"
            error = _relative_error(a.detach(), b.detach())
            if not error <= tolerance(a):
                return f"{what}: differs from the plain region by {error:.2g} of its largest value"
        elif isinstance(a, Tensor) or isinstance(b, Tensor) or (isinstance(a, _PLAIN) and a != b and a == a):
            return f"{what}: {b!r} where the plain region has {a!r}"
    return ""


def _relative_error(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest value of ``a``; 0 for equal bits."""
    if a.layout is not torch.strided or is_fake(a) or torch.equal(a, b):
        return 0.0
    if a.dtype == torch.bool or a.numel() == 0:
        return 1.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    worst = largest = 0.0
    for x, y in zip(a.reshape(-1).split(_PIECE_NUMEL), b.reshape(-1).split(_PIECE_NUMEL), strict=True):
        x, y = x.to(wide), y.to(wide)
        same = (x == y) | (x.isnan() & y.isnan())
        worst = max(worst, float((x - y).abs().masked_fill(same, 0.0).max()))
        largest = max(largest, float(x.abs().nan_to_num(0.0).max()))
    return worst / largest if largest > 0 else (0.0 if worst == 0 else float("inf"))


def _distance(a: _Left, b: _Left) -> float:
    """How far two runs of the same treatment are apart."""
    pairs = [
        *zip(a.input_gradients, b.input_gradients, strict=True),
        *((a.gradients[leaf], b.gradients[leaf]) for leaf in a.gradients if leaf in b.gradients),
        *zip(a.state, b.state, strict=True),
    ]
    errors = [_relative_error(x, y) for x, y in pairs if isinstance(x, Tensor) and isinstance(y, Tensor)]
    return max(errors, default=0.0)
