"""`terapipe bench NAME`: finds benchmarks/bench_NAME.py of the checkout, runs it, prints its rows as a table, writes
and draws them.

A benchmark module has `run() -> list` of rows (dicts or dataclasses with the same keys) and may have `plot(rows,
path)`. The rows it returns on other ranks than the first are dropped.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import terapipe
from terapipe import files
from terapipe.names import unknown
from terapipe.world import launched_world

Row = dict[str, Any]


def find() -> dict[str, Path]:
    """Name -> file of every benchmark of the checkout; empty outside one."""
    for root in (Path(terapipe.__file__).resolve().parents[2], Path.cwd()):
        files = {file.stem.removeprefix("bench_"): file for file in sorted(root.glob("benchmarks/bench_*.py"))}
        if files:
            return files
    return {}


def run(modules: Mapping[str, Path], name: str, *, json_file: Path | None, plot_file: Path | None) -> None:
    """Run one and report. ValueError outside a checkout, for an unknown name, or a plot of a benchmark that draws
    none."""
    if not modules:
        raise ValueError(
            "benchmarks come with the source tree, not with the package; run terapipe bench in a checkout of the "
            "repository."
        )
    if name not in modules:
        raise ValueError(unknown("benchmark", name, modules))
    sys.path.insert(0, str(modules[name].parents[1]))
    module = importlib.import_module(f"benchmarks.bench_{name}")
    if plot_file is not None and not hasattr(module, "plot"):
        raise ValueError(f"benchmark {name} draws no plot; use --json.")
    if plot_file is not None and plot_file.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {plot_file} ends in none of .png, .svg and .pdf; give it one of these.")
    files.check_distinct({"--json": json_file, "--plot": plot_file})
    rows = [_as_row(row) for row in module.run()]
    world = launched_world()
    if world is not None and world.rank > 0:
        return
    if world is None:  # a worker's rows are printed by the process that started it
        print(table(rows))
    if json_file is not None:
        from terapipe import environment

        report = {"benchmark": name, "environment": environment.collect().to_shared_dict(), "rows": rows}
        files.write_text(json_file, json.dumps(report, indent=1, default=str) + "\n")
    if plot_file is not None:
        with files.whole(plot_file) as begun:
            module.plot(rows, begun)


def table(rows: Sequence[Row]) -> str:
    """Rows as aligned text; columns in the order in which keys first appear."""
    if not rows:
        return "no rows"
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _as_row(row: Any) -> Row:
    return dataclasses.asdict(row) if dataclasses.is_dataclass(row) and not isinstance(row, type) else dict(row)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
