"""What the compiler makes of the CUDA kernels for sm_80, sm_89 and sm_90a, without a GPU: no spills, registers and
shared memory within the table (csrc/cuda/attention_tiles.h), tensor cores, ldmatrix and asynchronous 16-byte copies.

One compilation serves all tests and is kept in build/cuda_compile until a source changes. Needs nvcc; the SASS also
needs cuobjdump, which the triton package brings.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)  # nvcc: about a minute on two free cores

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"
FOLDER = ROOT / "build" / "cuda_compile"
SOURCES = ("attention_forward", "attention_backward", "fused", "peer", "device_limits")
SHARED_KIB = {"sm_80": 163, "sm_89": 99, "sm_90a": 227}  # that a block may have
INCLUDES = [f"-I{CSRC}", f"-I{CSRC / 'include'}"]
FLAGS = ["-std=c++20", "--expt-relaxed-constexpr", "-fmad=false", "-Xcompiler=-fPIC,-Wall,-Wextra", "-Xptxas=-v"]
# rows of the table: name, threads, shared bytes, blocks, head_dim, keys, rows a warp (forward, queries) or keys a warp,
# rows of a chunk
TABLE = """
#include <cstdio>
#include "cuda/attention_tiles.h"
using namespace tpk;
struct bf;
template <class T> void print(const char* name, int blocks, int own, int chunk) {
  std::printf("[\\"%s\\", %d, %d, %d, %d, %d, %d, %d]\\n", name, T::threads, T::shared_bytes, blocks, T::head_dim, T::keys, own, chunk);
}
int main() {
  print<ForwardTile<bf, 64>>("ForwardTile<bf16, 64>", ForwardTile<bf, 64>::blocks, ForwardTile<bf, 64>::warp_rows, 0);
  print<ForwardTile<bf, 128>>("ForwardTile<bf16, 128>", ForwardTile<bf, 128>::blocks, ForwardTile<bf, 128>::warp_rows, 0);
  print<KeyTile<bf, 64, false>>("KeyTile<bf16, 64, false>", 1, KeyTile<bf, 64, false>::warp_keys, KeyTile<bf, 64, false>::chunk);
  print<KeyTile<bf, 128, false>>("KeyTile<bf16, 128, false>", 1, KeyTile<bf, 128, false>::warp_keys, KeyTile<bf, 128, false>::chunk);
  print<KeyTile<bf, 128, true>>("KeyTile<bf16, 128, true>", 1, KeyTile<bf, 128, true>::warp_keys, KeyTile<bf, 128, true>::chunk);
  print<QueryTile<bf, 64>>("QueryTile<bf16, 64>", QueryTile<bf, 64>::blocks, 16, 0);
  print<QueryTile<bf, 128>>("QueryTile<bf16, 128>", QueryTile<bf, 128>::blocks, 16, 0);
}
"""  # noqa: E501 (C++)


@dataclasses.dataclass(frozen=True)
class Tile:
    """One row of the table."""

    name: str
    threads: int
    shared_bytes: int
    blocks: int
    head_dim: int
    keys: int
    own: int
    chunk: int

    @property
    def products(self) -> int:
        """mma instructions of one pass of the kernel's loop, were no loop body there twice."""
        tiles, depth, columns = self.own // 16, self.head_dim // 16, self.head_dim // 8
        if self.name.startswith("Forward"):
            return tiles * (self.keys // 8 * depth + self.keys // 16 * columns)
        if self.name.startswith("Query"):
            return 2 * self.keys // 8 * depth + self.keys // 16 * columns
        chunk = 2 * tiles * (self.chunk // 8 * depth + self.chunk // 16 * columns)
        return chunk + 8 * self.keys // 16  # dq, 32 rows and 32 columns a warp


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel on one architecture."""

    name: str
    architecture: str
    registers: int
    stack_bytes: int
    spill_bytes: int


def find_nvcc() -> str:
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("nvcc is not installed: neither in CUDACXX nor in PATH nor in /usr/local/cuda/bin")
    return nvcc


def run(command: list[str], **settings) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **settings)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def demangled(text: str) -> str:
    return run(["c++filt"], input=text).replace("tpk::", "")


@pytest.fixture(scope="session")
def log() -> str:
    """Output of nvcc for all sources; the objects lie in FOLDER."""
    nvcc = find_nvcc()
    digest = hashlib.sha256(" ".join([nvcc, *FLAGS, *SHARED_KIB]).encode())
    for path in sorted([*CSRC.glob("cuda/*"), *CSRC.glob("include/tpk/*")]):
        digest.update(path.read_bytes())
    FOLDER.mkdir(parents=True, exist_ok=True)
    kept = FOLDER / f"{digest.hexdigest()[:16]}.log"
    if not kept.exists():
        codes = [f"-gencode=arch=compute_{a[3:]},code={a}" for a in SHARED_KIB]
        text = ""
        for name in SOURCES:
            source = str(CSRC / "cuda" / f"{name}.cu")
            text += run([nvcc, *FLAGS, *INCLUDES, *codes, "-c", source, "-o", str(FOLDER / f"{name}.o")])
        for old in FOLDER.glob("*.log"):
            old.unlink()
        kept.write_text(demangled(text))
    return kept.read_text()


@pytest.fixture(scope="session")
def kernels(log) -> list[Kernel]:
    found = re.findall(
        r"Compiling entry function '(?:void )?(.*?)\(\w+\)' for '(\w+)'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    return [
        Kernel(name.replace(" >", ">"), architecture, int(registers), int(stack), int(stores) + int(loads))
        for name, architecture, stack, stores, loads, registers in found
    ]


@pytest.fixture(scope="session")
def table(tmp_path_factory) -> list[Tile]:
    program = tmp_path_factory.mktemp("tiles") / "tiles"
    compiler = os.environ.get("CXX", "c++")
    run([compiler, "-std=c++20", *INCLUDES, "-x", "c++", "-", "-o", str(program)], input=TABLE)
    return [Tile(*json.loads(line)) for line in run([str(program)]).splitlines()]


@pytest.fixture(scope="session")
def opcodes(log):
    """opcodes(source, architecture): of each kernel, in the order of the code."""
    del log  # the objects are there
    tool = shutil.which("cuobjdump")
    if tool is None:
        triton = importlib.util.find_spec("triton")
        if triton is None or triton.origin is None:
            pytest.skip("cuobjdump is not installed; the CUDA toolkit and the triton package bring it")
        tool = str(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump")

    def opcodes(source: str, architecture: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        text = run([tool, "-sass", "-arch", architecture, str(FOLDER / f"{source}.o")])
        for function in text.split("Function : ")[1:]:
            mangled, body = function.split("\n", 1)
            line = r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)"
            found[mangled] = re.findall(line, body, re.MULTILINE)
        names = demangled("\n".join(found)).splitlines()
        return {name.replace(" >", ">"): each for name, each in zip(names, found.values(), strict=True)}

    return opcodes


@pytest.fixture(scope="session")
def sass(opcodes) -> dict[str, collections.Counter]:
    """How often each bf16 attention kernel has each opcode on sm_80."""
    both = opcodes("attention_forward", "sm_80") | opcodes("attention_backward", "sm_80")
    return {name: collections.Counter(each) for name, each in both.items() if "bf16" in name}


def test_every_kernel_is_compiled_for_every_architecture_without_spills_or_warnings(log, kernels):
    assert "warning" not in log, [line for line in log.splitlines() if "warning" in line]
    names = {kernel.name for kernel in kernels}
    assert len(names) == 55 and len(kernels) == 3 * len(names), sorted(names)
    assert {kernel.architecture for kernel in kernels} == set(SHARED_KIB)
    assert not [kernel for kernel in kernels if kernel.stack_bytes or kernel.spill_bytes]


def test_registers_and_shared_memory_are_within_what_the_table_promises(kernels, table):
    for tile in table:
        compiled = [kernel for kernel in kernels if tile.name in kernel.name]
        assert len(compiled) == 3, tile
        for kernel in compiled:
            registers = -(-kernel.registers // 8) * 8  # as they are given out
            assert registers * tile.threads * tile.blocks <= 65536, (tile, kernel)
        large = tile.name == "KeyTile<bf16, 128, false>"  # not for the devices with 99 KiB
        limits = [kib for name, kib in SHARED_KIB.items() if not (large and name == "sm_89")]
        assert all(tile.shared_bytes <= kib * 1024 for kib in limits), tile


def test_products_run_on_tensor_cores_from_ldmatrix_and_asynchronous_copies(sass, table):
    for tile in table:
        (count,) = (count for name, count in sass.items() if tile.name in name)
        products = sum(n for opcode, n in count.items() if opcode.startswith("HMMA.16816.F32"))
        assert products == tile.products, (tile, count)
        copies = {opcode for opcode in count if opcode.startswith("LDGSTS")}
        assert copies and all(opcode.endswith(".128") for opcode in copies), (tile, copies)
        moves = {opcode for opcode in count if opcode.startswith("LDSM")}
        assert {"LDSM.16.M88.4", "LDSM.16.MT88.4"} == moves, (tile, moves)
        assert not [opcode for opcode in count if re.match(r"LDL|STL|DFMA|DMUL|DADD|DSETP", opcode)], tile


def test_results_leave_in_16_bytes(sass):
    """4-byte stores: lse, one a row and path; reductions of sm_80, which has no wider ones."""
    for name, count in sass.items():
        stores = {opcode: n for opcode, n in count.items() if opcode.startswith("STG")}
        if "ForwardTile" in name:
            assert stores.keys() == {"STG.E", "STG.E.128"} and stores["STG.E"] == 8, stores
        if "KeyTile" in name or "QueryTile" in name or "prepare" in name:
            assert stores.keys() == {"STG.E.128"}, (name, stores)


# ---- kernels of a peer link ------------------------------------------------------------------------------------------

POST, SPIN = "STG.E.STRONG.SYS", "LDG.E.STRONG.SYS"
BARRIER, FENCE, DROP_L1 = "BAR.SYNC.DEFER_BLOCKING", "MEMBAR.ALL.SYS", "CCTL.IVALL"


def data_access(opcode: str) -> bool:
    return opcode in ("LDG.E.128", "STG.E.128") or opcode.startswith("LDGSTS")


@pytest.mark.parametrize("architecture", SHARED_KIB)
def test_kernels_of_a_peer_link_keep_its_order(architecture, opcodes):
    """What a tile holds is stored, then a barrier, the arrival of the block, a fence for all devices, the flag; and of
    a wait the spin, a fence, a barrier, and then the first load of the slot. 16 bytes at a time, never through .nc."""
    kernels = opcodes("peer", architecture)
    assert len(kernels) == 21
    for name, code in kernels.items():
        assert not [each for each in code if re.search(r"CONSTANT|BPT|^LDL|^STL|RED\.|ATOM\w*\.\S*SYS", each)], name
        posts = [at for at, each in enumerate(code) if each == POST]
        assert posts, name  # a flag, a credit, a claim, or a report
        for at in posts:
            before = [each for each in code[:at] if each in (POST, FENCE) or each.startswith(("STG", "BAR"))]
            assert before[-1] == FENCE, (name, before)
        if "add_put" in name:
            stores = [at for at, each in enumerate(code) if each.startswith("STG")]
            assert {code[at] for at in stores} == {"STG.E.128", POST} and len(posts) == 1, name
            barrier = max(at for at, each in enumerate(code) if each == BARRIER)
            arrival = code.index("ATOMG.E.ADD.STRONG.GPU")
            assert stores[-2] < barrier < code.index("MEMBAR.ALL.GPU") < arrival < code.index(FENCE) < posts[0], name
            assert DROP_L1 in code[arrival : posts[0]], name  # it acquires the other blocks' stores
        if "wait_" in name:
            first_load = min(at for at, each in enumerate(code) if data_access(each))
            spin = code.index(SPIN)
            fence = code.index(DROP_L1, spin)
            assert FENCE in code[spin:fence] and BARRIER in code[fence:first_load], name
            # Only the answer's word tells the block to go on, so no other load of the slot can have come earlier.
            assert not [each for each in code[:spin] if data_access(each)], name


def test_products_of_a_peer_link_run_on_tensor_cores_but_for_fp32(opcodes):
    for name, code in opcodes("peer", "sm_80").items():
        if "matmul" not in name:
            continue
        products = sum(each.startswith("HMMA.16816.F32") for each in code)
        assert products == (0 if "float" in name else 4 * 2 * 8), (name, products)
        assert {each[-4:] for each in code if each.startswith("LDGSTS")} == {".128"}, name
        moves = {each for each in code if each.startswith("LDSM")}
        expected = {"LDSM.16.M88.4"} if "true" in name else {"LDSM.16.M88.4", "LDSM.16.MT88.4"}
        assert moves == (set() if "float" in name else expected), (name, moves)


@pytest.fixture(scope="session")
def extension(log):
    """tpkernels._cuda of the compiled objects."""
    del log
    pybind11 = pytest.importorskip("pybind11", reason="pybind11 is not installed")
    path = FOLDER / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    objects = [FOLDER / f"{name}.o" for name in SOURCES]
    bindings = [CSRC / "bindings" / name for name in ("cuda.cpp", "cuda_fused.cpp", "cuda_peer.cpp")]
    inputs = [*objects, *bindings, *CSRC.glob("bindings/*.h")]
    if not path.exists() or any(each.stat().st_mtime > path.stat().st_mtime for each in inputs):
        flags = ["-std=c++20", "-O0", "-Xcompiler=-fPIC,-fvisibility=hidden", *INCLUDES]
        flags += [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
        run([find_nvcc(), *flags, "-shared", *map(str, [*bindings, *objects]), "-cudart=static", "-o", str(path)])
    spec = importlib.util.spec_from_file_location("_cuda", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_extension_imports_without_a_driver_and_says_what_is_missing(extension):
    try:
        count = extension.device_count()
    except RuntimeError as error:
        assert "there is no NVIDIA driver here, or it is older than the kernels need" in str(error)
        with pytest.raises(RuntimeError, match="no NVIDIA driver"):
            extension.norm_forward(
                **{"dtype": 1, "rms": True, "rows": 4, "dim": 32, "eps": 1e-5, "device": 0, "stream": 0},
                **dict.fromkeys(("x", "total", "out"), (4096, 32)),
                **{"delta": (0, 0), "weight": 4096, "bias": 0, "mean": 0, "rstd": 4096},
            )
    else:
        with pytest.raises((ValueError, RuntimeError), match=rf"no device {count} among {count}|no CUDA device"):
            extension.capability(count)


def test_the_extension_needs_neither_torch_nor_a_cuda_library(extension):
    if sys.platform != "linux" or shutil.which("ldd") is None:
        pytest.skip("ldd tells what a library needs, on Linux")
    needed = run(["ldd", extension.__file__])
    assert not re.search(r"libtorch|libc10|libcuda|libcudart", needed), needed
