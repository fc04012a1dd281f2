"""
Layers of neurons and weights
=============================

:class:`IFLinear` and :class:`LIFLinear` are a layer of neurons followed by a linear layer, in the place of the pair
``LIFNode(), nn.Linear(...)``: the spikes between the two are never stored as numbers (see
:mod:`lightning_memopt.functional.neuron`). Parameters have the names, shapes and initial values of ``nn.Linear``, so a
``state_dict`` fits both ways.

A layer carries the membrane potential from call to call in its attribute ``v``; ``reset()`` it before an independent
sequence. The potential is no part of the ``state_dict``, and not a buffer, since DistributedDataParallel would send
those of one rank to all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_memopt.functional.neuron import check_neuron, if_linear, lif_linear
from lightning_memopt.ops.neuron import IF, LIF, NEURON_DTYPES
from lightning_memopt.surrogate import as_surrogate

__all__ = ["IFLinear", "LIFLinear"]


class _SpikingLinear(nn.Module):
    v: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        v_threshold: float,
        v_reset: float | None,
        detach_reset: bool,
        surrogate_function: object,
        step_mode: Literal["s", "m"],
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in NEURON_DTYPES:
            raise TypeError(f"{type(self).__name__} takes a dtype of float32, float16 or bfloat16, got {dtype}.")
        if step_mode not in ("s", "m"):
            raise ValueError(f'step_mode must be "s" (one step) or "m" (all steps), got {step_mode!r}.')
        self.in_features = in_features
        self.out_features = out_features
        self.v_threshold = v_threshold
        self.v_reset = v_reset
        self.detach_reset = detach_reset
        self.surrogate_function = as_surrogate(surrogate_function)
        self.step_mode = step_mode
        self.v = None
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(self.weight.new_empty(out_features)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias anew, as ``nn.Linear`` does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
            nn.init.uniform_(self.bias, -bound, bound)

    def reset(self) -> None:
        """Forget the potential: the next call starts from ``v_reset`` (0 if that is None)."""
        self.v = None

    def detach(self) -> None:
        """Keep the potential, cut its graph: the next call's gradients end at its start."""
        if self.v is not None:
            self.v = self.v.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Advance the neurons by all steps of ``x`` and multiply their spikes with the weight.

        Args:
            x: ``[T, ..., in_features]`` with at least one dimension between (``step_mode="m"``), or one step
                ``[..., in_features]`` (``"s"``); float32, float16 or bfloat16.

        Returns:
            ``[T, ..., out_features]`` or ``[..., out_features]`` in the dtype of the weight, or of autocast.

        Raises:
            TypeError: if ``x`` is no tensor, or has a dtype that neurons do not take.
            ValueError: if ``x`` does not fit the layer, or the potential left by the last call does not fit ``x``.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"{type(self).__name__} takes a tensor, got {type(x).__name__}.")
        steps = self.step_mode == "m"
        if x.dim() < 2 + steps or x.shape[-1] != self.in_features:
            expected = "[T, ..., K]" if steps else "[..., K]"
            raise ValueError(
                f"{type(self).__name__} with step_mode={self.step_mode!r} takes x of shape {expected} with at least "
                f"{2 + steps} dimensions and K = {self.in_features}, got {tuple(x.shape)}."
            )
        shape = x.shape[1:] if steps else x.shape
        if self.v is not None and self.v.shape != shape:
            raise ValueError(
                f"{type(self).__name__} holds the potential of a batch of shape {tuple(self.v.shape)}, but x is "
                f"{tuple(x.shape)}. Call reset() before an independent batch."
            )
        rows = math.prod(shape[:-1])
        v = None if self.v is None else self.v.reshape(rows, self.in_features)
        flat = x.reshape(x.shape[0], rows, shape[-1]) if steps else x.reshape(rows, shape[-1])
        y, v_final = self._project(flat, v, self.weight.t())
        # A view cannot be detached in place.
        self.v = v_final if v_final.shape == shape else v_final.view(shape)
        return y.view(*x.shape[:-1], self.out_features)

    def _project(self, x: Tensor, v: Tensor | None, weight_t: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"v_threshold={self.v_threshold}, v_reset={self.v_reset}, detach_reset={self.detach_reset}, "
            f"surrogate_function={self.surrogate_function}, step_mode={self.step_mode!r}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.v is not None:
            # The potential moves with the layer; its dtype and its values stay, so `fn` shows on a probe what it does.
            with torch.inference_mode(False), torch.enable_grad():
                probe = torch.empty(0, device=self.v.device, requires_grad=True)
                moved = fn(probe)
            # to_empty gives new memory, whose values do not come from the old ones: no potential is left.
            keeps_values = moved is probe or moved.grad_fn is not None
            self.v = self.v.to(moved.device) if keeps_values else None
        return self

    def _state_without_graph(self) -> dict[str, Any]:
        """The attributes, as deepcopy and pickle take them: they refuse tensors with a graph."""
        return {**self.__dict__, "v": None if self.v is None else self.v.detach()}

    def __getstate__(self) -> dict[str, Any]:
        return self._state_without_graph()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # By itself deepcopy asks __getstate__, which torch's parametrizations replace by one that refuses.
        copied = self.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self._state_without_graph(), memo)
        return copied


