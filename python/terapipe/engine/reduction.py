"""What the ranks agree on after their actions: tied parameters' gradients and the norm of the whole model's gradient.

The norm is a sum of fp64 sums, one per parameter in the order of global names, so it does not depend on which rank
owns what.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from terapipe.engine.census import Census
from terapipe.engine.wiring import Wiring

Parameters = Mapping[str, nn.Parameter]
"""Global name -> parameter, of this process."""


def squared_norms(parameters: Parameters, census: Census) -> list[float]:
    """One fp64 sum of squares per parameter of the whole model, in global order; zero where this process does not
    own it and for the copies of tied parameters."""
    owned = [
        (index, parameters[name].grad)
        for index, name in enumerate(census.names)
        if name in parameters and name not in census.tied_copies
    ]
    norms = [(index, torch.linalg.vector_norm(grad, dtype=torch.float64)) for index, grad in owned if grad is not None]
    values = torch.stack([norm for _, norm in norms]).square().tolist() if norms else []
    squares = [0.0] * len(census.names)
    for (index, _), value in zip(norms, values, strict=True):
        squares[index] = value
    return squares


def sum_tied_gradients(parameters: Parameters, census: Census, wiring: Wiring) -> None:
    """All copies of a tied parameter get the sum of their gradients, added in the same order on every rank."""
    for family in census.families:
        held = [parameters[name] for name in family if name in parameters]
        if not held:
            continue
        gradients = {name: _gradient_of(parameters[name]) for name in family if name in parameters}
        like = next(iter(gradients.values()))
        total = torch.zeros_like(like)
        for name in family:
            gradient = wiring.share(name, gradients.get(name), like=like)
            assert gradient is not None
            total += gradient
        for parameter in held:
            if parameter.requires_grad:
                parameter.grad = total.clone()


@torch.no_grad()
def copy_tied_values(parameters: Parameters, census: Census, wiring: Wiring) -> None:
    """Copies start from their original's value; equal gradients and equal optimizers then keep them bit-equal."""
    for original, *copies in census.families:
        here = [parameters[name] for name in copies if name in parameters]
        if original in parameters or here:
            value = wiring.share(original, parameters.get(original), like=here[0] if here else None)
            assert value is not None
            for copy in here:
                copy.copy_(value)


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    """Its gradient, zeros if no slice reached it."""
    if parameter.grad is not None:
        return parameter.grad
    return torch.zeros_like(parameter, dtype=torch.float32 if parameter.dtype.itemsize < 4 else parameter.dtype)
