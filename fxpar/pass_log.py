"""The graph that each pass leaves: dumped if the option `dump` is set, and checked if FXPAR_CHECK=1 is set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from fxpar.dump import Dump
from fxpar.environment import checks_passes
from fxpar.graph.invariants import Form, check_collectives_kept, check_graph


class PassLog:
    """Dumps and checks every graph that a pass leaves.

    Args:
        dump: where graphs are written; by default nowhere.
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
        """Check and dump `module`, the graph after the pass `name`.

        Args:
            form: the invariants to check; None for a graph that calls modules, which is not checked.
            stage: None for the whole program.
            coordinate: the mesh coordinate of the rank that a local graph belongs to.
            shows: whether to dump it as well.

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
        """Check that the pass `name`, which turned the graphs `before` into `after`, kept all collectives.

        Raises:
            BrokenInvariantError: a collective was lost or added.
        """
        if self._checks:
            check_collectives_kept(before, after, _where(name, stage), may_repeat=may_repeat)


def _where(name: str, stage: int | None) -> str:
    return f"after the pass {name}" + ("" if stage is None else f", in stage {stage}")
