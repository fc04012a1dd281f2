"""
One step on paper
=================

A :class:`Tape` lists the operations of a forward pass: what each reads, writes and makes autograd save. :func:`replay`
runs forward and backward over it as eager PyTorch would, with bytes instead of tensors, and says what is alive when:

* a result lives until its last reader has run or the Python variable that holds it has gone (:meth:`Tape.hold`), a
  saved tensor until the backward pass of the first operation that saved it, each storage once;
* the backward pass allocates a gradient for each tensor read, unless the operation hands on the one it got;
* weight gradients stay; where autocast casts a weight, the copy lives as long as a saved tensor, its gradient is made
  in 16 bits and cast;
* in a checkpointed stretch nothing of the forward pass is kept but what the treatment says, and the stretch runs again
  when the backward pass arrives.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from lightning_memopt.measuring.consumers import MemoryBreakdown

Checkpointing = Literal["keep", "recompute_cheap", "recompute"]


@dataclass(eq=False)
class Storage:
    """Bytes behind a tensor. A view has the storage of its base, and a gradient of its own."""

    bytes: int
    base: Storage | None = None
    needs_gradient: bool = True
    packed: int | None = None
    """Bytes where ``recompute_cheap`` stores it: masks take one bit an element."""

    @property
    def home(self) -> Storage:
        """The storage that is allocated."""
        return self if self.base is None else self.base.home


@dataclass(frozen=True)
class Weight:
    """A parameter as one operation uses it."""

    gradient: int
    """Bytes of its gradient."""
    copy: int = 0
    """Bytes of its copy by autocast, and of the gradient of that."""
    shared: bool = False
    """Another operation uses it too and has brought its gradient by then."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation of the forward pass, and what its backward pass does."""

    module: str
    """Path of the module that runs it."""
    reads: tuple[Storage, ...]
    """Those that get a gradient."""
    writes: tuple[Storage, ...]
    saves: tuple[Storage, ...] = ()
    weights: tuple[Weight, ...] = ()
    hands_on: bool = False
    """The backward pass gives the gradient that it got to all it read."""
    cheap: bool = False
    """It belongs to a module without products, which the treatment ``recompute_cheap`` runs again."""
    forward_workspace: int = 0
    backward_workspace: int = 0


@dataclass
class Tape:
    """Operations in order, and the stretches of them that are checkpointed."""

    operations: list[Operation] = field(default_factory=list)
    held: dict[Storage, int] = field(default_factory=dict)
    """Storage to the number of the operation after which the last variable is gone."""
    stretches: list[tuple[int, int, Storage]] = field(default_factory=list)
    """First operation, end, and input of what is checkpointed."""

    def add(self, operation: Operation) -> None:
        """Append an operation."""
        self.operations.append(operation)

    def hold(self, *storages: Storage) -> None:
        """Variables name these storages until now."""
        for storage in storages:
            self.held[storage.home] = len(self.operations) - 1

    def saved_bytes(self) -> Counter[str]:
        """Bytes that autograd saves without checkpointing, by module, each storage once."""
        sizes: Counter[str] = Counter()
        seen: set[Storage] = set()
        for operation in self.operations:
            for storage in operation.saves:
                if storage.home not in seen:
                    seen.add(storage.home)
                    sizes[operation.module] += storage.home.bytes
        return sizes


@dataclass(frozen=True)
class Replay:
    """What :func:`replay` saw. Parameters, optimizer state and the like are not in it."""

    forward_end: MemoryBreakdown
    forward_peak: MemoryBreakdown
    backward_peak: MemoryBreakdown
    backward_end: MemoryBreakdown


def replay(
    tape: Tape, checkpointing: Checkpointing, *, gradients_before: int, accumulates: bool, gradient_shards: int = 1
) -> Replay:
    """Bytes alive in forward and backward.

    Args:
        tape: the forward pass.
        checkpointing: what is done to its stretches.
        gradients_before: bytes of gradients of the step before that are alive in the forward pass.
        accumulates: these stay, and new gradients are added to them.
        gradient_shards: devices that share the gradients of all weights.
    """
    return _Player(tape, checkpointing, gradients_before, accumulates, gradient_shards).play()


@dataclass(eq=False)
class _Gradient:
    """The gradient of a tensor; several tensors may be given the same one."""

    bytes: int
    users: int = 1


