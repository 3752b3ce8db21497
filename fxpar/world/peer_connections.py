"""Connections between rank 0 and every other rank, which the kernel closes when a process ends."""

from __future__ import annotations

import secrets
import socket
import time
import warnings
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch.distributed as dist

from fxpar.environment import first_host
from fxpar.world.lost_peers import naming_lost_peers

_CONNECT_S = 10.0
"""How long a rank tries one address of rank 0."""

_TOKEN_BYTES, _RANK_BYTES = 16, 4

_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""A host that has not answered for 30 s is taken for dead: it cannot close its connections."""


@dataclass(frozen=True, slots=True)
class _Address:
    """Where rank 0 listens: names of its host, to be tried in order, and a secret that both sides prove to have."""

    hosts: tuple[str, ...]
    port: int
    token: bytes

    @property
    def answer(self) -> bytes:
        return self.token[::-1]


def open_connections() -> dict[int, socket.socket]:
    """Connections by rank: on rank 0 to all others, on these to rank 0. A collective of all ranks of a world.

    A star, since all that ranks know of each other's addresses is the host where they meet, which is rank 0's.
    A rank that cannot be connected is left out, with a warning.

    Raises:
        PeerLostError: another rank has ended.
    """
    if dist.get_rank() > 0:
        address = _broadcast(None)
        connection = _connect(address)
        if connection is None:
            warnings.warn(
                f"cannot connect to rank 0 at port {address.port} of {address.hosts}: {_UNWATCHED}", stacklevel=2
            )
        return {} if connection is None else {0: connection}
    others = range(1, dist.get_world_size())
    with _listener(len(others)) as listener:
        hosts = (first_host(), socket.gethostname(), "localhost")
        address = _Address(hosts, listener.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))
        connections = _accept(listener, _broadcast(address), others)
    if missing := sorted(set(others) - set(connections)):
        warnings.warn(f"ranks {missing} did not connect to port {address.port} of {hosts}: {_UNWATCHED}", stacklevel=2)
    return connections


_UNWATCHED = "if a rank ends there, others may wait for it until the timeouts of their process groups"


def _broadcast(address: _Address | None) -> _Address:
    """Rank 0's `address`, on every rank."""
    addresses = [address]
    with naming_lost_peers("the address of rank 0"):
        dist.broadcast_object_list(addresses, src=0)
    (found,) = addresses
    assert found is not None, "rank 0 sends its address"
    return found


def _listener(num_others: int) -> socket.socket:
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=num_others, dualstack_ipv6=True)
    except (OSError, ValueError):  # without IPv6
        return socket.create_server(("", 0), backlog=num_others)


def _accept(listener: socket.socket, address: _Address, others: Collection[int]) -> dict[int, socket.socket]:
    """The connections of the ranks that come before all addresses must have been tried."""
    connections: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _CONNECT_S * (len(address.hosts) + 1)
    while len(connections) < len(others) and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with suppress(OSError), ExitStack() as unless_known:
            connection = unless_known.enter_context(listener.accept()[0])
            rank = _rank_of_caller(connection, address)
            if rank is not None and rank in others:
                connections[rank] = connection
                unless_known.pop_all()
    return connections


def _rank_of_caller(connection: socket.socket, address: _Address) -> int | None:
    connection.settimeout(_CONNECT_S)  # whoever scans for open ports may say nothing
    said = _receive(connection, _TOKEN_BYTES + _RANK_BYTES)
    if not secrets.compare_digest(said[:_TOKEN_BYTES], address.token):
        return None
    connection.sendall(address.answer)
    _keep_alive(connection)
    return int.from_bytes(said[_TOKEN_BYTES:], "big")


def _connect(address: _Address) -> socket.socket | None:
    for host in address.hosts:
        with suppress(OSError), ExitStack() as unless_known:
            connection = unless_known.enter_context(socket.create_connection((host, address.port), _CONNECT_S))
            connection.sendall(address.token + dist.get_rank().to_bytes(_RANK_BYTES, "big"))
            if _receive(connection, _TOKEN_BYTES) == address.answer:
                _keep_alive(connection)
                unless_known.pop_all()
                return connection
    return None


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    """The next `num_bytes`, or fewer if there are no more."""
    with connection.makefile("rb", buffering=0) as file:
        parts = b""
        while len(parts) < num_bytes and (part := file.read(num_bytes - len(parts))):
            parts += part
        return parts


def _keep_alive(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
