"""Data: a batch follows from (seed, step); documents never leak into each other; bad input is named before any work."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe.engine.batch import NO_TARGET, Batch
from terapipe.train.config import DataSettings
from terapipe.train.data import END_OF_DOCUMENT, Synthetic, TokenStream, Windows, open_source, pack, text, token_file
from terapipe.train.text_files import find_files, split_files, stdlib_text


def same(a: Batch, b: Batch) -> bool:
    starts = (a.document_starts is None) == (b.document_starts is None)
    if a.document_starts is not None and b.document_starts is not None:
        starts = torch.equal(a.document_starts, b.document_starts)
    return starts and torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty files of 50 to 240 bytes, one empty file, one of another kind, in two folders."""
    for index in range(20):
        path = tmp_path / "texts" / ("deep" if index % 3 else "") / f"{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([97 + index]) * (50 + 10 * index))
    (tmp_path / "texts" / "empty.txt").touch()
    (tmp_path / "texts" / "image.png").write_bytes(b"\x00" * 100)
    return tmp_path / "texts"


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=14), min_size=1, max_size=3), st.sampled_from([0, None])
)
def test_packing_marks_each_token_with_its_documents_start(rows: list[list[int]], end: int | None) -> None:
    width = min(len(row) for row in rows)
    windows = np.array([row[:width] for row in rows], dtype=np.int64)
    batch = pack(windows, end)
    for row, ids in enumerate(windows.tolist()):
        start = 0
        for position in range(width - 1):
            if position and end is not None and ids[position - 1] == end:
                start = position
            known = 0 if batch.document_starts is None else int(batch.document_starts[row, position])
            assert known == start
            last = end is not None and ids[position] == end
            assert int(batch.tokens[row, position]) == ids[position]
            assert int(batch.targets[row, position]) == (NO_TARGET if last else ids[position + 1])


def test_a_batch_depends_on_seed_and_step_alone(folder: Path) -> None:
    sources = [
        lambda seed: text(folder, tokens=17, sequences=3, seed=seed),
        lambda seed: Synthetic(tokens=17, sequences=3, vocab=50, document_tokens=6, seed=seed),
    ]
    for make in sources:
        forwards, resumed = make(4), make(4)
        expected = [forwards.train(step) for step in range(60)]
        for step in (59, 0, 31):
            assert same(resumed.train(step), expected[step])
        assert same(resumed.validation(1), forwards.validation(1))
        assert not same(make(5).train(0), expected[0])
        assert not same(expected[0], expected[1])


def test_what_is_neither_file_nor_folder_is_said_to_be_so() -> None:
    with pytest.raises(ValueError, match=f"{os.devnull} is neither a file nor a folder"):
        find_files(os.devnull)


def test_sequences_without_a_target_are_passed_over(tmp_path: Path) -> None:
    ids = np.concatenate([np.full(200, 5), np.arange(40) % 5, np.full(200, 5)]).astype("<u2")
    ids.tofile(tmp_path / "mostly_ends.bin")
    file = tmp_path / "mostly_ends.bin"
    data = token_file(file, validation=file, tokens=7, vocab=6, sequences=2, document_end=5, seed=1)
    batches = [data.train(step) for step in range(3 * data.epoch_windows)]
    assert all((batch.targets != NO_TARGET).any(dim=1).all() for batch in batches)
    assert {int(token) for batch in batches for token in batch.tokens.unique()} == {0, 1, 2, 3, 4, 5}
    assert same(data.train(2), batches[2])
    np.full(200, 5, dtype="<u2").tofile(tmp_path / "ends.bin")
    ends = tmp_path / "ends.bin"
    for train, validation in ((ends, None), (file, ends), (file, None)):  # the last 5 % of `file` are ends too
        with pytest.raises(ValueError, match=r"ends.bin.* holds nothing but token 5, which ends a document"):
            token_file(train, validation=validation, tokens=7, vocab=6, document_end=5)


def test_an_epoch_visits_every_window_once_and_each_epoch_has_its_own_phase() -> None:
    stream = TokenStream(np.arange(1000, dtype=np.uint32), "test")
    data = Windows(training=stream, held_out=None, tokens=30, sequences=2, vocab=1000)
    firsts = [int(start) for step in range(32) for start in data.train(step).tokens[:, 0]]
    epochs = [firsts[i : i + data.epoch_windows] for i in range(0, 64, data.epoch_windows)]
    assert data.epoch_windows == 32
    for epoch in epochs:
        assert sorted(epoch) == list(range(min(epoch), min(epoch) + 32 * 30, 30))
    assert min(epochs[0]) != min(epochs[1]) and epochs[0] != epochs[1]


