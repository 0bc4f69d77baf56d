"""Triton's kernels on a CPU: in the interpreter, whatever was imported before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_KERNELS = "gridtron.core.kernels.triton_kernels."


@contextmanager
def interpreted() -> Iterator[None]:
    """Within, kernels are interpreted, their modules read anew; after it all is as before.

    Triton settles at its own import whether the functions of its library (``tl.sum``) are interpreted; a process that
    has imported it already gets them exchanged here.
    """
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    exchanged = [
        (module, name, value)
        for module in (tl, tl.standard, tl.random, tl.core, tl.math)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
    ]
    before = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = True
    _forget_kernels()
    try:
        for module, name, value in exchanged:
            setattr(module, name, InterpretedFunction(value.fn))
        yield
    finally:
        triton.knobs.runtime.interpret = before
        _forget_kernels()
        for module, name, value in exchanged:
            setattr(module, name, value)


def _forget_kernels() -> None:
    for name in [name for name in sys.modules if name.startswith(_KERNELS)]:
        del sys.modules[name]
