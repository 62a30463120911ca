"""The emulator of csrc/emulator: built once, and driven from tests: `emulator.run(kernel, ...)` gives a Report.

It compiles the CUDA kernels with the host's compiler; neither a GPU nor a CUDA toolkit is needed. The build stays in
build/emulator and takes seconds when nothing changed.
"""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found. findings: kind, kernel, block, threads, text, count; banks: place, accesses, phases, turns."""

    findings: list[dict[str, Any]]
    banks: list[dict[str, Any]]
    operations: dict[str, int]

    def __str__(self) -> str:
        return "\n".join(finding["text"] for finding in self.findings) or "no findings"

    @property
    def kinds(self) -> list[str]:
        """Kinds of what was found, without repetition."""
        return sorted({finding["kind"] for finding in self.findings})

    def conflicts(self) -> dict[str, float]:
        """Source lines of shared memory accesses that take more turns than they have to, and how many times more."""
        return {row["place"]: row["turns"] / row["phases"] for row in self.banks if row["turns"] > row["phases"]}


class Emulator:
    """Runs kernels of the module on tensors that are registered for the launch."""

    def __init__(self, module: ModuleType):
        self.module = module

    def register(self, *, writable: bool, **tensors: Tensor) -> None:
        """Lets kernels read the tensors, and write them if writable, until the next clear()."""
        for name, tensor in tensors.items():
            sizes = (tensor.element_size(), list(tensor.shape), list(tensor.stride()))
            self.module.register_tensor(name, tensor.data_ptr(), *sizes, writable)

    def clear(self) -> None:
        """Forgets the tensors and what was found."""
        self.module.clear_tensors()
        self.module.take_report()
        self.configure()

    def configure(self, *, host_threads: int = 1, backwards: bool = False) -> None:
        """backwards: threads and blocks take turns in the reverse order, which must change no result."""
        self.module.configure(host_threads, backwards)

    def report(self) -> Report:
        """What was found since the last report."""
        found = self.module.take_report()
        assert found["findings_left_out"] == 0, found["findings"]
        return Report(found["findings"], found["banks"], found["operations"])

    def run(
        self,
        kernel: str,
        *,
        inputs: dict[str, Tensor] | None = None,
        outputs: dict[str, Tensor],
        sizes: tuple[int, ...] = (),
        grid: int = 1,
        threads: int = 32,
        shared_bytes: int = 0,
    ) -> Report:
        """A kernel of csrc/emulator/test_kernels.cpp; its tensors are the inputs, then the outputs."""
        self.module.clear_tensors()
        self.register(writable=False, **(inputs or {}))
        self.register(writable=True, **outputs)
        addresses = [tensor.data_ptr() for tensor in [*(inputs or {}).values(), *outputs.values()]]
        addresses += [0] * (4 - len(addresses))
        self.module.run_test_kernel(kernel, grid, threads, shared_bytes, addresses, [*sizes, *[0] * (4 - len(sizes))])
        return self.report()


def build() -> Path:
    """The built module; raises with the compiler's output when it does not build."""
    folder = ROOT / "build" / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    assert cmake is not None, "the emulator is built with cmake, which the development requirements bring"
    commands = [
        [cmake, "--build", str(folder), "--target", "tpk_emulator", "--parallel", os.environ.get("MAX_JOBS", "2")]
    ]
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test sessions may share a checkout
        if not (folder / "build.ninja").exists():
            settings = ["-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", "-DTPK_CUDA=0"]
            commands.insert(0, [cmake, "-S", str(ROOT), "-B", str(folder), *settings])
        for command in commands:
            done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"the emulator does not build:\n{done.stdout}\n{done.stderr}")
    (module,) = folder.glob("tpk_emulator*.so")
    return module


@pytest.fixture(scope="session")
def emulator_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tpk_emulator", build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def emulator(emulator_module: ModuleType) -> Emulator:
    machine = Emulator(emulator_module)
    machine.clear()
    return machine
