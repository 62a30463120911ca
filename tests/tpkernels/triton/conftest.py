"""Where the Triton kernels run: on the GPU, or in Triton's interpreter on CPU tensors (tests/conftest.py sees to it).

A backend for CPU tensors is never chosen to be triton, so tests ask for it.
"""

from __future__ import annotations

import pytest
import torch

GPU = torch.cuda.is_available()


@pytest.fixture(scope="session")
def device(usable_triton: None) -> str:
    """Where the kernels run."""
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
