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


def agree(kind: str, spec: LinkSpec, group: dist.ProcessGroup) -> None:
    """LinkError, on both ranks, that names what differs: the kind of link or anything of the spec but the device."""
    mine = _words(kind, spec)
    sends = dist.get_rank() == spec.source
    own, other = (spec.source, spec.destination) if sends else (spec.destination, spec.source)
    device = spec.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    letter = "\n".join(mine.values()).encode()[:LETTER_BYTES].ljust(LETTER_BYTES)
    told = torch.frombuffer(bytearray(letter), dtype=torch.uint8).to(device)
    heard = torch.empty_like(told)
    for sending in (sends, not sends):
        if sending:
            dist.send(told, other, group=group)
        else:
            dist.recv(heard, other, group=group)
    theirs = dict(zip(mine, bytes(heard.tolist()).decode(errors="replace").rstrip().split("\n"), strict=False))
    differing = [f"{what} {mine[what]} on rank {own}, {theirs.get(what)} on rank {other}" for what in mine]
    differing = [words for what, words in zip(mine, differing, strict=True) if theirs.get(what) != mine[what]]
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
