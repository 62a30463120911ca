"""Engine tests: their shared module on the path, and an attention backend for fp32 and bf16 wherever they run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from terapipe.engine import launch
from tpkernels import backends

sys.path.insert(0, str(Path(__file__).parent))


@dataclass(frozen=True)
class Processes:
    """What a launch left: its exit status, the workers' pids, and what each rank saved (None if it failed)."""

    status: int
    pids: list[int]
    results: list[Any]
    folder: Path


@pytest.fixture(autouse=True)
def _backend_and_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The automatic backend; where nothing fast was built, the oracle, which is otherwise automatic only for fp64.
    Workers inherit both."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    try:
        backends.select(backends.AttentionCall("cpu", torch.float32, 4, 2, 6, 6, documents=True))
    except ValueError:
        monkeypatch.setenv("TPK_BACKEND", "reference")


@pytest.fixture
def run_scenario(tmp_path: Path) -> Callable[..., Processes]:
    """Run a scenario of worker.py in as many processes as there are ranks."""

    def run(scenario: str, ranks: int) -> Processes:
        command = [sys.executable, str(Path(__file__).parent / "worker.py"), scenario, str(tmp_path)]
        status = launch.run_workers(command, ranks)
        pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(ranks)]
        files = [tmp_path / f"rank{rank}.pt" for rank in range(ranks)]
        results = [torch.load(file, weights_only=False) if file.exists() else None for file in files]
        return Processes(status, pids, results, tmp_path)

    return run
