"""PrefixCache and GradientAccumulator: sharing, preloading, copies, and that no slice copies K or V."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from cached_slices import backward, forward

from tpkernels import GradientAccumulator, PrefixCache, attention_ops, prefix_attention, testing
from tpkernels.testing import AttentionCase

CASE = AttentionCase(5, 8, head_dim=4, query_heads=4, kv_heads=2, value_head_dim=3)


@pytest.fixture(autouse=True)
def _oracle(monkeypatch):
    monkeypatch.setenv("TPK_BACKEND", "reference")


def test_a_graph_run_twice_gives_the_same_gradient_twice():
    inputs = testing.make_inputs(CASE, torch.float64)
    cache = testing.poisoned_cache(CASE, torch.float64)
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    outs = [prefix_attention(x[:, :8], k[:, :8], v[:, :8], cache) for x in (q,)]
    outs.append(prefix_attention(q[:, 8:], k[:, 8:], v[:, 8:], cache))
    loss = (torch.cat(outs, 1) * inputs.dout).sum()
    once = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    twice = torch.autograd.grad(loss, (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def test_caches_of_one_layer_share_an_accumulator_one_backward_at_a_time():
    accumulator = GradientAccumulator(1, 20, 2, 4, 3)
    accumulator.dk.fill_(float("nan"))
    accumulator.dv.fill_(float("nan"))
    caches = [PrefixCache(1, 13, 2, 4, 3, accumulator=accumulator) for _ in range(2)]
    inputs = [testing.make_inputs(CASE, torch.float32, seed=seed) for seed in range(2)]
    for seed in (0, 1):  # one after the other, each from zero
        testing.check(testing.run(inputs[seed], cache=caches[seed]), inputs[seed])
    for cache in caches:
        cache.reset()
    first, second = (forward(cache, [3, 5]) for cache in caches)
    backward(first[1])
    caches[1].reset()  # gives up no other cache's backward
    second = forward(caches[1], [3, 5])
    with pytest.raises(
        ValueError, match=r"slice \[3, 8\) of cache \d+ would start while the backward of cache \d+ is unf"
    ):
        second[1].backward(torch.ones_like(second[1]), retain_graph=True)
    caches[0].reset()  # gives it up
    backward(second[1])
    accumulator.reset()
    with pytest.raises(ValueError, match="GradientAccumulator was reset, or used by another cache"):
        backward(second[0])


def test_gradients_are_added_to_a_preloaded_accumulator():
    """kernels.md (f), extra cases: gradient cache pre-filled with non-zero must add, not overwrite."""
    inputs = testing.make_inputs(CASE, torch.float64)
    plain = testing.run(inputs)
    cache = testing.poisoned_cache(CASE, torch.float64)
    dk, dv = torch.randn(1, 9, 2, 4, dtype=torch.float64), torch.randn(1, 9, 2, 3, dtype=torch.float64)
    cache.accumulator.preload(dk, dv)
    loaded = testing.run(inputs, cache=cache)
    torch.testing.assert_close(loaded.dk[:, :9], plain.dk[:, :9] + dk, rtol=0, atol=1e-13)
    torch.testing.assert_close(loaded.dv[:, :9], plain.dv[:, :9] + dv, rtol=0, atol=1e-13)
    torch.testing.assert_close(loaded.dk[:, 9:], plain.dk[:, 9:], rtol=0, atol=1e-13)
    cache.reset()
    torch.testing.assert_close(testing.run(inputs, cache=cache).dk, plain.dk, rtol=0, atol=1e-13)  # only once


def test_a_wrong_preload_is_refused():
    cache = PrefixCache(1, 12, 2, 4)
    accumulator = cache.require_accumulator()
    with pytest.raises(ValueError, match=r"dv is \[1, 2, 2, 4\].*\[1, n, 2, 4\] with the same n <= 12"):
        accumulator.preload(torch.zeros(1, 3, 2, 4), torch.zeros(1, 2, 2, 4))
    with pytest.raises(ValueError, match=r"dk is \[1, 13, 2, 4\]"):
        accumulator.preload(torch.zeros(1, 13, 2, 4), torch.zeros(1, 13, 2, 4))
    accumulator.preload(torch.zeros(1, cache.capacity, 2, 4), torch.zeros(1, cache.capacity, 2, 4))
    accumulator.reset()
    accumulator.preload(torch.zeros(1, 9, 2, 4), torch.zeros(1, 9, 2, 4))
    out = forward(cache, [3])[0]
    with pytest.raises(ValueError, match=r"9 rows were preloaded.*holds 3 tokens"):
        out.backward(torch.ones_like(out), retain_graph=True)
    accumulator.reset()
    backward(out)


def test_an_accumulator_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"accumulator dk is \[1, 8, 2, 4\].*needs \[1, 12, 2, 4\]"):
        PrefixCache(1, 12, 2, 4, accumulator=GradientAccumulator(1, 8, 2, 4))
    cache = PrefixCache(1, 12, 2, 4)
    cache.accumulator = GradientAccumulator(1, 8, 2, 4)
    with pytest.raises(ValueError, match=r"accumulator dk is \[1, 8, 2, 4\]"):
        cache.require_accumulator()
    with pytest.raises(ValueError, match=r"float32.*needs.*float64"):
        PrefixCache(1, 12, 2, 4, dtype=torch.float64, accumulator=GradientAccumulator(1, 12, 2, 4))
    with pytest.raises(ValueError, match=r"sums over slices need torch.float32"):
        GradientAccumulator(1, 12, 2, 4, dtype=torch.bfloat16)
    for make in (PrefixCache, GradientAccumulator):
        with pytest.raises(ValueError, match=f"{make.__name__}: capacity is -1"):
            make(1, -1, 2, 4)
        make(0, 0, 0, 0)


def test_bytes_are_counted_apart():
    cache = PrefixCache(2, 12, 2, 4, 3, dtype=torch.bfloat16)
    assert cache.nbytes == 2 * 12 * 2 * (4 + 3) * 2
    assert cache.require_accumulator().nbytes == 2 * 12 * 2 * (4 + 3) * 4
    assert "length=0" in repr(cache)


class Recorder:
    """A backend that keeps what it was handed."""

    name = "recorder"

    def forward(self, q, k, v, *, out, lse, **_):
        self.k, self.v = k, v
        out.zero_()
        lse.zero_()

    def backward(self, dout, q, k, v, out, lse, *, dq, dk, dv, **_):
        self.k, self.v, self.dk, self.dv = k, v, dk, dv
        dq.zero_()


def test_kernels_work_on_the_cache_itself(monkeypatch):
    """No K/V concatenation, no clone of a gradient cache, no expansion of GQA heads."""
    recorder = Recorder()
    monkeypatch.setattr(attention_ops.backends, "select", lambda call, requested: recorder)
    cache = PrefixCache(1, 100, 2, 4, 3)
    q, v = torch.randn(1, 10, 6, 4, requires_grad=True), torch.randn(1, 10, 2, 3, requires_grad=True)
    k = torch.randn(1, 10, 2, 4, requires_grad=True)
    outs = [prefix_attention(q, k, v, cache) for _ in range(3)]

    def memory(tensor):
        return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()

    for end, out in ((30, outs[2]), (20, outs[1])):
        with torch.profiler.profile(profile_memory=True) as profile:
            backward(out)
        assert memory(recorder.k) == memory(cache.k[:, :end])
        assert memory(recorder.v) == memory(cache.v[:, :end])
        assert memory(recorder.dk) == memory(cache.accumulator.dk[:, :end])
        assert memory(recorder.dv) == memory(cache.accumulator.dv[:, :end])
        if end == 20:  # the accumulator exists by now: nothing of the prefix's size may be allocated
            largest = max(event.cpu_memory_usage for event in profile.events())
            assert largest <= 2 * q.nbytes + k.nbytes + v.nbytes


def test_a_backends_own_error_reaches_the_caller(monkeypatch):
    class Failing(Recorder):
        def backward(self, *tensors, **_):
            raise RuntimeError("no memory left")

    monkeypatch.setattr(attention_ops.backends, "select", lambda call, requested: Failing())
    q = torch.randn(1, 3, 1, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="no memory left"):
        prefix_attention(q, q, q).sum().backward()


def test_a_cache_made_in_inference_mode_works_outside():
    with torch.inference_mode():
        cache = PrefixCache(1, 12, 2, 4)
    outs = forward(cache, [3, 5])
    backward(outs[1])
    backward(outs[0])
    cache.reset()
    with torch.inference_mode():
        forward(cache, [3, 5])
    assert cache.length == 8
    with torch.no_grad():
        forward(cache, [2])
    backward(forward(cache, [2])[0])  # a prefix without gradients, then a slice with them
    assert cache.backward_end == 10


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_goes_on_where_the_cache_stood(again):
    """What a copy's backward reads is the copy's own memory, not that of the cache or a snapshot."""
    q, k, v = (torch.randn(2, 9, heads, 4, requires_grad=True) for heads in (4, 2, 2))
    cache = PrefixCache(2, 9, 2, 4)
    cache.require_accumulator()
    prefix_attention(q[:, :5], k[:, :5], v[:, :5], cache)
    other = again(cache)
    if again is not copy.copy:
        cache.k.zero_()
        cache.reset()
    out = prefix_attention(q[:, 5:], k[:, 5:], v[:, 5:], other)
    actual = torch.autograd.grad(out.sum(), (q, k, v))
    expected = torch.autograd.grad(prefix_attention(q[:, 5:], k, v).sum(), (q, k, v))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a[:, 5:], b[:, 5:])
    torch.testing.assert_close(other.accumulator.dk, expected[1])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_cache_given_smaller_tensors_is_refused_by_the_backward(monkeypatch, backend):
    monkeypatch.setenv("TPK_BACKEND", backend)
    cache = PrefixCache(1, 40, 2, 4, 3)
    outs = forward(cache, [30, 2])
    cache.k, cache.v = cache.k[:, :8], cache.v[:, :8]
    with pytest.raises(ValueError, match=r"dk \[1, 8, 2, 4\] and dv .* do not fit the cache's k \[1, 32, 2, 4\]"):
        backward(outs[1])


def test_a_default_device_moves_no_position():
    with torch.device("meta"):
        cache = PrefixCache(1, 8, 2, 4, 3)
        cache.require_accumulator()
        q, k, v = (torch.randn(1, 3, 2, dim, device="cpu", requires_grad=True) for dim in (4, 4, 3))
        out = prefix_attention(q, k, v, cache)
        backward(out)
    assert cache.length == 3 and cache.backward_end == 0 and cache.k.is_cpu


def test_a_cache_given_other_tensors_goes_back_through_those():
    def run(cache):
        inputs = testing.make_inputs(CASE, torch.float32)
        return testing.run(inputs, cache=cache)

    cache = testing.poisoned_cache(CASE, torch.float32)
    expected = run(testing.poisoned_cache(CASE, torch.float32))
    cache.k, cache.v = cache.k.clone(), cache.v.clone()
    found = run(cache)
    assert all(torch.equal(getattr(found, name), getattr(expected, name)) for name in ("out", "dq", "dk", "dv"))
