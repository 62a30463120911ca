"""What happens when a rank fails: the first failure is written down where every rank can read it, then connections
are closed.

A rank that raises records (rank, action, cause) in the store that torch.distributed already has, and lets go of its
links.  Its neighbours' waits then end with an error at once, they find the record, and stop in the same way, so the
news travels along the pipeline in milliseconds and every rank names the same origin.  A rank that was killed leaves
no record; then the neighbour that noticed is the first to write one. When a slice never comes, many ranks wait, most
of them for what would follow from it, and the first whose time is up is any of them: it blames the rank that stands
earliest in the plan, whose own wait names the slice. A watchdog thread publishes each rank's position and prints all
positions when nothing has moved for a while.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch.distributed as dist

from tpkernels.links import Trouble
from tpkernels.links.dist import trouble_of

logger = logging.getLogger("terapipe")

STALL_SECONDS = 120.0  # no action finished for this long: print where every rank stands

BETWEEN_STEPS = "between steps"  # the action of a rank that fails in code of its own

# Positions of a rank that has said nothing, of one between two steps, and of one that closed its pipeline there.
NOWHERE, IDLE, CLOSED = "nowhere yet", "idle", "closed"

_boards = itertools.count()  # ranks make their common pipelines in one order, so this names the same one everywhere


@dataclass(frozen=True)
class Failure:
    """The origin of a failure: which rank, in which action (or position), and why."""

    rank: int
    action: str
    cause: str


def words(cause: BaseException) -> str:
    """How a cause is reported."""
    return f"{type(cause).__name__}: {cause}"


def closed_rank(rank: int, *, noticed: str) -> Failure:
    """The failure of a rank that closed its pipeline while others still had work for it."""
    what = (
        "it had closed its pipeline (close(), the end of a with, or nothing referred to it any more); let every rank "
        "make the same calls and close after the last"
    )
    return Failure(rank, BETWEEN_STEPS, f"{what}. {noticed}")


def lost_rank(rank: int, position: str, *, noticed: str, cause: BaseException) -> Failure:
    """The failure of a rank that left no record, as its neighbour saw it; position: where it last said it stood, which
    it does once a second."""
    what = (
        "the process stands still (stopped, or its machine frozen)"
        if trouble_of(cause) is Trouble.SILENT
        else "the process ended without a word (killed, perhaps for want of memory; crashed; or its host is gone)"
    )
    place = {NOWHERE: "its start", IDLE: BETWEEN_STEPS}.get(position, position)
    return Failure(rank, f"{place}, or soon after", f"{what}; its own output and its host's log may say why. {noticed}")


def let_go(cause: BaseException) -> None:
    """Clear the local variables of the frames that `cause` came through.  Among them are the works of collectives, and
    a work keeps its group's connections open, so that a rank which shares no pair with the origin would wait on."""
    link: BaseException | None = cause
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


class PipelineError(RuntimeError):
    """A step failed on some rank; `failure` names the origin, on every rank.  `again`: the pipeline was used after
    it."""

    def __init__(self, failure: Failure, *, here: int, again: bool = False) -> None:
        where = "" if here == failure.rank else f"rank {here} stopped because "
        before = "this pipeline failed before and cannot be used again; make a new one. " if again else ""
        place = failure.action if failure.action.startswith(BETWEEN_STEPS) else f"in {failure.action}"
        super().__init__(f"{before}{where}rank {failure.rank} failed {place}: {failure.cause}")
        self.failure = failure


