"""tpkernels._core: the C++ CPU kernels.

Tensors are (address, batch stride, token stride, head stride); address 0 is no tensor.
"""

from collections.abc import Callable
from mmap import mmap
from typing import Any

Tensor = tuple[int, int, int, int]
Sizes = tuple[int, int, int, int, int, int, int]
MaskSizes = tuple[int, int, int, int, int, int]

def isa_levels() -> list[str]:
    """ISA levels this machine can run, ascending."""

def isa_level() -> str:
    """The level in use: TPK_CPU_ISA or the highest; ValueError when TPK_CPU_ISA names one that cannot run here."""

def backward_query_tokens(group: int) -> int:
    """Tokens of the backward's query tile for `group` query heads a KV head: the invariance unit."""

def attention_forward(
    *,
    dtype: int,
    sizes: Sizes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: int,
    mask: MaskSizes,
    scale: float,
    softcap: float,
    sinks: int,
    num_threads: int,
) -> None: ...
def attention_backward(
    *,
    dtype: int,
    sizes: Sizes,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: int,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsinks: int,
    mask: MaskSizes,
    scale: float,
    softcap: float,
    sinks: int,
    num_threads: int,
) -> None: ...

Rows = tuple[int, int]

class Block:
    def __init__(
        self,
        gemm: int,
        dtype: int,
        hidden: int,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        ffn: int,
        rms: bool,
        gated: bool,
        eps: float,
    ) -> None: ...
    def saved_sizes(self, batch: int, tokens: int) -> list[int]: ...
    def forward(self, *arguments: Any) -> None: ...
    def backward(self, *arguments: Any) -> None: ...

def norm_forward(
    dtype: int,
    rms: bool,
    rows: int,
    columns: int,
    eps: float,
    x: Rows,
    delta: Rows,
    total: Rows,
    out: Rows,
    weight: int,
    bias: int,
    mean: int,
    rstd: int,
    num_threads: int,
    /,
) -> None:
    """The fused kernels take rows as (address, row stride); tpkernels/fused_rows.py."""

def norm_backward(
    dtype: int,
    rms: bool,
    rows: int,
    columns: int,
    dout: Rows,
    x: Rows,
    dresidual: Rows,
    dx: Rows,
    weight: int,
    mean: int,
    rstd: int,
    dweight: int,
    dbias: int,
    num_threads: int,
    /,
) -> None: ...
def rotary(
    dtype: int,
    inverse: bool,
    rows: int,
    heads: int,
    head_dim: int,
    turn_rows: int,
    x: Rows,
    out: Rows,
    turns: int,
    num_threads: int,
    /,
) -> None: ...
def gated_forward(
    dtype: int, activation: int, rows: int, columns: int, gate: Rows, up: Rows, out: Rows, num_threads: int, /
) -> None: ...
def gated_backward(
    dtype: int,
    activation: int,
    rows: int,
    columns: int,
    dout: Rows,
    gate: Rows,
    up: Rows,
    out: Rows,
    dgate: Rows,
    dup: Rows,
    num_threads: int,
    /,
) -> None: ...

class RingGeometry:
    """Slots of a shared-memory link (Linux only, as Ring and Trouble)."""

    def __init__(self, *, slots: int, slot_bytes: int, tile_bytes: int) -> None: ...
    @property
    def bytes(self) -> int: ...
    def format(self, memory: mmap, generation: int, first_epoch: int) -> None: ...

class Trouble:
    """Why a wait ended: outcome "closed", "gone", "silent", "late", or "ended" by `give_up`."""

    outcome: str
    slot: int
    tile: int
    wanted: int
    seen: int
    seconds: float

class Beat:
    """Counts up a 32-bit word of `memory` until `stop`, whatever Python is doing (Linux only)."""

    def __init__(self, memory: mmap, offset: int) -> None: ...
    def stop(self) -> None: ...

class Ring:
    """One end of a shared-memory link; tpkernels.links.ShmLink is its interface."""

    def __init__(
        self,
        memory: mmap,
        geometry: RingGeometry,
        *,
        generation: int,
        sender: bool,
        spin_s: float,
        silence_s: float,
        timeout_s: float,
        socket: int,
        pidfd: int,
        dtype: Any,
        refuse: Callable[[Any, Any, int], Exception],
        lose: Callable[[Any, Trouble], Exception],
    ) -> None: ...
    done: int
    held: list[Any]
    began_at: float
    arrived_at: float
    posted_at: float
    peer_beat: int
    peer_gone: bool
    def slot_offset(self, slot: int) -> int: ...
    def expect(self, transfers: list[tuple[Any, int, tuple[int, ...], Any]]) -> None:
        """Key, slot, shape and tensor of each transfer, in order."""

    def begin(self) -> None: ...
    def watch(self, watch: Callable[[str, int], Any]) -> None:
        """For tests: `watch(action, tile)` before each action; true leaves a post or release out."""

    def give_up(self) -> None: ...
    def reserve(self, key: Any) -> Any: ...
    def put(self, key: Any, x: Any) -> None: ...
    def put_sum(self, key: Any, dtype: int, columns: int, x: Rows, residual: Rows, num_threads: int) -> Any: ...
    def take(self, key: Any, copies: bool) -> Any: ...
    def take_norm(
        self,
        key: Any,
        dtype: int,
        rms: bool,
        eps: float,
        columns: int,
        into: tuple[int, int, int, int, int],
        num_threads: int,
    ) -> Any:
        """into: addresses of out, weight, bias, mean, rstd; 0 for none."""

    def holds(self, key: Any) -> bool: ...
    def release(self, key: Any, poison: bool) -> None: ...
    def close(self, freed: Callable[[], None], within_s: float) -> bool:
        """From any thread: ends the call that is inside and waits for it; `freed` is called once nobody is. False if it
        stays longer."""
