"""PeerLink by the CUDA kernels, in the emulator, and with one end in each language: the Triton end in Triton's
interpreter, both in this process.

Released slots are poisoned and epochs begin just before they wrap. What CUDA kernels do to the slot is watched.
"""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from tpkernels import cuda, cuda_peer
from tpkernels.links import LinkError, LinkSpec, PeerLink, open_link, peer, peer_memory, peer_missing
from tpkernels.links.peer import load_language
from tpkernels.links.segment import call, fetch

if torch.cuda.is_available():
    pytest.skip("with a GPU triton compiles, and CPU tensors have no kernels", allow_module_level=True)

CPU = torch.device("cpu")
SHAPE = (1, 67, 24)
NEAR_WRAP = 2**32 - 2
TILE_ROWS = 64
PAIRS = [("cuda", "cuda"), ("triton", "cuda"), ("cuda", "triton")]


def make_spec(dtype, slots=2):
    slot_of = {(1, 0, piece): piece % slots for piece in range(4)}
    return LinkSpec(0, 1, "F", dtype, CPU, slots, slot_of, SHAPE, True)


@pytest.fixture
def meet(usable_triton, peer_ends):
    """Both ends of a link, by kernels in two languages."""
    opened = []

    def make(dtype, languages, **options):
        spec = make_spec(dtype)
        layout = peer_memory.layout_of(spec, TILE_ROWS, 7, NEAR_WRAP)
        offer, accepted = peer_memory.offer_memory(layout, CPU), []
        thread = threading.Thread(target=lambda: accepted.append(offer.accept(10)))
        thread.start()
        met = fetch(call(offer.address), 10)
        thread.join()
        for segment, sender, language in ((met, True, languages[0]), (accepted[0], False, languages[1])):
            memory = peer_memory.map_memory(segment, layout, CPU, sender=sender, timeout_s=10)
            chosen = peer_ends[0 if sender else 1] if language == "cuda" else language
            settings = {"timeout_s": 0.05, "silence_s": 60.0, "poison": True} | options
            opened.append(PeerLink(spec, memory, sender=sender, language=chosen, **settings))
            if language == "cuda":
                watch(peer_ends[0].emulator, opened[-1], memory, str(sender))
            opened[-1].expect([(key, SHAPE) for key in spec.slot_of])
        return opened[-2:]

    def watch(emulator, link, memory, name):
        """Each end has its own mapping of the one memory, so what is watched here is each end for itself; test_peer.py
        watches both."""
        own = {"uses": link._slots[0].uses, "control": link._slots[0].control, "words": link._words}
        own |= {f"arrived {slot.index}": slot.arrived for slot in link._slots}
        shared = {"receiver's memory": memory.receiver, "sender's memory": memory.sender, **own}
        emulator.register(writable=True, shared=True, **{f"{key} ({name})": shared[key] for key in shared})

    yield make
    for link in opened:
        link.close()


@pytest.mark.parametrize("languages", PAIRS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slices_and_what_is_made_of_them_arrive_bitwise(dtype, languages, meet):
    """Sums and products put, plain takes, norms and products taken; integers make every order of summing exact."""
    sender, receiver = meet(dtype, languages)
    for number, key in enumerate(sender.spec.slot_of):
        a, w = torch.randint(-3, 4, (1, 67, 40)).to(dtype), torch.randint(-3, 4, (24, 40)).to(dtype)
        x, residual = torch.randint(-8, 9, (2, *SHAPE)).to(dtype)
        gain = torch.randint(1, 3, (24,)).to(dtype)
        if number % 2:
            sender.put(key, x, residual)
            expected = x + residual
        else:
            sender.put_matmul(key, a, w, residual)
            expected = a @ w.T + residual
        if number < 2:
            found = receiver.take_norm(key, gain, eps=1e-5, rms=True)
            taken, normed = found.total, F.rms_norm(expected.float(), (24,), gain.float(), 1e-5)
            assert (found.out.float() - normed).abs().max() <= torch.finfo(dtype).eps * normed.abs().max()
        elif number == 2:
            taken = receiver.take(key)
        else:
            product = receiver.take_matmul(key, torch.eye(24, dtype=dtype))
            taken = product.x
            assert torch.equal(product.out, expected)
        assert torch.equal(taken, expected)
        receiver.verify(key)
        receiver.release(key)
        assert taken.isnan().all()
    sender.finish()
    receiver.finish()


@pytest.mark.parametrize("languages", PAIRS, ids="-".join)
def test_a_dropped_post_and_a_missing_credit_are_reported(languages, meet):
    sender, receiver = meet(torch.bfloat16, languages)
    first, _, third, _ = sender.spec.slot_of
    sender.put(first, torch.zeros(SHAPE, dtype=torch.bfloat16))
    sender._memory.flags(0)[1] -= 1  # its last post did not come
    with pytest.raises(LinkError) as caught:
        receiver.take(first)
    assert str(caught.value) == (
        "link 0->1 (activations): rank 0 is alive but did not come: waited in vain for stage 1, micro 0, slice 0 "
        f"(slot 0, tile 1, wanted epoch {NEAR_WRAP + 1}, saw {NEAR_WRAP}, generation 7)."
    )
    sender.put((1, 0, 1), torch.zeros(SHAPE, dtype=torch.bfloat16))
    with pytest.raises(LinkError, match=rf"slice 2 \(slot 0, tile 0, wanted epoch {NEAR_WRAP + 1}, saw {NEAR_WRAP}"):
        sender.put(third, torch.ones(SHAPE, dtype=torch.bfloat16))
    assert not sender._memory.data(0, SHAPE).any()


def test_the_language_is_chosen_by_request_and_its_absence_said(monkeypatch):
    assert isinstance(load_language("cuda", CPU), cuda_peer.CudaPeer)
    assert load_language(None, CPU).__name__ == "tpkernels.triton.plan_hand_off"
    with pytest.raises(ValueError, match="unknown language 'ptx' of the kernels of a peer link; choose 'triton' or"):
        load_language("ptx", CPU)

    def say_trouble(kind, spec, group, *, trouble):
        raise LinkError(trouble)

    monkeypatch.setattr(peer, "agree", say_trouble)  # with the other end
    with pytest.raises(LinkError, match=r"links 'peer' cannot be had: its ranks compute on a CPU\."):
        open_link("peer", make_spec(torch.bfloat16), group=object(), language="cuda")

    def not_built():
        raise ImportError("No module named 'tpkernels._cuda'")

    monkeypatch.setattr(cuda, "_import", not_built)
    assert "tpkernels._cuda is not built; TPK_CUDA=1 pip install" in peer_missing(torch.device("cuda"), "cuda")
