"""Training data: step number -> Batch, and validation index -> Batch, the same on every rank. Three sources.

text       files or folders, one token a byte (0 to 255) and one token, 256, that ends each file
token_file a memory-mapped file of uint16 or uint32 token ids ("bin")
synthetic  endless random walks over a fixed table; a model learns them within a few hundred steps

A batch follows from (seed, step) alone, so the step number is the whole state and a resumed run continues exactly.
Every epoch cuts the tokens at another phase into windows and visits each window once, in another order; one without a
target, in a long row of ends of documents, is passed over for the next.

The trap: documents. The token that ends one gets no target (the next token belongs to another document), and
`document_starts` tells the mask that nothing before it may be seen. Both are made here, in `pack`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from terapipe.engine.batch import NO_TARGET, Batch
from terapipe.models.presets import BYTE_VOCAB
from terapipe.train.text_files import TEXT_SUFFIXES, common_folder, find_files, split_files

if TYPE_CHECKING:
    from terapipe.train.config import DataSettings

END_OF_DOCUMENT = BYTE_VOCAB - 1  # of byte-level text
SCAN_LIMIT_TOKENS = 1 << 28  # larger token files are checked batch by batch only: a scan would take minutes

Tokens = npt.NDArray[np.integer]


class Source(Protocol):
    """What the trainer reads. `validation_batches` may be 0 (nothing is held out)."""

    @property
    def validation_batches(self) -> int: ...

    def train(self, step: int) -> Batch: ...

    def validation(self, index: int) -> Batch: ...


@dataclass(frozen=True)
class TokenStream:
    """A long row of token ids: `ids` [n] in memory or memory-mapped, `origin` for messages."""

    ids: Tokens
    origin: str

    def windows(self, tokens: int) -> int:
        """How many windows of tokens + 1 ids (inputs and their successors) fit side by side."""
        return max(0, (len(self.ids) - 1) // tokens)

    def window(self, start: int, tokens: int, vocab: int) -> Tokens:
        """Ids [start, start + tokens + 1) as int64; ValueError for one outside the vocabulary."""
        window = self.ids[start : start + tokens + 1].astype(np.int64)
        _check_ids(window, vocab, origin=self.origin, offset=start)
        return window


@dataclass(kw_only=True)
class Windows:
    """Batches of `sequences` windows of `tokens` tokens cut from a training and a validation stream.

    end_of_document: id that ends a document, or None: then a sequence is one document. left_out: files that a folder
    holds and that are not text.
    ValueError if a stream holds less than one sequence and its last target, an id outside the vocabulary, or nothing
    but ends of documents.
    """

    training: TokenStream
    held_out: TokenStream | None
    tokens: int
    sequences: int
    vocab: int
    end_of_document: int | None = None
    seed: int = 0
    left_out: tuple[Path, ...] = ()
    _order: tuple[int, npt.NDArray[np.int64]] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.sequences < 1:
            raise ValueError(f"data: {self.sequences} sequences of {self.tokens} tokens; both must be at least 1.")
        for stream in (self.training, self.held_out):
            if stream is not None and stream.windows(self.tokens) == 0:
                raise ValueError(
                    f"data: {stream.origin} holds {len(stream.ids)} tokens, but a sequence of {self.tokens} needs "
                    f"{self.tokens + 1} (its last target included); give more data or shorter sequences."
                )
            if stream is not None and len(stream.ids) <= SCAN_LIMIT_TOKENS:
                _check_ids(stream.ids, self.vocab, origin=stream.origin)
                if not self._has_target(stream.ids):
                    raise ValueError(
                        f"data: {stream.origin} holds nothing but token {self.end_of_document}, which ends a document, "
                        "so there is nothing to learn; give other (or validation) data, or check document_end."
                    )

    @property
    def epoch_windows(self) -> int:
        """Windows in one epoch: one less than fit, if possible, so that each epoch can start at a phase of its own."""
        return max(1, self.training.windows(self.tokens) - 1)

    @property
    def validation_batches(self) -> int:
        """Batches that cover the held-out stream once."""
        return 0 if self.held_out is None else -(-self.held_out.windows(self.tokens) // self.sequences)

    def train(self, step: int) -> Batch:
        """Batch of the 0-based training step."""
        first = step * self.sequences
        windows = [self._window(sample) for sample in range(first, first + self.sequences)]
        return pack(np.stack(windows), self.end_of_document)

    def validation(self, index: int) -> Batch:
        """Held-out batch; the last one is filled up with sequences that have no target, so that means stay exact."""
        if self.held_out is None or not 0 <= index < self.validation_batches:
            raise ValueError(f"data: validation batch {index} asked for, but there are {self.validation_batches}.")
        available = self.held_out.windows(self.tokens)
        first = index * self.sequences
        numbers = range(first, first + self.sequences)
        windows = [
            self.held_out.window(number % available * self.tokens, self.tokens, self.vocab) for number in numbers
        ]
        batch = pack(np.stack(windows), self.end_of_document)
        batch.targets[max(0, available - first) :] = NO_TARGET
        return batch

    def _window(self, sample: int) -> Tokens:
        for number in range(sample, sample + 2 * self.epoch_windows):  # two epochs: at two phases
            window = self.training.window(self._start(number), self.tokens, self.vocab)
            if self._has_target(window):
                return window
        raise ValueError(
            f"data: no sequence of {self.tokens} tokens from {self.training.origin} has a target: all are made of "
            f"token {self.end_of_document}, which ends a document; give other data, or check document_end."
        )

    def _has_target(self, ids: Tokens) -> bool:
        return not ids[:-1].min() == ids[:-1].max() == self.end_of_document

    def _start(self, sample: int) -> int:
        epoch, position = divmod(sample, self.epoch_windows)
        if self._order is None or self._order[0] != epoch:
            random = np.random.default_rng([self.seed, epoch])
            slack = len(self.training.ids) - 1 - self.epoch_windows * self.tokens
            phase = int(random.integers(0, slack + 1))
            self._order = (epoch, phase + random.permutation(self.epoch_windows) * self.tokens)
        return int(self._order[1][position])


def pack(windows: Tokens, end_of_document: int | None) -> Batch:
    """windows int64 [sequences, tokens + 1] -> Batch of `tokens` tokens with the borders of documents marked."""
    tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
    ends = tokens == end_of_document if end_of_document is not None else None
    if ends is None or not ends[:, :-1].any():
        if ends is not None:
            targets[ends] = NO_TARGET
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets))
    targets[ends] = NO_TARGET
    starts = np.zeros(tokens.shape, dtype=np.int32)
    starts[:, 1:] = ends[:, :-1] * np.arange(1, tokens.shape[1], dtype=np.int32)
    np.maximum.accumulate(starts, axis=1, out=starts)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(starts))


def text(
    train: Sequence[str | Path] | str | Path,
    *,
    tokens: int,
    sequences: int = 1,
    validation: Sequence[str | Path] | str | Path = (),
    validation_share: float = 0.05,
    suffixes: Sequence[str] = TEXT_SUFFIXES,
    packed: bool = True,
    vocab: int = BYTE_VOCAB,
    seed: int = 0,
) -> Windows:
    """Bytes of files, of folders (searched for `suffixes`) or of globs; each file is a document.

    Files that are not text are refused where they were named, else left out. Without `validation`, files are held out
    by a hash of their name, the same ones on every machine; of a single file the last `validation_share` is held out.
    packed=False: tokens see whatever shares their sequence.
    """
    if vocab < BYTE_VOCAB:
        raise ValueError(
            f"data: byte-level text has {BYTE_VOCAB} token ids (every byte and the end of a document), but the model's "
            f"vocabulary has {vocab}; set vocab to {BYTE_VOCAB} or more."
        )
    found = find_files(train, suffixes)
    files, left_out = found.files, found.left_out
    if validation:
        other = find_files(validation, suffixes)
        left_out = sorted({*left_out, *other.left_out})
        training, held_out = _read(files), _read(other.files, use="validation text: ")
    elif len(files) == 1:
        whole = _read(files)
        cut = len(whole.ids) - max(round(len(whole.ids) * validation_share), min(tokens + 1, len(whole.ids) // 2))
        training = TokenStream(np.append(whole.ids[:cut], np.uint16(END_OF_DOCUMENT)), f"the start of {files[0]}")
        held_out = TokenStream(whole.ids[cut:], f"the held-out end of {files[0]}")
    else:
        split = split_files(files, validation_share)
        training, held_out = _read(split.training), _read(split.validation, use="validation text: ")
    return Windows(
        training=training,
        held_out=held_out,
        tokens=tokens,
        sequences=sequences,
        vocab=vocab,
        end_of_document=END_OF_DOCUMENT if packed else None,
        seed=seed,
        left_out=tuple(left_out),
    )


def token_file(
    train: str | Path,
    *,
    tokens: int,
    vocab: int,
    sequences: int = 1,
    validation: str | Path | None = None,
    validation_share: float = 0.05,
    token_dtype: Literal["uint16", "uint32"] = "uint16",
    document_end: int | None = None,
    seed: int = 0,
) -> Windows:
    """Raw little-endian token ids without a header, memory-mapped. Without `validation` the last share is held out."""
    if document_end is not None and not 0 <= document_end < vocab:
        raise ValueError(f"data: document_end {document_end} is outside the vocabulary of {vocab}.")
    training = _map(Path(train), token_dtype)
    if validation is not None:
        held_out = _map(Path(validation), token_dtype)
    else:
        cut = len(training.ids) - max(round(len(training.ids) * validation_share), tokens + 1)
        if cut < tokens + 1:
            raise ValueError(
                f"data: {train} holds {len(training.ids)} tokens; a training and a held-out sequence of {tokens} need "
                f"{2 * tokens + 2}. Give more data, a validation file or shorter sequences."
            )
        held_out = TokenStream(training.ids[cut:], f"{train} (from token {cut})")
        training = TokenStream(training.ids[:cut], str(train))
    return Windows(
        training=training,
        held_out=held_out,
        tokens=tokens,
        sequences=sequences,
        vocab=vocab,
        end_of_document=document_end,
        seed=seed,
    )


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Endless walks: from each id to one of the four successors that a fixed table gives it, all equally likely.

    A perfect model reaches log(4) = 1.386 nats a token, or a little less. document_tokens: mean document length; 0: one
    sequence is one document.
    """

    tokens: int
    vocab: int
    sequences: int = 1
    document_tokens: int = 0
    seed: int = 0
    validation_batches: int = 16

    def __post_init__(self) -> None:
        if self.vocab < 2 or self.tokens < 1 or self.sequences < 1:
            raise ValueError(
                f"data: synthetic needs a vocabulary of 2 or more and at least one sequence of one token, got vocab "
                f"{self.vocab}, {self.sequences} sequences of {self.tokens} tokens."
            )

    def train(self, step: int) -> Batch:
        return self._batch(0, step)

    def validation(self, index: int) -> Batch:
        return self._batch(1, index)

    def _batch(self, purpose: int, index: int) -> Batch:
        # Each column is a permutation, so in the long run every id is equally frequent.
        table = np.random.default_rng(self.seed).permuted(np.tile(np.arange(self.vocab), (4, 1)), axis=1).T
        random = np.random.default_rng([self.seed, purpose, index])
        choices = random.integers(0, 4, size=(self.tokens, self.sequences))
        walk = np.empty((self.tokens + 1, self.sequences), dtype=np.int64)
        walk[0] = random.integers(0, self.vocab, size=self.sequences)
        for position in range(self.tokens):
            walk[position + 1] = table[walk[position], choices[position]]
        batch = pack(np.ascontiguousarray(walk.T), None)
        if not self.document_tokens:
            return batch
        borders = random.random((self.sequences, self.tokens)) < 1.0 / self.document_tokens
        borders[:, 0] = False
        starts = np.maximum.accumulate(borders * np.arange(self.tokens, dtype=np.int32), axis=1).astype(np.int32)
        targets = batch.targets.numpy()
        targets[:, :-1][borders[:, 1:]] = NO_TARGET
        return Batch(batch.tokens, batch.targets, torch.from_numpy(starts))


