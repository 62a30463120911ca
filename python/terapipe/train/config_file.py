"""Config dataclasses from and to TOML: any frozen dataclass whose fields are plain values, tuples or such dataclasses.

`to_toml` writes every key, so that a saved file loads back into an equal config.

The trap: a key that nobody knows must never be ignored, or a misspelt learning rate costs a day; every loader goes
through `from_dict`.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from terapipe.names import unknown

Settings = TypeVar("Settings")


def load(path: Path, base: Settings) -> Settings:
    """`base` with the keys of a TOML file. ValueError for a file that is missing or not TOML, an unknown key, a
    value of a wrong type."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
    except OSError as error:
        raise ValueError(f"cannot read the config file {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}.") from error
    try:
        return from_dict(base, table)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def from_dict(base: Settings, table: Mapping[str, Any]) -> Settings:
    """`base`, a dataclass, with the values of nested `table`. ValueError names an unknown key's nearest known one."""
    return _from_section(base, table, prefix="", everywhere=all_keys(type(base)))


def _from_section(base: Settings, table: Mapping[str, Any], *, prefix: str, everywhere: Sequence[str]) -> Settings:
    hints = typing.get_type_hints(type(base))
    changes: dict[str, Any] = {}
    for key, value in table.items():
        if key not in hints:
            elsewhere = [known for known in everywhere if known.split(".")[-1] == key]  # right name, wrong section
            if elsewhere:
                raise ValueError(unknown("key", prefix + key, elsewhere))
            raise ValueError(unknown("key", key, hints, prefix=prefix))
        current = getattr(base, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ValueError(
                    f"{prefix}{key} is a section; write [{prefix}{key}] with keys below it, not {value!r}."
                )
            changes[key] = _from_section(current, value, prefix=f"{prefix}{key}.", everywhere=everywhere)
        else:
            changes[key] = _convert(value, hints[key], prefix + key)
    return dataclasses.replace(base, **changes)  # type: ignore[type-var]


def _convert(value: Any, hint: Any, key: str) -> Any:
    """`value` of a TOML file as the field's type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert(value, next(option for option in arguments if option is not type(None)), key)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(unknown(f"value of {key},", str(value), [str(option) for option in arguments]))
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{key} is {value!r}; it must be a list.")
        return tuple(_convert(item, arguments[0], key) for item in value)
    if hint is float and type(value) is int:
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not hint:  # exact: a bool is not an int here
        raise ValueError(f"{key} is {value!r}; it must be {hint.__name__}, not {type(value).__name__}.")
    return value


def all_keys(kind: Any, prefix: str = "") -> list[str]:
    """Dotted names of every key of a config dataclass."""
    keys: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        keys += all_keys(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else [prefix + name]
    return keys


def to_toml(config: Any) -> str:
    """Every key as TOML, sections last; a key without a value (None) is a comment, since TOML has none."""
    plain, sections = [], []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            sections.append(f"\n[{item.name}]\n{to_toml(value)}")
        else:
            plain.append(f"# {item.name} is not set" if value is None else f"{item.name} = {_toml_value(value)}")
    return "\n".join(plain) + "\n" + "".join(sections)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    for character in "\b\t\n\f\r":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'"{text}"'
