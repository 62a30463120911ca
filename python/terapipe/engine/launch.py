"""How ranks come to be: alone, under torchrun, or as local workers that this process starts (`--local-ranks N`).

`initialize` reads the environment that torchrun (or `run_local`) sets.  `run_local` holds the rendezvous store
itself, so no port can be taken in between and a failure stays readable whichever rank dies; when a worker fails it
gives the others a moment to say why they stop, then ends them.  Workers die with their parent (Linux:
PR_SET_PDEATHSIG), so no process is left behind however the parent goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import IO

from terapipe.world import ALONE, World, launched_world

__all__ = ["World", "initialize", "run_local", "run_workers", "shutdown"]

GRACE_SECONDS = 6.0  # after the first failure: time for the other ranks to report and leave by themselves
TERMINATE_SECONDS = 2.0  # and then, after a request to end, until they are killed


def initialize(*, device: str = "cpu", timeout: timedelta = timedelta(minutes=30)) -> World:
    """Join the process group named by torchrun's environment, or be a world of one without any.

    CPU ranks use gloo, CUDA ranks NCCL (and gloo for host tensors).  Raises RuntimeError with the variables when the
    rendezvous fails."""
    world = launched_world()
    if world is None:
        return ALONE
    import torch
    import torch.distributed as dist

    if device.startswith("cuda"):
        torch.cuda.set_device(world.local_rank)
    if not dist.is_initialized():
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo", timeout=timeout)
        except (RuntimeError, ValueError) as error:
            seen = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
            raise RuntimeError(f"joining the process group failed with {seen}: {error}") from error
    return world


def shutdown() -> None:
    """Leave the process group, if there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def run_local(ranks: int, argv: Sequence[str], *, threads: int = 1, module: str = "terapipe") -> int:
    """Run `python -m MODULE ARGV...` as `ranks` workers of `threads` threads each; returns 0, or the exit status of
    the first that failed.

    Rank 0 writes to this process's output; lines of the others come to stderr with their rank in front."""
    return run_workers([sys.executable, "-m", module, *argv], ranks, threads=threads)


def run_workers(command: Sequence[str], ranks: int, *, threads: int = 1) -> int:
    """`run_local` for any command."""
    with _store() as port, _signals_raise():
        workers: list[subprocess.Popen[bytes]] = []
        relays: list[threading.Thread] = []
        try:
            for rank in range(ranks):
                workers.append(_start(command, rank, ranks, threads, port))
                if rank > 0:
                    relays.append(_relay(workers[-1], rank))
            status = _watch(workers)
        finally:
            _stop(workers)
            for relay in relays:
                relay.join(timeout=2)
        return status


@contextlib.contextmanager
def _store() -> Iterator[int]:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        yield store.port
    finally:
        del store


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, so that the workers are stopped on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(command: Sequence[str], rank: int, ranks: int, threads: int, port: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the workers are clients of the store above
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }
    output = None if rank == 0 else subprocess.PIPE
    return subprocess.Popen(
        list(command),
        env=environment,
        stdout=output,
        stderr=None if rank == 0 else subprocess.STDOUT,
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    PR_SET_PDEATHSIG = 1
    assert _libc is not None
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _relay(worker: subprocess.Popen[bytes], rank: int) -> threading.Thread:
    def copy(stream: IO[bytes]) -> None:
        for line in stream:
            sys.stderr.write(f"[rank {rank}] {line.decode(errors='replace')}")

    assert worker.stdout is not None
    thread = threading.Thread(target=copy, args=(worker.stdout,), daemon=True)
    thread.start()
    return thread


def _watch(workers: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all; after the first failure wait only `GRACE_SECONDS` more."""
    deadline: float | None = None
    status = 0
    while None in (codes := [worker.poll() for worker in workers]):  # polls every one, also behind one that runs
        if status == 0:
            status = _first_failure(codes)
            deadline = time.monotonic() + GRACE_SECONDS if status else None
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.05)
    failed = {rank: worker.returncode for rank, worker in enumerate(workers) if worker.returncode}
    for rank, code in failed.items():
        how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        print(f"terapipe: rank {rank} {how}", file=sys.stderr)
    status = status or _first_failure(codes)
    return 128 - status if status < 0 else status


def _first_failure(codes: Sequence[int | None]) -> int:
    """Of ranks that ended together, one that a signal ended (negative) is the likelier origin; 0 if none failed."""
    return min((code for code in codes if code), default=0)


def _stop(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    deadline = time.monotonic() + TERMINATE_SECONDS
    for worker in workers:
        try:
            worker.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
