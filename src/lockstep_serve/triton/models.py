"""The five models that clients of the TensorRT-LLM Triton backend use, and an ensemble by each served model's name.

Names, datatypes and shapes of their tensors as that backend's config.pbtxt files give them, and what this server does
with each input.

required, taken: as named. ignored: it cannot change an answer of this server. refused: it asks for something that
this server cannot do, and so is an error unless all of its values are 0, false or empty, which ask for nothing. A name
after "=" is an older one of the same input: taken, not listed in the metadata. A last name is the ensemble's for an
input of one of its steps, where that has another: with "_" it is an output of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep_serve.adapters import one_of
from lockstep_serve.bodies import BadRequest

VERSION = "1"
_GENERATION = """
    return_log_probs BOOL 1 taken
    return_context_logits BOOL 1 refused
    return_generation_logits BOOL 1 refused
    return_perf_metrics=return_kv_cache_reuse_stats BOOL 1 refused
    num_return_sequences INT32 1 taken
    beam_width INT32 1 taken
    temperature FP32 1 taken
    repetition_penalty FP32 1 taken
    min_tokens=min_length INT32 1 taken
    presence_penalty FP32 1 taken
    frequency_penalty FP32 1 taken
    seed=random_seed UINT64 1 taken
    end_id INT32 1 taken
    pad_id INT32 1 ignored
    exclude_input_in_output BOOL 1 taken
    prompt_embedding_table FP16 -1,-1 refused
    prompt_vocab_size INT32 1 ignored
    lora_task_id UINT64 1 taken
    lora_weights FP16 -1,-1 refused
    lora_config INT32 -1,3 refused
    guided_decoding_guide_type BYTES 1 refused
    guided_decoding_guide BYTES 1 refused
"""
_TEXT = """
    text_input BYTES 1 required
    max_tokens INT32 1 required
    decoder_text_input BYTES 1 ignored
    bad_words BYTES -1 taken
    stop_words BYTES -1 taken
    top_k INT32 1 taken
    top_p FP32 1 taken
    length_penalty FP32 1 ignored
    stream BOOL 1 taken
    prompt_table_extra_id UINT64 1 ignored
    embedding_bias_words BYTES -1 taken
    embedding_bias_weights FP32 -1 taken
"""
_INPUTS = {
    "ensemble": _TEXT + _GENERATION,
    "tensorrt_llm_bls": _TEXT
    + _GENERATION
    + """
    image_input FP16 -1,3,-1,-1 refused
    image_bytes_input UINT8 -1,-1,-1,-1 refused
    image_url_input BYTES 1 refused
    video_bytes_input UINT8 -1,-1,-1,-1 refused
    num_draft_tokens INT32 1 refused
    use_draft_logits BOOL 1 ignored
""",
    "tensorrt_llm": """
    input_ids INT32 -1 required _INPUT_ID
    input_lengths INT32 1 required _REQUEST_INPUT_LEN
    request_output_len INT32 1 required _REQUEST_OUTPUT_LEN
    stop_words_list INT32 2,-1 taken _STOP_WORDS_IDS
    bad_words_list INT32 2,-1 taken _BAD_WORDS_IDS
    embedding_bias FP32 -1 taken _EMBEDDING_BIAS
    runtime_top_k INT32 1 taken top_k
    runtime_top_p FP32 1 taken top_p
    runtime_top_p_min FP32 1 ignored
    runtime_top_p_decay FP32 1 refused
    runtime_top_p_reset_ids INT32 1 ignored
    len_penalty FP32 1 ignored length_penalty
    early_stopping BOOL 1 ignored
    beam_search_diversity_rate FP32 1 ignored
    stop BOOL 1 taken
    streaming BOOL 1 taken stream
    encoder_input_features FP16 -1,-1 refused
    encoder_output_lengths INT32 1 ignored
    decoder_input_ids INT32 -1 ignored
    decoder_input_lengths INT32 1 ignored
    draft_input_ids INT32 -1 refused
    draft_logits FP32 -1,-1 refused
    draft_acceptance_threshold FP32 1 ignored
    prompt_table_extra_ids UINT64 -1 ignored
    cross_attention_mask BOOL -1,-1 refused
    skip_cross_attn_blocks BOOL 1 refused
    mrope_rotary_cos_sin FP32 -1 refused
    mrope_position_deltas INT64 1 refused
    context_phase_params UINT8 -1 refused
    retention_token_range_starts INT32 -1 ignored
    retention_token_range_ends INT32 -1 ignored
    retention_token_range_priorities INT32 -1 ignored
    retention_token_range_durations_ms INT32 -1 ignored
    retention_decode_priority INT32 1 ignored
    retention_decode_duration_ms INT32 1 ignored
    lookahead_window_size INT32 1 refused
    lookahead_ngram_size INT32 1 refused
    lookahead_verification_set_size INT32 1 refused
