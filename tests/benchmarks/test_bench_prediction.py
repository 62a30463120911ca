"""The prediction benchmark without measuring: what launches leave is read again, and what is there is not run."""

from __future__ import annotations

import json

import pytest

from benchmarks import bench_prediction
from benchmarks.prediction.cases import CASES
from benchmarks.prediction.result import Result
from terapipe.engine import launch
from terapipe.schedule import make_plan

REAL, SLEEP = "small, 1024 tokens", "sleep, 4 ranks"


def result(case, ms):
    plan = make_plan(layers=6, ranks=2, slices=(5, 1, 7), tokens=13, micros=3, schedule="seq_1f1b", warmup_per_hop=2)
    row = {"case": case, "kind": CASES[case].kind, "measured_ms": ms, "error": -0.1}
    return Result(
        [{**row, "variant": "3", "over_best": None}, {**row, "variant": "pick", "over_best": 0.5}], {"3": plan}
    )


def test_a_result_comes_back_from_its_file_and_no_other_file_is_one(tmp_path):
    file = tmp_path / "case.json"
    result(REAL, 1.5).write(file)
    assert Result.read(file) == result(REAL, 1.5) and Result.read(file).pick["over_best"] == 0.5
    assert list(tmp_path.iterdir()) == [file]
    fields = json.loads(file.read_text())
    for wrong in (
        "",
        "[]",
        '{"rows": []}',
        json.dumps({**fields, "plans": {"3": {**fields["plans"]["3"], "micros": 0}}}),
    ):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=r"case.json holds no result of this benchmark .*delete it"):
            Result.read(file)


@pytest.fixture
def launches(tmp_path, monkeypatch):
    """What `run` would start, with workers that write a result or end with the status of the folder's name."""
    started = []

    def run_workers(command, ranks, *, threads=1):
        case, file, *first = command[3:]
        started.append((case, ranks, bool(first)))
        if started == [(REAL, 2, False)] and fails:
            return 7
        result(case, 100.0 + len(first)).write(bench_prediction.Path(file))
        return 0

    fails = []
    monkeypatch.setattr(launch, "run_workers", run_workers)
    monkeypatch.setenv("TERAPIPE_PARTS", str(tmp_path / "new" / "parts"))
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    return started, fails


def test_a_real_case_has_a_final_and_what_is_finished_is_kept(launches):
    started, _ = launches
    rows = bench_prediction.run([SLEEP, REAL])
    assert started == [(REAL, 2, False), (REAL, 2, True), (SLEEP, 4, False)]
    assert [row["measured_ms"] for row in rows] == [101.0, 101.0, 100.0, 100.0]
    assert bench_prediction.run([REAL, SLEEP]) == rows and len(started) == 3
    assert "sleep: 2 steps, error median 10.0%" in bench_prediction.summary(rows)


def test_a_launch_that_fails_is_named_and_an_unknown_case_starts_none(launches):
    started, fails = launches
    with pytest.raises(ValueError, match=r"unknown case 'sleep, 5 ranks'; did you mean 'sleep, "):
        bench_prediction.run(["sleep, 5 ranks"])
    assert started == []
    fails.append(True)
    with pytest.raises(RuntimeError, match=f"case '{REAL}' ended with status 7"):
        bench_prediction.run([REAL])


def test_every_case_has_a_file_of_its_own(launches):
    started, _ = launches
    assert len(bench_prediction.run()) == 2 * len(CASES)
    assert len(started) == sum(1 + (case.kind == "real") for case in CASES.values())
