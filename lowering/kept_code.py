"""The code that Inductor generated for a region, kept for other ranks and later launches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpar._torch.cpp import generated_code, inductor_options, load_generated_code
from fxpar.cache.ambient import ambient_state
from fxpar.cache.derive_once import find, keep
from fxpar.cache.folder import own_cache
from fxpar.graph.describe import describe
from fxpar.ir.node_meta import known_value, value
from fxpar.lowering.stitch import Compiled


@dataclass(frozen=True, slots=True)
class Source:
    """What code is generated of: a region, and whether it is a part of a backward."""

    region: fx.GraphModule
    backward: bool


def code_question(source: Source) -> str | None:
    """All that the code of a region depends on, as text; None if its code is not kept.

    Only code for the CPU is kept, which is one Python module that names its kernels by their sources.
    """
    if own_cache() is None or not _is_on_cpu(source.region):
        return None
    described = describe_graph(source.region)
    return "\n".join(("region", str(source.backward), described, inductor_options(), ambient_state()))


def find_code(question: str) -> Compiled | None:
    """The code that another rank or an earlier launch kept; None if there is none."""
    known: str | None = find(question)
    return None if known is None else load_generated_code(known)


def keep_code(question: str, compiled: Compiled) -> None:
    """Keep what Inductor generated, if it is one module."""
    if (source := generated_code(compiled)) is not None:
        keep(question, source)


def _is_on_cpu(region: fx.GraphModule) -> bool:
    values = [leaf for node in region.graph.nodes if node.op != "output" for leaf in pytree.tree_leaves(value(node))]
    return all(leaf.device.type == "cpu" for leaf in values if isinstance(leaf, Tensor))


def describe_graph(region: fx.GraphModule) -> str:
    """Every op with its arguments, and the types and strides of what it returns, which compiled code returns, too."""
    return "\n".join(
        f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {describe(known_value(node))}"
        for node in region.graph.nodes
    )
