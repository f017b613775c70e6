"""The summary of finished targets, from manifests written here."""

from __future__ import annotations

import csv
import html
import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest
from reports import blocks, comparison, golden, golden_prompt, served, speed, validation

from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import write_json
from lockstep.artifacts.quantization_error import QuantizationError
from lockstep.artifacts.reports import QualityReport, Report, TokenDifference
from lockstep.artifacts.statement import BuildKey, Statement, statement_path
from lockstep.artifacts.summary import Reproduction, Summary
from lockstep.errors import CheckError
from lockstep.manifests.manifest_files import content
from lockstep.report import summary
from lockstep.stages import STAGES, Job
from lockstep.targets import Results, Target
from lockstep.verify.metrics import finish

TARGETS = [Target("m", "fp16", 2, "onnxruntime"), Target("m", "fp16", "all", "onnxruntime")]


def recorded(out: Path, report: Report, **inputs: Path) -> None:
    """A check's report, and what of its statement the summary looks at."""
    report.save(out)
    digests = {name: content(path) for name, path in inputs.items()}
    Statement(BuildKey("golden", {}, digests, {}, {}, {}), {}).save(statement_path(out))


@pytest.fixture
def results(tmp_path: Path) -> Results:
    results = Results(tmp_path)
    device = {"type": "cpu", "architecture": "x86_64"}
    engines = EngineSetManifest("onnxruntime", "1.0", "fp16", device, {}, builder_revision=1)
    engines.save(results.engines("m", "fp16", "onnxruntime"))
    for target, error in zip(TARGETS, (0.25, 0.0)):
        names = (target.model, target.precision, target.layers, target.backend)
        recorded(results.validation(*names[:3]), validation(target, blocks(error, error)))
        accepted = golden_prompt(differences=(TokenDifference(1, 2, 3, 0.0, True),))
        recorded(
            results.golden(*names),
            golden(target, accepted, golden_prompt("B"), max_logit_error=error),
            engines=results.engines("m", "fp16", "onnxruntime"),
        )
        speed(target, 1234.5, 0.0).save(results.speed(*names))
    return results


def test_each_target_is_a_row_in_json_csv_and_html(results: Results) -> None:
    summary.write(results, TARGETS)
    rows = json.loads(results.summary().read_text())["targets"]
    with open(results.summary().with_suffix(".csv"), newline="") as file:
        lines = list(csv.DictReader(file))
    assert [row["layers"] for row in rows] == [2, "all"] and [line["layers"] for line in lines] == ["2", "all"]
    assert rows[0]["tokens_differing"] == 1 and rows[0]["engine_digest"] == "ab" * 32
    assert rows[0]["device"] == lines[0]["device"] == "x86_64"
    assert results.report_page().read_text().count("engines abababababab") == 1


