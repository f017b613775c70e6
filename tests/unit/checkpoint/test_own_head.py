"""A checkpoint that holds more than its config says: its own head, a bias."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import error_of, tensors, write
from demo_model import DEMO
from safetensors.numpy import load_file, save_file

from lockstep import resolve_checkpoint
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.checkpoint.own_head import embedding_of_head
from lockstep.checkpoint.tensors import find_tensors
from lockstep.export.checkpoint_layout import check_tensors
from lockstep.export.tracer import meta_model

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 16}


def resolved(tmp_path: Path, config: dict, same: bool, **names: np.ndarray) -> str | None:
    """What `resolve` refuses in a checkpoint with a head; None where it refuses nothing."""
    table = tensors()["embed.weight"]
    head = table if same else table[::-1].copy()
    values = {**tensors(), "model.embed_tokens.weight": table, "lm_head.weight": head, **names}
    folder = write(tmp_path / "checkpoint", values, config={**CONFIG, **config})
    out = tmp_path / "checkpoint.json"
    if same or config.get("tie_word_embeddings") is False:
        resolve_checkpoint(str(folder), folder, out)
        return None
    return error_of(resolve_checkpoint, str(folder), folder, out)


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"model_type": "gemma"}], ids=["said", "by class"])
def test_a_head_that_is_tied_and_other_than_the_embedding_is_refused(tmp_path: Path, config: dict) -> None:
    """transformers takes the file's head there, and graphs would take the embedding: other tokens without a word."""
    line = resolved(tmp_path, config, same=False)
    assert line == (
        f"{tmp_path}/checkpoint/model.safetensors: tensor 'lm_head.weight': expected the numbers of "
        "'model.embed_tokens.weight', to which tie_word_embeddings in config.json ties it, found others; set "
        "tie_word_embeddings to false there, and this head is taken"
    )
    assert not (tmp_path / "checkpoint.json").exists()


@pytest.mark.parametrize(
    ("config", "same"), [({"tie_word_embeddings": True}, True), ({"tie_word_embeddings": False}, False)]
)
def test_a_copy_and_a_head_that_is_not_tied_are_taken(tmp_path: Path, config: dict, same: bool) -> None:
    assert resolved(tmp_path, config, same) is None


@pytest.mark.parametrize(
    ("config", "stack", "head", "embedding"),
    [
        ({"tie_word_embeddings": True}, "model.layers.", "lm_head", "model.embed_tokens"),
        ({"model_type": "gemma"}, "model.layers.", "lm_head", "model.embed_tokens"),
        ({"tie_word_embeddings": True, "model_type": "gpt2"}, "transformer.h.", "lm_head", "transformer.wte"),
        ({"tie_word_embeddings": True}, "gpt_neox.layers.", "embed_out", "gpt_neox.embed_in"),
        ({"tie_word_embeddings": False}, "model.layers.", "lm_head", "lm_head"),
    ],
)
def test_a_head_without_the_embedding_that_it_is_tied_to_is_it(
    tmp_path: Path, config: dict, stack: str, head: str, embedding: str
) -> None:
    values = {f"{stack}{layer}.up.weight": np.zeros((4, 8), np.float32) for layer in range(2)}
    table = tensors("F32")["embed.weight"]
    folder = write(tmp_path / "checkpoint", {**values, f"{head}.weight": table}, config={**CONFIG, **config})
    manifest = CheckpointManifest.load(resolve_checkpoint(str(folder), folder, tmp_path / "checkpoint.json"))
    assert set(manifest.tensors) == {*values, f"{embedding}.weight"}


def test_a_checkpoint_of_the_head_alone_is_the_model(tmp_path: Path) -> None:
    """transformers takes such a file, which holds a tied tensor by the other of its names."""
    config = {**json.loads((DEMO / "config.json").read_text()), "tie_word_embeddings": True}
    values = load_file(DEMO / "model.safetensors")
    values["lm_head.weight"] = values.pop("model.embed_tokens.weight")
    folder = write(tmp_path, values, config=config)
    check_tensors(meta_model(config, "fp32"), embedding_of_head(folder, config, find_tensors(folder)), folder)


def test_tensors_that_the_model_does_not_have_are_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bias that the config leaves out changes every answer."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(DEMO, folder)
    config = json.loads((DEMO / "config.json").read_text())
    meta = meta_model(config, "fp32")
    check_tensors(meta, find_tensors(folder), folder)
    assert capsys.readouterr().err == ""
    values = load_file(folder / "model.safetensors")
    biases = {f"model.layers.{layer}.self_attn.q_proj.bias": np.zeros(8, np.float32) for layer in range(2)}
    save_file({**values, **biases}, folder / "model.safetensors", {"format": "pt"})
    check_tensors(meta, find_tensors(folder), folder)
    assert capsys.readouterr().err == (
        f"lockstep: note: {folder}: tensors that the model of config.json does not have, left out: "
        "model.layers.0.self_attn.q_proj.bias and 1 more\n"
    )
