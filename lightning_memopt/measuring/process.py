"""Memory of the whole process, as the operating system sees it."""

from __future__ import annotations

import os
import sys

__all__ = ["process_memory"]


def process_memory() -> int:
    """Resident set size of this process, in bytes.

    One read of ``/proc`` (about 10 microseconds), so it may be called every step. It counts everything the process
    holds, Python and libraries included, and shrinks only when the C allocator gives pages back. Where there is no
    ``/proc`` (macOS) it is the largest resident set size so far, all that the standard library offers there.

    Raises:
        NotImplementedError: On a platform with neither ``/proc`` nor the ``resource`` module (Windows).

    Example:
        >>> process_memory() > 2**20
        True
    """
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        pass
    try:
        import resource
    except ImportError:
        raise NotImplementedError(
            f"process_memory() reads /proc or the `resource` module; {sys.platform} has neither"
        ) from None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS reports bytes, the others KiB
