"""The memory of a `peer` link: slots and flags in the receiver's GPU, credits in the sender's, each mapped by both.

Every part has one writer:
  receiver's memory  claims [slots] | flags [slots, tiles] | slots, all written by the sender
  sender's memory    credits [slots], written by the receiver
  host page          header, and of each end a word that it closed and one that counts up while it lives
The host page is a memfd (segment.py) over whose socket the two swap CUDA IPC handles. With Triton's interpreter on CPU
tensors everything lies in the memfd, so the same link is tested without a GPU.

The traps: a flag is set to the first epoch before the other end learns of it, and never back. An IPC handle names a
whole allocation, so the memory comes from the driver, not from torch's caching allocator (whose expandable segments
have no such handle). And no torch op may touch the other end's memory, it would run on the other GPU: kernels do.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpkernels.links.base import LinkSpec
from tpkernels.links.segment import Offer, Segment

_LINE_WORDS = 32  # 128 bytes
_PAGE = 4096
_HEADER = 1024
SENDER_END, RECEIVER_END = _HEADER, _HEADER + 128  # offsets of each end's words in the host page: closed, beat
_HANDLE_BYTES = 64


@dataclass(frozen=True)
class Layout:
    """Sizes of a link's memory; both ends compute it from the LinkSpec and compare it in the header."""

    slots: int
    rows: int
    columns: int
    dtype: str
    tile_rows: int
    generation: int
    first_epoch: int
    version: int = 1

    @property
    def tiles(self) -> int:
        return max(1, math.ceil(self.rows / self.tile_rows))

    @property
    def flag_words(self) -> int:
        return math.ceil(self.tiles / _LINE_WORDS) * _LINE_WORDS

    @property
    def slots_at(self) -> int:
        return _round_up(4 * self.slots * (_LINE_WORDS + self.flag_words))

    @property
    def slot_stride(self) -> int:
        return _round_up(self.rows * self.columns * getattr(torch, self.dtype).itemsize)

    @property
    def receiver_bytes(self) -> int:
        return self.slots_at + self.slots * self.slot_stride

    @property
    def sender_bytes(self) -> int:
        return 4 * self.slots * _LINE_WORDS


def layout_of(spec: LinkSpec, tile_rows: int, generation: int, first_epoch: int) -> Layout:
    rows, dtype = math.prod(spec.slot_shape[:-1]), str(spec.dtype).removeprefix("torch.")
    return Layout(spec.slots, rows, spec.slot_shape[-1], dtype, tile_rows, generation, first_epoch)


