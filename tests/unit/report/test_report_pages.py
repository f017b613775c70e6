"""The report's pages: the verdict comes first, differences are marked, texts escaped, and nothing is fetched."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from reports import blocks, golden, golden_prompt, speed, validation

import lockstep
from browser import Browser, find
from lockstep.artifacts.engines import EngineFile, EngineSetManifest
from lockstep.artifacts.files import write_json
from lockstep.artifacts.reports import FAIL, GoldenPrompt, Report, TokenDifference
from lockstep.artifacts.statement import BuildKey, Statement, statement_path
from lockstep.artifacts.summary import Summary
from lockstep.manifests.manifest_files import failed_path
from lockstep.report import summary
from lockstep.report.about import about
from lockstep.report.charts import Point, curves, lines, log_ticks
from lockstep.report.checks import CHECKS
from lockstep.report.verdict import advice, headline
from lockstep.stages import STAGES
from lockstep.targets import Results, Target

TARGETS = [Target("m", "fp16", 2, "onnxruntime"), Target("m", "fp16", "all", "onnxruntime")]
# Texts that stand out of their chart by more than a point.
OUTSIDE = """[...document.querySelectorAll('.chart')].flatMap((chart) => {
  const box = chart.getBoundingClientRect()
  return [...chart.querySelectorAll('text')].filter((text) => {
    const own = text.getBoundingClientRect()
    return own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1 || own.bottom > box.bottom + 1
  }).map((text) => text.textContent)
})"""
NASTY = "<script>alert('x')</script> & \"quoted\" \x07\u202e"
DIFFERENCE = TokenDifference(1, 12, 99, 0.31, False, " a hilly", " city", " town")


class Parsed(HTMLParser):
    """A page as a browser reads it: its links, marked parts, and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.places: list[tuple[str, str]] = []
        self.marked: list[str] = []
        self.text = ""
        self.in_mark = False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.in_mark = self.in_mark or tag == "mark"
        self.places += [(tag, value or "") for name, value in attributes if name in ("href", "src", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.text += " ".join(data.split("\n")) if data.strip() else ""
        if self.in_mark:
            self.marked.append(data)

    def handle_endtag(self, tag: str) -> None:
        self.in_mark = self.in_mark and tag != "mark"
        if tag in ("h1", "li", "p", "tr"):
            self.text += "\n"


def prompt(text: str = "San Francisco is", **options: Any) -> GoldenPrompt:
    fields = {"text_out": " a hilly city", "reference_text": " a hilly city", "max_logit_error": 0.25}
    return golden_prompt(text, **{**fields, **options})


def checked(out: Path, report: Report, failure: str | None = None) -> None:
    """A check's report, as it is left by a check that passed or failed."""
    if failure is not None:
        replace(report, result=FAIL, failure=failure).save(failed_path(out))
        return
    report.save(out)
    Statement(BuildKey("golden", {}, {}, {}, {}, {}), {}).save(statement_path(out))


def fill(results: Results, target: Target, *prompts: GoldenPrompt, failure: str | None = None) -> None:
    names = (target.model, target.precision, target.layers, target.backend)
    checked(results.validation(*names[:3]), validation(target, blocks(0.002, 0.002, 0.002, noise=0.01)))
    checked(results.golden(*names), golden(target, *prompts, max_logit_error=0.25), failure)
    speed(target, 1234.0, 99.0).save(results.speed(*names))
    engines = results.engines("m", "fp16", "onnxruntime")
    device = {"architecture": "x86_64", "vendor": "AuthenticAMD", "isa": ["avx"]}
    built = {"middle": EngineFile("middle.onnx", "cd" * 32, "ef" * 32)}
    EngineSetManifest("onnxruntime", "1.31", "fp16", device, {"opset": None}, built, 1).save(engines)
    engines.with_name("middle.onnx").write_bytes(bytes(2500))


def write_jobs(results: Results) -> None:
    """The config of the targets, and what Snakemake measured of a job."""
    model = {"source": "m", "precisions": ["fp16"], "layers": [2, "all"], "backends": ["onnxruntime"]}
    write_json(results.config(), {"models": {"m": model}})
    benchmark = results.root / "benchmarks" / "golden" / "m" / "fp16" / "onnxruntime" / "2.tsv"
    benchmark.parent.mkdir(parents=True)
    benchmark.write_text("s\th:m:s\tmax_rss\n4.25\t0:00:04\t100.00\n")


def pages(results: Results, **options: Any) -> dict[str, str]:
    summary.write(results, TARGETS, **options)
    return {path.name: path.read_text("utf-8") for path in sorted(results.report_page().parent.rglob("*.html"))}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """A target that fails at its second token, and one that passes."""
    results = Results(tmp_path / "results")
    fill(results, TARGETS[0], prompt())
    wrong_prompt = prompt(text_out=" a hilly town by", differences=(DIFFERENCE,))
    fill(results, TARGETS[1], wrong_prompt, prompt("Light"), failure="prompt 'San Francisco is', step 1: token 99")
    return results


GPU = "needs an NVIDIA GPU of compute capability 8.0 or higher, found none"
BF16 = "needs bf16 in the CPU (avx512_bf16 or amx_bf16), found none"


def rows_of(verdicts: list[str], on_results: Results) -> Summary:
    """Rows with these verdicts; "gpu", "bf16" and "other" did not run for lack of hardware."""
    blocked = {"gpu": ("fp16", "cuda"), "bf16": ("bf16", "openvino"), "other": ("fp32", "own")}
    kinds = [blocked.get(verdict, ("fp16", "onnxruntime")) for verdict in verdicts]
    targets = [Target("m", precision, layers, backend) for layers, (precision, backend) in enumerate(kinds, 1)]
    rows = summary.collect(on_results, targets, {}).targets
    rows_read = tuple(
        replace(row, verdict="not run" if verdict in blocked else verdict) for row, verdict in zip(rows, verdicts)
    )
    return Summary(rows_read, {"cuda": GPU, "bf16/openvino": BF16, "own": "it is Sunday"})


@pytest.mark.parametrize(
    ("verdicts", "sentence"),
    [
        (["pass"], "The only target passes."),
        (["pass"] * 4, "All 4 targets pass."),
        (["pass", "fail"], "1 of 2 targets passes, 1 fails."),
        (["pass", "pass", "fail", "fail", "not run"], "2 of 5 targets pass, 2 fail, 1 has not run."),
        (["fail"], "0 of 1 target pass, 1 fails."),
        (["not run"] * 3, "None of 3 targets has been checked yet."),
        (
            ["pass"] * 8 + ["gpu"] * 8 + ["bf16"] * 2,
            "8 of 8 targets that can run here pass; 8 need an NVIDIA GPU, 2 need bf16 in the CPU.",
        ),
        (["pass", "gpu"], "1 of 1 target that can run here passes; 1 needs an NVIDIA GPU."),
        (["pass", "fail", "gpu"], "1 of 2 targets that can run here passes, 1 fails; 1 needs an NVIDIA GPU."),
        (["not run", "gpu"], "None of 1 target that can run here has been checked yet; 1 needs an NVIDIA GPU."),
        (["gpu"] * 3, "No target can run here; 3 need an NVIDIA GPU."),
        (["pass", "other"], "1 of 1 target that can run here passes; 1 cannot: it is Sunday."),
    ],
)  # fmt: skip
def test_the_verdict_is_one_sentence(verdicts: list[str], sentence: str, tmp_path: Path) -> None:
    assert headline(rows_of(verdicts, Results(tmp_path))) == sentence


def test_the_fastest_target_whose_quality_passes_is_to_be_served(tmp_path: Path) -> None:
    """A faster one is named, with the reason; one cut to fewer layers is no model to serve."""
    targets = [Target("m", precision, "all", "onnxruntime") for precision in ("fp32", "w8a16", "w4a16")]
    rows = summary.collect(Results(tmp_path), [Target("m", "fp16", 2, "onnxruntime"), *targets], {}).targets
    speeds = (400.0, 100.0, 150.0, 200.0)
    candidates = [replace(row, verdict="pass", decode_tokens_per_s=speed) for row, speed in zip(rows, speeds)]
    *_, serve, faster = advice(Summary(tuple(candidates), {}))
    assert serve == "Serve: lockstep serve m/fp32/all/onnxruntime"
    assert faster.endswith("m/w4a16/all/onnxruntime, 2.00 times, whose perplexity was not measured")
    candidates[2:] = [
        replace(row, quantization_perplexity=change) for row, change in zip(candidates[2:], (-0.005, 0.515))
    ]
    meaning, serve, faster = advice(Summary(tuple(candidates), {}))
    assert "compute what their weights say" in meaning and serve.endswith("m/w8a16/all/onnxruntime")
    assert "1.33 times, whose perplexity is +51.5 % (at most +1 %)".replace(" %", "%") in faster
    candidates[1] = replace(candidates[1], decode_tokens_per_s=500.0)
    assert advice(Summary(tuple(candidates), {}))[-1] == "Faster: no other target that was measured"
    candidates[1] = replace(candidates[1], verdict="fail")
    assert advice(Summary(tuple(candidates), {}))[-1].endswith("m/fp32/all/onnxruntime, 3.33 times, which fails")
    assert advice(Summary(tuple(replace(row, verdict="fail") for row in candidates), {})) == []


def test_another_gpu_is_said_to_be_needed_where_there_is_one(tmp_path: Path) -> None:
    summary = replace(rows_of(["pass", "gpu"], Results(tmp_path)), not_run={"cuda": GPU.replace("none", "one of 7.5")})
    assert headline(summary).endswith("; 1 needs another NVIDIA GPU.")


def test_the_first_page_opens_with_name_verdict_date_machine_and_versions(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    page = Parsed(pages(results)["index.html"])
    opening = page.text.partition("Targets of m")[0].rpartition("Lockstep report")[2]
    name, verdict, why, *about = filter(None, map(str.strip, opening.splitlines()))
    assert (name, verdict) == ("m", "1 of 2 targets passes, 1 fails.")
    assert why == "m/fp16/all/onnxruntime: golden: prompt 'San Francisco is', step 1: token 99"
    assert about[0] == "written2023-11-14 22:13:20 UTC" and f"{os.cpu_count()} CPUs" in about[1]
    assert f"Lockstep {lockstep.__version__}, Python 3" in about[2]
    assert page.tags.index("h1") < page.tags.index("table") < page.tags.index("details")


def test_versions_are_those_that_the_statements_name(results: Results) -> None:
    for layers, version in ((2, "4.1"), ("all", "4.2")):
        path = statement_path(results.validation("m", "fp16", layers))
        backend = {"name": "onnxruntime", "version": "1.31", "device": {}}
        Statement(BuildKey("golden", {}, {}, {}, {}, {"transformers": version}, backend), {}).save(path)
    versions = about(results, ["m"])
    assert versions.programs.endswith(", onnxruntime 1.31")
    assert versions.packages == ["transformers 4.1", "transformers 4.2"]
    path.write_text("{")
    assert about(results, ["m"]).packages == ["transformers 4.1"], "one that is damaged is left out"


def test_a_precision_and_backend_is_one_row_with_its_depths_folded_in(results: Results) -> None:
    page = pages(results)["index.html"]
    body = Parsed(page.partition("<h2>Targets of m")[2].partition("<h2>")[0])
    _, row, depths, _, full_row, cut = [line for line in body.text.splitlines() if line][:6]
    assert row.startswith("fp16 on onnxruntimefail2.5e-011.0e-01"), "a depth that fails fails the row"
    assert body.tags.count("details") == 1 and "engines abababababab" in depths
    assert full_row.startswith("all layersfail") and cut.startswith("first 2 layerspass")


def test_each_check_of_the_table_of_stages_is_on_the_pages() -> None:
    assert {check.name for check in CHECKS} == {name for name, stage in STAGES.items() if stage.is_judged}


def test_pages_of_nothing_say_so(tmp_path: Path) -> None:
    written = pages(Results(tmp_path / "results"))
    assert "None of 2 targets has been checked yet." in written["index.html"] and len(written) == 3
    assert all(">not run<" in page for page in written.values())


def test_what_differs_is_marked_and_its_first_token_named_with_its_margin(results: Results) -> None:
    page = Parsed(pages(results)["m-fp16-all-onnxruntime.html"])
    assert page.marked == ["town by", "city"]
    assert "token 12 \u201c city\u201d in the reference, 99 \u201c town\u201d decoding freely" in page.text
    assert "the reference's margin is 0.31: a failure" in page.text


def test_a_token_that_is_as_likely_is_said_to_be_accepted(results: Results) -> None:
    entry = prompt(text_out=" a hilly town", differences=(replace(DIFFERENCE, accepted=True),))
    fill(results, TARGETS[0], entry)
    page = Parsed(pages(results)["m-fp16-2-onnxruntime.html"])
    assert page.marked == ["town", "city"] and "accepted, both tokens are equally likely" in page.text


def test_a_text_that_is_not_the_expected_one_is_marked_where_it_differs(results: Results) -> None:
    fill(results, TARGETS[0], prompt(expected=" a hilly place"))
    assert Parsed(pages(results)["m-fp16-2-onnxruntime.html"]).marked == ["city", "place"]


def test_errors_stand_beside_what_the_precision_costs_and_engines_with_what_built_them(results: Results) -> None:
    page = Parsed(pages(results)["m-fp16-2-onnxruntime.html"])
    for words in (
        "rounding errorpasses",
        "rounding error 1.00e-01, allowed 5.00e-01",
        "onnxruntime 1.31",
        "AuthenticAMD x86_64",
        "2.5 kB",
        "cdcdcdcdcdcd",
        "ab" * 32,
    ):
        assert words in page.text


def test_charts_show_errors_sizes_speeds_and_jobs_with_their_states(results: Results) -> None:
    """Without scripts; a value that is 0 or not finite is a gap of its line."""
    failed_path(results.golden("m", "fp16", "all", "onnxruntime")).unlink()
    fill(results, TARGETS[1], prompt())
    fill(results, TARGETS[0], prompt(), failure="another token")
    checked(results.validation("m", "fp16", 2), validation(TARGETS[0], blocks(0.0, 0.5, None, noise=0.01)))
    write_jobs(results)
    written = pages(results)
    tooltips = {name: re.findall("<title>([^<]*)</title>", page) for name, page in written.items()}
    target = tooltips["m-fp16-2-onnxruntime.html"]
    assert {"Error by layer", "1: 0.5", "2: 0.01", "0: 0.06", "Memory, MB", "Time, s", "golden: 4.25"} <= {*target}
    assert not {"0: 0.5", "0: 0", "2: 0.5"} & {*target}
    assert {"engines: 0.0025", "process at its peak: 105"} <= {*target}
    assert {"3: 0.25", "3: 0.1", "7: 0.5"} <= {*target} and "1: 50.5" not in {*target}, "its check failed"
    assert {"Speed, tokens/s", "1: 50.5", "4: 100"} <= {*tooltips["m-fp16-all-onnxruntime.html"]}
    index = tooltips["index.html"]
    assert {"Quality and speed", "fp16 on onnxruntime: 99", "Quality and size"} <= {*index}
    page = Parsed(written["index.html"])
    assert "Serve: lockstep serve m/fp16/all/onnxruntime" in page.text
    states = ("golden m/fp16/2/onnxruntime: fail", "golden m/fp16/all/onnxruntime: done", "convert m/fp16: not run")
    assert {*states} <= {*index}


def test_a_scale_encloses_its_values_in_few_ticks() -> None:
    assert log_ticks([0.3, 7]) == pytest.approx([0.2, 0.5, 1, 2, 5, 10])
    assert log_ticks([1e-9, 2]) == pytest.approx([1e-9, 1e-7, 1e-5, 1e-3, 0.1, 10])
    assert log_ticks([5]) == pytest.approx([5, 10])


def test_each_tick_is_labelled_up_to_the_highest() -> None:
    for chart in (
        curves("Error", "tokens", {"largest": [Point(2, 0.1), Point(7, 0.5)]}),
        lines("Error", "layer", ["3", "4"], {"largest": [0.1, 0.5]}),
    ):
        assert {"0.1", "0.2", "0.5"} <= {*re.findall("<text[^>]*>([^<]*)</text>", chart)}


def test_every_text_is_escaped(results: Results) -> None:
    entry = prompt(NASTY, text_out=NASTY, reference_text=NASTY[:5], expected=NASTY[:8])
    fill(results, TARGETS[1], entry, failure=NASTY)
    written = pages(results, since_lock={"m": {"built": [NASTY]}})
    for page in written.values():
        assert "<script" not in page and "\x07" not in page and "script" not in Parsed(page).tags
    assert "<script>alert('x')</script> & \"quoted\" \u2407" in Parsed(written["index.html"]).text


def test_no_page_asks_for_anything_from_elsewhere(results: Results) -> None:
    for name, page in pages(results).items():
        parsed = Parsed(page)
        assert not {"script", "img", "iframe", "object", "embed", "video"} & set(parsed.tags), name
        assert "@import" not in page and "url(" not in page
        for tag, place in parsed.places:
            assert place == "data:," if tag == "link" else tag == "a", name
            assert not place.startswith(("http:", "https:", "//", "/")), name


def test_every_link_leads_to_a_file(results: Results) -> None:
    write_json(results.config(), {})
    pages(results)
    for path in results.report_page().parent.rglob("*.html"):
        for place in (place for tag, place in Parsed(path.read_text("utf-8")).places if tag == "a"):
            assert (path.parent / place).is_file(), place


def test_what_changed_since_the_lock_stands_where_there_is_one(results: Results) -> None:
    assert "since the lock" not in pages(results)["index.html"]
    assert "Nothing: all that is here is as it was locked." in pages(results, since_lock={"m": {}})["index.html"]
    changed = pages(results, since_lock={"m": {"built": ["middle.onnx: 00 -> 11"]}})["index.html"]
    assert "middle.onnx: 00 -&gt; 11" in changed


def test_a_change_since_the_lock_is_said_to_be_bad_or_not_the_worst_first(results: Results) -> None:
    changes = {"new": ["a"], "built": ["b"], "golden": ["c", "d"]}
    page = Parsed(pages(results, since_lock={"m": changes})["index.html"]).text
    section = page.partition("What changed since the lock of m")[2]
    places = [section.index(words) for words in (
        "The tokens have changed (2). Bad unless intended",
        "Weights, graphs or engines have changed (1). Not bad where all checks pass",
        "There are new results (1). Not bad",
    )]  # fmt: skip
    assert places == sorted(places)


def test_options_are_words_and_no_json(results: Results) -> None:
    page = Parsed(pages(results)["m-fp16-2-onnxruntime.html"])
    assert "opset: null" in page.text and '{"opset' not in page.text


def test_the_page_of_a_target_that_is_none_any_more_goes(results: Results) -> None:
    pages(results)
    summary.write(results, TARGETS[:1])
    names = sorted(path.name for path in results.report_page().parent.rglob("*.html"))
    assert names == ["index.html", "m-fp16-2-onnxruntime.html"]


@pytest.mark.parametrize("damage", [{"prompts": [{"differences": []}]}, {"prompts": [], "tolerance": "x"}])
def test_a_report_of_another_version_is_no_page_that_cannot_be_made(results: Results, damage: dict) -> None:
    out = results.golden("m", "fp16", 2, "onnxruntime")
    write_json(out, {"format": "lockstep.golden/3", "engine_digest": "ab" * 32, "result": "pass", **damage})
    assert "Engines</h2>" in pages(results)["m-fp16-2-onnxruntime.html"]


def test_pages_are_the_same_bytes_each_time(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert pages(results) == pages(results)


def test_an_error_that_is_not_finite_is_said(results: Results) -> None:
    out = results.validation("m", "fp16", 2)
    checked(out, validation(TARGETS[0], blocks(0.0, 0.5, None, noise=0.01)))
    rows = Parsed(pages(results)["m-fp16-2-onnxruntime.html"].partition("<h2>Error by layer")[2]).text.splitlines()
    assert [row for row in rows if "hidden" in row] == [
        "0hidden0.0e+001.0e-026.0e-02",
        "1hidden5.0e-011.0e-026.0e-02",
        "2hiddennot finite1.0e-026.0e-02",
    ]


@pytest.mark.exports
def test_a_browser_shows_the_pages_on_a_phone_too(results: Results, tmp_path: Path) -> None:
    write_jobs(results)
    golden(TARGETS[0], prompt(), max_logit_error=None).save(results.golden("m", "fp16", 2, "onnxruntime"))
    pages(results, since_lock={"m": {"golden": ["a" * 300]}})
    browser = Browser(find(), tmp_path / "profile")
    try:
        for page in sorted(results.report_page().parent.rglob("*.html")):
            for width in (390, 1280):
                browser.renew()
                browser.emulate(width, 800)
                browser.open(page.as_uri())
                browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true })")
                assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), page
                headings = "[...document.querySelectorAll('td[data-label]')].filter((each) => each.checkVisibility())"
                assert browser.run(f"{headings}.every((each) => each.getBoundingClientRect().right <= {width})"), page
                # A cell without a value, which a phone leaves out.
                absent = browser.run(f"{headings}.filter((each) => each.innerText === '-').length")
                assert absent == (1 if width == 1280 and page.name == "index.html" else 0), page
                assert browser.run("document.querySelectorAll('.chart').length") >= 3, page
                assert browser.run(OUTSIDE) == [], f"{page}: texts that a chart cuts off"
            assert not browser.said
    finally:
        browser.close()
