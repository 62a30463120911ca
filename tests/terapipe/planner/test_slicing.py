"""The exact search against brute force, against Algorithm 1 without shortcuts, and at sizes where structure tells.

Whole numbers held in doubles make every sum exact, so results are compared with ==, never with a tolerance.
"""

from __future__ import annotations

import bisect
import itertools
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from terapipe.planner import SliceCosts, cost_table, equal_cost_slices, slice_batch, slice_sequence
from terapipe.planner.slicing_reference import (
    best_sum,
    brute_batch,
    brute_equal_cost,
    brute_sequence,
    every_t_max,
    slice_costs,
)

INFINITY = float("inf")


def convex(l: int, s: int, rng: random.Random) -> int:
    return 90 + 7 * l + 3 * l * l + 2 * l * s


def concave(l: int, s: int, rng: random.Random) -> int:
    return 40 + int(100 * l**0.6) + 3 * l * s


def modular(l: int, s: int, rng: random.Random) -> int:
    return 60 + 5 * l + 2 * l * l + 4 * l * s


def saturating(l: int, s: int, rng: random.Random) -> int:
    return max(120, 30 * l) + (15 if s else 0) + 2 * l * s


def noisy(l: int, s: int, rng: random.Random) -> int:
    return int((100 + 20 * l + 2 * l * s) * rng.uniform(0.7, 1.3))


def noise(l: int, s: int, rng: random.Random) -> int:
    return rng.randrange(1000)


def ties(l: int, s: int, rng: random.Random) -> int:
    return rng.randrange(4)


def flat(l: int, s: int, rng: random.Random) -> int:
    """Every number of equal slices costs about the same: nothing but the last digits tells them apart."""
    return int(10**6 * l / (12 + 4 * l)) + rng.randrange(50)


def gaps(l: int, s: int, rng: random.Random) -> float:
    """Some slices are not allowed; one unit always is, so an answer exists."""
    return INFINITY if l > 1 and rng.random() < 0.5 else 50 + rng.randrange(100) * l


FAMILIES = [convex, concave, modular, saturating, noisy, noise, ties, flat, gaps]


class Table:
    """A random table of one family, as an array for the search and as a function for the twin."""

    def __init__(self, family, units: int, seed: int) -> None:
        rng = random.Random(f"{family.__name__} {units} {seed}")
        self.array = np.full((units, units), np.nan)  # what lies behind the end of the sequence must not be read
        for start in range(units):
            for length in range(1, units - start + 1):
                self.array[start, length - 1] = family(length, start, rng)

    def __call__(self, length: int, start: int) -> float:
        return float(self.array[start, length - 1])


def assert_sound(found, costs, units: int, *, stages: int) -> None:
    """The slices are a partition and cost what the result says."""
    times = [t for m in found.micros for t in slice_costs(costs[m.size], m.slices) * m.count]
    assert all(sum(m.slices) == units and min(m.slices) > 0 for m in found.micros)
    assert (found.sum_s, found.largest_s) == (sum(times), max(times))
    assert found.step_s == found.sum_s + (stages - 1) * found.largest_s
    assert found.exact and found.evaluations >= 1


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_equals_brute_force(family):
    rng = random.Random(family.__name__)
    for seed in range(330):
        units, stages, micros = rng.randint(1, 9), rng.choice([1, 2, 3, 5, 8, 50]), rng.choice([1, 1, 2, 7])
        table = Table(family, units, seed)
        found = slice_sequence(table.array, stages=stages, micros=micros)
        assert found.step_s == brute_sequence(table, units, stages=stages, micros=micros).step_s, (units, seed)
        assert_sound(found, {1: table}, units, stages=stages)
        assert found.num_micros == micros


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_equals_brute_force_at_thirteen_units(family):
    table = Table(family, 13, 0)
    assert slice_sequence(table.array, stages=7).step_s == brute_sequence(table, 13, stages=7).step_s


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_equals_algorithm_1_with_every_t_max(family):
    for units, stages, batch in ((17, 3, 3), (31, 12, 1), (32, 5, 2)):
        table = Table(family, units, 1)
        found = slice_sequence(table.array, stages=stages, micros=batch)
        assert found.step_s == every_t_max({1: table}, units, stages=stages, batch=batch).step_s
        assert_sound(found, {1: table}, units, stages=stages)


