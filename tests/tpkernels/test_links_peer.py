"""PeerLink on CPU tensors in Triton's interpreter: both ends in this process for what a slot promises, two processes
for what happens at once and when one of them fails.

Released slots are poisoned and epochs begin just before they wrap, in every test.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.links import Key, LinkError, LinkSpec, PeerLink, Trouble, open_link, peer, peer_missing

if torch.cuda.is_available():
    pytest.skip("with a GPU triton compiles, and CPU tensors have no kernels", allow_module_level=True)

CPU = torch.device("cpu")
SHAPE = (1, 37, 6)
TILE_ROWS = 16
NEAR_WRAP = 2**32 - 2
NEAR_SIGN = 2**31 - 1  # behind it the words, int32, turn negative
Pair = tuple[PeerLink, PeerLink]


@pytest.fixture(scope="module", autouse=True)
def _interpreter(usable_triton: None) -> None:
    """Every test here runs the kernels."""


def make_spec(slots: int = 2, dtype: torch.dtype = torch.float32, resident: bool = True, way: str = "F") -> LinkSpec:
    slot_of = {(1, 0, piece): piece % slots for piece in range(6)}
    ranks = (0, 1) if way == "F" else (1, 0)
    return LinkSpec(*ranks, way, dtype, CPU, slots, slot_of, SHAPE, resident)


def make_end(spec: LinkSpec, met: Any, *, sender: bool, first_epoch: int = NEAR_WRAP, **options: Any) -> PeerLink:
    from tpkernels.links import peer_memory

    layout = peer_memory.layout_of(spec, TILE_ROWS, 7, first_epoch)
    memory = peer_memory.map_memory(met, layout, CPU, sender=sender, timeout_s=10)
    return PeerLink(spec, memory, sender=sender, **({"timeout_s": 0.05, "silence_s": 60.0, "poison": True} | options))


def make_offer(spec: LinkSpec, first_epoch: int = NEAR_WRAP) -> Any:
    from tpkernels.links import peer_memory

    return peer_memory.offer_memory(peer_memory.layout_of(spec, TILE_ROWS, 7, first_epoch), CPU)


@pytest.fixture
def meet() -> Iterator[Callable[..., Pair]]:
    from tpkernels.links.segment import call, fetch

    opened: list[PeerLink] = []

    def make(spec: LinkSpec, *, first_epoch: int = NEAR_WRAP, **options: Any) -> Pair:
        offer, accepted = make_offer(spec, first_epoch), []
        options["first_epoch"] = first_epoch
        thread = threading.Thread(target=lambda: accepted.append(offer.accept(10)))
        thread.start()
        met = fetch(call(offer.address), 10)
        thread.join()
        opened.append(make_end(spec, met, sender=True, **options))
        opened.append(make_end(spec, accepted[0], sender=False, **options))
        return opened[-2], opened[-1]

    yield make
    for link in opened:
        link.close()


def expect(pair: Pair) -> list[Key]:
    keys = list(pair[0].spec.slot_of)
    for link in pair:
        link.expect([(key, SHAPE) for key in keys])
    return keys


# ---- what a slot promises --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_epoch", [NEAR_WRAP, NEAR_SIGN])
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_slices_arrive_bitwise_and_are_held_until_released_last_to_first(
    slots: int, first_epoch: int, meet: Callable[..., Pair]
) -> None:
    """As many slices as slots are held at a time and released as backwards do, across the wrap of the epochs."""
    dtype = (torch.float32, torch.float16, torch.bfloat16)[slots % 3]
    pair = sender, receiver = meet(make_spec(slots, dtype), first_epoch=first_epoch)
    for _ in range(2):
        keys, held = expect(pair), {}
        for number, key in enumerate(keys):
            x, residual = torch.randn(2, *SHAPE).to(dtype)
            if number % 2:
                sender.put(key, sender.reserve(key).copy_(x), residual)
            else:
                sender.put(key, x.mT.contiguous().mT, residual)  # strided
            taken = receiver.take(key)
            held[key] = (taken, x + residual)
            assert taken.is_leaf and taken.grad is None and not taken.requires_grad
            if len(held) == slots or key == keys[-1]:
                for last in reversed(held):
                    taken, expected = held[last]
                    assert torch.equal(taken, expected)
                    receiver.verify(last)
                    receiver.release(last)
                    assert taken.isnan().all()  # it was the slot itself, and a released slot holds nothing
                held.clear()
        sender.finish()
        receiver.finish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_sum_is_added_into_the_slot_as_torch_adds(dtype: torch.dtype, meet: Callable[..., Pair]) -> None:
    pair = sender, receiver = meet(make_spec(2, dtype))
    first, second, third, *_ = expect(pair)
    x, residual = torch.randn(2, *SHAPE).to(dtype)
    total = sender.put_sum(first, x, residual.mT.contiguous().mT)
    assert total.data_ptr() == sender._memory.data(0, SHAPE).data_ptr() and total.is_leaf
    assert torch.equal(total, x + residual) and torch.equal(receiver.take(first), x + residual)
    row = x[:, :1]
    assert torch.equal(sender.put_sum(second, x, row), x + row) and torch.equal(receiver.take(second), x + row)
    assert 0 < sender.posted_at < time.perf_counter()
    receiver.release(first)
    with pytest.raises(LinkError, match=r"micro 0, slice 2 is torch\.float64"):
        sender.put_sum(third, x.double(), residual.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fused_equals_unfused_bitwise_forward_and_backward(dtype: torch.dtype, meet: Callable[..., Pair]) -> None:
    """y = x + a w', out = norm(y) v' on two stages, and the gradient of a back over a link of the same code. Integers
    make every order of summing exact, so the products equal torch's too."""
    forward, backward = meet(make_spec(1, dtype)), meet(make_spec(1, dtype, way="B"))
    keys = expect(forward)
    expect(backward)
    for key in keys[:3]:
        a = torch.randint(-3, 4, (1, 37, 21)).to(dtype).requires_grad_()
        w, gain = torch.randint(-3, 4, (6, 21)).to(dtype), torch.randint(1, 3, (6,)).to(dtype)
        x, upstream = torch.randint(-8, 9, (2, *SHAPE)).to(dtype)

        forward[0].put_matmul(key, a.detach(), w, x)
        fused = forward[1].take_norm(key, gain, eps=1e-5, rms=True)
        y = a @ w.T + x
        assert torch.equal(fused.total, y)
        leaf = fused.total.requires_grad_()
        (F.rms_norm(leaf, (6,), gain, 1e-5) * upstream).sum().backward()
        forward[1].verify(key)
        assert leaf.grad is not None
        dy = leaf.grad.round()  # integers again

        backward[0].put(key, dy, upstream)
        back = backward[1].take_matmul(key, w, transposed=False)
        assert torch.equal(back.x, dy + upstream)
        (expected,) = torch.autograd.grad(y, a, dy + upstream)
        assert torch.equal(back.out, expected)
        forward[1].release(key)
        backward[1].release(key)
        assert fused.total.isnan().all()
        normed = F.rms_norm(y.detach().float(), (6,), gain.float(), 1e-5)
        assert (fused.out.float() - normed).abs().max() <= torch.finfo(dtype).eps * normed.abs().max()


