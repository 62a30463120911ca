"""Census: every parameter of the whole model has one owner, whatever the ranks report, or the error names it."""

from __future__ import annotations

import pytest

from terapipe.engine.census import OwnedParameter, take_census

LAYERS = ["blocks.1", "blocks.10", "blocks", "head"]


def _owned(
    name: str, rank: int = 0, shape: tuple[int, ...] = (2,), identity: int | None = None, trained: bool = True
) -> OwnedParameter:
    return OwnedParameter(name, shape, rank, hash(name) if identity is None else identity, trained)


def test_names_follow_the_layers_and_not_the_ranks() -> None:
    reports = [
        [_owned("head.z", 0), _owned("head.a", 0)],
        [_owned("blocks.10.w", 1), _owned("blocks.w", 1), _owned("blocks.1.w", 1), _owned("blocks.1.b", 1)],
    ]
    census = take_census(reports, LAYERS, [("blocks.w", "head.a")])
    assert census.names == ("blocks.1.w", "blocks.1.b", "blocks.10.w", "blocks.w", "head.z", "head.a")
    assert census.owner == {name: int(not name.startswith("head")) for name in census.names}
    assert census.tied_copies == {"head.a"}


def test_a_family_is_an_original_with_all_its_copies() -> None:
    names = [f"head.{letter}" for letter in "abcde"]
    ties = [("head.a", "head.c"), ("head.b", "head.d"), ("head.a", "head.e")]
    census = take_census([[_owned(name) for name in names]], LAYERS, ties)
    assert census.families == (("head.a", "head.c", "head.e"), ("head.b", "head.d"))


def test_equal_identities_on_two_ranks_are_two_tensors() -> None:
    take_census([[_owned("head.a", 0, identity=1)], [_owned("head.b", 1, identity=1)]], LAYERS, [])


@pytest.mark.parametrize(
    ("reports", "ties", "match"),
    [
        ([[_owned("head.a", 0)], [_owned("head.a", 1)]], [], "head.a is owned by rank 0 and by rank 1"),
        (
            [[_owned("head.a", identity=1), _owned("head.b", identity=1)]],
            [],
            r"one tensor.*ties=\[\('head.a', 'head.b'",
        ),
        ([[_owned("tail.a")]], [], "tail.a belongs to no layer of blocks.1, blocks.10, blocks, head"),
        ([[_owned("head.a")]], [("head.a", "head.b")], "no layer has a parameter 'head.b'; the names are head.a"),
        ([[_owned("head.a"), _owned("head.b", shape=(3,))]], [("head.a", "head.b")], r"shapes differ, \[2\] and \[3\]"),
        ([[_owned("head.a"), _owned("head.b", trained=False)]], [("head.a", "head.b")], "head.b is frozen"),
    ],
    ids=["twice", "shared", "no layer", "unknown tie", "tied shapes", "one frozen copy"],
)
def test_what_does_not_add_up_is_named(
    reports: list[list[OwnedParameter]], ties: list[tuple[str, str]], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        take_census(reports, LAYERS, ties)
