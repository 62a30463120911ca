"""Links: what a slot allows, what both ends check, and that a checked plan's slots never stall a step.

The schedules are stepped by hand over LocalLinks in random interleavings, without engine and tensors of any size, so a
stall here is one of the plan's slots and not of the interpreter. Of DistLink each end is seen alone here, with the
messages recorded; both ends across processes are in tests/terapipe/engine/test_wiring.py and test_failure.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from terapipe.schedule import Schedule, check, sent_by, seq_1f1b, taken_by, terapipe
from terapipe.schedule.grid import ScheduleError
from terapipe.schedule.orders import demand_order
from terapipe.schedule.slots import SlotAssignment, assign_slots, releasing_action, ring_slots
from terapipe.schedule.transfers import Transfer
from tpkernels import fused
from tpkernels.links import DistLink, Key, LinkError, LinkSpec, LocalLink, Trouble
from tpkernels.links.dist import trouble_of

CPU = torch.device("cpu")
SHAPE = (1, 4, 2)


def _spec(slots: int = 1, keys: int = 3, dtype: torch.dtype = torch.float32) -> LinkSpec:
    return LinkSpec(0, 1, "F", dtype, CPU, slots, {(1, 0, index): index % slots for index in range(keys)})


def _expected(spec: LinkSpec) -> list[tuple[Key, tuple[int, ...]]]:
    return [(key, SHAPE) for key in spec.slot_of]


def _local(slots: int = 1) -> LocalLink:
    link = LocalLink(_spec(slots))
    link.expect(_expected(link.spec))
    return link


# ---- one link --------------------------------------------------------------------------------------------------------


def test_a_slot_is_held_until_its_release_and_an_occupied_one_refuses() -> None:
    link, x = _local(slots=2), torch.randn(SHAPE)
    assert link.free((1, 0, 0)) and not link.ready((1, 0, 0))
    link.put((1, 0, 0), x)
    link.put((1, 0, 1), x + 1)
    assert link.ready((1, 0, 0)) and not link.free((1, 0, 2))
    with pytest.raises(
        LinkError, match=r"0->1 \(activations\): slot 0 of micro 0, slice 2 still holds micro 0, slice 0"
    ):
        link.put((1, 0, 2), x)
    assert link.take((1, 0, 0)) is x
    with pytest.raises(LinkError, match="micro 0, slice 0 before it was put, or a second time"):
        link.take((1, 0, 0))
    assert not link.free((1, 0, 2))  # taken is not released: the slot is the saved activation
    link.release((1, 0, 0))
    link.put((1, 0, 2), x)
    with pytest.raises(LinkError, match="slots still held at the end of the step"):
        link.finish()
    for piece in (1, 2):
        link.take((1, 0, piece))
        link.release((1, 0, piece))
    link.finish()


def test_a_release_of_what_is_not_held_is_refused() -> None:
    link = _local(slots=2)
    with pytest.raises(LinkError, match="slot 0 is not held by micro 0, slice 0"):
        link.release((1, 0, 0))
    link.put((1, 0, 2), torch.randn(SHAPE))
    with pytest.raises(LinkError, match=r"slot 0 is not held by micro 0, slice 0 but by"):
        link.release((1, 0, 0))


WRONG: list[tuple[Key, torch.Tensor, str]] = [
    (
        (1, 0, 0),
        torch.zeros(SHAPE, dtype=torch.float64),
        r"torch\.float64 \[1, 4, 2\].*plan says torch\.float32 \[1, 4",
    ),
    ((1, 0, 0), torch.zeros(1, 4, 3), r"torch\.float32 \[1, 4, 3\].*plan says torch\.float32 \[1, 4, 2\]; make hidden"),
    ((1, 0, 0), torch.zeros(1, 5, 2), r"\[1, 5, 2\]"),
    ((1, 1, 0), torch.zeros(SHAPE), r"micro 1, slice 0 for stage 1 is not among the 3 transfers of this step"),
]


@pytest.mark.parametrize(("key", "x", "match"), WRONG, ids=["dtype", "hidden", "tokens", "key"])
def test_both_kinds_refuse_to_send_what_the_plan_does_not_say(
    key: Key, x: torch.Tensor, match: str, group: dist.ProcessGroup
) -> None:
    link = DistLink(_spec(keys=3), group)
    link.expect(_expected(link.spec))
    for sender in (_local(), link):
        with pytest.raises(LinkError, match=match):
            sender.put(key, x)


class _Work:
    """Stands for a message on its way; `fail` is what the medium says when the peer is gone."""

    def __init__(self, x: torch.Tensor | None = None, fail: str | None = None) -> None:
        self.x, self.waited, self.fail = x, 0, fail

    def wait(self) -> None:
        self.waited += 1
        if self.fail:
            raise RuntimeError(self.fail)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No processes: isend and irecv are recorded, so each side's bookkeeping is seen alone."""
    sent: list[_Work] = []
    posted: list[_Work] = []
    rank = [0]

    def start(works: list[_Work]) -> Callable[..., _Work]:
        def operation(x: torch.Tensor, peer: int, group: Any) -> _Work:
            works.append(_Work(x))
            return works[-1]

        return operation

    monkeypatch.setattr(dist, "isend", start(sent))
    monkeypatch.setattr(dist, "irecv", start(posted))
    monkeypatch.setattr(dist, "get_rank", lambda: rank[0])
    recorder = type("Recorder", (), {"sent": sent, "posted": posted, "rank": rank})()
    return recorder


