"""
Observe one forward pass
========================

Level 1 needs to know what enters each region, and nothing else. So one forward pass runs without a graph (a model that
only fits once it is checkpointed fits here), in training mode (dropout scales its output, and a scaled spike is no
spike), with hooks on the regions and a dispatch mode below everything, which sees each operation:

* the tensor inputs by position and keyword, their bytes and dtype, and whether they are strictly binary. A tensor of
  zeros proves nothing: it takes at least one 1;
* whether an input is alive after the forward anyway, because the caller holds it: then storing it costs nothing, and a
  packed copy would only add to it;
* whether a region writes to its own input, or somebody else does afterwards: what was stored would then not be what the
  region was given, and autograd would refuse it in backward;
* operations and bytes, by which regions are ranked where time cannot be trusted (CPU).

Parameters that the forward writes to are noted just before, so that they can be put back.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_memopt.checkpointing import BitSpikeCompressor
from lightning_memopt.observing.model_state import ModelState
from lightning_memopt.observing.regions import Region
from lightning_memopt.ops.value_bounds import Bounds, bounds_of, is_fake, is_plain

# Wider integers are indices, whose next value is anything: a sample of 0s and 1s says nothing about them.
_SPIKE_DTYPES = (torch.bool, torch.uint8, torch.int8)
# Tensors below this many bytes gain nothing from packing: a scale, a mask of a few entries.
_SMALLEST_PACKED_BYTES = 64
# Moving one byte takes about as long as this many floating point operations of a product: 12 on an H200 in fp32 (11 ms
# for 16384 x 4096 x 4096, 0.518 ms to copy 1 GiB), 11 on a core of a CPU, 9 for convolutions there. In TF32 it is 100
# on that GPU, but on a CUDA device times are measured.
FLOPS_PER_BYTE = 10
# The check for binary values works in pieces of this many elements, so that its own memory stays small.
_PIECE_NUMEL = 1 << 22

ArgName = int | str


@dataclass(frozen=True)
class SeenInput:
    """One tensor argument of a region over all its calls in one forward pass."""

    name: ArgName
    """Position or keyword. Tensors inside a list or dict have the name of the argument that holds them."""
    input_bytes: int
    packed_bytes: int
    """Bytes if every value took one bit; ``input_bytes`` where packing is out of the question."""
    binary: bool
    """Every value is 0 or 1."""
    any_one: bool
    """At least one value is 1."""
    packable: bool
    """A dtype and a kind of tensor that may be packed at all."""
    steps: int
    """Size of the first dimension, 0 where it differs between calls or there is none."""
    standing: bool
    """Still alive after the forward pass without anybody storing it: the batch itself, held by the training loop."""


@dataclass(frozen=True)
class RegionObservation:
    """What one forward pass showed of one region. Plain data, so that ranks can exchange it."""

    path: str
    calls: int = 0
    inputs: tuple[SeenInput, ...] = ()
    flops: int = 0
    moved_bytes: int = 0
    """Bytes read and written by the region's operations."""
    returns_tensor: bool = True
    writes_input: bool = False
    """The region changes one of its inputs in place."""
    input_overwritten: bool = False
    """An input is changed in place after the region ran."""

    @property
    def input_bytes(self) -> int:
        """Bytes of the tensors given to the region."""
        return sum(seen.input_bytes for seen in self.inputs)


@dataclass(frozen=True)
class Observed:
    """What one forward pass showed of a model. Plain data, so that ranks can exchange it."""

    regions: tuple[RegionObservation, ...]
    flops: int
    """Floating point operations of the whole forward pass."""
    passes: int = 1
    """Forward passes that it took to see it."""


def observe(
    model: nn.Module, regions: Sequence[Region], example_forward: Callable[[nn.Module], object], state: ModelState
) -> Observed:
    """Run ``example_forward(model)`` once without a graph and return what each region was given.

    A forward that takes gradients itself (a gradient penalty) cannot run without a graph and is run again with one.
    """
    try:
        return _watched_forward(model, regions, example_forward, state, grad=False)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    state.rewind()
    return replace(_watched_forward(model, regions, example_forward, state, grad=True), passes=2)


def _watched_forward(
    model: nn.Module,
    regions: Sequence[Region],
    example_forward: Callable[[nn.Module], object],
    state: ModelState,
    *,
    grad: bool,
) -> Observed:
    watch = Watch(model, regions, state.protect)
    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        watch.attach(stack)
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(watch)
        output = example_forward(model)
    if not grad:
        gc.collect()  # a tensor that only a reference cycle holds is not held
        watch.note_standing()
    del output
    return Observed(watch.observations(), watch.flops)


