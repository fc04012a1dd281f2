"""Neurons by the CUDA sources against the loop in plain torch: on the CPU through a shim, on a GPU through CuPy."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from lightning_memopt.checkpointing import BitSpikeCompressor
from lightning_memopt.checkpointing.compressors import SpikePayload
from lightning_memopt.functional.neuron import if_linear, if_spike, lif_linear, lif_spike
from lightning_memopt.ops import neuron as neuron_ops
from lightning_memopt.ops.launch import Kernel, launch, use_backend
from lightning_memopt.ops.neuron import IF, LIF, LIF_DECAYED_INPUT, Neuron, backward_by_torch
from lightning_memopt.surrogate import BUILT_IN, ATan, PiecewiseQuadratic, SoftSign, SuperSpike, Surrogate
from tests.kernel_backends import Kernels

STEPS = (0, 1, 2, 3, 4, 5, 8, 16, 17, 33)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Derivatives without exp: every operation is rounded alike everywhere.
EXACT = (ATan, PiecewiseQuadratic, SoftSign, SuperSpike)

ops = torch.ops.lightning_memopt

steps = st.sampled_from(STEPS)
neurons = st.builds(
    Neuron,
    charge=st.sampled_from((IF, LIF_DECAYED_INPUT, LIF)),
    tau=st.sampled_from((2.0, 4.0, 1.1, 3.3, 20.0)),
    v_threshold=st.sampled_from((1.0, 0.7, -0.25)),
    v_reset=st.sampled_from((0.0, None, -0.3, 0.4)),
)
surrogates = st.builds(lambda kind, alpha: kind(alpha), st.sampled_from(BUILT_IN), st.sampled_from((0.5, 1.0, 2.7)))
seeds = st.integers(0, 2**31)


def eager_loop(
    x: Tensor, v: Tensor, neuron: Neuron, surrogate: Callable[[Tensor], Tensor], detach_reset: bool = False
) -> tuple[Tensor, Tensor]:
    """The equations, written as users write them."""
    rest = 0.0 if neuron.v_reset is None else neuron.v_reset
    spikes = []
    for current in x:
        if neuron.charge == IF:
            h = v + current
        elif neuron.charge == LIF_DECAYED_INPUT:
            h = v + (current - (v - rest)) / neuron.tau
        else:
            h = v - (v - rest) / neuron.tau + current
        spike = surrogate(h - neuron.v_threshold)
        spikes.append(spike)
        reset = spike.detach() if detach_reset else spike
        v = h - reset * neuron.v_threshold if neuron.v_reset is None else reset * neuron.v_reset + (1.0 - reset) * h
    return torch.stack(spikes) if spikes else torch.zeros_like(x), v


def run(
    x: Tensor,
    v: Tensor | float | None,
    neuron: Neuron,
    surrogate: object = None,
    detach_reset: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """The public function for `neuron`."""
    equation = {
        "v_threshold": neuron.v_threshold,
        "v_reset": neuron.v_reset,
        "detach_reset": detach_reset,
        "surrogate_function": surrogate,
        **kwargs,
    }
    if neuron.charge == IF:
        return if_spike(x, v, **equation)
    return lif_spike(x, v, tau=neuron.tau, decay_input=neuron.charge == LIF_DECAYED_INPUT, **equation)


def draw(
    *shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32, scale: float = 1.5
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)


def unpack_rows(bits: Tensor, columns: int) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    spread = (bits.unsqueeze(-1) >> places & 1).flatten(-2)
    assert not spread[..., columns:].any(), "padding bits are not zero"
    return spread[..., :columns]


def same(result: Tensor, expected: Tensor) -> bool:
    """Bit for bit, where all NaN are alike and -0.0 is 0.0."""
    return result.shape == expected.shape and torch.equal(result.nan_to_num(7e7), expected.nan_to_num(7e7))


# ---------------------------------------------------------------------------------------------------------------------
# Forward


@given(
    t=steps,
    rows=st.sampled_from((1, 2, 5)),
    columns=st.sampled_from((1, 7, 8, 9, 16, 31, 32, 33, 40, 264, 515)),
    dtype=st.sampled_from(DTYPES),
    neuron=neurons,
    wanted=st.sampled_from(((True, True), (True, False), (False, True))),
    starts=st.booleans(),
    seed=seeds,
)
@settings(max_examples=80)
@pytest.mark.sanitize
def test_spikes_bits_and_potentials_are_those_of_the_loop(
    kernels: Kernels,
    t: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    neuron: Neuron,
    wanted: tuple[bool, bool],
    starts: bool,
    seed: int,
) -> None:
    x = draw(t, rows, columns, seed=seed, device=kernels.device, dtype=dtype)
    v = draw(rows, columns, seed=seed + 1, device=kernels.device) if starts else None
    start = torch.full((rows, columns), neuron.start, device=kernels.device) if v is None else v
    expected, expected_v = eager_loop(x.float(), start, neuron, ATan())
    constants = neuron.charge, neuron.tau, neuron.v_threshold, neuron.v_reset
    spikes, bits, v_final = ops.neuron_forward(x, v, *constants, wanted[0], columns * wanted[1])
    assert same(v_final, expected_v)
    if wanted[0]:
        assert spikes.dtype == dtype
        assert torch.equal(spikes.float(), expected)
    if wanted[1]:
        assert bits.shape == (t, rows, math.ceil(columns / 8))
        assert torch.equal(unpack_rows(bits, columns).float(), expected)


@given(
    t=st.sampled_from((2, 3, 5, 17)), n=st.sampled_from((5, 8, 300)), neuron=neurons, at=st.integers(0, 16), seed=seeds
)
@settings(max_examples=25)
def test_all_steps_in_one_go_are_the_steps_in_two(
    kernels: Kernels, t: int, n: int, neuron: Neuron, at: int, seed: int
) -> None:
    x = draw(t, n, seed=seed, device=kernels.device)
    spikes, v = run(x, None, neuron)
    first, middle = run(x[: at % t], None, neuron)
    second, last = run(x[at % t :], middle, neuron)
    assert torch.equal(torch.cat([first, second]), spikes)
    assert same(last, v)


@pytest.mark.parametrize("n", [5, 16])
def test_nan_never_spikes_and_infinities_act_as_in_the_loop(kernels: Kernels, n: int) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 3.0, -0.0])
    x = values[torch.arange(6 * n) % 5].view(6, n).to(kernels.device)
    for neuron in (Neuron(), Neuron(v_reset=None), Neuron(LIF, v_reset=0.5), Neuron(LIF_DECAYED_INPUT, 3.0)):
        spikes, v = run(x, None, neuron)
        expected, expected_v = eager_loop(x, torch.full_like(x[0], neuron.start), neuron, ATan())
        assert torch.equal(spikes, expected)
        assert same(v, expected_v)
        assert not spikes[0, values[torch.arange(n) % 5].isnan().to(spikes.device)].any()


def test_a_potential_at_the_threshold_spikes(kernels: Kernels) -> None:
    below = torch.nextafter(torch.tensor(0.7), torch.tensor(0.0)).item()
    x = torch.tensor([[0.7, below] * 4], device=kernels.device)
    assert run(x, None, Neuron(v_threshold=0.7))[0].tolist() == [[1, 0] * 4]


@pytest.mark.parametrize("tau", [3.3, 1.1])
@pytest.mark.parametrize("charge", [LIF, LIF_DECAYED_INPUT])
def test_on_cuda_tau_is_multiplied_by_its_reciprocal_as_torch_does(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tau: float, charge: int
) -> None:
    """The CPU stands in for CUDA: both ways of the kernel run everywhere."""
    arguments = neuron_ops._tau_arguments
    monkeypatch.setattr(neuron_ops, "_tau_arguments", lambda neuron, _: arguments(neuron, torch.device("cuda")))
    inverse = float(numpy.float32(1) / numpy.float32(tau))
    x, v = draw(6, 1, 64, seed=1, device=kernels.device), draw(1, 64, seed=2, device=kernels.device)
    expected = v
    for current in x:
        h = expected - expected * inverse + current if charge == LIF else expected + (current - expected) * inverse
        expected = (1.0 - (h >= 1).float()) * h
    assert same(ops.neuron_forward(x, v, charge, tau, 1.0, 0.0, False, 64)[2], expected)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reserves address space without memory")
@pytest.mark.parametrize("rows", [False, True])
def test_positions_beyond_2_to_the_31st_are_addressed(kernels: Kernels, rows: bool) -> None:
    """The first block of a launch over 2^31 + 2048 positions: its second step lies 2^31 elements further on."""
    if kernels.device.type != "cpu":
        pytest.skip("takes 17 GB that are never touched")
    n = 2**31 + 2048

    def reserve(count: int, dtype: torch.dtype) -> Tensor:
        no_reserve = 0x4000
        memory = mmap.mmap(-1, count * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        return torch.frombuffer(memory, dtype=dtype)

    x, bits, v_final = (
        reserve(2 * n, torch.float32),
        reserve(2 * n // 8, torch.uint8),
        reserve(n, torch.float32),
    )
    width = 256 if rows else 2048
    x[:width], x[n : n + width] = 0.6, 0.6
    equation = (numpy.int32(IF), numpy.int32(0), numpy.float32(1), numpy.float32(1), numpy.int32(1), numpy.float32(0))
    kernel = Kernel("neuron.cu", "neuron_forward_rows_float32" if rows else "neuron_forward_float32", 256)
    shape = (numpy.int64(1), numpy.int64(n)) if rows else (numpy.int64(n),)
    head = (x, None, numpy.float32(0), None, bits, v_final)
    launch(kernel, 1, *head, *shape, numpy.int32(2), *equation, device=kernels.device)
    assert not bits[: width // 8].any()
    assert (bits[n // 8 : (n + width) // 8] == 255).all()
    assert not bits[(n + width) // 8 : (n + width) // 8 + 4096].any()
    assert not v_final[: width + 64].any()


# ---------------------------------------------------------------------------------------------------------------------
# Backward


class Rectangle(Surrogate):
    def derivative(self, x: Tensor) -> Tensor:
        return (x.abs() < 0.5).to(x.dtype)


def gradients(
    function: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    x: Tensor,
    v: Tensor,
    spike_weights: Tensor | None,
    v_weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    x, v = x.clone().requires_grad_(), v.clone().requires_grad_()
    spikes, v_final = function(x, v)[:2]
    loss = x.new_zeros((), dtype=torch.float32)
    if spike_weights is not None:
        loss = loss + (spikes.float() * spike_weights).sum()
    if v_weights is not None:
        loss = loss + (v_final * v_weights).sum()
    grads = torch.autograd.grad(loss, (x, v), materialize_grads=True)
    return grads[0], grads[1]


@given(
    t=st.sampled_from(STEPS[1:]),
    n=st.sampled_from((1, 2, 7, 8, 64, 515)),
    dtype=st.sampled_from(DTYPES),
    neuron=neurons,
    surrogate=surrogates,
    detach_reset=st.booleans(),
    arriving=st.sampled_from(((True, True), (True, False), (False, True))),
    seed=seeds,
)
@settings(max_examples=80)
@pytest.mark.sanitize
def test_gradients_are_those_of_the_loop(
    kernels: Kernels,
    t: int,
    n: int,
    dtype: torch.dtype,
    neuron: Neuron,
    surrogate: Surrogate,
    detach_reset: bool,
    arriving: tuple[bool, bool],
    seed: int,
) -> None:
    x, v = draw(t, n, seed=seed, device=kernels.device, dtype=dtype), draw(n, seed=seed + 1, device=kernels.device)
    # The gradients of 16-bit spikes are of 16 bits as well.
    weights = draw(t, n, seed=seed + 2, device=kernels.device, dtype=dtype).float() if arriving[0] else None
    v_weights = draw(n, seed=seed + 3, device=kernels.device) if arriving[1] else None
    result = gradients(lambda x, v: run(x, v, neuron, surrogate, detach_reset), x, v, weights, v_weights)
    expected = gradients(
        lambda x, v: eager_loop(x.float(), v, neuron, surrogate, detach_reset), x, v, weights, v_weights
    )
    for grad, other in zip(result, expected, strict=True):
        assert grad.dtype == other.dtype
        scale = float(other.float().abs().max())
        tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[grad.dtype] * max(scale, 1e-30)
        torch.testing.assert_close(grad, other, rtol=0, atol=tolerance)
        if dtype == torch.float32 and isinstance(surrogate, EXACT) and neuron.v_reset in (0.0, None):
            # Three gradients meet at a spike that resets to another value; autograd may add them in another order.
            assert same(grad, other)


@given(
    t=steps,
    n=st.sampled_from((0, 1, 6, 515)),
    dtype=st.sampled_from(DTYPES),
    neuron=neurons,
    surrogate=surrogates,
    detach_reset=st.booleans(),
    wants_v=st.booleans(),
    seed=seeds,
)
@settings(max_examples=40)
def test_kernel_reference_and_the_way_in_place_agree(
    kernels: Kernels,
    t: int,
    n: int,
    dtype: torch.dtype,
    neuron: Neuron,
    surrogate: Any,
    detach_reset: bool,
    wants_v: bool,
    seed: int,
) -> None:
    x = draw(t, n, seed=seed, device=kernels.device, dtype=dtype)
    grad_spike = draw(t, n, seed=seed + 1, device=kernels.device, dtype=dtype)
    grad_v_final = draw(n, seed=seed + 2, device=kernels.device)
    constants = neuron.charge, neuron.tau, neuron.v_threshold, neuron.v_reset, detach_reset
    constants = *constants, surrogate.index, surrogate.alpha, wants_v

    grad_x, grad_v = ops.neuron_backward(x, None, grad_spike, grad_v_final, *constants)
    with use_backend(kernels.device.type, None):
        reference_x, reference_v = ops.neuron_backward(x, None, grad_spike, grad_v_final, *constants)
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(grad_x, reference_x, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(grad_v, reference_v, rtol=2e-6, atol=2e-5)

    # In place, inside a larger buffer whose other elements nobody may touch.
    for guard in (8, 3):
        buffer = torch.full((2 * guard + t * n,), 7.0, dtype=dtype, device=kernels.device)
        inside = buffer[guard : guard + t * n].view(t, n).copy_(grad_spike)
        in_place_v = ops.neuron_backward_(x, None, inside, grad_v_final, *constants)
        assert torch.equal(inside, grad_x)
        assert torch.equal(in_place_v, grad_v)
        assert (buffer[:guard] == 7).all()
        assert (buffer[guard + t * n :] == 7).all()
    assert grad_v.shape == ((n,) if wants_v else (0,))


@pytest.mark.parametrize("surrogate", [ATan(), Rectangle()], ids=["built-in", "of one's own"])
def test_a_gradient_in_another_layout_is_overwritten_too(kernels: Kernels, surrogate: Any) -> None:
    def gradient() -> Tensor:
        return draw(6, 4, seed=1, device=kernels.device).t()

    x = draw(4, 6, seed=0, device=kernels.device)
    expected, _ = backward_by_torch(x, None, gradient(), None, Neuron(), False, surrogate.derivative, False)
    grad_spike = gradient()
    if isinstance(surrogate, ATan):
        ops.neuron_backward_(x, None, grad_spike, None, IF, 2.0, 1.0, 0.0, False, 1, surrogate.alpha, False)
    else:
        backward_by_torch(x, None, grad_spike, None, Neuron(), False, surrogate.derivative, False, in_place=True)
    assert grad_spike.stride() == (1, 4)
    assert torch.equal(grad_spike, expected)


@pytest.mark.parametrize(
    "neuron", [Neuron(), Neuron(LIF, 3.3, 0.7, None), Neuron(LIF_DECAYED_INPUT, 2.0, 1.0, -0.2)], ids=str
)
def test_a_surrogate_of_ones_own_runs_in_plain_torch(kernels: Kernels, neuron: Neuron) -> None:
    x, v = draw(9, 40, seed=0, device=kernels.device), draw(40, seed=1, device=kernels.device)
    weights, v_weights = draw(9, 40, seed=2, device=kernels.device), draw(40, seed=3, device=kernels.device)
    result = gradients(lambda x, v: run(x, v, neuron, Rectangle()), x, v, weights, v_weights)
    expected = gradients(lambda x, v: eager_loop(x, v, neuron, Rectangle()), x, v, weights, v_weights)
    torch.testing.assert_close(result, expected)


def test_only_the_gradients_asked_for_are_made(kernels: Kernels) -> None:
    x, v = draw(3, 8, seed=0, device=kernels.device), draw(8, seed=1, device=kernels.device)
    assert not if_spike(x, v)[0].requires_grad
    spikes, _ = if_spike(x.clone().requires_grad_(), v)
    spikes.sum().backward()
    assert v.grad is None
    v.requires_grad_()
    _, v_final = if_spike(x, v)
    v_final.sum().backward()
    assert v.grad is not None
    _, v_final = if_spike(x[:0], v)
    v.grad = None
    v_final.sum().backward()
    assert v.grad is not None
    assert (v.grad == 1).all()


def test_a_second_derivative_is_refused(kernels: Kernels) -> None:
    x = draw(3, 8, seed=0, device=kernels.device).requires_grad_()
    (grad,) = torch.autograd.grad(lif_spike(x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="Gradients of neurons can be taken once"):
        grad.sum().backward()


def test_backward_needs_the_input_and_the_first_potential_only(kernels: Kernels) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = draw(8, 4, 6, seed=0, device=kernels.device).requires_grad_()
    v = draw(4, 6, seed=1, device=kernels.device).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if_spike(x, v)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), v.data_ptr()}


# ---------------------------------------------------------------------------------------------------------------------
# Layouts and bits


def layouts(device: torch.device) -> dict[str, Tensor]:
    x = draw(3, 2, 6, 5, 4, seed=5, device=device)
    frames = draw(6, 4, 5, 4, seed=6, device=device).contiguous(memory_format=torch.channels_last)
    return {
        "contiguous": x,
        "channels last": frames.unflatten(0, (3, 2)),
        "transposed": x.transpose(1, 3),
        "time inside": x.transpose(0, 2),
        "sliced": x[:, :, 1:5, ::2],
        "every other step": x[::2],
        "expanded": x[:, :1].expand(3, 2, 6, 5, 4),
        "offset": x.flatten()[3 : 3 + 3 * 64].view(3, 8, 8),
        "one neuron": x.flatten()[:7],
        "no neurons": x[:, :0],
        "no steps": x[:0],
    }


@pytest.mark.parametrize("name", list(layouts(torch.device("cpu"))))
def test_any_layout_gives_the_same_spikes_where_they_belong(kernels: Kernels, name: str) -> None:
    x = layouts(kernels.device)[name]
    plain = x.contiguous()
    neuron = Neuron(LIF_DECAYED_INPUT, 3.3)
    v = draw(*x.shape[1:], seed=9, device=kernels.device)
    weights = draw(*x.shape, seed=10, device=kernels.device)
    spikes, v_final, bits = run(x, v, neuron, return_bits=True)
    expected, expected_v = run(plain, v, neuron)
    assert torch.equal(spikes, expected)
    assert torch.equal(v_final, expected_v)
    if name in ("contiguous", "channels last", "transposed"):
        assert spikes.stride() == x.stride()
        assert v_final.stride() == x[0].stride()
    assert not v_final._is_view(), "a view cannot be detached in place, as users do between batches"
    payload = SpikePayload(bits, tuple(spikes.shape), spikes.stride(), spikes.dtype, spikes.device)
    assert torch.equal(BitSpikeCompressor().decompress(payload), spikes)
    assert torch.equal(bits, BitSpikeCompressor().compress(spikes).data)
    result = gradients(lambda x, v: run(x, v, neuron), x, v, weights, None)
    for grad, other in zip(result, gradients(lambda x, v: run(x, v, neuron), plain, v, weights, None), strict=True):
        assert torch.equal(grad, other)


def without_steps(device: torch.device) -> dict[str, Tensor]:
    """Tensors without elements, which torch calls contiguous, in strides that overlap or leave gaps."""
    return {
        "expanded": torch.randn(3, 1, 8, device=device).expand(3, 40, 8)[:0],
        "gaps": torch.randn(3, 40, 17, device=device)[:0, :, ::2][..., :8],
        "time inside": torch.empty(8, 40, 0, device=device).permute(2, 1, 0),
        "time outside": torch.empty(0, 8, 40, device=device).transpose(1, 2),
    }


@pytest.mark.sanitize
@pytest.mark.parametrize("name", list(without_steps(torch.device("cpu"))))
@pytest.mark.parametrize("starts", [False, True])
def test_a_potential_is_dense_after_no_step_as_well(kernels: Kernels, name: str, starts: bool) -> None:
    x = without_steps(kernels.device)[name].requires_grad_()
    v = draw(40, 8, seed=0, device=kernels.device).requires_grad_() if starts else None
    spikes, v_final = if_spike(x, v, v_reset=0.5)
    assert spikes.shape == x.shape
    assert v_final.untyped_storage().nbytes() == v_final.nbytes
    assert torch.equal(v_final, torch.full_like(v_final, 0.5) if v is None else v)
    if v is not None:
        weights = draw(40, 8, seed=1, device=kernels.device)
        (grad,) = torch.autograd.grad((v_final * weights).sum(), v)
        assert torch.equal(grad, weights)
    if name == "time outside":
        assert v_final.stride() == x.stride()[1:]


def test_spikes_and_bits_are_made_in_one_pass(kernels: Kernels) -> None:
    kernels.launches.clear()
    spikes, _, bits = if_spike(draw(4, 2, 3, 4, seed=0, device=kernels.device), return_bits=True)
    assert kernels.launches == ["neuron_forward_float32"]
    assert not bits.requires_grad
    assert torch.equal(unpack_rows(bits, 96).float(), spikes.flatten())


def test_spikes_may_be_changed_in_place(kernels: Kernels) -> None:
    x = draw(2, 4, seed=0, device=kernels.device).requires_grad_()
    spikes, _ = if_spike(x * 1)
    spikes += x
    spikes.sum().backward()
    plain = x.detach().clone().requires_grad_()
    (if_spike(plain)[0] + plain).sum().backward()
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("v", [None, 0.4, 0.0, torch.tensor(0.4), torch.full((6,), 0.4, dtype=torch.bfloat16)], ids=str)
def test_a_first_potential_may_be_left_out_or_be_a_number(kernels: Kernels, v: Any) -> None:
    x = draw(4, 6, seed=0, device=kernels.device)
    start = torch.zeros(6) if v is None else torch.as_tensor(v, dtype=torch.float32).expand(6)
    if isinstance(v, Tensor):
        v = v.to(kernels.device)
    expected, expected_v = run(x, start.to(kernels.device), Neuron())
    spikes, v_final = run(x, v, Neuron())
    assert torch.equal(spikes, expected)
    assert torch.equal(v_final, expected_v)


# ---------------------------------------------------------------------------------------------------------------------
# As operations of torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [6, 8])
def test_operations_are_registered_correctly(kernels: Kernels, dtype: torch.dtype, columns: int) -> None:
    x = draw(3, 2, columns, seed=0, device=kernels.device, dtype=dtype)
    v, grad_v = (draw(2, columns, seed=i, device=kernels.device) for i in (1, 2))
    grad = draw(3, 2, columns, seed=3, device=kernels.device, dtype=dtype)
    neuron = LIF, 3.3, 1.0, None
    check = torch.library.opcheck
    for wanted in ((True, columns), (True, 0), (False, 2 * columns)):
        check(ops.neuron_forward.default, (x, v, *neuron, *wanted))
        check(ops.neuron_forward.default, (x, None, *neuron, *wanted))
    for wants_v in (True, False):
        check(ops.neuron_backward.default, (x, v, grad, grad_v, *neuron, False, 1, 2.0, wants_v))
        check(ops.neuron_backward.default, (x, None, None, grad_v, *neuron, True, 0, 4.0, wants_v))
        check(ops.neuron_backward_.default, (x, v, grad.clone(), None, *neuron, False, 6, 2.0, wants_v))


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_as_one_graph_forward_and_backward(kernels: Kernels, dynamic: bool) -> None:
    def step(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        spikes, v = if_spike(x * 2, v, surrogate_function=SoftSign())
        spikes, v, _ = lif_spike(spikes, v, tau=3.3, return_bits=True)
        return spikes, v

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for t, n in ((4, 8), (5, 6)) if dynamic else ((4, 8),):
        x, v = draw(t, n, seed=0, device=kernels.device), draw(n, seed=1, device=kernels.device)
        weights, v_weights = draw(t, n, seed=2, device=kernels.device), draw(n, seed=3, device=kernels.device)
        result = gradients(compiled, x, v, weights, v_weights)
        for grad, other in zip(result, gradients(step, x, v, weights, v_weights), strict=True):
            assert torch.equal(grad, other)


def test_one_graph_serves_all_batch_sizes(kernels: Kernels) -> None:
    graphs = CompileCounter()
    torch._dynamo.reset()
    step = torch.compile(
        lambda x: lif_spike(x, tau=3.3, return_bits=True), fullgraph=True, backend=graphs, dynamic=True
    )
    for batch in range(3, 9):
        x = draw(4, batch, 16, seed=batch, device=kernels.device)
        for result, expected in zip(step(x), lif_spike(x, tau=3.3, return_bits=True), strict=True):
            assert torch.equal(result, expected)
    assert graphs.frame_count == 1


class Misshapen(Surrogate):
    def __init__(self, result: Callable[[Tensor], object]) -> None:
        self.result = result

    def derivative(self, x: Tensor) -> Tensor:
        return self.result(x)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (lambda x: x[:1], ValueError, r"shape of its argument, \(8,\), but derivative\(\) returned \(1,\)"),
        (lambda x: x.sum(), ValueError, r"returned \(\)"),
        (lambda x: x.to("meta"), ValueError, "returned a tensor on meta"),
        (lambda x: None, TypeError, "returned None"),
    ],
    ids=["short", "one number", "elsewhere", "none"],
)
def test_a_derivative_that_does_not_fit_is_named(
    kernels: Kernels, result: Callable[[Tensor], object], error: type[Exception], message: str
) -> None:
    spikes, _ = if_spike(
        draw(4, 8, seed=0, device=kernels.device).requires_grad_(), surrogate_function=Misshapen(result)
    )
    with pytest.raises(error, match=message):
        spikes.sum().backward()


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
        lambda f, x: torch.func.vmap(f)(x.unsqueeze(0)),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
    ],
    ids=["grad", "vmap", "jvp"],
)
@pytest.mark.parametrize(
    "call",
    [
        lambda x: if_spike(x)[0],
        lambda x: lif_spike(x)[0],
        lambda x: if_linear(x, None, x.new_ones(8, 2))[0],
        lambda x: lif_linear(x, None, x.new_ones(8, 2))[0],
    ],
    ids=["if_spike", "lif_spike", "if_linear", "lif_linear"],
)
def test_transforms_of_functions_are_refused_in_words(kernels: Kernels, transform: Any, call: Any) -> None:
    with pytest.raises(RuntimeError, match=r"within a torch\.func transform .* Use eager autograd"):
        transform(call, draw(4, 8, seed=0, device=kernels.device))
    assert not kernels.launches


def test_a_potential_left_by_inference_mode_can_be_trained_from(kernels: Kernels) -> None:
    x = draw(4, 8, seed=0, device=kernels.device)
    with torch.inference_mode():
        _, v = if_spike(x)
    result = gradients(lambda x, _: if_spike(x, v), x, x[0], x, None)[0]
    expected = gradients(lambda x, _: if_spike(x, v.clone()), x, x[0], x, None)[0]
    assert torch.equal(result, expected)


def wrong_inputs() -> dict[str, tuple[Callable[[Tensor], object], type[Exception], str]]:
    return {
        "dtype": (
            lambda x: if_spike(x.double()),
            TypeError,
            r"float32, float16 or bfloat16, got torch.float64 of shape",
        ),
        "no dimension": (lambda x: if_spike(x[0, 0]), ValueError, r"shape \[T, ...\]"),
        "no tensor": (lambda x: if_spike([1.0]), TypeError, "if_spike takes x as a tensor, got list"),  # type: ignore[arg-type]
        "sparse": (lambda x: lif_spike(x.to_sparse()), TypeError, "lif_spike takes dense x, got torch.sparse_coo"),
        "sparse v": (lambda x: if_spike(x, x[0].to_sparse()), TypeError, "if_spike takes dense v"),
        "sparse weight": (
            lambda x: lif_linear(x, None, x.new_ones(8, 2).to_sparse()),
            TypeError,
            "lif_linear takes dense weight_t",
        ),
        "shape of v": (
            lambda x: if_spike(x, x[0, :3]),
            ValueError,
            r"v must have shape \(8,\).*got \(3,\).*reset first",
        ),
        "dtype of v": (lambda x: if_spike(x, x[0].int()), TypeError, "v must be floating point, got torch.int32"),
        "device of v": (lambda x: if_spike(x, x[0].to("meta")), ValueError, "v must be on .* got meta"),
        "kind of v": (lambda x: if_spike(x, "0"), TypeError, "v must be a tensor, a number or None"),  # type: ignore[arg-type]
        "tau": (lambda x: lif_spike(x, tau=1.0), ValueError, r"tau must be finite and above 1 .* got 1.0"),
        "tau nan": (lambda x: lif_spike(x, tau=math.nan), ValueError, "tau must be finite"),
        "tau beyond float32": (lambda x: lif_spike(x, tau=1e39), ValueError, "in float32, got 1e[+]39"),
        "threshold": (
            lambda x: if_spike(x, v_threshold=math.inf),
            ValueError,
            "v_threshold must be finite in float32, got inf",
        ),
        "threshold beyond float32": (lambda x: if_spike(x, v_threshold=-(10**400)), ValueError, "finite in float32"),
        "reset beyond float32": (lambda x: if_spike(x, v_reset=1e300), ValueError, "v_reset must be finite in float32"),
        "v beyond float32": (lambda x: if_spike(x, 1e300), ValueError, "v must be within the range of float32"),
        "reset": (lambda x: if_spike(x, v_reset=math.nan), ValueError, "v_reset must be finite"),
        "no number": (lambda x: if_spike(x, v_threshold=None), TypeError, "v_threshold must be a number"),  # type: ignore[arg-type]
        "surrogate": (lambda x: if_spike(x, surrogate_function=3), TypeError, "surrogate_function must be"),
        "op row": (
            lambda x: ops.neuron_forward(x, None, 0, 2.0, 1.0, 0.0, True, 3),
            ValueError,
            r"row must be 0 or divide the 8 elements of a step of x \(4, 8\), got 3",
        ),
        "op charge": (lambda x: ops.neuron_forward(x, None, 3, 2.0, 1.0, 0.0, True, 8), ValueError, "charge"),
        "op grad": (
            lambda x: ops.neuron_backward(x, None, x[:1], None, 0, 2.0, 1.0, 0.0, False, 0, 4.0, True),
            ValueError,
            r"grad_spike must have shape \(4, 8\)",
        ),
        "op grad dtype": (
            lambda x: ops.neuron_backward(x, None, x.half(), None, 0, 2.0, 1.0, 0.0, False, 0, 4.0, True),
            TypeError,
            "grad_spike must be torch.float32 for x of torch.float32, got torch.float16",
        ),
        "op surrogate": (
            lambda x: ops.neuron_backward(x, None, x, None, 0, 2.0, 1.0, 0.0, False, 7, 4.0, True),
            ValueError,
            "surrogate must be the index",
        ),
    }


@pytest.mark.parametrize("name", list(wrong_inputs()))
def test_wrong_input_is_named_and_nothing_is_launched(kernels: Kernels, name: str) -> None:
    call, error, message = wrong_inputs()[name]
    with pytest.raises(error, match=message):
        call(draw(4, 8, seed=0, device=kernels.device))
    assert not kernels.launches
