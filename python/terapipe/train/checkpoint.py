"""Save and resume a training run with torch.distributed.checkpoint, whatever the number of stages on either side.

A checkpoint is a folder `step-00000120`: tensors under global names ("model.blocks.0.query.weight",
"optimizer.blocks.0.query.weight.exp_avg", "rng.cpu.0"), of which every rank writes and reads those it owns, and
run.json (step, model config, what the trainer adds). "model." holds the optimizer's masters: fp32 for bf16 training
too. A tied parameter is stored once, under its first name.

The trap: a process may die at any moment. Everything is written below a name that starts with a dot and is renamed
when complete; only a folder `step-*` with a run.json counts. All ranks must see one file system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from terapipe import files
from terapipe.models.config import ModelConfig, tied_parameters
from terapipe.train.checkpoint_folder import (
    INDEX_CHECKSUM,
    VERSION,
    CheckingReader,
    CheckpointInfo,
    checksum,
    damage,
    discard,
    find_all,
    latest,
    read_info,
    select,
    set_aside_after,
)
from terapipe.train.optimizer import Optimizer

__all__ = ["CheckpointInfo", "damage", "find_all", "latest", "load", "load_layers", "read_info", "save", "select"]

MODEL, OPTIMIZER, RNG = "model.", "optimizer.", "rng."

Ties = Sequence[tuple[str, str]]
ModelDescription = ModelConfig | Mapping[str, Any]


def save(
    folder: str | Path,
    *,
    optimizer: Optimizer,
    model: ModelDescription,
    ties: Ties = (),
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `folder/step-N`, N the optimizer's update count, then delete all but the `keep` newest. Returns its path.

    Later ones, which a run that went on from an earlier step left behind, are set aside: `step-M.abandoned`.

    Every rank of `group` calls it together. model: the config that `load` compares, for a custom model any JSON
    values. extra: JSON values that `load` hands back, such as the data's seed.
    """
    if keep < 1:
        raise ValueError(f"checkpoint: keep is {keep}; at least the new checkpoint must stay, so give 1 or more.")
    folder = Path(folder)
    final = folder / f"step-{optimizer.step_count:08d}"
    partial = folder / f".{final.name}.partial"
    leads = _rank(group) == 0
    if leads:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".step-*"):
            shutil.rmtree(leftover)
        partial.mkdir()
    _barrier(group)
    copies = {copy for _, copy in ties}
    tensors = {entry.key(): entry.tensor for entry in _owned(optimizer) if entry.name not in copies}
    try:
        with _one_process_is_fine(), _readable_errors(f"writing {partial} failed", "free space, then resume"):
            dcp.save(
                tensors | _rng_state(_rank(group)),
                checkpoint_id=partial,
                process_group=group,
                no_dist=not dist.is_initialized(),
            )
    except RuntimeError as error:  # every rank has stopped writing
        if leads:
            shutil.rmtree(partial, ignore_errors=True)
        raise RuntimeError(f"{error} {shutil.disk_usage(folder).free:,} bytes are free there now.") from None
    if leads:
        run = {
            "version": VERSION,
            "step": optimizer.step_count,
            "model": _as_dict(model),
            "extra": dict(extra or {}),
            INDEX_CHECKSUM: checksum(partial / ".metadata"),
        }
        _write_durably(partial / "run.json", json.dumps(run, indent=2) + "\n")
        if final.exists():
            discard(final)
        partial.rename(final)
        set_aside_after(folder, optimizer.step_count)
        for old in find_all(folder)[:-keep]:
            discard(old)
    _barrier(group)
    return final


def load(
    path: str | Path,
    *,
    optimizer: Optimizer,
    model: ModelDescription,
    ties: Ties = (),
    group: dist.ProcessGroup | None = None,
) -> CheckpointInfo:
    """Put a checkpoint (or the newest one of a folder) into parameters, optimizer and random generators.

    Every rank of `group` calls it together; each reads what it owns. ValueError, on every rank and before anything is
    changed, if the checkpoint is of another model: it names the differing config fields and shapes.
    """
    info = read_info(path)
    stored = _stored_shapes(info.path)
    wanted: dict[str, Tensor] = {}
    doubles: list[tuple[Tensor, Tensor]] = []  # a tied copy beside its original in this process
    originals = {copy: original for original, copy in ties}
    for entry in _owned(optimizer):
        key = entry.key(originals)
        if key in wanted:
            doubles.append((wanted[key], entry.tensor))
        else:
            wanted[key] = entry.tensor
    differences = _config_differences(info, _as_dict(model)) + _shape_differences(stored, wanted)
    reports = _gather((differences, [key for key in wanted if key.startswith(MODEL)]), group)
    differences = list(dict.fromkeys(difference for report, _ in reports for difference in report))
    owned = {key for _, keys in reports for key in keys}
    differences += [
        f"{key.removeprefix(MODEL)} is not in this model"
        for key in stored
        if key.startswith(MODEL) and key not in owned
    ]
    if differences:
        more = f"; and {len(differences) - 4} more differences" if len(differences) > 4 else ""
        raise ValueError(
            f"checkpoint {info.path} is of another model: {'; '.join(differences[:4])}{more}. Resume with the config "
            "it was saved with, or start in another folder."
        )
    # A rank that the saving run did not have keeps its own generators.
    generators = {key: state for key, state in _rng_state(_rank(group)).items() if stored.get(key) == state.shape}
    _read(info.path, wanted | generators, group)
    with torch.no_grad():
        for original, copy in doubles:
            copy.copy_(original)
    optimizer.restore(info.step)
    _set_rng_state(generators, _rank(group))
    return info


