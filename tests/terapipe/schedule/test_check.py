"""`check` against the slow oracle of conftest.py: it accepts exactly what the oracle can run to a right end."""

from __future__ import annotations

import importlib
import itertools
import random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe import _core
from terapipe.schedule import (
    GENERATORS,
    Action,
    Schedule,
    ScheduleError,
    assign_slots,
    check,
    clock_order,
    demand_order,
    gpipe,
    one_f_one_b,
    rendezvous,
    ring_slots,
    seq_1f1b,
    terapipe,
)
from terapipe.schedule.flat import flat_schedule
from terapipe.schedule.simulate import runs_to_its_end


def every_schedule(ranks, micros, slices):
    yield terapipe(ranks, micros, slices)
    for warmup_per_hop in (1, 2, 3):
        yield seq_1f1b(ranks, micros, slices, warmup_per_hop=warmup_per_hop)
    if slices == 1:
        yield gpipe(ranks, micros)
        yield one_f_one_b(ranks, micros)


def refuses(schedule, slots=None):
    """Whether `check` does. What the C++ core passes at once, the rules in Python must pass as well."""
    rules = importlib.import_module("terapipe.schedule.check")
    try:
        check(schedule, slots)
        with mock.patch.object(rules, "_sound", return_value=False):
            check(schedule, slots)
    except ScheduleError:
        return True
    return False


@pytest.mark.parametrize("ranks", range(1, 6))
def test_every_small_shape_runs_with_its_slots(ranks, interpret):
    """The design's proof: the plan's slots, and also as few slots as live slices, never deadlock."""
    for shape in itertools.product([ranks], range(1, 6), range(1, 6)):
        for schedule in every_schedule(*shape):
            for slots in (assign_slots(schedule), assign_slots(schedule, order=demand_order(schedule))):
                check(schedule, slots)
                assert interpret(schedule, slots).problem is None, shape


@pytest.mark.parametrize("lag", [0, 1, 5])
def test_split_backwards_and_several_stages_a_rank_run(lag, interpret, split_backward, looped):
    for ranks, micros, slices in [(1, 1, 1), (2, 3, 2), (3, 2, 4), (4, 1, 3)]:
        for schedule in (seq_1f1b(ranks, micros, slices), looped(ranks, 2, micros, slices)):
            schedule = split_backward(schedule, lag)
            for order in (None, clock_order(schedule), demand_order(schedule)):
                slots = assign_slots(schedule, order=order)
                check(schedule, slots)
                assert interpret(schedule, slots).problem is None


@pytest.mark.parametrize("kind", ["capped", "ring", "resident ring", "rendezvous"])
def test_too_few_slots_are_refused_exactly_when_the_oracle_hangs(kind, interpret):
    make = {
        "capped": lambda schedule, count: assign_slots(schedule, at_most=count),
        "ring": lambda schedule, count: ring_slots(schedule, count),
        "resident ring": lambda schedule, count: ring_slots(schedule, count, resident=True),
        "rendezvous": lambda schedule, count: rendezvous(schedule),
    }[kind]
    verdicts = []
    for shape in [(1, 2, 2), (2, 1, 1), (2, 1, 4), (2, 2, 1), (2, 3, 3), (3, 4, 2), (4, 2, 3), (3, 1, 5), (5, 5, 1)]:
        for schedule in every_schedule(*shape):
            for count in (1, 2, 3, 5):
                slots = make(schedule, count)
                stuck = interpret(schedule, slots).problem
                assert stuck in (None, "deadlock")
                assert refuses(schedule, slots) == (stuck is not None), (shape, count, schedule)
                verdicts.append(stuck is not None)
    assert len(set(verdicts)) == 2, "the cases must hold both kinds"


