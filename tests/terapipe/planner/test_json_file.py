"""Values of JSON by annotation: what a class writes is read again, and anything else is named with its place."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe.planner.json_file import LARGEST, Format, read

FILE = Format("test file", "terapipe-test", 3, made_by="terapipe test")


class Pair(NamedTuple):
    first: int
    second: float


@dataclass(frozen=True)
class Inner:
    name: str
    kind: Literal["a", "b"] = "a"
    limit: int | None = None


@dataclass(frozen=True)
class Outer:
    count: int
    on: bool
    pair: Pair
    inner: Inner
    row: tuple[float, ...] = ()
    two: tuple[int, str] = (0, "")
    by_size: Mapping[int, Inner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count == 13:
            raise ValueError("count is 13, which brings bad luck.")


numbers = st.integers(1 - LARGEST, LARGEST - 1)
floats = st.floats(-1e17, 1e17) | numbers
inners = st.builds(Inner, st.text(), st.sampled_from("ab"), st.none() | numbers)
outers = st.builds(
    Outer,
    numbers.filter(lambda count: count != 13),
    st.booleans(),
    st.builds(Pair, numbers, floats),
    inners,
    st.lists(floats).map(tuple),
    st.tuples(numbers, st.text()),
    st.dictionaries(st.integers(1, LARGEST - 1), inners),
)


def as_json(value: Outer) -> dict:
    return json.loads(json.dumps(dataclasses.asdict(value)))


@given(outers)
def test_what_was_written_is_read(value):
    assert read(Outer, as_json(value)) == value


GOOD = Outer(1, True, Pair(2, 0.5), Inner("x", "b", 7), (1.5, 2), (3, "y"), {4: Inner("z")})


@pytest.mark.parametrize(
    ("place", "given", "words"),
    [
        ("count", True, "count is True; it must be a whole number below 1e18"),
        ("count", 1.0, "count is 1.0; it must be a whole number"),
        ("count", LARGEST, "count is 1000000000000000000; it must be a whole number below 1e18"),
        ("count", 13, "count is 13, which brings bad luck"),
        ("on", 1, "on is 1; it must be true or false"),
        ("pair", [1], "pair is [1]; it must be 2 values"),
        ("pair", [1, float("nan")], "pair.second is nan; it must be a number below 1e18"),
        ("pair", 3, "pair is 3; it must be a list"),
        ("inner", None, "inner is None; it must be an object of JSON"),
        ("inner", {"name": "x", "nam": 1}, "unknown key 'inner.nam'; did you mean 'inner.name'?"),
        ("inner", {"kind": "a"}, "'name' is missing in inner; add it."),
        ("inner", {"name": "x", "kind": "c"}, "inner.kind is 'c'; it must be one of a, b."),
        ("inner", {"name": "x", "limit": "7"}, "inner.limit is '7'; it must be a whole number below 1e18 or null."),
        ("row", [1, [2]], "row[1] is [2]; it must be a number"),
        ("row", [1, float("-inf")], "row[1] is -inf; it must be a number"),
        ("two", [1, 2], "two[1] is 2; it must be a text"),
        ("by_size", {"0": {}}, "a key of by_size is '0'; it must be a number from 1."),
        ("by_size", {"7": {"name": 1}}, "by_size.7.name is 1; it must be a text."),
    ],
)
def test_what_does_not_fit_is_named_with_place_and_value(place, given, words):
    with pytest.raises(ValueError) as caught:
        read(Outer, {**as_json(GOOD), place: given})
    assert words in str(caught.value)


def test_a_long_value_is_shown_in_short():
    with pytest.raises(ValueError) as caught:
        read(Outer, {**as_json(GOOD), "count": list(range(10**5))})
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "the test file is not JSON: "),
        ("3", 'the test file lacks "format": "terapipe-test"; make it with `terapipe test`.'),
        ('{"format": "terapipe-test", "version": 2}', "version 2, this program reads version 3; make it again with"),
        ('{"format": "terapipe-test", "version": 3, "x": {"y": 1, "y": 1}}', "the key 'y' is given twice"),
        ('{"a":' * 50_000, "is nested too deep"),
        ('{"x": ' + "9" * 5000 + "}", "digits"),
    ],
    ids=["broken", "other", "version", "twice", "deep", "digits"],
)
def test_another_file_is_refused(tmp_path, text, words):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        FILE.load(path, FILE.fields)
    assert words in str(caught.value) and str(caught.value).startswith(f"{path}: ")


def test_the_fields_of_a_file_are_those_beside_format_and_version(tmp_path):
    path = tmp_path / "file.json"
    path.write_text('{"x": 1, "format": "terapipe-test", "version": 3}', encoding="utf-8-sig")
    assert FILE.load(path, FILE.fields) == {"x": 1}
    for place, why in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file or directory")):
        with pytest.raises(ValueError, match=f"cannot read the test file .*: {why}; make one with `terapipe test`"):
            FILE.load(place, FILE.fields)
