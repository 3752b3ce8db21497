"""Move a value from the ranks of one stage to those of another, by point-to-point messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import PeerLostError
from fxpar.layout import Layout
from fxpar.mesh import Mesh
from fxpar.reshard.tile import Tile, tile_of
from fxpar.reshard.units import UnitTask, unit_tasks


@dataclass(frozen=True, slots=True)
class Piece:
    """How a rank's piece of a value lies in its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: Tensor) -> Piece:
        """The memory of a real or fake tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """New memory for one."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class _Parcel:
    """All that one pair of ranks exchanges of a value: parts of the local piece, packed one after another."""

    peer: int
    parts: tuple[tuple[slice, ...], ...]
    num_elements: int
    is_whole: bool


def complete(work: dist.Work, name: str, peer: int | None = None) -> None:
    """Wait for `work`, which moves `name` from or to `peer`, or among all.

    Raises:
        PeerLostError: a rank that takes part has died.
    """
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerLostError(name, peer, str(error)) from error


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receive that has been posted."""

    value: Tensor
    buffers: tuple[Tensor, ...]
    works: tuple[dist.Work, ...]


@dataclass(frozen=True, slots=True)
class Shipment:
    """A send that has begun; it keeps alive what is being sent."""

    name: str
    peer: int
    work: dist.Work
    packed: Tensor

    def complete(self) -> None:
        """Wait until the peer has it.

        Raises:
            PeerLostError: the peer has died.
        """
        complete(self.work, self.name, self.peer)


def complete_all(shipments: Iterable[Shipment]) -> None:
    """Wait until the peers have all of `shipments`.

    Raises:
        PeerLostError: a peer has died.
    """
    for shipment in shipments:
        shipment.complete()


class Route:
    """The way of one value from stage to stage; each rank makes it with the same layouts, and takes its own part.

    `name` says what is moved, for messages; `tag` must differ between the routes of a step.
    """

    def __init__(
        self, name: str, tag: int, mesh: Mesh, source: tuple[int, Layout], target: tuple[int, Layout], num_tags: int
    ) -> None:
        assert source[0] != target[0], f"{name}: a route leads from one stage to another"
        self._name = name
        self._first_tag = tag * num_tags
        coordinate = mesh.coordinate
        self._shape = source[1].local_shape(coordinate)
        ends = [_tiles(mesh, *end) for end in (source, target)]
        messages = _messages(unit_tasks(*ends))
        sent = [(receiver, region) for sender, receiver, region in messages if sender == mesh.rank]
        received = [(sender, region) for sender, receiver, region in messages if receiver == mesh.rank]
        self._sent = _parcels(sent, tile_of(source[1], coordinate))
        self._received = _parcels(received, tile_of(target[1], coordinate))

    def send(self, value: Tensor, microbatch: int) -> list[Shipment]:
        """Begin to send this rank's piece, which must not change before all is complete."""
        # The receiver expects what the plan says; gloo would deliver another size without a word, or abort.
        assert value.shape == self._shape, f"{self._name}: a piece of {tuple(value.shape)}, planned {self._shape}"
        shipments = []
        for parcel in self._sent:
            packed = _pack(value, parcel)
            work = self._begin(dist.isend, packed, parcel.peer, microbatch)
            shipments.append(Shipment(self._name, parcel.peer, work, packed))
        return shipments

    def post_receive(self, piece: Piece, microbatch: int) -> Receipt:
        """Begin to receive this rank's piece into new memory."""
        value = piece.empty()
        buffers = [
            value if parcel.is_whole and value.is_contiguous() else value.new_empty(parcel.num_elements)
            for parcel in self._received
        ]
        works = [
            self._begin(dist.irecv, buffer, parcel.peer, microbatch)
            for buffer, parcel in zip(buffers, self._received, strict=True)
        ]
        return Receipt(value, tuple(buffers), tuple(works))

    def wait(self, receipt: Receipt) -> Tensor:
        """This rank's piece, once it has arrived.

        Raises:
            PeerLostError: a sender has died.
        """
        for work, parcel in zip(receipt.works, self._received, strict=True):
            complete(work, self._name, parcel.peer)
        for buffer, parcel in zip(receipt.buffers, self._received, strict=True):
            if buffer is not receipt.value:
                _unpack(buffer, receipt.value, parcel)
        return receipt.value

    def _begin(self, move: Callable[..., dist.Work | None], tensor: Tensor, peer: int, microbatch: int) -> dist.Work:
        try:
            work = move(tensor, peer, tag=self._first_tag + microbatch)
        except RuntimeError as error:
            raise PeerLostError(self._name, peer, str(error)) from error
        assert work is not None, "this rank belongs to the default group"
        return work


def _tiles(mesh: Mesh, pipe: int, layout: Layout) -> dict[int, Tile]:
    """What the ranks at `pipe` hold that share this rank's batch shard."""
    own = mesh.coordinate
    tiles = {}
    for coordinate in mesh.stage_coordinates(pipe):
        if all(coordinate[axis] == own[axis] for axis in mesh.batch_axes):
            tiles[mesh.rank_at(coordinate)] = tile_of(layout, coordinate)
    return tiles


def _messages(tasks: Iterable[UnitTask]) -> list[tuple[int, int, Tile]]:
    """Each receiver's own message (sender, receiver, region) for each task, from the least loaded of the senders."""
    load: dict[int, int] = {}
    messages = []
    for task in tasks:
        for receiver in task.receivers:
            sender = min(task.senders, key=lambda rank: (load.get(rank, 0), rank))
            load[sender] = load.get(sender, 0) + task.num_elements
            messages.append((sender, receiver, task.region))
    return messages


def _parcels(exchanged: Sequence[tuple[int, Tile]], tile: Tile) -> tuple[_Parcel, ...]:
    regions_by_peer: dict[int, list[Tile]] = {}
    for peer, region in exchanged:
        regions_by_peer.setdefault(peer, []).append(region)
    return tuple(_parcel(peer, regions, tile) for peer, regions in sorted(regions_by_peer.items()))


def _parcel(peer: int, regions: Sequence[Tile], tile: Tile) -> _Parcel:
    boxes = [Tile(tuple((interval,) for interval in box)) for region in regions for box in product(*region.ranges)]
    parts = tuple(here for box in boxes for here, _ in tile.parts(box))
    return _Parcel(peer, parts, sum(region.num_elements for region in regions), regions == [tile] and len(parts) == 1)


def _pack(value: Tensor, parcel: _Parcel) -> Tensor:
    if len(parcel.parts) == 1:
        return value[parcel.parts[0]].contiguous()
    return torch.cat([value[slices].reshape(-1) for slices in parcel.parts])


def _unpack(buffer: Tensor, value: Tensor, parcel: _Parcel) -> None:
    position = 0
    for slices in parcel.parts:
        part = value[slices]
        part.copy_(buffer.view(-1)[position : position + part.numel()].view(part.shape))
        position += part.numel()
