"""What two ends that were asked for different links hear: both the same, before anything is opened."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tpkernels.links import LinkError, LinkSpec, agreement

SPEC = LinkSpec(3, 5, "F", torch.float32, torch.device("cpu"), 2, {(1, 0, 0): 0, (1, 0, 1): 1}, (1, 4, 2))
MANY = replace(SPEC, slot_of={(1, micro, piece): 0 for micro in range(100) for piece in range(100)})


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `agree` on the sender and the receiver at once; returns their errors by rank."""
    rank = threading.local()
    letters: dict[int, queue.Queue[Tensor]] = {3: queue.Queue(), 5: queue.Queue()}  # by who gets them
    monkeypatch.setattr(
        agreement,
        "dist",
        SimpleNamespace(
            get_rank=lambda: rank.value,
            get_backend=lambda group: "gloo",
            send=lambda letter, to, group: letters[to].put(letter.clone()),
            recv=lambda letter, source, group: letter.copy_(letters[rank.value].get(timeout=10)),
        ),
    )

    def run(
        sender: tuple[str, LinkSpec], receiver: tuple[str, LinkSpec], *, receiver_trouble: str = ""
    ) -> dict[int, str]:
        heard: dict[int, str] = {}

        def end(own: int, kind: str, spec: LinkSpec) -> None:
            rank.value = own
            try:
                trouble = receiver_trouble if own == 5 else ""
                agreement.agree(kind, spec, None, trouble=trouble)  # type: ignore[arg-type]
            except LinkError as error:
                heard[own] = str(error)

        threads = [threading.Thread(target=end, args=(own, *asked)) for own, asked in ((3, sender), (5, receiver))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        return heard

    return run


@pytest.mark.parametrize("spec", [SPEC, MANY, replace(SPEC, slot_shape=())], ids=["small", "many", "no shape"])
def test_equal_ends_agree(ends: Any, spec: LinkSpec) -> None:
    copied = replace(spec, slot_of=dict(reversed(spec.slot_of.items())), device=torch.device("meta"))
    assert ends(("shm", spec), ("shm", copied)) == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": torch.bfloat16}, "dtype"),
        ({"slots": 3}, "slots"),
        ({"slot_shape": (1, 4, 3)}, "slot_shape"),
        ({"resident": False}, "resident"),
        ({"direction": "B"}, "direction"),
        ({"slot_of": {(1, 0, 0): 0, (1, 0, 1): 0}}, "slot_of"),
        ({"slot_of": {}}, "slot_of"),
    ],
    ids=str,
)
def test_both_ends_hear_what_differs(ends: Any, change: dict[str, Any], said: str) -> None:
    heard = ends(("shm", SPEC), ("shm", replace(SPEC, **change)))
    assert heard.keys() == {3, 5}
    for message in heard.values():
        assert f"different links: {said} " in message and message.count(" on rank 3") == 1
        assert message.count(" on rank 5") == 1 and "equal LinkSpecs" in message
    if "dtype" in change:
        assert "dtype float32 on rank 3, bfloat16 on rank 5" in heard[3]
        assert "dtype bfloat16 on rank 5, float32 on rank 3" in heard[5]


def test_two_kinds_and_several_differences_are_named_together(ends: Any) -> None:
    heard = ends(("shm", SPEC), ("dist", replace(SPEC, slots=7)))
    assert "kind shm on rank 3, dist on rank 5; slots 2 on rank 3, 7 on rank 5" in heard[3]


def test_the_trouble_of_one_end_is_told_to_the_other(ends: Any) -> None:
    heard = ends(("peer", SPEC), ("peer", SPEC), receiver_trouble="there is no GPU.")
    assert heard[5] == f"{SPEC}: there is no GPU."
    assert heard[3] == f"{SPEC}: rank 5 cannot open it: there is no GPU."
