"""A schedule is data: for every rank, the tuple of actions it runs strictly in order.

Text form, one line a rank: `0: 0F0.0 0F0.1 0B0.1 0B0.0`. The CSV form is the `compute_only` format of
torch.distributed.pipelining (one row a rank, cells like `0F3`), which has no slices: a slice is folded into the
microbatch index as `micro * slices + slice`, and reading it back needs the number of slices. The trap: a schedule
knows only what its actions say, so one that lacks the last micro altogether is a smaller schedule, not a broken one.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from terapipe.schedule.action import KINDS, Action

_CSV_CELL = re.compile(r"(\d+)([A-Z_]+)(\d+)", re.ASCII)


class Place(NamedTuple):
    """Where an action stands: the rank and the position in that rank's list, from 0."""

    rank: int
    position: int


@dataclass(frozen=True, init=False)
class Schedule:
    """`schedule[rank]` is the tuple of actions of that rank. Nothing is checked here; see `check`."""

    orders: tuple[tuple[Action, ...], ...]

    def __init__(self, orders: Mapping[int, Iterable[Action]] | Sequence[Iterable[Action]]) -> None:
        if isinstance(orders, Mapping):
            if sorted(orders) != list(range(len(orders))):
                raise ValueError(f"a schedule needs every rank from 0 to {len(orders) - 1}, got {sorted(orders)}")
            orders = [orders[rank] for rank in range(len(orders))]
        object.__setattr__(self, "orders", tuple(tuple(order) for order in orders))

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        return self.orders[rank]

    def actions(self) -> Iterator[Action]:
        """Every action, rank by rank."""
        for order in self.orders:
            yield from order

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @cached_property
    def stages(self) -> int:
        return 1 + max((action.stage for action in self.actions()), default=-1)

    @cached_property
    def micros(self) -> int:
        return 1 + max((action.micro for action in self.actions()), default=-1)

    @cached_property
    def slices(self) -> int:
        return 1 + max((action.slice for action in self.actions()), default=-1)

    @cached_property
    def places(self) -> Mapping[Action, Place]:
        """Where each action stands (the first place of one that is listed twice)."""
        places: dict[Action, Place] = {}
        for rank, order in enumerate(self.orders):
            for index, action in enumerate(order):
                places.setdefault(action, Place(rank, index))
        return places

    @cached_property
    def _stage_ranks(self) -> Mapping[int, int]:
        ranks: dict[int, int] = {}
        for rank, order in enumerate(self.orders):
            for action in order:
                ranks.setdefault(action.stage, rank)
        return ranks

    def stage_rank(self, stage: int) -> int:
        """The rank that runs `stage`."""
        if stage not in self._stage_ranks:
            raise ValueError(f"no rank runs stage {stage}; this schedule has stages {sorted(self._stage_ranks)}")
        return self._stage_ranks[stage]

    def rank_stages(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` runs, ascending."""
        return tuple(sorted({action.stage for action in self.orders[rank]}))

    def gradient_action(self, stage: int, micro: int, slice: int) -> Action:
        """The action that yields the gradient of the stage's input: I where the backward is split, else B."""
        split = Action(stage, "I", micro, slice)
        return split if split in self.places else Action(stage, "B", micro, slice)

    def last_backward(self, stage: int, micro: int, slice: int) -> Action:
        """The action after which a slice holds no activations on a stage: W where the backward is split, else B."""
        split = Action(stage, "W", micro, slice)
        return split if split in self.places else Action(stage, "B", micro, slice)

    def to_text(self) -> str:
        return "".join(f"{rank}: {' '.join(map(str, order))}".rstrip() + "\n" for rank, order in enumerate(self.orders))

    __str__ = to_text

    @staticmethod
    def from_text(text: str) -> Schedule:
        """Reads `to_text`'s form; empty lines and `#` comments are skipped."""
        orders: dict[int, list[Action]] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            line = line.partition("#")[0].strip()
            if not line:
                continue
            head, colon, cells = line.partition(":")
            if not colon or not head.strip().isdecimal():
                raise ValueError(f"line {number} of the schedule must begin with its rank, like '0: 0F0.0': {line!r}")
            if int(head) in orders:
                raise ValueError(f"line {number} of the schedule lists rank {int(head)} a second time")
            try:
                orders[int(head)] = [Action.parse(cell) for cell in cells.split()]
            except ValueError as error:
                raise ValueError(f"line {number} of the schedule: {error}") from None
        return Schedule(orders)

    def to_csv(self) -> str:
        """The `compute_only` CSV of torch.distributed.pipelining, slices folded into the microbatch index."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        for order in self.orders:
            writer.writerow([f"{a.stage}{a.kind}{a.micro * self.slices + a.slice}" for a in order])
        return out.getvalue()

    @staticmethod
    def from_csv(text: str, *, slices: int = 1) -> Schedule:
        """Reads `to_csv`'s form. Empty cells (bubbles) are skipped; ValueError for communication actions."""
        if slices < 1:
            raise ValueError(f"slices must be at least 1, got {slices}")
        orders: list[list[Action]] = []
        for number, row in enumerate(csv.reader(io.StringIO(text, newline="")), start=1):
            order: list[Action] = []
            for cell in row:
                if not cell.strip():
                    continue
                match = _CSV_CELL.fullmatch(cell.strip())
                if match is None or match[2] not in KINDS:
                    raise ValueError(
                        f"row {number} holds {cell.strip()!r}; only compute actions {', '.join(KINDS)} like 0F3 can be "
                        f"read (export the schedule in the compute_only format)"
                    )
                index = int(match[3])
                order.append(Action(int(match[1]), match[2], index // slices, index % slices))
            orders.append(order)
        return Schedule(orders)
