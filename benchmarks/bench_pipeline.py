"""A training step over two processes, by schedule and slices, beside torch.distributed.pipelining in the same run.

All variants share the layers, their first weights and the batch of `SEQUENCES` sequences; forward, backward and
reduction are timed, without an optimizer. torch's schedules get whole sequences as microbatches (they know no slices)
and the same layers, so that the rows differ in the schedule and in the links: torch's and "dist" go over gloo, the rest
through shared memory. Every variant's loss is checked against the first one's of its dtype before timing, and steps are
interleaved (`terapipe.timing.step_times`).

Run by `terapipe bench pipeline`; it starts its two workers itself, one thread each.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from terapipe.engine import Batch

RANKS, TOKENS, ROUNDS = 2, 2048, 7
SEQUENCES = (1, 4)
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}  # relative

Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One row: whose schedule, how many sequences a step, how many slices of each."""

    peer: str  # "terapipe", "torch"
    schedule: str
    sequences: int
    slices: int
    warmup_per_hop: int = 1
    links: str = "auto"
    dtype: str = "fp32"

    def __str__(self) -> str:
        ahead = f", warm-up {self.warmup_per_hop}" if self.warmup_per_hop > 1 else ""
        links = "" if self.links == "auto" else f", {self.links} links"
        dtype = "" if self.dtype == "fp32" else f", {self.dtype}"
        return f"{self.peer} {self.schedule}, {self.sequences} x {self.slices} slices{ahead}{links}{dtype}"

    @property
    def comparable(self) -> tuple[int, str]:
        """Same for variants that compute the same loss."""
        return self.sequences, self.dtype


VARIANTS = (
    Variant("torch", "GPipe", 1, 1),
    Variant("terapipe", "gpipe", 1, 1),
    *(Variant("terapipe", "terapipe", 1, slices) for slices in (2, 4, 8, 16)),
    Variant("terapipe", "terapipe", 1, 8, links="dist"),
    Variant("torch", "GPipe", 1, 1, dtype="bf16"),
    Variant("terapipe", "gpipe", 1, 1, dtype="bf16"),
    *(Variant("terapipe", "terapipe", 1, slices, dtype="bf16") for slices in (4, 8)),
    Variant("torch", "GPipe", 4, 1),
    Variant("torch", "1F1B", 4, 1),
    Variant("terapipe", "one_f_one_b", 4, 1),
    Variant("terapipe", "terapipe", 4, 8),
    Variant("terapipe", "seq_1f1b", 4, 8),
    Variant("terapipe", "seq_1f1b", 4, 8, warmup_per_hop=2),
)


def run() -> list[Row]:
    """Rows with times in milliseconds; `speedup` over torch's GPipe with as many sequences in the same dtype. Empty on
    ranks but the first."""
    if "RANK" in os.environ:
        return _work()
    from terapipe.engine import launch

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        status = launch.run_local(RANKS, ["bench", "pipeline", "--json", str(file)], threads=1)
        if status != 0:
            raise RuntimeError(f"a worker of the benchmark ended with status {status}; its message is above.")
        rows: list[Row] = json.loads(file.read_text())["rows"]
        return rows


