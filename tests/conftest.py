"""Every test process, and each rank that it starts, runs one thread and prints only what matters."""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING

# Before torch and transformers are imported: they read these then.
os.environ.update(
    OMP_NUM_THREADS="1",
    TORCHINDUCTOR_COMPILE_THREADS="1",
    TORCH_CPP_LOG_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
    DIFFUSERS_VERBOSITY="error",
    FXPAR_CHECK="1",
    PYTORCH_NVML_BASED_CUDA_CHECK="1",  # who asks CUDA whether there are GPUs keeps forked ranks from using them
    FXPAR_CACHE_DIR="",  # every test derives what it tests
)

from pathlib import Path

import hypothesis
import pytest
import torch

from fxpar.world.launch import PRELOADED, use_rank_servers
from fxpar.world.rank_servers import RankServers
from tests.support.garbage import collect_garbage_seldom

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

torch.set_num_threads(1)

LONGEST_FIRST = ("whole_step", "bench", "cuda", "lowering")
"""The folders whose tests take longest, on average."""

# The same examples on every run, and no time limit per example: a test's verdict is about the code alone.
hypothesis.settings.register_profile("fxpar", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fxpar")


def pytest_configure(config: pytest.Config) -> None:
    """The processes that tests run in share what ranks are forked from: each server takes seconds to start."""
    if hasattr(config, "workerinput"):  # one of several processes that pytest-xdist runs tests in
        use_rank_servers(RankServers(Path(config.workerinput["rank_servers"])))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Tell a process of pytest-xdist, from the one that starts them all, where the servers are."""
    node.workerinput["rank_servers"] = str(_shared_rank_servers().folder)


@functools.cache
def _shared_rank_servers() -> RankServers:
    return RankServers.own()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that take long come first: whichever comes last leaves other processes of pytest-xdist without work."""
    folders = [config.rootpath / "tests" / name for name in LONGEST_FIRST]
    items.sort(key=lambda item: next((i for i, each in enumerate(folders) if each in item.path.parents), len(folders)))


def pytest_collection_finish() -> None:
    """Where models are to be trained, what that needs first is done once, and not by each rank: it takes seconds."""
    collect_garbage_seldom()
    # Not where ranks use GPUs: what a library does with one as it is imported keeps forked processes from using it.
    if "tests.support.parity" in sys.modules and not torch.cuda.is_available():
        PRELOADED.extend(
            [
                "transformers.models.gpt2.modeling_gpt2",
                "transformers.models.llama.modeling_llama",
                "diffusers.models.unets.unet_2d",
                "tests.support.parity",
                "tests.support.warm",
            ]
        )
