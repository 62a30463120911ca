"""PrefixCache: K and V of all tokens of one micro in one attention layer, and where forward and backward stand.

k [batch, capacity, kv_heads, head_dim], v [batch, capacity, kv_heads, value_head_dim] in the model dtype, allocated
uninitialised: rows at and after `length` may hold NaN and are never read. In memory they lie head by head, since
attention streams the rows of one head: 15 % faster on a CPU behind a long prefix than token by token (docs/LOG.md).
GradientAccumulator: the fp32 (fp64 for fp64) dk, dv of one attention layer, into which the backward of each slice adds.
Several caches of one layer may share it, because backwards of different micros never interleave.

The one trap: a slice's k and v get their gradient when that slice's OWN backward runs. Run the backward of every slice,
last to first, even of one whose output reaches no loss (with a zero gradient).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_identities = itertools.count(1)

# Slots of PrefixCache.position, written by forwards, and of PrefixCache.progress, written by backwards: two tensors,
# because torch.compile cannot trace an input that both the forward and the backward graph mutate.
LENGTH, GENERATION, IDENTITY, SLICE_STARTS = range(4)
BACKWARD_END, BACKWARD_GENERATION = range(2)
# Slots of GradientAccumulator.state.
OWNER, PRELOADED = range(2)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of lse, accumulators and sinks for a model dtype: fp32, and fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class BackwardView(NamedTuple):
    """What backwards read of a cache: the same memory through other tensors (see `_other_handle`)."""

    k: Tensor
    v: Tensor
    position: Tensor


def _other_handle(tensor: Tensor) -> Tensor:
    """The same memory behind a storage of its own.

    torch.compile gives a backward graph the value that a tensor had when its forward graph ended, as a copy if later
    forwards write to it. A backward needs the length of today and no copy of K and V, so it reads through this handle,
    which the compiler takes for an input that no forward writes.
    """
    if torch.compiler.is_compiling() or type(tensor) is not Tensor or tensor.is_meta:
        return tensor  # no memory to share (a cache made in traced code, a fake or a meta tensor)
    return torch.from_dlpack(tensor)


def backward_end(position: Tensor, progress: Tensor) -> int:
    """End of the next slice whose backward may run, from the cache's two position tensors."""
    started = int(progress[BACKWARD_GENERATION]) == int(position[GENERATION])
    return int(progress[BACKWARD_END] if started else position[LENGTH])


def _head_by_head(batch: int, capacity: int, heads: int, dim: int, **factory: Any) -> Tensor:
    """Uninitialised [batch, capacity, heads, dim] whose rows of one head lie together."""
    return torch.empty(batch, heads, capacity, dim, **factory).transpose(1, 2)


def _check_sizes(name: str, **sizes: int) -> None:
    for what, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name}: {what} is {size}; it must be 0 or more")


class GradientAccumulator:
    """dk [batch, capacity, kv_heads, head_dim], dv [batch, capacity, kv_heads, value_head_dim]: fp32 sums over slices.

    Uninitialised: the first backward of a micro (its last slice) zeroes the rows it needs, unless `preload` was called.
    state: int64 CPU tensor [identity of the cache whose backward is under way (0: none), preloaded rows].
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        value_head_dim: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        _check_sizes(
            "GradientAccumulator",
            batch=batch,
            capacity=capacity,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
        )
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"GradientAccumulator: dtype is {dtype}; sums over slices need torch.float32 or torch.float64"
            )
        # Never inference tensors: those could not be written by a later backward outside inference mode.
        with torch.inference_mode(False):
            self.dk = _head_by_head(batch, capacity, kv_heads, head_dim, dtype=dtype, device=device)
            self.dv = _head_by_head(batch, capacity, kv_heads, value_head_dim, dtype=dtype, device=device)
            self.state = torch.zeros(2, dtype=torch.int64, device="cpu")

    def preload(self, dk: Tensor, dv: Tensor) -> None:
        """Start the next backward from these values in rows [0, n), not from zero; [batch, n, kv_heads, dim]."""
        rows = dk.shape[1] if dk.dim() == 4 else -1
        for name, given, own in (("dk", dk, self.dk), ("dv", dv, self.dv)):
            expected = [own.shape[0], rows, *own.shape[2:]]
            if list(given.shape) != expected or rows > own.shape[1]:
                raise ValueError(
                    f"GradientAccumulator.preload: {name} is {list(given.shape)}; it needs "
                    f"[{own.shape[0]}, n, {own.shape[2]}, {own.shape[3]}] with the same n <= {own.shape[1]} for both"
                )
        if int(self.state[OWNER]):
            raise ValueError(
                f"GradientAccumulator.preload: the backward of cache {int(self.state[OWNER])} is under way; "
                "finish it or reset() that cache first"
            )
        with torch.no_grad():
            self.dk[:, :rows].copy_(dk)
            self.dv[:, :rows].copy_(dv)
            self.state[PRELOADED] = rows

    def reset(self) -> None:
        """Forget an unfinished backward and preloaded rows."""
        with torch.no_grad():
            self.state.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of dk and dv."""
        return self.dk.nbytes + self.dv.nbytes

    def __repr__(self) -> str:
        return f"GradientAccumulator(dk={list(self.dk.shape)}, dv={list(self.dv.shape)}, dtype={self.dk.dtype})"