def load_layers(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, nn.Module]:
    """All layers of a terapipe model in this process, with a checkpoint's weights: global name -> layer, first to last.

    Needs no process group and touches none, so one rank may call it alone.
    """
    from terapipe.models.transformer import layers

    info = read_info(path)
    try:
        config = ModelConfig(**info.model)
    except TypeError as error:
        raise ValueError(
            f"checkpoint {info.path} does not describe a terapipe model ({error}); build its layers yourself "
            "and use load."
        ) from error
    built = {name: make() for name, make in layers(config, dtype=dtype, device=device).items()}
    originals = {copy: original for original, copy in tied_parameters(config)}
    parameters = {
        f"{layer}.{name}": value for layer, module in built.items() for name, value in module.named_parameters()
    }
    wanted = {MODEL + name: value.detach() for name, value in parameters.items() if name not in originals}
    if differences := _shape_differences(_stored_shapes(info.path), wanted):
        raise ValueError(f"checkpoint {info.path} does not fit its own config: {'; '.join(differences[:4])}.")
    _read(info.path, wanted, None, alone=True)
    with torch.no_grad():
        for copy, original in originals.items():
            parameters[copy].copy_(parameters[original])
    return built


@dataclass(frozen=True)
class _Entry:
    """One tensor of this process: a master weight (no moment) or a moment of the parameter with this global name."""

    kind: str
    name: str
    moment: str
    tensor: Tensor

    def key(self, originals: Mapping[str, str] | None = None) -> str:
        """In the checkpoint; `originals` sends a tied copy to its first name."""
        return self.kind + (originals or {}).get(self.name, self.name) + self.moment


def _owned(optimizer: Optimizer) -> list[_Entry]:
    masters = [_Entry(MODEL, name, "", master.detach()) for name, master in optimizer.masters.items()]
    moments = [
        _Entry(OPTIMIZER, name, f".{moment}", tensor)
        for name, by_moment in optimizer.moments().items()
        for moment, tensor in by_moment.items()
    ]
    return masters + moments


def _stored_shapes(path: Path) -> dict[str, torch.Size]:
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items()
    return {key: entry.size for key, entry in entries if isinstance(entry, TensorStorageMetadata)}


def _read(path: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None, *, alone: bool = False) -> None:
    """RuntimeError on every rank if one finds damage."""
    remedy = "use another one (--checkpoint.load-step)"
    with _one_process_is_fine(), _readable_errors(f"reading {path} failed", remedy):
        dcp.load(
            dict(tensors),
            storage_reader=CheckingReader(path),
            process_group=group,
            no_dist=alone or not dist.is_initialized(),
        )


def _config_differences(info: CheckpointInfo, model: Mapping[str, Any]) -> list[str]:
    missing = object()
    fields = list(dict.fromkeys([*model, *info.model]))
    values = [(field, info.model.get(field, missing), model.get(field, missing)) for field in fields]
    return [
        f"{field} is {'not set' if there is missing else there} there and {'not set' if here is missing else here} here"
        for field, there, here in values
        if there != here
    ]


def _shape_differences(stored: Mapping[str, torch.Size], wanted: Mapping[str, Tensor]) -> list[str]:
    differences = []
    for key, tensor in wanted.items():
        name = key.removeprefix(MODEL)
        if key not in stored:
            differences.append(f"{name} is not in the checkpoint")
        elif stored[key] != tensor.shape:
            differences.append(f"{name} is {list(stored[key])} there and {list(tensor.shape)} here")
    return differences


def _as_dict(model: ModelDescription) -> dict[str, Any]:
    """As JSON gives it back, so that both sides of a comparison have the same types."""
    values = dataclasses.asdict(model) if isinstance(model, ModelConfig) else dict(model)
    return dict(json.loads(json.dumps(values)))


def _rng_state(rank: int) -> dict[str, Tensor]:
    state = {f"{RNG}cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state[f"{RNG}cuda.{rank}"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: Mapping[str, Tensor], rank: int) -> None:
    if f"{RNG}cpu.{rank}" in state:
        torch.set_rng_state(state[f"{RNG}cpu.{rank}"])
    if f"{RNG}cuda.{rank}" in state:
        torch.cuda.set_rng_state(state[f"{RNG}cuda.{rank}"])


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _barrier(group: dist.ProcessGroup | None) -> None:
    if dist.is_initialized():
        dist.barrier(group)


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _write_durably(path: Path, text: str) -> None:
    with files.naming(path), path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _readable_errors(what: str, remedy: str) -> Iterator[None]:
    """torch's CheckpointException is no Exception and carries a traceback of each rank; say what went wrong instead."""
    try:
        yield
    except CheckpointException as error:
        causes = {rank: str(cause[0]) for rank, cause in error.failures.items()}
        causes_in_words = "; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(causes.items()))
        raise RuntimeError(f"{what} ({causes_in_words}); {remedy}.") from None


@contextlib.contextmanager
def _one_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
