"""Run a model in PyTorch with one layer in float32 at a time.

The target's weights in, records of a sequence out. Needs torch and transformers.

The parameters lie in the weights' own files, mapped: transformers itself puts the checkpoint's names and forms in
order, which copies only what it must put together (experts). Each decoder layer is cast to float32 just before it
runs and let go just after, and so is what stands outside the layers. A 70B shape takes the memory of a layer, not of
the model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.artifacts.dtypes import base_precision
from lockstep.export.quiet import quiet
from lockstep.export.torch_model import cut_config, is_within, load_tensors
from lockstep.export.tracer import DTYPES, layer_list
from lockstep.verify.rounded_activations import round_activations
from lockstep.verify.validate.torch_trace import HOOK, TorchModel
from lockstep.weights import Weights


class StreamedModel(TorchModel):
    """`TorchModel` for models that do not fit in memory in float32. Raises as it does."""

    def __init__(self, config: Mapping[str, Any], weights: Weights, layers: int | str):
        tensors = {name: _mapped(array) for name, array in weights.dequantized() if is_within(name, layers)}
        stored = load_tensors(
            tensors,
            cut_config(config, layers),
            HOOK,
            str(weights.manifest_path),
            DTYPES[base_precision(weights.precision)],
        )
        self.model = _skeleton(cut_config(config, layers), stored)
        self.num_layers = self.model.config.get_text_config().num_hidden_layers
        parameters, whole = (
            dict(stored.named_parameters(remove_duplicate=False)),
            {id(layer) for layer in layer_list(self.model)[1]},
        )
        inside: set[int] = set()
        for name, module in self.model.named_modules():
            if id(module) in inside:
                continue
            if id(module) in whole:
                inside.update(id(child) for child in module.modules())
                _stream(name, module, parameters)
            elif not list(module.children()):
                _stream(name, module, parameters)
            else:  # parameters of a module that has others in it may be read by any of them: they stay
                _fill(name, module, parameters, recurse=False)
        round_activations(self.model, weights, layers)


def _mapped(array: np.ndarray) -> torch.Tensor:
    """Wrap an array's memory in a tensor; nothing writes to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "not writable"
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def _skeleton(config: Any, stored: PreTrainedModel) -> PreTrainedModel:
    """Make the model in float32 with parameters that have no memory.

    Its buffers are those of `stored`, computed again where those are not in float32.
    """
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=HOOK)
    for name, module in model.named_modules():
        there = stored.get_submodule(name)
        again = []
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            value = there._buffers[key]
            assert value is not None  # the same class has the same buffers
            if buffer.is_floating_point() and value.dtype != buffer.dtype and key in module._non_persistent_buffers_set:
                module._buffers[key] = torch.full(buffer.shape, math.nan, dtype=buffer.dtype)
                again.append(key)
            else:
                module._buffers[key] = value.to(buffer.dtype)
        if again:
            with quiet():
                model._init_weights(module)  # its parameters are on the meta device: only buffers take values
    for module in model.modules():
        if any(buffer.is_floating_point() and buffer.isnan().any() for buffer in module.buffers()):
            model._init_weights(module)  # which gives a module in it its buffers
    return model.eval()


def _stream(prefix: str, module: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    empty = dict(module.named_parameters(remove_duplicate=False))
    if not empty:
        return
    module.register_forward_pre_hook(lambda *_: _fill(prefix, module, parameters))
    module.register_forward_hook(lambda *_: _set(module, empty), always_call=True)


def _fill(
    prefix: str, module: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter], recurse: bool = True
) -> None:
    names = [name for name, _ in module.named_parameters(recurse=recurse, remove_duplicate=False)]
    _set(
        module,
        {
            name: torch.nn.Parameter(parameters[f"{prefix}.{name}" if prefix else name].float(), requires_grad=False)
            for name in names
        },
    )


def _set(module: torch.nn.Module, values: Mapping[str, torch.nn.Parameter]) -> None:
    for name, value in values.items():
        owner, _, key = name.rpartition(".")
        module.get_submodule(owner)._parameters[key] = value
