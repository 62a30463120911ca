"""A transformer block as one node of the graph, where one call can compute it: fp32, eager, on a CPU.

`whole_block` gives None where it cannot; then the block runs as the pieces of half_blocks.py, with the same bits. The
one trap is theirs too: gradients may be added to parameters' `.grad` in place, where the engine owns it (linear.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from terapipe.models.half_blocks import Entry, Out, Piece, parameters_of
from terapipe.models.linear import owned_gradient
from tpkernels import Mask, PrefixCache
from tpkernels.block import MODULES, BlockShape, block_backward, block_forward, parameter_sizes, served

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
    if hidden.dtype != torch.float32 or type(cache) is not PrefixCache or cache.k.dtype != torch.float32:
        return None
    parameters = parameters_of(hidden, *(getattr(block, name) for name in MODULES))
    if parameters is None or not hidden.numel() or not served(block.shape, mask):
        return None
    fits = hidden.shape[0] == cache.k.shape[0] and hidden.shape[2] == block.shape.hidden and cache.k.is_cpu
    documents = mask.document_starts
    if not fits or (documents is not None and (documents.shape[0] not in (1, hidden.shape[0]) or not documents.is_cpu)):
        return None  # the pieces say what is wrong
    if turns is not None and turns.dtype != torch.complex64:
        return None
    if not _as_planned(block, parameters):
        return None
    result: Tensor = _WholeBlock.run(hidden, _Call(block.shape, cache, mask, turns, entry, out), *parameters)
    return result


def _as_planned(block: Block, parameters: list[Tensor | None]) -> bool:
    """Whether the modules are still those that the block was made with: raw addresses have no size."""
    shape = block.shape
    for norm in (block.attention_norm, block.mlp_norm):
        if norm.eps != shape.eps or norm.rms != shape.rms:
            return False
    for parameter, size in zip(parameters, parameter_sizes(shape), strict=True):
        if parameter is not None and (parameter.shape != size or not parameter.is_contiguous()):
            return False
    return shape.gated == (block.gate is not None)


class _WholeBlock(Piece):
    """(hidden, call, weight and bias of each of MODULES) -> hidden."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, call: _Call, *parameters: Tensor | None) -> Tensor:
        x = hidden.contiguous()
        turns = None if call.turns is None else call.turns.flatten(0, 2).contiguous()
        normed = None if call.entry is None else call.entry.normed
        if normed is not None:
            normed = normed._replace(out=normed.out.contiguous())
        made, run = block_forward(
            call.shape, x, parameters, call.cache, call.mask, turns=turns, normed=normed, apart=call.out is not None
        )
        ctx.save_for_backward(x, *parameters)
        ctx.call, ctx.run = call._replace(out=None), run
        if call.out is None:
            return made
        return call.out(made, run.saved[0].view(x.shape))

    @staticmethod
    def backward(ctx: Any, dhidden: Tensor) -> tuple[Tensor | None, ...]:
        Piece.refuse_second_derivative()
        x, *parameters = ctx.saved_tensors
        call, needs = ctx.call, ctx.needs_input_grad[2:]
        wanted = [parameter if need else None for parameter, need in zip(parameters, needs, strict=True)]
        owned = [owned_gradient(parameter) for parameter in wanted]
        new = [
            torch.zeros_like(parameter) if parameter is not None and gradient is None else None
            for parameter, gradient in zip(wanted, owned, strict=True)
        ]
        gradients = [ours if ours is not None else fresh for ours, fresh in zip(owned, new, strict=True)]
        dx = None if call.entry is None or call.entry.gradient is None else call.entry.gradient()
        if dx is None or dx.shape != x.shape or dx.dtype != x.dtype or not dx.is_contiguous():
            dx = torch.empty_like(x)
        block_backward(
            call.shape, ctx.run, dhidden.contiguous(), x, parameters, gradients, call.cache, call.mask, dx=dx
        )
        # A view: autograd copies a gradient whose tensor somebody else holds too, as a link does its slot's.
        return (dx.view(x.shape) if ctx.needs_input_grad[0] else None, None, *new)
