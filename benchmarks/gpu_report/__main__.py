"""The command line of the report: build what is missing, run parts, write gpu_report.json and gpu_report.md."""

from __future__ import annotations

import argparse
import datetime
import filecmp
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_report import markdown, parts, supervise

ROOT = parts.ROOT
PROBE = """
import importlib.util, json, pathlib
found = importlib.util.find_spec("tpkernels")
folder = pathlib.Path(found.origin).parent if found else None
have = lambda name: folder is not None and any(folder.glob(name + ".*.so"))
print(json.dumps({"folder": str(folder or ""), "_core": have("_core"), "_cuda": have("_cuda")}))
"""
WORKER = (
    "import sys; sys.path.append(sys.argv.pop(1)); from benchmarks.gpu_report.__main__ import main; sys.exit(main())"
)
BUILD_SECONDS = 460
FAILED = ("wrong", "error", "crashed")


def main(arguments: list[str] | None = None) -> int:
    """1 when something of ours was wrong, failed or crashed; missing peers and time that ran out are no error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_report", help="folder of the two files")
    parser.add_argument(
        "--only", nargs="+", choices=["build", *parts.PARTS], help="these parts; others keep their rows"
    )
    parser.add_argument("--resume", action="store_true", help="keep rows that came out; run the cells that did not")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny shapes, a test of the report"
    )
    parser.add_argument("--seconds", type=float, default=440, help="the most time a part may take")
    parser.add_argument("--worker", nargs=4, metavar=("PART", "FILE", "SHARE", "OF"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        part, file, share, of = options.worker
        todo = parts.cells(part, options.device)[int(share) :: int(of)]
        return parts.work(todo, options.device, Path(file))
    if options.device == "cuda" and not _has_gpu():
        print("gpu_report: torch sees no CUDA device here; --device cpu tests the report itself", file=sys.stderr)
        return 2
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    report = _load(out)
    environment, report["build"] = _installed(
        out, options.device, build=options.only is None or "build" in options.only
    )
    for name, part in parts.PARTS.items():
        if options.only is None or name in options.only:
            began = time.monotonic()
            report["rows"] = _run(part, report["rows"], out, environment, options)
            machines = [
                row for f in out.glob(f"{name}-*.jsonl") for row in parts.read_rows(f) if row["status"] == "machine"
            ]
            if machines:
                report["machines"][name] = {k: v for k, v in machines[0].items() if k not in parts.Cell._fields}
            _write(report, out)
            print(f"{name}: {_summary(report['rows'], name)}, {time.monotonic() - began:.0f} s", flush=True)
    _write(report, out)
    print(f"report: {out / 'gpu_report.md'}")
    ours = (*parts.OURS, "pytest", "cpu")
    return int(any(row["status"] in FAILED and row["contender"].split()[0] in ours for row in report["rows"]))


def _has_gpu() -> bool:
    """Asked of a process of its own: the supervisor must not hold a CUDA context."""
    command = [sys.executable, "-c", "import torch, sys; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _run(
    part: parts.Part, rows: list[dict[str, Any]], out: Path, environment: dict[str, str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """All rows, those of the part anew."""
    cells = parts.cells(part.name, options.device)
    mine = [row for row in rows if row["part"] == part.name]
    kept = [row for row in mine if options.resume and row["status"] in ("ok", "refused")]
    for old in out.glob(f"{part.name}-*"):
        old.unlink()
    done = {parts.key(row) for row in kept}
    processes = min(part.processes, max(1, (os.cpu_count() or 1) - 1), len(cells))
    deadline = time.monotonic() + options.seconds
    jobs = []
    for share in range(processes):
        file = out / f"{part.name}-{share}.jsonl"
        for row in kept:  # a worker skips what has a row
            parts.append(file, row)
        job = functools.partial(
            supervise.supervise,
            functools.partial(_worker, part.name, share, processes, options.device),
            [cell for cell in cells[share::processes] if parts.key(cell) not in done],
            file=file,
            deadline=deadline,
            cell_seconds=part.cell_seconds,
            environment=environment,
        )
        jobs.append(job)
    supervise.side_by_side(jobs)
    found = {}
    for share in range(processes):
        for row in parts.read_rows(out / f"{part.name}-{share}.jsonl"):
            if row["status"] not in ("begun", "machine"):
                found[parts.key(row)] = {
                    **row,
                    "text": row["text"].replace(str(ROOT), ".").replace(str(Path.home()), "~"),
                }
    return [row for row in rows if row["part"] != part.name] + [
        found[parts.key(c)] for c in cells if parts.key(c) in found
    ]


def _worker(part: str, share: int, of: int, device: str, file: Path) -> list[str]:
    """-P keeps the checkout's sources from hiding an installed package; benchmarks come from the checkout even so."""
    command = [sys.executable, "-P", "-c", WORKER, str(ROOT), "--device", device]
    return [*command, "--worker", part, str(file), str(share), str(of)]


