"""The last step of every rank as rows of one table: what each computed, for what it waited, what was on its way.

Ranks of one host share a clock, so the earliest start is everybody's zero. The trap: across hosts each rank has a clock
of its own, and its rows begin at its own start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terapipe.engine.hand_off_times import HandOff
from terapipe.engine.interpreter import RankProgram
from terapipe.schedule.trace import TraceEvent


def own_rows(programs: Sequence[RankProgram]) -> list[Any]:
    """What a rank tells the others of its step: (rank, action, start, end, kind), in seconds of its clock."""
    return [
        (span.rank, str(span.action), span.start, span.end, span.kind) for program in programs for span in program.spans
    ]


def joined_rows(reports: Sequence[Sequence[Any]], hand_offs: Sequence[HandOff], *, one_clock: bool) -> list[TraceEvent]:
    """From every rank's (start of its step, `own_rows`); in seconds from the start."""
    earliest = min(began for began, _ in reports)
    events = [
        TraceEvent(rank, label, start - zero, end - zero, kind)
        for began, rows in reports
        for zero in [earliest if one_clock else began]
        for rank, label, start, end, kind in rows
    ]
    return events + [hand_off.event(earliest) for hand_off in hand_offs]
