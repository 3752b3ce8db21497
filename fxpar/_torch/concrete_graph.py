"""Graphs of calls whose arguments hold no symbolic numbers."""

from __future__ import annotations

from torch import fx
from torch.fx.node import Argument, Target


class ConcreteGraph(fx.Graph):
    """A graph that makes nodes in half the time, since it does not look for symbolic numbers to warn of.

    fxpar compiles a step for sizes: no argument of a call is symbolic.
    """

    def create_node(
        self,
        op: str,
        target: Target,
        args: tuple[Argument, ...] | None = None,
        kwargs: dict[str, Argument] | None = None,
        name: str | None = None,
        type_expr: object = None,
    ) -> fx.Node:
        node = super().create_node(op, target, None, None, name, type_expr)
        node._update_args_kwargs(args or (), kwargs or {})
        return node
