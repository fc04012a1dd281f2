"""Estimates from numbers agree with what PyTorch stores and allocates."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader

from lightning_memopt import checkpoint_module, estimate_memory
from lightning_memopt.accounting import (
    TRANSFORMERS,
    MemoryBreakdown,
    MemoryEstimate,
    Transformer,
    optimizer_state_bytes,
    parameter_count,
    parameter_shapes,
    suggest,
)
from lightning_memopt.accounting.estimate import Training, estimate_transformer
from lightning_memopt.accounting.estimate_module import estimate_module
from lightning_memopt.accounting.suggest import checkpoint_blocks
from lightning_memopt.accounting.transformer import buffer_bytes, precision_of, training_tape
from lightning_memopt.cli import main
from lightning_memopt.measuring import mark_memory, measure_memory
from tests.transformer_models import Decoder

SMALL: dict[str, Any] = {
    "vocabulary": 320,
    "width": 64,
    "layers": 3,
    "heads": 4,
    "sequence_length": 32,
    "batch_size": 3,
}
LLAMA: dict[str, Any] = {
    "gated": True,
    "activation": "silu",
    "tied": False,
    "bias": False,
    "positions": "rotary",
    "feed_forward": 176,
}
MODELS = {
    "gpt": Transformer(**SMALL),
    "gpt, eager": Transformer(**SMALL, attention="eager"),
    "gpt, eager, dropout, one layer for q k v": Transformer(**SMALL, attention="eager", dropout=0.1, fused_qkv=True),
    "gpt, untied, without bias": Transformer(**SMALL, tied=False, bias=False),
    "llama": Transformer(**SMALL, **LLAMA, norm="rmsnorm-float32", kv_heads=2),
    "llama, torch's norm, eager": Transformer(**SMALL, **LLAMA, norm="rmsnorm", kv_heads=2, attention="eager"),
    "llama, torch's norm, one layer for q k v": Transformer(**SMALL, **LLAMA, norm="rmsnorm", fused_qkv=True),
    "relu, gated": Transformer(**SMALL, activation="relu", gated=True),
    "relu, loss in 16 bits": Transformer(**SMALL, activation="relu", float32_loss=False),
}
DTYPES = {
    "64-true": torch.float64,
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.float32,
}


def autocast(precision: str) -> contextlib.AbstractContextManager[Any]:
    mixed = precision.endswith("mixed")
    return torch.autocast("cpu", dtype=torch.bfloat16) if mixed else contextlib.nullcontext()


def saved_bytes(network: Decoder) -> int:
    """Bytes of all storages that autograd saves in a forward pass, without parameters, buffers and the batch."""
    model, device = network.model, network.embedding.weight.device
    tokens = torch.randint(model.vocabulary, (model.batch_size, model.sequence_length), device=device)
    known = {t.untyped_storage()._cdata for t in (*network.parameters(), *network.buffers(), tokens)}
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # The kernels' random numbers: 24 bytes.
        if storage._cdata not in known and tensor.dtype != torch.uint64:
            storages[storage._cdata] = storage
        # Not the tensor: an output that its own node saves would keep itself alive.

    with saved_tensors_hooks(note, lambda _: None):
        network.loss(tokens, tokens)
    return sum(storage.nbytes() for storage in storages.values())


def expected_bytes(model: Transformer, precision: str, **where: Any) -> int:
    tape = training_tape(model, precision_of(precision), **where)
    copies = sum(weight.copy for operation in tape.operations for weight in operation.weights)
    return sum(tape.saved_bytes().values()) + copies


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_buffers_are_those_of_the_module(name: str) -> None:
    model = MODELS[name]
    network = Decoder(model)
    assert sorted(map(math.prod, parameter_shapes(model).values())) == sorted(p.numel() for p in network.parameters())
    assert buffer_bytes(model, precision_of("32-true")) == sum(buffer.nbytes for buffer in network.buffers())


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_are_exact_on_the_cpu(name: str, precision: str) -> None:
    with autocast(precision):
        saved = saved_bytes(Decoder(MODELS[name]).to(DTYPES[precision]))
    assert saved == expected_bytes(MODELS[name], precision, device="cpu")


@pytest.fixture
def cuda_without_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake tensors of CUDA, whose kernels are chosen as on a device: attention is flash attention."""

    def flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if torch.is_autocast_enabled("cuda"):
            q, k, v = (part.to(torch.get_autocast_dtype("cuda")) for part in (q, k, v))
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, options["dropout_p"], options["is_causal"])[
            0
        ]

    monkeypatch.setattr(F, "scaled_dot_product_attention", flash)
    before = torch.get_autocast_dtype("cuda")
    with FakeTensorMode():
        yield
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", before)


