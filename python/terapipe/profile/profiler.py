"""Measures what slices cost on this machine: the layers of a model inside the engine's stages, the links, the host.

Every rank of the launch measures the same slices at the same time, since cores that share memory are slower when all
of them work. The weight gradient is what a backward takes more with it than without, W = B - I.
"""

from __future__ import annotations

import dataclasses
import platform
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from terapipe.models.config import EMBEDDING, HEAD, ModelConfig
from terapipe.planner.analytic import analytic_costs, layer_bytes
from terapipe.planner.costs import BLOCK, DTYPE_BYTES, FREE_LINK, PASSES, CostModel, LayerCosts, LinkModel, Overheads
from terapipe.planner.fit import FitError, Point
from terapipe.planner.hardware import CPU
from terapipe.planner.pass_costs import CurveCost
from terapipe.planner.prediction import predict
from terapipe.planner.request import counted
from terapipe.profile.host import measure_overheads
from terapipe.profile.links import measure_links
from terapipe.profile.stages import BLOCKS, Bench, Samples
from terapipe.schedule import make_plan
from terapipe.timing.foreign_load import disturbance, foreign_cores, sample
from terapipe.train.config import OptimizerSettings
from terapipe.train.memory_needs import GIB, host_memory
from terapipe.world import ALONE, launched_world

HELD_OUT = 4  # every so many points are left out of a fit and predicted, to know its error
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Grid:
    """Which slices are measured: every length behind every one of `starts` that leaves room for it."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...]

    @classmethod
    def up_to(cls, tokens: int, *, shortest: int = 32) -> Grid:
        """1, 1.5, 2, 3, 4, ... times `shortest`, up to the whole sequence; prefixes of a quarter and a half."""
        lengths = {tokens}
        length = min(shortest, tokens)
        while length < tokens:
            lengths |= {length, length * 3 // 2}
            length *= 2
        starts = {tokens // 4, tokens // 2}
        return cls(tuple(sorted(n for n in lengths if n <= tokens)), (0, *sorted(starts - {0})))

    def points(self, tokens: int) -> Iterator[Point]:
        for length in self.lengths:
            for start in self.starts:
                if start + length <= tokens:
                    yield Point(length, start, 0.0)


class Profiler:
    """Samples costs in rounds and makes a cost model of all samples so far; the same calls on every rank.

    tokens: length of the longest sequence. ValueError for a model whose positions end before it.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        tokens: int,
        micro_sizes: Sequence[int] = (1,),
        dtype: str = "fp32",
        grid: Grid | None = None,
    ) -> None:
        if model.position == "learned" and tokens > model.max_tokens:
            raise ValueError(
                f"tokens is {tokens}, but the model has learned positions for {model.max_tokens}; profile at most "
                f"these, or raise model.max_tokens."
            )
        self.model, self.tokens, self.dtype = model, tokens, dtype
        self.micro_sizes = tuple(micro_sizes)
        self.grid = grid or Grid.up_to(tokens)
        self._samples: dict[int, Samples] = {size: defaultdict(list) for size in self.micro_sizes}
        self._bench = Bench(model, DTYPES[dtype])
        self._overheads: list[list[float]] = []
        self._links: dict[str, LinkModel] = {}
        self._since = sample()

    def run_round(self, progress: Callable[[str], None] = lambda line: None) -> None:
        """Measure everything once. Several rounds, minutes apart, see a machine whose speed drifts as a run does."""
        if not self._links and dist.is_initialized() and dist.get_world_size() > 1:
            self._links = measure_links()
        for size in self.micro_sizes:
            points = list(self.grid.points(self.tokens))
            random.Random(len(self._overheads)).shuffle(points)  # a slow minute must not hit one length alone
            for point in points:
                progress(f"micro size {size}: {point.length} tokens behind {point.start}")
                self._bench.measure(
                    point.length, point.start, tokens=self.tokens, micro_size=size, samples=self._samples[size]
                )
        progress("overheads")
        self._overheads.append(
            measure_overheads(self._bench, OptimizerSettings(), next(iter(self._links.values()), None))
        )

    def costs(self) -> CostModel:
        """The cost model, the same on every rank; its notes say if others disturbed the measurement."""
        foreign = foreign_cores(self._since, sample())
        disturbed = disturbance(foreign, local_ranks=(launched_world() or ALONE).local_size)
        passes: dict[tuple[str, str], dict[int, CurveCost]] = defaultdict(dict)
        errors: dict[str, FitError] = {}
        for size, samples in self._samples.items():
            for kind, found in _points(_gathered(samples)).items():
                for name, points in found.items():
                    passes[kind, name][size] = CurveCost.fit(points)
                    errors[f"{kind} {name}, micro size {size}"] = held_out_error(points)
        layers = {
            kind: LayerCosts(
                *layer_bytes(self.model, kind, DTYPE_BYTES[self.dtype]), *(passes[kind, name] for name in PASSES)
            )
            for kind in (EMBEDDING, BLOCK, HEAD)
        }
        threads = counted(torch.get_num_threads(), "thread")
        return CostModel(
            source="measured",
            hardware=f"{platform.processor() or platform.machine()}, {threads} per rank",
            model=self.model,
            dtype=self.dtype,
            max_tokens=self.tokens,
            layers=layers,
            links=self._links or {"local": FREE_LINK},
            overheads=Overheads(*(statistics.median(values) for values in zip(*self._overheads, strict=True))),
            notes={
                "error on held-out points": {
                    name: f"median {error.median:.1%}, largest {error.largest:.1%} of {error.points}"
                    for name, error in errors.items()
                    if error.points
                },
                "ranks at work": dist.get_world_size() if dist.is_initialized() else 1,
                "rounds": len(self._overheads),
                "torch": torch.__version__,
                **({"measurement": disturbed} if disturbed else {}),
            },
        )


