"""How long slices were on their way between ranks, and how much of that was hidden behind compute.

Four times tell a hand-off: the producer's action ended (`sent`), its put returned (`put`), the consumer began to wait
for it (`waiting`) and had it (`taken`). Ranks of one host share a clock, so the sender writes two, the receiver two,
and one sum over ranks brings them together. A consumer that was busy when the slice came lost nothing: what it waited
after the producer's end is *exposed*, the rest of the way was hidden.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from terapipe.engine.interpreter import RankProgram
from terapipe.schedule import Transfer
from terapipe.schedule.trace import HAND_OFF, TraceEvent

TIMES = 4


@dataclass(frozen=True)
class HandOff:
    """One transfer; seconds on the hosts' clock."""

    transfer: Transfer
    sent: float
    put: float
    waiting: float
    taken: float

    @property
    def exposed_s(self) -> float:
        return max(0.0, self.taken - max(self.sent, self.waiting))

    @property
    def end(self) -> float:
        """When it was there: at the latest when the put returned, or when the consumer that waited had it."""
        return max(self.put, self.taken) if self.waiting < self.put else self.put

    def event(self, zero: float) -> TraceEvent:
        """Its row in the timeline, on the receiver's side."""
        label = f"{self.transfer.link} {self.transfer.micro}.{self.transfer.slice}"
        return TraceEvent(self.transfer.link.destination_rank, label, self.sent - zero, self.end - zero, HAND_OFF)


@dataclass(frozen=True)
class HandOffSummary:
    """Of one step's hand-offs: their number, seconds on the way, and the seconds for which a consumer stood waiting."""

    count: int
    seconds: float
    exposed_s: float
    median_exposed_s: float

    @property
    def hidden_share(self) -> float:
        """0 to 1; waiting can last longer than the way, by what it takes to wake up."""
        return max(0.0, 1.0 - self.exposed_s / self.seconds) if self.seconds > 0 else 1.0


def summarize(hand_offs: Sequence[HandOff]) -> HandOffSummary:
    exposed = [hand_off.exposed_s for hand_off in hand_offs]
    return HandOffSummary(
        count=len(hand_offs),
        seconds=sum(hand_off.end - hand_off.sent for hand_off in hand_offs),
        exposed_s=sum(exposed),
        median_exposed_s=statistics.median(exposed) if exposed else 0.0,
    )


def hand_offs(transfers: Sequence[Transfer], times: Sequence[float]) -> list[HandOff]:
    """From `TIMES` numbers a transfer, in the order of the fields."""
    return [HandOff(transfer, *times[TIMES * i : TIMES * (i + 1)]) for i, transfer in enumerate(transfers)]


def known_times(transfers: Sequence[Transfer], program: RankProgram) -> list[float]:
    """Of each transfer what this rank knows, zeros for the rest: the sum over ranks is complete."""
    nothing = (0.0,) * (TIMES // 2)
    return [
        seconds
        for transfer in transfers
        for seconds in (*program.sent.get(transfer, nothing), *program.taken.get(transfer, nothing))
    ]
