"""Workers that die, hang, never start or are stopped."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from gpu_report_cases import statuses

from benchmarks.gpu_report import parts, supervise
from benchmarks.gpu_report.parts import Cell

WORKER = """
import json, os, sys, time
rows = [json.loads(line) for line in open(sys.argv[1])] if os.path.exists(sys.argv[1]) else []
def say(name, status):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps({"part": "p", "subject": "s", "contender": name, "status": status, "text": ""}) + "\\n")
for name in sys.argv[2:]:
    if name in [row["contender"] for row in rows if row["status"] != "begun"]:
        continue
    say(name, "begun")
    if name == "hangs": time.sleep(60)
    if name == "dies": print("illegal memory access"); sys.stdout.flush(); os.kill(os.getpid(), 9)
    say(name, "ok")
"""


def test_crashes_and_hangs_cost_one_cell_each(tmp_path):
    names = ["a", "dies", "b", "hangs", "c"]
    file = tmp_path / "rows.jsonl"
    supervise.supervise(
        lambda rows: [sys.executable, "-c", WORKER, str(rows), *names],
        [Cell("p", "s", name) for name in names],
        file=file,
        deadline=time.monotonic() + 60,
        cell_seconds=1.5,
    )
    assert statuses(file) == {"a": "ok", "dies": "crashed", "b": "ok", "hangs": "crashed", "c": "ok"}
    texts = {row["contender"]: row["text"] for row in parts.read_rows(file) if row["status"] == "crashed"}
    assert texts == {
        "dies": "killed by signal 9: illegal memory access",
        "hangs": "no answer within 1.5 s: illegal memory access",
    }


def test_a_cell_that_is_open_when_the_time_is_up_did_not_fail(tmp_path):
    file = tmp_path / "rows.jsonl"
    names = ["a", "hangs", "b"]
    worker = [sys.executable, "-c", WORKER, str(file), *names]
    supervise.supervise(
        lambda rows: worker, [Cell("p", "s", name) for name in names], file=file,
        deadline=time.monotonic() + 1.5, cell_seconds=30,
    )  # fmt: skip
    assert statuses(file) == {"a": "ok", "hangs": "not run", "b": "not run"}
    supervise.supervise(
        lambda rows: pytest.fail("a worker for cells that have an answer"), [Cell("p", "s", "a")], file=file,
        deadline=time.monotonic() + 30, cell_seconds=30,
    )  # fmt: skip


def test_an_interrupt_ends_the_workers_and_keeps_what_they_found(tmp_path, monkeypatch):
    """It comes in a tick, when the first cell is done and the second hangs."""
    file, stop = tmp_path / "rows.jsonl", threading.Event()
    worker = [sys.executable, "-c", WORKER, str(file), "a", "hangs"]

    def supervisor():
        supervise.supervise(
            lambda rows: worker, [Cell("p", "s", name) for name in ("a", "hangs")], file=file,
            deadline=time.monotonic() + 60, cell_seconds=60, stop=stop,
        )  # fmt: skip

    def interrupt():
        if "a" in statuses(file):
            raise KeyboardInterrupt

    monkeypatch.setattr(supervise, "TICK_SECONDS", 0.0)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        supervise.side_by_side([supervisor], tick=interrupt, stop=stop)
    assert statuses(file) == {"a": "ok", "hangs": "not run"} and time.monotonic() - began < 30
    assert "the run was stopped" in parts.read_rows(file)[-1]["text"]


@pytest.mark.parametrize(
    ("program", "seconds", "reason"),
    [
        ("import time; time.sleep(60)", 1.0, "time was up"),
        ("raise SystemExit('no torch')", 60, "no worker started: no torch"),
    ],
)
def test_cells_that_no_worker_reached_are_said_to_be_not_run(program, seconds, reason, tmp_path):
    file = tmp_path / "rows.jsonl"
    supervise.supervise(
        lambda rows: [sys.executable, "-c", program], [Cell("p", "s", "c")], file=file,
        deadline=time.monotonic() + seconds, cell_seconds=30,
    )  # fmt: skip
    (row,) = parts.read_rows(file)
    assert row["status"] == "not run" and reason in row["text"]


def test_an_error_of_a_supervisor_is_raised_after_the_others_ended():
    done = []
    with pytest.raises(ZeroDivisionError):
        supervise.side_by_side([lambda: 1 // 0, lambda: done.append(1)])
    assert done == [1]
