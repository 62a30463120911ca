"""Predicts the times of a schedule from the costs of its actions and links.

The model is the engine's: a rank runs its list strictly in order; an action starts when the rank is free and its inputs
have arrived; a put starts when the action ends and, if its slot is still held, waits for it with the rank idle; a
transfer then occupies its link for its bytes' time and arrives a latency later, while the rank goes on. Nothing else
costs time. Runs in O(actions), in C++ where all numbers are whole or floats (a schedule and a slot assignment are
flattened once and kept), else in its Python twin, `simulate_reference`. The trap: without `slots` a put never waits,
which flatters schedules that run far ahead.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from terapipe.schedule.costs import Costs, LinkCosts, Seconds
from terapipe.schedule.flat import Flat, Kept, core, flat_schedule
from terapipe.schedule.prices import action_costs, link_price, mean_costs, occupancy
from terapipe.schedule.schedule import Schedule
from terapipe.schedule.simulate_reference import simulate_reference
from terapipe.schedule.simulation import Bubble, Flight, LiveSlices, Simulation
from terapipe.schedule.slots import SlotAssignment
from terapipe.schedule.transfers import Link, sent_by

__all__ = ["Bubble", "Flight", "LiveSlices", "Simulation", "simulate", "simulate_reference"]

WHOLE, FLOAT = "q", "d"  # formats in which the core counts
MOST_WHOLE, MOST_EXACT = 2**62, 2**53  # whole numbers fit an int64; whole numbers among floats are exact in a double


def simulate(
    schedule: Schedule,
    costs: Costs | Sequence[Seconds],
    *,
    links: LinkCosts | None = None,
    slots: SlotAssignment | None = None,
) -> Simulation:
    """Runs `schedule` on the clock.

    costs: seconds of each action: a callable, a mapping, or an array with one number for each of `schedule.actions()`.
    links: one cost for every link or one for each (free if None). slots: the slots that puts wait for (no put waits if
    None). ScheduleError when it deadlocks.
    """
    values = action_costs(schedule, costs)
    flat = flat_schedule(schedule)
    found = None if flat is None else _simulate_flat(schedule, flat, values, links, slots)
    return found if found is not None else simulate_reference(schedule, values, links=links, slots=slots)


_GATES = Kept()


def runs_to_its_end(schedule: Schedule, slots: SlotAssignment | None = None) -> bool:
    """Whether no rank waits for ever, whatever the times; False also where the C++ core cannot tell."""
    flat = flat_schedule(schedule)
    gates = None if flat is None or slots is None else _kept_gates(flat, slots)
    if flat is None or (slots is not None and gates is None):
        return False
    free = array(WHOLE, bytes(8 * len(flat.actions)))
    finished: bool = core.simulate_whole(flat.core, costs=free, gates=gates).finished
    return finished


def _kept_gates(flat: Flat, slots: SlotAssignment) -> Any:
    of, gates = _GATES.get(slots, lambda: (flat, _gates(flat, slots)))
    return gates if of is flat else _gates(flat, slots)  # the same slots with an equal schedule


def _gates(flat: Flat, slots: SlotAssignment) -> Any:
    """What puts wait for; None if the slots are not of this schedule."""
    puts: dict[Link, list[int]] = {link: [] for link in flat.links}
    for index, number in enumerate(flat.link_of):
        if number >= 0:
            puts[flat.links[number]].append(index)
    if {*puts} != {*slots.order}:
        return None
    slot_of = [0] * len(flat.actions)
    for link, indices in puts.items():
        transfers = slots.order[link]
        ahead = 1 if link.direction == "F" else -1
        sent = [(a.stage + ahead, a.micro, a.slice) for a in map(flat.actions.__getitem__, indices)]
        if sent != [(t.stage, t.micro, t.slice) for t in transfers]:
            return None
        if slots.slots(link) > 0:
            for index, transfer in zip(indices, transfers, strict=True):
                slot_of[index] = slots.slot(transfer)
    counts = [slots.slots(link) for link in flat.links]
    return core.PutGates(flat.core, slot=slot_of, slots=counts, resident=slots.resident)


def _simulate_flat(
    schedule: Schedule, flat: Flat, values: list[Seconds], links: LinkCosts | None, slots: SlotAssignment | None
) -> Simulation | None:
    """None if the core cannot: numbers that are neither int nor float, slots of another schedule, a deadlock."""
    gates = None if slots is None else _kept_gates(flat, slots)
    if slots is not None and gates is None:
        return None
    costs = _numbers(values)
    free = None if costs is None else _run(flat, costs)
    if costs is None or free is None:
        return None
    run: _CoreRun | None = free
    if links is not None or gates is not None:
        run = _run(flat, costs, None if links is None else _link_numbers(schedule, flat, links), gates)
    mean = _mean_makespan(flat, values, free)
    if run is None or mean is None:
        return None
    times, even = run.times, (free.times.makespan, mean)
    return Simulation(schedule, times.start, times.end, times.flight_start, times.flight_end, even, run)


class _Numbers(NamedTuple):
    """A list of numbers that the core can add up: in which format, and no whole number among them beyond `most`."""

    values: Sequence[Seconds]
    format: str
    most: int


def _numbers(values: Sequence[Seconds]) -> _Numbers | None:
    """None where a number is neither int nor float (a fraction, say)."""
    types = {*map(type, values)}
    if not all(issubclass(kind, (int, float)) for kind in types):
        return None
    if not any(issubclass(kind, float) for kind in types):
        return _Numbers(values, WHOLE, max(map(abs, values), default=0))
    if not any(issubclass(kind, int) for kind in types):
        return _Numbers(values, FLOAT, 0)
    return _Numbers(values, FLOAT, max(abs(value) for value in values if isinstance(value, int)))


class _LinkNumbers(NamedTuple):
    busy: _Numbers | None  # of each action's link
    latency: _Numbers | None  # of each link


def _link_numbers(schedule: Schedule, flat: Flat, links: LinkCosts) -> _LinkNumbers:
    prices = [link_price(links, link) for link in flat.links]
    known: list[dict[int, Seconds]] = [{} for _ in prices]  # by slice: all that a size may depend on, if no function
    busy: list[Seconds] = [0] * len(flat.actions)
    for index, link in enumerate(flat.link_of):
        if link < 0:
            continue
        action = flat.actions[index]
        value = known[link].get(action.slice)
        if value is None:
            transfer = sent_by(schedule, action)
            assert transfer is not None
            value = occupancy(prices[link], transfer)
            if not callable(prices[link].bytes_of):
                known[link][action.slice] = value
        busy[index] = value
    return _LinkNumbers(_numbers(busy), _numbers([price.latency_s for price in prices]))


class _CoreRun(NamedTuple):
    """A run of the core; counts what its ranks hold."""

    core: Any
    times: Any

    def live(self, rank: int, sizes: Sequence[Seconds] | None) -> tuple[LiveSlices, ...] | None:
        found = self._count(self.times.live, rank, sizes)
        return None if found is None else (LiveSlices(0, 0), *map(LiveSlices, *found))

    def peak_live(self, rank: int, sizes: Sequence[Seconds] | None) -> Seconds | None:
        return self._count(self.times.peak_live, rank, sizes)

    def peaks(self, sizes: Sequence[Seconds]) -> tuple[Seconds, ...] | None:
        numbers = _numbers(sizes)
        format = None if numbers is None else _common_format(len(sizes), numbers)
        if format is None:
            return None
        shared = array(format, sizes)
        return tuple(self.times.peak_live(self.core, rank, shared) for rank in range(self.core.ranks))

    def _count(self, count: Callable[..., Any], rank: int, sizes: Sequence[Seconds] | None) -> Any:
        if sizes is None:
            return count(self.core, rank)
        numbers = _numbers(sizes)
        format = None if numbers is None else _common_format(len(sizes), numbers)
        return None if format is None else count(self.core, rank, array(format, sizes))


def _run(flat: Flat, costs: _Numbers, links: _LinkNumbers | None = None, gates: Any = None) -> _CoreRun | None:
    busy, latency = links or (None, None)
    if links is not None and (busy is None or latency is None):
        return None
    format = _common_format(len(flat.actions), *(numbers for numbers in (costs, busy, latency) if numbers is not None))
    if format is None:
        return None
    run = core.simulate_whole if format == WHOLE else core.simulate_float
    times = run(
        flat.core,
        costs=array(format, costs.values),
        occupancy=None if busy is None else array(format, busy.values),
        latency=None if latency is None else array(format, latency.values),
        gates=gates,
    )
    return _CoreRun(flat.core, times) if times.finished else None


def _common_format(actions: int, *lists: _Numbers) -> str | None:
    """In which format the core gets what Python would, or None. No time exceeds `most` of each list on every action."""
    format = FLOAT if any(numbers.format == FLOAT for numbers in lists) else WHOLE
    whole = actions * sum(numbers.most for numbers in lists)
    return format if whole < (MOST_EXACT if format == FLOAT else MOST_WHOLE) else None


def _mean_makespan(flat: Flat, values: list[Seconds], free: _CoreRun) -> Seconds | None:
    """With free links and every action at the mean of its kind; the mean of whole numbers stays exact."""
    means = mean_costs(flat.kinds, values)
    if all(mean == value for mean, value in zip(map(means.__getitem__, flat.kinds), values, strict=True)):
        return free.times.makespan
    scale = math.lcm(*(mean.denominator for mean in means.values() if isinstance(mean, Fraction)))
    if scale > 1 and any(isinstance(mean, float) for mean in means.values()):
        return None
    scaled = {kind: int(mean * scale) if isinstance(mean, int | Fraction) else mean for kind, mean in means.items()}
    distinct = _numbers(list(scaled.values()))
    assert distinct is not None
    run = _run(flat, distinct._replace(values=[scaled[kind] for kind in flat.kinds]))
    if run is None:
        return None
    return Fraction(run.times.makespan, scale) if scale > 1 else run.times.makespan
