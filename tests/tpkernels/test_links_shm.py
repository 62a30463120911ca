"""ShmLink: what a slot promises, both ends in this process; test_links_shm_failures.py has what happens when one fails.

Released slots are poisoned and epochs begin just before they wrap, in every test.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shm_links import CPU, NEAR_WRAP, Pair, expect_slices, link_mappings, make_spec, meet_ends, meeting

from terapipe.schedule import seq_1f1b
from terapipe.schedule.orders import demand_order
from terapipe.schedule.slots import assign_slots, ring_slots
from tpkernels import fused_rows
from tpkernels.links import Key, LinkError, LinkSpec, ShmLink, open_link, shm, shm_missing

pytestmark = pytest.mark.skipif(bool(shm_missing()), reason=f"shared-memory links: {shm_missing()}")


@pytest.fixture
def meet() -> Iterator[Callable[..., Pair]]:
    with meeting() as make:
        yield make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_way_to_put_arrives_bitwise_and_the_slot_is_read_in_place(
    dtype: torch.dtype, meet: Callable[..., Pair]
) -> None:
    pair = sender, receiver = meet(make_spec(dtype=dtype))
    x, residual = torch.randn(2, 70, 3).to(dtype), torch.randn(2, 70, 3).to(dtype)
    for _ in range(3):  # across the wrap of the epochs
        keys = iter(expect_slices(pair))
        for put, expected in (
            (lambda key: sender.put(key, x), x),
            (lambda key: sender.put(key, x.mT.contiguous().mT), x),  # strided
            (lambda key: sender.put(key, torch._neg_view(x.neg())), x),  # a sign that is only noted
            (lambda key: sender.put(key, sender.reserve(key).copy_(x)), x),
            (lambda key: sender.put(key, x, residual), x + residual),
            (lambda key: (sender.reserve(key), sender.put(key, x, residual)), x + residual),
        ):
            key = next(keys)
            put(key)
            taken = receiver.take(key)
            assert torch.equal(taken, expected) and taken.data_ptr() % 64 == 0
            assert taken.grad is None and taken.is_leaf and not taken.requires_grad
            receiver.verify(key)
            receiver.release(key)
            assert taken.isnan().all()  # it was the slot itself, and a released slot holds nothing


@pytest.mark.parametrize("rms", [True, False], ids=["rmsnorm", "layernorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_fused_ends_give_the_bits_of_plain_ones_and_work_at_once(
    dtype: torch.dtype, rms: bool, meet: Callable[..., Pair]
) -> None:
    """The sender adds each tile only once the receiver has normed the one before, so neither may wait for the whole."""
    pair = sender, receiver = meet(make_spec(dtype=dtype))
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(2, 70, 3, generator=generator).to(dtype) for _ in range(2))
    strided = residual.mT.contiguous().mT
    weight, bias = torch.randn(2, 3, generator=generator).to(dtype)
    norm: dict[str, Any] = {"eps": 1e-5, "rms": rms}
    in_step = dtype != torch.float64  # which has no kernels
    normed = threading.Semaphore(0)
    if in_step:
        sender._ring.watch(lambda action, tile: action == "write" and tile > 0 and not normed.acquire(timeout=5))
        receiver._ring.watch(lambda action, tile: action == "wait" and tile > 0 and normed.release())
    for key in expect_slices(pair, 4):
        sums: list[torch.Tensor] = []
        thread = threading.Thread(
            target=lambda key, sums: sums.append(sender.put_sum(key, x, strided)), args=(key, sums)
        )
        thread.start()
        values = receiver.take_norm(key, weight, None if rms else bias, **norm)
        thread.join()
        plain = fused_rows.norm_forward((x + residual).view(140, 3), weight, None if rms else bias, **norm)
        assert torch.equal(values.total, x + residual) and torch.equal(sums[0], x + residual)
        assert torch.equal(values.out.view(140, 3), plain.out) and torch.equal(values.rstd, plain.rstd)
        assert (values.mean is None and plain.mean is None) or torch.equal(values.mean, plain.mean)  # type: ignore[arg-type]
        assert values.total.is_leaf and sums[0].is_leaf
        if in_step:
            began, ended = receiver.waited
            assert began < sender.posted_at < ended < time.perf_counter()
        receiver.verify(key)
        receiver.release(key)
        assert not in_step or not normed.acquire(blocking=False)  # each tile was waited for


def test_torchs_defaults_and_odd_parameters_do_not_reach_the_memory_of_a_norm(meet: Callable[..., Pair]) -> None:
    pair = sender, receiver = meet(make_spec())
    x, weight, bias = torch.randn(2, 70, 3), torch.randn(6)[::2], torch._neg_view(torch.randn(3))
    plain = fused_rows.norm_forward((x + x).view(140, 3), weight, bias, eps=1e-5, rms=False)
    given = [(weight, bias), (weight.contiguous(), bias.resolve_neg())]
    for key, (its_weight, its_bias) in zip(expect_slices(pair, 2), given, strict=True):
        torch.set_default_dtype(torch.bfloat16)
        try:
            sender.put_sum(key, x, x)
            with torch.device("meta"):
                values = receiver.take_norm(key, its_weight, its_bias, eps=1e-5, rms=False)
        finally:
            torch.set_default_dtype(torch.float32)
        assert values.mean is not None and plain.mean is not None
        assert torch.equal(values.out.view(140, 3), plain.out) and torch.equal(values.mean, plain.mean)
        assert values.rstd.dtype == torch.float32 and torch.equal(values.rstd, plain.rstd)
        receiver.release(key)


def test_a_sum_that_does_not_fit_the_slot_or_a_ring_that_copies_out_still_works(meet: Callable[..., Pair]) -> None:
    pair = sender, receiver = meet(make_spec(slots=1, resident=False))
    x, weight = torch.randn(2, 70, 3), torch.randn(3)
    for key in expect_slices(pair, 2):
        with pytest.raises(LinkError, match=r"\[2, 70, 4\], but the plan says torch\.float32 \[2, 70, 3\]"):
            sender.put_sum(key, torch.zeros(2, 70, 4), torch.zeros(2, 70, 4))
        sender.put_sum(key, x, x)
        values = receiver.take_norm(key, weight, eps=1e-5, rms=True)
        plain = fused_rows.norm_forward((x + x).view(140, 3), weight, None, eps=1e-5, rms=True)
        assert torch.equal(values.total, x + x) and torch.equal(values.out.view(140, 3), plain.out)
        receiver.release(key)
    assert 0 < sender.posted_at < time.perf_counter()


def test_a_copied_out_slice_outlives_its_slot(meet: Callable[..., Pair]) -> None:
    pair = sender, receiver = meet(make_spec(slots=1, resident=False))
    taken = []
    for key in expect_slices(pair):
        sender.put(key, torch.full((2, 70, 3), float(key[2])))
        taken.append(receiver.take(key))
        receiver.release(key)  # the engine releases whatever the mode
    assert [float(x.mean()) for x in taken] == list(range(8))
    sender.finish()
    receiver.finish()


def test_a_put_waits_for_its_slot_and_not_longer(meet: Callable[..., Pair]) -> None:
    pair = sender, receiver = meet(make_spec(slots=1))
    first, second = expect_slices(pair, 2)
    sender.put(first, torch.zeros(2, 70, 3))
    receiver.take(first)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (sender.put(second, torch.ones(2, 70, 3)), done.set()))
    thread.start()
    assert not done.wait(0.2)  # asleep by now
    receiver.release(first)
    assert done.wait(5)
    thread.join()
    assert torch.equal(receiver.take(second), torch.ones(2, 70, 3))


def test_a_slot_that_changed_under_autograd_raises(meet: Callable[..., Pair]) -> None:
    pair = sender, receiver = meet(make_spec(slots=1))
    first, second = expect_slices(pair, 2)
    sender.put(first, torch.full((2, 70, 3), 2.0))
    leaf = receiver.take(first).requires_grad_()
    output = (leaf * leaf).sum()
    receiver.verify(first)
    receiver._ring.release(first, False)  # too early, as a wrong plan would
    with pytest.raises(LinkError, match=r"slot 0 no longer holds micro 0, slice 0: .*gradients of this step are wrong"):
        receiver.verify(first)
    sender.put(second, torch.full((2, 70, 3), 9.0))
    output.backward()
    assert leaf.grad is not None and float(leaf.grad.mean()) == 18.0  # autograd itself says nothing; 4 would be right
    with pytest.raises(LinkError, match="written over before its backward"):
        receiver.release(first)


def test_both_ends_keep_to_the_plans_order_and_shapes(meet: Callable[..., Pair]) -> None:
    pair = sender, receiver = meet(make_spec())
    keys = expect_slices(pair, 3)
    x = torch.zeros(2, 70, 3)
    with pytest.raises(LinkError, match="asked for micro 0, slice 1, but the plan's next transfer is micro 0, slice 0"):
        sender.put(keys[1], x)
    with pytest.raises(LinkError, match=r"torch\.float64 \[2, 70, 3\], but the plan says torch\.float32 \[2, 70, 3\]"):
        sender.put(keys[0], x.double())
    with pytest.raises(LinkError, match="not among the 3 transfers"):
        sender.put((1, 5, 0), x)
    with pytest.raises(LinkError, match="asked for micro 0, slice 2, but"):
        receiver.take(keys[2])
    sender.put(keys[0], x)
    with pytest.raises(LinkError, match=r"never made: .*slice 1.*slice 2"):
        sender.finish()
    with pytest.raises(LinkError, match="no longer holds"):
        receiver.release(keys[0])  # never taken


def test_a_tensor_of_another_device_is_refused(meet: Callable[..., Pair]) -> None:
    """Its address is none of this process's memory."""
    sender, receiver = meet(make_spec())
    key, *_ = expect_slices((sender, receiver))
    away = torch.empty(sender.spec.slot_shape, device="meta")
    for residual in (None, away, torch.zeros(sender.spec.slot_shape)):
        with pytest.raises((LinkError, RuntimeError), match=r"is on meta, but the pipeline computes on cpu|device"):
            sender.put(key, away, residual)
    sender.put(key, torch.ones(sender.spec.slot_shape))
    assert bool((receiver.take(key) == 1).all())


