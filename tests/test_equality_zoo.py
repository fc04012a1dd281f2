"""Training a treated region is training the plain one, for every kind of module and every treatment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.checkpointing import (
    BitSpikeCompressor,
    BooleanSpikeCompressor,
    SparseSpikeCompressor,
    Uint8SpikeCompressor,
    checkpoint,
    checkpoint_module,
    is_checkpointed,
    unwrap_module,
)
from tests.equality import assert_optimized_equals_plain
from tests.zoo import CASES, C, Case, N, Net, sj_reset

COMPRESSORS = {
    "recompute": lambda: None,
    "nested": lambda: None,
    "bit": BitSpikeCompressor,
    "boolean": BooleanSpikeCompressor,
    "uint8": Uint8SpikeCompressor,
    "sparse": SparseSpikeCompressor,
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning"),
]


def treat(case: Case, treatment: str) -> Callable[[Any], None]:
    """The treatment of a case's regions, by name."""

    def apply(model: Any) -> None:
        if treatment == "function":
            model.run = checkpoint
            return
        for path in case.regions:
            region = model.get_submodule(path)
            if treatment == "nested":
                for child in region.children():
                    if not isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
                        checkpoint_module(child)
            compressor = COMPRESSORS[treatment]()
            assert checkpoint_module(region, compressor=compressor) is region
            assert is_checkpointed(region)

    return apply


