"""Imported by the servers that ranks are forked from: what each of them would set up first, it sets up once for all.

PyTorch's compiler makes tables, imports modules and reads sources when it is first used; that takes as long as training
a small model. Nothing here may start a thread, which would not survive the fork.
"""

from __future__ import annotations

import importlib

import torch
from torch._dynamo.funcname_cache import get_funcname

from fxpar.lowering import lower
from tests.lowering.graphs import traced
from tests.support.fake_mesh import fake_mesh
from tests.support.garbage import collect_garbage_seldom
from tests.support.parity import Run, check_run

READ_BY_DYNAMO = (
    "diffusers.models.attention_processor",
    "diffusers.models.embeddings",
    "diffusers.models.unets.unet_2d_blocks",
    "torch.nn.modules.conv",
    "torch.nn.modules.module",
    "transformers.models.llama.modeling_llama",
)
"""What other models are traced through: to name the function of a line, Dynamo reads all of its file once."""


def _start_autograd() -> None:
    """A first backward starts a thread for each GPU; behind the first fake tensor, even for GPUs that are not there.

    Without a GPU, `FakeTensorMode` of a PyTorch built for CUDA registers stand-ins for its devices.
    """
    torch.ones((), requires_grad=True).backward()


def _train() -> None:
    """A step of a model of ours, and one of a model of Transformers, whose sources Dynamo reads."""
    with fake_mesh() as mesh:
        for subject in ("chain", "gpt2"):
            check_run(Run(subject, {}, 2, schedules=("1f1b",), steps=1), mesh)
    lower("inductor")(traced(lambda x: [x + 1], torch.ones(3)))
    torch.compiler.reset()


def _read_sources() -> None:
    for name in READ_BY_DYNAMO:
        path = importlib.import_module(name).__file__
        assert path is not None, f"{name} has no source"
        get_funcname(path, 1)


_start_autograd()
_train()
_read_sources()
collect_garbage_seldom()
