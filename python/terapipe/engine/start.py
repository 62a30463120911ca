"""Before the first step: arguments are checked, this process's layers are built, and all ranks hear how others fared.

Every rank tells all others what it holds and what it was given, or why it cannot start (`Start`), and all come to the
same answer: a rank that waits for one that gave up would hang.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from terapipe.engine.batch import KnownIds
from terapipe.engine.census import Census, OwnedParameter, Tie, own_parameters, refuse_shared, take_census
from terapipe.engine.failure import Failure, PipelineError, words
from terapipe.engine.opening import Process
from terapipe.engine.stage import Loss, Stage
from terapipe.engine.trial import joined, try_out
from terapipe.schedule import Plan
from terapipe.world import launched_world

LayerSource = nn.Module | Callable[[], nn.Module]
"""A layer, or a factory of one that is called only on the rank that owns it."""


@dataclass(frozen=True)
class Given:
    """What a Pipeline is made of (see there)."""

    layers: Mapping[str, LayerSource]
    plan: Plan
    hidden_size: int
    loss: Loss
    ties: Sequence[Tie]
    device: torch.device | str
    dtype: torch.dtype
    recompute: bool
    links: str
    link_slots: int
    link_timeout: timedelta
    stall_seconds: float

    def words(self) -> dict[str, str]:
        """What must be the same on every rank."""
        return {
            "plan": self.plan.to_json(),
            "layers": json.dumps(list(self.layers)),
            "ties": json.dumps([list(tie) for tie in self.ties]),
            "hidden_size": str(self.hidden_size),
            "dtype": str(self.dtype),
            "links": f"{self.links} {self.link_slots}",
        }


@dataclass(frozen=True)
class Built:
    """This process's share of the model, and what it knows of the others'. local: it runs every rank, and `rank` is 0.
    stages: rank -> index -> stage. processes: of all ranks."""

    local: bool
    rank: int
    device: torch.device
    stages: Mapping[int, Mapping[int, Stage]]
    census: Census
    ids: KnownIds
    processes: Sequence[Process]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Global name -> parameter."""
        return {
            f"{layer}.{name}": parameter
            for layer, module in _layers_of(self.stages).items()
            for name, parameter in module.named_parameters()
        }


@dataclass(frozen=True)
class Start:
    """What every rank tells all others before the first step: what it holds, what it was given, the ids that its layers
    know, its process, or why it cannot start."""

    parameters: list[OwnedParameter]
    given: dict[str, str]
    failure: Failure | None
    process: Process
    ids: KnownIds = field(default_factory=KnownIds)


def build(given: Given) -> Built:
    """A collective call. ValueError on every rank when arguments, layers and processes do not fit; when a rank fails
    in building, it raises its own error, and the others a PipelineError."""
    plan = given.plan
    processes = dist.get_world_size() if dist.is_initialized() else 1
    local = runs_every_rank(given.links, processes)
    rank = 0 if local or processes == 1 else dist.get_rank()
    stages: dict[int, dict[int, Stage]] = {}
    trials: list[KnownIds] = []
    trouble: Exception | None = None
    doing = "checking its arguments"
    try:
        device = torch.device(given.device)
        check_links(given.links, plan, processes)
        if not isinstance(given.link_timeout, timedelta) or given.link_timeout <= timedelta():
            raise ValueError(f"link_timeout is {given.link_timeout!r}; give a datetime.timedelta longer than zero.")
        check_layers(given.layers, plan)
        doing = "building its layers"
        for each in range(plan.ranks) if local else (rank,):
            stages[each] = {}
            for index in plan.schedule.rank_stages(each):
                stages[each][index] = _build_stage(given, index, device)
                trials.append(try_out(stages[each][index], hidden_size=given.hidden_size))
    except Exception as error:  # the other ranks wait to hear from this one
        trouble = error
    failure = None if trouble is None else Failure(rank, doing, words(trouble))
    own = own_parameters(_layers_of(stages), rank)
    starts = _tell_all(
        Start(own, given.words(), failure, Process.own(), joined(trials)), processes=1 if local else processes
    )
    check_starts(starts, here=rank, trouble=trouble)
    census = take_census([start.parameters for start in starts], list(given.layers), given.ties)
    ids = joined(start.ids for start in starts)
    return Built(local, rank, device, stages, census, ids, [start.process for start in starts])


