"""The C++ simulator against its Python twin, bit for bit, and at sizes that only it reaches in the time of a test."""

from __future__ import annotations

import array
import copy
import gc
import itertools
import pickle
import random
import sys
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe import _core
from terapipe.schedule import (
    Action,
    F,
    Link,
    LinkCost,
    Schedule,
    ScheduleError,
    assign_slots,
    causal_costs,
    costs_per_slice,
    demand_order,
    gpipe,
    links,
    one_f_one_b,
    rendezvous,
    ring_slots,
    seq_1f1b,
    simulate,
    terapipe,
)
from terapipe.schedule.simulate_reference import simulate_reference
from terapipe.schedule.simulation import live_reference

NUMBERS = {
    "whole": lambda rng: rng.randrange(9),
    "float": lambda rng: rng.choice([0.0, 0.1, rng.random(), 1e-7 * rng.random()]),
    "mixed": lambda rng: rng.choice([0, 3, 0.1, rng.random()]),
    "fraction": lambda rng: Fraction(rng.randrange(9), rng.randrange(1, 5)),
    "huge": lambda rng: rng.randrange(2**70),
}


SIZES = (
    lambda action: 100 + 7 * action.slice,
    lambda action: 0.1 * (1 + action.slice),
    lambda action: Fraction(1 + action.slice, 3),
)


def assert_equal(found, expected) -> None:
    assert found == expected  # schedule, starts, ends, puts, arrivals, makespans without links and at the means
    assert found.flights == expected.flights and found.start == expected.start and found.end == expected.end
    assert (found.makespan, found.bubble) == (expected.makespan, expected.bubble)
    for rank in range(found.schedule.ranks):
        for size in (None, *SIZES):
            sizes = expected._sizes(rank, size)
            steps = live_reference(expected, rank, sizes)
            assert found.live(rank, size) == steps
            assert found.peak_live(rank, size) == max(step.slices for step in steps)
    for size in SIZES:
        assert found.peaks(size) == tuple(found.peak_live(rank, size) for rank in range(found.schedule.ranks))


def run_both(schedule, costs, **options):
    """Both simulations, or None if both refuse with the same words."""
    try:
        expected = simulate_reference(schedule, costs, **options)
    except ScheduleError as error:
        with pytest.raises(ScheduleError) as refused:
            simulate(schedule, costs, **options)
        assert str(refused.value) == str(error)
        return None
    found = simulate(schedule, costs, **options)
    assert_equal(found, expected)
    return found


@settings(max_examples=150)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 2)),
    make=st.sampled_from(["terapipe", "seq_1f1b", "split", "looped", "shuffled"]),
    numbers=st.sampled_from(sorted(NUMBERS)),
    prices=st.sampled_from(["none", "one", "each", "by transfer"]),
    kind=st.sampled_from(["none", "plan", "demand", "ring", "resident ring", "rendezvous", "another's"]),
    seed=st.integers(0, 10**6),
)
def test_equals_the_twin(shape, make, numbers, prices, kind, seed, split_backward, looped):
    rng = random.Random(seed)
    number = NUMBERS[numbers]
    ranks, micros, slices, warmup = shape
    schedule = {
        "terapipe": lambda: terapipe(ranks, micros, slices),
        "seq_1f1b": lambda: seq_1f1b(ranks, micros, slices, warmup_per_hop=warmup),
        "split": lambda: split_backward(seq_1f1b(ranks, micros, slices), rng.randrange(4)),
        "looped": lambda: looped(ranks, 2, micros, slices),
        "shuffled": lambda: seq_1f1b(ranks, micros, slices),
    }[make]()
    slots = {
        "none": lambda: None,
        "plan": lambda: assign_slots(schedule),
        "demand": lambda: assign_slots(schedule, order=demand_order(schedule)),
        "ring": lambda: ring_slots(schedule, rng.randint(1, 3)),
        "resident ring": lambda: ring_slots(schedule, rng.randint(1, 3), resident=True),
        "rendezvous": lambda: rendezvous(schedule),
        "another's": lambda: assign_slots(
            terapipe(*rng.choice([(ranks, micros, slices + 1), (ranks + 1, micros, slices)]))
        ),
    }[kind]()
    if make == "shuffled":  # mostly a deadlock, or sends in another order than the takes
        orders = [list(order) for order in schedule.orders]
        order = rng.choice(orders)
        first, second = rng.randrange(len(order)), rng.randrange(len(order))
        order[first], order[second] = order[second], order[first]
        schedule = Schedule(orders)
        if slots is not None:
            slots = ring_slots(schedule, 2)
    costs = {action: number(rng) for action in schedule.actions()}
    table = [number(rng) for _ in range(slices)]
    price = {
        "none": lambda: None,
        "one": lambda: LinkCost(number(rng), 3.0, 2),
        "each": lambda: {link: LinkCost(number(rng), *rng.choice([(), (2, 3)])) for link in links(schedule)},
        "by transfer": lambda: LinkCost(
            number(rng), 1, lambda transfer: table[(transfer.micro + transfer.slice) % slices]
        ),
    }[prices]()
    if kind == "another's" and make != "shuffled" and links(schedule):
        for run in (simulate, simulate_reference):
            with pytest.raises(ValueError, match="the slots are of another schedule"):
                run(schedule, costs, slots=slots)
        return
    found = run_both(schedule, costs, links=price, slots=slots)
    if found is not None and numbers in ("whole", "float"):
        assert found.core is not None


