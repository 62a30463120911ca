"""A cell, from inputs to a row, whatever it raises; and the rows' file."""

from __future__ import annotations

import subprocess
import sys

import torch
from gpu_report_cases import SLICE, statuses

from benchmarks.gpu_report import __main__ as command
from benchmarks.gpu_report import contenders, parts
from benchmarks.gpu_report.contenders import Results
from benchmarks.gpu_report.parts import Cell


def test_a_worker_turns_whatever_a_cell_raises_into_a_row(tmp_path, monkeypatch):
    def fails(problem):
        raise RuntimeError("no kernel image")

    def lies(problem):
        jobs = contenders.OURS["cpu"](problem)
        return jobs._replace(results=lambda: Results(torch.zeros_like(problem.q), None, None, None))

    monkeypatch.setitem(contenders.PEERS, "fails", fails)
    monkeypatch.setitem(contenders.OURS, "lies", lies)
    monkeypatch.setitem(contenders.PEERS, "lying peer", lies)
    names = ("fails", "flash-attn 2", "lies", "lying peer", "cpu")
    file = tmp_path / "rows"
    assert parts.work([Cell("slice-forward", SLICE, name) for name in names], "cpu", file) == 0
    assert list(statuses(file).values()) == ["error", "refused", "wrong", "ok", "ok"]
    rows = {row["contender"]: row for row in parts.read_rows(file) if row["status"] != "begun"}
    assert rows["fails"]["text"] == "RuntimeError: no kernel image" and "ms" not in rows["lies"]
    assert rows["lies"]["text"].startswith("out: error") and rows["lying peer"]["within_tolerance"] is False
    assert rows["cpu"]["within_tolerance"] and rows["cpu"]["low_ms"] <= rows["cpu"]["ms"] <= rows["cpu"]["high_ms"]
    monkeypatch.setattr(parts, "_answers", lambda device: False)
    assert (
        parts.work([Cell("slice-forward", SLICE, name) for name in ("cpu", "fails 2", "x")], "cpu", file)
        == parts.BROKEN
    )
    assert "fails 2" in statuses(file) and "x" not in statuses(file)


def test_a_line_cut_short_by_a_crash_is_passed_over(tmp_path):
    file = tmp_path / "rows"
    file.write_text('{"a": 1}\n{"b": ')
    assert parts.read_rows(file) == [{"a": 1}]


def test_only_what_runs_on_a_gpu_is_run_there():
    file = "tests/tpkernels/triton/test_launch.py"
    arguments = [sys.executable, "-m", "pytest", file, "-m", "gpu", "--collect-only", "-q"]
    listed = subprocess.run(arguments, cwd=command.ROOT, capture_output=True, text=True, check=False).stdout
    names = {line.rpartition("::")[2] for line in listed.splitlines() if "::" in line}
    assert "deselected" in listed and names >= {
        f"test_{name}[{who}]"
        for name in ("a_side_stream_is_waited_for", "a_device_that_is_not_current")
        for who in ("triton", "cuda")
    }


def test_a_test_file_is_one_cell(tmp_path):
    good, bad = tmp_path / "test_good.py", tmp_path / "test_bad.py"
    good.write_text("import pytest\n@pytest.mark.gpu\ndef test_it(): pass\ndef test_on_the_cpu(): assert 0")
    bad.write_text("import pytest\n@pytest.mark.gpu\ndef test_it(): assert 0, 'off by one'")
    assert parts.outcome(Cell("tests", str(good), "pytest"), "cuda")["text"].startswith("1 passed")
    row = parts.outcome(Cell("tests", str(bad), "pytest"), "cuda")
    assert row["status"] == "wrong" and "1 failed" in row["text"] and "off by one" in row["text"]
