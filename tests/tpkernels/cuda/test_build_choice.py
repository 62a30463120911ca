"""Whether CUDA is built and for what: csrc/cuda/FindWanted.cmake as a script, with stand-ins for nvcc and a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "csrc" / "cuda" / "FindWanted.cmake"


@pytest.fixture
def choose(tmp_path):
    """choose(wanted, capabilities=, **environment) -> (exit status, what CMake said)."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        pytest.skip("cmake is not installed; the development requirements bring it")

    def run(wanted, *, capabilities=(), **environment):
        tools = tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        programs = {"nvcc": "true", "nvidia-smi": "\n".join(f"echo {capability}" for capability in capabilities)}
        for name, body in programs.items():
            (tools / name).write_text(f"#!/bin/sh\n{body}\n")
            (tools / name).chmod(0o755)
        command = [cmake, f"-DTPK_CUDA={wanted}", "-P", str(SCRIPT)]
        done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tools), **environment})
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    return run


def test_auto_builds_for_the_gpu_that_is_there_and_else_nothing(choose):
    status, said = choose("auto", capabilities=["9.0", "9.0", "8.9"])
    assert status == 0 and "CUDA kernels: for 90a-real;89-real with" in said
    status, said = choose("auto")
    assert status == 0 and "not built (no GPU of compute capability 8.0 or newer here; TPK_CUDA=1 builds them" in said
    status, said = choose("auto", capabilities=["7.5"])
    assert status == 0 and "not built (no GPU of compute capability 8.0 or newer" in said


def test_asked_for_it_builds_for_both_chips_or_the_listed_ones(choose):
    assert "for 80-real;90a-real;80-virtual with" in choose("1", capabilities=["9.0"])[1]
    assert "for 86;90a with" in choose("1", CUDAARCHS="86;90a", TORCH_CUDA_ARCH_LIST="8.0")[1]
    assert "for 80-real;90a-real;90a-virtual with" in choose("1", TORCH_CUDA_ARCH_LIST="8.0 9.0a+PTX")[1]
    assert choose("0") == (0, "-- CUDA kernels: not built (TPK_CUDA=0)")


@pytest.mark.parametrize(
    ("wanted", "environment", "why"),
    [
        ("yes", {}, "TPK_CUDA is 'yes'; it may be 0, 1 or auto"),
        ("1", {"CUDAARCHS": "75"}, "need compute capability 8.0 or newer; the list has '75'"),
        ("1", {"TORCH_CUDA_ARCH_LIST": "Hopper"}, "TORCH_CUDA_ARCH_LIST has 'Hopper'; an entry looks like 8.0, 9.0a"),
        ("1", {"TORCH_CUDA_ARCH_LIST": "7.0"}, "need compute capability 8.0 or newer; the list has '70-real'"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_an_error(wanted, environment, why, choose):
    status, said = choose(wanted, **environment)
    assert status != 0 and why in said
