"""
Bytes of optimizer state
========================

What an optimizer will hold, from its name and the shapes of the parameters, to the byte. Where there is an instance,
:func:`~lightning_memopt.measuring.optimizer_bytes` knows more: it is right for every class and setting.

The rows are those of ``torch.optim`` with its defaults, of bitsandbytes 0.50 and torchao 0.18 (8-bit states in blocks
of 256 values with one float32 scale each, 4-bit ones in blocks of 128; Dettmers et al. 2022, "8-bit Optimizers via
Block-wise Quantization"), and of lion-pytorch (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

__all__ = ["OPTIMIZERS", "OptimizerRow", "optimizer_row", "optimizer_state_bytes"]

_QUANTIZED_FROM = 4096
"""Values of a parameter from which on 8-bit optimizers quantize its state."""

_StateBytes = Callable[[tuple[int, ...], int], int]


@dataclass(frozen=True)
class OptimizerRow:
    """What one optimizer holds beside parameters and gradients."""

    name: str
    """As :func:`estimate_memory` takes it; settings that change the state are in parentheses."""
    library: str
    """What to install for it."""
    state: _StateBytes
    """Shape of a parameter and bytes of one of its elements to bytes of state."""
    shared_bytes: int = 0
    """Held once for all parameters."""
    step_copies: float = 0.0
    """Temporaries of a step that takes all parameters at once (``foreach``), in copies of all parameters."""
    step_tensors: float = 0.0
    """Temporaries of a step that takes one parameter after the other, in copies of the largest one. Where the next one
    is as large, the last result of the one before is there, too."""
    caveat: str = ""
    """What changes for somebody who trains with AdamW today."""

    @property
    def takes_all_at_once(self) -> bool:
        """Whether torch steps all parameters at once where they are on CUDA."""
        return self.step_copies > 0


def _copies(tensors: int, scalars: int = 0) -> _StateBytes:
    """As many tensors like the parameter, and float32 numbers beside."""
    return lambda shape, element: tensors * math.prod(shape) * element + 4 * scalars


def _float32(tensors: int, scalars: int = 0) -> _StateBytes:
    """Tensors of the parameter's shape in float32, whatever its dtype."""
    return lambda shape, element: (4 * tensors) * math.prod(shape) + 4 * scalars


def _factored(shape: tuple[int, ...], element: int) -> int:
    """Rows and columns of the second moment (Shazeer and Stern 2018); all of it for vectors."""
    if len(shape) < 2:
        return math.prod(shape) * element + 4
    *others, rows, columns = shape
    return math.prod(others) * (rows + columns) * element + 4


def _bitsandbytes(tensors: int, scalars: int = 0) -> _StateBytes:
    """One byte a value and a scale per 256 of them; float32 for small parameters."""

    def state(shape: tuple[int, ...], element: int) -> int:
        values = math.prod(shape)
        if values < _QUANTIZED_FROM:
            return tensors * 4 * values + 4 * scalars
        return tensors * (values + 4 * math.ceil(values / 256)) + 4 * scalars

    return state


