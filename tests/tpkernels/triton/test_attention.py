"""The Triton kernels against exact answers under the tolerance rule (tpkernels.testing), and what is theirs alone:
splits, slicing without a changed bit, packed sequences, huge offsets, the backend's refusals.

Sizes are small because the interpreter takes milliseconds a tile; its tiles are 32 x 32.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from tpkernels import backends, invariance_unit, testing
from tpkernels.backends import AttentionCall, RawSettings
from tpkernels.mask import RawMask
from tpkernels.testing import AttentionCase
from tpkernels.triton import TritonBackend, tiles

DTYPES = [torch.float32, torch.float16]
# numpy, which the interpreter computes with, warns of exp(-inf) and 0 / 0 in rows that see no key.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

case = AttentionCase
CASES = [
    case(1),
    case(1, 70),
    case(5),
    case(2, 3, query_heads=3, kv_heads=1),
    case(33, 31),
    case(64, 32),
    case(40, 27, cached=False),
    case(37, -36, cached=False),
    case(70, -20, cached=False, causal=False, window=(4, 4)),
    *[case(37, 29, head_dim=dim) for dim in (1, 3, 40, 72, 111, 256)],
    *[case(29, 37, head_dim=dim, value_head_dim=value) for dim, value in ((8, 24), (40, 72), (111, 8))],
    *[case(21, 13, query_heads=q, kv_heads=kv, batch=2) for q, kv in ((3, 1), (7, 1), (8, 1), (6, 2), (7, 7), (40, 1))],
    *[
        case(47, 53, causal=causal, window=window)
        for causal, window in (
            (True, (5, None)),
            (True, (40, 7)),
            (False, (None, None)),
            (False, (17, 3)),
            (False, (None, 5)),
            (False, (0, 33)),
        )
    ],
    case(53, 40, causal=False, window=(9, None), cached=False),
    *[case(43, 57, documents=(rows,)) for rows in ((36, 14, 50), (1, 99), (0, 60, 0, 40), (1,) * 9 + (91,))],
    case(43, 57, batch=2, documents=((36, 14, 50), (9, 91)), query_heads=6, kv_heads=2, sinks=True),
    case(43, 57, documents=((36, 14, 50),), window=(20, None), cached=False),
    case(41, -20, cached=False, sinks=True),
    case(33, 20, softcap=5.0, magnitude=3.0),
    case(33, 20, softcap=30.0, sinks=True, query_heads=6, kv_heads=2, head_dim=40),
    case(33, 20, sinks=True, window=(7, None)),
    case(17, magnitude=5.0),
    case(33, 20, scale=-0.3),
    case(33, 20, scale=1.7),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_as_close_as_the_same_precision_reference(case, dtype, device):
    """Each case is fast (split keys, dq by reductions) in fp16 and deterministic in fp32, or the other way round."""
    inputs = testing.make_inputs(case, dtype, device=device)
    deterministic = (CASES.index(case) % 2 == 0) == (dtype == torch.float32)
    testing.check(testing.run(inputs, backend="triton", deterministic=deterministic), inputs)


@pytest.mark.parametrize(
    "sizes", [{}, {"sinks": True, "query_heads": 6}, {"window": (300, None), "softcap": 8.0}], ids=str
)
def test_split_keys(sizes, device):
    """Few rows behind many keys: the interpreter counts as 8 multiprocessors, so each tile's keys are split."""
    case = AttentionCase(5, 420, cached=False, **{"query_heads": 2, "kv_heads": 1, **sizes})
    inputs = testing.make_inputs(case, torch.float32, device=device)
    testing.check(testing.run(inputs, backend="triton"), inputs)


def test_a_split_that_sees_nothing_and_rows_that_see_nothing(device):
    """flashinfer #4051, vllm #39148: merging states that are both empty gave NaN; it is out 0 and lse -inf."""
    from tpkernels.triton import launch
    from tpkernels.triton.plan_forward import plan_forward

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 16, device=device) for n in (40, 64, 64))
    for sinks in (None, torch.full((1,), 0.5, device=device)):
        out, lse = torch.full_like(q, math.nan), torch.full((1, 1, 40), math.nan, device=device)
        launches = plan_forward(
            q, k, v, out=out, lse=lse, settings=RawSettings(-30, RawMask(True, -1, -1, None), 0.25, sinks=sinks),
            architecture=tiles.architecture(torch.device(device)), processors=10**6,
            tile=tiles.Tile(16, 16, 4, 1, "four key tiles, so that there may be a split"),
        )  # fmt: skip
        for item in launches:  # more splits than the heuristic would take: most of them see no key at all
            if "splits" in item.arguments:
                item.arguments["splits"] = 4
        assert len(launches) in (1, 2)
        launch.run(launches, torch.device(device))
        assert (out[:, :30] == 0).all() and out.isfinite().all()
        assert (lse[..., :30] == (-math.inf if sinks is None else 0.5)).all() and lse[..., 30:].isfinite().all()


