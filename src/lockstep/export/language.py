"""The language model inside a wrapper, such as one of text and images.

In: a config.json mapping. Out: that of the causal LM in it, and a class that runs it. Needs torch and transformers.

Wrappers keep the settings of their language model in `text_config`, or among their own (Qwen2-VL). Where transformers
has a causal LM of these settings, it is used; else its bare decoder with a linear head, which `check_wrapper` compares
with the wrapper itself.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from lockstep.checkpoint.language import language_name
from lockstep.config.model_config import TEXT_KEY, ties_head, without_packing
from lockstep.errors import InputError
from lockstep.export.quiet import quiet
from lockstep.tolerances import EXPORT

# Types of published checkpoints with custom code, and the equivalent type of transformers.
_ALIASES = {"kimi_k2": "deepseek_v3"}
_TOKENS = 24


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json mapping of the causal LM in a wrapper; any other config is returned unchanged."""
    config = {**config, "model_type": _alias(config.get("model_type"))}
    text = _text_mapping(config)
    if text is None:
        return config
    text["model_type"] = _alias(text["model_type"])
    # Whether the head is tied is a setting of the wrapper, which the inner config may contradict by its default.
    tied = ties_head(config)
    if tied is not None:
        text["tie_word_embeddings"] = tied
    return text


def _alias(model_type: Any) -> Any:
    if isinstance(model_type, str):  # what a file says may be anything
        return _ALIASES.get(model_type, model_type)
    return model_type


def _text_mapping(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of a wrapper's language model; None for any other config, or one that cannot be read."""
    model_type = config["model_type"]
    inner = config.get(TEXT_KEY)
    if not isinstance(inner, Mapping):
        inner = {}
    if model_type not in CONFIG_MAPPING:  # custom code
        if inner.get("model_type") not in {*CONFIG_MAPPING, *_ALIASES}:
            return None
        return copy.deepcopy(dict(inner))
    settings = _try_build(config)
    if settings is None:
        return None
    text = settings.get_text_config()
    if text is settings or getattr(text, "is_encoder_decoder", False):
        return None
    if type(settings) in MODEL_FOR_CAUSAL_LM_MAPPING and not _has_decoder(type(text)):
        return None  # its causal LM takes the whole config (Emu3)
    if inner.get("model_type") == text.model_type:
        return copy.deepcopy(dict(inner))  # as written, so that derived settings are derived again
    return {**text.to_diff_dict(), "model_type": text.model_type}


def _try_build(config: Mapping[str, Any]) -> PreTrainedConfig | None:
    """Return transformers' config of a known model type; None if its class rejects it, which `build_config` reports."""
    try:
        with quiet():
            settings = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(without_packing(config)))
            settings.get_text_config()
    except Exception:  # anything the class finds wrong; several text configs
        return None
    return settings


def build_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the transformers config of a config.json mapping.

    For a wrapper it is that of its language model; packing of weights is left out. Raises InputError for a model type
    that the installed transformers does not support as a causal LM, and for values that its class rejects.
    """
    values = copy.deepcopy(without_packing(language_config(config)))
    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise InputError(
            f"config.json: model_type: expected a type of transformers {transformers.__version__}, found "
            f"{model_type!r}; a model with custom code cannot be used"
        )
    with quiet(), refused_in_one_line(model_type):
        settings: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(values)
    if not register_decoder(settings):
        raise InputError(
            f"config.json: model_type: expected a causal LM of transformers {transformers.__version__}, or a wrapper of"
            f" one, found {config['model_type']!r}; use a decoder-only model"
        )
    if getattr(settings, "reorder_and_upcast_attn", False):  # of GPT-2: scores in float32, as graphs have them anyway
        settings.reorder_and_upcast_attn = False  # its own code takes float32 alone
    return settings


@contextlib.contextmanager
def refused_in_one_line(model_type: str) -> Iterator[None]:
    """Turn whatever a model's class raises, for example for a contradictory config, into an InputError."""
    try:
        yield
    except Exception as error:
        if sys.flags.optimize > 1:
            raise InputError(
                "Python: expected docstrings, which transformers reads, found none; unset PYTHONOPTIMIZE or set it to 1"
            ) from error
        raise InputError(
            f"config.json: expected the config of a {model_type!r} model, found one that it refuses:"
            f" {root_cause(error)}"
        ) from error


def root_cause(error: BaseException) -> str:
    """Return the first line of an error's innermost cause, an InputError at the latest."""
    while not isinstance(error, InputError):
        inner = error.__cause__ or error.__context__
        if inner is None:
            break
        error = inner
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return line if isinstance(error, InputError) else f"{type(error).__name__}: {line}"


