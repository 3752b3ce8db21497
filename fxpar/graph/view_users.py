"""Find the users of a collective's result, directly or through views and copies, and the view that each takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxpar._torch.distributed import c10d_functional
from fxpar.graph.dim_map import Dims, rearranges, through
from fxpar.graph.graph_writer import GraphWriter
from fxpar.graph.view_ops import laid_out_like, rearrange
from fxpar.ir.node_meta import take_place, tensor


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why a collective cannot be fused."""

    reason: str


WAITED_ELSEWHERE = Unfit("another graph waits for it")


def wait_of(start: fx.Node) -> fx.Node | None:
    """The wait for the collective at `start`; None if it is in another graph."""
    waits = [user for user in start.users if user.target is c10d_functional.wait_tensor.default]
    return waits[0] if len(waits) == len(start.users) == 1 else None


@dataclass(frozen=True, slots=True)
class ViewUsers:
    """A rearrangement of a value, and those users of it that do more than rearrange; `dims` are digits of the value."""

    node: fx.Node
    dims: Dims
    users: tuple[fx.Node, ...]


def users_of_views(node: fx.Node, dims: Dims) -> list[ViewUsers]:
    """The rearrangements of `node`, which has the `dims`, that have other users, in the order of the graph.

    `node` itself counts as one. A rearrangement that divides a digit unevenly counts as a user.
    """
    found: list[ViewUsers] = []
    pending = [(node, dims)]
    while pending:
        value, has = pending.pop()
        users = []
        for user in value.users:
            further = through(user, has) if rearranges(user) else None
            if further is None:
                users.append(user)
            else:
                pending.append((user, further))
        if users:
            found.append(ViewUsers(value, has, tuple(users)))
    places = {each: index for index, each in enumerate(node.graph.nodes)}
    return sorted(found, key=lambda seen: places[seen.node])


def replace_view_users(write: GraphWriter, seen: ViewUsers, base: fx.Node, have: Dims) -> None:
    """Let the users of `seen` use `base` instead, which has the dims `have` of the same source."""
    copy = laid_out_like(write, rearrange(write, base, have, seen.dims), tensor(seen.node))
    take_place(copy, seen.node)
    for user in seen.users:
        user.replace_input_with(seen.node, copy)
