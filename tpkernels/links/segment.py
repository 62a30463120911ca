"""Memory that exactly two processes of a host share, and the socket on which each hears that the other is gone.

The receiver makes a memfd, reserves and seals its size, and listens on a unix socket with a random abstract name; the
sender connects and is handed the descriptor. Nothing has a name in the file system and the memory goes with its last
user, so no crash leaves anything behind. The trap: descriptors are closed once mapped, but the socket stays open, for
its hang-up is the news of the peer's end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tpkernels.links.base import NO_DESCRIPTOR

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NO_MEMORY = (
    "raise what limits the memory of this process (ulimit -v and -f, its container's limit) or hand on less at once: "
    "shorter slices, or fewer slots"
)
_REMEDIES = dict.fromkeys((errno.ENOMEM, errno.ENOSPC, errno.EFBIG), _NO_MEMORY) | dict.fromkeys(
    (errno.EMFILE, errno.ENFILE), NO_DESCRIPTOR
)


@dataclass
class Segment:
    """Mapped shared memory and the way to its other user. `pidfd` is -1 where the kernel gives none."""

    memory: mmap.mmap
    socket: socket.socket
    pidfd: int

    def close(self) -> None:
        """Hang up. The mapping stays while a tensor looks at it."""
        self.socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Offer:
    """The receiver's side before the two have met: `memory` to format, `address` for the sender to know. OSError with
    the bytes wanted and what to do when the memory cannot be had."""

    def __init__(self, num_bytes: int) -> None:
        with contextlib.ExitStack() as undo, _remedied(f"making {_size(num_bytes)} of shared memory"):
            descriptor = os.memfd_create("terapipe-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, descriptor)
            os.ftruncate(descriptor, num_bytes)
            os.posix_fallocate(descriptor, 0, num_bytes)  # memory that is not there shows here, not as SIGBUS later
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = _map(descriptor)
            self._listener = undo.enter_context(_socket())
            self._descriptor = descriptor
            self.address = f"terapipe-{secrets.token_hex(12)}"
            self._listener.bind(f"\0{self.address}")
            self._listener.listen(1)
            undo.pop_all()

    def accept(self, timeout_s: float) -> Segment:
        """Hand the memory to the process of this user that connects. OSError when none comes in time."""
        try:
            self._listener.settimeout(timeout_s)
            while True:
                connection, _ = self._listener.accept()
                peer = _peer(connection)
                if peer.uid == os.getuid():
                    break
                connection.close()
            socket.send_fds(connection, [b"memory"], [self._descriptor])
        finally:
            self.withdraw()
        return Segment(self.memory, connection, _pidfd(peer.pid))

    def withdraw(self) -> None:
        """Nobody comes; who is connected hears so."""
        self._listener.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def call(address: str) -> socket.socket:
    """The sender's side: a connection to an `Offer`, which need not accept it yet; OSError when there is none."""
    with _remedied("connecting"):
        connection = _socket()
        try:
            connection.connect(f"\0{address}")
        except BaseException:
            connection.close()
            raise
        return connection


def fetch(connection: socket.socket, timeout_s: float) -> Segment:
    """The memory of the offer at the other end of `connection`. OSError when it is not handed over in time."""
    try:
        connection.settimeout(timeout_s)
        _, descriptors, flags, _ = socket.recv_fds(connection, 64, 1)
        if not descriptors:
            why = "" if flags & socket.MSG_CTRUNC == 0 else f"; no descriptor was free: {NO_DESCRIPTOR}"
            raise ConnectionError(f"the receiver's memory was not handed over{why}")
        try:
            if fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ConnectionError("the memory handed over may still change its size")
            with _remedied(f"mapping {_size(os.fstat(descriptors[0]).st_size)} of shared memory"):
                memory = _map(descriptors[0])
        finally:
            os.close(descriptors[0])
    except BaseException:
        connection.close()
        raise
    return Segment(memory, connection, _pidfd(_peer(connection).pid))


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def _map(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _size(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({num_bytes / 2**20:.1f} MiB)"


@contextlib.contextmanager
def _remedied(doing: str) -> Iterator[None]:
    """An OSError says what was being done, and what the user can do about it."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        remedy = _REMEDIES.get(error.errno, "")
        raise OSError(error.errno, f"{error.strerror} while {doing}" + (f"; {remedy}" if remedy else "")) from error


@dataclass(frozen=True)
class _Peer:
    pid: int
    uid: int
    gid: int


def _peer(connection: socket.socket) -> _Peer:
    credentials = struct.Struct("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return _Peer(*credentials.unpack(found))


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # another pid namespace (pid 0) or an old kernel: socket and heartbeat remain
        return -1