def _torchao(bits: int, block: int, codes: int) -> _StateBytes:
    """Two moments in blocks, each with a scale; like the parameter where it is small or no multiple of a block.

    ``codes`` are the float32 values that the bits stand for, held by each moment.
    """

    def state(shape: tuple[int, ...], element: int) -> int:
        values = math.prod(shape)
        if values < _QUANTIZED_FROM or values % block:
            return 2 * values * element + 4
        return 2 * (values * bits // 8 + 4 * (values // block) + 4 * codes) + 4

    return state


_EIGHT_BIT = "states are rounded to 8 bits in blocks: losses as with 32 bits in published trainings, not the same run"
_LION = "another rule: needs a 3 to 10 times lower learning rate and as much more weight decay"
_NO_FSDP2 = "; does not work with FSDP2"


def _rows() -> Iterable[OptimizerRow]:
    def torch_row(name: str, state: _StateBytes, at_once: float, one: float, caveat: str = "") -> OptimizerRow:
        return OptimizerRow(name, "torch", state, 0, at_once, one, caveat)

    yield torch_row("Adadelta", _copies(2, 1), 2, 2)
    yield torch_row(
        "Adafactor",
        _factored,
        0,
        1,
        "no momentum, second moment by rows and columns: may converge more slowly, tune the learning rate",
    )
    yield torch_row("Adagrad", _copies(1, 1), 2, 1)
    yield torch_row("Adam", _copies(2, 1), 1, 2)
    yield torch_row("Adam(amsgrad)", _copies(3, 1), 1, 2)
    yield torch_row("AdamW", _copies(2, 1), 1, 2)
    yield torch_row("AdamW(amsgrad)", _copies(3, 1), 1, 2)
    yield torch_row("Adamax", _copies(2, 1), 1, 1)
    yield torch_row("ASGD", _copies(1, 3), 1, 0)
    # 100 pairs of differences, the direction and the gradient before, once the history is full.
    yield torch_row("LBFGS", _copies(202), 0, 0)
    # Its products are of the shape of the matrix and of its shorter side: between 2 and 3 copies.
    yield torch_row("Muon", _copies(1), 0, 2.5)
    yield torch_row("NAdam", _copies(2, 2), 1, 2)
    yield torch_row("RAdam", _copies(2, 1), 1, 2)
    yield torch_row("RMSprop", _copies(1, 1), 1, 1)
    yield torch_row("RMSprop(momentum)", _copies(2, 1), 1, 1)
    yield torch_row("RMSprop(centered)", _copies(2, 1), 1, 1)
    yield torch_row("RMSprop(centered, momentum)", _copies(3, 1), 1, 1)
    yield torch_row("Rprop", _copies(2, 1), 2.25, 3)
    yield torch_row("SGD", _copies(0), 0, 0, "no state: transformers rarely train well with it")
    yield torch_row(
        "SGD(momentum)", _copies(1), 0, 0, "one step size for all parameters: transformers train more slowly with it"
    )
    yield torch_row("SparseAdam", _copies(2), 0, 2)
    yield OptimizerRow("Lion", "lion-pytorch", _copies(1), 0, 0, 2, _LION)

    for name, tensors, scalars in (
        ("AdEMAMix", 3, 0),
        ("Adagrad", 1, 0),
        ("Adam", 2, 0),
        ("AdamW", 2, 0),
        ("LAMB", 2, 1),
        ("LARS", 1, 1),
        ("Lion", 1, 0),
        ("RMSprop", 1, 0),
        ("SGD", 1, 0),
    ):
        rule = _LION + "; " if name == "Lion" else ""
        maps = 1024 * min(tensors, 2)  # what the 256 codes stand for: one table signed, one not
        for paged in ("", "Paged") if name in ("AdEMAMix", "Adam", "AdamW", "Lion") else ("",):
            yield OptimizerRow(f"bitsandbytes.{paged}{name}", "bitsandbytes", _float32(tensors, scalars))
            yield OptimizerRow(
                f"bitsandbytes.{paged}{name}8bit",
                "bitsandbytes",
                _bitsandbytes(tensors, scalars),
                shared_bytes=maps,
                caveat=rule + _EIGHT_BIT + _NO_FSDP2,
            )
    for name in ("Adam", "AdamW"):
        yield OptimizerRow(f"torchao.{name}8bit", "torchao", _torchao(8, 256, 256), caveat=_EIGHT_BIT)
        yield OptimizerRow(f"torchao.{name}Fp8", "torchao", _torchao(8, 256, 0), caveat=_EIGHT_BIT)
        yield OptimizerRow(
            f"torchao.{name}4bit",
            "torchao",
            _torchao(4, 128, 16),
            caveat="states are rounded to 4 bits in blocks of 128: compare the loss with a run in 32 bits",
        )


OPTIMIZERS: dict[str, OptimizerRow] = {row.name: row for row in _rows()}
"""All rows, by name."""

_BY_LOWER = {name.lower(): row for name, row in OPTIMIZERS.items()}
# Without its library, a name that torch does not have means bitsandbytes: AdamW8bit, LAMB, PagedAdamW.
_BY_LOWER |= {
    short: row
    for name, row in OPTIMIZERS.items()
    if row.library == "bitsandbytes" and (short := name.lower().partition(".")[2]) not in _BY_LOWER
}


def optimizer_row(name: str) -> OptimizerRow:
    """The row of an optimizer.

    Args:
        name: the class, upper or lower case, alone or with its library: ``"AdamW"``, ``"torchao.AdamW8bit"``,
            ``"SGD(momentum)"``. Without library, 8-bit optimizers are those of bitsandbytes.

    Raises:
        ValueError: the table has no such optimizer.

    Example:
        >>> optimizer_row("adamw8bit").library, optimizer_row("torch.optim.Adam").name
        ('bitsandbytes', 'Adam')
    """
    wanted = str(name).lower().replace(" ", "").replace(",", ", ")
    for prefix in ("torch.optim.", "torch.", "lion_pytorch.", "lion-pytorch."):
        wanted = wanted.removeprefix(prefix)
    for prefix in ("bnb.optim.", "bnb.", "bitsandbytes.optim."):
        if wanted.startswith(prefix):
            wanted = "bitsandbytes." + wanted.removeprefix(prefix)
    wanted = wanted.replace("torchao.optim.", "torchao.")
    if wanted not in _BY_LOWER:
        near = difflib.get_close_matches(wanted, _BY_LOWER, n=1)
        raise ValueError(
            f"optimizer {name!r} is not in the table{f' (did you mean {_BY_LOWER[near[0]].name}?)' if near else ''}; "
            f"it has {', '.join(OPTIMIZERS)}. For any other class, give an instance to "
            "lightning_memopt.measuring.optimizer_bytes"
        )
    return _BY_LOWER[wanted]


def optimizer_state_bytes(name: str, shapes: Iterable[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> int:
    """Bytes that an optimizer holds from its first step on (LBFGS: from when its history is full).

    Args:
        name: as for :func:`optimizer_row`.
        shapes: of all parameters that it trains.
        dtype: of the parameters.

    Raises:
        ValueError: the table has no such optimizer.

    Example:
        >>> layer = [(1024, 4096)]
        >>> [optimizer_state_bytes(name, layer) / (1024 * 4096) for name in ("AdamW", "SGD", "Lion")]
        [8.00000..., 0.0, 4.0]
        >>> round(optimizer_state_bytes("bitsandbytes.AdamW8bit", layer) / (1024 * 4096), 2)
        2.03
    """
    row = optimizer_row(name)
    sizes = [tuple(shape) for shape in shapes]
    quantized = any(math.prod(shape) >= _QUANTIZED_FROM for shape in sizes)
    total = sum(row.state(shape, dtype.itemsize) for shape in sizes)
    return total + (row.shared_bytes if quantized else 0)
