"""Cost models as JSON files: `to_json`, `from_json`, `load`.

A pass is written as a curve {"lengths", "seconds", "context": [constant, per_start, per_start_length]} or as a table
{"lengths", "starts", "seconds"}. A file that is another thing, of another version, lacks something or has a value of
another kind is refused with the place and the remedy (`json_file`); negative costs by the cost classes themselves.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from terapipe.planner.costs import PASSES, CostModel, LayerCosts
from terapipe.planner.json_file import Format, read
from terapipe.planner.pass_costs import CurveCost, GridCost, PassCost

FILE = Format("cost file", "terapipe-costs", 1, made_by="terapipe profile")
PLAIN = ("source", "hardware", "dtype", "max_tokens", "tensor", "devices_per_node")  # fields that are JSON as they are


def to_json(costs: CostModel) -> str:
    layers = {kind: _layer_fields(layer) for kind, layer in costs.layers.items()}
    fields: dict[str, Any] = {"format": FILE.format, "version": FILE.version}
    fields |= {name: getattr(costs, name) for name in PLAIN}
    fields |= {
        "model": dataclasses.asdict(costs.model),
        "overheads": dataclasses.asdict(costs.overheads),
        "links": {kind: dataclasses.asdict(link) for kind, link in costs.links.items()},
        "notes": dict(costs.notes),
        "layers": layers,
    }
    return json.dumps(fields, indent=1, allow_nan=False) + "\n"


def load(path: Path) -> CostModel:
    """The cost model of a file; ValueError names the file."""
    return FILE.load(path, from_json)


def from_json(text: str) -> CostModel:
    """Reads `to_json`."""
    fields = FILE.fields(text)
    for name in (field.name for field in dataclasses.fields(CostModel) if field.name not in fields):
        raise ValueError(f"{name!r} is missing in the cost file; add it.")
    model: CostModel = read(CostModel, fields, special={PassCost: _pass})
    return model


def _layer_fields(layer: LayerCosts) -> dict[str, Any]:
    fields = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer) if f.name not in PASSES}
    for name in PASSES:
        fields[name] = {str(size): _pass_fields(cost) for size, cost in getattr(layer, name).items()}
    return fields


def _pass_fields(cost: PassCost) -> dict[str, Any]:
    if isinstance(cost, CurveCost):
        return {"lengths": list(cost.lengths), "seconds": list(cost.seconds), "context": list(cost.context)}
    if isinstance(cost, GridCost):
        rows = [list(row) for row in cost.seconds]
        return {"lengths": list(cost.lengths), "starts": list(cost.starts), "seconds": rows}
    raise ValueError(f"a {type(cost).__name__} has no file form; use CurveCost or GridCost.")


def _pass(fields: Any, where: str) -> PassCost:
    cost: PassCost = read(GridCost if isinstance(fields, dict) and "starts" in fields else CurveCost, fields, where)
    return cost
