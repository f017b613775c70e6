"""llama.cpp, from a GGUF file written of a checkpoint of a Llama or of a mixture of Qwen3.

F16, Q8_0, or Q4_0 (4 bits) with the head, or the table that is both, in Q8_0; groups of 32, int8 activations.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from side import Start, main

_FILE = "model.gguf"


def make(job: dict) -> None:
    import gguf
    from safetensors import safe_open

    folder = Path(job["checkpoint"])
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads, hidden = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    experts = config.get("num_experts")
    head_dim = config.get("head_dim") or hidden // heads
    architecture = "llama"
    if experts:
        architecture = "qwen3moe"
    writer = gguf.GGUFWriter(str(Path(job["out"]) / _FILE), architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    kinds = gguf.GGMLQuantizationType
    layers = kinds[job["precision"]]
    head = "lm_head"
    if config.get("tie_word_embeddings"):
        head = "model.embed_tokens"
    stacks: dict[str, dict[int, np.ndarray]] = {}  # of experts, those that were read
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():
                array = file.get_tensor(name).astype(np.float32)
                kind = layers
                if name == f"{head}.weight":
                    if layers != kinds.F16:
                        kind = kinds.Q8_0  # as llama.cpp's own quantizer writes it
                elif array.ndim == 1 or name.endswith(".mlp.gate.weight"):
                    kind = kinds.F32
                turned = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
                if turned and not experts:
                    # a Llama's RoPE turns neighbours there, the checkpoint's the halves of a head
                    pairs = array.reshape(turned, 2, -1, array.shape[1])
                    array = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
                numbers = gguf.quants.quantize(array, kind)
                if expert := _EXPERT.fullmatch(name):
                    name = f"{expert[1]}.{expert[3]}_exps.weight"
                    stack = stacks.setdefault(name, {})
                    stack[int(expert[2])] = numbers
                    if len(stack) < experts:
                        continue
                    numbers = np.stack([stack[number] for number in range(experts)])
                    del stacks[name]
                writer.add_tensor(_named(name), numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp)\.experts\.(\d+)\.(\w+)\.weight")
_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj_exps": "ffn_gate_exps", "mlp.up_proj_exps": "ffn_up_exps", "mlp.down_proj_exps": "ffn_down_exps",
}  # fmt: skip
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _named(name: str) -> str:
    """Return the tensor's name in a GGUF file."""
    stem = name.removesuffix(".weight")
    if stem in _OTHERS:
        return f"{_OTHERS[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.weight"


def opened(job: dict) -> Start:
    import llama_cpp

    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(Path(job["out"]) / _FILE).encode(), settings)
    if not model:
        raise SystemExit("llama.cpp cannot read the model")
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_seq_max = job["batch"]
    parameters.n_ctx = job["batch"] * max(job["capacity"], 256)
    # n_batch: tokens of a call, n_ubatch: tokens that it computes at a time
    parameters.n_batch = parameters.n_ctx
    parameters.n_ubatch = 512
    parameters.n_threads = parameters.n_threads_batch = job["threads"]
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise SystemExit("llama.cpp cannot open the model")
    batch = llama_cpp.llama_batch_init(parameters.n_batch, 0, 1)
    vocabulary = json.loads((Path(job["checkpoint"]) / "config.json").read_text())["vocab_size"]

    def run(tokens: np.ndarray, first: int) -> np.ndarray:
        """Run tokens [sequences, tokens], at positions from `first`. Returns the next token of each sequence."""
        batch.n_tokens = tokens.size
        last = tokens.shape[1] - 1
        places = []
        for place, ((row, column), token) in enumerate(np.ndenumerate(tokens)):
            batch.token[place] = int(token)
            batch.pos[place] = first + column
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = row
            batch.logits[place] = column == last
            places += [place] * (column == last)
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama.cpp could not decode")
        logits = [llama_cpp.llama_get_logits_ith(context, place) for place in places]
        return np.array([np.ctypeslib.as_array(at, (vocabulary,)).argmax() for at in logits])

    def start(prompts: np.ndarray):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        state = {"length": prompts.shape[1], "tokens": run(prompts, 0)}

        def step() -> None:
            state["tokens"] = run(state["tokens"][:, None], state["length"])
            state["length"] += 1

        return step

    return start


if __name__ == "__main__":
    main(("gguf", "llama-cpp-python", "numpy"), make, opened)
