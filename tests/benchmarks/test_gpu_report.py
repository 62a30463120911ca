"""The GPU report without a GPU: its shapes, its judgement of answers, its workers that die, its tables, its command."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest
import torch

from benchmarks.gpu_report import __main__ as command
from benchmarks.gpu_report import answers, contenders, markdown, parts, shapes, supervise, timing
from benchmarks.gpu_report.contenders import Jobs, Problem, Refused, Results
from benchmarks.gpu_report.parts import Cell

SHAPE = shapes.Shape(2, 7, 12, 6, 2, 8)
SLICE = str(shapes.tiny_grid()[1])


@pytest.fixture
def problem():
    return Problem.of(SHAPE, torch.bfloat16, "cpu")


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_operations_are_counted_pair_by_pair():
    pairs = sum(1 for query in range(7) for key in range(19) if key <= 12 + query)
    assert SHAPE.flops("forward") == 4 * 2 * 6 * 8 * pairs and SHAPE.flops("backward") == 2.5 * SHAPE.flops("forward")


def test_the_grids_are_those_of_the_goals():
    standard, slices = shapes.standard_grid(), shapes.slice_grid()
    assert {s.head_dim for s in standard} == {64, 128, 256} and {s.tokens for s in standard} >= {512, 1024, 16384}
    assert all(s.batch * s.tokens == 16384 and s.prefix == 0 for s in standard)
    assert {(s.query_heads, s.kv_heads) for s in slices} == {(32, 8), (64, 8)}
    assert {s.tokens for s in slices} >= {256, 4096} and {s.prefix for s in slices} >= {0, 131072}
    assert len(set(standard)) == len(standard) and len(set(slices)) == len(slices)
    for part in parts.PARTS:
        listed = parts.cells(part, "cuda")
        assert len(set(listed)) == len(listed) > 0


# ---- answers and contenders ------------------------------------------------------------------------------------------


def test_chunks_of_rows_add_up_to_the_whole(problem, monkeypatch):
    whole = answers.answer(problem, torch.float64)
    monkeypatch.setattr(answers, "SCORES_A_CHUNK", 150)  # two rows of three heads and 19 keys
    for a, b in zip(whole, answers.answer(problem, torch.float64), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def plain(q, k, v, scale):
    """Attention of a peer, heads first, from torch's formula alone."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * scale
    sees = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v.repeat_interleave(group, 1)


def judged(jobs: Jobs, problem):
    answer = [answers.answer(problem, dtype) for dtype in (torch.float64, torch.bfloat16)]
    return answers.judge(jobs.results(), *answer, SHAPE.group, torch.bfloat16)


def test_a_peer_is_right_and_its_gradient_cache_adds_up(problem):
    jobs = contenders._peer(problem, lambda q, k, v: plain(q, k, v, problem.scale), heads_first=True)
    jobs.forward()
    assert judged(jobs, problem).ok and jobs.results().dk is None
    jobs.backward()
    verdict = judged(jobs, problem)
    assert verdict.ok, verdict.text
    once = jobs.results().dv.clone()
    jobs.backward()
    torch.testing.assert_close(jobs.results().dv, 2 * once)
    assert jobs.results().dv.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_given_the_right_mask(problem):
    with torch.no_grad():
        jobs = contenders.PEERS["FlexAttention"](problem)
        jobs.forward()
    assert judged(jobs, problem).ok


@pytest.mark.parametrize("name", ["cpu", "cpu deterministic"])
def test_our_backend_is_right_and_errors_are_seen(name, problem):
    jobs = contenders.OURS[name](problem)
    jobs.forward()
    jobs.backward()
    assert judged(jobs, problem).ok
    for field in Results._fields:
        for wrong in (0.3, float("nan")):
            results = jobs.results()
            tensor = getattr(results, field)
            before = tensor[0, -1, 0, 3].item()
            tensor[0, -1, 0, 3] += wrong
            verdict = judged(jobs, problem)
            assert not verdict.ok and verdict.text.startswith(field)
            tensor[0, -1, 0, 3] = before


def test_what_is_missing_is_refused(problem):
    for name in ("flash-attn 2", "flash-attn 3"):
        with pytest.raises(Refused, match="cannot be imported"):
            contenders.PEERS[name](problem)


