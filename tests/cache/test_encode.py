"""Plans and graphs come back from bytes as they were, and bytes can do no harm."""

from __future__ import annotations

import contextlib
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import fxpar
from fxpar._torch.compiler import FakeTensorMode, make_fx
from fxpar.cache.encode import NotEncodableError, decode, encode
from fxpar.compiler import plan_stages
from fxpar.graph.invariants import Form, check_graph
from fxpar.ir import node_meta
from fxpar.ir.stage import PlannedStage
from tests.support.captures import captured
from tests.support.small_models import GPT

IDS = torch.zeros(2, 8, dtype=torch.int64)


@pytest.fixture(scope="module")
def planned() -> tuple[PlannedStage, ...]:
    capture, distribution = captured(GPT(), (IDS, IDS), mesh=fxpar.Mesh(pipe=2, x=2))
    distribution.placement = (0, 1)
    return plan_stages(capture, distribution, ["blocks.1"])


def test_planned_stages_come_back(planned: tuple[PlannedStage, ...]) -> None:
    again: tuple[PlannedStage, ...] = decode(encode(planned))
    for found, expected in zip(again, planned, strict=True):
        assert found.border == expected.border
        assert (found.joint.inputs, found.joint.gradients) == (expected.joint.inputs, expected.joint.gradients)
        assert found.joint.module.code == expected.joint.module.code
        check_graph(found.joint.module, Form.LAID_OUT, "decode")
        for mine, other in zip(found.joint.module.graph.nodes, expected.joint.module.graph.nodes, strict=True):
            assert (mine.name, node_meta.where(mine)) == (other.name, node_meta.where(other))
            assert node_meta.known_placed(mine) == node_meta.known_placed(other)
            assert node_meta.is_backward(mine) == node_meta.is_backward(other)


def test_a_graph_with_a_constant_computes_what_it_did() -> None:
    table = torch.randn(3, 4)
    module = make_fx(lambda x: (x @ table).t().to(torch.float64) + x.sum())(torch.randn(2, 3))
    x = torch.randn(2, 3)
    assert torch.equal(decode(encode(module))(x), module(x))


def test_fake_tensors_of_one_entry_share_a_mode() -> None:
    with FakeTensorMode():
        made = [torch.empty(2, 3, dtype=torch.bfloat16).t(), torch.empty(4, requires_grad=True)]
    first, second = decode(encode(made))
    assert (first.shape, first.stride(), first.dtype) == (torch.Size([3, 2]), (1, 3), torch.bfloat16)
    assert second.requires_grad
    assert first.fake_mode is second.fake_mode


class _Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("raised.append(1)",)


@pytest.mark.parametrize("given", [_Harmful(), print, torch.nn.Linear(2, 2), torch.zeros(2_000_000), lambda: 0])
def test_other_things_are_not_encoded(given: object) -> None:
    with pytest.raises(NotEncodableError):
        encode([given])


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(_Harmful()),
        pickle.dumps(torch.nn.Linear),
        b"cos\nsystem\n(S'true'\ntR.",
        b"cfxpar.core.library\nCDLL\n(S'libc.so.6'\ntR.",
        b"\x80\x04\x8c\x0ffxpar.cli\x8c\x08sys.exit\x93.",
        b"",
        b"damaged",
    ],
)
def test_bytes_that_name_anything_else_are_refused(data: bytes) -> None:
    with pytest.raises(NotEncodableError):
        decode(data)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_bytes_never_do_more_than_fail(planned: tuple[PlannedStage, ...], data: st.DataObject) -> None:
    whole = bytearray(encode(planned[0].border))
    for _ in range(data.draw(st.integers(1, 5))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(NotEncodableError):
        decode(bytes(whole))


def test_a_graph_is_what_an_entry_says() -> None:
    assert isinstance(decode(encode(fx.GraphModule({}, fx.Graph()))), fx.GraphModule)