# ---- the build -------------------------------------------------------------------------------------------------------


def _installed(out: Path, device: str, *, build: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Environment of the workers, in which tpkernels is this checkout's; and what was found or done, in words."""
    site = out / "site"
    base = {**os.environ}
    attempts = [base, _with_path(base, site)] if site.exists() else [base]
    said = {}
    for environment in attempts:
        missing = _missing(environment, device)
        if missing is None:
            return environment, {"build": "nothing was missing"}
    said["build"] = f"missing: {missing}"
    if build:
        shutil.rmtree(site, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
        log = out / "build.log"
        with log.open("wb") as stream:
            try:
                status: int | str = subprocess.run(
                    [*command, "--target", str(site), "."], cwd=ROOT, stdout=stream, stderr=stream, check=False,
                    timeout=BUILD_SECONDS,
                ).returncode  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                status = type(error).__name__
        if status == 0:
            left = _missing(_with_path(base, site), device)
            said["build"] += "; built it" + ("" if left is None else f", but still missing: {left}")
            return _with_path(base, site), said
        tail = " ".join(log.read_text(errors="replace").split()[-40:])
        said["build"] += f"; pip ended with {status}: {tail}".replace(str(ROOT), ".")
    said["kernels"] = "those of the checkout that need no build"
    return _with_path(base, ROOT, ROOT / "python"), said


def _with_path(environment: dict[str, str], *folders: Path) -> dict[str, str]:
    path = [*map(str, folders), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


def _missing(environment: dict[str, str], device: str) -> str | None:
    """What a worker in that environment would lack of this checkout."""
    command = [sys.executable, "-P", "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return f"a Python that starts ({done.stderr.strip()[-200:]})"
    found = json.loads(done.stdout)
    if not found["folder"]:
        return "the package"
    folder = Path(found["folder"])
    for source in (ROOT / "tpkernels").rglob("*.py"):
        twin = folder / source.relative_to(ROOT / "tpkernels")
        if not twin.exists() or not filecmp.cmp(source, twin, shallow=False):
            return f"the checkout's {source.relative_to(ROOT)} (another version is installed)"
    if not found["_core"]:
        return "tpkernels._core"
    wants_cuda = (
        device == "cuda" and (ROOT / "csrc" / "cuda").exists() and _nvcc() and os.environ.get("TPK_CUDA") != "0"
    )
    return "tpkernels._cuda" if wants_cuda and not found["_cuda"] else None


def _nvcc() -> bool:
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    return shutil.which("nvcc") is not None or any(home and (Path(home) / "bin" / "nvcc").exists() for home in homes)


# ---- the files -------------------------------------------------------------------------------------------------------


def _load(out: Path) -> dict[str, Any]:
    file = out / "gpu_report.json"
    if file.exists():
        return dict(json.loads(file.read_text()))
    return {"rows": [], "machines": {}, "build": {}}


def _write(report: dict[str, Any], out: Path) -> None:
    """Both files, whole at any moment."""
    report["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    report["commit"] = done.stdout.strip() or "unknown"
    for name, text in (("json", json.dumps(report, indent=1)), ("md", markdown.render(report))):
        part = out / f"gpu_report.{name}.part"
        part.write_text(text)
        part.replace(out / f"gpu_report.{name}")


def _summary(rows: list[dict[str, Any]], part: str) -> str:
    statuses = [row["status"] for row in rows if row["part"] == part]
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)) or "no cells"


if __name__ == "__main__":
    sys.exit(main())
