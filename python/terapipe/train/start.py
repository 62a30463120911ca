"""What can be refused before a process is started or a file written: devices, data, links, memory, the run folder.

`check_start` asks all of it in the process that will launch the others, and a `Trainer` what concerns it once more.
"""

from __future__ import annotations

import os

import torch

from terapipe import files
from terapipe.train import checkpoint
from terapipe.train.config import TrainConfig
from terapipe.train.data import Source, open_source
from terapipe.train.memory_needs import check_memory
from terapipe.world import World


def check_start(config: TrainConfig, *, world: World, resume: bool) -> None:
    """Everything that can be refused before a process is started or a file written: ValueError with the remedy."""
    config = config.resolve()
    config.plan(pipeline_ranks(config, world.size))
    check_links(config, world.size)
    check_run_memory(config, world, pick_device(config.device, world))
    open_data(config)
    check_run_dir(config, resume)


def pick_device(name: str, world: World) -> str:
    """ "cpu" or "cuda". ValueError for GPUs that are not there: each local rank needs one of its own."""
    gpus = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if name == "cuda" and gpus == 0:
        raise ValueError(
            "device is 'cuda', but torch sees no GPU here; use --device cpu, or see what `terapipe env` says."
        )
    if 0 < gpus < world.local_size:
        raise ValueError(
            f"{world.local_size} local ranks need a GPU each, but torch sees {gpus}; start {gpus}, or use --device cpu "
            "(one process can step several ranks on one GPU: --parallel.ranks N without --local-ranks)."
        )
    return "cuda" if gpus else "cpu"


def pipeline_ranks(config: TrainConfig, processes: int) -> int:
    """Ranks of the plan: several processes are one rank each, one may step several. ValueError where the config says
    another number."""
    ranks = config.parallel.ranks or processes
    if processes > 1 and ranks != processes:
        raise ValueError(
            f"parallel.ranks is {ranks}, but {processes} processes run; make them equal, or leave parallel.ranks at 0."
        )
    return ranks


def open_data(config: TrainConfig) -> Source:
    """The tokens of the run."""
    parallel = config.parallel
    vocab = config.model.resolve().vocab
    return open_source(
        config.data,
        vocab=vocab,
        tokens=config.tokens,
        sequences=parallel.micros * parallel.micro_size,
        seed=config.seed,
    )


def check_links(config: TrainConfig, processes: int) -> None:
    """ValueError for links that do not reach another process."""
    if config.parallel.links == "local" and processes > 1:
        raise ValueError(
            f"parallel.links is 'local', which runs every rank in one process, but {processes} processes run; start "
            "one."
        )


def check_run_memory(config: TrainConfig, world: World, device: str) -> str | None:
    """A warning for a run that may not fit; ValueError for one that cannot."""
    return check_memory(
        config.plan(pipeline_ranks(config, world.size)),
        config.model.resolve(),
        dtype=config.dtype,
        recompute=config.parallel.recompute,
        world=world,
        device=device,
    )


def check_run_dir(config: TrainConfig, resume: bool) -> None:
    """ValueError for checkpoints in the way of a new run, none for one that resumes, or folders that cannot be
    written."""
    folder = config.checkpoint_folder
    files.check_folder(config.run_dir, "--run-dir")
    files.check_folder(folder, "--checkpoint.folder" if config.checkpoint.folder else "--run-dir")
    found = checkpoint.find_all(folder)
    if found and not resume:
        raise ValueError(
            f"{folder} holds checkpoints of an earlier run; continue it with --resume, or choose another --run-dir."
        )
    if resume and not found:
        raise ValueError(
            f"there is nothing to resume: {folder} holds no checkpoint; leave --resume out, or check --run-dir "
            f"({os.getcwd()})."
        )
    if resume:
        checkpoint.select(folder, config.checkpoint.load_step)
    elif config.checkpoint.load_step is not None:
        raise ValueError(
            f"checkpoint.load_step is {config.checkpoint.load_step}, but the run does not resume; add --resume, or "
            "leave it out."
        )
