"""Refuses a schedule that would not run, would hang, or would give wrong gradients, and shows where.

Runs on lists alone, before any process starts. What a rank may wait for, and hence what can deadlock: its own list in
order, its inputs (`transfers.producers`), and for each put the release of the slot it fills (or, on a link without
slots, the receiver reaching the action that takes it). These waits are a graph; it must have no cycle.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from terapipe.schedule.action import FORWARD, KIND_NAMES, KINDS, WEIGHT_GRAD, Action
from terapipe.schedule.flat import core, flat_schedule
from terapipe.schedule.grid import ScheduleError, schedule_error
from terapipe.schedule.schedule import Place, Schedule
from terapipe.schedule.simulate import runs_to_its_end
from terapipe.schedule.slots import SlotAssignment, releasing_action, require_own_slots
from terapipe.schedule.transfers import (
    Link,
    Transfer,
    producers,
    sending_action,
    sent_by,
    taken_by,
    taking_action,
)

__all__ = ["ScheduleError", "check"]


def check(schedule: Schedule, slots: SlotAssignment | None = None) -> None:
    """ScheduleError unless `schedule` can run with `slots` (if None, those of `assign_slots`, for which no put waits);
    ValueError for slots of another schedule."""
    if _sound(schedule) and runs_to_its_end(schedule, slots):
        return
    for rule in (_indices, _one_rank_per_stage, _each_action_once, _order_on_a_stage, _order_on_links):
        rule(schedule)
    _no_cycle(schedule, None)
    if slots is not None:
        require_own_slots(schedule, slots)
        _no_cycle(schedule, slots)


def _sound(schedule: Schedule) -> bool:
    """Whether the C++ core finds every rule kept that does not concern slots; False also where it cannot tell."""
    flat = flat_schedule(schedule)
    return flat is not None and core.sound(flat.core)


def _places(schedule: Schedule) -> Iterator[tuple[Place, Action]]:
    for rank, order in enumerate(schedule.orders):
        for index, action in enumerate(order):
            yield Place(rank, index), action


def _indices(schedule: Schedule) -> None:
    for place, action in _places(schedule):
        if action.kind not in KINDS or min(action.stage, action.micro, action.slice) < 0:
            raise schedule_error(schedule, f"{action} on rank {place.rank} is not an action", marks=[place])
    if not schedule.stages:
        raise ScheduleError(f"the schedule has {schedule.ranks} ranks and no action")


def _one_rank_per_stage(schedule: Schedule) -> None:
    first: dict[int, Place] = {}
    for place, action in _places(schedule):
        other = first.setdefault(action.stage, place)
        if other.rank != place.rank:
            raise schedule_error(
                schedule, f"stage {action.stage} is on rank {other.rank} and on rank {place.rank}", marks=[other, place]
            )
    absent = sorted(set(range(schedule.stages)) - set(first))
    if absent:
        raise schedule_error(schedule, f"no rank runs stage {absent[0]} of {schedule.stages} stages")


def _each_action_once(schedule: Schedule) -> None:
    seen: dict[Action, Place] = {}
    for place, action in _places(schedule):
        if action in seen:
            raise schedule_error(schedule, f"{action} is listed twice", marks=[seen[action], place])
        seen[action] = place
    for stage in range(schedule.stages):
        rank = schedule.stage_rank(stage)
        for micro in range(schedule.micros):
            for piece in range(schedule.slices):
                unit = {kind: Action(stage, kind, micro, piece) for kind in KINDS}
                has = {kind for kind, action in unit.items() if action in seen}
                if "B" in has and has & {"I", "W"}:
                    both = [seen[unit[kind]] for kind in sorted(has - {FORWARD})]
                    raise schedule_error(
                        schedule, f"{unit['B']} is a full backward but {unit['I']} or {unit['W']} is there", marks=both
                    )
                wanted = {"F", "I", "W"} if has & {"I", "W"} else {"F", "B"}
                for kind in sorted(wanted - has):
                    name = f"{unit[kind]} ({KIND_NAMES[kind]} of micro {micro}, slice {piece})"
                    reason = f"rank {rank} lacks {name}"
                    raise schedule_error(schedule, reason, missing={rank: str(unit[kind])})


def _order_on_a_stage(schedule: Schedule) -> None:
    done: set[Action] = set()
    last_slice: dict[tuple[int, str, int], tuple[int, Place]] = {}  # (stage, "F" or "B", micro) -> its latest slice
    open_micro: dict[int, tuple[int, int, Place]] = {}  # stage -> micro whose backward runs, slices left, where it was
    for place, action in _places(schedule):
        stage, kind, micro, piece = action
        if kind != FORWARD:
            need = Action(stage, "I" if kind == WEIGHT_GRAD else FORWARD, micro, piece)
            if need not in done:
                raise schedule_error(schedule, f"{action} runs before {need}", marks=[place, schedule.places[need]])
        done.add(action)
        if kind == WEIGHT_GRAD:
            continue
        direction = FORWARD if kind == FORWARD else "B"
        earlier = last_slice.get((stage, direction, micro))
        if earlier is not None and (earlier[0] > piece) == (kind == FORWARD):
            rule = (
                "forwards of a micro must ascend: a slice attends to the slices before it"
                if kind == FORWARD
                else "backwards of a micro must descend: a slice's keys get gradients from all later slices"
            )
            was = schedule[place.rank][earlier[1].position]
            raise schedule_error(schedule, f"{action} runs after {was}; {rule}", marks=[earlier[1], place])
        last_slice[stage, direction, micro] = (piece, place)
        if action.is_gradient:
            current, left, where = open_micro.get(stage, (micro, 0, place))
            if left and current != micro:
                raise schedule_error(
                    schedule,
                    f"{action} begins the backward of micro {micro} on stage {stage} while {left} slices of "
                    f"micro {current} are left; a layer has one gradient accumulator, so micros cannot interleave",
                    marks=[where, place],
                )
            open_micro[stage] = (micro, (left or schedule.slices) - 1, place)


def _order_on_links(schedule: Schedule) -> None:
    put: dict[Link, list[Transfer]] = defaultdict(list)
    taken: dict[Link, list[Transfer]] = defaultdict(list)
    for action in schedule.actions():
        for transfer, order in ((sent_by(schedule, action), put), (taken_by(schedule, action), taken)):
            if transfer is not None:
                order[transfer.link].append(transfer)
    for link in put:
        for sent, received in zip(put[link], taken[link], strict=True):
            if sent != received:
                sender, receiver = sending_action(schedule, sent), taking_action(schedule, received)
                raise schedule_error(
                    schedule,
                    f"link {link} carries {sent.micro}.{sent.slice} first (after {sender}) but rank "
                    f"{link.destination_rank} takes {received.micro}.{received.slice} first (for {receiver})",
                    marks=[schedule.places[sender], schedule.places[receiver]],
                )


class _Wait(NamedTuple):
    """`action` cannot finish before `other`; `reason` says why, as the tail of a sentence."""

    other: Action
    reason: str


def _waits(schedule: Schedule, slots: SlotAssignment | None) -> dict[Action, list[_Wait]]:
    waits: dict[Action, list[_Wait]] = {action: [] for action in schedule.actions()}
    for order in schedule.orders:
        for before, action in itertools.pairwise(order):
            waits[action].append(_Wait(before, f"comes after {before} in its list"))
    for action in schedule.actions():
        for need in producers(schedule, action):
            waits[action].append(_Wait(need, f"needs the result of {need}"))
    if slots is None:
        return waits
    for link, transfers in slots.order.items():
        for transfer in transfers:
            waiting = _slot_wait(schedule, slots, link, transfer)
            if waiting is not None:
                waits[sending_action(schedule, transfer)].append(waiting)
    return waits


def _slot_wait(schedule: Schedule, slots: SlotAssignment, link: Link, transfer: Transfer) -> _Wait | None:
    if slots.slots(link) == 0:
        rank, index = schedule.places[taking_action(schedule, transfer)]
        if index == 0:
            return None
        before = schedule[rank][index - 1]
        return _Wait(before, f"meets its receiver on link {link}, which first runs {before}")
    previous = slots.previous(transfer)
    if previous is None:
        return None
    release = releasing_action(schedule, previous, resident=slots.resident)
    held = f"held by micro {previous.micro} slice {previous.slice}"
    slot = f"slot {slots.slot(transfer)} of {slots.slots(link)} of link {link}"
    return _Wait(release, f"puts into {slot}, {held} until {release}")


def _no_cycle(schedule: Schedule, slots: SlotAssignment | None) -> None:
    waits = _waits(schedule, slots)
    waiters: dict[Action, list[Action]] = defaultdict(list)
    for action, waited in waits.items():
        for wait in waited:
            waiters[wait.other].append(action)
    left = {action: len(waited) for action, waited in waits.items()}
    ready = [action for action, count in left.items() if count == 0]
    while ready:
        for action in waiters[ready.pop()]:
            left[action] -= 1
            if left[action] == 0:
                ready.append(action)
    stuck = {action for action, count in left.items() if count > 0}
    if not stuck:
        return
    cycle = _find_cycle(waits, stuck)
    lines = [f"  rank {schedule.places[action].rank}: {action} {wait.reason}" for action, wait in cycle]
    marks = [schedule.places[action] for action, _ in cycle]
    limit = "" if slots is None else "; it needs more slots, or slots from assign_slots"
    raise schedule_error(schedule, "\n".join([f"the schedule deadlocks{limit}:", *lines]), marks=marks)


def _find_cycle(waits: dict[Action, list[_Wait]], stuck: set[Action]) -> list[tuple[Action, _Wait]]:
    """From any stuck action, follow a wait on a stuck action until one repeats; every stuck action has such a wait."""
    path: list[tuple[Action, _Wait]] = []
    index: dict[Action, int] = {}
    action = min(stuck)
    while action not in index:
        index[action] = len(path)
        # A wait on another rank names the cause; the order of the own list only links causes.
        wait = next(wait for wait in reversed(waits[action]) if wait.other in stuck)
        path.append((action, wait))
        action = wait.other
    return path[index[action] :]
