"""What stages of one rank give each other arrives as their graphs expect it, in any order, and is then let go."""

from __future__ import annotations

import weakref

import torch

from fxpar.transport.buffers import Piece
from fxpar.transport.local_transport import LocalTransport


def test_a_value_that_lies_as_expected_is_not_copied() -> None:
    value = torch.arange(6.0).reshape(2, 3)
    transport = LocalTransport(Piece.like(value))
    transport.complete(transport.send(value, 0))
    assert transport.wait(transport.post_receive(0)) is value


def test_a_value_that_lies_otherwise_is_copied_into_the_strides_expected() -> None:
    value = torch.arange(6.0).reshape(2, 3)
    transport = LocalTransport(Piece.like(value.t().contiguous().t()))
    transport.send(value, 0)
    found = transport.wait(transport.post_receive(0))
    assert found.stride() == (1, 2)
    assert torch.equal(found, value)


def test_microbatches_are_told_apart_whatever_their_order() -> None:
    values = [torch.full((2,), float(microbatch)) for microbatch in range(3)]
    transport = LocalTransport(Piece.like(values[0]))
    receipts = [transport.post_receive(microbatch) for microbatch in range(3)]
    for microbatch in (2, 0, 1):
        transport.send(values[microbatch], microbatch)
    assert [transport.wait(receipts[microbatch]) is values[microbatch] for microbatch in (1, 2, 0)] == [True] * 3


def test_a_value_is_not_kept_once_it_was_taken() -> None:
    value = torch.ones(2)
    transport, ref = LocalTransport(Piece.like(value)), weakref.ref(value)
    transport.send(value, 0)
    del value
    assert ref() is not None, "until then, the transport keeps it"
    transport.wait(0)
    assert ref() is None


def test_what_a_failed_step_left_can_be_forgotten() -> None:
    value = torch.ones(2)
    transport, ref = LocalTransport(Piece.like(value)), weakref.ref(value)
    transport.send(value, 0)
    del value
    transport.forget()
    assert ref() is None
