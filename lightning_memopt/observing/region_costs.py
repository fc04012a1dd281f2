"""
What every region costs under every treatment, from one forward pass
====================================================================

One forward pass with a graph, in which no tensor that autograd saves is kept: what is saved is noted by name (which
storage, how large, by which region) and dropped, so that the pass needs hardly more memory than one without a graph,
and a model that only fits once it is checkpointed can be observed. Such a graph cannot run backward, but it still tells
the gradients that will be in flight (``gradient_flow.py``). What runs backward is one region at a time, alone, when its
call in the pass has just ended: under every treatment, once for all regions that do the same operations on the same
shapes (``experiments.py``).

Names of tensors
----------------
Every storage that the pass creates gets a number that is never used again, and is followed until it dies. So it is
known what is alive when a region starts (its inputs, skip connections), and which tensors two regions share. What was
alive before the pass (parameters, buffers, the batch) has no number: it is there anyway. Storages that outlive the pass
(neuron states, the loss) count as held by the region that made them, whatever its treatment.

Regions inside regions
----------------------
The modules inside a region are regions, too, where each of them is called once in a call of the module around it, down
to those that save less than a hundredth of what the outermost one saves. A stretch of code between regions, inside or
outside of others, is an entry of its own whose only choice is to be kept: its tensors, its temporary ones and its
gradients then stand at their place in the step. Its path is no module's: it is in parentheses.

Regions one after another
-------------------------
Layers that a ``forward`` calls one on the output of the other are also tried together, see ``series.py``.

Copies of weights that autocast makes live until the end of the forward, in its cache, and as long as somebody saved
them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_memopt.checkpointing import BitSpikeCompressor
from lightning_memopt.checkpointing.chunks import refuse_norms
from lightning_memopt.measuring import measure_memory, measuring_repeatedly
from lightning_memopt.measuring.allocation_events import storages_alive
from lightning_memopt.measuring.storage_trace import StorageTrace, allocated_bytes, fake_mode, is_timed
from lightning_memopt.observing.costs import Choice, ChoiceCost, RegionCosts, StepCosts
from lightning_memopt.observing.experiments import Moment, RegionCall, Result, storages_of, try_choices
from lightning_memopt.observing.gradient_flow import GradientFlow, edges_out, sequence_number
from lightning_memopt.observing.model_state import ModelState
from lightning_memopt.observing.no_memory import without_modes
from lightning_memopt.observing.observe import (
    ArgName,
    RegionObservation,
    Watch,
    Work,
    storage_address,
    tensors_in,
    uncompiled,
)
from lightning_memopt.observing.regions import Region, as_region, is_neuron, names_of_modules
from lightning_memopt.observing.series import Series
from lightning_memopt.observing.treatable import treated_before, trouble_with, worth_packing
from lightning_memopt.observing.trial import loss_of, old_gradient_bytes
from lightning_memopt.ops.value_bounds import bounds_of, is_fake

KEEP = Choice()
_CHEAP = Choice("recompute_cheap")
CHOICES = (
    KEEP,
    Choice("pack"),
    _CHEAP,
    Choice("recompute"),
    Choice("recompute", compressor="bit"),
    *(Choice("recompute", compressor=compressor, chunks=k) for k in (2, 4, 6, 8) for compressor in (None, "bit")),
    *(Choice("recompute", compressor, chunks=k, cheap_chunks=1) for k in (4, 8) for compressor in (None, "bit")),
)
"""The treatments that are tried unless others are asked for."""

# A region inside another that saves less than this share of what the outermost one saves is not worth a treatment.
_WORTH = 0.01
# Modules of a series at most: each more of them is tried with all before it.
_LONGEST_SERIES = 8
_LAYERS_WITH_CHILDREN = (nn.MultiheadAttention,)
# Values looked at before the whole tensor is.
_SAMPLE = 256
# Bytes held beside saved tensors count from this share on.
_UNNOTICED = 0.001
# A backward pass takes about twice the work of the forward.
_PASSES = 3


@dataclass(frozen=True)
class ObservedStep:
    """What one pass showed. Plain data, so that ranks can exchange it."""

    costs: StepCosts
    observations: Mapping[str, RegionObservation]
    """By path, of all regions and those inside them: what they were given. Says how a choice is applied."""
    flops: int
    """Floating point operations of the forward pass."""
    experiments: int
    """Regions that were run alone; all others do the same as one of them."""
    passes: int = 1
    """Forward passes that it took."""


def observe_step(
    model: nn.Module,
    regions: Sequence[Region],
    example_forward: Callable[[nn.Module], object],
    state: ModelState,
    *,
    choices: Sequence[Choice] = CHOICES,
    device: torch.device,
    optimizer_peak_bytes: int = 0,
    parts: Sequence[Region] | None = None,
    may_chunk: Callable[[str, nn.Module], bool] | None = None,
    gradients_in_forward: bool = False,
) -> ObservedStep:
    """What each region costs under each of ``choices``, and what was seen beside that.

    A forward that takes gradients itself (a gradient penalty) needs what it saves and is run again with all of it kept.

    Args:
        model: any module; everything but what autograd needs of it stays unchanged.
        regions: as :func:`find_targets` finds them. What is inside them is found here, unless ``parts`` is given.
        example_forward: runs one training forward of the model that it is given, and returns a loss or an output.
        state: of ``model``, gradients set aside; it is rewound afterwards.
        choices: treatments to try; ``keep`` is always among the results, as the first.
        device: where bytes count.
        optimizer_peak_bytes: most bytes that the optimizer step takes above parameters, gradients and its own state.
        parts: the only regions inside ``regions``, at any depth; all choices are tried on them, however small they are.
        may_chunk: says of a path and its module whether it may be cut along time. None: whatever gives the same in
            pieces.
        gradients_in_forward: whether the gradients of the step before are alive in the forward pass.

    Raises:
        NoGradientError: ``example_forward`` returned nothing with a gradient.

    Example:
        >>> from lightning_memopt.observing.regions import find_targets
        >>> from lightning_memopt.observing.model_state import unchanged
        >>> model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3)))
        >>> regions = find_targets(model).regions
        >>> with unchanged(model) as state:
        ...     step = observe_step(
        ...         model, regions, lambda model: model(torch.rand(5, 3, 8)), state, device=torch.device("cpu")
        ...     )
        >>> [region.path for region in step.costs.regions]
        ['(before 0)', '0', '1', '2', '(after 2)']
    """
    tried = (KEEP, *(choice for choice in choices if choice != KEEP))
    with measuring_repeatedly(device), uncompiled():
        for passes, keeps_saved in ((1, False), (2, True)):
            watch = _CostWatch(
                model, regions, state, tried, device, parts=parts, may_chunk=may_chunk, keeps_saved=keeps_saved
            )
            try:
                step = watch.observe(example_forward, optimizer_peak_bytes, passes)
                old = old_gradient_bytes(model, device) if gradients_in_forward else 0
                return replace(step, costs=replace(step.costs, old_gradient_bytes=old))
            except _Dropped:
                if keeps_saved:
                    raise
            finally:
                watch.close()
                state.rewind()
    raise AssertionError("the second pass keeps all that is saved")


def treatment_arguments(
    path: str, choice: Choice, seen: RegionObservation, packed: Sequence[ArgName] | None = None
) -> dict[str, Any]:
    """The arguments that :func:`checkpoint_module` takes to treat a region as ``choice`` says; none for ``keep``.

    Args:
        path: of the region.
        choice: a choice that was not refused.
        seen: what the region was given.
        packed: names of the inputs that a compressor may pack. None: those that are worth it.
    """
    if choice.treatment == "keep":
        return {}
    if choice.treatment != "recompute":
        return {"treatment": choice.treatment, "name": path}
    arguments: dict[str, Any] = {"chunks": choice.chunks, "cheap_chunks": choice.cheap_chunks, "name": path}
    if choice.compressor is not None:
        arguments["compressor"] = BitSpikeCompressor()
        arguments["compressed_args"] = worth_packing(seen) if packed is None else tuple(packed)
    if choice.chunks > 1:
        # That pieces give what the whole gives was proved when the region was observed.
        arguments |= {"chunked_args": _along_time(seen), "time_dim": 0, "check_chunks": False}
    return arguments


# ---------------------------------------------------------------------------------------------------------------------
# The pass


class _Dropped(RuntimeError):
    """A backward pass inside the observed forward asked for a saved tensor that was not kept."""


class _Saved:
    """Stands in the graph for a tensor that autograd saved."""

    __slots__ = ("__weakref__", "storage", "tensor")

    def __init__(self, storage: int, tensor: Tensor | None) -> None:
        self.storage = storage
        self.tensor = tensor


@dataclass(eq=False)
class _Span:
    """Some code of the forward pass, from one moment to another."""

    first_sequence: int
    first_storage: int
    """Numbers of autograd's next node, and of the next storage, when it begins."""
    in_flight: dict[int, int]
    """Bytes by storage alive when it begins."""
    last_sequence: int = 0
    last_storage: int = 0
    saved: list[weakref.ref[_Saved]] = field(default_factory=list)
    work: Work = field(default_factory=Work)

    def created(self, storage: int) -> bool:
        """Whether the storage was made in here."""
        return self.first_storage <= storage < self.last_storage

    settled: tuple[int, ...] | None = None

    def still_saved(self) -> tuple[int, ...]:
        """The storages that the graph keeps for the nodes made in here, in order."""
        if self.settled is not None:
            return self.settled
        alive = (reference() for reference in self.saved)
        return tuple(dict.fromkeys(saved.storage for saved in alive if saved is not None))

    def settle(self) -> None:
        """Remember what the graph keeps now."""
        self.settled = self.still_saved()


