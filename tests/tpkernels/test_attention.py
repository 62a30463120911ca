"""prefix_attention against exact answers, over every case of tpkernels.testing, and what its signature promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from tpkernels import Mask, PrefixCache, backends, invariance_unit, prefix_attention, testing
from tpkernels.testing import CASES, AttentionCase


@pytest.mark.on_gpu_too
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_as_close_as_the_same_precision_reference(case, dtype, backend):
    inputs = testing.make_inputs(case, dtype)
    testing.check(testing.run(inputs, backend=backend), inputs)


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_fp64_is_served_by_the_reference(case):
    inputs = testing.make_inputs(case, torch.float64)
    testing.check(testing.run(inputs), inputs)


# ---- slices ----------------------------------------------------------------------------------------------------------


@st.composite
def sliced_cases(draw):
    """A causal case, and a slicing of its tokens (empty slices too)."""
    slices = draw(st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(lambda lengths: sum(lengths) > 1))
    tokens = sum(slices)
    kv_heads = draw(st.sampled_from([1, 2]))
    documents = None
    if draw(st.booleans()):
        cuts = sorted(
            draw(st.lists(st.integers(0, tokens - 2), max_size=3))
        )  # the last has 2: some gradient is not zero
        documents = (tuple(b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)),)
    case = AttentionCase(
        tokens,
        query_heads=kv_heads * draw(st.sampled_from([1, 3])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([3, 8, 40])),
        window=(draw(st.sampled_from([None, 1, 19])), None),
        documents=documents,
        sinks=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 4.0])),
    )
    return case, slices


@pytest.mark.on_gpu_too
@given(sliced_cases(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_slicing_gives_what_one_shot_gives(backend, drawn, dtype):
    case, slices = drawn
    inputs = testing.make_inputs(case, dtype)
    testing.check(testing.run(inputs, backend=backend, slices=slices), inputs)


@given(sliced_cases())
def test_any_slicing_gives_what_one_shot_gives_in_fp64(drawn):
    case, slices = drawn
    inputs = testing.make_inputs(case, torch.float64)
    testing.check(testing.run(inputs, slices=slices), inputs)


@pytest.mark.parametrize("backend", ["cpu"])  # the reference refuses: test_reference.py
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_results_do_not_depend_on_the_slicing(backend, dtype):
    """Bitwise: out, lse and dq for any slicing; dk and dv too for slices at multiples of the unit."""
    sizes = {"query_heads": 6, "kv_heads": 2, "head_dim": 40}
    unit = invariance_unit(**sizes, dtype=dtype, backend=backend)
    case = AttentionCase(3 * unit + 5, **sizes)
    inputs = testing.make_inputs(case, dtype)
    whole = testing.run(inputs, backend=backend, deterministic=True, slices=[case.tokens])
    testing.check(whole, inputs)
    for slices in ([unit, 2 * unit + 5], [2 * unit, unit, 5], [unit - 1, 2, 2 * unit + 4]):
        result = testing.run(inputs, backend=backend, deterministic=True, slices=slices)
        names = ["out", "lse", "dq"] + (["dk", "dv"] if slices[0] % unit == 0 else [])
        for name in names:
            assert torch.equal(getattr(whole, name), getattr(result, name)), (slices, name)


MASKS = [Mask(window=[None, None]), Mask(window=(3, None)), Mask(window=(None, 2)), Mask.from_documents([4])]


@pytest.mark.parametrize(
    "used",
    [{}, {"softcap": 2.0}, {"sinks": torch.zeros(6)}, {"value_head_dim": 3}, *({"mask": mask} for mask in MASKS)],
    ids=["nothing", "softcap", "sinks", "value head dim", "no window", "left", "right", "documents"],
)
def test_the_unit_is_that_of_the_call_which_attention_makes(used, monkeypatch):
    """A backend's unit may depend on all that a call says of itself."""
    calls = []
    monkeypatch.setattr(backends, "select", lambda call, requested: calls.append(call) or backends.get("cpu"))
    q, k, v = (torch.randn(1, 4, *size) for size in ((6, 8), (2, 8), (2, used.get("value_head_dim", 8))))
    options = {name: value for name, value in used.items() if name != "value_head_dim"}
    prefix_attention(q, k, v, deterministic=True, **options)
    invariance_unit(query_heads=6, kv_heads=2, head_dim=8, **used | ({"sinks": True} if "sinks" in used else {}))
    assert calls[0] == calls[1]


