"""The CUDA kernels of a peer link in the emulator, each end a device of its own: fused against the same kernels without
a slot bit for bit, both ends at once, and their protocol when something fails. Every call must be clean, which covers
the order of what the two ends do to the slot (csrc/emulator/order.h).

Epochs begin just before they wrap, and released slots are poisoned, in every test.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from tpkernels import hand_off
from tpkernels.fused_reference import norm_forward
from tpkernels.hand_off import Slot

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
NEAR_WRAP = -2  # as int32
EPS = 1e-5
MINUTE = 60 * 10**9


class Ends:
    """Both ends of a link of one slot [rows, columns], in one process."""

    def __init__(self, kernels, rows, columns, dtype, *, budget=MINUTE):
        self.sender, self.receiver = kernels
        self.emulator = self.sender.emulator
        self.rows, self.columns, self.dtype = rows, columns, dtype
        self.tiles = -(-rows // 64)
        self.data = torch.full((rows, columns), torch.nan, dtype=dtype)
        self.flags, self.claim, self.credit = (torch.full((32,), NEAR_WRAP, dtype=torch.int32) for _ in range(3))
        self.at_sender, self.at_receiver = (self._end(name, budget) for name in ("sender", "receiver"))
        shared = {"data": self.data, "flags": self.flags, "claim": self.claim, "credit": self.credit}
        self.emulator.register(writable=True, shared=True, **shared)

    def _end(self, name, budget):
        own = {
            "uses": torch.full((1,), NEAR_WRAP, dtype=torch.int32),
            "arrived": torch.zeros(self.tiles, dtype=torch.int32),
            "control": torch.tensor([0, 0, 1, 77], dtype=torch.int32),
            "words": torch.zeros(hand_off.HOST_WORDS, dtype=torch.int32),
        }
        self.emulator.register(writable=True, shared=True, **{f"{key} of the {name}": own[key] for key in own})
        return Slot(3, self.data, self.claim, self.flags, self.credit, budget=budget, tile_rows=64, **own)

    def send(self, *launches):
        self.sender.run([getattr(self.sender, name)(self.at_sender, *args, **kw) for name, args, kw in launches], CPU)

    def receive(self, *launches):
        launches = [getattr(self.receiver, name)(self.at_receiver, *args, **kw) for name, args, kw in launches]
        self.receiver.run(launches, CPU)

    def release(self):
        """The use is over; what it held is gone."""
        self.receive(call("end_use", release=False))
        self.data.fill_(torch.nan)
        self.receive(call("end_use", release=True))


CPU = torch.device("cpu")


def call(name, *args, **kw):
    return name, args, kw


def randn(*shape, dtype=FP32):
    return torch.randn(*shape).to(dtype)


def close(actual, exact, same_precision):
    allowed = 2 * (same_precision.double() - exact).abs().max() + 1e-6 * exact.abs().max()
    assert (actual.double() - exact).abs().max() <= allowed


def norm_of(end, slot, gain, bias, *, rows, x=None):
    """A launch, and what it will write."""
    out = torch.full((rows, gain.shape[0]), torch.nan, dtype=gain.dtype)
    mean, rstd = (torch.full((rows, 1), torch.nan) for _ in range(2))
    mean = None if bias is None else mean
    launch = end.wait_norm(slot, gain, bias, rows=rows, eps=EPS, out=out, mean=mean, rstd=rstd, x=x)
    return launch, [out, rstd, *([] if mean is None else [mean])]


def matmul_of(end, slot, b, *, rows, transposed, a=None):
    out = torch.full((rows, b.shape[0 if transposed else 1]), torch.nan, dtype=b.dtype)
    return end.wait_matmul(slot, b, rows=rows, transposed=transposed, out=out, a=a), [out]


SHAPES = [(65, 24, BF16), (1, 8, FP16), (67, 12, FP32), (130, 136, BF16), (129, 72, FP32)]


@pytest.mark.parametrize(("rows", "columns", "dtype"), SHAPES, ids=str)
def test_fused_equals_unfused_bitwise_use_after_use(rows, columns, dtype, peer_ends):
    ends = Ends(peer_ends, rows, columns, dtype)
    sender, receiver = peer_ends
    for use in range(3):
        x, residual = randn(rows, columns, dtype=dtype), randn(rows, columns, dtype=dtype)
        a, weight = randn(rows, 40, dtype=dtype), randn(columns, 40, dtype=dtype)
        plain = torch.empty(rows, columns, dtype=dtype)
        if use == 1:
            ends.send(call("take_credit"), call("add_put", x, residual))
            sender.run([sender.add_put(None, x, residual, out=plain)], CPU)
            assert torch.equal(plain, x + residual)
        else:
            transposed = use == 0
            b = weight if transposed else weight.T.contiguous()
            ends.send(call("take_credit"), call("matmul_add_put", a, b, residual, transposed=transposed))
            product = torch.empty_like(plain)
            sender.run([sender.matmul_add_put(None, a, b, residual, transposed=transposed, out=plain)], CPU)
            sender.run([sender.matmul_add_put(None, a, b, None, transposed=transposed, out=product)], CPU)
            assert torch.equal(plain, product + residual)  # rounded where two kernels round
            close(product, a.double() @ weight.double().T, a @ weight.T)
        assert ends.flags[: ends.tiles].tolist() == [NEAR_WRAP + 1 + use] * ends.tiles
        ends.receive(call("begin_use", 1))
        assert torch.equal(ends.data, plain)

        gain, bias = randn(columns, dtype=dtype), randn(columns, dtype=dtype) if use else None
        b = randn(columns, 48, dtype=dtype)
        for make, kw in ((norm_of, {"gain": gain, "bias": bias}), (matmul_of, {"b": b, "transposed": False})):
            fused, came = make(receiver, ends.at_receiver, rows=rows, **kw)
            unfused, expected = make(receiver, None, rows=rows, **kw, **{"x" if make is norm_of else "a": plain})
            receiver.run([fused, unfused], CPU)
            assert all(torch.equal(one, other) for one, other in zip(came, expected, strict=True))
            if make is norm_of:
                exact = norm_forward(plain.double(), gain.double(), bias, eps=EPS, rms=bias is None)
                same = norm_forward(plain, gain, bias, eps=EPS, rms=bias is None)
                close(came[0], exact.out, same.out)
        ends.release()
    assert not ends.at_sender.arrived.any() and not ends.at_sender.words.any() and not ends.at_receiver.words.any()
    assert sender.conflicts == receiver.conflicts == {}


@pytest.mark.parametrize(("dtype", "n", "k"), [(BF16, 136, 200), (FP16, 264, 8), (FP32, 68, 52)], ids=str)
@pytest.mark.parametrize("transposed", [True, False])
def test_products_are_as_close_as_torch_s(dtype, n, k, transposed, peer_ends):
    """More of n, k and rows than one tile and its stages hold."""
    sender = peer_ends[0]
    a, b = randn(70, k, dtype=dtype), randn(n, k, dtype=dtype)
    given = b if transposed else b.T.contiguous()
    out = torch.empty(70, n, dtype=dtype)
    sender.run([sender.matmul_add_put(None, a, given, None, transposed=transposed, out=out)], CPU)
    close(out, a.double() @ b.double().T, a @ b.T)
    assert sender.conflicts == {}


def test_the_norm_is_that_of_the_fused_op_bit_for_bit(peer_ends, emulator):
    x, gain, bias = randn(9, 264, dtype=BF16), randn(264, dtype=BF16), randn(264, dtype=BF16)
    for shift in (None, bias):
        launch, (out, *statistics) = norm_of(peer_ends[0], None, gain, shift, rows=9, x=x)
        peer_ends[0].run([launch], CPU)
        found_out, found_rstd = torch.empty_like(x), torch.empty(9, 1)
        found_mean = None if shift is None else torch.empty(9, 1)
        tensors = {"weight": gain, "bias": shift, "mean": found_mean, "rstd": found_rstd}
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        emulator.register(writable=True, x=x, out=found_out, **given)
        addresses = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}
        rows = {"x": (x.data_ptr(), 264), "delta": (0, 0), "total": (0, 0), "out": (found_out.data_ptr(), 264)}
        settings = {"dtype": 1, "rms": shift is None, "rows": 9, "dim": 264, "eps": EPS, "device": 0, "stream": 0}
        peer_ends[0].module.norm_forward(**rows, **addresses, **settings)
        peer_ends[0].check()
        emulator.clear()
        assert torch.equal(out, found_out) and torch.equal(statistics[0], found_rstd)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_both_ends_at_once(seed, dtype, peer_ends):
    """Waits of every kind spin while the other end works; blocks take turns by chance."""
    rows, columns, uses = 130, 24, 3
    ends = Ends(peer_ends, rows, columns, dtype)
    ends.emulator.module.configure(1, seed % 2 == 1, seed)
    gain, weight = randn(columns, dtype=dtype), randn(columns, columns, dtype=dtype)
    results = []
    with ends.emulator.at_once():
        for use in range(uses):
            x, residual = randn(rows, columns, dtype=dtype), randn(rows, columns, dtype=dtype)
            put = call("matmul_add_put", x, weight, residual, transposed=True)
            ends.send(call("take_credit"), put if use % 2 else call("add_put", x, residual))
            ends.receive(call("begin_use", 1))
            norm, normed = norm_of(peer_ends[1], ends.at_receiver, gain, None, rows=rows)
            matmul, product = matmul_of(peer_ends[1], ends.at_receiver, weight, rows=rows, transposed=True)
            peer_ends[1].run([norm, matmul] if use else [matmul, norm], CPU)
            ends.receive(call("end_use", release=True))
            results.append((use, x, residual, normed[0], product[0]))
    ends.sender.check()
    for use, x, residual, normed, product in results:
        plain = torch.empty_like(x)
        a = (x, weight, residual) if use % 2 else (x, residual)
        make = peer_ends[0].matmul_add_put if use % 2 else peer_ends[0].add_put
        peer_ends[0].run([make(None, *a, out=plain, **({"transposed": True} if use % 2 else {}))], CPU)
        norm, expected_norm = norm_of(peer_ends[0], None, gain, None, rows=rows, x=plain)
        matmul, expected = matmul_of(peer_ends[0], None, weight, rows=rows, transposed=True, a=plain)
        peer_ends[0].run([norm, matmul], CPU)
        assert torch.equal(normed, expected_norm[0]) and torch.equal(product, expected[0])
    assert ends.credit[0] == NEAR_WRAP + uses and not ends.at_sender.words.any() and not ends.at_receiver.words.any()


# ---- when it fails ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consumer", ["norm", "product", "gate"])
def test_a_tile_that_never_comes_is_reported_and_stops_this_end(consumer, peer_ends):
    """Rows that came are computed; the report says what was missing; later kernels leave without a trace."""
    rows, columns = 140, 24
    ends = Ends(peer_ends, rows, columns, BF16, budget=10**6)
    slot, receiver = ends.at_receiver, peer_ends[1]
    ends.send(call("take_credit"), call("add_put", randn(rows, columns, dtype=BF16), None))
    ends.flags[2] = NEAR_WRAP  # its last post was lost
    began = time.process_time()
    if consumer == "gate":
        ends.receive(call("begin_use", 3))
    else:
        ends.receive(call("begin_use", 1))
        weight = randn(columns, columns, dtype=BF16)
        made = norm_of(receiver, slot, weight[0].contiguous(), None, rows=rows) if consumer == "norm" else None
        launch, results = made or matmul_of(receiver, slot, weight, rows=rows, transposed=True)
        receiver.run([launch], CPU)
        assert results[0][:128].isfinite().all() and results[0][128:].isnan().all()
    assert time.process_time() - began < 20
    # who, direction, slot, tile, want, got, generation
    expected = [hand_off.RECEIVER, 1, 3, 2, NEAR_WRAP + 1, NEAR_WRAP, 77]
    assert slot.words[1:].tolist() == expected

    credit, uses = ends.credit[0].item(), slot.uses[0].item()
    ends.flags[2] = NEAR_WRAP + 1  # too late
    ends.receive(call("end_use", release=True), call("begin_use", 1))
    launch, results = norm_of(receiver, slot, randn(columns, dtype=BF16), None, rows=rows)
    product, products = matmul_of(receiver, slot, randn(columns, columns, dtype=BF16), rows=rows, transposed=True)
    receiver.run([launch, product], CPU)
    assert all(result.isnan().all() for result in results + products)
    assert ends.credit[0] == credit and slot.uses[0] == uses and slot.words[1:].tolist() == expected


def test_a_sender_without_credit_reports_and_writes_nothing(peer_ends):
    ends = Ends(peer_ends, 70, 24, FP32, budget=10**6)
    x = randn(70, 24)
    ends.send(call("take_credit"), call("add_put", x, None), call("take_credit"))  # nobody released the slot
    ends.send(call("add_put", -x, None), call("matmul_add_put", x, torch.eye(24), x, transposed=True))
    assert torch.equal(ends.data, x) and ends.flags[:2].tolist() == [NEAR_WRAP + 1] * 2
    assert ends.claim[0] == NEAR_WRAP + 1 == ends.at_sender.uses[0]
    assert ends.at_sender.words[1:].tolist() == [hand_off.SENDER, 1, 3, 0, NEAR_WRAP + 1, NEAR_WRAP, 77]


def test_the_host_ends_a_wait_and_a_slot_written_over_is_found(peer_ends):
    ends = Ends(peer_ends, 5, 8, BF16)  # a wait may last a minute
    ends.at_receiver.words[hand_off.ABORT] = 1
    ends.receive(call("begin_use", 1))
    assert ends.at_receiver.words[1] == hand_off.RECEIVER and ends.at_receiver.uses[0] == NEAR_WRAP

    ends.emulator.clear()
    ends = Ends(peer_ends, 5, 8, BF16)
    ends.send(call("take_credit"), call("add_put", randn(5, 8, dtype=BF16), None))
    ends.receive(call("begin_use", 1), call("end_use", release=False))
    assert not ends.at_receiver.words.any() and ends.credit[0] == NEAR_WRAP
    ends.claim[0] += 1  # as a sender would that was given the slot too early
    ends.receive(call("end_use", release=True))
    assert ends.at_receiver.words[1] == hand_off.HOLDER and ends.credit[0] == NEAR_WRAP


# ---- what both languages share ---------------------------------------------------------------------------------------


def test_the_words_are_those_of_the_triton_kernels(peer_ends):
    from tpkernels.triton import hand_off as triton_words

    module = peer_ends[0].module
    assert module.peer_tile_rows == peer_ends[0].TILE_ROWS == 64
    for name, value in module.peer_words.items():
        assert value == getattr(hand_off, name) == getattr(triton_words, name).value, name
    assert len(module.peer_words) == 9


def test_what_the_kernels_do_not_serve_is_refused_with_values(peer_ends):
    ends = Ends(peer_ends, 5, 8, BF16)
    x = randn(5, 20, dtype=BF16)
    with pytest.raises(ValueError, match=r"x has 20 columns; .* multiples of 8, language triton takes any"):
        peer_ends[0].run([peer_ends[0].add_put(None, x, None, out=x.clone())], CPU)
    with pytest.raises(ValueError, match="the product has 20 columns"):
        launch, _ = matmul_of(peer_ends[0], None, randn(8, 20, dtype=BF16), rows=5, transposed=False, a=ends.data)
        peer_ends[0].run([launch], CPU)
    with pytest.raises(ValueError, match=r"one dtype, .*, not x torch.bfloat16, residual torch.float32"):
        peer_ends[0].add_put(None, x, x.float(), out=x)
    with pytest.raises(ValueError, match=r"residual must be contiguous, not of strides \(1, 5\)"):
        peer_ends[0].add_put(None, x, x.T.contiguous().T, out=x)
    with pytest.raises(ValueError, match="norm over 16392 channels of this dtype; it serves up to 16384"):
        wide = torch.ones(1, 16392, dtype=BF16)
        peer_ends[0].run([norm_of(peer_ends[0], None, wide[0], None, rows=1, x=wide)[0]], CPU)
    with pytest.raises(ValueError, match="tiles of 16 rows; they make 64, and both ends"):
        peer_ends[0].run([peer_ends[0].take_credit(replace(ends.at_sender, tile_rows=16))], CPU)