def test_a_copied_out_slice_outlives_its_slot(meet: Callable[..., Pair]) -> None:
    pair = sender, receiver = meet(make_spec(1, resident=False))
    taken = []
    for key in expect(pair):
        sender.put(key, torch.full(SHAPE, float(key[2])))
        taken.append(receiver.take(key))
        receiver.release(key)  # the engine releases whatever the mode
    assert [float(x.mean()) for x in taken] == list(range(6))
    receiver.finish()


def test_what_the_plan_does_not_say_is_refused(meet: Callable[..., Pair]) -> None:
    pair = sender, receiver = meet(make_spec())
    keys = expect(pair)
    x = torch.zeros(SHAPE)
    with pytest.raises(
        LinkError, match=r"asked for micro 0, slice 1, but the plan's next transfer is micro 0, slice 0"
    ):
        receiver.take(keys[1])
    with pytest.raises(LinkError, match="not among the 6 transfers"):
        sender.put((1, 9, 9), x)
    with pytest.raises(LinkError, match=r"\[1, 36, 6\], but the plan says torch.float32 \[1, 37, 6\]"):
        sender.put(keys[0], x[:, 1:])
    with pytest.raises(LinkError, match=r"torch.float32 \[1, 37, 5\], but the plan"):
        sender.put_matmul(keys[0], torch.zeros(1, 37, 2), torch.zeros(5, 2))
    with pytest.raises(LinkError, match="transfers never made"):
        sender.finish()
    for key in keys[:2]:
        sender.put(key, x)
        receiver.take(key)
    receiver.release(keys[0])
    with pytest.raises(LinkError, match="no longer holds micro 0, slice 0"):
        receiver.release(keys[0])


