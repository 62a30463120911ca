"""Engine tests: their shared module on the path, and an attention backend for fp32 and bf16 wherever they run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tpkernels import backends

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _backend_and_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The automatic backend; where nothing fast was built, the oracle, which is otherwise automatic only for fp64.
    Workers inherit both."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    try:
        backends.select(backends.AttentionCall("cpu", torch.float32, 4, 2, 6, 6, documents=True))
    except ValueError:
        monkeypatch.setenv("TPK_BACKEND", "reference")
