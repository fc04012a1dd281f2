"""
CUDA kernels on the CPU
=======================

:class:`CpuKernels` compiles the sources of ``cuda/`` with g++ and runs every CUDA thread as a fiber (see
``cuda_on_cpu.h``), so that the tests run the same sources, and the whole path from Python down to them, without a GPU.
What the header detects (a barrier that not all threads reach, a wild or misaligned access, ...) is raised as
:class:`KernelError`.

With the environment variable of :data:`SANITIZE`, kernels are compiled with AddressSanitizer and
UndefinedBehaviorSanitizer; the process then needs libasan preloaded, see ``sanitized.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from lightning_memopt.ops.launch import Kernel, read_source

# Environment variable: "1" to compile with the sanitizers.
SANITIZE = "CUDA_ON_CPU_SANITIZE"
# Environment variable: a file to which the name of every entry launched is added.
LAUNCH_LOG = "CUDA_ON_CPU_LAUNCH_LOG"

HEADER = Path(__file__).with_name("cuda_on_cpu.h")

_FLAGS = (
    *("-x", "c++", "-std=c++17", "-g1", "-w", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"),
    *("-ffp-contract=off", "-DCPU_SHIM", f"-I{HEADER.parent}"),
)
# Without the sanitizers' runtime library: a failed check is an illegal instruction, which the header reports.
_TRAPS = ("-O2", "-fsanitize=alignment,bounds,shift,integer-divide-by-zero", "-fsanitize-undefined-trap-on-error")
_SANITIZERS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")

# Bytes of shared memory that a block may have, by compute capability.
_SHARED_LIMITS = {
    **{(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99},
    **{(9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99, (12, 1): 99},
}


class KernelError(RuntimeError):
    """A kernel did what CUDA forbids, or was launched with other arguments than it declares."""


@dataclass(frozen=True)
class Entry:
    """An ``extern "C"`` kernel.

    Attributes:
        name: the function's name.
        bounds: text of the arguments of its ``__launch_bounds__``, empty without.
        line: where the source declares it, or uses the macro that does; counted from 1.
    """

    name: str
    bounds: str
    line: int


def sanitizing() -> bool:
    """Whether kernels are compiled with AddressSanitizer and UndefinedBehaviorSanitizer."""
    return os.environ.get(SANITIZE, "") not in ("", "0")


def require_compiler() -> str:
    """The path of g++; skips the running test if there is none."""
    if not sys.platform.startswith("linux"):
        pytest.skip("CUDA kernels run on the CPU on Linux only")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is missing: the CUDA kernels cannot be compiled for the CPU")
    return compiler


def entries_of(text: str) -> list[Entry]:
    """The ``extern "C"`` kernels of a source, as :func:`read_source` gives it, after macro expansion."""
    command = [require_compiler(), *_FLAGS, "-DCUDA_ON_CPU_PARSE", "-E", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise KernelError(f"g++ cannot preprocess the source:\n{done.stderr}")
    expanded = done.stdout
    markers = list(re.finditer(r'^# (\d+) "<stdin>".*\n', expanded, re.MULTILINE))
    found = []
    for start in re.finditer(r'extern\s+"C"\s+__global__\b', expanded):
        marker = next(marker for marker in reversed(markers) if marker.end() <= start.start())
        line = int(marker[1]) + expanded.count("\n", marker.end(), start.start())
        head = expanded[start.end() : expanded.index("{", start.end())]
        bounds = ""
        if (at := head.find("__launch_bounds__")) >= 0:
            opening = head.index("(", at)
            closing = _closing(head, opening)
            bounds = " ".join(head[opening + 1 : closing].split())
            head = head[:at] + head[closing + 1 :]
        match = re.match(r"\s*void\s+(\w+)\s*\(", head)
        if match is None:
            raise KernelError(f'cannot read the kernel declared by: extern "C" __global__ {head.strip()}')
        found.append(Entry(match[1], bounds, line))
    return found


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if not depth:
            return i
    raise KernelError(f"unbalanced parentheses in: {text}")


# ---------------------------------------------------------------------------------------------------------------------
# Compiling


@functools.cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def cache_folder() -> Path:
    """Where compiled kernels are kept from run to run; what is older than a month is removed."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "lightning_memopt-tests"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            for path in folder.iterdir():
                if path.is_file() and path.stat().st_mtime < time.time() - 30 * 24 * 3600:
                    path.unlink(missing_ok=True)
            return folder
    return Path(tempfile.mkdtemp(prefix="cuda-on-cpu-"))


