"""The example draws a prediction without a machine, and measured steps beside it with one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from terapipe.models.presets import llama
from terapipe.planner import cost_file
from terapipe.planner.analytic import analytic_costs
from terapipe.planner.hardware import HARDWARE

EXAMPLE = Path(__file__).parents[2] / "examples" / "slices_and_time.py"


def run(*options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *options], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_draws_predicted_and_measured_times(tmp_path: Path) -> None:
    assert "8 x a100-80gb" in run("--plot", str(tmp_path / "one.png"))
    model = llama(hidden=16, layers=2, heads=2, kv_heads=1, ffn_hidden=32, vocab=50, max_tokens=64)
    costs = analytic_costs(model, HARDWARE["cpu-2core"], max_tokens=64)
    (tmp_path / "costs.json").write_text(cost_file.to_json(costs))
    out = run("--costs", str(tmp_path / "costs.json"), "--plot", str(tmp_path / "two.png"))
    assert out.startswith("measured 1: ") and "\npredicted 1: " in out
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("one.png", "two.png"))


def test_a_picture_that_cannot_be_written_is_refused_before_the_measurement(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--costs", "none.json", "--plot", str(tmp_path)], capture_output=True, text=True
    )
    assert done.stderr.rstrip().endswith(f"--plot {tmp_path} cannot be written: Is a directory; name another file.")
