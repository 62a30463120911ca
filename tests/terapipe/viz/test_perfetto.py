from __future__ import annotations

import json

from terapipe.schedule import TraceEvent, costs_per_slice, simulate, terapipe, trace
from terapipe.viz import render_perfetto, write_perfetto

EVENTS = [
    *trace(simulate(terapipe(2, 1, 2), costs_per_slice(forward=1, backward=2)), seconds_per_unit=1e-3),
    TraceEvent(1, "1F0.0", 0.0, 1e-3, "wait"),
    TraceEvent(0, "optimizer", 0.02, 0.03, "optimizer"),
]


def test_rows_are_complete_events_in_microseconds():
    trace_rows = json.loads(render_perfetto(EVENTS))["traceEvents"]
    bars = [row for row in trace_rows if row["ph"] == "X"]
    assert len(bars) == len(EVENTS)
    for row, event in zip(bars, EVENTS, strict=True):
        assert row["ts"] == event.start_s * 1e6 and row["dur"] >= 0 and row["tid"] == event.rank
    assert {row["cat"] for row in bars} == {"forward", "backward", "idle or waiting", "other work"}
    assert bars[0]["args"] == {"stage": 0, "kind": "F", "micro": 0, "slice": 0}
    assert bars[-2]["name"] == "wait for 1F0.0"
    assert [row["args"]["name"] for row in trace_rows if row["name"] == "thread_name"] == ["rank 0", "rank 1"]


def test_arrows_follow_slices_between_ranks(tmp_path):
    write_perfetto(tmp_path / "trace.json", EVENTS, title="two ranks")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    starts = {row["id"]: row for row in rows if row["ph"] == "s"}
    ends = {row["id"]: row for row in rows if row["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == 4  # two slices there, two gradients back
    for name, start in starts.items():
        assert start["ts"] <= ends[name]["ts"] and {start["tid"], ends[name]["tid"]} == {0, 1}
