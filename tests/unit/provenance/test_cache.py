"""The shared cache: what it holds, what it gives back, and its upkeep."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import error_of
from shared_cache import checkpoint, contents, convert, never, start, verify

from calls import call
from lockstep import backends
from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.provenance import run as stage
from lockstep.provenance.cache.store import Cache, cache_folder
from lockstep.provenance.cache.upkeep import IN_THE_MAKING, bytes_text, prune, scan
from lockstep.provenance.statements import read_statement
from lockstep.stages import Job
from lockstep.targets import Results


def test_what_one_made_another_takes_with_the_same_bytes(tmp_path: Path, cache: Cache, capsys) -> None:
    convert(checkpoint(tmp_path / "one"), tmp_path / "one" / "fp32", cache.folder)
    (key,) = keys(cache)
    assert (f"cache: convert m/fp32 is put into {cache.folder}, build key {key[:12]}\n") == capsys.readouterr().err
    out = convert(checkpoint(tmp_path / "a" / "b" / "other"), tmp_path / "other" / "fp32", cache.folder, make=never)
    assert out == tmp_path / "other" / "fp32" / "weights.json"
    assert (
        f"cache: convert m/fp32 is taken from {cache.folder}, build key {key[:12]}: nothing was computed\n"
    ) == capsys.readouterr().err
    assert contents(tmp_path / "one" / "fp32") == contents(tmp_path / "other" / "fp32"), "the statement too"
    assert read_statement(out).key.sha256 == key
    assert verify(cache) == [] and not scan(cache).temporary


def test_other_inputs_another_key(tmp_path: Path, cache: Cache) -> None:
    for seed in (0, 1):
        convert(checkpoint(tmp_path / str(seed), seed), tmp_path / str(seed) / "fp32", cache.folder)
    convert(tmp_path / "0" / "checkpoint.json", tmp_path / "fp16", cache.folder, "fp16")
    assert len(scan(cache).entries) == 3


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


def graphs(demo: Results, folder: Path) -> Path:
    """The demo's graphs in fp16, recorded."""
    out = Path(shutil.copytree(demo.assembly("demo-llama", "fp16").parent, folder / "graphs")) / "assembly.json"
    stage.run(Job("export", {"model": "m", "precision": "fp16"}, {}, {}, out), lambda: None)
    return out


def test_an_engine_set_takes_the_place_of_an_earlier_one(demo: Results, tmp_path: Path, cache: Cache) -> None:
    def build(folder: Path, make) -> None:
        step = Job(
            "build",
            {"model": "m", "precision": "fp16", "backend": "onnxruntime"},
            {"assembly": assembly},
            {},
            folder / "engines.json",
        )
        stage.run(step, make or (lambda: backends.build(assembly, "onnxruntime", step.output)), cache=str(cache.folder))

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


# Upkeep.


@pytest.fixture
def filled(tmp_path: Path, cache: Cache) -> Cache:
    """Three entries, put and used last 3, 2 and 1 days ago, of 0.2, 0.4 and 0.6 MB."""
    for number in (1, 2, 3):
        convert(checkpoint(tmp_path / str(number), number, number / 10), tmp_path / str(number) / "fp32", cache.folder)
        statement = read_statement(tmp_path / str(number) / "fp32" / "weights.json")
        for path in (*map(cache.blob_path, statement.outputs.values()), cache.entry_path(statement.key.sha256)):
            age(path, (4 - number) * 86400)
    return cache


def test_a_blob_that_another_machine_has_just_touched_stays(tmp_path: Path, filled: Cache) -> None:
    """It has made the same, of something else, and writes its entry after the blobs."""
    oldest = scan(filled).entries[-1].entry
    (sha256, *_) = oldest.outputs.values()
    source = tmp_path / "same"
    source.write_bytes(filled.blob_path(sha256).read_bytes())
    filled.add(source, sha256)
    prune(filled, max_size=0)
    assert scan(filled).blobs.keys() == {sha256} and not keys(filled)
    age(filled.blob_path(sha256), IN_THE_MAKING + 60)
    prune(filled)
    assert not scan(filled).blobs, "nobody came"


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def keys(cache: Cache) -> list[str]:
    """Of all entries, those used last first."""
    return [used.entry.key.sha256 for used in scan(cache).entries]


