"""
Launching the CUDA sources
==========================

The kernels of ``cuda/`` are compiled by CuPy when they are first launched: no build step, no CUDA toolkit, no header.
They run on torch's current stream, read and write memory that torch allocated, and never wait.

An operation asks :func:`backend_for` who can run kernels on its tensors' device. None can on the CPU, nor on CUDA
without CuPy: the operation then runs its reference in plain torch. CuPy is imported at the first launch on a CUDA
tensor, never before, since importing it starts the driver in a process that may still fork.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
_STATIC_SHARED_LIMIT = 48 * 1024

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Kernel:
    """An entry point of a source file in ``cuda/``.

    Attributes:
        source: file name, such as ``"bit_pack.cu"``.
        entry: name of the ``extern "C"`` function.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block, in bytes.
        architecture: what to compile for, such as ``"sm_90a"``, where the source uses instructions that exist on one
            architecture alone; None: for the device, whatever it is.
    """

    source: str
    entry: str
    threads: int
    shared_bytes: int = 0
    architecture: str | None = None


class Backend(Protocol):
    """Runs kernels on one type of device."""

    def launch(self, kernel: Kernel, grid: Grid, arguments: Sequence[Any], device: torch.device) -> None:
        """Start a kernel on torch's current stream of ``device``.

        ``arguments`` are tensors (their first element's address), None (a null pointer) or NumPy scalars of the exact
        type that the kernel declares.
        """

    def multiprocessors(self, device: torch.device) -> int:
        """Number of streaming multiprocessors of ``device``."""

    def capability(self, device: torch.device) -> tuple[int, int]:
        """Compute capability of ``device``."""


def launch(kernel: Kernel, grid: int | Grid, *arguments: Any, device: torch.device) -> None:
    """Start ``kernel`` on ``device``; does nothing for an empty grid.

    Args:
        kernel: what to start.
        grid: blocks, along x or along x, y, z.
        arguments: tensors on ``device``, None for a null pointer, NumPy scalars of the declared types.
        device: where to run; :func:`backend_for` must have a backend for it.

    Raises:
        ValueError: for an argument on another device, of a type that no kernel takes, or a grid beyond CUDA's limits.
    """
    blocks = (grid, 1, 1) if isinstance(grid, int) else grid
    if 0 in blocks:
        return
    if min(blocks) < 0 or blocks[0] >= 2**31 or max(blocks[1:]) > 65535:
        raise ValueError(f"{kernel.entry}: a grid of {blocks} blocks is outside CUDA's limits.")
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.device != device:
                raise ValueError(f"{kernel.entry} runs on {device}, but one of its tensors is on {argument.device}.")
        elif argument is not None and not hasattr(argument, "dtype"):
            raise ValueError(f"{kernel.entry}: {argument!r} is neither a tensor, None nor a NumPy scalar.")
    backend = backend_for(device)
    if backend is None:
        raise ValueError(f"{kernel.entry}: nothing can run kernels on {device}.")
    backend.launch(kernel, blocks, arguments, device)


# ---------------------------------------------------------------------------------------------------------------------
# Who runs kernels where

_OVERRIDES: dict[str, Backend | None] = {}


def backend_for(device: torch.device) -> Backend | None:
    """Return what runs kernels on ``device``, or None if operations run their references there."""
    if _OVERRIDES and device.type in _OVERRIDES:
        return _OVERRIDES[device.type]
    return _cupy_backend() if device.type == "cuda" else None


@contextlib.contextmanager
def use_backend(device_type: str, backend: Backend | None) -> Iterator[None]:
    """Within the context, run kernels on devices of ``device_type`` by ``backend``; by references if it is None."""
    missing = object()
    before = _OVERRIDES.get(device_type, missing)
    _OVERRIDES[device_type] = backend
    try:
        yield
    finally:
        if before is missing:
            del _OVERRIDES[device_type]
        else:
            _OVERRIDES[device_type] = before  # type: ignore[assignment]


@functools.lru_cache(maxsize=1)
def _cupy_backend() -> Backend | None:
    try:
        return CupyBackend()
    except (ImportError, OSError) as error:  # not installed, or installed and not able to load
        cuda = (torch.version.cuda or "12").split(".")[0]
        warnings.warn(
            f"Spike operations run on {torch.cuda.get_device_name()} without their CUDA kernels, several times slower: "
            f"CuPy cannot be imported ({error}). Install it with: pip install 'lightning-memopt[cuda{cuda}]'",
            stacklevel=2,
        )
        return None


# ---------------------------------------------------------------------------------------------------------------------
# Sources


def source_folder() -> Path:
    """The folder of the CUDA sources: installed beside the package, or the checkout's ``cuda/``."""
    package = Path(__file__).parent.parent
    for folder in (package / "cuda", package.parent / "cuda"):
        if (folder / "device.cuh").is_file():
            return folder
    raise FileNotFoundError(
        f"The CUDA sources of lightning-memopt are missing from {package / 'cuda'}: the installation is incomplete. "
        "Install the package again."
    )


@functools.cache
def read_source(name: str) -> str:
    """Read a source with the headers that it includes put in place, each once.

    CuPy's cache of compiled kernels looks at this text alone, so a changed header must change it.
    """
    folder, seen = source_folder(), set[str]()

    def inline(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        text = (folder / match[1]).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(inline, text)

    return _INCLUDE.sub(inline, (folder / name).read_text())


# ---------------------------------------------------------------------------------------------------------------------
# CuPy


class CupyBackend:
    """Compiles and launches by CuPy.

    Raises:
        ImportError: if CuPy is not installed or does not load.
    """

    OPTIONS = ("--std=c++17",)

    def __init__(self) -> None:
        self._cupy = _import_cupy()
        self._kernels: dict[tuple[int, Kernel], Any] = {}
        self._modules: dict[tuple[int, str], Any] = {}
        self._lock = threading.Lock()

    def launch(self, kernel: Kernel, grid: Grid, arguments: Sequence[Any], device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(index):
            compiled = self._kernels.get((index, kernel))
            if compiled is None:
                compiled = self._compile(kernel, index)
            values = [
                argument.data_ptr() if isinstance(argument, Tensor) else 0 if argument is None else argument
                for argument in arguments
            ]
            stream = _Stream(torch.cuda.current_stream(index).cuda_stream)
            compiled(grid, (kernel.threads, 1, 1), tuple(values), shared_mem=kernel.shared_bytes, stream=stream)

    def multiprocessors(self, device: torch.device) -> int:
        return int(_properties(device).multi_processor_count)

    def capability(self, device: torch.device) -> tuple[int, int]:
        properties = _properties(device)
        return int(properties.major), int(properties.minor)

    def _compile(self, kernel: Kernel, index: int) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"The kernel {kernel.entry} is compiled at its first launch, which cannot be inside the capture of a "
                "CUDA graph. Run one forward and backward pass before capturing."
            )
        with self._lock:
            module = self._modules.get((index, kernel.source))
            if module is None:
                module = self._load(kernel, index)
                self._modules[index, kernel.source] = module
            compiled = module.get_function(kernel.entry)
            # One function serves launches with more and with less shared memory: the limit may only rise.
            known = [other.shared_bytes for (on, other) in self._kernels if (on, other.entry) == (index, kernel.entry)]
            if kernel.shared_bytes > max(_STATIC_SHARED_LIMIT, *known, 0):
                compiled.max_dynamic_shared_size_bytes = kernel.shared_bytes
            self._kernels[index, kernel] = compiled
            return compiled

    def _load(self, kernel: Kernel, index: int) -> Any:
        code = read_source(kernel.source)
        if kernel.architecture is not None:
            # CuPy names the device's architecture to the compiler itself, without the letter that such instructions
            # need.
            return self._load_compiled(code, kernel.source, kernel.architecture)
        module = self._cupy.RawModule(code=code, options=self.OPTIONS)
        try:
            module.compile()
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # what the compiler and the driver raise has types of its own
                raise
            # CuPy compiles nothing where it finds no headers of CUDA, not even sources that include none.
            major, minor = torch.cuda.get_device_capability(index)
            return self._load_compiled(code, kernel.source, f"sm_{major}{minor}")
        return module

    def _load_compiled(self, code: str, name: str, architecture: str) -> Any:
        nvrtc = self._cupy.cuda.nvrtc
        program = nvrtc.createProgram(code, name, (), ())
        try:
            try:
                nvrtc.compileProgram(program, (*self.OPTIONS, "-ftz=true", f"-arch={architecture}"))
            except Exception as error:
                raise RuntimeError(f"{name}: {error}: {nvrtc.getProgramLog(program)}") from error
            binary = nvrtc.getCUBIN(program) + b"\0"  # CuPy cuts off the last byte as if it ended a text
        finally:
            nvrtc.destroyProgram(program)
        with tempfile.TemporaryDirectory(prefix="lightning-memopt-") as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(binary)
            module = self._cupy.RawModule(path=str(path))
            module.compile()  # reads the file
        return module


class _Stream:
    """What CuPy asks of a stream: its handle."""

    def __init__(self, handle: int) -> None:
        self.ptr = handle


@functools.cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


def _import_cupy() -> Any:
    # Some releases of CuPy make their cache folder when they are imported, others when they compile, and both fail
    # where a home folder is read-only.
    if "CUPY_CACHE_DIR" not in os.environ and not _can_write(Path(os.path.expanduser("~/.cupy/kernel_cache"))):
        os.environ["CUPY_CACHE_DIR"] = tempfile.mkdtemp(prefix="cupy-")
    import cupy

    return cupy


def _can_write(folder: Path) -> bool:
    """Whether files can be made in a folder, which is made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
