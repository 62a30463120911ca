from __future__ import annotations

import itertools

import pytest

from terapipe.schedule import (
    GENERATORS,
    check,
    costs_per_slice,
    gpipe,
    interleaved,
    one_f_one_b,
    seq_1f1b,
    seq_interleaved,
    seq_zero_bubble,
    simulate,
    terapipe,
)


def text(schedule):
    return [" ".join(map(str, order)) for order in schedule.orders]


def test_golden_lists():
    assert text(one_f_one_b(3, 3)) == [
        "0F0.0 0F1.0 0F2.0 0B0.0 0B1.0 0B2.0",
        "1F0.0 1F1.0 1B0.0 1F2.0 1B1.0 1B2.0",
        "2F0.0 2B0.0 2F1.0 2B1.0 2F2.0 2B2.0",
    ]
    assert text(seq_1f1b(2, 2, 2)) == [
        "0F0.0 0F0.1 0F1.0 0B0.1 0F1.1 0B0.0 0B1.1 0B1.0",
        "1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1F1.1 1B1.1 1B1.0",
    ]
    assert text(terapipe(1, 2, 2)) == ["0F0.0 0F0.1 0F1.0 0F1.1 0B1.1 0B1.0 0B0.1 0B0.0"]


@pytest.mark.parametrize(("ranks", "micros"), list(itertools.product(range(1, 5), range(1, 5))))
def test_one_slice_gives_the_schedules_without_slices(ranks, micros):
    assert gpipe(ranks, micros) == terapipe(ranks, micros, 1)
    assert one_f_one_b(ranks, micros) == seq_1f1b(ranks, micros, 1)


def test_enough_warmup_is_all_forwards_first():
    schedule = seq_1f1b(2, 3, 2, warmup_per_hop=100)
    assert [a.kind for a in schedule[0]] == ["F"] * 6 + ["B"] * 6


@pytest.mark.parametrize("name", GENERATORS)
def test_sizes_below_one_are_refused(name):
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="of at least 1, got 0"):
            GENERATORS[name](*sizes)


SMALL = [*itertools.product((1, 2, 4), (1, 3), (1, 3)), (3, 5, 2), (4, 2, 5), (5, 4, 3)]


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interleaved_schedules_run_at_every_size(chunks, interpret):
    for ranks, micros, slices in SMALL:
        schedule = seq_interleaved(ranks, micros, slices, chunks=chunks)
        check(schedule)
        assert (schedule.stages, schedule.micros, schedule.slices) == (ranks * chunks, micros, slices)
        assert interpret(schedule).problem is None
        assert [schedule.rank_stages(r) for r in range(ranks)] == [
            tuple(range(r, ranks * chunks, ranks)) for r in range(ranks)
        ]


@pytest.mark.parametrize(
    ("ranks", "micros", "slices", "chunks"), [(4, 8, 1, 2), (4, 8, 4, 4), (8, 8, 8, 2), (3, 6, 3, 5)]
)
def test_the_bubble_of_interleaved_schedules_shrinks_by_the_chunks(ranks, micros, slices, chunks):
    schedule = seq_interleaved(ranks, micros, slices, chunks=chunks)
    found = simulate(schedule, costs_per_slice(forward=1, backward=2))
    assert found.bubble.share == pytest.approx((ranks - 1) / (micros * slices * chunks + ranks - 1), abs=1e-12)
    assert interleaved(ranks, micros, chunks=chunks) == seq_interleaved(ranks, micros, 1, chunks=chunks)


def test_split_backwards_keep_no_more_alive_and_are_never_slower(interpret):
    for ranks, micros, slices in SMALL:
        for ahead in (1, 2):
            split = seq_zero_bubble(ranks, micros, slices, warmup_per_hop=ahead)
            check(split)
            assert interpret(split, stages=ranks, micros=micros, slices=slices).problem is None
            whole = seq_1f1b(ranks, micros, slices, warmup_per_hop=ahead)
            fast = simulate(split, costs_per_slice(forward=1, input_grad=1, weight_grad=1))
            slow = simulate(whole, costs_per_slice(forward=1, backward=2))
            assert fast.makespan <= slow.makespan
            assert max(map(fast.peak_live, range(ranks))) <= max(map(slow.peak_live, range(ranks)))


@pytest.mark.parametrize(
    ("ranks", "micros", "slices", "attention", "whole", "split"),
    [  # slices of equal cost; attention's backward takes 2.5 times its forward, all of it input gradient
        (8, 4, 4, 0.5, 0.304, 0.232),
        (8, 4, 8, 0.5, 0.179, 0.132),
        (8, 8, 8, 0.5, 0.099, 0.070),
        (8, 8, 8, 0.8, 0.099, 0.088),
        (8, 8, 16, 0.8, 0.052, 0.046),
        (8, 16, 8, 0.5, 0.052, 0.036),
    ],
)
def test_what_a_split_backward_gains(ranks, micros, slices, attention, whole, split):
    inputs, weights = 1 - attention + 2.5 * attention, 1 - attention
    one = simulate(seq_1f1b(ranks, micros, slices), costs_per_slice(forward=1, backward=inputs + weights))
    two = simulate(
        seq_zero_bubble(ranks, micros, slices), costs_per_slice(forward=1, input_grad=inputs, weight_grad=weights)
    )
    assert one.bubble.share == pytest.approx(whole, abs=6e-4)
    assert two.bubble.share == pytest.approx(split, abs=6e-4)


def test_a_schedule_by_name_has_the_sizes_asked_for_and_the_functions_defaults():
    for generator in GENERATORS.values():
        slices = [3] * generator.takes_slices
        assert generator(2, 4, *slices) == generator.make(2, 4, *slices)
        if generator.takes_warmup_per_hop:
            assert generator(2, 4, 3, warmup_per_hop=2) == generator.make(2, 4, 3, warmup_per_hop=2)
            assert generator(2, 4, 3) == generator.make(2, 4, 3, warmup_per_hop=1)
        if generator.takes_chunks:
            assert generator(2, 4, chunks=1).stages == 2 and generator(2, 4).stages == 2 * 2
        assert any(action.kind == "W" for action in generator(2, 4).actions()) == generator.splits_backward


def test_what_a_schedule_does_not_have_is_refused():
    with pytest.raises(ValueError, match="'gpipe' does not slice but 4 slices were asked for; use 'terapipe'"):
        GENERATORS["gpipe"](2, 2, 4)
    with pytest.raises(ValueError, match="use 'seq_1f1b'"):
        GENERATORS["one_f_one_b"](2, 2, 4)
    with pytest.raises(ValueError, match=r"'terapipe' has no warmup_per_hop \(got 2\)"):
        GENERATORS["terapipe"](2, 2, 4, warmup_per_hop=2)
    with pytest.raises(ValueError, match=r"'seq_1f1b' has one stage a rank \(got 3 chunks\); use 'seq_interleaved'"):
        GENERATORS["seq_1f1b"](2, 2, 4, chunks=3)
    with pytest.raises(ValueError, match="warmup_per_hop of at least 1, got 0"):
        seq_1f1b(2, 2, 2, warmup_per_hop=0)
