"""Compile launches for any GPU, without one, and read off what the compiler made of them.

A Launch (launch.py) planned on "meta" tensors is compiled for a target as the just-in-time path would compile it there:
the same types, the same 16-byte alignment of pointers, the same constants. `python -m tpkernels.triton.ahead_of_time`
sweeps the whole table of tiles and prints one line a kernel; tests assert on a selection.

The one trap: the process must not have TRITON_INTERPRET set; interpreted functions cannot be compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from tpkernels.backends import RawSettings
from tpkernels.mask import RawMask
from tpkernels.triton import tiles
from tpkernels.triton.launch import Launch
from tpkernels.triton.plan_backward import plan_backward
from tpkernels.triton.plan_forward import plan_forward
from tpkernels.triton.problem import Lengths
from tpkernels.triton.tiles import Tile

_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32"}
KINDS = ("forward", "split", "backward", "deterministic", "few")
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Subject:
    """What to compile: the kernels of one call. kind: forward, split, backward (fast), deterministic (backward)
    or few (the same for a call of few query tiles)."""

    kind: str
    dtype: str
    head_dim: int
    value_head_dim: int | None = None
    group: int = 8
    capability: int = 90
    features: tuple[str, ...] = ()  # out of: window, documents, softcap, sinks, varlen

    def __str__(self) -> str:
        dim = f"{self.head_dim}" + ("" if self.value_head_dim is None else f":{self.value_head_dim}")
        return "-".join([f"sm{self.capability}", self.kind, self.dtype, f"d{dim}", f"g{self.group}", *self.features])


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled. stack_bytes: local memory a thread (spills); narrow: global accesses under 4 bytes;
    wide: of 16 bytes; tensor_memory: columns of
    it on sm_100, out of 512; products: the kinds of tensor-core instruction."""

    subject: str
    kernel: str
    tile: str
    warps: int
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_memory: int
    seconds: float
    narrow: int
    wide: int
    products: tuple[str, ...]
    tf32: bool


