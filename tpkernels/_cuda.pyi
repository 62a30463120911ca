"""tpkernels._cuda: the CUDA kernels, built when TPK_CUDA asks for them or a GPU and nvcc are there.

Tensors are (address, batch stride, token stride, head stride), rows (address, stride); address 0 is no tensor. `stream`
is a cudaStream_t. `allocate` turns bytes into the address of device memory that outlives the call's kernels. A slot of
a peer link is the addresses of data, claim, flags, credit, uses, arrived, control and words, then its budget in
nanoseconds and its index; all 0 is none.
"""

from collections.abc import Callable

Tensor = tuple[int, int, int, int]
Sizes = tuple[int, int, int, int, int, int, int]
MaskSizes = tuple[int, int, int, int, int, int]
Rows = tuple[int, int]

def device_count() -> int:
    """CUDA devices; RuntimeError with the driver's reason when there is no usable driver."""

def capability(device: int) -> int:
    """Compute capability, 90 is 9.0; RuntimeError below 80."""

def invariance_rows(head_dim: int, device: int) -> int:
    """Packed query rows of the backward's tile."""

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
    deterministic: bool,
    device: int,
    stream: int,
    allocate: Callable[[int], int],
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
    deterministic: bool,
    device: int,
    stream: int,
    allocate: Callable[[int], int],
) -> None: ...
def norm_forward(
    *,
    dtype: int,
    rms: bool,
    rows: int,
    dim: int,
    eps: float,
    x: Rows,
    delta: Rows,
    total: Rows,
    out: Rows,
    weight: int,
    bias: int,
    mean: int,
    rstd: int,
    device: int,
    stream: int,
) -> None: ...
def norm_backward(
    *,
    dtype: int,
    rms: bool,
    rows: int,
    dim: int,
    dout: Rows,
    x: Rows,
    dresidual: Rows,
    dx: Rows,
    weight: int,
    mean: int,
    rstd: int,
    dweight: int,
    dbias: int,
    device: int,
    stream: int,
    allocate: Callable[[int], int],
) -> None: ...

peer_words: dict[str, int]
peer_tile_rows: int

def peer_take_credit(*, slot: tuple[int, ...], device: int, stream: int) -> None: ...
def peer_begin_use(*, slot: tuple[int, ...], tiles: int, device: int, stream: int) -> None: ...
def peer_end_use(*, slot: tuple[int, ...], release: bool, device: int, stream: int) -> None: ...
def peer_add_put(
    *,
    slot: tuple[int, ...],
    dtype: int,
    rows: int,
    columns: int,
    x: int,
    residual: int,
    out: int,
    device: int,
    stream: int,
) -> None: ...
def peer_wait_norm(
    *,
    slot: tuple[int, ...],
    dtype: int,
    rms: bool,
    rows: int,
    columns: int,
    eps: float,
    x: int,
    out: int,
    weight: int,
    bias: int,
    mean: int,
    rstd: int,
    device: int,
    stream: int,
) -> None: ...
def peer_matmul_add_put(
    *,
    slot: tuple[int, ...],
    dtype: int,
    rows: int,
    n: int,
    k: int,
    transposed: bool,
    a: int,
    b: int,
    residual: int,
    out: int,
    device: int,
    stream: int,
) -> None: ...
def peer_wait_matmul(
    *,
    slot: tuple[int, ...],
    dtype: int,
    rows: int,
    n: int,
    k: int,
    transposed: bool,
    a: int,
    b: int,
    residual: int,
    out: int,
    device: int,
    stream: int,
) -> None: ...
