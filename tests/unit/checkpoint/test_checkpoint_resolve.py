"""Resolve: the manifest of a folder, whatever its layout, and one line for whatever it lacks."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import INDEX, error_of, hub_cache, tensors, write
from safetensors.numpy import load_file, save_file

from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.checkpoint import resolve
from lockstep.checkpoint.resolve import sampling_note
from lockstep.checkpoint.stops import stop_ids
from lockstep.checkpoint.tensors import check_not_absent, find_tensors
from lockstep.errors import InputError

SHARDS = ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "checkpoint")


@pytest.fixture
def sharded(tmp_path):
    return write(tmp_path / "checkpoint", shards=3)


def manifest_of(folder: Path, source: str | None = None) -> dict:
    out = folder.parent / "results" / "m" / "checkpoint.json"
    assert resolve(source or str(folder), folder, out) == out
    return json.loads(out.read_text())


def line_of(folder: Path) -> str:
    out = folder.parent / "results" / "checkpoint.json"
    line = error_of(resolve, str(folder), folder, out)
    assert not out.parent.exists(), "nothing is written on an error"
    return line


def check_tensors(folder: Path, manifest: dict, values: dict) -> None:
    assert manifest["tensors"].keys() == values.keys()
    for name, entry in manifest["tensors"].items():
        data = (folder / entry["file"]).read_bytes()
        assert data[entry["offset"] : entry["offset"] + entry["length"]] == values[name].tobytes()
        assert tuple(entry["shape"]) == values[name].shape
        assert entry["dtype"] == "BF16"


def test_a_folder_with_one_file(folder):
    (folder / "generation_config.json").write_text("{}")
    (folder / "merges.txt").write_text("a b\n")
    (folder / "README.md").write_text("not a part of it")
    manifest = manifest_of(folder)
    assert manifest["format"] == "lockstep.checkpoint/1"
    assert (manifest["model_type"], manifest["num_hidden_layers"]) == ("llama", 2)
    assert manifest["config"] == {"model_type": "llama", "num_hidden_layers": 2}
    assert [file["path"] for file in manifest["files"]] == [
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
    ]
    for file in manifest["files"]:
        data = (folder / file["path"]).read_bytes()
        assert (file["size"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert manifest["unindexed"] == []
    check_tensors(folder, manifest, tensors())


def test_a_folder_with_shards(sharded):
    manifest = manifest_of(sharded)
    assert [file["path"] for file in manifest["files"]] == ["config.json", *SHARDS, INDEX, "tokenizer.json"]
    check_tensors(sharded, manifest, tensors())


def test_two_runs_write_the_same_bytes(sharded):
    out = sharded.parent / "checkpoint.json"
    first = resolve("checkpoint", sharded, out).read_bytes()
    out.unlink()
    assert resolve("checkpoint", sharded, out).read_bytes() == first


def test_a_checkpoint_of_transformers_is_found_whole(tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    folder = write(tmp_path / "checkpoint")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    manifest = manifest_of(folder)
    assert manifest["num_hidden_layers"] == 3
    assert len([file for file in manifest["files"] if file["path"].endswith(".safetensors")]) > 1
    assert manifest["tensors"].keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"model_type": "gpt2", "n_layer": 2}, 2),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}}, 2),
        ({"model_type": "nemotron_h", "layers_block_type": ["mlp", "moe"]}, 2),
    ],
)
def test_the_layer_count_under_other_names(tmp_path, config, layers):
    assert manifest_of(write(tmp_path / "checkpoint", config=config))["num_hidden_layers"] == layers


def test_a_relative_source_gives_a_manifest_that_moves_with_its_tree(tmp_path):
    work = tmp_path / "a" / "work"
    folder = write(work / "resources" / "m")
    out = resolve("resources/m", folder, work / "results" / "m" / "checkpoint.json")
    assert json.loads(out.read_text())["folder"] == "../../resources/m"
    moved = shutil.move(tmp_path / "a", tmp_path / "b")
    out = Path(moved) / "work" / "results" / "m" / "checkpoint.json"
    actual = CheckpointManifest.load(out).folder_of(out)
    assert os.path.samefile(actual, Path(moved) / "work" / "resources" / "m")


def test_a_relative_source_from_a_results_folder_that_is_a_link(tmp_path):
    folder = write(tmp_path / "work" / "m")
    (tmp_path / "scratch" / "deep").mkdir(parents=True)
    (tmp_path / "work" / "results").symlink_to(tmp_path / "scratch" / "deep")
    out = resolve("m", folder, tmp_path / "work" / "results" / "m" / "checkpoint.json")
    assert os.path.samefile(CheckpointManifest.load(out).folder_of(out), folder)


def test_an_absolute_source_is_recorded_as_such(folder):
    assert manifest_of(folder)["folder"] == str(folder)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_hub_cache_whose_links_leave_the_folder(tmp_path, shards):
    snapshot = hub_cache(tmp_path / "hub", write(tmp_path / "checkpoint", shards=shards))
    manifest = manifest_of(snapshot)
    assert manifest["folder"] == str(snapshot)
    check_tensors(snapshot, manifest, tensors())


def test_a_hub_cache_with_a_blob_that_never_arrived(tmp_path):
    snapshot = hub_cache(tmp_path / "hub", write(tmp_path / "checkpoint"))
    blob = (snapshot / "model.safetensors").resolve()
    blob.unlink()
    link = f"../../blobs/{blob.name}"
    assert line_of(snapshot) == (
        f"{snapshot}/model.safetensors: expected a file, found a link to {link}, "
        f"which is absent; download the checkpoint again"
    )


def test_safetensors_go_before_pickled_files(folder):
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert [file["path"] for file in manifest_of(folder)["files"]] == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_leftover_of_a_killed_process_goes_and_one_of_a_living_stays(folder):
    out = folder.parent / "checkpoint.json"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    leftover, living, other = (
        out.with_name(name)
        for name in (f".{out.name}.{dead.pid}.tmp", f".{out.name}.{os.getppid()}.tmp", f".{out.name}.notes.tmp")
    )
    for path in (leftover, living, other):
        path.touch()
    resolve(str(folder), folder, out)
    assert (leftover.exists(), living.exists(), other.exists()) == (False, True, True)


def test_what_a_shard_holds_beside_the_index_is_listed_and_not_used(sharded):
    index = json.loads((sharded / INDEX).read_text())
    shard = index["weight_map"].pop("norm.weight")
    (sharded / INDEX).write_text(json.dumps(index))
    manifest = manifest_of(sharded)
    assert manifest["unindexed"] == [{"file": shard, "tensor": "norm.weight"}]
    assert "norm.weight" not in manifest["tensors"]


def test_what_chooses_tokens_in_a_generation_config_is_told(folder):
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 50, "top_p": 1.0, "suppress_tokens": [7], "min_p": None}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert sampling_note(folder) == (
        "requests say how tokens are chosen, not generation_config.json: temperature 0.6, suppress_tokens [7]"
    )


def test_a_tensor_in_two_shards_is_refused(sharded):
    """The index names one of them; transformers takes that of the shard it reads last, and would be compared with other
    weights."""
    values = load_file(sharded / SHARDS[0])
    other = next(name for name in tensors() if name not in values)
    shard = json.loads((sharded / INDEX).read_text())["weight_map"][other]
    save_file({**values, other: tensors()[other] + 1}, sharded / SHARDS[0])
    assert line_of(sharded) == (
        f"{sharded / shard}: expected each tensor in one shard, found {other!r} also "
        f"in {SHARDS[0]} ({INDEX} names {shard}); download both and the index again"
    )


def test_no_folder_and_a_file_instead(tmp_path):
    assert error_of(resolve, "x", tmp_path / "x", tmp_path / "o.json") == (
        f"{tmp_path}/x: expected the folder of a checkpoint, found nothing; correct the model's source"
    )
    (tmp_path / "x").touch()
    assert ("expected the folder of a checkpoint, found a file;") in error_of(
        resolve, "x", tmp_path / "x", tmp_path / "o.json"
    )


def test_no_config(folder):
    (folder / "config.json").unlink()
    assert line_of(folder) == f"{folder}: expected config.json, found none; give a model folder in Hugging Face format"


@pytest.mark.parametrize(("text", "expected"), [
    ("", "expected JSON, found Expecting value: line 1 column 1 (char 0); download this file again"),
    ("\xff", "expected text in UTF-8, found 'utf-8' codec can't decode"),
    ("\xff\xfe{\0}\0", "expected text in UTF-8, found 'utf-8' codec can't decode"),
    ("\xef\xbb\xbf{}", "expected JSON, found Unexpected UTF-8 BOM"),
    ("[" * 100_000, "expected JSON, found maximum recursion depth exceeded"),
    ("[1]", "expected a JSON object, found [1]; download this file again"),
    ("{}", "expected a model_type such as 'llama', found None; use the config.json that came with the weights"),
    ('{"model_type": 3}', "expected a model_type such as 'llama', found 3;"),
    ('{"model_type": "llama"}', "expected num_hidden_layers, found none; write the model's layer count there"),
    ('{"model_type": "llama", "num_hidden_layers": 0}',
        "expected an integer from 1 to 1024 as num_hidden_layers, found 0; correct it"),
    ('{"model_type": "llama", "num_hidden_layers": true}',
        "expected an integer from 1 to 1024 as num_hidden_layers, found True; correct it"),
    ('{"model_type": "llama", "n_layer": "2"}', "expected an integer from 1 to 1024 as n_layer, found '2'; correct it"),
    ('{"model_type": "llama", "num_hidden_layers": 2, "limit": Infinity}', "expected a finite value as limit, found {"),
    ('{"model_type": "llama", "num_hidden_layers": 2, "name": "\\ud800"}',
        "expected JSON, found a value that JSON cannot hold"),
])  # fmt: skip
def test_a_config_that_is_none(folder, text, expected):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert line_of(folder).startswith(f"{folder}/config.json: {expected}")


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert line_of(folder) == (
        f"{folder}: expected model.safetensors or {INDEX}, found no weights; download the whole checkpoint"
    )


def test_an_adapter(folder):
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    assert "found an adapter (adapter_config.json); merge it into its base model" in line_of(folder)


def test_shards_without_their_index(sharded):
    (sharded / INDEX).unlink()
    assert f"found only {', '.join(SHARDS)}; download {INDEX}" in line_of(sharded)


def test_a_missing_shard(sharded):
    (sharded / SHARDS[1]).unlink()
    assert line_of(sharded) == (
        f"{sharded / SHARDS[1]}: expected this shard, which {INDEX} names for 2 "
        f"tensors, found no such file; download it"
    )


def test_a_truncated_shard(sharded):
    shard = sharded / SHARDS[2]
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    assert line_of(sharded) == (
        f"{shard}: expected a file of {size} bytes, as its header says, found "
        f"{size - 1} bytes; the file is damaged or incomplete, download it again"
    )


def test_a_tensor_in_another_shard_than_the_index_says(sharded):
    index = json.loads((sharded / INDEX).read_text())
    name = next(name for name, shard in index["weight_map"].items() if shard != SHARDS[0])
    index["weight_map"][name] = SHARDS[0]
    (sharded / INDEX).write_text(json.dumps(index))
    assert line_of(sharded) == (
        f"{sharded / SHARDS[0]}: expected tensor {name!r}, as {INDEX} says, found it absent; "
        f"download this shard and the index again"
    )


def test_a_tensor_of_the_index_that_no_shard_holds_is_left_out_unless_the_model_needs_it(sharded, capsys):
    """As of heads that predict further tokens, which a fine-tune has not; transformers does not look for them."""
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["mtp.fc.weight"] = SHARDS[0]
    (sharded / INDEX).write_text(json.dumps(index))
    assert "mtp.fc.weight" not in manifest_of(sharded)["tensors"]
    message = f"{sharded / INDEX}: names {SHARDS[0]} for 'mtp.fc.weight', which is absent there and left out"
    assert message in capsys.readouterr().err
    with pytest.raises(InputError, match=f"{SHARDS[0]}: expected tensor 'mtp.fc.weight', as {INDEX} says"):
        check_not_absent(sharded, "mtp.fc.weight", find_tensors(sharded))


def test_end_tokens_beyond_the_vocabulary_end_nothing(folder):
    """As transformers takes them: no answer has such a token."""
    config = {"eos_token_id": [1, 99999], "vocab_size": 768}
    assert stop_ids(folder, config, 70000) == {1: ("config.json",)}
    assert stop_ids(folder, config, 3) == {1: ("config.json",), 3: ("the tokenizer",)}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(sharded, text):
    (sharded / INDEX).write_text(text)
    assert line_of(sharded).startswith(f"{sharded / INDEX}: expected ")


@pytest.mark.parametrize("name", [
    "../../secret.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "x.bin", "", "a\0.safetensors",
    "\ud800.safetensors", "x" * 400 + ".safetensors",
])  # fmt: skip
def test_an_index_that_leads_elsewhere(sharded, name):
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert line_of(sharded).startswith(
        f"{sharded / INDEX}: expected names of safetensors files next to the index, found "
    )


def test_no_tensors(tmp_path):
    assert "expected tensors in model.safetensors, found none" in line_of(write(tmp_path / "checkpoint", {}))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": 1}'])
def test_a_tokenizer_that_is_none(folder, text):
    (folder / "tokenizer.json").write_text(text)
    assert line_of(folder).startswith(f"{folder}/tokenizer.json: expected ")


def run_printed_command(line: str) -> None:
    """Run the `python ...` at the end of an error's line, with this Python."""
    command = shlex.split(line[line.index("python -") :])
    subprocess.run([sys.executable, *command[1:]], check=True, capture_output=True)


@pytest.mark.long
@pytest.mark.exports
def test_pickled_weights_are_refused_and_the_printed_command_converts_them(tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    ).to(torch.bfloat16)
    folder = write(tmp_path / "a checkpoint")
    (folder / "model.safetensors").unlink()
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    line = line_of(folder)
    assert (
        "found pickled weights (pytorch_model.bin), which can run code when they are opened; convert them "
        "once: python -c"
    ) in line
    run_printed_command(line)
    assert manifest_of(folder)["tensors"].keys() == model.state_dict().keys()


@pytest.mark.long
@pytest.mark.exports
def test_an_absent_tokenizer_is_named_and_the_printed_command_makes_it(tmp_path):
    folder = write(tmp_path / "checkpoint", config={"model_type": "gpt2", "n_layer": 2})
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}')
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    line = line_of(folder)
    assert line.startswith(
        f"{folder}: expected tokenizer.json, found none; download it, or make it from the "
        f"tokenizer's other files: python -m lockstep.export.slow_tokenizer "
    )
    run_printed_command(line)
    assert "tokenizer.json" in [file["path"] for file in manifest_of(folder)["files"]]
