"""Typed access to what fxpar keeps in `node.meta`; no other file reads or writes these keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx

from fxpar._torch.compiler import FakeTensor
from fxpar.ir.layout import Layout

_PLACED = "fxpar_placed"
_COMMUNICATION = "fxpar_communication"
_FUSED = "fxpar_fused"
_GROUP = "fxpar_group"
_ORDER = "fxpar_program_order"
_REGION = "fxpar_checkpointed_region"
_SOURCE = "fxpar_source"
_AWAITED = "fxpar_awaited"
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_PACKAGE = Path(__file__).parents[1]
_FOLDERS = tuple(f'File "{folder}' for folder in (Path(torch.__file__).parent, _PACKAGE))
_EXAMPLES = f'File "{_PACKAGE / "examples"}'  # packaged with fxpar, but a user's code
_ORIGIN = ("nn_module_stack", "fwd_nn_module_stack", "source_fn_stack", "stack_trace", "seq_nr", "custom")


@dataclass(frozen=True, slots=True)
class Placed:
    """The layouts chosen for one op: that of each tensor operand (with repeats), and that of each result."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]


def placed(node: fx.Node) -> Placed:
    """The layouts of `node`, which must have been chosen."""
    found: Placed = node.meta[_PLACED]
    return found


def known_placed(node: fx.Node) -> Placed | None:
    """The layouts of `node`, if any were chosen."""
    return node.meta.get(_PLACED)


def layout_of(node: fx.Node) -> Layout | None:
    """The layout of the tensor that `node` returns; None where none was chosen, or the result is no tensor."""
    found = known_placed(node)
    if found is None or not isinstance(known_value(node), Tensor) or len(found.outputs) != 1:
        return None
    return found.outputs[0]


def set_placed(node: fx.Node, layouts: Placed) -> None:
    """Record the layouts chosen for `node`."""
    node.meta[_PLACED] = layouts


CollectiveKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Communication:
    """What a collective does: along which axis, and the bytes of its local input or output, whichever is larger."""

    kind: CollectiveKind
    axis: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.kind} over {self.axis}, {self.num_bytes} bytes"


def communication(node: fx.Node) -> Communication | None:
    """What the collective at `node` does; None where `node` is not a collective."""
    return node.meta.get(_COMMUNICATION)


def set_communication(node: fx.Node, done: Communication) -> None:
    """Record what the collective at `node` does."""
    node.meta[_COMMUNICATION] = done


def awaited(node: fx.Node) -> Communication | None:
    """What the collective does that `node` waits for, even if another graph starts it; None if it waits for none."""
    return node.meta.get(_AWAITED)


def set_awaited(node: fx.Node, started: fx.Node) -> None:
    """Record that `node` waits for the collective that starts at `started`."""
    node.meta[_AWAITED] = communication(started)


def fused(node: fx.Node) -> Communication | None:
    """The collective that is part of the fused op at `node`; None where `node` is no fused op."""
    return node.meta.get(_FUSED)


def set_fused(node: fx.Node, done: Communication) -> None:
    """Record which collective is part of the fused op at `node`."""
    node.meta[_FUSED] = done


def group(node: fx.Node) -> str:
    """The group of `node` in dumps: the one that was set, else the path of its module; '' at the root."""
    return node.meta.get(_GROUP) or module_path(node)


def set_group(node: fx.Node, name: str) -> None:
    """Set the group of `node` where it is no module."""
    node.meta[_GROUP] = name


def has_no_result(node: fx.Node) -> bool:
    """Whether `node` calls an op that returns nothing: it is there for its effect, such as an assertion."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and not target._schema.returns


def value(node: fx.Node) -> Any:
    """The fake value of a traced node: a FakeTensor, a tuple of them, or None for an op that has no result."""
    return node.meta["val"]


def known_value(node: fx.Node) -> Any:
    """The value of a node of any graph, Dynamo's included; None where it is not known."""
    return node.meta.get("val", node.meta.get("example_value"))


def requires_grad(node: fx.Node) -> bool:
    """Whether the value of a node is known, and a tensor that requires grad."""
    value = known_value(node)
    return isinstance(value, Tensor) and value.requires_grad


def is_wrapped(node: fx.Node) -> bool:
    """Whether a value only exists within a transform of `torch.func`, such as vmap or grad."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def is_of_size(node: fx.Node) -> bool:
    """Whether a node of a graph from Dynamo has a symbolic size, or what is known of one, or asserts it."""
    is_assertion = node.target is torch.ops.aten._assert_scalar.default
    return is_assertion or isinstance(known_value(node), torch.SymInt | torch.SymBool)


def tensor(node: fx.Node) -> Tensor:
    """The fake tensor of a node that returns exactly one."""
    found = node.meta["val"]
    assert isinstance(found, torch.Tensor), f"{node} returns {type(found).__name__}, not a tensor"
    return found


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of `node` with repeats, in the order of `Placed.inputs`."""
    found: list[fx.Node] = []

    def note(operand: fx.Node) -> fx.Node:
        if isinstance(value(operand), Tensor):
            found.append(operand)
        return operand

    fx.map_arg((node.args, node.kwargs), note)
    return found