# ---- gradients for what needs them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["q", "k", "v", "sinks", "qv"])
@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_only_what_needs_a_gradient_gets_one(wanted, cached, backend):
    case = AttentionCase(9, 6, sinks=True, cached=cached)
    inputs = testing.make_inputs(case, torch.float32)
    full = testing.run(inputs, backend=backend)
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "sinks": inputs.sinks}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == "sinks" if wanted == "sinks" else name in wanted)
    cache = testing.poisoned_cache(case, torch.float32) if cached else None
    outs = []
    for piece in (slice(0, 6), slice(6, 15)) if cached else (slice(None),):
        tensors = [leaves[name][:, piece] for name in "qkv"]
        outs.append(prefix_attention(*tensors, cache, sinks=inputs.sinks, backend=backend))
    (torch.cat(outs, 1) * inputs.dout).sum().backward()
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, getattr(full, f"d{name}"))


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5)])
def test_a_start_without_a_cache_may_say_what_is_so(queries, keys, backend):
    q, k = torch.randn(1, queries, 2, 8), torch.randn(1, keys, 1, 8)
    expected = prefix_attention(q, k, k, backend=backend)
    assert torch.equal(prefix_attention(q, k, k, start=keys - queries, backend=backend), expected)


def test_one_row_of_documents_is_that_of_the_whole_batch(backend):
    """And holds from the first key on, where there are more queries than keys."""
    q, k, mask = torch.randn(3, 9, 2, 8), torch.randn(3, 7, 2, 8), Mask.from_documents([4, 3])
    pairs = zip(q[:, 2:].split(1), k.split(1), strict=True)
    expected = [prefix_attention(*pair, pair[1], mask=mask, backend=backend) for pair in pairs]
    out = prefix_attention(q, k, k, mask=mask, backend=backend)
    torch.testing.assert_close(out[:, 2:], torch.cat(expected))
    assert not out[:, :2].any()


def test_lse_and_dtypes(backend):
    q = torch.randn(2, 5, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    sinks = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    out, lse = prefix_attention(q, q, q, sinks=sinks, backend=backend, return_lse=True)
    assert out.dtype == torch.bfloat16 and out.is_contiguous() and out.shape == (2, 5, 4, 8)
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, 5) and not lse.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        lse.sum().backward()


def _sliced(x):
    return torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0]


@pytest.mark.parametrize(
    "noted",
    [
        lambda x: torch._neg_view(-x),
        lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
        _sliced,
        lambda x: x[:, :, :, :1].expand(x.shape) if x.dim() == 4 else x[:1].expand(x.shape),
    ],
    ids=["a sign", "zeros", "strides", "one value for all"],
)
@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_what_memory_does_not_say_is_heeded(noted, cached, backend):
    q, k, v, dout = (noted(torch.randn(2, 9, 2, 8)) for _ in range(4))
    sinks = noted(torch.randn(2))

    def results(backend, dtype, q, k, v, sinks, dout):
        leaves = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
        leaves.append(sinks.detach().requires_grad_())
        cache = PrefixCache(2, 9, 2, 8, dtype=dtype) if cached else None
        out = prefix_attention(*leaves[:3], cache, sinks=leaves[3], backend=backend)
        return [out, *torch.autograd.grad(out, leaves, dout.to(dtype))]

    exact = results("reference", torch.float64, *(x.clone() for x in (q, k, v, sinks, dout)))
    for found, expected in zip(results(backend, torch.float32, q, k, v, sinks, dout), exact, strict=True):
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


# ---- the ways torch calls an op --------------------------------------------------------------------------------------


