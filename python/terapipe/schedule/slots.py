"""The slot of every transfer, decided before the first step, as a compiler assigns registers.

A link owns a few slots, which live in the receiver's memory: `put` writes into the transfer's slot and waits while an
earlier transfer still holds it. A resident slot *is* the saved tensor: it is held from the put until the receiving
stage's last backward action of that slice (W may read both the input and the output gradient, so where the backward is
split it is W). Because backwards free slices last to first, a first-in first-out ring with as many slots as live slices
deadlocks; an interval colouring does not.

The trap: within one action the put comes before the release (a fused last kernel reads the one while it writes the
other), so an action's output never lands in a slot that the same action frees.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from terapipe.schedule.action import Action
from terapipe.schedule.flat import Flat, core, flat_schedule
from terapipe.schedule.orders import clock_order, linear_order_reference
from terapipe.schedule.schedule import Schedule
from terapipe.schedule.transfers import (
    Link,
    Transfer,
    link_transfers,
    producers,
    sent_by,
    taking_action,
)


@dataclass(frozen=True)
class SlotAssignment:
    """The slots of a schedule's transfers.

    `order`: each link's transfers as they are put. `resident`: a slot is freed by the slice's last backward action; if
    False, by the action that takes the transfer (copy-out). A link with zero slots is a rendezvous: its put returns
    only once the receiver has come to the action that takes it.
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
        """Which use of its slot within this step `transfer` is, counted from 1, as a link's epochs are."""
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


def releasing_action(schedule: Schedule, transfer: Transfer, *, resident: bool = True) -> Action:
    """The action after which the transfer's slot is free: the last backward of the slice, or the take if copied out."""
    if not resident:
        return taking_action(schedule, transfer)
    return schedule.last_backward(transfer.stage, transfer.micro, transfer.slice)


def require_own_slots(schedule: Schedule, slots: SlotAssignment) -> None:
    """ValueError if `slots` are those of other transfers than `schedule` has."""
    if dict(slots.order) != link_transfers(schedule):
        raise ValueError("the slots are of another schedule; assign_slots(schedule) gives this one's")


def assign_slots(
    schedule: Schedule,
    *,
    resident: bool = True,
    order: Sequence[Action] | None = None,
    at_most: int | None = None,
) -> SlotAssignment:
    """Interval colouring of every link's transfers: as few slots as are ever held at once.

    Without `order`, a slot is given again only to a put that cannot begin before the release whatever the actions'
    times, because it needs, through any chain of actions, the one that releases. So no put ever waits. A forward link
    then has about `warmup_per_hop` slots more than its receiver has live slices.

    With `order` (one order of all actions: `demand_order`, `clock_order` or a simulation's), a slot is given again to a
    put that comes after the release in that order. Then a put waits when the times differ from that order's. All waits
    point backwards in one order, so none can be part of a cycle and there is no deadlock either. `demand_order` gives
    the fewest: as many slots on a forward link as its receiver has live slices.

    `at_most` caps the slots of every link: the slot that is freed first is given before its release, and `check` must
    tell whether that deadlocks.
    """
    if at_most is not None and at_most < 1:
        raise ValueError(f"a link needs at least one slot, got at_most={at_most}; zero slots is `rendezvous`")
    flat = flat_schedule(schedule)
    if flat is None:
        return assign_slots_reference(schedule, resident=resident, order=order, at_most=at_most)
    transfers = flat.transfers()
    if order is None:
        finished = core.finished_before_puts(flat.core)
        if not finished:
            clock_order(schedule)  # raises: the ranks wait for each other
    else:
        finished = _finished_along(schedule, flat, order)
    colours = core.colour_slots(flat.core, finished, resident=resident, at_most=at_most or 0)
    slot_of = {transfer: slot for transfer, slot in zip(transfers, colours.slot, strict=True) if transfer is not None}
    counts = dict(zip(flat.links, colours.counts, strict=True))
    return SlotAssignment(_by_link(flat, transfers), counts, slot_of, resident)


