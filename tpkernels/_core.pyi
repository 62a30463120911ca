"""tpkernels._core: the C++ CPU kernels.

Tensors are (address, batch stride, token stride, head stride); address 0 is no tensor.
"""

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
    """The fused kernels take rows as (address, row stride); tpkernels/fused.py."""

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