def test_recomputing_a_slice_writes_nothing(backend):
    case = AttentionCase(9, 6)
    inputs = testing.make_inputs(case, torch.float32)
    cache = testing.poisoned_cache(case, torch.float32)
    first = prefix_attention(*(x[:, :6] for x in (inputs.q, inputs.k, inputs.v)), cache, backend=backend)
    prefix_attention(*(x[:, 6:] for x in (inputs.q, inputs.k, inputs.v)), cache, backend=backend)
    before = cache.k.clone(), cache.v.clone(), cache.position.clone()
    nonsense = torch.full_like(inputs.k[:, :6], float("nan"))
    again = prefix_attention(inputs.q[:, :6], nonsense, nonsense, cache, start=0, backend=backend)
    with pytest.raises(ArithmeticError), cache.recomputing(0):
        with cache.recomputing(6):
            assert cache.recomputed_start == 6
        told_by_the_cache = prefix_attention(inputs.q[:, :6], nonsense, nonsense, cache, backend=backend)
        raise ArithmeticError
    assert cache.recomputed_start is None
    assert torch.equal(again, first) and torch.equal(told_by_the_cache, first)
    for old, new in zip(before, (cache.k, cache.v, cache.position), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpointing(reentrant, backend):
    case = AttentionCase(9, 6)
    inputs = testing.make_inputs(case, torch.float32)
    cache = testing.poisoned_cache(case, torch.float32)
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))

    def attend(q, k, v, start):
        return prefix_attention(q * 1, k * 1, v * 1, cache, start=start, backend=backend)

    outs = []
    for piece in (slice(0, 6), slice(6, 15)):
        tensors = (q[:, piece], k[:, piece], v[:, piece])
        outs.append(checkpoint(attend, *tensors, piece.start, use_reentrant=reentrant))
    (torch.cat(outs, 1) * inputs.dout).sum().backward()
    expected = testing.run(inputs, backend=backend)
    for name, leaf in (("dq", q), ("dk", k), ("dv", v)):
        torch.testing.assert_close(leaf.grad, getattr(expected, name))


def test_a_checkpoint_without_start_is_refused(backend):
    """Its recomputation would append the slice a second time."""
    cache = PrefixCache(1, 20, 1, 8)
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    out = checkpoint(lambda x: prefix_attention(x, x, x, cache, backend=backend), q, use_reentrant=False)
    with pytest.raises(ValueError, match=r"recomputed inside a backward.*pass start="):
        out.sum().backward()
    assert cache.length == 4


