"""insert_reshards: the stages and what moves between them, in one graph, compute what the unsplit model computes."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.compiler import plan_stages
from fxpar.dump import format_graph
from fxpar.errors import UnknownAlgorithmError, UnknownStrategyError
from fxpar.ir.hints import Entry
from fxpar.ir.trace_forward import capture_forward
from fxpar.model.distribution import distribution_of
from fxpar.passes.insert_reshards import insert_reshards
from fxpar.resharding.pipeline import Pipeline
from fxpar.resharding.strategies import STRATEGIES
from tests.support.fake_mesh import fake_mesh
from tests.support.whole_pipeline import run_pipeline


class Net(nn.Module):
    """A value that all later layers read, the last without gradient; a tied weight, a buffer that changes, dropout."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False, dtype=torch.double) for _ in range(4))
        self.layers[2].weight = self.layers[0].weight
        self.layers[3].weight = self.layers[0].weight
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, target: Tensor) -> Any:
        first = self.layers[0](x)
        second = torch.tanh(self.layers[1](first))
        third = nn.functional.dropout(self.layers[2](second) + first, 0.25, self.training)
        self.count.add_((third > 0).sum())
        last = self.layers[3](third) * first.detach()
        return ((last - target) ** 2).mean(), last


TIED, MIDDLE = "layers.0.weight", "layers.1.weight"
OPENERS = ["layers.1", "layers.2", "layers.3"]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, 8, 4, generator=generator, dtype=torch.double)
    return x, target


def pipeline_of(
    boundaries: Sequence[str],
    *,
    hosts: Sequence[int] | None = None,
    layouts: Mapping[str, Sequence[Entry]] | None = None,
    with_backward: bool = True,
    model: nn.Module | None = None,
    inputs: tuple[Tensor, ...] | None = None,
    sizes: Mapping[str, int] | None = None,
    **options: str,
) -> Pipeline:
    """The pipeline of a fresh `Net`, which has a stage more than boundaries."""
    with fake_mesh(pipe=len(boundaries) + 1, **sizes or {}) as mesh:
        torch.compiler.reset()
        placed = replace(mesh, hosts=tuple(hosts or ()))
        model, inputs = model or Net(), inputs or batch()
        fxpar.distribute(model, placed, stages=boundaries, layouts=layouts or {}, example_inputs=inputs)
        capture = capture_forward(model, "cpu", inputs)
        distribution = distribution_of(capture.model)
        stages = plan_stages(capture, distribution, boundaries, with_backward=with_backward)
        return insert_reshards(stages, placed, distribution.final_plan.parameters, **options)


@pytest.mark.parametrize("boundaries", [OPENERS[:1], OPENERS[1:], OPENERS], ids=str)
def test_the_pipeline_gives_the_very_bits_of_the_unsplit_model(boundaries: list[str]) -> None:
    torch.manual_seed(0)
    model = Net()
    expected, wanted, counts = run_pipeline(pipeline_of([], model=copy.deepcopy(model)), model, batch())
    found, gradients, counted = run_pipeline(pipeline_of(boundaries, model=copy.deepcopy(model)), model, batch())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert gradients.keys() == wanted.keys() == {TIED, MIDDLE}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-14, atol=0)  # terms may be added in another order
    assert counted == counts == [torch.tensor(int(counts[0]))] and counts[0] > 0


def test_without_dropout_it_gives_what_the_model_itself_gives() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    (loss, last), gradients, _ = run_pipeline(pipeline_of(OPENERS, model=copy.deepcopy(model)), model, batch())
    expected = model(*batch())
    expected[0].backward()
    torch.testing.assert_close((loss, last), (expected[0].detach(), expected[1].detach()))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("boundaries", [[], OPENERS], ids=str)
def test_it_gives_gradients_of_inputs(boundaries: list[str]) -> None:
    torch.manual_seed(0)
    model, inputs = Net().eval(), batch()
    for each in inputs:
        each.requires_grad_()
    pipeline = pipeline_of(boundaries, model=copy.deepcopy(model), inputs=inputs)
    _, gradients, _ = run_pipeline(pipeline, model, [each.detach() for each in inputs])
    model(*inputs)[0].backward()
    torch.testing.assert_close([gradients["input_0"], gradients["input_1"]], [each.grad for each in inputs])


def test_without_grad_only_values_move() -> None:
    pipeline = pipeline_of(OPENERS, with_backward=False)
    assert not any(reshard.crossing.is_gradient for reshard in pipeline.reshards)
    torch.manual_seed(0)
    model = Net()
    found, gradients, _ = run_pipeline(pipeline, model, batch())
    expected, _, _ = run_pipeline(pipeline_of([]), model, batch())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and not gradients


