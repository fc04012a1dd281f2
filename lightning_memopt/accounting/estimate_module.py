"""
Memory of a step from the module itself
=======================================

The step is run as Lightning runs it (forward, ``zero_grad``, backward, optimizer step), on a copy of the module whose
tensors are fake: they have shapes and dtypes but no memory, and nothing is computed. So a model of any size can be
estimated on any machine. Only the second step counts, when the optimizer's state is there and the gradients of the step
before are still alive in the forward pass.

What the kernels of a device take for themselves while they run is not seen. On the CPU it is added for those that take
most (``measuring/workspaces.py``). For CUDA nothing is added: what cuDNN and cuBLAS take is not known without running
them, and comes on top.

Where the estimate is for CUDA and there is no CUDA device, the fakes lie on the CPU: dropout keeps its mask in one byte
and optimizers take all parameters at once, as on CUDA, and attention stores what flash attention stores; other kernels
that save other tensors there are not corrected for. What cuDNN keeps of a recurrent layer for its backward pass is not
known without running it: a warning names these layers.

Sparse gradients count as "temporaries", and after the step as "other".
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memopt.accounting.transformer import Precision, precision_of
from lightning_memopt.measuring import measure_memory
from lightning_memopt.measuring.attribution import held_tensors
from lightning_memopt.measuring.consumers import MemoryEstimate
from lightning_memopt.measuring.optimizer_state import clone_of, rehearse_step, take_all_at_once
from lightning_memopt.measuring.workspaces import recurrent_buffer_bytes, without_workspaces

__all__ = ["estimate_module", "fake_copy"]

Loss = Callable[[nn.Module, Any], Any]
OptimizerFactory = Callable[[Any], Optimizer]
_DEVICES = ("cuda", "cpu")
_DTYPES = {
    "64-true": torch.float64,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
}


def estimate_module(
    module: nn.Module | Callable[[], nn.Module],
    example: Any,
    *,
    precision: str | int = "32-true",
    optimizer: Optimizer | Sequence[Optimizer] | OptimizerFactory | None = None,
    loss: Loss | None = None,
    device: torch.device | str | None = None,
    treat: Callable[[nn.Module], object] | None = None,
    time_limit_s: float | None = None,
) -> MemoryEstimate:
    """Estimate what one training step of ``module`` takes, without allocating anything.

    The module and the optimizer are not changed. Parameters may be real, fake or on the meta device; the copies that
    the precision asks for are made by this function, so give the module as it is before training.

    Args:
        module: any module or ``LightningModule``; or a function that makes one, which is run with fake tensors.
        example: one batch: what ``training_step`` or ``loss`` takes. For another module without ``loss``: a tensor, a
            tuple of positional or a mapping of keyword arguments of its forward. Tensors may lie in lists, tuples,
            mappings and dataclasses.
        precision: what ``Trainer(precision=...)`` would be given: ``"32-true"``, ``"bf16-mixed"``, ``"bf16-true"``...
        optimizer: optimizers made for the parameters of ``module``, or a function of the parameters that makes one,
            such as ``torch.optim.AdamW``. ``None``: those of ``configure_optimizers``; of another module, none steps.
        loss: ``loss(module, example)`` returns the tensor to be differentiated. ``None``: the loss of
            ``training_step``; of another module, the mean of its outputs.
        device: what the training runs on, ``"cuda"`` or ``"cpu"``. ``None``: CUDA if there is a device, else the CPU.
        treat: changes the copy before the step, for example by ``checkpoint_module`` on some of its modules.
        time_limit_s: give up after so many seconds. The step before is not run then, only that of the optimizers, and
            states that it would have left in modules are not counted.

    Returns:
        The peak, and the ends of forward, backward and optimizer step, by consumer.

    Raises:
        TypeError: ``module`` is no module and makes none, or ``optimizer`` is none of what is accepted.
        ValueError: the precision or the device is unknown, there is nothing to differentiate, the step needs values
            that fake tensors do not have or operations that refuse them, or an attribute of the module cannot be
            copied.
        TimeoutError: ``time_limit_s`` was too short.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*(nn.Linear(2**17, 2**17, bias=False) for _ in range(4)))  # 69 billion
        >>> batch = torch.empty(16, 2**17, device="meta")
        >>> step = estimate_module(model, batch, precision="bf16-true", optimizer=torch.optim.AdamW, device="cpu")
        >>> step.peak.parameters / 2**30, step.peak.optimizer_state / 2**30 >= 256
        (128.0, True)
    """
    kind = precision_of(precision)
    where = _accepted(device)
    stands_in = where.type == "cuda" and not torch.cuda.is_available()
    fakes_on = torch.device("cpu") if stands_in else where
    mode = _mode_of(module, example)
    dtype = None if kind.autocast else _DTYPES.get(kind.name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_unlogged())
        stack.enter_context(mode)
        stack.enter_context(_default_dtype(dtype))
        if stands_in:
            stack.enter_context(_KernelsOfCuda())
            stack.enter_context(without_workspaces())
        if where.type == "cpu":
            stack.enter_context(_RecurrentBuffers())  # type: ignore[no-untyped-call]
        sparse = stack.enter_context(_SparseGradients())
        made, originals = _made_module(module, fakes_on, dtype)
        batch = _fake_batch(example, fakes_on, dtype)
        _warn_of_recurrent(made, where)
        optimizers = _optimizers(optimizer, made, originals, foreach=where.type == "cuda")
        compute = _loss_of(made, loss)
        if treat is not None:
            treat(made)
        if time_limit_s is not None:
            stack.enter_context(_Deadline(time_limit_s))

        def step() -> None:
            with _autocast(kind, fakes_on):
                value = compute(made, batch)
            for each in optimizers:
                each.zero_grad()
            if not optimizers:
                made.zero_grad()
            sparse.parts.clear()
            _differentiable(value).backward()
            del value
            _step(optimizers)

        try:
            if time_limit_s is None:
                step()
            else:
                _rehearse(made, optimizers)
            report = measure_memory(step, device=fakes_on, model=made, optimizer=optimizers, batch=_tensors(batch))
        except (DataDependentOutputException, DynamicOutputShapeException, RuntimeError) as error:
            reason = _why_not_on_fakes(error)
            if reason is None:
                raise
            raise ValueError(reason) from error
    assert report.breakdown is not None
    name = type(made).__name__
    return MemoryEstimate(
        report.breakdown.phases,
        report.breakdown.peak,
        report.breakdown.peak_phase,
        f"{name}, one step in {kind.name} on {where.type}",
    )


def fake_copy(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> tuple[nn.Module, Any]:
    """A copy of ``module`` without memory, and the copy of each parameter by the id of the original.

    To be called with a ``FakeTensorMode`` active.

    Args:
        module: is not changed. Its modules, attributes and hooks are copied, its tensors are made anew.
        device: where the fakes lie.
        dtype: what floating point tensors are cast to, None for not at all.

    Raises:
        ValueError: an attribute of the module cannot be copied; the message names it.

    Example:
        >>> with FakeTensorMode():
        ...     twin, _ = fake_copy(nn.Linear(3, 4), torch.device("cpu"), torch.bfloat16)
        >>> twin.weight.shape, twin.weight.dtype
        (torch.Size([4, 3]), torch.bfloat16)
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                "The module has lazy parameters, whose shapes are not known yet; run one forward pass of it first."
            )
        memo[id(parameter)] = nn.Parameter(_fake(parameter, device, dtype), requires_grad=parameter.requires_grad)
    for _, tensor in held_tensors(module):
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake(tensor, device, dtype)
    # What a LightningModule is attached to is no part of it.
    for part in module.modules():
        for name in ("_trainer", "_fabric"):
            attached = vars(part).get(name)
            if attached is not None:
                memo[id(attached)] = None
    for found in _reachable(module, memo):
        if isinstance(found, torch.Generator):
            memo[id(found)] = torch.Generator(found.device)  # its state is a tensor, and fakes have no values
        elif isinstance(found, nn.Parameter):
            memo[id(found)] = nn.Parameter(_fake(found, device, dtype), requires_grad=found.requires_grad)
        else:
            memo[id(found)] = _fake(found, device, dtype)
    copied = dict(memo)  # deepcopy adds the rest
    try:
        return copy.deepcopy(module, memo), copied
    except Exception as error:
        raise ValueError(
            f"an estimate runs on a copy of the module, and {_uncopied(module, copied)} cannot be copied "
            f"({type(error).__name__}: {error}). Set it to None before, or give a function that makes the module "
            "without it."
        ) from error


