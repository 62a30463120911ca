"""`terapipe quickstart`: trains a small model on text that every machine has, over two stages, and shows what slices
gain.

The launcher starts two workers of one thread each; the workers train (`terapipe.train.trainer`), sample from the
trained model, and time a step with and without slices in the same run (`comparison`). All numbers that are printed or
written (`report`) were measured in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from terapipe.train import presets
from terapipe.train.config import TrainConfig
from terapipe.world import World, launched_world

RANKS = 2
ROUNDS = 10  # turns of each variant
PROMPT = "def "
MARKER = ".quickstart"  # in the run folder: its checkpoints are a quickstart's, and the next one may replace them


def run(arguments: Sequence[str]) -> int:
    """The verb: the launcher starts the workers, a worker works. Returns the exit status."""
    default = presets.quickstart()
    parser = argparse.ArgumentParser(
        prog="terapipe quickstart", description="Train a small model over two stages.", allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=default.steps, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=ROUNDS,
        help="turns of each variant, two measured steps a turn (default: %(default)s)",
    )
    parser.add_argument(
        "--run-dir", type=Path, default=default.run_dir, help="what to write into (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        raise ValueError(f"--rounds is {options.rounds}; a median with a spread needs at least 2.")
    config = dataclasses.replace(default, steps=options.steps, run_dir=options.run_dir).resolve()
    if launched_world() is not None:
        return _work(config, options.rounds)
    from terapipe.engine import launch
    from terapipe.train.start import check_start

    _clear_earlier(config)
    check_start(config, world=World(size=RANKS, local_size=RANKS), resume=False)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / MARKER).touch()
    print(_introduction(config), flush=True)
    return launch.run_local(RANKS, ["quickstart", *arguments], threads=1)


def _clear_earlier(config: TrainConfig) -> None:
    """Delete the checkpoints of an earlier quickstart in the same folder, and of nothing else."""
    folder = config.checkpoint_folder
    if not folder.exists():
        return
    if not (config.run_dir / MARKER).exists():
        raise ValueError(
            f"{folder} holds checkpoints, but not of a quickstart ({config.run_dir} has no file {MARKER}); choose "
            "another --run-dir, or delete that folder."
        )
    shutil.rmtree(folder)


def _introduction(config: TrainConfig) -> str:
    model = config.model.resolve()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = (
        f"Training a Llama-style model ({model.layers} layers, {model.hidden} wide, {model.parameters():,} parameters) "
        f"on the source text of Python's standard library:\n{config.steps} steps of one sequence of {config.tokens} "
        f"bytes, cut into {config.parallel.slices} slices; {RANKS} stages, each a process with one thread.\n"
    )
    few = f"Note: only {cores} core is usable here, so the stages take turns and the times below say little.\n"
    return text + few if cores < RANKS else text


def _work(config: TrainConfig, rounds: int) -> int:
    from terapipe.engine import launch
    from terapipe.quickstart.comparison import compare
    from terapipe.quickstart.report import summary_of, write
    from terapipe.train import checkpoint, sampling
    from terapipe.train.trainer import Trainer

    world = launch.initialize()
    if world.size != RANKS:
        raise ValueError(f"the quickstart runs {RANKS} stages but {world.size} processes were started; start it alone.")
    try:
        with Trainer(config, world=world) as trainer:
            result = trainer.fit()
            saved = trainer.save()
        if world.rank == 0:
            layers = checkpoint.load_layers(saved)
            sample = sampling.generate_text(layers, PROMPT, tokens=300, temperature=0.6)
            print(f"\nThe trained model continues {PROMPT!r}:\n\n{_indented(PROMPT + sample)}\n", flush=True)
            print("Timing steps with and without slices ...", flush=True)
        comparison = compare(config, world, rounds=rounds)
        if world.rank == 0:
            print(write(config, comparison, summary_of(config, result, comparison)), flush=True)
        return 0
    finally:
        launch.shutdown()


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())
