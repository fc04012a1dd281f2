"""Every kernel of ``cuda/``: what the GPU's compiler makes of it, and what the sanitizers say to a run on the CPU."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_memopt.ops.launch import CupyBackend, read_source, source_folder
from tests.cuda_on_cpu import KernelError, cache_folder, compile_kernels, entries_of, load, require_compiler
from tests.cuda_on_cpu.sanitized import sanitized_environment
from tests.ptxas import compiled_kernels

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path.name for path in source_folder().glob("*.cu"))
HEADERS = sorted(path.name for path in source_folder().glob("*.cuh"))
PTXAS = ROOT / "tests" / "ptxas.py"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
# Sources with instructions that exist on one architecture alone.
ONE_ARCHITECTURE = {name: ("sm_90a",) for name in SOURCES if name.startswith("packed_linear_wgmma_")}

# Sources of the kernels that also run on GPUs before Ampere, and the oldest of these that CUDA 13 compiles for.
BEFORE_AMPERE = ("bit_pack.cu", "count_pack.cu", "neuron.cu", "packed_linear_simt.cu", "sparse.cu")
OLDEST_ARCHITECTURE = "sm_75"

# For a kernel that says neither by `// registers <= N` nor by __launch_bounds__ how many it may take.
DEFAULT_REGISTERS = 128
REGISTERS_OF_A_MULTIPROCESSOR = 65536
MOST_REGISTERS_OF_A_THREAD = 255
STATIC_SHARED_LIMIT = 48 * 1024


def test_there_are_sources() -> None:
    assert SOURCES


# ---------------------------------------------------------------------------------------------------------------------
# The dialect


@pytest.mark.parametrize("name", sorted({*SOURCES, *HEADERS} - {"device.cuh"}))
def test_ptx_is_in_device_cuh_only(name: str) -> None:
    text = re.sub(r"//.*|/\*.*?\*/", "", (source_folder() / name).read_text())
    assert not re.search(r"\basm\b|__asm", text)


@pytest.mark.parametrize("name", SOURCES)
def test_parameters_are_of_types_that_a_launch_passes_exactly(name: str) -> None:
    library = load(read_source(name))
    assert library.entries
    for entry in library.entries:
        for type_ in library.function(entry.name)[1]:
            assert type_[0] == "*" or type_ in ("i4", "i8", "f4"), f"{entry.name} takes {type_}"


def test_no_two_entries_have_the_same_name() -> None:
    names = [entry.name for name in SOURCES for entry in entries_of(read_source(name))]
    assert len(names) == len(set(names))


# ---------------------------------------------------------------------------------------------------------------------
# The GPU's compiler


def compile_for(text: str, architecture: str) -> str:
    """Compile as CuPy does and return the log, with what ptxas says of each kernel; kept for the next run."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is missing", exc_type=ImportError)
    options = (*CupyBackend.OPTIONS, "-ftz=true", f"-arch={architecture}", "-Xptxas", "-v")
    key = "\0".join((text, *options, importlib.metadata.version("nvidia-cuda-nvrtc")))
    kept = cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.ptxas"
    if kept.exists():
        return kept.read_text()
    done = subprocess.run([sys.executable, PTXAS, *options], input=text, capture_output=True, text=True)
    if done.returncode:
        raise KernelError(f"NVRTC cannot compile for {architecture}:\n{done.stdout}\n{done.stderr}")
    with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
        file.write(done.stdout)
    os.replace(file.name, kept)
    return done.stdout


def register_caps(text: str) -> dict[str, int]:
    """The most registers that each entry may take.

    By the last comment ``// registers <= N`` above it; else by its ``__launch_bounds__``; else the default.
    """
    library = load(text)
    declared = [
        (number, int(match[1]))
        for number, line in enumerate(text.splitlines(), 1)
        if (match := re.search(r"//\s*registers <= (\d+)", line))
    ]
    caps = {}
    for entry in library.entries:
        above = [cap for number, cap in declared if number < entry.line]
        threads, blocks = library.launch_bounds(entry.name)
        if above:
            caps[entry.name] = above[-1]
        elif threads:
            share = REGISTERS_OF_A_MULTIPROCESSOR // (threads * max(blocks, 1)) // 8 * 8
            caps[entry.name] = min(share, MOST_REGISTERS_OF_A_THREAD)
        else:
            caps[entry.name] = DEFAULT_REGISTERS
    return caps


@pytest.mark.parametrize("name", SOURCES)
def test_kernels_stay_in_registers_on_every_architecture(name: str) -> None:
    text = read_source(name)
    architectures = ONE_ARCHITECTURE.get(name, ARCHITECTURES)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        logs = dict(zip(architectures, pool.map(functools.partial(compile_for, text), architectures), strict=True))
    caps = register_caps(text)
    too_much = []
    for architecture, log in logs.items():
        assert "warning" not in log, f"{architecture}:\n{log}"
        # That products of a warpgroup run one after the other, because their registers do not allow more.
        assert "Performance Loss" not in log, f"{architecture}:\n{log}"
        compiled = compiled_kernels(log)
        assert compiled.keys() == caps.keys()
        too_much += [
            f"{entry} on {architecture}, at most {caps[entry]} registers: {found}"
            for entry, found in compiled.items()
            if found.registers > caps[entry]
            or found.stack_bytes
            or found.spill_store_bytes
            or found.spill_load_bytes
            or found.static_shared_bytes > STATIC_SHARED_LIMIT
        ]
    assert not too_much, "\n".join(too_much)


