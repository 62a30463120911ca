"""A run that follows a plan file, what of it is refused, and the prediction from a step's own actions."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from terapipe import cli
from terapipe.models.presets import PRESETS
from terapipe.planner.analytic import analytic_costs
from terapipe.planner.hardware import hardware
from terapipe.planner.plan_file import load
from terapipe.planner.prediction import Layout, predict
from terapipe.schedule import TraceEvent, make_plan
from terapipe.train.config import ModelSettings, ParallelSettings, TrainConfig
from terapipe.train.step_prediction import StepPrediction, from_actions, from_device, unpredicted_line
from terapipe.train.trainer import Trainer
from terapipe.world import ALONE

PLAN = ["plan", "--model", "debug", "--tokens", "96", "--unit", "8", "--ranks", "2", "--batch", "2", "--only-runnable"]


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert cli.main([*PLAN, "--out", str(path)]) == 0
    return path


def config(path: Path, folder: Path, **parallel: object) -> TrainConfig:
    settings = ParallelSettings(plan=path, ranks=2, **parallel)  # type: ignore[arg-type]
    return TrainConfig(parallel=settings, tokens=96, steps=6, device="cpu", run_dir=folder)


def test_a_run_follows_its_plan_and_tells_the_step_time(plan_path: Path, tmp_path: Path) -> None:
    planned, lines = load(plan_path), list[str]()
    with Trainer(config(plan_path, tmp_path), world=ALONE) as trainer:
        assert trainer.plan == planned.plan
        result = trainer.fit(print_line=lines.append, bar=False)
    assert result.predicted_step_s == planned.step_s and result.measured_step_s is not None
    assert lines[-1].startswith(f"step time: predicted {planned.step_s * 1e3:.4g} ms (by the plan), measured ")
    again = tmp_path / "again.json"
    again.write_text(dataclasses.replace(planned, layout=Layout(recompute=True)).to_json())
    assert config(again, tmp_path).resolve().parallel.recompute
    resolved = config(plan_path, tmp_path).resolve()
    assert not resolved.parallel.recompute
    assert resolved.resolve() == resolved and resolved.parallel.slice_tokens == planned.plan.slices


def test_a_run_without_a_plan_predicts_from_its_own_actions(tmp_path: Path) -> None:
    lines = list[str]()
    plain = TrainConfig(
        parallel=ParallelSettings(ranks=2, slices=3), tokens=96, steps=5, run_dir=tmp_path, device="cpu"
    )
    with Trainer(plain, world=ALONE) as trainer:
        result = trainer.fit(print_line=lines.append, bar=False)
    assert result.predicted_step_s is not None and "(from the actions of step 3)" in lines[-1]
    short = dataclasses.replace(plain, steps=2, run_dir=tmp_path / "short")
    with Trainer(short, world=ALONE) as trainer:
        assert trainer.fit(print_line=lines.append, bar=False).predicted_step_s is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": ModelSettings(hidden=128)}, r"another model: it has hidden 64 \(here 128\)"),
        ({"tokens": 64}, "tokens is 64, but the plan .* is for 96; give --tokens 96"),
        ({"dtype": "bf16"}, "dtype is bf16, but the plan .* is for fp32"),
    ],
)
def test_a_plan_of_another_run_is_refused(plan_path, tmp_path, change, words) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(config(plan_path, tmp_path), **change).resolve()


def test_what_a_plan_decides_cannot_be_given_beside_it(plan_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"parallel.micros is given too; leave one of them out"):
        config(plan_path, tmp_path, micros=7).resolve()
    with pytest.raises(ValueError, match="is for 2 pipeline ranks, but there are 3; start 2 processes"):
        config(plan_path, tmp_path).plan(3)
    assert config(plan_path, tmp_path, link_slots=2).resolve().parallel.link_slots == 2  # what no plan decides


def test_what_the_engine_lacks_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "split.json"
    assert cli.main([*PLAN[:-1], "--schedules", "seq_zero_bubble", "--data", "1", "--out", str(path)]) == 0
    with pytest.raises(ValueError, match=r"does not run .*split backwards"):
        config(path, tmp_path).resolve()
    assert cli.main(["train", "--plan", str(path), "--tokens", "96", "--local-ranks", "2"]) == cli.BAD_INPUT
    assert "split backwards" in capsys.readouterr().err
    assert cli.main(["train", "--plan", str(tmp_path / "none.json")]) == cli.BAD_INPUT
    half = tmp_path / "half.json"
    assert cli.main([*PLAN[:-1], "--hardware", "v100-p3.16xlarge", "--tensor", "1", "--out", str(half)]) == 0
    with pytest.raises(ValueError, match=r"does not run training in fp16 \(plan with --dtype fp32 or bf16\)"):
        config(half, tmp_path).resolve()


def test_the_command_that_plan_prints_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert cli.main([*PLAN, "--hardware", "h100-sxm", "--out", str(path)]) == 0
    printed = re.search(r"run it with `terapipe ([^`]*)`", capsys.readouterr().out)
    assert printed is not None
    command = printed[1].replace("--local-ranks 2", "--parallel.ranks 2").split()
    steps = ["--steps", "1", "--device", "cpu", "--run-dir", str(tmp_path / "run")]
    assert cli.main([*command, *steps]) == 0


def test_actions_are_laid_out_as_the_schedule_says() -> None:
    plan = make_plan(layers=4, ranks=2, slices=2, tokens=8)
    events = [
        TraceEvent(rank, str(action), 10.0, 10.0 + (1.0 if action.is_forward else 2.0), "compute")
        for rank in range(2)
        for action in plan.schedule[rank]
    ]
    apart = from_actions(plan, events, 7.0, step=3, together=False)
    assert apart.step_s == pytest.approx(9.0 + 5.0)  # 3 x (1 + 2), and what of the step its timeline does not hold
    assert from_actions(plan, events, 1.0, step=3, together=True).step_s == pytest.approx(12.0)
    line = StepPrediction(0.1, "x").line
    assert line([0.2, 0.1, 0.3]).endswith("measured 200 ms (median of 3 steps), error -50.0%")
    assert line([0.2], disturbance="disturbed: ...").endswith("error -50.0%; disturbed: ...")


def test_a_gpu_is_predicted_by_its_description() -> None:
    model = PRESETS["gpt3_1b"]()
    plan = make_plan(layers=len(model.layer_names()), ranks=4, slices=4, tokens=2048)
    predicted = from_device(plan, model, "NVIDIA H200", dtype="bf16", together=False)
    costs = analytic_costs(model, hardware("h200-sxm"), max_tokens=2048)
    assert predicted is not None and predicted.step_s == predict(plan, costs).step_s
    assert "h200-sxm" in predicted.line([predicted.step_s])
    alone = from_device(plan, model, "NVIDIA H200", dtype="bf16", together=True)
    assert alone is not None and alone.step_s > 2 * predicted.step_s  # one device does the work of four
    slower = from_device(plan, model, "Tesla V100-SXM2-16GB", dtype="fp16", together=False)
    assert slower is not None and slower.step_s > predicted.step_s


OTHER_BOARDS = [
    "NVIDIA H100 PCIe",
    "NVIDIA H100 NVL",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA GH200 480GB",
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "AMD Instinct MI300X",
    "",
]


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bf16") for name in OTHER_BOARDS), ("NVIDIA H200", "fp32")])
def test_a_device_nobody_described_is_not_predicted(name: str, dtype: str) -> None:
    model = PRESETS["debug"]()
    plan = make_plan(layers=len(model.layer_names()), ranks=2, slices=1, tokens=64)
    assert from_device(plan, model, name, dtype=dtype, together=False) is None
    line = unpredicted_line([1e-3, 2e-3, 3e-3], name, dtype)
    assert "measured 2 ms (median of 3 steps), not predicted" in line and f"{name} in {dtype} (there are" in line


@pytest.mark.parametrize(
    ("name", "words"), [("NVIDIA H200", "by the analytic costs of h200-sxm"), ("Unheard-of", "covers Unheard-of in")]
)
def test_a_trainer_on_a_gpu_says_what_it_can(name: str, words: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: name)
    lines = list[str]()
    settings = TrainConfig(tokens=96, steps=5, dtype="bf16", device="cpu", run_dir=tmp_path)
    with Trainer(settings, world=ALONE) as trainer:
        trainer.device = "cuda:0"  # what train() calls the first GPU
        trainer._prediction = trainer._predict_for_gpu()
        trainer.fit(print_line=lines.append, bar=False)
    assert words in lines[-1]
