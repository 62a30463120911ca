"""What moves between ranks: the links, the transfers on each in order, and the slot that each transfer lands in.

A link is (source rank, destination rank, direction): activations and gradients between two ranks are two links. A
transfer is one slice's hidden states (direction F) or their gradient (direction B). A link owns a few slots, which
live in the receiver's memory: `put` writes into the transfer's slot and waits while an earlier transfer still holds it.

A resident slot *is* the saved tensor: it is held from the put until the receiving stage's last backward action of that
slice (W may read both the input and the output gradient, so it counts where the backward is split). Because backwards
free slices last to first, a first-in first-out ring with as many slots as live slices deadlocks; slots are therefore
assigned transfer by transfer, as a compiler assigns registers. The order that proves it is `clock_order`.
The trap: within one action the put comes before the release (a fused last kernel reads the one while it writes the
other), so an action's output never lands in a slot that the same action frees.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from terapipe.schedule.action import FORWARD, WEIGHT_GRAD, Action
from terapipe.schedule.grid import schedule_error
from terapipe.schedule.schedule import Schedule


class Link(NamedTuple):
    """One direction of hand-off between two ranks: "F" carries hidden states, "B" their gradients."""

    source_rank: int
    destination_rank: int
    direction: str

    def __str__(self) -> str:
        return f"{self.source_rank}->{self.destination_rank}{self.direction}"


class Transfer(NamedTuple):
    """One slice's hidden states or gradient on a link. `stage` is the one that receives it."""

    link: Link
    micro: int
    slice: int
    stage: int

    def __str__(self) -> str:
        return f"{self.link} micro {self.micro} slice {self.slice}"