def test_times_are_the_median_and_the_spread_of_the_samples():
    calls: list[str] = []
    clock = iter([100.0, 3.0, 1.0, 2.0, 5.0, 4.0])  # the guess, then as few repeats as there may be
    times = timing.measure(lambda: calls.append("job"), "cpu", sample=lambda job: (next(clock), 0.5))
    assert times == (3.0, 2.0, 4.0, 0.5, 5) and calls == ["job", "job"]


# ---- workers ---------------------------------------------------------------------------------------------------------


def statuses(file):
    return {r["contender"]: r["status"] for r in parts.read_rows(file) if r["status"] not in ("begun", "machine")}


def test_a_worker_turns_whatever_a_cell_raises_into_a_row(tmp_path, monkeypatch):
    def fails(problem):
        raise RuntimeError("no kernel image")

    def lies(problem):
        jobs = contenders.OURS["cpu"](problem)
        return jobs._replace(results=lambda: Results(torch.zeros_like(problem.q), None, None, None))

    monkeypatch.setitem(contenders.PEERS, "fails", fails)
    monkeypatch.setitem(contenders.OURS, "lies", lies)
    monkeypatch.setitem(contenders.PEERS, "lying peer", lies)
    names = ("fails", "flash-attn 2", "lies", "lying peer", "cpu")
    file = tmp_path / "rows"
    assert parts.work([Cell("slice-forward", SLICE, name) for name in names], "cpu", file) == 0
    assert list(statuses(file).values()) == ["error", "refused", "wrong", "ok", "ok"]
    rows = {row["contender"]: row for row in parts.read_rows(file) if row["status"] != "begun"}
    assert rows["fails"]["text"] == "RuntimeError: no kernel image" and "ms" not in rows["lies"]
    assert rows["lies"]["text"].startswith("out: error") and rows["lying peer"]["within_tolerance"] is False
    assert rows["cpu"]["within_tolerance"] and rows["cpu"]["low_ms"] <= rows["cpu"]["ms"] <= rows["cpu"]["high_ms"]
    monkeypatch.setattr(parts, "_answers", lambda device: False)
    assert (
        parts.work([Cell("slice-forward", SLICE, name) for name in ("cpu", "fails 2", "x")], "cpu", file)
        == parts.BROKEN
    )
    assert "fails 2" in statuses(file) and "x" not in statuses(file)


WORKER = """
import json, os, sys, time
rows = [json.loads(line) for line in open(sys.argv[1])] if os.path.exists(sys.argv[1]) else []
def say(name, status):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps({"part": "p", "subject": "s", "contender": name, "status": status, "text": ""}) + "\\n")
for name in sys.argv[2:]:
    if name in [row["contender"] for row in rows if row["status"] != "begun"]:
        continue
    say(name, "begun")
    if name == "hangs": time.sleep(60)
    if name == "dies": print("illegal memory access"); sys.stdout.flush(); os.kill(os.getpid(), 9)
    say(name, "ok")
"""


def test_crashes_and_hangs_cost_one_cell_each(tmp_path):
    names = ["a", "dies", "b", "hangs", "c"]
    file = tmp_path / "rows.jsonl"
    supervise.supervise(
        lambda rows: [sys.executable, "-c", WORKER, str(rows), *names],
        [Cell("p", "s", name) for name in names],
        file=file,
        deadline=time.monotonic() + 60,
        cell_seconds=1.5,
    )
    assert statuses(file) == {"a": "ok", "dies": "crashed", "b": "ok", "hangs": "crashed", "c": "ok"}
    texts = {row["contender"]: row["text"] for row in parts.read_rows(file) if row["status"] == "crashed"}
    assert texts == {
        "dies": "killed by signal 9: illegal memory access",
        "hangs": "no answer within 1.5 s: illegal memory access",
    }


def test_a_cell_that_is_open_when_the_time_is_up_did_not_fail(tmp_path):
    file = tmp_path / "rows.jsonl"
    names = ["a", "hangs", "b"]
    worker = [sys.executable, "-c", WORKER, str(file), *names]
    supervise.supervise(
        lambda rows: worker, [Cell("p", "s", name) for name in names], file=file,
        deadline=time.monotonic() + 1.5, cell_seconds=30,
    )  # fmt: skip
    assert statuses(file) == {"a": "ok", "hangs": "not run", "b": "not run"}
    supervise.supervise(
        lambda rows: pytest.fail("a worker for cells that have an answer"), [Cell("p", "s", "a")], file=file,
        deadline=time.monotonic() + 30, cell_seconds=30,
    )  # fmt: skip


