"""Where a source is looked up, and the config against the checkpoint that it names, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.artifacts.fetched import write_fetched
from lockstep.config.load import load
from lockstep.config.sources import (
    REPOSITORY,
    CheckpointShape,
    FolderSource,
    HubSource,
    RandomSource,
    SourceError,
    parse_source,
    read_shape,
    resolve_here,
    source_folders,
)
from lockstep.errors import InputError
from lockstep.targets import Results

CONFIG = {
    "models": {
        "m": {
            "source": "checkpoint",
            "layers": [2, "all"],
            "golden": {"max_new_tokens": 8, "prompts": [{"text": "Hello"}]},
        }
    }
}


def resolve_source(path: str, folders=None) -> Path:
    return resolve_here(FolderSource(path), folders)


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "work" / "checkpoint", {"num_hidden_layers": 6, "max_position_embeddings": 256})


def write_checkpoint(folder: Path, config) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def error_of(checkpoint: Path, **changes) -> str:
    model = {**CONFIG["models"]["m"], **{key: value for key, value in changes.items() if key != "limits"}}
    config = load({"models": {"m": model}, "limits": changes.get("limits", {})})
    with pytest.raises(InputError) as caught:
        config.check_sources([checkpoint.parent], where="config/config.yaml")
    return str(caught.value)


def test_a_relative_source_is_looked_up_from_the_working_directory_then_the_repository(
    tmp_path, checkpoint, monkeypatch
):
    monkeypatch.chdir(tmp_path / "work")
    assert source_folders() == (tmp_path / "work", REPOSITORY)
    assert resolve_source("checkpoint") == checkpoint
    second = write_checkpoint(tmp_path / "repository" / "checkpoint", {})
    assert resolve_source("checkpoint", [tmp_path / "work", tmp_path / "repository"]) == checkpoint
    assert resolve_source("checkpoint", [tmp_path, tmp_path / "repository"]) == second
    assert (REPOSITORY / "pyproject.toml").is_file()


def test_an_absolute_source_is_taken_as_it_is(checkpoint, tmp_path):
    assert resolve_source(str(checkpoint), [tmp_path]) == checkpoint
    assert resolve_source(f"{checkpoint}/../checkpoint/", [tmp_path]) == checkpoint


def test_a_source_that_is_nowhere_names_every_place_looked_at(tmp_path):
    with pytest.raises(InputError) as caught:
        resolve_source("absent", [tmp_path / "a", tmp_path / "b"])
    assert str(caught.value) == (
        f"expected a checkpoint folder; found none at {tmp_path}/a/absent and {tmp_path}/b/absent"
    )
    with pytest.raises(InputError) as caught:
        resolve_source(str(tmp_path / "absent"), [tmp_path / "a", tmp_path / "b"])
    assert str(caught.value) == f"expected a checkpoint folder; found none at {tmp_path}/absent"


@pytest.mark.parametrize("source", ["nul\0", "x" * 5000, "a\nb", "~/checkpoint"])
def test_a_source_that_no_folder_can_have_is_only_not_found(tmp_path, source):
    with pytest.raises(InputError, match="expected a checkpoint folder"):
        resolve_source(source, [tmp_path])


@pytest.mark.parametrize(("source", "hint"), [
    ("meta-llama/Llama-2-7b-hf", "; for a model on the hub write hf:meta-llama/Llama-2-7b-hf"),
    ("meta-llama/Llama-2-7b-hf@main", "; for a model on the hub write hf:meta-llama/Llama-2-7b-hf@main"),
    ("https://huggingface.co/org/name", "; for a model on the hub write hf:org/name"),
    ("huggingface.co/org/name/", "; for a model on the hub write hf:org/name"),
    ("https://hf.co/org/name/tree/v1.0/sub", "; for a model on the hub write hf:org/name@v1.0"),
    ("https://example.org/model.tar.gz", "; nothing is fetched by URL: download it and give its path, or "
"write hf:org/name@revision for a model on the hub"),
    ("s3://bucket/model", "; nothing is fetched by URL: "),
    ("git@example.org:org/name", "; nothing is fetched by URL: "),
    ("~/models/llama", "; ~ and variables are not expanded: write the path out, such as /home/me/models/llama"),
    ("$HOME/models/llama", "; ~ and variables are not expanded: write the path out, such as /home/me/models/llama"),
    ("C:\\models\\llama", "; write the path with /"),
    ("models/llama/7b", ""), ("llama", ""), ("/models/llama", ""), ("../llama", ""), ("./org/name", ""),
])  # fmt: skip
def test_a_source_that_is_meant_as_something_else_gets_a_hint(tmp_path, monkeypatch, source, hint):
    monkeypatch.setenv("HOME", "/home/me")
    with pytest.raises(InputError) as caught:
        resolve_source(source, [tmp_path])
    place = str(caught.value).partition("; found none at ")[2]
    assert hint in place and ("; " in place) == bool(hint)


def test_a_random_source_gets_no_hint_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert error_of(tmp_path / "x", source="random:a/shape.json").endswith(f"found none at {tmp_path}/a/shape.json")
    assert error_of(tmp_path / "x", source="random:~/shape.json").endswith(
        "write the path out, such as /home/me/shape.json"
    )


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf:a/b", HubSource("a/b", "main")),
        ("hf:gpt2", HubSource("gpt2", "main")),
        ("hf:a/b.c-1@refs/pr/1", HubSource("a/b.c-1", "refs/pr/1")),
        ("random:shape.json", RandomSource("shape.json", 0)),
        ("random:../a b/shape.json?seed=12", RandomSource("../a b/shape.json", 12)),
        ("checkpoints/hf:a", FolderSource("checkpoints/hf:a")),
    ],
)
def test_a_source_is_a_folder_a_name_on_the_hub_or_a_shape(text, source):
    assert parse_source(text) == source


@pytest.mark.parametrize("text", [
    "hf:", "hf:a/b/c", "hf:/b", "hf:a/", "hf:../b", "hf:a/b..c", "hf:a--b/c", "hf:a b/c", "hf:a/b@", "hf:a/b@../x",
    "hf:a/b@a b", "hf:a/b@x@y", "hf:a/b\n", "random:", "random:?seed=1", "random:a?", "random:a?seed=",
    "random:a?seed=-1", "random:a?seed=1&x=2", "random:a?sed=1", "random:a?seed=٣",
])  # fmt: skip
def test_what_opens_like_a_source_of_another_kind_must_be_one(text):
    with pytest.raises(SourceError, match=r"^expected (hf:org/name or|random:path/to/config.json or) .*; found "):
        parse_source(text)


def test_a_random_source_names_a_config_that_can_spell_prompts(tmp_path):
    assert error_of(tmp_path / "x", source="random:shape.json") == (
        f"config/config.yaml: models.m.source: expected a model's config.json; found none at {tmp_path}/shape.json"
    )
    shape = write_checkpoint(tmp_path / "shape", {"num_hidden_layers": 3, "vocab_size": 255})
    assert "found a folder at" in error_of(shape, source="random:shape")
    assert error_of(shape, source="random:shape/config.json") == (
        f"config/config.yaml: models.m.source: expected a vocab_size of 256 or more in {shape}/config.json, "
        f"a token for each byte, "
        "or a tokenizer.json next to it; found 255"
    )
    (shape / "tokenizer.json").touch()
    assert "models.m.layers[0]: expected at most 3" in error_of(shape, source="random:shape/config.json", layers=[4])
    assert load(
        {"models": {"m": {**CONFIG["models"]["m"], "source": "random:shape/config.json?seed=3"}}}
    ).check_sources([tmp_path]) == {"m": shape / "config.json"}


def test_a_model_on_the_hub_is_checked_once_it_is_here(tmp_path):
    config = load({"models": {"m": {**CONFIG["models"]["m"], "source": "hf:a/b", "layers": [9]}}})
    results = Results(tmp_path / "results")
    assert config.check_sources([tmp_path], results=results) == {}
    write_checkpoint(tmp_path / "results" / "m" / "checkpoint", {"num_hidden_layers": 6})
    write_fetched(results.source("m"), "hf:a/b", {"config.json": "0" * 64}, commit="1")
    with pytest.raises(InputError, match=r"models.m.layers\[0\]: expected at most 6"):
        config.check_sources([tmp_path], results=results)
    write_fetched(results.source("m"), "hf:a/b@other", {"config.json": "0" * 64}, commit="1")
    assert config.check_sources([tmp_path], results=results) == {}


def test_a_file_and_a_folder_without_config_are_told_apart(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(
        InputError, match="expected a folder; found a file at .*/model.safetensors: give the folder that holds it"
    ):
        resolve_source("model.safetensors", [tmp_path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="expected a checkpoint folder with a config.json; found none in .*/empty"):
        resolve_source("empty", [tmp_path])


def test_a_config_that_fits_its_checkpoints_gives_their_folders(checkpoint):
    assert load(CONFIG).check_sources([checkpoint.parent]) == {"m": checkpoint}


def test_the_shape_is_read_under_other_models_names_for_it(tmp_path):
    gpt2 = write_checkpoint(tmp_path / "gpt2", {"n_layer": 12, "n_positions": 1024})
    assert read_shape(gpt2) == CheckpointShape(12, 1024)
    bloom = write_checkpoint(tmp_path / "bloom", {"n_layer": 30})
    assert read_shape(bloom) == CheckpointShape(30, None)
    with_images = write_checkpoint(
        tmp_path / "with_images", {"text_config": {"num_hidden_layers": 34, "max_position_embeddings": 131072}}
    )
    assert read_shape(with_images) == CheckpointShape(34, 131072)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # As published: the head is the embedding where nothing denies it.
        ({"hidden_size": 640, "vocab_size": 262144, "intermediate_size": 2048, "num_hidden_layers": 18,
          "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}, 268_098_176),
        ({"n_embd": 768, "vocab_size": 50257, "n_layer": 12, "n_head": 12}, 124_439_808),
        ({"hidden_size": 4096, "vocab_size": 128256, "intermediate_size": 14336, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}, 8_030_261_248),
        ({"hidden_size": 2048, "vocab_size": 151936, "intermediate_size": 6144, "num_hidden_layers": 48,
          "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False,
          "num_experts": 128, "moe_intermediate_size": 768}, 30_532_122_624),
        ({"hidden_size": 7168, "vocab_size": 129280, "intermediate_size": 18432, "num_hidden_layers": 61,
          "num_attention_heads": 128, "kv_lora_rank": 512, "first_k_dense_replace": 3, "n_routed_experts": 256,
          "n_shared_experts": 1, "moe_intermediate_size": 2048, "tie_word_embeddings": False}, 671_026_419_200),
    ],
    ids=["gemma-3-270m", "gpt2", "llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"],
)  # fmt: skip
def test_parameters_are_about_those_of_the_published_model(tmp_path, config, expected):
    """Experts, and a table that is embedding and head at once, counted."""
    actual = read_shape(write_checkpoint(tmp_path / "m", config)).num_parameters
    assert abs(actual / expected - 1) < 0.01


def test_heads_that_do_not_divide_by_the_ranks(tmp_path):
    """Said when the config is read, not after the export."""
    folder = write_checkpoint(
        tmp_path / "checkpoint", {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    )
    on_gpus = {"backends": ["cuda"], "precisions": ["fp16"]}
    expected = "expected a divisor of the 4 attention heads, and a divisor or a multiple of the 2 key and value heads"
    assert expected in error_of(folder, tensor_parallel=3, **on_gpus)


def test_more_layers_than_the_model_has(checkpoint):
    assert error_of(checkpoint, layers=[2, 7, 8]) == (
        f"config/config.yaml: models.m.layers[1]: expected at most 6 (num_hidden_layers in "
        f"{checkpoint}/config.json) or all; found 7 (and 1 more)"
    )


def test_the_full_depth_as_a_number_and_as_all(checkpoint):
    assert error_of(checkpoint, layers=["all", 6]) == (
        "config/config.yaml: models.m.layers[1]: expected each target once; found 6, which is all of this "
        "model's layers, and all"
    )
    only_number = {"models": {"m": {**CONFIG["models"]["m"], "layers": [6]}}}
    assert load(only_number).check_sources([checkpoint.parent])


def test_longer_than_the_model_knows_positions(checkpoint):
    assert error_of(checkpoint, limits={"max_seq_len": 257}) == (
        f"config/config.yaml: limits.max_seq_len: expected at most 256 (max_position_embeddings in "
        f"{checkpoint}/config.json); found 257"
    )


def test_a_source_that_is_not_there_names_its_key(checkpoint):
    assert error_of(checkpoint, source="absent") == (
        f"config/config.yaml: models.m.source: expected a checkpoint folder; found none at {checkpoint.parent}/absent"
    )


@pytest.mark.parametrize(("text", "expected"), [
    ("{", "expected JSON in {path}; found Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ("[]", "expected a JSON object in {path}; found list"),
    ("{}", "expected num_hidden_layers in {path}; found none"),
    ('{"num_hidden_layers": "6"}', "expected an integer from 1 to 1024 as num_hidden_layers in {path}; found '6'"),
    ('{"num_hidden_layers": true}', "expected an integer from 1 to 1024 as num_hidden_layers in {path}; found True"),
    ('{"num_hidden_layers": 6, "max_position_embeddings": 0}',
     "expected an integer from 1 to 134217728 as max_position_embeddings in {path}; found 0"),
])  # fmt: skip
def test_a_bad_config_json_is_named(tmp_path, text, expected):
    folder = write_checkpoint(tmp_path / "checkpoint", text)
    expected = expected.replace("{path}", str(folder / "config.json"))
    assert error_of(folder) == f"config/config.yaml: models.m.source: {expected}"
