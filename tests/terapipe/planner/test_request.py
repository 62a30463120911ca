"""The unit of slices, and which micro sizes are asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import costs_8b, request

from terapipe.planner.request import LEAST_UNITS, MOST_UNITS, check_unit, in_tokens


@given(st.integers(1, 10_000) | st.integers(1, 2**31 - 1))
def test_the_unit_chosen_divides_and_leaves_few_units_or_nearly_divides(tokens):
    unit = check_unit(tokens, None)
    counts = [n for n in range(1, MOST_UNITS + 1) if tokens % n == 0]
    if tokens % unit == 0:
        assert tokens // unit == max(counts)
    else:
        assert max(counts) < LEAST_UNITS and unit & (unit - 1) == 0
        assert MOST_UNITS // 2 < tokens / unit <= MOST_UNITS


@given(st.lists(st.integers(1, 9), min_size=1), st.integers(1, 9), st.integers(0, 8))
def test_slices_of_units_cover_the_sequence_whose_last_unit_may_be_short(units, unit, missing):
    tokens = sum(units) * unit - missing % unit
    lengths = in_tokens(units, unit, tokens)
    assert sum(lengths) == tokens and len(lengths) == len(units) and lengths[-1] > (units[-1] - 1) * unit
    assert lengths[:-1] == tuple(length * unit for length in units[:-1])


def test_more_units_than_can_be_searched_are_refused_with_the_smallest_that_can():
    with pytest.raises(ValueError, match="into 12000 units, more than 8192; use a unit of 2 or more"):
        check_unit(12000, 1)
    assert check_unit(12000, 2) == 2 and check_unit(8192, 1) == 1


@pytest.mark.parametrize(
    ("tokens", "unit", "remedy"),
    [
        (512, 100, "use a unit such as 64, 128, or sequences of 500 or 600 tokens."),
        (2048, 4096, "use a unit such as 1024, 2048, or sequences of 4096 tokens."),
        (2053, 100, "use a unit such as 1, 2053, or sequences of 2000 or 2100 tokens."),
        (1, 3, "use a unit such as 1, or sequences of 3 tokens."),
        (6, 0, "use a unit such as 1, 2."),
        (6, -4, "use a unit such as 1, 2."),
    ],
)
def test_a_unit_that_does_not_divide_is_answered_with_what_would(tokens, unit, remedy):
    with pytest.raises(ValueError) as caught:
        check_unit(tokens, unit)
    assert str(caught.value) == f"a unit of {unit} tokens does not divide a sequence of {tokens}; {remedy}"


@given(st.integers(1, 5000), st.integers(-3, 10_000))
def test_every_remedy_helps(tokens, unit):
    try:
        assert tokens % check_unit(tokens, unit) == 0
    except ValueError as error:
        units, _, lengths = str(error).split("such as ")[1].partition(", or sequences of ")
        assert all(check_unit(tokens, int(n)) == int(n) for n in units.rstrip(".").split(", "))
        assert all(check_unit(int(n), unit) == unit for n in lengths.removesuffix(" tokens.").split(" or ") if n)


def test_micro_sizes_are_those_with_costs():
    assert request().sizes(costs_8b()) == [1, 3]
    assert request(micro_sizes=(3, 2)).sizes(costs_8b()) == [3]
