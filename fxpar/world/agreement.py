"""Compare what ranks derived, before the first collective of a step: a difference is an error, not a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TypeVar

import torch.distributed as dist

from fxpar.errors import FailedOnOtherRankError, PeerLostError, PlanMismatchError
from fxpar.progress.phases import phase
from fxpar.world.lost_peers import naming_lost_peers

T = TypeVar("T")

_SHOWN = 200
"""The characters of a line that a message shows, at most."""


def check_agreement(facts: Mapping[str, str]) -> None:
    """Check that every rank has the same `facts` (name -> description).

    Raises:
        PlanMismatchError: names the facts that differ, the ranks that differ from rank 0, and how the first of them
            does.
    """
    if dist.get_world_size() == 1:
        return
    of_ranks = of_all_ranks({name: _digest(fact) for name, fact in facts.items()})
    differing = {}
    for name in sorted({name for found in of_ranks for name in found}):
        different = [rank for rank, found in enumerate(of_ranks) if found.get(name) != of_ranks[0].get(name)]
        if different:
            differing[name] = different
    if differing:
        in_full = of_all_ranks({name: facts.get(name, "") for name in differing})
        problems = [_difference(name, ranks, in_full) for name, ranks in differing.items()]
        raise PlanMismatchError(
            f"ranks derived different plans; these differ from rank 0: {'; '.join(problems)}. "
            "Every rank must do this with arguments of the same shapes, and build the same model. If that depends on "
            "the order of a set, which differs from process to process, set PYTHONHASHSEED=0 for all ranks"
        )


def _difference(name: str, ranks: Sequence[int], in_full: Sequence[Mapping[str, str]]) -> str:
    """The fact with the ranks that have another than rank 0, and the first line in which the first of them differs."""
    lines = zip_longest(*(in_full[rank][name].splitlines() for rank in (0, ranks[0])), fillvalue="nothing")
    own, other = next((pair for pair in lines if len(set(pair)) > 1), ("nothing", "nothing"))
    found = f"rank 0 has {own[:_SHOWN]!r}, rank {ranks[0]} has {other[:_SHOWN]!r}"
    return f"{name} (ranks {', '.join(map(str, ranks))}; {found})"


def check_collectives(started: Mapping[str, Sequence[str]]) -> None:
    """Check that all ranks that run a graph start the same collectives in the same order; a collective of all ranks.

    Args:
        started: the collectives of each of this rank's graphs, by a name that is the same on all ranks that run it.

    Raises:
        PlanMismatchError: names the first collective that differs.
    """
    if dist.get_world_size() == 1:
        return
    of_ranks = of_all_ranks({name: _digest("\n".join(collectives)) for name, collectives in started.items()})
    for name in sorted({name for found in of_ranks for name in found}):
        ranks = [rank for rank, found in enumerate(of_ranks) if name in found]
        if len({of_ranks[rank][name] for rank in ranks}) > 1:
            in_full = of_all_ranks(list(started.get(name, ())))
            raise PlanMismatchError(_first_difference(name, {rank: in_full[rank] for rank in ranks}))


def _first_difference(graph: str, started: Mapping[int, Sequence[str]]) -> str:
    """The message about ranks that start different collectives in `graph`."""
    of_positions = enumerate(zip_longest(*started.values(), fillvalue="none"))
    position, found = next((position, found) for position, found in of_positions if len(set(found)) > 1)
    first, *others = zip(started, found, strict=True)
    rank, other = next((rank, other) for rank, other in others if other != first[1])
    return (
        f"{graph}: ranks that share a group must start its collectives in one order, but collective {position} is "
        f"{first[1]} on rank {first[0]}, and {other} on rank {rank}. Every rank must run the same fxpar, with the same "
        "rules, on the same model"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def of_all_ranks(own: T) -> list[T]:
    """All-gather `own`, which is pickled, over all ranks.

    Raises:
        PeerLostError: another rank has ended.
    """
    of_ranks = [own] * dist.get_world_size()
    if len(of_ranks) == 1:
        return of_ranks
    with phase("wait for all ranks"), naming_lost_peers("what all ranks compare before they run a step"):
        dist.all_gather_object(of_ranks, own)
    return of_ranks


def of_first_rank(own: T) -> T:
    """Broadcast rank 0's `own`, which is pickled, to all ranks.

    Raises:
        PeerLostError: another rank has ended.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    held = [own]
    with phase("wait for all ranks"), naming_lost_peers("what rank 0 decides for all ranks"):
        dist.broadcast_object_list(held, src=0)
    return held[0]


@contextmanager
def failing_together(work: str) -> Iterator[None]:
    """A context that ends with an error on every rank if it does on any; all ranks enter it. A collective of all ranks.

    A rank that fails must have started the same collectives within as the others.

    Args:
        work: what is done within, for the message.

    Raises:
        FailedOnOtherRankError: all went well on this rank, but not on another one.
        PeerLostError: another rank has ended.
    """
    own: Exception | None = None
    try:
        yield
    except PeerLostError:
        raise
    except Exception as error:
        own = error
    for rank, problem in enumerate(of_all_ranks(None if own is None else f"{type(own).__name__}: {own}")):
        if own is not None:
            raise own
        if problem is not None:
            raise FailedOnOtherRankError(work, rank, problem)
