"""What ranks do to move a value by broadcasts in groups."""

from __future__ import annotations

from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from fxpar.ir.layout import Layout, Shard
from fxpar.ir.tiles import shard_of
from fxpar.resharding.plan import make_plan
from fxpar.resharding.strategies import STRATEGIES
from fxpar.resharding.tile import Tile, tile_of
from fxpar.transport.buffers import Buffers
from fxpar.transport.endpoint import Endpoint
from fxpar.transport.group_route import GroupRoute
from fxpar.transport.sender_groups import connect_senders

SHAPE = (7, 6)
WIDE = Layout(SHAPE, (("x", Shard(0, 3)),))
TALL = Layout(SHAPE, (("y", Shard(1, 2)),))


def move_there_and_back() -> list[str]:
    """Microbatches from ranks 0-2 (rows over x) to ranks 2-5 (columns over y, twice) and back; what went wrong."""
    rank, limit = dist.get_rank(), timedelta(seconds=60)
    first = {rank: {"x": rank} for rank in range(3)}
    second = {2 + i: {"y": y, "x": x} for i, (y, x) in enumerate(product(range(2), range(2)))}
    ends = (first, WIDE), (second, TALL)
    problems = []
    for strategy, (source, destination) in product(STRATEGIES, (ends, ends[::-1])):
        held, needed = (_tiles(*end) for end in (source, destination))
        plan = make_plan(held, needed, 8, [0, 0, 1, 1, 2, 2], strategy=strategy)
        endpoint = Endpoint(strategy, rank, held.get(rank), needed.get(rank), torch.int64)
        groups = connect_senders([plan], limit, torch.device("cpu"))
        transport = GroupRoute(plan, endpoint, groups, Buffers(torch.device("cpu")))
        wholes = [torch.arange(42).view(SHAPE) + 100 * microbatch for microbatch in range(3)]
        shape = needed[rank].shape if rank in needed else (0,)
        pieces = [torch.zeros(shape, dtype=torch.int64) for _ in wholes]
        receipts = []
        for microbatch, (whole, into) in enumerate(zip(wholes, pieces, strict=True)):
            if rank not in held:
                receipts.append(transport.post_receive(into, microbatch))
                continue
            piece = shard_of(whole, source[1], source[0][rank])
            if rank in needed:
                receipts.append(transport.exchange(piece, into, microbatch)[1])
            else:
                transport.complete(transport.send(piece, microbatch))
        for whole, receipt in zip(wholes, receipts, strict=False):
            if not torch.equal(transport.wait(receipt), shard_of(whole, destination[1], destination[0][rank])):
                problems.append(f"{strategy} to rank {rank}")
    return problems


def _tiles(places: dict[int, dict[str, int]], layout: Layout) -> dict[int, Tile]:
    return {rank: tile_of(layout, at) for rank, at in places.items()}
