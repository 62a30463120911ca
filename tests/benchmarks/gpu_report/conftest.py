"""The GPU report's tests: their shared module on the path, and the problem that contenders are given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_report.contenders import Problem

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def problem():
    from gpu_report_cases import SHAPE

    return Problem.of(SHAPE, torch.bfloat16, "cpu")
