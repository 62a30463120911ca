"""Checkpoints: an exact resume, also on other stages; nothing half-written counts; another model is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from terapipe.models import ModelConfig, layers, tied_parameters
from terapipe.train import checkpoint
from terapipe.train.config import OptimizerSettings
from terapipe.train.optimizer import Optimizer

CONFIG = ModelConfig(vocab=19, hidden=16, layers=2, heads=2, ffn_hidden=20, tied_embeddings=True)
TIES = tied_parameters(CONFIG)
SETTINGS = OptimizerSettings(warmup_steps=2)


def stage(names: list[str], *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Optimizer:
    """The optimizer of a process that owns these layers."""
    owned = {name: make() for name, make in layers(CONFIG, dtype=dtype, seed=seed).items() if name in names}
    named = {f"{layer}.{key}": value for layer, module in owned.items() for key, value in module.named_parameters()}
    return Optimizer(named, SETTINGS, steps=50)


def train(optimizer: Optimizer, steps: int) -> None:
    """Updates from gradients that depend on step and weights, not on how layers are spread over processes."""
    for _ in range(steps):
        for name, parameter in optimizer.parameters.items():
            source = TIES[0][0] if name == TIES[0][1] else name
            random = torch.Generator().manual_seed(optimizer.step_count * 1000 + sum(source.encode()))
            parameter.grad = 0.1 * parameter.detach().float() + torch.randn(parameter.shape, generator=random)
        optimizer.step(3.0)


def state(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    moments = {f"{name}.{key}": value for name, both in optimizer.moments().items() for key, value in both.items()}
    parameters = {f"{name}.rounded": value.detach() for name, value in optimizer.parameters.items()}
    return {key: value.clone() for key, value in (dict(optimizer.masters) | moments | parameters).items()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in actual.items())


ALL = list(CONFIG.layer_names())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_resumed_run_continues_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    run = stage(ALL, dtype=dtype)
    train(run, 3)
    path = checkpoint.save(tmp_path, optimizer=run, model=CONFIG, ties=TIES, extra={"data_seed": 7})
    draws = torch.rand(4)
    train(run, 4)
    resumed = stage(ALL, dtype=dtype, seed=99)
    train(resumed, 1)
    info = checkpoint.load(tmp_path, optimizer=resumed, model=CONFIG, ties=TIES)
    assert (info.path, info.step, info.extra) == (path, 3, {"data_seed": 7})
    assert torch.equal(torch.rand(4), draws), "the random generator did not continue"
    assert resumed.step_count == 3
    train(resumed, 4)
    assert_same(state(resumed), state(run))


def test_bf16_training_resumes_an_fp32_checkpoint_from_its_masters(tmp_path: Path) -> None:
    run = stage(ALL)
    train(run, 2)
    checkpoint.save(tmp_path, optimizer=run, model=CONFIG, ties=TIES)
    narrow = stage(ALL, dtype=torch.bfloat16)
    checkpoint.load(tmp_path, optimizer=narrow, model=CONFIG, ties=TIES)
    for name, master in narrow.masters.items():
        assert torch.equal(master, run.masters[name])
        assert torch.equal(narrow.parameters[name], run.masters[name].bfloat16())


SPLIT = [ALL[:2], ALL[2:]]


def two_ranks(rank: int, port: int, folder: Path, problems: mp.SimpleQueue) -> None:
    """Load what one process saved, train on, save; then try another model. Reports "" or a traceback."""
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        run = stage(SPLIT[rank], seed=5)
        checkpoint.load(folder / "one", optimizer=run, model=CONFIG, ties=TIES)
        train(run, 2)
        checkpoint.save(folder / "two", optimizer=run, model=CONFIG, ties=TIES)
        torch.manual_seed(100 + rank)
        train(run, 1)
        checkpoint.save(folder / "two", optimizer=run, model=CONFIG, ties=TIES, keep=1)
        expected, draws = state(run), torch.rand(3)
        checkpoint.load(folder / "two", optimizer=run, model=CONFIG, ties=TIES)
        assert_same(state(run), expected)
        assert torch.equal(torch.rand(3), draws), "each rank has its own random generator"
        # Only rank 1 sees a difference of shapes; both must raise, or rank 0 would wait for ever.
        wrong = Optimizer(
            {"head.norm.weight": nn.Parameter(torch.ones(3))} if rank else run.parameters, SETTINGS, steps=9
        )
        with pytest.raises(ValueError, match=r"head.norm.weight is \[16\] there and \[3\] here"):
            checkpoint.load(folder / "two", optimizer=wrong, model=CONFIG, ties=TIES)
        dist.destroy_process_group()
        problems.put("")
    except BaseException:
        problems.put(f"rank {rank}:\n{traceback.format_exc()}")


def test_one_process_continues_on_two_and_back(tmp_path: Path) -> None:
    alone = stage(ALL)
    train(alone, 3)
    checkpoint.save(tmp_path / "one", optimizer=alone, model=CONFIG, ties=TIES)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    problems = context.SimpleQueue()
    workers = [context.Process(target=two_ranks, args=(rank, port, tmp_path, problems)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    stuck = [worker for worker in workers if worker.is_alive()]
    for worker in stuck:
        worker.kill()
    reports = [problems.get() for _ in range(2) if not problems.empty()]
    assert not stuck and reports == ["", ""], "\n".join(reports) or "a worker hung"
    train(alone, 3)
    back = stage(ALL, seed=6)
    assert checkpoint.load(tmp_path / "two", optimizer=back, model=CONFIG, ties=TIES).step == 6
    assert_same(state(back), state(alone))
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["step-00000006"]


def test_layers_come_back_in_one_process_without_an_optimizer(tmp_path: Path) -> None:
    run = stage(ALL, dtype=torch.bfloat16)
    train(run, 2)
    checkpoint.save(tmp_path, optimizer=run, model=CONFIG, ties=TIES)
    built = checkpoint.load_layers(tmp_path)
    assert list(built) == ALL
    for layer, module in built.items():
        for name, value in module.named_parameters():
            assert torch.equal(value, run.masters[f"{layer}.{name}"]), name
    custom = Optimizer({"0.w": nn.Parameter(torch.ones(2))}, SETTINGS, steps=1)
    checkpoint.save(tmp_path / "custom", optimizer=custom, model={"depth": 3})
    with pytest.raises(ValueError, match=r"does not describe a terapipe model.*depth"):
        checkpoint.load_layers(tmp_path / "custom")


def test_the_newest_stay_and_only_complete_ones_count(tmp_path: Path) -> None:
    run = stage(["head"])
    assert checkpoint.latest(tmp_path / "nowhere") is None
    for _ in range(4):
        train(run, 1)
        checkpoint.save(tmp_path, optimizer=run, model=CONFIG, keep=2)
    assert [path.name for path in checkpoint.find_all(tmp_path)] == ["step-00000003", "step-00000004"]
    (tmp_path / "step-00000009").mkdir()
    shutil.copytree(tmp_path / "step-00000004", tmp_path / ".step-00000005.partial")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000004"
    train(run, 1)
    checkpoint.save(tmp_path, optimizer=run, model=CONFIG, keep=2)
    checkpoint.save(tmp_path, optimizer=run, model=CONFIG, keep=2)  # the same step again replaces it
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000005"
    assert not list(tmp_path.glob(".*"))


def test_a_writer_that_dies_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stage(["head"])
    train(run, 1)
    good = checkpoint.save(tmp_path, optimizer=run, model=CONFIG)
    train(run, 1)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    for target in ("_write_durably", "dcp.save"):
        with monkeypatch.context() as patch:
            owner, _, name = target.rpartition(".")
            patch.setattr(getattr(checkpoint, owner) if owner else checkpoint, name, full_disk)
            with pytest.raises(OSError, match="No space"):
                checkpoint.save(tmp_path, optimizer=run, model=CONFIG)
        assert checkpoint.latest(tmp_path) == good


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 32, "head_dim": 16}, ["hidden is 16 there and 32 here", "head_dim is 8 there and 16 here"]),
        ({"layers": 3}, ["layers is 2 there and 3 here", "blocks.2"]),
        ({"layers": 1}, ["layers is 2 there and 1 here", "is not in this model"]),
        ({"norm_eps": 1e-6}, ["norm_eps is 1e-05 there and 1e-06 here"]),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, change: dict[str, object], words: list[str]) -> None:
    run = stage(ALL)
    checkpoint.save(tmp_path, optimizer=run, model=CONFIG, ties=TIES)
    other = dataclasses.replace(CONFIG, **change)  # type: ignore[arg-type]
    built = {name: make() for name, make in layers(other).items()}
    named = {f"{layer}.{key}": value for layer, module in built.items() for key, value in module.named_parameters()}
    wrong = Optimizer(named, SETTINGS, steps=1)
    before = state(wrong)
    with pytest.raises(ValueError, match="is of another model") as caught:
        checkpoint.load(tmp_path, optimizer=wrong, model=other, ties=TIES)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert_same(state(wrong), before)


def test_no_checkpoint_and_one_of_another_layout_are_named(tmp_path: Path) -> None:
    run = stage(["head"])
    with pytest.raises(ValueError, match="no checkpoint at"):
        checkpoint.load(tmp_path, optimizer=run, model=CONFIG)
    path = checkpoint.save(tmp_path, optimizer=run, model=CONFIG)
    (path / "run.json").write_text('{"version": 2}')
    with pytest.raises(ValueError, match="layout version 2"):
        checkpoint.read_info(tmp_path)
    with pytest.raises(ValueError, match="keep is 0"):
        checkpoint.save(tmp_path, optimizer=run, model=CONFIG, keep=0)
    assert math.isfinite(run.step(1.0))


def test_a_full_disk_is_one_readable_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise CheckpointException("save", {1: (OSError(28, "No space left on device"), StackSummary())})

    monkeypatch.setattr(checkpoint.dcp, "save", full)
    words = r"step-00000000.partial failed \(rank 1: .*No space left.*; free space, .* [\d,]+ bytes are free there now"
    with pytest.raises(RuntimeError, match=words):
        checkpoint.save(tmp_path, optimizer=stage(ALL), model=CONFIG, ties=TIES)
    assert not list(tmp_path.iterdir()), "what is left of it takes the space that is missing"


def _flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_a_flipped_bit_is_told_or_of_no_effect(tmp_path: Path) -> None:
    run = stage(ALL)
    train(run, 2)
    path = checkpoint.save(tmp_path, optimizer=run, model=CONFIG, ties=TIES)
    file = next(path.glob("*.distcp"))
    other = stage(ALL, seed=7)
    saved, told = state(run), 0
    for position in range(0, file.stat().st_size, file.stat().st_size // 61):
        _flip(file, position)
        try:
            checkpoint.load(path, optimizer=other, model=CONFIG, ties=TIES)
        except RuntimeError as error:
            assert re.search(r"reading .* failed \(rank 0: .*\); use another one", str(error), re.DOTALL)
            told += "does not have its checksum" in str(error)
        else:
            assert_same(state(other), saved)
            other = stage(ALL, seed=7)
        _flip(file, position)
    assert told > 20
    weight = file.read_bytes().index(run.masters["blocks.0.query.weight"].detach().numpy().tobytes())
    _flip(file, weight)
    with pytest.raises(RuntimeError, match=r"model.blocks.0.query.weight in __0_0.distcp does not have its checksum"):
        checkpoint.load_layers(path)


def test_a_checkpoint_without_a_sum_of_its_index_still_loads(tmp_path: Path) -> None:
    run = stage(["head"])
    path = checkpoint.save(tmp_path, optimizer=run, model=CONFIG)
    written = json.loads((path / "run.json").read_text())
    del written["index_crc32"]
    (path / "run.json").write_text(json.dumps(written))
    assert checkpoint.load(path, optimizer=run, model=CONFIG).path == path
    _flip(path / ".metadata", (path / ".metadata").read_bytes().index(b"relative_path"))
    assert "its index .metadata cannot be read" in checkpoint.damage(path)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (lambda path: _cut(next(path.glob("*.distcp"))), r"distcp has \d+ of \d+ bytes"),
    "missing": (lambda path: next(path.glob("*.distcp")).unlink(), r"distcp is missing"),
    "no index": (lambda path: (path / ".metadata").unlink(), r"its index .metadata cannot be read"),
    "bad index": (lambda path: _cut(path / ".metadata"), r"its index .metadata does not have its checksum"),
    "another index": (
        lambda path: _flip(path / ".metadata", (path / ".metadata").read_bytes().index(b"relative_path")),
        r"its index .metadata does not have its checksum",
    ),
    "another step": (
        lambda path: (path / "run.json").write_text((path / "run.json").read_text().replace('"step": ', '"step": 1')),
        r"run.json is of step 1\d",
    ),
    "bad run.json": (lambda path: (path / "run.json").write_text('{"version": 1, "st'), r"run.json cannot be read"),
    "poor run.json": (
        lambda path: (path / "run.json").write_text('{"version": 1}'),
        r"run.json cannot be read.*'step'",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_with_the_whole_ones(tmp_path: Path, name: str) -> None:
    run = stage(["head"])
    for _ in range(3):
        train(run, 1)
        checkpoint.save(tmp_path, optimizer=run, model=CONFIG, keep=3)
    hurt, words = DAMAGES[name]
    assert not any(checkpoint.damage(path) for path in checkpoint.find_all(tmp_path))
    hurt(tmp_path / "step-00000003")
    match = (
        rf"step-00000003 is damaged: .*{words}.* Whole ones there: step 1, 2; resume with --checkpoint.load-step 2\."
    )
    for path in (tmp_path, tmp_path / "step-00000003"):
        with pytest.raises(ValueError, match=match):
            checkpoint.load(path, optimizer=run, model=CONFIG)
        with pytest.raises(ValueError, match=match):
            checkpoint.load_layers(path)
    hurt(tmp_path / "step-00000002")
    with pytest.raises(ValueError, match=r"Whole ones there: step 1; "):
        checkpoint.select(tmp_path)
    hurt(tmp_path / "step-00000001")
    with pytest.raises(ValueError, match=r"No other one there is whole\."):
        checkpoint.select(tmp_path)
    with pytest.raises(ValueError, match="has no checkpoint of step 7; it has those of steps 1, 2, 3"):
        checkpoint.select(tmp_path, 7)


def test_later_checkpoints_are_set_aside_and_never_crowd_out_new_ones(tmp_path: Path) -> None:
    run = stage(["head"])
    for _ in range(4):
        train(run, 1)
        checkpoint.save(tmp_path, optimizer=run, model=CONFIG, keep=4)
    for _ in range(2):
        checkpoint.load(checkpoint.select(tmp_path, 2), optimizer=run, model=CONFIG)
        train(run, 1)
        path = checkpoint.save(tmp_path, optimizer=run, model=CONFIG, keep=2)
        assert [found.name for found in checkpoint.find_all(tmp_path)] == ["step-00000002", "step-00000003"]
        assert checkpoint.latest(tmp_path) == path
        assert [aside.name for aside in tmp_path.glob("*.abandoned")] == ["step-00000004.abandoned"]
