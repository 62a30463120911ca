"""One order of all actions that keeps every rank's list and every need: what one thread could run them in.

Actions that free a slot come before those that fill one. The C++ core makes it; `linear_order_reference` is its oracle,
and says which ranks wait for each other where there is no such order.
"""

from __future__ import annotations

from terapipe.schedule.action import WEIGHT_GRAD, Action
from terapipe.schedule.flat import core, flat_schedule
from terapipe.schedule.grid import schedule_error
from terapipe.schedule.schedule import Schedule
from terapipe.schedule.transfers import producers


def clock_order(schedule: Schedule) -> tuple[Action, ...]:
    """What an ideal clock would run.

    At each tick every rank whose next action has its inputs from earlier ticks runs it. Actions of one tick do not need
    each other, so among them those that free a slot are listed before those that fill it. ScheduleError when the
    ranks wait for each other although nothing limits the slots.
    """
    return _linear_order(schedule, by_ticks=True)


def demand_order(schedule: Schedule) -> tuple[Action, ...]:
    """Like `clock_order` but one action at a time: a put only when nothing that frees a slot can run before it."""
    return _linear_order(schedule, by_ticks=False)


def _linear_order(schedule: Schedule, *, by_ticks: bool) -> tuple[Action, ...]:
    flat = flat_schedule(schedule)
    if flat is not None:
        found = core.linear_order(flat.core, by_ticks=by_ticks)
        if len(found) == len(flat.actions):
            return tuple(map(flat.actions.__getitem__, found))
    return linear_order_reference(schedule, by_ticks=by_ticks)


def linear_order_reference(schedule: Schedule, *, by_ticks: bool) -> tuple[Action, ...]:
    """The same in Python."""
    position = [0] * schedule.ranks
    done: set[Action] = set()
    order: list[Action] = []
    while True:
        waiting = [row[index] for row, index in zip(schedule.orders, position, strict=True) if index < len(row)]
        if not waiting:
            return tuple(order)
        ready = [action for action in waiting if all(need in done for need in producers(schedule, action))]
        if not ready:
            first = waiting[0]
            needs = " and ".join(str(need) for need in producers(schedule, first) if need not in done)
            places = [schedule.places[action] for action in waiting]
            reason = f"the ranks wait for each other: rank {places[0].rank} cannot run {first} before {needs}"
            raise schedule_error(schedule, reason, marks=places)
        ready.sort(key=_frees_before_fills)
        for action in ready if by_ticks else ready[:1]:
            position[schedule.places[action].rank] += 1
            done.add(action)
            order.append(action)


def _frees_before_fills(action: Action) -> tuple[int, int]:
    if action.kind == WEIGHT_GRAD:
        return 0, action.stage
    return (2, -action.stage) if action.is_forward else (1, action.stage)
