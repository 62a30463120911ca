"""What the ranks of the process tests run: `python worker.py [MODULE:]SCENARIO FOLDER`, started by launch.run_workers.

Each scenario returns a dict, saved as FOLDER/rank<R>.pt for the test to compare. One start serves many cases, because
starting is what costs.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_cases import Case, gradients_of, plain_ops
from torch import Tensor, nn

from terapipe.engine import Batch, Pipeline, PipelineError, launch
from terapipe.models import tied_parameters
from terapipe.schedule import Link, Plan, make_plan
from tpkernels.links import LinkError, PeerLink, ShmLink, shm

LAYOUTS = {
    2: [
        Case("gpt", 2, (100, 3, 154), 3, 2, "seq_1f1b", 2, documents=True, targets="some"),
        Case("llama", 2, (1, 256), 2, 1, "terapipe", documents=True, dtype="fp32"),
        Case("llama", 2, (257,), 1, 1, "seq_1f1b", dtype="bf16"),
    ],
    3: [
        Case("gpt", 3, (100, 3, 154), 4, 1, "seq_1f1b", documents=True, targets="some"),
        Case("llama", 3, (33,) * 7 + (26,), 2, 2, "terapipe", dtype="fp32"),
        Case("gpt", 3, (256, 1), 1, 2, "terapipe", dtype="fp32"),
    ],
}

LINKS = {2: (("shm", 0), ("dist", 0)), 3: (("shm", 2),)}  # kind, slots of a ring that copies out


def run_layout(pipeline: Pipeline, case: Case) -> dict[str, Any]:
    """Evaluations and steps in mixed order; also run by the test itself over local links."""
    before = pipeline.evaluate(case.batch(0)).loss
    first = pipeline.step(case.batch(0))
    gradients = gradients_of(pipeline)
    other = pipeline.step(case.batch(1)).loss
    again = pipeline.evaluate(case.batch(0)).loss
    pipeline.step(case.batch(0))
    repeated = all(torch.equal(gradient, gradients[name]) for name, gradient in gradients_of(pipeline).items())
    last = pipeline.step(case.batch(0)).hand_offs
    timeline = pipeline.timeline()
    rows = [row for row in timeline if row.category == "compute"]
    return {
        "losses": [before, first.loss, other, again],
        "grad_norm": first.grad_norm,
        "gradients": gradients,
        "repeated": repeated,
        "timeline": sorted((row.rank, row.label) for row in rows),
        "bubble_share": first.bubble_share,
        "hand_offs": last,
        "on their way": [row for row in timeline if row.category == "hand-off"],
    }


def layouts(rank: int, ranks: int) -> dict[str, Any]:
    results: dict[str, Any] = {"tied": [], "recomputed": []}
    for case in LAYOUTS[ranks]:
        for links in LINKS[ranks]:
            with case.pipeline(links=links[0], link_slots=links[1]) as pipeline:
                results[str(case), links] = found = run_layout(pipeline, case)
                if tied_parameters(case.config):
                    results["tied"].append(train_tied(pipeline, case))
            results["recomputed"].append(_again_with_recompute(case, links) == _bits(found))
    results["mixed ties"] = mixed_ties(ranks)
    results["one without memory"] = one_without_memory(rank, ranks) if ranks == 2 else None
    return results


def _again_with_recompute(case: Case, links: tuple[str, int]) -> list[Any]:
    with case.pipeline(links=links[0], link_slots=links[1], recompute=True) as pipeline:
        return _bits(run_layout(pipeline, case))


def _bits(found: dict[str, Any]) -> list[Any]:
    """Of what `run_layout` found."""
    gradients = {name: gradient.tolist() for name, gradient in found["gradients"].items()}
    return [found["losses"], found["grad_norm"], gradients, found["repeated"], found["timeline"]]


HOSTS_CASE = Case("llama", 2, (100, 157), 2, 1, "seq_1f1b", dtype="fp32")


def hosts(rank: int, ranks: int) -> dict[str, Any]:
    """One case with the links that "auto" finds, after "shm" was refused."""
    refused = ""
    try:
        HOSTS_CASE.pipeline(links="shm")
    except LinkError as error:
        refused = str(error)
    with HOSTS_CASE.pipeline() as pipeline:
        kinds = {link.kind for link in pipeline._wiring.links.values()}
        return {**run_layout(pipeline, HOSTS_CASE), "kinds": kinds, "refused": refused}


PEER_CASE = Case("llama", 2, (33, 30), 2, 1, "seq_1f1b", dtype="fp32")
PEER_BLOCKS = {"fused": contextlib.nullcontext, "plain": plain_ops}


def peer(rank: int, ranks: int) -> dict[str, Any]:
    """One case over links whose kernels Triton's interpreter runs, its blocks fused and of plain ops."""
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    sums: list[Any] = []
    put_sum = PeerLink.put_sum

    def counted(link: PeerLink, key: Any, *given: Tensor) -> Tensor:
        sums.append(key)
        return put_sum(link, key, *given)

    PeerLink.put_sum = counted  # type: ignore[method-assign]
    results = {}
    with PEER_CASE.pipeline(links="peer") as pipeline:
        kinds = {link.kind for link in pipeline._wiring.links.values()}
        for blocks, within in PEER_BLOCKS.items():
            sums.clear()
            with within():
                loss = pipeline.step(PEER_CASE.batch(0)).loss
            results[blocks] = {"loss": loss, "gradients": gradients_of(pipeline), "sums": sorted(sums)}
            pipeline.zero_grad()
    return {"kinds": kinds, "results": results}


