"""The graphs that a rank runs for one stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from fxpar.dump import Dump
from fxpar.graph.buffers_of_step import buffers_of_step
from fxpar.graph.extract import returned
from fxpar.graph.invariants import Form
from fxpar.ir.node_meta import tensor
from fxpar.ir.stage import JointGraph, PlannedStage, Port, StageBorder
from fxpar.pass_log import PassLog
from fxpar.passes.fusion.verdicts import Verdicts
from fxpar.passes.hoist_storage import Gathers, Hoisted, Reductions
from fxpar.passes.insert_collectives import communicating
from fxpar.passes.partition import Partitioned
from fxpar.passes.split_backward import SplitBackward
from fxpar.schedule import Kind
from fxpar.schedule.memory import StageMemory

_GATHERS = "gather_weights"
_KINDS: Mapping[str, Kind] = {"forward": "F", "backward": "B", "inputs": "I", "weights": "W"}
"""The kind of action that runs a graph, by its name among those of a microbatch."""


@dataclass(frozen=True, slots=True)
class RunGraphs:
    """The graphs that the schedule runs for one stage, and what passes its border.

    backward: None if the schedule does not run it whole.
    input_pieces, tangent_pieces: fake tensors like the inputs and the tangents.
    gradient_dtypes: those of the gradients.
    buffers_of_step: the names of the buffers that change once per step.
    """

    index: int
    border: StageBorder
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    tangents: tuple[Port, ...]
    gradients: tuple[Port, ...]
    input_pieces: tuple[Tensor, ...]
    tangent_pieces: tuple[Tensor, ...]
    gradient_dtypes: tuple[torch.dtype, ...]
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    halves: SplitBackward | None
    gathers: Gathers | None
    reductions: Reductions | None
    buffers_of_step: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageGraphs:
    """The graphs that a rank runs for one of its stages, and their memory.

    `local` is the whole local joint graph. `parts`, and `halves` if the schedule splits the backward, are the graphs
    that run for each microbatch. `verdicts` are those on their collectives, once `fuse_collectives` has run.
    """

    planned: PlannedStage
    local: JointGraph
    hoisted: Hoisted
    parts: Partitioned
    halves: SplitBackward | None
    runs_whole_backward: bool
    memory: StageMemory
    verdicts: Verdicts = field(default_factory=dict)

    @property
    def index(self) -> int:
        """The number of the stage."""
        return self.planned.joint.index

    @property
    def of_microbatch(self) -> dict[str, fx.GraphModule]:
        """The graphs that run for each microbatch, by name."""
        graphs = {"forward": self.parts.forward}
        if self.parts.backward is not None and self.runs_whole_backward:
            graphs["backward"] = self.parts.backward
        if self.halves is not None:
            graphs |= {"inputs": self.halves.inputs, "weights": self.halves.weights}
        return graphs

    @property
    def of_actions(self) -> dict[Kind, fx.GraphModule]:
        """The graphs that run for each microbatch, by the kind of action that runs them."""
        return {_KINDS[name]: module for name, module in self.of_microbatch.items()}

    @property
    def of_step(self) -> dict[str, fx.GraphModule]:
        """The graphs that run once per step, by name."""
        graphs = {}
        if self.hoisted.gathers is not None:
            graphs["gathers"] = self.hoisted.gathers.module
        if self.hoisted.reductions is not None:
            graphs["reductions"] = self.hoisted.reductions.start
        return graphs

    @property
    def run(self) -> RunGraphs:
        """Those graphs, without what they were made from."""
        body = self.hoisted.body
        pieces = [tensor(node) for node in body.module.graph.find_nodes(op="placeholder")]
        return RunGraphs(
            self.index,
            self.planned.border,
            body.inputs,
            body.outputs,
            body.tangents,
            body.gradients,
            tuple(pieces[: len(body.inputs)]),
            tuple(pieces[len(body.inputs) :]),
            tuple(tensor(node).dtype for node in returned(body.module)[len(body.outputs) :]),
            self.parts.forward,
            self.of_microbatch.get("backward"),
            self.halves,
            self.hoisted.gathers,
            self.hoisted.reductions,
            buffers_of_step(body),
        )

    def with_microbatch(self, graphs: Mapping[str, fx.GraphModule]) -> StageGraphs:
        """The same with other graphs `of_microbatch`."""
        backward = graphs.get("backward", self.parts.backward)
        parts, halves = replace(self.parts, forward=graphs["forward"], backward=backward), self.halves
        if halves is not None:
            halves = replace(halves, inputs=graphs["inputs"], weights=graphs["weights"])
        return replace(self, parts=parts, halves=halves)

    @property
    def started(self) -> dict[str, list[str]]:
        """The collectives that each graph starts, in order, by a name that is the same on all ranks of the stage."""
        graphs = self.of_microbatch | self.of_step
        return {self.name(kind): communicating(module.graph) for kind, module in graphs.items()}

    def name(self, kind: str) -> str:
        """The name of a graph `of_microbatch` or `of_step` among those of all stages."""
        return f"{kind} of stage {self.index}"

    def dump(self, to: Dump) -> None:
        """Dump the local graph, and the graphs that it was divided into."""
        to.graph("insert_collectives", self.local.module, self.index)
        for name, module in self._divided.items():
            to.graph(name, module, self.index)

    def check(self, log: PassLog) -> None:
        """Check the graphs that the local graph was divided into.

        Raises:
            BrokenInvariantError: one of the passes broke a graph.
        """
        for name, module in self._divided.items():
            form = Form.STARTING if name == _GATHERS else Form.LOCAL
            log.graph(name, module, form, self.index, shows=False)
        parts = [module for module in (self.parts.forward, self.parts.backward) if module is not None]
        log.collectives("partition", [self.hoisted.body.module], parts, self.index, may_repeat=True)
        if self.halves is not None and self.parts.backward is not None:
            halves = [self.halves.inputs, self.halves.weights]
            log.collectives("split_backward", [self.parts.backward], halves, self.index, may_repeat=True)

    @property
    def _divided(self) -> dict[str, fx.GraphModule]:
        """The parts of the local graph, in the order in which they run, by the names of the passes that made them."""
        hoisted, parts, halves = self.hoisted, self.parts, self.halves
        graphs = {
            _GATHERS: None if hoisted.gathers is None else hoisted.gathers.module,
            "partition_forward": parts.forward,
            "partition_backward": parts.backward,
            "split_backward_inputs": None if halves is None else halves.inputs,
            "split_backward_weights": None if halves is None else halves.weights,
            "reduce_gradients": None if hoisted.reductions is None else hoisted.reductions.module,
        }
        return {name: module for name, module in graphs.items() if module is not None}
