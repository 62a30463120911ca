"""One message at a time from one process to another: how long until the receiver has it, by size and medium.

The receiver already waits when the sender starts the clock; both stamp on the host's common clock, in Python, so the
links' own calls count. Modes: fused (the sum that makes the message posts its rows as it goes, `put_sum`; the clock
starts with the last post), zero-copy (the sender computed into the slot, the receiver reads it there), copy (put copies
in), copy-out (and take copies out), woken (zero-copy to a receiver that sleeps instead of spinning); gloo and nccl are
the `dist` link. `peer` (copy) and nccl go between two GPUs, stamped once the receiver's stream has it; without
GPUs a row says why each was not run. Every message's content is checked before the clock runs.

Run by `terapipe bench links`; it starts its two workers itself, one thread each.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tpkernels.links import Link

SIZES = tuple(1024 * 4**power for power in range(9))  # 1 KiB to 64 MiB
COLUMNS = 64
PAUSE_S = {"woken": 100e-6}  # after the receiver's answer: time for it to wait again, and here to fall asleep
LEAST_PAUSE_S = 5e-6

Row = dict[str, Any]


@dataclass(frozen=True)
class Mode:
    """One way to send."""

    kind: str
    mode: str

    @property
    def reserves(self) -> bool:
        return self.mode in ("zero-copy", "woken")


MODES = (
    Mode("shm", "fused"),
    Mode("shm", "zero-copy"),
    Mode("shm", "copy"),
    Mode("shm", "copy-out"),
    Mode("shm", "woken"),
    Mode("dist", "gloo"),
)


def _on_gpus() -> list[tuple[Mode, str]]:
    """Modes between two GPUs, and why one cannot run here."""
    import torch
    import torch.distributed as dist

    from tpkernels.links import peer_missing

    count = torch.cuda.device_count()
    no_nccl = "this torch has no NCCL" if not dist.is_nccl_available() else ""
    if not count:
        no_nccl = "there is no CUDA device"
    elif count < 2:
        no_nccl = no_nccl or "one GPU is visible, and NCCL wants one a rank"
    return [(Mode("peer", "copy"), peer_missing()), (Mode("dist", "nccl"), no_nccl)]


def run() -> list[Row]:
    """Rows with percentiles in microseconds, one way. Empty on the receiver."""
    if "RANK" in os.environ:
        return _work()
    from terapipe.engine import launch

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        status = launch.run_local(2, ["bench", "links", "--json", str(file)], threads=1)
        if status != 0:
            raise RuntimeError(f"a worker of the benchmark ended with status {status}; its message is above.")
        rows: list[Row] = json.loads(file.read_text())["rows"]
        return [*rows, *({"kind": mode.kind, "mode": f"{mode.mode} not run: {why}"} for mode, why in _on_gpus() if why)]


def plot(rows: list[Row], path: Path) -> None:
    """Median time over message size, a line for each mode."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for mode in MODES:
        own = [row for row in rows if (row["kind"], row["mode"]) == (mode.kind, mode.mode)]
        axes.loglog(
            [row["bytes"] for row in own], [row["p50_us"] for row in own], "o-", label=f"{mode.kind} {mode.mode}"
        )
    axes.set_xlabel("bytes")
    axes.set_ylabel("microseconds, one way, median")
    axes.legend()
    figure.savefig(path, dpi=150)


def _work() -> list[Row]:
    import torch
    import torch.distributed as dist

    from terapipe.engine import launch

    launch.initialize()
    groups = [dist.new_group() for _ in range(2)]
    modes = [*MODES, *(mode for mode, why in _on_gpus() if not why)]
    if Mode("dist", "nccl") in modes:
        torch.cuda.set_device(dist.get_rank())
        groups.append(dist.new_group(backend="nccl"))
    rows = [row for size in SIZES for mode in modes for row in _measure(mode, size, groups)]
    launch.shutdown()
    return rows


def _measure(mode: Mode, size: int, groups: list[Any]) -> list[Row]:
    import torch
    import torch.distributed as dist

    from tpkernels.links import LinkSpec, open_link

    count = max(30, min(2000, 2**30 // size))
    shape = (1, size // 4 // COLUMNS, COLUMNS)
    keys = [(1, 0, index) for index in range(count)]
    cpu, slots = torch.device("cpu"), dict.fromkeys(keys, 0)
    device = torch.device("cuda", dist.get_rank()) if mode.kind == "peer" or mode.mode == "nccl" else cpu
    spec = LinkSpec(0, 1, "F", torch.float32, device, 1, slots, shape, mode.mode != "copy-out")
    answers = LinkSpec(1, 0, "B", torch.float32, cpu, 1, slots, (1, 1, 1))
    options = {"spin_s": 0.0 if mode.mode == "woken" else 1.0} if mode.kind == "shm" else {}
    link = open_link(mode.kind, spec, group=groups[-1 if mode.mode == "nccl" else 0], **options)
    back = open_link("shm", answers, group=groups[1], spin_s=1.0)
    for end in (link, back):
        end.expect([(key, shape if end is link else (1, 1, 1)) for key in keys])
    stamps = torch.zeros(count, dtype=torch.float64)
    sender = dist.get_rank() == 0
    (_send if sender else _receive)(mode, link, back, keys, stamps)
    both = [torch.zeros_like(stamps) for _ in range(2)]
    dist.all_gather(both, stamps)
    link.finish()
    if mode.kind != "dist":  # the group of a "dist" link is used again
        link.close()
    back.close()
    if not sender:
        return []
    seconds = sorted((both[1] - both[0])[count // 10 :].tolist())  # the first tenth is warm-up
    p50, p99, p999 = (seconds[min(len(seconds) - 1, int(share * len(seconds)))] * 1e6 for share in (0.5, 0.99, 0.999))
    return [
        {
            "kind": mode.kind,
            "mode": mode.mode,
            "bytes": size,
            "p50_us": round(p50, 2),
            "p99_us": round(p99, 2),
            "p999_us": round(p999, 2),
            "gb_per_s": round(size / statistics.median(seconds) / 1e9, 3),
            "messages": len(seconds),
        }
    ]


def _send(mode: Mode, link: Link, back: Link, keys: list[tuple[int, int, int]], stamps: torch.Tensor) -> None:
    import torch

    from tpkernels.links import ShmLink

    x, pause = torch.randn(link.spec.slot_shape, device=link.spec.device), PAUSE_S.get(mode.mode, LEAST_PAUSE_S)
    nothing = torch.zeros_like(x)
    for index, key in enumerate(keys):
        x[0, 0, 0], x[0, -1, -1] = index, -index
        if mode.reserves:
            slot = link.reserve(key)
            slot.copy_(x)  # stands for the computation
        until = time.perf_counter() + pause
        while (began := time.perf_counter()) < until:
            pass
        if isinstance(link, ShmLink) and mode.mode == "fused":
            link.put_sum(key, x, nothing)
            began = link.posted_at
        else:
            link.put(key, slot if mode.reserves else x)
        stamps[index] = began
        back.take(key)
        back.release(key)


def _receive(mode: Mode, link: Link, back: Link, keys: list[tuple[int, int, int]], stamps: torch.Tensor) -> None:
    import torch

    answer = torch.zeros(1, 1, 1)
    for index, key in enumerate(keys):
        x = link.take(key)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        stamps[index] = time.perf_counter()
        if float(x[0, 0, 0]) != index or float(x[0, -1, -1]) != -index:
            raise RuntimeError(f"{mode}: message {index} arrived as {float(x[0, 0, 0])}, so timing it is pointless")
        link.release(key)
        back.put(key, answer)
