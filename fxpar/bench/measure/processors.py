"""The processor time that other processes take while something is measured; on Linux only."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """Processor seconds since some start: of this process, of the whole machine, and the total that was available."""

    own_s: float
    all_s: float
    total_s: float

    @classmethod
    def now(cls, *, with_children: bool = False) -> ProcessorUse:
        """The use since the machine or this process started; `with_children` counts its descendants as its own."""
        own_s = time.process_time() + (_seconds_of_descendants(os.getpid()) if with_children else 0.0)
        total, *_ = Path("/proc/stat").read_text().splitlines()
        # The kernel's own work for the network, in irq and softirq, is left out.
        user, nice, system, _idle, _iowait, _irq, _softirq, stolen, *_ = map(int, total.split()[1:])
        used_s = (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")
        return cls(own_s, used_s, time.monotonic() * (os.cpu_count() or 1))

    def since(self, earlier: ProcessorUse) -> ProcessorUse:
        """The use from `earlier` to this."""
        return ProcessorUse(self.own_s - earlier.own_s, self.all_s - earlier.all_s, self.total_s - earlier.total_s)


def _seconds_of_descendants(pid: int) -> float:
    """Processor seconds of all descendants of the process `pid`, including those that have ended."""
    fields = {int(path.name): _fields_of(path / "stat") for path in Path("/proc").iterdir() if path.name.isdigit()}
    children: dict[int, list[int]] = {}
    for each, (parent, *_) in fields.items():
        children.setdefault(parent, []).append(each)
    ticks, found = 0, [pid]
    for each in found:  # which grows
        _, own, ended = fields.get(each, (0, 0, 0))
        ticks += ended if each == pid else own + ended
        found += children.get(each, [])
    return ticks / os.sysconf("SC_CLK_TCK")


def _fields_of(stat: Path) -> tuple[int, int, int]:
    """The parent of a process, the ticks that it used, and those of its children that it has waited for."""
    try:
        _, _, rest = stat.read_text().rpartition(") ")  # the name before may have any characters
    except OSError:
        return 0, 0, 0  # the process has ended meanwhile
    _state, parent, *others = rest.split()
    user, system, of_ended_user, of_ended_system = map(int, others[9:13])
    return int(parent), user + system, of_ended_user + of_ended_system


def share_of_others(used: Sequence[ProcessorUse]) -> float:
    """The share of the processors that processes other than those of `used` took; those of `used` ran concurrently."""
    of_these = sum(each.own_s for each in used)
    whole = max(used, key=lambda each: each.total_s)
    return max(0.0, whole.all_s - of_these) / whole.total_s
