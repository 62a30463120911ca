from __future__ import annotations

import struct

import pytest

from terapipe.schedule import TraceEvent, causal_costs, gpipe, simulate, terapipe, trace
from terapipe.viz import write_comparison_png, write_png
from terapipe.viz.png import Panel
from terapipe.viz.style import KIND_COLOURS, mixed

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

UNSLICED = trace(simulate(gpipe(2, 1), causal_costs([64], attention_share=0.4)))
SLICED = trace(simulate(terapipe(2, 1, 4), causal_costs([16] * 4, attention_share=0.4)))


def size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_one_timeline(tmp_path):
    write_png(tmp_path / "one.png", SLICED, title="four slices")
    width, height = size(tmp_path / "one.png")
    assert width == 2400 and 200 < height < 1000


def test_two_timelines_share_one_picture(tmp_path):
    write_comparison_png(tmp_path / "two.png", Panel("without", UNSLICED), Panel("with slices", SLICED))
    write_png(tmp_path / "one.png", SLICED)
    assert size(tmp_path / "two.png")[1] > 1.4 * size(tmp_path / "one.png")[1]


def test_waits_other_work_and_empty_timelines_draw(tmp_path):
    extra = [TraceEvent(0, "0F0.0", 0, 0.1, "wait"), TraceEvent(1, "optimizer", 3.0, 3.5, "optimizer")]
    write_png(tmp_path / "extra.png", [*SLICED, *extra])
    write_png(tmp_path / "empty.png", [])
    write_comparison_png(tmp_path / "slower.png", Panel("", SLICED), Panel("", UNSLICED))


def test_later_slices_are_darker():
    for kind, (first, last, _) in KIND_COLOURS.items():
        assert mixed(kind, 0, 3) == first and mixed(kind, 2, 3) == last
