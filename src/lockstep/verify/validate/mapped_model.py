"""Load a model in PyTorch whose parameters stay in the weights' memory-mapped files. Needs torch and transformers.

The target's weights in, a model in transformers out, to be run in `rounded.Rounded(torch.float32)`, which widens a
parameter where it is read. So a 70B shape takes the memory of its largest tensor in float32, not of the model.
transformers maps the checkpoint's names and layouts, which copies only the tensors that it joins (experts).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.artifacts.dtypes import PRECISION_NAMES, base_precision
from lockstep.export.quiet import quiet
from lockstep.export.torch_model import cut_config, is_within, keep_constants, load_tensors
from lockstep.weights import Weights

_JOINS = {torch.ops.aten.cat.default, torch.ops.aten.stack.default}


def mapped_model(config: Mapping[str, Any], weights: Weights, layers: int | str, attention: str) -> PreTrainedModel:
    """Return the first layers of a model in float32, with parameters of the weights' precision.

    attention: name of a registered attention function. Raises InputError as `load_tensors` does.
    """
    tensors = {name: _mapped(array) for name, array in weights.dequantized() if is_within(name, layers)}
    dtype = getattr(torch, PRECISION_NAMES[base_precision(weights.precision)])
    with _PagesDropped(weights):
        stored = load_tensors(tensors, cut_config(config, layers), attention, str(weights.manifest_path), dtype)
    model = _without_parameters(cut_config(config, layers), stored, attention)
    for name, parameter in stored.named_parameters(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._parameters[key] = parameter
    return model


class _PagesDropped(TorchDispatchMode):
    """Drop the files' pages after each joined tensor: else the pages of all its parts stay in memory with the copy."""

    def __init__(self, weights: Weights):
        super().__init__()
        self._weights = weights

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operator(*args, **(kwargs or {}))
        if operator in _JOINS:
            self._weights.drop_pages()
        return output


def _mapped(array: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "not writable"
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def _without_parameters(config: Any, stored: PreTrainedModel, attention: str) -> PreTrainedModel:
    """Make the model in float32 with parameters that have no memory.

    Its buffers are those of `stored`, computed again where those are not in float32.
    """
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    keep_constants(model)
    for name, module in model.named_modules():
        stored_buffers = stored.get_submodule(name)._buffers
        to_compute = []
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            value = stored_buffers[key]
            assert value is not None  # the same class has the same buffers
            if buffer.is_floating_point() and value.dtype != buffer.dtype and key in module._non_persistent_buffers_set:
                module._buffers[key] = torch.full(buffer.shape, math.nan, dtype=buffer.dtype)
                to_compute.append(key)
            else:
                module._buffers[key] = value.to(buffer.dtype)
        if to_compute:
            with quiet():
                model._init_weights(module)  # its parameters are on the meta device: only buffers take values
    for module in model.modules():
        if any(buffer.is_floating_point() and buffer.isnan().any() for buffer in module.buffers()):
            model._init_weights(module)  # of some classes this computes the buffers of a module inside it
    return model.eval()
