"""The simulator against closed forms, the tables of bubbles that the design rests on, and a naive fixpoint."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe.schedule import (
    Action,
    B,
    F,
    Link,
    LinkCost,
    ScheduleError,
    assign_slots,
    causal_costs,
    check,
    costs_per_slice,
    demand_order,
    gpipe,
    one_f_one_b,
    rendezvous,
    ring_slots,
    seq_1f1b,
    simulate,
    terapipe,
)

WHOLE = costs_per_slice(forward=1, backward=2)


@pytest.mark.parametrize("make", [terapipe, seq_1f1b])
def test_equal_costs_give_the_closed_forms_exactly(make):
    """Bubble (p - 1) / (m k + p - 1); peak of live slices m k (terapipe) or min(m k, p - 1 - s + k)."""
    for ranks, micros, slices in itertools.product(range(1, 9), (1, 2, 3, 8), (1, 2, 3, 8)):
        simulation = simulate(make(ranks, micros, slices), WHOLE)
        units, bubble = micros * slices, simulation.bubble
        assert simulation.makespan == 3 * (units + ranks - 1)
        assert Fraction(bubble.idle_s, bubble.rank_time_s) == Fraction(ranks - 1, units + ranks - 1)
        assert (bubble.imbalance_s, bubble.communication_s) == (0, 0)
        for stage in range(ranks):
            live = units if make is terapipe else min(units, ranks - 1 - stage + slices)
            assert simulation.peak_live(stage) == live
            assert simulation.live(stage)[-1].slices == 0


def test_one_f_one_b_keeps_as_many_micros_alive_as_stages_follow():
    for ranks, micros in itertools.product(range(1, 7), range(1, 9)):
        simulation = simulate(one_f_one_b(ranks, micros), WHOLE)
        assert [simulation.peak_live(s) for s in range(ranks)] == [min(micros, ranks - s) for s in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "slices", "share", "bubbles"),
    [
        (8, 8, 0.2, [(0.636, 0.291, 0.179), (0.304, 0.200, 0.052), (0.099, 0.174, 0.013)]),
        (8, 8, 0.5, [(0.636, 0.403, 0.179), (0.304, 0.343, 0.052), (0.099, 0.326, 0.013)]),
        (8, 8, 0.8, [(0.636, 0.478, 0.179), (0.304, 0.435, 0.052), (0.099, 0.423, 0.013)]),
        (8, 4, 0.5, [(0.636, 0.478, 0.304), (0.304, 0.347, 0.099), (0.099, 0.304, 0.027)]),
        (4, 4, 0.5, [(0.429, 0.361, 0.158), (0.158, 0.308, 0.045), (0.045, 0.293, 0.012)]),
    ],
)
def test_equal_token_slices_keep_a_bubble_that_more_micros_never_remove(ranks, slices, share, bubbles):
    """1F1B, seq_1f1b with equal-token and with equal-cost slices, for 4, 16 and 64 micros."""
    equal_tokens = causal_costs([1] * slices, attention_share=share)
    for micros, expected in zip((4, 16, 64), bubbles, strict=True):
        unsliced = simulate(one_f_one_b(ranks, micros), WHOLE).bubble.share
        tokens = simulate(seq_1f1b(ranks, micros, slices), equal_tokens).bubble
        cost = simulate(seq_1f1b(ranks, micros, slices), WHOLE).bubble.share
        assert [round(value, 3) for value in (unsliced, tokens.share, cost)] == pytest.approx(expected, abs=1e-9)
        assert tokens.imbalance_s > 0


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ((8, 16, 8), [(0.343, 15), (0.102, 22), (0.074, 29)]),
        ((8, 64, 8), [(0.326, 15), (0.052, 22), (0.020, 29)]),
        ((4, 16, 4), [(0.308, 7), (0.062, 10), (0.062, 13)]),
    ],
)
def test_one_more_warmup_slice_a_hop_buys_the_slack_back(case, expected):
    costs = causal_costs([1] * case[2], attention_share=0.5)
    for warmup_per_hop, (bubble, live) in enumerate(expected, start=1):
        simulation = simulate(seq_1f1b(*case, warmup_per_hop=warmup_per_hop), costs)
        assert (round(simulation.bubble.share, 3), simulation.peak_live(0)) == (bubble, live)


@pytest.mark.parametrize(("latency", "expected"), [(0.1, [0.063, 0.014, 0.014]), (0.25, [0.129, 0.016, 0.016])])
def test_more_warmup_also_hides_the_latency_of_links(latency, expected):
    """Slices of equal cost at an attention share of .5: the backward takes (2 + 2.5) / 2 of the forward."""
    costs = costs_per_slice(forward=1, backward=2.25)
    for warmup_per_hop, bubble in enumerate(expected, start=1):
        schedule = seq_1f1b(8, 64, 8, warmup_per_hop=warmup_per_hop)
        simulation = simulate(schedule, costs, links=LinkCost(latency))
        assert round(simulation.bubble.share, 3) == bubble
        assert simulation.bubble.imbalance_s == pytest.approx(0)


def test_a_case_small_enough_to_do_by_hand():
    """2 ranks, 2 micros, F 2, B 3, a link that is busy for 1 with each transfer, which arrives 1 later."""
    schedule = gpipe(2, 2)
    link = LinkCost(latency_s=1, bytes_per_s=4, bytes_of=4)
    simulation = simulate(schedule, costs_per_slice(forward=2, backward=3), links=link)
    assert [simulation.start[action] for action in schedule[0]] == [0, 2, 13, 16]
    assert [simulation.start[action] for action in schedule[1]] == [4, 6, 8, 11]
    flights = {(t.link.direction, t.micro): tuple(flight) for t, flight in simulation.flights.items()}
    assert flights == {("F", 0): (2, 4), ("F", 1): (4, 6), ("B", 1): (11, 13), ("B", 0): (14, 16)}
    bubble = simulation.bubble
    assert simulation.makespan == 19 and bubble.share == pytest.approx(1 - 20 / 38)
    assert (bubble.warmup_s, bubble.imbalance_s, bubble.communication_s) == (10, 0, 8)  # 15 with free links


def test_a_put_waits_for_its_slot_and_the_rank_with_it():
    schedule = one_f_one_b(2, 2)  # 0: F0 F1 B0 B1   1: F0 B0 F1 B1
    simulation = simulate(schedule, costs_per_slice(forward=1, backward=5))
    assert simulation.start[F(1, 1)] == 7
    slow = simulate(
        schedule,
        costs_per_slice(forward=1, backward=5),
        links=LinkCost(latency_s=2),
        slots=assign_slots(schedule, order=demand_order(schedule)),
    )
    # rank 1 frees the only slot when its first backward ends at 9; then the second forward crosses in 2
    assert (slow.end[B(1, 0)], slow.start[F(1, 1)], slow.start[B(0, 0)]) == (9, 11, 11)


def test_rendezvous_waits_for_the_receiver():
    schedule = terapipe(2, 1, 2)
    simulation = simulate(schedule, costs_per_slice(forward=[1, 1], backward=[4, 1]), slots=rendezvous(schedule))
    assert simulation.start[F(1, 0, 1)] == 2
    with pytest.raises(ScheduleError, match=r"rank 0 ran 0F1\.0 and has no slot for 0->1F micro 1 slice 0"):
        simulate(one_f_one_b(2, 2), WHOLE, slots=rendezvous(one_f_one_b(2, 2)))


def naive(schedule, cost, latency, slots):
    """Times by repeated relaxation of every rule until nothing moves; None when they grow without end (a deadlock)."""
    end = dict.fromkeys(schedule.actions(), 0)
    left = dict(end)
    limit = sum(cost.values()) + latency * len(end) * 2 + 1
    while True:
        old = dict(end), dict(left)
        for order in schedule.orders:
            free = 0
            for action in order:
                stage, kind, micro, piece = action
                way = -1 if kind == "F" else 1
                ready = free
                if 0 <= stage + way < schedule.stages:
                    ready = max(ready, left[Action(stage + way, kind, micro, piece)] + latency)
                end[action] = ready + cost[action]
                left[action] = max(left[action], end[action])
                free = left[action]
        for transfers in slots.order.values():
            last: dict[int, Action] = {}
            for t in transfers:
                sender = Action(t.stage - 1, "F", t.micro, t.slice)
                if t.link.direction == "B":
                    sender = Action(t.stage + 1, "B", t.micro, t.slice)
                if slots.slot(t) in last:
                    left[sender] = max(left[sender], left[last[slots.slot(t)]])
                taker = Action(t.stage, "B" if slots.resident or t.link.direction == "B" else "F", t.micro, t.slice)
                last[slots.slot(t)] = taker
        if (end, left) == old:
            return end
        if max(left.values()) > limit:
            return None


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    kind=st.sampled_from(["plan", "capped", "ring", "resident ring"]),
    count=st.integers(1, 4),
    latency=st.integers(0, 5),
    data=st.data(),
)
def test_times_are_those_of_a_naive_fixpoint(shape, kind, count, latency, data):
    schedule = seq_1f1b(*shape[:3], warmup_per_hop=shape[3])
    times = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=30))
    cost = {action: times[index % len(times)] for index, action in enumerate(schedule.actions())}
    slots = {
        "plan": assign_slots(schedule),
        "capped": assign_slots(schedule, at_most=count),
        "ring": ring_slots(schedule, count),
        "resident ring": ring_slots(schedule, count, resident=True),
    }[kind]
    expected = naive(schedule, cost, latency, slots)
    if expected is None:
        with pytest.raises(ScheduleError, match="the simulated ranks wait for each other"):
            simulate(schedule, cost, links=LinkCost(latency), slots=slots)
        with pytest.raises(ScheduleError):
            check(schedule, slots)
        return
    simulation = simulate(schedule, cost, links=LinkCost(latency), slots=slots)
    assert simulation.end == expected
    bubble = simulation.bubble
    assert min(bubble.warmup_s, bubble.imbalance_s, bubble.communication_s) >= 0
    assert bubble.idle_s == schedule.ranks * simulation.makespan - sum(cost.values())


def test_links_can_differ_and_share_their_bandwidth():
    schedule = terapipe(2, 1, 3)
    slow, fast = LinkCost(bytes_per_s=1, bytes_of=lambda transfer: 10 * (transfer.slice + 1)), LinkCost()
    simulation = simulate(schedule, WHOLE, links={Link(0, 1, "F"): slow, Link(1, 0, "B"): fast})
    flights = [tuple(f) for t, f in simulation.flights.items() if t.link.direction == "F"]
    assert flights == [(1, 11), (11, 31), (31, 61)]  # one after the other, though the puts came at 1, 2 and 3


def test_live_bytes_follow_the_size_of_each_slice():
    simulation = simulate(terapipe(1, 1, 2), WHOLE)
    size = {0: 100, 1: 7}
    assert [tuple(step) for step in simulation.live(0, lambda action: size[action.slice])] == [
        (0, 0),
        (0, 100),
        (1, 107),
        (4, 100),
        (6, 0),
    ]


def test_a_split_backward_is_live_until_its_weight_gradient(split_backward):
    schedule = split_backward(terapipe(1, 1, 2), 1)
    simulation = simulate(schedule, costs_per_slice(forward=1, input_grad=1, weight_grad=1))
    assert simulation.makespan == 6 and simulation.bubble.idle_s == 0
    assert [step.slices for step in simulation.live(0)] == [0, 1, 2, 1, 0]


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf")])
def test_costs_that_are_no_times_are_refused(bad):
    with pytest.raises(ValueError, match=r"the cost of 0F0\.0 must be a finite number"):
        simulate(gpipe(1, 1), costs_per_slice(forward=bad, backward=1))


def test_what_takes_no_time_has_no_bubble():
    assert simulate(gpipe(2, 2), lambda action: 0, links=LinkCost()).bubble.share == 0


def test_missing_costs_are_named():
    with pytest.raises(ValueError, match=r"no entry for 0B0\.0"):
        simulate(gpipe(1, 1), {F(0, 0): 1})
    with pytest.raises(ValueError, match=r"no entry for 0F0\.1"):
        simulate(terapipe(1, 1, 2), costs_per_slice(forward=[1], backward=1))
