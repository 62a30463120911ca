"""The verbs `plan`, `profile` and `simulate`: their options, what they print, what they write. Torch only to profile.

`--model NAME` names a preset and `--model.hidden` and so on what differs, as for `terapipe train`, so that a plan and
the run that executes it are asked for with the same words.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from terapipe import files
from terapipe.models.config import ModelConfig
from terapipe.models.presets import PRESETS
from terapipe.names import unknown
from terapipe.planner import cost_file, plan_file
from terapipe.planner.analytic import analytic_costs
from terapipe.planner.costs import CostModel
from terapipe.planner.hardware import CPU, HARDWARE, hardware
from terapipe.planner.plan_file import PlannedRun
from terapipe.planner.report import describe_found, describe_run, found_rows
from terapipe.planner.request import Request, counted, listed
from terapipe.planner.search import MOST_TENSOR, search
from terapipe.schedule import GENERATORS, trace
from terapipe.train.config import ModelSettings
from terapipe.world import ALONE, launched_world

Command = TypeVar("Command")
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
MOST = {"ranks": 10**6, "tokens": 2**31 - 1, "batch": 10**6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Search for the fastest plan that fits: slices, micro size, schedule, stages, replicas, tensor degree."""

    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    hardware: str = "cpu-2core"
    """Name of a description that ships with the program, or a file of `terapipe profile`, which names the model too."""
    ranks: int = 2
    """Number of devices (on a CPU: processes) in all."""
    tokens: int = 2048
    """Length of a sequence in tokens."""
    batch: int = 1
    """Number of sequences in a step, over all replicas."""
    memory: str | None = None
    """Memory of one device, such as 24GB or 512MiB. None: what the description says, or no limit with a file."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format of weights and activations. None: that of the hardware."""
    unit: int | None = None
    """Tokens that every slice length is a multiple of. None: chosen so that a sequence has at most 256 of them; where
    no number divides it well, the last slice takes what is left."""
    tensor: tuple[int, ...] = ()
    """Tensor degrees to try. Without it: 1, 2, 4 and 8, as far as one node has so many devices."""
    data: tuple[int, ...] = ()
    """Numbers of replicas to try. Without it: every number."""
    micro_sizes: tuple[int, ...] = ()
    """Sequences in a micro to try. Without it: 1, 2, 4, 8 and 16 up to --batch, or those of the file."""
    schedules: tuple[str, ...] = tuple(GENERATORS)
    """Names of the schedules to try."""
    slice_tokens: tuple[int, ...] = ()
    """Slice lengths in tokens, which sum to --tokens. Without it: lengths are searched."""
    only_runnable: Flag = False
    """Leave out what the engine does not run yet: replicas, tensor-parallel stages, split backwards."""
    out: Path = Path("plan.json")
    """File of the plan, for `terapipe train --plan` and `terapipe simulate`."""
    json: Path | None = None
    """File for all plans that were simulated, as rows. None: no such file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileCommand:
    """Measure what slices cost on this machine and write it as a cost model for `terapipe plan --hardware FILE`."""

    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    tokens: int = 2048
    """Length of the longest sequence in tokens."""
    micro_sizes: tuple[int, ...] = (1,)
    """Sequences in a micro; each size is measured."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format of weights and activations."""
    rounds: int = 3
    """How often everything is measured; rounds see a machine whose speed drifts as a run does."""
    local_ranks: int = 2
    """Number of processes that measure at the same time, as stages would."""
    threads_per_rank: int = 1
    """CPU threads of each process."""
    out: Path = Path("costs.json")
    """File of the costs, for `terapipe plan --hardware`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateCommand:
    """Show the step of a plan file as a table, and as a web page, a picture or a Perfetto trace."""

    plan: tyro.conf.Positional[Path]
    """File of `terapipe plan`."""
    html: Path | None = None
    """File for the timeline as a web page. None: no such file."""
    png: Path | None = None
    """File for the timeline as a picture. None: no such file."""
    perfetto: Path | None = None
    """File for the timeline as a trace that ui.perfetto.dev opens. None: no such file."""
    json: Path | None = None
    """File for the events of the timeline, as rows. None: no such file."""


def plan(arguments: Sequence[str]) -> int:
    """`terapipe plan` with these arguments: prints the best plan found, writes its file; the exit status. ValueError or
    a planner's error, with the values, for a request that no plan meets."""
    command = _parse(PlanCommand, arguments, "plan")
    files.check_file(command.out, "--out")
    costs_file = Path(command.hardware) if Path(command.hardware).suffix == ".json" else None
    files.check_distinct({"--hardware": costs_file, "--out": command.out, "--json": command.json})
    _check(command)
    memory = None if command.memory is None else parse_bytes(command.memory)
    if costs_file is not None:
        known = cost_file.load(costs_file)
        named = any(argument.split("=")[0].split(".")[0] == "--model" for argument in arguments)
        _refuse_other_costs(command, known, model=command.model.resolve() if named else known.model)
        model, dtype, sizes = known.model, known.dtype, known.micro_sizes
        degrees: tuple[int, ...] = (known.tensor,)

        def costs_of(tensor: int) -> CostModel:
            return known

    else:
        device, model = hardware(command.hardware), command.model.resolve()
        dtype = command.dtype or device.dtype
        memory = memory or float(device.memory_bytes)
        node = int(float(device.devices_per_node))
        degrees = command.tensor or tuple(2**power for power in range(MOST_TENSOR) if 2**power <= node)
        sizes = command.micro_sizes or tuple(2**power for power in range(5) if 2**power <= command.batch)

        @cache
        def costs_of(tensor: int) -> CostModel:
            return analytic_costs(
                model, device, max_tokens=command.tokens, micro_sizes=sizes, tensor=tensor, dtype=dtype
            )

    _check_positions(command.tokens, model)
    request = Request(
        ranks=command.ranks,
        tokens=command.tokens,
        batch=command.batch,
        memory_bytes=memory if memory is not None else float("inf"),
        unit=command.unit,
        tensor=degrees,
        schedules=command.schedules,
        data=command.data or None,
        micro_sizes=command.micro_sizes or sizes,
        slices=command.slice_tokens or None,
    )
    if command.only_runnable:
        request = _runnable(request, command, dtype)
    found = search(request, costs_of)
    best, layout = found.best.candidate, found.best.candidate.layout
    costs = costs_of(layout.tensor)
    planned = PlannedRun.of(best.plan(), found.best.prediction, costs, layout=layout, label=str(best))
    print(describe_found(found, request, planned))
    if command.tokens > costs.max_tokens:
        print(
            f"note: {command.hardware} has costs up to {costs.max_tokens} tokens; for {command.tokens} they are "
            f"extrapolated, the worse the further. `terapipe profile --tokens {command.tokens}` measures them."
        )
    files.write_text(command.out, planned.to_json())
    print(f"\nwritten to {command.out}; {_next_step(planned, command.out, costs.devices_per_node)}")
    if command.json is not None:
        files.write_text(command.json, json.dumps(found_rows(found), indent=1) + "\n")
    return 0


