"""The example of bringing one's own layers runs: sliced gradients equal the whole model's, and the loss falls."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_model.py"


def test_the_example_trains(capsys: pytest.CaptureFixture[str]) -> None:
    loss = runpy.run_path(str(EXAMPLE))["main"](steps=30)
    printed = capsys.readouterr().out
    difference = re.search(r"at most (\S+) of their norm", printed)
    assert difference is not None and float(difference[1]) < 1e-5, printed
    assert loss < 2.5, printed