def one_without_memory(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 1 cannot make shared memory: the link it receives on falls back, the other stays."""
    before = shm.offer_segment

    def refuse(*_: Any) -> Any:
        raise OSError("no memory left for this test")

    shm.offer_segment = refuse if rank == 1 else before
    try:
        with _pipeline(ranks) as pipeline:
            kinds = {str(planned): link.kind for planned, link in pipeline._wiring.links.items()}
            return {"kinds": kinds, "loss": pipeline.step(_batch()).loss}
    finally:
        shm.offer_segment = before


def train_tied(pipeline: Pipeline, case: Case) -> dict[str, Tensor]:
    """Copies on this rank after three updates."""
    parameters = pipeline.named_parameters()
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.01)
    for seed in range(3):
        pipeline.step(case.batch(seed))
        optimizer.step()
    names = tied_parameters(case.config)[0]
    return {name: parameters[name].detach().clone() for name in names if name in parameters}


# ---- small layers ----------------------------------------------------------------------------------------------------


class Mix(nn.Module):
    """Token-wise; `armed` says what it does next, once: "raise", "kill" or a number of seconds to sleep."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator) / 2)
        self.forward_armed: Any = None
        self.backward_armed: Any = None

    def forward(self, hidden: Tensor, *_: Any) -> Tensor:
        _go_off(self.forward_armed)
        if hidden.dim() == 2:
            hidden = torch.sin(hidden[..., None] + torch.arange(4.0))
        out = hidden + torch.tanh(hidden @ self.weight)
        if out.requires_grad and self.backward_armed:
            out.register_hook(lambda gradient: _go_off(self.backward_armed))
        return out


raised_at = 0.0


def _go_off(armed: Any) -> None:
    global raised_at
    raised_at = time.monotonic()
    if armed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif armed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif isinstance(armed, float):
        time.sleep(armed)
    elif armed:
        raise ArithmeticError(f"broken on purpose by rank {os.environ['RANK']}")


def _plan(ranks: int, slices: tuple[int, ...] = (3, 4)) -> Plan:
    return make_plan(layers=4, ranks=ranks, slices=slices, tokens=7, micros=2, schedule="seq_1f1b")


def _batch(seed: int = 0) -> Batch:
    tokens = torch.randint(9, (2, 7), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens, tokens % 4)


def _pipeline(ranks: int, **options: Any) -> Pipeline:
    return Pipeline([Mix(seed) for seed in range(4)], _plan(ranks), hidden_size=4, **options)


def mixed_ties(ranks: int, **options: Any) -> dict[str, Tensor]:
    """One original with copies on other ranks and on its own."""
    ties = [("0.weight", "1.weight"), ("0.weight", "3.weight")]
    with _pipeline(ranks, ties=ties, **options) as pipeline:
        pipeline.step(_batch())
        return gradients_of(pipeline)


# ---- failures that are caught ----------------------------------------------------------------------------------------

CAUGHT = [(0, "forward"), (1, "forward"), (3, "forward"), (0, "backward"), (2, "backward"), (3, "loss")]
CAUGHT += [(1, "evaluate"), (0, "reduction"), (2, "reduction")]


def caught(rank: int, ranks: int) -> dict[str, Any]:
    """One failure after another, each in a new pipeline of the same processes, which all live on."""
    reports: dict[Any, Any] = {}
    if rank == 0:  # a pipeline of its own is nobody else's business
        with _pipeline(ranks, links="local") as pipeline:
            reports["alone"] = pipeline.step(_batch()).loss
    for failing, where in CAUGHT:
        armed = rank == failing

        def loss(output: Tensor, targets: Tensor, armed: bool = armed and where == "loss") -> Tensor:
            _go_off(armed and "raise")
            return torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")

        pipeline = _pipeline(ranks, loss=loss)
        dist.barrier()
        if armed:
            for layer in pipeline.layers().values():
                layer.forward_armed = where in ("forward", "evaluate") and "raise"
                layer.backward_armed = where == "backward" and "raise"
            if where == "reduction":
                pipeline._loss_sum = lambda: _go_off("raise")  # type: ignore[method-assign, assignment, return-value]
        reports[failing, where] = _failure_of(pipeline, evaluate=where == "evaluate")
        if armed:
            time.sleep(0.1)  # the origin stays alive while the others must already have stopped
        dist.barrier()
    reports["between steps"] = between_steps(rank, ranks)
    with _pipeline(ranks) as pipeline:
        reports["afterwards"] = pipeline.step(_batch()).loss
    return {"reports": reports, "starts": bad_starts(rank, ranks), "stall": stall(rank, ranks)}


def between_steps(rank: int, ranks: int) -> str:
    """Rank 1 fails in code of its own; the others hear of it in their next step."""
    dist.barrier()
    try:
        with _pipeline(ranks) as pipeline:
            pipeline.step(_batch())
            if rank == 1:
                raise ZeroDivisionError("in the optimizer")
            pipeline.step(_batch())
    except (ZeroDivisionError, PipelineError) as error:
        return str(error)
    return ""


def _failure_of(pipeline: Pipeline, *, evaluate: bool = False) -> dict[str, Any]:
    try:
        (pipeline.evaluate if evaluate else pipeline.step)(_batch())
    except PipelineError as error:
        stopped, failure, message = time.monotonic(), error.failure, str(error)
        try:
            pipeline.step(_batch())
        except PipelineError as again:
            return {
                "at": stopped,
                "raised_at": raised_at,
                "rank": failure.rank,
                "action": failure.action,
                "cause": failure.cause,
                "message": message,
                "again": str(again),
            }
    raise AssertionError("the pipeline did not fail")


def bad_starts(rank: int, ranks: int) -> dict[str, str]:
    """What each rank hears when the ranks do not start alike."""
    odd = rank == ranks - 1

    def refuse() -> nn.Module:
        raise FileNotFoundError("no weights here")

    layers: list[Any] = [Mix(seed) for seed in range(4)]
    attempts: dict[str, Callable[[], Any]] = {
        "factory": lambda: Pipeline([*layers[:3], refuse], _plan(ranks), hidden_size=4),
        "plan": lambda: Pipeline(layers, _plan(ranks, (4, 3) if odd else (3, 4)), hidden_size=4),
        "hidden_size": lambda: Pipeline(layers, _plan(ranks), hidden_size=5 if odd else 4),
        "ties": lambda: Pipeline(layers, _plan(ranks), hidden_size=4, ties=[("0.weight", "1.weight")] if odd else []),
        "ranks": lambda: Pipeline(layers, _plan(ranks - 1), hidden_size=4),
        "shared": lambda: Pipeline([layers[0], layers[1], layers[2], layers[0]], _plan(ranks), hidden_size=4),
        "shapes": lambda: _pipeline(ranks, dtype=torch.float64),
        "batch": lambda: _step_and_close(_pipeline(ranks), _batch(seed=int(odd))),
    }
    heard = {}
    for name, attempt in attempts.items():
        dist.barrier()
        try:
            attempt()
        except (ValueError, RuntimeError, FileNotFoundError) as error:
            heard[name] = f"{type(error).__name__}: {error}"
    return heard


def _step_and_close(pipeline: Pipeline, batch: Batch | None = None) -> None:
    with pipeline:
        pipeline.step(batch or _batch())


def stall(rank: int, ranks: int) -> dict[str, Any]:
    """A rank that dawdles in a forward, longer than it may be silent; every rank logs where all stand, once, and
    the step still ends well."""
    shm_options(silence_s=0.7)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("terapipe").addHandler(handler)
    with _pipeline(ranks, stall_seconds=1.5) as pipeline:
        dist.barrier()
        if rank == 1:
            layer = next(iter(pipeline.layers().values()))
            counter = itertools.count()
            layer.register_forward_pre_hook(lambda *_: time.sleep(3.4) if next(counter) == 1 else None)
        loss = pipeline.step(_batch()).loss
    shm_options(silence_s=shm.SILENCE_S)
    return {"lines": lines, "loss": loss}


# ---- failures that end the process -----------------------------------------------------------------------------------


def uncaught(rank: int, ranks: int) -> dict[str, Any]:
    return _ends(rank, ranks, "raise")


def killed(rank: int, ranks: int) -> dict[str, Any]:
    return _ends(rank, ranks, "kill")


def stopped(rank: int, ranks: int) -> dict[str, Any]:
    """As `killed`, but the process only stands still; its peers give up after a second instead of ten."""
    shm_options(silence_s=1.0)
    return _ends(rank, ranks, "stop")


def dropped(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 1 forgets to post its second slice to rank 2; nobody is dead or disconnected. Rank 0's time is up first."""
    pipeline = _pipeline(ranks, link_timeout=timedelta(seconds=2.5 if rank == 0 else 60))
    if rank == 1:
        link: Any = pipeline._wiring.links[Link(1, 2, "F")]
        posts = itertools.count()
        link._ring.watch(lambda action, tile: action == "post" and next(posts) == 1)
    dist.barrier()
    return _failure_of(pipeline)


def shm_options(**options: float) -> None:
    ShmLink.__init__.__kwdefaults__.update(options)  # type: ignore[attr-defined]


def _ends(rank: int, ranks: int, how: str) -> dict[str, Any]:
    """The last rank fails in its second backward, a while into the second step."""
    pipeline = _pipeline(ranks)
    pipeline.step(_batch())
    time.sleep(0.2)
    if rank == ranks - 1:
        for layer in pipeline.layers().values():
            layer.backward_armed = how
    (Path(sys.argv[2]) / f"began{rank}").write_text(str(time.monotonic()))
    pipeline.step(_batch())
    return {}


def main() -> None:
    module, _, scenario = sys.argv[1].rpartition(":")
    folder = Path(sys.argv[2])
    world = launch.initialize()
    (folder / f"pid{world.rank}").write_text(str(os.getpid()))
    scenarios = vars(importlib.import_module(module)) if module else globals()
    result = scenarios[scenario](world.rank, world.size)
    torch.save(result, folder / f"rank{world.rank}.pt")
    launch.shutdown()


if __name__ == "__main__":
    main()
