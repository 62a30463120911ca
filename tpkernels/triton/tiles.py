"""Tile sizes, warps and stages of every Triton kernel: one table, each row with its reason. No triton import.

A row serves one (architecture, head_dim up to, dtype size, kind). Kinds: `forward` (owns query rows, walks keys),
`keys` (backward, owns keys, walks query rows: dk, dv and the fast dq), `queries` (backward, owns query rows, walks
keys: the deterministic dq), `few queries` (the same where `queries` would leave multiprocessors idle: fewer rows but
the same keys, hence the same bits), `softcap forward` and `costly keys` (with a softcap, whose tanh takes registers,
or documents, whose bounds do; where there is no such row, the plain one). Rows and keys count rows of the score
matrix; a query row is (token, head).

The one trap: with deterministic=True `rows` of kind keys and `keys` of the other kinds decide where sums are cut, so
changing a number changes results in the last bits. `python -m tpkernels.triton.tune` prints a row for this table.
"""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Kind = Literal["forward", "softcap forward", "keys", "costly keys", "queries", "few queries"]
KINDS: tuple[Kind, ...] = ("forward", "softcap forward", "keys", "costly keys", "queries", "few queries")
_INSTEAD: dict[Kind, Kind] = {  # where a kind has no row
    "softcap forward": "forward",
    "costly keys": "keys",
    "few queries": "queries",
}
_ENDS = (64, 128, 256)  # the head_dims that rows end at
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Architecture:
    """What a tile must fit into. shared_bytes: the most shared memory that one program may have."""

    name: str
    capabilities: tuple[int, ...]  # compute capabilities (90 is 9.0); the first is what tests compile for
    shared_bytes: int

    @property
    def shared_bytes_of_all(self) -> int:
        """Of all programs on a multiprocessor; each takes 1 KiB more than it asks for."""
        return self.shared_bytes + 1024


ARCHITECTURES = {
    row.name: row
    for row in (
        Architecture("sm80", (80, 87), 163 * 1024),
        Architecture("sm89", (89, 86), 99 * 1024),
        Architecture("sm90", (90,), 227 * 1024),
        Architecture("sm100", (100, 103, 110), 227 * 1024),
        Architecture("sm120", (120, 121), 99 * 1024),
    )
}
INTERPRETER = "interpreter"


