"""SpikingJelly's neurons by our kernels, its surrogates as ours, and its reset of our layers."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import Tensor, nn

from lightning_memopt import BitSpikeCompressor, checkpoint_module, unwrap_module
from lightning_memopt.functional.neuron import if_linear, lif_linear
from lightning_memopt.fused_neurons import fuse_neurons, unfuse_neurons
from lightning_memopt.layers import LIFLinear
from lightning_memopt.surrogate import BUILT_IN, BuiltInSurrogate, as_surrogate
from tests.equality import assert_optimized_equals_plain, assert_same_tree, call
from tests.kernel_backends import Kernels

SURROGATES = [getattr(surrogate, kind.__name__) for kind in BUILT_IN]
NODES: dict[str, Callable[..., nn.Module]] = {
    "IF": neuron.IFNode,
    "LIF": lambda **kwargs: neuron.LIFNode(tau=3.3, **kwargs),
    "LIF, raw input": lambda **kwargs: neuron.LIFNode(tau=3.3, decay_input=False, **kwargs),
}

each_surrogate = pytest.mark.parametrize("kind", SURROGATES, ids=lambda kind: kind.__name__)


# ---------------------------------------------------------------------------------------------------------------------
# Surrogates


@each_surrogate
@pytest.mark.parametrize("alpha", [None, 0.7, 3.0])
def test_its_surrogates_are_ours(kind: Any, alpha: float | None) -> None:
    theirs = kind() if alpha is None else kind(alpha)
    ours = as_surrogate(theirs)
    assert isinstance(ours, BuiltInSurrogate)
    assert (type(ours).__name__, ours.alpha) == (kind.__name__, theirs.alpha)
    x = torch.linspace(-3, 3, 1001, dtype=torch.float64).requires_grad_()
    (grad,) = torch.autograd.grad(theirs(x).sum(), x)
    torch.testing.assert_close(ours.derivative(x.detach()), grad, rtol=1e-9, atol=1e-12)
    assert torch.equal(ours(x), theirs(x))


class Wider(surrogate.Sigmoid):
    @staticmethod
    def spiking_function(x: Tensor, alpha: float) -> Tensor:
        return surrogate.Sigmoid.spiking_function(x, alpha / 2)


def test_a_surrogate_derived_from_its_own_keeps_its_derivative() -> None:
    ours = as_surrogate(Wider())
    assert not isinstance(ours, BuiltInSurrogate)
    x = torch.linspace(-1, 1, 11)
    torch.testing.assert_close(ours.derivative(x), as_surrogate(surrogate.Sigmoid(2.0)).derivative(x))


def test_its_other_surrogates_are_taken_for_their_derivative() -> None:
    x = torch.linspace(-1, 1, 11).requires_grad_()
    rectangle = surrogate.Rect()
    (grad,) = torch.autograd.grad(rectangle(x).sum(), x)
    torch.testing.assert_close(as_surrogate(rectangle).derivative(x.detach()), grad)


def test_a_surrogate_that_does_not_spike_is_refused() -> None:
    with pytest.raises(ValueError, match="Set spiking=True"):
        as_surrogate(surrogate.Sigmoid(spiking=False))


PROJECTIONS = {
    "if_linear": (if_linear, functional.if_multi_step),
    "lif_linear": (lif_linear, functional.lif_multi_step),
}


@pytest.mark.parametrize("name", list(PROJECTIONS))
def test_a_call_of_its_fused_projection_is_a_call_of_ours(name: str) -> None:
    """As its documentation calls them, so that users change an import. Its own run on CUDA only."""
    ours, neurons = PROJECTIONS[name]
    parameters = {p.name: p.kind for p in inspect.signature(getattr(functional, name)).parameters.values()}
    del parameters["threads"]  # of a block: tunes its kernel
    assert {p.name: p.kind for p in inspect.signature(ours).parameters.values()} == parameters

    def gradients(project: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        x, v0 = torch.rand(3, 2, 8).mul_(2).requires_grad_(), torch.zeros(2, 8, requires_grad=True)
        weight_t = nn.Parameter(torch.randn(8, 4))
        y, v_final = project(x, v0, weight_t, surrogate_function=surrogate.ATan())
        return y, v_final, *torch.autograd.grad(y.square().sum() + v_final.sum(), (x, v0, weight_t))

    def unfused(x: Tensor, v: Tensor, weight_t: Tensor, *, surrogate_function: Any) -> tuple[Tensor, Tensor]:
        spikes, v_final, _ = neurons(x, v, surrogate_function=surrogate_function)
        return spikes @ weight_t, v_final

    torch.testing.assert_close(gradients(ours), gradients(unfused))


# ---------------------------------------------------------------------------------------------------------------------
# Nodes


@each_surrogate
@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("v_reset", [0.0, None, -0.2])
@pytest.mark.parametrize("detach_reset", [False, True])
def test_a_fused_node_is_the_plain_one_bit_for_bit(
    kind: Any, node: str, v_reset: float | None, detach_reset: bool
) -> None:
    def make() -> nn.Module:
        return NODES[node](
            v_threshold=0.7,
            v_reset=v_reset,
            detach_reset=detach_reset,
            surrogate_function=kind(),
            step_mode="m",
        )

    def step(model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        """Two calls, the second from the potential that the first left."""
        first, second = batch.args
        return model(first), model(second), model.v

    _, fused = assert_optimized_equals_plain(
        make,
        fuse_neurons,
        lambda: call(*(torch.randn(9, 3, 5, requires_grad=True) for _ in range(2))),
        step=step,
        between=functional.reset_net,
        steps=2,
    )
    assert type(fused) is not type(make())


class Network(nn.Module):
    """Convolutions on frames, neurons on sequences, as models of the library are written."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = layer.Conv2d(2, 4, 3, padding=1)
        self.norm1 = layer.BatchNorm2d(4)
        self.neurons1 = neuron.IFNode(surrogate_function=surrogate.ATan(), detach_reset=True)
        self.conv2 = layer.Conv2d(4, 3, 3, padding=1)
        self.neurons2 = neuron.LIFNode(v_reset=None)
        self.again = self.neurons2
        functional.set_step_mode(self, "m")

    def forward(self, x: Tensor) -> Tensor:
        x = self.neurons1(self.norm1(self.conv1(x)))
        return self.neurons2(self.conv2(x)).mean(0)


