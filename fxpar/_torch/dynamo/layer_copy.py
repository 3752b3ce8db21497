"""Write for the call of a layer what another one was traced to."""

import functools
import re
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import is_from_source
from torch._dynamo.variables import TupleVariable
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._guards import ChainedSource, Guard, Source
from torch.utils._pytree import tree_leaves

from fxpar._torch.compiler import storage_of
from fxpar._torch.computed import as_computed
from fxpar._torch.dynamo.descriptions import NotEqualError
from fxpar._torch.dynamo.layer_call import LayerCall
from fxpar._torch.dynamo.traced_layer import TracedLayer, other_place
from fxpar._torch.dynamo.traced_property import TracedProperty, are_equal_classes


class LayerCopy:
    """A copy of `traced` for `call`.

    Raises:
        NotEqualError: Dynamo might trace the call to something else.
    """

    def __init__(self, traced: TracedLayer, call: LayerCall) -> None:
        self._traced, self._call, self._tx = traced, call, call.tx
        are_equal = (call.arguments, call.effects) == (traced.call.arguments, traced.call.effects)
        if not (are_equal and traced.call.modes.check()):
            raise NotEqualError
        self._sources: dict[Source, Source] = {traced.call.source: call.source}
        self._values: dict[Source, Any] = {}
        self._check()
        self._properties = {node: self._read(node) for node in traced.properties}
        self._nodes = dict(zip(traced.call.inputs, call.inputs, strict=True))
        changed = [each for node in traced.nodes for each in _tensors(node) if each._version > 0]
        placeholders = self._placeholders()
        # Normalizations change their statistics without a new version.
        changed += [each for node in placeholders for each in _tensors(node)]
        self._changed = set(map(storage_of, changed))
        self._viewed = {
            storage_of(each) for node in traced.nodes if self._is_made_anew(node) for each in _tensors(node)
        }
        self._storages: dict[int, Tensor] = {}
        for old, new in self._nodes.items():
            self._check_place(old, new.meta["example_value"])
            self._share_memory(old, new)
        for node in placeholders:
            self._check_place(node, self._counterpart(node.meta["grapharg"].source))
        modules = traced.call.module.named_modules()
        self._modules = {str(id(old)): call.module.get_submodule(path) for path, old in modules}

    def _placeholders(self) -> list[fx.Node]:
        """What the traced layer reads that is neither an argument of its call nor a parameter, such as buffers."""
        used = dict.fromkeys(each for node in self._traced.nodes for each in node.all_input_nodes)
        return [node for node in used if node.op == "placeholder" and node not in self._nodes and _tensors(node)]

    def _check_place(self, old: fx.Node, new: Tensor) -> None:
        """Check that what `old` has views of can have views of the same kind here."""
        value = old.meta["example_value"]
        if storage_of(value) in self._viewed and _place(value) != _place(new):
            raise NotEqualError

    def _share_memory(self, old: fx.Node, new: fx.Node) -> None:
        """Let those of the values that are made anew be views of `new` that are views of `old` in the traced layer."""
        theirs, mine = old.meta["example_value"], new.meta["example_value"]
        if storage_of(theirs) in self._viewed:
            with torch.no_grad(), self._tx.fake_mode:
                size = mine.untyped_storage().nbytes() // mine.dtype.itemsize
                self._storages[storage_of(theirs)] = mine.as_strided((size,), (1,), 0)

    def _is_made_anew(self, node: fx.Node) -> bool:
        """Whether the node's copy has a fake value of its own, as results need, and what may be changed in place.

        Of other values only the type is read.
        """
        return node in self._traced.result or any(storage_of(value) in self._changed for value in _tensors(node))

    def _check(self) -> None:
        """Compare all that was read of the traced layer with its counterpart."""
        for source, value in self._traced.unguarded:
            found = self._counterpart(source)
            if found is not value and not (isinstance(value, type) and are_equal_classes(found, value)):
                raise NotEqualError
        for guard, check, expected in self._traced.guards:
            found = self._counterpart(guard.originating_source)
            is_equal = (
                found is self._counterpart(other_place(guard)) if check is None else check.eval_fn(found, expected)
            )
            if not is_equal:
                raise NotEqualError

    def _counterpart(self, source: Source) -> Any:
        try:
            return self._moved(source).get_value(self._call.scope, {}, self._values)
        except Exception as missing:
            raise NotEqualError from missing

    def _moved(self, source: Any) -> Any:
        """Where this layer has what the traced one has at `source`."""
        if source not in self._sources:
            moved = source
            if isinstance(source, ChainedSource):
                own = {each.name: getattr(source, each.name) for each in fields(source)}
                changed = {name: self._moved(value) for name, value in own.items() if isinstance(value, Source)}
                if any(own[name] is not value for name, value in changed.items()):
                    moved = replace(source, **changed)
            self._sources[source] = moved
        return self._sources[source]

    def write(self) -> Any:
        """Append the operations to the graph, and install the guards; returns what the call returns."""
        for node in self._traced.nodes:
            self._enter(node)
        for node in self._traced.nodes:
            read = self._properties.get(node)
            args = node.args if read is None else (node.args[0], *read.constants)
            args, kwargs = fx.map_arg((args, node.kwargs), self._nodes.__getitem__)
            copy = self._tx.output.current_tracer.create_node(node.op, node.target, args, kwargs, name=_stem(node))
            copy.meta |= self._meta(node)
            self._nodes[node] = copy
        self._install_guards()
        made = [self._variable(self._nodes[node]) for node in self._traced.result]
        return TupleVariable(made) if self._traced.is_tuple else made[0]

    def _read(self, node: fx.Node) -> TracedProperty:
        """What this layer has in place of the property that the node reads."""
        path, name = self._traced.properties[node]
        own = getattr(type(self._call.module.get_submodule(path)), name, None)
        old = getattr(type(self._traced.call.module.get_submodule(path)), name)
        if not isinstance(own, TracedProperty) or (own.op, own.tensor) != (old.op, old.tensor):
            raise NotEqualError
        differing = [mine for mine, other in zip(own.constants, old.constants, strict=True) if mine != other]
        if not all(isinstance(value, str) for value in differing):  # names may differ, shapes and dtypes may not
            raise NotEqualError
        return own

    def _enter(self, node: fx.Node) -> None:
        """Find the counterparts of the placeholders that `node` uses, such as buffers."""
        for used in node.all_input_nodes:
            if used.op == "placeholder" and used not in self._nodes:
                source = used.meta["grapharg"].source
                moved = self._moved(source)
                if moved == source:
                    self._nodes[used] = used
                else:
                    self._nodes[used] = VariableBuilder(self._tx, moved)(self._counterpart(source)).as_proxy().node
                if _tensors(used):
                    self._share_memory(used, self._nodes[used])

    def _meta(self, node: fx.Node) -> dict[str, Any]:
        """What Dynamo would have noted of the node's copy."""
        meta = dict(node.meta)
        if self._is_made_anew(node):
            with self._tx.fake_mode:
                meta["example_value"] = self._like(meta["example_value"])
        stack = dict(self._tx.nn_module_stack)
        for key, (path, cls) in list(meta.get("nn_module_stack", {}).items())[self._traced.depth :]:
            module = self._modules.get(key.partition("@")[0])
            if module is None:
                stack[key] = path, cls
            else:
                own = self._call.path + path.removeprefix(self._traced.call.path)
                stack[str(id(module))] = own, type(module)
        if stack:
            meta["nn_module_stack"] = stack
        return meta

    def _like(self, value: Any) -> Any:
        """A fake value like another one; views of one memory become views of one memory."""
        if not isinstance(value, Tensor):
            return type(value)(map(self._like, value)) if isinstance(value, tuple | list) else value
        key = storage_of(value)
        if key not in self._storages:
            size = value.untyped_storage().nbytes() // value.dtype.itemsize
            self._storages[key] = torch.empty(size, dtype=value.dtype, device=value.device)
        with torch.no_grad():
            made = self._storages[key].view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
            return as_computed(made) if _is_computed(value) else made.detach().requires_grad_(value.requires_grad)

    def _install_guards(self) -> None:
        """Guard this layer as the traced one is guarded."""
        output = self._tx.output
        own = [each for each in output.guard_on_key_order if is_from_source(each, self._traced.call.source)]
        output.guard_on_key_order.update(map(self._moved, own))
        guards: list[Guard] = []
        for guard, check, _ in self._traced.guards:
            source, create = self._moved(guard.originating_source), guard.create_fn
            if guard.create_fn_name() == "TENSOR_MATCH":  # which holds the tensor
                VariableBuilder(self._tx, source)(self._counterpart(guard.originating_source))
                continue
            if check is None:
                create = functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=self._moved(other_place(guard)))
            guards.append(source.make_guard(create))
        install_guard(*guards)

    def _variable(self, node: fx.Node) -> Any:
        proxy = fx.Proxy(node, self._tx.output.current_tracer)
        return wrap_fx_proxy(self._tx, proxy, example_value=node.meta.pop("example_value"))


def _place(value: Tensor) -> tuple[int, int]:
    """Where in its memory a value lies, and how large that is."""
    return int(value.storage_offset()), value.untyped_storage().nbytes()


def _is_computed(value: Tensor) -> bool:
    """Whether it has a gradient, and is no leaf. A view is none, and PyTorch raises when asked of some that changed."""
    return value.requires_grad and (value._is_view() or not value.is_leaf)


def _tensors(node: fx.Node) -> list[Tensor]:
    return [value for value in tree_leaves(node.meta.get("example_value")) if isinstance(value, Tensor)]


def _stem(node: fx.Node) -> str:
    """The name from which the graph made that of the node."""
    return re.sub(r"_\d+$", "", node.name)