def _check(command: PlanCommand) -> None:
    """ValueError for an option that makes no sense whatever the costs are."""
    for name in ("ranks", "tokens", "batch", "tensor", "data", "micro_sizes", "slice_tokens"):
        given = getattr(command, name)
        if min(given if isinstance(given, tuple) else (given,), default=1) < 1:
            raise ValueError(f"{_option(name, given)}; it must be at least 1.")
    for name, most in MOST.items():
        if getattr(command, name) > most:
            raise ValueError(f"{_option(name, getattr(command, name))}; it must be at most {most}.")
    if not command.schedules:
        raise ValueError(f"--schedules names none; leave it out, or name some of {listed(GENERATORS)}.")
    for name in command.schedules:
        if name not in GENERATORS:
            raise ValueError(unknown("schedule", name, GENERATORS))
    if command.slice_tokens and sum(command.slice_tokens) != command.tokens:
        raise ValueError(
            f"--slice-tokens sum to {sum(command.slice_tokens)}, but a sequence has {command.tokens} tokens."
        )


def _check_positions(tokens: int, model: ModelConfig) -> None:
    if model.position == "learned" and tokens > model.max_tokens:
        raise ValueError(
            f"--tokens is {tokens}, but the model has learned positions for {model.max_tokens}; shorten the sequence "
            f"or raise --model.max-tokens."
        )


def _refuse_other_costs(command: PlanCommand, costs: CostModel, *, model: ModelConfig) -> None:
    """ValueError for an option that contradicts the cost file."""
    file = command.hardware
    for name, what, wanted, has in (
        ("tensor", "tensor degree", set(command.tensor), {costs.tensor}),
        ("dtype", "dtype", {command.dtype} - {None}, {costs.dtype}),
        ("micro_sizes", "micro size", set(command.micro_sizes), set(costs.micro_sizes)),
    ):
        if not wanted <= has:
            raise ValueError(
                f"{_option(name, getattr(command, name))}, but {file} is for {what} {listed(sorted(has, key=str))}; "
                f"leave --{name.replace('_', '-')} out, or profile again."
            )
    ours, theirs = dataclasses.asdict(model), dataclasses.asdict(costs.model)
    other = [f"{name} {value} ({file}: {theirs[name]})" for name, value in ours.items() if value != theirs[name]]
    if other:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        raise ValueError(
            f"--model {command.model.preset} is another model than that of {file}: it has {listed(other[:3])}{more}; "
            f"leave --model out, or profile again."
        )


