"""The step that a plan will take with given costs: time, bubble, bytes on every rank. By simulation of its schedule.

An action costs its stage's layers plus the interpreter's overhead; the first forward and the first backward of a stage
cost more (`Overheads`). A transfer costs what its link says. To the schedule's makespan come the step's own work: tied
gradients, the all-reduce over replicas, norm and update, a constant. Memory is weights, gradients, optimizer state and
accumulators, and at its peak what live slices keep and the K/V caches of micros in flight.

The trap: a micro's caches are held whole from its first slice's forward to that slice's backward, whatever the slices.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terapipe.planner.analytic import model_flops
from terapipe.planner.costs import CostModel, Overheads, StageCosts
from terapipe.planner.hardware import HARDWARE
from terapipe.schedule import Bubble, Link, LinkCost, Plan, Simulation, simulate

WAKE_ROUNDS = 3  # of which the last changes steps by less than a thousandth


@dataclass(frozen=True)
class Layout:
    """How many devices share a stage (`tensor`) and a batch (`data`), whether activations are recomputed, and which
    kind of link joins ranks (None: what the costs say)."""

    data: int = 1
    tensor: int = 1
    recompute: bool = False
    link: str | None = None

    def __post_init__(self) -> None:
        for name in ("data", "tensor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of a layout is {getattr(self, name)}; it must be at least 1.")


@dataclass(frozen=True)
class ActionTimes:
    """Seconds of every action by stage, kind and slice, and what a stage's first forward and first backward take
    beside; of transfers by link. What a plan file keeps of the costs."""

    by_kind: Mapping[str, tuple[tuple[float, ...], ...]]  # kind -> [stage][slice]
    first: Mapping[str, tuple[float, ...]]  # "F" and "B" (B or I) -> [stage]
    links: Mapping[Link, LinkCost]

    def of(self, plan: Plan) -> list[float]:
        """Seconds of each of the schedule's actions, in its order."""
        values: list[float] = []
        begun: set[tuple[int, str]] = set()
        for order in plan.schedule.orders:
            for stage, kind, _, piece in order:
                value = self.by_kind[kind][stage][piece]
                first = (stage, "B" if kind == "I" else kind)
                if kind != "W" and first not in begun:
                    begun.add(first)
                    value += self.first[first[1]][stage]
                values.append(value)
        return values


@dataclass(frozen=True)
class Prediction:
    """See the top of this file. `memory_bytes` by rank. `mfu`: share of the devices' peak spent on the model's own
    FLOPs, None where the peak is unknown."""

    step_s: float
    update_s: float  # of step_s: the optimizer's
    makespan_s: float
    bubble: Bubble
    memory_bytes: tuple[float, ...]
    mfu: float | None
    simulation: Simulation
    times: ActionTimes

    @property
    def bubble_share(self) -> float:
        return self.bubble.share


def predict(plan: Plan, costs: CostModel, layout: Layout | None = None) -> Prediction:
    """ValueError when the plan is for another model or needs costs that are not there."""
    layout = layout or Layout()
    if plan.layers != costs.num_layers:
        raise ValueError(
            f"the plan's stages cover {plan.layers} layers, but the costs are of a model with {costs.num_layers} "
            f"(embedding and head counted); use costs of the same model."
        )
    stages = [costs.stage(first, last) for first, last in plan.stages]
    times = action_times(plan, costs, stages, layout)
    simulation = simulate(plan.schedule, times.of(plan), links=times.links)
    if costs.overheads.asleep:
        simulation = _woken(plan, costs.overheads, times, simulation)
    step_s = simulation.makespan + beside(costs, stages, plan.ranks, layout)
    flops = model_flops(costs.model, tokens=plan.tokens, sequences=plan.micros * plan.micro_size * layout.data)
    peak = HARDWARE[costs.hardware].peak_flops if costs.hardware in HARDWARE else None
    devices = plan.ranks * layout.data * layout.tensor
    parameters = [sum(stage.parameters for stage in stages[rank :: plan.ranks]) for rank in range(plan.ranks)]
    return Prediction(
        step_s=step_s,
        update_s=costs.overheads.update_s * max(parameters),
        makespan_s=simulation.makespan,
        bubble=simulation.bubble,
        memory_bytes=memory(plan, stages, simulation, layout),
        mfu=None if peak is None else flops / (step_s * devices * float(peak)),
        simulation=simulation,
        times=times,
    )