@pytest.mark.parametrize("weights", ["bf16-true", "bf16-mixed", "bf16-mixed under FSDP"])
@pytest.mark.parametrize("name", [*MODELS, "gpt, dropout"])
def test_saved_bytes_are_exact_on_cuda(name: str, weights: str, cuda_without_a_device: None) -> None:
    model = Transformer(**SMALL, dropout=0.1) if name == "gpt, dropout" else MODELS[name]
    if model.norm == "rmsnorm" and not hasattr(torch.ops.aten, "_fused_rms_norm"):
        pytest.skip("torch.nn.RMSNorm has no kernel in this version")
    precision, _, sharded = weights.partition(" ")
    dtype = torch.bfloat16 if sharded else DTYPES[precision]
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            network = Decoder(model)
    finally:
        torch.set_default_dtype(torch.float32)
    if precision == "bf16-mixed":
        # torch.autocast() asks for a device.
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", True)
    saved = saved_bytes(network)
    assert saved == expected_bytes(model, precision, device="cuda", cast_by_autocast=not sharded)


@pytest.mark.parametrize("checkpointing", ["keep", "recompute_cheap", "recompute"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["gpt", "gpt, eager, dropout, one layer for q k v", "llama"])
def test_peak_of_a_step_is_within_one_percent(name: str, precision: str, checkpointing: Any) -> None:
    model = replace(MODELS[name], vocabulary=512, width=96, layers=4, sequence_length=64, batch_size=4)
    network = Decoder(model).to(DTYPES[precision])
    if checkpointing != "keep":
        for block in network.blocks:
            checkpoint_module(block, treatment=checkpointing)
    tokens = torch.randint(model.vocabulary, (model.batch_size, model.sequence_length))
    targets = tokens.clone()
    optimizer = torch.optim.AdamW(network.parameters())

    def step() -> None:
        with autocast(precision):
            loss = network.loss(tokens, targets)
        mark_memory("forward")
        optimizer.zero_grad()
        loss.backward()
        mark_memory("backward")
        optimizer.step()
        mark_memory("optimizer")

    step()
    step()
    report = measure_memory(step, device="cpu")
    ours = [*network.parameters(), *network.buffers(), tokens, targets, *(p.grad for p in network.parameters())]
    ours += [entry for state in optimizer.state.values() for entry in state.values()]
    others = report.start_bytes - sum(tensor.nbytes for tensor in ours)
    forward, backward, stepped = report.marks
    estimate = estimate_memory(model, precision=precision, checkpointing=checkpointing, device="cpu")
    close = 0.01
    assert estimate.peak_bytes == pytest.approx(report.peak_bytes - others, rel=close)
    assert estimate.at("forward end").total_bytes == pytest.approx(forward.bytes - others, rel=close)
    assert estimate.at("backward end").total_bytes == pytest.approx(backward.bytes - others, rel=close)
    assert estimate.at("optimizer step").total_bytes == pytest.approx(stepped.peak_bytes - others, rel=close)


def test_lightning_keeps_gradients_through_the_next_forward_pass() -> None:
    there: list[bool] = []

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Tensor) -> Tensor:
            there.append(self.layer.weight.grad is not None)
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(
        accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Model(), DataLoader(torch.ones(3, 2)))
    assert there == [False, True, True]
    model = MODELS["gpt"]
    kept, cleared = (estimate_memory(model, gradients_in_forward=kept).at("forward end") for kept in (True, False))
    assert (kept.gradients, cleared.gradients) == (4 * parameter_count(model), 0)


def test_published_models_have_their_published_sizes() -> None:
    counts = {name: parameter_count(model) for name, model in TRANSFORMERS.items()}
    assert counts == {
        "gpt2": 124_439_808,
        "gpt2-medium": 354_823_168,
        "gpt2-large": 774_030_080,
        "gpt2-xl": 1_557_611_200,
        "llama-2-7b": 6_738_415_616,
        "llama-2-13b": 13_015_864_320,
        "llama-2-70b": 68_976_648_192,
        "llama-3-8b": 8_030_261_248,
        "llama-3-70b": 70_553_706_496,
    }


def test_static_bytes_of_a_parameter_are_those_of_the_precision() -> None:
    model = TRANSFORMERS["llama-2-7b"]
    for precision, static in (("32-true", 16), ("bf16-mixed", 16), ("bf16-true", 8), ("64-true", 32)):
        end = estimate_memory(model, precision=precision).at("backward end")
        held = end.parameters + end.gradients + end.optimizer_state
        assert held / parameter_count(model) == pytest.approx(static, rel=1e-5)


