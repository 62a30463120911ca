"""Settings and fixtures of the whole test suite.

Hypothesis is derandomized and each test starts from one seed: a red run is red for everyone. Tests run torch on one
thread; those about threads set their own number. `backend` runs a test once for each attention backend that can run on
this machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

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


# The whole session, so that hypothesis may use it. test_backends.py fails where the cpu backend was not built.
@pytest.fixture(scope="session", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """Name of a backend that runs on CPU tensors."""
    status = {row.name: row for row in backends.describe()}.get(request.param)
    if status is None or not status.usable:
        reason = "no such module" if status is None else status.reason
        pytest.skip(f"attention backend {request.param} is not usable here: {reason}")
    return request.param