def _runnable(request: Request, command: PlanCommand, dtype: str) -> Request:
    """The request without what the engine does not run. ValueError for an option that asks for nothing else."""
    schedules = tuple(name for name in request.schedules if not GENERATORS[name].splits_backward)
    for name, what, nothing in (
        ("tensor", "tensor-parallel stages", 1 not in request.tensor),
        ("data", "replicas", request.data is not None and 1 not in request.data),
        ("schedules", "split backwards", not schedules),
        ("dtype", f"training in {dtype}", dtype not in plan_file.ENGINE_DTYPES),
    ):
        if nothing and getattr(command, name):
            raise ValueError(
                f"{_option(name, getattr(command, name))}, but --only-runnable leaves out {what}; leave one of the two "
                f"out."
            )
        if nothing:
            remedy = f"add --dtype {' or '.join(plan_file.ENGINE_DTYPES)}" if name == "dtype" else "leave it out"
            raise ValueError(
                f"--only-runnable leaves out {what}, but {command.hardware} has {name} "
                f"{dtype if name == 'dtype' else listed(request.tensor)}; {remedy}."
            )
    return dataclasses.replace(request, tensor=(1,), data=(1,), schedules=schedules)


def _option(name: str, value: object) -> str:
    """`--name is value`."""
    return f"--{name.replace('_', '-')} is {listed(value) if isinstance(value, tuple) else value}"


def _next_step(planned: PlannedRun, file: Path, devices_per_node: int | None) -> str:
    """The command that runs the plan, or why there is none."""
    lacking = plan_file.what_the_engine_lacks(planned)
    if lacking:
        return (
            f"`terapipe simulate {file}` shows it. The engine does not run {listed(lacking)} yet; --only-runnable "
            f"leaves such plans out."
        )
    named = [name for name, make in PRESETS.items() if make() == planned.model]
    run = f"terapipe train --plan {file} --tokens {planned.plan.tokens} --dtype {planned.dtype}"
    run += f" --model {named[0]}" if named else ""
    if planned.source == "measured" or planned.hardware == CPU.name:
        run += " --device cpu"
    also = "" if named else ", and the --model options of this plan"
    ranks, host = planned.plan.ranks, devices_per_node or os.cpu_count() or 1
    if ranks <= host:
        return f"run it with `{run} --local-ranks {ranks}`{also}"
    each = max(number for number in range(1, host + 1) if ranks % number == 0)
    launch = f"torchrun --nnodes {ranks // each} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"run it on {counted(ranks // each, 'host')}, on each with `{launch} -m {run}`{also}"


def profile(arguments: Sequence[str]) -> int:
    """`terapipe profile`: measures the model's layers here and writes the costs for `plan --hardware FILE`; the exit
    status."""
    command = _parse(ProfileCommand, arguments, "profile")
    if (launched_world() or ALONE).rank == 0:
        files.check_file(command.out, "--out")
    model = command.model.resolve()
    for name, least in (("local_ranks", 1), ("threads_per_rank", 1), ("rounds", 1), ("tokens", 2), ("micro_sizes", 1)):
        given = getattr(command, name)
        if min(given if isinstance(given, tuple) else (given,), default=0) < least:
            raise ValueError(f"{_option(name, given)}; it must be at least {least}.")
    _check_positions(command.tokens, model)
    from terapipe.engine import launch
    from terapipe.profile import Profiler, check_memory

    check_memory(
        model,
        tokens=command.tokens,
        micro_size=max(command.micro_sizes),
        dtype=command.dtype,
        local_ranks=command.local_ranks,
    )
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
        files.write_text(command.out, cost_file.to_json(costs))
        print(f"\nwritten to {command.out}; plan with `terapipe plan --hardware {command.out}`")
    return 0


def simulate(arguments: Sequence[str]) -> int:
    """`terapipe simulate`: prints what a plan file's step would take, and draws its timeline; the exit status."""
    command = _parse(SimulateCommand, arguments, "simulate")
    files.check_distinct(
        {
            "the plan": command.plan,
            **{f"--{name}": getattr(command, name) for name in ("html", "png", "perfetto", "json")},
        }
    )
    planned = plan_file.load(command.plan)
    simulation = planned.simulation()
    print(describe_run(planned, simulation))
    if command.html is None and command.png is None and command.perfetto is None and command.json is None:
        return 0
    from terapipe import viz

    events = trace(simulation)
    title = f"{planned.label}, predicted"
    if command.html is not None:
        viz.write_html(command.html, events, title=title)
    if command.perfetto is not None:
        viz.write_perfetto(command.perfetto, events, title=title)
    if command.png is not None:
        viz.write_png(command.png, events, title=title)
    if command.json is not None:
        files.write_text(command.json, json.dumps([list(event) for event in events]) + "\n")
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


__all__ = ["HARDWARE", "parse_bytes", "plan", "profile", "simulate"]