def test_memory_at_an_address_is_a_tensor_of_the_device_named() -> None:
    """As a mapped slot is read on this end's GPU, whichever it lies on: autograd wants gradients on one device."""
    from tpkernels.links import peer_memory

    words = torch.arange(64, dtype=torch.int32)
    view = peer_memory.tensor_at(words[16:].data_ptr(), 128, CPU)
    assert view.device == CPU and view.dtype == torch.uint8 and view.shape == (128,) and view.is_contiguous()
    assert view.view(torch.int32).tolist() == list(range(16, 48))
    view[4:].fill_(0)
    assert words.tolist() == [*range(17), *[0] * 31, *range(48, 64)]


def test_the_two_ends_must_mean_the_same_link() -> None:
    from tpkernels.links import peer_memory

    spec = make_spec()
    offer = make_offer(spec)
    try:
        other = peer_memory.layout_of(make_spec(3), TILE_ROWS, 7, NEAR_WRAP)
        met: Any = type("Met", (), {"memory": offer.memory})()
        with pytest.raises(ValueError, match="plan different links"):
            peer_memory.map_memory(met, other, CPU, sender=True, timeout_s=1)
    finally:
        with pytest.raises(TimeoutError):
            offer.accept(0.01)  # closes its socket


# ---- when it fails ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_epoch", [NEAR_WRAP, NEAR_SIGN])
def test_a_dropped_post_is_reported_with_all_that_is_known(first_epoch: int, meet: Callable[..., Pair]) -> None:
    pair = sender, receiver = meet(make_spec(), timeout_s=0.05, first_epoch=first_epoch)
    first, second, third, *_ = expect(pair)
    words = sender._memory.flags(0)
    sender.put(first, torch.zeros(SHAPE))
    words[2] -= 1  # its last post did not come
    with pytest.raises(LinkError) as caught:
        receiver.take(first)
    assert str(caught.value) == (
        "link 0->1 (activations): rank 0 is alive but did not come: waited in vain for stage 1, micro 0, slice 0 "
        f"(slot 0, tile 2, wanted epoch {first_epoch + 1}, saw {first_epoch}, generation 7)."
    )
    assert caught.value.lost_peer is None and caught.value.trouble is Trouble.LATE
    with pytest.raises(LinkError, match="waited in vain for stage 1, micro 0, slice 0"):
        receiver.take(second)  # this end has stopped
    sender.put(second, torch.zeros(SHAPE))
    with pytest.raises(
        LinkError, match=rf"slice 2 \(slot 0, tile 0, wanted epoch {first_epoch + 1}, saw {first_epoch}"
    ):
        sender.put(third, torch.ones(SHAPE))  # the credit never comes
    assert not sender._memory.data(0, SHAPE).any()


def test_a_slot_that_changed_under_autograd_raises(meet: Callable[..., Pair]) -> None:
    pair = sender, receiver = meet(make_spec(1))
    first, second, *_ = expect(pair)
    sender.put(first, torch.full(SHAPE, 2.0))
    receiver.take(first)
    receiver.verify(first)
    receiver._memory.credit(0)[0] += 1  # too early, as a wrong plan would
    sender.put(second, torch.full(SHAPE, 3.0))
    with pytest.raises(LinkError, match=r"slot 0 no longer holds micro 0, slice 0: .*gradients of this step are wrong"):
        receiver.verify(first)


@pytest.mark.parametrize("trouble", [Trouble.CLOSED, Trouble.SILENT])
def test_a_wait_ends_when_the_peer_does(trouble: Trouble, meet: Callable[..., Pair]) -> None:
    pair = sender, receiver = meet(make_spec(), timeout_s=1e6, silence_s=0.5)
    first, second, *_ = expect(pair)
    sender.put(first, torch.zeros(SHAPE))
    if trouble is Trouble.CLOSED:
        sender.close()
        with pytest.raises(LinkError, match="was closed"):
            sender.put(second, torch.zeros(SHAPE))
    else:
        sender._watch._beat.stop()
    receiver.take(first)  # what came before is still good
    with pytest.raises(LinkError, match=f"rank 0 {re.escape(trouble.value)}.*slice 1") as caught:
        receiver.take(second)
    assert caught.value.lost_peer == 0 and caught.value.trouble is trouble


# ---- two processes ---------------------------------------------------------------------------------------------------


def _other(address: str, spec: LinkSpec, steps: int, die_at: int) -> None:
    """The sender's process; slice n of step s holds n + 10 s, and has a residual of a quarter."""
    from tpkernels.links.segment import call, fetch

    torch.set_num_threads(1)
    chance = random.Random(1)
    link = make_end(spec, fetch(call(address), 10), sender=True, timeout_s=1e6)
    speed = link.measure()
    assert speed is not None and speed.latency_us > 0 and speed.gb_per_s > 0
    for step in range(steps):
        link.expect([(key, SHAPE) for key in spec.slot_of])
        for number, key in enumerate(spec.slot_of):
            if step == 0 and number == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(chance.random() * 0.01)
            x = torch.full(SHAPE, float(number + 10 * step))
            if number % 2:
                link.put(key, x, torch.full(SHAPE, 0.25))
            else:
                link.put_matmul(key, x, torch.eye(6), torch.full(SHAPE, 0.25))
        link.finish()
    os._exit(0)  # the receiver sees what came although this end did not even close


