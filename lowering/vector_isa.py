"""Ask ahead which vector instructions Inductor's C++ kernels may use, since the first answer takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache
from threading import Thread
from typing import Any

from fxpar._torch.cpp import cpu_and_compiler, cpu_vector_isa, examine_isa, isa_with
from fxpar.cache.derive_once import find, keep
from fxpar.lowering.machine_lock import machine_lock, shared_folder


@cache
def find_vector_isa() -> None:
    """Start to look, in a thread; whoever needs the answer before it is there waits for it. Further calls do nothing.

    The thread has this thread's context, which holds Inductor's options.
    """
    question = cpu_vector_isa(_usable)
    Thread(target=copy_context().run, args=(_ask, question), name="vector instructions", daemon=True).start()


def _ask(question: Callable[[], Any]) -> None:
    with suppress(Exception):  # such as that there is no compiler: whoever needs the answer gets the error
        question()


def _usable(isa: Any) -> Any:
    """The instructions, if they can be used. One process of the machine tests them; others and later ones read that.

    A test starts compilers and processes that load what they compiled.
    """
    question = f"vector instructions\n{isa}\n{cpu_and_compiler()}"
    with machine_lock(shared_folder(), question):
        known: _Tested | None = find(question)
        if known is None:
            known = _Tested(examine_isa(isa))
            keep(question, known)
    return None if known.findings is None else isa_with(isa, known.findings)


@dataclass(frozen=True, slots=True)
class _Tested:
    """That vector instructions were tested; with None, they cannot be used."""

    findings: Mapping[str, Any] | None
