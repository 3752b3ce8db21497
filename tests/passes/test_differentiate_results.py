"""Of a forward that is given the gradients of its results, the loss has the gradients of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.ir.capture import Capture
from fxpar.ir.result_gradients import gradient_name
from fxpar.ir.stage import PortKind
from fxpar.passes.settle_capture import settle_with_result_gradients
from tests.support.captured_part import CapturedPart
from tests.support.captures import captured

ROWS, LENGTH, WIDTH, CLASSES = 8, 3, 4, 5

Results = Callable[["Scorer", Tensor], Any]


class Scorer(nn.Module):
    """Returns what `results` makes of it and its argument."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self.embed, self.score, self.results = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), results

    def forward(self, x: Tensor) -> Any:
        return self.results(self, x)


def _scores(model: Scorer, x: Tensor) -> Tensor:
    scores: Tensor = model.score(model.embed(x).tanh())
    return scores


RESULTS: Mapping[str, Results] = {
    "scores": _scores,
    "samples in the second dim": lambda model, x: _scores(model, x).transpose(0, 1),
    "tokens": lambda model, x: _scores(model, x).flatten(0, 1),
    "two, of which one is returned twice": lambda model, x: (h := model.embed(x), model.score(h), {"again": h}),
    "a mean and a sum": lambda model, x: (_scores(model, x).mean((0, 1)), _scores(model, x).sum(0), x.argmax(-1)),
    "a parameter": lambda model, x: (_scores(model, x), model.score.weight * 2),
}


def vector_product(capture: Capture, model: nn.Module, x: Tensor, gradients: list[Tensor], num_parts: int) -> Tensor:
    """The mean over the parts of the batch of the losses that `capture` has of these gradients."""
    known = {(PortKind.PARAMETER, name): value for name, value in model.named_parameters()}
    losses = []
    for part in range(num_parts):
        values = known | {(PortKind.INPUT, "0"): x.chunk(num_parts)[part]}
        for each in capture.result_gradients:
            whole = gradients[each.position]
            mine = whole if each.batch_dim is None else whole.chunk(num_parts, each.batch_dim)[part]
            values[PortKind.INPUT, gradient_name(each.position)] = mine
        losses.append(CapturedPart(capture, values).results()[-1])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("results", RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_are_those_of_the_results_of_the_whole_batch(results: Results, microbatches: int) -> None:
    torch.manual_seed(0)
    model, x = Scorer(results), torch.randn(ROWS, LENGTH, WIDTH)
    alone = copy.deepcopy(model)
    returned = torch.utils._pytree.tree_leaves(alone(x))
    gradients = [torch.randn(each.shape) for each in returned]
    trained = [i for i, each in enumerate(returned) if each.requires_grad]
    torch.autograd.backward([returned[i] for i in trained], [gradients[i] for i in trained])
    plain, distribution = captured(copy.deepcopy(model), (x,), microbatches=microbatches)
    capture = settle_with_result_gradients(plain, distribution)
    assert [each.position for each in capture.result_gradients] == trained

    vector_product(capture, model, x, gradients, microbatches).backward()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, msg=lambda m, n=name: f"{n}: {m}")


def test_a_result_whose_parts_do_not_make_up_the_whole_is_left_out() -> None:
    model = Scorer(lambda model, x: (_scores(model, x), _scores(model, x).std(0)))
    plain, distribution = captured(model, (torch.randn(ROWS, LENGTH, WIDTH),), microbatches=2)
    capture = settle_with_result_gradients(plain, distribution)
    assert [each.position for each in capture.result_gradients] == [0]


def test_a_forward_without_results_to_differentiate_stays_as_it_is() -> None:
    model = Scorer(lambda model, x: _scores(model, x).argmax(-1))
    plain, distribution = captured(model, (torch.randn(ROWS, LENGTH, WIDTH),), microbatches=2)
    capture = settle_with_result_gradients(plain, distribution)
    assert capture.loss is None
    assert not capture.result_gradients
