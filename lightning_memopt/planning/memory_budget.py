"""
Bytes in words
==============

``"12GiB"``, ``"80%"`` and an int of bytes are the same question to the planner: at most how many bytes may be alive.
"""

from __future__ import annotations

import re
import reprlib
from fractions import Fraction

_UNITS = {
    "B": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
}
_BY_LOWER = {unit.lower(): size for unit, size in _UNITS.items()}
_AMOUNT = re.compile(r"\s*(\d{1,40}(?:\.\d{1,40})?)\s*([A-Za-z%]*)\s*", re.ASCII)
_TOO_MUCH = 2**63

_ACCEPTED = (
    "Give an int of bytes (12884901888), a size in KiB, MiB, GiB, TiB (powers of 1024), in KB, MB, GB, TB (powers of "
    '1000) or in B ("12GiB", "800 MiB", "1.5 GB"), or on a device with memory of its own a share of it ("80%").'
)


def budget_bytes(budget: int | str, device_bytes: int | None = None) -> int:
    """Bytes that a memory budget allows, rounded down.

    Args:
        budget: an int of bytes, or text: a number and a unit, or a share of the device's memory in percent.
        device_bytes: memory of the device; None where it has none of its own (CPU).

    Raises:
        TypeError: neither an int nor text.
        ValueError: it cannot be read, is not positive, is above 100 % or 2**63 bytes, or is a share where the device
            has no memory of its own.

    Example:
        >>> budget_bytes("1.5 KiB"), budget_bytes("1.5KB"), budget_bytes(1500)
        (1536, 1500, 1500)
        >>> budget_bytes("80%", device_bytes=1000)
        800
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        raise TypeError(f"memory_budget is {budget!r}, of type {type(budget).__name__}. {_ACCEPTED}")
    size = Fraction(budget) if isinstance(budget, int) else _read(budget, device_bytes)
    if int(size) < 1:
        raise ValueError(f"memory_budget is {budget!r}, less than one byte. {_ACCEPTED}")
    if size >= _TOO_MUCH:  # as a number it may have more digits than Python writes
        raise ValueError(f"memory_budget is 2**63 bytes or more, which no device has. {_ACCEPTED}")
    return int(size)


def _read(text: str, device_bytes: int | None) -> Fraction:
    found = _AMOUNT.fullmatch(text)
    if found is None:
        raise ValueError(f"memory_budget is {reprlib.repr(text)}, which is no size. {_ACCEPTED}")
    amount, unit = Fraction(found[1]), found[2]
    if unit == "%":
        if amount > 100:
            raise ValueError(f"memory_budget is {text!r}: a share of the device's memory is at most 100%.")
        if device_bytes is None:
            raise ValueError(
                f"memory_budget is {text!r}, but the model is on a device without memory of its own (CPU), so there "
                'is nothing to take a share of. Give bytes, such as "12GiB": those of the GPU that the plan is for.'
            )
        return Fraction(device_bytes) * amount / 100
    if unit.lower() not in _BY_LOWER:
        said = f"has the unit {unit!r}" if unit else "has no unit"
        raise ValueError(f"memory_budget is {text!r}, which {said}. {_ACCEPTED}")
    return Fraction(_BY_LOWER[unit.lower()]) * amount