def test_validation_covers_the_held_out_tokens_once_and_fills_up_without_targets() -> None:
    stream = TokenStream(np.arange(101, dtype=np.uint16), "test")
    data = Windows(training=stream, held_out=stream, tokens=20, sequences=3, vocab=200)
    batches = [data.validation(index) for index in range(data.validation_batches)]
    assert [int((batch.targets != NO_TARGET).sum()) for batch in batches] == [60, 40]
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    assert targets[targets != NO_TARGET].tolist() == list(range(1, 101))
    with pytest.raises(ValueError, match="validation batch 2 asked for, but there are 2"):
        data.validation(2)


def test_text_is_bytes_and_an_end_for_every_file(folder: Path) -> None:
    data = text(folder, tokens=100, validation_share=0.3)
    every = np.concatenate([data.training.ids, data.held_out.ids]) if data.held_out else data.training.ids
    assert (every == END_OF_DOCUMENT).sum() == 20
    assert (every == 97).sum() == 50
    assert (every < 97).sum() == 0, "the folder's other files were read"
    # The files are runs of one letter, so a token may see exactly the tokens that equal it.
    borders = 0
    for step in range(data.epoch_windows):
        batch = data.train(step)
        starts = torch.zeros(1, 100) if batch.document_starts is None else batch.document_starts
        borders += len(starts.unique()) - 1
        for position, start in enumerate(starts[0].tolist()):
            assert len(set(batch.tokens[0, int(start) : position + 1].tolist()) - {END_OF_DOCUMENT}) <= 1
    assert borders > 8
    assert text(folder, tokens=250, packed=False).train(0).document_starts is None


def test_the_split_is_by_file_and_does_not_depend_on_where_the_folder_lies(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "deeper"
    moved.parent.mkdir()
    first = split_files(find_files(folder).files, 0.3)
    folder.rename(moved)
    second = split_files(find_files(moved).files, 0.3)
    assert [file.relative_to(moved) for file in second.validation] == [
        file.relative_to(folder) for file in first.validation
    ]
    assert set(first.training).isdisjoint(first.validation)
    assert len(first.training) + len(first.validation) == 20
    assert len(split_files(find_files(moved).files, 1e-9).validation) == 1
    assert len(split_files(find_files(moved).files, 0.999999).training) >= 1


def test_of_a_single_file_the_end_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(1, 201)) * 5)
    data = text(path, tokens=40, validation_share=0.1)
    assert data.held_out is not None
    assert len(data.held_out.ids) == 100
    assert data.training.ids[-1] == END_OF_DOCUMENT and data.held_out.ids[-1] == END_OF_DOCUMENT


def test_globs_and_explicit_validation(folder: Path) -> None:
    data = text([folder / "*.txt"], validation=folder / "deep", tokens=20)
    assert (data.training.ids == END_OF_DOCUMENT).sum() == 7
    assert data.held_out is not None and (data.held_out.ids == END_OF_DOCUMENT).sum() == 13


