"""The thread pool of the CPU kernels: follows torch's thread count, survives fork and callers at once, ends cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
import torch

from tpkernels import testing
from tpkernels.backends import RawSettings
from tpkernels.cpu import CpuBackend
from tpkernels.mask import RawMask
from tpkernels.testing import AttentionCase

CASE = AttentionCase(300, 200, query_heads=4, kv_heads=2, head_dim=40)


def forward_and_backward():
    return testing.run(testing.make_inputs(CASE, torch.float32), backend="cpu").dk


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads through /proc, which is Linux")
def test_the_pool_grows_to_what_is_asked_and_no_further():
    torch.set_num_threads(3)
    forward_and_backward()
    before = thread_count()
    for threads in (1, 3, 2, 3):
        torch.set_num_threads(threads)
        forward_and_backward()
    assert thread_count() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_after_fork_has_its_own_pool():
    torch.set_num_threads(2)
    q = torch.randn(1, 200, 2, 8)
    out, child_out, lse = torch.empty_like(q), torch.empty_like(q), torch.empty(1, 2, 200)
    settings = RawSettings(0, RawMask(True, -1, -1, None), 1.0, deterministic=True)
    CpuBackend().forward(q, q, q, out=out, lse=lse, settings=settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork of a process with threads is the point
        child = os.fork()
    if child == 0:  # nothing here may use torch's own threads, which do not survive a fork
        status = 1
        try:
            for _ in range(3):
                CpuBackend().forward(q, q, q, out=child_out, lse=lse, settings=settings)
            status = 0 if child_out.numpy().tobytes() == out.numpy().tobytes() else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        finished, code = os.waitpid(child, os.WNOHANG)
        if finished:
            assert os.waitstatus_to_exitcode(code) == 0
            break
        time.sleep(0.01)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the forked child hangs")
    CpuBackend().forward(q, q, q, out=child_out, lse=lse, settings=settings)
    assert torch.equal(out, child_out)


def test_concurrent_callers_get_their_own_results():
    torch.set_num_threads(2)
    expected = forward_and_backward()
    results = []

    def work():
        torch.set_num_threads(2)
        results.extend(forward_and_backward() for _ in range(5))

    callers = [threading.Thread(target=work) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert len(results) == 20 and all(torch.equal(result, expected) for result in results)


def test_the_gil_is_free_while_a_kernel_runs():
    case = AttentionCase(3000, query_heads=4, kv_heads=4, head_dim=128)
    inputs = testing.make_inputs(case, torch.float32)
    worker = threading.Thread(target=lambda: testing.run(inputs, backend="cpu"))
    worker.start()
    turns = 0
    while worker.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 10


def test_the_process_ends_with_idle_workers():
    script = """
        import torch
        from tpkernels import prefix_attention
        torch.set_num_threads(4)
        x = torch.randn(1, 300, 4, 64)
        print(float(prefix_attention(x, x, x, backend="cpu").sum()) != 0)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0 and done.stdout.strip() == "True", done.stderr
