"""The ops at a stage's border over shared memory, fused with the hand-off and apart, by size: where fusion helps and
where it does not.

hand-off: from just before the producer adds the residual to when the consumer has the norm, one way. Fused: put_sum and
take_norm, tile by tile. Apart: torch.add into the slot, put, take, norm. The two take turns; the consumer spins. Every
norm is checked against the other way's before the clock counts. down in 2 blocks: the product before it, cut into two
blocks of rows so that the first could be handed on early, against the whole product; what it costs more is to be
weighed against the hand-off's time.

`terapipe bench fused` starts two processes for it, one thread each.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tpkernels.links import Key, ShmLink

COLUMNS, ROWS = (256, 1024, 4096), (16, 64, 256, 1024)
MESSAGES, WARM_UP = 240, 40
EPS = 1e-5


@dataclass(frozen=True)
class HandOffRow:
    """Times in microseconds; speedup is the median apart over the fused one, bytes those of the slice."""

    kind: str
    mode: str
    rows: int
    columns: int
    threads: int
    bytes: int
    p50_us: float
    p99_us: float
    gb_per_s: float
    apart_p50_us: float
    speedup: float


def row_blocks() -> list[HandOffRow]:
    """The products of `COLUMNS` by four times as many, whole and in two blocks."""
    import torch

    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for columns, rows in [(columns, rows) for columns in COLUMNS[:2] for rows in ROWS[1:]]:
            weight = torch.randn(columns, 4 * columns).to(dtype)
            x, residual = torch.randn(rows, 4 * columns).to(dtype), torch.randn(rows, columns).to(dtype)
            out = torch.empty_like(residual)
            seconds: dict[int, list[float]] = {1: [], 2: []}
            for _ in range(30):
                for blocks, times in seconds.items():
                    size = rows // blocks
                    began = time.perf_counter()
                    for first in range(0, rows, size):
                        part = slice(first, first + size)
                        torch.addmm(residual[part], x[part], weight.t(), out=out[part])
                    times.append(time.perf_counter() - began)
            found.append(_row(f"down in 2 blocks {_name(dtype)}", "gemm", rows, columns, dtype, seconds[2], seconds[1]))
    return found


def start() -> list[dict[str, Any]]:
    """All rows of the hand-off; none where links through shared memory cannot be had."""
    from terapipe.engine import launch
    from tpkernels.links import shm_missing

    if shm_missing():
        return []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        status = launch.run_local(2, ["bench", "fused", "--json", str(file)], threads=1)
        if status != 0:
            raise RuntimeError(f"a worker of the benchmark ended with status {status}; its message is above.")
        rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
        return rows


def work() -> list[HandOffRow]:
    """One of the two processes; rows on the first."""
    import torch
    import torch.distributed as dist

    from terapipe.engine import launch

    launch.initialize()
    groups = [dist.new_group() for _ in range(2)]
    rows = [
        row
        for dtype in (torch.float32, torch.bfloat16)
        for columns in COLUMNS
        for count in ROWS
        for row in _measure(count, columns, dtype, groups)
    ]
    launch.shutdown()
    return rows


def _measure(rows: int, columns: int, dtype: torch.dtype, groups: list[Any]) -> list[HandOffRow]:
    import torch
    import torch.distributed as dist

    from tpkernels.links import LinkSpec, ShmLink

    keys = [(1, 0, index) for index in range(MESSAGES)]
    shape, cpu, slots = (1, rows, columns), torch.device("cpu"), dict.fromkeys(keys, 0)
    specs = LinkSpec(0, 1, "F", dtype, cpu, 1, slots, shape), LinkSpec(1, 0, "B", dtype, cpu, 1, slots, (1, 1, 1))
    link, back = (ShmLink.open(spec, group, spin_s=1.0) for spec, group in zip(specs, groups, strict=True))
    link.expect([(key, shape) for key in keys])
    back.expect([(key, (1, 1, 1)) for key in keys])
    stamps = torch.zeros(MESSAGES, dtype=torch.float64)
    sender = dist.get_rank() == 0
    (_send if sender else _receive)(link, back, keys, stamps)
    both = [torch.zeros_like(stamps) for _ in range(2)]
    dist.all_gather(both, stamps)
    link.close()
    back.close()
    if not sender:
        return []
    seconds = (both[1] - both[0])[WARM_UP:]
    fused, apart = (seconds[first::2].tolist() for first in (0, 1))
    return [_row(f"hand-off rms_norm {_name(dtype)}", "shm", rows, columns, dtype, fused, apart)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _row(
    kind: str, mode: str, rows: int, columns: int, dtype: torch.dtype, fused: list[float], apart: list[float]
) -> HandOffRow:
    fused, apart = sorted(fused), sorted(apart)
    p50, size = fused[len(fused) // 2], rows * columns * dtype.itemsize
    return HandOffRow(
        kind=kind,
        mode=mode,
        rows=rows,
        columns=columns,
        threads=1,
        bytes=size,
        p50_us=p50 * 1e6,
        p99_us=fused[int(len(fused) * 0.99)] * 1e6,
        gb_per_s=size / p50 / 1e9,
        apart_p50_us=apart[len(apart) // 2] * 1e6,
        speedup=apart[len(apart) // 2] / p50,
    )


def _send(link: ShmLink, back: ShmLink, keys: list[Key], stamps: torch.Tensor) -> None:
    import torch

    x, residual = (torch.randn(link.spec.slot_shape).to(link.spec.dtype) for _ in range(2))
    for index, key in enumerate(keys):
        until = time.perf_counter() + 2e-5  # the receiver waits again by then
        while (began := time.perf_counter()) < until:
            pass
        if index % 2 == 0:
            link.put_sum(key, x, residual)
        else:
            slot = link.reserve(key)
            torch.add(x, residual, out=slot)
            link.put(key, slot)
        stamps[index] = began
        back.take(key)
        back.release(key)


def _receive(link: ShmLink, back: ShmLink, keys: list[Key], stamps: torch.Tensor) -> None:
    import torch

    from tpkernels import fused_rows

    dtype, columns = link.spec.dtype, link.spec.slot_shape[-1]
    weight, answer = torch.ones(columns, dtype=dtype), torch.zeros(1, 1, 1, dtype=dtype)
    before: torch.Tensor | None = None
    for index, key in enumerate(keys):
        if index % 2 == 0:
            out = link.take_norm(key, weight, eps=EPS, rms=True).out
        else:
            x = link.take(key)
            out = fused_rows.norm_forward(fused_rows.as_rows(x), weight, None, eps=EPS, rms=True).out
        stamps[index] = time.perf_counter()
        out = out.view(link.spec.slot_shape)
        if before is not None and not torch.equal(out, before):
            raise RuntimeError(f"{link.spec}: fused and apart differ, so timing them is pointless")
        before = out
        link.release(key)
        back.put(key, answer)
