"""What tests of attention functions share: inputs, the definition of attention, and a check by its own rounding."""

from __future__ import annotations

import math

import torch

from tpkernels import testing


def leaves(*shapes, dtype=torch.float32, factor=1.0):
    return [(torch.randn(shape) * factor).to(dtype).requires_grad_() for shape in shapes]


def grads(out, dout, *inputs):
    return torch.autograd.grad(out, inputs, dout)


def cumulative(*values):
    return torch.tensor(values, dtype=torch.int32)


def detached(tensors, dtype):
    return [x.detach().to(dtype).requires_grad_() for x in tensors]


def formula(q, k, v, visible, *, scale=None, softcap=0.0):
    """out and lse by the definition; visible bool [batch or 1, tokens, keys]; a row that sees nothing: 0, -inf."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    empty = ~visible.any(-1)[:, None, :, None]
    lse = scores.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True)
    weights = torch.exp(scores - lse)  # not torch.softmax, whose gradient is exactly 0 in a row of one key
    return torch.einsum("bhts,bshd->bthd", weights, v), lse.masked_fill(empty, -math.inf)[..., 0]


def check(function, oracle, tensors, *, dout=None):
    """function(*tensors) and its gradients against oracle(*tensors) in fp64, by the oracle's error in their dtype. A
    gradient that is zero by mathematics (one visible key a row) may be off by the fp32 rounding of what cancels."""
    dtype = tensors[0].dtype
    results = []
    for call, precision in ((function, dtype), (oracle, dtype), (oracle, torch.float64)):
        inputs = detached(tensors, precision)
        out = call(*inputs)
        dout = torch.randn_like(out.detach()) if dout is None else dout
        gradients = torch.autograd.grad(out, inputs, dout.to(precision), allow_unused=True)
        results.append(
            [out.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(gradients, inputs, strict=True))]
        )
    terms = (dout.double() * results[-1][0]).abs().sum(-1)
    cancelling = float(terms.max() * max(x.abs().max() for x in tensors)) if terms.numel() else 0.0
    losses = [relative(other, exact) for _, other, exact in zip(*results, strict=True)]
    for i, (actual, _, exact) in enumerate(zip(*results, strict=True)):
        assert actual.shape == exact.shape and actual.dtype == dtype
        if exact.numel():
            error = float((actual.double() - exact).abs().max())
            allowed = (3 if i else 2) * max(losses) * float(exact.abs().max()) + testing.noise(exact, dtype)
            if i and not exact.any():
                allowed += 4 * torch.finfo(torch.float32).eps * cancelling
            assert error <= allowed, (("out", *"qkv")[i], error, allowed)


def relative(other, exact):
    return float((other.double() - exact).abs().max() / exact.abs().max()) if exact.any() else 0.0


def flash_visible(tokens, keys, causal, window):
    """As flash-attn documents it: bottom-right; a window keeps [i + Sk - Sq - left, i + Sk - Sq + right]."""
    i = torch.arange(tokens)[:, None] + keys - tokens
    j = torch.arange(keys)[None]
    left, right = window
    visible = torch.ones(tokens, keys, dtype=torch.bool)
    if causal:
        visible &= j <= i
    if left >= 0:
        visible &= j >= i - left
    if right >= 0:
        visible &= j <= i + right
    return visible[None]


def nan_cache(batch, capacity, kv_heads, dim, lengths, dtype=torch.float32):
    """k and v caches, NaN but for the first lengths[b] tokens of row b."""
    caches = [torch.full((batch, capacity, kv_heads, dim), math.nan, dtype=dtype) for _ in range(2)]
    for cache in caches:
        for row, length in enumerate(lengths):
            cache[row, :length] = torch.randn(length, kv_heads, dim)
    return caches
