"""A checkpoint as transformers runs it, in float32 and eager.

It may be cut after its first n layers. Needs torch and transformers.

Nothing is fetched and no code of the checkpoint runs: `local_files_only`, `trust_remote_code` off, safetensors only.
Independent of the exporter, so that a mistake there cannot hide in what it is compared with.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lockstep.checkpoint.language import PREFIXES
from lockstep.config.model_config import without_packing
from lockstep.errors import InputError
from lockstep.export.language import build_config, per_layer_settings
from lockstep.export.quiet import quiet
from lockstep.export.random_model import LOG_DECAY

# transformers takes patterns; of a checkpoint without a wrapper none matches.
_LANGUAGE_KEYS = {f"^{re.escape(prefix)}": name for prefix, name in PREFIXES.items()}
# It says at each start that recurrent layers are computed by torch, as they are to be here.
logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


def cut_config(config: Mapping[str, Any], layers: int | str) -> transformers.PreTrainedConfig:
    """Return the transformers config of a mapping for its first `layers` layers.

    "all": as it is. Per-layer lists are cut too, and what it says of packed weights is left out. Of a wrapper it is
    the config of its language model.

    What is loaded with it keeps the constants of the whole model: see `keep_constants`.

    Raises InputError as `build_config` does, and for more layers than the model has.
    """
    made = build_config(config)
    text = made.get_text_config()
    depth = text.num_hidden_layers
    if layers == "all":
        return made
    if not isinstance(layers, int) or not 1 <= layers <= depth:
        raise InputError(f"layers: expected 1 to {depth} or 'all', found {layers!r}")
    for name, value in per_layer_settings(text, depth).items():
        setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    if layers != depth:
        made.config_of_all_layers = copy.deepcopy(without_packing(config))
    return made


def eager_attention(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return transformers' plain attention function of an attention module. Raises InputError for none."""
    found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        raise InputError(
            f"{type(module).__name__}: expected eager_attention_forward beside it to compare with, found none; this "
            "model cannot be checked"
        )
    return found


def keep_constants(model: PreTrainedModel) -> None:
    """Give a cut model the constants of the whole one, in place.

    Its first layers are then those that the whole model has.

    Some models scale by their depth (`scale_depth / sqrt(num_hidden_layers)`), so that a model built with fewer layers
    is another one.
    Raises InputError when its layers differ from the whole model's first ones in more than such numbers.
    """
    whole_config = getattr(model.config, "config_of_all_layers", None)
    if whole_config is None:
        return
    with quiet(), torch.device("meta"):
        whole = dict(AutoModelForCausalLM.from_config(cut_config(whole_config, "all")).named_modules())
    for name, module in model.named_modules():
        ours = vars(module)
        theirs = vars(whole[name])
        for key in sorted(key for key in ours.keys() & theirs.keys() if key != "training" and not key.startswith("_")):
            if isinstance(ours[key], float) and isinstance(theirs[key], float):
                setattr(module, key, theirs[key])
            elif (
                isinstance(ours[key], (bool, int, str)) and ours[key] != theirs[key] and re.search(r"\.\d+(\.|$)", name)
            ):
                raise InputError(
                    "layers: expected a model whose first layers are the same however many follow, found one whose "
                    f"{name}.{key} is {theirs[key]!r} in the whole model and {ours[key]!r} in one of "
                    f"{model.config.get_text_config().num_hidden_layers} layers; use layers: all"
                )


class TokensBefore(DynamicCache):
    """A cache of `length` tokens for masks and positions; attention itself gets the rows before the new ones.

    What models keep in theirs is their own matter (a latent form, say). States of recurrent layers are kept as
    transformers does.
    """

    def __init__(self, config: transformers.PreTrainedConfig, length: int):
        super().__init__(config=config)
        self.length = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.length

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        return self.length + query_length, 0

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> torch.Tensor:
        is_first = self.get_conv_state(layer_idx, state_idx) is None
        rows = super().update_conv_state(conv_states, layer_idx, state_idx, **options)
        return conv_states if is_first else rows  # without the rows that a short prompt is padded with


def layer_of(name: str) -> int:
    """Return the layer of a checkpoint tensor, the first number in its name; -1 outside the layers."""
    match = re.search(r"\.(\d+)\.", name)
    return int(match[1]) if match else -1


def is_within(name: str, layers: int | str) -> bool:
    """Return whether a checkpoint tensor is of the first `layers` layers, or stands outside the layers."""
    return not isinstance(layers, int) or layer_of(name) < layers


def float32_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a float32 tensor, over the array's own memory if it can be; integers keep their type."""
    is_float = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "not writable": nothing writes to it
        return torch.from_numpy(array.astype(np.float32, copy=False) if is_float else array)


@torch.no_grad()
def draw_weights(model: PreTrainedModel, generator: torch.Generator, gain: float = 1.0) -> None:
    """Give a model normal weights over sqrt(inputs), gains around `gain` and biases around 0, in place."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() > 1:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
            elif name.endswith("_log"):
                tensor.copy_(noise + LOG_DECAY)
            else:
                tensor.copy_(gain * (0.2 * noise + (0.0 if "bias" in name else 1.0)))


def load_folder(folder: Path, config: transformers.PreTrainedConfig) -> PreTrainedModel:
    """Load the causal LM of a checkpoint folder, cast to float32.

    Of a cut config only the tensors of its layers are read. Raises InputError when the folder lacks tensors of the
    model.
    """
    return _load(
        AutoModelForCausalLM, folder, config, "eager", str(folder), dtype=torch.float32, local_files_only=True,
        trust_remote_code=False, use_safetensors=True, key_mapping=_LANGUAGE_KEYS,
    )  # fmt: skip


def load_tensors(
    tensors: Mapping[str, torch.Tensor],
    config: transformers.PreTrainedConfig,
    attention: str,
    where: str,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Return the causal LM of `config` with the given tensors, in `dtype`.

    tensors: names as in the checkpoint. attention: name of a registered attention function. where: whose tensors they
    are, for the message. Raises InputError when some are missing.
    """
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return _load(architecture, None, config, attention, where, dtype=dtype, state_dict=dict(tensors))


def _load(
    architecture: Any,
    folder: Path | None,
    config: transformers.PreTrainedConfig,
    attention: str,
    where: str,
    **options: Any,
) -> PreTrainedModel:
    try:
        with quiet():
            model, info = architecture.from_pretrained(
                folder, config=config, attn_implementation=attention, output_loading_info=True, **options
            )
    except Exception as error:  # whatever transformers raises for a config or weights
        found = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            f"{where}: expected tensors that transformers can load, found {found[:300]}; does config.json belong to "
            "these weights?"
        ) from error
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):  # which it fills with random numbers
        if info[problem]:
            found = ", ".join(map(str, sorted(info[problem], key=str)[:3]))
            raise InputError(
                f"{where}: expected all tensors of the model, found {problem.replace('_', ' ')}: {found}; does "
                f"config.json belong to these weights?"
            )
    keep_constants(model)
    return model.eval()
