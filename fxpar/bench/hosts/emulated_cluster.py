"""Several hosts emulated on this machine, connected by links of a limited rate."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from fxpar.bench.hosts.namespace import NetworkNamespace, enter_network
from fxpar.errors import ClusterUnavailableError
from fxpar.world.launch import run_ranks

T = TypeVar("T")

DEVICE = "eth0"
"""The network interface of every host, inside it."""

# The kernel sends packets in trains. A queue lets a train through at once if it fits into the burst, so long trains
# understate the time of short messages; short trains cost more processor time.
_TRAIN_BYTES = 16384
_BURST_BYTES = 18 << 10
_TRAIN = f"gso_max_size {_TRAIN_BYTES}"
_CLASS = f"burst {_BURST_BYTES} cburst {_BURST_BYTES} quantum {_TRAIN_BYTES}"

# The longest time that a packet waits in the queue of its two hosts.
_WAIT_S = 0.02

# How often the kernel retransmits the unsent data of an ended process. By default it tries for minutes, and a namespace
# exists as long as its last connection.
_LAST_TRIES = ("tee", "/proc/sys/net/ipv4/tcp_orphan_retries"), ("2",)

# The kernel's default may be BBR, whose connections keep probing for their share of a link. If they share both
# directions of links, as between stages, an eighth of the rate stays unused; with Reno, next to nothing does.
_CONGESTION_CONTROL = ("tee", "/proc/sys/net/ipv4/tcp_congestion_control"), ("reno",)

# Real hosts would have processors of their own: here, ranks have priority over other processes.
_HASTE = 10


class EmulatedCluster:
    """`num_hosts` network namespaces, each on a full-duplex link of `rate_mbit` Mbit/s to one switch.

    Both ends of a link are limited, so messages from several hosts to one share the rate of its link, served
    round-robin as by the ports of an InfiniBand switch. The rate counts packets with their headers: TCP leaves 95.6% of
    it to the payload. Messages within a host pass no link.

    A context manager: the hosts exist inside it, and disappear when it or this process ends, even if that is killed.
    Entering takes some hundredths of a second.

    Raises:
        ClusterUnavailableError: on entering, if this machine or user cannot emulate hosts.
    """

    def __init__(self, num_hosts: int, rate_mbit: float = 200) -> None:
        assert 1 <= num_hosts <= 250, f"{num_hosts} hosts: they have the addresses 10.0.0.1 to 10.0.0.250"
        assert rate_mbit > 0, f"{rate_mbit} Mbit/s"
        self.num_hosts = num_hosts
        self.rate_mbit = rate_mbit
        self.hosts: Sequence[NetworkNamespace] = ()
        """Inside the context manager: the namespace of each host, which has the devices `lo` and `DEVICE`."""
        self.switch: NetworkNamespace | None = None
        """Inside the context manager: the namespace in which links meet; that of host 3 is the device `host3`."""
        self._namespaces = ExitStack()

    @classmethod
    def missing(cls) -> str | None:
        """The reason why this machine or user cannot emulate hosts; None if they can."""
        try:
            with cls(1):
                return None
        except ClusterUnavailableError as error:
            return str(error)

    def hosts_of_ranks(self, ranks_per_host: int | Sequence[int]) -> list[int]:
        """The host of each rank; `run` numbers ranks host by host. A single number applies to every host."""
        counts = [ranks_per_host] * self.num_hosts if isinstance(ranks_per_host, int) else ranks_per_host
        assert len(counts) == self.num_hosts, f"ranks for {len(counts)} hosts, but there are {self.num_hosts}"
        return [host for host, count in enumerate(counts) for _ in range(count)]

    def run(
        self,
        ranks_per_host: int | Sequence[int],
        work: Callable[..., T],
        *args: Any,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
    ) -> list[T]:
        """`fxpar.world.launch.run_ranks` on these hosts: the first host has the first ranks, and so on.

        The ranks have a higher priority than other processes, if this process may set it.

        Raises:
            RankFailedError: a rank raised, ended early, or was not done after `timeout_s`.
        """
        networks = [self.hosts[host].path for host in self.hosts_of_ranks(ranks_per_host)]
        environment = {"GLOO_SOCKET_IFNAME": DEVICE, **(environment or {})}
        enter = partial(_enter_host, networks)
        return run_ranks(len(networks), work, *args, environment=environment, enter=enter, timeout_s=timeout_s)

    def __enter__(self) -> EmulatedCluster:
        with ExitStack() as namespaces:
            try:
                self._build(namespaces)
            except subprocess.CalledProcessError as error:
                raise ClusterUnavailableError(f"`{error.cmd[0]}` says: {error.stderr.strip()}") from error
            except OSError as error:
                raise ClusterUnavailableError(str(error)) from error
            self._namespaces = namespaces.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hosts, self.switch = (), None
        self._namespaces.close()

    def _build(self, namespaces: ExitStack) -> None:
        if sys.platform != "linux":
            raise ClusterUnavailableError(f"this is {sys.platform}")
        self.switch, *self.hosts = (
            namespaces.enter_context(closing(NetworkNamespace())) for _ in range(1 + self.num_hosts)
        )
        ends = [f"host{host}" for host in range(self.num_hosts)]
        links = [
            f"link add {end} {_TRAIN} master switch up type veth peer name {DEVICE} {_TRAIN} netns {host.path}"
            for end, host in zip(ends, self.hosts, strict=True)
        ]
        self.switch.run(("ip", "-batch", "-"), ["link add switch up type bridge", *links])
        queues = (_queues(end, "src", self._others(host), self.rate_mbit) for host, end in enumerate(ends))
        self.switch.run(("tc", "-batch", "-"), [command for each in queues for command in each])
        for number, host in enumerate(self.hosts):
            # Without addrgenmode, the kernel would give the device an IPv6 address some time later.
            up = [f"link set {DEVICE} addrgenmode none up", f"address add {_address(number)}/24 dev {DEVICE}"]
            host.run(("ip", "-batch", "-"), ["link set lo up", *up])
            host.run(("tc", "-batch", "-"), _queues(DEVICE, "dst", self._others(number), self.rate_mbit))
            host.run(*_LAST_TRIES)
            host.run(*_CONGESTION_CONTROL)

    def _others(self, host: int) -> list[int]:
        return [other for other in range(self.num_hosts) if other != host]


def _address(host: int) -> str:
    return f"10.0.0.{host + 1}"


def _queues(device: str, end: str, others: Sequence[int], rate_mbit: float) -> list[str]:
    """Commands of `tc` for the end of a link at `device`: a queue for each of the `others`, served round-robin.

    With one queue for all, messages that pass two busy links, as those between inner stages do, would get at most a
    quarter of the rate of messages that pass one.

    Args:
        end: which address of a packet identifies the other host, "src" or "dst".
    """
    commands = [
        f"qdisc add dev {device} root handle 1: htb",
        f"class add dev {device} parent 1: classid 1:ffff htb rate {rate_mbit}mbit {_CLASS}",
    ]
    waiting_bytes = int(rate_mbit * 1e6 / 8 * _WAIT_S) + _BURST_BYTES
    for other in others:
        own = f"rate {rate_mbit / len(others)}mbit ceil {rate_mbit}mbit"
        name = f"1:{other + 1:x}"
        commands += [
            f"class add dev {device} parent 1:ffff classid {name} htb {own} {_CLASS}",
            f"qdisc add dev {device} parent {name} bfifo limit {waiting_bytes}",
            f"filter add dev {device} parent 1: protocol ip u32 match ip {end} {_address(other)}/32 flowid {name}",
        ]
    return commands


def _enter_host(networks: Sequence[str], rank: int) -> None:
    enter_network(networks[rank])
    with suppress(PermissionError):
        os.nice(-_HASTE)