def test_a_ring_of_live_slices_deadlocks_and_a_colouring_does_not():
    """2 ranks, 4 micros, 4 slices: 4 live slices; a resident ring needs 7 slots, a colouring 4."""
    schedule = seq_1f1b(2, 4, 4)
    forward = next(link for link in assign_slots(schedule).counts if link.direction == "F")
    fewest = assign_slots(schedule, order=demand_order(schedule))
    assert fewest.slots(forward) == 4
    check(schedule, fewest)
    assert [refuses(schedule, ring_slots(schedule, count, resident=True)) for count in range(4, 9)] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_without_slots_even_1f1b_deadlocks_and_with_one_it_does_not():
    schedule = one_f_one_b(2, 3)
    check(schedule, assign_slots(schedule, order=demand_order(schedule), at_most=1))
    with pytest.raises(ScheduleError) as refusal:
        check(schedule, rendezvous(schedule))
    assert str(refusal.value).splitlines() == [
        "the schedule deadlocks; it needs more slots, or slots from assign_slots:",
        "  rank 1: 1B0.0 meets its receiver on link 1->0B, which first runs 0F1.0",
        "  rank 0: 0F1.0 meets its receiver on link 0->1F, which first runs 1B0.0",
        "            0        1      2      3      4      5",
        "rank 0  0F0.0  >0F1.0<  0B0.0  0F2.0  0B1.0  0B2.0",
        "rank 1  1F0.0  >1B0.0<  1F1.0  1B1.0  1F2.0  1B2.0",
    ]


def test_slots_of_another_schedule_are_refused():
    schedule = seq_1f1b(2, 2, 2)
    others = terapipe(3, 2, 2), terapipe(2, 2, 2), seq_1f1b(2, 2, 3), seq_1f1b(2, 1, 2), seq_1f1b(1, 2, 2)
    for slots in (*map(assign_slots, others), rendezvous(others[1])):
        with pytest.raises(ValueError, match="the slots are of another schedule"):
            check(schedule, slots)


def test_the_cycle_names_the_slot_and_who_holds_it():
    schedule = seq_1f1b(2, 4, 4)
    words = r"rank 0: 0F1\.2 puts into slot 0 of 6 of link 0->1F, held by micro 0 slice 0 until 1B0\.0"
    with pytest.raises(ScheduleError, match=words) as refusal:
        check(schedule, ring_slots(schedule, 6, resident=True))
    assert ">0F1.2<" in str(refusal.value)


BASES = [(1, 2, 2, 1), (2, 1, 3, 1), (2, 2, 2, 1), (3, 3, 1, 1), (3, 2, 2, 2)]


def mutants(schedule):
    """Every drop, duplicate, swap of two actions, move of an action and change of an index, one at a time."""
    orders = [list(order) for order in schedule.orders]
    places = [(rank, index) for rank, order in enumerate(orders) for index in range(len(order))]

    def with_change(change):
        copy = [list(order) for order in orders]
        change(copy)
        return Schedule(copy)

    for rank, index in places:
        action = orders[rank][index]
        yield with_change(lambda o, r=rank, i=index: o[r].pop(i))
        for at in range(len(orders[rank]) + 1):
            yield with_change(lambda o, r=rank, a=action, at=at: o[r].insert(at, a))
        for to in range(len(orders)):
            yield with_change(lambda o, r=rank, i=index, to=to: o[to].append(o[r].pop(i)))
        for kind in "FBIW":
            yield with_change(lambda o, r=rank, i=index, a=action, k=kind: o[r].__setitem__(i, a._replace(kind=k)))
    for (r1, i1), (r2, i2) in itertools.combinations(places, 2):

        def swap(o, r1=r1, i1=i1, r2=r2, i2=i2):
            o[r1][i1], o[r2][i2] = o[r2][i2], o[r1][i1]

        yield with_change(swap)


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["full", "split"])
def test_mutants_are_refused_unless_harmless(base, split, interpret, split_backward):
    ranks, micros, slices, warmup_per_hop = base
    schedule = seq_1f1b(ranks, micros, slices, warmup_per_hop=warmup_per_hop)
    schedule = split_backward(schedule, 1) if split else schedule
    sizes = {"stages": ranks, "micros": micros, "slices": slices}
    refused = harmless = 0
    for mutant in mutants(schedule):
        problem = interpret(mutant, **sizes).problem
        assert refuses(mutant) == (problem is not None), f"{problem}\n{mutant}"
        refused, harmless = refused + (problem is not None), harmless + (problem is None)
    assert refused > harmless


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), shape=st.sampled_from([(1, 2, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2), (3, 1, 2)]))
def test_shuffled_lists_are_judged_as_the_oracle_judges(interpret, seed, shape):
    """Few random moves, so that valid schedules nobody would generate are among them."""
    rng, schedule = random.Random(seed), seq_1f1b(*shape)
    orders = [list(order) for order in schedule.orders]
    for _ in range(rng.randint(1, 4)):
        order = rng.choice(orders)
        order.insert(rng.randrange(len(order)), order.pop(rng.randrange(len(order))))
    shuffled = Schedule(orders)
    sizes = dict(zip(("stages", "micros", "slices"), shape, strict=True))
    assert refuses(shuffled) == (interpret(shuffled, **sizes).problem is not None)


