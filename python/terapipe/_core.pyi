"""terapipe._core: the planner's search and the schedule simulator in C++.

Buffers are contiguous; their formats stand in comments.
"""

from collections.abc import Sequence
from typing import Any

from typing_extensions import Buffer

class CostTable:
    """t(length, start) of every slice, ready for searches; immutable."""

    def __init__(self, values: Any) -> None: ...  # double buffer [units, units], [start, length - 1]
    @staticmethod
    def from_curve(base: Buffer, *, constant: float, per_start: float, per_start_length: float) -> CostTable: ...
    @property
    def units(self) -> int: ...
    def cost(self, length: int, start: int) -> float: ...

class MicroSlices:
    size: int
    count: int
    lengths: list[int]

class Slicing:
    micros: list[MicroSlices]
    sum: float
    largest: float
    cost: float
    evaluations: int

def slice_batch(kinds: Sequence[tuple[CostTable, int]], *, batch: int, fill: float) -> Slicing: ...
def equal_cost_slices(table: CostTable, *, count: int) -> Slicing: ...

class FlatSchedule:
    """A schedule as arrays, its needs and transfers resolved to indices of actions, rank after rank."""

    def __init__(
        self,
        *,
        stages: Buffer,  # int32
        kinds: bytes,
        micros: Buffer,  # int32
        slices: Buffer,  # int32
        rank_lengths: Sequence[int],
    ) -> None: ...
    @property
    def regular(self) -> bool:
        """Each action once, no stage missing or on two ranks, not too sparse: what `simulate_*` takes."""
    @property
    def ranks(self) -> int: ...
    @property
    def links(self) -> list[tuple[int, int, str]]: ...
    @property
    def link_of(self) -> list[int]: ...  # that an action puts on, or -1

class SlotColours:
    slot: list[int]  # of what each action puts, or -1
    counts: list[int]  # of each link

def sound(schedule: FlatSchedule) -> bool: ...
def linear_order(schedule: FlatSchedule, *, by_ticks: bool) -> list[int]: ...
def finished_before_puts(schedule: FlatSchedule) -> list[int]: ...  # empty if the ranks wait for each other
def colour_slots(schedule: FlatSchedule, finished: Sequence[int], *, resident: bool, at_most: int) -> SlotColours: ...

class PutGates:
    """Which action must have been left before each put."""

    def __init__(
        self, schedule: FlatSchedule, *, slot: Sequence[int], slots: Sequence[int], resident: bool
    ) -> None: ...

class WholeTimes:
    finished: bool
    makespan: int
    start: list[int]
    end: list[int]
    flight_start: list[int]
    flight_end: list[int]
    def live(
        self, schedule: FlatSchedule, rank: int, sizes: Buffer | None = None
    ) -> tuple[list[int], list[int] | list[float]]: ...
    def peak_live(self, schedule: FlatSchedule, rank: int, sizes: Buffer | None = None) -> int | float: ...

class FloatTimes:
    finished: bool
    makespan: float
    start: list[float]
    end: list[float]
    flight_start: list[float]
    flight_end: list[float]
    def live(
        self, schedule: FlatSchedule, rank: int, sizes: Buffer | None = None
    ) -> tuple[list[float], list[int] | list[float]]: ...
    def peak_live(self, schedule: FlatSchedule, rank: int, sizes: Buffer | None = None) -> int | float: ...

def simulate_whole(  # int64
    schedule: FlatSchedule,
    *,
    costs: Buffer,
    occupancy: Buffer | None = None,
    latency: Buffer | None = None,
    gates: PutGates | None = None,
) -> WholeTimes: ...
def simulate_float(  # double
    schedule: FlatSchedule,
    *,
    costs: Buffer,
    occupancy: Buffer | None = None,
    latency: Buffer | None = None,
    gates: PutGates | None = None,
) -> FloatTimes: ...
