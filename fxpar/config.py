"""The options of `torch.compile(..., backend="fxpar", options=...)`; the only file that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fxpar.errors import InvalidOptionError, UnknownLoweringError, UnknownOptionError, UnknownScheduleError
from fxpar.schedule import SCHEDULE_NAMES

LOWERINGS = ("inductor", "aten")


@dataclass(frozen=True, slots=True)
class Options:
    """How to compile.

    dump: directory for numbered dumps of every pass (default: the environment variable FXPAR_DUMP, else none).
    lowering: what turns graphs into code; "inductor" or "aten" (the reference).
    schedule: another pipeline schedule than the one that `distribute` was given.
    """

    dump: Path | None = None
    lowering: str = "inductor"
    schedule: str | None = None


def read_options(given: Mapping[str, Any] | None) -> Options:
    """Check the user's options by name and value.

    Raises:
        UnknownOptionError, InvalidOptionError, UnknownLoweringError, UnknownScheduleError
    """
    known = [field.name for field in fields(Options)]
    values = dict(given or {})
    for name in values:
        if name not in known:
            raise UnknownOptionError(name, known)
    if values.get("lowering", LOWERINGS[0]) not in LOWERINGS:
        raise UnknownLoweringError(str(values["lowering"]), LOWERINGS)
    dump = values.get("dump", os.environ.get("FXPAR_DUMP"))
    if not isinstance(dump, str | Path | None):
        raise InvalidOptionError("dump", dump, "a directory")
    schedule = values.get("schedule")
    if schedule is not None and schedule not in SCHEDULE_NAMES:
        raise UnknownScheduleError(str(schedule), SCHEDULE_NAMES)
    return Options(Path(dump) if dump else None, values.get("lowering", LOWERINGS[0]), schedule)


def host_name() -> str | None:
    """What the environment variable FXPAR_HOST says this rank's host is; ranks of one name may share memory."""
    return os.environ.get("FXPAR_HOST") or None
