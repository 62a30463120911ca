"""The emulator of csrc/emulator: built once, and driven from tests: `emulator.run(kernel, ...)` gives a Report.

It compiles the CUDA kernels with the host's compiler; neither a GPU nor a CUDA toolkit is needed. The build stays in
build/emulator and takes seconds when nothing changed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tpkernels import backends, cuda
from tpkernels.cuda_peer import CudaPeer
from tpkernels.hand_off import Slot

ROOT = Path(__file__).resolve().parents[3]


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found. findings: kind, kernel, block, threads, text, count; banks: place, accesses, phases, turns.

    operations: warp-wide instructions and barriers; blocks: of each kernel.
    """

    findings: list[dict[str, Any]]
    banks: list[dict[str, Any]]
    operations: dict[str, int]
    blocks: dict[str, int]

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
        self.holds = False  # launches wait

    def register(self, *, writable: bool, fresh: bool = False, shared: bool = False, **tensors: Tensor) -> None:
        """Lets kernels read the tensors, and write them if writable, until the next clear(). fresh: full of garbage;
        shared: launches of several streams or devices use it, and have to order what they do."""
        for name, tensor in tensors.items():
            sizes = (tensor.element_size(), list(tensor.shape), list(tensor.stride()))
            self.module.register_tensor(name, tensor.data_ptr(), *sizes, writable, fresh, shared)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Launches within run at once where their streams differ, if a shared tensor is registered."""
        self.module.hold()
        self.holds = True
        yield
        self.holds = False
        self.module.run_held()

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
        return Report(found["findings"], found["banks"], found["operations"], found["blocks"])

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


class EmulatedExtension:
    """tpkernels._cuda with the kernels in the emulator: each call may touch its own tensors only, and must be clean."""

    # Sizes of each argument: batch, tokens, keys, query heads, KV heads, head_dim, value head_dim.
    SHAPES: ClassVar[dict[str, tuple[int, int, int, int]]] = {
        **dict.fromkeys(("q", "dq"), (0, 1, 3, 5)),
        **dict.fromkeys(("k", "dk"), (0, 2, 4, 5)),
        **dict.fromkeys(("v", "dv"), (0, 2, 4, 6)),
        **dict.fromkeys(("out", "dout"), (0, 1, 3, 6)),
    }

    def __init__(self, emulator: Emulator, module: ModuleType):
        self.emulator, self.module = emulator, module
        self.banks: dict[str, tuple[int, int]] = {}  # source line: phases and turns of its shared memory accesses
        self.operations: collections.Counter[str] = collections.Counter()
        self.blocks: collections.Counter[str] = collections.Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def attention_forward(self, **call: Any) -> None:
        """As tpkernels._cuda's."""
        self._run(self.module.attention_forward, call, writes=("out", "lse"))

    def attention_backward(self, **call: Any) -> None:
        """As tpkernels._cuda's."""
        self._run(self.module.attention_backward, call, writes=("dq", "dk", "dv", "dsinks"))

    def _run(self, function: Callable[..., None], call: dict[str, Any], writes: tuple[str, ...]) -> None:
        fresh = {"out", "dq"}.intersection(writes)  # dk, dv and dsinks are added to
        register, sizes = self.emulator.module.register_tensor, call["sizes"]
        self.emulator.module.clear_tensors()
        for name, axes in self.SHAPES.items():
            if name in call:
                address, *strides = call[name]
                item_bytes = 4 if name in ("dk", "dv") else 2
                shape = [sizes[axis] for axis in axes]
                register(name, address, item_bytes, shape, [*strides, 1], name in writes, name in fresh)
        batch, tokens, heads = sizes[0], sizes[1], sizes[3]
        register("lse", call["lse"], 4, [batch, heads, tokens], [heads * tokens, tokens, 1], *["lse" in writes] * 2)
        for name in ("sinks", "dsinks"):
            if call.get(name):
                register(name, call[name], 4, [heads], [1], name in writes)
        starts, batch_stride = call["mask"][4:]
        if starts:
            register("document_starts", starts, 4, [batch, tokens], [batch_stride, 1], False)
        allocate = call.pop("allocate")
        memory = []

        def workspace(size_bytes: int) -> int:
            memory.append(torch.full((size_bytes,), 255, dtype=torch.uint8))  # NaN until it is written
            register("workspace", memory[-1].data_ptr(), 1, [size_bytes], [1], True, True)
            allocate(size_bytes)
            return memory[-1].data_ptr()

        function(allocate=workspace, **call)
        report = self.emulator.report()
        assert not report.findings, f"\n{report}"
        for name in [name for name in ("out", "lse", "dq") if name in writes]:
            unwritten = self.emulator.module.first_unwritten(name)
            assert unwritten == "", f"nothing has written {name}{unwritten}"
        for row in report.banks:
            phases, turns = self.banks.get(row["place"], (0, 0))
            self.banks[row["place"]] = (phases + row["phases"], turns + row["turns"])
        self.operations.update(report.operations)
        self.blocks.update(report.blocks)


