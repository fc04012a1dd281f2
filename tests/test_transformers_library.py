"""Models of the transformers library: caches of keys and values, encoders with decoders, experts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_memopt import estimate_memory, measure_memory, optimize_memory
from lightning_memopt.measuring import measuring_repeatedly
from lightning_memopt.planning import MemoryBudgetError, applied_plan
from tests.equality import Call, assert_optimized_equals_plain, call

VOCABULARY = 128
NARROW = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": VOCABULARY}


def _gpt2() -> nn.Module:
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(n_layer=3, n_embd=64, n_head=4, n_positions=64, **tokens)
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(num_hidden_layers=3, num_key_value_heads=2, **NARROW)
    return transformers.LlamaForCausalLM(config)


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4, **NARROW)
    return transformers.MixtralForCausalLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, image_size=32, patch_size=4
    )
    return transformers.ViTForImageClassification(config)


def _text(size: int = 2, length: int = 24) -> Call:
    tokens = torch.randint(2, VOCABULARY, (size, length))
    return call(input_ids=tokens, labels=tokens.clone())


def _images() -> Call:
    return call(pixel_values=torch.randn(2, 3, 32, 32), labels=torch.tensor([0, 1]))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Call]]] = {
    "gpt2": (_gpt2, _text),
    "llama": (_llama, _text),
    "mixtral": (_mixtral, _text),
    "t5": (_t5, _text),
    "vit": (_vit, _images),
}


@pytest.fixture(scope="module", autouse=True)
def quick_measurements() -> Iterator[None]:
    with measuring_repeatedly(torch.device("cpu")):
        yield


def _loss(model: Any, batch: Call) -> Tensor:
    loss: Tensor = model(*batch.args, **batch.kwargs).loss
    return loss


def _treats_attention(model: nn.Module) -> bool:
    """Whether a treated region has attention inside, which reads and writes the cache of keys and values."""
    plan = applied_plan(model)
    assert plan is not None
    treated = [model.get_submodule(region.path) for region in plan.regions if region.treatment != "keep"]
    return any("Attention" in type(part).__name__ for region in treated for part in region.modules())


def _peak_bytes(model: nn.Module, batch: Call) -> int:
    def step() -> None:
        model.zero_grad()
        _loss(model, batch).backward()

    step()
    return measure_memory(step).peak_bytes


@pytest.mark.parametrize("name", MODELS)
def test_training_under_a_level_is_the_plain_training(name: str) -> None:
    make, batch = MODELS[name]
    example = batch()
    _, treated = assert_optimized_equals_plain(
        lambda: make().train(),
        lambda model: optimize_memory(model, example_forward=lambda m: _loss(m, example), level=1),
        batch,
        step=_loss,
    )
    assert any(region.treatment == "recompute" for region in applied_plan(treated).regions)


@pytest.mark.parametrize("name", MODELS)
def test_budgets_reach_what_a_level_reaches_and_are_kept(name: str) -> None:
    make, batch = MODELS[name]
    example = batch()

    def forward(model: nn.Module) -> Tensor:
        return _loss(model, example)

    def never(module: nn.Module) -> bool:
        return False

    model = make().train()
    try:  # the error's traceback holds bytes, too
        optimize_memory(model, example_forward=forward, memory_budget=1, can_chunk=never)
    except MemoryBudgetError as refusal:
        least = refusal.least_bytes
    optimize_memory(model, example_forward=forward, memory_budget=least, can_chunk=never)
    assert _peak_bytes(model, example) <= least
    assert _treats_attention(model)

    del model
    gc.collect()
    by_level = make().train()
    optimize_memory(by_level, example_forward=forward, level=1)
    assert least <= _peak_bytes(by_level, example)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "mixtral"])
def test_estimates_are_what_a_step_takes(name: str) -> None:
    make, batch = MODELS[name]
    example = batch()
    model = make().train()

    def step() -> None:
        loss = _loss(model, example)
        model.zero_grad()
        loss.backward()

    step()
    measured = measure_memory(step, model=model, batch=example.kwargs)
    estimated = estimate_memory(model, example.kwargs, loss=lambda m, b: m(**b).loss, device="cpu")
    assert measured.breakdown is not None
    known = measured.peak_bytes - measured.breakdown.peak.other
    assert estimated.peak_bytes == pytest.approx(known, rel=0.01)


def test_an_estimate_says_which_operation_does_not_run_without_values() -> None:
    make, batch = MODELS["mixtral"]
    with pytest.raises(ValueError, match=r"refuses its tensors .*mat_a.* measure_memory"):
        estimate_memory(make().train(), batch().kwargs, loss=lambda m, b: m(**b).loss, device="cpu")
