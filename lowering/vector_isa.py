"""Ask ahead which vector instructions Inductor's C++ kernels may use, since the first answer takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import cache
from threading import Thread
from typing import Any

from fxpar._torch_cpp import cpu_vector_isa


@cache
def find_vector_isa() -> None:
    """Start to look, in a thread; whoever needs the answer before it is there waits for it. Further calls do nothing.

    The thread has this thread's context, which holds Inductor's options.
    """
    Thread(target=copy_context().run, args=(_ask, cpu_vector_isa()), name="vector instructions", daemon=True).start()


def _ask(question: Callable[[], Any]) -> None:
    with suppress(Exception):  # such as that there is no compiler: whoever needs the answer gets the error
        question()
