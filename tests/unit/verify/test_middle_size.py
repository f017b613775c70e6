"""Families at middle size, with the heads of their checkpoints: 200 greedy tokens behind 2,048, as of transformers.

Each token is the likeliest that the answer does not have yet: random weights would soon repeat one, far ahead of all
others, which would show nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.engine_sets import make_engines
from benchmarks.published import FAMILIES
from tests import lifelike

from lockstep import Model, ModelOptions, Request
from lockstep.export.small_configs import shallow_config
from lockstep.export.torch_model import cut_config, load_folder
from lockstep.runtime.generate import Decoding

_PROMPT = 2048
_NEW = 200
_CHUNK = 512
_VOCABULARY = 4096
_THREADS = 1
# Cut: layers, the stream, the width of an MLP or an expert.
CUTS: dict[str, dict[str, Any]] = {
    "Llama 3.2": {"hidden_size": 1024, "intermediate_size": 2048},
    "Ministral 3": {"hidden_size": 1024, "intermediate_size": 2048},
    "Qwen3": {"hidden_size": 1024, "intermediate_size": 2048},
    "Qwen3 MoE": {"hidden_size": 1024, "moe_intermediate_size": 128},
    "Gemma 3 4B to 27B": {"num_hidden_layers": 6, "hidden_size": 1024, "intermediate_size": 2048},
    "Gemma 4 31B": {"num_hidden_layers": 6, "hidden_size": 768, "intermediate_size": 2048},
    "GPT-OSS": {"hidden_size": 720, "intermediate_size": 720},
    "DeepSeek V3, R1": {
        "num_hidden_layers": 2, "first_k_dense_replace": 1, "hidden_size": 1024, "intermediate_size": 2048,
        "moe_intermediate_size": 64,
    },
    "Qwen3-Next": {"hidden_size": 1024, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "LFM2": {"hidden_size": 1024, "intermediate_size": 4096},
    "Granite 4 H": {
        "num_hidden_layers": 6, "hidden_size": 768, "mamba_expand": 4, "intermediate_size": 128,
        "shared_intermediate_size": 512, "max_position_embeddings": 4096,
    },
    "Nemotron-H, Nano": {
        "layers_block_type": ["linear_attention", "linear_attention", "full_attention", "mlp"], "hidden_size": 1024,
        "intermediate_size": 2048,
    },
    "Falcon-H1": {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 2048},
}  # fmt: skip


def middle_config(family: str) -> dict[str, Any]:
    """Return the config of a family with its features, few layers, and a narrow stream."""
    cut = {"num_hidden_layers": 4, "vocab_size": _VOCABULARY, **CUTS[family]}
    return shallow_config(FAMILIES[family].config, cut["num_hidden_layers"]) | cut


@pytest.mark.long
@pytest.mark.parametrize("family", CUTS)
def test_free_tokens_are_those_of_transformers(family, tmp_path):
    config = middle_config(family)
    folder = tmp_path / "model"
    print(family, lifelike.write(config, 0, folder))
    reference = load_folder(folder, cut_config(config, "all"))
    ids = np.random.default_rng(1).integers(0, _VOCABULARY, _PROMPT)
    ids[0] = lifelike.first_token(reference)
    expected, margins = _of_transformers(reference, ids)
    del reference
    paths = make_engines(folder, "fp32", tmp_path)
    model = Model.open(
        paths["engines"],
        paths["assembly"],
        paths["weights"],
        options=ModelOptions(max_batch_size=1, max_seq_len=_PROMPT + _NEW, threads=_THREADS),
    )
    tokens = [output.token for output in Decoding(model, [Request(ids, _NEW, _Greedy())], max_num_tokens=_CHUNK)]
    print(f"{family}: the smallest margin of a token is {min(margins):.1e}")
    first = next((at for at in range(_NEW) if tokens[at] != expected[at]), None)
    assert first is None, f"token {first} of {_NEW}, where the likeliest is before the next by {margins[first]:.1e}"


class _Greedy:
    """The likeliest token that was not chosen yet; margins: by how much, in standard deviations of the logits."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.margins: list[float] = []

    def __call__(self, logits: np.ndarray) -> int:
        changed = logits.copy()
        changed[self.tokens] = -np.inf
        second, first = np.argsort(changed)[-2:].tolist()
        self.tokens.append(first)
        self.margins.append(float((changed[first] - changed[second]) / logits.std()))
        return first


@torch.inference_mode()
def _of_transformers(model: Any, ids: np.ndarray) -> tuple[list[int], list[float]]:
    torch.set_num_threads(_THREADS)
    greedy = _Greedy()
    cache = None
    tokens = torch.from_numpy(ids)[None]
    for _ in range(_NEW):
        output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        tokens = torch.tensor([[greedy(output.logits[0, -1].numpy())]])
    return greedy.tokens, greedy.margins
