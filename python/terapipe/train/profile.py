"""Measures what slices cost on this machine: the layers of a model inside the engine's stages, and the links.

Every rank of the launch measures the same slices at the same time, since cores that share memory are slower when all
of them work. A slice of `length` tokens behind `start` runs in a stage whose caches pretend to hold `start` tokens, so
a long prefix costs nothing to make. Layers are timed at their borders: forward by when each one is entered, backward by
when the gradient of its input is complete. Each point is run with all gradients (F, B) and with frozen weights, whose
backward is the input gradient alone (I); the weight gradient is the difference, W = B - I.

The trap: the last slice's backward also clears the accumulators, so backwards are read off the slice before it.
"""

from __future__ import annotations

import itertools
import os
import platform
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terapipe.engine import Batch, Pipeline, cross_entropy_sum
from terapipe.engine.stage import Stage
from terapipe.models import layers
from terapipe.models.config import EMBEDDING, HEAD, ModelConfig
from terapipe.models.linear import IN_PLACE
from terapipe.planner.analytic import layer_bytes
from terapipe.planner.costs import BLOCK, DTYPE_BYTES, PASSES, CostModel, CurveCost, LayerCosts, LinkModel, Overheads
from terapipe.planner.fit import FitError, Point, non_negative_least_squares
from terapipe.schedule import LinkCost, make_plan, simulate
from terapipe.train.config import OptimizerSettings
from terapipe.train.optimizer import Optimizer
from terapipe.train.step_times import barrier
from tpkernels import Mask
from tpkernels.links import LinkSpec, open_link, shm_missing
from tpkernels.prefix_cache import LENGTH

BLOCKS = 2  # measured at once: their weights push each other out of the cache, as in a stage
LEAST_REPEATS, MOST_REPEATS, POINT_SECONDS = 3, 12, 0.5
LINK_PAUSE_S = 0.002
EVICTED_BYTES = 1 << 23  # more than a core's own cache
PAUSE_S = 0.05  # about as long as a rank waits for its first slice
ALIVE_TOKENS, MOST_MICROS = 2048, 8  # kept alive at once, in micros, so that memory is as fresh as in a step
HELD_OUT = 4  # every so many points are left out of a fit and predicted, to know its error
LINK_BYTES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_UP_TOKENS = 512  # longer slices are warm after their first millisecond

Samples = dict[tuple[str, str, int, int], list[float]]
"""(layer kind, "forward" | "backward" | "input_grad", length, start) -> seconds of every run."""


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

    tokens: of the longest sequence. ValueError for a model whose positions end before it.
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
        self._bench = _Bench(model, DTYPES[dtype])
        self._overheads: list[list[float]] = []
        self._links: dict[str, LinkModel] = {}

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
        """The cost model, the same on every rank."""
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
        return CostModel(
            source="measured",
            hardware=f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads a rank",
            model=self.model,
            dtype=self.dtype,
            max_tokens=self.tokens,
            layers=layers,
            links=self._links or {"local": LinkModel(0.0, 1e15)},
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
            },
        )


def held_out_error(points: Sequence[Point]) -> FitError:
    """Of a curve fitted without every fourth point, on those points; the ends of the curve always stay."""
    ends = {min(points).length, max(points).length}
    inner = [point for point in sorted(points) if point.length not in ends]
    held = inner[1::HELD_OUT]
    rest = [point for point in points if point not in held]
    if not held or not any(point.start == 0 for point in rest):
        return FitError(0, 0.0, 0.0)
    return CurveCost.fit(rest).error(held)


# -------------------------------------------------------------------------------------------------------------- stages


