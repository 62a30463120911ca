"""Memory of a step, to the byte: torch's profiler reports every allocation of the CPU allocator, inside ops too.

"Bare" is a backend that allocates nothing and computes nothing worth: what is left is the engine's and the op's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from engine_cases import DTYPES, Case
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from terapipe.engine import Batch, Pipeline
from terapipe.models import ModelConfig, layers
from terapipe.schedule import make_plan
from tpkernels import Mask, PrefixCache, backends, prefix_attention

TOKENS, HIDDEN, LAYERS, KV_HEADS, HEAD_DIM = 576, 64, 3, 2, 16
CONFIG = ModelConfig(vocab=97, hidden=HIDDEN, layers=LAYERS, heads=4, kv_heads=KV_HEADS, ffn_hidden=96)
MIB = 2**20


@dataclass
class Allocations:
    """In bytes: `peak` above the level at the start, `total` of everything ever allocated, `kept` at the end."""

    peak: int = 0
    total: int = 0
    kept: int = 0


class measure:
    """`with measure() as allocations:` fills `allocations` at the end."""

    def __enter__(self) -> Allocations:
        self.allocations = Allocations()
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()
        return self.allocations

    def __exit__(self, *error: Any) -> None:
        self.profile.__exit__(*error)
        events = self.profile.profiler.kineto_results.events()
        for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
            self.allocations.kept += size
            self.allocations.total += max(0, size)
            self.allocations.peak = max(self.allocations.peak, self.allocations.kept)


class BareBackend(backends._load("reference").backend.__class__):  # type: ignore[misc]
    name = "bare"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, **rest: Any) -> None:
        out.copy_(q)
        lse.zero_()

    def backward(self, dout: Tensor, *rest: Any, dq: Tensor, dk: Tensor, dv: Tensor, **more: Any) -> None:
        dq.copy_(dout)
        dk.add_(1)
        dv.add_(1)


@pytest.fixture(params=["bare", "automatic"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "bare":
        monkeypatch.setattr(backends, "select", lambda call, requested=None: BareBackend())
    yield request.param


def _pipeline(
    slices: int, *, ranks: int = 1, micros: int = 1, schedule: str = "terapipe", dtype: str = "fp32"
) -> Pipeline:
    plan = make_plan(layers=LAYERS + 2, ranks=ranks, slices=slices, tokens=TOKENS, micros=micros, schedule=schedule)
    return Pipeline(layers(CONFIG, dtype=DTYPES[dtype]), plan, hidden_size=HIDDEN, dtype=DTYPES[dtype])


def _batch(micros: int) -> Batch:
    tokens = torch.randint(97, (micros, TOKENS), generator=torch.Generator().manual_seed(0))
    return Batch(tokens, tokens)


def _first_step(pipeline: Pipeline, micros: int) -> int:
    """Peak of the first step, in which caches and accumulators are made, without the accumulators."""
    with measure() as allocations:
        pipeline.step(_batch(micros))
    accumulators = pipeline.memory().accumulator_bytes
    assert accumulators == LAYERS * TOKENS * KV_HEADS * HEAD_DIM * 2 * 4
    return allocations.peak - accumulators


@pytest.mark.parametrize(
    ("ranks", "micros", "order", "dtype"),
    [(1, 1, "terapipe", "fp32"), (2, 2, "terapipe", "bf16"), (2, 3, "seq_1f1b", "fp32")],
)
def test_a_sliced_step_peaks_at_most_5_percent_above_one_slice(
    attention: str, ranks: int, micros: int, order: str, dtype: str
) -> None:
    peaks = {}
    for slices in (1, 6):
        with _pipeline(slices, ranks=ranks, micros=micros, schedule=order, dtype=dtype) as pipeline:
            peaks[slices] = _first_step(pipeline, micros)
    assert peaks[1] > 2 * MIB  # large enough for 5 % to mean something
    assert peaks[6] <= 1.05 * peaks[1], peaks


def test_a_step_leaves_gradients_and_pools_and_the_next_adds_nothing(attention: str) -> None:
    batch = _batch(2)
    with _pipeline(6, ranks=2, micros=2, schedule="seq_1f1b") as pipeline:
        with measure() as first:
            pipeline.step(batch)
        report = pipeline.memory()
        gradients = sum(p.grad.nbytes for p in pipeline.named_parameters().values() if p.grad is not None)
        places = 6 * 8 * (TOKENS + 8)  # each cache's record of where its slices start
        known = report.cache_bytes + report.accumulator_bytes + gradients + places
        assert known <= first.kept < known + 16384
        with measure() as later:
            pipeline.step(batch)
        assert abs(later.kept) < 1024, "a step must free what it made"
        after = pipeline.memory()
        assert (after.cache_bytes, after.accumulator_bytes) == (report.cache_bytes, report.accumulator_bytes)
        with measure() as evaluation:
            pipeline.evaluate(batch)
        assert evaluation.kept < 1024
        assert evaluation.peak < 0.5 * later.peak


@pytest.mark.parametrize(("micros", "order", "in_flight"), [(1, "terapipe", 1), (4, "terapipe", 4), (4, "seq_1f1b", 2)])
def test_caches_follow_the_formula_and_accumulators_are_one_pair_a_layer(
    micros: int, order: str, in_flight: int
) -> None:
    with _pipeline(6, ranks=2, micros=micros, schedule=order, dtype="bf16") as pipeline:
        assert (pipeline.memory().cache_bytes, pipeline.memory().accumulator_bytes) == (0, 0)
        pipeline.evaluate(_batch(micros))
        one = TOKENS * KV_HEADS * HEAD_DIM * 2 * 2  # K and V of one layer and micro, in bf16
        assert pipeline.memory().cache_bytes == LAYERS * one and pipeline.memory().accumulator_bytes == 0
        pipeline.step(_batch(micros))
        report = pipeline.memory()
        assert report.accumulator_bytes == LAYERS * 2 * one  # fp32, however many micros
        stages = [stage for program in pipeline._programs for stage in program.stages.values()]
        used = sum(
            len(stage._free) * sum(hasattr(layer, "make_cache") for layer in stage.layers.values()) for stage in stages
        )
        assert report.cache_bytes == used * one
        assert max(len(stage._free) for stage in stages) == in_flight
        assert report.peak_bytes > report.cache_bytes


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_attention_of_a_slice_allocates_nothing_that_grows_with_its_prefix(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Bytes of one forward and backward of a slice of 16 tokens, behind a prefix of 16 and of 4080 tokens."""
    monkeypatch.setattr(backends, "select", lambda call, requested=None: BareBackend())
    totals = {}
    for prefix in (16, 4080):
        cache = PrefixCache(1, 4096, 2, 16, dtype=DTYPES[dtype])
        cache.require_accumulator()
        with torch.no_grad():
            for start, length in ((0, prefix - 16), (prefix - 16, 16)):
                x = torch.randn(1, length, 2, 16).to(DTYPES[dtype])
                prefix_attention(x.repeat(1, 1, 2, 1), x, x, cache, start=start)
        q = torch.randn(1, 16, 4, 16).to(DTYPES[dtype]).requires_grad_()
        k, v = (torch.randn(1, 16, 2, 16).to(DTYPES[dtype]).requires_grad_() for _ in range(2))
        upstream = torch.randn(1, 16, 4, 16).to(DTYPES[dtype])
        with measure() as forward:
            out = prefix_attention(q, k, v, cache, mask=Mask())
        with measure() as backward:
            out.backward(upstream)
        totals[prefix] = (forward.total, backward.total)
    assert totals[16] == totals[4080]
    assert totals[16][0] < 2 * out.nbytes + 2048