WHOLE_GRAPH = """\
# forward: 4 reshard between hosts, 896 bytes together
# backward: 7 reshard between hosts, 1280 bytes together
def forward(
    state_0: dict,  # parameters and buffers: 0
    state_1: dict,  # parameters and buffers: 1
    state_2: dict,  # parameters and buffers: 1
    state_3: dict,  # parameters and buffers: 0
    layers_0_weight: f64[4, 4],
    input_0: f64[8, 4],
    input_random: i64[1, 3],
    input_1: f64[8, 4],
    gradient_of_result_0: f64[()],
):

    # stage 0: ranks 0-1 on host 0
    layers_0_weight_on_2_3: f64[2@x*2, 4] = fxpar.reshard(layers_0_weight, 0, [2, 3])  # [2@x*2, 4] -> [2@x*2, 4]; 2 tasks by broadcast: 128 bytes, makespan 128, bound 128 bytes
    stage_0 = self.stage_0(state_0, input_0, layers_0_weight)
    shard: f64[8, 2@x*2] = stage_0[0]
    kept_0 = stage_0[-1]
    shard_on_1_2_3: f64[8, 4] = fxpar.reshard(shard, 0, [1, 2, 3])  # [8, 2@x*2] -> [8, 4], [8, 2@x*2], [8, 2@x*2]; 4 tasks by broadcast: 512 bytes, makespan 512, bound 512 bytes

    # stage 1: ranks 2-3 on host 1
    stage_1 = self.stage_1(state_1, shard_on_1_2_3)
    tanh: f64[8, 2@x*2] = stage_1[0]
    kept_1 = stage_1[-1]
    tanh_on_2: f64[8, 4] = fxpar.reshard(tanh, 1, [2])  # [8, 2@x*2] -> [8, 4]; 2 tasks by broadcast: 256 bytes, makespan 256, bound 256 bytes

    # stage 2: ranks 4-5 on host 2
    stage_2 = self.stage_2(state_2, shard_on_1_2_3, tanh_on_2, layers_0_weight_on_2_3, input_random)
    dropout: f64[8, 2@x*2] = stage_2[0]
    buffers_2 = stage_2[1]
    kept_2 = stage_2[-1]
    dropout_on_3: f64[8, 4] = fxpar.reshard(dropout, 2, [3])  # [8, 2@x*2] -> [8, 4]; 2 tasks inside hosts

    # stage 3: ranks 6-7 on host 2
    stage_3 = self.stage_3(state_3, input_1, shard_on_1_2_3, dropout_on_3, layers_0_weight_on_2_3)
    result_0: f64[()] = stage_3[0]
    result_1: f64[8, 2@x*2] = stage_3[1]
    kept_3 = stage_3[-1]

    # backward of stage 3: ranks 6-7 on host 2
    backward_3 = self.backward_3(kept_3, gradient_of_result_0)
    gradient_3_of_dropout: f64[2@x*4, 4] = backward_3[0]
    gradient_3_of_layers_0_weight: f64[2@x*2, 4] = backward_3[1]
    gradients_3 = backward_3[2]
    gradient_3_of_shard: f64[8, 4] = aten.zeros_like(shard_on_1_2_3)
    gradient_3_of_shard_on_0: f64[8, 2@x*2] = fxpar.reshard(gradient_3_of_shard, 3, [0])  # [8, 2@x*2] -> [8, 2@x*2]; 2 tasks by broadcast: 256 bytes, makespan 256, bound 256 bytes
    gradient_3_of_dropout_on_2: f64[8, 2@x*2] = fxpar.reshard(gradient_3_of_dropout, 3, [2])  # [2@x*4, 4] -> [8, 2@x*2]; 4 tasks inside hosts

    # backward of stage 2: ranks 4-5 on host 2
    backward_2 = self.backward_2(kept_2, gradient_3_of_dropout_on_2)
    gradient_2_of_shard: f64[8, 2@x*2] = backward_2[0]
    gradient_2_of_tanh: f64[8, 2@x*2] = backward_2[1]
    gradient_2_of_layers_0_weight: f64[2@x*2, 4] = backward_2[2]
    gradients_2 = backward_2[3]
    gradient_2_of_shard_on_0: f64[8, 2@x*2] = fxpar.reshard(gradient_2_of_shard, 2, [0])  # [8, 2@x*2] -> [8, 2@x*2]; 2 tasks by broadcast: 256 bytes, makespan 256, bound 256 bytes
    gradient_2_of_tanh_on_1: f64[8, 2@x*2] = fxpar.reshard(gradient_2_of_tanh, 2, [1])  # [8, 2@x*2] -> [8, 2@x*2]; 2 tasks by broadcast: 256 bytes, makespan 256, bound 256 bytes

    # backward of stage 1: ranks 2-3 on host 1
    backward_1 = self.backward_1(kept_1, gradient_2_of_tanh_on_1)
    gradient_1_of_shard: f64[8, 2@x*2] = backward_1[0]
    gradients_1 = backward_1[1]
    gradient_1_of_shard_on_0: f64[8, 2@x*2] = fxpar.reshard(gradient_1_of_shard, 1, [0])  # [8, 2@x*2] -> [8, 2@x*2]; 2 tasks by broadcast: 256 bytes, makespan 256, bound 256 bytes

    # backward of stage 0: ranks 0-1 on host 0
    gradient_of_shard: f64[8, 2@x*2] = aten.add.Tensor(gradient_3_of_shard_on_0, gradient_2_of_shard_on_0)
    gradient_of_shard_1: f64[8, 2@x*2] = aten.add.Tensor(gradient_of_shard, gradient_1_of_shard_on_0)
    backward_0 = self.backward_0(kept_0, gradient_of_shard_1)
    gradient_0_of_layers_0_weight: f64[2@x*2, 4] = backward_0[0]
    gradients_0 = backward_0[1]

    # backward of stage 2: ranks 4-5 on host 2
    gradient_2_of_layers_0_weight_on_0: f64[2@x*2, 4] = fxpar.reshard(gradient_2_of_layers_0_weight, 2, [0])  # [2@x*2, 4] -> [2@x*2, 4]; 2 tasks by broadcast: 128 bytes, makespan 128, bound 128 bytes

    # backward of stage 3: ranks 6-7 on host 2
    gradient_3_of_layers_0_weight_on_0: f64[2@x*2, 4] = fxpar.reshard(gradient_3_of_layers_0_weight, 3, [0])  # [2@x*2, 4] -> [2@x*2, 4]; 2 tasks by broadcast: 128 bytes, makespan 128, bound 128 bytes

    # backward of stage 0: ranks 0-1 on host 0
    gradient_of_layers_0_weight: f64[2@x*2, 4] = aten.add.Tensor(gradient_0_of_layers_0_weight, gradient_2_of_layers_0_weight_on_0)
    gradient_of_layers_0_weight_1: f64[2@x*2, 4] = aten.add.Tensor(gradient_of_layers_0_weight, gradient_3_of_layers_0_weight_on_0)

    return ((result_0, result_1), {'layers.0.weight': gradient_of_layers_0_weight_1}, (gradients_0, gradients_1, gradients_2, gradients_3), (buffers_2,))
"""  # noqa: E501


