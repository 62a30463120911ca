"""Curves and tables of one pass: exact where the formula is, bilinear, the same many at once, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from terapipe.planner.fit import Context, Point
from terapipe.planner.pass_costs import CurveCost, GridCost


def test_a_curve_is_exact_for_causal_attention_between_its_points():
    def true(length, start):
        return 2e-3 + 3e-6 * length + 4e-9 * length * (start + length / 2) + (1e-4 + 2e-8 * start if start else 0)

    points = [Point(n, s, true(n, s)) for n in (16, 100, 700, 2048) for s in (0, 37, 5000)]
    curve = CurveCost.fit(points)
    for length in (16, 17, 99, 555, 1999, 3000):
        for start in (0, 1, 4321):
            assert curve(length, start) == pytest.approx(true(length, start), rel=1e-6)
    assert curve(3, 0) == curve(16, 0)  # below the first length nothing is cheaper
    assert curve.error(points).largest < 1e-9


def test_a_table_is_bilinear():
    table = GridCost((10, 20, 40), (0, 100), ((1.0, 2.0, 4.0), (2.0, 3.0, 6.0)))
    assert table(10, 0) == 1.0 and table(40, 100) == 6.0
    assert table(30, 50) == pytest.approx((3.0 + 4.5) / 2)
    assert table(80, 200) == pytest.approx(16.0)  # linear beyond both ends
    assert GridCost((10,), (0,), ((1.5,),))(99, 99) == 1.5


@pytest.mark.parametrize(
    "cost",
    [
        GridCost((10, 20, 47), (0, 100), ((1.1, 2.3, 4.7), (2.9, 3.1, 6.3))),
        GridCost((10, 20), (7,), ((1.1, 0.3),)),
        GridCost((10,), (0, 3, 9), ((1.1,), (0.7,), (0.1,))),
        CurveCost((8, 100, 333), (1.1, 2.3, 9.7), Context(0.3, 1e-3, 1e-5)),
    ],
)
def test_many_at_once_are_the_same_to_the_bit(cost):
    lengths, starts = np.array([1, 9, 10, 11, 47, 333, 999]), np.array([0, 1, 7, 55, 100, 1234])
    assert cost.many(lengths, starts).tolist() == [[cost(int(n), int(s)) for n in lengths] for s in starts]


@pytest.mark.parametrize("bad", [math.nan, -1e-9, math.inf, None, True])
def test_what_is_no_time_is_refused(bad):
    for make in (
        lambda: CurveCost((8, 16), (1.0, bad)),
        lambda: GridCost((8,), (0, 8), ((1.0,), (bad,))),
        lambda: CurveCost((8,), (1.0,), Context(0.0, bad, 0.0)),
    ):
        with pytest.raises(ValueError, match=rf"is {bad}; it must be a finite number"):
            make()


def test_missing_entries_are_refused():
    with pytest.raises(ValueError, match="2 lengths and 1 seconds"):
        CurveCost((8, 16), (1.0,))
    with pytest.raises(ValueError, match="row of start 8 in a cost table has 0 times for 1 lengths"):
        GridCost((8,), (0, 8), ((1.0,), ()))
    with pytest.raises(ValueError, match="row for each of 2 starts, got 1"):
        GridCost((8,), (0, 8), ((1.0,),))
    with pytest.raises(ValueError, match="must ascend"):
        CurveCost((8, 8), (1.0, 1.0))
    for axes in (((), (0,)), ((8,), ())):
        with pytest.raises(ValueError, match="at least one length and one start"):
            GridCost(*axes, ())
    for axes, words in (
        (((8, 8), (0,)), r"the lengths of a cost table must ascend from at least 1, got \[8, 8\]"),
        (((0, 8), (0,)), "the lengths of a cost table must ascend from at least 1"),
        (((8, 16), (7, 0)), r"the starts of a cost table must ascend from at least 0, got \[7, 0\]"),
    ):
        with pytest.raises(ValueError, match=words):
            GridCost(*axes, ((1.0, 1.0),) * len(axes[1]))
    with pytest.raises(ValueError, match="points at start 0"):
        CurveCost.fit([Point(8, 8, 1.0)])