class _Bench:
    """The layers of a short model of this shape: embedding, `BLOCKS` blocks, head."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        factories = layers(model, dtype=dtype)
        names = [EMBEDDING, *(f"blocks.{i}" for i in range(min(BLOCKS, model.layers))), HEAD]
        self.model, self.dtype = model, dtype
        self.layers = {name: factories[name]() for name in names}
        self.parameters = [parameter for layer in self.layers.values() for parameter in layer.parameters()]
        for parameter in self.parameters:
            setattr(parameter, IN_PLACE, True)
            if parameter.dtype.itemsize < 4:
                parameter.grad_dtype = torch.float32
            parameter.grad = torch.zeros_like(parameter, dtype=torch.promote_types(dtype, torch.float32))

    def measure(self, length: int, start: int, *, tokens: int, micro_size: int, samples: Samples) -> None:
        """Runs of one point, into `samples`."""
        slices = 2 if start + 2 * length <= tokens else 1
        micros = max(1, min(MOST_MICROS, min(tokens, ALIVE_TOKENS) // (slices * length * micro_size)))
        clock = _Clock()
        stage = self.stage((length,) * slices, micro_size, start, clock)
        batch = self.batch(length * slices, micro_size)
        for frozen in (False, True):
            self._freeze(frozen)
            if not frozen and length <= WARM_UP_TOKENS:
                self._run(stage, batch, slices, 1, clock)
            barrier()
            began, runs = time.perf_counter(), 0
            while runs == 0 or (runs * micros < LEAST_REPEATS and time.perf_counter() - began < POINT_SECONDS):
                clock.clear()
                self._run(stage, batch, slices, micros, clock)
                runs += 1
                for micro in range(micros):
                    for piece in range(slices):
                        for kind, seconds in clock.forwards(micro * slices + piece):
                            if not frozen:
                                samples[kind, "forward", length, start + piece * length].append(seconds)
                    for kind, seconds in clock.backwards(micro * slices + slices - 1):  # of slice 0: last to first
                        samples[kind, "input_grad" if frozen else "backward", length, start].append(seconds)
            barrier()  # others may still be at work, and this rank would be too
        self._freeze(False)

    def stage(self, lengths: tuple[int, ...], micro_size: int, start: int, clock: _Clock) -> Stage:
        return Stage(
            0,
            {name: _Timed(layer, _kind(name), start, clock) for name, layer in self.layers.items()},
            slice_lengths=lengths,
            micro_size=micro_size,
            first=True,
            last=True,
            loss=cross_entropy_sum,
            device=torch.device("cpu"),
            dtype=self.dtype,
        )

    def batch(self, tokens: int, micro_size: int) -> Batch:
        ids = torch.randint(0, self.model.vocab, (micro_size, tokens))
        return Batch(ids, ids)

    def _run(
        self, stage: Stage, batch: Batch, slices: int, micros: int, clock: _Clock, *, pause_s: float = 0.0
    ) -> None:
        stage.begin(evaluating=False)
        for micro in range(micros):
            for piece in range(slices):
                clock.begin_forward()
                stage.forward(micro, piece, None, batch)
                clock.end_forward()
        scale = torch.tensor(1.0 / batch.tokens.numel(), dtype=torch.float64)
        time.sleep(pause_s)
        for micro in range(micros):
            for piece in reversed(range(slices)):
                clock.begin_backward()
                stage.backward(micro, piece, scale)
                clock.end_backward()

    def first_seconds(self) -> tuple[float, float]:
        """What the first forward and the first backward of a step take more than the same ones later, for each
        parameter: behind a pause, with no gradient made yet."""
        length, slices, micros = 64, 2, 8
        clock = _Clock()
        stage, batch = self.stage((length,) * slices, 1, 0, clock), self.batch(length * slices, 1)
        more: tuple[list[float], list[float]] = ([], [])
        for number in range(MOST_REPEATS):
            for parameter in self.parameters:
                parameter.grad = None
            clock.clear()
            barrier()
            time.sleep(PAUSE_S)
            self._run(stage, batch, slices, micros, clock, pause_s=PAUSE_S)
            for seconds, read in zip(more, (clock.forwards, clock.backwards), strict=True):
                first, *later = (sum(value for _, value in read(micro * slices)) for micro in range(micros))
                if number:
                    seconds.append(first - statistics.median(later))
        count = sum(parameter.numel() for parameter in self.parameters)
        forward, backward = (max(0.0, statistics.median(seconds)) / count for seconds in more)
        return forward, backward

    def _freeze(self, frozen: bool) -> None:
        for name, layer in self.layers.items():
            if name != EMBEDDING:  # whose output must ask for a gradient, so that blocks compute theirs
                layer.requires_grad_(not frozen)


class _Clock:
    """When layers were entered and when gradients of their inputs were complete, slice by slice."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._forward: list[list[tuple[str, float]]] = []
        self._backward: list[list[tuple[str, float]]] = []

    def begin_forward(self) -> None:
        self._forward.append([])

    def enter(self, kind: str) -> None:
        self._forward[-1].append((kind, time.perf_counter()))

    def end_forward(self) -> None:
        self._forward[-1].append(("", time.perf_counter()))

    def begin_backward(self) -> None:
        self._backward.append([("", time.perf_counter())])

    def leave(self, kind: str) -> None:
        self._backward[-1].append((kind, time.perf_counter()))

    def end_backward(self) -> None:
        self._backward[-1].append((EMBEDDING, time.perf_counter()))

    def forwards(self, index: int) -> Iterator[tuple[str, float]]:
        marks = self._forward[index]
        for (kind, began), (_, ended) in itertools.pairwise(marks):
            yield kind, ended - began

    def backwards(self, index: int) -> Iterator[tuple[str, float]]:
        marks = self._backward[index]
        for (_, began), (kind, ended) in itertools.pairwise(marks):
            yield kind, ended - began