def open_source(settings: DataSettings, *, vocab: int, tokens: int, sequences: int, seed: int) -> Source:
    """The source that a training config names."""
    if settings.source == "synthetic":
        return Synthetic(
            tokens=tokens, vocab=vocab, sequences=sequences, document_tokens=settings.document_tokens, seed=seed
        )
    if settings.source == "text":
        return text(
            settings.train,
            tokens=tokens,
            sequences=sequences,
            validation=settings.validation,
            validation_share=settings.validation_share,
            suffixes=settings.suffixes,
            packed=settings.packed,
            vocab=vocab,
            seed=seed,
        )
    for key, paths, most in (("train", settings.train, 1), ("validation", settings.validation, 1)):
        if len(paths) > most or (key == "train" and not paths):
            raise ValueError(
                f"data.{key} names {len(paths)} files; source bin takes one. Concatenate token files with cat."
            )
    return token_file(
        settings.train[0],
        tokens=tokens,
        vocab=vocab,
        sequences=sequences,
        validation=settings.validation[0] if settings.validation else None,
        validation_share=settings.validation_share,
        token_dtype=settings.token_dtype,
        document_end=settings.document_end,
        seed=seed,
    )


def _read(files: Sequence[Path], use: str = "") -> TokenStream:
    separator = np.array([END_OF_DOCUMENT], dtype=np.uint16)
    parts = [part for file in files for part in (np.fromfile(file, dtype=np.uint8).astype(np.uint16), separator)]
    origin = str(files[0]) if len(files) == 1 else f"{len(files)} files below {common_folder(files)}"
    return TokenStream(np.concatenate(parts), use + origin)


def _map(path: Path, token_dtype: str) -> TokenStream:
    if not path.is_file():
        raise ValueError(f"data: token file {path} does not exist (working directory {Path.cwd()}); check the path.")
    size, width = path.stat().st_size, np.dtype(token_dtype).itemsize
    if size == 0 or size % width:
        raise ValueError(
            f"data: {path} has {size} bytes, not a positive multiple of {width} ({token_dtype}); check token_dtype."
        )
    return TokenStream(np.memmap(path, dtype=np.dtype(token_dtype).newbyteorder("<"), mode="r"), str(path))


def _check_ids(ids: Tokens, vocab: int, *, origin: str, offset: int = 0) -> None:
    if np.issubdtype(ids.dtype, np.unsignedinteger) and np.iinfo(ids.dtype).max < vocab:
        return
    if len(ids) and int(ids.max()) >= vocab:
        position = int(np.argmax(ids >= vocab))
        raise ValueError(
            f"data: token id {int(ids[position])} at position {offset + position} of {origin} is outside the "
            f"vocabulary of {vocab}; use the tokeniser the model was made for, raise vocab, or check token_dtype."
        )
