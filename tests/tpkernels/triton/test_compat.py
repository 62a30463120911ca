"""The drop-in functions on the Triton kernels, against the same calls on the reference backend, which test_compat*.py
compare with torch and with formulas. Packed sequences run on kernels of their own here (varlen.py)."""

from __future__ import annotations

import math
import types

import pytest
import torch

from tpkernels import backends
from tpkernels.compat import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    register_with_transformers,
    scaled_dot_product_attention,
)

# numpy, which the interpreter computes with, warns of exp(-inf) and 0 / 0 in rows that see no key.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def same(device, monkeypatch):
    """same(call, *shapes): call(q, k, v) -> (out, lse or None) and all gradients, on triton and by the reference."""

    def run(call, *shapes, factor=1.0):
        tensors = [(factor * torch.randn(shape)).to(device).requires_grad_() for shape in shapes]
        results = []
        for backend in ("triton", "reference"):
            monkeypatch.setenv("TPK_BACKEND", backend)
            out, lse = call(*tensors)
            results.append([out, *torch.autograd.grad(out, tensors, torch.ones_like(out) * out.detach().cos()), lse])
        for a, b in zip(*results, strict=True):
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
        return results[0]

    return run


def cumulative(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def varlen(cu_q, cu_k, **settings):
    def call(q, k, v):
        lengths = (int(cu_q.diff().max()), int(cu_k.diff().max()))
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, *lengths, return_attn_probs=True, **settings)[:2]

    return call


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "settings"),
    [
        ((0, 19, 20, 53), (0, 19, 20, 53), {"causal": True, "window_size": (9, -1)}),
        ((0, 4, 4, 13, 40), (0, 4, 9, 9, 75), {"causal": True, "softcap": 3.0}),
        ((0, 4, 4, 13, 40), (0, 4, 9, 9, 75), {"deterministic": False}),
    ],
    ids=["same", "apart", "full"],
)
def test_packed_sequences(cu_q, cu_k, settings, same, device):
    """With 3 rows of q and 5 of k behind the last sequence."""
    call = varlen(cumulative(*cu_q, device=device), cumulative(*cu_k, device=device), **settings)
    out, dq, dk, dv, lse = same(call, (cu_q[-1] + 3, 4, 8), (cu_k[-1] + 5, 2, 8), (cu_k[-1] + 5, 2, 8))
    assert (out[-3:] == 0).all() and (lse[:, -3:] == -math.inf).all() and (dq[-3:] == 0).all()
    assert (dk[-5:] == 0).all() and (dv[-5:] == 0).all()


def test_packed_pieces_with_fewer_keys_than_queries_are_finite(same, device):
    """FA #443 as it is: cu_q=[0, 76, 110, 256], cu_k=[0, 1, 2, 3], head_dim 32, inputs times 3, causal: dQ was NaN."""
    call = varlen(cumulative(0, 76, 110, 256, device=device), cumulative(0, 1, 2, 3, device=device), causal=True)
    out, dq, _, _, _ = same(call, (256, 1, 32), (3, 1, 32), (3, 1, 32), factor=3)
    seen = out.any(-1)[:, 0].nonzero().flatten().tolist()
    assert seen == [75, 109, 255] and dq.isfinite().all()


def test_sequences_without_queries_or_keys(same, device):
    """FA #2562, #1713, PR #2568, a sixteenth of its lengths: keys without queries had uninitialised gradients."""
    cu_q, cu_k = cumulative(0, 0, 75, 128, 128, device=device), cumulative(0, 158, 267, 320, 512, device=device)
    _, _, dk, dv, _ = same(varlen(cu_q, cu_k, causal=True), (128, 1, 8), (512, 1, 8), (512, 1, 8))
    for x in (dk, dv):
        assert (x[:158] == 0).all() and (x[320:] == 0).all() and (x[158:320] != 0).any()