def batch() -> Any:
    return call(torch.randn(4, 2, 2, 6, 5) * 2)


@pytest.mark.parametrize("between", [functional.reset_net, functional.detach_net], ids=["reset", "carried"])
def test_a_network_trains_alike(between: Callable[[Any], object]) -> None:
    assert_optimized_equals_plain(Network, fuse_neurons, batch, between=between)


def test_a_fused_network_can_be_checkpointed() -> None:
    def treat(model: nn.Module) -> None:
        fuse_neurons(model)
        checkpoint_module(model, compressor=BitSpikeCompressor())

    assert_optimized_equals_plain(Network, treat, batch, between=functional.reset_net)


def test_fusing_and_unfusing_change_the_class_only() -> None:
    network = Network()
    objects, keys = list(network.modules()), list(network.state_dict())
    shown = repr(network)
    assert fuse_neurons(network) == 2
    assert fuse_neurons(network) == 2
    assert list(network.modules()) == objects
    assert list(network.state_dict()) == keys
    assert repr(network) == shown
    assert isinstance(network.neurons1, neuron.IFNode)
    assert type(network.neurons1) is not neuron.IFNode
    assert unfuse_neurons(network) == 2
    assert type(network.neurons1) is neuron.IFNode
    assert unfuse_neurons(network) == 0


def test_a_fused_neuron_under_a_checkpoint_must_be_unwrapped_first() -> None:
    network = Network()
    fuse_neurons(network)
    checkpoint_module(network.neurons1)
    with pytest.raises(ValueError, match="neurons1 was fused and has been changed since"):
        unfuse_neurons(network)
    unwrap_module(network.neurons1)
    assert unfuse_neurons(network) == 2


@pytest.mark.parametrize("checkpointed", [False, True])
def test_copies_and_pickles_are_fused_as_well(checkpointed: bool) -> None:
    network = Network().eval()
    fuse_neurons(network)
    if checkpointed:
        checkpoint_module(network.neurons1)
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert type(other.neurons1) is type(network.neurons1)
        assert type(other.neurons2) is type(network.neurons2)
        x = torch.randn(3, 1, 2, 6, 5)
        assert torch.equal(other(x), network(x))
        functional.reset_net(network)


