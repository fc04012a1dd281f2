"""The table of optimizers agrees with the optimizers."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lightning_memopt.accounting.optimizers import OPTIMIZERS, optimizer_row, optimizer_state_bytes
from lightning_memopt.measuring import measure_memory

SHAPES = [(96, 64), (4096,), (100, 100), (3, 5, 7), (7,)]
SETTINGS: dict[str, dict[str, Any]] = {
    "amsgrad": {"amsgrad": True},
    "momentum": {"momentum": 0.9},
    "centered": {"centered": True},
}
OF_TORCH = [name for name, row in OPTIMIZERS.items() if row.library == "torch" and name not in ("LBFGS", "SparseAdam")]
OF_OTHERS = [name for name, row in OPTIMIZERS.items() if row.library != "torch"]
MODULES = {"bitsandbytes": "bitsandbytes.optim", "torchao": "torchao.optim", "lion-pytorch": "lion_pytorch"}


def made(name: str, parameters: list[nn.Parameter], **more: Any) -> torch.optim.Optimizer:
    class_name, _, settings = name.partition(".")[2].partition("(") if "." in name else name.partition("(")
    for setting in settings.rstrip(")").split(", ") if settings else ():
        more |= SETTINGS[setting]
    library = MODULES.get(OPTIMIZERS[name].library, "torch.optim")
    if library == "bitsandbytes.optim" and class_name.startswith(("SGD", "LARS")):
        more |= SETTINGS["momentum"]
    if library == "bitsandbytes.optim" and class_name == "RMSprop":
        more["alpha"] = 0.99
    return getattr(importlib.import_module(library), class_name)(parameters, lr=1e-3, **more)


def trained(name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype, **more: Any) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    optimizer = made(name, parameters, **more)
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all storages of the state, shared ones once."""
    pending: list[Any] = [leaf for leaf in tree_leaves([*optimizer.state.values()]) if isinstance(leaf, Tensor)]
    storages: dict[int, int] = {}
    while pending:
        tensor = pending.pop()
        if is_traceable_wrapper_subclass(tensor):
            pending.extend(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def shapes_for(name: str) -> list[tuple[int, ...]]:
    return [shape for shape in SHAPES if len(shape) == 2] if name == "Muon" else SHAPES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OF_TORCH)
def test_rows_of_torch_are_what_its_optimizers_hold(name: str, dtype: torch.dtype) -> None:
    if not hasattr(torch.optim, name.partition("(")[0]):
        pytest.skip("newer than this torch")
    optimizer = trained(name, shapes_for(name), dtype)
    assert optimizer_state_bytes(name, shapes_for(name), dtype) == held_bytes(optimizer)


def test_torch_has_no_optimizer_without_a_row() -> None:
    classes = {
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
    }
    assert classes <= {name.partition("(")[0] for name in OPTIMIZERS}


def test_lbfgs_holds_its_row_once_its_history_is_full() -> None:
    parameter = nn.Parameter(torch.linspace(-1.5, 2.0, 400))
    optimizer = torch.optim.LBFGS([parameter], lr=0.1, max_iter=20, tolerance_grad=0.0, tolerance_change=0.0)

    def closure() -> Tensor:  # Rosenbrock's valley, long and bent
        optimizer.zero_grad()
        first, second = parameter[:-1], parameter[1:]
        loss = (100 * (second - first**2) ** 2 + (1 - first) ** 2).sum()
        loss.backward()
        return loss

    for _ in range(20):
        optimizer.step(closure)
    state = optimizer.state[parameter]
    assert len(state["old_dirs"]) == 100
    row = optimizer_state_bytes("LBFGS", [(400,)])
    # Beside vectors it keeps two numbers a pair.
    assert row <= held_bytes(optimizer) <= row + 4 * 300


def test_sparse_adam_holds_two_dense_moments() -> None:
    table = nn.Embedding(50, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.tensor([1, 4])).sum().backward()
    optimizer.step()
    assert held_bytes(optimizer) == optimizer_state_bytes("SparseAdam", [(50, 8)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OF_OTHERS)
def test_rows_of_other_libraries_are_what_their_optimizers_hold(name: str, dtype: torch.dtype) -> None:
    if "Paged" in name and not torch.cuda.is_available():
        pytest.skip("pages need CUDA")
    # What is held does not depend on whether torchao's step is compiled.
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        pytest.importorskip(MODULES[OPTIMIZERS[name].library])
        optimizer = trained(name, SHAPES, dtype)
    assert optimizer_state_bytes(name, SHAPES, dtype) == held_bytes(optimizer)


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
@pytest.mark.parametrize("name", [name for name in OF_TORCH if name != "Muon"])  # that depends on the shapes
def test_temporaries_of_a_step_are_those_of_the_row(name: str, foreach: bool) -> None:
    if name == "Adafactor" and foreach:
        pytest.skip("takes one parameter after the other on its own")
    if not hasattr(torch.optim, name.partition("(")[0]):
        pytest.skip("newer than this torch")
    shapes: list[tuple[int, ...]] = [(256, 512), (64, 64), (16,)]
    optimizer = trained(name, shapes, torch.float32, foreach=foreach)
    report = measure_memory(optimizer.step, device="cpu")
    taken, largest = report.peak_bytes - report.start_bytes, 4 * 256 * 512
    row = optimizer_row(name)
    expected = row.step_copies * (largest + 4 * (64 * 64 + 16)) if foreach else row.step_tensors * largest
    assert taken == pytest.approx(expected, rel=0.04, abs=2048)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("adamw", "AdamW"),
        ("torch.optim.SGD", "SGD"),
        ("sgd(MOMENTUM)", "SGD(momentum)"),
        ("RMSprop(centered,momentum)", "RMSprop(centered, momentum)"),
        ("AdamW8bit", "bitsandbytes.AdamW8bit"),
        ("bnb.optim.lion8bit", "bitsandbytes.Lion8bit"),
        ("lion_pytorch.Lion", "Lion"),
        ("torchao.optim.AdamWFp8", "torchao.AdamWFp8"),
    ],
)
def test_names_are_read_as_users_write_them(name: str, row: str) -> None:
    assert optimizer_row(name).name == row


def test_an_unknown_optimizer_is_answered_with_the_table() -> None:
    with pytest.raises(ValueError, match=r"'AdamX' is not in the table .*did you mean.*Adafactor.*torchao.AdamW4bit"):
        optimizer_row("AdamX")


def test_state_is_a_row_of_figures_that_were_measured() -> None:
    """1024 x 4096 float32, bytes per parameter."""
    per_parameter: Callable[[str], float] = lambda name: round(  # noqa: E731
        optimizer_state_bytes(name, [(1024, 4096)]) / (1024 * 4096), 3
    )
    assert per_parameter("Adafactor") == 0.005
    assert per_parameter("AdamW8bit") == per_parameter("torchao.AdamW8bit") == 2.032
    assert per_parameter("torchao.AdamW4bit") == 1.063
    assert per_parameter("bitsandbytes.Lion8bit") == 1.016
    assert per_parameter("bitsandbytes.AdEMAMix8bit") == 3.047
