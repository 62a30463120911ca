"""Memory that exactly two processes of a host share, and the socket on which each hears that the other is gone.

The receiver makes a memfd, reserves and seals its size, and listens on a unix socket with a random abstract name; the
sender connects and is handed the descriptor. Nothing has a name in the file system and the memory goes with its last
user, so no crash leaves anything behind. The trap: descriptors are closed once mapped, but the socket stays open, for
its hang-up is the news of the peer's end.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct
from dataclasses import dataclass

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


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
    """The receiver's side before the two have met: `memory` to format, `address` for the sender to know."""

    def __init__(self, num_bytes: int) -> None:
        descriptor = os.memfd_create("terapipe-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_bytes)
            os.posix_fallocate(descriptor, 0, num_bytes)  # memory that is not there shows here, not as SIGBUS later
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = _map(descriptor)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self.address = f"terapipe-{secrets.token_hex(12)}"
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(1)

    def accept(self, timeout_s: float) -> Segment:
        """Hand the memory to the process of this user that connects. OSError when none comes in time."""
        with self._listener:
            self._listener.settimeout(timeout_s)
            try:
                while True:
                    connection, _ = self._listener.accept()
                    peer = _peer(connection)
                    if peer.uid == os.getuid():
                        break
                    connection.close()
                socket.send_fds(connection, [b"memory"], [self._descriptor])
            finally:
                os.close(self._descriptor)
        return Segment(self.memory, connection, _pidfd(peer.pid))


def connect(address: str, timeout_s: float) -> Segment:
    """The sender's side. OSError when the receiver does not answer in time."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{address}")
        _, descriptors, _, _ = socket.recv_fds(connection, 64, 1)
        if not descriptors:
            raise ConnectionError("the receiver closed the connection without handing over its memory")
        try:
            if fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ConnectionError("the memory handed over may still change its size")
            memory = _map(descriptors[0])
        finally:
            os.close(descriptors[0])
    except BaseException:
        connection.close()
        raise
    return Segment(memory, connection, _pidfd(_peer(connection).pid))


def _map(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE)


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
