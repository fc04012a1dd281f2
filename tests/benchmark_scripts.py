"""The scripts of ``benchmarks/``, imported as they import each other: from their own folder."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@contextlib.contextmanager
def benchmark_scripts(*names: str) -> Iterator[list[ModuleType]]:
    """Import the scripts of these names; none of the folder's modules stays imported afterwards."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(BENCHMARKS))
        for script in BENCHMARKS.glob("*.py"):
            sys.modules.pop(script.stem, None)
