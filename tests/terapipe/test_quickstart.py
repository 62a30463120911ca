"""The quickstart end to end, short: two worker processes, every file of the run folder, numbers that fit together.

How fast and how well it trains is shown by scripts/quickstart.sh itself, not here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from terapipe import cli
from terapipe.quickstart import MARKER, RANKS
from terapipe.train.metrics import read_lines


@pytest.mark.timeout(280)
def test_it_writes_everything_it_promises(tmp_path: Path) -> None:
    options = ["--steps", "3", "--rounds", "2", "--run-dir", str(tmp_path)]
    command = [sys.executable, "-m", "terapipe", "quickstart", *options]
    earlier = tmp_path / "checkpoints" / "step-00000700"
    earlier.mkdir(parents=True)
    (earlier / "run.json").write_text("{}")  # an earlier quickstart's, to be replaced
    (tmp_path / MARKER).touch()
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert not earlier.exists()
    summary = json.loads((tmp_path / "summary.json").read_text())
    losses = {"validation_loss_before", "validation_loss_after"}
    assert losses | {"step_s", "speedup", "bound", "slices", "train_s"} <= set(summary)
    assert summary["environment"]["versions"]["python"].startswith("3.") and str(Path.home()) not in str(summary)
    assert {"single", "pipeline", "sliced"} <= set(summary["step_s"])
    assert summary["speedup"] == pytest.approx(summary["step_s"]["pipeline"] / summary["step_s"]["sliced"])
    assert summary["bound"] == pytest.approx(2 * summary["slices"] / (summary["slices"] + 1))
    assert 3.5 < summary["validation_loss_after"] < summary["validation_loss_before"] < 6.0
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 3]
    assert lines[-1]["validation_loss"] == summary["validation_loss_after"]
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "timeline.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "") and "src=" not in page
    bars = [row for row in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if row["ph"] == "X"]
    names = {row["name"] for row in bars if not row["name"].startswith("wait")}
    hand_offs = {name for name in names if "->" in name}
    assert len(names - hand_offs) == 2 * RANKS * summary["slices"]  # forward and backward, every slice, every stage
    assert len(hand_offs) == 2 * (RANKS - 1) * summary["slices"]
    for words in ("two stages, no slices", "Not the rival", f"bound for {summary['slices']} equal slices", "def "):
        assert words in done.stdout


def test_too_few_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quickstart", "--rounds", "1"]) == 2
    assert "--rounds is 1" in capsys.readouterr().err


def test_checkpoints_of_another_run_are_never_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "checkpoints" / "step-1" / "weights"
    kept.parent.mkdir(parents=True)
    kept.write_text("precious")
    assert cli.main(["quickstart", "--run-dir", str(tmp_path)]) == 2
    assert "not of a quickstart" in capsys.readouterr().err
    assert kept.read_text() == "precious"
