"""What a launch found: a row for each variant, and the plans, which the final of a case runs again. As a JSON file,
which is there whole or not at all, since a later run takes it for finished."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.prediction.cases import Case
from benchmarks.prediction.turns import Turns
from benchmarks.prediction.variants import PICK
from terapipe.planner.costs import CostModel
from terapipe.planner.prediction import predict
from terapipe.schedule import Plan

Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """`plans` by variant, as `rows` name them."""

    rows: list[Row]
    plans: Mapping[str, Plan]

    @property
    def pick(self) -> Row:
        """The row of the planner's own choice."""
        return next(row for row in self.rows if row["over_best"] is not None)

    def write(self, file: Path) -> None:
        plans = {variant: json.loads(plan.to_json()) for variant, plan in self.plans.items()}
        begun = file.with_suffix(".begun")
        begun.write_text(json.dumps({"rows": self.rows, "plans": plans}, indent=1))
        os.replace(begun, file)

    @staticmethod
    def read(file: Path) -> Result:
        """ValueError for a file that `write` did not write."""
        try:
            fields = json.loads(file.read_text())
            plans = {variant: Plan.from_json(json.dumps(plan)) for variant, plan in fields["plans"].items()}
            return Result(list(fields["rows"]), plans)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{file} holds no result of this benchmark ({error!r}); delete it.") from error


def result_of(case: Case, plans: Mapping[str, Plan], costs: CostModel, turns: Turns) -> Result:
    """The measured medians beside what the costs alone predict."""
    medians = turns.medians()
    best = min(median for name, median in medians.items() if not name.startswith(PICK))
    rows = []
    for name, plan in plans.items():
        prediction = predict(plan, costs)
        predicted = prediction.step_s - prediction.update_s  # the optimizer's work is not part of `Pipeline.step`
        rows.append(
            {
                "case": case.name,
                "kind": case.kind,
                "variant": name,
                "predicted_ms": predicted * 1e3,
                "measured_ms": medians[name] * 1e3,
                "low_ms": min(turns.seconds[name]) * 1e3,
                "high_ms": max(turns.seconds[name]) * 1e3,
                "error": predicted / medians[name] - 1,
                "over_best": medians[name] / best - 1 if name.startswith(PICK) else None,
                "bubble": prediction.bubble_share,
                "slices": list(plan.slices),
                "steps": len(turns.seconds[name]),
                "foreign_cores": max(turns.loads[name]),
            }
        )
    return Result(rows, plans)