def test_tensor_parallelism_divides_what_heads_and_columns_store() -> None:
    """Korthikanti et al. 2022: per token and width 34 bytes become 10 + 24 / t, with sequence parallelism 34 / t."""
    model = Transformer(1024, 512, 2, 8, sequence_length=64, attention="eager", dropout=0.1, fused_qkv=True)
    scores = 5 * 8 * 64

    def stored(**how: Any) -> float:
        sizes = training_tape(model, precision_of("bf16-true"), **how).saved_bytes()
        blocks = sum(size for module, size in sizes.items() if module.startswith("blocks."))
        return blocks / (model.layers * model.tokens)

    statistics = 2 * 2 * 4  # of two norms, per token
    assert stored() == 34 * 512 + scores + statistics
    assert stored(tensor_parallel=4) == (10 + 24 / 4) * 512 + scores / 4 + statistics
    assert stored(tensor_parallel=4, sequence_parallel=True) == 34 / 4 * 512 + scores / 4 + statistics / 4


def test_sharding_divides_what_it_shards() -> None:
    model = TRANSFORMERS["llama-2-7b"]
    count = parameter_count(model)
    full = estimate_memory(model, strategy="fsdp_full_shard", devices=8, precision="bf16-mixed")
    end = full.at("backward end")
    assert (end.parameters, end.gradients) == (4 * count // 8, 4 * count // 8)
    assert end.optimizer_state == -(-optimizer_state_bytes("AdamW", parameter_shapes(model).values()) // 8)
    assert full.peak.autocast_copies == 0  # weights are gathered in 16 bits
    hybrid = estimate_memory(
        model, strategy="fsdp_hybrid_shard", devices=64, devices_per_node=8, precision="bf16-mixed"
    )
    assert hybrid.peak == full.peak
    gathered = estimate_memory(model, strategy="fsdp_shard_grad_op", devices=8, precision="bf16-mixed")
    assert gathered.at("forward end").communication == 2 * count
    ddp = estimate_memory(model, strategy="ddp", devices=8)
    views = estimate_memory(model, strategy="ddp_gradient_as_bucket_view", devices=8)
    alone = estimate_memory(model)
    assert ddp.peak_bytes - alone.peak_bytes == ddp.peak.communication == 4 * count
    assert views.at("optimizer step") == alone.at("optimizer step")
    assert views.peak.gradients == 4 * count  # they are never freed


def test_gradients_are_added_to_where_batches_are_accumulated() -> None:
    model = MODELS["gpt"]
    step = estimate_memory(model, accumulate_grad_batches=4, gradients_in_forward=False)
    assert step.at("forward end").gradients == step.peak.gradients == 4 * parameter_count(model)


@pytest.mark.parametrize("name", ["gpt, eager, dropout, one layer for q k v", "llama"])
def test_a_suggestion_saves_what_its_estimate_says(name: str) -> None:
    model = replace(MODELS[name], batch_size=8)
    settings = {"precision": "32-true", "devices": 4}
    now = estimate_memory(model, **settings).peak_bytes
    found = {each.change: each for each in suggest(model, **settings)}
    assert all(each.saves_bytes == now - each.peak_bytes > 0 for each in found.values())
    assert all(each.caveat for each in found.values())
    prices = [each.price for each in found.values()]
    assert prices == sorted(prices, key=["nothing", "time", "accuracy"].index)
    again = estimate_memory(model, **settings, checkpointing="recompute")
    assert found["checkpointing='recompute'"].peak_bytes == again.peak_bytes
    sharded = estimate_memory(model, **settings, strategy="fsdp_full_shard")
    assert found["strategy='fsdp_full_shard'"].peak_bytes == sharded.peak_bytes
    assert ("attention='sdpa'" in found) == (model.attention == "eager")


def test_suggestions_for_a_module_are_what_the_changed_step_takes() -> None:
    layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model, batch = nn.Sequential(*layers), torch.randn(512, 64)

    def measured(**changed: Any) -> int:
        twin = copy.deepcopy(model)
        changed.get("treat", id)(twin)
        optimizer = torch.optim.AdamW(twin.parameters())

        def step() -> None:
            loss = twin(batch).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        step()
        breakdown = measure_memory(step, model=twin, optimizer=optimizer, batch=[batch]).breakdown
        assert breakdown is not None
        return breakdown.peak.total_bytes - breakdown.peak.other

    found = {each.change: each for each in suggest(model, batch, optimizer=torch.optim.AdamW, device="cpu")}
    assert next(iter(found)) == "MemoryOptimization()"
    recomputed = found["MemoryOptimization()"]
    assert recomputed.peak_bytes == pytest.approx(measured(treat=checkpoint_blocks), rel=0.02)
    assert recomputed.saves_bytes == pytest.approx(measured() - recomputed.peak_bytes, rel=0.05)
    state = sum(parameter.numel() for parameter in model.parameters()) * 4
    assert found["optimizer='Lion'"].saves_bytes == pytest.approx(state, rel=0.01)
    assert {each.price for each in found.values()} == {"time", "accuracy"}
    done = suggest(model, batch, precision="bf16-true", treat=checkpoint_blocks, device="cpu")
    assert not any("precision" in each.change or "check" in each.change for each in done)


def test_nothing_is_suggested_that_does_not_work_or_is_done() -> None:
    model = TRANSFORMERS["llama-2-7b"]
    found = {each.change for each in suggest(model, strategy="fsdp_full_shard", devices=8, checkpointing="recompute")}
    assert not any("bitsandbytes" in change or "fsdp" in change or "checkpointing" in change for change in found)
    assert "batch_size=0, accumulate_grad_batches=2" not in found


@pytest.mark.parametrize(
    ("batch_size", "change"),
    [
        (6, "batch_size=3, accumulate_grad_batches=4"),
        (9, "batch_size=3, accumulate_grad_batches=6"),
        (7, "batch_size=1, accumulate_grad_batches=14"),
    ],
)
def test_a_smaller_batch_keeps_the_effective_one(batch_size: int, change: str) -> None:
    model = replace(MODELS["llama"], batch_size=batch_size)
    assert change in {each.change for each in suggest(model, accumulate_grad_batches=2)}


def test_estimates_are_read_back_from_json() -> None:
    estimate = estimate_memory(MODELS["llama"], precision="bf16-mixed")
    assert MemoryEstimate.from_json(estimate.to_json()) == estimate
    content = json.loads(estimate.to_json())
    assert content["peak"]["total_bytes"] == content["peak_bytes"] == estimate.peak_bytes
    assert sum(estimate.peak.activations_by_module.values()) == estimate.peak.activations
    content["peak"]["gradients"] += 1
    with pytest.raises(ValueError, match="add up to"):
        MemoryEstimate.from_json(json.dumps(content))
    with pytest.raises(ValueError, match="no valid JSON"):
        MemoryBreakdown.from_json("{")
    with pytest.raises(ValueError, match=r"has no holes; it has .*activations"):
        MemoryBreakdown.from_json('{"holes": 1}')
    with pytest.raises(ValueError, match="gradients are negative"):
        MemoryBreakdown(gradients=-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": -64}, r"width=-64 .*whole number from 1 on"),
        ({"heads": 5}, r"heads=5 do not divide width=64; accepted are 1, 2, 4, 8, 16, 32, 64"),
        ({"kv_heads": 3}, r"kv_heads=3 do not divide heads=4; accepted are 1, 2, 4"),
        ({"dropout": 1.5}, r"dropout=1.5 .*probability"),
        ({"dropout": "0.1"}, r"dropout='0.1' .*probability"),
        ({"gated": "no"}, r"gated='no' .*True, False"),
        ({"bias": 1}, r"bias=1 .*True, False"),
        ({"norm": "batch"}, r"norm='batch' .*'layernorm', 'rmsnorm', 'rmsnorm-float32'"),
        ({"heads": 64, "positions": "rotary"}, r"width / heads = 1 is odd"),
    ],
)
def test_an_impossible_model_is_answered_with_what_is_accepted(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Transformer(**{**SMALL, **change})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "transformer-engine"}, r"accepted are '64-true', '32-true', .*short forms '64'"),
        ({"strategy": "deepspeed"}, r"strategy='deepspeed' .*'fsdp_full_shard'"),
        ({"checkpointing": "half"}, r"'keep', 'recompute_cheap', 'recompute'"),
        ({"device": "tpu"}, r"'cuda', 'cpu'"),
        ({"fused": "yes"}, r"fused='yes' .*True, False"),
        ({"sequence_parallel": 1}, r"sequence_parallel=1 .*True, False"),
        ({"devices": 0}, r"devices=0 .*whole number from 1 on"),
        ({"devices": 4, "tensor_parallel": 3}, r"tensor_parallel=3 does not divide devices=4"),
        ({"devices": 8, "tensor_parallel": 8}, r"does not divide heads=4, kv_heads=4; accepted .* 1, 2, 4"),
        ({"strategy": "fsdp_hybrid_shard", "devices": 8}, r"devices_per_node=None has to divide devices=8"),
        ({"sequence_parallel": True}, r"needs tensor_parallel of 2 or more"),
        ({"optimizer": "Lion", "fused": True}, r"fused=True is not accepted with Lion; torch has it for Adam"),
    ],
)
def test_an_impossible_training_is_answered_with_what_is_accepted(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_memory(MODELS["gpt"], **settings)
    with pytest.raises(ValueError, match=message):
        suggest(MODELS["gpt"], **settings)


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "message"),
    [
        ((MODELS["gpt"], 1), {}, TypeError, "takes no example"),
        ((MODELS["gpt"],), {"loss": len}, TypeError, "no setting 'loss' for this model; it takes precision, optimizer"),
        ((nn.Linear(2, 2),), {}, ValueError, "of a Linear needs an example"),
        ((nn.Linear(2, 2), torch.ones(2)), {"devices": 2}, TypeError, "no setting 'devices' .* takes precision"),
        (("gpt2",), {}, TypeError, "got str"),
    ],
)
def test_what_cannot_be_estimated_is_refused(
    arguments: tuple[Any, ...], settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        estimate_memory(*arguments, **settings)


def test_the_same_name_estimates_a_module_from_an_example() -> None:
    layer, batch = nn.Linear(64, 64), torch.ones(8, 64)
    expected = estimate_module(layer, batch, optimizer=torch.optim.AdamW, device="cpu")
    assert estimate_memory(layer, batch, optimizer=torch.optim.AdamW, device="cpu") == expected
    assert expected.peak.optimizer_state == 2 * expected.peak.parameters + 8  # two counts of steps


def test_fused_attention_with_dropout_is_not_guessed_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="no fused kernel on the CPU"):
        estimate_memory(Transformer(**SMALL, dropout=0.1), device="cpu")


