"""The training loop in one process: it learns, a resumed run is bitwise the uninterrupted one, bad starts are refused
first.

Runs over real processes are in test_trainer_processes.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from terapipe.train import config_file
from terapipe.train.config import (
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    TrainConfig,
)
from terapipe.train.metrics import read_lines
from terapipe.train.start import check_start
from terapipe.train.trainer import Trainer, TrainResult, train
from terapipe.world import World

TINY = TrainConfig(
    model=ModelSettings(vocab=32, hidden=16, layers=2, heads=2, kv_heads=1),
    parallel=ParallelSettings(ranks=2, slice_tokens=(5, 11, 1)),
    optimizer=OptimizerSettings(learning_rate=1e-2, warmup_steps=2),
    steps=6,
    tokens=17,
    device="cpu",
    evaluate_sequences=3,
)


def with_changes(config: TrainConfig, **changes: object) -> TrainConfig:
    """`section__key=value` replaces a key of a section."""
    for key, value in changes.items():
        section, _, inner = key.partition("__")
        change = dataclasses.replace(getattr(config, section), **{inner: value}) if inner else value
        config = dataclasses.replace(config, **{section: change})
    return config


def run(config: TrainConfig, *, resume: bool = False, lines: list[str] | None = None) -> TrainResult:
    """lines: receives what is printed."""
    with Trainer(config, world=World(), resume=resume) as trainer:
        return trainer.fit(print_line=([] if lines is None else lines).append, bar=False)


def losses(config: TrainConfig) -> list[float]:
    return [line["loss"] for line in read_lines(config.run_dir / "metrics.jsonl") if "loss" in line]


def test_a_model_that_will_not_be_saved_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for every, said in ((0, 1), (1, 0)):
        train(with_changes(TINY, run_dir=tmp_path / str(every), steps=1, checkpoint__every=every))
        assert capsys.readouterr().out.count("--checkpoint.every 100 would") == said


def test_it_learns_the_synthetic_walks(tmp_path: Path) -> None:
    config = with_changes(TINY, run_dir=tmp_path, steps=150, tokens=64, parallel=ParallelSettings(slices=2))
    result = run(config)
    assert result.validation_loss_before == pytest.approx(math.log(32), abs=0.2)
    assert result.validation_loss_after is not None and result.validation_loss_after < 2.2  # ln(4) is perfect


def test_the_run_folder_holds_metrics_of_every_step_and_the_resolved_config(tmp_path: Path) -> None:
    config = with_changes(TINY, run_dir=tmp_path, steps=4, evaluate_every=2)
    run(config)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], "validation_loss" in line) for line in lines] == [
        (0, True), (1, False), (2, False), (2, True), (3, False), (4, False), (4, True),
    ]  # fmt: skip
    for line in lines:
        assert line.pop("hidden_share", None) is None  # one process: nothing travels
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in line.values()), line
    assert config_file.load(tmp_path / "config.toml", TrainConfig()) == config.resolve()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(dtype: str, tmp_path: Path) -> None:
    config = with_changes(TINY, dtype=dtype, checkpoint__every=2, model__tied_embeddings=True)
    whole = with_changes(config, run_dir=tmp_path / "whole")
    result = run(whole)
    broken = with_changes(config, run_dir=tmp_path / "broken")
    with Trainer(broken, world=World()) as trainer:  # stops after step 5, so step 5 is done twice
        for _ in range(5):
            record = trainer.train_step()
            trainer._record(record)
            if trainer.step % 2 == 0:
                trainer.save()
    printed: list[str] = []
    resumed = run(broken, resume=True, lines=printed)
    assert printed[0] == f"continuing after step 4 of {config.steps}"
    assert losses(broken) == losses(whole)
    assert resumed.validation_loss_after == result.validation_loss_after
    assert [path.name for path in sorted(broken.checkpoint_folder.iterdir())] == ["step-00000004", "step-00000006"]


def test_accumulation_in_slices_and_stages_does_not_change_the_losses(tmp_path: Path) -> None:
    variants = {
        "alone": ParallelSettings(ranks=1, micros=4),
        "sliced": ParallelSettings(ranks=4, micros=4, slice_tokens=(1, 9, 7)),
        "again": ParallelSettings(ranks=4, micros=4, slice_tokens=(1, 9, 7), recompute=True),
        "seq": ParallelSettings(ranks=2, micros=2, micro_size=2, slices=3, schedule="seq_1f1b", warmup_per_hop=2),
    }
    runs = {name: with_changes(TINY, run_dir=tmp_path / name, parallel=parallel) for name, parallel in variants.items()}
    for config in runs.values():
        run(config)
    assert losses(runs["again"]) == losses(runs["sliced"])
    for name in ("sliced", "seq"):
        np.testing.assert_allclose(losses(runs[name]), losses(runs["alone"]), rtol=2e-5, err_msg=name)


def test_text_trains_and_validates_on_other_files(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(9):
        (text / f"{number}.txt").write_text(f"file {number} " * 30)
    config = with_changes(
        TINY, run_dir=tmp_path / "run", model__vocab=257, data=DataSettings(source="text", train=(text,)), steps=2
    )
    result = run(config)
    assert result.validation_loss_before == pytest.approx(math.log(257), abs=0.3)


def test_validation_leaves_out_sequences_without_a_target(tmp_path: Path) -> None:
    (np.arange(90) % 7).astype("<u2").tofile(tmp_path / "train.bin")
    np.array([6] * 40 + [1, 2, 3, 4] * 10, dtype="<u2").tofile(tmp_path / "held_out.bin")
    data = DataSettings(
        source="bin", train=(tmp_path / "train.bin",), validation=(tmp_path / "held_out.bin",), document_end=6
    )
    run(with_changes(TINY, data=data, run_dir=tmp_path / "run", steps=1))
    first = read_lines(tmp_path / "run" / "metrics.jsonl")[0]
    assert math.isfinite(first["validation_loss"]) and 0 < first["targets"] < 34


def test_a_token_id_outside_the_vocabulary_is_refused_before_the_first_step(tmp_path: Path) -> None:
    file = tmp_path / "tokens.bin"
    np.array([1, 2, 3] * 40 + [32] + [1] * 40, dtype=np.uint16).tofile(file)
    config = with_changes(TINY, run_dir=tmp_path / "run", data=DataSettings(source="bin", train=(file,)))
    with pytest.raises(ValueError, match=r"token id 32 at position 120 .*vocabulary of 32"):
        run(config)
    assert not (tmp_path / "run").exists()


def test_starts_that_would_lose_work_are_refused(tmp_path: Path) -> None:
    config = with_changes(TINY, run_dir=tmp_path / "run", steps=2, checkpoint__every=1)
    with pytest.raises(ValueError, match="nothing to resume"):
        check_start(config, world=World(), resume=True)
    run(config)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"holds checkpoints of an earlier run.*--resume"):
        run(config)
    with pytest.raises(ValueError, match=r"layers.* 2 .*3|layers.* 3 .*2"):
        run(with_changes(config, model__layers=3), resume=True)
    with pytest.raises(ValueError, match=r"from step 2, but steps is 1"):
        run(with_changes(config, steps=1), resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_diverged_run_stops_with_the_step(tmp_path: Path) -> None:
    config = with_changes(TINY, run_dir=tmp_path, steps=50, optimizer__learning_rate=1e20, optimizer__clip=0.0)
    with pytest.raises(RuntimeError, match=r"gradient norm at step \d+ is (nan|inf)"):
        run(config)


def test_resuming_with_other_settings_says_which_and_still_knows_the_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = with_changes(TINY, run_dir=tmp_path, steps=2, checkpoint__every=2)
    run(config)
    with caplog.at_level("WARNING"):
        run(with_changes(config, steps=3, log_every=50, parallel=ParallelSettings(slices=1)), resume=True)
    assert "steps was 2, is 3" in caplog.text and "slices" not in caplog.text and "log_every" not in caplog.text
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-2])
    assert last["step"] == 3 and last["memory_bytes"] > 0


def test_a_new_run_keeps_the_earlier_config(tmp_path: Path) -> None:
    for seed in (1, 2):
        run(with_changes(TINY, run_dir=tmp_path, steps=1, seed=seed))
    assert config_file.load(tmp_path / "config.1.toml", TrainConfig()).seed == 1
    assert config_file.load(tmp_path / "config.toml", TrainConfig()).seed == 2


def test_a_run_goes_on_from_an_older_checkpoint_when_the_newest_is_damaged(tmp_path: Path) -> None:
    config = with_changes(TINY, run_dir=tmp_path, checkpoint__every=2, checkpoint__keep=3)
    whole = run(config)
    expected = losses(config)
    (config.checkpoint_folder / "step-00000006" / ".metadata").write_bytes(b"")
    for begin in (lambda: check_start(config, world=World(), resume=True), lambda: run(config, resume=True)):
        with pytest.raises(
            ValueError, match=r"step-00000006 is damaged.*step 2, 4; resume with --checkpoint.load-step 4"
        ):
            begin()
    older = with_changes(config, checkpoint__load_step=2)
    with pytest.raises(ValueError, match=r"load_step is 2, but the run does not resume; add --resume"):
        check_start(with_changes(older, run_dir=tmp_path / "new"), world=World(), resume=False)
    check_start(older, world=World(), resume=True)
    Trainer(older, world=World(), resume=True).__exit__(None, None, None)  # as if it were killed before it saves
    assert [path.name for path in config.checkpoint_folder.glob("*6*")] == ["step-00000006.abandoned"]
    assert losses(config) == expected[:2]
    assert [line["loss"] for line in read_lines(tmp_path / "metrics.1.jsonl") if "loss" in line] == expected
    assert run(config, resume=True).loss == whole.loss
    with pytest.raises(ValueError, match="no checkpoint of step 3"):
        check_start(with_changes(older, checkpoint__load_step=3), world=World(), resume=True)
    assert run(older, resume=True).loss == whole.loss
    assert losses(config) == expected
    assert config_file.load(tmp_path / "config.toml", TrainConfig()).checkpoint.load_step is None
    check_start(config, world=World(), resume=True)
