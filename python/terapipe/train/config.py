"""What a training run is: frozen dataclasses that print, compare and load from TOML (`config_file`). No torch.

A run is resolved in this order, later wins: the preset (`presets`), the keys of `--config FILE.toml`, the command line.
`resolve` then spells the model out and refuses what makes no sense, before any work.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from terapipe.models.config import ModelConfig
from terapipe.models.presets import BYTE_VOCAB
from terapipe.models.presets import PRESETS as MODELS
from terapipe.names import unknown
from terapipe.planner import plan_file
from terapipe.planner.plan_file import PlannedRun
from terapipe.schedule import Plan, make_plan


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A named model, and what differs from it. A size that follows from another (head_dim from hidden and heads) is
    derived again when that one changes."""

    preset: Annotated[str, tyro.conf.arg(aliases=("--model",))] = "debug"
    """Named model: debug, quickstart, gpt3_1b, gpt3_13b, gpt3_44b, gpt3_175b, llama3_8b, llama3_70b."""
    vocab: int | None = None
    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn_hidden: int | None = None
    max_tokens: int | None = None
    position: Literal["learned", "rope"] | None = None
    norm: Literal["layernorm", "rmsnorm"] | None = None
    mlp: Literal["gelu", "swiglu"] | None = None
    bias: bool | None = None
    tied_embeddings: bool | None = None
    rope_theta: float | None = None
    norm_eps: float | None = None
    initial_std: float | None = None

    def resolve(self) -> ModelConfig:
        """The model itself. ValueError for an unknown preset or sizes that do not fit together."""
        if self.preset not in MODELS:
            raise ValueError(unknown("model preset", self.preset, MODELS))
        values = dataclasses.asdict(MODELS[self.preset]())
        changes = {
            key: value for key, value in dataclasses.asdict(self).items() if key != "preset" and value is not None
        }
        if changes.get("hidden", values["hidden"]) != values["hidden"]:
            values |= {"head_dim": 0, "ffn_hidden": 0}
        if changes.get("heads", values["heads"]) != values["heads"]:
            values |= {"head_dim": 0, "kv_heads": 0 if values["kv_heads"] == values["heads"] else values["kv_heads"]}
        return ModelConfig(**(values | changes))

    @classmethod
    def of(cls, model: ModelConfig, preset: str) -> ModelSettings:
        """Settings that name every size of `model`."""
        return cls(preset=preset, **dataclasses.asdict(model))


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where tokens come from."""

    source: Literal["synthetic", "text", "bin"] = "synthetic"
    """synthetic: random sequences that can be learned, no files. text: files or folders, one token a byte. bin:
    memory-mapped token ids."""
    train: tuple[Path, ...] = ()
    """text: files, globs, or folders that are searched. bin: one file."""
    validation: tuple[Path, ...] = ()
    """The same for validation; without it, `validation_share` of the training files (text) or tokens (bin) is held
    out."""
    validation_share: float = 0.05
    suffixes: tuple[str, ...] = (".txt", ".md", ".py")
    """Which files of a folder are text."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Storage type of a bin file."""
    document_end: int | None = None
    """Token id that ends a document in a bin file; tokens then see only their own document."""
    document_tokens: int = 0
    """Synthetic: mean document length; 0: a sequence is one document."""
    packed: bool = True
    """Text: files that share a sequence do not see each other. Off: tokens see whatever shares their sequence."""


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """How a step is cut: into micros of sequences, slices of tokens, stages of layers."""

    plan: Annotated[Path | None, tyro.conf.arg(aliases=("--plan",))] = None
    """A file of `terapipe plan`, which then decides everything below but `ranks`, `links` and `link_slots`."""
    ranks: int = 0
    """Pipeline ranks; 0: as many as processes. One process can step several ranks, for debugging."""
    slices: int = 1
    """Equal token slices of each sequence."""
    slice_tokens: tuple[int, ...] = ()
    """Slice lengths in tokens instead; they must sum to `tokens`."""
    micros: int = 1
    """Microbatches a step."""
    micro_size: int = 1
    """Sequences in a micro."""
    schedule: Literal["terapipe", "seq_1f1b", "gpipe", "one_f_one_b"] = "terapipe"
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage, embedding and head counted as one layer each; without it, as even as possible."""
    warmup_per_hop: int = 1
    """seq_1f1b: forwards a rank may run ahead for each hop; more hides unequal slices and costs memory."""
    recompute: bool = False
    """Keep only the input of each slice and compute the rest again in its backward: less memory, a third more work."""
    links: Literal["auto", "local", "shm", "peer", "dist"] = "auto"
    """auto: shared memory between CPU ranks of one host, else torch.distributed; local: one process steps all ranks."""
    link_slots: int = 0
    """0: a slice stays where it arrived until its backward has run; more: it is copied out of a ring of so many."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW with linear warm-up and a cosine to `min_learning_rate`."""

    learning_rate: float = 3e-3
    min_learning_rate: float = 3e-4
    warmup_steps: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Of matrices only; norms and biases are not decayed."""
    clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Exact ones: a resumed run continues bitwise."""

    every: int = 0
    """Steps between checkpoints; 0: none."""
    keep: int = 2
    """How many of the newest stay."""
    folder: Path | None = None
    """None: `checkpoints` in the run folder."""
    load_step: int | None = None
    """--resume continues from the checkpoint of this step instead of the newest; later ones are then set aside."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    steps: int = 100
    """Optimizer steps of the whole run."""
    tokens: int = 512
    """Tokens in a sequence."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16 keeps fp32 master weights and gradients."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    evaluate_every: int = 0
    """Steps between validation losses; 0: only before and after."""
    evaluate_sequences: int = 8
    """Sequences in a validation loss; 0: no validation."""
    log_every: int = 10
    """Steps between printed lines where the output is no terminal; metrics.jsonl gets every step."""
    run_dir: Path = Path("runs/train")
    """Holds config.toml, metrics.jsonl and checkpoints."""

    def resolve(self) -> TrainConfig:
        """The same run with every size of the model spelled out, checked. ValueError names the key, its value and
        the remedy."""
        model = self.model.resolve()
        self._check(model)
        return dataclasses.replace(
            self, model=ModelSettings.of(model, self.model.preset), parallel=self._planned_settings(model)
        )

    def planned(self) -> PlannedRun | None:
        """The plan file, if the run follows one."""
        return None if self.parallel.plan is None else plan_file.load(self.parallel.plan)

    def _planned_settings(self, model: ModelConfig) -> ParallelSettings:
        """`parallel` as the plan file has it. ValueError for a plan of another run, or one the engine cannot run."""
        planned, given = self.planned(), self.parallel
        if planned is None:
            return given
        plan_file.refuse_other_model(planned, model)
        plan_file.refuse_what_the_engine_lacks(planned)
        for name, wanted in (("tokens", planned.plan.tokens), ("dtype", planned.dtype)):
            if getattr(self, name) != wanted:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but the plan {given.plan} is for {wanted}; give --{name} "
                    f"{wanted}, or plan again."
                )
        free = ParallelSettings(plan=given.plan, ranks=given.ranks, links=given.links, link_slots=given.link_slots)
        settings = dataclasses.replace(
            free,
            micros=planned.plan.micros,
            micro_size=planned.plan.micro_size,
            slices=len(planned.plan.slices),
            slice_tokens=planned.plan.slices,
            stage_layers=tuple(last - first for first, last in planned.plan.stages),
            recompute=planned.layout.recompute,
        )
        if given not in (free, settings):
            other = [f.name for f in dataclasses.fields(given) if getattr(given, f.name) != getattr(free, f.name)]
            raise ValueError(
                f"parallel.plan names {given.plan}, and parallel.{other[0]} is given too; leave one of them out."
            )
        return settings

    def plan(self, ranks: int) -> Plan:
        """The plan for that many pipeline ranks. ValueError for slices, stages or micros that do not fit."""
        parallel = self.parallel
        planned = self.planned()
        if planned is not None:
            if planned.plan.ranks != ranks:
                raise ValueError(
                    f"the plan {parallel.plan} is for {planned.plan.ranks} pipeline ranks, but there are {ranks}; "
                    f"start {planned.plan.ranks} processes (--local-ranks {planned.plan.ranks}), or plan for {ranks}."
                )
            return planned.plan
        ends = list(itertools.accumulate(parallel.stage_layers))
        return make_plan(
            layers=len(self.model.resolve().layer_names()),
            ranks=ranks,
            slices=parallel.slice_tokens or parallel.slices,
            tokens=self.tokens,
            micros=parallel.micros,
            micro_size=parallel.micro_size,
            schedule=parallel.schedule,
            warmup_per_hop=parallel.warmup_per_hop,
            stages=list(itertools.pairwise([0, *ends])) if ends else None,
        )

    def _check(self, model: ModelConfig) -> None:
        for key, least in _AT_LEAST.items():
            value: Any = self
            for part in key.split("."):
                value = getattr(value, part)
            if not value >= least:  # not `<`: a NaN is refused too
                raise ValueError(f"{key} is {value}; it must be at least {least}.")
            if value == math.inf and key != "optimizer.clip":
                raise ValueError(f"{key} is {value}; it must be a number.")
        if self.seed >= 1 << 64:
            raise ValueError(f"seed is {self.seed}; it must be below 2^64.")
        if self.parallel.slice_tokens and self.parallel.slices not in (1, len(self.parallel.slice_tokens)):
            raise ValueError(
                f"parallel.slices is {self.parallel.slices} but parallel.slice_tokens names "
                f"{len(self.parallel.slice_tokens)} slices; give one of them."
            )
        micros, slices = self.parallel.micros, max(self.parallel.slices, len(self.parallel.slice_tokens))
        if micros * slices > MOST_PIECES:
            raise ValueError(
                f"parallel.micros {micros} of {slices} slices are {micros * slices} slices a step; at most "
                f"{MOST_PIECES} are scheduled: take larger micros (parallel.micro_size) or fewer slices."
            )
        if model.position == "learned" and self.tokens > model.max_tokens:
            raise ValueError(
                f"tokens is {self.tokens}, but the model has learned positions for {model.max_tokens}; shorten the "
                "sequence or raise model.max_tokens."
            )
        if self.data.source == "synthetic" and self.data.train:
            raise ValueError("data.train names files, but data.source is 'synthetic'; add --data.source text (or bin).")
        users = {"validation": ("text", "bin"), "document_end": ("bin",), "document_tokens": ("synthetic",)}
        for key, sources in users.items():
            if getattr(self.data, key) != getattr(DataSettings(), key) and self.data.source not in sources:
                raise ValueError(
                    f"data.{key} is given, but data.source {self.data.source!r} does not use it; add --data.source "
                    f"{' or '.join(sources)}, or leave it out."
                )
        if self.data.source != "synthetic" and not self.data.train:
            raise ValueError(
                f"data.source is {self.data.source!r} but data.train names no file or folder; add --data.train PATH."
            )
        for path in (*self.data.train, *self.data.validation):
            if not os.path.exists(path) and "*" not in str(path):
                raise ValueError(
                    f"data path {path} does not exist (working directory {Path.cwd()}), or in a folder that cannot be "
                    "read; check --data.train and --data.validation."
                )
        if self.data.source == "text" and model.vocab < BYTE_VOCAB:
            raise ValueError(
                f"model.vocab is {model.vocab}, but text data needs {BYTE_VOCAB} token ids: every byte and the end "
                "of a document."
            )
        for key, value in (("beta1", self.optimizer.beta1), ("beta2", self.optimizer.beta2)):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"optimizer.{key} is {value}; it must be at least 0 and below 1.")
        if not self.optimizer.eps > 0.0:
            raise ValueError(f"optimizer.eps is {self.optimizer.eps}; it must be above 0.")
        if not 0.0 < self.data.validation_share < 1.0:
            raise ValueError(f"data.validation_share is {self.data.validation_share}; it must lie between 0 and 1.")

    @property
    def checkpoint_folder(self) -> Path:
        return self.checkpoint.folder or self.run_dir / "checkpoints"


MOST_PIECES = 100_000  # for which a schedule of two ranks is made and checked in seconds
_AT_LEAST = {
    **dict.fromkeys(("steps", "seed", "evaluate_every", "evaluate_sequences", "checkpoint.every"), 0),
    **dict.fromkeys(("parallel.ranks", "parallel.link_slots", "data.document_tokens"), 0),
    **dict.fromkeys(("tokens", "log_every", "checkpoint.keep"), 1),
    **{f"parallel.{key}": 1 for key in ("slices", "micros", "micro_size", "warmup_per_hop")},
    **{f"optimizer.{key}": 0 for key in ("learning_rate", "min_learning_rate", "warmup_steps", "weight_decay", "clip")},
}
