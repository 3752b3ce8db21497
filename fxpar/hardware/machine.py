"""The machine that this process runs on."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib.metadata import version
from pathlib import Path


def describe_machine() -> str:
    """The processor, its number of cores, and the versions of Python and torch."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), processor)
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    return f"{processor}, {os.cpu_count()} cores, {platform.system()}, {versions}"


def num_processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def peak_process_bytes() -> int:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
