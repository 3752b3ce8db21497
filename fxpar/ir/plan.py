"""A plan: everything about a distributed model that must be known before its optimizer is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fxpar.ir.layout import Layout, Shard


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """The stage that owns a parameter, and its layout on that stage's ranks."""

    stage: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages, mesh, schedule and parameter layouts.

    `stages` are the paths of the modules that open the second and later stages; `mesh` maps axis to size; `schedule` is
    a name, or lists of actions as text; `placement` is the place of each stage on the pipe axis.
    """

    stages: tuple[str, ...]
    mesh: Mapping[str, int]
    microbatches: int
    schedule: str
    parameters: Mapping[str, PlannedParameter]
    placement: tuple[int, ...]

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote."""
        raw = json.loads(Path(path).read_text())
        parameters = {name: _parameter(entry) for name, entry in raw["parameters"].items()}
        return cls(
            tuple(raw["stages"]), raw["mesh"], raw["microbatches"], raw["schedule"], parameters, tuple(raw["placement"])
        )


def _parameter(entry: Mapping[str, Any]) -> PlannedParameter:
    layout = entry["layout"]
    axes = tuple((axis, Shard(**shard)) for axis, shard in layout["axes"])
    return PlannedParameter(entry["stage"], Layout(tuple(layout["shape"]), axes))
