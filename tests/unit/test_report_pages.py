"""The report's pages: what stands first, what is marked, what is escaped, and that nothing is fetched."""

from __future__ import annotations

import shutil
import subprocess
import xml.etree.ElementTree as xml
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from reports import blocks, golden, golden_prompt, speed, validation

from lockstep.artifacts.engines import EngineFile, EngineSetManifest
from lockstep.artifacts.files import write_json
from lockstep.artifacts.reports import FAIL, GoldenPrompt, Report, TokenDifference
from lockstep.manifests.manifest_files import failed_path, record_path
from lockstep.report import charts, summary
from lockstep.report.checks import CHECKS
from lockstep.report.since_lock import Change
from lockstep.report.verdict import sentence
from lockstep.stages import STAGES
from lockstep.targets import Results, Target

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
TARGETS = [Target("m", "fp16", 2, "onnxruntime"), Target("m", "fp16", "all", "onnxruntime")]
NASTY = "<script>alert('x')</script> & \"quoted\" \x07\u202e"
DIFFERENCE = TokenDifference(1, 12, 99, 0.31, False, " a hilly", " city", " town")


class Parsed(HTMLParser):
    """A page as a browser reads it: what it links, what is marked, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.places: list[tuple[str, str]] = []
        self.marked: list[str] = []
        self.text, self.in_mark = "", False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.in_mark = self.in_mark or tag == "mark"
        self.places += [(tag, value or "") for name, value in attributes if name in ("href", "src", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.in_mark:
            self.marked.append(data)

    def handle_endtag(self, tag: str) -> None:
        self.in_mark = self.in_mark and tag != "mark"
        if tag in ("h1", "tr", "p"):
            self.text += "\n"


def prompt(text: str = "San Francisco is", **more: Any) -> GoldenPrompt:
    said = {"text_out": " a hilly city", "reference_text": " a hilly city", "max_logit_error": 0.25}
    return golden_prompt(text, **{**said, **more})


def checked(out: Path, report: Report, failure: str | None = None) -> None:
    """A check's report, as it is left by a check that passed or failed."""
    if failure is not None:
        replace(report, result=FAIL, failure=failure).save(failed_path(out))
        return
    report.save(out)
    write_json(record_path(out), {"format": "lockstep.build/1", "inputs": {}})


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


def pages(results: Results, **options: Any) -> dict[str, str]:
    summary.write(results, TARGETS, **options)
    return {path.name: path.read_text("utf-8") for path in sorted(results.report_page().parent.rglob("*.html"))}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """A target that fails at its second token, and one that passes."""
    results = Results(tmp_path / "results")
    fill(results, TARGETS[0], prompt())
    said = prompt(text_out=" a hilly town by", differences=(DIFFERENCE,))
    fill(results, TARGETS[1], said, prompt("Light"), failure="prompt 'San Francisco is', step 1: token 99")
    return results


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        (["pass"], "The only target passes."),
        (["pass"] * 4, "All 4 targets pass."),
        (["pass", "fail"], "Of 2 targets, 1 fails and 1 passes."),
        (["pass", "pass", "fail", "fail", "not run"], "Of 5 targets, 2 fail, 1 has not run and 2 pass."),
        (["fail"], "Of 1 target, 1 fails."),
        (["not run"] * 3, "No target has been checked yet."),
    ],
)
def test_the_verdict_is_one_sentence(verdicts: list[str], said: str) -> None:
    assert sentence(verdicts) == said


def test_the_first_page_opens_with_the_verdict_and_the_targets(results: Results) -> None:
    page = Parsed(pages(results)["index.html"])
    opening = page.text.partition("</style>")[0].rpartition("Of 2 targets, 1 fails and 1 passes.\n")[2]
    rows = [line for line in opening.splitlines() if line.startswith("m/")]
    assert rows[0].startswith("m/fp16/2/onnxruntimepass") and rows[1].startswith("m/fp16/all/onnxruntimefail")
    assert rows[1].endswith("golden: prompt 'San Francisco is', step 1: token 99")
    assert page.tags.index("h1") < page.tags.index("table") < page.tags.index("svg")


def test_each_check_of_the_table_of_stages_is_on_the_pages() -> None:
    assert {check.name for check in CHECKS} == {name for name, stage in STAGES.items() if stage.is_judged}


def test_pages_of_nothing_say_so(tmp_path: Path) -> None:
    made = pages(Results(tmp_path / "results"))
    assert "No target has been checked yet." in made["index.html"] and len(made) == 3
    assert all(">not run<" in page for page in made.values())


def test_the_first_differing_token_is_marked_with_its_margin(results: Results) -> None:
    page = Parsed(pages(results)["m-fp16-all-onnxruntime.html"])
    assert page.marked == [" town", " city"]
    assert "token 12 \u201c city\u201d in the reference, 99 \u201c town\u201d decoding freely" in page.text
    assert "the reference's margin is 0.31: a failure" in page.text


