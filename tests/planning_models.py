"""Small models for the tests of planning, and what must not change when a model is searched."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torchmetrics
from spikingjelly.activation_based import functional, layer, neuron
from torch import Tensor, nn

from lightning_memopt.checkpointing import is_checkpointed
from tests.equality import assert_same_tree, frozen, rng_state, state_of

STEPS, SAMPLES, CHANNELS = 8, 16, 64


class SpikingBlock(nn.Module):
    """Linear, then an integrate-and-fire neuron, on `[T, N, C]`."""

    def __init__(self, channels: int = CHANNELS) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)
        self.neuron = neuron.IFNode(step_mode="m")
        nn.init.kaiming_normal_(self.linear.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(self.linear(x))


class DeepSpikingBlock(nn.Module):
    """Linear-IF-Linear-IF on `[T, N, C]`."""

    def __init__(self, channels: int = CHANNELS) -> None:
        super().__init__()
        self.linear1 = nn.Linear(channels, channels)
        self.neuron1 = neuron.IFNode(step_mode="m")
        self.linear2 = nn.Linear(channels, channels)
        self.neuron2 = neuron.IFNode(step_mode="m")
        for linear in (self.linear1, self.linear2):
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron2(self.linear2(self.neuron1(self.linear1(x))))


def split_deep_block(module: nn.Module) -> tuple[nn.Module, ...]:
    if isinstance(module, DeepSpikingBlock):
        return (module.linear1, module.neuron1, module.linear2, module.neuron2)
    return ()


def is_if_neuron(module: nn.Module) -> bool:
    return isinstance(module, neuron.BaseNode)


def spikes(*shape: int, rate: float = 0.3) -> Tensor:
    """Bernoulli spikes, `[T, N, C]` by default."""
    return torch.bernoulli(torch.full(shape or (STEPS, SAMPLES, CHANNELS), rate))


def loss_from_rest(batch: Tensor) -> Callable[[nn.Module], Tensor]:
    """A training step's loss: neurons start from rest, the loss is the number of spikes."""

    def forward(model: nn.Module) -> Tensor:
        functional.reset_net(model)
        loss: Tensor = model(batch).sum()
        return loss

    return forward


class NoisyNetwork(nn.Module):
    """A network that writes to everything a forward can write to.

    Batch norm statistics, dropout, neuron states carried from call to call, a metric, a counter, a list, a moving
    average kept as a parameter, and the random numbers of Python, NumPy and torch.
    """

    def __init__(self, blocks: int = 3, channels: int = CHANNELS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NoisyBlock(channels) for _ in range(blocks))
        self.average = nn.Parameter(torch.ones(channels), requires_grad=False)
        self.metric = torchmetrics.MeanMetric()
        self.calls = 0
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(random.random() + float(np.random.rand()))
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.detach().mean(dim=(0, 1)), alpha=0.1)
        self.metric.update(x.detach().mean())
        return x


class NoisyBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = layer.Linear(channels, channels, step_mode="m")
        self.norm = layer.BatchNorm1d(channels, step_mode="m")
        self.dropout = nn.Dropout(0.25)
        self.neuron = neuron.LIFNode(step_mode="m", detach_reset=True)

    def forward(self, x: Tensor) -> Tensor:
        # Batch norm of SpikingJelly wants [T, N, C, L].
        y = self.norm(self.linear(x).unsqueeze(-1)).squeeze(-1)
        return self.dropout(self.neuron(y))


def noisy_parts(module: nn.Module) -> tuple[nn.Module, ...]:
    return (module.linear, module.norm, module.neuron) if isinstance(module, NoisyBlock) else ()


def used_noisy_network() -> NoisyNetwork:
    """A noisy network in the middle of a training: gradients, states and history are there, one block is in eval."""
    network = NoisyNetwork()
    network(spikes()).sum().backward()
    for module in network.modules():
        if isinstance(module, neuron.BaseNode):
            module.detach()
    network.blocks[1].norm.eval()
    network.blocks[2].linear.bias.requires_grad_(False)
    return network


class Unchanged:
    """Takes note of a model and of all random numbers; :meth:`check` asserts that both are as they were."""

    def __init__(self, model: nn.Module, *tensors: Tensor) -> None:
        self._model = model
        self._tensors = tensors
        self._before = self._look()
        self._identities = self._objects()

    def check(self, *, treatments: bool = True) -> None:
        """Assert that nothing changed; with ``treatments=False`` regions may have been checkpointed."""
        assert_same_tree(self._before, self._look(), name="the model")
        now = self._objects()
        for name in self._identities:
            if name != "treatments" or treatments:
                assert now[name] == self._identities[name], name

    def _look(self) -> Any:
        return frozen({**state_of(self._model), "random": rng_state(), "tensors": [t.grad for t in self._tensors]})

    def _objects(self) -> dict[str, Any]:
        parameters = list(self._model.parameters())
        return {
            "treatments": [(type(m), is_checkpointed(m)) for m in self._model.modules()],
            "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in self._model.modules()],
            "parameters": [(id(p), p.requires_grad) for p in parameters],
            "gradients": [id(t.grad) for t in (*parameters, *self._tensors)],
            "gradient hooks": [len(p._post_accumulate_grad_hooks or ()) for p in parameters],
        }