def producers(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """The actions whose results `action` needs, on this rank or another.

    F needs F of the stage before; B and I need F of their own stage and B or I of the stage after; W needs its I. That
    earlier slices' F and later slices' B of a stage come first is the order of the rank's list, which `check` asserts.
    """
    stage, kind, micro, piece = action
    if kind == FORWARD:
        return (Action(stage - 1, FORWARD, micro, piece),) if stage > 0 else ()
    if kind == WEIGHT_GRAD:
        return (Action(stage, "I", micro, piece),)
    own = Action(stage, FORWARD, micro, piece)
    return (own, schedule.gradient_action(stage + 1, micro, piece)) if stage + 1 < schedule.stages else (own,)


def taken_by(schedule: Schedule, action: Action) -> Transfer | None:
    """What `action` takes from a link before it runs, or None (first or last stage, W, both stages on one rank)."""
    step = {"F": -1, "B": 1, "I": 1}.get(action.kind, 0)
    source = action.stage + step
    if step == 0 or not 0 <= source < schedule.stages:
        return None
    return _between(schedule, source, action.stage, action)


def sent_by(schedule: Schedule, action: Action) -> Transfer | None:
    """What `action` puts on a link after it ran, or None."""
    step = {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
    destination = action.stage + step
    if step == 0 or not 0 <= destination < schedule.stages:
        return None
    return _between(schedule, action.stage, destination, action)


def _between(schedule: Schedule, source: int, destination: int, action: Action) -> Transfer | None:
    ranks = schedule.stage_rank(source), schedule.stage_rank(destination)
    if ranks[0] == ranks[1]:
        return None
    link = Link(*ranks, "F" if destination > source else "B")
    return Transfer(link, action.micro, action.slice, destination)


def sends(schedule: Schedule, rank: int) -> tuple[Transfer, ...]:
    """Everything `rank` puts, on all its links, in the order of its list."""
    return tuple(transfer for action in schedule[rank] if (transfer := sent_by(schedule, action)) is not None)


def takes(schedule: Schedule, rank: int) -> tuple[Transfer, ...]:
    """Everything `rank` takes, from all its links, in the order of its list."""
    return tuple(transfer for action in schedule[rank] if (transfer := taken_by(schedule, action)) is not None)


def links(schedule: Schedule) -> tuple[Link, ...]:
    """Every link of the schedule in one global order, the same on every rank (communicators are created in it)."""
    return tuple(sorted({transfer.link for rank in range(schedule.ranks) for transfer in sends(schedule, rank)}))


def link_transfers(schedule: Schedule) -> dict[Link, tuple[Transfer, ...]]:
    """The transfers of each link in the order in which the sender puts them."""
    order: dict[Link, list[Transfer]] = {link: [] for link in links(schedule)}
    for rank in range(schedule.ranks):
        for transfer in sends(schedule, rank):
            order[transfer.link].append(transfer)
    return {link: tuple(transfers) for link, transfers in order.items()}


def sending_action(schedule: Schedule, transfer: Transfer) -> Action:
    """The action that puts `transfer`."""
    if transfer.link.direction == "F":
        return Action(transfer.stage - 1, FORWARD, transfer.micro, transfer.slice)
    return schedule.gradient_action(transfer.stage + 1, transfer.micro, transfer.slice)


def taking_action(schedule: Schedule, transfer: Transfer) -> Action:
    """The action that takes `transfer`."""
    if transfer.link.direction == "F":
        return Action(transfer.stage, FORWARD, transfer.micro, transfer.slice)
    return schedule.gradient_action(transfer.stage, transfer.micro, transfer.slice)


def releasing_action(schedule: Schedule, transfer: Transfer, *, resident: bool = True) -> Action:
    """The action after which the transfer's slot is free: the last backward of the slice, or the take if copied out."""
    if not resident:
        return taking_action(schedule, transfer)
    return schedule.last_backward(transfer.stage, transfer.micro, transfer.slice)


def clock_order(schedule: Schedule) -> tuple[Action, ...]:
    """One order of all actions that respects every rank's list and every need: what an ideal clock would run.

    At each tick every rank whose next action has its inputs from earlier ticks runs it. Actions of one tick do not need
    each other, so among them those that free a slot are listed before those that fill it. ScheduleError when the
    ranks wait for each other although nothing limits the slots.
    """
    return _linear_order(schedule, lambda ready: sorted(ready, key=_frees_before_fills))


def demand_order(schedule: Schedule) -> tuple[Action, ...]:
    """Like `clock_order` but one action at a time: a put only when nothing that frees a slot can run before it."""
    return _linear_order(schedule, lambda ready: [min(ready, key=_frees_before_fills)])


def _linear_order(schedule: Schedule, choose: Callable[[list[Action]], list[Action]]) -> tuple[Action, ...]:
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
        for action in choose(ready):
            position[schedule.places[action].rank] += 1
            done.add(action)
            order.append(action)


def _frees_before_fills(action: Action) -> tuple[int, int]:
    if action.kind == WEIGHT_GRAD:
        return 0, action.stage
    return (2, -action.stage) if action.is_forward else (1, action.stage)


@dataclass(frozen=True)
class SlotAssignment:
    """The slot of every transfer, decided before the first step.

    `resident` tells when a slot is freed (see the top of this file; if False, when the receiver took the transfer). A
    link with zero slots is a rendezvous: its put returns only once the receiver has reached the action that takes it.
    """

    order: Mapping[Link, tuple[Transfer, ...]]
    counts: Mapping[Link, int]
    slot_of: Mapping[Transfer, int]
    resident: bool = True

    def slots(self, link: Link) -> int:
        """How many slots `link` owns."""
        return self.counts[link]

    def slot(self, transfer: Transfer) -> int:
        """The slot of `transfer`, counted from 0 within its link."""
        return self.slot_of[transfer]

    def previous(self, transfer: Transfer) -> Transfer | None:
        """The transfer that used the slot before this one and must be released before this put, or None."""
        return self._uses[transfer][0]

    def use(self, transfer: Transfer) -> int:
        """The how-manieth use of its slot in this step `transfer` is, from 1 (a link's epoch counts these)."""
        return self._uses[transfer][1]

    @cached_property
    def _uses(self) -> Mapping[Transfer, tuple[Transfer | None, int]]:
        uses: dict[Transfer, tuple[Transfer | None, int]] = {}
        for link, transfers in self.order.items():
            last: dict[int, tuple[Transfer | None, int]] = {}
            for transfer in transfers:
                if self.counts[link] == 0:
                    uses[transfer] = (None, 1)
                    continue
                previous, count = last.get(self.slot_of[transfer], (None, 0))
                uses[transfer] = (previous, count + 1)
                last[self.slot_of[transfer]] = (transfer, count + 1)
        return uses


def assign_slots(
    schedule: Schedule,
    *,
    resident: bool = True,
    order: Sequence[Action] | None = None,
    at_most: int | None = None,
) -> SlotAssignment:
    """Interval colouring along `order`: exactly as many slots as transfers are ever held at once in that order.

    A slot is only given again after the action that frees it, so every wait for a slot points backwards in one order
    of all actions and no wait can be part of a cycle: the assignment cannot deadlock, whatever the actions' times.
    order: `clock_order` by default, in which a put never waits as long as actions take equal times. `demand_order`
    gives the fewest: a forward link has as many slots as its receiver has live slices, and puts wait more often.
    `at_most` caps the slots of every link; then the slot that is freed first is given early and `check` must decide.
    """
    if at_most is not None and at_most < 1:
        raise ValueError(f"a link needs at least one slot, got at_most={at_most}; zero slots is `rendezvous`")
    order = clock_order(schedule) if order is None else order
    position = {action: index for index, action in enumerate(order)}
    counts: dict[Link, int] = dict.fromkeys(links(schedule), 0)
    slot_of: dict[Transfer, int] = {}
    free: dict[Link, list[int]] = {link: [] for link in counts}
    held: dict[Link, list[tuple[int, int]]] = {link: [] for link in counts}  # (position of the release, slot)
    for index, action in enumerate(order):
        transfer = sent_by(schedule, action)
        if transfer is None:
            continue
        link = transfer.link
        while held[link] and held[link][0][0] < index:
            heapq.heappush(free[link], heapq.heappop(held[link])[1])
        if free[link]:
            slot = heapq.heappop(free[link])
        elif at_most is None or counts[link] < at_most:
            slot = counts[link]
            counts[link] += 1
        else:
            slot = heapq.heappop(held[link])[1]
        slot_of[transfer] = slot
        release = position.get(releasing_action(schedule, transfer, resident=resident), len(order))
        heapq.heappush(held[link], (release, slot))
    return SlotAssignment(link_transfers(schedule), counts, slot_of, resident)


def ring_slots(schedule: Schedule, count: int, *, resident: bool = False) -> SlotAssignment:
    """A first-in first-out ring of `count` slots on every link: right for links that copy out, a trap if resident."""
    if count < 1:
        raise ValueError(f"a ring needs at least one slot, got {count}")
    order = link_transfers(schedule)
    slot_of = {transfer: i % count for transfers in order.values() for i, transfer in enumerate(transfers)}
    return SlotAssignment(order, dict.fromkeys(order, count), slot_of, resident)


def rendezvous(schedule: Schedule) -> SlotAssignment:
    """No slot at all: every put waits until the receiver has reached the action that takes it."""
    order = link_transfers(schedule)
    return SlotAssignment(order, dict.fromkeys(order, 0), {})
