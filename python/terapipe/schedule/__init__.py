"""Schedules as data: actions, plans, generators, checks, the simulator and traces. Nothing here imports torch."""

from terapipe.schedule.action import KIND_NAMES, KINDS, Action, B, F, I, W
from terapipe.schedule.check import ScheduleError, check
from terapipe.schedule.costs import LinkCost, causal_costs, costs_per_slice
from terapipe.schedule.generators import (
    GENERATORS,
    gpipe,
    interleaved,
    one_f_one_b,
    seq_1f1b,
    seq_interleaved,
    seq_zero_bubble,
    terapipe,
)
from terapipe.schedule.orders import clock_order, demand_order
from terapipe.schedule.plan import Plan, equal_slices, make_plan, split_layers
from terapipe.schedule.schedule import Schedule
from terapipe.schedule.simulate import Bubble, Simulation, simulate
from terapipe.schedule.slots import SlotAssignment, assign_slots, rendezvous, ring_slots
from terapipe.schedule.trace import TraceEvent, trace
from terapipe.schedule.transfers import (
    Link,
    Transfer,
    link_transfers,
    links,
    sends,
    sent_by,
    taken_by,
    takes,
)

__all__ = [
    "GENERATORS",
    "KINDS",
    "KIND_NAMES",
    "Action",
    "B",
    "Bubble",
    "F",
    "I",
    "Link",
    "LinkCost",
    "Plan",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "SlotAssignment",
    "TraceEvent",
    "Transfer",
    "W",
    "assign_slots",
    "causal_costs",
    "check",
    "clock_order",
    "costs_per_slice",
    "demand_order",
    "equal_slices",
    "gpipe",
    "interleaved",
    "link_transfers",
    "links",
    "make_plan",
    "one_f_one_b",
    "rendezvous",
    "ring_slots",
    "sends",
    "sent_by",
    "seq_1f1b",
    "seq_interleaved",
    "seq_zero_bubble",
    "simulate",
    "split_layers",
    "taken_by",
    "takes",
    "terapipe",
    "trace",
]
