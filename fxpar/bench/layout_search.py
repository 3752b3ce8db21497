"""How long `propagate_layouts` searches: whole 12-layer models on one axis, as one stage."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

from fxpar.bench.models import hugging_face_model
from fxpar.bench.report import Bar, Row, Say, at_most
from fxpar.capture import capture_forward
from fxpar.hints import resolve_hints
from fxpar.launch import run_ranks
from fxpar.layouts.pins import Pins
from fxpar.mesh import Mesh
from fxpar.model.distribution import Distribution, logical_parameters
from fxpar.model.logical import install
from fxpar.model.pin_parameters import pin_parameters
from fxpar.passes.decompose_for_sharding import decompose_for_sharding
from fxpar.passes.outlook import foresee
from fxpar.passes.propagate_layouts import propagate_layouts
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from fxpar.planner.prices import prices_of

GOAL_S = 5.0
NUM_LAYERS = 12
LENGTH = 512


def layout_search(say: Say) -> Iterator[tuple[Row, Bar]]:
    """The median of three searches for each model."""
    for name in ("gpt2", "llama"):
        say(f"choosing the layouts of {name} with {NUM_LAYERS} layers")
        (row,) = run_ranks(1, search_layouts, name, NUM_LAYERS)
        yield row, at_most(f"propagate_layouts of {name}, seconds", float(row["propagate_layouts_s"]), GOAL_S)


def search_layouts(name: str, layers: int, repeats: int = 3) -> dict[str, str | int | float]:
    """Search the layouts of a model's joint graph over x=2; runs in a process of its own."""
    subject = hugging_face_model(name, layers, batch=1, length=LENGTH)
    mesh = Mesh(x=2)
    parameters = logical_parameters(subject.model)
    shapes = {fqn: parameter.shape for fqn, parameter in parameters.items()}
    distribution = Distribution(subject.model, mesh, resolve_hints(subject.hints, shapes, []), parameters, 1, {})
    install(distribution)
    (stage,) = split_stages(capture_forward(subject.model, "cpu", subject.inputs), [])
    joint = trace_joint(stage, with_backward=True)
    pins = Pins(pin_parameters(joint, distribution, []))
    joint = replace(joint, module=decompose_for_sharding(joint.module, foresee(joint, mesh, pins)))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        propagate_layouts(joint, mesh, pins, prices_of(mesh), microbatches=1)
        seconds.append(time.perf_counter() - start)
    return {
        "model": name,
        "layers": layers,
        "axis_x": mesh.x,
        "tokens": LENGTH,
        "operations": len(joint.module.graph.nodes),
        "propagate_layouts_s": statistics.median(seconds),
    }