class IFLinear(_SpikingLinear):
    """Integrate-and-fire neurons and a linear layer: see :func:`~lightning_memopt.functional.neuron.if_linear`.

    Args:
        in_features: neurons, K.
        out_features: outputs, N.
        bias: whether the linear layer has one.
        v_threshold: potential at which a neuron spikes.
        v_reset: potential after a spike; None subtracts the threshold instead.
        detach_reset: let no gradient flow through the reset.
        surrogate_function: a surrogate of ours or of SpikingJelly's; None: ``Sigmoid()``.
        step_mode: ``"m"``: a call takes all time steps ``[T, ..., K]``; ``"s"``: one, ``[..., K]``.
        device: of the parameters.
        dtype: of the parameters: float32, float16 or bfloat16.

    Attributes:
        v: potential after the last call, float32; None before the first.

    Example:
        >>> layer = IFLinear(16, 4)
        >>> layer(torch.rand(8, 2, 16)).shape, layer.v.shape
        (torch.Size([8, 2, 4]), torch.Size([2, 16]))
        >>> layer.reset()
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        detach_reset: bool = False,
        surrogate_function: object = None,
        step_mode: Literal["s", "m"] = "m",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_neuron(IF, 2.0, v_threshold, v_reset, surrogate_function)
        neuron = v_threshold, v_reset, detach_reset, surrogate_function, step_mode
        super().__init__(in_features, out_features, bias, *neuron, device, dtype)

    def _project(self, x: Tensor, v: Tensor | None, weight_t: Tensor) -> tuple[Tensor, Tensor]:
        return if_linear(
            *(x, v, weight_t, self.bias),
            v_threshold=self.v_threshold,
            v_reset=self.v_reset,
            detach_reset=self.detach_reset,
            surrogate_function=self.surrogate_function,
        )


class LIFLinear(_SpikingLinear):
    """Leaky integrate-and-fire neurons and a linear layer: see :func:`~lightning_memopt.functional.neuron.lif_linear`.

    Args:
        in_features: neurons, K.
        out_features: outputs, N.
        bias: whether the linear layer has one.
        tau: time constant in steps, above 1.
        decay_input: whether the input is divided by ``tau`` as well.
        v_threshold: potential at which a neuron spikes.
        v_reset: potential after a spike, and the one that it decays towards; None subtracts the threshold instead, and
            it decays towards 0.
        detach_reset: let no gradient flow through the reset.
        surrogate_function: a surrogate of ours or of SpikingJelly's; None: ``Sigmoid()``.
        step_mode: ``"m"``: a call takes all time steps ``[T, ..., K]``; ``"s"``: one, ``[..., K]``.
        device: of the parameters.
        dtype: of the parameters: float32, float16 or bfloat16.

    Attributes:
        v: potential after the last call, float32; None before the first.

    Example:
        >>> layer = LIFLinear(16, 4, tau=3.0)
        >>> layer(torch.rand(8, 2, 16)).shape
        torch.Size([8, 2, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        tau: float = 2.0,
        decay_input: bool = True,
        v_threshold: float = 1.0,
        v_reset: float | None = 0.0,
        detach_reset: bool = False,
        surrogate_function: object = None,
        step_mode: Literal["s", "m"] = "m",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_neuron(LIF, tau, v_threshold, v_reset, surrogate_function)
        neuron = v_threshold, v_reset, detach_reset, surrogate_function, step_mode
        super().__init__(in_features, out_features, bias, *neuron, device, dtype)
        self.tau = tau
        self.decay_input = decay_input

    def _project(self, x: Tensor, v: Tensor | None, weight_t: Tensor) -> tuple[Tensor, Tensor]:
        return lif_linear(
            *(x, v, weight_t, self.bias),
            tau=self.tau,
            decay_input=self.decay_input,
            v_threshold=self.v_threshold,
            v_reset=self.v_reset,
            detach_reset=self.detach_reset,
            surrogate_function=self.surrogate_function,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tau={self.tau}, decay_input={self.decay_input}"