def per_layer_settings(config: PreTrainedConfig, depth: int) -> dict[str, Sequence[Any]]:
    """Return the config's lists with an entry for each layer, except lists of layer numbers."""
    lists: dict[str, Sequence[Any]] = {}
    for key, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == depth and key not in NOT_PER_LAYER:
            if list(value) != list(range(depth)):
                lists[key] = value
    return lists


# Lists of a config that can be as long as the model is deep by chance.
NOT_PER_LAYER = frozenset(
    {
        "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "time_step_limit", "mlp_multipliers",
        "ssm_multipliers", "mtp_layers_block_type",
    }
)  # fmt: skip


def register_decoder(config: PreTrainedConfig) -> bool:
    """Give a wrapper's bare decoder a linear head where needed; return whether the config is a causal LM's then."""
    kind = type(config)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    if not _has_decoder(kind):
        return False
    AutoModelForCausalLM.register(kind, _with_head(kind), exist_ok=True)  # else rejects configs of transformers' own
    return True


def _has_decoder(kind: type[PreTrainedConfig]) -> bool:
    is_text = kind in MODEL_MAPPING and getattr(kind, "base_config_key", "") == TEXT_KEY
    return is_text or kind in MODEL_FOR_CAUSAL_LM_MAPPING


def _with_head(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    decoder: Any = MODEL_MAPPING[config_class]
    base: Any = next(kind for kind in decoder.__mro__[1:] if issubclass(kind, PreTrainedModel))

    class DecoderWithHead(base, GenerationMixin):
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config: PreTrainedConfig):
            super().__init__(config)
            self.model = decoder(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: torch.Tensor | None = None, **options: Any) -> CausalLMOutputWithPast:
            output = self.model(input_ids=input_ids, **options)
            return CausalLMOutputWithPast(
                logits=self.lm_head(output.last_hidden_state),
                past_key_values=output.past_key_values,
                hidden_states=getattr(output, "hidden_states", None),
                attentions=getattr(output, "attentions", None),
            )

    DecoderWithHead.config_class = config_class
    DecoderWithHead.base_model_prefix = "model"
    return DecoderWithHead


@torch.no_grad()
def check_wrapper(config: Mapping[str, Any], small: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Check that a language model gives the same logits as its wrapper for text alone.

    config: the wrapper's. small: that of `model`, a small language model of the same settings, in float32. The
    wrapper's towers have no weights, so reading them fails. Raises InputError where the two differ.
    """
    settings = _try_build(config) if config.get("model_type") in CONFIG_MAPPING else None
    if settings is None or type(settings) not in MODEL_FOR_MULTIMODAL_LM_MAPPING or _text_mapping(config) is None:
        return  # no wrapper, or one whose code is not in transformers
    refusal = f"model type {config['model_type']!r} cannot be split: "
    sections = {name: copy.deepcopy(config[name]) for name in settings.sub_configs if name in config}
    is_tied = bool(getattr(model, "all_tied_weights_keys", None))
    # The wrapper as it is, around the small language model.
    small_sections = {**sections, TEXT_KEY: dict(small), "tie_word_embeddings": is_tied}
    try:
        with quiet(), torch.device("meta"):
            wrapper = AutoModelForMultimodalLM.from_config(
                type(settings).from_dict(small_sections), attn_implementation="eager", dtype=torch.float32
            ).eval()
        _share_tensors(wrapper, model)
        ids = torch.randint(0, model.config.vocab_size, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
        logits = wrapper(input_ids=ids, use_cache=False).logits
        expected = model(input_ids=ids, use_cache=False).logits
        difference = float((logits.cpu() - expected).abs().max() / expected.std())
    except Exception as error:  # of a class that does more with text than its language model
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(f"{refusal}it does not run on text alone: {reason}") from error
    if not difference <= EXPORT:
        raise InputError(
            f"{refusal}on text alone its logits differ by {difference:.1e} of their standard deviation from those of "
            f"its language model ({small['model_type']}), expected at most {EXPORT:.0e}"
        )


def _share_tensors(wrapper: PreTrainedModel, model: PreTrainedModel) -> None:
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    missing = set(tensors)
    for prefix, module in wrapper.named_modules():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for name in store:
                language = language_name(f"{prefix}.{name}")
                if language in tensors:
                    store[name] = tensors[language]
                    missing.discard(language)
    if missing:
        raise InputError(f"{min(missing)} of its language model is not found in it")