class Tile(NamedTuple):
    """One row of the table. rows, keys: powers of two, 16 or more; spill_bytes: local memory a thread, known of;
    registers: the most a thread may take (0: all there are); residents: programs that one multiprocessor runs at once.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    reason: str
    spill_bytes: int = 0
    registers: int = 0
    residents: int = 1


_SMALL_SHARED = ("sm89", "sm120")  # 99 KiB

_EVERY = tuple(ARCHITECTURES)

# (architectures, largest head_dim, bytes of the dtype, kind) -> Tile; the first row that fits serves. Reasons name what
# the compiler said (registers of 255, KiB of shared memory, spills); no row has been timed on a GPU yet.
_TABLE: tuple[tuple[tuple[str, ...], int, int, Kind, Tile], ...] = (
    ((INTERPRETER,), 256, 4, "forward", Tile(32, 32, 4, 1, "a tile costs the same for any size: small, for edges")),
    ((INTERPRETER,), 256, 4, "keys", Tile(32, 32, 4, 1, "as forward")),
    ((INTERPRETER,), 256, 4, "queries", Tile(32, 32, 4, 1, "as forward")),
    ((INTERPRETER,), 256, 4, "few queries", Tile(16, 32, 4, 1, "as forward")),
    # 16 bits, forward
    (("sm80",), 64, 2, "forward", Tile(128, 64, 8, 3, "flash-attn 2's tile; four warps spill 16 bytes")),
    (("sm80",), 128, 2, "forward", Tile(128, 64, 8, 3, "flash-attn 2's tile; four warps spill 400 bytes")),
    (("sm80",), 256, 2, "forward", Tile(64, 64, 8, 2, "128 rows spill 400 bytes; with documents 3.7 spills 8", 8)),
    (_SMALL_SHARED, 64, 2, "forward", Tile(128, 64, 8, 3, "as sm80, 48 KiB; four warps spill 8 bytes")),
    (_SMALL_SHARED, 128, 2, "forward", Tile(128, 32, 8, 2, "48 KiB, 196 registers")),
    (_SMALL_SHARED, 256, 2, "forward", Tile(64, 32, 8, 2, "68 KiB; four warps spill 144 bytes")),
    (("sm90",), 64, 2, "forward", Tile(128, 64, 8, 3, "64 KiB; with 128 keys there is room for one", 0, 128, 2)),
    # 128 rows in 128 registers spill 80 bytes with a left bound (3.6), and arithmetic binds here, not loads.
    (("sm90",), 64, 2, "softcap forward", Tile(64, 64, 4, 3, "one warpgroup, 56 KiB, 161 registers", 0, 168, 3)),
    (("sm90",), 128, 2, "forward", Tile(128, 128, 8, 3, "two warpgroups of 64 rows, 224 KiB, 243 registers")),
    (("sm90",), 256, 2, "forward", Tile(128, 64, 8, 2, "two warpgroups of 64 rows, 192 KiB")),
    (("sm90",), 256, 2, "softcap forward", Tile(128, 32, 8, 2, "64 keys spill 56 bytes with a window, 64 rows 304")),
    (("sm100",), 64, 2, "forward", Tile(128, 128, 8, 3, "as sm90")),
    (("sm100",), 128, 2, "forward", Tile(128, 64, 8, 3, "128 keys spill 184 bytes")),
    (("sm100",), 256, 2, "forward", Tile(64, 64, 8, 2, "128 rows spill 144 bytes")),
    # 16 bits, owner of keys: dk, dv and what dq takes
    (("sm80", *_SMALL_SHARED), 64, 2, "keys", Tile(32, 64, 8, 2, "32 KiB, 171 registers; 64 rows or 128 keys spill")),
    (("sm80", *_SMALL_SHARED), 128, 2, "keys", Tile(32, 64, 8, 2, "56 KiB, 178 registers; 64 rows or 128 keys spill")),
    (("sm80",), 256, 2, "keys", Tile(32, 32, 8, 2, "80 KiB; 64 keys spill 240 bytes")),
    # Left alone, the deterministic one with head_dim 192 and values of 128 stops at 128 registers and spills 8 bytes.
    (_SMALL_SHARED, 256, 2, "keys", Tile(32, 32, 8, 1, "80 KiB", 0, 224)),
    (("sm90",), 64, 2, "keys", Tile(64, 128, 8, 2, "flash-attn 3's shape, each warpgroup owns 64 keys")),
    (("sm90",), 128, 2, "keys", Tile(64, 128, 8, 2, "flash-attn 3's tile, each warpgroup owns 64 keys")),
    (("sm90",), 128, 2, "costly keys", Tile(32, 128, 8, 2, "250 registers; 64 rows spill 128 to 208 bytes")),
    (("sm90",), 256, 2, "keys", Tile(32, 64, 8, 2, "64 keys, or there is no wgmma; dk and dv fill the registers", 240)),
    # Left alone, the one with documents stops at 80 registers and spills 24 bytes.
    (("sm100",), 64, 2, "keys", Tile(32, 64, 8, 2, "64 rows spill 24 bytes, 128 keys with a window 184", 0, 128)),
    # Left alone, the deterministic ones of head_dim 128 stop at 128 registers on Triton 3.6 and spill 16 to 48 bytes.
    (("sm100",), 128, 2, "keys", Tile(64, 64, 8, 3, "128 keys need 576 of 512 columns of tensor memory", 0, 224)),
    (("sm100",), 256, 2, "keys", Tile(64, 32, 8, 1, "64 keys need 608 of 512 columns of tensor memory")),
    # 16 bits, owner of query rows: the deterministic dq
    (("sm80",), 64, 2, "queries", Tile(128, 64, 8, 2, "as forward")),
    (("sm80",), 128, 2, "queries", Tile(128, 32, 8, 3, "96 KiB; 64 keys spill 8 bytes")),
    (("sm80",), 256, 2, "queries", Tile(64, 32, 8, 2, "100 KiB")),
    (_SMALL_SHARED, 64, 2, "queries", Tile(64, 64, 8, 2, "as forward")),
    (_SMALL_SHARED, 128, 2, "queries", Tile(64, 32, 8, 2, "52 KiB, 168 registers")),
    # Left alone, sm_120 stops at 128 registers with a softcap and spills 16 bytes; so does sm_89, on 3.8, if given 224.
    (("sm89",), 256, 2, "queries", Tile(32, 32, 8, 1, "64 KiB; on 3.8, 192 with window and softcap spills", 8)),
    (("sm120",), 256, 2, "queries", Tile(32, 32, 8, 1, "64 KiB", 0, 224)),
    (("sm90",), 64, 2, "queries", Tile(128, 64, 8, 3, "two warpgroups of 64 rows, 80 KiB")),
    (("sm90",), 128, 2, "queries", Tile(128, 64, 8, 2, "two warpgroups of 64 rows, 128 KiB, 222 registers")),
    (("sm90",), 256, 2, "queries", Tile(128, 32, 8, 2, "two warpgroups of 64 rows, 192 KiB")),
    (("sm100",), 64, 2, "queries", Tile(128, 64, 8, 2, "as sm90")),
    (("sm100",), 128, 2, "queries", Tile(128, 64, 8, 2, "as sm90; 145 KiB", 0, 224)),
    (("sm100",), 256, 2, "queries", Tile(64, 32, 8, 2, "145 KiB, 155 registers")),
    (("sm90",), 64, 2, "few queries", Tile(64, 64, 4, 3, "one warpgroup, half of the rows of queries", 0, 0, 2)),
    (("sm90",), 128, 2, "few queries", Tile(64, 64, 4, 2, "one warpgroup, 96 KiB, 236 registers", 0, 0, 2)),
    # fp32: products in ieee on the fp32 units. With one stage the compiler holds operands in registers, with two they
    # stay in shared memory: a third of the registers for as many instructions (not so the forward).
    (_EVERY, 64, 4, "forward", Tile(64, 32, 8, 1, "118 registers; larger tiles spill")),
    (_EVERY, 128, 4, "forward", Tile(32, 32, 8, 1, "203 registers; larger tiles or two stages spill")),
    # Left alone, sm_120 stops at 80 registers on 3.7 and spills 16 bytes, sm_100 at 128 on 3.9 and spills 8.
    (("sm100", "sm120"), 256, 4, "forward", Tile(16, 32, 8, 1, "143 registers", 0, 160)),
    (_EVERY, 256, 4, "forward", Tile(16, 32, 8, 1, "80 registers")),
    (("sm100",), 64, 4, "keys", Tile(16, 32, 8, 2, "74 registers; under a limit of 128 3.7 spills 16 bytes")),
    (_EVERY, 64, 4, "keys", Tile(16, 32, 8, 2, "128 registers; 32 rows, one stage: up to 254, and spills", 0, 128)),
    (("sm80",), 128, 4, "keys", Tile(16, 32, 8, 2, "left alone it stops at 80 registers and spills 8 bytes", 0, 128)),
    (_EVERY, 128, 4, "keys", Tile(16, 32, 8, 2, "127 registers, an eighth fewer instructions than with 16 keys")),
    (_EVERY, 256, 4, "keys", Tile(16, 16, 8, 2, "128 registers; one stage spills 488 bytes")),
    (_EVERY, 64, 4, "queries", Tile(32, 32, 8, 2, "76 registers")),
    (_EVERY, 128, 4, "queries", Tile(32, 16, 8, 2, "126 registers; with 32 keys 3.8 spills 272 bytes", 0, 128)),
    (_EVERY, 256, 4, "queries", Tile(16, 16, 8, 2, "79 registers; one stage spills 248 bytes")),
)
# (Triton's version, architecture, largest head_dim, bytes, kind) -> what that version alone has in place of the row.
_TABLE_OF_VERSION: dict[tuple[str, str, int, int, Kind], Tile] = {
    # 3.9 puts a fence before each wgmma and holds more addresses through the loops; 64 rows spill 136 bytes, in them.
    ("3.9", "sm90", 128, 2, "keys"): Tile(32, 128, 8, 2, "243 registers, 250 at head_dim 72"),
    ("3.9", "sm90", 128, 2, "costly keys"): Tile(32, 128, 8, 2, "head_dim 72 with window and softcap spills", 8),
    ("3.9", "sm90", 256, 2, "keys"): Tile(32, 64, 8, 2, "the same; it spills 240 bytes elsewhere", 328),
    ("3.9", "sm100", 64, 2, "queries"): Tile(128, 64, 8, 2, "the same, with room; documents spilled 8 bytes", 0, 224),
}
SMALL_ROWS = 32  # of the kernels that only move rows: combine_splits, round_rows
SINK_TOKENS = 1024  # a step of sink_gradient, which has one program a head


@functools.cache
def triton_version() -> str:
    """Major and minor version of the Triton that is installed, without importing it; empty when none is."""
    for name in ("triton", "pytorch-triton", "triton-windows"):
        try:
            return ".".join(importlib.metadata.version(name).split(".")[:2])
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def find(architecture: str, head_dim: int, dtype_bytes: int, kind: Kind, *, version: str | None = None) -> Tile:
    """The tile of a kernel; ValueError when no row serves. version: of Triton, the installed one by default."""
    if version is None:
        version = triton_version()
    interpreted = architecture == INTERPRETER
    end = MAX_HEAD_DIM if interpreted else next((end for end in _ENDS if head_dim <= end), 0)
    for names, largest, size, row_kind, tile in _TABLE:
        if architecture in names and largest == end and kind == row_kind and (interpreted or dtype_bytes == size):
            return _TABLE_OF_VERSION.get((version, architecture, largest, size, kind), tile)
    if kind in _INSTEAD:
        return find(architecture, head_dim, dtype_bytes, _INSTEAD[kind], version=version)
    raise ValueError(f"no {kind} tile for {architecture}, head_dim {head_dim}, dtypes of {dtype_bytes} bytes")


@functools.cache
def architecture(device: torch.device) -> str:
    """Name of the table's architecture of a device; ValueError for a GPU that no row serves. CPU: the interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    capability = 10 * major + minor
    for row in ARCHITECTURES.values():
        if capability in row.capabilities:
            return row.name
    raise ValueError(f"no tile sizes for compute capability {major}.{minor}; there are some for " + _capabilities())


def _capabilities() -> str:
    return ", ".join(f"{c // 10}.{c % 10}" for row in ARCHITECTURES.values() for c in row.capabilities)


def padded(head_dim: int) -> int:
    """The power of two that a head dimension is padded to inside the kernels; 16 is the least a product takes."""
    return max(16, 1 << (head_dim - 1).bit_length())
