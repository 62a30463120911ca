"""Cases whose stages do nothing but sleep what a model of costs says, one process a stage: simulator, links and host
overhead with more ranks than cores. Collective: every rank makes the same calls.

The trap: a stage that spins to its deadline takes the core from one that should wake up, so being late is part of the
overheads that are measured (`terapipe.profile.measure_host`).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import sys
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.prediction.cases import Case
from benchmarks.prediction.result import Result, result_of
from benchmarks.prediction.turns import Step, Turns
from benchmarks.prediction.variants import plans_of
from terapipe.engine import Batch, Pipeline
from terapipe.models.presets import gpt
from terapipe.planner.analytic import analytic_costs
from terapipe.planner.costs import CostModel, StageCosts
from terapipe.planner.hardware import HARDWARE
from terapipe.profile import measure_host

WIDTH = 4  # of what is handed on: copying it is not in the costs


def measure(case: Case) -> Result:
    """Costs by the analytic model on the slowest hardware; the measured overheads of this machine are added."""
    _wake_in_time()
    costs = _costs(case)
    tokens = torch.zeros(case.micros, case.tokens, dtype=torch.int64)
    plans = plans_of(case, costs)
    with contextlib.ExitStack() as closing:
        steps: dict[str, Step] = {}
        for name, plan in plans.items():
            parts = [_Sleeper(costs.stage(index, index + 1)) for index in range(costs.num_layers)]
            pipeline = Pipeline(parts, plan, hidden_size=WIDTH, loss=lambda x, targets: x.sum())
            steps[name] = partial(closing.enter_context(pipeline).step, Batch(tokens, tokens))
        turns = Turns(steps)
        for _ in range(case.rounds):
            turns.take(3)
    return result_of(case, plans, costs, turns)


def _costs(case: Case) -> CostModel:
    model = gpt(hidden=1024, layers=case.ranks * 2 - 2, heads=16, vocab=1000, max_tokens=case.tokens)
    model = dataclasses.replace(model, tied_embeddings=False)
    costs = analytic_costs(model, HARDWARE["v100-p3.16xlarge"], max_tokens=case.tokens)
    links, overheads = measure_host()
    return dataclasses.replace(
        costs,
        model=dataclasses.replace(model, hidden=WIDTH, heads=1, head_dim=0, ffn_hidden=0, kv_heads=0),
        dtype="fp32",
        devices_per_node=None,
        links=links,
        overheads=overheads,
    )


class _Sleep(torch.autograd.Function):
    """Takes the time of a layer, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, costs: StageCosts, start: int) -> Tensor:
        began = time.perf_counter()
        ctx.costs, ctx.at, ctx.first = costs, (1, x.shape[1], start), x.dim() == 2
        out = x.unsqueeze(-1).expand(*x.shape, WIDTH).float() if ctx.first else x.clone()
        _sleep_until(began + costs.forward(*ctx.at))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        began = time.perf_counter()
        found = None if ctx.first else gradients[0], torch.zeros(1), None, None
        _sleep_until(began + ctx.costs.backward(*ctx.at))
        return found


class _Sleeper(nn.Module):
    def __init__(self, costs: StageCosts) -> None:
        super().__init__()
        self.costs, self.weight = costs, nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor, cache: Any, mask: Any, positions: Tensor) -> Tensor:
        return _Sleep.apply(hidden, self.weight, self.costs, int(positions[0, 0]))


def _wake_in_time() -> None:
    """Linux rounds the end of a sleep up by 50 us unless told otherwise."""
    if sys.platform == "linux":
        PR_SET_TIMERSLACK = 29
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)


def _sleep_until(deadline: float) -> None:
    time.sleep(max(0.0, deadline - time.perf_counter()))
