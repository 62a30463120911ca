"""Where kernels are launched: on the device of a call's tensors, whichever is current, and on its current stream.

Without a GPU the tensors are fake ones of a second device, and a stand-in for torch.cuda.device notes what is current.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tpkernels import backends, testing
from tpkernels.backends import RawSettings
from tpkernels.mask import RawMask
from tpkernels.testing import AttentionCase

SECOND = torch.device("cuda", 1)
LONGEST_WAIT = 200_000_000  # cycles: a tenth of a second, in which a kernel on another stream would have run


@pytest.fixture
def launched(monkeypatch, usable_triton):
    """(kernel, device that is current, devices of its tensors) of every launch; nothing is computed."""
    from tpkernels.triton import forward, launch, tiles

    current, seen = [torch.device("cuda", 0)], []

    class Guard:
        def __init__(self, device):
            self.device = torch.device(device)

        def __enter__(self):
            current.append(self.device)

        def __exit__(self, *error):
            current.pop()

    def launcher(kernel, grid):
        def run(**arguments):
            tensors = {value.device for value in arguments.values() if isinstance(value, torch.Tensor)}
            seen.append((kernel.__name__, current[-1], tensors))

        return run

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(type(forward.attention_forward), "__getitem__", launcher)
    monkeypatch.setattr(tiles, "architecture", lambda device: "sm90")
    monkeypatch.setattr(launch, "processors_of", lambda device: 132)
    # Fake tensors would wake their device where there is a GPU at all, and this machine may have no second one.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # What plans ask of tensors beyond shapes; torch's own indexing wants a device where torch was built without CUDA.
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: 0, raising=False)
    monkeypatch.setattr(FakeTensor, "__getitem__", lambda self, at: self.unsqueeze(0), raising=False)
    with FakeTensorMode():
        yield seen
    assert current == [torch.device("cuda", 0)], "a guard was left on"


def heads(tokens: int, count: int) -> torch.Tensor:
    return torch.empty(1, tokens, count, 16, dtype=torch.float16, device=SECOND)


def assert_on_the_second_device(launched, kernels: set[str]) -> None:
    assert {kernel for kernel, _, _ in launched} == kernels
    for kernel, current, tensors in launched:
        assert tensors == {SECOND}, kernel
        assert current == SECOND, f"{kernel} is launched on {current}, its tensors are on {SECOND}"


def test_attention_runs_on_the_device_of_its_tensors(launched):
    from tpkernels.triton import TritonBackend

    q, out, dq = (heads(5, 4) for _ in range(3))
    k, v = heads(4096, 2), heads(4096, 2)
    lse, sinks = torch.empty(1, 4, 5, device=SECOND), torch.empty(4, device=SECOND)
    sums = {"dk": torch.zeros(k.shape, device=SECOND), "dv": torch.zeros(v.shape, device=SECOND)}
    for deterministic in (False, True):
        settings = RawSettings(4091, RawMask(True, -1, -1, None), 0.25, 0.0, sinks, deterministic)
        TritonBackend().forward(q, k, v, out=out, lse=lse, settings=settings)
        TritonBackend().backward(
            out, q, k, v, out, lse, dq=dq, **sums, dsinks=torch.zeros_like(sinks), settings=settings
        )
    kernels = {"attention_forward", "combine_splits", "prepare", "sink_gradient", "attention_backward_keys"}
    assert_on_the_second_device(launched, kernels | {"attention_backward_queries", "round_rows"})


def test_packed_sequences_run_on_the_device_of_their_tensors(launched):
    from tpkernels.triton.launch import Lengths
    from tpkernels.triton.varlen import varlen_backward, varlen_forward

    q, k, v = (heads(50, count).squeeze(0) for count in (4, 2, 2))
    cu = torch.empty(3, dtype=torch.int32, device=SECOND)
    settings = {"lengths": Lengths(cu, cu, 30, 30), "mask": RawMask(True, -1, -1, None), "scale": 0.25}
    out, lse = varlen_forward(q, k, v, **settings)
    varlen_backward(out, q, k, v, out, lse, deterministic=True, **settings)
    kernels = {"attention_forward", "prepare", "attention_backward_keys", "attention_backward_queries"}
    assert_on_the_second_device(launched, kernels)


def test_a_hand_off_runs_on_the_device_that_its_link_names(launched):
    from tpkernels.triton import plan_hand_off as plan

    x, out = (heads(7, 1).squeeze() for _ in range(2))
    plan.run([plan.add_put(None, x, x, out=out)], SECOND)
    assert_on_the_second_device(launched, {"add_put"})


def test_the_gpu_that_is_asked_is_the_tensors_own(device, monkeypatch):
    """GPUs of one machine may differ: the current one (0) is too old here, that of the tensors (1) is served."""
    from tpkernels import attention_ops, invariance_unit
    from tpkernels.triton import TritonBackend, tiles

    capabilities = [(7, 0), (9, 0), (8, 9)]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(tiles, "architecture", tiles.architecture.__wrapped__)  # without its cache
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # so that fake tensors leave GPUs alone
    settings = attention_ops.Settings(True, -1, -1, 0.25, 0.0, True, "triton")
    calls = []
    for index in range(3):
        with FakeTensorMode():
            q = torch.empty(1, 5, 4, 16, dtype=torch.float16, device=torch.device("cuda", index))
        calls.append(attention_ops._call(q, q, q, None, RawMask(True, -1, -1, None), settings))
    backend = TritonBackend()
    assert "compute capability 7.0" in (backend.refuses(calls[0]) or "")
    assert [backend.refuses(call) for call in calls[1:]] == [None, None]
    rows = [tiles.find(name, 16, 2, "keys").rows for name in ("sm90", "sm89")]
    assert rows[0] != rows[1] and [backend.invariance_unit(call) for call in calls[1:]] == rows

    monkeypatch.setattr(backends, "_load", lambda name: backends._Entry(backend, None))
    monkeypatch.setattr(backends, "_select", backends._select.__wrapped__)
    sizes = {"query_heads": 4, "kv_heads": 4, "head_dim": 16, "dtype": torch.float16, "backend": "triton"}
    assert [invariance_unit(**sizes, device=f"cuda:{index}") for index in (1, 2)] == rows
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert invariance_unit(**sizes, device="cuda") == rows[1]


# ---- on a GPU --------------------------------------------------------------------------------------------------------

CASE = AttentionCase(130, 70, query_heads=6, kv_heads=2, head_dim=64)
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="streams and devices are a GPU's")


@pytest.fixture(params=["triton", "cuda"])
def on_gpu(request) -> str:
    """Both backends for CUDA tensors."""
    status = {row.name: row for row in backends.describe()}[request.param]
    if not status.usable:
        pytest.skip(f"attention backend {request.param} is not usable here: {status.reason}")
    return request.param


def assert_equal(a, b) -> None:
    for (name, left), (_, right) in zip(a.items(), b.items(), strict=True):
        assert torch.equal(left.cpu(), right.cpu()), name


@needs_a_gpu
def test_a_side_stream_is_waited_for(on_gpu):
    """Inputs that arrive late on a stream of one's own: kernels on another stream would read the zeros before them."""
    inputs = testing.make_inputs(CASE, torch.bfloat16, device="cuda")
    settings = {"backend": on_gpu, "deterministic": True}
    expected = testing.run(inputs, **settings)  # compiles, too
    names = ("q", "k", "v", "dout")
    late = dataclasses.replace(inputs, **{name: torch.zeros_like(getattr(inputs, name)) for name in names})
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONGEST_WAIT)
        for name in names:
            getattr(late, name).copy_(getattr(inputs, name))
        result = testing.run(late, **settings)
        side.synchronize()
    assert_equal(result, expected)


@needs_a_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_a_device_that_is_not_current(on_gpu):
    assert torch.cuda.current_device() == 0
    inputs = testing.make_inputs(CASE, torch.bfloat16, device=SECOND)
    testing.check(testing.run(inputs, backend=on_gpu, deterministic=True), inputs)
    assert torch.cuda.current_device() == 0
