"""Uneven stages against every way to cut a list of layers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe.planner.partition import split_by_time


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_no_other_cut_has_a_faster_slowest_stage(times, data):
    stages = data.draw(st.integers(1, len(times)))
    found = split_by_time(times, stages)
    assert len(found) == stages and found[0][0] == 0 and found[-1][1] == len(times)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found)) and all(first < last for first, last in found)
    cuts = itertools.combinations(range(1, len(times)), stages - 1)
    best = min(max(sum(times[a:b]) for a, b in itertools.pairwise((0, *cut, len(times)))) for cut in cuts)
    assert max(sum(times[first:last]) for first, last in found) == best


def test_an_expensive_head_gets_fewer_blocks():
    assert split_by_time([0.1, *[1.0] * 8, 3.0], 3) == ((0, 4), (4, 8), (8, 10))
    with pytest.raises(ValueError, match="4 stages need at least 4 layers, the model has 3"):
        split_by_time([1.0, 1.0, 1.0], 4)
