"""TrainConfig: what loads, what is refused with which words, and that a printed config loads back equal."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from terapipe.models.config import ModelConfig
from terapipe.train import config_file, presets
from terapipe.train.config import DataSettings, ModelSettings, OptimizerSettings, ParallelSettings, TrainConfig


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_survives_toml(name: str, tmp_path: Path) -> None:
    config = presets.preset(name)
    config = dataclasses.replace(config, data=DataSettings()).resolve()
    file = tmp_path / "config.toml"
    file.write_text(config_file.to_toml(config))
    assert config_file.load(file, TrainConfig()) == config
    assert config_file.load(file, TrainConfig()).resolve() == config


def test_awkward_values_survive_toml(tmp_path: Path) -> None:
    config = TrainConfig(
        data=DataSettings(train=(Path('a "quoted" \\ path'), Path("line\nbreak é")), suffixes=()),
        parallel=ParallelSettings(slice_tokens=(1, 256, 255)),
        optimizer=OptimizerSettings(learning_rate=1e-30, eps=1e22),
    )
    file = tmp_path / "config.toml"
    file.write_text(config_file.to_toml(config))
    assert config_file.load(file, TrainConfig()) == config


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("stepps = 3", ["'stepps'", "did you mean 'steps'"]),
        ("[model]\nlayer = 3", ["'model.layer'", "did you mean 'model.layers'"]),
        ("[checkpoint]\nquota = 3", ["unknown key 'checkpoint.quota'", "known: checkpoint.every, checkpoint.folder, "]),
        ("learning_rate = 3.0", ["'learning_rate'", "did you mean 'optimizer.learning_rate'"]),
        ("[parallel]\nschedule = 'seq1f1b'", ["parallel.schedule", "did you mean 'seq_1f1b'"]),
        ("steps = 1.5", ["steps is 1.5", "int"]),
        ("steps = true", ["steps is True", "int"]),
        ("model = 'debug'", ["model is a section", "[model]"]),
        ("[data]\ntrain = 'a.txt'", ["data.train", "list"]),
        ("steps = ", ["not TOML"]),
    ],
)
def test_a_bad_config_file_is_explained(toml: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(toml)
    with pytest.raises(ValueError) as raised:
        config_file.load(file, TrainConfig())
    for word in ["bad.toml", *words]:
        assert word in str(raised.value)


def test_the_example_of_the_documentation_loads(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    file = tmp_path / "mine.toml"
    file.write_text(page.split("```toml\n")[1].split("```")[0])
    config = config_file.load(file, TrainConfig())
    assert (config.model.hidden, config.parallel.schedule, config.checkpoint.every) == (256, "seq_1f1b", 500)
    config.plan(2)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes("\ufeffsteps = 7\nrun_dir = 'läufe'\n".encode())
    config = config_file.load(tmp_path / "run.toml", TrainConfig())
    assert (config.steps, config.run_dir) == (7, Path("läufe"))


def test_a_missing_config_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the config file .*nowhere\.toml"):
        config_file.load(tmp_path / "nowhere.toml", TrainConfig())


def test_model_settings_name_every_size_of_a_model() -> None:
    of_settings = {field.name for field in dataclasses.fields(ModelSettings)} - {"preset"}
    assert of_settings == {field.name for field in dataclasses.fields(ModelConfig)}
    for field, hint in typing.get_type_hints(ModelSettings).items():
        if field != "preset":
            assert hint == typing.get_type_hints(ModelConfig)[field] | None, field


def test_sizes_that_follow_are_derived_again() -> None:
    model = ModelSettings(preset="llama3_8b", hidden=512, heads=16).resolve()
    assert (model.head_dim, model.ffn_hidden, model.kv_heads) == (32, 2048, 8)
    assert ModelSettings(preset="gpt3_1b", heads=32).resolve().kv_heads == 32


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            TrainConfig(parallel=ParallelSettings(micros=25_001, slices=4)),
            ["micros 25001 of 4 slices are 100004", "larger"],
        ),
        (TrainConfig(model=ModelSettings(preset="llama3_9b")), ["llama3_9b", "did you mean 'llama3_8b'"]),
        (TrainConfig(model=ModelSettings(heads=5)), ["hidden 64", "heads 5"]),
        (TrainConfig(steps=-1), ["steps is -1"]),
        (TrainConfig(parallel=ParallelSettings(micros=0)), ["parallel.micros is 0"]),
        (TrainConfig(optimizer=OptimizerSettings(learning_rate=float("nan"))), ["optimizer.learning_rate is nan"]),
        (TrainConfig(optimizer=OptimizerSettings(beta2=1.0)), ["optimizer.beta2 is 1.0", "below 1"]),
        (TrainConfig(optimizer=OptimizerSettings(eps=0.0)), ["optimizer.eps is 0.0"]),
        (TrainConfig(optimizer=OptimizerSettings(learning_rate=float("inf"))), ["optimizer.learning_rate is inf"]),
        (TrainConfig(seed=-1), ["seed is -1"]),
        (TrainConfig(seed=1 << 64), ["seed is 18446744073709551616", "below 2^64"]),
        (TrainConfig(data=DataSettings(validation=(Path("."),))), ["data.validation is given", "source text or bin"]),
        (
            TrainConfig(data=DataSettings(source="text", train=(Path("."),), document_end=0)),
            ["data.document_end is given", "--data.source bin"],
        ),
        (
            TrainConfig(data=DataSettings(source="text", train=(Path("."),), document_tokens=8)),
            ["data.document_tokens is given", "--data.source synthetic"],
        ),
        (TrainConfig(data=DataSettings(source="text")), ["data.train names no file", "--data.train"]),
        (TrainConfig(data=DataSettings(source="text", train=(Path("no/such"),))), ["no/such does not exist"]),
        (
            TrainConfig(model=ModelSettings(vocab=256), data=DataSettings(source="text", train=(Path("."),))),
            ["vocab is 256", "257"],
        ),
        (TrainConfig(parallel=ParallelSettings(slices=3, slice_tokens=(256, 256))), ["slices is 3", "2 slices"]),
    ],
)
def test_what_makes_no_sense_is_refused(config: TrainConfig, words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        config.resolve()
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("parallel", "ranks", "words"),
    [
        (ParallelSettings(slice_tokens=(256, 255)), 2, ["511", "512"]),
        (ParallelSettings(), 7, ["7 stages", "the model has 6"]),
        (ParallelSettings(stage_layers=(3, 2)), 2, ["5", "6"]),
        (ParallelSettings(slices=513), 1, ["512", "513"]),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(parallel: ParallelSettings, ranks: int, words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        TrainConfig(parallel=parallel).plan(ranks)
    for word in words:
        assert word in str(raised.value)


def test_uneven_stages_reach_the_plan() -> None:
    plan = TrainConfig(parallel=ParallelSettings(stage_layers=(2, 4), slices=3)).plan(2)
    assert plan.stages == ((0, 2), (2, 6))
    assert plan.slices == (171, 171, 170)


def test_a_sequence_longer_than_learned_positions_is_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match=r"tokens is 8192, .* learned positions for 2048"):
        dataclasses.replace(presets.preset("gpt3_1b"), tokens=8192, data=DataSettings()).resolve()


def test_files_without_a_source_that_reads_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.source is 'synthetic'; add --data\.source text"):
        TrainConfig(data=DataSettings(train=(tmp_path,))).resolve()