def test_the_table_has_whole_words_on_any_terminal(
    results: Results, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    summary.print_table(summary.collect(results, TARGETS))
    above, head, first, _ = capsys.readouterr().out.splitlines()
    assert above.split() == ["logit", "rounding", "prefill", "decode"]
    assert head.split() == ["target", "result", "error", "error", "tokens/s", "tokens/s"]
    assert first.split() == ["m/fp16/2/onnxruntime", "pass", "2.5e-01", "1.0e-01", "1234", "0"]


def quantized(results: Results, model: str) -> Target:
    QuantizationError(2, "w4a16", 32, 0.5, 1.5, 0.25, 2.5, 40, 3, 90, 5.5, 5.0).save(
        results.quantization_error(model, "w4a16", 2)
    )
    return Target(model, "w4a16", 2, "onnxruntime")


def test_quality_has_columns_where_weights_are_quantized(results: Results, capsys: pytest.CaptureFixture) -> None:
    targets = [TARGETS[0], quantized(results, "m")]
    summary.print_table(summary.collect(results, targets))
    above, head, full, small, *_ = capsys.readouterr().out.splitlines()
    assert above.split() == ["logit", "rounding", "prefill", "decode"] and "quality" in head
    assert small.split()[-4:] == ["perplexity", "+10.0%", "-", "-"]
    assert full.split()[-3:] == ["-", "1234", "0"]
    summary.write(results, targets)
    assert "perplexity +10.0%" in results.report_page().read_text()
    assert "quantization error" in results.report_page().read_text()
    summary.write(results, TARGETS)
    assert "quantization error" not in results.report_page().read_text()


def test_quality_is_held_to_the_configs_bound(results: Results) -> None:
    target = quantized(results, "m")
    names = {"model": "m", "precision": "w4a16", "layers": "2"}
    out = results.root / STAGES["quality"].output.format(**names)
    reference = {"reference": results.quantized_reference("m", "w4a16", 2)}
    recorded(out, QualityReport(result="pass", perplexity_change=0.1, max_perplexity_change=0.2))
    STAGES["quality"].run(Job("quality", names, reference, {"max_perplexity_change": 0.2}, out))
    (row,) = summary.collect(results, [target]).targets
    assert (row.quality, row.quality_in_words) == ("pass", "perplexity +10.0%")
    with pytest.raises(CheckError, match=r"at most \+5.0%.*max_perplexity_change.*found \+10.0% in w4a16; take"):
        STAGES["quality"].run(Job("quality", names, reference, {"max_perplexity_change": 0.05}, out))
    (row,) = summary.collect(results, [target]).targets
    assert row.verdict == row.quality == "fail" and "quality: perplexity: expected at most" in str(row.reason)
    assert row.quality_in_words == "perplexity +10.0%, too high"


def test_columns_that_are_least_needed_are_left_out_of_a_table_of_100_columns(
    results: Results, capsys: pytest.CaptureFixture
) -> None:
    targets = [TARGETS[0], quantized(results, "a-model-with-a-long-name")]
    summary.print_table(summary.collect(results, targets))
    above, head, *rows = capsys.readouterr().out.splitlines()[:4]
    assert above.split() == ["logit", "decode"] and "quality" in head
    assert max(map(len, rows)) <= 100 and rows[1].startswith(f"{targets[1]} ")
    summary.write(results, targets)
    assert "prefill tokens/s" in results.report_page().read_text(), "the report has all"
    longer = quantized(results, "m" * 90)
    summary.print_table(summary.collect(results, [TARGETS[0], longer]))
    assert f"{longer}  not run" in capsys.readouterr().out, "a name is never cut"


def test_targets_that_cannot_run_here_are_a_line_for_each_reason(
    results: Results, capsys: pytest.CaptureFixture
) -> None:
    reason = "needs an NVIDIA GPU of compute capability 8.0 or higher, found none"
    names = itertools.product(("fp16", "w8a16"), (2, "all"))
    cuda_targets = [Target("m", precision, layers, "cuda") for precision, layers in names]
    for target in cuda_targets:
        recorded(results.validation(target.model, target.precision, target.layers), validation(target, blocks(0.0)))
    rows = summary.collect(results, [*TARGETS, *cuda_targets], {"cuda": reason})
    summary.print_table(rows)
    summary.print_verdict(rows)
    *_, last, why, verdict = capsys.readouterr().out.splitlines()
    assert last.startswith("m/fp16/all/onnxruntime")
    assert why == f"4 targets (fp16, w8a16 on cuda): golden not run: {reason}"
    assert verdict == "2 of 2 targets that can run here pass; 4 need an NVIDIA GPU."


def test_a_rebuild_is_of_the_present_engines(results: Results) -> None:
    for layers, digest in ((2, "ab" * 32), ("all", "cd" * 32)):
        target = Target("m", "fp16", layers, "onnxruntime")
        reproduction = Reproduction(target, digest, "1.0", {}, rounds=1, same_rounds=1, artefacts={})
        reproduction.save(results.reproduction("m", "fp16", layers, "onnxruntime"))
    assert [row.reproduced for row in summary.collect(results, TARGETS).targets] == ["1 of 1", "-"]


def test_the_error_of_the_engines_is_that_of_the_present_ones(results: Results) -> None:
    def compared(digest: str) -> list[float | None]:
        recorded(results.root / "m/fp16/compare/onnxruntime.json", comparison(0.001, digest))
        return [row.engine_error for row in summary.collect(results, TARGETS).targets]

    assert [row.engine_error for row in summary.collect(results, TARGETS).targets] == [None, None]
    assert compared("ab" * 32) == [0.001, 0.001] and compared("cd" * 32) == [None, None]


def lines(results: Results, capsys: pytest.CaptureFixture) -> list[str]:
    """Return the terminal's table; JSON, CSV and the report's first page must have the same rows."""
    written = summary.write(results, TARGETS)
    rows = written.targets
    assert Summary.load(results.summary()) == written
    with open(results.summary().with_suffix(".csv"), newline="") as file:
        assert [(line["golden"], line["reason"]) for line in csv.DictReader(file)] == [
            (row.golden, row.reason or "") for row in rows
        ]
    page = html.unescape(results.report_page().read_text())
    assert all(f">{row.verdict}<" in page and (not row.reason or row.reason in page) for row in rows)
    assert all((row.verdict == "pass") == (row.reason is None) for row in rows)
    summary.print_table(written)
    return capsys.readouterr().out.splitlines()


def test_a_failed_check_is_a_row_with_its_reason_beside_an_earlier_pass_too(
    results: Results, capsys: pytest.CaptureFixture
) -> None:
    out = results.golden("m", "fp16", "all", "onnxruntime")
    report = golden(TARGETS[1], max_logit_error=3.0)
    for _ in range(2):
        with pytest.raises(CheckError, match="step 3: expected token 5, found 7; details in"):
            finish(out, report, "step 3: expected token 5, found 7")
        _, _, passed, failed, reason = lines(results, capsys)
        assert passed.split()[1] == "pass" and failed.split()[1:] == ["fail", "3.0e+00", "1.0e-01", "-", "-"]
        assert reason == "m/fp16/all/onnxruntime: golden: step 3: expected token 5, found 7"
        out.unlink(missing_ok=True)  # as Snakemake deletes what a job that failed would have made
    recorded(out, report)
    finish(out, report, None)
    assert len(lines(results, capsys)) == 4


def test_a_validation_that_failed_is_a_reason_though_the_golden_check_passed(
    results: Results, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(CheckError):
        finish(results.validation("m", "fp16", 2), validation(TARGETS[0]), "block middle: off")
    assert lines(results, capsys)[-1] == "m/fp16/2/onnxruntime: validate: block middle: off"


def test_what_has_not_run_is_not_run(results: Results, capsys: pytest.CaptureFixture) -> None:
    first, second = (results.golden("m", "fp16", layers, "onnxruntime") for layers in (2, "all"))
    first.unlink()
    statement_path(second).unlink()
    assert [line.partition(": golden not run: ")[2] for line in lines(results, capsys)[1:] if "golden" in line] == [
        "not made yet",
        f"no statement says how {second} was made",
    ]
    assert [row.golden for row in summary.collect(results, TARGETS).targets] == ["not run"] * 2


def test_a_pass_of_other_engines_is_none(results: Results, capsys: pytest.CaptureFixture) -> None:
    engines = results.engines("m", "fp16", "onnxruntime")
    write_json(engines, {**json.loads(engines.read_text()), "backend_version": "2.0"})
    assert [row.golden for row in summary.collect(results, TARGETS).targets] == ["not run"] * 2
    assert lines(results, capsys)[-1] == f"2 targets (fp16 on onnxruntime): golden not run: {engines} is another since"


def test_answers_of_a_server_that_were_held_against_another_reference_are_none(results: Results) -> None:
    reference = results.reference("m", 2)
    out = results.root / "m/fp16/served/onnxruntime/2.json"
    write_json(reference, {"layers": 2})
    recorded(out, served(TARGETS[0]), reference=reference)
    assert summary.collect(results, TARGETS).targets[0].served == "pass"
    write_json(reference, {"layers": 3})
    first = summary.collect(results, TARGETS).targets[0]
    assert first.served == "not run" and f"served not run: {reference} is another since" in str(first.reason)


def test_nothing_at_all_is_a_table_too(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    head, *rows = lines(Results(tmp_path), capsys)[:3]
    assert [row.split()[1:] for row in rows] == [["not", "run"]] * 2


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"format": "lockstep.golden/3"}', b"[" * 100_000])
def test_a_damaged_report_is_a_reason(results: Results, capsys: pytest.CaptureFixture, damage: bytes) -> None:
    for name in ("all.json", "all.statement.json", "all.speed.json"):
        path = results.golden("m", "fp16", "all", "onnxruntime").with_name(name)
        data = path.read_bytes()
        path.write_bytes(damage)
        printed = lines(results, capsys)
        assert len(printed) == (4 if name == "all.speed.json" else 5)
        path.write_bytes(data)


def test_a_summary_is_written_again_when_it_says_something_else(results: Results) -> None:
    summary.refresh(results)
    assert not results.summary().exists(), "there is none"
    summary.write(results, TARGETS)
    written = results.summary().stat().st_ino
    summary.refresh(results)
    assert results.summary().stat().st_ino == written
    results.golden("m", "fp16", "all", "onnxruntime").unlink()
    summary.refresh(results)
    assert [row.golden for row in Summary.load(results.summary()).targets] == ["pass", "not run"]
    results.summary().write_text("{")
    summary.refresh(results)
    assert results.summary().read_text() == "{", "who reads it says that it is damaged"


def test_a_report_that_goes_while_the_summary_is_made_is_not_run(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snakemake deletes a job's outputs before it begins, whatever other jobs run."""
    gone = results.engines("m", "fp16", "onnxruntime")

    def content_beside_another_job(path: Path) -> str:
        gone.unlink(missing_ok=True)
        raise FileNotFoundError(2, "gone", str(path))

    monkeypatch.setattr(summary, "content", content_beside_another_job)
    summary.summarise(results, TARGETS)
    rows = Summary.load(results.summary()).targets
    assert [row.golden for row in rows] == ["not run"] * 2 and f"{gone} is not there" in str(rows[0].reason)


@pytest.mark.parametrize("is_stale", [False, True])
def test_what_a_killed_process_left_of_a_page_goes(results: Results, is_stale: bool) -> None:
    summary.summarise(results, TARGETS)
    ended = subprocess.Popen(["true"])
    ended.wait()
    page = results.target_page(TARGETS[0])
    dead, living = (page.with_name(f".{page.name}.{pid}.tmp") for pid in (ended.pid, os.getppid()))
    for path in (dead, living):
        path.write_text("half a page")
    if is_stale:
        results.golden("m", "fp16", "all", "onnxruntime").unlink()
    summary.refresh(results)
    assert (dead.exists(), living.exists()) == (False, True)
