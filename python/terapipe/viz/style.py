"""The colours, names and units that every picture of a timeline shares.

One hue per kind of work; within it, later slices of a micro are darker, so the eye can follow a sequence through the
ranks. The hues stay apart for readers who do not see red and green as different, because their lightness differs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from terapipe.schedule.action import KIND_NAMES
from terapipe.schedule.trace import TraceEvent


class Colours(NamedTuple):
    """Hex colours of a kind: the first slice's, the last slice's, and the text on them."""

    first: str
    last: str
    text: str


KIND_COLOURS = {
    "F": Colours("#a9cdf2", "#3f86d2", "#0b2540"),
    "B": Colours("#fbd3a0", "#ee8f2d", "#4a2600"),
    "I": Colours("#f6b8b0", "#dd6455", "#4a100a"),
    "W": Colours("#bfe3c4", "#4fa565", "#0d3318"),
    "other": Colours("#d3c8ee", "#8b74cf", "#24174a"),
    "wait": Colours("#e4e7ec", "#e4e7ec", "#5b6472"),
}
NAMES = {**KIND_NAMES, "other": "other work", "wait": "idle or waiting"}


class TimeUnit(NamedTuple):
    """A unit that makes the numbers of a timeline short: its name and how many seconds it has."""

    name: str
    seconds: float


def time_unit(duration_s: float) -> TimeUnit:
    for unit in (TimeUnit("s", 1.0), TimeUnit("ms", 1e-3)):
        if duration_s >= unit.seconds:
            return unit
    return TimeUnit("µs", 1e-6)


def num_slices(events: Sequence[TraceEvent]) -> int:
    return 1 + max((event.action.slice for event in events if event.action is not None), default=0)


def num_micros(events: Sequence[TraceEvent]) -> int:
    return 1 + max((event.action.micro for event in events if event.action is not None), default=0)


def mixed(kind: str, piece: int, slices: int) -> str:
    """The hex colour of slice `piece` of `slices`: between the kind's first and last colour."""
    first, last, _ = KIND_COLOURS[kind]
    share = piece / (slices - 1) if slices > 1 else 0.6
    channels = (round(int(first[i : i + 2], 16) * (1 - share) + int(last[i : i + 2], 16) * share) for i in (1, 3, 5))
    return "#" + "".join(f"{channel:02x}" for channel in channels)


def short_label(event: TraceEvent, *, micros: int, slices: int) -> str:
    """What is written on a bar: micro and slice as far as there are several, else the kind."""
    action = event.action
    if action is None:
        return event.label
    parts = [str(index) for index, count in ((action.micro, micros), (action.slice, slices)) if count > 1]
    return ".".join(parts) or action.kind