class OwnNode(neuron.IFNode):
    pass


@pytest.mark.parametrize("other", [neuron.ParametricLIFNode, neuron.QIFNode, OwnNode])
def test_other_neurons_are_left_alone(other: Any) -> None:
    node = other()
    assert fuse_neurons(node) == 0
    assert type(node) is other


PLAIN_CALLS: dict[str, tuple[dict[str, Any], Callable[[], Tensor]]] = {
    "single step": ({"step_mode": "s"}, lambda: torch.randn(2, 3)),
    "all potentials": ({"step_mode": "m", "store_v_seq": True}, lambda: torch.randn(4, 2, 3)),
    "bfloat16": ({"step_mode": "m"}, lambda: torch.randn(4, 2, 3).bfloat16()),
    "other surrogate": ({"step_mode": "m", "surrogate_function": surrogate.Rect()}, lambda: torch.randn(4, 2, 3)),
    "smooth": (
        {"step_mode": "m", "surrogate_function": surrogate.Sigmoid(spiking=False)},
        lambda: torch.randn(4, 2, 3),
    ),
}


@pytest.mark.parametrize("name", list(PLAIN_CALLS))
def test_calls_that_the_kernels_do_not_serve_run_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, make = PLAIN_CALLS[name]
    plain, fused = (neuron.LIFNode(tau=3.3, **options) for _ in range(2))
    fuse_neurons(fused)
    monkeypatch.setattr("lightning_memopt.fused_neurons.lif_spike", None)
    x = make()
    assert torch.equal(plain(x), fused(x))
    assert torch.equal(plain.v, fused.v)
    if options.get("store_v_seq"):
        assert torch.equal(plain.v_seq, fused.v_seq)


class Strict(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).float() + 0 * x


class UnhashableSurrogate:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: Tensor) -> Tensor:
        return surrogate.ATan()(x)


# Constants and surrogates that SpikingJelly takes and our kernels do not.
FOREIGN: dict[str, dict[str, Any]] = {
    "integrator": {"v_threshold": float("inf")},
    "threshold a tensor": {"v_threshold": torch.tensor(0.7)},
    "reset infinite": {"v_reset": float("-inf")},
    "reset a tensor": {"v_reset": torch.tensor(0.1)},
    "no leak": {"tau": float("inf")},
    "tau 1": {"tau": 1.0},
    "tau a tensor": {"tau": torch.tensor(2.0)},
    "strict step": {"surrogate_function": Strict()},
    "scaled step": {"surrogate_function": lambda x: 2 * surrogate.ATan()(x)},
    "without hash": {"surrogate_function": UnhashableSurrogate()},
    "negative width": {"surrogate_function": surrogate.Sigmoid(alpha=-1.0)},
    "no width": {"surrogate_function": surrogate.ATan(alpha=0.0)},
}


@pytest.mark.parametrize("name", list(FOREIGN))
def test_neurons_that_the_kernels_do_not_serve_run_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_memopt.fused_neurons.lif_spike", None)

    def train(fuse: bool) -> tuple[Tensor, ...]:
        constants = dict(FOREIGN[name])
        node = neuron.LIFNode(step_mode="m", surrogate_function=constants.pop("surrogate_function", surrogate.ATan()))
        for constant, value in constants.items():
            setattr(node, constant, value)
        assert fuse_neurons(node) == 1 if fuse else True
        x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        spikes = node(x)
        (grad,) = torch.autograd.grad(spikes.sum() + node.v.sum(), x)
        return spikes, node.v, grad

    for fused, plain in zip(train(True), train(False), strict=True):
        assert torch.equal(fused.nan_to_num(7e7), plain.nan_to_num(7e7))


def test_an_input_without_dimensions_is_refused_as_before() -> None:
    node = neuron.IFNode(step_mode="m")
    fuse_neurons(node)
    with pytest.raises(IndexError):
        node(torch.tensor(1.0))


