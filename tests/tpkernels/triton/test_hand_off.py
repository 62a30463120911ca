"""The hand-off kernels: against the same kernels without a slot bit for bit, their protocol by programs, and what the
compiler makes of them. `python test_hand_off.py` prints their PTX, as JSON.

Both ends run in one process here, one after the other; tests/tpkernels/test_links_peer.py runs two processes. Epochs
begin just before they wrap, in every test.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from torch import Tensor

COUNTED_TURNS = 40
NEAR_WRAP = -2  # as int32
CAPABILITIES = (80, 90, 100)
KERNELS = ("take_credit", "begin_use", "end_use", "add_put", "wait_norm", "matmul_add_put", "wait_matmul")


def make_slot(rows: int, columns: int, dtype: torch.dtype, device: str):
    """A slot whose two ends are one process, so they share the words of their own too, but for `uses`: (sender's view,
    receiver's view)."""
    from tpkernels.hand_off import Slot
    from tpkernels.triton.plan_hand_off import TILE_ROWS

    tiles = -(-rows // TILE_ROWS)
    epochs = torch.full((4 + tiles, 32), NEAR_WRAP, dtype=torch.int32, device=device)
    data = torch.full((rows, columns), torch.nan, dtype=dtype, device=device)

    def end(uses: Tensor):
        words = torch.zeros(8, dtype=torch.int32, pin_memory=device == "cuda")
        control = torch.tensor([0, 0, 1, 77], dtype=torch.int32, device=device)
        flags = epochs[4:].reshape(-1)[:tiles]
        arrived = torch.zeros(tiles, dtype=torch.int32, device=device)
        budget = COUNTED_TURNS if device == "cpu" else 100_000_000
        return Slot(3, data, epochs[0], flags, epochs[1], uses, arrived, control, words, budget, TILE_ROWS)

    return end(epochs[2]), end(epochs[3])


@pytest.fixture
def run(device):
    from tpkernels.triton import launch

    def run(*launches) -> None:
        launch.run(launches, torch.device(device))
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def randn(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


ALL_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@ALL_DTYPES
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (37, 5), (16, 48)])
def test_fused_equals_unfused_bitwise_use_after_use(dtype, rows, columns, device, run):
    """Sum and put, wait and norm, product and put, wait and product, each against its kernel without a slot; the sum
    also against torch."""
    from tpkernels.triton import plan_hand_off as plan

    sender, receiver = make_slot(rows, columns, dtype, device)
    tiles = sender.flags.shape[0]
    made = {"dtype": dtype, "device": device}
    for use in range(4):
        x, residual = randn(rows, columns, **made), randn(rows, columns, **made)
        a, weight = randn(rows, 21, **made), randn(columns, 21, **made)
        plain = torch.empty(rows, columns, **made)
        if use % 2:
            run(plan.take_credit(sender), plan.add_put(sender, x, residual))
            run(plan.add_put(None, x, residual, out=plain))
            assert torch.equal(plain, x + residual)
        else:
            b = weight if use else weight.T.contiguous()
            run(plan.take_credit(sender), plan.matmul_add_put(sender, a, b, residual, transposed=b is weight))
            run(plan.matmul_add_put(None, a, b, residual, transposed=b is weight, out=plain))
            product = torch.empty_like(plain)
            run(plan.matmul_add_put(None, a, b, None, transposed=b is weight, out=product))
            assert torch.equal(plain, product + residual)  # rounded where two kernels round
            exact = a.double() @ weight.double().T
            assert (product - exact).abs().max() <= 2 * ((a @ weight.T) - exact).abs().max() + 1e-6
        run(plan.begin_use(receiver, 1))
        assert torch.equal(receiver.data, plain)

        gain, bias = randn(columns, **made), randn(columns, **made)
        results = []
        for slot, source in ((receiver, None), (None, plain)):
            out, product = torch.empty(rows, columns, **made), torch.empty(rows, 7, **made)
            mean, rstd = torch.empty(2, rows, 1, device=device)
            norm = {"rows": rows, "eps": 1e-5, "out": out, "rstd": rstd, "x": source}
            run(plan.wait_norm(slot, gain, bias if use else None, mean=mean if use else None, **norm))
            b = randn(columns, 7, **made).zero_().add_(gain[:, None])
            run(plan.wait_matmul(slot, b, rows=rows, transposed=False, out=product, a=source))
            results.append((out, rstd, product, *((mean,) if use else ())))
        assert all(torch.equal(fused, unfused) for fused, unfused in zip(*results, strict=True))
        run(plan.end_use(receiver, release=True))
        assert sender.flags.tolist() == [NEAR_WRAP + 1 + use] * tiles and not sender.arrived.any()
        assert not sender.words.any() and not receiver.words.any()


@ALL_DTYPES
@pytest.mark.parametrize("rms", [True, False])
def test_the_norm_is_as_close_as_the_same_precision_reference(dtype, rms, device, run):
    from tpkernels.fused_reference import norm_forward
    from tpkernels.triton import plan_hand_off as plan

    rows, columns = 19, 67
    x = randn(rows, columns, dtype=dtype, device=device) + 3
    gain, bias = randn(columns, dtype=dtype, device=device), randn(columns, dtype=dtype, device=device)
    out, (mean, rstd) = torch.empty_like(x), torch.empty(2, rows, 1, device=device)
    run(plan.wait_norm(None, gain, bias, rows=rows, eps=1e-5, out=out, mean=None if rms else mean, rstd=rstd, x=x))
    exact = norm_forward(x.double(), gain.double(), bias.double(), eps=1e-5, rms=rms)
    same = norm_forward(x, gain, bias, eps=1e-5, rms=rms)
    for ours, theirs, best in ((out, same.out, exact.out), (rstd, same.rstd, exact.rstd)):
        noise = 2 * (((best + 0.3).to(ours.dtype) - 0.3).to(ours.dtype) - best).abs().max()
        assert (ours - best).abs().max() <= 2 * (theirs - best).abs().max() + noise


def test_rounding_to_bf16_is_torch_s(device, run):
    """Halfway cases, the largest numbers, infinities and NaN; here the interpreter's own cast would cut off."""
    from tpkernels.triton import plan_hand_off as plan

    ulp, most = 2.0**-7, torch.finfo(torch.bfloat16).max
    pairs = [(1, ulp / 2), (1 + ulp, ulp / 2), (1 + ulp, -ulp / 2), (most, most / 256), (most, most / 1024)]
    pairs += [(torch.inf, 1), (torch.inf, -torch.inf), (torch.nan, 1), *torch.randn(40, 2).tolist()]
    x, residual = (
        torch.tensor(pairs + [(-a, -b) for a, b in pairs]).T.to(torch.bfloat16).to(device)[:, None].contiguous()
    )
    out = torch.empty_like(x)
    run(plan.add_put(None, x, residual, out=out))
    assert torch.equal(out.nan_to_num(7.0), (x + residual).nan_to_num(7.0))


def test_the_last_program_of_a_row_tile_posts_and_row_tiles_come_in_order(device, run):
    """After any number of programs, exactly the row tiles that are whole have been posted."""
    from tpkernels.triton import plan_hand_off as plan

    if device == "cuda":
        pytest.skip("on a GPU programs run at once; the interpreter runs them one by one")
    rows, columns = 40, 37  # three tiles of rows, three of columns
    a, b = randn(rows, 8, dtype=torch.float32, device=device), randn(columns, 8, dtype=torch.float32, device=device)
    for programs in range(10):
        sender, _ = make_slot(rows, columns, torch.float32, device)
        whole = plan.matmul_add_put(sender, a, b, None, transposed=True)
        assert whole.grid == 9
        run(plan.take_credit(sender))
        if programs:
            run(dataclasses.replace(whole, grid=programs))
        posted = programs // 3
        assert sender.flags.tolist() == [NEAR_WRAP + 1] * posted + [NEAR_WRAP] * (3 - posted)


@pytest.mark.parametrize("consumer", ["norm", "product", "gate"])
def test_a_tile_that_never_comes_is_reported_and_stops_this_end(consumer, device, run):
    """Rows that came are computed; the report says what was missing; later kernels leave without a trace."""
    from tpkernels.triton import hand_off
    from tpkernels.triton import plan_hand_off as plan

    if device == "cuda":
        pytest.skip("the case is written for the interpreter's tiles of 16 rows")
    rows, columns = 40, 6
    sender, receiver = make_slot(rows, columns, torch.float32, device)
    x = randn(rows, columns, dtype=torch.float32, device=device)
    # The sender loses its last tile.
    run(plan.take_credit(sender), dataclasses.replace(plan.add_put(sender, x, None), grid=2))
    out, rstd = torch.full((rows, columns), torch.nan), torch.full((rows, 1), torch.nan)
    began = time.process_time()
    if consumer == "gate":
        run(plan.begin_use(receiver, 3))
    else:
        run(plan.begin_use(receiver, 1))
        if consumer == "norm":
            run(plan.wait_norm(receiver, torch.ones(columns), None, rows=rows, eps=0, out=out, mean=None, rstd=rstd))
        else:
            run(plan.wait_matmul(receiver, torch.eye(columns), rows=rows, transposed=False, out=out))
        assert out[:32].isfinite().all() and out[32:].isnan().all()
    assert time.process_time() - began < 20
    # who, direction, slot, tile, want, got, generation
    expected = [hand_off.RECEIVER.value, 1, 3, 2, NEAR_WRAP + 1, NEAR_WRAP, 77]
    assert receiver.words[1:].tolist() == expected

    credit, uses = receiver.credit[0].item(), receiver.uses[0].item()
    out.fill_(torch.nan)
    run(plan.end_use(receiver, release=True), plan.begin_use(receiver, 1))
    run(plan.wait_norm(receiver, torch.ones(columns), None, rows=rows, eps=0, out=out, mean=None, rstd=rstd))
    assert out.isnan().all() and receiver.credit[0] == credit and receiver.uses[0] == uses
    assert receiver.words[1:].tolist() == expected  # the first report stands


def test_a_sender_without_credit_reports_and_writes_nothing(device, run):
    from tpkernels.triton import hand_off
    from tpkernels.triton import plan_hand_off as plan

    sender, _ = make_slot(5, 3, torch.float32, device)
    x = randn(5, 3, dtype=torch.float32, device=device)
    run(plan.take_credit(sender), plan.add_put(sender, x, None))
    run(plan.take_credit(sender))  # nobody released the slot
    run(plan.add_put(sender, -x, None), plan.matmul_add_put(sender, x, torch.eye(3).to(device), x, transposed=True))
    assert torch.equal(sender.data, x) and sender.flags.tolist() == [NEAR_WRAP + 1]
    assert sender.claim[0] == NEAR_WRAP + 1 == sender.uses[0]
    assert sender.words[1:].tolist() == [hand_off.SENDER.value, 1, 3, 0, NEAR_WRAP + 1, NEAR_WRAP, 77]


def test_the_host_ends_a_wait_and_a_slot_written_over_is_found(device, run):
    from tpkernels.triton import hand_off
    from tpkernels.triton import plan_hand_off as plan

    _, receiver = make_slot(5, 3, torch.float32, device)
    receiver = dataclasses.replace(receiver, budget=2**40)  # a day or more
    receiver.words[hand_off.ABORT.value] = 1
    run(plan.begin_use(receiver, 1))
    assert receiver.words[1] == hand_off.RECEIVER.value and receiver.uses[0] == NEAR_WRAP

    sender, receiver = make_slot(5, 3, torch.float32, device)
    x = randn(5, 3, dtype=torch.float32, device=device)
    run(plan.take_credit(sender), plan.add_put(sender, x, None), plan.begin_use(receiver, 1))
    run(plan.end_use(receiver, release=False))
    assert not receiver.words.any() and receiver.credit[0] == NEAR_WRAP
    receiver.claim[0] += 1  # as a sender would that was given the slot too early
    run(plan.end_use(receiver, release=True))
    assert receiver.words[1] == hand_off.HOLDER.value and receiver.credit[0] == NEAR_WRAP


# ---- what the compiler makes of them ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, str]]:
    """PTX by compute capability and kernel, of the triton that is installed, without the interpreter."""
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


POST = r"st\.release\.sys\.global\.u32"
SPIN = r"ld\.global\.sys\.acquire\.b32|ld\.acquire\.sys\.global\.b32"
DATA_STORE = r"st\.global(?:\.\w+)*\.v4\.b32"
DATA_LOAD = r"cp\.async\.cg|ld\.global(?:\.\w+)*\.v4"


def events(ptx: str, *patterns: str) -> list[str]:
    """Which pattern each instruction that matches one is of, in the order of the text."""
    joined = "|".join(f"(?P<p{index}>{pattern})" for index, pattern in enumerate(patterns))
    return [patterns[int(found.lastgroup[1:])] for found in re.finditer(joined, ptx)]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiled_kernels_of_the_hand_off_keep_its_order(capability, kernel, compiled):
    ptx = compiled[str(capability)][kernel]
    barrier = r"bar\.sync|barrier\.sync"
    assert not re.search(r"ld\.global\S*\.nc\b", ptx) and "cp.async.bulk.tensor" not in ptx

    posts = events(ptx, POST, barrier, r"st\.global", r"atom\.global\S*acq_rel")
    assert posts.count(POST) == {"take_credit": 2, "end_use": 2}.get(kernel, 1)
    for at in (index for index, event in enumerate(posts) if event == POST):
        assert posts[at - 1] == barrier  # nothing is stored between the barrier and the post

    if kernel in ("add_put", "matmul_add_put"):
        assert not re.search(r"st\.global\.[bu](?:8|16|32|64) ", ptx)  # 16 bytes at a time, and nothing else
        order = events(ptx, DATA_STORE, barrier, POST)
        last = max(index for index, event in enumerate(order) if event == DATA_STORE)
        assert order.index(POST, last) > order.index(barrier, last)
    if kernel == "matmul_add_put":
        order = events(ptx, DATA_STORE, barrier, r"atom\.global\S*acq_rel", POST)
        arrival = order.index(r"atom\.global\S*acq_rel")
        assert order[arrival - 1] == barrier and DATA_STORE in order[:arrival] and DATA_STORE not in order[arrival:]
    if kernel in ("wait_norm", "wait_matmul"):
        order = events(ptx, SPIN, DATA_LOAD)
        last = max(index for index, event in enumerate(order) if event == SPIN)
        assert SPIN not in order[last + 1 :] and DATA_LOAD in order and DATA_LOAD not in order[:last]
    if kernel in ("take_credit", "begin_use", "wait_norm", "wait_matmul"):
        assert "%globaltimer" in ptx and "trap" not in ptx
        assert re.search(r"(?:atom|red)\.global\S*\.max\.s32", ptx)  # one thread's clock decides for all
    if kernel in ("take_credit", "begin_use", "end_use", "wait_norm", "wait_matmul"):
        assert re.search(SPIN, ptx)


def print_ptx() -> None:
    from tpkernels.triton import plan_hand_off as plan
    from tpkernels.triton.ahead_of_time import compile_launch

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    slot, wide = plan.meta_slot(2048, torch.bfloat16), meta(512, 2048)
    statistic = meta(512, dtype=torch.float32)
    launches = [
        plan.take_credit(slot),
        plan.begin_use(slot, 1),
        plan.end_use(slot, release=True),
        plan.add_put(slot, wide, wide),
        plan.wait_norm(slot, meta(2048), meta(2048), rows=512, eps=1e-5, out=wide, mean=statistic, rstd=statistic),
        plan.matmul_add_put(slot, meta(512, 1024), meta(2048, 1024), wide, transposed=True),
        plan.wait_matmul(slot, meta(1024, 2048), rows=512, transposed=True, out=meta(512, 1024)),
    ]
    assert tuple(item.kernel.__name__ for item in launches) == KERNELS
    table = {
        capability: {item.kernel.__name__: compile_launch(item, capability).asm["ptx"] for item in launches}
        for capability in CAPABILITIES
    }
    print(json.dumps(table))


if __name__ == "__main__":
    print_ptx()
