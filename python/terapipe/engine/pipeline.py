"""The engine: trains a list of layers as a pipeline of token slices, as a plan says.

    pipeline = Pipeline(layers, plan, hidden_size=128)
    result = pipeline.step(batch)          # forward, backward, reduce; gradients in .grad of named_parameters()
    optimizer.step()

A layer is anything with `forward(hidden, cache, mask, positions)`.  In one process all ranks of the plan are stepped
by one thread over local links; with as many processes as the plan has ranks each runs its own list over
torch.distributed.  The numbers are the same. The trap: a failed step leaves connections closed, so a Pipeline that
raised PipelineError, or was left in the middle of a step (Ctrl-C), cannot be used again.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType

import torch
from torch import Tensor, nn

from terapipe.engine.batch import NO_TARGET, Batch
from terapipe.engine.breakdown import find_origin
from terapipe.engine.census import Tie
from terapipe.engine.failure import (
    BETWEEN_STEPS,
    IDLE,
    STALL_SECONDS,
    Failure,
    FailureBoard,
    PipelineError,
    Watchdog,
    let_go,
    words,
)
from terapipe.engine.hand_off_times import TIMES, HandOff, hand_offs, known_times, summarize
from terapipe.engine.interpreter import ActionError, RankProgram, forward_actions, key_of, one_over, run_together
from terapipe.engine.loss import cross_entropy_sum
from terapipe.engine.opening import OPENING
from terapipe.engine.reduction import copy_tied_values, squared_norms, sum_tied_gradients
from terapipe.engine.results import EvaluationResult, MemoryReport, StepResult
from terapipe.engine.stage import Loss
from terapipe.engine.start import Built, Given, LayerSource, build
from terapipe.engine.timeline import joined_rows, own_rows
from terapipe.engine.wiring import Expected, Wiring, link_specs, open_local_wiring, open_process_wiring
from terapipe.layer import disown_gradients, own_gradients
from terapipe.schedule import Plan, SlotAssignment, check, ring_slots
from terapipe.schedule.trace import TraceEvent
from tpkernels import Mask


class Pipeline:
    """Runs `plan` over `layers` (global name -> layer or factory, first to last; a list gets the names "0", "1", ...).

    loss: (output of the last layer, targets) -> sum over targets.  hidden_size: last dimension of what stages hand on.
    ties: pairs of global parameter names with one value. links: "local" (this process runs every rank), or one
    process a rank with "shm" (shared memory), "peer" (memory of two GPUs of one host), "dist" (torch.distributed)
    or "auto" (shm where both ranks are on CPUs of one host, else dist). link_slots: 0, a slice stays in its slot
    until its backward (resident, as many slots as the plan needs); else it is copied out of a ring of so many.
    link_timeout: the longest wait for a slice. dtype: of hidden states and caches; parameters of 16 bits get fp32
    gradients. recompute: keep only the input of each slice, and run it through its stage once more in the backward:
    less memory, a third more computation, the same bits. stall_seconds: after so long in one action every rank's
    position is logged. One token runs through every layer here (trial.py). Raises ValueError before any work when
    layers, plan, processes and parameters do not fit.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerSource] | Sequence[LayerSource],
        plan: Plan,
        *,
        hidden_size: int,
        loss: Loss = cross_entropy_sum,
        ties: Sequence[Tie] = (),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        recompute: bool = False,
        links: str = "auto",
        link_slots: int = 0,
        link_timeout: timedelta = timedelta(minutes=30),
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        named = (
            dict(layers) if isinstance(layers, Mapping) else {str(index): layer for index, layer in enumerate(layers)}
        )
        given = Given(
            named,
            plan,
            hidden_size=hidden_size,
            loss=loss,
            ties=ties,
            device=device,
            dtype=dtype,
            recompute=recompute,
            links=links,
            link_slots=link_slots,
            link_timeout=link_timeout,
            stall_seconds=stall_seconds,
        )
        built = build(given)
        self.plan, self.rank, self.ranks, self.census = plan, built.rank, plan.ranks, built.census
        self._hidden_size, self._local, self._device, self._ids = hidden_size, built.local, built.device, built.ids
        self._parameters = built.parameters()
        self._slots = plan.slots
        if link_slots:
            self._slots = ring_slots(plan.schedule, link_slots)
            check(plan.schedule, self._slots)
        self._board = FailureBoard(self.rank, 1 if self._local else plan.ranks)
        self._wiring = _connect(given, built, self._slots, self._board)
        self._watchdog = None if self._local else _watch(self._board, self._wiring, stall_seconds)
        at = self._watchdog.at if self._watchdog is not None else lambda position: None
        self._programs = [
            RankProgram(rank, plan.schedule, stages, self._wiring.links, at=at) for rank, stages in built.stages.items()
        ]
        # Ranks of one host share a clock; in one process nothing is on its way.
        timed = not self._local and self._wiring.one_clock
        self._transfers = [transfer for order in self._slots.order.values() for transfer in order] if timed else []
        self._hand_offs: list[HandOff] = []
        self._step_began = 0.0
        self._broken: PipelineError | None = None
        self._closed = False
        own_gradients(self._parameters.values())  # step() alone reads and replaces them
        self._let_go = weakref.finalize(
            self, _let_go, self._board, self._watchdog, self._wiring, list(self._parameters.values()), os.getpid()
        )
        self._let_go.atexit = False  # a process that ends tells its peers by that
        with self.failing_in("copying the values of tied parameters"):
            copy_tied_values(self._parameters, self.census, self._wiring)

    def step(self, batch: Batch) -> StepResult:
        """Gradients of the mean loss over `batch`, replacing those of the step before, and the loss itself.

        batch: `plan.micros * plan.micro_size` sequences of `plan.tokens` tokens, the same on every rank."""
        targets = self._check_batch(batch)
        self.zero_grad()
        began = time.perf_counter()
        self._run(batch, one_over(targets, self._device), evaluating=False)
        with self.failing_in("the gradient reduction"):
            sum_tied_gradients(self._parameters, self.census, self._wiring)
            squares = squared_norms(self._parameters, self.census)
            busy = sum(
                span.end - span.start for program in self._programs for span in program.spans if span.kind == "compute"
            )
            elapsed = time.perf_counter() - began
            sums = [self._loss_sum(), busy, elapsed * len(self._programs), *squares]
            table = self._sum_with_check(
                batch, [*sums, *known_times(self._transfers, self._programs[0])], evaluating=False
            )
        loss, busy, available = table[0] / targets, table[1], table[2]
        self._hand_offs = hand_offs(self._transfers, table[len(sums) :])
        for program in self._programs:
            for stage in program.stages.values():
                stage.assert_drained()
        return StepResult(
            loss=loss,
            tokens=batch.tokens.numel(),
            grad_norm=math.sqrt(math.fsum(table[3 : len(sums)])),
            seconds=time.perf_counter() - began,
            bubble_share=max(0.0, 1.0 - busy / available) if not self._local else 0.0,
            hand_offs=summarize(self._hand_offs) if self._hand_offs else None,
        )

    def evaluate(self, batch: Batch) -> EvaluationResult:
        """The mean loss over `batch` (shaped as for `step`) without gradients; may come before, between and after
        steps. Layers stay in the mode they are in: with dropout, call `eval()` on those of `layers()` before."""
        targets = self._check_batch(batch)
        self._run(batch, None, evaluating=True)
        with self.failing_in("the loss reduction"):
            table = self._sum_with_check(batch, [self._loss_sum()], evaluating=True)
        return EvaluationResult(loss=table[0] / targets, targets=targets)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Global name -> parameter, for the layers of this process."""
        return dict(self._parameters)

    def layers(self) -> dict[str, nn.Module]:
        """Global name -> layer, for the layers of this process."""
        return {
            name: layer
            for program in self._programs
            for stage in program.stages.values()
            for name, layer in stage.layers.items()
        }

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def timeline(self) -> list[TraceEvent]:
        """The last step of every rank, in seconds from its start; a collective call: every rank makes it, every rank
        gets all rows."""
        self._check_open()
        with self.failing_in("the timeline"):
            reports = self._wiring.gather([self._step_began, own_rows(self._programs)])
        return joined_rows(reports, self._hand_offs, one_clock=self._wiring.one_clock)

    def memory(self) -> MemoryReport:
        """Peak and cache bytes of this process."""
        stages = [stage for program in self._programs for stage in program.stages.values()]
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return MemoryReport(
            peak, sum(stage.cache_bytes() for stage in stages), sum(stage.accumulator_bytes() for stage in stages)
        )

    def close(self) -> None:
        """Let go of links and threads; so does the loss of the last reference.  Safe to call twice, and from another
        thread: a step in progress then fails."""
        self._closed = True
        self._let_go()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._broken is None:  # so that the other ranks can say why this one left
            self._board.record(Failure(self.rank, BETWEEN_STEPS, words(error)))
        self.close()

    def _check_batch(self, batch: Batch) -> int:
        """The number of targets, once the batch fits."""
        self._check_open()
        sequences = self.plan.micros * self.plan.micro_size
        if tuple(batch.tokens.shape) != (sequences, self.plan.tokens):
            raise ValueError(
                f"the batch has {list(batch.tokens.shape)} tokens, but the plan runs {self.plan.micros} micros of "
                f"{self.plan.micro_size} sequences, {self.plan.tokens} tokens each: give "
                f"[{sequences}, {self.plan.tokens}]."
            )
        batch.check_ids(self._ids)
        Mask(document_starts=batch.document_starts)  # refuses borders that are none, before any work is lost
        targets = batch.num_targets
        if targets == 0:
            raise ValueError(
                f"the batch has no target: all {batch.targets.numel()} are {NO_TARGET}, so its loss is undefined; "
                f"leave such a batch out."
            )
        return targets

    def _check_open(self) -> None:
        if self._broken is not None:
            raise PipelineError(self._broken.failure, here=self.rank, again=True)
        if self._closed:
            raise RuntimeError("this pipeline was closed; make a new one, or close it only after the last step.")

    def _sum_with_check(self, batch: Batch, values: list[float], *, evaluating: bool) -> list[float]:
        """The sums of `values` over ranks; RuntimeError on every rank when they were given different batches, which
        would otherwise train on tokens of one and targets of the other, or did not all step or evaluate."""
        digest = float(batch.digest() ^ evaluating)
        # As long for an evaluation as for a step: gloo ends a process that is sent more than it asked for.
        padding = 3 + len(self.census.names) + TIMES * len(self._transfers) - len(values)
        table = self._wiring.sum_over_ranks([digest, digest * digest, *values, *[0.0] * padding])
        ranks = 1 if self._local else self.plan.ranks
        if table[0] * table[0] != ranks * table[1]:  # exact: integers below 2^53, equal only if all digests are
            raise RuntimeError(
                "the ranks were given different batches, or some called step and others evaluate; make the same call "
                "with the same batch on every rank of the pipeline"
            )
        return table[2 : 2 + len(values)]

    def _run(self, batch: Batch, scale: Tensor | None, *, evaluating: bool) -> None:
        batch = batch.to(self._device)
        self._hand_offs = []
        micros = [batch.micro(index, self.plan.micro_size) for index in range(self.plan.micros)]
        self._step_began = time.perf_counter()
        try:
            self._wiring.expect(self._expected(evaluating))
            for program in self._programs:
                schedule = self.plan.schedule
                actions = forward_actions(schedule, program.rank) if evaluating else list(schedule[program.rank])
                program.begin(micros, scale, actions=actions)
            if self._local:
                run_together(self._programs)
            else:
                self._programs[0].run_to_end()
            self._wiring.finish()
        except ActionError as error:
            self._fail(str(error.action), error.cause, rank=error.rank)
        except Exception as error:
            self._fail("the end of the step", error, rank=self.rank)
        except BaseException as error:  # Ctrl-C: what is half done cannot be gone on from
            self._break("a step", error, rank=self.rank)
            raise
        finally:
            if self._watchdog is not None:
                self._watchdog.at(IDLE)

    def _expected(self, evaluating: bool) -> Expected:
        """Per link the keys and shapes of the step's transfers, in order."""
        return {
            link: [
                (key_of(transfer), (self.plan.micro_size, self.plan.slices[transfer.slice], self._hidden_size))
                for transfer in transfers
                if not evaluating or link.direction == "F"
            ]
            for link, transfers in self._slots.order.items()
        }

    def _loss_sum(self) -> float:
        losses: dict[tuple[int, int], float] = {}
        for program in self._programs:
            for stage in program.stages.values():
                losses |= stage.losses()
        return math.fsum(losses.values())

    @contextlib.contextmanager
    def failing_in(self, action: str) -> Iterator[None]:
        """What fails inside becomes a PipelineError that names `action`, on every rank; for work between two steps that
        all ranks do together, such as a checkpoint."""
        if self._watchdog is not None:
            self._watchdog.at(action)
        try:
            yield
        except Exception as error:
            self._fail(action, error, rank=self.rank)
        except BaseException as error:
            self._break(action, error, rank=self.rank)
            raise
        finally:
            if self._watchdog is not None:
                self._watchdog.at(IDLE)

    def _fail(self, action: str, cause: BaseException, *, rank: int) -> None:
        raise self._break(action, cause, rank=rank) from cause

    def _break(self, action: str, cause: BaseException, *, rank: int) -> PipelineError:
        """Record the failure, close the links so that neighbours notice, drop the state; the error names the origin."""
        origin = find_origin(
            action, cause, rank=rank, board=self._board, wiring=self._wiring, schedule=self.plan.schedule
        )
        error = PipelineError(origin, here=rank)
        self._broken = error
        if origin.rank != rank:
            let_go(cause)
        for program in self._programs:
            for stage in program.stages.values():
                stage.discard()
        self.zero_grad()
        self.close()
        return error


