"""What to say about a name that nobody knows. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """`unknown KIND NAME`, with the nearest known one, or all of them when none is near.

    prefix: stands before each of them, such as a section's; what all share makes none nearer."""
    known = sorted(known)
    near = known if len(known) == 1 else difflib.get_close_matches(name, known, n=1)
    names = ", ".join(prefix + one for one in known)
    return f"unknown {kind} {prefix + name!r}; " + (
        f"did you mean {prefix + near[0]!r}?" if near else f"known: {names}."
    )
