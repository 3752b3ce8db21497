"""Compare what the ranks derived, before the first collective: a difference is an error, not a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch.distributed as dist

from fxpar.errors import PlanMismatchError


def check_agreement(facts: Mapping[str, str]) -> None:
    """Check that every rank has the same `facts` (name -> description).

    Raises:
        PlanMismatchError: names the facts that differ, and the ranks that differ from rank 0.
    """
    if dist.get_world_size() == 1:
        return
    digests = {name: hashlib.sha256(fact.encode()).hexdigest() for name, fact in facts.items()}
    of_ranks: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, digests)
    problems = []
    for name in sorted({name for found in of_ranks for name in found}):
        different = [rank for rank, found in enumerate(of_ranks) if found.get(name) != of_ranks[0].get(name)]
        if different:
            problems.append(f"{name} (ranks {', '.join(map(str, different))})")
    if problems:
        raise PlanMismatchError(
            f"ranks derived different plans; these differ from rank 0: {'; '.join(problems)}. "
            "Every rank must do this with the same arguments, and build the same model"
        )
