"""What the backend refuses: models, batches, options and optimizers, each with what to do about it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

import fxpar
from fxpar.errors import (
    ArgumentFormatError,
    BlockMaskError,
    ForwardRaisesError,
    GraphBreakError,
    InvalidOptionError,
    InvalidScheduleError,
    MicrobatchError,
    ModeError,
    NotCompiledError,
    NotDistributedError,
    RecompileLimitError,
    StaleOptimizerError,
    UnknownAlgorithmError,
    UnknownLoweringError,
    UnknownOptionError,
    UnknownScheduleError,
    UnknownStrategyError,
    UnsupportedGraphError,
    WrongBackendError,
)
from tests.support.fake_mesh import fake_mesh
from tests.support.flex_model import FlexModel, document_mask, within_window
from tests.support.one_process import ATEN, Net, batch, distributed, mesh_of_one_process

mesh = pytest.fixture(mesh_of_one_process)


def test_a_second_backward_through_one_loss_is_an_error(mesh: fxpar.Mesh) -> None:
    loss = torch.compile(distributed(mesh), backend="fxpar", options=ATEN)(*batch(4))["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="returned once"):
        loss.backward()


def test_a_graph_break_is_an_error_with_its_reason_and_line(mesh: fxpar.Mesh) -> None:
    step = torch.compile(distributed(mesh, trouble="graph break"), backend="fxpar", options=ATEN)
    with pytest.raises(GraphBreakError, match=r"graph_break.*User-inserted.*\n.*one_process.py:\d+ in forward"):
        step(*batch(4))


def test_a_trained_tensor_that_is_not_read_from_a_module_is_an_error(mesh: fxpar.Mesh) -> None:
    class Keeping(Net):
        def __init__(self) -> None:
            super().__init__()
            self.kept = [self.second.weight]

        def forward(self, x: torch.Tensor, target: torch.Tensor, scale: float = 1.0) -> Any:
            return super().forward(x, target)["loss"] + self.kept[0].square().sum()

    told = r"requires grad from L\['self'\]\.kept\[0\]: .*add modules before fxpar.distribute"
    with pytest.raises(UnsupportedGraphError, match=told):
        fxpar.distribute(Keeping(), mesh, example_inputs=batch(4))


def test_what_the_forward_raises_is_told_with_its_line_and_later_steps_are_not_touched(mesh: fxpar.Mesh) -> None:
    told = r"raises ValueError\('an even batch is needed, not 3'\) for these arguments\n.*one_process.py:\d+"
    with pytest.raises(ForwardRaisesError, match=told):
        fxpar.distribute(Net("odd batch"), mesh, example_inputs=batch(3))
    model = distributed(mesh, trouble="odd batch")
    step = torch.compile(model, backend="fxpar", options=ATEN)
    for _ in range(2):
        with pytest.raises(ForwardRaisesError, match=told):
            step(*batch(3))
    with torch.no_grad(), pytest.raises(ForwardRaisesError, match=told):
        step(*batch(3))
    assert step(*batch(4))["loss"].isfinite()
    model.trouble = ""
    assert step(*batch(3))["loss"].isfinite(), "of shapes with which the forward raised before"
    with torch.no_grad():
        assert step(*batch(3))["loss"].isfinite()


def test_an_output_that_hides_its_tensors_is_an_error(mesh: fxpar.Mesh) -> None:
    step = torch.compile(distributed(mesh, trouble="object"), backend="fxpar", options=ATEN)
    with pytest.raises(UnsupportedGraphError, match=r"no tensor was found in what .* returns: .*register_pytree_node"):
        step(*batch(4))


def test_example_inputs_that_microbatches_do_not_divide_are_an_error(mesh: fxpar.Mesh) -> None:
    with pytest.raises(
        MicrobatchError, match=r"argument 'x' has a batch of 6, which 4 microbatches do not divide.*multiple of 4"
    ):
        fxpar.distribute(Net(), mesh, microbatches=4, example_inputs=batch(6))


def test_a_batch_that_a_schedule_of_ones_own_does_not_divide_is_an_error(mesh: fxpar.Mesh) -> None:
    options = {**ATEN, "schedule": [["0F0", "0F1", "0B0", "0B1"]]}
    step = torch.compile(distributed(mesh, microbatches=2), backend="fxpar", options=options)
    with pytest.raises(InvalidScheduleError, match=r"and 2 microbatches: expected .* and 3 microbatches"):
        step(*batch(9))


def test_a_block_mask_of_all_rows_is_an_error_if_microbatches_split_them(mesh: fxpar.Mesh) -> None:
    model = fxpar.distribute(FlexModel(), mesh, microbatches=2)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    tokens, documents = torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 8)
    expected = r"argument 'block_mask' is a BlockMask of 4 rows.*2 microbatches.*expected one row.*inside the forward"
    with pytest.raises(BlockMaskError, match=expected):
        step(tokens, tokens, documents, document_mask(documents))
    one_row = create_block_mask(within_window, None, None, 8, 8, device="cpu")
    torch.testing.assert_close(step(tokens, tokens, documents, one_row), step(tokens, tokens, documents))


def test_a_schedule_of_forwards_evaluates_but_does_not_train(mesh: fxpar.Mesh) -> None:
    options = {**ATEN, "schedule": [["0F0", "0F1"]]}
    step = torch.compile(distributed(mesh, microbatches=2), backend="fxpar", options=options)
    with torch.no_grad():
        assert torch.isfinite(step(*batch(4))["loss"])
    with pytest.raises(InvalidScheduleError, match="rank 0: 0B0 is missing"):
        step(*batch(4))


def test_an_optimizer_made_before_distribute_is_refused_when_it_steps(mesh: fxpar.Mesh) -> None:
    model, other = Net(), nn.Linear(2, 2)
    early, unrelated = torch.optim.AdamW(model.parameters()), torch.optim.SGD(other.parameters(), lr=1.0)
    early.step()
    fxpar.distribute(model, mesh)
    late = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.compile(model, backend="fxpar", options=ATEN)(*batch(4))["loss"].backward()
    unrelated.step()
    late.step()
    with pytest.raises(
        StaleOptimizerError, match=r"AdamW updates.*\(first.weight, first.bias, norm.weight and 3 others"
    ):
        early.step()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("with_grad", [True, False])
def test_another_backend_is_refused_with_the_right_one(mesh: fxpar.Mesh, backend: str, with_grad: bool) -> None:
    step = torch.compile(distributed(mesh), backend=backend)
    with torch.set_grad_enabled(with_grad), pytest.raises(Exception, match='backend="fxpar"') as raised:
        step(*batch(4))
    assert isinstance(getattr(raised.value, "inner_exception", raised.value), WrongBackendError)


def test_a_mode_of_inductor_is_refused(mesh: fxpar.Mesh) -> None:
    step = torch.compile(distributed(mesh), backend="fxpar", mode="max-autotune")
    with pytest.raises(ModeError, match=r"mode 'max-autotune' is one of Inductor's: expected options="):
        step(*batch(4))


def test_a_stance_that_leaves_the_forward_to_python_is_refused(mesh: fxpar.Mesh) -> None:
    step = torch.compile(distributed(mesh), backend="fxpar", options=ATEN)
    for stance in ("force_eager", "eager_on_recompile"):
        with torch.compiler.set_stance(stance), pytest.raises(NotCompiledError, match="only runs compiled"):
            step(*batch(4))


@pytest.mark.parametrize(
    "given", [torch.eye(4).to_sparse(), torch.nested.nested_tensor([torch.ones(3)] * 4, layout=torch.jagged)]
)
def test_a_tensor_that_is_not_dense_is_refused_by_its_name(mesh: fxpar.Mesh, given: Tensor) -> None:
    step = torch.compile(distributed(mesh), backend="fxpar", options=ATEN)
    with pytest.raises(ArgumentFormatError, match=r"argument 'x' is a tensor in the format torch\..*expected dense"):
        step(given, torch.ones(4, 3))


def test_values_beyond_the_recompile_limit_are_an_error_that_names_it(mesh: fxpar.Mesh) -> None:
    model = distributed(mesh)
    step = torch.compile(model, backend="fxpar", options=ATEN)

    def step_with(trouble: str) -> None:
        model.trouble = trouble
        step(*batch(4))

    with torch._dynamo.config.patch(recompile_limit=2):
        step_with("none")
        step_with("little")
        with pytest.raises(RecompileLimitError, match=r"compiled 2 times.*_dynamo.config.recompile_limit"):
            step_with("much")
        step_with("little")


def test_training_a_model_that_is_not_distributed_is_refused_where_a_mesh_divides_models() -> None:
    def run(**sizes: int) -> None:
        torch.compiler.reset()
        with fake_mesh(**sizes):
            torch.compile(nn.Linear(6, 3), backend="fxpar", options=ATEN)(batch(4)[0])

    with pytest.raises(NotDistributedError, match=r"pipe=2.*fxpar.distribute\(model, mesh, ...\)"):
        run(pipe=2)
    with pytest.warns(UserWarning, match="a model to train that is not distributed"):
        run(data=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
        with torch.no_grad():
            run(pipe=2)
    with fake_mesh(pipe=2) as pair:
        kept = fxpar.distribute(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), pair, stages=["1"])
        with pytest.warns(UserWarning, match="a model to train that is not distributed"):
            torch.compiler.reset()
            torch.compile(nn.Linear(6, 3), backend="fxpar", options=ATEN)(batch(4)[0])
        assert kept is not None, "it was there all the time"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dumps": "x"}, UnknownOptionError, "unknown option 'dumps'.*did you mean 'dump'"),
        ({"dump": 3}, InvalidOptionError, "'dump' is 3: expected a directory"),
        ({"lowering": "atn"}, UnknownLoweringError, "unknown lowering 'atn'.*did you mean 'aten'"),
        ({"schedule": "zigzag"}, UnknownScheduleError, "unknown schedule 'zigzag'"),
        ({"strategy": "broadkast"}, UnknownStrategyError, "unknown resharding strategy 'broadkast'.*'broadcast'"),
        ({"algorithm": "gredy"}, UnknownAlgorithmError, "unknown algorithm 'gredy'.*did you mean 'greedy'"),
        ({"results": "first"}, InvalidOptionError, "'results' is 'first': expected 'last_stage', 'all' or 'local'"),
        ({"check_inputs": 3}, InvalidOptionError, "'check_inputs' is 3: expected True or False"),
        (
            {"transfer_timeout_s": 0},
            InvalidOptionError,
            "'transfer_timeout_s' is 0: expected a positive number of seconds",
        ),
    ],
)
def test_bad_options_are_refused(
    mesh: fxpar.Mesh, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    step = torch.compile(distributed(mesh), backend="fxpar", options=options)
    with pytest.raises(error, match=message):
        step(*batch(4))
