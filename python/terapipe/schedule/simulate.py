"""Predicts the times of a schedule from the costs of its actions and links.

The model is the engine's: a rank runs its list strictly in order; an action starts when the rank is free and its inputs
have arrived; a put starts when the action ends and, if its slot is still held, waits for it with the rank idle; a
transfer then occupies its link for its bytes' time and arrives a latency later, while the rank goes on. Nothing else
costs time. Runs in O(actions); whole numbers stay whole. The trap: without `slots` a put never waits, which flatters
schedules that run far ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from numbers import Rational
from typing import NamedTuple

from terapipe.schedule.action import Action
from terapipe.schedule.costs import Costs, LinkCost, LinkCosts, Seconds
from terapipe.schedule.grid import schedule_error
from terapipe.schedule.schedule import Schedule
from terapipe.schedule.slots import SlotAssignment, clock_order, releasing_action
from terapipe.schedule.transfers import (
    Transfer,
    producers,
    sending_action,
    sent_by,
    taken_by,
    taking_action,
)


class Flight(NamedTuple):
    """One transfer on its link: when its put began and when it had arrived."""

    start_s: Seconds
    end_s: Seconds


class LiveSlices(NamedTuple):
    """From `time_s` on, a rank holds the activations of `slices` slices (or their size, see `Simulation.live`)."""

    time_s: Seconds
    slices: Seconds


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
    """When each action started and ended (a wait for a slot comes after its end), and each transfer's flight."""

    schedule: Schedule
    start: Mapping[Action, Seconds]
    end: Mapping[Action, Seconds]
    flights: Mapping[Transfer, Flight]
    even: tuple[Seconds, Seconds]  # makespan with free links; the same with every action at the mean of its kind

    @cached_property
    def makespan(self) -> Seconds:
        return max(self.end.values(), default=0)

    def busy(self, rank: int) -> Seconds:
        """Seconds in which `rank` runs an action."""
        return sum(self.end[action] - self.start[action] for action in self.schedule[rank])

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
        total: Seconds = 0
        steps = [LiveSlices(0, 0)]
        for action in self.schedule[rank]:  # a rank's actions never overlap, so its list is in the order of time
            held = Action(action.stage, "F", action.micro, action.slice)
            amount = 1 if size is None else size(held)
            if action.is_forward:
                time, total = self.start[action], total + amount
            elif action == self.schedule.last_backward(action.stage, action.micro, action.slice):
                time, total = self.end[action], total - amount
            else:
                continue
            steps.append(LiveSlices(time, total))
        return tuple(steps)

    def order(self) -> tuple[Action, ...]:
        """All actions by the time they end: `assign_slots(schedule, order=...)` then never waits at these times."""
        return tuple(sorted(clock_order(self.schedule), key=lambda action: self.end[action]))  # stable, so needs first

    def peak_live(self, rank: int, size: Callable[[Action], Seconds] | None = None) -> Seconds:
        return max(step.slices for step in self.live(rank, size))


def simulate(
    schedule: Schedule, costs: Costs, *, links: LinkCosts | None = None, slots: SlotAssignment | None = None
) -> Simulation:
    """Runs `schedule` on the clock.

    costs: seconds of each action, a callable or a mapping. links: one cost for every link or one for each (free if
    None). slots: the slots that puts wait for (no put waits if None). ScheduleError when it deadlocks.
    """
    cost = {action: _cost(costs, action) for action in schedule.actions()}
    run = _run(schedule, cost, links, slots)
    free_links = run if links is None and slots is None else _run(schedule, cost, None, None)
    mean_cost = _mean_by_kind(cost)
    mean = free_links if mean_cost == cost else _run(schedule, mean_cost, None, None)
    makespans = (max(free_links.end.values(), default=0), max(mean.end.values(), default=0))
    return Simulation(schedule, run.start, run.end, run.flights, makespans)


def _cost(costs: Costs, action: Action) -> Seconds:
    try:
        value = costs(action) if callable(costs) else costs[action]
    except (KeyError, IndexError):
        raise ValueError(f"the costs have no entry for {action}") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"the cost of {action} must be a finite number of seconds from 0 up, got {value!r}")
    return value