def test_an_interrupt_ends_the_workers_and_keeps_what_they_found(tmp_path, monkeypatch):
    """It comes in a tick, when the first cell is done and the second hangs."""
    file, stop = tmp_path / "rows.jsonl", threading.Event()
    worker = [sys.executable, "-c", WORKER, str(file), "a", "hangs"]

    def supervisor():
        supervise.supervise(
            lambda rows: worker, [Cell("p", "s", name) for name in ("a", "hangs")], file=file,
            deadline=time.monotonic() + 60, cell_seconds=60, stop=stop,
        )  # fmt: skip

    def interrupt():
        if "a" in statuses(file):
            raise KeyboardInterrupt

    monkeypatch.setattr(supervise, "TICK_SECONDS", 0.0)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        supervise.side_by_side([supervisor], tick=interrupt, stop=stop)
    assert statuses(file) == {"a": "ok", "hangs": "not run"} and time.monotonic() - began < 30
    assert "the run was stopped" in parts.read_rows(file)[-1]["text"]


@pytest.mark.parametrize(
    ("program", "seconds", "reason"),
    [
        ("import time; time.sleep(60)", 1.0, "time was up"),
        ("raise SystemExit('no torch')", 60, "no worker started: no torch"),
    ],
)
def test_cells_that_no_worker_reached_are_said_to_be_not_run(program, seconds, reason, tmp_path):
    file = tmp_path / "rows.jsonl"
    supervise.supervise(
        lambda rows: [sys.executable, "-c", program], [Cell("p", "s", "c")], file=file,
        deadline=time.monotonic() + seconds, cell_seconds=30,
    )  # fmt: skip
    (row,) = parts.read_rows(file)
    assert row["status"] == "not run" and reason in row["text"]


