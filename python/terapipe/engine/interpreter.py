"""Runs action lists: for each action take its input from its link, run the stage, hand the output on.

`RankProgram` is one rank: its stages, its links' ends and its place in the list.  With links that block (`shm`,
`dist`), `run_to_end` is the whole interpreter; with local links one thread steps several programs, running whichever
has its input and a free slot (`run_together`), so the plan's slots are honoured in both.  Every action is timed;
waiting for an input is a row of its own in the timeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.profiler import record_function

from terapipe.engine.batch import Batch
from terapipe.engine.stage import Stage, write_count
from terapipe.layer import Norm
from terapipe.schedule import Action, Schedule, Transfer, sent_by, taken_by
from terapipe.schedule import Link as PlannedLink
from tpkernels.fused_reference import NormValues
from tpkernels.links import Key, Link, LocalLink


@dataclass(frozen=True)
class Span:
    """One stretch of a rank's time in seconds of `time.perf_counter`; `kind` "compute" or "wait"."""

    rank: int
    action: Action
    kind: str
    start: float
    end: float


class ActionError(Exception):
    """Wraps what an action raised, so that the pipeline can say where."""

    def __init__(self, rank: int, action: Action, cause: BaseException) -> None:
        super().__init__(f"rank {rank}, action {action}: {cause}")
        self.rank, self.action, self.cause = rank, action, cause


def key_of(transfer: Transfer) -> Key:
    return (transfer.stage, transfer.micro, transfer.slice)


@dataclass(frozen=True)
class _Hop:
    """A transfer at one of its ends."""

    transfer: Transfer
    link: Link
    key: Key


@dataclass(frozen=True)
class _Hops:
    """What an action does on links: takes its input, puts its output, and holds slots that its backward frees."""

    takes: _Hop | None
    puts: _Hop | None
    holds: tuple[_Hop, ...]
    norm: Norm | None  # the first op behind the input, which waits for its rows itself


class _Put:
    """Hands a stage's last two summands on as their sum. total, posted_at: what went, and when."""

    def __init__(self, hop: _Hop | None) -> None:
        self._hop, self.posted_at = hop, 0.0
        self.total: Tensor | None = None
        self._version = 0

    def sum(self, x: Tensor, residual: Tensor) -> Tensor:
        assert self._hop is not None
        if self.total is not None:  # a layer under activation checkpointing comes by again in its backward
            return x + residual
        link = self._hop.link
        self.total = link.put_sum(self._hop.key, x, residual)
        self._version = write_count(self.total)
        self.posted_at = link.posted_at
        return self.total

    def check(self, output: Tensor, stage: int) -> None:
        """ValueError unless the stage returned the sum, as it went."""
        assert self.total is not None
        same = output.data_ptr() == self.total.data_ptr()
        if same and write_count(self.total) == self._version:
            return
        done = "wrote in place to" if same else "returned something else than"
        raise ValueError(
            f"the last layer of stage {stage} {done} the sum that `out` gave it, which the next stage already reads; "
            "let it return that sum as it is, or set its adds_out to False."
        )


