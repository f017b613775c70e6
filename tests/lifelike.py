"""Random weights whose activations have the statistics of trained ones.

In: a transformers causal LM of any class, in float32, or its config. Out: the same model, or a checkpoint of it, with
weights of a seed, and its measured statistics.

Trained decoders have a few channels of the residual stream that are 50 to 500 times the others, a first token that most
heads attend to, and logits with a standard deviation of 3 to 8. Normal random weights have none of these, and so hide
what dynamic range and sharp attention do to an implementation. Nothing here knows a model: sizes are told by shapes and
by measuring, queries and keys by the names of their projections. A class that normalises its stream, or has one fused
projection, gets what of this it can have; `Statistics` says how much.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lockstep.artifacts.files import write_json
from lockstep.export.quiet import quiet
from lockstep.export.random_model import write_byte_tokenizer
from lockstep.export.torch_model import cut_config, draw_weights

_OUTLIERS = (60.0, -150.0)  # of all tokens, in units of the other channels
_FIRST = 300.0  # of the first token alone, in its own channel
_LOGITS = 5.0  # standard deviation
_TOKENS = 24  # of the sequence that sizes are measured on
_SHARPNESS = 1.0  # of the term that lets all queries meet the first token's key, in units of head_dim ** 0.25
_QUERY = re.compile(r"(q_proj|query|q_lin|wq)$")
_KEY = re.compile(r"(k_proj|key|k_lin|wk)$")


@dataclass(frozen=True)
class Statistics:
    """What a model's activations look like on random tokens after the first one.

    outlier: largest value of the residual stream over its median. first: mean share of the attention that later tokens
    give to the first, over the layers; None where the class does not tell. logits: standard deviation.
    """

    outlier: float
    first: float | None
    logits: float


def first_token(model: PreTrainedModel) -> int:
    """Return the id that sequences are to begin with."""
    token = getattr(model.config.get_text_config(), "bos_token_id", None)
    return token if isinstance(token, int) and 0 <= token < _table(model).shape[0] else 0


Change = Callable[[PreTrainedModel], None]


def no_change(model: PreTrainedModel) -> None:
    """Leave a model as it is."""


def write(config: Mapping[str, Any], seed: int, folder: Path, change: Change = no_change) -> Statistics:
    """Write the checkpoint of a config.json with such weights, float32, and a tokenizer of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    small_config = cut_config(config, "all")
    small_config._experts_implementation = "eager"  # the one that also runs in fp64
    with quiet():
        model = AutoModelForCausalLM.from_config(small_config, attn_implementation="eager", dtype=torch.float32).eval()
        statistics = draw(model, seed, change)
        tied = set(getattr(model, "all_tied_weights_keys", None) or {})
        saved = revert_weight_conversion(model, {k: v for k, v in model.state_dict().items() if k not in tied})
    save_file({name: tensor.contiguous() for name, tensor in saved.items()}, folder / "model.safetensors")
    write_without_weights(config, folder)
    return statistics


