"""The paper replayed: frozen rates are the fit's, predictions meet what was published, the search wins."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from terapipe.cli import main
from terapipe.models.presets import PRESETS
from terapipe.planner.paper_cluster import FITTED, leaves_node, stage_times, step_s
from terapipe.planner.paper_fit import FITTED_SETTINGS, fit
from terapipe.planner.paper_settings import PUBLISHED, SETTINGS, TOKENS, Setting
from terapipe.planner.reproduce import (
    UNIT_TOKENS,
    Replay,
    equal_slices,
    plan_slices,
    replay,
    simulated_step_s,
    uniform_counts,
)


@pytest.fixture(scope="module")
def replays() -> dict[int, Replay]:
    return {number: replay(setting, number) for number, setting in SETTINGS.items()}


def test_the_settings_are_table_1() -> None:
    assert [setting.gpus for setting in SETTINGS.values()] == [192] * 3 + [320] * 2 + [384] * 5
    assert [setting.layers_per_stage for setting in SETTINGS.values()] == [1, 2, 1, 2, 1, 1, 4, 2, 1, 2]
    assert [setting.micros for setting in SETTINGS.values()] == [16, 36, 72, 16, 32, 2, 4, 8, 2, 2]
    assert all(sum(published.slices) == TOKENS for published in PUBLISHED.values())


def test_the_frozen_rates_are_the_fit() -> None:
    for frozen, fitted in zip(dataclasses.astuple(FITTED), dataclasses.astuple(fit()), strict=True):
        assert frozen == pytest.approx(fitted, rel=2e-3)  # frozen with three digits


def test_ratios_and_times_are_as_near_as_the_docs_say(replays: dict[int, Replay]) -> None:
    judged = [row for row in replays.values() if row.published_ratio != 1.0]
    assert len(judged) == 8
    assert statistics.median(abs(row.ratio_error) for row in judged) <= 0.10
    predicted = [row for row in judged if not row.fitted]
    assert len(predicted) == 5
    assert statistics.median(abs(row.ratio_error) for row in predicted) <= 0.10
    for number, row in replays.items():
        if SETTINGS[number].data == 1:
            assert row.simulated_without_s == pytest.approx(row.published_without_s, rel=0.15), number
            assert row.simulated_with_s == pytest.approx(row.published_with_s, rel=0.15), number


@pytest.mark.parametrize("number", [2, 3])
def test_where_the_authors_did_not_slice_neither_does_the_search(number: int, replays: dict[int, Replay]) -> None:
    assert replays[number].slices == (TOKENS,)
    assert replays[number].simulated_ratio == 1.0


@pytest.mark.parametrize("number", SETTINGS)
def test_no_equal_slices_cost_less_than_the_planned_ones(number: int) -> None:
    setting = SETTINGS[number]
    planned = plan_slices(setting)
    network = any(leaves_node(setting, stage) for stage in range(setting.pipe))
    for count in uniform_counts(setting):
        lengths = np.array(equal_slices(setting, count))
        times = stage_times(setting, lengths, np.cumsum(lengths) - lengths, network=network)
        total = times.forward + times.backward
        assert planned.step_s <= setting.micros * total.sum() + (setting.pipe - 1) * total.max() + 1e-12


def test_only_hops_between_nodes_use_the_network() -> None:
    assert [stage for stage in range(24) if leaves_node(SETTINGS[1], stage)] == [7, 15]
    assert [stage for stage in range(96) if leaves_node(SETTINGS[9], stage)] == list(range(1, 95, 2))
    assert [stage for stage in range(48) if leaves_node(SETTINGS[10], stage)] == list(range(47))


@pytest.mark.parametrize("number", SETTINGS)
def test_the_closed_form_is_the_simulation(number: int) -> None:
    setting, slices = SETTINGS[number], PUBLISHED[number].slices
    simulated = simulated_step_s(setting, slices)
    assert simulated * (1 - 1e-9) <= step_s(setting, slices) <= simulated * 1.03
    alone = dataclasses.replace(setting, pipe=1, model=dataclasses.replace(setting.model, layers=1))
    assert step_s(alone, slices) == pytest.approx(simulated_step_s(alone, slices), rel=1e-9)


def test_the_verb_writes_rows_and_marks_what_was_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--setting", "8", "--setting", "4", "--json", str(tmp_path / "new" / "rows.json")]) == 0
    rows = json.loads((tmp_path / "new" / "rows.json").read_text())
    assert [(row["setting"], row["fitted"], row["provenance"]) for row in rows] == [
        (8, True, "paper"),
        (4, False, "unconfirmed"),
    ]
    assert rows[0]["published_without_s"] == 2.662 and sum(rows[0]["slices"]) == TOKENS
    printed = capsys.readouterr().out
    assert "fitted" in printed and "unconfirmed" in printed
    assert FITTED_SETTINGS == (5, 8, 9)


def test_any_other_setting_of_the_cluster_is_replayed(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [
        "reproduce",
        "--model",
        "gpt3_13b",
        "--stages",
        "40",
        "--tensor",
        "8",
        "--batch",
        "32",
        "--json",
        str(file),
    ]
    assert main(command) == 0
    row = json.loads(file.read_text())[0]
    assert (row["setting"], row["published_with_s"], row["gpus"]) == (None, None, 320)
    assert row["simulated_with_s"] == replay(SETTINGS[5], 5).simulated_with_s
    assert main([*command, "--tokens", "8192", "--batch", "8"]) == 0
    longer = json.loads(file.read_text())[0]
    assert sum(longer["slices"]) == 8192
    assert (
        longer["simulated_without_s"] / longer["simulated_with_s"]
        > row["simulated_without_s"] / row["simulated_with_s"]
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--setting", "11"], ["no setting 11", "1 to 10"]),
        (["--model", "gpt3_13"], ["'gpt3_13'", "did you mean 'gpt3_13b'"]),
        (["--model", "gpt3_13b", "--stages", "40"], ["--batch"]),
        (["--model", "gpt3_13b", "--stages", "7", "--batch", "8"], ["40 layers", "7 stages"]),
        (["--model", "gpt3_13b", "--stages", "40", "--batch", "7", "--data", "2"], ["batch of 7", "2 replicas"]),
        (["--model", "gpt3_13b", "--stages", "40", "--batch", "8", "--tensor", "3"], ["tensor is 3", "8 GPUs"]),
        (["--model", "gpt3_13b", "--stages", "40", "--batch", "8", "--tokens", "2044"], ["2044", "multiple of 8"]),
        (["--model", "gpt3_13b", "--stages", "0", "--batch", "8"], ["--stages is 0; it must be at least 1"]),
        (["--stages", "0"], ["--stages 0 goes with --model NAME, which is not given"]),
        *(([f"--{key}", "4"], [f"--{key} 4 goes with --model"]) for key in ("tensor", "data", "batch", "tokens")),
        (["--model", "gpt3_13b", "--stages", "4", "--batch", "1", "--tokens", "32776"], ["32776", "at most 32768"]),
        (
            ["--model", "gpt3_13b", "--stages", "4", "--batch", "99999999"],
            ["4 stages, 99999999 sequences", "smaller batch"],
        ),
        (["--model", "gpt3_13b", "--setting", "1"], ["give one of them"]),
    ],
)
def test_what_the_cluster_cannot_run_is_refused(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *arguments]) == 2
    printed = capsys.readouterr().err
    for word in words:
        assert word in printed


def test_one_token_and_one_stage_are_a_setting() -> None:
    tiny = Setting(model=PRESETS["gpt3_1b"](), name="gpt3_1b", batch=1, data=1, pipe=1, tensor=1, tokens=8)
    assert plan_slices(tiny).slices == (1,) and UNIT_TOKENS == 8
    assert simulated_step_s(tiny, (8,)) > 0
