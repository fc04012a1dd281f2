"""``python -m lightning_memopt estimate`` and ``suggest``: the options and what they print."""

from __future__ import annotations

import argparse
import json
from dataclasses import MISSING, asdict, fields, replace
from typing import Any

from rich.console import Console

from lightning_memopt.accounting.estimate import STRATEGIES, Training, estimate_transformer
from lightning_memopt.accounting.suggest import suggest, suggestion_table
from lightning_memopt.accounting.transformer import PRECISIONS, TRANSFORMERS, Transformer

__all__ = ["add_commands", "run_estimate", "run_suggest"]

_SIZES = {
    "vocabulary": "words of the vocabulary (V)",
    "width": "size of the residual stream (d)",
    "layers": "number of blocks (L)",
    "heads": "attention heads (h)",
    "sequence_length": "tokens of a sample (T)",
    "batch_size": "samples on one device at a time (B)",
    "feed_forward": "width inside the MLP (default: 4 x width)",
    "kv_heads": "heads of keys and values (default: heads)",
}
_CHOICES = {
    "activation": ("gelu", "silu", "relu"),
    "norm": ("layernorm", "rmsnorm", "rmsnorm-float32"),
    "positions": ("learned", "rotary"),
    "attention": ("sdpa", "eager"),
}
_SWITCHES = {
    "gated": "gated MLP, as SwiGLU",
    "tied": "the output layer uses the embedding's weights",
    "bias": "linear layers and norms add a bias",
    "fused_qkv": "queries, keys and values from one layer",
    "float32_loss": "cast logits to float32 before the loss",
}


def add_commands(commands: Any) -> None:
    """Add ``estimate`` and ``suggest`` to the subcommands of a parser."""
    for name, run, words in (
        ("estimate", run_estimate, "say from numbers where the bytes of a transformer's training step go"),
        ("suggest", run_suggest, "say what would save memory in a transformer's training, the cheapest first"),
    ):
        command = commands.add_parser(
            name,
            help=words,
            description=(
                f"{words[0].upper()}{words[1:]}. Name a published model, or give at least --vocabulary, --width, "
                "--layers and --heads; options given beside a model change it. Nothing is run or allocated."
            ),
        )
        _add_model(command)
        _add_training(command)
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
        command.set_defaults(run=run, parser=command)


def run_estimate(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Print an estimate."""
    try:
        estimate = estimate_transformer(_model(given), Training(**_settings(given)))
    except ValueError as error:
        parser.error(str(error))
    if given.json:
        print(estimate.to_json(), end="")
    else:
        Console().print(estimate.table())


def run_suggest(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Print suggestions."""
    try:
        model, settings = _model(given), _settings(given)
        now = estimate_transformer(model, Training(**settings))
        suggestions = suggest(model, **settings)
    except ValueError as error:
        parser.error(str(error))
    if given.json:
        content = {
            "model": asdict(model),
            "peak_bytes": now.peak_bytes,
            "suggestions": [each.to_dict() for each in suggestions],
        }
        print(json.dumps(content, indent=2))
        return
    console = Console()
    console.print(f"{now.subject}: peak {now.peak_bytes / 2**30:.2f} GiB", soft_wrap=True, markup=False)
    console.print(suggestion_table(suggestions))


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model", nargs="?", metavar="MODEL", help=f"a published model: {', '.join(TRANSFORMERS)} (or none)"
    )
    for name, words in _SIZES.items():
        command.add_argument(_option(name), type=int, metavar="N", help=words)
    for name, choices in _CHOICES.items():
        command.add_argument(_option(name), choices=choices)
    for name, words in _SWITCHES.items():
        command.add_argument(_option(name), action=argparse.BooleanOptionalAction, help=words)
    command.add_argument("--dropout", type=float, metavar="P", help="probability of dropout")


def _add_training(command: argparse.ArgumentParser) -> None:
    command.add_argument("--precision", help=f"of the Trainer: {', '.join(PRECISIONS)}")
    command.add_argument("--optimizer", help="for example AdamW, SGD(momentum), Lion, AdamW8bit, torchao.AdamW4bit")
    command.add_argument("--fused", action="store_true", default=None, help="the optimizer's step is fused")
    command.add_argument("--strategy", help=f"one of {', '.join(STRATEGIES)}")
    command.add_argument("--devices", type=int, metavar="N", help="devices over all nodes")
    command.add_argument("--devices-per-node", type=int, metavar="N", help="for fsdp_hybrid_shard")
    command.add_argument("--tensor-parallel", type=int, metavar="N", help="devices that share each matrix")
    command.add_argument("--sequence-parallel", action="store_true", default=None, help="these share the rest, too")
    command.add_argument("--checkpointing", help="of each block: keep, recompute_cheap or recompute")
    command.add_argument("--accumulate-grad-batches", type=int, metavar="N", help="of the Trainer")
    command.add_argument("--device", help="whose kernels: cuda (default) or cpu")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _model(given: argparse.Namespace) -> Transformer:
    names = (*_SIZES, *_CHOICES, *_SWITCHES, "dropout")
    chosen = {name: value for name in names if (value := getattr(given, name)) is not None}
    if given.model is not None:
        if given.model not in TRANSFORMERS:
            raise ValueError(f"there is no model {given.model!r}; there are {', '.join(TRANSFORMERS)}")
        return replace(TRANSFORMERS[given.model], **chosen)
    needed = [entry.name for entry in fields(Transformer) if entry.default is MISSING]
    if missing := [_option(name) for name in needed if name not in chosen]:
        raise ValueError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; give "
            f"{', '.join(map(_option, needed))}, or a model: {', '.join(TRANSFORMERS)}"
        )
    return Transformer(**chosen)


def _settings(given: argparse.Namespace) -> dict[str, Any]:
    names = [entry.name for entry in fields(Training)]
    return {name: value for name in names if (value := getattr(given, name, None)) is not None}
