"""The registry: order, overrides that raise instead of falling back, reasons, one log line a choice."""

from __future__ import annotations

import logging

import pytest
import torch

import tpkernels
from tpkernels import backends
from tpkernels.backends import AttentionCall

CALL = AttentionCall("cpu", torch.float32, 6, 2, 64, 48)


class Broken:
    """Stands for an extension that loads but cannot run here."""

    name = "cpu"

    def unusable(self):
        return "this processor is too old"


@pytest.fixture
def registry(monkeypatch):
    """A registry whose cached choices are this test's own."""
    monkeypatch.delenv("TPK_BACKEND", raising=False)
    caches = (backends.names, backends._load, backends._select)
    for cached in caches:
        cached.cache_clear()
    yield monkeypatch
    for cached in caches:
        cached.cache_clear()


def only(registry, *rows):
    """Make the registry hold these (name, backend, reason)."""
    entries = {name: backends._Entry(backend, reason) for name, backend, reason in rows}
    registry.setattr(backends, "names", lambda: tuple(entries))
    registry.setattr(backends, "_load", lambda name: entries[name])


def test_the_cpu_backend_is_built_and_serves_every_storage_type(registry):
    """Fails where tpkernels._core was not built, so that the tests of the cpu backend are never skipped unnoticed."""
    rows = {row.name: row for row in backends.describe()}
    assert rows["cpu"].usable, rows["cpu"].reason
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for deterministic in (False, True):
            call = AttentionCall("cpu", dtype, 6, 2, 111, 40, True, True, True, True, deterministic)
            assert backends.select(call).name == "cpu"


def test_the_oracle_is_automatic_only_for_fp64(registry):
    only(registry, ("cpu", Broken(), "this processor is too old"), ("reference", backends.get("reference"), None))
    fp64 = AttentionCall("cpu", torch.float64, 6, 2, 64, 48)
    assert backends.select(fp64).name == "reference"
    with pytest.raises(ValueError) as error:
        backends.select(CALL)
    message = str(error.value)
    assert "no attention backend serves cpu float32, 6 query and 2 KV heads, head_dim 64/48" in message
    assert "cpu: this processor is too old" in message
    assert "reference: the slow oracle is automatic only for fp64" in message and "TPK_BACKEND=reference" in message


def test_a_backend_asked_for_is_used_or_raises(registry):
    assert backends.select(CALL, "reference").name == "reference"
    registry.setenv("TPK_BACKEND", "reference")
    assert backends.select(CALL).name == "reference"
    deterministic = AttentionCall("cpu", torch.float32, 6, 2, 64, 48, window=True, deterministic=True)
    with pytest.raises(ValueError, match=r"reference refuses cpu float32.*window, deterministic: deterministic=True"):
        backends.select(deterministic)
    with pytest.raises(ValueError, match=r"unknown attention backend 'fast'; this installation has .*reference"):
        backends.select(CALL, "fast")
    registry.setenv("TPK_BACKEND", "")
    assert backends.select(CALL).name != "reference"
    registry.setenv("TPK_BACKEND", "typo")
    q = torch.randn(1, 2, 1, 8)
    with pytest.raises(ValueError, match="'typo'"):
        tpkernels.prefix_attention(q, q, q)


def test_an_unusable_backend_gives_its_reason(registry):
    only(registry, ("cpu", None, "it cannot be imported (no libfoo)"))
    with pytest.raises(ValueError, match=r"cpu is not usable here: it cannot be imported .no libfoo."):
        backends.select(CALL, "cpu")
    assert backends.describe() == [("cpu", False, "it cannot be imported (no libfoo)")]


def test_a_choice_is_logged_once(registry, caplog):
    with caplog.at_level(logging.INFO, logger="tpkernels"):
        for _ in range(3):
            backends.select(CALL, "reference")
    assert [record.message for record in caplog.records] == [
        "attention backend reference (asked for) for cpu float32, 6 query and 2 KV heads, head_dim 64/48"
    ]


def test_only_backends_that_exist_are_listed(registry):
    names = [row.name for row in backends.describe()]
    assert names == sorted(names, key=backends.ORDER.index) and "reference" in names