def test_a_token_that_is_as_likely_is_said_to_be_accepted(results: Results) -> None:
    entry = prompt(text_out=" a hilly town", differences=(replace(DIFFERENCE, accepted=True),))
    fill(results, TARGETS[0], entry)
    page = Parsed(pages(results)["m-fp16-2-onnxruntime.html"])
    assert page.marked == [" town", " city"] and "accepted, both tokens are equally likely" in page.text


def test_a_text_that_is_not_the_expected_one_is_marked_where_it_differs(results: Results) -> None:
    fill(results, TARGETS[0], prompt(expected=" a hilly place"))
    assert Parsed(pages(results)["m-fp16-2-onnxruntime.html"]).marked == ["city", "place"]


def test_errors_stand_beside_what_the_precision_costs_and_engines_with_what_built_them(results: Results) -> None:
    page = Parsed(pages(results)["m-fp16-2-onnxruntime.html"])
    for words in (
        "fp16, 2 layers: what the precision itself costs",
        "the precision itself costs 1.00e-01, 5.00e-01 passes",
        "onnxruntime 1.31",
        "AuthenticAMD x86_64",
        "2.5 kB",
        "cdcdcdcdcdcd",
        "ab" * 32,
    ):
        assert words in page.text


def test_speeds_of_cut_models_stand_apart_from_those_of_whole_ones(results: Results) -> None:
    fill(results, TARGETS[1], prompt())
    results.golden("m", "fp16", "all", "onnxruntime").with_name("all.failed.json").unlink()
    page = pages(results)["index.html"]
    _, whole, cut = page.partition("<h2>Files")[0].split("<h2>Speed")
    assert "m/fp16/all/" in whole and "m/fp16/2/" not in whole
    assert "m/fp16/2/" in cut and "m/fp16/all/" not in cut


def test_every_text_is_escaped(results: Results) -> None:
    entry = prompt(NASTY, text_out=NASTY, reference_text=NASTY[:5], expected=NASTY[:8])
    fill(results, TARGETS[1], entry, failure=NASTY)
    made = pages(results, since_lock={"m": [Change(NASTY)]})
    for page in made.values():
        assert "<script" not in page and "\x07" not in page and "script" not in Parsed(page).tags
    assert "<script>alert('x')</script> & \"quoted\" \u2407" in Parsed(made["index.html"]).text


def test_half_a_character_can_be_shown(results: Results) -> None:
    """As a text of its own it is no UTF-8; a page with it still is."""
    fill(results, TARGETS[1], prompt(), failure="found '\\ud800'")
    assert "found" in pages(results)["index.html"]
    from lockstep.report.markup import page

    assert page("\ud800", []).decode("utf-8")


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
    assert (
        "What changed since the lock of m</h2>\n<p>Nothing.</p>" in pages(results, since_lock={"m": []})["index.html"]
    )
    for page in pages(results, since_lock={"m": [Change("middle.onnx: 00 -> 11")]}).values():
        assert "middle.onnx: 00 -&gt; 11" in page


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ({"model": "m"}, {2, "all"}),
        ({"model": "m", "precision": "fp16", "backend": "onnxruntime"}, {2, "all"}),
        ({"model": "m", "precision": "fp16", "layers": "2"}, {2}),
        ({"model": "m", "precision": "fp32"}, set()),
        ({"model": "m", "precision": "fp16", "backend": "openvino"}, set()),
    ],
)
def test_a_target_is_told_what_changed_of_it_alone(results: Results, names: dict[str, str], shown: set) -> None:
    made = pages(results, since_lock={"m": [Change("00 -> 11", names)]})
    found = {target.layers for target in TARGETS if "00 -&gt; 11" in made[results.target_page(target).name]}
    assert found == shown and "00 -&gt; 11" in made["index.html"]


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
    write_json(out, {"format": "lockstep.golden/2", "engine_digest": "ab" * 32, "result": "pass", **damage})
    assert "Engines</h2>" in pages(results)["m-fp16-2-onnxruntime.html"]


def test_pages_are_the_same_bytes_each_time(results: Results) -> None:
    assert pages(results) == pages(results)


def test_an_error_that_is_not_finite_is_drawn_and_said() -> None:
    drawn = charts.error_by_layer([charts.error_line("a & b", blocks(0.0, 0.5, None, noise=0.01))])
    xml.fromstring(drawn)
    assert "not finite" in drawn and "a &amp; b: what the precision itself costs" in drawn


def test_a_browser_shows_the_pages(results: Results, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    pages(results)
    switches = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}")
    for page in sorted(results.report_page().parent.rglob("*.html")):
        command = [browser, *switches, "--dump-dom", page.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        assert "<h1>" in shown and ("1 fails" in shown or "onnxruntime:" in shown)
        assert "<svg" in shown
    picture = tmp_path / "page.png"
    command = [browser, *switches, f"--screenshot={picture}", results.report_page().as_uri()]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 10_000