def best_of_every_t_max(costs: np.ndarray, stages: int) -> float:
    """Algorithm 1 for all values of the table at once: one column of `after` for each t_max."""
    units = len(costs)
    t_max = np.unique(costs[np.isfinite(costs)])
    after = np.full((units + 1, len(t_max)), INFINITY)
    after[units] = 0
    for start in range(units - 1, -1, -1):
        row = costs[start, : units - start, None]
        after[start] = np.where(row <= t_max, row + after[start + 1 :], INFINITY).min(axis=0)
    return float((after[0] + (stages - 1) * t_max).min())  # the t_max that is reached gives the least of its range


@pytest.mark.parametrize("family", [convex, saturating, noisy, noise, flat], ids=lambda f: f.__name__)
def test_equals_a_dp_for_each_of_three_thousand_t_max(family):
    """79 units: windows of several vector blocks, with a tail."""
    table = Table(family, 79, 5)
    costs = np.where(np.isnan(table.array), INFINITY, table.array)
    for stages in (7, 24):
        found = slice_sequence(table.array, stages=stages)
        assert found.step_s == best_of_every_t_max(costs, stages)
        assert_sound(found, {1: table}, 79, stages=stages)


@pytest.mark.parametrize("noise_share", [0, 1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1])
@pytest.mark.parametrize(("units", "stages"), [(79, 24), (101, 96)])
def test_hard_tables_equal_a_dp_for_each_t_max(units, stages, noise_share):
    """Every number of equal slices costs a step the same, so that bounds cut little: what the filters are for."""
    costs = hard(units, stages, noise_share)
    triangle = np.where(np.arange(units)[:, None] + np.arange(1, units + 1) <= units, costs, INFINITY)
    found = slice_sequence(costs, stages=stages)
    assert found.step_s == best_of_every_t_max(triangle, stages)
    assert_sound(found, {1: lambda length, start: float(costs[start, length - 1])}, units, stages=stages)


def hard(units: int, stages: int, noise_share: float) -> np.ndarray:
    length = np.arange(1, units + 1)
    random_part = 1 + noise_share * np.random.default_rng(units).random((units, units))
    return np.floor(1e12 * length / (units + (stages - 1) * length) * random_part)


@pytest.mark.parametrize(("units", "stages", "micros"), [(257, 96, 1), (512, 24, 3), (1021, 64, 1)])
def test_modular_costs_at_full_size(units, stages, micros):
    """t = a + b l + d l^2 + 2 d l s counts causal pairs: the sum depends on the number of slices alone, so for each
    number the smallest largest slice, which the longest slices within a limit find, is best."""
    a, b, d = 900_000, 31_007, 13

    def t(length: int, start: int) -> int:
        return a + b * length + d * length * length + 2 * d * length * start

    def fewest(limit: int) -> int:
        start = count = 0
        while start < units:
            length = bisect.bisect_right(range(1, units - start + 1), limit, key=lambda l: t(l, start))
            if length == 0:
                return units + 1
            start, count = start + length, count + 1
        return count

    best = INFINITY
    for count in itertools.count(1):
        total = micros * (count * a + b * units + d * units * units)
        if total >= best or count > units:
            break
        limit = bisect.bisect_left(range(t(units, 0) + 1), True, key=lambda limit: fewest(limit) <= count)
        best = min(best, total + (stages - 1) * limit)
    costs = SliceCosts(tuple(float(t(l, 0)) for l in range(1, units + 1)), per_start_length=2.0 * d)
    found = slice_sequence(costs, stages=stages, micros=micros)
    assert found.step_s == best
    assert_sound(found, {1: costs}, units, stages=stages)


