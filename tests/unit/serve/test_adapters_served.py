"""Adapters through servers and commands: names of models, `lora` in requests, Triton's spellings, several clients."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from click.testing import CliRunner, Result
from lora_folders import LIGHT, TARGET, TUNED, tuned_lora, tuned_texts
from test_serve_queue import READY

from lockstep.artifacts.adapters import AdaptersManifest
from lockstep.cli.main import main
from lockstep.runtime.target import open_model
from lockstep.targets import Results
from lockstep_serve.adapters import Adapters
from lockstep_serve.frames import Unload
from lockstep_serve.link import EngineLink
from real_server import RealServer
from shared import Shared


@pytest.fixture(scope="module")
def results(demo: Results, shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return tuned_lora(tmp_path_factory.mktemp("tuned") / "results", demo, shared)


@pytest.fixture(scope="module")
def server(results: Results) -> Iterator[RealServer]:
    with RealServer(results.root, TUNED, target=TARGET) as running:
        yield running


def post(server: RealServer, path: str, body: dict) -> tuple[int, dict]:
    status, _, data = server.request("POST", path, body)
    return status, json.loads(data)


def completion(server: RealServer, **body: object) -> dict:
    options = {"model": "demo-lora", "prompt": "Light", "max_tokens": 16, "temperature": 0, **body}
    status, answer = post(server, "/v1/completions", options)
    assert status == 200, answer
    return answer


@pytest.mark.long
def test_schedulers_see_which_adapters_run(server: RealServer) -> None:
    def requests_info() -> dict[str, str]:
        text = server.request("GET", "/metrics")[2].decode()
        line = next(line for line in text.splitlines() if line.startswith("lockstep:lora_requests_info"))
        return dict(re.findall(r'(\w+)="([^"]*)"', line))

    labels = {"model_name": "demo-lora", "max_lora": "4"}
    idle = {**labels, "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert requests_info() == idle
    with server.opened("Light", 200, model="demo-lora:captain", ignore_eos=True) as events:
        next(iter(events))
        assert requests_info() == {**idle, "running_lora_adapters": "captain"}
    server.wait_idle()
    assert requests_info() == idle


def test_an_adapter_is_a_model(server: RealServer) -> None:
    response = server.get("/v1/models")
    names = [entry["id"] for entry in response["data"]]
    assert names[:3] == ["demo-lora", "demo-lora:captain", "demo-lora:shakespeare"]
    assert [entry.get("parent") for entry in response["data"]][:3] == [None, "demo-lora", "demo-lora"]
    assert server.get("/v1/models/demo-lora:captain")["id"] == "demo-lora:captain"
    for name, text in LIGHT.items():
        model = "demo-lora" if name is None else f"demo-lora:{name}"
        answer = completion(server, model=model)
        assert answer["choices"][0]["text"].startswith(text) and answer["model"] == model
        assert completion(server, lora=name)["choices"][0]["text"].startswith(text)


def test_a_further_model_has_adapters_of_its_own(server: RealServer, results: Results) -> None:
    texts = tuned_texts(results)
    for name, text in texts.items():
        assert completion(server, model="tuned-lora", lora=name)["choices"][0]["text"] == text
    body = {"text_input": "Light", "max_tokens": 16, "exclude_input_in_output": True, "lora_task_id": 1}
    assert server.post("/v2/models/tuned-lora/generate", **body)["text_output"] == texts["captain"]


def test_a_chat_has_adapters_too(server: RealServer) -> None:
    body = {"model": "demo-lora:captain", "messages": [{"role": "user", "content": "Light"}], "temperature": 0}
    status, answer = post(server, "/v1/chat/completions", {**body, "max_tokens": 16})
    assert status == 200 and answer["choices"][0]["message"]["content"] == LIGHT["captain"]


@pytest.mark.parametrize(("body", "status", "line"), [
    ({"model": "demo-lora:pirate"},
        404,
        "model: expected one of demo-lora, demo-lora:captain, demo-lora:shakespeare, tuned-lora"),
    ({"model": "other"}, 404, "model: expected one of demo-lora, demo-lora:captain, demo-lora:shakespeare"),
    ({"lora": "pirate"}, 404, "lora: expected one of captain, shakespeare, found 'pirate'"),
    ({"model": "demo-lora:captain", "lora": "shakespeare"}, 400, "lora: expected 'captain' as in model"),
    ({"lora": 3}, 400, "lora"),
])  # fmt: skip
def test_an_unknown_adapter_is_404_with_those_that_are_there(
    server: RealServer, body: dict, status: int, line: str
) -> None:
    actual, answer = post(server, "/v1/completions", {"model": "demo-lora", "prompt": "Light", **body})
    assert actual == status and line in answer["error"]["message"]
    assert server.request("GET", "/v1/models/demo-lora:pirate")[0] == 404


def test_tritons_requests_name_adapters(server: RealServer) -> None:
    def generate(**options: object) -> tuple[int, dict]:
        body = {"text_input": "Light", "max_tokens": 16, "exclude_input_in_output": True, **options}
        return post(server, "/v2/models/ensemble/generate", body)

    for number, (name, text) in enumerate(LIGHT.items()):
        for parameters in ({"lora_task_id": number}, {"lora": name} if name else {}):
            status, answer = generate(**parameters)
            assert status == 200 and answer["text_output"].startswith(text), answer
    status, answer = generate(lora_task_id=3)
    assert status == 404 and "lora_task_id: expected 0 (none) to 2" in answer["error"]
    assert "captain, shakespeare" in answer["error"]
    status, answer = generate(lora="pirate")
    assert status == 404 and "lora: expected one of captain, shakespeare" in answer["error"]
    status, answer = generate(lora_task_id=1, lora="shakespeare")
    assert status == 400 and "lora: expected 'captain'" in answer["error"]
    status, answer = generate(lora_weights=[1.0], lora_config=[1, 1, 1])
    assert status == 400 and "not supported by this server" in answer["error"]


def test_a_stream_with_an_adapter_goes_on_in_an_engine_that_lacks_another_one(results: Results, tmp_path: Path) -> None:
    extra = {"model": "demo-lora:captain", "ignore_eos": True}
    tree = Results(Path(shutil.copytree(results.root, tmp_path / "results", copy_function=os.link)))
    path = tree.adapters("demo-lora")
    manifest = AdaptersManifest.load(path)
    folder = Path(shutil.copytree(manifest.folder_of(path, "shakespeare"), tmp_path / "shakespeare"))
    moved = replace(manifest.adapters["shakespeare"], folder=str(folder))
    AdaptersManifest({**manifest.adapters, "shakespeare": moved}).save(path)
    with RealServer(tree.root, target=TARGET) as server:
        body = {"prompt": "Light", "max_tokens": 200, "temperature": 0, **extra}
        full = post(server, "/v1/completions", body)[1]["choices"][0]["text"]
        with server.opened("Light", 200, **extra) as events:
            reader = iter(events)
            text = next(reader)["choices"][0]["text"]
            shutil.rmtree(folder)
            os.kill(server.engine_pid, signal.SIGKILL)
            text += "".join(event["choices"][0]["text"] for event in reader)
        status = server.wait_until(lambda status: status["restarts"] == 1)
        assert text == full and text.startswith(LIGHT["captain"])
        assert "expected" in status["lost_adapters"].pop("demo-lora:shakespeare") and not status["lost_adapters"]
        assert "warning: an adapter is not loaded again" in server.stderr
        assert server.request("POST", "/v1/completions", {"model": "demo-lora:shakespeare", "prompt": "a"})[0] == 404


def test_adapters_that_changed_stay_out_of_every_further_engine() -> None:
    sent: list[Unload] = []
    link = SimpleNamespace(send=sent.append)
    adapters = Adapters("demo", "", None, lambda name: False)
    for digests, names, lost in [
        ({"x": "1", "y": "2"}, ["x", "y"], set()),
        ({"x": "3", "y": "2"}, ["y"], {"x"}),
        ({"x": "3", "y": "2", "new": "4"}, ["y"], {"x"}),
        ({"x": "1", "y": "2"}, ["x", "y"], set()),
    ]:
        sent.clear()
        adapters.engine_started(cast(EngineLink, link), replace(READY, adapters={"": digests}))
        assert adapters.names == names and adapters.lost.keys() == lost
        assert {unload.name for unload in sent} == digests.keys() - set(names)


def test_generate_and_files_take_adapters(results: Results, tmp_path: Path) -> None:
    def generate(*arguments: str) -> Result:
        command = ["generate", TARGET, "--results", str(results.root), "--max-new-tokens", "16", *arguments]
        return CliRunner().invoke(main, command, prog_name="lockstep")

    generated = generate("--prompt", "Light", "--adapter", "captain")
    assert generated.exit_code == 0 and generated.stdout.strip() == LIGHT["captain"].strip()
    generated = generate("--prompt", "Light", "--adapter", "captain", "--json")
    assert generated.exit_code == 0 and json.loads(generated.stdout)["choices"][0]["text"] == LIGHT["captain"]
    generated = generate("--prompt", "Light", "--adapter", "pirate")
    assert generated.exit_code == 2 and "expected one of captain, shakespeare; found 'pirate'" in generated.stderr
    source = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    lines = [{"prompt": "Light", "lora": name} for name in ("captain", "shakespeare")] + [{"prompt": "Light"}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    generated = generate("--input", str(source), "--output", str(out))
    assert generated.exit_code == 0, generated.stderr
    texts = {record["line"]: record["choices"][0]["text"] for record in map(json.loads, out.read_text().splitlines())}
    assert texts[1] == LIGHT["captain"] and texts[2] == LIGHT["shakespeare"] and texts[3].startswith(LIGHT[None])  # type: ignore[arg-type]


def test_a_model_that_is_opened_by_its_targets_name_has_its_adapters(results: Results) -> None:
    model = open_model(f"{TARGET}/onnxruntime", results.root)
    model.set_adapter(0, "captain")
    assert model.adapters is not None and sorted(model.adapters.loaded) == ["captain", "shakespeare"]
    assert model.adapters.nbytes > 0 and np.array_equal(model.adapters.residency.places[:2], [0, -1])
