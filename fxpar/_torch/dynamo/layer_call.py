"""A call of a layer that Dynamo is about to trace, and what its trace depends on."""

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import is_from_source
from torch._dynamo.variables import TensorVariable, TupleVariable, UnspecializedNNModuleVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting, VariableTracker
from torch._guards import Source

from fxpar._torch.dynamo.descriptions import NotEqualError, contents, describe
from fxpar._torch.dynamo.traced_parameters import parameters_read


@dataclass
class LayerCall:
    """The arguments of `UnspecializedNNModuleVariable.call_function`.

    arguments: what a trace depends on of the call's arguments; inputs: the nodes of the tensors among them.
    modes: whether gradients are wanted, autocast, and so on, before the call; `modes.check()` compares with those now.
    effects: what the trace has stored so far in objects that existed before it; `kept` has all that they refer to.
    listings: how often it has asked for all parameters of a module.

    Raises:
        NotEqualError: there are other arguments than tensors, constants and tuples of these, effects that belong to
            the layer, are not just attributes, or cannot be described, or other tensors in the places of parameters.
    """

    layer: UnspecializedNNModuleVariable
    tx: Any
    args: Any
    kwargs: Any
    inputs: list[fx.Node] = field(init=False, default_factory=list)
    arguments: Any = field(init=False)
    modes: Any = field(init=False, default_factory=GlobalStateGuard)
    effects: frozenset[tuple[int, str, Hashable]] = field(init=False)
    kept: dict[int, VariableTracker] = field(init=False, default_factory=dict)
    listings: int = field(init=False)

    def __post_init__(self) -> None:
        self.listings = parameters_read(self.tx.output).listings
        self.effects = self.effects_so_far()
        self.arguments = describe((*self.args, self.kwargs), self.inputs)

    @property
    def module(self) -> nn.Module:
        module: Any = self.layer.value
        assert isinstance(module, nn.Module), f"{module} is called as a layer"
        return module

    @property
    def source(self) -> Source:
        assert self.layer.source is not None, "a layer that the trace made"
        return self.layer.source

    @cached_property
    def path(self) -> str:
        """Where the module was found, as in `nn_module_stack`."""
        return re.sub(r"\._modules\['([^']+)'\]", r".\1", self.layer.get_nn_module_stack_source().name)

    def owns(self, source: Source) -> bool:
        """Whether what is found at `source` belongs to the layer."""
        return is_from_source(source, self.source)

    def resolve(self, source: Source) -> Any:
        """The object at `source`."""
        try:
            return source.get_value(self.scope, {}, {})
        except Exception as missing:
            raise NotEqualError from missing

    @property
    def scope(self) -> dict[str, Any]:
        """The global and local variables at which sources start."""
        return {"G": self.tx.output.root_tx.f_globals, "L": self.tx.output.root_tx.f_locals}

    def effects_so_far(self) -> frozenset[tuple[int, str, Hashable]]:
        """See `effects`."""
        effects: SideEffects = self.tx.output.side_effects
        if parameters_read(self.tx.output).are_replaced:
            raise NotEqualError
        if effects.tensor_hooks or effects.save_for_backward or any(map(self.owns, effects.mutated_sources)):
            raise NotEqualError
        for each in effects.id_to_variable.values():
            if isinstance(each.mutation_type, ValueMutationExisting) and each.mutation_type.is_modified:
                raise NotEqualError
        met: dict[int, VariableTracker] = {}
        found = frozenset(
            (id(item), name, contents(value, met))
            for item, stored in effects.store_attr_mutations.items()
            if isinstance(item.mutation_type, AttributeMutationExisting)
            for name, value in stored.items()
        )
        self.kept |= met
        return found


def returned_nodes(result: VariableTracker, new: set[fx.Node]) -> tuple[list[fx.Node], bool]:
    """The nodes that a call returns, and whether in a tuple.

    Raises:
        NotEqualError: it returns something else than tensors, or tensors that are not among the `new` ones.
    """
    result = result.realize()
    items = list(result.items) if type(result) is TupleVariable else [result]
    items = [item.realize() for item in items]
    if any(type(item) is not TensorVariable for item in items):
        raise NotEqualError
    nodes = [item.as_proxy().node for item in items]
    if not new.issuperset(nodes) or len(set(nodes)) < len(nodes):
        raise NotEqualError
    return nodes, type(result) is TupleVariable


def is_plain(value: Any) -> bool:
    """Whether a fake value is a tensor of fixed shape, a number, or a tuple of these."""
    if type(value) in (tuple, list):
        return all(map(is_plain, value))
    if isinstance(value, Tensor):
        return all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    return value is None or isinstance(value, int | float)
