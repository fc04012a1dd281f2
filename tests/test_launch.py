"""Who runs kernels where, and what CuPy is told; CUDA itself is imitated."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import struct
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_memopt.ops import launch as launching
from lightning_memopt.ops.bit_pack import bit_pack
from lightning_memopt.ops.launch import CupyBackend, Kernel, backend_for, launch, read_source, use_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
KERNEL = Kernel("bit_pack.cu", "bit_pack_float32_1", 256)


class Recorder:
    """A backend that notes what it was told."""

    def __init__(self) -> None:
        self.launched: list[tuple[Kernel, tuple[int, int, int], tuple[Any, ...], torch.device]] = []

    def launch(
        self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Any], device: torch.device
    ) -> None:
        self.launched.append((kernel, grid, tuple(arguments), device))

    def multiprocessors(self, device: torch.device) -> int:
        return 1

    def capability(self, device: torch.device) -> tuple[int, int]:
        return 9, 0


def test_nobody_runs_kernels_on_the_cpu() -> None:
    assert backend_for(CPU) is None
    with pytest.raises(ValueError, match="nothing can run kernels on cpu"):
        launch(KERNEL, 1, torch.zeros(1), device=CPU)


def test_a_backend_counts_within_its_context_alone() -> None:
    outer, inner = Recorder(), Recorder()
    with use_backend("cpu", outer):
        with use_backend("cpu", inner):
            assert backend_for(CPU) is inner
        with contextlib.suppress(KeyError), use_backend("cpu", None):
            assert backend_for(CPU) is None
            raise KeyError
        assert backend_for(CPU) is outer
    assert backend_for(CPU) is None


def test_an_empty_grid_is_not_launched() -> None:
    backend = Recorder()
    with use_backend("cpu", backend):
        for grid in (0, (3, 0, 1), (0, 1, 1)):
            launch(KERNEL, grid, torch.zeros(1), device=CPU)
        assert backend.launched == []
        launch(KERNEL, 3, torch.zeros(1), None, np.int64(4), device=CPU)
    [(kernel, grid, arguments, device)] = backend.launched
    assert (kernel, grid, device) == (KERNEL, (3, 1, 1), CPU)
    assert arguments[1:] == (None, np.int64(4))


@pytest.mark.parametrize(
    ("grid", "argument", "message"),
    [
        (1, torch.zeros(1, device="meta"), "runs on cpu, but one of its tensors is on meta"),
        (1, 5, "5 is neither a tensor, None nor a NumPy scalar"),
        (-1, None, "outside CUDA's limits"),
        ((1, 70_000, 1), None, "outside CUDA's limits"),
        (2**31, None, "outside CUDA's limits"),
    ],
)
def test_a_launch_that_cannot_be_right_is_refused(grid: Any, argument: Any, message: str) -> None:
    backend = Recorder()
    with use_backend("cpu", backend), pytest.raises(ValueError, match=message):
        launch(KERNEL, grid, argument, device=CPU)
    assert backend.launched == []


# ---------------------------------------------------------------------------------------------------------------------
# Without CuPy


@pytest.fixture
def no_backend_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    launching._cupy_backend.cache_clear()
    yield
    launching._cupy_backend.cache_clear()


class Broken(types.ModuleType):
    """A CuPy that is installed and does not load."""


@pytest.mark.parametrize("how", ["missing", "unloadable"])
@pytest.mark.usefixtures("no_backend_yet")
def test_without_cupy_references_run_and_one_warning_names_the_extra(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", "/given")
    if how == "missing":
        monkeypatch.setitem(sys.modules, "cupy", None)
    else:

        def load() -> Any:
            raise OSError("libcuda.so.1: cannot open shared object file")

        monkeypatch.setattr(launching, "_import_cupy", load)
    with pytest.warns(UserWarning, match=r"a GPU.*lightning-memopt\[cuda1[23]\]"):
        assert backend_for(CUDA) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend_for(CUDA) is None


@pytest.mark.parametrize("home", ["nowhere", "a file", "a folder"])
def test_cupy_gets_a_cache_folder_where_it_cannot_make_one(
    home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some releases make it when they are imported, others when they compile: it is there before either."""
    seen = []

    class Finder:
        def find_spec(self, name: str, *_: Any) -> Any:
            if name != "cupy":
                return None
            seen.append(os.environ.get("CUPY_CACHE_DIR"))
            return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]

        def create_module(self, spec: Any) -> Any:
            return types.ModuleType(spec.name)

        def exec_module(self, module: Any) -> None:
            return None

    (tmp_path / "a file").touch()
    (tmp_path / "a folder").mkdir()
    monkeypatch.setenv("HOME", "/proc/nowhere" if home == "nowhere" else str(tmp_path / home))
    monkeypatch.setenv("CUPY_CACHE_DIR", "")  # so that it is taken back afterwards
    monkeypatch.delenv("CUPY_CACHE_DIR")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert launching._import_cupy().__name__ == "cupy"
    sys.modules.pop("cupy")
    if home == "a folder":
        assert seen == [None]
    else:
        assert Path(str(seen[0])).is_dir()


