"""The backend `cuda` where it cannot be used or was not asked for: every reason in words, never a crash."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tpkernels import backends, cuda
from tpkernels.backends import AttentionCall
from tpkernels.cuda import CudaBackend

CALL = AttentionCall("cuda", torch.bfloat16, 8, 2, 128, 128)


class Device:
    """Stands for tpkernels._cuda on a machine with one GPU."""

    def __init__(self, capability: int = 90, count: int = 1, error: str | None = None):
        self._capability, self._count, self._error = capability, count, error

    def device_count(self):
        if self._error is not None:
            raise RuntimeError(self._error)
        return self._count

    def capability(self, device):
        if self._capability < 80:
            raise RuntimeError(f"device {device} has compute capability 7.0; the kernels need 8.0 or newer")
        return self._capability

    def invariance_rows(self, head_dim, device):
        return 64


@pytest.fixture
def one_gpu(monkeypatch):
    """torch believes in a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.fixture
def registry(monkeypatch, one_gpu):
    """A registry of `cuda` on a GPU of sm_90 and a backend that serves everything."""

    class Other:
        name = "triton"

        def refuses(self, call):
            return None

    monkeypatch.delenv("TPK_BACKEND", raising=False)
    entries = {"cuda": backends._Entry(CudaBackend(Device()), None), "triton": backends._Entry(Other(), None)}
    monkeypatch.setattr(backends, "names", lambda: tuple(entries))
    monkeypatch.setattr(backends, "_load", lambda name: entries[name])
    backends._select.cache_clear()
    yield monkeypatch
    backends._select.cache_clear()


def test_why_it_is_not_usable(monkeypatch, one_gpu):
    def not_built():
        raise ImportError("No module named 'tpkernels._cuda'")

    with monkeypatch.context() as context:
        context.setattr(cuda, "_import", not_built)
        reason = CudaBackend().unusable()
    assert reason is not None and "is not built; TPK_CUDA=1 pip install . builds it, with nvcc" in reason
    assert CudaBackend(Device(error="there is no NVIDIA driver here")).unusable() == "there is no NVIDIA driver here"
    assert CudaBackend(Device(count=0)).unusable() == "there is no CUDA device"
    assert CudaBackend(Device()).unusable() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no CUDA device" in (CudaBackend(Device()).unusable() or "")


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (AttentionCall("cpu", torch.bfloat16, 8, 2, 128, 128), "it runs on CUDA tensors, not on cpu"),
        (AttentionCall("cuda", torch.float32, 8, 2, 128, 128), "it computes bf16 and fp16, not float32"),
        (AttentionCall("cuda", torch.bfloat16, 8, 2, 96, 96), "head_dim 96/96 is neither 64 nor 128"),
        (AttentionCall("cuda", torch.bfloat16, 8, 2, 128, 64), "head_dim 128/64 is neither 64 nor 128 for keys and"),
    ],
    ids=str,
)
def test_what_it_refuses(call, why, one_gpu):
    assert why in (CudaBackend(Device()).refuses(call) or "")


def test_an_old_gpu_is_refused_with_its_capability(one_gpu):
    assert CudaBackend(Device(70)).refuses(CALL) == "device 0 has compute capability 7.0; the kernels need 8.0 or newer"
    assert CudaBackend(Device(80)).refuses(CALL) is None


def test_what_counts_is_the_tensors_device_and_not_the_current_one(registry):
    class Two(Device):
        def capability(self, device):
            self._capability = (90, 70)[device]
            return super().capability(device)

    registry.setattr(cuda, "PROVEN", frozenset({90}))
    second = replace(CALL, device_index=1)
    assert CudaBackend(Two()).refuses(CALL) is None and CudaBackend(Two()).unproven(CALL) is None
    assert "device 1 has compute capability 7.0" in str(CudaBackend(Two()).refuses(second))


def test_it_is_used_by_request_until_its_tests_have_passed_on_the_architecture(registry):
    assert backends.select(CALL).name == "triton"
    assert backends.select(CALL, "cuda").name == "cuda"
    registry.setattr(cuda, "PROVEN", frozenset({90}))
    backends._select.cache_clear()
    assert backends.select(CALL).name == "cuda"
    reason = CudaBackend(Device(80)).unproven(CALL)
    assert reason is not None and "compute capability 8.0 yet; ask for it with backend='cuda'" in reason


def test_asked_for_what_it_does_not_serve_it_raises(registry):
    with pytest.raises(ValueError, match=r"attention backend cuda refuses cuda bfloat16.*head_dim 96/96 is neither"):
        backends.select(AttentionCall("cuda", torch.bfloat16, 8, 2, 96, 96), "cuda")


def test_the_invariance_unit_is_whole_tokens_of_a_whole_tile(one_gpu):
    units = {
        group: CudaBackend(Device()).invariance_unit(AttentionCall("cuda", torch.bfloat16, group, 1, 64, 64))
        for group in (1, 3, 8, 12)
    }
    assert units == {1: 64, 3: 64, 8: 8, 12: 16}


def test_rows_that_do_not_start_on_16_bytes_are_copied():
    flat = torch.randn(2 * 5 * 3 * 64 + 1).bfloat16()
    shifted = flat[1:].view(2, 5, 3, 64)
    copy = cuda._aligned(shifted)
    assert copy.data_ptr() % 16 == 0 and torch.equal(copy, shifted)
    padded = torch.randn(2, 5, 3, 72).bfloat16()[..., :64]
    assert cuda._aligned(padded) is padded
    odd = torch.randn(2, 5, 3, 65).bfloat16()[..., :64]
    assert cuda._aligned(odd) is not odd and torch.equal(cuda._aligned(odd), odd)


def test_tensors_of_two_devices_are_refused():
    with pytest.raises(ValueError, match="tensors on cpu and meta in one call"):
        cuda._same_device(torch.zeros(1), None, torch.zeros(1, device="meta"))


def test_tpkernels_imports_without_cuda_in_any_form():
    """No extension, no driver, no triton: import, the registry's report and a call on the CPU still work."""
    program = (
        "import sys\n"
        "sys.modules['tpkernels._cuda'] = None\nsys.modules['triton'] = None\n"
        "import torch, tpkernels\nfrom tpkernels import backends\n"
        "rows = {row.name: row for row in backends.describe()}\n"
        "assert not rows['cuda'].usable and 'not built' in rows['cuda'].reason, rows\n"
        "q = torch.randn(1, 3, 2, 8, dtype=torch.float64)\n"
        "assert tpkernels.prefix_attention(q, q, q).shape == q.shape\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
