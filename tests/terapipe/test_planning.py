"""Amounts of memory as people write them (the commands themselves: test_cli.py)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe.planning import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("24GB", 24e9),
        ("24 g", 24e9),
        ("16GiB", 16 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5T", 1.5e12),
        (" 80gib ", 80 * 2**30),
        (".5KB", 500),
        ("0", None),
        ("0.0GB", None),
        ("-1GB", None),
        ("24GBB", None),
        ("1e9", None),
        ("1.2.3GB", None),
        (".", None),
        ("GB", None),
        ("", None),
        ("inf", None),
        ("nan", None),
        ("24EB", None),
    ],
)
def test_amounts(text: str, expected: float | None) -> None:
    if expected is not None:
        assert parse_bytes(text) == expected
    else:
        with pytest.raises(ValueError, match=r"memory"):
            parse_bytes(text)


@given(st.integers(1, 10**6), st.sampled_from("KMGT"), st.sampled_from([("", 1000), ("i", 1024)]))
def test_every_unit(number: int, unit: str, kind: tuple[str, int]) -> None:
    infix, base = kind
    assert parse_bytes(f"{number}{unit}{infix}B") == number * base ** (1 + "KMGT".index(unit))
