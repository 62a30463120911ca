"""A plan with all that it was made for: the model, how devices are used, what it was predicted to take and to hold.

This is the file that `terapipe plan` writes, `terapipe train --plan` executes and `terapipe simulate` shows. It holds
the times of actions and links too, so that showing it needs nothing else. The trap: `Plan` alone knows neither the
model nor the replicas; never execute one without comparing both.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from terapipe.models.config import ModelConfig
from terapipe.planner.costs import CostModel, LinkModel
from terapipe.planner.json_file import Format, read
from terapipe.planner.pass_costs import require_time
from terapipe.planner.prediction import ActionTimes, Layout, Prediction
from terapipe.schedule import Link, LinkCost, Plan, Simulation, simulate

FILE = Format("plan file", "terapipe-planned-run", 1, made_by="terapipe plan")
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
            "format": FILE.format,
            "version": FILE.version,
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
        fields = FILE.fields(text)
        for name in (*_PLAIN, *_OTHER):
            if name not in fields:
                raise ValueError(f"{name!r} is missing in the plan file; make the plan again.")
        kinds = get_type_hints(PlannedRun)
        values = {name: read(kinds[name], fields[name], name) for name in (*_PLAIN, "model", "layout", "memory_bytes")}
        for name in ("step_s", "makespan_s", "bubble_share"):  # shown by a run's last line
            require_time(name, values[name])
        plan = Plan.from_json(json.dumps(fields["plan"]))
        times = ActionTimes(
            read(get_type_hints(ActionTimes)["by_kind"], fields["times"], "times"),
            read(get_type_hints(ActionTimes)["first"], fields["first"], "first"),
            _links(read(_LINKS, fields["links"], "links"), plan),
        )
        _check_times(times, plan)
        if len(values["memory_bytes"]) != plan.ranks:
            raise ValueError(
                f"memory_bytes has {len(values['memory_bytes'])} entries for {plan.ranks} ranks; make the plan again."
            )
        return PlannedRun(plan=plan, times=times, **values)


_PLAIN = ("dtype", "label", "hardware", "source", "step_s", "makespan_s", "bubble_share", "mfu")
_OTHER = ("memory_bytes", "model", "layout", "times", "first", "links", "plan")


_LINKS = tuple[tuple[int, int, str, float, float, tuple[float, ...]], ...]


def _links(found: Any, plan: Plan) -> dict[Link, LinkCost]:
    """ValueError unless every hand-off of the plan has a cost."""
    links: dict[Link, LinkCost] = {}
    for *link, latency_s, bytes_per_s, sizes in found:
        LinkModel(latency_s, bytes_per_s)  # which refuses what cannot be
        if len(sizes) == len(plan.slices):
            links[Link(*link)] = LinkCost(latency_s, bytes_per_s, sizes)
    ranks = [plan.schedule.stage_rank(stage) for stage in range(len(plan.stages))]
    for here, there in itertools.pairwise(ranks):
        for wanted in (Link(here, there, "F"), Link(there, here, "B")):
            if here != there and wanted not in links:
                raise ValueError(
                    f"links lacks {wanted} with the bytes of each of {len(plan.slices)} slices; make the plan again."
                )
    return links


def _check_times(times: ActionTimes, plan: Plan) -> None:
    """ValueError unless every action of the plan has a time."""
    stages, slices = len(plan.stages), len(plan.slices)
    for kind in "FIWB":
        rows = times.by_kind.get(kind, ())
        if len(rows) != stages or any(len(row) != slices for row in rows):
            raise ValueError(
                f"times.{kind} is of {len(rows)} stages with {sorted({len(row) for row in rows})} slices, the plan of "
                f"{stages} with {slices}; make the plan again."
            )
        for seconds in itertools.chain(*rows):
            require_time(f"an entry of times.{kind}", seconds)
    for kind in "FB":
        row = times.first.get(kind, ())
        if len(row) != stages:
            raise ValueError(f"first.{kind} has {len(row)} entries for {stages} stages; make the plan again.")
        for seconds in row:
            require_time(f"an entry of first.{kind}", seconds)


def load(path: Path) -> PlannedRun:
    """The planned run of a file; ValueError names the file."""
    return FILE.load(path, PlannedRun.from_json)


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
