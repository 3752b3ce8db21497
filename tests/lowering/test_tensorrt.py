"""Forwards by TensorRT: what goes into engines, what is left to Inductor, and that numbers are those of ATen."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fxpar
from fxpar._torch.compiler import compile_single_device
from fxpar.cache.folder import own_cache
from fxpar.dump import Dump
from fxpar.errors import ForwardOnlyLoweringError, LoweringDeviceError, MissingPackageError
from fxpar.lowering import lower
from fxpar.lowering.tensorrt import requirements
from fxpar.lowering.tensorrt.converters import Converters
from fxpar.lowering.tensorrt.engines import engine_settings
from fxpar.lowering.tensorrt.partition import reason_against, split_for_engines
from fxpar.world.launch import run_ranks
from tests.lowering.graphs import strides, traced, traced_module
from tests.support.one_process import alone, batch, distributed, mesh_of_one_process
from tests.support.small_models import GPT
from tests.support.stand_in_tensorrt import StandIn, stand_in_for_tensorrt

TENSORRT = {"lowering": "tensorrt"}

mesh = pytest.fixture(mesh_of_one_process)


@pytest.fixture
def tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """torch-tensorrt's stand-in, and an empty cache."""
    monkeypatch.setenv("FXPAR_CACHE_DIR", str(tmp_path / "cache"))
    with stand_in_for_tensorrt() as stand_in:
        yield stand_in


def multiply(x: Tensor, weight: Tensor, times: int, scale: float = 0.5) -> Tensor:
    for _ in range(times):
        x = (x @ weight).relu() * scale
    return x


def around_a_sort(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    x = multiply(x, weight, 2)
    return (multiply(x.sort(dim=-1).values, weight.t(), 2),)


def beside_a_sort(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    """What is beside the sort joins what is after it, but not what is before it: that would form a cycle."""
    x = multiply(x, weight, 1)
    beside = multiply(x, weight, 1)
    return (multiply(x.sort(dim=-1).values + beside, weight, 2),)


WEIGHT = torch.rand(3, 3)
SQUARES = torch.rand(2, 3), WEIGHT


def names(nodes: Sequence[fx.Node]) -> list[str]:
    return [node.name for node in nodes]


def compared(function: Callable[..., Any], *inputs: Tensor, dump: Dump | None = None) -> None:
    """Assert that both lowerings return the same numbers and strides."""
    graph = traced(function, *inputs)
    found, expected = lower("tensorrt", dump=dump)(graph)(*inputs), lower("aten")(graph)(*inputs)
    torch.testing.assert_close(found, type(found)(expected))
    assert [each.stride() for each in found] == strides(graph)


def test_converted_ops_are_engines_and_the_others_are_pieces_between_them(tensorrt: StandIn) -> None:
    graph = traced(around_a_sort, *SQUARES)
    obstacle = Converters(engine_settings()).obstacle
    pieces = [list(piece.nodes) for piece in split_for_engines(graph, obstacle)]
    assert list(map(names, pieces)) == [
        ["mm", "relu", "mul", "mm_1", "relu_1", "mul_1"],
        ["sort", "getitem", "getitem_1"],
        ["t", "mm_2", "relu_2", "mul_2", "mm_3", "relu_3", "mul_3"],
    ]
    assert [reason_against(piece, obstacle) for piece in pieces] == [None, "no converter for aten.sort.default", None]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, weight: multiply(x, weight, 1), "fewer than 5 ops"),
        (lambda x, weight: [y := x + weight, y * 2, y * 3, y * 4, y * 5], "no matmul, convolution or attention"),
        (lambda x, weight: multiply(x, weight, 3).double() * 2, r"no converter for aten\.\S* of torch.float64"),
        (lambda x, weight: torch.ops.aten.native_dropout(multiply(x, weight, 3), 0.5, True)[0], "native_dropout"),
    ],
)
def test_what_is_no_engine_says_why(tensorrt: StandIn, function: Callable[..., Any], reason: str) -> None:
    nodes = [node for node in traced(function, WEIGHT, WEIGHT).graph.nodes if node.op == "call_function"]
    found = reason_against(nodes, Converters(engine_settings()).obstacle)
    assert found is not None and re.search(reason, found), found


def test_an_op_that_is_decomposed_into_converted_ops_is_converted(tensorrt: StandIn) -> None:
    graph = traced(torch.addcmul, WEIGHT, WEIGHT, WEIGHT)
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.addcmul.default)
    assert Converters(engine_settings()).obstacle(node) is None
    tensorrt.converted -= {torch.ops.aten.mul.Tensor}
    assert Converters(engine_settings()).obstacle(node) == "aten.addcmul.default"


