"""What an action and a transfer cost in time, as plain functions of the action and of the transfer.

The simulator takes any callable; these are the common ones. Whole numbers stay whole, so closed forms can be compared
exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terapipe.schedule.action import Action
from terapipe.schedule.transfers import Link, Transfer

# int, float or Fraction: the simulator only adds, compares and (for shares) divides them.
Seconds = Any
Costs = Callable[[Action], Seconds] | Mapping[Action, Seconds]


def costs_per_slice(
    *,
    forward: Seconds | Sequence[Seconds],
    backward: Seconds | Sequence[Seconds] = 0,
    input_grad: Seconds | Sequence[Seconds] = 0,
    weight_grad: Seconds | Sequence[Seconds] = 0,
) -> Callable[[Action], Seconds]:
    """The same cost on every stage and micro: for each kind one number, or one number for each slice."""
    table = {"F": forward, "B": backward, "I": input_grad, "W": weight_grad}

    def cost(action: Action) -> Seconds:
        value = table[action.kind]
        return value[action.slice] if isinstance(value, Sequence) else value

    return cost


def causal_costs(slices: Sequence[int], *, attention_share: float) -> Callable[[Action], float]:
    """A stage's costs when a causal sequence's forward takes 1: attention takes `attention_share`, linear ops the rest.

    Backwards take 2x (linear) and 2.5x (attention) of the forward. slices: token lengths.
    """
    tokens, start = sum(slices), 0
    linear, attention = [], []
    for length in slices:
        pairs = length * (2 * start + length)  # keys seen by all queries of the slice, times two
        linear.append((1 - attention_share) * length / tokens)
        attention.append(attention_share * pairs / tokens**2)
        start += length
    return costs_per_slice(
        forward=[a + b for a, b in zip(linear, attention, strict=True)],
        backward=[2 * a + 2.5 * b for a, b in zip(linear, attention, strict=True)],
    )


@dataclass(frozen=True)
class LinkCost:
    """A transfer arrives `latency_s` after it left, and keeps its link busy for `occupancy_s(transfer)`.

    bytes_of: a transfer's bytes, as a function, one number for each slice, or one for all.
    """

    latency_s: Seconds = 0
    bytes_per_s: float | None = None  # None: the bytes take no time
    bytes_of: Callable[[Transfer], float] | Sequence[float] | float = 0

    def occupancy_s(self, transfer: Transfer) -> Seconds:
        if self.bytes_per_s is None:
            return 0
        size = self.bytes_of
        if callable(size):
            size = size(transfer)
        elif isinstance(size, Sequence):
            size = size[transfer.slice]
        return size / self.bytes_per_s


LinkCosts = LinkCost | Mapping[Link, LinkCost]
