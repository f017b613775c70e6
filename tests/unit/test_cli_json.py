"""`--json`: one JSON document on stdout, and the exit code that the text has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import shared_cache
from demo_model import ROOT

from lockstep.artifacts.files import write_json
from lockstep.artifacts.summary import Reproduction
from lockstep.cli.main import main
from lockstep.config.load import load_given
from lockstep.targets import Target

TARGET = "demo-llama/fp16/all/onnxruntime"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with config and checkpoint, where a run has only written its config."""
    for name in ("config", "resources"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCKSTEP_CACHE", raising=False)
    write_json("results/config.json", load_given(None).dump())
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[Any, int]:
    """The document and the exit code."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments), "--json"], prog_name="lockstep")
    return json.loads(capsys.readouterr().out), ended.value.code


def test_targets(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, code = told(capsys, "targets")
    one = {"name": TARGET, "model": "demo-llama", "precision": "fp16", "layers": "all", "backend": "onnxruntime"}
    assert code == 0 and len(found["targets"]) == 14 and one in found["targets"]


def test_targets_with_layers_are_text_only(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["targets", "--json", "--verbose"], prog_name="lockstep")
    assert ended.value.code == 2 and "expected --json or --verbose" in capsys.readouterr().err


def test_generate_with_a_file_is_json_already(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--target", TARGET, "--input", "in", "--output", "out", "--json"], prog_name="lockstep")
    assert ended.value.code == 2 and "expected --json with --prompt, found it with --input" in capsys.readouterr().err


def test_summary(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, code = told(capsys, "summary")
    assert code == 0 and [row["verdict"] for row in found["targets"]] == ["not run"] * 14


def test_explain(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, code = told(capsys, "explain", TARGET)
    assert code == 0 and found["target"] == TARGET
    steps = {step["stage"]: step for step in found["steps"]}
    assert steps["golden"]["reasons"] == [f"{steps['golden']['output']} is not there"]


def test_verify_fails_with_its_document(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, code = told(capsys, "verify")
    (finding,) = found["findings"]
    assert code == 1 and found["same"] == 0 and found["locks"] == []
    assert finding == {"status": "unknown", "name": "config.json", "reason": "no record names it"}


def test_diff(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = {"format": "lockstep.lock/3", "model": "m", "made with": {}, "checks": {}, "precisions": {}}
    for name, token in (("one", "5"), ("two", "6")):
        write_json(f"{name}.json", {**lock, "checkpoint": {"source": "x"}, "reference": {"all": {"Light": token}}})
    found, code = told(capsys, "diff", "one.json", "two.json")
    assert code == 1 and found == {"differences": [{"where": ["reference", "all", "Light"], "change": "5 -> 6"}]}
    assert told(capsys, "diff", "one.json", "one.json") == ({"differences": []}, 0)


def test_cache(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = project / "cache"
    shared_cache.convert(shared_cache.checkpoint(project), project / "made", folder)
    found, code = told(capsys, "cache", "ls", "--cache", folder)
    (entry,) = found["entries"]
    assert code == 0 and (entry["stage"], entry["of"]) == ("convert", "fp32") and found["num_entries"] == 1
    assert 0 < entry["size"] <= found["size"] and len(entry["key"]) == 64 and entry["last_use"].endswith("Z")
    assert told(capsys, "cache", "verify", "--cache", folder)[0]["wrong"] == []
    blob = max((folder / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    blob.chmod(0o600)
    blob.write_bytes(bytes(blob.stat().st_size))
    found, code = told(capsys, "cache", "verify", "--cache", folder)
    assert code == 1 and len(found["wrong"]) == 1
    found, code = told(capsys, "cache", "prune", "--cache", folder, "--max-size", "0B")
    assert code == 0 and found["dropped"]["entries"] == 1 and found["left"]["num_entries"] == 0


def test_reproduce(project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the builds, which take minutes: tests/workflow/test_reproduce.py has them."""
    target = Target.parse(TARGET)
    record = Reproduction(target, "ab" * 32, "1.0", {}, rounds=1, level="R2", levels={}, bytes_left_out={})
    monkeypatch.setattr("lockstep.provenance.reproduce.reproduce", lambda *arguments: record)
    assert told(capsys, "reproduce", TARGET) == (record.to_json(), 0)
    assert told(capsys, "reproduce", TARGET, "--at-least", "R3") == (record.to_json(), 1)