@dataclass
class PeerMemory:
    """Both ends' memory, as bytes, as one end sees it; `segment` is the host page and the socket."""

    layout: Layout
    receiver: Tensor
    sender: Tensor
    segment: Segment
    unmap: list[Callable[[], None]] = field(default_factory=list)

    def claim(self, slot: int) -> Tensor:
        return self.receiver.view(torch.int32)[slot * _LINE_WORDS :]

    def flags(self, slot: int) -> Tensor:
        at = self.layout.slots * _LINE_WORDS + slot * self.layout.flag_words
        return self.receiver.view(torch.int32)[at : at + self.layout.tiles]

    def credit(self, slot: int) -> Tensor:
        return self.sender.view(torch.int32)[slot * _LINE_WORDS :]

    def data(self, slot: int, shape: tuple[int, ...]) -> Tensor:
        begin = self.layout.slots_at + slot * self.layout.slot_stride
        dtype = getattr(torch, self.layout.dtype)
        return self.receiver[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def close(self) -> None:
        for undo in self.unmap:
            undo()
        self.unmap.clear()
        self.segment.close()


def signed(epoch: int) -> int:
    """An epoch, modulo 2**32, as the int32 that words hold."""
    return (epoch + 2**31) % 2**32 - 2**31


def offer_memory(layout: Layout, device: torch.device) -> Offer:
    """The receiver's host page (interpreter: all of the memory), formatted. OSError when it cannot be had."""
    extra = layout.receiver_bytes + layout.sender_bytes if device.type == "cpu" else 0
    offer = Offer(_PAGE + extra)
    text = json.dumps(asdict(layout)).encode()
    struct.pack_into(f"<I{len(text)}s", offer.memory, 0, len(text), text)
    if device.type == "cpu":
        receiver, credits = _shared_parts(offer.memory, layout)
        _fill(receiver[: layout.slots_at], layout)
        _fill(credits, layout)
    return offer


def map_memory(segment: Segment, layout: Layout, device: torch.device, *, sender: bool, timeout_s: float) -> PeerMemory:
    """Both parts, once the two have met. ValueError when the memory was made for another link; OSError when the GPU
    cannot share or map it."""
    (length,) = struct.unpack_from("<I", segment.memory)
    found = segment.memory[4 : 4 + min(length, _HEADER - 4)]
    if found != json.dumps(asdict(layout)).encode():
        raise ValueError(f"the two ends plan different links: {found.decode(errors='replace')} is not {layout}")
    if device.type == "cpu":
        return PeerMemory(layout, *_shared_parts(segment.memory, layout), segment)
    driver = _Driver(device)
    num_bytes, theirs_bytes = layout.receiver_bytes, layout.sender_bytes
    if sender:
        num_bytes, theirs_bytes = theirs_bytes, num_bytes
    address = driver.allocate(num_bytes)
    mine = tensor_at(address, num_bytes, device)
    _fill(mine if sender else mine[: layout.slots_at], layout)
    torch.cuda.synchronize(device)
    segment.socket.settimeout(timeout_s)
    segment.socket.send(driver.handle(address))
    mapped = driver.open(segment.socket.recv(_HANDLE_BYTES))
    theirs = tensor_at(mapped, theirs_bytes, device)
    receiver, credits = (theirs, mine) if sender else (mine, theirs)
    undo = [lambda: torch.cuda.synchronize(device), lambda: driver.close(mapped), lambda: driver.free(address)]
    return PeerMemory(layout, receiver, credits, segment, undo)


def _round_up(num_bytes: int) -> int:
    return math.ceil(num_bytes / _PAGE) * _PAGE


def _shared_parts(memory: Any, layout: Layout) -> tuple[Tensor, Tensor]:
    receiver = torch.frombuffer(memory, dtype=torch.uint8, offset=_PAGE, count=layout.receiver_bytes)
    credits = torch.frombuffer(
        memory, dtype=torch.uint8, offset=_PAGE + layout.receiver_bytes, count=layout.sender_bytes
    )
    return receiver, credits


def _fill(words: Tensor, layout: Layout) -> None:
    words.view(torch.int32).fill_(signed(layout.first_epoch))


def tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Bytes at `address` as a tensor of `device`, whichever GPU they lie on: torch takes a mapped pointer for one of
    the peer's device, and autograd wants gradients there then."""
    whole = torch.empty(0, dtype=torch.uint8, device=device)
    storage = torch._C._construct_storage_from_data_pointer(address, whole.device, num_bytes)
    return whole.set_(storage, 0, (num_bytes,), (1,))


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Driver:
    """CUDA's IPC calls, in the primary context of `device`. Every one raises OSError with the driver's own words."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.zeros(1, device=device)  # makes the context
        self._library = ctypes.CDLL("libcuda.so.1")

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        try:
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        except OSError as error:
            remedy = "hand on less at once (shorter slices, fewer slots) or leave this memory to the link"
            raise OSError(f"{num_bytes} bytes for slots and flags: {error}; {remedy}") from error
        return int(address.value)

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, text: bytes) -> int:
        if len(text) != _HANDLE_BYTES:
            raise ConnectionError("the other end closed before it shared its memory")
        address = ctypes.c_uint64()
        enable_peer_access = ctypes.c_uint(1)
        handle = _Handle.from_buffer_copy(text)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, enable_peer_access)
        return int(address.value)

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _call(self, name: str, *arguments: Any) -> None:
        with torch.cuda.device(self._device):
            code = getattr(self._library, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise OSError(f"{name} on {self._device}: {(text.value or b'error').decode()} ({code})")
