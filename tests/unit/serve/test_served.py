"""The check `served`: it passes on the demo, and finds what a server could get wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from demo_model import CONFIG, LIMITS, TOLERANCES
from fine_tunes import make_fine_tunes
from scripted_chats import scripted_chats

from lockstep.artifacts.chat_template import ChatTemplate
from lockstep.artifacts.reports import GoldenReport, ServedReport
from lockstep.artifacts.weights import WeightsManifest
from lockstep.cli.main import main
from lockstep.errors import CheckError, InputError
from lockstep.manifests.manifest_files import failed_path
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.targets import Results, Target
from lockstep.verify.golden.check import check_engines
from lockstep.verify.served import check as served
from lockstep.verify.served.server import EngineFiles
from lockstep.verify.served.tools import calls_tools, tool_call
from lockstep_serve.answer_reader import AnswerPlan
from lockstep_serve.checked import open_server
from lockstep_serve.frames import Add, Frame
from lockstep_serve.openai import CompletionFormat
from lockstep_serve.run import listening
from lockstep_serve.service import Service
from lockstep_serve.settings import EngineOptions, ServedModelOptions, ServiceOptions
from lockstep_serve.supervisor import Supervisor
from shared import Shared
from some import some

TARGET = Target("demo-llama", "fp32", "all", "onnxruntime")


@pytest.fixture(scope="module")
def tree(references: Results, shared: Shared) -> Results:
    """`references` with a golden check."""

    def make(folder: Path) -> None:
        out = Results(folder).golden("demo-llama", "fp32", "all", "onnxruntime")
        out.parent.mkdir(parents=True)
        check_engines(
            references.assembly("demo-llama", "fp32"), references.weights("demo-llama", "fp32"),
            references.engines("demo-llama", "fp32", "onnxruntime"), references.reference("demo-llama", "all"), TARGET,
            TOLERANCES["fp32"], LIMITS, out, out.with_suffix(".speed.json"),
        )  # fmt: skip

    shared.folder("served", make)
    return references


@pytest.fixture
def golden_json(tree: Results, shared: Shared) -> Path:
    return Results(shared.root / "served").golden("demo-llama", "fp32", "all", "onnxruntime")


def run(tree: Results, golden_json: Path, out: Path, **options: Any) -> ServedReport:
    arguments: dict[str, Any] = {"limits": LIMITS, "target": TARGET, "tolerance": TOLERANCES["fp32"], **options}
    served.check(
        tree.assembly("demo-llama", "fp32"), tree.weights("demo-llama", "fp32"),
        tree.engines("demo-llama", "fp32", "onnxruntime"), tree.reference("demo-llama", "all"), golden_json, out=out,
        threads=1, open_server=open_server, **arguments,
    )  # fmt: skip
    return ServedReport.load(out)


def test_the_demo_is_served_as_golden_found_it(
    tree: Results, golden_json: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = run(tree, golden_json, tmp_path / "all.json")
    prompts = len(CONFIG.models["demo-llama"].golden.prompts)
    compared = {name: phase.requests for name, phase in report.phases.items()}
    phases = {"alone": prompts, "under load": 2 * prompts, "on a prefix": 2, "engine killed": prompts}
    chosen = {name: compared.pop(name) for name in ("sampled", "sampled, streamed")}
    assert compared == {**phases, "with drafts": prompts}
    assert len({*chosen.values(), len(report.sampling)}) == 1
    assert report.batch_invariant and report.tokens_differing == 0
    assert report.restarts == 1 and report.prefix_hit_tokens >= 64
    assert report.engine_digest == GoldenReport.load(golden_json).engine_digest
    assert "died: it ended with code -9; starting another" in capfd.readouterr().err, "for the job's log"


def _lose_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens sent before the engine died, less one: a token comes twice."""
    bring = Supervisor.resubmit

    def forget(self: Supervisor) -> None:
        for stream in self._service.streams:
            for active in stream.prompts:
                for choice in active.collector.completion.choices:
                    del choice.token_ids[-1:]
        bring(self)

    monkeypatch.setattr(Supervisor, "resubmit", forget)


def _mix_up_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second request gets the prompt of another."""
    from lockstep_serve.link import EngineLink

    send = EngineLink.send
    prompts = []

    def other(self: EngineLink, frame: Frame) -> None:
        if isinstance(frame, Add):
            prompts.append(frame.request.prompt_ids)
            frame = Add(frame.id, replace(frame.request, prompt_ids=prompts[-1 - frame.id % 2 :][0]))
        send(self, frame)

    monkeypatch.setattr(EngineLink, "send", other)


def _lose_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that leaves out every seventh chunk."""
    event = CompletionFormat.event
    counted = iter(range(1 << 30))
    monkeypatch.setattr(
        CompletionFormat, "event", lambda self, *arguments: event(self, *arguments) if next(counted) % 7 else b""
    )