def test_the_command_line_estimates_and_suggests(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["--vocabulary", "320", "--width", "64", "--layers", "3", "--heads", "4", "--sequence-length", "32"]
    main(["estimate", *sizes, "--batch-size", "3", "--precision", "bf16-mixed", "--json"])
    printed = MemoryEstimate.from_json(capsys.readouterr().out)
    assert printed == estimate_memory(MODELS["gpt"], precision="bf16-mixed")
    main(["estimate", "llama-2-7b", "--batch-size", "2"])
    assert "gradients" in capsys.readouterr().out
    main(["suggest", "gpt2", "--devices", "2", "--json"])
    content = json.loads(capsys.readouterr().out)
    expected = suggest(TRANSFORMERS["gpt2"], devices=2)
    assert [each["saves_bytes"] for each in content["suggestions"]] == [each.saves_bytes for each in expected]
    assert content["suggestions"][0]["price"] == "nothing"
    monkeypatch.setenv("COLUMNS", "80")
    main(["suggest", "gpt2", "--devices", "2"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines()[1:])) <= 80
    # What to set is there whole, on one line, also in a console of 80 columns.
    assert all(each.change in shown and str(each).startswith(f"{each.change}: saves ") for each in expected)
    main(["suggest", "gpt2"])
    assert "one more forward pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["estimate", "gpt5"], "there is no model 'gpt5'; there are gpt2,"),
        (["estimate", "--width", "64"], "--vocabulary, --layers, --heads are missing"),
        (["suggest", "gpt2", "--precision", "fp8"], "accepted are '64-true'"),
        (["estimate", "gpt2", "--batch-size", "-1"], "batch_size=-1 is not accepted"),
        (["estimate", "gpt2", "--optimizer", "AdamX"], "did you mean"),
    ],
)
def test_the_command_line_answers_mistakes(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_settings_of_a_training_are_those_of_the_function() -> None:
    """The explicit arguments are handed on by position."""
    settings: dict[str, Any] = {
        "precision": "bf16-true",
        "optimizer": "SGD",
        "strategy": "ddp",
        "devices": 4,
        "devices_per_node": 2,
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "checkpointing": "recompute",
        "accumulate_grad_batches": 2,
        "fused": True,
        "gradients_in_forward": False,
        "device": "cpu",
    }
    training = Training(**settings)
    assert [getattr(training, name) for name in settings] == list(settings.values())
    assert estimate_memory(MODELS["gpt"], **settings) == estimate_transformer(MODELS["gpt"], training)
