"""Ask ahead which vector instructions Inductor's C++ kernels may use, since the first answer takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import cache
from threading import Thread
from typing import Any

from fxpar._torch_cpp import cpu_and_compiler, cpu_vector_isa
from fxpar.cache.derive_once import find, keep
from fxpar.lowering.machine_lock import machine_lock, shared_folder


@cache
def find_vector_isa() -> None:
    """Start to look, in a thread; whoever needs the answer before it is there waits for it. Further calls do nothing.

    The thread has this thread's context, which holds Inductor's options.
    """
    question = cpu_vector_isa(_passes)
    Thread(target=copy_context().run, args=(_ask, question), name="vector instructions", daemon=True).start()


def _ask(question: Callable[[], Any]) -> None:
    with suppress(Exception):  # such as that there is no compiler: whoever needs the answer gets the error
        question()


def _passes(instructions: Any) -> bool:
    """Whether the instructions can be used. One process of the machine tests them; others and later launches read that.

    A test starts a process that imports torch.
    """
    question = f"vector instructions\n{instructions}\n{cpu_and_compiler()}"
    with machine_lock(shared_folder(), question):
        known: bool | None = find(question)
        if known is None:
            known = bool(instructions)
            keep(question, known)
    return known
