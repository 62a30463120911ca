"""Reads the costs that users give (callables, mappings, arrays, links) as numbers, and refuses those that are no times.

Shared by the simulator and its twin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Rational

from terapipe.schedule.action import Action
from terapipe.schedule.costs import Costs, LinkCost, LinkCosts, Seconds
from terapipe.schedule.schedule import Schedule
from terapipe.schedule.transfers import Link, Transfer

INFINITY = float("inf")


def action_costs(schedule: Schedule, costs: Costs | Sequence[Seconds]) -> list[Seconds]:
    """The cost of each of `schedule.actions()`."""
    actions = tuple(schedule.actions())
    if callable(costs) or isinstance(costs, Mapping):
        get = costs if callable(costs) else costs.__getitem__
        action = None
        try:
            values = [get(action) for action in actions]
        except (KeyError, IndexError):
            raise ValueError(f"the costs have no entry for {_first_without(actions, get)}") from None
    else:
        tolist = getattr(costs, "tolist", None)  # numpy's or array's: numbers of Python
        values = list(costs) if tolist is None else tolist()
        if len(values) != len(actions):
            raise ValueError(f"the costs are {len(values)} numbers, but the schedule has {len(actions)} actions")
    if not all(0 <= value < INFINITY for value in values):
        action, value = next(pair for pair in zip(actions, values, strict=True) if not 0 <= pair[1] < INFINITY)
        raise ValueError(f"the cost of {action} must be a finite number of seconds from 0 up, got {value!r}")
    return values


def _first_without(actions: Sequence[Action], get: Costs) -> Action:
    for action in actions:
        try:
            get(action)  # type: ignore[operator]
        except (KeyError, IndexError):
            return action
    raise AssertionError("the costs changed between two calls")


def mean_costs(kinds: Sequence[str], values: Sequence[Seconds]) -> dict[str, Seconds]:
    """The mean cost of each kind of action."""
    means: dict[str, Seconds] = {}
    for kind in dict.fromkeys(kinds):
        costs = [value for value, its in zip(values, kinds, strict=True) if its == kind]
        total = sum(costs)
        # Equal costs have that cost as their mean, without a rounding error that would pass for imbalance.
        equal = all(value == costs[0] for value in costs)
        exact = isinstance(total, Rational)
        means[kind] = costs[0] if equal else Fraction(total, len(costs)) if exact else total / len(costs)
    return means


def link_price(links: LinkCosts | None, link: Link) -> LinkCost:
    """What `link` costs; ValueError if it has no entry or a latency or bandwidth that is none."""
    if isinstance(links, Mapping) and link not in links:
        raise ValueError(f"the link costs have no entry for {link}")
    price = links[link] if isinstance(links, Mapping) else links or LinkCost()
    if not 0 <= price.latency_s < INFINITY:
        raise ValueError(f"the latency of {link} must be a finite number of seconds from 0 up, got {price.latency_s!r}")
    if price.bytes_per_s is not None and not price.bytes_per_s > 0:
        raise ValueError(f"the bandwidth of {link} must be above 0 bytes a second, got {price.bytes_per_s!r}")
    return price


def occupancy(price: LinkCost, transfer: Transfer) -> Seconds:
    """How long `transfer` keeps its link busy."""
    value = price.occupancy_s(transfer)
    if not 0 <= value < INFINITY:
        raise ValueError(f"{transfer} must keep its link busy for a finite time from 0 up, got {value!r} s")
    return value
