"""Where a source is looked up, and the config against the checkpoint that it names, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.config import load
from lockstep.errors import InputError
from lockstep.sources import REPOSITORY, CheckpointShape, read_shape, resolve_source, source_folders

CONFIG = {"models": {"m": {
    "source": "checkpoint", "layers": [2, "all"], "golden": {"max_new_tokens": 8, "prompts": [{"text": "Hello"}]},
}}}


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


def test_a_relative_source_is_looked_up_from_the_working_directory_then_the_repository(tmp_path, checkpoint, monkeypatch):
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
    assert str(caught.value) == f"expected a checkpoint folder; found none at {tmp_path}/a/absent and {tmp_path}/b/absent"
    with pytest.raises(InputError) as caught:
        resolve_source(str(tmp_path / "absent"), [tmp_path / "a", tmp_path / "b"])
    assert str(caught.value) == f"expected a checkpoint folder; found none at {tmp_path}/absent"


@pytest.mark.parametrize("source", ["nul\0", "x" * 5000, "a\nb", "~/checkpoint"])
def test_a_source_that_no_folder_can_have_is_only_not_found(tmp_path, source):
    with pytest.raises(InputError, match="expected a checkpoint folder"):
        resolve_source(source, [tmp_path])


@pytest.mark.parametrize("source", ["hf:a/b", "random:llama"])
def test_sources_other_than_folders_are_refused(source):
    with pytest.raises(InputError, match=r"^expected a folder \(only folders are supported yet\); found '.*'$"):
        resolve_source(source)


def test_a_file_and_a_folder_without_config_are_told_apart(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InputError, match="expected a folder; found a file at .*/model.safetensors: give the folder that holds it"):
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


def test_more_layers_than_the_model_has(checkpoint):
    assert error_of(checkpoint, layers=[2, 7, 8]) == (
        f"config/config.yaml: models.m.layers[1]: expected at most 6 (num_hidden_layers in {checkpoint}/config.json) or all; found 7 (and 1 more)"
    )


def test_the_full_depth_as_a_number_and_as_all(checkpoint):
    assert error_of(checkpoint, layers=["all", 6]) == (
        "config/config.yaml: models.m.layers[1]: expected each target once; found 6, which is all of this model's layers, beside all"
    )
    only_number = {"models": {"m": {**CONFIG["models"]["m"], "layers": [6]}}}
    assert load(only_number).check_sources([checkpoint.parent])


def test_longer_than_the_model_knows_positions(checkpoint):
    assert error_of(checkpoint, limits={"max_seq_len": 257}) == (
        f"config/config.yaml: limits.max_seq_len: expected at most 256 (max_position_embeddings in {checkpoint}/config.json); found 257"
    )


def test_a_source_that_is_not_there_names_its_key(checkpoint):
    assert error_of(checkpoint, source="absent") == (
        f"config/config.yaml: models.m.source: expected a checkpoint folder; found none at {checkpoint.parent}/absent"
    )


@pytest.mark.parametrize(("text", "expected"), [
    ("{", "expected JSON in {path}; found Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ("[]", "expected a JSON object in {path}; found list"),
    ("{}", "expected num_hidden_layers in {path}; found none"),
    ('{"num_hidden_layers": "6"}', "expected a positive integer as num_hidden_layers in {path}; found '6'"),
    ('{"num_hidden_layers": true}', "expected a positive integer as num_hidden_layers in {path}; found True"),
    ('{"num_hidden_layers": 6, "max_position_embeddings": 0}',
     "expected a positive integer as max_position_embeddings in {path}; found 0"),
])
def test_a_bad_config_json_is_named(tmp_path, text, expected):
    folder = write_checkpoint(tmp_path / "checkpoint", text)
    expected = expected.replace("{path}", str(folder / "config.json"))
    assert error_of(folder) == f"config/config.yaml: models.m.source: {expected}"
