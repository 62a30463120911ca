"""Tests of the kernel package: their shared module on the path, and the backend of functions that take none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that take `backend` run on it: the drop-in functions have no argument for that."""
    if "backend" in request.fixturenames:
        monkeypatch.setenv("TPK_BACKEND", request.getfixturevalue("backend"))
