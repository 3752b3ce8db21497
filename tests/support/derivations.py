"""What this process derives: the functions that plan, divide and lower still run, but their calls are noted."""

from __future__ import annotations

from typing import Any

import pytest

from fxpar import build_step
from fxpar.build import planned_stages, rank_graphs

DERIVATIONS = ((planned_stages, "plan_stages"), (rank_graphs, "divide_stage"), (build_step, "lower_stage"))


def note_derivations(until: pytest.MonkeyPatch | None = None) -> list[str]:
    """The names of such functions, from now on, whenever one is called: until that is undone, or the process ends."""
    called: list[str] = []
    for module, name in DERIVATIONS:
        _note_calls(module, name, called, until or pytest.MonkeyPatch())
    return called


def _note_calls(module: Any, name: str, called: list[str], patch: pytest.MonkeyPatch) -> None:
    plain = getattr(module, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return plain(*args, **kwargs)

    patch.setattr(module, name, noted)
