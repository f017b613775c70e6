"""The shared cache: its entries and blobs, and the files that it restores."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from checkpoints import error_of
from shared_cache import checkpoint, contents, convert, entries, files_of, never, start, verify

from lockstep.artifacts.files import read_json, write_json
from lockstep.backends import builder
from lockstep.provenance import run as stage
from lockstep.provenance.cache import Cache, cache_folder
from lockstep.provenance.statements import read_statement
from lockstep.stages import Job
from lockstep.targets import Results


def test_what_one_made_another_takes_with_the_same_bytes(tmp_path: Path, cache: Cache, capsys) -> None:
    convert(checkpoint(tmp_path / "one"), tmp_path / "one" / "fp32", cache.folder)
    (entry,) = entries(cache)
    key = entry.key.sha256
    assert (f"cache: convert m/fp32 is put into {cache.folder}, build key {key[:12]}\n") == capsys.readouterr().err
    out = convert(checkpoint(tmp_path / "a" / "b" / "other"), tmp_path / "other" / "fp32", cache.folder, make=never)
    assert out == tmp_path / "other" / "fp32" / "weights.json"
    assert (
        f"cache: convert m/fp32 is taken from {cache.folder}, build key {key[:12]}: nothing was computed\n"
    ) == capsys.readouterr().err
    assert contents(tmp_path / "one" / "fp32") == contents(tmp_path / "other" / "fp32"), "the statement too"
    assert read_statement(out).key.sha256 == key
    assert verify(cache) == [] and not list(cache.folder.rglob("*.tmp"))


def test_other_inputs_another_key(tmp_path: Path, cache: Cache) -> None:
    for seed in (0, 1):
        convert(checkpoint(tmp_path / str(seed), seed), tmp_path / str(seed) / "fp32", cache.folder)
    convert(tmp_path / "0" / "checkpoint.json", tmp_path / "fp16", cache.folder, "fp16")
    assert len(entries(cache)) == 3


def test_what_names_files_elsewhere_is_made_where_it_is_right(tmp_path: Path, cache: Cache) -> None:
    """bf16 from bf16: the manifest points into the checkpoint."""
    convert(checkpoint(tmp_path / "one"), tmp_path / "bf16", cache.folder, "bf16")
    assert not cache.folder.exists()


@pytest.mark.parametrize("name", ["validate", "golden", "resolve"])
def test_checks_run_each_time(tmp_path: Path, cache: Cache, name: str) -> None:
    steps = []
    for _ in range(2):
        step = Job(name, {"model": "m"}, {}, {}, tmp_path / "out.json")
        stage.run(step, lambda: steps.append(write_json(step.output, {"format": "a/1"})), cache=str(cache.folder))
    assert len(steps) == 2 and not cache.folder.exists()


def test_results_that_are_edited_in_place_leave_the_cache_as_it_was(tmp_path: Path, cache: Cache) -> None:
    """Links would not: neither the file that was put nor the one that was taken shares anything that can be written
    to."""
    manifest = checkpoint(tmp_path)
    for folder in ("put", "taken"):
        convert(manifest, tmp_path / folder, cache.folder)
        with open(tmp_path / folder / "weights.safetensors", "r+b") as file:
            file.write(b"edited")
    assert verify(cache) == []
    convert(manifest, tmp_path / "third", cache.folder, make=never)
    assert (tmp_path / "third" / "weights.safetensors").read_bytes()[:6] != b"edited"


def test_a_model_takes_what_another_of_its_tree_has(tmp_path: Path, capsys) -> None:
    """As a fine-tune the graphs and engines of its base."""

    def export(model: str, precision: str, make) -> Path:
        out = tmp_path / model / precision / "graphs" / "assembly.json"
        step = Job("export", {"model": model, "precision": precision}, {}, {}, out)
        return stage.run(step, lambda: make(out))

    def assembly(out: Path) -> None:
        write_json(out, {"format": "lockstep.test/1"})

    base = export("base", "fp32", assembly)
    tuned = export("tuned", "fp32", never)
    assert contents(base.parent) == contents(tuned.parent), "the statement too"
    assert "reused: export tuned/fp32 is that of base, of the same build key\n" in capsys.readouterr().err
    base.write_text("damaged")
    tuned.write_text("damaged")
    outputs = []
    for precision in ("fp32", "fp16"):
        export("third", precision, lambda out: (outputs.append(out), assembly(out)))
    assert len(outputs) == 2 and capsys.readouterr().err == ""


def graphs(demo: Results, folder: Path) -> Path:
    """The demo's graphs in fp16, recorded."""
    out = Path(shutil.copytree(demo.assembly("demo-llama", "fp16").parent, folder / "graphs")) / "assembly.json"
    stage.run(Job("export", {"model": "m", "precision": "fp16"}, {}, {}, out), lambda: None)
    return out


