"""How long a step takes by the number of slices: measured on two real ranks, and predicted from a cost model.

    terapipe profile --model quickstart --tokens 2048 --out costs.json
    python examples/slices_and_time.py --costs costs.json --plot slices.png

The model and the longest sequence are those of the cost file. The measured line needs two free cores. Without --costs
only the prediction of described hardware is drawn (`--hardware`), which needs no machine at all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from terapipe import files
from terapipe.models.presets import PRESETS
from terapipe.planner import cost_file
from terapipe.planner.analytic import analytic_costs
from terapipe.planner.costs import CostModel
from terapipe.planner.hardware import hardware
from terapipe.planner.prediction import predict
from terapipe.schedule import make_plan

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
STEPS = 5


def predicted(costs: CostModel, ranks: int, counts: tuple[int, ...]) -> list[float]:
    """Milliseconds of a step of one sequence, the optimizer left out, for each number of equal slices."""
    found = []
    for count in counts:
        plan = make_plan(layers=costs.num_layers, ranks=ranks, slices=count, tokens=costs.max_tokens)
        prediction = predict(plan, costs)
        found.append((prediction.step_s - prediction.update_s) * 1e3)
    return found


def measure(costs: CostModel, counts: tuple[int, ...]) -> list[float]:
    """The same, measured; every rank of the launch calls it."""
    import torch

    from terapipe.engine import Batch, Pipeline
    from terapipe.models import layers, tied_parameters

    ids = torch.randint(0, costs.model.vocab, (1, costs.max_tokens), generator=torch.Generator().manual_seed(0))
    found = []
    for count in counts:
        plan = make_plan(layers=costs.num_layers, ranks=2, slices=count, tokens=costs.max_tokens)
        ties = tied_parameters(costs.model)
        with Pipeline(layers(costs.model), plan, hidden_size=costs.model.hidden, ties=ties) as pipeline:
            seconds = []
            for _ in range(1 + STEPS):
                began = time.perf_counter()
                pipeline.step(Batch(ids, ids))
                seconds.append(time.perf_counter() - began)
        found.append(statistics.median(seconds[1:]) * 1e3)
    return found


def draw(path: Path, counts: tuple[int, ...], lines: dict[str, list[float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, values in lines.items():
        axes.plot(counts, values, marker="o" if name == "measured" else None, linestyle="-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("equal slices of a sequence")
    axes.set_ylabel("milliseconds a step")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, help="a file of terapipe profile; steps are measured too")
    parser.add_argument("--hardware", default="a100-80gb", help="without --costs: described hardware")
    parser.add_argument("--model", default="gpt3_1b", choices=sorted(PRESETS), help="without --costs")
    parser.add_argument("--ranks", type=int, default=8, help="without --costs")
    parser.add_argument("--plot", type=Path, default=Path("slices.png"))
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # where a worker writes what it measured
    options = parser.parse_args()
    if options.rows is None:
        files.check_file(options.plot, "--plot")
    if options.costs is None:
        costs = analytic_costs(PRESETS[options.model](), hardware(options.hardware), max_tokens=2048)
        lines = {
            f"predicted, {options.model} on {options.ranks} x {options.hardware}": predicted(
                costs, options.ranks, COUNTS
            )
        }
    else:
        from terapipe.engine import launch

        costs = cost_file.load(options.costs)
        if "RANK" in os.environ:
            world = launch.initialize()
            rows = measure(costs, COUNTS)
            launch.shutdown()
            if world.rank == 0:
                options.rows.write_text(json.dumps(rows))
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            if launch.run_workers([sys.executable, *sys.argv, "--rows", str(file)], 2) != 0:
                raise SystemExit("a worker failed; its message is above.")
            lines = {"measured": json.loads(file.read_text()), "predicted": predicted(costs, 2, COUNTS)}
    for name, values in lines.items():
        print(name, " ".join(f"{count}: {value:.1f}" for count, value in zip(COUNTS, values, strict=True)))
    draw(options.plot, COUNTS, lines)
    print(f"drawn in {options.plot}")


if __name__ == "__main__":
    main()
