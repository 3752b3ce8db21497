"""Every test process, and each rank that it starts, runs one thread and prints only what matters."""

import os
import sys

# Before torch and transformers are imported: they read these then.
os.environ.update(
    OMP_NUM_THREADS="1",
    TORCHINDUCTOR_COMPILE_THREADS="1",
    TORCH_CPP_LOG_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
    DIFFUSERS_VERBOSITY="error",
)

import hypothesis
import torch

from fxpar.launch import PRELOADED

torch.set_num_threads(1)

# The same examples on every run, and no time limit per example: a test's verdict is about the code alone.
hypothesis.settings.register_profile("fxpar", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fxpar")


def pytest_collection_finish() -> None:
    """Where models are to be trained, what that needs first is done once, and not by each rank: it takes seconds."""
    if "tests.parity" in sys.modules:
        PRELOADED.extend(
            [
                "transformers.models.gpt2.modeling_gpt2",
                "transformers.models.llama.modeling_llama",
                "diffusers.models.unets.unet_2d",
                "tests.parity",
                "tests.warm",
            ]
        )
