"""Reproduce, statements and bundles on a run as a user makes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from checkout import Checkout

TARGET = "demo-llama/fp32/all"


@pytest.mark.long
def test_a_target_is_built_again_in_a_clean_folder_with_the_same_bytes(demo: Checkout) -> None:
    before = demo.digests()
    process = demo.run("lockstep", "reproduce", TARGET, "--rounds", "2", "--vary")
    *rows, last = process.stdout.splitlines()
    assert last == "The same in 2 of 2 builds, in results/demo-llama/fp32/reproduce/onnxruntime/all.json"
    assert all(row.startswith("same ") for row in rows)
    assert {row.split()[1].partition("/")[0] for row in rows} == {
        *("checkpoint", "engines", "golden", "graphs", "reference", "weights")
    }
    record = json.loads((demo.results / "demo-llama/fp32/reproduce/onnxruntime/all.json").read_text())
    assert record["same_rounds"] == record["rounds"] == 2 and not re.search(r"20\d\d-\d\d-\d\d", json.dumps(record))
    assert before == {name: digest for name, digest in demo.digests().items() if "/reproduce/" not in name}, (
        "nothing else was touched"
    )
    assert not demo.would_run()
    shown = {
        (str(row["layers"]), row["precision"]): row["reproduced"]
        for row in json.loads(demo.call("lockstep", "summary", "--json").stdout)["targets"]
    }
    assert shown == {("2", "fp32"): "-", ("all", "fp32"): "2 of 2"}
    assert demo.call("lockstep", "verify").returncode == 0


@pytest.mark.long
def test_a_stage_that_cannot_be_run_again_is_named_and_nothing_is_left(
    demo: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    package = demo.folder / "src/lockstep/export/__init__.py"
    package.write_text(package.read_text().replace("import gc\n", "raise RuntimeError('planted')\n", 1))  # before torch
    before = demo.digests()
    process = demo.run("lockstep", "reproduce", TARGET, "--rounds", "1", check=False)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].endswith(
        "expected export to succeed again in a clean folder, found: RuntimeError: planted"
    )
    assert demo.digests() == before
    assert not list((tmp_path / "scratch").glob("lockstep*"))


def test_a_bundle_says_elsewhere_what_its_target_says_here(finished: Checkout, tmp_path: Path) -> None:
    """Packed twice, run in an empty folder with its own weights and with those of a folder; one flipped byte, and it is
    refused."""
    prompt = ("--prompt", "San Francisco is a", "--max-new-tokens", "16")
    text = " hilly city on the coast of California, where cool\n"
    packed = [tmp_path / name for name in ("whole.tar", "again.tar", "apart.tar")]
    for path, options in zip(packed, (["--weights"], ["--weights"], [])):
        assert finished.call("lockstep", "bundle", TARGET, *options, "--out", str(path)).stdout == f"{path}\n"
    expected, again, apart = packed
    assert expected.read_bytes() == again.read_bytes()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert finished.run("lockstep", "generate", str(expected), *prompt, folder=elsewhere).stdout == text
    weights = ("--weights", str(finished.results / "demo-llama" / "fp32" / "weights.json"))
    assert finished.run("lockstep", "generate", str(apart), *weights, *prompt, folder=elsewhere).stdout == text
    data = bytearray(expected.read_bytes())
    data[len(data) // 2] ^= 1
    expected.write_bytes(data)
    for arguments, message in (
        ((str(expected),), "the bundle is damaged; copy it again"),
        ((str(apart),), "expected --weights, for the bundle holds none"),
        ((TARGET, *weights), "--weights: expected a bundle (.tar) to go with it"),
    ):
        process = finished.run("lockstep", "generate", *arguments, *prompt, folder=elsewhere, check=False)
        assert process.returncode == 2 and message in process.stderr and len(process.stderr.splitlines()) == 1
        assert not process.stdout


def test_the_statement_of_a_run_names_all_that_went_in(finished: Checkout) -> None:
    statement = json.loads(
        (finished.results / "demo-llama/fp32/engines/onnxruntime/engines.statement.json").read_text()
    )
    names = {item["name"] for item in statement["predicate"]["buildDefinition"]["resolvedDependencies"]}
    assert {
        "graphs/assembly.json",
        "graphs/middle.onnx",
        "checkpoint/config.json",
        "checkpoint/tokenizer.json",
        "onnxruntime",
        "numpy",
    } <= names
    assert str(finished.folder) not in json.dumps(statement)
