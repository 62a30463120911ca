"""The slow oracle of schedules: steps ranks one action at a time; its sets and queues are what the engine keeps.

It is written from the engine's rules alone and shares no code with `terapipe.schedule` beyond the names of things.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from terapipe.schedule import Action, Link, Schedule, SlotAssignment, Transfer


@dataclass
class Run:
    """What came of a run: `problem` is None when every action ran. `most_held`: most slots ever full, by link."""

    problem: str | None = None
    most_held: dict[Link, int] = field(default_factory=dict)
    ran: list[Action] = field(default_factory=list)


class Machine:
    """All ranks of a schedule. `step(rank)` does the next half action of a rank: first compute, then put and free."""

    def __init__(
        self, schedule: Schedule, slots: SlotAssignment | None, *, stages: int, micros: int, slices: int
    ) -> None:
        self.orders, self.slots = schedule.orders, slots
        self.stages, self.micros, self.slices = stages, micros, slices
        self.resident = slots.resident if slots else True
        self.rank_of = {action.stage: rank for rank, order in enumerate(self.orders) for action in order}
        self.split = {a[:1] + a[2:] for order in self.orders for a in order if a.kind in "IW"}
        self.at = [0] * len(self.orders)
        self.computed = [False] * len(self.orders)
        self.queues: dict[Link, deque[Transfer]] = {}
        self.full: dict[Link, dict[object, Transfer]] = {}
        self.cache_length: dict[tuple[int, int], int] = {}  # (stage, micro) -> slices whose forward has run
        self.backward_left: dict[int, tuple[int, int]] = {}  # stage -> (micro, slices left) of the open accumulator
        self.outputs: set[tuple[str, int, int, int]] = set()  # hand-offs between stages of the same rank
        self.done: set[Action] = set()
        self.run = Run()

    def transfer(self, action: Action, step: int) -> Transfer | None:
        """The hand-off into (step < 0 looks back along the flow) or out of an action, if it crosses ranks."""
        if action.kind == "W":
            return None
        way = 1 if action.kind == "F" else -1
        source, target = (action.stage, action.stage + way) if step > 0 else (action.stage - way, action.stage)
        if (
            not (0 <= source < self.stages and 0 <= target < self.stages)
            or self.rank_of[source] == self.rank_of[target]
        ):
            return None
        link = Link(self.rank_of[source], self.rank_of[target], "F" if way > 0 else "B")
        return Transfer(link, action.micro, action.slice, target)

    def fail(self, problem: str) -> bool:
        self.run.problem = self.run.problem or problem
        return False

    def can_compute(self, action: Action) -> bool:
        stage, kind, micro, piece = action
        incoming = self.transfer(action, -1)
        if incoming is not None:
            queue = self.queues.get(incoming.link)
            if not queue:
                return False
            if queue[0] != incoming:
                return self.fail(f"link order: {queue[0]} before {incoming}")
        elif kind == "F" and stage > 0:
            return ("F", stage - 1, micro, piece) in self.outputs
        elif kind in "BI" and stage < self.stages - 1:
            return ("B", stage + 1, micro, piece) in self.outputs
        return True

    def compute(self, action: Action) -> bool:
        stage, kind, micro, piece = action
        if action in self.done:
            return self.fail(f"{action} twice")
        if kind == "F":
            if self.cache_length.get((stage, micro), 0) != piece:
                return self.fail(f"{action} finds {self.cache_length.get((stage, micro), 0)} slices in its cache")
            self.cache_length[stage, micro] = piece + 1
        elif kind == "W":
            if Action(stage, "I", micro, piece) not in self.done:
                return self.fail(f"{action} before its I")
        else:
            other = Action(stage, "I" if kind == "B" else "B", micro, piece)
            open_micro, left = self.backward_left.get(stage, (micro, 0))
            left = left or self.slices
            if Action(stage, "F", micro, piece) not in self.done or other in self.done:
                return self.fail(f"{action} without its forward, or a second backward")
            if (open_micro != micro and left != self.slices) or piece != left - 1:
                return self.fail(f"{action} while the accumulator waits for slice {left - 1} of micro {open_micro}")
            self.backward_left[stage] = (micro, left - 1)
        incoming = self.transfer(action, -1)
        if incoming is not None:
            self.queues[incoming.link].popleft()
        self.outputs.add((("F" if kind == "F" else "B") if kind != "W" else "W", stage, micro, piece))
        self.done.add(action)
        self.run.ran.append(action)
        return True

    def put(self, action: Action) -> bool:
        """Hand the output on and free the slots; False while no slot is free or nobody has come to meet it."""
        outgoing = self.transfer(action, 1)
        if outgoing is not None:
            link = outgoing.link
            full = self.full.setdefault(link, {})
            if self.slots is not None and self.slots.slots(link) == 0:
                rank = link.destination_rank
                if self.at[rank] == len(self.orders[rank]) or self.computed[rank]:
                    return False
                if self.transfer(self.orders[rank][self.at[rank]], -1) != outgoing:
                    return False
            else:
                slot: object = self.slots.slot(outgoing) if self.slots is not None else outgoing
                if slot in full:
                    return False
                full[slot] = outgoing
                self.run.most_held[link] = max(self.run.most_held.get(link, 0), len(full))
            self.queues.setdefault(link, deque()).append(outgoing)
        self.free(action)
        return True

    def free(self, action: Action) -> None:
        stage, kind, micro, piece = action
        last = "W" if (stage, micro, piece) in self.split else "B"
        for link, full in self.full.items():
            for slot, held in list(full.items()):
                if (held.stage, held.micro, held.slice) != (stage, micro, piece):
                    continue
                taken = kind == ("F" if link.direction == "F" else "B") or (link.direction == "B" and kind == "I")
                if kind == last if self.resident else taken:
                    del full[slot]

    def step(self, rank: int) -> bool:
        """Whether the rank could do something."""
        if self.run.problem or self.at[rank] == len(self.orders[rank]):
            return False
        action = self.orders[rank][self.at[rank]]
        if not self.computed[rank]:
            if not (self.can_compute(action) and self.compute(action)):
                return False
            self.computed[rank] = True
            return True
        if not self.put(action):
            return False
        self.computed[rank] = False
        self.at[rank] += 1
        return True

    def finish(self) -> Run:
        """Run to the end, or until no rank can do anything. The order of turns does not matter: nothing un-happens."""
        while any([self.step(rank) for rank in range(len(self.orders))]):
            pass
        if self.run.problem is None:
            if any(at < len(order) for at, order in zip(self.at, self.orders, strict=True)):
                self.run.problem = "deadlock"
            for stage in range(self.stages):
                for micro in range(self.micros):
                    for piece in range(self.slices):
                        has = {a.kind for a in self.done if a[:1] + a[2:] == (stage, micro, piece)}
                        if has not in ({"F", "B"}, {"F", "I", "W"}):
                            self.fail(f"stage {stage} micro {micro} slice {piece} ran only {has}")
        return self.run


@pytest.fixture(scope="session")
def interpret():
    """interpret(schedule, slots=None, **sizes) -> Run; sizes default to the schedule's own, slots to unlimited ones."""

    def run(schedule: Schedule, slots: SlotAssignment | None = None, **sizes: int) -> Run:
        own = {"stages": schedule.stages, "micros": schedule.micros, "slices": schedule.slices}
        ranks = [{action.stage for action in order} for order in schedule.orders]
        if sum(map(len, ranks)) != len(set().union(*ranks)):
            return Run("a stage on two ranks")
        return Machine(schedule, slots, **{**own, **sizes}).finish()

    return run


