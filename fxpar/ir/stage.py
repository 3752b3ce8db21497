"""The forms in which passes exchange a stage: its graph, the ports and layouts at its border, its compiled form."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fxpar.ir.layout import Layout
from fxpar.ir.samples import Samples


class PortKind(Enum):
    """What a value at the border of a stage is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    EDGE = "edge"
    RESULT = "result"


@dataclass(frozen=True, slots=True)
class Port:
    """A value at the border of a stage.

    `name` is a fully qualified name for parameters, the name of Dynamo's placeholder for buffers, the position among
    the forward's tensor arguments for inputs (`gradient_name` for gradients of results), the position among its outputs
    for results, and the producing node for edges.
    """

    kind: PortKind
    name: str

    @property
    def identifier(self) -> str:
        """The name as a Python identifier, for dumps."""
        plain = re.sub(r"\W", "_", self.name)
        return plain if self.kind in (PortKind.PARAMETER, PortKind.EDGE) else f"{self.kind.value}_{plain}"

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.name}"


@dataclass(frozen=True, slots=True)
class StageGraph:
    """A stage's forward as a torch-IR graph: one placeholder per input port, one output per output port."""

    index: int
    module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class JointGraph:
    """A stage's ATen joint graph.

    Placeholders are `inputs` then the gradients of `tangents`; outputs are `outputs` then the gradients of
    `gradients`. Outputs of kind BUFFER are the new values of buffers that the forward mutates. A stage of a
    forward-only program has neither tangents nor gradients.
    """

    index: int
    module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    tangents: tuple[Port, ...]
    gradients: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class StageBorder:
    """Layouts of everything that crosses a stage's border, in logical shapes of one microbatch and batch shard."""

    inputs: Mapping[Port, Layout]
    outputs: Mapping[Port, Layout]
    tangents: Mapping[Port, Layout]
    gradients: Mapping[Port, Layout]


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage with a layout on every value, still in logical shapes: what every rank derives for every stage.

    samples: where those of the batch are in the results, if it comes in several parts; none for a result that does not
        depend on the batch.
    """

    joint: JointGraph
    border: StageBorder
    samples: Mapping[Port, Samples] = field(default_factory=dict)


Callables: TypeAlias = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class CompiledSplit:
    """The backward of a stage in two parts, with the positions of the saved values that each takes.

    `inputs(*saved, *tangents)` returns the gradients of edges, in the order of `gradients`, then the carried values.
    `weights(*saved, *carried)` returns all other gradients.
    """

    inputs: Callables
    weights: Callables
    inputs_saved: tuple[int, ...]
    weights_saved: tuple[int, ...]

    def for_inputs(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """Those of the saved values that `inputs` takes."""
        return [saved[position] for position in self.inputs_saved]

    def for_weights(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """Those of the saved values that `weights` takes."""
        return [saved[position] for position in self.weights_saved]


@dataclass(frozen=True, slots=True)
class CompiledGathers:
    """The all-gathers, once per step, of parameters that are stored in shards over z.

    `run(*pieces)` takes this rank's pieces of the parameters `names`, and returns what the stage's graphs take for
    them; collectives may still be writing it. `pieces` are fake tensors like the real ones.
    """

    names: tuple[str, ...]
    run: Callables
    pieces: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class CompiledReductions:
    """The reductions, once per step, of such parameters' gradients: `finish(*start(*sums))` returns this rank's pieces.

    `sums` are sums over microbatches of the gradients that the stage's graphs return for the parameters `names`.
    Between `start` and `finish` collectives are in flight.
    """

    names: tuple[str, ...]
    start: Callables
    finish: Callables


@dataclass(frozen=True, slots=True)
class CompiledStage:
    """A stage of this rank, ready to run on local tensors.

    `forward(*inputs)` returns one tensor per port of `outputs`, then the saved values. `backward(*saved, *tangents)`
    returns one gradient per port of `gradients`; `split` does the same in two parts. Either is None if the schedule
    does not run it, both in a forward-only program, where the saved values are dropped. `input_pieces` and
    `tangent_pieces` are fake tensors like the inputs and the tangents; `gradient_dtypes` are those of the gradients.
    `gathers` and `reductions` run once per step, before and after; None if there are none. The buffers named in
    `buffers_of_step` get their new values once per step, others with each microbatch.
    """

    index: int
    forward: Callables
    backward: Callables | None
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    tangents: tuple[Port, ...]
    gradients: tuple[Port, ...]
    border: StageBorder
    input_pieces: tuple[Tensor, ...]
    tangent_pieces: tuple[Tensor, ...]
    gradient_dtypes: tuple[torch.dtype, ...]
    split: CompiledSplit | None = None
    gathers: CompiledGathers | None = None
    reductions: CompiledReductions | None = None
    buffers_of_step: tuple[str, ...] = ()

    @property
    def without_backward(self) -> CompiledStage:
        """The same forward in a forward-only program, which has no use for the saved values."""
        nothing: dict[str, Any] = dict.fromkeys(("tangents", "tangent_pieces", "gradients", "gradient_dtypes"), ())
        return replace(self, backward=None, split=None, reductions=None, **nothing)

    @property
    def held_pieces(self) -> dict[Port, Tensor]:
        """Fake tensors like this rank's piece of each input; for a gathered parameter, its piece before the gather."""
        held = dict(zip(self.inputs, self.input_pieces, strict=True))
        if self.gathers is not None:
            ports = [Port(PortKind.PARAMETER, name) for name in self.gathers.names]
            held |= zip(ports, self.gathers.pieces, strict=True)
        return held

    @property
    def returned_edges(self) -> list[str]:
        """The edges whose gradients a backward returns, in order."""
        return [port.name for port in self.gradients if port.kind is PortKind.EDGE]
