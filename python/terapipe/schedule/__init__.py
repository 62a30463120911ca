"""Schedules as data: actions, plans, generators, checks, the simulator and traces. Nothing here imports torch."""

from terapipe.schedule.action import Action, B, F, I, W
from terapipe.schedule.check import ScheduleError, check
from terapipe.schedule.generators import GENERATORS, gpipe, one_f_one_b, seq_1f1b, terapipe
from terapipe.schedule.plan import Plan, equal_slices, make_plan, split_layers
from terapipe.schedule.schedule import Schedule
from terapipe.schedule.transfers import (
    Link,
    SlotAssignment,
    Transfer,
    assign_slots,
    link_transfers,
    links,
    sends,
    sent_by,
    taken_by,
    takes,
)

__all__ = [
    "GENERATORS",
    "Action",
    "B",
    "F",
    "I",
    "Link",
    "Plan",
    "Schedule",
    "ScheduleError",
    "SlotAssignment",
    "Transfer",
    "W",
    "assign_slots",
    "check",
    "equal_slices",
    "gpipe",
    "link_transfers",
    "links",
    "make_plan",
    "one_f_one_b",
    "sends",
    "sent_by",
    "seq_1f1b",
    "split_layers",
    "taken_by",
    "takes",
    "terapipe",
]