def test_an_error_of_a_supervisor_is_raised_after_the_others_ended():
    done = []
    with pytest.raises(ZeroDivisionError):
        supervise.side_by_side([lambda: 1 // 0, lambda: done.append(1)])
    assert done == [1]


def test_a_line_cut_short_by_a_crash_is_passed_over(tmp_path):
    file = tmp_path / "rows"
    file.write_text('{"a": 1}\n{"b": ')
    assert parts.read_rows(file) == [{"a": 1}]


# ---- tables ----------------------------------------------------------------------------------------------------------


def row(part, shape, contender, ms, status="ok", **more):
    flops = shape.flops(parts.direction(part))
    figures = {"ms": ms, "low_ms": ms, "high_ms": ms, "tflops": flops / ms / 1e9, "within_tolerance": True}
    base = {"part": part, "subject": str(shape), "contender": contender, "status": status, "text": ""}
    return {**base, **(figures if status == "ok" else {}), **more}


def rendered(rows):
    machines = {"forward": {"gpu": "H", "clocks.sm": "1"}, "backward": {"gpu": "H", "clocks.sm": "2"}}
    return markdown.render(
        {"rows": rows, "machines": machines, "build": {"build": "x"}, "commit": "c", "date": "2026-11-30"}
    )


def goal(text, words):
    return next(line for line in text.splitlines() if words in line).split(" | ")[1]


def test_goals_are_read_off_the_rows():
    ms = shapes.EIGHT_THOUSAND.forward_flops / 460e9
    short, behind = shapes.SHORT_BEHIND_32K, shapes.BEHIND_30K
    rows = [
        row("forward", shapes.EIGHT_THOUSAND, "triton", ms),
        row("slice-forward", behind, "triton", behind.forward_flops / 470e9),
        row("slice-forward", short, "triton", 1.0),
        row("slice-forward", short, "triton deterministic", 3.5),
        row("flex-forward", behind, "triton", 1.0),
        row("flex-forward", behind, "FlexAttention", 1.2),
        row("flex-forward", short, "FlexAttention", 1.0, status="error"),
    ]
    text = rendered(rows)
    assert [goal(text, w) for w in ("8k tokens", "behind 30k", "split keys", "everywhere", "best peer")] == [
        "yes", "no", "yes", "yes", "not run",
    ]  # fmt: skip
    both = [row(part, behind, who, ms) for part, who, ms in (
        ("slice-forward", "SDPA flash", 2.0), ("slice-backward", "SDPA flash", 4.0), ("slice-backward", "triton", 2.0),
    )]  # fmt: skip
    assert goal(rendered(rows + both), "best peer") == ("yes" if behind.forward_flops / 470e9 + 2 < 6 else "no")
    rows[5]["ms"] = 0.9
    assert goal(rendered(rows), "everywhere") == "no" and goal(rendered([]), "8k tokens") == "not run"


def test_a_table_says_what_did_not_run_and_what_is_off():
    shape = shapes.BEHIND_30K
    rows = [
        row("slice-forward", shape, "triton", 2.0),
        row("slice-forward", shape, "SDPA flash", 3.0, within_tolerance=False),
        row("slice-forward", shapes.SHORT_BEHIND_32K, "triton", 1.0, status="crashed", text="killed by signal 9"),
        row("slice-forward", shape, "flash-attn 2", 1.0, status="refused", text="no module"),
        {
            "part": "ceilings",
            "subject": "gemm bfloat16",
            "contender": "torch",
            "status": "ok",
            "text": "",
            "tflops": 800.0,
        },
    ]
    text = rendered(rows)
    assert "3.000 ms [3.000..3.000] †" in text and f"{rows[0]['tflops'] / 800:.2f}" in text
    assert "- triton, crashed: killed by signal 9" in text and "- flash-attn 2, refused: no module" in text
    assert (
        "| crashed | not run |" in text
        and "forward: not run" not in text.split("## backward")[0].split("## forward")[0]
    )
    assert "| before part | clocks.sm |" in text and "- gpu: H" in text


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_whole_command_on_the_cpu(tmp_path, capsys):
    """One part, then with --resume that part and another: what was found stays, what failed is tried again."""
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--seconds", "100", "--only", "slice-forward"]
    assert command.main(arguments) == 0
    rows = json.loads((tmp_path / "gpu_report.json").read_text())["rows"]
    found = {r["contender"]: r for r in rows if r["subject"] == SLICE}
    assert found["cpu"]["status"] == "ok" and found["SDPA flash"]["status"] == "error"
    assert command.main([*arguments, "ceilings", "--resume"]) == 0
    report = json.loads((tmp_path / "gpu_report.json").read_text())
    assert [r["status"] for r in report["rows"] if r["part"] == "ceilings"] == ["ok"] * 4
    assert found["cpu"] in report["rows"] and len(report["rows"]) == len(rows) + 4
    assert report["machines"]["ceilings"]["torch"] == torch.__version__
    text = (tmp_path / "gpu_report.md").read_text()
    assert "| forward, 8k tokens | not run |" in text and str(command.ROOT) not in text
    assert "ceilings: 4 ok" in capsys.readouterr().out


def test_a_killed_call_goes_on_from_the_workers_rows(tmp_path, monkeypatch, capsys):
    """A call that was killed left rows in its workers' files alone; older sources' rows are worth nothing."""
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--only", "slice-forward"]
    file = tmp_path / "slice-forward-0.jsonl"

    def milliseconds():
        rows = json.loads((tmp_path / "gpu_report.json").read_text())["rows"]
        return [row["ms"] for row in rows if row["subject"] == SLICE and row["contender"] == "cpu"]

    monkeypatch.setenv("PATH", "/nowhere")  # no git
    assert command.main([*arguments, "--in-all", "1"]) == 0 and not file.exists()
    monkeypatch.undo()
    assert "commit: unknown (sources " in (tmp_path / "gpu_report.md").read_text()
    said = capsys.readouterr().out
    assert "no time was left" in said and "20 cells are left" in said and milliseconds() == []
    row = Cell("slice-forward", SLICE, "cpu")._asdict()
    figures = {"ms": 123.0, "low_ms": 123.0, "high_ms": 123.0, "tflops": 1.0, "within_tolerance": True}
    parts.append(file, {**row, "status": "begun"})
    parts.append(file, {**row, "status": "ok", "text": "", **figures})
    assert command.main([*arguments, "--resume"]) == 0 and milliseconds() == [123.0]
    said = capsys.readouterr().out
    assert "slice-forward: 12 refused, 4 ok, 4 error" in said and "no cell is left" in said
    monkeypatch.setattr(command, "_sources", lambda *folders: "others")
    assert command.main([*arguments, "--resume"]) == 0 and milliseconds() != [123.0]
    assert "the sources have changed" in capsys.readouterr().out


def test_only_what_runs_on_a_gpu_is_run_there():
    file = "tests/tpkernels/triton/test_launch.py"
    arguments = [sys.executable, "-m", "pytest", file, "-m", "gpu", "--collect-only", "-q"]
    listed = subprocess.run(arguments, cwd=command.ROOT, capture_output=True, text=True, check=False).stdout
    names = [line.rpartition("::")[2] for line in listed.splitlines() if "::" in line]
    assert names == [
        f"test_{name}[{who}]"
        for name in ("a_side_stream_is_waited_for", "a_device_that_is_not_current")
        for who in ("triton", "cuda")
    ]


def test_a_test_file_is_one_cell(tmp_path):
    good, bad = tmp_path / "test_good.py", tmp_path / "test_bad.py"
    good.write_text("import pytest\n@pytest.mark.gpu\ndef test_it(): pass\ndef test_on_the_cpu(): assert 0")
    bad.write_text("import pytest\n@pytest.mark.gpu\ndef test_it(): assert 0, 'off by one'")
    assert parts.outcome(Cell("tests", str(good), "pytest"), "cuda")["text"].startswith("1 passed")
    row = parts.outcome(Cell("tests", str(bad), "pytest"), "cuda")
    assert row["status"] == "wrong" and "1 failed" in row["text"] and "off by one" in row["text"]


def test_without_a_gpu_it_says_so(tmp_path, capsys, monkeypatch):
    if torch.cuda.is_available():
        monkeypatch.setattr(command, "_no_gpu", lambda: "")
    assert command.main(["--out", str(tmp_path)]) == 2 and "--device cpu" in capsys.readouterr().err
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')")
    assert command.main(["--out", str(tmp_path)]) == 2 and "libcudart.so.13" in capsys.readouterr().err


def test_a_part_that_fails_costs_no_other_its_rows(tmp_path, capsys, monkeypatch):
    def supervisor(worker, cells, **settings):
        if cells[0].part == "ceilings":
            raise OSError("no more processes")
        for cell in cells:
            parts.append(settings["file"], {**cell._asdict(), "status": "refused", "text": ""})

    monkeypatch.setattr(supervise, "supervise", supervisor)
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--only", "ceilings", "flex-forward", "--no-build"]
    assert command.main(arguments) == 1
    rows = json.loads((tmp_path / "gpu_report.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {"flex-forward"} and "no more processes" in capsys.readouterr().err


def test_another_version_that_is_installed_is_not_measured(tmp_path):
    """Nothing, something old, and the sources without what is built from them."""
    import shutil

    environment = {**command.os.environ, "PYTHONPATH": str(tmp_path)}
    package = tmp_path / "tpkernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert "another version is installed" in command._missing(environment, "cpu")
    shutil.rmtree(package)
    shutil.copytree(command.ROOT / "tpkernels", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    assert command._missing(environment, "cpu") == "tpkernels._core"


def test_a_build_that_fails_leaves_the_kernels_that_need_none(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_missing", lambda environment, device: "the package")
    monkeypatch.setattr(command.sys, "executable", "/bin/false")
    environment, said = command._installed(tmp_path, "cpu", build=True, seconds=60)
    assert environment["PYTHONPATH"].startswith(str(command.ROOT)) and "pip ended with 1" in said["build"]


def test_what_was_built_from_these_sources_is_not_built_again(tmp_path, monkeypatch):
    """No CUDA kernels where there is an nvcc: its folder is used all the same, and not built twice in vain."""
    monkeypatch.setattr(command, "_missing", lambda environment, device: command.CUDA_KERNELS)
    monkeypatch.setattr(command.sys, "executable", "/bin/false")
    stamp = tmp_path / "site" / "sources"
    stamp.parent.mkdir()
    stamp.write_text(command._sources("tpkernels", "csrc"))
    settings = {"device": "cuda", "build": True, "seconds": 60}
    environment, said = command._installed(tmp_path, **settings)
    assert said == {"build": "missing: tpkernels._cuda"}
    stamp.write_text("older sources")
    assert "pip ended with 1" in command._installed(tmp_path, **settings)[1]["build"] and not stamp.exists()
    environment, said = command._installed(tmp_path, "cuda", build=False, seconds=60)
    assert environment == dict(command.os.environ) and said == {"build": "missing: tpkernels._cuda"}
