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
class _Place:
    """Where rank 0 listens: names of its host, to be tried in order, and a secret that both sides prove to have."""

    hosts: tuple[str, ...]
    port: int
    token: bytes

    @property
    def answer(self) -> bytes:
        return self.token[::-1]


def open_lines() -> dict[int, socket.socket]:
    """Connections by rank: on rank 0 to all others, on these to rank 0. A collective of all ranks of a world.

    A star, since all that ranks know of each other's addresses is the host where they meet, which is rank 0's.
    A rank that cannot be connected is left out, with a warning.

    Raises:
        PeerLostError: another rank has ended.
    """
    if dist.get_rank() > 0:
        place = _told(None)
        line = _connect(place)
        if line is None:
            warnings.warn(f"cannot connect to rank 0 at port {place.port} of {place.hosts}: {_UNWATCHED}", stacklevel=2)
        return {} if line is None else {0: line}
    others = range(1, dist.get_world_size())
    with _listener(len(others)) as listener:
        hosts = (first_host(), socket.gethostname(), "localhost")
        place = _Place(hosts, listener.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))
        lines = _accept(listener, _told(place), others)
    if missing := sorted(set(others) - set(lines)):
        warnings.warn(f"ranks {missing} did not connect to port {place.port} of {hosts}: {_UNWATCHED}", stacklevel=2)
    return lines


_UNWATCHED = "if a rank ends there, others may wait for it until the timeouts of their process groups"


def _told(place: _Place | None) -> _Place:
    """Rank 0's `place`, on every rank."""
    places = [place]
    with naming_lost_peers("the address of rank 0"):
        dist.broadcast_object_list(places, src=0)
    (found,) = places
    assert found is not None, "rank 0 sends its address"
    return found


def _listener(num_others: int) -> socket.socket:
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=num_others, dualstack_ipv6=True)
    except (OSError, ValueError):  # without IPv6
        return socket.create_server(("", 0), backlog=num_others)


def _accept(listener: socket.socket, place: _Place, others: Collection[int]) -> dict[int, socket.socket]:
    """The lines of the ranks that come before all addresses must have been tried."""
    lines: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _CONNECT_S * (len(place.hosts) + 1)
    while len(lines) < len(others) and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with suppress(OSError), ExitStack() as unless_known:
            line = unless_known.enter_context(listener.accept()[0])
            rank = _rank_of_caller(line, place)
            if rank is not None and rank in others:
                lines[rank] = line
                unless_known.pop_all()
    return lines


def _rank_of_caller(line: socket.socket, place: _Place) -> int | None:
    line.settimeout(_CONNECT_S)  # whoever scans for open ports may say nothing
    said = _receive(line, _TOKEN_BYTES + _RANK_BYTES)
    if not secrets.compare_digest(said[:_TOKEN_BYTES], place.token):
        return None
    line.sendall(place.answer)
    _keep_alive(line)
    return int.from_bytes(said[_TOKEN_BYTES:], "big")


def _connect(place: _Place) -> socket.socket | None:
    for host in place.hosts:
        with suppress(OSError), ExitStack() as unless_known:
            line = unless_known.enter_context(socket.create_connection((host, place.port), _CONNECT_S))
            line.sendall(place.token + dist.get_rank().to_bytes(_RANK_BYTES, "big"))
            if _receive(line, _TOKEN_BYTES) == place.answer:
                _keep_alive(line)
                unless_known.pop_all()
                return line
    return None


def _receive(line: socket.socket, num_bytes: int) -> bytes:
    """The next `num_bytes`, or fewer if there are no more."""
    with line.makefile("rb", buffering=0) as file:
        parts = b""
        while len(parts) < num_bytes and (part := file.read(num_bytes - len(parts))):
            parts += part
        return parts


def _keep_alive(line: socket.socket) -> None:
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        line.setsockopt(socket.IPPROTO_TCP, option, value)
