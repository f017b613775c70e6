"""The report and the server's page as phones and desks show them, light and dark; a picture of each for a person."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from reports import blocks, golden, golden_prompt, speed, validation

from browser import Browser, find
from lockstep.artifacts.engines import EngineFile, EngineSetManifest
from lockstep.artifacts.files import write_json
from lockstep.artifacts.quantization_error import QuantizationError
from lockstep.artifacts.reports import FAIL, GoldenPrompt, Report, TokenDifference
from lockstep.artifacts.statement import BuildKey, Statement, statement_path
from lockstep.manifests.manifest_files import failed_path
from lockstep.report import summary
from lockstep.targets import Results, Target
from lockstep_serve.page import page
from scripted_server import ScriptedServer

PICTURES = Path(os.environ["LOCKSTEP_SCREENSHOTS"])
SCREENS = [(width, height, dark) for width, height in ((390, 844), (1280, 800)) for dark in (False, True)]
NEEDS_GPU = {"cuda": "needs an NVIDIA GPU of compute capability 8.0 or higher, found none"}
STATUS = {
    "model": "demo-llama/fp16/all", "identity": "0123456789ab" * 5, "running": 3, "waiting": 2,
    "pages": {"total": 200, "used": 50, "cached": 30}, "heartbeat_age": 0.1, "draining": False,
}  # fmt: skip
ANSWER = (" Ice is less dense than water:", " its crystals hold", " their molecules further apart, so it floats.")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(find(), tmp_path_factory.mktemp("browser") / "profile")
    PICTURES.mkdir(parents=True, exist_ok=True)
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Targets that pass, one that fails, one of quantised weights, and one that cannot run here."""
    results = Results(tmp_path_factory.mktemp("results"))
    model = {"source": "demo-llama", "precisions": ["fp16"], "layers": [2, "all"]}
    model["backends"] = ["onnxruntime", "openvino", "cuda"]
    model["backend_precisions"] = {"openvino": ["w4a16", "bf16"]}
    write_json(results.config(), {"models": {"demo-llama": model}})
    kinds = (("fp16", "onnxruntime"), ("w4a16", "openvino"), ("bf16", "openvino"), ("fp16", "cuda"))
    targets = [
        Target("demo-llama", precision, layers, backend) for precision, backend in kinds for layers in (2, "all")
    ]
    for target in targets:
        _fill(results, target, fails=target.precision == "bf16")
    changes = {
        "golden": ["golden/bf16/openvino/all: San Francisco is a / 001: 12 -> 99"],
        "built": [f"engines/fp16/onnxruntime: middle.onnx: {'ab' * 32} -> {'cd' * 32}"],
        "new": ["engines/w4a16/openvino: not in the lock"],
    }
    summary.write(results, targets, {"demo-llama": changes}, NEEDS_GPU)
    return results


def _fill(results: Results, target: Target, fails: bool) -> None:
    names = (target.model, target.precision, target.layers, target.backend)
    engines = results.engines(target.model, target.precision, target.backend)
    device = {"architecture": "x86_64", "vendor": "AuthenticAMD", "isa": ["avx2"]}
    built = {name: EngineFile(f"{name}.bin", "cd" * 32, "ef" * 32) for name in ("embedding", "middle", "exit")}
    EngineSetManifest(target.backend, "1.31", target.precision, device, {"opset": None}, built, 1).save(engines)
    (engines.parent / "middle.bin").write_bytes(bytes(81200))
    if target.precision == "w4a16":
        error = QuantizationError(target.layers, "w4a16", 32, 0.5, 1.7, 0.19, 2.5, 58, 1, 900, 3.801, 3.536)
        error.save(results.quantization_error(*names[:3]))
    _stated(results.validation(*names[:3]), validation(target, blocks(2e-3, 5e-3, 1e-3, 4e-3, noise=9e-3)))
    if target.backend == "cuda":
        return
    difference = TokenDifference(1, 12, 99, 0.31, False, " a hilly", " city", " town")
    prompts = [
        _prompt("San Francisco is", " a hilly city on the coast of California, where cool"),
        _prompt("Light", " travels faster than anything else we know. It needs ab"),
    ]
    if fails:
        prompts[0] = replace(prompts[0], text_out=" a hilly town by", differences=(difference,), tokens_equal=False)
    report = golden(target, *prompts, max_logit_error=2.5e-2, logit_noise=4.6e-2)
    if fails:
        failed = replace(report, result=FAIL, failure="prompt 'San Francisco is', step 1: expected token 12, found 99")
        failed.save(failed_path(results.golden(*names)))
    else:
        _stated(results.golden(*names), report)
        speed(target, 2326.0 / len(target.backend), 708.0 / len(target.precision)).save(results.speed(*names))