@pytest.mark.parametrize(("function", "num_engines"), [(around_a_sort, 2), (beside_a_sort, 1)])
def test_numbers_are_those_of_aten_around_an_op_without_converter(
    tensorrt: StandIn, function: Callable[..., Any], num_engines: int
) -> None:
    compared(function, *SQUARES)
    assert len(tensorrt.built) == num_engines


def test_equal_layers_share_an_engine_and_get_their_own_weights(tensorrt: StandIn) -> None:
    def layers(x: Tensor, *weights: Tensor) -> tuple[Tensor]:
        for weight in weights:
            x = multiply(x, weight, 4)
        return (x,)

    compared(layers, *SQUARES, 2 * WEIGHT, 3 * WEIGHT)
    assert len(tensorrt.built) == 1


def test_results_have_the_strides_of_the_graph_though_engines_return_contiguous_tensors(tensorrt: StandIn) -> None:
    compared(lambda x, weight: (multiply(x, weight, 2).t() * 2, multiply(x, weight, 1)[:, 1:]), *SQUARES)
    assert len(tensorrt.built) == 1


def test_a_layer_of_a_model_is_one_engine_and_the_dump_says_why_the_rest_is_none(
    tensorrt: StandIn, tmp_path: Path
) -> None:
    model = GPT(layers=3).requires_grad_(False)
    tokens, targets = torch.randint(96, (2, 12)), torch.randint(96, (2, 12))
    graph, inputs = traced_module(model, tokens, targets), [*model.parameters(), tokens, targets]
    found = lower("tensorrt", dump=Dump(tmp_path, 0))(graph)(*inputs)
    torch.testing.assert_close(found, lower("aten")(graph)(*inputs))
    expected = """
graph  region    ops  runs by   reason
0      region_0    3  Inductor  no converter for aten.embedding.default, aten.arange.default
0      region_1   10  TensorRT  all ops have converters
0      region_2    4  Inductor  no converter for aten._log_softmax.default, aten.nll_loss_forward.default

10 of 17 ops are in 1 TensorRT engines; equal regions count once.
"""
    assert (tmp_path / "rank0" / "01_lower_to_tensorrt.txt").read_text().strip() == expected.strip()


def test_an_engine_that_cannot_be_built_is_a_warning_and_inductor_runs_its_ops(
    tensorrt: StandIn, tmp_path: Path
) -> None:
    tensorrt.failure = RuntimeError("no tactic for mm")
    with pytest.warns(UserWarning, match=r"6 ops in place of .*: the build failed: .*no tactic for mm"):
        compared(around_a_sort, *SQUARES, dump=Dump(tmp_path, 0))
    table = (tmp_path / "rank0" / "01_lower_to_tensorrt.txt").read_text()
    assert table.count("no tactic for mm") == len(tensorrt.options) == 2
    assert "0 of 13 ops are in 0 TensorRT engines" in table


def scaled(scale: float) -> Callable[..., Any]:
    return lambda x, weight: (multiply(x, weight, 2, scale),)


def test_engines_are_kept_for_later_launches_and_told_apart_by_constants(tensorrt: StandIn) -> None:
    compared(scaled(0.5), *SQUARES)
    compared(scaled(0.5), *SQUARES)
    assert (len(tensorrt.built), len(tensorrt.loaded)) == (1, 1)
    compared(scaled(2.0), *SQUARES)
    assert (len(tensorrt.built), len(tensorrt.loaded)) == (2, 1)
    assert not any(options["immutable_weights"] for options in tensorrt.options)
    cache = own_cache()
    assert cache is not None and cache.size()[0] == 2


