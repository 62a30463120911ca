"""Cost models as JSON files: `to_json`, `from_json`, `load`.

A pass is written as a curve {"lengths", "seconds", "context": [constant, per_start, per_start_length]} or as a table
{"lengths", "starts", "seconds"}. A file that is another thing, of another version, or lacks something is refused with
the place and the remedy; NaN, infinite and negative costs are refused by the cost classes themselves.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terapipe.models.config import ModelConfig
from terapipe.planner.costs import (
    PASSES,
    CostModel,
    LayerCosts,
    LinkModel,
    Overheads,
)
from terapipe.planner.fit import Context
from terapipe.planner.pass_costs import CurveCost, GridCost, PassCost

FORMAT, VERSION = "terapipe-costs", 1
PLAIN = ("source", "hardware", "dtype", "max_tokens", "tensor", "devices_per_node")  # fields that are JSON as they are


def to_json(costs: CostModel) -> str:
    layers = {kind: _layer_fields(layer) for kind, layer in costs.layers.items()}
    fields: dict[str, Any] = {"format": FORMAT, "version": VERSION}
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
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the costs {path}: {error}; make them with `terapipe profile`.") from error
    try:
        return from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def from_json(text: str) -> CostModel:
    """Reads `to_json`."""
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the costs are not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ValueError(f'the file holds no costs: it lacks "format": "{FORMAT}"; `terapipe profile` writes one.')
    if fields.get("version") != VERSION:
        raise ValueError(
            f"the costs have version {fields.get('version')!r}, this program reads version {VERSION}; profile again."
        )
    wanted = {"format", "version", "model", "overheads", "links", "notes", "layers", *PLAIN}
    _same_keys("the costs", fields, wanted)
    layers = {kind: _layer(kind, layer) for kind, layer in _mapping("layers", fields["layers"]).items()}
    try:
        return CostModel(
            **{name: fields[name] for name in PLAIN},
            model=ModelConfig(**fields["model"]),
            overheads=_overheads(fields["overheads"]),
            links={kind: LinkModel(**link) for kind, link in _mapping("links", fields["links"]).items()},
            notes=fields["notes"],
            layers=layers,
        )
    except TypeError as error:
        raise ValueError(f"a field of the costs has the wrong name or type: {error}") from None


def _overheads(fields: Any) -> Overheads:
    values = dict(_mapping("overheads", fields))
    return Overheads(**values | {"asleep": tuple(map(tuple, values.get("asleep", ())))})


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


def _layer(kind: str, fields: Any) -> LayerCosts:
    values = dict(_mapping(f"layer {kind!r}", fields))
    _same_keys(f"layer {kind!r} of the costs", values, {f.name for f in dataclasses.fields(LayerCosts)})
    for name in PASSES:
        sizes = _mapping(f"{name} of layer {kind!r}", values[name])
        values[name] = {_whole(size): _pass(f"{name} of layer {kind!r}", cost) for size, cost in sizes.items()}
    try:
        return LayerCosts(**values)
    except ValueError as error:
        raise ValueError(f"layer {kind!r} of the costs: {error}") from None


def _pass(where: str, fields: Any) -> PassCost:
    values = dict(_mapping(where, fields))
    try:
        if "starts" in values:
            _same_keys(where, values, {"lengths", "starts", "seconds"})
            rows = tuple(tuple(row) for row in values["seconds"])
            return GridCost(tuple(values["lengths"]), tuple(values["starts"]), rows)
        values.setdefault("context", [0.0, 0.0, 0.0])
        _same_keys(where, values, {"lengths", "seconds", "context"})
        return CurveCost(tuple(values["lengths"]), tuple(values["seconds"]), Context(*values["context"]))
    except TypeError as error:
        raise ValueError(f"{where}: an entry is missing or no number ({error})") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _same_keys(what: str, fields: Mapping[str, Any], wanted: set[str]) -> None:
    missing, unknown = sorted(wanted - set(fields)), sorted(set(fields) - wanted)
    if missing:
        raise ValueError(f"{what} lack {missing[0]!r}; add it.")
    if unknown:
        raise ValueError(f"{what} have an unknown key {unknown[0]!r}; known: {', '.join(sorted(wanted))}.")


def _mapping(what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object of JSON, got {type(value).__name__}.")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"a micro size must be a whole number of at least 1, got {text!r}.")
    return int(text)
