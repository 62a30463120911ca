"""Settings and fixtures of the whole test suite.

Hypothesis is derandomized and each test starts from one seed: a red run is red for everyone. Tests run torch on one
thread; those about threads set their own number. `backend` runs a test once for each attention backend that can run on
this machine; on one with a GPU, tests marked `on_gpu_too` run on the GPU's backends as well, with their tensors there.

Triton kernels run on the GPU where there is one, else in Triton's interpreter on CPU tensors. The trap: the interpreter
is chosen when triton is first imported, by whichever test module imports it first, so the variable is set here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tpkernels import backends

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=25, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _one_thread_one_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def _gpu_backends() -> list[str]:
    """Attention backends for CUDA tensors that this machine can run."""
    if not torch.cuda.is_available():
        return []
    return [row.name for row in backends.describe() if row.name in ("cuda", "triton") and row.usable]


GPU_BACKENDS = _gpu_backends()
ON_GPU = {"device", "on_gpu"}  # fixtures of tests that run on the GPU where there is one


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "on_gpu_too: also for the GPU's attention backends, tensors on the GPU")
    config.addinivalue_line("markers", "gpu: runs on the GPU where there is one; set here, for -m")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop tests of GPU backends that make tensors for the CPU, and mark what runs on the GPU: `-m gpu`."""

    def fits(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        on_gpu = callspec is not None and callspec.params.get("backend") in GPU_BACKENDS
        if on_gpu or not ON_GPU.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("gpu")
        return not on_gpu or item.get_closest_marker("on_gpu_too") is not None

    items[:] = [item for item in items if fits(item)]


@pytest.fixture(autouse=True)
def _on_the_backends_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """A marked test makes its tensors on torch's default device."""
    name = request.getfixturevalue("backend") if "backend" in request.fixturenames else None
    with torch.device("cuda") if name in GPU_BACKENDS else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session")
def usable_triton() -> None:
    """Skips where triton is not installed or its interpreter cannot work with this numpy; else it has to work."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    status = {row.name: row for row in backends.describe()}["triton"]
    if status.reason is not None and "needs numpy" in status.reason:
        pytest.skip(status.reason)
    assert status.usable, f"attention backend triton is not usable here: {status.reason}"


# The whole session, so that hypothesis may use it. test_backends.py fails where the cpu backend was not built.
@pytest.fixture(scope="session", params=["reference", "cpu", *GPU_BACKENDS])
def backend(request: pytest.FixtureRequest) -> str:
    """Name of a backend that runs here: on CPU tensors, or on a GPU's."""
    status = {row.name: row for row in backends.describe()}.get(request.param)
    if status is None or not status.usable:
        reason = "no such module" if status is None else status.reason
        pytest.skip(f"attention backend {request.param} is not usable here: {reason}")
    return request.param