MOST = 2**51 - 1  # twelve of them are whole in an int64 and not in a double


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ((1, 1, 1), (1, 2, 4)),
        ((1, 1, 1), (0.1, 0.2, 0.4)),
        ((1, 2, 4), (0.1, 0.2, 0.4)),
        ((0.1, 0.2, 0.4), (1, 2, 4)),
        ((1, 2, 2**61 + 1), (1, 2**62 - 1, 3)),
        ((MOST, MOST, MOST), (MOST, MOST, 0.5)),
        ((1.0, 2.0, 0.5), (0.25, MOST, 1)),
    ],
    ids=str,
)
def test_kinds_of_action_may_differ_in_kind_of_number(forward, backward):
    """Whose mean is exact for one and rounded for the other, or that no one format of the core holds."""
    for schedule in (seq_1f1b(1, 2, 3), seq_1f1b(3, 2, 3)):
        run_both(schedule, costs_per_slice(forward=forward, backward=backward))


def test_slots_serve_an_equal_schedule_and_no_other():
    schedule = seq_1f1b(2, 2, 2)
    slots = ring_slots(schedule, 1)
    expected = simulate(schedule, lambda action: 1, slots=slots)
    assert_equal(simulate(Schedule(schedule.orders), lambda action: 1, slots=slots), expected)
    with pytest.raises(ValueError, match="the slots are of another schedule"):
        simulate(seq_1f1b(2, 3, 2), lambda action: 1, slots=slots)


def test_slots_of_a_split_backward_are_held_until_its_weight_gradient(split_backward):
    waits = 0
    for seed in range(60):
        rng = random.Random(seed)
        shape = rng.randint(2, 4), rng.randint(2, 3), rng.randint(1, 4)
        schedule = split_backward(seq_1f1b(*shape, warmup_per_hop=2), rng.randrange(5))
        slots = assign_slots(schedule, order=demand_order(schedule))
        costs = {action: rng.choice([0, 1, 20]) for action in schedule.actions()}
        found = run_both(schedule, costs, slots=slots)
        assert found is not None
        waits += found.makespan > found.even[0]
    assert waits > 5


@pytest.mark.parametrize(
    "orders",
    [
        [],
        [[], []],
        [[F(0, 0), F(0, 0)]],  # twice
        [[F(0, 0)], [F(2, 0)]],  # no stage 1
        [[F(0, 0), F(1, 0)], [F(1, 1)]],  # a stage on two ranks
        [[F(0, 0)], [F(1, 0), F(1, 1)]],  # nobody sends micro 1
        [[F(0, 10**9)]],  # sparse
        [[F(0, 0), Action(0, "R", 0, 0)]],  # a kind that the core does not know
    ],
    ids=str,
)
def test_schedules_that_are_odd_end_as_in_the_twin(orders):
    schedule = Schedule(orders)
    outcomes = []
    for run in (simulate_reference, simulate):
        try:
            outcomes.append((run(schedule, lambda action: 1).makespan,))
        except Exception as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]


def test_the_whole_grid_of_closed_forms():
    """Bubble (p - 1) / (m k + p - 1) and peaks of live slices, p 2..8, m 1..16, k 1..8."""
    whole = costs_per_slice(forward=1, backward=2)
    for ranks, micros, slices in itertools.product(range(2, 9), (1, 2, 3, 5, 8, 16), range(1, 9)):
        for make in (terapipe, seq_1f1b):
            simulation, units = simulate(make(ranks, micros, slices), whole), micros * slices
            assert simulation.core is not None
            assert simulation.makespan == 3 * (units + ranks - 1)
            for stage in (0, ranks - 1):
                live = units if make is terapipe else min(units, ranks - 1 - stage + slices)
                assert simulation.peak_live(stage) == live


