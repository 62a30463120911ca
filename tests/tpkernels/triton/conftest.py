"""Triton kernels run on the GPU where there is one, else in Triton's interpreter on CPU tensors.

The interpreter is chosen when triton is first imported, which no test module does at its top; setting the variable
while tests are collected is early enough. Nothing else changes: a backend for CPU tensors is never chosen to be triton.
"""

from __future__ import annotations

import os

import pytest
import torch

from tpkernels import backends

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run; skips where triton cannot run at all."""
    status = {row.name: row for row in backends.describe()}["triton"]
    if not status.usable:
        pytest.skip(f"attention backend triton is not usable here: {status.reason}")
    if not GPU:
        _spare_the_interpreter_its_patches()
    return "cuda" if GPU else "cpu"


@pytest.fixture(scope="session")
def dtypes(device: str) -> tuple[torch.dtype, ...]:
    """What the backend computes here; the interpreter is wrong for bf16, and refuses it."""
    return (torch.float32, torch.float16, torch.bfloat16) if GPU else (torch.float32, torch.float16)


def _spare_the_interpreter_its_patches() -> None:
    """Each call of a device function patches triton.language anew, which is most of the interpreter's time; once for
    each module of device functions in a launch is enough."""
    from triton.runtime import interpreter

    patched: set[int] = set()
    launch = interpreter.GridExecutor.__call__

    def call(self, *args, **kwargs):
        module = id(self.fn.__globals__)
        if module not in patched:
            patched.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    def launch_afresh(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    interpreter.GridExecutor.__call__ = launch_afresh