@pytest.mark.parametrize("name", BEFORE_AMPERE)
def test_kernels_of_older_gpus_use_no_instruction_that_these_lack(name: str) -> None:
    compiled = compiled_kernels(compile_for(read_source(name), OLDEST_ARCHITECTURE))
    assert compiled
    assert not any(found.stack_bytes or found.spill_store_bytes for found in compiled.values())


SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spills(const float* in, float* out, int n) {
    float values[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) values[i] = in[i * n + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i * n + threadIdx.x] = values[i] * values[63 - i];
}
extern "C" __global__ void has_a_stack(const float* in, float* out, int n) {
    float values[8];
    for (int i = 0; i < 8; ++i) values[i] = in[i] * 2;
    for (int i = 8; i < n; ++i) values[int(in[i]) & 7] += 1;
    for (int i = 0; i < 8; ++i) out[i] = values[i];
}
"""


def test_spills_and_stack_frames_are_seen() -> None:
    compiled = compiled_kernels(compile_for(SPILLING, "sm_90"))
    assert compiled["spills"].spill_store_bytes > 0
    assert compiled["spills"].spill_load_bytes > 0
    assert compiled["has_a_stack"].stack_bytes > 0
    assert compiled["has_a_stack"].registers > 0


def test_the_register_cap_is_the_last_comment_above_or_the_launch_bounds() -> None:
    text = read_source("device.cuh") + (
        '\nextern "C" __global__ void plain() {}\n'
        'extern "C" __global__ void __launch_bounds__(256) loose() {}\n'
        'extern "C" __global__ void __launch_bounds__(32 * 12, 2) tight() {}\n'
        "// registers <= 40\n"
        '#define ENTRY(name) extern "C" __global__ void __launch_bounds__(256, 2) name() {}\n'
        "ENTRY(first)\n"
        "// registers <= 72\n"
        "ENTRY(second)\n"
    )
    assert register_caps(text) == {"plain": 128, "loose": 255, "tight": 80, "first": 40, "second": 72}


# ---------------------------------------------------------------------------------------------------------------------
# Sanitizers


@functools.cache
def compile_all_with_sanitizers() -> None:
    require_compiler()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda name: compile_kernels(read_source(name), sanitize=True), SOURCES))


def test_every_kernel_runs_under_the_sanitizers(tmp_path: Path) -> None:
    """The tests marked ``sanitize`` pass with AddressSanitizer and UBSan, and together launch every entry."""
    compile_all_with_sanitizers()
    files = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.sanitize" in path.read_text()]
    files.remove(Path(__file__).resolve())
    log = tmp_path / "launched"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-m", "sanitize", "-p", "no:cacheprovider", "-p", "no:xdist"),
            *(f"--basetemp={tmp_path / 'basetemp'}", *map(str, files)),
        ],
        cwd=ROOT,
        env=sanitized_environment(str(log)),
        capture_output=True,
        text=True,
    )
    assert not done.returncode, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    entries = {entry.name for name in SOURCES for entry in load(read_source(name)).entries}
    not_run = entries - set(log.read_text().split())
    assert not not_run, f"no test marked `sanitize` launches: {', '.join(sorted(not_run))}"


FORKS = """
import os
import numpy, torch
from tests.test_cuda_on_cpu import run, ints

values, out, size = torch.arange(33, dtype=torch.int32), ints(33), numpy.int32(33)
for entry in {entries!r}:
    child = os.fork()
    if not child:
        run(entry, values, out, numpy.int32(32 if "shared" in entry else 33), threads=1, shared_bytes=128)
        os._exit(0)
    print(entry, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_the_sanitizers_see_accesses_that_go_one_element_too_far() -> None:
    expected = {
        "stay_within": None,
        "read_beyond": "heap-buffer-overflow",
        "write_beyond": "heap-buffer-overflow",
        "write_beyond_static_shared": "global-buffer-overflow",
        "write_beyond_dynamic_shared": "use-after-poison",
        "read_unaligned": "misaligned address",
    }
    done = subprocess.run(
        [sys.executable, "-c", FORKS.format(entries=list(expected))],
        cwd=ROOT,
        env=sanitized_environment(symbolize=False),
        capture_output=True,
        text=True,
    )
    codes = dict(line.split() for line in done.stdout.splitlines())
    assert codes.keys() == expected.keys(), done.stderr[-6000:]
    assert {entry for entry, code in codes.items() if code == "0"} == {"stay_within"}, done.stderr[-6000:]
    for words in filter(None, expected.values()):
        assert words in done.stderr
