"""What a simulation found: when each action ran, where the idle time comes from, what each rank held.

`terapipe.schedule.simulate` makes these, in C++ or in Python; both give equal numbers. Whole numbers stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from terapipe.schedule.action import FORWARD, Action
from terapipe.schedule.costs import Seconds
from terapipe.schedule.orders import clock_order
from terapipe.schedule.schedule import Schedule
from terapipe.schedule.transfers import Transfer, sent_by


class Flight(NamedTuple):
    """One transfer on its link: when its put began and when it had arrived."""

    start_s: Seconds
    end_s: Seconds


class LiveSlices(NamedTuple):
    """From `time_s` on, a rank holds the activations of `slices` slices (or their size, see `Simulation.live`)."""

    time_s: Seconds
    slices: Seconds


class LiveCore(Protocol):
    """The C++ core's count of what a rank holds; sizes: one for each action, read at the F actions; None: 1 each."""

    def live(self, rank: int, sizes: Sequence[Seconds] | None) -> tuple[LiveSlices, ...] | None: ...

    def peak_live(self, rank: int, sizes: Sequence[Seconds] | None) -> Seconds | None: ...

    def peaks(self, sizes: Sequence[Seconds]) -> tuple[Seconds, ...] | None: ...


@dataclass(frozen=True)
class Bubble:
    """Idle time of all ranks together, in seconds, and where it comes from. The three parts sum to `idle_s`.

    warmup: what remains if every action took the mean of its kind and links were free. imbalance: what unequal slices
    and stages add to that. communication: what links and full slots add.
    """

    warmup_s: Seconds
    imbalance_s: Seconds
    communication_s: Seconds
    rank_time_s: Seconds  # ranks * makespan

    @property
    def idle_s(self) -> Seconds:
        return self.warmup_s + self.imbalance_s + self.communication_s

    @property
    def share(self) -> float:
        """Idle share of all ranks' time."""
        return float(self.idle_s / self.rank_time_s) if self.rank_time_s else 0.0


@dataclass(frozen=True)
class Simulation:
    """When each action started and ended (a wait for a slot comes after its end), and each transfer's flight.

    Lists have one entry for each of `schedule.actions()`; `start`, `end` and `flights` are the same by name.
    """

    schedule: Schedule
    starts: Sequence[Seconds]
    ends: Sequence[Seconds]
    put_starts: Sequence[Seconds]  # of what each action puts on a link; meaningless where it puts nothing
    arrivals: Sequence[Seconds]
    even: tuple[Seconds, Seconds]  # makespan with free links; the same with every action at the mean of its kind
    core: LiveCore | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "core": None}  # a copy or a pickle counts in Python

    @cached_property
    def start(self) -> Mapping[Action, Seconds]:
        return dict(zip(self.schedule.actions(), self.starts, strict=True))

    @cached_property
    def end(self) -> Mapping[Action, Seconds]:
        return dict(zip(self.schedule.actions(), self.ends, strict=True))

    @cached_property
    def flights(self) -> Mapping[Transfer, Flight]:
        rows = zip(self.schedule.actions(), self.put_starts, self.arrivals, strict=True)
        return {
            transfer: Flight(start, arrival)
            for action, start, arrival in rows
            if (transfer := sent_by(self.schedule, action)) is not None
        }

    @cached_property
    def makespan(self) -> Seconds:
        return max(self.ends, default=0)

    def busy(self, rank: int) -> Seconds:
        """Seconds in which `rank` runs an action."""
        first = sum(len(self.schedule[before]) for before in range(rank))
        last = first + len(self.schedule[rank])
        return sum(end - start for start, end in zip(self.starts[first:last], self.ends[first:last], strict=True))

    @cached_property
    def bubble(self) -> Bubble:
        ranks, (free_links, mean) = self.schedule.ranks, self.even
        busy = sum(self.busy(rank) for rank in range(ranks))
        # Unequal costs can also shorten the fill (a cheap first slice); then nothing is left to blame on them.
        warmup = min(ranks * mean, ranks * free_links) - busy
        return Bubble(
            warmup_s=warmup,
            imbalance_s=ranks * free_links - busy - warmup,
            communication_s=ranks * (self.makespan - free_links),
            rank_time_s=ranks * self.makespan,
        )

    def live(self, rank: int, size: Callable[[Action], Seconds] | None = None) -> tuple[LiveSlices, ...]:
        """How many slices' activations `rank` holds over time: from the start of an F to the end of its last backward.

        size: what one slice holds, a function of its F action (bytes, say); 1 if None.
        """
        sizes = self._sizes(rank, size)
        found = self.core.live(rank, sizes) if self.core is not None else None
        return found if found is not None else live_reference(self, rank, sizes)

    def peak_live(self, rank: int, size: Callable[[Action], Seconds] | None = None) -> Seconds:
        sizes = self._sizes(rank, size)
        found = self.core.peak_live(rank, sizes) if self.core is not None else None
        return found if found is not None else max(step.slices for step in live_reference(self, rank, sizes))

    def peaks(self, size: Callable[[Action], Seconds]) -> tuple[Seconds, ...]:
        """`peak_live` of every rank, reading each size once."""
        sizes: Sequence[Seconds] = [
            size(action) if action.kind == FORWARD else 0 for order in self.schedule.orders for action in order
        ]
        found = self.core.peaks(sizes) if self.core is not None else None
        if found is not None:
            return found
        ranks = range(self.schedule.ranks)
        return tuple(max(step.slices for step in live_reference(self, rank, sizes)) for rank in ranks)

    def _sizes(self, rank: int, size: Callable[[Action], Seconds] | None) -> list[Seconds] | None:
        """The size of each F action of `rank`, 0 elsewhere."""
        if size is None:
            return None
        return [
            size(action) if place == rank and action.is_forward else 0
            for place, order in enumerate(self.schedule.orders)
            for action in order
        ]

    def order(self) -> tuple[Action, ...]:
        """All actions by the time they end: `assign_slots(schedule, order=...)` then never waits at these times."""
        return tuple(sorted(clock_order(self.schedule), key=lambda action: self.end[action]))  # stable, so needs first


def live_reference(simulation: Simulation, rank: int, sizes: Sequence[Seconds] | None) -> tuple[LiveSlices, ...]:
    """`Simulation.live` in Python: a rank's actions never overlap, so its list is in the order of time."""
    schedule = simulation.schedule
    size_of = {} if sizes is None else dict(zip(schedule.actions(), sizes, strict=True))
    total: Seconds = 0
    steps = [LiveSlices(0, 0)]
    for action in schedule[rank]:
        held = Action(action.stage, "F", action.micro, action.slice)
        amount = size_of[held] if sizes is not None else 1
        if action.is_forward:
            time, total = simulation.start[action], total + amount
        elif action == schedule.last_backward(action.stage, action.micro, action.slice):
            time, total = simulation.end[action], total - amount
        else:
            continue
        steps.append(LiveSlices(time, total))
    return tuple(steps)
