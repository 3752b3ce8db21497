"""A program that ends while a thread of gloo still drops tensors ends well."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, time, weakref
import torch
import torch.distributed as dist
from fxpar import init_mesh
from fxpar.world.gloo_threads import _switches_of_sleepers

init_mesh()
while sys.platform == "linux" and len(_switches_of_sleepers() or ()) < 2:
    time.sleep(0.01)  # for ever, if torch calls the threads of a group otherwise: nobody would wait for them
many = [torch.ones(()) for _ in range(50_000)]  # dropping them takes longer than the interpreter needs to end
first = weakref.ref(many[0])
dist.all_reduce_coalesced(many, async_op=True)
del many
while first() is not None:
    time.sleep(0)
"""


def test_tensors_of_the_last_collective_are_dropped_before_the_interpreter_ends() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