def _reachable(module: nn.Module, memo: Mapping[int, object]) -> Iterator[Tensor | torch.Generator]:
    """Tensors and generators that ``deepcopy`` would come to, beside those of ``memo``: in objects of any depth."""
    seen = set(memo)
    waiting: list[object] = [module]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (Tensor, torch.Generator)):
            yield value
            continue
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            waiting += value
        # Neither classes nor functions are copied, and modules of Python cannot be.
        if not isinstance(value, (type, FunctionType, ModuleType)):
            waiting += getattr(value, "__dict__", {}).values()


def _uncopied(module: nn.Module, memo: Mapping[int, Any]) -> str:
    """The attribute whose copy fails, in words."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name == "_modules":
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                of = f"the module {path!r}" if path else type(module).__name__
                return f"the attribute {name!r} of {of}"
    return f"something that {type(module).__name__} holds"


def _fake(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if tensor.layout is not torch.strided:
        return torch.empty(tensor.shape, dtype=kind, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=device)


def _mode_of(module: object, example: object) -> FakeTensorMode:
    """The mode of fakes that were passed: they mix with no others."""
    tensors = [*module.parameters()] if isinstance(module, nn.Module) else []
    for leaf in [*tensors, *_tensors(example)]:
        if isinstance(leaf, FakeTensor):
            return leaf.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def _accepted(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        where = None
    if where is None or where.type not in _DEVICES:
        raise ValueError(
            f"device={device!r} cannot be estimated; accepted are {', '.join(map(repr, _DEVICES))}, with or without "
            "an index"
        )
    return where


def _why_not_on_fakes(error: Exception) -> str | None:
    """In words, why a step cannot run without values; None if that is not what is wrong with it."""
    # For .numpy() torch has no exception of its own.
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)) or ".numpy()" in str(error):
        return (
            f"The step reads a value of a tensor ({error}), and an estimate has no values. Give estimate_memory a "
            "`loss` function that does not, or measure a real step with measure_memory(step, model=...)."
        )
    # Some of torch's rules for shapes are stricter than its kernels.
    frames = traceback.walk_tb(error.__traceback__)
    if any(frame.f_code.co_filename.endswith("_meta_registrations.py") for frame, _ in frames):
        return (
            "An operation of the step refuses its tensors by torch's rules for those without values "
            f"({error}). If the step runs on real ones, measure it with measure_memory(step, model=...), or "
            "estimate it in another precision."
        )
    return None


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Operations that fail on fakes raise here; torch would log their traceback as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _warn_of_recurrent(module: nn.Module, device: torch.device) -> None:
    """On fakes the fused kernels of recurrent layers keep nothing for the backward pass; on the CPU it is known."""
    if device.type == "cpu":
        return
    found = [path or "the module itself" for path, part in module.named_modules() if isinstance(part, nn.RNNBase)]
    if found:
        warnings.warn(
            f"The estimate is too low: what cuDNN keeps for the backward pass of {', '.join(found)} (recurrent layers) "
            "is not known without running it. Measure a real step with measure_memory(step, model=...).",
            UserWarning,
            stacklevel=4,
        )


def _made_module(
    module: nn.Module | Callable[[], nn.Module], device: torch.device, dtype: torch.dtype | None
) -> tuple[nn.Module, Mapping[int, Any]]:
    originals: Mapping[int, Any] = {}
    if not isinstance(module, nn.Module):
        if not callable(module):
            raise TypeError(f"an estimate takes a torch.nn.Module or a function that makes one; got {module!r}")
        with device:
            module = module()
        if not isinstance(module, nn.Module):
            raise TypeError(f"the function that was to make a torch.nn.Module returned {module!r}")
    made, originals = fake_copy(module, device, dtype)
    # A Trainer has called it already. Otherwise there may be no layers before.
    configure_model: Any = getattr(made, "configure_model", None)
    if _is_lightning(made) and configure_model is not None and getattr(module, "_trainer", None) is None:
        with device:
            configure_model()
    if not made.training:
        made.train()
    if _is_lightning(made):
        for name in ("log", "log_dict", "print"):
            vars(made)[name] = _do_nothing
    return made, originals


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _is_lightning(module: nn.Module) -> bool:
    return hasattr(module, "training_step") and hasattr(module, "configure_optimizers")


def _fake_batch(example: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if not _tensors(example):
        raise ValueError(
            "an estimate of a module needs an example: one batch of tensors, real, fake or on the meta device, in a "
            f"list, tuple, dict or dataclass; got {type(example).__name__} without a tensor"
        )
    return _mapped(example, lambda tensor: _fake(tensor, device, dtype).requires_grad_(tensor.requires_grad))


def _mapped(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """A batch with other tensors, also in the mappings and dataclasses that are no containers to torch."""

    def mapped(leaf: Any) -> Any:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return apply_to_collection(leaf, Tensor, function)
        made = copy.copy(leaf)
        for entry in dataclasses.fields(leaf):
            object.__setattr__(made, entry.name, _mapped(getattr(leaf, entry.name), function))  # it may be frozen
        return made

    return tree_map(mapped, batch)


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(batch, see)
    return found


def _optimizers(given: Any, made: nn.Module, originals: Mapping[int, Any], *, foreach: bool) -> list[Optimizer]:
    if given is None:
        configured = made.configure_optimizers() if _is_lightning(made) else None  # type: ignore[operator]
        optimizers = [leaf for leaf in tree_leaves(configured) if isinstance(leaf, Optimizer)]
    elif isinstance(given, (Optimizer, Sequence)) and not isinstance(given, str):
        optimizers = [_on_fakes(each, originals) for each in ([given] if isinstance(given, Optimizer) else given)]
    elif callable(given):
        optimizers = [_made_for([p for p in made.parameters() if p.requires_grad], given)]
    else:
        raise TypeError(
            "`optimizer` of a module takes a torch.optim.Optimizer, a list of them, or a function of the parameters "
            f"that makes one; got {given!r}"
        )
    for optimizer in optimizers if foreach else ():
        take_all_at_once(optimizer)
    return optimizers


def _made_for(parameters: list[nn.Parameter], make: OptimizerFactory) -> Optimizer:
    try:
        return make(parameters)
    except DataDependentOutputException:  # it computes tables of its own, as bitsandbytes does
        with unset_fake_temporarily():
            return make(parameters)


def _on_fakes(optimizer: object, originals: Mapping[int, Any]) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"`optimizer` takes torch.optim.Optimizer objects; got {optimizer!r}")
    twin = clone_of(optimizer, optimizer.param_groups, (), torch.empty_like)
    for group, original in zip(twin.param_groups, optimizer.param_groups, strict=True):
        missing = [tuple(p.shape) for p in original["params"] if id(p) not in originals]
        if missing:
            raise ValueError(
                f"the optimizer holds a parameter of shape {missing[0]} that the module does not have; give the "
                "optimizer that was made for this module"
            )
        group["params"] = [originals[id(p)] for p in original["params"]]
    return twin


def _loss_of(module: nn.Module, loss: Loss | None) -> Loss:
    if loss is not None:
        return loss
    if _is_lightning(module):
        if not getattr(module, "automatic_optimization", True):
            raise ValueError(
                f"{type(module).__name__} optimizes manually, and its optimizers exist in a Trainer only. Give "
                "`loss`, a function of the module and the example that returns the loss, and `optimizer`."
            )
        return _training_step
    return _mean_output


def _training_step(module: Any, batch: Any) -> Any:
    # Half of the time of `estimate --help` would be spent on importing it above.
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    # By position, whatever its name, as the Trainer passes it.
    indexed = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    arguments = (batch, 0) if indexed else (batch,)
    output = module.training_step(*arguments)
    return output["loss"] if isinstance(output, Mapping) else output


def _mean_output(module: nn.Module, example: Any) -> Any:
    if isinstance(example, Mapping):
        output = module(**example)
    else:
        output = module(*example) if isinstance(example, (tuple, list)) else module(example)
    parts = [leaf.mean() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum(parts[1:], parts[0]) if parts else None


def _rehearse(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Make gradients and optimizer state, as a step before would have left them."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    _step(optimizers)


def _step(optimizers: Iterable[Optimizer]) -> None:
    with _AnyValue():  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            rehearse_step(optimizer)


def _differentiable(value: object) -> Tensor:
    if not isinstance(value, Tensor) or not value.requires_grad:
        found = (
            f"a tensor without gradient, of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        )
        raise ValueError(
            f"the step gave {found} where a loss to differentiate was expected. Give `loss`, a function of the module "
            "and the example that returns it."
        )
    return value


def _autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if not precision.autocast:
        return contextlib.nullcontext()
    return torch.autocast(device.type, _DTYPES[precision.name])


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Tensors that the step makes have the dtype of the training, as under Lightning."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _AnyValue(TorchDispatchMode):
    """Answers 1 where a value is read. Optimizers read numbers of steps and norms, on which no size depends."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