@pytest.mark.parametrize(
    ("ranks", "slices", "share", "bubbles"),
    [
        (8, 8, 0.2, (0.027, 0.167, 0.003)),
        (8, 8, 0.5, (0.027, 0.322, 0.003)),
        (8, 8, 0.8, (0.027, 0.420, 0.003)),
        (8, 4, 0.5, (0.027, 0.292, 0.007)),
        (4, 4, 0.5, (0.012, 0.289, 0.003)),
    ],
)
def test_256_micros_do_not_remove_the_bubble_of_equal_token_slices(ranks, slices, share, bubbles):
    """1F1B, seq_1f1b with equal-token and with equal-cost slices."""
    whole, tokens = costs_per_slice(forward=1, backward=2), causal_costs([1] * slices, attention_share=share)
    found = [
        simulate(one_f_one_b(ranks, 256), whole),
        simulate(seq_1f1b(ranks, 256, slices), tokens),
        simulate(seq_1f1b(ranks, 256, slices), whole),
    ]
    assert [round(simulation.bubble.share, 3) for simulation in found] == pytest.approx(bubbles, abs=1e-9)


def test_a_hundred_thousand_actions():
    """The core alone takes about 2 ms for them; the limit leaves room for a busy machine and for reading the costs."""
    schedule = seq_1f1b(8, 64, 100, warmup_per_hop=2)
    costs = causal_costs([1] * 100, attention_share=0.5)
    begun = time.process_time()
    simulation = simulate(schedule, costs, links=LinkCost(1e-4, 1e9, 1e3))
    assert simulation.bubble.share > 0 and simulation.peak_live(0) == 2 * 7 + 100
    taken = time.process_time() - begun
    assert len(simulation.starts) == 102_400 and taken < 0.6, f"{taken:.2f} s"


def test_costs_may_be_an_array():
    schedule = seq_1f1b(3, 2, 4)
    costs = causal_costs([4, 3, 2, 1], attention_share=0.5)
    numbers = [costs(action) for action in schedule.actions()]
    expected = simulate(schedule, costs)
    for same in (numbers, tuple(numbers), np.array(numbers), array.array("d", numbers)):
        assert_equal(simulate(schedule, same), expected)
    with pytest.raises(ValueError, match="the costs are 3 numbers, but the schedule has 48 actions"):
        simulate(schedule, [1, 2, 3])
    numbers[5] = float("nan")
    with pytest.raises(ValueError, match=r"the cost of 0F1\.1 must be a finite number"):
        simulate(schedule, numbers)


@pytest.mark.parametrize(
    ("price", "message"),
    [
        (LinkCost(-1.0), r"latency of 0->1F must be a finite number of seconds from 0 up, got -1\.0"),
        (LinkCost(float("nan")), "latency of 0->1F must be"),
        (LinkCost(float("inf")), "latency of 0->1F must be"),
        (LinkCost(0, 1.0, float("inf")), "must keep its link busy for a finite time from 0 up, got inf s"),
        (LinkCost(0, 0.0, 1), r"bandwidth of 0->1F must be above 0 bytes a second, got 0\.0"),
        (LinkCost(0, 1.0, -5), r"0->1F micro 0 slice 0 must keep its link busy for a finite time from 0 up, got -5\.0"),
        ({Link(1, 0, "B"): LinkCost()}, "the link costs have no entry for 0->1F"),
    ],
    ids=str,
)
def test_links_that_make_no_sense_are_refused_by_both(price, message):
    for run in (simulate, simulate_reference):
        with pytest.raises(ValueError, match=message):
            run(gpipe(2, 1), lambda action: 1, links=price)


def test_copies_and_pickles_of_a_simulation_hold_the_same():
    schedule = seq_1f1b(2, 2, 2)
    simulation = simulate(schedule, lambda action: 1.5)
    for same in (copy.deepcopy(simulation), pickle.loads(pickle.dumps(simulation))):
        assert_equal(same, simulation)
    assert pickle.loads(pickle.dumps(schedule)) == schedule


def test_what_is_kept_of_a_schedule_goes_with_it():
    module = sys.modules["terapipe.schedule.flat"]
    gc.collect()
    kept = len(module._FLAT._entries)
    schedule = seq_1f1b(2, 2, 2)
    slots = assign_slots(schedule)
    simulate(schedule, lambda action: 1, slots=slots)
    assert len(module._FLAT._entries) == kept + 1
    del schedule, slots
    gc.collect()
    assert len(module._FLAT._entries) == kept


def test_the_core_refuses_buffers_of_another_size():
    flat = _core.FlatSchedule(
        stages=array.array("i", [0]),
        kinds=b"F",
        micros=array.array("i", [0]),
        slices=array.array("i", [0]),
        rank_lengths=[1],
    )
    with pytest.raises(ValueError, match="costs must be a contiguous buffer of 1 entries of format 'd', got 2"):
        _core.simulate_float(flat, costs=array.array("d", [1, 2]))
    with pytest.raises(ValueError, match="of format 'd', got 1 of 'q'"):
        _core.simulate_float(flat, costs=array.array("q", [1]))
    with pytest.raises(ValueError, match="slots of another schedule"):
        _core.PutGates(flat, slot=[0, 0], slots=[], resident=True)