def check_memory(model: ModelConfig, *, tokens: int, micro_size: int, dtype: str, local_ranks: int) -> None:
    """ValueError where the longest slice of the largest micro needs more than twice this machine's memory, by the
    planner's estimate (`terapipe.train.memory_needs`)."""
    short = dataclasses.replace(model, layers=min(BLOCKS, model.layers))
    costs = analytic_costs(short, CPU, max_tokens=tokens, micro_sizes=(micro_size,), dtype=dtype)
    plan = make_plan(layers=costs.num_layers, ranks=1, slices=1, tokens=tokens, micro_size=micro_size)
    need, here = local_ranks * max(predict(plan, costs).memory_bytes), host_memory()
    if need > 2 * here:
        raise ValueError(
            f"{counted(local_ranks, 'rank')} that measure {micro_size} x {tokens} tokens through {short.layers} blocks "
            f"of hidden {model.hidden} need about {need / GIB:,.1f} GiB, but this machine has {here / GIB:,.1f} GiB; "
            f"lower --tokens, --micro-sizes or --local-ranks, or measure a smaller model."
        )


def held_out_error(points: Sequence[Point]) -> FitError:
    """The error of a curve fitted without every fourth point on those points; the ends of the curve always stay."""
    ends = {min(points).length, max(points).length}
    inner = [point for point in sorted(points) if point.length not in ends]
    held = inner[1::HELD_OUT]
    rest = [point for point in points if point not in held]
    if not held or not any(point.start == 0 for point in rest):
        return FitError(0, 0.0, 0.0)
    return CurveCost.fit(rest).error(held)


def _gathered(samples: Samples) -> Samples:
    """The samples of all ranks, on every rank."""
    if not dist.is_initialized():
        return samples
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(samples))
    merged: Samples = defaultdict(list)
    for one in everyone:
        for key, values in one.items():
            merged[key] += values
    return merged


def _points(samples: Samples) -> dict[str, dict[str, list[Point]]]:
    """Medians as points, by layer kind and pass; only blocks know a prefix."""
    found: dict[str, dict[str, list[Point]]] = {
        kind: {name: [] for name in PASSES} for kind in (EMBEDDING, BLOCK, HEAD)
    }
    pooled: Samples = defaultdict(list)
    for (kind, name, length, start), values in samples.items():
        pooled[kind, name, length, start if kind == BLOCK else 0] += values
    median = {key: statistics.median(values) for key, values in pooled.items()}
    for (kind, name, length, start), value in median.items():
        if name == "forward":
            found[kind]["forward"].append(Point(length, start, value))
        elif name == "backward":
            # The embedding computes no input gradient: all of its backward is the weights'.
            gradient = 0.0 if kind == EMBEDDING else min(value, median[kind, "input_grad", length, start])
            found[kind]["input_grad"].append(Point(length, start, gradient))
            found[kind]["weight_grad"].append(Point(length, start, value - gradient))
    return found