def _keep_what_was_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose client left are not taken off the list."""
    monkeypatch.setattr(Service, "forget", lambda self, stream: None)


@pytest.mark.parametrize(("plant", "words"), some([
    (_mix_up_numbers, "step 0: expected token"),
    (_lose_the_last_token, "with the engine killed: step"),
    (_lose_pieces, "expected token|expected 24 tokens|expected \\d+ tokens"),
    (_keep_what_was_cancelled, "afterwards: expected no request"),
]))  # fmt: skip
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], words: str, tree: Results, golden_json: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plant(monkeypatch)
    out = tmp_path / "all.json"
    with pytest.raises(CheckError, match=words):
        run(tree, golden_json, out)
    assert not out.exists()
    report = ServedReport.load(failed_path(out))
    assert report.result == "fail" and report.failure and "\n" not in report.failure


@pytest.mark.long
def test_a_token_that_golden_did_not_give_is_found(tree: Results, golden_json: Path, tmp_path: Path) -> None:
    report = GoldenReport.load(golden_json)
    entry = report.prompts[0]
    wrong = (*entry.tokens[:5], entry.tokens[5] ^ 1, *entry.tokens[6:])
    replace(report, prompts=(replace(entry, tokens=wrong), *report.prompts[1:])).save(tmp_path / "golden.json")
    with pytest.raises(CheckError, match=r"alone: step 5: expected token \d+, found \d+"):
        run(tree, tmp_path / "golden.json", tmp_path / "all.json")


def test_a_golden_check_of_another_target_is_refused(tree: Results, golden_json: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected the golden check of demo-llama/fp32/2"):
        run(tree, golden_json, tmp_path / "2.json", target=replace(TARGET, layers=2))


def test_an_engine_set_that_does_not_open_is_told_in_one_line(tree: Results, golden_json: Path, tmp_path: Path) -> None:
    engines = tmp_path / "engines.json"
    value = json.loads(tree.engines("demo-llama", "fp32", "onnxruntime").read_text())
    engines.write_text(json.dumps({**value, "precision": "fp16"}))
    with pytest.raises(InputError) as caught:
        served.check(
            tree.assembly("demo-llama", "fp32"), tree.weights("demo-llama", "fp32"), engines,
            tree.reference("demo-llama", "all"), golden_json, TARGET, TOLERANCES["fp32"], LIMITS, tmp_path / "all.json",
            open_server=open_server,
        )  # fmt: skip
    assert "engines.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_busy_machine_fails_no_check(tree: Results) -> None:
    """With 25 processes for each core a request waited for more than the 60 s of `lockstep serve`."""
    paths = (tree.engines("demo-llama", "fp32", "onnxruntime"), tree.assembly("demo-llama", "fp32"))
    weights = tree.weights("demo-llama", "fp32")
    files = EngineFiles(*map(str, (*paths, weights)), "all", asdict(LIMITS), 1, None)
    limits = open_server(files, "demo-llama").limits
    assert min(limits.queue_timeout, limits.stall, limits.start, limits.slow_reader) >= 600


@pytest.mark.long
@pytest.mark.exports
def test_a_model_with_a_format_is_asked_for_a_call(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = scripted_chats(shared)
    assembly = tree.assembly("scripted", "fp32")
    weights = tree.weights("scripted", "fp32")
    limits = {**asdict(LIMITS), "max_seq_len": 800, "max_input_len": 800}
    engines = tree.engines("scripted", "fp32", "onnxruntime")
    options = EngineOptions(str(engines), str(assembly), str(weights), "all", limits, 1)

    async def ask() -> tuple[int, str | None]:
        template = ChatTemplate.open(assembly)
        service = Service(ServiceOptions([ServedModelOptions("scripted", Tokenizer.open(assembly), template)], options))
        with tempfile.TemporaryDirectory() as folder:
            socket = Path(folder, "socket")
            async with listening(service, socket):
                assert calls_tools(service)
                return await tool_call(service, socket)

    assert asyncio.run(ask()) == (2, None)
    monkeypatch.setattr(AnswerPlan, "call_id", lambda *arguments: secrets.token_hex(4))
    actual, fault = asyncio.run(ask())
    assert actual == 2 and fault is not None and "tool call: expected one answer, found" in fault


def test_a_server_of_several_models_is_checked_as_its_options_say(
    tree: Results, golden_json: Path, tmp_path: Path
) -> None:
    """Two fine-tunes of the demo, of which one has its weights, and memory for one."""
    folder = make_fine_tunes(tmp_path / "results", tree, CONFIG, ["tuned", "same"])
    results = Results(folder)
    for name in ("demo-llama", "tuned", "same"):
        golden = results.golden(name, "fp32", "all", "onnxruntime")
        golden.parent.mkdir(parents=True, exist_ok=True)
        report = GoldenReport.load(golden_json)
        replace(report, target=replace(TARGET, model=name)).save(golden)
        if name != "demo-llama":
            shutil.copytree(results.reference("demo-llama", "all").parent, results.reference(name, "all").parent)
    original = results.weights("demo-llama", "fp32")
    WeightsManifest.load(original).moved(lambda path: os.path.abspath(original.parent / path)).save(
        results.weights("same", "fp32")
    )
    arguments = ["serve", "--results", str(folder), "--check", "--max-loaded-models", "1", "demo-llama/fp32"]
    checked = CliRunner().invoke(main, [*arguments, "same/fp32"])
    assert checked.exit_code == 0, checked.output
    number = len(CONFIG.models["demo-llama"].golden.prompts)
    line = f"{number} prompts, alone and among those of all models: golden's tokens"
    assert checked.output.splitlines() == [f"demo-llama: {line}", f"same: {line}"]
    checked = CliRunner().invoke(main, [*arguments, "tuned/fp32"])
    assert checked.exit_code == 1
    assert re.search("tuned: prompt '.*', alone: step 0: expected token", checked.output), checked.output
