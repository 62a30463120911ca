"""The verbs `plan`, `profile` and `simulate`: their options, what they print, what they write. Torch only to profile.

`--model NAME` names a preset and `--model.hidden` and so on what differs, as for `terapipe train`, so that a plan and
the run that executes it are asked for with the same words.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from terapipe import files
from terapipe.planner import cost_file, plan_file
from terapipe.planner.analytic import analytic_costs
from terapipe.planner.candidates import Request
from terapipe.planner.costs import CostModel
from terapipe.planner.hardware import HARDWARE, hardware
from terapipe.planner.plan_file import PlannedRun
from terapipe.planner.report import describe_found, describe_run, found_rows
from terapipe.planner.search import MOST_TENSOR, search
from terapipe.schedule import GENERATORS, trace
from terapipe.train.config import ModelSettings
from terapipe.world import ALONE, launched_world

Command = TypeVar("Command")
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Search for the fastest plan that fits: slices, micro size, schedule, stages, replicas, tensor degree."""

    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    hardware: str = "cpu-2core"
    """A description that ships with the program; or a file of `terapipe profile`, which then names the model too."""
    ranks: int = 2
    """Devices in all."""
    tokens: int = 2048
    """Of a sequence."""
    batch: int = 1
    """Sequences of a step, over all replicas."""
    memory: str | None = None
    """Of a device, such as 24GB or 512MiB; what the hardware has if it is not given."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    unit: int | None = None
    """Slices are whole units of so many tokens; without it at most 256 units."""
    tensor: tuple[int, ...] = ()
    """Tensor degrees to try; without it every power of two in a node."""
    data: tuple[int, ...] = ()
    """Numbers of replicas to try; without it any."""
    micro_sizes: tuple[int, ...] = ()
    schedules: tuple[str, ...] = tuple(GENERATORS)
    slice_tokens: tuple[int, ...] = ()
    """These slices and no others."""
    only_runnable: Flag = False
    """Leave out what the engine does not run yet."""
    out: Path = Path("plan.json")
    """The plan, for `terapipe train --plan` and `terapipe simulate`."""
    json: Path | None = None
    """All plans that were simulated, as rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileCommand:
    """Measure what slices cost on this machine and write it as a cost model for `terapipe plan --hardware FILE`."""

    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    tokens: int = 2048
    """Of the longest sequence."""
    micro_sizes: tuple[int, ...] = (1,)
    dtype: Literal["fp32", "bf16"] = "fp32"
    rounds: int = 3
    """How often everything is measured; rounds see a machine whose speed drifts as a run does."""
    local_ranks: int = 2
    """Processes that measure at the same time, as stages would."""
    threads_per_rank: int = 1
    out: Path = Path("costs.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateCommand:
    """Show the step of a plan file as a table, and as a web page, a picture or a Perfetto trace."""

    plan: tyro.conf.Positional[Path]
    html: Path | None = None
    png: Path | None = None
    perfetto: Path | None = None
    json: Path | None = None


def plan(arguments: Sequence[str]) -> int:
    """`terapipe plan` with these arguments: prints the best plan found, writes its file; the exit status. ValueError or
    a planner's error, with the values, for a request that no plan meets."""
    command = _parse(PlanCommand, arguments, "plan")
    files.check_file(command.out, "--out")
    memory = None if command.memory is None else parse_bytes(command.memory)
    if Path(command.hardware).suffix == ".json":
        costs = cost_file.load(Path(command.hardware))
        request = _request(command, (costs.tensor,), memory, costs.micro_sizes)

        def costs_of(tensor: int) -> CostModel:
            if tensor != costs.tensor:
                raise ValueError(f"the costs are for tensor degree {costs.tensor}, not {tensor}")
            return costs

    else:
        device, model = hardware(command.hardware), command.model.resolve()
        memory = memory or float(device.memory_bytes)
        node = int(float(device.devices_per_node))
        degrees = command.tensor or tuple(2**power for power in range(MOST_TENSOR) if 2**power <= node)
        sizes = command.micro_sizes or tuple(2**power for power in range(5) if 2**power <= command.batch)
        request = _request(command, (1,) if command.only_runnable else degrees, memory, sizes)

        @cache
        def costs_of(tensor: int) -> CostModel:
            return analytic_costs(
                model, device, max_tokens=command.tokens, micro_sizes=sizes, tensor=tensor, dtype=command.dtype
            )

    found = search(request, costs_of)
    best = found.best
    costs = costs_of(best.candidate.layout.tensor)
    planned = PlannedRun.of(
        best.candidate.plan(),
        best.prediction,
        model=costs.model,
        dtype=costs.dtype,
        layout=best.candidate.layout,
        label=str(best.candidate),
        hardware=costs.hardware,
        source=costs.source,
    )
    print(describe_found(found, request, planned))
    _write(command.out, planned.to_json())
    run = f"terapipe train --plan {command.out} --tokens {command.tokens} --dtype {costs.dtype}"
    run += f" --local-ranks {command.ranks}"
    print(f"\nwritten to {command.out}; run it with `{run}` and the model's own options (--model NAME)")
    if command.json is not None:
        _write(command.json, json.dumps(found_rows(found), indent=1) + "\n")
    return 0


def _request(
    command: PlanCommand, tensor: tuple[int, ...], memory: float | None, micro_sizes: tuple[int, ...]
) -> Request:
    for name in ("ranks", "tokens", "batch"):
        if getattr(command, name) < 1:
            raise ValueError(f"--{name} is {getattr(command, name)}; it must be at least 1.")
    for name in command.schedules:
        if name not in GENERATORS:
            from terapipe.names import unknown

            raise ValueError(unknown("schedule", name, GENERATORS))
    if command.slice_tokens and sum(command.slice_tokens) != command.tokens:
        raise ValueError(
            f"--slice-tokens sum to {sum(command.slice_tokens)}, but a sequence has {command.tokens} tokens."
        )
    runnable = {name for name, generator in GENERATORS.items() if not generator.splits_backward}
    return Request(
        ranks=command.ranks,
        tokens=command.tokens,
        batch=command.batch,
        memory_bytes=memory if memory is not None else float("inf"),
        unit=command.unit,
        tensor=tensor,
        schedules=tuple(name for name in command.schedules if name in runnable or not command.only_runnable),
        data=(1,) if command.only_runnable else command.data or None,
        micro_sizes=micro_sizes if not command.micro_sizes else command.micro_sizes,
        slices=command.slice_tokens or None,
    )


def profile(arguments: Sequence[str]) -> int:
    """`terapipe profile`: measures the model's layers here and writes the costs for `plan --hardware FILE`; the exit
    status."""
    command = _parse(ProfileCommand, arguments, "profile")
    if (launched_world() or ALONE).rank == 0:
        files.check_file(command.out, "--out")
    model = command.model.resolve()
    if command.local_ranks < 1 or command.rounds < 1 or command.tokens < 2:
        raise ValueError(
            f"--local-ranks is {command.local_ranks}, --rounds {command.rounds} and --tokens {command.tokens}; they "
            f"must be at least 1, 1 and 2."
        )
    from terapipe.engine import launch
    from terapipe.profile import Profiler

    if launched_world() is None and command.local_ranks > 1:
        return launch.run_local(command.local_ranks, ["profile", *arguments], threads=command.threads_per_rank)
    world = launch.initialize()
    try:
        profiler = Profiler(model, tokens=command.tokens, micro_sizes=command.micro_sizes, dtype=command.dtype)
        for number in range(command.rounds):
            if world.rank == 0:
                print(f"round {number + 1} of {command.rounds}")
            profiler.run_round()
        costs = profiler.costs()
    finally:
        launch.shutdown()
    if world.rank == 0:
        print(costs)
        _write(command.out, cost_file.to_json(costs))
        print(f"\nwritten to {command.out}; plan with `terapipe plan --hardware {command.out}`")
    return 0


def simulate(arguments: Sequence[str]) -> int:
    """`terapipe simulate`: prints what a plan file's step would take, and draws its timeline; the exit status."""
    command = _parse(SimulateCommand, arguments, "simulate")
    planned = plan_file.load(command.plan)
    simulation = planned.simulation()
    print(describe_run(planned, simulation))
    if command.html is None and command.png is None and command.perfetto is None and command.json is None:
        return 0
    from terapipe import viz

    events = trace(simulation)
    title = f"{planned.label}, predicted"
    if command.html is not None:
        _write(command.html, viz.render_html(events, title=title))
    if command.perfetto is not None:
        _write(command.perfetto, viz.render_perfetto(events, title=title))
    if command.png is not None:
        command.png.parent.mkdir(parents=True, exist_ok=True)
        viz.write_png(command.png, events, title=title)
    if command.json is not None:
        _write(command.json, json.dumps([list(event) for event in events]) + "\n")
    return 0


def parse_bytes(text: str) -> float:
    """Bytes of 24GB (10^9 each), 16GiB (2^30 each), 1.5T or a plain number. ValueError for anything else, and for 0."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None or match[1].count(".") > 1 or match[1] == ".":
        raise ValueError(f"{text!r} is no amount of memory; write 24GB, 512MiB or a number of bytes.")
    base = 1024 if match[3] else 1000
    value = float(match[1]) * base ** " KMGT".index(match[2].upper() or " ")
    if value <= 0:
        raise ValueError(f"memory is {text!r}; it must be more than nothing.")
    return value


def _parse(kind: type[Command], arguments: Sequence[str], verb: str) -> Command:
    return tyro.cli(kind, args=list(arguments), prog=f"terapipe {verb}")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


__all__ = ["HARDWARE", "parse_bytes", "plan", "profile", "simulate"]
