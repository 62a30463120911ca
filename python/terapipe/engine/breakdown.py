"""Who is at fault when something fails on this rank: itself, or a rank whose failure reached it.

Run by the rank that something failed on, once. Most of what a rank meets is somebody else's failure: a connection that
another closed because it had failed itself, a slice that never comes. So the record of a first failure is looked for
before this rank writes one, and longer where a broken connection says that there is one.

The trap: the order. Links may be closed only once the rank to blame is known, and a record ends the others' search.
"""

from __future__ import annotations

import logging

from terapipe.engine.failure import Failure, FailureBoard, closed_rank, lost_rank, words
from terapipe.engine.wiring import Wiring
from terapipe.schedule import Schedule, clock_order
from tpkernels.links import LinkError, Trouble
from tpkernels.links.dist import trouble_of

logger = logging.getLogger("terapipe")


def find_origin(
    action: str, cause: BaseException, *, rank: int, board: FailureBoard, wiring: Wiring, schedule: Schedule
) -> Failure:
    """The first failure, recorded on `board`, after `cause` was raised in `action` of `rank`. Closes `wiring` where
    another rank is to blame, so that its wait ends."""
    failure = Failure(rank, action, words(cause))
    lost, seen = cause.lost_peer if isinstance(cause, LinkError) else None, cause
    if lost is None and isinstance(cause, LinkError) and (found := wiring.lost(0.0)) is not None:
        lost, seen = found.lost_peer, found  # the watchdog ended this wait
    if isinstance(cause, LinkError) and cause.late and lost is None:
        order = {str(each): place for place, each in enumerate(clock_order(schedule))}
        board.blame_earliest(order, action)
    blamed = board.blamed()
    if blamed not in (None, rank):  # its wait ends when the links do
        wiring.close()
    # A closed connection is somebody else's failure, whose record may need a moment to become readable.
    known, broken = lost is not None or blamed is not None, trouble_of(cause) is Trouble.GONE
    settle = board.SETTLE_SECONDS  # longer for those who saw less
    origin = board.origin(wait=settle if known else 2 * settle if broken else 0.0)
    if origin is not None:
        return origin
    noticed, closed = f"Rank {board.rank} noticed in {action}", board.closed()
    if closed not in (None, board.rank) and isinstance(cause, LinkError):
        failure = closed_rank(closed, noticed=noticed)
    elif lost is not None and blamed != rank:
        logger.debug("rank %d noticed by: %s", board.rank, cause)
        failure = lost_rank(lost, board.position(lost), noticed=noticed, cause=seen)
    return board.record(failure)