def test_a_close_unmaps_the_memory_unless_a_taken_tensor_looks_at_it(meet: Callable[..., Pair]) -> None:
    sender, receiver = meet(make_spec())
    key, *_ = expect_slices((sender, receiver))
    sender.put(key, torch.full(sender.spec.slot_shape, 3.0))
    x = receiver.take(key)
    mappings = link_mappings()
    sender.close()
    assert link_mappings() == mappings - 1  # this process holds both ends
    receiver.close()
    assert link_mappings() == mappings - 1 and bool((x == 3).all())
    del x
    assert link_mappings() == mappings - 2


def test_a_python_without_memfd_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert "memfd_create" in shm.shm_missing()


def test_memory_of_another_meeting_or_shape_is_refused() -> None:
    from tpkernels import _core
    from tpkernels.links.shm import ring_geometry

    spec = make_spec()
    geometry = ring_geometry(spec)
    memory = bytearray(geometry.bytes)
    geometry.format(memory, 7, 0)
    options = {"spin_s": 0.0, "silence_s": 1.0, "timeout_s": 1.0, "socket": -1, "pidfd": -1, "sender": True}
    options |= {"dtype": torch.float32, "refuse": None, "lose": None}
    _core.Ring(memory, geometry, generation=7, **options)
    with pytest.raises(ValueError, match=r"generation 7.*expects.*generation 8"):
        _core.Ring(memory, geometry, generation=8, **options)
    with pytest.raises(ValueError, match=r"2 slots of 1680 bytes.*expects.*3 slots"):
        _core.Ring(memory, ring_geometry(make_spec(slots=3)), generation=7, **options)
    with pytest.raises(ValueError, match="does not begin with a link's header"):
        _core.Ring(bytearray(geometry.bytes), geometry, generation=7, **options)


