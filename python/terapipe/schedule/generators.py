"""Schedules as pure functions of their sizes: each appends actions and does nothing else. One stage a rank.

Every list is the order in which that rank runs; what a rank waits for follows from the actions (see `transfers`).
`gpipe` is `terapipe` and `one_f_one_b` is `seq_1f1b` with one slice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from terapipe.schedule.action import Action, B, F
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


@dataclass(frozen=True)
class Generator:
    """How a schedule is made by name: which sizes its function takes beside `ranks` and `micros`."""

    make: Callable[..., Schedule]
    takes_slices: bool
    takes_warmup_per_hop: bool

    def __call__(self, ranks: int, micros: int, slices: int = 1, *, warmup_per_hop: int = 1) -> Schedule:
        """The schedule; ValueError for a size that this schedule does not have."""
        name = self.make.__name__
        if slices != 1 and not self.takes_slices:
            sliced = {"gpipe": "terapipe", "one_f_one_b": "seq_1f1b"}[name]
            raise ValueError(f"schedule {name!r} does not slice but {slices} slices were asked for; use {sliced!r}")
        if warmup_per_hop != 1 and not self.takes_warmup_per_hop:
            raise ValueError(f"schedule {name!r} has no warmup_per_hop (got {warmup_per_hop}); use 'seq_1f1b'")
        sizes = [ranks, micros] + [slices] * self.takes_slices
        return self.make(*sizes, **({"warmup_per_hop": warmup_per_hop} if self.takes_warmup_per_hop else {}))


GENERATORS: dict[str, Generator] = {
    "gpipe": Generator(gpipe, takes_slices=False, takes_warmup_per_hop=False),
    "one_f_one_b": Generator(one_f_one_b, takes_slices=False, takes_warmup_per_hop=False),
    "terapipe": Generator(terapipe, takes_slices=True, takes_warmup_per_hop=False),
    "seq_1f1b": Generator(seq_1f1b, takes_slices=True, takes_warmup_per_hop=True),
}


def _require_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"a schedule needs {name} of at least 1, got {value}")
