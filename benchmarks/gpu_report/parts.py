"""The parts of the report and their cells; a worker process runs the cells of one part and appends a row for each.

A cell is (part, subject, contender); its row is a JSON object with a status: ok, wrong (an answer outside the
tolerance rule), refused (a contender that is missing or does not serve it), error. supervise.py adds crashed and
not run. Listing cells touches no device, so the supervisor can do it and never shares a worker's fate.

The one trap: after an illegal memory access every later CUDA call of the process fails. A worker that finds its
device broken stops with BROKEN; the supervisor starts another, which goes on behind that cell.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_report import shapes

ROOT = Path(__file__).resolve().parents[2]
BROKEN = 3  # exit status of a worker whose device does not answer any more
DTYPES = ("bfloat16", "float16", "float32")
OURS = ("triton", "cuda")
RIVALS = ("SDPA flash", "SDPA cuDNN", "flash-attn 2", "flash-attn 3")
CEILINGS = ("gemm bfloat16", "gemm float16", "gemm float32", "copy")
TEST_FILES = ("tests/tpkernels", "tests/tpkernels/triton")


class Cell(NamedTuple):
    """One row to be: `subject` is a shape, a case, a test file or a ceiling; `contender` whose it is."""

    part: str
    subject: str
    contender: str


class Part(NamedTuple):
    """processes: workers side by side (never for timing); cell_seconds: a cell that takes longer is given up."""

    name: str
    what: str
    processes: int = 1
    cell_seconds: float = 150.0


PARTS = {
    part.name: part
    for part in (
        Part("ceilings", "large matrix products and a device copy"),
        Part("cases", "every case of the tolerance rule, bf16, fp16 and fp32", processes=12, cell_seconds=240.0),
        Part("tests", "what runs on the GPU of tests/tpkernels, with pytest", processes=8, cell_seconds=420.0),
        Part("forward", "the standard grid, forward"),
        Part("backward", "the standard grid, backward"),
        Part("slice-forward", "the slice grid, forward"),
        Part("slice-backward", "the slice grid, backward"),
        Part("flex-forward", "FlexAttention, which compiles a kernel a shape, forward"),
        Part("flex-backward", "FlexAttention, backward"),
    )
}


def direction(part: str) -> str:
    """forward or backward, of a part that times."""
    return part.rpartition("-")[2]


def grid(part: str, device: str) -> list[shapes.Shape]:
    """The shapes of a part that times."""
    if device == "cpu":
        return shapes.tiny_grid()
    if part.startswith("slice"):
        return shapes.slice_grid()
    if part.startswith("flex"):  # those with a goal first; the rest as far as the time goes
        pairs = zip(shapes.slice_grid(), shapes.standard_grid(), strict=False)
        return [shape for pair in pairs for shape in pair]
    return shapes.standard_grid()


def cells(part: str, device: str) -> list[Cell]:
    """Every cell of a part, in the order they run."""
    ours = OURS if device == "cuda" else (*OURS, "cpu")
    if part == "ceilings":
        return [Cell(part, name, "torch") for name in CEILINGS]
    if part == "tests":
        files = sorted(path for folder in TEST_FILES for path in (ROOT / folder).glob("test_*.py"))
        return [Cell(part, str(path.relative_to(ROOT)), "pytest") for path in files]
    if part == "cases":
        names = _case_names() if device == "cuda" else _case_names()[:3]
        # Contenders outermost: each worker takes every n-th cell, and so its share of those that compile.
        return [Cell(part, f"{name} {dtype}", who) for who in ours for dtype in DTYPES for name in names]
    contenders = [*ours, *(f"{name} deterministic" for name in ours)]
    contenders += ["FlexAttention"] if part.startswith("flex") else RIVALS
    if part.startswith("flex"):
        contenders = [*ours, "FlexAttention"]
    return [Cell(part, str(shape), who) for shape in grid(part, device) for who in contenders]


@functools.cache
def _case_names() -> tuple[str, ...]:
    from tpkernels.testing import CASES

    return tuple(dict.fromkeys(map(str, CASES)))


# ---- the worker ------------------------------------------------------------------------------------------------------


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file, without a last line that a crash cut short."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def append(file: Path, row: dict[str, Any]) -> None:
    """One line, there for good when this returns (but for a power cut)."""
    with file.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


def key(row: dict[str, Any] | Cell) -> tuple[str, str, str]:
    """What a row answers."""
    part, subject, contender = row if isinstance(row, Cell) else (row[name] for name in Cell._fields)
    return part, subject, contender


def work(todo: Iterable[Cell], device: str, file: Path) -> int:
    """Run cells that have no row in `file` yet; exit status."""
    done = {key(row) for row in read_rows(file)}
    append(file, {**Cell("machine", "machine", "machine")._asdict(), **machine(device)})
    supervisor = os.getppid()
    for cell in todo:
        if key(cell) in done:
            continue
        if os.getppid() != supervisor:  # it was interrupted: nobody waits for the rows
            return 0
        append(file, {**cell._asdict(), "status": "begun"})
        append(file, {**cell._asdict(), **outcome(cell, device)})
        if not _answers(device):
            return BROKEN
    return 0


def outcome(cell: Cell, device: str) -> dict[str, Any]:
    """Status, text and figures of a cell; whatever it raises becomes text."""
    from benchmarks.gpu_report.contenders import Refused

    try:
        return {"status": "ok", "text": "", **_run(cell, device)}
    except Refused as reason:
        return {"status": "refused", "text": str(reason)}
    except AssertionError as error:
        return {"status": "wrong", "text": _short(error)}
    except Exception as error:
        return {"status": "error", "text": f"{type(error).__name__}: {_short(error)}"}
    finally:
        _free(device)


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:300]} ... {text[-90:]}"


def _free(device: str) -> None:
    import gc

    import torch

    gc.collect()
    if device == "cuda":
        try:
            torch.cuda.empty_cache()
        except Exception:  # the device is broken: _answers() says so next
            return


def _answers(device: str) -> bool:
    import torch

    if device != "cuda":
        return True
    try:
        torch.cuda.synchronize()
        return float(torch.ones(1, device="cuda").sum()) == 1.0
    except Exception:
        return False


def _run(cell: Cell, device: str) -> dict[str, Any]:
    runners: dict[str, Callable[[Cell, str], dict[str, Any]]] = {"ceilings": _ceiling, "cases": _case, "tests": _tests}
    return runners.get(cell.part, _timed)(cell, device)


def _ceiling(cell: Cell, device: str) -> dict[str, Any]:
    import torch

    from benchmarks.gpu_report.timing import measure

    if cell.subject == "copy":
        size = (4 << 30) if device == "cuda" else 1 << 20
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        times = measure(lambda: target.copy_(source), device)
        return {**times._asdict(), "terabytes_per_s": 2 * size / times.ms / 1e9}
    size = 8192 if device == "cuda" else 128
    dtype = getattr(torch, cell.subject.removeprefix("gemm "))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        times = measure(lambda: a @ b, device)
    finally:
        torch.set_float32_matmul_precision(precision)
    return {**times._asdict(), "tflops": 2 * size**3 / times.ms / 1e9}


def _case(cell: Cell, device: str) -> dict[str, Any]:
    import torch

    from benchmarks.gpu_report.contenders import Refused
    from tpkernels import backends, testing

    name, _, dtype = cell.subject.rpartition(" ")
    index = [str(case) for case in testing.CASES].index(name)
    case, torch_dtype = testing.CASES[index], getattr(torch, dtype)
    deterministic = (index % 2 == 0) == (dtype == "float16")  # each case in both ways, over the dtypes
    call = backends.AttentionCall(
        device, torch_dtype, case.query_heads, case.kv_heads, case.head_dim, case.dv, deterministic=deterministic,
        window=case.window != (None, None), softcap=bool(case.softcap), sinks=case.sinks,
        documents=case.documents is not None,
    )  # fmt: skip
    try:
        backends.select(call, cell.contender)
    except ValueError as error:
        raise Refused(str(error)) from error
    inputs = testing.make_inputs(case, torch_dtype, device=device)
    testing.check(testing.run(inputs, backend=cell.contender, deterministic=deterministic), inputs)
    return {"deterministic": deterministic}


def _tests(cell: Cell, device: str) -> dict[str, Any]:
    """Those tests of a file that run on the GPU; without one nothing is started, since the tests are at hand there."""
    from importlib.util import find_spec

    from benchmarks.gpu_report.contenders import Refused

    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        raise Refused(f"not installed: {', '.join(missing)}")
    if device != "cuda":
        raise Refused("run it with pytest")
    command = [sys.executable, "-P", "-m", "pytest", cell.subject, "-m", "gpu"]
    command += ["-q", "-p", "no:cacheprovider", "--no-header"]
    wide = {**os.environ, "COLUMNS": "300"}  # or pytest cuts the reasons short
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, env=wide, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)  # into the worker's log, whose last line is told if the time runs out
            lines += [line.rstrip()] if line.strip() else []
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    last = lines[-1].strip("= ") if lines else f"exit status {process.returncode}"
    if process.returncode not in (0, 5):  # 5: the file has no test for a GPU
        return {"status": "wrong", "text": " | ".join([last, *failed[:5]])[:1500]}
    return {"text": last}


@functools.lru_cache(maxsize=1)
def _problem(shape: shapes.Shape, device: str) -> Any:
    import torch

    from benchmarks.gpu_report.contenders import Problem

    return Problem.of(shape, torch.bfloat16, device)


@functools.lru_cache(maxsize=1)
def _answers_of(problem: Any) -> Any:
    import torch

    from benchmarks.gpu_report.answers import answer

    return answer(problem, torch.float64), answer(problem, torch.bfloat16)


def _timed(cell: Cell, device: str) -> dict[str, Any]:
    """Check, then time. A peer outside our tolerance is timed all the same, and marked; ours is not."""
    import torch

    from benchmarks.gpu_report.answers import judge
    from benchmarks.gpu_report.contenders import OURS as BACKENDS
    from benchmarks.gpu_report.contenders import PEERS
    from benchmarks.gpu_report.timing import measure

    shape = next(shape for shape in grid(cell.part, device) if str(shape) == cell.subject)
    way = direction(cell.part)
    problem = _problem(shape, device)
    jobs = {**BACKENDS, **PEERS}[cell.contender](problem)
    with torch.set_grad_enabled(cell.contender in PEERS):
        jobs.forward()
        if way == "backward":
            jobs.backward()
        exact, yardstick = _answers_of(problem)
        verdict = judge(jobs.results(), exact, yardstick, shape.group, torch.bfloat16)
        if not verdict.ok and cell.contender in BACKENDS:
            raise AssertionError(verdict.text)
        times = measure(jobs.backward if way == "backward" else jobs.forward, device)
    return {
        **times._asdict(),
        "tflops": shape.flops(way) / times.ms / 1e9,
        "within_tolerance": verdict.ok,
        "text": verdict.text,
    }


def machine(device: str) -> dict[str, Any]:
    """What the figures hang on: the GPU, its clocks and power limit now, driver and versions."""
    import platform

    import torch

    facts: dict[str, Any] = {"status": "machine", "device": device, "python": platform.python_version()}
    facts["torch"] = torch.__version__
    try:
        import triton

        facts["triton"] = triton.__version__
    except Exception as error:
        facts["triton"] = f"none ({type(error).__name__})"
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = properties.name
        facts["capability"] = f"{properties.major}.{properties.minor}"
        facts["multiprocessors"] = properties.multi_processor_count
        facts["memory_gib"] = round(properties.total_memory / 2**30, 1)
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()
        facts |= _driver()
    return facts


def _driver() -> dict[str, str]:
    fields = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
        return dict(zip(fields, (value.strip() for value in text.split(",")), strict=True))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"driver_version": f"unknown ({type(error).__name__})"}