def test_those_used_longest_ago_go_first(filled: Cache) -> None:
    last, middle, _ = keys(filled)
    prune(filled, max_size=1.1e6)
    assert keys(filled) == [last, middle] and scan(filled).size <= 1.1e6 and len(scan(filled).blobs) == 4
    prune(filled, older_than=36 * 3600)
    assert keys(filled) == [last]
    pruned = prune(filled, max_size=0)
    assert contents(filled.folder) == {} and pruned.entries == 1 and pruned.files == 2 and pruned.size > 0.6e6


def test_taking_is_a_use(tmp_path: Path, filled: Cache) -> None:
    oldest = keys(filled)[-1]
    convert(tmp_path / "1" / "checkpoint.json", tmp_path / "taken", filled.folder, make=never)
    assert keys(filled)[0] == oldest


def test_a_blob_of_two_entries_stays_with_one_of_them(tmp_path: Path, filled: Cache) -> None:
    last, middle, oldest = (used.entry for used in scan(filled).entries)
    shared = replace(oldest, key=replace(oldest.key, options={"other": 1}))
    filled.write(shared)
    prune(filled, older_than=86400 / 2)
    assert keys(filled) == [shared.key.sha256] and scan(filled).blobs.keys() == {*oldest.outputs.values()}


def test_what_is_in_the_making_is_left_alone_for_an_hour(tmp_path: Path, filled: Cache) -> None:
    sha256 = sha256_file(checkpoint(tmp_path / "new"))
    filled.add(tmp_path / "new" / "checkpoint.json", sha256)
    orphan = filled.blob_path(sha256)
    temporary = filled.blobs / f".{'0' * 64}.0123456789abcdef.tmp"
    temporary.write_bytes(b"half")
    prune(filled)
    assert orphan.exists() and temporary.exists() and len(keys(filled)) == 3
    for path in (orphan, temporary):
        age(path, IN_THE_MAKING + 60)
    pruned = prune(filled)
    assert not orphan.exists() and not temporary.exists() and len(keys(filled)) == 3
    assert (pruned.entries, pruned.files) == (0, 2)


def test_a_clock_that_was_set_back_drops_nothing_in_the_making(filled: Cache) -> None:
    """Files of the future are young."""
    temporary = filled.entries / f".{'0' * 64}.json.0123456789abcdef.tmp"
    temporary.write_bytes(b"half")
    for path in (temporary, *filled.entries.glob("*.json")):
        age(path, -10 * 86400)
    prune(filled, older_than=0)
    assert temporary.exists() and len(keys(filled)) == 3


def lockstep(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    return call("lockstep", ("cache", *map(str, arguments)), Path.cwd(), {**os.environ, **environment})


def test_prune_says_what_it_drops_and_what_is_left(tmp_path: Path, filled: Cache) -> None:
    (tmp_path / "my.yaml").write_text(
        f"models: {{m: {{source: a, golden: {{prompts: [{{text: a}}]}}}}}}\ncache: {filled.folder}\n"
    )
    pruned = lockstep("prune", "--config", tmp_path / "my.yaml", "--max-size", "1.1MB", "--older-than", "36h")
    left = bytes_text(scan(filled).size)
    assert re.fullmatch(
        rf"dropped: 2 entries, 4 files of 63\d\.\d kB\nleft: 1 entries, 2 files of {left}\n", pruned.stdout
    )


@pytest.mark.parametrize("arguments, line", [
    (("prune", "--cache", "/nowhere"), "lockstep: error: /nowhere: expected a cache, found no folder; it is "
"made when something is first put into it"),
    (("prune",), "lockstep: error: cache: expected a folder, found none: give it with --cache, "
"LOCKSTEP_CACHE or `cache` in the config"),
    (("prune", "--max-size", "many"), "Error: Invalid value for '--max-size': expected a number and a unit, "
"such as 10GB; found 'many'"),
    (("prune", "--older-than", "30"), "Error: Invalid value for '--older-than': expected a number and a "
"unit, such as 30d; found '30'"),
])  # fmt: skip
def test_a_mistake_is_one_line(arguments: tuple[str, ...], line: str) -> None:
    process = lockstep(*arguments, LOCKSTEP_CACHE="")
    assert process.returncode == 2 and process.stderr.splitlines()[-1] == line and "Traceback" not in process.stderr
