"""Text for people: cost models, plans, candidates that lost. Plain strings; nothing here decides anything."""

from __future__ import annotations

from collections.abc import Sequence

from terapipe.planner.costs import PASSES, CostModel

SHOWN_LENGTHS = 6


def seconds(value: float) -> str:
    """With a unit that leaves one to three digits before the point."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * scale >= 1 or unit == "us":
            return f"{value * scale:.3g} {unit}"
    raise AssertionError


def size(value: float) -> str:
    """Bytes."""
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
        f"link {kind}: latency {seconds(link.latency_s)}, {link.bytes_per_s / 1e9:.3g} GB/s"
        for kind, link in costs.links.items()
    ]
    overheads = costs.overheads
    notes = [f"{name}: {value}" for name, value in costs.notes.items()]
    return "\n".join(
        [
            f"costs ({costs.source}) of {model.layers} blocks, hidden {model.hidden}, {costs.dtype}, on "
            f"{costs.hardware}, tensor degree {costs.tensor}; micro sizes {', '.join(map(str, costs.micro_sizes))}",
            columns(rows),
            *links,
            f"beside: {seconds(overheads.action_s)} an action, {seconds(overheads.step_s)} a step, "
            f"{seconds((overheads.parameter_s + overheads.first_gradient_s) * 1e6)} for a million parameters",
            *notes,
        ]
    )
