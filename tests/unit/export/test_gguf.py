"""GGUF sources: llama.cpp's ids and logits, the same bytes on every CPU, one line for a file that cannot be read."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

import gguf_models
from lockstep import checkpoint
from lockstep.artifacts.files import sha256_file
from lockstep.config.gguf_file import read_gguf
from lockstep.config.load import load
from lockstep.config.sources import read_shape
from lockstep.errors import InputError
from lockstep.export import gguf_config, gguf_model, gguf_tokenizer
from lockstep.export.make_checkpoint import make_checkpoint
from lockstep.export.quiet import quiet

TABLE = gguf_models.table()
VOCABULARIES = TABLE["vocabularies"]


def write(path: Path, name: str = "llama", **changes) -> Path:
    return gguf_models.write_model(path, name, VOCABULARIES, **changes)


@pytest.mark.parametrize("kind", gguf_models.KINDS)
def test_ids_are_those_of_llama_cpp(tmp_path: Path, kind: str) -> None:
    tokenizer, _ = gguf_tokenizer.tokenizer_of(read_gguf(write(tmp_path / "m.gguf", kind=kind)))
    strings = zip(TABLE["strings"], TABLE["ids"][kind])
    differ = {
        text: (ids_here, ids) for text, ids in strings if text and (ids_here := tokenizer.encode(text).ids) != ids
    }
    assert not differ


def test_every_pre_tokenizer_is_in_the_table() -> None:
    assert set(gguf_tokenizer.SPLITS) == {model["pre"] for model in gguf_models.KINDS.values()} - {"default"}
    assert set(TABLE["ids"]) == {*gguf_models.KINDS, "SmolLM2"}
    assert set(gguf_config.MODEL_TYPES) == {name.partition(",")[0] for name in TABLE["logits"]}


@pytest.mark.exports
@pytest.mark.parametrize("name", gguf_models.MODELS)
def test_logits_are_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    """fp32 in both. llama.cpp takes GELU, which only Gemma has, from a table in fp16."""
    folder = gguf_model.make(write(tmp_path / "m.gguf", name), tmp_path / "checkpoint")
    with quiet(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        logits = model(torch.tensor([TABLE["prompt"]])).logits[0, -1].numpy()
    tolerance = 5e-3 if name.startswith("gemma") else 5e-5
    np.testing.assert_allclose(logits, TABLE["logits"][name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("stored", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_weights_are_what_the_blocks_say(tmp_path: Path, stored: str) -> None:
    path = write(tmp_path / "m.gguf", "qwen2", quantized=stored)
    weights = load_file(gguf_model.make(path, tmp_path / "checkpoint") / "model.safetensors")
    tensors = load_file(gguf_model.make(write(tmp_path / "w.gguf", "qwen2"), tmp_path / "whole") / "model.safetensors")
    kind = gguf.GGMLQuantizationType[stored]
    assert weights.keys() == tensors.keys() and "lm_head.weight" not in weights
    for name, numbers in tensors.items():
        if numbers.ndim > 1:
            numbers = gguf.dequantize(gguf.quantize(numbers, kind), kind)
        assert weights[name].dtype == np.float32 and (weights[name] == numbers).all(), name


@pytest.mark.exports
@pytest.mark.long
def test_bytes_are_the_same_on_every_cpu(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "gemma2", quantized="Q4_1")
    code = "import sys; from pathlib import Path; from lockstep.export import gguf_model; "
    code += "gguf_model.make(Path(sys.argv[1]), Path(sys.argv[2]))"
    plain = {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4", "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, path, tmp_path / "plain"], check=True, env=os.environ | plain)
    gguf_model.make(path, tmp_path / "here")
    digests = [{file.name: sha256_file(file) for file in (tmp_path / name).iterdir()} for name in ("plain", "here")]
    assert digests[0] == digests[1] and len(digests[0]) == 5


@pytest.mark.exports
def test_a_gguf_source_becomes_a_checkpoint(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.gguf", more={"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.eot_token_id": 3}
    )
    out = make_checkpoint("m.gguf", path, tmp_path / "made" / "source.json")
    assert json.loads(out.read_text())["gguf"] == {"sha256": sha256_file(path), "size": path.stat().st_size}
    manifest = json.loads(checkpoint.resolve_fetched(out, tmp_path / "made" / "checkpoint.json").read_text())
    assert (manifest["source"], manifest["folder"]) == ("m.gguf", "checkpoint")
    folder = tmp_path / "made" / "checkpoint"
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    vocabulary = VOCABULARIES["gpt2"]
    ids = json.loads((folder / "generation_config.json").read_text())
    assert ids == {"bos_token_id": vocabulary["bos"], "eos_token_id": [vocabulary["eos"], 3]}
    with quiet():  # from all that is in the folder
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, ids in zip(TABLE["strings"], TABLE["ids"]["smollm"]):
        assert tokenizer.encode(text) == ids
    assert tokenizer.decode(tokenizer.encode("Hello 12, wörld")) == "Hello 12, wörld"


REFUSED = {
    "an architecture that is not known": ({"architecture": "mamba"}, "a GGUF model of gemma2, .*; found 'mamba'"),
    "experts": ({"expert_count": 8}, "found llama.expert_count 8, which is not read"),
    "a RoPE that is not read": ({"rope.scaling.type": "yarn"}, "found llama.rope.scaling.type 'yarn', which is not"),
    "a setting that is not read": ({"logit_scale": 0.5}, "found llama.logit_scale 0.5, which is not read"),
    "no depth": ({"attention.head_count": None}, "expected a positive llama.attention.head_count; found none"),
    "a tensor too many": (
        {"tensors": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, "found 'blk.0.attn_q.bias'; take the model's own"
    ),
    "a tensor too few": (
        {"tensors": {"blk.1.ffn_up.weight": None}}, "expected tensor 'blk.1.ffn_up.weight'; found none of this name"
    ),
    "a tensor of another shape": (
        {"tensors": {"blk.1.ffn_up.weight": np.zeros((95, 64), np.float32)}}, r"shape \[96, 64\] .* found \[95, 64\]"
    ),
    "a RoPE of other divisors": (
        {"tensors": {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}}, "expected rope_freqs.weight of a RoPE"
    ),
    "one part of several": ({"more": {"split.count": 3}}, "found one of 3 parts; join them by llama-gguf-split"),
    "no tokenizer": ({"kind": "none"}, "found no tokenizer.ggml.model and tokens"),
    "a tokenizer that is not known": ({"more": {"tokenizer.ggml.model": "rwkv"}}, "gpt2 or llama; found 'rwkv'"),
    "a pre-tokenizer that is not known": ({"more": {"tokenizer.ggml.pre": "tekken"}}, "ggml.pre of .* found 'tekken'"),
    "a prompt that ends": ({"more": {"tokenizer.ggml.add_eos_token": True}}, "found tokenizer.ggml.add_eos_token"),
    "ids beyond the vocabulary": ({"more": {"tokenizer.ggml.bos_token_id": 9999}}, "bos_token_id below .*; found 9999"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_known_to_mean_the_same_is_refused_by_name(tmp_path: Path, what: str) -> None:
    changes, expected = REFUSED[what]
    path = write(tmp_path / "m.gguf", **changes)
    with pytest.raises(InputError, match=expected) as refused:
        gguf_model.make(path, tmp_path / "checkpoint")
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "checkpoint").exists(), "nothing is half-written"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"more": {"general.alignment": 0}}, "a multiple of 8 as general.alignment .* found 0"),
        ({"more": {"general.alignment": "x"}}, "a multiple of 8 as general.alignment .* found 'x'"),
        ({"more": {"split.count": "3"}}, "a whole number as split.count .* found '3'"),
        ({"more": {"tokenizer.ggml.bos_token_id": "x"}}, "a whole number as tokenizer.ggml.bos_token_id"),
        ({"more": {"tokenizer.ggml.merges": 3}}, "a list of texts as tokenizer.ggml.merges"),
        ({"more": {"tokenizer.ggml.add_bos_token": "x"}}, "true or false as tokenizer.ggml.add_bos_token"),
        ({"rope.freq_base": "x"}, "a positive number as llama.rope.freq_base"),
        ({"rope.scaling.type": 3}, "a text as llama.rope.scaling.type"),
    ],
)
def test_values_of_another_type_are_one_line(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    """While a config is read, and the workflow is parsed, where a traceback would be all that is seen."""
    with pytest.raises(InputError, match=expected) as refused:
        read_gguf(write(tmp_path / "m.gguf", **changes))
    assert str(tmp_path / "m.gguf") in str(refused.value)


def test_parameters_are_those_of_the_tensors(tmp_path: Path) -> None:
    """Files do not say their vocabulary, which is most of a small model: Gemma 3 270M had 88 M without it."""
    path = write(tmp_path / "m.gguf")
    tensors = read_gguf(path).tensors
    vocabulary = next(tensor.shape[0] for tensor in tensors if tensor.name == "token_embd.weight")
    actual = read_shape(path).num_parameters
    assert actual == sum(math.prod(tensor.shape) for tensor in tensors) and actual > 2 * 64 * vocabulary


def test_a_way_of_quantising_that_is_not_known(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # the number of dimensions, and two of them
    for number, shown in ((99, "99"), (24, "I8")):
        data[at : at + 4] = number.to_bytes(4, "little")
        path.write_bytes(data)
        with pytest.raises(InputError, match=f"found type {shown} of 'blk.1.ffn_up.weight'"):
            gguf_model.make(path, tmp_path / "checkpoint")


def test_a_file_that_is_cut_short_or_no_gguf(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    content = path.read_bytes()
    start = min(tensor.offset for tensor in read_gguf(path).tensors)
    for length in (*range(4, start, 997), start):
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match="expected a whole GGUF file at"):
            read_gguf(path, arrays=False)
    path.write_bytes(content[:-1])
    with pytest.raises(
        InputError, match=f"expected {len(content)} bytes or more, where .* ends; found {len(content) - 1}"
    ):
        gguf_model.make(path, tmp_path / "checkpoint")
    for data, message in (
        (b"", "b''"),
        (b"PK\3\4" + content, r"b'PK\\x03\\x04'"),
        (b"GGUF\0\0\0\3" + content, "version 50331648"),
    ):
        path.write_bytes(data)
        with pytest.raises(InputError, match=f"expected .* found {message}"):
            read_gguf(path)


def test_no_damage_to_a_header_shows_a_traceback(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    content = path.read_bytes()
    chosen = random.Random(0)
    start = min(tensor.offset for tensor in read_gguf(path).tensors)
    refused = 0
    for _ in range(200):
        data = bytearray(content)
        for _ in range(chosen.randint(1, 3)):
            data[chosen.choice([chosen.randrange(start), chosen.randrange(start - 1600, start)])] = chosen.randrange(
                256
            )
        path.write_bytes(data)
        try:
            file = read_gguf(path)
            gguf_model.tensor_nbytes(file)
            gguf_config.config_of(file, lambda: np.ones(8, np.float32))
            gguf_tokenizer.tokenizer_of(file)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 50


@pytest.mark.parametrize(("source", "actual"), [
    ("absent.gguf", "expected a GGUF file; found none at .*absent.gguf"),
    ("notes.gguf", "expected a GGUF file, which opens with b'GGUF', at .*notes.gguf; found b'note'"),
    ("folder", "found none in .*folder; for the GGUF file in it write .*folder/m.gguf"),
    ("folder/m.gguf", "layers.0.: expected at most 2 .num_hidden_layers in .*m.gguf.*; found 3"),
])  # fmt: skip
def test_the_config_is_held_against_the_file(tmp_path: Path, source: str, actual: str) -> None:
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "m.gguf")
    (tmp_path / "notes.gguf").write_text("notes")
    config = load({"models": {"m": {"source": source, "layers": [3], "golden": {"prompts": [{"text": "a"}]}}},
                   "limits": {"max_seq_len": 64, "max_input_len": 32}})  # fmt: skip
    with pytest.raises(InputError, match=actual):
        config.check_sources([tmp_path])
