"""Changes of a model's source files: found by content, not by dates or places."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from demo_model import DEMO, ROOT

import gguf_models
from lockstep.artifacts.fetched import folder_of, write_fetched
from lockstep.artifacts.files import sha256_file
from lockstep.checkpoint import resolve, resolve_fetched
from lockstep.export.make_checkpoint import make_checkpoint
from lockstep.provenance.sources import Sources, changed_files
from lockstep.stages import Job
from lockstep.weights.check_adapters import resolve_adapters

ADAPTERS = ROOT / "resources" / "demo-adapters"


def step(stage: str, output: Path) -> Job:
    return Job(stage, {"model": "m"}, {}, {}, output)


def flip(path: Path, place: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_checkpoint(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "one")
    path = step("resolve", resolve(str(folder), folder, tmp_path / "checkpoint.json"))
    os.utime(folder / "model.safetensors")
    elsewhere = shutil.copytree(folder, tmp_path / "two")
    assert changed_files(path, Sources(folder)) == changed_files(path, Sources(elsewhere)) == []
    assert changed_files(path, Sources()) == []
    flip(folder / "model.safetensors")
    (folder / "generation_config.json").unlink(missing_ok=True)
    lines = changed_files(path, Sources(folder))
    assert any("model.safetensors changed: sha256 " in line for line in lines), lines


def test_a_gguf_file(tmp_path: Path) -> None:
    path = gguf_models.write_model(tmp_path / "m.gguf", "llama", gguf_models.table()["vocabularies"])
    out = step("make_checkpoint", make_checkpoint("m.gguf", path, tmp_path / "m" / "source.json"))
    os.utime(path)
    assert changed_files(out, Sources(made_of=path)) == []
    flip(path)
    (line,) = changed_files(out, Sources(made_of=path))
    assert line.startswith(f"{path} changed: sha256 ")


def test_the_config_of_random_weights(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    shutil.copyfile(DEMO / "config.json", config)
    path = step("make_checkpoint", make_checkpoint("random:config.json", config, tmp_path / "m" / "source.json"))
    os.utime(config)
    assert changed_files(path, Sources(made_of=config)) == []
    shutil.copyfile(DEMO / "tokenizer.json", tmp_path / "tokenizer.json")
    (line,) = changed_files(path, Sources(made_of=config))
    assert line.startswith(f"{tmp_path / 'tokenizer.json'} changed: sha256 ")
    (tmp_path / "tokenizer.json").unlink()
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 1}))
    assert changed_files(path, Sources(made_of=config)) == [f"{config} changed"]


def test_a_fetched_checkpoint_at_another_commit(tmp_path: Path) -> None:
    source = tmp_path / "source.json"
    shutil.copytree(DEMO, folder_of(source))
    digests = {path.name: sha256_file(path) for path in folder_of(source).iterdir() if path.is_file()}
    write_fetched(source, "hf:org/model", digests, commit="a" * 40)
    out = step("resolve", resolve_fetched(source, tmp_path / "checkpoint.json"))
    assert changed_files(out, Sources(folder_of(source), source)) == []
    write_fetched(source, "hf:org/model", digests, commit="b" * 40)
    assert changed_files(out, Sources(folder_of(source), source)) == [f"{source}: commit {'a' * 40} -> {'b' * 40}"]


def test_adapters(tmp_path: Path) -> None:
    checkpoint = resolve(str(DEMO), DEMO, tmp_path / "checkpoint.json")
    folder = shutil.copytree(ADAPTERS / "captain", tmp_path / "captain")
    out = resolve_adapters(
        {"captain": str(folder)}, {"captain": folder}, checkpoint, 16, None, tmp_path / "adapters.json"
    )
    path = step("adapters", out)
    os.utime(folder / "adapter_model.safetensors")
    assert changed_files(path, Sources(adapters={"captain": folder})) == []
    flip(folder / "adapter_model.safetensors")
    (line,) = changed_files(path, Sources(adapters={"captain": folder}))
    assert line.startswith(f"{folder / 'adapter_model.safetensors'} changed: sha256 ")
