"""What the compiler makes of the kernels, for GPUs that are not here: a selection of the table's rows.

`python -m tpkernels.triton.ahead_of_time` compiles and checks every row; that takes about 15 minutes on two cores. Here
two processes of it, without the interpreter, take the selection, at least one row of each architecture and kind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

# (kind, dtype, head_dim, value_head_dim, group, compute capability, features), heaviest first in each half
SELECTION = [
    ("backward", "bf16", 128, None, 8, 90, ()),
    ("backward", "bf16", 128, None, 8, 80, ()),
    ("backward", "bf16", 128, None, 8, 100, ()),
    ("backward", "fp16", 64, None, 3, 90, ("documents", "sinks")),
    ("few", "bf16", 128, None, 8, 90, ()),
    ("deterministic", "bf16", 72, None, 8, 90, ("window",)),
    ("backward", "fp32", 64, None, 1, 90, ()),
    ("forward", "bf16", 128, None, 8, 100, ()),
    ("forward", "bf16", 128, None, 8, 90, ()),
    ("forward", "bf16", 128, None, 8, 80, ()),
    ("forward", "bf16", 256, None, 8, 90, ()),
    ("forward", "bf16", 192, 128, 8, 89, ()),
    ("backward", "bf16", 72, None, 8, 120, ("window",)),
    ("split", "bf16", 128, None, 8, 90, ("sinks",)),
    ("forward", "fp16", 64, None, 3, 90, ("varlen",)),
    ("forward", "fp16", 64, None, 3, 90, ("window", "softcap", "sinks")),
    ("forward", "fp32", 128, None, 1, 120, ("softcap",)),
]
FIELDS = ("kind", "dtype", "head_dim", "value_head_dim", "group", "capability", "features")


def _environment() -> dict[str, str]:
    """Of a process that compiles: this one's paths, without the interpreter."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("TRITON_INTERPRET", None)
    return environment


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict]]:
    """Facts of each subject's kernels, by the subject's name."""
    pytest.importorskip("triton", reason="triton is not installed")
    subjects = [dict(zip(FIELDS, row, strict=True)) for row in SELECTION]
    workers = []
    for half in (subjects[::2], subjects[1::2]):
        command = [sys.executable, "-m", "tpkernels.triton.ahead_of_time", "--subjects", json.dumps(half)]
        workers.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment())
        )
    rows: dict[str, list[dict]] = {}
    for worker in workers:
        out, err = worker.communicate()
        assert worker.returncode in (0, 1), err
        for line in out.splitlines():
            row = json.loads(line)
            rows.setdefault(row["subject"], []).append(row)
    return rows


def name(kind, dtype, head_dim, value_head_dim, group, capability, features) -> str:
    dim = f"{head_dim}" + ("" if value_head_dim is None else f":{value_head_dim}")
    return "-".join([f"sm{capability}", kind, dtype, f"d{dim}", f"g{group}", *features])


@pytest.mark.parametrize("subject", [name(*row) for row in SELECTION])
def test_compiled_kernels_keep_their_promises(subject, compiled):
    """No spills but those the table states, shared and tensor memory within the GPU's, 16-byte accesses and none under
    4 bytes, tensor cores for 16 bits (wgmma on sm_90), never tf32."""
    rows = compiled[subject]
    kernels = {row["kernel"] for row in rows}
    expected = {
        "forward": {"attention_forward"},
        "split": {"attention_forward", "combine_splits"},
        "backward": {"prepare", "attention_backward_keys", "round_rows"},
        "deterministic": {"prepare", "attention_backward_keys", "attention_backward_queries"},
        "few": {"prepare", "attention_backward_keys", "attention_backward_queries"},
    }[subject.split("-")[1]]
    assert kernels - {"sink_gradient"} == expected
    broken = [f"{row['kernel']} ({row['tile']}): {', '.join(row['broken'])}" for row in rows if row["broken"]]
    assert not broken, broken


_COUNT = """
import collections, json, torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature
from tpkernels.backends import RawSettings
from tpkernels.mask import RawMask
from tpkernels.triton.plan_backward import plan_backward
from tpkernels.triton.plan_forward import plan_forward

target, binders, found = CUDABackend(GPUTarget("cuda", 90, 32)), {}, collections.defaultdict(set)
heads, sums = [torch.empty(1, 4096, n, 64, dtype=torch.bfloat16) for n in (8, 2, 2)], torch.empty(2, 1, 4096, 2, 64)
starts = torch.zeros(1, 4096, dtype=torch.int32)
for deterministic in (False, True):
    for start in (700, 701, 1024, 3000):
        for tokens in (*range(2, 40), 64, 300, 1000):
            q, out, dout, dq = (torch.empty(1, tokens, 8, 64, dtype=torch.bfloat16) for _ in range(4))
            k, v, dk, dv = (x[:, :start + tokens] for x in (*heads[1:], *sums))
            lse, end = torch.empty(1, 8, tokens), start + tokens
            mask = RawMask(True, -1, -1, starts[:, start:end])
            plan = {"settings": RawSettings(start, mask, 0.1, deterministic=deterministic), "architecture": "sm90"}
            plan["processors"] = 16
            launches = plan_forward(q, k, v, out=out, lse=lse, **plan)
            launches += plan_backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, dsinks=None, **plan)
            for item in launches:
                kernel = item.kernel
                if kernel not in binders:
                    binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, target)
                options = {"num_warps": item.warps, "num_stages": item.stages, **item.limits}
                _, specialization, options = binders[kernel](**item.arguments, **item.constants, **options)
                found[f"{kernel.__name__} {deterministic}"].add((str(specialization), str(options)))
print(json.dumps({name: len(keys) for name, keys in found.items()}))
"""


