"""Write the graph that each pass leaves as readable Python code, in numbered files per rank."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from posixpath import commonpath
from textwrap import wrap
from typing import Any

import torch
from torch import Tensor, fx

from fxpar._torch.structured_trace import is_tracing, trace_artifact
from fxpar.graph.describe import describe_call
from fxpar.graph.equal_pieces import EqualPiece, find_equal_pieces
from fxpar.ir.layout import Layout, Partial
from fxpar.ir.node_meta import communication, fused, group, is_backward, known_value, layout_of
from fxpar.resharding.pipeline import Reshard, reshard_of

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


FEWEST_REPEATED = 10
"""To say that so many ops are others once more takes as much room as they do."""


class Dump:
    """Writes `directory/rank<rank>/<number>_<pass>[.stage<index>].py`, numbered in the order of the first writes.

    A later compile into the same directory removes the files that an earlier one wrote for the same passes. Without a
    directory nothing is written.

    Args:
        traces: whether all goes into PyTorch's structured trace as well, where TORCH_TRACE asks for that.
    """

    def __init__(self, directory: str | Path | None, rank: int, *, traces: bool = False) -> None:
        self._traces = traces and is_tracing()
        self._directory = None if directory is None else Path(directory) / f"rank{rank}"
        self._numbers: dict[str, int] = {}

    @property
    def is_read(self) -> bool:
        """Whether anything is written."""
        return self._traces or self._directory is not None

    def graph(self, name: str, module: fx.GraphModule, stage: int | None = None) -> None:
        """Write `module` as the pass `name` left it; `stage` is None for the whole program."""
        if self.is_read:
            self._write(name, stage, "py", format_graph(module))

    def text(self, name: str, content: object) -> None:
        """Write `str(content)` for something other than a graph, such as a schedule."""
        if self.is_read:
            self._write(name, None, "txt", str(content))

    def json(self, name: str, content: str) -> None:
        """Write a JSON text, for other programs to read."""
        if self.is_read:
            self._write(name, None, "json", content)

    def _write(self, name: str, stage: int | None, suffix: str, content: str) -> None:
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers) + 1
            if self._directory is not None:
                self._directory.mkdir(parents=True, exist_ok=True)
                for earlier in self._directory.glob(f"[0-9][0-9]_{name}.*"):
                    earlier.unlink()
        number = self._numbers[name]
        of_stage = "" if stage is None else f".stage{stage}"
        label, text = f"{number:02d}_{name}{of_stage}", content.rstrip("\n") + "\n"
        if self._directory is not None:
            (self._directory / f"{label}.{suffix}").write_text(text, encoding="utf-8")
        if self._traces:
            trace_artifact(f"fxpar_{label}", text)


def format_graph(module: fx.GraphModule) -> str:
    """`module` as Python code, one line per op, grouped by the `nn.Module` that each op comes from.

    Of pieces that compute the same, such as layers, the first is shown; of the others, which values of it are others.

    A type is the dtype and the shape; a dim sharded over x reads `2@x*8`. Comments have the logical layout of a local
    shape, partial sums, the axis and bytes of a collective, and the transfer of a value between stages: the bytes
    between hosts, the makespan (bytes at the rate of one interface), and the lower bound of the makespan.
    """
    nodes = list(module.graph.nodes)
    lines = [*_totals(nodes), "def forward("]
    lines += [_with_comment(f"    {node.name}{_annotation(node)},", node) for node in nodes if node.op == "placeholder"]
    lines.append("):")
    lines += _operations([node for node in nodes if node.op not in ("placeholder", "output")])
    for node in module.graph.find_nodes(op="output"):
        lines += ["", f"    return {_argument(node.args[0])}"]
    return "\n".join(lines) + "\n"


def _operations(nodes: list[fx.Node]) -> Iterator[str]:
    """The lines of operations, under headings."""
    pieces = {piece.nodes[0]: piece for piece in find_equal_pieces(nodes, _label, FEWEST_REPEATED)}
    left_out = {node for piece in pieces.values() for node in piece.nodes[1:]}
    heading: str | None = None
    for node in nodes:
        if node in pieces:
            heading = None
            yield from ("", *_equal_piece(pieces[node]))
        elif node not in left_out:
            if _heading(node) != heading:
                heading = _heading(node)
                yield from ("", f"    # {heading}")
            yield _with_comment(f"    {node.name}{_annotation(node)} = {_call(node)}", node)


def _label(node: fx.Node) -> str:
    """What is said of an operation, but for the names of its module and of values."""
    call = describe_call(node, dict.fromkeys(node.all_input_nodes, "%"))
    return _with_comment(f"{is_backward(node)} {_annotation(node)} = {call}", node)


def _equal_piece(piece: EqualPiece) -> Iterator[str]:
    """What is said of operations that are others once more."""
    first, last = piece.original[0], piece.original[-1]
    module = commonpath([group(node).replace(".", "/") for node in piece.nodes]).replace("/", ".")
    heading = _heading_of(module, backward=is_backward(piece.nodes[0]))
    yield f"    # {heading}: the {len(piece.nodes)} ops from {first.name} to {last.name} once more, with"
    yield from _replacements({one: other for one, other in piece.inputs.items() if one is not other})
    yield "    # which return"
    yield from _replacements(piece.outputs)


def _replacements(values: dict[fx.Node, fx.Node]) -> list[str]:
    text = ", ".join(f"{other.name} for {one.name}" for one, other in values.items()) or "nothing else"
    indent = "    #     "
    return wrap(text, 120, initial_indent=indent, subsequent_indent=indent, break_long_words=False)


def _totals(nodes: list[fx.Node]) -> Iterator[str]:
    """A comment per kind of communication: its count and total bytes in the forward and in the backward."""
    counts: Counter[tuple[bool, str]] = Counter()
    num_bytes: Counter[tuple[bool, str]] = Counter()
    for node in nodes:
        if (done := communication(node) or fused(node)) is not None:
            kind = done.kind if fused(node) is None else f"{done.kind} within {_target(node).removeprefix('fxpar.')}"
            key = is_backward(node), f"{kind} over {done.axis}"
            counts[key] += 1
            num_bytes[key] += done.num_bytes
        if (planned := reshard_of(node)) is not None:
            key = is_backward(node), "reshard between hosts"
            counts[key] += 1
            num_bytes[key] += planned.plan.num_bytes
    for (backward, kind), count in sorted(counts.items()):
        direction = "backward" if backward else "forward"
        yield f"# {direction}: {count} {kind}, {num_bytes[backward, kind]} bytes together"


def _heading(node: fx.Node) -> str:
    return _heading_of(group(node), backward=is_backward(node))


def _heading_of(module: str, *, backward: bool) -> str:
    name = module or "(no module)"
    return f"backward of {name}" if backward else name


def _annotation(node: fx.Node) -> str:
    text = _type(known_value(node), layout_of(node))
    return f": {text}" if text else ""


def _type(value: Any, layout: Layout | None = None) -> str:
    if isinstance(value, Tensor):
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        shape = tuple(value.shape)
        if layout is not None and layout.shape == shape:
            return f"{dtype}[{_dims(layout)}]"
        return f"{dtype}[{', '.join(map(str, shape)) or '()'}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(_type(item) or 'None' for item in value)},)"
    return type(value).__name__ if value is not None else ""


def _dims(layout: Layout) -> str:
    return ", ".join("*".join(map(str, layout.digits(dim))) for dim in range(len(layout.shape))) or "()"


def _with_comment(line: str, node: fx.Node) -> str:
    layout, done, planned, remarks = layout_of(node), communication(node) or fused(node), reshard_of(node), []
    if layout is not None:
        if layout.shape != tuple(known_value(node).shape):
            remarks.append(f"of [{_dims(layout)}]")
        remarks += [f"partial {p.op} over {axis}" for axis, p in layout.axes if isinstance(p, Partial)]
    if done is not None:
        remarks.append(f"over {done.axis}, {done.num_bytes} bytes")
    if planned is not None:
        remarks.append(_describe_reshard(planned))
    if isinstance(known_value(node), dict):
        remarks.append(f"parameters and buffers: {len(known_value(node))}")
    return f"{line}  # {'; '.join(remarks)}" if remarks else line


def _describe_reshard(planned: Reshard) -> str:
    """A transfer between stages: its layouts, unit tasks, strategy, and costs in bytes."""
    crossing, plan = planned.crossing, planned.plan
    layouts = [f"[{_dims(layout)}]" for layout in crossing.target_layouts]
    shown = layouts[:1] if len(set(layouts)) == 1 else layouts
    layouts_text = f"[{_dims(crossing.source_layout)}] -> {', '.join(shown)}"
    tasks = f"{len(plan.tasks)} task{'s' * (len(plan.tasks) != 1)}"
    if plan.num_bytes == 0:
        return f"{layouts_text}; {tasks} inside hosts"
    makespan, bound = plan.makespan_bytes, math.ceil(plan.bound_bytes)
    return (
        f"{layouts_text}; {tasks} by {plan.strategy}: {plan.num_bytes} bytes, makespan {makespan}, bound {bound} bytes"
    )


def _call(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.target is operator.getitem and not isinstance(node.args[1], tuple):
        return f"{_argument(node.args[0])}[{_argument(node.args[1])}]"
    positional = [_argument(argument) for argument in node.args]
    arguments = [*positional, *(f"{name}={_argument(argument)}" for name, argument in node.kwargs.items())]
    if node.op == "call_method":
        return f"{positional[0]}.{node.target}({', '.join(arguments[1:])})"
    return f"{_target(node)}({', '.join(arguments)})"


def _target(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target)
    if isinstance(target, str):
        return f"self.{target}"
    return f"{target.__module__.lstrip('_')}.{target.__qualname__}"


def _argument(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, tuple):
        return f"({', '.join(map(_argument, argument))}{',' if len(argument) == 1 else ''})"
    if isinstance(argument, list):
        return f"[{', '.join(map(_argument, argument))}]"
    if isinstance(argument, dict):
        return f"{{{', '.join(f'{key!r}: {_argument(item)}' for key, item in argument.items())}}}"
    if isinstance(argument, slice):
        return f"slice({_argument(argument.start)}, {_argument(argument.stop)}, {_argument(argument.step)})"
    if isinstance(argument, torch.dtype | torch.layout | torch.memory_format):
        return str(argument)
    return repr(argument)
