"""What several planner tests stand on: a small model, its analytic costs, requests, a plan as a file has it."""

from __future__ import annotations

from functools import cache

from terapipe.models.presets import PRESETS, llama
from terapipe.planner.analytic import analytic_costs
from terapipe.planner.hardware import HARDWARE
from terapipe.planner.plan_file import PlannedRun
from terapipe.planner.request import Request

MODEL = llama(hidden=512, layers=6, heads=8, kv_heads=4, ffn_hidden=1024, vocab=1000, max_tokens=512)


def provider(model=MODEL, name="rtx4090-pcie", sizes=(1, 2)):
    @cache
    def costs_of(tensor):
        return analytic_costs(model, HARDWARE[name], max_tokens=512, micro_sizes=sizes, tensor=tensor)

    return costs_of


def request(**changes):
    wanted = {"ranks": 4, "tokens": 512, "batch": 4, "memory_bytes": 24e9, "unit": 32, "budget_s": 60.0}
    return Request(**{**wanted, **changes})


def planned(found, costs):
    best = found.best.candidate
    return PlannedRun.of(best.plan(), found.best.prediction, costs, layout=best.layout, label=str(best))


def costs_8b(tensor: int = 1, sizes=(1, 3)):
    return analytic_costs(
        PRESETS["llama3_8b"](), HARDWARE["a100-80gb"], max_tokens=8192, micro_sizes=sizes, tensor=tensor
    )
