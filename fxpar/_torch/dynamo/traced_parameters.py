"""Whichever way a trace reads a parameter of a distributed model, it reads the result of the op of its property.

A forward may name it, as in `self.weight`, or go through `_parameters`: `parameters()`, `state_dict()`, `dtype` of the
models of transformers and diffusers, and `torch.func.functional_call`, which puts other tensors in the place of
parameters for a while. Seen in torch 2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import fx, nn
from torch._dynamo.exc import raise_observed_exception
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable, TensorVariable, UnspecializedNNModuleVariable
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import PropertyVariable
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from fxpar._torch.dynamo.traced_property import PARAMETER_NAMES, TracedProperty, name_of


class ReadParameters:
    """What one trace has read.

    nodes: for each that reads a parameter, the module and the property.
    listings: how often the trace has asked for all parameters of a module.
    """

    def __init__(self) -> None:
        self.nodes: dict[fx.Node, tuple[nn.Module, TracedProperty]] = {}
        self.listings = 0
        self._listed: dict[tuple[Any, int], _Listed] = {}
        self._shared: dict[tuple[Any, tuple[Any, ...]], VariableTracker] = {}

    @property
    def are_replaced(self) -> bool:
        """Whether other tensors are in the places of parameters."""
        return any(listed.is_changed for listed in self._listed.values())

    def one(self, tx: Any, module: nn.Module, found: TracedProperty) -> VariableTracker:
        """What `module` has under the name of the property: its parameter, unless the forward has replaced it."""
        listed, name = self._find(tx, module), name_of(found, module)
        if listed is None or listed.holds_parameter(name):
            return self._read(tx, module, found)
        replaced = listed.now(name)
        if replaced is None:
            raise_observed_exception(AttributeError, tx, args=[f"{type(module).__name__!r} has no attribute {name!r}"])
        return replaced

    def all(self, tx: Any, module: nn.Module) -> VariableTracker | None:
        """The dictionary `_parameters` of a module; None if it is for Dynamo to trace."""
        properties = {name: each for name, each in vars(type(module)).items() if isinstance(each, TracedProperty)}
        others = [value for name, value in module._parameters.items() if name not in properties]
        if not properties or any(value is not None for value in others):
            return None
        self.listings += 1
        listed = self._find(tx, module)
        if listed is None:
            variables: dict[str, VariableTracker] = {
                name: self._read_shared(tx, module, properties[name])
                if name in properties
                else ConstantVariable.create(None)
                for name in dict.fromkeys([*vars(type(module))[PARAMETER_NAMES], *module._parameters])
            }
            listed = self._listed[tx.output.current_tracer, id(module)] = _Listed(variables)
        dictionary: VariableTracker = listed.dictionary
        return dictionary

    def _find(self, tx: Any, module: nn.Module) -> "_Listed | None":
        """The dictionary that was made in this graph, or in one that it is a part of."""
        tracer = tx.output.current_tracer
        while tracer is not None:
            if (listed := self._listed.get((tracer, id(module)))) is not None:
                return listed
            tracer = tracer.parent
        return None

    def _read_shared(self, tx: Any, module: nn.Module, found: TracedProperty) -> VariableTracker:
        """One variable for a parameter of several modules: who lists the parameters of a model must meet it once."""
        key = tx.output.current_tracer, found.constants
        if key not in self._shared:
            self._shared[key] = self._read(tx, module, found)
        return self._shared[key]

    def _read(self, tx: Any, module: nn.Module, found: TracedProperty) -> VariableTracker:
        holder, name = found.tensor
        source = AttrSource(tx.import_source(holder), name)
        tensor = VariableBuilder(tx, source)(source.get_value({"G": tx.output.root_tx.f_globals}, {}, {}))
        proxy = tx.output.create_proxy("call_function", found.op, (tensor.as_proxy(), *found.constants), {})
        self.nodes[proxy.node] = module, found
        with (
            temporarily_clear_interpreter_stack()
        ):  # a transform of `torch.func` would wrap it, as it wraps no parameter
            variable = wrap_fx_proxy(tx, proxy)
        assert isinstance(variable, TensorVariable), f"a parameter is traced as {variable}"
        variable.class_type = nn.Parameter
        return variable


class _Listed:
    """The dictionary `_parameters` of a module in a trace, which may change it."""

    def __init__(self, parameters: dict[str, VariableTracker]) -> None:
        self._parameters = parameters
        items = {ConstantVariable.create(name): variable for name, variable in parameters.items()}
        self.dictionary: Any = ConstDictVariable(items, mutation_type=ValueMutationNew())

    @property
    def is_changed(self) -> bool:
        return not all(map(self.holds_parameter, self._parameters))

    def holds_parameter(self, name: str) -> bool:
        return self.now(name) is self._parameters[name]

    def now(self, name: str) -> VariableTracker | None:
        held: VariableTracker | None = self.dictionary.maybe_getitem_const(ConstantVariable.create(name))
        return held


def parameters_read(output: Any) -> ReadParameters:
    """What the trace of an `OutputGraph` has read; it is kept there, since Dynamo may begin anew with another one."""
    read: ReadParameters = vars(output).setdefault("_fxpar_parameters_read", ReadParameters())
    return read


def trace_parameters() -> None:
    """Let Dynamo call the op of a `TracedProperty` in place of tracing its getter, and of reading `_parameters`."""
    get = PropertyVariable.tp_descr_get_impl
    read_attribute, look_up = UnspecializedNNModuleVariable.var_getattr, UnspecializedNNModuleVariable.getattr_helper

    def tp_descr_get_impl(self: PropertyVariable, tx: Any, obj: VariableTracker | None, owner: Any) -> VariableTracker:
        found = self.descriptor
        if not isinstance(found, TracedProperty) or not isinstance(obj, UnspecializedNNModuleVariable):
            return get(self, tx, obj, owner)
        module: Any = obj.value
        return parameters_read(tx.output).one(tx, module, found)

    def var_getattr(self: UnspecializedNNModuleVariable, tx: Any, name: str) -> VariableTracker:
        module: Any = self.value
        if name == "_parameters" and not _looks_up.get():
            listed = parameters_read(tx.output).all(tx, module)
            if listed is not None:
                return listed
        return read_attribute(self, tx, name)

    def getattr_helper(
        self: UnspecializedNNModuleVariable, tx: Any, field: str, name_vt: VariableTracker
    ) -> VariableTracker | None:
        with _looking_up():
            return look_up(self, tx, field, name_vt)

    PropertyVariable.tp_descr_get_impl = tp_descr_get_impl  # type: ignore[method-assign]
    UnspecializedNNModuleVariable.var_getattr = var_getattr  # type: ignore[method-assign]
    UnspecializedNNModuleVariable.getattr_helper = getattr_helper  # type: ignore[method-assign]


_looks_up: ContextVar[bool] = ContextVar("whether Dynamo looks for an attribute that is no property", default=False)


@contextmanager
def _looking_up() -> Iterator[None]:
    token = _looks_up.set(True)
    try:
        yield
    finally:
        _looks_up.reset(token)
