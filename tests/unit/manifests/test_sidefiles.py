"""Files that a manifest names: lost ones are found, whatever the manifest."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.artifacts.files import write_json
from lockstep.manifests.manifest_files import lost_files


@pytest.mark.parametrize(
    "manifest",
    [
        {"engines": {"entry": {"file": "a", "sha256": "0", "graph_sha256": "1"}}},
        {"classes": {"entry": {"graph": "a", "sha256": "0", "inputs": [{"name": "hidden", "shape": ["n", 4]}]}}},
        {"files": [{"path": "a", "sha256": "0", "size": 3}]},
        {"kinds": {"attention": {"prefill": {"graph": "a", "sha256": "0"}}}, "tokenizer": {"file": "a", "sha256": "0"}},
    ],
)
def test_a_file_that_is_gone_is_lost(tmp_path: Path, manifest: dict) -> None:
    write_json(tmp_path / "manifest.json", manifest)
    assert lost_files(tmp_path / "manifest.json") == [tmp_path / "a"]
    (tmp_path / "a").write_text("abc")
    assert lost_files(tmp_path / "manifest.json") == []


def test_a_file_of_another_size_is_lost(tmp_path: Path) -> None:
    write_json(tmp_path / "manifest.json", {"files": [{"path": "a", "sha256": "0", "size": 3}]})
    (tmp_path / "a").write_text("ab")
    assert lost_files(tmp_path / "manifest.json") == [tmp_path / "a"]


def test_names_without_a_digest_are_no_files(tmp_path: Path) -> None:
    write_json(tmp_path / "manifest.json", {"tensors": {"x": {"file": 0, "shape": [1]}}, "config": {"path": "nowhere"}})
    assert lost_files(tmp_path / "manifest.json") == []


def test_a_manifest_that_is_cut_short_is_lost_itself(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"files": [')
    assert lost_files(tmp_path / "manifest.json") == [tmp_path / "manifest.json"]