@pytest.fixture(scope="session")
def machine():
    return Machine


@pytest.fixture(scope="session")
def split_backward():
    """split_backward(schedule, lag): every B becomes I, and its W comes `lag` actions later in the rank's list."""

    def split(schedule: Schedule, lag: int) -> Schedule:
        orders = []
        for order in schedule.orders:
            out: list[Action] = []
            waiting: deque[tuple[int, Action]] = deque()
            for index, action in enumerate(order):
                while waiting and waiting[0][0] <= index:
                    out.append(waiting.popleft()[1])
                out.append(action if action.kind == "F" else action._replace(kind="I"))
                if action.kind == "B":
                    waiting.append((index + 1 + lag, action._replace(kind="W")))
            orders.append(out + [action for _, action in waiting])
        return Schedule(orders)

    return split


@pytest.fixture(scope="session")
def looped():
    """looped(ranks, chunks, micros, slices): all forwards then all backwards, stage s on rank s % ranks."""

    def make(ranks: int, chunks: int, micros: int, slices: int) -> Schedule:
        units = [(micro, piece) for micro in range(micros) for piece in range(slices)]
        return Schedule(
            [
                [Action(c * ranks + rank, "F", *u) for c in range(chunks) for u in units]
                + [Action(c * ranks + rank, "B", *u) for c in reversed(range(chunks)) for u in reversed(units)]
                for rank in range(ranks)
            ]
        )

    return make