def assign_slots_reference(
    schedule: Schedule, *, resident: bool = True, order: Sequence[Action] | None = None, at_most: int | None = None
) -> SlotAssignment:
    """`assign_slots` in Python: its oracle, and what serves where the C++ core cannot."""
    finished = _finished_before_puts(schedule) if order is None else _finished_in_order(schedule, order)
    counts: dict[Link, int] = {}
    slot_of: dict[Transfer, int] = {}
    transfers = link_transfers(schedule)
    for link, puts in transfers.items():
        counts[link] = 0
        free: list[int] = []
        held: list[tuple[int, int]] = []  # (position of the release in the receiver's list, slot)
        for transfer in puts:
            while held and held[0][0] < finished[transfer]:
                heapq.heappush(free, heapq.heappop(held)[1])
            if free:
                slot = heapq.heappop(free)
            elif at_most is None or counts[link] < at_most:
                slot = counts[link]
                counts[link] += 1
            else:
                slot = heapq.heappop(held)[1]
            slot_of[transfer] = slot
            release = schedule.places[releasing_action(schedule, transfer, resident=resident)]
            heapq.heappush(held, (release.position, slot))
    return SlotAssignment(transfers, counts, slot_of, resident)


def ring_slots(schedule: Schedule, count: int, *, resident: bool = False) -> SlotAssignment:
    """A first-in first-out ring of `count` slots on every link: right for links that copy out, a trap if resident."""
    if count < 1:
        raise ValueError(f"a ring needs at least one slot, got {count}")
    order = _transfers_by_link(schedule)
    slot_of = {transfer: i % count for transfers in order.values() for i, transfer in enumerate(transfers)}
    return SlotAssignment(order, dict.fromkeys(order, count), slot_of, resident)


def rendezvous(schedule: Schedule) -> SlotAssignment:
    """No slot at all: every put waits until the receiver has come to the action that takes it."""
    order = _transfers_by_link(schedule)
    return SlotAssignment(order, dict.fromkeys(order, 0), {})


def _transfers_by_link(schedule: Schedule) -> dict[Link, tuple[Transfer, ...]]:
    flat = flat_schedule(schedule)
    return link_transfers(schedule) if flat is None else _by_link(flat, flat.transfers())


def _by_link(flat: Flat, transfers: Sequence[Transfer | None]) -> dict[Link, tuple[Transfer, ...]]:
    order: list[list[Transfer]] = [[] for _ in flat.links]
    for link, transfer in zip(flat.link_of, transfers, strict=True):
        if transfer is not None:
            order[link].append(transfer)
    return {link: tuple(puts) for link, puts in zip(flat.links, order, strict=True)}


def _finished_before_puts(schedule: Schedule) -> dict[Transfer, int]:
    """For each transfer, how many actions of the receiver must have ended before its put can begin (vector clocks)."""
    finished: dict[Transfer, int] = {}
    clocks: dict[Action, list[int]] = {}
    for action in linear_order_reference(schedule, by_ticks=True):
        rank, position = schedule.places[action]
        needs = list(producers(schedule, action))
        if position:
            needs.append(schedule[rank][position - 1])
        clock = [max(column) for column in zip(*(clocks[need] for need in needs), strict=True)]
        clocks[action] = clock = clock or [0] * schedule.ranks
        transfer = sent_by(schedule, action)
        if transfer is not None:
            finished[transfer] = clock[transfer.link.destination_rank]
        clock[rank] = position + 1
    return finished


def _finished_along(schedule: Schedule, flat: Flat, order: Sequence[Action]) -> list[int]:
    """`_finished_in_order` by the flat schedule's indices, for what each action puts."""
    index = {action: number for number, action in enumerate(flat.actions)}
    if len(order) != len(index) or set(order) != index.keys():
        raise ValueError(_not_every_action(order))
    rank_of = [rank for rank, row in enumerate(schedule.orders) for _ in row]
    destination = [link.destination_rank for link in flat.links]
    finished, ended = [0] * len(index), [0] * schedule.ranks
    for action in order:
        number = index[action]
        link = flat.link_of[number]
        if link >= 0:
            finished[number] = ended[destination[link]]
        ended[rank_of[number]] += 1
    return finished


def _not_every_action(order: Sequence[Action]) -> str:
    return f"the order must hold every action of the schedule once, got {len(order)} actions"


def _finished_in_order(schedule: Schedule, order: Sequence[Action]) -> dict[Transfer, int]:
    """For each transfer, how many of the receiver's actions stand before the sending one in `order`."""
    finished: dict[Transfer, int] = {}
    ended = [0] * schedule.ranks
    for action in order:
        transfer = sent_by(schedule, action)
        if transfer is not None:
            finished[transfer] = ended[transfer.link.destination_rank]
        ended[schedule.places[action].rank] += 1
    if len(finished) != sum(len(puts) for puts in link_transfers(schedule).values()):
        raise ValueError(_not_every_action(order))
    return finished
