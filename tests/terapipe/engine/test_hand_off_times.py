"""Hand-offs: what counts as exposed, and the summary over a step.  Over real processes: test_wiring.py."""

from __future__ import annotations

import pytest

from terapipe.engine.hand_off_times import TIMES, HandOff, hand_offs, summarize
from terapipe.schedule.trace import HAND_OFF, TraceEvent, bubble_share, busy_s
from terapipe.schedule.transfers import Link, Transfer

FORWARD = Transfer(Link(0, 1, "F"), 2, 3, 1)


@pytest.mark.parametrize(
    ("waiting", "taken", "exposed", "end"),
    [
        (5.0, 10.5, 0.5, 10.5),  # the consumer stood waiting all along
        (10.2, 10.5, 0.3, 10.5),  # it came while the slice was on its way
        (12.0, 12.1, 0.1, 10.4),  # it came late: only what the take itself cost
    ],
)
def test_only_a_waiting_consumer_is_exposed(waiting: float, taken: float, exposed: float, end: float) -> None:
    hand_off = HandOff(FORWARD, sent=10.0, put=10.4, waiting=waiting, taken=taken)
    assert hand_off.exposed_s == pytest.approx(exposed)
    assert hand_off.end == end
    row = TraceEvent(1, "0->1F 2.3", 1.0, end - 9.0, HAND_OFF)
    assert hand_off.event(9.0) == row and row.kind == HAND_OFF and row.action is None


def test_the_summary_adds_up_and_no_hand_off_hides_everything() -> None:
    transfers = [FORWARD, FORWARD._replace(slice=4)]
    found = hand_offs(transfers, [0.0, 1.0, 5.0, 5.0, 10.0, 11.0, 9.0, 12.0])
    assert len(found) == 2 and len(found) * TIMES == 8
    summary = summarize(found)
    assert (summary.count, summary.seconds, summary.exposed_s, summary.median_exposed_s) == (2, 3.0, 2.0, 1.0)
    assert summary.hidden_share == pytest.approx(1 / 3)
    assert summarize([]).hidden_share == 1.0


def test_a_hand_off_does_not_make_its_rank_busy() -> None:
    events = [TraceEvent(0, "0F0.0", 0.0, 1.0, "compute"), TraceEvent(0, "1->0B 0.0", 1.0, 2.0, HAND_OFF)]
    assert busy_s(events, 0) == 1.0 and bubble_share(events) == 0.5