class PeerEnd(CudaPeer):
    """The kernels of one end of a peer link in the emulator, each end a device of its own. A call may touch its own
    tensors and what the link registered, and must be clean."""

    def __init__(self, emulator: Emulator, module: ModuleType, device_number: int):
        super().__init__(module, "cpu")
        self.emulator, self.device_number = emulator, device_number
        self._kept: list[Tensor] = []  # of launches that wait
        self.conflicts: dict[str, float] = {}

    def place(self, tensor: Tensor) -> dict[str, int]:
        return {"device": self.device_number, "stream": 0}

    def _call(self, name: str, slot: Slot | None, own: Tensor, **arguments: Any) -> None:
        slots = ("out",) if name in ("peer_add_put", "peer_matmul_add_put") else ("x", "a")
        names = []
        for key, value in arguments.items():
            if not isinstance(value, Tensor) or (slot is not None and key in slots):
                continue
            names.append(f"{key} of {name} {len(self._kept)}")
            written = key in ("out", "mean", "rstd")
            self.emulator.register(writable=written, fresh=written, **{names[-1]: value})
            self._kept.append(value)
        super()._call(name, slot, own, **arguments)
        if self.emulator.holds:
            return
        for each in names:
            self.emulator.module.remove_tensor(each)
        self._kept.clear()
        self.check()

    def check(self) -> None:
        """Nothing was found since the last check."""
        report = self.emulator.report()
        assert not report.findings, f"\n{report}"
        self.conflicts |= report.conflicts()


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


def load(name: str, path: Path) -> ModuleType:
    """One of the two modules in the file. pybind11 keeps modules by name, so the folder is part of it."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}.{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def emulator_file() -> Path:
    return build()


@pytest.fixture
def emulator(emulator_file: Path) -> Emulator:
    machine = Emulator(load("tpk_emulator", emulator_file))
    machine.clear()
    return machine


@pytest.fixture
def extension(emulator: Emulator, emulator_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedExtension]:
    """The backend `cuda` runs CPU tensors in the emulator, as one GPU with 8 multiprocessors of sm_80."""
    emulated = EmulatedExtension(emulator, load("tpk_cuda_emulated", emulator_file))
    emulator.module.set_device(80, 8, 163 * 1024)
    emulator.configure(host_threads=min(2, os.cpu_count() or 1))
    monkeypatch.setattr(cuda, "CudaBackend", functools.partial(cuda.CudaBackend, emulated, "cpu"))
    backends._load.cache_clear()
    backends._select.cache_clear()
    yield emulated
    backends._load.cache_clear()
    backends._select.cache_clear()


@pytest.fixture
def peer_ends(emulator: Emulator, emulator_file: Path) -> tuple[PeerEnd, PeerEnd]:
    """Sender's and receiver's kernels."""
    return _peer_ends(emulator, emulator_file)


@pytest.fixture
def open_peer_ends() -> Callable[[Path], tuple[PeerEnd, PeerEnd]]:
    """The same of another file than the one built here."""
    return lambda file: _peer_ends(Emulator(load("tpk_emulator", file)), file)


def _peer_ends(emulator: Emulator, file: Path) -> tuple[PeerEnd, PeerEnd]:
    module = load("tpk_cuda_emulated", file)
    return PeerEnd(emulator, module, 0), PeerEnd(emulator, module, 1)