# ---------------------------------------------------------------------------------------------------------------------
# With CuPy


class FakeFunction:
    """What CuPy returns for an entry."""

    def __init__(self, entry: str) -> None:
        self.entry = entry
        self.limits: list[int] = []
        self.calls: list[tuple[Any, ...]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "max_dynamic_shared_size_bytes":
            self.limits.append(value)
        else:
            super().__setattr__(name, value)

    def __call__(self, grid: Any, block: Any, arguments: Any, *, shared_mem: int, stream: Any) -> None:
        self.calls.append((grid, block, arguments, shared_mem, stream.ptr))


class FakeNvrtc:
    """CUDA's compiler, which knows one architecture."""

    ARCHITECTURE = "sm_90a"

    def __init__(self) -> None:
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.programs: dict[int, str] = {}

    def createProgram(self, code: str, name: str, headers: tuple[str, ...], names: tuple[str, ...]) -> int:
        self.programs[len(self.compiled)] = code
        return len(self.compiled)

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        self.compiled.append((self.programs[program], options))
        if f"-arch={self.ARCHITECTURE}" not in options:
            raise RuntimeError("NVRTC_ERROR_COMPILATION (6)")

    def getProgramLog(self, program: int) -> str:
        return "not supported on this target"

    def getCUBIN(self, program: int) -> bytes:
        return b"binary"  # without the zero that it ends with, as CuPy gives it

    def destroyProgram(self, program: int) -> None:
        del self.programs[program]


class FakeCupy:
    """Compiles nothing, and says what it was asked to compile."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.loaded: list[bytes] = []
        self.refusal: Exception | None = None
        self.functions: dict[str, FakeFunction] = {}
        self.cuda = types.SimpleNamespace(nvrtc=FakeNvrtc())

    def RawModule(self, *, code: str | None = None, options: tuple[str, ...] = (), path: str | None = None) -> Any:
        if code is not None:
            self.compiled.append((code, options))
        get = lambda entry: self.functions.setdefault(entry, FakeFunction(entry))  # noqa: E731

        def compile_or_load() -> None:
            if path is not None:
                self.loaded.append(Path(path).read_bytes())
            elif self.refusal is not None:
                raise self.refusal

        return types.SimpleNamespace(get_function=get, compile=compile_or_load)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setattr(launching, "_import_cupy", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: types.SimpleNamespace(cuda_stream=1000 + index))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fake


def test_a_kernel_is_compiled_once_a_device_and_runs_on_torchs_stream(cupy: FakeCupy) -> None:
    backend = CupyBackend()
    tensor = torch.zeros(4)
    for device in (CUDA, CUDA, torch.device("cuda")):
        backend.launch(KERNEL, (2, 1, 1), (tensor, None, np.int64(7)), device)
    assert cupy.compiled == [(read_source("bit_pack.cu"), ("--std=c++17",))] * 2
    calls = cupy.functions[KERNEL.entry].calls
    expected = ((2, 1, 1), (256, 1, 1), (tensor.data_ptr(), 0, np.int64(7)), 0)
    # A device without an index is the current one.
    assert calls == [(*expected, 1000), (*expected, 1000), (*expected, 1001)]


def test_a_kernel_for_one_architecture_is_compiled_for_it_and_loaded_once_a_device(cupy: FakeCupy) -> None:
    backend = CupyBackend()
    kernel = replace(KERNEL, architecture="sm_90a")
    for device in (CUDA, CUDA, torch.device("cuda")):
        backend.launch(kernel, (2, 1, 1), (), device)
    nvrtc = cupy.cuda.nvrtc
    assert nvrtc.compiled == [(read_source("bit_pack.cu"), ("--std=c++17", "-ftz=true", "-arch=sm_90a"))] * 2
    assert cupy.loaded == [b"binary\0"] * 2
    assert cupy.compiled == []
    assert nvrtc.programs == {}
    assert len(cupy.functions[KERNEL.entry].calls) == 3


def test_what_the_compiler_says_of_a_kernel_for_one_architecture_is_part_of_the_error(cupy: FakeCupy) -> None:
    kernel = replace(KERNEL, architecture="sm_91a")
    with pytest.raises(RuntimeError, match=r"bit_pack.cu: NVRTC_ERROR_COMPILATION.*not supported on this target"):
        CupyBackend().launch(kernel, (1, 1, 1), (), CUDA)
    assert cupy.cuda.nvrtc.programs == {}


def test_without_the_headers_of_cuda_kernels_are_compiled_past_cupy(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(FakeNvrtc, "ARCHITECTURE", "sm_90")
    cupy.refusal = RuntimeError("Failed to find CUDA headers. Please install CUDA toolkit headers")
    CupyBackend().launch(KERNEL, (2, 1, 1), (), CUDA)
    assert cupy.cuda.nvrtc.compiled == [(read_source("bit_pack.cu"), ("--std=c++17", "-ftz=true", "-arch=sm_90"))]
    assert cupy.loaded == [b"binary\0"]
    assert len(cupy.functions[KERNEL.entry].calls) == 1


def test_what_the_driver_says_is_raised_as_it_is(cupy: FakeCupy) -> None:
    class DriverError(RuntimeError):
        pass

    cupy.refusal = DriverError("CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        CupyBackend().launch(KERNEL, (2, 1, 1), (), CUDA)
    assert cupy.cuda.nvrtc.compiled == []


def test_a_compiled_kernel_reaches_the_driver_whole(cupy: FakeCupy) -> None:
    """By the compiler that CuPy calls: the end of the last table of the binary is the end of the file."""
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is missing", exc_type=ImportError)
    cupy.cuda.nvrtc = nvrtc
    kernel = Kernel("packed_linear_wgmma_float32.cu", "packed_linear_wgmma_float32", 256, architecture="sm_90a")
    try:
        CupyBackend().launch(kernel, (1, 1, 1), (), CUDA)
    except RuntimeError as error:
        if "libnvrtc" not in str(error):
            raise
        pytest.skip("CUDA's compiler is missing")
    [binary] = cupy.loaded
    assert binary.startswith(b"\x7fELF")
    segments, sections = struct.unpack_from("<2Q", binary, 32)
    segment_bytes, segment_count, section_bytes, section_count = struct.unpack_from("<4H", binary, 54)
    end = max(segments + segment_bytes * segment_count, sections + section_bytes * section_count)
    assert len(binary) >= end


def test_the_limit_of_shared_memory_is_raised_as_far_as_launches_need(cupy: FakeCupy) -> None:
    backend = CupyBackend()
    for shared_bytes in (1000, 60_000, 50_000, 100_000, 60_000):
        backend.launch(Kernel("bit_pack.cu", "entry", 32, shared_bytes), (1, 1, 1), (), CUDA)
    function = cupy.functions["entry"]
    assert function.limits == [60_000, 100_000]
    assert [call[3] for call in function.calls] == [1000, 60_000, 50_000, 100_000, 60_000]


def test_a_first_launch_inside_a_captured_graph_is_refused(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CupyBackend()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="Run one forward and backward pass before capturing"):
        backend.launch(KERNEL, (1, 1, 1), (), CUDA)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    backend.launch(KERNEL, (1, 1, 1), (), CUDA)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    backend.launch(KERNEL, (1, 1, 1), (), CUDA)  # compiled by now
    assert len(cupy.functions[KERNEL.entry].calls) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Sources


def test_headers_are_part_of_the_text_that_cupy_keeps_results_by() -> None:
    text = read_source("count_pack.cu")
    assert "#include" not in text.replace('#include "cuda_on_cpu.h"', "")
    assert text.count("struct Bfloat16 {") == 1
    assert text.count("typedef unsigned char u8;") == 1


def test_a_header_that_two_others_include_is_put_in_place_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "types.cuh").write_text("#pragma once\ntypedef int word;\n")
    (tmp_path / "first.cuh").write_text('#pragma once\n#include "types.cuh"\nword first;\n')
    (tmp_path / "included_twice.cu").write_text('#include "types.cuh"\n#include "first.cuh"\nword last;\n')
    monkeypatch.setattr(launching, "source_folder", lambda: tmp_path)
    lines = [line for line in read_source("included_twice.cu").splitlines() if line]
    assert lines == ["typedef int word;", "word first;", "word last;"]


def test_missing_sources_are_an_incomplete_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launching, "__file__", str(tmp_path / "package" / "ops" / "launch.py"))
    with pytest.raises(FileNotFoundError, match="Install the package again"):
        launching.source_folder()


def test_results_by_a_backend_that_fails_are_not_returned() -> None:
    class Failing(Recorder):
        def launch(self, *_: Any) -> None:
            raise RuntimeError("no such kernel")

    with use_backend("cpu", Failing()), pytest.raises(RuntimeError, match="no such kernel"):
        bit_pack(torch.ones(9))
