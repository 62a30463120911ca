"""Slots: their number against every reachable state of the oracle, and against the number of live slices."""

from __future__ import annotations

import copy
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe.schedule import (
    Schedule,
    ScheduleError,
    assign_slots,
    check,
    clock_order,
    demand_order,
    one_f_one_b,
    rendezvous,
    ring_slots,
    seq_1f1b,
    seq_interleaved,
    seq_zero_bubble,
    simulate,
    terapipe,
)
from terapipe.schedule.slots import assign_slots_reference, releasing_action
from terapipe.schedule.transfers import link_transfers, sending_action

SMALL = [(2, 1, 1, 1), (2, 1, 3, 1), (2, 2, 2, 1), (2, 3, 1, 2), (2, 2, 2, 3), (3, 1, 2, 1), (3, 2, 1, 1), (3, 2, 2, 1)]


def states(machine, schedule, slots, resident):
    """Every state that the ranks can reach, in any interleaving."""
    first = machine(schedule, slots, stages=schedule.stages, micros=schedule.micros, slices=schedule.slices)
    first.resident = resident
    seen, stack = set(), [first]
    while stack:
        state = stack.pop()
        if (key := (*state.at, *state.computed)) in seen:
            continue
        seen.add(key)
        yield state
        for rank in range(schedule.ranks):
            following = copy.deepcopy(state)
            if following.step(rank):
                stack.append(following)


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "copied out"])
@pytest.mark.parametrize("shape", SMALL[:6], ids=str)
def test_as_many_slots_as_can_ever_be_held_and_no_more(shape, resident, machine):
    """With unlimited slots, the greatest number held over all interleavings is exactly the number assigned."""
    schedule = seq_1f1b(*shape[:3], warmup_per_hop=shape[3])
    most: dict = {}
    for state in states(machine, schedule, None, resident):
        for link, full in state.full.items():
            most[link] = max(most.get(link, 0), len(full))
    assert assign_slots(schedule, resident=resident).counts == most


@pytest.mark.parametrize("shape", SMALL[:5], ids=str)
def test_no_interleaving_gets_stuck_with_the_fewest_slots(shape, machine):
    schedule = seq_1f1b(*shape[:3], warmup_per_hop=shape[3])
    slots = assign_slots(schedule, order=demand_order(schedule))
    for state in states(machine, schedule, slots, True):
        assert state.run.problem is None
        over = all(at == len(order) for at, order in zip(state.at, schedule.orders, strict=True))
        assert over or any(copy.deepcopy(state).step(rank) for rank in range(schedule.ranks))


def test_demand_order_needs_as_many_slots_as_live_slices():
    for ranks, micros, slices, per_hop in itertools.product(range(2, 6), range(1, 6), range(1, 6), (1, 2, 3)):
        schedule = seq_1f1b(ranks, micros, slices, warmup_per_hop=per_hop)
        slots = assign_slots(schedule, order=demand_order(schedule))
        default = assign_slots(schedule)
        simulation = simulate(schedule, lambda action: 1)
        for link in slots.counts:
            live = simulation.peak_live(link.destination_rank)
            if link.direction == "F":
                assert slots.slots(link) == live
                assert live <= default.slots(link) <= live + per_hop
            else:
                assert slots.slots(link) <= per_hop


@pytest.mark.parametrize("order", [clock_order, demand_order])
def test_slots_along_an_order_are_the_most_held_in_it(order, split_backward):
    """Interval colouring is optimal: brute-force overlap count on the same order."""
    for schedule in (seq_1f1b(3, 3, 3), terapipe(3, 2, 2), split_backward(seq_1f1b(3, 2, 3, warmup_per_hop=2), 2)):
        sequence = order(schedule)
        at = {action: index for index, action in enumerate(sequence)}
        assert sorted(at) == sorted(schedule.actions())
        slots = assign_slots(schedule, order=sequence)
        for link, transfers in slots.order.items():
            held = [
                (at[sending_action(schedule, t)], at[releasing_action(schedule, t)], slots.slot(t)) for t in transfers
            ]
            most = max(sum(begin <= time <= end for begin, end, _ in held) for time in range(len(sequence)))
            assert slots.slots(link) == most
            for (begin, end, slot), (begin2, end2, slot2) in itertools.combinations(held, 2):
                assert slot != slot2 or end < begin2 or end2 < begin


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    data=st.data(),
)
def test_puts_never_wait_for_the_plans_slots(shape, data):
    """Whatever the actions' times, the simulation with slots is the one without; also with its own order."""
    schedule = seq_1f1b(*shape[:3], warmup_per_hop=shape[3])
    times = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=40))
    cost = {action: times[index % len(times)] for index, action in enumerate(schedule.actions())}
    free = simulate(schedule, cost)
    assert simulate(schedule, cost, slots=assign_slots(schedule)).end == free.end
    assert simulate(schedule, cost, slots=assign_slots(schedule, order=free.order())).end == free.end


