"""Find pieces of a graph that compute what an earlier piece does, such as the layers of a model, with other inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from fxpar.graph.repeats import Repeat, count_crossings, find_repeats

Nodes = tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class EqualPiece:
    """Consecutive operations `nodes` that are those of `original`, one by one.

    inputs: for each value from outside that the original reads, in order of first use, the one that this piece reads.
    outputs: the original of each value that is used outside this piece, and that value, in order.
    """

    original: Nodes
    nodes: Nodes
    inputs: dict[fx.Node, fx.Node]
    outputs: dict[fx.Node, fx.Node]


def find_equal_pieces(
    operations: Sequence[fx.Node], label: Callable[[fx.Node], str], smallest: int
) -> list[EqualPiece]:
    """The pieces that are equal to an earlier one, in order and disjoint; no original is part of another piece.

    Args:
        operations: consecutive nodes of a graph.
        label: operations are equal where their labels are, whatever values they read.
        smallest: the least number of operations in a piece.
    """
    crossings = count_crossings([(node,) for node in operations])
    repeats = find_repeats([label(node) for node in operations], crossings, smallest)
    return [piece for repeat in repeats for piece in _equal_pieces(operations, repeat)]


def _equal_pieces(operations: Sequence[fx.Node], repeat: Repeat) -> Iterator[EqualPiece]:
    originals: list[Nodes] = []
    for start in range(repeat.start, repeat.stop, repeat.period):
        nodes = tuple(operations[start : start + repeat.period])
        found = (_compare(original, nodes) for original in originals)
        piece = next((piece for piece in found if piece is not None), None)
        if piece is None:  # it reads its own values otherwise
            originals.append(nodes)
        else:
            yield piece


def _compare(original: Nodes, nodes: Nodes) -> EqualPiece | None:
    """The piece `nodes`, if its operations read each other's results as those of `original` do."""
    twins = dict(zip(original, nodes, strict=True))
    inside = set(nodes)
    inputs: dict[fx.Node, fx.Node] = {}
    for one, other in twins.items():
        for read, read_here in zip(_reads(one), _reads(other), strict=True):
            is_inside = read in twins or read_here in inside
            twin = twins.get(read) if is_inside else inputs.setdefault(read, read_here)
            if twin is not read_here:
                return None
    outputs = {one: other for one, other in twins.items() if not inside.issuperset(other.users)}
    return EqualPiece(original, nodes, inputs, outputs)


def _reads(node: fx.Node) -> list[fx.Node]:
    """The values that an operation reads, as often as they occur in its arguments."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found
