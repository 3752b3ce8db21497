"""How much of this machine's processors others take while something is measured; on Linux alone."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """Seconds since some start: used by this process, used by all of the machine, and those that there were."""

    own_s: float
    all_s: float
    total_s: float

    @classmethod
    def now(cls) -> ProcessorUse:
        """Since the machine started, or this process."""
        total, *_ = Path("/proc/stat").read_text().splitlines()
        # What the kernel does for the network on its own account, in irq and softirq, is left out.
        user, nice, system, _idle, _iowait, _irq, _softirq, stolen, *_ = map(int, total.split()[1:])
        used_s = (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")
        return cls(time.process_time(), used_s, time.monotonic() * (os.cpu_count() or 1))

    def since(self, earlier: ProcessorUse) -> ProcessorUse:
        """From `earlier` to this."""
        return ProcessorUse(self.own_s - earlier.own_s, self.all_s - earlier.all_s, self.total_s - earlier.total_s)


def share_of_others(used: Sequence[ProcessorUse]) -> float:
    """The part of the processors that others took than the processes of `used`, which ran side by side."""
    of_these = sum(each.own_s for each in used)
    whole = max(used, key=lambda each: each.total_s)
    return max(0.0, whole.all_s - of_these) / whole.total_s
