"""Whatever goes wrong on one rank at any moment of a step, both ranks leave in time with one error that says where, and
hold nothing of the links any more (`faults.py`; the hundredfold version is `scripts/soak.sh`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tpkernels.links import shm_missing

pytestmark = pytest.mark.skipif(bool(shm_missing()), reason=f"shared-memory links: {shm_missing()}")

WITHIN_S = 10.0
WAITED = r"waited \d+\.\d s for stage \d, micro 0, slice \d \(slot \d, tile \d, wanted epoch \d+, saw \d+\)"
ACTION = r"\d[FB]0\.\d"


def _outcomes(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("faults.py")), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    for outcome in outcomes:
        assert 0 < outcome["seconds"] < WITHIN_S, outcome
        assert not any(outcome["left"].values()), outcome
    return outcomes


@pytest.mark.timeout(300)
def test_an_exception_at_every_moment_of_a_step_is_named_on_both_ranks() -> None:
    outcomes = _outcomes("--raise", "1")
    moments = {(outcome["victim"], re.sub(r" \d+$", "", outcome["moment"])) for outcome in outcomes}
    sender = {"reserve", "claim", "post"}  # write: not of gradients, which are computed into the slot
    receiver = {"take", "wait", "read", "taken", "verify", "release", "released"}
    for rank, sends, takes in ((0, "F", "B"), (1, "B", "F")):
        expected = {f"{sends} {action}" for action in sender} | {f"{takes} {action}" for action in receiver}
        expected |= {f"{way} blocks.{rank}" for way in ("forward", "backward")} | ({"F write"} if rank == 0 else set())
        assert expected <= {moment for victim, moment in moments if victim == rank}
    for outcome in outcomes:
        victim = outcome["victim"]
        origin = rf"rank {victim} failed in {victim}[FB]0\.\d: ArithmeticError: broken on purpose"
        assert re.fullmatch(origin, outcome["heard"][str(victim)]), outcome
        assert re.fullmatch(rf"rank {1 - victim} stopped because {origin}", outcome["heard"][str(1 - victim)]), outcome


@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_stopped_or_forgets_is_named_by_who_waits() -> None:
    """Also where the other rank has nothing to wait for but the sum over ranks, at the end of the step."""
    for outcome in _outcomes("--kill", "15", "--stop", "14", "--drop", "3", "--together", "4"):  # most of them sleep
        victim, other = outcome["victim"], 1 - outcome["victim"]
        heard, cause = outcome["heard"], outcome["cause"]
        if outcome["fault"] == "drop":
            said = {re.sub(r"^rank \d stopped because ", "", message) for message in heard.values()}
            assert len(said) == 1 and re.search(
                rf"rank \d failed in {ACTION}: LinkError: .*{WAITED}|still held", said.pop()
            ), outcome
            continue
        state, told = {"kill": ("is gone", "ended without a word"), "stop": ("stands still", "stands still")}[
            outcome["fault"]
        ]
        noticed = rf"Rank {other} noticed in ({ACTION}|the gradient reduction)"
        assert re.search(
            rf"^rank {other} stopped because rank {victim} failed .*, or soon after: the process {told}.*{noticed}$",
            heard[str(other)],
        ), outcome
        where = r".*\." if heard[str(other)].endswith("reduction") else f".*: {WAITED}"
        assert re.search(rf"rank {victim} {state}{where}", cause[str(other)]), outcome
