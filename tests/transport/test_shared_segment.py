"""Ranks of one host see each other's memory, and nobody waits for a process that has ended."""

from __future__ import annotations

import os
import re

import pytest
import torch

from fxpar.errors import PeerLostError, SharedMemoryError
from fxpar.transport.shared_segment import OwnSegment, PeerSegment, SegmentFile
from fxpar.world.hosts import OpenFile
from fxpar.world.launch import run_ranks
from tests.transport.pass_messages import share_what_one_rank_lacks, shared_pages

MIB = 1 << 20


def test_each_rank_of_a_host_maps_the_segments_of_the_others_which_have_no_names() -> None:
    for rank, (peers, read, name) in enumerate(run_ranks(3, shared_pages, timeout_s=60)):
        assert peers == tuple(peer for peer in range(3) if peer != rank)
        assert read == list(peers)
        assert name == "/memfd:fxpar (deleted)"


def test_what_one_rank_cannot_have_no_rank_waits_for() -> None:
    other, lacking = run_ranks(2, share_what_one_rank_lacks, timeout_s=60)
    assert "cannot map" in lacking and "Cannot allocate memory" in lacking
    assert "cannot have the part of every rank" in other and f"on rank 1: {lacking}" in other


def test_two_views_of_a_segment_are_the_same_memory() -> None:
    own = OwnSegment(4 * MIB)
    view = PeerSegment(0, own.found_at)
    block = own.allocate(100)
    own.bytes_at(block, 100).copy_(torch.arange(100))
    assert view.bytes_at(block, 100).tolist() == list(range(100))
    view.signal_at(block).set(5)
    assert own.signal_at(block).value == 5
    assert own.bytes_at(block, 0).shape == (0,)


def test_memory_stays_as_long_as_its_tensors() -> None:
    own = OwnSegment(4 * MIB)
    bytes_ = own.bytes_at(own.allocate(100), 100)
    bytes_.fill_(3)
    del own
    assert bytes_.tolist() == [3] * 100


def test_users_of_a_segment_give_back_what_they_can_before_it_grows() -> None:
    own = OwnSegment(4 * MIB)
    held = [own.allocate(2 * MIB)]
    own.allocate(64)
    own.reclaimers.add(lambda: own.free(held.pop()))
    own.allocate(64)
    assert held, "a cell needs none of that room"
    own.allocate(2 * MIB)
    assert not held


def test_address_space_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(SharedMemoryError, match=rf"cannot map {2**48} bytes.*Cannot allocate memory"):
        OwnSegment(2**48)


@pytest.mark.parametrize("wrong", ["another file", "a process that ended"])
def test_a_segment_that_is_not_there_any_more_is_a_lost_peer(wrong: str) -> None:
    own = OwnSegment(4 * MIB)
    file = own.found_at.file
    if wrong == "another file":
        file = OpenFile(file.pid, 0, file.inode)
    else:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        file = OpenFile(child, file.fd, file.inode)
    with pytest.raises(PeerLostError, match=re.escape("lost rank 3 while moving the place of its shared memory")):
        PeerSegment(3, SegmentFile(file, MIB))