def compile_kernels(text: str, sanitize: bool) -> tuple[Path, list[Entry]]:
    """Compile a source for the CPU; a second call, also of another process, finds the first one's result."""
    compiler = require_compiler()
    flags = (*_FLAGS, *(_SANITIZERS if sanitize else _TRAPS))
    key = "\0".join((text, HEADER.read_text(), Path(__file__).read_text(), *flags, _compiler_version(compiler)))
    stem = cache_folder() / hashlib.sha256(key.encode()).hexdigest()[:32]
    library, listing = stem.with_suffix(".so"), stem.with_suffix(".entries")
    if not library.exists():
        entries = entries_of(text)
        # The two forms of `extern` and of static shared memory differ in C++, see the header.
        source = re.sub(r"\bextern\s+__shared__", "extern __dynamic_shared__", text)
        source += "".join(f"\nCUDA_ON_CPU_ENTRY({entry.name}, {entry.bounds or 0})" for entry in entries) + "\n"
        # Written beside and moved into place, since another process may be doing the same.
        with tempfile.TemporaryDirectory(dir=stem.parent) as folder:
            (Path(folder) / "source.cu").write_text(source)
            (Path(folder) / "entries").write_text(json.dumps([astuple(entry) for entry in entries]))
            done = subprocess.run(
                [compiler, *flags, "-o", "library", "source.cu"], cwd=folder, capture_output=True, text=True
            )
            if done.returncode:
                raise KernelError(f"g++ cannot compile the source for the CPU:\n{done.stderr[:8000]}")
            os.replace(Path(folder) / "source.cu", stem.with_suffix(".cu"))
            os.replace(Path(folder) / "entries", listing)
            os.replace(Path(folder) / "library", library)
    return library, [Entry(*fields) for fields in json.loads(listing.read_text())]


class Library:
    """The compiled kernels of a source."""

    def __init__(self, text: str, sanitize: bool) -> None:
        self.lines = text.splitlines()
        self.path, self.entries = compile_kernels(text, sanitize)
        self.lock = threading.Lock()  # a library runs one launch at a time
        self._library = ctypes.CDLL(str(self.path))
        self._functions: dict[str, tuple[Any, list[str], int]] = {}

    def function(self, name: str) -> tuple[Any, list[str], int]:
        """The function that launches an entry, its parameters' types and the most threads of a block."""
        if name not in self._functions:
            names = [entry.name for entry in self.entries]
            if name not in names:
                raise KernelError(f"there is no kernel {name}; the source has: {', '.join(names) or 'none'}.")
            launch = self._library[f"launch_{name}"]
            launch.restype = ctypes.c_char_p
            launch.argtypes = [
                *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p),
                *(ctypes.c_uint64, ctypes.c_uint64),
            ]
            signature = self._library[f"signature_of_{name}"]
            signature.restype = ctypes.c_char_p
            self._functions[name] = launch, signature().decode().split(), self.launch_bounds(name)[0]
        return self._functions[name]

    def launch_bounds(self, name: str) -> tuple[int, int]:
        """Most threads of a block and fewest blocks of a multiprocessor that an entry declares; 0 where it does not."""
        values = (ctypes.c_int * 2).in_dll(self._library, f"launch_bounds_of_{name}")
        return values[0], values[1]

    def explain(self, message: str) -> str:
        """A message of the header, with the source in place of line numbers and code offsets."""
        message = re.sub(r"\(line (\d+)\)", lambda match: f"(`{self.lines[int(match[1]) - 1].strip()}`)", message)
        return re.sub(r"code \+(0x[0-9a-f]+)", lambda match: self._line_of_code(match[1]), message)

    def _line_of_code(self, offset: str) -> str:
        tool = shutil.which("addr2line")
        if tool is not None:
            done = subprocess.run([tool, "-e", str(self.path), offset], capture_output=True, text=True)
            match = re.search(r"source\.cu:(\d+)", done.stdout)
            if match is not None and int(match[1]) <= len(self.lines):
                return f"`{self.lines[int(match[1]) - 1].strip()}`"
        return f"an unknown line (offset {offset} of {self.path})"


@functools.cache
def load(text: str, sanitize: bool = False) -> Library:
    """The compiled kernels of a source, as :func:`read_source` gives it."""
    return Library(text, sanitize)


# ---------------------------------------------------------------------------------------------------------------------
# Launching

_SCALARS = {
    "i4": numpy.int32,
    "i8": numpy.int64,
    "u4": numpy.uint32,
    "u8": numpy.uint64,
    "f4": numpy.float32,
}
_POINTEES = {"f4": (torch.float32,), "i4": (torch.int32,), "i8": (torch.int64,)}


