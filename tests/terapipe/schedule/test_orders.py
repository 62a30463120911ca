"""Orders of all actions: the core's against the Python twin's, on every kind of schedule; also ranks that get stuck."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe.schedule import GENERATORS, Schedule, ScheduleError, clock_order, demand_order, seq_1f1b
from terapipe.schedule.orders import linear_order_reference
from terapipe.schedule.transfers import producers

ORDERS = {clock_order: True, demand_order: False}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(GENERATORS)),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4)),
    warmup=st.integers(1, 2),
    swaps=st.integers(0, 2),
    seed=st.integers(0, 999),
)
def test_the_core_gives_the_order_of_the_python_twin(name, shape, warmup, swaps, seed):
    ranks, micros, slices = shape
    generator = GENERATORS[name]
    schedule = generator(
        ranks,
        micros,
        slices if generator.takes_slices else 1,
        warmup_per_hop=warmup if generator.takes_warmup_per_hop else 1,
    )
    rng = random.Random(seed)
    lists = {rank: list(schedule[rank]) for rank in range(ranks)}
    for _ in range(swaps):  # some of these get stuck
        mine = lists[rng.randrange(ranks)]
        a, b = rng.randrange(len(mine)), rng.randrange(len(mine))
        mine[a], mine[b] = mine[b], mine[a]
    schedule = Schedule(lists)
    for order, by_ticks in ORDERS.items():
        try:
            expected = linear_order_reference(schedule, by_ticks=by_ticks)
        except ScheduleError as error:
            with pytest.raises(ScheduleError) as found:
                order(schedule)
            assert str(found.value) == str(error) and "wait for each other" in str(error)
            continue
        assert order(schedule) == expected
        at = {action: index for index, action in enumerate(expected)}
        assert all(at[need] < at[action] for action in expected for need in producers(schedule, action))


@pytest.mark.parametrize("order", ORDERS)
def test_a_hundred_thousand_actions_take_a_moment(order):
    schedule = seq_1f1b(16, 200, 16)
    order(schedule)  # flattens the schedule, once
    began = time.process_time()
    assert len(order(schedule)) == 102_400
    assert time.process_time() - began < 0.2  # 0.01 on one core of 2026; a second or two in Python
