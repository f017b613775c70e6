"""Damaged documents and files: verify, diff, explain and lock name each with a one-line message."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from demo_model import CONFIG
from reports import golden, golden_prompt, served, validation

from lockstep.artifacts import formats
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.engines import EngineFile, EngineSetManifest
from lockstep.artifacts.files import DIGEST_KEY, sha256_json, write_json
from lockstep.artifacts.places import FileEntry, StoredFile
from lockstep.artifacts.reference import ReferenceManifest, ReferencePrompt
from lockstep.artifacts.statement import DIGEST
from lockstep.errors import LockstepError
from lockstep.provenance import run as stage
from lockstep.provenance.explain import explain
from lockstep.provenance.lock import Lock, lock_entries
from lockstep.provenance.lock_update import updated_lock
from lockstep.provenance.verify import SAME, Finding, verify
from lockstep.stages import STAGES
from lockstep.targets import Results, Target
from some import some

MODEL = "demo-llama"
TARGET = Target(MODEL, "fp16", 2, "onnxruntime")


def make(results: Results, name: str, value: dict[str, Any], **files: bytes) -> None:
    """Record the stage `name`; its manifest names `files`, in the same folder."""
    job = STAGES[name].job(
        CONFIG, results.root, {"model": MODEL, "precision": "fp16", "layers": 2, "backend": "onnxruntime"}
    )

    def write() -> None:
        for file, data in files.items():
            job.output.parent.mkdir(parents=True, exist_ok=True)
            job.output.with_name(file).write_bytes(data)
        write_json(job.output, value)

    stage.run(replace(job, inputs={key: path for key, path in job.inputs.items() if path.is_file()}), write)


def named(file: str) -> dict[str, Any]:
    return {"file": file, "sha256": sha256(file.encode()).hexdigest()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with results/ of a model that has no more than its manifests, and locks/."""
    root = tmp_path_factory.mktemp("damage")
    results = Results(root / "results")
    (root / "checkpoint").mkdir()
    (root / "checkpoint" / "w").write_bytes(b"w")
    weight = {"path": "w", "size": 1, "sha256": sha256(b"w").hexdigest()}
    checkpoint = CheckpointManifest("checkpoint", "../../checkpoint", (StoredFile(**weight),), "llama", 2, config={})
    make(results, "resolve", checkpoint.to_json())
    make(
        results,
        "convert",
        {"format": formats.WEIGHTS, "files": [{**weight, "path": "../../../checkpoint/w"}], "tensors": {}},
    )
    make(results, "export", {"format": formats.ASSEMBLY, "classes": {"g": {**named("g"), "graph": "g"}}}, g=b"g")
    engine = EngineFile("e", sha256(b"e").hexdigest(), sha256(b"g").hexdigest())
    engines = EngineSetManifest(TARGET.backend, "1", TARGET.precision, {"name": "d"}, {}, {"e": engine}, 1)
    make(results, "build", engines.to_json(), e=b"e")
    make(results, "validate", validation(TARGET).to_json())
    answer = ReferencePrompt("A", (1,), (1,), "")
    logits = FileEntry("logits", sha256(b"logits").hexdigest())
    reference = ReferenceManifest(2, 1, (), logits, (answer,), None)
    make(results, "reference", reference.to_json(), logits=b"logits")
    make(results, "golden", golden(TARGET, golden_prompt("A")).to_json())
    make(results, "served", served(TARGET).to_json())
    make(results, "compare", {})
    precisions = [TARGET.precision, "w8a16"]  # the latter another machine may have
    model = {"source": "resources/demo-llama", "layers": [TARGET.layers], "precisions": precisions, "group_size": 16}
    make(results, "config", {"models": {MODEL: model}})
    lock = root / "locks" / f"{MODEL}.lock.json"
    updated_lock(results.root, MODEL, lock).lock.save(lock)
    assert {finding.status for finding in findings_of(root)} == {SAME}
    return root


@pytest.fixture
def damaged(tree: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tree, tmp_path / "tree"))


def findings_of(root: Path) -> list[Finding]:
    return verify(root / "results", {MODEL: root / "locks" / f"{MODEL}.lock.json"})


def look(root: Path) -> None:
    """Read statements and locks in each way; errors must be one line that names a file."""
    results = root / "results"
    lock = root / "locks" / f"{MODEL}.lock.json"
    for call in (
        lambda: Lock.load(lock), lambda: explain(CONFIG, Results(results), TARGET), lambda: updated_lock(results, MODEL, lock),  # noqa: E501
        lambda: list(lock_entries(results, MODEL)),
    ):  # fmt: skip
        try:
            call()
        except LockstepError as error:
            assert len(str(error).splitlines()) == 1 and str(root) in str(error)
        except FileNotFoundError as error:
            assert str(root) in str(error.filename)