def _prompt(text: str, answer: str) -> GoldenPrompt:
    return golden_prompt(text, text_out=answer, reference_text=answer, max_logit_error=2.5e-2)


def _stated(out: Path, report: Report) -> None:
    report.save(out)
    backend = {"name": "onnxruntime", "version": "1.31.1", "device": {}}
    key = BuildKey("golden", {}, {}, {}, {}, {"transformers": "5.23.0"}, backend)
    Statement(key, {}).save(statement_path(out))


def _take(browser: Browser, name: str, width: int, dark: bool) -> None:
    """Check that nothing stands out to the side, and take a picture."""
    assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert browser.run("matchMedia('(prefers-color-scheme: dark)').matches") == dark
    (PICTURES / f"{name}-{width}-{'dark' if dark else 'light'}.png").write_bytes(browser.picture())


@pytest.mark.parametrize(("width", "height", "dark"), SCREENS)
@pytest.mark.parametrize("name", ["report", "folded", "target"])
def test_the_report(results: Results, browser: Browser, name: str, width: int, height: int, dark: bool) -> None:
    target = Target("demo-llama", "bf16", "all", "openvino")
    path, texts = {
        "target": (results.target_page(target), ("demo-llama/bf16/all/openvino: fail", "a failure", "Error by layer"))
    }.get(name, (results.report_page(), ("4 of 6 targets that can run here pass", "1.31.1", "Bad unless intended")))
    browser.renew()
    browser.emulate(width, height, dark)
    browser.open(path.as_uri())
    for text in texts:
        assert text in browser.run("document.body.innerText"), text
    if name == "folded":
        browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true })")
        assert "first 2 layers" in browser.run("document.body.innerText")
    browser.emulate(width, browser.run("document.documentElement.scrollHeight"), dark)
    _take(browser, name, width, dark)


def _first(browser: Browser) -> None:
    assert "or try:" in browser.run("document.body.innerText")


def _answered(browser: Browser) -> None:
    browser.run("document.querySelector('.empty button').click()")
    browser.wait(f"at('stop').hidden && at('log').lastElementChild.textContent === {''.join(ANSWER).strip()!r}")


def _api(browser: Browser) -> None:
    browser.run("document.querySelector('nav a').click()")
    assert "POST v1/chat/completions" in browser.run("document.body.innerText")


@pytest.mark.parametrize(("width", "height", "dark"), SCREENS)
@pytest.mark.parametrize("scene", [_first, _answered, _api], ids=["first", "answered", "api"])
def test_the_servers_page(
    browser: Browser, scene: Callable[[Browser], None], width: int, height: int, dark: bool
) -> None:
    with ScriptedServer(lambda body, number: iter(ANSWER)) as server:
        server.pages["/"] = page()
        server.status = dict(STATUS)
        browser.renew()
        browser.emulate(width, height, dark)
        browser.open(f"{server.url}/")
        browser.wait("at('running').textContent === '3' && model")
        browser.wait("at('bar-used').style.width === '25%' && !at('bar-used').getAnimations().length")
        scene(browser)
        _take(browser, f"playground-{scene.__name__.strip('_')}", width, dark)
        assert not browser.said
