"""An example as the program of a rank that a launcher started, for libraries that read the launcher's environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from tests.support.run_example import run_example


def run_under_launcher(name: str, arguments: Sequence[str], folder: Path) -> str:
    """Run it in `folder`; returns what this rank printed. For `run_ranks`."""
    set_launcher_environment()
    return run_example(name, arguments, folder)


def set_launcher_environment() -> None:
    """Set what torchrun tells a rank about itself."""
    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=num_ranks, LOCAL_WORLD_SIZE=num_ranks)