def _receiver(group: Any, keys: int = 3) -> DistLink:
    group.rank[0] = 1
    link = DistLink(_spec(keys=keys), group)
    link.expect(_expected(link.spec))
    return link


def test_a_receiver_takes_in_the_senders_order_and_posts_ahead(group: Any) -> None:
    link = _receiver(group, keys=4)
    assert len(group.posted) == 2
    with pytest.raises(LinkError, match="asked for micro 0, slice 1, but the plan's next transfer is micro 0, slice 0"):
        link.take((1, 0, 1))
    assert link.take((1, 0, 0)).shape == SHAPE
    assert len(group.posted) == 3 and group.posted[0].waited == 1
    with pytest.raises(LinkError, match="transfers never taken"):
        link.finish()
    for piece in (1, 2, 3):
        link.take((1, 0, piece))
    assert len(group.posted) == 4 and all(work.waited == 1 for work in group.posted)
    with pytest.raises(LinkError, match="but the plan's next transfer is nothing more"):
        link.take((1, 0, 0))
    link.finish()


def test_a_sender_waits_only_for_a_slot_and_for_everything_at_the_end(group: Any) -> None:
    link = DistLink(_spec(slots=2, keys=4), group)
    link.expect(_expected(link.spec))
    assert not group.posted
    for piece in range(4):
        link.put((1, 0, piece), torch.randn(2, 4, 1).mT.reshape(SHAPE))
        assert [work.waited for work in group.sent] == [1] * max(0, piece - 1) + [0] * min(piece + 1, 2)
    link.finish()
    assert [work.waited for work in group.sent] == [1] * 4


def test_what_is_sent_is_memory_that_says_all(group: Any) -> None:
    """The process group reads addresses: a sign that torch only notes would be lost."""
    link, x = DistLink(_spec(), group), torch.randn(SHAPE)
    link.expect(_expected(link.spec))
    link.put((1, 0, 0), torch._neg_view(x.mT.contiguous().mT.neg()))
    sent = group.sent[0].x
    assert torch.equal(sent, x) and sent.is_contiguous() and not sent.is_neg()


def test_a_sum_is_handed_on_and_normed_as_by_torch_where_a_medium_has_no_kernels_for_it(group: Any) -> None:
    local, link = _local(slots=2), DistLink(_spec(), group)
    link.expect(_expected(link.spec))
    key, x, residual, weight = (1, 0, 0), torch.randn(SHAPE), torch.randn(SHAPE), torch.randn(2)
    totals = [each.put_sum(key, x, residual) for each in (local, link)]
    assert torch.equal(group.sent[0].x, x + residual)
    values = local.take_norm(key, weight, eps=1e-5, rms=True)
    expected = fused.norm_forward((x + residual).view(4, 2), weight, None, eps=1e-5, rms=True)
    assert torch.equal(values.total, x + residual) and torch.equal(values.out.view(4, 2), expected.out)
    assert local.posted_at < local.waited[0] <= local.waited[1] and not (local.norms_early or link.norms_early)
    for total, sent in zip(totals, (values.total, group.sent[0].x), strict=True):
        assert torch.equal(total, x + residual) and total is not sent  # it may get a graph
    with pytest.raises(LinkError, match=r"torch\.float64 \[1, 4, 2\], but the plan says torch\.float32"):
        local.put_sum((1, 0, 1), x.double(), residual)


def test_a_lost_peer_is_named_on_both_ends(group: Any) -> None:
    message = "[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:4. This is typically caused by"
    link = DistLink(_spec(), group)
    link.expect(_expected(link.spec))
    link.put((1, 0, 0), torch.randn(SHAPE))
    group.sent[0].fail = message
    with pytest.raises(LinkError, match=r"rank 1 is gone, at the end of the step: Connection closed by peer") as caught:
        link.finish()
    assert caught.value.lost_peer == 1 and "typically" not in str(caught.value)
    assert caught.value.trouble is Trouble.GONE and not caught.value.late
    receiver = _receiver(group)
    group.posted[0].fail = message
    with pytest.raises(LinkError, match="rank 0 is gone, with micro 0, slice 0 on its way") as caught:
        receiver.take((1, 0, 0))
    assert caught.value.lost_peer == 0
    group.posted[1].fail = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation"
    with pytest.raises(LinkError, match="rank 0 did not come in time, with micro 0, slice 1 on its way") as caught:
        receiver.take((1, 0, 1))
    assert caught.value.trouble is Trouble.LATE and caught.value.late and caught.value.lost_peer is None


