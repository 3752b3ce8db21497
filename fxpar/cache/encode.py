"""Plans and graphs as bytes, and back: tables of ops by name, tensors by their types, data of fxpar's own classes."""

from __future__ import annotations

import functools
import io
import operator
import pickle
import types
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fxpar._torch.compiler import FakeTensor, FakeTensorMode, fake_tensor
from fxpar._torch.concrete_graph import ConcreteGraph
from fxpar._torch.lazy_graph_module import lazy_graph_module
from fxpar.ir.node_meta import kept_meta

_SMALL_BYTES = 1 << 20
"""Limit on a constant of a graph: larger ones are data of the model, which would fill the cache."""

_PLAIN = {
    "builtins": {"set", "frozenset", "slice", "complex", "range"},
    "collections": {"OrderedDict", "defaultdict"},
    "fractions": {"Fraction"},
    "torch": {"device", "Size"},
}
"""Names that may stand in the bytes, besides fxpar's own data classes and enums, and what `_MAKERS` makes."""


_OPERATORS = {name for name, found in vars(operator).items() if isinstance(found, types.BuiltinFunctionType)} - {"call"}


class NotEncodableError(Exception):
    """A value has no form in bytes, or bytes are of no value: it must be worked out anew."""


def encode(found: Any) -> bytes:
    """`found` as bytes.

    Raises:
        NotEncodableError: it holds a large tensor, or an object of a class from outside of fxpar.
    """
    file = io.BytesIO()
    try:
        _Encoder(file, protocol=pickle.HIGHEST_PROTOCOL).dump(found)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise NotEncodableError(str(error)) from error
    return file.getvalue()


def decode(data: bytes) -> Any:
    """What `encode` was given; fake tensors get a fake mode of their own. No code but fxpar's constructors is called.

    Raises:
        NotEncodableError: the bytes are damaged, or of another version.
    """
    try:
        return _Decoder(io.BytesIO(data)).load()
    except Exception as error:  # whatever unpickling of damaged bytes raises
        raise NotEncodableError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Node:
    """Stands for another node of the graph, by its position."""

    position: int


_Row: TypeAlias = tuple[str, str, Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]
"""A node: its op, its name, its target, its arguments with `_Node` for nodes, and what is kept of its meta."""


class _Encoder(pickle.Pickler):
    def reducer_override(self, given: Any) -> Any:
        if isinstance(given, fx.GraphModule):
            return _graph_module, (_rows(given), _constants(given))
        if isinstance(given, FakeTensor):
            return _fake, (given.dtype, tuple(given.shape), given.stride(), given.device.type, given.requires_grad)
        if isinstance(given, Tensor):
            return _constant, _contents(given)
        if isinstance(given, torch._ops.OpOverload):
            return _op, (given.name(),)
        if isinstance(given, torch._ops.HigherOrderOperator):
            return _higher_order, (given.name(),)
        if isinstance(given, torch.device):
            return torch.device, (given.type,)
        if isinstance(given, torch.dtype | torch.memory_format | torch.layout):
            return _torch_constant, (str(given).removeprefix("torch."),)
        if isinstance(given, types.MappingProxyType):
            return _read_only, (dict(given),)
        if isinstance(given, type | types.FunctionType | types.BuiltinFunctionType):
            return NotImplemented if _is_known(given.__module__, given.__qualname__) else _refuse(given)
        if (names := _fields_in_slots(given.__class__)) and _is_data(type(given)):
            return _data, (type(given), [getattr(given, name) for name in names])
        return NotImplemented if _is_data(type(given)) else _refuse(given)


@functools.cache
def _fields_in_slots(cls: type) -> tuple[str, ...]:
    """The fields of a data class with slots, which would look them up for each object that is pickled."""
    return tuple(field.name for field in fields(cls)) if is_dataclass(cls) and "__slots__" in vars(cls) else ()


def _is_data(cls: type) -> bool:
    return cls.__module__ in ("builtins", *_PLAIN) or _is_known(cls.__module__, cls.__qualname__)


def _refuse(given: object) -> Any:
    raise NotEncodableError(f"{type(given).__name__}: {given!r:.200}")


def _rows(module: fx.GraphModule) -> list[_Row]:
    place: dict[fx.Node, Any] = {node: _Node(position) for position, node in enumerate(module.graph.nodes)}
    rows: list[_Row] = []
    for node in module.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), place.__getitem__)
        plain_args, plain_kwargs = _mutable((args, kwargs))
        rows.append((node.op, node.name, node.target, plain_args, plain_kwargs, kept_meta(node)))
    return rows


