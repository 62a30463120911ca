"""Time candidate tiles of one kernel on this GPU and print the fastest as a row for the table in tiles.py.

    python -m tpkernels.triton.tune --kind forward --head-dim 128 --dtype bf16 --tokens 2048 --prefix 30720

Nothing else in the package tunes: what runs is what the table says. The one trap: a row serves all lengths, so look at
several (a long sequence, a short slice behind a long prefix) before changing it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton

from tpkernels.backends import RawSettings
from tpkernels.mask import RawMask
from tpkernels.triton import launch, tiles
from tpkernels.triton.plan_backward import plan_backward
from tpkernels.triton.plan_forward import plan_forward
from tpkernels.triton.tiles import Tile

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_KERNELS: dict[tiles.Kind, tuple[str, str]] = {
    "forward": ("tile", "attention_forward"),
    "softcap forward": ("tile", "attention_forward"),
    "keys": ("keys_tile", "attention_backward_keys"),
    "costly keys": ("keys_tile", "attention_backward_keys"),
    "queries": ("queries_tile", "attention_backward_queries"),
    "few queries": ("queries_tile", "attention_backward_queries"),
}


def candidates() -> Iterator[Tile]:
    """Every size that some table row could have; those that do not fit the GPU fail and are left out."""
    for rows, keys, warps, stages in itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)):
        yield Tile(rows, keys, warps, stages, "")


def milliseconds(kind: tiles.Kind, tile: Tile, options: argparse.Namespace, device: torch.device) -> float:
    """Median time of that one kernel for a causal slice of options.tokens behind options.prefix."""
    dtype, keys = _DTYPES[options.dtype], options.prefix + options.tokens

    def random(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(options.batch, tokens, heads, options.head_dim, dtype=dtype, device=device)

    q, dout = random(options.tokens, options.heads), random(options.tokens, options.heads)
    k, v = random(keys, options.kv_heads), random(keys, options.kv_heads)
    out, lse = torch.empty_like(q), torch.zeros(options.batch, options.heads, options.tokens, device=device)
    where, kernel = _KERNELS[kind]
    settings = RawSettings(
        options.prefix,
        RawMask(True, -1, -1, None),
        options.head_dim**-0.5,
        softcap=30.0 if kind in ("softcap forward", "costly keys") else 0.0,
        deterministic=where == "queries_tile" or (where == "keys_tile" and options.deterministic),
    )
    planned: dict[str, Any] = {
        "settings": settings,
        "architecture": tiles.architecture(device),
        "processors": launch.processors_of(device),
        where: tile,
    }
    if where == "tile":
        launches = plan_forward(q, k, v, out=out, lse=lse, **planned)
    else:
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=device) for x in (k, v)]
        gradients: dict[str, Any] = {"dq": torch.empty_like(q), "dk": sums[0], "dv": sums[1], "dsinks": None}
        launches = plan_backward(dout, q, k, v, out, lse, **gradients, **planned)
    launch.run(launches, device)
    chosen = [item for item in launches if item.kernel.__name__ == kernel]
    return float(triton.testing.do_bench(lambda: launch.run(chosen, device), quantiles=[0.5]))


def main(arguments: list[str] | None = None) -> int:
    """Print one line a candidate, the fastest last, as a row of the table; 1 without a GPU."""
    parser = argparse.ArgumentParser(description="Time tiles of one kernel, print a row for the table")
    parser.add_argument("--kind", choices=tiles.KINDS, default="forward")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bf16")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--prefix", type=int, default=6144)
    parser.add_argument("--deterministic", action="store_true", help="kinds of keys: without the share of dq")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("tune: there is no CUDA device to time tiles on", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    timed = []
    for tile in candidates():
        try:
            time = milliseconds(options.kind, tile, options, device)
        except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError, RuntimeError) as error:
            print(f"{tile[:4]}: does not fit ({str(error).splitlines()[0][:80]})")
            continue
        timed.append((time, tile))
        print(f"{tile[:4]}: {time:.4f} ms")
    time, best = min(timed)
    name = torch.cuda.get_device_name(device)
    reason = f"{time:.3f} ms on {name}, {options.tokens} tokens behind {options.prefix}"
    size = _DTYPES[options.dtype].itemsize
    row = f'Tile({", ".join(map(str, best[:4]))}, "{reason}")'
    architecture, head_dim = tiles.architecture(device), tiles.padded(options.head_dim)
    print(f'    (("{architecture}",), {head_dim}, {size}, "{options.kind}", {row}),')
    return 0


if __name__ == "__main__":
    sys.exit(main())
