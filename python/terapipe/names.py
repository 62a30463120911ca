"""What to say about a name that nobody knows. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """`unknown KIND NAME`, with the nearest known one, or all of them when none is near."""
    known = sorted(known)
    near = known if len(known) == 1 else difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"unknown {kind} {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}.")
