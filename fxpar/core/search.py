"""Schedule the transfers between hosts: csrc/reshard_search.cpp."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import POINTER, Array, Structure, byref, c_int, c_int32, c_int64, c_uint64
from fractions import Fraction
from functools import cache
from itertools import accumulate, chain
from typing import Any, TypeAlias

from fxpar.core.library import function

SEARCHES = ("naive", "balance", "depth_first", "greedy", "best")
"""In the order of FxparSearch."""

HostsByFlow: TypeAlias = Sequence[Sequence[int]]
"""For every flow, some hosts; hosts are arbitrary integers."""


def find_slots(
    num_bytes: Sequence[int], senders: HostsByFlow, receivers: HostsByFlow, *, search: str, seed: int
) -> tuple[list[int], list[int]]:
    """The chosen sender of every flow, and its start in bytes; all three sequences have an item per flow.

    The bytes of all flows, times the number of hosts, must be at most 2**50. `search` is one of SEARCHES; `seed` is
    taken modulo 2**64.
    """
    hosts = _hosts(senders, receivers)
    chosen, starts = (c_int32 * len(num_bytes))(), (c_int64 * len(num_bytes))()
    flows = _flows(hosts, num_bytes, senders, receivers)
    status = _search()(byref(flows), SEARCHES.index(search), seed, chosen, starts)
    assert status == 0, f"not flows: {num_bytes} bytes from {senders} to {receivers}"
    return [hosts[number] for number in chosen], list(starts)


def find_bound(num_bytes: Sequence[int], senders: HostsByFlow, receivers: HostsByFlow) -> Fraction:
    """A lower bound of the makespan of any transfers, in bytes. Arguments as in `find_slots`."""
    bound = (c_int64 * 2)()
    flows = _flows(_hosts(senders, receivers), num_bytes, senders, receivers)
    status = _bound()(byref(flows), bound)
    assert status == 0, f"not flows: {num_bytes} bytes from {senders} to {receivers}"
    return Fraction(*bound)


class _Flows(Structure):
    """FxparFlows. It holds references to the arrays that its pointers were set to."""

    _fields_ = (
        ("num_hosts", c_int32),
        ("num_flows", c_int32),
        ("num_bytes", POINTER(c_int64)),
        ("sender_ends", POINTER(c_int32)),
        ("senders", POINTER(c_int32)),
        ("receiver_ends", POINTER(c_int32)),
        ("receivers", POINTER(c_int32)),
    )


def _hosts(senders: HostsByFlow, receivers: HostsByFlow) -> list[int]:
    """All hosts in ascending order; the core identifies hosts by their positions in it."""
    return sorted({host for hosts in (*senders, *receivers) for host in hosts})


def _flows(hosts: Sequence[int], num_bytes: Sequence[int], senders: HostsByFlow, receivers: HostsByFlow) -> _Flows:
    assert len(num_bytes) == len(senders) == len(receivers), "every flow has a size, senders and receivers"
    assert all(abs(size) < 2**63 for size in num_bytes), f"sizes do not fit in 64 bits: {num_bytes}"
    number = {host: position for position, host in enumerate(hosts)}

    def rows(by_flow: HostsByFlow) -> tuple[Array[c_int32], Array[c_int32]]:
        return _int32s(accumulate(map(len, by_flow))), _int32s(number[host] for host in chain.from_iterable(by_flow))

    sizes = (c_int64 * len(num_bytes))(*num_bytes)
    return _Flows(len(hosts), len(num_bytes), sizes, *rows(senders), *rows(receivers))


def _int32s(numbers: Iterable[int]) -> Array[c_int32]:
    values = tuple(numbers)
    return (c_int32 * len(values))(*values)


@cache
def _search() -> Any:
    parameters = POINTER(_Flows), c_int, c_uint64, POINTER(c_int32), POINTER(c_int64)
    return function("fxpar_reshard_search", c_int, *parameters)


@cache
def _bound() -> Any:
    return function("fxpar_reshard_bound", c_int, POINTER(_Flows), POINTER(c_int64))
