"""What a step could be: every combination of slices, micro size, schedule, warm-up, recomputation, (pipe, data, tensor)
and stages, each with bounds that are cheap to tell.

The bounds are a lower bound of the step time (the slowest rank's work, and the way of the first slice to it) and one of
the memory. Slices are exact for the slowest stage: the paper's objective, and equal costs in several numbers; beside
them slices of equal length, and none at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from terapipe.planner.costs import CostModel, StageCosts
from terapipe.planner.partition import split_by_time
from terapipe.planner.prediction import Layout, beside
from terapipe.planner.request import CostsOf, Reasons, Request, check_unit, counted, in_tokens, listed
from terapipe.planner.slicing import cost_table, equal_cost_slices, slice_sequence
from terapipe.schedule import GENERATORS, Plan, Schedule

MOST_ACTIONS = 400_000  # of a schedule that is simulated as it is
SLICE_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
WARMUPS = (1, 2, 3)


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
            parts.append(f"{self.chunks} stages per rank")
        parts.append(f"micros {self.micros} x {self.micro_size}")
        parts.append(f"pipe {self.pipe} x data {self.layout.data} x tensor {self.layout.tensor}")
        if self.layout.recompute:
            parts.append("recompute")
        return ", ".join(parts)

    def plan(self) -> Plan:
        """The plan of this candidate; ValueError if its schedule could deadlock or its sizes do not fit."""
        return Plan(self.slices, self.micros, self.micro_size, self.stages, self.make_schedule())

    def make_schedule(self) -> Schedule:
        return _schedule(self.schedule, self.pipe, self.micros, len(self.slices), self.warmup_per_hop, self.chunks)


def candidates_of(request: Request, costs_of: CostsOf) -> Iterator[Candidate]:
    """ValueError, with values and remedy, when sizes do not divide or no schedule fits them."""
    found, why = False, Reasons()
    unit = check_unit(request.tokens, request.unit)
    for tensor in sorted(set(request.tensor)):
        try:
            costs = costs_of(tensor)
        except ValueError as error:
            why.tensor.append(str(error).removesuffix("."))
            continue
        if request.ranks % tensor:
            why.ranks.append(f"tensor {tensor} does not divide {request.ranks} ranks")
            continue
        devices = request.ranks // tensor
        if request.data is not None and all(devices % data for data in request.data):
            why.ranks.append(f"data {listed(request.data)} does not divide {counted(devices, 'rank')}")
        for data in request.data or (1,):
            if devices % data == 0 and devices // data > costs.num_layers:
                why.ranks.append(f"{devices // data} stages for {costs.num_layers} layers (embedding and head counted)")
        for pipe in range(1, min(devices, costs.num_layers) + 1):
            data, rest = divmod(devices, pipe)
            if rest or (request.data is not None and data not in request.data):
                continue
            if request.batch % data:
                why.ranks.append(f"{data} replicas do not divide a batch of {request.batch}")
                continue
            sizes = request.sizes(costs)
            if not any(request.batch // data % size == 0 for size in sizes):
                why.others.append(_no_micro_size(request, costs, request.batch // data))
                continue
            begun = found
            for one in _of_layout(request, costs, pipe, data, unit):
                found = True
                yield one
            if found == begun:
                why.others.append(_no_schedule(request, costs, pipe))
    if not found:
        raise ValueError(why.text(request, costs_of))


def _of_layout(request: Request, costs: CostModel, pipe: int, data: int, unit: int) -> Iterator[Candidate]:
    batch = request.batch // data
    for recompute in request.recompute:
        layout = Layout(data, costs.tensor, recompute, request.link)
        for micro_size in (n for n in request.sizes(costs) if batch % n == 0):
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
            # With several stages per rank, their caches need not be alive at the same time.
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
        actions = 3 * self.pipe * self.chunks * self.micros * slices
        for name, warmup in _schedules(self.pipe, self.chunks, slices):
            if name in self.request.schedules and actions <= MOST_ACTIONS:
                yield name, warmup

    def _hop_s(self, length: int) -> float:
        if self.pipe == 1:
            return 0.0
        return self.costs.transfer(self.costs.link_kind(0, 1, self.layout.link), self.micro_size, length)


def _schedules(pipe: int, chunks: int, slices: int) -> list[tuple[str, int]]:
    """Names and warm-ups of the schedules for so many ranks, stages per rank and slices."""
    if chunks > 1:
        return [("interleaved" if slices == 1 else "seq_interleaved", 1)]
    if pipe == 1:
        return [("one_f_one_b" if slices == 1 else "seq_1f1b", 1)]
    names = [("gpipe", 1), ("one_f_one_b", 1)] if slices == 1 else [("terapipe", 1), ("seq_1f1b", 1)]
    names += [("seq_1f1b", warmup) for warmup in WARMUPS[1:]]
    return [*names, *(("seq_zero_bubble", warmup) for warmup in WARMUPS[:2])]


class _StageTimes(NamedTuple):
    """What all slices of one micro cost a stage; `largest_unsplit_s` is without the weight gradient."""

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
    units = math.ceil(request.tokens / unit)
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
        lengths = in_tokens(slices, unit, request.tokens)
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


def _no_micro_size(request: Request, costs: CostModel, sequences: int) -> str:
    """Why the sequences of a replica cannot be cut into micros."""
    sizes = request.sizes(costs)
    if not sizes:
        return (
            f"there are costs for micro size {listed(costs.micro_sizes)}, not for {listed(request.micro_sizes or ())}"
        )
    return f"no micro size of {listed(sizes)} divides the {counted(sequences, 'sequence')} of a replica"


def _no_schedule(request: Request, costs: CostModel, pipe: int) -> str:
    """Why a layout whose sizes divide has no candidate."""
    cuts = {1, 2} if request.slices is None and pipe > 1 else {1 if request.slices is None else len(request.slices)}
    chunks = [1, *(n for n in request.chunks if 1 < n * pipe <= costs.num_layers and pipe > 1)]
    fit = {name for slices in cuts for n in chunks for name, _ in _schedules(pipe, n, slices)}
    if fit & set(request.schedules):
        return (
            f"every schedule has more than {MOST_ACTIONS} actions; use larger slices, larger micros or a smaller batch"
        )
    given = "" if request.slices is None else f" with {counted(len(request.slices), 'slice')}"
    return (
        f"pipe {pipe}{given} is run by {listed(name for name in GENERATORS if name in fit)}, not by "
        f"{listed(request.schedules)}"
    )
