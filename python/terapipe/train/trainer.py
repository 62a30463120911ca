"""The training loop: batch -> pipeline step -> optimizer step, with validation, metrics and exact checkpoints.

Every process of a run executes it with the same config: alone (one process steps every rank of the plan), or as one
rank of a launch. Loss, norm and validation loss are the same on every rank, so all ranks take the same branches; rank
0 writes the run folder.

The trap: step numbers. `step` counts finished optimizer steps; the batch of the next one is `source.train(step)`. A
checkpoint of step n is the state after n steps, so a resumed run continues with batch n and repeats nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from terapipe import files
from terapipe.engine import Pipeline, StepResult, launch
from terapipe.engine.batch import NO_TARGET
from terapipe.models import layers, tied_parameters
from terapipe.timing.foreign_load import LEAST_S, Sample, disturbance, foreign_cores, sample
from terapipe.train import checkpoint
from terapipe.train.checkpoint_folder import find_after, set_aside_after
from terapipe.train.config import TrainConfig
from terapipe.train.config_file import to_toml
from terapipe.train.data import Source
from terapipe.train.metrics import MetricsFile, Progress, StepMetrics, ValidationMetrics, keep_earlier
from terapipe.train.optimizer import Optimizer
from terapipe.train.start import check_links, check_run_dir, check_run_memory, open_data, pick_device, pipeline_ranks
from terapipe.train.step_prediction import WARM_STEPS, StepPrediction, from_actions, from_device, unpredicted_line
from terapipe.train.text_files import named
from terapipe.world import ALONE, World, launched_world

log = logging.getLogger(__name__)

# What may differ between a run and the one that it continues, for rounding at most.
ROUNDING_ONLY = ("ranks", "slices", "slice_tokens", "schedule", "stage_layers", "warmup_per_hop", "plan")
WITHOUT_EFFECT = {
    "log_every",
    "run_dir",
    "device",
    *(f"checkpoint.{key}" for key in ("every", "keep", "folder", "load_step")),
}
WITHOUT_EFFECT |= {f"parallel.{key}" for key in (*ROUNDING_ONLY, "links", "link_slots")}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TrainResult:
    """A finished run. Losses in nats a token; a validation loss is None when nothing was evaluated (or, `before`,
    when it was resumed). Step times are None in a run too short to tell; the measured one is the median of warm
    steps. foreign_cores: what others kept busy meanwhile (CPU only)."""

    rank: int
    steps: int
    loss: float | None
    validation_loss_before: float | None
    validation_loss_after: float | None
    train_s: float
    run_dir: str
    predicted_step_s: float | None = None
    measured_step_s: float | None = None
    foreign_cores: float | None = None


def train(config: TrainConfig, *, resume: bool = False) -> TrainResult:
    """Run `config` to its last step in this process, joining the launch named by the environment if there is one."""
    device = pick_device(config.device, launched_world() or ALONE)
    world = launch.initialize(device=device)
    if device == "cuda":
        device = f"cuda:{world.local_rank}"
    try:
        with Trainer(config, world=world, device=device, resume=resume) as trainer:
            if trainer.first and not config.checkpoint.every:
                print("the model will not be saved, since checkpoint.every is 0; --checkpoint.every 100 would")
            return trainer.fit()
    finally:
        launch.shutdown()


class Trainer:
    """One process's part of a run. A context manager: links and files are closed on any exit.

    Raises ValueError before the first step for a config that does not fit, data that is not there, a run folder in
    use, a checkpoint of another model; PipelineError when a rank fails.
    """

    def __init__(self, config: TrainConfig, *, world: World, device: str = "cpu", resume: bool = False) -> None:
        self.config = config = config.resolve()
        self.world, self.device = world, device
        self.model = config.model.resolve()
        self.plan = config.plan(pipeline_ranks(config, world.size))
        if (too_much := check_run_memory(config, world, torch.device(device).type)) and self.first:
            log.warning(too_much)
        self.source: Source = open_data(config)
        if self.first and (left_out := getattr(self.source, "left_out", ())):
            log.warning("left out of the data, since they are not text: %s", named(left_out))
        check_run_dir(config, resume)
        check_links(config, world.size)
        torch.manual_seed(config.seed)
        dtype = DTYPES[config.dtype]
        self.ties = tied_parameters(self.model)
        self.pipeline = Pipeline(
            layers(self.model, seed=config.seed, dtype=dtype, device=device),
            self.plan,
            hidden_size=self.model.hidden,
            ties=self.ties,
            device=device,
            dtype=dtype,
            recompute=config.parallel.recompute,
            links=config.parallel.links,
            link_slots=config.parallel.link_slots,
        )
        with contextlib.ExitStack() as self._closing:
            self._closing.push(self.pipeline)  # its own exit tells the other ranks what failed here
            self._begin(resume)
            self._closing = self._closing.pop_all()  # nothing failed: closed at this object's exit

    def _begin(self, resume: bool) -> None:
        config = self.config
        self.optimizer = Optimizer(self.pipeline.named_parameters(), config.optimizer, steps=config.steps)
        self.step = 0
        self._memory_bytes = 0
        planned = config.planned()
        self._prediction = StepPrediction(planned.step_s, "by the plan") if planned else self._predict_for_gpu()
        self._steps_here, self._warm_step_s = 0, list[float]()
        self._warm_since: Sample | None = None
        if resume:
            self._resume()
        self._first_step = self.step
        self._metrics = self._open_run_dir()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.__exit__(kind, error, trace)

    @property
    def first(self) -> bool:
        """Whether this process speaks for the run."""
        return self.world.rank == 0

    def fit(self, *, print_line: Callable[[str], None] = print, bar: bool | None = None) -> TrainResult:
        """Train to the config's last step, from wherever the run stands."""
        config, started = self.config, time.perf_counter()
        loss = before = after = None
        shown = bar if self.first else False
        with Progress(
            config.steps,
            every=config.log_every,
            first_step=self.step,
            print_line=print_line if self.first else _silent,
            bar=shown,
        ) as progress:
            if self.step == 0:
                before = after = self._validate(progress)
            elif self.first and self.step == self._first_step:
                print_line(f"continuing after step {self.step} of {config.steps}")
            while self.step < config.steps:
                record = self.train_step()
                loss = record.loss
                self._record(record)
                progress.step(record)
                self._compare(record.step_s)
                last = self.step == config.steps
                if last or (config.evaluate_every and self.step % config.evaluate_every == 0):
                    after = self._validate(progress)
                if config.checkpoint.every and (last or self.step % config.checkpoint.every == 0):
                    self.save()
        prediction, measured = self._prediction, self._warm_step_s
        foreign = self._foreign_cores()
        if prediction is not None and measured and self.first:
            words = "" if foreign is None else disturbance(foreign, local_ranks=self.world.local_size)
            print_line(prediction.line(measured, disturbance=words))
        elif measured and self.first:
            print_line(unpredicted_line(measured, torch.cuda.get_device_name(), self.config.dtype))
        return TrainResult(
            self.world.rank,
            self.step,
            loss,
            before,
            after,
            time.perf_counter() - started,
            str(config.run_dir),
            prediction.step_s if prediction is not None and measured else None,
            statistics.median(measured) if measured else None,
            foreign,
        )

    def _predict_for_gpu(self) -> StepPrediction | None:
        if torch.device(self.device).type != "cuda":
            return None
        together = self.world.size == 1
        name = torch.cuda.get_device_name()
        return from_device(self.plan, self.model, name, dtype=self.config.dtype, together=together)

    def _compare(self, step_s: float) -> None:
        """Keep the time of a warm step; predict from the actions of the last one before, where no plan did."""
        self._steps_here += 1
        if self._steps_here > WARM_STEPS:
            self._warm_step_s.append(step_s)
            return
        if self._steps_here < WARM_STEPS:
            return
        if self._prediction is None and self.device == "cpu":
            with self.pipeline.failing_in("collecting the timeline"):
                events = self.pipeline.timeline()
            together = self.world.size == 1
            self._prediction = from_actions(self.plan, events, step_s, step=self.step, together=together)
        self._warm_since = sample()

    def _foreign_cores(self) -> float | None:
        """Cores that other processes kept busy since the warm steps began; None where that tells nothing."""
        if self._warm_since is None or self.device != "cpu":
            return None
        with self.pipeline.failing_in("asking for the load of every rank"):
            foreign = foreign_cores(self._warm_since, sample())
        return foreign if sum(self._warm_step_s) >= LEAST_S else None

    def train_step(self) -> StepMetrics:
        """One optimizer step on the next batch."""
        began = time.perf_counter()
        result = self.pipeline.step(self.source.train(self.step))
        rate = self.optimizer.step(result.grad_norm)
        self.step += 1
        seconds = time.perf_counter() - began
        return self._describe(result, rate, seconds)

    def evaluate(self) -> ValidationMetrics | None:
        """Loss over the first `evaluate_sequences` validation sequences, always the same ones; None when there are
        none."""
        sequences = self.plan.micros * self.plan.micro_size
        batches = min(self.source.validation_batches, -(-self.config.evaluate_sequences // sequences))
        total, targets = 0.0, 0
        for index in range(batches):
            batch = self.source.validation(index)
            if not bool((batch.targets != NO_TARGET).any()):  # in a long row of ends of documents
                continue
            result = self.pipeline.evaluate(batch)
            total, targets = total + result.loss * result.targets, targets + result.targets
        return ValidationMetrics(self.step, total / targets, targets) if targets else None

    def save(self) -> Path:
        """Write a checkpoint of the state after `step` steps; every rank calls it."""
        with self.pipeline.failing_in(f"saving the checkpoint of step {self.step}"):
            return checkpoint.save(
                self.config.checkpoint_folder,
                optimizer=self.optimizer,
                model=self.model,
                ties=self.ties,
                extra={"config": to_toml(self.config)},
                keep=self.config.checkpoint.keep,
            )

    def _validate(self, progress: Progress) -> float | None:
        record = self.evaluate()
        if record is None:
            return None
        self._record(record)
        progress.validation(record)
        return record.validation_loss

    def _record(self, record: StepMetrics | ValidationMetrics) -> None:
        if self._metrics is not None:
            self._metrics.write(record)

    def _describe(self, result: StepResult, rate: float, seconds: float) -> StepMetrics:
        # The peak seldom moves after the first two steps of this process, and asking all ranks takes a collective.
        if self.step <= self._first_step + 2 or self.step % self.config.log_every == 0:
            peak = torch.tensor(self.pipeline.memory().peak_bytes, dtype=torch.int64)
            if self.world.size > 1:
                with self.pipeline.failing_in("asking for the memory of every rank"):
                    dist.all_reduce(peak)
            self._memory_bytes = int(peak)
        return StepMetrics(
            step=self.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=rate,
            tokens_per_s=result.tokens / seconds,
            step_s=seconds,
            bubble_share=result.bubble_share,
            memory_bytes=self._memory_bytes,
            hidden_share=None if result.hand_offs is None else result.hand_offs.hidden_share,
        )

    def _resume(self) -> None:
        path = checkpoint.select(self.config.checkpoint_folder, self.config.checkpoint.load_step)
        info = checkpoint.load(path, optimizer=self.optimizer, model=self.model, ties=self.ties)
        self.step = info.step
        if self.first and (differences := _differences(info.extra.get("config", ""), self.config)):
            log.warning("this run differs from the one that it continues: %s", "; ".join(differences))
        if self.step > self.config.steps:
            raise ValueError(
                f"the checkpoint {info.path} is from step {info.step}, but steps is {self.config.steps}; raise "
                "--steps, or choose another --run-dir."
            )

    def _open_run_dir(self) -> MetricsFile | None:
        if not self.first:
            return None
        folder = self.config.run_dir
        folder.mkdir(parents=True, exist_ok=True)
        if self.step == 0:
            keep_earlier(folder / "config.toml")
        again = dataclasses.replace(self.config.checkpoint, load_step=None)  # of this start only
        with files.naming(folder / "config.toml"):
            text = to_toml(dataclasses.replace(self.config, checkpoint=again))
            (folder / "config.toml").write_text(text, encoding="utf-8")
        if later := find_after(self.config.checkpoint_folder, self.step):
            # From now on this run is the one that stopped here: the next --resume must not go on from where it was not.
            keep_earlier(folder / "metrics.jsonl", copy=True)
            set_aside_after(self.config.checkpoint_folder, self.step)
            log.warning(
                "set aside, since this run goes on from step %d: %s", self.step, ", ".join(path.name for path in later)
            )
        metrics = MetricsFile(folder / "metrics.jsonl", first_step=self.step)
        self._closing.callback(metrics.close)
        return metrics


def _differences(saved: str, config: TrainConfig) -> list[str]:
    """Settings that change a run's numbers and are not those of the config saved as TOML."""
    before, now = (dict(_settings(text)) for text in (saved, to_toml(config)))
    return [f"{key} was {before[key]}, is {now[key]}" for key in now if key in before and before[key] != now[key]]


def _settings(toml: str) -> Iterator[tuple[str, str]]:
    section = ""
    for line in toml.splitlines():
        if line.startswith("["):
            section = line.strip("[]") + "."
        elif " = " in line:
            key, value = line.split(" = ", 1)
            if section + key not in WITHOUT_EFFECT:
                yield section + key, value


def _silent(line: str) -> None:
    """What ranks other than the first print."""
