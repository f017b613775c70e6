"""`--json`: one JSON document on stdout, and the exit code that the text has."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from demo_model import ROOT
from recorded import recorded

from lockstep.artifacts.files import sha256_file, write_json
from lockstep.artifacts.summary import Reproduction
from lockstep.cli.main import main
from lockstep.config.load import load_config
from lockstep.provenance.lock import Lock
from lockstep.targets import Results, Target
from lockstep_serve.triton.repository.write import Repository, write_repository

TARGET = "demo-llama/fp16/all/onnxruntime"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with config and checkpoint, where a run has only written its config."""
    for name in ("config", "resources"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCKSTEP_CACHE", raising=False)
    write_json("results/config.json", load_config(None).dump())
    return tmp_path


def json_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[Any, int]:
    """The document and the exit code."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments), "--json"], prog_name="lockstep")
    return json.loads(capsys.readouterr().out), ended.value.code


def test_targets(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, code = json_of(capsys, "targets")
    target = {"name": TARGET, "model": "demo-llama", "precision": "fp16", "layers": "all", "backend": "onnxruntime"}
    assert code == 0 and len(document["targets"]) == 14 and target in document["targets"]


def test_generate_with_a_file_is_json_already(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", TARGET, "--input", "in", "--output", "out", "--json"], prog_name="lockstep")
    assert ended.value.code == 2 and "expected --json with --prompt, found it with --input" in capsys.readouterr().err


def test_summary(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, code = json_of(capsys, "summary")
    assert code == 0 and [row["verdict"] for row in document["targets"]] == ["not run"] * 14


def test_report(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, code = json_of(capsys, "report")
    assert code == 0 and document == {"report": "results/report/index.html", "summary": "results/summary.json"}
    assert all(Path(path).is_file() for path in document.values())


@pytest.mark.exports
def test_bundle(project: Path, demo: Results, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(demo, project / "results")
    document, code = json_of(capsys, "bundle", TARGET, "--out", "demo.tar")
    about = {"path": "demo.tar", "sha256": sha256_file("demo.tar"), "size": Path("demo.tar").stat().st_size}
    assert code == 0 and document == {"target": TARGET, "weights": False, **about}


def test_lock(project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks of a finished model: tests/workflow/test_locks.py has them."""
    monkeypatch.setattr("lockstep.provenance.lock_update.collect", lambda results, model: Lock(model, {}, {}))
    document, code = json_of(capsys, "lock")
    (entry,) = document["locks"]
    path = Path("locks/demo-llama.lock.json")
    about = {"path": str(path), "sha256": sha256_file(path), "size": path.stat().st_size}
    assert code == 0 and entry == {"model": "demo-llama", "changes": [], **about}


def test_triton_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = tmp_path / "repository"
    socket = tmp_path / "socket"
    write_repository(Repository((sys.executable, "--unix", str(socket)), socket, 4), repository)
    assert json_of(capsys, "triton", "--check", repository) == ({"repository": str(repository), "faults": []}, 0)
    (repository / "ensemble" / "config.pbtxt").unlink()
    document, code = json_of(capsys, "triton", "--check", repository)
    (fault,) = document["faults"]
    assert code == 1 and "ensemble/config.pbtxt" in fault


def test_explain(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, code = json_of(capsys, "explain", TARGET)
    assert code == 0 and document["target"] == TARGET
    steps = {step["stage"]: step for step in document["steps"]}
    assert steps["golden"]["reasons"] == [f"{steps['golden']['output']} is not there"]


def test_verify_fails_with_its_document(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, code = json_of(capsys, "verify")
    (finding,) = document["findings"]
    assert code == 1 and document["same"] == 0 and document["locks"] == []
    assert finding == {"status": "unknown", "name": "config.json", "reason": "no statement names it"}


def test_reproduce(project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the builds, which take minutes: tests/workflow/test_reproduce.py has them."""
    target = Target.parse(TARGET)
    artefacts = {"engines/fp16": "exit.onnx differs", "golden/fp16": None}
    record = Reproduction(target, "ab" * 32, "1.0", {}, rounds=1, same_rounds=0, artefacts=artefacts)
    monkeypatch.setattr("lockstep.provenance.reproduce.reproduce", lambda *arguments: record)
    assert json_of(capsys, "reproduce", TARGET) == (record.to_json(), 1)
    assert json_of(capsys, "reproduce", TARGET, "--tokens-only") == (record.to_json(), 0)
