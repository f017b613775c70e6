"""The summary of finished targets, and its plots, from manifests written here."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from lockstep import plots, summary
from lockstep.errors import InputError
from lockstep.files import write_json
from lockstep.paths import Results, Target

TARGETS = [Target("m", "fp16", 2, "onnxruntime"), Target("m", "fp16", "all", "onnxruntime")]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    results = Results(tmp_path)
    write_json(results.engines("m", "fp16", "onnxruntime"), {"format": "lockstep.engines/1", "backend_version": "1.0", "device": {"type": "cpu", "architecture": "x86_64"}})
    for target, error in zip(TARGETS, (0.25, 0.0)):
        names = (target.model, target.precision, target.layers, target.backend)
        about = {"target": {"model": "m", "precision": "fp16", "layers": target.layers}, "result": "pass"}
        tensors = {"hidden": {"max_abs_error": error, "relative_error": error, "cosine": 1.0, "tolerance": 0.5}}
        blocks = [{"block": "middle", "layer": layer, "tensors": tensors} for layer in range(2)]
        write_json(results.validation(*names[:3]), {"format": "lockstep.validate/1", **about, "blocks": blocks})
        golden = {"engine_digest": "ab" * 32, "max_logit_error": error, "tolerance": 0.5, "prompts": [{"differences": [{}]}, {"differences": []}]}
        write_json(results.golden(*names), {"format": "lockstep.golden/1", **about, **golden})
        write_json(results.speed(*names), {"format": "lockstep.speed/1", "prefill_tokens_per_s": 1234.5, "decode_tokens_per_s": 0.0})
    return results


def test_each_target_is_a_row_in_json_csv_and_html(results: Results) -> None:
    summary.write(results, TARGETS)
    rows = json.loads(results.summary().read_text())["targets"]
    with open(results.summary().with_suffix(".csv"), newline="") as file:
        lines = list(csv.DictReader(file))
    assert [row["layers"] for row in rows] == [2, "all"] and [line["layers"] for line in lines] == ["2", "all"]
    assert rows[0]["tokens_differing"] == 1 and rows[0]["engine_digest"] == "ab" * 32
    assert rows[0]["device"] == lines[0]["device"] == "x86_64"
    assert results.report("targets.html").read_text().count("abababababab<") == 2


def test_the_table_has_whole_words_on_any_terminal(results: Results, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    summary.print_table(summary.collect(results, TARGETS))
    head, first, _ = capsys.readouterr().out.splitlines()
    assert "largest logit error" in head and "decode tokens/s" in head
    assert first.split() == ["m", "2", "fp16", "onnxruntime", "abababababab", "pass", "-", "2.5e-01", "1234", "0"]


def test_the_level_of_sameness_is_that_of_the_present_engines(results: Results) -> None:
    for layers, digest in ((2, "ab" * 32), ("all", "cd" * 32)):
        write_json(results.reproduction("m", "fp16", layers, "onnxruntime"), {"format": "lockstep.reproduce/1", "engine_digest": digest, "level": "R4"})
    assert [row["reproduced"] for row in summary.collect(results, TARGETS)["targets"]] == ["R4", "-"]


def test_the_error_of_the_engines_is_that_of_the_present_ones(results: Results) -> None:
    def compared(digest: str) -> list[float | None]:
        write_json(results.comparison("m", "fp16", "onnxruntime"), {"format": "lockstep.compare/1", "engine_digest": digest, "relative_error": 0.001})
        return [row["engine_error"] for row in summary.collect(results, TARGETS)["targets"]]

    assert [row["engine_error"] for row in summary.collect(results, TARGETS)["targets"]] == [None, None]
    assert compared("ab" * 32) == [0.001, 0.001] and compared("cd" * 32) == [None, None]


def test_a_missing_check_is_named(results: Results) -> None:
    results.golden("m", "fp16", "all", "onnxruntime").unlink()
    with pytest.raises(InputError, match="golden/onnxruntime/all.json: expected a file"):
        summary.write(results, TARGETS)
    assert not results.summary().exists()


def test_plots_are_the_same_bytes_each_time(results: Results) -> None:
    summary.write(results, TARGETS)
    validations = [results.validation("m", "fp16", layers) for layers in (2, "all")]
    seen = set()
    for name in ("a", "b"):
        plots.error_by_layer(validations, results.report(f"{name}.svg"))
        plots.speed(results.summary(), results.report(f"{name}.speed.svg"))
        seen.add((results.report(f"{name}.svg").read_bytes(), results.report(f"{name}.speed.svg").read_bytes()))
        for path in (results.report(f"{name}.svg"), results.report(f"{name}.speed.svg")):
            xml.parse(path)
    assert len(seen) == 1
    assert b"m/fp16/all" in seen.pop()[1]
