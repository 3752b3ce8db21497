"""Ranks that agree on their collectives, or do not; runs on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from fxpar.errors import PlanMismatchError
from fxpar.world.agreement import check_collectives


def compare(of_ranks: Sequence[Mapping[str, Sequence[str]]]) -> str:
    """What the check says on this rank; nothing if all is well."""
    try:
        check_collectives(of_ranks[dist.get_rank()])
    except PlanMismatchError as error:
        return str(error)
    return ""
