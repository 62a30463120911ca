"""torch.compile(fullgraph=True), opcheck and fake tensors: the ops as torch.library sees them."""

from __future__ import annotations

import contextlib
import functools
import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tpkernels import Mask, PrefixCache, prefix_attention, testing
from tpkernels.attention_ops import Settings
from tpkernels.testing import AttentionCase

CASE = AttentionCase(13, 20, batch=2, query_heads=6, kv_heads=2, head_dim=8, value_head_dim=5, sinks=True)
COMPILERS = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaves(shape):
    return [torch.randn(shape, requires_grad=True) for _ in range(3)]


def compiled_run(inputs, slices, compiler, *, whole_step, backend):
    """testing.run with a compiled op, or with the ops of all slices in one graph.

    Nothing but the op is in the graphs: a sum of sinks or a concatenation would cost inductor a run of g++.
    """
    q, k, v = (
        [x.detach().requires_grad_() for x in tensor.split(slices, 1)] for tensor in (inputs.q, inputs.k, inputs.v)
    )
    sinks = [inputs.sinks.detach().requires_grad_() for _ in slices]
    cache = testing.poisoned_cache(inputs.case, inputs.dtype)

    def attend(q, k, v, sinks):
        return prefix_attention(q, k, v, cache, sinks=sinks, backend=backend, return_lse=True)

    def step(q, k, v, sinks):
        return [attend(*piece) for piece in zip(q, k, v, sinks, strict=True)]

    compiled = torch.compile(step if whole_step else attend, fullgraph=True, backend=compiler)
    if whole_step:
        pieces = compiled(q, k, v, sinks)
    else:
        pieces = [compiled(*piece) for piece in zip(q, k, v, sinks, strict=True)]
    outs, lses = zip(*pieces, strict=True)
    if whole_step:
        torch.autograd.backward(outs, inputs.dout.split(slices, 1))
    else:
        for out, dout in reversed(list(zip(outs, inputs.dout.split(slices, 1), strict=True))):
            out.backward(dout)
    assert cache.length == inputs.case.keys and cache.backward_end == 0
    dq, dk, dv = (torch.cat([x.grad for x in pieces], 1) for pieces in (q, k, v))
    dsinks = torch.stack([x.grad for x in sinks]).sum(0)
    return testing.AttentionResult(torch.cat(outs, 1).detach(), torch.cat(lses, 2), dq, dk, dv, dsinks)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(("slices", "whole_step"), [([5, 8, 20], False), ([20, 1, 12], True)], ids=["op", "step"])
def test_slices_forward_then_backward_last_to_first(compiler, slices, whole_step, backend):
    inputs = testing.make_inputs(CASE, torch.float32)
    result = compiled_run(inputs, slices, compiler, whole_step=whole_step, backend=backend)
    testing.check(result, inputs)
    eager = testing.run(inputs, slices=slices, backend=backend)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(result, name), getattr(eager, name)), name


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_compiled_backward_out_of_order_is_refused(compiler, monkeypatch):
    """The backward must see the cache's length of today, not the one at the end of its own forward."""
    monkeypatch.setenv("TPK_BACKEND", "reference")
    cache = PrefixCache(1, 12, 1, 4)
    cache.require_accumulator()
    attend = torch.compile(prefix_attention, fullgraph=True, backend=compiler)
    outs = [attend(*leaves((1, 4, 1, 4)), cache) for _ in range(3)]
    with pytest.raises(ValueError, match=r"slice \[0, 4\) out of order: the next is that of slice \[8, 12\)"):
        outs[0].sum().backward()


@pytest.mark.parametrize("compiler", COMPILERS)
def test_no_copy_of_the_cache_is_kept_for_the_backward(compiler, monkeypatch):
    monkeypatch.setenv("TPK_BACKEND", "reference")
    cache = PrefixCache(1, 512, 1, 16)
    cache.require_accumulator()
    attend = torch.compile(prefix_attention, fullgraph=True, backend=compiler)
    outs = [attend(*leaves((1, 4, 1, 16)), cache) for _ in range(3)]
    alive = [x for x in gc.get_objects() if type(x) is torch.Tensor]  # isinstance would ask dead weak proxies
    alive += [x for out in outs for x in out.grad_fn.saved_tensors]
    big = {x.data_ptr() for x in alive if x.shape == cache.k.shape and not x.is_meta}
    big.discard(0)  # what tracing left behind holds no memory
    assert big == {x.data_ptr() for x in (cache.k, cache.v, cache.accumulator.dk, cache.accumulator.dv)}


