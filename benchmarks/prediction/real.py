"""Cases with a real model: profile and steps of all variants take turns for a few rounds in one launch, and a final in
another tells the planner's pick from the fastest others. Collective: every rank makes the same calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import partial

import torch.distributed as dist

from benchmarks.prediction.cases import Case
from benchmarks.prediction.result import Result, result_of
from benchmarks.prediction.turns import Step, Turns
from benchmarks.prediction.variants import plans_of
from terapipe.engine import Pipeline
from terapipe.models import layers, tied_parameters
from terapipe.models.config import ModelConfig
from terapipe.models.presets import gpt, llama
from terapipe.profile import Grid, Profiler
from terapipe.schedule import Plan
from terapipe.train.data import Synthetic

FINAL_S = 60.0


def measure(case: Case) -> Result:
    """Rounds of the profiler and of all variants; the predictions come from the profile alone."""
    tokens = case.tokens
    lengths = tuple(sorted({tokens // count for count in (1, 2, 3, 4, 8, 16)}))
    profiler = Profiler(_model(case), tokens=tokens, grid=Grid(lengths, (0, tokens // 2)))
    profiler.run_round()
    plans = plans_of(case, profiler.costs())
    with _steps(case, plans) as steps:
        turns = Turns(steps)
        turns.take(3)
        for _ in range(case.rounds - 1):
            profiler.run_round()
            turns.take(2)
    return result_of(case, plans, profiler.costs(), turns)


def final(case: Case, first: Result) -> Result:
    """The rows of the first launch with the pick's `over_best` from many more steps: turns of the pick and of the two
    fastest others alternate, since where the speed drifts by several per cent the fastest of six after a few steps is
    luck."""
    pick = first.pick
    others = sorted((row for row in first.rows if row is not pick), key=lambda row: row["measured_ms"])[:2]
    with _steps(case, {row["variant"]: first.plans[row["variant"]] for row in (pick, *others)}) as steps:
        turns = Turns(steps)
        began, over = time.perf_counter(), [False]
        while not over[0]:
            turns.take(3)
            over = [time.perf_counter() - began > FINAL_S]
            dist.broadcast_object_list(over, src=0)
    medians = turns.medians()
    pick["over_best"] = medians[pick["variant"]] / min(medians[row["variant"]] for row in others) - 1
    pick["final_steps"] = len(turns.seconds[pick["variant"]])
    return first


def _model(case: Case) -> ModelConfig:
    sizes = {"hidden": case.hidden, "layers": case.layers, "heads": case.heads, "vocab": case.vocab}
    if case.family == "gpt":
        return gpt(**sizes, max_tokens=case.tokens)
    return llama(**sizes, kv_heads=case.heads // 2, ffn_hidden=4 * case.hidden, max_tokens=case.tokens)


@contextlib.contextmanager
def _steps(case: Case, plans: Mapping[str, Plan]) -> Iterator[dict[str, Step]]:
    """A step of every plan, each in a pipeline of its own."""
    model = _model(case)
    batch = Synthetic(tokens=case.tokens, vocab=model.vocab, sequences=case.micros).train(0)
    with contextlib.ExitStack() as closing:
        steps: dict[str, Step] = {}
        for name, plan in plans.items():
            pipeline = Pipeline(layers(model), plan, hidden_size=model.hidden, ties=tied_parameters(model))
            steps[name] = partial(closing.enter_context(pipeline).step, batch)
        yield steps
