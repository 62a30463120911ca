"""The census of parameters: every named parameter of the whole model is owned by exactly one rank, or is a declared
tie.

Taken once at start from what the ranks really hold, so that a stage that was built twice, left out or named locally
is an error before the first step and not a model that silently trains half its layers.  Global names are `<layer
name>.<parameter name>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

Tie = tuple[str, str]
"""Two global parameter names with one value: gradients are summed, copies stay bit-equal."""


@dataclass(frozen=True)
class OwnedParameter:
    """One parameter as its owner reports it.  `identity` tells apart two names of one tensor in one process."""

    name: str
    shape: tuple[int, ...]
    rank: int
    identity: int
    trained: bool = True


@dataclass(frozen=True)
class Census:
    """Who owns what.  `names` in global order (layer order, then the module's own); `tied_copies` are not counted
    twice in norms."""

    names: tuple[str, ...]
    owner: Mapping[str, int]
    ties: tuple[Tie, ...]

    @property
    def families(self) -> tuple[tuple[str, ...], ...]:
        """Names of one value: the original, then its copies."""
        originals = dict.fromkeys(original for original, _ in self.ties)
        return tuple((name, *(copy for original, copy in self.ties if original == name)) for name in originals)

    @property
    def tied_copies(self) -> frozenset[str]:
        return frozenset(copy for _, copy in self.ties)


def own_parameters(layers: Mapping[str, nn.Module], rank: int) -> list[OwnedParameter]:
    """What this rank reports, in order."""
    return [
        OwnedParameter(f"{layer}.{name}", tuple(parameter.shape), rank, id(parameter), parameter.requires_grad)
        for layer, module in layers.items()
        for name, parameter in module.named_parameters()
    ]


def take_census(reports: Sequence[Sequence[OwnedParameter]], layer_names: Sequence[str], ties: Sequence[Tie]) -> Census:
    """Join every rank's report.  ValueError names what is owned twice, not at all, shared without a declared tie, or
    tied wrongly."""
    parameters = [parameter for report in reports for parameter in report]
    owners: dict[str, OwnedParameter] = {}
    for parameter in parameters:
        if parameter.name in owners:
            raise ValueError(
                f"parameter {parameter.name} is owned by rank {owners[parameter.name].rank} and by rank "
                f"{parameter.rank}."
            )
        owners[parameter.name] = parameter
    refuse_shared(parameters)
    position = {name: index for index, name in enumerate(layer_names)}
    for tie in ties:
        for name in tie:
            if name not in owners:
                raise ValueError(f"tie {tie}: no layer has a parameter {name!r}; the names are {_some(list(owners))}.")
        first, second = (owners[name] for name in tie)
        if first.shape != second.shape:
            raise ValueError(f"tie {tie}: shapes differ, {list(first.shape)} and {list(second.shape)}.")
        if first.trained != second.trained:
            frozen = tie[0] if second.trained else tie[1]
            raise ValueError(
                f"tie {tie}: {frozen} is frozen (requires_grad is False) and the other is not; make both "
                "so, or their values part."
            )
    copies = [copy for _, copy in ties]
    chained = [original for original, _ in ties if original in copies]
    if len(set(copies)) != len(copies) or chained:
        raise ValueError(f"ties {list(ties)}: each copy has one original, and an original is not itself a copy.")
    # The order of layers first; Python's sort is stable, so the module's own order stays within a layer.
    names = sorted(owners, key=lambda name: position[_layer_of(name, position)])
    return Census(tuple(names), {name: owners[name].rank for name in names}, tuple(ties))


def refuse_shared(parameters: Sequence[OwnedParameter]) -> None:
    """ValueError when two names of one process are one tensor: on two ranks they would silently become two."""
    seen: dict[tuple[int, int], str] = {}
    for parameter in parameters:
        other = seen.setdefault((parameter.rank, parameter.identity), parameter.name)
        if other != parameter.name:
            raise ValueError(
                f"{other} and {parameter.name} are one tensor; give each layer its own and declare the tie: "
                f"ties=[({other!r}, {parameter.name!r})]."
            )


def _layer_of(parameter: str, layers: Mapping[str, int]) -> str:
    """The longest layer name that `parameter` begins with ("blocks.1" and "blocks.10" are different layers)."""
    parts = parameter.split(".")
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in layers:
            return name
    raise ValueError(f"parameter {parameter} belongs to no layer of {_some(list(layers))}.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f", ... ({len(names)} in all)" if len(names) > 6 else "")
