"""Every test process, and each rank that it starts, runs one thread and prints only what matters."""

import os

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

torch.set_num_threads(1)

# The same examples on every run, and no time limit per example: a test's verdict is about the code alone.
hypothesis.settings.register_profile("fxpar", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fxpar")
