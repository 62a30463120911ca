"""Whether a step can fit into this host's memory at all, before anything is allocated.

The need is the planner's analytic one (`terapipe.planner`): weights, gradients, optimizer, caches and what the schedule
keeps alive. It is an estimate and knows neither allocators nor other programs; so only a run that needs more than twice
the memory is refused, and one that needs more than all of it is warned of.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from terapipe.models.config import ModelConfig
from terapipe.planner.analytic import analytic_costs
from terapipe.planner.hardware import CPU
from terapipe.planner.prediction import Layout, predict
from terapipe.schedule import Plan
from terapipe.world import World

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
GIB = 2**30


def check_memory(
    plan: Plan, model: ModelConfig, *, dtype: str, recompute: bool, world: World, device: str
) -> str | None:
    """A warning where the ranks here need more than all memory here; ValueError where more than twice as much."""
    costs = analytic_costs(model, CPU, max_tokens=plan.tokens, micro_sizes=(plan.micro_size,), dtype=dtype)
    needs = predict(plan, costs, Layout(recompute=recompute)).memory_bytes
    if device == "cuda":
        here, whose = float(torch.cuda.get_device_properties(0).total_memory), "this GPU"
        need = sum(needs) if world.size == 1 else max(needs)
    else:
        here, whose = host_memory(), "this machine"
        need = sum(needs) * world.local_size / world.size
    message = (
        f"a step needs about {need / GIB:,.1f} GiB here (activations of {plan.tokens} tokens a sequence, weights, "
        f"gradients, optimizer), but {whose} has {here / GIB:,.1f} GiB; take fewer tokens, parallel.recompute, more "
        "ranks on other machines or a smaller model. `terapipe plan` shows what each rank needs."
    )
    if need > 2 * here:
        raise ValueError(message)
    return message if need > here else None


def host_memory() -> float:
    """Bytes of memory that processes here may use: the machine's, or less where their group has a limit."""
    installed = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        return min(installed, float(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such group, or "max"
        return installed
