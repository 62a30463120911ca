"""A timeline as Trace Event JSON: opens in https://ui.perfetto.dev and chrome://tracing.

One thread per rank, one per link with hand-offs; arrows (flow events) follow a slice from stage to stage. The format
counts in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terapipe import files
from terapipe.schedule.action import Action
from terapipe.schedule.trace import HAND_OFF, WAIT, TraceEvent, num_ranks
from terapipe.viz.style import NAMES


def render_perfetto(events: Sequence[TraceEvent], *, title: str = "terapipe") -> str:
    rows: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
    for rank in range(num_ranks(events)):
        about = {"ph": "M", "pid": 0, "tid": rank}
        rows.append({**about, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        rows.append({**about, "name": "thread_sort_index", "args": {"sort_index": rank}})
    links = sorted({event.label.split()[0] for event in events if event.category == HAND_OFF})
    threads = {link: num_ranks(events) + index for index, link in enumerate(links)}
    for link, thread in threads.items():
        about = {"ph": "M", "pid": 0, "tid": thread}
        rows.append({**about, "name": "thread_name", "args": {"name": f"link {link}"}})
        rows.append({**about, "name": "thread_sort_index", "args": {"sort_index": thread}})
    for event in events:
        thread = threads[event.label.split()[0]] if event.category == HAND_OFF else event.rank
        action = event.action
        detail = {} if action is None else action._asdict()
        name = f"wait for {event.label}" if event.category == WAIT else event.label
        times = {"ts": event.start_s * 1e6, "dur": event.duration_s * 1e6}
        rows.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": thread,
                "name": name,
                "cat": NAMES.get(event.kind, event.kind),
                **times,
                "args": detail,
            }
        )
    rows += _flows(events)
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}, indent=None, separators=(",", ":"))


def write_perfetto(path: str | Path, events: Sequence[TraceEvent], *, title: str = "terapipe") -> None:
    files.write_text(Path(path), render_perfetto(events, title=title))


def _flows(events: Sequence[TraceEvent]) -> list[dict[str, Any]]:
    """An arrow from each F to the F of the next stage and from each B or I to that of the stage before."""
    at_work = {event.action: event for event in events if event.action is not None and event.category != WAIT}
    rows: list[dict[str, Any]] = []
    for action, source in at_work.items():
        if action is None or action.kind == "W":
            continue
        step = 1 if action.is_forward else -1
        kinds = "F" if action.is_forward else "BI"
        target = next(
            (
                at_work[next_action]
                for kind in kinds
                if (next_action := Action(action.stage + step, kind, action.micro, action.slice)) in at_work
            ),
            None,
        )
        if target is None or target.rank == source.rank:
            continue
        about = {"pid": 0, "name": "hand-off", "cat": "hand-off", "id": len(rows) // 2}
        rows.append({"ph": "s", **about, "tid": source.rank, "ts": source.end_s * 1e6})
        rows.append({"ph": "f", "bp": "e", **about, "tid": target.rank, "ts": target.start_s * 1e6})
    return rows
