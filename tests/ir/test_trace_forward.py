"""Dynamo traces a distributed forward once, as long as its guards hold."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import funcname_cache
from torch._dynamo.callback import callback_handler, on_compile_start

import fxpar
from tests.support.one_process import ATEN, Net, batch, distributed, mesh_of_one_process

mesh = pytest.fixture(mesh_of_one_process)


def _traces(work: Callable[[], Any]) -> int:
    """How many graphs Dynamo captures while `work` runs."""
    torch._dynamo.utils.counters.clear()
    work()
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_a_step_for_the_example_inputs_is_built_from_the_trace_of_distribute(mesh: fxpar.Mesh) -> None:
    model = Net()
    inputs = batch(4)
    assert _traces(lambda: fxpar.distribute(model, mesh, example_inputs=inputs)) == 1
    assert _traces(lambda: torch.compile(model, backend="fxpar", options=ATEN)(*inputs)) == 0


def test_a_forward_that_asks_for_the_dtype_of_its_parameters_is_traced_once(mesh: fxpar.Mesh) -> None:
    """Each layer of T5 does, and the U-Net of diffusers: they are others behind `distribute` than in its trace."""

    class Asking(Net):
        def forward(self, x: Tensor, target: Tensor, scale: float = 1.0) -> Any:
            return super().forward(x.to(next(self.parameters()).dtype), target, scale)

    model, inputs = Asking(), batch(4)
    assert _traces(lambda: fxpar.distribute(model, mesh, example_inputs=inputs)) == 1
    assert _traces(lambda: torch.compile(model, backend="fxpar", options=ATEN)(*inputs)) == 0


def test_dynamo_does_not_compile_the_functions_that_begin_a_trace(mesh: fxpar.Mesh) -> None:
    model, inputs, compiled = Net(), batch(4), []
    fxpar.distribute(model, mesh, example_inputs=inputs)
    note = on_compile_start(compiled.append)
    try:
        torch.compile(model, backend="fxpar", options=ATEN)(*inputs)
    finally:
        callback_handler.remove_start_callback(note)
    assert not compiled


def test_dynamo_reads_sources_for_its_logs_alone(mesh: fxpar.Mesh) -> None:
    def files_read() -> list[str]:
        funcname_cache.clearcache()
        fxpar.distribute(Net(), mesh, example_inputs=batch(4))
        return list(funcname_cache.cache)

    assert not files_read()
    torch._logging.set_logs(trace_call=True)
    try:
        assert inspect.getfile(Net) in files_read()
    finally:
        torch._logging.set_logs()


def test_meta_example_inputs_serve_as_well(mesh: fxpar.Mesh) -> None:
    model = Net()
    fxpar.distribute(model, mesh, example_inputs=[tensor.to("meta") for tensor in batch(4)])
    assert _traces(lambda: torch.compile(model, backend="fxpar", options=ATEN)(*batch(4))) == 0


def test_options_make_steps_of_one_trace(mesh: fxpar.Mesh) -> None:
    model = distributed(mesh)
    inputs = batch(4)
    losses = []

    def run() -> None:
        for options in (ATEN, {**ATEN, "overlap": False}, dict(ATEN)):
            losses.append(torch.compile(model, backend="fxpar", options=options)(*inputs)["loss"].item())

    assert _traces(run) == 1
    assert losses[0] == losses[1] == losses[2]


def test_what_the_trace_depended_on_is_guarded(mesh: fxpar.Mesh) -> None:
    model = Net()
    inputs = batch(4)
    fxpar.distribute(model, mesh, example_inputs=inputs)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    for change, expected in (
        (lambda: None, 0),
        (lambda: setattr(model.norm, "eps", 1.0), 1),
        (lambda: model.eval(), 1),
        (lambda: model.train(), 0),
    ):
        change()
        assert _traces(lambda: step(*inputs)) == expected


def test_an_error_while_a_step_is_built_is_raised_again_by_the_next_call(mesh: fxpar.Mesh) -> None:
    model = distributed(mesh)
    step = torch.compile(model, backend="fxpar", options={**ATEN, "memory_bytes": 1})
    for _ in range(2):
        with pytest.raises(fxpar.errors.MemoryBudgetError):
            step(*batch(4))


def test_building_a_step_draws_none_of_the_users_random_numbers(mesh: fxpar.Mesh) -> None:
    model, inputs = distributed(mesh), batch(4)
    before = torch.get_rng_state()
    torch.compile(model, backend="fxpar")(*inputs)
    assert torch.equal(torch.get_rng_state(), before)
