"""Before a link is opened its two ends tell each other what they were asked for, and go no further where that differs.

Run by both ranks of a link, through the group that holds them. Only words travel, so a difference costs nothing and
leaves nothing behind. The trap: the letter has a fixed size, and what does not fit (`slot_of`) goes in as a digest.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from tpkernels.links.base import LinkError, LinkSpec

LETTER_BYTES = 512
CPU = torch.device("cpu")


def tell(text: str, to: int, group: dist.ProcessGroup, *, device: torch.device = CPU) -> None:
    """Send rank `to` the first LETTER_BYTES of text, which it must `hear`."""
    letter = text.encode()[:LETTER_BYTES].ljust(LETTER_BYTES)
    dist.send(torch.frombuffer(bytearray(letter), dtype=torch.uint8).to(device), to, group=group)


def hear(source: int, group: dist.ProcessGroup, *, device: torch.device = CPU) -> str:
    """What rank `source` tells."""
    letter = torch.zeros(LETTER_BYTES, dtype=torch.uint8, device=device)
    dist.recv(letter, source, group=group)
    return bytes(letter.tolist()).decode(errors="replace").rstrip()


def agree(kind: str, spec: LinkSpec, group: dist.ProcessGroup, *, trouble: str = "") -> None:
    """LinkError, on both ranks, that names what differs: the kind of link or anything of the spec but the device; or
    either's `trouble`, why it cannot open the link."""
    mine = _words(kind, spec)
    sends = dist.get_rank() == spec.source
    own, other = (spec.source, spec.destination) if sends else (spec.destination, spec.source)
    device = spec.device if dist.get_backend(group) == "nccl" else CPU
    heard = "" if sends else hear(other, group, device=device)
    tell(f"!{trouble}" if trouble else "\n".join(mine.values()), other, group, device=device)
    if sends:
        heard = hear(other, group, device=device)
    if trouble:
        raise LinkError(f"{spec}: {trouble}")
    if heard.startswith("!"):
        raise LinkError(f"{spec}: rank {other} cannot open it: {heard[1:]}")
    theirs = dict(zip(mine, heard.split("\n"), strict=False))
    differing = [
        f"{what} {asked} on rank {own}, {theirs.get(what)} on rank {other}"
        for what, asked in mine.items()
        if theirs.get(what) != asked
    ]
    if differing:
        raise LinkError(
            f"{spec}: its two ends were asked for different links: {'; '.join(differing)}. Open both with one kind and "
            "equal LinkSpecs."
        )


def _words(kind: str, spec: LinkSpec) -> dict[str, str]:
    slots = hashlib.blake2b(repr(sorted(spec.slot_of.items())).encode(), digest_size=6).hexdigest()
    return {
        "kind": kind,
        "source": str(spec.source),
        "destination": str(spec.destination),
        "direction": spec.direction,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "slots": str(spec.slots),
        "slot_shape": str(tuple(spec.slot_shape)),
        "resident": str(spec.resident),
        "slot_of": f"{len(spec.slot_of)} transfers ({slots})",
    }
