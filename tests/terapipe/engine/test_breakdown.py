"""Breakdown: whom a rank blames for what it met.  Among processes: test_failure.py, test_faults.py."""

from __future__ import annotations

from typing import Any

import pytest

from terapipe.engine.breakdown import find_origin
from terapipe.engine.failure import Failure
from terapipe.schedule import terapipe
from tpkernels.links import LinkError, Trouble

SETTLE_S = 0.5
OTHER = Failure(2, "2B0.0", "ValueError: the first")
GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:4")


class Board:
    """Of rank 1 out of 3. recorded: what another rank wrote before; blames: whom the ranks agree on as the earliest."""

    SETTLE_SECONDS = SETTLE_S
    rank = 1

    def __init__(self, recorded: Failure | None, closed: int | None, blames: int, blamed: int | None) -> None:
        self.recorded, self._closed, self._blames, self._blamed = recorded, closed, blames, blamed
        self.waits: list[float] = []

    def origin(self, *, wait: float) -> Failure | None:
        self.waits.append(wait)
        return self.recorded

    def record(self, failure: Failure) -> Failure:
        self.recorded = failure
        return failure

    def blame_earliest(self, order: dict[str, int], action: str) -> int:
        assert order["0F0.0"] == 0 and action in order
        self._blamed = self._blames
        return self._blames

    def blamed(self) -> int | None:
        return self._blamed

    def closed(self) -> int | None:
        return self._closed

    def position(self, rank: int) -> str:
        return f"the place of {rank}"


class Wiring:
    def __init__(self, lost: LinkError | None) -> None:
        self._lost, self.closed = lost, False

    def lost(self, tick_s: float) -> LinkError | None:
        return self._lost

    def close(self) -> None:
        self.closed = True


def _find(
    cause: BaseException,
    *,
    recorded: Failure | None = None,
    lost: LinkError | None = None,
    closed: int | None = None,
    blames: int = 1,
    blamed: int | None = None,
) -> tuple[Failure, float | bool]:
    """What is found, and for how long a record was waited for; True where links were closed first."""
    board, wiring = Board(recorded, closed, blames, blamed), Wiring(lost)
    given: dict[str, Any] = {"rank": 1, "board": board, "wiring": wiring, "schedule": terapipe(3, 1, 1)}
    found = find_origin("1F0.0", cause, **given)
    assert board.recorded is found and len(board.waits) == 1
    return found, wiring.closed or board.waits[0]


GONE = LinkError("it went", peer=2, trouble=Trouble.GONE)
LATE = LinkError("in vain", peer=0, trouble=Trouble.LATE)
TOGETHER = LinkError("the ranks did not come together", trouble=Trouble.GONE)


@pytest.mark.parametrize(
    ("cause", "wait"),
    [
        (ValueError("Connection of two words"), 0.0),
        (GLOO, 2 * SETTLE_S),
        (TOGETHER, 2 * SETTLE_S),
        (GONE, SETTLE_S),
        (LATE, SETTLE_S),
        (LinkError("Connection closed by nobody"), 0.0),
    ],
    ids=lambda each: str(each),
)
def test_a_record_of_another_rank_is_waited_for_as_long_as_the_cause_says_that_there_is_one(
    cause: BaseException, wait: float
) -> None:
    assert _find(cause, recorded=OTHER) == (OTHER, wait)


def test_who_finds_no_record_writes_one_that_names_the_rank_to_blame() -> None:
    assert _find(ValueError("mine")) == (Failure(1, "1F0.0", "ValueError: mine"), 0.0)
    found, _ = _find(GONE)
    assert (found.rank, found.action) == (2, "the place of 2, or soon after")
    assert found.cause.startswith("the process ended without a word") and "Rank 1 noticed in 1F0.0" in found.cause
    found, _ = _find(TOGETHER, lost=LinkError("no beat", peer=0, trouble=Trouble.SILENT))
    assert found.rank == 0 and found.cause.startswith("the process stands still")
    found, _ = _find(GONE, closed=2)
    assert (found.rank, found.action) == (2, "between steps") and found.cause.startswith("it had closed its pipeline")
    for found, _ in (_find(ValueError("mine"), closed=2), _find(GONE, blamed=1)):
        assert (found.rank, found.action) == (1, "1F0.0")
    found, _ = _find(GONE, closed=1)
    assert found.rank == 2


def test_a_late_slice_is_the_failure_of_the_rank_that_stands_earliest() -> None:
    assert _find(LATE, blames=1) == (Failure(1, "1F0.0", "LinkError: in vain"), SETTLE_S)
    found, closed = _find(LATE, blames=0)  # which waits for this rank's links
    assert closed is True and found.rank == 1