class _Player:
    def __init__(
        self, tape: Tape, checkpointing: Checkpointing, gradients_before: int, accumulates: bool, shards: int
    ) -> None:
        self.tape = tape
        self.checkpointing = checkpointing
        self.before = gradients_before
        self.accumulates = accumulates
        self.shards = shards
        self.alive: dict[Storage, str] = {}  # saved storage to the module that saved it
        self.passing: set[Storage] = set()  # results that nobody has saved
        self.by_module: Counter[str] = Counter()
        self.activations = self.results = self.flowing = self.copies = self.gradients = 0
        self.peak = MemoryBreakdown()
        self.highest = -1
        self.first_saver: dict[Storage, int] = {}
        self.last_use: dict[Storage, int] = dict(tape.held)
        for number, operation in enumerate(tape.operations):
            for storage in operation.saves:
                self.first_saver.setdefault(storage.home, number)
            for storage in (*operation.reads, *operation.writes):
                self.last_use[storage.home] = max(self.last_use.get(storage.home, 0), number)
        self.dropped = self._dropped()
        self.copied_again: set[int] = set()
        # What is stored for a stretch or a cheap module alone, by the operation that needs it.
        self.given: dict[int, list[Storage]] = {}
        if checkpointing == "recompute":
            self.copied_again = {n for start, end, _ in tape.stretches for n in range(start, end)}
            self.given = {start: [given.home] for start, _, given in tape.stretches}
        elif checkpointing == "recompute_cheap":
            self.given = self._read_by_cheap()
        for number, storages in self.given.items():
            for home in storages:
                self.first_saver[home] = min(number, self.first_saver.get(home, number))

    def _read_by_cheap(self) -> dict[int, list[Storage]]:
        read: dict[int, list[Storage]] = {}
        for start, end, _ in self.tape.stretches:
            made: set[Storage] = set()
            for number in range(start, end):
                operation = self.tape.operations[number]
                if operation.cheap:
                    read[number] = [storage.home for storage in operation.reads if storage.home not in made]
                    made |= {storage.home for storage in operation.writes}
        return read

    def _dropped(self) -> set[Storage]:
        """Storages that are made again in the backward pass."""
        dropped: set[Storage] = set()
        if self.checkpointing == "keep":
            return dropped
        for start, end, given in self.tape.stretches:
            inside = self.tape.operations[start:end]
            if self.checkpointing == "recompute":
                dropped |= {storage.home for operation in inside for storage in operation.saves} - {given.home}
                continue
            cheap = [operation for operation in inside if operation.cheap]
            made = {storage.home for operation in cheap for storage in operation.writes}
            read = {storage.home for operation in cheap for storage in operation.reads}
            own = {storage.home for operation in cheap for storage in operation.saves}
            # What a cheap operation reads is stored, unless another cheap one made it.
            dropped |= (made | own) - (read - made)
        # The treatment does not reach what operations outside of the stretches save.
        outside = [
            operation
            for number, operation in enumerate(self.tape.operations)
            if not any(start <= number < end for start, end, _ in self.tape.stretches)
        ]
        return dropped - {storage.home for operation in outside for storage in operation.saves}

    def play(self) -> Replay:
        self.gradients = self.before
        for number in range(len(self.tape.operations)):
            self._forward(number)
        for number in self.copied_again:
            self.copies -= sum(weight.copy for weight in self.tape.operations[number].weights)
        for storage in [*self.passing]:
            self._forget(storage)
        forward_end, forward_peak = self._breakdown(), self.peak
        self.highest = -1
        if not self.accumulates:
            self.gradients = 0
        self.grads: dict[Storage, _Gradient] = {}
        starts = {end - 1: (start, end) for start, end, _ in self.tape.stretches}
        for number in reversed(range(len(self.tape.operations))):
            if self.checkpointing == "recompute" and number in starts:
                self._again(*starts[number])
            self._backward(number)
        return Replay(forward_end, forward_peak, self.peak, self._breakdown())

    def _forward(self, number: int) -> None:
        operation = self.tape.operations[number]
        for home in self.given.get(number, ()):
            self._save(home, operation.module)
        for storage in operation.writes:
            self._pass(storage)
        for storage in operation.saves:
            if storage.home in self.dropped:
                self._pass(storage)
            else:
                self._save(storage, operation.module)
        self._run(operation, number)

    def _run(self, operation: Operation, number: int) -> None:
        self.copies += sum(weight.copy for weight in operation.weights)
        self._look(operation.forward_workspace)
        for storage in [s for s in self.passing if self.last_use.get(s, number) <= number]:
            self._forget(storage)

    def _again(self, start: int, end: int) -> None:
        """Forward of a checkpointed stretch in the backward pass; what it saves stays."""
        for number in range(start, end):
            operation = self.tape.operations[number]
            for storage in operation.writes:
                self._pass(storage)
            for storage in operation.saves:
                self._save(storage, operation.module)
            self._run(operation, number)
        for storage in [*self.passing]:
            self._forget(storage)

    def _backward(self, number: int) -> None:
        operation = self.tape.operations[number]
        for storage in operation.saves:  # the recipes of cheap modules
            self._save(storage, operation.module)
        given = [self.grads.pop(storage) for storage in operation.writes if storage in self.grads]
        wanted = [storage for storage in operation.reads if storage.needs_gradient]
        if operation.hands_on:
            for storage in wanted:
                self._receive(storage, given[0])
        else:
            for storage in wanted:
                self._receive(storage, None)
        for weight in operation.weights:
            self._weight(weight, operation.backward_workspace)
        self._look(operation.backward_workspace)
        for gradient in given:
            self._release(gradient)
        self.copies -= sum(weight.copy for weight in operation.weights)
        for storage in operation.saves:
            if self.first_saver[storage.home] == number:
                self._unsave(storage.home)
        for home in self.given.get(number, ()):
            if self.first_saver[home] == number:
                self._unsave(home)

    def _receive(self, storage: Storage, shared: _Gradient | None) -> None:
        if shared is None:
            fresh = _Gradient(storage.bytes)
            self.flowing += fresh.bytes
        else:
            fresh = shared
            fresh.users += 1
        existing = self.grads.get(storage)
        if existing is None:
            self.grads[storage] = fresh
            return
        # A second reader's gradient: added in place to the first, if nobody else has that.
        if existing.users > 1:
            total = _Gradient(storage.bytes)
            self.flowing += total.bytes
            self._look(0)
            self._release(existing)
            self.grads[storage] = total
        else:
            self._look(0)
        self._release(fresh)

    def _release(self, gradient: _Gradient) -> None:
        gradient.users -= 1
        if gradient.users == 0:
            self.flowing -= gradient.bytes

    def _weight(self, weight: Weight, workspace: int) -> None:
        added = self.accumulates or weight.shared
        kept = 0 if added else -(-weight.gradient // self.shards)
        # Of a cast weight: the gradient in 16 bits, then its cast. An added one is there until the addition.
        passing = weight.copy + (weight.gradient if added else 0)
        self.gradients += kept
        self._look(passing + workspace)

    def _save(self, storage: Storage, module: str) -> None:
        home = storage.home
        if home in self.alive:
            return
        self._forget(home)
        self.alive[home] = module
        self.by_module[module] += self._stored(home)
        self.activations += self._stored(home)

    def _unsave(self, home: Storage) -> None:
        if (module := self.alive.pop(home, None)) is not None:
            self.by_module[module] -= self._stored(home)
            self.activations -= self._stored(home)

    def _stored(self, home: Storage) -> int:
        return home.bytes if home.packed is None or self.checkpointing != "recompute_cheap" else home.packed

    def _pass(self, storage: Storage) -> None:
        home = storage.home
        if home not in self.alive and home not in self.passing:
            self.passing.add(home)
            self.results += home.bytes

    def _forget(self, home: Storage) -> None:
        if home in self.passing:
            self.passing.discard(home)
            self.results -= home.bytes

    def _look(self, workspace: int) -> None:
        total = self.activations + self.results + self.flowing + self.copies + self.gradients + workspace
        if total > self.highest:
            self.highest = total
            self.peak = self._breakdown(workspace)

    def _breakdown(self, workspace: int = 0) -> MemoryBreakdown:
        return MemoryBreakdown(
            gradients=self.gradients,
            activations=self.activations,
            autocast_copies=self.copies,
            temporaries=self.results + self.flowing + workspace,
            activations_by_module={name: size for name, size in self.by_module.items() if size},
        )
