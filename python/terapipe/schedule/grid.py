"""The error of a schedule that cannot run, with the rank/action grid and the failing cells marked `>like this<`.

Rows are ranks, columns are positions in each rank's list (not times). Long schedules show the columns around the mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from terapipe.schedule.schedule import Place, Schedule

COLUMNS_AROUND = 6


class ScheduleError(ValueError):
    """A schedule that would not run, would hang, or would give wrong gradients. The message shows the grid."""


def schedule_error(
    schedule: Schedule, reason: str, *, marks: Iterable[Place] = (), missing: Mapping[int, str] | None = None
) -> ScheduleError:
    return ScheduleError(f"{reason}\n{render_grid(schedule, marks=marks, missing=missing)}")


def render_grid(schedule: Schedule, *, marks: Iterable[Place] = (), missing: Mapping[int, str] | None = None) -> str:
    """The grid as text. `marks` are cells to mark; `missing` maps a rank to an action that its row lacks."""
    rows = [[str(action) for action in order] for order in schedule.orders]
    marked = set(marks)
    for rank, index in marked:
        rows[rank][index] = f">{rows[rank][index]}<"
    for rank, action in (missing or {}).items():
        marked.add(Place(rank, len(rows[rank])))
        rows[rank].append(f">{action} missing<")
    longest = max((len(row) for row in rows), default=0)
    columns = [index for _, index in marked] or [0]
    first, last = max(0, min(columns) - COLUMNS_AROUND), min(longest, max(columns) + COLUMNS_AROUND + 1)
    shown = list(range(first, last))
    if len(shown) > 8 * COLUMNS_AROUND:  # marks far apart: only the columns near a mark
        shown = [column for column in shown if any(abs(column - mark) <= 1 for mark in columns)]
    table = [["", *map(str, shown)]]
    table += [[f"rank {rank}", *(row[c] if c < len(row) else "" for c in shown)] for rank, row in enumerate(rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(shown) + 1)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table)
