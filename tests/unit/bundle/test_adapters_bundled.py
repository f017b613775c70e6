"""Bundles of a model with adapters: packed from a finished run, opened where nothing of it is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from demo_model import LIMITS, ROOT
from lora_folders import LIGHT, shared_lora
from recorded import recorded

from lockstep.artifacts.adapters import AdaptersManifest
from lockstep.artifacts.files import DIGEST_KEY, dump_json, sha256_json
from lockstep.bundle import pack as packing
from lockstep.bundle.archive import Entry
from lockstep.errors import InputError
from lockstep.targets import Results, Target
from shared import Shared

TARGET = Target("demo-llama", "fp16", "all", "onnxruntime")


@pytest.fixture(scope="module")
def results(demo: Results, shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A finished run of the demo with three adapters."""
    lora = shared_lora(demo, shared)
    adapted_results = recorded(lora, tmp_path_factory.mktemp("adapted") / "results")
    path = lora.adapters("demo-llama")
    manifest = AdaptersManifest.load(path)
    moved = {
        name: replace(adapter, folder=str(manifest.folder_of(path, name).resolve()))
        for name, adapter in manifest.adapters.items()
    }
    AdaptersManifest(moved).save(adapted_results.adapters("demo-llama"))
    return adapted_results


@pytest.fixture(scope="module")
def bundle(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packing.pack(results, TARGET, LIMITS, tmp_path_factory.mktemp("bundle") / "lora.tar", True)


def generate(bundle: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "lockstep", "generate", str(bundle), "--prompt", "Light"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=300)


def test_a_bundle_has_the_adapters(bundle: Path, results: Results, tmp_path: Path) -> None:
    again = packing.pack(results, TARGET, LIMITS, tmp_path / "again.tar", True)
    assert again.read_bytes() == bundle.read_bytes(), "the same bytes each time"
    assert str(ROOT).encode() not in bundle.read_bytes()
    process = generate(bundle, "--max-new-tokens", "16", "--adapter", "captain")
    assert process.returncode == 0 and process.stdout.strip() == LIGHT["captain"].strip(), process.stderr
    process = generate(bundle, "--adapter", "pirate")
    assert process.returncode == 2 and "expected one of captain, random, shakespeare; found 'pirate'" in process.stderr


def test_a_bundle_whose_adapters_lie_elsewhere_is_refused(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = packing.adapter_entries

    def outside(path: Path) -> Iterator[Entry]:
        for entry in entries(path):
            if entry.name.endswith("adapters.json"):
                moved = {
                    n: replace(adapter, folder=str(ROOT)) for n, adapter in AdaptersManifest.load(path).adapters.items()
                }
                bare = AdaptersManifest(moved).to_json()
                entry = Entry.of_bytes(entry.name, dump_json({**bare, DIGEST_KEY: sha256_json(bare)}).encode())
            yield entry

    monkeypatch.setattr(packing, "adapter_entries", outside)
    process = generate(packing.pack(results, TARGET, LIMITS, tmp_path / "lora.tar", True))
    assert (
        process.returncode == 2 and "adapter_config.json of sha256" in process.stderr and "found none" in process.stderr
    )


def test_an_adapter_that_changed_is_not_packed(results: Results, tmp_path: Path) -> None:
    tree = Results(shutil.copytree(results.root, tmp_path / "results"))
    path = tree.adapters("demo-llama")
    manifest = AdaptersManifest.load(path)
    folder = shutil.copytree(manifest.folder_of(path, "captain"), tmp_path / "captain")
    changed = {**manifest.adapters, "captain": replace(manifest.adapters["captain"], folder=str(folder))}
    AdaptersManifest(changed).save(path)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"adapters/0/adapter_config.json: expected .* found others"):
        packing.pack(tree, TARGET, LIMITS, tmp_path / "lora.tar", True)
    assert not (tmp_path / "lora.tar").exists()
