"""The ring between two threads: under ThreadSanitizer, which sees what one process does, with the real memory orders
(clean) and with one store made relaxed on purpose (reported). Sleeps fall at four points of each use.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CXX = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
SOURCE = Path(__file__).parent / "links" / "ring_threads.cpp"
INCLUDE = Path(__file__).parents[2] / "csrc"
NEAR_WRAP = 2**32 - 50
RACE = 66  # ThreadSanitizer's exit status

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or CXX is None,
    reason="links through shared memory need Linux, and this test a C++ compiler",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs the program, built with the sanitizer."""
    built = tmp_path_factory.mktemp("ring") / "ring_threads"
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{INCLUDE}"]
    done = subprocess.run([str(CXX), *flags, str(SOURCE), "-o", str(built)], capture_output=True, text=True)
    if "cannot find" in done.stderr and "tsan" in done.stderr:
        pytest.skip(f"{CXX} has no ThreadSanitizer library: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    fixed_addresses = (
        ["setarch", "-R"] if shutil.which("setarch") else []
    )  # the sanitizer needs its address ranges free
    return [*fixed_addresses, str(built)]


def _run(
    program: list[str], orders: str, *, slots: int, tiles: int, spin_us: int, uses: int
) -> subprocess.CompletedProcess[str]:
    seed, millionths = 7 * slots + tiles, 20_000
    numbers = (uses, slots, tiles, NEAR_WRAP, seed, spin_us, millionths)
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    command = [*program, orders, *map(str, numbers), "threads"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("spin_us", [0, 20])
@pytest.mark.parametrize(("slots", "tiles"), [(1, 1), (3, 2), (8, 5)])
def test_no_word_is_torn_or_raced_for(program: list[str], slots: int, tiles: int, spin_us: int) -> None:
    done = _run(program, "sound", slots=slots, tiles=tiles, spin_us=spin_us, uses=3000)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr


@pytest.mark.timeout(90)
@pytest.mark.parametrize("orders", ["post", "credit"])
def test_a_relaxed_store_is_reported(program: list[str], orders: str) -> None:
    done = _run(program, orders, slots=3, tiles=2, spin_us=20, uses=3000)
    assert done.returncode == RACE and "WARNING: ThreadSanitizer: data race" in done.stderr, done.stderr