def test_open_link_names_the_kinds_and_needs_a_group() -> None:
    assert open_link("local", make_spec()).kind == "local"
    with pytest.raises(ValueError, match="unknown kind of link 'tcp'; choose local, shm"):
        open_link("tcp", make_spec())
    with pytest.raises(ValueError, match="needs a process group"):
        open_link("shm", make_spec())


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 8), st.booleans(), st.integers(0, 2**32))
def test_a_checked_plan_of_one_link_runs_through_with_any_timing(slots: int, resident: bool, seed: int) -> None:
    """Two stages of a schedule with one link between two threads, random naps on both sides."""
    schedule = seq_1f1b(2, 2, 4, warmup_per_hop=2)
    chosen = assign_slots(schedule, order=demand_order(schedule)) if resident else ring_slots(schedule, slots)
    planned, transfers = next((link, order) for link, order in chosen.order.items() if link.direction == "F")
    keys = [(transfer.stage, transfer.micro, transfer.slice) for transfer in transfers]
    slot_of = {key: chosen.slot(transfer) for key, transfer in zip(keys, transfers, strict=True)}
    spec = LinkSpec(0, 1, "F", torch.float32, CPU, chosen.slots(planned), slot_of, (1, 130, 2), resident)
    first = (NEAR_WRAP + seed) % 2**32
    pair = sender, receiver = meet_ends(spec, first_epoch=first, spin_s=(0.0, 1e-4)[seed % 2])
    for link in pair:
        link.expect([(key, (1, 130, 2)) for key in keys])

    def send() -> None:
        naps = random.Random(seed)
        for index, key in enumerate(keys):
            time.sleep(naps.choice((0, 0, 1e-4)))
            sender.put(key, torch.full((1, 130, 2), float(index)))

    thread = threading.Thread(target=send)
    thread.start()
    naps = random.Random(seed + 1)
    held: dict[int, tuple[Key, torch.Tensor]] = {}
    for index, key in enumerate(keys):
        slot = slot_of[key]
        if slot in held:
            _free(receiver, *held.pop(slot))
        time.sleep(naps.choice((0, 0, 1e-4)))
        held[slot] = (key, receiver.take(key))
        assert float(held[slot][1].mean()) == index
    for key, x in held.values():
        _free(receiver, key, x)
    thread.join()
    for link in pair:
        link.finish()
        link.close()


def _free(receiver: ShmLink, key: Key, x: torch.Tensor) -> None:
    assert x.isfinite().all()
    receiver.release(key)