@dataclass(eq=False)
class _Stretch(_Span):
    """Code between the calls of regions; what it saves is kept until it ends."""

    start_bytes: int = 0
    peak_bytes: int = 0
    """Bytes alive when it begins, and the most until it ends."""
    kept: list[_Saved] = field(default_factory=list)
    backward_peak_bytes: int = 0
    """If its backward was run: the most bytes alive meanwhile, above those before it."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing ran in it."""
        return (self.first_sequence, self.first_storage) == (self.last_sequence, self.last_storage) and not self.saved


@dataclass(eq=False)
class _Call(_Span):
    """One call of a region."""

    index: int = -1
    region: Region | None = None
    body: list[_Span] = field(default_factory=list)
    opens: bool = True
    """Whether it may be treated piece by piece: no module inside was called twice."""
    before: Moment | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    trace: int = 0
    """Hash over its operations."""
    saves: list[tuple[int, int]] = field(default_factory=list)
    """Of every saved tensor the storage, and the fewest bits that hold its elements (0: more than 8)."""
    neighbours: tuple[int, ...] = ()
    """Storages of its inputs, in the order in which the experiments name them."""
    outputs: tuple[int | None, ...] = ()
    """Storages of its outputs in that order; None for those that were there before the pass."""
    results: tuple[Result, ...] = ()
    reasons: dict[Choice, str] = field(default_factory=dict)
    """Why choices were not tried."""
    joins: tuple[_Call, ...] = ()
    """Of a series: the call, or the series, that it begins with, and the call that was given its output."""
    copies: dict[int, Tensor] | None = None
    """By storage, what stands for its inputs, which may be gone."""
    series: list[_Call] = field(default_factory=list)
    """Of calls of its body that follow each other; none of them is part of another."""
    latest: tuple[_Call, weakref.ref[Tensor]] | None = None
    """The call or series of its body that the next call may carry on, and what it returned."""
    carries_on: _Call | None = None
    """What it was given the output of, nothing else, and right after."""

    def let_go(self) -> None:
        """Keep nothing that it would take to run it again."""
        self.before, self.args, self.kwargs, self.copies = None, (), {}, None

    @property
    def path(self) -> str:
        return "" if self.region is None else self.region.path

    @property
    def members(self) -> tuple[_Call, ...]:
        """The calls of a series, in order; of any other call itself alone."""
        return tuple(member for call in self.joins for member in call.members) or (self,)

    @property
    def parts(self) -> list[_Span]:
        """Its body, with series in place of the calls that they join."""
        if self.joins:
            return [*self.joins]
        starts = {series.members[0]: series for series in self.series}
        parts: list[_Span] = []
        last: _Span | None = None
        for span in self.body:
            series = starts.get(span) if isinstance(span, _Call) else None
            if last is None:
                parts.append(span if series is None else series)
                last = None if series is None else series.members[-1]
            elif span is last:
                last = None
        return parts