def test_the_standard_library_is_text_without_its_tests() -> None:
    files = find_files(stdlib_text(), suffixes=(".py",)).files
    names = {file.relative_to(stdlib_text()).as_posix() for file in files}
    assert {"ast.py", "json/decoder.py"} <= names
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    assert sum(file.stat().st_size for file in files) > 3_000_000


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_token_file_is_mapped_and_split(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "tokens.bin"
    ids = np.random.default_rng(0).integers(0, 300, 2000).astype(dtype)
    ids.tofile(path)
    data = token_file(path, tokens=64, vocab=300, token_dtype=dtype, document_end=7)  # type: ignore[arg-type]
    assert isinstance(data.training.ids, np.memmap)
    assert data.held_out is not None
    assert np.array_equal(np.concatenate([data.training.ids, data.held_out.ids]), ids)
    batch = data.train(3)
    ends = batch.tokens == 7
    assert torch.equal(batch.targets[ends], torch.full_like(batch.targets[ends], NO_TARGET))


def test_the_shortest_token_file_holds_one_sequence_of_each_kind(tmp_path: Path) -> None:
    path = tmp_path / "short.bin"
    np.arange(22, dtype=np.uint16).tofile(path)
    data = token_file(path, tokens=10, vocab=22)
    assert data.held_out is not None and len(data.training.ids) == len(data.held_out.ids) == 11
    assert data.train(0).tokens.tolist() == [list(range(10))]  # one sequence a batch, if nothing else is said
    assert data.validation(0).targets.tolist() == [list(range(12, 22))]
    with pytest.raises(ValueError, match=r"holds 22 tokens.*of 11 need 24"):
        token_file(path, tokens=11, vocab=22)
    with pytest.raises(ValueError, match="token id 20 at position 20 of"):
        token_file(path, validation=path, tokens=10, vocab=20)  # the lowest that it lacks, not the highest


def test_synthetic_tokens_can_be_learned_and_only_so_far() -> None:
    data = Synthetic(tokens=4000, vocab=40)
    successors: dict[int, set[int]] = {}
    batch = data.train(0)
    for token, target in zip(batch.tokens[0].tolist(), batch.targets[0].tolist(), strict=True):
        successors.setdefault(token, set()).add(target)
    assert max(len(found) for found in successors.values()) <= 4
    held_out = data.validation(0)
    assert all(
        target in successors[token]
        for token, target in zip(held_out.tokens[0].tolist(), held_out.targets[0].tolist(), strict=True)
        if token in successors
    ), "validation follows another table"
    assert sum(math.log(len(found)) for found in successors.values()) / len(successors) > 1.0


def write(path: Path, values: list[int], dtype: str = "uint16") -> Path:
    np.array(values, dtype=dtype).tofile(path)
    return path


def test_bad_input_is_named(tmp_path: Path, folder: Path) -> None:
    tokens = write(tmp_path / "a.bin", [*range(50), 999, *range(50)])
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"123")
    (tmp_path / "hollow").mkdir()
    cases = [
        (lambda: text(tmp_path / "nowhere", tokens=4), ["nowhere does not exist", "folder or glob"]),
        (lambda: text(tmp_path / "hollow", tokens=4), ["hollow holds no file that ends in .txt"]),
        (lambda: text(folder / "empty.txt", tokens=4), ["empty.txt holds no bytes"]),
        (lambda: text([], tokens=4), ["no text was named"]),
        (lambda: text(folder, tokens=100_000), ["100000", "100001", "shorter sequences"]),
        (lambda: text(folder, tokens=4, vocab=256), ["257", "256"]),
        (lambda: token_file(tmp_path / "gone.bin", tokens=4, vocab=9), ["gone.bin does not exist"]),
        (lambda: token_file(odd, tokens=4, vocab=9), ["3 bytes", "uint16"]),
        (
            lambda: token_file(tokens, tokens=10, vocab=100),
            ["token id 999 at position 50", "a.bin", "vocabulary of 100"],
        ),
        (lambda: token_file(tokens, tokens=80, vocab=1000), ["101 tokens", "162"]),
        (lambda: token_file(tokens, tokens=10, vocab=1000, document_end=1000), ["document_end 1000"]),
        (lambda: Synthetic(tokens=4, vocab=1), ["vocab 1"]),
    ]
    for call, words in cases:
        with pytest.raises(ValueError, match="data") as caught:
            call()
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_config_opens_its_source(folder: Path, tmp_path: Path) -> None:
    shape = {"vocab": 300, "tokens": 16, "sequences": 2, "seed": 1}
    path = write(tmp_path / "a.bin", list(range(200)))
    for data_settings in (
        DataSettings(),
        DataSettings(source="text", train=(folder,)),
        DataSettings(source="bin", train=(path,)),
        DataSettings(source="bin", train=(path,), validation=(path,)),
    ):
        source = open_source(data_settings, **shape)
        assert source.train(0).tokens.shape == (2, 16)
        assert source.validation_batches > 0 and source.validation(0).tokens.shape == (2, 16)
    with pytest.raises(ValueError, match=r"data.train names 2 files"):
        open_source(DataSettings(source="bin", train=(path, path)), **shape)


def test_what_is_not_text_is_refused_by_name_or_left_out_of_a_folder(folder: Path) -> None:
    random = np.random.default_rng(0)
    for name in ("b.txt", "deep/a.txt"):
        (folder / name).write_bytes(random.bytes(9000))
    (folder / "utf16.md").write_text("words " * 30, encoding="utf-16")
    found = find_files(folder)
    assert [file.relative_to(folder).as_posix() for file in found.left_out] == ["b.txt", "deep/a.txt", "utf16.md"]
    assert len(found.files) == 20 and not set(found.files) & set(found.left_out)
    source = text(folder, tokens=8)
    assert source.left_out == tuple(found.left_out)
    used = np.concatenate([source.training.ids, source.held_out.ids if source.held_out else []])
    assert set(used.tolist()) <= {*range(97, 117), END_OF_DOCUMENT}
    for path, words in (
        (folder / "b.txt", r"b.txt is not text \(a zero byte among the first 8000\).*--data.source bin"),
        (folder / "utf16.md", r"utf16.md is not text.*as UTF-8"),
        (folder / "*.md", r"\*.md holds only 1 file \(utf16.md\), not text"),
    ):
        with pytest.raises(ValueError, match=words):
            text([folder, path], tokens=8)
    assert text(folder, tokens=8, validation=folder / "deep").left_out == tuple(found.left_out)


def test_bytes_of_other_encodings_are_text(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Grüße, naïve café ".encode("latin-1") * 40)
    (tmp_path / "late.txt").write_bytes(b"a" * 8000 + b"\0")
    assert len(find_files(tmp_path).files) == 2
