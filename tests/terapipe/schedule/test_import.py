"""Schedules, plans and pictures must work where torch is not installed: a laptop, a planner service, a login node."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
for name in ("torch", "numpy", "matplotlib"):
    sys.modules[name] = None  # import raises ImportError
from terapipe.schedule import LinkCost, causal_costs, check, make_plan, simulate, trace
from terapipe.viz import render_html, render_perfetto
plan = make_plan(layers=4, ranks=2, slices=4, tokens=64, micros=2, schedule="seq_1f1b", warmup_per_hop=2)
check(plan.schedule, plan.slots)
simulation = simulate(plan.schedule, causal_costs(plan.slices, attention_share=0.5), links=LinkCost(0.01))
assert "<canvas" in render_html(trace(simulation)) and render_perfetto(trace(simulation))
print(simulation.bubble.share)
"""


def test_schedules_need_no_torch():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < 1