def test_batches_equal_brute_force():
    rng = random.Random(3)
    for seed in range(400):
        units, batch, stages = rng.randint(1, 4), rng.randint(1, 4), rng.choice([1, 2, 4, 9])
        family = rng.choice(FAMILIES)
        sizes = {1, *rng.sample(range(1, batch + 1), rng.randint(1, batch))}
        tables = {size: Table(family, units, 10 * seed + size) for size in sizes}
        for size, table in tables.items():
            table.array *= rng.choice([1, size, 2 * size])  # now and then larger micros pay
        found = slice_batch({size: table.array for size, table in tables.items()}, stages=stages, batch=batch)
        assert found.step_s == brute_batch(tables, units, stages=stages, batch=batch).step_s, seed
        assert sum(m.size * m.count for m in found.micros) == batch
        assert_sound(found, tables, units, stages=stages)


def test_batches_equal_algorithm_1_with_every_t_max():
    for seed, (units, sizes, batch, stages) in enumerate(
        [(12, (1, 2, 3), 7, 6), (16, (2, 3), 8, 4), (9, (1, 4, 5), 13, 30), (14, (1, 2), 2, 2)] * 3
    ):
        family = FAMILIES[seed % len(FAMILIES)]
        tables = {size: Table(family, units, seed + 100 * size) for size in sizes}
        for size, table in tables.items():
            table.array = np.ceil(table.array * size * 0.9)
        found = slice_batch({size: table.array for size, table in tables.items()}, stages=stages, batch=batch)
        assert found.step_s == every_t_max(tables, units, stages=stages, batch=batch).step_s
        assert sum(m.size * m.count for m in found.micros) == batch
        assert_sound(found, tables, units, stages=stages)


def test_the_bubble_is_charged_once_a_step():
    """Charging it for each micro would cut into more slices than is best."""
    table = Table(convex, 12, 0)
    assert len(slice_sequence(table.array, stages=8, micros=64).slices) < len(
        slice_sequence(table.array, stages=8, micros=1).slices
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_equal_cost_slices_equal_brute_force(family):
    for seed in range(60):
        units = 1 + seed % 8
        table = Table(family, units, seed)
        for slices in (None, *range(1, units + 1)):
            expected = brute_equal_cost(table, units, slices=slices)
            if expected.largest_s == INFINITY:
                with pytest.raises(ValueError, match="no slicing is allowed"):
                    equal_cost_slices(table.array, slices=slices)
                continue
            found = equal_cost_slices(table.array, slices=slices, stages=3)
            assert (found.largest_s, found.sum_s) == expected
            assert slices in (None, len(found.slices))
            assert_sound(found, {1: table}, units, stages=3)


def test_equal_cost_slices_even_out_attention():
    costs = SliceCosts(tuple(float(40 * l + l * l) for l in range(1, 1025)), per_start_length=2.0)
    found = equal_cost_slices(costs, slices=8)
    times = slice_costs(costs, found.slices)
    assert list(found.slices) == sorted(found.slices, reverse=True) and max(times) < 1.01 * min(times)


def test_a_curve_is_the_table_it_stands_for():
    rng = random.Random(7)
    curve = SliceCosts(tuple(rng.uniform(1, 2) for _ in range(37)), constant=0.1, per_start=0.3, per_start_length=0.7)
    table = cost_table(curve)
    array = np.full((37, 37), np.nan)
    for start in range(37):
        for length in range(1, 38 - start):
            array[start, length - 1] = curve(length, start)
            assert table.cost(length, start) == curve(length, start)
    assert slice_sequence(curve, stages=9) == slice_sequence(array, stages=9) == slice_sequence(table, stages=9)


def test_any_layout_of_the_array_is_read():
    table = np.nan_to_num(Table(noisy, 21, 2).array)
    expected = slice_sequence(table, stages=4)
    padded = np.full((42, 63), np.nan)
    padded[::2, ::3] = table
    for same in (np.asfortranarray(table), padded[::2, ::3], table.astype(np.int64), table.tolist()):
        assert slice_sequence(same, stages=4) == expected


def test_one_stage_takes_the_smallest_sum_and_many_stages_the_smallest_slice():
    table = Table(noisy, 24, 3)
    assert slice_sequence(table.array, stages=1).sum_s == best_sum(table, 24, INFINITY).step_s
    many = slice_sequence(table.array, stages=10**9)
    assert many.largest_s == equal_cost_slices(table.array).largest_s


def test_the_answer_beats_every_uniform_slicing():
    costs = SliceCosts(tuple(max(3.0, 0.06 * l) for l in range(1, 257)), constant=0.05, per_start_length=2e-5)
    found = slice_sequence(costs, stages=48)
    for count in range(1, 257):
        lengths = [256 // count + (index < 256 % count) for index in range(count)]
        times = slice_costs(costs, lengths)
        assert found.step_s <= (sum(times) + 47 * max(times)) * (1 + 1e-15)


def test_ties_fall_the_same_way_every_time():
    table = Table(ties, 64, 0).array
    assert len({slice_sequence(table, stages=stages) for stages in (5, 5, 5)}) == 1
    assert slice_sequence(np.ones((8, 8)), stages=1).slices == (8,)  # the longest first slices
    assert slice_sequence(np.zeros((8, 8)), stages=4).slices == (8,)


def test_hard_tables_take_hundreds_of_evaluations_not_thousands():
    assert slice_sequence(hard(256, 96, 1e-4), stages=96).evaluations < 500


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([], "the cost table is empty"),
        (SliceCosts(()), "the cost table is empty"),
        ([[1.0, 2.0]], r"\[units, units\]; got shape \(1, 2\)"),
        ([[1.0, float("nan")], [1.0, 0.0]], "2 units behind a prefix of 0 is nan; .*Measure the missing lengths"),
        ([[1.0, 2.0], [-3.5, 0.0]], "1 units behind a prefix of 1 is -3.5"),
        (SliceCosts((1.0, -1.0)), "2 units behind a prefix of 0 is -1"),
        (SliceCosts((1.0, 1.0), constant=-2.0), "1 units behind a prefix of 1 is -1"),
        (SliceCosts((1.0,), per_start=float("nan")), "context term of the costs must be finite"),
        ([[INFINITY]], "no slicing is allowed"),
    ],
    ids=str,
)
def test_costs_that_make_no_sense_are_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        slice_sequence(costs, stages=2)


