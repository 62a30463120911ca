"""Timeline: rows of ranks with one clock and with several.  Of whole pipelines: test_pipeline.py, test_wiring.py."""

from __future__ import annotations

from typing import Any

from terapipe.engine.hand_off_times import HandOff
from terapipe.engine.interpreter import Span
from terapipe.engine.timeline import joined_rows, own_rows
from terapipe.schedule import Action, Link, Transfer


def test_ranks_of_one_host_begin_at_the_earliest_and_others_each_at_its_own_start() -> None:
    first, second = Action(0, "F", 0, 1), Action(1, "F", 0, 1)
    programs: list[Any] = [
        type("Program", (), {"spans": [Span(0, first, "compute", 100.5, 101.0)]}),
        type(
            "Program", (), {"spans": [Span(1, second, "wait", 101.0, 101.5), Span(1, second, "compute", 101.5, 103.0)]}
        ),
    ]
    reports = [[100.25, own_rows(programs[:1])], [100.0, own_rows(programs[1:])]]
    way = [HandOff(Transfer(Link(0, 1, "F"), 0, 1, 1), sent=101.0, put=101.25, waiting=101.0, taken=101.5)]
    events = joined_rows(reports, way, one_clock=True)
    assert [(each.rank, each.label, each.start_s, each.end_s) for each in events] == [
        (0, "0F0.1", 0.5, 1.0),
        (1, "1F0.1", 1.0, 1.5),
        (1, "1F0.1", 1.5, 3.0),
        (1, "0->1F 0.1", 1.0, 1.5),
    ]
    assert [each.category for each in events] == ["compute", "wait", "compute", "hand-off"]
    assert [each.start_s for each in joined_rows(reports, [], one_clock=False)] == [0.25, 1.0, 1.5]
