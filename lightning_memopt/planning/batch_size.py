"""
The largest batch within a budget
=================================

How large a batch may be depends on the plan, and the best plan on the batch. So two small batches are observed, and
between and beyond them every number of bytes is taken to be affine in the batch size: weights stay, activations grow.
That gives the costs of a step at any size, from these the smallest peak that any plan has there, and by bisection the
largest size at which it is within the budget. This size is then observed itself: peaks are the larger of what grows and
what does not, so they bend, and a few sizes may have to be observed until the one that was predicted fits. The largest
size that was seen to fit and the smallest that was not bracket the result all the while. Where the device runs out of
memory, or the bytes lie on no line (a batch that is padded to a multiple makes stairs of them), the bracket is halved
until it is 1 % wide. Then the fastest plan is measured. Should the step take more than predicted, or less, the model of
memory is corrected and asked again; three measured steps at most. What is taken was measured within the budget.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from lightning_memopt.measuring import measuring_repeatedly
from lightning_memopt.measuring.amounts import format_bytes
from lightning_memopt.observing.costs import ChoiceCost, RegionCosts, StepCosts
from lightning_memopt.observing.model_state import unchanged
from lightning_memopt.observing.no_memory import computing_nothing
from lightning_memopt.observing.regions import TargetClasses
from lightning_memopt.observing.trial import Profile, largest_peak
from lightning_memopt.planning.agree import Ranks
from lightning_memopt.planning.apply import all_or_nothing, remove_plan
from lightning_memopt.planning.by_budget import ModelSteps, Seen
from lightning_memopt.planning.optimize import apply_on_all
from lightning_memopt.planning.plan import left_to_check
from lightning_memopt.planning.request import CanChunk, ExampleForward, Progress, Request, check, device_of
from lightning_memopt.planning.simulate import Correction, storage_bytes
from lightning_memopt.planning.solve import Solution, solve
from lightning_memopt.planning.within_budget import MOST_STEPS, MeasuredPlan, MemoryBudgetError, choices_of, refusal

SizedForward = Callable[[nn.Module, int], object]
"""Runs one training forward of a model on a batch of so many samples and returns a loss or an output."""

LARGEST = 8192
"""No larger batch is looked for unless asked, as in Lightning's own search."""
START = 8
"""The smaller of the two batches that are observed first, unless another one is asked for."""
# Sizes that are predicted one after the other before the search goes on by bisection.
_LINES = 3