class PrefixCache:
    """Prefix cache of one micro in one attention layer; see the top of this file.

    ValueError for sizes, dtypes or an accumulator that do not fit; NotImplementedError under torch.func's transforms.

    accumulator: where backwards add; None makes one of its own when the first backward needs it.
    position: int64 CPU tensor [length, generation, identity, slice start by slice end...]; `length` tokens are present,
    generation counts resets, so that the backward of a slice from before a reset is refused.
    progress: int64 CPU tensor [backward end, its generation]; rows at and after the end have their final gradient. From
    another generation it says that no backward has run yet. The attention op checks and moves both tensors.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        value_head_dim: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        accumulator: GradientAccumulator | None = None,
    ) -> None:
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        if not dtype.is_floating_point:
            raise ValueError(f"PrefixCache: dtype is {dtype}; it must be a floating-point dtype, that of k and v")
        _check_sizes(
            "PrefixCache",
            batch=batch,
            capacity=capacity,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
        )
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "PrefixCache: torch.func's grad and vjp and torch.vmap cannot follow writes to a cache made under "
                "them; use backward(), and the batch dimension, or prefix_attention without a cache"
            )
        with torch.inference_mode(False):
            self.k = _head_by_head(batch, capacity, kv_heads, head_dim, dtype=dtype, device=device)
            self.v = _head_by_head(batch, capacity, kv_heads, value_head_dim, dtype=dtype, device=device)
            self.position = torch.zeros(SLICE_STARTS + capacity + 1, dtype=torch.int64, device="cpu")
            self.position[IDENTITY] = next(_identities)
            self.progress = torch.full((2,), -1, dtype=torch.int64, device="cpu")
            self.backward_view = self._make_backward_view()
        self.recomputed_start: int | None = None
        self.accumulator = accumulator
        if accumulator is not None:
            self._check_accumulator(accumulator)

    @contextlib.contextmanager
    def recomputing(self, start: int) -> Iterator[None]:
        """Within it a slice given without `start=` is one that the cache holds already, from position `start` on: it is
        computed again and writes nothing. For layers that do not pass a position on."""
        outer = self.recomputed_start
        self.recomputed_start = start
        try:
            yield
        finally:
            self.recomputed_start = outer

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: the backward view is a second handle of the same memory, so it is made anew."""
        return {name: value for name, value in self.__dict__.items() if name != "backward_view"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.backward_view = self._make_backward_view()

    def __setattr__(self, name: str, value: Any) -> None:
        """A cache that is given other tensors: backwards of the slices to come read those."""
        super().__setattr__(name, value)
        if name in BackwardView._fields and "backward_view" in self.__dict__:
            self.backward_view = self._make_backward_view()

    def _make_backward_view(self) -> BackwardView:
        return BackwardView(*(_other_handle(x) for x in (self.k, self.v, self.position)))

    def _check_accumulator(self, accumulator: GradientAccumulator) -> None:
        wanted = accumulator_dtype(self.k.dtype)
        for name, own, sums in (("dk", self.k, accumulator.dk), ("dv", self.v, accumulator.dv)):
            fits = sums.shape[0] == own.shape[0] and sums.shape[1] >= own.shape[1] and sums.shape[2:] == own.shape[2:]
            if not fits or sums.dtype != wanted or sums.device != own.device:
                raise ValueError(
                    f"PrefixCache: accumulator {name} is {list(sums.shape)} {sums.dtype} on {sums.device}, but the "
                    f"cache needs {list(own.shape)} (capacity or more) {wanted} on {own.device}"
                )

    def require_accumulator(self) -> GradientAccumulator:
        """The accumulator, made now if there is none; ValueError if one was assigned that does not fit."""
        if self.accumulator is not None:
            self._check_accumulator(self.accumulator)
        else:
            batch, capacity, kv_heads, head_dim = self.k.shape
            self.accumulator = GradientAccumulator(
                batch,
                capacity,
                kv_heads,
                head_dim,
                self.v.shape[3],
                dtype=accumulator_dtype(self.k.dtype),
                device=self.k.device,
            )
        return self.accumulator

    @property
    def length(self) -> int:
        """Tokens present: where the next slice starts."""
        return int(self.position[LENGTH])

    @property
    def backward_end(self) -> int:
        """Where the next backward's slice ends: `length` before the first one, 0 when all have run."""
        return backward_end(self.position, self.progress)

    @property
    def capacity(self) -> int:
        """Tokens the cache can hold."""
        return self.k.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Model dtype of k and v."""
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        """Device of k and v (position stays on the CPU)."""
        return self.k.device

    @property
    def nbytes(self) -> int:
        """Bytes of k and v; the accumulator counts its own."""
        return self.k.nbytes + self.v.nbytes

    def reset(self) -> None:
        """Empty the cache for the next micro (nothing is zeroed) and give up an unfinished backward."""
        with torch.no_grad():
            identity = int(self.position[IDENTITY])
            if self.accumulator is not None and int(self.accumulator.state[OWNER]) == identity:
                self.accumulator.reset()
            self.position[LENGTH] = 0
            self.position[GENERATION] += 1

    def __repr__(self) -> str:
        return (
            f"PrefixCache(length={self.length}, k={list(self.k.shape)}, v={list(self.v.shape)}, dtype={self.dtype}, "
            f"device={self.device})"
        )
