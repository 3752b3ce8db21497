"""Every rank has a connection to rank 0, and nobody else."""

from __future__ import annotations

import socket
import warnings
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from fxpar.world import peer_connections
from fxpar.world.launch import run_ranks

connect = peer_connections._connect


def connect_after_strangers(address: Any) -> socket.socket | None:
    """As any rank connects, after one that says nothing and one that says something else."""
    socket.create_connection((address.hosts[-1], address.port)).close()
    with socket.create_connection((address.hosts[-1], address.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: rank-0\r\n\r\n")
        return connect(address)


def be_unable_to_connect(address: Any) -> None:
    """As a rank that no address leads to rank 0."""


def connections_of(connect_last: Any) -> tuple[list[int], list[str]]:
    """The ranks that this one has connections to, and what it warns of; the last rank connects in another way."""
    peer_connections._CONNECT_S = 1.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_last = dist.get_rank() == dist.get_world_size() - 1
        with patch.object(peer_connections, "_connect", connect_last if is_last else connect):
            connections = peer_connections.open_connections()
    return sorted(connections), [str(warning.message) for warning in caught]


def test_strangers_are_left_out() -> None:
    assert run_ranks(3, connections_of, connect_after_strangers) == [([1, 2], []), ([0], []), ([0], [])]


def test_a_rank_that_cannot_connect_is_warned_of() -> None:
    (first, [missing]), (second, nothing), (last, [cannot]) = run_ranks(3, connections_of, be_unable_to_connect)
    assert (first, second, last) == ([1], [0], [])
    assert missing.startswith("ranks [2] did not connect to port "), missing
    assert cannot.startswith("cannot connect to rank 0 at port "), cannot
    assert nothing == []
