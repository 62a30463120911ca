"""The line through times of transfers, and what is said and kept where it has no slope."""

from __future__ import annotations

import logging

import pytest

from terapipe.profile.links import LINK_BYTES, fit_link


def test_a_line_is_found_again(caplog: pytest.LogCaptureFixture) -> None:
    found = fit_link("shm", [(size, 3e-6 + size / 7e9) for size in LINK_BYTES])
    assert found.latency_s == pytest.approx(3e-6) and found.bytes_per_s == pytest.approx(7e9)
    assert not caplog.records


@pytest.mark.parametrize("slope", [0.0, -1e-13, 1e-15])
def test_times_without_a_slope_are_warned_of_and_kept_finite(slope: float, caplog: pytest.LogCaptureFixture) -> None:
    times = [(size, 1e-4 + slope * size) for size in LINK_BYTES]
    with caplog.at_level(logging.WARNING, logger="terapipe"):
        found = fit_link("shm", times)
    size, seconds = times[-1]
    assert found.bytes_per_s == size / seconds and found.latency_s == pytest.approx(1e-4, rel=0.01)
    assert "link shm: bandwidth could not be told, since 1024 bytes took 0.0001 s" in caplog.text
    assert "measure again" in caplog.text
