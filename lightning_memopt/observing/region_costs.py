"""
What every region costs under every treatment, from one forward pass
====================================================================

One forward pass with a graph, in which no tensor that autograd saves is kept: what is saved is noted by name (which
storage, how large, by which region) and dropped, so that the pass needs hardly more memory than one without a graph,
and a model that only fits once it is checkpointed can be observed. Such a graph cannot run backward, but it still tells
the gradients that will be in flight (``gradient_flow.py``). What runs backward is one region at a time, alone, when its
call in the pass has just ended: under every treatment, once for all regions that do the same operations on the same
shapes (``experiments.py``).

Which tensors these are is told in ``storages.py``, what of the pass is remembered in ``calls.py``, and how costs follow
in ``accounts.py``.

Regions inside regions
----------------------
The modules inside a region are regions, too, where each of them is called once in a call of the module around it, down
to those that save less than a hundredth of what the outermost one saves. Layers that a ``forward`` calls one on the
output of the other are tried together as well (``series.py``).
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_memopt.checkpointing import BitSpikeCompressor
from lightning_memopt.checkpointing.chunks import refuse_norms
from lightning_memopt.measuring import measure_memory, measuring_repeatedly
from lightning_memopt.measuring.allocation_events import storages_alive
from lightning_memopt.measuring.storage_trace import StorageTrace, fake_mode, is_timed
from lightning_memopt.observing.accounts import Accounts
from lightning_memopt.observing.calls import Call, Saved, Stretch, all_spans, carried_on, joined
from lightning_memopt.observing.costs import CHEAP, KEEP, Choice, StepCosts
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
from lightning_memopt.observing.storages import Storages, cast_weight
from lightning_memopt.observing.treatable import treated_before, trouble_with, worth_packing
from lightning_memopt.observing.trial import loss_of, old_gradient_bytes

CHOICES = (
    KEEP,
    Choice("pack"),
    CHEAP,
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
    device = torch.empty(0, device=device).device  # "cuda" is no tensor's device, "cuda:0" is
    if is_timed(device):
        _take_workspaces(device)
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
        self._worth = _WORTH if parts is None else 0.0  # whatever is named is worth a look
        self._may_chunk = may_chunk
        super().__init__(model, self._all, state.protect)
        self._model = model
        self._outermost = len(regions)
        self._state = state
        self._choices = choices
        self._device = device
        self._keeps_saved = keeps_saved
        self._treated = treated_before(model)
        self._storages = Storages(device)
        self._known: dict[Any, tuple[tuple[Result, ...], dict[Choice, str]]] = {}
        self._root = Call(0, 0, {})
        self._calls = [self._root]
        self._stretch: Stretch | None = None

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
        # Beside the pass as a whole those that ended with an error that the model caught.
        for call in self._calls:
            call.last_sequence, call.last_storage = sequence_number(), self._storages.next
            call.end_body()
            call.let_go()
        flow = GradientFlow(loss, self._storages.rounded)
        for span in all_spans(self._root):
            span.settle()
        if last is not None:
            last.backward_peak_bytes = self._run_backward(loss, last.first_sequence)
        for saved in kept:
            saved.tensor = None
        del kept
        gc.collect()  # a tensor that only a reference cycle holds is not held
        self.note_standing()
        observations = {seen.path: seen for seen in self.observations()}
        seen = functools.cache(self._seen_of)  # on a device every look waits for it
        accounts = Accounts(self._root, self._storages, flow, seen, worth=self._worth, unit=self._unit)
        costs = accounts.step(base, optimizer_peak_bytes, loss.nbytes)
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
        self._storages.close()
        self._root.body.clear()
        self._root.series.clear()
        self._stretch = None

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, work: Work) -> None:
        """Follow the storages that an operation creates."""
        given = {storage_address(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(out):
            address = storage_address(tensor)
            if address not in given and tensor.device == self._device and not self._storages.knows(address):
                self._storages.add(tensor, cast_weight(func, args, tensor))
        what = hash((func, _described(args), _described(tuple(kwargs.items()))))
        for call in self._calls:
            call.trace = hash((call.trace, what))
            call.work += work
        if self._stretch is not None:
            self._stretch.work += work
            self._stretch.peak_bytes = max(self._stretch.peak_bytes, self._storages.alive_bytes)

    def _save(self, tensor: Tensor) -> Any:
        if self._looking or tensor.layout is not torch.strided:
            return tensor
        number = self._storages.of(tensor)
        if number is None:  # parameters, the batch
            return tensor
        with self._looking_at(), torch.no_grad():
            bits = self._storages.look_at(number, tensor)
        assert self._stretch is not None
        saved = Saved(number, tensor)
        self._stretch.kept.append(saved)
        reference = weakref.ref(saved)
        self._stretch.saved.append(reference)
        for call in self._calls:
            call.saved.append(reference)
            call.saves.append((number, bits))
        return saved

    @staticmethod
    def _give_back(saved: Any) -> Tensor:
        tensor: Tensor | None = saved.tensor if isinstance(saved, Saved) else saved
        if tensor is None:
            raise _Dropped("A backward pass ran inside the observed forward; what it needs was not kept.")
        return tensor

    # -- Calls and stretches ------------------------------------------------------------------------------------------

    def _begin_stretch(self) -> None:
        self._stretch = Stretch(
            sequence_number(),
            self._storages.next,
            dict(self._storages.alive),
            start_bytes=self._storages.alive_bytes,
            peak_bytes=self._storages.alive_bytes,
        )
        self._calls[-1].body.append(self._stretch)

    def _end_stretch(self, *, drop: bool = True) -> None:
        stretch = self._stretch
        if stretch is None:
            return
        stretch.last_sequence, stretch.last_storage = sequence_number(), self._storages.next
        if drop and not self._keeps_saved:
            for saved in stretch.kept:
                saved.tensor = None
        stretch.kept.clear()
        self._stretch = None

    def entering(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open the books of a call."""
        self._end_stretch()
        around = self._calls[-1]
        again = any(isinstance(call, Call) and call.index == index for call in around.body)
        if again and around.region is not None and self._worth:
            around.opens = False
        carries_on = carried_on(around, args, kwargs)
        call = Call(
            sequence_number(),
            self._storages.next,
            dict(self._storages.alive),
            index=index,
            region=self._all[index],
        )
        if torch.is_grad_enabled() and all(outer.opens for outer in self._calls):
            with without_modes():
                call.before = Moment.now(self._all[index].module, (args, kwargs), self._device)
            call.args, call.kwargs, call.carries_on = args, kwargs, carries_on
        elif carries_on is not None:
            carries_on.let_go()
        around.body.append(call)
        self._calls.append(call)
        self._begin_stretch()

    def left(self, index: int, output: object) -> None:
        """Close the books of a call and try its treatments."""
        self._end_stretch()
        while True:
            call = self._calls.pop()
            call.last_sequence, call.last_storage = sequence_number(), self._storages.next
            call.end_body()
            if call.index == index:
                break
            call.let_go()
        outputs = storages_of(output).values()
        call.outputs = tuple(self._storages.of(tensor) for tensor in outputs)
        if call.before is not None:
            with without_modes():
                if self._is_worth(call):
                    self._try(call, output)
                self._join(call, output)
        self._begin_stretch()

    def _join(self, call: Call, output: Any) -> None:
        """Try a call together with what it carries on, and make ready for a next one that carries it on."""
        around, first = self._calls[-1], call.carries_on
        performs_products = call.work.flops > 0
        if first is not None:
            last, call = call, joined(first, call)
            if self._is_worth(call):
                self._try(call, output)
            around.series = [*(series for series in around.series if series is not first), call]
            first.let_go()
            last.let_go()
        ends = performs_products or len(call.members) == _LONGEST_SERIES or not isinstance(output, Tensor)
        if ends or not self._worth or CHEAP not in self._choices:
            call.let_go()
            return
        if not call.is_series:
            self._copy_inputs(call)
        around.latest = call, weakref.ref(output)

    def _copy_inputs(self, call: Call) -> None:
        """Let go of the inputs of a call, which would live on with it, but keep their values."""
        leaves, spec = tree_flatten((call.args, call.kwargs))
        call.copies = {}
        with torch.no_grad():
            for place, leaf in enumerate(leaves):
                number = self._storages.of(leaf) if isinstance(leaf, Tensor) else None
                if number is not None:
                    leaves[place] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
                    call.copies.setdefault(number, leaves[place])
        call.args, call.kwargs = tree_unflatten(leaves, spec)

    def _seen_of(self, call: Call) -> RegionObservation:
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

    def _is_worth(self, call: Call) -> bool:
        if call.is_series and len(self._calls) == 1:
            return bool(call.still_saved())
        if not call.is_series and call.index < self._outermost:
            return call.region is None or not call.region.outside or bool(call.still_saved())
        if len(self._calls) == 1:  # the region around it is a generator and had returned before: nothing to treat
            return False
        outermost = self._calls[1]
        return self._storages.bytes(call.still_saved()) >= self._worth * self._storages.bytes(outermost.still_saved())

    def _try(self, call: Call, output: Any) -> None:
        """Run the call again under each treatment, unless a call like it has been tried."""
        assert call.region is not None
        assert call.before is not None
        neighbours = call.copies
        if neighbours is None:
            given = {self._storages.of(tensor): tensor for tensor in storages_of((call.args, call.kwargs)).values()}
            neighbours = {number: tensor for number, tensor in given.items() if number is not None}
        call.neighbours = tuple(neighbours)
        seen = self._seen_of(call)
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
                rounded=self._storages.rounded,
                writes_input=seen.writes_input,
                treated=call.modules,
            )
            self._known[signature] = (try_choices(made, tried), reasons)
        call.results, call.reasons = self._known[signature]

    def _plan(self, call: Call, seen: RegionObservation) -> tuple[dict[Choice, Mapping[str, Any]], dict[Choice, str]]:
        """For each choice the arguments to try it with, or why it need not be tried."""
        assert call.region is not None
        given: dict[ArgName, Any] = dict([*enumerate(call.args), *call.kwargs.items()])
        packed = tuple(
            name
            for name in worth_packing(seen)
            if any(self._storages.of(tensor) is not None for tensor in tensors_in(given.get(name)))
        )
        tried: dict[Choice, Mapping[str, Any]] = {}
        reasons: dict[Choice, str] = {}
        steps = _time_steps(seen)
        choices = (KEEP, CHEAP) if call.is_series else self._choices
        fitting = (replace(choice, chunks=min(choice.chunks, max(steps, 2))) for choice in choices)
        for choice in dict.fromkeys(fitting):
            reason = self._reason(call, choice, seen, packed)
            if reason:
                reasons[choice] = reason
            else:
                tried[choice] = treatment_arguments(call.path, choice, seen, packed)
        return tried, reasons

    def _reason(self, call: Call, choice: Choice, seen: RegionObservation, packed: Sequence[ArgName]) -> str:
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
        if not saved and self._worth:
            return "saves nothing"
        if choice.treatment == "pack":
            return "" if any(map(self._storages.bits, saved)) else "saves nothing that fits into fewer bits"
        freed = [storage for storage in saved if call.created(storage) and storage not in call.outputs]
        if self._storages.bytes(freed) < self._worth * self._storages.bytes(saved):
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

    def _signature(self, call: Call, tried: Mapping[Choice, object], reasons: Mapping[Choice, str]) -> Any:
        """Calls that agree in this cost the same."""
        assert call.region is not None
        module = call.region.module
        places = {storage: place for place, storage in enumerate(call.neighbours)}
        saves = tuple(
            (storage - call.first_storage if call.created(storage) else -1 - places.get(storage, len(places)), bits)
            for storage, bits in call.saves
        )
        return (
            tuple(map(type, call.modules)),
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
    def _unit(self) -> Literal["ms", "bytes moved"]:
        return "ms" if is_timed(self._device) else "bytes moved"


def _take_workspaces(device: torch.device) -> None:
    """Let cuBLAS take what it keeps for each thread that calls it, 32 MiB on Hopper: all later steps start with it."""
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        square = torch.zeros(8, 8, dtype=torch.float32, device=device, requires_grad=True)
        torch.autograd.grad((square @ square).sum(), square)  # autograd has a thread for each device


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
