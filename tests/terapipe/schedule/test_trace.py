from __future__ import annotations

import pytest

from terapipe.schedule import TraceEvent, costs_per_slice, seq_1f1b, simulate, trace
from terapipe.schedule.trace import bubble_share, busy_s, from_json, num_ranks, span, to_json


def test_a_simulated_trace_has_the_simulations_times_and_bubble():
    simulation = simulate(seq_1f1b(3, 2, 2), costs_per_slice(forward=[1, 3], backward=[2, 5]))
    events = trace(simulation, seconds_per_unit=0.5)
    assert len(events) == 24 and num_ranks(events) == 3
    assert span(events).duration_s == simulation.makespan / 2
    assert bubble_share(events) == pytest.approx(simulation.bubble.share)
    for event in events:
        assert event.kind == event.action.kind and event.duration_s == pytest.approx(
            float(simulation.end[event.action] - simulation.start[event.action]) / 2
        )
    assert from_json(to_json(events)) == events


def test_kinds_of_rows():
    assert TraceEvent(0, "2F0.3", 0, 1, "compute").kind == "F"
    assert TraceEvent(0, "2F0.3", 0, 1, "wait").kind == "wait"
    assert TraceEvent(0, "2F0.3", 0, 1, "reduce").kind == "other"
    assert TraceEvent(0, "clip", 0, 1, "compute").kind == "other"
    assert TraceEvent(0, "clip", 0, 1, "compute").action is None


def test_waits_are_idle_and_overlaps_count_once():
    events = [
        TraceEvent(0, "0F0.0", 0, 2, "compute"),
        TraceEvent(0, "send", 1, 3, "send"),
        TraceEvent(0, "0B0.0", 3, 8, "wait"),
        TraceEvent(0, "0B0.0", 8, 10, "compute"),
    ]
    assert busy_s(events, 0) == 5
    assert bubble_share(events) == 0.5
    assert bubble_share([]) == 0.0 and span([]).duration_s == 0


@pytest.mark.parametrize("text", ["", "{}x", "[1]", '[["a", "0F0.0", 0, 1, "compute"]]'])
def test_a_file_that_is_no_trace_is_refused(text):
    with pytest.raises(ValueError, match="the trace is not a list of"):
        from_json(text)
