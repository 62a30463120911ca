"""Schedules as the C++ core takes them: arrays, flattened once and kept as long as the schedule lives.

None where only Python can do the work: a core that was not built, an action twice, a stage on two ranks, another kind
of action. The Python code then serves, and says what is wrong with such a schedule.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from terapipe.schedule.action import FORWARD, KINDS, Action
from terapipe.schedule.schedule import Schedule
from terapipe.schedule.transfers import Link, Transfer

try:
    from terapipe import _core as core
except ImportError:  # a checkout that was not built: the Python twins give the same numbers
    core = None  # type: ignore[assignment]


class Kept:
    """What was made from an object, by its identity, as long as it lives. (Not in the object, which must pickle.)"""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def get(self, owner: Any, make: Callable[[], Any]) -> Any:
        key = id(owner)
        if key not in self._entries:
            self._entries[key] = (weakref.ref(owner, lambda _: self._entries.pop(key, None)), make())
        return self._entries[key][1]


_FLAT = Kept()


class Flat(NamedTuple):
    """A schedule as the core takes it."""

    core: Any
    actions: tuple[Action, ...]
    kinds: tuple[str, ...]
    links: tuple[Link, ...]
    link_of: list[int]  # that each action puts on, or -1

    def transfers(self) -> list[Transfer | None]:
        """What each action puts."""
        return [
            None if link < 0 else Transfer(self.links[link], micro, piece, stage + (1 if kind == FORWARD else -1))
            for link, (stage, kind, micro, piece) in zip(self.link_of, self.actions, strict=True)
        ]


def flat_schedule(schedule: Schedule) -> Flat | None:
    flat: Flat | None = _FLAT.get(schedule, lambda: _flatten(schedule))
    return flat


def _flatten(schedule: Schedule) -> Flat | None:
    actions = tuple(schedule.actions())
    if core is None or not actions:
        return None
    stages, kinds, micros, slices = zip(*actions, strict=True)
    if not {*kinds} <= {*KINDS}:
        return None
    try:
        flat = core.FlatSchedule(
            stages=array("i", stages),
            kinds="".join(kinds).encode(),
            micros=array("i", micros),
            slices=array("i", slices),
            rank_lengths=[len(order) for order in schedule.orders],
        )
    except OverflowError:  # an index beyond int32
        return None
    if not flat.regular:
        return None
    return Flat(flat, actions, kinds, tuple(Link(*link) for link in flat.links), flat.link_of)