def test_sizes_that_make_no_sense_are_refused():
    costs = SliceCosts((1.0, 2.0))
    with pytest.raises(ValueError, match="stages must be a whole number of at least 1, got 0"):
        slice_sequence(costs, stages=0)
    with pytest.raises(ValueError, match=r"micros must be .* got -1"):
        slice_sequence(costs, stages=1, micros=-1)
    with pytest.raises(ValueError, match="2 units cannot be cut into 3 slices"):
        equal_cost_slices(costs, slices=3)
    with pytest.raises(ValueError, match=r"slices must be .* got 0"):
        equal_cost_slices(costs, slices=0)
    with pytest.raises(ValueError, match=r"no micro sizes .* batch of 5 sequences; add size 1"):
        slice_batch({2: costs, 4: costs}, stages=2, batch=5)
    with pytest.raises(ValueError, match=r"no micro size fits a batch of 3: the costs have sizes \[4\]"):
        slice_batch({4: costs}, stages=2, batch=3)
    with pytest.raises(ValueError, match="micro sizes must be at least 1"):
        slice_batch({0: costs, 1: costs}, stages=2, batch=3)
    mixed = slice_batch({1: np.full((2, 2), 9.0), 2: np.full((2, 2), 3.0)}, stages=1, batch=3)
    with pytest.raises(ValueError, match=r"micros of different sizes \(1 x 1, 1 x 2\)"):
        _ = mixed.slices


def test_other_threads_run_during_a_search():
    costs = cost_table(hard(1024, 64, 1e-3))
    thread = threading.Thread(target=lambda: [slice_sequence(costs, stages=64) for _ in range(5)])
    turns = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.0005)
        turns += 1
    thread.join()
    assert turns > 10  # with the GIL held there is about one for each search


def test_the_planner_needs_no_torch():
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from terapipe.planner import SliceCosts, slice_sequence\n"
        "print(len(slice_sequence(SliceCosts((1.0, 2.0, 3.0)), stages=4).slices))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
