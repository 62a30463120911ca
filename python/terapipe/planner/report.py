"""Text for people: cost models, plans, what was not chosen. Plain strings; nothing here decides anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from terapipe.planner.costs import FREE_LINK, PASSES, CostModel

if TYPE_CHECKING:
    from terapipe.planner.plan_file import PlannedRun
    from terapipe.planner.request import Request
    from terapipe.planner.search import Found, Ranked
    from terapipe.schedule import Simulation

SHOWN_LENGTHS = 6


def seconds(value: float) -> str:
    """A time with the unit that leaves one to three digits before the point."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * scale >= 1 or unit == "us":
            return f"{value * scale:.3g} {unit}"
    raise AssertionError


def size(value: float) -> str:
    """A number of bytes with its unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Aligned text; the first column to the left, numbers to the right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) if index == 0 else cell.rjust(width) for index, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def describe_costs(costs: CostModel) -> str:
    """The cost model: what a slice of some lengths costs each kind of layer, alone and behind a prefix of the same
    length, and the links."""
    model = costs.model
    lengths = [costs.max_tokens >> shift for shift in range(SHOWN_LENGTHS) if costs.max_tokens >> shift][::-1]
    micro = costs.micro_sizes[0] if costs.micro_sizes else 1
    head = [f"micro size {micro}", *(f"{length} tokens" for length in lengths)]
    rows = [head]
    for kind, layer in costs.layers.items():
        for name in PASSES:
            cost = getattr(layer, name)[micro]
            rows.append([f"{kind} {name}", *(seconds(cost(length, 0)) for length in lengths)])
            behind = [seconds(cost(length, length)) for length in lengths[:-1]]
            if behind and any(cost(length, length) != cost(length, 0) for length in lengths[:-1]):
                rows.append(["  behind as many", *behind, "-"])
    links = [
        f"link {kind}: "
        + ("free" if link == FREE_LINK else f"latency {seconds(link.latency_s)}, {link.bytes_per_s / 1e9:.3g} GB/s")
        for kind, link in costs.links.items()
    ]
    overheads = costs.overheads
    for_parameters = sum(v for name, v in vars(overheads).items() if name not in ("action_s", "step_s", "asleep"))
    notes = []
    for name, value in costs.notes.items():
        if isinstance(value, Mapping):
            notes += [f"{name}:", *(f"  {key}: {item}" for key, item in value.items())]
        else:
            notes.append(f"{name}: {value}")
    return "\n".join(
        [
            f"costs ({costs.source}) of {model.layers} blocks, hidden {model.hidden}, {costs.dtype}, on "
            f"{costs.hardware}, tensor degree {costs.tensor}; micro sizes {', '.join(map(str, costs.micro_sizes))}",
            columns(rows),
            *links,
            f"overheads: {seconds(overheads.action_s)} per action, {seconds(overheads.step_s)} per step, "
            f"{seconds(for_parameters * 1e6)} per million parameters",
            *notes,
        ]
    )


# --------------------------------------------------------------------------------------------------------------- plans


def describe_found(found: Found, request: Request, planned: PlannedRun) -> str:
    """The chosen plan and its prediction, and for each kind of plan that lost the best of it and why it lost."""
    best, prediction = found.best, found.best.prediction
    memory = prediction.memory_bytes
    lines = [
        f"plan: {best.candidate}",
        f"  slices of tokens: {_runs(best.candidate.slices)}",
        f"  layers per stage (embedding and head counted): {_runs([b - a for a, b in best.candidate.stages])}",
        f"predicted step {seconds(prediction.step_s)}: {_parts_text(best)}",
        f"bubble {prediction.bubble_share:.1%}; memory {size(min(memory))} to {size(max(memory))} per rank, "
        f"{_cap(request.memory_bytes)}"
        + (f"; MFU {prediction.mfu:.1%}" if prediction.mfu is not None else "")
        + f"; costs {planned.source}, {planned.hardware}",
        "",
        f"{found.candidates} plans: {len(found.ranked)} simulated, {found.ruled_out} ruled out by a bound of time or "
        f"memory"
        + (f", {found.left_out} left out for want of time" if found.left_out else "")
        + f"; {found.seconds:.1f} s",
    ]
    rows = [["other plans", "step", "ratio", "why"]]
    for name, one in _losers(found):
        step = one.prediction.step_s
        rows.append(
            [f"{name}: {one.candidate}", seconds(step), f"{step / prediction.step_s:.3f}", _why(one, best, request)]
        )
    if len(rows) > 1:
        lines.append(columns(rows))
    return "\n".join(lines)


def describe_run(planned: PlannedRun, simulation: Simulation) -> str:
    """The step of a plan file, rank by rank."""
    schedule, bubble, makespan = simulation.schedule, simulation.bubble, float(simulation.makespan)
    rows = [["rank", "layers", "busy", "idle", "first action", "last ends", "live slices", "memory"]]
    for rank in range(schedule.ranks):
        stages = [planned.plan.stages[stage] for stage in schedule.rank_stages(rank)]
        times = [(simulation.start[action], simulation.end[action]) for action in schedule[rank]]
        busy = float(simulation.busy(rank))
        rows.append(
            [
                str(rank),
                " ".join(f"[{first}, {last})" for first, last in stages),
                seconds(busy),
                seconds(makespan - busy),
                seconds(float(times[0][0])),
                seconds(float(times[-1][1])),
                f"{simulation.peak_live(rank)}",
                size(planned.memory_bytes[rank]),
            ]
        )
    share = {
        name: getattr(bubble, f"{name}_s") / bubble.rank_time_s for name in ("warmup", "imbalance", "communication")
    }
    parts = ", ".join(f"{name} {value:.1%}" for name, value in share.items())
    return "\n".join(
        [
            f"{planned.label}",
            f"slices of tokens: {_runs(planned.plan.slices)}",
            f"predicted step {seconds(planned.step_s)}, of it the schedule {seconds(makespan)}; bubble "
            f"{bubble.share:.1%} ({parts}); costs {planned.source}, {planned.hardware}",
            columns(rows),
        ]
    )


def found_rows(found: Found) -> list[dict[str, Any]]:
    """Every simulated plan, for programs."""
    return [
        {
            "plan": str(one.candidate),
            "schedule": one.candidate.schedule,
            "slices": list(one.candidate.slices),
            "micros": one.candidate.micros,
            "micro_size": one.candidate.micro_size,
            "warmup_per_hop": one.candidate.warmup_per_hop,
            "chunks": one.candidate.chunks,
            "pipe": one.candidate.pipe,
            "data": one.candidate.layout.data,
            "tensor": one.candidate.layout.tensor,
            "recompute": one.candidate.layout.recompute,
            "stages": [list(stage) for stage in one.candidate.stages],
            "step_s": one.prediction.step_s,
            "bubble_share": one.prediction.bubble_share,
            "memory_bytes": max(one.prediction.memory_bytes),
            "mfu": one.prediction.mfu,
            "fits": one.fits,
        }
        for one in found.ranked
    ]


def _losers(found: Found) -> list[tuple[str, Ranked]]:
    """The runner-up, and the best of each kind that is not the chosen plan's."""
    best = found.best.candidate
    kinds: dict[str, Callable[[Ranked], bool]] = {
        "runner-up": lambda one: one is not found.best,
        "without slices": lambda one: len(one.candidate.slices) == 1,
        "with slices": lambda one: len(one.candidate.slices) > 1,
        "another schedule": lambda one: one.candidate.schedule != best.schedule,
        "another pipe, data, tensor": lambda one: (
            (one.candidate.pipe, one.candidate.layout.data, one.candidate.layout.tensor)
            != (best.pipe, best.layout.data, best.layout.tensor)
        ),
        "recompute": lambda one: one.candidate.layout.recompute and not best.layout.recompute,
        "no recompute": lambda one: best.layout.recompute and not one.candidate.layout.recompute,
        "does not fit": lambda one: not one.fits,
    }
    chosen: dict[str, Ranked] = {}
    for name, belongs in kinds.items():
        for one in found.ranked:
            same = one is found.best or any(one is other for other in chosen.values())
            if belongs(one) and (one.fits or name == "does not fit"):
                if not same:
                    chosen[name] = one
                break
    return list(chosen.items())


