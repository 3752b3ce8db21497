"""A model split into the same stages as by fxpar, for torch.distributed.pipelining."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from fxpar.graph.extract import returned
from fxpar.ir.capture import Capture, example
from fxpar.ir.markers import is_marker
from fxpar.ir.stage import Port, PortKind, StageGraph
from fxpar.ir.trace_forward import capture_forward
from fxpar.model.distribution import Distribution
from fxpar.model.logical import install
from fxpar.passes.split_stages import split_stages
from fxpar.world.mesh import Mesh


@dataclass(frozen=True, slots=True)
class TorchStage:
    """A stage whose `module` takes incoming edges as positional arguments, and by keyword those of the forward's
    arguments that it uses, of one microbatch. It returns the outgoing edges as a tuple, or in the last stage the loss.

    `arriving` and `leaving` are contiguous meta tensors of their shapes. An edge that skips stages is passed through
    them, since torch's stages send values to their neighbours only.
    """

    module: fx.GraphModule
    arriving: tuple[Tensor, ...]
    leaving: tuple[Tensor, ...]

    def keywords(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the forward's arguments that the stage takes."""
        taken = {node.target for node in self.module.graph.find_nodes(op="placeholder")}
        return {name: value for name, value in batch.items() if name in taken}


def torch_stages(
    model: nn.Module, batch: Mapping[str, Tensor], boundaries: Sequence[str], microbatches: int
) -> list[TorchStage]:
    """The stages of `model`, made of the operations that fxpar captures; the model is not changed.

    The modules refer to the parameters of `model` itself, under the same names.

    Args:
        batch: the forward's arguments by keyword; the first dim of each is the batch.
        boundaries: paths of the modules that open the second and later stages.

    Raises as `split_stages` does. Models with buffers, and with parameters shared between stages, are not supported.
    """
    capture = _capture(model, batch, microbatches)
    graphs = split_stages(capture, boundaries)
    _check_supported(capture, graphs)
    assert capture.loss is not None, "the forward returns no loss"
    loss = Port(PortKind.RESULT, str(capture.loss))
    passing = [_edges_between(graphs, stage) for stage in range(len(graphs))]
    likes = _likes(graphs)
    parameters = dict(model.named_parameters())
    stages = []
    for graph, arriving, leaving in zip(graphs, passing, [*passing[1:], [loss]], strict=True):
        module = _Writer(graph, arriving, list(batch), parameters).write(leaving)
        stages.append(TorchStage(module, *(tuple(likes[port] for port in ports) for ports in (arriving, leaving))))
    return stages


def _capture(model: nn.Module, batch: Mapping[str, Tensor], microbatches: int) -> Capture:
    """The captured forward of a copy on the meta device: a capture changes the classes of a model's modules."""
    shapes: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    double = copy.deepcopy(model, shapes)
    install(Distribution.of(double, Mesh(), microbatches=microbatches))
    return capture_forward(double, "cpu", batch)


def _check_supported(capture: Capture, stages: Sequence[StageGraph]) -> None:
    used = [port for stage in stages for port in stage.inputs]
    assert all(port.kind is not PortKind.BUFFER for port in used), "the model has buffers"
    parameters = [port for port in used if port.kind is PortKind.PARAMETER]
    shared = {str(port) for port in parameters if parameters.count(port) > 1}
    assert not shared, f"several stages use {shared}: torch.distributed.pipelining does not add up their gradients"
    not_first = {str(port) for port in used if port.kind is PortKind.INPUT and capture.batch_dims.get(port) != 0}
    assert not not_first, f"{not_first} are not split into microbatches along their first dim"


def _edges_between(stages: Sequence[StageGraph], later: int) -> list[Port]:
    """The values computed before stage `later` and used in it or after it, in the order of their computation."""
    used = {port for stage in stages[later:] for port in stage.inputs}
    return [port for stage in stages[:later] for port in stage.outputs if port in used]


def _likes(graphs: Sequence[StageGraph]) -> dict[Port, Tensor]:
    """For each output of a stage, a contiguous meta tensor of its shape."""
    likes = {}
    for graph in graphs:
        for port, node in zip(graph.outputs, returned(graph.module), strict=True):
            value = example(node)
            likes[port] = torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)
    return likes


class _Writer:
    """Rewrites a stage's graph with parameters as attributes, and edges and inputs as arguments."""

    def __init__(
        self, stage: StageGraph, arriving: Sequence[Port], names: Sequence[str], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self._stage, self._graph = stage, fx.Graph()
        self._inputs = dict(zip(stage.inputs, stage.module.graph.find_nodes(op="placeholder"), strict=True))
        self._attributes: dict[str, object] = {}
        self._values: dict[Port, fx.Node] = {}
        for port in arriving:
            self._values[port] = self._graph.placeholder(f"edge_{port.name}")
        for port in self._inputs:
            if port.kind is PortKind.INPUT:
                self._values[port] = self._graph.placeholder(names[int(port.name)])
        for port in self._inputs:
            if port.kind is PortKind.PARAMETER:
                self._attributes[port.name] = parameters[port.name]
                self._values[port] = self._graph.get_attr(port.name)

    def write(self, leaving: Sequence[Port]) -> fx.GraphModule:
        """The module that returns `leaving`."""
        copies = {node: self._values[port] for port, node in self._inputs.items()}
        for node in self._stage.module.graph.nodes:
            if node in copies or node.op == "output":
                continue
            if node.op in ("get_attr", "call_module"):
                self._attributes[node.target] = operator.attrgetter(node.target)(self._stage.module)
            # Border markers copy what leaves a stage, which torch's stages do not need.
            is_copy = is_marker(node, "border")
            copies[node] = copies[node.args[0]] if is_copy else self._graph.node_copy(node, copies.__getitem__)
        made = {
            port: copies[node] for port, node in zip(self._stage.outputs, returned(self._stage.module), strict=True)
        }
        given = [self._contiguous(made[port]) if port in made else self._values[port] for port in leaving]
        is_last = leaving[0].kind is PortKind.RESULT
        self._graph.output(given[0] if is_last else tuple(given))
        return fx.GraphModule(self._attributes, self._graph)

    def _contiguous(self, made: fx.Node) -> fx.Node:
        """A contiguous value, as gloo requires; torch does not ensure that."""
        return self._graph.call_method("contiguous", (made,))
