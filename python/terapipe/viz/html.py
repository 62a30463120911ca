"""A timeline as one self-contained HTML file without network. Zoom with the wheel, drag to move, hover to read.

The rows travel as JSON inside the page and `timeline.js` draws them on a canvas, so that thousands of bars stay smooth.
The trap: text inside a script element must not contain `</`, hence the escape in `_embedded`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from terapipe import files
from terapipe.schedule.trace import HAND_OFF, TraceEvent, bubble_share, busy_s, num_ranks, span
from terapipe.viz.style import KIND_COLOURS, NAMES, mixed, num_micros, num_slices, short_label


def render_html(events: Sequence[TraceEvent], *, title: str = "Pipeline timeline", note: str = "") -> str:
    """The page. `note` is a line of text below the title."""
    micros, slices, (begin, end) = num_micros(events), num_slices(events), span(events)
    bars = [
        [
            event.rank,
            event.start_s - begin,
            event.end_s - begin,
            event.kind,
            event.action.slice if event.action is not None else 0,
            short_label(event, micros=micros, slices=slices),
            event.label,
            list(event.action[:1] + event.action[2:]) if event.action is not None else None,
        ]
        for event in events
        if event.category != HAND_OFF  # too short to see here
    ]
    duration = end - begin
    data: dict[str, Any] = {
        "ranks": num_ranks(events),
        "duration_s": duration,
        "bubble": bubble_share(events),
        "idle": [1 - busy_s(events, rank) / duration if duration else 0.0 for rank in range(num_ranks(events))],
        "micros": micros,
        "slices": slices,
        "names": NAMES,
        "shades": {kind: [mixed(kind, piece, slices) for piece in range(slices)] for kind in KIND_COLOURS},
        "text": {kind: colours.text for kind, colours in KIND_COLOURS.items()},
        "bars": bars,
    }
    page = (resources.files(__package__) / "timeline.html").read_text(encoding="utf-8")
    script = (resources.files(__package__) / "timeline.js").read_text(encoding="utf-8")
    # The rows come last: nothing that they contain is searched for a placeholder again.
    page = page.replace("{{title}}", html.escape(title)).replace("{{note}}", html.escape(note))
    return page.replace("{{script}}", script).replace("{{rows}}", _embedded(data))


def write_html(
    path: str | Path, events: Sequence[TraceEvent], *, title: str = "Pipeline timeline", note: str = ""
) -> None:
    files.write_text(Path(path), render_html(events, title=title, note=note))


def _embedded(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/").replace("<!--", "<\\u0021--")
