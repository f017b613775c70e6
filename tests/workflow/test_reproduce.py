"""Reproduce, provenance and bundles on a run as a user makes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from checkout import Checkout

TARGET = "demo-llama/fp16/all"


def test_a_target_is_built_again_in_a_clean_folder_with_the_same_bytes(demo: Checkout) -> None:
    before = demo.digests()
    process = demo.run("lockstep", "reproduce", TARGET, "--rounds", "1", "--at-least", "R4")
    rows = [line.split() for line in process.stdout.splitlines()]
    assert [row[0] for row in rows[1:6]] == ["R0", "R1", "R2", "R3", "R4"] and all(row[-3:] == ["1", "of", "1"] for row in rows[1:6])
    assert re.fullmatch(r"Level reached: R4, in results/demo-llama/fp16/reproduce/onnxruntime/all\.json", process.stdout.splitlines()[-1])
    record = json.loads((demo.results / "demo-llama/fp16/reproduce/onnxruntime/all.json").read_text())
    assert record["level"] == "R4" and record["rounds"] == 1 and not re.search(r"20\d\d-\d\d-\d\d", json.dumps(record))
    assert before == {name: digest for name, digest in demo.digests().items() if "/reproduce/" not in name}, "nothing else was touched"
    assert not demo.would_run()
    shown = {tuple(line.split()[1:3]): line.split()[6] for line in demo.run("lockstep", "summary").stdout.splitlines()[1:5]}
    assert shown == {("2", "fp32"): "-", ("all", "fp32"): "-", ("2", "fp16"): "-", ("all", "fp16"): "R4"}
    assert demo.run("lockstep", "verify").returncode == 0


def test_a_stage_that_cannot_be_run_again_is_named_and_nothing_is_left(demo: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    demo.append("src/lockstep/split/export.py", "\nraise RuntimeError('planted')\n")
    before = demo.digests()
    process = demo.run("lockstep", "reproduce", TARGET, "--rounds", "1", check=False)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].endswith("expected export to succeed again in a clean folder, found: RuntimeError: planted")
    assert demo.digests() == before
    assert not list((tmp_path / "scratch").iterdir())