class _Timed(nn.Module):
    """A layer that reports to a clock and whose caches pretend to hold `start` tokens."""

    def __init__(self, layer: nn.Module, kind: str, start: int, clock: _Clock) -> None:
        super().__init__()
        self.layer, self.kind, self.start, self.clock = layer, kind, start, clock

    def make_cache(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> Any:
        make: Any = getattr(self.layer, "make_cache", None)
        if make is None:
            return None
        cache = make(batch, self.start + capacity, dtype, device)
        with torch.no_grad():
            for x in (cache.k, cache.v):
                x[:, : self.start].normal_()
        return cache

    def forward(self, hidden: Tensor, cache: Any, mask: Mask, positions: Tensor) -> Tensor:
        if cache is not None and cache.length == 0:
            cache.position[LENGTH] = self.start
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.clock.leave(self.kind))
        self.clock.enter(self.kind)
        return self.layer(hidden, cache, mask, positions)


def _kind(name: str) -> str:
    return name if name in (EMBEDDING, HEAD) else BLOCK


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


# ---------------------------------------------------------------------------------------------------- links, overheads


def measure_links() -> dict[str, LinkModel]:
    """Latency and bandwidth between ranks 0 and 1 by kind of link, from transfers there and back; the kind that the
    engine would choose first."""
    kinds = ["dist"] if shm_missing() else ["shm", "dist"]
    everyone = dist.new_group(backend="gloo")
    return {kind: _measure_link(kind, everyone) for kind in kinds}


def _measure_link(kind: str, everyone: dist.ProcessGroup) -> LinkModel:
    """Each transfer finds its receiver asleep, as one that waits for a slice is; both ends' pauses are taken off."""
    rank, key = dist.get_rank(), (0, 0, 0)
    groups = [dist.new_group([0, 1]) if kind == "dist" else everyone for _ in range(2)]
    crowded = dist.get_world_size() * torch.get_num_threads() > len(os.sched_getaffinity(0))
    options = {"spin_s": 0.0} if kind == "shm" and crowded else {}  # as the engine chooses
    times: list[float] = []
    if rank < 2:
        cpu, shape = torch.device("cpu"), (max(LINK_BYTES),)
        out, back = (
            open_link(kind, LinkSpec(end, 1 - end, way, torch.uint8, cpu, 1, {key: 0}, shape), group=group, **options)
            for end, way, group in zip((0, 1), "FB", groups, strict=True)
        )
        mine, other = (out, back) if rank == 0 else (back, out)
        for size in LINK_BYTES:
            x = torch.zeros(size, dtype=torch.uint8)
            for _ in range(3 + MOST_REPEATS):
                for link in (out, back):
                    link.expect([(key, (size,))])
                if rank == 1:
                    other.take(key)
                    other.release(key)
                began = time.perf_counter()
                time.sleep(LINK_PAUSE_S)
                paused = time.perf_counter()
                mine.put(key, x)
                if rank == 0:
                    other.take(key)
                    other.release(key)
                for link in (out, back):
                    link.finish()
                # Rank 0: from its put to the answer. Rank 1: how long the answer was held back.
                times.append(time.perf_counter() - paused if rank == 0 else paused - began)
        for link in (out, back):
            link.close()
    everybody: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, times)
    turns = 3 + MOST_REPEATS
    one_way = [(there - held) / 2 for there, held in zip(*everybody[:2], strict=True)]
    medians = [
        (size, max(1e-9, statistics.median(one_way[index * turns + 3 : (index + 1) * turns])))
        for index, size in enumerate(LINK_BYTES)
    ]
    rows = [[1 / seconds, size / seconds] for size, seconds in medians]
    latency, per_byte = non_negative_least_squares(rows, [1.0] * len(rows))
    return LinkModel(latency, 1 / max(per_byte, 1e-15))


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


