"""What moves between ranks: the links, and the transfers on each in order.

A link is (source rank, destination rank, direction): activations and gradients between two ranks are two links. A
transfer is one slice's hidden states (direction F) or their gradient (direction B). Both ends derive the same lists
from the schedule, so nothing is negotiated at run time. Stages on the same rank hand over without a transfer.
"""

from __future__ import annotations

from typing import NamedTuple

from terapipe.schedule.action import FORWARD, WEIGHT_GRAD, Action
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
