"""What fxpar changes in how Dynamo traces a model."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from fxpar._torch.compiler import ignore_logging_calls, name_functions_for_logs_alone
from fxpar._torch.dynamo.assigned_tensors import settle_assignments
from fxpar._torch.dynamo.both_branches import trace_both_branches
from fxpar._torch.dynamo.grad_mode import note_reads_of_grad_mode
from fxpar._torch.dynamo.known_values import trace_by_known_values
from fxpar._torch.dynamo.printing import trace_prints
from fxpar._torch.dynamo.raising_branches import assert_what_branches_raise
from fxpar._torch.dynamo.replaced_functions import trace_counts_of_known_length, trace_past_flags_of_kernels
from fxpar._torch.dynamo.requires_grad import let_results_depend_on_leaves, let_values_require_grad
from fxpar._torch.dynamo.set_order import trace_sets_in_one_order
from fxpar._torch.dynamo.stand_ins import refuse_reads_of_stand_ins
from fxpar._torch.dynamo.world_of_one import trace_in_world_of_one
from fxpar._torch.group_norm import correct_strides_of_group_norm


def change_tracing() -> None:
    """Let Dynamo trace, in all of this process, what it would refuse, and as the kernels and other ranks do."""
    ignore_logging_calls()
    trace_prints()
    name_functions_for_logs_alone()
    note_reads_of_grad_mode()
    let_values_require_grad()
    let_results_depend_on_leaves()
    trace_past_flags_of_kernels()
    trace_counts_of_known_length()
    trace_sets_in_one_order()
    trace_in_world_of_one()
    settle_assignments()
    refuse_reads_of_stand_ins()
    assert_what_branches_raise()
    trace_both_branches()
    trace_by_known_values()
    correct_strides_of_group_norm()


def layers_traced_once(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """A context in which Dynamo traces equal layers of `model` once; it may be entered many times.

    Before release 2.13, Dynamo cannot tell during a trace whether guards hold, and traces all layers.
    """
    if torch.__version__ < "2.13":
        return nullcontext
    from fxpar._torch.dynamo.layers import Layers

    return Layers(model).traced_once
