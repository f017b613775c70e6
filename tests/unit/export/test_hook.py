"""What reaches attention: arguments are harmless by name or refused, and windows come from transformers' own masks."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from families import FAMILIES
from transformers import masking_utils

from lockstep.errors import InputError
from lockstep.export.attention_hook import HARMLESS, Mask, refused_arguments, window_of
from lockstep.export.tracer import meta_model
from lockstep.export.unique_layers import trace_unique_layers

TINY = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64,
}  # fmt: skip


def test_an_argument_that_nobody_has_looked_at_is_refused_by_its_name():
    assert refused_arguments({"brand_new": 1.0, "dropout": 0.1, "is_causal": True, "s_aux": None}) == [
        "the argument brand_new, which is not known to be harmless"
    ]
    assert "later tokens" in refused_arguments({"is_causal": False})[0]
    assert "sinks" in refused_arguments({"sinks": torch.zeros(1)})[0]
    assert all(HARMLESS.values()), "each with its reason"


@pytest.mark.long
@pytest.mark.exports
def test_sparse_attention_is_refused():
    config = {
        "model_type": "minimax_m3_vl_text", **TINY, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        "index_n_heads": 2, "index_head_dim": 8, "layer_types": ["minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense"] * 2, "dense_intermediate_size": 64,
    }  # fmt: skip
    with pytest.raises(InputError, match="sparse attention .* given as block_indices"):
        trace_unique_layers(meta_model(config, "fp32"))


@pytest.mark.parametrize("window", [1, 300])
def test_windows_are_read_from_the_mask(window):
    assert window_of(masking_utils.sliding_window_causal_mask_function(window), window) == window
    assert window_of(masking_utils.causal_mask_function) == 0


@pytest.mark.parametrize(("mask", "size", "reason"), [
    (masking_utils.bidirectional_mask_function, None, "lets tokens see later ones"),
    (masking_utils.or_masks(masking_utils.causal_mask_function, lambda *_: torch.tensor(True)), None, "lets tokens see later ones"),  # noqa: E501
    (masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=int)), 8, "more than the distance"),
    (masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: (k + q) % 2 == 0), None, "has holes"),  # noqa: E501
    (masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.padding_mask_function(torch.ones(1, 4, dtype=bool))), None, "depends on the tokens"),  # noqa: E501
])  # fmt: skip
def test_masks_that_are_no_window_are_refused(mask, size, reason):
    with pytest.raises(InputError, match=reason):
        window_of(mask, size)


@pytest.mark.parametrize("use", [
    lambda mask: mask[:, :1], lambda mask: mask + 1, lambda mask: mask.shape, lambda mask: torch.cat([mask]),
    lambda mask: ~mask,
])  # fmt: skip
def test_a_mask_may_be_handed_on_and_nothing_else(use):
    with pytest.raises(InputError, match="change the attention mask"):
        use(Mask(0))


@pytest.mark.exports
@pytest.mark.long
def test_a_window_that_is_switched_off_is_in_no_graph():
    """Of Qwen2 MoE, whose windows are in the mask alone; test_architectures.py has its windows."""
    meta = meta_model({**FAMILIES["qwen2_moe"].config, "layer_types": None, "use_sliding_window": False}, "fp32")
    assert [layer.batchless.window for layer in trace_unique_layers(meta).layers] == [0, 0, 0]


@pytest.mark.exports
@pytest.mark.parametrize(("config", "reason"), [
    ({"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 32, "vocab_size": 64}, "ALiBi"),
    pytest.param({"model_type": "falcon", **TINY, "alibi": True}, "ALiBi", marks=pytest.mark.long),
    pytest.param({"model_type": "falcon", **TINY}, "computes attention in code of its own", marks=pytest.mark.long),
    ({"model_type": "bert", **TINY}, "lets tokens see later ones, as encoders do"),
    ({**FAMILIES["gemma3_text"].config, "use_bidirectional_attention": True}, "lets tokens see later ones"),
    pytest.param({"model_type": "gemma4_text", **TINY, "head_dim": 8, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8, "layer_types": ["full_attention"] * 2}, "keys and values of earlier layers", marks=pytest.mark.long),  # noqa: E501
    pytest.param({"model_type": "mamba", **TINY}, "recurrent layers", marks=pytest.mark.long),
    pytest.param({"model_type": "recurrent_gemma", **TINY}, "recurrent layers", marks=pytest.mark.long),
    pytest.param({"model_type": "doge", **TINY}, "change the attention mask", marks=pytest.mark.long),
])  # fmt: skip
def test_a_refusal_says_the_real_reason_and_nothing_on_the_side(config, reason, capfd):
    with pytest.raises(InputError) as error:
        trace_unique_layers(meta_model(config, "fp32"))
    assert reason in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400
    assert capfd.readouterr() == ("", "")


def test_what_is_replaced_during_a_trace_is_still_what_transformers_calls():
    actual = inspect.getsource(importlib.import_module("transformers.masking_utils")._preprocess_mask_arguments)
    assert "find_packed_sequence_indices(position_ids)" in actual
