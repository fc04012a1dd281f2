"""Runs tests with kernels that carry AddressSanitizer and UndefinedBehaviorSanitizer.

``python -m tests.cuda_on_cpu.sanitized PYTEST_ARGUMENTS`` runs pytest with the sanitizers' libraries loaded; torch's
buffers then have guard zones around them. The tests marked ``sanitize`` are meant for it.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

from tests.cuda_on_cpu import LAUNCH_LOG, SANITIZE, require_compiler


@functools.cache
def _library(name: str) -> str:
    done = subprocess.run([require_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def sanitized_environment(launch_log: str | None = None, symbolize: bool = True) -> dict[str, str]:
    """The environment of a process whose kernels carry the sanitizers.

    Args:
        launch_log: see :data:`tests.cuda_on_cpu.LAUNCH_LOG`.
        symbolize: whether reports name functions and lines, which takes seconds.
    """
    environment = dict(os.environ)
    environment[SANITIZE] = "1"
    # AddressSanitizer must come first. It looks up the C++ library's functions when it starts, before Python loads it.
    environment["LD_PRELOAD"] = " ".join(_library(name) for name in ("libasan.so", "libstdc++.so"))
    environment["ASAN_OPTIONS"] = f"detect_leaks=0:allocator_may_return_null=1:symbolize={int(symbolize)}"
    environment["UBSAN_OPTIONS"] = f"print_stacktrace=1:symbolize={int(symbolize)}"
    if launch_log is not None:
        environment[LAUNCH_LOG] = launch_log
    return environment


def main() -> None:
    command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    os.execve(sys.executable, command, sanitized_environment())


if __name__ == "__main__":
    main()
