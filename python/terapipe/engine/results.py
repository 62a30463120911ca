"""What `Pipeline.step`, `evaluate` and `memory` return."""

from __future__ import annotations

from dataclasses import dataclass

from terapipe.engine.hand_off_times import HandOffSummary


@dataclass(frozen=True)
class StepResult:
    """`loss` in nats per target and `grad_norm` of the whole model, the same on every rank; `tokens` in the batch,
    with and without a target; `seconds` of this rank's step; `bubble_share` the share of all ranks' time in which they
    did not compute (0 where one process steps every rank, since it never waits); `hand_offs` how much of the
    communication was hidden (None in one process, or over several hosts, whose clocks differ)."""

    loss: float
    tokens: int
    grad_norm: float
    seconds: float
    bubble_share: float
    hand_offs: HandOffSummary | None = None


@dataclass(frozen=True)
class EvaluationResult:
    """`loss` in nats per target over `targets` targets, the same on every rank."""

    loss: float
    targets: int


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this process: its peak (of the process on a CPU, of the allocator on a GPU), K/V caches, gradient
    accumulators."""

    peak_bytes: int
    cache_bytes: int
    accumulator_bytes: int
