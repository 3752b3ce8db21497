"""Move a value from the ranks of one stage to those of another, by point-to-point messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import PeerLostError
from fxpar.layout import Box, Layout
from fxpar.mesh import Mesh
from fxpar.reshard import local_slices, point_to_point, unit_tasks


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
        ends = [_places(mesh, pipe) for pipe, _ in (source, target)]
        messages = point_to_point(unit_tasks(source[1], target[1], *ends))
        sent = [(m.receiver, m.box) for m in messages if m.sender == mesh.rank and m.receiver != mesh.rank]
        received = [(m.sender, m.box) for m in messages if m.receiver == mesh.rank and m.sender != mesh.rank]
        self._sent = _parcels(sent, source[1], coordinate)
        self._received = _parcels(received, target[1], coordinate)

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


def _places(mesh: Mesh, pipe: int) -> dict[int, dict[str, int]]:
    """The ranks at `pipe` that share this rank's batch shard, with their coordinates."""
    own = mesh.coordinate
    places = {}
    for coordinate in mesh.stage_coordinates(pipe):
        if all(coordinate[axis] == own[axis] for axis in mesh.batch_axes):
            places[mesh.rank_at(coordinate)] = coordinate
    return places


def _parcels(exchanged: Sequence[tuple[int, Box]], layout: Layout, coordinate: dict[str, int]) -> tuple[_Parcel, ...]:
    boxes_by_peer: dict[int, list[Box]] = {}
    for peer, box in exchanged:
        boxes_by_peer.setdefault(peer, []).append(box)
    return tuple(_parcel(peer, boxes, layout, coordinate) for peer, boxes in sorted(boxes_by_peer.items()))


def _parcel(peer: int, boxes: Sequence[Box], layout: Layout, coordinate: dict[str, int]) -> _Parcel:
    parts = tuple(local_slices(box, layout, coordinate) for box in boxes)
    sizes = [[part.stop - part.start for part in slices] for slices in parts]
    is_whole = len(parts) == 1 and tuple(sizes[0]) == layout.local_shape(coordinate)
    return _Parcel(peer, parts, sum(torch.Size(size).numel() for size in sizes), is_whole)


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
