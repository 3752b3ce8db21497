"""Parameters that were frozen when their model was distributed, and that a script trains later."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from torch import nn

from fxpar._torch.compiler import never_compiled
from fxpar.errors import UnfrozenOnOneStageError
from fxpar.model.distribution import Distribution, pipelines
from fxpar.model.logical_properties import logical_properties
from fxpar.world.agreement import of_all_ranks


@never_compiled  # it is called under the user's `torch.compile`
def train_unfrozen(distribution: Distribution) -> None:
    """Let steps compute gradients of the parameters that were frozen and require grad by now; all ranks call it.

    Those that are frozen later need nothing: steps drop their gradients. So a trace serves until one more is unfrozen.

    Raises:
        UnfrozenOnOneStageError: a rank of a pipeline holds such a parameter, after the first call, in which all ranks
            compare what they hold: ranks of other stages would not know.
    """
    if not distribution.has_begun:
        distribution.has_begun = True
        agree_on_unfrozen(distribution)
        return
    unfrozen = _unfrozen(distribution)
    if unfrozen and distribution.mesh.pipe > 1:
        raise UnfrozenOnOneStageError(unfrozen[0])
    _unfreeze(distribution, unfrozen)


def agree_on_unfrozen(distribution: Distribution) -> None:
    """Let the next steps train what is unfrozen on any rank: a collective of all ranks, if anything is frozen.

    Raises:
        PeerLostError: another rank has ended.
    """
    if all(parameter.requires_grad for parameter in distribution.parameters.values()):
        return
    unfrozen = _unfrozen(distribution)
    of_ranks = of_all_ranks(unfrozen) if distribution.mesh.pipe > 1 else [unfrozen]
    _unfreeze(distribution, [name for of_rank in of_ranks for name in of_rank])


def _unfrozen(distribution: Distribution) -> list[str]:
    """The parameters of this rank that require grad, but are frozen in traces."""
    held = distribution.own_parameters()
    return [name for name, p in held.items() if p.requires_grad and not distribution.parameters[name].requires_grad]


def _unfreeze(distribution: Distribution, names: Iterable[str]) -> None:
    for parameter in distribution.unfreeze(names):
        for module, attribute, read in logical_properties(parameter, distribution):
            setattr(type(module), attribute, read)


@functools.cache
def let_modules_unfreeze_all_stages() -> None:
    """From now on `nn.Module.requires_grad_` of a part of a pipeline reaches parameters on other ranks, too."""
    plain = nn.Module.requires_grad_

    @functools.wraps(plain)
    def requires_grad_(self: nn.Module, requires_grad: bool = True) -> nn.Module:
        if requires_grad:
            inside = set(self.modules())
            for distribution in pipelines():
                of_part = (p for p in distribution.parameters.values() if any(home in inside for home, _ in p.homes))
                _unfreeze(distribution, [parameter.fqn for parameter in of_part])
        return plain(self, requires_grad)

    nn.Module.requires_grad_ = requires_grad_  # type: ignore[method-assign, assignment]
