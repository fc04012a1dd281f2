"""What the GPU's compiler, NVRTC with ptxas, makes of a CUDA source; no GPU is needed.

As a script, ``python ptxas.py OPTIONS < SOURCE`` prints the compiler's log. A process of its own, since NVRTC compiles
one program of a process at a time.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class CompiledKernel:
    """What ptxas says of a kernel."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int


def compiled_kernels(log: str) -> dict[str, CompiledKernel]:
    """What a log of a compilation with ``-Xptxas -v`` says, by kernel."""
    compiled = {}
    for part in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'(\w+)'", part)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        if not (name and stack and registers):
            raise ValueError(f"ptxas writes other words than expected:\n{part}")
        shared = re.search(r"(\d+) bytes smem", part)
        compiled[name[1]] = CompiledKernel(
            int(registers[1]), int(stack[1]), int(stack[2]), int(stack[3]), int(shared[1]) if shared else 0
        )
    return compiled


def main() -> None:
    from cuda.bindings import nvrtc

    error, program = nvrtc.nvrtcCreateProgram(sys.stdin.buffer.read(), b"kern.cu", 0, [], [])
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        sys.exit(error.name)
    options = [option.encode() for option in sys.argv[1:]]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    print(log.rstrip(b"\0").decode())
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        sys.exit(error.name)


if __name__ == "__main__":
    main()