def _mutable(given: Any) -> Any:
    """fx's immutable lists and dicts as plain ones."""
    if isinstance(given, tuple):
        return tuple(map(_mutable, given))
    if isinstance(given, list):
        return [_mutable(item) for item in given]
    if isinstance(given, dict):
        return {key: _mutable(item) for key, item in given.items()}
    return given


def _constants(module: fx.GraphModule) -> dict[str, Tensor | fx.GraphModule]:
    names = [str(node.target) for node in module.graph.find_nodes(op="get_attr")]
    return {name: operator.attrgetter(name)(module) for name in names}


def _contents(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], str, bytes]:
    if type(tensor) is not Tensor or tensor.numel() * tensor.itemsize > _SMALL_BYTES or tensor.requires_grad:
        _refuse(tensor)
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), tensor.device.type, raw


# What makes the values again.


def _graph_module(rows: list[_Row], constants: dict[str, Tensor | fx.GraphModule]) -> fx.GraphModule:
    graph = ConcreteGraph()
    nodes: list[fx.Node] = []
    for op, name, target, args, kwargs, meta in rows:
        args, kwargs = _with_nodes((args, kwargs), nodes)
        node = graph.create_node(op, target, args, kwargs, name=name)
        node.meta.update(meta)
        nodes.append(node)
    return lazy_graph_module(constants, graph)


def _with_nodes(given: Any, nodes: list[fx.Node]) -> Any:
    if isinstance(given, _Node):
        return nodes[given.position]
    if isinstance(given, tuple):
        return tuple(_with_nodes(item, nodes) for item in given)
    if isinstance(given, list):
        return [_with_nodes(item, nodes) for item in given]
    if isinstance(given, dict):
        return {key: _with_nodes(item, nodes) for key, item in given.items()}
    return given


def _constant(dtype: torch.dtype, shape: tuple[int, ...], device: str, raw: bytes) -> Tensor:
    found = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    return found.reshape(shape).to(device)


def _op(name: str) -> Any:
    found: Any = torch.ops
    path, _, overload = name.partition(".")
    for part in path.split("::"):
        found = getattr(found, part)
    return getattr(found, overload or "default")


def _higher_order(name: str) -> Any:
    return getattr(torch.ops.higher_order, name)


def _torch_constant(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype | torch.memory_format | torch.layout):
        raise NotEncodableError(f"torch.{name} is no dtype, layout or memory format")
    return found


def _read_only(given: dict[Any, Any]) -> types.MappingProxyType[Any, Any]:
    return types.MappingProxyType(given)


def _data(cls: type, values: list[Any]) -> object:
    found: object = object.__new__(cls)
    for name, value in zip(_fields_in_slots(cls), values, strict=True):
        object.__setattr__(found, name, value)
    return found


def _fake(*_: Any) -> Tensor:
    raise AssertionError("a decoder has its own, with one fake mode for all values")


_MAKERS = {
    maker.__name__: maker
    for maker in (_graph_module, _constant, _op, _higher_order, _torch_constant, _read_only, _data, _fake)
}


class _Decoder(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._mode = FakeTensorMode()

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _fake.__name__:
            return self._make_fake
        if not _is_known(module, name):
            raise NotEncodableError(f"{module}.{name} may not stand in a cached value")
        return super().find_class(module, name)

    def _make_fake(
        self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], device: str, requires_grad: bool
    ) -> Tensor:
        return fake_tensor(self._mode, dtype, shape, strides, torch.device(device), requires_grad=requires_grad)


def _is_known(module: str, name: str) -> bool:
    if module == __name__ and name in _MAKERS:
        return True
    if module in _PLAIN:
        return name in _PLAIN[module]
    if module == "_operator":
        return name in _OPERATORS
    return module.startswith("fxpar.") and _is_data_class(module, name)


@functools.cache
def _is_data_class(module: str, name: str) -> bool:
    """Whether fxpar's module has a data class or an enum of that name."""
    import importlib

    found: Any = getattr(importlib.import_module(module), name, None)
    is_own = isinstance(found, type) and found.__module__ == module
    return is_own and (hasattr(found, "__dataclass_fields__") or issubclass(found, Enum))
