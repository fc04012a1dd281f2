"""
SpikingJelly's neurons by our kernels
=====================================

:func:`fuse_neurons` lets the ``IFNode`` and ``LIFNode`` modules of a model run their loop over time by
:func:`~lightning_memopt.functional.neuron.if_spike` and ``lif_spike``: one kernel that keeps nothing but its input for
backward, in place of SpikingJelly's stored potentials. The modules stay the same objects, with their names, memories
and ``state_dict``; :func:`unfuse_neurons` gives their classes back.

Fused are multi-step calls in float32 with one of the seven built-in surrogates and ``store_v_seq=False``; any other
call of a fused node, and any other neuron, runs as before; so do calls within ``torch.func`` transforms and ``vmap``,
and neurons whose constants the kernels do not take, such as ``v_threshold=inf``. A fused call has no second derivative:
double backward (a gradient penalty, for example) raises. On the CPU spikes, potentials and gradients are those of
SpikingJelly bit for bit. On CUDA they are those of the eager loop; SpikingJelly's own CUDA kernels may round otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memopt.checkpointing.arguments import offer_payload
from lightning_memopt.checkpointing.compressors import BitSpikeCompressor, SpikePayload
from lightning_memopt.checkpointing.engine import in_transform
from lightning_memopt.functional.neuron import check_neuron, if_spike, lif_spike
from lightning_memopt.ops.neuron import IF, LIF
from lightning_memopt.surrogate import BuiltInSurrogate, built_in_surrogate

__all__ = ["fuse_neurons", "unfuse_neurons"]

# Where the kernels or their references run.
_DEVICES = ("cpu", "cuda", "meta")
_NODES = "spikingjelly.activation_based.neuron"
# The class of a fused neuron by the class it replaces, and by whether it makes bits.
_CLASSES: dict[tuple[Any, bool], Any] = {}


def fuse_neurons(model: nn.Module, *, emit_bits: bool = False) -> int:
    """Let SpikingJelly's IF and LIF neurons in ``model`` run by one kernel for all time steps.

    Call it before ``checkpoint_module`` or ``optimize_memory``. Subclasses of the two nodes are left alone. Gradients
    of a fused neuron can be taken once: where a loss holds gradients itself (double backward), leave its neurons as
    they are. Under ``vmap`` and the other transforms of ``torch.func`` a fused neuron runs as before.

    Args:
        model: any module; it is changed in place.
        emit_bits: make the spikes' bits in the same pass. A region that is given the spikes themselves, and packs its
            inputs by ``BitSpikeCompressor``, then stores these bits and saves the pass that would make them; they take
            an eighth of a byte for each spike as long as the spikes live.

    Returns:
        How many neurons are fused now.

    Example:
        >>> fuse_neurons(torch.nn.Linear(2, 2))
        0
    """
    library = sys.modules.get(_NODES)
    if library is None:
        return 0
    fused = 0
    originals = {fused_class: original for (original, _), fused_class in _CLASSES.items()}
    for module in model.modules():
        original: Any = originals.get(type(module), type(module))
        if original in (library.IFNode, library.LIFNode):
            object.__setattr__(module, "__class__", _fused_class(original, emit_bits))
            fused += 1
    return fused


def unfuse_neurons(model: nn.Module) -> int:
    """Undo :func:`fuse_neurons`.

    Args:
        model: any module; it is changed in place.

    Returns:
        How many neurons were fused.

    Raises:
        ValueError: if a fused neuron has been given another class since, as ``checkpoint_module`` does.

    Example:
        >>> unfuse_neurons(torch.nn.Linear(2, 2))
        0
    """
    originals = {fused_class: original for (original, _), fused_class in _CLASSES.items()}
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, tuple(originals))]
    for name, module in found:
        if type(module) not in originals:
            raise ValueError(
                f"{name or 'model'} was fused and has been changed since, by checkpoint_module or a wrapper. Undo that "
                "first (unwrap_module)."
            )
    for _, module in found:
        object.__setattr__(module, "__class__", originals[type(module)])
    return len(found)


def _fused_class(original: Any, emit_bits: bool) -> Any:
    if (original, emit_bits) in _CLASSES:
        return _CLASSES[original, emit_bits]

    def multi_step_forward(self: Any, x_seq: Tensor, *args: Any, **kwargs: Any) -> Any:
        surrogate = _fusable(self, x_seq, args, kwargs)
        if surrogate is None:
            return super(fused, self).multi_step_forward(x_seq, *args, **kwargs)
        v = self._memories["v"]
        if isinstance(v, Tensor):
            (v,) = self.materialize_states((x_seq,), (v,), "m")
        emits_bits = emit_bits and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        neuron = {
            "v_threshold": self.v_threshold,
            "v_reset": self.v_reset,
            "detach_reset": self.detach_reset,
            "surrogate_function": surrogate,
            "return_bits": emits_bits,
        }
        if hasattr(self, "tau"):
            spikes, v, *bits = lif_spike(x_seq, v, tau=self.tau, decay_input=self.decay_input, **neuron)
        else:
            spikes, v, *bits = if_spike(x_seq, v, **neuron)
        for packed in bits:
            payload = SpikePayload(packed, tuple(spikes.shape), spikes.stride(), spikes.dtype, spikes.device)
            offer_payload(spikes, BitSpikeCompressor(), payload)
        self._memories["v"] = v
        self.v_seq = None
        return spikes

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        make, make_args, *rest = super(fused, self).__reduce_ex__(protocol)
        plain_args = tuple(original if arg is type(self) else arg for arg in make_args)
        return (_remake, (make, plain_args, emit_bits), *rest)

    fused: Any = type(original)(
        original.__name__,
        (original,),
        {
            "multi_step_forward": multi_step_forward,
            "__reduce_ex__": reduce_ex,
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
        },
    )
    _CLASSES[original, emit_bits] = fused
    return fused


def _remake(make: Callable[..., nn.Module], args: tuple[Any, ...], emit_bits: bool) -> nn.Module:
    """Called by pickle and deepcopy: an object of SpikingJelly's class, fused."""
    module = make(*args)
    module.__class__ = _fused_class(type(module), emit_bits)
    return module


def _fusable(node: Any, x_seq: object, args: Any, kwargs: Any) -> BuiltInSurrogate | None:
    """The surrogate, where the equations of this call are ours."""
    if args or kwargs or not isinstance(x_seq, Tensor) or x_seq.dtype != torch.float32:
        return None
    if x_seq.dim() == 0 or len(x_seq) == 0 or x_seq.layout != torch.strided or x_seq.device.type not in _DEVICES:
        return None
    if in_transform():
        return None
    if node.store_v_seq or getattr(node, "_neuron_precision", None) is not None:
        return None
    if getattr(node, "backend", "torch") != "torch" or set(node._memories) != {"v"}:
        return None
    v = node._memories["v"]
    if isinstance(v, Tensor):
        if not v.is_floating_point() or v.device != x_seq.device:
            return None
    elif not isinstance(v, float) or not abs(v) <= torch.finfo(torch.float32).max:
        return None
    try:
        check_neuron(LIF if hasattr(node, "tau") else IF, getattr(node, "tau", 2.0), node.v_threshold, node.v_reset)
        return built_in_surrogate(node.surrogate_function)
    except (TypeError, ValueError):
        return None