@pytest.mark.parametrize("compiler", COMPILERS)
def test_documents_and_a_plain_call(compiler, backend):
    mask = Mask.from_documents([[9, 4]])
    q, k, v = (torch.randn(1, 13, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    attend = torch.compile(prefix_attention, fullgraph=True, backend=compiler)
    out = attend(q, k, v, mask=mask, backend=backend)
    expected = prefix_attention(q, k, v, mask=mask, backend=backend)
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (out, expected)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_one_mask_for_all_lengths_and_lse_in_the_loss(compiler, backend):
    """pytorch #136232: NaN gradients of a compiled call with a mask for more positions than the first run had tokens,
    whose lse took part in the loss; later lengths trace the graph anew."""
    mask = Mask.from_documents([[29, 1, 64, 6]])

    def attend(q, k, v):
        return prefix_attention(q, k, v, mask=mask, return_lse=True, backend=backend)

    def step(q, k, v, attend=attend):
        out, lse = attend(q, k, v)
        return out * lse.exp().transpose(1, 2)[..., None]

    compiled = torch.compile(step if compiler == "aot_eager" else attend, fullgraph=True, backend=compiler)
    if compiler == "inductor":  # a product in the graph would cost it a run of g++
        compiled = functools.partial(step, attend=compiled)
    for tokens in (61, 100, 33):
        inputs = [torch.randn(1, tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
        results = []
        for out in (compiled(*inputs), step(*inputs)):
            results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
            assert a.isfinite().all()


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_without_gradients_needs_no_accumulator(compiler, monkeypatch):
    monkeypatch.setenv("TPK_BACKEND", "reference")
    attend = torch.compile(prefix_attention, fullgraph=True, backend=compiler)
    q, k, v = (x.detach() for x in leaves((1, 4, 1, 8)))
    for context in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        cache = PrefixCache(1, 8, 1, 8)
        with context():
            outs = [attend(q, k, v, cache) for _ in range(2)]
        assert cache.length == 8 and cache.accumulator is None and outs[1].isfinite().all()


def test_a_compiled_forward_without_an_accumulator_names_the_remedy():
    attend = torch.compile(prefix_attention, fullgraph=True, backend="eager")
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    with pytest.raises(Exception, match=r"cache.require_accumulator\(\) before it"):
        attend(q, q, q, PrefixCache(1, 8, 1, 8))


def test_compiled_checkpointing_of_a_plain_call_with_one_tensor_thrice(monkeypatch):
    monkeypatch.setenv("TPK_BACKEND", "reference")
    q = torch.randn(1, 9, 2, 8, requires_grad=True)

    def step(x):
        return checkpoint(lambda y: prefix_attention(y, y, y), x, use_reentrant=False).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(q), q)[0], torch.autograd.grad(step(q), q)[0])


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_opcheck(cached, monkeypatch):
    """Schema, fake implementations and AOT dispatch; on inputs without gradients, as raw mutating ops need."""
    monkeypatch.setenv("TPK_BACKEND", "reference")
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 6)
    sinks = torch.randn(4)
    starts = Mask.from_documents([[3, 2]]).document_starts
    settings = Settings(True, 3, -1, 0.3, 5.0, False, "")
    places, sums, k_all, v_all = (None,) * 4, (None,) * 5, k, v
    if cached:
        cache = PrefixCache(2, 9, 2, 8, 6)
        cache.k.zero_()
        cache.v.zero_()
        accumulator = cache.require_accumulator()
        accumulator.dk.zero_()
        accumulator.dv.zero_()
        places = (cache.k, cache.v, cache.position, cache.progress)
        sums = (cache.position, cache.progress, accumulator.dk, accumulator.dv, accumulator.state)
        k_all, v_all = cache.k, cache.v
    forward = torch.ops.tpkernels.prefix_attention_forward.default
    arguments = (q, k, v, sinks, starts, *places, None, *settings)
    torch.library.opcheck(forward, arguments)
    out, lse, record = forward(*arguments)
    backward = torch.ops.tpkernels.prefix_attention_backward.default
    torch.library.opcheck(
        backward, (torch.randn_like(out), q, k_all, v_all, out, lse, record, sinks, starts, *sums, *settings)
    )


@pytest.mark.parametrize("strided", [False, True])
def test_fake_results_have_the_real_strides(strided, backend):
    """MagiAttention #137, ComfyUI #15044: fake and real strides differed."""
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 6)
    if strided:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    settings = Settings(True, -1, -1, 0.3, 0.0, False, backend)

    def call(q, k, v):
        forward = torch.ops.tpkernels.prefix_attention_forward(q, k, v, *(None,) * 7, *settings)
        out, lse, record = forward
        gradients = torch.ops.tpkernels.prefix_attention_backward(
            out, q, k, v, out, lse, record, *(None,) * 7, *settings
        )
        return [*forward, *gradients]

    real = call(q, k, v)
    with FakeTensorMode() as mode:
        fake = call(*(mode.from_tensor(x) for x in (q, k, v)))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_a_cache_of_fake_or_meta_tensors_can_be_planned_with():
    assert PrefixCache(1, 8, 1, 8, device="meta").nbytes == 2 * 8 * 8 * 4
    with FakeTensorMode():
        assert PrefixCache(1, 8, 1, 8).k.shape == (1, 8, 1, 8)