def test_splits_follow_from_sizes():
    from tpkernels.triton.plan_forward import MAX_SPLITS, choose_splits

    assert choose_splits(programs=32, key_tiles=256, slots=132) == 4  # slice 64 behind 32k, 64/8 heads
    assert choose_splits(programs=132, key_tiles=256, slots=132) == 1
    assert choose_splits(programs=1, key_tiles=7, slots=132) == 1
    assert choose_splits(programs=1, key_tiles=10_000, slots=132) == MAX_SPLITS


# ---- slices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "features", [{}, {"window": (30, None), "softcap": 4.0}, {"sinks": True, "documents": ((50, 29),)}], ids=str
)
def test_no_slicing_changes_a_bit(features, dtype, device):
    """out, lse and dq for any slicing; dk and dv too for slices at multiples of the unit."""
    heads = {"query_heads": 3, "kv_heads": 1, "head_dim": 24}
    unit = invariance_unit(**heads, dtype=dtype, device=device, backend="triton")
    case = AttentionCase(79, **heads, **features)
    inputs = testing.make_inputs(case, dtype, device=device)
    whole = testing.run(inputs, backend="triton", deterministic=True, slices=[79])
    sliced = [(13, 1, 33, 32)] if unit > 39 else [(13, 1, 33, 32), (unit, 79 - unit), (unit, unit, 79 - 2 * unit)]
    for slices in sliced:
        result = testing.run(inputs, backend="triton", deterministic=True, slices=slices)
        names = ["out", "lse", "dq"] + (["dk", "dv"] if slices[0] == unit else [])
        for name in names:
            assert torch.equal(getattr(whole, name), getattr(result, name)), (slices, name)
    assert unit > 39 or len(sliced) == 3


@pytest.mark.parametrize(("group", "rows", "unit"), [(1, 64, 64), (8, 64, 8), (3, 64, 64), (6, 64, 32), (128, 64, 1)])
def test_the_invariance_unit_is_where_packed_tiles_begin(group, rows, unit, device, monkeypatch):
    monkeypatch.setattr(tiles, "find", lambda *_: tiles.Tile(rows, 64, 4, 2, ""))
    call = AttentionCall(device, torch.float32, group, 1, 64, 64, deterministic=True)
    assert TritonBackend().invariance_unit(call) == unit


