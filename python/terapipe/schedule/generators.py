"""Schedules as pure functions of their sizes: each appends actions and does nothing else.

Every list is the order in which that rank runs; what a rank waits for follows from the actions (see `transfers`).
`gpipe` is `terapipe`, `one_f_one_b` is `seq_1f1b` and `interleaved` is `seq_interleaved` with one slice. A rank has one
stage, but in the interleaved schedules `chunks`: stage `chunk * ranks + rank`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from terapipe.schedule.action import Action, B, F, I, W
from terapipe.schedule.schedule import Schedule


def terapipe(ranks: int, micros: int, slices: int) -> Schedule:
    """All forwards in order, then all backwards in reverse (Li et al. 2021, section 3).

    Every rank keeps `micros * slices` slices alive. With slices of equal cost the bubble is
    `(ranks - 1) / (micros * slices + ranks - 1)`.
    """
    _require_positive(ranks=ranks, micros=micros, slices=slices)
    units = [(micro, piece) for micro in range(micros) for piece in range(slices)]
    return Schedule([[F(rank, *u) for u in units] + [B(rank, *u) for u in reversed(units)] for rank in range(ranks)])


def gpipe(ranks: int, micros: int) -> Schedule:
    """All forwards, then all backwards in reverse, without slices (Huang et al. 2019)."""
    return terapipe(ranks, micros, 1)


def seq_1f1b(ranks: int, micros: int, slices: int, *, warmup_per_hop: int = 1) -> Schedule:
    """One forward, one backward, slice by slice: micros first in first out, slices of a micro last in first out.

    Rank `r` runs `warmup_per_hop * (ranks - 1 - r) + slices - 1` forwards before it alternates (Sun et al. 2024 has
    `warmup_per_hop` = 1, the least that works), so it keeps at most one slice more than that alive. With 1 every rank
    waits for its slowest neighbour at every slice; each further forward per hop gives slack that hides unequal slices
    and the latency of links, for `ranks - 1` more live slices on rank 0.
    """
    _require_positive(ranks=ranks, micros=micros, slices=slices, warmup_per_hop=warmup_per_hop)
    forwards = [(micro, piece) for micro in range(micros) for piece in range(slices)]
    backwards = [(micro, piece) for micro in range(micros) for piece in reversed(range(slices))]

    def order(rank: int) -> list[Action]:
        warmup = min(len(forwards), warmup_per_hop * (ranks - 1 - rank) + slices - 1)
        actions = [F(rank, *unit) for unit in forwards[:warmup]]
        for ahead, unit in enumerate(backwards, start=warmup):
            if ahead < len(forwards):
                actions.append(F(rank, *forwards[ahead]))
            actions.append(B(rank, *unit))
        return actions

    return Schedule([order(rank) for rank in range(ranks)])


def one_f_one_b(ranks: int, micros: int) -> Schedule:
    """One forward, one backward, without slices (PipeDream-Flush, Narayanan et al. 2021)."""
    return seq_1f1b(ranks, micros, 1)


def seq_interleaved(ranks: int, micros: int, slices: int, *, chunks: int = 2) -> Schedule:
    """`seq_1f1b` with `chunks` stages a rank (Narayanan et al. 2021; with slices, Sun et al. 2024).

    Windows of `ranks` slices go through all chunks, first to last, before the next window begins; backwards go the
    other way. A rank runs as many forwards ahead as the last rank needs for its first backward, and two more for each
    hop to it (with more, ranks would wait for each other around the ring). The bubble of equal slices is
    `(ranks - 1) / (micros * slices * chunks + ranks - 1)`, for `chunks` times the transfers and more live slices.
    """
    _require_positive(ranks=ranks, micros=micros, slices=slices, chunks=chunks)
    # A window that is not full would deadlock: as many micros as fill the last one, and those too many left out again.
    full = next(count for count in itertools.count(micros) if count * slices % ranks == 0)
    units = [(micro, piece) for micro in range(full) for piece in range(slices)]
    returning = [(micro, piece) for micro in range(full) for piece in reversed(range(slices))]
    forwards = [(chunk, *unit) for window in _windows(units, ranks) for chunk in range(chunks) for unit in window]
    backwards = [
        (chunk, *unit) for window in _windows(returning, ranks) for chunk in reversed(range(chunks)) for unit in window
    ]
    place = {unit: index for index, unit in enumerate(forwards)}
    ahead = max(place[unit] - index for index, unit in enumerate(backwards))

    def order(rank: int) -> list[Action]:
        warmup = min(len(forwards), ahead + 2 * (ranks - 1 - rank))
        actions = [F(chunk * ranks + rank, *unit) for chunk, *unit in forwards[:warmup]]
        for index, (chunk, *unit) in enumerate(backwards):
            if warmup + index < len(forwards):
                next_chunk, *next_unit = forwards[warmup + index]
                actions.append(F(next_chunk * ranks + rank, *next_unit))
            actions.append(B(chunk * ranks + rank, *unit))
        return [action for action in actions if action.micro < micros]

    return Schedule([order(rank) for rank in range(ranks)])


def _windows(units: list[tuple[int, int]], size: int) -> list[list[tuple[int, int]]]:
    return [units[first : first + size] for first in range(0, len(units), size)]


def interleaved(ranks: int, micros: int, *, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B without slices (Narayanan et al. 2021), for any number of micros."""
    return seq_interleaved(ranks, micros, 1, chunks=chunks)


