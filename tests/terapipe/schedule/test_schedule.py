from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe.schedule import KINDS, Action, Schedule, check, gpipe, one_f_one_b, seq_1f1b, terapipe

index = st.integers(0, 12)
actions = st.builds(Action, index, st.sampled_from(KINDS), index, index)
schedules = st.lists(st.lists(actions, max_size=8), max_size=5).map(Schedule)


@given(schedules)
def test_text_and_csv_bring_it_back(schedule):
    assert Schedule.from_text(schedule.to_text()) == schedule
    if schedule.slices:
        assert Schedule.from_csv(schedule.to_csv(), slices=schedule.slices) == schedule


def test_text_form_is_one_line_a_rank():
    assert terapipe(2, 1, 2).to_text() == "0: 0F0.0 0F0.1 0B0.1 0B0.0\n1: 1F0.0 1F0.1 1B0.1 1B0.0\n"
    commented = Schedule.from_text("# two ranks\n\n 1: 1F0.0\n0: 0F0.0 # first\n")
    assert commented.orders == ((Action(0, "F", 0, 0),), (Action(1, "F", 0, 0),))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0.0", "line 1 .* must begin with its rank"),
        ("0: 0F0.0\n0: 0F0.1", "line 2 .* lists rank 0 a second time"),
        ("0: 0F0.0\n2: 2F0.0", r"every rank from 0 to 1, got \[0, 2\]"),
        ("0: 0F0.0 0Q0.0", "line 1 .*'0Q0.0' is not an action"),
    ],
)
def test_bad_text_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        Schedule.from_text(text)


def test_csv_refuses_communication_actions():
    with pytest.raises(ValueError, match=r"row 1 holds '0SEND_F0'.*compute_only"):
        Schedule.from_csv("0F0,0SEND_F0\n")
    with pytest.raises(ValueError, match="slices must be at least 1, got 0"):
        Schedule.from_csv("0F0\n", slices=0)


def test_csv_skips_bubbles():
    assert Schedule.from_csv("0F0,,0B0\n,1F0,1B0\n") == gpipe(2, 1)


@pytest.mark.parametrize(
    "schedule", [gpipe(3, 2), one_f_one_b(3, 5), terapipe(2, 2, 3), seq_1f1b(3, 2, 4, warmup_per_hop=2)]
)
def test_torch_reads_the_csv_and_accepts_the_schedule(schedule):
    """Through the functions that its `_load_csv` calls; they are private, hence one test and no use."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs torch.distributed")
    rows = csv.reader(io.StringIO(schedule.to_csv(), newline=""))
    theirs = {rank: [pipelining._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    for rank, order in theirs.items():
        assert [str(a) for a in order] == [
            f"{a.stage}{a.kind}{a.micro * schedule.slices + a.slice}" for a in schedule[rank]
        ]
    stage_ranks = pipelining._validate_schedule(
        theirs, schedule.ranks, schedule.stages, schedule.micros * schedule.slices
    )
    assert stage_ranks == {stage: schedule.stage_rank(stage) for stage in range(schedule.stages)}
    dumped = io.StringIO()
    csv.writer(dumped).writerows(theirs.values())  # what its _dump_csv does
    assert Schedule.from_csv(dumped.getvalue(), slices=schedule.slices) == schedule


def test_torch_schedule_is_read(split_backward):
    """A torch schedule with split backwards and bubbles comes in by its CSV and passes our check."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs torch.distributed")
    split = split_backward(seq_1f1b(2, 3, 2), 1)
    rows = [[pipelining._Action.from_str(cell) for cell in row.split(",")] for row in split.to_csv().splitlines()]
    text = "\n".join(",".join(["", *map(str, row)]) for row in rows)
    schedule = Schedule.from_csv(text, slices=2)
    check(schedule)
    assert schedule == split


def test_sizes_and_places():
    schedule = seq_1f1b(3, 2, 4)
    assert (schedule.ranks, schedule.stages, schedule.micros, schedule.slices) == (3, 3, 2, 4)
    assert schedule.places[Action(2, "F", 0, 3)] == (2, 3)
    assert schedule.stage_rank(1) == 1 and schedule.rank_stages(1) == (1,)
    with pytest.raises(ValueError, match="no rank runs stage 3"):
        schedule.stage_rank(3)
    assert Schedule([]).stages == 0
    assert hash(schedule) == hash(seq_1f1b(3, 2, 4))
