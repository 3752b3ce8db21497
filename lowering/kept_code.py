"""The code that Inductor generated for a region, kept for later launches: looking it up takes Inductor much longer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpar._torch_cpp import generated_code, inductor_options, load_generated_code
from fxpar.cache.ambient import ambient_state
from fxpar.cache.derive_once import find, keep
from fxpar.graph.describe import describe
from fxpar.ir.node_meta import known_value, value
from fxpar.lowering.stitch import Compiled


def kept_code(region: fx.GraphModule, backward: bool, generate: Callable[[fx.GraphModule, bool], Compiled]) -> Compiled:
    """The result of `generate`, or the code that an earlier launch generated for an equal region.

    Only code for the CPU is kept, which is one Python module that names its kernels by their sources.
    """
    if not _is_on_cpu(region):
        return generate(region, backward)
    question = "\n".join(("region", str(backward), _described(region), inductor_options(), ambient_state()))
    known: str | None = find(question)
    if known is not None:
        return load_generated_code(known)
    compiled = generate(region, backward)
    if (source := generated_code(compiled)) is not None:
        keep(question, source)
    return compiled


def _is_on_cpu(region: fx.GraphModule) -> bool:
    values = [leaf for node in region.graph.nodes if node.op != "output" for leaf in pytree.tree_leaves(value(node))]
    return all(leaf.device.type == "cpu" for leaf in values if isinstance(leaf, Tensor))


def _described(region: fx.GraphModule) -> str:
    """Every op with its arguments, and the types and strides of what it returns: Inductor returns the same strides."""
    return "\n".join(
        f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {describe(known_value(node))}"
        for node in region.graph.nodes
    )
