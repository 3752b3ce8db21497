"""`all_gather_matmul` on CPUs: each rank multiplies its own rows at once, and those of other ranks as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from fxpar.ir import fused_ops
from fxpar.lowering.cpu.gathering import Gathering
from fxpar.lowering.cpu.multiply import SharedFactor, SumOfProducts, multiply, product_shape
from fxpar.lowering.cpu.pieces import Chunk, Pieces, Room, as_box, gathered_ends
from fxpar.lowering.cpu.ring import near_first
from fxpar.lowering.cpu.workspace import workspace_of


@fused_ops.all_gather_matmul.register_kernel("cpu")
def all_gather_matmul(
    shard: Tensor,
    others: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    form: str,
    outer: int,
    parts: int,
    keeps_gathered: bool,
    group_name: str,
) -> list[Tensor]:
    """See `fxpar.ir.fused_ops`. A sum over the gathered dim is added up in ring order, this rank's term first.

    Raises:
        PeerLostError: a rank of the group has ended.
    """
    dim = fused_ops.GATHERED_DIM[form]
    pieces = Pieces.equal(outer, parts, shard.shape[dim])
    users = [_use(form, pieces, shard, other, bias) for other, bias in zip(others, biases, strict=True)]
    if keeps_gathered:
        users.append(_Copy(pieces, dim, shard))
    for part, chunk, piece in _all_pieces(shard, dim, pieces, group_name):
        for user in users:
            user.take(part, chunk, piece)
    return [user.result() for user in users]


def _all_pieces(shard: Tensor, dim: int, pieces: Pieces, group_name: str) -> Iterator[tuple[int, Chunk, Tensor]]:
    """Every chunk of every rank's piece, (outer, ..., rows, ...), as it arrives; those of this rank come first."""
    parts = len(pieces.rows)
    own = pieces.alone(0)
    whole = own.whole(0)
    if parts == 1 or shard.numel() == 0:
        yield from ((part, whole, own.box(shard, dim, 0, whole)) for part in range(parts))
        return
    workspace = workspace_of(group_name)
    chunks = own.chunks(0, gathered_ends(workspace.hosts, shard, dim))
    boxes = [own.box(shard, dim, 0, chunk) for chunk in chunks]
    room = Room((tuple(box.nbytes for box in boxes),) * parts)
    gathering = Gathering(workspace.begin(Gathering.num_bytes(workspace.hosts, room)), 0, room)
    for number, box in enumerate(boxes):
        as_box(gathering.own(number), box).copy_(box)
        gathering.publish(number)
    yield workspace.rank, whole, own.box(shard, dim, 0, whole)
    for part in near_first(workspace.hosts, workspace.rank):
        for number, (chunk, box) in enumerate(zip(chunks, boxes, strict=True)):
            yield part, chunk, as_box(gathering.wait(part, number), box)
    workspace.wire.finish()


class _User(Protocol):
    """A consumer of the gathered value, which takes it chunk by chunk."""

    def take(self, part: int, chunk: Chunk, piece: Tensor) -> None:
        """Use a chunk of the piece of `part`: (outer, ..., rows, ...)."""

    def result(self) -> Tensor:
        """The result, after all pieces were taken."""


def _use(form: str, pieces: Pieces, shard: Tensor, other: Tensor, bias: Tensor | None) -> _User:
    if form in fused_ops.SUMMING_FORMS:
        return _Sum(form, pieces, shard, other, bias)
    return _Rows(form, pieces, shard, other, bias)


class _Rows:
    """A product that has the gathered dim: each piece makes some of its rows, columns or matrices."""

    def __init__(self, form: str, pieces: Pieces, shard: Tensor, other: Tensor, bias: Tensor | None) -> None:
        self._pieces = pieces
        self._is_transposed = form == "columns"
        self._dim = -1 if self._is_transposed else fused_ops.GATHERED_DIM[form]
        self._other = other.mT if self._is_transposed else other
        self._shared = None if form == "matrices" else SharedFactor(self._other)
        self._out = shard.new_empty(_product_shape(form, pieces, shard, other))
        self._bias = None if bias is None else bias.expand(self._out.shape)

    def take(self, part: int, chunk: Chunk, piece: Tensor) -> None:
        other = self._shared or self._pieces.box(self._other, 0, part, chunk)
        bias = None if self._bias is None else self._box(self._bias, part, chunk)
        multiply(self._box(self._out, part, chunk), piece, other, bias)

    def result(self) -> Tensor:
        return self._out

    def _box(self, whole: Tensor, part: int, chunk: Chunk) -> Tensor:
        box = self._pieces.box(whole, self._dim, part, chunk)
        return box.mT if self._is_transposed else box


class _Sum:
    """A product that sums over the gathered dim: each piece adds a term."""

    def __init__(self, form: str, pieces: Pieces, shard: Tensor, other: Tensor, bias: Tensor | None) -> None:
        self._pieces = pieces
        is_transposed = form == "sum_right"
        self._other = other.mT if is_transposed else other
        self._out = shard.new_empty(_product_shape(form, pieces, shard, other))
        self._bias = bias
        self._sum = SumOfProducts(self._out.mT if is_transposed else self._out)

    def take(self, part: int, chunk: Chunk, piece: Tensor) -> None:
        other = self._pieces.box(self._other, -2, part, chunk)
        self._sum.add(_as_rows(piece).mT, _as_rows(other))

    def result(self) -> Tensor:
        self._sum.finish()
        return self._out if self._bias is None else self._out.add_(self._bias)


def _as_rows(box: Tensor) -> Tensor:
    """(outer, ..., rows, n) as (..., outer * rows, n)."""
    return box.movedim(0, -3).flatten(-3, -2)


class _Copy:
    """The gathered value itself."""

    def __init__(self, pieces: Pieces, dim: int, shard: Tensor) -> None:
        self._pieces = pieces
        self._dim = dim
        self._out = shard.new_empty(_gathered_shape(pieces, shard, dim))

    def take(self, part: int, chunk: Chunk, piece: Tensor) -> None:
        self._pieces.box(self._out, self._dim, part, chunk).copy_(piece)

    def result(self) -> Tensor:
        return self._out


def _product_shape(form: str, pieces: Pieces, shard: Tensor, other: Tensor) -> list[int]:
    shape = _gathered_shape(pieces, shard, fused_ops.GATHERED_DIM[form])
    gathered = shard.new_empty(1).expand(shape)  # for its shape alone
    return product_shape(*_FACTORS[form](gathered, other))


def _gathered_shape(pieces: Pieces, shard: Tensor, dim: int) -> list[int]:
    shape = list(shard.shape)
    shape[dim] *= len(pieces.rows)
    return shape


_FACTORS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "rows": lambda gathered, other: (gathered, other),
    "columns": lambda gathered, other: (other, gathered.mT),
    "sum_right": lambda gathered, other: (other, gathered),
    "sum_left": lambda gathered, other: (gathered.mT, other),
    "matrices": lambda gathered, other: (gathered, other),
}
