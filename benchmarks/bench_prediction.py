"""Predicted against measured step time: real models on two real ranks, and stages that sleep their cost on more.

A case is a model and a sequence length. In one launch the profiler and all variants (numbers of slices, uneven ones,
the planner's own pick) take turns for a few rounds, so that profile and steps see the same machine, whose speed drifts
by several per cent within minutes. A turn that others disturbed (`terapipe.timing.foreign_load`) is repeated. The
prediction is then made from the profile alone; nothing in it comes from the steps.

Cases of kind "sleep" have stages that do nothing but sleep what a model of costs says, one process a stage: cores do
not multiply, so this tests simulator, links and host overhead with more ranks than cores.

A real case has a final in a launch of its own: the planner's pick and the two fastest others take many more turns.

Every case can be asked for by name (`cases=` of `run`, or behind `python -m benchmarks.bench_prediction`), since all of
them take half an hour: what is finished is kept in the folder that TERAPIPE_PARTS names and not run again.

The cases and what runs them are in `benchmarks/prediction/`; here they are launched, and their rows drawn and summed.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.prediction.cases import CASES, Case
from terapipe import files
from terapipe.names import unknown

ROOT = Path(__file__).resolve().parents[1]

Row = dict[str, Any]


def run(cases: Iterable[str] | None = None) -> list[Row]:
    """One row a variant: `predicted_ms`, `measured_ms`, `error`, and of the planner's pick `over_best`, of a real case
    by its final. ValueError for an unknown case."""
    if "RANK" in os.environ:
        raise RuntimeError("this benchmark starts its own workers; run it outside a launch.")
    wanted = list(cases or CASES)
    for name in wanted:
        if name not in CASES:
            raise ValueError(unknown("case", name, CASES))
    # So that the workers find `benchmarks` wherever this was started.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(os.environ.get("TERAPIPE_PARTS", scratch))
        files.check_folder(folder, "TERAPIPE_PARTS")
        folder.mkdir(parents=True, exist_ok=True)
        return [row for name, case in CASES.items() if name in wanted for row in _rows(case, folder)]


def _rows(case: Case, folder: Path) -> list[Row]:
    """Of one case, whose launches run unless their files are there already."""
    from benchmarks.prediction.result import Result
    from terapipe.engine import launch

    file = folder / f"{re.sub('[^a-z0-9]+', '-', case.name)}.json"
    launches = [[file], [file.with_suffix(".final.json"), file]][: 2 if case.kind == "real" else 1]
    for to, *first in launches:
        if not to.exists():
            worker = [sys.executable, "-m", "benchmarks.prediction", case.name, str(to), *map(str, first)]
            status = launch.run_workers(worker, case.ranks)
            if status != 0:
                raise RuntimeError(f"case {case.name!r} ended with status {status}; its message is above.")
    return Result.read(launches[-1][0]).rows


def plot(rows: list[Row], path: Path) -> None:
    """Measured over predicted, with the lines of 5 and 12 per cent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == name]
        axes.loglog([r["predicted_ms"] for r in mine], [r["measured_ms"] for r in mine], "o", label=name, markersize=4)
    ends = [f(row["predicted_ms"] for row in rows) for f in (min, max)]
    for factor, style in ((1.0, "k-"), (1.05, "k--"), (0.95, "k--"), (1.12, "k:"), (0.88, "k:")):
        axes.loglog(ends, [factor * end for end in ends], style, linewidth=0.7)
    axes.set_xlabel("predicted step, ms")
    axes.set_ylabel("measured step, ms (median)")
    axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=150)


def summary(rows: list[Row]) -> str:
    """What the rows say about the goals."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        errors = [abs(row["error"]) for row in rows if row["kind"] == kind]
        picks = [row["over_best"] for row in rows if row["kind"] == kind and row["over_best"] is not None]
        lines.append(
            f"{kind}: {len(errors)} steps, error median {statistics.median(errors):.1%}, largest {max(errors):.1%}; "
            f"the planner's pick over the best of the sweep: " + ", ".join(f"{pick:+.1%}" for pick in picks)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    from terapipe.benchmarking import table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="bench_prediction"
    )
    parser.add_argument("cases", nargs="*", help=f"of: {'; '.join(CASES)} (default: all)")
    try:
        everything = run(parser.parse_args().cases)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"bench_prediction: {error}")
    except KeyboardInterrupt:  # what is finished is kept
        sys.exit(130)
    print(table(everything))
    print(summary(everything))
