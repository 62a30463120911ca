"""A transformer block as one node of the graph, where one call can compute it: eager, CPU, fp32, or bf16 with AMX.

`whole_block` gives None where it cannot; then the block runs as the pieces of half_blocks.py, in fp32 with the same
bits. The one trap is theirs too: gradients may be added to parameters' `.grad` in place, where the engine owns it
(layer.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from terapipe.layer import Entry, Out, owned_gradient
from terapipe.models.half_blocks import Piece, parameters_of
from tpkernels import Mask, PrefixCache
from tpkernels.block import MODULES, BlockShape, block_backward, block_forward, fits, served
from tpkernels.fused import parameter_gradient, refuse_second_derivative
from tpkernels.fused_rows import turns_fit
from tpkernels.memory import readable

if TYPE_CHECKING:
    from terapipe.models.transformer import Block


class _Call(NamedTuple):
    shape: BlockShape
    cache: PrefixCache
    mask: Mask
    turns: Tensor | None
    entry: Entry | None
    out: Out | None


def whole_block(
    block: Block,
    hidden: Tensor,
    cache: PrefixCache | None,
    mask: Mask,
    turns: Tensor | None,
    *,
    entry: Entry | None,
    out: Out | None,
) -> Tensor | None:
    """What `Block.forward` returns, or None: then nothing has happened yet."""
    if type(cache) is not PrefixCache or not isinstance(mask, Mask):
        return None
    parameters = parameters_of(hidden, *(getattr(block, name) for name in MODULES))
    if parameters is None or not hidden.numel() or not served(block.shape, hidden.dtype, mask):
        return None
    x = hidden.contiguous()
    if not fits(block.shape, x, parameters, cache) or not _as_planned(block, x, mask, turns):
        return None  # the pieces say what is wrong, if anything is
    if torch.is_grad_enabled() and any(each is not None and each.is_inference() for each in (hidden, *parameters)):
        return None  # autograd refuses to save them: the pieces hear of it before they write to the cache
    result: Tensor = _WholeBlock.run(hidden, _Call(block.shape, cache, mask, turns, entry, out), *parameters)
    return result


def _as_planned(block: Block, x: Tensor, mask: Mask, turns: Tensor | None) -> bool:
    """Whether the norms are still those that the block was made with, its GEMMs are wanted in fp32, and documents and
    turns fit x [batch, tokens, hidden]."""
    shape, documents = block.shape, mask.document_starts
    for norm in (block.attention_norm, block.mlp_norm):
        if norm.eps != shape.eps or norm.rms != shape.rms:
            return False
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    if x.dtype == torch.float32 and precision not in ("none", "ieee"):
        return False
    if documents is not None and (documents.shape[0] not in (1, x.shape[0]) or not documents.is_cpu):
        return False
    if turns is not None and turns.dtype != torch.complex64:
        return False
    return turns_fit(turns, *x.shape[:2], head_dim=shape.head_dim)


class _WholeBlock(Piece):
    """(hidden, call, weight and bias of each of MODULES) -> hidden."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, call: _Call, *parameters: Tensor | None) -> Tensor:
        x = hidden.contiguous()
        turns = None if call.turns is None else call.turns.flatten(0, 2).contiguous().resolve_conj().resolve_neg()
        normed = None if call.entry is None else call.entry.normed
        if normed is not None:
            normed = normed._replace(out=normed.out.contiguous())
        made, run = block_forward(
            call.shape, x, parameters, call.cache, call.mask, turns=turns, normed=normed, apart=call.out is not None
        )
        ctx.save_for_backward(x, *parameters, *run.saved)  # not in ctx.run: hooks see them, and a backward frees them
        ctx.call, ctx.run = call._replace(out=None), run._replace(saved=())
        if call.out is None:
            return made
        middle = run.saved[0]
        assert middle is not None
        return call.out(made, middle.view(x.shape))

    @staticmethod
    def backward(ctx: Any, dhidden: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        x, *saved = ctx.saved_tensors
        call, needs = ctx.call, ctx.needs_input_grad[2:]
        parameters, run = saved[: len(needs)], ctx.run._replace(saved=saved[len(needs) :])
        if not fits(call.shape, x, parameters, call.cache):
            raise RuntimeError(
                "terapipe.models: since its forward a parameter of a block, or its cache, has got another size, dtype, "
                "device or layout; run the backward of every slice before half(), to() and the like"
            )
        wanted = [parameter if need else None for parameter, need in zip(parameters, needs, strict=True)]
        owned = [owned_gradient(parameter) for parameter in wanted]
        new = [
            torch.zeros_like(parameter, dtype=torch.float32) if parameter is not None and gradient is None else None
            for parameter, gradient in zip(wanted, owned, strict=True)
        ]
        gradients = [ours if ours is not None else fresh for ours, fresh in zip(owned, new, strict=True)]
        entry = call.entry  # whose gradient may have been given since the forward
        dx = None if entry is None or entry.gradient is None else entry.gradient()
        if dx is None or dx.shape != x.shape or dx.dtype != x.dtype or not dx.is_cpu or not dx.is_contiguous():
            dx = torch.empty_like(x)
        dout = readable(dhidden).contiguous()
        block_backward(call.shape, run, dout, x, parameters, gradients, call.cache, call.mask, dx=dx)
        # A view: autograd copies a gradient whose tensor somebody else holds too, as a link does its slot's.
        of_parameters = [parameter_gradient(total, each) for total, each in zip(new, parameters, strict=True)]
        return (dx.view(x.shape) if ctx.needs_input_grad[0] else None, None, *of_parameters)
