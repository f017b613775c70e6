"""A checkpoint as transformers runs it: in float32, eager, cut after its first n layers. Needs torch and transformers.

Nothing is fetched and no code of the checkpoint runs: `local_files_only`, `trust_remote_code` off, safetensors only. Independent of
the exporter, so that a mistake there cannot hide in what it is compared with.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lockstep.errors import InputError
from lockstep.quiet import quiet

# Lists that can be as long as the model is deep by chance.
_NOT_PER_LAYER = {"architectures", "bos_token_id", "eos_token_id", "pad_token_id"}


def cut_config(config: Mapping[str, Any], layers: int | str) -> transformers.PreTrainedConfig:
    """The transformers config of a config.json mapping for its first `layers` layers ("all": as it is), per-layer lists cut too.

    Raises InputError for a model type that transformers does not know, and for more layers than the model has.
    """
    if config.get("model_type") not in CONFIG_MAPPING:
        raise InputError(
            f"config.json: model_type: expected one that transformers {transformers.__version__} knows, found {config.get('model_type')!r}; "
            "correct it, or install a newer transformers"
        )
    with quiet():
        made = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(dict(config)))
    text = made.get_text_config()
    depth = text.num_hidden_layers
    if layers == "all":
        return made
    if not isinstance(layers, int) or not 1 <= layers <= depth:
        raise InputError(f"layers: expected 1 to {depth} or 'all', found {layers!r}")
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == depth and name not in _NOT_PER_LAYER:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return made


def load_folder(folder: Path, config: transformers.PreTrainedConfig) -> torch.nn.Module:
    """The causal LM of a checkpoint folder, its weights cast to float32; of a cut config only the tensors of its layers are read.

    Raises InputError when the folder lacks tensors of the model.
    """
    with quiet():
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True,
            local_files_only=True, trust_remote_code=False, use_safetensors=True,
        )  # fmt: skip
    _check_loaded(str(folder), info)
    return model.eval()


def load_tensors(tensors: Mapping[str, torch.Tensor], config: transformers.PreTrainedConfig, attention: str, where: str) -> torch.nn.Module:
    """The causal LM of `config` with the given tensors (names as in the checkpoint), in float32, with the attention function
    registered as `attention`. `where` says whose tensors they are, for the message of the InputError when some are missing."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"config.json: model_type: expected a causal LM, found {config.model_type!r}; use a decoder-only model")
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with quiet():
        model, info = architecture.from_pretrained(
            None, config=config, state_dict=dict(tensors), dtype=torch.float32, attn_implementation=attention, output_loading_info=True
        )
    _check_loaded(where, info)
    return model.eval()


def _check_loaded(where: str, info: Mapping[str, Any]) -> None:
    """transformers fills what is missing with random numbers and a warning."""
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info[problem]:
            found = ", ".join(map(str, sorted(info[problem], key=str)[:3]))
            what = problem.replace("_", " ")
            raise InputError(f"{where}: expected all tensors of the model, found {what}: {found}; does config.json belong to these weights?")