"""
    + _GENERATION,
    "preprocessing": """
    QUERY BYTES 1 required text_input
    REQUEST_OUTPUT_LEN INT32 1 required max_tokens
    DECODER_QUERY BYTES 1 ignored decoder_text_input
    IMAGE_BYTES UINT8 -1,-1,-1,-1 refused
    IMAGE_URL BYTES 1 refused
    VIDEO_BYTES UINT8 -1,-1,-1,-1 refused
    BAD_WORDS_DICT BYTES -1 taken bad_words
    STOP_WORDS_DICT BYTES -1 taken stop_words
    EMBEDDING_BIAS_WORDS BYTES -1 taken embedding_bias_words
    EMBEDDING_BIAS_WEIGHTS FP32 -1 taken embedding_bias_weights
    END_ID INT32 1 taken end_id
    PAD_ID INT32 1 taken pad_id
    PROMPT_TABLE_EXTRA_ID UINT64 1 ignored prompt_table_extra_id
""",
    "postprocessing": """
    TOKENS_BATCH INT32 -1,-1 required _output_ids
    SEQUENCE_LENGTH INT32 -1 required _sequence_length
    CONTEXT_IDS INT32 -1,-1 taken _CONTEXT_IDS
    IS_LAST BOOL 1 taken _IS_LAST
""",
}
_ANSWER = """
    cum_log_probs FP32 -1
    output_log_probs FP32 -1,-1
    batch_index INT32 1
    sequence_index INT32 1
"""
_OUTPUTS = {
    "ensemble": "text_output BYTES -1" + _ANSWER,
    "tensorrt_llm_bls": "text_output BYTES -1" + _ANSWER,
    "tensorrt_llm": "output_ids INT32 -1,-1\nsequence_length INT32 -1" + _ANSWER,
    "preprocessing": """
    INPUT_ID INT32 -1
    REQUEST_INPUT_LEN INT32 1
    DECODER_INPUT_ID INT32 -1
    REQUEST_DECODER_INPUT_LEN INT32 1
    BAD_WORDS_IDS INT32 2,-1
    STOP_WORDS_IDS INT32 2,-1
    EMBEDDING_BIAS FP32 -1
    REQUEST_OUTPUT_LEN INT32 -1
    OUT_END_ID INT32 1
    OUT_PAD_ID INT32 1
""",
    "postprocessing": "OUTPUT BYTES -1",
}
# Outputs of that backend that this server never sends: a client that lists them gets the others, as there.
NEVER_MADE = set(
    """
    context_logits generation_logits kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks
    arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns
    acceptance_rate total_accepted_draft_tokens total_draft_tokens OUT_PROMPT_TABLE_EXTRA_IDS
    """.split()
)


@dataclass(frozen=True)
class Spec:
    """A tensor; dims: without the batch, -1: any. use: required, taken, ignored or refused. value: ensemble's name."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    use: str = ""
    value: str = ""


@dataclass(frozen=True)
class Model:
    """A model and its named tensors. inputs: older names too."""

    name: str
    inputs: dict[str, Spec] = field(default_factory=dict)
    outputs: dict[str, Spec] = field(default_factory=dict)

    @property
    def generates(self) -> bool:
        """Return whether the model generates tokens, and is decoupled: it may answer with a stream."""
        # Only models that generate have this input.
        return "beam_width" in self.inputs

    @property
    def listed(self) -> list[Spec]:
        """Return the inputs, each once."""
        return [spec for name, spec in self.inputs.items() if name == spec.name]


def _specs(table: str) -> dict[str, Spec]:
    specs = {}
    for line in filter(None, map(str.strip, table.splitlines())):
        names, datatype, dims, *use = line.split()
        name = names.partition("=")[0]
        spec = Spec(name, datatype, tuple(map(int, dims.split(","))), *use)
        specs.update(dict.fromkeys(names.split("="), spec))
    return specs


MODELS = {name: Model(name, _specs(_INPUTS[name]), _specs(_OUTPUTS[name])) for name in _INPUTS}


def model_of(models: Mapping[str, Model], name: str, version: str = "") -> Model:
    """Return the model of a name and a version, empty for any. Raises BadRequest, 404."""
    if name not in models:
        raise BadRequest(f"model: expected {one_of([*models])}, found {name[:80]!r}", "model", 404)
    if version not in ("", VERSION):
        raise BadRequest(f"version: expected {VERSION} of {name}, found {version[:20]!r}", "version", 404)
    return models[name]


def metadata(model: Model) -> dict[str, Any]:
    """Return the answer of GET /v2/models/NAME."""

    def tensor(spec: Spec) -> dict[str, Any]:
        # As in Triton, shapes include the batch here, but not in the configuration below.
        return {"name": spec.name, "datatype": spec.datatype, "shape": [-1, *spec.dims]}

    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": "lockstep",
        "inputs": [tensor(spec) for spec in model.listed],
        "outputs": [tensor(spec) for spec in model.outputs.values()],
    }


def config(model: Model, max_batch_size: int) -> dict[str, Any]:
    """Return the answer of GET /v2/models/NAME/config, as far as there is one."""

    def tensor(spec: Spec) -> dict[str, Any]:
        data_type = f"TYPE_{spec.datatype}"
        if spec.datatype == "BYTES":
            data_type = "TYPE_STRING"
        return {"name": spec.name, "data_type": data_type, "dims": list(spec.dims)}

    return {
        "name": model.name,
        "backend": "lockstep",
        "max_batch_size": max_batch_size,
        "input": [{**tensor(spec), "optional": spec.use != "required"} for spec in model.listed],
        "output": [tensor(spec) for spec in model.outputs.values()],
        "model_transaction_policy": {"decoupled": model.generates},
    }
