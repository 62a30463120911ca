"""Files of JSON as frozen aggregates: values are read by the annotations of the class, and what is wrong is named with
its place and its value. For cost and plan files.

The trap: json takes NaN, a key that is given twice, and integers of any length. None of them comes in here.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import re
import reprlib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from terapipe.names import unknown

LARGEST = 10**18  # of a number, so that sums and products of a few stay finite
PLAIN = {
    int: "a whole number below 1e18",
    float: "a number below 1e18",
    str: "a text",
    bool: "true or false",
    types.NoneType: "null",
}

Read = TypeVar("Read")


@dataclass(frozen=True)
class Format:
    """What a kind of file is called, how it says what it is, and which command makes one."""

    name: str
    format: str
    version: int
    made_by: str

    def load(self, path: Path, from_json: Callable[[str], Read]) -> Read:
        """ValueError, with the file's name, for one that cannot be read or that `from_json` refuses."""
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"cannot read the {self.name} {path}: {why}; make one with `{self.made_by}`.") from error
        try:
            return from_json(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def fields(self, text: str) -> dict[str, Any]:
        """What the file holds beside format and version."""
        try:
            fields = json.loads(text, object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            raise ValueError(f"the {self.name} is not JSON: {error}; make it with `{self.made_by}`.") from None
        except RecursionError:
            raise ValueError(f"the {self.name} is nested too deep; make it with `{self.made_by}`.") from None
        if not isinstance(fields, dict) or fields.pop("format", None) != self.format:
            raise ValueError(f'the {self.name} lacks "format": "{self.format}"; make it with `{self.made_by}`.')
        version = fields.pop("version", None)
        if version != self.version:
            raise ValueError(
                f"the {self.name} has version {version!r}, this program reads version {self.version}; make it again "
                f"with `{self.made_by}`."
            )
        return fields


def read(kind: Any, given: Any, where: str = "", special: Mapping[Any, Callable[[Any, str], Any]] | None = None) -> Any:
    """`given`, as json has it, as a `kind`: numbers, texts, tuples, mappings, named tuples, dataclasses of them.

    where: the place, for ValueError. special: how kinds are read that say nothing by their annotations.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if special and kind in special:
        return special[kind](given, where)
    if kind is Any:
        return given
    if kind in PLAIN:
        return given if _fits(kind, given) else _refuse(where, given, PLAIN[kind])
    if origin is Literal:
        return given if given in arguments else _refuse(where, given, f"one of {', '.join(arguments)}")
    if origin in (Union, types.UnionType):  # of plain kinds
        if not any(_fits(one, given) for one in arguments):
            _refuse(where, given, " or ".join(PLAIN[one] for one in arguments))
        return given
    if origin is tuple:
        if arguments[-1] is ...:
            kinds = [arguments[0]] * len(_checked(list, given, where))
        else:
            kinds = _long(arguments, given, where)
        pairs = enumerate(zip(kinds, given, strict=True))
        return tuple(read(one, item, f"{where}[{index}]", special) for index, (one, item) in pairs)
    if origin is collections.abc.Mapping:
        key = _whole if arguments[0] is int else lambda text, where: text
        items = _checked(dict, given, where).items()
        return {key(name, where): read(arguments[1], item, _below(where, name), special) for name, item in items}
    hints = get_type_hints(kind)
    if issubclass(kind, tuple):
        values = zip(hints.items(), _long(kind._fields, given, where), given, strict=True)
        return kind(*(read(hint, item, _below(where, name), special) for (name, hint), _, item in values))
    return _aggregate(kind, hints, given, where, special)


def _aggregate(kind: Any, hints: Mapping[str, Any], given: Any, where: str, special: Any) -> Any:
    known = {field.name: field for field in dataclasses.fields(kind)}
    inside = f" in {where}" if where else ""
    for name in sorted(set(_checked(dict, given, where)) - set(known)):
        raise ValueError(unknown("key", name, known, prefix=_below(where, "")))
    nothing = dataclasses.MISSING
    for name, field in known.items():
        if name not in given and field.default is nothing and field.default_factory is nothing:
            raise ValueError(f"{name!r} is missing{inside}; add it.")
    values = {name: read(hints[name], item, _below(where, name), special) for name, item in given.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None


def _fits(kind: type, given: Any) -> bool:
    if kind not in (int, float):
        return isinstance(given, kind)
    return isinstance(given, (int, kind)) and not isinstance(given, bool) and abs(given) < LARGEST


def _checked(kind: type, given: Any, where: str) -> Any:
    words = "an object of JSON" if kind is dict else "a list"
    return given if isinstance(given, kind) else _refuse(where, given, words)


def _long(kinds: Any, given: Any, where: str) -> Any:
    return kinds if len(_checked(list, given, where)) == len(kinds) else _refuse(where, given, f"{len(kinds)} values")


def _whole(text: str, where: str) -> int:
    """A number that is a key."""
    return (
        int(text) if re.fullmatch("[1-9][0-9]{0,17}", text) else _refuse(f"a key of {where}", text, "a number from 1")
    )


def _below(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _refuse(where: str, given: Any, words: str) -> Any:
    raise ValueError(f"{where or 'the file'} is {reprlib.repr(given)}; it must be {words}.")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is given twice; keep one of them.")
    return fields
