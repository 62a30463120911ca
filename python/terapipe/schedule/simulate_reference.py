"""The slow twin of `simulate`: the same clock in plain Python, over actions and transfers by name.

It is the oracle of the C++ core, serves numbers that neither int64 nor double hold (fractions), and explains a
deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from terapipe.schedule.action import Action
from terapipe.schedule.costs import Costs, LinkCosts, Seconds
from terapipe.schedule.grid import schedule_error
from terapipe.schedule.prices import action_costs, link_price, mean_costs, occupancy
from terapipe.schedule.schedule import Schedule
from terapipe.schedule.simulation import Flight, Simulation
from terapipe.schedule.slots import SlotAssignment, releasing_action, require_own_slots
from terapipe.schedule.transfers import (
    Transfer,
    producers,
    sending_action,
    sent_by,
    taken_by,
    taking_action,
)


def simulate_reference(
    schedule: Schedule,
    costs: Costs | Sequence[Seconds],
    *,
    links: LinkCosts | None = None,
    slots: SlotAssignment | None = None,
) -> Simulation:
    """`simulate` without the C++ core: equal results, far slower."""
    if slots is not None:
        require_own_slots(schedule, slots)
    actions = tuple(schedule.actions())
    values = action_costs(schedule, costs)
    run = _run(schedule, dict(zip(actions, values, strict=True)), links, slots)
    free_links = (
        run if links is None and slots is None else _run(schedule, dict(zip(actions, values, strict=True)), None, None)
    )
    means = mean_costs([action.kind for action in actions], values)
    mean_of = {action: means[action.kind] for action in actions}
    mean = free_links if list(mean_of.values()) == values else _run(schedule, mean_of, None, None)
    flights = [(0, 0) if (t := sent_by(schedule, action)) is None else run.flights[t] for action in actions]
    return Simulation(
        schedule,
        starts=[run.start[action] for action in actions],
        ends=[run.end[action] for action in actions],
        put_starts=[start for start, _ in flights],
        arrivals=[arrival for _, arrival in flights],
        even=(max(free_links.end.values(), default=0), max(mean.end.values(), default=0)),
    )


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
        price = link_price(links, transfer.link)
        begin = max(left, link_free.get(transfer.link, 0))
        link_free[transfer.link] = begin + occupancy(price, transfer)
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