def test_an_engine_set_takes_the_place_of_an_earlier_one(demo: Results, tmp_path: Path, cache: Cache) -> None:
    def build(folder: Path, make) -> None:
        step = Job(
            "build", {"model": "m", "precision": "fp16", "backend": "onnxruntime"}, {"assembly": assembly}, {},
            folder / "engines.json",
        )  # fmt: skip
        stage.run(step, make or (lambda: builder.build(assembly, "onnxruntime", step.output)), cache=str(cache.folder))

    assembly = graphs(demo, tmp_path)
    build(tmp_path / "one", None)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    write_json(
        tmp_path / "other" / "engines.json",
        {**read_json(tmp_path / "other" / "engines.json"), "backend_version": "0.0"},
    )
    (tmp_path / "other" / "middle.onnx").write_bytes(b"an engine of another version")
    (tmp_path / "other" / "middle_2.onnx").write_bytes(b"and one of a class that is no more")
    (tmp_path / "other" / "attention.decode.engine").write_bytes(b"and one of another kind of file")
    (tmp_path / "other" / f".middle.onnx.{2**22 + 1}.tmp").write_bytes(b"left by a kill")  # above any process id
    build(tmp_path / "other", never)
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


def test_what_changed_while_it_was_made_is_not_kept(tmp_path: Path, cache: Cache, capsys) -> None:
    manifest = checkpoint(tmp_path)
    out = tmp_path / "fp32" / "weights.json"

    def make() -> Path:
        write_json(out, {"format": "lockstep.weights/1", "files": [], "tensors": {}})
        checkpoint(tmp_path, seed=1)  # by somebody else
        return out

    convert(manifest, out.parent, cache.folder, make=make)
    assert (
        f"convert m/fp32 is not put into {cache.folder}: {manifest} changed while it was made"
    ) in capsys.readouterr().err
    assert not cache.folder.exists()


def test_the_variable_goes_before_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder("") is None and cache_folder("a/b") == Path("a/b")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    assert cache_folder("a/b") == tmp_path
    monkeypatch.setenv("LOCKSTEP_CACHE", "")
    assert cache_folder("a/b") is None
    monkeypatch.delenv("LOCKSTEP_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("~/cache") == tmp_path / "cache"


def test_a_place_where_no_folder_can_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    line = (
        f"config: cache: expected a folder, or a path where one can be made, found that {tmp_path / 'file'} is a file"
    )
    assert error_of(cache_folder, str(tmp_path / "file" / "below")).startswith(line)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "file"))
    assert error_of(cache_folder).startswith("LOCKSTEP_CACHE: expected a folder")


def test_a_cache_that_is_a_file_costs_nothing_that_was_there(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path)
    convert(manifest, tmp_path / "fp32", "")
    before = contents(tmp_path / "fp32")
    (tmp_path / "file").touch()
    process = start(manifest, tmp_path / "file", tmp_path / "fp32")
    stderr = process.communicate()[1]
    assert process.returncode == 2 and len(stderr.splitlines()) == 1
    assert stderr.startswith("lockstep: error: config: cache: expected a folder")
    assert contents(tmp_path / "fp32") == before


def test_taking_is_a_use_of_the_entry_and_of_its_files(tmp_path: Path, cache: Cache) -> None:
    """So that files may be deleted by their age."""
    manifest = checkpoint(tmp_path)
    convert(manifest, tmp_path / "put", cache.folder)
    files = [*files_of(cache.entries), *files_of(cache.blobs)]
    for path in files:
        os.utime(path, (0, 0))
    convert(manifest, tmp_path / "taken", cache.folder, make=never)
    assert len(files) == 3 and all(path.stat().st_mtime > 0 for path in files)


@pytest.mark.parametrize("kind", ["entries", "blobs"])
def test_what_was_deleted_is_made_again(tmp_path: Path, cache: Cache, kind: str) -> None:
    manifest = checkpoint(tmp_path)
    convert(manifest, tmp_path / "put", cache.folder)
    for path in files_of(cache.folder / kind):
        path.unlink()
    convert(manifest, tmp_path / "made", cache.folder)
    assert contents(tmp_path / "made") == contents(tmp_path / "put") and verify(cache) == []
    convert(manifest, tmp_path / "taken", cache.folder, make=never)