class _Deadline(TorchDispatchMode):
    """Ends what runs under it when its time is over."""

    supports_higher_order_operators = True

    def __init__(self, seconds: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seconds = seconds
        self._end = time.perf_counter() + seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # Views and questions for sizes come from places that bear no error: where autograd saves a tensor, for example.
        if time.perf_counter() > self._end and isinstance(out, Tensor) and not getattr(func, "is_view", True):
            raise TimeoutError(f"the estimate was not done after {self._seconds:.1f} s")
        return out


class _RecurrentBuffers(TorchDispatchMode):
    """Gives the buffer that an LSTM of oneDNN saves its bytes, of which fakes know nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.mkldnn_rnn_layer.default:
            return out
        data, weight = args[:2]
        steps, batch, inputs = data.shape
        size = recurrent_buffer_bytes(steps, batch, inputs, weight.shape[0] // 4, weight.dtype)
        return (*out[:3], torch.empty(size, dtype=torch.uint8, device=data.device))


class _SparseGradients(TorchDispatchMode):
    """Keeps the indices and values of sparse gradients, which are fakes without any, until gradients are cleared."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The gradient that autograd then keeps is made of fakes without elements.
        if func is torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default and args[4].numel():
            self.parts.append(args[3:5])
        return func(*args, **(kwargs or {}))


class _KernelsOfCuda(TorchFunctionMode):
    """Dropout as CUDA does it, on fakes that lie on the CPU: a mask of one byte an element."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.nn.functional.dropout, torch.dropout) and not kwargs.get("inplace"):
            bound = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
            training = bound.get("training", bound.get("train", True))
            if training and not bound.get("inplace") and 0 < bound.get("p", 0.5) < 1:
                return torch.native_dropout(bound["input"], bound.get("p", 0.5), True)[0]
        return func(*args, **kwargs)
