"""Mistakes planted into the source of the peer kernels, one at a time: the tests of the protocol must notice each.

A mutant is an edit of text in csrc/cuda/peer_protocol.cuh or peer_rows.cuh. All of them are compiled in one go, each in
a namespace of its own, linked with the emulator in place of the real kernels, and chosen by a number.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tpkernels import hand_off

sys.path.insert(0, str(Path(__file__).parent))
from test_peer import BF16, NEAR_WRAP, Ends, call, norm_of, randn

ROOT = Path(__file__).parents[3]
ROWS, COLUMNS, USES = 130, 264, 3  # two blocks and more a tile


@dataclass(frozen=True)
class Mutant:
    """What is wrong with it, and the edit that makes it so."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return self.name


MUTANTS = [
    Mutant("sound", "", ""),
    Mutant("no barrier before the post", "uint32_t blocks) {\n  __syncthreads();\n", "uint32_t blocks) {\n"),
    Mutant(
        "the post is relaxed",
        "ptx::store_release_sys(slot.flags + tile, *slot.uses);",
        "store_word(slot.flags + tile, *slot.uses, false, true);",
    ),
    Mutant(
        "the post reaches this GPU only",
        "ptx::store_release_sys(slot.flags + tile, *slot.uses);",
        "store_word(slot.flags + tile, *slot.uses, true, false);",
    ),
    Mutant("every block posts", "ptx::add_acq_rel_gpu(slot.arrived + tile, 1) != blocks - 1", "blocks == 0"),
    Mutant("blocks of a tile arrive relaxed", "ptx::add_acq_rel_gpu(slot.arrived", "atomic_add_relaxed(slot.arrived"),
    Mutant("the counter of a tile is not set back", "    ptx::exchange_relaxed_gpu(slot.arrived + tile, 0);\n", ""),
    Mutant(
        "the post comes before the store",
        "    value[i].store(out, chunk);\n  });\n  if (handed_on) post_tile(task.slot, tile, blocks);\n",
        "  });\n  if (handed_on) post_tile(task.slot, tile, blocks);\n"
        "  each([&](int i, int64_t chunk) { value[i].store(out, chunk); });\n",
    ),
    Mutant("the next epoch is posted", "(slot.flags + tile, *slot.uses);", "(slot.flags + tile, *slot.uses + 1);"),
    Mutant(
        "the last epoch is waited for",
        "slot.flags + tile, *slot.uses, PeerWho",
        "slot.flags + tile, *slot.uses - 1, PeerWho",
    ),
    Mutant("another tile is waited for", "uint32_t(row / peer_tile_rows)", "0"),
    Mutant("no fence after the wait", "  ptx::fence_acq_rel_sys();\n  return true;", "  return true;"),
    Mutant("no barrier after the wait", "*answer = ask();\n  __syncthreads();\n", "*answer = ask();\n"),
    Mutant("no wait for the credit", "  if (!wait(slot, slot.credit, used, PeerWho::sender, 0)) return;\n", ""),
    Mutant("no claim", "  ptx::store_release_sys(slot.claim, used + 1);\n", ""),
    Mutant(
        "the gate lets through", "    if (!wait(slot, slot.flags + tile, want, PeerWho::receiver, tile)) return;\n", ""
    ),
    Mutant("uses are not counted by the receiver", "  *slot.uses = want;\n", ""),
    Mutant(
        "the credit has neither fence nor release",
        "  ptx::fence_acq_rel_sys();\n  if (got != want) return report(slot, PeerWho::holder, 0, want, got);\n"
        "  if (use.release) ptx::store_release_sys(slot.credit, want);",
        "  if (use.release) store_word(slot.credit, want, false, true);",
    ),
    Mutant(
        "the credit of the next use is given",
        "ptx::store_release_sys(slot.credit, want);",
        "ptx::store_release_sys(slot.credit, want + 1);",
    ),
]