class CpuKernels:
    """Runs the CUDA sources on CPU tensors, as a :class:`lightning_memopt.ops.launch.Backend`.

    Args:
        seed: order of blocks and threads in every launch: 0 for the natural one, any other for a random one. None draws
            one for each launch, from the kernel, the grid and the arguments' shapes and values, so that a launch
            repeated is a launch repeated exactly.
        multiprocessors: of the pretended GPU.
        capability: of the pretended GPU.
        read: gives the text of a source by name.
        blocks: which blocks of every launch run, in their natural order; None: all of them. For tensors too large to
            be worked through on the CPU.

    Attributes:
        launches: entries launched so far.
    """

    def __init__(
        self,
        seed: int | None = None,
        multiprocessors: int = 2,
        capability: tuple[int, int] = (9, 0),
        read: Callable[[str], str] = read_source,
        blocks: slice | None = None,
    ) -> None:
        require_compiler()
        if capability not in _SHARED_LIMITS:
            raise ValueError(f"The compute capability {capability} is none of {', '.join(map(str, _SHARED_LIMITS))}.")
        self.launches: list[str] = []
        self._seed = seed
        self._multiprocessors = multiprocessors
        self._capability = capability
        self._read = read
        self._blocks = blocks
        self._sanitize = sanitizing()

    def multiprocessors(self, device: torch.device) -> int:
        return self._multiprocessors

    def capability(self, device: torch.device) -> tuple[int, int]:
        return self._capability

    def launch(
        self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Any], device: torch.device
    ) -> None:
        library = load(self._read(kernel.source), self._sanitize)
        function, types, most_threads = library.function(kernel.entry)
        self._check(kernel, types, most_threads, arguments)
        values = [_value(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        seed = self._seed if self._seed is not None else _draw_seed(kernel, grid, arguments)
        self._note(kernel.entry)
        first, last = 0, 0
        if self._blocks is not None:
            first, last, _ = self._blocks.indices(math.prod(grid))
        with library.lock:
            message = function(
                (ctypes.c_uint32 * 3)(*grid), kernel.threads, kernel.shared_bytes, seed, addresses, first, last
            )
        if message is not None:
            raise KernelError(f"{kernel.entry}: {library.explain(message.decode())}; grid {grid}, seed {seed}.")

    def _note(self, entry: str) -> None:
        self.launches.append(entry)
        if (log := os.environ.get(LAUNCH_LOG)) and entry not in _logged:
            _logged.add(entry)
            with open(log, "a") as file:
                file.write(f"{entry}\n")

    def _check(self, kernel: Kernel, types: list[str], most_threads: int, arguments: Sequence[Any]) -> None:
        if not 1 <= kernel.threads <= (most_threads or 1024):
            raise KernelError(
                f"{kernel.entry}: launched with {kernel.threads} threads, declared for {most_threads or 1024} at most."
            )
        limit = _SHARED_LIMITS[self._capability] * 1024
        if kernel.shared_bytes > limit:
            raise KernelError(
                f"{kernel.entry}: {kernel.shared_bytes} bytes of dynamic shared memory are more than the {limit} of "
                f"compute capability {self._capability}."
            )
        if len(types) != len(arguments):
            raise KernelError(f"{kernel.entry}: {len(arguments)} arguments given, {len(types)} declared: {types}.")
        for i, (type_, argument) in enumerate(zip(types, arguments, strict=True)):
            if not _fits(type_, argument):
                given = f"a tensor of {argument.dtype}" if isinstance(argument, Tensor) else repr(argument)
                raise KernelError(f"{kernel.entry}: argument {i} is {given}, declared is {_spell(type_)}.")


_logged: set[str] = set()


def _fits(type_: str, argument: Any) -> bool:
    if type_[0] != "*":
        return type_ in _SCALARS and isinstance(argument, _SCALARS[type_])
    if argument is None:
        return True
    if not isinstance(argument, Tensor):
        return False
    pointee = type_[1:]
    if pointee in _POINTEES:
        return argument.dtype in _POINTEES[pointee]
    # Unsigned integers stand for the bits of any type of their size; bytes may be read as anything.
    return (
        pointee in ("v", "u1", "i1")
        or pointee[0] == "s"
        or argument.dtype == torch.uint8
        or (argument.element_size() == int(pointee[1:]))
    )


def _spell(type_: str) -> str:
    if type_[0] == "*":
        return f"a pointer to {'void' if type_ == '*v' else _spell(type_[1:])}"
    kind = {"u": "unsigned integer", "i": "signed integer", "f": "float", "s": "struct"}[type_[0]]
    return f"{kind} of {8 * int(type_[1:])} bits"


def _value(argument: Any) -> Any:
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return numpy.ctypeslib.as_ctypes_type(argument.dtype)(argument.item())


def _draw_seed(kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Any]) -> int:
    shown = [tuple(x.shape) if isinstance(x, Tensor) else None if x is None else x.item() for x in arguments]
    return 1 + zlib.crc32(repr((kernel.entry, kernel.threads, grid, shown)).encode())