class RankProgram:
    """One rank's list of actions with all it needs to run them."""

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        links: Mapping[PlannedLink, Link],
        *,
        at: Callable[[str], None] = lambda position: None,
    ) -> None:
        self.rank, self.schedule, self.stages, self.links = rank, schedule, dict(stages), dict(links)
        self.spans: list[Span] = []
        self.sent: dict[Transfer, tuple[float, float]] = {}  # the action's end, the put's end
        self.taken: dict[Transfer, tuple[float, float]] = {}  # the wait's begin and end
        self._at = at
        self._actions: Sequence[Action] = ()
        self._next = 0
        self._micros: Sequence[Batch] = ()
        self._scale: Tensor | None = None
        self._staying: dict[Key, Tensor] = {}  # outputs for another stage of this rank
        self._hops = {action: self._hops_of(action) for action in schedule[rank]}

    def begin(self, micros: Sequence[Batch], scale: Tensor | None, *, actions: Sequence[Action]) -> None:
        """Set the step up: `micros` the batch cut by micro, `scale` one over the number of targets, None when
        evaluating."""
        self._actions, self._next, self._micros, self._scale = actions, 0, micros, scale
        self.spans = []
        for left in (self.sent, self.taken, self._staying):
            left.clear()
        for stage in self.stages.values():
            stage.begin(evaluating=scale is None)

    @property
    def finished(self) -> bool:
        return self._next == len(self._actions)

    def runnable(self) -> bool:
        """Whether the next action has its input and a free slot for its output (local links only; they never block)."""
        if self.finished:
            return False
        hops = self._hops[self._actions[self._next]]
        if hops.takes is not None:
            assert isinstance(hops.takes.link, LocalLink)
            if not hops.takes.link.ready(hops.takes.key):
                return False
        if hops.puts is not None:
            assert isinstance(hops.puts.link, LocalLink)
            return hops.puts.link.free(hops.puts.key)
        return True

    def run_to_end(self) -> None:
        while not self.finished:
            self.run_next()

    def run_next(self) -> None:
        """One action.  Whatever it raises comes out as ActionError with rank and action."""
        action = self._actions[self._next]
        self._at(f"{action} ({self._next + 1} of {len(self._actions)})")
        try:
            with record_function(f"terapipe:{action}"):
                self._run(action)
        except Exception as error:
            raise ActionError(self.rank, action, error) from error
        self._next += 1

    def _run(self, action: Action) -> None:
        hops, evaluating = self._hops[action], self._scale is None
        began = time.perf_counter()
        normed: NormValues | None = None
        ready = 0.0
        if hops.takes is None:
            arrived = self._staying.pop((action.stage, action.micro, action.slice), None)
        elif hops.norm is not None:
            norm, link = hops.norm, hops.takes.link
            normed = link.take_norm(hops.takes.key, norm.weight, norm.bias, eps=norm.eps, rms=norm.rms)
            arrived, (began, ready) = normed.total, link.waited
        else:
            arrived = hops.takes.link.take(hops.takes.key)
        ready = ready or time.perf_counter()
        stage, micro, piece = self.stages[action.stage], action.micro, action.slice
        put = _Put(hops.puts)
        if action.is_forward:
            output = stage.forward(
                micro, piece, arrived, self._micros[micro], normed=normed, out=None if hops.puts is None else put.sum
            )
        else:
            gradient = self._scale if stage.last else arrived
            assert gradient is not None
            reserve = None if hops.puts is None else partial(hops.puts.link.reserve, hops.puts.key)
            output = stage.backward(micro, piece, gradient, reserve=reserve)
            for hop in hops.holds:  # before a wrong gradient goes any further
                hop.link.verify(hop.key)
        computed = time.perf_counter() if put.total is None else put.posted_at
        if output is not None:
            if hops.puts is not None:
                if put.total is None:
                    hops.puts.link.put(hops.puts.key, output)
                else:
                    put.check(output, action.stage)
                self.sent[hops.puts.transfer] = (computed, time.perf_counter())
            else:
                neighbour = action.stage + (1 if action.is_forward else -1)
                self._staying[neighbour, micro, piece] = output
        # Slots are resident: held until the slice's backward has run; when evaluating there is none.
        for hop in hops.holds if not evaluating else (hops.takes,) if hops.takes is not None else ():
            hop.link.release(hop.key)
        if hops.takes is not None:
            self.taken[hops.takes.transfer] = (began, ready)
            if ready > began:
                self.spans.append(Span(self.rank, action, "wait", began, ready))
        self.spans.append(Span(self.rank, action, "compute", ready, computed))

    def _hops_of(self, action: Action) -> _Hops:
        takes = self._hop(taken_by(self.schedule, action))
        forward = Action(action.stage, "F", action.micro, action.slice)
        held = () if action.is_forward else (self._hop(taken_by(self.schedule, forward)), takes)
        fused = action.is_forward and takes is not None and takes.link.norms_early
        norm = self.stages[action.stage].entry_norm if fused else None
        return _Hops(
            takes, self._hop(sent_by(self.schedule, action)), tuple(hop for hop in held if hop is not None), norm
        )

    def _hop(self, transfer: Transfer | None) -> _Hop | None:
        return None if transfer is None else _Hop(transfer, self.links[transfer.link], key_of(transfer))


def run_together(programs: Sequence[RankProgram]) -> None:
    """Step all programs in one thread until all are done.  `check` has proved that this cannot stall."""
    while not all(program.finished for program in programs):
        moved = False
        for program in programs:
            while program.runnable():
                program.run_next()
                moved = True
        assert moved, "a checked plan stalled: " + ", ".join(
            f"rank {p.rank} at {p._actions[p._next]}" for p in programs if not p.finished
        )


def forward_actions(schedule: Schedule, rank: int) -> list[Action]:
    """The forwards of a rank in order: what evaluation runs."""
    return [action for action in schedule[rank] if action.is_forward]


def one_over(count: int, device: torch.device) -> Tensor:
    """The scalar that turns a loss sum into the mean over `count` targets when used as its output gradient."""
    return torch.tensor(1.0 / count, dtype=torch.float64).to(device)