@pytest.mark.parametrize("name", GENERATORS)
def test_the_core_finds_what_generators_make_sound(name):
    """Else `check` would take the slow way, which gives the same answer."""
    generator = GENERATORS[name]
    for ranks, micros, slices in ((1, 1, 1), (3, 2, 1), (2, 3, 4), (4, 1, 3)):
        schedule = generator(ranks, micros, slices if generator.takes_slices else 1)
        assert _core.sound(flat_schedule(schedule).core) and runs_to_its_end(schedule, assign_slots(schedule))


def parse(*rows):
    return Schedule.from_text("\n".join(f"{rank}: {row}" for rank, row in enumerate(rows)))


REFUSALS = {
    "missing": (
        parse("0F0.0 0F0.1 0B0.1 0B0.0", "1F0.0 1F0.1 1B0.1"),
        r"rank 1 lacks 1B0\.0 \(backward of",
        ">1B0.0 missing<",
    ),
    "double": (parse("0F0.0 0B0.0 0F0.0"), r"0F0\.0 is listed twice", ">0F0.0<"),
    "forward order": (
        parse("0F0.1 0F0.0 0B0.1 0B0.0"),
        r"0F0\.0 runs after 0F0\.1; forwards of a micro must ascend",
        ">0F0.0<",
    ),
    "backward order": (parse("0F0.0 0F0.1 0B0.0 0B0.1"), "backwards of a micro must descend", ">0B0.1<"),
    "backward first": (parse("0B0.0 0F0.0"), r"0B0\.0 runs before 0F0\.0", ">0B0.0<"),
    "W before I": (parse("0F0.0 0W0.0 0I0.0"), r"0W0\.0 runs before 0I0\.0", ">0W0.0<"),
    "W without I": (parse("0F0.0 0W0.0"), r"rank 0 lacks 0I0\.0 \(input gradient", ">0I0.0 missing<"),
    "B and I": (parse("0F0.0 0B0.0 0I0.0"), r"0B0\.0 is a full backward but", ">0I0.0<"),
    "two ranks": (parse("0F0.0", "0B0.0"), "stage 0 is on rank 0 and on rank 1", ">0B0.0<"),
    "no such stage": (parse("0F0.0 0B0.0", "2F0.0 2B0.0"), "no rank runs stage 1 of 3", "rank 1"),
    "micros interleave": (
        parse("0F0.0 0F0.1 0F1.0 0F1.1 0B0.1 0B1.1 0B0.0 0B1.0"),
        "begins the backward of micro 1 on stage 0 while 1 slices of micro 0 are left",
        ">0B1.1<",
    ),
    "link order": (
        parse("0F0.0 0F1.0 0B0.0 0B1.0", "1F1.0 1F0.0 1B0.0 1B1.0"),
        r"link 0->1F carries 0\.0 first \(after 0F0\.0\) but rank 1 takes 1\.0 first",
        ">1F1.0<",
    ),
    "deadlock": (
        parse("0F0.0 0B0.0 0F1.0 0B1.0", "1F0.0 1F1.0 1B0.0 1B1.0"),
        r"deadlocks:\n  rank \d: .*needs the result of",
        ">1F1.0<",
    ),
    "empty": (Schedule([[], []]), "2 ranks and no action", ""),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_what_and_mark_the_cell(name):
    schedule, words, marked = REFUSALS[name]
    with pytest.raises(ScheduleError, match=words) as refusal:
        check(schedule)
    assert marked in str(refusal.value)


def test_marks_far_apart_show_the_columns_beside_them():
    schedule = seq_1f1b(1, 30, 1)
    with pytest.raises(ScheduleError) as refusal:
        check(Schedule([[*schedule[0], schedule[0][3]]]))
    assert str(refusal.value).splitlines()[1:] == [
        "            2        3      4      59       60",
        "rank 0  0F1.0  >0B1.0<  0F2.0  0B29.0  >0B1.0<",
    ]


def test_long_schedules_show_the_columns_around_the_mark():
    schedule = seq_1f1b(2, 50, 4)
    orders = [list(order) for order in schedule.orders]
    orders[1].remove(Action(1, "B", 30, 2))
    with pytest.raises(ScheduleError) as refusal:
        check(Schedule(orders))
    assert ">1B30.2 missing<" in str(refusal.value)
    assert max(map(len, str(refusal.value).splitlines())) < 400