def measure_overheads(bench: _Bench, settings: OptimizerSettings, link: LinkModel | None) -> list[float]:
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
    """Links, and what actions and steps cost this host where one rank at a time is at work; a collective call."""
    links = measure_links()
    first = dist.get_rank() == 0
    shared = [_action_seconds() if first else 0.0]
    dist.broadcast_object_list(shared, src=0)
    return links, Overheads(action_s=shared[0], step_s=_step_seconds(shared[0], next(iter(links.values()))))


def _step_seconds(action_s: float, link: LinkModel) -> float:
    """What a step over all ranks takes beyond its actions and transfers."""
    ranks = dist.get_world_size()
    plan = make_plan(layers=ranks, ranks=ranks, slices=1, tokens=1)
    cost = LinkCost(link.latency_s, link.bytes_per_s, 4)
    explained = simulate(plan.schedule, lambda action: action_s, links=cost).makespan
    return max(0.0, _step_of_nothing(ranks=ranks, slices=1, links="auto") - float(explained))


def _action_seconds() -> float:
    """Of the interpreter, the stage and autograd for one action, right behind work: their code and data are cold."""
    slices, rested, evicted = 16, list[float](), torch.zeros(EVICTED_BYTES // 4)

    def rest() -> None:
        began = time.perf_counter()
        time.sleep(LINK_PAUSE_S / 2)
        evicted.add_(1.0)
        rested.append(time.perf_counter() - began)

    step_s = _step_of_nothing(ranks=1, slices=slices, links="local", rest=rest)
    return max(0.0, step_s - statistics.mean(rested) * 2 * slices) / (2 * slices)


def _step_of_nothing(*, ranks: int, slices: int, links: str, rest: Callable[[], None] | None = None) -> float:
    """Seconds of an engine's step whose layers do next to nothing, one token a slice."""
    plan = make_plan(layers=ranks, ranks=ranks, slices=slices, tokens=slices)
    parts = [_Nothing(first=index == 0, rest=rest) for index in range(ranks)]
    tokens = torch.zeros(1, slices, dtype=torch.int64)
    seconds = []
    with Pipeline(parts, plan, hidden_size=1, loss=lambda x, targets: x.sum(), links=links) as pipeline:
        for _ in range(MOST_REPEATS if rest is None else MOST_REPEATS // 2):
            began = time.perf_counter()
            pipeline.step(Batch(tokens, tokens))
            seconds.append(time.perf_counter() - began)
    return statistics.mean(seconds[2:]) if rest is not None else statistics.median(seconds[2:])


def _norm_seconds(bench: _Bench) -> float:
    """Of the gradient's norm, for each parameter."""
    gradients = [p.grad for p in bench.parameters if p.grad is not None]

    def run() -> None:
        torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]).tolist()

    return _median_seconds(run) / sum(gradient.numel() for gradient in gradients)


def _update_seconds(bench: _Bench, settings: OptimizerSettings) -> float:
    """Of the optimizer's update, for each parameter."""
    named = {f"{name}.{local}": p for name, layer in bench.layers.items() for local, p in layer.named_parameters()}
    optimizer = Optimizer(named, settings, steps=1000)
    seconds = _median_seconds(lambda: optimizer.step(1.0))
    return seconds / sum(parameter.numel() for parameter in named.values())


def _median_seconds(run: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(MOST_REPEATS):
        barrier()
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