def _architecture(capability: int) -> tiles.Architecture:
    return next(row for row in tiles.ARCHITECTURES.values() if capability in row.capabilities)


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launches_of(subject: Subject, **tile: Tile) -> list[Launch]:
    """The launches of a call with `subject`'s kernels: 2 sequences, 4096 keys, 1024 tokens (split, few: 16).

    tile: tile=, keys_tile= or queries_tile= instead of the table's, as plan_forward and plan_backward take them.
    """
    dtype = _DTYPES[subject.dtype]
    dim, value_dim = subject.head_dim, subject.value_head_dim or subject.head_dim
    batch, keys, tokens, kv_heads = 2, 4096, 16 if subject.kind in ("split", "few") else 1024, 2
    features = set(subject.features)
    lengths = None
    if "varlen" in features:
        batch = 1
        cu = _meta(3, dtype=torch.int32)
        lengths = Lengths(cu, cu, tokens // 2, keys // 2)
    heads = kv_heads * subject.group
    q, dout = _meta(batch, tokens, heads, dim, dtype=dtype), _meta(batch, tokens, heads, value_dim, dtype=dtype)
    k, v = _meta(batch, keys, kv_heads, dim, dtype=dtype), _meta(batch, keys, kv_heads, value_dim, dtype=dtype)
    lse = _meta(batch, heads, tokens, dtype=torch.float32)
    documents = _meta(batch, tokens, dtype=torch.int32) if "documents" in features else None
    sinks = _meta(heads, dtype=torch.float32) if "sinks" in features else None
    name = _architecture(subject.capability).name
    settings = RawSettings(
        start=keys - tokens,
        mask=RawMask(True, 512 if "window" in features else -1, -1, documents),
        scale=0.1,
        softcap=30.0 if "softcap" in features else 0.0,
        sinks=sinks,
        deterministic=subject.kind in ("deterministic", "few"),
    )
    options: dict[str, Any] = {
        "settings": settings,
        "architecture": name,
        "processors": 132 if subject.kind in ("split", "few") else 1,
        "lengths": lengths,
        **tile,
    }
    if subject.kind in ("forward", "split"):
        return plan_forward(q, k, v, out=dout, lse=lse, **options)
    return plan_backward(
        dout,
        q,
        k,
        v,
        dout,
        lse,
        dq=torch.empty_like(q),
        dk=torch.empty_like(k, dtype=torch.float32),
        dv=torch.empty_like(v, dtype=torch.float32),
        dsinks=None if sinks is None else torch.empty_like(sinks),
        **options,
    )


def compile_launch(item: Launch, capability: int) -> Any:
    """triton's compiled kernel of a launch for a GPU of that compute capability."""
    names = item.kernel.arg_names
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        value = item.constants[name] if name in item.constants else item.arguments[name]
        if name in item.constants or value is None:
            signature[name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            if name not in item.kernel.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            integer = "i32" if -(2**31) <= value < 2**31 else "i64"
            signature[name] = "fp32" if isinstance(value, float) else integer
    source = triton.compiler.ASTSource(fn=item.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": item.warps, "num_stages": item.stages, "enable_fp_fusion": True, **item.limits}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def facts(item: Launch, subject: Subject) -> Compiled:
    """Compile and read the PTX and the resource usage."""
    began = time.perf_counter()
    compiled = compile_launch(item, subject.capability)
    seconds = time.perf_counter() - began
    ptx = compiled.asm["ptx"]
    usage = _resource_usage(compiled.asm["cubin"])
    narrow = re.findall(r"\b(?:ld|st)\.(?:relaxed\.\w+\.)?global(?:\.L\w+::\w+)*\.[busf](?:8|16)\b", ptx)
    wide = re.findall(
        r"\b(?:ld|st)\.global\S*\.v4\.[busf]32|\.v2\.[busf]64|\.v8\.[busf]32|cp\.async\.cg\S*.*, (?:0x10|16)", ptx
    )
    found = re.findall(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)\b", ptx)
    shape = [str(item.constants.get(name, "-")) for name in ("BLOCK_M", "BLOCK_N")]
    return Compiled(
        str(subject),
        item.kernel.__name__,
        f"{'x'.join(shape)} warps {item.warps} stages {item.stages}",
        item.warps,
        subject.capability,
        usage["REG"],
        usage["STACK"],
        int(compiled.metadata.shared),
        int(getattr(compiled.metadata, "tmem_size", 0) or 0),
        round(seconds, 2),
        len(narrow),
        len(wide),
        tuple(sorted(set(found))),
        re.search(r"\b(?:mma|wgmma|tcgen05)\S*tf32", ptx) is not None,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def table_subjects(capability: int) -> Iterator[Subject]:
    """Every row of the table and every kernel for one GPU: each head_dim the rows end at, 16 and 32 bits, each kind;
    then the features, packed sequences, odd and unequal head_dims."""
    for dtype in ("bf16", "fp32"):
        for head_dim in (64, 128, 256):
            for kind in KINDS:
                yield Subject(kind, dtype, head_dim, capability=capability)
    features: list[tuple[str, ...]] = [("window", "softcap", "sinks"), ("documents", "sinks"), ("varlen",)]
    for chosen in features:
        for kind in ("forward", "backward", "deterministic"):
            yield Subject(kind, "fp16", 64, group=3, capability=capability, features=chosen)
    for chosen in (("window", "softcap"), ("documents", "sinks")):
        for head_dim in (128, 256):
            for kind in ("forward", "backward", "deterministic"):
                yield Subject(kind, "bf16", head_dim, capability=capability, features=chosen)
    for head_dim, value_head_dim, chosen in ((72, None, ("window",)), (192, 128, ())):
        for kind in ("forward", "backward", "deterministic"):
            yield Subject(kind, "bf16", head_dim, value_head_dim, capability=capability, features=chosen)


def residents(row: Compiled) -> int:
    """Programs that fit one multiprocessor at once: 64 Ki registers, handed out in eights a thread, and its memory."""
    registers = -(-row.registers // 8) * 8
    memory = _architecture(row.capability).shared_bytes_of_all // (row.shared_bytes + 1024)
    return min(65536 // (registers * 32 * row.warps), memory)


def broken_rules(row: Compiled, tile: Tile | None) -> list[str]:
    """Which of the promises about compiled kernels a row breaks, in words. tile: the table's row, if there is one."""
    shared = _architecture(row.capability).shared_bytes
    spill_bytes = 0 if tile is None else tile.spill_bytes
    attention = row.kernel.startswith("attention_")
    wide_dtype = "fp32" in row.subject
    broken = []
    if row.stack_bytes > spill_bytes:
        broken.append(f"{row.stack_bytes} bytes of local memory, {spill_bytes} stated")
    if tile is not None and residents(row) < tile.residents:
        broken.append(f"{residents(row)} programs a multiprocessor, {tile.residents} stated")
    if row.shared_bytes > shared:
        broken.append(f"{row.shared_bytes} bytes of shared memory, {shared} there")
    if row.tensor_memory > 512:
        broken.append(f"{row.tensor_memory} columns of tensor memory, 512 there")
    if row.narrow or (not row.wide and row.kernel != "sink_gradient"):
        broken.append(f"{row.narrow} accesses of under 4 bytes, {row.wide} of 16")
    if row.tf32:
        broken.append("tf32 products")
    if attention and not wide_dtype and not row.products:
        broken.append("no tensor-core products")
    if attention and not wide_dtype and row.capability == 90 and "wgmma.mma_async" not in row.products:
        broken.append("no wgmma")
    return broken


def tile_of(item: Launch, subject: Subject) -> Tile | None:
    """The table's row behind a launch; None for the kernels that only move rows."""
    softcap = "softcap" in subject.features
    kinds: dict[str, tiles.Kind] = {
        "attention_forward": "softcap forward" if softcap else "forward",
        "attention_backward_keys": "costly keys" if softcap or "documents" in subject.features else "keys",
        "attention_backward_queries": "few queries" if subject.kind == "few" else "queries",
    }
    kind = kinds.get(item.kernel.__name__)
    if kind is None:
        return None
    name = _architecture(subject.capability).name
    head_dim = max(subject.head_dim, subject.value_head_dim or 0)
    return tiles.find(name, head_dim, _DTYPES[subject.dtype].itemsize, kind)


def inspect(subjects: Iterator[Subject] | list[Subject]) -> Iterator[dict[str, Any]]:
    """Compile all kernels of the subjects: the facts of each as a dict, with the list `broken`."""
    for subject in subjects:
        for item in launches_of(subject):
            row = facts(item, subject)
            yield {**dataclasses.asdict(row), "broken": broken_rules(row, tile_of(item, subject))}


def main(arguments: list[str] | None = None) -> int:
    """Sweep the table: one JSON line a kernel; 1 when a kernel breaks a promise."""
    capabilities = [row.capabilities[0] for row in tiles.ARCHITECTURES.values()]
    parser = argparse.ArgumentParser(description="Compile every kernel and tile for GPUs that need not be here.")
    parser.add_argument("--capability", type=int, nargs="+", default=capabilities, help="80, 89, 90, 100, 120")
    parser.add_argument("--subjects", help="JSON list of subjects instead of the whole table")
    options = parser.parse_args(arguments)
    if options.subjects:
        chosen = [Subject(**{**item, "features": tuple(item["features"])}) for item in json.loads(options.subjects)]
    else:
        chosen = [subject for capability in options.capability for subject in table_subjects(capability)]
    failed = 0
    for row in inspect(chosen):
        failed += bool(row["broken"])
        print(json.dumps(row), flush=True)
    print(f"{failed} kernels break a promise", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
