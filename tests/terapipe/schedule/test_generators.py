from __future__ import annotations

import itertools

import pytest

from terapipe.schedule import GENERATORS, gpipe, one_f_one_b, seq_1f1b, terapipe


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


def test_what_a_schedule_does_not_have_is_refused():
    with pytest.raises(ValueError, match="'gpipe' does not slice but 4 slices were asked for; use 'terapipe'"):
        GENERATORS["gpipe"](2, 2, 4)
    with pytest.raises(ValueError, match="use 'seq_1f1b'"):
        GENERATORS["one_f_one_b"](2, 2, 4)
    with pytest.raises(ValueError, match=r"'terapipe' has no warmup_per_hop \(got 2\)"):
        GENERATORS["terapipe"](2, 2, 4, warmup_per_hop=2)
    with pytest.raises(ValueError, match="warmup_per_hop of at least 1, got 0"):
        seq_1f1b(2, 2, 2, warmup_per_hop=0)