def _build_stage(given: Given, index: int, device: torch.device) -> Stage:
    plan = given.plan
    first, last = plan.stages[index]
    layers: dict[str, nn.Module] = {}
    for name in list(given.layers)[first:last]:
        source = given.layers[name]
        layer: object = source if isinstance(source, nn.Module) else source()
        if not isinstance(layer, nn.Module):
            raise ValueError(
                f"layer {name!r} is a {type(layer).__name__}; it must be an nn.Module or a function that makes one"
            )
        layers[name] = layer.to(device)
    return Stage(
        index,
        layers,
        slice_lengths=plan.slices,
        micro_size=plan.micro_size,
        first=index == 0,
        last=index == len(plan.stages) - 1,
        loss=given.loss,
        device=device,
        dtype=given.dtype,
        recompute=given.recompute,
    )


def _layers_of(stages: Mapping[int, Mapping[int, Stage]]) -> dict[str, nn.Module]:
    """Global name -> layer, in the order in which they were built."""
    return {
        name: layer for of_rank in stages.values() for stage in of_rank.values() for name, layer in stage.layers.items()
    }


def _tell_all(start: Start, *, processes: int) -> list[Start]:
    if processes == 1:
        return [start]
    starts: list[Any] = [None] * processes
    dist.all_gather_object(starts, start)
    return starts


def runs_every_rank(links: str, processes: int) -> bool:
    """Whether this process does; "local" said aloud does so beside other processes too, for comparisons."""
    return links == "local" or (links == "auto" and processes == 1)


def check_links(links: str, plan: Plan, processes: int) -> None:
    """ValueError unless there is a process for each rank, or this one runs all."""
    if links not in ("auto", "local", "shm", "peer", "dist"):
        raise ValueError(f"unknown links {links!r}; choose 'auto', 'local', 'shm', 'peer' or 'dist'.")
    launched = launched_world()
    if links == "auto" and launched is not None and launched.size > 1 and not dist.is_initialized():
        raise ValueError(
            f"this is process {launched.rank} of a launch of {launched.size}, but no process group was started, so "
            "each would train the whole model alone; call terapipe.engine.launch.initialize() first, or say "
            "links='local'."
        )
    if not runs_every_rank(links, processes) and (
        processes != plan.ranks or (processes == 1 and not dist.is_initialized())
    ):
        started = f"{processes} processes were started" if dist.is_initialized() else "no process group was started"
        raise ValueError(
            f"the plan has {plan.ranks} ranks but {started}; start {plan.ranks} (torchrun "
            f"--nproc-per-node {plan.ranks}, or --local-ranks {plan.ranks}); or make a plan for {processes}."
        )


def check_layers(named: Mapping[str, LayerSource], plan: Plan) -> None:
    if len(named) != plan.layers:
        raise ValueError(
            f"{len(named)} layers were given but the plan's stages cover {plan.layers}: {list(plan.stages)}."
        )
    for name, source in named.items():
        if not callable(source):
            raise ValueError(
                f"layer {name!r} is a {type(source).__name__}; it must be an nn.Module or a function that makes one."
            )
    refuse_shared(own_parameters({name: layer for name, layer in named.items() if isinstance(layer, nn.Module)}, 0))
    split = [str(action) for action in plan.schedule.actions() if action.kind not in ("F", "B")]
    if split:
        raise ValueError(
            f"the engine runs forward (F) and full backward (B) actions; the schedule also has {split[0]}."
        )


def check_starts(starts: Sequence[Start], *, here: int, trouble: Exception | None = None) -> None:
    """Every rank was given what rank 0 was, and built its layers; `trouble` is why this one did not."""
    for rank, start in enumerate(starts):
        for what, value in start.given.items():
            if value != starts[0].given[what]:
                raise ValueError(
                    f"rank {rank} was given another {what} than rank 0; give every rank the same:\n"
                    f"rank 0: {starts[0].given[what]}\nrank {rank}: {value}"
                ) from trouble
    if trouble is not None:
        raise trouble
    for start in starts:
        if start.failure is not None:
            raise PipelineError(start.failure, here=here)
