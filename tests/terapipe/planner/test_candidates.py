"""Every candidate is a plan that can run and keeps what was asked for; what cannot be is refused with the reason."""

from __future__ import annotations

import re
import time

import pytest
from planner_cases import provider, request

from terapipe.planner.candidates import candidates_of
from terapipe.schedule import GENERATORS


def refusal(**changes):
    with pytest.raises(ValueError) as caught:
        list(candidates_of(request(**changes), provider()))
    return str(caught.value)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_every_candidate_is_a_plan_of_what_was_asked_for(ranks):
    asked = request(ranks=ranks, batch=6, tensor=(1, 2))
    found = list(candidates_of(asked, provider()))
    assert len(set(found)) == len(found)
    for one in found:
        plan = one.plan()  # which checks its schedule
        assert sum(plan.slices) == 512 and plan.layers == 8 and plan.ranks == one.pipe
        assert one.pipe * one.layout.data * one.layout.tensor == ranks
        assert one.micros * one.micro_size * one.layout.data == 6
    assert {one.schedule for one in found} == ({"one_f_one_b"} if ranks == 1 else set(GENERATORS))


def test_only_what_was_named_is_tried():
    asked = request(schedules=("seq_1f1b",), slices=(100, 412), data=(2,), micro_sizes=(2,), unit=None)
    for one in candidates_of(asked, provider()):
        assert (one.schedule, one.slices, one.layout.data, one.micro_size) == ("seq_1f1b", (100, 412), 2, 2)


def test_other_ranks_are_named_where_ranks_are_the_reason():
    text = refusal(ranks=13)
    assert text.startswith(
        "13 ranks cannot be cut into pipe x data x tensor for a batch of 4: 13 stages for 8 layers (embedding and head "
        "counted); 13 replicas do not divide"
    )
    near = re.search(r"; ([\d, ]+) ranks can be used; or change the batch", text)
    assert near is not None and near[1] == "10, 12, 14, 16"
    for ranks in map(int, near[1].split(", ")):
        assert list(candidates_of(request(ranks=ranks), provider()))
    assert "; 10, 12, 14, 16 ranks can be used" in refusal(ranks=21, micro_sizes=(2,))  # 20 would need size 1
    assert "data 3 does not divide 4 ranks; or change the batch" in refusal(data=(3,))
    assert "; 3, 6, 9, 12 ranks can be used" in refusal(data=(3,), batch=3, ranks=4, tensor=(1,))
    assert "tensor degree 16 does not divide the model's heads 8; choose a divisor." in refusal(ranks=16, tensor=(16,))


def test_a_number_of_ranks_that_nobody_has_is_refused_at_once_and_in_few_words():
    began = time.process_time()
    text = refusal(ranks=720720)
    assert "720720 stages for 8 layers" in text and "; and " in text and len(text) < 500
    assert "720720 stages" not in refusal(ranks=720720, data=(16,)) and time.process_time() - began < 2


@pytest.mark.parametrize("tokens", [509, 2 * 257, 7919])
def test_a_length_that_nothing_divides_is_sliced_all_the_same(tokens):
    every = list(candidates_of(request(tokens=tokens, unit=None, data=(1,)), provider()))
    assert all(sum(one.slices) == tokens and min(one.slices) > 0 for one in every)
    assert max(len(one.slices) for one in every) >= 4
    unit = 2 if tokens < 2048 else 32
    assert all(length % unit == 0 for one in every for length in one.slices[:-1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"micro_sizes": (3,)}, "there are costs for micro size 1, 2, not for 3"),
        ({"micro_sizes": (2,), "batch": 3, "data": (1,)}, "no micro size of 2 divides the 3 sequences of a replica"),
        ({"schedules": ("terapipe",), "ranks": 1}, "pipe 1 is run by one_f_one_b, not by terapipe"),
        (
            {"schedules": ("gpipe", "interleaved"), "slices": (500, 12), "data": (1,), "unit": None},
            "pipe 4 with 2 slices is run by terapipe, seq_1f1b, seq_interleaved, seq_zero_bubble, not by gpipe, "
            "interleaved",
        ),
        ({"ranks": 8, "schedules": ("interleaved",), "data": (1,)}, "pipe 8 is run by gpipe, one_f_one_b, terapipe, "),
        ({"ranks": 3, "schedules": ("gpipe",), "slices": (500, 12), "unit": None}, "pipe 3 with 2 slices is run by"),
        ({"ranks": 2, "batch": 200_000, "data": (1,), "micro_sizes": (1,)}, "more than 400000 actions"),
    ],
)
def test_other_ranks_are_not_named_where_they_would_not_help(changes, reason):
    text = refusal(**changes)
    assert reason in text and "can be used" not in text and "change the batch" not in text
    assert text.startswith("there is no plan for ")
