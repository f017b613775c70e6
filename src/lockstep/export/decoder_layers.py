"""The decoder layers of a transformers model. Needs torch and transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from lockstep.errors import InputError
from lockstep.export.language import per_layer_settings


def layer_list(model: PreTrainedModel) -> tuple[str, torch.nn.ModuleList]:
    """Return name and module of the list of decoder layers. Raises InputError for none of the config's length."""
    depth = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == depth:
            return name, module
    raise InputError(
        f"model type {model.config.model_type!r} cannot be split: expected a list of {depth} decoder layers, found none"
    )


@contextlib.contextmanager
def only_layers(model: PreTrainedModel, indices: Sequence[int]) -> Iterator[None]:
    """Let a model run only the layers `indices`, in that order, and everything after its last layer."""
    name, layers = layer_list(model)
    parent, _, attribute = name.rpartition(".")
    owner = model.get_submodule(parent)
    text = model.config.get_text_config()
    lists = per_layer_settings(text, len(layers))  # the depth of some configs is the length of one (Nemotron-H)
    setattr(owner, attribute, torch.nn.ModuleList([layers[index] for index in indices]))
    for key, value in lists.items():
        setattr(text, key, [value[index] for index in indices])
    text.num_hidden_layers = len(indices)
    try:
        yield
    finally:
        setattr(owner, attribute, layers)
        for key, value in lists.items():
            setattr(text, key, value)
        text.num_hidden_layers = len(layers)
