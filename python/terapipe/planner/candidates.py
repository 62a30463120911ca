"""What a step could be: every combination of slices, micro size, schedule, warm-up, recomputation, (pipe, data, tensor)
and stages, each with bounds that are cheap to tell.

The bounds are a lower bound of the step time (the slowest rank's work, and the way of the first slice to it) and one of
the memory. Slices are exact for the slowest stage: the paper's objective, and equal costs in several numbers; beside
them slices of equal length, and none at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from terapipe.planner.costs import CostModel, StageCosts
from terapipe.planner.partition import split_by_time
from terapipe.planner.prediction import Layout, beside
from terapipe.planner.slicing import cost_table, equal_cost_slices, slice_sequence
from terapipe.schedule import GENERATORS, Plan, Schedule

MOST_UNITS = 256
MOST_ACTIONS = 400_000  # of a schedule that is simulated as it is
SLICE_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
WARMUPS = (1, 2, 3)
BUDGET_S = 6.0

CostsOf = Callable[[int], CostModel]
"""The costs at a tensor degree; ValueError for one that cannot be."""


@dataclass(frozen=True)
class Request:
    """What is asked for. ranks: devices in all. batch: sequences of a step, over all replicas. memory_bytes: of a
    device. unit: tokens by which slices are cut (None: at most 256 units). tensor: degrees to try."""

    ranks: int
    tokens: int
    batch: int
    memory_bytes: float
    unit: int | None = None
    tensor: tuple[int, ...] = (1,)
    schedules: tuple[str, ...] = tuple(GENERATORS)
    chunks: tuple[int, ...] = (2, 4)
    recompute: tuple[bool, ...] = (False, True)
    data: tuple[int, ...] | None = None  # None: any
    micro_sizes: tuple[int, ...] | None = None
    slices: tuple[int, ...] | None = None  # these lengths alone
    link: str | None = None
    budget_s: float = BUDGET_S


@dataclass(frozen=True)
class Candidate:
    """One combination. `slices` in tokens, `stages` layer ranges."""

    pipe: int
    layout: Layout
    micros: int
    micro_size: int
    schedule: str
    warmup_per_hop: int
    chunks: int
    slices: tuple[int, ...]
    stages: tuple[tuple[int, int], ...]
    estimate_s: float = field(compare=False)
    bound_s: float = field(compare=False)
    least_bytes: float = field(compare=False)

    def __str__(self) -> str:
        cut = f"{len(self.slices)} slices" if len(self.slices) > 1 else "no slices"
        parts = [self.schedule, cut]
        if self.warmup_per_hop > 1:
            parts.append(f"warm-up {self.warmup_per_hop}")
        if self.chunks > 1:
            parts.append(f"{self.chunks} stages a rank")
        parts.append(f"micros {self.micros} x {self.micro_size}")
        parts.append(f"pipe {self.pipe} x data {self.layout.data} x tensor {self.layout.tensor}")
        if self.layout.recompute:
            parts.append("recompute")
        return ", ".join(parts)

    def plan(self) -> Plan:
        """Checked."""
        return Plan(self.slices, self.micros, self.micro_size, self.stages, self.make_schedule())

    def make_schedule(self) -> Schedule:
        return _schedule(self.schedule, self.pipe, self.micros, len(self.slices), self.warmup_per_hop, self.chunks)


def check_unit(tokens: int, unit: int | None) -> int:
    """The unit of slices: given and dividing, or the smallest divisor that leaves at most 256 units."""
    if unit is None:
        return next(n for n in range(max(1, math.ceil(tokens / MOST_UNITS)), tokens + 1) if tokens % n == 0)
    if unit < 1 or tokens % unit:
        near = [n for n in range(max(1, unit // 2), 2 * max(1, unit)) if tokens % n == 0]
        lengths = f"{tokens // unit * unit} or {(tokens // unit + 1) * unit} tokens" if unit > 0 else ""
        raise ValueError(
            f"a unit of {unit} tokens does not divide a sequence of {tokens}; use a unit such as "
            f"{', '.join(map(str, near[:4])) or 1}" + (f", or sequences of {lengths}." if lengths else ".")
        )
    return unit


def candidates_of(request: Request, costs_of: CostsOf) -> Iterator[Candidate]:
    """ValueError, with values and remedy, when sizes do not divide."""
    found, reasons = False, []
    unit = check_unit(request.tokens, request.unit)
    for tensor in sorted(set(request.tensor)):
        if request.ranks % tensor:
            reasons.append(f"tensor {tensor} does not divide {request.ranks} ranks")
            continue
        try:
            costs = costs_of(tensor)
        except ValueError as error:
            reasons.append(str(error))
            continue
        for pipe in range(1, request.ranks // tensor + 1):
            data, rest = divmod(request.ranks // tensor, pipe)
            if rest or (request.data is not None and data not in request.data):
                continue
            if request.batch % data:
                reasons.append(f"{data} replicas do not divide a batch of {request.batch}")
                continue
            if pipe > costs.num_layers:
                reasons.append(f"{pipe} stages for {costs.num_layers} layers (embedding and head counted)")
                continue
            for one in _of_layout(request, costs, pipe, data, unit):
                found = True
                yield one
    if not found:
        raise ValueError(_no_factors(request, costs_of, reasons))


def _of_layout(request: Request, costs: CostModel, pipe: int, data: int, unit: int) -> Iterator[Candidate]:
    batch = request.batch // data
    sizes = [n for n in costs.micro_sizes if request.micro_sizes is None or n in request.micro_sizes]
    for recompute in request.recompute:
        layout = Layout(data, costs.tensor, recompute, request.link)
        for micro_size in (n for n in sizes if batch % n == 0):
            micros = batch // micro_size
            for chunks in dict.fromkeys((1, *(request.chunks if pipe > 1 else ()))):
                if pipe * chunks > costs.num_layers:
                    continue
                stages = _stages(costs, pipe * chunks, micro_size, request.tokens, recompute)
                setting = _Setting(request, costs, pipe, layout, micros, micro_size, chunks, stages)
                for slices in _slicings(setting, unit):
                    yield from setting.candidates(slices)


class _Setting:
    """All but slices and schedule, with what bounds need. Stages of the same layers are looked at once."""

    def __init__(
        self,
        request: Request,
        costs: CostModel,
        pipe: int,
        layout: Layout,
        micros: int,
        micro_size: int,
        chunks: int,
        stages: tuple[tuple[int, int], ...],
    ) -> None:
        self.request, self.costs, self.pipe, self.layout = request, costs, pipe, layout
        self.micros, self.micro_size, self.chunks, self.stages = micros, micro_size, chunks, stages
        every = [costs.stage(first, last) for first, last in stages]
        names = [tuple((id(layer), count) for layer, count in stage.layers) for stage in every]
        self.kinds = dict(zip(names, every, strict=True))
        self.kind_of = names
        self.beside_s = beside(costs, every, pipe, layout)
        tokens, again = request.tokens, layout.recompute
        fixed = {
            # With several stages a rank, their caches need not be alive at the same time.
            name: stage.fixed_bytes(micro_size, tokens)
            + (stage.cache_bytes(micro_size, tokens) if chunks == 1 else 0.0)
            for name, stage in self.kinds.items()
        }
        self.fixed_bytes = [sum(fixed[name] for name in names[rank::pipe]) for rank in range(pipe)]
        first = every[::pipe]  # rank 0 keeps most alive
        self.saved_per_token = min(stage.saved_bytes(micro_size, 1, recompute=again) for stage in first)
        self.cache_bytes = min(stage.cache_bytes(micro_size, tokens) for stage in first)

    def slowest(self) -> StageCosts:
        return max(self.kinds.values(), key=lambda stage: _whole(stage, self.micro_size, self.request.tokens))

    def candidates(self, slices: tuple[int, ...]) -> Iterator[Candidate]:
        """One for each schedule that can be made of these slices."""
        times = {name: self._times(stage, slices) for name, stage in self.kinds.items()}
        work = [0.0] * self.pipe
        for index, name in enumerate(self.kind_of):
            work[index % self.pipe] += self.micros * times[name].total_s
        first = [times[name] for name in self.kind_of[: self.pipe]]
        reached = bound = 0.0  # when the first slice is at a rank; a rank's work comes after
        for rank, stage in enumerate(first):
            bound = max(bound, work[rank] + reached)
            reached += stage.first_forward_s + self._hop_s(slices[0])
        slowest = max(range(self.pipe), key=lambda rank: work[rank])
        hops = 2 * (self.pipe - 1) * self._hop_s(max(slices))
        for schedule, warmup in self._schedules(len(slices)):
            split = GENERATORS[schedule].splits_backward
            # The paper's form: all work of the slowest, and the largest slice of every other stage on the way.
            others = sum(t.largest_unsplit_s if split else t.largest_s for t in first)
            others -= first[slowest].largest_unsplit_s if split else first[slowest].largest_s
            live = _least_live(schedule, self.pipe, self.micros, len(slices), warmup, self.chunks)
            micros, rest = divmod(live, len(slices))
            tokens = micros * self.request.tokens + rest * min(slices)
            alive = tokens * self.saved_per_token
            if self.chunks == 1:
                alive += max(0, micros - 1) * self.cache_bytes
            yield Candidate(
                self.pipe,
                self.layout,
                self.micros,
                self.micro_size,
                schedule,
                warmup,
                self.chunks,
                slices,
                self.stages,
                estimate_s=work[slowest] + others + hops + self.beside_s,
                bound_s=bound + self.beside_s,
                least_bytes=max(self.fixed_bytes[0] + alive, *self.fixed_bytes),
            )

    def _times(self, stage: StageCosts, slices: tuple[int, ...]) -> _StageTimes:
        again, overhead, size = int(self.layout.recompute), self.costs.overheads.action_s, self.micro_size
        start, total, rows = 0, 0.0, []
        for length in slices:
            forward = stage.forward(size, length, start) + overhead
            inputs = stage.input_grad(size, length, start) + again * forward + overhead
            weights = stage.weight_grad(size, length, start)
            rows.append((forward + inputs, weights))
            total += forward + inputs + weights
            start += length
        first_forward = stage.forward(size, slices[0], 0) + overhead
        return _StageTimes(total, first_forward, max(a + b for a, b in rows), max(a for a, _ in rows))

    def _schedules(self, slices: int) -> Iterator[tuple[str, int]]:
        if self.chunks > 1:
            names = [("interleaved" if slices == 1 else "seq_interleaved", 1)]
        elif self.pipe == 1:
            names = [("one_f_one_b" if slices == 1 else "seq_1f1b", 1)]
        else:
            names = [("gpipe", 1), ("one_f_one_b", 1)] if slices == 1 else [("terapipe", 1), ("seq_1f1b", 1)]
            names += [("seq_1f1b", warmup) for warmup in WARMUPS[1:]]
            names += [("seq_zero_bubble", warmup) for warmup in WARMUPS[:2]]
        for name, warmup in names:
            actions = 3 * self.pipe * self.chunks * self.micros * slices
            if name in self.request.schedules and actions <= MOST_ACTIONS:
                yield name, warmup

    def _hop_s(self, length: int) -> float:
        if self.pipe == 1:
            return 0.0
        return self.costs.transfer(self.costs.link_kind(0, 1, self.layout.link), self.micro_size, length)


class _StageTimes(NamedTuple):
    """Of a stage over all slices of a micro; `largest_unsplit_s` without the weight gradient."""

    total_s: float
    first_forward_s: float
    largest_s: float
    largest_unsplit_s: float


def _slicings(setting: _Setting, unit: int) -> Iterator[tuple[int, ...]]:
    """No slices; the paper's optimum; equal costs and equal lengths in several numbers."""
    request = setting.request
    if request.slices is not None:
        yield request.slices
        return
    seen: set[tuple[int, ...]] = {(request.tokens,)}
    yield (request.tokens,)
    units = request.tokens // unit
    if setting.pipe == 1 or units == 1:
        return
    added = (2.0 + setting.layout.recompute) * setting.costs.overheads.action_s
    table = cost_table(
        setting.slowest().slice_costs(
            setting.micro_size, unit=unit, units=units, added=[added] * units, recompute=setting.layout.recompute
        )
    )
    found: list[tuple[int, ...]] = [slice_sequence(table, stages=setting.pipe, micros=setting.micros).slices]
    most = max(2, 4 * len(found[0]), 2 * setting.pipe // max(1, setting.micros))
    counts = [count for count in SLICE_COUNTS if count <= min(units, most)]
    found += [equal_cost_slices(table, slices=count).slices for count in counts]
    found += [tuple(units // count + (index < units % count) for index in range(count)) for count in counts]
    for slices in found:
        lengths = tuple(length * unit for length in slices)
        if lengths not in seen:
            seen.add(lengths)
            yield lengths


@lru_cache(maxsize=4096)
def _partition(times: tuple[float, ...], stages: int) -> tuple[tuple[int, int], ...]:
    return split_by_time(times, stages)


def _stages(
    costs: CostModel, stages: int, micro_size: int, tokens: int, recompute: bool
) -> tuple[tuple[int, int], ...]:
    """Uneven where embedding, head and loss make it so."""
    times = [
        _whole(costs.stage(index, index + 1), micro_size, tokens, recompute=recompute)
        for index in (0, 1, costs.num_layers - 1)
    ]
    return _partition((times[0], *(times[1] for _ in range(costs.model.layers)), times[2]), stages)


def _whole(stage: StageCosts, micro_size: int, tokens: int, *, recompute: bool = False) -> float:
    return (1 + recompute) * stage.forward(micro_size, tokens, 0) + stage.backward(micro_size, tokens, 0)


@lru_cache(maxsize=256)
def _schedule(name: str, pipe: int, micros: int, slices: int, warmup: int, chunks: int) -> Schedule:
    return GENERATORS[name](pipe, micros, slices, warmup_per_hop=warmup, chunks=chunks)


def _least_live(name: str, pipe: int, micros: int, slices: int, warmup: int, chunks: int) -> int:
    """Slices alive on the first rank, of all its stages; a lower bound."""
    everything = micros * slices * chunks
    if name in ("gpipe", "terapipe"):
        return everything
    return min(everything, warmup * (pipe - 1) + slices)


def _no_factors(request: Request, costs_of: CostsOf, reasons: Sequence[str]) -> str:
    layers = costs_of(1).num_layers if 1 in request.tensor else None
    usable = [
        ranks
        for ranks in range(max(1, request.ranks - 64), request.ranks + 65)
        if ranks != request.ranks
        and any(
            ranks % tensor == 0
            and (ranks // tensor) % data == 0
            and (layers is None or ranks // tensor // data <= layers)
            for tensor in request.tensor
            for data in range(1, request.batch + 1)
            if request.batch % data == 0 and (request.data is None or data in request.data)
        )
    ]
    near = sorted(usable, key=lambda ranks: abs(ranks - request.ranks))[:4]
    why = "; ".join(dict.fromkeys(reasons)) or "no micro size divides the batch of a replica"
    hint = f"; {', '.join(map(str, sorted(near)))} ranks can be used" if near else ""
    return (
        f"{request.ranks} ranks cannot be cut into pipe x data x tensor for a batch of {request.batch}: {why}{hint}; "
        f"or change the batch."
    )
