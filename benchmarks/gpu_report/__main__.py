"""The command line of the report: build what is missing, run parts, write gpu_report.json and gpu_report.md."""

from __future__ import annotations

import argparse
import datetime
import filecmp
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

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
FEWEST_SECONDS = 30  # less is no time to start a part
SHOWN_FAILURES = 8
CUDA_KERNELS = "tpkernels._cuda"
FAILED = ("wrong", "error", "crashed")


def main(arguments: list[str] | None = None) -> int:
    """1 when something of ours was wrong, failed or crashed; missing peers and time that ran out are no error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_report", help="folder of the two files")
    parser.add_argument(
        "--only", nargs="+", choices=["build", *parts.PARTS], help="these parts; others keep their rows"
    )
    parser.add_argument("--resume", action="store_true", help="keep outcomes; run the cells that have none")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny shapes, a test of the report"
    )
    parser.add_argument("--seconds", type=float, default=440, help="the most time a part may take")
    parser.add_argument(
        "--in-all", type=float, default=float("inf"), metavar="SECONDS",
        help="the most time for everything; the same call with --resume goes on from there",
    )  # fmt: skip
    parser.add_argument("--no-build", action="store_true", help="measure what is installed or needs no build")
    parser.add_argument("--worker", nargs=4, metavar=("PART", "FILE", "SHARE", "OF"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        part, file, share, of = options.worker
        todo = parts.cells(part, options.device)[int(share) :: int(of)]
        return parts.work(todo, options.device, Path(file))
    reason = _no_gpu() if options.device == "cuda" else None
    if reason is not None:
        print(
            f"gpu_report: torch sees no CUDA device here{reason}; --device cpu tests the report itself", file=sys.stderr
        )
        return 2
    end = time.monotonic() + options.in_all
    out: Path = options.out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        report = _load(out)
        _write(report, out)
    except OSError as error:
        print(f"gpu_report: --out {out} cannot be written: {error.strerror}; name another folder", file=sys.stderr)
        return 2
    build = not options.no_build
    environment, report["build"] = _installed(
        out, options.device, build=build, seconds=min(BUILD_SECONDS, options.in_all)
    )
    print("; ".join(report["build"].values()), flush=True)
    broken = False
    for name, part in parts.PARTS.items():
        if options.only is None or name in options.only:
            began = time.monotonic()
            if end - began < FEWEST_SECONDS:
                print(f"{name}: no time was left; --resume runs it")
                continue
            try:
                _run(part, report["rows"], out, environment, options, deadline=min(began + options.seconds, end))
            except Exception:  # of the report itself; the other parts are no worse for it
                traceback.print_exc()
                broken = True
            finally:  # also when a signal ends it
                _collect(part, report, options.device, out)
                _write(report, out)
                print(f"{name}: {_summary(report['rows'], name)}, {time.monotonic() - began:.0f} s", flush=True)
    open_cells = _left(report["rows"], options)
    print(
        f"report: {out / 'gpu_report.md'}; "
        + (f"{open_cells} cells are left for --resume" if open_cells else "no cell is left")
    )
    return int(broken or any(_is_failure(row) for row in report["rows"]))


def _left(rows: list[dict[str, Any]], options: argparse.Namespace) -> int:
    """Cells of the parts asked for that have not come to run."""
    wanted = [name for name in parts.PARTS if options.only is None or name in options.only]
    ran = {parts.key(row) for row in rows if row["status"] != "not run"}
    return sum(parts.key(cell) not in ran for name in wanted for cell in parts.cells(name, options.device))


def _is_failure(row: dict[str, Any]) -> bool:
    """Of something of ours."""
    return row["status"] in FAILED and row["contender"].split()[0] in (*parts.OURS, "pytest", "cpu")


def _stop(signum: int, frame: object) -> NoReturn:
    """Workers are ended and both files written on the way out."""
    raise SystemExit(128 + signum)


def _no_gpu() -> str | None:
    """What torch says of it. Asked of a process of its own: the supervisor must not hold a CUDA context."""
    command = [sys.executable, "-c", "import torch, sys; sys.exit(not torch.cuda.is_available())"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    said = " ".join(done.stderr.split())[-300:]
    return None if done.returncode == 0 else f" ({said})" if said else ""


def _run(
    part: parts.Part, rows: list[dict[str, Any]], out: Path, environment: dict[str, str], options: argparse.Namespace,
    *, deadline: float,
) -> None:  # fmt: skip
    """Workers of the part, each with a file of rows in `out`; with --resume a worker skips what has an outcome there
    or in `rows`: a call that was killed has written no more than the files."""
    cells = parts.cells(part.name, options.device)
    files = list(out.glob(f"{part.name}-[0-9]*.jsonl"))
    found = {parts.key(row): row for row in rows}
    for file in files:
        found |= supervise.answers(file)
    kept = [found[parts.key(c)] for c in cells if options.resume and parts.key(c) in found]
    kept = [row for row in kept if row["status"] in ("ok", *FAILED)]
    for old in (*files, *(file.with_suffix(".log") for file in files)):
        old.unlink(missing_ok=True)
    processes = min(part.processes, max(1, (os.cpu_count() or 1) - 1), len(cells))
    files = [out / f"{part.name}-{share}.jsonl" for share in range(processes)]
    for share, file in enumerate(files):
        mine = {parts.key(cell) for cell in cells[share::processes]}
        file.write_text("")
        for row in kept:
            if parts.key(row) in mine:
                parts.append(file, row)
    stop = threading.Event()
    jobs = [
        functools.partial(
            supervise.supervise,
            functools.partial(_worker, part.name, share, processes, options.device),
            cells[share::processes],
            file=file,
            deadline=deadline,
            cell_seconds=part.cell_seconds,
            environment=environment,
            stop=stop,
        )
        for share, file in enumerate(files)
    ]
    began = time.monotonic()

    def tick() -> None:
        answered = sum(len(supervise.answers(file)) for file in files)
        print(f"{part.name}: {answered} of {len(cells)} cells, {time.monotonic() - began:.0f} s", flush=True)

    supervise.side_by_side(jobs, tick=tick, stop=stop)


def _collect(part: parts.Part, report: dict[str, Any], device: str, out: Path) -> None:
    """The part's rows and what its machine was, from the workers' files into the report."""
    found = {}
    for file in out.glob(f"{part.name}-[0-9]*.jsonl"):
        for name, row in supervise.answers(file).items():
            found[name] = {**row, "text": row["text"].replace(str(ROOT), ".").replace(str(Path.home()), "~")}
        for row in parts.read_rows(file):
            if row["status"] == "machine":
                report["machines"][part.name] = {k: v for k, v in row.items() if k not in parts.Cell._fields}
    cells = map(parts.key, parts.cells(part.name, device))
    others = [row for row in report["rows"] if row["part"] != part.name]
    report["rows"] = others + [found[cell] for cell in cells if cell in found]
    for row in filter(_is_failure, report["rows"][len(others) :][:SHOWN_FAILURES]):
        print(f"  {row['status']}: {row['subject']} {row['contender']}: {row['text'][:200]}")


def _worker(part: str, share: int, of: int, device: str, file: Path) -> list[str]:
    """-P keeps the checkout's sources from hiding an installed package; benchmarks come from the checkout even so."""
    command = [sys.executable, "-P", "-c", WORKER, str(ROOT), "--device", device]
    return [*command, "--worker", part, str(file), str(share), str(of)]


