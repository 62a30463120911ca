"""Hand-off of one slice's hidden states (or their gradient) from a rank to its neighbour: one interface, several media.

local   one process steps all ranks of a plan: plain tensors, one per slot (tests, debugging, a single device)
shm     two processes of one host, on CPUs: the receiver's slots in shared memory, written in place
peer    two GPUs of one host: kernels write the receiver's slots tile by tile, and start on the tiles that came
dist    torch.distributed isend and posted irecv on a group of the link's own; gloo or NCCL, across hosts
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist

from tpkernels.links.agreement import agree
from tpkernels.links.base import Key, Link, LinkError, LinkSpec, Speed, Transfers, Trouble
from tpkernels.links.dist import DistLink
from tpkernels.links.local import LocalLink
from tpkernels.links.peer import PeerLink, peer_missing
from tpkernels.links.shm import ShmLink, shm_missing

__all__ = [
    "DistLink",
    "Key",
    "Link",
    "LinkError",
    "LinkSpec",
    "LocalLink",
    "PeerLink",
    "ShmLink",
    "Speed",
    "Transfers",
    "Trouble",
    "open_link",
    "peer_missing",
    "shm_missing",
]

KINDS = ("local", "shm", "peer", "dist")


def open_link(kind: str, spec: LinkSpec, *, group: dist.ProcessGroup | None = None, **options: Any) -> Link:
    """This process's end of a link of `kind`.

    group: holds both ranks; "dist" sends through it, the others meet through it, so both ends make this call. options:
    of the medium (`ShmLink.open`, `PeerLink.open`).
    ValueError for an unknown kind, LinkError on both ends when they were asked for different links or do not come
    together."""
    if kind == "local":
        return LocalLink(spec)
    if kind not in KINDS:
        unknown = f"unknown kind of link {kind!r}; choose {', '.join(KINDS)}."
        if group is not None:  # the other end may know its kind, and waits
            with contextlib.suppress(LinkError):
                agree(kind, spec, group, trouble=unknown)
        raise ValueError(unknown)
    if group is None:
        raise ValueError(f"{spec}: a link of kind {kind!r} needs a process group that holds both of its ranks.")
    if kind == "dist":
        agree(kind, spec, group)
        return DistLink(spec, group)
    return (PeerLink if kind == "peer" else ShmLink).open(spec, group, **options)
