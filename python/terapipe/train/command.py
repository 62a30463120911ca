"""The command line of `terapipe train`: every key of TrainConfig, and how to start. No torch.

The trap: preset and config file decide the defaults of all other options, so they are read before the rest is parsed.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from terapipe.train import config_file, presets
from terapipe.train.config import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a decoder with token-level pipeline parallelism. Later wins: preset, config file, command line."""

    preset: Annotated[str, tyro.conf.arg(help=f"Where to start from: {', '.join(presets.PRESETS)}.")] = "debug"
    config_file: Annotated[Path | None, tyro.conf.arg(name="config", help="TOML file with any of the keys below.")] = (
        None
    )
    print_config: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="Print the resolved config as TOML and stop.")
    ] = False
    resume: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help="Continue from the newest checkpoint (or --checkpoint.load-step)."),
    ] = False
    local_ranks: Annotated[int, tyro.conf.arg(help="Start this many worker processes on this machine; 0: none.")] = 0
    threads_per_rank: Annotated[int, tyro.conf.arg(help="CPU threads of each worker of --local-ranks.")] = 1
    json: Annotated[Path | None, tyro.conf.arg(help="Write the result here too.")] = None
    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=TrainConfig)


def parse(arguments: Sequence[str]) -> TrainCommand:
    """The command. ValueError for a bad preset or config file; tyro explains a bad option, with the nearest known
    ones, and raises SystemExit(2)."""
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument("--preset", default="debug")
    reader.add_argument("--config", type=Path)
    first, _ = reader.parse_known_args(arguments)
    base = presets.preset(first.preset)
    if first.config is not None:
        base = config_file.load(first.config, base)
    command = tyro.cli(TrainCommand, default=TrainCommand(config=base), args=list(arguments), prog="terapipe train")
    if command.local_ranks < 0 or command.threads_per_rank < 1:
        raise ValueError(
            f"--local-ranks is {command.local_ranks} and --threads-per-rank {command.threads_per_rank}; workers are 0 "
            "(none) or more, of at least one thread each."
        )
    return command
