"""What a step was predicted to take beside what it took, in one line at the end of a run.

The prediction is that of the plan file. A run without one predicts its later steps, on a CPU, from the actions of an
early one: the simulator lays their times out as the schedule says, which tells whether anything but the actions takes
time. On a GPU, where a timeline holds launches, from the analytic costs of the device (`terapipe.planner.analytic`; not
run on a GPU yet). The trap: one process that steps several ranks runs their actions one after another, so there they
only add up.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from terapipe.models.config import ModelConfig
from terapipe.planner.analytic import analytic_costs
from terapipe.planner.hardware import HARDWARE, hardware_of_device
from terapipe.planner.prediction import predict
from terapipe.schedule import Plan, TraceEvent, make_plan, simulate
from terapipe.schedule.trace import COMPUTE

WARM_STEPS = 3  # of a process: the actions of the last of them are taken, and later steps are compared


@dataclass(frozen=True)
class StepPrediction:
    """Seconds of a step and where they come from."""

    step_s: float
    origin: str

    def line(self, measured: Sequence[float], *, disturbance: str = "") -> str:
        median = statistics.median(measured)
        error = f"error {self.step_s / median - 1:+.1%}"
        return (
            f"step time: predicted {self.step_s * 1e3:.4g} ms ({self.origin}), measured {median * 1e3:.4g} ms (median "
            f"of {len(measured)} steps), {'; '.join(filter(None, (error, disturbance)))}"
        )


def from_actions(
    plan: Plan, events: Sequence[TraceEvent], step_s: float, *, step: int, together: bool
) -> StepPrediction:
    """From the timeline of a step that took `step_s`. together: one process runs all ranks."""
    work = [event for event in events if event.category == COMPUTE]
    seconds = {action: event.duration_s for event in work if (action := event.action) is not None}
    timeline_s = max(event.end_s for event in work) - min(event.start_s for event in work)
    laid_out = sum(seconds.values()) if together else float(simulate(plan.schedule, seconds).makespan)
    return StepPrediction(laid_out + max(0.0, step_s - timeline_s), f"from the actions of step {step}")


def from_device(
    plan: Plan, model: ModelConfig, device_name: str, *, dtype: str, together: bool
) -> StepPrediction | None:
    """By the analytic costs of the device that its driver calls so; None where no description fits it, or not fp32
    (descriptions have the rates of 16 bits)."""
    device = hardware_of_device(device_name)
    if device is None or (dtype == "fp32" and device.dtype != "fp32"):
        return None
    costs = analytic_costs(model, device, max_tokens=plan.tokens, micro_sizes=(plan.micro_size,), dtype=dtype)
    if together:
        plan = make_plan(
            layers=plan.layers,
            ranks=1,
            slices=plan.slices,
            tokens=plan.tokens,
            micros=plan.micros,
            micro_size=plan.micro_size,
        )
    return StepPrediction(predict(plan, costs).step_s, f"by the analytic costs of {device.name}")


def unpredicted_line(measured: Sequence[float], device_name: str, dtype: str) -> str:
    """What a run says whose device nothing is known of."""
    described = ", ".join(f"{name} in 16 bits" for name, device in HARDWARE.items() if device.dtype != "fp32")
    return (
        f"step time: measured {statistics.median(measured) * 1e3:.4g} ms (median of {len(measured)} steps), not "
        f"predicted: no description covers {device_name} in {dtype} (there are {described}); `terapipe profile` and "
        "`terapipe plan` make a plan for it, which --plan follows"
    )
