"""A model that says what a test tells it to, with any tokenizer.json.

It is a GPT-2 without weights but for its positions: each is its own direction, and the head gives each token the
positions that it is to follow. The rest is zero.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from demo_model import CONFIG
from pipeline import make_engines
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from lockstep.artifacts.files import write_json
from lockstep.targets import Results

TARGET = "scripted/fp32/all"
# of the head, for the likeliest token at a position, and what each next one has less
_FIRST = 3.0
_LESS = 0.25


def write(
    folder: Path,
    tokenizer: Path,
    script: Mapping[int, int | Sequence[int]],
    tokenizer_config: Mapping[str, object] | None = None,
    **config: object,
) -> Path:
    """Write a checkpoint whose answers are a script.

    script: the token that follows a position (from 0), or several, the likeliest first: a greedy answer to a prompt of
    n tokens begins with `script[n - 1]`. tokenizer_config: of a tokenizer_config.json. config: keys of config.json. A
    token must not follow more than half of the positions: the final norm removes the common part. There are
    at least twice as many positions as the script has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    positions = max(64, 2 * (max(script) + 1))
    sizes = {"vocab_size": vocabulary, "n_embd": positions, "n_positions": positions, "n_layer": 1, "n_head": 1}
    options = {"n_inner": 4, "tie_word_embeddings": False, "dtype": "float32", "architectures": ["GPT2LMHeadModel"]}
    ends = {"bos_token_id": None, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes, **options, **ends, **config}))

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    head = zeros(vocabulary, positions)
    for position, tokens in script.items():
        for place, token in enumerate([tokens] if isinstance(tokens, int) else tokens):
            head[token, position] += _FIRST - _LESS * place
    layer = {
        **{f"ln_1.{part}": zeros(positions) for part in ("weight", "bias")},
        **{f"ln_2.{part}": zeros(positions) for part in ("weight", "bias")},
        "attn.c_attn.weight": zeros(positions, 3 * positions),
        "attn.c_attn.bias": zeros(3 * positions),
        "attn.c_proj.weight": zeros(positions, positions),
        "attn.c_proj.bias": zeros(positions),
        "mlp.c_fc.weight": zeros(positions, 4),
        "mlp.c_fc.bias": zeros(4),
        "mlp.c_proj.weight": zeros(4, positions),
        "mlp.c_proj.bias": zeros(positions),
    }
    tensors = {
        "transformer.wte.weight": zeros(vocabulary, positions),
        "transformer.wpe.weight": np.eye(positions, dtype=np.float32),
        **{f"transformer.h.0.{name}": value for name, value in layer.items()},
        "transformer.ln_f.weight": np.ones(positions, np.float32),
        "transformer.ln_f.bias": zeros(positions),
        "lm_head.weight": head,
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    # Else transformers takes the class of the model's type, which splits otherwise than the file says.
    plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**plain, **(tokenizer_config or {})}))
    return folder


def results(checkpoint: Path, folder: Path, **limits: int) -> Results:
    """Return results that a server can be started on (TARGET), of a checkpoint of `write`.

    limits: of the server; by default all positions, and 4 requests at a time.
    """
    tree = Results(folder)
    make_engines(checkpoint, tree, "scripted", "fp32")
    positions = json.loads((checkpoint / "config.json").read_text())["n_positions"]
    limits = {"max_batch_size": 4, "max_seq_len": positions, "max_input_len": positions, **limits}
    model = CONFIG.models["demo-llama"].model_copy(update={"source": str(checkpoint), "precisions": ("fp32",)})
    config = CONFIG.model_copy(
        update={"models": {"scripted": model}, "limits": CONFIG.limits.model_copy(update=limits)}
    )
    write_json(tree.config(), config.dump())
    return tree
