"""What the environment variables of a process say; the only file that reads them."""

from __future__ import annotations

import os


def dump_folder() -> str | None:
    """Where FXPAR_DUMP says that every pass shall dump its graphs."""
    return os.environ.get("FXPAR_DUMP") or None


def host_name() -> str | None:
    """What FXPAR_HOST says this rank's host is; ranks of one name may share memory."""
    return os.environ.get("FXPAR_HOST") or None


def is_first_rank() -> bool:
    """Whether this is rank 0 of what a launcher started, or was started alone: who prints what all ranks know."""
    return os.environ.get("RANK", "0") == "0"
