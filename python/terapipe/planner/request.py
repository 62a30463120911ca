"""What the planner is asked for, and what it says when there is no such plan.

The trap: a remedy that does not help is worse than none, so other numbers of ranks are named only where ranks were the
reason and everything else divides.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from terapipe.planner.costs import CostModel
from terapipe.schedule import GENERATORS

MOST_UNITS, LEAST_UNITS = 256, 64  # of a sequence where none were asked for
MOST_GIVEN_UNITS = 8192  # 15 s and 0.4 GB; twice as many take four times both
BUDGET_S = 6.0  # of simulating
MOST_REASONS = 4

CostsOf = Callable[[int], CostModel]
"""The costs at a tensor degree; ValueError for one that cannot be."""


@dataclass(frozen=True)
class Request:
    """What is asked for. ranks: devices in all. batch: sequences of a step, over all replicas. memory_bytes: what one
    device has. unit: tokens by which slices are cut (None: at most 256 units). tensor: degrees to try."""

    ranks: int
    tokens: int
    batch: int
    memory_bytes: float
    unit: int | None = None
    tensor: tuple[int, ...] = (1,)
    schedules: tuple[str, ...] = tuple(GENERATORS)
    chunks: tuple[int, ...] = (2, 4)
    recompute: tuple[bool, ...] = (False, True)
    data: tuple[int, ...] | None = None  # None: any
    micro_sizes: tuple[int, ...] | None = None
    slices: tuple[int, ...] | None = None  # these lengths alone
    link: str | None = None
    budget_s: float = BUDGET_S

    def sizes(self, costs: CostModel) -> list[int]:
        """The micro sizes asked for that there are costs for."""
        return [size for size in costs.micro_sizes if self.micro_sizes is None or size in self.micro_sizes]


def check_unit(tokens: int, unit: int | None) -> int:
    """The unit of slices. None: the smallest divisor that leaves at most 256 units, or where no divisor leaves 64 of
    them, a power of two that leaves 128 or more: the last unit is shorter then. ValueError for a given one that does
    not divide, or leaves too many."""
    least = math.ceil(tokens / MOST_UNITS)
    divisors = sorted({n for k in range(1, math.isqrt(tokens) + 1) if tokens % k == 0 for n in (k, tokens // k)})
    if unit is None:
        divisor = next(n for n in divisors if n >= least)
        return divisor if tokens // divisor >= min(tokens, LEAST_UNITS) else 1 << (least - 1).bit_length()
    if unit < 1 or tokens % unit:
        near = sorted(sorted(divisors, key=lambda n: abs(n - unit))[:2])
        lengths = [n * unit for n in (tokens // unit, tokens // unit + 1) if n > 0] if unit > 0 else []
        raise ValueError(
            f"a unit of {unit} tokens does not divide a sequence of {tokens}; use a unit such as "
            f"{listed(near)}" + (f", or sequences of {' or '.join(map(str, lengths))} tokens." if lengths else ".")
        )
    if tokens // unit > MOST_GIVEN_UNITS:
        raise ValueError(
            f"a unit of {unit} cuts {tokens} tokens into {tokens // unit} units, more than {MOST_GIVEN_UNITS}; use a "
            f"unit of {next(n for n in divisors if tokens // n <= MOST_GIVEN_UNITS)} or more."
        )
    return unit


def in_tokens(lengths: Iterable[int], unit: int, tokens: int) -> tuple[int, ...]:
    """Slices of whole units as token lengths that sum to the sequence, whose last unit may be shorter."""
    whole = [length * unit for length in lengths]
    return (*whole[:-1], tokens - sum(whole[:-1]))


@dataclass
class Reasons:
    """Why there is no candidate: `tensor` of degrees that the model does not have, `ranks` of numbers of ranks that
    cannot be cut, `others` of layouts for which ranks were no obstacle."""

    tensor: list[str] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def text(self, request: Request, costs_of: CostsOf) -> str:
        """The refusal, with the remedies that would help."""
        asked, batch = counted(request.ranks, "rank"), request.batch
        reasons = list(dict.fromkeys((*self.tensor, *(self.others or self.ranks))))
        more = len(reasons) - MOST_REASONS
        why = "; ".join(reasons[:MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")
        if self.others or not self.ranks:
            return f"there is no plan for {asked} and a batch of {batch}: {why}."
        near = sorted(_usable_ranks(request, costs_of), key=lambda ranks: abs(ranks - request.ranks))[:4]
        hint = f"; {listed(sorted(near))} ranks can be used" if near else ""
        return (
            f"{asked} cannot be cut into pipe x data x tensor for a batch of {batch}: {why}{hint}; or change the batch."
        )


def _usable_ranks(request: Request, costs_of: CostsOf) -> Iterator[int]:
    """Other numbers of ranks near those asked for, for which everything else would divide."""
    known = []
    for tensor in request.tensor:
        with contextlib.suppress(ValueError):
            known.append(costs_of(tensor))
    shares = [data for data in request.data or range(1, request.batch + 1) if request.batch % data == 0]
    for ranks in range(max(1, request.ranks - 64), request.ranks + 65):
        if ranks != request.ranks and any(
            ranks % (costs.tensor * data) == 0
            and ranks // costs.tensor // data <= costs.num_layers
            and any(request.batch // data % size == 0 for size in request.sizes(costs))
            for costs in known
            for data in shares
        ):
            yield ranks


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(values: Iterable[object]) -> str:
    """`1, 2, 3`."""
    return ", ".join(map(str, values))
