"""What fxpar changes in how Dynamo traces a model."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def layers_traced_once(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """A context in which Dynamo traces equal layers of `model` once; it may be entered many times.

    Before release 2.13, Dynamo cannot tell during a trace whether guards hold, and traces all layers.
    """
    if torch.__version__ < "2.13":
        return nullcontext
    from fxpar._torch.dynamo.layers import Layers

    return Layers(model).traced_once