class FailureBoard:
    """Shared memory of the ranks' failure and positions, over the default store; a rank that is alone needs
    none and remembers nothing."""

    SETTLE_SECONDS = 1.5  # a victim notices a closed connection before the origin's record may be visible

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        store = dist.distributed_c10d._get_default_store() if ranks > 1 and dist.is_initialized() else None
        # A prefix of its own: a new pipeline must not find the failure of the one before.
        self.name = "" if store is None else f"terapipe/{next(_boards)}"
        self.store = None if store is None else dist.PrefixStore(self.name, store)

    def record(self, failure: Failure) -> Failure:
        """Write a failure down unless another rank was first; returns the one that counts."""
        if self.store is None:
            return failure
        try:
            self.store.compare_set("failure", "", json.dumps(asdict(failure)))
        except (RuntimeError, ValueError) as error:
            # The store may be gone with the rank that held it; then there is nobody left to tell.
            logger.debug("rank %d could not record its failure: %s", self.rank, error)
        return self.origin(wait=0) or failure

    def origin(self, *, wait: float) -> Failure | None:
        """The first recorded failure; it is given `wait` seconds to appear, unless it is this rank's to record."""
        if self.store is None:
            return None
        deadline = time.monotonic() + (wait if wait and self.blamed() != self.rank else 0.0)
        while True:
            try:
                if self.store.check(["failure"]):
                    return Failure(**json.loads(self.store.get("failure")))
            except (RuntimeError, ValueError):
                return None
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    def blame_earliest(self, order: Mapping[str, int], action: str) -> int:
        """Of all ranks the one whose position comes first in `order` (action -> place), this rank's being `action`.
        The first rank that asks decides for all."""
        positions = {rank: self.position(rank).partition(" ")[0] for rank in range(self.ranks)} | {self.rank: action}
        known = [rank for rank, position in positions.items() if position in order]
        earliest = min(known, key=lambda rank: order[positions[rank]], default=self.rank)
        try:
            if self.store is not None:
                self.store.compare_set("blamed", "", str(earliest))
        except (RuntimeError, ValueError):
            return self.rank
        blamed = self.blamed()
        return self.rank if blamed is None else blamed

    def blamed(self) -> int | None:
        """Whom `blame_earliest` named."""
        try:
            return int(self.store.get("blamed")) if self.store is not None and self.store.check(["blamed"]) else None
        except (RuntimeError, ValueError):
            return None

    def troubled(self) -> bool:
        """Whether any rank has failed."""
        return self.blamed() is not None or self.origin(wait=0) is not None

    def publish(self, position: str) -> None:
        """Let the other ranks know where this one stands."""
        if self.store is not None:
            self.store.set(f"position/{self.rank}", position)

    def position(self, rank: int) -> str:
        """Where `rank` stood when it last said so."""
        key = f"position/{rank}"
        try:
            if self.store is not None and self.store.check([key]):
                return self.store.get(key).decode()
        except (RuntimeError, ValueError):
            pass
        return NOWHERE

    def say_closed(self) -> None:
        """This rank closes its pipeline, and none has failed."""
        with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone with the rank that held it
            self.publish(CLOSED)

    def closed(self) -> int | None:
        """A rank that closed its pipeline."""
        return next((rank for rank in range(self.ranks) if self.position(rank) == CLOSED), None)


class Watchdog:
    """A daemon thread: publishes this rank's position once a second and, when it has not moved for `stall_seconds`,
    logs every rank's. When another rank has failed or blames this one, or a neighbour is `lost`, it calls `give_up`,
    once: two ranks that wait for each other would not hear of a third, and a sum over ranks of none."""

    def __init__(
        self,
        board: FailureBoard,
        *,
        give_up: Callable[[], None] = lambda: None,
        lost: Callable[[float], object] = lambda tick_seconds: None,
        stall_seconds: float = STALL_SECONDS,
        tick_seconds: float = 1.0,
    ) -> None:
        self._board, self._stall_seconds, self._tick_seconds = board, stall_seconds, tick_seconds
        self._give_up: Callable[[], None] | None = give_up
        self._lost, self._ticks_lost = lost, 0
        self._position, self._since, self._reported = IDLE, time.monotonic(), False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="terapipe-watchdog", daemon=True)
        self._thread.start()

    def at(self, position: str) -> None:
        """This rank starts something; called before each action."""
        self._position, self._since, self._reported = position, time.monotonic(), False

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():  # where a lost pipeline may be collected
            self._thread.join(timeout=5)

    def _run(self) -> None:
        published = ""
        while not self._stop.wait(self._tick_seconds):
            position, since = self._position, self._since
            try:
                if position != published:
                    self._board.publish(position)
                    published = position
                # Who waits for the lost rank itself says more; it had a tick's time.
                self._ticks_lost += self._lost(self._tick_seconds) is not None
                lost = self._ticks_lost > 1 and position != IDLE
                if self._give_up is not None and (lost or self._board.troubled()):
                    self._give_up()
                    self._give_up = None
                if position != IDLE and time.monotonic() - since > self._stall_seconds and not self._reported:
                    self._reported = True
                    lines = [f"  rank {rank}: {self._board.position(rank)}" for rank in range(self._board.ranks)]
                    logger.warning(
                        "no progress on rank %d for %.0f s:\n%s",
                        self._board.rank,
                        self._stall_seconds,
                        "\n".join(lines),
                    )
            except (RuntimeError, ValueError):  # the store went away: the step itself will say so
                return
