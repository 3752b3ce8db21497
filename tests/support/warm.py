"""Imported by the servers that ranks are forked from: what each of them would set up first, it sets up once for all.

PyTorch's compiler makes tables and imports modules when it is first used; that takes as long as training a small model.
Nothing here may start a thread, which would not survive the fork.
"""

from __future__ import annotations

import torch
import tqdm

from fxpar.lowering import lower
from tests.lowering.graphs import traced
from tests.support.fake_mesh import fake_mesh
from tests.support.garbage import collect_garbage_seldom
from tests.support.parity import Run, check_run


def _start_autograd() -> None:
    """A first backward starts a thread for each GPU; behind the first fake tensor, even for GPUs that are not there.

    Without a GPU, `FakeTensorMode` of a PyTorch built for CUDA registers stand-ins for its devices.
    """
    torch.ones((), requires_grad=True).backward()


def _train() -> None:
    """A step of a model of ours, and one of a model of Transformers."""
    with fake_mesh() as mesh:
        for subject in ("chain", "gpt2"):
            check_run(Run(subject, {}, 2, schedules=("1f1b",), steps=1), mesh)
    lower("inductor")(traced(lambda x: [x + 1], torch.ones(3)))
    torch.compiler.reset()


tqdm.tqdm.monitor_interval = 0  # of Inductor's progress bar: the monitor is a thread
_start_autograd()
_train()
collect_garbage_seldom()
