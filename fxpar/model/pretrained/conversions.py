"""The names and forms of weights in files, where they are not those of the model: transformers knows both.

A file may have one tensor per expert where the model has one parameter of all experts, or one for q, k and v where the
model has three parameters; names may have lost or gained the prefix of the base model. Models of transformers come with
a description of that, which its own `from_pretrained` and `save_pretrained` follow. Here it is applied to lazy tensors.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from fxpar.errors import WeightFilesError
from fxpar.model.pretrained.lazy_tensor import LazyTensor


def is_of_transformers(model: Any) -> bool:
    """Whether the module is a model of transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")  # whoever made such a model has imported it
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def as_in_model(stored: Mapping[str, LazyTensor], model: Any, known: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    """The tensors of files, by the names and in the forms of the model; those without a place there as they are.

    The model also records what was converted, for `as_in_files`.

    Args:
        known: a tensor of the shape of each parameter and buffer, by all of its names.

    Raises:
        WeightFilesError: tensors do not have the shapes that a conversion needs.
    """
    if not is_of_transformers(model):
        return dict(stored)
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms = get_model_conversion_mapping(model)
    found, converters = _by_names_in_model(stored, transforms, model.base_model_prefix, known)
    for name, converter in converters.items():
        found |= _converted(name, converter, model, known)
    model._weight_conversions = [each for each in transforms if each.was_used()]
    return found


def _by_names_in_model(
    stored: Mapping[str, LazyTensor], transforms: Sequence[Any], prefix: str, known: Mapping[str, Tensor]
) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """Tensors that are only renamed, and for the others the converter that has them, by the first name that it makes.

    This is the order of `convert_and_load_state_dict_in_model` of transformers.
    """
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    renamed: dict[str, LazyTensor] = {}
    collecting: dict[str, Any] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:  # the model's own name, which happens to match a pattern
            name, pattern = rename_source_key(key, [], [], prefix, known)
        if pattern is None or name not in known:
            renamed[name] = stored[key]
            continue
        if name not in collecting:
            collecting[name] = copy.deepcopy(of_pattern[pattern])
        collecting[name].add_tensor(name, key, pattern, stored[key])
    return renamed, collecting


def _converted(name: str, converter: Any, model: Any, known: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    sources = sorted(converter.layer_targets[name])
    shapes = SimpleNamespace(get_parameter=known.__getitem__)  # of the model, also where another stage has them
    try:
        made = converter.convert(name, model=shapes, config=model.config)
    except (RuntimeError, ValueError) as error:
        problem = f"{len(sources)} tensors ({sources[0]}, ...) cannot be converted to {name}: {error}"
        raise WeightFilesError("weights in files", problem, "load those of this very architecture") from error
    return {target: tensor[0] if isinstance(tensor, list) else tensor for target, tensor in made.items()}


def as_in_files(tensors: Mapping[str, LazyTensor], model: Any) -> dict[str, LazyTensor]:
    """The inverse of `as_in_model`: the tensors of a model by the names and in the forms of files."""
    if not is_of_transformers(model):
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    left_out = model._keys_to_ignore_on_save or ()
    reverted: dict[str, LazyTensor] = revert_weight_conversion(
        model, {name: tensor for name, tensor in tensors.items() if name not in left_out}
    )
    return reverted


def may_be_missing(name: str, model: Any) -> bool:
    """Whether the model's authors say that files need not have the tensor of this name."""
    return is_of_transformers(model) and _matches(name, model._keys_to_ignore_on_load_missing)


def may_be_unexpected(name: str, model: Any) -> bool:
    """Whether the model's authors say that files may have a tensor of this name without a place in the model."""
    return is_of_transformers(model) and _matches(name, model._keys_to_ignore_on_load_unexpected)


def _matches(name: str, patterns: Any) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())
