"""What is checked before the first step: processes against ranks, layers against stages, and that all ranks were given
the same.

Every rank tells all others what it holds and what it was given, or why it cannot start (`Start`), and all come to the
same answer: a rank that waits for one that gave up would hang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn

from terapipe.engine.batch import KnownIds
from terapipe.engine.census import OwnedParameter, own_parameters, refuse_shared
from terapipe.engine.failure import Failure, PipelineError
from terapipe.engine.opening import Process
from terapipe.schedule import Plan
from terapipe.world import launched_world

LayerSource = nn.Module | Callable[[], nn.Module]
"""A layer, or a factory of one that is called only on the rank that owns it."""


@dataclass(frozen=True)
class Start:
    """What every rank tells all others before the first step: what it holds, what it was given, the ids that its layers
    know, its process, or why it cannot start."""

    parameters: list[OwnedParameter]
    given: dict[str, str]
    failure: Failure | None
    process: Process
    ids: KnownIds = field(default_factory=KnownIds)


def choose_links(links: str, plan: Plan, processes: int) -> bool:
    """Whether this process runs every rank; "local" said aloud does so beside other processes too, for comparisons."""
    if links not in ("auto", "local", "shm", "peer", "dist"):
        raise ValueError(f"unknown links {links!r}; choose 'auto', 'local', 'shm', 'peer' or 'dist'.")
    launched = launched_world()
    if links == "auto" and launched is not None and launched.size > 1 and not dist.is_initialized():
        raise ValueError(
            f"this is process {launched.rank} of a launch of {launched.size}, but no process group was started, so "
            "each would train the whole model alone; call terapipe.engine.launch.initialize() first, or say "
            "links='local'."
        )
    local = links == "local" or (links == "auto" and processes == 1)
    if not local and (processes != plan.ranks or (processes == 1 and not dist.is_initialized())):
        started = f"{processes} processes were started" if dist.is_initialized() else "no process group was started"
        raise ValueError(
            f"the plan has {plan.ranks} ranks but {started}; start {plan.ranks} (torchrun "
            f"--nproc-per-node {plan.ranks}, or --local-ranks {plan.ranks}); or make a plan for {processes}."
        )
    return local


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