def seq_zero_bubble(ranks: int, micros: int, slices: int, *, warmup_per_hop: int = 1) -> Schedule:
    """`seq_1f1b` with the backward split: a rank's weight gradients come `rank` slices late, so that input gradients
    leave earlier, and what is left fills its end (ZB-H1 of Qi et al. 2023, over slices).

    With that lag no rank keeps more slices alive than the first one does.
    """
    whole = seq_1f1b(ranks, micros, slices, warmup_per_hop=warmup_per_hop)

    def order(rank: int) -> list[Action]:
        actions: list[Action] = []
        waiting: deque[Action] = deque()
        for action in whole[rank]:
            if action.is_forward:
                actions.append(action)
                continue
            unit = (rank, action.micro, action.slice)
            actions.append(I(*unit))
            waiting.append(W(*unit))
            if len(waiting) > rank:
                actions.append(waiting.popleft())
        return [*actions, *waiting]

    return Schedule([order(rank) for rank in range(ranks)])


@dataclass(frozen=True)
class Generator:
    """How a schedule is made by name: which sizes its function takes beside `ranks` and `micros`."""

    make: Callable[..., Schedule]
    takes_slices: bool = False
    takes_warmup_per_hop: bool = False
    takes_chunks: bool = False
    splits_backward: bool = False

    def __call__(
        self, ranks: int, micros: int, slices: int = 1, *, warmup_per_hop: int = 1, chunks: int | None = None
    ) -> Schedule:
        """The schedule; ValueError for a size that this schedule does not have."""
        name = self.make.__name__
        if slices != 1 and not self.takes_slices:
            sliced = {"gpipe": "terapipe", "one_f_one_b": "seq_1f1b", "interleaved": "seq_interleaved"}[name]
            raise ValueError(f"schedule {name!r} does not slice but {slices} slices were asked for; use {sliced!r}")
        if warmup_per_hop != 1 and not self.takes_warmup_per_hop:
            raise ValueError(f"schedule {name!r} has no warmup_per_hop (got {warmup_per_hop}); use 'seq_1f1b'")
        if chunks not in (None, 1) and not self.takes_chunks:
            raise ValueError(f"schedule {name!r} has one stage a rank (got {chunks} chunks); use 'seq_interleaved'")
        sizes = [ranks, micros] + [slices] * self.takes_slices
        options = {"warmup_per_hop": warmup_per_hop} if self.takes_warmup_per_hop else {}
        return self.make(*sizes, **options, **({"chunks": chunks or 2} if self.takes_chunks else {}))


GENERATORS: dict[str, Generator] = {
    "gpipe": Generator(gpipe),
    "one_f_one_b": Generator(one_f_one_b),
    "interleaved": Generator(interleaved, takes_chunks=True),
    "terapipe": Generator(terapipe, takes_slices=True),
    "seq_1f1b": Generator(seq_1f1b, takes_slices=True, takes_warmup_per_hop=True),
    "seq_interleaved": Generator(seq_interleaved, takes_slices=True, takes_chunks=True),
    "seq_zero_bubble": Generator(seq_zero_bubble, takes_slices=True, takes_warmup_per_hop=True, splits_backward=True),
}


def _require_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"a schedule needs {name} of at least 1, got {value}")