def test_slices_of_a_long_sequence_never_copy_keys_of_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole engine: everything ever allocated in a step with 48 slices, against one with 6. A copy of the prefix's keys
    and values for each slice would add some 24 times the caches."""
    monkeypatch.setattr(backends, "select", lambda call, requested=None: BareBackend())
    totals = {}
    for slices in (6, 48):
        with _pipeline(slices) as pipeline:
            pipeline.step(_batch(1))
            with measure() as allocations:
                pipeline.step(_batch(1))
            totals[slices] = allocations.total
            caches = pipeline.memory().cache_bytes
            weights = sum(parameter.nbytes for parameter in pipeline.named_parameters().values())
    weight_gradients = 42 * weights  # each further slice makes a weight gradient of its own and adds it
    assert totals[48] - totals[6] < weight_gradients + 2 * caches


def test_documents_and_sequences_per_micro_enter_the_formula() -> None:
    case = replace(Case("llama", 2, (100, 3, 154), 2, 2, documents=True), dtype="fp64")
    with case.pipeline() as pipeline:
        pipeline.step(case.batch())
        one = 2 * 257 * 2 * 6 * 2 * 8  # two sequences, two KV heads of 6, K and V
        assert pipeline.memory().cache_bytes == 3 * 2 * one
        assert pipeline.memory().accumulator_bytes == 3 * one