def _mean_by_kind(cost: Mapping[Action, Seconds]) -> dict[Action, Seconds]:
    kinds: dict[str, list[Seconds]] = {}
    for action, value in cost.items():
        kinds.setdefault(action.kind, []).append(value)
    means = {}
    for kind, values in kinds.items():
        total = sum(values)
        # equal costs have that cost as their mean, without a rounding error that would pass for imbalance
        equal = all(value == values[0] for value in values)
        exact = isinstance(total, Rational)
        means[kind] = values[0] if equal else Fraction(total, len(values)) if exact else total / len(values)
    return {action: means[action.kind] for action in cost}


class _Run(NamedTuple):
    start: dict[Action, Seconds]
    end: dict[Action, Seconds]
    flights: dict[Transfer, Flight]


def _run(
    schedule: Schedule, cost: Mapping[Action, Seconds], links: LinkCosts | None, slots: SlotAssignment | None
) -> _Run:
    run = _Run({}, {}, {})
    free_at: list[Seconds] = [0] * schedule.ranks  # when the rank can begin its next action
    left_at: dict[Action, Seconds] = {}  # when the rank was done with the action, its put included
    link_free: dict = {}
    position = [0] * schedule.ranks
    pending_put: list[Transfer | None] = [None] * schedule.ranks
    blocked: dict[Action, list[int]] = {}  # action -> ranks to look at again once it has ended (or been left)
    agenda = list(range(schedule.ranks))

    def wait_for(action: Action, rank: int) -> None:
        blocked.setdefault(action, []).append(rank)

    def start_put(rank: int, action: Action, transfer: Transfer) -> bool:
        gate: Action | None = None
        if slots is not None and slots.slots(transfer.link) == 0:
            taker, index = schedule.places[taking_action(schedule, transfer)]
            gate = schedule[taker][index - 1] if index else None
        elif slots is not None and (previous := slots.previous(transfer)) is not None:
            gate = releasing_action(schedule, previous, resident=slots.resident)
        if gate is not None and gate not in left_at:
            wait_for(gate, rank)
            return False
        left = max(run.end[action], left_at[gate]) if gate is not None else run.end[action]
        price = links[transfer.link] if isinstance(links, Mapping) else links or LinkCost()
        begin = max(left, link_free.get(transfer.link, 0))
        link_free[transfer.link] = begin + price.occupancy_s(transfer)
        run.flights[transfer] = Flight(begin, link_free[transfer.link] + price.latency_s)
        left_at[action] = left
        return True

    while agenda:
        rank = agenda.pop()
        while position[rank] < len(schedule[rank]):
            action = schedule[rank][position[rank]]
            if action not in run.end:
                missing = next((need for need in producers(schedule, action) if need not in left_at), None)
                if missing is not None:
                    wait_for(missing, rank)
                    break
                arrived = taken_by(schedule, action)
                start = free_at[rank] if arrived is None else max(free_at[rank], run.flights[arrived].end_s)
                run.start[action], run.end[action] = start, start + cost[action]
                pending_put[rank] = sent_by(schedule, action)
            transfer = pending_put[rank]
            if transfer is None:
                left_at[action] = run.end[action]
            elif not start_put(rank, action, transfer):
                break
            free_at[rank] = left_at[action]
            position[rank] += 1
            agenda += blocked.pop(action, [])
    _refuse_deadlock(schedule, position, run)
    return run


def _refuse_deadlock(schedule: Schedule, position: list[int], run: _Run) -> None:
    stuck = [rank for rank in range(schedule.ranks) if position[rank] < len(schedule[rank])]
    if not stuck:
        return
    lines = []
    for rank in stuck:
        action = schedule[rank][position[rank]]
        transfer = sent_by(schedule, action)
        if action in run.end and transfer is not None:
            lines.append(f"  rank {rank} ran {sending_action(schedule, transfer)} and has no slot for {transfer}")
        else:
            needs = [str(need) for need in producers(schedule, action) if need not in run.end]
            lines.append(f"  rank {rank} cannot run {action}: it waits for {' and '.join(needs) or 'a transfer'}")
    marks = [schedule.places[schedule[rank][position[rank]]] for rank in stuck]
    raise schedule_error(schedule, "\n".join(["the simulated ranks wait for each other:", *lines]), marks=marks)
