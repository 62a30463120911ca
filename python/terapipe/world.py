"""Where this process stands in a launch, as torchrun's environment (or `engine.launch.run_local`) says. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """This process is `rank` of `size`; on its host it is `local_rank` of `local_size`."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


ALONE = World()


def launched_world() -> World | None:
    """The launch that started this process, None without one."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    size = int(os.environ["WORLD_SIZE"])
    return World(
        rank=int(os.environ["RANK"]),
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
    )
