"""Where the generators of random numbers stand: those of Python and NumPy, and torch's.

torch's are replayed by torch in a recomputed region, by ``parts.py`` in a part.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch


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


def torch_random() -> list[bytes]:
    """The states of torch's generators: that of the host, and where CUDA is in use, those of its devices."""
    with no_dispatch():  # under fake tensors these are still real
        states = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            states += torch.cuda.get_rng_state_all()
        return [state.numpy().tobytes() for state in states]


def set_torch_random(states: Sequence[bytes]) -> None:
    """Put torch's generators where they were when :func:`torch_random` was called."""
    with no_dispatch():
        host, *devices = (torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states)
        torch.set_rng_state(host)
        if devices:
            torch.cuda.set_rng_state_all(devices)
