"""A U-shaped network in four stages: what crosses between them, and that it computes what the unsplit network does."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.graph.shared_values import recomputable
from fxpar.ir.capture import Capture
from fxpar.ir.trace_forward import capture_forward
from fxpar.model.distribution import distribution_of
from fxpar.passes.insert_reshards import insert_reshards
from fxpar.resharding.pipeline import Pipeline
from tests.support.fake_mesh import fake_mesh
from tests.support.parity import SUBJECTS
from tests.support.whole_pipeline import run_pipeline

SUBJECT = SUBJECTS["unet"]
EXACT = {"rtol": 1e-10, "atol": 1e-14}


def exact_model() -> nn.Module:
    """With so many digits that sums in another order hardly differ."""
    torch.manual_seed(0)
    return SUBJECT.build(1).double()


def exact_batch() -> list[Tensor]:
    torch.manual_seed(1)
    return [value.double() if value.is_floating_point() else value for value in SUBJECT.make_batch(2).values()]


@functools.cache  # each takes seconds, and nothing changes it
def planned(num_stages: int) -> tuple[Capture, Pipeline]:
    """The capture of the model, and the pipeline of its stages, each on a rank."""
    torch.compiler.reset()
    model = exact_model()
    with fake_mesh(pipe=num_stages) as mesh:
        fxpar.distribute(model, mesh, stages=SUBJECT.boundaries(num_stages), example_inputs=exact_batch())
        capture = capture_forward(model, "cpu", exact_batch())
        distribution = distribution_of(capture.model)
        stages = distribution.planned[capture.signature]()
        return capture, insert_reshards(stages, mesh, distribution.final_plan.parameters)


def test_a_skip_connection_moves_once_from_its_stage_to_its_readers_alone() -> None:
    _, pipeline = planned(4)
    ways = sorted((edge.source, edge.targets) for edge in pipeline.edges)
    assert ways == [
        (0, (1, 2)),  # the first downsampled image: to the next level, and to the way up
        (0, (1, 2, 3)),  # the embedded times
        (0, (3,)),  # what the first level hands to the last
        (0, (3,)),
        (1, (2,)),
        (1, (2,)),
        (2, (3,)),
    ]
    forth = [reshard for reshard in pipeline.reshards if not reshard.crossing.is_gradient]
    back = [reshard for reshard in pipeline.reshards if reshard.crossing.is_gradient]
    assert sorted((reshard.crossing.source, reshard.crossing.targets) for reshard in forth) == ways, (
        "one transfer per edge"
    )
    assert sorted((*reshard.crossing.targets, reshard.crossing.source) for reshard in back) == sorted(
        (source, reader) for source, readers in ways for reader in readers
    ), "one gradient from every reader"
    for reshard in pipeline.reshards:
        receivers = {rank for task in reshard.plan.tasks for rank in task.receivers}
        assert receivers == set(reshard.crossing.targets), reshard


def test_nothing_that_depends_on_inputs_alone_crosses() -> None:
    capture, pipeline = planned(4)
    order = [node for node in capture.module.graph.nodes if node not in capture.sources]
    from_inputs = {node.name for node in recomputable(order, capture.sources)}
    assert from_inputs, "the sinusoids of the times"
    assert not from_inputs & {edge.name for edge in pipeline.edges}


@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_stages_together_give_the_gradients_of_the_model(num_stages: int) -> None:
    """Those of values that several stages read are sums of what each of them sends."""
    model = exact_model()
    loss = model(*exact_batch())
    loss.backward()
    _, pipeline = planned(num_stages)
    (found,), gradients, _ = run_pipeline(pipeline, model, exact_batch())
    torch.testing.assert_close(found, loss.detach(), **EXACT)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, wanted[name], rtol=1e-10, atol=1e-14, msg=lambda text, n=name: f"{n}: {text}"
        )