TOLD: list[tuple[BaseException, Trouble | None]] = [
    (RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:4. This is"), Trouble.GONE),
    (RuntimeError("[1] is setting up NCCL communicator: wait timed out after 5000ms"), Trouble.LATE),
    (RuntimeError("shape '[2]' is invalid for input of size 3"), None),
    (ConnectionResetError(104, "reset"), Trouble.GONE),
    (OSError(24, "Connection of many open files"), None),
    (LinkError("Connection closed by peer"), None),  # what made it says why, its words do not
    (LinkError("gone", peer=1, trouble=Trouble.SILENT), Trouble.SILENT),
]


@pytest.mark.parametrize(("error", "trouble"), TOLD, ids=lambda each: str(each))
def test_what_a_backend_met_is_read_from_its_words_and_from_no_other_error(
    error: BaseException, trouble: Trouble | None
) -> None:
    assert trouble_of(error) is trouble


# ---- whole schedules over local links --------------------------------------------------------------------------------


def _step(schedule: Schedule, slots: SlotAssignment, choose: Callable[[list[int]], int]) -> bool:
    """Run every action in an interleaving of the ranks that `choose` picks; False when no rank can move."""
    links = {}
    for link, transfers in slots.order.items():
        slot_of = {_key(transfer): slots.slot(transfer) for transfer in transfers}
        spec = LinkSpec(*link, torch.float32, CPU, slots.slots(link), slot_of)
        links[link] = LocalLink(spec)
        links[link].expect([(_key(transfer), ()) for transfer in transfers])
    position = [0] * schedule.ranks

    def can_run(rank: int) -> bool:
        if position[rank] == len(schedule[rank]):
            return False
        action = schedule[rank][position[rank]]
        taken, sent = taken_by(schedule, action), sent_by(schedule, action)
        return (taken is None or links[taken.link].ready(_key(taken))) and (
            sent is None or links[sent.link].free(_key(sent))
        )

    releases: dict[Any, list[Transfer]] = {}
    for transfer in slots.slot_of:
        releases.setdefault(releasing_action(schedule, transfer, resident=slots.resident), []).append(transfer)
    while movable := [rank for rank in range(schedule.ranks) if can_run(rank)]:
        rank = choose(movable)
        action = schedule[rank][position[rank]]
        position[rank] += 1
        taken, sent = taken_by(schedule, action), sent_by(schedule, action)
        if taken is not None:
            links[taken.link].take(_key(taken))
        if sent is not None:
            links[sent.link].put(_key(sent), torch.zeros(()))
        for transfer in releases.get(action, []):
            links[transfer.link].release(_key(transfer))
    if any(position[rank] < len(schedule[rank]) for rank in range(schedule.ranks)):
        return False
    for link in links.values():
        link.finish()
    return True


def _key(transfer: Transfer) -> Key:
    return (transfer.stage, transfer.micro, transfer.slice)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A generator's schedule with backwards and forwards of each rank merged anew, where `check` allows it."""
    ranks, micros, slices = (draw(st.integers(1, 4)) for _ in range(3))
    if draw(st.booleans()):
        schedule = terapipe(ranks, micros, slices)
    else:
        schedule = seq_1f1b(ranks, micros, slices, warmup_per_hop=draw(st.integers(1, 3)))
    generator = random.Random(draw(st.integers(0, 10**6)))
    for _ in range(draw(st.integers(0, 12))):
        rank = generator.randrange(ranks)
        order = list(schedule[rank])
        index = generator.randrange(len(order) - 1)
        order[index], order[index + 1] = order[index + 1], order[index]
        mutant = Schedule([order if other == rank else schedule[other] for other in range(ranks)])
        try:
            check(mutant)
        except ScheduleError:
            continue
        schedule = mutant
    return schedule


@given(schedules(), st.integers(0, 10**6), st.booleans())
def test_the_plans_slots_never_stall_in_any_interleaving(schedule: Schedule, seed: int, fewest: bool) -> None:
    slots = assign_slots(schedule, order=demand_order(schedule)) if fewest else assign_slots(schedule)
    assert _step(schedule, slots, random.Random(seed).choice)
    assert _step(schedule, slots, min) and _step(schedule, slots, max)


@given(schedules(), st.integers(1, 3), st.integers(0, 10**6))
def test_too_few_slots_stall_exactly_when_check_says_so(schedule: Schedule, count: int, seed: int) -> None:
    for slots in (ring_slots(schedule, count, resident=True), assign_slots(schedule, at_most=count)):
        try:
            check(schedule, slots)
        except ScheduleError as error:
            assert "deadlocks" in str(error)
            assert not _step(schedule, slots, random.Random(seed).choice)
        else:
            assert _step(schedule, slots, random.Random(seed).choice)


def test_a_first_in_first_out_ring_of_live_slices_stalls() -> None:
    """Design 5: backwards free slices last to first, so as many slots as live slices are not enough for a ring."""
    schedule = seq_1f1b(3, 3, 3, warmup_per_hop=2)
    most = max(assign_slots(schedule, order=demand_order(schedule)).counts.values())
    assert not _step(schedule, ring_slots(schedule, most, resident=True), min)
    assert _step(schedule, assign_slots(schedule, order=demand_order(schedule)), min)
