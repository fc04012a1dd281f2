"""Memory budgets in words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memopt.measuring.amounts import format_bytes
from lightning_memopt.planning.memory_budget import budget_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1, 1),
        (12 * GIB, 12 * GIB),
        ("12GiB", 12 * GIB),
        (" 12 gib ", 12 * GIB),
        ("800MiB", 800 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("0.1 GB", 100_000_000),
        ("2TiB", 2 * 2**40),
        ("3 kb", 3000),
        ("17B", 17),
        ("1.9 B", 1),
    ],
)
def test_sizes_are_read_exactly_and_rounded_down(budget: int | str, expected: int) -> None:
    assert budget_bytes(budget) == expected


def test_a_share_is_one_of_the_devices_memory() -> None:
    assert budget_bytes("80%", device_bytes=999) == 799
    assert budget_bytes("12.5 %", device_bytes=80 * GIB) == 10 * GIB
    assert budget_bytes("100%", device_bytes=7) == 7


@given(st.integers(1, 10**6), st.sampled_from([("KiB", 2**10), ("MB", 10**6), ("GiB", 2**30)]))
def test_whole_numbers_of_units_lose_nothing(amount: int, unit: tuple[str, int]) -> None:
    assert budget_bytes(f"{amount}{unit[0]}") == amount * unit[1]


def test_a_share_of_a_cpu_is_refused_with_what_to_give_instead() -> None:
    with pytest.raises(ValueError, match=r"'80%'.*CPU.*Give bytes, such as \"12GiB\""):
        budget_bytes("80%")


@pytest.mark.parametrize(
    "budget", ["", "GiB", "12", "12Gi", "12 parsecs", "1e9B", "-1GiB", "1,5GB", "nan%", "12GiB 3MiB", "9" * 5000 + "B"]
)
def test_what_cannot_be_read_is_answered_with_what_can(budget: str) -> None:
    with pytest.raises(ValueError, match=r'memory_budget is .*an int of bytes.*GiB.*"80%"'):
        budget_bytes(budget, device_bytes=GIB)


@pytest.mark.parametrize("budget", [0, -5, "0 GiB", "0.5B", "0%"])
def test_less_than_a_byte_is_no_budget(budget: int | str) -> None:
    with pytest.raises(ValueError, match="less than one byte"):
        budget_bytes(budget, device_bytes=GIB)


@pytest.mark.parametrize("budget", [2**63, 10**5000, "1" + 30 * "0" + "GiB"], ids=["a bit", "digits", "text"])
def test_more_than_any_device_has_is_no_budget(budget: int | str) -> None:
    assert budget_bytes(2**63 - 1) == 2**63 - 1
    with pytest.raises(ValueError, match=r"2\*\*63 bytes or more, which no device has\. Give an int of bytes"):
        budget_bytes(budget)


def test_more_than_the_device_has_is_no_share() -> None:
    with pytest.raises(ValueError, match="at most 100%"):
        budget_bytes("101%", device_bytes=GIB)


@pytest.mark.parametrize("budget", [0.8, True, None, [1]])
def test_other_types_are_refused_by_name(budget: Any) -> None:
    with pytest.raises(TypeError, match=rf"of type {type(budget).__name__}.*int of bytes"):
        budget_bytes(budget)


def test_bytes_are_shown_as_in_the_tables() -> None:
    assert format_bytes(105 * 2**20) == "105.0 MiB"
    assert format_bytes(0) == "0.0 MiB"
    assert format_bytes(1) == "<0.001 MiB"
