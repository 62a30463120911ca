from __future__ import annotations

import itertools

import pytest

from terapipe.schedule import Action, Link, gpipe, link_transfers, links, sends, sent_by, seq_1f1b, taken_by, takes
from terapipe.schedule.transfers import sending_action, taking_action


@pytest.mark.parametrize("shape", list(itertools.product((1, 2, 4), (1, 3), (1, 3))), ids=str)
def test_both_ends_of_a_link_have_the_same_list(shape):
    schedule = seq_1f1b(*shape)
    for link, transfers in link_transfers(schedule).items():
        assert transfers == tuple(t for t in sends(schedule, link.source_rank) if t.link == link)
        assert transfers == tuple(t for t in takes(schedule, link.destination_rank) if t.link == link)
        for transfer in transfers:
            assert sent_by(schedule, sending_action(schedule, transfer)) == transfer
            assert taken_by(schedule, taking_action(schedule, transfer)) == transfer


def test_links_of_a_pipeline():
    assert [str(link) for link in links(gpipe(3, 1))] == ["0->1F", "1->0B", "1->2F", "2->1B"]
    assert links(gpipe(1, 4)) == ()
    assert taken_by(gpipe(2, 1), Action(0, "F", 0, 0)) is None
    assert sent_by(gpipe(2, 1), Action(1, "F", 0, 0)) is None


def test_stages_of_one_rank_hand_over_without_a_link(looped):
    assert links(looped(1, 3, 1, 2)) == ()
    assert links(looped(2, 2, 1, 1)) == (Link(0, 1, "B"), Link(0, 1, "F"), Link(1, 0, "B"), Link(1, 0, "F"))


def test_a_split_backward_sends_at_its_input_gradient(split_backward):
    schedule = split_backward(seq_1f1b(2, 1, 2), 2)
    assert sent_by(schedule, Action(1, "W", 0, 1)) is None and taken_by(schedule, Action(0, "W", 0, 1)) is None
    transfer = sent_by(schedule, Action(1, "I", 0, 1))
    assert transfer is not None and taking_action(schedule, transfer) == Action(0, "I", 0, 1)