def write_without_weights(config: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_byte_tokenizer(folder)
    write_json(folder / "config.json", {**config, "dtype": "float32"})


@torch.no_grad()
def draw(model: PreTrainedModel, seed: int, change: Change = no_change) -> Statistics:
    """Give a model such weights in place. change: is called before the gains of its norms are set."""
    generator = torch.Generator().manual_seed(seed)
    hidden = _table(model).shape[1]
    channels = torch.randperm(hidden, generator=generator)[: len(_OUTLIERS) + 1].tolist()
    draw_weights(model, generator)
    start = first_token(model)
    ids = torch.randint(0, _table(model).shape[0], (1, _TOKENS), generator=generator)
    ids[0, 0] = start
    _embed(model, ids, channels, generator)
    change(model)
    gains = _calibrate_norms(model, ids, hidden)
    _attend_to_first(model, channels)
    _scale_logits(model, ids, gains, channels)
    return _measure(model, ids)


def _table(model: PreTrainedModel) -> torch.Tensor:
    return cast(torch.Tensor, model.get_input_embeddings().weight)


def _forward(model: PreTrainedModel, ids: torch.Tensor, **options: bool) -> Any:
    return model(input_ids=ids, use_cache=False, **options)


def _embed(model: PreTrainedModel, ids: torch.Tensor, channels: list[int], generator: torch.Generator) -> None:
    """Begin the stream with channels of size one, outliers, and the first token's own, as the model scales them."""
    table = _table(model)
    table.copy_(torch.randn(table.shape, generator=generator))
    for channel, value in zip(channels, _OUTLIERS):
        table[:, channel] = value * (1 + 0.05 * torch.randn(table.shape[0], generator=generator))
    table[:, channels[-1]] = torch.randn(table.shape[0], generator=generator)
    table[first_token(model), channels[-1]] = _FIRST
    states = _forward(model, ids, output_hidden_states=True).hidden_states
    if states is None or states[0].shape != (*ids.shape, table.shape[1]):
        return
    factor = states[0][0].abs().median() / table[ids[0]].abs().median()
    if factor.isfinite() and factor > 0:
        table /= factor


def _calibrate_norms(model: PreTrainedModel, ids: torch.Tensor, hidden: int) -> dict[torch.nn.Module, float]:
    """Let norms give channels of about one; return the gain by norm that lets nothing through (0, or -1)."""

    def calibrate(module: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        if module in zeros or not inputs or not isinstance(inputs[0], torch.Tensor):
            return
        weight = module.weight
        gains = weight.clone()
        weight.fill_(1.0)
        hidden_rows = _rows(module.forward(*inputs, **options), hidden)
        weight.fill_(0.0)
        nothing = _rows(module.forward(*inputs, **options), hidden)  # but for a bias, the same for all tokens
        offset = -1.0 if nothing.std(0).max() > 1e-3 else 0.0
        size = (hidden_rows - nothing).square().mean(0).sqrt()
        weight.copy_(gains / size.clamp(1e-5, 1e5) + offset)
        zeros[module] = offset

    zeros: dict[torch.nn.Module, float] = {}
    hooks = [
        module.register_forward_pre_hook(calibrate, with_kwargs=True)
        for module in model.modules()
        if not list(module.children()) and _is_gain(getattr(module, "weight", None), hidden)
    ]
    try:
        _forward(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return zeros


def _is_gain(weight: Any, hidden: int) -> bool:
    return isinstance(weight, torch.nn.Parameter) and weight.dim() == 1 and weight.shape[0] == hidden


def _rows(values: Any, hidden: int) -> torch.Tensor:
    return (values[0] if isinstance(values, tuple) else values).reshape(-1, hidden).clone()


def _attend_to_first(model: PreTrainedModel, channels: list[int]) -> None:
    """Let the queries of all tokens meet the key of the first, where RoPE turns slowest."""
    config = model.config.get_text_config()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.shape[1] != _table(model).shape[1]:
            continue
        layer = re.search(r"\.(\d+)\.", name)
        layer_config = (
            config.per_layer_config[int(layer[1])] if layer and config.is_heterogeneous else config
        )  # Gemma 4
        for pattern, key, channel in (
            (_QUERY, "num_attention_heads", channels[0]),
            (_KEY, "num_key_value_heads", channels[-1]),
        ):
            if not pattern.search(name):
                continue
            count = getattr(layer_config, key, None) or layer_config.num_attention_heads
            if isinstance(count, int) and weight.shape[0] % count == 0:
                dim = weight.shape[0] // count
                weight[dim - 1 :: dim, channel] += _SHARPNESS * dim**0.25


def _scale_logits(
    model: PreTrainedModel, ids: torch.Tensor, gains: dict[torch.nn.Module, float], channels: list[int]
) -> None:
    """Scale the head, or the last norm where the head is tied to the embedding, which then leaves the outliers out."""
    head = model.get_output_embeddings()
    table = _table(model)
    last = next(reversed(gains), None)
    if head is None:
        return
    scaled = [cast(torch.Tensor, head.weight)]
    zero = 0.0
    if head.weight.data_ptr() == table.data_ptr():
        if last is None:
            return
        zero = gains[last]
        bias = getattr(last, "bias", None)
        scaled = [cast(torch.Tensor, last.weight), *([bias] if isinstance(bias, torch.Tensor) else [])]
        scaled[0][channels] = zero
        for name in scaled[1:]:
            name[channels] = 0.0
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    target = min(_LOGITS, cap / 3) if cap else _LOGITS
    for _ in range(4):  # a soft cap bends the line
        deviation = _forward(model, ids).logits.float().std()
        if deviation.isfinite() and deviation > 0:
            for number, tensor in enumerate(scaled):
                begin = 0.0 if number else zero
                tensor.sub_(begin).mul_(target / deviation).add_(begin)


def _measure(model: PreTrainedModel, ids: torch.Tensor) -> Statistics:
    output = _forward(model, ids, output_hidden_states=True, output_attentions=True)
    states = [state[0].abs() for state in output.hidden_states[:-1] or ()] if output.hidden_states else []
    outlier = max((float(state.max() / state.median()) for state in states), default=0.0)
    scores = [score for score in output.attentions or () if score is not None and score.dim() == 4]
    later = [float(score[0, :, ids.shape[1] // 2 :, 0].mean()) for score in scores]
    return Statistics(outlier, sum(later) / len(later) if later else None, float(output.logits.std()))