SHELL = """
#include "cuda/norm.cuh"
#include "cuda/device.cuh"
#include "cuda/peer.h"
#include "emulator/session.h"

namespace {{ int chosen = 0; }}
extern "C" __attribute__((visibility("default"))) void choose_mutant(int number) {{ chosen = number; }}
namespace tpk::emulator {{
inline uint32_t atomic_add_relaxed(uint32_t* word, uint32_t value) {{ return atomic_add(word, value, false); }}
}}
namespace tpk {{ using emulator::atomic_add_relaxed, emulator::store_word; }}
{mutants}
namespace tpk::cuda {{
void peer_take_credit(const PeerSlot& slot, const Place& place) {{ {take_credit} }}
void peer_begin_use(const PeerSlot& slot, int tiles, const Place& place) {{ {begin_use} }}
void peer_end_use(const PeerSlot& slot, bool release, const Place& place) {{ {end_use} }}
void peer_add_put(const PeerSlot& slot, const PeerAddPut& call, DType, const Place& place) {{ {add_put} }}
void peer_wait_norm(const PeerSlot& slot, const NormForward& call, DType, const Place& place) {{ {wait_norm} }}
void peer_matmul_add_put(const PeerSlot&, const PeerMatmul&, DType, const Place&) {{}}
void peer_wait_matmul(const PeerSlot&, const PeerMatmul&, DType, const Place&) {{}}
}}
"""
LAUNCHES = {
    "take_credit": 'run({ns}::peer_take_credit, "peer_take_credit", 1, warp_threads, 0, {ns}::PeerUse{{slot}})',
    "begin_use": 'run({ns}::peer_begin_use, "peer_begin_use", 1, warp_threads, 0, {ns}::PeerUse{{slot, tiles}})',
    "end_use": 'run({ns}::peer_end_use, "peer_end_use", 1, warp_threads, 0, {ns}::PeerUse{{slot, 0, release}})',
    "add_put": 'run({ns}::add_put<bf16>, "add_put", {ns}::AddPutTask{{slot, call}}.tiles() * '
    "{ns}::AddPutTask{{slot, call}}.blocks_of_tile<bf16>(), {ns}::add_put_threads, 16, {ns}::AddPutTask{{slot, call}})",
    "wait_norm": 'run({ns}::wait_norm<bf16>, "wait_norm", call.rows, norm_threads(call.dim, '
    "RowChunk<bf16>::width), 272, {ns}::WaitNormTask{{slot, call}})",
}


def _source() -> str:
    """Every mutant of the two headers, and launches of the chosen one."""
    text = "".join((ROOT / "csrc" / "cuda" / name).read_text() for name in ("peer_protocol.cuh", "peer_rows.cuh"))
    text = re.sub(r"^(#include|#pragma).*\n", "", text, flags=re.MULTILINE)
    mutants = []
    for number, mutant in enumerate(MUTANTS):
        assert number == 0 or text.count(mutant.before) == 1, (
            f"{mutant}: edits {text.count(mutant.before)} places, not one"
        )
        mutated = text.replace(mutant.before, mutant.after) if number else text
        mutants.append(re.sub(r"namespace tpk\b", f"namespace tpk::mutant_{number}", mutated))
    launches = {
        name: " else ".join(
            f"if (chosen == {number}) emulator::EmulatorLauncher{{place}}.{body.format(ns=f'mutant_{number}')};"
            for number in range(len(MUTANTS))
        )
        for name, body in LAUNCHES.items()
    }
    return SHELL.format(mutants="\n".join(mutants), **launches)


