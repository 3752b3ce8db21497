"""Hooks by which models of transformers record hidden states, attentions and router logits for their results."""

from __future__ import annotations

import sys

from torch import nn

from fxpar._torch.compiler import never_compiled


@never_compiled
def install_recording_hooks(model: nn.Module) -> bool:
    """Install what transformers would install in the first forward that records, and return whether there was any.

    It does so under a lock, within which Dynamo does not trace. Not for every model: traces with hooks take longer.
    """
    library = sys.modules.get("transformers.utils.output_capturing")  # since release 5
    if library is None:
        return False
    from transformers import PreTrainedModel

    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    recording = [each for each in models if not getattr(each, "_output_capturing_hooks_installed", False)]
    for each in recording:
        library.maybe_install_capturing_hooks(each)
    return bool(recording)