def _connect(given: Given, built: Built, slots: SlotAssignment, board: FailureBoard) -> Wiring:
    plan = given.plan
    slot_shape = (plan.micro_size, max(plan.slices), given.hidden_size)
    specs = link_specs(plan.schedule, slots, given.dtype, built.device, slot_shape)
    if built.local:
        return open_local_wiring(specs)
    return open_process_wiring(
        specs,
        built.rank,
        links=given.links,
        families=built.census.families,
        owner=built.census.owner,
        processes=built.processes,
        board=board,
        timeout=given.link_timeout,
    )


def _watch(board: FailureBoard, wiring: Wiring, stall_seconds: float) -> Watchdog:
    try:
        return Watchdog(board, give_up=wiring.give_up, lost=wiring.lost, stall_seconds=stall_seconds)
    except BaseException as error:  # no thread was to be had; the others are at their first step
        board.record(Failure(board.rank, OPENING, words(error)))
        wiring.close()
        raise


def _let_go(
    board: FailureBoard, watchdog: Watchdog | None, wiring: Wiring, parameters: list[nn.Parameter], process: int
) -> None:
    """What `close` does; knows no pipeline, so that a lost one can do it too."""
    if os.getpid() != process:  # a forked child has copies, and no say
        return
    if watchdog is not None:
        watchdog.stop()
    board.say_closed()
    disown_gradients(parameters)
    wiring.close()
