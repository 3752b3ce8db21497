"""What every pass left: dumped where a person wants to see it, and checked where FXPAR_CHECK=1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from fxpar.dump import Dump
from fxpar.environment import checks_passes
from fxpar.graph.invariants import Form, check_collectives_kept, check_graph


class PassLog:
    """Told of every graph that a pass leaves.

    Args:
        dump: where graphs are shown; by default nowhere.
    """

    def __init__(self, dump: Dump | None = None) -> None:
        self.dump = dump or Dump(None, 0)
        self._checks = checks_passes()

    def graph(
        self,
        name: str,
        module: fx.GraphModule,
        form: Form | None,
        stage: int | None = None,
        *,
        coordinate: Mapping[str, int] | None = None,
        shows: bool = True,
    ) -> None:
        """Take note of `module` as the pass `name` left it.

        Args:
            form: of the graph; None of one that calls modules, of which nothing is checked.
            stage: None for the whole program.
            coordinate: of the rank whose pieces a local graph computes.
            shows: whether it is dumped, too.

        Raises:
            BrokenInvariantError: the pass broke the graph.
        """
        if self._checks and form is not None:
            check_graph(module, form, _where(name, stage), coordinate)
        if shows:
            self.dump.graph(name, module, stage)

    def collectives(
        self,
        name: str,
        before: Iterable[fx.GraphModule],
        after: Iterable[fx.GraphModule],
        stage: int,
        *,
        may_repeat: bool = False,
    ) -> None:
        """Take note that the pass `name` made the graphs `after` of those `before`, which communicate the same.

        Raises:
            BrokenInvariantError: a collective is lost, or was added.
        """
        if self._checks:
            check_collectives_kept(before, after, _where(name, stage), may_repeat=may_repeat)


def _where(name: str, stage: int | None) -> str:
    return f"after the pass {name}" + ("" if stage is None else f", in stage {stage}")
