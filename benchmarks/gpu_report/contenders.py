"""Our backends and their peers, each as jobs on one problem: forward, and backward that adds into a gradient cache.

Ours write into the fp32 accumulators themselves. A peer does its own backward into fresh tensors, then `add_` into
fp32 accumulators: the same work. All see a causal mask aligned at the bottom right, q [B,T,Hq,D], k, v [B,S,Hkv,D].

The one trap: torch falls back from one attention to another without a word, so each peer here is asked for by an
operator or a context that raises instead. Nothing here has a default for a peer that is missing: it is Refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_report.shapes import Shape
from tpkernels import backends
from tpkernels.mask import RawMask

CAUSAL = RawMask(True, -1, -1, None)
DENSE_MASK_BYTES = 4 << 30  # more than this is no way to give a mask


class Refused(Exception):
    """A contender that is not here or does not serve a shape; the text says why."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A shape with its inputs."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype, device: str) -> Problem:
        """Random normal inputs: zeros would draw less power and run faster."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(tokens: int, heads: int) -> Tensor:
            size = (shape.batch, tokens, heads, shape.head_dim)
            return torch.randn(*size, generator=generator, dtype=dtype, device=device)

        q, dout = (normal(shape.tokens, shape.query_heads) for _ in range(2))
        k, v = (normal(shape.keys, shape.kv_heads) for _ in range(2))
        return cls(shape, q, k, v, dout)

    @property
    def scale(self) -> float:
        """1 / sqrt(head_dim)."""
        return float(self.shape.head_dim**-0.5)


class Results(NamedTuple):
    """What is checked, in [B, tokens, heads, head_dim]; gradients are None before a backward."""

    out: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


class Jobs(NamedTuple):
    """forward() first, then backward() any number of times; results() after the first of either."""

    forward: Callable[[], object]
    backward: Callable[[], object]
    results: Callable[[], Results]


def _ours(name: str, deterministic: bool, problem: Problem) -> Jobs:
    try:
        backend = backends.get(name)
    except ValueError as error:
        raise Refused(str(error)) from error
    shape, q, k, v = problem.shape, problem.q, problem.k, problem.v
    call = backends.AttentionCall(
        q.device.type, q.dtype, shape.query_heads, shape.kv_heads, shape.head_dim, shape.head_dim,
        deterministic=deterministic,
    )  # fmt: skip
    reason = backend.refuses(call)
    if reason is not None:
        raise Refused(reason)
    out, dq = torch.empty_like(q), torch.empty_like(q)
    lse = torch.empty(shape.batch, shape.query_heads, shape.tokens, device=q.device)
    sums: list[Tensor] = []
    settings = backends.RawSettings(shape.prefix, CAUSAL, problem.scale, deterministic=deterministic)

    def backward() -> None:
        if not sums:
            sums.extend(torch.zeros(x.shape, device=x.device) for x in (k, v))
        backend.backward(
            problem.dout, q, k, v, out, lse, dq=dq, dk=sums[0], dv=sums[1], dsinks=None, settings=settings
        )  # fmt: skip

    return Jobs(
        lambda: backend.forward(q, k, v, out=out, lse=lse, settings=settings),
        backward,
        lambda: Results(out, dq, *sums) if sums else Results(out, None, None, None),
    )


def _peer(problem: Problem, attention: Callable[[Tensor, Tensor, Tensor], Any], *, heads_first: bool) -> Jobs:
    """Jobs of a function that autograd knows. Leaves are views of the problem's tensors, as in a model; without grad
    mode there is a forward only."""

    def view(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if heads_first else x

    leaves = [view(x).detach().requires_grad_(torch.is_grad_enabled()) for x in (problem.q, problem.k, problem.v)]
    dout = view(problem.dout)
    graph: list[Tensor] = []
    gradients: list[Tensor] = []  # dq, then the cache's sums of dk and dv

    def forward() -> None:
        result = attention(*leaves)
        graph[:] = [result[0] if isinstance(result, tuple) else result]

    def backward() -> None:
        dq, dk, dv = torch.autograd.grad(graph[0], leaves, dout, retain_graph=True)
        if not gradients:
            gradients.extend([dq, *(torch.zeros_like(x, dtype=torch.float32) for x in (dk, dv))])
        gradients[0] = dq
        gradients[1].add_(dk)
        gradients[2].add_(dv)

    def results() -> Results:
        out = view(graph[0].detach())
        return Results(out, *map(view, gradients)) if gradients else Results(out, None, None, None)

    return Jobs(forward, backward, results)


def _sdpa_flash(problem: Problem) -> Jobs:
    """The operator behind causal_lower_right: its is_causal is aligned at the bottom right. Its backward is torch's."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash(q, k, v, 0.0, True, False, scale=problem.scale)[0]

    return _peer(problem, attention, heads_first=True)


def _sdpa_cudnn(problem: Problem) -> Jobs:
    """cuDNN through SDPA, whose is_causal is aligned at the top left: behind a prefix it takes a dense mask."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape, mask = problem.shape, None
    if shape.prefix:
        if 2 * shape.tokens * shape.keys > DENSE_MASK_BYTES:
            raise Refused(f"a dense mask of {shape.tokens} x {shape.keys} is too large")
        mask = torch.ones(shape.tokens, shape.keys, dtype=torch.bool, device=problem.q.device).tril(shape.prefix)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=problem.scale, enable_gqa=shape.group > 1
            )

    return _peer(problem, attention, heads_first=True)


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 1000  # one a shape, as its users have it
    return torch.compile(flex_attention, dynamic=False)


def _flex(problem: Problem) -> Jobs:
    """FlexAttention: compiled, as it is meant to be used (eager on a CPU, where it is only a test)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    prefix, shape = problem.shape.prefix, problem.shape

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + prefix >= key

    device = problem.q.device.type
    mask = create_block_mask(sees, None, None, shape.tokens, shape.keys, device=device)
    function = _compiled_flex() if device == "cuda" else flex_attention

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k, v, block_mask=mask, scale=problem.scale, enable_gqa=shape.group > 1)

    return _peer(problem, attention, heads_first=True)


def _flash_attn(module: str, problem: Problem) -> Jobs:
    """The package of Dao-AILab: flash_attn (2) or flash_attn_interface (3)."""
    try:
        function = __import__(module).flash_attn_func
    except Exception as error:  # a package built for another torch raises whatever it likes
        raise Refused(f"{module} cannot be imported ({type(error).__name__}: {error})") from error

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return function(q, k, v, softmax_scale=problem.scale, causal=True)

    return _peer(problem, attention, heads_first=False)


OURS: dict[str, Callable[[Problem], Jobs]] = {
    f"{name}{' deterministic' if deterministic else ''}": functools.partial(_ours, name, deterministic)
    for name in ("triton", "cuda", "cpu")
    for deterministic in (False, True)
}
PEERS: dict[str, Callable[[Problem], Jobs]] = {
    "SDPA flash": _sdpa_flash,
    "SDPA cuDNN": _sdpa_cudnn,
    "flash-attn 2": functools.partial(_flash_attn, "flash_attn"),
    "flash-attn 3": functools.partial(_flash_attn, "flash_attn_interface"),
    "FlexAttention": _flex,
}
