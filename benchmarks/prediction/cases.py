"""The cases: a model, or stages that sleep, and a sequence length. Imports nothing, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass


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


CASES = {
    case.name: case
    for case in (
        Case("small, 1024 tokens", "real", 2, 1024, hidden=256, layers=4, heads=4, rounds=5),
        Case("small, 2048 tokens", "real", 2, 2048, hidden=256, layers=4, heads=4, rounds=4),
        Case("small, 4096 tokens", "real", 2, 4096, hidden=256, layers=4, heads=4),
        Case("narrow, 8192 tokens", "real", 2, 8192, hidden=128, layers=2, heads=2),
        Case("wide, 1024 tokens", "real", 2, 1024, hidden=512, layers=4, heads=8),
        Case("wide, 2048 tokens", "real", 2, 2048, hidden=512, layers=2, heads=8),
        Case("gpt, 2048 tokens", "real", 2, 2048, hidden=256, layers=4, heads=4, family="gpt", vocab=2000),
        Case("4 micros, 1024 tokens", "real", 2, 1024, hidden=256, layers=2, heads=4, micros=4, slices=(1, 2, 4)),
        Case("sleep, 4 ranks", "sleep", 4, 4096, slices=(1, 2, 4, 8, 16, 32)),
        Case("sleep, 4 ranks, 4 micros", "sleep", 4, 4096, micros=4, slices=(1, 2, 4, 8)),
        Case("sleep, 8 ranks", "sleep", 8, 8192, slices=(1, 4, 8, 16, 32)),
    )
}
