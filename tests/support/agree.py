"""Ranks that agree on their collectives, or do not; runs on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from fxpar.errors import FailedOnOtherRankError, PlanMismatchError
from fxpar.world.agreement import check_collectives, failing_together


def compare(of_ranks: Sequence[Mapping[str, Sequence[str]]]) -> str:
    """What the check says on this rank; nothing if all is well."""
    try:
        check_collectives(of_ranks[dist.get_rank()])
    except PlanMismatchError as error:
        return str(error)
    return ""


def fail_on(rank: int | None) -> str:
    """The error on this rank of what fails on one `rank`, or on none; nothing if it does not fail here."""
    try:
        with failing_together("count to three"):
            if dist.get_rank() == rank:
                raise ValueError("what comes after two?")
    except (FailedOnOtherRankError, ValueError) as error:
        return str(error)
    return ""