@pytest.mark.parametrize(
    ("name", "treatment"), [pytest.param(n, t, id=f"{n}-{t}") for n, case in CASES.items() for t in case.treatments]
)
def test_optimized_equals_plain(name: str, treatment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    forwards = {"plain": 0, "optimized": 0}
    counting = "plain"

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            forwards[counting] += 1
            return original(self, *args, **kwargs)

        return forward

    # Counting on the class sees the recompute too, which hooks must not see.
    model = case.make_model()
    for region_class in {type(model.get_submodule(path)) for path in case.regions}:
        monkeypatch.setattr(region_class, "forward", counted(region_class.forward))

    def apply(model: nn.Module) -> None:
        nonlocal counting
        counting = "optimized"
        treat(case, treatment)(model)

    assert_optimized_equals_plain(
        case.make_model,
        apply,
        case.make_batch,
        step=case.step,
        backward=case.backward,
        between=case.between,
        steps=case.steps,
    )
    assert forwards["plain"] > 0
    if case.recomputes:
        assert forwards["optimized"] > forwards["plain"], "nothing was recomputed"
    else:
        assert forwards["optimized"] >= forwards["plain"]


def test_an_unwrapped_region_is_the_plain_one() -> None:
    case = CASES["batch_norm_1d"]

    def wrap_and_unwrap(model: Any) -> None:
        plain_class = type(model.block)
        treat(case, "nested")(model)
        for region in [model.block, *model.block]:
            assert unwrap_module(region) is region
            assert not is_checkpointed(region)
        assert type(model.block) is plain_class

    assert_optimized_equals_plain(case.make_model, wrap_and_unwrap, case.make_batch)


def test_wrapping_between_two_steps_changes_nothing() -> None:
    case = CASES["spikingjelly_lif_carried_over_steps"]
    steps = iter(range(100))

    def step(model: Any, batch: Any) -> Any:
        number = next(steps)
        if wrapping and number % 3 == 1:
            checkpoint_module(model.block, compressor=BitSpikeCompressor())
        if wrapping and number % 3 == 2:
            unwrap_module(model.block)
        return model(*batch.args)

    wrapping = False

    def start_wrapping(model: nn.Module) -> None:
        nonlocal wrapping
        wrapping = True

    assert_optimized_equals_plain(case.make_model, start_wrapping, case.make_batch, step=step, between=case.between)


# Time chunks ---------------------------------------------------------------------------------------------------------


def neuron_net(make_neuron: Callable[[Any], nn.Module]) -> Callable[[], nn.Module]:
    def make_model() -> nn.Module:
        from spikingjelly.activation_based import neuron

        return Net(make_neuron(neuron), encode=lambda x: x)

    return make_model


def long_sequence(steps: int) -> Callable[[], Any]:
    from tests.equality import call

    return lambda: call(torch.randn(steps, N, C, requires_grad=True))


NEURONS = {
    "if": lambda neuron: neuron.IFNode(step_mode="m"),
    "lif": lambda neuron: neuron.LIFNode(step_mode="m"),
    "lif_soft_reset": lambda neuron: neuron.LIFNode(v_reset=None, detach_reset=True, step_mode="m"),
    "parametric_lif": lambda neuron: neuron.ParametricLIFNode(step_mode="m"),
}


@pytest.mark.parametrize("compressor", ["recompute", "bit"])
@pytest.mark.parametrize(("steps", "chunks"), [(4, 2), (7, 3), (5, 5)])
@pytest.mark.parametrize("neuron", NEURONS)
def test_time_chunks_of_a_neuron_equal_the_whole(neuron: str, steps: int, chunks: int, compressor: str) -> None:
    # A learned time constant sums its gradient over time, so chunks sum it in another order.
    rtol = 1e-6 if neuron == "parametric_lif" else None
    assert_optimized_equals_plain(
        neuron_net(NEURONS[neuron]),
        lambda model: checkpoint_module(model.block, chunks=chunks, compressor=COMPRESSORS[compressor]()),
        long_sequence(steps),
        between=sj_reset,
        rtol=rtol,
    )


def test_time_chunks_of_a_neuron_carry_the_state_over_calls() -> None:
    from tests.zoo import several_calls

    assert_optimized_equals_plain(
        neuron_net(NEURONS["lif"]),
        lambda model: checkpoint_module(model.block, chunks=2),
        long_sequence(6),
        step=several_calls,
        between=sj_reset,
    )


def test_time_chunks_refuse_a_neuron_that_stores_its_potential_at_every_step() -> None:
    net: Any = neuron_net(lambda neuron: neuron.LIFNode(step_mode="m", store_v_seq=True))()
    checkpoint_module(net.block, chunks=3)
    with pytest.raises(ValueError, match="chunks"):
        net(torch.randn(7, N, C))
    assert net.block.v == 0.0


def test_time_chunks_of_linear_and_neuron_equal_the_whole_within_rounding() -> None:
    case = CASES["spikingjelly_lif_multi_step"]
    assert_optimized_equals_plain(
        case.make_model,
        lambda model: checkpoint_module(model.block, chunks=2, compressor=BitSpikeCompressor()),
        case.make_batch,
        between=case.between,
        rtol=1e-6,
    )


def test_time_chunks_along_the_second_dimension_equal_the_whole() -> None:
    case = CASES["sinabs_lif"]

    def make_model() -> nn.Module:
        net: Any = case.make_model()
        net.block = net.block[1]
        return net

    assert_optimized_equals_plain(
        make_model,
        lambda model: checkpoint_module(model.block, chunks=2, time_dim=1),
        case.make_batch,
        between=case.between,
        rtol=1e-6,  # the gradient of the time constant is a sum over time
    )


class TwoSequences(nn.Module):
    """A neuron driven by two sequences and one constant."""

    def __init__(self) -> None:
        super().__init__()
        from spikingjelly.activation_based import neuron

        self.neuron = neuron.LIFNode(step_mode="m")

    def forward(self, x: Tensor, gain: float, other: Tensor) -> dict[str, Tensor]:
        spikes = self.neuron(x * gain + other)
        return {"spikes": spikes, "twice": spikes + other}


def test_time_chunks_of_two_arguments_equal_the_whole() -> None:
    class Both(Net):
        def forward(self, x: Tensor) -> Any:
            h = self.stem(x)
            return self.run(self.block, h, 0.7, h.sigmoid())

    assert_optimized_equals_plain(
        lambda: Both(TwoSequences()),
        lambda model: checkpoint_module(model.block, chunks=3, chunked_args=(0, 2)),
        long_sequence(7),
        between=sj_reset,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": 5}, "chunks"),
        ({"chunks": 2, "chunked_args": (1,)}, "chunked_args"),
        ({"chunks": 2, "chunked_args": (0, 2), "time_dim": 0}, "chunked_args|length"),
    ],
)
def test_time_chunks_that_do_not_fit_are_refused_before_the_state_changes(options: Any, message: str) -> None:
    net: Any = neuron_net(NEURONS["lif"])()
    checkpoint_module(net.block, **options)
    with pytest.raises(ValueError, match=message):
        net(torch.randn(4, N, C))
    assert net.block.v == 0.0


@pytest.mark.parametrize("chunks", [0, -1, 1.5, "2"])
def test_a_number_of_chunks_that_is_no_positive_integer_is_refused(chunks: Any) -> None:
    block = nn.Linear(2, 2)
    with pytest.raises((ValueError, TypeError), match="chunks"):
        checkpoint_module(block, chunks=chunks)
    assert type(block) is nn.Linear
