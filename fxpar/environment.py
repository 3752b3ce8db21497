"""The only file that reads or sets environment variables: a function for each, whose docstring names it."""

from __future__ import annotations

import os
from pathlib import Path

CUDA_DEFAULT_QUEUES = 8
"""How many hardware queues CUDA gives a process that asks for no other number."""


def cache_folder() -> Path | None:
    """FXPAR_CACHE_DIR: folder where plans and graphs are kept for later launches; empty: nothing is kept.

    By default it is `fxpar` in the user's cache folder.
    """
    chosen = os.environ.get("FXPAR_CACHE_DIR")
    if chosen is None:
        return user_cache() / "fxpar"
    return Path(chosen) if chosen else None


def user_cache() -> Path:
    """XDG_CACHE_HOME: the user's cache folder, which is otherwise ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def checks_passes() -> bool:
    """FXPAR_CHECK: whether graphs are checked after every pass, for debugging fxpar; 1 turns that on, 0 off."""
    return os.environ.get("FXPAR_CHECK", "0") not in ("", "0")


def dump_folder() -> str | None:
    """FXPAR_DUMP: directory for dumps of the graphs after every pass, where the option `dump` is not given."""
    return os.environ.get("FXPAR_DUMP") or None


def host_name() -> str | None:
    """FXPAR_HOST: name of this rank's host; ranks share memory only with ranks of the same name.

    By default hosts are told apart by the kernel's boot id and the network namespace.
    """
    return os.environ.get("FXPAR_HOST") or None


def is_first_rank() -> bool:
    """RANK: set by the launcher; rank 0, or a process without it, prints what all ranks know, such as warnings."""
    return os.environ.get("RANK", "0") == "0"


def is_quiet() -> bool:
    """FXPAR_QUIET: 1 keeps what goes on while a model is distributed and compiled from the terminal."""
    return os.environ.get("FXPAR_QUIET", "0") not in ("", "0")


def first_host() -> str:
    """MASTER_ADDR: set by the launcher; the host of rank 0, as other hosts know it. By default it is this host."""
    return os.environ.get("MASTER_ADDR") or "localhost"


def hardware_queues() -> int:
    """CUDA_DEVICE_MAX_CONNECTIONS: how many hardware queues CUDA gives the streams of a process, at most 32.

    Unless it is set, `import fxpar` sets it to 32: streams that share a queue wait for each other, so that a posted
    receive may stand in front of the send that it waits for.
    """
    found = os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    return int(found) if found.isdecimal() else CUDA_DEFAULT_QUEUES


def connects_groups_at_once() -> bool:
    """NCCL_RUNTIME_CONNECT: whether NCCL makes a group's connections for large collectives when the first one comes.

    Unless it is set, `import fxpar` sets it to 0: then they are made with the group, where all its ranks wait for it.
    """
    return os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0") == "0"
