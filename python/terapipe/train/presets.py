"""Named runs: functions that return a TrainConfig, from which `--config` and the command line go on. No torch."""

from __future__ import annotations

from pathlib import Path

from terapipe.names import unknown
from terapipe.train.config import (
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    TrainConfig,
)
from terapipe.train.text_files import stdlib_text


def debug() -> TrainConfig:
    """Seconds on any machine: synthetic tokens, a model of four blocks."""
    return TrainConfig()


def quickstart() -> TrainConfig:
    """What scripts/quickstart.sh trains: bytes of Python's standard library, one sequence a step, in slices."""
    return TrainConfig(
        model=ModelSettings(preset="quickstart"),
        data=DataSettings(source="text", train=(stdlib_text(),)),
        parallel=ParallelSettings(slices=8),
        optimizer=OptimizerSettings(learning_rate=3e-3, min_learning_rate=3e-4, warmup_steps=20),
        steps=200,
        tokens=2048,
        device="cpu",
        evaluate_sequences=16,
        log_every=20,
        run_dir=Path("runs/quickstart"),
    )


def gpt3_1b() -> TrainConfig:
    """GPT3-1B over two ranks, four slices of a 2048-token sequence, bf16; name your own token file with
    --data.train."""
    return TrainConfig(
        model=ModelSettings(preset="gpt3_1b"),
        data=DataSettings(source="bin"),
        parallel=ParallelSettings(slices=4),
        optimizer=OptimizerSettings(learning_rate=2e-4, min_learning_rate=2e-5, warmup_steps=200),
        checkpoint=CheckpointSettings(every=500),
        steps=10_000,
        tokens=2048,
        dtype="bf16",
        evaluate_every=500,
        run_dir=Path("runs/gpt3_1b"),
    )


def llama3_8b() -> TrainConfig:
    """Llama-3 8B's shape on 8192-token sequences in 16 slices, bf16, from scratch; name your own token file with
    --data.train."""
    return TrainConfig(
        model=ModelSettings(preset="llama3_8b"),
        data=DataSettings(source="bin", token_dtype="uint32"),
        parallel=ParallelSettings(slices=16, schedule="seq_1f1b", warmup_per_hop=2),
        optimizer=OptimizerSettings(learning_rate=3e-4, min_learning_rate=3e-5, warmup_steps=1000),
        checkpoint=CheckpointSettings(every=500),
        steps=100_000,
        tokens=8192,
        dtype="bf16",
        evaluate_every=1000,
        run_dir=Path("runs/llama3_8b"),
    )


PRESETS = {function.__name__: function for function in (debug, quickstart, gpt3_1b, llama3_8b)}


def preset(name: str) -> TrainConfig:
    """The preset of that name; ValueError with the nearest one otherwise."""
    if name not in PRESETS:
        raise ValueError(unknown("preset", name, PRESETS))
    return PRESETS[name]()