@pytest.fixture(scope="module")
def mutants(emulator_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The emulator with all mutants: the real build's own commands, for one other source."""
    folder, built = tmp_path_factory.mktemp("mutants"), emulator_file.parent
    source, module = folder / "mutants.cpp", folder / emulator_file.name
    source.write_text(_source())
    listed = subprocess.run(
        ["ninja", "-C", str(built), "-t", "commands", "tpk_emulator"], capture_output=True, text=True
    )
    assert listed.returncode == 0, listed.stderr
    lines = listed.stdout.splitlines()
    compile_ = next(line for line in lines if line.endswith("csrc/emulator/peer.cpp"))
    link = next(line for line in lines if f"-o {emulator_file.name}" in line)
    replaced = re.search(r"-o (\S+peer\.cpp\.o)", compile_)
    assert replaced is not None
    compiled = re.sub(r"-MD.*", f"-I{ROOT}/csrc -o {folder}/mutants.o -c {source}", compile_)
    linked = link.replace(f"-o {emulator_file.name}", f"-o {module}").replace(replaced[1], f"{folder}/mutants.o")
    for command in (compiled, linked):
        done = subprocess.run(command, shell=True, cwd=built, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
    return module


def _run(mutants: Path, opened: tuple[Any, Any], number: int, seed: int) -> str:
    """What the protocol's tests would say: findings, a standstill, or numbers that are not those of plain ops."""
    emulator = opened[0].emulator
    ctypes.CDLL(str(mutants)).choose_mutant(number)
    torch.manual_seed(seed)
    emulator.clear()
    emulator.module.configure(1, seed % 2 == 1, seed)
    emulator.module.set_patience(0.02)
    ends = Ends(opened, ROWS, COLUMNS, BF16, budget=2 * 10**8)
    gain, results = randn(COLUMNS, dtype=BF16), []
    with emulator.at_once():
        for _ in range(USES):
            x, residual = randn(ROWS, COLUMNS, dtype=BF16), randn(ROWS, COLUMNS, dtype=BF16)
            ends.send(call("take_credit"), call("add_put", x, residual))
            ends.receive(call("begin_use", 1))
            norm, out = norm_of(ends.receiver, ends.at_receiver, gain, None, rows=ROWS)
            ends.receiver.run([norm], torch.device("cpu"))
            ends.receive(call("end_use", release=True))
            results.append((x + residual, out[0]))
    report = emulator.report()
    if report.findings:
        return ", ".join(report.kinds)
    for end in (ends.at_sender, ends.at_receiver):
        if end.words.any():
            return f"a report: {end.words.tolist()}"
    words = (ends.credit[0], ends.claim[0], *ends.flags[:3], ends.at_sender.uses[0], ends.at_receiver.uses[0])
    if any(int(word) != NEAR_WRAP + USES for word in words) or ends.at_sender.arrived.any():
        return f"words: {[int(word) for word in words]}"
    for total, out in results:
        exact = torch.nn.functional.rms_norm(total.float(), (COLUMNS,), gain.float(), 1e-5)
        if not (out.float() - exact).abs().max() < 0.05 * exact.abs().max():
            return "numbers"
    return ""


def _lost_post(opened: tuple[Any, Any], tile: int) -> str:
    """Whether a post that never came is reported."""
    opened[0].emulator.clear()
    ends = Ends(opened, ROWS, COLUMNS, BF16, budget=10**6)
    try:
        ends.send(call("take_credit"), call("add_put", randn(ROWS, COLUMNS, dtype=BF16), None))
        ends.flags[tile] = NEAR_WRAP
        ends.receive(call("begin_use", 1))
        if tile > 0:
            norm, _ = norm_of(ends.receiver, ends.at_receiver, randn(COLUMNS, dtype=BF16), None, rows=ROWS)
            ends.receiver.run([norm], torch.device("cpu"))
    except AssertionError:
        return "findings"
    said = ends.at_receiver.words[1:].tolist()
    return "" if (said[0], said[3]) == (hand_off.RECEIVER, tile) else f"no report of tile {tile}: {said}"


def test_the_sound_kernels_pass(mutants: Path, open_peer_ends: Any) -> None:
    opened = open_peer_ends(mutants)
    assert [_run(mutants, opened, 0, seed) for seed in range(3)] == [""] * 3
    assert [_lost_post(opened, tile) for tile in (0, 2)] == [""] * 2


@pytest.mark.parametrize("mutant", MUTANTS[1:], ids=str)
def test_a_mutant_is_noticed(mutant: Mutant, mutants: Path, open_peer_ends: Any) -> None:
    opened = open_peer_ends(mutants)
    seen = [_run(mutants, opened, MUTANTS.index(mutant), seed) for seed in range(6)]
    seen += [_lost_post(opened, tile) for tile in (0, 2)]
    assert any(seen), f"{mutant} went unnoticed"
