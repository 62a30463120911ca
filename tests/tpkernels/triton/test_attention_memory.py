"""What the Triton kernels may read and write, and how far: bugs that other attention kernels had, as cases for ours.

Memory that no mask shows is NaN, and must not be seen; offsets and grids go beyond 32 and 16 bits. Each docstring names
where the bug was found; FA is Dao-AILab/flash-attention.
"""

from __future__ import annotations

import math

import pytest
import torch

from tpkernels import Mask, prefix_attention, testing
from tpkernels.testing import AttentionCase

# numpy, which the interpreter computes with, warns of exp(-inf) and 0 / 0 in rows that see no key.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_memory_behind_the_slice_never_leaks(deterministic, device):
    """pytorch #176793, FA PR #2324, FA #2709: uninitialised memory behind the last token reached results. Cache and
    accumulators are NaN where nothing was written, and stay so."""
    case = AttentionCase(30, 29, batch=2, query_heads=3, kv_heads=1, head_dim=40)
    cache = testing.poisoned_cache(case, torch.float32, spare=50, device=device)
    inputs = testing.make_inputs(case, torch.float32, device=device)
    testing.check(testing.run(inputs, backend="triton", cache=cache, deterministic=deterministic), inputs)
    sums = cache.accumulator
    for tensor in (cache.k, cache.v, sums.dk, sums.dv):
        assert tensor[:, 59:].isnan().all() and tensor[:, :59].isfinite().all()


@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("kind", ["window", "documents", "split", "empty rows"])
def test_what_the_mask_hides_from_all_does_not_matter(kind, deterministic, poison, device):
    """0 times NaN: keys and values that no query sees, queries and their dout that see no key, within partial tiles."""
    tokens, keys, settings = 40, 113, {"mask": Mask(window=(21, None))}
    hidden_keys, hidden_rows = keys - tokens - 21, 0
    if kind == "documents":
        settings = {"mask": Mask.from_documents([[60, 20, 33]], device=device)}
        hidden_keys = 60
    elif kind == "split":
        tokens, keys, settings = 3, 500, {"mask": Mask(window=(300, None))}
        hidden_keys = keys - tokens - 300
    elif kind == "empty rows":
        tokens, keys, settings, hidden_keys, hidden_rows = 75, 35, {}, 0, 40
    q, dout = (torch.randn(1, tokens, 6, 24, device=device) for _ in range(2))
    k, v = (torch.randn(1, keys, 2, 24, device=device) for _ in range(2))
    results = []
    for fill in (0.0, poison):
        k[:, :hidden_keys], v[:, :hidden_keys] = fill, fill
        q[:, :hidden_rows], dout[:, :hidden_rows] = fill, fill
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = prefix_attention(*inputs, backend="triton", deterministic=deterministic, return_lse=True, **settings)
        results.append((out, lse, *torch.autograd.grad(out, inputs, dout)))
    for name, clean, poisoned in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        torch.testing.assert_close(poisoned, clean, rtol=1e-6, atol=1e-6, msg=name)
        assert name == "lse" or poisoned.isfinite().all(), name


def test_accumulators_are_added_to_and_unseen_rows_keep_their_bits(device):
    """The gradient cache starts non-zero; keys before the window keep 0.1 to the bit, and NaN stays NaN."""
    from tpkernels import backends
    from tpkernels.backends import RawSettings
    from tpkernels.mask import RawMask

    backend = backends.get("triton")
    q, dout = torch.randn(1, 20, 2, 16, device=device), torch.randn(1, 20, 2, 16, device=device)
    k, v = torch.randn(1, 150, 1, 16, device=device), torch.randn(1, 150, 1, 16, device=device)
    settings = RawSettings(130, RawMask(True, 10, -1, None), 0.25, deterministic=True)
    out, lse = torch.empty_like(q), torch.empty(1, 2, 20, device=device)
    backend.forward(q, k, v, out=out, lse=lse, settings=settings)
    results = []
    for fill in (0.0, 0.1, math.nan):
        store = torch.full((3, 160, 18), fill, device=device)  # the views take a part of it
        dk = store.transpose(0, 1)[None, 5:155, 1:2, 1:17]
        dv, dq = torch.full_like(v, fill), torch.empty_like(q)
        settings = settings._replace(deterministic=fill != 0.1)
        backend.backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, dsinks=None, settings=settings)
        results.append((dk.clone(), dv))
        dk.fill_(fill)
        assert torch.equal(store.nan_to_num(7.0), torch.full_like(store, fill).nan_to_num(7.0))
    (dk, dv), (dk_more, dv_more), (dk_nan, dv_nan) = results
    for plain, more, nan in ((dk, dk_more, dk_nan), (dv, dv_more, dv_nan)):
        assert (more[:, :120] == torch.tensor(0.1)).all() and (plain[:, 120:] != 0).any()
        torch.testing.assert_close(more, plain + 0.1, rtol=1e-5, atol=1e-5)
        assert nan.isnan().all()