def test_uses_of_a_slot_are_chained():
    schedule = one_f_one_b(2, 3)
    slots = assign_slots(schedule, order=demand_order(schedule))
    forward, backward = slots.order.values()
    assert [slots.slot(t) for t in forward] == [0, 0, 0]
    assert [slots.previous(t) for t in forward] == [None, *forward[:2]]
    assert [slots.use(t) for t in forward] == [1, 2, 3]
    assert [slots.use(t) for t in backward] == [1, 2, 3]
    without = rendezvous(schedule)
    assert {without.slots(link) for link in slots.order} == {0}
    assert {(without.previous(t), without.use(t)) for t in (*forward, *backward)} == {(None, 1)}
    assert [ring_slots(schedule, 2).slot(t) for t in forward] == [0, 1, 0]


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "copied out"])
def test_the_core_gives_the_slots_of_the_python_twin(resident):
    schedules = [seq_1f1b(*shape[:3], warmup_per_hop=shape[3]) for shape in SMALL]
    schedules += [
        seq_interleaved(3, 3, 2),
        seq_interleaved(2, 3, 5, chunks=3),
        seq_zero_bubble(4, 3, 2),
        terapipe(3, 2, 3),
    ]
    for schedule in schedules:
        for options in ({}, {"at_most": 1}, {"at_most": 2}, {"order": demand_order(schedule)}):
            found = assign_slots(schedule, resident=resident, **options)
            assert found == assign_slots_reference(schedule, resident=resident, **options)
        assert dict(ring_slots(schedule, 3).order) == link_transfers(schedule)


def test_what_the_core_cannot_hold_gets_its_slots_in_python():
    micro = 2**40
    schedule = Schedule.from_text(f"0: 0F{micro}.0 0B{micro}.0\n1: 1F{micro}.0 1B{micro}.0")
    assert clock_order(schedule) == tuple(schedule[0][:1] + schedule[1] + schedule[0][1:])
    assert set(assign_slots(schedule).counts.values()) == {1}


def test_a_hundred_thousand_actions_take_a_moment():
    schedule = seq_1f1b(16, 200, 16)
    began = time.process_time()
    slots = assign_slots(schedule)
    check(schedule, slots)
    assert time.process_time() - began < 3 * 0.3  # 0.22 s here; 5.5 s in Python
    began = time.process_time()
    ring_slots(schedule, 4)
    assert time.process_time() - began < 3 * 0.15
    assert len(slots.slot_of) == 2 * 15 * 200 * 16
    began = time.process_time()
    assign_slots(schedule, order=demand_order(schedule))
    assert time.process_time() - began < 3 * 0.3  # 2.7 s in Python


def test_bad_requests():
    schedule = one_f_one_b(2, 1)
    with pytest.raises(ValueError, match="at least one slot, got at_most=0"):
        assign_slots(schedule, at_most=0)
    with pytest.raises(ValueError, match="at least one slot, got 0"):
        ring_slots(schedule, 0)
    with pytest.raises(ValueError, match="every action of the schedule once, got 1"):
        assign_slots(schedule, order=clock_order(schedule)[:1])
    for text, words in (
        ("0: 0B0.0 0F0.0\n1: 1F0.0 1B0.0", r"rank 0 cannot run 0B0\.0 before 0F0\.0 and 1B0\.0"),
        ("0: 0F0.0 0B0.0\n1: 1B0.0 1F0.0", r"rank 0 cannot run 0B0\.0 before 1B0\.0"),
    ):
        stuck = Schedule.from_text(text)
        with pytest.raises(ScheduleError, match=words):
            clock_order(stuck)
    with pytest.raises(ScheduleError, match="the ranks wait for each other"):
        assign_slots(stuck)