def find_batch_size(
    model: nn.Module,
    example_forward: SizedForward,
    memory_budget: int | str,
    *,
    targets: TargetClasses | None = None,
    compress: bool = True,
    can_chunk: CanChunk | None = None,
    process_group: Any = None,
    progress: Progress | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    reserved_bytes: int = 0,
    gradients_in_forward: bool = False,
    start: int = START,
    largest: int = LARGEST,
) -> int:
    """Find the largest batch whose training step fits into a budget, and treat ``model`` with the best plan for it.

    The model is changed in place as by ``optimize_memory(model, memory_budget=...)``: regions are treated, all else is
    as before, and whatever goes wrong on the way leaves the model as it was. ``applied_plan(model)`` is the plan; its
    ``batch_size`` is what is returned.

    Args:
        model: the model to train; not yet wrapped by DDP or FSDP. If its parameters are on the meta device, or fake
            tensors, nothing is computed or allocated, and the batch size follows from shapes.
        example_forward: called as ``example_forward(model, batch_size)``. Runs one training forward on a batch of that
            many samples, like the real ones in shape, dtype and device, and returns a loss or an output. The batch may
            have its samples along any dimension. It should make its batch in the call: one that is kept counts as
            memory of every later step.
        memory_budget: bytes that a training step may take: an int, ``"12GiB"``, or ``"80%"`` of the device's memory.
        targets: class or classes of the modules to be regions. None: the model's repeated blocks.
        compress: store spikes, masks and small integers in few bits.
        can_chunk: whether a region may be run piece by piece along its first dimension. None: every one that gives the
            same outputs, gradients and states in pieces.
        process_group: ranks that train together, all of which call this function. They get the same batch size (each
            rank's own, as for a data loader), one that fits on all of them. None: all ranks.
        progress: called as ``progress(phase, done, total)``.
        optimizer: the optimizers of the training. Their state counts, and so does what their step takes.
        reserved_bytes: bytes of ``memory_budget`` to leave free for what a step of the model does not show.
        gradients_in_forward: whether the gradients of the step before are still there in the forward pass, as in a
            loop that clears them between forward and backward. Then they count there.
        start: size of the first batch that is observed; the second one has twice as many samples. Smaller ones are
            taken where these do not fit into memory.
        largest: no batch larger than this is looked for.

    Returns:
        The largest batch size within the budget, as measured, up to ``largest``. Where batches are padded to a multiple
        it may be smaller by less than one such multiple, or by 1 %. A larger one may fit, too, where bytes depend on
        the batch size in another way, or where three measured steps did not suffice.

    Raises:
        MemoryBudgetError: not even a batch of one sample fits with any plan.
        TypeError: an argument has the wrong type.
        ValueError: an argument has a wrong value, or ``example_forward`` returned nothing with a gradient.
        RuntimeError: another rank failed or holds other arguments.

    Example:
        >>> import torch
        >>> from lightning_memopt.planning import applied_plan
        >>> model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4)))
        >>> def example_forward(model, batch_size):
        ...     return model(torch.rand(5, batch_size, 8))
        >>> budget = "8 GiB"
        >>> find_batch_size(model, example_forward, budget, largest=20)
        20
        >>> applied_plan(model).batch_size
        20
    """
    if not callable(example_forward):
        raise TypeError(
            "example_forward must be a function of the model and a batch size, such as lambda model, batch_size: "
            f"model(make_batch(batch_size)); found {type(example_forward).__name__}."
        )

    def forward_of(batch_size: int) -> ExampleForward:
        return lambda model: example_forward(model, batch_size)

    request = Request(
        targets=targets,
        compress=compress,
        can_chunk=can_chunk,
        progress=progress,
        memory_budget=memory_budget,
        optimizer=optimizer,
        reserved_bytes=reserved_bytes,
        gradients_in_forward=gradients_in_forward,
    )
    return treat_for_largest_batch(model, request, forward_of, process_group, start=start, largest=largest)


