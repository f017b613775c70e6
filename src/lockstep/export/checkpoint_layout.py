"""The names and the order in which a checkpoint stores a model's parameters.

transformers joins some parameters that checkpoints store apart: the experts of a layer are one tensor in the model and
one tensor each on disk. In: a meta model. Out: for each parameter the checkpoint tensors whose bytes, concatenated, are
the parameter's. They are found by running transformers' conversion for saving on small tensors of numbered elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lockstep.artifacts.dtypes import FLOAT_DTYPES
from lockstep.checkpoint.tensors import CheckpointTensors, check_not_absent, name_in_checkpoint
from lockstep.errors import InputError, note
from lockstep.export.quiet import quiet

_SMALL = 4  # size of a shrunk dimension: even, so that a tensor can be cut into halves


def checkpoint_layout(meta: PreTrainedModel) -> dict[str, list[str]]:
    """Return {parameter: names of its checkpoint tensors, in order}.

    Tied parameters are left out. Raises InputError for a model whose checkpoint tensors would have to be transposed or
    mixed, not only concatenated.
    """
    # Number the elements of all parameters through. In the saved form the numbers of a tensor say which parameter it
    # belongs to, where it begins in it, and whether its elements are in order.
    numbered = {}
    spans = {}
    count = 0
    for name, tensor in _parameters(meta).items():
        shape = [min(size, _SMALL) for size in tensor.shape]
        if len(shape) > 2:
            shape[0] = tensor.shape[0]  # experts are stacked here, and all of them have names
        spans[name] = range(count, count + math.prod(shape))
        numbered[name] = torch.arange(count, spans[name].stop).view(shape)
        count = spans[name].stop
    starts: dict[int, tuple[str, int]] = {}
    for name, tensor in _saved(meta, numbered).items():
        numbers = tensor.reshape(-1)
        first = int(numbers[0])
        size = numbers.numel()
        if not torch.equal(numbers, torch.arange(first, first + size)):
            raise InputError(
                f"model type {meta.config.model_type!r} cannot be split: its checkpoint holds "
                f"{name} in another order than the model"
            )
        starts[first] = (name, size)
    layout = {}
    for name, span in spans.items():
        parts = []
        start = span.start
        while start < span.stop and start in starts:
            tensor_name, size = starts[start]
            parts.append(tensor_name)
            start += size
        if start != span.stop:
            raise InputError(
                f"model type {meta.config.model_type!r} cannot be split: its checkpoint holds "
                f"{name} in a way that is not known"
            )
        layout[name] = parts
    return layout


def checkpoint_shapes(meta: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that a model's checkpoint holds: sorted, tied ones once."""
    saved = _saved(meta, {name: tensor.to("meta") for name, tensor in _parameters(meta).items()})
    return {name: tuple(tensor.shape) for name, tensor in sorted(saved.items())}


def check_tensors(meta: PreTrainedModel, checkpoint: CheckpointTensors, folder: Path) -> None:
    """Check the tensors of the checkpoint in `folder` against those of a checkpoint of the model.

    Raises InputError for a tensor that is absent, of another shape or not floating point. Tensors that the model does
    not have are only reported.
    """
    shapes = checkpoint_shapes(meta)
    tensors = checkpoint.tensors
    _report_unknown(meta, shapes, tensors, folder)
    for name, shape in shapes.items():
        tensor = tensors.get(name_in_checkpoint(name, tensors))
        if tensor is None:
            check_not_absent(folder, name, checkpoint)
            raise InputError(
                f"{folder}: expected tensor {name!r} {list(shape)}, found none of this name; does config.json belong to"
                " these weights?"
            )
        if tensor.shape != shape:
            raise InputError(
                f"{folder / tensor.file}: tensor {name!r}: expected shape {list(shape)}, found {list(tensor.shape)}; "
                "does config.json belong to these weights?"
            )
        if tensor.dtype not in FLOAT_DTYPES:
            raise InputError(
                f"{folder / tensor.file}: tensor {name!r}: expected one of {', '.join(FLOAT_DTYPES)}, found"
                f" {tensor.dtype}; use a checkpoint that is not quantized"
            )


def _report_unknown(meta: PreTrainedModel, expected: Collection[str], tensors: Collection[str], folder: Path) -> None:
    """Report tensors that the model does not have, for example the bias of a layer that has none by the config."""
    ignored = getattr(meta, "_keys_to_ignore_on_load_unexpected", None) or ()
    names = {*expected, *(getattr(meta, "all_tied_weights_keys", None) or {})}
    names |= {name.partition(".")[2] for name in names}  # as checkpoints of a bare decoder have them
    unknown = [name for name in sorted(tensors) if name not in names]
    for pattern in ignored:
        unknown = [name for name in unknown if not re.search(pattern, name)]
    if unknown:
        text = unknown[0]
        if len(unknown) > 1:
            text += f" and {len(unknown) - 1} more"
        note(f"{folder}: tensors that the model of config.json does not have, left out: {text}")


def _parameters(meta: PreTrainedModel) -> dict[str, torch.Tensor]:
    tied = set(getattr(meta, "all_tied_weights_keys", None) or {})
    return {name: tensor for name, tensor in meta.state_dict().items() if name not in tied}


def _saved(meta: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with quiet():
        return revert_weight_conversion(meta, dict(tensors))
