"""Every test starts from the same seeds and must leave the process as it found it."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed
from hypothesis import HealthCheck, settings
from torch.nn.modules import module as module_hooks

from tests.kernel_backends import kernels  # noqa: F401 - a fixture of all tests

# The `kernels` fixture holds no state that one example could leave to the next; times say nothing on a shared machine.
settings.register_profile(
    "tests", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
settings.load_profile("tests")

# Both sides of a comparison run with the same number of threads. The models are tiny: more than one only costs time.
torch.set_num_threads(1)

# Not in torch 2.6: there, leaked saved-tensor hooks go unnoticed.
_top_saved_tensor_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)

# Written by libraries on import or first use, with the same value whichever test comes first.
_ENVIRONMENT_OF_LIBRARIES = {
    "CRC32C_SW_MODE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_ORDER",
    "CUDA_MODULE_LOADING",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}

# seed_everything(), which LightningCLI calls, records the seed here by design; taken back, and no failure.
_ENVIRONMENT_OF_SEEDING = {"PL_GLOBAL_SEED", "PL_SEED_WORKERS"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def same_seeds() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test after which the process is not as before, and repair it for the next one."""
    environment = dict(os.environ)
    before = _process_state()
    threads = torch.get_num_threads()
    yield
    leaks = [
        f"{name}: {before[name]!r} before, {after!r} after"
        for name, after in _process_state().items()
        if after != before[name]
    ]
    changed = {
        name for name in environment.keys() | os.environ.keys() if environment.get(name) != os.environ.get(name)
    } - (_ENVIRONMENT_OF_LIBRARIES | _ENVIRONMENT_OF_SEEDING)
    leaks += [f"environment variable {name}={os.environ.get(name)!r}" for name in sorted(changed)]
    _repair(before, environment, threads)
    if leaks:
        pytest.fail("the test left something behind: " + "; ".join(leaks), pytrace=False)


def _process_state() -> dict[str, Any]:
    return {
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "saved tensor hooks": _top_saved_tensor_hooks(True) is not None,
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "global module hooks": tuple(
            len(getattr(module_hooks, name)) for name in sorted(vars(module_hooks)) if _is_global_hook_table(name)
        ),
        "running profiler": torch.autograd._profiler_enabled(),
        "working directory": os.getcwd(),
    }


def _is_global_hook_table(name: str) -> bool:
    return name.startswith("_global_") and isinstance(getattr(module_hooks, name), dict)


def _repair(before: dict[str, Any], environment: dict[str, str], threads: int) -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized() and not before["process group"]:
        torch.distributed.destroy_process_group()
    torch.set_default_dtype(before["default dtype"])
    if torch.get_default_device() != before["default device"]:
        torch.set_default_device(None)
    torch.set_grad_enabled(before["grad mode"])
    torch.set_anomaly_enabled(before["anomaly mode"])
    torch.use_deterministic_algorithms(before["deterministic algorithms"])
    for device, enabled in zip(("cpu", "cuda"), before["autocast"], strict=True):
        torch.set_autocast_enabled(device, enabled)
    if not before["saved tensor hooks"]:
        with contextlib.suppress(RuntimeError):
            while _top_saved_tensor_hooks(True) is not None:
                torch._C._autograd._pop_saved_tensors_default_hooks()
    for name in vars(module_hooks):
        if _is_global_hook_table(name):
            getattr(module_hooks, name).clear()
    if torch.autograd._profiler_enabled() and not before["running profiler"]:
        torch.autograd._disable_profiler()
    if os.getcwd() != before["working directory"]:
        os.chdir(before["working directory"])
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    for name in os.environ.keys() - environment.keys() - _ENVIRONMENT_OF_LIBRARIES:
        del os.environ[name]
    for name, value in environment.items():
        if name not in _ENVIRONMENT_OF_LIBRARIES and os.environ.get(name) != value:
            os.environ[name] = value