def test_offsets_beyond_two_to_the_31(device, monkeypatch):
    """FA #2611, PR #1500, PR #2260, #1311, #407, pytorch #190857, fla #1080: 32-bit offsets wrapped. One buffer with
    strides of more than 2^31 elements between batch rows, tokens or heads; few pages of it are ever touched."""
    if device == "cpu":
        from triton.runtime import interpreter

        # CPU tensors are written in place; copying all of a huge storage onto itself would touch every page of it.
        monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    far = 2**31 + 64
    buffer = torch.empty(far + 8192, dtype=torch.float16, device=device)
    layouts = {
        "batch": ((2, 5, 2, 8), (far, 16, 8, 1)),
        "token": ((1, 2, 2, 8), (16, far, 8, 1)),
        "head": ((1, 5, 2, 8), (16, 8, far, 1)),
    }
    for name, (shape, strides) in layouts.items():
        small = torch.randn(4, *shape, device=device).half()
        views = []
        for i in range(4):
            view = buffer[i * 1024 :].as_strided(shape, strides)
            view.copy_(small[i])
            views.append(view)
        results = []
        for q, k, v, dout in (views, list(small)):
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            out = prefix_attention(q, k, v, backend="triton", deterministic=True)
            results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b), name


def meta(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dim"),
    [(8300, 1, 16, 128), (28800, 15, 16, 72), (65536, 2, 8, 64), (1, 225304, 76, 128)],
)
def test_grids_have_one_dimension_that_holds_everything(batch, tokens, heads, dim, device):
    """FA PR #2260, #1311, #2611: batch times heads beyond 65535, what a grid's y and z hold. Planned, not run."""
    from tpkernels.backends import RawSettings
    from tpkernels.mask import RawMask
    from tpkernels.triton.plan_backward import plan_backward
    from tpkernels.triton.plan_forward import plan_forward

    x, lse = meta(batch, tokens, heads, dim), torch.empty(batch, heads, tokens, device="meta")
    settings = RawSettings(0, RawMask(True, -1, -1, None), 1.0)
    sums = torch.empty(x.shape, device="meta")
    plans = plan_forward(x, x, x, out=x, lse=lse, settings=settings, architecture="sm90", processors=132)
    plans += plan_backward(
        x, x, x, x, x, lse, dq=x, dk=sums, dv=sums, dsinks=None, settings=settings, architecture="sm90", processors=132,
    )  # fmt: skip
    for item in plans:
        rows = item.constants.get("BLOCK_N" if item.kernel.__name__.endswith("keys") else "BLOCK_M")
        assert item.grid >= batch * heads * -(-tokens // rows) and item.grid < 2**31
    with pytest.raises(ValueError, match=r"needs \d+ programs, more than a grid's 2147483647; split the batch"):
        huge = meta(2**28, 2, 8, 64)
        plan_forward(
            huge, huge, huge, out=huge, lse=torch.empty(2**28, 8, 2, device="meta"), settings=settings,
            architecture="sm90", processors=132,
        )  # fmt: skip
    with pytest.raises(ValueError, match="exceed 1073741824; use fewer tokens a call"):
        long = meta(1, 2**27 + 1, 16, 64)
        plan_forward(
            long, long[:, :, :1], long[:, :, :1], out=long, lse=torch.empty(1, 16, 2**27 + 1, device="meta"),
            settings=settings, architecture="sm90", processors=132,
        )  # fmt: skip