@pytest.fixture
def start() -> Iterator[Callable[..., PeerLink]]:
    children: list[Any] = []

    def make(spec: LinkSpec, steps: int, die_at: int = -1) -> PeerLink:
        offer = make_offer(spec)
        child = multiprocessing.get_context("fork").Process(target=_other, args=(offer.address, spec, steps, die_at))
        child.start()
        children.append(child)
        link = make_end(spec, offer.accept(60), sender=False, timeout_s=1e6)
        assert link.measure() is None  # the sender's process measures
        return link

    yield make
    for child in children:
        child.join(60)
        assert child.exitcode in (0, -signal.SIGKILL)


@pytest.mark.parametrize("slots", [1, 3])
def test_two_processes_at_their_own_pace(slots: int, start: Callable[..., PeerLink]) -> None:
    """Waits of both kinds, tile by tile, while the other process computes."""
    spec, chance = make_spec(slots), random.Random(2)
    link = start(spec, steps=2)
    gain = torch.ones(6)
    for step in range(2):
        link.expect([(key, SHAPE) for key in spec.slot_of])
        for number, key in enumerate(spec.slot_of):
            time.sleep(chance.random() * 0.01)
            expected, norm = torch.full(SHAPE, number + 10 * step + 0.25), None
            if number % 3 == 0:
                x: Tensor = link.take(key)
            elif number % 3 == 1:
                norm = link.take_norm(key, gain, eps=1e-12, rms=True)
                x = norm.total
                assert (norm.out - 1).abs().max() < 1e-6
            else:
                product = link.take_matmul(key, torch.eye(6))
                x = product.x
                assert torch.equal(product.out, expected)
            assert torch.equal(x, expected)
            link.verify(key)
            link.release(key)
            assert not (x == expected).any()  # it is NaN, or by now the next slice
        link.finish()
    link.close()


def test_a_peer_that_holds_its_interpreter_for_long_is_not_called_dead() -> None:
    """As a compiler may, in its process's only thread that Python lets run."""
    from tpkernels.links.segment import call, fetch

    spec, offer = make_spec(), make_offer(make_spec())
    key, *_ = spec.slot_of
    child = os.fork()
    if child == 0:
        link = make_end(spec, fetch(call(offer.address), 10), sender=True, timeout_s=1e6)
        link.expect([(key, SHAPE)])
        ctypes.PyDLL(None).usleep(1_500_000)
        link.put(key, torch.full(SHAPE, 3.0))
        time.sleep(60)
    try:
        link = make_end(spec, offer.accept(60), sender=False, timeout_s=1e6, silence_s=0.5)
        link.expect([(key, SHAPE)])
        assert bool((link.take(key) == 3).all())
        link.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_killed_peer_is_named(start: Callable[..., PeerLink]) -> None:
    spec = make_spec()
    link = start(spec, steps=1, die_at=2)
    link.expect([(key, SHAPE) for key in spec.slot_of])
    keys = list(spec.slot_of)
    for key in keys[:2]:
        link.take(key)
        link.release(key)
    with pytest.raises(
        LinkError, match=r"rank 0 is gone: waited in vain for stage 1, micro 0, slice 2 \(slot 0"
    ) as caught:
        link.take(keys[2])
    assert caught.value.lost_peer == 0
    link.close()


def _say_trouble(kind: str, spec: LinkSpec, group: Any, *, trouble: str) -> None:
    """`agree` where the other end knows of no trouble."""
    raise LinkError(f"{spec}: {trouble}")


def test_without_two_gpus_the_reason_is_said_and_force_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from terapipe import environment
    from tpkernels.triton import launch

    row = next(row for row in environment.collect().links if row.name == "peer")
    assert not row.usable and row.note == peer_missing() == "there is no CUDA device"
    group: Any = object()
    monkeypatch.setattr(peer, "agree", _say_trouble)
    with pytest.raises(LinkError, match=r"too few bits for torch\.float64"):
        open_link("peer", make_spec(dtype=torch.float64), group=group)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(LinkError, match=r"links 'peer' cannot be had: its ranks compute on a CPU\."):
        open_link("peer", make_spec(), group=group)
