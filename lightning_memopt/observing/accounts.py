"""
From one forward pass to costs
==============================

What was seen of the calls of a pass, and what the experiments showed, as :class:`StepCosts`.

A stretch of code between regions, inside or outside of others, is an entry of its own whose only choice is to be kept:
its tensors, its temporary ones and its gradients then stand at their place in the step. Its path is no module's: it is
in parentheses. Storages that outlive the pass (neuron states, the loss) count as held by the region that made them,
whatever its treatment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from lightning_memopt.observing.calls import Call, Span, Stretch, all_spans
from lightning_memopt.observing.costs import CHEAP, KEEP, Choice, ChoiceCost, RegionCosts, StepCosts
from lightning_memopt.observing.experiments import Result
from lightning_memopt.observing.gradient_flow import GradientFlow
from lightning_memopt.observing.observe import RegionObservation, Work
from lightning_memopt.observing.storages import Storages

# Bytes held beside saved tensors count from this share on.
_UNNOTICED = 0.001
# A backward pass takes about twice the work of the forward.
_PASSES = 3


class Accounts:
    """Makes costs of what one pass showed."""

    def __init__(
        self,
        root: Call,
        storages: Storages,
        flow: GradientFlow,
        seen: Callable[[Call], RegionObservation],
        *,
        worth: float,
        unit: Literal["ms", "bytes moved"],
    ) -> None:
        self._root = root
        self._storages = storages
        self._standing = storages.standing()
        self._flow = flow
        self._seen = seen
        self._worth = worth
        self._unit = unit
        self._packed: dict[tuple[int, int], int] = {}

    def step(self, base_bytes: int, optimizer_peak_bytes: int, loss_bytes: int) -> StepCosts:
        """The costs of the whole pass."""
        regions = self._body(self._root, least_bytes=0)
        plain, plain_flops, unit = self._plain()
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

    def _body(self, call: Call, least_bytes: int) -> tuple[RegionCosts, ...]:
        """The regions and stretches inside a call; what holds less than ``least_bytes`` is part of a stretch."""
        made: list[RegionCosts] = []
        stretch: list[Span] = []
        before = ""

        def end_stretch(following: str) -> None:
            name = f"(before {following})" if following and not before else f"(after {before})"
            costs = self._stretch(stretch, name)
            if costs is not None:
                made.append(costs)
            stretch.clear()

        for span in self._parts(call):
            if isinstance(span, Call) and self._is_worth(span, least_bytes, outermost=call is self._root):
                end_stretch(span.members[0].path)
                made.append(self._region(span, least_bytes))
                before = span.members[-1].path
            else:
                stretch.append(span)
        end_stretch("")
        return tuple(made)

    def _parts(self, call: Call) -> Iterator[Span]:
        """The body of a call, with series in place of the calls in them where these can be treated together."""
        for span in call.parts:
            if isinstance(span, Call) and span.is_series and not self._pays(span):
                yield from self._parts(span)
            else:
                yield span

    def _pays(self, series: Call) -> bool:
        """Whether a series can be treated as one."""
        if not any(result.choice == CHEAP and not result.refused for result in series.results):
            return False
        seen = self._seen(series)
        return seen.calls == 1 and not seen.input_overwritten

    def _is_worth(self, call: Call, least_bytes: int, *, outermost: bool) -> bool:
        if outermost and not (call.region is not None and call.region.outside):
            return True
        return bool(call.results) and self._storages.bytes(call.still_saved()) >= least_bytes

    def _region(self, call: Call, least_bytes: int) -> RegionCosts:
        saved = self._storages.bytes(call.still_saved())
        least_bytes = least_bytes or int(self._worth * saved)
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
            series=tuple(member.path for member in call.members) if call.is_series else (),
        )

    def _left(self, span: Span) -> int:
        """Bytes that stay after the backward of what was not run alone, beside gradients."""
        return self._storages.bytes(storage for storage in self._standing if span.created(storage))

    def _left_under(self, call: Call, result: Result) -> int:
        """The same under a treatment: what is not recomputed also leaves what hangs on the graph of a state.

        An output that the training loop holds was dropped where the region ran alone.
        """
        dropped = (
            storage
            for storage, left in zip(call.outputs, result.left_outputs, strict=True)
            if not left and storage in self._standing and call.created(storage)
        )
        return result.left_bytes + self._storages.bytes(dropped)

    def _stretch(self, spans: list[Span], name: str) -> RegionCosts | None:
        if not spans:
            return None
        first, last = spans[0], spans[-1]
        nodes = first.first_sequence, last.last_sequence
        stretches = [stretch for span in spans for stretch in all_spans(span) if isinstance(stretch, Stretch)]
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

    def _kept(self, span: Span) -> dict[int, int]:
        """What a piece of code that is left as it is holds until its backward."""
        standing = (storage for storage in self._standing if span.created(storage))
        return {storage: self._storages.size(storage) for storage in (*span.still_saved(), *standing)}

    def _choices(self, call: Call) -> tuple[ChoiceCost, ...]:
        results = {result.choice: result for result in call.results}
        plain = results.get(KEEP)
        made = [self._keep(call, plain)]
        if plain is None or plain.refused:
            return tuple(made)
        seen = self._seen(call)
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

    def _keep(self, call: Call, result: Result | None) -> ChoiceCost:
        holds = self._kept(call)
        if result is None or result.refused:
            # It could not be run alone: from what was seen in the pass.
            stretches = [span for span in all_spans(call) if isinstance(span, Stretch)]
            peak = max(stretch.peak_bytes for stretch in stretches) - stretches[0].start_bytes
            left = {storage for storage in (*holds, *call.outputs) if storage is not None}
            inside = self._storages.bytes(storage for storage in left if call.created(storage))
            backward = self._flow.peak(call.first_sequence, call.last_sequence)
            return ChoiceCost(KEEP, holds, max(peak, inside), backward, extra=0.0, left_bytes=self._left(call))
        # Where it changes an input in place, it was run on copies of its inputs.
        copied = call.neighbours if self._seen(call).writes_input else ()
        known = sum(
            size
            for storage, size in holds.items()
            if storage in copied
            or (call.created(storage) and not (storage in self._standing and storage in call.outputs))
        )
        hidden = result.held_bytes - known
        if hidden > _UNNOTICED * result.held_bytes:
            # Held by the graph in another way than as a saved tensor.
            holds[self._storages.new_number(hidden)] = hidden
        return ChoiceCost(
            choice=KEEP,
            holds=holds,
            forward_peak_bytes=result.forward_peak_bytes,
            backward_peak_bytes=self._backward_peak(call, result),
            extra=0.0,
            left_bytes=self._left_under(call, result),
        )

    def _treated(self, call: Call, result: Result, plain: Result) -> ChoiceCost:
        size_of = self._storages.size
        holds: dict[int, int] = {}
        own = result.held_bytes
        for standing in self._standing:
            if call.created(standing):
                holds[standing] = size_of(standing)
                own -= 0 if standing in call.outputs else size_of(standing)
        boundary: list[tuple[int | None, bool, bool]] = [
            *zip(call.neighbours, result.holds_neighbours, plain.holds_neighbours, strict=True),
            *zip(call.outputs, result.holds_outputs, plain.holds_outputs, strict=True),
        ]
        for storage, held, held_plain in boundary:
            if storage is None:
                continue
            if held:
                holds[storage] = size_of(storage)
                own -= size_of(storage) if call.created(storage) else 0
            elif self._is_packed(call, result.choice, storage, held_plain=held_plain):
                number = self._packed_copy(storage)
                holds[number] = size_of(number)
                own -= size_of(number)
        if own > 0:
            holds[self._storages.new_number(own)] = own
        more_time = result.work.time_in_bytes - plain.work.time_in_bytes
        return ChoiceCost(
            choice=result.choice,
            holds=holds,
            forward_peak_bytes=result.forward_peak_bytes,
            backward_peak_bytes=self._backward_peak(call, result),
            extra=max(result.ms - plain.ms if self._unit == "ms" else more_time, 0.0),
            extra_flops=max(result.work.flops - plain.work.flops, 0),
            left_bytes=self._left_under(call, result),
        )

    def _is_packed(self, call: Call, choice: Choice, storage: int, *, held_plain: bool) -> bool:
        """Whether the choice holds a packed copy of ``storage``, which others may share."""
        bits = self._storages.bits(storage)
        if choice.treatment == "recompute":
            return choice.compressor is not None and choice.chunks == 1 and bits == 1 and not call.created(storage)
        return held_plain and bits > 0

    def _packed_copy(self, storage: int) -> int:
        bits = self._storages.bits(storage)
        key = (storage, bits)
        if key not in self._packed:
            self._packed[key] = self._storages.new_number(self._storages.packed_size(storage))
        return self._packed[key]

    def _backward_peak(self, call: Call, result: Result) -> int:
        if self._flow.shared(call.first_sequence, call.last_sequence):
            return result.backward_peak_kept_bytes
        return result.backward_peak_bytes

    def _plain(self) -> tuple[float, int, Literal["ms", "bytes moved"]]:
        """Time and operations of a plain step."""
        work, ms, timed = Work(), 0.0, 0.0
        for span in self._root.body:
            plain = next((result for result in getattr(span, "results", ()) if result.choice == KEEP), None)
            if plain is None or plain.refused:
                work += Work(_PASSES * span.work.flops, _PASSES * span.work.moved_bytes)
            else:
                work += plain.work
                ms += plain.ms
                timed += plain.work.time_in_bytes
        if self._unit == "ms":
            # Code outside regions was not timed: it is taken to be as fast as that inside.
            return ms * work.time_in_bytes / max(timed, 1.0), work.flops, "ms"
        return work.time_in_bytes, work.flops, "bytes moved"