class _CostWatch(Watch):
    """Sees one forward pass: who saves what, what is alive when, and what a region does under each treatment."""

    def __init__(
        self,
        model: nn.Module,
        regions: Sequence[Region],
        state: ModelState,
        choices: Sequence[Choice],
        device: torch.device,
        *,
        parts: Sequence[Region] | None,
        may_chunk: Callable[[str, nn.Module], bool] | None,
        keeps_saved: bool,
    ) -> None:
        self._all = (*regions, *(_regions_inside(model, regions) if parts is None else parts))
        self.worth = _WORTH if parts is None else 0.0  # whatever is named is worth a look
        self._may_chunk = may_chunk
        super().__init__(model, self._all, state.protect)
        self._model = model
        self._outermost = len(regions)
        self._state = state
        self._choices = choices
        self._device = device
        self._keeps_saved = keeps_saved
        self._treated = treated_before(model)
        # Storages by number, and numbers by address.
        self._numbers: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._bits: dict[int, int] = {}
        self._elements: dict[int, int] = {}
        self._ends: dict[tuple[int, int], weakref.ref[Any]] = {}
        self._alive: dict[int, int] = {}
        self._alive_bytes = 0
        self._casts: dict[tuple[int, torch.dtype], int] = {}
        self._next = 0
        self._known: dict[Any, tuple[tuple[Result, ...], dict[Choice, str]]] = {}
        self._root = _Call(0, 0, {})
        self._calls = [self._root]
        self._stretch: _Stretch | None = None

    # -- The pass as a whole ------------------------------------------------------------------------------------------

    def observe(
        self, example_forward: Callable[[nn.Module], object], optimizer_peak_bytes: int, passes: int
    ) -> ObservedStep:
        """Run the pass."""
        gc.collect()
        base = _bytes_alive(self._device) - self._state.set_aside_bytes(self._device)
        with ExitStack() as stack:
            self.attach(stack)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, self._give_back))
            stack.enter_context(self)
            self._begin_stretch()
            output = example_forward(self._model)
            loss = loss_of(output)
            last, kept = self._stretch, [] if self._stretch is None else [*self._stretch.kept]
            self._end_stretch(drop=False)
        self._root.last_sequence, self._root.last_storage = sequence_number(), self._next
        flow = GradientFlow(loss, self._rounded)
        for span in _spans(self._root):
            span.settle()
            for series in span.series if isinstance(span, _Call) else ():
                for joined in _series_in(series):
                    joined.settle()
        if last is not None:
            last.backward_peak_bytes = self._run_backward(loss, last.first_sequence)
        for saved in kept:
            saved.tensor = None
        del kept
        gc.collect()  # a tensor that only a reference cycle holds is not held
        self.note_standing()
        observations = {seen.path: seen for seen in self.observations()}
        costs = _Accounts(self, flow, observations).step(base, optimizer_peak_bytes, loss.nbytes)
        return ObservedStep(costs, observations, self.flops, len(self._known), passes)

    def _run_backward(self, loss: Tensor, first_sequence: int) -> int:
        """Run the last part of the graph backward; returns the most bytes alive meanwhile, above those before it.

        What it saved was kept. Losses have large temporary tensors that no graph shows.
        """
        edges = [GradientEdge(node, number) for node, number in edges_out(loss, first_sequence)]
        if not edges:
            return 0

        def run() -> None:
            torch.autograd.grad(loss, edges, allow_unused=True)

        try:
            report = measure_memory(run, device=self._device)
        except Exception as error:  # the user's own function may want more than is left of the graph
            error.__traceback__ = None
            return 0
        return report.peak_bytes - report.start_bytes

    def close(self) -> None:
        """Let go of all that was seen."""
        self._ends.clear()
        self._root.body.clear()
        self._root.series.clear()
        self._stretch = None

    # -- Storages -----------------------------------------------------------------------------------------------------

    def _rounded(self, size: int) -> int:
        return allocated_bytes(size, self._device)

    def new_number(self, size: int) -> int:
        """A number for something of ``size`` bytes that is no storage of the pass."""
        number, self._next = self._next, self._next + 1
        self._sizes[number] = size
        return number

    def size(self, storage: int) -> int:
        """Its bytes."""
        return self._sizes[storage]

    def bits(self, storage: int) -> int:
        """The fewest bits that hold each of its elements, 0 if more than 8 or if nobody saved it."""
        return self._bits.get(storage, 0)

    def packed_size(self, storage: int) -> int:
        """Bytes of a packed copy of it."""
        return self._rounded(-(-self._elements[storage] * self._bits[storage] // 8))

    @property
    def unit(self) -> Literal["ms", "bytes moved"]:
        """What time is measured in."""
        return "ms" if is_timed(self._device) else "bytes moved"

    def standing(self) -> set[int]:
        """The storages that are alive now, without copies of weights."""
        return self._alive.keys() - set(self._casts.values())

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of a storage that the pass created."""
        return self._numbers.get(storage_address(tensor))

    def _register(self, tensor: Tensor, address: int, weight: Tensor | None) -> None:
        key = None if weight is None else (id(weight), tensor.dtype)
        number = None if key is None else self._casts.get(key)
        if number is None:
            storage = tensor.untyped_storage()
            number = self.new_number(self._rounded(storage.nbytes()))
            if key is not None:
                self._casts[key] = number
            self._alive[number] = self._sizes[number]
            self._alive_bytes += self._sizes[number]
        self._numbers[address] = number

        def end(_: object) -> None:
            # The address may be given to another storage from now on.
            if self._numbers.get(address) == number:
                del self._numbers[address]
            # Autocast's cache keeps a copy of a weight until the forward ends; here it may have been cleared before.
            if key is None and number in self._alive:
                self._alive_bytes -= self._alive.pop(number)

        self._ends[number, address] = weakref.ref(tensor.untyped_storage(), end)

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, work: Work) -> None:
        """Follow the storages that an operation creates."""
        given = {storage_address(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(out):
            address = storage_address(tensor)
            if address not in given and address not in self._numbers and tensor.device == self._device:
                self._register(tensor, address, _cast_weight(func, args, tensor))
        what = hash((func, _described(args), _described(tuple(kwargs.items()))))
        for call in self._calls:
            call.trace = hash((call.trace, what))
            call.work += work
        if self._stretch is not None:
            self._stretch.work += work
            self._stretch.peak_bytes = max(self._stretch.peak_bytes, self._alive_bytes)

    def _save(self, tensor: Tensor) -> Any:
        if self._looking or tensor.layout is not torch.strided:
            return tensor
        number = self.number_of(tensor)
        if number is None:  # parameters, the batch
            return tensor
        if number not in self._bits:
            with self._looking_at(), torch.no_grad():
                self._bits[number] = fewest_bits(tensor.detach())
                self._elements[number] = tensor.numel()
        assert self._stretch is not None
        saved = _Saved(number, tensor)
        self._stretch.kept.append(saved)
        reference = weakref.ref(saved)
        self._stretch.saved.append(reference)
        for call in self._calls:
            call.saved.append(reference)
            call.saves.append((number, self._bits[number]))
        return saved

    @staticmethod
    def _give_back(saved: Any) -> Tensor:
        tensor: Tensor | None = saved.tensor if isinstance(saved, _Saved) else saved
        if tensor is None:
            raise _Dropped("A backward pass ran inside the observed forward; what it needs was not kept.")
        return tensor

    # -- Calls and stretches ------------------------------------------------------------------------------------------

    def _begin_stretch(self) -> None:
        self._stretch = _Stretch(
            sequence_number(),
            self._next,
            dict(self._alive),
            start_bytes=self._alive_bytes,
            peak_bytes=self._alive_bytes,
        )
        self._calls[-1].body.append(self._stretch)

    def _end_stretch(self, *, drop: bool = True) -> None:
        stretch = self._stretch
        if stretch is None:
            return
        stretch.last_sequence, stretch.last_storage = sequence_number(), self._next
        if drop and not self._keeps_saved:
            for saved in stretch.kept:
                saved.tensor = None
        stretch.kept.clear()
        self._stretch = None

    def entering(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open the books of a call."""
        self._end_stretch()
        around = self._calls[-1]
        again = any(isinstance(call, _Call) and call.index == index for call in around.body)
        if again and around.region is not None and self.worth:
            around.opens = False
        carries_on = _carried_on(around, args, kwargs)
        call = _Call(sequence_number(), self._next, dict(self._alive), index=index, region=self._all[index])
        if torch.is_grad_enabled() and all(outer.opens for outer in self._calls):
            with without_modes():
                call.before = Moment.now(self._all[index].module, (args, kwargs), self._device)
            call.args, call.kwargs, call.carries_on = args, kwargs, carries_on
        around.body.append(call)
        self._calls.append(call)
        self._begin_stretch()

    def left(self, index: int, output: object) -> None:
        """Close the books of a call and try its treatments."""
        self._end_stretch()
        while True:
            call = self._calls.pop()
            call.last_sequence, call.last_storage = sequence_number(), self._next
            if call.index == index:
                break
            call.let_go()
        outputs = storages_of(output).values()
        call.outputs = tuple(self.number_of(tensor) for tensor in outputs)
        if call.before is not None:
            with without_modes():
                if self._is_worth(call):
                    self._try(call, output)
                self._join(call, output)
        self._begin_stretch()

    def _join(self, call: _Call, output: Any) -> None:
        """Try a call together with what it carries on, and make ready for a next one that carries it on."""
        around, first = self._calls[-1], call.carries_on
        performs_products = call.work.flops > 0
        if first is not None:
            last, call = call, self._joined(first, call)
            if self._is_worth(call):
                self._try(call, output)
            around.series = [*(series for series in around.series if series is not first), call]
            first.let_go()
            last.let_go()
        if performs_products or len(call.members) == _LONGEST_SERIES or not isinstance(output, Tensor):
            call.let_go()
        elif self.worth and _CHEAP in self._choices:
            if not call.joins:
                self._copy_inputs(call)
            around.latest = call, weakref.ref(output)

    def _copy_inputs(self, call: _Call) -> None:
        """Let go of the inputs of a call, which would live on with it, but keep their values."""
        leaves, spec = tree_flatten((call.args, call.kwargs))
        call.copies = {}
        with torch.no_grad():
            for place, leaf in enumerate(leaves):
                number = self.number_of(leaf) if isinstance(leaf, Tensor) else None
                if number is not None:
                    leaves[place] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
                    call.copies.setdefault(number, leaves[place])
        call.args, call.kwargs = tree_unflatten(leaves, spec)

    @staticmethod
    def _joined(first: _Call, second: _Call) -> _Call:
        assert first.before is not None
        assert second.before is not None
        modules = [
            member.region.module for call in (first, second) for member in call.members if member.region is not None
        ]
        path = f"({first.members[0].path} ... {second.path})"
        return _Call(
            first_sequence=first.first_sequence,
            first_storage=first.first_storage,
            in_flight=first.in_flight,
            last_sequence=second.last_sequence,
            last_storage=second.last_storage,
            saved=first.saved + second.saved,
            work=first.work + second.work,
            region=Region(path, Series(modules), outside=True),
            body=[first, second],
            before=first.before.followed_by(second.before),
            args=first.args,
            kwargs=first.kwargs,
            trace=hash((first.trace, second.trace)),
            saves=first.saves + second.saves,
            outputs=second.outputs,
            joins=(first, second),
            copies=first.copies,
        )

    def seen_of(self, call: _Call) -> RegionObservation:
        """What was seen of its module so far; of a series by and large what was seen of the first."""
        seen = [self.observation(member.index) for member in call.members]
        if len(seen) == 1:
            return seen[0]
        return replace(
            seen[0],
            path=call.path,
            calls=max(each.calls for each in seen),
            flops=sum(each.flops for each in seen),
            moved_bytes=sum(each.moved_bytes for each in seen),
            input_overwritten=any(each.input_overwritten for each in seen),
        )

    def _is_worth(self, call: _Call) -> bool:
        if call.joins and len(self._calls) == 1:
            return bool(call.still_saved())
        if not call.joins and call.index < self._outermost:
            return call.region is None or not call.region.outside or bool(call.still_saved())
        if len(self._calls) == 1:  # the region around it is a generator and had returned before: nothing to treat
            return False
        outermost = self._calls[1]
        return self._bytes(call.still_saved()) >= self.worth * self._bytes(outermost.still_saved())

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(map(self._sizes.__getitem__, storages))

    def _try(self, call: _Call, output: Any) -> None:
        """Run the call again under each treatment, unless a call like it has been tried."""
        assert call.region is not None
        assert call.before is not None
        neighbours = call.copies
        if neighbours is None:
            given = {self.number_of(tensor): tensor for tensor in storages_of((call.args, call.kwargs)).values()}
            neighbours = {number: tensor for number, tensor in given.items() if number is not None}
        call.neighbours = tuple(neighbours)
        seen = self.seen_of(call)
        tried, reasons = self._plan(call, seen)
        signature = self._signature(call, tried, reasons)
        if signature not in self._known:
            own = set(map(id, call.region.module.parameters()))
            made = RegionCall(
                module=call.region.module,
                args=call.args,
                kwargs=call.kwargs,
                output=output,
                before=call.before,
                neighbours=tuple(neighbours.values()),
                written=tuple(parameter for parameter in self._state.written if id(parameter) in own),
                device=self._device,
                rounded=self._rounded,
                writes_input=seen.writes_input,
                treated=tuple(m.region.module for m in call.members if m.region is not None) if call.joins else (),
            )
            self._known[signature] = (try_choices(made, tried), reasons)
        call.results, call.reasons = self._known[signature]

    def _plan(self, call: _Call, seen: RegionObservation) -> tuple[dict[Choice, Mapping[str, Any]], dict[Choice, str]]:
        """For each choice the arguments to try it with, or why it need not be tried."""
        assert call.region is not None
        given: dict[ArgName, Any] = dict([*enumerate(call.args), *call.kwargs.items()])
        packed = tuple(
            name
            for name in worth_packing(seen)
            if any(self.number_of(tensor) is not None for tensor in tensors_in(given.get(name)))
        )
        tried: dict[Choice, Mapping[str, Any]] = {}
        reasons: dict[Choice, str] = {}
        steps = _time_steps(seen)
        choices = (KEEP, _CHEAP) if call.joins else self._choices
        fitting = (replace(choice, chunks=min(choice.chunks, max(steps, 2))) for choice in choices)
        for choice in dict.fromkeys(fitting):
            reason = self._reason(call, choice, seen, packed)
            if reason:
                reasons[choice] = reason
            else:
                tried[choice] = treatment_arguments(call.path, choice, seen, packed)
        return tried, reasons

    def _reason(self, call: _Call, choice: Choice, seen: RegionObservation, packed: Sequence[ArgName]) -> str:
        """Why ``choice`` is out of the question, empty if it is not."""
        assert call.region is not None
        if choice.treatment == "keep":
            return ""
        for member in call.members:
            assert member.region is not None
            own = self.observation(member.index)
            # What one of a series returned, the next one may change.
            harmless = choice.treatment == "pack" or member is not call.members[0]
            trouble = trouble_with(member.region, replace(own, writes_input=False) if harmless else own, self._treated)
            if trouble:
                return trouble
        saved = call.still_saved()
        if not saved and self.worth:
            return "saves nothing"
        if choice.treatment == "pack":
            return "" if any(map(self.bits, saved)) else "saves nothing that fits into fewer bits"
        freed = [storage for storage in saved if call.created(storage) and storage not in call.outputs]
        if self._bytes(freed) < self.worth * self._bytes(saved):
            return "saves little but its inputs and outputs, which running it again would not free"
        if choice.treatment == "recompute_cheap":
            return ""
        if choice.compressor is not None and not packed:
            return "is given no binary tensor to pack"
        if choice.chunks > 1:
            reason = _reason_not_to_cut(call.region, seen)
            if not reason and self._may_chunk is not None and not self._may_chunk(call.path, call.region.module):
                return "may not be cut along time"
            if not reason and choice.compressor is None and packed:
                return "time chunks of binary inputs are tried packed"
            if not reason and choice.cheap_chunks and not seen.flops:
                return "performs no product that could be kept"
            return reason
        return ""

    def _signature(self, call: _Call, tried: Mapping[Choice, object], reasons: Mapping[Choice, str]) -> Any:
        """Calls that agree in this cost the same."""
        assert call.region is not None
        module = call.region.module
        places = {storage: place for place, storage in enumerate(call.neighbours)}
        saves = tuple(
            (storage - call.first_storage if call.created(storage) else -1 - places.get(storage, len(places)), bits)
            for storage, bits in call.saves
        )
        return (
            tuple(type(member.region.module) for member in call.members if member.region is not None),
            tuple((parameter.shape, parameter.dtype, parameter.requires_grad) for parameter in module.parameters()),
            tuple(inner.training for inner in module.modules()),
            _described((call.args, tuple(call.kwargs.items()))),
            call.trace,
            saves,
            tuple(tried),
            tuple(reasons.items()),
            torch.is_autocast_enabled(self._device.type),
        )

    @property
    def root(self) -> _Call:
        """The whole pass as one call."""
        return self._root


def _carried_on(around: _Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call | None:
    """The call that has just ended in ``around``, if a new one is given what it returned and nothing else."""
    if around.latest is None:
        return None
    (call, output), around.latest = around.latest, None
    *_, ended, between = around.body
    right_after = ended is call.members[-1] and isinstance(between, _Stretch) and between.is_empty
    if right_after and len(args) == 1 and not kwargs and args[0] is output():
        return call
    call.let_go()
    return None


def _series_in(call: _Call) -> Iterator[_Call]:
    """A series, and those that it began as."""
    if call.joins:
        yield call
        yield from _series_in(call.joins[0])


def _bytes_alive(device: torch.device) -> int:
    if fake_mode() is not None:
        return StorageTrace(device).start_bytes
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return sum(storage.nbytes() for storage in storages_alive(device))


def _regions_inside(model: nn.Module, regions: Sequence[Region]) -> list[Region]:
    """The modules inside ``regions`` that might be regions themselves, each once."""
    names = names_of_modules(model)
    found: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        if is_neuron(module) or isinstance(module, (torch.jit.ScriptModule, *_LAYERS_WITH_CHILDREN)):
            return
        for child in module.children():
            if id(child) not in found and not isinstance(child, torch.jit.ScriptModule):
                found[id(child)] = child
                visit(child)

    for region in regions:
        visit(region.module)
    outermost = {id(region.module) for region in regions}
    return [as_region(module, names) for key, module in found.items() if key not in outermost and key in names]


def _time_steps(seen: RegionObservation) -> int:
    """Size of the first dimension of the first input that can be cut there; 0 if there is none."""
    return next((item.steps for item in seen.inputs if item.steps > 1), 0)


def _along_time(seen: RegionObservation) -> tuple[ArgName, ...]:
    """The inputs that are cut: those with as many steps. All others are given to each piece as they are."""
    return tuple(item.name for item in seen.inputs if item.steps == _time_steps(seen))


def _reason_not_to_cut(region: Region, seen: RegionObservation) -> str:
    if not _time_steps(seen):
        return "no input has a first dimension to cut"
    try:
        refuse_norms(region.module, type(region.module).__name__)
    except ValueError as error:
        return str(error)
    return ""


def _cast_weight(func: Any, args: tuple[Any, ...], copy: Tensor) -> Tensor | None:
    """The weight of which autocast made ``copy`` and keeps it in its cache."""
    if func is not torch.ops.aten._to_copy.default or not torch.is_autocast_cache_enabled():
        return None
    weight: Tensor = args[0]
    if not (weight.is_leaf and weight.requires_grad and torch.is_autocast_enabled(weight.device.type)):
        return None
    return weight if copy.dtype == torch.get_autocast_dtype(weight.device.type) else None


def _described(value: Any) -> Any:
    """Something to hash: shapes in place of tensors."""
    if isinstance(value, Tensor):
        layout = value.stride() if value.layout is torch.strided else None
        return (value.shape, layout, value.dtype, value.requires_grad)
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((key, _described(item)) for key, item in value.items())
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout)):
        return (type(value), value)
    return type(value)


def fewest_bits(tensor: Tensor) -> int:
    """The fewest bits of 1, 2, 4 and 8 that hold each element; 0 if no such number does.

    Elements are integers from 0 on, or zeros and one other value, which take 1 bit.

    Example:
        >>> [fewest_bits(torch.tensor(values)) for values in ([0.0, 3.0, 2.0], [0.0, 1.25], [0.5, 1.25])]
        [2, 1, 0]
    """
    if is_fake(tensor):
        known = bounds_of(tensor)
        return 0 if known is None else known.bits
    if tensor.dtype == torch.bool:
        return 1
    if tensor.is_complex() or tensor.numel() == 0 or tensor.is_meta or tensor.element_size() > 4:
        return 0
    pieces = tensor.flatten()[:_SAMPLE], tensor
    for piece in pieces:
        largest = float(piece.max())
        integers = bool((piece >= 0).all()) and (not piece.is_floating_point() or bool((piece == piece.floor()).all()))
        if not (integers and largest < 256):
            two_valued = largest > 0 and bool(((piece == 0) | (piece == largest)).all())
            if not two_valued:
                return 0
            if piece is tensor:
                return 1
    return next(bits for bits in (1, 2, 4, 8) if largest < 2**bits)


# ---------------------------------------------------------------------------------------------------------------------
# The costs


class _Accounts:
    """Makes costs of what one pass showed."""

    def __init__(self, watch: _CostWatch, flow: GradientFlow, observations: Mapping[str, RegionObservation]) -> None:
        self._watch = watch
        self._flow = flow
        self._standing = watch.standing()
        self._packed: dict[tuple[int, int], int] = {}
        self._seen = observations

    def step(self, base_bytes: int, optimizer_peak_bytes: int, loss_bytes: int) -> StepCosts:
        """The costs of the whole pass."""
        root = self._watch.root
        regions = self._body(root, least_bytes=0)
        plain, plain_flops, unit = self._plain(root)
        return StepCosts(
            base_bytes=base_bytes,
            regions=regions,
            outside=({},) * (len(regions) + 1),
            end_peak_bytes=loss_bytes,
            outside_gradient_bytes=0,
            optimizer_peak_bytes=optimizer_peak_bytes,
            plain=plain,
            plain_flops=plain_flops,
            unit=unit,
        )

    def _body(self, call: _Call, least_bytes: int) -> tuple[RegionCosts, ...]:
        """The regions and stretches inside a call; what holds less than ``least_bytes`` is part of a stretch."""
        made: list[RegionCosts] = []
        stretch: list[_Span] = []
        before = ""

        def end_stretch(following: str) -> None:
            name = f"(before {following})" if following and not before else f"(after {before})"
            costs = self._stretch(stretch, name)
            if costs is not None:
                made.append(costs)
            stretch.clear()

        for span in self._parts(call):
            if isinstance(span, _Call) and self._is_worth(span, least_bytes, outermost=call is self._watch.root):
                end_stretch(span.members[0].path)
                made.append(self._region(span, least_bytes))
                before = span.members[-1].path
            else:
                stretch.append(span)
        end_stretch("")
        return tuple(made)

    def _parts(self, call: _Call) -> Iterator[_Span]:
        """The body of a call, with series in place of the calls in them where these can be treated together."""
        for span in call.parts:
            if isinstance(span, _Call) and span.joins and not self._pays(span):
                yield from self._parts(span)
            else:
                yield span

    def _pays(self, series: _Call) -> bool:
        """Whether a series can be treated as one."""
        if not any(result.choice == _CHEAP and not result.refused for result in series.results):
            return False
        seen = self._watch.seen_of(series)
        return seen.calls == 1 and not seen.input_overwritten

    def _is_worth(self, call: _Call, least_bytes: int, *, outermost: bool) -> bool:
        if outermost and not (call.region is not None and call.region.outside):
            return True
        return bool(call.results) and self._bytes(call.still_saved()) >= least_bytes

    def _region(self, call: _Call, least_bytes: int) -> RegionCosts:
        saved = self._bytes(call.still_saved())
        least_bytes = least_bytes or int(self._watch.worth * saved)
        children = self._body(call, least_bytes) if call.opens else ()
        if not any(len(child.choices) > 1 for child in children):
            children = ()
        return RegionCosts(
            path=call.path,
            choices=self._choices(call),
            in_flight=call.in_flight,
            in_flight_gradient_bytes=self._flow.in_flight(call.last_sequence),
            gradient_bytes=self._flow.parameters(call.first_sequence, call.last_sequence),
            children=children,
            glue={} if children else None,
            series=tuple(member.path for member in call.members) if call.joins else (),
        )

    def _seen_of(self, call: _Call) -> RegionObservation:
        return self._watch.seen_of(call) if call.joins else self._seen[call.path]

    def _left(self, span: _Span) -> int:
        """Bytes that stay after the backward of what was not run alone, beside gradients."""
        return self._bytes(storage for storage in self._standing if span.created(storage))

    def _left_under(self, call: _Call, result: Result) -> int:
        """The same under a treatment: what is not recomputed also leaves what hangs on the graph of a state.

        An output that the training loop holds was dropped where the region ran alone.
        """
        dropped = (
            storage
            for storage, left in zip(call.outputs, result.left_outputs, strict=True)
            if not left and storage in self._standing and call.created(storage)
        )
        return result.left_bytes + self._bytes(dropped)

    def _stretch(self, spans: list[_Span], name: str) -> RegionCosts | None:
        if not spans:
            return None
        first, last = spans[0], spans[-1]
        nodes = first.first_sequence, last.last_sequence
        stretches = [stretch for span in spans for stretch in _spans(span) if isinstance(stretch, _Stretch)]
        holds: dict[int, int] = {}
        for span in spans:
            holds |= self._kept(span)
        forward = max(stretch.peak_bytes for stretch in stretches) - stretches[0].start_bytes
        backward = max(self._flow.peak(*nodes), *(stretch.backward_peak_bytes for stretch in stretches))
        gradients = self._flow.parameters(*nodes)
        if not (holds or forward or backward or gradients):
            return None
        left = sum(map(self._left, spans))
        keep = ChoiceCost(Choice(), holds, forward, backward, extra=0.0, left_bytes=left)
        return RegionCosts(name, (keep,), first.in_flight, self._flow.in_flight(nodes[1]), gradients)

    def _kept(self, span: _Span) -> dict[int, int]:
        """What a piece of code that is left as it is holds until its backward."""
        standing = (storage for storage in self._standing if span.created(storage))
        return {storage: self._watch.size(storage) for storage in (*span.still_saved(), *standing)}

    def _choices(self, call: _Call) -> tuple[ChoiceCost, ...]:
        results = {result.choice: result for result in call.results}
        plain = results.get(KEEP)
        made = [self._keep(call, plain)]
        if plain is None or plain.refused:
            return tuple(made)
        seen = self._seen_of(call)
        for choice in (*results, *call.reasons):
            if choice == KEEP:
                continue
            reason = call.reasons.get(choice) or results[choice].refused
            if seen.input_overwritten and choice.treatment != "pack":
                reason = reason or "its input is changed in place after it ran"
            if reason:
                made.append(ChoiceCost(choice, {}, 0, 0, 0.0, refused=reason))
            else:
                made.append(self._treated(call, results[choice], plain))
        return tuple(made)

    def _keep(self, call: _Call, result: Result | None) -> ChoiceCost:
        holds = self._kept(call)
        if result is None or result.refused:
            # It could not be run alone: from what was seen in the pass.
            stretches = [span for span in _spans(call) if isinstance(span, _Stretch)]
            peak = max(stretch.peak_bytes for stretch in stretches) - stretches[0].start_bytes
            left = {storage for storage in (*holds, *call.outputs) if storage is not None}
            inside = self._bytes(storage for storage in left if call.created(storage))
            backward = self._flow.peak(call.first_sequence, call.last_sequence)
            return ChoiceCost(KEEP, holds, max(peak, inside), backward, extra=0.0, left_bytes=self._left(call))
        # Where it changes an input in place, it was run on copies of its inputs.
        copied = call.neighbours if self._seen_of(call).writes_input else ()
        known = sum(
            size
            for storage, size in holds.items()
            if storage in copied
            or (call.created(storage) and not (storage in self._standing and storage in call.outputs))
        )
        hidden = result.held_bytes - known
        if hidden > _UNNOTICED * result.held_bytes:
            # Held by the graph in another way than as a saved tensor.
            holds[self._watch.new_number(hidden)] = hidden
        return ChoiceCost(
            choice=KEEP,
            holds=holds,
            forward_peak_bytes=result.forward_peak_bytes,
            backward_peak_bytes=self._backward_peak(call, result),
            extra=0.0,
            left_bytes=self._left_under(call, result),
        )

    def _treated(self, call: _Call, result: Result, plain: Result) -> ChoiceCost:
        watch = self._watch
        holds: dict[int, int] = {}
        own = result.held_bytes
        for standing in self._standing:
            if call.created(standing):
                holds[standing] = watch.size(standing)
                own -= 0 if standing in call.outputs else watch.size(standing)
        boundary: list[tuple[int | None, bool, bool]] = [
            *zip(call.neighbours, result.holds_neighbours, plain.holds_neighbours, strict=True),
            *zip(call.outputs, result.holds_outputs, plain.holds_outputs, strict=True),
        ]
        for storage, held, held_plain in boundary:
            if storage is None:
                continue
            if held:
                holds[storage] = watch.size(storage)
                own -= watch.size(storage) if call.created(storage) else 0
            elif self._is_packed(call, result.choice, storage, held_plain=held_plain):
                number = self._packed_copy(storage)
                holds[number] = watch.size(number)
                own -= watch.size(number)
        if own > 0:
            holds[watch.new_number(own)] = own
        more_time = result.work.time_in_bytes - plain.work.time_in_bytes
        return ChoiceCost(
            choice=result.choice,
            holds=holds,
            forward_peak_bytes=result.forward_peak_bytes,
            backward_peak_bytes=self._backward_peak(call, result),
            extra=max(result.ms - plain.ms if watch.unit == "ms" else more_time, 0.0),
            extra_flops=max(result.work.flops - plain.work.flops, 0),
            left_bytes=self._left_under(call, result),
        )

    def _is_packed(self, call: _Call, choice: Choice, storage: int, *, held_plain: bool) -> bool:
        """Whether the choice holds a packed copy of ``storage``, which others may share."""
        bits = self._watch.bits(storage)
        if choice.treatment == "recompute":
            return choice.compressor is not None and choice.chunks == 1 and bits == 1 and not call.created(storage)
        return held_plain and bits > 0

    def _packed_copy(self, storage: int) -> int:
        bits = self._watch.bits(storage)
        key = (storage, bits)
        if key not in self._packed:
            self._packed[key] = self._watch.new_number(self._watch.packed_size(storage))
        return self._packed[key]

    def _backward_peak(self, call: _Call, result: Result) -> int:
        if self._flow.shared(call.first_sequence, call.last_sequence):
            return result.backward_peak_kept_bytes
        return result.backward_peak_bytes

    def _plain(self, root: _Call) -> tuple[float, int, Literal["ms", "bytes moved"]]:
        """Time and operations of a plain step."""
        work, ms, timed = Work(), 0.0, 0.0
        for span in root.body:
            plain = next((result for result in getattr(span, "results", ()) if result.choice == KEEP), None)
            if plain is None or plain.refused:
                work += Work(_PASSES * span.work.flops, _PASSES * span.work.moved_bytes)
            else:
                work += plain.work
                ms += plain.ms
                timed += plain.work.time_in_bytes
        if self._watch.unit == "ms":
            # Code outside regions was not timed: it is taken to be as fast as that inside.
            return ms * work.time_in_bytes / max(timed, 1.0), work.flops, "ms"
        return work.time_in_bytes, work.flops, "bytes moved"

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(map(self._watch.size, storages))


def _spans(span: _Span) -> Iterator[_Span]:
    """A piece of code and all pieces inside it, in order."""
    yield span
    if isinstance(span, _Call):
        for inner in span.body:
            yield from _spans(inner)
