"""What cannot fit is refused before anything is allocated; what may not is warned of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from terapipe.models.presets import quickstart
from terapipe.schedule import make_plan
from terapipe.train import memory_needs
from terapipe.train.memory_needs import GIB, check_memory
from terapipe.train.presets import PRESETS
from terapipe.train.start import check_start
from terapipe.world import ALONE, World

LAYERS, TOKENS = len(quickstart().layer_names()), 2**17


def check(world: World = ALONE, *, tokens: int = 2048, ranks: int = 1, recompute: bool = False) -> str | None:
    plan = make_plan(layers=LAYERS, ranks=ranks, slices=8, tokens=tokens, micros=1, micro_size=1)
    return check_memory(plan, quickstart(), dtype="fp32", recompute=recompute, world=world, device="cpu")


def test_a_step_far_too_large_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = replace(PRESETS["debug"](), tokens=2_000_000_000, run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match=r"about [\d,]+\.\d GiB .*2000000000 tokens .*this machine has \d+\.\d GiB"):
        check_start(config, world=ALONE, resume=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("share", "outcome"), [(1.1, "fits"), (0.9, "warned"), (0.6, "warned"), (0.4, "refused")])
def test_the_need_is_compared_with_all_memory_and_twice_of_it(
    monkeypatch: pytest.MonkeyPatch, share: float, outcome: str
) -> None:
    monkeypatch.setattr(memory_needs, "host_memory", lambda: 1.0)
    with pytest.raises(ValueError, match="a step needs about") as refused:
        check(tokens=TOKENS)
    need = GIB * float(str(refused.value).split("about ")[1].split(" GiB")[0])  # printed to a tenth of a GiB
    monkeypatch.setattr(memory_needs, "host_memory", lambda: share * need)
    if outcome == "refused":
        with pytest.raises(ValueError, match="a step needs about"):
            check(tokens=TOKENS)
    else:
        assert (check(tokens=TOKENS) is not None) == (outcome == "warned")


def test_recomputation_and_other_hosts_need_less_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def need(**options: object) -> float:
        monkeypatch.setattr(memory_needs, "host_memory", lambda: 1.0)
        with pytest.raises(ValueError, match="a step needs about") as refused:
            check(**options)  # type: ignore[arg-type]
        return float(str(refused.value).split("about ")[1].split(" GiB")[0].replace(",", ""))

    assert need(tokens=TOKENS, recompute=True) < 0.7 * need(tokens=TOKENS)
    both = need(world=World(size=2, local_size=2), ranks=2, tokens=TOKENS)
    assert need(world=World(size=2, local_size=1), ranks=2, tokens=TOKENS) == pytest.approx(both / 2, abs=0.1)


def test_a_limit_of_the_group_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory_needs, "_CGROUP_LIMIT", limit)
    installed = memory_needs.host_memory()
    limit.write_text("max\n")
    assert memory_needs.host_memory() == installed > GIB
    limit.write_text("1000000\n")
    assert memory_needs.host_memory() == 1e6