def _parts(one: Ranked) -> dict[str, float]:
    """Seconds of a step by what they are spent on, means over ranks."""
    prediction = one.prediction
    bubble, ranks = prediction.bubble, one.candidate.pipe
    return {
        "work": prediction.makespan_s - bubble.idle_s / ranks,
        "warm-up": bubble.warmup_s / ranks,
        "unequal slices and stages": bubble.imbalance_s / ranks,
        "links": bubble.communication_s / ranks,
        "reduction and update": prediction.step_s - prediction.makespan_s,
    }


def _parts_text(one: Ranked) -> str:
    return ", ".join(
        f"{name} {seconds(value)}" for name, value in _parts(one).items() if value > 0.0005 * one.prediction.step_s
    )


def _why(loser: Ranked, best: Ranked, request: Request) -> str:
    if not loser.fits:
        needs = max(loser.prediction.memory_bytes)
        return f"needs {size(needs)}, {size(needs - request.memory_bytes)} too much"
    mine, its = _parts(best), _parts(loser)
    more = {name: its[name] - mine[name] for name in its}
    name = max(more, key=lambda key: more[key])
    if loser.prediction.step_s <= best.prediction.step_s * 1.0005:
        return "equally fast"
    return f"{seconds(more[name])} more for {name}"


def _cap(memory: float) -> str:
    return "no cap" if memory == float("inf") else f"cap {size(memory)}"


def _runs(values: Sequence[int]) -> str:
    """`3 x 128, 64`: equal neighbours together."""
    parts: list[list[int]] = []
    for value in values:
        if parts and parts[-1][1] == value:
            parts[-1][0] += 1
        else:
            parts.append([1, value])
    return ", ".join(f"{count} x {value}" if count > 1 else str(value) for count, value in parts)