def test_autocast_takes_its_dtype_or_the_caches(backend):
    q = torch.randn(1, 6, 2, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = prefix_attention(q, q, q, backend=backend)
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        cache = PrefixCache(1, 6, 2, 8)
        kept = prefix_attention(q.bfloat16(), q.bfloat16(), q.bfloat16(), cache, backend=backend)
        assert kept.dtype == torch.float32
        double = prefix_attention(*[q.detach().double()] * 3)
        assert double.dtype == torch.float64
    assert q.grad.dtype == torch.float32
    rounded = q.detach().bfloat16()
    assert torch.equal(out, prefix_attention(rounded, rounded, rounded, backend=backend))
    assert torch.equal(kept, prefix_attention(*[rounded.float()] * 3, backend=backend))  # fp32 inside, not autocast


def test_no_grad_and_inference_mode(backend):
    q = torch.randn(1, 6, 2, 8)
    expected = prefix_attention(q, q, q, backend=backend)
    cache = PrefixCache(1, 6, 2, 8)
    for context in (torch.no_grad, torch.inference_mode):
        cache.reset()
        with context():
            pieces = [prefix_attention(*[q[:, i : i + 3]] * 3, cache, backend=backend) for i in (0, 3)]
            torch.testing.assert_close(torch.cat(pieces, 1), expected)
    assert cache.accumulator is None


@pytest.mark.parametrize("sinks", [False, True])
def test_functional_gradients_are_those_of_backward(backend, sinks):
    q, k, v = torch.randn(2, 7, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    inputs = (q, k, v, torch.randn(4)) if sinks else (q, k, v)

    def loss(q, k, v, sinks=None):
        return prefix_attention(q, k, v, sinks=sinks, backend=backend).square().sum()

    leaves = [x.clone().requires_grad_() for x in inputs]
    loss(*leaves).backward()
    everything = tuple(range(len(inputs)))
    for found in (torch.func.grad(loss, everything)(*inputs), torch.func.vjp(loss, *inputs)[1](torch.tensor(1.0))):
        for gradient, leaf in zip(found, leaves, strict=True):
            assert torch.equal(gradient, leaf.grad)
    pull_back = torch.func.vjp(loss, *inputs)[1]
    with torch.no_grad():  # as an optimizer calls it, when the transform has ended
        assert torch.equal(pull_back(torch.tensor(1.0))[0], leaves[0].grad)


def _transformations(backend):
    """What cannot be had, as (a call of it, what it says)."""
    q = torch.randn(1, 6, 2, 8)
    leaf = q.clone().requires_grad_()

    def attend(x):
        return prefix_attention(x, x, x, backend=backend)

    def attend_with_cache(x):
        return prefix_attention(x, x, x, cache, backend=backend).sum()

    cache = PrefixCache(1, 6, 2, 8)
    out = attend(leaf)
    once = torch.autograd.grad(attend(leaf).sum(), leaf, create_graph=True)[0]
    batched = torch.randn(3, *q.shape)
    vmap, forward = "does not run under torch.vmap.*use the batch dimension", "no forward-mode derivative.*use backward"
    return {
        "vmap": (lambda: torch.vmap(attend)(q[None]), vmap),
        "jacrev": (lambda: torch.func.jacrev(attend)(q), vmap),
        "batched gradients": (lambda: torch.autograd.grad(attend(leaf), leaf, batched, is_grads_batched=True), vmap),
        "jvp": (lambda: torch.func.jvp(attend, (q,), (q,)), forward),
        "jvp of a gradient": (
            lambda: torch.func.jvp(lambda x: torch.autograd.grad(out, leaf, x)[0], (q,), (q,)),
            forward,
        ),
        "dual numbers": (lambda: torch.autograd.functional.jvp(attend, q, q, strict=True), "first derivatives only"),
        "twice": (lambda: once.sum().backward(), "first derivatives only"),
        "twice, torch.func": (
            lambda: torch.func.grad(lambda x: torch.func.grad(lambda y: attend(y).sum())(x).sum())(q),
            "first derivatives only",
        ),
        "cache": (lambda: torch.func.grad(attend_with_cache)(q), "with a cache neither under torch.func.*use backward"),
        "cache made inside": (
            lambda: torch.func.grad(lambda x: prefix_attention(x, x, x, PrefixCache(1, 6, 2, 8)).sum())(q),
            "writes to a cache made under them; use backward",
        ),
    }


@pytest.mark.parametrize("name", [*_transformations(None)])
def test_derivatives_that_do_not_exist_are_refused_clearly(backend, name):
    call, message = _transformations(backend)[name]
    with pytest.raises(NotImplementedError, match=message):
        call()


# ---- bad input -------------------------------------------------------------------------------------------------------


def tensors(q=(1, 4, 4, 8), k=(1, 4, 2, 8), v=(1, 4, 2, 8), dtype=torch.float32):
    return torch.zeros(q, dtype=dtype), torch.zeros(k, dtype=dtype), torch.zeros(v, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (tensors(q=(4, 4, 8)), {}, r"must be \[batch, tokens, heads, head_dim\], got q \[4, 4, 8\]"),
        (tensors(q=(1, 4, 3, 8)), {}, "3 query heads cannot be shared out over 2 KV heads"),
        (tensors(k=(1, 4, 0, 8), v=(1, 4, 0, 8)), {}, "4 query heads cannot be shared out over 0 KV heads"),
        (tensors(k=(1, 4, 2, 9)), {}, r"shapes do not fit: q \[1, 4, 4, 8\], k \[1, 4, 2, 9\]"),
        (tensors(k=(2, 4, 2, 8)), {}, "share batch"),
        (tensors(v=(1, 3, 2, 8)), {}, "share batch, tokens and heads"),
        (tensors(q=(1, 4, 4, 0), k=(1, 4, 2, 0)), {}, "every head_dim is 1 or more"),
        (tensors(dtype=torch.int32), {}, "one dtype out of float32.*int32"),
        ((*tensors()[:2], tensors(dtype=torch.bfloat16)[2]), {}, "got torch.float32, torch.float32, torch.bfloat16"),
        ((*tensors()[:2], tensors()[2].to("meta")), {}, "are on cpu, cpu, meta; move them"),
        (tensors(), {"scale": float("nan")}, "scale is nan; it must be finite"),
        (tensors(), {"scale": 1e38}, "scale is 1e\\+38; it must be finite in fp32"),
        (tensors(), {"softcap": 1e-39}, "softcap is 1e-39; it must be 0"),
        (tensors(), {"softcap": -1.0}, r"softcap is -1.0; it must be 0 \(off\) or positive"),
        (tensors(), {"sinks": torch.zeros(2)}, r"sinks is \[2\] on cpu; it needs one value per query head, \[4\]"),
        (tensors(), {"start": 3}, r"start=3 without a cache, where it is keys - queries = 4 - 4 = 0"),
        (tensors(), {"mask": Mask.from_documents([[2], [2]])}, "document_starts has 2 rows.*needs 1"),
        (tensors(), {"mask": Mask.from_documents([[2]])}, "queries end at position 4.*covers 2 positions"),
        (tensors(k=(1, 5, 2, 8), v=(1, 5, 2, 8)), {"cache": (1, 9, 2, 8)}, "same slice, got 4 queries and 5 keys"),
        (tensors(), {"cache": (1, 9, 1, 8)}, r"k is \[1, 4, 2, 8\] but the cache holds \[1, 9, 1, 8\]"),
        (tensors(), {"cache": (1, 9, 2, 8, 7)}, r"v is \[1, 4, 2, 8\] but the cache holds \[1, 9, 2, 7\]"),
        (tensors(dtype=torch.bfloat16), {"cache": (1, 9, 2, 8)}, "bfloat16 on cpu but the cache holds torch.float32"),
    ],
)
def test_bad_input_names_the_values_and_the_remedy(arguments, settings, message):
    cache = PrefixCache(*settings["cache"]) if "cache" in settings else None
    settings = {name: value for name, value in settings.items() if name != "cache"}
    with pytest.raises(ValueError, match=message):
        prefix_attention(*arguments, cache, backend="reference", **settings)
    assert cache is None or cache.length == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": {}}, r"cache is a dict; it must be a PrefixCache"),
        ({"mask": torch.ones(3, 3, dtype=torch.bool)}, r"mask is a Tensor; it must be a tpkernels.Mask"),
        ({"q": [[1.0]]}, r"q is a list; it must be a torch.Tensor"),
        ({"sinks": [1.0]}, r"sinks is a list; it must be a torch.Tensor or None"),
    ],
    ids=["cache", "mask", "q", "sinks"],
)
def test_an_argument_of_another_type_is_named(options, message):
    arguments = {name: torch.ones(1, 3, 1, 8) for name in "qkv"} | options
    with pytest.raises(TypeError, match=message):
        prefix_attention(**arguments)


def test_a_window_that_is_one_number_and_a_cache_of_integers_are_refused():
    with pytest.raises(ValueError, match=r"window is \(left, right\), got 8"):
        Mask(window=8)
    with pytest.raises(TypeError, match=r"window right is 1.5; it must be a number of tokens"):
        Mask(window=(None, 1.5))
    with pytest.raises(ValueError, match=r"dtype is torch.int32; it must be a floating-point"):
        PrefixCache(1, 4, 1, 8, dtype=torch.int32)
