"""One worker of a launch: `python -m benchmarks.prediction CASE FILE [FIRST]`. Rank 0 writes what it found to FILE;
with FIRST, the file of the case's first launch, it is the case's final."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.prediction import real, sleeping
from benchmarks.prediction.cases import CASES
from benchmarks.prediction.result import Result
from terapipe.engine import launch


def main(name: str, file: str, first: str = "") -> None:
    case, world = CASES[name], launch.initialize()
    try:
        if first:
            result = real.final(case, Result.read(Path(first)))
        else:
            result = (real if case.kind == "real" else sleeping).measure(case)
    finally:
        launch.shutdown()
    if world.rank == 0:
        result.write(Path(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
