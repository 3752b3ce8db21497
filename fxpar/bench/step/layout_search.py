"""The time of `propagate_layouts`: whole 12-layer models as one stage, on one mesh of one axis and two of two axes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from fxpar.bench.measure.interleaved import Timing, all_disturbed, disturbance, least_disturbed, median_ms
from fxpar.bench.measure.processors import ProcessorUse, share_of_others
from fxpar.bench.models import hugging_face_model
from fxpar.bench.report import Bar, Row, Say, at_most
from fxpar.costs.prices import prices_of
from fxpar.ir.trace_forward import capture_forward
from fxpar.layouts.pins import Pins
from fxpar.model.distribution import Distribution
from fxpar.model.logical import install
from fxpar.passes.decompose.norm_policy import choose_norm_policy
from fxpar.passes.decompose_for_sharding import decompose_for_sharding
from fxpar.passes.logical_random import logical_random
from fxpar.passes.pins.pin_parameters import pin_parameters
from fxpar.passes.propagate_layouts import propagate_layouts
from fxpar.passes.split_stages import split_stages
from fxpar.passes.trace_joint import trace_joint
from fxpar.world.launch import run_ranks
from fxpar.world.mesh import Mesh

MESHES = {"x": Mesh(x=2), "y and x": Mesh(y=2, x=2), "y=2 and x=4": Mesh(y=2, x=4)}
"""The smallest meshes of one axis and of two, and one whose axes differ in size, so that mirrored choices differ."""

GOALS_S = {"x": 5.0, "y and x": 20.0, "y=2 and x=4": 20.0}
"""Seconds that are acceptable at every start. Sizes of axes add no choices, so the larger mesh may take no longer."""

NUM_LAYERS, LENGTH = 12, 512
"""The sizes of the smallest published GPT-2, with half its context, since the length only changes prices."""

REPEATS, TRIES = 3, 2
"""A search is the same work each time: the median of three tolerates an outlier. A disturbed one is repeated once."""


def layout_search(say: Say) -> Iterator[tuple[Row, Bar]]:
    """The median time of a search for each model: on x with its hints, on two axes without hints."""
    for axes, goal in GOALS_S.items():
        for name in ("gpt2", "llama"):
            say(f"choosing the layouts of {name} with {NUM_LAYERS} layers over {axes}")
            ((row, timings),) = run_ranks(1, search_layouts, name, NUM_LAYERS, axes, timeout_s=600)
            found, disturbed = median_ms(timings) / 1e3, all_disturbed(timings)
            bar = at_most(f"propagate_layouts of {name} over {axes}, seconds", found, goal, disturbed=disturbed)
            yield {**row, "propagate_layouts_s": found, **disturbance(timings)}, bar


def search_layouts(
    name: str, layers: int, axes: str = "x", repeats: int = REPEATS, tries: int = TRIES
) -> tuple[Row, list[Timing]]:
    """Search the layouts of a model's joint graph over the mesh of `axes`; runs in a process of its own."""
    subject = hugging_face_model(name, layers, batch=1, length=LENGTH)
    mesh = MESHES[axes]
    hints = subject.hints if axes == "x" else {}
    distribution = Distribution.of(subject.model, mesh, hints)
    install(distribution)
    (stage,) = split_stages(capture_forward(subject.model, "cpu", subject.inputs), [])
    joint = logical_random(trace_joint(stage, with_backward=True))
    pins = Pins(pin_parameters(joint, distribution, []))
    joint = replace(joint, module=decompose_for_sharding(joint.module, choose_norm_policy(joint, mesh, pins)))

    def search() -> Timing:
        before, start = ProcessorUse.now(), time.perf_counter()
        propagate_layouts(joint, mesh, pins, prices_of(mesh), microbatches=1)
        seconds = time.perf_counter() - start
        return Timing(seconds, share_of_others([ProcessorUse.now().since(before)]))

    timings = [least_disturbed(search, tries) for _ in range(repeats)]
    row: Row = {
        "model": name,
        "layers": layers,
        "axis_x": mesh.x,
        "axis_y": mesh.y,
        "tokens": LENGTH,
        "operations": len(joint.module.graph.nodes),
    }
    return row, timings
