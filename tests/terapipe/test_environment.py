"""`terapipe env`: everything a bug report needs, and it never fails because something is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from terapipe import cli, environment


def test_it_prints_and_writes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--json", str(tmp_path / "env.json")]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "env.json").read_text())
    assert set(found) == {"versions", "compilers", "cpu", "gpus", "backends", "links", "variables"}
    for package in ("terapipe", "python", "torch", "triton"):
        assert found["versions"][package] in out
    assert {"C++", "cmake", "ninja", "nvcc"} == set(found["compilers"])
    assert found["cpu"]["kernels' ISA"] in out


def test_what_is_not_usable_has_a_reason() -> None:
    found = environment.collect()
    assert {"local", "dist (gloo)", "dist (nccl)"} <= {link.name for link in found.links}
    assert "reference" in {backend.name for backend in found.backends}
    for choice in (*found.backends, *found.links):
        assert choice.usable or choice.note, choice


def test_it_answers_without_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; from terapipe.environment import collect; print(collect())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "not importable" in done.stdout


def test_a_compiler_that_hangs_or_is_missing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert environment.collect().compilers["C++"] == "not found"
