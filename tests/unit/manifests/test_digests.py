"""Files held against their digests, and manifests against their own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lockstep.artifacts.files import DIGEST_KEY, has_digest, read_json, sha256_file, write_json
from lockstep.errors import InputError
from lockstep.manifests import digest_cache
from lockstep.manifests.digest_cache import Expected, check_files


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that counts as large; the user's cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digest_cache, "LARGE", 100)
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 200)
    return path


def flip(path: Path, position: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


def hashed(monkeypatch: pytest.MonkeyPatch) -> list:
    calls = []
    monkeypatch.setattr(digest_cache, "sha256_file", lambda path: calls.append(path) or sha256_file(path))
    return calls


def test_a_large_file_is_hashed_once(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hashed(monkeypatch)
    assert digest_cache.digest(large) == digest_cache.digest(large) == sha256_file(large)
    assert len(calls) == 1
    digest_cache.digest(large, deep=True)
    assert len(calls) == 2


def test_what_this_process_wrote_is_not_hashed_again(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest_cache.remember(large, sha256_file(large))
    calls = hashed(monkeypatch)
    assert digest_cache.digest(large) == sha256_file(large) and not calls


@pytest.mark.parametrize("restore", [False, True], ids=["time as it comes", "time set back"])
def test_a_flipped_byte_is_named_though_the_file_is_large(large: Path, restore: bool) -> None:
    expected = Expected(large, digest_cache.digest(large), 200)
    check_files([expected], "convert again")
    before = large.stat()
    flip(large)
    if restore:
        os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(
        InputError,
        match=rf"{large}: expected sha256 \w{{64}}, found \w{{64}}: the file has "
        rf"changed; restore it or convert again",
    ):
        check_files([expected], "convert again")


def test_another_file_in_its_place_is_hashed(large: Path, tmp_path: Path) -> None:
    expected = digest_cache.digest(large)
    other = tmp_path / "other"
    other.write_bytes(b"b" * 200)
    os.utime(other, ns=(large.stat().st_atime_ns, large.stat().st_mtime_ns))
    os.replace(other, large)
    assert digest_cache.digest(large) != expected


@pytest.mark.parametrize("damage", [b"{", b"{}", b'{"format": "lockstep.seen/1"}', b"\xff"])
def test_a_damaged_memory_means_that_files_are_hashed(large: Path, tmp_path: Path, damage: bytes) -> None:
    digest_cache.digest(large)
    (memory_file,) = (tmp_path / "cache").rglob("*.json")
    memory_file.write_bytes(damage)
    assert digest_cache.digest(large) == sha256_file(large)


def test_a_memory_that_cannot_be_written_is_no_error(large: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert digest_cache.digest(large) == sha256_file(large)


def test_a_manifest_is_given_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_json(path, {"format": "f/1", "numbers": [1, 2.5], "text": "ü"})
    assert read_json(path, "f/1") == {"format": "f/1", "numbers": [1, 2.5], "text": "ü"}
    write_json(path, {**json.loads(path.read_text()), "numbers": []})  # an old digest is no part of the content
    assert read_json(path, "f/1")["numbers"] == []
    assert DIGEST_KEY not in read_json(path)
    earlier = path.read_text().replace(DIGEST_KEY, "sealed_sha256")
    path.write_text(earlier)
    assert read_json(path, "f/1") == {"format": "f/1", "numbers": [], "text": "ü"}
    assert has_digest(path.read_bytes()) and not has_digest(b'{"format": "f/1"}')
    path.write_text(earlier.replace("ü", "u"))
    with pytest.raises(InputError, match="the file is damaged"):
        read_json(path)


def test_each_flipped_byte_of_a_manifest_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    """All bytes, lowest bit: digits become other digits, keys other keys. Only spaces and the name of the digest are no
    content."""
    path = tmp_path / "manifest.json"
    value = {"format": "f/1", "num_heads": 8, "file": "entry.onnx", "list": [1, True, None, "x"]}
    write_json(path, value)
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data)
        flip(path, position)
        try:
            document = read_json(path, "f/1")
        except InputError as error:
            assert str(path) in str(error)
        else:
            assert {key: document[key] for key in value} == value
