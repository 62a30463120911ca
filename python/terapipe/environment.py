"""`terapipe env`: what is installed, what this machine has, which backends and links work here and why the others do
not.

Goes into every bug report, so it must never fail: what cannot be found out is reported as such. Runs in one process,
starts compilers only to ask for their version.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

VARIABLES = (
    "TPK_BACKEND",
    "TPK_CPU_ISA",
    "TPK_LOG",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CMAKE_ARGS",
    "MAX_JOBS",
)


@dataclass(frozen=True)
class Choice:
    """A backend or a link: usable, or the reason why not."""

    name: str
    usable: bool
    note: str


@dataclass(frozen=True)
class Environment:
    """One machine. `versions` and `compilers` hold text; "not found" where there is nothing."""

    versions: dict[str, str]
    compilers: dict[str, str]
    cpu: dict[str, Any]
    gpus: list[str]
    backends: list[Choice]
    links: list[Choice]
    variables: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_shared_dict(self) -> dict[str, Any]:
        """For a file that others read: "3.11.7 (/home/me/.venv/bin/python)" loses where it lies."""
        shared: dict[str, Any] = _without_paths(self.to_dict())
        return shared

    def __str__(self) -> str:
        lines: list[str] = []
        for title, table in (("versions", self.versions), ("compilers", self.compilers), ("cpu", self.cpu)):
            lines += [title, *(f"  {key:<18} {value}" for key, value in table.items())]
        lines += ["gpus", *(f"  {gpu}" for gpu in self.gpus or ["none"])]
        for title, choices in (("backends", self.backends), ("links", self.links)):
            lines += [
                title,
                *(
                    f"  {choice.name:<18} "
                    f"{'usable' if choice.usable else 'not usable'}{': ' if choice.note else ''}{choice.note}"
                    for choice in choices
                ),
            ]
        lines += (
            ["variables set", *(f"  {key}={value}" for key, value in self.variables.items())] if self.variables else []
        )
        return "\n".join(lines)


def _without_paths(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _without_paths(value) for key, value in found.items()}
    return re.sub(r" \((/|[A-Za-z]:\\)[^()]*\)$", "", found) if isinstance(found, str) else found


def collect() -> Environment:
    """This machine, now. Imports torch if there is one."""
    return Environment(
        versions=_versions(),
        compilers=_compilers(),
        cpu=_cpu(),
        gpus=_gpus(),
        backends=_backends(),
        links=_links(),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _versions() -> dict[str, str]:
    versions = {
        "terapipe": _package("terapipe"),
        "python": f"{platform.python_version()} ({sys.executable})",
        "os": platform.platform(),
    }
    for package in ("torch", "triton", "numpy", "tyro", "rich", "matplotlib"):
        versions[package] = _package(package)
    try:
        import torch

        versions["torch"] = f"{torch.__version__}"  # the distribution's version lacks "+cpu" in some indexes
        versions["cuda of torch"] = torch.version.cuda or "none (CPU build)"
    except ImportError as error:
        versions["torch"] = f"not importable: {error}"
    return versions


def _package(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        if name == "terapipe":
            import terapipe

            return f"{terapipe.__version__} (not installed, run from a checkout)"
        return "not found"


def _compilers() -> dict[str, str]:
    cxx = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "c++")
    return {
        name: _first_line(command)
        for name, command in {"C++": cxx, "cmake": "cmake", "ninja": "ninja", "nvcc": "nvcc"}.items()
    }


def _first_line(command: str) -> str:
    beside_python = os.path.dirname(
        sys.executable
    )  # where pip puts cmake and ninja, on the path only in an activated environment
    found = shutil.which(command) or shutil.which(command, path=beside_python)
    if found is None:
        return "not found"
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{found} does not answer: {error}"
    lines = [line for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    release = [line for line in lines if "release" in line]  # nvcc opens with its name and copyright
    return f"{(release or lines or ['?'])[0].strip()} ({found})"


def _cpu() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu: dict[str, Any] = {"model": _cpu_model(), "cores usable": cores}
    try:
        import torch

        cpu["torch threads"] = torch.get_num_threads()
    except ImportError:
        pass
    cpu["kernels' ISA"] = _isa()
    return cpu


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _isa() -> str:
    try:
        from tpkernels import _core

        return f"{_core.isa_level()} (this CPU can run: {', '.join(_core.isa_levels())})"
    except (ImportError, ValueError) as error:
        return f"unknown: {error}"


def _gpus() -> list[str]:
    try:
        import torch

        if not torch.cuda.is_available():
            return []
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in found]
    except (ImportError, RuntimeError) as error:
        return [f"unknown: {error}"]


def _backends() -> list[Choice]:
    try:
        from tpkernels import backends

        return [Choice(row.name, row.usable, row.reason) for row in backends.describe()]
    except (ImportError, RuntimeError) as error:
        return [Choice("tpkernels", False, str(error))]


def _links() -> list[Choice]:
    links = [Choice("local", True, "one process steps all ranks")]
    try:
        from tpkernels.links import peer_missing, shm_missing

        missing = shm_missing()
        links.append(Choice("shm", not missing, missing or "CPU ranks of one host, the default between them"))
        missing = peer_missing()
        links.append(
            Choice("peer", not missing, missing or "GPUs of one host, by request (links = peer): not run on GPUs yet")
        )
    except ImportError as error:
        links.append(Choice("shm", False, str(error)))
    try:
        from torch import distributed
    except ImportError as error:
        return [*links, Choice("dist", False, str(error))]
    if not distributed.is_available():
        return [*links, Choice("dist", False, "this torch was built without torch.distributed")]
    gloo, nccl = distributed.is_gloo_available(), distributed.is_nccl_available()
    links.append(Choice("dist (gloo)", gloo, "CPU" if gloo else "this torch was built without gloo"))
    no_gpu = not [gpu for gpu in _gpus() if not gpu.startswith("unknown")]
    reason = "this torch was built without NCCL" if not nccl else "no GPU is visible" if no_gpu else ""
    links.append(Choice("dist (nccl)", not reason, reason or "GPUs"))
    return links
