"""A plan with all that it was made for: the model, how devices are used, what it was predicted to take and to hold.

This is the file that `terapipe plan` writes, `terapipe train --plan` executes and `terapipe simulate` shows. It holds
the times of actions and links too, so that showing it needs nothing else. The trap: `Plan` alone knows neither the
model nor the replicas; never execute one without comparing both.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terapipe.models.config import ModelConfig
from terapipe.planner.costs import CostModel
from terapipe.planner.prediction import ActionTimes, Layout, Prediction
from terapipe.schedule import Link, LinkCost, Plan, Simulation, simulate

FORMAT, VERSION = "terapipe-planned-run", 1
ENGINE_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class PlannedRun:
    """`label` names schedule and slices for people; times in seconds, memory in bytes by rank."""

    plan: Plan
    model: ModelConfig
    dtype: str
    layout: Layout
    label: str
    hardware: str
    source: str
    step_s: float
    makespan_s: float
    bubble_share: float
    mfu: float | None
    memory_bytes: tuple[float, ...]
    times: ActionTimes

    @classmethod
    def of(cls, plan: Plan, prediction: Prediction, costs: CostModel, *, layout: Layout, label: str) -> PlannedRun:
        """The plan with what was predicted from these costs."""
        return cls(
            plan,
            costs.model,
            costs.dtype,
            layout,
            label,
            costs.hardware,
            costs.source,
            prediction.step_s,
            prediction.makespan_s,
            prediction.bubble_share,
            prediction.mfu,
            prediction.memory_bytes,
            prediction.times,
        )

    def simulation(self) -> Simulation:
        """The step as it was predicted."""
        return simulate(self.plan.schedule, self.times.of(self.plan), links=self.times.links)

    def to_json(self) -> str:
        links = [[*link, cost.latency_s, cost.bytes_per_s, cost.bytes_of] for link, cost in self.times.links.items()]
        fields = {
            "format": FORMAT,
            "version": VERSION,
            **{name: getattr(self, name) for name in _PLAIN},
            "memory_bytes": list(self.memory_bytes),
            "model": dataclasses.asdict(self.model),
            "layout": dataclasses.asdict(self.layout),
            "times": self.times.by_kind,
            "first": self.times.first,
            "links": links,
            "plan": json.loads(self.plan.to_json()),
        }
        lines = [f"  {json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in fields.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @staticmethod
    def from_json(text: str) -> PlannedRun:
        """Reads `to_json`; ValueError for anything else or another version."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the plan file is not JSON: {error}") from None
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise ValueError(
                f'the file is not a planned run: it lacks "format": "{FORMAT}"; `terapipe plan` writes one.'
            )
        if fields.get("version") != VERSION:
            raise ValueError(
                f"the plan file has version {fields.get('version')!r}, this program reads version {VERSION}; make the "
                f"plan again with this program."
            )
        missing = sorted({*_PLAIN, *_OTHER} - set(fields))
        if missing:
            raise ValueError(f"the plan file lacks {missing[0]!r}; make the plan again.")
        for name in ("step_s", "makespan_s", "bubble_share"):  # shown by a run's last line, which would fail
            if type(fields[name]) not in (int, float) or not 0 <= fields[name] < math.inf:
                raise ValueError(f"{name} of the plan file is {fields[name]!r}, not a number; make the plan again.")
        try:
            return PlannedRun(
                **{name: fields[name] for name in _PLAIN},
                plan=Plan.from_json(json.dumps(fields["plan"])),
                model=ModelConfig(**fields["model"]),
                layout=Layout(**fields["layout"]),
                memory_bytes=tuple(fields["memory_bytes"]),
                times=ActionTimes(
                    {kind: tuple(map(tuple, table)) for kind, table in fields["times"].items()},
                    {kind: tuple(row) for kind, row in fields["first"].items()},
                    {
                        Link(source, destination, way): LinkCost(latency, rate, tuple(sizes))
                        for source, destination, way, latency, rate, sizes in fields["links"]
                    },
                ),
            )
        except (TypeError, AttributeError) as error:
            raise ValueError(f"a field of the plan file has the wrong type: {error}") from None


_PLAIN = ("dtype", "label", "hardware", "source", "step_s", "makespan_s", "bubble_share", "mfu")
_OTHER = ("memory_bytes", "model", "layout", "times", "first", "links", "plan")


def load(path: Path) -> PlannedRun:
    """The planned run of a file; ValueError names the file."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the plan {path}: {error}; make one with `terapipe plan`.") from error
    try:
        return PlannedRun.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def refuse_other_model(planned: PlannedRun, model: ModelConfig) -> None:
    """ValueError that names every size in which the plan's model differs."""
    ours, theirs = dataclasses.asdict(model), dataclasses.asdict(planned.model)
    other: dict[str, Any] = {name: value for name, value in theirs.items() if ours[name] != value}
    if other:
        differences = ", ".join(f"{name} {value} (here {ours[name]})" for name, value in other.items())
        raise ValueError(
            f"the plan is of another model: it has {differences}; give the options --model.* that it was made with, or "
            f"plan again."
        )


def what_the_engine_lacks(planned: PlannedRun) -> list[str]:
    """What the engine cannot run yet of a plan, in words for users; an empty list for a plan that it runs."""
    layout = planned.layout
    lacking = []
    if planned.dtype not in ENGINE_DTYPES:
        lacking.append(f"training in {planned.dtype} (plan with --dtype {' or '.join(ENGINE_DTYPES)})")
    if layout.tensor > 1:
        lacking.append(f"tensor-parallel stages (tensor = {layout.tensor})")
    if layout.data > 1:
        lacking.append(f"replicas (data = {layout.data})")
    if any(action.kind in "IW" for action in planned.plan.schedule.actions()):
        lacking.append("split backwards (actions I and W)")
    return lacking


def refuse_what_the_engine_lacks(planned: PlannedRun) -> None:
    """ValueError that names what of the plan cannot be executed yet."""
    lacking = what_the_engine_lacks(planned)
    if lacking:
        raise ValueError(
            f"the engine does not run {', '.join(lacking)} yet, which the plan {planned.label!r} needs; plan with "
            f"`terapipe plan --only-runnable`."
        )