def plot(rows: list[Row], path: Path) -> None:
    """Step time by variant, a group of bars for each number of sequences."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.45 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    names = [row["variant"] for row in rows]
    axes.barh(
        names,
        [row["step_ms"] for row in rows],
        xerr=[[row["step_ms"] - row["low_ms"] for row in rows], [row["high_ms"] - row["step_ms"] for row in rows]],
        color=["#8a8f98" if row["peer"] == "torch" else "#2f6fde" for row in rows],
    )
    axes.invert_yaxis()
    axes.set_xlabel(
        f"milliseconds a step (sequences of {TOKENS} tokens, {RANKS} stages; median, half of the steps within the line)"
    )
    figure.savefig(path, dpi=150)


def _work() -> list[Row]:
    import torch

    from terapipe.engine import launch
    from terapipe.models import PRESETS, layers
    from terapipe.timing.step_times import measure
    from terapipe.train.data import Synthetic

    world = launch.initialize()
    config = PRESETS["quickstart"]()
    batches = {count: Synthetic(tokens=TOKENS, vocab=config.vocab, sequences=count).train(0) for count in SEQUENCES}
    with contextlib.ExitStack() as cleanup:
        steps: dict[str, Callable[[], float]] = {}
        for variant in VARIANTS:
            make = _terapipe_step if variant.peer == "terapipe" else _torch_step
            dtype = torch.float32 if variant.dtype == "fp32" else torch.bfloat16
            given = layers(config, seed=0, dtype=dtype)
            job = Job(variant, given, config.hidden, dtype, batches[variant.sequences], world.rank, cleanup)
            steps[str(variant)] = make(job)
        _check_losses({variant: steps[str(variant)]() for variant in VARIANTS})
        times = measure(steps, rounds=ROUNDS)
    launch.shutdown()
    if world.rank != 0:
        return []
    baseline = {v.comparable: times[str(v)].median_s for v in VARIANTS if v.peer == "torch" and v.schedule == "GPipe"}
    return [
        {
            "variant": str(variant),
            **asdict(variant),
            "step_ms": time.median_s * 1e3,
            "low_ms": time.quarter_s * 1e3,
            "high_ms": time.three_quarters_s * 1e3,
            "tokens_per_s": variant.sequences * TOKENS / time.median_s,
            "speedup": baseline[variant.comparable] / time.median_s,
            "threads": torch.get_num_threads(),
        }
        for variant in VARIANTS
        for time in [times[str(variant)]]
    ]


@dataclass(frozen=True)
class Job:
    """What a variant is built from: layers by global name (factories), the whole batch, and who closes what is
    opened."""

    variant: Variant
    layers: Mapping[str, Callable[[], Any]]
    hidden: int
    dtype: torch.dtype
    batch: Batch
    rank: int
    cleanup: contextlib.ExitStack


def _terapipe_step(job: Job) -> Callable[[], float]:
    from terapipe.engine import Pipeline
    from terapipe.schedule import make_plan

    plan = make_plan(
        layers=len(job.layers),
        ranks=RANKS,
        slices=job.variant.slices,
        tokens=TOKENS,
        micros=job.variant.sequences,
        schedule=job.variant.schedule,
        warmup_per_hop=job.variant.warmup_per_hop,
    )
    pipeline = Pipeline(job.layers, plan, hidden_size=job.hidden, dtype=job.dtype, links=job.variant.links)
    job.cleanup.callback(pipeline.close)
    return lambda: pipeline.step(job.batch).loss


def _torch_step(job: Job) -> Callable[[], float]:
    """The same layers in torch's PipelineStage, each with its own process group, sequences as microbatches."""
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining

    from terapipe.engine import cross_entropy_sum
    from terapipe.schedule import split_layers
    from tpkernels import Mask

    class Layers(torch.nn.Module):
        """A stage's layers behind the one-argument forward that torch wants."""

        def __init__(self, first: int, last: int) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(make() for make in list(job.layers.values())[first:last])
            self.mask, self.positions = Mask(), torch.arange(TOKENS).unsqueeze(0)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = layer(hidden, None, self.mask, self.positions)
            return hidden

    module = Layers(*split_layers(len(job.layers), RANKS)[job.rank])
    stage = pipelining.PipelineStage(module, job.rank, RANKS, torch.device("cpu"), group=dist.new_group())
    kinds = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}
    targets = job.batch.num_targets
    schedule = kinds[job.variant.schedule](
        stage,
        job.variant.sequences,
        loss_fn=lambda logits, target: cross_entropy_sum(logits, target) / targets,
        scale_grads=False,
    )

    def step() -> float:
        module.zero_grad()
        losses: list[torch.Tensor] = []
        if job.rank == 0:
            schedule.step(job.batch.tokens)
        else:
            schedule.step(target=job.batch.targets, losses=losses)
        # As in terapipe's step, every rank learns the loss.
        loss = torch.stack(losses).sum().detach().double() if losses else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(loss)
        return float(loss)

    return step


def _check_losses(losses: Mapping[Variant, float]) -> None:
    for comparable in {variant.comparable for variant in losses}:
        found = {str(variant): loss for variant, loss in losses.items() if variant.comparable == comparable}
        expected, (_, dtype) = next(iter(found.values())), comparable
        if not all(abs(loss - expected) <= LOSS_TOLERANCE[dtype] * expected for loss in found.values()):
            raise RuntimeError(f"the variants disagree about the loss, so timing them is pointless: {found}")
