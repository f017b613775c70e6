"""The language model inside a wrapper, such as one of text and images.

In: a config.json mapping. Out: that of the causal LM in it, and a class that runs it. Needs torch and transformers.

Wrappers keep the settings of their language model in `text_config`, or among their own (Qwen2-VL). Where transformers
has a causal LM of these settings, it is taken; else its bare decoder with a linear head, which `check_wrapper` holds to
the wrapper itself.
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

# Types of published checkpoints with code of their own, and the type of transformers whose code it is.
_ALIASES = {"kimi_k2": "deepseek_v3"}
_TOKENS = 24


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json mapping of the causal LM in a wrapper; any other config is returned as it is."""
    config = {**config, "model_type": _alias(config.get("model_type"))}
    text = _text_mapping(config)
    if text is None:
        return config
    text["model_type"] = _alias(text["model_type"])
    tied = ties_head(config)
    return text if tied is None else text | {"tie_word_embeddings": tied}


def _alias(model_type: Any) -> Any:
    return _ALIASES.get(model_type, model_type) if isinstance(model_type, str) else model_type


def _text_mapping(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of a wrapper's language model; None for what is no wrapper, or one that cannot be read."""
    model_type = config["model_type"]
    inner = config[TEXT_KEY] if isinstance(config.get(TEXT_KEY), Mapping) else None
    if model_type not in CONFIG_MAPPING:  # with code of its own
        known = inner is not None and inner.get("model_type") in {*CONFIG_MAPPING, *_ALIASES}
        return copy.deepcopy(dict(inner)) if inner is not None and known else None
    made = _made(config)
    if made is None:
        return None
    text = made.get_text_config()
    if text is made or getattr(text, "is_encoder_decoder", False):
        return None
    if type(made) in MODEL_FOR_CAUSAL_LM_MAPPING and not _has_decoder(type(text)):
        return None  # its causal LM is made of the whole config (Emu3)
    if inner is not None and inner.get("model_type") == text.model_type:
        return copy.deepcopy(dict(inner))  # as it is written, so that what follows from it is derived anew
    return {**text.to_diff_dict(), "model_type": text.model_type}


def _made(config: Mapping[str, Any]) -> PreTrainedConfig | None:
    """Return the config that transformers makes; None for one that its class refuses, which is said elsewhere."""
    try:
        with quiet():
            made = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(without_packing(config)))
            made.get_text_config()
    except Exception:  # whatever the class finds wrong; several text configs
        return None
    return made


def build_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the transformers config of a config.json mapping.

    Of a wrapper it is that of its language model; what it says of packed weights is left out. Raises InputError for a
    model type that the installed transformers does not know as a causal LM, and for values that its class refuses.
    """
    values = copy.deepcopy(without_packing(language_config(config)))
    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise InputError(
            f"config.json: model_type: expected a type of transformers {transformers.__version__}, found "
            f"{model_type!r}; a model with code of its own cannot be used"
        )
    with quiet(), refused_in_one_line(model_type):
        made: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(values)
    if not register_decoder(made):
        raise InputError(
            f"config.json: model_type: expected a causal LM of transformers {transformers.__version__}, or a wrapper of"
            f" one, found {config['model_type']!r}; use a decoder-only model"
        )
    if getattr(made, "reorder_and_upcast_attn", False):  # of GPT-2: scores in float32, as graphs have them anyway
        made.reorder_and_upcast_attn = False  # its own code takes float32 alone
    return made


@contextlib.contextmanager
def refused_in_one_line(model_type: str) -> Iterator[None]:
    """Turn whatever a model's class raises, for a config that contradicts itself, say, into an InputError."""
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
    while (inner := error.__cause__ or error.__context__) is not None and not isinstance(error, InputError):
        error = inner
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return line if isinstance(error, InputError) else f"{type(error).__name__}: {line}"


def per_layer_settings(config: PreTrainedConfig, depth: int) -> dict[str, Sequence[Any]]:
    """Return the config's lists with an entry for each layer, but for lists of the layers' own numbers."""
    lists = {
        key: value for key, value in vars(config).items() if isinstance(value, (list, tuple)) and len(value) == depth
    }
    return {
        key: value for key, value in lists.items() if key not in NOT_PER_LAYER and list(value) != list(range(depth))
    }


# Lists of a config that can be as long as the model is deep by chance.
NOT_PER_LAYER = frozenset(
    {
        "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "time_step_limit", "mlp_multipliers",
        "ssm_multipliers", "mtp_layers_block_type",
    }
)  # fmt: skip


def register_decoder(config: PreTrainedConfig) -> bool:
    """Give a wrapper's bare decoder a linear head where needed; return whether it is a causal LM then."""
    kind = type(config)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    if not _has_decoder(kind):
        return False
    AutoModelForCausalLM.register(kind, _with_head(kind), exist_ok=True)  # else only configs of others are taken
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
    """Hold a language model to its wrapper: the same logits for text alone.

    config: the wrapper's. small: that of `model`, a small language model of the same settings, in float32. Its towers
    have no weights, so what reads them shows. Raises InputError where the two differ.
    """
    made = _made(config) if config.get("model_type") in CONFIG_MAPPING else None
    if made is None or type(made) not in MODEL_FOR_MULTIMODAL_LM_MAPPING or _text_mapping(config) is None:
        return  # no wrapper, or one whose code is not here
    refusal = f"model type {config['model_type']!r} cannot be split: "
    parts = {name: config[name] for name in made.sub_configs if name in config}
    try:
        with quiet(), torch.device("meta"):
            settings = type(made).from_dict(
                {**copy.deepcopy(parts), TEXT_KEY: dict(small), "tie_word_embeddings": _is_tied(model)}
            )
            wrapper = AutoModelForMultimodalLM.from_config(
                settings, attn_implementation="eager", dtype=torch.float32
            ).eval()
        _take_tensors(wrapper, model)
        ids = torch.randint(0, model.config.vocab_size, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
        found = wrapper(input_ids=ids, use_cache=False).logits
        expected = model(input_ids=ids, use_cache=False).logits
        difference = float((found.cpu() - expected).abs().max() / expected.std())
    except Exception as error:  # of a class that does more with text than its language model
        found_line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(f"{refusal}it does not run on text alone: {found_line}") from error
    if not difference <= EXPORT:
        raise InputError(
            f"{refusal}on text alone its logits differ by {difference:.1e} of their standard deviation from those of "
            f"its language model ({small['model_type']}), expected at most {EXPORT:.0e}"
        )


def _is_tied(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "all_tied_weights_keys", None))


def _take_tensors(wrapper: PreTrainedModel, model: PreTrainedModel) -> None:
    """Put the parameters and buffers of a language model into its wrapper, all of them."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    taken = set()
    for prefix, module in wrapper.named_modules():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for name in store:
                language = language_name(f"{prefix}.{name}")
                if language in tensors:
                    store[name] = tensors[language]
                    taken.add(language)
    if left := sorted(set(tensors) - taken):
        raise InputError(f"{left[0]} of its language model is not found in it")
