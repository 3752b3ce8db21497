"""The C++ kernels of all graphs that a process lowers are compiled together, after the last of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from fxpar._torch.cpp import DeferredKernel, deferred_cpp_kernels
from fxpar.hardware.machine import num_processors
from fxpar.lowering.compile_kernels import Gather, compile_in_parts, compile_kernels
from fxpar.lowering.machine_lock import machine_lock, shared_folder
from fxpar.progress.phases import phase

_is_active: ContextVar[bool] = ContextVar("whether kernels wait to be compiled together", default=False)


@contextmanager
def joint_compilation(processes: int = 1, place: int = 0, gather: Gather | None = None) -> Iterator[None]:
    """Within, code that Inductor generates does not wait for its C++ kernels; they are compiled at the end.

    Within another, this one does nothing. If the body raises, kernels are compiled when they are first called.

    Args:
        processes: how many processes of this machine do this at the same time, and share its processors.
        place: of this process among them.
        gather: see `compile_in_parts`; with it, the processes compile each other's kernels, too.

    Raises:
        CppCompileError: the compiler does not take a kernel.
    """
    if _is_active.get():
        yield
        return
    active = _is_active.set(True)
    try:
        with deferred_cpp_kernels() as kernels:
            yield
    finally:
        _is_active.reset(active)
    missing = [kernel.missing for kernel in kernels if kernel.missing is not None]
    with phase(f"compile {len(missing)} kernels of C++"):
        if gather is not None:
            compile_in_parts(missing, place, gather)
        compile_kernels(missing, max(1, num_processors() // processes))
        for kernel in kernels:
            _load(kernel)


def _load(kernel: DeferredKernel) -> None:
    """Load a kernel. A library that cannot be loaded, since its file is damaged, is compiled again, once."""
    try:
        kernel.load()
    except ImportError as damaged:
        if damaged.path is None:
            raise
        with machine_lock(shared_folder(), f"load {damaged.path}"):
            try:
                kernel.load()  # another process may have compiled it again
            except ImportError:
                Path(damaged.path).unlink(missing_ok=True)
                kernel.load()