def treat_for_largest_batch(
    model: nn.Module,
    request: Request,
    forward_of: Callable[[int], ExampleForward],
    process_group: Any,
    *,
    start: int,
    largest: int,
) -> int:
    """As :func:`find_batch_size`, from forwards that may hold their batch.

    Args:
        model: the model to train.
        request: with a budget of bytes and no ``example_forward``.
        forward_of: for a batch size, a forward as :func:`optimize_memory` takes it, good until another size is asked
            for.
        process_group: as there; so are ``start`` and ``largest``.
        start: size of the first batch.
        largest: no larger batch is looked for.
    """
    for name, size in (("start", start), ("largest", largest)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an int, a number of samples; found {size!r}.")
        if size < 1:
            raise ValueError(f"{name} must be 1 or more, a number of samples; found {size}.")
    if request.memory_budget is None:
        raise ValueError("find_batch_size needs memory_budget, the bytes that a training step may take; found None.")
    request = replace(request, example_forward=_of_no_size)
    ranks = Ranks(process_group, device_of(model))
    ranks.together("checking the arguments", lambda: check(model, request))
    ranks.same("comparing the arguments", request.described())
    # A rank with less data, or a smaller batch now, sets the limit for all.
    sizes = ranks.together("comparing batch sizes", lambda: (start, largest))
    start, largest = min(size for size, _ in sizes), min(size for _, size in sizes)
    started = time.perf_counter()
    with all_or_nothing(model), ranks.telling():
        remove_plan(model)
        with computing_nothing(model), measuring_repeatedly(device_of(model)), unchanged(model) as state:
            steps = ModelSteps(model, request, state, ranks)
            found = _Search(steps, forward_of, ranks, largest).run(min(start, largest))
            plan = left_to_check(steps.plan(found.seen, found.best, found.profiles, started, batch_size=found.size))
        apply_on_all(model, plan, request, ranks)
    return found.size


def _of_no_size(model: nn.Module) -> object:
    """Stands in a request for the forwards of all sizes."""
    raise NotImplementedError("The forward depends on the batch size.")


# ---------------------------------------------------------------------------------------------------------------------
# The search


@dataclass(frozen=True)
class _Found:
    """A batch size whose best plan was measured within the budget."""

    size: int
    seen: Seen
    best: MeasuredPlan
    profiles: list[Profile]


class _Search:
    """What is known of the sizes that were tried, the same on all ranks."""

    def __init__(
        self, steps: ModelSteps, forward_of: Callable[[int], ExampleForward], ranks: Ranks, largest: int
    ) -> None:
        self._steps = steps
        self._forward_of = forward_of
        self._ranks = ranks
        self._seen: dict[int, Seen] = {}
        self._ran_out = largest + 1
        """No size from this one on can be observed: memory runs out, or it is more than was asked for."""
        self._largest = largest
        self._correction = Correction()
        self._solutions: dict[int, Solution] = {}

    def run(self, start: int) -> _Found:
        """The largest size that is measured within the budget.

        Raises:
            MemoryBudgetError: there is none.
        """
        self._observe_small(start)
        size = 0
        found: _Found | None = None
        tried: list[MeasuredPlan] = []
        for _ in range(MOST_STEPS):
            size = self._largest_that_fits(0 if found is None else found.size)
            if found is not None and size <= found.size:
                break
            seen, solution = self._seen[size], self._solution(size)
            forward = self._forward(size)
            profiles = self._steps.measure(forward, seen.step, choices_of(seen.step.costs, solution.assignment))
            best = MeasuredPlan(solution, largest_peak(profiles))
            tried.append(best)
            if best.within(seen.allowed_bytes):
                found = _Found(size, seen, best, profiles)
            self._correction = best.correction(seen.allowed_bytes)
            self._solutions.clear()
        if found is None:
            raise self._refusal(size, tried)
        return found

    def _forward(self, size: int) -> ExampleForward:
        return self._ranks.attempt("making a batch", lambda: self._forward_of(size))

    def _observe(self, size: int) -> bool:
        """Observe the costs at a batch size; False if memory ran out on one of the ranks."""
        if size not in self._seen:
            seen = self._steps.observe_if_possible(self._forward(size))
            if seen is None:
                self._ran_out = min(self._ran_out, size)
                return False
            self._seen[size] = seen
        return True

    def _observe_small(self, start: int) -> None:
        """Two small sizes, from which all others are predicted; one if there is but one."""
        size = start
        while not self._observe(size):
            if size == 1:
                raise self._nothing_fits()
            size //= 2
        if 2 * size < self._ran_out:
            self._observe(2 * size)
        if len(self._seen) == 1 and size > 1:
            self._observe(size // 2)

    def _solution(self, size: int) -> Solution:
        """The fastest plan at a size that was observed; the one with the least peak if none fits."""
        if size not in self._solutions:
            seen = self._seen[size]
            self._solutions[size] = solve(seen.step.costs, seen.allowed_bytes, self._correction)
        return self._solutions[size]

    def _largest_that_fits(self, least: int) -> int:
        """The largest size that fits as it was observed itself.

        Args:
            least: a size that was measured within the budget; 0 if there is none.

        Raises:
            MemoryBudgetError: not even one sample fits.
        """
        for number in itertools.count():
            low = max([least, *(size for size in self._seen if self._solution(size).fits)])
            high = min([max(self._ran_out, low + 1), *(size for size in self._seen if size > low)])
            if high == 1:
                raise self._nothing_fits()
            close = max(1, low // 100)
            size = self._predicted(low, high, close if number else 1)
            if low and (high - low <= close or size == low):
                return low
            # Where lines mislead, the bracket is halved; sizes differ by factors. A line that ends just below what is
            # known not to fit was cut off there: it says nothing.
            if high <= self._largest and (size == high - 1 or number >= _LINES):
                size = math.isqrt(max(low, 1) * high)
            self._observe(min(max(size, low + 1), high - 1))
        raise AssertionError("Every round narrows the bracket.")

    def _predicted(self, low: int, high: int, close: int) -> int:
        """The size between ``low``, which fits, and ``high``, which does not, up to which sizes are predicted to fit.

        It is ``low`` where no line predicts a size that is larger by ``close`` or more.
        """
        # The anchor is well apart: on stairs, two neighbours have the same bytes, or those of a whole stair more.
        apart = [size for size in self._seen if size <= 0.8 * low]
        below = max(apart) if apart else min(self._seen)
        pairs = [{below, low}] if low else [set(sorted(self._seen)[:2])]
        if low and high in self._seen:
            pairs.insert(0, {low, high})
        for pair in pairs:
            size = self._on_line(pair, low, high)
            if size - low >= close:
                return size
        return low

    def _on_line(self, pair: Collection[int], low: int, high: int) -> int:
        """The largest size from ``low`` on and below ``high`` that is predicted to fit, from two observed ones."""
        steps = {size: self._seen[size].step.costs for size in pair}
        allowed = self._seen[max(pair)].allowed_bytes
        end = high
        if max(pair) == low and low > 1 and not _grows(steps):
            end = min(high, 2 * low + 1)  # nothing can be said of much larger ones

        def exceeds(size: int) -> bool:
            return not solve(costs_at(size, steps), allowed, self._correction).fits

        return low + bisect.bisect_left(range(low + 1, end), True, key=exceeds)

    def _nothing_fits(self) -> MemoryBudgetError:
        if 1 not in self._seen:
            return MemoryBudgetError(
                "Memory ran out while a batch of one sample was observed: the device has less than any plan needs.", 0
            )
        seen = self._seen[1]
        costs, budget, reserved = seen.step.costs, seen.budget_bytes, seen.reserved_bytes
        return refusal(costs, budget, reserved, [], self._correction, smallest_batch=True)

    def _refusal(self, size: int, tried: Sequence[MeasuredPlan]) -> MemoryBudgetError:
        seen = self._seen[size]
        peaks = [step.peak_bytes for step in tried if step.peak_bytes is not None]
        least = min(peaks, default=seen.allowed_bytes) + seen.reserved_bytes
        return MemoryBudgetError(
            f"No batch was found within {format_bytes(seen.budget_bytes)}: {len(tried)} measured steps took more than "
            f"was predicted of them, the last one with a batch of {size}. Allow {format_bytes(least)}, or choose a "
            "smaller batch and plan for it: optimize_memory(memory_budget=...).",
            least,
        )


# ---------------------------------------------------------------------------------------------------------------------
# Costs at other sizes


def costs_at(size: int, steps: Mapping[int, StepCosts]) -> StepCosts:
    """The costs of a step at a batch size, every number of bytes on a line through those of two other sizes.

    Regions are matched by path and order of their calls, choices by what they are, storages by order. What is in the
    step of the larger size only grows in proportion to the batch. Times and operations are those of the larger size.

    Args:
        size: of the batch.
        steps: by batch size, two observed steps; or one, all of which then grows in proportion.

    Example:
        >>> from lightning_memopt.observing.costs import Choice
        >>> def step(held):
        ...     keep = ChoiceCost(Choice(), {0: held}, held, held, 0.0)
        ...     return StepCosts(1000, (RegionCosts("block", (keep,), {}, 0, 70),), ({}, {}), 0, 0, 0, 1.0, 0, "ms")
        >>> predicted = costs_at(10, {2: step(200), 4: step(400)})
        >>> predicted.base_bytes, predicted.regions[0].choices[0].holds, predicted.regions[0].gradient_bytes
        (1000, {0: 1000}, 70)
    """
    small, large = min(steps), max(steps)
    return _Lines(small, large, size).step(steps[small] if small != large else None, steps[large])


def _grows(steps: Mapping[int, StepCosts]) -> bool:
    """Whether a step of the larger size holds more; True if there is but one size."""
    held = [sum(storage_bytes(steps[size]).values()) for size in (min(steps), max(steps))]
    return len(steps) == 1 or held[0] < held[1]


_Costs = TypeVar("_Costs", StepCosts, RegionCosts, ChoiceCost)


@dataclass(frozen=True)
class _Lines:
    """Lines through the bytes at two batch sizes, evaluated at a third."""

    small: int
    large: int
    at: int

    def bytes(self, small: int | None, large: int) -> int:
        """What is ``small`` and ``large`` at these sizes; None if nobody knows how small."""
        if small is None:
            return -(-large * self.at // self.large)
        slope = max(0, large - small)  # nothing shrinks with the batch
        return max(0, large + -(-slope * (self.at - self.large) // (self.large - self.small)))

    def entry(self, small: _Costs | None, large: _Costs, name: str) -> int:
        """A number of bytes by the name of its entry."""
        return self.bytes(None if small is None else getattr(small, name), getattr(large, name))

    def storages(self, small: Mapping[int, int] | None, large: Mapping[int, int]) -> dict[int, int]:
        """The same storages as in ``large``; they are numbered in the order in which they were made."""
        before = [small[storage] for storage in sorted(small)] if small is not None else []
        known = before if len(before) == len(large) else [None] * len(large)
        return {storage: self.bytes(was, large[storage]) for was, storage in zip(known, sorted(large), strict=True)}

    def step(self, small: StepCosts | None, large: StepCosts) -> StepCosts:
        """All numbers of a step."""
        outside = small.outside if small is not None and len(small.outside) == len(large.outside) else None
        return replace(
            large,
            base_bytes=self.entry(small, large, "base_bytes"),
            regions=self.regions(() if small is None else small.regions, large.regions),
            outside=tuple(
                self.storages(None if outside is None else outside[at], named) for at, named in enumerate(large.outside)
            ),
            end_peak_bytes=self.entry(small, large, "end_peak_bytes"),
            outside_gradient_bytes=self.entry(small, large, "outside_gradient_bytes"),
            optimizer_peak_bytes=self.entry(small, large, "optimizer_peak_bytes"),
        )

    def regions(self, small: Sequence[RegionCosts], large: Sequence[RegionCosts]) -> tuple[RegionCosts, ...]:
        """Regions of one level."""
        calls: dict[str, list[RegionCosts]] = {}
        for region in reversed(small):
            calls.setdefault(region.path, []).append(region)
        return tuple(self.region(calls[r.path].pop() if calls.get(r.path) else None, r) for r in large)

    def region(self, small: RegionCosts | None, large: RegionCosts) -> RegionCosts:
        """One region and those inside it."""
        choices = {} if small is None else {cost.choice: cost for cost in small.choices if not cost.refused}
        return replace(
            large,
            choices=tuple(self.choice(choices.get(cost.choice), cost) for cost in large.choices),
            in_flight=self.storages(None if small is None else small.in_flight, large.in_flight),
            in_flight_gradient_bytes=self.entry(small, large, "in_flight_gradient_bytes"),
            gradient_bytes=self.entry(small, large, "gradient_bytes"),
            children=self.regions(() if small is None else small.children, large.children),
            glue=None if large.glue is None else self.storages(None if small is None else small.glue, large.glue),
        )

    def choice(self, small: ChoiceCost | None, large: ChoiceCost) -> ChoiceCost:
        """One way to treat a region."""
        if large.refused:
            return replace(large, holds={})  # a storage is as large as the largest that anybody names
        return replace(
            large,
            holds=self.storages(None if small is None else small.holds, large.holds),
            forward_peak_bytes=self.bytes(
                None if small is None else small.forward_peak_bytes, large.forward_peak_bytes
            ),
            backward_peak_bytes=self.bytes(
                None if small is None else small.backward_peak_bytes, large.backward_peak_bytes
            ),
            left_bytes=self.bytes(None if small is None else small.left_bytes, large.left_bytes),
        )
