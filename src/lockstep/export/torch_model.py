"""Load a checkpoint, or its first n layers, in transformers, in float32 and eager. Needs torch and transformers.

Nothing is downloaded and no code of the checkpoint runs: `local_files_only`, `trust_remote_code` off, safetensors only.
Independent of the exporter, so that a mistake there cannot hide in the reference.
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

# transformers expects patterns; for a checkpoint without a wrapper none matches.
_LANGUAGE_KEYS = {f"^{re.escape(prefix)}": name for prefix, name in PREFIXES.items()}
# It logs at each start that recurrent layers are computed by torch, which is intended here.
logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


def cut_config(config: Mapping[str, Any], layers: int | str) -> transformers.PreTrainedConfig:
    """Return the transformers config of a mapping for its first `layers` layers; "all": for all of them.

    Per-layer lists are cut too, and packing of weights is left out. For a wrapper it is the config of its language
    model. Models that are loaded with it keep the constants of the whole model: see `keep_constants`.

    Raises InputError as `build_config` does, and for more layers than the model has.
    """
    settings = build_config(config)
    text = settings.get_text_config()
    depth = text.num_hidden_layers
    if layers == "all":
        return settings
    if not isinstance(layers, int) or not 1 <= layers <= depth:
        raise InputError(f"layers: expected 1 to {depth} or 'all', found {layers!r}")
    for name, value in per_layer_settings(text, depth).items():
        setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    if layers != depth:
        settings.config_of_all_layers = copy.deepcopy(without_packing(config))  # for `keep_constants`
    return settings


def eager_attention(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return transformers' plain attention function of an attention module. Raises InputError for none."""
    attention = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if attention is None:
        raise InputError(
            f"{type(module).__name__}: expected eager_attention_forward in its module to compare with, found none; "
            "this model cannot be checked"
        )
    return attention


def keep_constants(model: PreTrainedModel) -> None:
    """Give a cut model the constants of the whole one, in place, so that its layers are the whole model's first ones.

    Some models scale by their depth (`scale_depth / sqrt(num_hidden_layers)`), so that a model built with fewer layers
    is another one. Raises InputError when its layers differ in more than such numbers.
    """
    whole_config = getattr(model.config, "config_of_all_layers", None)
    if whole_config is None:
        return
    with quiet(), torch.device("meta"):
        whole_modules = dict(AutoModelForCausalLM.from_config(cut_config(whole_config, "all")).named_modules())
    for name, module in model.named_modules():
        cut_values = vars(module)
        whole_values = vars(whole_modules[name])
        is_in_layer = re.search(r"\.\d+(\.|$)", name)
        for key in sorted(cut_values.keys() & whole_values.keys()):
            value = cut_values[key]
            whole_value = whole_values[key]
            if key == "training" or key.startswith("_"):
                continue
            if isinstance(value, float) and isinstance(whole_value, float):
                setattr(module, key, whole_value)
            elif isinstance(value, (bool, int, str)) and value != whole_value and is_in_layer:
                raise InputError(
                    "layers: expected a model whose first layers are the same however many follow, found one whose "
                    f"{name}.{key} is {whole_value!r} in the whole model and {value!r} in one of "
                    f"{model.config.get_text_config().num_hidden_layers} layers; use layers: all"
                )


class TokensBefore(DynamicCache):
    """A cache of `length` tokens for masks and positions; the attention function adds the rows before the new ones.

    It keeps none, since models may cache other forms (a latent one, say). States of recurrent layers are kept as in
    transformers.
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
        return conv_states if is_first else rows  # the first `rows` have the padding of a short prompt


def is_within(name: str, layers: int | str) -> bool:
    """Return whether a checkpoint tensor is of the first `layers` layers, by a number in its name, or of none."""
    number = re.search(r"\.(\d+)\.", name)
    return not isinstance(layers, int) or number is None or int(number[1]) < layers


def float32_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a float32 tensor, over the array's own memory if possible; integers keep their type."""
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        array = array.astype(np.float32, copy=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "not writable": nothing writes to it
        return torch.from_numpy(array)


@torch.no_grad()
def draw_weights(model: PreTrainedModel, generator: torch.Generator, gain: float = 1.0) -> None:
    """Give a model normal weights over sqrt(inputs), gains around `gain` and biases around 0, in place."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() > 1:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
            elif name.endswith("_log"):  # A_log of recurrent mixers: other values make states vanish or grow
                tensor.copy_(noise + LOG_DECAY)
            else:
                mean = 1.0  # of a norm's gain
                if "bias" in name:
                    mean = 0.0
                tensor.copy_(gain * (0.2 * noise + mean))


def load_folder(folder: Path, config: transformers.PreTrainedConfig) -> PreTrainedModel:
    """Load the causal LM of a checkpoint folder, cast to float32.

    With a cut config only the tensors of its layers are read. Raises InputError when the folder lacks tensors of the
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

    tensors: by name in the checkpoint. attention: name of a registered attention function. where: origin of the
    tensors, for the message. Raises InputError when some are missing.
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
        details = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            f"{where}: expected tensors that transformers can load, found {details[:300]}; does config.json belong to "
            "these weights?"
        ) from error
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):  # which it fills with random numbers
        if info[problem]:
            details = ", ".join(map(str, sorted(info[problem], key=str)[:3]))
            raise InputError(
                f"{where}: expected all tensors of the model, found {problem.replace('_', ' ')}: {details}; does "
                f"config.json belong to these weights?"
            )
    keep_constants(model)
    return model.eval()
