"""Compute the gradients of a convolution by two ops where some of them are wanted earlier than others."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import torch
from torch import fx

from fxpar.annotate import set_value, value

aten = torch.ops.aten
_MASK = 10  # the place of `output_mask` among the arguments: which of input, weight and bias get a gradient


def part_convolutions(backward: fx.GraphModule, early: AbstractSet[fx.Node]) -> None:
    """Change `backward` so that no `convolution_backward` among the nodes `early` gives what is not among them, too.

    Kernels compute the gradient of the input apart from those of the weight and the bias, so nothing is done twice.
    (Those of norms are computed together.)

    Before: `both = aten.convolution_backward(..., [True, True, False]); dx = both[0]; dw = both[1]`
    After:  `one = aten.convolution_backward(..., [True, False, False]); dx = one[0]`, and another one for `dw`
    """
    for node in backward.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        late = [item for item in node.users if item not in early]
        if node in early and late:
            with backward.graph.inserting_after(node):
                other = backward.graph.node_copy(node)
            for item in late:
                item.replace_input_with(node, other)
            _mask(node, node.users)
            _mask(other, late)
    backward.recompile()


def _mask(node: fx.Node, items: Iterable[fx.Node]) -> None:
    """Let `node` compute no more than `items`, which take its results apart."""
    wanted = {item.args[1] for item in items}
    node.update_arg(_MASK, [index in wanted for index in range(3)])
    set_value(node, tuple(found if index in wanted else None for index, found in enumerate(value(node))))