# ---- the host --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_no_value_is_read_on_the_host(deterministic, device, monkeypatch):
    """From a call to its launches, on meta tensors, which have no values: whoever asked for one would wait for a GPU,
    and no graph could be captured."""
    from tpkernels.triton import launch, varlen

    launched = []
    monkeypatch.setattr(launch, "run", lambda launches, _: launched.extend(item.kernel.__name__ for item in launches))

    def meta(*shape, dtype=torch.float16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, k, v, lse = meta(2, 40, 6, 24), meta(2, 100, 2, 24), meta(2, 100, 2, 16), meta(2, 6, 40, dtype=torch.float32)
    out, sums = meta(2, 40, 6, 16), [meta(*x.shape, dtype=torch.float32) for x in (k, v)]
    sinks, starts = meta(6, dtype=torch.float32), meta(2, 40, dtype=torch.int32)
    settings = RawSettings(60, RawMask(True, 30, -1, starts), 0.2, 5.0, sinks, deterministic)
    backend = TritonBackend()
    backend.forward(q, k, v, out=out, lse=lse, settings=settings)
    backend.backward(
        out, q, k, v, out, lse, dq=q, dk=sums[0], dv=sums[1], dsinks=sinks, settings=settings
    )  # fmt: skip
    cu = meta(3, dtype=torch.int32)
    packed = {"lengths": launch.Lengths(cu, cu, 30, 70), "mask": RawMask(True, -1, -1, None), "scale": 0.2}
    varlen.varlen_forward(q[0], k[0], v[0], **packed)
    varlen.varlen_backward(out[0], q[0], k[0], v[0], out[0], lse[0], deterministic=deterministic, **packed)
    assert launched.count("attention_forward") == 2 and launched.count("attention_backward_keys") == 2


def test_a_graph_is_captured_and_nothing_waits_for_the_gpu(device):
    """Forward and backward of a slice, on a stream of their own, replayed on other inputs."""
    if device != "cuda":
        pytest.skip("CUDA graphs are captured on a GPU")
    case = AttentionCase(100, 300, query_heads=6, kv_heads=2, head_dim=64, cached=False)
    first, second = (testing.make_inputs(case, torch.float16, seed=seed, device=device) for seed in (0, 1))
    q, k, v, dout = first.q, first.k, first.v, first.dout
    out, dq, lse = torch.empty_like(q), torch.empty_like(q), torch.empty(*q.shape[:1], 6, 100, device=device)
    sums = [torch.zeros(x.shape, device=device) for x in (k, v)]
    settings, backend = RawSettings(300, RawMask(True, -1, -1, None), 0.125, deterministic=True), TritonBackend()

    def step():
        for x in sums:
            x.zero_()
        backend.forward(q, k, v, out=out, lse=lse, settings=settings)
        backend.backward(dout, q, k, v, out, lse, dq=dq, dk=sums[0], dv=sums[1], dsinks=None, settings=settings)

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for x, other in zip((q, k, v, dout), (second.q, second.k, second.v, second.dout), strict=True):
        x.copy_(other)
    graph.replay()
    replayed = [x.clone() for x in (out, lse, dq, *sums)]
    step()
    assert all(torch.equal(a, b) for a, b in zip(replayed, (out, lse, dq, *sums), strict=True))


# ---- packed sequences ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths", "causal"),
    [
        ((0, 40, 7, 1, 0), (25, 33, 14, 40, 0), True),
        ((19, 5, 30), (19, 5, 30), False),
    ],
)
def test_packed_sequences_equal_separate_ones(q_lengths, k_lengths, causal, deterministic, device):
    """FA #443 (rows without keys), FA #2562, #1713, PR #2568 (sequences without queries or keys: gradients must be 0),
    pytorch #176793 and FA PR #2324 (rows behind the last sequence). Right: as each sequence alone, 0 elsewhere."""
    from tpkernels.triton.problem import Lengths
    from tpkernels.triton.varlen import varlen_backward, varlen_forward

    torch.manual_seed(0)
    heads, kv_heads, dim, value_dim, spare = 6, 2, 16, 8, 5

    def cumulative(lengths):
        return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)

    total_q, total_k = sum(q_lengths), sum(k_lengths)
    q = torch.randn(total_q + spare, heads, dim, device=device)
    dout = torch.randn(total_q + spare, heads, value_dim, device=device)
    k = torch.randn(total_k + spare, kv_heads, dim, device=device)
    v = torch.randn(total_k + spare, kv_heads, value_dim, device=device)
    for x, used in ((q, total_q), (dout, total_q), (k, total_k), (v, total_k)):
        x[used:] = math.nan
    lengths = Lengths(cumulative(q_lengths), cumulative(k_lengths), max(q_lengths) + 3, max(k_lengths))
    settings = {"mask": RawMask(causal, -1, -1, None), "scale": 0.3, "sinks": torch.randn(heads, device=device)}
    out, lse = varlen_forward(q, k, v, lengths=lengths, **settings)
    grads = varlen_backward(dout, q, k, v, out, lse, lengths=lengths, deterministic=deterministic, **settings)

    backend = backends.get("reference")
    expected_dsinks = torch.zeros(heads, device=device)
    q_begin = k_begin = 0
    for q_length, k_length in zip(q_lengths, k_lengths, strict=True):
        rows, keys = slice(q_begin, q_begin + q_length), slice(k_begin, k_begin + k_length)
        q_begin, k_begin = rows.stop, keys.stop
        if not (q_length and k_length):
            assert (grads.dk[keys] == 0).all() and (grads.dv[keys] == 0).all() and (grads.dq[rows] == 0).all()
            continue
        alone = {"settings": RawSettings(start=k_length - q_length, **settings)}
        one = [x[None] for x in (q[rows], k[keys], v[keys])]
        one_out, one_lse = torch.empty_like(out[None, rows]), torch.empty_like(lse[None, :, rows])
        backend.forward(*one, out=one_out, lse=one_lse, **alone)
        dq, dk, dv = torch.empty_like(one[0]), torch.zeros_like(one[1]), torch.zeros_like(one[2])
        backend.backward(dout[None, rows], *one, one_out, one_lse, dq=dq, dk=dk, dv=dv, dsinks=expected_dsinks, **alone)
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(out[rows], one_out[0], **close)
        torch.testing.assert_close(lse[:, rows], one_lse[0], **close)
        torch.testing.assert_close(grads.dq[rows], dq[0], **close)
        torch.testing.assert_close(grads.dk[keys], dk[0], **close)
        torch.testing.assert_close(grads.dv[keys], dv[0], **close)
    torch.testing.assert_close(grads.dsinks, expected_dsinks, rtol=1e-4, atol=1e-5)
    assert (out[total_q:] == 0).all() and (lse[:, total_q:] == -math.inf).all() and (grads.dq[total_q:] == 0).all()
    assert (grads.dk[total_k:] == 0).all() and (grads.dv[total_k:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_packed_sequences_take_sinks_as_they_lie(dtype, device):
    """Sinks with a stride, or in another dtype than the kernels': the same as a copy of them in fp32."""
    from tpkernels.triton.problem import Lengths
    from tpkernels.triton.varlen import varlen_backward, varlen_forward

    q, k, v, dout = (torch.randn(20, heads, 16, device=device) for heads in (4, 2, 2, 4))
    sinks = (torch.randn(8, device=device) * 3).to(dtype)[::2]
    cu = torch.tensor([0, 12, 20], dtype=torch.int32, device=device)
    settings = {"lengths": Lengths(cu, cu, 12, 12), "mask": RawMask(True, -1, -1, None), "scale": 0.2}
    results = []
    for given in (sinks, sinks.float().contiguous()):
        out, lse = varlen_forward(q, k, v, sinks=given, **settings)
        grads = varlen_backward(dout, q, k, v, out, lse, sinks=given, deterministic=True, **settings)
        results.append((out, lse, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_lengths_that_do_not_fit_are_refused(device):
    from tpkernels.triton.problem import Lengths
    from tpkernels.triton.varlen import varlen_forward

    q = torch.randn(4, 2, 16, device=device)
    settings = {"mask": RawMask(True, -1, -1, None), "scale": 1.0}
    cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"cu_q must be contiguous int32 .sequences . 1., got torch.int64 .2."):
        varlen_forward(q, q, q, lengths=Lengths(cu.long(), cu, 4, 4), **settings)
    with pytest.raises(ValueError, match=r"cu_q is \[2\] and cu_k \[3\]"):
        varlen_forward(q, q, q, lengths=Lengths(cu, torch.cat([cu, cu[1:]]), 4, 4), **settings)


# ---- the registry ----------------------------------------------------------------------------------------------------


def call(device="cpu", dtype=torch.float32, head_dim=64, value_head_dim=64):
    return AttentionCall(device, dtype, 6, 2, head_dim, value_head_dim)


def test_what_the_backend_refuses(device, monkeypatch):
    backend = TritonBackend()
    assert backend.refuses(call(device)) is None
    assert "not float64" in backend.refuses(call(device, torch.float64))
    assert backend.refuses(call(device, head_dim=257)) == "head_dim 257/64 is above 256"
    assert "not on meta" in backend.refuses(call("meta"))
    if device == "cpu":
        assert "raw bits of bf16" in backend.refuses(call(dtype=torch.bfloat16))
        for numpy, usable in (("2.3.5", True), ("2.4.0", False)):
            monkeypatch.setattr("triton.__version__", "3.6.0")
            monkeypatch.setattr("numpy.__version__", numpy)
            assert (backend.unusable() is None) == usable
        assert backend.unusable() == "the interpreter of triton 3.6 needs numpy below 2.4, not 2.4.0"
        monkeypatch.delenv("TRITON_INTERPRET")
        assert backend.refuses(call()).startswith("it runs on CUDA tensors")
        assert "no CUDA device" in backend.unusable()


def test_cpu_tensors_go_to_triton_only_when_asked(device):
    assert backends.select(call()).name == "cpu"
    if device == "cpu":
        assert backends.select(call(), "triton").name == "triton"


@pytest.mark.parametrize("broken", ["missing", "raises", "old"])
def test_a_missing_or_broken_triton_is_a_reason_and_not_an_error(broken, tmp_path):
    """In a process of its own, with a triton in front of the real one that is no good."""
    texts = {"missing": None, "raises": "raise OSError('libcuda.so: no such file')", "old": "__version__ = '2.1.0'"}
    reasons = {"missing": "triton is not installed", "raises": "OSError: libcuda.so", "old": "triton 2.1.0 is not"}
    program = (
        "import tpkernels; from tpkernels import backends; print([r for r in backends.describe() if r[0] == 'triton'])"
    )
    if texts[broken] is None:
        program = "import importlib.util as u; f = u.find_spec; " + (
            "u.find_spec = lambda name, *a: None if name == 'triton' else f(name, *a); " + program
        )
    else:
        (tmp_path / "triton").mkdir()
        (tmp_path / "triton/__init__.py").write_text(texts[broken])
        (tmp_path / "triton/language.py").write_text("")
    paths = [str(tmp_path), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "False" in done.stdout and reasons[broken] in done.stdout