def action_times(plan: Plan, costs: CostModel, stages: list[StageCosts], layout: Layout) -> ActionTimes:
    """What the simulator takes, from costs. Stages of the same layers are computed once."""
    slices = list(zip(plan.slices, plan.slice_starts, strict=True))
    overhead, again = costs.overheads, int(layout.recompute)
    known: dict[tuple, dict[str, tuple[float, ...]]] = {}
    tables = []
    for stage in stages:
        key = tuple((id(layer), count) for layer, count in stage.layers)
        if key not in known:
            size = plan.micro_size
            forward = [stage.forward(size, length, start) for length, start in slices]
            inputs = [stage.input_grad(size, length, start) for length, start in slices]
            weights = [stage.weight_grad(size, length, start) for length, start in slices]
            inputs = [i + again * f for i, f in zip(inputs, forward, strict=True)]
            rows = {"F": forward, "I": inputs, "W": weights, "B": [i + w for i, w in zip(inputs, weights, strict=True)]}
            known[key] = {kind: tuple(value + overhead.action_s for value in row) for kind, row in rows.items()}
        tables.append(known[key])
    return ActionTimes(
        {kind: tuple(table[kind] for table in tables) for kind in "FIWB"},
        {
            "F": tuple(stage.parameters * overhead.first_forward_s for stage in stages),
            "B": tuple(stage.parameters * overhead.first_backward_s for stage in stages),
        },
        _links(plan, costs, layout),
    )


def _woken(plan: Plan, overheads: Overheads, times: ActionTimes, simulation: Simulation) -> Simulation:
    """The simulation repeated with overheads by how long each rank slept before an action and in it, which
    depends on the simulation."""
    asleep_s = [seconds - overheads.action_s for seconds in times.of(plan)]
    for _ in range(WAKE_ROUNDS):
        seconds: list[float] = []
        for order in plan.schedule.orders:
            ended = 0.0
            for action in order:
                own_s = asleep_s[len(seconds)]
                waited_s = simulation.start[action] - ended
                ended = simulation.end[action]
                seconds.append(own_s + overheads.woken_action_s(waited_s + own_s))
        simulation = simulate(plan.schedule, seconds, links=times.links)
    return simulation


def _links(plan: Plan, costs: CostModel, layout: Layout) -> dict[Link, LinkCost]:
    size = tuple(float(costs.hand_off_bytes(plan.micro_size, length)) for length in plan.slices)
    ranks = [plan.schedule.stage_rank(stage) for stage in range(len(plan.stages))]
    found: dict[Link, LinkCost] = {}
    for here, there in itertools.pairwise(ranks):
        if here != there:
            model = costs.link(costs.link_kind(here, there, layout.link))
            cost = LinkCost(model.latency_s, model.bytes_per_s, size)
            found |= {Link(here, there, "F"): cost, Link(there, here, "B"): cost}
    return found


def beside(costs: CostModel, stages: Sequence[StageCosts], pipe: int, layout: Layout) -> float:
    """Seconds of a step that are not in the schedule. Stage `chunk * pipe + rank` is on rank `rank`."""
    overhead = costs.overheads
    by_rank = [sum(stage.parameters for stage in stages[rank::pipe]) for rank in range(pipe)]
    seconds = overhead.step_s + (overhead.norm_s + overhead.update_s) * max(by_rank)
    if costs.model.tied_embeddings and pipe > 1:  # each end sends its fp32 gradient to the other
        link = costs.link(costs.link_kind(0, pipe - 1, layout.link))
        gradient = costs.model.vocab * costs.model.hidden * 4 / costs.tensor
        seconds += 2 * (link.latency_s + gradient / link.bytes_per_s)
    if layout.data > 1:  # a ring over the replicas, which are laid out after tensor and pipe: all gradients, twice
        kind = costs.link_kind(0, pipe * (layout.data - 1), layout.link)
        link = costs.link(kind)
        # "inter" is what all devices of a stage have together; here each of them reduces its own part.
        rate = link.bytes_per_s / (costs.tensor if kind == "inter" else 1)
        parts = 2 * (layout.data - 1)
        seconds += parts * (link.latency_s + max(by_rank) * 4 / layout.data / rate)
    return seconds


def memory(plan: Plan, stages: list[StageCosts], simulation: Simulation, layout: Layout) -> tuple[float, ...]:
    """Peak bytes of every rank."""
    size, tokens = plan.micro_size, plan.tokens
    held = [
        [
            stage.saved_bytes(size, length, recompute=layout.recompute)
            + (stage.cache_bytes(size, tokens) if piece == 0 else 0.0)
            for piece, length in enumerate(plan.slices)
        ]
        for stage in stages
    ]

    peaks = simulation.peaks(lambda action: held[action.stage][action.slice])
    # What a backward computes again lives as long as it runs.
    again = [stage.saved_bytes(size, max(plan.slices)) if layout.recompute else 0.0 for stage in stages]
    fixed = [stage.fixed_bytes(size, tokens) for stage in stages]
    ranks = [plan.schedule.rank_stages(rank) for rank in range(plan.ranks)]
    return tuple(
        sum(fixed[stage] for stage in own) + max(again[stage] for stage in own) + peak
        for own, peak in zip(ranks, peaks, strict=True)
    )