def test_the_graph_shows_what_moves_and_where_to() -> None:
    """Ranks 4 to 7 are on one host: what stage 2 gets, stage 3 reads there."""
    pipeline = pipeline_of(
        OPENERS, hosts=[0, 0, 1, 1, 2, 2, 2, 2], sizes={"x": 2}, layouts={"layers.0:out": (None, "x")}
    )
    text = format_graph(pipeline.module)
    ast.parse(text)
    assert text == WHOLE_GRAPH


@pytest.mark.parametrize("hosts", [[0] * 6, [0, 1, 1, 1, 1, 1], [0, 0, 1, 2, 2, 1], [0, 0, 1, 0, 1, 2]], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_stage_depends_on_what_a_later_one_asks_for(strategy: str, hosts: list[int]) -> None:
    """Each passes on what it gets to others of its own stage, and of later ones, alone."""
    layouts: Mapping[str, Sequence[Entry]] = {"layers.0:out": (None, "x")}
    pipeline = pipeline_of(OPENERS[1:], hosts=hosts, sizes={"x": 2}, layouts=layouts, strategy=strategy)
    shared = [reshard for reshard in pipeline.reshards if len(reshard.crossing.targets) > 1]
    assert shared
    for reshard in shared:
        for relay in reshard.plan.relays:
            stages = [rank // 2 for rank in relay.path]
            assert stages == sorted(stages), relay
            for stage, readers in zip(stages, relay.readers, strict=True):
                assert all(reader // 2 >= stage for reader in readers), relay


def test_all_batch_shards_are_in_one_plan_but_share_their_parameters() -> None:
    """Half of the values start on each of two hosts; a parameter is on both of them already."""
    pipeline = pipeline_of(["layers.2"], hosts=[0, 1, 2, 2], sizes={"data": 2})
    by_name = {reshard.crossing.name: reshard.plan for reshard in pipeline.reshards}
    value = by_name["the value of edge tanh from stage 0 to stage 1"]
    assert [(task.senders, task.receivers) for task in value.tasks] == [((0,), (2,)), ((1,), (3,))]
    parameter = by_name["the value of parameter layers.0.weight from stage 0 to stage 1"]
    assert [(task.senders, task.receivers) for task in parameter.tasks] == [((0, 1), (2, 3))]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownStrategyError):
        pipeline_of(["layers.2"], strategy="broadkast")
    with pytest.raises(UnknownAlgorithmError):
        pipeline_of(["layers.2"], algorithm="bets")