def set_value(node: fx.Node, found: Any) -> None:
    """Record the fake value of `node`."""
    node.meta["val"] = found


def set_origin(node: fx.Node, source: fx.Node, *, backward: bool) -> None:
    """Give `node` the origin of `source`, such as module path and source line, and tag it forward or backward."""
    node.meta.update({key: source.meta[key] for key in _ORIGIN if key in source.meta})
    tag_direction(node, backward=backward)


def moved_origin(node: fx.Node, operation: fx.Node) -> dict[str, Any]:
    """The `meta` that `node` would have if it were traced from `operation`, a torch-IR node of another layer."""
    moved = dict(node.meta)
    for key in (*_STACKS, *_ORIGIN):
        own = "nn_module_stack" if key in _STACKS else key
        if key in moved and own in operation.meta:
            moved[key] = operation.meta[own]
    return moved


def tag_direction(node: fx.Node, *, backward: bool) -> None:
    """Tag `node` as part of the backward or of the forward pass."""
    node.meta["partitioner_tag"] = "is_backward" if backward else "is_forward"


def set_program_order(node: fx.Node, number: int) -> None:
    """Number a torch-IR node by its place in the captured program; the ops traced from it inherit the number."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _ORDER: number}


def program_order(node: fx.Node) -> int:
    """The place in the captured program of what `node` was traced from."""
    order = known_program_order(node)
    assert order is not None, f"{node.format_node()} was traced from no operation"
    return order


def known_program_order(node: fx.Node) -> int | None:
    """`program_order`; None where autograd added the node, such as a sum of gradients."""
    found: int | None = node.meta.get("custom", {}).get(_ORDER)
    return found


def set_region(node: fx.Node, region: str) -> None:
    """Record the checkpointed region of a torch-IR node; the ops traced from it inherit the region."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _REGION: region}


def region(node: fx.Node) -> str | None:
    """The checkpointed region that `node` was traced from; None outside of any."""
    found: str | None = node.meta.get("custom", {}).get(_REGION)
    return found


def set_source(node: fx.Node, made_of: fx.Node) -> None:
    """Record that collectives over z computed `node` from the value of `made_of`, in the same graph."""
    node.meta[_SOURCE] = made_of.name


def source(node: fx.Node) -> str | None:
    """The name of the value that collectives over z computed `node` from; None where none did."""
    found: str | None = node.meta.get(_SOURCE)
    return found


_KEPT = (
    _PLACED,
    _COMMUNICATION,
    _AWAITED,
    _FUSED,
    _GROUP,
    _SOURCE,
    "val",
    "partitioner_tag",
    "custom",
    "seq_nr",
    "stack_trace",
)


def kept_meta(node: fx.Node) -> dict[str, Any]:
    """What passes after the trace read of `node.meta`, as data: without the classes of modules."""
    kept = {key: node.meta[key] for key in _KEPT if key in node.meta}
    for key in _STACKS:
        if node.meta.get(key):
            kept[key] = {name: (path, str(of)) for name, (path, of) in node.meta[key].items()}
    return kept


def take_place(node: fx.Node, of: fx.Node) -> None:
    """Copy the layouts and the source of the value `of` to `node`, which replaces it."""
    node.meta.update({key: of.meta[key] for key in (_PLACED, _SOURCE) if key in of.meta})


def is_backward(node: fx.Node) -> bool:
    """Whether autograd tagged the node as part of the backward pass."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def module_path(node: fx.Node) -> str:
    """Dotted path of the module whose forward made the node (or, if backward, its forward node); '' at the root."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return normalize_path(path)


def layer_path(path: str) -> str | None:
    """The part of a module's path up to the first number, such as `blocks.3`: an item of an outermost `ModuleList`."""
    parts = path.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return None if numbered is None else ".".join(parts[: numbered + 1])


def forget_module(node: fx.Node) -> None:
    """Let `module_path` be '', as for what no module computes."""
    for key in _STACKS:
        node.meta.pop(key, None)


def source_line(node: fx.Node) -> str:
    """The file and line in the user's code that made the node: the innermost that is not PyTorch's or fxpar's own."""
    frames = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")]
    own = [frame for frame in frames if not frame.startswith(_FOLDERS) or frame.startswith(_EXAMPLES)]
    return (own or frames or ["source line unknown"])[-1]


def where(node: fx.Node) -> str:
    """The module and the source line that made the node, for messages."""
    path = module_path(node)
    return f"{f'module {path!r}' if path else 'the root module'} ({source_line(node)})"


_SPELLINGS = (
    ("L['self']", ""),
    ("L['fn']", ""),
    (".__dict__['_modules']", ""),
    ("._modules", ""),
    ("']", ""),
    ("['", "."),
)


def normalize_path(path: str) -> str:
    """Dynamo's spelling of a module path (`L['self']._modules['h']._modules['0'].mlp`) as PyTorch's (`h.0.mlp`)."""
    for old, new in _SPELLINGS:
        path = path.replace(old, new)
    return path.replace("[", ".").replace("]", "").strip(".")