def test_no_length_or_start_of_a_slice_compiles_a_kernel_anew():
    """Triton compiles a kernel anew for integers that 16 divides, for the integer 1 and for aligned pointers, unless it
    is told not to. What remains: a forward with or without splits, a deterministic dq for few and for many rows."""
    pytest.importorskip("triton", reason="triton is not installed")
    worker = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, env=_environment())
    assert worker.returncode == 0, worker.stderr
    kinds = {"attention_forward False": 2, "attention_backward_queries True": 2}
    counts = json.loads(worker.stdout)
    assert len(counts) == 9 and counts == {name: kinds.get(name, 1) for name in counts}


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8", "3.9", ""])
def test_the_table_serves_every_call(version, device):
    """Every architecture, head_dim, dtype and kind has one row, with its reason, that a compiler accepts."""
    from tpkernels.triton import tiles

    for architecture in (*tiles.ARCHITECTURES, tiles.INTERPRETER):
        for head_dim in (1, 64, 65, 128, 129, 256):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                size = dtype.itemsize
                found = {kind: tiles.find(architecture, head_dim, size, kind, version=version) for kind in tiles.KINDS}
                for tile in found.values():
                    assert tile.reason and all(n & (n - 1) == 0 for n in tile[:3]) and min(tile.rows, tile.keys) >= 16
                # The bits of dq must not depend on how many query tiles a slice has.
                assert found["few queries"].keys == found["queries"].keys
                assert found["few queries"].rows <= found["queries"].rows
                # The unit of slices at which dk and dv keep their bits is that of kind keys.
                assert found["keys"].rows % found["costly keys"].rows == 0
    with pytest.raises(ValueError, match="no forward tile for sm90, head_dim 300"):
        tiles.find("sm90", 300, 2, "forward")


def test_a_version_of_triton_changes_its_own_rows_only():
    """A row for one version is found by that version, at the head_dims of the row it replaces and no others."""
    from tpkernels.triton import tiles

    for (version, architecture, largest, size, kind), own in tiles._TABLE_OF_VERSION.items():
        assert tiles.find(architecture, largest, size, kind, version=version) is own
        assert tiles.find(architecture, largest // 2 + 1, size, kind, version=version) is own
        assert largest == 64 or tiles.find(architecture, largest // 2, size, kind, version=version) is not own
        assert tiles.find(architecture, largest, size, kind, version="") is not own
    triton = pytest.importorskip("triton", reason="triton is not installed")
    assert triton.__version__.startswith(tiles.triton_version() + ".")


def test_an_odd_stride_gives_up_wide_accesses_only_then(device):
    """The unit of strides is 16 bytes where every row of every tensor starts on 16 bytes, else one element."""
    from tpkernels.triton.problem import strides_unit

    x = torch.zeros(2, 6, 3, 40, dtype=torch.float16, device=device)
    assert strides_unit([x, x[:, 1:], x.expand(2, 6, 3, 40)]) == 8
    assert strides_unit([x[:1, :1, :1, :5]]) == 8  # one row: its strides do not matter
    assert strides_unit([x, x[..., 1:]]) == 1
    assert (
        strides_unit([torch.zeros(1, 2, 1, 72, dtype=torch.float16), torch.zeros(1, 2, 2, 17, dtype=torch.float16)])
        == 1
    )
    assert strides_unit([torch.zeros(1, 2, 2, 20)]) == 4


def test_the_sweep_knows_every_row():
    from tpkernels.triton import tiles

    pytest.importorskip("triton", reason="triton is not installed")
    from tpkernels.triton import ahead_of_time

    for row in tiles.ARCHITECTURES.values():
        subjects = list(ahead_of_time.table_subjects(row.capabilities[0]))
        assert len({str(subject) for subject in subjects}) == len(subjects)
        for field in dataclasses.fields(ahead_of_time.Subject):
            assert field.name in FIELDS


def test_tuning_needs_a_gpu(device, capsys):
    if device == "cuda":
        pytest.skip("tuning on a GPU takes minutes; without one it must say so")
    from tpkernels.triton import tiles, tune

    assert tune.main([]) == 1 and "no CUDA device" in capsys.readouterr().err
    assert len(set(tune.candidates())) == 4 * 4 * 2 * 4 and set(tune._KERNELS) == set(tiles.KINDS)
