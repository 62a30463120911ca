"""The plans that a case compares: equal slices in several numbers, slices of equal cost, and the planner's own pick."""

from __future__ import annotations

from typing import Any

from benchmarks.prediction.cases import Case
from terapipe.planner.costs import CostModel
from terapipe.planner.request import Request
from terapipe.planner.search import search
from terapipe.planner.slicing import equal_cost_slices
from terapipe.schedule import Plan, make_plan

UNITS = 64  # that the planner cuts a sequence into
PICK = "pick"  # what the name of the planner's choice begins with


def plans_of(case: Case, costs: CostModel) -> dict[str, Plan]:
    """By variant; the planner's pick comes last."""
    common: dict[str, Any] = {
        "layers": costs.num_layers,
        "ranks": case.ranks,
        "tokens": case.tokens,
        "micros": case.micros,
    }
    plans = {f"{count} slices": make_plan(slices=count, **common) for count in case.slices}
    unit = case.tokens // UNITS
    table = costs.stage(1, 2).slice_costs(1, unit=unit, units=UNITS)
    uneven = tuple(length * unit for length in equal_cost_slices(table, slices=6).slices)
    plans["6 slices of equal cost"] = make_plan(slices=uneven, **common)
    if case.micros > 1:
        plans["seq_1f1b, 4 slices"] = make_plan(slices=4, schedule="seq_1f1b", warmup_per_hop=2, **common)
    found = search(
        Request(
            ranks=case.ranks,
            tokens=case.tokens,
            batch=case.micros,
            memory_bytes=float("inf"),
            unit=unit,
            schedules=("gpipe", "one_f_one_b", "terapipe", "seq_1f1b"),
            recompute=(False,),
            data=(1,),
            micro_sizes=(1,),
        ),
        lambda tensor: costs,
    )
    chosen = found.best.candidate
    return {**plans, f"{PICK}: {chosen.schedule}, {len(chosen.slices)} slices": chosen.plan()}