# ---- the build -------------------------------------------------------------------------------------------------------


def _installed(out: Path, device: str, *, build: bool, seconds: float) -> tuple[dict[str, str], dict[str, str]]:
    """Environment of the workers, in which tpkernels is this checkout's; and what was found or done, in words."""
    site, stamp, sources = out / "site", out / "site" / "sources", _sources("tpkernels", "csrc")
    base = {**os.environ}
    built = stamp.exists() and stamp.read_text() == sources
    attempts = [base, _with_path(base, site)] if built else [base]
    missing = [_missing(environment, device) for environment in attempts]
    if None in missing:
        return attempts[missing.index(None)], {"build": "nothing was missing"}
    said = f"missing: {missing[-1]}"
    if build and not built:  # twice would be in vain
        print(f"build: {said}; its log is {out / 'build.log'}", flush=True)
        began = time.monotonic()
        shutil.rmtree(site, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
        log = out / "build.log"
        with log.open("wb") as stream:
            try:
                status: int | str = subprocess.run(
                    [*command, "--target", str(site), "."], cwd=ROOT, stdout=stream, stderr=stream, check=False,
                    timeout=seconds,
                ).returncode  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                status = type(error).__name__
        if status == 0:
            stamp.write_text(sources)
            left = _missing(_with_path(base, site), device)
            said += f"; built it in {time.monotonic() - began:.0f} s"
            return _with_path(base, site), {"build": said + ("" if left is None else f", but still missing: {left}")}
        tail = " ".join(log.read_text(errors="replace").split()[-40:])
        said += f"; pip ended with {status}: {tail}".replace(str(ROOT), ".")
    elif CUDA_KERNELS in missing:
        return attempts[missing.index(CUDA_KERNELS)], {"build": said}
    return _with_path(base, ROOT, ROOT / "python"), {
        "build": said,
        "kernels": "those of the checkout that need no build",
    }


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
    return CUDA_KERNELS if wants_cuda and not found["_cuda"] else None


def _nvcc() -> bool:
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    return shutil.which("nvcc") is not None or any(home and (Path(home) / "bin" / "nvcc").exists() for home in homes)


# ---- the files -------------------------------------------------------------------------------------------------------


def _load(out: Path) -> dict[str, Any]:
    """The report so far. What older sources gave is dropped with the workers' files: no table mixes two versions."""
    file, sources = out / "gpu_report.json", _sources("tpkernels", "csrc", "benchmarks/gpu_report")
    report = dict(json.loads(file.read_text())) if file.exists() else {}
    if report.get("sources") == sources:
        return report
    if report.get("rows"):
        print("gpu_report: the sources have changed since the last call; its rows are dropped", flush=True)
    for part in parts.PARTS:
        for old in out.glob(f"{part}-[0-9]*"):
            old.unlink()
    return {"rows": [], "machines": {}, "build": {}, "sources": sources}


def _sources(*folders: str) -> str:
    """A digest of the files in these folders of the checkout, without what is built from them."""
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.is_file() and file.suffix not in (".so", ".pyc"):
                digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _write(report: dict[str, Any], out: Path) -> None:
    """Both files, whole at any moment."""
    report["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    report["commit"] = _commit() or f"unknown (sources {report['sources']})"
    for name, text in (("json", json.dumps(report, indent=1)), ("md", markdown.render(report))):
        part = out / f"gpu_report.{name}.part"
        part.write_text(text)
        part.replace(out / f"gpu_report.{name}")


def _commit() -> str:
    """Empty without git, or where the sources came without their history."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _summary(rows: list[dict[str, Any]], part: str) -> str:
    statuses = [row["status"] for row in rows if row["part"] == part]
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)) or "no cells"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
