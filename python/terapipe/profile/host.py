"""What a step takes on this machine beside layers and links: interpreter, norm, optimizer, a constant; and what an
action takes in a process that has slept.

The trap: code and data of the host grow cold while a stage computes or sleeps, so an action in a tight loop costs a
quarter of one in a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terapipe.engine import Batch, Pipeline
from terapipe.planner.costs import LinkModel, Overheads
from terapipe.profile.links import measure_links
from terapipe.profile.stages import Bench
from terapipe.schedule import LinkCost, make_plan, simulate
from terapipe.timing.step_times import barrier
from terapipe.train.config import OptimizerSettings
from terapipe.train.optimizer import Optimizer
from tpkernels import Mask

REPEATS = 12
EVICTED_BYTES = 1 << 23  # more than a core's own cache
WORK_S = 0.001
RESTS_S = (0.0005, 0.002, 0.008, 0.032, 0.128)
LAYERS_A_STAGE = 2  # of stages that sleep: each wakes up late


class _Rest(torch.autograd.Function):
    """Passes its input on, behind a rest that leaves caches as cold as a layer's work does, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rest: Callable[[], None]) -> Tensor:
        ctx.rest = rest
        rest()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.rest()
        return gradients[0], None


class _Nothing(nn.Module):
    """The least that a stage can do: one multiplication by a parameter, behind `rest` if there is one."""

    def __init__(self, *, first: bool, rest: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.first, self.rest = first, rest
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, hidden: Tensor, cache: None, mask: Mask, positions: Tensor) -> Tensor:
        out = (hidden.unsqueeze(-1).float() if self.first else hidden) * self.weight
        return out if self.rest is None else _Rest.apply(out, self.rest)


def measure_overheads(bench: Bench, settings: OptimizerSettings, link: LinkModel | None) -> list[float]:
    """What actions, steps and parameters cost beside layers and links: the fields of `Overheads`, mean over ranks."""
    action_s = _action_seconds()
    step_s = 0.0 if link is None else _step_seconds(action_s, link)
    norm_s, update_s = _norm_seconds(bench), _update_seconds(bench, settings)
    found = torch.tensor([action_s, step_s, norm_s, update_s, *bench.first_seconds()], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(found)
        found /= dist.get_world_size()
    values: list[float] = found.tolist()
    return values


def measure_host() -> tuple[dict[str, LinkModel], Overheads]:
    """Links, and what actions and steps cost this host where stages sleep; a collective call."""
    links = measure_links()
    asleep = tuple((rest_s, _resting_action_seconds(rest_s)) for rest_s in RESTS_S)
    action_s = min(seconds for _, seconds in asleep)
    step_s = _step_seconds(action_s, next(iter(links.values())))
    return links, Overheads(action_s=action_s, step_s=step_s, asleep=asleep)


def _step_seconds(action_s: float, link: LinkModel) -> float:
    """What a step over all ranks takes beyond its actions and transfers."""
    ranks = dist.get_world_size()
    plan = make_plan(layers=ranks, ranks=ranks, slices=1, tokens=1)
    cost = LinkCost(link.latency_s, link.bytes_per_s, 4)
    explained = simulate(plan.schedule, lambda action: action_s, links=cost).makespan
    return max(0.0, _step_of_nothing(ranks=ranks, slices=1, links="auto") - float(explained))


def _action_seconds() -> float:
    """Seconds of the interpreter, the stage and autograd for one action right behind work: code and data are cold."""
    slices, worked, evicted = 16, list[float](), torch.zeros(EVICTED_BYTES // 4)

    def work() -> None:
        began = time.perf_counter()
        time.sleep(WORK_S)
        evicted.add_(1.0)
        worked.append(time.perf_counter() - began)

    step_s = _step_of_nothing(ranks=1, slices=slices, links="local", rest=work)
    return max(0.0, step_s - statistics.mean(worked) * 2 * slices) / (2 * slices)


def _resting_action_seconds(rest_s: float) -> float:
    """Seconds of one action in stages whose layers sleep for `rest_s` together; the mean of all ranks, which
    do so at once."""
    slices = 4
    step_s = _step_of_nothing(
        ranks=1, slices=slices, links="local", rest=lambda: time.sleep(rest_s / LAYERS_A_STAGE), layers=LAYERS_A_STAGE
    )
    found = torch.tensor([max(0.0, step_s / (2 * slices) - rest_s)], dtype=torch.float64)
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def _step_of_nothing(
    *, ranks: int, slices: int, links: str, rest: Callable[[], None] | None = None, layers: int = 1
) -> float:
    """Seconds of an engine's step whose layers, so many a rank, do next to nothing, one token per slice."""
    plan = make_plan(layers=ranks * layers, ranks=ranks, slices=slices, tokens=slices)
    parts = [_Nothing(first=index == 0, rest=rest) for index in range(ranks * layers)]
    tokens = torch.zeros(1, slices, dtype=torch.int64)
    seconds = []
    with Pipeline(parts, plan, hidden_size=1, loss=lambda x, targets: x.sum(), links=links) as pipeline:
        for _ in range(REPEATS if rest is None else REPEATS // 2):
            barrier()
            began = time.perf_counter()
            pipeline.step(Batch(tokens, tokens))
            seconds.append(time.perf_counter() - began)
    return statistics.mean(seconds[2:]) if rest is not None else statistics.median(seconds[2:])


def _norm_seconds(bench: Bench) -> float:
    """Seconds of the gradient's norm per parameter."""
    gradients = [p.grad for p in bench.parameters if p.grad is not None]

    def run() -> None:
        torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]).tolist()

    return _median_seconds(run) / sum(gradient.numel() for gradient in gradients)


def _update_seconds(bench: Bench, settings: OptimizerSettings) -> float:
    """Seconds of the optimizer's update per parameter."""
    named = {f"{name}.{local}": p for name, layer in bench.layers.items() for local, p in layer.named_parameters()}
    optimizer = Optimizer(named, settings, steps=1000)
    seconds = _median_seconds(lambda: optimizer.step(1.0))
    return seconds / sum(parameter.numel() for parameter in named.values())


def _median_seconds(run: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(REPEATS):
        barrier()
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
