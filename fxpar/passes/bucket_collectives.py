"""Join small all-gathers and reduce-scatters over z in buckets: their time is mostly latency."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxpar._torch.distributed import c10d_functional
from fxpar.graph.graph_writer import WriterInPlace
from fxpar.graph.min_cut import closure, operands, users
from fxpar.ir.node_meta import (
    Communication,
    communication,
    set_awaited,
    set_communication,
    take_place,
    tensor,
)
from fxpar.progress.phases import as_phase

aten = torch.ops.aten

SMALL_BYTES = 8 << 10
"""Collectives of weights up to this size, whole, are joined: biases, and scales of norms."""

BUCKET_BYTES = 25 << 20
"""The default of DistributedDataParallel: larger messages reach no higher bandwidth."""


@as_phase
def bucket_collectives(module: fx.GraphModule, small_bytes: int = SMALL_BYTES) -> None:
    """Join, in place, small all-gathers of a local graph's inputs over z, and small reduce-scatters of its outputs.

    Collectives of at most `small_bytes` each are joined in the order of the graph, in buckets of one dtype. The
    all-gather of a bucket starts where its first member did. The reduce-scatter starts when the last gradient is
    computed, and is waited for at the end of the graph.

    Before: `g0 = all_gather(w0); g1 = all_gather(w1)`
    After:  `g = all_gather(cat([w0, w1]))`, of which `g0` and `g1` are slices
    """
    buckets = 0
    for kind, join in (("all_gather", _join_gathers), ("reduce_scatter", _join_reductions)):
        for bucket in list(_buckets(_small(module.graph, kind, small_bytes))):
            join(module.graph, bucket)
            buckets += 1
    if buckets:
        module.graph.lint()
        module.recompile()


def _small(graph: fx.Graph, kind: str, small_bytes: int) -> Iterator[fx.Node]:
    """The collectives that may be joined, in order."""
    for node in graph.nodes:
        done = communication(node)
        if done is not None and (done.kind, done.axis) == (kind, "z") and done.num_bytes <= small_bytes:
            around = closure([node], operands if kind == "all_gather" else users)
            if all(_stands_at_border(other, kind) for other in around):
                yield node


def _stands_at_border(node: fx.Node, kind: str) -> bool:
    """Whether `node` combines no values (before a gather), or no user of it does (after a reduction)."""
    if kind == "all_gather":
        return node.op == "placeholder" or len(node.all_input_nodes) == 1
    return all(len(user.all_input_nodes) == 1 or user.op == "output" for user in node.users)


def _buckets(collectives: Iterable[fx.Node]) -> Iterator[list[fx.Node]]:
    """Buckets of one dtype and at most `BUCKET_BYTES`; a collective that would be alone in one is left out."""
    open_buckets: dict[Any, list[fx.Node]] = {}
    for node in collectives:
        key = (tensor(node).dtype, node.args[1:])
        bucket = open_buckets.setdefault(key, [])
        if sum(map(_num_bytes, (*bucket, node))) > BUCKET_BYTES:
            yield from [bucket] if len(bucket) > 1 else []
            bucket = open_buckets[key] = []
        bucket.append(node)
    yield from (bucket for bucket in open_buckets.values() if len(bucket) > 1)


def _num_bytes(collective: fx.Node) -> int:
    done = communication(collective)
    assert done is not None, f"{collective} is no collective"
    return done.num_bytes


class _Writer(WriterInPlace):
    """Writes calls on behalf of a collective."""

    def collective(self, joined: fx.Node) -> fx.Node:
        """The same collective as the one written for, on `joined`."""
        like = communication(self._like)
        assert like is not None and callable(self._like.target)
        started = self.call(self._like.target, joined, *self._like.args[1:])
        num_bytes = max(tensor(joined).nbytes, tensor(started).nbytes)
        set_communication(started, Communication(like.kind, like.axis, num_bytes))
        return started


def _wait_of(collective: fx.Node) -> fx.Node:
    (wait,) = collective.users
    return wait


def _join_gathers(graph: fx.Graph, bucket: Sequence[fx.Node]) -> None:
    first = bucket[0]
    write, sources = _Writer(graph, first), [node.all_input_nodes[0] for node in bucket]
    needed = closure(sources, operands)
    for node in [node for node in graph.nodes if node in needed and node.op != "placeholder"]:
        first.prepend(node)
    waits = [_wait_of(node) for node in bucket]
    with graph.inserting_before(first):
        pieces = [write.call(aten.view.default, source, [tensor(source).numel()]) for source in sources]
        started = write.collective(write.call(aten.cat.default, pieces))
    with graph.inserting_before(next(node for node in graph.nodes if node in waits)):
        wait = write.call(c10d_functional.wait_tensor.default, started)
        set_awaited(wait, started)
        size = sum(tensor(piece).numel() for piece in pieces)
        rows = write.call(aten.view.default, wait, [tensor(wait).numel() // size, size])
    begin = 0
    for node, old, piece in zip(bucket, waits, pieces, strict=True):
        write, end = _Writer(graph, node), begin + tensor(piece).numel()
        with graph.inserting_before(old):
            part = write.call(aten.slice.Tensor, rows, 1, begin, end)
            copy = write.call(aten.clone.default, part, memory_format=torch.contiguous_format)
            _replace(old, write.call(aten.view.default, copy, list(tensor(old).shape)))
        graph.erase_node(node)
        begin = end


def _join_reductions(graph: fx.Graph, bucket: Sequence[fx.Node]) -> None:
    last, output = bucket[-1], graph.output_node()
    write, terms = _Writer(graph, last), [node.all_input_nodes[0] for node in bucket]
    waits = [_wait_of(node) for node in bucket]
    behind = closure(waits, users)
    leaving = [node for node in graph.nodes if node in behind]
    with graph.inserting_before(last):
        parts = [tensor(node).numel() // tensor(wait).numel() for node, wait in zip(terms, waits, strict=True)]
        rows = [
            write.call(aten.view.default, term, [count, tensor(term).numel() // count])
            for term, count in zip(terms, parts, strict=True)
        ]
        joined = write.call(aten.cat.default, rows, 1)
        started = write.collective(write.call(aten.view.default, joined, [tensor(joined).numel()]))
    with graph.inserting_before(output):
        wait = write.call(c10d_functional.wait_tensor.default, started)
        set_awaited(wait, started)
    for node in leaving:
        output.prepend(node)
    begin = 0
    for node, old in zip(bucket, waits, strict=True):
        write, shape = _Writer(graph, node), list(tensor(old).shape)
        end = begin + math.prod(shape)
        with graph.inserting_before(old):
            _replace(old, write.call(aten.view.default, write.call(aten.slice.Tensor, wait, 0, begin, end), shape))
        graph.erase_node(node)
        begin = end


def _replace(old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    take_place(new, old)
    old.graph.erase_node(old)
