"""Random checkpoints: the same bytes for the same seed, logits of a useful size, little memory, and nothing left of an
earlier one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import error_of, in_shards

from lockstep.artifacts.fetched import Fetched, folder_of
from lockstep.artifacts.files import sha256_file
from lockstep.checkpoint import resolve_fetched
from lockstep.errors import InputError
from lockstep.export import random_model
from lockstep.export.make_checkpoint import make_checkpoint
from lockstep.export.quiet import quiet

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
OWN = {
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 64},
    "gemma2": {"query_pre_attn_scalar": 16},
}


def shape(folder: Path, **changes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "shape.json"
    path.write_text(json.dumps({"model_type": "llama", "dtype": "float16", **SIZES, **changes}))
    return path


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(("model_type", "tied"), [("llama", False), ("gpt2", True), ("gemma2", True), ("opt", False)])
def test_logits_neither_vanish_nor_explode(tmp_path: Path, model_type: str, tied: bool) -> None:
    config = shape(
        tmp_path, model_type=model_type, dtype="float32", tie_word_embeddings=tied, **OWN.get(model_type, {})
    )
    folder = random_model.make(config, 0, tmp_path / "checkpoint")
    with quiet(), torch.no_grad():
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        logits = model(torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0))).logits
    assert not any(info.values()), "transformers finds each tensor, and no other"
    # Softmax over logits of std 0.3 is all but flat and over std 3 all but certain; in between rounding errors can be
    # read.
    assert 0.3 < logits.std() < 3 and 0.3 < logits.std(-1).min()


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    config = shape(tmp_path)
    first, again, other = (
        digests(random_model.make(config, seed, tmp_path / name)) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == again and first["model.safetensors"] != other["model.safetensors"]
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_a_checkpoint_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    """Whoever names the folder of a real one by mistake keeps it."""
    config = shape(tmp_path)
    folder = random_model.make(config, 1, tmp_path / "used")
    before = digests(folder)
    for path in (config, folder / "config.json"):
        line = error_of(random_model.make, path, 0, folder)
        assert "expected a folder without a checkpoint" in line and str(folder) in line
    assert digests(folder) == before


def test_a_folder_that_is_fetched_anew_holds_nothing_of_an_earlier_checkpoint(tmp_path: Path) -> None:
    config = shape(tmp_path)
    out = tmp_path / "m" / "source.json"
    fresh = digests(random_model.make(config, 0, tmp_path / "fresh"))
    in_shards(random_model.make(config, 1, tmp_path / "m" / "checkpoint"), 100_000)
    make_checkpoint("random:shape.json", config, out)
    assert digests(tmp_path / "m" / "checkpoint") == fresh


def test_a_tokenizer_beside_the_config_is_taken(tmp_path: Path) -> None:
    config = shape(tmp_path)
    text = random_model.byte_tokenizer().to_str(pretty=True)
    (tmp_path / "tokenizer.json").write_text(text)
    assert (random_model.make(config, 0, tmp_path / "c") / "tokenizer.json").read_text() == text


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_neox"])
def test_transformers_reads_the_tokenizer_whatever_the_models_type(tmp_path: Path, model_type: str) -> None:
    """Else it takes the class of the type: Gemma's is refused without an <unk>, GPT-NeoX's adds tokens that the
    vocabulary does not have."""
    folder = random_model.make(shape(tmp_path, model_type=model_type), 0, tmp_path / "checkpoint")
    with quiet():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "A ß 日本 \n\t\0 \U0001f600"
    assert len(tokenizer) == 256 and tokenizer.encode(text) == random_model.byte_tokenizer().encode(text).ids


def test_bytes_are_tokens_and_come_back() -> None:
    tokenizer = random_model.byte_tokenizer()
    text = "A ß 日本 \n\t\0 \U0001f600"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text and tokenizer.get_vocab_size() == 256


def test_fetch_records_what_it_made(tmp_path: Path) -> None:
    config = shape(tmp_path)
    out = tmp_path / "m" / "source.json"
    (tmp_path / "m" / "checkpoint").mkdir(parents=True)
    (tmp_path / "m" / "checkpoint" / "model.safetensors.index.json").touch()
    make_checkpoint("random:shape.json?seed=5", config, out)
    fetched = Fetched.load(out)
    assert fetched.sha256 == digests(folder_of(out)) and fetched.commit is None
    manifest = json.loads(resolve_fetched(out, tmp_path / "m" / "checkpoint.json").read_text())
    assert (manifest["source"], manifest["folder"], "commit" in manifest) == (
        "random:shape.json?seed=5",
        "checkpoint",
        False,
    )
    before = out.read_bytes()
    make_checkpoint("random:shape.json?seed=5", config, out)
    assert out.read_bytes() == before


@pytest.mark.parametrize(("text", "expected"), [
    ("{", "expected JSON"), ("[]", "expected a JSON object, "
"found \\[\\]"), ('{"model_type": "llama", '
'"dtype": "int8"}', "dtype: expected one "
"of bfloat16"),
    ('{"model_type": "nothing"}', "model_type: expected a type of "
"transformers"), ('{"model_type": "t5"}', "expected a causal LM of "
"transformers"),
])  # fmt: skip
def test_a_config_that_is_no_causal_lms(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "shape.json").write_text(text)
    with pytest.raises(InputError, match=expected):
        random_model.make(tmp_path / "shape.json", 0, tmp_path / "c")


def test_a_model_larger_than_the_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = shape(tmp_path, hidden_size=1 << 20, intermediate_size=1 << 30)
    with pytest.raises(InputError, match="bytes free for the random weights, found .*; free space"):
        random_model.make(config, 0, tmp_path / "c")
    assert not list((tmp_path / "c").iterdir())


@pytest.mark.long
@pytest.mark.exports
def test_memory_is_that_of_a_piece(tmp_path: Path) -> None:
    """A model of 240 MB, whose largest tensor has 100 MB. Pieces have 16 MB: a few at a time, and what the page cache
    does not count."""
    config = shape(tmp_path, vocab_size=100_000, hidden_size=512, dtype="float16", tie_word_embeddings=False)
    code = (
        "import resource, sys; from lockstep.export import random_model; from pathlib import Path\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "random_model.make(sys.argv[2], 0, sys.argv[3] + 'small'); before = peak()\n"
        "random_model.make(sys.argv[1], 0, sys.argv[3]); print(peak() - before)"
    )
    small = shape(tmp_path / "small")
    output = subprocess.run(
        [sys.executable, "-c", code, config, small, tmp_path / "c"], check=True, capture_output=True, text=True
    ).stdout
    assert float(output) < 90