@pytest.mark.parametrize("make", [neuron.IFNode, neuron.LIFNode])
def test_a_fused_node_trains_after_a_call_in_inference_mode(make: Any) -> None:
    def train(fuse: bool) -> tuple[Tensor, ...]:
        node = make(step_mode="m")
        assert fuse_neurons(node) == 1 if fuse else True
        x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.inference_mode():
            node(x)
        return torch.autograd.grad(node(x).sum(), x)

    assert torch.equal(train(True)[0], train(False)[0])


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
def test_under_transforms_of_functions_a_fused_node_runs_as_before() -> None:
    plain, fused = (neuron.LIFNode(step_mode="m") for _ in range(2))
    fuse_neurons(fused)
    x = torch.randn(5, 4, 2, 3) * 2

    def spikes(node: Any) -> Tensor:
        def forward(x: Tensor) -> Tensor:
            node.reset()
            return node(x)

        return torch.func.vmap(forward)(x)

    assert torch.equal(spikes(fused), spikes(plain))


def test_a_batch_of_another_size_starts_anew_as_in_the_plain_node() -> None:
    plain, fused = (neuron.IFNode(step_mode="m", v_reset=0.1) for _ in range(2))
    fuse_neurons(fused)
    for size in (2, 3):
        x = torch.rand(4, size, 3)
        assert torch.equal(plain(x), fused(x))
        assert torch.equal(plain.v, fused.v)


def test_backward_of_a_fused_node_keeps_its_input_only() -> None:
    node = neuron.LIFNode(step_mode="m")
    fuse_neurons(node)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(8, 2, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        node(x)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr()}


@pytest.mark.filterwarnings("ignore:Trying to call `reset:UserWarning")
def test_its_reset_and_detach_reach_our_layers() -> None:
    model = nn.Sequential(LIFLinear(6, 4))
    x = torch.rand(3, 2, 6, requires_grad=True)
    model(x)
    functional.detach_net(model)
    assert model[0].v is not None
    assert not model[0].v.requires_grad
    functional.reset_net(model)
    assert model[0].v is None


# ---------------------------------------------------------------------------------------------------------------------
# Bits that a neuron made in its own pass


def neuron_then_region(*, emit_bits: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(neuron.LIFNode(step_mode="m"), nn.Sequential(nn.Linear(16, 4), nn.Sigmoid()))
    assert fuse_neurons(model, emit_bits=emit_bits) == 1
    checkpoint_module(model[1], compressor=BitSpikeCompressor(), compressed_args=(0,))
    return model


def test_a_region_stores_the_bits_that_the_neuron_made(kernels: Kernels) -> None:
    x = (3 * torch.rand(3, 5, 16, generator=torch.Generator().manual_seed(1))).to(kernels.device)
    results = {}
    for emit_bits in (False, True):
        model = neuron_then_region(emit_bits=emit_bits).to(kernels.device)
        kernels.launches.clear()
        y = model(x)
        y.sum().backward()
        packs = [entry for entry in kernels.launches if entry.startswith("bit_pack")]
        unpacks = [entry for entry in kernels.launches if entry.startswith("bit_unpack")]
        assert len(packs) == (0 if emit_bits else 1)
        assert len(unpacks) == 1
        results[emit_bits] = [y.detach(), *(p.grad for p in model.parameters())]
    assert_same_tree(results[False], results[True], name="results")


def test_bits_of_spikes_that_changed_since_are_not_used(kernels: Kernels) -> None:
    results = {}
    x = (3 * torch.rand(3, 5, 16, generator=torch.Generator().manual_seed(1))).to(kernels.device)
    for emit_bits in (False, True):
        model = neuron_then_region(emit_bits=emit_bits).to(kernels.device)
        spikes = model[0](x)
        with torch.no_grad():
            spikes.mul_(0)  # a change in place that keeps them binary
            spikes[0] = 1
        y = model[1](spikes)
        y.sum().backward()
        results[emit_bits] = [y.detach(), *(p.grad for p in model.parameters())]
    assert_same_tree(results[False], results[True], name="results")


def test_offered_bits_end_with_the_spikes() -> None:
    node = nn.Sequential(neuron.IFNode(step_mode="m"))
    fuse_neurons(node, emit_bits=True)
    spikes = node(torch.rand(2, 3, 8, requires_grad=True))
    bits = weakref.ref(spikes._offered_payload[0])
    assert bits() is not None
    del spikes
    functional.reset_net(node)
    gc.collect()
    assert bits() is None
    with torch.no_grad():
        assert not hasattr(node(torch.rand(2, 3, 8)), "_offered_payload")
