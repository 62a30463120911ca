"""One call at a time into an end of a link, and a close that takes nothing from under the call that is inside.

Waits give up the interpreter's lock, so another thread may close the link meanwhile. `shm` does the same in C++
(csrc/bindings/links.cpp), where a whole call takes less than this.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from tpkernels.links.base import closed_error

CLOSE_S = 10.0  # how long a close waits for a call that does not end; then the call itself lets go, at its end
STAYED = "%s: closed, but a call of another thread is still inside after %.0f s; its end will free the memory."

log = logging.getLogger("tpkernels")


class Door:
    """`close` turns calls away, ends the wait of the one that is inside (`end_waits`) and waits for it to leave; the
    last to leave calls `free`. spec: whose door this is, for messages."""

    def __init__(self, spec: object, end_waits: Callable[[], None], free: Callable[[], None]) -> None:
        self._spec, self._end_waits, self._free = spec, end_waits, free
        self._lock, self._owner, self._depth = threading.Lock(), 0, 0
        self.closed = self._freed = False

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():  # a call within a call
            self._depth += 1
            return
        entered = self._lock.acquire(blocking=False)
        if self.closed:
            if entered:
                self._leave()
            raise closed_error(self._spec)
        if not entered:
            raise RuntimeError("an end of a link is used by one thread at a time, and another call is inside it")
        self._owner, self._depth = threading.get_ident(), 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._leave()

    def close(self) -> None:
        self.closed = True
        if self._owner == threading.get_ident():  # a signal's handler: freed at the end of the call
            return
        idle = self._lock.acquire(blocking=False)
        if not idle:
            self._end_waits()
        if idle or self._lock.acquire(timeout=CLOSE_S):
            self._leave()
        else:
            log.warning(STAYED, self._spec, CLOSE_S)

    def _leave(self) -> None:
        self._owner = 0
        try:
            if self.closed and not self._freed:
                self._freed = True
                self._free()
        finally:
            self._lock.release()


class _HasDoor(Protocol):
    _door: Door


Self = TypeVar("Self", bound=_HasDoor)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def inside(method: Callable[Concatenate[Self, Arguments], Result]) -> Callable[Concatenate[Self, Arguments], Result]:
    """`method`, run behind its object's `_door`."""

    @functools.wraps(method)
    def call(self: Self, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self._door:
            return method(self, *args, **kwargs)

    return call