def test_nothing_is_kept_where_the_cache_is_off(tensorrt: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_CACHE_DIR", "")
    compared(scaled(0.5), *SQUARES)
    compared(scaled(0.5), *SQUARES)
    assert (len(tensorrt.built), len(tensorrt.loaded)) == (2, 0)
    asked = tensorrt.options[0]
    assert asked["custom_engine_cache"] is None and asked["immutable_weights"]


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_engines_compute_in_the_precision_that_pytorch_is_set_to(tensorrt: StandIn, precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        compared(scaled(0.5), *SQUARES)
    finally:
        torch.set_float32_matmul_precision(before)
    (asked,) = tensorrt.options
    assert asked["disable_tf32"] == (precision == "highest")
    assert asked["require_full_compilation"] and asked["use_fp32_acc"]


def test_an_evaluation_of_a_distributed_model_runs_by_engines(
    tensorrt: StandIn, mesh: fxpar.Mesh, tmp_path: Path
) -> None:
    model = distributed(mesh).eval()
    step = torch.compile(model, backend="fxpar", options=TENSORRT | {"dump": str(tmp_path)})
    given = batch(4)
    with torch.no_grad():
        torch.testing.assert_close(step(*given)["loss"], alone().eval()(*given)["loss"])
    (table,) = (tmp_path / "rank0").glob("*_lower_to_tensorrt.txt")
    assert len(tensorrt.built) == 1, table.read_text()
    assert "TensorRT  all ops" in table.read_text()


SPLIT_MLP = {"blocks.*.up.weight": ("x", None), "blocks.*.down.weight": (None, "x")}


def evaluate_in_shards(folder: Path) -> tuple[float, float, int, int]:
    """The losses of a model in two shards by the reference and by engines, and how many of these were built and found.

    Runs on every rank.
    """
    os.environ["FXPAR_CACHE_DIR"] = str(folder / "cache")
    torch.manual_seed(0)
    given = torch.randint(96, (2, 12)), torch.randint(96, (2, 12))
    model = fxpar.distribute(GPT(layers=2), fxpar.init_mesh(x=2), layouts=SPLIT_MLP, example_inputs=given)
    with torch.no_grad(), stand_in_for_tensorrt() as stand_in:
        expected = torch.compile(model, backend="fxpar", options={"lowering": "aten"})(*given)
        found = torch.compile(model, backend="fxpar", options=TENSORRT | {"dump": str(folder)})(*given)
    return float(expected), float(found), len(stand_in.built), len(stand_in.loaded)


def test_collectives_stay_between_engines_and_one_rank_builds_what_several_need(tmp_path: Path) -> None:
    results = run_ranks(2, evaluate_in_shards, tmp_path)
    for expected, found, num_built, num_loaded in results:
        assert found == pytest.approx(expected, rel=1e-5)
        assert num_built + num_loaded > 0
    assert sum(built for *_, built, _ in results) == sum(loaded for *_, loaded in results)
    assert any("all_reduce(" in path.read_text() for path in (tmp_path / "rank0").glob("*.py"))
    (table,) = (tmp_path / "rank0").glob("*_lower_to_tensorrt.txt")
    assert "all_reduce" not in table.read_text()


def test_a_model_that_was_not_distributed_is_left_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def look_up(name: str) -> Callable[..., Any]:
        asked.append(name)
        return lambda module, inputs: module

    monkeypatch.setattr(torch._dynamo, "lookup_backend", look_up)
    compile_single_device(traced(torch.sin, WEIGHT), [WEIGHT], "tensorrt")
    assert asked == ["inductor"]


def test_training_is_an_error_that_says_how_to_train(tensorrt: StandIn, mesh: fxpar.Mesh) -> None:
    step = torch.compile(distributed(mesh), backend="fxpar", options=TENSORRT)
    with pytest.raises(ForwardOnlyLoweringError, match=r"'tensorrt' .* torch.no_grad\(\), and train .* \"inductor\""):
        step(*batch(4))


def test_a_mesh_without_gpus_is_an_error(mesh: fxpar.Mesh) -> None:
    step = torch.compile(distributed(mesh), backend="fxpar", options=TENSORRT)
    with torch.no_grad(), pytest.raises(LoweringDeviceError, match=r"expected a mesh of cuda devices.* of cpu devices"):
        step(*batch(4))


def test_a_missing_package_is_an_error(mesh: fxpar.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "check_cuda", lambda device_type: None)
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    step = torch.compile(distributed(mesh), backend="fxpar", options=TENSORRT)
    with torch.no_grad(), pytest.raises(MissingPackageError, match="pip install torch-tensorrt"):
        step(*batch(4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch-tensorrt has a stand-in")
def test_torch_tensorrt_builds_engines_with_the_numbers_of_aten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch_tensorrt")
    monkeypatch.setenv("FXPAR_CACHE_DIR", str(tmp_path / "cache"))
    model = GPT(layers=3).requires_grad_(False).cuda()
    tokens, targets = torch.randint(96, (2, 2, 12), device="cuda")
    graph, inputs = traced_module(model, tokens, targets), [*model.parameters(), tokens, targets]
    expected = lower("aten")(graph)(*inputs)
    for launch in ("builds", "loads what was kept"):
        found = lower("tensorrt", dump=Dump(tmp_path / launch, 0))(graph)(*inputs)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        table = (tmp_path / launch / "rank0" / "01_lower_to_tensorrt.txt").read_text()
        assert "TensorRT  all ops" in table and "the build failed" not in table, table
