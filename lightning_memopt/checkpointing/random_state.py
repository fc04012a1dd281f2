"""Random numbers of the host: those of Python and NumPy.

torch's are replayed by torch in a recomputed region, by ``parts.py`` in a part.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class HostRandom:
    """The states of Python's and, where it is loaded, NumPy's global generators."""

    python: Any
    numpy: Any

    @staticmethod
    def now() -> HostRandom:
        numpy = sys.modules.get("numpy")
        return HostRandom(random.getstate(), None if numpy is None else numpy.random.get_state())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostRandom) or self.python != other.python:
            return False
        if self.numpy is None or other.numpy is None:
            return self.numpy is other.numpy
        return bool((self.numpy[1] == other.numpy[1]).all()) and self.numpy[2:] == other.numpy[2:]

    def set(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw the same numbers again; afterwards go on where the generators are now."""
        now = HostRandom.now()
        self.set()
        try:
            yield
        finally:
            now.set()
