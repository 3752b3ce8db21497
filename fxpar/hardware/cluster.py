"""Clusters: rates, latencies and memory of the machines that a model runs on, measured or published, in JSON files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fxpar.errors import InvalidClusterError, UnknownClusterError
from fxpar.hardware.network import LOOPBACK, Network

_FOLDER = Path(__file__).parent / "clusters"


USABLE_OF_GPU = 0.9
"""The share of a GPU's memory that tensors may take. The rest is for CUDA's context and kernels, buffers of
communicators, workspaces of matrix products and fragmentation in the allocator. An estimate: no GPU has confirmed it
yet."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Identical hosts of `ranks_per_host` ranks each.

    Rates of links are for one direction; both can be used at once. A host has `interfaces_per_host` network interfaces,
    which its ranks share evenly, and each interface sends `interface_bytes_per_us`. Inside a host every rank sends
    `intra_bytes_per_us`, independent of the others. A latency is the time of a message without its bytes.

    Args:
        name: its usual name.
        source: where the figures come from: a publication, or how they were measured.
        device_type: "cpu" or "cuda".
        matmul_flops_per_us: floating-point operations of a rank's matrix products by the name of a dtype; it must have
            "float32", which is used for all dtypes that are missing.
        memory_bytes_per_us: the memory bandwidth of a rank, reads and writes together.
        memory_bytes: the memory of a rank.
        reduce_scatter_factor: the bytes that the backend's reduce-scatter sends, relative to a ring: 2 if it is
            implemented by an all-reduce.

    Raises:
        InvalidClusterError: a figure is not a positive number.
    """

    name: str
    source: str
    device_type: str
    ranks_per_host: int
    matmul_flops_per_us: Mapping[str, float] = field(hash=False)
    memory_bytes_per_us: float
    memory_bytes: float
    intra_bytes_per_us: float
    intra_latency_us: float
    interface_bytes_per_us: float
    interfaces_per_host: int
    inter_latency_us: float
    reduce_scatter_factor: float = 1.0

    def __post_init__(self) -> None:
        _check(asdict(self), f"the cluster {self.name!r}")

    @property
    def host_bytes_per_us(self) -> float:
        """The rate of all interfaces of a host together."""
        return self.interface_bytes_per_us * self.interfaces_per_host

    @property
    def usable_bytes(self) -> float:
        """The part of a rank's memory that its tensors may take."""
        return self.memory_bytes * (USABLE_OF_GPU if self.device_type == "cuda" else 1.0)

    @property
    def network(self) -> Network:
        """One interface, for transfers between stages: each transfer is sent by one rank."""
        return Network(bytes_per_us=self.interface_bytes_per_us, chunk_us=self.inter_latency_us)

    @property
    def inside(self) -> Network:
        """The link of two ranks of one host, for transfers between stages: on CPUs, shared memory."""
        if self.device_type == "cpu":
            return LOOPBACK
        return Network(bytes_per_us=self.intra_bytes_per_us, chunk_us=self.intra_latency_us)

    def flops_per_us(self, dtype: torch.dtype) -> float:
        """The rate of matrix products in `dtype`."""
        rates = self.matmul_flops_per_us
        return rates.get(str(dtype).removeprefix("torch."), rates["float32"])

    def save(self, path: str | Path) -> None:
        """Write the cluster as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster from JSON, as `save` writes it.

        Raises:
            InvalidClusterError: the file cannot be read, or a figure is missing or impossible.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidClusterError(str(path), "the file", "one JSON object", str(error)) from None
        if not isinstance(found, dict):
            raise InvalidClusterError(str(path), "the file", "one JSON object", found)
        _check(found, str(path))
        return cls(**found)


def _is_positive(found: object) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool) and 0 < found < math.inf


def _is_count(found: object) -> bool:
    return _is_positive(found) and isinstance(found, int)


def _is_name(found: object) -> bool:
    return isinstance(found, str) and found != ""


def _is_device(found: object) -> bool:
    return found in ("cpu", "cuda")


def _are_rates(found: object) -> bool:
    return (
        isinstance(found, dict)
        and "float32" in found
        and all(isinstance(getattr(torch, name, None), torch.dtype) for name in found)
        and all(map(_is_positive, found.values()))
    )


_POSITIVE = "a positive number"
_EXPECTED: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "name": (_is_name, "a name"),
    "source": (_is_name, "where the figures come from"),
    "device_type": (_is_device, "'cpu' or 'cuda'"),
    "ranks_per_host": (_is_count, "a positive integer"),
    "matmul_flops_per_us": (_are_rates, "positive numbers by names of dtypes, 'float32' among them"),
    "memory_bytes_per_us": (_is_positive, _POSITIVE),
    "memory_bytes": (_is_positive, _POSITIVE),
    "intra_bytes_per_us": (_is_positive, _POSITIVE),
    "intra_latency_us": (_is_positive, _POSITIVE),
    "interface_bytes_per_us": (_is_positive, _POSITIVE),
    "interfaces_per_host": (_is_count, "a positive integer"),
    "inter_latency_us": (_is_positive, _POSITIVE),
    "reduce_scatter_factor": (_is_positive, _POSITIVE),
}


def _check(found: Mapping[str, Any], where: str) -> None:
    known = [each.name for each in fields(Cluster)]
    for name in found:
        if name not in known:
            raise InvalidClusterError(where, name, f"one of {', '.join(known)}", name)
    for name, (fits, expected) in _EXPECTED.items():
        if name not in found:
            raise InvalidClusterError(where, name, expected, None)
        if not fits(found[name]):
            raise InvalidClusterError(where, name, expected, found[name])


def cluster_names() -> list[str]:
    """The clusters that come with fxpar."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


@cache
def cluster_named(name: str) -> Cluster:
    """A cluster that comes with fxpar.

    Raises:
        UnknownClusterError: no such name.
    """
    if name not in cluster_names():
        raise UnknownClusterError(name, cluster_names())
    return Cluster.load(_FOLDER / f"{name}.json")


def read_cluster(given: Cluster | str | Path) -> Cluster:
    """`given` itself, the cluster in a file (a Path, or text that ends in ".json"), or the one of that name.

    Raises:
        UnknownClusterError, InvalidClusterError
    """
    if isinstance(given, Cluster):
        return given
    is_file = isinstance(given, Path) or given.endswith(".json")
    return Cluster.load(given) if is_file else cluster_named(str(given))


# Part of a GPU's name -> the published cluster whose hosts have it.
_BY_DEVICE = {"H200": "dgx-h200", "H100": "dgx-h100", "A100": "dgx-a100", "V100": "p3.8xlarge"}


@cache
def default_cluster(device_type: str) -> Cluster:
    """The cluster that is used if none is given: a published one with GPUs of the same name, or "laptop" on CPUs."""
    if device_type != "cuda":
        return cluster_named("laptop")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return cluster_named(next((name for part, name in _BY_DEVICE.items() if part in device), "dgx-a100"))