def uncompiled() -> AbstractContextManager[Any]:
    """Compiled parts run as plain Python, so that hooks inside them fire."""
    # Without dynamo in memory nothing can be compiled, and importing it takes a second.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@dataclass
class _Given:
    """A storage that was given to regions, which are told if it is written to."""

    storage: weakref.ref[torch.UntypedStorage]
    regions: set[int] = field(default_factory=set)

    @property
    def alive(self) -> bool:
        """Whether anybody holds it."""
        return self.storage() is not None


@dataclass
class _InputCount:
    """Running totals of one argument; the flags are tensors on its device, so that nothing waits for it."""

    input_bytes: int = 0
    packed_bytes: int = 0
    packable: bool = True
    binary: Tensor | bool = True
    any_one: Tensor | bool = False
    steps: int = -1
    given: dict[int, _Given] = field(default_factory=dict)
    standing: bool = False


@dataclass
class _Count:
    """Running totals of one region."""

    calls: int = 0
    inputs: dict[ArgName, _InputCount] = field(default_factory=dict)
    flops: int = 0
    moved_bytes: int = 0
    returns_tensor: bool = True
    writes_input: bool = False
    input_overwritten: bool = False


class Watch(TorchDispatchMode):
    """Sees every operation of a forward pass and the entry and exit of every region.

    Whoever wants to see more overrides :meth:`entering`, :meth:`left` and :meth:`ran`.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, regions: Sequence[Region], protect: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._regions = regions
        self._counts = [_Count() for _ in regions]
        self._active: list[int] = []
        self.flops = 0  # of the whole forward, regions or not
        # By address, which may be that of another storage once one has died.
        self._given: dict[int, _Given] = {}
        self._parameters = {storage_address(p): p for p in model.parameters() if not nn.parameter.is_lazy(p)}
        self._standing = self._parameters.keys() | {storage_address(buffer) for buffer in model.buffers()}
        self._protect = protect
        self._looking = False  # what runs now is our own business
        self._compressor = BitSpikeCompressor()

    def attach(self, stack: ExitStack) -> None:
        """Put the hooks on the regions, to be removed with ``stack``."""
        for index, region in enumerate(self._regions):
            before, after = self._hooks(index)
            stack.callback(region.module.register_forward_pre_hook(before, with_kwargs=True).remove)
            # What the forward itself was given and returned: that is what a checkpointed forward is and returns.
            stack.callback(region.module.register_forward_hook(after, prepend=True).remove)

    def _hooks(self, index: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._looking:
                return
            with self._looking_at():
                self._enter(index, args, kwargs)
                self.entering(index, args, kwargs)
            self._active.append(index)

        def after(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
            if self._looking:
                return
            # Also takes away what an exception inside the region, caught by the model, left behind.
            while self._active.pop() != index:
                pass
            if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(output)):
                self._counts[index].returns_tensor = False
            with self._looking_at():
                self.left(index, output)

        return before, after

    @contextmanager
    def _looking_at(self) -> Iterator[None]:
        self._looking = True
        try:
            yield
        finally:
            self._looking = False

    def entering(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A region is about to run; operations in here are not seen."""

    def left(self, index: int, output: object) -> None:
        """A region has run; operations in here are not seen."""

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, work: Work) -> None:
        """An operation has run, views included; operations in here are not seen."""

    def _enter(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        count = self._counts[index]
        count.calls += 1
        seen: set[tuple[int, int, int]] = set()
        given: list[tuple[ArgName, Any]] = [*enumerate(args), *kwargs.items()]
        for name, value in given:
            for tensor in tensors_in(value):
                address = storage_address(tensor)
                if address in self._standing:
                    continue  # weights and buffers are there anyway
                given_before = self._given.get(address)
                if given_before is None or not given_before.alive:
                    given_before = self._given[address] = _Given(weakref.ref(tensor.untyped_storage()))
                given_before.regions.add(index)
                part = (address, int(tensor.storage_offset()), tensor.numel())
                total = count.inputs.setdefault(name, _InputCount())
                total.given[id(given_before)] = given_before
                self._count_input(total, tensor, direct=value is tensor, again=part in seen)
                seen.add(part)

    def _count_input(self, total: _InputCount, tensor: Tensor, *, direct: bool, again: bool) -> None:
        packable = (
            direct
            and is_plain(tensor)
            and (tensor.is_floating_point() or tensor.dtype in _SPIKE_DTYPES)
            and tensor.nbytes >= _SMALLEST_PACKED_BYTES
            and self._compressor.accepts(tensor)
        )
        steps = tensor.shape[0] if tensor.dim() else 0
        total.steps = steps if total.steps in (-1, steps) else 0
        if not again:  # a tensor that is passed twice is stored once
            total.input_bytes += tensor.nbytes
            total.packed_bytes += -(-tensor.numel() // 8) if packable else tensor.nbytes
        total.packable = total.packable and packable
        if total.packable:
            binary, any_one = _is_binary(tensor.detach())
            total.binary = binary & total.binary
            total.any_one = any_one | total.any_one

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._looking or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        written = {storage_address(tensor) for tensor in _written(func, args, kwargs)}
        for address in written & self._parameters.keys():
            with self._looking_at():
                self._protect(self._parameters[address])
        out = func(*args, **kwargs)
        for address in written & self._given.keys():
            if self._given[address].alive:
                for index in self._given[address].regions:
                    if index in self._active:
                        self._counts[index].writes_input = True
                    else:
                        self._counts[index].input_overwritten = True
        work = work_of(func, args, kwargs, out)
        self.flops += work.flops
        for index in set(self._active):
            self._counts[index].moved_bytes += work.moved_bytes
            self._counts[index].flops += work.flops
        with self._looking_at():
            self.ran(func, args, kwargs, out, work)
        return out

    def note_standing(self) -> None:
        """After the forward: find the inputs that are still alive although nothing was stored."""
        for count in self._counts:
            for total in count.inputs.values():
                total.standing = all(given.alive for given in total.given.values())

    def observations(self) -> tuple[RegionObservation, ...]:
        """The totals as plain data; waits for the device once."""
        return tuple(self.observation(index) for index in range(len(self._regions)))

    def observation(self, index: int) -> RegionObservation:
        """The totals of one region so far."""
        count = self._counts[index]
        return RegionObservation(
            path=self._regions[index].path,
            calls=count.calls,
            inputs=tuple(_seen(name, total) for name, total in count.inputs.items()),
            flops=count.flops,
            moved_bytes=count.moved_bytes,
            returns_tensor=count.returns_tensor,
            writes_input=count.writes_input,
            input_overwritten=count.input_overwritten,
        )


def _seen(name: ArgName, total: _InputCount) -> SeenInput:
    return SeenInput(
        name=name,
        input_bytes=total.input_bytes,
        packed_bytes=total.packed_bytes if total.packable else total.input_bytes,
        binary=total.packable and bool(total.binary),
        any_one=total.packable and bool(total.any_one),
        packable=total.packable,
        steps=max(total.steps, 0),
        standing=total.standing,
    )


def _is_binary(tensor: Tensor) -> tuple[Tensor | bool, Tensor | bool]:
    """Whether all values are 0 or 1, and whether one is 1, as tensors on the device."""
    if is_fake(tensor):
        known = bounds_of(tensor) == Bounds(1)
        return known, known
    if tensor.dtype == torch.bool:
        return torch.ones((), dtype=torch.bool, device=tensor.device), tensor.any()
    binary = torch.ones((), dtype=torch.bool, device=tensor.device)
    any_one = torch.zeros((), dtype=torch.bool, device=tensor.device)
    rows = max(1, _PIECE_NUMEL // max(1, tensor[0].numel())) if tensor.dim() > 1 else _PIECE_NUMEL
    for piece in tensor.split(rows):
        ones = piece == 1
        any_one = any_one | ones.any()
        binary = binary & (ones | (piece == 0)).all()
    return binary, any_one


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors in ``values`` that have a storage of their own kind."""
    for leaf in (values,) if isinstance(values, Tensor) else tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf


def storage_address(tensor: Tensor) -> int:
    """Identifies the memory that a tensor and its views share, as long as it is alive."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a tensor without a storage of its own
        return id(tensor)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    if not func._schema.is_mutable:
        return
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(value)
    for argument in func._schema.arguments:
        if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(kwargs[argument.name])


@dataclass(frozen=True)
class Work:
    """What one operation has to do."""

    flops: int = 0
    moved_bytes: int = 0
    """Bytes read and written."""

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.moved_bytes + other.moved_bytes)

    @property
    def time_in_bytes(self) -> float:
        """Both on one scale, for a ranking where time is not measured: the bytes moved in the same time."""
        return self.moved_bytes + self.flops / FLOPS_PER_BYTE


def work_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
    """The work of one operation that returned ``out``; views take none."""
    if _is_view(func) or func.namespace == "prim":  # fake tensors are asked for their device
        return Work()
    moved = sum(tensor.nbytes for tensor in tensors_in((args, kwargs, out)))
    return Work(_flops(func, args, kwargs, out), moved)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0
    try:
        return int(count(*args, **kwargs, out_val=out))
    except Exception:  # a formula that does not know this form of the operation; only a ranking is at stake
        return 0


def _is_view(func: Any) -> bool:
    """Operations that only give another view of a tensor move no bytes."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
