"""The thread of a `peer` link's end that watches the other end's beat and ends waits when it is lost; and its own beat.

Kernels wait on the GPU, where nobody sees a process die; the thread sets the host's abort word, which they look at. The
beat is C++'s: a Python thread stands still while another holds the interpreter, as some compilers do for seconds. The
one trap: both must be stopped before the link's memory is freed.
"""

from __future__ import annotations

import select
import struct
import threading

from torch import Tensor

from tpkernels.links import peer_memory
from tpkernels.links.base import Trouble
from tpkernels.links.peer_memory import PeerMemory
from tpkernels.links.shm import _core

LOOK_S = 0.02


class PeerWatch(threading.Thread):
    """Looks at the peer's beat, its `closed` word and the socket. When the peer is lost it sets the host's abort word,
    which ends the waits of kernels. `trouble`: what the peer does instead."""

    def __init__(self, memory: PeerMemory, words: Tensor, *, sender: bool, silence_s: float) -> None:
        super().__init__(name="terapipe-peer-link", daemon=True)
        self._segment, self._words, self._silence_s = memory.segment, words, silence_s
        self._mine = peer_memory.SENDER_END if sender else peer_memory.RECEIVER_END
        self._theirs = peer_memory.RECEIVER_END if sender else peer_memory.SENDER_END
        self._closing = threading.Event()
        self.trouble: Trouble | None = None
        self._beat = _core.Beat(memory.segment.memory, self._mine + 4)
        self.start()

    def stop(self) -> None:
        """Tell the peer that nothing more will come from here."""
        self._closing.set()
        self.join()
        self._beat.stop()
        struct.pack_into("<I", self._segment.memory, self._mine, 1)

    def run(self) -> None:
        poll, silent_s = select.poll(), 0.0
        for descriptor in (self._segment.socket.fileno(), self._segment.pidfd):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        heard = -1
        while not self._closing.wait(LOOK_S):
            closed, theirs = struct.unpack_from("<II", self._segment.memory, self._theirs)
            # Only waits that passed count: an end that was frozen along with its peer must not find the peer late.
            silent_s = 0.0 if theirs != heard else silent_s + LOOK_S
            heard = theirs
            if closed:
                self.trouble = Trouble.CLOSED
            elif poll.poll(0):
                self.trouble = Trouble.GONE
            elif silent_s >= self._silence_s:
                self.trouble = Trouble.SILENT
            if self.trouble is not None:
                self._words[0] = 1
                return