def test_nothing_uninitialised_comes_out(same, device):
    """pytorch #176793, FA PR #2324: with an allocator that gives NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3, device=device).isnan().all()
        call = varlen(cumulative(0, 5, 9, device=device), cumulative(0, 3, 14, device=device), causal=True)
        assert all(x.isfinite().all() for x in same(call, (30, 4, 8), (40, 2, 8), (40, 2, 8))[:4])
        flash = lambda q, k, v: (flash_attn_func(q, k, v, causal=True, window_size=(3, -1)), None)  # noqa: E731
        assert all(x.isfinite().all() for x in same(flash, (1, 9, 4, 8), (1, 40, 2, 8), (1, 40, 2, 8))[:4])
        assert all(x.isfinite().all() for x in same(flash, (1, 40, 4, 8), (1, 9, 2, 8), (1, 9, 2, 8))[:4])
    finally:
        torch.use_deterministic_algorithms(False)


def test_packed_sequences_run_on_their_own_kernels(device, monkeypatch):
    """One launch for all sequences, not one for each, and running totals on a GPU are not read."""
    from tpkernels.triton import varlen as kernels

    calls = []
    original = kernels.varlen_forward
    monkeypatch.setattr(kernels, "varlen_forward", lambda *a, **k: calls.append(k["lengths"]) or original(*a, **k))
    monkeypatch.setenv("TPK_BACKEND", "triton")
    call = varlen(cumulative(0, 3, 9, device=device), cumulative(0, 3, 9, device=device), causal=True)
    call(*(torch.randn(9, 2, 8, device=device) for _ in range(3)))
    assert len(calls) == 1 and calls[0].max_q == 6


def test_packed_sequences_are_not_left_to_a_backend_without_kernels_for_them(device, monkeypatch):
    """The cuda backend comes first on a GPU, but would take the sequences one by one, after reading their lengths. It
    has to, where triton refuses the call."""
    monkeypatch.delenv("TPK_BACKEND", raising=False)
    lengths = []
    cuda = types.SimpleNamespace(name="cuda", forward=lambda q, *_, **outputs: lengths.append(q.shape[1]))
    monkeypatch.setattr(backends, "select", lambda call, requested: cuda)
    call = varlen(cumulative(0, 3, 9, device=device), cumulative(0, 3, 9, device=device), causal=True)
    tensors = [torch.randn(9, 2, 8, device=device) for _ in range(3)]
    assert call(*tensors)[0].isfinite().all() and not lengths
    monkeypatch.setattr(backends.get("triton"), "refuses", lambda call: "not this one")
    call(*tensors)
    assert lengths == [9]


def test_a_cache_with_rows_of_different_lengths(same, device):
    lengths = cumulative(0, 7, 40, device=device)
    caches = [torch.full((3, 50, 2, 8), math.nan, device=device) for _ in range(2)]
    for row, length in enumerate(lengths.tolist()):
        for cache in caches:
            cache[row, :length] = torch.randn(length, 2, 8, device=device)

    def call(q, k, v):
        return flash_attn_with_kvcache(
            q, *caches, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True
        )  # fmt: skip

    same(call, (3, 3, 4, 8), (3, 3, 2, 8), (3, 3, 2, 8))


@pytest.mark.parametrize("kind", ["padded on the left", "padded on the right", "band", "top left"])
def test_boolean_masks(kind, same, device):
    i, j = torch.arange(37, device=device)[:, None], torch.arange(41, device=device)[None]
    rows = torch.arange(2, device=device)[:, None, None, None]
    masks = {
        "padded on the left": (j <= i + 4) & (j >= 9 * rows),
        "padded on the right": (j <= i + 4) & (j < 40 - 9 * rows),
        "band": (i - j).abs() <= 5,
        "top left": None,
    }

    def call(q, k, v):
        settings = {"attn_mask": masks[kind], "is_causal": masks[kind] is None, "enable_gqa": True}
        return scaled_dot_product_attention(q, k, v, **settings), None

    same(call, (2, 4, 37, 8), (2, 2, 41, 8), (2, 2, 41, 8))


def test_a_padded_transformers_model(device, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    register_with_transformers()
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.2, use_cache=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tpkernels").to(device)
    ids, padding = torch.randint(0, 31, (2, 11), device=device), torch.ones(2, 11, dtype=torch.long, device=device)
    padding[0, :4] = 0
    results = []
    for backend in ("triton", "reference"):
        monkeypatch.setenv("TPK_BACKEND", backend)
        model.zero_grad()
        logits = model(ids, attention_mask=padding).logits[padding.bool()]
        logits.logsumexp(-1).pow(2).mean().backward()
        results.append([logits.detach(), *(x.grad.clone() for x in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
