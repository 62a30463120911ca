"""Predicted against measured step time: real models on two real ranks, and stages that sleep their cost on more.

A case is a model and a sequence length. In one launch the profiler and all variants (numbers of slices, uneven ones,
the planner's own pick) take turns for a few rounds, so that profile and steps see the same machine, whose speed drifts
by several per cent within minutes. A turn that others disturbed (`terapipe.timing.foreign_load`) is repeated. The
prediction is then made from the profile alone; nothing in it comes from the steps.

Cases of kind "sleep" have stages that do nothing but sleep what a model of costs says, one process a stage: cores do
not multiply, so this tests simulator, links and host overhead with more ranks than cores.

A real case has a final in a launch of its own: the planner's pick and the two fastest others take many more turns.

Every case can be asked for by name (`parts=` of `run`, or behind `python -m benchmarks.bench_prediction`), since all of
them take half an hour: what is finished is kept in the folder that TERAPIPE_PARTS names and not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from terapipe.models.config import ModelConfig
    from terapipe.planner.costs import CostModel
    from terapipe.schedule import Plan

Row = dict[str, Any]
MODULE = "benchmarks.bench_prediction"
REPEATS = 4  # of a turn that others disturbed
FINAL_S = 60.0  # of the final between the planner's pick and the fastest two others


@dataclass(frozen=True)
class Case:
    """`hidden`, `layers`, ... of a model; `rounds` of profile and steps."""

    name: str
    kind: str  # "real", "sleep"
    ranks: int
    tokens: int
    hidden: int = 0
    layers: int = 0
    heads: int = 0
    family: str = "llama"
    vocab: int = 257
    micros: int = 1
    rounds: int = 3
    slices: tuple[int, ...] = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Part:
    """What a launch found, and the plans by variant."""

    rows: list[Row]
    plans: Mapping[str, Plan]


CASES = (
    Case("small, 1024 tokens", "real", 2, 1024, hidden=256, layers=4, heads=4, rounds=5),
    Case("small, 2048 tokens", "real", 2, 2048, hidden=256, layers=4, heads=4, rounds=4),
    Case("small, 4096 tokens", "real", 2, 4096, hidden=256, layers=4, heads=4, rounds=3),
    Case("narrow, 8192 tokens", "real", 2, 8192, hidden=128, layers=2, heads=2, rounds=3),
    Case("wide, 1024 tokens", "real", 2, 1024, hidden=512, layers=4, heads=8, rounds=3),
    Case("wide, 2048 tokens", "real", 2, 2048, hidden=512, layers=2, heads=8, rounds=3),
    Case("gpt, 2048 tokens", "real", 2, 2048, hidden=256, layers=4, heads=4, family="gpt", vocab=2000, rounds=3),
    Case("4 micros, 1024 tokens", "real", 2, 1024, hidden=256, layers=2, heads=4, micros=4, rounds=3, slices=(1, 2, 4)),
    Case("sleep, 4 ranks", "sleep", 4, 4096, slices=(1, 2, 4, 8, 16, 32)),
    Case("sleep, 4 ranks, 4 micros", "sleep", 4, 4096, micros=4, slices=(1, 2, 4, 8)),
    Case("sleep, 8 ranks", "sleep", 8, 8192, slices=(1, 4, 8, 16, 32)),
)


def run(parts: Iterable[str] | None = None) -> list[Row]:
    """One row a variant: `predicted_ms`, `measured_ms`, `error`, and of the planner's pick `over_best` (`_final`)."""
    from terapipe.engine import launch

    if "RANK" in os.environ:
        raise RuntimeError("this benchmark starts its own workers")
    wanted = set(parts or ()) or {case.name for case in CASES}
    unknown = wanted - {case.name for case in CASES}
    if unknown:
        raise ValueError(f"unknown parts {sorted(unknown)}; known: {', '.join(case.name for case in CASES)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(os.environ.get("TERAPIPE_PARTS", scratch))
        for index, case in enumerate(CASES):
            if case.name not in wanted:
                continue
            last = folder / f"{index}.{'final' if case.kind == 'real' else 'rows'}.json"
            for file in (folder / f"{index}.rows.json", last):
                if not file.exists():
                    folder.mkdir(parents=True, exist_ok=True)
                    command = [sys.executable, "-m", MODULE, "--part", str(index), str(file)]
                    status = launch.run_workers(command, case.ranks, threads=1)
                    if status != 0:
                        raise RuntimeError(f"part {case.name!r} ended with status {status}; its message is above.")
            rows += json.loads(last.read_text())
    return rows


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


# ------------------------------------------------------------------------------------------------------------- workers


def _work(case: Case) -> Part:
    from terapipe.engine import launch

    launch.initialize()
    try:
        return _real(case) if case.kind == "real" else _sleep(case)
    finally:
        launch.shutdown()


def _real(case: Case) -> Part:
    from terapipe.profile import Grid, Profiler

    model = _model(case)
    tokens = case.tokens
    lengths = tuple(sorted({tokens // count for count in (1, 2, 3, 4, 8, 16)}))
    profiler = Profiler(model, tokens=tokens, grid=Grid(lengths, (0, tokens // 2)))
    profiler.run_round()
    with contextlib.ExitStack() as closing:
        plans = _plans(case, profiler.costs())
        steps = _steps(case, model, plans, closing)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        loads: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(case.rounds):
            _measure(steps, seconds, loads, turn=3 if number == 0 else 2)
            if number + 1 < case.rounds:
                profiler.run_round()
    return Part(_rows(case, plans, profiler.costs(), seconds, loads), plans)


def _final(case: Case, part: Part) -> Part:
    """The rows with the pick's `over_best` from many more steps: turns of the pick and of the two fastest others
    alternate, since where the speed drifts by several per cent the fastest of six after a few steps is luck."""
    import torch.distributed as dist

    from terapipe.engine import launch

    pick = next(row for row in part.rows if row["over_best"] is not None)
    others = sorted((row for row in part.rows if row is not pick), key=lambda row: row["measured_ms"])[:2]
    plans = {row["variant"]: part.plans[row["variant"]] for row in (pick, *others)}
    launch.initialize()
    try:
        seconds: dict[str, list[float]] = {name: [] for name in plans}
        loads: dict[str, list[float]] = {name: [] for name in plans}
        with contextlib.ExitStack() as closing:
            steps = _steps(case, _model(case), plans, closing)
            began, over = time.perf_counter(), [False]
            while not over[0]:
                _measure(steps, seconds, loads, turn=3)
                over = [time.perf_counter() - began > FINAL_S]
                dist.broadcast_object_list(over, src=0)
    finally:
        launch.shutdown()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    pick["over_best"] = medians[pick["variant"]] / min(medians[row["variant"]] for row in others) - 1
    pick["final_steps"] = len(seconds[pick["variant"]])
    return part


def _model(case: Case) -> ModelConfig:
    from terapipe.models.presets import gpt, llama

    sizes = {"hidden": case.hidden, "layers": case.layers, "heads": case.heads, "vocab": case.vocab}
    if case.family == "gpt":
        return gpt(**sizes, max_tokens=case.tokens)
    return llama(**sizes, kv_heads=case.heads // 2, ffn_hidden=4 * case.hidden, max_tokens=case.tokens)


def _steps(
    case: Case, model: ModelConfig, plans: Mapping[str, Plan], closing: contextlib.ExitStack
) -> dict[str, Callable[[], Any]]:
    """A step of every plan, each in a pipeline of its own."""
    from terapipe.engine import Pipeline
    from terapipe.models import layers, tied_parameters
    from terapipe.train.data import Synthetic

    batch = Synthetic(tokens=case.tokens, vocab=model.vocab, sequences=case.micros).train(0)
    return {
        name: partial(
            closing.enter_context(
                Pipeline(layers(model), plan, hidden_size=model.hidden, ties=tied_parameters(model))
            ).step,
            batch,
        )
        for name, plan in plans.items()
    }


def _sleep(case: Case) -> Part:
    """Costs by the analytic model on the slowest hardware; the measured overheads of this machine are added."""
    import dataclasses

    from terapipe.engine import Pipeline
    from terapipe.models.presets import gpt
    from terapipe.planner.analytic import analytic_costs
    from terapipe.planner.hardware import HARDWARE
    from terapipe.profile import measure_host

    model = gpt(hidden=1024, layers=case.ranks * 2 - 2, heads=16, vocab=1000, max_tokens=case.tokens)
    model = dataclasses.replace(model, tied_embeddings=False)
    costs = analytic_costs(model, HARDWARE["v100-p3.16xlarge"], max_tokens=case.tokens)
    _wake_in_time()
    links, overheads = measure_host()
    width = 4  # of what is handed on: copying it is not in the costs
    costs = dataclasses.replace(
        costs,
        model=dataclasses.replace(model, hidden=width, heads=1, head_dim=0, ffn_hidden=0, kv_heads=0),
        dtype="fp32",
        devices_per_node=None,
        links=links,
        overheads=overheads,
    )
    import torch

    from terapipe.engine import Batch

    tokens = torch.zeros(case.micros, case.tokens, dtype=torch.int64)
    batch = Batch(tokens, tokens)
    with contextlib.ExitStack() as closing:
        plans = _plans(case, costs)
        steps: dict[str, Callable[[], Any]] = {}
        for name, plan in plans.items():
            parts = [_sleeper(costs, index, width) for index in range(costs.num_layers)]
            pipeline = closing.enter_context(Pipeline(parts, plan, hidden_size=width, loss=lambda x, targets: x.sum()))
            steps[name] = partial(pipeline.step, batch)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        loads: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(case.rounds):
            _measure(steps, seconds, loads, turn=3)
    return Part(_rows(case, plans, costs, seconds, loads), plans)


def _sleeper(costs: CostModel, index: int, width: int) -> nn.Module:
    import torch
    from torch import nn

    layer = costs.stage(index, index + 1)

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, start: int) -> torch.Tensor:
            began = time.perf_counter()
            ctx.at = (1, x.shape[1], start)
            out = x.unsqueeze(-1).expand(*x.shape, width).float() if x.dim() == 2 else x.clone()
            _sleep_until(began + layer.forward(*ctx.at))
            return out

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None]:
            began = time.perf_counter()
            gradients = gradient if index else None, torch.zeros(1), None
            _sleep_until(began + layer.backward(*ctx.at))
            return gradients

    class Sleeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, hidden: torch.Tensor, cache: Any, mask: Any, positions: torch.Tensor) -> torch.Tensor:
            return Sleep.apply(hidden, self.weight, int(positions[0, 0]))

    return Sleeper()


def _wake_in_time() -> None:
    """Linux rounds the end of a sleep up by 50 us unless told otherwise."""
    if sys.platform == "linux":
        PR_SET_TIMERSLACK = 29
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)


def _sleep_until(deadline: float) -> None:
    """No spinning, which would take the cores from stages that should wake up; being late is in the overheads."""
    time.sleep(max(0.0, deadline - time.perf_counter()))


def _plans(case: Case, costs: CostModel) -> dict[str, Plan]:
    """Equal slices in several numbers, slices of equal cost, and what the planner would run."""
    from terapipe.planner.request import Request
    from terapipe.planner.search import search
    from terapipe.planner.slicing import equal_cost_slices
    from terapipe.schedule import make_plan

    common: dict[str, Any] = {
        "layers": costs.num_layers,
        "ranks": case.ranks,
        "tokens": case.tokens,
        "micros": case.micros,
    }
    plans = {f"{count} slices": make_plan(slices=count, **common) for count in case.slices}
    unit = case.tokens // 64
    table = costs.stage(1, 2).slice_costs(1, unit=unit, units=64)
    uneven = tuple(length * unit for length in equal_cost_slices(table, slices=6).slices)
    plans["6 slices of equal cost"] = make_plan(slices=uneven, **common)
    if case.micros > 1:
        plans["seq_1f1b, 4 slices"] = make_plan(slices=4, schedule="seq_1f1b", warmup_per_hop=2, **common)
    found = search(
        Request(
            ranks=case.ranks,
            tokens=case.tokens,
            batch=case.micros,
            memory_bytes=float("inf"),
            unit=unit,
            schedules=("gpipe", "one_f_one_b", "terapipe", "seq_1f1b"),
            recompute=(False,),
            data=(1,),
            micro_sizes=(1,),
        ),
        lambda tensor: costs,
    )
    plans[f"pick: {found.best.candidate.schedule}, {len(found.best.candidate.slices)} slices"] = (
        found.best.candidate.plan()
    )
    return plans


def _measure(
    steps: Mapping[str, Callable[[], Any]], seconds: dict[str, list[float]], loads: dict[str, list[float]], *, turn: int
) -> None:
    """A turn of every variant; the first step of a turn does not count."""
    from terapipe.timing.foreign_load import LIMIT, foreign_cores, sample
    from terapipe.timing.step_times import barrier

    for name, step in steps.items():
        for _ in range(REPEATS):
            taken = []
            step()
            before = sample()
            for _ in range(turn - 1):
                barrier()
                began = time.perf_counter()
                step()
                taken.append(time.perf_counter() - began)
            load = foreign_cores(before, sample())
            if load <= LIMIT:
                break
        seconds[name] += taken
        loads[name].append(load)


def _rows(
    case: Case,
    plans: Mapping[str, Plan],
    costs: CostModel,
    seconds: Mapping[str, list[float]],
    loads: Mapping[str, list[float]],
) -> list[Row]:
    from terapipe.planner.prediction import predict

    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min(value for name, value in medians.items() if not name.startswith("pick"))
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
                "low_ms": min(seconds[name]) * 1e3,
                "high_ms": max(seconds[name]) * 1e3,
                "error": predicted / medians[name] - 1,
                "over_best": medians[name] / best - 1 if name.startswith("pick") else None,
                "bubble": prediction.bubble_share,
                "slices": list(plan.slices),
                "steps": len(seconds[name]),
                "foreign_cores": max(loads[name]),
            }
        )
    return rows


def _run_part(case: Case, file: Path) -> None:
    """Rank 0 writes the rows; beside those of the first launch of a case the plans, for its final."""
    rows_file = file.with_name(file.name.replace("final", "rows"))
    plans_file = rows_file.with_suffix(".plans")
    if file == rows_file:
        part = _work(case)
    else:
        part = _final(case, Part(json.loads(rows_file.read_text()), pickle.loads(plans_file.read_bytes())))
    if os.environ["RANK"] == "0":
        plans_file.write_bytes(pickle.dumps(part.plans))
        file.write_text(json.dumps(part.rows, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        _run_part(CASES[int(sys.argv[2])], Path(sys.argv[3]))
    else:
        from terapipe.benchmarking import table

        parser = argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="bench_prediction"
        )
        parser.add_argument("cases", nargs="*", help=f"of: {'; '.join(case.name for case in CASES)} (default: all)")
        everything = run(parser.parse_args().cases)
        print(table(everything))
        print(summary(everything))
