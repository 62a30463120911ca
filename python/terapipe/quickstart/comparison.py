"""One training step four ways, timed in one run: one process with one thread, with two, and two stages without and
with slices.

Each variant has the same model, batch and optimizer, and must give the same loss before it is timed. The two
one-process variants run on rank 0 while the other rank sleeps at a barrier.

The trap: one process with two threads is no rival of two stages. Stages stand for machines (or devices) that cannot
share memory; threads show what one machine with both cores would do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from terapipe.engine import Pipeline
from terapipe.engine.launch import World
from terapipe.models import layers, tied_parameters
from terapipe.schedule.trace import TraceEvent, span
from terapipe.timing.step_times import StepTime, measure
from terapipe.train.config import TrainConfig
from terapipe.train.data import open_source
from terapipe.train.optimizer import Optimizer

SINGLE, THREADS, PIPELINE, SLICED = "single", "single_two_threads", "pipeline", "sliced"
TIMELINES = 5
BUDGET_S = 40.0  # of measured steps; a slow machine gets fewer of them
LOSS_TOLERANCE = 1e-5  # fp32, relative: slices change the order of sums


@dataclass(frozen=True)
class Comparison:
    """Step times by variant, and the timelines of a typical step of the two pipelines."""

    times: dict[str, StepTime]
    pipeline: list[TraceEvent]
    sliced: list[TraceEvent]
    slices: int

    @property
    def speedup(self) -> float:
        """Two stages without slices over two stages with them."""
        return self.times[PIPELINE].median_s / self.times[SLICED].median_s

    @property
    def bound(self) -> float:
        """2k / (k + 1): what k equal slices that cost the same reach on two stages if handing on costs nothing."""
        return 2 * self.slices / (self.slices + 1)


def compare(config: TrainConfig, world: World, *, rounds: int) -> Comparison:
    """Every rank calls it. RuntimeError if the variants disagree about the loss."""
    with contextlib.ExitStack() as open_pipelines:

        def variant(*, ranks: int, slices: int) -> _Variant | None:
            if ranks == 1 and world.rank != 0:
                return None
            made = _Variant(config, ranks=ranks, slices=slices)
            open_pipelines.callback(made.pipeline.close)
            return made

        single = variant(ranks=1, slices=1)
        pipeline = variant(ranks=world.size, slices=1)
        sliced = variant(ranks=world.size, slices=config.parallel.slices)
        assert pipeline is not None and sliced is not None
        _check_losses({SINGLE: single, PIPELINE: pipeline, SLICED: sliced})
        times = measure(
            {
                SINGLE: None if single is None else single.step,
                THREADS: None if single is None else partial(_with_threads, 2, single.step),
                PIPELINE: pipeline.step,
                SLICED: sliced.step,
            },
            rounds=rounds,
            budget_s=BUDGET_S,
        )
        return Comparison(
            times,
            _typical_timeline(pipeline, times[PIPELINE].median_s),
            _typical_timeline(sliced, times[SLICED].median_s),
            config.parallel.slices,
        )


class _Variant:
    """A pipeline and its optimizer, on the first training batch."""

    def __init__(self, config: TrainConfig, *, ranks: int, slices: int) -> None:
        config = replace(config, parallel=replace(config.parallel, slices=slices))
        model, plan = config.model.resolve(), config.plan(ranks)
        sequences = plan.micros * plan.micro_size
        source = open_source(
            config.data, vocab=model.vocab, tokens=config.tokens, sequences=sequences, seed=config.seed
        )
        self.batch = source.train(0)
        self.pipeline = Pipeline(
            layers(model, seed=config.seed),
            plan,
            hidden_size=model.hidden,
            ties=tied_parameters(model),
            links="local" if ranks == 1 else "auto",
        )
        self.optimizer = Optimizer(self.pipeline.named_parameters(), config.optimizer, steps=config.steps)

    def step(self) -> float:
        result = self.pipeline.step(self.batch)
        self.optimizer.step(result.grad_norm)
        return result.loss


def _typical_timeline(variant: _Variant, median_s: float) -> list[TraceEvent]:
    """Of a few steps the one whose duration is nearest to the median: a picture of the last step could be of a
    hiccup."""
    timelines = []
    for _ in range(TIMELINES):
        variant.step()
        timelines.append(variant.pipeline.timeline())
    return min(timelines, key=lambda events: abs(span(events).duration_s - median_s))


def _check_losses(variants: dict[str, _Variant | None]) -> None:
    losses = {name: variant.step() for name, variant in variants.items() if variant is not None}
    expected = losses[PIPELINE]
    if not all(abs(loss - expected) <= LOSS_TOLERANCE * expected for loss in losses.values()):
        raise RuntimeError(f"the variants disagree about the loss of one batch, so timing them is pointless: {losses}")


def _with_threads(threads: int, step: Callable[[], object]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step()
    finally:
        torch.set_num_threads(before)
