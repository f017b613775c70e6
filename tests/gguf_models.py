"""Small GGUF files as llama.cpp's converter writes them: each kind of vocabulary, a random model of each architecture.

Needs NumPy and the package gguf alone: `tests/data/make_gguf.py` runs it with llama.cpp.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TABLE = Path(__file__).with_name("data") / "gguf.json"
# Kinds of tokenizers: what the file says besides tokens.
KINDS: dict[str, dict[str, Any]] = {
    "gpt-2": {"model": "gpt2", "pre": "gpt-2"},
    "smollm": {"model": "gpt2", "pre": "smollm", "add_bos_token": False},
    "llama-bpe": {"model": "gpt2", "pre": "llama-bpe"},
    "qwen2": {"model": "gpt2", "pre": "qwen2"},
    "sentencepiece": {"model": "llama", "pre": "default"},
    "sentencepiece, no space in front": {"model": "llama", "pre": "default", "add_space_prefix": False},
}
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
BYTE = 6
HEADS = 4
GROUPS = 2
HIDDEN = 64
WIDE = 96
LENGTH = 64
# Architectures: what each says and has besides what all do. 7 layers: gemma3 has a full layer after five of a window.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, llama3's RoPE": {"divisors": True, "rope.freq_base": 500000.0},
    "llama, RoPE scaled": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "qwen2": {"bias": True, "tied": True},
    "qwen3": {"norms": ("attn_q_norm", "attn_k_norm"), "attention.key_length": 32, "attention.value_length": 32},
    "phi3": {"merged": True},
    "gemma2": {
        "norms": ("post_attention_norm", "post_ffw_norm"), "tied": True, "attention.key_length": 32,
        "attention.value_length": 32, "attention.sliding_window": 8, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "norms": ("post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm"), "tied": True, "layers": 7,
        "attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 8,
        "rope.freq_base": 1000000.0,
    },
}  # fmt: skip
_FORM = ("divisors", "bias", "tied", "norms", "merged", "layers")


def table() -> dict[str, Any]:
    """What `tests/data/make_gguf.py` wrote: strings, vocabularies, and what llama.cpp makes of them."""
    return json.loads(TABLE.read_text())


def write_tokenizer(writer: gguf.GGUFWriter, kind: str, vocabularies: dict[str, Any]) -> int:
    """Add a tokenizer of a kind of KINDS, or none; return how many tokens it has."""
    if kind == "none":
        return len(vocabularies["gpt2"]["tokens"])
    metadata = dict(KINDS[kind])
    vocabulary = vocabularies[metadata["model"]]
    writer.add_tokenizer_model(metadata.pop("model"))
    writer.add_tokenizer_pre(metadata.pop("pre"))
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    if "merges" in vocabulary:
        writer.add_token_merges(vocabulary["merges"])
    if "scores" in vocabulary:
        writer.add_token_scores(vocabulary["scores"])
    writer.add_bos_token_id(vocabulary["bos"])
    writer.add_eos_token_id(vocabulary["eos"])
    for name, flag in metadata.items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
    return len(vocabulary["tokens"])


def write_model(
    path: Path, name: str, vocabularies: dict[str, Any], kind: str = "smollm", quantized: str = "F32", **changes: Any
) -> Path:
    """Write a random model.

    name: of MODELS. quantized: how matrices are stored. changes: further keys of the architecture (None: without it),
    `architecture`, `tensors` (a dict of further ones; None: without it) and `more` (a dict of other keys).
    """
    architecture = changes.pop("architecture", name.partition(",")[0])
    extra = changes.pop("tensors", {})
    extra_fields = changes.pop("more", {})
    metadata = {**MODELS[name], **changes}
    head = metadata.get("attention.key_length", HIDDEN // HEADS)
    layers = metadata.get("layers", 2)
    writer = gguf.GGUFWriter(path, architecture)
    tokens = write_tokenizer(writer, kind, vocabularies)
    keys = {
        "block_count": layers, "context_length": LENGTH, "embedding_length": HIDDEN, "feed_forward_length": WIDE,
        "attention.head_count": HEADS, "attention.head_count_kv": GROUPS,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0, "rope.dimension_count": head,
        **{key: value for key, value in metadata.items() if key not in _FORM},
    }  # fmt: skip
    for key, value in {**{f"{architecture}.{key}": value for key, value in keys.items()}, **extra_fields}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            add[type(value)](key, value)
    tensors = _tensors(metadata, architecture, tokens, head, layers)
    for tensor, numbers in {**tensors, **extra}.items():
        if numbers is None:
            continue
        stored = gguf.GGMLQuantizationType[quantized if numbers.ndim > 1 else "F32"]
        writer.add_tensor(tensor, gguf.quantize(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(metadata: dict[str, Any], architecture: str, tokens: int, head: int, layers: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def vector(size: int, mean: float) -> np.ndarray:
        return (mean + 0.1 * random.standard_normal(size)).astype(np.float32)

    queries = HEADS * head
    keys = GROUPS * head
    tensors = {"token_embd.weight": matrix(tokens, HIDDEN), "output_norm.weight": vector(HIDDEN, 1)}
    if not metadata.get("tied"):
        tensors["output.weight"] = matrix(tokens, HIDDEN)
    if metadata.get("divisors"):
        tensors["rope_freqs.weight"] = llama3_divisors(metadata["rope.freq_base"], head)
    for layer in range(layers):
        block = {"attn_norm": vector(HIDDEN, 1), "ffn_norm": vector(HIDDEN, 1), "attn_output": matrix(HIDDEN, queries)}
        projections = {"attn_q": queries, "attn_k": keys, "attn_v": keys, "ffn_gate": WIDE, "ffn_up": WIDE}
        if metadata.get("merged"):
            projections = {"attn_qkv": queries + 2 * keys, "ffn_up": 2 * WIDE}
        block |= {name: matrix(rows, HIDDEN) for name, rows in projections.items()} | {"ffn_down": matrix(HIDDEN, WIDE)}
        block |= {name: vector(head if name.startswith("attn_") else HIDDEN, 1) for name in metadata.get("norms", ())}
        tensors |= {f"blk.{layer}.{name}.weight": numbers for name, numbers in block.items()}
        if metadata.get("bias"):
            tensors |= {f"blk.{layer}.{name}.bias": vector(projections[name], 0) for name in list(projections)[:3]}
    return tensors


def llama3_divisors(theta: float, head: int, factor: float = 8.0) -> np.ndarray:
    """As llama.cpp's `convert_hf_to_gguf.py` writes them, from a factor, 1, 4 and 8192."""
    divisors = []
    for frequency in 1.0 / theta ** (np.arange(0, head, 2) / head):
        wave = 2 * np.pi / frequency
        blend = (8192 / wave - 1) / 3
        inner = 1 / ((1 - blend) / factor + blend)
        divisors.append(1 if wave < 8192 / 4 else factor if wave > 8192 else inner)
    return np.array(divisors, np.float32)