def documents(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.json"))


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


RAW = {
    "empty": b"", "half a document": None, "null": b"null", "a number": b"7", "a text": b'"text"', "a list": b"[]",
    "an object": b"{}", "not a number": b'{"format": NaN}', "no text": b"\xff\xfe\x00",
    "half a character": b'{"format": "\\ud800"}', "deep": b"[" * 100_000, "deep and whole": b"[" * 900 + b"]" * 900,
    "a number without end": b"1" * 5000, "a key of no kind": b'{"entries_sha256": null, "format": null}',
    "a digest of nothing": b'{"format": "x", "entries_sha256": {}}',
}  # fmt: skip
WRONG = (
    None, 1, "text", ["text"], {"text": None}, {"text": "text"}, [{"sha256": "x", "file": "\0"}],
    [{"sha256": "x", "file": "x" * 5000}], nested(400),
)  # fmt: skip


def edited(value: Any) -> Iterator[Any]:
    """`value` with one entry of another type, or without it: those at the top, and the first of those below."""
    for name in sorted(value):
        yield {key: item for key, item in value.items() if key != name}
        for wrong in WRONG:
            yield {**value, name: wrong}
        inner = value[name]
        if isinstance(inner, dict) and inner:
            first = sorted(inner)[0]
            for wrong in WRONG:
                yield {**value, name: {**inner, first: wrong}}
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            for key in sorted(inner[0]):
                yield {**value, name: [{**inner[0], key: None}, *inner[1:]]}


def with_digest(value: Any) -> Any:
    """Return the document with right digests: only its content is wrong."""
    value = copy.deepcopy(value)
    predicate = value.get("predicate")
    if isinstance(predicate, dict) and predicate.pop(DIGEST, None):
        predicate[DIGEST] = sha256_json(value)
    if DIGEST_KEY in value:
        value[DIGEST_KEY] = sha256_json({name: item for name, item in value.items() if name != DIGEST_KEY})
    return value


@pytest.mark.parametrize("how", some(RAW, "half a document", "a list", "deep"))
def test_a_document_that_is_none_is_named_in_one_line(damaged: Path, how: str) -> None:
    for path in [
        path
        for path in documents(damaged)
        if path.name in ("checkpoint.json", "engines.json", "engines.statement.json", f"{MODEL}.lock.json")
    ]:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if RAW[how] is None else RAW[how])
        named = [finding for finding in findings_of(damaged) if finding.status != SAME]
        assert any(path.name in str(finding) for finding in named), (path, named)
        assert all(len(str(finding).splitlines()) == 1 for finding in named)
        look(damaged)
        path.write_bytes(data)


@pytest.mark.long
def test_entries_of_another_type_are_named_in_one_line(damaged: Path) -> None:
    """Digests and keys are right, so that the readers of each type get them."""
    tried = 0
    for path in documents(damaged):
        data = path.read_bytes()
        for value in edited(json.loads(data)):
            path.write_text(json.dumps(with_digest(value)))
            findings = findings_of(damaged)
            assert all(len(str(finding).splitlines()) == 1 for finding in findings)
            look(damaged)
            tried += 1
        path.write_bytes(data)
    assert tried > 1200


KINDS: dict[str, Callable[[Path], Any]] = {
    "a folder": lambda path: path.mkdir(),
    "links in a circle": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a pipe": lambda path: os.mkfifo(path),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", some(KINDS))
def test_what_is_no_file_is_named_in_one_line(damaged: Path, kind: str) -> None:
    for path in sorted(path for path in damaged.rglob("*") if path.is_file()):
        moved = path.rename(damaged / "moved")
        KINDS[kind](path)
        named = [finding for finding in findings_of(damaged) if finding.status != SAME]
        assert any(path.name in str(finding) for finding in named), (path, named)
        if kind not in ("a pipe", "an endless device"):
            look(damaged)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        moved.rename(path)


def test_what_builds_took_is_a_measurement(damaged: Path) -> None:
    """Each build with TensorRT writes it: `lockstep verify` rejected all of them."""
    (engines,) = damaged.rglob("engines.json")
    path = engines.with_name("build.costs.json")
    write_json(path, {"format": formats.BUILD_COSTS, "engines": {"exit": {"seconds": 1.5, "peak_memory_bytes": None}}})
    assert {finding.status for finding in findings_of(damaged)} == {SAME}
    path.write_bytes(path.read_bytes().replace(b"1.5", b"1.6"))
    (named,) = [finding for finding in findings_of(damaged) if finding.status != SAME]
    assert "build.costs.json" in str(named)


def test_a_folder_in_place_of_a_measurement_is_named(damaged: Path) -> None:
    """No statement names a speed report; a folder of its name was not noticed before."""
    next((damaged / "results" / MODEL).rglob("*.statement.json")).with_name("2.speed.json").mkdir()
    (named,) = [finding for finding in findings_of(damaged) if finding.status != SAME]
    assert "2.speed.json: no statement names it; it is a folder" in str(named)


def test_a_lock_of_the_release_before_is_read_once_and_written_anew(damaged: Path) -> None:
    """It had a place for each CPU."""
    path = damaged / "locks" / f"{MODEL}.lock.json"
    data = path.read_bytes()
    earlier = json.loads(data)
    (place,) = [where for where in earlier["locked"] if where.startswith("engines/")]
    earlier["locked"][f"{place} 0123456789ab"] = earlier["locked"].pop(place)
    path.write_text(json.dumps({**earlier, "format": "lockstep.lock/4"}))
    assert any("expected format 'lockstep.lock/5'" in finding.reason for finding in findings_of(damaged))
    updated_lock(damaged / "results", MODEL, path).lock.save(path)
    assert path.read_bytes() == data
