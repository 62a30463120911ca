"""Timelines as rows, the same whether simulated or measured, so that one set of writers (`terapipe.viz`) shows both.

A row of category "compute" is an action at work and labelled with its text; "wait" is a rank that waits for its input;
"hand-off" is a slice on its way to the rank, beside whatever the rank does; any other category ("loss", "reduce",
"optimizer", ...) is other work. Times are seconds from the start of the step, on one clock for all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from terapipe.schedule.action import Action
from terapipe.schedule.simulate import Simulation

COMPUTE, WAIT, HAND_OFF, OTHER = "compute", "wait", "hand-off", "other"


class TraceEvent(NamedTuple):
    """One bar of a timeline. `label` is an action's text (`2F0.3`) if the category is "compute" or "wait"."""

    rank: int
    label: str
    start_s: float
    end_s: float
    category: str

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def action(self) -> Action | None:
        """The action this row is about, or None for other work."""
        try:
            return Action.parse(self.label)
        except ValueError:
            return None

    @property
    def kind(self) -> str:
        """What the bar shows: F, B, I or W for an action at work, else "wait", "hand-off" or "other"."""
        if self.category in (WAIT, HAND_OFF):
            return self.category
        action = self.action if self.category == COMPUTE else None
        return OTHER if action is None else action.kind


def trace(simulation: Simulation, *, seconds_per_unit: float = 1.0) -> tuple[TraceEvent, ...]:
    """The rows of a simulation, whose times count in units of `seconds_per_unit`."""
    scale = seconds_per_unit
    return tuple(
        TraceEvent(
            rank,
            str(action),
            float(simulation.start[action] * scale),
            float(simulation.end[action] * scale),
            COMPUTE,
        )
        for rank in range(simulation.schedule.ranks)
        for action in simulation.schedule[rank]
    )


class Span(NamedTuple):
    """First start and last end of a timeline."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def span(events: Sequence[TraceEvent]) -> Span:
    if not events:
        return Span(0.0, 0.0)
    return Span(min(event.start_s for event in events), max(event.end_s for event in events))


def num_ranks(events: Sequence[TraceEvent]) -> int:
    return 1 + max((event.rank for event in events), default=-1)


def busy_s(events: Iterable[TraceEvent], rank: int) -> float:
    """Seconds in which `rank` works. Rows of one rank may overlap (communication beside compute) and count once."""
    spans = sorted((e.start_s, e.end_s) for e in events if e.rank == rank and e.category not in (WAIT, HAND_OFF))
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def bubble_share(events: Sequence[TraceEvent]) -> float:
    """Idle share of all ranks' time between the first start and the last end."""
    ranks, duration = num_ranks(events), span(events).duration_s
    if not duration:
        return 0.0
    return 1.0 - sum(busy_s(events, rank) for rank in range(ranks)) / (ranks * duration)


def to_json(events: Iterable[TraceEvent]) -> str:
    """One row a line."""
    return "[\n" + ",\n".join("  " + json.dumps(list(event)) for event in events) + "\n]\n"


def from_json(text: str) -> tuple[TraceEvent, ...]:
    try:
        return tuple(
            TraceEvent(int(rank), str(label), float(start), float(end), str(category))
            for rank, label, start, end, category in json.loads(text)
        )
    except (json.JSONDecodeError, TypeError, ValueError) as error:
        raise ValueError(f"the trace is not a list of [rank, label, start_s, end_s, category]: {error}") from None
