"""The reference's model, in transformers, float32, eager. Needs torch and transformers.

In: a checkpoint's manifest, or quantised weights, and a layer count. Out: its first layers; an adapter may be hooked to
them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.config.packing import packing_of
from lockstep.errors import InputError
from lockstep.export.torch_model import cut_config, float32_tensor, is_within, load_folder, load_tensors
from lockstep.verify.rounded import round_activations
from lockstep.weights import Weights
from lockstep.weights.adapters import LoadedAdapter
from lockstep.weights.source import open_source


def load_checkpoint(checkpoint_json: Path, layers: int | str) -> PreTrainedModel:
    """Load a checkpoint's first layers, dequantised where it is quantised."""
    manifest = CheckpointManifest.load(checkpoint_json)
    folder = manifest.folder_of(checkpoint_json)
    config = cut_config(manifest.config, layers)
    if packing_of(manifest.config) is None:
        return load_folder(folder, config)
    source = open_source(checkpoint_json)
    tensors = {name: float32_tensor(source.array(name)) for name in source.tensors if is_within(name, layers)}
    return load_tensors(tensors, config, "eager", str(folder))


def load_dequantized(config: Mapping[str, Any], weights: Weights, layers: int | str) -> PreTrainedModel:
    """Load a model's first layers with dequantised weights, and activations rounded as their precision rounds them."""
    tensors = {name: float32_tensor(array) for name, array in weights.dequantized() if is_within(name, layers)}
    model = load_tensors(tensors, cut_config(config, layers), "eager", str(weights.manifest_path))
    round_activations(model, weights, layers)
    return model


@contextlib.contextmanager
def adapted(model: PreTrainedModel, adapter: LoadedAdapter | None, layers: int | str = "all") -> Iterator[None]:
    """Run a model with an adapter, as PEFT defines LoRA.

    A linear layer gives y + scale * (x A^T) B^T, computed in float32 next to the layer, not merged into its weights. A
    test compares this with PEFT.

    layers: how many of the base's the model has; modules of other layers are left out. Raises InputError, where the
    model has all layers, for a module that it does not have.
    """
    if adapter is None:
        yield
        return
    modules = dict(model.named_modules())
    with contextlib.ExitStack() as hooks:
        for name, matrices in adapter.modules.items():
            if name in modules:
                a, b = (torch.from_numpy(matrix.astype("float32")) for matrix in matrices)
                hook = functools.partial(_add_product, a, b, adapter.scale_of(name))
                hooks.enter_context(modules[name].register_forward_hook(hook))
            elif layers == "all":
                raise InputError(
                    f"adapter {adapter.name!r} ({adapter.where}): expected modules of the model, found {name}"
                )
        yield


def _add_product(a: torch.Tensor, b: torch.Tensor, scale: float, _: Any, inputs: Any, output: torch.Tensor) -> Any:
    return output + (inputs[0] @ a.T @ b.T) * scale
