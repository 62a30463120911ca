from __future__ import annotations

import json
import re

import pytest

from terapipe.schedule import TraceEvent, causal_costs, seq_1f1b, simulate, trace
from terapipe.viz import render_html, write_html

EVENTS = trace(simulate(seq_1f1b(3, 2, 4), causal_costs([3, 1, 4, 1], attention_share=0.4)))


def rows(page):
    return json.loads(re.search(r'<script type="application/json" id="rows">(.*?)</script>', page, re.S)[1])


def test_the_page_holds_every_row_and_the_bubble(tmp_path):
    write_html(tmp_path / "timeline.html", EVENTS, title="three ranks", note="simulated")
    page = (tmp_path / "timeline.html").read_text(encoding="utf-8")
    data = rows(page)
    assert len(data["bars"]) == len(EVENTS) and data["ranks"] == 3
    assert {bar[6] for bar in data["bars"]} == {event.label for event in EVENTS}
    assert 0 < data["bubble"] < 1 and "three ranks" in page and "simulated" in page
    assert all(len(shades) == 4 for shades in data["shades"].values())
    assert "{{" not in page


def test_the_page_needs_nothing_else():
    page = render_html(EVENTS)
    assert not re.findall(r"https?://|src=|@import|url\(|<link", page)


def test_text_cannot_break_out_of_the_page():
    event = TraceEvent(0, "</script><!--{{title}}", 0.0, 1.0, "optimizer")
    page = render_html([event], title="<b>&</b>")
    assert rows(page)["bars"][0][6] == event.label
    assert page.count("</script>") == 2 and "<b>&" not in page


@pytest.mark.parametrize("events", [[], [TraceEvent(0, "0F0.0", 1.0, 1.0, "compute")]], ids=["none", "zero length"])
def test_degenerate_timelines_are_pages_too(events):
    assert rows(render_html(events))["duration_s"] == 0
