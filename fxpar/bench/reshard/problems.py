"""The cases of the paper (Zhuang et al.), scaled to sizes and hosts that a benchmark can emulate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

from fxpar.hardware.network import Network
from fxpar.resharding.cases import ITEMSIZE, NINE_CASES, ONE_TO_MANY, Case
from fxpar.resharding.plan import ReshardPlan, make_plan
from fxpar.resharding.tile import Tiles


@dataclass(frozen=True, slots=True)
class ReshardProblem:
    """A tensor of int32 that some ranks hold and others need; `hosts` has the host of every rank, ascending."""

    name: str
    shape: tuple[int, ...]
    source: Tiles
    destination: Tiles
    hosts: tuple[int, ...]

    def plan(self, strategy: str, network: Network) -> ReshardPlan:
        """The plan of `strategy` by the default algorithm."""
        return make_plan(self.source, self.destination, ITEMSIZE, self.hosts, strategy, network=network)


def nine_cases(num_elements: int) -> list[ReshardProblem]:
    """The nine cases, each with about `num_elements` and its own hosts."""
    return [_on_own_hosts(case, scaled(case.shape, num_elements)) for case in NINE_CASES]


def one_to_many(num_elements: int) -> list[ReshardProblem]:
    """The cases from one device to many, with about `num_elements`, on the same hosts, to be compared in one run.

    The sender is alone on host 0. Each mesh has the first devices of the first hosts after that.
    """
    meshes = [case.destination.mesh for case in ONE_TO_MANY]
    sizes = [max(devices for hosts, devices in meshes if hosts > host) for host in range(max(meshes)[0])]
    firsts = list(accumulate(sizes, initial=1))
    hosts = (0, *(host + 1 for host, size in enumerate(sizes) for _ in range(size)))
    problems = []
    for case, (num_hosts, devices) in zip(ONE_TO_MANY, meshes, strict=True):
        shape = scaled(case.shape, num_elements)
        ranks = [firsts[host] + device for host in range(num_hosts) for device in range(devices)]
        ends = case.source.tiles(shape, [0]), case.destination.tiles(shape, ranks)
        problems.append(ReshardProblem(case.name, shape, *ends, hosts))
    return problems


def scaled(shape: tuple[int, ...], num_elements: int) -> tuple[int, ...]:
    """`shape` with all dims scaled by one factor to about `num_elements`, and rounded to multiples of 8."""
    factor = (num_elements / math.prod(shape)) ** (1 / len(shape))
    return tuple(8 * max(1, round(size * factor / 8)) for size in shape)


def _on_own_hosts(case: Case, shape: tuple[int, ...]) -> ReshardProblem:
    return ReshardProblem(case.name, shape, *replace(case, shape=shape).tiles(), case.hosts)
