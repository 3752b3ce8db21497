"""The code of all regions that a process lowers is generated after the last, and ranks of a host share this work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import Tensor

from fxpar.hardware.machine import num_processors
from fxpar.lowering.kept_code import find_code, keep_code
from fxpar.lowering.machine_lock import machine_lock, shared_folder, try_machine_lock
from fxpar.lowering.stitch import Compiled


@dataclass(eq=False, slots=True)
class _DeferredCode:
    """Stands for the code of a region, which is there when the `joint_generation` has ended."""

    question: str
    """See `deferred_code`."""
    make: Callable[[], Compiled]
    function: Compiled | None = None

    def __call__(self, box: list[Tensor]) -> Sequence[Any]:
        assert self.function is not None, "a region was called before its code was generated"
        return self.function(box)

    def find(self) -> bool:
        """Load the code if a process has kept it; returns whether one has."""
        self.function = find_code(self.question)
        return self.function is not None

    def generate(self) -> None:
        """Generate the code, and keep it."""
        self.function = self.make()
        keep_code(self.question, self.function)


_deferred: ContextVar[list[_DeferredCode] | None] = ContextVar("code that is to be generated", default=None)


@contextmanager
def joint_generation(place: int = 0, processes: int = 1) -> Iterator[None]:
    """Code that is deferred within is generated at the end. Within another, this one does nothing.

    Processes of this machine may do this at the same time: each claims a region that no other has claimed, generates
    its code and keeps it for the others, and goes on to the next. It waits for others when nothing is left to claim.

    Args:
        place: of this process among those of this machine, in an order in which neighbours need similar code.
        processes: how many there are. No more of them generate at a time than the machine has processors.

    Raises:
        what the generation raises, in every process that needs the code.
    """
    if _deferred.get() is not None:
        yield
        return
    deferred: list[_DeferredCode] = []
    before = _deferred.set(deferred)
    try:
        yield
    finally:
        _deferred.reset(before)
    _generate_all(deferred, place // ceil(processes / num_processors()))


def deferred_code(question: str, generate: Callable[[], Compiled]) -> Compiled:
    """What `generate` will have returned, or an equal process has kept, at the end of the `joint_generation`.

    Args:
        question: all that the code depends on, as text.
        generate: is called by at most one of the processes that ask this at the same time, if its result can be kept.
    """
    deferred = _deferred.get()
    assert deferred is not None, "code is deferred within a joint generation only"
    deferred.append(_DeferredCode(question, generate))
    return deferred[-1]


def _generate_all(codes: Sequence[_DeferredCode], processor: int) -> None:
    """Large regions first, so that processes are done at about the same time."""
    missing = [code for code in codes if not code.find()]
    if not missing:
        return
    missing.sort(key=lambda code: (-len(code.question), code.question))
    # One at a time on each processor: Inductor's import takes as long as the code of several regions, and a process
    # whose neighbour has generated all that it needs does without.
    with machine_lock(shared_folder(), f"generate code on processor {processor}"):
        claimed_by_others = [code for code in missing if not _claim(code)]
    for code in claimed_by_others:
        with machine_lock(shared_folder(), code.question):  # which is released when it is generated, or cannot be
            if not code.find():
                code.generate()


def _claim(code: _DeferredCode) -> bool:
    """Find or generate the code, unless another process is doing this; returns whether it is there."""
    if code.find():
        return True
    with ExitStack() as claim:
        if not try_machine_lock(shared_folder(), code.question, claim):
            return False
        if not code.find():  # another process may have kept it since
            code.generate()
    return True
